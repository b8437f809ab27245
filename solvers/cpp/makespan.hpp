// Least makespan under any objective: search and bounds, anytime.
//
//   1. Matching gives the fewest activations A*, flow the fewest tokens N* on the fullest GPU; with
//      equal GPUs the times that need so many are bounds. Each answer, and one built by falling tokens
//      (Rebalance::start), is priced. The first that meets the bound ends it.
//   2. Rounds of attempts at targets. An attempt asks Branching whether a routing fits into the caps
//      that the target time gives each GPU. No: the bound rises to the least time beyond the caps. Yes:
//      a better routing. Unknown: what it had so far is completed and improved by Rebalance. A round
//      first raises the bound while it can, then takes the next activation step above it, then halves
//      the distance to the best routing. Every round has four times the nodes and twice the links of
//      the one before.
//
// It ends when the makespan meets the bound or the work (links tried, and kNodeWork for a node) is done.
// Deterministic: the work is counted, not timed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "branching.hpp"
#include "choices.hpp"
#include "flow.hpp"
#include "gpu_set.hpp"
#include "matching.hpp"
#include "pricing.hpp"
#include "problem.hpp"
#include "rebalance.hpp"

namespace eplb {

// Keeps its memory from problem to problem.
template <int W>
class Makespan {
  public:
    // `routed` is zero.
    Outcome solve(const Pricing& pricing, const Layer& layer, const std::int64_t* tokens, std::int64_t* routed,
                  std::int64_t max_work) {
        if (!acceptable(layer, tokens)) return Outcome::bad_tokens;
        pricing_ = &pricing, layer_ = &layer, work_ = 0;
        proved_by_ = Proof::count, certificate_ = {};
        choices_.read(layer, tokens, pricing);
        if (pricing.simple()) {
            simple_.bind(pricing);
            run(simple_, tokens, max_work);
        } else {
            any_.bind(pricing);
            run(any_, tokens, max_work);
        }
        write(tokens, routed);
        return Outcome::ok;
    }

    double bound() const { return std::min(bound_, makespan_); }
    double makespan() const { return makespan_; }
    Proof proved_by() const { return proved_by_; }
    bool in_certificate(int gpu) const { return certificate_.contains(gpu); }

  private:
    static constexpr std::int64_t kNodeWork = 200, kFirstLinks = 200;
    static constexpr double kClose = 1e-4;  // of the makespan: nearer targets are not tried

    template <class Search>
    void run(Search& search, const std::int64_t* tokens, std::int64_t max_work) {
        const std::int64_t before = search.work();
        search.seed(0x9E3779B97F4A7C15);
        best_.assign(choices_.options(), 0.0);
        bound_ = counted(tokens);
        makespan_ = kInf;

        scratch_.assign(layer_->physical_slots(), 0);
        Matching<W> matching(*layer_, scratch_.data());
        matching.solve(tokens);
        if (pricing_->uniform())
            raise(pricing_->time_of_activated(0, static_cast<double>(matching.makespan())), Proof::matching, matching);
        take_routed(search);
        if (met()) return;

        none_.assign(choices_.options(), 0.0);
        search.start(none_, bound_);
        record(search);
        if (met()) return;

        std::fill(scratch_.begin(), scratch_.end(), 0);
        Flow<W> flow(*layer_, scratch_.data());
        flow.solve(tokens);
        if (pricing_->uniform())
            raise(pricing_->time_of_tokens(0, static_cast<double>(flow.makespan())), Proof::flow, flow);
        if (pricing_->split()) take_routed(search);
        if (met()) return;

        const auto left = [&] { return max_work - work_ - (search.work() - before); };
        std::int64_t nodes = 1, links = kFirstLinks;
        for (; !met() && left() > 0; nodes *= 4, links *= 4) round(search, nodes, links, left);
    }

    bool met() const { return makespan_ <= bound_; }

    template <class Search, class Left>
    void round(Search& search, std::int64_t nodes, std::int64_t links, Left&& left) {
        double unreached = kInf;
        for (bool refuted = true; refuted && !met() && left() > 0;) {
            refuted = attempt(search, bound_, nodes, links) == Verdict::refuted;
            if (!refuted || met()) break;
            const double middle = (bound_ + std::min(unreached, makespan_)) / 2;
            if (attempt(search, middle, nodes, links) == Verdict::unknown) unreached = middle;
        }
        double missed = bound_;
        while (!met() && left() > 0 && makespan_ - missed > kClose * makespan_) {
            double target = next_activation(missed);
            if (target <= missed || target >= makespan_) target = (missed + makespan_) / 2;
            if (attempt(search, target, nodes, links) == Verdict::unknown) missed = target;
            missed = std::max(missed, bound_);
        }
    }

    template <class Search>
    Verdict attempt(Search& search, double target, std::int64_t nodes, std::int64_t links) {
        set_caps(target);
        const Verdict verdict = branching_.decide(left_, pricing_->split(), nodes);
        work_ += branching_.nodes() * kNodeWork;
        if (verdict == Verdict::refuted) {
            double least = kInf;
            for (int g = 0; g < layer_->gpus; ++g) least = std::min(least, pricing_->beyond(g, caps_[g]));
            raise(least, branching_.nodes() == 1 ? Proof::k_demand : Proof::branching);
            return verdict;
        }
        search.start(branching_.tokens(), target);
        const bool reached = search.makespan() <= target || search.lower(target, links);
        record(search);
        return reached ? Verdict::fits : Verdict::unknown;
    }

    void set_caps(double target) {
        caps_.resize(layer_->gpus), left_.resize(layer_->gpus);
        for (int g = 0; g < layer_->gpus; ++g) {
            caps_[g] = g > 0 && pricing_->uniform() ? caps_[0] : pricing_->caps(g, target);
            left_[g] = {caps_[g].activated - choices_.fixed(g).activated, caps_[g].tokens - choices_.fixed(g).tokens};
        }
    }
    double next_activation(double target) const {
        double least = kInf;
        for (int g = 0; g < (pricing_->uniform() ? 1 : layer_->gpus); ++g)
            least = std::min(least, pricing_->time_of_activated(g, pricing_->caps(g, target).activated + 1));
        return least;
    }

    // What one GPU alone has, and what all share, tokens and live experts.
    double counted(const std::int64_t* tokens) const {
        double most = 0, total = 0, live = 0;
        for (int g = 0; g < layer_->gpus; ++g) most = std::max(most, pricing_->time(g, choices_.fixed(g)));
        for (std::int32_t e = 0; e < layer_->experts; ++e) total += static_cast<double>(tokens[e]), live += tokens[e] > 0;
        if (!pricing_->uniform()) return most;
        const double filled = std::max(layer_->filled_gpus, 1);
        most = std::max(most, pricing_->time_of_activated(0, std::ceil(live / filled)));
        return std::max(most, pricing_->time_of_tokens(0, std::ceil(total / filled)));
    }

    void raise(double bound, Proof proof) {
        if (bound > bound_) bound_ = bound, proved_by_ = proof, certificate_ = {};
    }
    // The same, by a certificate; that beats the proof by counting of the same bound.
    template <class Solver>
    void raise(double bound, Proof proof, const Solver& solver) {
        if (bound < bound_ || (bound == bound_ && proved_by_ != Proof::count)) return;
        bound_ = bound, proved_by_ = proof, certificate_ = {};
        for (int g = 0; g < layer_->gpus; ++g) certificate_.insert_if(g, solver.in_certificate(g));
    }
    template <class Search>
    void take_routed(Search& search) {
        routed_.resize(choices_.options());
        for (std::int32_t o = 0; o < choices_.options(); ++o)
            routed_[o] = static_cast<double>(scratch_[choices_.option(o).slot]);
        search.start(routed_, kInf);
        record(search);
    }
    template <class Search>
    void record(const Search& search) {
        const double makespan = search.makespan();
        if (makespan >= makespan_) return;
        makespan_ = makespan;
        best_ = search.tokens();
    }

    // Writes the best routing, and prices it anew: sums that a search kept may have drifted.
    void write(const std::int64_t* tokens, std::int64_t* routed) {
        for (const SingleCopy& e : layer_->singles) routed[e.only.slot] = tokens[e.expert];
        for (std::int32_t o = 0; o < choices_.options(); ++o)
            routed[choices_.option(o).slot] = static_cast<std::int64_t>(best_[o]);
        makespan_ = 0;
        for (int g = 0; g < layer_->gpus; ++g) {
            Load load;
            for (int s = g * layer_->slots_per_gpu; s < (g + 1) * layer_->slots_per_gpu; ++s)
                load += pricing_->replica(static_cast<double>(routed[s]));
            makespan_ = std::max(makespan_, pricing_->time(g, load));
        }
    }

    const Pricing* pricing_ = nullptr;
    const Layer* layer_ = nullptr;
    Choices choices_;
    Branching branching_{choices_};
    Rebalance<SimplePrice> simple_{choices_};
    Rebalance<AnyPrice> any_{choices_};
    std::vector<Caps> caps_, left_;
    std::vector<std::int64_t> scratch_;
    std::vector<double> best_, routed_, none_;
    double bound_ = 0, makespan_ = 0;
    std::int64_t work_ = 0;
    Proof proved_by_ = Proof::none;
    GpuSet<W> certificate_;
};

}  // namespace eplb
