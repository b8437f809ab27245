"""Warm-ups are found where there are some, and a few steps stand for all."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb_opt.batches import Batches, BatchFacts
from eplb_opt.trace import LoadTrace, StepFacts
from eplb_opt.vetting import picked, steps_of, warm_up

LAYERS, EXPERTS, TOP_K = 2, 16, 2


def usual(steps: int, *, drift: float = 0.0, tokens: int = 200) -> NDArray[np.int64]:
    """Draw steps of skewed traffic, whose popularity turns over if it drifts."""
    rng = np.random.default_rng(0)
    heat = rng.normal(size=(2, EXPERTS))
    angle = drift * np.arange(steps)[:, None, None]
    chances = np.exp(np.cos(angle) * heat[0] + np.sin(angle) * heat[1])
    chances = np.repeat(chances / chances.sum(axis=-1, keepdims=True), LAYERS, axis=1)
    return rng.multinomial(TOP_K * tokens, chances)


def facts_of(tokens: NDArray[np.int64], **known: NDArray[np.generic]) -> BatchFacts:
    """Return the steps as traffic."""
    trace = LoadTrace(tokens, facts=StepFacts(**known), top_k=TOP_K)  # type: ignore[arg-type]
    return BatchFacts(Batches.of(trace, tokens=1, steps=None, top_k=TOP_K), TOP_K, None)


def found(tokens: NDArray[np.int64], **known: NDArray[np.generic]) -> int:
    """Return the steps of the warm-up."""
    facts = facts_of(tokens, **known)
    return warm_up(facts, steps_of(facts))


ONE_EXPERT = np.eye(EXPERTS, dtype=np.int64)[[[0] * LAYERS] * 9] * 800


@pytest.mark.parametrize(
    "first",
    [
        np.zeros((9, LAYERS, EXPERTS), np.int64),
        np.full((9, LAYERS, EXPERTS), 25),
        ONE_EXPERT,
        usual(9)[..., ::-1],
        usual(9, tokens=2000),
        np.concatenate([ONE_EXPERT[:4], np.zeros((5, LAYERS, EXPERTS), np.int64)]),
    ],
    ids=["idle", "even", "one expert", "other load", "other size", "mixed"],
)
def test_first_steps_unlike_the_others_are_counted(first: NDArray[np.int64]) -> None:
    """Idle, dummy and profiling batches, and those of another kind."""
    assert found(np.concatenate([first, usual(120)])) == 9


@pytest.mark.parametrize("drift", [0.0, 0.01, 0.05])
def test_drift_is_no_warm_up(drift: float) -> None:
    """Nor is traffic that stays."""
    assert found(usual(160, drift=drift)) == 0


def test_stages_are_compared_with_their_own() -> None:
    """A trace that begins with prefill has no warm-up for that."""
    tokens = np.concatenate([usual(10, tokens=4000), usual(40), usual(20, tokens=4000), usual(90)])
    stage = np.repeat(["prefill", "decode", "prefill", "decode"], [10, 40, 20, 90])
    assert found(tokens, stage=stage) == 0
    assert found(np.concatenate([ONE_EXPERT, tokens]), stage=np.append(["decode"] * 9, stage)) == 9


def test_short_traces_have_none() -> None:
    """Three steps cannot be compared with each other; all but a fourth must remain."""
    assert found(usual(3)) == 0
    assert found(np.concatenate([ONE_EXPERT, usual(20)])) == 0


def test_what_steps_are() -> None:
    """Stages, tokens counted once, and what was run."""
    tokens = usual(4)
    tokens[1] = 0
    steps = steps_of(
        facts_of(
            tokens,
            stage=np.array(["decode", "decode", "prefill", ""]),
            scheduled=np.array([256, 256, 256, 256]),
        )
    )
    assert steps.of("decode").tolist() == [True, False, False, True]
    assert steps.tokens.tolist() == [200, 0, 200, 200]
    assert not steps.like_one_of(4)
    quarter = usual(4, tokens=64)
    assert steps_of(facts_of(quarter, scheduled=np.full(4, 256))).like_one_of(4)
    assert not steps_of(facts_of(quarter)).like_one_of(4)


def test_picked_steps_are_those_steps() -> None:
    """Counts, their sources and what is known of them, in several parts."""
    by_source = np.random.default_rng(1).integers(0, 9, (100, LAYERS, 2, EXPERTS))
    facts = StepFacts(scheduled=np.arange(100))
    trace = LoadTrace.from_sources(by_source, facts=facts, top_k=TOP_K)
    batches = Batches.of(trace, tokens=1, steps=None, top_k=TOP_K)
    steps = np.flatnonzero(np.random.default_rng(2).random(100) < 0.7)
    some = picked(BatchFacts(batches, TOP_K, None), steps).batches
    assert some.steps == len(steps)
    assert some.facts.scheduled is not None
    assert some.facts.scheduled.tolist() == steps.tolist()
    parts = list(some.chunks(2))
    sources = [part.source_tokens for part in parts if part.source_tokens is not None]
    assert np.array_equal(np.concatenate(sources), by_source[steps])
    counts = np.concatenate([part.tokens for part in parts])
    assert np.array_equal(counts, by_source[steps].sum(axis=2))
