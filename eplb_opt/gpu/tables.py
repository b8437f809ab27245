"""A placement as the kernels read it: one row of int32 per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_opt.errors import InvalidPlacementError
from eplb_opt.objective import Objective
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.routers import Matching, Metro, RoutingMethod, resolve_method

__all__ = ["MAX_EXPERTS", "MAX_GPUS", "MAX_SLOTS_PER_GPU", "Shape", "make_tables", "read_tables"]

MAX_GPUS = 1024
MAX_EXPERTS = 2048
MAX_SLOTS_PER_GPU = 2**16 - 1

_PLACE_BITS = 16
_LANES = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """What a placement's tables and its kernels' arguments depend on.

    Raises
    ------
    InvalidPlacementError
        More GPUs, experts or slots of a GPU than the kernels have room for.
    """

    layers: int
    gpus: int
    slots_per_gpu: int
    experts: int

    def __post_init__(self) -> None:
        for value, most, what in (
            (self.gpus, MAX_GPUS, "GPUs"),
            (self.experts, MAX_EXPERTS, "experts per layer"),
            (self.slots_per_gpu, MAX_SLOTS_PER_GPU, "slots per GPU"),
        ):
            if not 1 <= value <= most:
                raise InvalidPlacementError(
                    f"{value} {what}; the CUDA kernels support 1 to {most}: route on the CPU"
                )

    @classmethod
    def of(cls, placement: Placement) -> Shape:
        """Return the shape of a placement."""
        return cls(
            placement.num_layers, placement.num_gpus, placement.slots_per_gpu, placement.num_experts
        )

    @property
    def words(self) -> int:
        """Words of a set of GPUs."""
        return -(-self.gpus // _LANES)

    @property
    def slots(self) -> int:
        """Slots of a layer."""
        return self.gpus * self.slots_per_gpu

    @property
    def row(self) -> int:
        """Int32 words of a layer's row, a multiple of 16 bytes."""
        return -(-(4 * self.experts + self.words + 1 + self.slots) // 4) * 4


def make_tables(placement: Placement, method: str | RoutingMethod = "optimal") -> NDArray[np.int32]:
    """Prepare a placement for the kernels of a routing method.

    Parameters
    ----------
    placement
        Up to 1,024 GPUs, 2,048 experts and 65,535 slots of a GPU.
    method
        ``"optimal"``, or ``"metro"`` with its options.

    Returns
    -------
    NDArray[np.int32]
        ``[layers, Shape.of(placement).row]``: per expert, in the order in which the method routes
        them, its id, how many GPUs hold it, and its first candidates; the GPUs that hold any
        expert; how many experts have no choice; and the candidates of experts with three or more
        (``solvers/cuda/problem.cuh`` has the layout).

    Raises
    ------
    InvalidPlacementError
        A placement above the limits.
    ValueError
        A method that has no kernel.

    Notes
    -----
    O(slots log slots) per layer.

    Examples
    --------
    >>> placement = Placement([[0, 1], [0, 2]])
    >>> make_tables(placement).shape
    (1, 20)
    """
    shape = Shape.of(placement)
    layers, experts, layer = shape.layers, shape.experts, np.arange(shape.layers)[:, None]
    ids = np.where(_is_candidate(placement.expert_of, shape), placement.expert_of, experts)
    order = np.argsort(ids, axis=1, kind="stable")
    words = (order // shape.slots_per_gpu << _PLACE_BITS) | order % shape.slots_per_gpu
    bins = np.bincount((ids + layer * (experts + 1)).ravel(), minlength=layers * (experts + 1))
    count = bins.reshape(layers, experts + 1)[:, :experts]
    first = np.cumsum(count, axis=1) - count
    low = np.where(count > 0, words[layer, np.minimum(first, shape.slots - 1)], -1)
    second = words[layer, np.minimum(first + 1, shape.slots - 1)]
    by_expert = np.stack(
        [
            np.broadcast_to(np.arange(experts), low.shape),
            count,
            low,
            np.where(count == 2, second, first),
        ],
        axis=-1,
    )
    filled = np.zeros((layers, shape.words * _LANES), np.bool_)
    filled[:, : shape.gpus] = (placement.expert_of != EMPTY).reshape(layers, shape.gpus, -1).any(-1)
    tables = np.zeros((layers, shape.row), np.int32)
    end = 4 * experts
    tables[:, :end] = by_expert[layer, _sequence(placement, method, count)].reshape(layers, -1)
    packed = np.packbits(filled, axis=1, bitorder="little").view("<u4")
    tables[:, end : end + shape.words] = packed.astype(np.uint32).view(np.int32)
    tables[:, end + shape.words] = (count <= 1).sum(axis=1)
    tables[:, end + shape.words + 1 :][:, : shape.slots] = words
    return tables


def read_tables(tables: NDArray[np.int32], shape: Shape) -> tuple[Placement, NDArray[np.int32]]:
    """Read back what `make_tables` wrote, all but second copies on a GPU.

    Returns
    -------
    placement
        With layers; each expert in its lowest slot on every GPU that holds it.
    order
        Int32 ``[layers, experts]``: the order in which experts are routed.
    """
    layers, experts = shape.layers, shape.experts
    entries = tables[:, : 4 * experts].reshape(layers, experts, 4)
    lists = tables[:, 4 * experts + shape.words + 1 :][:, : shape.slots]
    # By id; the candidates are then one expert's after the other's.
    by_id = np.empty_like(entries)
    by_id[np.arange(layers)[:, None], entries[..., 0]] = entries
    slots = np.full((layers, shape.slots), EMPTY, np.int32)
    for layer in range(layers):
        owner = np.repeat(np.arange(experts), by_id[layer, :, 1])
        words = lists[layer, : owner.size]
        at = (words >> _PLACE_BITS) * shape.slots_per_gpu + (words & MAX_SLOTS_PER_GPU)
        slots[layer, at] = owner
    grid = slots.reshape(layers, shape.gpus, shape.slots_per_gpu)
    order = np.ascontiguousarray(entries[..., 0])
    return Placement(grid, experts, allow_missing=True), order


def kernel_method(method: str | RoutingMethod) -> Metro | Matching:
    """Return the method that a kernel solves as the CPU does, to the bit.

    Raises
    ------
    ValueError
        A method without a kernel.
    """
    resolved = resolve_method(method, Objective.of("activations"))
    if isinstance(resolved, Metro) or resolved == Matching():
        return resolved
    raise ValueError(f"{method!r} has no CUDA kernel; those that have: 'optimal', 'metro'")


def _sequence(
    placement: Placement, method: str | RoutingMethod, count: NDArray[Any]
) -> NDArray[Any]:
    """Return int [layers, experts]: the order in which a method routes experts."""
    resolved = kernel_method(method)
    if isinstance(resolved, Matching):
        return np.argsort(count, axis=1, kind="stable")
    order = resolved.orders(placement)
    return np.broadcast_to(np.arange(count.shape[1]), count.shape) if order is None else order


def _is_candidate(expert_of: NDArray[np.int32], shape: Shape) -> NDArray[np.bool_]:
    """Say which slots a router may choose: of an expert's slots on one GPU the lowest."""
    rows = expert_of.reshape(-1, shape.slots_per_gpu)
    order = np.argsort(rows, axis=1, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=1)
    first = np.ones_like(ordered, np.bool_)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first &= ordered != EMPTY
    lowest = np.empty_like(first)
    np.put_along_axis(lowest, order, first, axis=1)
    return lowest.reshape(expert_of.shape)
