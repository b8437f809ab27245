// How often an optimally routed batch stays at its floor, for any number of GPUs: the cavity method.
//
// GPUs are nodes, experts with several copies join them, experts with one are load that is fixed. A batch of n
// live experts stays at t = ceil(n / G) if every live expert finds a GPU with fewer than t. Ask of a GPU
// whether it is full without expert e, if all others go elsewhere where they can: with x(g, e) the chance, an
// expert has to go to g with chance b(e, g) = p_e prod x(h, e) over its other GPUs h, so that
//     x(g, e) = P(S = t | S <= t),   S = sum of independent draws b(f, g) over the other experts f on g,
// and the chance that all fit is
//     prod over GPUs of P(S_g <= t)  *  prod over experts of (1 - p_e prod x(g, e))^(1 - copies).
// Where the GPUs and experts form a tree this is exact, for all GPU sets of Hall's condition at once. It is
// stationary in x: x may be out of date by a little, and a swap is judged on the two GPUs alone (Bethe's
// approximation; M. Mezard and A. Montanari, Information, Physics, and Computation, 2009, ch. 14).
// Short cycles are what it does not see: GPUs that share two experts, triangles and squares of GPUs fill up
// together. They are counted over the experts with two copies, at a price for each.
//
// n is taken at four quantiles, at each of which expert e is live with p_e + Cov(e, n) / V (n - mean n). The
// cost of a layout is the mean of 1 - chance, and the price of its cycles.
// Time per swap tried O(S t + S^2), S slots of a GPU; per swap made the same, and O(P t) at every kEvery-th.
// Memory O(P + G^2 + S t).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "annealing.hpp"
#include "hall.hpp"
#include "liveness.hpp"

namespace eplb {

// One number for each quantile of the number of live experts.
struct Lanes {
    static constexpr int kCount = 4;
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
          live_(layout.experts()),
          full_(layout.slots().size()),
          forced_(layout.slots().size()),
          fits_(layout.gpus(), Lanes::all(1)),
          avoids_(layout.experts(), Lanes::all(1)),
          links_(static_cast<std::size_t>(layout.gpus()) * layout.gpus(), 0),
          linked_(layout.experts(), false) {
        const double deviation = std::sqrt(of.variance);
        for (int q = 0; q < Lanes::kCount; ++q) {
            const double n = std::max(0.0, std::round(of.mean + deviation * kQuartersOfNormal[q]));
            level_[q] = std::min(layout.width(), static_cast<std::int32_t>(std::ceil(n / layout.filled_gpus())));
            highest_ = std::max(highest_, level_[q]);
            for (std::int32_t e = 0; e < layout.experts(); ++e)
                live_[e][q] = static_cast<float>(of.live_given(e, n));
        }
        counts_.resize(highest_ + 1);
        before_.resize(static_cast<std::size_t>(layout.width() + 1) * (highest_ + 1));
        behind_.resize(before_.size());
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
        Joined on_g = join(g, i, f_forced), on_h = join(h, j, e_forced);
        tried_fits_ = chance_ * part(on_g.fits, fits_[g]) * part(on_h.fits, fits_[h]);
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
            for (const std::int32_t gpu : {g, h}) fits_[gpu] = join(gpu, -1, Lanes{}).fits;
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
    static constexpr int kSweeps = 30, kEvery = 3;
    static constexpr double kPair = 0.1, kTriangle = 0.02, kSquare = 0.03;

    struct Joined {
        Lanes fits, full;
    };

    double violated(const Lanes& chance) const {
        double sum = 0;
        for (const float c : chance.of) sum += c >= 1 ? 0.0 : c >= 0 ? 1.0 - c : 1.0;  // NaN: hopeless
        return sum / Lanes::kCount;
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
    static Lanes part(const Lanes& of, const Lanes& whole) {
        return Lanes::each(of, whole, [](float x, float y) { return y > 0 ? x / y : 1.0f; });
    }

    static void convolve(const Lanes* from, const Lanes& forced, std::int32_t highest, Lanes* to) {
        const Lanes free = Lanes::all(1) - forced;
        for (std::int32_t k = highest; k > 0; --k) to[k] = from[k] * free + from[k - 1] * forced;
        to[0] = from[0] * free;
    }
    Lanes at_level(const Lanes* counts) const {
        Lanes at;
        for (int q = 0; q < Lanes::kCount; ++q) at[q] = counts[level_[q]][q];
        return at;
    }
    Lanes up_to_level(const Lanes* counts) const {
        Lanes sum;
        for (int q = 0; q < Lanes::kCount; ++q)
            for (std::int32_t k = 0; k <= level_[q]; ++k) sum[q] += counts[k][q];
        return sum;
    }

    // What a newcomer forced with this chance finds on a GPU from which slot `left` has gone.
    Joined join(std::int32_t gpu, std::int32_t left, const Lanes& newcomer) {
        std::fill(counts_.begin(), counts_.end(), Lanes{});
        counts_[0] = Lanes::all(1);
        std::int32_t held = 0;
        for (std::int32_t s = gpu * layout_.width(); s < (gpu + 1) * layout_.width(); ++s)
            if (s != left && layout_.expert(s) >= 0)
                convolve(counts_.data(), forced_[s], held = std::min(held + 1, highest_), counts_.data());
        const Lanes fits = up_to_level(counts_.data()), top = at_level(counts_.data());
        return {fits - newcomer * top, part(top, fits)};
    }

    // What a GPU tells each of its experts with further copies, by the counts of those before and behind it.
    void tell(std::int32_t gpu) {
        const std::int32_t width = layout_.width(), row = highest_ + 1, first = gpu * width;
        const auto forced = [&](std::int32_t s) { return layout_.expert(s) < 0 ? Lanes{} : forced_[s]; };
        std::fill_n(before_.begin(), row, Lanes{});
        before_[0] = Lanes::all(1);
        for (std::int32_t s = 0; s < width; ++s)
            convolve(&before_[s * row], forced(first + s), highest_, &before_[(s + 1) * row]);
        std::fill_n(behind_.begin() + width * row, row, Lanes{});
        behind_[width * row] = Lanes::all(1);
        for (std::int32_t s = width - 1; s >= 0; --s)
            convolve(&behind_[(s + 1) * row], forced(first + s), highest_, &behind_[s * row]);
        fits_[gpu] = up_to_level(&before_[width * row]);
        for (std::int32_t s = 0; s < width; ++s) {
            const std::int32_t e = layout_.expert(first + s);
            if (e < 0 || layout_.copies(e) < 2) continue;
            const Lanes *a = &before_[s * row], *b = &behind_[(s + 1) * row];
            for (int q = 0; q < Lanes::kCount; ++q) {
                float at = 0, up_to = 0, below = 0;
                for (std::int32_t k = 0; k <= level_[q]; ++k) {
                    below += b[k][q];
                    at += a[level_[q] - k][q] * b[k][q];
                    up_to += a[level_[q] - k][q] * below;
                }
                full_[first + s][q] = up_to > 0 ? at / up_to : 1.0f;
            }
        }
    }
    void sweep() {
        for (std::int32_t e = 0; e < layout_.experts(); ++e) force(e);
        for (std::int32_t g = 0; g < layout_.gpus(); ++g) tell(g);
    }
    Lanes total() const {
        Lanes chance = Lanes::all(1);
        for (const Lanes& fits : fits_) chance = chance * fits;
        for (std::int32_t e = 0; e < layout_.experts(); ++e)
            for (std::int32_t k = 1; k < layout_.copies(e); ++k) chance = chance / avoids_[e];
        return chance;
    }
    void discount(std::int32_t e, const Lanes& all_full) {
        const Lanes avoids = not_certain(all_full);
        for (std::int32_t k = 1; k < layout_.copies(e); ++k) tried_fits_ = tried_fits_ * (avoids_[e] / avoids);
    }

    std::uint16_t& links(std::int32_t g, std::int32_t h) {
        return links_[static_cast<std::size_t>(g) * layout_.gpus() + h];
    }
    void link(std::int32_t e, int by) {
        if (layout_.copies(e) != 2) return;
        const std::int32_t g = layout_.gpu_of(layout_.slots_of(e)[0]), h = layout_.gpu_of(layout_.slots_of(e)[1]);
        links(g, h) = static_cast<std::uint16_t>(links(g, h) + by);
        links(h, g) = links(g, h);
        linked_[e] = by > 0;
    }
    // The price of the cycles that `e` closes, which is not linked itself.
    double cycles_of(std::int32_t e) {
        if (layout_.copies(e) != 2) return 0;
        const std::int32_t g = layout_.gpu_of(layout_.slots_of(e)[0]), h = layout_.gpu_of(layout_.slots_of(e)[1]);
        std::int64_t triangles = 0, squares = 0;
        each_neighbour(g, h, [&](std::int32_t a) {
            triangles += links(a, h);
            each_neighbour(a, h, [&](std::int32_t b) { squares += b == g ? 0 : links(b, h); });
        });
        return kPair * links(g, h) + kTriangle * static_cast<double>(triangles) +
               square_price_ * static_cast<double>(squares);
    }
    template <class Visit>
    void each_neighbour(std::int32_t gpu, std::int32_t but, Visit&& visit) {
        for (const std::int32_t e : layout_.on(gpu)) {
            if (e < 0 || !linked_[e]) continue;
            for (const std::int32_t s : layout_.slots_of(e))
                if (const std::int32_t other = layout_.gpu_of(s); other != gpu && other != but) visit(other);
        }
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
    std::vector<Lanes> live_;
    std::vector<Lanes> full_, forced_;  // by slot: x and b above
    std::vector<Lanes> fits_;           // by GPU: P(S <= t)
    std::vector<Lanes> avoids_;         // by expert: 1 - p prod x
    std::vector<std::uint16_t> links_;  // [gpus, gpus]: experts with two copies that both hold
    std::array<std::int32_t, Lanes::kCount> level_{};
    std::int32_t highest_ = 0;
    std::vector<bool> linked_;
    Lanes chance_ = Lanes::all(1);
    double cycles_ = 0, cycles_before_ = 0, square_price_ = 0;
    std::int64_t accepted_ = 0;
    bool swapped_ = false;

    std::pair<std::int32_t, std::int32_t> tried_{-1, -1};
    std::pair<Lanes, Lanes> tried_full_;
    Lanes tried_fits_;
    std::vector<Lanes> counts_, before_, behind_;
};

}  // namespace eplb
