"""The kernels' launches: grid, block and arguments, whoever carries them out.

Pointers are integers and other arguments ctypes scalars, as `cuda.core` takes them.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from eplb_opt.gpu.tables import Shape

__all__ = [
    "KERNELS",
    "Launch",
    "assign_shares",
    "metro_batched",
    "metro_locked",
    "optimal_batched",
    "route",
]

KERNELS = {
    "metro_locked": "metro_locked.cu",
    "metro_batched": "metro_batched.cu",
    "optimal_batched": "optimal_batched.cu",
    "route_metro": "route.cu",
    "route_optimal": "route.cu",
    "assign_shares": "assign_shares.cu",
}
"""The kernels and their files in ``solvers/cuda``."""

_WARP = 32
_ROUTE_THREADS = 256
_ASSIGN_THREADS = 128


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: str
    blocks: int
    threads: int
    args: tuple[Any, ...]


def metro_batched(
    shape: Shape, problems: int, tables: int, tokens: int, home: int, activated: int, makespan: int
) -> Launch:
    """Route by METRO's greedy rule in the tables' order, a warp per problem.

    Parameters
    ----------
    shape
        Of the placement.
    problems
        Problem i is on layer ``i % layers``.
    tables
        Int32 ``[layers, row]``, of `eplb_opt.gpu.tables.make_tables`.
    tokens
        Int64 ``[problems, experts]``.
    home
        Int32 ``[problems, experts]``, written: the slot that takes all of an expert's tokens, -1
        for an expert without tokens.
    activated
        Int32 ``[problems, gpus]``, written.
    makespan
        Int32 ``[problems]``, written; -1 for tokens out of range or of an expert without a replica,
        and then nobody has a slot.
    """
    args = (*_of_layers(shape, tables), tokens, home, activated, makespan)
    return Launch("metro_batched", problems, _WARP, args)


def metro_locked(
    shape: Shape, problems: int, tables: int, tokens: int, home: int, activated: int, makespan: int
) -> Launch:
    """Route by METRO's Algorithm 1, a thread per expert; parameters as `metro_batched`."""
    threads = min(1024, -(-shape.experts // _WARP) * _WARP)
    args = (*_of_layers(shape, tables), tokens, home, activated, makespan)
    return Launch("metro_locked", problems, threads, args)


def optimal_batched(
    shape: Shape,
    problems: int,
    tables: int,
    tokens: int,
    home: int,
    activated: int,
    makespan: int,
    certificate: int,
) -> Launch:
    """Route with the fewest activated replicas on the fullest GPU, a warp per problem.

    Parameters are those of `metro_batched`, the tables made for ``"optimal"``, and `certificate`:
    uint32 ``[problems, words]``, written, the GPU set that proves the makespan, bit ``g % 32`` of
    word ``g // 32`` for GPU g.
    """
    args = (*_of_layers(shape, tables), tokens, home, activated, makespan, certificate)
    return Launch("optimal_batched", problems, _WARP, args)


def route(
    method: str,
    shape: Shape,
    tables: int,
    topk_ids: int,
    id_bytes: int,
    ids: int,
    counts: int,
    physical: int,
) -> Launch:
    """Turn top-k ids into physical ids, a block per layer.

    Parameters
    ----------
    method
        ``"metro"`` or ``"optimal"``, for which the tables were made.
    shape, tables
        As of `metro_batched`.
    topk_ids
        Int32 or int64 ``[layers, ids]``, of `id_bytes` each; -1 is padding.
    counts
        Int32 ``[layers, experts]``, the tokens of all ranks; 0 to count the ids.
    physical
        Int32 ``[layers, ids]``, written: -1 for padding, -2 for an id that is no expert, or whose
        expert has no replica or, by `counts`, no tokens.
    """
    sizes = (shape.gpus, shape.slots_per_gpu, shape.experts)
    args = (
        tables,
        *map(ctypes.c_int, sizes),
        topk_ids,
        ctypes.c_int(id_bytes),
        ctypes.c_longlong(ids),
        counts,
        physical,
    )
    return Launch(f"route_{method}", shape.layers, _ROUTE_THREADS, args)


def assign_shares(
    layers: int,
    experts: int,
    copies: int,
    topk_ids: int,
    id_bytes: int,
    ids: int,
    slots: int,
    shares: int,
    before: int,
    physical: int,
) -> Launch:
    """Assign a rank's part of experts that are split over slots, a block per layer.

    Parameters
    ----------
    layers, experts, copies
        Sizes of the arrays; at most 2,048 experts.
    topk_ids, id_bytes, ids
        As of `route`.
    slots
        Int32 ``[layers, experts, copies]``: every expert's slots, ascending, then -1.
    shares
        Int32 ``[layers, experts, copies]``: the tokens of all ranks that each takes.
    before
        Int32 ``[layers, experts]``: the tokens that the ranks before this one have.
    physical
        Int32 ``[layers, ids]``, written: -1 for padding, -2 for an id that is no expert and for
        tokens beyond the shares.
    """
    args = (
        topk_ids,
        ctypes.c_int(id_bytes),
        ctypes.c_longlong(ids),
        slots,
        shares,
        before,
        ctypes.c_int(experts),
        ctypes.c_int(copies),
        physical,
    )
    return Launch("assign_shares", layers, _ASSIGN_THREADS, args)


def _of_layers(shape: Shape, tables: int) -> tuple[Any, ...]:
    sizes = (shape.layers, shape.gpus, shape.slots_per_gpu, shape.experts)
    return (tables, *map(ctypes.c_int, sizes))
