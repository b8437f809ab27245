"""`optimal`: the best routing under any objective, and how far it is proven."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.engines import EngineError, at_a_time, installed, seconds_left
from eplb_opt.objective import Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.pricing import core_pricing
from eplb_opt.routers import cp_sat, highs, patterns
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

WORK = 100_000
"""Of the search."""

TURNS, TURN = 12, 1_000_000
"""Times that an answer is annealed, and links each time: some 100 ms."""

NODES, NODES_A_SECOND = 10_000_000, 1e7
"""Of the filling of GPU after GPU, for a target, and what it may count on."""

LOOKS, LOOKS_A_SECOND = 1_000_000_000, 1.2e8
"""At patterns, in the search of how GPUs serve experts, and what it may count on."""

FEW = 4
"""Activations to spare: with more of them that search is long, and other proofs are quicker."""

CLOSE = 5e-5
"""Of the makespan: nearer targets are not tried where one below them was passed over."""

BELOW = 1 - 1e-8
"""Less than a makespan in hand: what is worth searching for."""


@dataclass(frozen=True, slots=True)
class Optimal:
    """Matching or flow where the objective allows; else search, and a proof of what stays open.

    Activated replicas alone are minimised by `matching`, tokens alone by `flow`. For any other
    objective the search gives a routing and a bound, and where they differ an integer program is
    solved, by HiGHS or CP-SAT, those of them that are installed.

    Where every piece counts activated replicas or tokens, not both, that is not the program of
    `eplb_opt.routers.exact` but questions in integers: a target makespan allows every GPU so many
    activated replicas and so many tokens. The answer is annealed; then less than the makespan in
    hand is the target, and then what lies halfway to the bound. Each is met or refuted, by filling
    GPU after GPU with whole experts, which is quick where no activation is to spare, and by CP-SAT.
    Where few are, a search over what every GPU can serve meets or refutes targets from halfway on,
    and a linear program over the same refutes others (`eplb_opt.routers.patterns`). HiGHS is asked
    for the fewest tokens, which it finds where much can be split.

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
    The search is polynomial, some 10 ms for a problem that it leaves open, and annealing takes a
    second. The rest is not: what comes to no end in its share of the seconds is left for the next.

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
        pricing = core_pricing(objective, placement.num_gpus)

        def solve(tokens: NDArray[np.int64], out: Routing, context: Context) -> None:
            deadline = deadline_of(context)
            search(tokens, out, context)
            demand, routed, makespan, bound, status, proved_by = by_problem(tokens, out)
            by_gpu = (out.activated, out.certificate)
            activated, certificate = (a.reshape(len(demand), -1) for a in by_gpu)

            def prove(at: int) -> None:
                layer = at % placement.num_layers
                of_layer = pairs[layer]
                program = Program.of(placement, of_layer, demand[at], objective)
                taken = of_layer.taken(routed[at])[program.pair]
                core = _Core(placement.core, layer, demand[at], pricing)
                searched = float(bound[at]), Proof(proved_by[at])
                start = _Known(taken, float(makespan[at]), *searched, searched)
                until = min(deadline, time.monotonic() + self.seconds)
                try:
                    # Under a curve the search does not bound by the experts without a choice.
                    known = start.joined(program, NOTHING, program.counted_bound(), Proof.COUNT)
                    known = _closed(program, core, known, until)
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


class _Core(NamedTuple):
    """A problem as the compiled core takes it."""

    placement: _core.Placement
    layer: int
    tokens: NDArray[np.int64]
    pricing: _core.Pricing


class _Known(NamedTuple):
    """A problem's best answer and bound so far, who proved that, and what the search had proven."""

    taken: NDArray[np.int64]
    makespan: float
    bound: float
    proof: Proof
    searched: tuple[float, Proof]

    @property
    def is_open(self) -> bool:
        return self.bound < self.makespan

    def joined(self, program: Program, found: Found, bound: float, proof: Proof) -> _Known:
        """Return what is known with what was found, of which an answer counts more than a bound.

        HiGHS 1.16 was seen to prove 1505 tokens where 1504 are possible: with presolve, at the
        tolerance of 1e-9. Such a bound is forgotten, with what else engines may have proven.
        """
        known = self
        if found.taken is not None:
            taken = program.rounded(found.taken)
            makespan = program.makespan(taken)
            if makespan < known.makespan:
                known = known._replace(taken=taken, makespan=makespan)
        if known.bound < bound <= known.makespan:
            known = known._replace(bound=program.raised(bound), proof=proof)
        if known.bound > known.makespan:
            bound, proof = known.searched
            known = known._replace(bound=bound, proof=proof)
        return known


Fit = Callable[[_Known, float, float], Found]
"""Find an answer within a target by a deadline, or prove that there is none: a bound above it."""

Search = Callable[
    [_core.Placement, int, NDArray[np.int64], NDArray[np.int64], _core.Pricing, float, int],
    bool | None,
]
"""Of the compiled core, for a target: how it is met, written into what is routed."""

Question = Callable[[Program, _Known, Engine, float], tuple[Found, float]]
"""Ask an engine for better than what is known by a deadline; return its answer and the bound."""


class _Attempt(NamedTuple):
    """A way to a better answer or bound, for a share of the time that is left; who proves by it."""

    share: float
    proof: Proof
    work: Callable[[Proof, _Known, float], _Known]


def _closed(program: Program, core: _Core, known: _Known, deadline: float) -> _Known:
    """Try one thing after the other until the problem is closed or the time is over."""
    for share, proof, work in _attempts(program, core):
        if known.is_open and seconds_left(deadline) > 0:
            try:
                known = work(proof, known, time.monotonic() + seconds_left(deadline) * share)
            except EngineError as error:
                error.by = proof
                raise
    return known


def _attempts(program: Program, core: _Core) -> Iterator[_Attempt]:
    """Yield what to try in turn."""
    objective = program.objective
    if _is_by_levels(objective):
        if objective.slowness is None and len(objective.pieces) <= 2:
            yield _Attempt(1 / 4, Proof.NONE, partial(_refined, program, core))
            fill = partial(_filled, program, core)
            yield _Attempt(1 / 4, Proof.BRANCHING, partial(_bisected, program, fill))
            if any(piece.activation for piece in objective.linear) and installed("highspy"):
                refute = partial(_fitted, program, patterns.refute)
                yield _Attempt(1 / 4, Proof.HIGHS, partial(_refuted, program, refute))
            search = partial(_patterned, program, core)
            yield _Attempt(2 / 3, Proof.BRANCHING, partial(_refuted, program, search))
        shares: tuple[float, ...] = (1 / 8, 2 / 3, 1 / 4, 1.0)
        fit = partial(_fitted, program, cp_sat.fit)
        engines = [
            (Proof.HIGHS, partial(_asked, program, _fewest_tokens, highs.solve), "highspy"),
            (Proof.CP_SAT, partial(_bisected, program, fit), "ortools"),
        ]
    else:
        # Of the whole program CP-SAT mostly finds the better answers and bounds; and it alone takes
        # curves.
        shares = (1 / 8, 1 / 8, 1 / 2, 1.0)
        engines = [
            (Proof.CP_SAT, partial(_asked, program, _least_makespan, cp_sat.solve), "ortools"),
            (Proof.HIGHS, partial(_asked, program, _least_makespan, highs.solve), "highspy"),
        ][: 1 if objective.curves else 2]
    # Of two engines each is tried for a while before they have what time is left: what one does not
    # find in seconds the other often does at once.
    works = [(proof, work) for proof, work, package in engines if installed(package)]
    if len(works) == 1:
        shares = (1.0,)
    for share, (proof, work) in zip(shares, works * 2, strict=False):
        yield _Attempt(share, proof, work)


def _refined(program: Program, core: _Core, _: Proof, known: _Known, until: float) -> _Known:
    """Anneal the answer in hand, each time anew."""
    for turn in range(TURNS):
        if known.is_open and seconds_left(until) > 0:
            routed = program.routed(known.taken).reshape(-1)
            _core.refine_makespan(*core[:3], routed, core.pricing, turn, TURN)
            known = known.joined(
                program, Found(routed[program.slot], -math.inf), -math.inf, Proof.NONE
            )
    return known


def _bisected(program: Program, fit: Fit, proof: Proof, known: _Known, until: float) -> _Known:
    """Ask for less than the makespan in hand, then halve its distance to the bound.

    A target that is neither met nor refuted in half of the time that is left is passed over.
    """

    def asked(target: float) -> _Known:
        found = fit(known, target, time.monotonic() + seconds_left(until) / 2)
        return known.joined(program, found, min(found.bound, known.makespan * BELOW), proof)

    known = asked(known.makespan * BELOW)
    missed = known.bound
    while known.makespan - missed > CLOSE * known.makespan and seconds_left(until) > 0:
        target, before = (missed + known.makespan) / 2, known
        known = asked(target)
        missed = target if known is before else max(missed, known.bound)
    return known


def _refuted(program: Program, fit: Fit, proof: Proof, known: _Known, until: float) -> _Known:
    """Ask for what lies halfway from the bound to the makespan in hand, or to what failed.

    What fails is a target that is neither met nor refuted in half of the time that is left.
    """
    token = max(piece.token for piece in program.objective.linear)
    missed = math.inf
    # Between two numbers of tokens there is nothing to ask.
    while known.is_open and missed - known.bound >= token and seconds_left(until) > 0:
        target = (known.bound + min(missed, known.makespan * BELOW)) / 2
        found = fit(known, target, time.monotonic() + seconds_left(until) / 2)
        before, known = known, known.joined(program, found, found.bound, proof)
        if known is before:
            missed = target
    return known


def _filled(program: Program, core: _Core, known: _Known, target: float, until: float) -> Found:
    """Fill GPU after GPU with whole experts."""
    nodes = int(min(NODES, seconds_left(until) * NODES_A_SECOND))
    return _searched(program, core, _core.fit_whole_experts, known, target, nodes)


def _patterned(program: Program, core: _Core, known: _Known, target: float, until: float) -> Found:
    """Choose what every GPU serves, experts and parts of experts, if few can be split."""
    if _within(program, target).spare(np.ones_like(program.tokens)) > FEW:
        return NOTHING
    looks = int(min(LOOKS, seconds_left(until) * LOOKS_A_SECOND))
    return _searched(program, core, _core.fit_patterns, known, target, looks)


def _searched(
    program: Program, core: _Core, fit: Search, known: _Known, target: float, work: int
) -> Found:
    """Ask the compiled core for any answer."""
    routed = program.routed(known.taken).reshape(-1)
    fits = fit(*core[:3], routed, core.pricing, target, work)
    if fits:
        return Found(routed[program.slot], -math.inf)
    return NOTHING if fits is None else Found(None, math.nextafter(target, math.inf))


def _fitted(
    program: Program,
    engine: Callable[[Program, float], Found],
    known: _Known,
    target: float,
    until: float,
) -> Found:
    """Ask an engine for any answer."""
    question = _within(program, target)
    found = engine(question, until)
    refuted = found.bound > question.most
    return found._replace(bound=math.nextafter(target, math.inf) if refuted else -math.inf)


def _asked(
    program: Program, ask: Question, engine: Engine, proof: Proof, known: _Known, until: float
) -> _Known:
    """Ask an engine until it has nothing further to say."""
    further = True
    while further and known.is_open and seconds_left(until) > 0:
        before = known
        known = known.joined(program, *ask(program, known, engine, until), proof)
        further = known is not before
    return known


def _least_makespan(
    program: Program, known: _Known, engine: Engine, until: float
) -> tuple[Found, float]:
    """Ask for the smallest makespan."""
    start = program.in_order(known.taken)
    found = engine(replace(program, most=known.makespan), start, until)
    return found, found.bound


def _fewest_tokens(
    program: Program, known: _Known, engine: Engine, until: float
) -> tuple[Found, float]:
    """Ask for the fewest tokens on the fullest GPU that allow less than the makespan in hand."""
    below = known.makespan * BELOW
    found = engine(_within(program, below), None, until)
    if program.objective.slowness is not None:
        return found, min(found.bound, below)
    fewest = max(0, math.ceil(found.bound)) if math.isfinite(found.bound) else 0
    by_tokens = [piece for piece in program.objective.linear if piece.token]
    return found, min(_time_of(by_tokens, 2, 1.0)(fewest), below)


def _is_by_levels(objective: Objective) -> bool:
    """Say whether every piece counts activated replicas alone or tokens alone, one the latter."""
    alone = all(not p.tile and not (p.activation and p.token) for p in objective.linear)
    some = any(p.token for p in objective.linear)
    return alone and some and objective.split and not objective.curves


def _within(program: Program, target: float) -> Program:
    """Return the program of the tokens on the fullest GPU with no time above a target."""
    objective = program.objective
    by_tokens = tuple(piece for piece in objective.linear if piece.token)
    others = tuple(piece for piece in objective.linear if not piece.token)
    question = program
    if others:
        slots = program.fixed.shape[1]
        levels = [_most(_time_of(others, 0, slow), slots, target) for slow in program.slowness]
        question = replace(program, most_activated=np.array(levels))
    counted, most = replace(objective, pieces=by_tokens), target
    if objective.slowness is None:
        # On equal GPUs the time is that of the number of tokens, which is an integer.
        all_tokens = int(program.tokens.sum() + program.fixed.sum())
        most = float(_most(_time_of(by_tokens, 2, 1.0), all_tokens, target))
        counted = replace(objective, pieces=(Piece(token=1),))
    # With no activation to spare every expert takes one replica.
    once = np.ones_like(program.tokens)
    counted = replace(counted, split=question.spare(once) > 0)
    return replace(question, objective=counted, most=most)


def _time_of(pieces: Sequence[Piece], kind: int, slowness: float) -> Callable[[int], float]:
    """Return the time of a GPU by one kind of count: activated replicas (0), tiles or tokens."""

    def time_of(count: int) -> float:
        counts = [count if at == kind else 0 for at in range(3)]
        return float(slowness * max(piece.time(*counts) for piece in pieces))

    return time_of


def _most(time_of: Callable[[int], float], most: int, below: float) -> int:
    """Return the largest count up to `most` whose time is not above `below`; -1 if none is."""
    return bisect.bisect_right(range(most + 1), below, key=time_of) - 1
