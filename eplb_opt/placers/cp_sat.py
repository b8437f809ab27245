"""`cp-sat`: the proven placement, by OR-Tools CP-SAT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from eplb_opt.engines import EngineError, new_cp_sat, require, seconds_left
from eplb_opt.placers.base import Placed, PlacementProblem, PlacerTraits
from eplb_opt.placers.exact import ORDERED_RANKS, Found, Program, place
from eplb_opt.status import Proof

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

LARGEST = 1 << 52
"""Integers that a layer's load stands for at most: far finer than `PlacementPlan.status` asks."""


@dataclass(frozen=True, slots=True)
class CpSat:
    """The program of `eplb_opt.placers.exact`, by clause learning in CP-SAT (OR-Tools).

    It fills every slot with distinct copies. CP-SAT calculates in 64-bit integers: integer loads
    are brought to the common denominator of all makespans, then its proofs are exact. Others, and
    those too large for it, are rounded down to 2^-52 of the layer's load, which leaves the bound
    true. Gap limits are zero, the seed is fixed, and every layer has one worker, so answers repeat.

    Notes
    -----
    Importing OR-Tools takes about a second, at the first call, within its time limit.

    Examples
    --------
    >>> from eplb_opt.placing import solve_placement
    >>> load = [600, 560, 120, 120, 20, 10, 10, 10]
    >>> plan = solve_placement(load, num_gpus=8, slots_per_gpu=2, method="cp-sat", split="free")
    >>> float(plan.makespan), int(plan.status)
    (181.25, 2)
    """

    traits: ClassVar[PlacerTraits] = PlacerTraits(
        "the integer program, by OR-Tools CP-SAT",
        takes=frozenset({"stop"}),
        exact=True,
        extra="exact",
    )

    def place(self, problem: PlacementProblem) -> Placed:
        """Place the experts of all layers.

        Raises
        ------
        SolverUnavailableError
            If ortools is not installed.
        ValueError, InfeasibleError, EplbError
            See `eplb_opt.placers.exact.place`.
        """
        require("cp-sat", "ortools")
        return place(problem, Proof.CP_SAT, solve)


def solve(program: Program, deadline: float) -> Found:
    """Solve a program with one worker."""
    from ortools.sat.python import cp_model

    grid = _Grid.of(program)
    stated = _state(program, grid)
    engine = new_cp_sat(seconds_left(deadline))
    if not program.splits_freely:
        # Linear relaxations say no more than the counted bound does, and take most of the time.
        engine.parameters.linearization_level = 0
    status = engine.solve(stated.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        raise EngineError(f"it ended with the status {engine.status_name(status)}")
    bound = grid.makespan(engine.best_objective_bound, len(stated.bottlenecks))
    if status == cp_model.UNKNOWN:
        return Found(None, bound)
    held = np.zeros((len(program.group), len(program.room)), np.bool_)
    for expert, of_gpu in zip(stated.expert, stated.u, strict=True):
        held[expert] |= [engine.boolean_value(u) for u in of_gpu]
    return Found(held, bound)


@dataclass(frozen=True, slots=True)
class _Grid:
    """The integers that stand for loads: load * `steps`, rounded down.

    Attributes
    ----------
    steps
        Integers per unit of load.
    short
        What a makespan may be smaller by than the integer that the engine finds for it: a GPU's
        share of freely split integers is rounded up, unless every share is one.
    """

    steps: Fraction
    short: int

    @classmethod
    def of(cls, program: Program) -> _Grid:
        """Return the coarsest grid that is exact, or a fine one if there is none."""
        total = Fraction(float(program.windows.sum(axis=1).max()))
        exact = program.denominator
        if not (program.windows % 1).any() and exact * total <= LARGEST:
            return cls(Fraction(exact), 0)
        _, exponent = math.frexp(total)
        return cls(LARGEST / Fraction(2) ** exponent, int(program.splits_freely))

    def integer(self, load: float | Fraction) -> int:
        """Return the integer that stands for a load."""
        return math.floor(Fraction(load) * self.steps)

    def makespan(self, objective: float, bottlenecks: int) -> float:
        """Return the least makespan that a sum of λ can stand for; -inf for none at all."""
        if not math.isfinite(objective):
            return -math.inf
        return float((round(objective) - self.short * bottlenecks) / self.steps / bottlenecks)


class _Stated(NamedTuple):
    """A model and its variables: λ; for every choice its expert, and u by GPU."""

    model: cp_model.CpModel
    bottlenecks: list[cp_model.IntVar]
    expert: list[int]
    u: list[list[cp_model.IntVar]]

    def held(self, expert: int, gpu: int) -> list[cp_model.IntVar]:
        """Return the variables of which one is true where a GPU holds an expert."""
        return [us[gpu] for of, us in zip(self.expert, self.u, strict=True) if of == expert]


def _state(program: Program, grid: _Grid) -> _Stated:
    """State the program, and hint the start."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    expert, copies = (of.tolist() for of in program.choices())
    gpus = range(len(program.room))
    u = [[model.new_bool_var("") for _ in gpus] for _ in expert]
    stated = _Stated(model, _bottlenecks(model, program, grid), expert, u)

    start = program.in_order()
    number = start.sum(axis=1).tolist()
    for of, count, us in zip(expert, copies, u, strict=True):
        chosen = program.splits_freely or count == number[of]
        for gpu, variable in enumerate(us):
            model.add_hint(variable, bool(chosen and start[of, gpu]))
    for gpu, room in enumerate(program.room.tolist()):
        model.add(cp_model.LinearExpr.sum([us[gpu] for us in u]) == room)
    if program.splits_freely:
        _split_freely(stated, program, grid)
    else:
        _count_copies(stated, copies, number)
        _split_equally(stated, program, grid, copies)
    _keep_to_nodes(stated, program)
    _order(stated, program)
    return stated


def _bottlenecks(model: cp_model.CpModel, program: Program, grid: _Grid) -> list[cp_model.IntVar]:
    """Minimise the sum of λ between the bound and the makespan in hand."""
    number = int(program.bottlenecks[-1]) + 1
    scale = grid.steps * number
    least = math.ceil(Fraction(program.counted) * scale * Fraction(1 - 1e-12)) - number
    most = math.floor(Fraction(program.most) * scale * Fraction(1 + 1e-12)) + number
    bottlenecks = [model.new_int_var(0, most, "") for _ in range(number)]
    total = model.new_int_var(max(0, least), most, "")
    model.add(sum(bottlenecks) == total)
    model.minimize(total)
    return bottlenecks


def _count_copies(stated: _Stated, copies: list[int], number: list[int]) -> None:
    """Give every expert one number of copies, and as many copies."""
    from ortools.sat.python import cp_model

    model = stated.model
    for expert, start in enumerate(number):
        own = [at for at, of in enumerate(stated.expert) if of == expert]
        if len(own) == 1:
            model.add(cp_model.LinearExpr.sum(stated.u[own[0]]) == copies[own[0]])
            continue
        counted = [model.new_bool_var("") for _ in own]
        model.add_exactly_one(counted)
        for at, z in zip(own, counted, strict=True):
            model.add(cp_model.LinearExpr.sum(stated.u[at]) == copies[at] * z)
            model.add_hint(z, copies[at] == start)
            for u in stated.u[at]:
                model.add_implication(u, z)


def _split_equally(stated: _Stated, program: Program, grid: _Grid, copies: list[int]) -> None:
    """Let no λ be below a GPU's load when copies share equally."""
    from ortools.sat.python import cp_model

    for load, bottleneck in zip(program.windows.tolist(), program.bottlenecks, strict=True):
        shares = [
            grid.integer(Fraction(load[of]) / count)
            for of, count in zip(stated.expert, copies, strict=True)
        ]
        for gpu in range(len(program.room)):
            of_gpu = [us[gpu] for us in stated.u]
            taken = cp_model.LinearExpr.weighted_sum(of_gpu, shares)
            stated.model.add(taken <= stated.bottlenecks[bottleneck])


def _split_freely(stated: _Stated, program: Program, grid: _Grid) -> None:
    """Give every expert the copies that it needs, and all of its load to them."""
    from ortools.sat.python import cp_model

    model = stated.model
    for us, fewest, most in zip(stated.u, *(of.tolist() for of in program.copies()), strict=True):
        model.add_linear_constraint(cp_model.LinearExpr.sum(us), fewest, most)
    for load, bottleneck in zip(program.windows.tolist(), program.bottlenecks, strict=True):
        taken: list[list[cp_model.IntVar]] = [[] for _ in program.room]
        for us, whole in zip(stated.u, map(grid.integer, load), strict=True):
            shares = [model.new_int_var(0, whole, "") for _ in us]
            model.add(cp_model.LinearExpr.sum(shares) == whole)
            for u, share, of_gpu in zip(us, shares, taken, strict=True):
                model.add(share <= whole * u)
                of_gpu.append(share)
        for of_gpu in taken:
            model.add(cp_model.LinearExpr.sum(of_gpu) <= stated.bottlenecks[bottleneck])


def _keep_to_nodes(stated: _Stated, program: Program) -> None:
    """Give every group one node, and every node equally many groups."""
    model, nodes = stated.model, range(program.num_nodes)
    if len(nodes) == 1:
        return
    groups = range(program.num_groups)
    q = [[model.new_bool_var("") for _ in nodes] for _ in groups]
    for of_group in q:
        model.add_exactly_one(of_group)
    for node in nodes:
        model.add(sum(q[group][node] for group in groups) == len(groups) // len(nodes))
    for of, us in zip(stated.expert, stated.u, strict=True):
        for node, u in zip(program.node.tolist(), us, strict=True):
            model.add_implication(u, q[program.group[of]][node])
    if program.nodes_alike:
        for group in groups:
            for first, second in pairwise(nodes):
                model.add_bool_or([~q[group][second], *(q[j][first] for j in range(group))])


def _order(stated: _Stated, program: Program) -> None:
    """Let a GPU have an expert only if the one before has it or a hotter one.

    With free split it costs more than it saves.
    """
    if program.splits_freely:
        return
    for first, second in program.ordered():
        hotter: list[cp_model.IntVar] = []
        for rank in range(min(ORDERED_RANKS, len(program.group))):
            hotter += stated.held(rank, first)
            for u in stated.held(rank, second):
                stated.model.add_bool_or([~u, *hotter])
