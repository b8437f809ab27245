// A layout judged on batches, each solved: for objectives that no count of live experts tells.
//
// A swap has the batches with a live swapped expert solved anew. The cost is the mean makespan over batches, the
// work batches solved.
//
// The fewest activated replicas are not judged so: annealing on optimal routings, kept up by alternating paths,
// lowers the makespan of the batches it is given and raises that of others (EP16 with 64 redundant slots: closure
// .830 before, .808 after 2,560 batches, .830 after 20,000), for only the few batches above their floor tell
// anything.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "annealing.hpp"
#include "placement.hpp"

namespace eplb {

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
