"""Tensors in the files of `torch.save`, read without running what is in them. Needs PyTorch."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_opt.errors import FormatError, SolverUnavailableError
from eplb_opt.formats.parsing import parsing

__all__ = ["load_tensors", "pt_bytes", "tensor_array"]


def load_tensors(path: Path) -> dict[str, Any]:
    """Map the dict that `torch.save` wrote, its tensors left on disk.

    Returns
    -------
    dict
        Empty if the file holds something else.

    Raises
    ------
    FormatError
        When the file is damaged, or holds more than tensors and plain values.
    SolverUnavailableError
        When PyTorch is not installed.
    """
    torch = _torch(f"reading {path}")
    with path.open("rb"):  # torch reports a missing file in ways of its own
        pass
    with parsing(path):
        saved = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    if not isinstance(saved, dict):
        return {}
    return {str(key): value for key, value in saved.items()}


def tensor_array(path: Path, name: str, tensor: object) -> npt.NDArray[Any]:
    """Return a tensor of a file as an array on the same memory.

    Raises
    ------
    FormatError
        When it is no tensor, or of a dtype that numpy has not.
    """
    torch = _torch(f"reading {path}")
    if not isinstance(tensor, torch.Tensor):
        raise FormatError(path, name, f"a {type(tensor).__name__}; expected a tensor")
    with parsing(path, lambda: name):
        return np.asarray(tensor.detach().numpy())


def pt_bytes(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> bytes:
    """Return what `torch.save` makes of a dict of tensors; `path` is for errors."""
    torch = _torch(f"writing {path}")
    buffer = io.BytesIO()
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, buffer)
    return buffer.getvalue()


def _torch(doing: str) -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise SolverUnavailableError(f"{doing} needs PyTorch: pip install torch") from error
