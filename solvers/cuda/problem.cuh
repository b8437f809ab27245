// What every kernel reads: one layer of a placement as a row of a table (eplb_opt/gpu/tables.py makes it), and
// tokens per expert. No header of any toolkit is needed: NVRTC, nvcc and the host build of
// tests/cuda_host compile the same files.
//
// A problem is a layer and a batch's tokens: problem i is on layer i % layers, one block of threads each.
// The table may be overwritten in place between launches.
#pragma once

namespace eplb {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxGpus = 1024, kMaxExperts = 2048;
constexpr int kTokenBits = 39;  // as solvers/cpp/problem.hpp
constexpr unsigned kNone = 0xffffffffu;

// A replica that a router may choose (an expert's lowest slot on a GPU), in one word whose order is that
// of physical ids: gpu << 16 | place on the GPU.
using Candidate = unsigned;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x % kWarp); }
__device__ inline unsigned gpu_of(Candidate c) { return c >> 16; }

// 16 bytes, one load. `next` is the second of two candidates; of more, where they begin in the list.
struct alignas(16) Expert {
    int id, candidates;
    Candidate low;
    unsigned next;
};

struct Layer {
    const Expert* experts;        // in the order in which they are routed
    const Candidate* candidates;  // by expert, then by GPU, of those with three or more
    const unsigned* filled;       // GPUs that hold any expert: ceil(gpus / 32) words
    int forced;                   // experts with one candidate or none, which come first for `optimal`
    int gpus, slots_per_gpu, num_experts;

    // `tables` is [layers, row], a row being the experts, the filled GPUs, `forced`, the candidates (room for
    // one per slot), and zeros up to a multiple of 16 bytes.
    __device__ Layer(const int* tables, int layers, int of_gpus, int of_slots, int of_experts, int problem)
        : gpus(of_gpus), slots_per_gpu(of_slots), num_experts(of_experts) {
        const long long row =
            (4LL * num_experts + words() + 1 + static_cast<long long>(gpus) * slots_per_gpu + 3) / 4 * 4;
        const int* at = tables + problem % layers * row;
        experts = reinterpret_cast<const Expert*>(at);
        filled = reinterpret_cast<const unsigned*>(at) + 4 * num_experts;
        forced = static_cast<int>(filled[words()]);
        candidates = filled + words() + 1;
    }

    __device__ Candidate candidate(const Expert& e, int i) const {
        if (i == 0) return e.low;
        return e.candidates == 2 ? e.next : candidates[e.next + i];
    }
    __device__ int slot(Candidate c) const {
        return static_cast<int>(gpu_of(c)) * slots_per_gpu + static_cast<int>(c & 0xffff);
    }
    __device__ int words() const { return (gpus + kWarp - 1) / kWarp; }
};

// An expert and its tokens: `live` if it has any that can be served, `bad` if it has others.
struct Demand {
    Expert expert;
    long long tokens;
    bool live, bad;

    __device__ Demand(const Expert& e, long long count)
        : expert(e),
          tokens(count),
          live(count > 0 && count >> kTokenBits == 0 && e.candidates > 0),
          bad(count != 0 && !live) {}
};

// Reads demands in the layer's order, 32 at a time, one per lane: the experts two rounds and the counts one
// round ahead of their use, so that no round waits for memory.
template <class Count>
class Demands {
  public:
    __device__ Demands(const Layer& layer, const Count* tokens, int begin, int end)
        : layer_(layer), tokens_(tokens), at_(begin + lane_id()), end_(end) {
        now_ = expert(at_);
        next_ = expert(at_ + kWarp);
        count_ = count(now_);
    }

    // The lane's demand of this round; past the end one that is not live.
    __device__ Demand take() {
        const Demand demand(now_, count_);
        now_ = next_;
        count_ = count(now_);
        at_ += kWarp;
        next_ = expert(at_ + kWarp);
        return demand;
    }

  private:
    __device__ Expert expert(int at) const { return at < end_ ? layer_.experts[at] : Expert{-1, 0, 0, 0}; }
    __device__ long long count(const Expert& e) const { return e.id < 0 ? 0 : tokens_[e.id]; }

    const Layer& layer_;
    const Count* tokens_;
    int at_, end_;
    Expert now_, next_;
    long long count_;
};

template <int K>
struct Width {
    static constexpr int value = K;
};

// Calls visit(Width<K>) for the smallest K compiled for that gives every GPU a lane: GPU g lives in lane
// g % 32, as its number g / 32 of K.
template <class Visit>
__device__ void with_width(int gpus, Visit&& visit) {
    if (gpus <= 32)
        visit(Width<1>{});
    else if (gpus <= 64)
        visit(Width<2>{});
    else if (gpus <= 128)
        visit(Width<4>{});
    else if (gpus <= 256)
        visit(Width<8>{});
    else if (gpus <= 512)
        visit(Width<16>{});
    else
        visit(Width<32>{});
}

// What all lanes must know of the expert that one of them has read, if it has a choice: in one word, so that
// one exchange tells them.
class Choice {
  public:
    __device__ static unsigned pack(const Expert& e) {
        const unsigned high = e.candidates == 2 ? gpu_of(e.next) : 0;
        return static_cast<unsigned>(e.candidates) << 20 | high << 10 | gpu_of(e.low);
    }
    __device__ explicit Choice(unsigned packed) : packed_(packed) {}

    __device__ int candidates() const { return static_cast<int>(packed_ >> 20); }
    __device__ unsigned low() const { return packed_ % kMaxGpus; }              // the first GPU that holds it,
    __device__ unsigned high() const { return packed_ / kMaxGpus % kMaxGpus; }  // and the other of two

    // Which of a lane's GPUs hold it, as bits. `mine` is the expert that the lane has read, `owner` the lane
    // that has read this one.
    __device__ unsigned in_lane(const Layer& layer, const Expert& mine, int owner, int lane) const {
        const auto bit = [lane](unsigned gpu) {
            return static_cast<unsigned>(gpu % kWarp == static_cast<unsigned>(lane)) << (gpu / kWarp);
        };
        unsigned bits = bit(low());
        if (candidates() == 2) return bits | bit(high());
        const unsigned first = __shfl_sync(kAllLanes, mine.next, owner);
        for (int i = 1; i < candidates(); ++i) bits |= bit(gpu_of(layer.candidates[first + i]));
        return bits;
    }

  private:
    unsigned packed_;
};

// The candidate of an expert on a GPU, kNone if it has none there.
__device__ inline Candidate candidate_on(const Layer& layer, const Expert& e, unsigned gpu) {
    for (int i = 0; i < e.candidates; ++i) {
        const Candidate c = layer.candidate(e, i);
        if (gpu_of(c) == gpu) return c;
    }
    return kNone;
}

// The answer to a problem whose tokens are not acceptable.
__device__ inline void refuse(const Layer& layer, int* home, int* activated) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    for (int e = thread; e < layer.num_experts; e += threads) home[e] = -1;
    for (int g = thread; g < layer.gpus; g += threads) activated[g] = 0;
}

}  // namespace eplb
