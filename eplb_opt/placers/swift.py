"""`swift`: vLLM-Ascend's policy 2, which changes an old placement a little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.placers.base import Placed, PlacementProblem, PlacerTraits


@dataclass(frozen=True, slots=True)
class Swift:
    """vLLM-Ascend's swift balancer: one slot of each expert stays, the others are given anew.

    Freed slots go to the largest loads per copy, heaviest first, to the lightest GPU; then the
    fullest GPU swaps experts with others while the larger load of the two falls, at most one
    exchange per pair of GPUs and 100 in all. A layer less than 1 % above its mean stays as it is,
    and so does one whose peak would not fall
    (``policy_swift_balancer.py`` of github.com/vllm-project/vllm-ascend). Starts from the old
    placement, or from `eplb_opt.placers.first_placement`. Empty slots stay empty.

    Two weaknesses of the original are kept. It takes the mean of layer 0 for that of every layer,
    so that loads of different size per layer keep it from changing a layer, or make it accept a
    worse one. And loads per copy shrink too little as copies are granted, by 2/3 for the second.

    Raises
    ------
    InvalidPlacementError
        When it places, on an old placement that lacks an expert.

    Notes
    -----
    O(experts x redundant + 100 GPUs x slots per GPU²) per layer, in the compiled core.

    Examples
    --------
    >>> from eplb_opt.placing import solve_placement
    >>> load = [600, 560, 120, 120, 20, 10, 10, 10]
    >>> plan = solve_placement(load, num_gpus=8, slots_per_gpu=2, method="swift")
    >>> float(plan.makespan)
    232.0
    """

    traits: ClassVar[PlacerTraits] = PlacerTraits(
        "vLLM-Ascend policy 2: regrant copies, then a few swaps"
    )

    def place(self, problem: PlacementProblem) -> Placed:
        """Place the experts of all layers."""
        return Placed(place_with_peaks(problem)[0])


def place_with_peaks(problem: PlacementProblem) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return the slots, and float64 ``[layers]``: the peak that the policy found for each layer.

    NaN where it left the layer alone. It is the peak of what it found also where it then kept the
    old placement.
    """
    previous = problem.require_all_held("swift")
    slots = problem.new_slots()
    peaks = np.empty(len(slots))
    _core.place_swift(problem.load, previous, slots, peaks)
    _core.keep_slots(previous, slots)
    return slots, peaks
