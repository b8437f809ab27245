// Alternating paths between GPUs: the move that both exact routers repeat.
//
// GPU g reaches GPU h when some expert with tokens on g has another replica on h, so that those
// tokens can move. A path from a full GPU to a light one moves one expert along each of its edges
// and changes the load of its two ends only. When a full GPU reaches no light one, the GPUs that
// it does reach hold every replica of every expert they serve: that set is the certificate.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "gpu_set.hpp"
#include "placement.hpp"

namespace eplb {

// `routed` is the answer being improved: tokens per physical slot of the layer.
template <int W>
class AlternatingPaths {
  public:
    AlternatingPaths(const Layer& layer, const std::int64_t* routed) : layer_(layer), routed_(routed) {}

    // Breadth-first from `from`, GPUs of a level in ascending order, to the first one that reaches a
    // member of `light`; the lowest such member is the path's end and is returned. -1 when there is
    // none: then visited() is closed.
    int search(int from, const GpuSet<W>& light) {
        visited_ = {};
        visited_.insert(from);
        GpuSet<W> level = visited_;
        while (!level.empty()) {
            GpuSet<W> next;
            for (int w = 0; w < W; ++w)
                for (std::uint64_t rest = level.words[w]; rest != 0; rest &= rest - 1) {
                    const int gpu = 64 * w + std::countr_zero(rest);
                    const GpuSet<W> found = reach(gpu) - visited_;
                    const GpuSet<W> ends = found & light;
                    if (!ends.empty()) {
                        const int end = ends.lowest();
                        parent_[end] = static_cast<std::int16_t>(gpu);
                        return end;
                    }
                    found.each([&](int h) { parent_[h] = static_cast<std::int16_t>(gpu); });
                    visited_ |= found;
                    next |= found;
                }
            level = next;
        }
        return -1;
    }

    const GpuSet<W>& visited() const { return visited_; }
    int parent(int gpu) const { return parent_[gpu]; }

    // Call when an expert has come to `gpu` or left it.
    void changed(int gpu) { known_.erase(gpu); }

  private:
    // The GPUs that hold an expert served on `gpu`, itself included. Found when first asked for:
    // most searches see few GPUs.
    GpuSet<W> reach(int gpu) {
        std::uint64_t* words = reach_.data() + static_cast<std::size_t>(gpu) * W;
        if (!known_.contains(gpu)) {
            known_.insert(gpu);
            GpuSet<W> reach;
            const std::int32_t begin = gpu * layer_.slots_per_gpu;
            for (std::int32_t slot = begin; slot < begin + layer_.slots_per_gpu; ++slot)
                reach.unite_if(layer_.holders_of<W>(slot), routed_[slot] != 0);
            std::copy(reach.words.begin(), reach.words.end(), words);
        }
        return GpuSet<W>::read(words);
    }

    const Layer& layer_;
    const std::int64_t* routed_;
    std::array<std::uint64_t, GpuSet<W>::capacity * W> reach_;  // sets, of the GPUs in known_ only
    GpuSet<W> known_;
    std::array<std::int16_t, GpuSet<W>::capacity> parent_;
    GpuSet<W> visited_;
};

}  // namespace eplb
