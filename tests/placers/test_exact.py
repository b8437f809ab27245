"""The exact placers: both engines against all placements, worked cases, limits and bad input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt import TimeLimit
from eplb_opt.bounds import placement_bound
from eplb_opt.errors import EplbError, InfeasibleError, SolverUnavailableError
from eplb_opt.measure import Measure, Split
from eplb_opt.placers import Placed, PlacementProblem, placement_methods
from eplb_opt.placers.exact import Found, Program, _Clock, place
from eplb_opt.placing import PlacementPlan, solve_placement
from eplb_opt.status import Proof, Status

pytest.importorskip("highspy")
pytest.importorskip("ortools")

ENGINES = ("highs", "cp-sat")
KNOWN = [600, 560, 120, 120, 20, 10, 10, 10]


class Case(NamedTuple):
    """A small problem: loads [windows, experts], slots to fill by GPU, nodes and groups."""

    windows: NDArray[np.float64]
    room: list[int]
    nodes: int
    groups: int

    def plan(self, method: str, split: str, over: str) -> PlacementPlan:
        """Place by a method; GPUs have as many slots as the roomiest fills."""
        slots = max(self.room)
        previous = [[[0] * room + [-1] * (slots - room) for room in self.room]]
        return solve_placement(
            self.windows[:, None],
            num_gpus=len(self.room),
            slots_per_gpu=slots,
            num_nodes=self.nodes,
            num_groups=self.groups,
            previous=None if min(self.room) == slots else np.array(previous),
            method=method,
            split=split,
            over_windows=over,
        )

    def placements(self) -> Iterator[list[set[int]]]:
        """Yield all placements of distinct copies that fill the slots and keep to the nodes."""
        experts = range(self.windows.shape[1])
        size, node_gpus = len(experts) // self.groups, len(self.room) // self.nodes
        of_node = len(experts) // self.nodes
        each = [combinations(experts, min(room, of_node)) for room in self.room]
        for held in product(*each):
            homes = {(e // size, g // node_gpus) for g, of in enumerate(held) for e in of}
            on_node = [sum(node == n for _, node in homes) for n in range(self.nodes)]
            kept = on_node == [self.groups // self.nodes] * self.nodes
            if kept and len({e for of in held for e in of}) == len(experts):
                yield [set(of) for of in held]

    def optimum(self, split: str, over: str) -> float:
        """Try all placements."""
        peak = equal_peak if split == "equal" else free_peak
        sum_up = np.mean if over == "mean" else np.max
        return min(
            float(sum_up([peak(held, load) for load in self.windows.tolist()]))
            for held in self.placements()
        )


def equal_peak(held: list[set[int]], load: list[float]) -> float:
    """Return the largest GPU load when copies take equal shares."""
    copies = [sum(e in of for of in held) for e in range(len(load))]
    return max(sum(load[e] / copies[e] for e in of) for of in held)


def free_peak(held: list[set[int]], load: list[float]) -> float:
    """Return the least that it can be by any split: of the GPU sets, the fullest."""
    best = 0.0
    for size in range(1, len(held) + 1):
        for members in combinations(range(len(held)), size):
            outside = set().union(*(of for g, of in enumerate(held) if g not in members))
            confined = sum(w for e, w in enumerate(load) if e not in outside)
            best = max(best, confined / size)
    return best


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw up to 4 GPUs of up to 3 slots, some of them empty; two nodes sometimes."""
    nodes = draw(st.sampled_from([1, 1, 2]))
    gpus = nodes * draw(st.integers(1, 2 if nodes == 2 else 3))
    room = draw(st.lists(st.integers(0, 3), min_size=gpus, max_size=gpus))
    if draw(st.booleans()) or not any(room):
        room = [draw(st.integers(1, 3))] * gpus
    by_node = [sum(room[n * gpus // nodes : (n + 1) * gpus // nodes]) for n in range(nodes)]
    of_node = draw(st.integers(1, max(1, min(*by_node, 5 // nodes))))
    if min(by_node) == 0:
        room = [1] * gpus
    experts = nodes * of_node
    groups = draw(st.sampled_from([experts, nodes]))
    entries = st.one_of(st.integers(0, 20).map(float), st.floats(0.01, 1e9))
    loads = st.lists(entries, min_size=experts, max_size=experts)
    windows = draw(st.lists(loads, min_size=1, max_size=2))
    return Case(np.array(windows), room, nodes, groups)


@settings(max_examples=20)
@given(cases(), st.sampled_from(["equal", "free"]), st.sampled_from(["mean", "worst"]))
def test_both_engines_find_the_best_of_all_placements(case: Case, split: str, over: str) -> None:
    """Makespan and bound are those of the best placement: to rounding, and HiGHS's 1e-6."""
    best = case.optimum(split, over)
    for method, tolerance in (("highs", 3e-6), ("cp-sat", 1e-11)):
        plan = case.plan(method, split, over)
        assert plan.duplicates == 0
        assert (plan.placement.slots >= 0).sum() == sum(
            min(room, case.windows.shape[1] // case.nodes) for room in case.room
        )
        assert plan.makespan[0] == pytest.approx(best, rel=tolerance)
        assert plan.bound[0] <= best * (1 + 1e-11)
        assert plan.bound[0] >= best * (1 - tolerance)


@pytest.mark.parametrize("method", ENGINES)
@pytest.mark.parametrize(("split", "optimum"), [("equal", 590 / 3), ("free", 181.25)])
def test_the_known_case(method: str, split: str, optimum: float) -> None:
    """The case on which engines' policies reach 200 and 232 is proven."""
    plan = solve_placement(KNOWN, num_gpus=8, slots_per_gpu=2, method=method, split=split)
    assert float(plan.makespan) == pytest.approx(optimum, rel=1e-12)
    assert int(plan.status) == Status.OPTIMAL
    by = {"highs": Proof.HIGHS, "cp-sat": Proof.CP_SAT}[method] if split == "equal" else Proof.COUNT
    assert int(plan.proved_by) == by


@pytest.mark.parametrize("method", ENGINES)
def test_no_time_leaves_the_start(method: str) -> None:
    """With a time limit of zero the start is the answer, measured against the counted bound."""
    load = np.array([KNOWN, [0] * 8, [1] * 8])
    place = partial(solve_placement, load, num_gpus=8, slots_per_gpu=2)
    plan = place(method=method, stop=TimeLimit(0))
    assert plan.placement == place(method="search").placement
    assert plan.status.tolist() == [Status.FEASIBLE, Status.OPTIMAL, Status.OPTIMAL]
    assert plan.bound[0] == 181.25


@pytest.mark.parametrize("method", ENGINES)
def test_layers_in_parallel_are_solved_alike(method: str) -> None:
    """Every layer has one thread of the engine, however many are solved at a time."""
    load = np.random.default_rng(0).integers(1, 100, (3, 6))
    plans = [
        solve_placement(load, num_gpus=3, slots_per_gpu=3, method=method, threads=threads)
        for threads in (1, 4)
    ]
    assert plans[0].placement == plans[1].placement
    assert plans[0].bound.tolist() == plans[1].bound.tolist()


def test_time_is_shared_by_the_layers_left() -> None:
    """A layer has its share of the time that is left; what it leaves goes to the others."""
    clock = _Clock(TimeLimit(60), layers=3, threads=1)
    first, second, third = (clock.deadline() for _ in range(3))
    assert second - first == pytest.approx(10, abs=0.5)  # half of 60 after a third of it
    assert third - second == pytest.approx(30, abs=0.5)


@pytest.mark.parametrize("method", ENGINES)
def test_nodes_that_do_not_divide_the_groups(method: str) -> None:
    """As in deepseek's global form they count as one node, and the plan says so."""
    place = partial(solve_placement, [6, 5, 4, 3, 2, 1], num_gpus=4, slots_per_gpu=2, method=method)
    plan = place(num_nodes=2, num_groups=3)
    assert plan.note == "as one node: 2 nodes do not divide 3 groups"
    assert float(plan.makespan) == float(place().makespan)


@pytest.mark.parametrize("method", ENGINES)
def test_bad_input(method: str) -> None:
    """Quantiles, and nodes with too few filled slots, are refused by name."""
    windows = np.ones((3, 1, 4))
    with pytest.raises(ValueError, match=r"'mean' or 'worst', not for the quantile 0\.5"):
        solve_placement(windows, num_gpus=2, slots_per_gpu=3, method=method, over_windows=0.5)
    previous = [[0, 1], [-1, -1], [2, 3], [0, 1]]
    place = partial(solve_placement, num_gpus=4, slots_per_gpu=2, previous=previous, method=method)
    with pytest.raises(
        InfeasibleError, match="layer 0: node 0 has 2 slots filled in previous for 3"
    ):
        place([1] * 6, num_nodes=2, num_groups=2)
    with pytest.raises(InfeasibleError, match="7 experts need 7 slots and 6 are filled"):
        place([1] * 7)


@pytest.mark.parametrize("method", ENGINES)
@pytest.mark.parametrize(
    ("load", "groups", "previous", "optimum"),
    [
        ([1, 8], 2, [[0, 0, 1], [1, -1, 1]], 8),
        ([9, 5, 0, 4, 0, 11], 6, [[1, 4], [0, 5], [2, 0], [4, 3]], 9.5),
    ],
)
def test_from_a_placement_that_splits_groups(
    method: str, load: list[int], groups: int, previous: list[list[int]], optimum: float
) -> None:
    """It is no start: the optimum is that of placements which keep groups to nodes."""
    plan = solve_placement(
        load,
        num_gpus=len(previous),
        slots_per_gpu=len(previous[0]),
        num_nodes=2,
        num_groups=groups,
        previous=previous,
        method=method,
    )
    assert float(plan.makespan) == optimum
    assert int(plan.status) == Status.OPTIMAL


@pytest.mark.parametrize("split", ["equal", "free"])
@pytest.mark.parametrize("exponent", [-1070, -980, 1000])
def test_loads_at_the_ends_of_doubles(split: str, exponent: int) -> None:
    """CP-SAT's integers stand for them, however small a layer's total."""
    place = partial(solve_placement, num_gpus=3, slots_per_gpu=2, method="cp-sat", split=split)
    load = np.array([6.0, 5.0, 4.0, 3.0, 2.0])
    plan, other = place(load), place(load * 2.0**exponent)
    assert int(other.status) == Status.OPTIMAL
    assert float(other.makespan) == pytest.approx(float(plan.makespan) * 2.0**exponent, rel=0.01)


def test_values_of_a_makespan_beyond_doubles() -> None:
    """With 800 copies at most, their common denominator has 346 digits."""
    program = Program(
        np.array([[3.0, 2.0, 1.0]]),
        Measure(Split.FREE),
        np.ones(800, np.int64),
        np.zeros(800, np.int64),
        np.zeros(3, np.int64),
        np.zeros((3, 800), np.bool_),
        most=2.0,
        counted=1.0,
    )
    assert [program.raised(bound) for bound in (1.5, 0.0, -np.inf)] == [1.5, 0.0, -np.inf]


@pytest.mark.parametrize(("method", "package"), [("highs", "highspy"), ("cp-sat", "ortools")])
def test_an_engine_that_is_not_installed(
    method: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the extra to install."""
    monkeypatch.setattr("eplb_opt.engines.find_spec", lambda _: None)
    with pytest.raises(SolverUnavailableError, match=f"{method} needs {package}.*exact"):
        solve_placement([1], num_gpus=1, slots_per_gpu=1, method=method)
    assert placement_methods()[method].extra == "exact"
    assert placement_methods()[method].exact


def problem() -> PlacementProblem:
    """Return a problem whose start is not at its bound."""
    load = np.array([KNOWN], dtype=float)
    return PlacementProblem(load[None], load, 8, 2)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda program: program.start & False, "leaves an expert out"),
        (lambda program: program.start | True, "holds other than one expert a slot"),
    ],
)
def test_a_wrong_answer_is_refused(
    answer: Callable[[Program], NDArray[np.bool_]], message: str
) -> None:
    """An engine's answer must be a placement."""
    with pytest.raises(EplbError, match=f"highs, layer 0: its answer {message}"):
        place(problem(), Proof.HIGHS, lambda program, _: Found(answer(program), 0.0))


def test_a_contradiction_is_refused() -> None:
    """A bound above the makespan in hand is an engine's error, not a proof."""
    with pytest.raises(EplbError, match="cp-sat, layer 0: it proves a makespan of 400"):
        place(problem(), Proof.CP_SAT, lambda *_: Found(None, 400.0))


def test_a_worse_answer_leaves_the_start() -> None:
    """What an engine answers counts only where it is better."""

    def backwards(program: Program, _: float) -> Found:
        return Found(program.start[::-1], -np.inf)

    placed: Placed = place(problem(), Proof.HIGHS, backwards)
    start = solve_placement(KNOWN, num_gpus=8, slots_per_gpu=2, method="search")
    assert placed.slots.tolist() == [start.placement.slots.tolist()]
    assert placed.bound is not None
    assert placed.bound.tolist() == [181.25]


def test_recorded_loads(recorded_load: Callable[[str], NDArray[np.int64]]) -> None:
    """At production size the counted bound stands where engines find nothing in time."""
    load = recorded_load("prefill_in4096")[:2]
    for method in ENGINES:
        plan = solve_placement(
            load, num_gpus=32, slots_per_gpu=8, method=method, stop=TimeLimit(0.5)
        )
        bound = placement_bound(load.astype(float), num_gpus=32, slots_per_gpu=8)
        assert (plan.bound >= bound).all()
        assert (plan.gap < 0.1).all()
        assert plan.duplicates == 0
