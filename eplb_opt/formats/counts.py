"""What passes for a token count in a file, and how counts become one int64 array, exactly."""

from __future__ import annotations

import math
import reprlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_opt.errors import FormatError
from eplb_opt.step_array import StepArray

__all__ = ["checked_counts", "checked_rows", "stack_rows", "step_slices"]

_LARGEST_COUNT = 2**63 - 1
_FIRST_INEXACT_FLOAT = 2**53  # from here on float64 has no odd numbers: a count may be rounded
_VALUES_AT_A_TIME = 2**19  # a few MiB: larger parts leave the cache and halve the speed


def step_slices(tokens: npt.NDArray[Any] | StepArray) -> Iterator[slice]:
    """Cut the first axis of ``tokens`` into parts that take a few MiB each.

    Parameters
    ----------
    tokens : array, [steps, ...]

    Yields
    ------
    slice
        Consecutive steps, at least one.
    """
    steps = max(1, _VALUES_AT_A_TIME // max(1, math.prod(tokens.shape[1:])))
    for first in range(0, len(tokens), steps):
        yield slice(first, first + steps)


def checked_counts(path: Path, name: str, counts: npt.NDArray[Any]) -> npt.NDArray[np.integer]:
    """Accept an array of a file as counts, looking at it part by part.

    Parameters
    ----------
    path, name
        The file and the array's name in it, for errors.
    counts : array, [layers, experts] or [steps, layers, experts]
        Integers, or floats that are whole and below 2^53. May be memory-mapped.

    Returns
    -------
    integer array, [steps, layers, experts]
        A view of ``counts`` with its own dtype (uint64 becomes int64); floats are copied to int64.

    Raises
    ------
    FormatError
        For another dtype (booleans are not counts), another shape, no value at all, and a count
        that is negative, not whole, NaN, infinite or too large; it names the place.
    """
    _require_numbers(path, name, counts)
    if counts.ndim not in (2, 3) or counts.size == 0:
        expected = "[layers, experts] or [steps, layers, experts], with no axis of length 0"
        raise FormatError(path, name, f"shape {list(counts.shape)}; expected {expected}")

    def place(*index: int) -> str:
        return name + "".join(f"[{i}]" for i in index[3 - counts.ndim :])

    return _checked(path, counts if counts.ndim == 3 else counts[np.newaxis], place)


def checked_rows(
    path: Path, names: Sequence[str], rows: Sequence[npt.NDArray[Any]]
) -> npt.NDArray[np.integer]:
    """Accept arrays of a file, each under a name of its own, as one layer's counts each.

    Parameters
    ----------
    path, names
        The file, and the arrays' names in it, for errors.
    rows
        At least one array [experts], all of one length.

    Returns
    -------
    integer array, [rows, experts]

    Raises
    ------
    FormatError
        As `checked_counts`.
    """
    for name, row in zip(names, rows, strict=True):
        _require_numbers(path, name, row)
        if row.dtype != rows[0].dtype:  # numpy would turn int64 beside uint64 into float64
            raise FormatError(path, name, f"dtype {row.dtype}; {names[0]} has {rows[0].dtype}")

    def place(_: int, row: int, expert: int) -> str:
        return f"{names[row]}[{expert}]"

    counts: npt.NDArray[np.integer] = _checked(path, np.stack(rows)[np.newaxis], place)[0]
    return counts


def _require_numbers(path: Path, name: str, counts: npt.NDArray[Any]) -> None:
    if counts.dtype.kind not in "iuf":
        problem = f"dtype {counts.dtype}; expected integer counts, or floats that are whole"
        raise FormatError(path, name, problem)


def _checked(
    path: Path, steps: npt.NDArray[Any], place: Callable[[int, int, int], str]
) -> npt.NDArray[np.integer]:
    """Accept numbers [steps, layers, experts] as counts."""
    is_float = steps.dtype.kind == "f"
    accepted = np.empty(steps.shape, dtype=np.int64) if is_float else steps
    for part in step_slices(steps):
        wrong = ~_is_count(steps[part])
        if wrong.any():
            step, layer, expert = np.argwhere(wrong)[0].tolist()
            value = steps[part][step, layer, expert].item()
            raise FormatError(path, place(part.start + step, layer, expert), _problem(value))
        if is_float:
            accepted[part] = steps[part]
    if accepted.dtype.kind == "u" and accepted.dtype.itemsize == 8:
        # Mixed with int64, numpy would turn uint64 into float64.
        return accepted.view(accepted.dtype.str.replace("u", "i"))
    return accepted


def stack_rows(
    path: Path,
    rows: Iterable[tuple[int, str, list[Any]]],
    cell: Callable[[str, int], str],
) -> npt.NDArray[np.int64]:
    """Gather a stream of rows into one array, keeping no row.

    Parameters
    ----------
    path
        The file, for errors.
    rows
        Per row its step (0, 1, ... in order), its place in the file, and one count per expert.
    cell
        The place of a value, from its row's place and its expert.

    Returns
    -------
    int64 array, [steps, layers, experts]

    Raises
    ------
    FormatError
        When there is no row, a row or step differs in length from the first, or a value is not a
        count; it names the place.

    Notes
    -----
    The array grows in place by a sixteenth at a time (`array.array`), so that the peak is little
    more than the result, and no second copy is made at the end.
    """
    counts = array("q")
    layers: list[int] = []
    experts = -1
    for step, place, values in rows:
        if experts < 0:
            experts = len(values)
        if len(values) != experts or not values:
            raise FormatError(path, place, f"{len(values)} counts; the first row has {experts}")
        if step == len(layers):
            layers.append(0)
        layers[step] += 1
        counts.frombytes(_exact_row(path, place, values, cell).tobytes())
    if not layers:
        raise FormatError(path, "", "no counts in it; expected one row of counts per layer")
    for step, height in enumerate(layers):
        if height != layers[0]:
            raise FormatError(path, f"step {step}", f"{height} layers; step 0 has {layers[0]}")
    return np.frombuffer(counts, dtype=np.int64).reshape(len(layers), layers[0], experts)


def _is_count(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    accepted: npt.NDArray[np.bool_] = values >= 0  # false for NaN
    if values.dtype.kind == "f":
        accepted &= (values < _FIRST_INEXACT_FLOAT) & (values == np.floor(values))
    elif values.dtype.kind == "u":
        accepted &= values <= _LARGEST_COUNT
    return accepted


def _exact_row(
    path: Path, place: str, values: list[Any], cell: Callable[[str, int], str]
) -> npt.NDArray[np.int64]:
    # numpy alone would take True for 1 and round integers that stand beside a float.
    kinds = set(map(type, values))
    if kinds == {int} or kinds == {float}:
        with suppress(OverflowError):
            row = np.array(values, dtype=np.int64 if kinds == {int} else np.float64)
            if _is_count(row).all():
                return row.astype(np.int64, copy=False)
    exact = np.empty(len(values), dtype=np.int64)
    for expert, value in enumerate(values):
        if not _is_exact(value):
            raise FormatError(path, cell(place, expert), _problem(value))
        exact[expert] = value
    return exact


def _is_exact(value: object) -> bool:
    if type(value) is int:
        return 0 <= value <= _LARGEST_COUNT
    return type(value) is float and 0 <= value < _FIRST_INEXACT_FLOAT and value.is_integer()


def _problem(value: object) -> str:
    expected = "expected a whole number of tokens, from 0 to 2^63-1 (2^53-1 if written as a float)"
    return f"{reprlib.repr(value)}; {expected}"
