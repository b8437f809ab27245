"""The CUDA kernels, run as host C++ under many schedules, against the CPU's answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import host_build
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt import _core, solve_routing
from eplb_opt.demand import count_tokens
from eplb_opt.gpu import launches
from eplb_opt.gpu.tables import Shape, make_tables
from eplb_opt.placement import Placement
from eplb_opt.placing import solve_placement
from eplb_opt.routing import Routing
from eplb_opt.testing import Problem, problems
from eplb_opt.trace import TokenTrace

METHODS = ("optimal", "metro", "metro:order=random,seed=3", "metro:order=single-copy-first")
GUARD = 4
"""Words behind every array written, which must stay as they are."""


class Arrays:
    """Arrays behind the pointers of a launch, with guards behind those that it writes."""

    def __init__(self) -> None:
        self.by_pointer: dict[int, NDArray[Any]] = {}

    def read(self, values: NDArray[Any]) -> int:
        """Return a pointer to a copy of the values."""
        copy = np.array(values, order="C")
        self.by_pointer[copy.ctypes.data] = copy
        return copy.ctypes.data

    def write(self, size: int, dtype: type = np.int32) -> int:
        """Return a pointer to room for so many values."""
        return self.read(np.full(size + GUARD, -77 if dtype is np.int32 else 77, dtype))

    def written(self, pointer: int) -> NDArray[Any]:
        """Return what was written to the room."""
        array = self.by_pointer[pointer]
        assert (np.abs(array[-GUARD:].astype(np.int64)) == 77).all(), "written out of bounds"
        return array[:-GUARD]


@dataclass
class Answer:
    """What a batched kernel writes."""

    home: NDArray[np.int32]
    activated: NDArray[np.int32]
    makespan: NDArray[np.int32]
    certificate: NDArray[np.bool_] | None


def prepared(
    placement: Placement, tokens: NDArray[np.int64], method: str
) -> tuple[launches.Launch, Arrays, Callable[[], Answer]]:
    """Return the launch that solves a batch, its arrays, and what reads the answer."""
    shape = Shape.of(placement)
    lead = tokens.shape[:-1]
    count = math.prod(lead)
    arrays = Arrays()
    tables = arrays.read(make_tables(placement, "metro" if method == "locked" else method))
    sizes = (count * shape.experts, count * shape.gpus, count)
    out = [arrays.write(size) for size in sizes]
    pointers = (tables, arrays.read(tokens), out[0], out[1], out[2])
    bits = arrays.write(count * shape.words, np.uint32)
    if method == "optimal":
        launch = launches.optimal_batched(shape, count, *pointers, bits)
    elif method == "locked":
        launch = launches.metro_locked(shape, count, *pointers)
    else:
        launch = launches.metro_batched(shape, count, *pointers)

    def read() -> Answer:
        home, activated, makespan = (arrays.written(p).reshape(*lead, -1) for p in out)
        certificate = None
        if method == "optimal":
            words = arrays.written(bits).reshape(*lead, shape.words)
            unpacked = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
            certificate = unpacked[..., : shape.gpus].astype(np.bool_)
        return Answer(home, activated, makespan[..., 0], certificate)

    return launch, arrays, read


def solve(
    fibers: host_build.Fibers,
    placement: Placement,
    tokens: NDArray[np.int64],
    method: str,
    seed: int = 0,
    **limits: int,
) -> Answer:
    """Solve a batch with a kernel under the schedules of a seed."""
    launch, _, read = prepared(placement, tokens, method)
    fibers.launch(launch, seed, **limits)
    return read()


def homes(routing: Routing) -> NDArray[np.int64]:
    """Return the slot that takes an expert's tokens, or -1, of a routing that splits none."""
    placement = routing.placement
    lead = routing.makespan.shape
    slots = placement.expert_of.shape[1]
    home = np.full((*lead, placement.num_experts), -1)
    at = np.nonzero(routing.tokens.reshape(*lead, slots))
    layer = at[-2] if placement.layered else 0
    home[(*at[:-1], placement.expert_of[layer, at[-1]])] = at[-1]
    return home


def require_same(answer: Answer, routing: Routing) -> None:
    """Require a kernel's answer to be the CPU's, to the bit."""
    np.testing.assert_array_equal(answer.home, homes(routing))
    np.testing.assert_array_equal(answer.activated, routing.activated)
    np.testing.assert_array_equal(answer.makespan, routing.makespan)
    if answer.certificate is not None:
        np.testing.assert_array_equal(answer.certificate, routing.certificate)


def require_greedy(answer: Answer, placement: Placement, tokens: NDArray[np.int64]) -> None:
    """Require an answer that some order of the experts could have."""
    gpus, live = placement.num_gpus, tokens > 0
    assert ((answer.home >= 0) == live).all()
    at = np.nonzero(live)
    layer = at[-2] if placement.layered else 0
    assert (placement.expert_of[layer, answer.home[live]] == at[-1]).all()
    counted = [
        np.bincount(home[home >= 0] // placement.slots_per_gpu, minlength=gpus)
        for home in answer.home.reshape(-1, live.shape[-1])
    ]
    assert (answer.activated.reshape(-1, gpus) == counted).all()
    assert (answer.makespan == answer.activated.max(axis=-1)).all()
    # Azar, Naor, Rom 1995: in any order greedy is within this of the optimum.
    best = solve_routing(placement, tokens).makespan
    assert (answer.makespan <= (math.ceil(math.log2(gpus)) + 1) * best).all()


@pytest.mark.parametrize("method", METHODS)
def test_equals_the_cpu_at_any_size(
    fibers: host_build.Fibers, draw_problem: Callable[..., Problem], method: str
) -> None:
    """Widths from one GPU to 1,024, dead GPUs, second copies: the CPU's answer to the bit."""
    rng = np.random.default_rng(len(method))
    for gpus, slots, experts, layers, batches in (
        (1, 3, 2, 1, 4),
        (5, 4, 12, 3, 10),
        (16, 20, 256, 1, 6),
        (33, 4, 100, 2, 3),
        (64, 6, 256, 1, 3),
        (144, 2, 200, 1, 3),
        (320, 2, 500, 1, 1),
        (1024, 3, 2048, 1, 1),
    ):
        problem = draw_problem(rng, gpus, slots, experts, layers, batches)
        answer = solve(fibers, problem.placement, problem.tokens, method, int(rng.integers(2**40)))
        require_same(answer, solve_routing(problem.placement, problem.tokens, method=method))


@pytest.mark.parametrize("method", ["optimal", "metro"])
def test_equals_the_cpu_on_drawn_problems(fibers: host_build.Fibers, method: str) -> None:
    """Whatever hypothesis draws, huge counts among it, and whatever the schedule."""

    @settings(max_examples=60)
    @given(problems(), st.integers(0, 2**40))
    def check(problem: Problem, seed: int) -> None:
        answer = solve(fibers, problem.placement, problem.tokens, method, seed)
        require_same(answer, solve_routing(problem.placement, problem.tokens, method=method))

    check()


@pytest.mark.parametrize("method", ["optimal", "metro", "locked"])
def test_recorded_traffic(
    fibers: host_build.Fibers, real_problems: dict[str, Problem], method: str
) -> None:
    """Some layers and a batch of everything recorded: the CPU's answers, or valid ones."""
    for name, problem in real_problems.items():
        every = -(-problem.placement.num_layers // 3)
        placement = Placement(
            problem.placement.slots[::every], problem.placement.num_experts, allow_missing=True
        )
        tokens = problem.tokens.reshape(-1, *problem.tokens.shape[-2:])[0, ::every].copy()
        answer = solve(fibers, placement, tokens, method, len(name))
        if method == "locked":
            require_greedy(answer, placement, tokens)
        else:
            require_same(answer, solve_routing(placement, tokens, method=method))


def test_long_paths_are_the_cpus(
    fibers: host_build.Fibers, draw_line: Callable[..., Problem]
) -> None:
    """Where only long alternating paths help, each is the CPU's."""
    rng = np.random.default_rng(5)
    for gpus in (3, 20, 40, 100):
        problem = draw_line(rng, gpus, 4)
        answer = solve(fibers, problem.placement, problem.tokens, "optimal", gpus)
        require_same(answer, solve_routing(problem.placement, problem.tokens))


def test_locked_is_a_greedy_answer_under_every_schedule(
    fibers: host_build.Fibers, draw_problem: Callable[..., Problem]
) -> None:
    """Each live expert has a home, counts are right, and no answer is beyond greedy's bound."""
    rng = np.random.default_rng(11)
    for seed in range(40):
        gpus = int(rng.integers(1, 12))
        problem = draw_problem(rng, gpus, 5, 3 * gpus, 1, 3)
        answer = solve(fibers, problem.placement, problem.tokens, "locked", seed)
        require_greedy(answer, problem.placement, problem.tokens)


def test_schedules_differ(fibers: host_build.Fibers) -> None:
    """Which expert gets its lock first is up to the schedule, and shows in the answer."""
    placement = Placement([[0, 1], [0, 2]])
    tokens = np.array([1, 1, 0])
    seen = {tuple(solve(fibers, placement, tokens, "locked", seed).activated) for seed in range(20)}
    assert seen == {(2, 0), (1, 1)}


@pytest.mark.parametrize("method", ["optimal", "metro", "locked"])
@pytest.mark.parametrize("count", [-1, _core.MAX_TOKENS_PER_EXPERT + 1, 2**63 - 1])
def test_tokens_out_of_range_get_the_sentinel(
    fibers: host_build.Fibers, method: str, count: int
) -> None:
    """Of two problems the one with a bad count is answered with -1, the other is solved."""
    placement = Placement([[0, 1], [0, 2]])
    answer = solve(fibers, placement, np.array([[1, count, 0], [1, 1, 1]]), method)
    assert answer.makespan[0] == -1
    assert (answer.home[0] == -1).all()
    assert (answer.activated[0] == 0).all()
    assert (answer.home[1] >= 0).all()


@pytest.mark.parametrize("method", ["optimal", "metro", "locked"])
def test_tokens_without_a_replica_get_the_sentinel(fibers: host_build.Fibers, method: str) -> None:
    """Tokens of an expert that no GPU holds make the problem unsolvable."""
    placement = Placement([[0, -1], [0, 2]], allow_missing=True)
    answer = solve(fibers, placement, np.array([[1, 1, 0], [1, 0, 1]]), method)
    assert answer.makespan.tolist()[0] == -1
    assert answer.makespan.tolist()[1] >= 1


def test_nothing_to_route(fibers: host_build.Fibers) -> None:
    """Without tokens nobody is activated, and the empty bound has its certificate."""
    placement = Placement([[0, 1], [-1, -1], [0, 2]])
    answer = solve(fibers, placement, np.zeros(3, np.int64), "optimal")
    require_same(answer, solve_routing(placement, [0, 0, 0]))


def route(
    fibers: host_build.Fibers,
    placement: Placement,
    topk_ids: NDArray[Any],
    method: str,
    counts: NDArray[np.int32] | None = None,
    seed: int = 0,
) -> NDArray[np.int32]:
    """Route top-k ids [layers, rows, k] with the fused kernel."""
    arrays = Arrays()
    shape = Shape.of(placement)
    physical = arrays.write(topk_ids.size)
    launch = launches.route(
        method.split(":")[0],
        shape,
        arrays.read(make_tables(placement, method)),
        arrays.read(topk_ids),
        topk_ids.itemsize,
        topk_ids.size // shape.layers,
        0 if counts is None else arrays.read(counts),
        physical,
    )
    fibers.launch(launch, seed)
    return arrays.written(physical).reshape(topk_ids.shape)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_fused_equals_solve_and_assign(
    fibers: host_build.Fibers,
    draw_problem: Callable[..., Problem],
    draw_ids: Callable[..., NDArray[np.int64]],
    method: str,
    dtype: type,
) -> None:
    """Count, solve and look up in one launch give what the CPU's three steps do."""
    rng = np.random.default_rng(7)
    for gpus, slots, experts, rows in ((4, 3, 8, 0), (8, 5, 32, 100), (40, 3, 90, 33)):
        placement = draw_problem(rng, gpus, slots, experts, 2, 1).placement
        ids = draw_ids(rng, placement, (), (rows, 4))
        routing = solve_routing(placement, count_tokens(ids, experts), method=method)
        physical = route(fibers, placement, ids.astype(dtype), method, seed=rows)
        np.testing.assert_array_equal(physical, routing.assign(ids))


@pytest.mark.parametrize("method", ["optimal", "metro"])
def test_fused_routes_recorded_batches(
    fibers: host_build.Fibers, recorded_tokens: dict[str, TokenTrace], method: str
) -> None:
    """The experts that tokens of real models chose, some layers of a batch."""
    for trace in recorded_tokens.values():
        ids = trace.batches(min(trace.num_tokens, 64))[0, ::16]
        slots = trace.num_experts * 3 // 2 // 8
        load = count_tokens(ids, trace.num_experts)
        placement = solve_placement(load, num_gpus=8, slots_per_gpu=slots).placement
        routing = solve_routing(placement, load, method=method)
        np.testing.assert_array_equal(
            route(fibers, placement, ids.astype(np.int64), method), routing.assign(ids)
        )


@pytest.mark.parametrize("method", ["optimal", "metro"])
def test_global_counts_route_every_rank_alike(
    fibers: host_build.Fibers,
    draw_problem: Callable[..., Problem],
    draw_ids: Callable[..., NDArray[np.int64]],
    method: str,
) -> None:
    """With the reduced counts each rank's answers are its part of the whole batch's."""
    rng = np.random.default_rng(3)
    placement = draw_problem(rng, 8, 5, 32, 2, 1).placement
    ids = draw_ids(rng, placement, (), (3, 20, 4))
    counts = count_tokens(ids.reshape(2, 60, 4), 32)
    whole = solve_routing(placement, counts, method=method).assign(ids)
    for rank in range(3):
        local = np.ascontiguousarray(ids[:, rank])
        physical = route(fibers, placement, local, method, counts.astype(np.int32))
        np.testing.assert_array_equal(physical, whole[:, rank])


@pytest.mark.parametrize("method", ["optimal", "metro"])
def test_ids_that_nobody_serves_get_the_sentinel(fibers: host_build.Fibers, method: str) -> None:
    """Out of range, without a replica, or without tokens by the counts: -2; the rest is routed."""
    placement = Placement([[0, -1], [0, 2]], allow_missing=True)
    ids = np.array([[[0, 1], [3, -1], [-2, 2], [2**40, -(2**40)]]])
    physical = route(fibers, placement, ids, method)
    assert physical.tolist() == [[[0, -2], [-2, -1], [-2, 3], [-2, -2]]]
    counts = np.array([[1, 1, 0]], np.int32)
    assert route(fibers, placement, ids, method, counts).tolist() == [
        [[0, -2], [-2, -1], [-2, -2], [-2, -2]]
    ]


def small_launches(
    draw_problem: Callable[..., Problem],
) -> dict[str, tuple[launches.Launch, Arrays]]:
    """Return a launch of each kernel that takes threads a moment."""
    rng = np.random.default_rng(2)
    problem = draw_problem(rng, 6, 4, 16, 1, 1)
    crowded = Problem(problem.placement, (problem.placement.copies > 0).astype(np.int64))
    # A path lowers the fullest GPU of the first layer; in the second there is none.
    searched = Placement(
        [
            [[1, -1, -1], [1, 2, 3], [0, 2, 3], [0, -1, -1]],
            [[0, 1, 2], [0, 1, 2], [3, -1, -1], [-1, -1, -1]],
        ]
    )
    tokens = np.array([[1, 1, 1, 1], [1, 1, 1, 0]])
    made = {
        "metro_batched": prepared(crowded.placement, crowded.tokens, "metro")[:2],
        "metro_locked": prepared(crowded.placement, crowded.tokens, "locked")[:2],
        "optimal_batched": prepared(searched, tokens, "optimal")[:2],
    }
    ids = rng.integers(-1, 16, 120)
    shape = Shape.of(crowded.placement)
    for method in ("metro", "optimal"):
        arrays = Arrays()
        tables = arrays.read(make_tables(crowded.placement, method))
        pointers = (arrays.read(ids), 8, ids.size, 0, arrays.write(ids.size))
        made[f"route_{method}"] = launches.route(method, shape, tables, *pointers), arrays
    arrays = Arrays()
    table = crowded.placement.logical_to_physical
    shares = np.where(table >= 0, 3, 0).astype(np.int32)
    sizes = (1, 16, table.shape[-1])
    pointers = (arrays.read(ids), 8, ids.size, arrays.read(table), arrays.read(shares))
    rest = (arrays.read(np.zeros(16, np.int32)), arrays.write(ids.size))
    made["assign_shares"] = launches.assign_shares(*sizes, *pointers, *rest), arrays
    return made


def test_no_data_race(tmp_path: Path, draw_problem: Callable[..., Problem]) -> None:
    """ThreadSanitizer, told what CUDA orders and no more, finds nothing in any kernel."""
    if host_build.compiler() is None:
        pytest.skip("no C++ compiler: set CXX")
    sanitized = host_build.Sanitized(tmp_path)
    for name, (launch, arrays) in small_launches(draw_problem).items():
        assert sanitized.launch(launch, arrays.by_pointer) == "", name


MISSING_LOOKUP_BARRIER = (
    "route.cu",
    "    if (thread < kWarp) solve(tokens, home);\n    __syncthreads();\n",
    "    if (thread < kWarp) solve(tokens, home);\n",
)
LOCK_NOT_WAITED_FOR = (
    "metro_locked.cu",
    "while (atomicCAS(lock, 0u, 1u) != 0) {",
    "while (atomicCAS(lock, 0u, 1u) > 1) {",
)
WRONG_MASK = (
    "metro.cuh",
    "__ballot_sync(kAllLanes, mine.live && ",
    "__ballot_sync(kAllLanes >> 1, mine.live && ",
)
UNRELEASED_LOCK = (
    "metro_locked.cu",
    "for (int i = 0; i < e.candidates; ++i) release(",
    "for (int i = 1; i < e.candidates; ++i) release(",
)
MISSING_WARP_BARRIER = (
    "optimal.cuh",
    "bool next_level(unsigned depth) {\n        __syncwarp();\n",
    "bool next_level(unsigned depth) {\n",
)


def test_a_missing_barrier_is_caught(
    tmp_path: Path,
    draw_problem: Callable[..., Problem],
    draw_ids: Callable[..., NDArray[np.int64]],
) -> None:
    """Tokens looked up before the solver is done: some schedule gives other answers."""
    _require_compiler()
    mutant = host_build.Fibers(tmp_path, ["route_metro"], [MISSING_LOOKUP_BARRIER])
    rng = np.random.default_rng(1)
    placement = draw_problem(rng, 8, 5, 32, 1, 1).placement
    ids = draw_ids(rng, placement, (), (100, 4))
    routing = solve_routing(placement, count_tokens(ids, 32), method="metro")
    assert (route(mutant, placement, ids, "metro") != routing.assign(ids)).any()


def test_a_missing_lock_is_caught(tmp_path: Path) -> None:
    """Two experts that count at once: some schedule loses one."""
    _require_compiler()
    mutant = host_build.Fibers(tmp_path, ["metro_locked"], [LOCK_NOT_WAITED_FOR])
    placement = Placement([[0, 1, 2, 3], [0, 1, 2, 3]])
    tokens = np.ones(4, np.int64)
    sums = {
        int(solve(mutant, placement, tokens, "locked", seed).activated.sum()) for seed in range(50)
    }
    assert min(sums) < 4


def test_a_wrong_mask_is_caught(tmp_path: Path) -> None:
    """A lane that votes outside its own mask is an error."""
    _require_compiler()
    mutant = host_build.Fibers(tmp_path, ["metro_batched"], [WRONG_MASK])
    with pytest.raises(host_build.HostLaunchError, match="outside its own mask"):
        solve(mutant, Placement([[0, 1], [0, 2]]), np.array([1, 1, 1]), "metro")


def test_an_unreleased_lock_is_caught(tmp_path: Path) -> None:
    """A lock that is never let go ends the schedule after so many switches."""
    _require_compiler()
    mutant = host_build.Fibers(tmp_path, ["metro_locked"], [UNRELEASED_LOCK])
    with pytest.raises(host_build.HostLaunchError, match="too many switches"):
        solve(
            mutant, Placement([[0, 1], [0, 1]]), np.array([1, 1]), "locked", most_switches=100_000
        )


def test_a_missing_warp_barrier_is_caught(
    tmp_path: Path, draw_problem: Callable[..., Problem]
) -> None:
    """The sanitizer sees a write that only a warp exchange, which orders nothing, follows."""
    _require_compiler()
    mutant = host_build.Sanitized(tmp_path, ["optimal_batched"], [MISSING_WARP_BARRIER])
    launch, arrays = small_launches(draw_problem)["optimal_batched"]
    assert "data race" in mutant.launch(launch, arrays.by_pointer)


def _require_compiler() -> None:
    if host_build.compiler() is None:
        pytest.skip("no C++ compiler: set CXX")
