// How many copies each expert gets: one more, again and again, for the expert with the largest load
// per copy. The rules of the engines differ in their ties alone.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "tournament.hpp"

namespace eplb {

// What settles a tie, the least first; then the lower id.
struct FewestCopiesFirst {  // no load is spread evenly
    std::uint32_t operator()(std::uint32_t copies, std::uint32_t) const { return copies; }
};
struct HighestIdFirst {
    std::uint32_t operator()(std::uint32_t, std::uint32_t expert) const { return ~expert; }
};

// Gives up to `count` copies on top of `copies`, no expert more than `most` in all, and calls
// granted(expert) for each. Returns how many found no taker. O(E + count log E).
template <class Tie, class Granted>
std::int32_t grant_copies(std::span<const double> load, std::span<std::int32_t> copies, std::int32_t count,
                          std::int32_t most, Tie tie, Granted&& granted) {
    const auto rank = [&](std::int32_t e) {
        return copies[e] < most ? Rank::falling(load[e] / copies[e], tie(copies[e], e), e) : Rank::last();
    };
    Tournament neediest(static_cast<std::int32_t>(load.size()), rank);
    for (std::int32_t expert; count > 0 && (expert = neediest.first().player()) >= 0; --count) {
        ++copies[expert];
        granted(expert);
        neediest.change(expert, rank(expert));
    }
    return count;
}

constexpr std::int32_t kAnyNumber = std::numeric_limits<std::int32_t>::max();

}  // namespace eplb
