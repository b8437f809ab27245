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
// Experts drawn one by one do not add up to n, so that it does not see when a GPU starves: if fewer than
// n - (G - 1) t live experts have a replica on it, the others cannot take the rest. Their number is taken as
// normal, with the mean and variance v of independent draws, less v^2 / V as all draws, of variance V, add up
// to n; the chance of every GPU to have enough is a further factor.
// Nor does it see short cycles: GPUs that share two experts, triangles and squares of GPUs fill up together.
// They are counted over the experts with two copies, at a price for each.
//
// The cost of a layout is the mean of 1 - chance over `totals` of n, at each of which expert e is live with
// p_e + Cov(e, n) / V (n - mean n), and the price of its cycles.
// Time per swap tried O(1) and O(S^2) for cycles, S slots of a GPU; per swap made O(S t), and O(P t) at every
// kEvery-th. Memory O(P + G^2 + S t).
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
          fed_(layout.gpus()),
          fits_(layout.gpus(), Lanes::all(1)),
          avoids_(layout.experts(), Lanes::all(1)),
          links_(static_cast<std::size_t>(layout.gpus()) * layout.gpus(), 0) {
        for (int q = 0; q < Lanes::kCount; ++q) {
            const Total& total = totals_[q];
            const auto level = static_cast<std::int32_t>(total.floor);
            level_[q] = std::min(layout.width(), level);
            highest_ = std::max(highest_, level_[q]);
            needed_[q] = static_cast<float>(total.live - (layout.filled_gpus() - 1) * total.floor);
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
            fed_[g] = fed(g, held_[g]);
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

    // In steps of the longest loop: counts of every replica that has others, once a GPU.
    std::int64_t work_per_swap() const {
        std::int64_t several = 0;
        for (std::int32_t e = 0; e < layout_.experts(); ++e)
            if (layout_.copies(e) > 1) several += layout_.copies(e);
        return 1 + several * (highest_ + 1) / layout_.gpus();
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
        tried_fits_ = chance_ * part(on_g.fits, fits_[g]) * part(on_h.fits, fits_[h]) *
                      part(fed(g, tried_held_.first), fed_[g]) * part(fed(h, tried_held_.second), fed_[h]);
        discount(e, e_forced * on_h.full);
        discount(f, f_forced * on_g.full);
        tried_full_ = {on_g.full, on_h.full};
        cycles_before_ = cycles_;
        const bool linked = layout_.copies(e) == 2 || layout_.copies(f) == 2;
        if (linked) relink(i, j);
        return violated(tried_fits_) + cycles_;
    }

    void accept() {
        const auto [i, j] = tried_;
        const std::int32_t g = layout_.gpu_of(i), h = layout_.gpu_of(j);
        if (!swapped_) layout_.swap(i, j);
        swapped_ = false;
        full_[i] = tried_full_.first, full_[j] = tried_full_.second;
        held_[g] = tried_held_.first, held_[h] = tried_held_.second;
        for (const std::int32_t gpu : {g, h}) fed_[gpu] = fed(gpu, held_[gpu]);
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
        chance_ = total();
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
        chance_ = total();
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

    double violated(const Lanes& chance) const {
        double sum = 0;
        for (int q = 0; q < Lanes::kCount; ++q)
            sum += totals_[q].weight * (chance[q] >= 0 ? std::max(0.0f, 1 - chance[q]) : 1.0f);  // NaN: hopeless
        return sum;
    }
    // The chance that a GPU has enough live experts; one with empty slots is not expected to.
    Lanes fed(std::int32_t gpu, const Held& held) const {
        if (short_[gpu]) return Lanes::all(1);
        Lanes chance;
        for (int q = 0; q < Lanes::kCount; ++q) {
            const float v = std::max(held.variance[q], 0.0f), left = std::max(spread_[q] - v, 0.0f),
                        spare = held.mean[q] - needed_[q] + 0.5f;
            const float deviation = std::sqrt(std::max(v * part(left, spread_[q]), 1e-4f));
            chance[q] = 1 - normal_tail(spare / deviation);
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

    // What a GPU is without each of its experts, by the counts of those before and behind it. Counts before
    // start at highest - level, so that all lanes are full at `highest`.
    void tell(std::int32_t gpu) {
        const std::int32_t width = layout_.width(), first = gpu * width;
        Lanes over;
        for (std::int32_t s = 0; s < width; ++s) {
            const Lanes forced = forced_in(first + s), free = Lanes::all(1) - forced;
            over = over + before(s, highest_) * forced;
            for (std::int32_t k = least(s + 1); k <= most(s + 1); ++k)
                before(s + 1, k) = before(s, k) * free + before(s, k - 1) * forced;
        }
        fits_[gpu] = Lanes::each(over, over, [](float x, float) { return std::max(1 - x, 0.0f); });
        for (std::int32_t s = width - 1; s >= 0; --s) {
            const Lanes forced = forced_in(first + s), free = Lanes::all(1) - forced;
            Lanes at;
            for (std::int32_t k = least(s + 1); k <= most(s); ++k) at = at + before(s, k) * behind(s + 1, k);
            for (std::int32_t k = least(s); k <= most(s); ++k)
                behind(s, k) = behind(s + 1, k) * free + behind(s + 1, k + 1) * forced;
            const Lanes up_to = fits_[gpu] + forced * at;
            without_[first + s] = {up_to, at};
            full_[first + s] = part(at, up_to);
        }
    }
    std::int32_t least(std::int32_t s) const { return std::max(0, highest_ - layout_.width() + s); }
    std::int32_t most(std::int32_t s) const { return std::min(highest_, highest_ - lowest_ + s); }
    Lanes& before(std::int32_t s, std::int32_t k) { return before_[s * (highest_ + 3) + k + 1]; }
    Lanes& behind(std::int32_t s, std::int32_t k) { return behind_[s * (highest_ + 3) + k + 1]; }
    Lanes forced_in(std::int32_t s) const { return layout_.expert(s) < 0 ? Lanes{} : forced_[s]; }
    void sweep() {
        for (std::int32_t e = 0; e < layout_.experts(); ++e) force(e);
        for (std::int32_t g = 0; g < layout_.gpus(); ++g) tell(g);
    }
    Lanes total() const {
        Lanes chance = Lanes::all(1);
        for (std::int32_t g = 0; g < layout_.gpus(); ++g) chance = chance * fits_[g] * fed_[g];
        for (std::int32_t e = 0; e < layout_.experts(); ++e)
            for (std::int32_t k = 1; k < layout_.copies(e); ++k) chance = chance / avoids_[e];
        return chance;
    }
    void discount(std::int32_t e, const Lanes& all_full) {
        const Lanes avoids = not_certain(all_full);
        for (std::int32_t k = 1; k < layout_.copies(e); ++k) tried_fits_ = tried_fits_ * (avoids_[e] / avoids);
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
    std::vector<Lanes> fed_, fits_;     // by GPU: the chance that it has enough; P(S <= t)
    std::vector<Lanes> avoids_;         // by expert: 1 - p prod x
    std::vector<std::int16_t> links_;  // [gpus, gpus]: experts with two copies that both hold
    std::array<std::int32_t, Lanes::kCount> level_{};
    std::int32_t highest_ = 0, lowest_ = 0;
    Lanes needed_, spread_;  // live experts that a GPU needs; the variance of all draws
    Lanes chance_ = Lanes::all(1);
    double cycles_ = 0, cycles_before_ = 0, square_price_ = 0;
    std::int64_t accepted_ = 0;
    bool swapped_ = false;

    std::pair<std::int32_t, std::int32_t> tried_{-1, -1};
    std::pair<Lanes, Lanes> tried_full_;
    std::pair<Held, Held> tried_held_;
    Lanes tried_fits_;
    std::vector<Lanes> before_, behind_;
};

}  // namespace eplb
