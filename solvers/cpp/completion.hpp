// Do whole experts fit into caps, so many replicas and tokens on each GPU? One GPU after the other is
// filled: sequential number partitioning (Korf, "A complete anytime algorithm for number
// partitioning", 1998; Schreiber, Korf, Moffitt, "Optimal multi-way number partitioning", 2018), with
// the experts that each GPU may take, and their count, given.
//
// All GPUs together may stay below their caps by the slack: the sum of the caps less what must be served. So the
// experts of a GPU are a subset whose count and tokens lie within the slack left of its caps: few, where
// the slack is small. The GPU with the fewest experts to decide comes next, and its subsets are
// enumerated depth first, by falling tokens, as long as the largest and smallest that may follow reach
// that window. A subset is dropped if it leaves an expert without a GPU, or a GPU with more or less
// than it may have. Exponential; where GPUs share few experts the last ones are quick to refute.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "branching.hpp"
#include "choices.hpp"
#include "placement.hpp"
#include "pricing.hpp"

namespace eplb {

class Completion {
  public:
    explicit Completion(const Choices& choices) : choices_(choices) {}

    // `most` is what may be served on each GPU beside what is fixed. With `split` refuted is said only
    // where the caps on replicas leave no expert a second one. If it fits, tokens() are how.
    Verdict decide(const std::vector<Caps>& most, bool split, std::int64_t max_nodes) {
        const int gpus = choices_.gpus(), experts = choices_.experts();
        rooms_.clear();
        gpu_of_.assign(experts, -1);
        Room slack{-experts, 0};
        for (const Caps& caps : most) {
            if (caps.activated < 0 || caps.tokens < 0) return Verdict::refuted;
            rooms_.push_back({static_cast<std::int64_t>(caps.activated), static_cast<std::int64_t>(caps.tokens)});
            slack.experts += rooms_.back().experts, slack.tokens += rooms_.back().tokens;
        }
        for (int e = 0; e < experts; ++e) slack.tokens -= demand(e);
        if (slack.experts < 0 || slack.tokens < 0) return Verdict::refuted;
        nodes_left_ = max_nodes;
        filled_.assign(gpus, 0), left_.resize(experts);
        for (int e = 0; e < experts; ++e) left_[e] = choices_.first(e + 1) - choices_.first(e);
        if (levels_.size() < static_cast<std::size_t>(gpus)) levels_.resize(gpus);
        if (fill(0, slack)) return Verdict::fits;
        return nodes_left_ >= 0 && (!split || slack.experts == 0) ? Verdict::refuted : Verdict::unknown;
    }
    std::vector<double> tokens() const {
        std::vector<double> tokens(choices_.options());
        for (std::int32_t o = 0; o < choices_.options(); ++o)
            if (const int e = choices_.option(o).expert; gpu_of_[e] == choices_.option(o).gpu)
                tokens[o] = choices_.demand(e);
        return tokens;
    }

  private:
    struct Room {
        std::int64_t experts, tokens;
    };
    // A GPU that is being filled: the experts to decide on, by falling tokens, and the sums of these.
    struct Level {
        int gpu;
        Room least, most;
        std::vector<int> experts;
        std::vector<std::int64_t> sum;
    };

    std::int64_t demand(int e) const { return static_cast<std::int64_t>(choices_.demand(e)); }

    bool fill(int depth, Room slack) {
        if (depth == choices_.gpus()) return true;
        Level& level = levels_[depth];
        level.gpu = -1;
        std::size_t fewest = 0;
        for (int g = 0; g < choices_.gpus(); ++g) {
            if (filled_[g]) continue;
            std::size_t free = 0;
            for (const std::int32_t o : choices_.on(g)) free += gpu_of_[choices_.option(o).expert] < 0;
            if (level.gpu < 0 || free < fewest) level.gpu = g, fewest = free;
        }
        level.experts.clear();
        for (const std::int32_t o : choices_.on(level.gpu))
            if (gpu_of_[choices_.option(o).expert] < 0) level.experts.push_back(choices_.option(o).expert);
        std::sort(level.experts.begin(), level.experts.end(),
                  [&](int a, int b) { return demand(a) != demand(b) ? demand(a) > demand(b) : a < b; });
        level.sum.assign(1, 0);
        for (const int e : level.experts) level.sum.push_back(level.sum.back() + demand(e));
        level.most = rooms_[level.gpu];
        level.least = {std::max<std::int64_t>(0, level.most.experts - slack.experts),
                       std::max<std::int64_t>(0, level.most.tokens - slack.tokens)};
        filled_[level.gpu] = 1;
        if (choose(depth, 0, {0, 0}, slack)) return true;
        filled_[level.gpu] = 0;
        return false;
    }

    // Decides on the experts of a level from the i-th on; what was chosen before them is `taken`.
    bool choose(int depth, std::size_t i, Room taken, Room slack) {
        if (--nodes_left_ < 0) return false;
        Level& level = levels_[depth];
        const std::vector<std::int64_t>& sum = level.sum;
        const std::size_t count = level.experts.size();
        const auto further =
            std::min<std::int64_t>(static_cast<std::int64_t>(count - i), level.most.experts - taken.experts);
        const std::int64_t needed = std::max<std::int64_t>(0, level.least.experts - taken.experts);
        if (needed > further || taken.tokens + sum[i + further] - sum[i] < level.least.tokens ||
            taken.tokens + sum[count] - sum[count - needed] > level.most.tokens)
            return false;
        if (i == count) {
            slack.experts -= level.most.experts - taken.experts, slack.tokens -= level.most.tokens - taken.tokens;
            return can_follow(slack) && fill(depth + 1, slack);
        }
        const int e = level.experts[i];
        const Room with{taken.experts + 1, taken.tokens + demand(e)};
        if (with.experts <= level.most.experts && with.tokens <= level.most.tokens) {
            gpu_of_[e] = level.gpu;
            if (choose(depth, i + 1, with, slack)) return true;
            gpu_of_[e] = -1;
        }
        if (left_[e] == 1) return false;
        --left_[e];
        if (choose(depth, i + 1, taken, slack)) return true;
        ++left_[e];
        return false;
    }

    // Whether every GPU still has room for the experts that have no other, and enough that may come.
    bool can_follow(Room slack) const {
        for (int g = 0; g < choices_.gpus(); ++g) {
            if (filled_[g]) continue;
            Room must{0, 0}, may{0, 0};
            for (const std::int32_t o : choices_.on(g)) {
                const int e = choices_.option(o).expert;
                if (gpu_of_[e] >= 0) continue;
                may.experts += 1, may.tokens += demand(e);
                if (left_[e] == 1) must.experts += 1, must.tokens += demand(e);
            }
            const Room most = rooms_[g];
            if (must.experts > most.experts || must.tokens > most.tokens) return false;
            if (may.experts < most.experts - slack.experts || may.tokens < most.tokens - slack.tokens)
                return false;
        }
        return true;
    }

    const Choices& choices_;
    std::vector<Room> rooms_;
    std::vector<int> gpu_of_, left_;  // of each expert: where it is, and among how many GPUs it may still be
    std::vector<char> filled_;
    std::deque<Level> levels_;  // references stay
    std::int64_t nodes_left_ = 0;
};

}  // namespace eplb
