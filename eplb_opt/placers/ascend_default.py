"""`ascend-default`: vLLM-Ascend's policy 1, its default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.placers.base import Placed, PlacementProblem, PlacerTraits


@dataclass(frozen=True, slots=True)
class AscendDefault:
    """vLLM-Ascend's default: extra copies one to a GPU in turn, first copies to the lightest GPU.

    Copies go to the largest load per copy, at most one per GPU; first copies by falling load to the
    lightest GPU with room that does not hold the expert. An expert that is left twice on a GPU
    gives one place to the expert whose load per copy comes nearest (``policy_default_eplb.py`` of
    github.com/vllm-project/vllm-ascend). Given an old placement, an expert that stays on its GPU
    keeps its slot, and empty slots stay empty.

    Notes
    -----
    O(redundant x experts x log experts + experts x slots) per layer, in the compiled core.

    Examples
    --------
    >>> from eplb_opt.placing import solve_placement
    >>> load = [600, 560, 120, 120, 20, 10, 10, 10]
    >>> plan = solve_placement(load, num_gpus=8, slots_per_gpu=2, method="ascend-default")
    >>> float(plan.makespan)
    232.0
    """

    traits: ClassVar[PlacerTraits] = PlacerTraits(
        "vLLM-Ascend policy 1: extra copies in turn, first copies by load"
    )

    def place(self, problem: PlacementProblem) -> Placed:
        """Place the experts of all layers."""
        return Placed(place_with_peaks(problem)[0])


def place_with_peaks(problem: PlacementProblem) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return the slots, and float64 ``[layers]``: the peak that the policy believes in.

    It is the real one but where it replaced experts: their other replicas keep the old share.
    """
    slots = problem.new_slots()
    peaks = np.empty(len(slots))
    _core.place_ascend_default(problem.load, problem.room(), slots, peaks)
    previous = problem.old_slots()
    if previous is not None:
        _core.keep_slots(previous, slots)
    return slots, peaks
