"""Which experts get copies and where they live: the answer, and the front door to every placer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt.errors import InvalidTokensError
from eplb_opt.placement import Placement, require_slots
from eplb_opt.placers import PlacementMethod, resolve_placer

__all__ = ["PlacementPlan", "as_load", "solve_placement"]


@dataclass(frozen=True, slots=True, eq=False)
class PlacementPlan:
    """A placement and how well it balances the load that it was made for.

    Attributes
    ----------
    placement
        The placement.
    makespan
        Float64 ``[layers]`` (a scalar array without a layer axis): the largest GPU's load when
        every expert's load is split equally over its copies.
    bound
        Float64, the same shape: the mean load of a GPU, which no placement gets below.
    """

    placement: Placement
    makespan: NDArray[np.float64]
    bound: NDArray[np.float64]

    @property
    def balance(self) -> NDArray[np.float64]:
        """Mean GPU load over the largest, per layer; 1 for a layer without load."""
        loaded = self.makespan > 0
        return np.asarray(np.where(loaded, self.bound / np.where(loaded, self.makespan, 1), 1.0))


def solve_placement(
    load: ArrayLike,
    *,
    num_gpus: int,
    slots_per_gpu: int,
    method: str | PlacementMethod = "deepseek",
) -> PlacementPlan:
    """Decide which experts get copies and where every copy lives.

    Parameters
    ----------
    load
        Int or float ``[layers, experts]`` (or ``[experts]``): tokens of each expert, or any measure
        of its load; finite, not negative. A layer without any load is spread evenly.
    num_gpus, slots_per_gpu
        The slots to fill.
    method
        A name from `eplb_opt.placement_methods`, or an instance.

    Raises
    ------
    InvalidTokensError
        A load that is NaN, infinite or negative, naming layer and expert.
    InfeasibleError
        More experts than slots.

    Examples
    --------
    >>> plan = solve_placement([90, 10, 10, 10], num_gpus=2, slots_per_gpu=3)
    >>> plan.placement.copies.tolist(), float(plan.makespan)
    ([[3, 1, 1, 1]], 70.0)
    """
    given = as_load(load)
    if num_gpus < 1 or slots_per_gpu < 1:
        raise ValueError(
            f"num_gpus and slots_per_gpu must be at least 1, not {num_gpus} and {slots_per_gpu}"
        )
    layers = given if given.ndim == 2 else given[None]
    require_slots(layers.shape[1], num_gpus * slots_per_gpu)
    slots = resolve_placer(method).place(layers, num_gpus, slots_per_gpu)
    placement = Placement(slots if given.ndim == 2 else slots[0], num_experts=layers.shape[1])
    makespan = _equal_split(placement, layers).max(axis=-1)
    bound = layers.sum(axis=-1) / num_gpus
    if given.ndim == 1:
        makespan, bound = makespan[0], bound[0]
    return PlacementPlan(placement, np.asarray(makespan), np.asarray(bound))


def as_load(load: ArrayLike) -> NDArray[np.float64]:
    """Return a load as contiguous float64 ``[layers, experts]`` or ``[experts]``, checked.

    Raises
    ------
    InvalidTokensError
        Wrong shape or type, or an entry that is NaN, infinite or negative.
    """
    array = np.asarray(load)
    if array.dtype.kind not in "iuf" or array.ndim not in (1, 2) or 0 in array.shape:
        raise InvalidTokensError(
            f"load must be numbers [layers, experts] or [experts], "
            f"not {array.dtype} of shape {array.shape}"
        )
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        place = f"layer {at[0]}, expert {at[1]}" if array.ndim == 2 else f"expert {at[0]}"
        raise InvalidTokensError(f"{place} has load {array[at]}; loads are finite and not negative")
    return np.ascontiguousarray(array, dtype=np.float64)


def _equal_split(placement: Placement, load: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return float64 [layers, gpus]: the GPUs' load when copies share an expert's load equally."""
    layer = np.arange(placement.num_layers)[:, None]
    expert = np.maximum(placement.expert_of, 0)
    share = load[layer, expert] / np.maximum(placement.copies[layer, expert], 1)
    share = np.where(placement.expert_of >= 0, share, 0.0)
    return np.asarray(share.reshape(placement.num_layers, placement.num_gpus, -1).sum(axis=-1))
