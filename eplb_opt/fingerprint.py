"""What a value is, as a hash on which other processes, machines and days agree."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from eplb_opt.formats.counts import step_slices
from eplb_opt.step_array import StepArray

__all__ = ["fingerprint"]

_BYTES_AT_A_TIME = 1 << 22


def fingerprint(*values: Any) -> str:
    """Return the hash of some values, 32 hexadecimal digits.

    Parameters
    ----------
    *values
        None, numbers, strings, enums, arrays, `StepArray`, sequences, mappings, and dataclasses of
        these. A `pathlib.Path` stands for what its file holds, or all files of its folder, wherever
        they are and whenever they were written.

    Raises
    ------
    TypeError
        A value of another type.
    OSError
        A file that cannot be read.

    Notes
    -----
    Files and arrays are read once, a few MiB at a time.

    Examples
    --------
    >>> fingerprint("metro", 3) == fingerprint("metro", 3) != fingerprint("metro", 3.0)
    True
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(values):
        # With its length, lest ("ab", "c") be ("a", "bc").
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterable[bytes | memoryview]:
    """Yield a value's type, and what it consists of."""
    if isinstance(value, os.PathLike):
        yield from _files(Path(value))
        return
    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__}".encode()
    if isinstance(value, Enum):
        yield value.name.encode()
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield repr(value).encode()
    elif isinstance(value, (np.ndarray, StepArray)):
        yield f"{value.dtype.str} {value.shape}".encode()
        for part in step_slices(value):
            yield np.ascontiguousarray(value[part]).reshape(-1).view(np.uint8).data
    elif isinstance(value, Mapping):
        yield str(len(value)).encode()
        for item in value.items():
            yield from _parts(item)
    elif isinstance(value, Sequence):
        yield str(len(value)).encode()
        for item in value:
            yield from _parts(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _parts(getattr(value, field.name))
    else:
        problem = f"{value!r} cannot be told from others of its type by its content"
        raise TypeError(f"{problem}; make {kind.__name__} a dataclass")


def _files(path: Path) -> Iterable[bytes]:
    """Yield the content of a file, or the names and contents of a folder's files."""
    if path.is_dir():
        for found in sorted(p for p in path.rglob("*") if p.is_file()):
            yield found.relative_to(path).as_posix().encode()
            yield from _files(found)
        return
    yield str(path.stat().st_size).encode()
    with path.open("rb") as file:
        while part := file.read(_BYTES_AT_A_TIME):
            yield part
