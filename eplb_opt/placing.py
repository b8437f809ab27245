"""Which experts get copies and where they live: the answer, and the front door to every placer."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt import _core
from eplb_opt.arrays import as_array
from eplb_opt.errors import InvalidPlacementError, InvalidTokensError
from eplb_opt.placement import Placement, require_slots
from eplb_opt.placers import PlacementMethod, resolve_placer
from eplb_opt.status import Status

__all__ = ["PlacementPlan", "as_load", "solve_placement"]

MAX_SLOTS = 2**31 - 1

_ROUNDING = _core.MAX_EXPERTS * 2.0**-52  # between sums of a layer's loads in different orders


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

    Examples
    --------
    Layer 1 is balanced, layer 0 cannot be; in either, a GPU has two copies of one expert:

    >>> plan = solve_placement([[90, 10, 10, 10], [6, 3, 2, 1]], num_gpus=2, slots_per_gpu=3)
    >>> plan.makespan.tolist(), plan.bound.tolist(), plan.status.tolist(), plan.duplicates
    ([70.0, 6.0], [60.0, 6.0], [1, 2], 2)
    """

    placement: Placement
    makespan: NDArray[np.float64]
    bound: NDArray[np.float64]

    @property
    def balance(self) -> NDArray[np.float64]:
        """Float64, as `makespan`: mean GPU load over the largest; 1 for a layer without load."""
        loaded = self.makespan > 0
        return np.asarray(np.where(loaded, self.bound / np.where(loaded, self.makespan, 1), 1.0))

    @property
    def status(self) -> NDArray[np.int8]:
        """Int8, as `makespan`: `Status.OPTIMAL` where makespan meets bound, to rounding."""
        met = self.makespan <= self.bound * (1 + _ROUNDING)
        return np.asarray(np.where(met, Status.OPTIMAL, Status.FEASIBLE), dtype=np.int8)

    @property
    def duplicates(self) -> int:
        """Slots, over all layers, whose expert has an earlier slot on the same GPU."""
        return sum(1 for _ in self.placement.duplicates())


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
        of its load; finite, not negative. A layer without any load is spread evenly. At most 4,096
        experts.
    num_gpus, slots_per_gpu
        The slots to fill; at most 1,024 GPUs.
    method
        A name from `eplb_opt.placement_methods`, or an instance.

    Returns
    -------
    PlacementPlan
        The placement, with makespan, bound, balance and status per layer. Without a layer axis in
        the load, there is none in the placement either.

    Raises
    ------
    InvalidTokensError
        A load of the wrong shape or type, or one that is NaN, infinite or negative, naming layer
        and expert; or a layer whose loads have no finite sum.
    InfeasibleError
        More experts than slots; the message says how many are missing.
    InvalidPlacementError
        More GPUs, experts or slots than are supported.
    ValueError
        No GPUs, no slots, or an unknown method.
    TypeError
        Numbers of GPUs or slots that are not integers.

    Notes
    -----
    The method's time (see its class), and O(slots) per layer to measure the answer.

    Examples
    --------
    >>> plan = solve_placement([90, 10, 10, 10], num_gpus=2, slots_per_gpu=3)
    >>> plan.placement.copies.tolist(), float(plan.makespan)
    ([[3, 1, 1, 1]], 70.0)
    """
    given = as_load(load)
    layers = given if given.ndim == 2 else given[None]
    gpus, per_gpu = _at_least_1(num_gpus, "num_gpus"), _at_least_1(slots_per_gpu, "slots_per_gpu")
    experts = layers.shape[1]
    if gpus > _core.MAX_GPUS or experts > _core.MAX_EXPERTS:
        raise InvalidPlacementError(
            f"{experts} experts per layer on {gpus} GPUs; at most {_core.MAX_EXPERTS} experts and "
            f"{_core.MAX_GPUS} GPUs are supported"
        )
    if gpus * per_gpu > MAX_SLOTS:
        raise InvalidPlacementError(
            f"{gpus} x {per_gpu} slots; physical ids are int32, {MAX_SLOTS} at most"
        )
    require_slots(experts, gpus * per_gpu)
    slots = resolve_placer(method).place(layers, gpus, per_gpu)
    placement = Placement(slots if given.ndim == 2 else slots[0], num_experts=experts)
    makespan = _equal_split(placement, layers).max(axis=-1)
    bound = np.minimum(layers.sum(axis=-1) / gpus, makespan)  # they may differ by rounding
    if given.ndim == 1:
        makespan, bound = makespan[0], bound[0]
    return PlacementPlan(placement, np.asarray(makespan), np.asarray(bound))


def as_load(load: ArrayLike) -> NDArray[np.float64]:
    """Return a load as contiguous float64 ``[layers, experts]`` or ``[experts]``, checked.

    Raises
    ------
    InvalidTokensError
        Wrong shape or type, an entry that is NaN, infinite or negative, or a layer whose sum is
        beyond the range of float64.

    Examples
    --------
    >>> as_load([3, 0, 1])
    array([3., 0., 1.])
    """
    array = as_array(load, "load", InvalidTokensError)
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
    checked = np.ascontiguousarray(array, dtype=np.float64)
    with np.errstate(over="ignore"):
        overflows = np.flatnonzero(np.isinf(checked.sum(axis=-1)))
    if overflows.size:
        place = f" of layer {overflows[0]}" if array.ndim == 2 else ""
        raise InvalidTokensError(f"the loads{place} have no finite sum; scale them down")
    return checked


def _at_least_1(count: int, name: str) -> int:
    try:
        given = operator.index(count)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {count!r}") from None
    if given < 1:
        raise ValueError(f"{name} must be at least 1, not {given}")
    return given


def _equal_split(placement: Placement, load: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return float64 [layers, gpus]: the GPUs' load when copies share an expert's load equally."""
    layer = np.arange(placement.num_layers)[:, None]
    expert = np.maximum(placement.expert_of, 0)
    share = load[layer, expert] / np.maximum(placement.copies[layer, expert], 1)
    share = np.where(placement.expert_of >= 0, share, 0.0)
    return np.asarray(share.reshape(placement.num_layers, placement.num_gpus, -1).sum(axis=-1))
