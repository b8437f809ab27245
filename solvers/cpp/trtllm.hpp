// TensorRT-LLM's placement (cpp/tensorrt_llm/runtime/moeLoadBalancer: doReplication, doPlacement).
//
// Replicate: every redundant slot goes to the expert with the largest load per copy, ties to the higher
// id; without any load the slots are dealt evenly, the remainder to the lower ids. Place: all replicas by
// falling load per copy, ties to the lower id, each to the lightest GPU with a free slot, the lowest on a
// tie. Nothing keeps two copies of an expert off one GPU.
// Time O((E + P) log(E + P)).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "copies.hpp"
#include "packing.hpp"

namespace eplb {

// `slots` is [gpus * slots_per_gpu]; there are at least as many as experts.
inline void place_trtllm(std::span<const double> load, std::int32_t gpus, std::int32_t slots_per_gpu,
                         std::int32_t* slots) {
    const auto experts = static_cast<std::int32_t>(load.size());
    const std::int32_t physical = gpus * slots_per_gpu;
    std::vector<std::int32_t> copies(experts, 1);
    if (std::all_of(load.begin(), load.end(), [](double l) { return l == 0; }))
        for (std::int32_t e = 0; e < experts; ++e) copies[e] = physical / experts + (e < physical % experts);
    else
        grant_copies(load, copies, physical - experts, kAnyNumber, HighestIdFirst{}, [](std::int32_t) {});

    std::vector<std::int32_t> replica;
    std::vector<double> weight;
    for (std::int32_t e = 0; e < experts; ++e) {
        replica.insert(replica.end(), copies[e], e);
        weight.insert(weight.end(), copies[e], load[e] / copies[e]);
    }
    pack(weight, heaviest_first(weight), gpus, slots_per_gpu,
         [&](std::int32_t p, std::int32_t gpu, std::int32_t slot) {
             slots[gpu * slots_per_gpu + slot] = replica[p];
         });
}

}  // namespace eplb
