// Items of equal size into bins of equal room: the heaviest first, each to the lightest bin with
// room, the lowest on a tie (longest processing time first).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace eplb {

// The indices of `weight`, none negative, by falling weight; equal weights keep their order.
inline std::vector<std::int32_t> heaviest_first(std::span<const double> weight) {
    struct Item {
        std::uint64_t key;  // rises as the weight falls: the bits of doubles >= 0 rise with them
        std::int32_t index;
    };
    std::vector<Item> items(weight.size()), sorted(weight.size());
    for (std::size_t i = 0; i < items.size(); ++i)
        items[i] = {~std::bit_cast<std::uint64_t>(weight[i] + 0.0), static_cast<std::int32_t>(i)};  // + 0: no -0
    // By the upper half of the keys byte by byte, which all but orders them, then by insertion: less
    // than half the time of a sort by comparison at a few hundred items.
    std::array<std::array<std::uint32_t, 256>, 4> place{};
    const auto byte = [](const Item& item, int b) { return (item.key >> (32 + 8 * b)) & 255; };
    for (const Item& item : items)
        for (int b = 0; b < 4; ++b) ++place[b][byte(item, b)];
    for (int b = 0; b < 4; ++b) {
        std::exclusive_scan(place[b].begin(), place[b].end(), place[b].begin(), 0u);
        for (const Item& item : items) sorted[place[b][byte(item, b)]++] = item;
        items.swap(sorted);
    }
    for (std::size_t i = 1; i < items.size(); ++i) {
        const Item item = items[i];
        std::size_t hole = i;
        for (; hole > 0 && item.key < items[hole - 1].key; --hole) items[hole] = items[hole - 1];
        items[hole] = item;
    }
    std::vector<std::int32_t> order(items.size());
    std::transform(items.begin(), items.end(), order.begin(), [](const Item& item) { return item.index; });
    return order;
}

// Calls put(item, bin, place in the bin) for the items in `order`; there are bins * per_bin.
// O(items log bins).
template <class Put>
void pack(std::span<const double> weight, std::span<const std::int32_t> order, std::int32_t bins,
          std::int32_t per_bin, Put&& put) {
    using Bin = std::pair<double, std::int32_t>;
    std::vector<Bin> heap;  // the lightest first; equal at the start, so a heap already
    for (std::int32_t b = 0; b < bins; ++b) heap.emplace_back(0.0, b);
    std::vector<std::int32_t> used(bins, 0);
    for (const std::int32_t item : order) {
        Bin bin = heap.front();
        put(item, bin.second, used[bin.second]++);
        bin.first += weight[item];
        if (used[bin.second] == per_bin) {
            bin = heap.back();
            heap.pop_back();
        }
        // Sift down from the top: half the cost of taking the top out and putting it back.
        const std::size_t size = heap.size();
        std::size_t hole = 0;
        for (std::size_t child; (child = 2 * hole + 1) < size; hole = child) {
            if (child + 1 < size && heap[child + 1] < heap[child]) ++child;
            if (bin < heap[child]) break;
            heap[hole] = heap[child];
        }
        if (size > 0) heap[hole] = bin;
    }
}

}  // namespace eplb
