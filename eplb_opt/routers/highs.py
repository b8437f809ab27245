"""`highs`: METRO's integer program, solved by HiGHS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import Solve, Traits
from eplb_opt.routers.exact import EngineError, Found, Program, judge, require, seconds_left

if TYPE_CHECKING:
    import highspy
    from highspy._core import _Highs

TOLERANCE = 1e-9
BOUND_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Highs:
    """The program of `eplb_opt.routers.exact`, by branch and cut in HiGHS (Huangfu, Hall 2018).

    Gap tolerances are zero and feasibility tolerances 1e-9, but HiGHS calculates in doubles: with
    3 * 10^6 tokens on a GPU or more, its proven optimum of ``"tokens"`` was seen one too high. So
    its bound is lowered by 1e-6 of itself before it is raised to an integer, and that objective is
    proven up to 10^6 tokens on the fullest GPU, and bounded to one part in 10^6 above. Activations
    are proven at any count. Where many tokens make a ``y`` of 1e-9 enough for a replica, the answer
    activates more than HiGHS says; it is counted as it is, and then is FEASIBLE.

    Parameters
    ----------
    warm_start
        Start from METRO's greedy answer, which is then also the least that a time limit leaves.

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
        "METRO's integer program, by HiGHS", exact=True, extra="exact"
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
        return judge("highs", _solve, placement, objective, threads, self.warm_start)


def _solve(program: Program, start: NDArray[np.int64] | None, deadline: float) -> Found:
    """Solve a program in one thread.

    Presolve in HiGHS 1.16 has two defects here. It may turn the start into a better one of the
    smaller program: HiGHS then proves that one's objective and hands back the start. And with many
    tokens what it finds may fail its own check ("Solve error"). Without presolve, at two to four
    times the time, it solves both rightly.
    """
    from highspy import HighsModelStatus, SolutionStatus

    model = _model(program)
    for presolve in ("choose", "off"):
        engine = _engine(presolve, seconds_left(deadline))
        engine.passModel(model)
        if start is not None:
            engine.setSolution(_solution(program, start))
        engine.run()
        status, info = engine.getModelStatus(), engine.getInfo()
        values = np.asarray(engine.getSolution().col_value)
        proven = status == HighsModelStatus.kOptimal
        if status == HighsModelStatus.kTimeLimit or (
            proven and abs(values[0] - info.objective_function_value) < 0.5
        ):
            break
    else:
        if not proven:
            raise EngineError(f"it ended with the status {engine.modelStatusToString(status)!r}")
    feasible = info.primal_solution_status == SolutionStatus.kSolutionStatusFeasible
    taken = values[1 : 1 + program.gpu.size] if feasible else None
    bound = info.mip_dual_bound
    return Found(taken, bound - BOUND_TOLERANCE * max(1.0, abs(bound)))


def _engine(presolve: str, seconds: float) -> _Highs:
    """Return a silent HiGHS without a model."""
    from highspy._core import _Highs

    # The class that highspy.Highs derives from, whose constructor prints a banner that no option
    # can come in time to suppress.
    engine = _Highs()
    options: dict[str, bool | int | float | str] = {
        "output_flag": False,
        "threads": 1,
        "time_limit": seconds,
        "presolve": presolve,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": 0.0,
        "mip_feasibility_tolerance": TOLERANCE,
        "primal_feasibility_tolerance": TOLERANCE,
        "dual_feasibility_tolerance": TOLERANCE,
    }
    for option, value in options.items():
        engine.setOptionValue(option, value)
    return engine


def _solution(program: Program, taken: NDArray[np.int64]) -> highspy.HighsSolution:
    """Return tokens by pair as values of the columns."""
    import highspy

    y = taken > 0 if program.counts_activations else taken[:0]
    solution = highspy.HighsSolution()
    solution.col_value = np.concatenate([[program.makespan(taken)], taken, y], dtype=np.float64)
    return solution


def _model(program: Program) -> highspy.HighsLp:
    """State the program by columns: λ, x by pair, and for activations y by pair.

    Rows: ``Σ y - λ <= 0`` (or ``Σ x - λ <= 0``) of every GPU, ``Σ x = T`` of every live expert, and
    for activations ``x - T y <= 0`` of every pair.
    """
    import highspy

    gpus, live, pairs = program.num_gpus, program.live.size, program.gpu.size
    demand = program.tokens.astype(np.float64)
    pair_demand = demand[program.expert]
    gpu_row, expert_row = program.gpu, gpus + program.expert
    ones = np.ones(pairs)
    # λ has an entry for every GPU. Every other column has two, a row and a value each.
    if program.counts_activations:
        links = pairs
        link_row = gpus + live + np.arange(pairs)
        rows = [(expert_row, link_row), (gpu_row, link_row)]
        values = [(ones, ones), (ones, -pair_demand)]
    else:
        links = 0
        rows = [(gpu_row, expert_row)]
        values = [(ones, ones)]

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = 1 + pairs + links, gpus + live + links
    lp.col_cost_ = np.eye(1, lp.num_col_)[0]
    lp.col_lower_ = np.zeros(lp.num_col_)
    lp.col_upper_ = np.concatenate([[np.inf], pair_demand, ones[:links]])
    lp.row_lower_ = np.concatenate([np.full(gpus, -np.inf), demand, np.full(links, -np.inf)])
    lp.row_upper_ = np.concatenate([np.zeros(gpus), demand, np.zeros(links)])
    lp.integrality_ = [highspy.HighsVarType.kInteger] * lp.num_col_
    matrix = lp.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kColwise
    matrix.start_ = np.concatenate([[0], gpus + 2 * np.arange(lp.num_col_)]).astype(np.int32)
    by_column = [np.stack(two, axis=1).ravel() for two in rows]
    matrix.index_ = np.concatenate([np.arange(gpus), *by_column]).astype(np.int32)
    by_column = [np.stack(two, axis=1).ravel() for two in values]
    matrix.value_ = np.concatenate([-np.ones(gpus), *by_column])
    return lp
