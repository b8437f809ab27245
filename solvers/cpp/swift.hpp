// vLLM-Ascend's swift balancer (policy_swift_balancer.py), which changes an old placement a little.
//
// A layer whose fullest GPU is less than 1.01 times the mean is left alone. Otherwise:
// 1. The first slot of each expert, counted slot by slot and GPU by GPU within a slot, is its home; all
//    other filled slots are freed.
// 2. Every freed slot: one more copy to the expert with the largest load per copy, ties to the higher id,
//    none beyond one per GPU. The load per copy shrinks by 2/3, 3/4, ..., where a share would by 1/2, 2/3,
//    ...: a weakness that is kept.
// 3. The extra copies by falling load per copy, ties to the lower id: to the lightest GPU with a freed slot
//    (its last) that does not hold the expert and has got none from the expert's home; the lowest on a
//    tie. One that finds no GPU is dropped.
// 4. Freed slots still open, GPU by GPU: to the expert with the largest load per copy, counting the
//    replicas that exist, that the GPU does not hold; ties to the higher id.
// 5. At most 100 times: the fullest GPU (the highest on a tie) and the others by rising load (ties to the
//    lower): the first that exchanged nothing with it in either direction and where a swap of two experts,
//    neither on the other GPU nor got in this round, lowers the pair's larger load by at least 0.01 of the
//    mean; the best swap, ties to the lower ids.
// 6. The result counts if the peak over the mean falls. The mean of steps 5 and 6 is that of layer 0, for
//    every layer: a weakness that is kept. So is the peak of step 6, which is that before the last swap
//    if the hundredth was made.
// The original calculates in float32 and takes whole tokens.
// Time O(E R + 100 G S^2).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace eplb {

class Swift {
  public:
    // `previous` and `slots` are [gpus, slots_per_gpu]; every expert has a slot in `previous`. Returns the
    // peak that the policy believes in, NaN where it left the layer alone.
    double place(std::span<const double> load, const std::int32_t* previous, std::int32_t gpus,
                 std::int32_t slots_per_gpu, double mean, std::int32_t* slots) {
        experts_ = static_cast<std::int32_t>(load.size()), gpus_ = gpus, width_ = slots_per_gpu;
        load_ = load, slots_ = slots;
        std::copy_n(previous, gpus * slots_per_gpu, slots);
        const double before = imbalance();
        if (before < kThreshold) return std::numeric_limits<double>::quiet_NaN();

        free_all_but_homes();
        grant();
        place_extra_copies();
        fill_open_slots();
        const double peak = swap(mean * kLeastGain);
        if (!(peak / mean < before)) std::copy_n(previous, gpus * slots_per_gpu, slots);
        return peak;
    }

  private:
    static constexpr double kThreshold = 1.01, kLeastGain = 0.01;
    static constexpr int kSwaps = 100;

    std::int32_t& slot(std::int32_t gpu, std::int32_t s) { return slots_[gpu * width_ + s]; }

    bool holds(std::int32_t gpu, std::int32_t expert) const {
        const std::int32_t* row = slots_ + gpu * width_;
        return std::find(row, row + width_, expert) != row + width_;
    }

    void count_copies() {
        copies_.assign(experts_, 0);
        for (std::int32_t p = 0; p < gpus_ * width_; ++p)
            if (slots_[p] >= 0) ++copies_[slots_[p]];
    }

    // The GPUs' loads at `share_` per replica.
    void add_up() {
        gpu_load_.assign(gpus_, 0.0);
        for (std::int32_t g = 0; g < gpus_; ++g)
            for (std::int32_t s = 0; s < width_; ++s)
                if (slot(g, s) >= 0) gpu_load_[g] += share_[slot(g, s)];
    }

    double imbalance() {
        count_copies();
        share_.resize(experts_);
        for (std::int32_t e = 0; e < experts_; ++e) share_[e] = load_[e] / copies_[e];
        add_up();
        double peak = 0, total = 0;
        for (const double l : gpu_load_) peak = std::max(peak, l), total += l;
        return total / gpus_ < 1e-9 ? 1.0 : peak / (total / gpus_);
    }

    void free_all_but_homes() {
        home_.assign(experts_, -1);
        open_.assign(gpus_, {});
        redundant_ = 0;
        for (std::int32_t s = 0; s < width_; ++s)
            for (std::int32_t g = 0; g < gpus_; ++g) {
                std::int32_t& expert = slot(g, s);
                if (expert < 0) continue;
                if (home_[expert] < 0) {
                    home_[expert] = g;
                    continue;
                }
                expert = -1, ++redundant_;
                open_[g].push_back(s);
            }
    }

    void grant() {
        share_.assign(load_.begin(), load_.end());
        extra_.assign(experts_, 0);
        for (std::int32_t r = 0; r < redundant_; ++r) {
            std::int32_t best = -1;
            for (std::int32_t e = 0; e < experts_; ++e)
                if (extra_[e] + 1 < gpus_ && (best < 0 || share_[e] >= share_[best])) best = e;
            if (best < 0) return;
            const std::int32_t extra = extra_[best]++;
            share_[best] = share_[best] * (extra + 2) / (extra + 3);
        }
    }

    void place_extra_copies() {
        add_up();
        exchanged_.assign(static_cast<std::size_t>(gpus_) * gpus_, 0);
        got_.assign(static_cast<std::size_t>(gpus_) * experts_, 0);
        std::vector<std::int32_t> waiting;
        for (std::int32_t e = 0; e < experts_; ++e) waiting.insert(waiting.end(), extra_[e], e);
        std::stable_sort(waiting.begin(), waiting.end(),
                         [&](std::int32_t a, std::int32_t b) { return share_[a] > share_[b]; });
        for (const std::int32_t e : waiting) {
            std::int32_t best = -1;
            for (std::int32_t g = 0; g < gpus_; ++g)
                if (!open_[g].empty() && !exchanged(home_[e], g) && !holds(g, e) &&
                    (best < 0 || gpu_load_[g] < gpu_load_[best]))
                    best = g;
            if (best < 0) continue;
            receive(best, open_[best].back(), e);
            open_[best].pop_back();
            gpu_load_[best] += share_[e];
        }
    }

    void receive(std::int32_t gpu, std::int32_t s, std::int32_t expert) {
        slot(gpu, s) = expert;
        exchanged(home_[expert], gpu) = 1;
        got_[static_cast<std::size_t>(gpu) * experts_ + expert] = 1;
    }

    char& exchanged(std::int32_t from, std::int32_t to) {
        return exchanged_[static_cast<std::size_t>(from) * gpus_ + to];
    }

    void fill_open_slots() {
        if (std::all_of(open_.begin(), open_.end(), [](const auto& open) { return open.empty(); })) return;
        count_copies();
        for (std::int32_t e = 0; e < experts_; ++e) share_[e] = load_[e] / copies_[e];
        for (std::int32_t g = 0; g < gpus_; ++g)
            for (const std::int32_t s : open_[g]) {
                std::int32_t best = -1;
                for (std::int32_t e = 0; e < experts_; ++e)
                    if ((best < 0 || share_[e] >= share_[best]) && !holds(g, e)) best = e;
                if (best < 0) continue;
                receive(g, s, best);
                const std::int32_t copies = copies_[best]++;
                share_[best] = share_[best] * copies / (copies + 1);
            }
        add_up();
    }

    double swap(double least_gain) {
        std::vector<std::int32_t> order(gpus_);
        double peak = 0;
        bool swapped = true;
        for (int round = 0; round < kSwaps; ++round) {
            for (std::int32_t g = 0; g < gpus_; ++g) order[g] = g;
            std::stable_sort(order.begin(), order.end(),
                             [&](std::int32_t a, std::int32_t b) { return gpu_load_[a] < gpu_load_[b]; });
            const std::int32_t fullest = order.back();
            order.pop_back();
            peak = gpu_load_[fullest];
            if (!swapped) break;
            swapped = std::any_of(order.begin(), order.end(),
                                  [&](std::int32_t other) { return swap_with(fullest, other, least_gain); });
            order.push_back(fullest);
        }
        return peak;
    }

    // The slots whose expert may leave `gpu` for `other`, by rising expert.
    std::vector<std::int32_t> movable(std::int32_t gpu, std::int32_t other) {
        std::vector<std::int32_t> found;
        for (std::int32_t s = 0; s < width_; ++s) {
            const std::int32_t e = slot(gpu, s);
            if (e >= 0 && !got_[static_cast<std::size_t>(gpu) * experts_ + e] && !holds(other, e))
                found.push_back(s);
        }
        std::sort(found.begin(), found.end(),
                  [&](std::int32_t a, std::int32_t b) { return slot(gpu, a) < slot(gpu, b); });
        return found;
    }

    bool swap_with(std::int32_t fullest, std::int32_t other, double least_gain) {
        if (exchanged(fullest, other) || exchanged(other, fullest)) return false;
        const double high = gpu_load_[fullest], low = gpu_load_[other];
        double best = high;
        std::int32_t give = -1, take = -1;
        const std::vector<std::int32_t> takes = movable(other, fullest);
        for (const std::int32_t s : movable(fullest, other))
            for (const std::int32_t t : takes) {
                const double moved = share_[slot(fullest, s)], back = share_[slot(other, t)];
                const double larger = std::max(high - moved + back, low - back + moved);
                if (larger < best) best = larger, give = s, take = t;
            }
        if (give < 0 || high - best < least_gain) return false;
        std::int32_t &given = slot(fullest, give), &taken = slot(other, take);
        const double difference = share_[taken] - share_[given];
        gpu_load_[fullest] += difference, gpu_load_[other] -= difference;
        std::swap(given, taken);
        got_[static_cast<std::size_t>(fullest) * experts_ + given] = 1;
        got_[static_cast<std::size_t>(other) * experts_ + taken] = 1;
        exchanged(fullest, other) = exchanged(other, fullest) = 1;
        return true;
    }

    std::int32_t experts_ = 0, gpus_ = 0, width_ = 0, redundant_ = 0;
    std::span<const double> load_;
    std::int32_t* slots_ = nullptr;
    std::vector<std::int32_t> copies_, home_, extra_;
    std::vector<double> share_, gpu_load_;
    std::vector<std::vector<std::int32_t>> open_;  // freed slots of each GPU
    std::vector<char> exchanged_, got_;
};

}  // namespace eplb
