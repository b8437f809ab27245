"""The public test helpers: strategies draw what they promise, checkers catch what they should."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.demand import as_tokens, reject_tokens
from eplb_opt.errors import InfeasibleError, InvalidTokensError
from eplb_opt.objective import Curve, Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.routing import Proof, Router, Routing, Status, solve_routing
from eplb_opt.testing import (
    Problem,
    batches,
    check_certificate,
    check_routing,
    objectives,
    optimal_makespan,
    placements,
    problems,
)

Drawn = TypeVar("Drawn")


def smallest(strategy: st.SearchStrategy[Drawn], condition: Callable[[Drawn], Any]) -> Drawn:
    """Find an example that meets the condition and shrink it."""
    search = settings(database=None, suppress_health_check=list(HealthCheck))
    return find(strategy, lambda drawn: bool(condition(drawn)), settings=search, random=Random(1))


def occurs(strategy: st.SearchStrategy[Drawn], condition: Callable[[Drawn], Any]) -> None:
    """Find an example that meets the condition, among a thousand, or raise."""
    search = settings(
        max_examples=1000,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    find(strategy, lambda drawn: bool(condition(drawn)), settings=search, random=Random(1))


# --- strategies ---


@given(placements(max_layers=3, max_gpus=5, max_slots_per_gpu=4, max_experts=7))
def test_placements_keep_their_limits(placement: Placement) -> None:
    """Every expert is placed and the shape is within the limits."""
    assert placement.num_layers <= 3
    assert placement.num_gpus <= 5
    assert placement.slots_per_gpu <= 4
    assert placement.num_experts <= 7
    assert placement.copies.all()


@given(st.data(), st.booleans())
def test_the_layer_axis_can_be_asked_for(data: st.DataObject, layered: bool) -> None:
    """With `layered` given, every placement has the axis or none has."""
    assert data.draw(placements(layered=layered)).layered == layered


@given(st.data(), placements())
def test_batches_fit_the_placement(data: st.DataObject, placement: Placement) -> None:
    """Batches have the placement's shape and counts that every router accepts."""
    tokens = data.draw(batches(placement, max_tokens=7, max_batches=2))
    assert as_tokens(placement, tokens) is tokens
    reject_tokens(placement, tokens)
    small = data.draw(batches(placement, max_tokens=7, huge=False))
    assert small.max() <= 7
    lead = tokens.shape[: tokens.ndim - placement.layered - 1]
    assert lead in ((), (1,), (2,))


def test_the_strange_cases_occur() -> None:
    """Duplicates, empty slots, dead GPUs, experts everywhere, huge counts, every batch shape."""
    for strange in (
        lambda p: any(p.duplicates()),
        lambda p: (p.expert_of == -1).any(),
        lambda p: (p.expert_of.reshape(p.num_layers, p.num_gpus, -1) == -1).all(axis=-1).any(),
        lambda p: p.num_gpus > 2 and (p.candidates == p.num_gpus).any(),
        lambda p: p.num_layers > 1 and (p.expert_of[0] != p.expert_of[1]).any(),
    ):
        occurs(placements(), strange)
    for strange_tokens in (
        lambda t: t.max() == _core.MAX_TOKENS_PER_EXPERT,
        lambda t: t.max() > 2**31 and (t == 0).any(),
        lambda t: not t.any(),
        lambda t: t.ndim == 3 and len(t) > 1,
    ):
        occurs(problems().map(lambda problem: problem.tokens), strange_tokens)


@settings(max_examples=30)
@given(st.data(), st.integers(1, 4))
def test_objectives_fit_the_gpus(data: st.DataObject, num_gpus: int) -> None:
    """A slowness is of as many GPUs as asked for, a curve comes alone, and only if allowed."""
    drawn = data.draw(objectives(num_gpus=num_gpus))
    assert drawn.slowness is None or len(drawn.slowness) == num_gpus
    assert data.draw(objectives()).slowness is None
    assert not data.draw(objectives(curves=False)).curves


def test_every_kind_of_objective_occurs() -> None:
    """Pure, two pieces, mixed ones, offsets, tiles, slowness, whole experts, curves."""
    for kind in (
        lambda o: o.counts_activations,
        lambda o: o.counts_tokens,
        lambda o: o.pieces == (Piece(token=1.0),) and not o.split,
        lambda o: len(o.linear) == 2 and o.linear[0].activation and o.linear[1].token,
        lambda o: any(p.activation and p.tile and p.token and p.offset for p in o.linear),
        lambda o: o.has_tiles and o.tile_tokens <= 5,
        lambda o: o.slowness and len(set(o.slowness)) == 3,
        lambda o: o.curves and o.linear and not o.split,
        lambda o: len(o.pieces) == 3,
    ):
        occurs(objectives(num_gpus=3), kind)
    assert smallest(objectives(num_gpus=2), lambda _: True).counts_activations


def test_counterexamples_shrink() -> None:
    """What is left of a counterexample is what matters: few slots, few tokens, no batch axis."""
    twice = smallest(
        placements(max_gpus=3, max_slots_per_gpu=3), lambda placement: any(placement.duplicates())
    )
    assert twice == Placement([[0, 0]])
    three = smallest(
        problems(max_gpus=3, max_slots_per_gpu=3), lambda problem: problem.tokens.sum() >= 3
    )
    assert three.placement == Placement([[0]])
    assert three.tokens.tolist() == [3]


def test_strategies_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hypothesis the module's import, or the first strategy, names the extra to install."""
    for name in [name for name in sys.modules if name.split(".")[0] == "hypothesis"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "eplb_opt.testing")
    with pytest.raises(ImportError, match=r"eplb-opt\[testing\]"):
        __import__("eplb_opt.testing", fromlist=["placements"]).placements()


# --- checkers ---

PLACEMENT = Placement([[[0, 1], [0, 2], [2, -1]], [[2, 1], [1, 0], [0, 2]]])
TOKENS = np.array([[[5, 3, 2], [1, 4, 0]], [[0, 2, 7], [6, 6, 6]]])


def answer(method: str = "optimal", objective: str = "activations") -> Routing:
    """Route the example."""
    return solve_routing(PLACEMENT, TOKENS, method=method, objective=objective)


# What is wrong, as edits of an answer's arrays: the array, the place, the new value from the old.
Edit = tuple[str, Any, Callable[[Any], Any]]
CORRUPTIONS: dict[str, list[Edit]] = {
    "a token is lost": [("tokens", (1, 0, 1, 1), lambda old: old - 1)],
    "a token is invented": [("tokens", (1, 0, 1, 1), lambda old: old + 1)],
    "tokens in another expert's slot": [("tokens", (1, 0, 0), lambda old: old[::-1].copy())],
    "tokens on another GPU": [
        ("tokens", (0, 1), lambda old: old[::-1].copy()),
        ("activated", (0, 1), lambda old: old[::-1].copy()),
    ],
    "tokens in an empty slot": [
        ("tokens", (0, 0, 2, 1), lambda _: 1),
        ("activated", (0, 0, 2), lambda old: old + 1),
    ],
    "a negative share": [("tokens", (0, 0, slice(2), 0), lambda _: [6, -1])],
    "activated is not the count": [("activated", (1, 1, 0), lambda old: old + 1)],
    "makespan too low": [
        ("makespan", (1, 0), lambda old: old - 1),
        ("bound", (1, 0), lambda old: old - 1),
        ("certificate", (1, 0), lambda _: False),
    ],
    "makespan too high": [("makespan", (1, 0), lambda old: old + 1)],
    "bound above the makespan": [
        ("bound", (0, 1), lambda old: old + 1),
        ("certificate", (0, 1), lambda _: False),
    ],
    "bound above what the certificate proves": [("bound", (0, 1), lambda old: old + 1)],
    "bound below what the certificate proves": [
        ("bound", (0, 1), lambda old: old - 1),
        ("status", (0, 1), lambda _: Status.FEASIBLE),
    ],
    "certificate without bound": [
        ("bound", (0, 1), lambda _: np.nan),
        ("proved_by", (0, 1), lambda _: Proof.NONE),
        ("status", (0, 1), lambda _: Status.FEASIBLE),
    ],
    "another certificate": [("certificate", (0, 1), lambda _: [True, False, False])],
    "optimal without bound": [
        ("bound", (0, 1), lambda _: np.nan),
        ("proved_by", (0, 1), lambda _: Proof.NONE),
        ("certificate", (0, 1), lambda _: False),
    ],
    "optimal below the makespan": [
        ("bound", (0, 1), lambda old: old - 1),
        ("certificate", (0, 1), lambda _: False),
    ],
    "a status that is none": [("status", (0, 0), lambda _: 7)],
    "unsolved with tokens": [
        ("status", (1, 1), lambda _: Status.UNSOLVED),
        ("makespan", (1, 1), lambda _: np.nan),
    ],
    "unsolved with a makespan": [
        ("status", (1, 1), lambda _: Status.UNSOLVED),
        ("tokens", (1, 1), lambda _: 0),
        ("activated", (1, 1), lambda _: 0),
    ],
    "a bound that nobody proved": [("proved_by", (0, 1), lambda _: Proof.NONE)],
    "a proof of no bound": [
        ("bound", (0, 1), lambda _: np.nan),
        ("certificate", (0, 1), lambda _: False),
        ("status", (0, 1), lambda _: Status.FEASIBLE),
    ],
    "a proof that is none": [("proved_by", (0, 0), lambda _: 99)],
}


@pytest.mark.parametrize("objective", ["activations", "tokens"])
@pytest.mark.parametrize("edits", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_every_corruption_is_caught(edits: list[Edit], objective: str) -> None:
    """An answer passes; with one thing wrong it does not."""
    routing = answer(objective=objective)
    check_routing(PLACEMENT, TOKENS, routing)
    for name, at, change in edits:
        array = getattr(routing, name)
        array[at] = change(array[at])
    with pytest.raises(AssertionError):
        check_routing(PLACEMENT, TOKENS, routing)


@pytest.mark.parametrize("objective", ["activations", "tokens"])
def test_a_false_proof_is_caught(objective: str) -> None:
    """A routing above the optimum that calls itself optimal does not pass, certificate or not."""
    placement = Placement([[0, 1], [0, 1]])
    routing = solve_routing(placement, [4, 4], objective=objective)
    routing.tokens[...] = [[4, 4], [0, 0]]
    routing.activated[...] = [2, 0]
    routing.makespan[...] = routing.bound[...] = 2 if objective == "activations" else 8
    for members in ([True, True], [True, False], [False, False]):
        routing.certificate[...] = members
        with pytest.raises(AssertionError):
            check_routing(placement, [4, 4], routing)


def test_status_is_judged_by_the_bound() -> None:
    """A rule that is above its bound is feasible, and may not say optimal."""
    placement = Placement([[0, 1], [0, 2], [1, 3], [2, 3]])
    routing = solve_routing(placement, [4, 4, 4, 4], method="uniform")
    check_routing(placement, [4, 4, 4, 4], routing)
    routing.status[...] = Status.OPTIMAL
    with pytest.raises(AssertionError, match="OPTIMAL"):
        check_routing(placement, [4, 4, 4, 4], routing)


def test_answers_without_proof_pass() -> None:
    """No bound was asked for: nothing is claimed, nothing is wrong."""
    routing = solve_routing(PLACEMENT, TOKENS, method="metro", bound=False)
    check_routing(PLACEMENT, TOKENS, routing)
    check_certificate(PLACEMENT, TOKENS, routing)


def test_unsolved_problems_pass_with_nothing_in_them() -> None:
    """What an engine could not solve holds no tokens, and the rest is still checked."""
    routing = answer()
    routing.status[0, 0] = Status.UNSOLVED
    routing.tokens[0, 0] = 0
    routing.activated[0, 0] = 0
    routing.makespan[0, 0] = routing.bound[0, 0] = np.nan
    routing.proved_by[0, 0] = Proof.NONE
    routing.certificate[0, 0] = False
    check_routing(PLACEMENT, TOKENS, routing)
    routing.tokens[1, 0, 1, 1] -= 1
    with pytest.raises(AssertionError):
        check_routing(PLACEMENT, TOKENS, routing)


def test_messages_name_the_problem() -> None:
    """The first wrong expert is named with its problem and both counts."""
    routing = answer()
    routing.tokens[1, 0, 1, 1] -= 1
    with pytest.raises(AssertionError, match=r"expert 2 of problem \(1, 0\) has 7 tokens and 6"):
        check_routing(PLACEMENT, TOKENS, routing)
    routing = answer()
    routing.certificate[1, 1] = [True, False, False]
    with pytest.raises(AssertionError, match=r"problem \(1, 1\)"):
        check_certificate(PLACEMENT, TOKENS, routing)


def test_an_answer_to_another_batch_is_refused() -> None:
    """Shapes that differ are named, not broadcast."""
    with pytest.raises(AssertionError, match="shape"):
        check_routing(PLACEMENT, TOKENS[0], answer())


@given(problems(), st.sampled_from(("activations", "tokens")))
def test_right_answers_pass(problem: Problem, objective: str) -> None:
    """Every exact answer passes, and stays as it was."""
    routing = Router(problem.placement, objective=objective).route(problem.tokens)
    before = [getattr(routing, field.name).copy() for field in array_fields(routing)]
    check_routing(problem.placement, problem.tokens, routing)
    for field, kept in zip(array_fields(routing), before, strict=True):
        found: NDArray[Any] = getattr(routing, field.name)
        assert np.array_equal(found, kept)


def array_fields(routing: Routing) -> list[dataclasses.Field[Any]]:
    """Return the fields of an answer that are arrays."""
    return [
        f for f in dataclasses.fields(routing) if isinstance(getattr(routing, f.name), np.ndarray)
    ]


def as_answer(placement: Placement, tokens: Any, routed: Any, objective: Objective) -> Routing:
    """Make a routing of these tokens, without a bound."""
    routing = Router(placement, objective=objective, method="metro").route(np.array(tokens))
    routing.tokens[...] = routed
    routing.activated[...] = (routing.tokens > 0).sum(axis=-1)
    routing.makespan[...] = objective.time(routing.tokens).max(axis=-1)
    return routing


def claim(routing: Routing, bound: float, proof: Proof) -> None:
    """Let a routing claim a bound."""
    routing.bound[...], routing.proved_by[...] = bound, proof
    routing.status[...] = Status.OPTIMAL if bound == routing.makespan else Status.FEASIBLE


ROOFLINE = Objective(pieces=(Piece(offset=1, activation=2), Piece(token=0.5)))


def test_any_objective_is_checked() -> None:
    """The same checks with two pieces and an offset: makespan, refutation, certificate."""
    placement = Placement([[0, 1], [0, 1]])
    routing = as_answer(placement, [9, 3], [[6, 0], [3, 3]], ROOFLINE)
    check_routing(placement, [9, 3], routing)
    assert float(routing.makespan) == 5
    claim(routing, 3.0, Proof.COUNT)  # either GPU activates one expert or more
    routing.certificate[...] = True
    check_routing(placement, [9, 3], routing)
    claim(routing, 5.0, Proof.HIGHS)
    routing.certificate[...] = False
    with pytest.raises(AssertionError, match="above the optimum"):  # one expert each: 4.5
        check_routing(placement, [9, 3], routing)
    claim(routing, 2.5, Proof.COUNT)
    routing.certificate[...] = True
    with pytest.raises(AssertionError, match=r"proves a bound of 3, stated is 2\.5"):
        check_routing(placement, [9, 3], routing)


def test_split_experts_are_caught_where_whole_ones_are_due() -> None:
    """With `split=False` no second replica of an expert takes tokens, on the same GPU neither."""
    whole = Objective(pieces=(Piece(token=1.0),), split=False)
    placement = Placement([[0, 1], [0, 0]])
    check_routing(placement, [4, 1], as_answer(placement, [4, 1], [[0, 1], [0, 4]], whole))
    for routed in ([[2, 1], [2, 0]], [[0, 1], [2, 2]]):
        with pytest.raises(AssertionError, match="expert 0 of layer 0 in batch 0 is split over 2"):
            check_routing(placement, [4, 1], as_answer(placement, [4, 1], routed, whole))


# --- the truth ---


@given(problems(max_gpus=4, max_experts=5, max_slots_per_gpu=2, max_tokens=4, huge=False))
def test_trying_every_routing_finds_the_known_optima(problem: Problem) -> None:
    """Brute force agrees with the exact routers of both polynomial objectives."""
    for objective in ("activations", "tokens"):
        least = optimal_makespan(problem.placement, problem.tokens, objective)
        exact = solve_routing(problem.placement, problem.tokens, objective=objective)
        assert np.array_equal(least, exact.makespan)


def test_worked_optima() -> None:
    """Found by hand: splits, whole experts, tiles, slowness, and a curve on two slots of a GPU."""
    placement = Placement([[0, 1], [0, 1]])
    assert float(optimal_makespan(placement, [9, 3], ROOFLINE)) == 4.5
    assert float(optimal_makespan(placement, [9, 4], "tokens")) == 7
    whole = Objective(pieces=(Piece(token=1.0),), split=False)
    assert float(optimal_makespan(placement, [9, 4], whole)) == 9
    tiles = Objective(pieces=(Piece(tile=1.0),), tile_tokens=4)
    assert float(optimal_makespan(placement, [9, 3], tiles)) == 2
    slow = Objective(pieces=(Piece(token=1.0),), slowness=(1.0, 3.0))
    assert float(optimal_makespan(placement, [9, 3], slow)) == 9
    steep = Objective(pieces=(Curve((1, 2), (1.0, 10.0)),))
    assert float(optimal_makespan(Placement([[0, 0]]), [2], steep)) == 2


def test_every_way_to_share_is_tried_once() -> None:
    """Stars and bars: all different, all complete, as many as the formula says."""
    placement = Placement([[0, 1], [0, 1], [0, -1]])
    counted = np.zeros((6, 5), np.int64)
    seen: set[bytes] = set()

    class Spy(Objective):
        def time(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
            seen.update(map(bytes, tokens))
            counted[:] += np.array([(tokens == n).sum(axis=0).ravel() for n in range(5)]).T
            return super().time(tokens)

    optimal_makespan(placement, [4, 2], Spy(pieces=(Piece(token=1.0),)))
    assert len(seen) == 15 * 3
    assert counted.sum(axis=1).tolist() == [45] * 6
    assert counted[4].tolist() == [15, 12, 9, 6, 3]


def test_what_takes_too_long_is_refused() -> None:
    """More routings than can be tried are an error that says how many; so is bad input."""
    placement = Placement([[[0, 1], [0, 1], [0, 1]]] * 2)
    with pytest.raises(ValueError, match=r"problem \(1,\) has 51133872384 routings"):
        optimal_makespan(placement, [[0, 0], [671, 671]])
    with pytest.raises(ValueError, match="slowness of 1 GPUs"):
        optimal_makespan(
            placement, [[0, 0]] * 2, Objective(pieces=(Piece(token=1),), slowness=(1,))
        )
    with pytest.raises(InvalidTokensError):
        optimal_makespan(placement, [[0, -1]] * 2)
    with pytest.raises(InfeasibleError):
        optimal_makespan(Placement([[0]], 2, allow_missing=True), [0, 1])


def test_no_tokens_take_the_idle_time() -> None:
    """A problem without tokens has one routing; none at all have an empty answer."""
    placement = Placement([[0, 1], [0, 1]])
    assert float(optimal_makespan(placement, [0, 0], ROOFLINE)) == 1
    assert optimal_makespan(placement, np.zeros((0, 2), np.int64)).shape == (0,)
