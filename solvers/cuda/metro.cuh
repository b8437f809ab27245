// METRO's greedy router by one warp, deterministic: the rule of solvers/cpp/metro.hpp, to the bit.
//
// GPUs are spread over the lanes, K to a lane, and a lane keeps its GPUs' counts in registers. Experts are
// routed one after the other: the lanes that hold a candidate offer (count, GPU), one reduction finds the
// smallest, and its owner counts one more. What a step waits for is that reduction and an addition.
#pragma once

#include "problem.cuh"

namespace eplb {

// Writes every expert's slot to `home` (-1 for one without tokens) and the GPUs' activated replicas, where
// `activated` is given. Says whether all tokens were acceptable; experts whose tokens are not count as
// without. For the 32 lanes of one warp.
template <int K, class Count>
__device__ bool solve_metro(const Layer& layer, const Count* tokens, int* home, int* activated) {
    const int lane = lane_id();
    unsigned count[K] = {};
    bool bad = false;
    Demands<Count> demands(layer, tokens, 0, layer.num_experts);
    for (int begin = 0; begin < layer.num_experts; begin += kWarp) {
        const Demand mine = demands.take();
        bad |= mine.bad;
        unsigned chosen = gpu_of(mine.expert.low);
        const unsigned choosing = __ballot_sync(kAllLanes, mine.live && mine.expert.candidates > 1);
        for (unsigned todo = __ballot_sync(kAllLanes, mine.live); todo != 0; todo &= todo - 1) {
            const int owner = __ffs(static_cast<int>(todo)) - 1;
            if (choosing >> owner & 1) {
                const unsigned holds = holders_in_lane(layer, mine.expert, owner, lane);
                unsigned best = kNone;
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    const unsigned offer = count[k] * kMaxGpus + (k * kWarp + lane);
                    if (holds >> k & 1 && offer < best) best = offer;
                }
                best = __reduce_min_sync(kAllLanes, best) % kMaxGpus;
                if (lane == owner) chosen = best;
#pragma unroll
                for (int k = 0; k < K; ++k) count[k] += best == static_cast<unsigned>(k * kWarp + lane);
            } else {
                const unsigned only = __shfl_sync(kAllLanes, chosen, owner);
#pragma unroll
                for (int k = 0; k < K; ++k) count[k] += only == static_cast<unsigned>(k * kWarp + lane);
            }
        }
        if (mine.expert.id >= 0)
            home[mine.expert.id] = mine.live ? layer.slot(candidate_on(layer, mine.expert, chosen)) : -1;
    }
    if (activated)
#pragma unroll
        for (int k = 0; k < K; ++k)
            if (k * kWarp + lane < layer.gpus) activated[k * kWarp + lane] = static_cast<int>(count[k]);
    __syncwarp();
    return !__any_sync(kAllLanes, bad);
}

}  // namespace eplb
