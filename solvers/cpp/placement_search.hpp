// Placement search: which experts get copies and where they live, so that the largest GPU load is least.
//
// Every copy of an expert takes an equal share of its load. With one window of loads the cost of a
// placement is its largest GPU load; with several, the mean or a quantile over windows of each window's.
//
// Afresh:
// 1. Groups of experts go to nodes (heaviest first, then swaps, by the same search), equally many to each.
// 2. Every spare slot of a node goes to the expert with the largest load per copy, one per GPU at most.
// 3. Copies go by falling load to the lightest GPU of their node that has room and lacks the expert; if none
//    does, one with room takes an entry of a GPU that lacks the expert, which makes the room there.
// From a placement: its entries, where they are.
// With several windows the steps first lower the worst window's makespan, then what was asked for: a mean's
// steps alone end sooner, as each of them mostly lowers one window and raises others.
// Then steps, each of which lowers the cost, or keeps it and lowers the sum of squares of GPU loads. They
// relieve a GPU that is the fullest of some window, in this order, the best of the first kind that helps:
//   swap         it and a lighter GPU trade an entry each;
//   double swap  or two each;
//   regrant      a spare copy of an expert makes room for a further copy of one on the GPU (or on another);
//   chain        it and a lighter GPU trade, and so do that one and a third.
// No step puts two copies of an expert on one GPU, or an expert on two nodes if it was on one.
//
// A trade takes an entry of a GPU that the other lacks for one of the other's that the GPU lacks: at most S^2
// of a pair of GPUs, and what each changes is listed once. With one window only trades count that leave less
// than the cost: of swaps the one that leaves the two most alike, of the second trades of a chain those within
// an interval of change, which the list is searched for at vector speed. So a swap takes O(S^2 G), a regrant
// O(S R G) with R slots that hold experts with copies, a chain O(S^4 G^2) at the worst.
//
// Loads are brought near 1 by a power of two, which changes no digit: their squares would over- or underflow.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "copies.hpp"
#include "distinct.hpp"
#include "packing.hpp"
#include "reslotting.hpp"
#include "slot_keeping.hpp"
#include "tournament.hpp"

namespace eplb {

// How the windows' makespans sum up: their mean, or a quantile between neighbours by interpolation.
struct OverWindows {
    double quantile;  // negative: the mean

    // `makespans` may be reordered.
    double operator()(std::span<double> makespans) const {
        const std::size_t count = makespans.size();
        if (count == 1) return makespans[0];
        if (quantile < 0)
            return std::accumulate(makespans.begin(), makespans.end(), 0.0) / static_cast<double>(count);
        if (quantile == 1) return *std::max_element(makespans.begin(), makespans.end());
        std::sort(makespans.begin(), makespans.end());
        const double at = quantile * static_cast<double>(count - 1);
        const auto low = static_cast<std::size_t>(at);
        return std::lerp(makespans[low], makespans[std::min(low + 1, count - 1)], at - static_cast<double>(low));
    }
};

// One layer's loads and where they may go.
struct PlacementTask {
    std::span<const double> loads;  // [windows, experts], finite, not negative
    std::int32_t windows, experts, gpus, slots_per_gpu;
    std::int32_t nodes, groups;  // nodes divide GPUs and groups, groups experts
    OverWindows over;
    const std::int32_t* previous;  // [gpus, slots_per_gpu], whose empty slots stay empty; or null
};

// After a step: weights that GPUs must have received so far, and the cost.
struct SearchPoint {
    std::int32_t moves;
    double cost;
};

template <bool kOneWindow>
class PlacementSearch {
  public:
    explicit PlacementSearch(const PlacementTask& task) : task_(task) {
        windows_ = task.windows, experts_ = task.experts, gpus_ = task.gpus, node_gpus_ = gpus_ / task.nodes;
        begin_.push_back(0);
        for (std::int32_t g = 0; g < gpus_; ++g) {
            for (std::int32_t s = 0; s < task.slots_per_gpu; ++s) {
                const std::int32_t p = g * task.slots_per_gpu + s;
                if (task.previous == nullptr || task.previous[p] >= 0) slot_of_.push_back(p), gpu_of_.push_back(g);
            }
            begin_.push_back(static_cast<std::int32_t>(slot_of_.size()));
        }
        scale_ = scale_to_1(*std::max_element(task.loads.begin(), task.loads.end()));
        load_.resize(static_cast<std::size_t>(experts_) * windows_);
        for (std::int32_t e = 0; e < experts_; ++e)
            for (std::int32_t w = 0; w < W(); ++w) load_[e * W() + w] = task.loads[w * experts_ + e] * scale_;
        entry_.assign(slot_of_.size(), kNone);
        copies_.assign(experts_, 0);
        share_.assign((static_cast<std::size_t>(experts_) + 1) * W(), 0.0);  // the last: of no expert
        held_.assign(static_cast<std::size_t>(gpus_) * experts_, 0);
        old_ = held_;
        if (task.previous != nullptr)
            for (std::size_t i = 0; i < slot_of_.size(); ++i) old_[at(gpu_of_[i], task.previous[slot_of_[i]])] = 1;
        gpu_load_.assign(static_cast<std::size_t>(gpus_) * W(), 0.0);
        fullest_.assign(W(), {kNone, kNone, kNone, kNone}), makespans_.resize(W()), rest_.resize(W()),
            trial_.resize(W());
        weight_.resize(entry_.size() * W()), total_.resize(gpus_), order_.resize(gpus_);
        std::iota(order_.begin(), order_.end(), 0);
    }

    // Over windows, to scale.
    std::vector<double> mean_load() const {
        std::vector<double> mean(experts_, 0.0);
        for (std::int32_t e = 0; e < experts_; ++e)
            mean[e] = std::accumulate(&load_[e * W()], &load_[e * W()] + W(), 0.0) / W();
        return mean;
    }

    void start_afresh() {
        const std::vector<double> mean = mean_load();
        const std::vector<std::int32_t> node_of = experts_to_nodes();
        for (std::int32_t n = 0; n < task_.nodes; ++n) pack_node(n, node_of, mean);
        begin();
    }

    // `slots` are filled at most where `previous` is.
    void start_from(const std::int32_t* slots) {
        for (std::size_t i = 0; i < slot_of_.size(); ++i) put(i, slots[slot_of_[i]]);
        begin();
    }

    // Takes another sum of windows for the cost.
    void ask(OverWindows over) {
        task_.over = over;
        measure();
    }

    // Takes steps until the cost is at most `enough`, none helps, they were `steps`, or `work` trials are
    // spent; `after(point)` is called after each. Deterministic. Returns the work that is left.
    template <class After>
    std::int64_t improve(double enough, std::int64_t work, std::int64_t steps, After&& after) {
        work_ = work;
        for (; steps > 0 && work_ > 0 && cost() > enough && step(); --steps) after(point());
        return work_;
    }
    std::int64_t improve(double enough, std::int64_t work) {
        return improve(enough, work, std::numeric_limits<std::int64_t>::max(), [](const SearchPoint&) {});
    }

    // Goes on where no step helps: hands some spare copies to random experts, improves, and takes it back if
    // the cost is not lower.
    void explore(double enough, std::int64_t work) {
        for (work = improve(enough, work); work > 0 && cost() > enough; work = improve(enough, work)) {
            if (cost_ <= kept_cost_)
                kept_ = entry_, kept_cost_ = cost_;
            else
                restore();
            if (!kick()) return;
            --work;
        }
        if (cost_ > kept_cost_) restore();
    }

    // No placement of these experts on these nodes costs less: the mean loads of the fullest node's GPUs.
    double floor_of_nodes() {
        std::fill(trial_.begin(), trial_.end(), 0.0);
        for (std::int32_t first = 0; first < gpus_; first += node_gpus_)
            for (std::int32_t w = 0; w < W(); ++w) {
                double sum = 0;
                for (std::int32_t g = first; g < first + node_gpus_; ++g) sum += load_of(g, w);
                trial_[w] = std::max(trial_[w], sum / node_gpus_);
            }
        return task_.over(trial_) / scale_;
    }

    // What a placement to start from may lack: a slot for every expert, a node for every group and as many
    // groups on each node.
    bool is_whole() const {
        return std::all_of(copies_.begin(), copies_.end(), [](std::int32_t copies) { return copies > 0; }) &&
               keeps_groups();
    }
    // Nor may it lack this: no two copies of an expert on a GPU.
    bool is_apart() const {
        return std::none_of(held_.begin(), held_.end(), [](std::uint16_t slots) { return slots > 1; });
    }
    double cost() const { return cost_ / scale_; }
    SearchPoint point() const { return {moves_, cost()}; }

    // What stays on a GPU keeps its slot.
    void write(std::int32_t* slots) const {
        const auto width = static_cast<std::size_t>(task_.slots_per_gpu);
        std::fill_n(slots, gpus_ * width, kNone);
        for (std::size_t i = 0; i < slot_of_.size(); ++i) slots[slot_of_[i]] = entry_[i];
        for (std::size_t row = 0; task_.previous != nullptr && row < gpus_ * width; row += width)
            keep_slots({task_.previous + row, width}, {slots + row, width});
    }

  private:
    static constexpr std::int32_t kNone = -1, kTop = 4;

    // Entries at[0] and at[1] trade places, and at[2] and at[3]; or `expert` takes the slot of at[0].
    struct Step {
        double cost = 0, squares = 0;  // what it makes of the cost; its change of the sum of squares
        std::array<std::int32_t, 4> at{kNone, kNone, kNone, kNone};
        std::int32_t expert = kNone;
    };

    // The entries that a GPU and another may trade: `out` for `in`.
    struct Trades {
        std::vector<std::int32_t> out, in;
        std::vector<double> weight_in, change;  // in the first window; [out, in]: what leaves the GPU

        std::pair<std::int32_t, std::int32_t> at(std::size_t k) const {
            const auto row = static_cast<std::uint32_t>(k), width = static_cast<std::uint32_t>(in.size());
            return {out[row / width], in[row % width]};
        }
    };

    std::int32_t W() const { return kOneWindow ? 1 : windows_; }
    std::size_t at(std::int32_t gpu, std::int32_t expert) const {
        return static_cast<std::size_t>(gpu) * experts_ + expert;
    }
    bool keeps_groups() const {
        if (task_.nodes == 1) return true;
        std::vector<std::int32_t> home(task_.groups, kNone), count(task_.nodes, 0);
        for (std::int32_t p = 0; p < entries(); ++p) {
            if (entry_[p] < 0) continue;
            const std::int32_t node = gpu_of_[p] / node_gpus_;
            std::int32_t& of_group = home[entry_[p] / (experts_ / task_.groups)];
            if (of_group == kNone) of_group = node, ++count[node];
            if (of_group != node) return false;
        }
        return std::all_of(count.begin(), count.end(),
                           [&](std::int32_t groups) { return groups == task_.groups / task_.nodes; });
    }
    bool holds(std::int32_t gpu, std::int32_t expert) const { return expert >= 0 && held_[at(gpu, expert)] > 0; }
    const double* share(std::int32_t expert) const { return &share_[(expert < 0 ? experts_ : expert) * W()]; }
    double load_of(std::int32_t gpu, std::int32_t w) const { return gpu_load_[gpu * W() + w]; }
    std::int32_t entries() const { return static_cast<std::int32_t>(entry_.size()); }
    std::int32_t node_begin(std::int32_t gpu) const { return gpu / node_gpus_ * node_gpus_; }

    // The power of two, a normal number, that brings another near 1.
    static double scale_to_1(double number) {
        int exponent = 0;
        std::frexp(number, &exponent);
        return std::ldexp(1.0, -std::clamp(exponent, -1022, 1022));
    }

    // --- the start ---

    // The node of every expert: groups as experts, nodes as GPUs.
    std::vector<std::int32_t> experts_to_nodes() const {
        std::vector<std::int32_t> node_of(experts_, 0);
        if (task_.nodes == 1) return node_of;
        const std::int32_t groups = task_.groups, size = experts_ / groups;
        std::vector<double> loads(static_cast<std::size_t>(windows_) * groups, 0.0);
        for (std::int32_t w = 0; w < windows_; ++w)
            for (std::int32_t e = 0; e < experts_; ++e)
                loads[w * groups + e / size] += task_.loads[w * experts_ + e];
        const std::int32_t per_node = groups / task_.nodes;
        PlacementSearch search({loads, windows_, groups, task_.nodes, per_node, 1, 1, task_.over, nullptr});
        search.start_afresh();
        search.improve(0, kGroupWork);
        std::vector<std::int32_t> slots(groups);
        search.write(slots.data());
        for (std::int32_t i = 0; i < groups; ++i)
            std::fill_n(node_of.begin() + slots[i] * size, size, i / per_node);
        return node_of;
    }

    void pack_node(std::int32_t node, const std::vector<std::int32_t>& node_of, const std::vector<double>& mean) {
        const std::int32_t first = node * node_gpus_, last = first + node_gpus_;
        std::int32_t usable = 0;
        for (std::int32_t g = first; g < last; ++g) usable += begin_[g + 1] > begin_[g];
        std::vector<std::int32_t> replica;
        std::vector<double> load;
        for (std::int32_t e = 0; e < experts_; ++e)
            if (node_of[e] == node) replica.push_back(e), load.push_back(mean[e]);
        const std::size_t own = replica.size();
        std::vector<std::int32_t> copies(own, 1);
        grant_copies(load, copies, begin_[last] - begin_[first] - static_cast<std::int32_t>(own), usable,
                     FewestCopiesFirst{}, [&](std::int32_t i) { replica.push_back(replica[i]); });
        std::vector<double> per_copy(experts_, 0.0), weight;
        for (std::size_t i = 0; i < own; ++i) per_copy[replica[i]] = load[i] / copies[i];
        for (const std::int32_t e : replica) weight.push_back(per_copy[e]);

        std::vector<double> packed(node_gpus_, 0.0);
        std::vector<std::int32_t> next(begin_.begin() + first, begin_.begin() + last);
        const auto has_room = [&](std::int32_t g) { return next[g] < begin_[first + g + 1]; };
        const auto rank = [&](std::int32_t g) { return has_room(g) ? Rank::rising(packed[g], g) : Rank::last(); };
        Tournament lightest(node_gpus_, rank);
        const auto put_next = [&](std::int32_t g, std::int32_t e) {
            put(next[g]++, e);
            packed[g] += per_copy[e];
            lightest.change(g, rank(g));
        };
        const auto lightest_lacking = [&](std::int32_t e) {
            std::int32_t best = kNone;
            for (std::int32_t g = 0; g < node_gpus_; ++g)
                if (has_room(g) && !holds(first + g, e) && (best < 0 || packed[g] < packed[best])) best = g;
            return best;
        };
        for (const std::int32_t i : heaviest_first(weight)) {
            const std::int32_t e = replica[i], with_room = lightest.first().player();
            if (const std::int32_t g = holds(first + with_room, e) ? lightest_lacking(e) : with_room; g >= 0) {
                put_next(g, e);
            } else if (const std::int32_t p = entry_to_move(first, with_room, e); p >= 0) {
                const std::int32_t f = entry_[p];  // of a GPU without room
                take_out(p);
                put(p, e);
                put_next(with_room, f);
            } else if (const std::int32_t other = heaviest_lacking(first + with_room, replica, per_copy);
                       other >= 0) {
                put_next(with_room, other);
            }
        }
    }

    // An entry of a GPU of the node that lacks `expert`, which GPU `with_room` of the node lacks: the last.
    std::int32_t entry_to_move(std::int32_t first, std::int32_t with_room, std::int32_t expert) const {
        for (std::int32_t p = begin_[first + node_gpus_] - 1; p >= begin_[first]; --p)
            if (entry_[p] >= 0 && !holds(gpu_of_[p], expert) && !holds(first + with_room, entry_[p])) return p;
        return kNone;
    }

    // The expert with the largest load per copy that a GPU lacks.
    std::int32_t heaviest_lacking(std::int32_t gpu, const std::vector<std::int32_t>& experts,
                                  const std::vector<double>& per_copy) const {
        std::int32_t best = kNone;
        for (const std::int32_t e : experts)
            if (!holds(gpu, e) && (best < 0 || per_copy[e] > per_copy[best])) best = e;
        return best;
    }

    // --- the state ---

    void begin() {
        for (std::int32_t e = 0; e < experts_; ++e) set_share(e);
        for (std::int32_t g = 0; g < gpus_; ++g) refresh(g);
        measure();
    }

    void put(std::int32_t p, std::int32_t expert) {
        entry_[p] = expert;
        if (expert < 0) return;
        const std::size_t here = at(gpu_of_[p], expert);
        ++copies_[expert];
        if (held_[here]++ == 0 && !old_[here]) ++moves_;
    }

    void take_out(std::int32_t p) {
        const std::int32_t expert = std::exchange(entry_[p], kNone);
        if (expert < 0) return;
        const std::size_t here = at(gpu_of_[p], expert);
        --copies_[expert];
        if (--held_[here] == 0 && !old_[here]) --moves_;
    }

    void set_share(std::int32_t expert) {
        for (std::int32_t w = 0; w < W(); ++w)
            share_[expert * W() + w] = copies_[expert] > 0 ? load_[expert * W() + w] / copies_[expert] : 0.0;
    }

    void swap(std::int32_t p, std::int32_t q) {
        const std::int32_t a = entry_[p], b = entry_[q];
        take_out(p), take_out(q);
        put(p, b), put(q, a);
    }

    // Sums a GPU's load anew, so that rounding does not add up. Of one window it orders the entries by falling
    // share, so that no choice hangs on the slots: they are few and nearly in order.
    void refresh(std::int32_t g) {
        const auto entries = entry_.begin();
        if constexpr (kOneWindow)
            for (std::int32_t p = begin_[g] + 1; p < begin_[g + 1]; ++p)
                for (std::int32_t q = p; q > begin_[g] && *share(entry_[q]) > *share(entry_[q - 1]); --q)
                    std::swap(entries[q], entries[q - 1]);
        double* sum = &gpu_load_[g * W()];
        std::fill_n(sum, W(), 0.0);
        for (std::int32_t p = begin_[g]; p < begin_[g + 1]; ++p)
            for (std::int32_t w = 0; w < W(); ++w) sum[w] += weight_[p * W() + w] = share(entry_[p])[w];
    }

    // What follows from the GPUs' loads.
    void measure() {
        for (std::int32_t g = 0; g < gpus_; ++g)
            total_[g] = std::accumulate(&gpu_load_[g * W()], &gpu_load_[g * W()] + W(), 0.0);
        for (std::int32_t i = 1; i < gpus_; ++i) {  // nearly in order
            const std::int32_t g = order_[i];
            std::int32_t k = i;
            for (; k > 0 && total_[g] < total_[order_[k - 1]]; --k) order_[k] = order_[k - 1];
            order_[k] = g;
        }
        for (std::int32_t w = 0; w < W(); ++w) {
            if constexpr (kOneWindow)
                for (std::int32_t k = 0; k < std::min(kTop, gpus_); ++k) fullest_[w][k] = order_[gpus_ - 1 - k];
            else
                find_fullest(w);
            makespans_[w] = load_of(fullest_[w][0], w);
        }
        trial_ = makespans_;
        cost_ = task_.over(trial_);
    }

    void find_fullest(std::int32_t w) {
        std::array<std::int32_t, kTop>& top = fullest_[w];
        top.fill(kNone);
        for (std::int32_t g = 0; g < gpus_; ++g) {
            if (top[kTop - 1] >= 0 && load_of(g, w) <= load_of(top[kTop - 1], w)) continue;
            for (std::int32_t k = 0, mine = g; k < kTop && mine >= 0; ++k)
                if (top[k] < 0 || load_of(mine, w) > load_of(top[k], w)) std::swap(mine, top[k]);
        }
    }

    // The largest load of a window on any but up to three GPUs.
    double rest(std::int32_t w, std::int32_t g, std::int32_t h, std::int32_t i = kNone) const {
        for (const std::int32_t top : fullest_[w])
            if (top >= 0 && top != g && top != h && top != i) return load_of(top, w);
        return 0;
    }

    // --- the steps ---

    bool step() {
        for (const auto find : {&PlacementSearch::swap_of, &PlacementSearch::double_swap_of,
                                &PlacementSearch::regrant_of, &PlacementSearch::chain_of}) {
            best_ = {cost_, -kRounding * cost_ * cost_};
            for (std::int32_t w = 0; w < W(); ++w)
                if (matters(w)) (this->*find)(fullest_[w][0]);
            if (best_.at[0] < 0) continue;
            take(best_);
            return true;
        }
        return false;
    }

    // Whether a lower makespan of the window could lower the cost; and no earlier window has its fullest GPU.
    bool matters(std::int32_t w) const {
        if (task_.over.quantile >= 0 && makespans_[w] < cost_) return false;
        return std::none_of(fullest_.begin(), fullest_.begin() + w,
                            [&](const auto& top) { return top[0] == fullest_[w][0]; });
    }

    void take(const Step& step) {
        if (step.expert >= 0) {
            const std::int32_t gone = entry_[step.at[0]];
            take_out(step.at[0]);
            put(step.at[0], step.expert);
            set_share(step.expert);
            if (gone >= 0) set_share(gone);
            for (std::int32_t g = 0; g < gpus_; ++g)
                if (holds(g, step.expert) || holds(g, gone) || g == gpu_of_[step.at[0]]) refresh(g);
        } else {
            swap(step.at[0], step.at[1]);
            if (step.at[2] >= 0) swap(step.at[2], step.at[3]);
            for (const std::int32_t p : step.at)
                if (p >= 0) refresh(gpu_of_[p]);
        }
        measure();
    }

    void restore() {
        for (std::int32_t p = 0; p < entries(); ++p) take_out(p);
        for (std::int32_t p = 0; p < entries(); ++p) put(p, kept_[p]);
        begin();
    }

    // False if there are no spare copies.
    bool kick() {
        std::vector<std::int32_t> spare;
        for (int i = 0; i < kKick; ++i) {
            spare.clear();
            for (std::int32_t p = 0; p < entries(); ++p)
                if (entry_[p] < 0 || copies_[entry_[p]] > 1) spare.push_back(p);
            if (spare.empty()) return false;
            Step step;
            step.at[0] = spare[random(spare.size())], step.expert = random(experts_);
            const std::int32_t g = gpu_of_[step.at[0]];
            if (!holds(g, step.expert) && in_node(node_begin(g), step.expert)) take(step);
        }
        return true;
    }
    std::int32_t random(std::size_t below) {
        random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
        return static_cast<std::int32_t>((random_ >> 32) * below >> 32);
    }

    void consider(double cost, double squares, const Step& step) {
        if (cost < best_.cost - kRounding * cost_ || (cost <= best_.cost && squares < best_.squares)) {
            best_ = step;
            best_.cost = cost, best_.squares = squares;
        }
    }

    // What the entries of a trade differ by, in a window.
    double difference(std::int32_t p, std::int32_t q, std::int32_t w) const {
        return p < 0 ? 0.0 : weight_[p * W() + w] - weight_[q * W() + w];
    }

    // Considers that g and h trade p and q, and then, if there is an i, h and i trade r and s.
    void consider_trades(std::int32_t g, std::int32_t h, std::int32_t i, const std::array<std::int32_t, 4>& at) {
        --work_;
        double cost = 0, squares = 0;
        for (std::int32_t w = 0; w < W(); ++w) {
            const double d = difference(at[0], at[1], w), e = difference(at[2], at[3], w);
            const double a = load_of(g, w), b = load_of(h, w), c = i < 0 || i == g ? 0.0 : load_of(i, w);
            const double x = a - d + (i == g ? e : 0.0), y = b + d - e, z = i < 0 || i == g ? 0.0 : c + e;
            cost = std::max({rest_[w], x, y, z});
            if (kOneWindow && cost > best_.cost) return;
            if constexpr (!kOneWindow) trial_[w] = cost;
            squares += (x * x - a * a) + (y * y - b * b) + (z * z - c * c);
        }
        consider(kOneWindow ? cost : task_.over(trial_), squares, {.at = at});
    }

    void set_rest(std::int32_t g, std::int32_t h, std::int32_t i = kNone) {
        for (std::int32_t w = 0; w < W(); ++w) rest_[w] = rest(w, g, h, i);
    }

    // Calls visit(h) for the other GPUs of g's node, the lightest first, while it returns true.
    template <class Visit>
    void each_partner(std::int32_t g, Visit&& visit) const {
        for (const std::int32_t h : order_)
            if (h != g && node_begin(h) == node_begin(g) && !visit(h)) return;
    }

    void swap_of(std::int32_t g) {
        each_partner(g, [&](std::int32_t h) {
            set_rest(g, h);
            const double even = (load_of(g, 0) - load_of(h, 0)) / 2;
            // No trade with h, or with a fuller one, does more than even the two out.
            if (kOneWindow && best_.cost <= rest_[0] && best_.squares <= -2 * even * even) return false;
            list_trades(g, h, first_);
            const std::size_t all = first_.change.size(), best = kOneWindow ? nearest(first_.change, even) : 0;
            for (std::size_t k = best; k < (kOneWindow ? std::min(best + 1, all) : all); ++k) {
                const auto [p, q] = first_.at(k);
                consider_trades(g, h, kNone, {p, q, kNone, kNone});
            }
            return work_ > 0;
        });
    }

    // The best with the first h that helps.
    void double_swap_of(std::int32_t g) {
        each_partner(g, [&](std::int32_t h) {
            list_trades(g, h, first_);
            chain_through(g, h, g);
            return best_.at[0] < 0 && work_ > 0;
        });
    }

    // The best with the first h and i that help.
    void chain_of(std::int32_t g) {
        each_partner(g, [&](std::int32_t h) {
            list_trades(g, h, first_);
            each_partner(g, [&](std::int32_t i) {
                if (i != h) chain_through(g, h, i);
                return best_.at[0] < 0 && work_ > 0;
            });
            return best_.at[0] < 0 && work_ > 0;
        });
    }

    void list_trades(std::int32_t g, std::int32_t h, Trades& trades) {
        trades.out.clear(), trades.in.clear(), trades.weight_in.clear();
        for (std::int32_t p = begin_[g]; p < begin_[g + 1]; ++p)
            if (!holds(h, entry_[p])) trades.out.push_back(p);
        for (std::int32_t q = begin_[h]; q < begin_[h + 1]; ++q)
            if (!holds(g, entry_[q])) trades.in.push_back(q), trades.weight_in.push_back(weight_[q * W()]);
        trades.change.resize(trades.out.size() * trades.in.size());
        double* change = trades.change.data();
        for (const std::int32_t p : trades.out) {
            const double ours = weight_[p * W()];
            for (const double theirs : trades.weight_in) *change++ = ours - theirs;
        }
    }

    // Considers the trades of `first_`, of g and h, each with all of h and i; i may be g.
    void chain_through(std::int32_t g, std::int32_t h, std::int32_t i) {
        set_rest(g, h, i);
        list_trades(h, i, second_);
        for (std::size_t k = 0; k < first_.change.size(); ++k) {
            const double d = first_.change[k], mine = load_of(h, 0) + d,
                         other = load_of(i, 0) - (i == g ? d : 0.0);
            if (kOneWindow && d <= 0) continue;
            work_ -= 1 + static_cast<std::int64_t>(second_.change.size()) / kTradesAtOnce;
            const double least = mine - best_.cost, most = best_.cost - other;
            if (kOneWindow && !any_within(second_.change, least, most)) continue;
            const auto [p, q] = first_.at(k);
            for (std::size_t m = 0; m < second_.change.size(); ++m) {
                if (kOneWindow && (second_.change[m] < least || second_.change[m] > most)) continue;
                const auto [r, s] = second_.at(m);
                if (r != q && s != p && entry_[s] != entry_[p] && entry_[r] != entry_[q])
                    consider_trades(g, h, i, {p, q, r, s});
            }
        }
    }

    // The place of the first of the numbers that is the nearest to another; their count if there are none.
    static std::size_t nearest(const std::vector<double>& numbers, double to) {
        const auto off = [&](double x) { return std::bit_cast<std::int64_t>(std::abs(x - to)); };
        // As integers: of doubles the compiler makes no vectors here.
        std::int64_t least = std::numeric_limits<std::int64_t>::max();
        for (const double x : numbers) least = std::min(least, off(x));
        return std::find_if(numbers.begin(), numbers.end(), [&](double x) { return off(x) == least; }) -
               numbers.begin();
    }

    static bool any_within(const std::vector<double>& numbers, double least, double most) {
        std::uint64_t any = 0;
        for (const double x : numbers)
            any |= static_cast<std::uint64_t>(x >= least) & static_cast<std::uint64_t>(x <= most);
        return any != 0;
    }

    // A spare copy, or an empty slot, of the node makes room for one more copy of an expert that g holds;
    // or one of g's own for one that g lacks.
    void regrant_of(std::int32_t g) {
        const std::int32_t first = node_begin(g);
        for (std::int32_t p = begin_[first]; p < begin_[first + node_gpus_]; ++p) {
            const std::int32_t h = gpu_of_[p], gone = entry_[p];
            if (gone >= 0 && copies_[gone] < 2) continue;
            if (h == g) {
                for (std::int32_t e = 0; e < experts_; ++e)
                    if (!holds(g, e) && in_node(first, e)) consider_regrant(p, e);
            } else {
                for (std::int32_t q = begin_[g]; q < begin_[g + 1]; ++q)
                    if (entry_[q] >= 0 && !holds(h, entry_[q])) consider_regrant(p, entry_[q]);
            }
            if (work_ <= 0) return;
        }
    }

    bool in_node(std::int32_t first, std::int32_t expert) const {
        for (std::int32_t g = first; g < first + node_gpus_; ++g)
            if (holds(g, expert)) return true;
        return false;
    }

    void consider_regrant(std::int32_t p, std::int32_t expert) {
        const std::int32_t gone = entry_[p], here = gpu_of_[p];
        double squares = 0;
        for (std::int32_t w = 0; w < W(); ++w) {
            const double now = share(expert)[w], then = load_[expert * W() + w] / (copies_[expert] + 1);
            const double lost = share(gone)[w],
                         fewer = gone < 0 || copies_[gone] < 2 ? 0.0 : load_[gone * W() + w] / (copies_[gone] - 1);
            double makespan = 0;
            for (std::int32_t g = 0; g < gpus_; ++g) {
                const double before = load_of(g, w);
                double after = before;
                if (holds(g, expert)) after += held_[at(g, expert)] * (then - now);
                if (holds(g, gone)) after += held_[at(g, gone)] * (fewer - lost);
                if (g == here) after += then - (gone < 0 ? 0.0 : fewer);
                makespan = std::max(makespan, after);
                squares += after * after - before * before;
            }
            trial_[w] = makespan;
        }
        work_ -= node_gpus_;
        Step step;
        step.at[0] = p, step.expert = expert;
        consider(task_.over(trial_), squares, step);
    }

    static constexpr double kRounding = 1e-12;
    static constexpr std::int64_t kGroupWork = 1'000'000;
    static constexpr std::int64_t kTradesAtOnce = 64;
    static constexpr int kKick = 3;

    PlacementTask task_;
    std::int32_t windows_ = 0, experts_ = 0, gpus_ = 0, node_gpus_ = 0, moves_ = 0;
    std::vector<std::int32_t> begin_, slot_of_, gpu_of_;  // of GPUs; of entries
    std::vector<std::int32_t> entry_, copies_, order_;
    std::vector<std::uint16_t> held_, old_;                // [gpus, experts]: slots now; whether before
    std::vector<double> load_, share_;                     // [experts, windows]
    std::vector<double> weight_;                           // [entries, windows]
    std::vector<double> gpu_load_, total_;                 // [gpus, windows]; [gpus]
    std::vector<std::array<std::int32_t, kTop>> fullest_;  // of every window, the fullest first
    std::vector<double> makespans_, rest_, trial_;
    Trades first_, second_;
    double scale_ = 1, cost_ = 0;  // what loads and costs are multiplied by here; the cost so
    std::int64_t work_ = 0;
    Step best_;
    std::vector<std::int32_t> kept_;  // the best entries so far
    double kept_cost_ = std::numeric_limits<double>::infinity();
    std::uint64_t random_ = 1;
};

// `previous`, its shared copies parted.
template <bool kOneWindow>
std::vector<std::int32_t> parted(const PlacementTask& task, const PlacementSearch<kOneWindow>& search) {
    const std::size_t size = static_cast<std::size_t>(task.gpus) * task.slots_per_gpu;
    std::vector<std::int32_t> slots(task.previous, task.previous + size);
    Distinct().repair(search.mean_load(), task.gpus, task.slots_per_gpu, task.nodes, slots.data());
    return slots;
}

// Places a layer to within a fraction of `floor` or as near as the steps come: from the previous placement,
// its shared copies parted, and afresh, with GPUs named so that fewest weights move, if there is none, it
// lacks an expert or splits a group, or the steps stay above the floor from there; then the better, the first
// on a tie.
template <bool kOneWindow>
void search_placement(const PlacementTask& task, double floor, double within, std::int64_t work,
                      std::int32_t* slots) {
    const auto near = [&](double bound) { return bound * (1 + within); };
    double reached = std::numeric_limits<double>::infinity();
    if (task.previous != nullptr) {
        PlacementSearch<kOneWindow> search(task);
        search.start_from(parted(task, search).data());
        if (search.is_whole() && search.is_apart()) {
            search.improve(near(floor), work);
            search.write(slots);
            reached = search.cost();
            if (reached <= near(floor)) return;
        }
    }
    PlacementTask worst = task;
    worst.over = {1};
    PlacementSearch<kOneWindow> search(worst);
    search.start_afresh();
    if (!kOneWindow && task.over.quantile != 1) search.improve(0, work);
    search.ask(task.over);
    search.explore(near(std::max(floor, search.floor_of_nodes())), work);
    if (search.cost() >= reached) return;
    search.write(slots);
    if (task.previous != nullptr)
        reslot(task.previous, task.gpus, task.slots_per_gpu, task.experts, task.nodes, slots);
}

// The states that steps take a layer through from its previous placement, walk after walk: with shared copies
// parted; as it is, if that differs and copies may stay `shared`. From one that lacks an expert or splits a
// group there is no walk, and where there is none the one state is a placement afresh.
// `slots` gets state `reach` of these, and no more are returned; with a negative one all are.
template <bool kOneWindow>
std::vector<SearchPoint> walk_placement(const PlacementTask& task, double floor, double within, std::int64_t work,
                                        bool shared, std::int64_t reach, std::int32_t* slots) {
    std::vector<SearchPoint> states;
    const auto is_reached = [&] { return static_cast<std::int64_t>(states.size()) > reach && reach >= 0; };
    const auto walk = [&](const std::int32_t* start, bool may_share) {
        PlacementSearch<kOneWindow> search(task);
        search.start_from(start);
        if (!search.is_whole() || !(may_share || search.is_apart())) return;
        states.push_back(search.point());
        const std::int64_t steps = reach < 0 ? std::numeric_limits<std::int64_t>::max()
                                             : reach + 1 - static_cast<std::int64_t>(states.size());
        search.improve(floor * (1 + within), work, steps,
                       [&](const SearchPoint& point) { states.push_back(point); });
        if (is_reached()) search.write(slots);
    };
    const std::vector<std::int32_t> apart = parted(task, PlacementSearch<kOneWindow>(task));
    walk(apart.data(), false);
    if (!is_reached() && shared && !std::equal(apart.begin(), apart.end(), task.previous))
        walk(task.previous, true);
    if (states.empty()) {
        search_placement<kOneWindow>(task, floor, within, work, slots);
        PlacementSearch<kOneWindow> search(task);
        search.start_from(slots);
        states.push_back(search.point());
    }
    return states;
}

}  // namespace eplb
