"""Who sits in which slot, and what follows from it: the replicas of every expert."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt import _core
from eplb_opt.arrays import as_array
from eplb_opt.errors import InfeasibleError, InvalidPlacementError

__all__ = ["EMPTY", "Placement", "require_slots", "slots_for"]

EMPTY = -1

_Array = TypeVar("_Array", bound=NDArray[Any])


class Placement:
    """An expert placement: for every layer and GPU, the expert in each slot.

    Checked once, then immutable. Replicas of an expert are numbered by physical id
    ``gpu * slots_per_gpu + slot``. One expert in two slots of a GPU is allowed (engines produce
    such placements): routers that choose see it as one candidate, engines' rules use both slots.

    Parameters
    ----------
    slots
        Int ``[layers, gpus, slots]``, or ``[gpus, slots]`` for one layer, whose answers then have
        no layer axis; at most 1,024 GPUs. Each entry is an expert id, or -1 for an empty slot; a
        dead GPU has only empty slots.
    num_experts
        Experts per layer, at most 4,096; by default the largest id plus one.
    allow_missing
        Accept experts without any replica (after a GPU died, say). Routing a token to such an
        expert raises `InfeasibleError`.

    Raises
    ------
    InvalidPlacementError
        An id out of range, an expert without a replica, a wrong shape or type; the message names
        the layer and the GPU, slot or expert.

    Examples
    --------
    >>> placement = Placement([[0, 1], [0, 2], [1, 3], [2, 3]])
    >>> placement.num_gpus, placement.num_experts
    (4, 4)
    >>> placement.replicas(expert=3)
    array([5, 7], dtype=int32)
    """

    def __init__(
        self, slots: ArrayLike, num_experts: int | None = None, *, allow_missing: bool = False
    ) -> None:
        given = _integers(slots, "slots")
        if given.ndim not in (2, 3):
            raise InvalidPlacementError(
                f"slots must be [layers, gpus, slots] or [gpus, slots], not of shape {given.shape}"
            )
        array = given if given.ndim == 3 else given[None]
        if num_experts is None:
            num_experts = int(array.max()) + 1
            if num_experts < 1:
                raise InvalidPlacementError("no slot is filled: give num_experts")
        num_experts = operator.index(num_experts)
        _check_slots(array, num_experts)
        self._slots: NDArray[np.int32] = _frozen(np.array(array, dtype=np.int32, order="C"))
        copies = np.empty((len(array), num_experts), np.int64)
        _core.count_copies(self._slots, copies)
        self._copies = _frozen(copies)
        if not (allow_missing or copies.all()):
            raise InvalidPlacementError(_missing(copies))
        self._layered = given.ndim == 3
        self._num_experts = num_experts
        self._allow_missing = allow_missing

    @classmethod
    def from_physical_to_logical(
        cls,
        physical_to_logical: ArrayLike,
        *,
        num_gpus: int,
        num_experts: int | None = None,
        allow_missing: bool = False,
    ) -> Placement:
        """Make a placement from the map that engines store.

        Parameters
        ----------
        physical_to_logical
            Int ``[layers, P]`` or ``[P]``: the expert in every physical slot, GPU after GPU; -1 for
            an empty slot.
        num_gpus
            GPUs; each holds ``P / num_gpus`` slots.
        num_experts, allow_missing
            As for `Placement`.

        Raises
        ------
        InvalidPlacementError
            Also if the slots do not divide over the GPUs; the message names counts that would.

        Examples
        --------
        >>> Placement.from_physical_to_logical([0, 1, 2, 0], num_gpus=2).slots.tolist()
        [[0, 1], [2, 0]]
        """
        array = _integers(physical_to_logical, "physical_to_logical")
        if array.ndim not in (1, 2):
            raise InvalidPlacementError(
                f"physical_to_logical must be [layers, P] or [P], not of shape {array.shape}"
            )
        per_gpu = slots_for(array.shape[-1], num_gpus)
        slots = array.reshape(*array.shape[:-1], num_gpus, per_gpu)
        return cls(slots, num_experts, allow_missing=allow_missing)

    @classmethod
    def from_mask(cls, holds: ArrayLike, *, allow_missing: bool = False) -> Placement:
        """Make a placement from a boolean GPU x expert matrix.

        Parameters
        ----------
        holds
            Bool ``[layers, gpus, experts]`` or ``[gpus, experts]``: whether the GPU holds the
            expert. GPUs may hold different numbers of experts: shorter ones get empty slots.
        allow_missing
            As for `Placement`.

        Examples
        --------
        >>> Placement.from_mask([[True, True, False], [False, False, True]]).slots.tolist()
        [[0, 1], [2, -1]]
        """
        mask = as_array(holds, "holds", InvalidPlacementError)
        if mask.dtype != np.bool_ or mask.ndim not in (2, 3):
            raise InvalidPlacementError(
                f"holds must be bool [layers, gpus, experts] or [gpus, experts], "
                f"not {mask.dtype} of shape {mask.shape}"
            )
        per_gpu = int(mask.sum(axis=-1).max(initial=0))
        if per_gpu == 0:
            raise InvalidPlacementError("holds has no true entry: no GPU holds any expert")
        held_first = np.argsort(~mask, axis=-1, kind="stable")[..., :per_gpu]
        held = np.take_along_axis(mask, held_first, axis=-1)
        slots = np.where(held, held_first, EMPTY)
        return cls(slots, mask.shape[-1], allow_missing=allow_missing)

    @property
    def slots(self) -> NDArray[np.int32]:
        """Int32 ``[layers, gpus, slots]`` or ``[gpus, slots]``, read-only; -1 where empty."""
        return self._slots if self._layered else self._slots[0]

    @property
    def layered(self) -> bool:
        """Whether tokens and answers have a layer axis."""
        return self._layered

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of one batch's tokens: (layers, experts); (experts,) without a layer axis."""
        layers = (self.num_layers,) if self._layered else ()
        return (*layers, self._num_experts)

    @property
    def num_layers(self) -> int:
        """Layers; 1 without a layer axis."""
        return int(self._slots.shape[0])

    @property
    def num_gpus(self) -> int:
        """GPUs, dead ones included."""
        return int(self._slots.shape[1])

    @property
    def slots_per_gpu(self) -> int:
        """Slots of each GPU, empty ones included."""
        return int(self._slots.shape[2])

    @property
    def num_experts(self) -> int:
        """Logical experts per layer."""
        return self._num_experts

    @cached_property
    def core(self) -> _core.Placement:
        """The placement as the compiled routers read it; made when it is first asked for."""
        return _core.Placement(self._slots, self._num_experts)

    @cached_property
    def expert_of(self) -> NDArray[np.int32]:
        """Int32 ``[layers, P]``: the physical-to-logical map, -1 where empty."""
        return self._slots.reshape(self.num_layers, -1)

    @property
    def copies(self) -> NDArray[np.int64]:
        """Int64 ``[layers, experts]``: slots that hold each expert."""
        return self._copies

    @cached_property
    def candidates(self) -> NDArray[np.int64]:
        """Int64 ``[layers, experts]``: GPUs that hold each expert."""
        held = self.copies.copy()
        for layer, _, expert in self.duplicates():
            held[layer, expert] -= 1
        return _frozen(held)

    @cached_property
    def replica_index(self) -> NDArray[np.int64]:
        """Int64 ``[layers, P]``: which of its expert's replicas a slot is, by physical id."""
        ids = self.expert_of.astype(np.int16)  # which numpy sorts by radix
        order = np.argsort(ids, axis=1, kind="stable")
        by_expert = np.take_along_axis(self.expert_of, order, axis=1)
        place = np.arange(by_expert.shape[1])
        first = np.zeros(by_expert.shape, dtype=np.int64)  # where the run of an expert begins
        first[:, 1:] = np.where(by_expert[:, 1:] != by_expert[:, :-1], place[1:], 0)
        index = np.empty(by_expert.shape, dtype=np.int64)
        np.put_along_axis(index, order, place - np.maximum.accumulate(first, axis=1), axis=1)
        return _frozen(index)

    @cached_property
    def logical_to_physical(self) -> NDArray[np.int32]:
        """Int32 ``[layers, experts, most copies]``: each expert's physical ids, then -1."""
        most = max(1, int(self.copies.max()))
        table = np.full((self.num_layers, self._num_experts, most), EMPTY, dtype=np.int32)
        layer, slot = np.nonzero(self.expert_of != EMPTY)
        table[layer, self.expert_of[layer, slot], self.replica_index[layer, slot]] = slot
        return _frozen(table)

    def replicas(self, expert: int, layer: int = 0) -> NDArray[np.int32]:
        """Return the physical ids of an expert's replicas, ascending.

        Raises
        ------
        IndexError
            No such expert or layer.
        """
        if not (0 <= expert < self._num_experts and 0 <= layer < self.num_layers):
            raise IndexError(
                f"no expert {expert} in layer {layer}: there are {self._num_experts} experts and "
                f"{self.num_layers} layers"
            )
        return self.logical_to_physical[layer, expert, : self.copies[layer, expert]]

    def redundant(self) -> NDArray[np.int64]:
        """Return int64 ``[layers]``: filled slots beyond one per expert present."""
        return np.asarray((self.copies - (self.copies > 0)).sum(axis=-1))

    def duplicates(self) -> Iterator[tuple[int, int, int]]:
        """Yield (layer, GPU, expert) for every second slot of an expert on one GPU."""
        ordered = np.sort(self._slots, axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != EMPTY)
        for layer, gpu, slot in np.argwhere(twice):
            yield int(layer), int(gpu), int(ordered[layer, gpu, slot + 1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return (
            self._num_experts == other._num_experts
            and self.slots.shape == other.slots.shape
            and bool(np.array_equal(self._slots, other._slots))
        )

    __hash__ = None  # type: ignore[assignment]  # compares by value, like the arrays it holds

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.slots, self._num_experts, self._allow_missing)

    def __repr__(self) -> str:
        return (
            f"Placement(layers={self.num_layers}, gpus={self.num_gpus}, "
            f"slots_per_gpu={self.slots_per_gpu}, experts={self.num_experts})"
        )


def slots_for(num_slots: int, num_gpus: int) -> int:
    """Return the slots per GPU when `num_slots` spread evenly.

    Raises
    ------
    InvalidPlacementError
        If they do not divide; the message names the nearest counts that do.
    """
    if operator.index(num_gpus) < 1:
        raise InvalidPlacementError(f"num_gpus must be at least 1, not {num_gpus}")
    if num_slots % num_gpus:
        below = num_slots // num_gpus * num_gpus
        nearest = " or ".join(str(n) for n in (below, below + num_gpus) if n)
        raise InvalidPlacementError(
            f"{num_slots} slots do not divide over {num_gpus} GPUs; {nearest} would"
        )
    return num_slots // num_gpus


def require_slots(num_experts: int, num_slots: int) -> None:
    """Raise `InfeasibleError` if experts outnumber slots."""
    if num_slots < num_experts:
        raise InfeasibleError(
            f"{num_experts} experts need {num_experts} slots and there are {num_slots}: "
            f"{num_experts - num_slots} missing"
        )


def _rebuild(slots: NDArray[np.int32], num_experts: int, allow_missing: bool) -> Placement:
    return Placement(slots, num_experts, allow_missing=allow_missing)


def _frozen(array: _Array) -> _Array:
    array.flags.writeable = False
    return array


def _integers(values: ArrayLike, name: str) -> NDArray[np.integer[Any]]:
    array = as_array(values, name, InvalidPlacementError)
    if array.size == 0:
        raise InvalidPlacementError(f"{name} is empty, of shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise InvalidPlacementError(f"{name} must be integers, not {array.dtype}")
    return array


def _check_slots(array: NDArray[np.integer[Any]], num_experts: int) -> None:
    """Check a [layers, gpus, slots] array of expert ids."""
    _, gpus, _ = array.shape
    if gpus > _core.MAX_GPUS:
        raise InvalidPlacementError(f"{gpus} GPUs; at most {_core.MAX_GPUS} are supported")
    if not 1 <= num_experts <= _core.MAX_EXPERTS:
        raise InvalidPlacementError(
            f"{num_experts} experts per layer; 1 to {_core.MAX_EXPERTS} are supported"
        )
    if array.min() < EMPTY or array.max() >= num_experts:
        wrong = (array < EMPTY) | (array >= num_experts)
        layer, gpu, slot = (int(i) for i in np.argwhere(wrong)[0])
        raise InvalidPlacementError(
            f"layer {layer}, GPU {gpu}, slot {slot}: expert {array[layer, gpu, slot]} is out of "
            f"range; ids are 0 to {num_experts - 1}, or -1 for an empty slot"
        )


def _missing(copies: NDArray[np.int64]) -> str:
    """Say which experts of the first layer that lacks some have no replica."""
    layer, expert = np.argwhere(copies == 0)[0]
    more = np.count_nonzero(copies[layer] == 0) - 1
    return (
        f"layer {layer}: expert {expert} has no replica"
        + (f" (nor have {more} more)" if more else "")
        + "; pass allow_missing=True if that is meant"
    )
