"""Physical-to-logical maps, as SGLang and vLLM have them: the expert in every slot, GPU by GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_opt.errors import FormatError
from eplb_opt.formats.slots import Ends, Table, flat_table
from eplb_opt.formats.values import expert_ids, value_of

__all__ = ["array_map_table", "json_map_table", "map_bytes", "with_all_layers"]


def json_map_table(
    path: Path, name: str, content: dict[str, Any], num_gpus: int | None, ends: Ends
) -> Table:
    """Return the slots of a map in lists, [layers][P] or [P]; layers may differ in length.

    Raises
    ------
    FormatError
        When it is something else; the place is a path such as ``physical_to_logical_map[3][17]``.
    """
    table = value_of(path, "", content, name, list)
    if table and not any(isinstance(row, list) for row in table):
        _require_no_ends(path, name, ends)
        return flat_table(
            path, name, [(name, expert_ids(path, name, table))], num_gpus, layered=False
        )
    places = [f"{name}[{layer}]" for layer in ends.kept(path, name, len(table))]
    kept = table[ends.dense : ends.dense + len(places)]
    rows = [(place, expert_ids(path, place, row)) for place, row in zip(places, kept, strict=True)]
    return flat_table(path, name, rows, num_gpus)


def array_map_table(
    path: Path, name: str, array: npt.NDArray[Any], num_gpus: int | None, ends: Ends
) -> Table:
    """Return the slots of a map in an array, [layers, P] or [P].

    Raises
    ------
    FormatError
        When it has another shape or is not of integers.
    """
    if array.ndim == 1:
        _require_no_ends(path, name, ends)
        return flat_table(path, name, [(name, array)], num_gpus, layered=False)
    if array.ndim != 2:
        raise FormatError(path, name, f"shape {list(array.shape)}; expected [layers, P] or [P]")
    kept = ends.kept(path, name, len(array))
    rows = [(f"{name}[{layer}]", array[layer]) for layer in kept]
    return flat_table(path, name, rows, num_gpus)


def map_bytes(name: str, array: npt.NDArray[np.integer]) -> bytes:
    """Return JSON with a map [layers, P] or [P], a line per layer."""
    if array.ndim == 1:
        return f'{{"{name}": {json.dumps(array.tolist())}}}\n'.encode()
    rows = ",\n".join(map(json.dumps, array.tolist()))
    return f'{{"{name}": [\n{rows}\n]}}\n'.encode()


def with_all_layers(
    maps: npt.NDArray[np.integer], layer_ids: Sequence[int], num_experts: int
) -> npt.NDArray[np.integer]:
    """Return a map with a row for every layer of the model up to the last one given.

    Parameters
    ----------
    maps : int array, [layers, P]
        The expert in every slot.
    layer_ids
        The number of each layer in the model, ascending.
    num_experts
        Experts per layer.

    Returns
    -------
    int array, [1 + last layer, P]
        Rows of layers that were not given, which have no experts, list the experts in turn, as
        SGLang's own first placement does.
    """
    trivial = np.arange(maps.shape[1], dtype=maps.dtype) % num_experts
    every = np.tile(trivial, (layer_ids[-1] + 1, 1))
    every[list(layer_ids)] = maps
    return every


def _require_no_ends(path: Path, name: str, ends: Ends) -> None:
    if ends != Ends():
        raise FormatError(path, name, "one layer without a layer axis; there is none to leave out")
