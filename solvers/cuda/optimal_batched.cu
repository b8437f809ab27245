// Fewest activated replicas on the fullest GPU, proven, for many problems: one warp each (optimal.cuh).
#include "optimal.cuh"

// As metro_batched; the makespan is the optimum, and `certificate` [problems, ceil(gpus / 32)] the words of
// the GPU set that proves it.
extern "C" __global__ void optimal_batched(const int* tables, int layers, int gpus, int slots_per_gpu,
                                           int num_experts, const long long* tokens, int* home, int* activated,
                                           int* makespan, unsigned* certificate) {
    using namespace eplb;
    __shared__ Workspace shared;
    const long long problem = blockIdx.x;
    const Layer layer(tables, layers, gpus, slots_per_gpu, num_experts, static_cast<int>(blockIdx.x));
    home += problem * layer.num_experts, activated += problem * layer.gpus;
    certificate += problem * layer.words();
    Optimal<long long> optimal(layer, tokens + problem * layer.num_experts, home, shared);
    const bool good = optimal.solve();
    const int lane = lane_id();
    for (int g = lane; g < layer.gpus; g += kWarp) activated[g] = static_cast<int>(shared.activated[g]);
    for (int w = lane; w < layer.words(); w += kWarp) certificate[w] = good ? optimal.certificate(w) : 0;
    if (lane == 0) makespan[problem] = good ? static_cast<int>(optimal.makespan()) : -1;
    if (!good) refuse(layer, home, activated);
}
