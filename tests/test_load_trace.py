"""Counts over time: what is known of each step, and counts by source."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eplb_opt.errors import InvalidTokensError
from eplb_opt.load_trace import LoadTrace, StepFacts

TOKENS = np.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"stage": np.array(["decode", "warmup"])}, r"stage\[1\] is 'warmup'; expected 'decode'"),
        ({"stage": np.array([1, 2])}, r"stage is int64 \[2\]; expected strings"),
        ({"scheduled": np.array([3, -1])}, r"scheduled\[1\] is -1; expected 0 or more"),
        ({"scheduled": np.array([3.0, 1.0])}, "scheduled is float64"),
        ({"time": np.array([0.0, np.nan])}, r"time\[1\] is nan; expected seconds"),
        ({"time": np.array([np.inf, np.inf])}, r"time\[0\] is inf"),
        ({"time": np.array([-1.0, 1.0])}, r"time\[0\] is -1.0"),
        ({"time": np.array([2.0, 1.0])}, r"time\[1\] is 1.0; expected no less than at the step"),
        ({"time": np.array([[1.0]])}, r"time is float64 \[1, 1\]"),
    ],
)
def test_facts_that_cannot_be_are_named(facts: dict[str, Any], message: str) -> None:
    """The step is told by its number."""
    with pytest.raises(InvalidTokensError, match=message):
        StepFacts(**facts)


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"facts": StepFacts(time=np.zeros(3))}, "time has 3 steps, tokens 2"),
        ({"top_k": 0}, "top_k is 0"),
        ({"layer_ids": (1, 2)}, "expected 3 rising numbers"),
        ({"layer_ids": (3, 2, 1)}, "expected 3 rising numbers"),
        ({"layer_ids": (-1, 0, 1)}, "expected 3 rising numbers"),
        ({"source_tokens": TOKENS[:, :, np.newaxis, :2]}, "source_tokens is"),
        ({"source_tokens": TOKENS}, "steps, layers, sources, experts"),
    ],
)
def test_what_does_not_go_with_the_counts_is_refused(known: dict[str, Any], message: str) -> None:
    """A trace's parts have the same steps and layers."""
    with pytest.raises(InvalidTokensError, match=message):
        LoadTrace(TOKENS, **known)


def test_sources_sum_to_the_counts() -> None:
    """The sum does not wrap in the sources' narrow dtype, and layers are selected in both."""
    sources = np.full((2, 3, 4, 5), 200, dtype=np.uint8)
    trace = LoadTrace.from_sources(sources, layer_ids=(3, 4, 6))
    np.testing.assert_array_equal(trace.tokens, np.full((2, 3, 5), 800))
    part = trace.select_layers([0, 2])
    assert part.source_tokens is not None
    assert (part.tokens.shape, part.source_tokens.shape) == ((2, 2, 5), (2, 2, 4, 5))
    assert part.layer_ids == (3, 6)
    assert trace.select_layers([2, 0]).layer_ids is None


def test_idle_steps_are_those_without_tokens() -> None:
    """The end of a recorder's buffer that was never filled, for one."""
    trace = LoadTrace(np.array([[[0, 1]], [[0, 0]], [[2, 0]], [[0, 0]]]))
    assert trace.idle_steps().tolist() == [1, 3]
