"""`trtllm`: the replicas of an expert in turn, within blocks of the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import SPLITTING, Solve, Traits, allows_split
from eplb_opt.routers.dispatch import send_by_token

BLOCK = 1024


@dataclass(frozen=True, slots=True)
class TrtLlm:
    """TensorRT-LLM's dispatch: replica ``(running index + block) mod copies``.

    The local batch's top-k ids, token after token, are cut into blocks of 1,024; the running index
    counts the same expert's earlier ids in the block. The rule is `moeComputeRouteKernel` in
    ``cpp/tensorrt_llm/kernels/moeLoadBalance/moeLoadBalanceKernels.cu`` (NVIDIA/TensorRT-LLM),
    without the option by which, under attention data parallelism, every rank starts its turns at
    its own number.

    Notes
    -----
    Needs `topk_ids`. O(n log n) per local batch of n ids, vectorised.

    Examples
    --------
    Of three tokens for expert 0, the first and the third go to its first replica:

    >>> from eplb_opt.routing import solve_routing
    >>> placement = Placement([[0, 1], [0, 2]])
    >>> ids = [[1, 0], [0, 1], [2, 0]]
    >>> solve_routing(placement, [3, 2, 1], method=TrtLlm(), topk_ids=ids).tokens
    array([[2, 2],
           [1, 1]])
    """

    traits: ClassVar[Traits] = Traits(
        "replicas in turn within blocks of 1,024 ids (TensorRT-LLM)",
        objectives=SPLITTING,
        solves=allows_split,
        needs=("topk_ids",),
    )

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        return send_by_token(placement, _pick, "trtllm")


def _pick(ids: NDArray[np.int32], copies: NDArray[np.int64]) -> NDArray[np.int64]:
    *batch, rows, k = ids.shape
    flat = ids.reshape(math.prod(batch), rows * k)
    block = np.arange(rows * k) // BLOCK
    # Stable sort by (block, expert): the running index is the distance from the group's first.
    key = block * (int(ids.max(initial=0)) + 2) + flat
    order = np.argsort(key, axis=1, kind="stable")
    by_key = np.take_along_axis(key, order, axis=1)
    starts = np.concatenate(
        [np.ones((flat.shape[0], 1), np.bool_), by_key[:, 1:] != by_key[:, :-1]], axis=1
    )
    place = np.arange(rows * k)
    first = np.maximum.accumulate(np.where(starts, place, 0), axis=1)
    running = np.empty_like(order)
    np.put_along_axis(running, order, place - first, axis=1)
    return np.asarray((running + block).reshape(*batch, rows, k) % copies)
