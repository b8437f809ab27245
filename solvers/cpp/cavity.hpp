// How often an optimally routed batch stays at its floor, for any number of GPUs: the cavity method.
//
// GPUs are nodes, experts with several copies join them, experts with one are load that is fixed. A batch of n
// live experts stays at t = ceil(n / G) if every live expert finds a GPU with fewer than t. Ask of a GPU
// whether it is full without expert e, if all others go elsewhere where they can: with x(g, e) the chance, an
// expert has to go to g with chance b(e, g) = p_e prod x(h, e) over its other GPUs h, so that
//     x(g, e) = P(S = t | S <= t),   S = sum of independent draws b(f, g) over the other experts f on g,
// and the chance that all fit is
//     prod over GPUs of P(S_g <= t)  *  prod over experts of (1 - p_e prod x(g, e))^(1 - copies).
// Where the GPUs and experts form a tree this is exact, for all GPU sets of Hall's condition that they join. It
// is stationary in x: x may be out of date by a little, and a swap is judged on the two GPUs alone (Bethe's
// approximation; M. Mezard and A. Montanari, Information, Physics, and Computation, 2009, ch. 14).
//
// Experts drawn one by one do not add up to n, so that it does not see GPUs starve: if d(g) live experts are
// lacking to t on g, however they are routed, the others have to take them, which have room for t G - n in all.
// The number of live experts with a replica on g is taken as normal, with the mean and variance v of independent
// draws, less v^2 / V as all draws, of variance V, add up to n. Shortages of 1, 2, ... come to the GPUs as if by
// Poisson, at rates that add up over GPUs; the chance that sum d(g) <= t G - n is a further factor.
// Nor does it see short cycles: GPUs that share two experts, triangles and squares of GPUs fill up together.
// They are counted over the experts with two copies, at a price for each.
//
// The cost of a layout is the mean of 1 - chance over `totals` of n, at each of which expert e is live with
// p_e + Cov(e, n) / V (n - mean n), and the price of its cycles.
// Time per swap tried O(1) and O(S G) for cycles; per swap made O(t (S - t)) for S slots of a GPU, and G times
// that at every kEvery-th. Memory O(P + G^2 + S t).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "annealing.hpp"
#include "liveness.hpp"
#include "normal.hpp"

namespace eplb {

// One number for each of the totals of live experts.
struct Lanes {
    static constexpr int kCount = 8;
    std::array<float, kCount> of{};

    static Lanes all(float x) {
        Lanes lanes;
        lanes.of.fill(x);
        return lanes;
    }
    float& operator[](int q) { return of[q]; }
    float operator[](int q) const { return of[q]; }
    template <class Op>
    static Lanes each(const Lanes& a, const Lanes& b, Op op) {
        Lanes lanes;
        for (int q = 0; q < kCount; ++q) lanes.of[q] = op(a.of[q], b.of[q]);
        return lanes;
    }
    friend Lanes operator+(const Lanes& a, const Lanes& b) {
        return each(a, b, [](float x, float y) { return x + y; });
    }
    friend Lanes operator-(const Lanes& a, const Lanes& b) {
        return each(a, b, [](float x, float y) { return x - y; });
    }
    friend Lanes operator*(const Lanes& a, const Lanes& b) {
        return each(a, b, [](float x, float y) { return x * y; });
    }
    friend Lanes operator/(const Lanes& a, const Lanes& b) {
        return each(a, b, [](float x, float y) { return x / y; });
    }
};

class CavityJudge {
  public:
    static constexpr bool kExact = false;  // swaps are judged by chances that are out of date by a little

    CavityJudge(const Liveness& of, Layout& layout)
        : layout_(layout),
          totals_(totals<Lanes::kCount>(of, layout.filled_gpus())),
          live_(layout.experts()),
          without_(layout.slots().size()),
          full_(layout.slots().size()),
          forced_(layout.slots().size()),
          held_(layout.gpus()),
          short_(layout.gpus()),
          short_of_(layout.gpus()),
          fits_(layout.gpus(), Lanes::all(1)),
          avoids_(layout.experts(), Lanes::all(1)),
          links_(static_cast<std::size_t>(layout.gpus()) * layout.gpus(), 0) {
        for (int q = 0; q < Lanes::kCount; ++q) {
            const Total& total = totals_[q];
            const auto level = static_cast<std::int32_t>(total.floor);
            level_[q] = std::min(layout.width(), level);
            highest_ = std::max(highest_, level_[q]);
            const double slack = layout.filled_gpus() * total.floor - total.live;
            slack_[q] = static_cast<int>(std::min(slack, Shortage::kMost - 1.0));
            needed_[q] = static_cast<float>(total.floor - (slack - slack_[q]));
            for (std::int32_t e = 0; e < layout.experts(); ++e)
                live_[e][q] = static_cast<float>(of.live_given(e, total.live));
        }
        Held all;
        for (std::int32_t e = 0; e < layout.experts(); ++e) all = all.with(live_[e], 1);
        spread_ = all.variance;
        for (std::int32_t g = 0; g < layout.gpus(); ++g) {
            for (const std::int32_t e : layout.on(g)) {
                if (e >= 0) held_[g] = held_[g].with(live_[e], 1);
                short_[g] = short_[g] || e < 0;
            }
            short_of_[g] = shortage(g, held_[g]), shortages_ = shortages_ + short_of_[g];
        }
        before_.resize(static_cast<std::size_t>(layout.width() + 1) * (highest_ + 3));
        behind_.resize(before_.size());
        lowest_ = *std::min_element(level_.begin(), level_.end());
        for (int q = 0; q < Lanes::kCount; ++q) before(0, highest_ - level_[q])[q] = 1;
        behind(layout.width(), highest_) = Lanes::all(1);
        converge();
        square_price_ = kSquare * above() * above();  // a square takes two coincidences
        for (std::int32_t e = 0; e < layout.experts(); ++e) cycles_ += cycles_of(e), link(e, 1);
    }

    double cost() const { return above() + cycles_; }
    // The chance of a batch above its floor, but for cycles.
    double above() const { return violated(chance_); }

    double try_swap(std::int32_t i, std::int32_t j) {
        tried_ = {i, j};
        const std::int32_t e = layout_.expert(i), f = layout_.expert(j), g = layout_.gpu_of(i),
                           h = layout_.gpu_of(j);
        const Lanes e_forced = forced_without(e, i), f_forced = forced_without(f, j);
        const Joined on_g = join(i, f_forced), on_h = join(j, e_forced);
        tried_held_ = {held_[g].with(live_[e], -1).with(live_[f], 1),
                       held_[h].with(live_[f], -1).with(live_[e], 1)};
        tried_short_ = {shortage(g, tried_held_.first), shortage(h, tried_held_.second)};
        tried_chance_ = fit_ * part(on_g.fits, fits_[g]) * part(on_h.fits, fits_[h]) *
                        fed(shortages_ + tried_short_.first + tried_short_.second - short_of_[g] - short_of_[h]);
        discount(e, e_forced * on_h.full);
        discount(f, f_forced * on_g.full);
        tried_full_ = {on_g.full, on_h.full};
        cycles_before_ = cycles_;
        const bool linked = layout_.copies(e) == 2 || layout_.copies(f) == 2;
        if (linked) relink(i, j);
        return violated(tried_chance_) + cycles_;
    }

    void accept() {
        const auto [i, j] = tried_;
        const std::int32_t g = layout_.gpu_of(i), h = layout_.gpu_of(j);
        if (!swapped_) layout_.swap(i, j);
        swapped_ = false;
        full_[i] = tried_full_.first, full_[j] = tried_full_.second;
        held_[g] = tried_held_.first, held_[h] = tried_held_.second;
        short_of_[g] = tried_short_.first, short_of_[h] = tried_short_.second;
        shortages_ = std::accumulate(short_of_.begin(), short_of_.end(), Shortage{});
        force(layout_.expert(i));
        force(layout_.expert(j));
        if (++accepted_ % kEvery == 0) {
            sweep();
        } else {
            for (const std::int32_t gpu : {g, h}) {
                tell(gpu);
                for (const std::int32_t e : layout_.on(gpu))
                    if (e >= 0 && layout_.copies(e) > 1) force(e);
            }
        }
        total();
    }
    void reject() {
        if (!swapped_) return;
        const auto [i, j] = tried_;
        link(layout_.expert(i), -1);
        link(layout_.expert(j), -1);
        layout_.swap(i, j);
        link(layout_.expert(i), 1);
        link(layout_.expert(j), 1);
        cycles_ = cycles_before_;
        swapped_ = false;
    }

    // Until the chances no longer change.
    void converge() {
        for (int n = 0; n < kSweeps; ++n) sweep();
        total();
    }

  private:
    static constexpr int kSweeps = 30, kEvery = 8;
    static constexpr double kPair = 0.03, kTriangle = 0.005, kSquare = 0.03;

    struct Joined {
        Lanes fits, full;
    };
    // Of the number of live experts with a replica on a GPU.
    struct Held {
        Lanes mean, variance;

        Held with(const Lanes& live, float times) const {
            const Lanes more = Lanes::all(times) * live;
            return {mean + more, variance + more * (Lanes::all(1) - live)};
        }
    };

    // How often 1 or more, 2 or more, ... live experts are lacking.
    struct Shortage {
        static constexpr int kMost = 4;
        std::array<Lanes, kMost> of;

        friend Shortage operator+(Shortage a, const Shortage& b) {
            for (int j = 0; j < kMost; ++j) a.of[j] = a.of[j] + b.of[j];
            return a;
        }
        friend Shortage operator-(Shortage a, const Shortage& b) {
            for (int j = 0; j < kMost; ++j) a.of[j] = a.of[j] - b.of[j];
            return a;
        }
    };

    double violated(const Lanes& chance) const {
        double sum = 0;
        for (int q = 0; q < Lanes::kCount; ++q)
            sum += totals_[q].weight * (chance[q] >= 0 ? std::max(0.0f, 1 - chance[q]) : 1.0f);  // NaN: hopeless
        return sum;
    }
    // A GPU with empty slots is not expected to have enough.
    Shortage shortage(std::int32_t gpu, const Held& held) const {
        Shortage shortage;
        if (short_[gpu]) return shortage;
        for (int q = 0; q < Lanes::kCount; ++q) {
            const float v = std::max(held.variance[q], 0.0f), left = std::max(spread_[q] - v, 0.0f),
                        scale = 1 / std::sqrt(std::max(v * part(left, spread_[q]), 1e-4f)),
                        spare = held.mean[q] - needed_[q] + 0.5f;
            for (int j = 0; j < Shortage::kMost; ++j)
                shortage.of[j][q] = normal_tail((spare + static_cast<float>(j)) * scale);
        }
        return shortage;
    }
    // The chance that no more than the slack is lacking, by the recursion for sums that come by Poisson (H.
    // Panjer, "Recursive evaluation of a family of compound distributions", 1981).
    Lanes fed(const Shortage& all) const {
        Lanes chance;
        for (int q = 0; q < Lanes::kCount; ++q) {
            std::array<float, Shortage::kMost> lacking;  // exactly so many
            lacking[0] = chance[q] = std::exp(-all.of[0][q]);
            for (int k = 1; k <= slack_[q]; ++k) {
                float sum = 0;
                for (int j = 1; j <= k; ++j)
                    sum += static_cast<float>(j) * (all.of[j - 1][q] - all.of[j][q]) * lacking[k - j];
                lacking[k] = sum / static_cast<float>(k);
                chance[q] += lacking[k];
            }
        }
        return chance;
    }

    // The chance that `e` has to go where its slot `slot` is.
    Lanes forced_without(std::int32_t e, std::int32_t slot) const {
        Lanes forced = live_[e];
        for (const std::int32_t s : layout_.slots_of(e))
            if (s != slot) forced = forced * full_[s];
        return forced;
    }
    void force(std::int32_t e) {
        for (const std::int32_t s : layout_.slots_of(e)) forced_[s] = forced_without(e, s);
        avoids_[e] = not_certain(forced_without(e, -1));
    }

    // 1 - chance, and a little where that is 0: it divides.
    static Lanes not_certain(const Lanes& chance) {
        return Lanes::each(chance, chance, [](float c, float) { return std::max(1 - c, 1e-6f); });
    }
    static float part(float of, float whole) { return whole > 0 ? of / whole : 1.0f; }
    static Lanes part(const Lanes& of, const Lanes& whole) {
        return Lanes::each(of, whole, [](float x, float y) { return part(x, y); });
    }

    // What a newcomer forced with this chance finds on a GPU from which slot `left` has gone.
    Joined join(std::int32_t left, const Lanes& newcomer) const {
        const auto& [fits, full] = without_[left];
        return {fits - newcomer * full, part(full, fits)};
    }

    // What a GPU is without each of its experts. before(s, k) is the chance to come from highest - level to k by
    // the slots before s, behind(s, k) to come from k to `highest` by the others, so that all lanes are full
    // there; from what is below least(s) it is out of reach. Other chances are never written and 0.
    void tell(std::int32_t gpu) {
        const std::int32_t width = layout_.width(), first = gpu * width;
        const auto forced_in = [&](std::int32_t s) {
            return layout_.expert(first + s) < 0 ? Lanes{} : forced_[first + s];
        };
        Lanes over;
        for (std::int32_t s = 0; s < width; ++s) {
            const Lanes forced = forced_in(s), free = Lanes::all(1) - forced;
            over = over + before(s, highest_) * forced;
            for (std::int32_t k = least(s + 1); k <= most(s + 1); ++k)
                before(s + 1, k) = before(s, k) * free + before(s, k - 1) * forced;
        }
        const Lanes fits = fits_[gpu] =
            Lanes::each(over, over, [](float x, float) { return std::max(1 - x, 0.0f); });
        for (std::int32_t s = width - 1; s >= 0; --s) {
            const Lanes forced = forced_in(s), free = Lanes::all(1) - forced;
            Lanes at;
            for (std::int32_t k = least(s + 1); k <= most(s); ++k) at = at + before(s, k) * behind(s + 1, k);
            for (std::int32_t k = least(s); k <= most(s); ++k)
                behind(s, k) = behind(s + 1, k) * free + behind(s + 1, k + 1) * forced;
            const Lanes up_to = fits + forced * at;
            without_[first + s] = {up_to, at};
            full_[first + s] = part(at, up_to);
        }
    }
    std::int32_t least(std::int32_t slot) const { return std::max(0, highest_ - layout_.width() + slot); }
    std::int32_t most(std::int32_t slot) const { return std::min(highest_, highest_ - lowest_ + slot); }
    Lanes& before(std::int32_t slot, std::int32_t k) { return before_[slot * (highest_ + 3) + k + 1]; }
    Lanes& behind(std::int32_t slot, std::int32_t k) { return behind_[slot * (highest_ + 3) + k + 1]; }
    void sweep() {
        for (std::int32_t e = 0; e < layout_.experts(); ++e) force(e);
        for (std::int32_t g = 0; g < layout_.gpus(); ++g) tell(g);
    }
    void total() {
        fit_ = Lanes::all(1);
        for (const Lanes& fits : fits_) fit_ = fit_ * fits;
        for (std::int32_t e = 0; e < layout_.experts(); ++e)
            for (std::int32_t k = 1; k < layout_.copies(e); ++k) fit_ = fit_ / avoids_[e];
        chance_ = fit_ * fed(shortages_);
    }
    void discount(std::int32_t e, const Lanes& all_full) {
        const Lanes avoids = not_certain(all_full);
        for (std::int32_t k = 1; k < layout_.copies(e); ++k) tried_chance_ = tried_chance_ * (avoids_[e] / avoids);
    }

    std::int16_t& links(std::int32_t g, std::int32_t h) {
        return links_[static_cast<std::size_t>(g) * layout_.gpus() + h];
    }
    void link(std::int32_t e, int by) {
        if (layout_.copies(e) != 2) return;
        const std::int32_t g = layout_.gpu_of(layout_.slots_of(e)[0]), h = layout_.gpu_of(layout_.slots_of(e)[1]);
        links(g, h) = static_cast<std::int16_t>(links(g, h) + by);
        links(h, g) = links(g, h);
    }
    // The price of the cycles that `e` closes, which is not linked itself.
    double cycles_of(std::int32_t e) {
        if (layout_.copies(e) != 2) return 0;
        const std::int32_t g = layout_.gpu_of(layout_.slots_of(e)[0]), h = layout_.gpu_of(layout_.slots_of(e)[1]);
        std::int32_t triangles = paths(g, h), squares = 0;
        for (std::int32_t a = 0; a < layout_.gpus(); ++a)
            if (a != g && links(a, h) > 0) squares += links(a, h) * (paths(g, a) - links(g, h) * links(h, a));
        return kPair * links(g, h) + kTriangle * triangles + square_price_ * squares;
    }
    // Of two links.
    std::int32_t paths(std::int32_t g, std::int32_t h) {
        return std::inner_product(&links(g, 0), &links(g, 0) + layout_.gpus(), &links(h, 0), 0);
    }
    void relink(std::int32_t i, std::int32_t j) {
        const std::int32_t e = layout_.expert(i), f = layout_.expert(j);
        link(e, -1);
        cycles_ -= cycles_of(e);
        link(f, -1);
        cycles_ -= cycles_of(f);
        layout_.swap(i, j);
        swapped_ = true;
        cycles_ += cycles_of(e);
        link(e, 1);
        cycles_ += cycles_of(f);
        link(f, 1);
    }

    Layout& layout_;
    std::array<Total, Lanes::kCount> totals_;
    std::vector<Lanes> live_;
    std::vector<Joined> without_;       // by slot: P(S <= t), P(S = t) without its expert
    std::vector<Lanes> full_, forced_;  // by slot: x and b above
    std::vector<Held> held_;            // by GPU
    std::vector<bool> short_;           // by GPU: has empty slots
    std::vector<Shortage> short_of_;    // by GPU
    std::vector<Lanes> fits_;           // by GPU: P(S <= t)
    std::vector<Lanes> avoids_;         // by expert: 1 - p prod x
    std::vector<std::int16_t> links_;   // [gpus, gpus]: experts with two copies that both hold
    std::array<std::int32_t, Lanes::kCount> level_{};
    std::int32_t highest_ = 0, lowest_ = 0;
    std::array<int, Lanes::kCount> slack_{};  // t G - n, or kMost - 1 and the less is needed
    Lanes needed_, spread_;                   // live experts on a GPU; the variance of all draws
    Shortage shortages_;                      // of all GPUs
    Lanes fit_, chance_;                      // that no GPU is above its level; nor too many lack some
    double cycles_ = 0, cycles_before_ = 0, square_price_ = 0;
    std::int64_t accepted_ = 0;
    bool swapped_ = false;

    std::pair<std::int32_t, std::int32_t> tried_{-1, -1};
    std::pair<Lanes, Lanes> tried_full_;
    std::pair<Held, Held> tried_held_;
    std::pair<Shortage, Shortage> tried_short_;
    Lanes tried_chance_;
    std::vector<Lanes> before_, behind_;
};

}  // namespace eplb
