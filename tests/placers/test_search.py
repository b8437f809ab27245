"""`search`: laws, worked examples, real loads, and placements that are already there."""

from __future__ import annotations

from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt.errors import InfeasibleError, InvalidPlacementError
from eplb_opt.metrics import PlacementMetrics, count_moves
from eplb_opt.placement import Placement
from eplb_opt.placers import Search, resolve_placer
from eplb_opt.placing import PlacementPlan, move_curve, solve_placement
from eplb_opt.status import Status
from eplb_opt.trace import LoadTrace, read_trace

Windows = NDArray[np.float64]

search = partial(solve_placement, method="search")


@st.composite
def windows(draw: st.DrawFn, experts: st.SearchStrategy[int] | None = None) -> Windows:
    """Draw loads [windows, layers, experts]: skewed, some layers and many experts without load."""
    shape = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 12) if experts is None else experts),
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    load = random.integers(0, 10, shape) ** draw(st.integers(1, 4))
    load[:, random.random(shape[1]) < 0.2] = 0
    return load.astype(float)


def fits(experts: int, gpus: int, more: int) -> int:
    """Return slots per GPU for all experts and some more."""
    return -(-experts // gpus) + more


@given(windows(), st.integers(1, 5), st.integers(0, 3), st.sampled_from(["mean", "worst", 0.5]))
def test_laws_of_a_placement(load: Windows, gpus: int, more: int, over: str | float) -> None:
    """All experts, none twice on a GPU, empty slots only if nothing fits; never below the bound."""
    experts = load.shape[-1]
    per_gpu = fits(experts, gpus, more)
    plan = search(load, num_gpus=gpus, slots_per_gpu=per_gpu, over_windows=over)
    assert plan.duplicates == 0
    assert (plan.placement.copies >= 1).all()
    filled = (plan.placement.slots >= 0).sum(axis=(1, 2))
    assert (filled == gpus * min(per_gpu, experts)).all()
    assert (plan.makespan >= plan.bound).all()
    again = search(load, num_gpus=gpus, slots_per_gpu=per_gpu, over_windows=over, threads=2)
    assert again.placement == plan.placement


@settings(max_examples=40)
@given(windows(st.integers(2, 5)), st.integers(2, 3))
def test_without_spare_slots_it_finds_the_best_of_small_layers(load: Windows, gpus: int) -> None:
    """Beside all placements of up to six experts, and it says so where the mean load is met."""
    layer = load[:1, :1]
    experts = layer.shape[-1]
    per_gpu = fits(experts, gpus, 0)
    padded = np.zeros((1, 1, gpus * per_gpu))
    padded[..., :experts] = layer
    best = min(
        padded[0, 0, list(order)].reshape(gpus, per_gpu).sum(axis=1).max()
        for order in permutations(range(gpus * per_gpu))
    )
    plan = search(padded[0], num_gpus=gpus, slots_per_gpu=per_gpu)
    assert plan.makespan[0] == pytest.approx(best, rel=1e-4)


@given(windows(), st.integers(1, 5), st.integers(0, 3))
def test_it_is_never_worse_than_the_engines_policy(load: Windows, gpus: int, more: int) -> None:
    """Beside DeepSeek's EPLB with its duplicates repaired."""
    place = partial(
        solve_placement, load[0], num_gpus=gpus, slots_per_gpu=fits(load.shape[-1], gpus, more)
    )
    ours, theirs = place(method="search"), place(distinct=True)
    assert (ours.makespan <= theirs.makespan * (1 + 1e-4)).all()


def test_known_better() -> None:
    """What the shipped policies place at 232 and FlashLB at 200."""
    load = [600, 560, 120, 120, 20, 10, 10, 10]
    plan = search(load, num_gpus=8, slots_per_gpu=2)
    assert plan.makespan == pytest.approx(590 / 3)
    assert plan.duplicates == 0


@given(windows(st.sampled_from([4, 8, 12])), st.integers(1, 3), st.integers(0, 2))
def test_groups_stay_on_their_node(load: Windows, gpus_of_node: int, more: int) -> None:
    """With nodes that divide the groups, each group is on one node, equally many on each."""
    experts = load.shape[-1]
    plan = search(
        load,
        num_gpus=2 * gpus_of_node,
        slots_per_gpu=fits(experts // 2, gpus_of_node, more),
        num_nodes=2,
        num_groups=4,
    )
    assert plan.note == ""
    assert plan.duplicates == 0
    for layer in np.array(plan.placement.slots).reshape(load.shape[1], 2, -1):
        groups = [set((row[row >= 0] // (experts // 4)).tolist()) for row in layer]
        assert [len(of_node) for of_node in groups] == [2, 2]
        assert not groups[0] & groups[1]


def test_nodes_that_do_not_divide_the_groups_are_one() -> None:
    """The plan says so."""
    plan = search(np.ones(9), num_gpus=4, slots_per_gpu=3, num_nodes=2, num_groups=3)
    assert plan.note == "as one node: 2 nodes do not divide 3 groups"


def test_groups_are_packed_evenly() -> None:
    """Eight groups of one expert: the heaviest with the lightest."""
    plan = search(np.arange(1.0, 9.0), num_gpus=4, slots_per_gpu=2, num_nodes=4, num_groups=8)
    assert plan.makespan == 9
    assert plan.status == Status.OPTIMAL


# --- windows ---


def test_windows_are_placed_for_together() -> None:
    """Two windows whose mean is even, and no placement for the mean serves them well."""
    load = np.array([[8.0, 8, 0, 0], [0, 0, 8, 8]])[:, None]
    plan = search(load, num_gpus=2, slots_per_gpu=2)
    assert plan.makespan.tolist() == [8.0]
    assert {frozenset(row) for row in plan.placement.slots[0].tolist()} != {
        frozenset({0, 1}),
        frozenset({2, 3}),
    }


# --- from a placement ---


@st.composite
def served(draw: st.DrawFn) -> tuple[Windows, Placement]:
    """Draw loads and a placement made for others, maybe with shared copies or a dead GPU."""
    load = draw(windows())
    gpus, more = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    per_gpu = fits(load.shape[-1], gpus, more)
    other = np.roll(load[0], 1, axis=-1)
    placed = solve_placement(other, num_gpus=gpus, slots_per_gpu=per_gpu).placement
    slots = np.array(placed.slots)
    if draw(st.booleans()):
        dead = np.full((len(slots), 1, per_gpu), -1)
        slots = np.concatenate([slots, dead], axis=1)
    return load, Placement(slots, load.shape[-1])


def improve(drawn: tuple[Windows, Placement], **more: object) -> PlacementPlan:
    """Place from what is served."""
    load, now = drawn
    return search(
        load,
        num_gpus=now.num_gpus,
        slots_per_gpu=now.slots_per_gpu,
        previous=now,
        **more,  # type: ignore[arg-type]
    )


@given(served())
def test_from_what_is_served(drawn: tuple[Windows, Placement]) -> None:
    """No worse than what was served, nothing shared, empty slots stay empty; nor a second time."""
    load, now = drawn
    plan = improve(drawn)
    assert plan.duplicates == 0
    assert (plan.placement.copies >= 1).all()
    was_empty = np.array(now.slots) < 0
    assert (np.array(plan.placement.slots)[was_empty] == -1).all()
    assert (plan.makespan >= plan.bound).all()
    if PlacementMetrics.of(now, load.mean(axis=0)).duplicates.sum() == 0:
        assert (plan.makespan <= plan.measure.makespan(now, load) * (1 + 1e-9)).all()
    settled = improve((load, plan.placement))
    assert (settled.makespan <= plan.makespan * (1 + 1e-9)).all()


@given(served(), st.integers(0, 12))
def test_a_budget_of_moves_is_kept(drawn: tuple[Windows, Placement], budget: int) -> None:
    """Never more moves than allowed, never worse than what was served; none: nothing changes."""
    load, now = drawn
    plan = improve(drawn, max_moves=budget)
    assert plan.moves is not None
    assert plan.moves.tolist() == count_moves(now, plan.placement).tolist()
    assert plan.moves.sum() <= budget
    apart = PlacementMetrics.of(now, load.mean(axis=0)).duplicates.sum() == 0
    assert plan.makespan.sum() <= plan.measure.makespan(now, load).sum() * (1 + 1e-9)
    if apart and budget == 0:
        assert plan.placement == now
    stays = np.array(plan.placement.slots)[..., None] == np.array(now.slots)[..., None, :]
    same_slot = np.eye(now.slots_per_gpu, dtype=bool)
    if apart:  # what a GPU holds on has its old slot
        assert (stays.any(axis=-1) == (stays & same_slot).any(axis=-1)).all()


@given(served())
def test_the_curve_is_what_budgets_buy(drawn: tuple[Windows, Placement]) -> None:
    """At every corner of the curve, the budget gives that makespan."""
    load, now = drawn
    curve = move_curve(load, now.slots.tolist())
    for moves, makespan in zip(curve.moves[-3:], curve.makespan[-3:], strict=True):
        plan = improve(drawn, max_moves=int(moves))
        assert plan.makespan.sum() == pytest.approx(makespan, rel=1e-9)


@settings(max_examples=40)
@given(served(), st.booleans())
def test_a_larger_budget_is_never_worse(drawn: tuple[Windows, Placement], distinct: bool) -> None:
    """Whatever is served, shared copies too; if these must be parted, the budgets that suffice."""
    sums: list[float] = []
    for budget in range(6):
        try:
            plan = improve(drawn, max_moves=budget, distinct=distinct)
        except InvalidPlacementError:
            assert distinct
            assert not sums
            continue
        assert plan.moves is not None
        assert plan.moves.sum() <= budget
        assert not (distinct and plan.duplicates)
        sums.append(float(plan.makespan.sum()) * (1 - 1e-12 * budget))
    assert sums == sorted(sums, reverse=True)


def test_a_budget_for_shared_copies() -> None:
    """One move may do more than the two that part them, which are made or refused if they must."""
    now = [[1, 0], [2, 2], [0, 2]]
    place = partial(search, [8, 3, 6], num_gpus=3, slots_per_gpu=2, previous=now)
    peaks = [float(place(max_moves=moves).makespan) for moves in (0, 1, 2)]
    assert peaks == pytest.approx([7, 17 / 3, 17 / 3])
    apart = place(max_moves=2, distinct=True)
    assert (apart.duplicates, int(apart.moves or 0)) == (0, 2)
    with pytest.raises(
        InvalidPlacementError, match="layer 0: GPU 1 has expert 2 twice; search takes 2 moves to"
    ):
        place(max_moves=1, distinct=True)


SPLIT = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("split", "moves", "defect"),
    [
        (SPLIT, 4, "experts 0 to 3 are a group, on nodes 0 and 1; search takes 4 moves to mend it"),
        ([[0, 2], [1, 3], [0, 2], [1, 3]], 4, "expert 4 has no replica; search takes 4 moves"),
    ],
)
def test_a_layer_that_cannot_be_started_from(
    split: list[list[int]], moves: int, defect: str
) -> None:
    """One that splits a group is placed afresh, GPUs named for few moves, within the budget."""
    load = [[10, 10, 10, 10, 1, 1, 1, 1]] * 2
    kept = [[0, 1], [2, 3], [4, 5], [6, 7]]
    now = Placement([kept, split], 8, allow_missing=True)
    place = partial(
        search, load, num_gpus=4, slots_per_gpu=2, num_nodes=2, num_groups=2, previous=now
    )
    for plan in (place(), place(max_moves=moves)):
        assert plan.makespan.tolist() == plan.bound.tolist() == [20, 20]
        assert plan.moves is not None
        assert plan.moves.tolist() == [0, moves]
    with pytest.raises(InvalidPlacementError, match=f"previous, layer 1: {defect}.* max_moves is"):
        place(max_moves=moves - 1)
    assert move_curve(load, now, num_nodes=2, num_groups=2).moves.tolist() == [moves]


def test_nodes_with_too_many_groups_are_placed_afresh() -> None:
    """Each group is on one node there, but three are on the first."""
    now = [[0, 1, 2], [3, -1, -1]]
    with pytest.raises(InfeasibleError, match="node 1 has 1 slots"):
        search(np.ones(4), num_gpus=2, slots_per_gpu=3, num_nodes=2, num_groups=4, previous=now)
    now = [[0, 1, 2], [3, 3, 3]]
    place = partial(
        search, np.ones(4), num_gpus=2, slots_per_gpu=3, num_nodes=2, num_groups=4, previous=now
    )
    assert float(place().makespan) == 2
    with pytest.raises(InvalidPlacementError, match="layer 0: node 0 has 3 groups, not 2"):
        place(max_moves=0)


@pytest.mark.parametrize("exponent", [-1000, -600, 600, 1000])
def test_the_unit_of_loads_makes_no_difference(exponent: int) -> None:
    """Not even where squares of loads are beyond a double."""
    load = np.random.default_rng(0).pareto(1, (2, 64)) + 0.01
    place = partial(search, num_gpus=8, slots_per_gpu=9)
    plan, other = place(load), place(load * 2.0**exponent)
    assert other.placement == plan.placement
    assert (other.makespan * 2.0**-exponent).tolist() == plan.makespan.tolist()
    few = partial(place, previous=plan.placement, max_moves=9)
    heavier = load[:, ::-1]
    assert few(heavier * 2.0**exponent).placement == few(heavier).placement


def test_an_expert_without_replica() -> None:
    """Placed afresh when moves are free; with a budget of too few the missing one is named."""
    now = Placement([[[0, 1], [1, 2]]], num_experts=4, allow_missing=True)
    plan = search([[4, 1, 1, 4]], num_gpus=2, slots_per_gpu=2, previous=now)
    assert plan.makespan.tolist() == [5.0]
    with pytest.raises(InvalidPlacementError, match="layer 0: expert 3 has no replica"):
        search([[4, 1, 1, 4]], num_gpus=2, slots_per_gpu=2, previous=now, max_moves=0)


def test_a_node_without_room() -> None:
    """Dead slots may leave a node too small for its groups; the message names the node."""
    now = Placement([[[0, 1, 2], [3, -1, -1]]])
    with pytest.raises(
        InfeasibleError, match="layer 0: node 1 has 1 slots filled in previous for 2"
    ):
        search(
            np.ones((1, 4)), num_gpus=2, slots_per_gpu=3, num_nodes=2, num_groups=2, previous=now
        )


def test_moves_within_a_rename_are_none() -> None:
    """The same placement with its GPUs renamed takes no moves when placed for the same load."""
    load = np.random.default_rng(0).random((2, 16)) ** 3
    plan = search(load, num_gpus=4, slots_per_gpu=5)
    renamed = Placement(np.array(plan.placement.slots)[:, [2, 0, 3, 1]], 16)
    again = search(load, num_gpus=4, slots_per_gpu=5, previous=renamed)
    assert again.moves is not None
    assert again.moves.sum() == 0


# --- production size ---


def real(shared_data: Path, name: str) -> NDArray[np.float64]:
    """Return a file's loads, MoE layers only."""
    trace = read_trace(shared_data / "sglang_deepseek_v3" / name)
    assert isinstance(trace, LoadTrace)
    load: NDArray[np.float64] = np.asarray(trace.tokens).sum(axis=0).astype(np.float64)
    return load[load.any(axis=-1)]


@pytest.mark.parametrize("per_gpu", [8, 9])
def test_real_loads(shared_data: Path, per_gpu: int) -> None:
    """DeepSeek-V3 on 32 GPUs: within 0.05 % of the bound in the mean and 0.3 % in every layer."""
    load = real(shared_data, "decode_in2000out100.json")
    plan = search(load, num_gpus=32, slots_per_gpu=per_gpu)
    ordered = np.sort(load)[:, ::-1]
    bound = plan.bound
    if per_gpu == 8:  # the k hottest are on k GPUs with the lightest at best
        for k in range(1, 33):
            hot, light = ordered[:, :k].sum(axis=1), ordered[:, 256 - 7 * k :].sum(axis=1)
            bound = np.maximum(bound, (hot + light) / k)
    gap = plan.makespan / bound - 1
    assert gap.mean() <= 0.0005
    assert gap.max() <= 0.003


def test_few_moves_do_most(shared_data: Path) -> None:
    """At a fifth of EPLB's moves the peak is within 1 % of the unlimited one."""
    before, after = (
        real(shared_data, f"decode_{name}.json") for name in ("in1000out1000", "in2000out100")
    )
    place = partial(solve_placement, num_gpus=32, slots_per_gpu=9)
    now = place(before).placement
    theirs = place(after, previous=now)
    assert theirs.moves is not None
    few = place(after, previous=now, method="search", max_moves=int(theirs.moves.sum()) // 5)
    unlimited = place(after, previous=now, method="search")
    assert few.metrics.par_mean <= 1.01 * unlimited.metrics.par_mean


def test_options_are_checked() -> None:
    """Work and nearness are at least 0, and work is an int64."""
    assert resolve_placer("search:work=10,within=0.01") == Search(within=0.01, work=10)
    with pytest.raises(ValueError, match="search: within must be at least 0, not -1"):
        Search(within=-1)
    with pytest.raises(ValueError, match="search: work must be at least 0, not -1"):
        Search(work=-1)
    with pytest.raises(ValueError, match="search: work must be at most 9223372036854775807"):
        resolve_placer("search:work=9223372036854775808")
    with pytest.raises(TypeError, match="search: work must be an integer, not inf"):
        Search(work=float("inf"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_moves counts from a previous placement"):
        search([1.0], num_gpus=1, slots_per_gpu=1, max_moves=1)
    with pytest.raises(
        ValueError, match="deepseek does not heed max_moves; methods that do: search"
    ):
        solve_placement([1.0], num_gpus=1, slots_per_gpu=1, max_moves=1)
