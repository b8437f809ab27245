// The compiled core by itself, on random problems of every word width, against the plainest code that
// gives the same answers. One file without a framework, to be built with any sanitizer:
//   g++ -std=c++20 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Isolvers/cpp
//   tests/cpp/core_test.cpp -pthread -o core_test

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>
#include <numeric>
#include <optional>
#include <random>
#include <source_location>
#include <span>
#include <utility>
#include <vector>

#include "ascend_default.hpp"
#include "assign.hpp"
#include "assignment.hpp"
#include "branching.hpp"
#include "choices.hpp"
#include "completion.hpp"
#include "deepseek.hpp"
#include "distinct.hpp"
#include "flashlb.hpp"
#include "flow.hpp"
#include "gpu_set.hpp"
#include "makespan.hpp"
#include "matching.hpp"
#include "metro.hpp"
#include "packing.hpp"
#include "parallel.hpp"
#include "pattern_search.hpp"
#include "placement.hpp"
#include "placement_search.hpp"
#include "pricing.hpp"
#include "problem.hpp"
#include "refine.hpp"
#include "routing_aware.hpp"
#include "shares.hpp"
#include "swift.hpp"
#include "tournament.hpp"
#include "transfer.hpp"
#include "trtllm.hpp"

// Counts what is allocated: the solvers must not.
std::atomic<std::int64_t> allocations{0};

void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
    ++allocations;
    return std::malloc(size);
}
void* operator new(std::size_t size) {
    if (void* memory = operator new(size, std::nothrow)) return memory;
    throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

using namespace eplb;
using Counts = std::vector<std::int64_t>;
using Ids = std::vector<std::int32_t>;
using Gpus = std::vector<bool>;

constexpr std::int64_t kMostTokens = (std::int64_t{1} << kTokenBits) - 1;

std::int64_t checks = 0, failures = 0;

void check(bool condition, const char* what, const std::source_location where = std::source_location::current()) {
    ++checks;
    if (condition) return;
    if (++failures <= 20) std::printf("FAILED, line %u: %s\n", static_cast<unsigned>(where.line()), what);
}

// Draws that are the same with every standard library, which its distributions are not.
class Random {
  public:
    explicit Random(std::uint64_t seed) : engine_(seed) {}
    std::int64_t below(std::int64_t n) {
        return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(n));
    }
    std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
    bool chance(int percent) { return below(100) < percent; }
    template <class T>
    void shuffle(std::vector<T>& values) {
        for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(i)]);
    }

  private:
    std::mt19937_64 engine_;
};

// One layer's problem in its plainest form.
struct Problem {
    std::int32_t gpus, slots_per_gpu, experts;
    Ids slots;      // [gpus * slots_per_gpu]
    Counts tokens;  // [experts], servable

    Placement placement() const { return Placement(slots, 1, gpus, slots_per_gpu, experts); }
    std::int32_t gpu_of(std::size_t slot) const { return static_cast<std::int32_t>(slot) / slots_per_gpu; }
    // The lowest slot of the expert on each GPU that holds it, by GPU.
    std::vector<Candidate> candidates(std::int32_t expert) const {
        std::vector<Candidate> found;
        for (std::size_t s = 0; s < slots.size(); ++s)
            if (slots[s] == expert && (found.empty() || found.back().gpu != gpu_of(s)))
                found.push_back({gpu_of(s), static_cast<std::int32_t>(s)});
        return found;
    }
    Gpus filled() const {
        Gpus any(gpus, false);
        for (std::size_t s = 0; s < slots.size(); ++s)
            if (slots[s] >= 0) any[gpu_of(s)] = true;
        return any;
    }
};

// Slots at random: every expert once where there is room, then copies and empty slots; sometimes a GPU
// dies and takes experts with it.
Problem draw_problem(Random& random, std::int32_t gpus, std::int32_t slots_per_gpu, std::int32_t experts) {
    Problem p{gpus, slots_per_gpu, experts, Ids(gpus * slots_per_gpu, -1), Counts(experts, 0)};
    const auto empty = static_cast<int>(random.between(0, 2) * 30);
    for (std::size_t s = 0; s < p.slots.size(); ++s)
        p.slots[s] = static_cast<std::int64_t>(s) < experts ? static_cast<std::int32_t>(s)
                     : random.chance(empty)                 ? -1
                                                            : static_cast<std::int32_t>(random.below(experts));
    random.shuffle(p.slots);
    if (random.chance(20)) std::fill_n(p.slots.begin() + random.below(gpus) * slots_per_gpu, slots_per_gpu, -1);

    const auto live = static_cast<int>(random.between(0, 4) * 25);
    const std::int64_t kinds[] = {1, 8, 1000, std::int64_t{1} << 32, kMostTokens};
    const std::int64_t most = kinds[random.below(5)];
    for (const std::int32_t e : p.slots)
        if (e >= 0 && p.tokens[e] == 0 && random.chance(live)) p.tokens[e] = random.between(1, most);
    return p;
}

// GPUs in a line, each sharing an expert or two with the next and holding up to two of its own: greedy
// choices go wrong, and only long paths put them right.
Problem draw_line(Random& random, std::int32_t gpus) {
    std::vector<Ids> held(gpus);
    std::int32_t experts = 0;
    for (std::int32_t g = 0; g < gpus; ++g) {
        for (std::int64_t i = random.between(0, 2); i > 0; --i) held[g].push_back(experts++);
        for (std::int64_t i = g + 1 < gpus ? random.between(1, 2) : 0; i > 0; --i) {
            held[g].push_back(experts);
            held[g + 1].push_back(experts++);
        }
    }
    Ids names(experts);
    std::iota(names.begin(), names.end(), 0);
    random.shuffle(names);
    Problem p{gpus, 6, experts, Ids(gpus * 6, -1), Counts(experts)};
    for (std::int32_t g = 0; g < gpus; ++g)
        for (std::size_t i = 0; i < held[g].size(); ++i) p.slots[g * 6 + i] = names[held[g][i]];
    for (std::int64_t& t : p.tokens) t = random.chance(85) ? random.between(1, 9) : 0;
    return p;
}

// What a GPU set proves by counting: no code in common with the solvers.
std::int64_t proven(const Problem& p, const Gpus& members, bool activations) {
    const Gpus filled = p.filled();
    std::int64_t size = 0, count = 0;
    for (std::int32_t g = 0; g < p.gpus; ++g) size += members[g] && filled[g];
    for (std::int32_t e = 0; e < p.experts; ++e) {
        bool confined = p.tokens[e] > 0;
        for (const Candidate c : p.candidates(e)) confined = confined && members[c.gpu];
        if (confined) count += activations ? 1 : p.tokens[e];
    }
    return size == 0 ? 0 : (count + size - 1) / size;
}

// The optimum as the largest proof over all GPU sets (max-flow = min-cut); for few GPUs.
std::int64_t optimum(const Problem& p, bool activations) {
    std::int64_t best = 0;
    Gpus members(p.gpus);
    for (unsigned set = 1; set < 1U << p.gpus; ++set) {
        for (std::int32_t g = 0; g < p.gpus; ++g) members[g] = set >> g & 1;
        best = std::max(best, proven(p, members, activations));
    }
    return best;
}

// The smallest sorted vector of activations over all choices; for few experts.
void best_vector(const Problem& p, std::int32_t expert, Counts& activated, Counts& best) {
    if (expert == p.experts) {
        Counts sorted = activated;
        std::sort(sorted.rbegin(), sorted.rend());
        if (best.empty() || sorted < best) best = sorted;
        return;
    }
    if (p.tokens[expert] == 0) return best_vector(p, expert + 1, activated, best);
    for (const Candidate c : p.candidates(expert)) {
        ++activated[c.gpu];
        best_vector(p, expert + 1, activated, best);
        --activated[c.gpu];
    }
}

// Every token is served once, by a slot that holds its expert.
void check_served(const Problem& p, const Counts& routed) {
    Counts served(p.experts, 0);
    bool positive = true, filled = true;
    for (std::size_t s = 0; s < routed.size(); ++s) {
        positive = positive && routed[s] >= 0;
        filled = filled && (p.slots[s] >= 0 || routed[s] == 0);
        if (p.slots[s] >= 0) served[p.slots[s]] += routed[s];
    }
    check(positive, "no share is negative");
    check(filled, "empty slots take no tokens");
    check(served == p.tokens, "every expert's tokens are served once");
}

Counts activated_of(const Problem& p, const Counts& routed) {
    Counts activated(p.gpus, 0);
    for (std::size_t s = 0; s < routed.size(); ++s) activated[p.gpu_of(s)] += routed[s] != 0;
    return activated;
}

Counts load_of(const Problem& p, const Counts& routed) {
    Counts load(p.gpus, 0);
    for (std::size_t s = 0; s < routed.size(); ++s) load[p.gpu_of(s)] += routed[s];
    return load;
}

std::int64_t largest(const Counts& values) { return *std::max_element(values.begin(), values.end()); }

template <class Solver>
Gpus certificate_of(const Problem& p, const Solver& solver) {
    Gpus members(p.gpus);
    for (std::int32_t g = 0; g < p.gpus; ++g) members[g] = solver.in_certificate(g);
    return members;
}

template <int W>
Counts check_matching(const Problem& p, bool lexicographic) {
    const Placement placement = p.placement();
    Counts routed(p.slots.size(), 0);
    const std::int64_t before = allocations;
    Matching<W> matching(placement.layer(0), routed.data());
    check(matching.solve(p.tokens.data(), lexicographic) == Outcome::ok, "matching solves");
    check(allocations == before, "matching allocates nothing");
    check_served(p, routed);
    const Counts activated = activated_of(p, routed);
    for (std::int32_t g = 0; g < p.gpus; ++g)
        check(matching.activated(g) == activated[g], "matching counts what it activates");
    check(matching.makespan() == largest(activated), "matching's makespan is the fullest GPU's");
    check(matching.makespan() == proven(p, certificate_of(p, matching), true), "matching proves its makespan");
    return routed;
}

template <int W>
Counts check_flow(const Problem& p) {
    const Placement placement = p.placement();
    Counts routed(p.slots.size(), 0);
    const std::int64_t before = allocations;
    Flow<W> flow(placement.layer(0), routed.data());
    check(flow.solve(p.tokens.data()) == Outcome::ok, "flow solves");
    check(allocations == before, "flow allocates nothing");
    check_served(p, routed);
    check(flow.makespan() == largest(load_of(p, routed)), "flow's makespan is the fullest GPU's");
    check(flow.makespan() == proven(p, certificate_of(p, flow), false), "flow proves its makespan");
    return routed;
}

template <int W>
Counts check_metro(const Problem& p, const Ids& order) {
    const Placement placement = p.placement();
    Counts routed(p.slots.size(), 0);
    const std::int64_t before = allocations;
    Metro<W> metro(placement.layer(0), routed.data());
    check(metro.solve(p.tokens.data(), order.empty() ? nullptr : order.data()) == Outcome::ok, "metro solves");
    check(allocations == before, "metro allocates nothing");
    check_served(p, routed);

    Counts activated(p.gpus, 0), expected(p.slots.size(), 0);
    for (std::int32_t i = 0; i < p.experts; ++i) {
        const std::int32_t e = order.empty() ? i : order[i];
        if (p.tokens[e] == 0) continue;
        const std::vector<Candidate> candidates = p.candidates(e);
        const Candidate least =
            *std::min_element(candidates.begin(), candidates.end(), [&](Candidate a, Candidate b) {
                return std::pair(activated[a.gpu], a.gpu) < std::pair(activated[b.gpu], b.gpu);
            });
        ++activated[least.gpu];
        expected[least.slot] = p.tokens[e];
    }
    check(routed == expected, "metro follows its rule");
    for (std::int32_t g = 0; g < p.gpus; ++g)
        check(metro.activated(g) == activated[g], "metro counts what it activates");
    return routed;
}

template <int W>
void check_routers(const Problem& p, Random& random) {
    const Counts plain = check_matching<W>(p, false), lexicographic = check_matching<W>(p, true);
    Counts sorted = activated_of(p, plain), best = activated_of(p, lexicographic);
    std::sort(sorted.rbegin(), sorted.rend());
    std::sort(best.rbegin(), best.rend());
    check(best <= sorted && best[0] == sorted[0], "lexicographic keeps the makespan and improves the rest");
    check_flow<W>(p);
    Ids order(p.experts);
    std::iota(order.begin(), order.end(), 0);
    check_metro<W>(p, {});
    random.shuffle(order);
    check_metro<W>(p, order);
}

Problem draw_sized(Random& random, std::int32_t least_gpus, std::int32_t most_gpus, std::int32_t most_slots,
                   std::int32_t most_experts) {
    const auto gpus = static_cast<std::int32_t>(random.between(least_gpus, most_gpus));
    const auto slots = static_cast<std::int32_t>(random.between(1, most_slots));
    const auto experts = static_cast<std::int32_t>(random.between(1, std::min(gpus * slots, most_experts)));
    return draw_problem(random, gpus, slots, experts);
}

void test_word_widths(Random& random) {
    for (int i = 0; i < 1500; ++i) check_routers<1>(draw_sized(random, 1, 64, 8, 300), random);
    for (int i = 0; i < 150; ++i) check_routers<2>(draw_sized(random, 65, 128, 6, 400), random);
    for (int i = 0; i < 60; ++i) check_routers<4>(draw_sized(random, 129, 256, 4, 600), random);
    for (int i = 0; i < 20; ++i) check_routers<8>(draw_sized(random, 257, 512, 4, 1000), random);
    for (int i = 0; i < 8; ++i) check_routers<16>(draw_sized(random, 513, 1024, 4, 2048), random);
    for (int i = 0; i < 100; ++i)
        check_routers<1>(draw_line(random, static_cast<std::int32_t>(random.between(2, 64))), random);
    for (int i = 0; i < 10; ++i) {
        check_routers<2>(draw_line(random, 120), random);
        check_routers<4>(draw_line(random, 250), random);
        check_routers<8>(draw_line(random, 300), random);
    }
    check_routers<16>(draw_line(random, 700), random);
    check_routers<1>(draw_problem(random, 64, 4, 100), random);
    check_routers<2>(draw_problem(random, 128, 4, 100), random);
    check_routers<16>(draw_problem(random, 1024, 3, 2048), random);
}

// Dead GPUs behind the others need wider sets and may change nothing.
template <int W>
void check_with_dead_gpus(const Problem& p, const Counts& matching, const Counts& flow) {
    Problem wide = p;
    wide.gpus = 64 * W;
    wide.slots.resize(wide.gpus * p.slots_per_gpu, -1);
    Counts wide_matching = check_matching<W>(wide, true), wide_flow = check_flow<W>(wide);
    wide_matching.resize(p.slots.size());
    wide_flow.resize(p.slots.size());
    check(wide_matching == matching, "matching answers the same at every width");
    check(wide_flow == flow, "flow answers the same at every width");
}

void test_width_does_not_matter(Random& random) {
    for (int i = 0; i < 150; ++i) {
        const Problem p = draw_sized(random, 1, 20, 5, 60);
        const Counts matching = check_matching<1>(p, true), flow = check_flow<1>(p);
        check_with_dead_gpus<2>(p, matching, flow);
        check_with_dead_gpus<4>(p, matching, flow);
        check_with_dead_gpus<8>(p, matching, flow);
        check_with_dead_gpus<16>(p, matching, flow);
    }
}

void test_brute_force(Random& random) {
    for (int i = 0; i < 600; ++i) {
        const Problem p = draw_sized(random, 1, 7, 4, 18);
        check(largest(activated_of(p, check_matching<1>(p, false))) == optimum(p, true),
              "matching reaches the largest proof");
        check(largest(load_of(p, check_flow<1>(p))) == optimum(p, false), "flow reaches the largest proof");
    }
    for (int i = 0; i < 1200; ++i) {
        const Problem p = i % 2 ? draw_sized(random, 1, 4, 4, 7)
                                : draw_line(random, static_cast<std::int32_t>(random.between(2, 6)));
        Counts activated(p.gpus, 0), best, sorted = activated_of(p, check_matching<1>(p, true));
        best_vector(p, 0, activated, best);
        std::sort(sorted.rbegin(), sorted.rend());
        check(sorted == best, "lexicographic reaches the smallest vector");
    }
}

// A line of GPUs, each sharing an expert with the next, on which the greedy start leaves three on the
// first GPU and one on the last: only the path over all of them helps.
template <int W>
void check_longest_path(std::int32_t gpus) {
    const std::int32_t experts = 2 * gpus, width = 5;
    Problem p{gpus, width, experts, Ids(gpus * width, -1), Counts(experts, 5)};
    for (std::int32_t g = 0; g < gpus; ++g) {
        std::int32_t* mine = p.slots.data() + g * width;
        if (g > 0) *mine++ = g - 1;         // shared with the one before
        if (g < gpus - 1) *mine++ = g;      // and with the next
        if (g > 0) *mine++ = gpus - 2 + g;  // on no other
        if (g > 1) continue;
        *mine++ = experts - 2;  // two more on the first two
        *mine++ = experts - 1;
    }
    const Counts routed = check_matching<W>(p, false);
    check(activated_of(p, routed) == Counts(gpus, 2), "the first GPU's third expert is passed down the line");
    for (std::int32_t g = 1; g < gpus; ++g)
        check(routed[g * width] == 5, "each shared expert has moved on by one");
    check_flow<W>(p);
}

void test_longest_paths() {
    check_longest_path<1>(3);
    check_longest_path<1>(64);
    check_longest_path<2>(65);
    check_longest_path<4>(256);
    check_longest_path<8>(257);
    check_longest_path<16>(1024);
}

void test_edges() {
    const Problem one{1, 1, 1, {0}, {7}};
    check(check_matching<1>(one, true) == Counts{7} && check_flow<1>(one) == Counts{7}, "one of everything");
    const Problem dead{3, 2, 2, Ids(6, -1), {0, 0}};
    check(check_matching<1>(dead, true) == Counts(6, 0) && check_flow<1>(dead) == Counts(6, 0),
          "no replica at all");
    const Problem twice{2, 3, 1, {0, 0, 0, 0, -1, 0}, {9}};
    check(check_flow<1>(twice) == Counts{5, 0, 0, 4, 0, 0}, "a second slot on a GPU is no candidate");

    // The most that is allowed: all experts on one GPU, all live, with the most tokens each.
    Problem full{1, static_cast<std::int32_t>(kMaxExperts), static_cast<std::int32_t>(kMaxExperts),
                 Ids(kMaxExperts), Counts(kMaxExperts, kMostTokens)};
    std::iota(full.slots.begin(), full.slots.end(), 0);
    check_matching<1>(full, true);
    check_flow<1>(full);
    check_metro<1>(full, {});

    Problem everywhere{1024, 2, 2, Ids(2048), {kMostTokens, kMostTokens}};
    for (std::size_t s = 0; s < 2048; ++s) everywhere.slots[s] = static_cast<std::int32_t>(s % 2);
    check_matching<16>(everywhere, true);
    check_flow<16>(everywhere);
}

// An objective in its plainest form.
struct Price {
    std::vector<Piece> pieces;
    Curve curve;
    std::int64_t tile_tokens = 128;
    std::vector<double> slowness;
    bool split = true;

    Pricing pricing() const { return Pricing(pieces, curve, static_cast<double>(tile_tokens), slowness, split); }
    bool uniform() const {
        return std::count(slowness.begin(), slowness.end(), slowness[0]) ==
               static_cast<std::ptrdiff_t>(slowness.size());
    }
    double curved(std::int64_t x) const {
        if (x == 0 || curve.empty()) return 0;
        std::size_t row = 0;
        while (row + 2 < curve.tokens.size() && static_cast<double>(x) >= curve.tokens[row + 1]) ++row;
        const double run = curve.tokens[row + 1] - curve.tokens[row],
                     rise = curve.times[row + 1] - curve.times[row];
        return curve.times[row] + rise / run * std::max(static_cast<double>(x) - curve.tokens[row], 0.0);
    }
    double time(std::int32_t gpu, std::span<const std::int64_t> taken) const {
        std::int64_t activated = 0, tiles = 0, tokens = 0;
        double most = 0;
        for (const std::int64_t x : taken) {
            activated += x > 0, tiles += ceil_div(x, tile_tokens), tokens += x;
            most += curved(x);
        }
        for (const Piece& p : pieces)
            most = std::max(most, ((p.offset + p.activation * static_cast<double>(activated)) +
                                   p.tile * static_cast<double>(tiles)) +
                                      p.token * static_cast<double>(tokens));
        return slowness[gpu] * most;
    }
    double makespan(const Problem& p, const Counts& routed) const {
        double most = 0;
        for (std::int32_t g = 0; g < p.gpus; ++g)
            most = std::max(most, time(g, std::span(routed).subspan(g * p.slots_per_gpu, p.slots_per_gpu)));
        return most;
    }
};

// Prices of every kind: one to three pieces, offsets, tiles, a curve, slow GPUs, whole experts.
Price draw_price(Random& random, std::int32_t gpus) {
    const auto cost = [&](int percent) {
        return random.chance(percent) ? static_cast<double>(random.between(0, 100)) / 10 : 0.0;
    };
    Price price;
    price.tile_tokens = random.chance(50) ? 128 : random.between(1, 5);
    price.slowness.assign(gpus, random.chance(80) ? 1.0 : 1.5);
    price.split = random.chance(70);
    if (random.chance(25))
        for (double& s : price.slowness) s = static_cast<double>(random.between(7, 30)) / 10;
    if (random.chance(40)) {  // at the flip of few tokens, or of many
        const double token = random.chance(50) ? 1 : 0.0945;
        price.pieces = {{cost(30), static_cast<double>(random.between(1, 20)), 0, 0}, {cost(30), 0, 0, token}};
        return price;
    }
    for (std::int64_t i = random.between(0, 3); i > 0; --i)
        price.pieces.push_back({cost(40), cost(60), cost(30), cost(60)});
    if (price.pieces.empty() || random.chance(20)) {
        double n = 0, t = 0;
        for (std::int64_t i = random.between(2, 4); i > 0; --i) {
            price.curve.tokens.push_back(n += static_cast<double>(random.between(1, 5)));
            price.curve.times.push_back(t += cost(70));
        }
    }
    return price;
}

// A problem whose counts are of about so many tokens, where prices of activations and of tokens meet.
Problem draw_flip(Random& random, std::int32_t gpus, std::int32_t slots_per_gpu, std::int32_t experts) {
    Problem p = draw_problem(random, gpus, slots_per_gpu, experts);
    const std::int64_t most = random.between(2, 400);
    for (const std::int32_t e : p.slots)
        if (e >= 0) p.tokens[e] = random.chance(80) ? 1 + random.below(most) * random.below(most) / most : 0;
    return p;
}

bool is_whole(const Problem& p, const Counts& routed) {
    Counts replicas(p.experts, 0);
    for (std::size_t s = 0; s < routed.size(); ++s)
        if (routed[s] > 0) ++replicas[p.slots[s]];
    return std::all_of(replicas.begin(), replicas.end(), [](std::int64_t n) { return n <= 1; });
}

// What the makespan search says of a problem.
struct Found {
    Counts routed;
    double makespan, bound;
    Proof proved_by;
    Gpus certificate;
    bool operator==(const Found&) const = default;
};

// The solvers of one width, without the width in their type: much less to compile.
struct Solvers {
    virtual ~Solvers() = default;
    virtual Outcome solve(const Pricing&, const Layer&, const Counts& tokens, Counts& routed,
                          std::int64_t work) = 0;
    virtual Found found(const Problem&, const Counts& routed) const = 0;
    virtual std::vector<Counts> pure(const Problem&) const = 0;
    virtual void forget() = 0;
};

template <int W>
struct SolversOf final : Solvers {
    std::optional<Makespan<W>> solver{std::in_place};

    Outcome solve(const Pricing& pricing, const Layer& layer, const Counts& tokens, Counts& routed,
                  std::int64_t work) override {
        return solver->solve(pricing, layer, tokens.data(), routed.data(), work);
    }
    Found found(const Problem& p, const Counts& routed) const override {
        return {routed, solver->makespan(), solver->bound(), solver->proved_by(), certificate_of(p, *solver)};
    }
    std::vector<Counts> pure(const Problem& p) const override {
        return {check_matching<W>(p, false), check_flow<W>(p)};
    }
    void forget() override { solver.emplace(); }
};

Found solve(Solvers& solvers, const Problem& p, const Price& price, std::int64_t work) {
    const Placement placement = p.placement();
    Counts routed(p.slots.size(), 0);
    check(solvers.solve(price.pricing(), placement.layer(0), p.tokens, routed, work) == Outcome::ok,
          "makespan solves");
    return solvers.found(p, routed);
}

void check_refined(const Problem& p, const Price& price, const Found& found) {
    const Placement placement = p.placement();
    Counts refined = found.routed, again = found.routed;
    refine(price.pricing(), placement.layer(0), p.tokens.data(), refined.data(), 1, 2000);
    refine(price.pricing(), placement.layer(0), p.tokens.data(), again.data(), 1, 2000);
    check_served(p, refined);
    check(refined == again, "a number draws the same again");
    check(price.split || is_whole(p, refined), "whole experts stay whole");
    check(price.makespan(p, refined) <= found.makespan, "refined is never worse");
    check(price.makespan(p, refined) >= found.bound, "and not below the bound");
}

Found check_makespan(Solvers& solvers, const Problem& p, const Price& price, std::int64_t work) {
    const Found found = solve(solvers, p, price, work);
    check_served(p, found.routed);
    check(price.split || is_whole(p, found.routed), "whole experts stay whole");
    check(found.makespan == price.makespan(p, found.routed), "makespan prices what it routes, to the bit");
    check(found.bound <= found.makespan, "makespan is not below its bound");

    // The sums of a curve that the search keeps may be off by their rounding.
    const double rounded = price.curve.empty() ? found.makespan : found.makespan * (1 - 1e-12);
    std::vector<Counts> others = solvers.pure(p);
    if (!price.split) others.pop_back();
    for (const Counts& other : others) {
        check(rounded <= price.makespan(p, other), "makespan is not above a pure optimum");
        check(found.bound <= price.makespan(p, other), "no routing refutes the bound");
    }

    const bool certified = std::count(found.certificate.begin(), found.certificate.end(), true) > 0;
    check(found.proved_by != Proof::none, "a bound is proven by someone");
    check(!certified || found.proved_by == Proof::matching || found.proved_by == Proof::flow,
          "only matching and flow give certificates");
    if (price.pricing().simple() && !price.pricing().mixed()) check_refined(p, price, found);
    if (certified && price.curve.empty()) {
        const Pricing pricing = price.pricing();
        const bool activations = found.proved_by == Proof::matching;
        const auto count = static_cast<double>(proven(p, found.certificate, activations));
        check(
            found.bound == (activations ? pricing.time_of_activated(0, count) : pricing.time_of_tokens(0, count)),
            "a certificate counts as much as the bound needs");
    }
    return found;
}

// One solver takes all problems in turn, twice, and a new one the same: what a solver keeps changes
// nothing and, from the second time, is enough.
void check_makespans(Random& random, Solvers&& solvers, const std::vector<Problem>& problems) {
    std::vector<Price> prices;
    std::vector<Found> found;
    const std::int64_t work = random.chance(50) ? 1000 : 5000;
    for (const Problem& p : problems) {
        prices.push_back(draw_price(random, p.gpus));
        found.push_back(check_makespan(solvers, p, prices.back(), work));
    }
    for (std::size_t i = 0; i < problems.size(); ++i) {
        const Problem& p = problems[i];
        const Placement placement = p.placement();
        const Pricing pricing = prices[i].pricing();
        Counts routed(p.slots.size(), 0);
        const std::int64_t before = allocations;
        solvers.solve(pricing, placement.layer(0), p.tokens, routed, work);
        check(allocations == before, "makespan allocates nothing for what it has room for");
        check(solvers.found(p, routed) == found[i], "makespan answers the same again");
    }
    for (std::size_t i = 0; i < problems.size(); i += 8) {
        solvers.forget();
        check(solve(solvers, problems[i], prices[i], work) == found[i],
              "makespan answers the same without a past");
        const Found more = check_makespan(solvers, problems[i], prices[i], 4 * work);
        const double rounded = prices[i].curve.empty() ? 1 : 1 - 1e-12;
        check(more.makespan * rounded <= found[i].makespan && more.bound >= found[i].bound * rounded,
              "more work is never worse");
        check_makespan(solvers, problems[i], prices[i], 0);
    }
}

template <class Draw>
std::vector<Problem> several(int count, Draw&& draw) {
    std::vector<Problem> problems;
    for (int i = 0; i < count; ++i) problems.push_back(draw());
    return problems;
}

void test_makespan(Random& random) {
    std::vector<Problem> narrow = several(250, [&] { return draw_sized(random, 1, 20, 5, 60); });
    for (int i = 0; i < 60; ++i) narrow.push_back(draw_sized(random, 21, 64, 8, 300));
    for (int i = 0; i < 100; ++i) narrow.push_back(draw_flip(random, 8, 5, 30));
    for (int i = 0; i < 20; ++i) narrow.push_back(draw_flip(random, 64, 5, 256));
    for (int i = 0; i < 30; ++i) narrow.push_back(draw_line(random, 20));
    check_makespans(random, SolversOf<1>(), narrow);
    check_makespans(random, SolversOf<2>(), several(20, [&] { return draw_sized(random, 65, 128, 6, 400); }));
    check_makespans(random, SolversOf<4>(), several(8, [&] { return draw_sized(random, 129, 256, 4, 600); }));
    check_makespans(random, SolversOf<8>(), several(6, [&] { return draw_sized(random, 257, 512, 4, 1000); }));
    std::vector<Problem> wide = several(3, [&] { return draw_sized(random, 513, 1024, 4, 2048); });
    wide.push_back(draw_flip(random, 1024, 3, 2048));
    check_makespans(random, SolversOf<16>(), wide);
}

// Dead GPUs behind the others need wider sets and may change nothing.
void check_makespan_with_dead_gpus(Solvers&& solvers, std::int32_t gpus, const Problem& p, const Price& price,
                                   const Found& found) {
    Problem wide = p;
    wide.gpus = gpus;
    wide.slots.resize(wide.gpus * p.slots_per_gpu, -1);
    Price longer = price;
    longer.slowness.resize(wide.gpus, price.slowness[0]);
    Found again = check_makespan(solvers, wide, longer, 1000);
    again.routed.resize(p.slots.size()), again.certificate.resize(p.gpus);
    check(again == found, "makespan answers the same at every width");
}

void test_makespan_width(Random& random) {
    SolversOf<1> solvers;
    for (int i = 0; i < 20; ++i) {
        const Problem p = draw_sized(random, 1, 12, 4, 40);
        Price price = draw_price(random, p.gpus);
        price.slowness.assign(p.gpus, 1.0);
        const Found found = check_makespan(solvers, p, price, 1000);
        check_makespan_with_dead_gpus(SolversOf<2>(), 128, p, price, found);
        check_makespan_with_dead_gpus(SolversOf<4>(), 256, p, price, found);
        if (i % 5 != 0) continue;
        check_makespan_with_dead_gpus(SolversOf<8>(), 512, p, price, found);
        check_makespan_with_dead_gpus(SolversOf<16>(), 1024, p, price, found);
    }
}

using Passes = std::function<bool(const Counts&)>;

// Calls visit(routed) for every routing of the experts from `expert` on that passes with whatever is still
// to come; stops when it returns true. With `twice` an expert's second slot on a GPU takes tokens too.
bool any_routing(const Problem& p, bool split, bool twice, std::int32_t expert, Counts& routed,
                 const Passes& passes, const Passes& visit) {
    if (!passes(routed)) return false;
    while (expert < p.experts && p.tokens[expert] == 0) ++expert;
    if (expert == p.experts) return visit(routed);
    Ids slots;
    for (const Candidate c : p.candidates(expert)) slots.push_back(c.slot);
    if (twice) {
        slots.clear();
        for (std::size_t s = 0; s < p.slots.size(); ++s)
            if (p.slots[s] == expert) slots.push_back(static_cast<std::int32_t>(s));
    }
    const auto share = [&](auto&& self, std::size_t next, std::int64_t left) -> bool {
        if (left == 0) return any_routing(p, split, twice, expert + 1, routed, passes, visit);
        if (next == slots.size()) return false;
        bool found = false;
        for (std::int64_t x = left; x >= 0 && !found; x = split || x == 0 ? x - 1 : 0) {
            routed[slots[next]] = x;
            found = self(self, next + 1, left - x);
        }
        if (!found) routed[slots[next]] = 0;
        return found;
    };
    return share(share, 0, p.tokens[expert]);
}

// Under a curve two slots of a GPU can be quicker than one.
double least_makespan(const Problem& p, const Price& price) {
    Counts routed(p.slots.size(), 0);
    double least = kInf;
    const auto passes = [&](const Counts& some) { return price.makespan(p, some) < least; };
    any_routing(p, price.split, !price.curve.empty(), 0, routed, passes, [&](const Counts& all) {
        least = std::min(least, price.makespan(p, all));
        return false;
    });
    return least;
}

Problem draw_tiny(Random& random) {
    Problem p = draw_sized(random, 2, 4, 3, 5);
    for (std::int64_t& t : p.tokens) t = t == 0 ? 0 : random.between(1, 7);
    return p;
}

void test_makespan_brute_force(Random& random) {
    SolversOf<1> solvers;
    for (int i = 0; i < 1000; ++i) {
        const Problem p = draw_tiny(random);
        const Price price = draw_price(random, p.gpus);
        const double least = least_makespan(p, price);
        for (const std::int64_t work : {0, 1000}) {
            const Found found = check_makespan(solvers, p, price, work);
            check(found.bound <= least, "the bound is at most the least makespan");
            check(found.makespan * (price.curve.empty() ? 1 : 1 + 1e-12) >= least,
                  "no makespan is less than the least");
        }
    }
}

// Whether a routing within the caps exists, by trying; and what Branching and Completion say of it.
void test_branching(Random& random) {
    std::int64_t fits = 0, refuted = 0, completed = 0, excluded = 0, matched = 0, unmatched = 0;
    for (int i = 0; i < 4000; ++i) {
        const Problem p = draw_tiny(random);
        const Placement placement = p.placement();
        const Price price{{{0, 1, 0, 1}}, {}, 128, std::vector<double>(p.gpus, 1.0), random.chance(70)};
        Choices choices;
        choices.fix(placement.layer(0), p.tokens.data(), price.pricing());
        choices.read(placement.layer(0), p.tokens.data());
        std::vector<Caps> caps(p.gpus);
        const Caps most{static_cast<double>(random.between(1, 3)), static_cast<double>(random.between(1, 12))};
        for (Caps& c : caps) {
            c = most;
            if (random.chance(20)) c.activated += static_cast<double>(random.between(-2, 2));
            if (random.chance(20)) c.tokens += static_cast<double>(random.between(-3, 3));
        }
        const auto within = [&](const Counts& routed) {
            const Counts activated = activated_of(p, routed), load = load_of(p, routed);
            for (std::int32_t g = 0; g < p.gpus; ++g)
                if (static_cast<double>(activated[g]) > caps[g].activated ||
                    static_cast<double>(load[g]) > caps[g].tokens)
                    return false;
            return true;
        };
        Counts routed(p.slots.size(), 0);
        const bool exists =
            any_routing(p, price.split, false, 0, routed, within, [](const Counts&) { return true; });

        std::vector<Caps> left = caps;
        for (std::int32_t g = 0; g < p.gpus; ++g)
            left[g].activated -= choices.fixed(g).activated, left[g].tokens -= choices.fixed(g).tokens;
        const auto judge = [&](Verdict verdict, const std::vector<double>& tokens, bool split) {
            check(verdict != Verdict::refuted || !exists, "what is refuted does not exist");
            check(verdict != Verdict::fits || exists, "what fits exists");
            if (verdict != Verdict::fits) return;
            std::fill(routed.begin(), routed.end(), 0);
            for (const SingleCopy& e : placement.layer(0).singles) routed[e.only.slot] = p.tokens[e.expert];
            for (std::int32_t o = 0; o < choices.options(); ++o)
                routed[choices.option(o).slot] = static_cast<std::int64_t>(tokens[o]);
            check_served(p, routed);
            check(within(routed), "what fits is within the caps");
            check(split || is_whole(p, routed), "what fits is whole where it must be");
        };
        Branching<1> branching(choices);
        branching.read();
        Completion completion(choices);
        for (const std::int64_t nodes : {1, 4, 1000}) {
            const Verdict verdict = branching.decide(left, price.split, nodes);
            judge(verdict, branching.tokens(), price.split);
            check(verdict != Verdict::unknown || nodes < 1000, "with nodes enough it is decided");
            check(branching.nodes() <= nodes + 1, "no more nodes than allowed");
            if (nodes == 1000) fits += verdict == Verdict::fits, refuted += verdict == Verdict::refuted;
            const Verdict whole = completion.decide(left, price.split, nodes);
            judge(whole, completion.tokens(), false);
            check(price.split || whole != Verdict::unknown || nodes < 1000, "so it is of whole experts");
            if (nodes == 1000 && price.split)
                completed += whole == Verdict::fits, excluded += whole == Verdict::refuted;
        }
        PatternTree<1> tree(choices);
        PatternTree<2> wide(choices);
        for (const std::int64_t looks : {100, 3000, 1000000}) {
            const Verdict verdict = tree.decide(left, price.split, looks);
            judge(verdict, tree.tokens(), price.split);
            check(verdict != Verdict::unknown || looks < 1000000, "with looks enough it is decided");
            check(wide.decide(left, price.split, looks) == verdict, "whatever the width");
            if (looks == 3000) matched += verdict == Verdict::fits, unmatched += verdict == Verdict::refuted;
        }
    }
    check(fits > 500 && refuted > 500 && completed > 300 && excluded > 300 && matched > 300 && unmatched > 300,
          "both verdicts occur");
}

// Caps are what a target allows, and no more.
void test_pricing(Random& random) {
    for (int i = 0; i < 2000; ++i) {
        const Price price = draw_price(random, 3);
        const Pricing pricing = price.pricing();
        Counts taken(random.between(1, 6));
        for (std::int64_t& x : taken) x = random.chance(70) ? random.between(1, 40) : 0;
        const auto gpu = static_cast<std::int32_t>(random.below(3));
        Load load;
        double activated = 0, tokens = 0;
        for (const std::int64_t x : taken) {
            load += pricing.replica(static_cast<double>(x));
            activated += x > 0, tokens += static_cast<double>(x);
        }
        const double time = price.time(gpu, taken);
        check(pricing.time(gpu, load) == time, "a GPU's time is the same to the bit");
        check(pricing.time_of_activated(gpu, activated) <= time && pricing.time_of_tokens(gpu, tokens) <= time,
              "the least times are least");
        for (const double target : {time, time / 2}) {
            const Caps caps = pricing.caps(gpu, target);
            check(time > target || (activated <= caps.activated && tokens <= caps.tokens),
                  "what is in time is within");
            check(caps.activated < 0 || pricing.time_of_activated(gpu, caps.activated) <= target,
                  "caps are in time");
            check(caps.tokens < 0 || pricing.time_of_tokens(gpu, caps.tokens) <= target, "caps are in time");
            check(pricing.beyond(gpu, caps) > target, "beyond them it is late");
        }
    }
}

void test_bad_tokens(Random& random) {
    constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min(),
                           kMost = std::numeric_limits<std::int64_t>::max();
    Makespan<1> makespan;
    const auto pricing_for = [](const Problem& p) {
        return Price{{{0, 1, 0, 1}}, {}, 128, std::vector<double>(p.gpus, 1.0), true}.pricing();
    };
    for (int i = 0; i < 400; ++i) {
        Problem p = draw_sized(random, 1, 10, 4, 30);
        const std::int64_t wrong[] = {-1, kLeast, kLeast + 1, kMostTokens + 1, kMost};
        Ids order(p.experts);
        std::iota(order.rbegin(), order.rend(), 0);
        if (random.chance(50)) std::fill(p.tokens.begin(), p.tokens.end(), kMost);
        p.tokens[random.below(p.experts)] = wrong[random.below(5)];
        const Placement placement = p.placement();
        Counts routed(p.slots.size(), 0);
        check(Matching<1>(placement.layer(0), routed.data()).solve(p.tokens.data()) == Outcome::bad_tokens,
              "matching refuses counts out of range");
        std::fill(routed.begin(), routed.end(), 0);
        check(Flow<1>(placement.layer(0), routed.data()).solve(p.tokens.data()) == Outcome::bad_tokens,
              "flow refuses counts out of range");
        std::fill(routed.begin(), routed.end(), 0);
        check(Metro<1>(placement.layer(0), routed.data()).solve(p.tokens.data(), order.data()) ==
                  Outcome::bad_tokens,
              "metro refuses counts out of range");
        std::fill(routed.begin(), routed.end(), 0);
        check(makespan.solve(pricing_for(p), placement.layer(0), p.tokens.data(), routed.data(), 100) ==
                  Outcome::bad_tokens,
              "makespan refuses counts out of range");
    }
    const Problem absent{2, 1, 3, {0, 2}, {1, 1, 1}};
    const Placement placement = absent.placement();
    Counts routed(2, 0);
    check(Matching<1>(placement.layer(0), routed.data()).solve(absent.tokens.data()) == Outcome::bad_tokens,
          "matching refuses an expert without a replica");
    routed = {0, 0};
    check(Flow<1>(placement.layer(0), routed.data()).solve(absent.tokens.data()) == Outcome::bad_tokens,
          "flow refuses an expert without a replica");
    routed = {0, 0};
    check(Metro<1>(placement.layer(0), routed.data()).solve(absent.tokens.data(), nullptr) == Outcome::bad_tokens,
          "metro refuses an expert without a replica");
    routed = {0, 0};
    check(makespan.solve(pricing_for(absent), placement.layer(0), absent.tokens.data(), routed.data(), 100) ==
              Outcome::bad_tokens,
          "makespan refuses an expert without a replica");
}

// Even shares and shares that end anywhere, both copies on a GPU counted.
void test_shares(Random& random) {
    for (int round = 0; round < 400; ++round) {
        const Problem p = draw_problem(random, static_cast<std::int32_t>(random.between(1, 9)),
                                       static_cast<std::int32_t>(random.between(1, 6)),
                                       static_cast<std::int32_t>(random.between(1, 20)));
        const Placement placement = p.placement();
        Ids first, slots;
        std::vector<double> ends;
        for (std::int32_t e = 0; e < p.experts; ++e) {
            first.push_back(static_cast<std::int32_t>(slots.size()));
            for (std::size_t s = 0; s < p.slots.size(); ++s)
                if (p.slots[s] == e) slots.push_back(static_cast<std::int32_t>(s));
            for (std::size_t s = first.back(); s < slots.size(); ++s)
                ends.push_back(s + 1 == slots.size() ? 1.0 : static_cast<double>(random.below(1000)) / 1000);
            std::sort(ends.begin() + first.back(), ends.end());
        }
        first.push_back(static_cast<std::int32_t>(slots.size()));
        for (const bool even : {true, false}) {
            Counts routed(p.slots.size(), 0), sums(p.experts, 0);
            const Shares shares{first, slots, even ? std::span<const double>() : ends};
            const std::int64_t before = allocations;
            check(route_by_shares(placement.layer(0), shares, p.tokens.data(), routed.data()) == Outcome::ok,
                  "shares are routed");
            check(allocations == before, "shares allocate nothing");
            for (std::int32_t e = 0; e < p.experts; ++e) {
                for (std::int32_t i = first[e]; i < first[e + 1]; ++i) {
                    const std::int64_t x = routed[slots[i]];
                    sums[e] += x;
                    const std::int64_t copies = first[e + 1] - first[e], place = i - first[e],
                                       turn = (place + copies - e % copies) % copies;
                    const double begin = place == 0 ? 0.0 : ends[i - 1], t = static_cast<double>(p.tokens[e]);
                    const auto exact =
                        static_cast<std::int64_t>(std::nearbyint(ends[i] * t) - std::nearbyint(begin * t));
                    check(x == (even ? (p.tokens[e] + copies - 1 - turn) / copies : exact),
                          "a replica takes its share, and what is left over goes in turn");
                }
            }
            check(sums == p.tokens, "shares serve every token");
        }
        Counts bad = p.tokens, routed(p.slots.size(), 0);
        bad[random.below(p.experts)] = -1;
        check(route_by_shares(placement.layer(0), {first, slots, ends}, bad.data(), routed.data()) ==
                  Outcome::bad_tokens,
              "shares refuse counts out of range");
    }
}

void check_layer(const Problem& p, const Layer& layer) {
    const Gpus filled = p.filled();
    check(layer.filled_gpus == std::count(filled.begin(), filled.end(), true), "filled GPUs are counted");
    check(std::equal(p.slots.begin(), p.slots.end(), layer.expert_of.begin(), layer.expert_of.end()),
          "the layer holds its slots");
    Ids singles, pairs, others, absent;
    for (std::int32_t e = 0; e < p.experts; ++e) {
        const std::vector<Candidate> expected = p.candidates(e);
        const auto found = layer.candidates_of(e);
        check(std::equal(expected.begin(), expected.end(), found.begin(), found.end(),
                         [](Candidate a, Candidate b) { return a.gpu == b.gpu && a.slot == b.slot; }),
              "candidates are the lowest slots, by GPU");
        for (std::int32_t g = 0; g < p.gpus; ++g) {
            for (const Candidate c : expected) {
                const bool holds =
                    std::any_of(expected.begin(), expected.end(), [g](Candidate o) { return o.gpu == g; });
                check(layer.holders_of<1>(c.slot).contains(g) == holds, "a slot knows who holds its expert");
            }
            const auto on =
                std::find_if(expected.begin(), expected.end(), [g](Candidate c) { return c.gpu == g; });
            check(layer.slot_on(g, e) == (on == expected.end() ? -1 : on->slot), "slot_on finds the candidate");
        }
        (expected.empty()       ? absent
         : expected.size() == 1 ? singles
         : expected.size() == 2 ? pairs
                                : others)
            .push_back(e);
    }
    std::stable_sort(others.begin(), others.end(), [&](std::int32_t a, std::int32_t b) {
        return p.candidates(a).size() < p.candidates(b).size();
    });
    Ids grouped;
    for (const SingleCopy& e : layer.singles) {
        grouped.push_back(e.expert);
        check(e.only.slot == p.candidates(e.expert)[0].slot, "a single copy knows its slot");
    }
    check(grouped == singles, "experts with one candidate by id");
    grouped.clear();
    for (const TwoCopies& e : layer.pairs) {
        grouped.push_back(e.expert);
        check(e.low.slot == p.candidates(e.expert)[0].slot && e.high.slot == p.candidates(e.expert)[1].slot,
              "a pair knows its slots");
    }
    check(grouped == pairs, "experts with two candidates by id");
    check(Ids(layer.others.begin(), layer.others.end()) == others, "the others by candidates, then id");
    check(Ids(layer.absent.begin(), layer.absent.end()) == absent, "experts without a replica by id");
}

void test_placement(Random& random) {
    for (int i = 0; i < 200; ++i) {
        const Problem shape = draw_sized(random, 1, 10, 5, 25);
        std::vector<Problem> layers;
        Ids slots;
        for (std::int64_t l = random.between(1, 4); l > 0; --l) {
            layers.push_back(draw_problem(random, shape.gpus, shape.slots_per_gpu, shape.experts));
            slots.insert(slots.end(), layers.back().slots.begin(), layers.back().slots.end());
        }
        const auto count = static_cast<std::int64_t>(layers.size());
        const Placement placement(slots, count, shape.gpus, shape.slots_per_gpu, shape.experts);
        Ids().swap(slots);  // the placement keeps its own
        check(placement.num_layers() == count, "every layer is there");
        for (std::int64_t l = 0; l < count; ++l) check_layer(layers[l], placement.layer(l));
    }
}

template <int W>
void check_gpu_set(Random& random) {
    GpuSet<W> set, other;
    Gpus expected(set.capacity, false), second(set.capacity, false);
    check(set.empty(), "a new set is empty");
    for (int i = 0; i < 40 * W; ++i) {
        const auto g = static_cast<int>(random.below(set.capacity));
        const bool in = random.chance(60);
        if (in)
            set.insert(g);
        else
            set.erase(g);
        expected[g] = in;
        const auto h = static_cast<int>(random.below(set.capacity));
        const bool member = random.chance(50);
        other.insert_if(h, member);
        second[h] = second[h] || member;
    }
    std::vector<int> members, visited;
    GpuSet<W> both = set;
    both |= other;
    for (int g = 0; g < set.capacity; ++g) {
        if (expected[g]) members.push_back(g);
        check(set.contains(g) == expected[g] && other.contains(g) == second[g],
              "a set contains what was inserted");
        check((set & other).contains(g) == (expected[g] && second[g]), "intersection");
        check((set - other).contains(g) == (expected[g] && !second[g]), "difference");
        check(both.contains(g) == (expected[g] || second[g]), "union");
    }
    set.each([&](int g) { visited.push_back(g); });
    GpuSet<W> united = GpuSet<W>::read(set.words.data());
    united.unite_if(other, false);
    check(united.words == set.words, "a set is read back, and united with nothing");
    united.unite_if(other, true);
    check(united.words == both.words, "a set is united with another");
    check(visited == members, "members are visited in ascending order");
    check(set.empty() == members.empty() && (members.empty() || set.lowest() == members[0]), "the lowest member");
}

void test_gpu_sets(Random& random) {
    for (int i = 0; i < 20; ++i) {
        check_gpu_set<1>(random);
        check_gpu_set<2>(random);
        check_gpu_set<4>(random);
        check_gpu_set<8>(random);
        check_gpu_set<16>(random);
    }
}

// Loads of one size or of all sizes, zeros of either sign among them.
std::vector<double> draw_weights(Random& random, std::int32_t count) {
    const double kinds[] = {0.0, -0.0, 5e-324, 1.0, 1.0 + 1e-15, 3.0, 1e300};
    std::vector<double> weight(count);
    const std::int64_t spread = random.between(0, 60), of_kinds = random.below(2) * 50;
    for (double& w : weight)
        w = random.chance(of_kinds) ? kinds[random.below(7)]
                                    : std::ldexp(static_cast<double>(random.between(1, 1'000'000)),
                                                 static_cast<int>(random.between(0, spread)));
    return weight;
}

void test_order(Random& random) {
    for (int i = 0; i < 500; ++i) {
        const auto count = static_cast<std::int32_t>(random.between(1, 300));
        std::vector<double> weight = draw_weights(random, count);
        Ids sorted(count);
        std::iota(sorted.begin(), sorted.end(), 0);
        std::stable_sort(sorted.begin(), sorted.end(),
                         [&](std::int32_t a, std::int32_t b) { return weight[a] > weight[b]; });
        check(heaviest_first(weight) == sorted, "the heaviest first, equals in order");

        Ids tie(count, 0);
        std::vector<bool> out(count, false);
        const auto rank = [&](std::int32_t p) { return Rank::falling(weight[p], tie[p], p); };
        Tournament tournament(count, rank);
        for (std::int32_t change = 0; change < 20; ++change) {
            std::int32_t best = -1;
            for (std::int32_t p = 0; p < count; ++p)
                if (!out[p] &&
                    (best < 0 || weight[p] > weight[best] || (weight[p] == weight[best] && tie[p] < tie[best])))
                    best = p;
            check(tournament.first().player() == best, "the first by weight, tie and player");
            const auto player =
                best < 0 || random.chance(50) ? static_cast<std::int32_t>(random.below(count)) : best;
            weight[player] = draw_weights(random, 1)[0], tie[player] = static_cast<std::int32_t>(random.below(3));
            out[player] = random.chance(30);
            tournament.change(player, out[player] ? Rank::last() : rank(player));
        }
    }
    check(heaviest_first({}).empty(), "nothing to order");
}

// Replicate and pack by search over everything, where the core keeps who is first and sorts.
Ids naive_deepseek(const std::vector<double>& load, std::int32_t gpus, std::int32_t slots_per_gpu) {
    const auto experts = static_cast<std::int32_t>(load.size());
    Ids copies(experts, 1), replicas(experts);
    std::iota(replicas.begin(), replicas.end(), 0);
    for (std::int32_t spare = gpus * slots_per_gpu - experts; spare > 0; --spare) {
        std::int32_t best = 0;
        for (std::int32_t e = 1; e < experts; ++e) {
            const double here = load[e] / copies[e], there = load[best] / copies[best];
            if (here > there || (here == there && copies[e] < copies[best])) best = e;
        }
        ++copies[best];
        replicas.push_back(best);
    }
    if (slots_per_gpu == 1) return replicas;
    std::vector<double> filled(gpus, 0.0);
    Ids slots(gpus * slots_per_gpu, -1), used(gpus, 0);
    std::vector<bool> packed(replicas.size(), false);
    for (std::size_t step = 0; step < replicas.size(); ++step) {
        std::size_t next = replicas.size();
        for (std::size_t r = 0; r < replicas.size(); ++r)
            if (!packed[r] && (next == replicas.size() || load[replicas[r]] / copies[replicas[r]] >
                                                              load[replicas[next]] / copies[replicas[next]]))
                next = r;
        packed[next] = true;
        std::int32_t lightest = -1;
        for (std::int32_t g = 0; g < gpus; ++g)
            if (used[g] < slots_per_gpu && (lightest < 0 || filled[g] < filled[lightest])) lightest = g;
        slots[lightest * slots_per_gpu + used[lightest]++] = replicas[next];
        filled[lightest] += load[replicas[next]] / copies[replicas[next]];
    }
    return slots;
}

void test_deepseek(Random& random) {
    for (int i = 0; i < 500; ++i) {
        const auto gpus = static_cast<std::int32_t>(random.between(1, 9)),
                   per_gpu = static_cast<std::int32_t>(random.between(1, 6)),
                   experts = static_cast<std::int32_t>(random.between(1, gpus * per_gpu));
        const std::int64_t kinds[] = {0, 3, 1000, std::int64_t{1} << 52};
        const std::int64_t most = kinds[random.below(4)];
        std::vector<double> load(experts);
        for (double& l : load) l = static_cast<double>(random.between(0, most));
        Ids slots(gpus * per_gpu, -1);
        place_deepseek(load, 1, 1, gpus, per_gpu, slots.data());
        check(slots == naive_deepseek(load, gpus, per_gpu), "deepseek follows its rule");
    }
}

// Whether every expert has a slot, ids are in range, and where asked no GPU holds an expert twice.
bool is_placement(const Ids& slots, std::int32_t experts, std::int32_t slots_per_gpu, bool distinct) {
    std::vector<bool> placed(experts, false);
    bool good = true;
    for (std::size_t row = 0; good && row < slots.size(); row += slots_per_gpu) {
        Ids on_gpu(slots.begin() + row, slots.begin() + row + slots_per_gpu);
        std::sort(on_gpu.begin(), on_gpu.end());
        for (std::size_t s = 0; s < on_gpu.size(); ++s) {
            good = good && on_gpu[s] >= -1 && on_gpu[s] < experts;
            if (!good || on_gpu[s] < 0) continue;
            placed[on_gpu[s]] = true;
            good = !distinct || s == 0 || on_gpu[s] != on_gpu[s - 1];
        }
    }
    return good && std::find(placed.begin(), placed.end(), false) == placed.end();
}

// Every placer on every kind of load: nothing lost, nothing out of bounds, GPUs without room stay empty.
// From nothing and from placements that share copies or have empty slots; one window and several.
void test_search(Random& random, const std::vector<double>& samples, std::int32_t experts, std::int32_t gpus,
                 std::int32_t per_gpu, const Ids& shared, const Ids& with_empty) {
    const auto count = static_cast<std::int32_t>(samples.size() / experts);
    const OverWindows over{random.chance(50) ? -1 : 0.5};
    for (const Ids* previous : {static_cast<const Ids*>(nullptr), &shared, &with_empty})
        for (const std::int32_t windows : {1, count}) {
            const PlacementTask task{
                std::span(samples).first(windows * experts),     windows, experts, gpus, per_gpu, 1, 1, over,
                previous == nullptr ? nullptr : previous->data()};
            Ids found(gpus * per_gpu, -1);
            const auto search = windows == 1 ? search_placement<true> : search_placement<false>;
            search(task, 0, 1e-4, 2000, found.data());
            check(is_placement(found, experts, per_gpu, true), "the search keeps copies apart and loses none");
            for (std::size_t p = 0; previous == &with_empty && p < found.size(); ++p)
                check((found[p] < 0) >= (with_empty[p] < 0), "empty slots stay empty");
        }
}

void test_placers(Random& random) {
    AscendDefault ascend;
    Swift swift;
    FlashLb flash;
    Distinct distinct;
    for (int i = 0; i < 300; ++i) {
        const auto gpus = static_cast<std::int32_t>(random.between(1, 7)),
                   per_gpu = static_cast<std::int32_t>(random.between(1, 6)),
                   experts = static_cast<std::int32_t>(random.between(1, gpus * per_gpu));
        const std::int64_t kinds[] = {0, 1, 1000, std::int64_t{1} << 52};
        const std::int64_t most = kinds[random.below(4)];
        const std::size_t count = random.between(1, 3);
        std::vector<double> load(experts), samples(count * experts);
        for (double& l : load) l = static_cast<double>(random.between(0, most));
        for (double& x : samples) x = static_cast<double>(random.between(1, most + 1));
        const double mean = std::accumulate(load.begin(), load.end(), 0.0) / gpus;

        Ids trtllm(gpus * per_gpu, -1);
        place_trtllm(load, gpus, per_gpu, trtllm.data());
        check(is_placement(trtllm, experts, per_gpu, false), "trtllm places all");
        Ids slots = trtllm;
        distinct.repair(load, gpus, per_gpu, 1, slots.data());
        check(is_placement(slots, experts, per_gpu, true), "a repair keeps copies apart and loses none");
        swift.place(load, trtllm.data(), gpus, per_gpu, mean, slots.data());
        check(is_placement(slots, experts, per_gpu, false), "swift places all");

        Ids room(gpus, per_gpu);
        for (std::int32_t spare = gpus * per_gpu - experts; spare > 0 && random.chance(50);) {
            std::int32_t& less = room[random.below(gpus)];
            const std::int32_t taken = std::min(less, spare);
            less -= taken, spare -= taken;
        }
        const auto in_room = [&](const Ids& found) {
            for (std::int32_t g = 0; g < gpus; ++g)
                for (std::int32_t s = room[g]; s < per_gpu; ++s)
                    if (found[g * per_gpu + s] >= 0) return false;
            return true;
        };
        ascend.place(load, room, per_gpu, slots.data());
        check(is_placement(slots, experts, per_gpu, false) && in_room(slots),
              "ascend-default places all in the room");
        flash.place(samples, experts, room, per_gpu, {0.7, 4, 3}, slots.data());
        check(is_placement(slots, experts, per_gpu, true) && in_room(slots),
              "flashlb places all, apart, in the room");
        Ids moved = slots;
        reslot(trtllm.data(), gpus, per_gpu, experts, 1, moved.data());
        check(is_placement(moved, experts, per_gpu, true), "reslotting loses nothing");
        test_search(random, samples, experts, gpus, per_gpu, trtllm, slots);
    }
}

// What a judge keeps over random swaps, some taken back, is what a new one finds in the layout they end in.
template <class Make, class Same>
void check_judge(Layout& layout, Random& random, Make&& make, Same&& same) {
    auto judge = make(layout);
    Draws draws(random.below(1000));
    for (int n = 0; n < 60; ++n) {
        const auto [i, j] = layout.propose(draws);
        if (i < 0) continue;
        const double before = judge.cost(), tried = judge.try_swap(i, j);
        if (random.below(2) == 0) {
            judge.reject();
            check(judge.cost() == before, "what is rejected leaves no trace");
        } else {
            judge.accept();
            check(!judge.kExact || judge.cost() == tried, "what is accepted costs what it was said to");
        }
    }
    same(judge, make(layout));
}

void test_routing_aware(Random& random) {
    int apart = 0;  // fixed points of the cavity equations may be several: in 1 of 700 draws
    for (int i = 0; i < 60; ++i) {
        const auto gpus = static_cast<std::int32_t>(random.between(2, i % 2 == 0 ? 8 : 70)),
                   width = static_cast<std::int32_t>(random.between(1, 6)),
                   experts = static_cast<std::int32_t>(random.between(1, gpus * width));
        std::vector<double> load(experts);
        for (double& l : load) l = static_cast<double>(random.between(0, 20));
        const Ids room(gpus, width);
        Ids slots(gpus * width);
        const auto tokens = random.between(1, 40);
        const Liveness of =
            liveness_of_loads(load, tokens, static_cast<std::int32_t>(random.between(1, std::min(4, experts))));
        const Spare spare(room, experts);
        const Ids copies = copies_for_liveness(of, spare.most, spare.copies, spare.most);
        check(std::all_of(copies.begin(), copies.end(), [&](int c) { return c >= 1 && c <= spare.most; }),
              "copies fit apart");
        check(std::reduce(copies.begin(), copies.end()) <= experts + spare.copies, "copies fit");
        place_apart(of.live, copies, room, slots);
        Layout layout(slots, gpus, experts);
        for (std::int32_t e = 0; e < experts; ++e) check(layout.copies(e) > 0, "every expert has a slot");

        if (gpus <= kHallGpus) {
            check_judge(
                layout, random, [&](Layout& y) { return HallJudge(of, y); },
                [](const auto& kept, const auto& fresh) {
                    check(std::abs(kept.cost() - fresh.cost()) < 1e-3, "sets updated are sets counted anew");
                });
        }
        check_judge(
            layout, random, [&](Layout& y) { return CavityJudge(of, y); },
            [&](auto& kept, const auto& fresh) {
                kept.converge();
                apart += std::abs(kept.above() - fresh.above()) >= 1e-3 * (1 + fresh.above());
            });
    }
    check(apart <= 1, "chances converge to the same from nearly anywhere");
}

// Chances of batches above their floor are near how often drawn ones are.
void test_liveness_is_near(Random& random) {
    constexpr std::int32_t kExperts = 40, kGpus = 10, kWidth = 5, kTokens = 10, kTopK = 3, kBatches = 2000;
    std::vector<double> load(kExperts);
    std::iota(load.begin(), load.end(), 8.0);
    const Ids room(kGpus, kWidth);
    Ids slots(kGpus * kWidth);
    const Liveness of = liveness_of_loads(load, kTokens, kTopK);
    place_for_liveness(of, room, slots);
    Layout layout(slots, kGpus, kExperts);
    const double chance = CavityJudge(of, layout).above();

    const Placement placement(slots, 1, kGpus, kWidth, kExperts);
    double above = 0;
    for (int b = 0; b < kBatches; ++b) {
        Counts tokens(kExperts, 0), routed(slots.size(), 0);
        for (int t = 0; t < kTokens; ++t) {
            Ids chosen;
            while (chosen.size() < kTopK) {
                const auto e = static_cast<std::int32_t>(random.between(0, kExperts - 1));
                if (random.between(0, 46) >= load[e] || std::count(chosen.begin(), chosen.end(), e) > 0) continue;
                chosen.push_back(e), ++tokens[e];
            }
        }
        const auto live = kExperts - std::count(tokens.begin(), tokens.end(), 0);
        Matching<1> matching(placement.layer(0), routed.data());
        matching.solve(tokens.data());
        above += matching.makespan() > (live + kGpus - 1) / kGpus;
    }
    above /= kBatches;
    check(std::abs(chance - above) < 0.06, "chances are near frequencies");
}

// Batches of which one has all experts live and the others none: fewer than none are live a deviation below
// the mean.
void test_uneven_batches() {
    for (const std::int32_t gpus : {8, 9}) {
        Counts batches(5 * 64, 0);
        std::fill_n(batches.begin(), 64, 1);
        const Ids room(gpus, 8);
        Ids slots(gpus * 8);
        place_for_liveness(liveness_of_batches(batches, 64), room, slots);
        check(is_placement(slots, 64, 8, true), "placed for batches that have next to nothing in common");
    }
}

void test_assignment(Random& random) {
    for (int i = 0; i < 200; ++i) {
        const auto n = static_cast<std::int32_t>(random.between(1, 6));
        Counts cost(n * n);
        for (std::int64_t& c : cost) c = random.between(0, 9);
        const auto total = [&](const Ids& columns) {
            std::int64_t sum = 0;
            for (std::int32_t r = 0; r < n; ++r) sum += cost[r * n + columns[r]];
            return sum;
        };
        Ids order(n);
        std::iota(order.begin(), order.end(), 0);
        std::int64_t least = total(order);
        while (std::next_permutation(order.begin(), order.end())) least = std::min(least, total(order));
        check(total(assign_rows(cost, n)) == least, "no permutation costs less");
    }
}

// Moves at random, of some weights that few GPUs have and many want: rounds are matchings, as many as the
// busiest GPU needs, and senders hold what they send.
void test_transfer(Random& random) {
    Transfer transfer;
    for (int i = 0; i < 300; ++i) {
        const auto gpus = static_cast<std::int32_t>(random.between(1, 40)),
                   per_node = static_cast<std::int32_t>(random.between(1, gpus)),
                   weights = static_cast<std::int32_t>(random.between(1, 3 * gpus));
        Ids first(1, 0), holders, leaves, receiver, weight;
        for (std::int32_t w = 0; w < weights; ++w) {
            const std::int64_t few = random.between(1, 4), many = random.between(0, 6);
            const std::int32_t keeper = static_cast<std::int32_t>(random.below(gpus));
            for (std::int32_t g = 0; g < gpus; ++g) {
                if (g == keeper || random.below(gpus) < few - 1) {
                    holders.push_back(g);
                    leaves.push_back(random.chance(50));
                } else if (random.below(gpus) < many) {
                    receiver.push_back(g);
                    weight.push_back(w);
                }
            }
            first.push_back(static_cast<std::int32_t>(holders.size()));
        }
        Ids holder(receiver.size(), -1), round(receiver.size(), -1);
        const std::int32_t rounds =
            transfer.plan({receiver, weight, first, holders, leaves, gpus, per_node}, holder.data(), round.data());
        std::vector<bool> sends(gpus * rounds), receives(gpus * rounds);
        bool matched = true, held = true;
        Ids busy(2 * gpus, 0);
        for (std::size_t m = 0; m < receiver.size(); ++m) {
            held = held && holder[m] >= first[weight[m]] && holder[m] < first[weight[m] + 1];
            if (!held || round[m] < 0 || round[m] >= rounds) {
                matched = false;
                continue;
            }
            const std::int32_t sender = holders[holder[m]], out = sender * rounds + round[m],
                               in = receiver[m] * rounds + round[m];
            matched = matched && !sends[out] && !receives[in];
            sends[out] = receives[in] = true;
            ++busy[sender], ++busy[gpus + receiver[m]];
        }
        check(held, "who sends has it");
        check(matched, "a GPU sends once and receives once in a round");
        check(*std::max_element(busy.begin(), busy.end()) == rounds, "no round more than the busiest GPU needs");
    }
}

void test_assign(Random& random) {
    Assign assign;  // one for all, as its buffers are reused
    for (int i = 0; i < 400; ++i) {
        Problem p = draw_sized(random, 1, 8, 5, 25);
        for (std::int64_t& t : p.tokens) t = std::min<std::int64_t>(t, 6);
        const Placement placement = p.placement();
        const Counts routed = check_flow<1>(p);
        Ids ids(random.below(5), -1);
        for (std::int32_t e = 0; e < p.experts; ++e) ids.insert(ids.end(), p.tokens[e], e);
        random.shuffle(ids);
        Ids physical(ids.size(), -7);
        check(assign.solve(placement.layer(0), routed.data(), ids, physical.data()) == -1, "assign solves");

        Counts taken(p.slots.size(), 0);
        Ids last(p.experts, -1);
        bool padded = true, held = true, ascending = true;
        for (std::size_t k = 0; k < ids.size(); ++k) {
            if (ids[k] < 0) {
                padded = padded && physical[k] == -1;
                continue;
            }
            held = held && physical[k] >= 0 && p.slots[physical[k]] == ids[k];
            if (!held) break;
            ++taken[physical[k]];
            ascending = ascending && physical[k] >= last[ids[k]];
            last[ids[k]] = physical[k];
        }
        check(padded, "padding is answered with -1");
        check(held, "every token is sent to a slot that holds its expert");
        check(taken == routed, "shares are honoured to the token");
        check(ascending, "the lowest slots take the first tokens");

        const auto expert = static_cast<std::int32_t>(random.below(p.experts));
        ids.push_back(expert);
        physical.push_back(0);
        check(assign.solve(placement.layer(0), routed.data(), ids, physical.data()) == expert,
              "an id too many is found");
        if (p.tokens[expert] == 0) continue;
        ids.pop_back();
        ids.erase(std::find(ids.begin(), ids.end(), expert));
        check(assign.solve(placement.layer(0), routed.data(), ids, physical.data()) == expert,
              "an id too few is found");
    }
}

void test_parallel() {
    for (const int threads : {1, 2, 5}) {
        for (const std::int64_t count : {0, 1, 15, 16, 17, 33, 1000}) {
            std::vector<std::atomic<int>> visits(count);
            for_each_problem(count, threads, [&](std::int64_t i) { ++visits[i]; });
            check(std::all_of(visits.begin(), visits.end(), [](const auto& v) { return v == 1; }),
                  "every problem is visited once");
        }
    }
    Random random(7);
    std::vector<Problem> problems;
    for (int i = 0; i < 200; ++i) problems.push_back(draw_sized(random, 1, 20, 4, 40));
    const auto solve_all = [&](int threads) {
        std::vector<Counts> answers(problems.size());
        for_each_problem(static_cast<std::int64_t>(problems.size()), threads, [&](std::int64_t i) {
            const Placement placement = problems[i].placement();
            answers[i].assign(problems[i].slots.size(), 0);
            Matching<1>(placement.layer(0), answers[i].data()).solve(problems[i].tokens.data(), true);
        });
        return answers;
    };
    check(solve_all(1) == solve_all(3), "threads do not change the answers");
}

void test_arithmetic() {
    check(ceil_div(0, 3) == 0 && ceil_div(1, 3) == 1 && ceil_div(3, 3) == 1 && ceil_div(4, 3) == 2,
          "ceil_div rounds up");
    check(ceil_div(5, 0) == 0, "nothing to divide over");
    check(fill_of(0) == 0 && activated_in(fill_of(9)) == 1 && fill_of(9) - fill_of(8) == 1,
          "a fill is two counts");
    check(fill_of(kMostTokens) < fill_of(1) + fill_of(1), "activated replicas weigh more than tokens");
}

}  // namespace

int main() {
    Random random(20240607);
    test_arithmetic();
    test_gpu_sets(random);
    test_placement(random);
    test_edges();
    test_longest_paths();
    test_brute_force(random);
    test_width_does_not_matter(random);
    test_word_widths(random);
    test_pricing(random);
    test_branching(random);
    test_makespan_brute_force(random);
    test_makespan_width(random);
    test_makespan(random);
    test_bad_tokens(random);
    test_shares(random);
    test_order(random);
    test_deepseek(random);
    test_placers(random);
    test_routing_aware(random);
    test_liveness_is_near(random);
    test_uneven_batches();
    test_assignment(random);
    test_transfer(random);
    test_assign(random);
    test_parallel();
    if (failures != 0) {
        std::printf("%lld of %lld checks FAILED\n", static_cast<long long>(failures),
                    static_cast<long long>(checks));
        return EXIT_FAILURE;
    }
    std::printf("%lld checks passed\n", static_cast<long long>(checks));
    return EXIT_SUCCESS;
}
