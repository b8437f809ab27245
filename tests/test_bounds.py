"""Bounds from certificates: counting proves what it should, and never more than is true."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt.bounds import certified_bound, placement_bound
from eplb_opt.errors import InvalidTokensError
from eplb_opt.objective import Curve, Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.routing import solve_routing
from eplb_opt.testing import Problem, objectives, optimal_makespan, problems

OBJECTIVES = st.sampled_from(("activations", "tokens"))


def proven(gpus: list[list[int]], tokens: list[int], members: list[bool], objective: str) -> int:
    """Count by loops what a set of GPUs proves for one layer."""
    size = sum(members)
    count = proven_count(gpus, tokens, members, objective)
    return math.ceil(count / size) if size and count < 2**50 else -(-count // max(size, 1))


def proven_count(
    gpus: list[list[int]], tokens: list[int], members: list[bool], objective: str
) -> int:
    """Count what must be served in a set of GPUs: live experts, or tokens."""
    inside = {expert for row, member in zip(gpus, members, strict=True) if member for expert in row}
    outside = {e for row, member in zip(gpus, members, strict=True) if not member for e in row}
    confined = inside - outside - {-1}
    return sum(bool(tokens[e]) if objective == "activations" else tokens[e] for e in confined)


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


def of_every_set(problem: Problem, objective: Objective) -> list[NDArray[np.float64]]:
    """Return the bounds that all sets of GPUs prove."""
    placement, tokens = problem.placement, problem.tokens
    shape = (*tokens.shape[:-1], placement.num_gpus)
    return [
        certified_bound(placement, tokens, np.broadcast_to(members, shape), objective)
        for members in product([False, True], repeat=placement.num_gpus)
    ]


@settings(max_examples=60)
@given(
    st.data(),
    problems(
        max_layers=1,
        max_gpus=3,
        max_slots_per_gpu=3,
        max_experts=5,
        max_tokens=5,
        max_batches=1,
        huge=False,
    ),
)
def test_no_set_proves_more_than_the_best_of_all_routings(
    data: st.DataObject, problem: Problem
) -> None:
    """For every kind of objective, no bound is above the least makespan that trying all finds.

    Compared as they are, without a tolerance: bounds are evaluated so that rounding keeps order.
    """
    objective = data.draw(objectives(num_gpus=problem.placement.num_gpus))
    least = optimal_makespan(problem.placement, problem.tokens, objective)
    bounds = of_every_set(problem, objective)
    assert (np.max(bounds, axis=0) <= least).all()
    assert (np.min(bounds, axis=0) >= objective.idle).all()


def least_time(
    objective: Objective, counts: list[int], members: list[bool], slots_per_gpu: int
) -> float:
    """Find by loops the smallest time by which a set's GPUs can have so many activations, tokens.

    For objectives without curves.
    """
    nominal = replace(objective, slowness=None)
    slowness = objective.slowness or (1.0,) * len(members)
    of_set = [s for s, member in zip(slowness, members, strict=True) if member]
    activations, tokens = counts
    best = objective.idle
    for count, on_one_gpu in (
        (activations, [[1] * j + [0] * (slots_per_gpu - j) for j in range(slots_per_gpu + 1)]),
        (tokens, [[j] for j in range(tokens + 1)]),
    ):
        if not count or not of_set:
            continue
        least = nominal.time(np.array(on_one_gpu)).tolist()
        times = [[s * time for time in least] for s in of_set]
        needed = [
            time
            for time in sorted({time for of_gpu in times for time in of_gpu})
            if sum(max(bisect_right(of_gpu, time) - 1, 0) for of_gpu in times) >= count
        ]
        best = max(best, needed[0])
    return float(best)


@given(st.data(), problems(max_layers=1, max_gpus=4, max_tokens=6, max_batches=0, huge=False))
def test_unequal_gpus_by_loops(data: st.DataObject, problem: Problem) -> None:
    """The bound is the smallest time that occurs by which the set's GPUs can have their counts."""
    placement = problem.placement
    objective = data.draw(objectives(num_gpus=placement.num_gpus, curves=False))
    members = data.draw(
        st.lists(st.booleans(), min_size=placement.num_gpus, max_size=placement.num_gpus)
    )
    tokens = problem.tokens[0] if placement.layered else problem.tokens
    rows = placement.expert_of[0].reshape(placement.num_gpus, -1).tolist()
    counts = [proven_count(rows, tokens.tolist(), members, kind) for kind in ("activations", "")]
    bound = certified_bound(
        placement, problem.tokens, [members] * placement.layered or members, objective
    )
    assert bound.item() == least_time(objective, counts, members, placement.slots_per_gpu)


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


def test_worked_examples_of_measured_times() -> None:
    """The larger of two pieces, offsets, slow GPUs, tiles and curves: by hand."""
    placement = Placement([[0, 1], [0, 2]])
    roofline = Objective(pieces=(Piece(offset=3, activation=2), Piece(token=0.5)))
    for tokens, time in (([1, 1, 1], 7), ([99, 1, 1], 25.5), ([0, 0, 0], 3)):
        assert float(certified_bound(placement, tokens, [True, True], roofline)) == time
    # Three replicas: the fast GPU has them all by 3, the two together two of them by 2.
    slow = Objective(pieces=(Piece(activation=1.0),), slowness=(1.0, 2.5))
    assert float(certified_bound(placement, [1, 1, 1], [True, True], slow)) == 2.5
    assert float(certified_bound(placement, [1, 1, 1], [False, True], slow)) == 2.5
    assert float(certified_bound(placement, [1, 1, 1], [True, False], slow)) == 1
    # 70 tokens: 50 by 50 at slowness 1 and 20 by 50 at slowness 2.5.
    slow = Objective(pieces=(Piece(token=1.0),), slowness=(1.0, 2.5))
    assert float(certified_bound(placement, [60, 5, 5], [True, True], slow)) == 50
    tiles = Objective(pieces=(Piece(activation=10, tile=4, token=1),), tile_tokens=8)
    assert float(certified_bound(placement, [30, 0, 0], [True, True], tiles)) == 10 + 2 * 4 + 15
    # A staircase of 128 tokens a step: its floor is 10 a replica, 10 / 128 a token.
    steps = Objective(pieces=(Curve((1, 128, 129, 256, 257), (10.0, 10.0, 20.0, 20.0, 30.0)),))
    assert float(certified_bound(placement, [1, 1, 1], [True, True], steps)) == 20
    found = float(certified_bound(placement, [2560, 0, 0], [True, True], steps))
    assert found == pytest.approx(100, rel=1e-10)
    assert found < 100


def test_slow_gpus_with_huge_counts() -> None:
    """Halving finds the exact integers where rounding would be off by one."""
    placement = Placement([[0], [0], [0]])
    most = 2**39 - 1
    slow = Objective(pieces=(Piece(token=1.0),), slowness=(1.0, 3.0, 7.0))
    bound = certified_bound(placement, [most], [True, True, True], slow)
    caps = [math.floor(bound.item() / s) for s in (1, 3, 7)]
    before = [math.floor((bound.item() - 1) / s) for s in (1, 3, 7)]
    assert sum(caps) >= most > sum(before)


def test_the_slowness_must_be_of_the_placement() -> None:
    """As in `Objective.time`, other numbers of GPUs are refused."""
    slow = Objective(pieces=(Piece(token=1.0),), slowness=(1.0, 2.0))
    with pytest.raises(ValueError, match="slowness of 2 GPUs; the placement has 1"):
        certified_bound(Placement([[0]]), [1], [True], slow)


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


# --- bounds of placements ---


def peak_of_any(
    load: list[float], gpus: int, slots: int, kept: Callable[[Any], bool] = lambda _: True
) -> float:
    """Return the least GPU load of all placements, shared copies included, at the best split.

    Of every GPU set the confined load over its size is needed, and for some set suffices.
    """
    best = math.inf
    experts = range(len(load))
    for of_gpus in product(combinations_with_replacement(experts, slots), repeat=gpus):
        if len({e for of in of_gpus for e in of}) < len(load) or not kept(of_gpus):
            continue
        peak = 0.0
        for members in product([False, True], repeat=gpus):
            if any(members):
                confined = set(experts).difference(
                    *(of for of, member in zip(of_gpus, members, strict=True) if not member)
                )
                peak = max(peak, sum(load[e] for e in confined) / sum(members))
        best = min(best, peak)
    return best


@settings(max_examples=100)
@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_no_placement_is_below_its_bound(data: st.DataObject, gpus: int, slots: int) -> None:
    """Whatever is placed where, shared copies included, and split how, no peak is lower."""
    entries = st.one_of(st.integers(0, 9).map(float), st.floats(0.01, 1e6))
    load = data.draw(st.lists(entries, min_size=1, max_size=min(gpus * slots, 4)))
    bound = placement_bound(np.array(load), num_gpus=gpus, slots_per_gpu=slots)
    assert float(bound) <= peak_of_any(load, gpus, slots) * (1 + 1e-12)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 9), min_size=4, max_size=4), st.integers(1, 2))
def test_no_placement_in_nodes_is_below_its_bound(load: list[int], slots: int) -> None:
    """With two groups kept to two nodes of two GPUs neither."""
    bound = placement_bound(
        np.array(load, float), num_gpus=4, slots_per_gpu=slots, num_nodes=2, num_groups=2
    )

    def kept(of_gpus: tuple[tuple[int, ...], ...]) -> bool:
        homes = {(e // 2, g // 2) for g, of in enumerate(of_gpus) for e in of}
        return len(homes) == 2

    assert float(bound) <= peak_of_any([float(w) for w in load], 4, slots, kept) * (1 + 1e-12)


def test_worked_bounds_of_placements() -> None:
    """By hand: the mean, the hottest with the lightest beside, the copies that are to be had."""
    for load, gpus, slots, bound in (
        ([4, 3, 2, 1], 2, 2, 5.0),  # the mean
        ([9, 1, 1, 1], 2, 2, 10.0),  # the hottest has one beside it
        ([6, 6, 6, 1, 1, 1], 3, 2, 7.0),  # so have the three hottest
        ([5, 5, 5, 0, 0, 0], 2, 3, 10.0),  # two of three on one GPU
        ([12, 2, 2], 4, 1, 6.0),  # one copy more
        ([12, 12, 0], 4, 1, 12.0),  # for one of two
        ([12, 4, 1, 1, 1], 3, 2, 7.0),  # the hottest on two GPUs, with one beside on each
    ):
        found = placement_bound(np.array(load, float), num_gpus=gpus, slots_per_gpu=slots)
        assert float(found) == pytest.approx(bound), load


def test_bounds_of_recorded_loads(recorded_load: Callable[[str], NDArray[np.int64]]) -> None:
    """Without redundancy the k-hot bound is as measured before; copies bring it to the mean."""
    for name, peak in (("prefill_in4096", 1.199), ("decode_in2000out100", 1.057)):
        load = recorded_load(name).astype(float)
        mean = load.sum(axis=1) / 32
        alone = placement_bound(load, num_gpus=32, slots_per_gpu=8)
        assert (alone / mean).mean() == pytest.approx(peak, abs=1e-3)
        copied = placement_bound(load, num_gpus=32, slots_per_gpu=9)
        assert copied.tolist() == mean.tolist()
        nodes = placement_bound(load, num_gpus=32, slots_per_gpu=8, num_nodes=4, num_groups=8)
        assert (nodes >= alone).all()
        assert (nodes > alone).any()
