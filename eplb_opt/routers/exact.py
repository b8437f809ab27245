"""What the exact engines share: the integer program as arrays, and how an answer is judged.

The program minimises the makespan λ of one layer's batch. With T[e] the tokens of live expert e, a
pair (e, g) for every GPU g that holds it, and the objective's pieces k::

    minimise   λ
    subject to slowness[g] * (offset[k] + activation[k] Σ_e y[e,g] + tile[k] Σ_e z[e,g]
               + token[k] Σ_e x[e,g]) <= λ          for every GPU g and every piece k
               Σ_g x[e,g]  = T[e]                   for every live expert e
               x[e,g]     <= M[e,g] y[e,g]          for every pair
               x[e,g]     <= tile_tokens z[e,g]     for every pair
               y[e,g]     <= z[e,g]                 for every pair
               x, z >= 0 integer, y binary

y is there only if a piece counts activated replicas, z only if one counts tiles. With the objective
``"activations"`` this is METRO's MIN-EXP-ROUTING (arXiv 2512.09277). Where experts may not be split
x is T[e] y[e,g] and Σ_g y[e,g] = 1. What makes the program smaller than it reads, and is shared by
the engines:

- Experts with one pair have no choice: they are constants of their GPU.
- M[e,g] is the fewest of T[e] and of the tokens for which the GPU has room if it is not to end
  after a makespan in hand (`Program.room`). An expert that no one replica has room for needs
  several, and is told how many (`Program.fewest_replicas`). What GPUs can activate beyond these is
  to spare, for all experts together (`Program.spare`).
- GPUs with the same open experts, the same constants and the same slowness may be renamed among
  each other: in each such class the first takes the most (`Program.twins`).

An expert in several slots of a GPU is one pair, whose first slot takes its tokens: linear pieces
never gain from two. Curves can (twice half the tokens may be faster), so with a curve, and splits
allowed, every slot is a pair.

An engine proposes; its answer is judged here, in integers:

- Its x is rounded, and must serve every token once. The makespan is `Objective.time` of it. The
  engine's y, z and λ are not looked at: within its tolerance x > 0 and y = 0 can both hold.
- Its bound, which the engine's file lowers by the engine's tolerance, is raised to the next value
  that a makespan can take (`eplb_opt.routers.values`).
- The bound reported is the larger of this and of the one counted here (`Program.counted_bound`);
  `Proof` says which. The problem is OPTIMAL if that meets the makespan, and not otherwise, whatever
  the engine calls it. A start that meets the counted bound is not handed to the engine at all.
- An answer that does not serve the tokens, or a bound above a makespan in hand, is an engine's
  error and raises `EplbError`; neither is reported.

A problem that the time limit leaves without any answer is UNSOLVED: no tokens, nothing activated,
makespan NaN, and the bound. With a warm start this does not happen: its answer is there from the
beginning.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb_opt.engines import EngineError, at_a_time, seconds_left
from eplb_opt.errors import EplbError
from eplb_opt.objective import Curve, Objective, Piece
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.routers.base import Context, Solve
from eplb_opt.routers.makespan import Makespan
from eplb_opt.routers.metro import Metro
from eplb_opt.routers.values import ROUNDING, Range, next_value
from eplb_opt.status import Proof, Status

if TYPE_CHECKING:
    from eplb_opt.routing import Routing

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


class Pairs(NamedTuple):
    """The pairs of an expert and a GPU that holds it in one layer, by expert, then GPU.

    Attributes
    ----------
    expert, gpu, slot
        Int64 ``[pairs]``; `slot` is the physical id of the expert's first slot there.
    of_slot
        Int64 ``[slots]``: the pair that a slot belongs to; -1 for an empty one.

    Examples
    --------
    >>> pairs = Pairs.of(Placement([[0, 1], [2, 0]]), layer=0)
    >>> pairs.expert.tolist(), pairs.gpu.tolist(), pairs.slot.tolist()
    ([0, 0, 1, 2], [0, 1, 0, 1], [0, 3, 1, 2])
    """

    expert: Int64
    gpu: Int64
    slot: Int64
    of_slot: Int64

    @classmethod
    def of(cls, placement: Placement, layer: int, every_slot: bool = False) -> Pairs:
        """Return a layer's pairs; if `every_slot`, a GPU's two slots of an expert are two."""
        expert_of = placement.expert_of[layer].astype(np.int64)
        filled = np.flatnonzero(expert_of != EMPTY)
        place = filled if every_slot else filled // placement.slots_per_gpu
        places = len(expert_of) if every_slot else placement.num_gpus
        # unique() names the first place of every value, so the lowest slot stands for a duplicate.
        key, first, pair = np.unique(
            expert_of[filled] * places + place, return_index=True, return_inverse=True
        )
        slot = filled[first]
        of_slot = np.full(len(expert_of), -1)
        of_slot[filled] = pair
        return cls(key // places, slot // placement.slots_per_gpu, slot, of_slot)

    def taken(self, routed: Int64) -> Int64:
        """Return the tokens by pair of int64 tokens by slot."""
        taken = np.zeros(len(self.slot), np.int64)
        filled = self.of_slot >= 0
        np.add.at(taken, self.of_slot[filled], routed[filled])
        return taken


class Counts(NamedTuple):
    """Activated replicas, tiles and tokens: int64, by GPU or by pair."""

    activated: Int64
    tiles: Int64
    tokens: Int64


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One problem's integer program: its open experts (live, with a choice) and their pairs.

    Attributes
    ----------
    objective
        What is minimised.
    fixed
        Int64 ``[gpus, slots]``: tokens of the live experts that have one pair.
    live, tokens
        Int64 ``[open]``: the ids of the open experts, ascending, and their tokens.
    expert
        Int64 ``[pairs]``: the pair's expert, as a position in `live`, ascending.
    gpu, slot
        Int64 ``[pairs]``: the pair's GPU, and the physical id of the expert's first slot there.
    pair
        Int64 ``[pairs]``: the pair's position among all `Pairs` of the layer.
    most
        The largest makespan of interest; inf if any is.
    most_activated
        Int64 ``[gpus]``: replicas that each GPU may activate at most, or None.

    Examples
    --------
    Two live experts share GPU 1 with nobody else able to help; expert 1 has a choice:

    >>> placement = Placement([[0, 1], [2, 3], [1, -1]])
    >>> tokens, activations = np.array([0, 7, 5, 1]), Objective.preset("activations")
    >>> program = Program.of(placement, Pairs.of(placement, 0), tokens, activations)
    >>> program.live.tolist(), program.gpu.tolist(), program.counted_bound()
    ([1], [0, 2], 2.0)
    """

    objective: Objective
    fixed: Int64
    live: Int64
    tokens: Int64
    expert: Int64
    gpu: Int64
    slot: Int64
    pair: Int64
    most: float = math.inf
    most_activated: Int64 | None = None

    @classmethod
    def of(
        cls,
        placement: Placement,
        pairs: Pairs,
        tokens: Int64,
        objective: Objective,
        *,
        fold: bool = True,
    ) -> Program:
        """Return the program for one layer's tokens, int64 ``[experts]``.

        With ``fold=False`` experts with one pair are open too.
        """
        objective.require_gpus(placement.num_gpus)
        choices = np.bincount(pairs.expert, minlength=len(tokens))
        if not fold:
            choices = choices + 1
        fixed = np.zeros(placement.num_gpus * placement.slots_per_gpu, np.int64)
        alone = choices[pairs.expert] == 1
        fixed[pairs.slot[alone]] = tokens[pairs.expert[alone]]
        is_open = (tokens > 0) & (choices > 1)
        live = np.flatnonzero(is_open)
        of_open = is_open[pairs.expert]
        return cls(
            objective,
            fixed.reshape(placement.num_gpus, placement.slots_per_gpu),
            live,
            tokens[live],
            np.searchsorted(live, pairs.expert[of_open]),
            pairs.gpu[of_open],
            pairs.slot[of_open],
            np.flatnonzero(of_open),
        )

    @property
    def num_gpus(self) -> int:
        """GPUs of the placement."""
        return len(self.fixed)

    @property
    def busy(self) -> Int64:
        """Int64 ``[busy]``: the GPUs with a pair, ascending."""
        return np.unique(self.gpu)

    @property
    def has_y(self) -> bool:
        """Whether the program says which replicas are activated."""
        counted = any(piece.activation > 0 for piece in self.objective.linear)
        return counted or not self.objective.split or self.most_activated is not None

    @property
    def has_z(self) -> bool:
        """Whether the program counts tiles: without splits they are constants."""
        return self.objective.has_tiles and self.objective.split

    @property
    def has_integer_times(self) -> bool:
        """Whether every makespan is an integer."""
        objective = self.objective
        prices = (x for p in objective.linear for x in (p.offset, p.activation, p.tile, p.token))
        return objective.slowness is None and all(price.is_integer() for price in prices)

    @property
    def slowness(self) -> Float64:
        """Float64 ``[gpus]``."""
        return np.array(self.objective.slowness or (1.0,) * self.num_gpus)

    def fixed_counts(self) -> Counts:
        """Return what the fixed experts cost every GPU."""
        tiles = -(-self.fixed // self.objective.tile_tokens)
        return Counts((self.fixed > 0).sum(1), tiles.sum(1), self.fixed.sum(1))

    def whole_counts(self) -> Counts:
        """Return what every pair costs if it takes all of its expert's tokens."""
        tokens = self.tokens[self.expert]
        return Counts(np.ones_like(tokens), -(-tokens // self.objective.tile_tokens), tokens)

    def routed(self, taken: Int64) -> Int64:
        """Return int64 ``[gpus, slots]``: the tokens of all slots, from those by pair."""
        routed = self.fixed.copy()
        routed.reshape(-1)[self.slot] = taken
        return routed

    def makespan(self, taken: Int64) -> float:
        """Return the makespan of tokens by pair."""
        return float(self.objective.time(self.routed(taken)).max(initial=0.0))

    def raised(self, bound: float) -> float:
        """Return the next value that a makespan can take from a bound on: see `next_value`."""
        slots = (self.fixed > 0).sum(1) + np.bincount(self.gpu, minlength=self.num_gpus)
        tokens = self.fixed.sum(1)
        np.add.at(tokens, self.gpu, self.tokens[self.expert])
        return next_value(self.objective, Range(int(slots.max()), int(tokens.max())), bound)

    def counted_bound(self) -> float:
        """Return the lower bound that needs no engine.

        The largest of: the fixed experts alone; all GPUs that can have work together, at their
        slowness; and, where experts may not be split, each at the best of its GPUs.
        """
        bound = self.makespan(np.zeros_like(self.gpu))
        if self.live.size == 0:
            return bound
        lines = [p.floor() if isinstance(p, Curve) else (p,) for p in self.objective.pieces]
        together = max(self._average(piece) for pieces in lines for piece in pieces)
        # Lowered by more than the rounding of the average and of a makespan, then raised.
        bound = max(bound, self.raised(together * (1 - 4 * ROUNDING)))
        if not self.objective.split:
            whole, fixed = self.whole_counts(), self.fixed_counts()
            after = Counts(*(f[self.gpu] + w for f, w in zip(fixed, whole, strict=True)))
            time = linear_time(self.objective, after, self.slowness[self.gpu])
            bound = max(bound, float(np.minimum.reduceat(time, self.first_pairs()).max()))
        return bound

    def _average(self, piece: Piece) -> float:
        """Return a piece's least time, summed over all experts, over the GPUs that share it."""
        share = np.union1d(self.gpu, np.flatnonzero(self.fixed.any(axis=1)))
        fixed, tiles = self.fixed_counts(), -(-self.tokens // self.objective.tile_tokens)
        work = len(share) * piece.offset
        work += piece.activation * (int(fixed.activated.sum()) + self.live.size)
        work += piece.tile * (int(fixed.tiles.sum()) + int(tiles.sum()))
        work += piece.token * (int(fixed.tokens.sum()) + int(self.tokens.sum()))
        return work / float((1 / self.slowness[share]).sum())

    def room(self) -> Int64:
        """Return int64 ``[pairs]``: tokens that a pair can take if no GPU ends after `most`."""
        room = self._token_room(alone=True)
        return np.asarray(np.minimum(self.tokens[self.expert], room[self.gpu]))

    def token_room(self) -> Int64:
        """Return int64 ``[gpus]``: tokens that a GPU can take if it is not to end after `most`.

        No more than its pairs' experts have.
        """
        tokens = np.zeros(self.num_gpus, np.int64)
        np.add.at(tokens, self.gpu, self.tokens[self.expert])
        return np.asarray(np.minimum(tokens, self._token_room(alone=False)))

    def _token_room(self, alone: bool) -> Int64:
        """Return tokens that every GPU has room for, in one activated replica if `alone`."""
        room = np.full(self.num_gpus, 2.0**62)
        for piece in self.objective.linear:
            price = piece.token + piece.tile / self.objective.tile_tokens
            if price > 0:
                rest = self._rest(piece) - piece.activation * alone
                np.minimum(room, rest / price, out=room)
        return np.asarray(np.floor(np.maximum(room, 0)), np.int64)

    def activation_room(self) -> Int64:
        """Return int64 ``[gpus]``: pairs that a GPU can activate if it is not to end after `most`.

        No more than it has, and with its fixed experts no more than `most_activated`.
        """
        room = np.bincount(self.gpu, minlength=self.num_gpus).astype(np.float64)
        for piece in self.objective.linear:
            if piece.activation > 0:
                price = piece.activation + piece.tile + piece.token
                np.minimum(room, self._rest(piece) / price, out=room)
        if self.most_activated is not None:
            np.minimum(room, self.most_activated - self.fixed_counts().activated, out=room)
        return np.asarray(np.floor(np.maximum(room, 0)), np.int64)

    def spare(self, fewest: Int64) -> int:
        """Return the activations that GPUs have room for beyond the fewest replicas of experts."""
        return int(self.activation_room()[self.busy].sum() - fewest.sum())

    def _rest(self, piece: Piece) -> Float64:
        """Return float64 ``[gpus]``: the time that the fixed experts leave by a piece."""
        fixed = self.fixed_counts()
        spent = piece.offset + piece.activation * fixed.activated + piece.tile * fixed.tiles
        # A little more, so that rounding takes no room away.
        most = self.most * (1 + 10 * ROUNDING) / self.slowness
        return np.asarray(most - (spent + piece.token * fixed.tokens))

    def fewest_replicas(self, room: Int64) -> Int64:
        """Return int64 ``[open]``: how many of its replicas, the roomiest first, hold an expert.

        One more than it has where all together do not.
        """
        order = np.lexsort((-room, self.expert))
        held = np.cumsum(room[order])
        before = (held - room[order])[self.first_pairs()]
        short = held - before[self.expert] < self.tokens[self.expert]
        return 1 + np.bincount(self.expert, short, self.live.size).astype(np.int64)

    def twins(self) -> list[Int64]:
        """Return classes of two or more GPUs that may be renamed among each other, ascending."""
        slowness = self.slowness
        limit = np.zeros_like(slowness) if self.most_activated is None else self.most_activated
        classes: dict[tuple[object, ...], list[int]] = {}
        for gpu in self.busy.tolist():
            fixed = tuple(sorted(self.fixed[gpu][self.fixed[gpu] > 0].tolist()))
            experts = tuple(self.expert[self.gpu == gpu].tolist())
            key = (experts, fixed, float(slowness[gpu]), int(limit[gpu]))
            classes.setdefault(key, []).append(gpu)
        return [np.array(gpus) for gpus in classes.values() if len(gpus) > 1]

    def sizes(self, taken: Int64) -> Int64:
        """Return int64 ``[gpus]``, what twins are ordered by: activated pairs, else tokens."""
        sizes = np.zeros(self.num_gpus, np.int64)
        np.add.at(sizes, self.gpu, taken > 0 if self.has_y else taken)
        return sizes

    def in_order(self, taken: Int64) -> Int64:
        """Return tokens by pair with twins renamed so that the first takes the most."""
        sizes, ordered = self.sizes(taken), taken.copy()
        for gpus in self.twins():
            renamed = gpus[np.argsort(-sizes[gpus], kind="stable")]
            for gpu, by in zip(gpus, renamed, strict=True):
                ordered[self.gpu == gpu] = taken[self.gpu == by]
        return ordered

    def rounded(self, taken: Float64 | Int64) -> Int64:
        """Return an engine's tokens by pair as integers that serve every token once.

        Raises
        ------
        EngineError
            If they do not, or split an expert where that is not allowed.
        """
        if not np.isfinite(taken).all():
            raise EngineError("its answer holds values that are not numbers")
        rounded = np.rint(taken).astype(np.int64)
        if (rounded < 0).any():
            raise EngineError("its answer holds a negative number of tokens")
        served = np.add.reduceat(rounded, self.first_pairs())
        wrong = np.flatnonzero(served != self.tokens)
        if wrong.size:
            at = wrong[0]
            raise EngineError(
                f"its answer serves {served[at]} of the {self.tokens[at]} tokens of expert "
                f"{self.live[at]}"
            )
        split = np.flatnonzero(np.add.reduceat(rounded > 0, self.first_pairs(), dtype=int) > 1)
        if split.size and not self.objective.split:
            raise EngineError(f"its answer splits expert {self.live[split[0]]}")
        return rounded

    def first_pairs(self) -> Int64:
        """Return int64 ``[open]``: where each expert's pairs begin."""
        return np.searchsorted(self.expert, np.arange(self.live.size))


def linear_time(objective: Objective, counts: Counts, slowness: Float64) -> Float64:
    """Return the time of GPUs with these counts, curves left out: `Objective.time`'s arithmetic."""
    times = [
        p.offset + p.activation * counts.activated + p.tile * counts.tiles + p.token * counts.tokens
        for p in objective.linear
    ]
    return np.asarray(slowness * np.maximum.reduce(times, initial=0.0))


def in_units(program: Program) -> tuple[Program, float]:
    """Return a program whose times are in units near one, for engines with absolute tolerances.

    The unit is the smallest price if all times are its multiples, so that they become integers;
    else the largest.
    """
    pieces = program.objective.pieces
    prices = [x for p in program.objective.linear for x in (p.activation, p.tile, p.token) if x]
    unit = min(prices)
    if any((x / unit) % 1 for x in [*prices, *(p.offset for p in program.objective.linear)]):
        unit = max(prices)
    if unit == 1:
        return program, 1.0
    scaled = tuple(
        Piece(p.offset / unit, p.activation / unit, p.tile / unit, p.token / unit)
        for p in pieces
        if isinstance(p, Piece)
    )
    objective = replace(program.objective, pieces=scaled)
    return replace(program, objective=objective, most=program.most / unit), unit


class Found(NamedTuple):
    """What an engine proposes.

    Attributes
    ----------
    taken
        Float64 or int64 ``[pairs]``: tokens by pair, or None if it found nothing in time.
    bound
        A lower bound on λ, already lowered by the engine's tolerance; -inf if it proved none. Above
        `Program.most`, or next to it, if it proved that no λ is within.
    """

    taken: Float64 | Int64 | None
    bound: float


NOTHING = Found(None, -math.inf)

Engine = Callable[[Program, "Int64 | None", float], Found]
"""Solve a program from a start (tokens by pair, or None) by a deadline, see `seconds_left`.

The start, if any, is within `Program.most` and has its twins in order.
"""


def deadline_of(context: Context) -> float:
    """Return when a call that begins now has to end, on the monotonic clock."""
    return math.inf if context.stop is None else time.monotonic() + context.stop.seconds


def pairs_of(placement: Placement, objective: Objective) -> list[Pairs]:
    """Return every layer's pairs for an objective."""
    every_slot = bool(objective.curves) and objective.split
    return [Pairs.of(placement, layer, every_slot) for layer in range(placement.num_layers)]


def starter(placement: Placement, objective: Objective, threads: int) -> Solve:
    """Return the function whose tokens the exact engines start from.

    Of activations and of tokens it is METRO's greedy answer, of anything else the search's.
    """
    if objective.counts_activations or objective.counts_tokens:
        return Metro().bind(placement, objective, threads)
    return Makespan().bind(placement, objective, threads)


def judge(
    proof: Proof,
    engine: Engine,
    placement: Placement,
    objective: Objective,
    threads: int,
    warm_start: bool,
) -> Solve:
    """Return the function that has an engine solve every problem of a batch and judges the answers.

    Parameters
    ----------
    proof
        The engine's name as a prover, and for errors.
    threads
        Problems solved at a time. Each by one thread of the engine, so that the answers do not
        depend on the number.
    warm_start
        Hand the engine the answer of `starter`, and keep it where nothing better is found in time.

    Notes
    -----
    Ctrl-C takes effect when the problems being solved at that moment end.
    """
    pairs = pairs_of(placement, objective)
    begin = starter(placement, objective, threads) if warm_start else None

    def solve(tokens: Int64, out: Routing, context: Context) -> None:
        deadline = deadline_of(context)
        if begin is not None:
            begin(tokens, out, context)
        demand, routed, makespan, bound, status, proved_by = by_problem(tokens, out)

        def solve_one(at: int) -> None:
            of_layer = pairs[at % placement.num_layers]
            program = Program.of(placement, of_layer, demand[at], objective)
            start = None if begin is None else of_layer.taken(routed[at])[program.pair]
            try:
                verdict = _try(proof, engine, program, start, deadline)
            except EngineError as error:
                error.by = proof
                raise failure(out, at, error) from error
            routed[at] = 0
            if verdict.taken is not None:
                routed[at] = program.routed(verdict.taken).reshape(-1)
            makespan[at], bound[at] = verdict.makespan, verdict.bound
            status[at], proved_by[at] = verdict.status, verdict.proof

        at_a_time(threads, solve_one, range(makespan.size))
        out.activated[...] = (out.tokens > 0).sum(axis=-1)
        out.certificate.fill(False)

    return solve


class _Verdict(NamedTuple):
    taken: Int64 | None
    makespan: float
    bound: float
    proof: Proof

    @property
    def status(self) -> Status:
        if self.taken is None:
            return Status.UNSOLVED
        return Status.OPTIMAL if self.makespan == self.bound else Status.FEASIBLE


def _try(
    proof: Proof, engine: Engine, program: Program, start: Int64 | None, deadline: float
) -> _Verdict:
    """Let an engine solve a program if there is need and time, and say what is then known."""
    counted = program.counted_bound()
    if program.live.size == 0:
        return _Verdict(program.tokens, counted, counted, Proof.COUNT)
    answers = []
    if start is not None:
        start = program.in_order(start)
        program = replace(program, most=program.makespan(start))
        if program.most == counted:
            return _Verdict(start, counted, counted, Proof.COUNT)
        answers.append(start)
    proven = -math.inf
    if seconds_left(deadline) > 0:
        found = engine(program, start, deadline)
        if found.bound > -math.inf:
            proven = program.raised(found.bound)
        if found.taken is not None:
            answers.append(program.rounded(found.taken))
    bound, by = (proven, proof) if proven >= counted else (counted, Proof.COUNT)
    if not answers:
        return _Verdict(None, math.nan, bound, by)
    best = min(answers, key=program.makespan)
    makespan = program.makespan(best)
    if bound > makespan:
        raise EngineError(
            f"it proves a makespan of {bound:.10g} or more where {makespan:.10g} is in hand"
        )
    return _Verdict(best, makespan, bound, by)


class ByProblem(NamedTuple):
    """A call's tokens, ``[problems, experts]``, and views of its answer, ``[problems, ...]``."""

    demand: Int64
    routed: Int64
    makespan: NDArray[np.float64]
    bound: NDArray[np.float64]
    status: NDArray[np.int8]
    proved_by: NDArray[np.int8]


def by_problem(tokens: Int64, out: Routing) -> ByProblem:
    """Return the problems of a call one below the other."""
    demand = tokens.reshape(-1, out.placement.num_experts)
    return ByProblem(
        demand,
        out.tokens.reshape(len(demand), -1),
        out.makespan.reshape(-1),
        out.bound.reshape(-1),
        out.status.reshape(-1),
        out.proved_by.reshape(-1),
    )


def failure(out: Routing, problem: int, error: EngineError) -> EplbError:
    """Return the error that says which engine failed, at which problem of a call, and how."""
    where = tuple(int(i) for i in np.unravel_index(problem, out.makespan.shape))
    return EplbError(f"{error.by.name.lower().replace('_', '-')}, problem {where}: {error}")
