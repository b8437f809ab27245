"""`optimal`: which method it is, what it proves, and what it leaves open."""

from __future__ import annotations

import math
import sys
import time

import numpy as np
import pytest

from eplb_opt.errors import EplbError
from eplb_opt.objective import Curve, Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.placing import solve_placement
from eplb_opt.routers import cp_sat, highs, optimal, resolve_method
from eplb_opt.routers.exact import Found, Program, pairs_of
from eplb_opt.routers.flow import Flow
from eplb_opt.routers.makespan import Makespan
from eplb_opt.routers.matching import Matching
from eplb_opt.routers.optimal import Optimal
from eplb_opt.routing import Proof, Routing, Status, solve_routing
from eplb_opt.stopping import TimeLimit
from eplb_opt.testing import Problem, check_routing, optimal_makespan

V3 = Objective.preset("deepseek-v3-fp8")
OPEN = 4
"""Of `flip`: a problem that no search leaves open, and that either engine proves in a second."""

OBJECTIVES = {
    "roofline": Objective(pieces=(Piece(activation=4), Piece(token=1))),
    "with offsets": Objective(pieces=(Piece(offset=3, activation=4), Piece(offset=5, token=1))),
    "two token pieces": Objective(pieces=(Piece(offset=9, token=1), Piece(token=2))),
    "slow GPUs": Objective(pieces=(Piece(activation=4), Piece(token=1)), slowness=(1, 1.5, 1, 2)),
    "slow alike": Objective(pieces=(Piece(activation=4), Piece(token=1)), slowness=(1.5,) * 4),
    "activations on slow GPUs": Objective(pieces=(Piece(activation=1),), slowness=(1, 2, 1, 3)),
    "tiles": Objective(pieces=(Piece(activation=2, tile=3), Piece(token=1)), tile_tokens=3),
    "whole": Objective(pieces=(Piece(activation=4), Piece(token=1)), split=False),
    "curve": Objective(pieces=(Curve((1, 3, 4, 6), (2.0, 2.0, 4.0, 4.0)), Piece(token=0.5))),
}


def solve(problem: Problem, objective: Objective, **given: object) -> Routing:
    """Route by `optimal`, with its own bound."""
    return solve_routing(
        problem.placement,
        problem.tokens,
        objective=objective,
        bound=False,
        **{"method": Optimal(), **given},  # type: ignore[arg-type]
    )


def small(seed: int) -> Problem:
    """Draw a problem of four GPUs that can be solved by trying everything."""
    rng = np.random.default_rng(seed)
    slots = np.concatenate([np.arange(5), rng.integers(-1, 5, 7)])
    return Problem(Placement(rng.permutation(slots).reshape(4, 3), 5), rng.integers(0, 8, (2, 5)))


def flip(seed: int) -> Problem:
    """Draw a problem about the flip batch: neither activations nor tokens alone decide.

    The batch's popularity is not quite what the placement was made for.
    """
    rng = np.random.default_rng(seed)
    popularity = (1.0 + np.arange(256)) ** -0.3
    popularity *= 2000 / popularity.sum()
    load, batch = rng.dirichlet(popularity), rng.dirichlet(popularity)
    plan = solve_placement(load * 1e6, num_gpus=16, slots_per_gpu=20)
    return Problem(plan.placement, rng.multinomial(46_000, batch))


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the work to the engines: the core proves ever more, and here it is not tested."""
    for budget in ("WORK", "TURNS", "NODES", "LOOKS"):
        monkeypatch.setattr(optimal, budget, 0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_is_proven(name: str) -> None:
    """On small problems the proven optimum is that of trying everything, for every objective."""
    for seed in range(6):
        problem = small(seed)
        routing = solve(problem, OBJECTIVES[name])
        check_routing(problem.placement, problem.tokens, routing)
        smallest = optimal_makespan(problem.placement, problem.tokens, OBJECTIVES[name])
        assert np.array_equal(routing.makespan, smallest)
        assert np.array_equal(routing.bound, smallest)
        assert (routing.status == Status.OPTIMAL).all()


def test_the_compiled_methods_where_they_can() -> None:
    """Activations and tokens go to matching and flow, by name and from an instance."""
    for objective, method in (("activations", Matching()), ("tokens", Flow())):
        assert resolve_method("optimal", Objective.preset(objective)) == method
        routing = solve(small(0), Objective.preset(objective))
        assert routing.certificate.any(axis=-1).all()
    assert resolve_method("optimal:seconds=2", V3) == Optimal(seconds=2.0)


@pytest.mark.usefixtures("no_search")
def test_hard_problems_are_proven() -> None:
    """About the flip batch, problems that the search leaves open are proven, two at a time."""
    hard = flip(OPEN)
    batch = Problem(hard.placement, np.stack([hard.tokens] * 2))
    searched = solve(batch, V3, method=Makespan(work=0))
    routing = solve(batch, V3, threads=2)
    check_routing(batch.placement, batch.tokens, routing)
    assert (searched.bound < routing.bound).all()
    assert (routing.makespan < searched.makespan).all()
    assert (routing.status == Status.OPTIMAL).all()
    assert np.isin(routing.proved_by, [Proof.HIGHS, Proof.CP_SAT]).all()
    assert not routing.certificate.any()


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("missing", [["highspy"], ["ortools"], ["highspy", "ortools"]])
def test_with_what_is_installed(missing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine does where the other is missing; without any the search's bound remains."""
    for package in missing:
        monkeypatch.setitem(sys.modules, package, None)
    problem = flip(OPEN)
    routing = solve(problem, V3)
    check_routing(problem.placement, problem.tokens, routing)
    if len(missing) < 2:
        assert routing.status == Status.OPTIMAL
        assert routing.proved_by == (Proof.HIGHS if missing == ["ortools"] else Proof.CP_SAT)
    else:
        assert 0 < routing.gap < 0.1


@pytest.mark.usefixtures("no_search")
def test_no_seconds() -> None:
    """With no time for proofs the search's answer and bound are there."""
    problem = flip(OPEN)
    for given in ({"method": Optimal(seconds=0)}, {"stop": TimeLimit(0)}):
        began = time.monotonic()
        routing = solve(problem, V3, **given)
        assert time.monotonic() - began < 1
        check_routing(problem.placement, problem.tokens, routing)
        assert 0 < routing.gap < 0.1


def test_no_choice_under_a_curve() -> None:
    """What has no choice is proven by counting, under a curve too, without an engine's time."""
    objective = Objective(pieces=(Curve((2, 4, 7), (0.25, 2.5, 3.75)),), slowness=(1.0, 1.5))
    routing = solve(Problem(Placement([[0], [1]]), np.array([5, 3])), objective, stop=TimeLimit(0))
    assert routing.makespan == routing.bound
    assert routing.proved_by == Proof.COUNT


def test_time_limits_hold() -> None:
    """Each open problem has its seconds; the limit of the call is over all of them."""
    hard = flip(OPEN)
    batch = Problem(hard.placement, np.stack([hard.tokens] * 8))
    tiles = Objective(pieces=(Piece(activation=12, tile=2.78), Piece(token=0.0945)))
    began = time.monotonic()
    routing = solve(batch, tiles, stop=TimeLimit(1.0))
    assert time.monotonic() - began < 3
    check_routing(batch.placement, batch.tokens, routing)
    began = time.monotonic()
    solve(hard, tiles, method=Optimal(seconds=0.5))
    assert time.monotonic() - began < 2


def test_bad_seconds() -> None:
    """Negative seconds and NaN are refused, and what is no number."""
    for seconds in (-1.0, math.nan):
        with pytest.raises(ValueError, match="seconds must be at least 0"):
            Optimal(seconds=seconds)
    with pytest.raises(ValueError, match="seconds='soon' is not a number"):
        resolve_method("optimal:seconds=soon", V3)


@pytest.mark.usefixtures("no_search")
def test_a_bound_says_no_more_than_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine asked for less than the makespan in hand proves at most that this is the least."""
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setattr(highs, "solve", lambda *_: Found(None, 1e9))
    problem = flip(OPEN)
    routing = solve(problem, V3)
    assert routing.bound == routing.makespan
    assert routing.proved_by == Proof.HIGHS


def test_an_answer_refutes_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one engine proves wrongly is forgotten when another finds a better answer."""
    drawn, tiles = small(13), OBJECTIVES["tiles"]
    problem = Problem(drawn.placement, 5 * drawn.tokens[0])
    monkeypatch.setattr(optimal, "WORK", 0)
    smallest = solve(problem, tiles).makespan
    searched = solve(problem, tiles, method=Makespan(work=0))
    assert smallest < searched.makespan
    wrong = Found(None, float(searched.makespan) - 1)
    monkeypatch.setattr(cp_sat, "solve", lambda *_: wrong)
    routing = solve(problem, tiles)
    assert routing.makespan == routing.bound == smallest
    assert routing.proved_by == Proof.HIGHS


@pytest.mark.parametrize("slowness", [None, (1, 1.5, 1, 2)])
def test_fitting_agrees_with_trying_everything(slowness: tuple[float, ...] | None) -> None:
    """A target is met, or refuted, as the smallest makespan of all routings says."""
    objective = Objective(pieces=(Piece(activation=4), Piece(token=1)), slowness=slowness)
    met = 0
    for seed in range(6):
        problem = small(seed)
        pairs = pairs_of(problem.placement, objective)[0]
        program = Program.of(problem.placement, pairs, problem.tokens[0], objective)
        smallest = optimal_makespan(problem.placement, problem.tokens[0], objective)
        for target in range(math.ceil(program.counted_bound()), 20):
            found = cp_sat.fit(optimal._within(program, target), math.inf)
            assert (found.taken is not None) == (target >= smallest)
            if found.taken is not None:
                assert program.makespan(program.rounded(found.taken)) <= target
                met += 1
    assert 20 < met < 80


def test_without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no activation to spare the core finds whole experts that balance, and proves it."""
    monkeypatch.setattr(optimal, "WORK", 0)
    for package in ("highspy", "ortools"):
        monkeypatch.setitem(sys.modules, package, None)
    objective = Objective(pieces=(Piece(activation=75), Piece(token=1)))
    for seed in range(2):
        rng = np.random.default_rng(seed)
        slots = np.concatenate([np.arange(24), rng.permutation(24)[:12]])
        problem = Problem(Placement(rng.permutation(slots).reshape(4, 9)), rng.integers(50, 99, 24))
        searched = solve(problem, objective, method=Makespan(work=0))
        routing = solve(problem, objective)
        check_routing(problem.placement, problem.tokens, routing)
        assert searched.bound < routing.bound == routing.makespan < searched.makespan
        assert routing.proved_by == Proof.BRANCHING


@pytest.mark.usefixtures("no_search")
def test_a_wrong_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's answer that serves too few tokens raises, and names engine and problem."""

    def wrong(program: Program, *_: object) -> Found:
        return Found(np.zeros(len(program.gpu)), 0.0)

    monkeypatch.setattr(highs, "solve", wrong)
    with pytest.raises(EplbError, match=r"^highs, problem \(\): its answer serves 0 of the"):
        solve(flip(OPEN), V3)


def test_layers_and_batches() -> None:
    """Every problem of a batch of layers has its own answer and proof; idle ones take no time."""
    slots = [[[0, 1, 2], [2, 0, 1]], [[1, 2, 0], [0, 1, -1]]]
    placement = Placement(slots)
    tokens = np.array([[[5, 3, 2], [7, 1, 1]], [[0, 0, 0], [1, 0, 9]]])
    objective = OBJECTIVES["with offsets"]
    routing = solve(Problem(placement, tokens), objective, threads=2)
    check_routing(placement, tokens, routing)
    assert np.array_equal(routing.makespan, optimal_makespan(placement, tokens, objective))
    assert routing.makespan[1, 0] == routing.bound[1, 0] == objective.idle
