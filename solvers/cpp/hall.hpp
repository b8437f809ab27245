// How often an optimally routed batch stays at its floor, for up to 8 GPUs: Hall's condition, set by set.
//
// A batch of n live experts can be routed with t = ceil(n / G) activations on the fullest GPU if and only if
// no GPU set X confines more than t |X| of them: has more live experts without a replica outside X. Given n,
// the number confined to X is taken as normal: with m and v the mean and variance over the experts confined
// to X, c its covariance with n, V the variance of n, it has mean m + c / V (n - mean n) and variance
// v - c^2 / V. With Q(X) the chance that it is above t |X|, the expected number of sets that are is sum Q(X),
// and the chance that there is one about 1 - exp(-sum Q(X)), as if they came in independent clumps. The cost
// of a layout is its mean over `totals` of n. It needs no batch and so cannot overfit to any.
//
// All 2^G sets are priced anew for every swap, eight at a time; how an expert varies with the number confined to
// each is summed over the subsets of each at once (Yates). Time per swap O(2^G + E), tried or made. Memory
// O(2^G + E).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "annealing.hpp"
#include "liveness.hpp"
#include "normal.hpp"

namespace eplb {

constexpr std::int32_t kHallGpus = 8;

class HallJudge {
  public:
    static constexpr bool kExact = true;

    HallJudge(const Liveness& of, Layout& layout)
        : of_(of),
          layout_(layout),
          totals_(totals<kTotals>(of, layout.filled_gpus())),
          holders_(layout.experts(), 0),
          size_(sets(layout.gpus()), kNoRisk),
          with_e_(size_.size()),
          with_f_(size_.size()),
          now_(size_.size()),
          tried_(size_.size()) {
        for (std::size_t q = 0; q < kTotals; ++q) {
            ahead_[q] = static_cast<float>(totals_[q].live - of.mean);
            floor_[q] = static_cast<float>(totals_[q].floor);
        }
        const std::uint32_t all = (std::uint32_t{1} << layout.gpus()) - 1;
        for (std::uint32_t x = 1; x < all; ++x) size_[x] = static_cast<float>(std::popcount(x));
        for (std::int32_t e = 0; e < layout.experts(); ++e)
            for (const std::int32_t s : layout.slots_of(e)) holders_[e] |= bit(layout.gpu_of(s));
        for (std::int32_t e = 0; e < layout.experts(); ++e) {
            if (holders_[e] == 0) continue;
            now_.mean[holders_[e]] += static_cast<float>(of.live[e]);
            now_.with_total[holders_[e]] += static_cast<float>(of.with_total[e]);
            count_confined(e, with_e_);
            for (std::uint32_t x = 0; x < size_.size(); ++x)
                if ((holders_[e] & ~x) == 0) now_.variance[x] += with_e_[x];
        }
        sum_over_subsets(now_.mean);
        sum_over_subsets(now_.with_total);
        cost_ = price(now_);
    }

    double cost() const { return cost_; }

    double try_swap(std::int32_t i, std::int32_t j) {
        swap_ = {i, j};
        const std::int32_t e = layout_.expert(i), f = layout_.expert(j);
        const std::uint32_t both = bit(layout_.gpu_of(i)) ^ bit(layout_.gpu_of(j));
        count_confined(e, with_e_);
        count_confined(f, with_f_);
        const auto live_e = static_cast<float>(of_.live[e]), live_f = static_cast<float>(of_.live[f]),
                   total_e = static_cast<float>(of_.with_total[e]),
                   total_f = static_cast<float>(of_.with_total[f]), var_e = of_.row(e)[e], var_f = of_.row(f)[f],
                   cov = of_.row(e)[f];
        const std::uint32_t e_before = holders_[e], f_before = holders_[f], e_after = e_before ^ both,
                            f_after = f_before ^ both;
        for (std::uint32_t x = 0; x < size_.size(); ++x) {
            // What more of the expert the set confines: 1, 0 or -1.
            const auto more = [x](std::uint32_t before, std::uint32_t after) {
                return static_cast<float>(static_cast<int>((after & ~x) == 0) -
                                          static_cast<int>((before & ~x) == 0));
            };
            const float of_e = more(e_before, e_after), of_f = more(f_before, f_after);
            tried_.mean[x] = now_.mean[x] + of_e * live_e + of_f * live_f;
            tried_.with_total[x] = now_.with_total[x] + of_e * total_e + of_f * total_f;
            tried_.variance[x] = now_.variance[x] + of_e * (of_e * var_e + 2 * with_e_[x]) +
                                 of_f * (of_f * var_f + 2 * with_f_[x]) + 2 * of_e * of_f * cov;
        }
        return tried_cost_ = price(tried_);
    }

    void accept() {
        const auto [i, j] = swap_;
        const std::uint32_t both = bit(layout_.gpu_of(i)) ^ bit(layout_.gpu_of(j));
        holders_[layout_.expert(i)] ^= both, holders_[layout_.expert(j)] ^= both;
        layout_.swap(i, j);
        std::swap(now_, tried_);
        cost_ = tried_cost_;
    }
    void reject() {}

  private:
    static constexpr std::size_t kTotals = 8, kLanes = 8;
    static constexpr float kNoRisk = 1e6;   // of sets that confine nothing, or all: for a size
    static constexpr float kLeast = 1e-4f;  // variance
    using PerSet = std::vector<float>;

    // Of the number of live experts that each set confines.
    struct Moments {
        PerSet mean, variance, with_total;
        explicit Moments(std::size_t sets) : mean(sets, 0.0f), variance(sets, 0.0f), with_total(sets, 0.0f) {}
    };

    static std::uint32_t bit(std::int32_t gpu) { return std::uint32_t{1} << gpu; }
    static std::size_t sets(std::int32_t gpus) { return std::max(kLanes, std::size_t{1} << gpus); }

    // The covariance of an expert with the number that each set confines.
    void count_confined(std::int32_t expert, PerSet& with) const {
        std::fill(with.begin(), with.end(), 0.0f);
        const auto row = of_.row(expert);
        for (std::size_t e = 0; e < row.size(); ++e)
            if (holders_[e] != 0) with[holders_[e]] += row[e];
        sum_over_subsets(with);
    }
    static void sum_over_subsets(PerSet& of) {
        for (std::size_t half = 1; half < of.size(); half *= 2)
            for (std::size_t x = 0; x < of.size(); x += 2 * half)
                for (std::size_t k = 0; k < half; ++k) of[x + half + k] += of[x + k];
    }

    double price(const Moments& of) const {
        std::array<std::array<float, kLanes>, kTotals> risk{};
        const auto spread = static_cast<float>(of_.variance), inverse = spread > 0 ? 1 / spread : 0.0f;
        for (std::size_t x = 0; x < size_.size(); x += kLanes) {
            std::array<float, kLanes> slope, scale;
            for (std::size_t k = 0; k < kLanes; ++k) slope[k] = of.with_total[x + k] * inverse;
            for (std::size_t k = 0; k < kLanes; ++k) {
                const float variance = of.variance[x + k] - slope[k] * of.with_total[x + k];
                scale[k] = 1 / std::sqrt(variance > kLeast ? variance : kLeast);
            }
            for (std::size_t q = 0; q < kTotals; ++q)
                for (std::size_t k = 0; k < kLanes; ++k)
                    risk[q][k] += normal_tail(
                        (floor_[q] * size_[x + k] + 0.5f - of.mean[x + k] - slope[k] * ahead_[q]) * scale[k]);
        }
        double sum = 0;
        for (std::size_t q = 0; q < kTotals; ++q)
            sum += totals_[q].weight * (1 - std::exp(-std::accumulate(risk[q].begin(), risk[q].end(), 0.0f)));
        return sum;
    }

    const Liveness& of_;
    Layout& layout_;
    std::array<Total, kTotals> totals_;
    std::array<float, kTotals> ahead_{}, floor_{};
    std::vector<std::uint32_t> holders_;
    PerSet size_, with_e_, with_f_;
    Moments now_, tried_;
    double cost_ = 0, tried_cost_ = 0;
    std::pair<std::int32_t, std::int32_t> swap_{-1, -1};
};

}  // namespace eplb
