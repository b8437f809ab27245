"""`optimal`: the best routing under any objective, and how far it is proven."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb_opt.engines import EngineError, at_a_time, installed, seconds_left
from eplb_opt.objective import Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.routers import cp_sat, highs
from eplb_opt.routers.base import Context, RoutingMethod, Solve, Traits
from eplb_opt.routers.exact import (
    NOTHING,
    Engine,
    Found,
    Program,
    by_problem,
    deadline_of,
    failure,
    pairs_of,
)
from eplb_opt.routers.flow import Flow
from eplb_opt.routers.makespan import Makespan
from eplb_opt.routers.matching import Matching
from eplb_opt.status import Proof, Status

if TYPE_CHECKING:
    from eplb_opt.routing import Routing

WORK = 20_000
"""Of the search; wide gaps get up to 25 times as much."""

BELOW = 1 - 1e-8
"""Less than a makespan in hand: what is worth searching for."""


@dataclass(frozen=True, slots=True)
class Optimal:
    """Matching or flow where the objective allows; else search, and a proof of what stays open.

    Activated replicas alone are minimised by `matching`, tokens alone by `flow`. For any other
    objective the search gives a routing and a bound, and where they differ an integer program is
    solved, by HiGHS or CP-SAT, those of them that are installed. Where every piece counts activated
    replicas or tokens, not both, it is not the program of `eplb_opt.routers.exact` but a question
    in integers: activating no more than allows a better makespan than that in hand, how few tokens
    can the fullest GPU take? Too many: then that in hand is the optimum. Fewer: then there is a
    better routing, and perhaps the next question, at a lower level of activated replicas.

    Parameters
    ----------
    seconds
        For each problem that the search leaves open. A `TimeLimit` is over all problems of a call.

    Raises
    ------
    ValueError
        Seconds that are negative or NaN.

    Notes
    -----
    The search is polynomial, some 10 ms for a problem that it leaves open. The integer programs are
    not; each of two engines is first tried for an eighth of the seconds.

    Under a curve two slots of an expert on one GPU can take less time than one. The search uses
    one, and its bound holds for both; the integer program has both.

    Examples
    --------
    >>> from eplb_opt.objective import Piece
    >>> from eplb_opt.routing import solve_routing
    >>> objective = Objective(pieces=(Piece(activation=15), Piece(token=0.1)))
    >>> placement = Placement([[0, 1], [0, 2]])
    >>> routing = solve_routing(placement, [400, 30, 10], objective=objective, method=Optimal())
    >>> float(routing.makespan), float(routing.bound), int(routing.status)
    (30.0, 30.0, 2)
    """

    traits: ClassVar[Traits] = Traits("the optimum: compiled, or search and proof", exact=True)

    seconds: float = 10.0

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise ValueError(f"optimal: seconds must be at least 0, not {self.seconds}")

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        compiled = compiled_for(objective)
        if compiled is not None:
            return compiled().bind(placement, objective, threads)
        search = Makespan(work=WORK).bind(placement, objective, threads)
        pairs = pairs_of(placement, objective)

        def solve(tokens: NDArray[np.int64], out: Routing, context: Context) -> None:
            deadline = deadline_of(context)
            search(tokens, out, context)
            demand, routed, makespan, bound, status, proved_by = by_problem(tokens, out)
            by_gpu = (out.activated, out.certificate)
            activated, certificate = (a.reshape(len(demand), -1) for a in by_gpu)

            def prove(at: int) -> None:
                of_layer = pairs[at % placement.num_layers]
                program = Program.of(placement, of_layer, demand[at], objective)
                taken = of_layer.taken(routed[at])[program.pair]
                start = _Known(taken, float(makespan[at]), float(bound[at]), Proof(proved_by[at]))
                until = min(deadline, time.monotonic() + self.seconds)
                try:
                    # Under a curve the search does not bound by the experts without a choice.
                    known = start.joined(program, NOTHING, program.counted_bound(), Proof.COUNT)
                    known = _closed(program, known, until)
                except EngineError as error:
                    raise failure(out, at, error) from error
                if known.bound > start.bound:
                    bound[at], proved_by[at] = known.bound, known.proof
                    certificate[at] = False
                if known.makespan < start.makespan:
                    shares = program.routed(known.taken)
                    routed[at], activated[at] = shares.reshape(-1), (shares > 0).sum(axis=1)
                    makespan[at] = known.makespan
                status[at] = Status.FEASIBLE if known.is_open else Status.OPTIMAL

            at_a_time(threads, prove, np.flatnonzero(status != Status.OPTIMAL).tolist())

        return solve


def compiled_for(objective: Objective) -> type[RoutingMethod] | None:
    """Return the compiled method that proves any problem of an objective, if there is one."""
    if objective.counts_activations:
        return Matching
    return Flow if objective.counts_tokens else None


class _Known(NamedTuple):
    """A problem's best answer and bound so far, and who proved that."""

    taken: NDArray[np.int64]
    makespan: float
    bound: float
    proof: Proof

    @property
    def is_open(self) -> bool:
        return self.bound < self.makespan

    def joined(self, program: Program, found: Found, bound: float, proof: Proof) -> _Known:
        """Return what is known with what an engine found."""
        known = self
        if found.taken is not None:
            taken = program.rounded(found.taken)
            makespan = program.makespan(taken)
            if makespan < known.makespan:
                known = known._replace(taken=taken, makespan=makespan)
        if bound > known.bound:
            known = known._replace(bound=program.raised(bound), proof=proof)
        if known.bound > known.makespan:
            raise EngineError(
                f"it proves a makespan of {known.bound:.10g} or more where {known.makespan:.10g} "
                "is in hand"
            )
        return known


def _closed(program: Program, known: _Known, deadline: float) -> _Known:
    """Ask the engines in turn until the problem is closed or the time is over."""
    attempts = list(_attempts(program))
    # Of two engines each is tried for a while before the first has half of the time that is left:
    # what one does not find in seconds the other often does at once.
    shares = (1 / 8, 1 / 8, 1 / 2, 1.0) if len(attempts) == 2 else (1.0,)
    for (proof, engine, ask), share in zip(attempts * 2, shares, strict=False):
        until = time.monotonic() + seconds_left(deadline) * share
        further = True
        while further and known.is_open and seconds_left(until) > 0:
            before = (known.makespan, known.bound)
            try:
                known = known.joined(program, *ask(program, known, engine, until), proof)
            except EngineError as error:
                error.by = proof
                raise
            further = (known.makespan, known.bound) != before
    return known


Question = Callable[[Program, _Known, Engine, float], tuple[Found, float]]
"""Ask an engine for better than what is known by a deadline; return its answer and the bound."""


def _attempts(program: Program) -> Iterator[tuple[Proof, Engine, Question]]:
    """Yield the engines to ask in turn, and what."""
    solvers = [(Proof.HIGHS, highs.solve, "highspy"), (Proof.CP_SAT, cp_sat.solve, "ortools")]
    question = _fewest_tokens
    if not _is_by_levels(program.objective):
        # Of the whole program CP-SAT mostly finds the better answers and bounds; and it alone takes
        # curves.
        solvers, question = solvers[:0:-1] if program.objective.curves else solvers[::-1], _whole
    for proof, solve, package in solvers:
        if installed(package):
            yield proof, solve, question


def _is_by_levels(objective: Objective) -> bool:
    """Say whether every piece counts activated replicas alone or tokens alone, one the latter."""
    alone = all(not p.tile and not (p.activation and p.token) for p in objective.linear)
    some = any(p.token for p in objective.linear)
    return alone and some and objective.split and not objective.curves


def _whole(program: Program, known: _Known, engine: Engine, until: float) -> tuple[Found, float]:
    """Ask for the smallest makespan."""
    start = program.in_order(known.taken)
    found = engine(replace(program, most=known.makespan), start, until)
    return found, found.bound


def _fewest_tokens(
    program: Program, known: _Known, engine: Engine, until: float
) -> tuple[Found, float]:
    """Ask for the fewest tokens on the fullest GPU that allow less than the makespan in hand."""
    objective, below = program.objective, known.makespan * BELOW
    by_tokens = tuple(piece for piece in objective.linear if piece.token)
    others = tuple(piece for piece in objective.linear if not piece.token)
    question = program
    if others:
        slots = program.fixed.shape[1]
        levels = [_most(_time_of(others, 0, slow), slots, below) for slow in program.slowness]
        question = replace(program, most_activated=np.array(levels))
    if objective.slowness is not None:
        question = replace(question, objective=replace(objective, pieces=by_tokens), most=below)
        found = engine(question, None, until)
        return found, min(found.bound, below)

    # On equal GPUs the time is that of the number of tokens, which is an integer.
    time_of = _time_of(by_tokens, 2, 1.0)
    most = _most(time_of, int(program.tokens.sum() + program.fixed.sum()), below)
    counted = replace(objective, pieces=(Piece(token=1),))
    found = engine(replace(question, objective=counted, most=float(most)), None, until)
    fewest = max(0, math.ceil(found.bound)) if math.isfinite(found.bound) else 0
    return found, min(time_of(fewest), below)


def _time_of(pieces: Sequence[Piece], kind: int, slowness: float) -> Callable[[int], float]:
    """Return the time of a GPU by one kind of count: activated replicas (0), tiles or tokens."""

    def time_of(count: int) -> float:
        counts = [count if at == kind else 0 for at in range(3)]
        return float(slowness * max(piece.time(*counts) for piece in pieces))

    return time_of


def _most(time_of: Callable[[int], float], most: int, below: float) -> int:
    """Return the largest count up to `most` whose time is not above `below`; -1 if none is."""
    return bisect.bisect_right(range(most + 1), below, key=time_of) - 1
