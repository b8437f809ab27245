// How many copies each expert gets: one more, again and again, for the expert with the largest load
// per copy. The rules of the engines differ in their ties alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace eplb {

struct Share {
    double per_copy;
    std::int32_t copies, expert;
};

// Ties to the expert with fewer copies, then to the lower id: no load is spread evenly.
struct FewestCopiesFirst {
    bool operator()(const Share& a, const Share& b) const {
        if (a.per_copy != b.per_copy) return a.per_copy < b.per_copy;
        if (a.copies != b.copies) return a.copies > b.copies;
        return a.expert > b.expert;
    }
};

// Ties to the higher id.
struct HighestIdFirst {
    bool operator()(const Share& a, const Share& b) const {
        return a.per_copy != b.per_copy ? a.per_copy < b.per_copy : a.expert < b.expert;
    }
};

// Gives up to `count` copies on top of `copies`, no expert more than `most` in all, and calls
// granted(expert) for each. Returns how many found no taker. O((E + count) log E).
template <class Less, class Granted>
std::int32_t grant_copies(std::span<const double> load, std::span<std::int32_t> copies, std::int32_t count,
                          std::int32_t most, Less less, Granted&& granted) {
    std::vector<Share> heap;
    heap.reserve(load.size());
    for (std::int32_t e = 0; e < static_cast<std::int32_t>(load.size()); ++e)
        if (copies[e] < most) heap.push_back({load[e] / copies[e], copies[e], e});
    std::make_heap(heap.begin(), heap.end(), less);
    for (; count > 0 && !heap.empty(); --count) {
        std::pop_heap(heap.begin(), heap.end(), less);
        Share& top = heap.back();
        copies[top.expert] = ++top.copies;
        granted(top.expert);
        if (top.copies == most) {
            heap.pop_back();
            continue;
        }
        top.per_copy = load[top.expert] / top.copies;
        std::push_heap(heap.begin(), heap.end(), less);
    }
    return count;
}

constexpr std::int32_t kAnyNumber = std::numeric_limits<std::int32_t>::max();

}  // namespace eplb
