// DeepSeek's EPLB placement, global form (github.com/deepseek-ai/EPLB): replicate, then pack.
//
// Replicate: every redundant slot goes to the expert with the largest load per copy; ties to the expert
// with fewer copies, then the lower id, so that a layer without load is spread evenly. Pack: the
// replicas by falling load per copy (stable: first copies by id, then the further ones as they were
// granted) go to the lightest GPU with a free slot, the lowest on a tie. Nothing keeps two copies of
// an expert off one GPU.
// Time O((E + R) log(E + R) + P G) for R redundant of P slots.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace eplb {

// `slots` is [gpus * slots_per_gpu]; there are at least as many slots as experts. Loads are finite
// and not negative.
inline void place_deepseek(std::span<const double> load, std::int32_t gpus, std::int32_t slots_per_gpu,
                           std::int32_t* slots) {
    const auto experts = static_cast<std::int32_t>(load.size());
    const std::int32_t physical = gpus * slots_per_gpu;

    struct Next {  // the expert that a redundant slot would go to first
        double per_copy;
        std::int32_t copies, expert;
        bool operator<(const Next& o) const {
            if (per_copy != o.per_copy) return per_copy < o.per_copy;
            if (copies != o.copies) return copies > o.copies;
            return expert > o.expert;
        }
    };
    std::vector<Next> heap(experts);
    for (std::int32_t e = 0; e < experts; ++e) heap[e] = {load[e], 1, e};
    std::make_heap(heap.begin(), heap.end());
    std::vector<std::int32_t> replica(physical), copies(experts, 1);
    std::iota(replica.begin(), replica.begin() + experts, 0);
    for (std::int32_t p = experts; p < physical; ++p) {
        std::pop_heap(heap.begin(), heap.end());
        Next& top = heap.back();
        replica[p] = top.expert;
        copies[top.expert] = ++top.copies;
        top.per_copy = load[top.expert] / top.copies;
        std::push_heap(heap.begin(), heap.end());
    }

    std::vector<double> per_copy(experts);
    for (std::int32_t e = 0; e < experts; ++e) per_copy[e] = load[e] / copies[e];
    std::stable_sort(replica.begin(), replica.end(),
                     [&](std::int32_t a, std::int32_t b) { return per_copy[a] > per_copy[b]; });
    std::vector<double> filled(gpus, 0.0);
    std::vector<std::int32_t> used(gpus, 0);
    for (const std::int32_t e : replica) {
        std::int32_t best = -1;
        for (std::int32_t g = 0; g < gpus; ++g)
            if (used[g] < slots_per_gpu && (best < 0 || filled[g] < filled[best])) best = g;
        slots[best * slots_per_gpu + used[best]++] = e;
        filled[best] += per_copy[e];
    }
}

}  // namespace eplb
