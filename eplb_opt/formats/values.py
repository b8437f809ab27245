"""Values inside a parsed JSON or YAML document: as expected, or `FormatError` with their path."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from eplb_opt import _core
from eplb_opt.errors import FormatError
from eplb_opt.placement import EMPTY

__all__ = ["counted_list", "expert_ids", "value_of", "without_repeats"]

_KINDS = {list: "a list", dict: "an object", int: "a whole number"}

_Found = TypeVar("_Found", list[Any], dict[Any, Any], int)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; the parser alone would keep the last of repeated keys in silence."""
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return content


def value_of(path: Path, place: str, holder: object, key: str, kind: type[_Found]) -> _Found:
    """Return what an object has under a key.

    Raises
    ------
    FormatError
        If `holder` is no object, lacks the key, or has something of another kind there.
    """
    if not isinstance(holder, dict) or key not in holder:
        raise FormatError(path, place, f"expected an object with the key {key!r}")
    found = holder[key]
    if type(found) is not kind:  # True is an instance of int
        problem = f"{reprlib.repr(found)}; expected {_KINDS[kind]}"
        raise FormatError(path, _join(place, key), problem)
    return found


def counted_list(path: Path, place: str, holder: object, key: str, count_key: str) -> list[Any]:
    """Return the list under a key of an object that also says its length.

    Raises
    ------
    FormatError
        As `value_of`, or if the length is another.
    """
    entries = value_of(path, place, holder, key, list)
    said = value_of(path, place, holder, count_key, int)
    if said != len(entries):
        problem = f"{len(entries)} entries; {count_key} says {said}"
        raise FormatError(path, _join(place, key), problem)
    return entries


def expert_ids(path: Path, place: str, values: object) -> npt.NDArray[np.int32]:
    """Return a list of expert ids, -1 among them, as an array.

    Raises
    ------
    FormatError
        If it is no list, or an entry is no id.
    """
    if not isinstance(values, list):
        raise FormatError(path, place, f"{reprlib.repr(values)}; expected a list of expert ids")
    for i, value in enumerate(values):
        if type(value) is not int or not EMPTY <= value < _core.MAX_EXPERTS:
            expected = f"an expert id below {_core.MAX_EXPERTS}, or -1 for an empty slot"
            raise FormatError(path, f"{place}[{i}]", f"{reprlib.repr(value)}; expected {expected}")
    return np.array(values, dtype=np.int32)


def _join(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
