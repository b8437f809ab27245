"""How fast the routers are, as ratios measured side by side in one run, on one thread.

    python benchmarks/routing_speed.py                 # half a minute; needs a C++20 compiler
    python benchmarks/routing_speed.py --quick         # a quarter of the grid
    python benchmarks/routing_speed.py --plot growth.svg

Every figure is a median over rounds in which the contestants take turns on the same arrays.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import subprocess
import tempfile
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import eplb_opt as eo

HERE = Path(__file__).resolve().parent
MODELS = ("deepseek-v3", "qwen3-30b")
GPUS = (8, 16, 32, 64)
REDUNDANT = (0, 32, 64, 128)
TOKENS_PER_GPU = (2, 8, 32, 128)
LAYERS = 8
console = Console(width=110)


@dataclass(frozen=True)
class Configuration:
    """A placement and a batch of problems on it."""

    name: str
    placement: eo.Placement
    tokens: NDArray[np.int64]

    @property
    def problems(self) -> int:
        """Problems in the batch."""
        return self.tokens.size // self.placement.num_experts


class Baselines:
    """`baselines.cpp`, compiled with the flags of the package's core."""

    def __init__(self, folder: Path) -> None:
        library = folder / "baselines.so"
        flags = ["-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-shared"]
        if platform.machine() == "x86_64":
            flags.append("-march=x86-64-v3")
        include = f"-I{HERE.parent / 'solvers' / 'cpp'}"
        compiler = os.environ.get("CXX", "c++")
        source = str(HERE / "baselines.cpp")
        subprocess.run([compiler, *flags, include, source, "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.make_placement.restype = ctypes.c_void_p

    def runner(self, name: str, config: Configuration) -> Callable[[], NDArray[np.int64]]:
        """Return a call that routes the configuration's batch and returns the makespans."""
        placement = config.placement
        slots = np.ascontiguousarray(placement.slots)
        shape = [ctypes.c_int64(n) for n in (*slots.shape, placement.num_experts)]
        handle = ctypes.c_void_p(self._library.make_placement(_pointer(slots), *shape))
        routed = np.empty((config.problems, slots[0].size), np.int64)
        makespan = np.empty(config.problems, np.int64)
        run = getattr(self._library, name)
        problems = ctypes.c_int64(config.problems)

        def call() -> NDArray[np.int64]:
            run(handle, _pointer(config.tokens), problems, _pointer(routed), _pointer(makespan))
            return makespan

        weakref.finalize(call, self._library.free_placement, handle)
        return call


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def configurations(quick: bool) -> Iterator[Configuration]:
    """Yield the grid: model x EP size x redundant slots x tokens per GPU, where slots divide."""
    for model in MODELS:
        workload = eo.Workload.preset(model)
        some = np.linspace(0, len(workload.popularity) - 1, LAYERS).astype(int)
        workload = replace(workload, popularity=workload.popularity[some])
        for gpus in GPUS:
            for per_gpu in TOKENS_PER_GPU[::2] if quick else TOKENS_PER_GPU:
                steps = max(2, min(8, 2048 // (per_gpu * gpus)))
                topk_ids = workload.draw(per_gpu * gpus, steps)
                tokens = eo.count_tokens(topk_ids, workload.popularity.shape[1])
                for redundant in REDUNDANT[1::2] if quick else REDUNDANT:
                    slots = workload.popularity.shape[1] + redundant
                    if slots % gpus == 0:
                        plan = eo.solve_placement(
                            workload.popularity, num_gpus=gpus, slots_per_gpu=slots // gpus
                        )
                        name = f"{model} EP{gpus} +{redundant} {per_gpu}/GPU"
                        yield Configuration(name, plan.placement, tokens)


def compiled(
    config: Configuration, method: str, objective: str = "activations"
) -> Callable[[], Any]:
    """Return a call that routes the batch with a method of the package into a reused answer."""
    router = eo.Router(config.placement, method=method, objective=objective)
    out = router.allocate(config.tokens.shape)
    return lambda: router.route(config.tokens, out=out)


def side_by_side(calls: Sequence[Callable[[], Any]], rounds: int, repeats: int) -> list[float]:
    """Return each call's median seconds over rounds in which all take turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, taken in zip(calls, seconds, strict=True):
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            taken.append((time.perf_counter() - began) / repeats)
    return [statistics.median(taken) for taken in seconds]


def greedy_and_optimal(baselines: Baselines, configs: Sequence[Configuration]) -> None:
    """Time the bare loop, metro, optimal, Dinic and flow over the grid."""
    rows = []
    for config in configs:
        bare = baselines.runner("run_bare_greedy", config)
        dinic = baselines.runner("run_dinic", config)
        metro, optimal = compiled(config, "metro"), compiled(config, "optimal")
        flow = compiled(config, "optimal", "tokens")
        if not (bare() == metro().makespan.ravel()).all():
            raise AssertionError(f"{config.name}: metro and the bare loop differ")
        if not (dinic() == optimal().makespan.ravel()).all():
            raise AssertionError(f"{config.name}: optimal and Dinic differ")
        fast = side_by_side([bare, metro, optimal, flow], rounds=15, repeats=3)
        slow = side_by_side([dinic, optimal], rounds=3, repeats=1)
        gap = float((metro().makespan / optimal().makespan).mean() - 1)
        rows.append((config, [t / config.problems * 1e6 for t in (*fast, *slow)], gap))

    table = Table(title="µs per problem, medians per configuration over the grid")
    headings = [
        "EP",
        "redundant",
        "bare loop",
        "metro",
        "optimal",
        "flow",
        "Dinic",
        "metro's gap",
    ]
    for heading in [*headings, "metro/ bare", "optimal/ metro", "Dinic/ optimal"]:
        table.add_column(heading, justify="right")
    for gpus in GPUS:
        for redundant in REDUNDANT:
            some = [r for r in rows if f"EP{gpus} +{redundant} " in r[0].name]
            if some:
                us = [statistics.median(r[1][i] for r in some) for i in range(6)]
                gap = statistics.mean(r[2] for r in some)
                ratios = [us[1] / us[0], us[2] / us[1], us[4] / us[5]]
                table.add_row(
                    str(gpus),
                    str(redundant),
                    *(f"{t:.2f}" for t in us[:4]),
                    f"{us[4]:.0f}",
                    f"{gap:.1%}",
                    *(f"{r:.2f}" for r in ratios[:2]),
                    f"{ratios[2]:.0f}",
                )
    console.print(table)
    report("metro / bare loop", [(c.name, us[1] / us[0]) for c, us, _ in rows], "at most 1.5")
    report("optimal / metro", [(c.name, us[2] / us[1]) for c, us, _ in rows], "at most 2, worst 3")
    report("Dinic / optimal", [(c.name, us[4] / us[5]) for c, us, _ in rows], "at least 20")


def report(what: str, ratios: Sequence[tuple[str, float]], target: str) -> None:
    """Print the median, the extremes and where they are."""
    ordered = sorted(ratios, key=lambda r: r[1])
    middle = statistics.median(r for _, r in ratios)
    console.print(
        f"[bold]{what}[/]: median {middle:.2f} ({target}); least {ordered[0][1]:.2f} "
        f"({ordered[0][0]}), most {ordered[-1][1]:.2f} ({ordered[-1][0]}); "
        f"{len(ratios)} configurations",
        highlight=False,
    )


def engines(configs: Sequence[Configuration]) -> None:
    """Time OR-Tools' max-flow and the exact engines, and check that all agree with optimal."""
    whole, alone, highs_ratios = [], [], []
    agreed = proven = asked = 0
    for config in configs:
        routing = eo.solve_routing(config.placement, config.tokens)
        optimal = side_by_side([compiled(config, "optimal")], rounds=9, repeats=3)[0]
        per_problem = optimal / config.problems
        search, solve = or_tools_flow(config, routing)
        whole.append((config.name, search / per_problem))
        alone.append((config.name, solve / per_problem))

        one = config.tokens[:1]
        for method in ("highs", "cp-sat"):
            began = time.perf_counter()
            judged = eo.solve_routing(config.placement, one, method=method, stop=eo.TimeLimit(60.0))
            seconds = (time.perf_counter() - began) / judged.makespan.size
            done = judged.status == eo.Status.OPTIMAL
            asked += done.size
            proven += int(done.sum())
            agreed += int((judged.makespan == routing.makespan[:1])[done].sum())
            if method == "highs":
                highs_ratios.append((config.name, seconds / per_problem))
    if agreed != proven:
        raise AssertionError(f"{proven - agreed} proven makespans differ from optimal's")
    report("OR-Tools max-flow in a binary search / optimal", whole, "at least 30")
    report("one OR-Tools max-flow, arcs in place, optimum known / optimal", alone, "no target")
    report("HiGHS on METRO's ILP / optimal", highs_ratios, "no target")
    console.print(
        f"[bold]agreement[/]: {agreed} of the {proven} problems that HiGHS and CP-SAT proved have "
        f"optimal's makespan; {asked} asked"
    )


def or_tools_flow(config: Configuration, routing: eo.Routing) -> tuple[float, float]:
    """Return OR-Tools' median seconds: the whole method, and one solve at the optimum alone.

    The method is METRO's: a binary search on the makespan, a max-flow each. The single solve finds
    its arcs in place and is told the optimum.
    """
    from ortools.graph.python import max_flow  # type: ignore[import-untyped]

    placement = config.placement
    whole, alone = [], []
    for layer in range(placement.num_layers):
        live = np.flatnonzero(config.tokens[0, layer])
        slots = placement.slots[layer]
        gpu, _ = np.nonzero(slots >= 0)
        pairs = np.unique(np.stack([slots[slots >= 0], gpu]), axis=1)
        pairs = pairs[:, np.isin(pairs[0], live)]
        gpus = np.arange(placement.num_gpus)
        first_gpu, sink = 1 + placement.num_experts, 1 + placement.num_experts + placement.num_gpus
        tails = np.concatenate([np.zeros_like(live), 1 + pairs[0], first_gpu + gpus])
        heads = np.concatenate([1 + live, first_gpu + pairs[1], np.full_like(gpus, sink)])
        capacity = np.ones(tails.size, np.int64)

        began = time.perf_counter()
        solver = max_flow.SimpleMaxFlow()
        solver.add_arcs_with_capacity(tails, heads, capacity)
        to_sink = np.arange(tails.size - gpus.size, tails.size)
        low, high = -(-live.size // gpus.size), live.size
        while low < high:
            middle = (low + high) // 2
            solver.set_arcs_capacity(to_sink, np.full_like(gpus, middle))
            solver.solve(0, sink)
            if solver.optimal_flow() == live.size:
                high = middle
            else:
                low = middle + 1
        whole.append(time.perf_counter() - began)
        if low != routing.makespan[0, layer]:
            raise AssertionError(f"{config.name}: OR-Tools finds {low} in layer {layer}")

        solver.set_arcs_capacity(to_sink, np.full_like(gpus, low))
        began = time.perf_counter()
        for _ in range(5):
            solver.solve(0, sink)
        alone.append((time.perf_counter() - began) / 5)
    return statistics.median(whole), statistics.median(alone)


def overhead(config: Configuration) -> None:
    """Time one problem a call against the core's time for it, and look for allocations."""
    placement = eo.Placement(config.placement.slots[0])
    one = np.ascontiguousarray(config.tokens[0, 0])
    many = np.tile(one, (512, 1))
    router = eo.Router(placement)
    out, outs = router.allocate(one.shape), router.allocate(many.shape)
    alone, together = side_by_side(
        [
            lambda: [router.route(one, out=out) for _ in range(512)],
            lambda: router.route(many, out=outs),
        ],
        rounds=31,
        repeats=4,
    )
    console.print(
        f"[bold]Router.route overhead[/]: {(alone - together) / 512 * 1e6:.2f} µs per call "
        f"(at most 1.5): {alone / 512 * 1e6:.2f} µs alone, {together / 512 * 1e6:.2f} in a batch",
        highlight=False,
    )
    tracemalloc.start()
    router.route(one, out=out)
    before = tracemalloc.take_snapshot()
    for _ in range(1000):
        router.route(one, out=out)
    grown = sum(s.size_diff for s in tracemalloc.take_snapshot().compare_to(before, "filename"))
    tracemalloc.stop()
    console.print(
        f"memory after 1,000 further calls: {grown:+d} bytes (the snapshot's own included)"
    )


def threads(config: Configuration) -> None:
    """Time a large batch on one thread and on all cores."""
    tokens = np.tile(config.tokens, (256, 1, 1))
    cores = os.cpu_count() or 1
    calls = []
    for count in (1, cores):
        router = eo.Router(config.placement, threads=count)
        out = router.allocate(tokens.shape)
        calls.append(lambda router=router, out=out: router.route(tokens, out=out))
    one, all_cores = side_by_side(calls, rounds=9, repeats=1)
    console.print(
        f"[bold]threads[/]: {tokens.size // tokens.shape[-1]} problems, {cores} threads are "
        f"{one / all_cores:.2f} times as fast as one",
        highlight=False,
    )


def growth() -> dict[str, list[tuple[int, float, float]]]:
    """Time metro and optimal as the problem grows: (size, µs metro, µs optimal) per axis."""
    curves: dict[str, list[tuple[int, float, float]]] = {"experts": [], "GPUs": []}
    sizes = [("experts", e, 32) for e in (64, 128, 256, 512, 1024, 2048)]
    sizes += [("GPUs", 2048, g) for g in (8, 16, 32, 64, 128, 256, 512, 1024)]
    rng = np.random.default_rng(0)
    for axis, experts, gpus in sizes:
        load = rng.lognormal(0, 0.8, (4, experts))
        workload = eo.Workload.from_load(load, top_k=8)
        tokens = eo.count_tokens(workload.draw(experts // 8, 8), experts)
        slots = -(-experts * 5 // (4 * gpus))
        plan = eo.solve_placement(load, num_gpus=gpus, slots_per_gpu=slots)
        config = Configuration("", plan.placement, tokens)
        times = side_by_side(
            [compiled(config, "metro"), compiled(config, "optimal")], rounds=9, repeats=2
        )
        metro, optimal = (t / config.problems * 1e6 for t in times)
        curves[axis].append((experts if axis == "experts" else gpus, metro, optimal))
    return curves


def plot_growth(curves: dict[str, list[tuple[int, float, float]]], path: Path) -> None:
    """Draw the growth curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.8), layout="constrained")
    titles = {"experts": "32 GPUs", "GPUs": "2,048 experts"}
    for axes, (axis, points) in zip(figure.subplots(1, 2), curves.items(), strict=True):
        size, metro, optimal = zip(*points, strict=True)
        axes.plot(size, metro, "s-", color="#0072B2", label="metro", markersize=4)
        axes.plot(size, optimal, "o-", color="#D55E00", label="optimal, proven", markersize=4)
        axes.set(
            xscale="log", xlabel=axis, ylabel="µs per problem", title=titles[axis], ylim=(0, None)
        )
        axes.set_xticks(size, [f"{n:,}" for n in size], rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path)


def main(
    quick: Annotated[bool, typer.Option(help="A quarter of the grid.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the growth curves here.")] = None,
) -> None:
    """Run all studies and print their ratios beside the targets."""
    console.print(f"machine: {machine()}", highlight=False)
    configs = list(configurations(quick))
    with tempfile.TemporaryDirectory() as folder:
        greedy_and_optimal(Baselines(Path(folder)), configs)
    hard = [c for c in configs if " +64 " in c.name or " +32 " in c.name]
    engines(hard[:: max(1, len(hard) // 7)][:7])
    overhead(next(c for c in configs if c.name.startswith("deepseek-v3 EP16 +32 2/")))
    threads(configs[-1])
    curves = growth()
    for axis, points in curves.items():
        text = ", ".join(f"{n:,}: {metro:.1f} / {optimal:.1f}" for n, metro, optimal in points)
        console.print(f"[bold]growth in {axis}[/], µs metro / optimal: {text}", highlight=False)
    if plot is not None:
        plot_growth(curves, plot)


def machine() -> str:
    """Name the processor, as far as the system tells."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"


if __name__ == "__main__":
    typer.run(main)
