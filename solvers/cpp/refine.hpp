// A routing made better by simulated annealing: for where no activation is to spare and tokens must
// balance, so that chains of moves that gain (see Rebalance) come to an end early.
//
// What is annealed is the overflow, summed over the GPUs: the tokens above the cap of a target just
// below the best makespan so far, or, if more, the activated replicas above theirs, each of which
// counts as a tenth of the cap's tokens, however little time it takes beyond the target. A step is a chain of
// random links, each of which moves an expert's tokens, or a part of them, off a GPU to another of its options;
// the chain goes on from the GPU that was given to until it leaves no more overflow than the temperature allows,
// and is undone after five links. The temperature falls to zero over the work. Deterministic for a number and a
// count of work, in links.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "choices.hpp"
#include "pricing.hpp"
#include "xorshift.hpp"

namespace eplb {

// Of an objective that is `simple` and not `mixed`.
class Refinement {
  public:
    Refinement(const Choices& choices, const Pricing& pricing, std::uint64_t number)
        : choices_(choices),
          pricing_(pricing),
          heat_(kHeat / static_cast<double>(1 << number % kHeats)),
          random_(Xorshift::kSeed * (2 * number + 1)) {}  // odd, so not 0

    // Starts from tokens by option that serve all, and ends with others that are not slower.
    void improve(std::vector<double>& tokens, std::int64_t max_work) {
        start(tokens);
        std::int64_t work = 0;
        while (work < max_work && anneal(makespan() * kLess, max_work - work, work)) tokens = tokens_;
    }

  private:
    struct Gpu {
        double activated, tokens, over;
    };
    struct Link {
        std::int32_t from, to;
        double tokens;
    };
    static constexpr double kLess = 1 - 1e-9;
    // Of the cap's tokens: a replica too many, and what a chain may add at first, about. Half of that
    // for the next number, and so on, as some problems want more and some less.
    static constexpr double kReplica = 0.1, kHeat = 2e-2;
    static constexpr int kHeats = 4, kMostLinks = 5, kTries = 8;

    void start(const std::vector<double>& tokens) {
        tokens_ = tokens;
        gpus_.resize(choices_.gpus());
        for (int g = 0; g < choices_.gpus(); ++g) {
            gpus_[g] = {choices_.fixed(g).activated, choices_.fixed(g).tokens, 0};
            for (const std::int32_t o : choices_.on(g)) change(gpus_[g], 0, tokens_[o]);
        }
    }
    static void change(Gpu& gpu, double before, double after) {
        gpu.activated += (after > 0 ? 1.0 : 0.0) - (before > 0 ? 1.0 : 0.0);
        gpu.tokens += after - before;
    }
    void aim(double target) {
        caps_ = pricing_.caps(0, target), replica_ = kReplica * std::max(1.0, caps_.tokens);
        for (Gpu& gpu : gpus_) settle(gpu);
    }
    void settle(Gpu& gpu) const {
        gpu.over = std::max({0.0, gpu.tokens - caps_.tokens, replica_ * (gpu.activated - caps_.activated)});
    }
    double makespan() const {
        double most = 0;
        for (const Gpu& gpu : gpus_) most = std::max(most, pricing_.time(0, {gpu.activated, 0, gpu.tokens, 0}));
        return most;
    }
    bool met() const {
        return std::all_of(gpus_.begin(), gpus_.end(), [](const Gpu& gpu) { return gpu.over == 0; });
    }
    // Whether the target is met.
    bool anneal(double target, std::int64_t links, std::int64_t& work) {
        aim(target);
        const double heat = heat_ * caps_.tokens / static_cast<double>(links);
        for (const std::int64_t end = work + links; work < end;)
            if (chain(heat * static_cast<double>(end - work) * exponential(), work) && met()) return true;
        return false;
    }
    // False and undone if every link leaves more overflow added than allowed.
    bool chain(double allowed, std::int64_t& work) {
        std::array<Link, kMostLinks> made;
        double added = 0;
        int gpu = some_gpu(), links = 0;
        while (links < kMostLinks) {
            ++work;
            const Link link = some_link(gpu);
            if (link.tokens == 0) break;
            const int to = choices_.option(link.to).gpu;
            added -= gpus_[gpu].over + gpus_[to].over;
            give(link.from, -link.tokens), give(link.to, link.tokens);
            added += gpus_[gpu].over + gpus_[to].over;
            if (added <= allowed) return true;
            made[links++] = link, gpu = to;
        }
        while (links-- > 0) give(made[links].to, -made[links].tokens), give(made[links].from, made[links].tokens);
        return false;
    }
    // An overfull one mostly; between others links cost nothing and open ways.
    int some_gpu() {
        int g = random(choices_.gpus());
        for (int i = 1; i < kTries && gpus_[g].over == 0; ++i) g = random(choices_.gpus());
        return g;
    }
    // Tokens of an expert on a GPU to another of its options; none if none are there.
    Link some_link(int gpu) {
        const auto on = choices_.on(gpu);
        if (on.empty()) return {};
        std::size_t i = random(static_cast<std::uint32_t>(on.size()));
        for (std::size_t seen = 1; tokens_[on[i]] == 0 && seen < on.size(); ++seen) i = (i + 1) % on.size();
        const std::int32_t from = on[i], first = choices_.first(choices_.option(from).expert);
        const std::int32_t last = choices_.first(choices_.option(from).expert + 1);
        std::int32_t to = first + static_cast<std::int32_t>(random(last - first - 1));
        to += to >= from;
        const double x = tokens_[from];
        if (!pricing_.split() || x == 0 || random(4) == 0) return {from, to, x};
        // A part goes where it fits or where tokens of the expert are already.
        const Gpu &here = gpus_[gpu], &there = gpus_[choices_.option(to).gpu];
        const bool full = tokens_[to] == 0 && there.activated >= caps_.activated;
        const double fits = full ? 0 : std::clamp(caps_.tokens - there.tokens, 0.0, x);
        const bool all = here.activated > caps_.activated;
        const double part = all ? x : std::clamp(here.tokens - caps_.tokens, 0.0, x);
        if (part > 0 && (fits > 0 || tokens_[to] > 0) && random(3) > 0) return {from, to, part};
        return {from, to, fits > 0 ? fits : x};
    }
    void give(std::int32_t o, double amount) {
        Gpu& gpu = gpus_[choices_.option(o).gpu];
        change(gpu, tokens_[o], tokens_[o] + amount);
        tokens_[o] += amount;
        settle(gpu);
    }

    int random(std::uint32_t limit) { return static_cast<int>(random_.below(limit)); }
    // Of mean 3/2, and the same on every machine: between k and k + 1 with chance 2^-(k + 1).
    double exponential() {
        const int halvings = std::countr_zero(static_cast<std::uint32_t>(random(1u << 31)) | 1u << 30);
        return halvings + random(1u << 20) * 0x1p-20;
    }

    const Choices& choices_;
    const Pricing& pricing_;
    double heat_;
    Xorshift random_;
    Caps caps_{};
    double replica_ = 0;
    std::vector<double> tokens_;
    std::vector<Gpu> gpus_;
};

// `routed` serves the tokens, and still does if nothing better is found. Another number draws other links.
inline void refine(const Pricing& pricing, const Layer& layer, const std::int64_t* tokens, std::int64_t* routed,
                   std::uint64_t number, std::int64_t max_work) {
    Choices choices;
    choices.fix(layer, tokens, pricing);
    choices.read(layer, tokens);
    if (choices.experts() == 0) return;
    std::vector<double> served;
    choices.read_routed(routed, served);
    Refinement(choices, pricing, number).improve(served, max_work);
    choices.write(served, routed);
}

}  // namespace eplb
