"""`highs`: the integer program of any linear objective, solved by HiGHS."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb_opt.engines import BOUND_TOLERANCE, EngineError, Rows, new_highs, require, seconds_left
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import Solve, Traits
from eplb_opt.routers.exact import Found, Program, in_units, judge, linear_time
from eplb_opt.status import Proof

if TYPE_CHECKING:
    import highspy


@dataclass(frozen=True, slots=True)
class Highs:
    """The program of `eplb_opt.routers.exact`, by branch and cut in HiGHS (Huangfu, Hall 2018).

    Gap tolerances are zero and feasibility tolerances 1e-9, but HiGHS calculates in doubles: with
    3 * 10^6 tokens on a GPU or more, its proven optimum of ``"tokens"`` was seen one too high. So
    its bound is lowered by 1e-6 of itself before it is raised to a value that occurs. That proves
    ``"tokens"`` up to 10^6 on the fullest GPU, and bounds it to one part in 10^6 above; activations
    at any count; and other objectives unless two of their values lie so close together. Where many
    tokens make a ``y`` of 1e-9 enough for a replica, the answer activates more than HiGHS says; it
    is counted as it is, and then is FEASIBLE.

    Parameters
    ----------
    warm_start
        Start from the answer of METRO's greedy or, where more than one thing is counted, of the
        search, which is then also the least that a time limit leaves.

    Examples
    --------
    >>> from eplb_opt.placement import Placement
    >>> from eplb_opt.routing import solve_routing
    >>> placement = Placement([[0, 1], [0, 2], [1, 3], [2, 3]])
    >>> routing = solve_routing(placement, [4, 4, 4, 4], method="highs")
    >>> routing.activated.tolist(), float(routing.bound), int(routing.status)
    ([1, 1, 1, 1], 1.0, 2)
    """

    traits: ClassVar[Traits] = Traits(
        "the integer program, by HiGHS",
        objectives="pieces that are not curves",
        solves=lambda objective: not objective.curves,
        exact=True,
        extra="exact",
    )

    warm_start: bool = True

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it.

        Raises
        ------
        SolverUnavailableError
            If highspy is not installed.
        """
        require("highs", "highspy")
        return judge(Proof.HIGHS, solve, placement, objective, threads, self.warm_start)


def solve(program: Program, start: NDArray[np.int64] | None, deadline: float) -> Found:
    """Solve a program in one thread.

    Presolve in HiGHS 1.16 has three defects here. It may turn the start into a better one of the
    smaller program: HiGHS then proves that one's objective and hands back the start. With many
    tokens what it finds may fail its own check ("Solve error"). And at this tolerance it may find a
    program infeasible that is not. Without presolve, at two to four times the time, it solves all
    three rightly.
    """
    from highspy import HighsModelStatus, SolutionStatus

    program, unit = in_units(program)
    columns = _Columns.of(program)
    model = _model(program, columns)
    for presolve in ("choose", "off"):
        engine = new_highs(presolve, seconds_left(deadline))
        engine.passModel(model)
        if start is not None:
            engine.setSolution(_solution(columns, program, start))
        engine.run()
        status, info = engine.getModelStatus(), engine.getInfo()
        values = np.asarray(engine.getSolution().col_value)
        proven = status == HighsModelStatus.kOptimal
        if status == HighsModelStatus.kTimeLimit:
            break
        objective = info.objective_function_value
        if proven and abs(values[0] - objective) < 0.5 * BOUND_TOLERANCE * max(1.0, objective):
            break
    else:
        if status == HighsModelStatus.kInfeasible and start is None:
            return Found(None, _lowered(program.most + program.has_integer_times, unit))
        if not proven:
            raise EngineError(f"it ended with the status {engine.modelStatusToString(status)!r}")
    taken = None
    if info.primal_solution_status == SolutionStatus.kSolutionStatusFeasible:
        whole = program.tokens[program.expert]
        taken = values[columns.x] if program.objective.split else np.rint(values[columns.y]) * whole
    return Found(taken, _lowered(info.mip_dual_bound, unit))


def _lowered(bound: float, unit: float) -> float:
    """Return a bound less what HiGHS may be wrong by, in the objective's own time."""
    return unit * (bound - BOUND_TOLERANCE * max(1.0, abs(bound)))


def _solution(
    columns: _Columns, program: Program, taken: NDArray[np.int64]
) -> highspy.HighsSolution:
    """Return tokens by pair as values of the columns."""
    import highspy

    tiles = -(-taken // program.objective.tile_tokens)
    values = np.zeros(columns.width)
    values[0] = program.makespan(taken)
    for column, value in ((columns.x, taken), (columns.y, taken > 0), (columns.z, tiles)):
        values[column] = value[: len(column)]
    solution = highspy.HighsSolution()
    solution.col_value = values
    return solution


class _Columns(NamedTuple):
    """The columns after λ, which is column 0: x, y and z by pair, or none of a kind."""

    x: NDArray[np.int64]
    y: NDArray[np.int64]
    z: NDArray[np.int64]

    @classmethod
    def of(cls, program: Program) -> _Columns:
        """Return the columns that a program needs."""
        pairs = np.arange(program.gpu.size)
        needed = (program.objective.split, program.has_y, program.has_z)
        ends = 1 + len(pairs) * np.cumsum([0, *needed])
        kinds = zip(needed, ends[:-1], strict=True)
        return cls(*(first + pairs if need else pairs[:0] for need, first in kinds))

    @property
    def width(self) -> int:
        """All columns, λ included."""
        return 1 + sum(map(len, self))


def _model(program: Program, columns: _Columns) -> highspy.HighsLp:
    """State the program by rows.

    Of every GPU and piece ``slowness * (activation Σy + tile Σz + token Σx) - λ <= -constant``, of
    every expert ``Σx = T``, of every pair ``x <= M y``, ``x <= tile_tokens z`` and ``y <= z``, as
    far as the program has them. Beyond the program as stated: Σy within the room of a GPU, and at
    least as many as an expert needs.
    """
    import highspy

    x, y, z = columns
    objective, busy = program.objective, program.busy
    gpu = np.searchsorted(busy, program.gpu)
    tokens = program.tokens[program.expert].astype(np.float64)
    no_less = np.full(len(gpu), -np.inf)
    tile = objective.tile_tokens
    room, whole = program.room(), program.whole_counts()
    fixed, slowness = program.fixed_counts(), program.slowness
    each_gpu, pairs = np.arange(len(busy)), np.arange(len(gpu))

    rows = Rows()
    for piece in objective.linear:
        if not piece.grows:
            continue
        constant = linear_time(replace(objective, pieces=(piece,)), fixed, slowness)[busy]
        slow = slowness[program.gpu]
        if objective.split:
            priced = [(x, piece.token), (y, piece.activation), (z, piece.tile)]
            terms = [(gpu, column, slow * price) for column, price in priced if price]
        else:
            time = piece.activation + piece.tile * whole.tiles + piece.token * tokens
            terms = [(gpu, y, slow * time)]
        rows.add(-np.inf, -constant, (each_gpu, 0, -1.0), *terms)
    if objective.split:
        rows.add(program.tokens, program.tokens, (program.expert, x, 1.0))
    else:
        rows.add(np.ones(len(program.tokens)), 1.0, (program.expert, y, 1.0))
    if len(x) and len(y):
        rows.add(no_less, 0.0, (pairs, x, 1.0), (pairs, y, -room))
        fewest = program.fewest_replicas(room)
        several = np.flatnonzero(fewest > 1)
        of_several = np.isin(program.expert, several)
        at = np.searchsorted(several, program.expert[of_several])
        rows.add(fewest[several], np.inf, (at, y[of_several], 1.0))
    if len(z):
        rows.add(no_less, 0.0, (pairs, x, 1.0), (pairs, z, -objective.tile_tokens))
        if len(y):
            rows.add(no_less, 0.0, (pairs, y, 1.0), (pairs, z, -1.0))
    if len(y) and not objective.counts_activations:
        rows.add(-np.inf, program.activation_room()[busy], (gpu, y, 1.0))
    if len(x) and len(y):
        rows.add(-np.inf, program.token_room()[busy], (gpu, x, 1.0))
    sized = y if len(y) else x
    for gpus in program.twins():
        for first, second in pairwise(gpus):
            a, b = program.gpu == first, program.gpu == second
            rows.add(-np.inf, 0.0, (0, sized[b], 1.0), (0, sized[a], -1.0))

    lp = highspy.HighsLp()
    lp.num_col_ = columns.width
    lp.col_cost_ = np.eye(1, columns.width)[0]
    lower, upper = np.zeros(columns.width), np.ones(columns.width)
    lower[0], upper[0] = program.counted_bound() * (1 - 1e-9), program.most
    if not program.has_integer_times:
        upper[0] *= 1 + 1e-9
    upper[x] = room[: len(x)]
    upper[y] = (room > 0 if objective.split else room >= tokens)[: len(y)]
    upper[z] = -(-room // tile)[: len(z)]
    lp.col_lower_, lp.col_upper_ = lower, upper
    rows.finish(lp)
    kind = highspy.HighsVarType
    lp.integrality_ = [kind.kInteger] * columns.width
    if not program.has_integer_times:
        lp.integrality_ = [kind.kContinuous] + [kind.kInteger] * (columns.width - 1)
    return lp
