"""The compiled routers, general-purpose exact engines, and trying everything: all must agree."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import eplb_opt as eo
from eplb_opt.objective import Curve, Objective, Piece
from eplb_opt.testing import Problem, check_routing, optimal_makespan

PROBLEMS = 100
SMALL_PROBLEMS = 750


def drawn_problems() -> Iterator[Problem]:
    """Yield problems of 2-10 GPUs and 4-40 experts: duplicates, empty slots, skewed tokens."""
    rng = np.random.default_rng(20251209)
    for _ in range(PROBLEMS):
        gpus, experts = int(rng.integers(2, 11)), int(rng.integers(4, 41))
        per_gpu = -(-int(experts * rng.uniform(1.0, 2.0)) // gpus)
        spare = rng.integers(-1, experts, gpus * per_gpu - experts)
        slots = rng.permutation(np.concatenate([np.arange(experts), spare]))
        placement = eo.Placement(slots.reshape(gpus, per_gpu), num_experts=experts)
        live = rng.random(experts) < rng.uniform(0.2, 1.0)
        tokens = np.where(live, np.ceil(rng.lognormal(1.0, 1.2, experts)).astype(np.int64), 0)
        yield Problem(placement, tokens)


@pytest.mark.parametrize(("engine", "package"), [("highs", "highspy"), ("cp-sat", "ortools")])
@pytest.mark.parametrize("objective", ["activations", "tokens"])
def test_engines_confirm_the_optimum(engine: str, package: str, objective: str) -> None:
    """On 100 drawn problems the engine proves the makespan of `optimal`, and finishes 99 %."""
    pytest.importorskip(package)
    finished = 0
    for problem in drawn_problems():
        placement, tokens = problem.placement, problem.tokens
        optimal = eo.solve_routing(placement, tokens, objective=objective)
        judged = eo.solve_routing(
            placement, tokens, objective=objective, method=engine, stop=eo.TimeLimit(10.0)
        )
        check_routing(placement, tokens, optimal)
        check_routing(placement, tokens, judged)
        assert judged.bound <= optimal.makespan
        if judged.status == eo.Status.OPTIMAL:
            finished += 1
            assert judged.makespan == optimal.makespan
    assert finished >= 0.99 * PROBLEMS


@pytest.fixture(scope="module")
def small_problems() -> list[tuple[Problem, Objective, float]]:
    """Draw small problems under all kinds of linear objectives, each with its optimum by trying."""
    rng = np.random.default_rng(20260303)
    drawn = []
    for _ in range(SMALL_PROBLEMS):
        problem = draw_small(rng)
        objective = draw_objective(rng, problem.placement.num_gpus)
        makespan = optimal_makespan(problem.placement, problem.tokens, objective)
        drawn.append((problem, objective, float(makespan)))
    return drawn


def draw_small(rng: np.random.Generator) -> Problem:
    """Draw 2-4 GPUs with 2-4 experts of up to 5 tokens: duplicates and empty slots too."""
    gpus, experts = int(rng.integers(2, 5)), int(rng.integers(2, 5))
    per_gpu = -(-int(experts * rng.uniform(1.2, 2.2)) // gpus)
    spare = rng.integers(-1, experts, gpus * per_gpu - experts)
    slots = rng.permutation(np.concatenate([np.arange(experts), spare]))
    placement = eo.Placement(slots.reshape(gpus, per_gpu), num_experts=experts)
    return Problem(placement, rng.integers(0, 6, experts))


def draw_objective(rng: np.random.Generator, gpus: int, curve: Curve | None = None) -> Objective:
    """Draw 1-3 pieces of quarters or of decimals, tiles, slowness, with and without splits."""
    quarters = bool(rng.random() < 0.5)
    pieces: list[Piece | Curve] = [] if curve is None else [curve]
    for _ in range(rng.integers(1, 4)):
        prices = rng.integers(1, 30, 4) / 4 if quarters else np.round(rng.uniform(0, 9, 4), 2)
        pieces.append(Piece(*np.where(rng.random(4) < (0.3, 0.6, 0.4, 0.6), prices, 0).tolist()))
    if not any(piece.grows for piece in pieces):
        pieces.append(Piece(activation=1))
    slowness = rng.choice([1, 1.25, 1.5, 2] if quarters else [1, 1.1, 1.37], gpus)
    return Objective(
        pieces=tuple(pieces),
        tile_tokens=int(rng.integers(1, 5)),
        slowness=tuple(slowness.tolist()) if rng.random() < 0.4 else None,
        split=bool(rng.random() < 0.7),
    )


@pytest.mark.parametrize(
    ("method", "packages", "share"),
    [
        ("highs", ["highspy"], 1),
        ("highs:warm_start=false", ["highspy"], 8),
        ("cp-sat", ["ortools"], 2),
        ("cp-sat:warm_start=false", ["ortools"], 8),
        ("pulp", ["pulp"], 6),
        ("pulp:solver=HiGHS,warm_start=false", ["pulp", "highspy"], 8),
        ("optimal", ["highspy", "ortools"], 2),
    ],
)
def test_all_objectives(
    method: str,
    packages: list[str],
    share: int,
    small_problems: list[tuple[Problem, Objective, float]],
) -> None:
    """Every engine proves what trying everything finds, under every linear objective."""
    for package in packages:
        pytest.importorskip(package)
    for problem, objective, optimum in small_problems[::share]:
        routing = eo.solve_routing(
            problem.placement, problem.tokens, objective=objective, method=method
        )
        assert routing.makespan == routing.bound == optimum
        assert routing.status == eo.Status.OPTIMAL


def test_search_is_between_the_bound_and_the_better_pure_optimum(
    small_problems: list[tuple[Problem, Objective, float]],
) -> None:
    """The search's bound is at most the optimum, its answer at least that, and no worse than pure.

    Pure: the answer of `matching`, and where experts may be split that of `flow`.
    """
    for problem, objective, optimum in small_problems:
        placement, tokens = problem.placement, problem.tokens
        routing = eo.solve_routing(placement, tokens, objective=objective, method="makespan")
        assert routing.bound <= optimum <= routing.makespan
        for pure in ("activations", "tokens")[: 1 + objective.split]:
            other = eo.solve_routing(placement, tokens, objective=pure).tokens
            assert routing.makespan <= objective.time(other).max()


def test_curves() -> None:
    """CP-SAT and `optimal` bring curves to the optimum; times that add exactly, to the proof.

    The optimum may use two slots of an expert on one GPU. The search never does, but its bound
    holds for that too.
    """
    pytest.importorskip("ortools")
    rng = np.random.default_rng(20260304)
    proven = 0
    for number in range(90):
        problem = draw_small(rng)
        placement, demand = problem.placement, problem.tokens
        tokens = np.cumsum(rng.choice([1, 2, 4], 3))
        times = np.sort(rng.integers(0, 20, 3)) / (4 if number % 2 else 7) + 0.25
        curve = Curve(tuple(tokens.tolist()), tuple(times.tolist()))
        objective = draw_objective(rng, placement.num_gpus, curve)
        slowness = np.array(objective.slowness or (1.0,))
        adds_exactly = bool((slowness[:, None] * times * 64 % 1 == 0).all())
        proven += adds_exactly
        optimum = float(optimal_makespan(placement, demand, objective))
        searched = eo.solve_routing(placement, demand, objective=objective, method="makespan")
        assert searched.bound <= optimum <= searched.makespan
        for method in ("cp-sat", "optimal"):
            routing = eo.solve_routing(placement, demand, objective=objective, method=method)
            assert routing.bound <= optimum <= routing.makespan
            assert routing.makespan <= routing.bound * (1 if adds_exactly else 1 + 1e-12)
    assert proven > 20
