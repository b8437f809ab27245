"""`flashlb`: vLLM-Ascend's policy 3, which places for mean and variance of recorded loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.placers.base import Placed, PlacementProblem, PlacerTraits


@dataclass(frozen=True, slots=True)
class FlashLb:
    """vLLM-Ascend's FlashLB: a search over numbers of copies, placed by mean plus z deviations.

    Takes windows of loads, ``[windows, layers, experts]``, as samples; their mean, variance and
    covariance price a GPU's load. Experts, by risk, are cut into groups, and for each group the
    numbers of extra copies around the greedy one are tried, placed and scored by the mean over
    samples of peak over mean load (``policy_flashlb.py`` of github.com/vllm-project/vllm-ascend).
    A load of 0 counts as 1. Given an old placement, a layer whose score does not fall stays as it
    is, the new GPUs stand for the old ones that resemble them most, and empty slots stay empty.

    Parameters
    ----------
    z
        Deviations above the mean; by default the upper quartile of a normal distribution.
    depth
        Groups of experts.
    width
        How far from the greedy number of extra copies to look.

    Raises
    ------
    ValueError
        Numbers below 0, or no group.

    Notes
    -----
    O(depth x width x slots x (GPUs + experts)) per layer, and O(windows x experts²) for the
    covariances, in the compiled core.

    Examples
    --------
    >>> from eplb_opt.placing import solve_placement
    >>> load = [600, 560, 120, 120, 20, 10, 10, 10]
    >>> plan = solve_placement(load, num_gpus=8, slots_per_gpu=2, method="flashlb")
    >>> float(plan.makespan)
    200.0
    """

    traits: ClassVar[PlacerTraits] = PlacerTraits(
        "vLLM-Ascend policy 3: search over copies, by mean and variance"
    )

    z: float = 0.6744897501960817
    depth: int = 4
    width: int = 8

    def __post_init__(self) -> None:
        if not (self.z >= 0 and self.depth >= 1 and self.width >= 0):
            raise ValueError(
                "flashlb: z and width are at least 0 and depth at least 1, not "
                f"z={self.z}, width={self.width}, depth={self.depth}"
            )

    def place(self, problem: PlacementProblem) -> Placed:
        """Place the experts of all layers."""
        slots, scores = self.place_with_scores(problem)
        previous = problem.old_slots()
        if problem.previous is not None and previous is not None:
            serves_all = (problem.previous.copies > 0).all(axis=-1)
            stays = serves_all & (score(problem.windows, previous) <= scores)
            slots[stays] = previous[stays]
        return Placed(slots)

    def place_with_scores(
        self, problem: PlacementProblem
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Return new slots for every layer, better or not, and their float64 scores."""
        slots = problem.new_slots()
        scores = np.empty(len(slots))
        samples, room = _samples(problem.windows), problem.room()
        _core.place_flashlb(samples, room, slots, self.z, self.depth, self.width, scores)
        previous = problem.old_slots()
        if previous is not None:
            _core.reslot(previous, problem.load.shape[1], 1, slots)
        return slots, scores


def score(windows: NDArray[np.float64], slots: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return float64 ``[layers]``: the mean over windows of peak over mean load; 1 is balance.

    Parameters
    ----------
    windows
        Float64 ``[windows, layers, experts]``.
    slots
        Int32 ``[layers, gpus, slots]``.
    """
    scores = np.empty(len(slots))
    _core.score_flashlb(_samples(windows), np.ascontiguousarray(slots), scores)
    return scores


def _samples(windows: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.ascontiguousarray(np.where(windows == 0, 1.0, windows))
