"""What a file says of slots, and the path of each slot in it, so that a wrong one is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_opt.errors import FormatError, InvalidPlacementError
from eplb_opt.placement import EMPTY, Placement, slots_for

__all__ = ["Ends", "Table", "array_table", "flat_table", "mask_table", "padded"]

_LARGEST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Ends:
    """Layers of a file that are not the placement's, by their number at either end.

    Attributes
    ----------
    dense
        At the start: layers without experts, which some engines have rows for.
    draft
        At the end: layers of a draft model.
    """

    dense: int = 0
    draft: int = 0

    def kept(self, path: Path, place: str, layers: int) -> range:
        """Return the layers between the ends.

        Raises
        ------
        FormatError
            If the ends are all there is.
        """
        if self.dense + self.draft and self.dense + self.draft >= layers:
            problem = f"{layers} layers; {self.dense} dense and {self.draft} draft leave none"
            raise FormatError(path, place, problem)
        return range(self.dense, layers - self.draft)


@dataclass(frozen=True, slots=True)
class Table:
    """Slots as a file gives them.

    Attributes
    ----------
    slots : int array, [layers, gpus, slots] or [gpus, slots]
        Of any integer dtype; -1 where empty.
    place
        The path of the whole in the file.
    layer_place, slot_place
        The path of a layer, and of a (layer, GPU, slot); the layer is 0 without a layer axis.
    num_experts
        Experts per layer, if the file tells.
    """

    slots: npt.NDArray[np.integer]
    place: str
    layer_place: Callable[[int], str]
    slot_place: Callable[[int, int, int], str]
    num_experts: int | None = None

    def placement(self, path: Path, num_experts: int | None, *, allow_missing: bool) -> Placement:
        """Return the placement.

        Raises
        ------
        FormatError
            If it breaks a rule of `Placement`, where the place is that of the layer or slot, or the
            file tells of another number of experts.
        """
        if num_experts is not None and self.num_experts not in (None, num_experts):
            problem = f"num_experts={num_experts}, but the file has {self.num_experts}"
            raise FormatError(path, self.place, problem)
        experts = self.num_experts if num_experts is None else num_experts
        try:
            return Placement(self.slots, experts, allow_missing=allow_missing)
        except InvalidPlacementError as error:
            place = self._place_of_fault(experts)
            # The file cannot follow the advice to pass an argument.
            problem = str(error).partition("; pass allow_missing")[0]
            raise FormatError(path, place, problem) from error

    def _place_of_fault(self, num_experts: int | None) -> str:
        """Return the path of what `Placement` refuses: a slot, a layer, or the whole."""
        try:
            loose = Placement(self.slots, num_experts, allow_missing=True)
        except InvalidPlacementError:
            return self._place_out_of_range(num_experts)
        return self.layer_place(int(np.argmax((loose.copies == 0).any(axis=1))))

    def _place_out_of_range(self, num_experts: int | None) -> str:
        if self.slots.dtype.kind in "iu" and self.slots.ndim in (2, 3):
            layers = self.slots if self.slots.ndim == 3 else self.slots[None]
            wrong = layers < EMPTY
            if num_experts is not None:
                wrong |= layers >= num_experts
            for layer, gpu, slot in np.argwhere(wrong)[:1].tolist():
                return self.slot_place(layer, gpu, slot)
        return self.place


def array_table(
    path: Path, name: str, array: npt.NDArray[Any], ends: Ends, num_experts: int | None = None
) -> Table:
    """Return the table of an array [layers, gpus, slots] or [gpus, slots]."""
    array, index = _kept_layers(path, name, array, ends)
    return Table(
        array,
        name,
        lambda layer: name + index(layer),
        lambda layer, gpu, slot: f"{name}{index(layer)}[{gpu}][{slot}]",
        num_experts,
    )


def mask_table(
    path: Path, name: str, mask: npt.NDArray[Any], ends: Ends, *, gpus_first: bool = False
) -> Table:
    """Return the table of a boolean array.

    Parameters
    ----------
    path, name
        The file, and the array's name in it.
    mask
        Bool [layers, gpus, experts] or [gpus, experts]; [gpus, layers, experts] with `gpus_first`.
    ends
        Layers to leave out.
    gpus_first
        Whether the GPUs are the first axis.

    Raises
    ------
    FormatError
        If it is something else, or holds nothing.
    """
    if gpus_first and mask.ndim == 3:
        mask = np.moveaxis(mask, 0, 1)
    elif gpus_first:
        raise FormatError(
            path, name, f"shape {list(mask.shape)}; expected bool [gpus, layers, experts]"
        )
    mask, index = _kept_layers(path, name, mask, ends)
    try:
        held = Placement.from_mask(mask, allow_missing=True)
    except InvalidPlacementError as error:
        raise FormatError(path, name, str(error)) from error

    def layer_place(layer: int) -> str:
        return f"{name}[:, {index(layer)[1:-1]}]" if gpus_first else name + index(layer)

    def slot_place(layer: int, gpu: int, slot: int) -> str:
        return layer_place(layer)

    return Table(held.slots, name, layer_place, slot_place, held.num_experts)


def flat_table(
    path: Path,
    place: str,
    rows: Sequence[tuple[str, npt.NDArray[Any]]],
    num_gpus: int | None,
    *,
    layered: bool = True,
) -> Table:
    """Return the table of layers that list their slots GPU after GPU.

    Layers may differ in length: the GPUs of shorter ones get empty slots at their end.

    Parameters
    ----------
    path, place
        The file, and the path of the whole in it.
    rows
        Per layer its path in the file, and its ids [P].
    num_gpus
        GPUs, over which each layer divides evenly.
    layered
        Whether the placement has a layer axis.

    Raises
    ------
    FormatError
        If there are no slots, or they do not divide, or `num_gpus` is not given.
    """
    if num_gpus is None:
        problem = "the map does not tell how many GPUs there are: give num_gpus (--gpus)"
        raise FormatError(path, place, problem)
    widths = []
    for row_place, ids in rows:
        if ids.dtype.kind not in "iu":
            raise FormatError(path, row_place, f"expert ids must be integers, not {ids.dtype}")
        try:
            widths.append(slots_for(ids.size, num_gpus))
        except InvalidPlacementError as error:
            raise FormatError(path, row_place, str(error)) from error
    slots = padded([list(ids.reshape(num_gpus, -1)) for _, ids in rows], num_gpus)
    return Table(
        slots if layered else slots[0],
        place,
        lambda layer: rows[layer][0],
        lambda layer, gpu, slot: f"{rows[layer][0]}[{gpu * widths[layer] + slot}]",
    )


def padded(layers: Sequence[Sequence[npt.NDArray[Any]]], num_gpus: int) -> npt.NDArray[np.int64]:
    """Return int64 [layers, gpus, slots] of ids by layer and GPU, ended by empty slots."""
    rows = [row for gpus in layers for row in gpus]
    width = max((row.size for row in rows), default=0)
    slots = np.full((len(rows), width), EMPTY, dtype=np.int64)
    for row, out in zip(rows, slots, strict=True):
        # An unsigned id past int64 must stay out of range, not become -1.
        out[: row.size] = np.minimum(row, _LARGEST) if row.dtype.kind == "u" else row
    return slots.reshape(len(layers), num_gpus, width)


def _kept_layers(
    path: Path, name: str, array: npt.NDArray[Any], ends: Ends
) -> tuple[npt.NDArray[Any], Callable[[int], str]]:
    """Return the layers between the ends, and what a layer's index in the file looks like."""
    if array.ndim == 3:
        kept = ends.kept(path, name, len(array))
        return array[kept.start : kept.stop], lambda layer: f"[{layer + kept.start}]"
    if ends != Ends():
        raise FormatError(path, name, f"shape {list(array.shape)} has no layers to leave out")
    return array, lambda _: ""
