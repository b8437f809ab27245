// Which slot of its GPU each expert takes, when a GPU already holds some of them.
//
// For each old slot in turn, the first new entry with the same expert that has no slot yet stays there;
// the other entries fill the other slots in their order (vLLM's preserve_intragpu_slots; vLLM-Ascend's
// constraint_expert_local_exchange gives the same where no expert is twice on the GPU). A slot that was
// empty stays empty where the new entries leave one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace eplb {

// `slots`, the new entries of one GPU, are reordered. O(S^2).
inline void keep_slots(std::span<const std::int32_t> previous, std::span<std::int32_t> slots) {
    const std::size_t size = slots.size();
    std::vector<std::int32_t> entries(slots.begin(), slots.end());
    std::vector<char> placed(size, 0), taken(size, 0);
    for (std::size_t s = 0; s < size; ++s) {
        std::size_t entry = 0;
        while (entry < size && (taken[entry] || entries[entry] != previous[s])) ++entry;
        if (entry == size) continue;
        slots[s] = previous[s];
        placed[s] = taken[entry] = 1;
    }
    std::size_t next = 0;
    for (std::size_t s = 0; s < size; ++s) {
        if (placed[s]) continue;
        while (taken[next]) ++next;
        slots[s] = entries[next++];
    }
}

}  // namespace eplb
