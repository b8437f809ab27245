"""How far `routing-aware` placements close the gap between EPLB's and the floor of every batch.

    python benchmarks/routing_aware.py                     # recorded counts or synthetic traffic
    python benchmarks/routing_aware.py FILE --judge OTHER  # placed by FILE, judged on OTHER's loads
    python benchmarks/routing_aware.py --routes FILE.npz   # also recorded tokens, by generation
    python benchmarks/routing_aware.py --quick             # 8 layers, fewer batches

Without FILE it takes SGLang's published decode counts where ``../shared/data`` holds them, else the
popularity of `Workload.preset`. Batches are drawn anew from the loads, token by token, and routed
with the proven fewest activations. Printed in Markdown: mean makespans over layers and held-out
batches, and the closure, (EPLB - ours) / (EPLB - floor), where a batch's floor is its live experts
over the GPUs, rounded up. The bound holds for placements with equally many single-copy experts per
GPU, see `least_above_floor`. "At most" is the closure if only single GPUs kept batches above their
floor, see `alone_above_floor`. Recorded tokens are also placed by fewer and by more generations,
see `by_generations`.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

import eplb_opt as eo
from eplb_opt.demand import count_tokens

# (GPUs, redundant slots, tokens): the closure to reach.
TARGETS = {
    (8, 64, 32): 0.97,
    (16, 64, 32): 0.90,
    (16, 128, 32): 0.99,
    (32, 64, 32): 0.60,
    (32, 128, 32): 0.98,
    (8, 64, 128): 0.97,
    (16, 64, 128): 0.97,
    (16, 128, 128): 0.97,
    (32, 64, 128): 0.97,
    (32, 128, 128): 0.97,
}
ROUTES_TARGET = 0.80
DRAWS = 8
TOP_K = 8
RECORDED = Path(__file__).resolve().parents[2] / "shared/data/sglang_deepseek_v3"


def read_load(file: Path) -> NDArray[np.int64]:
    """Return a file's counts on its MoE layers, int64 ``[layers, experts]``."""
    trace = eo.read_trace(file)
    if not isinstance(trace, eo.LoadTrace):
        raise typer.BadParameter(f"{file} holds tokens, not loads; see --routes")
    return trace.select_layers(trace.moe_layers()).load()


def draw(load: NDArray[np.float64], tokens: int, batches: int, seed: int) -> NDArray[np.int64]:
    """Draw batches by popularity: int64 ``[batches, layers, experts]``."""
    workload = eo.Workload.from_load(load, TOP_K, correlation=0, seed=seed)
    return count_tokens(workload.draw(tokens, batches), load.shape[-1])


def makespan(placement: eo.Placement, batches: NDArray[np.int64]) -> float:
    """Return the mean over batches and layers of the fewest activations on the fullest GPU."""
    return float(eo.solve_routing(placement, batches).makespan.mean())


def floor_of(batches: NDArray[np.int64], gpus: int) -> NDArray[np.int64]:
    """Return the floor of every batch, int64 ``[batches, layers]``."""
    live: NDArray[np.int64] = (batches > 0).sum(axis=-1)
    return -(-live // gpus)


def least_above_floor(batches: NDArray[np.int64], gpus: int, redundant: int) -> float:
    """Return how far above the floor the mean makespan of even placements is, at least.

    Even: all GPUs have equally many experts with a single copy. R redundant slots leave E - R of
    them or more; let that be t + 1 per GPU. A GPU whose t + 1 are live together is above level t.
    The sum of these chances over GPUs is least where they are equal (inequality of the means): G
    times a, the geometric mean over the E - R coldest experts. Live experts are negatively
    associated (tokens are independent, each draws distinct ones), so that all GPUs are spared with
    (1 - a)^G at most. The batches whose floor is above t anyway are taken off again. Where E - R is
    not G (t + 1) for a floor t that occurs, 0. With uneven numbers of single copies some GPUs are
    above their level more often and others less, for which this is no proof.
    """
    live = (batches > 0).mean(axis=0)
    experts = live.shape[-1]
    single = experts - redundant
    bounds = []
    for layer, chance in enumerate(live):
        floors = floor_of(batches[:, layer : layer + 1], gpus)
        best = 0.0
        for level in np.unique(floors):
            if single != gpus * (level + 1):
                continue
            coldest = np.sort(chance)[:single]
            if coldest[0] == 0:
                continue
            together = np.exp(np.log(coldest).mean() * (level + 1))
            best = max(best, 1 - (1 - together) ** gpus - float((floors > level).mean()))
        bounds.append(best)
    return float(np.mean(bounds))


def alone_above_floor(placement: eo.Placement, batches: NDArray[np.int64]) -> float:
    """Return how often one GPU alone keeps a batch above its floor.

    Its live experts with a single copy are more than the floor t; or those with any replica on it
    are fewer than n - (G - 1) t, which all others together cannot take of n live ones. Swaps
    change this only by spreading copies more evenly.
    """
    floor, gpus = floor_of(batches, placement.num_gpus), placement.num_gpus
    live = batches > 0
    needed = live.sum(axis=-1) - (gpus - 1) * floor
    layers = np.arange(placement.num_layers)
    alone = np.zeros(floor.shape, np.bool_)
    for slots in placement.slots.transpose(1, 2, 0):
        fixed, held = np.zeros_like(floor), np.zeros_like(floor)
        for expert in slots:
            here = live[:, layers, expert] & (expert >= 0)
            held += here
            fixed += here & (placement.copies[layers, expert] == 1)
        alone |= (fixed > floor) | (held < needed)
    return float(alone.mean())


def closure(eplb: float, ours: float, floor: float) -> float:
    """Return the part of the gap that is closed; NaN where EPLB leaves none."""
    return (eplb - ours) / (eplb - floor) if eplb > floor else float("nan")


def by_loads(
    load: NDArray[np.float64], judge: NDArray[np.float64], batches: int, bounds: bool
) -> None:
    """Print the table of deployments."""
    layers, experts = load.shape
    print(
        "| EP | redundant | tokens | floor | bound | EPLB | ours | closure | at most | target "
        "| ms a layer |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    drawn = {tokens: draw(judge, tokens, batches, seed=1) for tokens in (32, 128)}
    for (gpus, redundant, tokens), target in TARGETS.items():
        slots = (experts + redundant) // gpus
        held_out = drawn[tokens]
        eplb = eo.solve_placement(load, num_gpus=gpus, slots_per_gpu=slots).placement
        start = time.process_time()
        ours = eo.solve_placement(
            load,
            num_gpus=gpus,
            slots_per_gpu=slots,
            method="routing-aware",
            tokens_per_batch=tokens,
            top_k=TOP_K,
        ).placement
        spent = 1e3 * (time.process_time() - start) / layers
        floor = float(floor_of(held_out, gpus).mean())
        bound = floor + (least_above_floor(held_out, gpus, redundant) if bounds else 0)
        old, new = makespan(eplb, held_out), makespan(ours, held_out)
        most = closure(old, floor + alone_above_floor(ours, held_out), floor)
        print(
            f"| {gpus} | {redundant} | {tokens} | {floor:.3f} | {bound:.3f} | {old:.3f} "
            f"| {new:.3f} | {closure(old, new, floor):.3f} | {most:.3f} | {target:.2f} "
            f"| {spent:.0f} |",
            flush=True,
        )


def by_routes(file: Path, layers: int | None) -> None:
    """Print the table of recorded tokens: runs of 32, EP8, 8 redundant, unseen generations."""
    trace = eo.read_trace(file, num_experts=32)
    if not isinstance(trace, eo.TokenTrace):
        raise typer.BadParameter(f"{file} holds loads, not tokens")
    with np.load(file) as content:
        generation = content["generation"]
    ids = trace.batches(trace.num_tokens)[0].transpose(1, 0, 2)  # [tokens, layers, k]
    chosen = pick(ids.shape[1], layers)
    names = np.unique(generation)

    def runs_of(these: NDArray[np.generic]) -> NDArray[np.int64]:
        return count_tokens(in_runs(ids[np.isin(generation, these)][:, chosen], 32), 32)

    seen, held_out = runs_of(names[: len(names) // 2]), runs_of(names[len(names) // 2 :])
    start = time.process_time()
    ours = placed(seen, "routing-aware")
    spent = 1e3 * (time.process_time() - start) / len(chosen)
    floor = float(floor_of(held_out, 8).mean())
    old, new = makespan(placed(seen, "deepseek"), held_out), makespan(ours, held_out)
    print(
        "\n| recorded tokens | batches seen, unseen | floor | EPLB | ours | closure | target "
        "| ms a layer |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print(
        f"| EP8, 8 redundant | {len(seen)}, {len(held_out)} | {floor:.3f} | {old:.3f} | {new:.3f} "
        f"| {closure(old, new, floor):.3f} | {ROUTES_TARGET:.2f} | {spent:.0f} |"
    )
    by_generations(names, runs_of)


def by_generations(
    names: NDArray[np.generic], runs_of: Callable[[NDArray[np.generic]], NDArray[np.int64]]
) -> None:
    """Print what it is worth to see more generations, judged on an eighth that is drawn anew.

    Last, what it is worth to have seen the judged ones: of all batches an eighth is judged, drawn
    anew too, and placed by the others.
    """
    rng = np.random.default_rng(0)
    eighth = len(names) // 8
    counts = [eighth // 2, eighth, 2 * eighth, 4 * eighth, len(names) - eighth]
    sums = np.zeros((len(counts) + 1, 3))  # EPLB, ours, floor
    for _ in range(DRAWS):
        drawn = rng.permutation(names)
        held_out = runs_of(drawn[:eighth])
        trials = [(runs_of(drawn[eighth : eighth + count]), held_out) for count in counts]
        shuffled = rng.permutation(runs_of(names))
        trials.append((shuffled[len(shuffled) // 8 :], shuffled[: len(shuffled) // 8]))
        for (seen, unseen), row in zip(trials, sums, strict=True):
            row += [
                makespan(placed(seen, "deepseek"), unseen),
                makespan(placed(seen, "routing-aware"), unseen),
                float(floor_of(unseen, 8).mean()),
            ]
    print(f"\n| generations seen | {' | '.join(map(str, counts))} | those judged |")
    print("|---" * (len(sums) + 1) + "|")
    eplb, ours, floor = sums.T / DRAWS
    for name, row in [
        ("EPLB above the floor", eplb - floor),
        ("ours above the floor", ours - floor),
        ("closure", (eplb - ours) / (eplb - floor)),
    ]:
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in row)} |")


def placed(seen: NDArray[np.int64], method: str) -> eo.Placement:
    """Return recorded batches' placement on 8 GPUs with 8 redundant slots, EPLB's by their sum."""
    by = seen if method == "routing-aware" else seen.sum(axis=0)
    return eo.solve_placement(by, num_gpus=8, slots_per_gpu=5, method=method).placement


def in_runs(ids: NDArray[np.int32], tokens: int) -> NDArray[np.int32]:
    """Return tokens ``[rows, layers, k]`` as batches ``[batches, layers, tokens, k]``."""
    batches = len(ids) // tokens
    runs = ids[: batches * tokens].reshape(batches, tokens, *ids.shape[1:])
    return runs.transpose(0, 2, 1, 3)


def pick(count: int, wanted: int | None) -> NDArray[np.intp]:
    """Return so many layers, spread evenly."""
    return np.unique(np.linspace(0, count - 1, min(count, wanted or count)).round().astype(np.intp))


def main(
    file: Annotated[Path | None, typer.Argument(help="Loads to place by.")] = None,
    judge: Annotated[Path | None, typer.Option(help="Loads to judge by, if not FILE.")] = None,
    routes: Annotated[Path | None, typer.Option(help="Recorded tokens with generations.")] = None,
    layers: Annotated[int | None, typer.Option(help="So many layers, spread evenly.")] = None,
    batches: Annotated[int, typer.Option(help="Held-out batches drawn per layer.")] = 500,
    quick: Annotated[bool, typer.Option(help="8 layers, 200 batches.")] = False,
) -> None:
    """Print the tables."""
    if quick:
        layers, batches = layers or 8, 200
    recorded = RECORDED / "decode_in2000out100.json"
    if file is None and recorded.exists():
        file = recorded
    load: NDArray[np.float64] = (
        eo.Workload.preset("deepseek-v3").popularity
        if file is None
        else read_load(file).astype(np.float64)
    )
    chosen = pick(len(load), layers)
    judged = load if judge is None else read_load(judge).astype(np.float64)
    source = "synthetic DeepSeek-V3 decode popularity" if file is None else file.name
    on = "" if judge is None else f", judged on {judge.name}"
    print(f"{source}{on}; {len(chosen)} layers, {batches} held-out batches each; ", end="")
    print(
        f"{platform.machine()}, Python {platform.python_version()}, one thread, processor time.\n"
    )
    by_loads(load[chosen], judged[chosen], batches, bounds=judge is None)
    if routes is not None:
        by_routes(routes, layers)


if __name__ == "__main__":
    typer.run(main)
