"""What the exact engines share: METRO's integer program as arrays, and how an answer is judged.

METRO (arXiv 2512.09277) states the routing of one layer's batch as MIN-EXP-ROUTING. With T[e] the
tokens of live expert e, and a pair (e, g) for every GPU g that holds it::

    minimise   λ
    subject to Σ_e y[e,g] <= λ             for every GPU g
               Σ_g x[e,g]  = T[e]          for every live expert e
               x[e,g]     <= T[e] y[e,g]   for every pair
               x >= 0 integer, y binary, λ integer

For the objective ``"tokens"`` the first row is Σ_e x[e,g] <= λ and there is no y. Every engine
states this program, over all live experts: no expert is taken to sit on one replica (METRO's
Lemma 1, on which the compiled solver rests), and experts with one candidate are left to the
engine's presolve. λ is an integer at the optimum in any case; to say so lets an engine round its
bound up. An expert in several slots of a GPU is one pair, and the first of the slots takes its
tokens.

An engine proposes; its answer is judged here, in integers:

- Its x is rounded, and must serve every token once. Activated replicas, tokens and makespan are
  counted from it. The engine's y and λ are not looked at: within its tolerance x > 0 and y = 0 can
  both hold.
- Its bound, which the engine's file lowers by the engine's tolerance, is raised to the next
  integer, the values that both objectives take. The problem is OPTIMAL if that meets the makespan,
  and not otherwise, whatever the engine calls it.
- The bound reported is at least the one counted here: tokens (live experts) over the GPUs that hold
  any, or what one GPU alone can serve. Meeting this one does not make a problem OPTIMAL: the status
  says what the engine proved.
- An answer that does not serve the tokens, or a bound above a makespan in hand, is an engine's
  error and raises `EplbError`; neither is reported.

A problem that the time limit leaves without any answer is UNSOLVED: no tokens, nothing activated,
makespan NaN, and the bound. With a warm start this does not happen: METRO's greedy answer is
there from the beginning.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.errors import EplbError, SolverUnavailableError
from eplb_opt.objective import Objective
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.routers.base import Context, Solve
from eplb_opt.status import Status

if TYPE_CHECKING:
    from eplb_opt.routing import Routing


class Pairs(NamedTuple):
    """The pairs of an expert and a GPU that holds it in one layer, by expert, then GPU.

    Each array is int64 ``[pairs]``; `slot` is the physical id of the expert's first slot there.

    Examples
    --------
    >>> pairs = Pairs.of(Placement([[0, 1], [2, 0]]), layer=0)
    >>> pairs.expert.tolist(), pairs.gpu.tolist(), pairs.slot.tolist()
    ([0, 0, 1, 2], [0, 1, 0, 1], [0, 3, 1, 2])
    """

    expert: NDArray[np.int64]
    gpu: NDArray[np.int64]
    slot: NDArray[np.int64]

    @classmethod
    def of(cls, placement: Placement, layer: int) -> Pairs:
        """Return a layer's pairs."""
        expert_of = placement.expert_of[layer].astype(np.int64)
        filled = np.flatnonzero(expert_of != EMPTY)
        gpu = filled // placement.slots_per_gpu
        # unique() names the first place of every value, so the lowest slot stands for a duplicate.
        pair, first = np.unique(expert_of[filled] * placement.num_gpus + gpu, return_index=True)
        expert, gpu = np.divmod(pair, placement.num_gpus)
        return cls(expert, gpu, filled[first])


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One problem's integer program: the tokens of its live experts and their pairs.

    Attributes
    ----------
    objective
        Which of the two programs.
    num_gpus
        GPUs of the placement.
    live, tokens
        Int64 ``[live]``: the ids of the live experts, ascending, and their tokens.
    expert
        Int64 ``[pairs]``: the pair's expert, as a position in `live`, ascending.
    gpu, slot
        Int64 ``[pairs]``: the pair's GPU, and the physical id of the expert's first slot there.

    Examples
    --------
    Only live experts have pairs; two of them share GPU 1 with nobody else able to help:

    >>> placement = Placement([[0, 1], [2, 3]])
    >>> tokens, activations = np.array([7, 0, 5, 1]), Objective.preset("activations")
    >>> program = Program.of(placement, Pairs.of(placement, 0), tokens, activations)
    >>> program.live.tolist(), program.gpu.tolist(), program.counted_bound()
    ([0, 2, 3], [0, 1, 1], 2)
    """

    objective: Objective
    num_gpus: int
    live: NDArray[np.int64]
    tokens: NDArray[np.int64]
    expert: NDArray[np.int64]
    gpu: NDArray[np.int64]
    slot: NDArray[np.int64]

    @classmethod
    def of(
        cls, placement: Placement, pairs: Pairs, tokens: NDArray[np.int64], objective: Objective
    ) -> Program:
        """Return the program for one layer's tokens, int64 ``[experts]``."""
        live = np.flatnonzero(tokens)
        of_live = tokens[pairs.expert] > 0
        return cls(
            objective,
            placement.num_gpus,
            live,
            tokens[live],
            np.searchsorted(live, pairs.expert[of_live]),
            pairs.gpu[of_live],
            pairs.slot[of_live],
        )

    @property
    def counts_activations(self) -> bool:
        """Whether the program has y, and λ counts it."""
        return self.objective.counts_activations

    def makespan(self, taken: NDArray[np.int64]) -> int:
        """Return the makespan of tokens by pair."""
        time_by_gpu = np.zeros(self.num_gpus, np.int64)
        np.add.at(time_by_gpu, self.gpu, taken > 0 if self.counts_activations else taken)
        return int(time_by_gpu.max(initial=0))

    def counted_bound(self) -> int:
        """Return the lower bound that needs no engine: all GPUs together, or one GPU alone."""
        demand = np.ones_like(self.tokens) if self.counts_activations else self.tokens
        in_use = np.unique(self.gpu).size
        single = (np.bincount(self.expert, minlength=self.live.size) == 1)[self.expert]
        alone = np.zeros(self.num_gpus, np.int64)
        np.add.at(alone, self.gpu[single], demand[self.expert[single]])
        return max(-(-int(demand.sum()) // max(in_use, 1)), int(alone.max(initial=0)))

    def rounded(self, taken: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return an engine's tokens by pair as integers that serve every token once.

        Raises
        ------
        EngineError
            If they do not.
        """
        if not np.isfinite(taken).all():
            raise EngineError("its answer holds values that are not numbers")
        rounded = np.rint(taken).astype(np.int64)
        if (rounded < 0).any():
            raise EngineError("its answer holds a negative number of tokens")
        first_pair = np.searchsorted(self.expert, np.arange(self.live.size))
        served = np.add.reduceat(rounded, first_pair)
        wrong = np.flatnonzero(served != self.tokens)
        if wrong.size:
            at = wrong[0]
            raise EngineError(
                f"its answer serves {served[at]} of the {self.tokens[at]} tokens of expert "
                f"{self.live[at]}"
            )
        return rounded


class Found(NamedTuple):
    """What an engine proposes.

    Attributes
    ----------
    taken
        Float64 or int64 ``[pairs]``: tokens by pair, or None if it found nothing in time.
    bound
        A lower bound on λ, already lowered by the engine's tolerance; -inf if it proved none.
    """

    taken: NDArray[np.float64] | NDArray[np.int64] | None
    bound: float


class EngineError(Exception):
    """What an engine did instead of answering; `judge` adds the engine and the problem."""


NOTHING = Found(None, -math.inf)

Engine = Callable[[Program, "NDArray[np.int64] | None", float], Found]
"""Solve a program from a start (tokens by pair, or None) by a deadline, see `seconds_left`."""


def seconds_left(deadline: float) -> float:
    """Return the seconds to a deadline on the monotonic clock, inf if it is inf, never below 0."""
    return max(0.0, deadline - time.monotonic())


def require(engine: str, package: str) -> None:
    """Raise `SolverUnavailableError` if an engine's package is not installed; import nothing."""
    if find_spec(package) is None:
        raise SolverUnavailableError(f"{engine} needs {package}: pip install 'eplb-opt[exact]'")


def judge(
    name: str,
    engine: Engine,
    placement: Placement,
    objective: Objective,
    threads: int,
    warm_start: bool,
) -> Solve:
    """Return the function that has an engine solve every problem of a batch and judges the answers.

    Parameters
    ----------
    name
        The engine's, for errors.
    threads
        Problems solved at a time. Each by one thread of the engine, so that the answers do not
        depend on the number.
    warm_start
        Hand the engine METRO's greedy answer, and keep it where nothing better is found in time.

    Notes
    -----
    Ctrl-C takes effect when the problems being solved at that moment end.
    """
    pairs = [Pairs.of(placement, layer) for layer in range(placement.num_layers)]

    def solve(tokens: NDArray[np.int64], out: Routing, context: Context) -> None:
        deadline = math.inf if context.stop is None else time.monotonic() + context.stop.seconds
        out.tokens.fill(0)
        if warm_start:
            _core.route_metro(placement.core, tokens, out.core, threads, None)
        demand = tokens.reshape(-1, placement.num_experts)
        routed = out.tokens.reshape(-1, placement.expert_of.shape[1])
        makespan, bound, status = (a.reshape(-1) for a in (out.makespan, out.bound, out.status))

        def solve_one(at: int) -> None:
            of_layer = pairs[at % placement.num_layers]
            program = Program.of(placement, of_layer, demand[at], objective)
            start = routed[at, program.slot] if warm_start else None
            try:
                verdict = _try(engine, program, start, deadline)
            except EngineError as error:
                where = tuple(int(i) for i in np.unravel_index(at, out.makespan.shape))
                raise EplbError(f"{name}, problem {where}: {error}") from error
            if verdict.taken is not None:
                routed[at, program.slot] = verdict.taken
            makespan[at], bound[at], status[at] = verdict.makespan, verdict.bound, verdict.status

        # Not the caller's thread: HiGHS keeps a scheduler per thread, and ours would stop the
        # caller from choosing the threads of their own HiGHS models.
        with ThreadPoolExecutor(threads) as pool:
            deque(pool.map(solve_one, range(makespan.size)), maxlen=0)
        out.activated[...] = (out.tokens > 0).sum(axis=-1)
        out.certificate.fill(False)

    return solve


class _Verdict(NamedTuple):
    taken: NDArray[np.int64] | None
    makespan: float
    bound: float
    status: int


def _try(
    engine: Engine, program: Program, start: NDArray[np.int64] | None, deadline: float
) -> _Verdict:
    """Let an engine solve a program if there is time, and say what is then known."""
    if program.live.size == 0:
        return _Verdict(None, 0, 0, Status.OPTIMAL)
    answers = [] if start is None else [start]
    proven = 0
    if seconds_left(deadline) > 0:
        found = engine(program, start, deadline)
        proven = max(0, math.ceil(found.bound)) if math.isfinite(found.bound) else 0
        if found.taken is not None:
            answers.append(program.rounded(found.taken))
    bound = max(proven, program.counted_bound())
    if not answers:
        return _Verdict(None, math.nan, bound, Status.UNSOLVED)
    best = min(answers, key=program.makespan)
    makespan = program.makespan(best)
    if proven > makespan:
        raise EngineError(f"it proves a makespan of {proven} or more where {makespan} is in hand")
    status = Status.OPTIMAL if proven == makespan else Status.FEASIBLE
    return _Verdict(best, makespan, bound, status)
