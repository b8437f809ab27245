"""The front door: `solve_routing`, `Router`, and the answers that they give."""

from __future__ import annotations

import array
import copy
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.demand import count_tokens
from eplb_opt.errors import EplbError, InfeasibleError, InvalidTokensError
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routing import Router, Routing, solve_routing
from eplb_opt.status import Status
from eplb_opt.testing import Problem, check_routing, problems
from eplb_opt.trace import TokenTrace

MOST = _core.MAX_TOKENS_PER_EXPERT
FIELDS = ("tokens", "activated", "makespan", "bound", "status", "certificate")

# Methods that need the tokens alone, and the objectives that they solve.
METHODS = [
    ("matching", "activations"),
    ("matching:lexicographic=true", "activations"),
    ("flow", "tokens"),
    ("metro", "activations"),
    ("metro:order=random,seed=1", "tokens"),
    ("uniform", "activations"),
    ("uniform", "tokens"),
    ("random", "activations"),
]
methods = pytest.mark.parametrize(("method", "objective"), METHODS)
KINDS = st.sampled_from(METHODS)


def same(left: Routing, right: Routing) -> bool:
    """Whether two answers agree in every array."""
    return all(
        np.array_equal(getattr(left, name), getattr(right, name), equal_nan=True)
        if name == "bound"
        else np.array_equal(getattr(left, name), getattr(right, name))
        for name in FIELDS
    )


# --- answers ---


def test_four_gpus() -> None:
    """A,B | A,C | B,D | C,D with four tokens each: equal split activates 2 a GPU, the optimum 1."""
    placement = Placement([[0, 1], [0, 2], [1, 3], [2, 3]])
    uniform = solve_routing(placement, [4, 4, 4, 4], method="uniform")
    best = solve_routing(placement, [4, 4, 4, 4])
    assert uniform.activated.tolist() == [2, 2, 2, 2]
    assert best.activated.tolist() == [1, 1, 1, 1]
    assert uniform.gpu_tokens().tolist() == best.gpu_tokens().tolist() == [4, 4, 4, 4]
    assert (float(uniform.bound), float(uniform.gap)) == (1.0, 1.0)
    assert uniform.status == Status.FEASIBLE
    assert (float(best.bound), float(best.gap)) == (1.0, 0.0)
    assert best.status == Status.OPTIMAL


@given(problems(), KINDS)
def test_every_method_routes_every_token(problem: Problem, kind: tuple[str, str]) -> None:
    """Answers have the documented shapes and types, serve every token, and prove their bound."""
    method, objective = kind
    placement, tokens = problem.placement, problem.tokens
    routing = solve_routing(placement, tokens, method=method, objective=objective)
    check_routing(placement, tokens, routing)
    lead = tokens.shape[:-1]
    gpus = (*lead, placement.num_gpus)
    for values, dtype, shape in (
        (routing.tokens, np.int64, (*gpus, placement.slots_per_gpu)),
        (routing.activated, np.int64, gpus),
        (routing.makespan, np.float64, lead),
        (routing.bound, np.float64, lead),
        (routing.gap, np.float64, lead),
        (routing.status, np.int8, lead),
        (routing.certificate, np.bool_, gpus),
        (routing.gpu_tokens(), np.int64, gpus),
        (routing.expert_tokens(), np.int64, tokens.shape),
    ):
        assert isinstance(values, np.ndarray)
        assert values.dtype == dtype
        assert values.shape == shape
    assert np.array_equal(routing.expert_tokens(), tokens)
    assert (routing.gap >= 0).all()
    assert np.array_equal(routing.status == Status.OPTIMAL, routing.makespan == routing.bound)


@given(problems(layered=True), KINDS)
def test_axes_are_independent_problems(problem: Problem, kind: tuple[str, str]) -> None:
    """Layers solved one by one, on 2-D placements, give what they give together."""
    method, objective = kind
    if method == "random" or "order=random" in method:
        method = "metro"  # draws depend on the shape
    together = solve_routing(problem.placement, problem.tokens, method=method, objective=objective)
    for layer in range(problem.placement.num_layers):
        placement = Placement(problem.placement.slots[layer], problem.placement.num_experts)
        tokens = problem.tokens[..., layer, :]
        alone = solve_routing(placement, tokens, method=method, objective=objective)
        assert np.array_equal(alone.tokens, together.tokens[..., layer, :, :])
        assert np.array_equal(alone.makespan, together.makespan[..., layer])
        assert np.array_equal(alone.bound, together.bound[..., layer])


@methods
def test_leading_axes_broadcast(method: str, objective: str) -> None:
    """Any number of leading axes, of any length, zero included."""
    placement = Placement([[[0, 1], [0, 2]], [[2, 1], [1, 0]]])
    tokens = np.random.default_rng(0).integers(0, 9, (3, 0, 1, 2, 3))
    for shape in ((2, 3), (5, 2, 3), (3, 1, 4, 2, 3), (0, 2, 3), (3, 0, 2, 3)):
        tokens = np.random.default_rng(0).integers(0, 9, shape)
        routing = solve_routing(placement, tokens, method=method, objective=objective)
        assert routing.tokens.shape == (*shape[:-1], 2, 2)
        check_routing(placement, tokens, routing)
        assert np.array_equal(routing.expert_tokens(), tokens)
        assert routing.summary().problems == math.prod(shape[:-1])


@methods
def test_threads_do_not_change_the_answer(method: str, objective: str) -> None:
    """Two threads give what one gives, over enough problems to use both."""
    rng = np.random.default_rng(5)
    placement = Placement(rng.permuted(np.arange(24) % 16, axis=0).reshape(6, 4))
    tokens = rng.integers(0, 4, (200, 16))
    one, two = (
        solve_routing(placement, tokens, method=method, objective=objective, threads=threads)
        for threads in (1, 2)
    )
    assert same(one, two)


@methods
def test_no_tokens_are_routed_to_nowhere(method: str, objective: str) -> None:
    """A batch without tokens activates nothing; its bound, its gap and all of its shares are 0."""
    placement = Placement([[[0, 1], [0, 2]], [[2, 1], [1, 0]]])
    routing = solve_routing(placement, np.zeros((2, 3), int), method=method, objective=objective)
    assert not routing.tokens.any()
    assert routing.makespan.tolist() == routing.bound.tolist() == routing.gap.tolist() == [0, 0]
    assert (routing.status == Status.OPTIMAL).all()
    assert routing.summary().balance == 1.0


@methods
def test_no_gpu_alive(method: str, objective: str) -> None:
    """With every GPU dead there is nothing to route, and that is an answer."""
    placement = Placement([[-1, -1], [-1, -1]], num_experts=3, allow_missing=True)
    routing = solve_routing(placement, [0, 0, 0], method=method, objective=objective)
    check_routing(placement, [0, 0, 0], routing)
    assert float(routing.makespan) == 0


@methods
def test_the_most_experts_with_the_most_tokens(method: str, objective: str) -> None:
    """4,096 live experts on one GPU with the most tokens each are counted exactly."""
    placement = Placement([range(_core.MAX_EXPERTS)])
    tokens = np.full(_core.MAX_EXPERTS, MOST)
    routing = solve_routing(placement, tokens, method=method, objective=objective)
    check_routing(placement, tokens, routing)
    assert routing.activated.tolist() == [_core.MAX_EXPERTS]
    assert float(routing.gap) == 0


def test_sums_beyond_32_bits() -> None:
    """Counts whose sums exceed 2^31 are balanced to the token."""
    routing = solve_routing(Placement([[0, 1], [0, 1]]), [2**31, 2**31 + 1], objective="tokens")
    assert sorted(routing.gpu_tokens().tolist()) == [2**31, 2**31 + 1]


def test_bound_on_request() -> None:
    """A rule proves nothing unless asked; an exact method always proves its answer."""
    placement = Placement([[0, 1], [0, 1]])
    for method, proven in (("uniform", False), ("metro", False), ("optimal", True)):
        routing = solve_routing(placement, [3, 3], method=method, bound=False)
        assert bool(np.isnan(routing.bound)) is not proven
        assert bool(np.isnan(routing.gap)) is not proven
        assert routing.certificate.any() == proven
        assert (routing.status == Status.OPTIMAL) == proven
        assert float(solve_routing(placement, [3, 3], method=method, bound=True).bound) == 1.0


@given(problems())
def test_optimal_picks_the_method_of_the_objective(problem: Problem) -> None:
    """`optimal` is matching for activations and flow for tokens; a rule never beats it."""
    for objective, method in (("activations", "matching"), ("tokens", "flow")):
        best = solve_routing(problem.placement, problem.tokens, objective=objective)
        named = solve_routing(
            problem.placement, problem.tokens, objective=Objective.preset(objective), method=method
        )
        assert same(best, named)
        uniform = solve_routing(
            problem.placement, problem.tokens, objective=objective, method="uniform"
        )
        assert (best.makespan <= uniform.makespan).all()
        assert np.array_equal(uniform.bound, best.makespan)


# --- what comes in ---


@methods
def test_every_way_to_write_the_same_tokens(method: str, objective: str) -> None:
    """Lists, other integers, views and read-only or misaligned arrays route alike."""
    placement = Placement([[[0, 1], [0, 2]], [[2, 1], [1, 0]]])
    tokens = np.random.default_rng(2).integers(0, 100, (4, 2, 3))
    frozen = tokens.copy()
    frozen.flags.writeable = False
    packed = np.frombuffer(b"\0" + tokens.tobytes(), dtype=np.int64, offset=1).reshape(4, 2, 3)
    wide = np.repeat(tokens, 2, axis=2)
    router = Router(placement, method=method, objective=objective)
    expected = router.route(tokens, bound=True)
    out = router.allocate(tokens.shape)
    for variant in (
        tokens.tolist(),
        tuple(map(tuple, tokens.tolist())),
        tokens.astype(np.int32),
        tokens.astype(np.uint64),
        tokens.astype(">i8"),
        np.asfortranarray(tokens),
        tokens[::-1][::-1],
        wide[..., ::2],
        frozen,
        packed,
        np.array(tokens, dtype=np.longlong),
    ):
        assert same(router.route(variant, bound=True), expected)
        out.tokens[:] = -7
        assert router.route(variant, out=out, bound=True) is out
        assert same(out, expected)


@methods
def test_inputs_are_never_written_to(method: str, objective: str) -> None:
    """The tokens and the placement are the same after routing."""
    placement = Placement([[0, 1, 2], [0, 2, 1]])
    slots = placement.slots.copy()
    tokens = np.array([[5, 7, 1], [0, 2, 2]])
    before = tokens.copy()
    solve_routing(placement, tokens, method=method, objective=objective)
    assert np.array_equal(tokens, before)
    assert np.array_equal(placement.slots, slots)


@methods
@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([[1.0, 2, 3, 4]], InvalidTokensError, "integers, not float64"),
        ([[math.nan, 2, 3, 4]], InvalidTokensError, "integers, not float64"),
        ([[True, False, True, True]], InvalidTokensError, "integers, not bool"),
        ([["1", "2", "3", "4"]], InvalidTokensError, "integers, not <U1"),
        ([[1, 2, -3, 4]], InvalidTokensError, r"batch \(0,\), expert 2 has -3 tokens"),
        ([[1, MOST + 1, 3, 4]], InvalidTokensError, r"expert 1 has \d+ tokens; counts are 0 to"),
        ([[2**63 - 1] * 4], InvalidTokensError, "expert 0 has 9223372036854775807 tokens"),
        ([[-(2**63)] * 4], InvalidTokensError, "expert 0 has -9223372036854775808 tokens"),
        (
            np.array([[0, 0, 2**64 - 1, 0]], np.uint64),
            InvalidTokensError,
            "has 18446744073709551615",
        ),
        ([[0, 0, 0, 1]], InfeasibleError, r"batch \(0,\), expert 3 has tokens but no replica"),
        ([[1, 2, 3]], InvalidTokensError, r"ending in \(4,\).*shape \(1, 3\)"),
        (7, InvalidTokensError, r"ending in \(4,\)"),
        (None, InvalidTokensError, "integers, not object"),
    ],
)
@pytest.mark.parametrize("reuse", [False, True])
def test_bad_tokens_are_refused(
    method: str, objective: str, tokens: Any, error: type[EplbError], message: str, reuse: bool
) -> None:
    """What is wrong is said, and where, with and without an answer to reuse."""
    placement = Placement([[0, 1], [2, 0]], num_experts=4, allow_missing=True)
    router = Router(placement, method=method, objective=objective)
    out = router.allocate((1, 4)) if reuse else None
    with pytest.raises(error, match=message):
        router.route(tokens, out=out)


@methods
def test_the_first_bad_problem_is_named(method: str, objective: str) -> None:
    """Of several bad problems the first one is named, on any number of threads."""
    placement = Placement([[0, 1], [1, 0]])
    tokens = np.ones((100, 2), np.int64)
    tokens[[71, 42, 99], 1] = -1
    for threads in (1, 2):
        with pytest.raises(InvalidTokensError, match=r"batch \(42,\), expert 1"):
            solve_routing(placement, tokens, method=method, objective=objective, threads=threads)


@methods
@pytest.mark.parametrize("shape", [(3, 2), (6,), (1, 2, 3), (2, 3, 1), (2, 2, 3)])
def test_tokens_must_have_the_shape_of_out(
    method: str, objective: str, shape: tuple[int, ...]
) -> None:
    """Tokens of another shape are refused even when they are as many numbers."""
    placement = Placement([[[0, 1], [0, 2]], [[2, 1], [1, 0]]])
    router = Router(placement, method=method, objective=objective)
    out = router.allocate((2, 3))
    tokens = np.arange(math.prod(shape)).reshape(shape)
    for given_tokens in (tokens, tokens.tolist()):
        with pytest.raises(InvalidTokensError):
            router.route(given_tokens, out=out)


@methods
@pytest.mark.parametrize("shape", [(4, 3), (3,), (2, 4), (2, 2)])
def test_answers_fit_the_placement(method: str, objective: str, shape: tuple[int, ...]) -> None:
    """An answer for tokens that the placement does not take is refused before or in `route`."""
    placement = Placement([[[0, 1], [0, 2]], [[2, 1], [1, 0]]])
    router = Router(placement, method=method, objective=objective)
    with pytest.raises(InvalidTokensError):
        router.route(np.ones(shape, np.int64), out=router.allocate(shape))


@methods
def test_a_buffer_that_is_no_array(method: str, objective: str) -> None:
    """The standard library's arrays are as good as lists."""
    router = Router(Placement([[0, 1], [0, 2]]), method=method, objective=objective)
    out = router.allocate((3,))
    expected = router.route([3, 1, 1])
    assert same(router.route(array.array("q", [3, 1, 1]), out=out), expected)


# --- Router ---


@given(problems(), KINDS)
def test_reused_answers_forget_the_last_batch(problem: Problem, kind: tuple[str, str]) -> None:
    """Whatever an answer held before, routing into it gives what a new one gives."""
    method, objective = kind
    router = Router(problem.placement, method=method, objective=objective)
    other = np.minimum(problem.tokens[..., ::-1], 5) + 1
    if not problem.placement.copies.all():
        other = other * (problem.tokens > 0)
    for first_bound in (True, False):
        for bound in (True, False):
            out = router.allocate(problem.tokens.shape)
            router.route(other, out=out, bound=first_bound)
            router.route(problem.tokens, out=out, bound=bound)
            assert same(out, router.route(problem.tokens, bound=bound))


def test_an_answer_can_pass_from_method_to_method() -> None:
    """Routers of one placement and objective may share an answer; nothing of the last remains."""
    placement = Placement([[0, 1], [0, 2]])
    tokens = np.array([5, 2, 2])
    routers = [Router(placement, method=name) for name in ("optimal", "metro", "uniform", "random")]
    out = routers[0].allocate(tokens.shape)
    for router in (*routers, *reversed(routers)):
        router.route(tokens, out=out)
        assert same(out, router.route(tokens))


def test_an_answer_belongs_to_an_objective_by_value() -> None:
    """An objective of one's own making is the preset of its name, for shared answers too."""
    placement = Placement([[0, 1], [0, 2]])
    by_name, by_value = (
        Router(placement),
        Router(placement, objective=Objective.preset("activations")),
    )
    out = by_name.allocate((3,))
    assert same(by_value.route([1, 2, 3], out=out), by_name.route([1, 2, 3]))


def test_an_answer_belongs_to_its_placement_and_objective() -> None:
    """An answer allocated for another placement or objective is refused."""
    placement = Placement([[0, 1], [0, 2]])
    router = Router(placement)
    for other in (
        Router(Placement([[0, 1], [2, 0]])),
        Router(placement, objective="tokens"),
    ):
        with pytest.raises(ValueError, match=r"another placement|objective"):
            router.route([1, 1, 1], out=other.allocate((3,)))


def test_allocated_answers_are_unsolved() -> None:
    """Before it is routed into, an answer holds nothing and says so."""
    out = Router(Placement([[0, 1], [0, 2]])).allocate((4, 3))
    assert (out.status == Status.UNSOLVED).all()
    assert not out.tokens.any()
    assert np.isnan(out.bound).all()


def test_router_remembers_what_it_was_bound_to() -> None:
    """Placement, objective, method and threads can be read back."""
    placement = Placement([[0, 1], [0, 2]])
    router = Router(placement, objective="tokens", method="metro:order=random,seed=3", threads=2)
    assert router.placement is placement
    assert router.objective == Objective.preset("tokens")
    assert str(router.method) == "Metro(order='random', seed=3)"
    assert router.threads == 2


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_no_router(threads: int) -> None:
    """At least one thread."""
    with pytest.raises(ValueError, match=f"1 to 1024, not {threads}"):
        solve_routing(Placement([[0]]), [1], threads=threads)


def test_unknown_objective() -> None:
    """A misspelt objective is an error that lists the presets."""
    with pytest.raises(ValueError, match="known: activations, tokens"):
        solve_routing(Placement([[0]]), [1], objective="time")


@given(problems(), KINDS)
def test_same_input_same_answer(problem: Problem, kind: tuple[str, str]) -> None:
    """Two routers of one kind agree, call after call."""
    method, objective = kind
    first, second = (
        Router(problem.placement, method=method, objective=objective) for _ in range(2)
    )
    answer = first.route(problem.tokens)
    assert same(answer, second.route(problem.tokens))
    assert same(answer, first.route(problem.tokens))


# --- the answer's own methods ---


@given(problems(), KINDS)
def test_pickled_and_copied_answers_are_equal(problem: Problem, kind: tuple[str, str]) -> None:
    """A pickled answer is complete: arrays, placement, objective; it can be routed into again."""
    method, objective = kind
    router = Router(problem.placement, method=method, objective=objective)
    routing = router.route(problem.tokens, bound=True)
    for again in (pickle.loads(pickle.dumps(routing)), copy.deepcopy(routing)):
        assert same(routing, again)
        assert again.placement == routing.placement
        assert again.objective == routing.objective
        assert again.summary() == routing.summary()
        twin = Router(again.placement, method=method, objective=again.objective)
        again.tokens[...] = -1
        assert same(twin.route(problem.tokens, out=again, bound=True), routing)


def test_assign_worked_example() -> None:
    """An expert's first tokens go to its lowest slot, the next to the next; padding stays -1."""
    routing = solve_routing(Placement([[0, 1], [0, 2]]), [3, 1, 0], objective="tokens")
    assert routing.tokens.tolist() == [[1, 1], [2, 0]]
    ids = [[0, 1], [0, -1], [0, -1]]
    assert routing.assign(ids).tolist() == [[0, 1], [2, -1], [2, -1]]
    assert routing.assign([ids]).tolist() == [[[0, 1], [2, -1], [2, -1]]]


@given(st.data(), KINDS)
def test_assign_honours_the_shares(data: st.DataObject, kind: tuple[str, str]) -> None:
    """Every id gets a slot of its expert, every slot its share, in order; nothing is written to."""
    method, objective = kind
    problem = data.draw(problems(max_gpus=5, max_experts=8))
    placement = problem.placement
    lead = problem.tokens.shape[:-1]
    rows, k = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 3))
    seed = data.draw(st.integers(0, 2**32 - 1))
    ids = np.random.default_rng(seed).integers(-1, placement.num_experts, (*lead, rows, k))
    before = ids.copy()
    tokens = count_tokens(ids, placement.num_experts)
    routing = solve_routing(placement, tokens, method=method, objective=objective)
    physical = routing.assign(ids)
    assert physical.dtype == np.int32
    assert physical.shape == ids.shape
    assert np.array_equal(ids, before)
    for at in np.ndindex(*lead):
        layer = at[-1] if placement.layered else 0
        slots = physical[at].ravel().tolist()
        taken = [slots.count(slot) for slot in range(placement.expert_of.shape[1])]
        assert taken == routing.tokens[at].ravel().tolist()
        for expert in range(placement.num_experts):
            served = physical[at][ids[at] == expert].tolist()
            assert served == sorted(served)
            assert {int(placement.expert_of[layer, slot]) for slot in served} <= {expert}
        assert (physical[at][ids[at] == -1] == -1).all()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 1], [0, -1]], r"topk_ids of problem \(\).*expert 0"),
        ([[0, 1], [0, 0], [1, -1]], r"expert 1"),
        ([[0, 1], [0, 0], [2, -1]], r"expert 2"),
        ([[-1, -1]], r"expert 0"),
        ([0, 1, 0, 0], r"\[..., rows, k\], not int64 of shape"),
        ([[0, 1], [0, 3]], "topk_ids.*is 3"),
        ([[0, 1], [0, -2]], "is -2"),
        ([[0.0, 1.0]], "not float64"),
    ],
)
def test_assign_refuses_other_ids(ids: Any, message: str) -> None:
    """Ids whose counts are not those that were routed are refused with the expert."""
    routing = solve_routing(Placement([[0, 1], [0, 2]]), [3, 1, 0], objective="tokens")
    with pytest.raises(InvalidTokensError, match=message):
        routing.assign(ids)


def test_assign_names_the_problem() -> None:
    """In a batch of problems, the one whose ids differ is named by its index."""
    placement = Placement([[[0, 1]], [[1, 0]]])
    routing = solve_routing(placement, np.ones((3, 2, 2), int))
    ids = np.tile(np.array([[0], [1]]), (3, 2, 1, 1))
    assert routing.assign(ids).shape == (3, 2, 2, 1)
    ids[2, 1, 0] = 1
    with pytest.raises(InvalidTokensError, match=r"problem \(2, 1\).*expert 1"):
        routing.assign(ids)
    with pytest.raises(InvalidTokensError, match=r"must be \[3, 2\] \+ \[rows, k\]"):
        routing.assign(ids[:2])


def test_assign_without_problems_or_rows() -> None:
    """An empty batch is assigned to an empty array."""
    placement = Placement([[0, 1], [0, 2]])
    none = solve_routing(placement, np.zeros((0, 3), int))
    assert none.assign(np.zeros((0, 4, 2), int)).shape == (0, 4, 2)
    idle = solve_routing(placement, np.zeros((2, 3), int))
    assert idle.assign(np.zeros((2, 0, 2), int)).shape == (2, 0, 2)
    assert idle.assign(np.full((2, 5, 2), -1)).tolist() == np.full((2, 5, 2), -1).tolist()


def test_assign_real_tokens(recorded_tokens: dict[str, TokenTrace]) -> None:
    """Recorded tokens are assigned to slots of their experts, to the shares of the answer."""
    for trace in recorded_tokens.values():
        ids = trace.batches(64)[:4]
        slots = np.arange(8 * trace.num_experts // 4).reshape(8, -1) % trace.num_experts
        placement = Placement(np.tile(slots, (trace.num_layers, 1, 1)))
        routing = solve_routing(placement, count_tokens(ids, trace.num_experts), objective="tokens")
        physical = routing.assign(ids)
        layer = np.arange(trace.num_layers)[:, None, None]
        assert np.array_equal(placement.expert_of[layer, physical], ids)
        taken = count_tokens(physical, slots.size)
        assert np.array_equal(taken.reshape(routing.tokens.shape), routing.tokens)


def test_summary_worked_example() -> None:
    """Each figure of a small batch, by hand."""
    placement = Placement([[[0, 1], [0, 2]], [[0, 2], [1, 2]]])
    tokens = np.array([[[6, 0, 0], [0, 2, 4]], [[3, 1, 1], [0, 0, 0]]])
    summary = solve_routing(placement, tokens, method="uniform").summary()
    # Activated, by batch and layer: [1, 1], [1, 2]; [2, 2], [0, 0].
    assert summary.problems == 4
    assert summary.live_experts == 6 / 4
    assert summary.replicas_available == (2 + 3 + 4 + 0) / 4
    assert summary.replicas_activated == (2 + 3 + 4 + 0) / 4
    assert summary.tokens_per_activated == 17 / 9
    assert summary.makespan == ((1 + 2) + (2 + 0)) / 2
    assert summary.bound == ((1 + 1) + (2 + 0)) / 2
    assert summary.gap == 5 / 4 - 1
    assert summary.time_max == 2
    assert summary.time_p50 == 1
    assert summary.balance == (1 + 1.5 / 2 + 1 + 1) / 4
    assert summary.proven_optimal == 3 / 4
    assert "live_experts" in str(summary)
    assert len(str(summary).splitlines()) == 15


def test_summary_sums_layers_before_it_averages_batches() -> None:
    """Every layer has its own slowest GPU: [[100, 200], [100, 200]] balances to 0.75, not 1."""
    placement = Placement([[[0], [1]], [[0], [1]]])
    summary = solve_routing(
        placement, [[100, 200], [200, 100]], objective="tokens", method="uniform"
    ).summary()
    assert summary.balance == 0.75
    assert summary.makespan == 400


def test_summary_without_bound_or_tokens() -> None:
    """No bound: NaN gap. No tokens: gap 0, balance 1. No problems: no means."""
    placement = Placement([[0, 1], [0, 1]])
    assert math.isnan(solve_routing(placement, [1, 1], method="uniform", bound=False).summary().gap)
    nothing = solve_routing(placement, [0, 0]).summary()
    assert (nothing.gap, nothing.balance, nothing.tokens_per_activated) == (0, 1, 0)
    none = solve_routing(placement, np.zeros((0, 2), int)).summary()
    assert (none.problems, none.unsolved) == (0, 0)
    assert all(map(math.isnan, (none.makespan, none.gap, none.balance)))


def test_gap_of_a_useless_bound() -> None:
    """A bound of 0 under a positive makespan is an infinite gap, not a warning."""
    placement = Placement([[0], [0]])
    routing = solve_routing(placement, [1], bound=False, method="uniform")
    routing.bound[...] = 0
    assert float(routing.gap) == math.inf
    assert routing.summary().gap == math.inf


@given(problems(layered=True))
def test_figures_follow_from_the_tokens(problem: Problem) -> None:
    """GPU and expert tokens sum to the batch; summary figures agree with numpy."""
    routing = solve_routing(problem.placement, problem.tokens)
    assert routing.gpu_tokens().sum() == routing.expert_tokens().sum() == problem.tokens.sum()
    summary = routing.summary()
    live = problem.tokens > 0
    assert summary.live_experts * summary.problems == pytest.approx(live.sum())
    assert summary.replicas_activated == summary.live_experts
    assert summary.time_max == routing.makespan.max(initial=0)
    assert summary.proven_optimal == 1
    assert 0 < summary.balance <= 1


def test_the_sglang_example(shared_data: Path) -> None:
    """SGLang's own example for its token LP: the fullest of two GPUs gets half of the tokens."""
    golden = json.loads((shared_data / "golden_cases.json").read_text())["sglang_lplb_lp"]
    placement = Placement.from_physical_to_logical(golden["phy2log"], num_gpus=golden["num_gpus"])
    routing = solve_routing(placement, golden["counts"], objective="tokens")
    assert float(routing.makespan) == -(-sum(golden["counts"]) // 2) == 98


def test_real_traffic_is_routed(real_problems: dict[str, Problem]) -> None:
    """Every recording, under every rule that needs the tokens alone, is served to the token."""
    for problem in real_problems.values():
        for method, objective in (("metro", "activations"), ("uniform", "tokens")):
            routing = solve_routing(
                problem.placement, problem.tokens, method=method, objective=objective
            )
            check_routing(problem.placement, problem.tokens, routing)


def test_reused_answers_share_no_memory() -> None:
    """Without `out`, every call returns arrays of its own."""
    router = Router(Placement([[0, 1], [0, 2]]))
    first: NDArray[np.int64] = router.route([1, 0, 0]).tokens
    kept = first.copy()
    router.route([0, 1, 1])
    assert np.array_equal(first, kept)


def test_a_routing_survives_read_only_buffers() -> None:
    """Pickled out of band into buffers that cannot be written to, as worker processes get them."""
    routing = solve_routing(Placement([[0, 1], [0, 2]]), [3, 1, 2])
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(routing, protocol=5, buffer_callback=buffers.append)
    twin = pickle.loads(stream, buffers=[bytes(buffer) for buffer in buffers])
    assert twin.tokens.tolist() == routing.tokens.tolist()
    assert twin.status == routing.status


def test_a_router_goes_to_other_processes() -> None:
    """A pickled router routes as the one it was made from."""
    router = Router(Placement([[0, 1], [0, 2]]), objective="tokens", method="metro:order=random")
    twin = pickle.loads(pickle.dumps(router))
    assert repr(twin) == repr(router)
    assert twin.route([5, 2, 1]).tokens.tolist() == router.route([5, 2, 1]).tokens.tolist()


def test_an_answer_has_the_layers_of_its_placement() -> None:
    """allocate() refuses shapes that tokens for the placement cannot have."""
    router = Router(Placement([[[0, 1]], [[1, 0]]]))
    for shape in ((3, 2), (2, 3), (2,), (2, 4, 2), ()):
        with pytest.raises(InvalidTokensError, match=r"of shape \[\.\.\., 2, 2\]"):
            router.allocate(shape)


def test_a_method_of_ones_own_cannot_prove_bad_tokens() -> None:
    """Tokens are checked for it, so that no bound is taken from counts that are none."""
    with pytest.raises(InvalidTokensError, match="expert 0 has -1 tokens"):
        solve_routing(Placement([[0, 1]]), [-1, 1], method="uniform")


def test_wrong_settings_say_so() -> None:
    """A limit that is none, threads that are none or fractions."""
    placement = Placement([[0, 1]])
    with pytest.raises(TypeError, match="stop must be a TimeLimit"):
        solve_routing(placement, [1, 1], stop=3.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="integer"):
        Router(placement, threads=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 to 1024"):
        Router(placement, threads=2**31)


def test_sources_must_be_counts_that_agree() -> None:
    """Counts whose sum wraps around 2^64 to the right total, and two sources that differ."""
    placement = Placement([[0, 1], [1, 0]])
    with pytest.raises(InvalidTokensError, match=r"source_tokens\[0, 0\] is 9223372036854775808"):
        solve_routing(
            placement,
            [0, 0],
            method="rank-mod",
            source_tokens=np.array([[2**63, 0], [2**63, 0]], np.uint64),
        )
    with pytest.raises(InvalidTokensError, match="differ: give one of them"):
        solve_routing(
            placement,
            [1, 1],
            method="rank-mod",
            source_tokens=[[1, 1], [0, 0]],
            topk_ids=[[[0]], [[1]]],
        )


def test_a_summary_leaves_out_what_is_unsolved() -> None:
    """Of two problems one has no answer: the figures are the other's; of none, they are NaN."""
    routing = solve_routing(Placement([[0, 1], [0, 2]]), [[3, 1, 0], [1, 1, 1]])
    routing.tokens[1], routing.activated[1], routing.status[1] = 0, 0, Status.UNSOLVED
    routing.makespan[1] = math.nan
    summary = routing.summary()
    alone = solve_routing(routing.placement, [[3, 1, 0]]).summary()
    assert (summary.problems, summary.unsolved) == (1, 1)
    assert summary.makespan == alone.makespan == 1
    assert (summary.live_experts, summary.time_max, summary.gap) == (2, 1, 0)
    routing.status[0] = Status.UNSOLVED
    assert math.isnan(routing.summary().makespan)
    assert math.isnan(routing.summary().gap)
