"""vLLM-Ascend's "random" policy swaps two slots, whatever the load."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_opt.errors import InvalidPlacementError
from eplb_opt.placing import solve_placement


def test_it_swaps_the_last_slots_of_gpus_1_and_3() -> None:
    """In every layer, from the old placement, which is not written to."""
    now = np.arange(15).reshape(1, 5, 3) % 12
    plan = solve_placement(
        np.ones((1, 12)), num_gpus=5, slots_per_gpu=3, previous=now, method="ascend-random"
    )
    expected = now.copy()
    expected[0, 1, 2], expected[0, 3, 2] = now[0, 3, 2], now[0, 1, 2]
    assert plan.placement.slots.tolist() == expected.tolist()
    assert now.tolist() == (np.arange(15).reshape(1, 5, 3) % 12).tolist()


def test_it_needs_four_gpus() -> None:
    """There must be a GPU 3."""
    with pytest.raises(InvalidPlacementError, match="GPUs 1 and 3; there are 3 GPUs"):
        solve_placement([1, 1, 1], num_gpus=3, slots_per_gpu=1, method="ascend-random")
