"""FlashLB: its rule in plain Python, its known figure, and what it keeps of an old placement."""

from __future__ import annotations

from functools import partial
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt.metrics import count_moves
from eplb_opt.placement import Placement
from eplb_opt.placers import FlashLb
from eplb_opt.placers.flashlb import score
from eplb_opt.placing import solve_placement

Z = FlashLb().z


class Plain:
    """The rule at the head of ``flashlb.hpp`` for one layer, without tricks."""

    def __init__(self, samples: NDArray[np.float64], gpus: int, per_gpu: int) -> None:
        self.samples, self.gpus, self.per_gpu = samples, gpus, per_gpu
        self.experts = samples.shape[1]
        self.mean = samples.mean(axis=0)
        several = len(samples) > 1
        self.cov = np.atleast_2d(np.cov(samples.T)) if several else np.zeros((self.experts,) * 2)
        self.risk = self.mean + Z * np.sqrt(np.diag(self.cov))

    def grant(self, group: list[int], count: int) -> list[int]:
        """Return who takes the extra copies, in turn."""
        copies, takers = dict.fromkeys(group, 1), []
        for _ in range(count):
            takers.append(max(group, key=lambda e: self.risk[e] / copies[e]))
            copies[takers[-1]] += 1
        return takers

    def deploy(self, copies: list[int]) -> NDArray[np.int32]:
        """Place the copies; -1 where none is left."""
        held: list[list[int]] = [[] for _ in range(self.gpus)]

        def risk(gpu: int, expert: int) -> float:
            share = np.array([1 / copies[e] for e in [*held[gpu], expert]])
            who = [*held[gpu], expert]
            mean = float((self.mean[who] * share).sum())
            return mean + Z * float(np.sqrt(max(share @ self.cov[np.ix_(who, who)] @ share, 0)))

        for e in sorted(range(self.experts), key=lambda e: -self.mean[e] / copies[e]):
            for _ in range(copies[e]):
                room = [g for g in range(self.gpus) if len(held[g]) < self.per_gpu]
                room = [g for g in room if e not in held[g]]
                if room:
                    held[min(room, key=lambda g: risk(g, e))].append(e)
        return np.array([row + [-1] * (self.per_gpu - len(row)) for row in held], np.int32)

    def score(self, copies: list[int]) -> float:
        """Return the score of the copies, deployed."""
        slots = self.deploy(copies)
        return float(score(self.samples[:, None], slots[None])[0]) if (slots >= 0).all() else np.nan

    def solve(self, depth: int = 4, width: int = 8) -> list[int]:
        """Return the numbers of copies that the search settles on."""
        left = self.gpus * self.per_gpu - self.experts
        order = sorted(range(self.experts), key=lambda e: -self.risk[e])
        size = -(-self.experts // depth)
        copies = [1] * self.experts
        for node in range(1, depth):
            group, rest = order[:size], order[size:]
            if not left or not rest or node == depth:
                break
            takers, others = self.grant(group, left), self.grant(rest, left)
            greedy = sum(e in group for e in self.grant(order, left))
            budgets = [greedy]
            for off in range(1, width + 1):
                budgets += [b for b in (greedy - off, greedy + off) if 0 <= b <= left]

            scores = []
            for budget in budgets:
                added = takers[:budget] + others[: left - budget]
                scores.append(self.score([c + added.count(e) for e, c in enumerate(copies)]))
            best = budgets[min(range(len(budgets)), key=scores.__getitem__)]
            copies = [c + takers[:best].count(e) for e, c in enumerate(copies)]
            left -= best
            order = rest
        last = self.grant(order, left)
        return [c + last.count(e) for e, c in enumerate(copies)]


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(2, 4), st.integers(1, 3))
def test_it_follows_its_rule(seed: int, gpus: int, per_gpu: int, count: int) -> None:
    """Copies and contents of GPUs are those of the rule, for one sample and for several."""
    rng = np.random.default_rng(seed)
    experts = gpus * per_gpu - int(rng.integers(0, gpus))
    samples = np.exp(rng.normal(5, 0.5, (count, experts)))
    plain = Plain(samples, gpus, per_gpu)
    copies = plain.solve()
    if max(copies) > gpus:
        return  # the original has no answer
    slots = plain.deploy(copies)
    if (slots < 0).any():
        return
    plan = solve_placement(samples[:, None], num_gpus=gpus, slots_per_gpu=per_gpu, method="flashlb")
    assert plan.placement.slots[0].tolist() == slots.tolist()


def test_its_known_figure() -> None:
    """Eight experts on 8 x 2 slots: 200, where 196.67 is the optimum of the equal split."""
    load = [600, 560, 120, 120, 20, 10, 10, 10]
    plan = solve_placement(load, num_gpus=8, slots_per_gpu=2, method="flashlb")
    assert float(plan.makespan) == 200
    greedy = solve_placement(load, num_gpus=8, slots_per_gpu=2, method="flashlb:depth=1")
    assert float(greedy.makespan) >= 200


def test_correlated_experts_are_kept_apart() -> None:
    """Of four equal experts, those that rise together go to different GPUs."""
    windows = np.array([[[9, 9, 1, 1]], [[1, 1, 9, 9]], [[9, 9, 1, 1]], [[1, 1, 9, 9]]])
    plan = solve_placement(windows, num_gpus=2, slots_per_gpu=2, method="flashlb")
    assert np.sort(plan.placement.slots[0] // 2).tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("load", "gpus", "per_gpu"), [([1, 0, 0], 2, 3), ([0] * 5, 3, 4), ([7], 4, 2), ([9, 1], 3, 2)]
)
def test_what_the_original_has_no_answer_for(load: list[int], gpus: int, per_gpu: int) -> None:
    """One-hot or no load, more copies than GPUs: all experts placed, slots filled if any fits."""
    plan = solve_placement(load, num_gpus=gpus, slots_per_gpu=per_gpu, method="flashlb")
    assert (plan.placement.copies >= 1).all()
    assert plan.duplicates == 0
    filled = (plan.placement.slots >= 0).sum(axis=-1)
    assert (filled == min(per_gpu, len(load))).all()


def test_a_layer_that_would_not_gain_stays() -> None:
    """Placed again on the same load, nothing moves; what gains moves as little as can be."""
    rng = np.random.default_rng(3)
    load = rng.lognormal(0, 1, (4, 10))
    flashlb = partial(solve_placement, num_gpus=4, slots_per_gpu=3, method="flashlb")
    first = flashlb(load)
    again = flashlb(load, previous=first.placement)
    assert again.placement == first.placement
    shuffled = Placement(first.placement.slots[:, ::-1, ::-1])
    load = load[:, rng.permutation(10)]
    fresh = flashlb(load).placement
    plan = flashlb(load, previous=shuffled)
    gained = score(load[None], shuffled.slots) > score(load[None], fresh.slots)
    assert gained.any()
    for layer in np.flatnonzero(gained):
        before = Placement(shuffled.slots[layer], 10)
        least = min(
            int(count_moves(before, Placement(fresh.slots[layer][list(order)], 10))[0])
            for order in permutations(range(4))
        )
        assert int(count_moves(before, Placement(plan.placement.slots[layer], 10))[0]) == least
        kept = plan.placement.slots[layer] == before.slots
        stay = [
            [e in new for e in old]
            for old, new in zip(before.slots, plan.placement.slots[layer], strict=True)
        ]
        assert kept.tolist() == stay


def test_empty_slots_stay_empty() -> None:
    """A dead GPU gets nothing, also when GPUs are given to the old ones that resemble them."""
    now = [[[-1, -1], [0, 1], [2, 3], [4, 0]]]
    plan = solve_placement(
        [[9, 1, 1, 1, 5]], num_gpus=4, slots_per_gpu=2, previous=now, method="flashlb"
    )
    assert plan.placement.slots[0, 0].tolist() == [-1, -1]
    assert (plan.placement.copies >= 1).all()


def test_a_missing_expert_is_no_reason_to_stay() -> None:
    """An old placement that lacks an expert is replaced, however balanced it looks."""
    now = [[[0, 1], [0, 1]]]
    plan = solve_placement([[4, 4, 9]], num_gpus=2, slots_per_gpu=2, previous=now, method="flashlb")
    assert (plan.placement.copies >= 1).all()


@pytest.mark.parametrize("option", ["z=-1", "depth=0", "width=-1"])
def test_bad_options(option: str) -> None:
    """Options out of range are refused with the ranges."""
    with pytest.raises(ValueError, match="flashlb: z and width are at least 0"):
        solve_placement([1], num_gpus=1, slots_per_gpu=1, method=f"flashlb:{option}")
