"""`cp-sat`: the integer program of any objective, curves included, solved by OR-Tools CP-SAT."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb_opt.engines import EngineError, new_cp_sat, require, seconds_left
from eplb_opt.objective import Curve, Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.routers.base import Solve, Traits
from eplb_opt.routers.exact import NOTHING, Found, Program, judge
from eplb_opt.routers.values import ROUNDING
from eplb_opt.status import Proof

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

LARGEST = 1 << 60
"""CP-SAT wants every sum, at every value of its variables, to fit 64 bits with room to spare."""


@dataclass(frozen=True, slots=True)
class CpSat:
    """The program of `eplb_opt.routers.exact`, by clause learning in CP-SAT (OR-Tools).

    CP-SAT calculates in 64-bit integers. Times are decimals as they are written (0.0945, not the
    double beside it), brought to a common denominator: then its proofs are exact at any number of
    tokens. Times of so many digits that the sums do not fit are rounded down to the digits that do,
    which leaves the bound true and the answer short of the optimum by no more than those. Gap
    limits are zero, the seed is fixed, and every problem has one worker, so answers repeat.

    A curve is a choice, for every pair, of the stretch that its tokens lie in, and a linear time on
    it.

    Parameters
    ----------
    warm_start
        Hint a good answer, which is then also the least that a time limit leaves.

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
        "the integer program, by OR-Tools CP-SAT", exact=True, extra="exact"
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
        return judge(Proof.CP_SAT, solve, placement, objective, threads, self.warm_start)


def solve(program: Program, start: NDArray[np.int64] | None, deadline: float) -> Found:
    """Solve a program with one worker."""
    from ortools.sat.python import cp_model

    grid = _Grid.of(program)
    least, most = _limits(program, grid)
    if least > most:
        return _nothing_within(program)
    stated = _state(program, grid, least, most)
    if start is not None:
        _hint(stated, program, grid, start)
    engine = new_cp_sat(seconds_left(deadline))
    # By default one worker may try a λ of hundredths value by value: for minutes, with eight pairs.
    engine.parameters.linearization_level = 2
    engine.parameters.use_objective_lb_search = True
    status = engine.solve(stated.model)
    if status == cp_model.INFEASIBLE and start is None and math.isfinite(program.most):
        return _nothing_within(program)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        raise EngineError(f"it ended with the status {engine.status_name(status)}")
    bound = grid.time(engine.best_objective_bound)
    if status == cp_model.UNKNOWN:
        return Found(None, bound)
    return Found(_taken(program, stated, engine), bound)


def fit(program: Program, deadline: float) -> Found:
    """Find any answer within `Program.most`, or prove that there is none.

    Easier than the smallest λ: of some problems CP-SAT proves in a second that no λ up to `most` is
    possible, and does not raise the bound of λ halfway there in a minute. It minimises activated
    replicas, whose linear relaxation is what refutes; without that, it took half a minute.
    """
    from ortools.sat.python import cp_model

    grid = _Grid.of(program)
    least, most = _limits(program, grid)
    if least > most:
        return _nothing_within(program)
    stated = _state(program, grid, most, most)
    engine = new_cp_sat(seconds_left(deadline))
    engine.parameters.stop_after_first_solution = True
    if program.objective.split and stated.y:
        stated.model.minimize(_sum(stated.y))
        engine.parameters.linearization_level = 2
    status = engine.solve(stated.model)
    if status == cp_model.INFEASIBLE:
        return _nothing_within(program)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return NOTHING
    return Found(_taken(program, stated, engine), -math.inf)


def _taken(program: Program, stated: _Stated, engine: cp_model.CpSolver) -> NDArray[np.int64]:
    """Return the tokens by pair of an answer."""
    taken = np.array([engine.value(variable) for variable in stated.x or stated.y], np.int64)
    return taken if stated.x else taken * program.tokens[program.expert]


def _nothing_within(program: Program) -> Found:
    """Return the proof that every makespan is above `Program.most`."""
    return Found(None, program.most + program.has_integer_times)


@dataclass(frozen=True, slots=True)
class _Grid:
    """The integers that stand for times: time * `steps`, rounded down.

    Attributes
    ----------
    steps
        Integers per unit of time.
    exact
        Whether nothing is rounded.
    rounding
        What the doubles of `Objective.time` may differ by from the times as written, as a share.
    """

    steps: Fraction
    exact: bool
    rounding: float

    @classmethod
    def of(cls, program: Program) -> _Grid:
        """Return the coarsest grid that is exact, or a fine one if sums on that do not fit."""
        objective, whole = program.objective, program.whole_counts()
        slots = len(program.gpu) + int(program.fixed_counts().activated.sum())
        tokens = int(whole.tokens.sum()) + int(program.fixed.sum())
        tiles = slots + tokens // objective.tile_tokens
        times, most, rounding = [], Fraction(0), 2 * ROUNDING
        for piece in objective.pieces:
            if isinstance(piece, Curve):
                ends = _stretches(piece, tokens)
                times += [time for s in ends for time in (s.time, s.slope)]
                most = max(most, slots * (ends[-1].time + ends[-1].slope * tokens))
                # The last slope is that of two rounded times, taken far beyond them.
                rounding += ROUNDING * (slots + tokens / (piece.tokens[-1] - piece.tokens[-2]))
            else:
                prices = [written(x) for x in (piece.activation, piece.tile, piece.token)]
                times += [written(piece.offset), *prices]
                counts = zip(prices, (slots, tiles, tokens), strict=True)
                most = max(most, times[-4] + sum(price * count for price, count in counts))
        slowness = [written(s) for s in sorted(set(objective.slowness or (1.0,)))]
        most = max(most * slowness[-1], Fraction(1, LARGEST))
        steps = Fraction(math.lcm(*((t * s).denominator for t in times for s in slowness)))
        if steps * most <= LARGEST:
            return cls(steps, True, rounding)
        return cls(Fraction(2) ** math.floor(math.log2(LARGEST / most) - 1), False, rounding)

    def integer(self, time: Fraction) -> int:
        """Return the integer that stands for a time."""
        return math.floor(time * self.steps)

    def time(self, integer: float) -> float:
        """Return the least makespan that an integer can stand for; -inf for none at all."""
        if not math.isfinite(integer):
            return -math.inf
        return float(round(integer) / self.steps) * (1 - self.rounding)


class _Stretch(NamedTuple):
    """A part of a curve that is linear: tokens from `first` to `last`, from `time` on."""

    first: int
    last: int
    time: Fraction
    slope: Fraction


def _stretches(curve: Curve, most: int) -> list[_Stretch]:
    """Return a curve from 1 token to `most` as the fewest linear parts."""
    tokens, times = list(curve.tokens), [written(t) for t in curve.times]
    slopes = [
        (b - a) / (n - m) for (a, b), (m, n) in zip(pairwise(times), pairwise(tokens), strict=True)
    ]
    # Each from one row to the next, the last on to the end; before the first row the time is flat.
    starts = [(tokens[0], times[0], slopes[0])]
    if tokens[0] > 1:
        starts.insert(0, (1, times[0], Fraction(0)))
    for row, (slope, before) in enumerate(zip(slopes[1:], slopes, strict=False), 1):
        if slope != before:
            starts.append((tokens[row], times[row], slope))
    starts = [start for start in starts if start[0] <= max(most, 1)]
    lasts = [first - 1 for first, _, _ in starts[1:]] + [max(most, 1)]
    return [
        _Stretch(first, last, time, slope)
        for (first, time, slope), last in zip(starts, lasts, strict=True)
    ]


def written(value: float) -> Fraction:
    """Return the decimal that a double is written as."""
    return Fraction(repr(value))


class _Part(NamedTuple):
    """One stretch of a curve for one pair: whether its tokens lie there, and how far beyond."""

    stretch: _Stretch
    chosen: cp_model.IntVar
    beyond: cp_model.IntVar | None


class _Stated(NamedTuple):
    """A model and its variables: x, y and z by pair, or none of a kind; parts by curve and pair."""

    model: cp_model.CpModel
    makespan: cp_model.IntVar
    x: list[cp_model.IntVar]
    y: list[cp_model.IntVar]
    z: list[cp_model.IntVar]
    parts: list[list[list[_Part]]]


def _limits(program: Program, grid: _Grid) -> tuple[int, int]:
    """Return the least and the largest integer that λ can be; the least is above if none can."""
    # No GPU ends later than with all tokens of all its experts.
    latest = min(program.most, program.makespan(program.whole_counts().tokens))
    most = math.floor(Fraction(latest) * grid.steps * Fraction(1 + 100 * grid.rounding))
    if not grid.exact:
        return 0, most
    counted = Fraction(program.counted_bound() * (1 - grid.rounding))
    return math.ceil(counted * grid.steps), most


def _state(program: Program, grid: _Grid, least: int, most: int) -> _Stated:
    """State the program, λ on a grid between two limits."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    objective, rooms = program.objective, program.room()
    room, fewest = rooms.tolist(), program.fewest_replicas(rooms)
    spare = program.spare(fewest)
    makespan = model.new_int_var(least, most, "makespan")
    model.minimize(makespan)

    y = [model.new_bool_var(f"y{p}") for p in range(len(room))] if program.has_y else []
    stated = _Stated(model, makespan, [], y, [], [])
    if objective.split:
        stated.x.extend(model.new_int_var(0, most, f"x{p}") for p, most in enumerate(room))
        _link(stated, program, room)
        for curve in objective.curves:
            stretches = [_stretches(curve, most) for most in room]
            stated.parts.append([_part(model, *at) for at in zip(stated.x, stretches, strict=True)])
    else:
        for pair in np.flatnonzero(rooms < program.whole_counts().tokens):
            model.add(y[pair] == 0)
    _serve(stated, program, fewest, spare)
    _time(stated, program, grid, spare)
    _order(stated, program)
    return stated


def _link(stated: _Stated, program: Program, room: list[int]) -> None:
    """Let tokens activate their replica and fill tiles."""
    model, tile_tokens = stated.model, program.objective.tile_tokens
    for replica, most, activated in zip(stated.x, room, stated.y, strict=False):
        model.add(replica <= most * activated)
    if not program.has_z:
        return
    for pair, most in enumerate(room):
        stated.z.append(model.new_int_var(0, -(-most // tile_tokens), f"z{pair}"))
        model.add(stated.x[pair] <= tile_tokens * stated.z[pair])
    for activated, tiles in zip(stated.y, stated.z, strict=False):
        model.add(activated <= tiles)


def _part(
    model: cp_model.CpModel, replica: cp_model.IntVar, stretches: list[_Stretch]
) -> list[_Part]:
    """Put the tokens of a replica, if it has any, into one stretch of a curve."""
    parts = []
    for stretch in stretches:
        length, chosen, beyond = stretch.last - stretch.first, model.new_bool_var(""), None
        if length:
            beyond = model.new_int_var(0, length, "")
            model.add(beyond <= length * chosen)
        parts.append(_Part(stretch, chosen, beyond))
    model.add_at_most_one(part.chosen for part in parts)
    taken = [part.stretch.first * part.chosen for part in parts]
    model.add(replica == _sum([*taken, *(p.beyond for p in parts if p.beyond is not None)]))
    return parts


def _sum(terms: Iterable[cp_model.LinearExpr]) -> cp_model.LinearExprT:
    from ortools.sat.python import cp_model

    return cp_model.LinearExpr.sum(list(terms))


def _serve(stated: _Stated, program: Program, fewest: NDArray[np.int64], spare: int) -> None:
    """Serve every token, and say how many replicas an expert needs and can have."""
    for expert, (tokens, need) in enumerate(
        zip(program.tokens.tolist(), fewest.tolist(), strict=True)
    ):
        pairs = np.flatnonzero(program.expert == expert)
        if not program.objective.split:
            stated.model.add_exactly_one(stated.y[pair] for pair in pairs)
            continue
        stated.model.add(_sum(stated.x[pair] for pair in pairs) == tokens)
        if stated.y:
            activated = _sum(stated.y[pair] for pair in pairs)
            stated.model.add_linear_constraint(
                activated, need, max(need, min(need + spare, len(pairs)))
            )
    if stated.y and program.objective.split:
        # The sum over the rows of all GPUs; without it the linear relaxation is of little help.
        stated.model.add(_sum(stated.y) <= int(fewest.sum()) + spare)


def _time(stated: _Stated, program: Program, grid: _Grid, spare: int) -> None:
    """Let λ be no less than the time of any GPU by any piece."""
    objective = program.objective
    room = program.activation_room().tolist()
    fixed = [counts.tolist() for counts in program.fixed_counts()]
    for gpu in program.busy.tolist():
        pairs = np.flatnonzero(program.gpu == gpu).tolist()
        slow = written(program.slowness.tolist()[gpu])
        if stated.y and not objective.counts_activations and room[gpu] < len(pairs):
            stated.model.add(_sum(stated.y[pair] for pair in pairs) <= room[gpu])
        if stated.y and room[gpu] > spare:
            stated.model.add(_sum(stated.y[pair] for pair in pairs) >= room[gpu] - spare)
        for piece in objective.linear:
            time = slow * _linear(piece, *(counts[gpu] for counts in fixed))
            terms = [_piece_terms(stated, program, piece, pair, slow, grid) for pair in pairs]
            stated.model.add(grid.integer(time) + _sum(chain(*terms)) <= stated.makespan)
        for at, curve in enumerate(objective.curves):
            alone = [_at(curve, n) for n in program.fixed[gpu].tolist() if n]
            terms = [_curve_terms(stated, program, at, pair, slow, grid) for pair in pairs]
            time = slow * sum(alone, Fraction(0))
            stated.model.add(grid.integer(time) + _sum(chain(*terms)) <= stated.makespan)


def _piece_terms(
    stated: _Stated, program: Program, piece: Piece, pair: int, slow: Fraction, grid: _Grid
) -> list[cp_model.LinearExpr]:
    """Return the time that a pair takes by a linear piece."""
    if not program.objective.split:
        whole = (int(counts[pair]) for counts in program.whole_counts())
        time = _linear(piece, *whole) - written(piece.offset)
        return [grid.integer(slow * time) * stated.y[pair]]
    kinds = ((piece.activation, stated.y), (piece.tile, stated.z), (piece.token, stated.x))
    return [grid.integer(slow * written(price)) * of[pair] for price, of in kinds if price]


def _curve_terms(
    stated: _Stated, program: Program, at: int, pair: int, slow: Fraction, grid: _Grid
) -> list[cp_model.LinearExpr]:
    """Return the time that a pair takes by a curve."""
    if not program.objective.split:
        time = _at(program.objective.curves[at], int(program.tokens[program.expert[pair]]))
        return [grid.integer(slow * time) * stated.y[pair]]
    parts = stated.parts[at][pair]
    begun = [grid.integer(slow * p.stretch.time) * p.chosen for p in parts]
    further = [
        grid.integer(slow * p.stretch.slope) * p.beyond for p in parts if p.beyond is not None
    ]
    return begun + further


def _linear(piece: Piece, activated: int, tiles: int, tokens: int) -> Fraction:
    """Return a piece's time as written."""
    prices = (written(x) for x in (piece.activation, piece.tile, piece.token))
    counts = (activated, tiles, tokens)
    return written(piece.offset) + sum(p * n for p, n in zip(prices, counts, strict=True))


def _at(curve: Curve, tokens: int) -> Fraction:
    """Return a curve's time of one replica as written."""
    last = _stretches(curve, tokens)[-1]
    return last.time + last.slope * (tokens - last.first)


def _order(stated: _Stated, program: Program) -> None:
    """Of GPUs that may be renamed, let each take no more than the one before."""
    sized = stated.y or stated.x
    for gpus in program.twins():
        sizes = [_sum(sized[pair] for pair in np.flatnonzero(program.gpu == g)) for g in gpus]
        for first, second in pairwise(sizes):
            stated.model.add(second <= first)


def _hint(stated: _Stated, program: Program, grid: _Grid, start: NDArray[np.int64]) -> None:
    """Hint a start for every variable."""
    tiles = -(-start // program.objective.tile_tokens)
    stated.model.add_hint(stated.makespan, round(Fraction(program.makespan(start)) * grid.steps))
    for of, values in ((stated.x, start), (stated.y, start > 0), (stated.z, tiles)):
        for variable, value in zip(of, values.tolist(), strict=False):
            stated.model.add_hint(variable, value)
    for by_pair in stated.parts:
        for parts, tokens in zip(by_pair, start.tolist(), strict=True):
            for stretch, chosen, beyond in parts:
                here = stretch.first <= tokens <= stretch.last
                stated.model.add_hint(chosen, here)
                if beyond is not None:
                    stated.model.add_hint(beyond, tokens - stretch.first if here else 0)
