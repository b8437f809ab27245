// Fewest activated replicas on the fullest GPU, with a certificate: optimal semi-matching
// (Harvey, Ladner, Lovasz, Tamir, "Semi-matchings for bipartite graphs and load balancing", 2003).
//
// Sending all of a live expert's tokens to one replica loses nothing, so the problem is to match
// live experts to GPUs with the smallest largest count. The rule, which any other implementation
// can follow to the bit:
//   1. Experts with one candidate go there.
//   2. The other live experts, by (number of candidates, expert id), go to the candidate GPU with
//      the smallest (activated, tokens, GPU id).
//   3. The bound to start from is ceil(live / filled GPUs), its certificate all filled GPUs; or the
//      largest count of step 1 where that is more, its certificate the lowest GPU that has it. While
//      the fullest GPUs have M > that bound activated, each of them in ascending order: search an
//      alternating path to a GPU with at most M - 2 (AlternatingPaths::search). Along each edge of
//      the path, from its end, the expert in the lowest slot that has a replica on the next GPU
//      moves. No path: M is optimal, the GPUs reached are the certificate.
//   4. Lexicographic only: by falling level M, from every GPU that has M, in ascending order and once
//      each, the same to GPUs with at most M - 2, passing over those without a path. What such a GPU
//      reaches stays above every later target, so that no later path passes through it: one pass
//      makes the whole sorted vector optimal. The certificate stays that of step 3.
//
// Time: greedy O(candidates); a search O(slots x GPUs / 64); at level M at most live / M paths, in
// practice few in all.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "alternating_paths.hpp"
#include "gpu_set.hpp"
#include "problem.hpp"

namespace eplb {

template <int W>
class Matching {
  public:
    static constexpr bool kCountsTokens = false;

    // `routed` is zero.
    Matching(const Layer& layer, std::int64_t* routed) : layer_(layer), routed_(routed) {}

    Outcome solve(const std::int64_t* tokens, bool lexicographic = false) {
        if (!acceptable(layer_, tokens)) return Outcome::bad_tokens;
        greedy(tokens);
        if (makespan_ > bound_ || lexicographic) {
            AlternatingPaths<W> paths(layer_, routed_);
            while (makespan_ > bound_) {
                if (lower(paths, makespan_, false)) {
                    --makespan_;
                } else {
                    certificate_ = paths.visited();
                    bound_ = makespan_;
                }
            }
            for (std::int64_t level = makespan_; lexicographic && level >= 2; --level) lower(paths, level, true);
        }
        return Outcome::ok;
    }

    std::int64_t makespan() const { return makespan_; }
    std::int64_t activated(int gpu) const { return activated_in(fill_[gpu]); }
    Fill fill(int gpu) const { return fill_[gpu]; }
    Fill fixed(int gpu) const { return fixed_[gpu]; }  // of experts with one candidate
    bool in_certificate(int gpu) const { return certificate_.contains(gpu); }
    const GpuSet<W>& certificate() const { return certificate_; }

  private:
    void greedy(const std::int64_t* tokens) {
        for (const SingleCopy& e : layer_.singles) {
            const std::int64_t t = tokens[e.expert];
            fill_[e.only.gpu] += fill_of(t);
            routed_[e.only.slot] = t;
        }
        std::copy_n(fill_.begin(), layer_.gpus, fixed_.begin());
        int fixed_gpu = 0;
        for (int g = 1; g < layer_.gpus; ++g)
            if (activated_in(fill_[g]) > activated_in(fill_[fixed_gpu])) fixed_gpu = g;
        const std::int64_t fixed = activated_in(fill_[fixed_gpu]);

        // No branch on whether the expert is live: it would be mispredicted every third time.
        for (const TwoCopies& e : layer_.pairs) {
            const std::int64_t t = tokens[e.expert];
            const bool high = fill_[e.high.gpu] < fill_[e.low.gpu];
            fill_[high ? e.high.gpu : e.low.gpu] += fill_of(t);
            routed_[high ? e.high.slot : e.low.slot] = t;
        }
        for (const std::int32_t e : layer_.others) {
            const std::int64_t t = tokens[e];
            Candidate best{};
            Fill least = ~Fill{0};
            for (const Candidate c : layer_.candidates_of(e)) {
                const bool less = fill_[c.gpu] < least;
                least = less ? fill_[c.gpu] : least;
                best = less ? c : best;
            }
            fill_[best.gpu] += fill_of(t);
            routed_[best.slot] = t;
        }

        std::int64_t live = 0;
        for (int g = 0; g < layer_.gpus; ++g) {
            const std::int64_t a = activated_in(fill_[g]);
            live += a;
            makespan_ = a > makespan_ ? a : makespan_;
        }
        const std::int64_t even = ceil_div(live, layer_.filled_gpus);
        bound_ = fixed > even ? fixed : even;
        if (fixed > even)
            certificate_.insert(fixed_gpu);
        else
            certificate_ = GpuSet<W>::read(layer_.filled.data());
    }

    // Takes one activation off every GPU that has `level` of them, to GPUs with at most level - 2.
    // Stops and says false at the first one that reaches none, unless it is told to pass over it.
    bool lower(AlternatingPaths<W>& paths, std::int64_t level, bool pass_over) {
        GpuSet<W> light;
        for (int g = 0; g < layer_.gpus; ++g) light.insert_if(g, activated(g) + 2 <= level);
        for (int g = 0; g < layer_.gpus; ++g) {
            if (activated(g) != level) continue;
            const auto path = paths.search(g, light);
            if (path.empty()) {
                if (pass_over) continue;
                return false;
            }
            for (std::size_t i = path.size() - 1; i > 0; --i) move_one(path[i - 1], path[i]);
            for (const int gpu : path) paths.changed(gpu);
            if (activated(path.back()) + 2 > level) light.erase(path.back());
        }
        return true;
    }

    // Moves the expert in the lowest slot on `from` that has a replica on `to`; the path says that
    // there is one.
    void move_one(int from, int to) {
        std::int32_t slot = from * layer_.slots_per_gpu;
        while (routed_[slot] == 0 || !layer_.holders_of<W>(slot).contains(to)) ++slot;
        const std::int64_t tokens = std::exchange(routed_[slot], 0);
        routed_[layer_.slot_on(to, layer_.expert_of[slot])] = tokens;
        fill_[from] -= fill_of(tokens);
        fill_[to] += fill_of(tokens);
    }

    const Layer& layer_;
    std::int64_t* routed_;
    std::array<Fill, GpuSet<W>::capacity> fill_{}, fixed_;
    std::int64_t makespan_ = 0, bound_ = 0;
    GpuSet<W> certificate_;
};

}  // namespace eplb
