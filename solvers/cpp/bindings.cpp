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

#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "assign.hpp"
#include "eplb.hpp"
#include "flow.hpp"
#include "makespan.hpp"
#include "matching.hpp"
#include "metro.hpp"
#include "parallel.hpp"
#include "placement.hpp"
#include "pricing.hpp"

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
        std::int64_t count = 0;
        for (int s = 0; s < layer.slots_per_gpu; ++s) count += routed[s] != 0;
        activated[g] = count;
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
        problem.bound = std::numeric_limits<double>::quiet_NaN();
        problem.status = kFeasible;
        problem.proved_by = static_cast<std::int8_t>(Proof::none);
        std::fill_n(problem.certificate, problem.layer.gpus, false);
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

void place_deepseek_layers(
    nb::ndarray<nb::numpy, const double, nb::ndim<2>, nb::c_contig, nb::device::cpu> load,
    nb::ndarray<nb::numpy, std::int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu> slots) {
    require(load.shape(0) == slots.shape(0), "one load per layer");
    require(load.shape(1) <= slots.shape(1) * slots.shape(2), "at least as many slots as experts");
    const auto gpus = static_cast<std::int32_t>(slots.shape(1)),
               per_gpu = static_cast<std::int32_t>(slots.shape(2));
    nb::gil_scoped_release unlocked;
    for (std::size_t l = 0; l < load.shape(0); ++l)
        place_deepseek(std::span(load.data() + l * load.shape(1), load.shape(1)), gpus, per_gpu,
                       slots.data() + l * gpus * per_gpu);
}

}  // namespace

NB_MODULE(_core, m) {
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
    m.def("route_makespan", &route_makespan, "placement"_a, "tokens"_a, "answer"_a, "threads"_a, "pricing"_a,
          "work"_a);
    m.def("prove_makespan", &prove_makespan, "placement"_a, "tokens"_a, "answer"_a, "threads"_a, "pricing"_a,
          "work"_a);
    m.def("prove_activations", &prove<Matching>, "placement"_a, "tokens"_a, "answer"_a, "threads"_a);
    m.def("prove_tokens", &prove<Flow>, "placement"_a, "tokens"_a, "answer"_a, "threads"_a);
    m.def("assign", &assign, "placement"_a, "routed"_a.noconvert(), "topk_ids"_a.noconvert(),
          "physical"_a.noconvert());
    m.def("place_deepseek", &place_deepseek_layers, "load"_a.noconvert(), "slots"_a.noconvert());
}
