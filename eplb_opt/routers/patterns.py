"""Caps refuted by the sets of whole experts that each GPU can serve.

For where few activations are to spare, so that few experts can be split. With n[g] the tokens and
f[g] the replicas that GPU g has room for, and `spare` the replicas that all of them have room for
beyond one of every expert, a GPU serves one *pattern*: a set W of whole experts, of t[W] tokens,
and r parts of others. Set partitioning, where w[e,g] stands for the sum of v over the patterns of g
with e in W::

    find       v[g,W,r]                which pattern a GPU serves
               z[e] <= 1               whether an expert is split
               q[e,g] <= 1             whether a GPU serves a part of an expert
               x[e,g]                  and how many tokens
    subject to Σ v[g,W,r] = 1,  Σ_e q[e,g] = Σ r v[g,W,r]                 for every GPU
               Σ_g w[e,g] + z[e] = 1,  Σ_g x[e,g] = T[e] z[e]             for every expert
               Σ_g q[e,g] >= 2 z[e]                                       for every expert
               q[e,g] <= z[e],  x[e,g] <= (T[e] - 1) q[e,g]               for every pair
               Σ q - Σ z <= spare
               Σ_e x[e,g] <= Σ_(r > 0) (n[g] - t[W]) v[g,W,r]             for every GPU
               x[e,g] <= Σ_(r > 0, e not in W) (n[g] - t[W]) v[g,W,r]     for every pair

Every part is of another expert, and takes one of what is to spare, as does what a GPU has room for
and does not activate; and all GPUs together may stay below their tokens by the slack, Σ n - Σ T:
patterns that need more of either are left out. Without integers, as it
is solved here, it refutes most caps that are too tight, in tenths of a second; the relaxation of
`eplb_opt.routers.exact`, in which experts split freely, refutes few. With integers it decides,
and mostly takes HiGHS ten seconds and more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb_opt.engines import Rows, new_highs, seconds_left
from eplb_opt.routers.exact import NOTHING, Found, Program

if TYPE_CHECKING:
    import highspy

MOST_SETS = 1 << 17
"""Sets of experts, with so many parts, that are looked at: a problem of more is left alone."""


def refute(program: Program, deadline: float) -> Found:
    """Prove, if the linear program can, that no answer is within `Program.most`.

    Parameters
    ----------
    program
        Whose times are tokens, with `most_activated`.
    deadline
        See `seconds_left`.

    Returns
    -------
    Found
        No answer, and a bound above `Program.most`, or none.

    Notes
    -----
    Presolve in HiGHS 1.16 is off: see `eplb_opt.routers.highs.solve`.
    """
    from highspy import HighsModelStatus

    most, room = program.activation_room(), program.token_room()
    spare = int(most[program.busy].sum()) - program.live.size
    if np.exp2(np.bincount(program.gpu)).sum() * (spare + 1) > MOST_SETS:
        return NOTHING
    slack = int(room[program.busy].sum() - program.tokens.sum())
    refuted = Found(None, program.most + 1)
    if spare < 0 or slack < 0:
        return refuted
    patterns = _Patterns.of(program, most, room, spare, slack)
    if len(np.unique(patterns.gpu)) < len(program.busy):
        return refuted
    engine = new_highs("off", seconds_left(deadline))
    engine.passModel(_model(program, patterns, room, spare))
    engine.run()
    return refuted if engine.getModelStatus() == HighsModelStatus.kInfeasible else NOTHING


class _Patterns(NamedTuple):
    """The patterns of all GPUs.

    Attributes
    ----------
    gpu, parts, left
        Int64 ``[patterns]``: the GPU, r, and n - t[W].
    pattern, pair
        Int64 ``[members]``: the pairs of a pattern's whole experts.
    beside, other
        Int64 ``[others]``: the other pairs of its GPU, of a pattern with parts.
    """

    gpu: NDArray[np.int64]
    parts: NDArray[np.int64]
    left: NDArray[np.int64]
    pattern: NDArray[np.int64]
    pair: NDArray[np.int64]
    beside: NDArray[np.int64]
    other: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        program: Program,
        most: NDArray[np.int64],
        room: NDArray[np.int64],
        spare: int,
        slack: int,
    ) -> _Patterns:
        """Return the patterns within rooms for replicas and tokens, int64 ``[gpus]``."""
        tables: list[tuple[NDArray[np.int64], ...]] = []
        count = 0
        for gpu in program.busy.tolist():
            pairs = np.flatnonzero(program.gpu == gpu)
            tokens = program.tokens[program.expert[pairs]]
            order = np.argsort(-tokens, kind="stable")
            pairs, tokens = pairs[order], tokens[order]
            sets = np.arange(1 << len(pairs))
            inside = sets[:, None] >> np.arange(len(pairs)) & 1
            size, left = inside.sum(axis=1), room[gpu] - inside @ tokens
            rank = np.cumsum(1 - inside, axis=1)
            for parts in range(spare + 1):
                # The most that parts can have is all of the largest other experts but a token each.
                largest = (1 - inside) * (rank <= parts)
                wasted = left - largest @ (tokens - 1)
                idle = most[gpu] - size - parts
                keep = (idle >= 0) & (idle <= spare - parts) & (left >= parts)
                keep &= (wasted <= slack) & (rank[:, -1] >= parts)
                at, member = np.nonzero(inside[keep])
                beside, other = np.nonzero((1 - inside[keep]) * (parts > 0))
                kept = left[keep]
                same = np.full_like(kept, gpu), np.full_like(kept, parts), kept
                tables.append((*same, count + at, pairs[member], count + beside, pairs[other]))
                count += len(kept)
        return cls(*map(np.concatenate, zip(*tables, strict=True)))


def _model(
    program: Program,
    patterns: _Patterns,
    room: NDArray[np.int64],
    spare: int,
) -> highspy.HighsLp:
    """State the program by rows: its columns are x, q, z and v."""
    import highspy

    expert, tokens = program.expert, program.tokens
    pairs, experts = np.arange(len(expert)), np.arange(len(tokens))
    x, q, z = pairs, pairs + len(pairs), experts + 2 * len(pairs)
    v = 2 * len(pairs) + len(experts) + np.arange(len(patterns.gpu))
    # In the room of the roomiest GPU, so that the engine's tolerance is far below a token.
    unit = max(1, int(room.max()))
    part = np.minimum(tokens[expert] - 1, room[program.gpu]) / unit
    gpu, of_gpu = (np.searchsorted(program.busy, of) for of in (program.gpu, patterns.gpu))
    left = patterns.left * (patterns.parts > 0) / unit
    split = left[patterns.beside]

    rows = Rows()
    none, no_less = np.zeros(len(program.busy)), np.full(len(pairs), -np.inf)
    rows.add(none + 1, 1, (of_gpu, v, 1))
    rows.add(none, 0, (gpu, q, 1), (of_gpu, v, -patterns.parts))
    rows.add(none - np.inf, 0, (gpu, x, 1), (of_gpu, v, -left))
    whole = expert[patterns.pair], v[patterns.pattern], 1
    rows.add(np.ones(len(experts)), 1, whole, (experts, z, 1))
    rows.add(np.zeros(len(experts)), 0, (expert, x, 1), (experts, z, -tokens / unit))
    rows.add(np.zeros(len(experts)), np.inf, (expert, q, 1), (experts, z, -2))
    rows.add(no_less, 0, (pairs, q, 1), (pairs, z[expert], -1))
    rows.add(no_less, 0, (pairs, x, 1), (pairs, q, -part))
    rows.add(no_less, 0, (pairs, x, 1), (patterns.other, v[patterns.beside], -split))
    rows.add(-np.inf, spare, (0, q, 1), (0, z, -1))

    lp = highspy.HighsLp()
    lp.num_col_ = 2 * len(pairs) + len(experts) + len(v)
    lp.col_cost_ = np.zeros(lp.num_col_)
    upper = np.ones(lp.num_col_)
    upper[x] = part
    lp.col_lower_, lp.col_upper_ = np.zeros(lp.num_col_), upper
    rows.finish(lp)
    return lp
