"""Placements: what is derived from the slots, what is refused, and that nothing changes later."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.errors import InfeasibleError, InvalidPlacementError
from eplb_opt.placement import EMPTY, Placement, require_slots, slots_for
from eplb_opt.testing import Problem, placements

# --- what is derived ---


def test_worked_example() -> None:
    """A small placement with a duplicate and an empty slot has the tables that one reads off it."""
    placement = Placement([[[0, 1, 1], [2, 0, -1]], [[1, 0, 2], [2, 2, 1]]])
    assert (placement.num_layers, placement.num_gpus, placement.slots_per_gpu) == (2, 2, 3)
    assert placement.num_experts == 3
    assert placement.layered
    assert placement.expert_of.tolist() == [[0, 1, 1, 2, 0, -1], [1, 0, 2, 2, 2, 1]]
    assert placement.copies.tolist() == [[2, 2, 1], [1, 2, 3]]
    assert placement.candidates.tolist() == [[2, 1, 1], [1, 2, 2]]
    assert placement.replica_index[0, :5].tolist() == [0, 0, 1, 0, 1]
    assert placement.replica_index[1].tolist() == [0, 0, 0, 1, 2, 1]
    assert placement.logical_to_physical.tolist() == [
        [[0, 4, -1], [1, 2, -1], [3, -1, -1]],
        [[1, -1, -1], [0, 5, -1], [2, 3, 4]],
    ]
    assert placement.replicas(2, layer=1).tolist() == [2, 3, 4]
    assert placement.redundant().tolist() == [2, 3]
    assert list(placement.duplicates()) == [(0, 0, 1), (1, 1, 2)]
    assert repr(placement) == "Placement(layers=2, gpus=2, slots_per_gpu=3, experts=3)"


@given(placements())
def test_tables_agree_with_a_look_at_every_slot(placement: Placement) -> None:
    """Copies, candidates, replicas and their numbers are what a loop over the slots counts."""
    for layer, gpus in enumerate(placement.expert_of.reshape(-1, *placement.slots.shape[-2:])):
        for expert in range(placement.num_experts):
            homes = [
                (gpu * placement.slots_per_gpu + slot, gpu)
                for gpu, row in enumerate(gpus.tolist())
                for slot, held in enumerate(row)
                if held == expert
            ]
            physical = [slot for slot, _ in homes]
            assert placement.replicas(expert, layer).tolist() == physical
            assert placement.copies[layer, expert] == len(physical)
            assert placement.candidates[layer, expert] == len({gpu for _, gpu in homes})
            numbers = placement.replica_index[layer, physical].tolist()
            assert numbers == list(range(len(physical)))


@given(placements())
def test_duplicates_are_what_candidates_lack(placement: Placement) -> None:
    """Every slot is a candidate, a duplicate on its GPU, or empty."""
    duplicates = len(list(placement.duplicates()))
    assert placement.copies.sum() - placement.candidates.sum() == duplicates
    assert placement.copies.sum() == (placement.expert_of >= 0).sum()


@given(placements(layered=True))
def test_redundant_slots_are_filled_ones_beyond_the_experts(placement: Placement) -> None:
    """With every expert placed, redundant = filled slots - experts."""
    filled = (placement.expert_of >= 0).sum(axis=1)
    assert placement.redundant().tolist() == (filled - placement.num_experts).tolist()


def test_a_dead_gpu_and_its_experts() -> None:
    """A dead GPU keeps its place; experts that it took along have no replica and no redundancy."""
    placement = Placement([[0, 1], [-1, -1], [0, 3]], num_experts=4, allow_missing=True)
    assert placement.copies.tolist() == [[2, 1, 0, 1]]
    assert placement.redundant().tolist() == [1]
    assert placement.replicas(2).size == 0
    nobody = Placement([[-1], [-1]], num_experts=2, allow_missing=True)
    assert nobody.copies.tolist() == [[0, 0]]
    assert nobody.replicas(1).size == 0


def test_an_expert_on_more_gpus_than_others_have_copies() -> None:
    """Tables are as wide as the most copies; shorter lists end in -1."""
    placement = Placement([[0, 1], [0, 2], [0, 3]])
    assert placement.logical_to_physical.shape == (1, 4, 3)
    assert placement.logical_to_physical[0, 3].tolist() == [5, -1, -1]


# --- other ways to make one ---


@given(placements())
def test_round_trip_through_the_physical_to_logical_map(placement: Placement) -> None:
    """The engines' map gives the placement back."""
    flat = placement.slots.reshape(*placement.slots.shape[:-2], -1)
    again = Placement.from_physical_to_logical(
        flat, num_gpus=placement.num_gpus, num_experts=placement.num_experts
    )
    assert again == placement
    assert again.layered == placement.layered


@given(placements())
def test_a_mask_says_who_holds_what(placement: Placement) -> None:
    """From a GPU x expert matrix: the same holders, each expert once a GPU, in ascending order."""
    layers, gpus, experts = placement.num_layers, placement.num_gpus, placement.num_experts
    mask = np.zeros((layers, gpus, experts), np.bool_)
    for layer in range(layers):
        for gpu, row in enumerate(placement.expert_of[layer].reshape(gpus, -1)):
            mask[layer, gpu, row[row >= 0]] = True
    made = Placement.from_mask(mask if placement.layered else mask[0])
    assert made.layered == placement.layered
    assert made.candidates.tolist() == placement.candidates.tolist()
    assert made.copies.tolist() == made.candidates.tolist()
    for layer in range(layers):
        for gpu, row in enumerate(made.expert_of[layer].reshape(gpus, -1)):
            held = row[row >= 0].tolist()
            assert held == np.flatnonzero(mask[layer, gpu]).tolist()
            assert row[: len(held)].tolist() == held


def test_missing_experts_are_accepted_on_request_only() -> None:
    """Every way to make a placement takes allow_missing, which its error recommends."""
    mask = np.array([[True, False, False], [False, False, True]])
    ways: list[Callable[..., Placement]] = [
        partial(Placement, [[0], [2]]),
        partial(Placement.from_physical_to_logical, [0, 2], num_gpus=2),
        partial(Placement.from_mask, mask),
    ]
    for make in ways:
        with pytest.raises(InvalidPlacementError, match=r"expert 1 has no replica.*allow_missing"):
            make()
        assert make(allow_missing=True).copies.tolist() == [[1, 0, 1]]


def test_real_map_of_the_eplb_readme(shared_data: Path) -> None:
    """DeepSeek's published map is a placement with the copies that are published beside it."""
    golden = json.loads((shared_data / "golden_cases.json").read_text())["eplb_readme"]
    placement = Placement.from_physical_to_logical(golden["phy2log"], num_gpus=golden["num_gpus"])
    assert placement.copies.tolist() == golden["logcnt"]
    assert placement.redundant().tolist() == [4, 4]


def test_real_placements(real_problems: dict[str, Problem]) -> None:
    """Production placements of 4 to 64 GPUs have their experts' copies, up to 17 of one."""
    omni = [problem.placement for name, problem in real_problems.items() if " on " not in name]
    assert len(omni) == 24
    assert {placement.num_layers for placement in omni} == {58}
    assert {placement.num_gpus for placement in omni} == {4, 8, 16, 32, 64}
    assert max(int(placement.copies.max()) for placement in omni) == 17
    assert not any(list(placement.duplicates()) for placement in omni)


# --- immutable, compared by value ---


def test_nothing_can_be_written_to() -> None:
    """The slots and every derived table are read-only."""
    placement = Placement([[0, 1], [1, 0]])
    for table in (
        placement.slots,
        placement.expert_of,
        placement.copies,
        placement.candidates,
        placement.replica_index,
        placement.logical_to_physical,
        placement.replicas(0),
    ):
        with pytest.raises(ValueError, match="read-only"):
            table[...] = 0


def test_the_given_array_stays_the_callers() -> None:
    """The array is copied: writing to it later changes nothing, and it is not made read-only."""
    slots = np.array([[0, 1], [1, 0]], dtype=np.int32)
    placement = Placement(slots)
    slots[:] = 7
    assert placement.slots.tolist() == [[0, 1], [1, 0]]


@given(placements())
def test_copies_and_pickles_are_equal(placement: Placement) -> None:
    """A pickled or copied placement equals the first."""
    for again in (pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement)):
        assert again == placement
        assert again.layered == placement.layered
        assert again.slots.tolist() == placement.slots.tolist()


def test_a_pickle_keeps_missing_experts() -> None:
    """Missing experts that were allowed once are allowed again."""
    placement = Placement([[0], [2]], num_experts=4, allow_missing=True)
    assert pickle.loads(pickle.dumps(placement)) == placement


def test_equality_is_by_value() -> None:
    """Equal means same slots, same experts and same axes; other types are never equal."""
    placement = Placement([[0, 1], [1, 0]])
    assert placement == Placement(np.array([[0, 1], [1, 0]], dtype=np.uint8))
    assert placement != Placement([[0, 1], [0, 1]])
    assert placement != Placement([[[0, 1], [1, 0]]])
    assert placement != Placement([[0, 1], [1, 0]], num_experts=3, allow_missing=True)
    assert placement != Placement([[0, 1, 1, 0]])
    assert placement != "placement"
    with pytest.raises(TypeError, match="unhashable"):
        hash(placement)


# --- what is accepted and refused ---


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint64])
def test_any_integers_in_any_order(dtype: type[np.integer]) -> None:
    """Integer types and memory orders make no difference."""
    slots = np.arange(12, dtype=dtype).reshape(2, 2, 3) % 6
    for given_slots in (slots, np.asfortranarray(slots), slots[::-1, :, ::-1][::-1, :, ::-1]):
        placement = Placement(given_slots)
        assert placement.slots.dtype == np.int32
        assert placement.slots.tolist() == slots.tolist()


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 1], r"\[gpus, slots\].*\(2,\)"),
        ([[[[0]]]], r"\(1, 1, 1, 1\)"),
        (np.zeros((0, 2), int), r"slots is empty, of shape \(0, 2\)"),
        (np.zeros((2, 0), int), r"\(2, 0\)"),
        ([[0, 1], [2]], "different lengths"),
        ([[0.0, 1.0]], "integers, not float64"),
        ([[True, False]], "integers, not bool"),
        ([["a"]], "integers, not <U1"),
        ([[None]], "integers, not object"),
        ([[2**70]], "integers, not object"),
        ([[0, -2]], "layer 0, GPU 0, slot 1: expert -2 is out of range"),
        ([[[0, 1]], [[0, 2]]], "layer 0: expert 2 has no replica"),
        ([[[0, 1], [2, 3]], [[0, 1], [1, 1]]], r"layer 1: expert 2 has no replica.*1 more"),
        ([[-1, -1]], "no slot is filled: give num_experts"),
        ([[4096]], "4097 experts"),
        (np.array([[2**64 - 1]], dtype=np.uint64), r"experts per layer"),
        (np.zeros((1025, 1), int), "1025 GPUs; at most 1024"),
    ],
)
def test_bad_slots_are_refused(slots: object, message: str) -> None:
    """What is no placement is refused with what is wrong and where."""
    with pytest.raises(InvalidPlacementError, match=message):
        Placement(slots)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_experts", "message"),
    [
        (3, "layer 0, GPU 1, slot 0: expert 3 is out of range; ids are 0 to 2"),
        (5, "layer 0: expert 4 has no replica"),
        (0, "0 experts per layer; 1 to 4096"),
        (-1, "-1 experts"),
    ],
)
def test_ids_must_fit_the_number_of_experts(num_experts: int, message: str) -> None:
    """An id beyond the experts, or an expert without id, is an error, never dropped."""
    with pytest.raises(InvalidPlacementError, match=message):
        Placement([[0, 1, 2], [3, 0, 1]], num_experts=num_experts)


@pytest.mark.parametrize("gpus", [1, _core.MAX_GPUS])
def test_the_largest_sizes_are_accepted(gpus: int) -> None:
    """Both limits can be reached."""
    per_gpu = _core.MAX_EXPERTS // gpus
    slots = np.arange(_core.MAX_EXPERTS).reshape(gpus, per_gpu)
    assert Placement(slots).num_experts == _core.MAX_EXPERTS


@pytest.mark.parametrize(
    "holds",
    [[[0, 1]], [True, False], np.zeros((2, 3), np.bool_), np.zeros((2, 0), np.bool_), [[1.0]]],
)
def test_bad_masks_are_refused(holds: object) -> None:
    """A mask that is not bool, not 2-D or 3-D, or empty is refused."""
    with pytest.raises(InvalidPlacementError, match="holds"):
        Placement.from_mask(holds)  # type: ignore[arg-type]


@pytest.mark.parametrize("p2l", [[[[0, 1]]], np.zeros((1, 0), int), 3, [0.5], [[0, 1], [0]]])
def test_bad_maps_are_refused(p2l: object) -> None:
    """A map that is not integers [layers, P] or [P] is refused."""
    with pytest.raises(InvalidPlacementError, match="physical_to_logical"):
        Placement.from_physical_to_logical(p2l, num_gpus=2)  # type: ignore[arg-type]


def test_slots_that_do_not_divide_name_counts_that_do() -> None:
    """256 slots do not divide over 3 GPUs; 255 and 258 do."""
    with pytest.raises(InvalidPlacementError, match=r"256 slots .* 3 GPUs; 255 or 258 would"):
        Placement.from_physical_to_logical(np.arange(256), num_gpus=3)
    with pytest.raises(InvalidPlacementError, match=r"2 slots .* 3 GPUs; 3 would"):
        slots_for(2, 3)
    with pytest.raises(InvalidPlacementError, match="at least 1, not 0"):
        slots_for(4, 0)
    assert slots_for(288, 32) == 9


def test_fewer_slots_than_experts_say_how_many_are_missing() -> None:
    """The number of missing slots is named; as many as experts are enough."""
    with pytest.raises(InfeasibleError, match=r"256 experts.*there are 250: 6 missing"):
        require_slots(256, 250)
    require_slots(256, 256)


SMALL_INTEGERS: st.SearchStrategy[NDArray[np.int64]] = hnp.arrays(
    np.int64,
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    elements=st.integers(-2, 4),
)


@given(SMALL_INTEGERS, st.one_of(st.none(), st.integers(-1, 5)), st.booleans())
def test_any_array_is_a_placement_or_an_error_of_ours(
    slots: NDArray[np.int64], num_experts: int | None, allow_missing: bool
) -> None:
    """Whatever integers come: a placement that holds them, or InvalidPlacementError."""
    before = slots.copy()
    with suppress(InvalidPlacementError):
        placement = Placement(slots, num_experts, allow_missing=allow_missing)
        assert placement.slots.tolist() == slots.tolist()
        assert allow_missing or placement.copies.all()
        assert placement.copies.sum() == (slots != EMPTY).sum()
    assert np.array_equal(slots, before)


def test_drawn_problems_hold_what_they_promise(draw_problem: Callable[..., Problem]) -> None:
    """The problems that other tests draw can be served and have the shape asked for."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        problem = draw_problem(rng, 5, 4, 11, layers=3, batches=2)
        assert problem.tokens.shape == (2, 3, 11)
        assert not problem.tokens[:, problem.placement.copies == 0].any()
