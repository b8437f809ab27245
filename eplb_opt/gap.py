"""The optimality-gap study: how far each router is from the proven optimum, on the same batches."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt.batches import Batches, BatchSteps, Traffic, moe_layers, opened
from eplb_opt.errors import EplbError, InvalidTokensError
from eplb_opt.objective import Objective
from eplb_opt.placement import slots_for
from eplb_opt.placers import PlacementMethod
from eplb_opt.placing import as_load, solve_placement
from eplb_opt.pricing import slowest_gpu
from eplb_opt.routers import RoutingMethod, resolve_for
from eplb_opt.routing import Router
from eplb_opt.status import Status
from eplb_opt.stopping import TimeLimit
from eplb_opt.trace import LoadTrace, TokenTrace
from eplb_opt.workload import Workload

__all__ = ["GapRow", "GapStudy", "Traffic", "default_methods", "optimality_gap"]

_RULES = ("metro:order=single-copy-first", "metro")
_SPLITTING_RULES = ("uniform", "rank-mod", "nearest", "vllm-hash", "trtllm", "random")


def default_methods(objective: Objective) -> tuple[str, ...]:
    """Return the methods that a study of this objective compares, its reference first."""
    first = [_reference(objective)]
    if first == ["makespan"]:
        first += ["matching", "flow"] if objective.split else ["matching"]
    return (*first, *_RULES, *(_SPLITTING_RULES if objective.split else ()))


def _reference(objective: Objective) -> str:
    """Return the method to compare with: it proves its answers, or nearly all of them."""
    counts = objective.counts_activations or objective.counts_tokens
    return "optimal" if counts else "makespan"


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
        Problems answered; all figures below are of these.
    unsolved
        Problems that an exact engine left without an answer when its time was over.
    gap_mean, gap_p50, gap_p95, gap_p99, gap_max
        Of ``makespan / optimum - 1`` over problems.
    makespan, optimum
        Means of the slowest GPU's time under the method, and of the best proven bound: that of the
        study's reference, or of an exact method that proves more. See `optimum_proven`.
    even
        Mean of what the fullest GPU would have if replicas did not matter: live experts, or
        tokens, over GPUs. NaN for an objective that counts neither.
    activated
        Replicas that receive tokens, mean.
    tokens_per_activated
        Tokens over activated replicas.
    live_experts, replicas_available
        Live experts, and the replicas that they have; means.
    microseconds
        Wall time per problem, unsolved ones included, of the routing call: with the Python around
        it and, for rules that need top-k ids, the checking and counting of these.
    exact
        Whether the method proves its answers, if its time lasts.
    proven
        Share of the problems whose answer the method itself proved to be optimal.
    optimum_proven
        Share of the problems where some answer meets the bound, which is then the optimum. The gaps
        of the others are to a bound that may be too low: they are at most what is said.
    gap_beyond_idle
        ``makespan / optimum - 1`` of the means, without what the objective's offsets alone cost,
        which no routing changes; NaN where the optimum is no more than that.
    """

    gpus: int
    redundant: int
    replication: float
    method: str
    problems: int
    unsolved: int
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
    exact: bool
    proven: float
    optimum_proven: float
    gap_beyond_idle: float


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
    reference
        The method that all are compared with: ``optimal``, or for an objective that needs a search
        ``makespan`` with its proven bound.
    idle
        Time that the objective's offsets alone cost.
    """

    traffic: str
    objective: str
    tokens_per_batch: int | None
    batches: int
    layers: int
    machine: str
    rows: tuple[GapRow, ...]
    reference: str
    idle: float

    def to_json(self) -> str:
        """Return the study as a JSON object; what is not known (no problem answered) is null."""
        return as_json(self)

    def to_csv(self) -> str:
        """Return the rows as CSV with a header line."""
        return as_csv(GapRow, self.rows)


def as_json(study: Any) -> str:
    """Return a study (a dataclass or a dict) as JSON; numbers that are not finite are null."""

    def known(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: known(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [known(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    figures = study if isinstance(study, dict) else asdict(study)
    return json.dumps(known(figures), indent=2, allow_nan=False)


def as_csv(row_type: type[Any], rows: Sequence[Any]) -> str:
    """Return rows (dataclasses of one type) as CSV with a header line."""
    return csv_of([f.name for f in fields(row_type)], [asdict(row) for row in rows])


def csv_of(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a header line."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def optimality_gap(
    traffic: Traffic | None = None,
    *,
    gpus: Sequence[int] = (8, 16, 32),
    replication: Sequence[float] = (1.125, 1.25, 1.5),
    redundant: Sequence[int] | None = None,
    methods: Sequence[str | RoutingMethod] | None = None,
    objective: Objective | str = "activations",
    tokens: int = 32,
    steps: int | None = None,
    top_k: int = 8,
    draft_layers: int = 0,
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
        Routers, by name or as instances. Default: `default_methods`, but for those that need top-k
        ids where a trace holds counts only. ``"matching"`` and ``"flow"`` minimise
        activations and tokens under any objective; what they answer has the time that the objective
        gives it.
    objective
        What the gap is of: an `Objective`, a preset's name or a JSON file. Where it counts neither
        activations nor tokens, ``makespan`` is the reference, and its proven bound stands for the
        optimum; see `GapRow.optimum_proven`.
    tokens
        Tokens of a batch over all GPUs, where batches are drawn or cut from a token trace.
    steps
        Batches; default 20, or the whole of a trace that is replayed, which must hold as many.
    top_k
        Experts per token, where batches are drawn from a `LoadTrace`.
    draft_layers
        Layers at the end of the traffic that belong to a draft model; left out.
    place_on
        Traffic or load ``[layers, experts]`` that the placement is made for, instead of the
        popularity of the traffic itself. With as many layers as the traffic, each stands for the
        same one of it, and the traffic decides which are left out; or it has the MoE layers only.
    placer
        The placement method.
    seed
        For drawing batches, where `traffic` is not a `Workload`, which has its own.
    threads
        Threads over problems.
    stop
        Time limit of each call of an exact engine: up to 32 batches with all their layers. See
        `GapRow.proven` for how many it proved in time; its other answers are the best that it had.
    progress
        Called with (done, total) batches times deployments times methods.

    Returns
    -------
    GapStudy

    Raises
    ------
    InvalidTokensError
        If the traffic, or what to place on, is not as above; if a method that was asked for needs
        top-k ids and the trace holds counts only; if the trace holds fewer steps.
    InvalidPlacementError
        If the slots do not divide over the GPUs.
    ValueError
        Unknown names, numbers out of range, or nothing to try.

    Notes
    -----
    A batch's rows are cut into equal local batches, one per GPU, for rules that depend on them.
    Batches are routed 32 at a time (a method with a seed starts anew each time), so memory does not
    grow with the length of the trace, but for one number per problem and method.

    Examples
    --------
    >>> study = optimality_gap(gpus=[8], replication=[1.25], methods=["metro"], steps=1)
    >>> study.rows[0].problems, study.rows[0].gap_mean > 0
    (58, True)
    """
    objective = Objective.of(objective)
    batches = Batches.of(
        traffic, tokens=tokens, steps=steps, top_k=top_k, draft_layers=draft_layers, seed=seed
    )
    load = batches.load if place_on is None else _load_of(place_on, draft_layers, batches)
    tried = deployments(load.shape[1], gpus, replication, redundant)
    resolved = _resolved(methods, objective, batches.holds_ids)
    reference = _reference(objective)

    rows: list[GapRow] = []
    done, total = 0, len(tried) * len(resolved) * batches.steps
    for num_gpus, per_gpu in tried:
        placement = solve_placement(
            load, num_gpus=num_gpus, slots_per_gpu=per_gpu, method=placer
        ).placement
        best = Router(placement, objective=objective, method=reference, threads=threads)
        tallies = [
            _Tally(
                label, Router(placement, objective=own, method=m, threads=threads), objective, stop
            )
            for label, m, own in resolved
        ]
        for chunk in batches.chunks(num_gpus):
            demand = chunk.tokens
            routing = best.route(demand, bound=True)
            optimum, least = routing.bound, routing.makespan
            answers = []
            for tally in tallies:
                answer = tally.route(chunk)
                optimum = np.fmax(optimum, answer.bound)
                least = np.fmin(least, answer.makespan)
                answers.append(answer)
                done += len(demand)
                if progress is not None:
                    progress(done, total)
            for tally, answer in zip(tallies, answers, strict=True):
                tally.add(demand, answer, optimum, proven=least <= optimum)
        rows += [tally.row() for tally in tallies]
    return GapStudy(
        traffic=batches.name,
        objective=objective.name,
        tokens_per_batch=batches.tokens,
        batches=batches.steps,
        layers=load.shape[0],
        machine=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        rows=tuple(rows),
        reference=reference,
        idle=objective.idle,
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """A method's answers to a chunk, arrays [steps, layers]; NaN where there is none, or no bound.

    `proven` says where the method itself proved that it is optimal.
    """

    makespan: NDArray[np.float64]
    bound: NDArray[np.float64]
    proven: NDArray[np.bool_]
    activated: NDArray[np.int64]

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Where there is an answer."""
        return ~np.isnan(self.makespan)


class _Tally:
    """Adds up one method's answers: sums, and the gap of every problem for its percentiles.

    The router's own objective may be another than the study's.
    """

    def __init__(
        self, label: str, router: Router, objective: Objective, stop: TimeLimit | None
    ) -> None:
        self.label = label
        self.router = router
        self.objective = objective
        self.exact = router.method.traits.exact and router.objective == objective
        self._stop = stop if router.method.traits.extra == "exact" else None
        self._gaps: list[NDArray[np.float64]] = []
        self._sums: defaultdict[str, float] = defaultdict(float)

    def route(self, batch: BatchSteps) -> _Answer:
        """Route a chunk against the clock."""
        given = batch.given(self.router.method.traits.needs, self.label)
        out = self.router.allocate(batch.tokens.shape)
        out.tokens.fill(0)  # has the system map the pages now, not while the clock runs
        began = time.perf_counter()
        self.router.route(batch.tokens, out=out, stop=self._stop, **given)
        self._sums["seconds"] += time.perf_counter() - began

        makespan = out.makespan
        if self.router.objective != self.objective:
            makespan = slowest_gpu(out.tokens, self.objective)
        return _Answer(
            makespan=makespan,
            bound=np.where(self.exact, out.bound, np.nan),
            proven=self.exact & (out.status == Status.OPTIMAL),
            activated=out.activated.sum(axis=-1),
        )

    def add(
        self,
        demand: NDArray[np.int64],
        answer: _Answer,
        optimum: NDArray[np.float64],
        proven: NDArray[np.bool_],
    ) -> None:
        """Compare a chunk's answers with the best bounds, where `proven` the optima."""
        if (answer.makespan < optimum).any():
            raise EplbError(
                f"{self.label} answers with less than the proven optimum, so it does not serve "
                f"every token; eplb_opt.testing.check_routing says which"
            )
        live = demand > 0
        answered = answer.answered
        if not self.objective.split and (answer.activated > live.sum(axis=-1)).any():
            raise EplbError(
                f"{self.label} splits an expert's tokens over its replicas, which the objective "
                f"{self.objective.name} forbids; leave the method out"
            )
        of_problem = {
            "answered": answered,
            "proven": answer.proven,
            "optimum_proven": proven,
            "makespan": answer.makespan,
            "optimum": optimum,
            "tokens": demand.sum(axis=-1),
            "activated": answer.activated,
            "live": live.sum(axis=-1),
            "available": (live * self.router.placement.copies).sum(axis=-1),
        }
        for name, values in of_problem.items():
            self._sums[name] += float(values[answered].sum())
        self._sums["unsolved"] += float((~answered).sum())
        one = np.ones_like(optimum)
        gap = np.divide(answer.makespan, optimum, out=one, where=optimum > 0) - 1
        self._gaps.append(gap[answered])

    def row(self) -> GapRow:
        placement = self.router.placement
        slots = placement.num_gpus * placement.slots_per_gpu
        gaps = np.concatenate(self._gaps)
        if not gaps.size:
            gaps = np.array([np.nan])
        p50, p95, p99 = np.percentile(gaps, [50, 95, 99])
        answered, unsolved = self._sums["answered"], self._sums["unsolved"]
        mean = {
            name: total / answered if answered else math.nan for name, total in self._sums.items()
        }
        idle = self.objective.idle
        return GapRow(
            gpus=placement.num_gpus,
            redundant=slots - placement.num_experts,
            replication=slots / placement.num_experts,
            method=self.label,
            problems=int(answered),
            unsolved=int(unsolved),
            gap_mean=float(gaps.mean()),
            gap_p50=float(p50),
            gap_p95=float(p95),
            gap_p99=float(p99),
            gap_max=float(gaps.max()),
            makespan=mean["makespan"],
            optimum=mean["optimum"],
            even=self._even(mean) / placement.num_gpus,
            activated=mean["activated"],
            tokens_per_activated=self._sums["tokens"] / max(1.0, self._sums["activated"]),
            live_experts=mean["live"],
            replicas_available=mean["available"],
            microseconds=self._sums["seconds"] / (answered + unsolved) * 1e6,
            exact=self.exact,
            proven=mean["proven"],
            optimum_proven=mean["optimum_proven"],
            gap_beyond_idle=(mean["makespan"] - idle) / (mean["optimum"] - idle) - 1
            if mean["optimum"] > idle
            else math.nan,
        )

    def _even(self, mean: dict[str, float]) -> float:
        """Return what an even share is a share of."""
        if self.objective.counts_activations:
            return mean["live"]
        return mean["tokens"] if self.objective.counts_tokens else math.nan


def _load_of(
    place_on: Traffic | ArrayLike, draft_layers: int, batches: Batches
) -> NDArray[np.float64]:
    """Return what to place on, float64 [layers, experts], for the layers that the batches have."""
    if isinstance(place_on, (str, os.PathLike, Workload, LoadTrace, TokenTrace)):
        source = opened(place_on)
        recorded = as_load(source.popularity if isinstance(source, Workload) else source.load())
        load, _ = moe_layers(recorded, draft_layers)
    else:
        load = recorded = as_load(place_on)
    if len(recorded) == batches.recorded_layers:
        load = recorded[batches.layers]
    if load.shape != batches.load.shape:
        raise InvalidTokensError(
            f"the load to place on has shape {load.shape} (MoE layers, experts), "
            f"the traffic {batches.load.shape}"
        )
    return load


def deployments(
    experts: int,
    gpus: Sequence[int],
    replication: Sequence[float],
    redundant: Sequence[int] | None,
) -> list[tuple[int, int]]:
    """Return GPUs and slots per GPU of every deployment, each once."""
    if not len(gpus) or not len(replication if redundant is None else redundant):
        raise ValueError("no deployment to try: gpus, replication or redundant is empty")
    wrong = [g for g in gpus if g < 1] + [r for r in replication if not 1 <= r < math.inf]
    if wrong:
        raise ValueError(
            f"GPUs and replication are at least 1 (a slot for every expert), not {wrong[0]}"
        )
    if redundant is not None:
        per_gpu = [(g, slots_for(experts + extra, g)) for g in gpus for extra in redundant]
    else:
        # Rounded first: 256 * 1.1 is a little more than 281.6.
        per_gpu = [(g, math.ceil(round(experts * r / g, 9))) for g in gpus for r in replication]
    return list(dict.fromkeys(per_gpu))


def _resolved(
    methods: Sequence[str | RoutingMethod] | None, objective: Objective, holds_ids: bool
) -> list[tuple[str, RoutingMethod, Objective]]:
    """Return labels, methods and what each minimises: of those asked for, or the default ones."""
    if isinstance(methods, str) or (methods is not None and not len(methods)):
        raise ValueError(f"methods is {methods!r}; expected a list of one or more")
    wanted = default_methods(objective) if methods is None else methods
    resolved = [resolve_for(method, objective) for method in wanted]
    return [
        (label, method, own)
        for label, method, own in resolved
        if methods is not None or holds_ids or not method.traits.needs
    ]
