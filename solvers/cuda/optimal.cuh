// Fewest activated replicas on the fullest GPU by one warp, with a certificate: the rule of
// solvers/cpp/matching.hpp, to the bit.
//
// The greedy start is as in metro.cuh, on (activated, tokens). The search for alternating paths gives
// every lane experts instead: those whose GPU is on the present level mark the GPUs of their other
// candidates, all in parallel, and a level costs a few instructions for every 32 experts that have a choice.
// No table of what GPUs reach is kept, so that moving an expert is writing one word.
#pragma once

#include "problem.cuh"

namespace eplb {

using Fill = unsigned long long;  // activated replicas and tokens, as solvers/cpp/problem.hpp
constexpr int kCountShift = 51;

__device__ inline Fill fill_of(long long tokens) { return (Fill{1} << kCountShift) + static_cast<Fill>(tokens); }

// In shared memory.
struct Workspace {
    Fill fill[kMaxGpus];
    unsigned activated[kMaxGpus], level[kMaxGpus];
    unsigned seen[kMaxGpus / kWarp];
    // Where the experts with a choice are, in the layer's order; kNone: not live. Lane j % 32 alone reads and
    // writes the j-th.
    Candidate where[kMaxExperts];
};

template <class Count>
class Optimal {
  public:
    __device__ Optimal(const Layer& layer, const Count* tokens, int* home, Workspace& shared)
        : layer_(layer), tokens_(tokens), home_(home), shared_(shared), lane_(lane_id()) {}

    // As solve_metro; the GPUs' activated replicas are left in the workspace.
    __device__ bool solve() {
        Demands<Count> forced(layer_, tokens_, 0, layer_.forced);
        Demands<Count> choosing(layer_, tokens_, layer_.forced, layer_.num_experts);
        for (int g = lane_; g < kMaxGpus; g += kWarp) shared_.fill[g] = 0;
        __syncwarp();
        for (int begin = 0; begin < layer_.forced; begin += kWarp) {
            const Demand mine = taken(forced);
            if (mine.live) atomicAdd(&shared_.fill[gpu_of(mine.expert.low)], fill_of(mine.tokens));
            if (mine.expert.id >= 0) home_[mine.expert.id] = mine.live ? layer_.slot(mine.expert.low) : -1;
        }
        count_activated();
        const unsigned fixed_gpu = fullest(), fixed = shared_.activated[fixed_gpu];
        with_width(layer_.gpus, [&](auto width) { place_all<decltype(width)::value>(choosing); });
        count_activated();
        prove(fixed, fixed_gpu);
        for (int j = lane_; j < choosers(); j += kWarp) {
            const Candidate c = shared_.where[j];
            home_[layer_.experts[layer_.forced + j].id] = c == kNone ? -1 : layer_.slot(c);
        }
        __syncwarp();
        return !__any_sync(kAllLanes, bad_);
    }

    __device__ unsigned makespan() const { return makespan_; }
    // A word of the GPU set that proves the makespan.
    __device__ unsigned certificate(int word) const {
        if (proof_ == kFilled) return layer_.filled[word];
        if (proof_ == kReached) return shared_.seen[word];
        return static_cast<int>(proof_) / kWarp == word ? 1u << (proof_ % kWarp) : 0u;
    }

  private:
    static constexpr unsigned kFilled = 1u << 30, kReached = 1u << 31;  // or one GPU, by its number

    __device__ int choosers() const { return layer_.num_experts - layer_.forced; }
    __device__ bool is_light(unsigned gpu, unsigned level) const { return shared_.activated[gpu] + 2 <= level; }

    __device__ Demand taken(Demands<Count>& demands) {
        const Demand mine = demands.take();
        bad_ |= mine.bad;
        live_ += mine.live;
        return mine;
    }

    __device__ void count_activated() {
        __syncwarp();
        for (int g = lane_; g < layer_.gpus; g += kWarp)
            shared_.activated[g] = static_cast<unsigned>(shared_.fill[g] >> kCountShift);
    }

    // The greedy start, for the experts that have a choice. Lanes keep their GPUs' fills in registers.
    template <int K>
    __device__ void place_all(Demands<Count>& choosing) {
        Fill fill[K];
#pragma unroll
        for (int k = 0; k < K; ++k) fill[k] = shared_.fill[k * kWarp + lane_];
        for (int begin = 0; begin < choosers(); begin += kWarp) {
            const Demand mine = taken(choosing);
            unsigned chosen = kNone;
            for (unsigned todo = __ballot_sync(kAllLanes, mine.live); todo != 0; todo &= todo - 1) {
                const int owner = __ffs(static_cast<int>(todo)) - 1;
                const unsigned best = place(fill, mine, owner);
                if (lane_ == owner) chosen = best;
            }
            if (mine.expert.id >= 0)
                shared_.where[begin + lane_] = mine.live ? candidate_on(layer_, mine.expert, chosen) : kNone;
        }
#pragma unroll
        for (int k = 0; k < K; ++k) shared_.fill[k * kWarp + lane_] = fill[k];
    }

    // Puts the owner's expert on the candidate GPU with the smallest (activated, tokens, GPU), which it
    // returns.
    template <int K>
    __device__ unsigned place(Fill (&fill)[K], const Demand& mine, int owner) const {
        const Choice choice(__shfl_sync(kAllLanes, Choice::pack(mine.expert), owner));
        const long long tokens = __shfl_sync(kAllLanes, mine.tokens, owner);
        const unsigned gpu = choice.candidates() == 2
                                 ? lesser(fill, choice.low(), choice.high())
                                 : least(fill, choice.in_lane(layer_, mine.expert, owner, lane_));
#pragma unroll
        for (int k = 0; k < K; ++k)
            if (gpu == static_cast<unsigned>(k * kWarp + lane_)) fill[k] += fill_of(tokens);
        return gpu;
    }

    // Of two GPUs: most experts with a choice have no more, and two exchanges side by side take less time
    // than three reductions one after the other.
    template <int K>
    __device__ unsigned lesser(const Fill (&fill)[K], unsigned low, unsigned high) const {
        const auto of = [&](unsigned gpu) {
            Fill f = fill[0];
#pragma unroll
            for (int k = 1; k < K; ++k)
                if (gpu / kWarp == static_cast<unsigned>(k)) f = fill[k];
            return __shfl_sync(kAllLanes, f, static_cast<int>(gpu % kWarp));
        };
        const Fill of_low = of(low), of_high = of(high);
        return of_high < of_low ? high : low;
    }

    // Of the GPUs that `holds` has the bits of.
    template <int K>
    __device__ unsigned least(const Fill (&fill)[K], unsigned holds) const {
        Fill smallest = ~Fill{0};
        unsigned gpu = kNone;
#pragma unroll
        for (int k = 0; k < K; ++k)
            if (holds >> k & 1 && fill[k] < smallest) smallest = fill[k], gpu = k * kWarp + lane_;
        // Word by word: there is a reduction of 32 bits only.
        const auto high = static_cast<unsigned>(smallest >> 32);
        const bool first = high == __reduce_min_sync(kAllLanes, high);
        const unsigned low = first ? static_cast<unsigned>(smallest) : kNone;
        const bool both = low == __reduce_min_sync(kAllLanes, low) && first;
        return __reduce_min_sync(kAllLanes, both ? gpu : kNone);
    }

    // The lowest of the GPUs with the most activated replicas.
    __device__ unsigned fullest() const {
        __syncwarp();
        unsigned most = 0;
        for (int g = lane_; g < layer_.gpus; g += kWarp) most = max(most, shared_.activated[g]);
        most = __reduce_max_sync(kAllLanes, most);
        unsigned gpu = kNone;
        for (int g = lane_; g < layer_.gpus; g += kWarp)
            if (shared_.activated[g] == most) gpu = min(gpu, static_cast<unsigned>(g));
        return __reduce_min_sync(kAllLanes, gpu);
    }

    // Lowers the fullest GPUs until a bound is met.
    __device__ void prove(unsigned fixed, unsigned fixed_gpu) {
        unsigned filled = 0;
        for (int w = lane_; w < layer_.words(); w += kWarp) filled += __popc(layer_.filled[w]);
        filled = __reduce_add_sync(kAllLanes, filled);
        const unsigned live = __reduce_add_sync(kAllLanes, live_);
        const unsigned even = filled == 0 ? 0 : (live + filled - 1) / filled;
        const unsigned bound = max(fixed, even);
        proof_ = fixed > even ? fixed_gpu : kFilled;
        for (;;) {
            const unsigned gpu = fullest();
            makespan_ = shared_.activated[gpu];
            if (makespan_ <= bound) return;
            if (lower(gpu, makespan_)) continue;
            proof_ = kReached;
            return;
        }
    }

    // Takes one activation off the GPU, along an alternating path to one with at most `most` - 2. Where
    // there is none, `seen` holds the GPUs reached.
    __device__ bool lower(unsigned from, unsigned most) {
        for (int g = lane_; g < layer_.gpus; g += kWarp)
            shared_.level[g] = g == static_cast<int>(from) ? 0 : kNone;
        for (int w = lane_; w < layer_.words(); w += kWarp)
            shared_.seen[w] = static_cast<int>(from) / kWarp == w ? 1u << (from % kWarp) : 0u;
        __syncwarp();
        for (unsigned depth = 0;; ++depth) {
            const unsigned last = spread(depth, most);
            if (last != kNone) {
                shift(depth, lightest_from(last, most));
                if (lane_ == 0) --shared_.activated[from];
                __syncwarp();
                return true;
            }
            if (!next_level(depth)) return false;
        }
    }

    // Marks what the GPUs at a depth reach. Returns the lowest of them that reaches a light GPU, or kNone.
    __device__ unsigned spread(unsigned depth, unsigned most) {
        unsigned last = kNone;
        for (int j = lane_; j < choosers(); j += kWarp) {
            const Candidate here = shared_.where[j];
            if (here == kNone || shared_.level[gpu_of(here)] != depth) continue;
            const Expert e = layer_.experts[layer_.forced + j];
            for (int i = 0; i < e.candidates; ++i) {
                const unsigned gpu = gpu_of(layer_.candidate(e, i));
                if (is_light(gpu, most))
                    last = min(last, gpu_of(here));
                else
                    atomicOr(&shared_.seen[gpu / kWarp], 1u << (gpu % kWarp));
            }
        }
        return __reduce_min_sync(kAllLanes, last);
    }

    // Puts the GPUs reached for the first time on the next level; says whether there are any.
    __device__ bool next_level(unsigned depth) {
        __syncwarp();
        bool any = false;
        for (int g = lane_; g < layer_.gpus; g += kWarp) {
            if (!(shared_.seen[g / kWarp] >> lane_ & 1) || shared_.level[g] != kNone) continue;
            shared_.level[g] = depth + 1;
            any = true;
        }
        __syncwarp();
        return __any_sync(kAllLanes, any);
    }

    // The lowest light GPU that one of the experts on `gpu` may go to.
    __device__ unsigned lightest_from(unsigned gpu, unsigned most) const {
        unsigned light = kNone;
        for (int j = lane_; j < choosers(); j += kWarp) {
            const Candidate here = shared_.where[j];
            if (here == kNone || gpu_of(here) != gpu) continue;
            const Expert e = layer_.experts[layer_.forced + j];
            for (int i = 0; i < e.candidates; ++i) {
                const unsigned to = gpu_of(layer_.candidate(e, i));
                if (is_light(to, most)) light = min(light, to);
            }
        }
        return __reduce_min_sync(kAllLanes, light);
    }

    // Moves one expert along each edge of the path that ends at `to`, from its end: of those at a depth that
    // may go where the last one left, the one in the lowest slot.
    __device__ void shift(unsigned depth, unsigned to) {
        __syncwarp();
        if (lane_ == 0) ++shared_.activated[to];
        for (unsigned left = depth + 1; left > 0; --left) {
            Candidate from = kNone, there = kNone;
            int expert = 0;
            for (int j = lane_; j < choosers(); j += kWarp) {
                const Candidate here = shared_.where[j];
                if (here >= from || shared_.level[gpu_of(here)] != left - 1) continue;
                const Candidate c = candidate_on(layer_, layer_.experts[layer_.forced + j], to);
                if (c != kNone) from = here, there = c, expert = j;
            }
            const Candidate lowest = __reduce_min_sync(kAllLanes, from);
            if (from == lowest) shared_.where[expert] = there;
            to = gpu_of(lowest);
        }
    }

    const Layer layer_;
    const Count* tokens_;
    int* home_;
    Workspace& shared_;
    int lane_;
    bool bad_ = false;
    unsigned live_ = 0, makespan_ = 0, proof_ = kFilled;
};

}  // namespace eplb
