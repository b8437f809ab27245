"""The CUDA kernels: right first, then how fast, as ratios measured side by side in one run.

    python benchmarks/gpu_kernels.py            # under five minutes, compilation included
    python benchmarks/gpu_kernels.py --quick    # one model, two EP sizes

Needs torch, and for times the extra `gpu` and an NVIDIA GPU. Without one the same kernels run as
host C++ (which needs a compiler): their answers are checked all the same, and nothing is timed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import eplb_opt as eo
from eplb_opt.gpu import Batch, Router
from eplb_opt.gpu.launches import Launch
from eplb_opt.gpu.operator import launch_of, on_stream
from eplb_opt.gpu.tables import Shape

HOST_BUILD = Path(__file__).resolve().parents[1] / "tests" / "cuda_host"

MODELS = ("qwen3-235b", "deepseek-v3", "kimi-k2")  # 128, 256 and 384 experts
GPUS = (8, 16, 32, 64)
REDUNDANT = (32, 64, 128)
LAYERS = (1, 58)
HOST_LAYERS = (1, 3)
ROWS = 36  # tokens of a decode batch: they visit 154 of DeepSeek-V3's experts, as METRO's did 155

REPEATS = 20  # launches in a captured graph
ROUNDS = 7
FLUSH_BYTES = 256 << 20  # more than any L2 cache
TARGET = "deepseek-v3 EP16 +64"

# Of the estimate where nothing can be timed.
CYCLES_PER_EXCHANGE = 25
GIGAHERTZ = 1.7

console = Console(width=130)

Run = Callable[[Launch], None]


@dataclass(frozen=True)
class Configuration:
    """A placement and one batch of every layer."""

    name: str
    placement: eo.Placement
    topk_ids: torch.Tensor

    @property
    def layers(self) -> int:
        """Problems of a launch."""
        return self.placement.num_layers

    def tokens(self) -> torch.Tensor:
        """Return int64 [layers, experts], beside the ids."""
        counts = eo.count_tokens(self.topk_ids.cpu().numpy(), self.placement.num_experts)
        return torch.from_numpy(counts).to(self.topk_ids.device)


def configurations(
    quick: bool, layers: tuple[int, ...], device: torch.device
) -> Iterator[Configuration]:
    """Yield the grid: model x EP size x redundant slots x layers, where slots divide."""
    for model in MODELS[1:2] if quick else MODELS:
        workload = eo.Workload.preset(model)
        experts = workload.popularity.shape[1]
        ids = torch.from_numpy(workload.draw(ROWS)[0]).long()
        for gpus in GPUS[1:3] if quick else GPUS:
            for redundant in REDUNDANT:
                if (experts + redundant) % gpus:
                    continue
                plan = eo.solve_placement(
                    workload.popularity,
                    num_gpus=gpus,
                    slots_per_gpu=(experts + redundant) // gpus,
                )
                for some in layers:
                    placement = eo.Placement(plan.placement.slots[:some], experts)
                    yield Configuration(
                        f"{model} EP{gpus} +{redundant}",
                        placement,
                        ids[: placement.num_layers].to(device),
                    )


def check(config: Configuration, run: Run, exchanges: Callable[[], int]) -> dict[str, float]:
    """Require every kernel's answer to be the CPU's; return the exchanges of each per problem."""
    tokens, device = config.tokens(), config.topk_ids.device
    counts, spent = tokens.cpu().numpy(), {}
    for name, method, locked in (
        ("metro_locked", "metro", True),
        ("metro_batched", "metro", False),
        ("optimal_batched", "optimal", False),
    ):
        batch = Batch(config.placement, config.layers, method=method, locked=locked, device=device)
        run(batch.launch(tokens))
        spent[name] = exchanges() / config.layers
        routing = eo.solve_routing(config.placement, counts, method=method, bound=locked)
        makespan = batch.makespan.cpu().numpy()
        if locked:
            served = (batch.home.cpu().numpy() >= 0) == (counts > 0)
            require(bool(served.all() and (makespan >= routing.bound).all()), config, name)
            continue
        same = bool((batch.activated.cpu().numpy() == routing.activated).all())
        if method == "optimal":
            same &= bool((batch.certificate.cpu().numpy() == routing.certificate).all())
        require(same and bool((makespan == routing.makespan).all()), config, name)
        require(bool((homes(batch, config) == routing.tokens).all()), config, name)
        physical = torch.empty(config.topk_ids.shape, dtype=torch.int32, device=device)
        run(fused(config, method, physical))
        spent[f"fused {method}"] = exchanges() / config.layers
        assigned = routing.assign(config.topk_ids.cpu().numpy())
        require(bool((physical.cpu().numpy() == assigned).all()), config, f"fused {method}")
    return spent


def homes(batch: Batch, config: Configuration) -> NDArray[np.int64]:
    """Return the tokens per slot of a batch's answer."""
    placement, home = config.placement, batch.home.cpu().numpy()
    routed = np.zeros((config.layers, placement.expert_of.shape[1]), np.int64)
    layer, expert = np.nonzero(home >= 0)
    routed[layer, home[layer, expert]] = config.tokens().cpu().numpy()[layer, expert]
    return routed.reshape(config.layers, placement.num_gpus, -1)


def fused(config: Configuration, method: str, physical: torch.Tensor) -> Launch:
    """Return the launch from top-k ids to physical ids."""
    router = Router(config.placement, method=method, device=config.topk_ids.device)
    _KEPT.append(router)
    shape = Shape.of(config.placement)
    return launch_of(config.topk_ids, router.tables, shape, method, None, physical)


_KEPT: list[Any] = []
"""What the pointers of launches point to, until a configuration is done."""


def require(holds: bool, config: Configuration, name: str) -> None:
    """Stop where a kernel's answer is wrong."""
    if not holds:
        raise AssertionError(f"{config.name}, {config.layers} layers: {name} is wrong")


class TorchGreedy:
    """METRO's greedy rule in torch, for all layers at once: an expert after the other."""

    def __init__(self, config: Configuration) -> None:
        placement, device = config.placement, config.topk_ids.device
        held = np.zeros((placement.num_experts, config.layers, placement.num_gpus), np.bool_)
        layer, gpu, slot = np.nonzero(placement.slots >= 0)
        held[placement.slots[layer, gpu, slot], layer, gpu] = True
        self._held = torch.from_numpy(held).to(device)
        self._count = torch.zeros(config.layers, placement.num_gpus, device=device)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the activated replicas [layers, gpus]."""
        count = self._count.zero_()
        live = (tokens > 0).T[:, :, None]
        for holds, wanted in zip(self._held, live, strict=True):
            gpu = torch.where(holds, count, torch.inf).argmin(dim=1, keepdim=True)
            count.scatter_add_(1, gpu, wanted.to(count.dtype))
        return count


def contestants(config: Configuration) -> dict[str, Callable[[], Any]]:
    """Return the calls to time. All but the copy can be captured in a graph."""
    tokens, device = config.tokens(), config.topk_ids.device
    calls: dict[str, Callable[[], Any]] = {}
    for name, method, locked in (
        ("metro_batched", "metro", False),
        ("metro_locked", "metro", True),
        ("optimal_batched", "optimal", False),
    ):
        batch = Batch(config.placement, config.layers, method=method, locked=locked, device=device)
        calls[name] = lambda batch=batch: batch.solve(tokens)  # type: ignore[misc]
    for method in ("metro", "optimal"):
        router = Router(config.placement, method=method, device=device)
        calls[f"fused {method}"] = lambda router=router: router(config.topk_ids)  # type: ignore[misc]
    greedy = TorchGreedy(config)
    calls["torch greedy"] = lambda: greedy(tokens)
    return calls


def copies(config: Configuration) -> float:
    """Return the microseconds of copying the ids to the CPU and answers back, waited for."""
    pinned = torch.empty(config.topk_ids.shape, dtype=config.topk_ids.dtype, pin_memory=True)

    def there_and_back() -> None:
        pinned.copy_(config.topk_ids, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        config.topk_ids.copy_(pinned, non_blocking=True)

    return eager(there_and_back)


def eager(call: Callable[[], Any]) -> float:
    """Return the microseconds of a call, one after the other."""
    for _ in range(3):
        call()
    return statistics.median(
        _timed(lambda: [call() for _ in range(REPEATS)]) for _ in range(ROUNDS)
    )


def replayed(call: Callable[[], Any], flush: torch.Tensor | None) -> float:
    """Return the microseconds of a call in a captured graph, with the L2 cache warm or flushed."""
    both = [call] if flush is None else [flush.zero_, call]
    whole = _graph(both)
    rest = None if flush is None else _graph([flush.zero_])
    return statistics.median(
        _timed(whole.replay) - (0 if rest is None else _timed(rest.replay)) for _ in range(ROUNDS)
    )


def _graph(calls: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            for call in calls:
                call()
    graph.replay()
    return graph


def _timed(work: Callable[[], Any]) -> float:
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / REPEATS


def time_all(configs: list[Configuration], device: torch.device) -> None:
    """Time the grid and print a table for the README and the targets."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    rows: dict[tuple[str, int], dict[str, float]] = {}
    table = Table(title="µs per launch in a graph, L2 warm / cold; eager")
    for config in configs:
        times, shown = {}, [config.name, str(config.layers)]
        for name, call in contestants(config).items():
            warm, cold, outside = replayed(call, None), replayed(call, flush), eager(call)
            times[name] = warm
            shown.append(f"{warm:.1f} / {cold:.1f}; {outside:.1f}")
        times["copies"] = copies(config)
        if not rows:
            for header in ("", "layers", *times):
                table.add_column(header, justify="left" if header == "" else "right")
        table.add_row(*shown, f"{times['copies']:.1f}")
        rows[config.name, config.layers] = times
    console.print(table)
    markdown(rows)
    targets(rows)


def markdown(rows: dict[tuple[str, int], dict[str, float]]) -> None:
    """Print the replayed times as ratios to metro_batched, ready for the README."""
    names = list(next(iter(rows.values())))
    print("| | layers | metro_batched, µs | " + " | ".join(f"{n}/metro" for n in names[1:]) + " |")
    print("|" + "---|" * (len(names) + 2))
    for (name, layers), times in rows.items():
        base = times["metro_batched"]
        ratios = " | ".join(f"{times[n] / base:.2f}" for n in names[1:])
        print(f"| {name} | {layers} | {base:.2f} | {ratios} |")


def targets(rows: dict[tuple[str, int], dict[str, float]]) -> None:
    """Set the targets beside what was measured."""
    one, many = rows.get((TARGET, 1)), rows.get((TARGET, 58))
    if one is None or many is None:
        return
    greedy, optimal = one["metro_batched"], one["optimal_batched"]
    for what, value, most in (
        ("metro_batched, µs", greedy, 4.0),
        ("optimal_batched, µs", optimal, 8.0),
        ("optimal_batched / metro_batched", optimal / greedy, 2.0),
        ("fused optimal, µs", one["fused optimal"], 8.0),
        ("58 problems / one, metro_batched", many["metro_batched"] / greedy, 1.3),
        ("58 problems / one, optimal_batched", many["optimal_batched"] / optimal, 1.3),
    ):
        console.print(f"{TARGET}: {what}: {value:.2f}, target at most {most}", highlight=False)


def on_host(quick: bool) -> None:
    """Check the kernels' answers as host C++, and estimate what cannot be timed."""
    sys.path.append(str(HOST_BUILD))
    from host_build import Fibers, compiler

    if compiler() is None:
        raise SystemExit("no GPU and no C++ compiler (set CXX): nothing was checked or timed")
    with tempfile.TemporaryDirectory() as folder:
        fibers = Fibers(Path(folder))
        spent: dict[str, dict[str, float]] = {}
        checked = 0
        for config in configurations(quick, HOST_LAYERS, torch.device("cpu")):
            spent[config.name] = check(config, fibers.launch, fibers.exchanges)
            _KEPT.clear()
            checked += config.layers
    console.print(
        f"host build: {checked} problems, every kernel's answer is the CPU's. "
        "No GPU: nothing was timed."
    )
    names = list(next(iter(spent.values())))
    table = Table(
        title="Estimate, not a measurement: warp exchanges per problem, and in brackets their time "
        f"in µs at {CYCLES_PER_EXCHANGE} cycles each and {GIGAHERTZ} GHz, without launch and memory"
    )
    for header in ("", *names[1:]):
        table.add_column(header, justify="left" if header == "" else "right")
    for name, counts in spent.items():
        row = [
            f"{counts[n]:.0f} ({counts[n] * CYCLES_PER_EXCHANGE / GIGAHERTZ / 1000:.1f})"
            for n in names[1:]
        ]
        table.add_row(name, *row)
    console.print(table)


def on_gpu(quick: bool) -> None:
    """Check the kernels' answers on the GPU, then time them."""
    device = torch.device("cuda")
    console.print(f"machine: {torch.cuda.get_device_name()}, torch {torch.__version__}")

    def run(launch: Launch) -> None:
        on_stream(launch, device)
        torch.cuda.synchronize()

    configs = list(configurations(quick, LAYERS, device))
    for config in configs:
        check(config, run, lambda: 0)
        _KEPT.clear()
    console.print(f"{sum(c.layers for c in configs)} problems: every kernel's answer is the CPU's")
    time_all(configs, device)


def main(
    quick: Annotated[bool, typer.Option(help="One model, two EP sizes.")] = False,
) -> None:
    """Check the kernels against the CPU; time them if there is a GPU."""
    (on_gpu if torch.cuda.is_available() else on_host)(quick)


if __name__ == "__main__":
    typer.run(main)
