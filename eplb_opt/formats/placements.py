"""Placements in files: which format it is, reading it, writing it."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import ijson  # type: ignore[import-untyped]  # ships neither stubs nor py.typed
import numpy as np
import numpy.typing as npt

from eplb_opt.errors import FormatError, InvalidPlacementError
from eplb_opt.formats.ascend import LAYERS, ascend_bytes, ascend_table
from eplb_opt.formats.maps import array_map_table, json_map_table, map_bytes, with_all_layers
from eplb_opt.formats.npy import map_npy, open_npz
from eplb_opt.formats.parsing import parsing, the_one, top_level_keys
from eplb_opt.formats.pt import load_tensors, pt_bytes, tensor_array
from eplb_opt.formats.slots import Ends, Table, array_table, mask_table
from eplb_opt.formats.trtllm import ASSIGNMENTS, read_config, yaml_bytes
from eplb_opt.formats.values import without_repeats
from eplb_opt.placement import EMPTY, Placement

__all__ = [
    "NUMBERED",
    "PLACEMENT_SUFFIXES",
    "PlacementFormat",
    "format_to_write",
    "holds_placement",
    "read_placement",
    "write_placement",
]

_Array = npt.NDArray[Any]


class PlacementFormat(str, Enum):
    """What a file of a placement is."""

    SLOTS = "slots"
    MASK = "mask"
    DEVICE_MASK = "device-mask"
    SGLANG = "sglang"
    VLLM = "vllm"
    VLLM_ASCEND = "vllm-ascend"
    TRTLLM = "trtllm"


#: Formats whose layers have the model's numbers, its dense layers counted.
NUMBERED = (PlacementFormat.SGLANG, PlacementFormat.TRTLLM)

_Format = PlacementFormat

_MAP = "physical_to_logical_map"
_EXPERTS = "num_experts"
_ARRAYS = {
    "slots": _Format.SLOTS,
    "mask": _Format.MASK,
    "device_mask": _Format.DEVICE_MASK,
    _MAP: _Format.SGLANG,
}
_KEYS = {
    _MAP: _Format.SGLANG,
    "physical_to_logical": _Format.VLLM,
    LAYERS: _Format.VLLM_ASCEND,
}
_TENSORS = {_MAP: _Format.SGLANG}
_ENGINES = {
    _Format.SGLANG: "SGLang",
    _Format.VLLM_ASCEND: "vLLM-Ascend",
    _Format.TRTLLM: "TensorRT-LLM",
}


def read_placement(
    path: str | os.PathLike[str],
    *,
    num_gpus: int | None = None,
    num_experts: int | None = None,
    format: PlacementFormat | str | None = None,
    dense_layers: int = 0,
    draft_layers: int = 0,
    allow_missing: bool = False,
) -> Placement:
    """Read a placement; suffix and names decide how, for a bare array its dtype.

    =========== ============ =========================== =========================================
    format      suffix       under                       content
    =========== ============ =========================== =========================================
    slots       .npz         ``slots``                   integers [layers, gpus, slots] or
                                                         [gpus, slots]; may add ``num_experts``
    slots       .npy         (bare)                      the same
    mask        .npz         ``mask``                    booleans [layers, gpus, experts] or
                                                         [gpus, experts]
    mask        .npy         (bare)                      the same
    device-mask .npz         ``device_mask``             booleans [gpus, layers, experts]
    sglang      .json .pt    ``physical_to_logical_map`` ids [layers, P] or [P], GPU after GPU; a
                .npz                                     row for every layer, dense ones too
    vllm        .json        ``physical_to_logical``     the same, of MoE layers
    vllm-ascend .json        ``layer_list``              ``moe_layer_count``, and per MoE layer
                                                         ``device_count`` and ``device_list`` with
                                                         a list ``device_expert`` each
    trtllm      .yaml .yml   ``initial_global_           per layer, by its number in the model,
                             assignments``               ids [P]; may add ``num_slots``
    =========== ============ =========================== =========================================

    A file holds exactly one of the names of its suffix. An entry is an expert id, or -1 for an
    empty slot. Of vLLM-Ascend's map, as in the engine, the order of layers and devices counts and
    the ids written beside them are not read. Layers of a map in JSON, and devices of an expert
    map, may have fewer slots than others: they get empty ones. Reading .pt needs PyTorch, .yaml
    the extra ``files``.

    Parameters
    ----------
    path
        The file.
    num_gpus
        GPUs. Where slots are listed GPU after GPU it is needed; elsewhere, the number that must be
        found.
    num_experts
        Experts per layer; by default 1 + the largest id. Where the file tells, the number that must
        be found.
    format
        What the file must be. Only a bare .npy of a device mask or a map, and an .npz whose one
        array has another name, need it.
    dense_layers, draft_layers
        Layers at the start of the file that have no experts, and at its end that belong to a draft
        model; left out, unread.
    allow_missing
        As for `Placement`: accept experts without any replica.

    Returns
    -------
    Placement
        With a layer axis if the file has one.

    Raises
    ------
    FormatError
        For all that is not as above, or breaks a rule of `Placement`; the message names the place
        in the file (``layer_list[3].device_list[1].device_expert[7]``).
    SolverUnavailableError
        When the file needs a package that is not installed.
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
    if min(dense_layers, draft_layers) < 0:
        raise ValueError(f"{dense_layers=}, {draft_layers=}: neither can be negative")
    wanted = None if format is None else _format(path, format)
    table = reader(path, wanted, num_gpus, Ends(dense_layers, draft_layers))
    placement = table.placement(path, num_experts, allow_missing=allow_missing)
    if num_gpus not in (None, placement.num_gpus):
        problem = f"num_gpus={num_gpus}, but the file has {placement.num_gpus}"
        raise FormatError(path, table.place, problem)
    return placement


def write_placement(
    placement: Placement,
    path: str | os.PathLike[str],
    *,
    format: PlacementFormat | str | None = None,
    layer_ids: Sequence[int] | None = None,
) -> None:
    """Write a placement so that `read_placement` gives it back, slot by slot.

    Masks cannot say in which order a GPU's slots are: they come back in order of the experts, empty
    ones last. Device masks, vLLM-Ascend's map and TensorRT-LLM's have layers: a placement without a
    layer axis comes back as one of one layer. Only a ``slots`` .npz and masks tell of experts
    beyond the largest id that is placed.

    Parameters
    ----------
    placement
        The placement.
    path
        The file, overwritten if there. Its suffix is one that `read_placement` lists for the
        format.
    format
        By default that of the suffix: ``slots`` for .npz and .npy, ``sglang`` for .pt, ``trtllm``
        for .yaml. A .json needs it.
    layer_ids
        The number of each layer in the model, ascending, its dense layers counted (for
        DeepSeek-V3, 3 to 60), where the format has it (``sglang``, ``trtllm``); by default from 0.
        SGLang's rows of layers in between list the experts in turn.

    Warns
    -----
    UserWarning
        When there are empty slots and the engine has none: SGLang takes -1 for another expert,
        TensorRT-LLM and vLLM-Ascend refuse the file.

    Raises
    ------
    FormatError
        When suffix and format do not go together, or the suffix does not tell the format.
    InvalidPlacementError
        When an expert is twice on a GPU, which a mask cannot say.
    ValueError
        When `layer_ids` does not fit.
    SolverUnavailableError
        When the format needs a package that is not installed.
    OSError
        When the file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> placement = Placement([[[0, 1], [2, 0]]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "balancer.yaml"
    ...     write_placement(placement, path, layer_ids=[3])
    ...     print(path.read_text())
    num_slots: 4
    initial_global_assignments:
      3: [0, 1, 2, 0]
    layer_updates_per_iter: 0  # the placement stays; a larger number rebalances it while serving
    <BLANKLINE>
    """
    path = Path(path)
    chosen = format_to_write(path, format)
    numbers = _layer_numbers(placement, chosen, layer_ids)
    content = _WRITERS[chosen](_Output(placement, path, numbers, layer_ids is not None))
    empty = int((placement.expert_of == EMPTY).sum())
    if empty and chosen in _ENGINES:
        engine = _ENGINES[chosen]
        warnings.warn(f"{path}: {empty} empty slots, which {engine} does not know", stacklevel=2)
    path.write_bytes(content)


def format_to_write(path: Path, name: PlacementFormat | str | None) -> PlacementFormat:
    """Return the format that `write_placement` writes, from the one given or the suffix.

    Raises
    ------
    FormatError
        When the two do not go together, or the suffix does not tell.
    """
    suffix = path.suffix.lower()
    if suffix not in _WRITTEN:
        known = ", ".join(_WRITTEN)
        raise FormatError(path, "", f"unknown suffix {path.suffix!r}; known are {known}")
    formats = _WRITTEN[suffix]
    if name is None and suffix == ".json":
        known = ", ".join(formats)
        raise FormatError(path, "", f".json does not tell the format; give one of {known}")
    chosen = formats[0] if name is None else _format(path, name)
    if chosen not in formats:
        ends = ", ".join(end for end, written in _WRITTEN.items() if chosen in written)
        raise FormatError(path, "", f"format {chosen.value} goes with the suffixes {ends}")
    return chosen


def holds_placement(path: str | os.PathLike[str]) -> bool:
    """Tell a placement from everything else, by the names in the file or by what a .npy holds.

    A .json, .npz or .pt file is a placement if it holds a name that `read_placement` knows; a .yaml
    file always is. A .npy file is one if it is boolean, or if the integers of its first layer can
    be slots: each id from 0 to the largest occurs, and at most half of the slots repeat an expert
    of their GPU, which distinguishes them from small counts; or some are -1, which counts are
    never. Folders, and files with other suffixes, are not placements.

    Raises
    ------
    FormatError
        When the file is damaged.
    SolverUnavailableError
        When the file needs PyTorch and it is missing.
    OSError
        When it cannot be read.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if path.is_dir():
        return False
    if suffix == ".npy":
        return _can_be_slots(map_npy(path))
    if suffix == ".npz":
        with open_npz(path) as archive:
            return any(name in archive.names for name in _ARRAYS)
    if suffix == ".json":
        with path.open("rb") as file, parsing(path):
            return any(key in _KEYS for key in top_level_keys(ijson.basic_parse(file)))
    if suffix in (".pt", ".pth"):
        return any(name in _TENSORS for name in load_tensors(path))
    return suffix in (".yaml", ".yml")


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


def _format(path: Path, name: PlacementFormat | str) -> PlacementFormat:
    try:
        return _Format(name)
    except ValueError:
        known = ", ".join(_Format)
        raise FormatError(path, "", f"unknown format {name!r}; known are {known}") from None


# Reading


def _read_npy(path: Path, wanted: _Format | None, num_gpus: int | None, ends: Ends) -> Table:
    array = map_npy(path)
    default = _Format.MASK if array.dtype == np.bool_ else _Format.SLOTS
    return _array_table(path, "", array, wanted or default, num_gpus, ends)


def _read_npz(path: Path, wanted: _Format | None, num_gpus: int | None, ends: Ends) -> Table:
    with open_npz(path) as archive:
        name = (
            archive.names[0]
            if wanted is not None and len(archive.names) == 1
            else _name(path, "array", archive.names, _ARRAYS, wanted)
        )
        array = archive.read(name)
        told = archive.read(_EXPERTS) if _EXPERTS in archive.names else None
    format = wanted or _ARRAYS[name]
    if told is None or format is not _Format.SLOTS:
        return _array_table(path, name, array, format, num_gpus, ends)
    if told.dtype.kind not in "iu" or told.ndim:
        problem = f"{told.dtype} of shape {list(told.shape)}; expected one whole number"
        raise FormatError(path, _EXPERTS, problem)
    return array_table(path, name, array, ends, int(told))


def _read_json(path: Path, wanted: _Format | None, num_gpus: int | None, ends: Ends) -> Table:
    with parsing(path):
        content = json.loads(path.read_bytes(), object_pairs_hook=without_repeats)
    names = list(content) if isinstance(content, dict) else []
    name = _name(path, "key", names, _KEYS, wanted)
    if _KEYS[name] is _Format.VLLM_ASCEND:
        return ascend_table(path, content, ends)
    return json_map_table(path, name, content, num_gpus, ends)


def _read_pt(path: Path, wanted: _Format | None, num_gpus: int | None, ends: Ends) -> Table:
    tensors = load_tensors(path)
    name = _name(path, "tensor", list(tensors), _TENSORS, wanted)
    return array_map_table(path, name, tensor_array(path, name, tensors[name]), num_gpus, ends)


def _read_yaml(path: Path, wanted: _Format | None, num_gpus: int | None, ends: Ends) -> Table:
    _known(path, {ASSIGNMENTS: _Format.TRTLLM}, wanted)
    return read_config(path, num_gpus, ends)


_READERS: dict[str, Callable[[Path, _Format | None, int | None, Ends], Table]] = {
    ".json": _read_json,
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".pt": _read_pt,
    ".pth": _read_pt,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
}


def _array_table(
    path: Path, name: str, array: _Array, format: _Format, num_gpus: int | None, ends: Ends
) -> Table:
    if format is _Format.SLOTS:
        return array_table(path, name, array, ends)
    if format is _Format.SGLANG:
        return array_map_table(path, name, array, num_gpus, ends)
    _known(path, _ARRAYS, format)
    return mask_table(path, name, array, ends, gpus_first=format is _Format.DEVICE_MASK)


def _name(
    path: Path,
    what: str,
    names: Sequence[str],
    known: Mapping[str, _Format],
    wanted: _Format | None,
) -> str:
    """Return the one name in the file that is known, of the wanted format if that is given."""
    return the_one(path, what, names, _known(path, known, wanted))


def _known(path: Path, known: Mapping[str, _Format], wanted: _Format | None) -> list[str]:
    """Return the names that a file with this suffix can have."""
    names = [name for name, format in known.items() if wanted in (None, format)]
    if not names and wanted is not None:
        raise FormatError(path, "", f"a {path.suffix} file holds nothing of format {wanted.value}")
    return names


# Writing


@dataclass(frozen=True, slots=True)
class _Output:
    """What a writer is given.

    Attributes
    ----------
    placement, path
        What, and where.
    layer_ids
        The number of each layer in the model.
    numbered
        Whether the caller gave these.
    """

    placement: Placement
    path: Path
    layer_ids: Sequence[int]
    numbered: bool

    @property
    def layers(self) -> npt.NDArray[np.int32]:
        """The slots, int32 [layers, gpus, slots]."""
        gpus, slots = self.placement.num_gpus, self.placement.slots_per_gpu
        return self.placement.expert_of.reshape(-1, gpus, slots)

    @property
    def map(self) -> npt.NDArray[np.int32]:
        """The physical-to-logical map, int32 [layers, P], or [P] without a layer axis."""
        return self.placement.expert_of if self.placement.layered else self.placement.expert_of[0]


def _write_slots(to: _Output) -> bytes:
    slots = to.placement.slots
    return _array_bytes(to.path, slots=slots, num_experts=np.array(to.placement.num_experts))


def _write_mask(to: _Output) -> bytes:
    mask = _mask(to)
    return _array_bytes(to.path, mask=mask if to.placement.layered else mask[0])


def _write_device_mask(to: _Output) -> bytes:
    return _array_bytes(to.path, device_mask=np.moveaxis(_mask(to), 1, 0))


def _write_sglang(to: _Output) -> bytes:
    array: npt.NDArray[np.integer] = to.map
    if to.numbered:
        array = with_all_layers(to.placement.expert_of, to.layer_ids, to.placement.num_experts)
    if to.path.suffix.lower() == ".json":
        return map_bytes(_MAP, array)
    return pt_bytes(to.path, {_MAP: array.astype(np.int64)})


def _write_vllm(to: _Output) -> bytes:
    return map_bytes("physical_to_logical", to.map)


def _write_ascend(to: _Output) -> bytes:
    return ascend_bytes(to.layers)


def _write_trtllm(to: _Output) -> bytes:
    return yaml_bytes(to.placement.expert_of, to.layer_ids)


_WRITERS: dict[_Format, Callable[[_Output], bytes]] = {
    _Format.SLOTS: _write_slots,
    _Format.MASK: _write_mask,
    _Format.DEVICE_MASK: _write_device_mask,
    _Format.SGLANG: _write_sglang,
    _Format.VLLM: _write_vllm,
    _Format.VLLM_ASCEND: _write_ascend,
    _Format.TRTLLM: _write_trtllm,
}

# By suffix, the formats that are written to it; the first is the default, but for .json.
_WRITTEN: dict[str, tuple[_Format, ...]] = {
    ".npz": (_Format.SLOTS, _Format.MASK, _Format.DEVICE_MASK),
    ".npy": (_Format.SLOTS, _Format.MASK, _Format.DEVICE_MASK),
    ".json": (_Format.SGLANG, _Format.VLLM, _Format.VLLM_ASCEND),
    ".pt": (_Format.SGLANG,),
    ".pth": (_Format.SGLANG,),
    ".yaml": (_Format.TRTLLM,),
    ".yml": (_Format.TRTLLM,),
}

PLACEMENT_SUFFIXES = tuple(_WRITTEN)
"""The suffixes that placements are written with."""


def _layer_numbers(
    placement: Placement, format: _Format, layer_ids: Sequence[int] | None
) -> list[int]:
    if layer_ids is None:
        return list(range(placement.num_layers))
    if format not in NUMBERED:
        raise ValueError(f"layer_ids: format {format.value} does not number layers")
    numbers = list(map(int, layer_ids))
    rising = all(a < b for a, b in pairwise(numbers))
    if len(numbers) != placement.num_layers or numbers[0] < 0 or not rising:
        raise ValueError(f"layer_ids must be {placement.num_layers} rising numbers, from 0 or more")
    return numbers


def _mask(to: _Output) -> npt.NDArray[np.bool_]:
    """Return bool [layers, gpus, experts]."""
    for layer, gpu, expert in to.placement.duplicates():
        raise InvalidPlacementError(
            f"layer {layer}, GPU {gpu}: expert {expert} is in two slots, which a mask cannot say; "
            "write another format"
        )
    experts = to.placement.num_experts
    mask = np.zeros((*to.layers.shape[:2], experts + 1), dtype=np.bool_)
    # The last column takes the empty slots, -1.
    np.put_along_axis(mask, to.layers.astype(np.int64) % (experts + 1), True, axis=-1)
    return mask[..., :experts]


def _array_bytes(path: Path, **arrays: _Array) -> bytes:
    """Return an .npz of the arrays, or an .npy of the first."""
    buffer = io.BytesIO()
    if path.suffix.lower() == ".npy":
        np.save(buffer, next(iter(arrays.values())))
    else:
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # numpy's stub is too narrow
    return buffer.getvalue()
