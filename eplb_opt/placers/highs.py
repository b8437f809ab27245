"""`highs`: the proven placement, by HiGHS."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb_opt.engines import BOUND_TOLERANCE, EngineError, Rows, new_highs, require, seconds_left
from eplb_opt.placers.base import Placed, PlacementProblem, PlacerTraits
from eplb_opt.placers.exact import ORDERED_RANKS, Found, Program, place
from eplb_opt.status import Proof

if TYPE_CHECKING:
    import highspy


@dataclass(frozen=True, slots=True)
class Highs:
    """The program of `eplb_opt.placers.exact`, by branch and cut in HiGHS (Huangfu, Hall 2018).

    It fills every slot with distinct copies. Loads are scaled by the makespan in hand, gap
    tolerances are zero, feasibility tolerances 1e-9. HiGHS calculates in doubles all the same: its
    bound is lowered by 1e-6 of itself before it is raised to a value that occurs. So optima of
    integer loads are proven where such values lie far enough apart, and bounded to 1e-6 elsewhere.

    Examples
    --------
    >>> from eplb_opt.placing import solve_placement
    >>> plan = solve_placement([6, 5, 4, 3, 2], num_gpus=2, slots_per_gpu=3, method="highs")
    >>> float(plan.makespan), int(plan.status), plan.duplicates
    (10.0, 2, 0)
    """

    traits: ClassVar[PlacerTraits] = PlacerTraits(
        "the integer program, by HiGHS", takes=frozenset({"stop"}), exact=True, extra="exact"
    )

    def place(self, problem: PlacementProblem) -> Placed:
        """Place the experts of all layers.

        Raises
        ------
        SolverUnavailableError
            If highspy is not installed.
        ValueError, InfeasibleError, EplbError
            See `eplb_opt.placers.exact.place`.
        """
        require("highs", "highspy")
        return place(problem, Proof.HIGHS, solve)


def solve(program: Program, deadline: float) -> Found:
    """Solve a program in one thread; without presolve where with it HiGHS errs.

    See `eplb_opt.routers.highs.solve` for presolve's defects. The makespan in hand is a limit on λ,
    not a start, of which presolve may make another.
    """
    from highspy import HighsModelStatus, SolutionStatus

    columns = _Columns.of(program)
    model = _model(program, columns)
    for presolve in ("choose", "off"):
        engine = new_highs(presolve, seconds_left(deadline))
        engine.passModel(model)
        engine.run()
        status, info = engine.getModelStatus(), engine.getInfo()
        if status in (HighsModelStatus.kOptimal, HighsModelStatus.kTimeLimit):
            break
    else:
        raise EngineError(f"it ended with the status {engine.modelStatusToString(status)!r}")
    held = None
    if info.primal_solution_status == SolutionStatus.kSolutionStatusFeasible:
        chosen = np.asarray(engine.getSolution().col_value)[columns.u] > 0.5
        held = np.zeros((len(program.group), len(program.room)), np.bool_)
        np.logical_or.at(held, columns.expert, chosen)
    return Found(held, program.most * (info.mip_dual_bound - BOUND_TOLERANCE))


class _Columns(NamedTuple):
    """The columns, after those of λ.

    Attributes
    ----------
    expert, copies
        Of every choice.
    u
        Int64 ``[choices, gpus]``.
    z
        Int64 ``[choices]``; there is a choice of its expert alone where it is not used.
    y
        Int64 ``[windows, experts, gpus]``, or no windows with equal split.
    q
        Int64 ``[groups, nodes]``, or no groups with one node.
    """

    expert: NDArray[np.int64]
    copies: NDArray[np.int64]
    u: NDArray[np.int64]
    z: NDArray[np.int64]
    y: NDArray[np.int64]
    q: NDArray[np.int64]

    @classmethod
    def of(cls, program: Program) -> _Columns:
        """Return the columns of a program."""
        expert, copies = program.choices()
        gpus, several = len(program.room), program.num_nodes > 1
        windows = len(program.windows) * program.splits_freely
        shapes = (
            (len(expert), gpus),
            (len(expert),),
            (windows, len(program.group), gpus),
            (program.num_groups * several, program.num_nodes),
        )
        first = program.bottlenecks[-1] + 1
        blocks = []
        for shape in shapes:
            size = int(np.prod(shape))
            blocks.append(first + np.arange(size).reshape(shape))
            first += size
        return cls(expert, copies, *blocks)

    @property
    def width(self) -> int:
        """All columns, λ included."""
        return int(self.u[0, 0]) + self.u.size + self.z.size + self.y.size + self.q.size


def _model(program: Program, columns: _Columns) -> highspy.HighsLp:
    """State the program by rows, in units of the makespan in hand."""
    import highspy

    rows = Rows()
    windows, bottleneck = program.windows / program.most, program.bottlenecks
    each_gpu = np.arange(len(program.room))
    expert, copies, u = columns.expert, columns.copies, columns.u
    rows.add(program.room, program.room, (each_gpu, u, 1.0))
    if program.splits_freely:
        _split_freely(rows, program, columns)
        loads = [(each_gpu, y, 1.0) for y in columns.y]
    else:
        _count_copies(rows, program, columns)
        loads = [(each_gpu, u, (load[expert] / copies)[:, None]) for load in windows]
    for load, λ in zip(loads, bottleneck, strict=True):
        rows.add(np.full(len(each_gpu), -np.inf), 0.0, load, (each_gpu, λ, -1.0))
    lambdas = np.arange(bottleneck[-1] + 1)
    cost = np.zeros(columns.width)
    cost[lambdas] = 1 / len(lambdas)
    rows.add(program.counted / program.most * (1 - 1e-9), 1 + 1e-9, (0, lambdas, cost[lambdas]))
    _keep_to_nodes(rows, program, columns)
    _order(rows, program, columns)

    lp = highspy.HighsLp()
    lp.num_col_, lp.col_cost_ = columns.width, cost
    binary = np.ones(columns.width, np.bool_)
    binary[lambdas] = binary[columns.y] = False
    lp.col_lower_, lp.col_upper_ = np.zeros(columns.width), np.where(binary, 1.0, np.inf)
    rows.finish(lp)
    kind = highspy.HighsVarType
    lp.integrality_ = [kind.kInteger if of else kind.kContinuous for of in binary]
    return lp


def _count_copies(rows: Rows, program: Program, columns: _Columns) -> None:
    """Give every expert one number of copies, and as many copies."""
    expert, copies, u, z = columns.expert, columns.copies, columns.u, columns.z
    choices = np.arange(len(expert))
    rows.add(np.ones(len(program.group)), 1.0, (expert, z, 1.0))
    rows.add(np.zeros(len(z)), 0.0, (choices[:, None], u, 1.0), (choices, z, -copies))
    several = np.bincount(expert)[expert] > 1
    pairs = np.arange(u[several].size).reshape(-1, u.shape[1])
    no_less = np.full(pairs.size, -np.inf)
    rows.add(no_less, 0.0, (pairs, u[several], 1.0), (pairs, z[several, None], -1.0))


def _split_freely(rows: Rows, program: Program, columns: _Columns) -> None:
    """Give every expert as many copies as it needs at least, and all of its load to them."""
    u, windows = columns.u, program.windows / program.most
    fewest, most = program.copies()
    rows.add(fewest, most, (columns.expert[:, None], u, 1.0))
    # A copy can take no more than a λ that is within the makespan in hand, which the mean of
    # several is not.
    limit = 1.0 if program.bottlenecks[-1] == 0 else np.inf
    pairs = np.arange(u.size).reshape(u.shape)
    for load, y in zip(windows, columns.y, strict=True):
        rows.add(load, load, (columns.expert[:, None], y, 1.0))
        rows.add(
            np.full(u.size, -np.inf),
            0.0,
            (pairs, y, 1.0),
            (pairs, u, -np.minimum(load, limit * (1 + 1e-9))[:, None]),
        )


def _keep_to_nodes(rows: Rows, program: Program, columns: _Columns) -> None:
    """Give every group one node, and every node equally many groups."""
    u, q = columns.u, columns.q
    if not q.size:
        return
    groups, nodes = q.shape
    rows.add(np.ones(groups), 1.0, (np.arange(groups)[:, None], q, 1.0))
    rows.add(np.full(nodes, groups // nodes), groups // nodes, (np.arange(nodes), q, 1.0))
    pairs = np.arange(u.size).reshape(u.shape)
    home = q[program.group[columns.expert][:, None], program.node]
    rows.add(np.full(u.size, -np.inf), 0.0, (pairs, u, 1.0), (pairs, home, -1.0))
    if program.nodes_alike:
        for first, second in pairwise(range(nodes)):
            for group in range(groups):
                before = q[:group, first]
                rows.add(-np.inf, 0.0, (0, q[group, second], 1.0), (0, before, -1.0))


def _order(rows: Rows, program: Program, columns: _Columns) -> None:
    """Let a GPU have an expert only if the one before has it or a hotter one."""
    for rank in range(min(ORDERED_RANKS, len(program.group))):
        mine, hotter = columns.expert == rank, columns.expert <= rank
        for first, second in program.ordered():
            rows.add(
                -np.inf,
                0.0,
                (0, columns.u[mine, second], 1.0),
                (0, columns.u[hotter, first], -1.0),
            )
