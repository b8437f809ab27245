"""`metro`: Algorithm 1 in every order that the option allows, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt.errors import InfeasibleError, InvalidTokensError
from eplb_opt.placement import Placement
from eplb_opt.routers import Metro
from eplb_opt.routing import solve_routing
from eplb_opt.testing import Problem, check_routing, problems

DrawProblem = Callable[..., Problem]


def metro(gpus: list[list[int]], tokens: list[int], order: Sequence[int]) -> list[int]:
    """Route one layer by Algorithm 1: each live expert in turn to the smallest counter."""
    per_gpu = len(gpus[0])
    counters = [0] * len(gpus)
    routed = [0] * (len(gpus) * per_gpu)
    for expert in order:
        if tokens[expert]:
            holders = [gpu for gpu, row in enumerate(gpus) if expert in row]
            least = min(holders, key=lambda gpu: (counters[gpu], gpu))
            counters[least] += 1
            routed[least * per_gpu + gpus[least].index(expert)] = tokens[expert]
    return routed


def single_copy_first(gpus: list[list[int]], experts: int) -> list[int]:
    """Order the experts on one GPU before the others, each group by id."""
    return sorted(range(experts), key=lambda e: (sum(e in row for row in gpus) > 1, e))


def assert_follows(
    problem: Problem, method: str | Metro, order_of: Callable[[list[list[int]]], Sequence[int]]
) -> None:
    """Compare every slot of every problem with the plain algorithm in that order."""
    placement = problem.placement
    routing = solve_routing(placement, problem.tokens, method=method)
    check_routing(placement, problem.tokens, routing)
    for at in np.ndindex(*routing.makespan.shape):
        layer = placement.expert_of[at[-1] if placement.layered else 0]
        gpus = layer.reshape(placement.num_gpus, -1).tolist()
        expected = metro(gpus, problem.tokens[at].tolist(), order_of(gpus))
        assert routing.tokens[at].ravel().tolist() == expected


@given(problems())
def test_expert_order_is_ascending(problem: Problem) -> None:
    """By default the experts come by id."""
    experts = range(problem.placement.num_experts)
    assert_follows(problem, "metro", lambda _: experts)
    assert_follows(problem, Metro(order="expert"), lambda _: experts)


@given(problems())
def test_single_copy_first(problem: Problem) -> None:
    """Experts with one candidate GPU come first, even if they fill two of its slots."""
    experts = problem.placement.num_experts
    order = "metro:order=single-copy-first"
    assert_follows(problem, order, lambda gpus: single_copy_first(gpus, experts))


@given(st.data(), problems())
def test_an_order_of_ones_own(data: st.DataObject, problem: Problem) -> None:
    """Any permutation of the experts, the same in all layers."""
    order = data.draw(st.permutations(range(problem.placement.num_experts)))
    assert_follows(problem, Metro(order=tuple(order)), lambda _: order)


@given(problems(max_experts=4), st.integers(0, 100))
def test_random_order_is_an_order(problem: Problem, seed: int) -> None:
    """In each layer the answer to all batches is that of one permutation of the experts."""
    placement = problem.placement
    routing = solve_routing(placement, problem.tokens, method=Metro(order="random", seed=seed))
    check_routing(placement, problem.tokens, routing)
    for layer in range(placement.num_layers):
        gpus = placement.expert_of[layer].reshape(placement.num_gpus, -1).tolist()
        at = (..., layer) if placement.layered else (...,)
        tokens = problem.tokens[(*at, slice(None))].reshape(-1, placement.num_experts).tolist()
        routed = routing.tokens[(*at, slice(None), slice(None))]
        answers = routed.reshape(len(tokens), -1).tolist()
        assert any(
            answers == [metro(gpus, batch, order) for batch in tokens]
            for order in permutations(range(placement.num_experts))
        )


def test_random_order_depends_on_the_seed_and_layer() -> None:
    """The same seed gives the same answer; seeds and layers have orders of their own."""
    placement = Placement([[list(range(32))] * 4] * 3)
    tokens = np.ones((3, 32), np.int64)
    answers = [
        solve_routing(placement, tokens, method=f"metro:order=random,seed={seed}").tokens
        for seed in (0, 0, 1)
    ]
    assert np.array_equal(answers[0], answers[1])
    assert not np.array_equal(answers[0], answers[2])
    assert not np.array_equal(answers[0][0], answers[0][1])


@pytest.mark.parametrize(
    ("gpus", "slots", "experts"),
    [(1, 4, 4), (64, 4, 200), (65, 4, 200), (129, 3, 300), (300, 2, 500), (1024, 2, 2000)],
)
def test_at_every_width(draw_problem: DrawProblem, gpus: int, slots: int, experts: int) -> None:
    """The algorithm is the same on 1 to 1,024 GPUs."""
    rng = np.random.default_rng(8)
    problem = draw_problem(rng, gpus, slots, experts, layers=2, batches=2)
    assert_follows(problem, "metro", lambda _: range(experts))


def test_real_files(real_problems: dict[str, Problem]) -> None:
    """On everything recorded METRO is above the optimum, and less so with single copies first."""
    plain = first = best = 0.0
    for problem in real_problems.values():
        by_id, by_copies, optimum = (
            solve_routing(problem.placement, problem.tokens, method=method)
            for method in ("metro", "metro:order=single-copy-first", "optimal")
        )
        check_routing(problem.placement, problem.tokens, by_id)
        assert np.array_equal(by_id.bound, optimum.makespan)
        assert (by_copies.makespan >= optimum.makespan).all()
        plain += float(by_id.makespan.mean())
        first += float(by_copies.makespan.mean())
        best += float(optimum.makespan.mean())
    assert best < first < plain


def test_order_matters() -> None:
    """In id order an expert with a choice takes the place that another needs; METRO's gap."""
    placement = Placement([[0, 1], [0, 2]])
    assert solve_routing(placement, [1, 1, 0]).makespan == 1
    assert solve_routing(placement, [1, 1, 0], method="metro").makespan == 2
    single_first = solve_routing(placement, [1, 1, 0], method="metro:order=single-copy-first")
    assert single_first.makespan == 1


def test_makespan_in_tokens() -> None:
    """Asked for tokens, the routing is the same and the makespan counts tokens."""
    placement = Placement([[0, 1], [0, 2]])
    routing = solve_routing(placement, [5, 3, 0], method="metro", objective="tokens")
    assert routing.tokens.tolist() == [[5, 3], [0, 0]]
    assert (float(routing.makespan), float(routing.bound)) == (8.0, 4.0)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("by-load", "unknown order 'by-load'; known: expert, random, single-copy-first"),
        ("", "unknown order ''"),
        ((0, 1), "every expert from 0 to 2 once; 2 is missing"),
        ((0, 1, 1), "every expert from 0 to 2 once; 1 is repeated"),
        ((0, 1, 2, 2), "every expert from 0 to 2 once; 2 is repeated"),
        ((0, 1, 3), "every expert from 0 to 2 once; 3 is not an expert"),
        ((0, 1, 2**40), "every expert from 0 to 2 once; 1099511627776 is not an expert"),
        ((0, 1, 2, -1), "every expert from 0 to 2 once; -1 is not an expert"),
        ((), "every expert from 0 to 2 once; 0 is missing"),
    ],
)
def test_bad_orders_are_refused(order: Any, message: str) -> None:
    """An unknown name lists the known; a tuple must be a permutation of the experts."""
    with pytest.raises(ValueError, match=message):
        solve_routing(Placement([[0, 1, 2]]), [1, 1, 1], method=Metro(order=order))


@pytest.mark.parametrize("order", [[2, 0, 1], np.array([2, 0, 1]), np.array([2, 0, 1], np.uint8)])
def test_any_sequence_of_ids_is_an_order(order: Any) -> None:
    """Lists and arrays are kept as a tuple of ints, so that methods compare and hash by value."""
    method = Metro(order=order)
    assert method == Metro(order=(2, 0, 1))
    assert hash(method) == hash(Metro(order=(2, 0, 1)))
    assert all(type(expert) is int for expert in method.order)


@pytest.mark.parametrize("order", [(0.5, 1, 2), (0.0, 1.0, 2.0), 3, None, ("a",), [[0], [1]]])
def test_an_order_is_made_of_integers(order: Any) -> None:
    """What is neither a name nor a sequence of integers is refused when the method is made."""
    with pytest.raises(TypeError, match="order must be one of expert, random, single-copy-first"):
        Metro(order=order)


def test_a_negative_seed_is_refused() -> None:
    """The error names the option."""
    with pytest.raises(ValueError, match="seed must not be negative, not -1"):
        Metro(order="random", seed=-1)


def test_bad_tokens_are_refused() -> None:
    """Counts out of range and absent experts are named."""
    placement = Placement([[0, 1], [0, -1]], num_experts=3, allow_missing=True)
    with pytest.raises(InfeasibleError, match="expert 2 has tokens but no replica"):
        solve_routing(placement, [1, 1, 1], method="metro")
    with pytest.raises(InvalidTokensError, match="expert 0 has -4 tokens"):
        solve_routing(placement, [-4, 1, 0], method="metro")
