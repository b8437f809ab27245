// What is counted of a layer's placement; `slots` are [gpus, slots_per_gpu], -1 where empty.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace eplb {

// `copies` is [experts].
inline void count_copies(std::span<const std::int32_t> slots, std::span<std::int64_t> copies) {
    std::fill(copies.begin(), copies.end(), 0);
    for (const std::int32_t expert : slots)
        if (expert >= 0) ++copies[expert];
}

class PlacementMetrics {
  public:
    explicit PlacementMetrics(std::size_t experts) : share_(experts + 1), seen_on_(experts + 1) {}

    // The load of every GPU when copies share an expert's load equally, and returns how many slots have an
    // expert with an earlier slot on the same GPU.
    std::int64_t measure(std::span<const std::int32_t> slots, std::span<const std::int64_t> copies,
                         std::span<const double> load, std::span<double> gpu_load) {
        share_[0] = 0;  // of an empty slot
        for (std::size_t e = 0; e < load.size(); ++e)
            share_[e + 1] = copies[e] > 1 ? load[e] / static_cast<double>(copies[e]) : load[e];
        seen_on_.assign(seen_on_.size(), kNowhere);
        const std::size_t width = slots.size() / gpu_load.size();
        std::int64_t duplicates = 0;
        for (std::size_t g = 0; g < gpu_load.size(); ++g) {
            double sum = 0;
            for (const std::int32_t expert : slots.subspan(g * width, width)) {
                sum += share_[expert + 1];
                duplicates += expert >= 0 && seen_on_[expert + 1] == g;
                seen_on_[expert + 1] = g;
            }
            gpu_load[g] = sum;
        }
        return duplicates;
    }

  private:
    static constexpr std::size_t kNowhere = ~std::size_t{0};

    std::vector<double> share_;         // [1 + experts]
    std::vector<std::size_t> seen_on_;  // [1 + experts]: the last GPU with a slot of it
};

}  // namespace eplb
