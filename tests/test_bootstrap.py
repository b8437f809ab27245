"""Intervals of gains: they hold the truth as often as they say, and know what resembles."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb_opt.bootstrap import block_length, paired_gain


def resembling(rng: np.random.Generator, steps: int, like: float) -> NDArray[np.float64]:
    """Return deviates of variance 1 that correlate so much from one step to the next."""
    noise = rng.standard_normal(steps + 200) * math.sqrt(1 - like**2)
    series = np.empty(len(noise))
    series[0] = noise[0]
    for step in range(1, len(noise)):
        series[step] = like * series[step - 1] + noise[step]
    return series[200:]


@pytest.mark.parametrize("like", [0.0, 0.5, 0.8])
def test_intervals_hold_the_truth_in_95_percent_of_cases(like: float) -> None:
    """Of 120 recordings of 200 steps that resemble each other, 104 or more: 87 %."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(120):
        before = 100 + 3 * resembling(rng, 200, 0.9)
        gain = paired_gain(before, 0.95 * before + resembling(rng, 200, like))
        held += gain.low <= 0.05 <= gain.high
    assert 104 <= held < 120


def test_what_both_share_does_not_widen_the_interval() -> None:
    """Steps differ by a third among themselves, and the gain is known to a thousandth."""
    rng = np.random.default_rng(2)
    before = rng.uniform(50, 150, 400)
    gain = paired_gain(before, 0.9 * before + rng.normal(0, 0.1, 400))
    assert gain.low < 0.1 < gain.high < gain.low + 0.001


def test_blocks_grow_with_resemblance() -> None:
    """Independent steps stand for themselves; a block is a fourth of the steps at most."""
    rng = np.random.default_rng(3)
    lengths = [block_length(resembling(rng, 1000, like)) for like in (0, 0.5, 0.9)]
    assert lengths == sorted(lengths)
    assert lengths[0] <= 4 < lengths[2] <= 250
    assert block_length(np.arange(100.0)) == 25
    assert block_length(np.full(100, 7.0)) == 1


def test_quantiles_and_single_steps() -> None:
    """The p99 of a shift is the shift's, and one step tells nothing of how sure it is."""
    before = np.random.default_rng(4).uniform(1, 2, 1000)
    assert paired_gain(before, before / 2, quantile=0.99).value == pytest.approx(0.5)
    alone = paired_gain(np.array([2.0]), np.array([1.0]))
    assert alone.value == 0.5
    assert math.isinf(alone.low)
    assert math.isinf(alone.high)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (3, 2)])
def test_steps_must_be_the_same(before: int, after: int) -> None:
    """As many before as after, and at least one."""
    with pytest.raises(ValueError, match="expected as many, at least one"):
        paired_gain(np.ones(before), np.ones(after))
