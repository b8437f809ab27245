"""How good a placement is for a load, by the measures that engines print."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.errors import InvalidTokensError
from eplb_opt.placement import EMPTY, Placement

__all__ = ["PlacementMetrics", "count_moves"]

_SGLANG_EPSILON = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class PlacementMetrics:
    """A placement measured on a load that is split equally over an expert's copies.

    Attributes
    ----------
    gpu_load
        Float64 ``[layers, gpus]``.
    copies
        Int64 ``[layers, experts]``: slots that hold each expert.
    duplicates
        Int64 ``[layers]``: slots whose expert has an earlier slot on the same GPU.

    Examples
    --------
    >>> metrics = PlacementMetrics.of(Placement([[[0], [1]]] * 2), np.array([[100.0, 200.0]] * 2))
    >>> metrics.par.round(3).tolist(), metrics.balancedness_vllm
    ([1.333, 1.333], 0.75)
    >>> round(metrics.balancedness_sglang, 6)
    0.75
    """

    gpu_load: NDArray[np.float64]
    copies: NDArray[np.int64]
    duplicates: NDArray[np.int64]

    @classmethod
    def of(cls, placement: Placement, load: NDArray[np.float64]) -> PlacementMetrics:
        """Measure a placement on a load, ``[layers, experts]``, or as `Placement.batch_shape`.

        An expert without a replica adds its load to no GPU. O(slots) per layer.

        Raises
        ------
        InvalidTokensError
            A load of another shape.
        """
        if np.shape(load) not in (placement.copies.shape, placement.batch_shape):
            raise InvalidTokensError(
                f"load must be {list(placement.copies.shape)} (layers, experts) for {placement}, "
                f"not of shape {np.shape(load)}"
            )
        load = np.ascontiguousarray(load, np.float64).reshape(placement.copies.shape)
        layers = placement.num_layers
        gpu_load = np.empty((layers, placement.num_gpus))
        duplicates = np.empty(layers, np.int64)
        slots = placement.expert_of.reshape(layers, placement.num_gpus, -1)
        _core.measure_placement(slots, placement.copies, load, gpu_load, duplicates)
        return cls(gpu_load, placement.copies, duplicates)

    @property
    def peak(self) -> NDArray[np.float64]:
        """Float64 ``[layers]``: the largest GPU load."""
        return np.asarray(self.gpu_load.max(axis=-1))

    @property
    def mean(self) -> NDArray[np.float64]:
        """Float64 ``[layers]``: the mean GPU load."""
        return np.asarray(self.gpu_load.mean(axis=-1))

    @property
    def par(self) -> NDArray[np.float64]:
        """Float64 ``[layers]``: peak over average, largest GPU load over mean; 1 without load."""
        loaded = self.peak > 0
        return np.asarray(np.where(loaded, self.peak / np.where(loaded, self.mean, 1.0), 1.0))

    @property
    def par_mean(self) -> float:
        """The mean of `par` over layers."""
        return float(self.par.mean())

    @property
    def par_max(self) -> float:
        """The largest `par` of all layers."""
        return float(self.par.max())

    @property
    def balancedness_sglang(self) -> float:
        """Balancedness as SGLang has it: mean over largest GPU load, the mean of it over layers.

        Both with 1e-5 added, so that a layer without load counts as balanced.
        """
        per_layer = (self.mean + _SGLANG_EPSILON) / (self.peak + _SGLANG_EPSILON)
        return float(per_layer.mean())

    @property
    def balancedness_vllm(self) -> float:
        """Balancedness as vLLM has it: mean GPU loads, summed over layers, over summed peaks.

        As its documentation has it, by layer; some versions take mean and maximum over the wrong
        axis. 1 without any load.
        """
        peak = float(self.peak.sum())
        return float(self.mean.sum()) / peak if peak > 0 else 1.0


def count_moves(previous: Placement, placement: Placement) -> NDArray[np.int64]:
    """Return int64 ``[layers]``: weights that GPUs must receive to get from one to the other.

    An expert counts once on each GPU that holds it now and did not before; what changes slots
    within a GPU does not. Both placements have the same layers, GPUs and experts.
    O(slots log slots).

    Examples
    --------
    >>> old, new = Placement([[0, 1], [2, 0]]), Placement([[1, 0], [2, 1]])
    >>> count_moves(old, new).tolist()
    [1]
    """
    arrived = np.setdiff1d(_held(placement), _held(previous))
    per_layer = placement.num_gpus * placement.num_experts
    moves = np.bincount(arrived // per_layer, minlength=placement.num_layers)
    return np.asarray(moves, dtype=np.int64)


def _held(placement: Placement) -> NDArray[np.int64]:
    """Return one number for every layer, GPU and expert that it holds; layer by layer."""
    gpu = np.arange(placement.num_layers * placement.num_gpus)[:, None]
    slots = placement.slots.reshape(len(gpu), -1)
    return np.asarray((gpu * placement.num_experts + slots)[slots != EMPTY], dtype=np.int64)
