"""Fixed shares: what each replica takes, whatever the batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt.placement import Placement
from eplb_opt.routers.quotas import Quotas
from eplb_opt.routing import Router, solve_routing
from eplb_opt.testing import Problem, check_routing, problems


@given(problems(), st.integers(0, 2**32 - 1))
def test_every_token_is_served_within_one_of_its_share(problem: Problem, seed: int) -> None:
    """A replica takes its share of the expert's tokens, rounded up or down at both ends."""
    placement, tokens = problem.placement, problem.tokens
    weights = np.random.default_rng(seed).random(placement.slots.shape)
    routing = solve_routing(placement, tokens, method=Quotas(weights))
    check_routing(placement, tokens, routing)
    by_layer = weights.reshape(placement.num_layers, -1)
    taken = routing.tokens.reshape(-1, placement.num_layers, by_layer.shape[1])
    demand = np.asarray(tokens).reshape(-1, placement.num_layers, placement.num_experts)
    for layer, held in enumerate(placement.expert_of):
        for slot in np.flatnonzero(held >= 0):
            same = held == held[slot]
            share = by_layer[layer, slot] / by_layer[layer, same].sum()
            exact = share * demand[:, layer, held[slot]]
            assert (np.abs(taken[:, layer, slot] - exact) <= 1 + 1e-9 * exact).all()


def test_a_table_repeats_the_routing_that_it_was_made_of() -> None:
    """Shares of a batch give the same answer for that batch, split experts included."""
    placement = Placement([[0, 1], [0, 2], [1, 2]])
    first = solve_routing(placement, [10, 7, 4], objective="tokens")
    again = solve_routing(placement, [10, 7, 4], method=Quotas(first.tokens))
    assert again.tokens.tolist() == first.tokens.tolist()


def test_an_expert_without_weight_goes_to_its_first_replica() -> None:
    """A table knows nothing of an expert that had no tokens."""
    placement = Placement([[0, 1], [0, 2]])
    table = Quotas([[0, 1], [0, 1]])
    assert solve_routing(placement, [5, 0, 0], method=table).gpu_tokens().tolist() == [5, 0]


@pytest.mark.parametrize(
    "weights", [[[1, -1], [1, 1]], [[1, np.nan], [1, 1]], [[np.inf, 1], [1, 1]]]
)
def test_weights_that_are_no_shares_are_refused(weights: list[list[float]]) -> None:
    """They are finite and not negative."""
    with pytest.raises(ValueError, match="weights are finite and not negative"):
        Quotas(weights)


def test_a_table_of_another_placement_is_refused() -> None:
    """Its weights are by slot."""
    with pytest.raises(ValueError, match=r"weights are \[1, 2\], the placement's slots \[2, 2\]"):
        Router(Placement([[0, 1], [0, 2]]), method=Quotas([[1, 1]]))
