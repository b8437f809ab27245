"""Memory of a deployment: published figures, and how it grows."""

from __future__ import annotations

from typing import Any

import pytest

from eplb_opt.memory import WEIGHT_FORMATS, WeightFormat, memory_per_gpu
from eplb_opt.workload import ModelShape

TINY = ModelShape("tiny", layers=3, experts=8, top_k=2, hidden=100, ffn=10)


def test_a_redundant_expert_of_deepseek_v3() -> None:
    """About 2.4 GB for one on each rank, says vLLM's documentation."""
    memory = memory_per_gpu("deepseek-v3", 32, 32, weights="fp8")
    assert round(memory.redundant / 2**30, 1) == 2.4
    assert memory.weights == 9 * memory.redundant
    assert memory.weights == memory_per_gpu("deepseek-v3", 32, 32, weights="fp8", moves=False).total


def test_a_worked_example() -> None:
    """8 + 4 slots on 4 GPUs, three each; an expert is 3 matrices of 100 x 10, two bytes each."""
    memory = memory_per_gpu(TINY, 4, 4, window_steps=5)
    expert = 3 * 100 * 10 * 2
    assert memory.experts == 3 * 2 * expert
    assert memory.redundant == 3 * 1 * expert
    assert memory.window == 5 * 3 * 12 * 4
    assert memory.staging == 3 * expert
    assert memory.total == memory.weights + memory.window + memory.staging


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [
        ("fp32", 4000, 4000),
        ("bf16", 2000, 2000),
        ("fp16", 2000, 2000),
        ("fp8", 1000 + 4, 1000 + 4),  # one block
        ("int8", 1000 + 4 * 10, 1000 + 4 * 100),  # a scale for each output
        ("mxfp4", 500 + 10 * 4, 500 + 100 * 1),  # blocks do not pass a row's end
        ("nvfp4", 500 + 10 * 7, 500 + 100 * 1),
    ],
)
def test_scales_count(name: str, up: int, down: int) -> None:
    """A matrix of 10 outputs and 100 inputs, and the one that leads back."""
    assert WEIGHT_FORMATS[name].matrix_bytes(10, 100) == up
    assert WEIGHT_FORMATS[name].matrix_bytes(100, 10) == down
    assert memory_per_gpu(TINY, 8, weights=name, moves=False).total == 3 * (2 * up + down)


def test_a_format_of_ones_own() -> None:
    """Bits, and what shares a scale."""
    assert WeightFormat(3, (2, 0), 2).matrix_bytes(4, 5) == 8 + 2 * 2


def test_redundancy_that_only_fills_the_last_slots() -> None:
    """Ten slots over five GPUs: experts alone would have needed two slots on some."""
    memory = memory_per_gpu(TINY, 5, 2)
    assert (memory.redundant, memory.experts) == (0, 3 * 2 * 6000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nobody", 8), "no model is called 'nobody'"),
        ((TINY, 3), "8 experts and 0 redundant do not divide over 3 GPUs"),
        ((TINY, 0), "num_gpus=0"),
        ((TINY, 8, -8), "redundant=-8"),
    ],
)
def test_deployments_that_cannot_be_are_refused(arguments: Any, message: str) -> None:
    """Every GPU has as many slots."""
    with pytest.raises(ValueError, match=message):
        memory_per_gpu(*arguments)
    with pytest.raises(ValueError, match="no weight format is called 'fp7'"):
        memory_per_gpu(TINY, 8, weights="fp7")
