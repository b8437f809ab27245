// From shares to tokens: which physical slot takes each token's k-th expert.
//
// Tokens of one expert are served in their order in the batch: the first routed[s0] of them go to its
// lowest slot s0, the next to the next. Time O(ids + slots).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "placement.hpp"

namespace eplb {

class Assign {
  public:
    // `ids` are experts of the layer or -1 (padding, answered -1). Returns -1, or the expert whose ids
    // are not as many as its routed tokens.
    std::int32_t solve(const Layer& layer, const std::int64_t* routed, std::span<const std::int32_t> ids,
                       std::int32_t* physical) {
        // Per expert, a cursor on the list of its slots: `slot_` where it stands, `left_` there.
        slot_.assign(layer.experts, -1);
        left_.assign(layer.experts, 0);
        next_.assign(layer.physical_slots(), -1);
        for (std::int32_t slot = layer.physical_slots() - 1; slot >= 0; --slot) {
            if (routed[slot] == 0) continue;
            const std::int32_t e = layer.expert_of[slot];
            next_[slot] = slot_[e];
            slot_[e] = slot;
            left_[e] = routed[slot];
        }
        for (std::size_t i = 0; i < ids.size(); ++i) {
            const std::int32_t e = ids[i];
            if (e < 0) {
                physical[i] = -1;
                continue;
            }
            if (left_[e] == 0 && slot_[e] >= 0) {
                slot_[e] = next_[slot_[e]];
                left_[e] = slot_[e] >= 0 ? routed[slot_[e]] : 0;
            }
            if (left_[e] == 0) return e;
            physical[i] = slot_[e];
            --left_[e];
        }
        for (std::int32_t e = 0; e < layer.experts; ++e)
            if (left_[e] != 0 || (slot_[e] >= 0 && next_[slot_[e]] >= 0)) return e;
        return -1;
    }

  private:
    std::vector<std::int32_t> slot_, next_;
    std::vector<std::int64_t> left_;
};

}  // namespace eplb
