"""`pulp`: METRO's integer program as a PuLP model, solved by any solver that PuLP finds."""

from __future__ import annotations

import functools
import inspect
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt.demand import as_tokens, reject_tokens
from eplb_opt.errors import InvalidTokensError, SolverUnavailableError
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import Solve, Traits
from eplb_opt.routers.exact import (
    NOTHING,
    EngineError,
    Found,
    Pairs,
    Program,
    judge,
    require,
    seconds_left,
)

if TYPE_CHECKING:
    import pulp  # type: ignore[import-untyped]  # PuLP carries no type hints

CBC = ("PULP_CBC_CMD", "COIN_CMD")
CBC_MOST_TOKENS = 10**8 - 1


@dataclass(frozen=True, slots=True)
class Pulp:
    """The program of `eplb_opt.routers.exact` stated in PuLP: to read, to export, to solve.

    PuLP passes on no bound of an unfinished search: a problem stopped by the time limit has only
    the counted one. The value of a finished search is lowered by 1e-6 of itself, or by 1e-4, the
    largest default there is, for a solver whose gap limit PuLP cannot set; then it is raised to an
    integer. CBC hands back eight significant digits, so it is not asked to route an expert of 10^8
    tokens or more.

    Parameters
    ----------
    warm_start
        Start from METRO's greedy answer, which is then also the least that a time limit leaves.
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
        "METRO's integer program, by CBC or any solver that PuLP finds", exact=True, extra="exact"
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
        return judge("pulp", engine, placement, objective, threads, self.warm_start)

    @staticmethod
    def model(
        placement: Placement,
        tokens: ArrayLike,
        objective: Objective | str = "activations",
        layer: int = 0,
    ) -> pulp.LpProblem:
        """Return one problem as a PuLP model, to read, to change, or to write to a file.

        Variables are ``makespan``, ``x_e_g`` and ``y_e_g``, with the ids of an expert and a GPU.

        Parameters
        ----------
        placement
            Where the replicas are.
        tokens
            Int ``[layers, experts]``, or ``[experts]`` for a placement without a layer axis.
        objective
            ``"activations"`` or ``"tokens"``.
        layer
            The layer whose problem it is.

        Raises
        ------
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
        demand = as_tokens(placement, tokens)
        if demand.ndim != 1 + placement.layered:
            raise InvalidTokensError(
                f"a model states one problem: tokens must have no batch axes, not be of shape "
                f"{demand.shape}"
            )
        reject_tokens(placement, demand)
        of_layer = demand.reshape(-1, placement.num_experts)[layer]
        pairs = Pairs.of(placement, layer)
        return _state(Program.of(placement, pairs, of_layer, Objective.of(objective))).model


class _Stated(NamedTuple):
    """A model and its variables; x and y by (expert, GPU), in the program's order of pairs."""

    model: pulp.LpProblem
    makespan: pulp.LpVariable
    x: dict[tuple[int, int], pulp.LpVariable]
    y: dict[tuple[int, int], pulp.LpVariable]


def _state(program: Program) -> _Stated:
    """State the program."""
    import pulp

    tokens = dict(zip(program.live.tolist(), program.tokens.tolist(), strict=True))
    pairs = list(zip(program.live[program.expert].tolist(), program.gpu.tolist(), strict=True))
    at_gpu = {g: [pair for pair in pairs if pair[1] == g] for g in range(program.num_gpus)}
    of_expert = {e: [pair for pair in pairs if pair[0] == e] for e in tokens}

    model = pulp.LpProblem("MIN_EXP_ROUTING", pulp.LpMinimize)
    makespan = model.add_variable("makespan", 0, cat=pulp.LpInteger)
    x = {(e, g): model.add_variable(f"x_{e}_{g}", 0, tokens[e], pulp.LpInteger) for e, g in pairs}
    y = {}
    if program.counts_activations:
        y = {(e, g): model.add_variable(f"y_{e}_{g}", cat=pulp.LpBinary) for e, g in pairs}

    model += makespan
    for g in at_gpu:
        model += pulp.lpSum((y or x)[pair] for pair in at_gpu[g]) <= makespan, f"gpu_{g}"
    for e in tokens:
        model += pulp.lpSum(x[pair] for pair in of_expert[e]) == tokens[e], f"expert_{e}"
    for e, g in y:
        model += x[e, g] <= tokens[e] * y[e, g], f"activates_{e}_{g}"
    return _Stated(model, makespan, x, y)


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
    return Found(taken, value - tolerance * max(1.0, value))


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
        stated.x[pair].setInitialValue(tokens)
        if stated.y:
            stated.y[pair].setInitialValue(int(tokens > 0))


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
