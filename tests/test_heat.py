"""Heat collection: every engine's cycle, iteration by iteration, on hand-made traffic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt.errors import InvalidTokensError
from eplb_opt.heat import (
    CollectThenDecide,
    Heat,
    HeatStep,
    PeriodicDump,
    SlidingWindow,
    StageFilter,
    stage_of,
)

LAYERS, EXPERTS = 3, 2
DECODES = StageFilter("decode", most_decode_tokens=8)
PREFILLS = StageFilter("prefill", most_decode_tokens=8)


def counts(iteration: int) -> npt.NDArray[np.int64]:
    """Give an iteration counts that tell it from all others, in any sum of few."""
    return np.array([[10 * layer, iteration] for layer in range(LAYERS)])


def summed(iterations: range | list[int]) -> list[list[int]]:
    """Give the load of some iterations."""
    load: list[list[int]] = np.sum([counts(n) for n in iterations], axis=0).tolist()
    return load


def run(heat: Heat, iterations: int) -> Iterator[tuple[int, HeatStep]]:
    """Feed iterations, from 1."""
    for n in range(1, iterations + 1):
        yield n, heat.step(counts(n))


def events(heat: Heat, iterations: int) -> dict[int, Any]:
    """Give what happens: the loads that become complete, and the layers that are committed."""
    found: dict[int, Any] = {}
    for n, step in run(heat, iterations):
        if step.load is not None or step.committed:
            load = None if step.load is None else step.load.tolist()
            found[n] = (load, list(step.committed))
    return found


# The stage


def test_an_iteration_above_the_most_of_a_decode_is_prefill() -> None:
    """By its padded tokens, mixed ones too (vLLM-Ascend's user guide)."""
    assert [stage_of(n, 8) for n in (0, 8, 9)] == ["decode", "decode", "prefill"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("warmup", 8), "no stage is called 'warmup'; the known ones are: all, decode, prefill"),
        (("decode", None), "most_decode_tokens is None"),
        (("prefill", 0), "most_decode_tokens is 0"),
    ],
)
def test_filters_that_cannot_tell_are_refused(settings: Any, message: str) -> None:
    """A stage is told by the tokens."""
    with pytest.raises(ValueError, match=message):
        StageFilter(*settings)
    with pytest.raises(ValueError, match="told by the scheduled tokens; give them"):
        CollectThenDecide(2, 1, DECODES).step(counts(1))


# vLLM-Ascend


def test_vllm_ascends_cycle() -> None:
    """C = 4, A = 2, L = 3: decides at 4, commits at 7, 8 and 9, and again nine later."""
    heat = CollectThenDecide(collection_interval=4, algorithm_interval=2)
    expected: dict[int, Any] = {}
    for start in (0, 9, 18):
        expected[start + 4] = (summed(range(start + 1, start + 5)), [])
        for layer in range(LAYERS):
            expected[start + 7 + layer] = (None, [layer])
    assert events(heat, 27) == expected


@given(c=st.integers(1, 5), a=st.integers(1, 4), cycles=st.integers(1, 3))
def test_a_cycle_takes_collection_algorithm_and_a_step_per_layer(
    c: int, a: int, cycles: int
) -> None:
    """vLLM-Ascend's counter starts again at C + A + L (eplb_updator.py)."""
    collected = [
        n for n, step in run(CollectThenDecide(c, a), cycles * (c + a + LAYERS)) if step.collected
    ]
    length = c + a + LAYERS
    assert collected == [start * length + n for start in range(cycles) for n in range(1, c + 1)]


@pytest.mark.parametrize("collect", [DECODES, PREFILLS])
def test_another_stage_neither_counts_nor_advances_the_collection(collect: StageFilter) -> None:
    """But once collected, iterations of any stage advance the decision and the updates."""
    heat = CollectThenDecide(2, 1, collect)
    own, other = (8, 9) if collect is DECODES else (9, 8)
    scheduled = [other, own, other, other, own, other, other, own, other, other, own]
    found = [heat.step(counts(n), tokens) for n, tokens in enumerate(scheduled, start=1)]
    assert [n for n, step in enumerate(found, start=1) if step.collected] == [2, 5, 11]
    loads = {n: step.load for n, step in enumerate(found, start=1) if step.load is not None}
    assert list(loads) == [5]
    assert loads[5].tolist() == summed([2, 5])
    assert [list(step.committed) for step in found[5:9]] == [[], [0], [1], [2]]


# vLLM


def test_vllms_cycle() -> None:
    """Rearranges first after a quarter of the interval, then every 8, from the last 3 steps."""
    heat = SlidingWindow(window_size=3, step_interval=8)
    every = list(range(LAYERS))
    assert events(heat, 20) == {
        2: (summed([1, 2]), every),
        10: (summed([8, 9, 10]), every),
        18: (summed([16, 17, 18]), every),
    }


def test_a_window_longer_than_the_interval_keeps_what_was_there_before() -> None:
    """The window slides; a rearrangement does not empty it."""
    heat = SlidingWindow(window_size=6, step_interval=4)
    loads = {n: load for n, (load, _) in events(heat, 9).items()}
    assert loads == {1: summed([1]), 5: summed(range(1, 6)), 9: summed(range(4, 10))}


def test_dummy_iterations_advance_the_interval_alone() -> None:
    """All ranks count them, lest they wait for each other; the window stays (eplb_state.py)."""
    heat = SlidingWindow(window_size=2, step_interval=4)
    idle = np.zeros((LAYERS, EXPERTS), dtype=int)
    assert heat.step(counts(1)).load is not None
    assert not heat.step(idle).collected
    assert heat.step(counts(2)).collected
    heat.step(idle)
    load = heat.step(idle).load
    assert load is not None
    assert load.tolist() == summed([1, 2])


def test_a_stage_slides_over_its_own_iterations() -> None:
    """Prefills in between are not there, for window and interval alike."""
    heat = SlidingWindow(2, 4, DECODES)
    plain = SlidingWindow(2, 4)
    for n in range(1, 12):
        for _ in range(n % 3):
            assert not heat.step(counts(99), 9).collected
        got, expected = heat.step(counts(n), 8), plain.step(counts(n))
        assert got.committed == expected.committed
        np.testing.assert_array_equal(got.load, expected.load)


# SGLang


def test_sglangs_cycle() -> None:
    """The first dump is after one iteration more, of the last that fit the buffer."""
    assert events(PeriodicDump(4, window_size=3), 13) == {
        n: (summed(range(n - 2, n + 1)), [0, 1, 2]) for n in (5, 9, 13)
    }


def test_sglangs_chunks_are_updated_one_an_iteration() -> None:
    """Passes between a dump and its last chunk are recorded for the next dump."""
    assert events(PeriodicDump(4, layers_per_chunk=2), 14) == {
        5: (summed(range(2, 6)), []),
        6: (None, [0, 1]),
        7: (None, [2]),
        11: (summed(range(8, 12)), []),
        12: (None, [0, 1]),
        13: (None, [2]),
    }


def reference_manager(iterations: int, chunks: list[list[int]]) -> Iterator[Any]:
    """Spell out EPLBManager's generator: what it does when it is resumed after each pass."""
    done: list[Any] = []
    while True:
        for _ in range(iterations):
            yield done
            done = []
        done.append("dump")
        for chunk in chunks:
            if len(chunks) > 1:
                yield done
                done = []
            done.append(chunk)


@given(iterations=st.integers(1, 5), chunk=st.none() | st.integers(1, 4))
def test_sglangs_manager_resumed_pass_by_pass(iterations: int, chunk: int | None) -> None:
    """The state machine does what the engine's generator does, at the same passes."""
    size = chunk or LAYERS
    chunks = [list(range(LAYERS))[n : n + size] for n in range(0, LAYERS, size)]
    engine = reference_manager(iterations, chunks)
    for _, step in run(PeriodicDump(iterations, layers_per_chunk=chunk), 40):
        expected: list[Any] = [] if step.load is None else ["dump"]
        assert next(engine) == expected + ([list(step.committed)] if step.committed else [])


# All


@pytest.mark.parametrize(
    "make",
    [
        lambda: SlidingWindow(0, 1),
        lambda: SlidingWindow(1, 0),
        lambda: CollectThenDecide(0, 1),
        lambda: CollectThenDecide(1, 0),
        lambda: PeriodicDump(0),
        lambda: PeriodicDump(2, window_size=3),
        lambda: PeriodicDump(2, layers_per_chunk=0),
    ],
)
def test_intervals_are_at_least_one(make: Any) -> None:
    """An engine would wait for ever, or sum what is stale."""
    with pytest.raises(ValueError, match=r"expected 1 or more|must not be longer"):
        make()


@pytest.mark.parametrize("make", [SlidingWindow, CollectThenDecide, PeriodicDump])
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2], [3, 4]], r"tokens are \[2, 2\], and \[3, 2\] before"),
        ([[1, -2]] * 3, "layer 0, expert 1: -2 tokens"),
        ([[0.5, 1]] * 3, "float64"),
        ([1, 2], "expected integers"),
        ([], "not empty"),
    ],
)
def test_counts_of_another_form_are_refused(make: Any, tokens: Any, message: str) -> None:
    """Layers do not appear or vanish while a window is open."""
    heat = make()
    heat.step(counts(1))
    with pytest.raises(InvalidTokensError, match=message):
        heat.step(tokens)


def test_loads_are_exact_and_the_callers_own() -> None:
    """Sums pass the counts' narrow dtype, and later iterations do not change them."""
    heat = SlidingWindow(window_size=300, step_interval=300)
    loads = [heat.step(np.full((1, 2), 255, dtype=np.uint8)).load for _ in range(975)]
    given = [load.tolist() for load in loads if load is not None]
    assert given == [[[255 * n] * 2] for n in (75, 300, 300, 300)]
