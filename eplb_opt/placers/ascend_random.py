"""`ascend-random`: vLLM-Ascend's policy 0, which swaps two slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from eplb_opt.errors import InvalidPlacementError
from eplb_opt.placers.base import Placed, PlacementProblem, PlacerTraits

_SWAPPED = (1, 3)


@dataclass(frozen=True, slots=True)
class AscendRandom:
    """vLLM-Ascend's "random" policy: the last slots of GPUs 1 and 3 change places, in every layer.

    Neither random nor aware of the load (``policy_random.py`` of github.com/vllm-project/
    vllm-ascend); for testing what moves weights. Starts from the old placement, or from
    `eplb_opt.placers.first_placement`.

    Raises
    ------
    InvalidPlacementError
        When it places, with fewer than 4 GPUs, or on an old placement that lacks an expert.

    Examples
    --------
    >>> from eplb_opt.placing import solve_placement
    >>> plan = solve_placement([1] * 8, num_gpus=4, slots_per_gpu=2, method="ascend-random")
    >>> plan.placement.slots.tolist()
    [[0, 1], [2, 7], [4, 5], [6, 3]]
    """

    traits: ClassVar[PlacerTraits] = PlacerTraits(
        "vLLM-Ascend policy 0: swap the last slots of GPUs 1 and 3"
    )

    def place(self, problem: PlacementProblem) -> Placed:
        """Place the experts of all layers."""
        if problem.num_gpus <= max(_SWAPPED):
            raise InvalidPlacementError(
                f"ascend-random swaps slots of GPUs 1 and 3; there are {problem.num_gpus} GPUs"
            )
        slots = problem.require_all_held("ascend-random").copy()
        slots[:, _SWAPPED, -1] = slots[:, _SWAPPED[::-1], -1]
        return Placed(slots)
