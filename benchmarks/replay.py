"""Published cases replayed, each beside the figures that it is to show in kind.

    python benchmarks/replay.py              # all cases, a minute or two
    python benchmarks/replay.py --quick      # less of each, some seconds
    python benchmarks/replay.py stages loop  # these cases only

Traffic is that of `Workload.preset("deepseek-v3")`, whose popularity follows SGLang's published
counts; experts take what TEMPO measured of DeepSeek-V3 in fp8 (arXiv 2608.13057). Neither their
traffic nor their machines are ours: "in kind" is the direction, and where a figure is known about
its size. How fast replay is: ``replay_speed.py``. Printed in Markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, get_args

import numpy as np
import typer
from numpy.typing import NDArray
from routing_speed import machine

import eplb_opt as eo
from eplb_opt.batches import STAGES, Batches, BatchFacts
from eplb_opt.heat import HeatStage
from eplb_opt.placers import first_placement
from eplb_opt.replaying import StageTimes
from eplb_opt.workload import Stage

MODEL = eo.model_shape("deepseek-v3")
OBJECTIVE = "deepseek-v3-fp8"
TIME = eo.StepTime(OBJECTIVE)
Counts = NDArray[np.int64]


def traffic_of(stage: Stage, layers: int, drift: float = 0) -> eo.Workload:
    """Return DeepSeek-V3's traffic on so many of its layers, spread evenly."""
    traffic = eo.Workload.preset(MODEL.name, stage, drift=drift, seed=1)
    chosen = np.linspace(0, MODEL.layers - 1, layers).round().astype(np.intp)
    return replace(traffic, popularity=traffic.popularity[chosen])


def batches(traffic: eo.Workload, tokens: int, steps: int) -> Counts:
    """Draw batches token by token, int64 ``[steps, layers, experts]``."""
    each = (traffic.draw(tokens, first_step=step) for step in range(steps))
    return np.concatenate([eo.count_tokens(ids, MODEL.experts) for ids in each])


def large_batches(traffic: eo.Workload, tokens: int, steps: int) -> Counts:
    """Draw counts by popularity alone, of batches so large that little else shows in them."""
    random = np.random.default_rng(traffic.seed)
    each = (traffic.popularity_at(step) for step in range(steps))
    return np.stack([random.multinomial(tokens * traffic.top_k, shares) for shares in each])


def trace_of(counts: Counts) -> eo.LoadTrace:
    """Return counts as a trace."""
    return eo.LoadTrace(counts, top_k=MODEL.top_k)


def place(
    load: NDArray[np.float64], gpus: int, redundant: int, method: str = "deepseek"
) -> eo.Placement:
    """Place by a load."""
    slots = (MODEL.experts + redundant) // gpus
    return eo.solve_placement(load, num_gpus=gpus, slots_per_gpu=slots, method=method).placement


def decode_of(answer: eo.Replay, method: str) -> StageTimes:
    """Return a method's decode steps."""
    times = answer.row(method).decode
    assert times is not None
    return times


def heading(title: str, *columns: str) -> None:
    """Print a case's title and the head of its table."""
    print(f"\n### {title}\n")
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")


def row(*cells: object) -> None:
    """Print a row."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def percent(ratio: float) -> str:
    """Return by how much a ratio is off 1."""
    return f"{100 * (ratio - 1):+.1f} %"


def conclude(compared: str, *, in_kind: bool) -> None:
    """Say what was compared, and whether it shows what was published."""
    print(f"\n{compared} In kind: **{'yes' if in_kind else 'no'}**.")


def activation(quick: bool) -> None:
    """EPLB's replicas are activated, and read, by its equal split; not by METRO or the optimum."""
    gpus, methods = 8, ("uniform", "metro", "makespan")
    traffic = traffic_of("decode", 8 if quick else MODEL.layers)
    heading(
        f"More replicas, more activated experts: EP{gpus}, decode, {len(traffic.popularity)} "
        "layers, EPLB's placements; relative to 1.0x, and the last two to uniform",
        "tokens a batch",
        "replication",
        "router",
        "activated",
        "slowest GPU",
        "TPOT",
        "throughput",
        "slowest GPU beside uniform's",
        "TPOT with the router's own time",
    )
    shown = True
    for tokens in (16, 32) if quick else (16, 32, 128):
        trace = trace_of(batches(traffic, tokens, 4 if quick else 20))
        single = place(traffic.popularity, gpus, 0)
        alone = decode_of(eo.replay(trace, single, ["uniform"], time=TIME), "uniform")
        # METRO's +30 % of experts and +14 % of time say that experts are about half of a step.
        step = 2 * alone.experts
        row(
            f"{tokens}, {alone.live_experts:.0f} live experts",
            "1x",
            "any",
            f"{alone.activated:.1f} a layer",
            f"{alone.slowest_gpu:.0f} µs",
            f"{step:.1f} ms",
            *["-"] * 3,
        )
        for redundant, kernel in METRO_KERNEL.items():
            time = replace(
                TIME,
                decode=eo.Line(1e3 * alone.experts),
                routers={"metro": kernel, "makespan": TO_CPU_AND_BACK},
            )
            placement = place(traffic.popularity, gpus, redundant)
            answer = eo.replay(trace, placement, methods, time=time)
            even = decode_of(answer, "uniform")
            for method in methods:
                now = decode_of(answer, method)
                tpot = (now.mean - now.router) / step
                row(
                    tokens,
                    f"{1 + redundant / MODEL.experts:g}x",
                    method,
                    percent(now.activated / alone.activated),
                    percent(now.slowest_gpu / alone.slowest_gpu),
                    percent(tpot),
                    percent(1 / tpot),
                    percent(now.slowest_gpu / even.slowest_gpu),
                    percent(now.mean / even.mean),
                )
                if redundant == max(METRO_KERNEL):
                    more = now.activated / alone.activated
                    shown &= min(more, tpot) > 1.1 if method == "uniform" else tpot < 1.02
    conclude(
        "METRO (arXiv 2512.09277): at 1.5x EPLB activates nearly 30 % more experts, decode +14 %, "
        "throughput -10 %; its own routing up to 42.3 % below EPLB's on the fullest GPU, decode "
        "-11 to -22 %. The rest of a step is taken to be as long as its experts at 1.0x. Routers' "
        f"own time: METRO's greedy kernel {', '.join(map(str, METRO_KERNEL.values()))} µs a layer, "
        f"as published; the exact search {TO_CPU_AND_BACK:g} µs, to the CPU and back.",
        in_kind=shown,
    )


METRO_KERNEL = {32: 4.0, 64: 4.9, 128: 8.0}  # µs by redundant slots, the best published
TO_CPU_AND_BACK = 29.0 + 5.0  # METRO's measured way of the top-k tensors, and our search


def token_balance(quick: bool) -> None:
    """Replicas with balanced tokens help large prefill batches, and not small decode batches."""
    gpus, layers, steps = 8, 2 if quick else 4, 2 if quick else 8
    heading(
        f"Token balance against no replicas: EP{gpus}, EPLB's placements, 64 redundant, {layers} "
        "layers; the experts' time relative to EPLB without replicas",
        "stage",
        "tokens per GPU",
        "uniform (EPLB)",
        "token balance",
        "makespan",
    )
    balanced = {}
    for stage, per_gpu in (
        ("decode", 8),
        ("decode", 16),
        ("decode", 128),
        ("prefill", 512),
        ("prefill", 1024),
        *(() if quick else (("prefill", 2048),)),
    ):
        traffic = traffic_of("decode" if stage == "decode" else "prefill", layers)
        trace = trace_of(batches(traffic, per_gpu * gpus, steps))
        alone, replicated = (
            eo.replay(
                trace,
                place(traffic.popularity, gpus, redundant),
                ["uniform", "flow", "makespan"],
                time=TIME,
            )
            for redundant in (0, 64)
        )
        was = decode_of(alone, "uniform").experts
        ratio = [decode_of(replicated, row.method).experts / was for row in replicated.rows]
        balanced[per_gpu] = ratio[1]
        row(stage, per_gpu, *map(percent, ratio))
    gains = [per_gpu for per_gpu, ratio in balanced.items() if ratio < 1]
    conclude(
        "Published: balance pays on large prefill, and not at batches of 8 and 16 (METRO) or at "
        "prefill inputs below 1,024 (vLLM-Ascend's guide). Here token balance gains from "
        f"{min(gains, default=0):,} tokens per GPU on.",
        in_kind=balanced[8] >= 1 and balanced[16] >= 1 and min(gains, default=0) >= 512,
    )


TURNOVER = 50


def stale(quick: bool) -> None:
    """Routing by a table of earlier steps keeps part of what routing every batch gains."""
    gpus = 8
    windows = (1, 10, 40) if quick else (1, 10, 40, 160)
    steps, layers = (160, 2) if quick else (640, 8)
    tables = [eo.Stale("makespan", window) for window in windows]
    heading(
        f"The stale table: EP{gpus}, 64 redundant, {layers} layers, drifting traffic that turns "
        f"over in {TURNOVER} steps; the experts' time relative to uniform, and how much of the "
        "gain is kept",
        "tokens per GPU",
        "routed anew",
        *(f"table of {window}" for window in windows),
    )
    kept = []
    for per_gpu, draw in ((2, batches), (8, batches), (1024, large_batches)):
        traffic = traffic_of("decode", layers, drift=1 / TURNOVER)
        counts = draw(traffic, per_gpu * gpus, steps)
        placement = place(traffic.popularity, gpus, 64)
        answer = eo.replay(trace_of(counts), placement, ["uniform", "makespan", *tables], time=TIME)
        # The first table of the longest window is complete after as many steps.
        even, fresh, *old = (r.step_times[max(windows) :].mean() for r in answer.rows)
        shares = [(even - table) / (even - fresh) for table in old]
        kept += [s for s, window in zip(shares, windows, strict=True) if window < TURNOVER]
        cells = (
            f"{percent(table / even)}, {100 * share:.0f} % kept"
            for table, share in zip(old, shares, strict=True)
        )
        row(per_gpu, percent(fresh / even), *cells)
    conclude(
        "TEMPO (arXiv 2608.13057) serves by a table of the last window's counts and keeps part of "
        "the gain. Small batches differ in which experts are live, which no window tells. On large "
        "ones the table ages with the traffic; where its window is longer than that takes to turn "
        "over, it may be worse than equal split, and does not count here.",
        in_kind=all(0 < share < 1 for share in kept),
    )


def loop(quick: bool) -> None:
    """Swift moves a fraction of the weights that the default policy moves, for nearly its balance.

    The cycle is vLLM-Ascend's with its default intervals; `search` heeds a budget of moves.
    """
    gpus, layers, cycles = 16, 4 if quick else 16, 3 if quick else 5
    heat = eo.CollectThenDecide(*((60, 5) if quick else (600, 50)))
    cycle = heat.collection_interval + heat.algorithm_interval + layers
    traffic = traffic_of("decode", layers, drift=0.2 / cycle)
    counts = large_batches(traffic, 1024 * gpus, cycles * cycle)
    first = counts[: heat.collection_interval].sum(axis=0).astype(np.float64)
    start = place(first, gpus, 64)
    weights = eo.Migration(eo.expert_bytes(MODEL))
    policies: dict[str, eo.EplbLoop | eo.Placement] = {"none: what is first placed": start}
    few = layers * gpus  # moves a decision: one for every GPU and layer
    for name, method, worth in (
        ("default", "ascend-default", eo.Worth()),
        ("swift", "swift", eo.Worth()),
        ("search", "search", eo.Worth()),
        (f"search, {few} moves", "search", eo.Worth(max_moves=few)),
    ):
        policies[name] = eo.EplbLoop(start, replace(heat), method=method, worth=worth)
    heading(
        f"Policies on drifting traffic: EP{gpus}, 64 redundant, {layers} layers, {cycles} cycles "
        f"of {cycle} steps, 1,024 tokens per GPU, equal split",
        "policy",
        "moves",
        "of the default's",
        "PAR decided",
        "PAR served",
        "TPOT, ms",
        "with stop-the-world moves",
    )
    moves, served = {}, {}
    for name, policy in policies.items():
        answer = eo.replay(trace_of(counts), policy, ["uniform"], time=TIME, migration=weights)
        times = decode_of(answer, "uniform")
        decided = [d.expected.par_mean for _, d in answer.decisions]
        moves[name] = answer.moves
        served[name] = par_served(counts, start, answer, cycle)
        row(
            name,
            f"{answer.moves:,}",
            f"{100 * answer.moves / max(moves.get('default', 0), 1):.0f} %"
            if answer.moves
            else "-",
            f"{np.mean(decided):.4f}" if decided else "-",
            f"{served[name]:.4f}",
            f"{times.mean - times.migration:.3f}",
            f"{times.mean:.3f}",
        )
    conclude(
        "A migration-aware program elsewhere moves 2,223 weights against EPLB's 13,036 (17 %) at a "
        "balance of 0.996; vLLM-Ascend recommends swift over its default for its moves. PAR: "
        "fullest GPU over mean, of the window that was decided on, and of the steps served after.",
        in_kind=moves["swift"] < moves["default"] / 2
        and served["swift"] < served["default"] + 0.02,
    )


def par_served(counts: Counts, start: eo.Placement, answer: eo.Replay, cycle: int) -> float:
    """Return the mean over later cycles and layers of the PAR on their load, as it was served."""
    placements = [start, *(decision.placement for _, decision in answer.decisions)]
    loads = (counts[at : at + cycle].sum(axis=0) for at in range(cycle, len(counts), cycle))
    pars = [
        eo.PlacementMetrics.of(placements[min(n, len(placements) - 1)], load.astype(np.float64))
        for n, load in enumerate(loads, 1)
    ]
    return float(np.mean([par.par_mean for par in pars]))


def communication(quick: bool) -> None:
    """Where dispatch and combine command a step, neither placement nor routing gains."""
    gpus, layers = 16, 4 if quick else 16
    traffic = traffic_of("decode", layers)
    trace = trace_of(batches(traffic, 32 * gpus, 4 if quick else 10))
    slow = eo.Links(between=1e9)
    ways: Mapping[str, eo.Communication] = MappingProxyType(
        {
            "all-to-all, 400 Gbit/s between nodes": eo.Communication(MODEL.hidden),
            "all-to-all of 1 ms latency": eo.Communication(MODEL.hidden, latency=1000),
            "all-gather, 8 Gbit/s": eo.Communication(MODEL.hidden, slow, "all-gather"),
            "all-to-all, 8 Gbit/s": eo.Communication(MODEL.hidden, slow),
        }
    )
    in_order = eo.Placement(
        first_placement(layers, gpus, MODEL.experts // gpus, num_experts=MODEL.experts),
        MODEL.experts,
    )
    heading(
        f"Bound by communication: EP{gpus} on two nodes, decode, 32 tokens per GPU, {layers} "
        "layers; step time relative to experts in order without replicas",
        "exchange",
        "its share of a step",
        "routing alone: EPLB's placement, makespan over uniform",
        "best placement and router",
        "which",
    )
    gains = {}
    for name, way in ways.items():
        time = replace(TIME, communication=way)
        none = decode_of(eo.replay(trace, in_order, ["uniform"], time=time), "uniform")
        found = {}
        for method in ("deepseek", "search"):
            for redundant in (0, 64):
                placement = place(traffic.popularity, gpus, redundant, method)
                answer = eo.replay(trace, placement, ["uniform", "flow", "makespan"], time=time)
                for r in answer.rows:
                    found[method, redundant, r.method] = decode_of(answer, r.method).mean
        best = min(found, key=lambda key: found[key])
        gains[name] = found[best] / none.mean - 1
        routed = found["deepseek", 64, "makespan"] / found["deepseek", 64, "uniform"]
        row(
            name,
            f"{100 * none.communication / none.mean:.0f} %",
            percent(routed),
            percent(1 + gains[name]),
            f"{best[0]}, {best[1]} redundant, {best[2]}",
        )
    _, latency, gather, _ = gains.values()
    conclude(
        "TEMPO measured no gain end to end on DeepSeek-V3, bound by communication. So it is where "
        "latency commands, or an all-gather, which carries the same whatever is routed. An "
        "all-to-all over slow links is different: it waits for the GPU with the most tokens, and "
        "balancing tokens shortens it.",
        in_kind=latency > -0.02 and gather > -0.02,
    )


def stages(quick: bool) -> None:
    """Placements made for one stage's load serve that stage best."""
    gpus, layers, rounds = 16, 4 if quick else 16, 16 if quick else 64
    decode_tokens, prefill_tokens = 512 * gpus, 2048 * gpus
    each = prefill_tokens // decode_tokens  # decode steps for a prefill step: as many tokens
    decode = large_batches(traffic_of("decode", layers), decode_tokens, each * rounds)
    prefill = large_batches(traffic_of("prefill", layers), prefill_tokens, rounds)
    turns = [[at, *range(rounds + at * each, rounds + (at + 1) * each)] for at in range(rounds)]
    stage = np.array(["prefill", *["decode"] * each] * rounds)
    scheduled = np.where(stage == "decode", decode_tokens, prefill_tokens)
    trace = eo.LoadTrace(
        np.concatenate([prefill, decode])[np.concatenate(turns)],
        facts=eo.StepFacts(stage=stage, scheduled=scheduled),
        top_k=MODEL.top_k,
    )
    whole = Batches.of(trace, tokens=1, steps=None, top_k=MODEL.top_k)
    facts = BatchFacts(whole, MODEL.top_k, most_decode_tokens=decode_tokens)
    heading(
        f"Which stage to collect: EP{gpus}, 64 redundant, {layers} layers, placed by `search` on "
        "the first half of mixed traffic, equal split on the second",
        "collected",
        *(f"{name}, ms a step" for name in STAGES),
    )
    times: dict[HeatStage, Sequence[float]] = {}
    for collected in get_args(HeatStage):
        answer = eo.Scenario(gpus, 64, "search", stage=collected).replay(
            facts, ["uniform"], first_step=rounds // 2 * (each + 1), time=TIME
        )
        served = answer.rows[0].decode, answer.rows[0].prefill
        times[collected] = [0.0 if of is None else of.mean for of in served]
        row(collected, *(f"{mean:.4f}" for mean in times[collected]))
    won = all(
        times[name][at] < min(others[at] for key, others in times.items() if key != name)
        for at, name in enumerate(STAGES)
    )
    conclude(
        "vLLM-Ascend's ``eplb_heat_collection_stage``: collecting a stage is to win on that "
        "stage's latency. No figures are published.",
        in_kind=won,
    )


CASES: Mapping[str, Callable[[bool], None]] = MappingProxyType(
    {
        "activation": activation,
        "token-balance": token_balance,
        "stale": stale,
        "loop": loop,
        "communication": communication,
        "stages": stages,
    }
)


def main(
    cases: Annotated[
        list[str] | None, typer.Argument(help=f"Which: {', '.join(CASES)}; by default all.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer layers, steps and sizes.")] = False,
) -> None:
    """Print the cases."""
    for name in cases or []:
        if name not in CASES:
            raise typer.BadParameter(f"no case is called {name!r}; there are {', '.join(CASES)}")
    print(f"machine: {machine()}")
    for name in cases or CASES:
        CASES[name](quick)


if __name__ == "__main__":
    typer.run(main)
