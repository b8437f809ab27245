// Fewest tokens on the fullest GPU, split experts allowed, integral, with a certificate: a
// parametric flow, pushed in waves along the alternating paths of all GPUs at once.
//
//   1. Experts with one candidate go there. Every candidate of the others takes floor(tokens /
//      candidates) for a start. Then, by (number of candidates, expert id), each of them is taken back
//      and poured like water over its candidates: the lightest rise to a common level; what does not
//      divide goes one each to the lowest GPU ids among those at most at that level.
//   2. The target to start from is n = ceil(total / filled GPUs), its certificate all filled GPUs; or
//      the largest load of the experts with one candidate where that is more, its certificate the
//      lowest GPU that has it.
//   3. GPUs below n are at distance 0; a GPU is one farther than the nearest one that it reaches (see
//      Reach). If a GPU above n has no distance: the GPUs Q without one hold every replica of the
//      experts they serve, so no routing gets below ceil(load(Q) / |Q|) > n. That is the new target
//      (Newton's step on the tight set) and Q its certificate; step 3 again.
//   4. A wave. By falling distance, then by GPU id, each GPU above n sends what it has above n one
//      nearer: its slots in ascending order, the GPUs that hold a slot's expert in ascending order. At
//      distance 0 a GPU takes no more than n has room for, elsewhere all that comes. What finds no end
//      stays. A wave covers kWave distances, from the largest of a GPU above n. Then step 3, until no
//      GPU is above n.
//
// This is push-relabel with exact distances: none falls, and that of a GPU which a wave covers but
// leaves above n rises, so that the waves for a target end; each new target is a bound, so both end.
// Time: pouring O(candidates) for each level tried, of which there are two or three; a wave
// O(slots x GPUs / 64) at most for what has changed and O(distances x GPUs^2 / 64). In practice none
// to ten waves at 64 GPUs, and no new target or one.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <utility>

#include "alternating_paths.hpp"
#include "gpu_set.hpp"
#include "problem.hpp"

namespace eplb {

template <int W>
class Flow {
  public:
    static constexpr bool kCountsTokens = true;

    // `routed` is zero.
    Flow(const Layer& layer, std::int64_t* routed) : layer_(layer), routed_(routed) {}

    Outcome solve(const std::int64_t* tokens) {
        if (!acceptable(layer_, tokens)) return Outcome::bad_tokens;
        pour(tokens);
        compare();
        if (over_.empty()) return Outcome::ok;
        Reach<W> reach(layer_, routed_);
        while (!over_.empty()) {
            const int farthest = find_distances(reach);
            for (int k = farthest; k > std::max(0, farthest - kWave); --k)
                (at(k) & over_).each([&](int gpu) { discharge(reach, gpu, k); });
        }
        return Outcome::ok;
    }

    std::int64_t makespan() const { return target_; }
    bool in_certificate(int gpu) const { return certificate_.contains(gpu); }
    const GpuSet<W>& certificate() const { return certificate_; }

  private:
    static constexpr int kWave = 63;

    void pour(const std::int64_t* tokens) {
        std::int64_t total = 0;
        for (const SingleCopy& e : layer_.singles) {
            const std::int64_t t = tokens[e.expert];
            total += t;
            load_[e.only.gpu] += t;
            routed_[e.only.slot] = t;
        }
        const auto load = std::span(load_).first(layer_.gpus);
        const auto fullest = std::max_element(load.begin(), load.end());
        const std::int64_t fixed = *fullest;

        // Placements are made for even shares: poured beside those, experts need fewer corrections.
        for (const TwoCopies& e : layer_.pairs) {
            const std::int64_t half = tokens[e.expert] >> 1;
            load_[e.low.gpu] += half;
            load_[e.high.gpu] += half;
        }
        for (const std::int32_t e : layer_.others) {
            const auto candidates = layer_.candidates_of(e);
            const std::int64_t share = tokens[e] / static_cast<std::int64_t>(candidates.size());
            for (const Candidate c : candidates) load_[c.gpu] += share;
        }

        for (const TwoCopies& e : layer_.pairs) {
            const std::int64_t t = tokens[e.expert], half = t >> 1;
            total += t;
            std::int64_t& low = load_[e.low.gpu];
            std::int64_t& high = load_[e.high.gpu];
            const std::int64_t to_low = std::clamp<std::int64_t>((t + high - low + 1) >> 1, 0, t);
            low += to_low - half;
            high += t - to_low - half;
            routed_[e.low.slot] = to_low;
            routed_[e.high.slot] = t - to_low;
        }
        for (const std::int32_t e : layer_.others) {
            total += tokens[e];
            pour_over(layer_.candidates_of(e), tokens[e]);
        }

        const std::int64_t even = ceil_div(total, layer_.filled_gpus);
        target_ = std::max(fixed, even);
        if (fixed > even)
            certificate_.insert(static_cast<int>(fullest - load.begin()));
        else
            certificate_ = GpuSet<W>::read(layer_.filled.data());
    }

    void pour_over(std::span<const Candidate> candidates, std::int64_t tokens) {
        std::int64_t wet = static_cast<std::int64_t>(candidates.size());
        const std::int64_t share = tokens / wet;
        std::int64_t volume = tokens;
        for (const Candidate c : candidates) volume += load_[c.gpu] -= share;
        // Without those above it the level falls, and may fall below others.
        std::int64_t level = volume / wet;
        for (std::int64_t before = 0; before != wet; level = volume / wet) {
            before = std::exchange(wet, 0);
            volume = tokens;
            for (const Candidate c : candidates) {
                const std::int64_t load = load_[c.gpu];
                wet += load <= level;
                volume += load <= level ? load : 0;
            }
        }
        std::int64_t left_over = volume % wet;
        for (const Candidate c : candidates) {
            std::int64_t& load = load_[c.gpu];
            const bool rises = load <= level;
            const std::int64_t risen = rises ? level + (left_over > 0) : load;
            left_over -= rises;
            routed_[c.slot] = risen - load;
            load = risen;
        }
    }

    void compare() {
        over_ = light_ = {};
        for (int g = 0; g < layer_.gpus; ++g) {
            over_.insert_if(g, load_[g] > target_);
            light_.insert_if(g, load_[g] < target_);
        }
    }

    // Raises the target until every GPU above it has a distance; returns the largest of theirs.
    int find_distances(Reach<W>& reach) {
        const auto filled = GpuSet<W>::read(layer_.filled.data());
        reach.find_all(filled - light_);
        for (;;) {
            GpuSet<W> found = light_, rest = filled - light_;
            int distance = 0;
            while (!found.empty() && !(rest & over_).empty()) {
                GpuSet<W> next;
                rest.each([&](int gpu) { next.insert_if(gpu, !(reach.known(gpu) & found).empty()); });
                at(++distance) = found = next;
                rest = rest - next;
            }
            if (!found.empty()) return distance;
            certificate_ = rest;
            std::int64_t held = 0, gpus = 0;
            rest.each([&](int gpu) { held += load_[gpu], ++gpus; });
            target_ = ceil_div(held, gpus);
            compare();
        }
    }

    GpuSet<W>& at(int distance) { return at_distance_[distance % at_distance_.size()]; }

    // Sends what `gpu` has above the target one nearer.
    void discharge(Reach<W>& reach, int gpu, int distance) {
        std::int64_t excess = load_[gpu] - target_;
        const std::int32_t begin = gpu * layer_.slots_per_gpu;
        for (std::int32_t slot = begin; slot < begin + layer_.slots_per_gpu && excess > 0; ++slot) {
            const GpuSet<W>& nearer = distance == 1 ? light_ : at(distance - 1);
            GpuSet<W> ends = layer_.holders_of<W>(slot) & nearer;
            if (ends.empty() || routed_[slot] == 0) continue;
            const Candidate* to = layer_.candidates_of(layer_.expert_of[slot]).data();
            const std::int64_t movable = std::min(excess, routed_[slot]);
            std::int64_t left = movable;
            while (left > 0 && !ends.empty()) {
                const int end = ends.lowest();
                ends.erase(end);
                while (to->gpu != end) ++to;
                std::int64_t amount = left;
                if (distance > 1) {
                    over_.insert(to->gpu);
                } else if (const std::int64_t room = target_ - load_[to->gpu]; room <= left) {
                    amount = room;
                    light_.erase(to->gpu);
                }
                routed_[to->slot] += amount;
                load_[to->gpu] += amount;
                left -= amount;
                reach.changed(to->gpu);
            }
            routed_[slot] -= movable - left;
            excess -= movable - left;
        }
        load_[gpu] = target_ + excess;
        if (excess == 0) over_.erase(gpu);
        reach.changed(gpu);
    }

    const Layer& layer_;
    std::int64_t* routed_;
    std::array<std::int64_t, GpuSet<W>::capacity> load_{};
    std::int64_t target_ = 0;
    GpuSet<W> over_, light_;                        // GPUs above the target, GPUs below it
    std::array<GpuSet<W>, kWave + 1> at_distance_;  // by distance modulo its size, 0 apart: that is light_
    GpuSet<W> certificate_;
};

}  // namespace eplb
