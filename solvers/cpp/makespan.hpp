// Least makespan under any objective: search and bounds, anytime.
//
//   1. Matching gives the fewest activations A*, flow the fewest tokens N* on the fullest GPU; with
//      equal GPUs the times that need so many are bounds. Each answer, and one built by falling tokens
//      (Rebalance::start) and improved a little, is priced. The first that meets the bound ends it.
//   2. Rounds of attempts at targets. An attempt asks Branching whether a routing fits into the caps
//      that the target time gives each GPU. No: the bound rises to the least time beyond the caps. Yes:
//      a better routing. Unknown: what it had so far is completed and improved by Rebalance. A round
//      first raises the bound while it can, then takes the next activation step above it, then halves
//      the distance to the best routing. Every round has eight times the nodes and three times the
//      links of the one before, and goes eight times as near.
//
// It ends when the makespan meets the bound or the work (links tried, and kNodeWork for a node) is done.
// A gap wider than kGap is worth more work: by its square, so that most problems stay quick and few keep
// a wide one. Deterministic: the work is counted, not timed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
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
        pricing_ = &pricing, layer_ = &layer, tokens_ = tokens, routed_ = routed, work_ = 0;
        bound_ = 0, proved_by_ = Proof::count, certificate_ = {};
        Matching<W> matching(layer, routed);
        if (const Outcome outcome = matching.solve(tokens); outcome != Outcome::ok) return outcome;
        if (pricing.uniform())
            raise(pricing.time_of_activated(0, static_cast<double>(matching.makespan())), Proof::matching,
                  matching);
        makespan_ = pricing_->slowest(routed, layer_->slots_per_gpu);
        // Flow before the greedy start where tokens are what needs most time.
        const double even = even_tokens();
        const bool by_tokens = even > bound_;
        if (!met() && by_tokens) balance();
        if (met()) return Outcome::ok;

        choices_.read(layer, tokens, pricing);
        count_fixed();
        if (pricing.mixed()) count_shared();
        if (met() || choices_.experts() == 0) return Outcome::ok;
        if (pricing.simple()) {
            simple_.bind(pricing);
            run(simple_, even, by_tokens, max_work);
        } else {
            any_.bind(pricing);
            run(any_, even, by_tokens, max_work);
        }
        if (pricing.curved())
            makespan_ = pricing_->slowest(
                routed, layer_->slots_per_gpu);  // anew: sums that a search kept may have drifted
        return Outcome::ok;
    }

    double bound() const { return std::min(bound_, makespan_); }
    double makespan() const { return makespan_; }
    Proof proved_by() const { return proved_by_; }
    bool in_certificate(int gpu) const { return certificate_.contains(gpu); }

  private:
    static constexpr std::uint64_t kSeed = 0x9E3779B97F4A7C15;
    static constexpr std::int64_t kNodeWork = 200, kStartLinks = 100, kFirstLinks = 1000;
    static constexpr double kClose = 3e-2;  // of the makespan: nearer targets are not tried in the first round
    static constexpr double kGap = 2e-2, kWide = 5;  // a gap of w kGap gets w^2 times the work, w up to kWide

    template <class Search>
    void run(Search& search, double even, bool balanced, std::int64_t max_work) {
        none_.assign(choices_.options(), 0.0);
        search.start(none_, std::max(bound_, even));
        record(search);
        if (!met() && !balanced) balance();

        const std::int64_t before = search.work();
        const auto left = [&] {
            const double wide = std::clamp((makespan_ / bound_ - 1) / kGap, 1.0, kWide);
            const double most = static_cast<double>(max_work) * wide * wide;
            return most - static_cast<double>(work_ + search.work() - before);
        };
        search.seed(kSeed);
        if (!met() && left() > 0) {
            search.lower(bound_, kStartLinks);
            record(search);
        }
        std::int64_t nodes = 1, links = kFirstLinks;
        for (double close = kClose; !met() && left() > 0; close /= 8) {
            round(search, nodes, links, close, left);
            nodes = std::min(8 * nodes, max_work), links = std::min(3 * links, max_work);
        }
    }

    // The fewest tokens on the fullest GPU: a bound, and a routing.
    void balance() {
        balanced_.assign(layer_->physical_slots(), 0);
        Flow<W> flow(*layer_, balanced_.data());
        flow.solve(tokens_);
        if (pricing_->uniform())
            raise(pricing_->time_of_tokens(0, static_cast<double>(flow.makespan())), Proof::flow, flow);
        if (!pricing_->split()) return;
        if (const double makespan = pricing_->slowest(balanced_.data(), layer_->slots_per_gpu);
            makespan < makespan_) {
            makespan_ = makespan;
            std::copy(balanced_.begin(), balanced_.end(), routed_);
        }
    }
    // Every GPU has what is fixed there. Under a curve an expert that is twice on a GPU may take less
    // time in two slots than in one.
    void count_fixed() {
        for (int g = 0; g < layer_->gpus && !pricing_->curved(); ++g)
            raise(pricing_->time(g, choices_.fixed(g)), Proof::count);
    }
    // All GPUs together: a piece's times, over the speeds, are at least what every expert needs once.
    void count_shared() {
        Load needed;
        for (std::int32_t e = 0; e < layer_->experts; ++e)
            needed += pricing_->replica(static_cast<double>(tokens_[e]));
        const auto filled = GpuSet<W>::read(layer_->filled.data());
        double gpus = 0, speed = 0;
        filled.each([&](int g) { gpus += 1, speed += 1 / pricing_->slowness(g); });
        for (const Piece& p : pricing_->pieces()) {
            const double shared =
                p.activation * needed.activated + p.tile * needed.tiles + p.token * needed.tokens;
            raise((gpus * p.offset + shared) / speed * kBelow, Proof::count);
        }
    }
    // A time that equal GPUs need, by sharing the tokens evenly.
    double even_tokens() const {
        if (!pricing_->uniform()) return 0;
        const std::int64_t total = std::accumulate(tokens_, tokens_ + layer_->experts, std::int64_t{0});
        return pricing_->time_of_tokens(0, static_cast<double>(ceil_div(total, layer_->filled_gpus)));
    }

    // GPUs to look at where equal ones need one look.
    int kinds() const { return pricing_->uniform() ? 1 : layer_->gpus; }
    bool met() const { return makespan_ <= bound_; }

    template <class Search, class Left>
    void round(Search& search, std::int64_t nodes, std::int64_t links, double close, Left&& left) {
        double unreached = kInf;
        for (bool refuted = true; refuted && !met() && left() > 0;) {
            refuted = attempt(search, bound_, nodes, links) == Verdict::refuted;
            if (!refuted || met()) break;
            const double middle = (bound_ + std::min(unreached, makespan_)) / 2;
            if (attempt(search, middle, nodes, links) == Verdict::unknown) unreached = middle;
        }
        double missed = bound_;
        while (!met() && left() > 0 && makespan_ - missed > close * makespan_) {
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
            for (int g = 0; g < kinds(); ++g) least = std::min(least, pricing_->beyond(g, caps_[g]));
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
            left_[g] = {caps_[g].activated - choices_.fixed(g).activated,
                        caps_[g].tokens - choices_.fixed(g).tokens};
        }
    }
    double next_activation(double target) const {
        double least = kInf;
        for (int g = 0; g < kinds(); ++g)
            least = std::min(least, pricing_->time_of_activated(g, pricing_->caps(g, target).activated + 1));
        return least;
    }

    void raise(double bound, Proof proof) {
        if (bound > bound_) bound_ = bound, proved_by_ = proof, certificate_ = {};
    }
    // The same, by a certificate; that beats the proof by counting of the same bound. Under a curve,
    // whose times round, it would not give the same number.
    template <class Solver>
    void raise(double bound, Proof proof, const Solver& solver) {
        if (bound < bound_ || (bound == bound_ && proved_by_ != Proof::count)) return;
        bound_ = bound, proved_by_ = proof, certificate_ = {};
        if (pricing_->curved()) return;
        for (int g = 0; g < layer_->gpus; ++g) certificate_.insert_if(g, solver.in_certificate(g));
    }
    template <class Search>
    void record(const Search& search) {
        const double makespan = search.makespan();
        if (makespan >= makespan_) return;
        makespan_ = makespan;
        for (std::int32_t o = 0; o < choices_.options(); ++o)
            routed_[choices_.option(o).slot] = static_cast<std::int64_t>(search.tokens()[o]);
    }

    const Pricing* pricing_ = nullptr;
    const Layer* layer_ = nullptr;
    Choices choices_;
    Branching branching_{choices_};
    Rebalance<SimplePrice> simple_{choices_};
    Rebalance<AnyPrice> any_{choices_};
    const std::int64_t* tokens_ = nullptr;
    std::int64_t* routed_ = nullptr;  // the best routing so far
    std::vector<Caps> caps_, left_;
    std::vector<std::int64_t> balanced_;
    std::vector<double> none_;
    double bound_ = 0, makespan_ = 0;
    std::int64_t work_ = 0;
    Proof proved_by_ = Proof::none;
    GpuSet<W> certificate_;
};

}  // namespace eplb
