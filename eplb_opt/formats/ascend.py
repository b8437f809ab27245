"""vLLM-Ascend's expert map: MoE layers in order, each a list of devices with their experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_opt.errors import FormatError
from eplb_opt.formats.slots import Ends, Table, padded
from eplb_opt.formats.values import counted_list, expert_ids, value_of
from eplb_opt.placement import EMPTY

__all__ = ["LAYERS", "ascend_bytes", "ascend_table"]

LAYERS = "layer_list"


def ascend_table(path: Path, content: dict[str, Any], ends: Ends) -> Table:
    """Return the slots of a parsed map; `path` is for errors.

    As in the engine, the order of layers and devices counts, and the ids written beside them are
    not read. Devices with fewer slots than others get empty ones.

    Raises
    ------
    FormatError
        When lengths disagree or something is no expert id.
    """
    layers = counted_list(path, "", content, LAYERS, "moe_layer_count")
    kept = ends.kept(path, LAYERS, len(layers))
    table = [_devices(path, f"{LAYERS}[{at}]", layers[at]) for at in kept]
    for at, devices in zip(kept, table, strict=True):
        if len(devices) != len(table[0]):
            problem = f"{len(devices)} devices; {LAYERS}[{kept.start}] has {len(table[0])}"
            raise FormatError(path, f"{LAYERS}[{at}].device_list", problem)

    def layer_place(layer: int) -> str:
        return f"{LAYERS}[{kept[layer]}]"

    def slot_place(layer: int, gpu: int, slot: int) -> str:
        return f"{layer_place(layer)}.device_list[{gpu}].device_expert[{slot}]"

    slots = padded(table, len(table[0]) if table else 0)
    return Table(slots, LAYERS, layer_place, slot_place)


def ascend_bytes(slots: npt.NDArray[np.integer]) -> bytes:
    """Return the map of slots [layers, gpus, slots].

    Empty slots at a GPU's end are left out: the reader adds them again. Only if no GPU filled its
    last slot, the first GPU keeps its own, so that their number is not lost.
    """
    layers = []
    whole = bool((slots[:, :, -1] == EMPTY).all())
    for at, gpus in enumerate(slots):
        devices = []
        for gpu, row in enumerate(gpus):
            filled = np.flatnonzero(row != EMPTY)
            end = row.size if whole and at == gpu == 0 else int(filled.max(initial=-1)) + 1
            devices.append({"device_id": gpu, "device_expert": row[:end].tolist()})
        lines = ",\n    ".join(map(json.dumps, devices))
        head = f'"layer_id": {at}, "device_count": {len(devices)}'
        layers.append(f'  {{{head}, "device_list": [\n    {lines}\n  ]}}')
    text = f'{{"moe_layer_count": {len(layers)}, "{LAYERS}": [\n' + ",\n".join(layers) + "\n]}\n"
    return text.encode()


def _devices(path: Path, place: str, layer: object) -> list[npt.NDArray[np.int32]]:
    """Return the experts of every device in one layer."""
    experts = []
    for i, device in enumerate(counted_list(path, place, layer, "device_list", "device_count")):
        at = f"{place}.device_list[{i}]"
        held = value_of(path, at, device, "device_expert", list)
        experts.append(expert_ids(path, f"{at}.device_expert", held))
    return experts
