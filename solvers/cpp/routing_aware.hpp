// Placements for optimally routed batches.
//
// 1. Copies by how often experts are live: one more, again and again, for the largest chance per copy.
// 2. Slots, by annealing swaps on the chance that a batch is above its floor: set by set up to kHallGpus GPUs
//    (hall.hpp), by the cavity method beyond (cavity.hpp).
// 3. Given batches, from there on by annealing on their optimal routings (batch_annealing.hpp). The last
//    quarter is held out: a layout that does not lower its mean makespan, or that raises the others', is
//    fitted to chance and dropped.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "annealing.hpp"
#include "batch_annealing.hpp"
#include "cavity.hpp"
#include "hall.hpp"
#include "liveness.hpp"

namespace eplb {

// `room` is the slots that each GPU may fill, at least as many as experts in all; `slots` [gpus, slots].
inline void place_for_liveness(const Liveness& of, std::span<const std::int32_t> room,
                               std::span<std::int32_t> slots) {
    constexpr std::int64_t kPerSlot = 50, kMost = 16000;
    const auto gpus = static_cast<std::int32_t>(room.size());
    place_apart(of.live, room, slots);
    Layout layout(slots, gpus, of.experts());
    const std::int64_t proposals = std::min(kPerSlot * static_cast<std::int64_t>(slots.size()), kMost);
    const auto done = [&](std::int64_t made) {
        return static_cast<double>(made) / static_cast<double>(proposals);
    };
    Draws draws(1);
    if (gpus <= kHallGpus) {
        HallJudge judge(of, layout);
        anneal(layout, judge, Cooling{1e-2, 2e-5}, draws, done);
    } else {
        CavityJudge judge(of, layout);
        anneal(layout, judge, Cooling{5e-3, 2e-6}, draws, done);
    }
}

// Anneals on batches until `max_work` is done; make(layout, tokens) makes a judge. `tokens` is [batches,
// experts].
template <class Make>
void place_for_batches(std::span<const std::int64_t> tokens, std::int32_t experts, std::int32_t gpus,
                       const Cooling& cooling, std::int64_t max_work, std::span<std::int32_t> slots, Make&& make) {
    constexpr std::int64_t kFewest = 8;  // batches that can spare some to hold out
    const auto batches = static_cast<std::int64_t>(tokens.size()) / experts;
    const std::int64_t held = batches < kFewest ? 0 : batches / 4;
    const auto seen = tokens.first((batches - held) * experts), unseen = tokens.last(held * experts);
    const std::vector<std::int32_t> start(slots.begin(), slots.end());
    const auto makespan = [&](std::span<const std::int64_t> of) {
        Layout layout(slots, gpus, experts);
        return of.empty() ? 0.0 : make(layout, of).makespan();
    };
    const double seen_before = makespan(seen), unseen_before = makespan(unseen);
    {
        Layout layout(slots, gpus, experts);
        auto judge = make(layout, seen);
        Draws draws(2);
        const std::int64_t begin = judge.work();
        anneal(layout, judge, cooling, draws, [&](std::int64_t made) {
            return static_cast<double>(judge.work() - begin + made) / static_cast<double>(max_work);
        });
    }
    const double seen_after = makespan(seen), unseen_after = makespan(unseen);
    if (seen_after > seen_before || (held > 0 && unseen_after >= unseen_before))
        std::copy(start.begin(), start.end(), slots.begin());
}

}  // namespace eplb
