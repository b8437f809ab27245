"""`random`: every token at random, none lost, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt import _core
from eplb_opt.errors import InfeasibleError, InvalidTokensError
from eplb_opt.placement import Placement
from eplb_opt.routers import Random
from eplb_opt.routing import solve_routing
from eplb_opt.testing import Problem, check_routing, problems


@given(problems(), st.integers(0, 2**32))
def test_every_token_is_served(problem: Problem, seed: int) -> None:
    """Whatever the seed, the answer is a routing, and the same twice."""
    routing = solve_routing(problem.placement, problem.tokens, method=Random(seed))
    check_routing(problem.placement, problem.tokens, routing)
    again = solve_routing(problem.placement, problem.tokens, method=f"random:seed={seed}")
    assert np.array_equal(routing.tokens, again.tokens)


@pytest.mark.parametrize("copies", [2, 3, 5, 7, 17])
def test_replicas_are_equally_likely(copies: int) -> None:
    """Over many tokens each replica gets its share, within five standard deviations."""
    slots = [[0, 1 if gpu == 0 else -1] for gpu in range(copies)]
    slots[0] = [0, 1]
    placement = Placement([*slots, *[[1, -1]] * 20])
    count = 10**6
    routing = solve_routing(placement, [count, 0], method="random")
    shares = routing.tokens[:copies, 0]
    deviation = np.sqrt(count * (1 / copies) * (1 - 1 / copies))
    assert (abs(shares - count / copies) < 5 * deviation).all()


def test_small_counts_are_a_fair_coin() -> None:
    """One token and two replicas: each takes it in half of the batches; experts are independent."""
    placement = Placement([[0, 1], [0, 1]])
    tokens = np.ones((10_000, 2), np.int64)
    first = solve_routing(placement, tokens, method="random", bound=False).tokens[:, 0]
    assert abs(first.mean() - 0.5) < 0.02
    assert abs((first[:, 0] == first[:, 1]).mean() - 0.5) < 0.02


def test_seeds_differ() -> None:
    """Another seed, another answer."""
    placement = Placement([[0], [0]])
    answers = {
        int(solve_routing(placement, [10**6], method=Random(seed)).tokens[0, 0])
        for seed in range(5)
    }
    assert len(answers) == 5


@pytest.mark.parametrize("copies", [3, 7, 10])
def test_huge_counts_lose_no_token(copies: int) -> None:
    """Rounding in the draw leaves no token to a replica that does not exist."""
    experts = 50
    slots = np.full((copies + 1, experts), -1)
    slots[:copies] = np.arange(experts)
    slots[copies, 0] = 0
    tokens = np.full((200, experts), _core.MAX_TOKENS_PER_EXPERT)
    for seed in range(3):
        routing = solve_routing(Placement(slots), tokens, method=Random(seed), bound=False)
        assert np.array_equal(routing.expert_tokens(), tokens)


def test_a_negative_seed_is_refused() -> None:
    """The error names the option."""
    with pytest.raises(ValueError, match="seed must not be negative, not -1"):
        solve_routing(Placement([[0]]), [1], method="random:seed=-1")


def test_absent_experts_take_no_part() -> None:
    """Experts without replica are passed over unless they have tokens."""
    placement = Placement([[1, -1], [1, -1]], num_experts=3, allow_missing=True)
    routing = solve_routing(placement, [0, 5, 0], method="random")
    assert int(routing.tokens[:, 0].sum()) == 5
    with pytest.raises(InfeasibleError, match="expert 2 has tokens but no replica"):
        solve_routing(placement, [0, 5, 1], method="random")
    with pytest.raises(InvalidTokensError, match="expert 1 has -5 tokens"):
        solve_routing(placement, [0, -5, 0], method="random")
