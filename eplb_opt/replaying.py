"""Replay a deployment: recorded steps, routed by several methods and priced, as placements change.

Every step of a trace is served on the placement of the day. Its layers are routed by each method,
priced by an objective, and summed, for a layer waits for its slowest GPU and a step for its layers;
`eplb_opt.step_time` adds what goes on around them. An `EplbLoop` is told of every step, and its
placements take over when its cycle says so. What routes does not change the loop's decisions, which
hang on the experts' tokens alone, so that all methods are compared on the same placements.
"""

from __future__ import annotations

import math
import time as clock
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from eplb_opt.arrays import as_integer
from eplb_opt.batches import STAGES, Batches, BatchFacts, BatchSteps, Traffic
from eplb_opt.errors import InvalidPlacementError
from eplb_opt.loop import Commit, Decision, EplbLoop
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.pricing import slowest_gpu
from eplb_opt.routers import RoutingMethod, resolve_for
from eplb_opt.routers.quotas import Quotas
from eplb_opt.routing import Router, Routing
from eplb_opt.step_time import Migration, StepTime
from eplb_opt.topology import transport
from eplb_opt.transfer import plan_transfer
from eplb_opt.workload import Stage

__all__ = ["PARTS", "Decided", "Replay", "ReplayRow", "StageTimes", "Stale", "replay"]

PARTS = ("experts", "communication", "router", "rest", "migration")
_STEPS_AT_ONCE = 64  # with fewer, threads wait for loading; more gain nothing
_COUNTS = ("live_experts", "replicas_available", "activated", "tokens")


@dataclass(frozen=True, slots=True)
class Stale:
    """A method that routes by a table, solved once for a window of steps, as TEMPO serves.

    The table holds what the method answers for the mean batch of the window before, every expert
    counted as live; `eplb_opt.routers.quotas.Quotas` splits each batch by it. The first table is
    for as many steps before the first that is served as there are; without any, all experts count
    alike. Where a placement changes, the table is solved anew for the same window.

    Parameters
    ----------
    method
        Who solves the table.
    window
        Steps of a window.

    Raises
    ------
    ValueError
        A window without steps.
    """

    method: str | RoutingMethod = "makespan"
    window: int = 1000

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"stale: window is {self.window}; expected at least one step")

    @property
    def label(self) -> str:
        """For tables."""
        name = self.method if isinstance(self.method, str) else repr(self.method)
        return f"{name}, stale {self.window}"


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The steps of one stage under one method.

    Attributes
    ----------
    steps
        How many.
    mean, p50, p95, p99
        Of a step, in milliseconds: the time per output token on decode, prefill's time on prefill.
    within_slo
        Share of the steps that take no longer than asked; NaN where nothing was asked.
    experts, communication, router, rest, migration
        Milliseconds of a step, means; they sum to `mean`.
    live_experts
        Logical experts requested: live ones, mean per step and layer; so are the next two.
    replicas_available
        Replicas of these.
    activated
        Replicas that receive tokens.
    tokens_per_activated
        Tokens over activated replicas.
    slowest_gpu
        Microseconds that the slowest GPU takes for a layer's experts, mean.
    tokens_per_second
        Tokens that all GPUs serve in these steps, over their time; each token once.
    """

    steps: int
    mean: float
    p50: float
    p95: float
    p99: float
    within_slo: float
    experts: float
    communication: float
    router: float
    rest: float
    migration: float
    live_experts: float
    replicas_available: float
    activated: float
    tokens_per_activated: float
    slowest_gpu: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """One method over all steps.

    Attributes
    ----------
    method
        As it was asked for.
    decode, prefill
        The steps of each stage; None where there are none.
    tokens_per_second
        Tokens that all GPUs serve, over the time of all steps; each token once.
    solve_microseconds
        Wall time of the routing call here, per step and layer.
    step_times : float64 array, [steps]
        Of every step, in microseconds.
    layer_times : float64 array, [layers]
        Makespan of every layer in microseconds, mean over steps.
    """

    method: str
    decode: StageTimes | None
    prefill: StageTimes | None
    tokens_per_second: float
    solve_microseconds: float
    step_times: NDArray[np.float64] = field(repr=False, compare=False)
    layer_times: NDArray[np.float64] = field(repr=False, compare=False)

    def flat(self) -> dict[str, Any]:
        """Return the figures by name, those of a stage as ``decode_mean`` and so on."""
        named: dict[str, Any] = {"method": self.method}
        for stage in STAGES:
            times = getattr(self, stage)
            columns = StageTimes.__dataclass_fields__ if times is None else asdict(times)
            named |= {f"{stage}_{n}": None if times is None else columns[n] for n in columns}
        named["tokens_per_second"] = self.tokens_per_second
        named["solve_microseconds"] = self.solve_microseconds
        return named


@dataclass(frozen=True, slots=True)
class Decided:
    """What a loop decided at the end of a step.

    Attributes
    ----------
    step
        The step.
    moves
        Weights that GPUs receive by it.
    par_mean, par_max
        PAR of the window's load on the placement that was served, mean and largest over layers.
    expected_mean, expected_max
        The same on the placement that was decided on.
    declined
        Why nothing changes; empty if something does.
    placement
        What is served once all layers are updated.
    """

    step: int
    moves: int
    par_mean: float
    par_max: float
    expected_mean: float
    expected_max: float
    declined: str
    placement: Placement = field(repr=False, compare=False)

    @classmethod
    def of(cls, step: int, decision: Decision) -> Decided:
        """Keep what a decision was, without the loads of its GPUs and experts."""
        now, then = decision.current, decision.expected
        return cls(
            step,
            int(decision.moves.sum()),
            float(now.par_mean),
            float(now.par_max),
            float(then.par_mean),
            float(then.par_max),
            decision.declined,
            decision.placement,
        )

    def figures(self) -> dict[str, Any]:
        """Return all but the placement, by name."""
        names = (column.name for column in fields(self) if column.name != "placement")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Replay:
    """What was replayed, and a row for every method.

    Attributes
    ----------
    traffic
        What it is.
    objective
        The name of what experts were priced by.
    first_step, steps
        The first step that was served, and how many.
    stages
        Int8 ``[steps]``: 0 for decode, 1 for prefill.
    num_gpus, redundant
        GPUs, and slots beyond one per expert.
    rows
        In the order of the methods.
    decisions
        What the loop decided, and at whose step's end.
    moves
        Weights that GPUs received.
    placement
        What is served after the last step.
    """

    traffic: str
    objective: str
    first_step: int
    steps: int
    stages: NDArray[np.int8] = field(repr=False, compare=False)
    num_gpus: int
    redundant: int
    rows: tuple[ReplayRow, ...]
    decisions: tuple[Decided, ...]
    moves: int
    placement: Placement = field(repr=False, compare=False)

    def figures(self) -> dict[str, Any]:
        """Return what was replayed by name, with the figures of `rows`."""
        return {
            "traffic": self.traffic,
            "objective": self.objective,
            "first_step": self.first_step,
            "steps": self.steps,
            "gpus": self.num_gpus,
            "redundant": self.redundant,
            "moves": self.moves,
            "decisions": [decided.figures() for decided in self.decisions],
            "rows": [
                {**row.flat(), "layer_makespan": row.layer_times.tolist()} for row in self.rows
            ],
        }

    def row(self, method: str) -> ReplayRow:
        """Return a method's row.

        Raises
        ------
        KeyError
            When it is none of them.
        """
        for row in self.rows:
            if row.method == method:
                return row
        raise KeyError(
            f"{method!r} was not replayed; {', '.join(r.method for r in self.rows)} were"
        )


def replay(
    traffic: Traffic | BatchFacts,
    served: Placement | EplbLoop,
    methods: Sequence[str | RoutingMethod | Stale] = ("uniform", "metro", "makespan"),
    *,
    time: StepTime,
    migration: Migration | None = None,
    first_step: int = 0,
    steps: int | None = None,
    tokens: int = 256,
    top_k: int = 8,
    most_decode_tokens: int | None = None,
    slo: float | None = None,
    prefill_slo: float | None = None,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Replay:
    """Serve recorded steps and say what they take.

    Parameters
    ----------
    traffic
        A `LoadTrace`, whose steps are replayed; a `TokenTrace`, cut into batches; a `Workload`, or
        counts of one step, from which batches are drawn; or a path. Layers without any token are
        left out. With `BatchFacts`, what is said of batches and stages below is theirs.
    served
        The placement of the MoE layers, which stays, or the loop that keeps it, which goes on from
        where it is.
    methods
        Routing methods, compared on the same steps and placements. ``"matching"`` and ``"flow"``
        minimise activated replicas and tokens, the others the time of the slowest GPU.
    time
        What steps are priced by.
    migration
        What the loop's moves take; None: nothing.
    first_step
        Where to start; a loop is not told of earlier steps.
    steps
        Up to which step, from step 0; default all, and 20 where batches are drawn.
    tokens, top_k
        Tokens of a batch over all GPUs, where batches are drawn or cut, and experts per token where
        the traffic does not tell.
    most_decode_tokens
        Steps of more scheduled tokens are prefill where the trace does not tell, as for
        `eplb_opt.heat.stage_of`; None: such steps are decode.
    slo, prefill_slo
        Milliseconds that a step of decode and of prefill should take at most.
    threads
        Threads over steps.
    progress
        Called with (done, total) steps.

    Returns
    -------
    Replay

    Raises
    ------
    InvalidTokensError
        Traffic that is none, counts that none can be, a method that needs top-k ids or counts by
        source where there are none, or layers and experts other than the placement's.
    InvalidPlacementError
        A placement without a layer axis.
    ValueError
        Unknown methods, no steps to serve.
    EplbError
        What the loop's placement method raises.

    Notes
    -----
    O(steps) times routing and pricing. Steps are loaded 64 at a time and routed by up to `threads`
    threads, so that memory does not grow with the length of the trace but for 9 bytes per step and
    method, and a placement per decision.

    Where it is known which of as many sources as GPUs a token comes from, dispatch and combine are
    priced by the split over sources that keeps most tokens near (`eplb_opt.transport`): for rules
    that choose by source, the least that their shares allow. A method with a seed draws anew, from
    the seed plus the part's first step, for every part of the steps.

    Examples
    --------
    >>> from eplb_opt import Workload, solve_placement
    >>> traffic = Workload.preset("qwen3-30b", seed=1)
    >>> plan = solve_placement(traffic.popularity, num_gpus=8, slots_per_gpu=24, method="search")
    >>> time = StepTime("qwen3-30b-fp8")
    >>> answer = replay(traffic, plan.placement, ["uniform", "makespan"], time=time, steps=2)
    >>> even, best = (row.decode for row in answer.rows)
    >>> even.activated > best.activated, even.mean > best.mean
    (True, True)
    """
    as_integer(threads, "threads", most=Router.MAX_THREADS)
    if isinstance(methods, str) or not len(methods):
        raise ValueError(f"methods is {methods!r}; expected a list of one or more")
    for name, limit in (("slo", slo), ("prefill_slo", prefill_slo)):
        if limit is not None and not limit >= 0:
            raise ValueError(f"{name} is {limit}; expected milliseconds from 0")
    facts = traffic
    if not isinstance(facts, BatchFacts):
        batches = Batches.of(facts, tokens=tokens, steps=steps, top_k=top_k)
        facts = BatchFacts(batches, top_k, most_decode_tokens)
    end = facts.batches.steps if steps is None else min(steps, facts.batches.steps)
    if not 0 <= first_step < end:
        raise ValueError(f"first_step is {first_step}; there are steps 0 to {end - 1} to serve")
    course = _Course(served, [_Lane.of(m, time.pricing) for m in methods], facts, migration)
    course.require_alike(facts.batches)
    price = partial(_Pricer(time), lanes=course.lanes)
    answers = _Answers(course.lanes, course.placement, end - first_step)
    for part, priced in _in_order(course.parts(first_step, end), price, threads):
        answers.add(part, priced, migration)
        if progress is not None:
            progress(answers.done, end - first_step)
    placement = course.placement
    slots = placement.num_gpus * placement.slots_per_gpu
    return Replay(
        facts.batches.name,
        time.pricing.name,
        first_step,
        end - first_step,
        answers.stages,
        placement.num_gpus,
        slots - placement.num_experts,
        answers.rows({"decode": slo, "prefill": prefill_slo}),
        tuple(course.decisions),
        course.moves,
        placement,
    )


@dataclass(frozen=True, slots=True)
class _Lane:
    """A method side by side with others: its label, and how it routes on a placement."""

    label: str
    method: RoutingMethod
    own: Objective
    window: int | None  # steps that a table stands for, where it is routed by one

    @classmethod
    def of(cls, method: str | RoutingMethod | Stale, pricing: Objective) -> _Lane:
        if isinstance(method, Stale):
            return cls(method.label, *resolve_for(method.method, pricing)[1:], method.window)
        return cls(*resolve_for(method, pricing), None)

    def router(self, placement: Placement, mean: NDArray[np.int64]) -> Router:
        """Return what routes on a placement, by a table for the mean batch where it is stale."""
        router = Router(placement, objective=self.own, method=self.method)
        if self.window is None:
            return router
        table = Quotas(router.route(np.maximum(mean, placement.copies > 0)).tokens)
        return Router(placement, objective=self.own, method=table)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Consecutive steps on one placement, and the moves at their end."""

    batch: BatchSteps
    stages: NDArray[np.int8]
    tokens: NDArray[np.float64]
    scheduled: NDArray[np.float64]
    placement: Placement
    routers: tuple[Router, ...]
    transfer: float = 0.0


class _Course:
    """The placements of the steps: what is served when, and what moves."""

    def __init__(
        self,
        served: Placement | EplbLoop,
        lanes: Sequence[_Lane],
        facts: BatchFacts,
        migration: Migration | None,
    ) -> None:
        self._loop = served if isinstance(served, EplbLoop) else None
        self.placement = served.placement if isinstance(served, EplbLoop) else served
        self.lanes = lanes
        self.decisions: list[Decided] = []
        self.moves = 0
        self._facts = facts
        self._migration = migration
        self._windows: list[_Window] = []
        self._routers: tuple[Router, ...] = ()

    def require_alike(self, batches: Batches) -> None:
        """Refuse a placement of other layers or experts than the traffic's."""
        if not self.placement.layered:
            raise InvalidPlacementError("a replay needs slots [layers, gpus, slots]")
        shape = self.placement.num_layers, self.placement.num_experts
        if shape != batches.load.shape:
            raise InvalidPlacementError(
                "the placement has {} layers of {} experts, the traffic {} of {} with "
                "tokens".format(*shape, *batches.load.shape)
            )

    def parts(self, begin: int, end: int) -> Iterator[_Part]:
        """Yield the steps, cut wherever what routes them changes."""
        self._windows = [_Window.of(lane.window, self._facts, begin) for lane in self.lanes]
        self._routers = self._bound()
        gpus = self.placement.num_gpus
        for batch in self._facts.batches.chunks(gpus, begin, end, most=_STEPS_AT_ONCE):
            stages, tokens, scheduled = self._facts.of(batch)
            start = 0
            for at in range(len(batch)):
                placement, routers = self.placement, self._routers
                ran = math.ceil(scheduled[at])
                transfer = self._advance(batch.first + at, batch.tokens[at], ran)
                if self._routers is routers and at + 1 < len(batch):
                    continue
                cut = slice(start, at + 1)
                yield _Part(
                    batch.cut(cut),
                    stages[cut],
                    tokens[cut],
                    scheduled[cut],
                    placement,
                    routers,
                    transfer,
                )
                start = at + 1

    def _advance(self, step: int, tokens: NDArray[np.int64], scheduled: int) -> float:
        """Tell of a step that has been served; return the microseconds of the moves at its end."""
        transfer = 0.0
        changed = [window.add(tokens) for window in self._windows]
        if self._loop is not None:
            told = self._loop.step(tokens, scheduled)
            if told.decision is not None:
                self.decisions.append(Decided.of(step, told.decision))
            if told.commits and self._loop.placement != self.placement:
                transfer = self._transfer(told.commits)
                self.moves += sum(commit.moves for commit in told.commits)
                self.placement = self._loop.placement
                changed = [True] * len(changed)
        if any(changed):
            self._routers = self._bound(changed)
        return transfer

    def _transfer(self, commits: Sequence[Commit]) -> float:
        layers = [commit.layer for commit in commits if commit.moves]
        if self._migration is None or self._loop is None or not layers:
            return 0.0
        before, after = (
            Placement(p.slots[layers], p.num_experts, allow_missing=True)
            for p in (self.placement, self._loop.placement)
        )
        size, links = self._migration.expert_bytes, self._migration.links
        return 1e6 * plan_transfer(before, after, size, links=links).seconds

    def _bound(self, changed: Sequence[bool] | None = None) -> tuple[Router, ...]:
        """Return the lanes' routers, new where something changed; by default all."""
        if changed is None:
            changed = [True] * len(self.lanes)
        kept = self._routers or [None] * len(self.lanes)
        lanes = zip(self.lanes, self._windows, kept, changed, strict=True)
        return tuple(
            router if router is not None and not new else lane.router(self.placement, window.mean)
            for lane, window, router, new in lanes
        )


class _Window:
    """The mean batch of the last complete window of steps; none where a lane has no table."""

    def __init__(self, steps: int | None, mean: NDArray[np.int64]) -> None:
        self.mean = mean
        self._steps = steps
        self._sum = np.zeros_like(mean)
        self._added = 0

    @classmethod
    def of(cls, steps: int | None, facts: BatchFacts, first_step: int) -> _Window:
        """Return the window of the steps before the first that is served."""
        begin = first_step if steps is None else max(0, first_step - steps)
        return cls(steps, facts.collect(begin, first_step, "all").mean_batch())

    def add(self, tokens: NDArray[np.int64]) -> bool:
        """Add a step; tell whether that completes the window."""
        if self._steps is None:
            return False
        self._sum += tokens
        self._added += 1
        if self._added < self._steps:
            return False
        self.mean = -(-self._sum // self._steps)
        self._sum.fill(0)
        self._added = 0
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _Priced:
    """A method's answer to a part.

    `parts` is float64 [steps, parts of a step] without moves, `counts` int64 [steps, counts],
    `makespan` float64 [steps, layers].
    """

    parts: NDArray[np.float64]
    counts: NDArray[np.int64]
    makespan: NDArray[np.float64]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Pricer:
    """Routes a part by every method, and prices it."""

    time: StepTime

    def __call__(self, part: _Part, lanes: Sequence[_Lane]) -> list[_Priced]:
        live = part.batch.tokens > 0
        demand = [
            live.sum(axis=(1, 2)),
            np.einsum("sle,le->s", live, part.placement.copies),
            part.batch.tokens.sum(axis=(1, 2)),
        ]
        rest = self.time.rests(part.stages, part.scheduled / part.placement.num_gpus)
        both = zip(lanes, part.routers, strict=True)
        return [self._of(part, lane, router, demand, rest) for lane, router in both]

    def _of(
        self,
        part: _Part,
        lane: _Lane,
        router: Router,
        demand: Sequence[NDArray[np.int64]],
        rest: NDArray[np.float64],
    ) -> _Priced:
        batch = part.batch
        if lane.window is None and isinstance(seed := getattr(lane.method, "seed", None), int):
            drawn = replace(cast(Any, lane.method), seed=seed + batch.first)
            router = Router(part.placement, objective=lane.own, method=drawn)
        began = clock.perf_counter()
        routing = router.route(batch.tokens, **batch.given(router.method.traits.needs, lane.label))
        seconds = clock.perf_counter() - began
        makespan = routing.makespan
        if router.objective != self.time.pricing:
            makespan = slowest_gpu(routing.tokens, self.time.pricing)
        live, available, tokens = demand
        parts = np.zeros((len(batch), len(PARTS)))
        parts[:, 0] = makespan.sum(axis=-1)
        parts[:, 1] = self._communication(part, routing, lane.label)
        parts[:, 2] = self.time.routers.get(lane.label, 0.0) * makespan.shape[1]
        parts[:, 3] = rest
        activated = routing.activated.sum(axis=(1, 2))
        counts = np.stack([live, available, activated, tokens], axis=1)
        return _Priced(parts, counts, makespan, seconds)

    def _communication(
        self, part: _Part, routing: Routing, label: str
    ) -> NDArray[np.float64] | float:
        model = self.time.communication_of(label)
        if model is None:
            return 0.0
        flows = None
        if model.exchange == "all-to-all":
            by_source, gpus = part.batch.by_source(), part.placement.num_gpus
            if by_source is not None and by_source.shape[2] == gpus:
                near = transport(routing, by_source, gpus_per_node=model.links.gpus_per_node)
                flows = near.tokens.sum(axis=-1)
        times = model.time(routing.gpu_tokens(), part.tokens[:, None], flows)
        return np.asarray(times.sum(axis=-1))


def _in_order(
    parts: Iterator[_Part], price: Callable[[_Part], list[_Priced]], threads: int
) -> Iterator[tuple[_Part, list[_Priced]]]:
    """Yield parts with their prices in order, few of them in memory at a time."""
    if threads == 1:
        for part in parts:
            yield part, price(part)
        return
    waiting: deque[tuple[_Part, Future[list[_Priced]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for part in parts:
            waiting.append((part, pool.submit(price, part)))
            if len(waiting) > threads:
                first, answer = waiting.popleft()
                yield first, answer.result()
        while waiting:
            first, answer = waiting.popleft()
            yield first, answer.result()


class _Answers:
    """All that rows are made of: sums by stage, and every step's time for its percentiles."""

    def __init__(self, lanes: Sequence[_Lane], placement: Placement, steps: int) -> None:
        self.done = 0
        self.stages = np.zeros(steps, np.int8)
        self._lanes = lanes
        self._layers = placement.num_layers
        self._tokens = np.zeros(len(STAGES))
        self._times = np.zeros((len(lanes), steps))
        self._parts = np.zeros((len(lanes), len(STAGES), len(PARTS)))
        self._counts = np.zeros((len(lanes), len(STAGES), len(_COUNTS)))
        self._makespan = np.zeros((len(lanes), placement.num_layers))
        self._seconds = np.zeros(len(lanes))

    def add(self, part: _Part, priced: Sequence[_Priced], migration: Migration | None) -> None:
        """Add a part, with what the moves at its end take each method."""
        these = slice(self.done, self.done + len(part.batch))
        self.done = these.stop
        self.stages[these] = part.stages
        self._tokens += [part.tokens[part.stages == at].sum() for at in range(len(STAGES))]
        for lane, answer in enumerate(priced):
            parts = answer.parts
            if part.transfer and migration is not None:
                last = parts[-1]
                last[4] = migration.stall(part.transfer, float(last.sum()), float(last[1]))
            self._times[lane, these] = parts.sum(axis=1)
            for stage in range(len(STAGES)):
                self._parts[lane, stage] += parts[part.stages == stage].sum(axis=0)
                self._counts[lane, stage] += answer.counts[part.stages == stage].sum(axis=0)
            self._makespan[lane] += answer.makespan.sum(axis=0)
            self._seconds[lane] += answer.seconds

    def rows(self, slos: dict[Stage, float | None]) -> tuple[ReplayRow, ...]:
        """Return a row for every method."""
        return tuple(self._row(lane, slos) for lane in range(len(self._lanes)))

    def _row(self, lane: int, slos: dict[Stage, float | None]) -> ReplayRow:
        times = self._times[lane]
        decode, prefill = (self._stage(lane, at, slos[s]) for at, s in enumerate(STAGES))
        return ReplayRow(
            self._lanes[lane].label,
            decode,
            prefill,
            tokens_per_second=_rate(self._tokens.sum(), times),
            solve_microseconds=1e6 * float(self._seconds[lane]) / (len(times) * self._layers),
            step_times=times,
            layer_times=self._makespan[lane] / len(times),
        )

    def _stage(self, lane: int, stage: int, slo: float | None) -> StageTimes | None:
        times = self._times[lane, self.stages == stage] / 1e3
        if not times.size:
            return None
        p50, p95, p99 = np.percentile(times, [50, 95, 99]).tolist()
        experts, communication, router, rest, moves = (
            self._parts[lane, stage] / times.size / 1e3
        ).tolist()
        live, available, activated, tokens = self._counts[lane, stage].tolist()
        problems = times.size * self._layers
        return StageTimes(
            steps=times.size,
            mean=float(times.mean()),
            p50=p50,
            p95=p95,
            p99=p99,
            within_slo=math.nan if slo is None else float((times <= slo).mean()),
            experts=experts,
            communication=communication,
            router=router,
            rest=rest,
            migration=moves,
            live_experts=live / problems,
            replicas_available=available / problems,
            activated=activated / problems,
            tokens_per_activated=tokens / max(activated, 1),
            slowest_gpu=1e3 * experts / self._layers,
            tokens_per_second=_rate(self._tokens[stage], 1e3 * times),
        )


def _rate(tokens: float, microseconds: NDArray[np.float64]) -> float:
    """Return tokens per second; NaN where no time passes."""
    total = float(microseconds.sum())
    return 1e6 * float(tokens) / total if total else math.nan
