// One routing problem (a layer and a batch's tokens), its answer, and how an answer can fail.
#pragma once

#include <cstdint>
#include <span>

#include "gpu_set.hpp"
#include "placement.hpp"

namespace eplb {

// Tokens of one expert stay below 2^39, so that a GPU's tokens fit below its count of activated
// replicas in one 64-bit word (see Fill) and sums of 4,096 experts stay exact.
constexpr int kTokenBits = 39;
constexpr int kCountShift = 51;

// What a solver says of one problem. Bad tokens leave the answer unspecified.
enum class Outcome : std::int8_t { ok, bad_tokens };

// Who proved a bound, as eplb_opt.status.Proof.
enum class Proof : std::int8_t { none, count, matching, flow, k_demand, branching };

// A GPU's activated replicas and tokens in one word, the former first: comparing two words
// compares (activated, tokens).
using Fill = std::uint64_t;

// A sum carries into the count if there is a token: unlike a comparison, two such fit one vector.
constexpr Fill fill_of(std::int64_t tokens) {
    constexpr Fill one = Fill{1} << kCountShift;
    const auto t = static_cast<Fill>(tokens);
    return ((t + (one - 1)) & one) + t;
}
constexpr std::int64_t activated_in(Fill fill) { return static_cast<std::int64_t>(fill >> kCountShift); }
constexpr std::int64_t tokens_in(Fill fill) {
    return static_cast<std::int64_t>(fill & ((Fill{1} << kCountShift) - 1));
}

// Whether every count is in range and every live expert has a replica.
inline bool acceptable(const Layer& layer, const std::int64_t* tokens) {
    std::uint64_t any = 0;  // negative counts set its highest bit
    for (std::int32_t e = 0; e < layer.experts; ++e) any |= static_cast<std::uint64_t>(tokens[e]);
    bool stranded = false;
    for (const std::int32_t e : layer.absent) stranded |= tokens[e] != 0;
    return any >> kTokenBits == 0 && !stranded;
}

// 1 if negative: unlike a comparison, two such fit one vector. Of -x, whether there is a token.
constexpr std::uint64_t sign_of(std::int64_t x) { return static_cast<std::uint64_t>(x) >> 63; }
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return b == 0 ? 0 : (a + b - 1) / b; }

}  // namespace eplb
