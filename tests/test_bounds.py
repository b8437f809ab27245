"""Bounds from certificates: counting proves what it should, and never more than is true."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt.bounds import certified_bound
from eplb_opt.errors import InvalidTokensError
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routing import solve_routing
from eplb_opt.testing import Problem, problems

OBJECTIVES = st.sampled_from(("activations", "tokens"))


def proven(gpus: list[list[int]], tokens: list[int], members: list[bool], objective: str) -> int:
    """Count by loops what a set of GPUs proves for one layer."""
    inside = {expert for row, member in zip(gpus, members, strict=True) if member for expert in row}
    outside = {e for row, member in zip(gpus, members, strict=True) if not member for e in row}
    size = sum(members)
    confined = inside - outside - {-1}
    count = sum(bool(tokens[e]) if objective == "activations" else tokens[e] for e in confined)
    return math.ceil(count / size) if size and count < 2**50 else -(-count // max(size, 1))


@given(st.data(), problems(max_gpus=6), OBJECTIVES)
def test_counting_by_loops_gives_the_same(
    data: st.DataObject, problem: Problem, objective: str
) -> None:
    """For any set of GPUs, in any batch, the bound is what plain loops count."""
    placement, tokens = problem.placement, problem.tokens
    shape = (*tokens.shape[:-1], placement.num_gpus)
    seed = data.draw(st.integers(0, 2**32 - 1))
    members = np.random.default_rng(seed).random(shape) < 0.6
    bound = certified_bound(placement, tokens, members, objective)
    assert bound.shape == tokens.shape[:-1]
    assert bound.dtype == np.float64
    for at in np.ndindex(*bound.shape):
        gpus = placement.expert_of[at[-1] if placement.layered else 0]
        rows = gpus.reshape(placement.num_gpus, -1).tolist()
        assert bound[at] == proven(rows, tokens[at].tolist(), members[at].tolist(), objective)


@given(problems(max_gpus=4, max_layers=1), OBJECTIVES)
def test_no_set_proves_more_than_the_optimum_and_one_proves_it(
    problem: Problem, objective: str
) -> None:
    """Over all sets of GPUs, the largest bound is the optimum: the duality behind certificates."""
    placement, tokens = problem.placement, problem.tokens
    optimum = solve_routing(placement, tokens, objective=objective).makespan
    bounds = [
        certified_bound(
            placement,
            tokens,
            np.broadcast_to(members, (*tokens.shape[:-1], len(members))),
            objective,
        )
        for members in product([False, True], repeat=placement.num_gpus)
    ]
    assert np.array_equal(np.max(bounds, axis=0), optimum)


def test_worked_examples() -> None:
    """Three live experts on two GPUs need two on one; confined ones count, others do not."""
    placement = Placement([[0, 1], [0, 2]])
    assert float(certified_bound(placement, [1, 1, 1], [True, True])) == 2
    assert float(certified_bound(placement, [1, 1, 1], [True, False])) == 1
    assert float(certified_bound(placement, [1, 0, 1], [True, False])) == 0
    assert float(certified_bound(placement, [9, 2, 4], [True, True], "tokens")) == 8
    assert (
        float(certified_bound(placement, [9, 2, 4], [False, True], Objective.preset("tokens"))) == 4
    )


def test_an_empty_set_proves_nothing() -> None:
    """No members, or only dead ones, prove 0."""
    placement = Placement([[0, 1], [-1, -1]], num_experts=2)
    assert float(certified_bound(placement, [5, 5], [False, False])) == 0
    assert float(certified_bound(placement, [5, 5], [False, True])) == 0
    nobody = Placement([[-1], [-1]], num_experts=1, allow_missing=True)
    assert float(certified_bound(nobody, [0], [True, True])) == 0


def test_dead_gpus_do_not_thin_the_bound() -> None:
    """A set is counted as it stands, so the routers leave dead GPUs out of theirs."""
    placement = Placement([[0, 1], [-1, -1]], num_experts=2)
    assert float(certified_bound(placement, [5, 5], [True, True])) == 1
    assert float(certified_bound(placement, [5, 5], [True, False], "tokens")) == 10
    for objective in ("activations", "tokens"):
        routing = solve_routing(placement, [5, 5], objective=objective)
        assert routing.certificate.tolist() == [True, False]


def test_other_shapes_are_refused() -> None:
    """A certificate is a bit per GPU and problem; tokens must be servable."""
    placement = Placement([[0, 1], [0, 2]])
    for certificate in ([True], [True] * 3, [[True, True]], [[True], [True]]):
        with pytest.raises(InvalidTokensError, match=r"a certificate .* has shape \[2\]"):
            certified_bound(placement, [1, 1, 1], certificate)
    with pytest.raises(InvalidTokensError, match="expert 1 has -1 tokens"):
        certified_bound(placement, [1, -1, 1], [True, True])


def test_sums_beyond_32_bits_are_exact() -> None:
    """Ceilings of huge sums are taken in integers."""
    placement = Placement([[0, 1], [0, 1]])
    tokens = [2**38 + 1, 2**38]
    assert float(certified_bound(placement, tokens, [True, True], "tokens")) == 2**38 + 1


@pytest.mark.parametrize("tokens", [[1, 2], [1.0, 2.0, 3.0], [[1, 2, 3, 4]]])
def test_bad_tokens_are_refused(tokens: Any) -> None:
    """Tokens that do not fit the placement are an error of ours."""
    with pytest.raises(InvalidTokensError):
        certified_bound(Placement([[0, 1], [0, 2]]), tokens, [True, True])


def test_an_unknown_objective_is_refused() -> None:
    """As everywhere, the presets are listed."""
    with pytest.raises(ValueError, match="known: activations, tokens"):
        certified_bound(Placement([[0]]), [1], [True], "makespan")
