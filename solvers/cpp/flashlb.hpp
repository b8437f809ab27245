// vLLM-Ascend's FlashLB (policy_flashlb.py): copies by a search in layers of experts, placed for the mean
// and the variance of recorded loads.
//
// Over T samples of an expert's load, of which zeros count as 1: mean, variance, covariances (T - 1 in the
// denominator; 0 for one sample); risk = mean + z * deviation.
// Copies (`grant`): one by one to the expert with the largest risk per copy, ties to the earlier.
// Placement (`deploy`): the experts by falling mean per copy (ties to the lower id), each copy to the GPU
// with room, without the expert, whose mean + z * deviation is then least; the lowest on a tie. The
// variance counts the covariances with what the GPU holds.
// Score: the mean over samples of (peak * GPUs + 0.01) / (total + 0.01).
// Search: experts by falling risk (ties to the lower id) in `depth` groups of equal size. For each group
// but the last, the budget of extra copies that the greedy gives it among the experts not yet decided, and
// the budgets within `width` of that (nearest first, lower before higher): both the group and the rest
// take their copies greedily, all is placed and scored; the first best budget stays. The last group takes
// what is left.
// A copy that finds no GPU (the original has no answer here) is dropped; open slots then go, GPU by GPU, to
// the expert with the largest mean per copy that the GPU does not hold, ties to the lower id.
// Given an old placement, a layer whose score does not fall keeps it; else new GPUs take the place of old
// ones so that most experts stay (assignment.hpp; only between GPUs with as many filled slots), and within
// a GPU those that stay keep their slots. GPUs may have unequal room (empty slots of the old placement).
// The original calculates in float32.
// Time O(T E^2 + depth * width * P * (G + E)) for several samples.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "packing.hpp"

namespace eplb {

struct FlashOptions {
    double z;
    std::int32_t depth, width;
};

// `samples` is [count, experts], `slots` [gpus, slots_per_gpu].
inline double flash_score(std::span<const double> samples, std::int32_t experts, std::int32_t gpus,
                          std::int32_t slots_per_gpu, const std::int32_t* slots) {
    std::vector<double> copies(experts, 0.0);
    for (std::int32_t p = 0; p < gpus * slots_per_gpu; ++p)
        if (slots[p] >= 0) copies[slots[p]] += 1;
    double sum = 0;
    for (std::size_t at = 0; at < samples.size(); at += experts) {
        double peak = 0, total = 0;
        for (std::int32_t g = 0; g < gpus; ++g) {
            double load = 0;
            for (std::int32_t p = g * slots_per_gpu; p < (g + 1) * slots_per_gpu; ++p)
                if (slots[p] >= 0) load += samples[at + slots[p]] / copies[slots[p]];
            peak = std::max(peak, load), total += load;
        }
        sum += (peak * gpus + 1e-2) / (total + 1e-2);
    }
    return sum / static_cast<double>(samples.size() / experts);
}

class FlashLb {
  public:
    // `samples` is [count, experts], none of it 0. `room` holds the slots that each GPU may fill; all
    // together there are at least `experts`. `slots` is [gpus, slots_per_gpu]. Returns the score.
    double place(std::span<const double> samples, std::int32_t experts, std::span<const std::int32_t> room,
                 std::int32_t slots_per_gpu, const FlashOptions& options, std::int32_t* slots) {
        samples_ = samples, experts_ = experts, room_ = room, width_ = slots_per_gpu, z_ = options.z;
        gpus_ = static_cast<std::int32_t>(room.size());
        measure();
        search(options);
        std::copy(best_.begin(), best_.end(), slots);
        return best_score_;
    }

  private:
    std::int64_t num_samples() const { return static_cast<std::int64_t>(samples_.size()) / experts_; }

    void measure() {
        const std::int64_t count = num_samples();
        mean_.assign(experts_, 0.0), variance_.assign(experts_, 0.0), covariance_.clear();
        for (std::int64_t t = 0; t < count; ++t)
            for (std::int32_t e = 0; e < experts_; ++e) mean_[e] += samples_[t * experts_ + e];
        for (double& m : mean_) m /= static_cast<double>(count);
        if (count > 1) {
            covariance_.assign(static_cast<std::size_t>(experts_) * experts_, 0.0);
            std::vector<double> off(experts_);
            for (std::int64_t t = 0; t < count; ++t) {
                for (std::int32_t e = 0; e < experts_; ++e) off[e] = samples_[t * experts_ + e] - mean_[e];
                for (std::int32_t e = 0; e < experts_; ++e) {
                    double* row = covariance_.data() + static_cast<std::size_t>(e) * experts_;
                    for (std::int32_t f = 0; f < experts_; ++f) row[f] += off[e] * off[f];
                }
            }
            for (double& c : covariance_) c /= static_cast<double>(count - 1);
            for (std::int32_t e = 0; e < experts_; ++e)
                variance_[e] = covariance_[static_cast<std::size_t>(e) * experts_ + e];
        }
        risk_.resize(experts_);
        for (std::int32_t e = 0; e < experts_; ++e) risk_[e] = mean_[e] + z_ * std::sqrt(variance_[e]);
    }

    // Who gets the extra copies among `group`, in the order in which they are granted.
    std::vector<std::int32_t> grant(std::span<const std::int32_t> group, std::int32_t count) const {
        std::vector<std::int32_t> takers, copies(group.size(), 1);
        std::vector<double> per_copy;
        for (const std::int32_t e : group) per_copy.push_back(risk_[e]);
        for (; count > 0; --count) {
            const auto i = std::max_element(per_copy.begin(), per_copy.end()) - per_copy.begin();
            takers.push_back(group[i]);
            per_copy[i] = risk_[group[i]] / ++copies[i];
        }
        return takers;
    }

    void search(const FlashOptions& options) {
        std::int32_t left = std::accumulate(room_.begin(), room_.end(), 0) - experts_;
        const std::vector<std::int32_t> order = heaviest_first(risk_);
        const std::span<const std::int32_t> all(order);
        const std::int32_t size = (experts_ + options.depth - 1) / options.depth;
        decided_.assign(experts_, 1);
        std::int32_t first = 0;
        for (std::int32_t node = 1; node < options.depth && left > 0 && first + size < experts_; ++node) {
            const auto group = all.subspan(first, size), rest = all.subspan(first + size);
            const std::vector<std::int32_t> for_group = grant(group, left), for_rest = grant(rest, left);
            std::int32_t greedy = 0;
            for (const std::int32_t e : grant(all.subspan(first), left))
                greedy += std::find(group.begin(), group.end(), e) != group.end();
            const std::int32_t budget = best_budget(for_group, for_rest, left, greedy, options.width);
            for (std::int32_t i = 0; i < budget; ++i) ++decided_[for_group[i]];
            left -= budget;
            first += size;
        }
        for (const std::int32_t e : grant(all.subspan(first), left)) ++decided_[e];
        copies_ = decided_;
        deploy();
        best_ = deployed_;
        best_score_ = score(best_);
    }

    std::int32_t best_budget(std::span<const std::int32_t> for_group, std::span<const std::int32_t> for_rest,
                             std::int32_t left, std::int32_t greedy, std::int32_t width) {
        std::int32_t best = greedy;
        double least = std::numeric_limits<double>::infinity();
        const auto consider = [&](std::int32_t budget) {
            if (budget < 0 || budget > left) return;
            copies_ = decided_;
            for (std::int32_t i = 0; i < budget; ++i) ++copies_[for_group[i]];
            for (std::int32_t i = 0; i < left - budget; ++i) ++copies_[for_rest[i]];
            deploy();
            const double found = score(deployed_);
            if (found < least) least = found, best = budget;
        };
        consider(greedy);
        for (std::int32_t off = 1; off <= width; ++off) consider(greedy - off), consider(greedy + off);
        return best;
    }

    bool holds(std::int32_t gpu, std::int32_t expert) const {
        const auto row = deployed_.begin() + gpu * width_;
        return std::find(row, row + width_, expert) != row + width_;
    }

    double score(const std::vector<std::int32_t>& slots) const {
        return flash_score(samples_, experts_, gpus_, width_, slots.data());
    }

    // Places `copies_`.
    void deploy() {
        deployed_.assign(static_cast<std::size_t>(gpus_) * width_, -1);
        used_.assign(gpus_, 0);
        gpu_mean_.assign(gpus_, 0.0), gpu_variance_.assign(gpus_, 0.0);
        // How the expert varies with what the GPU holds.
        gpu_covariance_.assign(covariance_.empty() ? 0 : static_cast<std::size_t>(gpus_) * experts_, 0.0);
        per_copy_.resize(experts_);
        for (std::int32_t e = 0; e < experts_; ++e) per_copy_[e] = mean_[e] / copies_[e];
        for (const std::int32_t e : heaviest_first(per_copy_))
            for (std::int32_t copy = 0; copy < copies_[e]; ++copy)
                if (!put_where_risk_is_least(e)) break;
        fill_open_slots();
    }

    double variance_with(std::int32_t gpu, std::int32_t e) const {
        if (covariance_.empty()) return 0;
        const double share = 1.0 / copies_[e];
        return gpu_variance_[gpu] + variance_[e] * share * share +
               2 * share * gpu_covariance_[static_cast<std::size_t>(gpu) * experts_ + e];
    }

    bool put_where_risk_is_least(std::int32_t e) {
        std::int32_t best = -1;
        double least = 0, variance = 0;
        for (std::int32_t g = 0; g < gpus_; ++g) {
            if (used_[g] == room_[g] || holds(g, e)) continue;
            const double with = variance_with(g, e);
            const double risk = gpu_mean_[g] + per_copy_[e] + z_ * std::sqrt(std::max(with, 0.0));
            if (best < 0 || risk < least) best = g, least = risk, variance = with;
        }
        if (best < 0) return false;
        deployed_[best * width_ + used_[best]++] = e;
        gpu_mean_[best] += per_copy_[e];
        gpu_variance_[best] = variance;
        if (!covariance_.empty()) {
            const double* row = covariance_.data() + static_cast<std::size_t>(e) * experts_;
            double* with = gpu_covariance_.data() + static_cast<std::size_t>(best) * experts_;
            for (std::int32_t f = 0; f < experts_; ++f) with[f] += row[f] / copies_[e];
        }
        return true;
    }

    void fill_open_slots() {
        for (std::int32_t g = 0; g < gpus_; ++g)
            while (used_[g] < room_[g]) {
                std::int32_t best = -1;
                for (std::int32_t e = 0; e < experts_; ++e)
                    if ((best < 0 || per_copy_[e] > per_copy_[best]) && !holds(g, e)) best = e;
                if (best < 0) break;
                deployed_[g * width_ + used_[g]++] = best;
            }
    }

    std::span<const double> samples_;
    std::span<const std::int32_t> room_;
    std::int32_t experts_ = 0, gpus_ = 0, width_ = 0;
    double z_ = 0, best_score_ = 0;
    std::vector<double> mean_, variance_, covariance_, risk_, per_copy_, gpu_mean_, gpu_variance_, gpu_covariance_;
    std::vector<std::int32_t> decided_, copies_, deployed_, used_, best_;
};

}  // namespace eplb
