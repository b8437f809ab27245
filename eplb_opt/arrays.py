"""What callers hand over, as numpy arrays or as an error that says what it is not."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["as_array"]


def as_array(values: ArrayLike, name: str, error: type[Exception]) -> NDArray[Any]:
    """Return `values` as an array, or raise `error` if rows differ in length."""
    try:
        return np.asarray(values)
    except ValueError:
        raise error(f"{name} has rows of different lengths") from None
