"""Hashes of values: what differs is told apart, what is the same is not, wherever it is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt.fingerprint import fingerprint
from eplb_opt.scenario import Scenario
from eplb_opt.status import Status
from eplb_opt.step_array import StepArray, StepPart
from eplb_opt.step_time import StepTime
from eplb_opt.workload import Workload

SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTED = st.recursive(SIMPLE, lambda inner: st.tuples(inner, inner) | st.lists(inner), max_leaves=8)


@given(first=NESTED, second=NESTED)
def test_values_are_told_apart(first: Any, second: Any) -> None:
    """Two hashes are the same where types and values are: 1, 1.0 and True are three values."""
    assert (fingerprint(first) == fingerprint(second)) == (repr(first) == repr(second))


def test_where_a_value_ends_is_told() -> None:
    """Neighbours do not run together."""
    values: list[Any] = ["ab", ("a", "b"), ("ab",), (("a",), "b"), ("a", ("b",)), ("", "ab")]
    assert all(fingerprint(a) != fingerprint(b) for a, b in combinations(values, 2))


def test_arrays_are_told_apart() -> None:
    """By content, shape and dtype; however they lie in memory, and in how many parts."""
    array = np.arange(6).reshape(2, 3)
    same = [
        array,
        np.asfortranarray(array),
        np.repeat(array, 2, axis=1)[:, ::2],
    ]
    others = [array + 1, array.reshape(3, 2), array.astype(np.int32), array[:0]]
    assert len({fingerprint(a) for a in same}) == 1
    assert len({fingerprint(a) for a in [array, *others]}) == 5
    parts = [StepPart.of(array[:1]), StepPart.of(array[1:])]
    assert fingerprint(StepArray(parts)) == fingerprint(StepArray([StepPart.of(array)]))


def test_the_projects_own_values() -> None:
    """What a sweep is made of: deployments, times, traffic, enums."""
    values = [
        Scenario(8),
        Scenario(16),
        Scenario(8, placer="search"),
        StepTime("qwen3-30b-fp8"),
        StepTime("qwen3-30b-fp8", routers={"metro": 26.0}),
        Workload.preset("qwen3-30b", seed=1),
        Workload.preset("qwen3-30b", seed=2),
        Status.OPTIMAL,
        Status.FEASIBLE,
    ]
    assert len({fingerprint(value) for value in values}) == len(values)
    assert fingerprint(Scenario(8)) == fingerprint(Scenario(8))


def test_a_path_is_its_content(tmp_path: Path) -> None:
    """Neither where a file is nor when it was written counts; in a folder, names do."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.bin").write_bytes(b"abc")
    os.utime(tmp_path / "one" / "a.bin", (1, 1))
    one, two = tmp_path / "one", tmp_path / "two"
    assert fingerprint(one / "a.bin") == fingerprint(two / "a.bin")
    assert fingerprint(one) == fingerprint(two)
    (two / "a.bin").rename(two / "b.bin")
    assert fingerprint(one) != fingerprint(two)
    (one / "a.bin").write_bytes(b"abd")
    assert fingerprint(one / "a.bin") != fingerprint(two / "b.bin")
    with pytest.raises(FileNotFoundError):
        fingerprint(tmp_path / "none")


def test_what_cannot_be_told_is_refused() -> None:
    """An object whose content is not known would be another one in every process."""

    class Plain:
        pass

    @dataclass
    class Known:
        value: int

    with pytest.raises(TypeError, match="make Plain a dataclass"):
        fingerprint(("metro", Plain()))
    assert fingerprint(Known(1)) != fingerprint(Known(2))
