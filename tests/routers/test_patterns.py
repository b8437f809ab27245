"""The linear program over patterns: what it refutes is impossible, and most of that it refutes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eplb_opt.objective import Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.routers import optimal
from eplb_opt.routers.exact import NOTHING, Program, pairs_of
from eplb_opt.routers.patterns import refute
from eplb_opt.testing import Problem, optimal_makespan

pytest.importorskip("highspy")


def question(problem: Problem, objective: Objective, target: float) -> Program:
    """Ask whether any routing is within a target."""
    pairs = pairs_of(problem.placement, objective)[0]
    program = Program.of(problem.placement, pairs, problem.tokens, objective)
    return optimal._within(program, target)


def test_refutes_what_is_impossible() -> None:
    """Of drawn problems nothing that is possible is refuted, and most of what is not."""
    impossible = refuted = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        slots = rng.permutation(np.concatenate([np.arange(6), rng.integers(-1, 6, 6)]))
        problem = Problem(Placement(slots.reshape(4, 3), 6), rng.integers(0, 10, 6))
        objective = Objective(pieces=(Piece(activation=int(rng.integers(3, 7))), Piece(token=1)))
        smallest = float(optimal_makespan(problem.placement, problem.tokens, objective))
        for target in range(3, int(smallest) + 3):
            asked = question(problem, objective, target)
            found = refute(asked, math.inf)
            assert found.taken is None
            if found != NOTHING:
                assert found.bound > asked.most
                assert target < smallest
                refuted += 1
            impossible += target < smallest
    assert impossible * 0.75 < refuted < impossible


@pytest.mark.parametrize("unit", [1, 10**6])
def test_whole_experts_that_do_not_balance(unit: int) -> None:
    """Of three equal experts on two GPUs, with one smaller, two share one if none can be split."""
    tokens = np.array([3, 3, 3, 1]) * unit
    problem = Problem(Placement([[0, 1, 2, 3], [0, 1, 2, 3]]), tokens)
    whole = Objective(pieces=(Piece(activation=2 * unit), Piece(token=1)))
    assert refute(question(problem, whole, 6 * unit - 1), math.inf).bound == 6 * unit
    assert refute(question(problem, whole, 6 * unit), math.inf) == NOTHING
    # With a third replica on each one can be split, for 5 tokens each.
    split = Objective(pieces=(Piece(activation=unit), Piece(token=1)))
    assert refute(question(problem, split, 5 * unit), math.inf) == NOTHING
    assert refute(question(problem, split, 5 * unit - 1), math.inf).bound == 5 * unit


def test_too_many_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is proven where there is more to look at than allowed."""
    problem = Problem(Placement([[0, 1, 2, 3], [0, 1, 2, 3]]), np.array([3, 3, 3, 1]))
    asked = question(problem, Objective(pieces=(Piece(activation=2), Piece(token=1))), 5)
    monkeypatch.setattr("eplb_opt.routers.patterns.MOST_SETS", 31)
    assert refute(asked, math.inf) == NOTHING
    monkeypatch.setattr("eplb_opt.routers.patterns.MOST_SETS", 32)
    assert refute(asked, math.inf).bound == 6
