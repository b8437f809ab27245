// Items of equal size into bins of equal room: the heaviest first, each to the lightest bin with
// room, the lowest on a tie (longest processing time first).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "tournament.hpp"

namespace eplb {

// The indices of `weight`, none negative, by falling weight; equal weights keep their order.
//
// Of the bits of doubles >= 0, which rise with them, the first 24 that differ are sorted byte by byte, each
// with its index behind it in one number; what is left, all but in order, by insertion. A third to a half of
// the time of a sort by comparison at a few hundred items.
inline std::vector<std::int32_t> heaviest_first(std::span<const double> weight) {
    const std::size_t count = weight.size();
    std::vector<std::uint64_t> items(count), sorted(count);
    std::uint64_t least = ~std::uint64_t{0}, most = 0;
    for (std::size_t i = 0; i < count; ++i) {
        items[i] = ~std::bit_cast<std::uint64_t>(weight[i] + 0.0) >> 32 << 32;  // + 0: no -0
        least = std::min(least, items[i]), most = std::max(most, items[i]);
    }
    for (std::size_t i = 0; i < count; ++i) items[i] = (items[i] - least) | i;
    const int bits = count > 0 ? std::bit_width((most - least) >> 32) : 0;
    for (int shift = 32 + std::max(bits - 24, 0); shift < 32 + bits; shift += 8) {
        std::array<std::uint32_t, 257> place{};
        for (const std::uint64_t item : items) ++place[(item >> shift & 255) + 1];
        std::partial_sum(place.begin(), place.end(), place.begin());
        for (const std::uint64_t item : items) sorted[place[item >> shift & 255]++] = item;
        items.swap(sorted);
    }
    std::vector<std::int32_t> order(count);
    for (std::size_t i = 0; i < count; ++i) {
        const auto item = static_cast<std::int32_t>(items[i]);
        std::size_t hole = i;
        for (; hole > 0 && weight[order[hole - 1]] < weight[item]; --hole) order[hole] = order[hole - 1];
        order[hole] = item;
    }
    return order;
}

// Calls put(item, bin, place in the bin) for the items in `order`; there are bins * per_bin.
// O(items log bins).
template <class Put>
void pack(std::span<const double> weight, std::span<const std::int32_t> order, std::int32_t bins,
          std::int32_t per_bin, Put&& put) {
    struct Bin {
        double weight = 0;
        std::int32_t used = 0;
    };
    std::vector<Bin> packed(bins);
    Tournament lightest(bins, [](std::int32_t b) { return Rank::rising(0, b); });
    for (const std::int32_t item : order) {
        const std::int32_t b = lightest.first().player();
        Bin& bin = packed[b];
        put(item, b, bin.used++);
        bin.weight += weight[item];
        lightest.change(b, bin.used < per_bin ? Rank::rising(bin.weight, b) : Rank::last());
    }
}

}  // namespace eplb
