// A layout judged on recorded batches, each routed to its optimum: the last word on a placement.
//
// RoutedBatches keeps an optimal routing of every batch for the fewest activations. A swap takes two experts
// from their GPUs; where one of them is live, it goes to the lightest GPU that holds it now, and alternating
// paths off the GPUs above the floor t = ceil(n / G) repair the rest: from a GPU with L > t to any with at
// most L - 2, until there is none. What is above t then is the fewest that can be. The cost of a batch is its
// makespan less t, and kDeficiency for each activation above t, which tells nearly good from bad.
// SolvedBatches judges any other objective by solving the batches with a live swapped expert anew.
// Both answer in means over batches, and count the work they do: batches changed (more on many GPUs) and GPUs
// searched, or batches solved.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "annealing.hpp"
#include "gpu_set.hpp"
#include "placement.hpp"
#include "problem.hpp"

namespace eplb {

template <int W>
class RoutedBatches {
  public:
    static constexpr bool kExact = true;

    // `tokens` is [batches, experts]; every live expert has a slot.
    RoutedBatches(Layout& layout, std::span<const std::int64_t> tokens)
        : layout_(layout),
          batches_(tokens.size() / layout.experts()),
          holders_(layout.experts()),
          movable_(layout.gpus()),
          at_(tokens.size(), kDead),
          load_(batches_ * layout.gpus(), 0),
          floor_(batches_),
          price_(batches_) {
        for (std::int32_t e = 0; e < experts(); ++e)
            for (const std::int32_t s : layout.slots_of(e)) holders_[e].insert(layout.gpu_of(s));
        for (std::int32_t g = 0; g < gpus(); ++g) read_movable(g);
        for (std::size_t b = 0; b < batches_; ++b) {
            const auto of = tokens.subspan(b * experts(), experts());
            const std::int64_t live = std::count_if(of.begin(), of.end(), [](std::int64_t t) { return t > 0; });
            floor_[b] = static_cast<std::int32_t>(ceil_div(live, layout.filled_gpus()));
            for (const bool several : {false, true})
                for (std::int32_t e = 0; e < experts(); ++e)
                    if (of[e] > 0 && (layout.copies(e) > 1) == several) put(b, e);
            repair(b);
            price_[b] = price_of(b);
            cost_ += price_[b];
        }
        steps_.clear();
    }

    double cost() const { return cost_ / static_cast<double>(batches_); }
    // Below this every batch is at its floor.
    double least_cost() const { return 0.5 * kDeficiency / static_cast<double>(batches_); }
    std::int64_t work() const { return work_; }
    // The mean over batches of the fullest GPU's activated replicas.
    double makespan() const {
        double sum = 0;
        for (std::size_t b = 0; b < batches_; ++b) sum += fullest(b);
        return sum / static_cast<double>(batches_);
    }
    std::int32_t fullest(std::size_t batch) const { return *std::max_element(row(batch), row(batch) + gpus()); }

    double try_swap(std::int32_t i, std::int32_t j) {
        tried_ = {i, j}, cost_before_ = cost_;
        const std::int32_t e = layout_.expert(i), f = layout_.expert(j), g = layout_.gpu_of(i),
                           h = layout_.gpu_of(j);
        exchange(i, j);
        for (std::size_t b = 0; b < batches_; ++b) {
            const bool e_leaves = at(b, e) == g, f_leaves = at(b, f) == h;
            const bool live = at(b, e) != kDead || at(b, f) != kDead;
            if (!e_leaves && !f_leaves && !(live && price_[b] > 0)) continue;
            if (e_leaves) take(b, e);
            if (f_leaves) take(b, f);
            if (e_leaves) put(b, e);
            if (f_leaves) put(b, f);
            repair(b);
            work_ += 1 + gpus() / 16;
            const double price = price_of(b);
            if (price == price_[b]) continue;
            prices_.push_back({b, price_[b]});
            cost_ += price - price_[b];
            price_[b] = price;
        }
        return cost();
    }
    void accept() { steps_.clear(), prices_.clear(); }
    void reject() {
        for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
            const std::int16_t now = at(step->batch, step->expert);
            if (now >= 0) --row(step->batch)[now];
            if (step->from >= 0) ++row(step->batch)[step->from];
            at(step->batch, step->expert) = step->from;
        }
        for (const auto& [batch, price] : prices_) price_[batch] = price;
        exchange(tried_.first, tried_.second);
        cost_ = cost_before_;
        accept();
    }

  private:
    static constexpr double kDeficiency = 0.1;
    static constexpr std::int16_t kDead = -1, kLoose = -2;

    struct Step {
        std::size_t batch;
        std::int32_t expert;
        std::int16_t from;
    };

    std::int32_t gpus() const { return layout_.gpus(); }
    std::int32_t experts() const { return layout_.experts(); }
    std::int16_t& at(std::size_t batch, std::int32_t e) { return at_[batch * experts() + e]; }
    std::int16_t* row(std::size_t batch) { return load_.data() + batch * gpus(); }
    const std::int16_t* row(std::size_t batch) const { return load_.data() + batch * gpus(); }

    void read_movable(std::int32_t gpu) {
        movable_[gpu].clear();
        for (const std::int32_t e : layout_.on(gpu))
            if (e >= 0 && layout_.copies(e) > 1) movable_[gpu].push_back(e);
    }
    void exchange(std::int32_t i, std::int32_t j) {
        const std::int32_t g = layout_.gpu_of(i), h = layout_.gpu_of(j);
        for (const auto& [slot, to] : {std::pair{i, h}, std::pair{j, g}}) {
            holders_[layout_.expert(slot)].erase(layout_.gpu_of(slot));
            holders_[layout_.expert(slot)].insert(to);
        }
        layout_.swap(i, j);
        read_movable(g);
        read_movable(h);
    }

    void set(std::size_t b, std::int32_t e, std::int16_t to) {
        std::int16_t& now = at(b, e);
        steps_.push_back({b, e, now});
        if (now >= 0) --row(b)[now];
        if (to >= 0) ++row(b)[to];
        now = to;
    }
    void take(std::size_t b, std::int32_t e) { set(b, e, kLoose); }
    void put(std::size_t b, std::int32_t e) {
        std::int16_t lightest = -1;
        holders_[e].each([&](int g) {
            if (lightest < 0 || row(b)[g] < row(b)[lightest]) lightest = static_cast<std::int16_t>(g);
        });
        set(b, e, lightest);
    }

    double price_of(std::size_t b) const {
        std::int32_t most = 0, above = 0;
        for (std::int32_t g = 0; g < gpus(); ++g) {
            const std::int32_t over = row(b)[g] - floor_[b];
            most = std::max(most, over), above += std::max(over, 0);
        }
        return most + kDeficiency * above;
    }

    // From the fullest GPUs down; a path found may open another for a fuller one.
    void repair(std::size_t b) {
        for (std::int32_t level = fullest(b); level > floor_[b];) {
            bool found = false;
            for (std::int32_t g = 0; g < gpus() && !found; ++g) found = row(b)[g] == level && lower(b, g);
            level = found ? fullest(b) : level - 1;
        }
    }

    GpuSet<W> reach(std::size_t b, std::int32_t gpu) {
        ++work_;
        GpuSet<W> reached;
        for (const std::int32_t e : movable_[gpu]) reached.unite_if(holders_[e], at(b, e) == gpu);
        return reached;
    }

    // Moves one activation off a GPU along a shortest alternating path, to one with two fewer at least.
    bool lower(std::size_t b, std::int32_t from) {
        GpuSet<W> light, visited;
        for (std::int32_t g = 0; g < gpus(); ++g) light.insert_if(g, row(b)[g] + 2 <= row(b)[from]);
        if (light.empty()) return false;
        visited.insert(from);
        order_.assign(1, from), came_.assign(1, 0);
        for (std::size_t i = 0; i < order_.size(); ++i) {
            const GpuSet<W> reached = reach(b, order_[i]), ends = reached & light;
            if (!ends.empty()) {
                std::int32_t to = ends.lowest();
                for (std::size_t k = i;; k = came_[k]) {
                    move_one(b, order_[k], to);
                    to = order_[k];
                    if (k == 0) return true;
                }
            }
            (reached - visited).each([&](int g) { order_.push_back(g), came_.push_back(i); });
            visited |= reached;
        }
        return false;
    }
    void move_one(std::size_t b, std::int32_t from, std::int32_t to) {
        for (const std::int32_t e : movable_[from])
            if (at(b, e) == from && holders_[e].contains(to)) return set(b, e, static_cast<std::int16_t>(to));
    }

    Layout& layout_;
    std::size_t batches_;
    std::vector<GpuSet<W>> holders_;
    std::vector<std::vector<std::int32_t>> movable_;  // by GPU: its experts with further copies
    std::vector<std::int16_t> at_;                    // [batches, experts]: the GPU that serves it
    std::vector<std::int16_t> load_;                  // [batches, gpus]: activated replicas
    std::vector<std::int32_t> floor_;
    std::vector<double> price_;
    double cost_ = 0, cost_before_ = 0;
    std::int64_t work_ = 0;
    std::pair<std::int32_t, std::int32_t> tried_{-1, -1};
    std::vector<Step> steps_;
    std::vector<std::pair<std::size_t, double>> prices_;
    std::vector<std::int32_t> order_;
    std::vector<std::size_t> came_;
};

// solve(layer, tokens) -> makespan, of one batch.
template <class Solve>
class SolvedBatches {
  public:
    static constexpr bool kExact = true;

    SolvedBatches(Layout& layout, std::span<const std::int64_t> tokens, Solve solve)
        : layout_(layout), tokens_(tokens), price_(tokens.size() / layout.experts()), solve_(std::move(solve)) {
        price([](const std::int64_t*) { return true; });
        prices_.clear();
    }

    double cost() const { return cost_ / static_cast<double>(price_.size()); }
    double least_cost() const { return 0; }
    double makespan() const { return cost(); }
    std::int64_t work() const { return work_; }

    double try_swap(std::int32_t i, std::int32_t j) {
        tried_ = {i, j}, cost_before_ = cost_;
        const std::int32_t e = layout_.expert(i), f = layout_.expert(j);
        layout_.swap(i, j);
        price([&](const std::int64_t* tokens) { return tokens[e] > 0 || tokens[f] > 0; });
        return cost();
    }
    void accept() { prices_.clear(); }
    void reject() {
        for (const auto& [batch, price] : prices_) price_[batch] = price;
        layout_.swap(tried_.first, tried_.second);
        cost_ = cost_before_;
        accept();
    }

  private:
    template <class Concerns>
    void price(Concerns concerns) {
        const Placement placement(layout_.slots(), 1, layout_.gpus(), layout_.width(), layout_.experts());
        for (std::size_t b = 0; b < price_.size(); ++b) {
            const std::int64_t* tokens = tokens_.data() + b * layout_.experts();
            if (!concerns(tokens)) continue;
            const double price = solve_(placement.layer(0), tokens);
            ++work_;
            prices_.push_back({b, price_[b]});
            cost_ += price - price_[b];
            price_[b] = price;
        }
    }

    Layout& layout_;
    std::span<const std::int64_t> tokens_;
    std::vector<double> price_;
    Solve solve_;
    double cost_ = 0, cost_before_ = 0;
    std::int64_t work_ = 0;
    std::pair<std::int32_t, std::int32_t> tried_{-1, -1};
    std::vector<std::pair<std::size_t, double>> prices_;
};

}  // namespace eplb
