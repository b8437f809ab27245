"""vLLM's policy class: DeepSeek's placement, slots kept within GPUs."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_opt.adapters import deepseek
from eplb_opt.adapters.vllm import DefaultEplbPolicy
from eplb_opt.errors import InvalidPlacementError


def test_without_old_indices_it_is_deepseeks() -> None:
    """By class or by instance, hierarchical or, where groups do not allow it, global."""
    weight = np.random.default_rng(0).integers(0, 99, (3, 12))
    for groups in (4, 3):
        expected = deepseek.rebalance_experts(weight, 16, groups, 2, 4)[0]
        for policy in (DefaultEplbPolicy, DefaultEplbPolicy()):
            found = policy.rebalance_experts(weight, 16, groups, 2, 4)
            assert np.array_equal(found, expected)
            assert found.dtype == np.int64


def test_slots_are_kept_within_a_gpu() -> None:
    """Every GPU holds the same; each expert that it held before is where it was."""
    rng = np.random.default_rng(1)
    weight = rng.integers(1, 99, (5, 12))
    old = np.array([rng.permutation(np.arange(16) % 12) for _ in range(5)])
    fresh = DefaultEplbPolicy.rebalance_experts(weight, 16, 1, 1, 4)
    kept = DefaultEplbPolicy.rebalance_experts(weight, 16, 1, 1, 4, old)
    for new, row, before in zip(
        fresh.reshape(-1, 4).tolist(),
        kept.reshape(-1, 4).tolist(),
        old.reshape(-1, 4).tolist(),
        strict=True,
    ):
        assert sorted(row) == sorted(new)
        for expert in set(row) & set(before):
            stays = sum(a == b == expert for a, b in zip(row, before, strict=True))
            assert stays == min(row.count(expert), before.count(expert))


def test_old_indices_of_another_shape() -> None:
    """They are refused; vLLM would index out of bounds."""
    with pytest.raises(InvalidPlacementError, match=r"must be \[1, 4\], not of shape \(1, 6\)"):
        DefaultEplbPolicy.rebalance_experts(np.ones((1, 4)), 4, 1, 1, 2, np.zeros((1, 6), int))


def test_tensors_in_tensors_out() -> None:
    """Weights and old indices as tensors give a tensor."""
    torch = pytest.importorskip("torch")
    weight, old = np.array([[9, 1, 1, 1]]), np.array([[3, 2, 0, 1, 0, 0]])
    found = DefaultEplbPolicy.rebalance_experts(torch.tensor(weight), 6, 1, 1, 2, torch.tensor(old))
    assert isinstance(found, torch.Tensor)
    expected = DefaultEplbPolicy.rebalance_experts(weight, 6, 1, 1, 2, old)
    assert found.tolist() == expected.tolist()
