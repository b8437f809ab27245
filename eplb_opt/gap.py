"""The optimality-gap study: how far each router is from the proven optimum, on the same batches."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt.demand import count_tokens
from eplb_opt.errors import InvalidTokensError
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement, slots_for
from eplb_opt.placers import PlacementMethod
from eplb_opt.placing import solve_placement
from eplb_opt.routers import RoutingMethod, TimeLimit, resolve_method
from eplb_opt.routing import Router, Routing, Status
from eplb_opt.trace import LoadTrace, TokenTrace, read_trace
from eplb_opt.workload import Workload

__all__ = ["DEFAULT_METHODS", "GapRow", "GapStudy", "Traffic", "optimality_gap"]

Traffic: TypeAlias = "Workload | LoadTrace | TokenTrace | str | os.PathLike[str]"

DEFAULT_METHODS = (
    "optimal",
    "metro:order=single-copy-first",
    "metro",
    "uniform",
    "rank-mod",
    "nearest",
    "vllm-hash",
    "trtllm",
    "random",
)

_STEPS_AT_ONCE = 32  # bounds the memory of a study, whatever the length of its trace


@dataclass(frozen=True, slots=True)
class GapRow:
    """One method on one deployment. Means are over problems (a layer and a batch each).

    Attributes
    ----------
    gpus, redundant, replication
        GPUs, slots beyond one per expert, and slots over experts.
    method
        As it was asked for.
    problems
        Problems solved.
    gap_mean, gap_p50, gap_p95, gap_p99, gap_max
        Of ``makespan / optimum - 1`` over problems.
    makespan, optimum
        Means of the fullest GPU's time under the method, and of the proven optimum.
    even
        Mean of what the fullest GPU would have if replicas did not matter: live experts, or
        tokens, over GPUs.
    activated
        Replicas that receive tokens, mean.
    tokens_per_activated
        Tokens over activated replicas.
    live_experts, replicas_available
        Live experts, and the replicas that they have; means.
    microseconds
        Wall time per problem of the routing call, the Python around it included.
    proven
        Share of the problems whose optimum is proven (1.0 for the compiled exact methods).
    """

    gpus: int
    redundant: int
    replication: float
    method: str
    problems: int
    gap_mean: float
    gap_p50: float
    gap_p95: float
    gap_p99: float
    gap_max: float
    makespan: float
    optimum: float
    even: float
    activated: float
    tokens_per_activated: float
    live_experts: float
    replicas_available: float
    microseconds: float
    proven: float


@dataclass(frozen=True, slots=True)
class GapStudy:
    """What a study was of, and its rows.

    Attributes
    ----------
    traffic
        What the batches were drawn from or replayed from.
    objective
        What was minimised.
    tokens_per_batch
        Tokens of a batch over all GPUs; None where the counts of a trace decide.
    batches, layers
        Batches routed, and MoE layers of each.
    machine
        Where the times were taken.
    rows
        One per deployment and method.
    """

    traffic: str
    objective: str
    tokens_per_batch: int | None
    batches: int
    layers: int
    machine: str
    rows: tuple[GapRow, ...]

    def to_json(self) -> str:
        """Return the study as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def to_csv(self) -> str:
        """Return the rows as CSV with a header line."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [f.name for f in fields(GapRow)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        return text.getvalue()


def optimality_gap(
    traffic: Traffic | None = None,
    *,
    gpus: Sequence[int] = (8, 16, 32),
    replication: Sequence[float] = (1.125, 1.25, 1.5),
    redundant: Sequence[int] | None = None,
    methods: Sequence[str | RoutingMethod] = DEFAULT_METHODS,
    objective: Objective | str = "activations",
    tokens: int = 32,
    steps: int | None = None,
    top_k: int = 8,
    place_on: Traffic | ArrayLike | None = None,
    placer: str | PlacementMethod = "deepseek",
    seed: int = 0,
    threads: int = 1,
    stop: TimeLimit | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> GapStudy:
    """Place, route batches with every method, and compare with the proven optimum.

    Parameters
    ----------
    traffic
        A `Workload` (batches are drawn), a `TokenTrace` (consecutive tokens are replayed), a
        `LoadTrace` (of several steps: each is replayed as a batch; of one: batches are drawn from
        its popularity), or the path of a trace. Default: DeepSeek-V3 decode traffic. Dense layers
        are left out.
    gpus, replication
        Deployments to try, each with each. The slots are experts times replication, rounded up to
        fill every GPU equally.
    redundant
        Redundant slots instead of replication ratios; experts + redundant must divide by the GPUs.
    methods
        Routers, by name or as instances.
    objective
        What the gap is of.
    tokens
        Tokens of a batch over all GPUs, where batches are drawn or cut from a token trace.
    steps
        Batches; default 20, or the whole of a trace that is replayed.
    top_k
        Experts per token, where batches are drawn from a `LoadTrace`.
    place_on
        Traffic or load ``[layers, experts]`` that the placement is made for, instead of the
        popularity of the traffic itself.
    placer
        The placement method.
    seed
        For drawing, and for methods with a seed of their own that they were not given.
    threads
        Threads over problems.
    stop
        Time limit of each call of an exact engine.
    progress
        Called with (done, total) batches times deployments times methods.

    Returns
    -------
    GapStudy

    Raises
    ------
    InvalidTokensError
        Also if a method needs top-k ids and the trace holds counts only.

    Notes
    -----
    A batch's rows are cut into equal local batches, one per GPU, for rules that depend on them.
    Memory does not grow with the length of the trace, but for one number per problem and method.

    Examples
    --------
    >>> study = optimality_gap(gpus=[8], replication=[1.25], methods=["metro"], steps=1)
    >>> study.rows[0].problems, study.rows[0].gap_mean > 0
    (58, True)
    """
    objective = Objective.of(objective)
    batches = _Batches.of(traffic, tokens=tokens, steps=steps, top_k=top_k, seed=seed)
    load = batches.load if place_on is None else _load_of(place_on, batches)
    experts = load.shape[1]
    deployments = [
        (g, slots_for(slots, g))
        for g in gpus
        for slots in _slot_counts(experts, g, replication, redundant)
    ]
    resolved = [(_label(m), resolve_method(m, objective)) for m in methods]

    rows: list[GapRow] = []
    done, total = 0, len(deployments) * len(resolved) * batches.steps
    for num_gpus, per_gpu in deployments:
        placement = solve_placement(
            load, num_gpus=num_gpus, slots_per_gpu=per_gpu, method=placer
        ).placement
        optimum = Router(placement, objective=objective, threads=threads)
        tallies = [
            _Tally(label, Router(placement, objective=objective, method=m, threads=threads))
            for label, m in resolved
        ]
        for demand, ids in batches.chunks(num_gpus):
            best = optimum.route(demand)
            live = _live(placement, demand)
            for tally in tallies:
                tally.add(demand, ids, best, stop)
                tally.live += live
                done += len(demand)
                if progress is not None:
                    progress(done, total)
        rows += [tally.row(placement, objective) for tally in tallies]
    return GapStudy(
        traffic=batches.name,
        objective=objective.name,
        tokens_per_batch=batches.tokens,
        batches=batches.steps,
        layers=load.shape[0],
        machine=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        rows=tuple(rows),
    )


@dataclass(frozen=True, slots=True)
class _Batches:
    """Batches to route, in chunks of steps, over the MoE layers of some traffic.

    `at` gives tokens ``[steps, layers, experts]`` or top-k ids ``[steps, layers, rows, k]`` of the
    steps from one number to another.
    """

    name: str
    steps: int
    tokens: int | None
    load: NDArray[np.float64]
    layers: NDArray[np.intp]
    at: Callable[[int, int], NDArray[np.integer]]
    holds_ids: bool

    @classmethod
    def of(
        cls, traffic: Traffic | None, *, tokens: int, steps: int | None, top_k: int, seed: int
    ) -> _Batches:
        if tokens < 1 or (steps is not None and steps < 1):
            raise ValueError(f"tokens and steps must be at least 1, not {tokens} and {steps}")
        if traffic is None:
            traffic, name = (
                Workload.preset("deepseek-v3", seed=seed),
                "DeepSeek-V3 decode, synthetic",
            )
        else:
            name = (
                str(traffic) if isinstance(traffic, (str, os.PathLike)) else type(traffic).__name__
            )
        source = _opened(traffic)
        if isinstance(source, LoadTrace) and source.num_steps == 1:
            name += ", drawn from its popularity"
            source = Workload.from_load(source.load(), top_k, seed=seed)
        if isinstance(source, Workload):
            popularity, drawn = source.popularity, source
            return cls(
                name,
                steps or 20,
                tokens,
                *_moe_layers(popularity),
                at=lambda begin, end: drawn.draw(tokens, end - begin, first_step=begin),
                holds_ids=True,
            )
        if isinstance(source, LoadTrace):
            counts = source.tokens[:steps]
            return cls(
                name,
                len(counts),
                None,
                *_moe_layers(source.load()),
                at=lambda begin, end: counts[begin:end],
                holds_ids=False,
            )
        cut = source.batches(tokens, steps=steps)
        return cls(
            name,
            len(cut),
            tokens,
            *_moe_layers(source.load()),
            at=lambda begin, end: cut[begin:end],
            holds_ids=True,
        )

    def chunks(self, gpus: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32] | None]]:
        """Yield tokens, and ids ``[steps, layers, gpus, rows, k]`` where the traffic has them."""
        experts = self.load.shape[1]
        for begin in range(0, self.steps, _STEPS_AT_ONCE):
            part = self.at(begin, min(begin + _STEPS_AT_ONCE, self.steps))[:, self.layers]
            if self.holds_ids:
                yield count_tokens(part, experts), _local_batches(part, gpus)
            else:
                yield np.ascontiguousarray(part, dtype=np.int64), None


class _Tally:
    """Adds up one method's answers, one number per problem."""

    def __init__(self, label: str, router: Router) -> None:
        self.label = label
        self.router = router
        self.live = np.zeros(2)
        self._makespan: list[NDArray[np.float64]] = []
        self._optimum: list[NDArray[np.float64]] = []
        self._seconds = 0.0
        self._activated = self._tokens = self._proven = 0

    def add(
        self,
        demand: NDArray[np.int64],
        ids: NDArray[np.int32] | None,
        best: Routing,
        stop: TimeLimit | None,
    ) -> None:
        traits = self.router.method.traits
        given = ids if traits.needs else None
        if traits.needs and ids is None:
            raise InvalidTokensError(
                f"{self.label} needs {traits.needs[0]} and the trace holds counts only; leave the "
                f"method out, or draw batches from the trace's load"
            )
        out = self.router.allocate(demand.shape)
        began = time.perf_counter()
        self.router.route(
            demand, out=out, topk_ids=given, stop=stop if traits.extra == "exact" else None
        )
        self._seconds += time.perf_counter() - began
        self._makespan.append(out.makespan.ravel())
        self._optimum.append(best.makespan.ravel())
        self._activated += int(out.activated.sum())
        self._tokens += int(demand.sum())
        self._proven += int((best.status == Status.OPTIMAL).sum())

    def row(self, placement: Placement, objective: Objective) -> GapRow:
        makespan, optimum = np.concatenate(self._makespan), np.concatenate(self._optimum)
        count = makespan.size
        gap = np.divide(makespan, optimum, out=np.ones_like(makespan), where=optimum > 0) - 1
        p50, p95, p99 = np.percentile(gap, [50, 95, 99])
        slots = placement.num_gpus * placement.slots_per_gpu
        live, available = self.live / count
        total = self._tokens / count if objective.name == "tokens" else live
        return GapRow(
            gpus=placement.num_gpus,
            redundant=slots - placement.num_experts,
            replication=slots / placement.num_experts,
            method=self.label,
            problems=count,
            gap_mean=float(gap.mean()),
            gap_p50=float(p50),
            gap_p95=float(p95),
            gap_p99=float(p99),
            gap_max=float(gap.max()),
            makespan=float(makespan.mean()),
            optimum=float(optimum.mean()),
            even=float(total / placement.num_gpus),
            activated=self._activated / count,
            tokens_per_activated=self._tokens / max(1, self._activated),
            live_experts=float(live),
            replicas_available=float(available),
            microseconds=self._seconds / count * 1e6,
            proven=self._proven / count,
        )


def _opened(traffic: Traffic) -> Workload | LoadTrace | TokenTrace:
    return read_trace(traffic) if isinstance(traffic, (str, os.PathLike)) else traffic


def _load_of(place_on: Traffic | ArrayLike, batches: _Batches) -> NDArray[np.float64]:
    if isinstance(place_on, (str, os.PathLike, Workload, LoadTrace, TokenTrace)):
        source = _opened(place_on)
        load = source.popularity if isinstance(source, Workload) else source.load()
        load, _ = _moe_layers(load)
    else:
        load = np.asarray(place_on, dtype=np.float64)
    if load.shape != batches.load.shape:
        raise InvalidTokensError(
            f"the load to place on has shape {load.shape} (MoE layers, experts), "
            f"the traffic {batches.load.shape}"
        )
    return load


def _moe_layers(load: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return the rows with any load, and which they are."""
    array = np.asarray(load, dtype=np.float64)
    layers = np.flatnonzero(array.any(axis=-1))
    if not layers.size:
        raise InvalidTokensError("the traffic holds no tokens in any layer")
    return array[layers], layers


def _slot_counts(
    experts: int, gpus: int, replication: Sequence[float], redundant: Sequence[int] | None
) -> list[int]:
    if redundant is not None:
        return [experts + extra for extra in redundant]
    low = [ratio for ratio in replication if not ratio >= 1]
    if low:
        raise ValueError(f"replication is at least 1 (a slot for every expert), not {low[0]}")
    return [int(np.ceil(round(experts * ratio / gpus, 9))) * gpus for ratio in replication]


def _local_batches(ids: NDArray[np.integer], gpus: int) -> NDArray[np.int32]:
    """Cut ``[steps, layers, rows, k]`` into ``[steps, layers, gpus, rows / gpus, k]``, padded."""
    steps, layers, rows, k = ids.shape
    each = -(-rows // gpus)
    by_gpu = np.full((steps, layers, gpus, each, k), -1, np.int32)
    # Row r goes to GPU r mod gpus, so that the local batches differ by one row at most.
    row = np.arange(rows)
    by_gpu[:, :, row % gpus, row // gpus] = ids
    return by_gpu


def _live(placement: Placement, demand: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the live experts and their replicas, summed over problems."""
    live = demand > 0
    return np.array([live.sum(), (live * placement.copies).sum()], dtype=np.float64)


def _label(method: str | RoutingMethod) -> str:
    return method if isinstance(method, str) else repr(method)
