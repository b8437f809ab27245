"""`trtllm`: the placement of TensorRT-LLM's load balancer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from eplb_opt import _core
from eplb_opt.placers.base import Placed, PlacementProblem, PlacerTraits


@dataclass(frozen=True, slots=True)
class TrtLlm:
    """TensorRT-LLM's: copies to the largest load per copy, then the heaviest to the lightest GPU.

    The rule is DeepSeek's global one with ties of its own: copies to the higher id, replicas by the
    lower (``moeLoadBalancer.cpp`` of github.com/NVIDIA/TensorRT-LLM). Nothing keeps two copies of
    an expert off one GPU.

    Notes
    -----
    O((experts + slots) log (experts + slots)) per layer, in the compiled core.

    Examples
    --------
    >>> from eplb_opt.placing import solve_placement
    >>> plan = solve_placement([1, 4, 2, 1], num_gpus=2, slots_per_gpu=4, method="trtllm")
    >>> plan.placement.copies.tolist(), float(plan.makespan)
    ([[1, 4, 2, 1]], 4.0)
    """

    traits: ClassVar[PlacerTraits] = PlacerTraits(
        "TensorRT-LLM: as deepseek's global form, with other ties"
    )

    def place(self, problem: PlacementProblem) -> Placed:
        """Place the experts of all layers."""
        slots = problem.new_slots()
        _core.place_trtllm(problem.load, slots)
        return Placed(slots)
