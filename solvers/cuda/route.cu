// From a batch's top-k ids to each token's physical id in one launch: count, solve, look up.
//
// A block per layer: all its threads count and look up, its first warp solves. Neither router splits an
// expert, so that an expert's tokens all go to one slot, and every rank that has the same counts sends its
// own tokens where the others do without another exchange.
#include "metro.cuh"
#include "optimal.cuh"

namespace eplb {

constexpr int kThreads = 256;               // at most: the first warp needs many registers
constexpr int kPadding = -1, kNobody = -2;  // nobody: no such expert, or none that has tokens and a replica

__device__ inline long long expert_at(const void* ids, int bytes, long long i) {
    return bytes == 8 ? static_cast<const long long*>(ids)[i] : static_cast<const int*>(ids)[i];
}

// `topk_ids` is [layers, ids], of 4 or 8 bytes each; -1 is padding. `counts`, int [layers, experts], are
// those of all ranks; without them the ids are counted. Writes `physical` [layers, ids].
template <class Solve>
__device__ void route(const Layer& layer, const void* topk_ids, int bytes, long long ids, const int* counts,
                      int* physical, Solve&& solve) {
    __shared__ int tokens[kMaxExperts], home[kMaxExperts];
    const long long first = blockIdx.x * ids;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    for (int e = thread; e < layer.num_experts; e += threads)
        tokens[e] = counts ? counts[static_cast<long long>(blockIdx.x) * layer.num_experts + e] : 0;
    __syncthreads();
    if (!counts) {
        for (long long i = thread; i < ids; i += threads) {
            const long long e = expert_at(topk_ids, bytes, first + i);
            if (e >= 0 && e < layer.num_experts) atomicAdd(&tokens[e], 1);
        }
        __syncthreads();
    }
    if (thread < kWarp) solve(tokens, home);
    __syncthreads();
    for (long long i = thread; i < ids; i += threads) {
        const long long e = expert_at(topk_ids, bytes, first + i);
        const int slot = e >= 0 && e < layer.num_experts ? home[e] : -1;
        physical[first + i] = e == kPadding ? kPadding : slot < 0 ? kNobody : slot;
    }
}

}  // namespace eplb

extern "C" __global__ void __launch_bounds__(eplb::kThreads, 1)
    route_metro(const int* tables, int gpus, int slots_per_gpu, int num_experts, const void* topk_ids, int bytes,
                long long ids, const int* counts, int* physical) {
    using namespace eplb;
    const Layer layer(tables, static_cast<int>(gridDim.x), gpus, slots_per_gpu, num_experts,
                      static_cast<int>(blockIdx.x));
    route(layer, topk_ids, bytes, ids, counts, physical, [&](const int* tokens, int* home) {
        with_width(gpus, [&](auto width) {
            solve_metro<decltype(width)::value>(layer, tokens, home, static_cast<int*>(nullptr));
        });
    });
}

extern "C" __global__ void __launch_bounds__(eplb::kThreads, 1)
    route_optimal(const int* tables, int gpus, int slots_per_gpu, int num_experts, const void* topk_ids, int bytes,
                  long long ids, const int* counts, int* physical) {
    using namespace eplb;
    __shared__ Workspace shared;
    const Layer layer(tables, static_cast<int>(gridDim.x), gpus, slots_per_gpu, num_experts,
                      static_cast<int>(blockIdx.x));
    route(layer, topk_ids, bytes, ids, counts, physical,
          [&](const int* tokens, int* home) { Optimal<int>(layer, tokens, home, shared).solve(); });
}
