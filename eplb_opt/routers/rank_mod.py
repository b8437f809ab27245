"""`rank-mod`: one fixed replica per source GPU, its number modulo the copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import Solve, Traits
from eplb_opt.routers.dispatch import send_by_source


@dataclass(frozen=True, slots=True)
class RankMod:
    """vLLM-Ascend's dispatch: source GPU g sends an expert's tokens to replica g mod copies."""

    traits: ClassVar[Traits] = Traits(
        "replica = source GPU mod copies (vLLM-Ascend)", needs=("source_tokens",)
    )

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        gpu = np.arange(placement.num_gpus)[None, :, None]
        copies = np.maximum(placement.copies, 1)[:, None, :]
        layer = np.arange(placement.num_layers)[:, None, None]
        expert = np.arange(placement.num_experts)
        chosen = placement.logical_to_physical[layer, expert, gpu % copies]
        return send_by_source(placement, chosen, "rank-mod")
