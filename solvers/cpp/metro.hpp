// METRO's greedy router (arXiv 2512.09277, Algorithm 1), its locks serialised: live experts in the
// given order, each to the candidate GPU with the fewest activated replicas so far, the lowest such
// GPU on a tie. Time O(candidates).
#pragma once

#include <array>
#include <cstdint>

#include "problem.hpp"

namespace eplb {

template <int W>
class Metro {
  public:
    // `routed` is zero.
    Metro(const Layer& layer, std::int64_t* routed) : layer_(layer), routed_(routed) {}

    // `order` is a permutation of the experts, or null for ascending expert id.
    Outcome solve(const std::int64_t* tokens, const std::int32_t* order) {
        if (!acceptable(layer_, tokens)) return Outcome::bad_tokens;
        if (order)
            for (std::int32_t i = 0; i < layer_.experts; ++i) route(order[i], tokens[order[i]]);
        else
            for (std::int32_t e = 0; e < layer_.experts; ++e) route(e, tokens[e]);
        return Outcome::ok;
    }

    std::int64_t activated(int gpu) const { return activated_[gpu]; }

  private:
    void route(std::int32_t expert, std::int64_t tokens) {
        if (tokens == 0) return;
        const auto candidates = layer_.candidates_of(expert);
        // One or two candidates without a branch between them: most experts have no more, and which
        // have two follows no pattern that a branch predictor could learn.
        const Candidate second = candidates[candidates.size() > 1];
        Candidate best = candidates[0];
        best = activated_[second.gpu] < activated_[best.gpu] ? second : best;
        for (std::size_t i = 2; i < candidates.size(); ++i)
            best = activated_[candidates[i].gpu] < activated_[best.gpu] ? candidates[i] : best;
        ++activated_[best.gpu];
        routed_[best.slot] = tokens;
    }

    const Layer& layer_;
    std::int64_t* routed_;
    std::array<std::int32_t, GpuSet<W>::capacity> activated_{};
};

}  // namespace eplb
