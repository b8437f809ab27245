// Least makespan under any objective: search and bounds, anytime.
//
//   1. Matching gives the fewest activations A*, flow the fewest tokens N* on the fullest GPU; with equal GPUs the
//      times that need so many are bounds, and each routing is an answer. The first that meets the bound ends it,
//      so flow comes first where evenly spread tokens would take more time than evenly spread activations. Where
//      they would take well less than A* does, flow has little to say: the matching's routing is improved first.
//   2. Attempts at targets. An attempt asks Branching whether a routing fits into the caps that the target time
//      gives each GPU. No: the bound rises to the least time beyond the caps. Yes: a better routing. Unknown: what
//      it had so far is completed and improved by Rebalance, and where all GPUs are equal also routed at its least
//      level of tokens. The first target is an activation step above the bound: soon reached, and few gaps stay
//      wide.
//   3. Rounds. A round tries the bound, then halves the distance between bound and makespan until a target stays
//      unknown, but for one try just below the makespan, which may be the least already; above what stays unknown
//      it takes the next activation step, then halves the distance to the makespan. Every round has eight times
//      the nodes and three times the links of the one before, and goes eight times as near.
//
// It ends when the makespan meets the bound or the work is done: links tried, what Branching counts, and a base by
// the size, all in what a link takes, some 35 ns. What is wide open after kFirstWork, by kWide, or by kNarrow and
// an activated replica's time, gets kMoreWork times the work, up to kMuchWork: most problems stay quick and few
// keep a wide gap. Deterministic: the work is counted, not timed. More work does the same, but for the last
// attempt of less, which is cut short: as a rule it ends no worse.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
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
        bound_ = 0, makespan_ = kInf, proved_by_ = Proof::count, certificate_ = {};
        if (!acceptable(layer, tokens)) return Outcome::bad_tokens;
        const auto [activated, evenly] = even_times();
        const bool heavy = pricing.simple() && pricing.split() && evenly > activated;
        heavy ? balance() : match();
        const bool light = !heavy && pricing.simple() && evenly < kLight * bound_;
        if (!met() && !light) heavy ? match() : balance();
        if (met()) return Outcome::ok;

        if (!pricing.counted()) choices_.fix(layer, tokens, pricing);
        count_fixed();
        if (pricing.mixed()) count_shared();
        if (met()) return Outcome::ok;
        choices_.read(layer, tokens);
        if (choices_.experts() == 0) return Outcome::ok;
        if (pricing.simple()) {
            simple_.bind(pricing);
            run(simple_, max_work, light);
        } else {
            any_.bind(pricing);
            run(any_, max_work, false);
        }
        // Anew: sums that a search kept may have drifted.
        if (pricing.curved()) makespan_ = pricing.slowest(routed, layer.slots_per_gpu);
        return Outcome::ok;
    }

    double bound() const { return std::min(bound_, makespan_); }
    double makespan() const { return makespan_; }
    Proof proved_by() const { return proved_by_; }
    bool in_certificate(int gpu) const { return certificate_.contains(gpu); }

  private:
    static constexpr std::int64_t kGpuWork = 11, kExpertWork = 3, kNodeWork = 3;  // the last for an option
    static constexpr std::int64_t kFirstWork = 1950, kMoreWork = 60, kMuchWork = 120'000;
    static constexpr std::int64_t kStartLinks = 150, kFirstLinks = 1300;
    static constexpr double kLight = 0.9;                 // of the bound by matching
    static constexpr double kNarrow = 0.02, kWide = 0.1;  // of the bound
    static constexpr double kClose = 4e-2;  // of the makespan: nearer targets are not tried in the first round
    static constexpr int kSure = 2;         // targets decided before the one just below the makespan

    template <class Search>
    void run(Search& search, std::int64_t max_work, bool light) {
        work_ = kGpuWork * layer_->filled_gpus + kExpertWork * choices_.experts();
        const std::int64_t before = search.work();
        std::int64_t most = std::min(max_work, kFirstWork);
        const auto left = [&] {
            const std::int64_t done = work_ + search.work() - before;
            if (most == kFirstWork && done + node_work() >= most)
                most = std::max(max_work, wide() ? std::min(kMoreWork * max_work, kMuchWork) : 0);
            return most - done;
        };
        search.seed();
        if (light) {
            search.start(choices_.read_routed(routed_, start_), bound_);
            record(search);
            if (!met() && left() > node_work()) {
                search.lower(bound_, kStartLinks);
                record(search);
            }
            if (met()) return;
            balance();
        }
        branching_.read();
        if (const double next = next_activation(bound_); !met() && left() > node_work() && makespan_ > next)
            attempt(search, next, 1, kFirstLinks, left);
        std::int64_t nodes = 1, links = kFirstLinks;
        for (double close = kClose; !met() && left() > node_work(); close /= 8) {
            round(search, nodes, links, close, left);
            if (nodes < kMuchWork) nodes *= 8, links *= 3;
        }
    }

    // What a node of the branching takes at least, once it routes.
    std::int64_t node_work() const { return kNodeWork * choices_.options(); }

    // The fewest activations on the fullest GPU: a bound, and a routing.
    void match() {
        std::int64_t* const routed = room();
        Matching<W> matching(*layer_, routed);
        matching.solve(tokens_);
        if (pricing_->counted()) choices_.fix(matching, layer_->gpus);
        if (pricing_->uniform())
            raise(pricing_->time_of_activated(0, static_cast<double>(matching.makespan())), Proof::matching,
                  matching);
        take(routed, pricing_->counted() ? pricing_->slowest([&](int g) { return load_of(matching.fill(g)); })
                                         : pricing_->slowest(routed, layer_->slots_per_gpu));
    }
    // The fewest tokens, the same.
    void balance() {
        std::int64_t* const routed = room();
        Flow<W> flow(*layer_, routed);
        flow.solve(tokens_);
        if (pricing_->uniform())
            raise(pricing_->time_of_tokens(0, static_cast<double>(flow.makespan())), Proof::flow, flow);
        if (pricing_->split()) take(routed, pricing_->slowest(routed, layer_->slots_per_gpu));
    }
    // Zeros to route into: the answer itself where there is none yet.
    std::int64_t* room() {
        if (makespan_ == kInf) return routed_;
        other_.assign(layer_->physical_slots(), 0);
        return other_.data();
    }
    void take(const std::int64_t* routed, double makespan) {
        if (makespan >= makespan_) return;
        makespan_ = makespan;
        if (routed != routed_) std::copy_n(routed, layer_->physical_slots(), routed_);
    }
    // Every GPU has what is fixed there. Under a curve an expert that is twice on a GPU may take less
    // time in two slots than in one.
    void count_fixed() {
        if (!pricing_->curved())
            raise(pricing_->slowest([this](int g) { return choices_.fixed(g); }), Proof::count);
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
    // Of a GPU, were live experts and tokens spread evenly.
    std::pair<double, double> even_times() const {
        std::uint64_t live = 0;
        std::int64_t tokens = 0;
        for (std::int32_t e = 0; e < layer_->experts; ++e) live += sign_of(-tokens_[e]), tokens += tokens_[e];
        const auto each = [this](std::int64_t count) {
            return static_cast<double>(ceil_div(count, layer_->filled_gpus));
        };
        return {pricing_->time_of_activated(0, each(static_cast<std::int64_t>(live))),
                pricing_->time_of_tokens(0, each(tokens))};
    }
    // At least, of a GPU with so many activations and tokens.
    double time_of(const Caps& caps) const {
        return std::max(pricing_->time_of_activated(0, caps.activated), pricing_->time_of_tokens(0, caps.tokens));
    }
    // GPUs to look at where equal ones need one look.
    int kinds() const { return pricing_->uniform() ? 1 : layer_->gpus; }
    bool met() const { return makespan_ <= bound_; }
    bool wide() const {
        const double gap = makespan_ - bound_;
        return gap > kWide * bound_ || (gap > kNarrow * bound_ && gap >= kBelow * pricing_->step());
    }

    template <class Search, class Left>
    void round(Search& search, std::int64_t nodes, std::int64_t links, double close, Left&& left) {
        double target = bound_, missed = bound_;
        for (int decided = 1; !met() && left() > node_work(); ++decided) {
            if (attempt(search, target, nodes, links, left) == Verdict::unknown) {
                missed = std::max(bound_, target);
                break;
            }
            if (makespan_ - bound_ <= close * makespan_) break;
            target = decided == kSure ? makespan_ * kBelow : (bound_ + makespan_) / 2;
        }
        while (!met() && left() > node_work() && makespan_ - missed > close * makespan_) {
            target = next_activation(missed);
            if (target <= missed || target >= makespan_) target = (missed + makespan_) / 2;
            if (attempt(search, target, nodes, links, left) == Verdict::unknown) missed = target;
            missed = std::max(missed, bound_);
        }
    }

    template <class Search, class Left>
    Verdict attempt(Search& search, double target, std::int64_t nodes, std::int64_t links, Left&& left) {
        set_caps(target);
        const bool equal = pricing_->uniform() && caps_[0].tokens < Pricing::kMostTokens;
        const Verdict verdict =
            branching_.decide(left_, pricing_->split(), std::clamp<std::int64_t>(left() / node_work(), 1, nodes),
                              equal ? caps_[0].tokens - pricing_->caps(0, bound_).tokens : branching_.kUnequal);
        work_ += branching_.work();
        if (verdict == Verdict::refuted) {
            double least = kInf;
            for (int g = 0; g < kinds(); ++g) least = std::min(least, pricing_->beyond(g, caps_[g]));
            raise(least, branching_.nodes() == 1 ? Proof::k_demand : Proof::branching);
            return verdict;
        }
        if (verdict == Verdict::unknown && branching_.level() < kInf &&
            time_of({caps_[0].activated, caps_[0].tokens + branching_.level()}) < makespan_) {
            search.start(branching_.leveled(), target);
            record(search);
            if (met()) return Verdict::fits;
        }
        search.start(branching_.tokens(), target);
        const bool reached = search.makespan() <= target || search.lower(target, std::min(links, left()));
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
        if (!pricing_->curved()) certificate_ = solver.certificate();
    }
    template <class Search>
    void record(const Search& search) {
        const double makespan = search.makespan();
        if (makespan >= makespan_) return;
        makespan_ = makespan;
        choices_.write(search.tokens(), routed_);
    }

    const Pricing* pricing_ = nullptr;
    const Layer* layer_ = nullptr;
    Choices choices_;
    Branching<W> branching_{choices_};
    Rebalance<SimplePrice> simple_{choices_};
    Rebalance<AnyPrice> any_{choices_};
    const std::int64_t* tokens_ = nullptr;
    std::int64_t* routed_ = nullptr;  // the best routing so far
    std::vector<Caps> caps_, left_;
    std::vector<std::int64_t> other_;
    std::vector<double> start_;
    double bound_ = 0, makespan_ = 0;
    std::int64_t work_ = 0;
    Proof proved_by_ = Proof::none;
    GpuSet<W> certificate_;
};

}  // namespace eplb
