"""CP-SAT alone: what it does to the process, and its exactness."""

from __future__ import annotations

import math
import signal
from dataclasses import replace

import numpy as np
import pytest

from eplb_opt import _core
from eplb_opt.objective import Curve, Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.routers.cp_sat import solve
from eplb_opt.routers.exact import Pairs, Program
from eplb_opt.routing import Proof, Status, solve_routing
from eplb_opt.testing import check_routing, optimal_makespan

pytest.importorskip("ortools")


def test_interrupts_still_reach_python() -> None:
    """After a call Ctrl-C raises KeyboardInterrupt as before, though CP-SAT would undo that."""
    solve_routing(Placement([[0, 1], [1, 0]]), [3, 2], method="cp-sat")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_exact_to_the_last_token() -> None:
    """The largest counts are split to the token."""
    most = _core.MAX_TOKENS_PER_EXPERT
    placement = Placement([[0, 1], [0, 2], [0, -1]])
    routing = solve_routing(placement, [most, 1, 2], objective="tokens", method="cp-sat")
    assert routing.makespan == -(-(most + 3) // 3)
    assert routing.status == Status.OPTIMAL


MOST = _core.MAX_TOKENS_PER_EXPERT
SHARED = Placement([[0, 1], [0, 2], [1, 2], [0, 3]])


@pytest.mark.parametrize(
    "prices",
    [(14.78, 0.0945), (1 / 3, 1 / 7), (1e-9, 3e-13), (12345.678901234567, 0.1)],
)
def test_prices_of_any_size(prices: tuple[float, float]) -> None:
    """Times that do not fit 64 bits exactly are rounded down: the bound holds, the gap is small."""
    objective = Objective(pieces=(Piece(activation=prices[0]), Piece(token=prices[1])))
    for tokens, gap in (([MOST, 5, 7, 1], 1e-5), ([400, 90, 30, 2], 1e-12)):
        routing = solve_routing(SHARED, tokens, objective=objective, method="cp-sat", bound=False)
        check_routing(SHARED, tokens, routing)
        assert routing.gap <= gap
        assert routing.proved_by in (Proof.CP_SAT, Proof.COUNT)


def test_exact_decimals_are_proven() -> None:
    """Of TEMPO's prices, times a slowness, a proof with the most tokens there are is exact."""
    tokens = [MOST, MOST, 5, 1]
    objective = Objective(
        pieces=(Piece(activation=14.78), Piece(token=0.0945)), slowness=(1, 1.1, 1, 1.25)
    )
    routing = solve_routing(
        SHARED, tokens, objective=objective, method="cp-sat:warm_start=false", bound=False
    )
    check_routing(SHARED, tokens, routing)
    assert routing.status == Status.OPTIMAL
    assert routing.proved_by == Proof.CP_SAT


STEPS = Curve((1, 4, 5, 8, 9), (2.0, 2.0, 4.0, 4.0, 6.0))
CONVEX = Curve((2, 4, 6), (0.0, 1.0, 4.0))
CONCAVE = Curve((1, 2, 6), (3.0, 5.0, 6.0))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("curve", [STEPS, CONVEX, CONCAVE])
def test_curves(curve: Curve, split: bool) -> None:
    """Steps, convex and concave curves, alone and beside a linear piece, are proven."""
    rng = np.random.default_rng(0)
    placement = Placement([[0, 1, 1], [0, 2, -1], [1, 2, 0]])
    for pieces in ((curve,), (curve, Piece(activation=2, token=0.25))):
        objective = Objective(pieces=pieces, split=split, slowness=(1, 1.5, 1))
        for _ in range(4):
            tokens = rng.integers(0, 9, 3)
            smallest = optimal_makespan(placement, tokens, objective)
            for method in ("cp-sat", "cp-sat:warm_start=false"):
                routing = solve_routing(
                    placement, tokens, objective=objective, method=method, bound=False
                )
                check_routing(placement, tokens, routing)
                assert routing.makespan == routing.bound == smallest


def test_two_slots_of_a_gpu_under_a_curve() -> None:
    """Where half the tokens take less than half the time, both slots of an expert are used."""
    placement, objective = Placement([[0, 0]]), Objective(pieces=(CONVEX,))
    routing = solve_routing(placement, [4], objective=objective, method="cp-sat", bound=False)
    assert routing.tokens.tolist() == [[2, 2]]
    assert routing.makespan == routing.bound == 0


def test_times_that_doubles_round_are_bounded() -> None:
    """Of a curve in thirds and sevenths the bound is true, and short of the optimum by rounding."""
    curve = Curve((1, 3, 7), (1 / 3, 1 / 3, 9 / 7))
    objective = Objective(pieces=(curve,))
    routing = solve_routing(SHARED, [9, 4, 3, 2], objective=objective, method="cp-sat", bound=False)
    smallest = optimal_makespan(SHARED, [9, 4, 3, 2], objective)
    assert routing.bound <= smallest <= routing.makespan <= smallest * (1 + 1e-12)
    assert routing.gap < 1e-12


def test_nothing_within_a_makespan() -> None:
    """Asked for less than the optimum, or than what counting allows, CP-SAT says there is none."""
    placement, objective = Placement([[0, 1], [0, 2]]), Objective.preset("tokens")
    program = Program.of(placement, Pairs.of(placement, 0), np.array([5, 3, 1]), objective)
    for most in (4.0, 2.0):
        found = solve(replace(program, most=most), None, math.inf)
        assert found.taken is None
        assert found.bound == most + 1


def test_few_activated_and_few_tokens() -> None:
    """With a limit on activated replicas, tokens are balanced within it."""
    placement, tokens = Placement([[0, 1], [0, 1]]), np.array([9, 5])
    program = Program.of(placement, Pairs.of(placement, 0), tokens, Objective.preset("tokens"))
    for limit, makespan in ((1, 9), (2, 7)):
        limited = replace(program, most_activated=np.array([limit, limit]))
        found = solve(limited, None, math.inf)
        assert found.taken is not None
        assert program.makespan(program.rounded(found.taken)) == makespan
