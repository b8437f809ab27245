"""`pulp`: the integer program as a PuLP model, solved by any solver that PuLP finds."""

from __future__ import annotations

import functools
import inspect
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt.demand import as_tokens, reject_tokens
from eplb_opt.engines import EngineError, require, seconds_left
from eplb_opt.errors import InvalidTokensError, SolverUnavailableError
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import Solve, Traits
from eplb_opt.routers.exact import NOTHING, Found, Pairs, Program, in_units, judge
from eplb_opt.status import Proof

if TYPE_CHECKING:
    import pulp  # type: ignore[import-untyped]  # PuLP carries no type hints

CBC = ("PULP_CBC_CMD", "COIN_CMD")
CBC_MOST_TOKENS = 10**8 - 1


@dataclass(frozen=True, slots=True)
class Pulp:
    """The program of `eplb_opt.routers.exact` stated in PuLP: to read, to export, to solve.

    PuLP passes on no bound of an unfinished search: a problem stopped by the time limit has only
    the counted one. The value of a finished search is lowered by 1e-6 of itself, or by 1e-4, the
    largest default there is, for a solver whose gap limit PuLP cannot set; then it is raised to a
    value that occurs. CBC hands back eight significant digits, so it is not asked to route an
    expert of 10^8 tokens or more.

    Parameters
    ----------
    warm_start
        Start from a good answer, which is then also the least that a time limit leaves.
        PuLP passes a start on to CBC, not to HiGHS.
    solver
        PuLP's name of a solver: ``"PULP_CBC_CMD"`` (CBC, which comes with PuLP), ``"HiGHS"``,
        ``"GUROBI"`` and others.

    Examples
    --------
    >>> from eplb_opt.routing import solve_routing
    >>> placement = Placement([[0, 1], [0, 2], [1, 3], [2, 3]])
    >>> routing = solve_routing(placement, [4, 4, 4, 4], method="pulp:solver=HiGHS")
    >>> float(routing.makespan), float(routing.bound), int(routing.status)
    (1.0, 1.0, 2)
    """

    traits: ClassVar[Traits] = Traits(
        "the integer program, by CBC or any solver that PuLP finds",
        objectives="pieces that are not curves",
        solves=lambda objective: not objective.curves,
        exact=True,
        extra="exact",
    )

    warm_start: bool = True
    solver: str = "PULP_CBC_CMD"

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it.

        Raises
        ------
        SolverUnavailableError
            If PuLP is not installed. Whether it finds the solver turns out at the first problem.
        """
        require("pulp", "pulp")
        engine = functools.partial(_solve, self.solver)
        return judge(Proof.PULP, engine, placement, objective, threads, self.warm_start)

    @staticmethod
    def model(
        placement: Placement,
        tokens: ArrayLike,
        objective: Objective | str = "activations",
        layer: int = 0,
    ) -> pulp.LpProblem:
        """Return one problem as a PuLP model, to read, to change, or to write to a file.

        Variables are ``makespan``, ``x_e_g``, ``y_e_g`` and ``z_e_g`` (tokens, whether there are
        any, tiles), with the ids of an expert and a GPU. ``model.writeLP`` and ``model.writeMPS``
        export it.

        Parameters
        ----------
        placement
            Where the replicas are.
        tokens
            Int ``[layers, experts]``, or ``[experts]`` for a placement without a layer axis.
        objective
            `Objective` without curves, or its name.
        layer
            The layer whose problem it is.

        Raises
        ------
        ValueError
            An objective with a curve.
        InvalidTokensError, InfeasibleError
            As `eplb_opt.solve_routing` does; also for tokens with batch axes.

        Examples
        --------
        >>> model = Pulp.model(Placement([[0, 1], [0, -1]]), [3, 2])
        >>> print(model.get_constraint_by_name("expert_0"))
        x_0_0 + x_0_1 = 3.0
        >>> [row.name for row in model.constraints()][:6]
        ['gpu_0', 'gpu_1', 'expert_0', 'expert_1', 'activates_0_0', 'activates_0_1']
        """
        priced = Objective.of(objective)
        if priced.curves:
            raise ValueError("a PuLP model cannot hold a curve; cp-sat takes it")
        demand = as_tokens(placement, tokens)
        if demand.ndim != 1 + placement.layered:
            raise InvalidTokensError(
                f"a model states one problem: tokens must have no batch axes, not be of shape "
                f"{demand.shape}"
            )
        reject_tokens(placement, demand)
        of_layer = demand.reshape(-1, placement.num_experts)[layer]
        pairs = Pairs.of(placement, layer)
        program = Program.of(placement, pairs, of_layer, priced, fold=False)
        return _state(program).model


class _Stated(NamedTuple):
    """A model and its variables; x, y and z by (expert, GPU), in the program's order of pairs.

    Without splits x and z are multiples of y.
    """

    model: pulp.LpProblem
    makespan: pulp.LpVariable
    x: dict[tuple[int, int], Any]
    y: dict[tuple[int, int], pulp.LpVariable]
    z: dict[tuple[int, int], Any]


def _state(program: Program) -> _Stated:
    """State the program."""
    import pulp

    objective, split = program.objective, program.objective.split
    tokens = dict(zip(program.live.tolist(), program.tokens.tolist(), strict=True))
    pairs = list(zip(program.live[program.expert].tolist(), program.gpu.tolist(), strict=True))
    room = dict(zip(pairs, program.room().tolist(), strict=True))
    at_gpu = {g: [pair for pair in pairs if pair[1] == g] for g in range(program.num_gpus)}
    of_expert = {e: [pair for pair in pairs if pair[0] == e] for e in tokens}

    model = pulp.LpProblem("MIN_MAKESPAN", pulp.LpMinimize)
    times = pulp.LpInteger if program.has_integer_times else pulp.LpContinuous
    most = program.most * (1 + 1e-9) if math.isfinite(program.most) else None
    makespan = model.add_variable("makespan", 0, most, times)
    y = {}
    if program.has_y:
        y = {(e, g): model.add_variable(f"y_{e}_{g}", cat=pulp.LpBinary) for e, g in pairs}
    x, z = {}, {}
    for e, g in pairs:
        if split:
            x[e, g] = model.add_variable(f"x_{e}_{g}", 0, room[e, g], pulp.LpInteger)
        else:
            x[e, g] = tokens[e] * y[e, g]
        if program.has_z:
            z[e, g] = model.add_variable(f"z_{e}_{g}", 0, cat=pulp.LpInteger)
        elif objective.has_tiles:
            z[e, g] = -(-tokens[e] // objective.tile_tokens) * y[e, g]

    model += makespan
    slowness, fixed = program.slowness.tolist(), program.fixed_counts()
    for k, piece in enumerate(objective.linear):
        for g, at in at_gpu.items():
            time = piece.offset
            for price, of, alone in (
                (piece.activation, y, fixed.activated),
                (piece.tile, z, fixed.tiles),
                (piece.token, x, fixed.tokens),
            ):
                if price:
                    time += price * (pulp.lpSum(of[pair] for pair in at) + int(alone[g]))
            name = f"gpu_{g}" if len(objective.linear) == 1 else f"gpu_{g}_piece_{k}"
            model += slowness[g] * time <= makespan, name
    for e in tokens:
        if split:
            model += pulp.lpSum(x[pair] for pair in of_expert[e]) == tokens[e], f"expert_{e}"
        else:
            model += pulp.lpSum(y[pair] for pair in of_expert[e]) == 1, f"expert_{e}"
    if split:
        for e, g in y:
            model += x[e, g] <= room[e, g] * y[e, g], f"activates_{e}_{g}"
        for e, g in z:
            model += x[e, g] <= objective.tile_tokens * z[e, g], f"tiles_{e}_{g}"
        for e, g in z if y else ():
            model += y[e, g] <= z[e, g], f"starts_a_tile_{e}_{g}"
    for gpus in program.twins():
        for a, b in pairwise(gpus.tolist()):
            sizes = [pulp.lpSum((y or x)[pair] for pair in at_gpu[g]) for g in (a, b)]
            model += sizes[1] <= sizes[0], f"twins_{a}_{b}"
    return _Stated(model, makespan, x, y, z)


def _solve(
    solver_name: str, program: Program, start: NDArray[np.int64] | None, deadline: float
) -> Found:
    """Solve a program in one thread of a solver."""
    import pulp

    accepted = _options(solver_name)
    most = int(program.tokens.max())
    if solver_name in CBC and most > CBC_MOST_TOKENS:
        raise EngineError(
            f"CBC hands back eight digits and cannot route {most} tokens of one expert; use "
            f"another solver, highs or cp-sat"
        )
    program, unit = in_units(program)
    stated = _state(program)
    seconds = seconds_left(deadline)
    if seconds == 0:
        return NOTHING
    wanted = {
        "msg": False,
        "threads": 1,
        "gapRel": 0,
        "gapAbs": 0,
        "timeLimit": seconds if math.isfinite(seconds) else None,
        "warmStart": start is not None,
        "_skip_v4_deprecation": True,  # of PULP_CBC_CMD, which PuLP 4 drops
    }
    given = {option: value for option, value in wanted.items() if option in accepted}
    solver = getattr(pulp, solver_name)(**given)
    if solver_name == "HiGHS":
        _hush(solver)
    if start is not None:
        _set_start(stated, program, start)
    try:
        stated.model.solve(solver)
    except pulp.PulpError as error:
        raise EngineError(f"{solver_name}: {error}") from error

    # PuLP's status calls a search that the time limit ended optimal; its sol_status does not.
    outcome = stated.model.sol_status
    if outcome == pulp.LpSolutionNoSolutionFound:
        return NOTHING
    if outcome not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise EngineError(f"{solver_name} ended with {pulp.LpSolution[outcome]!r}")
    taken = np.array([variable.value() for variable in stated.x.values()], np.float64)
    if outcome == pulp.LpSolutionIntegerFeasible:
        return Found(taken, -math.inf)
    value = stated.makespan.value()
    tolerance = 1e-6 if "gapRel" in accepted else 1e-4
    return Found(taken, unit * (value - tolerance * max(1.0, value)))


@functools.cache
def _options(solver_name: str) -> frozenset[str]:
    """Return the options that a solver takes by name.

    Raises
    ------
    SolverUnavailableError
        If PuLP does not find the solver.
    """
    import pulp

    found = pulp.listSolvers(onlyAvailable=True)
    if solver_name not in found:
        raise SolverUnavailableError(
            f"PuLP finds no solver {solver_name!r} here; it finds: {', '.join(found)}"
        )
    return frozenset(inspect.signature(getattr(pulp, solver_name)).parameters)


def _set_start(stated: _Stated, program: Program, start: NDArray[np.int64]) -> None:
    stated.makespan.setInitialValue(program.makespan(start))
    for pair, tokens in zip(stated.x, start.tolist(), strict=True):
        if program.objective.split:
            stated.x[pair].setInitialValue(tokens)
        if stated.y:
            stated.y[pair].setInitialValue(int(tokens > 0))
        if program.has_z:
            stated.z[pair].setInitialValue(-(-tokens // program.objective.tile_tokens))


def _hush(solver: Any) -> None:
    """Keep PuLP's HiGHS from printing a banner as it makes its engine, before it can be told."""
    make = solver.createAndConfigureSolver

    def make_quietly(model: pulp.LpProblem) -> None:
        with _no_stdout():
            make(model)

    solver.createAndConfigureSolver = make_quietly


_STDOUT = threading.Lock()


@contextmanager
def _no_stdout() -> Iterator[None]:
    """Drop what the process writes to its standard output, below Python too.

    HiGHS prints its banner from C, so that only the file descriptor can hold it back, and on the
    standard output it would spoil what a program writes there for others to read, as ``eplb-opt gap
    --json -`` does. The price: what other threads print in the same milliseconds is dropped too.
    """
    with _STDOUT, open(os.devnull, "wb") as null:
        kept = os.dup(1)
        os.dup2(null.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
