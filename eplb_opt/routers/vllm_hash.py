"""`vllm-hash`: the replica by a hash of the token's row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import SPLITTING, Solve, Traits, allows_split
from eplb_opt.routers.dispatch import send_by_token

MULTIPLIER = 2654435769  # 2**32 / golden ratio: Knuth's multiplicative hash


@dataclass(frozen=True, slots=True)
class VllmHash:
    """vLLM's dispatch: replica ``(row * 2654435769 mod 2**32) mod copies``.

    The row is the token's in its local batch; all k experts of a token share it. The rule is that
    of `eplb_map_to_physical_and_record` in
    ``vllm/model_executor/layers/fused_moe/router/base_router.py`` (vllm-project/vllm). Earlier
    versions took the place among all rows x k ids, modulo the copies.

    Notes
    -----
    Needs `topk_ids`. O(ids) per problem, vectorised.

    Examples
    --------
    The hash of rows 0, 1, 2 is even, odd, even:

    >>> from eplb_opt.routing import solve_routing
    >>> placement = Placement([[0, 1], [0, 2]])
    >>> ids = [[0, 1], [0, 1], [0, 2]]
    >>> solve_routing(placement, [3, 2, 1], method=VllmHash(), topk_ids=ids).tokens
    array([[2, 2],
           [1, 1]])
    """

    traits: ClassVar[Traits] = Traits(
        "replica = hash of the token's row mod copies (vLLM)",
        objectives=SPLITTING,
        solves=allows_split,
        needs=("topk_ids",),
    )

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        return send_by_token(placement, _pick, "vllm-hash")


def _pick(ids: NDArray[np.int32], copies: NDArray[np.int64]) -> NDArray[np.int64]:
    rows = np.arange(ids.shape[-2], dtype=np.int64)
    hashed = (rows * MULTIPLIER) & 0xFFFFFFFF
    return np.asarray(hashed[:, None] % copies)
