// The Python face of the solvers: arrays in, arrays out, nothing decided here.
//
// Arrays are checked here for type, contiguity and size; what they mean is checked by the Python
// package before the call, except the tokens, which the routers check as they read them. Routers
// return -1, or the index of the first problem with bad tokens.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ascend_default.hpp"
#include "assign.hpp"
#include "completion.hpp"
#include "deepseek.hpp"
#include "distinct.hpp"
#include "fit.hpp"
#include "flashlb.hpp"
#include "flow.hpp"
#include "makespan.hpp"
#include "matching.hpp"
#include "metro.hpp"
#include "parallel.hpp"
#include "pattern_search.hpp"
#include "placement.hpp"
#include "placement_metrics.hpp"
#include "placement_search.hpp"
#include "pricing.hpp"
#include "refine.hpp"
#include "reslotting.hpp"
#include "routing_aware.hpp"
#include "shares.hpp"
#include "slot_keeping.hpp"
#include "swift.hpp"
#include "transfer.hpp"
#include "trtllm.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace eplb;

namespace {

template <class T>
using Array = nb::ndarray<nb::numpy, T, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<nb::numpy, const std::int32_t, nb::c_contig, nb::device::cpu>;

enum Status : std::int8_t { kFeasible = 1, kOptimal = 2 };  // as eplb_opt.status.Status

void require(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
}

// A contiguous int64 array by the buffer protocol, half the cost of nb::ndarray: what is left of a
// call's overhead matters where one problem takes a microsecond.
class Counts {
  public:
    explicit Counts(nb::handle array) {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
            PyErr_Clear();
            throw nb::type_error("tokens must be a C-contiguous int64 array");
        }
        const char format = view_.format[0] == '\0' ? '\0' : view_.format[1] == '\0' ? view_.format[0] : '?';
        if (view_.itemsize != 8 || (format != 'l' && format != 'q')) {
            PyBuffer_Release(&view_);
            throw nb::type_error("tokens must be a C-contiguous int64 array");
        }
    }
    ~Counts() { PyBuffer_Release(&view_); }
    Counts(const Counts&) = delete;
    Counts& operator=(const Counts&) = delete;

    const std::int64_t* data() const { return static_cast<const std::int64_t*>(view_.buf); }
    std::int64_t axes() const { return view_.ndim; }
    std::int64_t axis(std::int64_t i) const { return view_.shape[i]; }

  private:
    Py_buffer view_;
};

std::unique_ptr<Placement> make_placement(Ids slots, std::int32_t experts) {
    require(slots.ndim() == 3, "slots must be [layers, gpus, slots]");
    return std::make_unique<Placement>(std::span(slots.data(), slots.size()), slots.shape(0), slots.shape(1),
                                       slots.shape(2), experts);
}

// The arrays of a Routing, bound once so that a call hands over one object.
struct Answer {
    Array<std::int64_t> tokens, activated;
    Array<double> makespan, bound;
    Array<std::int8_t> status, proved_by;
    Array<bool> certificate;

    std::int64_t problems() const { return static_cast<std::int64_t>(makespan.size()); }
};

std::unique_ptr<Answer> make_answer(Array<std::int64_t> tokens, Array<std::int64_t> activated,
                                    Array<double> makespan, Array<double> bound, Array<std::int8_t> status,
                                    Array<std::int8_t> proved_by, Array<bool> certificate) {
    const std::size_t problems = makespan.size();
    require(bound.size() == problems && status.size() == problems && proved_by.size() == problems,
            "one bound, status and proof per problem");
    require(activated.size() == certificate.size(), "one activated count and certificate bit per GPU");
    return std::make_unique<Answer>(Answer{tokens, activated, makespan, bound, status, proved_by, certificate});
}

void require_fit(const Placement& placement, const Counts& tokens, const Answer& answer) {
    const Layer& layer = placement.layer(0);
    const std::size_t problems = answer.problems();
    const auto lead = static_cast<std::int64_t>(answer.makespan.ndim());
    bool same = tokens.axes() == lead + 1 && tokens.axis(lead) == layer.experts;
    for (std::int64_t i = 0; same && i < lead; ++i)
        same = tokens.axis(i) == static_cast<std::int64_t>(answer.makespan.shape(i));
    require(same && problems % placement.num_layers() == 0 && answer.activated.size() == problems * layer.gpus &&
                answer.tokens.size() == problems * layer.physical_slots(),
            "tokens, answer and placement differ in shape");
}

// One problem of a batch, and the rows of its answer.
struct Problem {
    const Layer& layer;
    std::int64_t layer_id;
    const std::int64_t* tokens;
    std::int64_t *routed, *activated;
    bool* certificate;
    double &makespan, &bound;
    std::int8_t &status, &proved_by;

    std::int64_t* cleared() const {
        std::memset(routed, 0, layer.physical_slots() * sizeof *routed);
        return routed;
    }
    void write_unproven() const {
        bound = std::numeric_limits<double>::quiet_NaN();
        status = kFeasible;
        proved_by = static_cast<std::int8_t>(Proof::none);
        std::fill_n(certificate, layer.gpus, false);
    }
    template <class Solver>
    void write_proof(const Solver& solver) const {
        bound = static_cast<double>(solver.makespan());
        proved_by = static_cast<std::int8_t>(Solver::kCountsTokens ? Proof::flow : Proof::matching);
        for (int g = 0; g < layer.gpus; ++g) certificate[g] = solver.in_certificate(g);
    }
    template <class Solver>
    void write_optimum(const Solver& solver) const {
        write_proof(solver);
        makespan = bound;
        status = kOptimal;
    }
};

// Calls visit.template operator()<W>() for the set_words(gpus) words W.
template <class Visit>
auto with_words(std::int32_t gpus, Visit&& visit) {
    switch (set_words(gpus)) {
        case 1:
            return visit.template operator()<1>();
        case 2:
            return visit.template operator()<2>();
        case 4:
            return visit.template operator()<4>();
        case 8:
            return visit.template operator()<8>();
        default:
            return visit.template operator()<16>();
    }
}

// Calls solve.template operator()<W>(problem) -> Outcome for all problems of a batch, W the words
// of a GPU set. Returns the first problem with bad tokens, or -1.
template <class Solve>
std::int64_t each_problem(const Placement& placement, nb::handle array, Answer& answer, int threads,
                          Solve&& solve) {
    const Counts tokens(array);
    require_fit(placement, tokens, answer);
    const std::int64_t problems = answer.problems(), layers = placement.num_layers();
    std::atomic<std::int64_t> bad{problems};
    // Handing over the GIL costs as much as a tenth of a problem, and getting it back may take a
    // whole switch interval: not for a handful of problems.
    std::optional<nb::gil_scoped_release> unlocked;
    if (problems > 16) unlocked.emplace();
    with_words(placement.layer(0).gpus, [&]<int W>() {
        for_each_problem(problems, threads, [&](std::int64_t i) {
            const Layer& layer = placement.layer(i % layers);
            const Problem problem{layer,
                                  i % layers,
                                  tokens.data() + i * layer.experts,
                                  answer.tokens.data() + i * layer.physical_slots(),
                                  answer.activated.data() + i * layer.gpus,
                                  answer.certificate.data() + i * layer.gpus,
                                  answer.makespan.data()[i],
                                  answer.bound.data()[i],
                                  answer.status.data()[i],
                                  answer.proved_by.data()[i]};
            if (solve.template operator()<W>(problem) == Outcome::ok) return;
            for (std::int64_t seen = bad; i < seen && !bad.compare_exchange_weak(seen, i);) {
            }
        });
    });
    return bad == problems ? -1 : bad.load();
}

std::int64_t route_matching(const Placement& placement, nb::handle tokens, Answer& answer, int threads,
                            bool lexicographic) {
    return each_problem(placement, tokens, answer, threads, [lexicographic]<int W>(const Problem& problem) {
        Matching<W> matching(problem.layer, problem.cleared());
        const Outcome outcome = matching.solve(problem.tokens, lexicographic);
        for (int g = 0; g < problem.layer.gpus; ++g) problem.activated[g] = matching.activated(g);
        problem.write_optimum(matching);
        return outcome;
    });
}

void count_activated(const Layer& layer, const std::int64_t* routed, std::int64_t* activated) {
    for (int g = 0; g < layer.gpus; ++g, routed += layer.slots_per_gpu) {
        std::uint64_t count = 0;
        for (int s = 0; s < layer.slots_per_gpu; ++s) count += sign_of(-routed[s]);
        activated[g] = static_cast<std::int64_t>(count);
    }
}

std::int64_t route_flow(const Placement& placement, nb::handle tokens, Answer& answer, int threads) {
    return each_problem(placement, tokens, answer, threads, []<int W>(const Problem& problem) {
        Flow<W> flow(problem.layer, problem.cleared());
        const Outcome outcome = flow.solve(problem.tokens);
        count_activated(problem.layer, problem.routed, problem.activated);
        problem.write_optimum(flow);
        return outcome;
    });
}

std::int64_t route_metro(const Placement& placement, nb::handle tokens, Answer& answer, int threads,
                         std::optional<Ids> order) {
    const std::int64_t experts = placement.layer(0).experts;
    const auto expected = static_cast<std::size_t>(placement.num_layers() * experts);
    require(!order || order->size() == expected, "order is [layers, experts]");
    const std::int32_t* orders = order ? order->data() : nullptr;
    return each_problem(placement, tokens, answer, threads, [&]<int W>(const Problem& problem) {
        Metro<W> metro(problem.layer, problem.cleared());
        const Outcome outcome =
            metro.solve(problem.tokens, orders ? orders + problem.layer_id * experts : nullptr);
        std::int64_t makespan = 0;
        for (int g = 0; g < problem.layer.gpus; ++g)
            makespan = std::max(makespan, problem.activated[g] = metro.activated(g));
        problem.makespan = static_cast<double>(makespan);
        problem.write_unproven();
        return outcome;
    });
}

using Doubles = nb::ndarray<nb::numpy, const double, nb::c_contig, nb::device::cpu>;

// Pieces are [pieces, 4]: offset, activation, tile, token. A curve is empty, or two rows or more.
std::unique_ptr<Pricing> make_pricing(Doubles pieces, Doubles curve_tokens, Doubles curve_times,
                                      double tile_tokens, Doubles slowness, bool split) {
    require(pieces.ndim() == 2 && pieces.shape(1) == 4, "pieces must be [pieces, 4]");
    require(curve_tokens.size() == curve_times.size() && curve_tokens.size() != 1, "one time per row of a curve");
    require(pieces.shape(0) + curve_tokens.size() > 0 && slowness.size() > 0, "a piece and a GPU at least");
    std::vector<Piece> linear;
    for (std::size_t i = 0; i < pieces.shape(0); ++i) {
        const double* p = pieces.data() + 4 * i;
        linear.push_back({p[0], p[1], p[2], p[3]});
    }
    const auto copy = [](const Doubles& a) { return std::vector<double>(a.data(), a.data() + a.size()); };
    return std::make_unique<Pricing>(std::move(linear), Curve{copy(curve_tokens), copy(curve_times)}, tile_tokens,
                                     copy(slowness), split);
}

// `tokens` is [..., gpus, slots], `makespan` [...].
void price(Array<const std::int64_t> tokens, const Pricing& pricing, Array<double> makespan) {
    const std::size_t lead = makespan.ndim(), gpus = pricing.gpus();
    require(tokens.ndim() == lead + 2 && tokens.shape(lead) == gpus, "one slowness per GPU");
    const std::size_t slots = tokens.shape(lead + 1);
    require(tokens.size() == makespan.size() * gpus * slots, "one makespan per problem");
    nb::gil_scoped_release unlocked;
    for (std::size_t i = 0; i < makespan.size(); ++i)
        makespan.data()[i] = pricing.slowest(tokens.data() + i * gpus * slots, static_cast<std::int32_t>(slots));
}

// `first` is [layers x experts + 1], into `slots`, and `ends` if there are any.
std::int64_t route_shares(const Placement& placement, nb::handle tokens, Answer& answer, int threads,
                          const Pricing& pricing, const Ids& first, const Ids& slots,
                          std::optional<Doubles> ends) {
    const Layer& any = placement.layer(0);
    const std::size_t layers = placement.num_layers(), experts = any.experts;
    require(pricing.gpus() == any.gpus, "one slowness per GPU");
    require(first.size() == layers * experts + 1 &&
                first.data()[layers * experts] == static_cast<std::int32_t>(slots.size()) &&
                (!ends || ends->size() == slots.size()),
            "shares of all replicas");
    const std::span of_slots(slots.data(), slots.size());
    const std::span of_ends = ends ? std::span(ends->data(), ends->size()) : std::span<const double>();
    return each_problem(placement, tokens, answer, threads, [&]<int W>(const Problem& problem) {
        const Shares shares{std::span(first.data() + problem.layer_id * experts, experts + 1), of_slots, of_ends};
        const Outcome outcome = route_by_shares(problem.layer, shares, problem.tokens, problem.cleared());
        count_activated(problem.layer, problem.routed, problem.activated);
        problem.makespan = pricing.slowest(problem.routed, problem.layer.slots_per_gpu);
        problem.write_unproven();
        return outcome;
    });
}

template <int W>
Makespan<W>& makespan_solver() {
    thread_local Makespan<W> solver;
    return solver;
}

template <int W>
void write_bound(const Problem& problem, const Makespan<W>& solver) {
    problem.bound = solver.bound();
    problem.proved_by = static_cast<std::int8_t>(solver.proved_by());
    for (int g = 0; g < problem.layer.gpus; ++g) problem.certificate[g] = solver.in_certificate(g);
}

std::int64_t route_makespan(const Placement& placement, nb::handle tokens, Answer& answer, int threads,
                            const Pricing& pricing, std::int64_t work) {
    require(pricing.gpus() == placement.layer(0).gpus, "one slowness per GPU");
    return each_problem(placement, tokens, answer, threads, [&]<int W>(const Problem& problem) {
        Makespan<W>& solver = makespan_solver<W>();
        const Outcome outcome = solver.solve(pricing, problem.layer, problem.tokens, problem.cleared(), work);
        if (outcome != Outcome::ok) return outcome;
        count_activated(problem.layer, problem.routed, problem.activated);
        problem.makespan = solver.makespan();
        write_bound<W>(problem, solver);
        problem.status = problem.makespan == problem.bound ? kOptimal : kFeasible;
        return outcome;
    });
}

std::int64_t prove_makespan(const Placement& placement, nb::handle tokens, Answer& answer, int threads,
                            const Pricing& pricing, std::int64_t work) {
    require(pricing.gpus() == placement.layer(0).gpus, "one slowness per GPU");
    return each_problem(placement, tokens, answer, threads, [&]<int W>(const Problem& problem) {
        thread_local std::vector<std::int64_t> routed;
        routed.assign(problem.layer.physical_slots(), 0);
        Makespan<W>& solver = makespan_solver<W>();
        const Outcome outcome = solver.solve(pricing, problem.layer, problem.tokens, routed.data(), work);
        if (outcome != Outcome::ok) return outcome;
        write_bound<W>(problem, solver);
        if (problem.status == kFeasible && problem.makespan == problem.bound) problem.status = kOptimal;
        return outcome;
    });
}

using Numbers = nb::ndarray<nb::numpy, const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const Layer& require_one(const Placement& placement, std::int64_t layer, const Numbers& tokens,
                         const Array<std::int64_t>& routed, const Pricing& pricing) {
    const Layer& of = placement.layer(layer);
    require(pricing.gpus() == of.gpus && pricing.simple(), "up to two pieces without tiles, on equal GPUs");
    require(tokens.size() == static_cast<std::size_t>(of.experts) &&
                routed.size() == static_cast<std::size_t>(of.physical_slots()),
            "tokens, routed and placement differ in shape");
    return of;
}

// True and `routed` if the search fits experts into the target, False if nothing does, else None.
template <class Search>
std::optional<bool> fit_experts(const Placement& placement, std::int64_t layer, Numbers tokens,
                                Array<std::int64_t> routed, const Pricing& pricing, double target,
                                std::int64_t work) {
    const Layer& of = require_one(placement, layer, tokens, routed, pricing);
    nb::gil_scoped_release unlocked;
    const Verdict verdict = fit<Search>(pricing, of, tokens.data(), routed.data(), target, work);
    return verdict == Verdict::unknown ? std::nullopt : std::optional(verdict == Verdict::fits);
}

void refine_makespan(const Placement& placement, std::int64_t layer, Numbers tokens, Array<std::int64_t> routed,
                     const Pricing& pricing, std::uint64_t number, std::int64_t work) {
    const Layer& of = require_one(placement, layer, tokens, routed, pricing);
    nb::gil_scoped_release unlocked;
    refine(pricing, of, tokens.data(), routed.data(), number, work);
}

// Proves a bound for an answer that another method gave: writes bound, certificate and, where the
// answer meets the bound, its status.
template <template <int> class Solver>
std::int64_t prove(const Placement& placement, nb::handle tokens, Answer& answer, int threads) {
    return each_problem(placement, tokens, answer, threads, []<int W>(const Problem& problem) {
        thread_local std::vector<std::int64_t> routed;
        routed.assign(problem.layer.physical_slots(), 0);
        Solver<W> solver(problem.layer, routed.data());
        const Outcome outcome = solver.solve(problem.tokens);
        if (outcome != Outcome::ok) return outcome;
        problem.write_proof(solver);
        if (problem.status == kFeasible && problem.makespan == problem.bound) problem.status = kOptimal;
        return outcome;
    });
}

// Returns (problem, expert) of the first ids that do not match the routed tokens, (-1, -1) if none.
std::pair<std::int64_t, std::int32_t> assign(const Placement& placement, Array<const std::int64_t>& routed,
                                             const Ids& topk_ids, Array<std::int32_t>& physical) {
    const std::int64_t slots = placement.layer(0).physical_slots(), layers = placement.num_layers();
    const auto problems = static_cast<std::int64_t>(routed.size()) / slots;
    if (problems == 0) return {-1, -1};
    require(topk_ids.size() == physical.size() && topk_ids.size() % problems == 0, "one physical id per top-k id");
    const std::size_t ids = topk_ids.size() / problems;
    nb::gil_scoped_release unlocked;
    Assign solver;
    for (std::int64_t i = 0; i < problems; ++i) {
        const std::int32_t expert =
            solver.solve(placement.layer(i % layers), routed.data() + i * slots,
                         std::span(topk_ids.data() + i * ids, ids), physical.data() + i * ids);
        if (expert >= 0) return {i, expert};
    }
    return {-1, -1};
}

using Loads = nb::ndarray<nb::numpy, const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Samples = nb::ndarray<nb::numpy, const double, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Slots = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using OldSlots = nb::ndarray<nb::numpy, const std::int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// One layer of a placement in the making.
struct Placed {
    std::span<const double> load;
    std::int32_t gpus, slots_per_gpu;
    std::int32_t* slots;

    std::size_t size() const { return static_cast<std::size_t>(gpus) * slots_per_gpu; }
};

// Calls place(layer, layer's number) for every layer, without the GIL.
template <class Place>
void each_layer(const Loads& load, const Slots& slots, Place&& place) {
    require(load.shape(0) == slots.shape(0), "one load per layer");
    nb::gil_scoped_release unlocked;
    const auto gpus = static_cast<std::int32_t>(slots.shape(1)),
               per_gpu = static_cast<std::int32_t>(slots.shape(2));
    for (std::size_t l = 0; l < load.shape(0); ++l) {
        const Placed layer{std::span(load.data() + l * load.shape(1), load.shape(1)), gpus, per_gpu,
                           slots.data() + l * gpus * per_gpu};
        place(layer, l);
    }
}

void require_slots(const Loads& load, const Slots& slots) {
    require(load.shape(1) <= slots.shape(1) * slots.shape(2), "at least as many slots as experts");
}

// The placer must see ids in range only: it writes where they point.
template <class Array>
void require_experts(const Array& slots, std::size_t experts) {
    const auto end = static_cast<std::int32_t>(experts);
    require(
        std::all_of(slots.data(), slots.data() + slots.size(), [&](std::int32_t e) { return e >= -1 && e < end; }),
        "expert ids in range");
}

void require_previous(const Loads& load, const OldSlots& previous, const Slots& slots) {
    require(previous.shape(0) == slots.shape(0) && previous.shape(1) == slots.shape(1) &&
                previous.shape(2) == slots.shape(2),
            "old and new slots alike");
    require_experts(previous, load.shape(1));
}

void require_nodes(const Slots& slots, std::int32_t nodes) {
    require(nodes >= 1 && slots.shape(1) % nodes == 0, "nodes divide the GPUs");
}

using Copies = nb::ndarray<nb::numpy, const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// `copies` is [layers, experts].
void count_copies_of_layers(
    OldSlots slots, nb::ndarray<nb::numpy, std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> copies) {
    require(slots.shape(0) == copies.shape(0), "copies of every layer");
    require_experts(slots, copies.shape(1));
    nb::gil_scoped_release unlocked;
    const std::size_t size = slots.shape(1) * slots.shape(2), experts = copies.shape(1);
    for (std::size_t l = 0; l < slots.shape(0); ++l)
        count_copies({slots.data() + l * size, size}, {copies.data() + l * experts, experts});
}

// `gpu_load` is [layers, gpus], `duplicates` [layers].
void measure_placement(OldSlots slots, Copies copies, Loads load, Array<double> gpu_load,
                       Array<std::int64_t> duplicates) {
    const std::size_t layers = slots.shape(0), gpus = slots.shape(1), size = gpus * slots.shape(2),
                      experts = load.shape(1);
    require(load.shape(0) == layers && copies.shape(0) == layers && copies.shape(1) == experts &&
                gpu_load.size() == layers * gpus && duplicates.size() == layers,
            "loads and copies of every layer");
    require_experts(slots, experts);
    nb::gil_scoped_release unlocked;
    PlacementMetrics metrics(experts);
    for (std::size_t l = 0; l < layers; ++l)
        duplicates.data()[l] =
            metrics.measure({slots.data() + l * size, size}, {copies.data() + l * experts, experts},
                            {load.data() + l * experts, experts}, {gpu_load.data() + l * gpus, gpus});
}

void place_deepseek_layers(Loads load, std::int32_t groups, std::int32_t nodes, Slots slots) {
    require_slots(load, slots);
    require_nodes(slots, nodes);
    require(groups >= 1 && groups % nodes == 0 && load.shape(1) % groups == 0,
            "groups divide over the nodes, experts over the groups");
    each_layer(load, slots, [&](const Placed& layer, std::size_t) {
        place_deepseek(layer.load, groups, nodes, layer.gpus, layer.slots_per_gpu, layer.slots);
    });
}

void place_trtllm_layers(Loads load, Slots slots) {
    require_slots(load, slots);
    each_layer(load, slots, [&](const Placed& layer, std::size_t) {
        place_trtllm(layer.load, layer.gpus, layer.slots_per_gpu, layer.slots);
    });
}

using Rooms = nb::ndarray<nb::numpy, const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// `room` is [layers, gpus]: the slots that a GPU may fill.
void require_room(std::size_t experts, const Rooms& room, const Slots& slots) {
    require(room.shape(0) == slots.shape(0) && room.shape(1) == slots.shape(1), "one room per GPU");
    for (std::size_t l = 0; l < room.shape(0); ++l) {
        std::size_t total = 0;
        for (std::size_t g = 0; g < room.shape(1); ++g) {
            const std::int32_t r = room(l, g);
            require(r >= 0 && r <= static_cast<std::int32_t>(slots.shape(2)), "rooms within the slots");
            total += r;
        }
        require(total >= experts, "at least as much room as experts");
    }
}

std::span<const std::int32_t> room_of(const Rooms& room, std::size_t layer) {
    return std::span(room.data() + layer * room.shape(1), room.shape(1));
}

void place_ascend_default(Loads load, Rooms room, Slots slots, Array<double> peaks) {
    require_room(load.shape(1), room, slots);
    require(peaks.size() == load.shape(0), "one peak per layer");
    AscendDefault placer;
    each_layer(load, slots, [&](const Placed& layer, std::size_t l) {
        peaks.data()[l] = placer.place(layer.load, room_of(room, l), layer.slots_per_gpu, layer.slots);
    });
}

void place_swift(Loads load, OldSlots previous, Slots slots, Array<double> peaks) {
    require_previous(load, previous, slots);
    require(peaks.size() == load.shape(0), "one peak per layer");
    Swift placer;
    double mean = 0;
    for (std::size_t e = 0; e < load.shape(1); ++e) mean += load(0, e);
    mean /= static_cast<double>(slots.shape(1));
    each_layer(load, slots, [&](const Placed& layer, std::size_t l) {
        peaks.data()[l] = placer.place(layer.load, previous.data() + l * layer.size(), layer.gpus,
                                       layer.slots_per_gpu, mean, layer.slots);
    });
}

// Calls visit(samples of the layer as [count, experts], its slots, layer) for every layer, without the GIL.
template <class Array, class Visit>
void each_layers_samples(const Samples& samples, const Array& slots, Visit&& visit) {
    const std::size_t count = samples.shape(0), layers = samples.shape(1), experts = samples.shape(2);
    require(count > 0 && slots.shape(0) == layers, "samples, and one placement per layer");
    nb::gil_scoped_release unlocked;
    std::vector<double> of_layer(count * experts);
    for (std::size_t l = 0; l < layers; ++l) {
        for (std::size_t t = 0; t < count; ++t)
            std::copy_n(samples.data() + (t * layers + l) * experts, experts, of_layer.data() + t * experts);
        visit(std::span<const double>(of_layer), slots.data() + l * slots.shape(1) * slots.shape(2), l);
    }
}

void place_flashlb(Samples samples, Rooms room, Slots slots, double z, std::int32_t depth, std::int32_t width,
                   Array<double> scores) {
    require_room(samples.shape(2), room, slots);
    require(depth >= 1 && width >= 0 && z >= 0, "a group at least, and no negative width or z");
    require(scores.size() == samples.shape(1), "one score per layer");
    const auto experts = static_cast<std::int32_t>(samples.shape(2)),
               per_gpu = static_cast<std::int32_t>(slots.shape(2));
    FlashLb placer;
    each_layers_samples(samples, slots, [&](std::span<const double> of_layer, std::int32_t* out, std::size_t l) {
        scores.data()[l] = placer.place(of_layer, experts, room_of(room, l), per_gpu, {z, depth, width}, out);
    });
}

// The scores that FlashLB gives a placement.
void score_flashlb(Samples samples, OldSlots slots, Array<double> scores) {
    require(scores.size() == samples.shape(1), "one score per layer");
    require_experts(slots, samples.shape(2));
    const auto experts = static_cast<std::int32_t>(samples.shape(2)),
               gpus = static_cast<std::int32_t>(slots.shape(1)),
               per_gpu = static_cast<std::int32_t>(slots.shape(2));
    each_layers_samples(samples, slots,
                        [&](std::span<const double> of_layer, const std::int32_t* at, std::size_t l) {
                            scores.data()[l] = flash_score(of_layer, experts, gpus, per_gpu, at);
                        });
}

// Gives the rows of `slots` to GPUs so that most experts stay where `previous` has them.
void reslot_layers(OldSlots previous, std::int32_t experts, std::int32_t nodes, Slots slots) {
    require_nodes(slots, nodes);
    require(previous.size() == slots.size(), "old and new slots alike");
    require_experts(previous, experts);
    require_experts(slots, experts);
    nb::gil_scoped_release unlocked;
    const auto gpus = static_cast<std::int32_t>(slots.shape(1)),
               per_gpu = static_cast<std::int32_t>(slots.shape(2));
    for (std::size_t l = 0; l < slots.shape(0); ++l)
        reslot(previous.data() + l * gpus * per_gpu, gpus, per_gpu, experts, nodes,
               slots.data() + l * gpus * per_gpu);
}

void keep_slots_layers(OldSlots previous, Slots slots) {
    require(previous.size() == slots.size(), "old and new slots alike");
    nb::gil_scoped_release unlocked;
    const std::size_t per_gpu = slots.shape(2);
    for (std::size_t row = 0; row < slots.size(); row += per_gpu)
        keep_slots({previous.data() + row, per_gpu}, {slots.data() + row, per_gpu});
}

// Calls place(layer) for every layer, one at a time on each thread, without the GIL.
template <class Place>
void each_layer_alone(std::size_t layers, int threads, Place&& place) {
    nb::gil_scoped_release unlocked;
    for_each_problem(
        static_cast<std::int64_t>(layers), threads, [&](std::int64_t l) { place(static_cast<std::size_t>(l)); },
        1);
}

// Calls visit(task, its slots, layer) for every layer on `threads` threads, without the GIL.
template <class Visit>
void each_search(const Samples& windows, std::int32_t nodes, std::int32_t groups, double quantile,
                 const std::optional<OldSlots>& previous, const Array<const double>& floor, const Slots& slots,
                 int threads, Visit&& visit) {
    const std::size_t count = windows.shape(0), layers = windows.shape(1), experts = windows.shape(2);
    require(count > 0 && slots.shape(0) == layers && floor.size() == layers,
            "windows; a placement and floor per layer");
    require_nodes(slots, nodes);
    require(groups >= 1 && groups % nodes == 0 && experts % groups == 0,
            "groups divide over the nodes, experts over the groups");
    require(quantile <= 1, "a quantile, or less than 0 for the mean");
    if (previous) {
        require(previous->size() == slots.size(), "old and new slots alike");
        require_experts(*previous, experts);
    }
    const std::size_t size = slots.shape(1) * slots.shape(2);
    each_layer_alone(layers, threads, [&](std::size_t l) {
        std::vector<double> loads(count * experts);
        for (std::size_t t = 0; t < count; ++t)
            std::copy_n(windows.data() + (t * layers + l) * experts, experts, loads.data() + t * experts);
        const PlacementTask task{loads,
                                 static_cast<std::int32_t>(count),
                                 static_cast<std::int32_t>(experts),
                                 static_cast<std::int32_t>(slots.shape(1)),
                                 static_cast<std::int32_t>(slots.shape(2)),
                                 nodes,
                                 groups,
                                 {quantile},
                                 previous ? previous->data() + l * size : nullptr};
        visit(task, slots.data() + l * size, l);
    });
}

void place_search(Samples windows, std::int32_t nodes, std::int32_t groups, double quantile,
                  std::optional<OldSlots> previous, Array<const double> floor, double within, std::int64_t work,
                  int threads, Slots slots) {
    each_search(windows, nodes, groups, quantile, previous, floor, slots, threads,
                [&](const PlacementTask& task, std::int32_t* out, std::size_t l) {
                    const auto search = task.windows == 1 ? search_placement<true> : search_placement<false>;
                    search(task, floor.data()[l], within, work, out);
                });
}

using SearchStates = std::vector<std::vector<std::pair<std::int32_t, double>>>;

// Returns for each layer the (moves, cost) of its states, and leaves `slots` at the one numbered `reach`.
SearchStates walk_search(Samples windows, std::int32_t nodes, std::int32_t groups, double quantile,
                         OldSlots previous, Array<const double> floor, double within, std::int64_t work,
                         bool shared, Array<const std::int64_t> reach, int threads, Slots slots) {
    require(reach.size() == slots.shape(0), "a state per layer");
    SearchStates states(slots.shape(0));
    each_search(windows, nodes, groups, quantile, previous, floor, slots, threads,
                [&](const PlacementTask& task, std::int32_t* out, std::size_t l) {
                    const auto walk = task.windows == 1 ? walk_placement<true> : walk_placement<false>;
                    for (const SearchPoint& point :
                         walk(task, floor.data()[l], within, work, shared, reach.data()[l], out))
                        states[l].emplace_back(point.moves, point.cost);
                });
    return states;
}

void make_distinct(Loads load, std::int32_t nodes, Slots slots) {
    require_nodes(slots, nodes);
    require_experts(slots, load.shape(1));
    Distinct distinct;
    each_layer(load, slots, [&](const Placed& layer, std::size_t) {
        distinct.repair(layer.load, layer.gpus, layer.slots_per_gpu, nodes, layer.slots);
    });
}

// Senders and rounds of moves: `batch` says where each batch begins, `rounds` gets how many each takes.
void plan_transfer(Ids batch, Ids receiver, Ids weight, Ids first, Ids holders, Ids leaves, std::int32_t gpus,
                   std::int32_t gpus_per_node, Array<std::int32_t> holder, Array<std::int32_t> round,
                   Array<std::int32_t> rounds) {
    const auto of = [](const Ids& ids) { return std::span<const std::int32_t>(ids.data(), ids.size()); };
    const auto below = [](std::span<const std::int32_t> ids, std::size_t end) {
        return std::all_of(ids.begin(), ids.end(),
                           [&](std::int32_t i) { return i >= 0 && static_cast<std::size_t>(i) < end; });
    };
    require(gpus >= 1 && gpus_per_node >= 1, "a GPU at least, and in every node");
    require(below(of(receiver), gpus) && below(of(holders), gpus), "GPUs in range");
    require(first.size() > 0 && below(of(weight), first.size() - 1), "weights in range");
    require(below(of(first), holders.size() + 1) && std::is_sorted(first.data(), first.data() + first.size()),
            "holders by weight");
    for (const std::int32_t w : of(weight)) require(first.data()[w] < first.data()[w + 1], "a holder of each");
    require(batch.size() == rounds.size() + 1 && below(of(batch), receiver.size() + 1) &&
                std::is_sorted(batch.data(), batch.data() + batch.size()),
            "one number of rounds per batch");
    require(weight.size() == receiver.size() && holder.size() == receiver.size() &&
                round.size() == receiver.size() && leaves.size() == holders.size(),
            "an answer per move");
    nb::gil_scoped_release unlocked;
    Transfer transfer;
    for (std::size_t b = 0; b < rounds.size(); ++b) {
        const std::size_t begin = batch.data()[b], size = batch.data()[b + 1] - begin;
        rounds.data()[b] = transfer.plan({of(receiver).subspan(begin, size), of(weight).subspan(begin, size),
                                          of(first), of(holders), of(leaves), gpus, gpus_per_node},
                                         holder.data() + begin, round.data() + begin);
    }
}

using Tokens = nb::ndarray<nb::numpy, const std::int64_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

std::span<std::int32_t> slots_of(const Slots& slots, std::size_t layer) {
    const std::size_t per_layer = slots.shape(1) * slots.shape(2);
    return std::span(slots.data() + layer * per_layer, per_layer);
}

void place_for_loads(Loads load, Rooms room, std::int64_t tokens, std::int32_t top_k, int threads, Slots slots) {
    require(load.shape(0) == slots.shape(0), "one load per layer");
    require_room(load.shape(1), room, slots);
    require(tokens >= 1 && top_k >= 1 && top_k <= static_cast<std::int32_t>(load.shape(1)), "tokens with choices");
    each_layer_alone(load.shape(0), threads, [&](std::size_t l) {
        const std::span of_layer(load.data() + l * load.shape(1), load.shape(1));
        place_for_liveness(liveness_of_loads(of_layer, tokens, top_k), room_of(room, l), slots_of(slots, l));
    });
}

// `tokens` is [layers, batches, experts].
void require_batches(const Tokens& tokens, const Slots& slots) {
    require(tokens.shape(0) == slots.shape(0) && tokens.shape(1) > 0 && tokens.shape(2) > 0, "batches per layer");
    const std::uint64_t most = std::uint64_t{1} << kTokenBits;
    require(std::all_of(tokens.data(), tokens.data() + tokens.size(),
                        [&](std::int64_t t) { return static_cast<std::uint64_t>(t) < most; }),
            "token counts in range");
}

std::span<const std::int64_t> batches_of(const Tokens& tokens, std::size_t layer) {
    const std::size_t per_layer = tokens.shape(1) * tokens.shape(2);
    return std::span(tokens.data() + layer * per_layer, per_layer);
}

void place_for_live_batches(Tokens tokens, Rooms room, int threads, Slots slots) {
    require_batches(tokens, slots);
    require_room(tokens.shape(2), room, slots);
    each_layer_alone(tokens.shape(0), threads, [&](std::size_t l) {
        place_for_liveness(liveness_of_batches(batches_of(tokens, l), tokens.shape(2)), room_of(room, l),
                           slots_of(slots, l));
    });
}

// Of any objective; without a pricing, of tokens alone.
void anneal_objective(Tokens tokens, Rooms room, std::int64_t work, int threads, Slots slots,
                      const Pricing* pricing) {
    constexpr std::int64_t kRoutingWork = 500;
    require_batches(tokens, slots);
    require_experts(slots, tokens.shape(2));
    const auto experts = static_cast<std::int32_t>(tokens.shape(2)),
               gpus = static_cast<std::int32_t>(slots.shape(1));
    require(!pricing || pricing->gpus() == gpus, "one slowness per GPU");
    require_room(tokens.shape(2), room, slots);
    with_words(gpus, [&]<int W>() {
        const auto solve = [&](const Layer& layer, const std::int64_t* of) {
            thread_local std::vector<std::int64_t> routed;
            routed.assign(layer.physical_slots(), 0);
            if (!pricing) {
                Flow<W> flow(layer, routed.data());
                flow.solve(of);
                return static_cast<double>(flow.makespan());
            }
            Makespan<W>& solver = makespan_solver<W>();
            solver.solve(*pricing, layer, of, routed.data(), kRoutingWork);
            return solver.makespan();
        };
        each_layer_alone(tokens.shape(0), threads, [&](std::size_t l) {
            place_for_solved(batches_of(tokens, l), room_of(room, l), work, experts, slots_of(slots, l), solve);
        });
    });
}

// A processor without what the core was compiled for would stop the process at some instruction.
void check_processor() {
#if defined(__x86_64__) && defined(__AVX2__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi2"))
        throw nb::import_error(
            "eplb_opt was compiled for processors with AVX2 and BMI2, which this one lacks; "
            "install it from source with --config-settings=cmake.define.EPLB_OPT_MARCH=x86-64");
#endif
}

}  // namespace

NB_MODULE(_core, m) {
    check_processor();
    m.doc() = "Compiled solvers of eplb-opt; called by the package, not part of its public interface.";
    m.attr("MAX_GPUS") = kMaxGpus;
    m.attr("MAX_EXPERTS") = kMaxExperts;
    m.attr("MAX_TOKENS_PER_EXPERT") = (std::int64_t{1} << kTokenBits) - 1;

    nb::class_<Placement>(m, "Placement").def(nb::new_(&make_placement), "slots"_a.noconvert(), "experts"_a);
    nb::class_<Answer>(m, "Answer")
        .def(nb::new_(&make_answer), "tokens"_a.noconvert(), "activated"_a.noconvert(), "makespan"_a.noconvert(),
             "bound"_a.noconvert(), "status"_a.noconvert(), "proved_by"_a.noconvert(),
             "certificate"_a.noconvert());

    nb::class_<Pricing>(m, "Pricing")
        .def(nb::new_(&make_pricing), "pieces"_a.noconvert(), "curve_tokens"_a.noconvert(),
             "curve_times"_a.noconvert(), "tile_tokens"_a, "slowness"_a.noconvert(), "split"_a);

    m.def("route_matching", &route_matching, "placement"_a, "tokens"_a, "answer"_a, "threads"_a,
          "lexicographic"_a);
    m.def("route_flow", &route_flow, "placement"_a, "tokens"_a, "answer"_a, "threads"_a);
    m.def("route_metro", &route_metro, "placement"_a, "tokens"_a, "answer"_a, "threads"_a,
          "order"_a.noconvert().none());
    m.def("route_shares", &route_shares, "placement"_a, "tokens"_a, "answer"_a, "threads"_a, "pricing"_a,
          "first"_a.noconvert(), "slots"_a.noconvert(), "ends"_a.noconvert().none());
    m.def("price", &price, "tokens"_a.noconvert(), "pricing"_a, "makespan"_a.noconvert());
    m.def("route_makespan", &route_makespan, "placement"_a, "tokens"_a, "answer"_a, "threads"_a, "pricing"_a,
          "work"_a);
    m.def("prove_makespan", &prove_makespan, "placement"_a, "tokens"_a, "answer"_a, "threads"_a, "pricing"_a,
          "work"_a);
    m.def("fit_whole_experts", &fit_experts<Completion>, "placement"_a, "layer"_a, "tokens"_a.noconvert(),
          "routed"_a.noconvert(), "pricing"_a, "target"_a, "nodes"_a);
    m.def("fit_patterns", &fit_experts<PatternSearch>, "placement"_a, "layer"_a, "tokens"_a.noconvert(),
          "routed"_a.noconvert(), "pricing"_a, "target"_a, "work"_a);
    m.def("refine_makespan", &refine_makespan, "placement"_a, "layer"_a, "tokens"_a.noconvert(),
          "routed"_a.noconvert(), "pricing"_a, "number"_a, "work"_a);
    m.def("prove_activations", &prove<Matching>, "placement"_a, "tokens"_a, "answer"_a, "threads"_a);
    m.def("prove_tokens", &prove<Flow>, "placement"_a, "tokens"_a, "answer"_a, "threads"_a);
    m.def("assign", &assign, "placement"_a, "routed"_a.noconvert(), "topk_ids"_a.noconvert(),
          "physical"_a.noconvert());
    m.def("count_copies", &count_copies_of_layers, "slots"_a.noconvert(), "copies"_a.noconvert());
    m.def("measure_placement", &measure_placement, "slots"_a.noconvert(), "copies"_a.noconvert(),
          "load"_a.noconvert(), "gpu_load"_a.noconvert(), "duplicates"_a.noconvert());
    m.def("place_deepseek", &place_deepseek_layers, "load"_a.noconvert(), "groups"_a, "nodes"_a,
          "slots"_a.noconvert());
    m.def("place_trtllm", &place_trtllm_layers, "load"_a.noconvert(), "slots"_a.noconvert());
    m.def("place_ascend_default", &place_ascend_default, "load"_a.noconvert(), "room"_a.noconvert(),
          "slots"_a.noconvert(), "peaks"_a.noconvert());
    m.def("place_swift", &place_swift, "load"_a.noconvert(), "previous"_a.noconvert(), "slots"_a.noconvert(),
          "peaks"_a.noconvert());
    m.def("place_flashlb", &place_flashlb, "samples"_a.noconvert(), "room"_a.noconvert(), "slots"_a.noconvert(),
          "z"_a, "depth"_a, "width"_a, "scores"_a.noconvert());
    m.def("score_flashlb", &score_flashlb, "samples"_a.noconvert(), "slots"_a.noconvert(), "scores"_a.noconvert());
    m.def("reslot", &reslot_layers, "previous"_a.noconvert(), "experts"_a, "nodes"_a, "slots"_a.noconvert());
    m.def("keep_slots", &keep_slots_layers, "previous"_a.noconvert(), "slots"_a.noconvert());
    m.def("place_search", &place_search, "windows"_a.noconvert(), "nodes"_a, "groups"_a, "quantile"_a,
          "previous"_a.noconvert().none(), "floor"_a.noconvert(), "within"_a, "work"_a, "threads"_a,
          "slots"_a.noconvert());
    m.def("walk_search", &walk_search, "windows"_a.noconvert(), "nodes"_a, "groups"_a, "quantile"_a,
          "previous"_a.noconvert(), "floor"_a.noconvert(), "within"_a, "work"_a, "shared"_a, "reach"_a.noconvert(),
          "threads"_a, "slots"_a.noconvert());
    m.def("make_distinct", &make_distinct, "load"_a.noconvert(), "nodes"_a, "slots"_a.noconvert());
    m.def("plan_transfer", &plan_transfer, "batch"_a.noconvert(), "receiver"_a.noconvert(), "weight"_a.noconvert(),
          "first"_a.noconvert(), "holders"_a.noconvert(), "leaves"_a.noconvert(), "gpus"_a, "gpus_per_node"_a,
          "holder"_a.noconvert(), "round"_a.noconvert(), "rounds"_a.noconvert());
    m.def("place_for_loads", &place_for_loads, "load"_a.noconvert(), "room"_a.noconvert(), "tokens"_a, "top_k"_a,
          "threads"_a, "slots"_a.noconvert());
    m.def("place_for_live_batches", &place_for_live_batches, "tokens"_a.noconvert(), "room"_a.noconvert(),
          "threads"_a, "slots"_a.noconvert());
    m.def("anneal_objective", &anneal_objective, "tokens"_a.noconvert(), "room"_a.noconvert(), "work"_a,
          "threads"_a, "slots"_a.noconvert(), "pricing"_a.none());
}
