"""`uniform`: the same share for every replica, and a fair turn for what is left over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from eplb_opt import _core
from eplb_opt.errors import InfeasibleError, InvalidTokensError
from eplb_opt.placement import Placement
from eplb_opt.routing import solve_routing
from eplb_opt.testing import Problem, check_routing, problems


def uniform(slots: list[int], tokens: list[int]) -> list[int]:
    """Split one layer by loops: equal shares, then what is left from replica e (mod copies) on."""
    routed = [0] * len(slots)
    for expert, count in enumerate(tokens):
        replicas = [slot for slot, held in enumerate(slots) if held == expert]
        for slot in replicas:
            routed[slot] = count // len(replicas)
        for turn in range(count % len(replicas) if replicas else 0):
            routed[replicas[(expert + turn) % len(replicas)]] += 1
    return routed


@given(problems())
def test_every_slot_gets_what_the_rule_says(problem: Problem) -> None:
    """Slot by slot the answer of plain loops, duplicates and empty slots included."""
    placement = problem.placement
    routing = solve_routing(placement, problem.tokens, method="uniform")
    check_routing(placement, problem.tokens, routing)
    for at in np.ndindex(*routing.makespan.shape):
        slots = placement.expert_of[at[-1] if placement.layered else 0].tolist()
        expected = uniform(slots, problem.tokens[at].tolist())
        assert routing.tokens[at].ravel().tolist() == expected


def test_leftovers_rotate_with_the_expert() -> None:
    """Experts 0 to 3 on two GPUs, one token each: low GPUs are not favoured."""
    placement = Placement([[0, 1, 2, 3], [0, 1, 2, 3]])
    routing = solve_routing(placement, [1, 1, 1, 1], method="uniform")
    assert routing.tokens.tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]
    three = Placement([[0, 1], [0, 1], [0, 1]])
    routing = solve_routing(three, [5, 5], method="uniform")
    assert routing.tokens.tolist() == [[2, 1], [2, 2], [1, 2]]


def test_both_slots_of_a_duplicate_are_used() -> None:
    """Engines use both copies on a GPU, and both count as activated."""
    routing = solve_routing(Placement([[0, 0], [0, 1]]), [9, 0], method="uniform")
    assert routing.tokens.tolist() == [[3, 3], [3, 0]]
    assert routing.activated.tolist() == [2, 1]


def test_absent_experts_take_no_part() -> None:
    """Experts without replica and tokens are passed over; with tokens they are an error."""
    placement = Placement([[1, -1], [1, -1]], num_experts=3, allow_missing=True)
    routing = solve_routing(placement, [0, 5, 0], method="uniform")
    assert routing.tokens.tolist() == [[2, 0], [3, 0]]
    with pytest.raises(InfeasibleError, match="expert 0 has tokens but no replica"):
        solve_routing(placement, [1, 5, 0], method="uniform")
    with pytest.raises(InvalidTokensError, match="expert 1 has -5 tokens"):
        solve_routing(placement, [0, -5, 0], method="uniform")


def test_huge_counts_lose_nothing() -> None:
    """The most tokens over three replicas sum to what came in."""
    most = _core.MAX_TOKENS_PER_EXPERT
    routing = solve_routing(Placement([[0], [0], [0]]), [most], method="uniform")
    assert int(routing.gpu_tokens().sum()) == most
    assert np.ptp(routing.gpu_tokens()) <= 1
