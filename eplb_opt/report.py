"""What the command line prints: studies, regimes, routings, placements, traffic and presets."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from math import inf, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eplb_opt.advice import Advice, Candidate
from eplb_opt.batches import STAGES
from eplb_opt.comparison import ComparedPlan, PlacementComparison
from eplb_opt.gap import GapRow, GapStudy
from eplb_opt.gpu.compiling import Usage
from eplb_opt.measure import Measure, Split
from eplb_opt.objective import OBJECTIVES
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.placers import placement_methods
from eplb_opt.regime import CHOICES, Crossover, RegimeMap
from eplb_opt.replaying import Replay, StageTimes
from eplb_opt.routers import routing_methods
from eplb_opt.routing import Routing
from eplb_opt.status import Proof, Status
from eplb_opt.sweep_results import Sweep
from eplb_opt.trace import LoadTrace, TokenTrace
from eplb_opt.workload import MODEL_SHAPES, Stage

__all__ = [
    "many",
    "print_advice",
    "print_comparison",
    "print_kernels",
    "print_placement",
    "print_presets",
    "print_regimes",
    "print_replay",
    "print_routing",
    "print_study",
    "print_sweep",
    "print_trace",
]


def print_kernels(usages: Sequence[Usage]) -> None:
    """Print what compiled kernels take of a GPU."""
    headers = ("kernel", "for", "registers", "shared memory", "instructions", "spilled")
    table = _table("CUDA kernels", *headers, left=2)
    for u in usages:
        counts = (u.registers, u.shared_bytes, u.instructions, u.spilled_bytes)
        table.add_row(u.kernel, u.arch, *map(str, counts))
    _console().print(table)


def print_presets() -> None:
    """Print the models, objectives, routing methods and placement methods."""
    console = _console()
    table = _table("Models (--model)", "model", "MoE layers", "experts", "top-k", "hidden", "ffn")
    for name, shape in MODEL_SHAPES.items():
        sizes = (shape.layers, shape.experts, shape.top_k, shape.hidden, shape.ffn)
        table.add_row(name, *map(str, sizes))
    console.print(table)

    table = _table("Objectives (--objective): a GPU's time", "objective", "source", left=2)
    for name, objective in OBJECTIVES.items():
        table.add_row(name, objective.source)
    console.print(table)

    headers = ("method", "objectives", "proves", "needs", "what it does")
    table = _table("Routing methods (--method)", *headers, left=5)
    table.add_row("optimal", "any", "yes", "", "the exact compiled method of the objective")
    for name, traits in routing_methods().items():
        needs = [*traits.needs, *([f"extra {traits.extra}"] if traits.extra else [])]
        proves = "yes" if traits.exact else ""
        table.add_row(name, traits.objectives, proves, ", ".join(needs), traits.summary)
    console.print(table)

    table = _table("Placement methods (--method of place)", "method", "takes", "proves", left=4)
    for name, placer in placement_methods().items():
        proves = "its own" if placer.exact else ""
        table.add_row(name, ", ".join(sorted(placer.takes)), proves, placer.summary)
    console.print(table)


def _console() -> Console:
    """Return the console of standard output; in a pipe, which has no width, lines have 100."""
    terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if terminal else 100, highlight=False)


def _table(title: str, *headers: str, left: int = 1) -> Table:
    """Return a table whose first `left` columns are text, the others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.show_edge, table.padding = False, (0, 0)
    for at in range(max(left, len(headers))):
        header = headers[at] if at < len(headers) else ""
        table.add_column(header, justify="left" if at < left else "right")
    return table


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the study's tables."""

    header: str
    value: Callable[[GapRow], float]
    decimals: int | None = None  # by the largest value, if not given
    wide: bool = False  # shown only where there is room


_GAP_MEAN = _Column("gap %\nmean", lambda row: 100 * row.gap_mean, decimals=1)
_BEYOND_IDLE = _Column("beyond\nidle", lambda row: 100 * row.gap_beyond_idle, decimals=1)
_PROVEN = _Column("proven\n%", lambda row: 100 * row.proven, decimals=1)
_COLUMNS = (
    _GAP_MEAN,
    _Column("p50", lambda row: 100 * row.gap_p50, decimals=1, wide=True),
    _Column("p95", lambda row: 100 * row.gap_p95, decimals=1),
    _Column("p99", lambda row: 100 * row.gap_p99, decimals=1, wide=True),
    _Column("worst", lambda row: 100 * row.gap_max, decimals=1),
    _Column("make-\nspan", lambda row: row.makespan),
    _Column("opti-\nmum", lambda row: row.optimum, wide=True),
    _Column("replicas\nactivated", lambda row: row.activated),
    _Column("tokens/\nreplica", lambda row: row.tokens_per_activated),
    _Column("µs", lambda row: row.microseconds),
)


def _texts(values: Sequence[float], decimals: int | None = None) -> list[str]:
    """Format values alike, by default with four figures for the largest."""
    if decimals is None:
        largest = max((abs(value) for value in values if isfinite(value)), default=0)
        decimals = 2 if largest < 100 else 1 if largest < 1000 else 0
    return [f"{value:.{decimals}f}" if isfinite(value) else "-" for value in values]


def print_study(study: GapStudy) -> None:
    """Print a table per deployment."""
    console = _console()
    each = f" of {study.tokens_per_batch} tokens" if study.tokens_per_batch else ""
    console.print(Text(study.traffic, style="bold"), soft_wrap=True)
    console.print(
        f"{study.batches} x {study.layers} problems (batches{each} x MoE layers), "
        f"objective {study.objective}"
    )
    columns = [column for column in _COLUMNS if console.width >= 100 or not column.wide]
    if study.idle:
        columns.insert(1, _BEYOND_IDLE)
    stopped = _stopped(study)
    if stopped:
        columns.append(_PROVEN)
    texts = [_texts([c.value(row) for row in study.rows], c.decimals) for c in columns]
    longest = max(len(row.method) for row in study.rows)
    with_texts = zip(study.rows, zip(*texts, strict=True), strict=True)
    for _, group in groupby(with_texts, lambda pair: (pair[0].gpus, pair[0].redundant)):
        rows = list(group)
        first = max((row for row, _ in rows), key=lambda row: row.problems)
        live, available = _texts([first.live_experts, first.replicas_available])
        console.print(
            f"\n[bold]{first.gpus} GPUs, replication {first.replication:.5g}[/bold]"
            f" ({first.redundant} redundant slots)\n"
            f"[dim]{live} live experts with {available} replicas; {_optimum(first)}[/dim]"
        )
        table = _table("", "method", *(column.header for column in columns))
        table.columns[0].min_width = min(longest, 32)
        for column in table.columns:
            column.vertical = "bottom"  # headers of one line stand on the rule
        for row, cells in rows:
            table.add_row(Text(row.method), *cells, style="green" if row.gap_max == 0 else "")
        console.print(table)
    idle = "beyond idle: without what the offsets alone cost, of the means\n" if study.idle else ""
    console.print(
        "\n[dim]gap: makespan / optimum - 1 of every problem (a layer and a batch)\n"
        f"{idle}makespan: of the slowest GPU, mean; µs: wall time per problem\n"
        f"machine: {study.machine}[/dim]"
    )
    for line in stopped:
        console.print(Text(line), soft_wrap=True)


def _optimum(row: GapRow) -> str:
    """Say what the optimum of a deployment is, or how far it is known."""
    if isfinite(row.even):
        return f"even share {row.even:.4g}, optimum {row.optimum:.4g}"
    if row.optimum_proven == 1:
        return f"optimum {row.optimum:.4g}"
    return (
        f"optimum at least {row.optimum:.4g}, proven for {100 * row.optimum_proven:.2f} % of the "
        "problems; gaps are to the best proven bound"
    )


def _stopped(study: GapStudy) -> list[str]:
    """Say for each exact method that did not prove all it was asked what its other answers are."""
    lines = []
    for method in dict.fromkeys(row.method for row in study.rows if row.exact):
        rows = [row for row in study.rows if row.method == method]
        asked = sum(row.problems + row.unsolved for row in rows)
        proven = sum(round(row.proven * row.problems) for row in rows if row.problems)
        unsolved = sum(row.unsolved for row in rows)
        if proven < asked:
            left_out = f"; {unsolved} have no answer and are left out" if unsolved else ""
            lines.append(
                f"{method}: {asked - proven} of its {many(asked, 'problem')} were not proven; "
                f"their answers are the best that it had{left_out}"
            )
    return lines


def print_regimes(regimes: RegimeMap) -> None:
    """Print a table per deployment and skew, and where METRO and token balance cross."""
    console = _console()
    flips = 0 < regimes.break_even < inf
    console.print(Text(regimes.traffic, style="bold"), soft_wrap=True)
    console.print(
        f"{regimes.batches} x {regimes.layers} problems of each size (batches x MoE layers), "
        f"objective {regimes.objective}"
        + (f", break-even {regimes.break_even:.4g} tokens of an expert" if flips else "")
    )
    ratios = [choice for choice in CHOICES if choice != "makespan"]
    headers = ("tokens/\nGPU", "makespan", *(choice.replace("-", "\n") for choice in ratios))
    size = len(regimes.rows) // len(regimes.crossovers)
    for at, crossover in enumerate(regimes.crossovers):
        rows = regimes.rows[at * size : (at + 1) * size]
        skew = "" if crossover.skew is None else f", Zipf {crossover.skew:g}"
        console.print(
            f"\n[bold]{crossover.gpus} GPUs, replication {crossover.replication:.5g}{skew}[/bold]"
            f" ({crossover.redundant} redundant slots)"
        )
        mixed = ["mixed\n%"] if flips else []
        table = _table("", *headers, "proven\n%", *mixed, "  best", left=0)
        table.columns[-1].justify = "left"
        for column in table.columns:
            column.vertical = "bottom"
        makespans = _texts([row.makespan for row in rows])
        for row, makespan in zip(rows, makespans, strict=True):
            cells = [f"{row.ratio(choice):.3f}" for choice in ratios]
            shares = [f"{100 * share:.0f}" for share in (row.proven, row.mixed)][: 1 + len(mixed)]
            table.add_row(str(row.tokens_per_gpu), makespan, *cells, *shares, f"  {row.best}")
        console.print(table)
        console.print(Text(_crossing(crossover)), soft_wrap=True)
    console.print(
        "\n[dim]makespan: the slowest GPU's time, mean; the others: their time over it\n"
        f"best: the simplest within {100 * regimes.within:g} % of the least[/dim]"
    )
    if flips:
        console.print(
            "[dim]mixed: problems with both hot experts (more tokens per replica than break-even)"
            " and cold\nTEMPO's boundary: where the average activated replica, and the hottest"
            " expert, reach break-even[/dim]"
        )


def _crossing(crossover: Crossover) -> str:
    """Say where METRO and token balance cross, what supports it, and TEMPO's boundary."""
    below, above = crossover.below, crossover.above
    if below is None:
        said = f"token balance is faster than METRO from {many(above or 0, 'token')} per GPU on"
    elif above is None:
        said = f"METRO is at least as fast as token balance up to {many(below, 'token')} per GPU"
    else:
        said = (
            f"METRO and token balance cross at {crossover.tokens_per_gpu:.0f} tokens per GPU "
            f"(METRO takes {crossover.ratio_below:.3f} times as long at {below}, "
            f"{crossover.ratio_above:.3f} at {above})"
        )
    if not isfinite(crossover.flip):
        return said
    hottest = crossover.flip_hottest
    return f"{said}; TEMPO's boundary: {crossover.flip:.0f}, hottest {hottest:.0f}"


def print_routing(routing: Routing, method: str) -> None:
    """Print a routing's summary, and its layers."""
    summary, objective = routing.summary(), routing.objective
    counts = objective.counts_activations or objective.counts_tokens
    time = objective.name if counts else f"{objective.name} time"
    problems = routing.status.size
    proven = int((routing.status == Status.OPTIMAL).sum())
    facts = [
        ("placement", _shape_of(routing.placement)),
        ("objective", f"{time} of the {'fullest' if counts else 'slowest'} GPU"),
        ("live experts", f"{summary.live_experts:.2f} per problem"),
        ("replicas available", f"{summary.replicas_available:.2f}"),
        ("replicas activated", f"{summary.replicas_activated:.2f}"),
        ("tokens per activated", f"{summary.tokens_per_activated:.2f}"),
        (
            f"{time} of a GPU",
            f"p50 {summary.time_p50:.6g}, p95 {summary.time_p95:.6g}, "
            f"p99 {summary.time_p99:.6g}, worst {summary.time_max:.6g}",
        ),
        ("balance", f"{summary.balance:.3f} (mean GPU over the largest)"),
        ("makespan", f"{summary.makespan:.2f} (sum over layers)"),
        ("bound", f"{summary.bound:.2f}{_provers(routing.proved_by)}"),
        ("gap", f"{100 * summary.gap:.2f} %{_beyond_idle(routing)}"),
        ("status", f"{proven} of {problems} problems proven optimal"),
    ]
    if summary.unsolved:
        facts.append(("", f"{summary.unsolved} unsolved and left out above: give more time"))
    _print_facts(f"{method}: {many(summary.problems, 'problem')} routed", facts)
    if routing.placement.layered:
        _console().print(_layer_table(routing))


def _provers(proved_by: NDArray[np.int8]) -> str:
    """Say who proved the bounds, and of how many problems each."""
    proofs, problems = np.unique(proved_by, return_counts=True)
    by = [
        (Proof(proof).name.lower().replace("_", "-"), times)
        for proof, times in zip(proofs, problems, strict=True)
        if proof != Proof.NONE
    ]
    if len(by) == 1:
        return f" (proven by {by[0][0]})"
    return f" (proven by {', '.join(f'{name} {times}' for name, times in by)})" if by else ""


def _beyond_idle(routing: Routing) -> str:
    """Say the gap without what offsets alone cost, if there are any: of the sums, as the gap."""
    idle = routing.objective.idle
    answered = routing.status != Status.UNSOLVED
    bound = (routing.bound[answered] - idle).sum()
    if not idle or not bound > 0:
        return ""
    gap = (routing.makespan[answered] - idle).sum() / bound - 1
    return f", {100 * gap:.2f} % beyond the {idle:g} that a GPU takes without tokens"


def _layer_table(routing: Routing) -> Table:
    """Return a row per layer, means over batches: of at most so many layers, or of the fullest.

    Unsolved problems count for what is proven, and for nothing else.
    """
    layers = routing.placement.num_layers
    answered = (routing.status != Status.UNSOLVED).reshape(-1, layers)
    columns = {
        "live experts": (routing.expert_tokens() > 0).sum(axis=-1),
        "makespan": routing.makespan,
        "bound": routing.bound,
        "gap %": 100 * routing.gap,
    }
    with np.errstate(invalid="ignore"):  # 0 / 0 where a layer has no answer
        means = {
            name: np.where(answered, values.reshape(-1, layers), 0).sum(axis=0)
            / answered.sum(axis=0)
            for name, values in columns.items()
        }
    proven = (routing.status == Status.OPTIMAL).reshape(-1, layers)
    means["proven %"] = 100 * proven.mean(axis=0)
    shown, title = _shown(means["makespan"], "fullest")
    table = _table(title, "layer", *means, left=0)
    for layer in shown:
        cells = (_texts([mean[layer]], decimals=2)[0] for mean in means.values())
        table.add_row(str(layer), *cells)
    return table


def print_replay(replays: Sequence[Replay]) -> None:
    """Print a table per stage of every replay: all of the same steps, on other placements."""
    console = _console()
    first = replays[0]
    console.print(Text(first.traffic, style="bold"), soft_wrap=True)
    last = first.first_step + first.steps - 1
    console.print(
        f"steps {first.first_step} to {last}; {many(first.num_gpus, 'GPU')}, {first.redundant} "
        f"redundant slots; objective {first.objective}"
    )
    for replay in replays:
        updates = _updates(replay) if replay.decisions else "stays"
        for stage in STAGES:
            if any(getattr(row, stage) is not None for row in replay.rows):
                console.print()
                console.print(_stage_table(replay, stage, f"{stage}; placement: {updates}"))
    console.print(
        "\n[dim]milliseconds per step: experts on the slowest GPU, dispatch and combine, the"
        " router, the rest, moves\nreplicas: of live experts, and activated, per layer; µs: the"
        " slowest GPU's kernel on a layer[/dim]"
    )


def _updates(replay: Replay) -> str:
    """Say what a loop decided."""
    told = replay.decisions
    declined = sum(bool(decided.declined) for decided in told)
    now, then = (
        sum(getattr(decided, name) for decided in told) / len(told)
        for name in ("par_mean", "expected_mean")
    )
    return (
        f"{many(len(told), 'decision')} ({declined} declined), {many(replay.moves, 'move')}, "
        f"PAR {now:.3f} to {then:.3f}"
    )


def _stage_table(replay: Replay, stage: Stage, title: str) -> Table:
    """Return a row per method: the times of the steps of a stage, and what they are made of."""
    rows: list[StageTimes] = [getattr(row, stage) for row in replay.rows]
    columns = [
        ("mean\nms", _texts([row.mean for row in rows])),
        ("p50", _texts([row.p50 for row in rows])),
        ("p95", _texts([row.p95 for row in rows])),
        ("p99", _texts([row.p99 for row in rows])),
        ("ex-\nperts", _texts([row.experts for row in rows])),
        ("disp.,\ncomb.", _texts([row.communication for row in rows])),
        ("router", _texts([row.router for row in rows])),
        ("rest", _texts([row.rest for row in rows])),
        ("moves", _texts([row.migration for row in rows])),
        ("live", _texts([row.live_experts for row in rows], decimals=1)),
        ("repli-\ncas", _texts([row.replicas_available for row in rows], decimals=1)),
        ("acti-\nvated", _texts([row.activated for row in rows], decimals=1)),
        ("tokens/\nreplica", _texts([row.tokens_per_activated for row in rows])),
        ("µs", _texts([row.slowest_gpu for row in rows])),
        ("tokens/s", [f"{row.tokens_per_second:.0f}" for row in rows]),
    ]
    if any(isfinite(row.within_slo) for row in rows):
        columns.insert(4, ("in SLO\n%", _texts([100 * row.within_slo for row in rows], decimals=1)))
    kept = [c for c in columns if c[0] not in ("router", "moves") or any(float(t) for t in c[1])]
    table = _table(title, "method", *(header for header, _ in kept))
    for column in table.columns:
        column.vertical = "bottom"
    for row, *cells in zip(replay.rows, *(cells for _, cells in kept), strict=True):
        table.add_row(Text(row.method), *cells)
    return table


def print_advice(advice: Advice, most: int = 12) -> None:
    """Print the answer, its reasons, and a table of the best candidates."""
    console = _console()
    console.print(Text(advice.traffic, style="bold"), soft_wrap=True)
    parts = advice.parts
    left_out = f", after {parts.warm_up} left out" if parts.warm_up else ""
    console.print(
        f"{many(advice.num_gpus, 'GPU')}, objective {advice.objective}; {parts.learned} steps to "
        f"learn from{left_out}, {parts.chosen} to choose by, {parts.judged} to judge on\n"
    )
    answer, *reasons = advice.reasons
    console.print(Text(answer, style="bold"))
    for line in reasons:
        console.print(Text(f"- {line}"))
    console.print()
    console.print(_candidate_table(advice.candidates[:most], len(advice.candidates)))
    console.print(
        "\n[dim]gain: less time than without EPLB, mean, on the steps to choose by; ms: of a step;"
        " GiB: more\non each GPU[/dim]"
    )
    for note in advice.notes:
        console.print(Text(f"note: {note}", style="dim"))


def _candidate_table(candidates: Sequence[Candidate], tried: int) -> Table:
    """Return a row per candidate."""
    gib = [None if c.memory is None else c.memory / 2**30 for c in candidates]
    columns = [
        ("redun-\ndant", [str(c.redundant) for c in candidates]),
        ("gain\n%", _texts([100 * c.gain for c in candidates])),
        ("decode\nms", _known_texts([c.decode for c in candidates])),
        ("prefill\nms", _known_texts([c.prefill for c in candidates])),
        ("moves", [str(c.moves) for c in candidates]),
        ("GiB", _known_texts(gib)),
        ("steps", [str(c.steps) for c in candidates]),
    ]
    kept = [(header, cells) for header, cells in columns if any(cells)]
    shown = f", the best {len(candidates)}" if len(candidates) < tried else ""
    headers = ("placer", "placed", "by load of", "router", *(header for header, _ in kept))
    table = _table(f"{tried} candidates{shown}", *headers, left=4)
    for column in table.columns:
        column.vertical = "bottom"
    for candidate, *cells in zip(candidates, *(cells for _, cells in kept), strict=True):
        c: Candidate = candidate
        router = c.router if c.redundant else ""
        table.add_row(Text(c.placer), c.cycle, c.stage, Text(router), *map(str, cells))
    return table


def _known_texts(values: Sequence[float | None]) -> list[str]:
    """Format values alike; nothing for those that are not known."""
    texts = _texts([inf if value is None else value for value in values])
    return ["" if value is None else text for value, text in zip(values, texts, strict=True)]


def print_sweep(sweep: Sweep) -> None:
    """Print a table per EP size and stage: what no other deployment and router beats."""
    console = _console()
    console.print(Text(sweep.traffic, style="bold"), soft_wrap=True)
    last = sweep.first_step + sweep.steps - 1
    console.print(
        f"steps {sweep.first_step} to {last}; {many(sweep.cells, 'deployment')}, "
        f"{many(len(sweep.rows), 'row')} with their routers; objective {sweep.objective}"
    )
    for gpus in sweep.gpus:
        for stage in sweep.stages:
            console.print()
            console.print(_frontier_table(sweep, gpus, stage))
    cost = "memory" if all(row.memory for row in sweep.rows) else "redundancy"
    console.print(
        f"\n[dim]shown: the Pareto frontier, of which no other has less {cost} and a shorter mean"
        " step; green: the shortest\nplaced for: whose load placements are made for; every: steps"
        " from one to the next; milliseconds per step[/dim]"
    )


def _frontier_table(sweep: Sweep, gpus: int, stage: Stage) -> Table:
    """Return a row for each that is on the frontier."""
    rows = sweep.frontier(gpus, stage)
    times: list[StageTimes] = [getattr(row, stage) for row in rows]
    of = sum(row.gpus == gpus and row.mean(stage) is not None for row in sweep.rows)
    memory = [row.memory.total / 1e9 for row in rows if row.memory is not None]
    columns: list[tuple[str, list[str]]] = [
        ("placed\nfor", [row.stage or "-" for row in rows]),
        ("every", [str(row.interval or "-") for row in rows]),
        ("redun-\ndant", [str(row.redundant) for row in rows]),
        ("GB\nper GPU", _texts(memory)),
        ("mean\nms", _texts([t.mean for t in times], decimals=3)),
        ("p50", _texts([t.p50 for t in times], decimals=3)),
        ("p99", _texts([t.p99 for t in times], decimals=3)),
        ("acti-\nvated", _texts([t.activated for t in times], decimals=1)),
        ("moves", [str(row.moves) for row in rows]),
        ("tokens/s", [f"{row.tokens_per_second:.0f}" for row in rows]),
    ]
    kept = [column for column in columns if column[1]]
    title = f"{many(gpus, 'GPU')}, {stage}: {len(rows)} of {of} rows"
    table = _table(title, "router", "placer", *(header for header, _ in kept), left=2)
    for column in table.columns:
        column.vertical = "bottom"
    for row, *cells in zip(rows, *(cells for _, cells in kept), strict=True):
        style = "green" if row is rows[-1] else ""
        table.add_row(Text(row.method), Text(row.placer or "in order"), *cells, style=style)
    return table


def print_comparison(comparison: PlacementComparison) -> None:
    """Print a row per method and one for the placement before; for one method its layers too."""
    console = _console()
    rows = comparison.rows
    plan = rows[0].plan
    console.print(Text(comparison.loads, style="bold"), soft_wrap=True)
    console.print(_shape_of(plan.placement))
    before, methods = f"before: {comparison.started_from}", [row.method for row in rows]
    console.print(_by_placement([before, *methods], _balance_columns(comparison)))
    if plan.moves is not None:
        title = f"\nMoves from {comparison.started_from}"
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(_by_placement(methods, _move_columns(rows)))
    if len(rows) == 1:
        console.print()
        console.print(_plan_layers(comparison, rows[0]))
    console.print(
        "\n[dim]PAR: peak over average, the largest GPU load over the mean, by layer\n"
        f"gap: makespan / bound - 1; {_said_of(plan.measure)}[/dim]"
    )
    for row in rows:
        proven = "bounds " + _provers(row.plan.proved_by).strip(" ()")
        line = "; ".join(filter(None, (f"{row.method}: {proven}", row.plan.note)))
        console.print(Text(line, style="dim"), soft_wrap=True)


def _by_placement(placements: Sequence[str], columns: Sequence[tuple[str, list[str]]]) -> Table:
    """Return a table with a row per placement, from headers and cells."""
    table = _table("", "placement", *(header for header, _ in columns))
    table.columns[0].min_width = min(max(map(len, placements)), 14)
    for column in table.columns:
        column.vertical = "bottom"
    for name, *cells in zip(placements, *(cells for _, cells in columns), strict=True):
        table.add_row(Text(name), *cells)
    return table


def _balance_columns(comparison: PlacementComparison) -> list[tuple[str, list[str]]]:
    """Return headers and cells, of the placement before and then of every row."""
    rows = comparison.rows
    measured = [comparison.before, *(row.plan.metrics for row in rows)]
    gaps = [100 * row.plan.gap for row in rows]
    return [
        ("PAR\nmean", [f"{m.par_mean:.3f}" for m in measured]),
        ("worst", [f"{m.par_max:.3f}" for m in measured]),
        ("gap %\nmean", ["", *(f"{gap.mean():.2f}" for gap in gaps)]),
        ("worst", ["", *(f"{gap.max():.2f}" for gap in gaps)]),
        ("proven", ["", *(f"{row.proven}/{row.plan.makespan.size}" for row in rows)]),
        ("balance\nSGLang", [f"{m.balancedness_sglang:.3f}" for m in measured]),
        ("vLLM", [f"{m.balancedness_vllm:.3f}" for m in measured]),
        ("dupli-\ncates", [str(m.duplicates.sum()) for m in measured]),
        ("ms", ["", *_texts([1e3 * row.seconds for row in rows])]),
    ]


def _move_columns(rows: Sequence[ComparedPlan]) -> list[tuple[str, list[str]]]:
    """Return headers and cells of what moving costs, as far as it is known."""
    columns = [("moves", [str(row.plan.moves.sum()) for row in rows if row.plan.moves is not None])]
    moved = [row.transfer for row in rows if row.transfer is not None]
    saved = [row.saved for row in rows if row.saved is not None]
    steps = [row.break_even_steps for row in rows if row.break_even_steps is not None]
    if moved:
        columns += [
            ("rounds", [str(transfer.rounds.sum()) for transfer in moved]),
            ("GB in\nnodes", [f"{transfer.bytes_inside / 1e9:.1f}" for transfer in moved]),
            ("between", [f"{transfer.bytes_between / 1e9:.1f}" for transfer in moved]),
            ("buffers\nGB/GPU", [f"{transfer.buffer_bytes / 1e9:.2f}" for transfer in moved]),
            ("ms", _texts([1e3 * transfer.seconds for transfer in moved])),
            ("at\nleast", _texts([1e3 * transfer.bound for transfer in moved])),
        ]
    if saved:
        repaid = [f"{step:.0f}" if isfinite(step) else "never" for step in steps]
        columns += [("saves\nµs/step", _texts(saved)), ("repaid in\nsteps", repaid)]
    return columns


def _said_of(measure: Measure) -> str:
    """Say what the makespan is of."""
    copies = "take the same share" if measure.split is Split.EQUAL else "share as is best"
    over = measure.over_windows
    windows = f"{over:g} quantile" if isinstance(over, float) else over
    return f"copies of an expert {copies}; {windows} of windows"


def _plan_layers(comparison: PlacementComparison, row: ComparedPlan) -> Table:
    """Return a row per layer: of at most twelve layers, or of the five with the largest PAR."""
    plan = row.plan
    means = {
        "PAR before": [f"{par:.3f}" for par in comparison.before.par],
        "PAR": [f"{par:.3f}" for par in plan.metrics.par],
        "makespan": _texts(plan.makespan.tolist()),
        "bound": _texts(plan.bound.tolist()),
        "gap %": _texts((100 * plan.gap).tolist(), decimals=2),
        "copies": [str(copies) for copies in plan.metrics.copies.max(axis=-1)],
        "duplicates": [str(count) for count in plan.metrics.duplicates],
    }
    if plan.moves is not None:
        means["moves"] = [str(count) for count in plan.moves]
    shown, title = _shown(plan.metrics.par, "least balanced")
    table = _table(title, "layer", *means, left=0)
    for at in shown:
        table.add_row(str(comparison.layers[at]), *(cells[at] for cells in means.values()))
    return table


def _shown(
    size: NDArray[np.float64], called: str, most: int = 12, largest: int = 5
) -> tuple[NDArray[np.intp], str]:
    """Return which layers a table shows, and its title: at most so many, or the largest."""
    if len(size) <= most:
        return np.arange(len(size)), "By layer"
    shown = np.argsort(-size, kind="stable")[:largest]
    return shown, f"The {called} {largest} of {len(size)} layers"


def _print_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values side by side."""
    console = _console()
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(Text(name, style="dim"), Text(value))
    console.print(Text(title, style="bold"), soft_wrap=True)  # paths stay whole
    console.print(table)


def _shape_of(placement: Placement) -> str:
    return (
        f"{many(placement.num_layers, 'layer')}, {many(placement.num_gpus, 'GPU')} x "
        f"{many(placement.slots_per_gpu, 'slot')}, {many(placement.num_experts, 'expert')}"
    )


def print_placement(placement: Placement, title: str) -> None:
    """Print the shape of a placement, and what is odd about it."""
    slots = placement.slots.reshape(-1, placement.num_gpus, placement.slots_per_gpu)
    filled = (slots != EMPTY).any(axis=-1)
    twice = list(placement.duplicates())
    places = "; ".join(f"layer {la}, GPU {g}: expert {e}" for la, g, e in islice(twice, 3))
    more = "; ..." if len(twice) > 3 else ""
    facts = [
        ("shape", _shape_of(placement)),
        ("copies of an expert", _spread(placement.copies)),
        ("redundant slots of a layer", _spread(placement.redundant())),
        ("empty slots", str(int((slots == EMPTY).sum()))),
        ("GPUs without any expert", str(int((~filled).all(axis=0).sum()))),
        ("expert twice on one GPU", f"{len(twice)}: {places}{more}" if twice else "0"),
    ]
    _print_facts(title, facts)


def print_trace(trace: LoadTrace | TokenTrace, title: str) -> None:
    """Print the shape of recorded traffic, and how skewed it is."""
    load = trace.load()
    served = load.any(axis=1)
    dense = np.flatnonzero(~served)
    if isinstance(trace, LoadTrace):
        shape = f"counts of {many(trace.num_steps, 'step')}"
        known = _known(trace)
    else:
        shape = f"top-{trace.top_k} ids of {many(trace.num_tokens, 'token')}"
        known = []
    shape += f", {many(load.shape[0], 'layer')}, {many(load.shape[1], 'expert')}"
    facts = [("shape", shape), *known]
    if dense.size:
        some = ", ".join(map(str, dense[:8])) + (", ..." if dense.size > 8 else "")
        facts.append(("dense layers (no tokens)", f"{dense.size}: {some}"))
    if served.any():
        # Summed as floats: a layer of the largest counts passes 2^63.
        moe = load[served].astype(np.float64)
        facts += [
            ("tokens of a layer", _spread(moe.sum(axis=1))),
            ("hottest expert over mean", _spread(moe.max(axis=1) / moe.mean(axis=1))),
            ("experts of a layer without tokens", _spread((moe == 0).sum(axis=1))),
        ]
    _print_facts(title, facts)


def _known(trace: LoadTrace) -> list[tuple[str, str]]:
    """Say what is known of a trace besides its counts."""
    facts = []
    if trace.model is not None:
        facts.append(("model", trace.model))
    if trace.top_k is not None:
        facts.append(("experts per token", str(trace.top_k)))
    if trace.layer_ids is not None:
        first, last = trace.layer_ids[0], trace.layer_ids[-1]
        facts.append(("layers in the model", f"{first} to {last}" if first < last else str(first)))
    if trace.source_tokens is not None:
        facts.append(("counted by source GPU", many(trace.source_tokens.shape[2], "GPU")))
    stage, scheduled, time = trace.facts.stage, trace.facts.scheduled, trace.facts.time
    if stage is not None:
        parts = ((stage == name).sum() for name in ("decode", "prefill", ""))
        facts.append(("steps by stage", "{} decode, {} prefill, {} unknown".format(*parts)))
    if scheduled is not None:
        facts.append(("scheduled tokens of a step", _spread(scheduled)))
    if time is not None and trace.num_steps > 1:
        facts.append(("seconds from step to step", _spread(np.diff(time), digits=4)))
    idle = trace.idle_steps()
    if idle.size:
        facts.append(("steps without tokens", f"{idle.size}, the first is step {idle[0]}"))
    return facts


def many(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural if need be."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _spread(values: NDArray[Any], digits: int = 2) -> str:
    """Say the least, the median and the most, or what they all are."""
    whole = "." + "0" * digits
    low, middle, high = (
        f"{value:.{digits}f}".removesuffix(whole) for value in np.percentile(values, [0, 50, 100])
    )
    return low if low == high else f"{low} least, {middle} median, {high} most"
