"""What callers hand over, as arrays and integers or as an error that says what it is not."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["as_array", "as_integer", "narrowed"]


def as_array(values: ArrayLike, name: str, error: type[Exception]) -> NDArray[Any]:
    """Return `values` as an array, or raise `error` if rows differ in length."""
    try:
        return np.asarray(values)
    except ValueError:
        raise error(f"{name} has rows of different lengths") from None


def as_integer(value: Any, name: str, *, least: int = 1, most: int | None = None) -> int:
    """Return `value` as an integer, or raise an error that names it.

    Raises
    ------
    TypeError
        Not an integer.
    ValueError
        Below `least` or above `most`.
    """
    try:
        given = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if given < least:
        raise ValueError(f"{name} must be at least {least}, not {given}")
    if most is not None and given > most:
        raise ValueError(f"{name} must be at most {most}, not {given}")
    return given


def narrowed(counts: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return a copy of counts as uint8, uint16, uint32 or int64, the narrowest that holds them.

    Not uint64, which numpy turns into float64 beside int64.
    """
    dtype = np.min_scalar_type(int(counts.max(initial=0)))
    return counts.astype(dtype if dtype.itemsize < 8 else np.int64)
