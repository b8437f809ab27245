// Does a routing fit into caps, so many activated replicas and tokens on each GPU? Refutes it, finds
// one, or gives up after so many nodes.
//
// A node has decided for some options that they serve (at least so many tokens), for others that they
// are closed. It is refuted by the first of these that fails:
//
//   1. Rooms. An option takes at most its GPU's room r, the cap less what is promised there. Expert e
//      with demand T needs the fewest further replicas, k, whose rooms cover it: its *k-demand*. With a
//      spare of s activations over all experts together it has k + s at most. An option that no cover
//      of so many uses is closed; one that every cover uses serves, and at least what the others cannot
//      take is promised to it. That shrinks rooms, so it is repeated until nothing changes.
//   2. Flow. The tokens flow through all options that are not closed, within the rooms.
//   3. b-matching. The k-demands of all experts fit into the GPUs' free activations.
//
// What is left opens the matched options, and those that the flow of 2 uses where activations are
// free. If the tokens flow through these alone, that is a routing. Otherwise the flow is stuck: the
// GPUs it reaches hold all options of the experts they serve. The node branches on an option outside
// of an expert served inside: serves, then closed.
//
// Steps 1 and 3 at the root cost O(options) a round and O(options) per augmentation; every branch
// decides an option, so it ends.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "choices.hpp"
#include "gpu_set.hpp"

namespace eplb {

enum class Verdict { refuted, fits, unknown };

template <int W>
class Branching {
  public:
    explicit Branching(const Choices& choices) : choices_(choices) {}

    // Call when the choices have been read.
    void read() {
        holders_.resize(choices_.experts()), least_taken_.resize(choices_.experts());
        open_.resize(choices_.options()), room_of_.resize(choices_.options());
        room_.resize(choices_.gpus()), came_by_.resize(choices_.gpus()), moved_.resize(choices_.gpus());
        for (int e = 0; e < choices_.experts(); ++e) holders_[e] = gpus_of(e, [](std::int32_t) { return true; });
    }

    // `most` is what may be served on each GPU beside what is fixed. Without `split` every expert takes
    // one replica. What remains of a flow that was stuck at the end is in tokens() too. With equal GPUs
    // `slack` says by how many tokens their caps are above what any routing needs.
    Verdict decide(const std::vector<Caps>& most, bool split, std::int64_t max_nodes, double slack = kUnequal) {
        split_ = split, slack_ = split ? slack : kUnequal, max_nodes_ = max_nodes, nodes_ = 0, work_ = 0;
        level_ = kInf;
        if (stack_.empty()) stack_.resize(1);
        Node& root = stack_[0];
        root.left = most;
        root.state.assign(choices_.options(), kFree);
        root.promised.assign(choices_.options(), 0.0);
        root.need.assign(choices_.experts(), 0);
        root.idle.assign(choices_.experts(), 0);
        root.stale = {};
        root.free.resize(choices_.gpus());
        for (int g = 0; g < choices_.gpus(); ++g) {
            root.free[g] = static_cast<int>(choices_.on(g).size());
            root.stale.insert(g);
        }
        root.spare = kInf;
        tokens_.assign(choices_.options(), 0.0);
        return visit(0);
    }
    const std::vector<double>& tokens() const { return tokens_; }
    // With equal GPUs and no refutation: by how many tokens the caps must rise, or may fall, for the options
    // that a node opens to route all tokens; the least of all nodes, and that routing.
    double level() const { return level_; }
    const std::vector<double>& leveled() const { return leveled_; }
    std::int64_t nodes() const { return nodes_; }
    // Options looked at, or what takes as long.
    std::int64_t work() const { return work_; }

    static constexpr double kUnequal = -1;

  private:
    static constexpr int kMostLaps = 16, kFlowWork = 2, kPathWork = 6;
    // Not a char: a store to one may change any other object, so what was read would be read again.
    enum State : std::int16_t { kFree, kServes, kClosed };
    struct Node {
        std::vector<Caps> left;  // of each GPU, beside what serves and is promised
        std::vector<State> state;
        std::vector<double> promised;
        std::vector<int> need;  // of each expert, beside what serves
        std::vector<int> idle;  // of each expert: with a spare of fewer, more follows
        std::vector<int> free;  // options of each GPU
        GpuSet<W> stale;        // GPUs with changes that their experts have not seen
        double spare;
    };

    Verdict visit(std::size_t depth) {
        ++nodes_;
        if (stack_.size() < depth + 2) stack_.resize(depth + 2);  // a deque: references stay
        Node& node = stack_[depth];
        if (!tighten(node)) return Verdict::refuted;
        work_ += kFlowWork * choices_.options();
        for (std::int32_t o = 0; o < choices_.options(); ++o) open_[o] = node.state[o] != kClosed;
        cut_rooms(node);
        if (!flow(node, 0, false)) return Verdict::refuted;
        wide_ = tokens_;
        if (!match(node)) return Verdict::refuted;
        open_matched(node);
        if (route_opened(node)) return Verdict::fits;
        if (nodes_ >= max_nodes_) return Verdict::unknown;
        const std::int32_t branch = way_out(node);
        if (branch < 0) return Verdict::unknown;  // cannot be: the flow through all options would be stuck

        Verdict verdict = Verdict::refuted;
        for (const State choice : {kServes, kClosed}) {
            Node& child = stack_[depth + 1];
            child = node;
            child.state[branch] = choice;
            const int gpu = choices_.option(branch).gpu;
            --child.free[gpu], child.stale.insert(gpu);
            if (choice == kServes) {
                Caps& left = child.left[gpu];
                left.activated -= 1, left.tokens -= 1;
                child.promised[branch] = 1;
            }
            const Verdict of_child = visit(depth + 1);
            if (of_child == Verdict::fits) return of_child;
            if (of_child == Verdict::unknown) verdict = of_child;
            if (nodes_ >= max_nodes_ && choice == kServes) return Verdict::unknown;
        }
        return verdict;
    }

    double room(const Node& node, std::int32_t o, double demand) const {
        if (node.state[o] == kClosed) return 0;
        return std::min(demand, node.left[choices_.option(o).gpu].tokens + node.promised[o]);
    }
    template <class Is>
    GpuSet<W> gpus_of(int e, Is&& is) const {
        GpuSet<W> gpus;
        for (std::int32_t o = choices_.first(e); o < choices_.first(e + 1); ++o)
            gpus.insert_if(choices_.option(o).gpu, is(o));
        return gpus;
    }
    void close(Node& node, std::int32_t o) const {
        const int g = choices_.option(o).gpu;
        node.state[o] = kClosed, --node.free[g], node.stale.insert(g);
    }
    void close_all(Node& node, int gpu) const {
        if (node.free[gpu] == 0) return;
        for (const std::int32_t o : choices_.on(gpu))
            if (node.state[o] == kFree) close(node, o);
    }

    // Step 1; false if it refutes the node.
    bool tighten(Node& node) {
        for (int g = 0; g < choices_.gpus(); ++g) {
            if (node.left[g].activated < 0 || node.left[g].tokens < 0) return false;
            if (node.left[g].activated == 0) close_all(node, g);
        }
        for (bool again = true; again;) {
            // Two GPUs may raise each other's promises by a token a lap: what laps leave, the flow refutes.
            for (int lap = 0; lap < kMostLaps && !node.stale.empty(); ++lap) {
                const GpuSet<W> changes = std::exchange(node.stale, {});
                for (int e = 0; e < choices_.experts(); ++e)
                    if (!(holders_[e] & (changes | node.stale)).empty() && !tighten(node, e)) return false;
            }
            double spare = 0;
            for (int g = 0; g < choices_.gpus(); ++g)
                spare += std::min<double>(node.free[g], node.left[g].activated);
            for (const int need : node.need) spare -= need;
            if (spare < 0) return false;
            again = false;
            if (spare < node.spare) {
                node.spare = spare;
                for (int e = 0; e < choices_.experts(); ++e)
                    if (spare < node.idle[e]) {
                        if (!tighten(node, e)) return false;
                        again |= !node.stale.empty();
                    }
            }
            if (!close_too_large(node, again)) return false;
        }
        return true;
    }
    // With a spare of s activations a GPU opens all but s of the options that it has room for, and all
    // but s experts in all are served by no more replicas than they need. Together: of the options that
    // a GPU opens and that take all tokens of their expert at most s are missing. An option is closed if
    // neither all of its expert's tokens have room beside the smallest of the others, nor one token
    // beside one more of them, since a part uses up one of s. False if not even the smallest have room.
    bool close_too_large(Node& node, bool& closed) {
        const double spare = node.spare;
        if (std::all_of(node.left.begin(), node.left.end(), [&](const Caps& c) { return c.activated <= spare; }))
            return true;
        for (int e = 0; e < choices_.experts(); ++e) least_taken_[e] = least_taken(node, e);
        const auto least = [&](std::int32_t o) { return least_taken_[choices_.option(o).expert]; };
        for (int g = 0; g < choices_.gpus(); ++g) {
            if (node.left[g].activated <= spare) continue;
            rooms_.clear();
            for (const std::int32_t o : choices_.on(g))
                if (node.state[o] == kFree) rooms_.push_back(least(o));
            const double opened = std::min(node.left[g].activated, static_cast<double>(rooms_.size()));
            const auto whole = static_cast<std::ptrdiff_t>(opened - spare);
            if (whole <= 0) continue;
            std::nth_element(rooms_.begin(), rooms_.begin() + whole - 1, rooms_.end());
            double others = 0;
            for (std::ptrdiff_t i = 0; i + 1 < whole; ++i) others += rooms_[i];
            const double largest = rooms_[whole - 1], room = node.left[g].tokens;
            if (others + largest > room) return false;
            if (spare > 0 && others + largest + 1 <= room) continue;
            for (const std::int32_t o : choices_.on(g))
                if (node.state[o] == kFree && least(o) > largest && others + least(o) > room)
                    close(node, o), closed = true;
        }
        return true;
    }
    // By an option that opens.
    double least_taken(const Node& node, int e) const {
        if (node.need[e] != 1) return 1;
        for (std::int32_t d = choices_.first(e); d < choices_.first(e + 1); ++d)
            if (node.state[d] == kServes) return 1;
        return choices_.demand(e);
    }
    bool tighten(Node& node, int e) {
        for (bool changed = true; changed;) {
            changed = false;
            if (!tighten(node, e, changed)) return false;
        }
        return true;
    }
    bool tighten(Node& node, int e, bool& changed) {
        const double spare = node.spare;
        const double demand = choices_.demand(e);
        const std::int32_t first = choices_.first(e), last = choices_.first(e + 1);
        work_ += last - first;
        // Two options that each have room for all: nothing follows, unless replicas are few.
        int roomy = 0;
        bool serves = false;
        double promised = 0;
        for (std::int32_t o = first; o < last; ++o) {
            room_of_[o] = room(node, o, demand);
            roomy += room_of_[o] == demand;
            serves |= node.state[o] == kServes;
            promised += node.promised[o];
        }
        if (promised > demand) return false;
        if (roomy >= 2 && !serves && (roomy == last - first || (split_ && spare >= 1))) {
            node.need[e] = node.idle[e] = 1;
            return true;
        }
        rooms_.clear();  // of the free options, falling
        double held = 0;
        for (std::int32_t o = first; o < last; ++o) {
            const double r = room_of_[o];
            if (node.state[o] == kServes) held += r;
            if (node.state[o] == kFree && r > 0)
                rooms_.insert(std::upper_bound(rooms_.begin(), rooms_.end(), r, std::greater<>()), r);
        }
        const int free = static_cast<int>(rooms_.size());
        int need = 0;
        for (double left = demand - held; left > 0; left -= rooms_[need++])
            if (need == free) return false;
        if (!split_ && need + serves > 1) return false;
        node.need[e] = need, node.idle[e] = free - need;
        int most = spare < free - need ? need + static_cast<int>(spare) : free;
        if (!split_) most = serves ? 0 : 1;
        double top = 0;  // of the `most` largest
        for (int i = 0; i < most; ++i) top += rooms_[i];
        for (std::int32_t o = first; o < last; ++o) {
            if (node.state[o] == kClosed) continue;
            const double mine = room_of_[o];
            const bool among = most > 0 && mine >= rooms_[most - 1];
            if (node.state[o] == kFree) {
                const double with = most == 0 ? 0 : among ? top : top - rooms_[most - 1] + mine;
                if (mine == 0 || most == 0 || held + with < demand) {
                    close(node, o), changed = true;
                    continue;
                }
            }
            double others = held + top;
            if (node.state[o] == kServes)
                others -= mine;
            else if (among)
                others += (most < free ? rooms_[most] : 0) - mine;
            const double least = demand - others;
            if (least <= node.promised[o]) continue;
            const int gpu = choices_.option(o).gpu;
            Caps& left = node.left[gpu];
            if (node.state[o] == kFree) {
                node.state[o] = kServes, --node.free[gpu];
                if (--left.activated == 0) close_all(node, gpu);
            }
            left.tokens -= least - node.promised[o];
            node.promised[o] = least;
            changed = true, node.stale.insert(gpu);
            return left.activated >= 0 && left.tokens >= 0;  // the rooms above have changed
        }
        return true;
    }

    // A GPU takes no more than what serves there, and the largest that its free activations can take.
    void cut_rooms(const Node& node) {
        for (int g = 0; g < choices_.gpus(); ++g) {
            rooms_.clear();
            double most = 0;
            for (const std::int32_t o : choices_.on(g)) {
                const double r = room(node, o, choices_.demand(choices_.option(o).expert));
                if (node.state[o] == kServes) most += r - node.promised[o];
                if (node.state[o] == kFree) rooms_.push_back(r);
            }
            const auto [activated, tokens] = node.left[g];
            const auto free = static_cast<std::ptrdiff_t>(std::min(activated, static_cast<double>(rooms_.size())));
            room_[g] = tokens;
            const auto all_of_these = [&] { return std::accumulate(rooms_.begin(), rooms_.begin() + free, most); };
            if (all_of_these() >= tokens) continue;
            std::nth_element(rooms_.begin(), rooms_.begin() + free, rooms_.end(), std::greater<>());
            room_[g] = std::min(tokens, all_of_these());
        }
    }

    // Step 3, preferring what the flow of step 2 uses.
    bool match(const Node& node) {
        activations_.resize(choices_.gpus());
        for (int g = 0; g < choices_.gpus(); ++g) activations_[g] = node.left[g].activated;
        matched_.assign(choices_.options(), 0);
        for (int e = 0; e < choices_.experts(); ++e)
            for (int i = 0; i < node.need[e]; ++i) {
                std::int32_t best = -1;
                double most = -1;
                for (std::int32_t o = choices_.first(e); o < choices_.first(e + 1); ++o) {
                    const bool free =
                        (node.state[o] == kFree) & !matched_[o] & (activations_[choices_.option(o).gpu] > 0);
                    const double flows = free ? wide_[o] : -1.0;
                    best = flows > most ? o : best, most = std::max(most, flows);
                }
                if (best >= 0) {
                    matched_[best] = 1, --activations_[choices_.option(best).gpu];
                    continue;
                }
                reached_ = {};
                if (!augment(node, e)) return false;
            }
        return true;
    }
    bool augment(const Node& node, int e) {
        for (std::int32_t o = choices_.first(e); o < choices_.first(e + 1); ++o) {
            const int g = choices_.option(o).gpu;
            if (node.state[o] != kFree || matched_[o] || reached_.contains(g)) continue;
            reached_.insert(g);
            if (activations_[g] > 0) {
                matched_[o] = 1, --activations_[g];
                return true;
            }
            for (const std::int32_t other : choices_.on(g))
                if (matched_[other] && augment(node, choices_.option(other).expert)) {
                    matched_[other] = 0, matched_[o] = 1;
                    return true;
                }
        }
        return false;
    }
    void open_matched(const Node& node) {
        for (std::int32_t o = 0; o < choices_.options(); ++o) open_[o] = node.state[o] == kServes || matched_[o];
        if (!split_) return;
        for (int g = 0; g < choices_.gpus(); ++g) {
            closed_.clear();
            for (const std::int32_t o : choices_.on(g))
                if (!open_[o] && node.state[o] == kFree && wide_[o] > 0) closed_.push_back(o);
            const auto more = std::min<std::size_t>(closed_.size(), static_cast<std::size_t>(activations_[g]));
            if (more < closed_.size())
                std::partial_sort(closed_.begin(), closed_.begin() + static_cast<std::ptrdiff_t>(more),
                                  closed_.end(), [&](std::int32_t a, std::int32_t b) {
                                      return wide_[a] > wide_[b] || (wide_[a] == wide_[b] && a < b);
                                  });
            for (std::size_t i = 0; i < more; ++i) open_[closed_[i]] = 1;
        }
    }

    // Whether the tokens flow through the open options; what they do at the least level, with equal GPUs.
    bool route_opened(const Node& node) {
        const bool equal = slack_ != kUnequal;
        double slack = equal ? slack_ : 0;
        for (int g = 0; g < choices_.gpus(); ++g) slack = std::min(slack, node.left[g].tokens);
        for (int g = 0; g < choices_.gpus(); ++g) room_[g] = node.left[g].tokens - slack;
        flow(node, slack, equal);
        if (equal && above_ < level_) level_ = above_, leveled_ = tokens_;
        if (above_ <= 0) return true;
        tokens_ = stuck_.tokens;
        return false;
    }
    // Routes the tokens through the open options within the rooms, what is promised first. If they do not fit, all
    // rooms rise by what the GPUs that the rest reaches need at least (Newton's step on the tight set), which
    // is exact: `above_` is by how much in the end, less `slack`. Where they first rise above that is kept in
    // `stuck_`; without `rises` it ends there, false.
    bool flow(const Node& node, double slack, bool rises) {
        above_ = -slack;
        tokens_ = node.promised;
        opened_.clear();
        for (int e = 0; e < choices_.experts(); ++e) {
            const std::int32_t first = choices_.first(e), last = choices_.first(e + 1);
            double rest = choices_.demand(e);
            for (std::int32_t o = first; o < last; ++o) {
                rest -= node.promised[o];
                room_of_[o] = open_[o] ? room_[choices_.option(o).gpu] : 0.0;
            }
            while (rest > 0) {
                std::int32_t best = -1;
                double most = 0;
                for (std::int32_t o = first; o < last; ++o)
                    best = room_of_[o] > most ? o : best, most = std::max(most, room_of_[o]);
                if (best < 0) break;
                const double amount = std::min(rest, most);
                tokens_[best] += amount, room_[choices_.option(best).gpu] -= amount, rest -= amount;
                room_of_[best] = 0;
            }
            if (rest > 0 && !reroute(node, e, rest, rises)) return false;
        }
        return true;
    }
    // Serves `rest` tokens of an expert whose GPUs are full, along paths that move other tokens on.
    bool reroute(const Node& node, int e, double rest, bool rises) {
        if (opened_.empty())
            for (int f = 0; f < choices_.experts(); ++f)
                opened_.push_back(gpus_of(f, [&](std::int32_t o) { return open_[o] != 0; }));
        GpuSet<W> roomy;
        const auto look = [&] {
            for (int g = 0; g < choices_.gpus(); ++g) roomy.insert_if(g, room_[g] > 0);
        };
        look();
        while (rest > 0) {
            work_ += kPathWork;
            reached_ = {};
            queue_.clear();
            int end = -1;
            const auto reach = [&](int expert, std::int32_t moved) {
                const GpuSet<W> next = opened_[expert] - reached_;
                if (next.empty()) return;
                if (const GpuSet<W> ends = next & roomy; !ends.empty()) {
                    end = ends.lowest();
                    came_by_[end] = expert, moved_[end] = moved;
                    return;
                }
                reached_ |= next;
                next.each([&](int g) { queue_.push_back(g), came_by_[g] = expert, moved_[g] = moved; });
            };
            reach(e, -1);
            for (std::size_t i = 0; i < queue_.size() && end < 0; ++i)
                for (const std::int32_t o : choices_.on(queue_[i])) {
                    if (tokens_[o] > node.promised[o]) reach(choices_.option(o).expert, o);
                    if (end >= 0) break;
                }
            if (end < 0) {
                const double by = std::ceil(rest / static_cast<double>(queue_.size()));
                if (above_ <= 0 && above_ + by > 0)
                    stuck_.expert = e, stuck_.rest = rest, stuck_.reached = reached_, stuck_.tokens = tokens_;
                above_ += by;
                if (!rises) return false;
                for (double& r : room_) r += by;
                look();
                continue;
            }
            double amount = std::min(rest, room_[end]);
            for (int g = end; moved_[g] >= 0; g = choices_.option(moved_[g]).gpu)
                amount = std::min(amount, tokens_[moved_[g]] - node.promised[moved_[g]]);
            room_[end] -= amount, rest -= amount;
            if (room_[end] == 0) roomy.erase(end);
            for (int g = end;; g = choices_.option(moved_[g]).gpu) {
                tokens_[choices_.option_on(came_by_[g], g)] += amount;
                if (moved_[g] < 0) break;
                tokens_[moved_[g]] -= amount;
            }
        }
        return true;
    }

    // The option to branch on: outside of the reached GPUs, of the expert with most tokens inside.
    std::int32_t way_out(const Node& node) const {
        std::int32_t best = -1;
        double most = 0;
        for (std::int32_t o = 0; o < choices_.options(); ++o) {
            const auto [gpu, slot, e] = choices_.option(o);
            if (stuck_.reached.contains(gpu) || open_[o] || node.state[o] != kFree) continue;
            double inside = e == stuck_.expert ? stuck_.rest : 0;
            for (std::int32_t d = choices_.first(e); d < choices_.first(e + 1); ++d)
                if (stuck_.reached.contains(choices_.option(d).gpu)) inside += tokens_[d] - node.promised[d];
            inside = std::min(inside, node.left[gpu].tokens);
            if (inside > most) most = inside, best = o;
        }
        return best;
    }

    const Choices& choices_;
    bool split_ = true;
    std::int64_t max_nodes_ = 0, nodes_ = 0, work_ = 0;
    double slack_ = kUnequal, level_ = kInf, above_ = 0;
    struct {
        int expert;
        double rest;
        GpuSet<W> reached;
        std::vector<double> tokens;
    } stuck_;
    std::deque<Node> stack_;
    std::vector<double> least_taken_, room_of_, rooms_, activations_, room_, tokens_, wide_, leveled_;
    std::vector<char> open_, matched_;
    std::vector<std::int32_t> moved_, closed_;
    std::vector<int> came_by_, queue_;         // the expert that came to a GPU, the GPUs reached
    std::vector<GpuSet<W>> holders_, opened_;  // GPUs of each expert's options, and of those that are open
    GpuSet<W> reached_;
};

}  // namespace eplb
