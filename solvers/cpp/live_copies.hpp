// How many copies each expert gets for optimally routed batches.
//
// A second copy goes to the experts that are live most often: it takes them from the load that is fixed. How many
// second copies, and how many further ones to experts that have two, which is what GPUs fill up with that else
// starve, is decided by what single GPUs do to a batch of n live experts, t = ceil(n / G), if all are alike:
// a GPU is above t by its single-copy experts alone, or fewer than n - (G - 1) t live experts have a replica on
// it, so that others cannot take the rest. Both numbers are taken as normal given n, with the G-th part of the
// sums over experts for mean and variance v, less v^2 / V as independent draws of variance V that add up to n.
// The number of second copies with the least chance that any GPU is above or below wins, averaged over `totals`.
// Time O(kTried (E + R) log E) for R further copies. Memory O(E).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "copies.hpp"
#include "liveness.hpp"
#include "normal.hpp"

namespace eplb {

class EvenGpus {
  public:
    EvenGpus(const Liveness& of, std::int32_t gpus) : gpus_(gpus), totals_(totals<kTotals>(of, gpus)) {
        live_.resize(of.live.size());
        for (std::size_t e = 0; e < live_.size(); ++e)
            for (std::size_t q = 0; q < kTotals; ++q)
                live_[e][q] = of.live_given(static_cast<std::int32_t>(e), totals_[q].live);
    }

    // The chance that a GPU is above or below its level.
    double risk(std::span<const std::int32_t> copies) const {
        double sum = 0;
        for (std::size_t q = 0; q < kTotals; ++q) {
            double all = 0;
            Part fixed, held;
            for (std::size_t e = 0; e < copies.size(); ++e) {
                const double p = live_[e][q], v = p * (1 - p);
                all += v;
                if (copies[e] == 1) fixed.mean += p, fixed.variance += v;
                held.mean += copies[e] * p, held.variance += copies[e] * v;
            }
            const Total& total = totals_[q];
            const double needed = total.live - (gpus_ - 1) * total.floor;
            const double above = tail(total.floor + 0.5 - fixed.mean / gpus_, fixed.variance / gpus_, all),
                         below = tail(held.mean / gpus_ - needed + 0.5, held.variance / gpus_, all);
            sum += total.weight * (1 - std::pow((1 - above) * (1 - below), gpus_));
        }
        return sum;
    }

  private:
    static constexpr std::size_t kTotals = 8;
    struct Part {
        double mean = 0, variance = 0;
    };

    static double tail(double distance, double variance, double all) {
        const double given_n = variance < all ? variance * (1 - variance / all) : 0.0;
        return normal_tail(static_cast<float>(distance / std::sqrt(std::max(given_n, 1e-6))));
    }

    std::int32_t gpus_;
    std::array<Total, kTotals> totals_;
    std::vector<std::array<double, kTotals>> live_;
};

// `spare` copies on top of one each, no expert more than `most` in all.
inline std::vector<std::int32_t> copies_for_liveness(const Liveness& of, std::int32_t gpus, std::int32_t spare,
                                                     std::int32_t most) {
    constexpr std::int32_t kTried = 64;
    const std::int32_t experts = of.experts();
    std::vector<std::int32_t> hottest(experts), copies(experts, 1), best = copies;
    if (spare <= 0 || most < 2) return best;
    std::iota(hottest.begin(), hottest.end(), 0);
    std::stable_sort(hottest.begin(), hottest.end(),
                     [&](std::int32_t a, std::int32_t b) { return of.live[a] > of.live[b]; });
    const EvenGpus even(of, gpus);
    const std::int32_t last = std::min(spare, experts),
                       first = std::min(last, std::max((spare + most - 2) / (most - 1), last / 2)),
                       step = 1 + (last - first) / kTried;
    std::vector<double> weight(experts);
    double least = 2;
    for (std::int32_t doubled = last; doubled >= first; doubled -= step) {
        std::fill(copies.begin(), copies.end(), 1);
        std::fill(weight.begin(), weight.end(), 0.0);
        for (const std::int32_t e : std::span(hottest).first(doubled)) copies[e] = 2, weight[e] = of.live[e];
        grant_copies(weight, copies, spare - doubled, most, FewestCopiesFirst{}, [](std::int32_t) {});
        const double risk = even.risk(copies);
        if (risk < least) least = risk, best = copies;
    }
    return best;
}

}  // namespace eplb
