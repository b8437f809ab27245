// A rank's part of experts that are split over slots: which slot takes each of its tokens.
//
// The rule of solvers/cpp/assign.hpp over the batch of all ranks, rank after rank: of an expert's tokens in
// their order the lowest slot takes the first, the next slot the following ones. A rank needs the shares,
// which all ranks compute alike, and how many tokens of each expert the ranks before it have.
//
// A block per layer, of kWarps warps. Each takes a run of ids and counts it; the sums over the warps before it
// give the place of its first token of every expert. Then it walks its run 32 ids at a time: lanes with
// the same expert take places in lane order.
#include "problem.cuh"

namespace eplb {

constexpr int kWarps = 4;

}  // namespace eplb

// `topk_ids` is [layers, ids], of 4 or 8 bytes each, -1 for padding. `slots` [layers, experts, copies] lists
// every expert's slots, ascending, then -1; `shares`, alike, the tokens that each takes of all ranks;
// `before` [layers, experts] the tokens of the ranks before this one, negative ones as 0. Writes `physical`
// [layers, ids]: -1 for padding, -2 for what no share is left for.
extern "C" __global__ void assign_shares(const void* topk_ids, int bytes, long long ids, const int* slots,
                                         const int* shares, const int* before, int num_experts, int copies,
                                         int* physical) {
    using namespace eplb;
    __shared__ int place[kWarps][kMaxExperts];  // bits of unsigned numbers: two int counts may add up
    const long long layer = blockIdx.x, first = layer * ids;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = lane_id();
    slots += layer * num_experts * copies, shares += layer * num_experts * copies, before += layer * num_experts;
    const long long rounds = (ids + kWarps * kWarp - 1) / (kWarps * kWarp);
    const long long begin = warp * rounds * kWarp, end = min(ids, begin + rounds * kWarp);
    const auto expert_at = [&](long long i) {
        if (i >= end) return -1LL;
        return bytes == 8 ? static_cast<const long long*>(topk_ids)[first + i]
                          : static_cast<const int*>(topk_ids)[first + i];
    };
    for (int e = lane; e < num_experts; e += kWarp) place[warp][e] = 0;
    __syncwarp();
    for (long long i = begin + lane; i < end; i += kWarp) {
        const long long e = expert_at(i);
        if (e >= 0 && e < num_experts) atomicAdd(&place[warp][e], 1);
    }
    __syncthreads();
    for (int e = thread; e < num_experts; e += kWarps * kWarp) {
        unsigned sum = static_cast<unsigned>(max(before[e], 0));
        for (int w = 0; w < kWarps; ++w) {
            const auto own = static_cast<unsigned>(place[w][e]);
            place[w][e] = static_cast<int>(sum);
            sum += own;
        }
    }
    __syncthreads();
    for (long long round = begin; round < end; round += kWarp) {
        const long long i = round + lane, e = expert_at(i);
        const bool known = e >= 0 && e < num_experts;
        const unsigned same = __match_any_sync(kAllLanes, known ? static_cast<int>(e) : -1);
        const int earlier = __popc(same & ((1u << lane) - 1));
        long long at = known ? static_cast<long long>(static_cast<unsigned>(place[warp][e])) + earlier : 0;
        __syncwarp();
        if (known && earlier == 0) place[warp][e] = static_cast<int>(static_cast<unsigned>(at) + __popc(same));
        __syncwarp();
        if (i >= end) continue;
        int slot = -2;
        for (int c = 0; known && slot < 0 && c < copies && slots[e * copies + c] >= 0; ++c) {
            const int share = shares[e * copies + c];
            if (at < share) slot = slots[e * copies + c];
            at -= share;
        }
        physical[first + i] = e == -1 ? -1 : slot;
    }
}
