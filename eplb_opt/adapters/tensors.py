"""Torch tensors in, torch tensors out; arrays in, arrays out. Imports torch only if it is given."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["as_given", "to_array"]


def to_array(values: Any) -> NDArray[Any]:
    """Return a tensor, wherever it lives, or anything array-like as a numpy array.

    Floats that numpy does not know (bfloat16) become float64.
    """
    if not _is_tensor(values):
        return np.asarray(values)
    tensor = values.detach()
    if tensor.is_floating_point():
        tensor = tensor.double()
    array: NDArray[Any] = tensor.cpu().numpy()
    return array


def as_given(array: NDArray[Any], given: Any) -> Any:
    """Return an array as the kind that was given: a tensor, on the CPU, or itself."""
    if not _is_tensor(given):
        return array
    return sys.modules["torch"].from_numpy(np.ascontiguousarray(array))


def _is_tensor(values: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)
