"""The core's prices: those of `Objective.time`, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt.objective import Objective
from eplb_opt.pricing import slowest_gpu
from eplb_opt.testing import objectives


@given(objectives(num_gpus=3), st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_the_slowest_gpu_takes_the_largest_time(objective: Objective, seed: int, axes: int) -> None:
    """Curves, tiles, unequal GPUs and several pieces, with any number of leading axes."""
    random = np.random.default_rng(seed)
    shape = (*random.integers(0, 4, axes).tolist(), 3, 5)
    tokens = random.integers(0, 900, shape) * (random.random(shape) < 0.7)
    found = slowest_gpu(tokens, objective)
    assert found.shape == shape[:-2]
    assert np.array_equal(found, objective.time(tokens).max(axis=-1))


def test_another_number_of_gpus_is_refused() -> None:
    """Slowness is by GPU."""
    slow = Objective.preset("tokens").pieces
    with pytest.raises(ValueError, match="slowness of 2 GPUs; the placement has 3"):
        slowest_gpu(np.ones((3, 1), np.int64), Objective(pieces=slow, slowness=(1.0, 2.0)))
