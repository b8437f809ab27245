// DeepSeek's EPLB placement (github.com/deepseek-ai/EPLB), hierarchical; global is one group on one node.
//
// 1. Groups of consecutive experts are packed to the nodes by falling load, equally many to each.
// 2. Within a node, whose experts stand in the order of its groups, every redundant slot goes to the
//    expert with the largest load per copy; ties to the expert with fewer copies, then the earlier, so
//    that a layer without load is spread evenly.
// 3. The node's replicas (first copies in order, then the further ones as they were granted) are packed
//    to its GPUs by falling load per copy.
// Packing takes equal weights in order and the lowest of the lightest bins with room; bins of one take
// the items in order, whatever they weigh, as the original does. Nothing keeps two copies of an expert
// off one GPU.
// Time O((E + P) log(E + P)).
#pragma once

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "copies.hpp"
#include "packing.hpp"

namespace eplb {

template <class Put>
void pack_as_deepseek(std::span<const double> weight, std::int32_t bins, Put&& put) {
    const auto items = static_cast<std::int32_t>(weight.size());
    if (items == bins) {
        for (std::int32_t i = 0; i < items; ++i) put(i, i, 0);
        return;
    }
    pack(weight, heaviest_first(weight), bins, items / bins, put);
}

// `slots` is [gpus * slots_per_gpu]; there are at least as many as experts. Groups divide over the
// nodes, experts over the groups, GPUs over the nodes. Loads are finite and not negative.
inline void place_deepseek(std::span<const double> load, std::int32_t groups, std::int32_t nodes,
                           std::int32_t gpus, std::int32_t slots_per_gpu, std::int32_t* slots) {
    const auto experts = static_cast<std::int32_t>(load.size());
    const std::int32_t group_size = experts / groups, node_gpus = gpus / nodes,
                       node_slots = node_gpus * slots_per_gpu, node_experts = experts / nodes;

    std::vector<double> group_load(groups);
    for (std::int32_t g = 0; g < groups; ++g)
        group_load[g] = std::accumulate(load.begin() + g * group_size, load.begin() + (g + 1) * group_size, 0.0);
    std::vector<std::int32_t> expert_of(experts);  // node after node
    pack_as_deepseek(group_load, nodes, [&](std::int32_t group, std::int32_t node, std::int32_t rank) {
        std::iota(expert_of.begin() + node * node_experts + rank * group_size,
                  expert_of.begin() + node * node_experts + (rank + 1) * group_size, group * group_size);
    });

    std::vector<double> node_load(node_experts), weight(node_slots);
    std::vector<std::int32_t> copies(node_experts), replica(node_slots);
    for (std::int32_t node = 0; node < nodes; ++node, slots += node_slots) {
        const std::int32_t* local = expert_of.data() + node * node_experts;
        for (std::int32_t e = 0; e < node_experts; ++e) node_load[e] = load[local[e]];
        copies.assign(node_experts, 1);
        std::iota(replica.begin(), replica.begin() + node_experts, 0);
        auto next = replica.begin() + node_experts;
        grant_copies(node_load, copies, node_slots - node_experts, kAnyNumber, FewestCopiesFirst{},
                     [&](std::int32_t e) { *next++ = e; });
        for (std::int32_t p = 0; p < node_slots; ++p) weight[p] = node_load[replica[p]] / copies[replica[p]];
        pack_as_deepseek(weight, node_gpus, [&](std::int32_t p, std::int32_t gpu, std::int32_t slot) {
            slots[gpu * slots_per_gpu + slot] = local[replica[p]];
        });
    }
}

}  // namespace eplb
