// METRO's greedy router by one warp, deterministic: the rule of solvers/cpp/metro.hpp, to the bit.
//
// GPUs are spread over the lanes, K to a lane, and a lane keeps its GPUs' counts in registers. Experts with a
// choice are routed one after the other: the lanes that hold a candidate offer (count, GPU), one reduction
// finds the smallest, and its owner counts one more. What a step waits for is that reduction and two
// additions. Experts without a choice take no step: of 32 at a time a lane knows which live on its GPUs, and
// counts those before the expert in turn.
#pragma once

#include "problem.cuh"

namespace eplb {

// For each of a lane's GPUs, the lanes that name it: a GPU's number is compared bit by bit, for all at once.
template <int K>
__device__ void who_names(bool names, unsigned gpu, int lane, unsigned (&lanes)[K]) {
    unsigned same = __ballot_sync(kAllLanes, names);
#pragma unroll
    for (int b = 0; 1 << b < kWarp; ++b) {
        const unsigned set = __ballot_sync(kAllLanes, gpu >> b & 1);
        same &= lane >> b & 1 ? set : ~set;
    }
#pragma unroll
    for (int k = 0; k < K; ++k) lanes[k] = same;
#pragma unroll
    for (int b = 0; 1 << b < K; ++b) {
        const unsigned set = __ballot_sync(kAllLanes, gpu / kWarp >> b & 1);
#pragma unroll
        for (int k = 0; k < K; ++k) lanes[k] &= k >> b & 1 ? set : ~set;
    }
}

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
        const unsigned packed = Choice::pack(mine.expert);
        unsigned chosen = gpu_of(mine.expert.low);
        const bool chooses = mine.expert.candidates > 1;
        unsigned forced[K];
        who_names(mine.live && !chooses, chosen, lane, forced);
        for (unsigned todo = __ballot_sync(kAllLanes, mine.live && chooses); todo != 0; todo &= todo - 1) {
            const int owner = __ffs(static_cast<int>(todo)) - 1;
            const Choice choice(__shfl_sync(kAllLanes, packed, owner));
            const unsigned holds = choice.in_lane(layer, mine.expert, owner, lane), before = (1u << owner) - 1;
            unsigned best = kNone;
#pragma unroll
            for (int k = 0; k < K; ++k) {
                const unsigned so_far = count[k] + __popc(forced[k] & before);
                const unsigned offer = so_far * kMaxGpus + (k * kWarp + lane);
                if (holds >> k & 1 && offer < best) best = offer;
            }
            best = __reduce_min_sync(kAllLanes, best) % kMaxGpus;
            if (lane == owner) chosen = best;
#pragma unroll
            for (int k = 0; k < K; ++k) count[k] += best == static_cast<unsigned>(k * kWarp + lane);
        }
#pragma unroll
        for (int k = 0; k < K; ++k) count[k] += __popc(forced[k]);
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
