"""`cp-sat`: METRO's integer program, solved by OR-Tools CP-SAT."""

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
    from ortools.sat.python import cp_model


@dataclass(frozen=True, slots=True)
class CpSat:
    """The program of `eplb_opt.routers.exact`, by clause learning in CP-SAT (OR-Tools).

    CP-SAT calculates in 64-bit integers: its proofs are exact at any number of tokens. Gap limits
    are zero, the seed is fixed, and every problem has one worker, so answers repeat.

    Parameters
    ----------
    warm_start
        Hint METRO's greedy answer, which is then also the least that a time limit leaves.

    Notes
    -----
    Importing OR-Tools takes about a second, at the first call, within its time limit.

    Examples
    --------
    >>> from eplb_opt.placement import Placement
    >>> from eplb_opt.routing import solve_routing
    >>> placement = Placement([[0, 1], [0, 2], [1, 3], [2, 3]])
    >>> routing = solve_routing(placement, [4, 4, 4, 4], objective="tokens", method="cp-sat")
    >>> float(routing.makespan), float(routing.bound), int(routing.status)
    (4.0, 4.0, 2)
    """

    traits: ClassVar[Traits] = Traits(
        "METRO's integer program, by OR-Tools CP-SAT", exact=True, extra="exact"
    )

    warm_start: bool = True

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it.

        Raises
        ------
        SolverUnavailableError
            If ortools is not installed.
        """
        require("cp-sat", "ortools")
        return judge("cp-sat", _solve, placement, objective, threads, self.warm_start)


def _solve(program: Program, start: NDArray[np.int64] | None, deadline: float) -> Found:
    """Solve a program with one worker."""
    from ortools.sat.python import cp_model

    model, x = _model(program, start)
    engine = cp_model.CpSolver()
    parameters = engine.parameters
    parameters.num_workers = 1
    parameters.random_seed = 0
    parameters.relative_gap_limit = parameters.absolute_gap_limit = 0.0
    # CP-SAT would take Ctrl-C for a time limit, and leave the process without Python's handler.
    parameters.catch_sigint_signal = False
    parameters.max_time_in_seconds = seconds_left(deadline)
    status = engine.solve(model)
    if status == cp_model.UNKNOWN:
        return Found(None, engine.best_objective_bound)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise EngineError(f"it ended with the status {engine.status_name(status)}")
    taken = np.array([engine.value(tokens) for tokens in x], np.int64)
    return Found(taken, engine.best_objective_bound)


def _model(
    program: Program, start: NDArray[np.int64] | None
) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    """State the program, with a start as its hint; return it with x by pair."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    demand = [int(program.tokens[e]) for e in program.expert]
    x = [model.new_int_var(0, tokens, f"x{pair}") for pair, tokens in enumerate(demand)]
    timed = x
    if program.counts_activations:
        timed = [model.new_bool_var(f"y{pair}") for pair in range(len(x))]
        for tokens, replica, activated in zip(demand, x, timed, strict=True):
            model.add(replica <= tokens * activated)

    most = program.gpu.size if program.counts_activations else int(program.tokens.sum())
    makespan = model.new_int_var(0, most, "makespan")
    for gpu in range(program.num_gpus):
        model.add(sum(timed[pair] for pair in np.flatnonzero(program.gpu == gpu)) <= makespan)
    for expert, tokens in enumerate(program.tokens):
        pairs = np.flatnonzero(program.expert == expert)
        model.add(sum(x[pair] for pair in pairs) == int(tokens))
    model.minimize(makespan)

    if start is not None:
        model.add_hint(makespan, program.makespan(start))
        for replica, tokens in zip(x, start, strict=True):
            model.add_hint(replica, int(tokens))
        if program.counts_activations:
            for activated, tokens in zip(timed, start, strict=True):
                model.add_hint(activated, bool(tokens))
    return model, x
