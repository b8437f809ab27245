"""HiGHS alone: its defects and its tolerances."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from eplb_opt.objective import Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.routers.exact import Found, Pairs, Program
from eplb_opt.routers.highs import solve
from eplb_opt.routing import Status, solve_routing
from eplb_opt.testing import check_routing, optimal_makespan

highspy = pytest.importorskip("highspy")


@pytest.mark.parametrize(
    ("objective", "slots", "tokens", "optimum"),
    [
        (
            "activations",
            [[1, 8, -1, -1], [7, 3, 0, 5], [2, 6, 4, -1], [1, 4, 0, -1], [4, 1, 5, -1]],
            [3, 1, 4, 1, 4, 2, 3, 4, 2],
            2,
        ),
        (
            "tokens",
            [[8, 3, 2, 1], [3, 8, 6, -1], [4, 7, 5, 2], [1, 3, 6, -1], [5, 8, 0, 5]],
            [3, 5, 3, 5, 5, 2, 3, 5, 4],
            10,
        ),
    ],
)
def test_start_that_presolve_improves(
    objective: str, slots: list[list[int]], tokens: list[int], optimum: int
) -> None:
    """Where HiGHS 1.16 hands back the start beside a better objective, it is asked again."""
    routing = solve_routing(Placement(slots), tokens, objective=objective, method="highs")
    assert routing.makespan == optimum
    assert routing.status == Status.OPTIMAL


@pytest.mark.parametrize("method", ["highs", "highs:warm_start=false"])
def test_bound_holds_where_doubles_end(method: str) -> None:
    """HiGHS may take a token too many of billions for the optimum; the bound does not."""
    placement = Placement([[0, 1], [0, 2], [0, 1], [1, 2]])
    tokens = np.array([2**31, 2**33 + 1, 12_345_678_901])
    optimum = solve_routing(placement, tokens, objective="tokens").makespan
    routing = solve_routing(placement, tokens, objective="tokens", method=method)
    check_routing(placement, tokens, routing)
    assert optimum * (1 - 2e-6) <= routing.bound <= optimum <= routing.makespan


def test_program_that_presolve_calls_infeasible() -> None:
    """Where HiGHS 1.16 presolves a solvable program away, it is asked again without presolve."""
    placement, tokens = Placement([[1, 3, 0, 3], [2, 0, 1, 3]]), np.array([4, 1, 1, 5])
    objective = Objective(
        pieces=(
            Piece(token=2.421),
            Piece(offset=5.053, activation=3.0),
            Piece(offset=4.0, activation=0.284, tile=5.0),
        ),
        tile_tokens=3,
    )
    for method in ("highs", "highs:warm_start=false"):
        routing = solve_routing(placement, tokens, objective=objective, method=method, bound=False)
        assert routing.makespan == routing.bound == optimal_makespan(placement, tokens, objective)


def ask(program: Program) -> Found:
    """Solve a program without a start, in a thread that then ends: see `exact.judge`."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(solve, program, None, math.inf).result()


def test_nothing_within_a_makespan() -> None:
    """Asked for less than the optimum, HiGHS says that there is none, within its tolerance."""
    placement, objective = Placement([[0, 1], [0, 2]]), Objective.preset("tokens")
    program = Program.of(placement, Pairs.of(placement, 0), np.array([5, 3, 1]), objective)
    found = ask(replace(program, most=4.0))
    assert found.taken is None
    assert 4.9 < found.bound < 5
    found = ask(replace(program, most=5.0))
    assert found.taken is not None
    assert program.makespan(program.rounded(found.taken)) == 5


def test_few_activated_and_few_tokens() -> None:
    """With a limit on activated replicas, tokens are balanced within it."""
    placement, tokens = Placement([[0, 1], [0, 1]]), np.array([9, 5])
    program = Program.of(placement, Pairs.of(placement, 0), tokens, Objective.preset("tokens"))
    for limit, makespan in ((1, 9), (2, 7)):
        limited = replace(program, most_activated=np.array([limit, limit]))
        found = ask(limited)
        assert found.taken is not None
        assert program.makespan(program.rounded(found.taken)) == makespan


def test_caller_keeps_their_scheduler() -> None:
    """To route does not bind the calling thread's own HiGHS models to one thread."""
    solve_routing(Placement([[0, 1], [1, 0]]), [3, 2], method="highs")
    own = highspy.Highs()
    own.silent()
    own.setOptionValue("threads", 2)
    x = own.addVariable(0, 4, type=highspy.HighsVarType.kInteger)
    own.maximize(3 * x)
    assert own.getModelStatus() == highspy.HighsModelStatus.kOptimal
