"""Advice: whether EPLB pays for a recorded traffic, and with which settings.

The first steps are learned from, candidates are compared on the next, and the one that is chosen is
judged on the last, against the same steps without EPLB: the best of many is partly the luckiest, on
the steps that it was chosen on. Uncertainty is `eplb_opt.bootstrap`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from eplb_opt.advice import Advice, Candidate, Costs, Rule, Verdict, Why, judged
from eplb_opt.batches import Batches, BatchFacts, Traffic, opened
from eplb_opt.bootstrap import paired_gain
from eplb_opt.bounds import certified_bound
from eplb_opt.heat import HeatStage
from eplb_opt.memory import WeightFormat, memory_per_gpu
from eplb_opt.metrics import PlacementMetrics
from eplb_opt.placement import Placement
from eplb_opt.placers import first_placement
from eplb_opt.reasons import reasons
from eplb_opt.replaying import ReplayRow
from eplb_opt.scenario import Scenario
from eplb_opt.step_time import Migration, StepTime
from eplb_opt.trace import LoadTrace
from eplb_opt.transfer import plan_transfer
from eplb_opt.trying import EQUAL_SPLIT, Bench, Plan, Search, simplest
from eplb_opt.vetting import Steps, picked, steps_of, warm_up
from eplb_opt.workload import ModelShape, Stage, Workload, shape_for

__all__ = ["advise"]

_DRAWN_STEPS = 64
_STEPS_FOR_P99 = 100
_SHARES = ("experts", "communication", "router", "rest")


def advise(
    traffic: Traffic | BatchFacts,
    *,
    num_gpus: int,
    time: StepTime,
    redundant: Sequence[int] | None = None,
    placers: Sequence[str] = ("deepseek", "search"),
    methods: Sequence[str] = ("uniform", "metro", "makespan"),
    intervals: Sequence[int | None] | None = None,
    stages: Sequence[HeatStage] | None = None,
    target: HeatStage | None = None,
    learn: float = 0.25,
    min_gain: float = 0.01,
    model: ModelShape | str | None = None,
    weights: WeightFormat | str = "bf16",
    migration: Migration | None = None,
    slo: float | None = None,
    prefill_slo: float | None = None,
    num_nodes: int = 1,
    num_groups: int = 1,
    steps: int | None = None,
    tokens: int = 256,
    top_k: int = 8,
    most_decode_tokens: int | None = None,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Advice:
    """Say whether EPLB pays for a traffic, with which settings, by how much, and why.

    Parameters
    ----------
    traffic
        As for `eplb_opt.replay`.
    num_gpus
        The EP size.
    time
        What steps are priced by.
    redundant
        Slots beyond one per expert to try; default the fewest that divide over the GPUs, and one
        and two more for each GPU.
    placers, methods
        Placement and routing methods to try, the simplest first. ``"uniform"``, the equal split
        that EPLB counts on, is always tried.
    intervals
        Steps from one placement to the next to try, None for a placement that stays; default None,
        a fourth and a sixteenth of the steps that are served.
    stages
        Whose load placements are made for; default ``"all"``, and each where both are recorded.
    target
        The stage whose mean step time is to fall; default decode where there is any.
    learn
        Share of the steps after a warm-up that experts are placed by first, and that are not
        served.
    min_gain
        The least gain that is worth EPLB, a share of the mean step time.
    model, weights
        Shape and format, or their names, for memory, as for `eplb_opt.memory_per_gpu`.
    migration
        What moves take; None: nothing, which is noted.
    slo, prefill_slo, steps, tokens, top_k, most_decode_tokens
        As for `eplb_opt.replay`; where batches are drawn, 64 are.
    num_nodes, num_groups
        As for `eplb_opt.solve_placement`.
    threads
        Threads over steps.
    progress
        Called with (done, total) replays.

    Returns
    -------
    Advice

    Raises
    ------
    InvalidTokensError
        Fewer than 16 steps after the warm-up; a target stage without steps where it is judged;
        counts of one GPU's experts only; and as for `eplb_opt.replay`.
    ValueError
        Names that are not known, numbers out of range, a model of other experts.
    EplbError
        As `eplb_opt.Scenario.replay`.

    Notes
    -----
    *Candidates.* Without EPLB there are no redundant slots but those that GPUs must fill, and
    experts are in order. Where many steps were recorded, placements that stay are first compared
    on 256 of them, spread evenly, with all routers; the best three are replayed in full, with each
    interval. Of those that keep nine tenths of the best gain and take at most `min_gain` more time
    than the best, the simplest is chosen: the fewest slots, then a placement that stays.

    *Verdict.* Yes if the 95 % interval of the gain lies above `min_gain`, no if it lies below, or
    if not even perfect balance would reach it (`Why.ceiling`).

    Examples
    --------
    >>> traffic = Workload.from_load([1 / np.arange(1.0, 33.0)], top_k=4)
    >>> advice = advise(traffic, num_gpus=4, time=StepTime("qwen3-30b-fp8"), tokens=1024)
    >>> advice.verdict, advice.best.redundant
    (<Verdict.YES: 'yes'>, 0)
    """
    facts, drawn = _facts(traffic, steps, tokens, top_k, most_decode_tokens)
    shape = None if model is None else shape_for(model, facts.batches.load.shape[1])
    every = steps_of(facts)
    warm = 0 if drawn else warm_up(facts, every)
    plan = Plan.of(every.since(warm), learn, target)
    bench = Bench(
        facts=picked(facts, np.arange(warm, len(every))),
        plan=plan,
        time=time,
        methods=tuple(dict.fromkeys((EQUAL_SPLIT, *methods))),
        migration=migration,
        threads=threads,
    )
    least = -bench.num_experts % num_gpus
    start = Scenario(num_gpus, least, num_nodes=num_nodes, num_groups=num_groups)
    search = Search(
        bench,
        start,
        redundant=redundant or (least, least + num_gpus, least + 2 * num_gpus),
        placers=placers,
        intervals=intervals or plan.intervals(drawn),
        stages=stages or plan.stages(),
        memory=partial(_extra_memory, shape, weights, start),
        progress=progress,
    )
    candidates = search.run()
    best = simplest(search.finalists, min_gain, bench.methods, placers)
    chosen = search.scenario(best)
    old, new = bench.row(start), bench.row(chosen, best.router)
    masks = plan.judged_stages()
    gain = paired_gain(*(row.step_times[plan.judged_target] for row in (old, new)))
    why = _why(bench, start, chosen, best.router)
    verdict, more = judged(gain, min_gain, why.ceiling, len(every))
    slos: dict[Stage, float | None] = {"decode": slo, "prefill": prefill_slo}
    advice = Advice(
        verdict=verdict,
        traffic=facts.batches.name,
        objective=time.pricing.name,
        num_gpus=num_gpus,
        target=plan.target,
        min_gain=min_gain,
        best=best,
        gain=gain,
        gains={
            f"{stage} {name}": paired_gain(
                old.step_times[mask], new.step_times[mask], quantile=quantile
            )
            for stage, mask in masks.items()
            for name, quantile in (("mean", None), ("p99", 0.99))
            if quantile is None or mask.size >= _STEPS_FOR_P99
        },
        before=_times(old, masks, slos),
        after=_times(new, masks, slos),
        more_steps=more,
        parts=plan.parts(warm),
        why=why,
        costs=_costs(bench, start, chosen, best),
        rules=_rules(bench, num_gpus, verdict),
        candidates=tuple(candidates),
        notes=tuple(_notes(facts, every, warm, drawn, migration, num_gpus)),
    )
    return replace(advice, reasons=reasons(advice))


def _facts(
    traffic: Traffic | BatchFacts,
    steps: int | None,
    tokens: int,
    top_k: int,
    most_decode_tokens: int | None,
) -> tuple[BatchFacts, bool]:
    """Return the batches, and whether they are drawn from one popularity."""
    if isinstance(traffic, BatchFacts):
        return traffic, False
    source = opened(traffic)
    drawn = isinstance(source, Workload) or (
        isinstance(source, LoadTrace) and source.num_steps == 1
    )
    batches = Batches.of(
        source, tokens=tokens, steps=(steps or _DRAWN_STEPS) if drawn else steps, top_k=top_k
    )
    if source is not traffic:
        batches = replace(batches, name=batches.name.replace("traffic in memory", str(traffic)))
    if drawn:
        batches = _drawn_once(batches)
    return BatchFacts(batches, top_k, most_decode_tokens), drawn


def _drawn_once(batches: Batches) -> Batches:
    """Keep the counts of all batches, for drawing them takes longer than serving them."""
    counts = np.concatenate([batch.tokens for batch in batches.chunks(1)])
    return replace(
        batches,
        counts=lambda begin, end: counts[begin:end],
        layers=np.arange(counts.shape[1]),
        holds_ids=False,
    )


def _times(
    row: ReplayRow, masks: dict[Stage, NDArray[np.intp]], slos: dict[Stage, float | None]
) -> dict[str, float]:
    """Return milliseconds of the steps to judge on, by stage: mean and p99; shares within SLOs."""
    found = {}
    for stage, steps in masks.items():
        times = row.step_times[steps] / 1e3
        found[f"{stage} mean"] = float(times.mean())
        found[f"{stage} p99"] = float(np.percentile(times, 99))
        slo = slos[stage]
        if slo is not None:
            found[f"{stage} within SLO"] = float((times <= slo).mean())
    return found


def _why(bench: Bench, start: Scenario, chosen: Scenario, router: str) -> Why:
    plan, old = bench.plan, bench.row(start)
    both = {"decode": old.decode, "prefill": old.prefill}
    times = [t for stage, t in both.items() if t is not None and plan.target in (stage, "all")]
    spent = {name: sum(t.steps * getattr(t, name) for t in times) for name in _SHARES}
    activated = [t.steps * t.activated for t in times]
    per_replica = [t.tokens_per_activated for t in times]
    load = bench.facts.collect(plan.first, len(plan.steps), plan.target).load
    placed = PlacementMetrics.of(bench.replay(start).placement, load.astype(np.float64))
    before = float(old.step_times[plan.judged_target].mean())
    return Why(
        shares={name: part / sum(spent.values()) for name, part in spent.items()},
        ceiling=1 - _balanced_time(bench, start.num_gpus) / before,
        par_mean=placed.par_mean,
        par_max=placed.par_max,
        tokens_per_gpu=_mean_tokens(plan.steps, plan.mask) / start.num_gpus,
        tokens_per_activated=float(np.average(per_replica, weights=activated)),
        break_even=bench.time.pricing.break_even,
        ladder=_ladder(bench, start, chosen, router),
    )


def _mean_tokens(steps: Steps, mask: NDArray[np.bool_]) -> float:
    return float(steps.tokens[mask].mean())


def _ladder(bench: Bench, start: Scenario, chosen: Scenario, router: str) -> dict[str, float]:
    """Return what each change adds to the gain; what does not change is left out."""
    once = replace(chosen, interval=None)
    rungs = {
        "placement": (replace(once, redundant=start.redundant), EQUAL_SPLIT),
        "redundancy": (once, EQUAL_SPLIT),
        "router": (once, router),
        "updates": (chosen, router),
    }
    steps = bench.plan.judged_target
    whole = before = float(bench.row(start).step_times[steps].mean())
    last: tuple[Scenario, str] = (start, EQUAL_SPLIT)
    added = {}
    for name, rung in rungs.items():
        if rung == last:
            continue
        after = float(bench.row(*rung).step_times[steps].mean())
        added[name] = (before - after) / whole
        before, last = after, rung
    return added


def _balanced_time(bench: Bench, num_gpus: int) -> float:
    """Return the mean microseconds of the judged steps if nobody waited for a fuller GPU.

    Experts take what counting proves for any placement: all GPUs together, which are the
    certificate, have every expert. Slots matter only where slow GPUs could leave theirs to others.
    """
    plan, time = bench.plan, bench.time
    traffic = picked(bench.facts, plan.first + plan.judged_target)
    layers, experts = traffic.batches.load.shape
    slots = experts if time.pricing.slowness else -(-experts // num_gpus)
    anywhere = Placement(first_placement(layers, num_gpus, slots, num_experts=experts), experts)
    total = 0.0
    for batch in traffic.batches.chunks(num_gpus):
        stages, tokens, scheduled = traffic.of(batch)
        every = np.ones((len(batch), layers, num_gpus), np.bool_)
        spent = certified_bound(anywhere, batch.tokens, every, time.pricing).sum(axis=-1)
        if time.communication is not None:
            even = np.repeat(batch.tokens.sum(axis=-1)[..., None] // num_gpus, num_gpus, axis=-1)
            spent = spent + time.communication.time(even, tokens[:, None]).sum(axis=-1)
        rest = time.rests(stages, scheduled / num_gpus)
        total += float((spent + rest).sum())
    return total / traffic.batches.steps


def _costs(bench: Bench, start: Scenario, chosen: Scenario, best: Candidate) -> Costs:
    if bench.migration is None:
        return Costs(best.memory, None, None, None)
    old, new = bench.row(start), bench.row(chosen, best.router)
    moving = sum(s.steps * s.migration for s in (new.decode, new.prefill) if s is not None)
    placed = bench.replay(replace(chosen, interval=None)).placement
    in_order = first_placement(
        placed.num_layers, placed.num_gpus, placed.slots_per_gpu, num_experts=placed.num_experts
    )
    plan = plan_transfer(
        Placement(in_order, placed.num_experts),
        placed,
        bench.migration.expert_bytes,
        links=bench.migration.links,
    )
    first_move = 1e3 * plan.seconds / bench.migration.share
    steps = bench.plan.judged_target
    saved = float(old.step_times[steps].mean() - new.step_times[steps].mean()) / 1e3
    return Costs(
        memory=best.memory,
        migration=1e3 * moving / float(new.step_times.sum()),
        first_move=first_move,
        repaid_in=first_move / saved if saved > 0 else np.inf,
    )


def _extra_memory(
    shape: ModelShape | None, weights: WeightFormat | str, start: Scenario, scenario: Scenario
) -> int | None:
    """Return the bytes that a deployment takes of each GPU beyond those without EPLB."""
    if shape is None:
        return None
    needed = partial(memory_per_gpu, shape, scenario.num_gpus, weights=weights)
    before = needed(start.redundant, moves=False)
    cycle = scenario.interval
    after = needed(scenario.redundant, window_steps=cycle or 0, moves=cycle is not None)
    return after.total - before.total


def _rules(bench: Bench, num_gpus: int, verdict: Verdict) -> tuple[Rule, ...]:
    """Return vLLM-Ascend's rules of thumb; of prompts, what a GPU runs of them in a step."""
    steps = bench.plan.steps
    experts = bench.num_experts / num_gpus
    tokens = _mean_tokens(steps, bench.plan.mask) / num_gpus
    found = [
        ("at most 8 experts per GPU", experts, experts <= 8),
        ("fewer than 128 tokens per GPU", tokens, tokens < 128),
    ]
    if (prefill := steps.of("prefill")).any():
        prompts = _mean_tokens(steps, prefill) / num_gpus
        found.append(("prefill inputs shorter than 1024", prompts, prompts < 1024))
    no = verdict is Verdict.NO
    known = verdict is not Verdict.UNCLEAR
    return tuple(Rule(*rule, agrees=rule[-1] == no if known else None) for rule in found)


def _notes(
    facts: BatchFacts,
    steps: Steps,
    warm: int,
    drawn: bool,
    migration: Migration | None,
    num_gpus: int,
) -> list[str]:
    notes = []
    if drawn:
        notes.append(
            f"batches of {facts.batches.tokens} tokens are drawn from one popularity that never "
            f"changes: the interval says how sure these draws are, and nothing of how traffic "
            f"varies; record every step to know"
        )
    if warm:
        notes.append(
            f"the first {warm} steps differ at once from those after them, as an engine's dummy "
            f"batches do, and are left out"
        )
    if steps.like_one_of(num_gpus):
        notes.append(
            f"counts are 1/{num_gpus} of the scheduled tokens: if they are of one GPU's tokens "
            f"only, sum those of all GPUs, or batches are too small here"
        )
    if facts.batches.facts.stage is None and facts.most_decode_tokens is None:
        notes.append("the stage of steps is not known, and all count as decode")
    if migration is None:
        notes.append("moves of weights take no time here: give a model, or what they take")
    return notes
