"""`rank-mod`: one fixed replica per source GPU, its number modulo the copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import SPLITTING, Solve, Traits, allows_split
from eplb_opt.routers.dispatch import send_by_source


@dataclass(frozen=True, slots=True)
class RankMod:
    """vLLM-Ascend's dispatch: source GPU g sends an expert's tokens to replica g mod copies.

    The rule is `generate_log2phy_map` in ``vllm_ascend/eplb/core/eplb_utils.py``
    (vllm-project/vllm-ascend), its `ep_rank` the source GPU. That map knows one slot of an expert
    on a GPU; here a second one is a replica like any other.

    Notes
    -----
    Needs `source_tokens`, or `topk_ids` by source. O(sources x experts) per problem, vectorised.

    Examples
    --------
    Expert 0 has replicas on GPUs 0 and 1: sources 0 and 2 use the first, source 1 the second.

    >>> from eplb_opt.routing import solve_routing
    >>> placement = Placement([[0, 1], [0, 2], [3, 4]])
    >>> by_source = [[1, 0, 0, 0, 0], [10, 0, 0, 0, 0], [100, 0, 0, 0, 0]]
    >>> tokens = np.sum(by_source, axis=0)
    >>> solve_routing(placement, tokens, method=RankMod(), source_tokens=by_source).gpu_tokens()
    array([101,  10,   0])
    """

    traits: ClassVar[Traits] = Traits(
        "replica = source GPU mod copies (vLLM-Ascend)",
        objectives=SPLITTING,
        solves=allows_split,
        needs=("source_tokens",),
    )

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        gpu = np.arange(placement.num_gpus)[None, :, None]
        copies = np.maximum(placement.copies, 1)[:, None, :]
        layer = np.arange(placement.num_layers)[:, None, None]
        expert = np.arange(placement.num_experts)
        chosen = placement.logical_to_physical[layer, expert, gpu % copies]
        return send_by_source(placement, chosen, "rank-mod")
