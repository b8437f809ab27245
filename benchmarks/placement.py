"""How good our placements are and what they take, beside DeepSeek's EPLB as SGLang ships it.

    python benchmarks/placement.py          # synthetic loads, or the recordings beside the checkout
    python benchmarks/placement.py --quick  # ten layers, fewer comparisons

SGLang's policy, DeepSeek's with lists in its inner loop, is read from an installed wheel, which
needs no dependencies but torch: ``pip install --no-deps sglang torch``. Without it, what needs it
is left out, and said. ``--original eplb.py`` compares with DeepSeek's own file too
(github.com/deepseek-ai/EPLB).
Recordings are SGLang's ``logical_count`` files in ``../shared/data/sglang_deepseek_v3``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from routing_speed import machine

import eplb_opt as eo

RECORDED = Path(__file__).resolve().parents[2] / "shared" / "data" / "sglang_deepseek_v3"
Shape = tuple[int, int, int, int]
SHAPES: tuple[Shape, ...] = (  # GPUs, slots per GPU, nodes, groups
    (32, 8, 1, 1),
    (32, 9, 1, 1),
    (64, 5, 1, 1),
    (72, 4, 1, 1),
    (32, 9, 4, 8),
)
TRANSFERS = (("prefill_in512", "prefill_in4096"), ("prefill_in4096", "decode_in2000out100"))
MOVED = ("decode_in1000out1000", "decode_in2000out100")

Loads = Mapping[str, NDArray[np.float64]]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Ten layers, 50 comparisons.")] = False,
    original: Annotated[Path | None, typer.Option(help="DeepSeek's eplb.py.")] = None,
) -> None:
    """Print all tables, in Markdown."""
    loads = dict(read_loads())
    if quick:
        loads = {name: load[:10] for name, load in loads.items()}
    print(f"machine: {machine()}\n")
    quality(loads)
    elsewhere(loads)
    moves(loads)
    sglang = sglang_file()
    policies = {
        name: load_policy(file)
        for name, file in (("SGLang's", sglang), ("DeepSeek's", original))
        if file is not None
    }
    speed(loads, policies)
    for name, policy in policies.items():
        compare(name, policy, 50 if quick else 1000)


def read_loads() -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield names and loads ``[layers, experts]``, each layer's sum 1e6."""
    files = sorted(RECORDED.glob("*.json"))
    for file in files:
        trace = eo.read_trace(file)
        assert isinstance(trace, eo.LoadTrace)
        load = np.asarray(trace.tokens).sum(axis=0).astype(np.float64)
        load = load[load.any(axis=-1)]
        yield file.stem, load / load.sum(axis=-1, keepdims=True) * 1e6
    if not files:
        print("no recordings: synthetic DeepSeek-V3 loads of two stages")
        for stage in ("decode", "prefill"):
            traffic = eo.Workload.preset("deepseek-v3", stage=stage)
            yield f"synthetic {stage}", traffic.popularity * 1e6


def place(load: NDArray[np.float64], shape: Shape, **more: Any) -> eo.PlacementPlan:
    """Place by `solve_placement` for a shape."""
    gpus, slots, nodes, groups = shape
    return eo.solve_placement(
        load, num_gpus=gpus, slots_per_gpu=slots, num_nodes=nodes, num_groups=groups, **more
    )


def quality(loads: Loads) -> None:
    """Compare peaks on the loads that placements are made for."""
    print(
        "Peak over mean GPU load, mean over layers; excess over the bound, mean and worst layer:\n"
    )
    print("| load | slots / GPUs | bound | EPLB | search | excess EPLB | excess search | ms |")
    print("|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        gpus, slots, nodes, groups = shape
        for name, load in loads.items():
            theirs = place(load, shape)
            ours, seconds = timed(partial(place, load, shape, method="search"))
            assert ours.duplicates == 0
            bound = np.maximum(ours.bound, theirs.bound)
            mean = load.sum(axis=-1) / gpus
            excess = [
                f"{100 * e.mean():.3f} %, {100 * e.max():.2f} %"
                for e in (theirs.makespan / bound - 1, ours.makespan / bound - 1)
            ]
            peaks = [f"{(of / mean).mean():.4f}" for of in (bound, theirs.makespan, ours.makespan)]
            where = f"{gpus * slots} / {gpus}" + (
                f", {nodes} nodes, {groups} groups" if nodes > 1 else ""
            )
            print(f"| {name} | {where} | {' | '.join([*peaks, *excess])} | {1e3 * seconds:.1f} |")


def elsewhere(loads: Loads) -> None:
    """Judge placements on another recording than they are made for."""
    print("\nMade for one recording, judged on another: peak over mean, mean and worst layer;")
    print("`robust`: search for the worst of all recordings but the one that judges.\n")
    print("| made for | judged on | slots / GPUs | EPLB | search | robust |")
    print("|---|---|---|---|---|---|")
    for made, judged in TRANSFERS:
        if made not in loads:
            continue
        others = np.stack([load for name, load in loads.items() if name != judged])
        for shape in SHAPES[:2]:
            plans = (
                place(loads[made], shape),
                place(loads[made], shape, method="search"),
                place(others, shape, method="search", over_windows="worst"),
            )
            pars = [eo.PlacementMetrics.of(plan.placement, loads[judged]).par for plan in plans]
            where = f"{shape[0] * shape[1]} / {shape[0]}"
            cells = [f"{par.mean():.3f}, {par.max():.3f}" for par in pars]
            print(f"| {' | '.join([made, judged, where, *cells])} |")


def moves(loads: Loads) -> None:
    """Move one recording's placement to another's loads."""
    before, after = (loads.get(name) for name in MOVED)
    if before is None or after is None:
        before, after = list(loads.values())[:2]
    now = place(before, SHAPES[1]).placement
    theirs = place(after, SHAPES[1], previous=now)
    assert theirs.moves is not None
    reached = f"{theirs.moves.sum()} weights to peak over mean {theirs.metrics.par_mean:.4f}"
    print("\nFrom one recording's EPLB placement to another's loads, 288 slots on 32 GPUs;")
    print(f"EPLB moves {reached}:\n")
    print("| moves allowed | moved | peak over mean | worst layer | ms |")
    print("|---|---|---|---|---|")
    total = int(theirs.moves.sum())
    for share, budget in (
        ("0", 0),
        ("1/20", total // 20),
        ("1/10", total // 10),
        ("1/5", total // 5),
        ("any", None),
    ):
        plan, seconds = timed(
            partial(place, after, SHAPES[1], previous=now, method="search", max_moves=budget)
        )
        assert plan.moves is not None
        pars = f"{plan.metrics.par_mean:.4f} | {plan.metrics.par_max:.4f}"
        print(f"| {share} | {plan.moves.sum()} | {pars} | {1e3 * seconds:.1f} |")


def speed(loads: Loads, policies: Mapping[str, ModuleType]) -> None:
    """Time whole calls side by side."""
    load = next(iter(loads.values()))
    print(f"\nMedian time of a call, {len(load)} layers x {load.shape[1]} experts, one thread:\n")
    print(f"| slots / GPUs | search | deepseek | {' | '.join(policies)} |")
    print("|---" * (3 + len(policies)) + "|")
    for gpus, slots in ((32, 8), (32, 9), (144, 2)):
        shape = (gpus, slots, 1, 1)
        _, search = timed(partial(place, load, shape, method="search"))
        _, ours = timed(partial(place, load, shape))
        cells = [f"{1e3 * search:.1f} ms", f"{1e3 * ours:.2f} ms"]
        for policy in policies.values():
            _, seconds = timed(partial(rebalance, policy, load, shape), repeats=3)
            cells.append(f"{1e3 * seconds:.0f} ms, {seconds / ours:.0f} x deepseek")
        print(f"| {gpus * slots} / {gpus} | {' | '.join(cells)} |")


def compare(name: str, policy: ModuleType, draws: int) -> None:
    """Compare every GPU's load with the policy's, on loads that float32 keeps apart."""
    random = np.random.default_rng(0)
    load = np.array([random.permutation(2**23)[:256] + 1 for _ in range(draws)], np.float64)
    for shape in SHAPES[1], SHAPES[4]:
        gpus, slots, nodes, _ = shape
        ours = place(load, shape).metrics.gpu_load
        placed = rebalance(policy, load, shape)[0].numpy().reshape(draws, gpus, slots)
        theirs = eo.PlacementMetrics.of(eo.Placement(placed, 256), load).gpu_load
        differ = np.abs(ours - theirs) > 1e-6 * theirs
        form = "hierarchical" if nodes > 1 else "global"
        same = draws - int(differ.any(axis=-1).sum())
        print(f"\n{form}: every GPU's load as {name}, to 1e-6, on {same} of {draws} drawn layers")


def sglang_file() -> Path | None:
    """Return the file of SGLang's policy, if it and torch are installed."""
    spec = importlib.util.find_spec("sglang")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        file = Path(folder) / "srt" / "eplb" / "eplb_algorithms" / "deepseek.py"
        if file.is_file() and importlib.util.find_spec("torch") is not None:
            return file
    print("\nsglang or torch is not installed: not compared with its policy")
    return None


def load_policy(file: Path) -> ModuleType:
    """Load a policy by its file alone: SGLang's package would need a GPU's libraries."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rebalance(policy: ModuleType, load: NDArray[np.float64], shape: Shape) -> Any:
    """Place by a policy."""
    torch = importlib.import_module("torch")
    gpus, slots, nodes, groups = shape
    arguments = torch.from_numpy(load), gpus * slots, groups, nodes, gpus
    if "enable_hierarchical" in inspect.signature(policy.rebalance_experts).parameters:
        return policy.rebalance_experts(*arguments, enable_hierarchical=nodes > 1)
    return policy.rebalance_experts(*arguments)


def timed(call: Callable[[], Any], repeats: int = 9) -> tuple[Any, float]:
    """Return what a call returns and the median of its seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


if __name__ == "__main__":
    typer.run(main)
