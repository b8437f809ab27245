"""vLLM-Ascend's default: its rule in plain Python, its known figure, and what it keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt.errors import InfeasibleError
from eplb_opt.placing import solve_placement


def sort(entries: list[list[float]]) -> list[list[float]]:
    """Sort [load per copy, expert] by falling load, stable from the far end."""
    from_the_end = entries[::-1]
    return sorted(from_the_end, key=lambda e: -e[0])


def ascend_default(load: list[float], gpus: int, per_gpu: int) -> list[list[int]]:
    """Place one layer by the rule at the head of ``ascend_default.hpp``."""
    experts = len(load)
    entries = [[x, e] for e, x in enumerate(load)]
    copies = [1] * experts
    for _ in range(gpus * per_gpu - experts):
        entries = sort(entries)
        taker = next(i for i, (_, e) in enumerate(entries) if copies[int(e)] < gpus)
        share, e = entries[taker]
        copies[int(e)] += 1
        entries[taker] = [share * (copies[int(e)] - 1) / copies[int(e)], e]
    share_of = {int(e): share for share, e in entries}
    slots: list[list[int]] = [[] for _ in range(gpus)]
    shares: list[list[float]] = [[] for _ in range(gpus)]
    extra = [e for e in range(experts) for _ in range(copies[e] - 1)]
    for turn, e in enumerate(extra):
        slots[turn % gpus].append(e)
        shares[turn % gpus].append(share_of[e])
    entries = sort(entries)
    for share, e in entries:
        free = [g for g in range(gpus) if len(slots[g]) < per_gpu]
        apart = [g for g in free if e not in slots[g]]
        gpu = min(apart, key=lambda g: sum(shares[g])) if apart else free[0]
        slots[gpu].append(int(e))
        shares[gpu].append(share)
    for held, their in zip(slots, shares, strict=True):
        for e in sorted(e for e in set(held) if held.count(e) > 1):
            for _ in range(held.count(e) - 1):
                at = held.index(e)
                lost = their[at]
                entries.sort(
                    key=lambda t: abs(t[0] * copies[int(t[1])] / (copies[int(t[1])] + 1) - lost)
                )
                other = next(
                    (t for t in entries if copies[int(t[1])] < gpus and t[1] not in held), None
                )
                if other is None:
                    continue
                copies[int(other[1])] += 1
                other[0] = other[0] * (copies[int(other[1])] - 1) / copies[int(other[1])]
                held[at], their[at] = int(other[1]), other[0]
                copies[e] -= 1
                for entry in entries:
                    if entry[1] == e:
                        entry[0] = lost * (copies[e] + 1) / copies[e]
    return slots


@given(
    st.lists(st.one_of(st.integers(0, 4), st.integers(0, 2**30)).map(float), min_size=1),
    st.integers(1, 6),
    st.integers(0, 3),
)
def test_it_follows_its_rule(load: list[float], gpus: int, extra: int) -> None:
    """The compiled placement is, slot by slot, that of the rule in plain Python."""
    per_gpu = min(-(-len(load) // gpus) + extra, len(load))
    plan = solve_placement(load, num_gpus=gpus, slots_per_gpu=per_gpu, method="ascend-default")
    assert plan.placement.slots.tolist() == ascend_default(load, gpus, per_gpu)


def test_its_known_figure() -> None:
    """Eight experts on 8 x 2 slots: 232, where 196.67 is the optimum of the equal split."""
    load = [600, 560, 120, 120, 20, 10, 10, 10]
    plan = solve_placement(load, num_gpus=8, slots_per_gpu=2, method="ascend-default")
    assert float(plan.makespan) == 232
    assert plan.duplicates == 0


def test_experts_that_stay_keep_their_slots() -> None:
    """Given an old placement, only slots whose expert leaves the GPU change."""
    rng = np.random.default_rng(0)
    load = rng.integers(1, 99, (3, 20)).astype(float)
    old = solve_placement(load[:, ::-1], num_gpus=6, slots_per_gpu=4).placement
    plan = solve_placement(load, num_gpus=6, slots_per_gpu=4, previous=old, method="ascend-default")
    fresh = solve_placement(load, num_gpus=6, slots_per_gpu=4, method="ascend-default")
    assert np.sort(plan.placement.slots).tolist() == np.sort(fresh.placement.slots).tolist()
    for before, after in zip(
        old.slots.reshape(-1, 4).tolist(), plan.placement.slots.reshape(-1, 4).tolist(), strict=True
    ):
        assert all(e == f for e, f in zip(before, after, strict=True) if e in after)


def test_empty_slots_stay_empty() -> None:
    """A dead GPU gets nothing; if the others cannot hold all experts, that is an error."""
    now = [[[0, 1, 2], [-1, -1, -1], [2, 3, -1]]]
    plan = solve_placement(
        [[8, 1, 1, 1]], num_gpus=3, slots_per_gpu=3, previous=now, method="ascend-default"
    )
    assert ((plan.placement.slots < 0) == (np.array(now) < 0)).all()
    assert (plan.placement.copies >= 1).all()
    with pytest.raises(InfeasibleError, match="layer 0: 4 experts need 4 slots and 3 are filled"):
        solve_placement(
            [[8, 1, 1, 1]],
            num_gpus=3,
            slots_per_gpu=3,
            previous=[[[0, 1, 2], [-1] * 3, [-1] * 3]],
            method="ascend-default",
        )
