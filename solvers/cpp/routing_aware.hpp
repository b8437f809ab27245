// Placements for optimally routed batches.
//
// 1. Copies by how often experts are live (live_copies.hpp).
// 2. Slots, by annealing swaps on the chance that a batch is above its floor: set by set up to kHallGpus GPUs
//    (hall.hpp), by the cavity method beyond (cavity.hpp).
// 3. For other objectives than activations, from there on by annealing on solved batches (batch_annealing.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "annealing.hpp"
#include "batch_annealing.hpp"
#include "cavity.hpp"
#include "copies.hpp"
#include "hall.hpp"
#include "live_copies.hpp"
#include "liveness.hpp"

namespace eplb {

// `room` is the slots that each GPU may fill, at least as many as experts in all; `slots` [gpus, slots].
inline void place_for_liveness(const Liveness& of, std::span<const std::int32_t> room,
                               std::span<std::int32_t> slots) {
    constexpr std::int64_t kSetBySet = 6500, kPerSlot = 70;
    const auto gpus = static_cast<std::int32_t>(room.size());
    const Spare spare(room, of.experts());
    place_apart(of.live, copies_for_liveness(of, spare.most, spare.copies, spare.most), room, slots);
    Layout layout(slots, gpus, of.experts());
    Draws draws(1);
    const auto annealed = [&](auto& judge, std::int64_t proposals, const Cooling& cooling) {
        anneal(layout, judge, cooling, draws,
               [&](std::int64_t made) { return static_cast<double>(made) / static_cast<double>(proposals); });
    };
    if (gpus <= kHallGpus) {
        HallJudge judge(of, layout);
        annealed(judge, kSetBySet, Cooling{2e-3, 1e-5});
    } else {
        CavityJudge judge(of, layout);
        annealed(judge, kPerSlot * static_cast<std::int64_t>(slots.size()), Cooling{5e-3, 2e-6});
    }
}

// Slots by the mean of what solve(layer, tokens of a batch) makes the makespan, which does not rise: from `slots`,
// or from a packing by tokens where that is faster, until `max_work` batches are solved. `tokens` is [batches,
// experts].
template <class Solve>
void place_for_solved(std::span<const std::int64_t> tokens, std::span<const std::int32_t> room,
                      std::int64_t max_work, std::int32_t experts, std::span<std::int32_t> slots,
                      const Solve& solve) {
    const auto gpus = static_cast<std::int32_t>(room.size());
    const auto makespan = [&](std::span<std::int32_t> of) {
        Layout layout(of, gpus, experts);
        return SolvedBatches(layout, tokens, solve).cost();
    };
    std::vector<double> load(experts, 0.0);
    for (std::size_t i = 0; i < tokens.size(); ++i) load[i % experts] += static_cast<double>(tokens[i]);
    std::vector<std::int32_t> by_tokens(slots.size());
    const Spare spare(room, experts);
    std::vector<std::int32_t> copies(experts, 1);
    grant_copies(load, copies, spare.copies, spare.most, FewestCopiesFirst{}, [](std::int32_t) {});
    place_apart(load, copies, room, by_tokens);
    double start = makespan(slots);
    if (const double packed = makespan(by_tokens); packed < start) {
        start = packed;
        std::copy(by_tokens.begin(), by_tokens.end(), slots.begin());
    }
    const std::vector<std::int32_t> first(slots.begin(), slots.end());
    Layout layout(slots, gpus, experts);
    SolvedBatches judge(layout, tokens, solve);
    const std::int64_t begin = judge.work();
    Draws draws(2);
    anneal(layout, judge, Cooling{1e-3 * start, 1e-5 * start}, draws, [&](std::int64_t made) {
        return static_cast<double>(judge.work() - begin + made) / static_cast<double>(max_work);
    });
    if (makespan(slots) > start) layout.restore(first);
}

}  // namespace eplb
