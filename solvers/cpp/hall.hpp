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
// All 2^G sets are kept; a swap changes those alone that have one of its two GPUs and confine an expert with it.
// Time per swap tried O(2^G), per swap made O(changed sets x E). Memory O(2^G E).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
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
          sets_(std::size_t{1} << layout.gpus()) {
        for (std::size_t q = 0; q < kTotals; ++q) {
            ahead_[q] = static_cast<float>(totals_[q].live - of.mean);
            floor_[q] = static_cast<float>(totals_[q].floor);
        }
        for (std::int32_t e = 0; e < layout.experts(); ++e)
            for (const std::int32_t s : layout.slots_of(e)) holders_[e] |= bit(layout.gpu_of(s));
        for (std::uint32_t x = 0; x < sets_.size(); ++x) {
            sets_[x].with.assign(layout.experts(), 0.0f);
            for (std::int32_t e = 0; e < layout.experts(); ++e)
                if (layout_.copies(e) > 0 && (holders_[e] & ~x) == 0) {
                    add(sets_[x], sets_[x].moments, e, 1);
                    std::transform(sets_[x].with.begin(), sets_[x].with.end(), of.row(e).begin(),
                                   sets_[x].with.begin(), std::plus());
                }
        }
        price_all();
    }

    double cost() const { return cost_; }

    double try_swap(std::int32_t i, std::int32_t j) {
        tried_ = {i, j};
        changes_.clear();
        tried_risk_ = risk_;
        const std::int32_t e = layout_.expert(i), f = layout_.expert(j);
        const std::uint32_t g = bit(layout_.gpu_of(i)), h = bit(layout_.gpu_of(j)), e_else = holders_[e] ^ g,
                            f_else = holders_[f] ^ h,
                            others = static_cast<std::uint32_t>(sets_.size() - 1) ^ g ^ h;
        for (std::uint32_t x = others;; x = (x - 1) & others) {
            const int of_e = (e_else & ~x) == 0, of_f = (f_else & ~x) == 0;
            if (of_e + of_f > 0) change(x | g, -of_e, of_f), change(x | h, of_e, -of_f);
            if (x == 0) break;
        }
        return tried_cost_ = price(tried_risk_);
    }

    void accept() {
        const std::int32_t e = layout_.expert(tried_.first), f = layout_.expert(tried_.second);
        const auto with_e = of_.row(e), with_f = of_.row(f);
        for (const Change& change : changes_) {
            Set& set = sets_[change.set];
            set.moments = change.moments, set.risk = change.risk;
            const auto of_e = static_cast<float>(change.of_e), of_f = static_cast<float>(change.of_f);
            for (std::size_t i = 0; i < set.with.size(); ++i) set.with[i] += of_e * with_e[i] + of_f * with_f[i];
        }
        const std::uint32_t both = bit(layout_.gpu_of(tried_.first)) ^ bit(layout_.gpu_of(tried_.second));
        holders_[e] ^= both, holders_[f] ^= both;
        layout_.swap(tried_.first, tried_.second);
        risk_ = tried_risk_, cost_ = tried_cost_;
    }
    void reject() {}

  private:
    static constexpr std::size_t kTotals = 8;
    static constexpr float kFar = 6;  // deviations beyond which a set is no risk: 1e-9
    using PerTotal = std::array<float, kTotals>;

    struct Moments {
        float mean = 0, variance = 0, with_total = 0;
    };
    struct Set {
        Moments moments;
        std::vector<float> with;  // covariance of each expert with the number confined
        PerTotal risk{};
    };
    struct Change {
        std::uint32_t set;
        int of_e, of_f;
        Moments moments;
        PerTotal risk;
    };

    static std::uint32_t bit(std::int32_t gpu) { return std::uint32_t{1} << gpu; }

    // What a set is that confines `of_e` more of the expert in the one slot and `of_f` more of that in the other.
    void change(std::uint32_t x, int of_e, int of_f) {
        const std::int32_t e = layout_.expert(tried_.first), f = layout_.expert(tried_.second);
        const Set& set = sets_[x];
        Change& change = changes_.emplace_back(Change{x, of_e, of_f, set.moments, {}});
        if (of_e != 0) add(set, change.moments, e, of_e);
        if (of_f != 0) add(set, change.moments, f, of_f);
        if (of_e != 0 && of_f != 0) change.moments.variance += 2 * static_cast<float>(of_e * of_f) * of_.row(e)[f];
        change.risk = risk(change.moments, x);
        for (std::size_t q = 0; q < kTotals; ++q) tried_risk_[q] += change.risk[q] - set.risk[q];
    }

    void add(const Set& set, Moments& moments, std::int32_t e, int by) const {
        const auto sign = static_cast<float>(by);
        moments.mean += sign * static_cast<float>(of_.live[e]);
        moments.variance += of_.row(e)[e] + 2 * sign * set.with[e];
        moments.with_total += sign * static_cast<float>(of_.with_total[e]);
    }
    PerTotal risk(const Moments& m, std::uint32_t set) const {
        PerTotal tail{};
        if (set == 0 || set + 1 == sets_.size()) return tail;  // confines nothing, or all
        const auto size = static_cast<float>(std::popcount(set));
        const auto spread = static_cast<float>(of_.variance);
        const float slope = spread > 0 ? m.with_total / spread : 0.0f;
        const float scale = 1 / std::sqrt(std::max(m.variance - slope * m.with_total, 1e-4f));
        PerTotal z;
        for (std::size_t q = 0; q < kTotals; ++q)
            z[q] = (floor_[q] * size + 0.5f - m.mean - slope * ahead_[q]) * scale;
        if (*std::min_element(z.begin(), z.end()) > kFar) return tail;
        for (std::size_t q = 0; q < kTotals; ++q) tail[q] = normal_tail(z[q]);
        return tail;
    }
    double price(const std::array<double, kTotals>& risk) const {
        double sum = 0;
        for (std::size_t q = 0; q < kTotals; ++q) sum += totals_[q].weight * (1 - std::exp(-risk[q]));
        return sum;
    }
    void price_all() {
        risk_ = {};
        for (std::uint32_t x = 0; x < sets_.size(); ++x) {
            sets_[x].risk = risk(sets_[x].moments, x);
            for (std::size_t q = 0; q < kTotals; ++q) risk_[q] += sets_[x].risk[q];
        }
        cost_ = price(risk_);
    }

    const Liveness& of_;
    Layout& layout_;
    std::array<Total, kTotals> totals_;
    std::vector<std::uint32_t> holders_;
    std::vector<Set> sets_;
    PerTotal ahead_{}, floor_{};
    std::array<double, kTotals> risk_{}, tried_risk_{};
    double cost_ = 0, tried_cost_ = 0;
    std::pair<std::int32_t, std::int32_t> tried_{-1, -1};
    std::vector<Change> changes_;
};

}  // namespace eplb
