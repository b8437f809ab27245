// Fewest tokens on the fullest GPU, split experts allowed, integral, with a certificate: a
// parametric flow in the room that alternating paths give it.
//
//   1. Experts with one candidate go there. The others, by (number of candidates, expert id), are
//      poured like water over their candidates: the lightest rise first, to a common level; what
//      does not divide goes one each to the first by (load before, GPU id).
//   2. The target to start from is n = ceil(total / filled GPUs), its certificate all filled GPUs; or
//      the largest load of step 1 where that is more, its certificate the lowest GPU that has it. From
//      each GPU above n, in ascending order, tokens are pushed along alternating paths
//      (AlternatingPaths::search) to GPUs below n. An edge uses the expert with the most tokens on its
//      GPU of those that have a replica on the next, the lowest slot on a tie; a push is as large as
//      both ends and every edge allow.
//   3. When a GPU above n reaches none below it, the GPUs Q that it reaches hold every replica of
//      the experts they serve, so no routing gets below ceil(load(Q) / |Q|) > n: that is the new
//      target (Newton's step on the tight set) and Q its certificate.
//
// The answer equals the target when every GPU is at most there. Each push is an augmentation of the
// max-flow with capacity n at the GPUs, of at least one token, and each new target is a bound, so both
// end. Time: pouring O(sum over experts of candidates^2); a push O(slots x GPUs / 64) for its search.
// In practice there is about one push per GPU, and no new target or one.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

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
        const auto load = std::span(load_).first(layer_.gpus);
        if (*std::max_element(load.begin(), load.end()) <= target_) return Outcome::ok;
        AlternatingPaths<W> paths(layer_, routed_);
        GpuSet<W> light = below_target();
        for (int g = 0; g < layer_.gpus; ++g)
            while (load_[g] > target_) {
                const auto path = paths.search(g, light);
                if (!path.empty()) {
                    push(paths, path);
                    if (load_[path.back()] == target_) light.erase(path.back());
                } else {
                    certificate_ = paths.visited();
                    std::int64_t held = 0, gpus = 0;
                    certificate_.each([&](int q) { held += load_[q], ++gpus; });
                    target_ = ceil_div(held, gpus);
                    light = below_target();
                }
            }
        return Outcome::ok;
    }

    std::int64_t makespan() const { return target_; }
    bool in_certificate(int gpu) const { return certificate_.contains(gpu); }

  private:
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

        for (const TwoCopies& e : layer_.pairs) {
            const std::int64_t t = tokens[e.expert];
            total += t;
            std::int64_t& low = load_[e.low.gpu];
            std::int64_t& high = load_[e.high.gpu];
            const std::int64_t to_low = std::clamp<std::int64_t>((t + high - low + (low <= high)) >> 1, 0, t);
            low += to_low;
            high += t - to_low;
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
        const int n = static_cast<int>(candidates.size());
        for (int i = 0; i < n; ++i) {  // insertion sort: few, and stable
            int at = i;
            for (; at > 0 && load_[by_load_[at - 1].gpu] > load_[candidates[i].gpu]; --at)
                by_load_[at] = by_load_[at - 1];
            by_load_[at] = candidates[i];
        }
        // The `wet` lightest rise to a common level: the most of them that the tokens can lift.
        int wet = 1;
        std::int64_t volume = tokens + load_[by_load_[0].gpu];
        while (wet < n && volume > wet * load_[by_load_[wet].gpu]) volume += load_[by_load_[wet++].gpu];
        for (int i = 0; i < n; ++i) {
            std::int64_t& load = load_[by_load_[i].gpu];
            const std::int64_t level = i < wet ? volume / wet + (i < volume % wet) : load;
            routed_[by_load_[i].slot] = level - load;
            load = level;
        }
    }

    GpuSet<W> below_target() const {
        GpuSet<W> light;
        for (int g = 0; g < layer_.gpus; ++g) light.insert_if(g, load_[g] < target_);
        return light;
    }

    void push(AlternatingPaths<W>& paths, std::span<const std::int16_t> path) {
        const int from = path.front(), end = path.back();
        std::int64_t amount = std::min(load_[from] - target_, target_ - load_[end]);
        for (std::size_t i = 1; i < path.size(); ++i) {
            edge_[i] = most_tokens(path[i - 1], path[i]);
            amount = std::min(amount, routed_[edge_[i]]);
        }
        for (std::size_t i = 1; i < path.size(); ++i) {
            routed_[edge_[i]] -= amount;
            routed_[layer_.slot_on(path[i], layer_.expert_of[edge_[i]])] += amount;
        }
        for (const int gpu : path) paths.changed(gpu);
        load_[from] -= amount;
        load_[end] += amount;
    }

    // The slot on `from` with the most tokens whose expert has a replica on `to`; the path says that
    // there is one.
    std::int32_t most_tokens(int from, int to) const {
        std::int32_t best = -1;
        std::int64_t most = 0;
        const std::int32_t begin = from * layer_.slots_per_gpu;
        for (std::int32_t slot = begin; slot < begin + layer_.slots_per_gpu; ++slot) {
            const bool movable = layer_.holders_of<W>(slot).contains(to);
            const std::int64_t tokens = routed_[slot] & -static_cast<std::int64_t>(movable);  // no branch
            best = tokens > most ? slot : best;
            most = tokens > most ? tokens : most;
        }
        return best;
    }

    const Layer& layer_;
    std::int64_t* routed_;
    std::array<std::int64_t, GpuSet<W>::capacity> load_{};
    std::array<std::int32_t, GpuSet<W>::capacity> edge_;
    std::array<Candidate, GpuSet<W>::capacity> by_load_;
    std::int64_t target_ = 0;
    GpuSet<W> certificate_;
};

}  // namespace eplb
