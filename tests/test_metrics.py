"""Balance by the measures that engines print, duplicates and moves, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_opt.errors import InvalidTokensError
from eplb_opt.metrics import PlacementMetrics, count_moves
from eplb_opt.placement import Placement


def test_balance_is_per_layer_over_gpus() -> None:
    """100 and 200 on two GPUs in two layers: 0.75 for every engine, never 1."""
    metrics = PlacementMetrics.of(Placement([[[0], [1]]] * 2), np.array([[100.0, 200.0]] * 2))
    assert metrics.gpu_load.tolist() == [[100, 200]] * 2
    assert metrics.balancedness_vllm == 0.75
    assert metrics.balancedness_sglang == pytest.approx(0.75, abs=1e-7)
    assert metrics.par.tolist() == [4 / 3, 4 / 3]


def test_engines_weigh_layers_differently() -> None:
    """SGLang takes layers alike, vLLM by their load; one without any counts as balanced."""
    placement = Placement([[[0], [1]]] * 3)
    metrics = PlacementMetrics.of(placement, np.array([[0.0, 2.0], [300.0, 300.0], [0.0, 0.0]]))
    assert metrics.par.tolist() == [2, 1, 1]
    assert (metrics.par_mean, metrics.par_max) == (4 / 3, 2)
    assert metrics.balancedness_sglang == pytest.approx((0.5 + 1 + 1) / 3, abs=1e-5)
    assert metrics.balancedness_vllm == 301 / 302


def test_nothing_to_serve() -> None:
    """Without any load everything is balanced."""
    metrics = PlacementMetrics.of(Placement([[0], [1]]), np.zeros((1, 2)))
    assert (metrics.par_max, metrics.balancedness_sglang, metrics.balancedness_vllm) == (1, 1, 1)


def test_copies_share_equally_and_empty_slots_take_nothing() -> None:
    """Duplicates count as copies; empty slots and missing experts add no load."""
    placement = Placement([[0, 0, -1], [0, 1, 1]], 3, allow_missing=True)
    metrics = PlacementMetrics.of(placement, np.array([[6.0, 4.0, 9.0]]))
    assert metrics.gpu_load.tolist() == [[4, 6]]
    assert metrics.copies.tolist() == [[3, 2, 0]]
    assert metrics.duplicates.tolist() == [2]
    assert PlacementMetrics.of(placement, np.array([6, 4, 9])).gpu_load.tolist() == [[4, 6]]
    with pytest.raises(InvalidTokensError, match=r"load must be \[1, 3\] .* not of shape \(3, 1\)"):
        PlacementMetrics.of(placement, np.ones((3, 1)))


def test_moves_are_weights_that_a_gpu_receives() -> None:
    """Slots within a GPU, second copies and experts that leave cost nothing."""
    old = Placement([[[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    new = Placement([[[1, 0], [3, 2]], [[0, 0], [1, 3]]], 4, allow_missing=True)
    assert count_moves(old, new).tolist() == [0, 1]
