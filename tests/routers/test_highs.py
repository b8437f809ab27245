"""HiGHS alone: its defects and its tolerances."""

from __future__ import annotations

import pytest

from eplb_opt.placement import Placement
from eplb_opt.routing import Status, solve_routing

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
    """HiGHS 1.16 takes one token too many for the optimum of these; the bound does not."""
    placement, tokens = Placement([[0], [0], [0]]), 2**31
    routing = solve_routing(placement, [tokens], objective="tokens", method=method)
    optimum = -(-tokens // 3)
    assert optimum * (1 - 2e-6) <= routing.bound <= optimum <= routing.makespan
    assert routing.status == Status.FEASIBLE


def test_caller_keeps_their_scheduler() -> None:
    """To route does not bind the calling thread's own HiGHS models to one thread."""
    solve_routing(Placement([[0, 1], [1, 0]]), [3, 2], method="highs")
    own = highspy.Highs()
    own.silent()
    own.setOptionValue("threads", 2)
    x = own.addVariable(0, 4, type=highspy.HighsVarType.kInteger)
    own.maximize(3 * x)
    assert own.getModelStatus() == highspy.HighsModelStatus.kOptimal
