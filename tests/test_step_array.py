"""Arrays in parts: indexed as the whole array would be, and loaded no more than asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt.step_array import StepArray, StepPart


@given(data=st.data())
def test_slices_are_those_of_the_whole_array(data: st.DataObject) -> None:
    """Steps and layers, by number or slice, empty ones and parts without steps among them."""
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    dtypes = [np.uint8, np.uint16, np.int64]
    arrays = [
        np.arange(n * 6, dtype=data.draw(st.sampled_from(dtypes))).reshape(n, 3, 2) for n in lengths
    ]
    whole, parts = np.concatenate(arrays), StepArray([StepPart.of(array) for array in arrays])
    assert (parts.shape, parts.dtype, parts.size) == (whole.shape, whole.dtype, whole.size)
    ends = st.none() | st.integers(-14, 14)
    steps, layers = (slice(data.draw(ends), data.draw(ends)) for _ in range(2))
    for index in (steps, (steps, layers), (steps, [2, 0]), (steps, slice(None), 1)):
        got = np.asarray(parts[index])
        np.testing.assert_array_equal(got, whole[index])
        assert got.dtype == whole.dtype
    np.testing.assert_array_equal(parts[steps][layers], whole[steps][layers])
    for step in range(-len(whole), len(whole)):
        np.testing.assert_array_equal(parts[step], whole[step])
        np.testing.assert_array_equal(parts[step, 1:], whole[step, 1:])
    assert [step.tolist() for step in parts] == whole.tolist()


def test_only_what_is_asked_for_is_loaded() -> None:
    """Slicing loads nothing; a step loads itself alone."""
    loaded: list[tuple[int, int]] = []

    def load(begin: int, end: int) -> npt.NDArray[Any]:
        loaded.append((begin, end))
        return np.arange(begin, end)[:, np.newaxis]

    steps = StepArray([StepPart((10, 1), np.dtype(np.int64), load) for _ in range(2)])
    cut = steps[4:18][:, 0:1]
    assert loaded == []
    assert cut[7].item() == 1
    assert np.asarray(cut[4:8]).ravel().tolist() == [8, 9, 0, 1]
    assert loaded == [(1, 2), (8, 10), (0, 2)]


def test_what_is_no_step_is_refused() -> None:
    """Steps end where they end, and are taken in order."""
    steps = StepArray([StepPart.of(np.zeros((2, 1)))])
    with pytest.raises(IndexError):
        steps[2]
    with pytest.raises(IndexError, match="one by one"):
        steps[::2]
