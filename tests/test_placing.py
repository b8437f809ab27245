"""Placements from loads: the DeepSeek algorithm, worked examples, and loads that are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from eplb_opt import _core, placing
from eplb_opt.bounds import placement_bound
from eplb_opt.errors import InfeasibleError, InvalidPlacementError, InvalidTokensError
from eplb_opt.metrics import PlacementMetrics
from eplb_opt.placement import Placement
from eplb_opt.placers import (
    DeepSeek,
    Placed,
    PlacementProblem,
    PlacerTraits,
    first_placement,
    placement_methods,
    resolve_placer,
)
from eplb_opt.placing import PlacementPlan, as_load, move_curve, solve_placement
from eplb_opt.status import Status

Load = NDArray[np.float64]

LOADS: st.SearchStrategy[Load] = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=8),
    elements=st.one_of(st.integers(0, 9).map(float), st.floats(1e-3, 1e12)),
)


def gpu_loads(plan: PlacementPlan, load: Load) -> Load:
    """Return each GPU's load [layers, gpus] when copies share their expert's load equally."""
    placement = plan.placement
    share = load / placement.copies
    by_slot = np.stack([row[slots] for row, slots in zip(share, placement.expert_of, strict=True)])
    return np.asarray(by_slot.reshape(placement.num_layers, placement.num_gpus, -1).sum(axis=-1))


# --- laws ---


@given(LOADS, st.integers(1, 6), st.integers(0, 5))
def test_the_plan_measures_its_placement(load: Load, gpus: int, extra: int) -> None:
    """Makespan, bound and balance are what the equal split of the load gives, layer by layer."""
    per_gpu = -(-load.shape[1] // gpus) + extra
    plan = solve_placement(load, num_gpus=gpus, slots_per_gpu=per_gpu)
    found = gpu_loads(plan, load)
    assert plan.makespan.shape == plan.bound.shape == plan.balance.shape == (len(load),)
    assert plan.makespan == pytest.approx(found.max(axis=1))
    bound = placement_bound(load, num_gpus=gpus, slots_per_gpu=per_gpu)
    assert plan.bound == pytest.approx(bound)
    assert (plan.balance <= 1 + 1e-12).all()
    loaded = load.any(axis=1)
    assert plan.balance[loaded] == pytest.approx(found[loaded].mean(axis=1) / plan.makespan[loaded])
    assert (plan.balance[~loaded] == 1).all()
    assert plan.status.tolist() == [
        Status.OPTIMAL if makespan <= bound * (1 + placing._ROUNDING) else Status.FEASIBLE
        for makespan, bound in zip(plan.makespan, plan.bound, strict=True)
    ]
    gpus_of_slots = plan.placement.slots.reshape(-1, per_gpu).tolist()
    assert plan.duplicates == sum(per_gpu - len(set(slots)) for slots in gpus_of_slots)


@given(LOADS, st.integers(1, 6), st.integers(0, 5))
def test_every_slot_is_filled_and_every_expert_placed(load: Load, gpus: int, extra: int) -> None:
    """No empty slots, no expert lost; copies lower the largest load per copy as far as they can."""
    per_gpu = -(-load.shape[1] // gpus) + extra
    placement = solve_placement(load, num_gpus=gpus, slots_per_gpu=per_gpu).placement
    assert (placement.slots >= 0).all()
    assert (placement.copies >= 1).all()
    largest = (load / placement.copies).max(axis=1, keepdims=True)
    # No expert could give up a copy and stay at or below the largest load per copy, strictly.
    several = placement.copies > 1
    fewer = load[several] / (placement.copies[several] - 1)
    assert (fewer >= (largest * several)[several] - 1e-9).all()


@given(LOADS, st.integers(1, 6), st.integers(0, 5))
def test_layers_are_placed_one_by_one(load: Load, gpus: int, extra: int) -> None:
    """A layer's placement does not depend on the others; a 1-D load drops the layer axis."""
    per_gpu = -(-load.shape[1] // gpus) + extra
    together = solve_placement(load, num_gpus=gpus, slots_per_gpu=per_gpu)
    for layer, row in enumerate(load):
        alone = solve_placement(row, num_gpus=gpus, slots_per_gpu=per_gpu)
        assert not alone.placement.layered
        assert alone.makespan.shape == alone.bound.shape == alone.balance.shape == ()
        assert np.array_equal(alone.placement.slots, together.placement.slots[layer])
        assert float(alone.makespan) == together.makespan[layer]
        assert float(alone.bound) == together.bound[layer]


@given(st.permutations([float(2**i) for i in range(10)]), st.integers(1, 4), st.integers(0, 3))
def test_experts_of_different_load_may_be_renamed(load: list[float], gpus: int, extra: int) -> None:
    """Without ties, GPUs get the same loads whatever the experts are called."""
    per_gpu = -(-len(load) // gpus) + extra
    renamed = np.array([load])
    plain = np.sort(renamed)
    found, expected = (
        gpu_loads(solve_placement(given_load, num_gpus=gpus, slots_per_gpu=per_gpu), given_load)
        for given_load in (renamed, plain)
    )
    assert found.tolist() == expected.tolist()


@given(LOADS)
def test_same_load_same_plan(load: Load) -> None:
    """Twice the same call: twice the same placement; scaling by 2 changes nothing either."""
    plans = [
        solve_placement(given_load, num_gpus=3, slots_per_gpu=load.shape[1])
        for given_load in (load, load.copy(), 2 * load)
    ]
    assert plans[0].placement == plans[1].placement == plans[2].placement


# --- worked examples ---


def test_the_hottest_expert_gets_the_redundant_slots() -> None:
    """90, 10, 10, 10 on 2 x 3 slots: three copies of the first, two of them on one GPU."""
    plan = solve_placement([90, 10, 10, 10], num_gpus=2, slots_per_gpu=3)
    assert plan.placement.copies.tolist() == [[3, 1, 1, 1]]
    assert plan.placement.slots.tolist() == [[0, 0, 3], [0, 1, 2]]
    assert (float(plan.makespan), float(plan.bound)) == (70.0, 60.0)


def test_balance_is_mean_over_max_per_layer() -> None:
    """100 and 200 on one GPU each balance to 0.75 in every layer."""
    plan = solve_placement([[100, 200], [200, 100]], num_gpus=2, slots_per_gpu=1)
    assert plan.balance.tolist() == [0.75, 0.75]
    assert plan.status.tolist() == [Status.OPTIMAL, Status.OPTIMAL]  # 200 is in one slot


def test_a_makespan_at_the_bound_is_optimal() -> None:
    """Perfect balance is proven by the mean; the status has the axes of the makespan."""
    plan = solve_placement([[1, 1, 2], [0, 0, 0], [9, 3, 1]], num_gpus=2, slots_per_gpu=2)
    assert plan.status.tolist() == [Status.OPTIMAL, Status.OPTIMAL, Status.FEASIBLE]
    assert plan.status.dtype == np.int8
    alone = solve_placement([1, 1, 2], num_gpus=2, slots_per_gpu=2)
    assert (alone.status.shape, int(alone.status)) == ((), Status.OPTIMAL)


def test_copies_that_share_a_gpu_are_counted() -> None:
    """Three copies of an expert on one GPU are two duplicates; layers add up."""
    plan = solve_placement([[9, 1], [9, 1]], num_gpus=1, slots_per_gpu=4)
    assert plan.placement.slots.tolist() == [[[0, 0, 0, 1]]] * 2
    assert plan.duplicates == 4
    assert solve_placement([[1, 1]], num_gpus=2, slots_per_gpu=1).duplicates == 0


@pytest.mark.parametrize("shape", [(4, 2), (3, 4), (1, 9), (8, 1)])
def test_no_load_is_spread_evenly(shape: tuple[int, int]) -> None:
    """Without load every expert has as many copies as any other, up to one; balance is 1."""
    gpus, per_gpu = shape
    plan = solve_placement(np.zeros((2, 5)), num_gpus=gpus, slots_per_gpu=per_gpu)
    copies = plan.placement.copies
    assert (copies.max(axis=1) - copies.min(axis=1) <= 1).all()
    assert plan.makespan.tolist() == plan.bound.tolist() == [0, 0]
    assert plan.balance.tolist() == [1, 1]


def test_one_layer_without_load() -> None:
    """A dense layer among others is spread evenly and leaves them alone."""
    plan = solve_placement([[8, 1, 1], [0, 0, 0]], num_gpus=3, slots_per_gpu=2)
    assert plan.placement.copies.tolist() == [[4, 1, 1], [2, 2, 2]]
    assert plan.balance[1] == 1


def test_one_hot_load() -> None:
    """Redundant slots go to the only expert with load; its copies go to different GPUs first."""
    plan = solve_placement([0, 12, 0, 0], num_gpus=4, slots_per_gpu=2)
    assert plan.placement.copies.tolist() == [[1, 5, 1, 1]]
    assert plan.placement.candidates.tolist() == [[1, 4, 1, 1]]
    assert (float(plan.makespan), float(plan.bound)) == (4.8, 3.0)


def test_one_gpu() -> None:
    """On one GPU everything is balanced."""
    plan = solve_placement([3, 2, 1], num_gpus=1, slots_per_gpu=4)
    assert sorted(plan.placement.slots.ravel().tolist()) == [0, 0, 1, 2]
    assert (float(plan.makespan), float(plan.balance)) == (6.0, 1.0)


def test_more_gpus_than_an_expert_has_load() -> None:
    """An expert may have more copies than there are GPUs; loads stay exact beyond 2^31."""
    plan = solve_placement([2**40, 1], num_gpus=2, slots_per_gpu=3)
    assert plan.placement.copies.tolist() == [[5, 1]]
    assert float(plan.bound) == (2**40 + 1) / 2


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint64, np.float32, np.float64])
def test_any_numbers_in_any_order(dtype: type) -> None:
    """Types and memory orders make no difference, and the load is not written to."""
    load: NDArray[Any] = np.array([[5, 3, 9, 1], [0, 2, 2, 8]], dtype=dtype)
    expected = solve_placement(load.tolist(), num_gpus=2, slots_per_gpu=3)
    for variant in (load, np.asfortranarray(load), np.repeat(load, 2, axis=1)[:, ::2]):
        before = variant.copy()
        plan = solve_placement(variant, num_gpus=2, slots_per_gpu=3, method=DeepSeek())
        assert plan.placement == expected.placement
        assert np.array_equal(variant, before)


def test_recorded_loads(recorded_load: Callable[[str], NDArray[np.int64]]) -> None:
    """Recorded loads, some beyond 2^31 in sum, balance above 0.9 in all layers on 32 x 9 slots."""
    for name in ("decode_in1000out1000", "decode_in2000out100", "prefill_in512", "prefill_in4096"):
        load = recorded_load(name)
        assert load.sum() > 2**30
        plan = solve_placement(load, num_gpus=32, slots_per_gpu=9)
        assert plan.placement.slots.shape == (58, 32, 9)
        assert (plan.placement.redundant() == 32).all()
        assert (plan.balance > 0.9).all()
        assert plan.bound.tolist() == (load.sum(axis=1) / 32).tolist()


# --- what is refused ---


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ([[1, 2], [3, float("nan")]], "layer 1, expert 1 has load nan"),
        ([1, float("inf")], "^expert 1 has load inf"),
        ([1, -float("inf")], "^expert 1 has load -inf"),
        ([[1, -2]], "layer 0, expert 1 has load -2"),
        (np.zeros((2, 0)), r"not float64 of shape \(2, 0\)"),
        ([], r"shape \(0,\)"),
        ([[[[1]]]], r"shape \(1, 1, 1, 1\)"),
        (3, r"shape \(\)"),
        ([True, False], "not bool"),
        (["1"], "not <U1"),
        ([None], "not object"),
        ([1j], "not complex128"),
        ([[1], [1, 2]], "load has rows of different lengths"),
        ([1e308] * 4, "the loads have no finite sum; scale them down"),
        ([[1.0, 1.0], [1.7e308, 1.7e308]], "the loads of layer 1 have no finite sum"),
        pytest.param(
            np.array([[1, np.longdouble("1e4000")]]),
            "the loads of layer 0 have no finite sum",
            marks=pytest.mark.skipif(
                np.finfo(np.longdouble).maxexp < 14000, reason="its range is a double's"
            ),
        ),
    ],
)
def test_bad_loads_are_refused(load: Any, message: str) -> None:
    """What is no load is refused with the place and the value."""
    with pytest.raises(InvalidTokensError, match=message):
        solve_placement(load, num_gpus=2, slots_per_gpu=4)
    with pytest.raises(InvalidTokensError, match=message):
        as_load(load)


def test_fewer_slots_than_experts() -> None:
    """No expert is lost: too few slots are an error that says how many are missing."""
    with pytest.raises(InfeasibleError, match=r"256 experts.*255: 1 missing"):
        solve_placement(np.ones(256), num_gpus=3, slots_per_gpu=85)
    assert solve_placement(np.ones(256), num_gpus=3, slots_per_gpu=86).placement.num_experts == 256


@pytest.mark.parametrize(
    ("gpus", "slots", "message"),
    [
        (0, 4, "num_gpus must be at least 1, not 0"),
        (-1, 4, "num_gpus must be at least 1, not -1"),
        (4, 0, "slots_per_gpu must be at least 1, not 0"),
    ],
)
def test_sizes_must_be_positive(gpus: int, slots: int, message: str) -> None:
    """No GPUs or no slots are refused by name."""
    with pytest.raises(ValueError, match=message):
        solve_placement([1, 1], num_gpus=gpus, slots_per_gpu=slots)


@pytest.mark.parametrize("size", [2.0, "2", None, [2]])
def test_sizes_must_be_integers(size: Any) -> None:
    """Floats and other things are refused by name; numpy's integers are integers."""
    with pytest.raises(TypeError, match="num_gpus must be an integer, not"):
        solve_placement([1, 1], num_gpus=size, slots_per_gpu=2)
    with pytest.raises(TypeError, match="slots_per_gpu must be an integer, not"):
        solve_placement([1, 1], num_gpus=2, slots_per_gpu=size)
    two: Any = np.uint8(2)
    assert solve_placement([1, 1], num_gpus=two, slots_per_gpu=two).placement.num_gpus == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threads": 1.5}, TypeError, r"threads must be an integer, not 1\.5"),
        ({"threads": 0}, ValueError, "threads must be at least 1, not 0"),
        ({"max_moves": 1.5}, TypeError, r"max_moves must be an integer, not 1\.5"),
        ({"max_moves": -1}, ValueError, "max_moves must be at least 0, not -1"),
        ({"split": "half"}, ValueError, "split is 'equal' or 'free', not 'half'"),
        ({"over_windows": True}, ValueError, "from 0 to 1, not True"),
        ({"over_windows": np.array([0.5, 0.6])}, ValueError, "from 0 to 1, not array"),
        ({"method": "search:work=inf"}, ValueError, "search: work='inf' is not an integer"),
        ({"method": "search:within=x"}, ValueError, "search: within='x' is not a number"),
    ],
)
def test_options_of_other_types(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """What is no such number is named."""
    place: Any = partial(
        solve_placement, [5, 3, 2], num_gpus=2, slots_per_gpu=2, previous=[[0, 1], [2, 0]]
    )
    with pytest.raises(error, match=message):
        place(**{"method": "search"} | options)


def test_any_number_of_threads_and_moves_will_do() -> None:
    """More threads than layers have nothing to do, and moves are no more than it takes."""
    place = partial(
        solve_placement, [5, 3, 2], num_gpus=2, slots_per_gpu=2, previous=[[0, 1], [2, 0]]
    )
    for method in ("search", "highs"):
        assert float(place(method=method, threads=10**30).makespan) == 5.5
    assert float(place(method="search", max_moves=10**30).makespan) == 5.5


class NoPlacer:
    """A placer that must not be called."""

    traits: ClassVar[PlacerTraits] = PlacerTraits("none")

    def place(self, problem: PlacementProblem) -> Placed:
        """Fail."""
        raise AssertionError("the work was begun")


@pytest.mark.parametrize(
    ("experts", "gpus", "slots", "message"),
    [
        (2, _core.MAX_GPUS + 1, 8, "2 experts per layer on 1025 GPUs; at most .* 1024 GPUs"),
        (_core.MAX_EXPERTS + 1, 1024, 8, "4097 experts per layer .*; at most 4096 experts"),
        (2, 1024, 2**22, "1024 x 4194304 slots; physical ids are int32"),
    ],
)
def test_limits_are_checked_before_the_work(
    experts: int, gpus: int, slots: int, message: str
) -> None:
    """More GPUs, experts or slots than are supported are refused before a placer is called."""
    with pytest.raises(InvalidPlacementError, match=message):
        solve_placement(np.ones(experts), num_gpus=gpus, slots_per_gpu=slots, method=NoPlacer())


def test_an_unknown_method_lists_the_known() -> None:
    """A misspelt method is an error that names the methods; each has a line that describes it."""
    with pytest.raises(
        ValueError, match=r"unknown placement method 'deepsek'; known: search, deepseek"
    ):
        solve_placement([1], num_gpus=1, slots_per_gpu=1, method="deepsek")
    for wrong in (DeepSeek, 3, None):
        with pytest.raises(TypeError, match="method must be a name or an instance of a method"):
            solve_placement([1], num_gpus=1, slots_per_gpu=1, method=wrong)  # type: ignore[arg-type]
    methods = placement_methods()
    assert "deepseek" in methods
    assert all(traits.summary for traits in methods.values())


def test_options_by_name() -> None:
    """A name takes options of the type of their defaults; what is wrong is named."""
    assert resolve_placer("deepseek:form=global") == DeepSeek(form="global")
    with pytest.raises(ValueError, match="deepseek has no option 'forms'; it has: form"):
        resolve_placer("deepseek:forms=global")
    with pytest.raises(ValueError, match="flashlb: depth='x' is not an integer"):
        resolve_placer("flashlb:depth=x")


class Backwards:
    """A placer of one's own: slot by slot, the experts backwards."""

    traits: ClassVar[PlacerTraits] = PlacerTraits("experts backwards")

    def place(self, problem: PlacementProblem) -> Placed:
        """Place all layers alike."""
        experts = problem.load.shape[1]
        forwards = first_placement(*problem.shape, num_experts=experts)
        return Placed(experts - 1 - forwards, note="backwards")


def test_a_placer_of_ones_own() -> None:
    """An instance that follows the protocol is used as it is, and measured like the others."""
    plan = solve_placement([[4, 2, 2]], num_gpus=2, slots_per_gpu=2, method=Backwards())
    assert plan.placement == Placement([[[2, 1], [0, 2]]])
    assert plan.makespan.tolist() == [5.0]
    assert plan.note == "backwards"


class OneSlot:
    """A placer that answers in the wrong shape."""

    traits: ClassVar[PlacerTraits] = PlacerTraits("one slot")

    def place(self, problem: PlacementProblem) -> Placed:
        """Place one expert."""
        return Placed(np.zeros((1, 1, 1), np.int32))


class Claims:
    """A placer that says it keeps groups to nodes, and does not."""

    traits: ClassVar[PlacerTraits] = PlacerTraits("claims")

    def place(self, problem: PlacementProblem) -> Placed:
        """Place one layer."""
        return Placed(np.array([[[0, 2], [1, 3]]], np.int32), nodes=2)


def test_an_answer_below_its_bound_is_refused() -> None:
    """A placement with a makespan that none on such nodes has is not what it is said to be."""
    place = partial(
        solve_placement, num_gpus=2, slots_per_gpu=2, num_nodes=2, num_groups=2, method=Claims()
    )
    assert float(place([5, 5, 5, 5]).makespan) == 10
    with pytest.raises(InvalidPlacementError, match="layer 0: the makespan of its answer is 6"):
        place([5, 5, 1, 1])


def test_a_placer_that_answers_in_another_shape() -> None:
    """It is refused, with the shape that was asked for."""
    with pytest.raises(InvalidPlacementError, match=r"shape \(1, 1, 1\) where \(1, 2, 1\) was"):
        solve_placement([1], num_gpus=2, slots_per_gpu=1, method=OneSlot())


def test_rounding_decides_nothing() -> None:
    """One GPU holds every load, so each layer is optimal, whatever the order of its sums."""
    load = np.random.default_rng(0).random((200, 16))
    plan = solve_placement(load, num_gpus=1, slots_per_gpu=20)
    assert (plan.status == Status.OPTIMAL).all()
    assert (plan.makespan >= plan.bound).all()
    assert (plan.balance <= 1).all()
    thirds = solve_placement(np.full((3, 256), 1 / 3), num_gpus=8, slots_per_gpu=33)
    assert (thirds.status == Status.OPTIMAL).all()


# --- nodes, groups, windows, the placement before ---


@pytest.mark.parametrize(
    ("nodes", "groups", "message"),
    [
        (3, 1, "3 nodes do not divide 8 GPUs; they are of equal size, so 2 or 4 would do"),
        (16, 1, "16 nodes do not divide 8 GPUs; they are of equal size, so 8 would do"),
        (1, 5, "5 groups do not divide 16 experts; they are of equal size, so 4 or 8 would do"),
        (0, 1, "num_nodes must be at least 1, not 0"),
        (1, 0, "num_groups must be at least 1, not 0"),
    ],
)
def test_nodes_and_groups_are_of_equal_size(nodes: int, groups: int, message: str) -> None:
    """Nodes must divide the GPUs and groups the experts; the message says what would."""
    with pytest.raises(ValueError, match=message):
        solve_placement(
            np.ones(16), num_gpus=8, slots_per_gpu=2, num_nodes=nodes, num_groups=groups
        )


def test_windows_are_placed_by_their_mean() -> None:
    """Methods without windows place for the mean load; the plan measures every window."""
    windows = np.random.default_rng(0).integers(0, 99, (3, 2, 8))
    plan = solve_placement(windows, num_gpus=4, slots_per_gpu=3)
    mean = solve_placement(windows.mean(axis=0), num_gpus=4, slots_per_gpu=3)
    assert plan.placement == mean.placement
    assert plan.metrics.peak.tolist() == mean.makespan.tolist()
    each = [PlacementMetrics.of(plan.placement, load).peak for load in windows]
    assert plan.makespan.tolist() == np.mean(each, axis=0).tolist()
    one = solve_placement(windows[:1], num_gpus=4, slots_per_gpu=3)
    assert one.placement == solve_placement(windows[0], num_gpus=4, slots_per_gpu=3).placement
    with pytest.raises(InvalidTokensError, match="window 1, layer 0, expert 2 has load -1"):
        solve_placement([[[1, 1, 1]], [[1, 1, -1]]], num_gpus=1, slots_per_gpu=3)


def test_moves_and_the_state_before() -> None:
    """Moves count the weights each GPU must receive; what was served is measured on the load."""
    now = [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]
    load = [[4, 1, 1, 4], [9, 9, 0, 0]]
    plan = solve_placement(load, num_gpus=2, slots_per_gpu=2, previous=now)
    assert plan.placement.slots.tolist() == [[[0, 1], [3, 2]], [[0, 2], [1, 3]]]
    assert plan.moves is not None
    assert plan.moves.tolist() == [0, 2]
    assert plan.before is not None
    assert plan.before.peak.tolist() == [5, 18]
    alone = solve_placement(load[1], num_gpus=2, slots_per_gpu=2, previous=now[1])
    assert alone.moves is not None
    assert (alone.moves.shape, int(alone.moves)) == ((), 2)
    untold = solve_placement(load, num_gpus=2, slots_per_gpu=2)
    assert untold.moves is None
    assert untold.before is None


@pytest.mark.parametrize(
    "method", ["search", "swift", "flashlb", "ascend-default", "routing-aware"]
)
def test_slots_that_stay_empty_raise_the_bound(method: str) -> None:
    """A dead GPU takes no load, in the answer nor in its bound; groups count beside."""
    now = [[0, 1], [2, 0], [-1, -1], [-1, -1]]
    place = partial(solve_placement, [4, 4, 4], num_gpus=4, slots_per_gpu=2, previous=now)
    batch = {"tokens_per_batch": 4, "top_k": 1} if method == "routing-aware" else {}
    plan = place(method=method, **batch)  # type: ignore[arg-type]
    assert (float(plan.makespan), float(plan.bound)) == (6, 6)
    filled = place(method="deepseek")
    assert float(filled.bound) == 3
    assert (filled.placement.slots >= 0).all()


def test_a_bound_counts_groups_and_dead_gpus() -> None:
    """Whichever of the two is larger."""
    load, now = [9, 9, 1, 1], [[0, 1], [0, 1], [2, 3], [-1, -1]]
    place = partial(
        solve_placement, num_gpus=4, slots_per_gpu=2, num_nodes=2, previous=now, method="search"
    )
    assert [float(place(load, num_groups=groups).bound) for groups in (2, 1)] == [9, 20 / 3]


@pytest.mark.parametrize(
    ("previous", "message"),
    [
        ([[0, 1]], r"previous must have slots \[1, 2, 2\] \(layers, GPUs, slots\), not of shape"),
        ([[[0, 1], [2, 3]]] * 2, "previous must have slots"),
        ([[0, 1], [2, 4]], "previous: layer 0, GPU 1, slot 1: expert 4 is out of range"),
        ([[0, 1], [2]], "previous has rows of different lengths"),
        ([[0.0, 1.0], [2.0, 3.0]], "previous: slots must be integers, not float64"),
    ],
)
def test_a_bad_previous_placement_is_refused(previous: Any, message: str) -> None:
    """What cannot have been served on these GPUs is refused, naming the place."""
    with pytest.raises(InvalidPlacementError, match=message):
        solve_placement([1, 1, 1, 1], num_gpus=2, slots_per_gpu=2, previous=previous)


def test_a_curve_of_moves() -> None:
    """From a placement or its slots; layers whose makespans have no finite sum are refused."""
    now = [[0, 1], [2, 3]]
    curves = [move_curve([9, 9, 1, 1], previous) for previous in (now, Placement(now))]
    assert [curve.makespan.tolist() for curve in curves] == [[18, 10]] * 2
    with pytest.raises(InvalidTokensError, match="the layers' makespans have no finite sum"):
        move_curve([[8e307, 8e307, 1, 1]] * 2, [now] * 2)
    with pytest.raises(InvalidPlacementError, match=r"previous must have slots .* shape \(2,\)"):
        move_curve([1, 1], [0, 1])


# --- distinct copies ---

SHAPES = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(1, 6))


@given(LOADS, SHAPES, st.sampled_from(["deepseek", "trtllm", "swift"]))
def test_distinct_copies(load: Load, shape: tuple[int, int, int], method: str) -> None:
    """No GPU holds an expert twice, none is lost, and slots stay empty only if nothing fits."""
    nodes, gpus_per_node, per_gpu = shape
    gpus = nodes * gpus_per_node
    experts = load.shape[1]
    per_gpu = max(per_gpu, -(-experts // gpus))
    groups = experts if experts % nodes == 0 else 1
    place = partial(
        solve_placement,
        load,
        num_gpus=gpus,
        slots_per_gpu=per_gpu,
        num_nodes=nodes,
        num_groups=groups,
        method=method,
    )
    plan = place(distinct=True)
    assert plan.duplicates == 0
    assert (plan.placement.copies >= 1).all()
    faithful = place()
    if faithful.duplicates == 0:
        assert plan.placement == faithful.placement
    hierarchical = method == "deepseek" and groups % nodes == 0
    kinds = experts // nodes if hierarchical else experts
    empty = (plan.placement.slots < 0).sum(axis=(1, 2))
    assert (empty == max(0, gpus * (per_gpu - kinds))).all()
    if hierarchical:
        of_node = plan.placement.slots.reshape(len(load), nodes, -1)
        for layer in of_node:
            homes = [set(node.tolist()) - {-1} for node in layer]
            assert sum(map(len, homes)) == experts


def test_distinct_keeps_the_peak() -> None:
    """On loads without extremes the repair leaves the peak where it was, to 1 % at most."""
    load = np.random.default_rng(0).lognormal(0, 1, (200, 32))
    shared = repaired = 0.0
    for gpus, per_gpu in ((4, 10), (8, 5), (8, 6)):
        plain = solve_placement(load, num_gpus=gpus, slots_per_gpu=per_gpu)
        plan = solve_placement(load, num_gpus=gpus, slots_per_gpu=per_gpu, distinct=True)
        assert plain.duplicates > 0
        assert plan.duplicates == 0
        several = plain.placement.copies.max(axis=1) <= gpus
        rise = (plan.makespan / plain.makespan)[several]
        assert rise.max() < 1.1
        assert rise.mean() < 1.001
        shared, repaired = shared + plain.makespan.sum(), repaired + plan.makespan.sum()
    assert repaired < 1.001 * shared


def test_distinct_with_more_copies_than_gpus() -> None:
    """An expert has one copy per GPU at most: the others get what is over."""
    plan = solve_placement([90, 6, 2, 1], num_gpus=2, slots_per_gpu=4, distinct=True)
    assert plan.placement.copies.tolist() == [[2, 2, 2, 2]]
    assert float(plan.makespan) == 49.5
    alone = solve_placement([5, 1], num_gpus=2, slots_per_gpu=3, distinct=True)
    assert np.sort(alone.placement.slots).tolist() == [[-1, 0, 1]] * 2


def test_distinct_leaves_a_dead_gpu_empty() -> None:
    """Slots that were empty before are not filled by the repair."""
    now = [[0, 1, 2], [3, 0, 1], [-1, -1, -1]]
    plan = solve_placement(
        [50, 1, 1, 1], num_gpus=3, slots_per_gpu=3, previous=now, method="swift", distinct=True
    )
    assert plan.placement.slots[2].tolist() == [-1, -1, -1]
    assert plan.duplicates == 0
