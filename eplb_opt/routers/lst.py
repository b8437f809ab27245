"""`lst`: whole experts by linear programming and rounding, within twice the optimum."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb_opt.engines import BOUND_TOLERANCE, EngineError, Rows, at_a_time, new_highs, require
from eplb_opt.objective import Curve, Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import Context, Solve, Traits
from eplb_opt.routers.exact import Program, by_problem, failure, linear_time, pairs_of
from eplb_opt.status import Proof, Status

if TYPE_CHECKING:
    from eplb_opt.routing import Routing

WHOLE = 1e-7
"""A share of an expert that is less than this short of one is all of it."""


@dataclass(frozen=True, slots=True)
class Lst:
    """Lenstra, Shmoys and Tardos (Mathematical Programming 46, 1990), for experts sent whole.

    Without splits, and with an objective of one piece, routing is makespan scheduling on unrelated
    machines: expert e takes ``p[e,g]`` on GPU g, the piece's time of all its tokens times the GPU's
    slowness. For a deadline t only pairs with which alone the GPU still meets t are allowed, and
    the linear relaxation spreads every expert over them so that all GPUs do. The smallest t for
    which it can is a lower bound. A vertex of that solution splits no more experts than there are
    GPUs, in a graph of experts and GPUs with as many edges as nodes at most, so that every split
    expert finds a GPU of its own; there it goes whole. No GPU then has more than t from the whole
    experts and at most t from its one rounded expert.

    Experts with one pair are fixed load of their GPU. An offset counts in both halves, so that the
    factor is 2 with it too.

    Notes
    -----
    Which pairs are allowed changes at as many deadlines as there are pairs; bisection over those
    takes O(log pairs) linear programs, by the simplex method in HiGHS. Needs the extra ``exact``.

    Examples
    --------
    >>> from eplb_opt.objective import Piece
    >>> from eplb_opt.routing import Router
    >>> whole = Objective(pieces=(Piece(token=1),), split=False)
    >>> router = Router(Placement([[0, 1, 2], [2, 1, 0]]), objective=whole, method="lst")
    >>> routing = router.route([6, 5, 4])
    >>> float(routing.bound), float(routing.makespan)
    (8.0, 11.0)
    """

    traits: ClassVar[Traits] = Traits(
        "linear relaxation and rounding (Lenstra, Shmoys, Tardos): at most twice the optimum",
        objectives="one piece with split=False",
        solves=lambda objective: len(objective.pieces) == 1 and not objective.split,
        extra="exact",
    )

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it.

        Raises
        ------
        SolverUnavailableError
            If highspy is not installed.
        """
        require("lst", "highspy")
        pairs = pairs_of(placement, objective)

        def solve(tokens: NDArray[np.int64], out: Routing, _: Context) -> None:
            demand, routed, makespan, bound, status, proved_by = by_problem(tokens, out)

            def solve_one(at: int) -> None:
                of_layer = pairs[at % placement.num_layers]
                program = Program.of(placement, of_layer, demand[at], objective)
                counted, relaxed = program.counted_bound(), -math.inf
                taken = program.tokens
                if program.live.size:
                    try:
                        taken, relaxed = _round(program)
                    except EngineError as error:
                        error.by = Proof.LP
                        raise failure(out, at, error) from error
                routed[at] = program.routed(taken).reshape(-1)
                makespan[at] = program.makespan(taken)
                bound[at] = max(counted, relaxed)
                proved_by[at] = Proof.LP if relaxed >= counted else Proof.COUNT
                status[at] = Status.OPTIMAL if makespan[at] == bound[at] else Status.FEASIBLE

            at_a_time(threads, solve_one, range(len(demand)))
            out.activated[...] = (out.tokens > 0).sum(axis=-1)
            out.certificate.fill(False)

        return solve


class _Jobs(NamedTuple):
    """The program as scheduling on unrelated machines.

    Attributes
    ----------
    time
        Float64 ``[pairs]``: what a whole expert takes on the GPU.
    busy
        Float64 ``[gpus]``: the time of the fixed experts, and the offset.
    """

    time: NDArray[np.float64]
    busy: NDArray[np.float64]

    @classmethod
    def of(cls, program: Program) -> _Jobs:
        """Return the times of a program of one piece."""
        piece, whole = program.objective.pieces[0], program.whole_counts()
        slow = program.slowness
        if isinstance(piece, Curve):
            each = piece.replica_time(whole.tokens)
            return cls(slow[program.gpu] * each, slow * piece.time(program.fixed))
        alone = replace(program.objective, pieces=(replace(piece, offset=0.0),))
        return cls(
            linear_time(alone, whole, slow[program.gpu]),
            linear_time(program.objective, program.fixed_counts(), slow),
        )


def _round(program: Program) -> tuple[NDArray[np.int64], float]:
    """Return the tokens by pair, and the relaxation's bound raised to the next makespan."""
    jobs = _Jobs.of(program)
    alone = jobs.busy[program.gpu] + jobs.time
    share, relaxed = _relax(program, jobs, alone)
    taken = np.where(share > 1 - WHOLE, program.tokens[program.expert], 0)
    for pair in _matched(program, share):
        taken[pair] = program.tokens[program.expert[pair]]
    lowered = relaxed - BOUND_TOLERANCE * relaxed
    return program.rounded(taken), program.raised(lowered)


def _relax(
    program: Program, jobs: _Jobs, alone: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """Return each pair's share of its expert at the smallest deadline, and that.

    Between two of the deadlines at which another pair is allowed, the relaxation's own smallest
    makespan decides.
    """
    deadlines = np.unique(alone)
    needed = float(np.minimum.reduceat(alone, program.first_pairs()).max())
    low, high = int(np.searchsorted(deadlines, needed)), len(deadlines) - 1
    unit = float(jobs.time.max()) or 1.0
    best = (np.zeros(0), math.inf)
    while low <= high:
        middle = (low + high) // 2
        share, makespan = _vertex(program, jobs, alone <= deadlines[middle], unit)
        if middle + 1 < len(deadlines) and makespan >= deadlines[middle + 1]:
            low = middle + 1
        else:
            best = (share, max(makespan, float(deadlines[middle])))
            high = middle - 1
    return best


def _vertex(
    program: Program, jobs: _Jobs, allowed: NDArray[np.bool_], unit: float
) -> tuple[NDArray[np.float64], float]:
    """Spread the experts over the pairs allowed so that the fullest GPU ends as early as it can."""
    import highspy

    pairs, busy = np.arange(len(allowed)), program.busy
    gpu, experts = np.searchsorted(busy, program.gpu), len(program.live)
    rows = Rows()
    rows.add(np.ones(experts), 1.0, (program.expert, 1 + pairs, 1.0))
    loads = (gpu, 1 + pairs, jobs.time / unit)
    rows.add(-np.inf, -jobs.busy[busy] / unit, loads, (np.arange(len(busy)), 0, -1.0))
    lp = highspy.HighsLp()
    lp.num_col_ = 1 + len(pairs)
    lp.col_cost_ = np.eye(1, lp.num_col_)[0]
    lp.col_lower_ = np.zeros(lp.num_col_)
    lp.col_upper_ = np.concatenate([[np.inf], np.where(allowed, 1.0, 0.0)])
    rows.finish(lp)
    engine = new_highs("choose", math.inf)
    engine.setOptionValue("solver", "simplex")
    engine.passModel(lp)
    engine.run()
    status = engine.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        raise EngineError(f"HiGHS ended with the status {engine.modelStatusToString(status)!r}")
    values = np.asarray(engine.getSolution().col_value)
    return values[1:], float(values[0]) * unit


def _matched(program: Program, share: NDArray[np.float64]) -> list[int]:
    """Return a pair for every split expert, no two with the same GPU, by augmenting paths."""
    pairs_of_expert: dict[int, list[int]] = {}
    for pair in np.flatnonzero((share > WHOLE) & (share <= 1 - WHOLE)).tolist():
        pairs_of_expert.setdefault(int(program.expert[pair]), []).append(pair)
    chosen: dict[int, int] = {}  # by GPU

    def place(expert: int, seen: set[int]) -> bool:
        for pair in pairs_of_expert[expert]:
            gpu = int(program.gpu[pair])
            if gpu in seen:
                continue
            seen.add(gpu)
            if gpu not in chosen or place(int(program.expert[chosen[gpu]]), seen):
                chosen[gpu] = pair
                return True
        return False

    for expert in pairs_of_expert:
        if not place(expert, set()):
            raise EngineError("HiGHS hands back a solution that is no vertex")
    return list(chosen.values())
