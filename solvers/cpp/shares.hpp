// Fixed shares: every replica of an expert takes its part of the expert's tokens, whatever else the
// batch holds. Both copies on one GPU count, unlike in other routers.
//
// Even shares: of expert e's t tokens its c replicas take t div c each, and the t mod c left over go one
// each to replicas e, e + 1, ... (mod c), so that the turn does not always start at low GPUs.
// Ends, c of them that rise to 1: replica i takes the tokens from rint(end_(i-1) t) to rint(end_i t).
//
// Time O(experts + slots).
#pragma once

#include <cstdint>
#include <span>

#include "problem.hpp"

namespace eplb {

struct Shares {
    std::span<const std::int32_t> first;  // [experts + 1], into
    std::span<const std::int32_t> slots;  // their replicas, by physical id
    std::span<const double> ends;         // as many as slots; none: even shares
};

// Halves go to the even integer, in the processor's default mode, as in `rint`, and without its call.
inline double round_to_even(double from_0_to_2_51) {
    constexpr double kOnes = 4503599627370496.0;  // 2^52: from here on doubles are whole
    return (from_0_to_2_51 + kOnes) - kOnes;
}

// `routed` is zero.
inline Outcome route_by_shares(const Layer& layer, const Shares& shares, const std::int64_t* tokens,
                               std::int64_t* routed) {
    if (!acceptable(layer, tokens)) return Outcome::bad_tokens;
    for (std::int32_t e = 0; e < layer.experts; ++e) {
        const std::int32_t begin = shares.first[e], copies = shares.first[e + 1] - begin;
        const std::int64_t t = tokens[e];
        if (copies == 1) {
            routed[shares.slots[begin]] = t;
        } else if (shares.ends.empty() && copies > 0) {
            const std::int64_t each = t / copies, left = t % copies;
            for (std::int32_t i = 0, at = e % copies; i < copies; ++i, at = at + 1 == copies ? 0 : at + 1)
                routed[shares.slots[begin + at]] = each + (i < left);
        } else {
            double taken = 0;
            for (std::int32_t i = begin; i < begin + copies; ++i) {
                const double end = round_to_even(shares.ends[i] * static_cast<double>(t));
                routed[shares.slots[i]] = static_cast<std::int64_t>(end - taken);
                taken = end;
            }
        }
    }
    return Outcome::ok;
}

}  // namespace eplb
