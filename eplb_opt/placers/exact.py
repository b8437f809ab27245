"""What the exact placers share: the integer program as arrays, and how an answer is judged.

The program minimises the makespan of one layer. With w[k,e] the load of expert e in window k, and
u[e,c,g] = 1 where expert e has c copies, one of them on GPU g::

    minimise   the mean or the largest of λ[k]
    subject to Σ_e,c u[e,c,g] = room[g]             for every GPU: its slots are filled
               Σ_c z[e,c]     = 1                   for every expert: so many copies
               Σ_g u[e,c,g]   = c z[e,c]            for every expert and count
               u[e,c,g]      <= z[e,c]
               u, z binary

and, if copies share a load equally, Σ_e,c w[k,e]/c u[e,c,g] <= λ[k] for every GPU and window. If
they share it freely, counts are not told apart (one u[e,g], whose sum over the GPUs is 1 or more)::

               Σ_g y[k,e,g]   = w[k,e]              for every expert and window
               y[k,e,g]      <= w[k,e] u[e,g]
               Σ_e y[k,e,g]  <= λ[k]                for every GPU and window

With nodes, q[j,n] = 1 where group j is on node n: u[e,c,g] <= q[group of e, node of g], one node a
group and equally many groups a node.

What makes the program smaller than it reads, and is shared by the engines:

- Only counts are there with which the makespan in hand can be kept: enough copies that one of them
  is no larger, and no more than leave every other expert its fewest (`Program.choices`).
- GPUs of a node with the same room may be renamed among each other, so they are ordered by their
  hottest expert (`Program.ordered`): one may have an expert only if the one before has it or a
  hotter one. So may nodes, by their first group.

An engine proposes; its answer is judged here. The makespan is that of `Measure`, on the slots. A
bound, which the engine's file lowers by the engine's tolerance, is raised to the next value that a
makespan can take. Where the time limit leaves no better answer, the start is the answer.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.engines import EngineError, at_a_time, seconds_left
from eplb_opt.errors import EplbError
from eplb_opt.measure import Measure, Split
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.placers.base import Placed, PlacementProblem
from eplb_opt.placers.search import Search
from eplb_opt.status import Proof
from eplb_opt.stopping import TimeLimit

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Held = NDArray[np.bool_]

ORDERED_RANKS = 32
"""Experts, the hottest first, by which GPUs are ordered; further rows cost more than they save."""

ROUNDING = 2.0**-40
"""More than sums of loads are rounded by, as a share."""


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One layer's program; its experts are ranked, the hottest first.

    Attributes
    ----------
    windows
        Float64 ``[windows, experts]``.
    measure
        What is minimised.
    room
        Int64 ``[gpus]``: experts that each GPU takes.
    node
        Int64 ``[gpus]``.
    group
        Int64 ``[experts]``.
    start
        Bool ``[experts, gpus]``: who holds whom in the answer in hand.
    most, counted
        Its makespan, and a lower bound on all.
    """

    windows: Float64
    measure: Measure
    room: Int64
    node: Int64
    group: Int64
    start: Held
    most: float
    counted: float

    @property
    def splits_freely(self) -> bool:
        """Whether copies share a load as is best."""
        return self.measure.split is Split.FREE

    @property
    def bottlenecks(self) -> Int64:
        """Int64 ``[windows]``: which λ each window's load is under."""
        windows = np.arange(len(self.windows))
        return windows if self.measure.over_windows == "mean" else np.zeros_like(windows)

    @property
    def num_nodes(self) -> int:
        """Nodes that groups keep to."""
        return int(self.node[-1]) + 1

    @property
    def num_groups(self) -> int:
        """Groups of experts."""
        return int(self.group.max()) + 1

    def copies(self) -> tuple[Int64, Int64]:
        """Return int64 ``[experts]``, twice: the fewest and the most copies of each.

        A copy of each expert alone must not exceed the makespan in hand.
        """
        alone = self.measure.sum_up(self.windows) / self.most
        fewest = np.maximum(np.ceil(alone * (1 - ROUNDING)), 1).astype(np.int64)
        live = np.bincount(self.node, self.room > 0)
        spare = np.bincount(self.node, self.room) - len(self.group) // self.num_nodes
        left = int(self.room.sum() - fewest.sum())
        return fewest, np.minimum(min(int(live.max()), 1 + int(spare.max())), fewest + left)

    def choices(self) -> tuple[Int64, Int64]:
        """Return int64 ``[choices]``, twice: an expert, ascending, and how many copies it has.

        With free split one of each expert, whose number of copies says nothing.
        """
        fewest, most = self.copies()
        if self.splits_freely:
            return np.arange(len(fewest)), fewest
        expert = np.repeat(np.arange(len(fewest)), most - fewest + 1)
        first = np.searchsorted(expert, expert)
        return expert, fewest[expert] + np.arange(len(expert)) - first

    @property
    def denominator(self) -> int:
        """What a makespan of integer loads can be divided by: it is an integer over this."""
        _, most = self.copies()
        parts = np.count_nonzero(self.room) if self.splits_freely else most.max()
        return math.lcm(*range(1, int(parts) + 1)) if most.max() > 1 else 1

    def raised(self, bound: float) -> float:
        """Return the next value that a makespan can take from a bound on, where that is known."""
        values = self.denominator * (int(self.bottlenecks[-1]) + 1)  # beyond a double, maybe
        if (self.windows % 1).any() or not 0 < bound < math.inf:
            return bound
        steps = Fraction(bound) * values
        if steps >= 1 / ROUNDING:
            return bound
        return max(bound, math.ceil(steps * Fraction(1 - ROUNDING)) / values)

    def ordered(self) -> list[tuple[int, int]]:
        """Return pairs of GPUs; the first has the hotter experts, to the first that differs."""
        kinds: dict[tuple[int, int], list[int]] = {}
        for gpu, kind in enumerate(zip(self.node.tolist(), self.room.tolist(), strict=True)):
            kinds.setdefault(kind, []).append(gpu)
        return [pair for gpus in kinds.values() for pair in pairwise(gpus)]

    @property
    def nodes_alike(self) -> bool:
        """Whether nodes may be renamed among each other."""
        by_node = self.room.reshape(self.num_nodes, -1)
        return bool((by_node == by_node[0]).all())

    def in_order(self) -> Held:
        """Return the start with GPUs and nodes renamed into their order."""
        held = self.start.copy()
        if self.nodes_alike:
            by_node = held.reshape(len(held), self.num_nodes, -1)
            first = [self.group[by_node[:, n].any(axis=1)].min() for n in range(self.num_nodes)]
            held = by_node[:, np.argsort(first)].reshape(held.shape)
        kinds = self.node * (self.room.max() + 1) + self.room
        for kind in np.unique(kinds):
            gpus = np.flatnonzero(kinds == kind)
            held[:, gpus] = held[:, gpus[np.lexsort(~held[::-1, gpus])]]
        return held

    def require_placement(self, held: Held) -> None:
        """Raise `EngineError` unless every expert is held, every slot filled, no group split."""
        if not held.any(axis=1).all():
            raise EngineError("its answer leaves an expert out")
        if (held.sum(axis=0) != self.room).any():
            raise EngineError("its answer holds other than one expert a slot")
        on_node = np.zeros((self.num_groups, self.num_nodes), np.bool_)
        expert, gpu = np.nonzero(held)
        on_node[self.group[expert], self.node[gpu]] = True
        if (on_node.sum(axis=1) > 1).any():
            raise EngineError("its answer spreads a group over nodes")


class Found(NamedTuple):
    """What an engine proposes.

    Attributes
    ----------
    held
        Bool ``[experts, gpus]``, or None if it found nothing in time.
    bound
        A lower bound on the makespan, already lowered by the engine's tolerance; -inf if none.
    """

    held: Held | None
    bound: float


Engine = Callable[[Program, float], Found]
"""Solve a program by a deadline on the monotonic clock."""


def place(problem: PlacementProblem, proof: Proof, engine: Engine) -> Placed:
    """Have an engine place every layer, and judge its answers.

    Raises
    ------
    ValueError
        If several windows sum up to a quantile.
    InfeasibleError
        If a layer, or a node of one, has fewer slots than experts, less those that stay empty.
    EplbError
        If the engine fails, or contradicts an answer in hand.
    """
    measure, windows = problem.measure, problem.windows
    if len(windows) > 1 and measure.over_windows not in ("mean", "worst"):
        raise ValueError(
            f"the exact engines place for the windows' 'mean' or 'worst', not for the quantile "
            f"{measure.over_windows}"
        )
    nodes, groups, note = problem.topology()
    problem.require_node_room(nodes)
    experts = windows.shape[-1]
    room = np.minimum(problem.room(), experts // nodes).astype(np.int64)
    slots = Search().place(problem).slots
    most = measure.makespan(Placement(slots, experts), windows)
    slack, counted = measure.slack(windows), problem.floor(nodes)
    bound = counted.copy()
    clock = _Clock(problem.stop, len(slots), problem.threads)

    def place_one(layer: int) -> None:
        deadline = clock.deadline()
        if most[layer] <= counted[layer] * (1 + ROUNDING) or seconds_left(deadline) <= 0:
            return
        rank = np.argsort(-problem.load[layer], kind="stable")
        program = Program(
            windows[:, layer, rank],
            measure,
            room[layer],
            np.arange(problem.num_gpus) * nodes // problem.num_gpus,
            rank * groups // experts,
            _held(slots[layer], experts)[rank],
            float(most[layer]),
            float(counted[layer]),
        )
        try:
            found = engine(program, deadline)
            bound[layer] = max(program.counted, program.raised(found.bound))
            if found.held is not None:
                program.require_placement(found.held)
                proposed = _slots(found.held, rank, problem.slots_per_gpu)
                makespan = measure.makespan(
                    Placement(proposed[None], experts), windows[:, [layer]]
                )[0]
                if makespan < most[layer]:
                    slots[layer], most[layer] = proposed, makespan
            if bound[layer] > most[layer] * (1 + ROUNDING) + slack[layer]:
                raise EngineError(
                    f"it proves a makespan of {bound[layer]:.10g} or more where "
                    f"{most[layer]:.10g} is in hand"
                )
        except EngineError as error:
            name = proof.name.lower().replace("_", "-")
            raise EplbError(f"{name}, layer {layer}: {error}") from error

    at_a_time(problem.threads, place_one, range(len(slots)))
    previous = problem.old_slots()
    if previous is not None:
        _core.keep_slots(previous, slots)
    return Placed(slots, note, nodes, bound, proof)


def _held(slots: NDArray[np.int32], experts: int) -> Held:
    """Return bool ``[experts, gpus]`` of slots ``[gpus, slots]``."""
    held = np.zeros((experts + 1, len(slots)), np.bool_)
    held[slots, np.arange(len(slots))[:, None]] = True  # EMPTY, -1, is the last
    return held[:experts]


def _slots(held: Held, rank: Int64, per_gpu: int) -> NDArray[np.int32]:
    """Return slots ``[gpus, slots]`` of ranked experts."""
    slots = np.full((held.shape[1], per_gpu), EMPTY, np.int32)
    for gpu, of_gpu in enumerate(held.T):
        experts = np.sort(rank[of_gpu])
        slots[gpu, : len(experts)] = experts
    return slots


class _Clock:
    """Shares the time that is left among the layers that are left."""

    def __init__(self, stop: TimeLimit | None, layers: int, threads: int) -> None:
        self._end = math.inf if stop is None else time.monotonic() + stop.seconds
        self._left, self._threads = layers, threads
        self._lock = threading.Lock()

    def deadline(self) -> float:
        """Return the deadline of a layer that begins now, on the monotonic clock."""
        with self._lock:
            share = min(1.0, self._threads / self._left)
            self._left -= 1
        return time.monotonic() + share * seconds_left(self._end)
