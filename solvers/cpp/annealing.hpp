// What the annealings of a placement share: slots without two copies of an expert on one GPU, a start,
// and proposals to swap the contents of two slots.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace eplb {

// Uniform draws, the same on every machine (splitmix64).
class Draws {
  public:
    explicit Draws(std::uint64_t seed) : state_(seed) {}
    std::uint64_t next() {
        std::uint64_t z = (state_ += 0x9E3779B97F4A7C15);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        return z ^ (z >> 31);
    }
    std::int32_t below(std::int32_t n) {
        return static_cast<std::int32_t>((next() >> 32) * static_cast<std::uint64_t>(n) >> 32);
    }
    double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

  private:
    std::uint64_t state_;
};

// One layer's slots and who holds what. Slots that are empty stay so.
class Layout {
  public:
    Layout(std::span<std::int32_t> slots, std::int32_t gpus, std::int32_t experts)
        : slots_(slots),
          gpus_(gpus),
          experts_(experts),
          width_(static_cast<std::int32_t>(slots.size()) / gpus),
          slots_of_(experts) {
        for (std::int32_t s = 0; s < static_cast<std::int32_t>(slots.size()); ++s)
            if (slots[s] >= 0) slots_of_[slots[s]].push_back(s), filled_.push_back(s);
        for (std::int32_t g = 0; g < gpus; ++g)
            filled_gpus_ += std::any_of(on(g).begin(), on(g).end(), [](std::int32_t e) { return e >= 0; });
    }

    std::int32_t gpus() const { return gpus_; }
    std::int32_t experts() const { return experts_; }
    std::int32_t width() const { return width_; }
    std::int32_t filled_gpus() const { return filled_gpus_; }
    std::span<const std::int32_t> slots() const { return slots_; }
    std::span<const std::int32_t> on(std::int32_t gpu) const {
        return slots_.subspan(static_cast<std::size_t>(gpu) * width_, width_);
    }
    std::int32_t expert(std::int32_t slot) const { return slots_[slot]; }
    std::int32_t gpu_of(std::int32_t slot) const { return slot / width_; }
    std::span<const std::int32_t> slots_of(std::int32_t expert) const { return slots_of_[expert]; }
    std::int32_t copies(std::int32_t expert) const { return static_cast<std::int32_t>(slots_of_[expert].size()); }
    bool holds(std::int32_t gpu, std::int32_t expert) const {
        return std::any_of(slots_of_[expert].begin(), slots_of_[expert].end(),
                           [&](std::int32_t s) { return gpu_of(s) == gpu; });
    }

    // Two filled slots whose contents may change places, or (-1, -1).
    std::pair<std::int32_t, std::int32_t> propose(Draws& draws) const {
        const auto count = static_cast<std::int32_t>(filled_.size());
        if (count == 0) return {-1, -1};
        const std::int32_t i = filled_[draws.below(count)], j = filled_[draws.below(count)];
        const std::int32_t e = slots_[i], f = slots_[j];
        if (gpu_of(i) == gpu_of(j) || e == f || holds(gpu_of(j), e) || holds(gpu_of(i), f)) return {-1, -1};
        return {i, j};
    }

    void swap(std::int32_t i, std::int32_t j) {
        auto &mine = slots_of_[slots_[i]], &theirs = slots_of_[slots_[j]];
        *std::find(mine.begin(), mine.end(), i) = j;
        *std::find(theirs.begin(), theirs.end(), j) = i;
        std::swap(slots_[i], slots_[j]);
    }

    void restore(std::span<const std::int32_t> slots) {
        std::copy(slots.begin(), slots.end(), slots_.begin());
        for (auto& of : slots_of_) of.clear();
        for (const std::int32_t s : filled_) slots_of_[slots_[s]].push_back(s);
    }

  private:
    std::span<std::int32_t> slots_;
    std::int32_t gpus_, experts_, width_, filled_gpus_ = 0;
    std::vector<std::vector<std::int32_t>> slots_of_;
    std::vector<std::int32_t> filled_;
};

// The copies beyond one of each expert that fit apart into `room`, and how many of one expert do.
struct Spare {
    std::int32_t copies, most = 0;

    Spare(std::span<const std::int32_t> room, std::int32_t experts) : copies(-experts) {
        for (const std::int32_t r : room) copies += std::min(r, experts), most += r > 0;
    }
};

// The experts with most copies are placed first, each on the GPUs with most room, so that copies fit apart
// wherever they can; among equals on the lightest by weight per copy, then the lowest. A copy that finds no GPU is
// left out. `room` sums to the experts at least; `slots` is [gpus, slots_per_gpu].
inline void place_apart(std::span<const double> weight, std::span<const std::int32_t> copies,
                        std::span<const std::int32_t> room, std::span<std::int32_t> slots) {
    const auto experts = static_cast<std::int32_t>(weight.size()), gpus = static_cast<std::int32_t>(room.size());
    const std::int32_t width = static_cast<std::int32_t>(slots.size()) / gpus;
    std::vector<std::int32_t> left(room.begin(), room.end()), order(experts), ranked(gpus);
    for (std::int32_t& r : left) r = std::min(r, experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
        if (copies[a] != copies[b]) return copies[a] > copies[b];
        return weight[a] > weight[b];
    });
    std::fill(slots.begin(), slots.end(), -1);
    std::vector<double> held(gpus, 0.0);
    std::vector<std::int32_t> used(gpus, 0);
    for (const std::int32_t e : order) {
        std::iota(ranked.begin(), ranked.end(), 0);
        const std::int32_t count = std::min(copies[e], gpus);
        std::partial_sort(ranked.begin(), ranked.begin() + count, ranked.end(),
                          [&](std::int32_t a, std::int32_t b) {
                              if (left[a] != left[b]) return left[a] > left[b];
                              return held[a] != held[b] ? held[a] < held[b] : a < b;
                          });
        for (const std::int32_t g : std::span(ranked).first(count)) {
            if (left[g] == 0) break;
            slots[static_cast<std::size_t>(g) * width + used[g]++] = e;
            --left[g], held[g] += weight[e] / copies[e];
        }
    }
}

// Temperatures that fall from `first` to `last` as `done` rises from 0 to 1; whether to accept a change.
struct Cooling {
    double first, last;

    bool accepts(double change, double done, Draws& draws) const {
        if (change <= 0) return true;
        const double temperature = first * std::pow(last / first, done);
        return draws.unit() < std::exp(-change / temperature);
    }
};

// Swaps slots until `done(proposals made)`, rising, is 1; `judge` prices them:
//   cost() of the layout, try_swap(i, j) -> cost, accept() or reject() what was tried.
// A cost below the last temperature is as good as 0. Leaves the cheapest layout that was seen or, where the
// judge's costs are not exact (kExact), the last: what seems cheapest is then what is most underrated.
template <class Judge, class Done>
void anneal(Layout& layout, Judge& judge, const Cooling& cooling, Draws& draws, Done&& done) {
    double cost = judge.cost(), least = cost;
    std::vector<std::int32_t> best(layout.slots().begin(), layout.slots().end());
    double progress = 0;
    for (std::int64_t made = 0; least > cooling.last && (progress = done(made)) < 1; ++made) {
        const auto [i, j] = layout.propose(draws);
        if (i < 0) continue;
        const double tried = judge.try_swap(i, j);
        if (!cooling.accepts(tried - cost, progress, draws)) {
            judge.reject();
            continue;
        }
        judge.accept();
        cost = judge.cost();
        if (cost < least) {
            least = cost;
            if (Judge::kExact) std::copy(layout.slots().begin(), layout.slots().end(), best.begin());
        }
    }
    if (Judge::kExact) layout.restore(best);
}

}  // namespace eplb
