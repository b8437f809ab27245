"""Fixtures that several test files share: recorded traffic, real placements, drawn problems."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import host_build
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.demand import count_tokens
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.placing import solve_placement
from eplb_opt.testing import Problem
from eplb_opt.trace import LoadTrace, TokenTrace, read_trace

# Times vary with the machine; under CI the examples must not.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

LARGEST_COUNTS = (1, 8, 1000, 2**31, _core.MAX_TOKENS_PER_EXPERT)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of recorded data beside the checkout; skip where there is none."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("../shared/data is not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def recorded_load(shared_data: Path) -> Callable[[str], NDArray[np.int64]]:
    """Read a DeepSeek-V3 recording by name: int64 [58 MoE layers, 256 experts]."""

    def read(name: str) -> NDArray[np.int64]:
        trace = read_trace(shared_data / "sglang_deepseek_v3" / f"{name}.json")
        assert isinstance(trace, LoadTrace)
        return trace.select_layers(trace.moe_layers()).load()

    return read


@pytest.fixture(scope="session")
def recorded_tokens(shared_data: Path) -> dict[str, TokenTrace]:
    """Read the recordings of every token's experts: gpt-oss-20b, and Qwen3-30B's two batches."""
    files = {
        "gpt-oss": ("gpt_oss_20b/routes.npz", 32),
        "qwen3-64": ("qwen3_30b_batches/qwen_b64_032_012.npz", 128),
        "qwen3-1024": ("qwen3_30b_batches/qwen_b1024_022_016.npz", 128),
    }
    traces = {}
    for name, (path, experts) in files.items():
        trace = read_trace(shared_data / path, num_experts=experts)
        assert isinstance(trace, TokenTrace)
        traces[name] = trace
    return traces


@pytest.fixture(scope="session")
def real_problems(
    shared_data: Path,
    recorded_load: Callable[[str], NDArray[np.int64]],
    recorded_tokens: dict[str, TokenTrace],
) -> dict[str, Problem]:
    """Make routing problems of everything recorded: loads, batches of tokens, placements."""
    rng = np.random.default_rng(1)
    problems = {}
    for name in ("decode_in1000out1000", "decode_in2000out100", "prefill_in512", "prefill_in4096"):
        load = recorded_load(name)
        for gpus, slots in ((8, 40), (32, 9), (72, 4)):
            placement = solve_placement(load, num_gpus=gpus, slots_per_gpu=slots).placement
            batches = draw_batches(rng, load, choices=8 * 64, batches=4)
            problems[f"{name} on {gpus}"] = Problem(placement, batches)
            problems[f"{name} whole on {gpus}"] = Problem(placement, load)
    for name, trace in recorded_tokens.items():
        batch = min(trace.num_tokens, 256)
        tokens = count_tokens(trace.batches(batch)[:20], trace.num_experts)
        for gpus in (4, 8):
            slots = trace.num_experts * 3 // 2 // gpus
            plan = solve_placement(trace.load(), num_gpus=gpus, slots_per_gpu=slots)
            problems[f"{name} on {gpus}"] = Problem(plan.placement, tokens)
    with np.load(shared_data / "omni_placements" / "placements.npz") as masks:
        load = recorded_load("decode_in1000out1000")
        for name, mask in masks.items():
            placement = Placement.from_mask(mask.transpose(1, 0, 2), allow_missing=True)
            held = np.where(placement.copies > 0, load, 0)
            problems[name] = Problem(placement, draw_batches(rng, held, choices=8 * 64, batches=4))
    return problems


@pytest.fixture(scope="session")
def draw_problem() -> Callable[..., Problem]:
    """Draw many problems in one, of any size, where hypothesis would be slow.

    The function takes a generator, GPUs, slots per GPU, experts, layers and batches. Every expert
    has a slot, unless a GPU dies; the others hold copies (sometimes two on a GPU) or nothing. The
    share of live experts and the size of counts vary from batch to batch.
    """

    def draw(
        rng: np.random.Generator,
        gpus: int,
        slots_per_gpu: int,
        experts: int,
        layers: int = 1,
        batches: int = 1,
    ) -> Problem:
        spare = gpus * slots_per_gpu - experts
        extra = rng.integers(0, experts, (layers, spare))
        extra[rng.random((layers, spare)) < rng.choice([0, 0.2, 0.7])] = EMPTY
        primary = np.tile(np.arange(experts), (layers, 1))
        slots = rng.permuted(np.concatenate([primary, extra], axis=1), axis=1)
        slots = slots.reshape(layers, gpus, slots_per_gpu)
        if rng.random() < 0.2:
            slots[:, rng.integers(gpus)] = EMPTY
        placement = Placement(slots, experts, allow_missing=True)
        shape = (batches, layers, experts)
        live = rng.random(shape) < rng.choice([0, 0.1, 0.5, 0.9, 1], (batches, 1, 1))
        counts = rng.integers(1, rng.choice(LARGEST_COUNTS, (batches, 1, 1)) + 1, shape)
        return Problem(placement, counts * (live & (placement.copies > 0)))

    return draw


@pytest.fixture(scope="session")
def draw_ids() -> Callable[..., NDArray[np.int64]]:
    """Draw top-k ids of experts that a placement with layers holds, and -1.

    The function takes a generator, the placement, the shape before the layer axis, and the shape
    behind it.
    """

    def draw(
        rng: np.random.Generator,
        placement: Placement,
        lead: tuple[int, ...],
        local: tuple[int, ...],
    ) -> NDArray[np.int64]:
        layers = placement.num_layers
        ids = rng.integers(-1, placement.num_experts, (*lead, layers, *local))
        layer = np.arange(layers).reshape(layers, *[1] * len(local))
        return np.where(placement.copies[layer, np.maximum(ids, 0)] > 0, ids, -1)

    return draw


@pytest.fixture(scope="session")
def rename() -> Callable[[Problem, int, str], Problem]:
    """Rename a problem's ``"gpus"``, ``"slots"`` within GPUs or ``"experts"``, alike in all layers.

    The function takes the problem, a seed and what to rename.
    """

    def renamed(problem: Problem, seed: int, what: str) -> Problem:
        rng = np.random.default_rng(seed)
        placement = problem.placement
        slots, tokens = placement.slots, problem.tokens
        if what == "gpus":
            slots = slots[..., rng.permutation(placement.num_gpus), :]
        elif what == "slots":
            slots = rng.permuted(slots, axis=-1)
        else:
            names = rng.permutation(placement.num_experts)
            slots = np.append(names, EMPTY)[slots]
            tokens = np.empty_like(tokens)
            tokens[..., names] = problem.tokens
        return Problem(Placement(slots, placement.num_experts, allow_missing=True), tokens)

    return renamed


@pytest.fixture(scope="session")
def damage() -> Callable[[st.DataObject, bytes], bytes]:
    """Change some bytes of a file's content, cut it short or prolong it, as hypothesis draws."""

    def damaged(data: st.DataObject, intact: bytes) -> bytes:
        content = bytearray(intact)
        places = st.integers(0, len(content) - 1)
        for place in data.draw(st.lists(places, max_size=3)):
            content[place] ^= data.draw(st.integers(1, 255))
        end = data.draw(st.just(len(content)) | places)
        return bytes(content[:end]) + data.draw(st.binary(max_size=4))

    return damaged


@pytest.fixture(scope="session")
def draw_line() -> Callable[..., Problem]:
    """Draw problems that greedy routers get wrong and that only long paths put right.

    The function takes a generator, GPUs and batches. GPUs stand in a line; each shares an expert or
    two with the next, and most hold one or two experts that no other holds.
    """

    def draw(rng: np.random.Generator, gpus: int, batches: int) -> Problem:
        fixed = rng.integers(0, rng.integers(2, 4), gpus)
        shared = rng.integers(1, 3, gpus - 1)
        homes = np.concatenate(
            [np.repeat(np.arange(gpus), fixed), np.repeat(np.arange(gpus - 1), shared)]
        )
        names = rng.permutation(homes.size)
        rows: list[list[int]] = [[] for _ in range(gpus)]
        for place, (home, name) in enumerate(zip(homes.tolist(), names.tolist(), strict=True)):
            rows[home].append(name)
            if place >= fixed.sum():
                rows[home + 1].append(name)
        width = max(map(len, rows))
        slots = np.array([row + [EMPTY] * (width - len(row)) for row in rows])
        live = rng.random((batches, homes.size)) < rng.choice([0.7, 1], (batches, 1))
        counts = rng.integers(1, rng.choice(LARGEST_COUNTS, (batches, 1)) + 1, live.shape)
        return Problem(Placement(slots, homes.size), counts * live)

    return draw


@pytest.fixture(scope="session")
def fibers(tmp_path_factory: pytest.TempPathFactory) -> host_build.Fibers:
    """Build the CUDA kernels as host C++, their threads as fibers; skip without a compiler."""
    if host_build.compiler() is None:
        pytest.skip("no C++ compiler: set CXX")
    return host_build.Fibers(tmp_path_factory.mktemp("fibers"))


def draw_batches(
    rng: np.random.Generator, load: NDArray[np.int64], *, choices: int, batches: int
) -> NDArray[np.int64]:
    """Draw int64 [batches, layers, experts]: so many choices a layer, in proportion to the load."""
    return rng.multinomial(choices, load / load.sum(axis=-1, keepdims=True), (batches, len(load)))
