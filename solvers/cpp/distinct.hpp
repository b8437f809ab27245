// Repairs copies that share a GPU, without raising the peak more than need be.
//
// Each node is repaired by itself: an expert that has all its slots on one keeps them there.
// 1. Copies beyond one per GPU with filled slots: the expert's last slot on a GPU that holds it more than
//    once (the last such GPU) goes to the expert with the largest load per copy that has fewer copies than
//    that; ties to fewer copies, then the lower id. If none has, the slot is freed.
// 2. Each further copy on a GPU, by GPU and slot, is swapped for the entry of another GPU: one that lacks the
//    expert, for an entry that it holds more often than the first GPU does (or a freed slot). If GPUs have
//    equally many slots there always is one, and the number of shared copies falls with each swap. The
//    pair's larger load then decides; ties to the lower GPU, then the lower slot.
// 3. While the peak is above what it was, swaps of two entries between the fullest GPU (the lowest on a tie)
//    and another that keep copies apart and lower the larger load of the pair: the best, ties to the lower
//    slot, GPU, slot there. It ends when no swap helps.
// Time O(P^2) in a bad layer; one pass over the slots where nothing is shared.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "copies.hpp"

namespace eplb {

class Distinct {
  public:
    // `slots` is [gpus, slots_per_gpu], -1 where empty; `nodes` divides the GPUs.
    void repair(std::span<const double> load, std::int32_t gpus, std::int32_t slots_per_gpu, std::int32_t nodes,
                std::int32_t* slots) {
        experts_ = static_cast<std::int32_t>(load.size()), width_ = slots_per_gpu;
        if (!shared(slots, gpus)) return;
        const std::int32_t node_gpus = gpus / nodes;
        for (std::int32_t n = 0; n < nodes; ++n, slots += node_gpus * width_) repair_node(load, node_gpus, slots);
    }

  private:
    static constexpr std::int32_t kFreed = -2;

    struct Swap {
        std::int32_t gpu = -1, slot = -1, mine = -1;
        double larger = 0;
    };

    bool shared(const std::int32_t* slots, std::int32_t gpus) {
        seen_.assign(experts_, -1);
        for (std::int32_t g = 0; g < gpus; ++g)
            for (std::int32_t s = 0; s < width_; ++s) {
                const std::int32_t e = slots[g * width_ + s];
                if (e < 0) continue;
                if (seen_[e] == g) return true;
                seen_[e] = g;
            }
        return false;
    }

    void repair_node(std::span<const double> load, std::int32_t gpus, std::int32_t* slots) {
        slots_ = slots, gpus_ = gpus;
        count();
        share(load);
        const double peak = *std::max_element(gpu_load_.begin(), gpu_load_.end());
        regrant(load);
        share(load);
        for (std::int32_t g = 0; g < gpus_; ++g)
            for (std::int32_t s = 0; s < width_; ++s)
                while (at(g, s) >= 0 && held(g, at(g, s)) > 1 && move_apart(g, s)) {
                }
        while (lower_peak(peak)) {
        }
        std::replace(slots_, slots_ + gpus_ * width_, kFreed, -1);
    }

    std::int32_t& at(std::int32_t gpu, std::int32_t s) { return slots_[gpu * width_ + s]; }
    std::int32_t& held(std::int32_t gpu, std::int32_t expert) {
        return held_[static_cast<std::size_t>(gpu) * experts_ + expert];
    }
    double weight(std::int32_t expert) const { return expert < 0 ? 0.0 : per_copy_[expert]; }

    void count() {
        held_.assign(static_cast<std::size_t>(gpus_) * experts_, 0);
        copies_.assign(experts_, 0);
        for (std::int32_t g = 0; g < gpus_; ++g)
            for (std::int32_t s = 0; s < width_; ++s)
                if (at(g, s) >= 0) ++held(g, at(g, s)), ++copies_[at(g, s)];
    }

    void share(std::span<const double> load) {
        per_copy_.assign(experts_, 0.0);
        for (std::int32_t e = 0; e < experts_; ++e)
            if (copies_[e] > 0) per_copy_[e] = load[e] / copies_[e];
        gpu_load_.assign(gpus_, 0.0);
        for (std::int32_t g = 0; g < gpus_; ++g)
            for (std::int32_t s = 0; s < width_; ++s) gpu_load_[g] += weight(at(g, s));
    }

    void regrant(std::span<const double> load) {
        std::int32_t most = 0;
        for (std::int32_t g = 0; g < gpus_; ++g) {
            const std::int32_t* row = slots_ + g * width_;
            most += std::any_of(row, row + width_, [](std::int32_t e) { return e >= 0; });
        }
        std::vector<std::int32_t*> freed;
        for (std::int32_t e = 0; e < experts_; ++e)
            for (std::int32_t g = gpus_ - 1; copies_[e] > most && g >= 0; --g)
                for (std::int32_t s = width_ - 1; copies_[e] > most && s >= 0; --s)
                    if (at(g, s) == e && held(g, e) > 1) {
                        freed.push_back(&at(g, s));
                        at(g, s) = kFreed;
                        --held(g, e), --copies_[e];
                    }
        if (freed.empty()) return;
        // Only experts that are here may take them: a node has its own.
        std::vector<std::int32_t> here;
        std::vector<double> their_load;
        std::vector<std::int32_t> their_copies;
        for (std::int32_t e = 0; e < experts_; ++e)
            if (copies_[e] > 0)
                here.push_back(e), their_load.push_back(load[e]), their_copies.push_back(copies_[e]);
        auto next = freed.begin();
        grant_copies(their_load, their_copies, static_cast<std::int32_t>(freed.size()), most, FewestCopiesFirst{},
                     [&](std::int32_t i) {
                         const std::int32_t e = here[i];
                         const auto gpu = static_cast<std::int32_t>((*next - slots_) / width_);
                         **next++ = e;
                         ++held(gpu, e), ++copies_[e];
                     });
    }

    // Swaps an expert's further copy for another GPU's entry, if it can.
    bool move_apart(std::int32_t gpu, std::int32_t mine) {
        const std::int32_t e = at(gpu, mine);
        Swap best;
        for (std::int32_t g = 0; g < gpus_; ++g) {
            if (held(g, e) > 0) continue;
            for (std::int32_t s = 0; s < width_; ++s) {
                const std::int32_t f = at(g, s);
                if (f == kFreed || (f >= 0 && held(g, f) > held(gpu, f))) consider(gpu, mine, g, s, best);
            }
        }
        if (best.gpu < 0) return false;
        exchange(gpu, best);
        return true;
    }

    void consider(std::int32_t gpu, std::int32_t mine, std::int32_t other, std::int32_t s, Swap& best) {
        const double difference = weight(at(other, s)) - weight(at(gpu, mine));
        const double larger = std::max(gpu_load_[gpu] + difference, gpu_load_[other] - difference);
        if (best.gpu < 0 || larger < best.larger) best = {other, s, mine, larger};
    }

    void exchange(std::int32_t gpu, const Swap& swap) {
        std::int32_t &here = at(gpu, swap.mine), &there = at(swap.gpu, swap.slot);
        const double difference = weight(there) - weight(here);
        gpu_load_[gpu] += difference, gpu_load_[swap.gpu] -= difference;
        if (here >= 0) --held(gpu, here), ++held(swap.gpu, here);
        if (there >= 0) --held(swap.gpu, there), ++held(gpu, there);
        std::swap(here, there);
    }

    bool lower_peak(double enough) {
        const auto fullest =
            static_cast<std::int32_t>(std::max_element(gpu_load_.begin(), gpu_load_.end()) - gpu_load_.begin());
        if (gpu_load_[fullest] <= enough * (1 + 1e-12)) return false;  // rounding is no excess
        Swap best;
        for (std::int32_t mine = 0; mine < width_; ++mine) {
            const std::int32_t e = at(fullest, mine);
            if (e < 0) continue;
            for (std::int32_t g = 0; g < gpus_; ++g) {
                if (held(g, e) > 0) continue;
                for (std::int32_t s = 0; s < width_; ++s) {
                    const std::int32_t f = at(g, s);
                    if (f == kFreed || (f >= 0 && held(fullest, f) == 0)) consider(fullest, mine, g, s, best);
                }
            }
        }
        if (best.gpu < 0 || best.larger >= gpu_load_[fullest] * (1 - 1e-12)) return false;
        exchange(fullest, best);
        return true;
    }

    std::int32_t experts_ = 0, gpus_ = 0, width_ = 0;
    std::int32_t* slots_ = nullptr;
    std::vector<std::int32_t> seen_, held_, copies_;
    std::vector<double> per_copy_, gpu_load_;
};

}  // namespace eplb
