// Do experts fit into caps, so many replicas and tokens on each GPU, where few replicas are to spare and some
// experts may be split? A GPU serves one *pattern*: a set of whole experts and a set of experts of which it
// serves a part. With `room` the replicas and tokens left on each GPU, three things are scarce:
//   spare   sum of the rooms for replicas less the experts: a replica that is not activated takes one, and of
//           a split expert every part after the first; so a part takes half a one, at least;
//   slack   sum of the rooms for tokens less the tokens: what a GPU stays below its room, which it does by
//           what its parts cannot fill, at least;
//   both    in one sum, a slack weighed like kWeight halves, less prices for the experts served, a part at
//           half the price: a Lagrangian bound, of which subgradient steps find the prices.
// Patterns that take more than there is are listed no more: few are left, where little is to spare.
//
// Then depth first: who serves the expert with the fewest GPUs to choose from, or which pattern the GPU with
// the fewest serves. At every node the patterns left of a GPU, which agree with what is decided and with what all
// others take at least, say which experts it can and must serve, whole or in part; an expert left
// with one way takes it, and so on until nothing follows. Split experts must find room for their tokens, any
// set of them together (Hall's condition, which at a leaf is all that is missing). Exponential;
// tenths of a second where a dozen GPUs serve three experts each and 2 % of their tokens are slack.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <numeric>
#include <utility>
#include <vector>

#include "bit_set.hpp"
#include "branching.hpp"
#include "choices.hpp"
#include "pricing.hpp"

namespace eplb {

// Of a problem of up to 64 W experts with a choice.
template <int W>
class PatternTree {
  public:
    explicit PatternTree(const Choices& choices) : choices_(choices) {}

    // `most` is what may be served on each GPU beside what is fixed. Work is in patterns looked at, or what takes
    // as long. If it fits, tokens() are how.
    Verdict decide(const std::vector<Caps>& most, bool split, std::int64_t max_work) {
        work_left_ = max_work, patterns_left_ = kMostPatterns;
        if (!make_rooms(most)) return Verdict::refuted;
        if (choices_.experts() == 0) return Verdict::fits;
        if (spare_ > kMostSpare) return Verdict::unknown;
        every_ = Experts::first(choices_.experts());
        patterns_.assign(choices_.gpus(), {});
        for (int g = 0; g < choices_.gpus() && work_left_ >= 0; ++g) {
            std::int64_t tokens = 0;
            for (const std::int32_t o : choices_.on(g)) tokens += demand(choices_.option(o).expert);
            list(g, 0, tokens, {}, split);
        }
        if (work_left_ < 0) return Verdict::unknown;
        for (const std::vector<Pattern>& patterns : patterns_)
            if (patterns.empty()) return Verdict::refuted;
        find_prices();
        levels_.assign(1, Node(choices_.gpus()));
        for (int g = 0; g < choices_.gpus(); ++g) {
            levels_[0][g].left = static_cast<int>(patterns_[g].size());
            levels_[0][g].least = least_of(patterns_[g]);
            levels_[0][g].highest.fill(kNoLimit);
        }
        if (search(0)) return Verdict::fits;
        return work_left_ < 0 ? Verdict::unknown : Verdict::refuted;
    }
    const std::vector<double>& tokens() const { return tokens_; }

  private:
    using Experts = BitSet<W>;
    static constexpr int kMostSpare = 8, kMostPatterns = 1 << 18, kSteps = 300, kPatience = 20;
    static constexpr int kPairsALook = 32;  // of a GPU and an expert, in choosing one
    static constexpr double kWeight = 16, kStep = 0.5, kShorter = 0.7, kTolerance = 1e-6, kNoLimit = 1e300;

    enum Scarce { kHalves, kIdle, kSlack, kBoth, kScarce };
    using Costs = std::array<double, kScarce>;
    struct Pattern {
        Experts whole, parts;
        std::int64_t tokens;  // left for the parts
        Costs costs;
    };
    struct Room {
        int experts;
        std::int64_t tokens;
    };
    // A GPU at a node: what it must and must not serve, and of the patterns left what any and all serve.
    struct Side {
        Experts must{}, never{}, any{}, all = ~Experts{};

        bool agrees(Experts served) const { return (served & never).empty() && (must & ~served).empty(); }
        bool all_agree() const { return (any & never).empty() && (must & ~all).empty(); }
    };
    struct Gpu {
        int left = 0;
        Side whole, parts;
        std::int64_t tokens = 0;   // the most that is left for the parts
        Costs least{}, highest{};  // of the patterns left
    };
    using Node = std::vector<Gpu>;

    std::int64_t demand(int e) const { return static_cast<std::int64_t>(choices_.demand(e)); }

    // False if they are too small together.
    bool make_rooms(const std::vector<Caps>& most) {
        rooms_.clear();
        spare_ = -choices_.experts(), slack_ = 0;
        for (int g = 0; g < choices_.gpus(); ++g) {
            double tokens = 0;
            for (const std::int32_t o : choices_.on(g)) tokens += choices_.demand(choices_.option(o).expert);
            const double experts = std::min(most[g].activated, static_cast<double>(choices_.on(g).size()));
            tokens = std::min(most[g].tokens, tokens);
            if (experts < 0 || tokens < 0) return false;
            rooms_.push_back({static_cast<int>(experts), static_cast<std::int64_t>(tokens)});
            spare_ += rooms_.back().experts, slack_ += rooms_.back().tokens;
        }
        for (int e = 0; e < choices_.experts(); ++e) slack_ -= demand(e);
        return spare_ >= 0 && slack_ >= 0;
    }

    // What is chosen of the experts that a GPU can serve; `filled` is the most that its parts take.
    struct Chosen {
        Experts whole, parts;
        std::int64_t tokens = 0, filled = 0;
    };
    // The patterns that follow a choice among the experts before the i-th; those from it on have `further` tokens.
    void list(int g, std::size_t i, std::int64_t further, const Chosen& chosen, bool split) {
        if (--work_left_ < 0) return;
        const int parts = chosen.parts.count(), idle = rooms_[g].experts - chosen.whole.count() - parts;
        const std::int64_t tokens = rooms_[g].tokens - chosen.tokens, wasted = tokens - chosen.filled;
        const auto undecided = static_cast<int>(choices_.on(g).size() - i);
        // Parts are of different experts, each of which has another.
        if (idle < 0 || tokens < parts || parts + std::max(0, idle - undecided) > spare_ ||
            wasted - further > slack_)
            return;
        if (undecided == 0) {
            const auto waste = static_cast<double>(std::max<std::int64_t>(0, wasted));
            if (--patterns_left_ < 0) work_left_ = -1;
            patterns_[g].push_back(
                {chosen.whole, chosen.parts, tokens, {2.0 * idle + parts, static_cast<double>(idle), waste, 0}});
            return;
        }
        const int e = choices_.option(choices_.on(g)[i]).expert;
        further -= demand(e);
        Chosen with = chosen;
        with.whole |= Experts::of(e), with.tokens += demand(e);
        list(g, i + 1, further, with, split);
        if (split && demand(e) > 1) {
            with = chosen;
            with.parts |= Experts::of(e), with.filled += demand(e) - 1;
            list(g, i + 1, further, with, split);
        }
        list(g, i + 1, further, chosen, split);
    }

    // Of both together: any prices are valid, those that make the least that all take the most prune best.
    void find_prices() {
        const double weight = kWeight / static_cast<double>(std::max<std::int64_t>(1, slack_));
        const double both = 2.0 * spare_ + weight * static_cast<double>(slack_);
        std::vector<double> prices(choices_.experts()), best = prices, served(choices_.experts());
        double highest = -1, step = kStep;
        for (int i = 0, vain = 0; i < kSteps && work_left_ >= 0; ++i) {
            double bound = set_prices(prices, weight, served);
            if (bound > highest) {
                highest = bound, best = prices, vain = 0;
            } else if (++vain > kPatience) {
                step *= kShorter, prices = best, vain = 0;
                continue;
            }
            double norm = 0;
            for (const double s : served) norm += (s - 1) * (s - 1);
            if (norm == 0) break;
            const double along = step * std::max(both - bound, 0.5) / norm;
            for (std::size_t e = 0; e < prices.size(); ++e)
                prices[e] = std::max(0.0, prices[e] + along * (1 - served[e]));
        }
        set_prices(best, weight, served);
        const double spare = spare_, paid = std::accumulate(best.begin(), best.end(), 0.0);
        have_ = {2 * spare, spare, static_cast<double>(slack_), both - paid + kTolerance};
    }
    // Returns the least that all GPUs take, and how much of every expert they serve at that.
    double set_prices(const std::vector<double>& prices, double weight, std::vector<double>& served) {
        double bound = std::accumulate(prices.begin(), prices.end(), 0.0);
        served.assign(prices.size(), 0);
        for (std::vector<Pattern>& patterns : patterns_) {
            work_left_ -= static_cast<std::int64_t>(patterns.size());
            const Pattern* cheapest = &patterns[0];
            for (Pattern& p : patterns) {
                double& cost = p.costs[kBoth] = p.costs[kHalves] + weight * p.costs[kSlack];
                p.whole.each([&](int e) { cost -= prices[e]; });
                p.parts.each([&](int e) { cost -= prices[e] / 2; });
                if (cost < cheapest->costs[kBoth]) cheapest = &p;
            }
            bound += cheapest->costs[kBoth];
            cheapest->whole.each([&](int e) { served[e] += 1; });
            cheapest->parts.each([&](int e) { served[e] += 0.5; });
        }
        return bound;
    }
    static Costs least_of(const std::vector<Pattern>& patterns) {
        Costs least = patterns[0].costs;
        for (const Pattern& p : patterns)
            for (int c = 0; c < kScarce; ++c) least[c] = std::min(least[c], p.costs[c]);
        return least;
    }

    bool search(int depth) {
        work_left_ -= choices_.gpus() * choices_.experts() / kPairsALook;
        if (!settle(levels_[depth])) return false;
        const Node& node = levels_[depth];
        if (static_cast<int>(levels_.size()) == depth + 1) levels_.emplace_back();
        int gpu = -1;
        for (int g = 0; g < choices_.gpus(); ++g)
            if (node[g].left > 1 && (gpu < 0 || node[g].left < node[gpu].left)) gpu = g;
        if (gpu < 0) return serve(node);
        Experts once, twice, decided;
        for (const Gpu& at : node) twice |= once & at.parts.any, once |= at.parts.any, decided |= at.whole.all;
        int expert = -1, fewest = node[gpu].left + 1;
        for (int e = 0; e < choices_.experts(); ++e) {
            if (decided.contains(e)) continue;
            int ways = 0;
            for (const Gpu& at : node) ways += at.whole.any.contains(e);
            if (ways == 0) continue;
            ways += twice.contains(e);
            if (ways < fewest) expert = e, fewest = ways;
        }
        return expert >= 0 ? by_expert(depth, expert) : by_pattern(depth, gpu);
    }
    // Whole on one GPU after the other, then split.
    bool by_expert(int depth, int e) {
        for (int g = 0; g < choices_.gpus(); ++g) {
            if (!levels_[depth][g].whole.any.contains(e)) continue;
            levels_[depth + 1] = levels_[depth];
            levels_[depth + 1][g].whole.must |= Experts::of(e);
            if (search(depth + 1)) return true;
        }
        levels_[depth + 1] = levels_[depth];
        for (Gpu& gpu : levels_[depth + 1]) gpu.whole.never |= Experts::of(e);
        return search(depth + 1);
    }
    // The cheapest first. What is searched below reorders the patterns, so they are copied.
    bool by_pattern(int depth, int g) {
        const auto first = patterns_[g].begin();
        std::vector<Pattern> left(first, first + levels_[depth][g].left);
        std::stable_sort(left.begin(), left.end(),
                         [](const Pattern& a, const Pattern& b) { return a.costs[kBoth] < b.costs[kBoth]; });
        for (const Pattern& p : left) {
            levels_[depth + 1] = levels_[depth];
            Gpu& gpu = levels_[depth + 1][g];
            gpu.whole.must = p.whole, gpu.whole.never = ~p.whole;
            gpu.parts.must = p.parts, gpu.parts.never = ~p.parts;
            if (search(depth + 1)) return true;
        }
        return false;
    }

    // Draws what follows, until nothing does. False if something cannot be.
    bool settle(Node& node) {
        for (bool changed = true; std::exchange(changed, false);) {
            work_left_ -= choices_.gpus() / 2;
            Costs all{};
            for (const Gpu& gpu : node)
                for (int c = 0; c < kScarce; ++c) all[c] += gpu.least[c];
            for (int g = 0; g < choices_.gpus(); ++g)
                if (!sift(node[g], patterns_[g], all, changed)) return false;
            if (!changed) break;
            if (!imply(node)) return false;
        }
        return split_experts_fit(node);
    }
    // Keeps the patterns that agree and that leave enough for the other GPUs.
    bool sift(Gpu& gpu, std::vector<Pattern>& patterns, Costs& all, bool& changed) {
        Costs most, least, highest;
        for (int c = 0; c < kScarce; ++c) most[c] = have_[c] - (all[c] - gpu.least[c]);
        if (gpu.whole.all_agree() && gpu.parts.all_agree() && within(gpu.highest, most)) return true;
        work_left_ -= gpu.left;
        if (work_left_ < 0) return false;
        least.fill(kNoLimit), highest.fill(-kNoLimit);
        Side whole{gpu.whole.must, gpu.whole.never}, parts{gpu.parts.must, gpu.parts.never};
        std::int64_t tokens = 0;
        int left = gpu.left;
        for (int i = 0; i < left;) {
            const Pattern& p = patterns[i];
            if (!whole.agrees(p.whole) || !parts.agrees(p.parts) || !within(p.costs, most)) {
                std::swap(patterns[i], patterns[--left]);
                continue;
            }
            whole.any |= p.whole, whole.all &= p.whole, parts.any |= p.parts, parts.all &= p.parts;
            if (!p.parts.empty()) tokens = std::max(tokens, p.tokens - p.parts.count());
            for (int c = 0; c < kScarce; ++c) {
                least[c] = std::min(least[c], p.costs[c]);
                highest[c] = std::max(highest[c], p.costs[c]);
            }
            ++i;
        }
        if (left == 0) return false;
        changed |= left != gpu.left || whole.all != gpu.whole.all || parts.all != gpu.parts.all;
        for (int c = 0; c < kScarce; ++c) all[c] += least[c] - gpu.least[c];
        gpu = {left, whole, parts, tokens, least, highest};
        return true;
    }
    static bool within(const Costs& costs, const Costs& most) {
        for (int c = 0; c < kScarce; ++c)
            if (costs[c] > most[c]) return false;
        return true;
    }
    // What experts with one way left, and parts when no more can be had, mean for the GPUs.
    bool imply(Node& node) const {
        Experts must, any;
        Experts many_whole, two, three, part, some_parts, two_parts;
        double taken = 0;
        for (const Gpu& gpu : node) {
            if (!(must & gpu.whole.all).empty()) return false;
            must |= gpu.whole.all;
            many_whole |= any & gpu.whole.any, any |= gpu.whole.any;
            three |= two & gpu.parts.any, two |= part & gpu.parts.any, part |= gpu.parts.any;
            taken += gpu.least[kIdle] + (two_parts & gpu.parts.all).count();
            two_parts |= some_parts & gpu.parts.all, some_parts |= gpu.parts.all;
        }
        const Experts split = (some_parts | ~any) & every_;
        Experts never_split = (must | ~two) & every_;
        if (!(split & never_split).empty()) return false;
        taken += split.count();
        if (taken > have_[kIdle]) return false;
        const bool no_more = taken == have_[kIdle];
        if (no_more) never_split = every_ & ~split;
        for (Gpu& gpu : node) {
            gpu.whole.never |= split | (must & ~gpu.whole.all);
            gpu.whole.must |= never_split & ~many_whole & gpu.whole.any;
            gpu.parts.never |= never_split;
            if (no_more) gpu.parts.never |= two_parts & ~gpu.parts.all;
            gpu.parts.must |= split & ~three & gpu.parts.any;
        }
        return true;
    }
    // Of every set of split experts: with a token for every part that there may be set aside.
    bool split_experts_fit(const Node& node) {
        Experts whole, parts;
        for (const Gpu& gpu : node) whole |= gpu.whole.any, parts |= gpu.parts.all;
        const Experts split = (parts | ~whole) & every_;
        bool fit = true;
        split.each_subset([&](const Experts& set) {
            work_left_ -= choices_.gpus() / 2;
            std::int64_t lack = 0;
            set.each([&](int e) { lack += demand(e); });
            for (const Gpu& gpu : node) {
                const Experts here = gpu.parts.any & set;
                if (!here.empty()) lack -= gpu.tokens + here.count();
            }
            fit &= lack <= 0;
        });
        return fit && work_left_ >= 0;
    }

    // At a leaf: whole experts as they are, a token for every part, and then as many as leave enough to all
    // sets of the experts that follow. They fit: see above.
    bool serve(const Node& node) {
        tokens_.assign(choices_.options(), 0);
        std::vector<std::int64_t> left, owed;
        for (int e = 0; e < choices_.experts(); ++e) owed.push_back(demand(e));
        for (const Room& room : rooms_) left.push_back(room.tokens);
        const auto give = [&](int e, int g, std::int64_t amount) {
            tokens_[choices_.option_on(e, g)] += static_cast<double>(amount);
            owed[e] -= amount, left[g] -= amount;
        };
        Experts split;
        for (int g = 0; g < choices_.gpus(); ++g) {
            node[g].whole.all.each([&](int e) { give(e, g, demand(e)); });
            node[g].parts.all.each([&](int e) { give(e, g, 1); });
            split |= node[g].parts.all;
        }
        bool enough = true;
        split.each([&](int e) { enough &= owed[e] >= 0; });
        if (!enough) return false;
        Experts later = split;
        split.each([&](int e) {
            later &= ~Experts::of(e);
            for (int g = 0; g < choices_.gpus(); ++g) {
                if (!node[g].parts.all.contains(e)) continue;
                std::int64_t amount = std::min(owed[e], left[g]);
                later.each_subset([&](const Experts& set) {
                    if ((node[g].parts.all & set).empty()) return;
                    std::int64_t over = 0;
                    for (int h = 0; h < choices_.gpus(); ++h)
                        if (!(node[h].parts.all & set).empty()) over += left[h];
                    set.each([&](int f) { over -= owed[f]; });
                    amount = std::min(amount, over);
                });
                give(e, g, amount);
            }
        });
        return true;
    }

    const Choices& choices_;
    std::vector<Room> rooms_;
    int spare_ = 0;
    std::int64_t slack_ = 0, work_left_ = 0, patterns_left_ = 0;
    Experts every_;
    Costs have_{};
    std::vector<std::vector<Pattern>> patterns_;  // those left at a node come first
    std::deque<Node> levels_;                     // references stay
    std::vector<double> tokens_;
};

class PatternSearch {
  public:
    explicit PatternSearch(const Choices& choices) : choices_(choices) {}

    // See PatternTree.
    Verdict decide(const std::vector<Caps>& most, bool split, std::int64_t max_work) {
        if (choices_.experts() <= BitSet<1>::capacity) return decide<1>(most, split, max_work);
        if (choices_.experts() <= BitSet<2>::capacity) return decide<2>(most, split, max_work);
        return Verdict::unknown;
    }
    const std::vector<double>& tokens() const { return tokens_; }

  private:
    template <int W>
    Verdict decide(const std::vector<Caps>& most, bool split, std::int64_t max_work) {
        PatternTree<W> tree(choices_);
        const Verdict verdict = tree.decide(most, split, max_work);
        tokens_ = tree.tokens();
        return verdict;
    }

    const Choices& choices_;
    std::vector<double> tokens_;
};

}  // namespace eplb
