"""Placements in files: plain arrays, the map of SGLang and vLLM, vLLM-Ascend's expert map."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import ijson  # type: ignore[import-untyped]  # ships neither stubs nor py.typed
import numpy as np
import numpy.typing as npt

from eplb_opt import _core
from eplb_opt.errors import FormatError, InvalidPlacementError
from eplb_opt.formats.npy import map_npy, open_npz
from eplb_opt.formats.parsing import parsing, the_one, top_level_keys
from eplb_opt.placement import EMPTY, Placement

__all__ = ["holds_placement", "read_placement"]

_MAP = "physical_to_logical_map"
_ASCEND = "layer_list"
_ARRAYS = ("slots", "mask", _MAP)

_Array = npt.NDArray[Any]
_Found = TypeVar("_Found", list[Any], int)


def read_placement(
    path: str | os.PathLike[str], *, num_gpus: int | None = None, num_experts: int | None = None
) -> Placement:
    """Read a placement; suffix and names decide how, for a bare array its dtype.

    ====== ============================ =====================================================
    suffix under                        content
    ====== ============================ =====================================================
    .npy   (bare)                       integers: as ``slots``; booleans: as ``mask``
    .npz   ``slots``                    integers [layers, gpus, slots] or [gpus, slots]
    .npz   ``mask``                     booleans [layers, gpus, experts] or [gpus, experts]
    .npz   ``physical_to_logical_map``  integers [layers, P] or [P], GPU after GPU
    .json  ``physical_to_logical_map``  the same in lists, as SGLang and vLLM write it
    .json  ``layer_list``               vLLM-Ascend's map: ``moe_layer_count``, and per layer
                                        ``device_count`` and ``device_list`` with a list
                                        ``device_expert`` each
    ====== ============================ =====================================================

    A .npz or .json file holds exactly one of the names. An entry is an expert id, or -1 for an
    empty slot. Of vLLM-Ascend's map, as in the engine, the order of layers and devices counts and
    the ids written beside them are not read; devices with fewer slots than others get empty ones.

    Parameters
    ----------
    path
        The file.
    num_gpus
        GPUs. A physical-to-logical map needs it; elsewhere, the number that must be found.
    num_experts
        Experts per layer; by default 1 + the largest id. A mask must have as many columns.

    Returns
    -------
    Placement
        With a layer axis if the file has one.

    Raises
    ------
    FormatError
        For all that is not as above, or breaks a rule of `Placement`; the message names the place
        in the file (``layer_list[3].device_list[1].device_expert[7]``).
    OSError
        When the file cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "map.json"
    ...     _ = path.write_text('{"physical_to_logical_map": [[0, 1, 2, 0]]}')
    ...     read_placement(path, num_gpus=2).slots.tolist()
    [[[0, 1], [2, 0]]]
    """
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(_READERS)
        raise FormatError(path, "", f"unknown suffix {path.suffix!r}; known are {known}")
    name, array = reader(path)
    if name == _MAP and num_gpus is None:
        raise FormatError(
            path, name, "the map does not tell how many GPUs there are: give num_gpus (--gpus)"
        )
    try:
        placement = _placement(name, array, num_gpus, num_experts)
    except InvalidPlacementError as error:
        # The file cannot follow the advice to pass an argument.
        problem = str(error).partition("; pass allow_missing")[0]
        raise FormatError(path, name, problem) from error
    for found, wanted, what in (
        (placement.num_gpus, num_gpus, "num_gpus"),
        (placement.num_experts, num_experts, "num_experts"),
    ):
        if wanted not in (None, found):
            raise FormatError(path, name, f"{what}={wanted}, but the file has {found}")
    return placement


def holds_placement(path: str | os.PathLike[str]) -> bool:
    """Tell a placement from everything else, by the names in the file or by what a .npy holds.

    A .json or .npz file is a placement if it holds a name that `read_placement` knows. A .npy file
    is one if it is boolean, or if the integers of its first layer can be slots: each id from 0 to
    the largest occurs, and at most half of the slots repeat an expert of their GPU, which
    distinguishes them from small counts; or some are -1, which counts are never. Files with other
    suffixes are not placements.

    Raises
    ------
    FormatError
        When the file is damaged.
    OSError
        When it cannot be read.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return _can_be_slots(map_npy(path))
    if suffix == ".npz":
        with open_npz(path) as archive:
            return any(name in archive.names for name in _ARRAYS)
    if suffix == ".json":
        with path.open("rb") as file, parsing(path):
            return any(key in (_MAP, _ASCEND) for key in top_level_keys(ijson.basic_parse(file)))
    return False


def _placement(
    name: str, array: _Array, num_gpus: int | None, num_experts: int | None
) -> Placement:
    if name == _MAP and num_gpus is not None:
        return Placement.from_physical_to_logical(array, num_gpus=num_gpus, num_experts=num_experts)
    if name == "mask" or (not name and array.dtype == np.bool_):
        return Placement.from_mask(array)
    return Placement(array, num_experts)


def _can_be_slots(array: _Array) -> bool:
    if array.dtype == np.bool_:
        return True
    if array.dtype.kind not in "iu" or array.ndim not in (2, 3) or array.size == 0:
        return False
    first = array if array.ndim == 2 else array[0]
    try:
        placement = Placement(first)
    except InvalidPlacementError:
        return bool((first < 0).any())
    return 2 * sum(1 for _ in placement.duplicates()) <= int(placement.copies.sum())


def _read_npy(path: Path) -> tuple[str, _Array]:
    return "", map_npy(path)


def _read_npz(path: Path) -> tuple[str, _Array]:
    with open_npz(path) as archive:
        name = the_one(path, "array", archive.names, _ARRAYS)
        return name, archive.read(name)


def _read_json(path: Path) -> tuple[str, _Array]:
    with parsing(path):
        content = json.loads(path.read_bytes(), object_pairs_hook=_without_repeats)
    names = list(content) if isinstance(content, dict) else []
    name = the_one(path, "key", names, (_MAP, _ASCEND))
    if name == _ASCEND:
        return name, _ascend_slots(path, content)
    table = _value(path, "", content, _MAP, list)
    if not any(isinstance(row, list) for row in table):
        return name, _ids(path, _MAP, table)
    rows = [_ids(path, f"{_MAP}[{layer}]", row) for layer, row in enumerate(table)]
    for layer, row in enumerate(rows):
        if row.size != rows[0].size:
            problem = f"{row.size} slots; layer 0 has {rows[0].size}"
            raise FormatError(path, f"{_MAP}[{layer}]", problem)
    return name, np.stack(rows)


_READERS: dict[str, Callable[[Path], tuple[str, _Array]]] = {
    ".json": _read_json,
    ".npy": _read_npy,
    ".npz": _read_npz,
}


def _ascend_slots(path: Path, content: dict[str, Any]) -> npt.NDArray[np.int32]:
    """Return int32 [layers, devices, slots] of a vLLM-Ascend map."""
    layers = _counted_list(path, "", content, _ASCEND, "moe_layer_count")
    table = [_ascend_layer(path, f"{_ASCEND}[{at}]", layer) for at, layer in enumerate(layers)]
    for at, devices in enumerate(table):
        if len(devices) != len(table[0]):
            problem = f"{len(devices)} devices; {_ASCEND}[0] has {len(table[0])}"
            raise FormatError(path, f"{_ASCEND}[{at}].device_list", problem)
    rows = [row for devices in table for row in devices]
    slots = np.full((len(rows), max((row.size for row in rows), default=0)), EMPTY, dtype=np.int32)
    for row, out in zip(rows, slots, strict=True):
        out[: row.size] = row
    return slots.reshape(len(table), len(table[0]) if table else 0, slots.shape[1])


def _ascend_layer(path: Path, place: str, layer: object) -> list[npt.NDArray[np.int32]]:
    """Return the experts of every device in one layer."""
    devices = _counted_list(path, place, layer, "device_list", "device_count")
    experts = []
    for i, device in enumerate(devices):
        at = f"{place}.device_list[{i}]"
        held = _value(path, at, device, "device_expert", list)
        experts.append(_ids(path, f"{at}.device_expert", held))
    return experts


def _counted_list(path: Path, place: str, holder: object, key: str, count_key: str) -> list[Any]:
    """Return the list under a key of an object that also says its length."""
    entries = _value(path, place, holder, key, list)
    said = _value(path, place, holder, count_key, int)
    if said != len(entries):
        problem = f"{len(entries)} entries; {count_key} says {said}"
        raise FormatError(path, _join(place, key), problem)
    return entries


def _join(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _value(path: Path, place: str, holder: object, key: str, kind: type[_Found]) -> _Found:
    """Return what an object has under a key, if it is of that kind."""
    if not isinstance(holder, dict) or key not in holder:
        raise FormatError(path, place, f"expected an object with the key {key!r}")
    found = holder[key]
    if type(found) is not kind:  # True is an instance of int
        expected = "a list" if kind is list else "a whole number"
        problem = f"{reprlib.repr(found)}; expected {expected}"
        raise FormatError(path, _join(place, key), problem)
    return found


def _ids(path: Path, place: str, values: object) -> npt.NDArray[np.int32]:
    """Return a JSON list of expert ids as an array."""
    if not isinstance(values, list):
        raise FormatError(path, place, f"{reprlib.repr(values)}; expected a list of expert ids")
    for i, value in enumerate(values):
        if type(value) is not int or not EMPTY <= value < _core.MAX_EXPERTS:
            expected = f"an expert id below {_core.MAX_EXPERTS}, or -1 for an empty slot"
            raise FormatError(path, f"{place}[{i}]", f"{reprlib.repr(value)}; expected {expected}")
    return np.array(values, dtype=np.int32)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; the parser alone would keep the last of repeated keys in silence."""
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return content
