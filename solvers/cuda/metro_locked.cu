// METRO's Algorithm 1 as published (arXiv 2512.09277): a thread per live expert takes the locks of its
// candidate GPUs, adds itself to the smallest count, the lowest GPU on a tie, and lets go.
//
// Locks are taken in GPU order, so that no two threads wait for each other; a thread that holds one gets on
// since Volta schedules the threads of a warp independently. What comes out is what `metro` gives for the
// order in which the locks happened to be taken: another one from run to run.
#include "problem.cuh"

namespace eplb {

__device__ inline void acquire(unsigned* lock) {
    while (atomicCAS(lock, 0u, 1u) != 0) {
    }
    __threadfence_block();
}

__device__ inline void release(unsigned* lock) {
    __threadfence_block();
    atomicExch(lock, 0u);
}

}  // namespace eplb

// As metro_batched; a block of any number of threads per problem.
extern "C" __global__ void metro_locked(const int* tables, int layers, int gpus, int slots_per_gpu,
                                        int num_experts, const long long* tokens, int* home, int* activated,
                                        int* makespan) {
    using namespace eplb;
    __shared__ unsigned locks[kMaxGpus];
    __shared__ volatile int count[kMaxGpus];
    __shared__ int most, refused;
    const long long problem = blockIdx.x;
    const Layer layer(tables, layers, gpus, slots_per_gpu, num_experts, static_cast<int>(blockIdx.x));
    tokens += problem * layer.num_experts, home += problem * layer.num_experts, activated += problem * layer.gpus;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    for (int g = thread; g < layer.gpus; g += threads) {
        locks[g] = 0;
        count[g] = 0;
    }
    if (thread == 0) most = 0, refused = 0;
    __syncthreads();

    for (int at = thread; at < layer.num_experts; at += threads) {
        const Expert e = layer.experts[at];
        const Demand demand(e, tokens[e.id]);
        if (demand.bad) atomicExch(&refused, 1);
        home[e.id] = -1;
        if (!demand.live) continue;
        Candidate best = e.low;
        int least = 0;
        for (int i = 0; i < e.candidates; ++i) {
            const Candidate c = layer.candidate(e, i);
            acquire(&locks[gpu_of(c)]);
            if (i == 0 || count[gpu_of(c)] < least) best = c, least = count[gpu_of(c)];
        }
        count[gpu_of(best)] = least + 1;
        for (int i = 0; i < e.candidates; ++i) release(&locks[gpu_of(layer.candidate(e, i))]);
        home[e.id] = layer.slot(best);
    }
    __syncthreads();

    for (int g = thread; g < layer.gpus; g += threads) {
        activated[g] = count[g];
        atomicMax(&most, count[g]);
    }
    __syncthreads();
    const bool good = refused == 0;
    if (thread == 0) makespan[problem] = good ? most : -1;
    if (!good) refuse(layer, home, activated);
}
