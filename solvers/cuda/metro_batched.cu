// METRO's greedy router, deterministic, for many problems: one warp each (metro.cuh).
#include "metro.cuh"

// `tokens` is [problems, experts]. Writes `home` [problems, experts], each live expert's slot or -1,
// `activated` [problems, gpus] and `makespan` [problems]. Where a count is out of range or of an expert
// without replica: makespan -1, nobody has a slot.
extern "C" __global__ void metro_batched(const int* tables, int layers, int gpus, int slots_per_gpu,
                                         int num_experts, const long long* tokens, int* home, int* activated,
                                         int* makespan) {
    using namespace eplb;
    const long long problem = blockIdx.x;
    const Layer layer(tables, layers, gpus, slots_per_gpu, num_experts, static_cast<int>(blockIdx.x));
    tokens += problem * layer.num_experts, home += problem * layer.num_experts, activated += problem * layer.gpus;
    bool good = false;
    with_width(layer.gpus,
               [&](auto width) { good = solve_metro<decltype(width)::value>(layer, tokens, home, activated); });
    const int lane = lane_id();
    int most = 0;
    for (int g = lane; g < layer.gpus; g += kWarp) most = max(most, activated[g]);
    most = static_cast<int>(__reduce_max_sync(kAllLanes, static_cast<unsigned>(most)));
    if (lane == 0) makespan[problem] = good ? most : -1;
    if (!good) refuse(layer, home, activated);
}
