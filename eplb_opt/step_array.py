"""Arrays over many steps that are loaded a few steps at a time: from files, or by a rule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

__all__ = ["StepArray", "StepCounts", "StepPart"]


@dataclass(frozen=True, slots=True, eq=False)
class StepPart:
    """Consecutive steps, not loaded yet.

    Parameters
    ----------
    shape
        ``(steps, ...)``.
    dtype
        What they have when loaded.
    load
        Gives the steps from one number to another, counted from the part's first.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    load: Callable[[int, int], npt.NDArray[Any]]

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> StepPart:
        """Take the steps of an array, which may be memory-mapped."""
        return cls(array.shape, array.dtype, lambda begin, end: array[begin:end])

    def cut(self, begin: int, end: int) -> StepPart:
        """Return the steps from one number to another as a part, still not loaded."""
        shape = (end - begin, *self.shape[1:])
        return StepPart(shape, self.dtype, lambda b, e: self.load(begin + b, begin + e))

    def map(self, rule: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> StepPart:
        """Return what a rule makes of each step, once it is loaded.

        Parameters
        ----------
        rule
            Turns an array of any number of steps, none among them, into one of as many.
        """
        made = rule(np.empty((0, *self.shape[1:]), self.dtype))
        shape = (self.shape[0], *made.shape[1:])
        return StepPart(shape, made.dtype, lambda begin, end: rule(self.load(begin, end)))


class StepArray:
    """An array whose first axis are steps, in parts that are loaded when they are needed.

    Indexing by slices gives another of these, and loads nothing: ``steps[10:20, 3:]``.
    `numpy.asarray` loads what is left. Indexing by a number gives a copy of that step.

    Parameters
    ----------
    parts
        In order; at least one. Their shapes differ in the number of steps alone.

    Examples
    --------
    >>> import numpy as np
    >>> parts = [StepPart.of(np.full((2, 3), n)) for n in (1, 2)]
    >>> steps = StepArray(parts)
    >>> steps.shape, steps[-1].tolist()
    ((4, 3), [2, 2, 2])
    >>> np.asarray(steps[1:3, :2]).tolist()
    [[1, 1], [2, 2]]
    """

    __slots__ = ("_ends", "_parts", "dtype", "shape")

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __init__(self, parts: Sequence[StepPart]) -> None:
        self._parts = tuple(parts)
        self._ends = tuple(accumulate(part.shape[0] for part in self._parts))
        self.dtype = np.result_type(*(part.dtype for part in self._parts))
        self.shape = (self._ends[-1], *self._parts[0].shape[1:])

    @property
    def ndim(self) -> int:
        """Axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Values, over all steps."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        for step in range(len(self)):
            yield self[step]

    @overload
    def __getitem__(self, index: int) -> npt.NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice | tuple[Any, ...]) -> StepArray: ...

    def __getitem__(self, index: int | slice | tuple[Any, ...]) -> npt.NDArray[Any] | StepArray:
        if isinstance(index, tuple):
            steps, rest = self[index[0]], (slice(None), *index[1:])
            if isinstance(steps, np.ndarray):
                return np.asarray(steps[index[1:]])
            return StepArray([part.map(lambda a: a[rest]) for part in steps._parts])
        if isinstance(index, slice):
            begin, end, stride = index.indices(len(self))
            if stride != 1:
                raise IndexError(f"steps are sliced one by one, not by {stride}")
            return StepArray(self._between(begin, max(begin, end)))
        step = range(len(self))[index]
        return np.array(np.asarray(self[step : step + 1])[0])  # what is mapped holds a file open

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        dtype = self.dtype if dtype is None else dtype
        if len(self) == (part := self._parts[0]).shape[0] > 0:
            return np.asarray(part.load(0, part.shape[0]), dtype)
        out = np.empty(self.shape, dtype)
        for end, part in zip(self._ends, self._parts, strict=True):
            if part.shape[0]:
                out[end - part.shape[0] : end] = part.load(0, part.shape[0])
        return out

    def _between(self, begin: int, end: int) -> list[StepPart]:
        """Return the parts, cut, of the steps from one number to another; one without any if none.

        A part keeps its dtype but for the array's: what is loaded must not hang on where it is cut.
        """
        first = min(bisect_right(self._ends, begin), len(self._parts) - 1)
        found = []
        for part, stop in zip(self._parts[first:], self._ends[first:], strict=True):
            start = stop - part.shape[0]
            found.append(part.cut(max(begin - start, 0), min(end, stop) - start))
            if end <= stop:
                break
        if any(part.dtype != self.dtype for part in found):
            return [part.map(lambda a: a.astype(self.dtype, copy=False)) for part in found]
        return found


StepCounts: TypeAlias = "npt.NDArray[np.integer] | StepArray"
"""Counts over steps, in memory, memory-mapped, or in parts."""
