// Alternating paths between GPUs: how both exact routers move experts off a full one.
//
// GPU g reaches GPU h when some expert with tokens on g has another replica on h, so that those
// tokens can move. A path from a full GPU to a light one moves one expert along each of its edges
// and changes the load of its two ends only. When a full GPU reaches no light one, the GPUs that
// it does reach hold every replica of every expert they serve: that set is the certificate.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "gpu_set.hpp"
#include "placement.hpp"

namespace eplb {

// What every GPU reaches. `routed` is the answer being improved: tokens per physical slot of the layer.
template <int W>
class Reach {
  public:
    Reach(const Layer& layer, const std::int64_t* routed) : layer_(layer), routed_(routed) {}

    // The GPUs that hold an expert served on `gpu`, itself included. Found when first asked for:
    // most searches see few GPUs.
    GpuSet<W> of(int gpu) {
        if (!known_.contains(gpu)) find(gpu);
        return known(gpu);
    }
    // The same for one that has been asked for, or found with others, and has not changed since.
    GpuSet<W> known(int gpu) const { return GpuSet<W>::read(sets_.data() + gpu * W); }
    void find_all(const GpuSet<W>& gpus) {
        (gpus - known_).each([&](int gpu) { find(gpu); });
    }

    // Call when an expert has come to `gpu` or left it.
    void changed(int gpu) { known_.erase(gpu); }

  private:
    void find(int gpu) {
        GpuSet<W> reach;
        const std::int32_t begin = gpu * layer_.slots_per_gpu;
        for (std::int32_t slot = begin; slot < begin + layer_.slots_per_gpu; ++slot)
            reach.unite_if(layer_.holders_of<W>(slot), routed_[slot] != 0);
        std::copy(reach.words.begin(), reach.words.end(), sets_.begin() + gpu * W);
        known_.insert(gpu);
    }

    const Layer& layer_;
    const std::int64_t* routed_;
    std::array<std::uint64_t, GpuSet<W>::capacity * W> sets_;  // by GPU, of those in known_ only
    GpuSet<W> known_;
};

// Paths in that graph, one at a time.
template <int W>
class AlternatingPaths {
  public:
    AlternatingPaths(const Layer& layer, const std::int64_t* routed) : reach_(layer, routed) {}

    // Breadth-first from `from`, GPUs of a level in ascending order, to the first one that reaches a
    // member of `light`; the lowest such member is the path's end. Before each GPU on the path comes
    // the lowest one of the level before that reaches it. Returns the path, `from` first; empty when
    // there is none: then visited() is closed. No visited GPU may be a member of `light`.
    std::span<const std::int16_t> search(int from, const GpuSet<W>& light) {
        visited_ = {};
        visited_.insert(from);
        order_[0] = static_cast<std::int16_t>(from);
        int begin = 0, end = 1;
        for (int depth = 0; begin < end; ++depth) {
            level_[depth] = static_cast<std::int16_t>(begin);
            GpuSet<W> next;
            for (; begin < end; ++begin) {
                const GpuSet<W> reached = reach_.of(order_[begin]), ends = reached & light;
                if (!ends.empty()) {
                    path_[depth] = order_[begin];
                    path_[depth + 1] = static_cast<std::int16_t>(ends.lowest());
                    trace_back(depth);
                    return std::span(path_).first(depth + 2);
                }
                next |= reached;
            }
            next = next - visited_;
            visited_ |= next;
            next.each([&](int gpu) { order_[end++] = static_cast<std::int16_t>(gpu); });
        }
        return {};
    }

    const GpuSet<W>& visited() const { return visited_; }

    void changed(int gpu) { reach_.changed(gpu); }

  private:
    // Fills in the path before the GPU at `depth`.
    void trace_back(int depth) {
        for (; depth > 0; --depth) {
            int before = level_[depth - 1];
            while (!reach_.known(order_[before]).contains(path_[depth])) ++before;
            path_[depth - 1] = order_[before];
        }
    }

    Reach<W> reach_;
    // Of the last search: visited GPUs level by level, where each level begins, and the path.
    std::array<std::int16_t, GpuSet<W>::capacity> order_, level_;
    std::array<std::int16_t, GpuSet<W>::capacity + 1> path_;
    GpuSet<W> visited_;
};

}  // namespace eplb
