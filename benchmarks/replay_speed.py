"""How fast replay is: layer-steps per second, what a second thread gives, and its memory.

    python benchmarks/replay_speed.py          # a minute
    python benchmarks/replay_speed.py --quick  # a few seconds

DeepSeek-V3's 58 layers on 16 GPUs with 64 redundant slots, 16 tokens per GPU, from a recording that
is memory-mapped; priced by the fp8 objective. A layer-step is one layer of one step under one
method, routed and priced. Since other work on the machine takes from what two threads reach, two
threads are compared with two processes, side by side, that share nothing. Printed in Markdown.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from routing_speed import machine

import eplb_opt as eo
from eplb_opt.step_array import StepArray, StepPart

TRAFFIC = eo.Workload.preset("deepseek-v3", seed=1)
GPUS, REDUNDANT = 16, 64
TARGET = 10_000
METHODS = ("makespan", "matching", "metro", "uniform")
MIB = 2**20


@cache
def drawn() -> NDArray[np.uint16]:
    """Draw 16 steps, [steps, layers, experts]."""
    ids = TRAFFIC.draw(16 * GPUS, 16)
    return eo.count_tokens(ids, TRAFFIC.popularity.shape[1]).astype(np.uint16)


def record(folder: Path, steps: int) -> None:
    """Write a recording, of a few drawn steps over and over."""
    few = drawn()

    def load(begin: int, end: int) -> NDArray[np.uint16]:
        return few[np.arange(begin, end) % len(few)]

    shape = (steps, *few.shape[1:])
    tokens = StepArray([StepPart(shape, few.dtype, load)])
    eo.write_trace(eo.LoadTrace(tokens, top_k=TRAFFIC.top_k), folder)


def replayed(folder: Path, methods: Sequence[str], threads: int) -> tuple[float, float]:
    """Return the seconds of a replay, of the clock and of the processor."""
    load = TRAFFIC.popularity
    slots = (load.shape[1] + REDUNDANT) // GPUS
    placement = eo.solve_placement(load, num_gpus=GPUS, slots_per_gpu=slots).placement
    priced = eo.StepTime("deepseek-v3-fp8")
    clock, processor = time.perf_counter(), time.process_time()
    eo.replay(str(folder), placement, methods, time=priced, threads=threads)
    return time.perf_counter() - clock, time.process_time() - processor


def peak_memory(folder: Path) -> float:
    """Replay, and return the most MiB that the process had in memory, the recording's included."""
    replayed(folder, ["makespan"], 1)
    # Not getrusage, whose peak a new process takes over from the one that started it.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / MIB


def speed(folder: Path, steps: int, rounds: int) -> None:
    """Print layer-steps per second, by method."""
    print(f"\n{steps} steps, medians of {rounds} rounds. Target: {TARGET:,} per second per core.\n")
    print(
        "| methods | per second of one core | µs | clock, one thread | two threads "
        "| two processes | threads over processes | processor, two over one |"
    )
    print("|---" * 8 + "|")
    forked = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, forked) as pool:
        warm = [pool.submit(replayed, folder, METHODS, 1) for _ in range(2)]
        for one in warm:
            one.result()
        for methods in (*((name,) for name in METHODS), METHODS):
            problems = steps * len(TRAFFIC.popularity) * len(methods)
            alone, threaded, both = [], [], []
            for _ in range(rounds):
                alone.append(pool.submit(replayed, folder, methods, 1).result())
                threaded.append(pool.submit(replayed, folder, methods, 2).result())
                pair = [pool.submit(replayed, folder, methods, 1) for _ in range(2)]
                both.append(max(half.result()[0] for half in pair))
            clock, processor = (statistics.median(times) for times in zip(*alone, strict=True))
            threads, busy = (statistics.median(times) for times in zip(*threaded, strict=True))
            processes = statistics.median(both)
            print(
                f"| {', '.join(methods)} | {problems / processor:,.0f} "
                f"| {1e6 * processor / problems:.1f} | {problems / clock:,.0f} "
                f"| {problems / threads:,.0f} | {2 * problems / processes:,.0f} "
                f"| {processes / 2 / threads:.2f} | {busy / processor:.2f} |",
                flush=True,
            )


def memory(folder: Path, lengths: Sequence[int]) -> None:
    """Print the peak memory by the number of steps, each in a process of its own."""
    if not sys.platform.startswith("linux"):
        print("\nmemory: peaks are read where Linux tells them")
        return
    print("\n| steps | recording, MiB | peak memory of the process, MiB |\n|---|---|---|")
    for steps in lengths:
        there = folder / str(steps)
        record(there, steps)
        size = sum(file.stat().st_size for file in there.iterdir()) / MIB
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            peak = pool.submit(peak_memory, there).result()
        print(f"| {steps:,} | {size:,.0f} | {peak:.0f} |", flush=True)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Few steps, one round.")] = False,
) -> None:
    """Print both tables."""
    load = ", ".join(f"{of:.1f}" for of in os.getloadavg())
    print(f"machine: {machine()}; load {load}")
    with tempfile.TemporaryDirectory() as folder:
        steps = 160 if quick else 1280
        recorded = Path(folder) / "speed"
        record(recorded, steps)
        speed(recorded, steps, 1 if quick else 5)
        memory(Path(folder), (100, 500) if quick else (1000, 20_000))


if __name__ == "__main__":
    typer.run(main)
