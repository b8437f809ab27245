// Which GPU each row of a new placement goes to, when GPUs hold weights already: that fewest arrive.
//
// Rows to GPUs of a node is an assignment problem, and so is which node's rows go to which node, at the cost
// of the first; within a GPU what stays keeps its slot. Rows fit GPUs with as many filled slots. No
// placement that is the same but for the names of its GPUs (and nodes) takes fewer weights.
// Time O(G^2 S + N^2 (G / N)^3), with N nodes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "assignment.hpp"
#include "slot_keeping.hpp"

namespace eplb {

// `slots`, the new placement, and `previous` are [gpus, slots_per_gpu]; `nodes` divides the GPUs.
inline void reslot(const std::int32_t* previous, std::int32_t gpus, std::int32_t slots_per_gpu,
                   std::int32_t experts, std::int32_t nodes, std::int32_t* slots) {
    const std::int32_t width = slots_per_gpu, per_node = gpus / nodes;
    const auto filled = [&](const std::int32_t* row) {
        return std::count_if(row, row + width, [](std::int32_t e) { return e >= 0; });
    };
    std::vector<std::int32_t> held(experts, 0);
    // The weights that GPU `old` lacks for a row; more than all there are if it does not fit.
    const auto arrivals = [&](std::int32_t old, std::int32_t fresh) {
        const std::int32_t *old_row = previous + old * width, *row = slots + fresh * width;
        for (std::int32_t s = 0; s < width; ++s)
            if (old_row[s] >= 0) ++held[old_row[s]];
        std::int64_t missing = 0;
        for (std::int32_t s = 0; s < width; ++s)
            if (row[s] >= 0 && held[row[s]]-- <= 0) ++missing;
        for (std::int32_t s = 0; s < width; ++s) {
            if (old_row[s] >= 0) held[old_row[s]] = 0;
            if (row[s] >= 0) held[row[s]] = 0;
        }
        return filled(old_row) == filled(row) ? missing : std::int64_t{gpus} * width + missing;
    };

    std::vector<std::int64_t> node_cost(static_cast<std::size_t>(nodes) * nodes, 0);
    std::vector<std::vector<std::int32_t>> row_for(node_cost.size());  // of each GPU of the old node
    std::vector<std::int64_t> cost(static_cast<std::size_t>(per_node) * per_node);
    for (std::size_t pair = 0; pair < node_cost.size(); ++pair) {
        const auto old = static_cast<std::int32_t>(pair) / nodes * per_node,
                   fresh = static_cast<std::int32_t>(pair) % nodes * per_node;
        for (std::size_t i = 0; i < cost.size(); ++i)
            cost[i] = arrivals(old + static_cast<std::int32_t>(i) / per_node,
                               fresh + static_cast<std::int32_t>(i) % per_node);
        row_for[pair] = assign_rows(cost, per_node);
        for (std::int32_t g = 0; g < per_node; ++g)
            node_cost[pair] += cost[static_cast<std::size_t>(g) * per_node + row_for[pair][g]];
    }
    const std::vector<std::int32_t> node_for = assign_rows(node_cost, nodes);
    const std::vector<std::int32_t> rows(slots, slots + static_cast<std::size_t>(gpus) * width);
    for (std::int32_t g = 0; g < gpus; ++g) {
        const std::int32_t old = g / per_node, fresh = node_for[old];
        const std::int32_t from =
            fresh * per_node + row_for[static_cast<std::size_t>(old) * nodes + fresh][g % per_node];
        const std::span row(slots + g * width, static_cast<std::size_t>(width));
        std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(from) * width, width, row.begin());
        keep_slots({previous + g * width, static_cast<std::size_t>(width)}, row);
    }
}

}  // namespace eplb
