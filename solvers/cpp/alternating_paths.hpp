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
#include <span>

#include "gpu_set.hpp"
#include "placement.hpp"

namespace eplb {

// `routed` is the answer being improved: tokens per physical slot of the layer.
template <int W>
class AlternatingPaths {
  public:
    AlternatingPaths(const Layer& layer, const std::int64_t* routed) : layer_(layer), routed_(routed) {}

    // Breadth-first from `from`, GPUs of a level in ascending order, to the first one that reaches a
    // member of `light`; the lowest such member is the path's end. Before each GPU on the path comes
    // the lowest one of the level before that reaches it. Returns the path, `from` first; empty when
    // there is none: then visited() is closed. No visited GPU may be a member of `light`.
    std::span<const std::int16_t> search(int from, const GpuSet<W>& light) {
        visited_ = {};
        visited_.insert(from);
        GpuSet<W> level = visited_;
        for (int depth = 0; !level.empty(); ++depth) {
            write(levels_, depth, level);
            GpuSet<W> next;
            for (int w = 0; w < W; ++w)
                for (std::uint64_t rest = level.words[w]; rest != 0; rest &= rest - 1) {
                    const int gpu = 64 * w + std::countr_zero(rest);
                    const GpuSet<W> reached = reach(gpu), ends = reached & light;
                    if (!ends.empty()) {
                        path_[depth] = static_cast<std::int16_t>(gpu);
                        path_[depth + 1] = static_cast<std::int16_t>(ends.lowest());
                        trace_back(depth);
                        return std::span(path_).first(depth + 2);
                    }
                    next |= reached;
                }
            level = next - visited_;
            visited_ |= level;
        }
        return {};
    }

    const GpuSet<W>& visited() const { return visited_; }

    // Call when an expert has come to `gpu` or left it.
    void changed(int gpu) { known_.erase(gpu); }

  private:
    using Sets = std::array<std::uint64_t, GpuSet<W>::capacity * W>;

    static void write(Sets& sets, int index, const GpuSet<W>& set) {
        std::copy(set.words.begin(), set.words.end(), sets.begin() + static_cast<std::ptrdiff_t>(index) * W);
    }
    static GpuSet<W> read(const Sets& sets, int index) {
        return GpuSet<W>::read(sets.data() + static_cast<std::size_t>(index) * W);
    }

    // The GPUs that hold an expert served on `gpu`, itself included. Found when first asked for:
    // most searches see few GPUs.
    GpuSet<W> reach(int gpu) {
        if (!known_.contains(gpu)) {
            known_.insert(gpu);
            GpuSet<W> reach;
            const std::int32_t begin = gpu * layer_.slots_per_gpu;
            for (std::int32_t slot = begin; slot < begin + layer_.slots_per_gpu; ++slot)
                reach.unite_if(layer_.holders_of<W>(slot), routed_[slot] != 0);
            write(reach_, gpu, reach);
        }
        return read(reach_, gpu);
    }

    // Fills in the path before the GPU at `depth`.
    void trace_back(int depth) {
        for (; depth > 0; --depth) {
            GpuSet<W> before = read(levels_, depth - 1);
            while (!read(reach_, before.lowest()).contains(path_[depth])) before.erase(before.lowest());
            path_[depth - 1] = static_cast<std::int16_t>(before.lowest());
        }
    }

    const Layer& layer_;
    const std::int64_t* routed_;
    Sets reach_;   // by GPU, of those in known_ only
    Sets levels_;  // by depth, of the last search
    std::array<std::int16_t, GpuSet<W>::capacity + 1> path_;
    GpuSet<W> known_, visited_;
};

}  // namespace eplb
