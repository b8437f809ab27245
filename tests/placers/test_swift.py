"""vLLM-Ascend's swift balancer: its rule in plain Python, its known figure, its weaknesses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt.errors import InvalidPlacementError
from eplb_opt.placers import first_placement
from eplb_opt.placing import solve_placement


def swift(load: NDArray[np.float64], old: list[list[int]], mean: float) -> list[list[int]]:
    """Place one layer by the rule at the head of ``swift.hpp``; the slots of a GPU as a set."""
    gpus, experts = len(old), len(load)
    flat = [e for row in old for e in row if e >= 0]
    share = [load[e] / flat.count(e) for e in range(experts)]
    filled = [sum(share[e] for e in row if e >= 0) for row in old]
    balance = max(filled) / (sum(filled) / gpus) if sum(filled) / gpus >= 1e-9 else 1.0
    if balance < 1.01:
        return old
    home: dict[int, int] = {}
    held: list[set[int]] = [set() for _ in range(gpus)]
    free = [0] * gpus
    for s in range(len(old[0])):
        for g in range(gpus):
            e = old[g][s]
            if e >= 0 and e not in home:
                home[e] = g
                held[g].add(e)
            elif e >= 0:
                free[g] += 1
    share, extra = [float(x) for x in load], [0] * experts
    for _ in range(sum(free)):
        takers = [e for e in range(experts) if extra[e] + 1 < gpus]
        if not takers:
            break
        e = max(takers, key=lambda e: (share[e], e))
        share[e] = share[e] * (extra[e] + 2) / (extra[e] + 3)
        extra[e] += 1
    filled = [sum(share[e] for e in sorted(row, key=old[g].index)) for g, row in enumerate(held)]
    sent: set[tuple[int, int]] = set()
    got: list[set[int]] = [set() for _ in range(gpus)]

    def give(e: int, g: int) -> None:
        held[g].add(e)
        got[g].add(e)
        sent.add((home[e], g))
        free[g] -= 1

    for e in sorted((e for e in range(experts) for _ in range(extra[e])), key=lambda e: -share[e]):
        fits = [g for g in range(gpus) if free[g] and e not in held[g] and (home[e], g) not in sent]
        if fits:
            gpu = min(fits, key=lambda g: filled[g])
            give(e, gpu)
            filled[gpu] += share[e]
    if any(free):
        copies = [sum(e in row for row in held) for e in range(experts)]
        share = [load[e] / copies[e] for e in range(experts)]
        for g in range(gpus):
            while free[g] and len(held[g]) < experts:
                e = max(
                    (e for e in range(experts) if e not in held[g]), key=lambda e: (share[e], e)
                )
                give(e, g)
                share[e] = share[e] * copies[e] / (copies[e] + 1)
                copies[e] += 1
            free[g] = 0
        filled = [sum(share[e] for e in row) for row in held]
    peak = max(filled)
    for _ in range(100):
        # GPUs may mirror each other, and so may two swaps: rounding then decides, and not the rule.
        assume((np.diff(sorted(filled)) > 1e-9 * peak).all())
        *others, top = sorted(range(gpus), key=lambda g: filled[g])
        peak = filled[top]
        for g in others:
            if (g, top) in sent or (top, g) in sent:
                continue
            swaps = [
                (max(filled[top] - share[a] + share[b], filled[g] - share[b] + share[a]), a, b)
                for a in sorted(held[top] - held[g] - got[top])
                for b in sorted(held[g] - held[top] - got[g])
            ]
            near = sorted(larger for larger, _, _ in swaps)[:2]
            assume(len(near) < 2 or near[1] - near[0] > 1e-9 * peak)
            larger, a, b = min(swaps, default=(peak, -1, -1))
            if larger >= peak or peak - larger < mean * 0.01:
                continue
            for here, there, out, back in ((top, g, a, b), (g, top, b, a)):
                held[here].remove(out)
                held[here].add(back)
                got[here].add(back)
                sent.add((here, there))
            filled[top] += share[b] - share[a]
            filled[g] -= share[b] - share[a]
            break
        else:
            break
    return [sorted(row) for row in held] if mean > 0 and peak / mean < balance else old


def contents(slots: NDArray[np.int32]) -> list[list[int]]:
    """Return what each GPU holds, in order."""
    return [sorted(e for e in row if e >= 0) for row in slots.tolist()]


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 5), st.integers(0, 8))
def test_it_follows_its_rule(seed: int, gpus: int, per_gpu: int, redundant: int) -> None:
    """The compiled placement holds what the rule in plain Python gives each GPU."""
    experts = max(1, gpus * per_gpu - redundant, per_gpu)
    rng = np.random.default_rng(seed)
    load = np.exp(rng.normal(5, 1, (2, experts)))
    flat = np.concatenate([np.arange(experts), rng.integers(0, experts, gpus * per_gpu - experts)])
    now = np.array([rng.permutation(flat) for _ in load]).reshape(2, gpus, per_gpu)
    plan = solve_placement(load, num_gpus=gpus, slots_per_gpu=per_gpu, previous=now, method="swift")
    mean = float(load[0].sum()) / gpus
    for found, row, old in zip(plan.placement.slots, load, now.tolist(), strict=True):
        expected = swift(row, old, mean)
        assert contents(found) == [sorted(gpu) for gpu in expected]


def test_its_known_figure() -> None:
    """Eight experts on 8 x 2 slots, from the placement that engines start with: 232."""
    load = [600, 560, 120, 120, 20, 10, 10, 10]
    plan = solve_placement(load, num_gpus=8, slots_per_gpu=2, method="swift")
    assert float(plan.makespan) == 232
    first = first_placement(1, 8, 2, num_experts=8)
    again = solve_placement(load, num_gpus=8, slots_per_gpu=2, previous=first[0], method="swift")
    assert again.placement == plan.placement
    assert again.moves is not None
    assert int(again.moves) == 8


def test_the_mean_of_layer_0_is_that_of_all() -> None:
    """A weakness that is kept: a light layer 0 keeps the others from changing, none has a say."""
    load = np.array([[1.0, 1, 1, 1], [90, 10, 10, 10]])
    now = np.array([[[0, 1], [2, 3], [0, 2]]] * 2)
    both = solve_placement(load, num_gpus=3, slots_per_gpu=2, previous=now, method="swift")
    alone = solve_placement(load[1:], num_gpus=3, slots_per_gpu=2, previous=now[1:], method="swift")
    assert alone.makespan[0] < both.makespan[1]
    assert both.placement.slots[1].tolist() == now[1].tolist()
    zero = solve_placement(0 * load, num_gpus=3, slots_per_gpu=2, previous=now, method="swift")
    assert zero.placement.slots.tolist() == now.tolist()


def test_a_balanced_layer_stays() -> None:
    """Less than 1 % above the mean nothing moves."""
    now = [[0, 1], [2, 3]]
    plan = solve_placement(
        [50, 50.4, 50, 50], num_gpus=2, slots_per_gpu=2, previous=now, method="swift"
    )
    assert plan.placement.slots.tolist() == now


def test_a_missing_expert_is_refused() -> None:
    """It has no home to keep."""
    with pytest.raises(InvalidPlacementError, match="layer 0: expert 2 has no replica, and swift"):
        solve_placement(
            [1, 1, 1], num_gpus=2, slots_per_gpu=2, previous=[[0, 1], [0, 1]], method="swift"
        )
