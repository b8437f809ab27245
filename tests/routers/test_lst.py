"""Whole experts by linear programming: the bound, the factor of two, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from eplb_opt.errors import SolverUnavailableError
from eplb_opt.objective import Curve, Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.routing import Proof, Router, Routing, Status
from eplb_opt.testing import Problem, check_routing, optimal_makespan

pytest.importorskip("highspy")

TOKENS = Objective(pieces=(Piece(token=1),), split=False)
CURVE = Curve((1, 3, 4, 9), (2.0, 2.0, 4.0, 5.0))


def route(placement: Placement, tokens: object, objective: Objective = TOKENS) -> Routing:
    """Route by `lst` with its own bound."""
    return Router(placement, objective=objective, method="lst").route(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "objective",
    [
        TOKENS,
        Objective(pieces=(Piece(offset=5, activation=3, tile=2, token=0.3),), split=False),
        Objective(pieces=(CURVE,), split=False),
    ],
    ids=["tokens", "mixed", "curve"],
)
@pytest.mark.parametrize("slowness", [None, (1.0, 1.5, 1.0, 3.0)])
def test_within_twice_the_bound(objective: Objective, slowness: tuple[float, ...] | None) -> None:
    """On drawn problems bound <= optimum <= makespan <= twice the bound, offsets included."""
    objective = replace(objective, slowness=slowness, tile_tokens=4)
    rng = np.random.default_rng(1)
    proven = 0
    for _ in range(25):
        slots = np.concatenate([np.arange(6), rng.integers(-1, 6, 6)])
        placement = Placement(rng.permutation(slots).reshape(4, 3), 6)
        tokens = rng.integers(0, 10, 6)
        routing = route(placement, tokens, objective)
        check_routing(placement, tokens, routing)
        smallest = optimal_makespan(placement, tokens, objective)
        assert routing.bound <= smallest <= routing.makespan <= 2 * routing.bound * (1 + 1e-9)
        proven += int(routing.status == Status.OPTIMAL)
    assert proven > 0


def test_production_size(draw_problem: Callable[..., Problem]) -> None:
    """At 256 experts on 32 GPUs, layers and batches at once, the factor holds and LP is named."""
    problem = draw_problem(np.random.default_rng(3), 32, 10, 256, layers=2, batches=2)
    routing = route(problem.placement, problem.tokens)
    check_routing(problem.placement, problem.tokens, routing)
    assert (routing.makespan <= 2 * routing.bound * (1 + 1e-9)).all()
    assert np.isin(routing.proved_by, [Proof.LP, Proof.COUNT]).all()


def test_relaxation_beats_counting() -> None:
    """Two experts that share two GPUs of three are bounded by the program, not by the average."""
    routing = route(Placement([[0, 1], [1, 0], [2, -1]]), [7, 7, 1])
    assert routing.bound == routing.makespan == 7
    one = route(Placement([[0, 1, 2], [2, 1, 0], [3, -1, -1]]), [6, 5, 4, 1])
    assert one.bound == 8
    assert one.proved_by == Proof.LP


def test_threads_change_nothing(draw_problem: Callable[..., Problem]) -> None:
    """Two threads answer as one does."""
    problem = draw_problem(np.random.default_rng(4), 8, 5, 20, batches=6)
    answers = [
        Router(problem.placement, objective=TOKENS, method="lst", threads=n).route(problem.tokens)
        for n in (1, 2)
    ]
    assert np.array_equal(answers[0].tokens, answers[1].tokens)


def test_nothing_to_choose() -> None:
    """Single copies and idle batches need no program, and are proven by counting."""
    placement = Placement([[0, 1], [2, -1]])
    routing = route(placement, [[3, 4, 5], [0, 0, 0]])
    assert routing.makespan.tolist() == routing.bound.tolist() == [7, 0]
    assert (routing.proved_by == Proof.COUNT).all()


@pytest.mark.parametrize(
    "objective",
    [
        Objective.preset("tokens"),
        Objective.preset("activations"),
        Objective(pieces=(Piece(token=1), Piece(activation=1)), split=False),
    ],
)
def test_other_objectives_are_refused(objective: Objective) -> None:
    """Splits, and the larger of two pieces, are another problem."""
    with pytest.raises(ValueError, match="lst solves one piece with split=False only"):
        Router(Placement([[0]]), objective=objective, method="lst")


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without HiGHS it says what to install."""
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(SolverUnavailableError, match=r"lst needs highspy: pip install"):
        Router(Placement([[0]]), objective=TOKENS, method="lst")
