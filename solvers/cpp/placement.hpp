// A placement prepared for routing: for every layer, the experts' candidate replicas, grouped by
// how many GPUs hold them, so that a router reads them front to back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gpu_set.hpp"

namespace eplb {

constexpr std::int64_t kMaxGpus = 1024;
constexpr std::int64_t kMaxExperts = 4096;

// A replica that a router may choose: the expert's lowest slot on that GPU.
struct Candidate {
    std::int32_t gpu;
    std::int32_t slot;  // physical id: gpu * slots_per_gpu + place on the GPU
};

struct SingleCopy {
    std::int32_t expert;
    Candidate only;
};

struct TwoCopies {
    std::int32_t expert;
    Candidate low, high;  // low.gpu < high.gpu
};

// One layer. An expert twice on one GPU is one candidate. Experts with replicas on one GPU are in
// `singles`, on two in `pairs`, on more in `others`; `singles`, `pairs` and `others` one after the
// other are the experts in the order (number of candidates, expert id).
struct Layer {
    std::int32_t gpus, slots_per_gpu, experts;
    std::int32_t filled_gpus;                 // GPUs with at least one expert: so many,
    std::span<const std::uint64_t> filled;    // and which, a set of set_words(gpus)
    std::span<const std::int32_t> expert_of;  // [gpus * slots_per_gpu], -1 where empty
    std::span<const std::int32_t> first;      // [experts + 1], into candidates
    std::span<const Candidate> candidates;    // by expert, then by GPU
    std::span<const SingleCopy> singles;
    std::span<const TwoCopies> pairs;
    std::span<const std::int32_t> others;
    std::span<const std::int32_t> absent;    // experts without any replica
    std::span<const std::uint64_t> holders;  // [slots], sets of set_words(gpus): who holds its expert

    std::span<const Candidate> candidates_of(std::int32_t expert) const {
        const std::size_t begin = first[expert], end = first[expert + 1];
        return candidates.subspan(begin, end - begin);
    }
    template <int W>
    GpuSet<W> holders_of(std::int32_t slot) const {
        return GpuSet<W>::read(holders.data() + static_cast<std::size_t>(slot) * W);
    }
    // The slot of a candidate of `expert` on `gpu`, -1 if there is none.
    std::int32_t slot_on(std::int32_t gpu, std::int32_t expert) const {
        for (const Candidate c : candidates_of(expert))
            if (c.gpu == gpu) return c.slot;
        return -1;
    }
    std::int32_t physical_slots() const { return gpus * slots_per_gpu; }
};

class Placement {
  public:
    // `slots` is [layers, gpus, slots_per_gpu], each entry -1 or an expert below `experts`; the
    // caller has checked that, kMaxGpus and kMaxExperts.
    Placement(std::span<const std::int32_t> slots, std::int64_t layers, std::int64_t gpus,
              std::int64_t slots_per_gpu, std::int64_t experts)
        : expert_of_(slots.begin(), slots.end()) {
        const std::size_t per_layer = gpus * slots_per_gpu;
        // Spans into these point at their final storage: reserve once, never grow.
        first_.reserve(layers * (experts + 1));
        candidates_.reserve(slots.size());
        singles_.reserve(layers * experts);
        pairs_.reserve(layers * experts);
        others_.reserve(layers * experts);
        absent_.reserve(layers * experts);
        filled_.reserve(layers * set_words(static_cast<int>(gpus)));
        holders_.reserve(slots.size() * set_words(static_cast<int>(gpus)));
        layers_.reserve(layers);
        for (std::int64_t l = 0; l < layers; ++l)
            add_layer(std::span(expert_of_).subspan(l * per_layer, per_layer), static_cast<std::int32_t>(gpus),
                      static_cast<std::int32_t>(slots_per_gpu), static_cast<std::int32_t>(experts));
    }
    Placement(const Placement&) = delete;
    Placement& operator=(const Placement&) = delete;

    std::int64_t num_layers() const { return static_cast<std::int64_t>(layers_.size()); }
    const Layer& layer(std::int64_t l) const { return layers_[l]; }

  private:
    void add_layer(std::span<const std::int32_t> expert_of, std::int32_t gpus, std::int32_t slots_per_gpu,
                   std::int32_t experts) {
        const std::size_t first0 = first_.size(), candidates0 = candidates_.size(), singles0 = singles_.size(),
                          pairs0 = pairs_.size(), others0 = others_.size(), absent0 = absent_.size(),
                          holders0 = holders_.size();

        // Counting sort of the slots by expert; a second slot on the same GPU is skipped both times.
        std::vector<std::int32_t> end(experts, 0), last_gpu(experts, -1);
        const int words = set_words(gpus);
        const std::size_t filled0 = filled_.size();
        filled_.resize(filled0 + words, 0);
        std::int32_t filled_gpus = 0;
        const auto each_candidate = [&](auto&& visit) {
            std::fill(last_gpu.begin(), last_gpu.end(), -1);
            for (std::int32_t slot = 0; slot < gpus * slots_per_gpu; ++slot) {
                const std::int32_t e = expert_of[slot], gpu = slot / slots_per_gpu;
                if (e < 0 || last_gpu[e] == gpu) continue;
                last_gpu[e] = gpu;
                visit(e, Candidate{gpu, slot});
            }
        };
        each_candidate([&](std::int32_t e, Candidate) { ++end[e]; });
        std::int32_t sum = 0;
        for (std::int32_t e = 0; e < experts; ++e) {
            first_.push_back(sum);
            sum += end[e];
            end[e] = first_.back();
        }
        first_.push_back(sum);
        candidates_.resize(candidates0 + sum);
        each_candidate([&](std::int32_t e, Candidate c) { candidates_[candidates0 + end[e]++] = c; });
        for (std::int32_t g = 0; g < gpus; ++g) {
            const auto mine = expert_of.subspan(g * slots_per_gpu, slots_per_gpu);
            if (std::none_of(mine.begin(), mine.end(), [](auto e) { return e >= 0; })) continue;
            ++filled_gpus;
            filled_[filled0 + g / 64] |= std::uint64_t{1} << (g % 64);
        }

        for (std::int32_t e = 0; e < experts; ++e) {
            const Candidate* c = candidates_.data() + candidates0 + first_[first0 + e];
            const std::int32_t copies = first_[first0 + e + 1] - first_[first0 + e];
            if (copies == 0) absent_.push_back(e);
            if (copies == 1) singles_.push_back({e, c[0]});
            if (copies == 2) pairs_.push_back({e, c[0], c[1]});
            if (copies >= 3) others_.push_back(e);
        }
        const std::int32_t* first = first_.data() + first0;
        for (const std::int32_t e : expert_of) {
            const std::size_t set = holders_.size();
            holders_.resize(set + words, 0);
            for (std::int32_t i = e < 0 ? 0 : first[e]; i < (e < 0 ? 0 : first[e + 1]); ++i) {
                const std::int32_t gpu = candidates_[candidates0 + i].gpu;
                holders_[set + gpu / 64] |= std::uint64_t{1} << (gpu % 64);
            }
        }
        std::stable_sort(
            others_.begin() + static_cast<std::ptrdiff_t>(others0), others_.end(),
            [first](std::int32_t a, std::int32_t b) { return first[a + 1] - first[a] < first[b + 1] - first[b]; });
        layers_.push_back({gpus, slots_per_gpu, experts, filled_gpus, std::span(filled_).subspan(filled0),
                           expert_of, std::span(first_).subspan(first0),
                           std::span(candidates_).subspan(candidates0), std::span(singles_).subspan(singles0),
                           std::span(pairs_).subspan(pairs0), std::span(others_).subspan(others0),
                           std::span(absent_).subspan(absent0), std::span(holders_).subspan(holders0)});
    }

    std::vector<std::int32_t> expert_of_, first_, others_, absent_;
    std::vector<std::uint64_t> filled_, holders_;
    std::vector<Candidate> candidates_;
    std::vector<SingleCopy> singles_;
    std::vector<TwoCopies> pairs_;
    std::vector<Layer> layers_;
};

}  // namespace eplb
