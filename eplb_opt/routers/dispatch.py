"""How an engine's dispatch rule becomes tokens per slot, by source GPU or by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from eplb_opt.errors import InvalidTokensError
from eplb_opt.placement import Placement
from eplb_opt.routers.base import Context, Solve, finish

if TYPE_CHECKING:
    from eplb_opt.routing import Routing

PickReplica = Callable[[NDArray[np.int32], NDArray[np.int64]], NDArray[np.int64]]
"""From ids ``[batches, layers, sources, rows, k]`` and their experts' copies to replica numbers."""


def send_by_source(placement: Placement, chosen: NDArray[np.int32], name: str) -> Solve:
    """Return a router whose every source GPU sends an expert's tokens to one replica.

    `chosen` is int32 ``[layers, gpus, experts]``: physical ids, -1 for experts without a replica.
    The function raises `InvalidTokensError` if it is given no tokens by source, or not of all GPUs.
    """
    layers, gpus, experts = chosen.shape
    slots = placement.expert_of.shape[1]
    # An expert's only replica has all of its tokens, whoever sends them.
    layer, expert = np.nonzero(placement.copies == 1)
    only = placement.logical_to_physical[layer, expert, 0]
    # For the others: the places (layer, source, expert) in `chosen`, slot by slot, so that the
    # tokens of a slot are the sum of a segment.
    split = np.flatnonzero(np.broadcast_to((placement.copies > 1)[:, None], chosen.shape))
    target = chosen.ravel()[split] + split // (gpus * experts) * slots
    by_slot = np.argsort(target, kind="stable")
    places = split[by_slot]
    used, first = np.unique(target[by_slot], return_index=True)

    def solve(tokens: NDArray[np.int64], out: Routing, context: Context) -> None:
        by_source = context.source_tokens
        if by_source is None:
            raise InvalidTokensError(
                f"{name} sends by source GPU: pass source_tokens=[..., layers, {gpus}, {experts}] "
                f"or topk_ids=[..., layers, {gpus}, rows, k]"
            )
        if by_source.shape[2] != gpus:
            raise InvalidTokensError(
                f"{name} needs the tokens of all {gpus} source GPUs, not of {by_source.shape[2]}"
            )
        batches = by_source.shape[0]
        routed = np.zeros((batches, layers, slots), np.int64)
        routed[:, layer, only] = tokens.reshape(batches, layers, experts)[:, layer, expert]
        sent = np.take(by_source.reshape(batches, chosen.size), places, axis=1)
        routed.reshape(batches, layers * slots)[:, used] = np.add.reduceat(sent, first, axis=1)
        finish(out, routed)

    return solve


def send_by_token(placement: Placement, pick: PickReplica, name: str) -> Solve:
    """Return a router that picks a replica for every token and k by its place in the batch.

    The function raises `InvalidTokensError` if it is given no top-k ids.
    """
    slots = placement.expert_of.shape[1]
    layer = np.arange(placement.num_layers)[:, None, None, None]

    def solve(tokens: NDArray[np.int64], out: Routing, context: Context) -> None:
        ids = context.topk_ids
        if ids is None:
            raise InvalidTokensError(
                f"{name} depends on each token's place in its batch: pass "
                f"topk_ids=[..., layers, rows, k] or [..., layers, sources, rows, k]"
            )
        expert = np.maximum(ids, 0)
        copies = np.maximum(placement.copies[layer, expert], 1)
        physical = placement.logical_to_physical[layer, expert, pick(ids, copies)]
        batches, layers = ids.shape[:2]
        problems = batches * layers
        row = np.arange(problems).reshape(batches, layers, 1, 1, 1) * (slots + 1)
        # Padding is counted in a slot of its own, before the problem's others.
        counted = np.where(ids >= 0, physical + 1, 0) + row
        counts = np.bincount(counted.ravel(), minlength=problems * (slots + 1))
        finish(out, counts.reshape(problems, slots + 1)[:, 1:])

    return solve
