"""Transfer plans: replayed they give the new placement, in the fewest rounds, without any loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt.errors import InvalidPlacementError
from eplb_opt.metrics import count_moves
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.placing import solve_placement
from eplb_opt.transfer import Links, TransferPlan, expert_bytes, plan_transfer, saving_per_step
from eplb_opt.workload import MODEL_SHAPES, model_shape

SIZE = 44_000_000


@st.composite
def pairs(
    draw: st.DrawFn, max_layers: int = 3, max_gpus: int = 6, max_slots: int = 4
) -> tuple[Placement, Placement]:
    """Draw two placements of one shape: copies, twice on a GPU too, empty slots, dead GPUs."""
    layers = draw(st.integers(1, max_layers))
    gpus, per_gpu = draw(st.integers(1, max_gpus)), draw(st.integers(1, max_slots))
    experts = draw(st.integers(1, gpus * per_gpu))
    spare = gpus * per_gpu - experts
    extra = st.lists(st.integers(EMPTY, experts - 1), min_size=spare, max_size=spare)

    def placement() -> Placement:
        rows = [draw(st.permutations([*range(experts), *draw(extra)])) for _ in range(layers)]
        return Placement(np.reshape(rows, (layers, gpus, per_gpu)), experts)

    return placement(), placement()


def batch_of(plan: TransferPlan) -> NDArray[np.int32]:
    """Return the batch of layers of every move."""
    return np.asarray(plan.layer // plan.layers_at_once)


def holders(placement: Placement, layer: int, expert: int) -> list[int]:
    """Return the GPUs that hold an expert."""
    slots = placement.slots.reshape(-1, placement.num_gpus, placement.slots_per_gpu)
    return [int(gpu) for gpu in np.flatnonzero((slots[layer] == expert).any(axis=-1))]


# --- laws ---


@given(pairs(), st.integers(1, 4), st.integers(1, 3))
def test_replayed_it_gives_the_new_placement(
    pair: tuple[Placement, Placement], per_node: int, at_once: int
) -> None:
    """Every GPU gets its experts, those that stay keep their slots, and no others move."""
    old, new = pair
    plan = plan_transfer(
        old, new, SIZE, links=Links(gpus_per_node=per_node), layers_at_once=at_once
    )
    assert plan.replay() == plan.placement
    after = plan.placement.slots
    assert np.array_equal(np.sort(after), np.sort(new.slots))
    for row_old, row_new, row in zip(
        old.slots.reshape(-1, old.slots_per_gpu),
        new.slots.reshape(-1, old.slots_per_gpu),
        after.reshape(-1, old.slots_per_gpu),
        strict=True,
    ):
        stay = Counter(row_old[row_old != EMPTY].tolist()) & Counter(row_new.tolist())
        assert ((row == row_old) & (row != EMPTY)).sum() == stay.total()
    moves = np.bincount(plan.layer, minlength=old.num_layers)
    assert np.array_equal(moves, count_moves(old, new))


@given(pairs(), st.integers(1, 4), st.integers(1, 3))
def test_each_round_is_a_matching(
    pair: tuple[Placement, Placement], per_node: int, at_once: int
) -> None:
    """Every GPU sends once at most and receives once at most, and what it sends it held before."""
    old, new = pair
    plan = plan_transfer(
        old, new, SIZE, links=Links(gpus_per_node=per_node), layers_at_once=at_once
    )
    batch = batch_of(plan)
    for end in (plan.sender, plan.receiver):
        assert len({*zip(batch, plan.round, end, strict=True)}) == len(end)
    assert (plan.round < plan.rounds[batch]).all()
    assert np.array_equal(old.slots[plan.layer, plan.sender, plan.sender_slot], plan.expert)
    assert np.array_equal(
        plan.placement.slots[plan.layer, plan.receiver, plan.receiver_slot], plan.expert
    )
    for layer, expert, receiver in zip(plan.layer, plan.expert, plan.receiver, strict=True):
        assert receiver not in holders(old, layer, expert)


@given(pairs(), st.integers(1, 3))
def test_no_weights_are_overwritten_while_they_are_needed(
    pair: tuple[Placement, Placement], at_once: int
) -> None:
    """Step by step, with so many buffers and no more, each send finds its expert in the slot."""
    old, new = pair
    plan = plan_transfer(old, new, SIZE, layers_at_once=at_once)
    most = 0
    for batch in range(len(plan.rounds)):
        slots = old.slots.copy()
        waiting: list[int] = []
        for at in range(plan.rounds[batch]):
            arrived = np.flatnonzero((batch_of(plan) == batch) & (plan.round == at)).tolist()
            for move in arrived:
                source = plan.layer[move], plan.sender[move], plan.sender_slot[move]
                assert slots[source] == plan.expert[move]
            waiting += arrived
            most = max(most, *Counter(plan.receiver[waiting].tolist()).values(), 0)
            for move in [move for move in waiting if plan.lands[move] == at]:
                target = plan.layer[move], plan.receiver[move], plan.receiver_slot[move]
                slots[target] = plan.expert[move]
                waiting.remove(move)
        assert not waiting
    assert plan.buffers == most
    assert plan.buffers <= plan.rounds.max()
    assert plan.buffer_bytes == most * SIZE


@settings(max_examples=60)
@given(pairs(max_layers=2, max_gpus=4, max_slots=3), st.integers(1, 2), st.integers(1, 2))
def test_no_choice_of_senders_does_with_fewer_rounds(
    pair: tuple[Placement, Placement], per_node: int, at_once: int
) -> None:
    """By trying all: rounds are the least largest degree; with so few, fewest leave their node."""
    old, new = pair
    links = Links(gpus_per_node=per_node)
    plan = plan_transfer(old, new, SIZE, links=links, layers_at_once=at_once)
    for batch, rounds in enumerate(plan.rounds):
        members = np.flatnonzero(batch_of(plan) == batch)
        choices = [holders(old, plan.layer[m], plan.expert[m]) for m in members]
        assume(math.prod(map(len, choices)) <= 4096)
        received = Counter(plan.receiver[members].tolist())
        least = min(
            (
                max([*Counter(senders).values(), *received.values()], default=0),
                sum(
                    sender // per_node != receiver // per_node
                    for sender, receiver in zip(senders, plan.receiver[members], strict=True)
                ),
            )
            for senders in product(*choices)
        )
        assert (rounds, plan.between[members].sum()) == least


@given(pairs(), st.integers(1, 4))
def test_time_is_at_least_the_bound(pair: tuple[Placement, Placement], per_node: int) -> None:
    """And with equal links it is rounds times the bytes of an expert over the bandwidth."""
    old, new = pair
    plan = plan_transfer(old, new, SIZE, links=Links(gpus_per_node=per_node))
    assert plan.seconds >= plan.bound * (1 - 1e-12)
    assert (plan.bytes_inside + plan.bytes_between) == SIZE * len(plan.round)
    equal = plan_transfer(old, new, SIZE, links=Links(1e9, 1e9, per_node))
    assert equal.seconds == pytest.approx(equal.rounds.sum() * SIZE / 1e9)
    assert equal.bound == pytest.approx(equal.seconds)


@given(pairs())
def test_layers_together_need_no_more_rounds(pair: tuple[Placement, Placement]) -> None:
    """Rounds of all layers at once are at most those layer by layer, and the moves are the same."""
    apart, together = (plan_transfer(*pair, SIZE, layers_at_once=n) for n in (1, 3))
    assert together.rounds.sum() <= apart.rounds.sum()
    assert len(together.round) == len(apart.round)


@given(pairs())
def test_same_placements_same_plan(pair: tuple[Placement, Placement]) -> None:
    """Twice the same call gives twice the same steps, and moving to what is there gives none."""
    plan = plan_transfer(*pair, SIZE)
    assert [*plan_transfer(*pair, SIZE).steps()] == [*plan.steps()]
    again = plan_transfer(plan.placement, pair[1], SIZE)
    assert again.placement == plan.placement
    assert (len(again.round), again.seconds, again.bound, again.buffers) == (0, 0.0, 0.0, 0)
    assert again.break_even_steps(0.0) == 0.0


# --- worked examples ---


def test_a_cycle_is_one_round() -> None:
    """Three GPUs pass their only expert on: all at once, through one buffer each."""
    plan = plan_transfer(Placement([[0], [1], [2]]), Placement([[2], [0], [1]]), SIZE)
    assert plan.rounds.tolist() == [1]
    assert plan.lands.tolist() == [0, 0, 0]
    assert plan.buffers == 1
    assert plan.placement == Placement([[2], [0], [1]])


@pytest.mark.parametrize(
    ("old", "rounds"),
    [([[0, 1], [2, 3], [4, 5], [1, 2]], 3), ([[0, 1], [0, 3], [4, 5], [1, 2]], 1)],
)
def test_an_expert_goes_to_many_from_all_that_hold_it(old: list[list[int]], rounds: int) -> None:
    """One holder sends to three GPUs in three rounds, two holders to two GPUs in one."""
    new = [[0, 1], [0, 3], [0, 5], [0, 2]]
    experts = 6
    plan = plan_transfer(
        Placement(old, experts, allow_missing=True),
        Placement(new, experts, allow_missing=True),
        SIZE,
    )
    assert plan.rounds.tolist() == [rounds]


def test_weights_wait_for_a_slot_that_is_still_sent_from() -> None:
    """GPU 0 must keep expert 0 for two rounds, so what it receives first waits in a buffer."""
    old, new = Placement([[0], [1], [2]]), Placement([[1], [0], [0]], 3, allow_missing=True)
    plan = plan_transfer(old, new, SIZE)
    assert plan.rounds.tolist() == [2]
    assert plan.replay() == new
    (to_gpu_0,) = np.flatnonzero(plan.receiver == 0)
    assert plan.lands[to_gpu_0] == 1
    (step,) = (step for step in plan.steps() if "to GPU 0" in step)
    assert step.endswith("slot 0 after round 1") == (plan.round[to_gpu_0] == 0)


def test_the_same_node_sends_where_it_can() -> None:
    """Of two holders the one in the receiver's node, unless that makes a round more."""
    old = Placement([[0, 1], [2, 3], [0, 4], [5, 6]])
    new = Placement([[0, 1], [0, 3], [2, 4], [5, 6]])
    near = plan_transfer(old, new, SIZE, links=Links(gpus_per_node=2))
    assert near.sender[near.expert == 0].tolist() == [0]
    assert (near.bytes_inside, near.bytes_between) == (SIZE, SIZE)
    # GPU 0 has expert 1 to send as well: expert 0 comes from the other node in the same round.
    new = Placement([[0, 2], [0, 3], [1, 4], [5, 6]])
    far = plan_transfer(old, new, SIZE, links=Links(gpus_per_node=2))
    assert far.rounds.tolist() == [1]
    assert far.sender[far.expert == 0].tolist() == [2]


def test_a_second_slot_on_a_gpu_is_no_move() -> None:
    """It is filled within the GPU, whether the expert was there or has just come."""
    old = Placement([[0, 1, 2], [3, 4, 5]])
    new = Placement([[0, 0, 3], [3, 3, 0]], 6, allow_missing=True)
    plan = plan_transfer(old, new, SIZE)
    assert len(plan.round) == 2
    assert plan.placement.slots.tolist() == [[0, 3, 0], [3, 0, 3]]
    assert plan.replay() == plan.placement
    new = Placement([[3, 3, 3], [3, 4, 5]], 6, allow_missing=True)
    assert plan_transfer(old, new, SIZE).rounds.tolist() == [1]


def test_empty_slots_on_either_side() -> None:
    """A dead GPU that came back is filled at once; one that leaves sends what others must have."""
    half = Placement([[0, 1], [2, 3], [EMPTY, EMPTY]])
    full = Placement([[0, EMPTY], [2, 3], [EMPTY, 1]])
    plan = plan_transfer(half, full, SIZE)
    assert plan.placement.slots.tolist() == [[0, EMPTY], [2, 3], [1, EMPTY]]
    back = plan_transfer(full, half, SIZE)
    assert back.sender.tolist() == [2]
    assert back.replay() == back.placement


def test_time_by_hand() -> None:
    """A round between nodes lasts as long as its far move; 44 MB at 450 and at 50 GB/s."""
    old = Placement([[[0], [1], [2], [3]]] * 2)
    new = Placement([[[1], [0], [3], [2]], [[2], [1], [0], [3]]])
    plan = plan_transfer(old, new, SIZE, links=Links(gpus_per_node=2))
    assert plan.rounds.tolist() == [1, 1]
    assert plan.seconds == pytest.approx(SIZE / 450e9 + SIZE / 50e9)
    assert plan.bound == pytest.approx(plan.seconds)


def test_expert_bytes_of_every_model() -> None:
    """Three matrices; DeepSeek-V3's in fp8 have 42 MiB, in bf16 twice that."""
    assert expert_bytes(model_shape("deepseek-v3")) == 42 * 2**20
    assert expert_bytes(model_shape("deepseek-v3"), 2) == 84 * 2**20
    for shape in MODEL_SHAPES.values():
        assert expert_bytes(shape, 0.5) * 2 == expert_bytes(shape)


def test_break_even_from_a_saving() -> None:
    """1,000 and 600 tokens of two GPUs become 800 and 800: 200 x 0.0945 µs, by two layers."""
    old, new = Placement([[[0, 1], [2, 3]]] * 2), Placement([[[0, 2], [1, 3]]] * 2)
    tokens = np.array([[500, 500, 300, 300]] * 2)
    saved = saving_per_step(old, new, tokens, "deepseek-v3-fp8")
    assert saved == pytest.approx(2 * 200 * 0.0945)
    batches = np.stack([tokens, 0 * tokens])
    assert saving_per_step(old, new, batches, "deepseek-v3-fp8") == pytest.approx(saved / 2)
    plan = plan_transfer(old, new, SIZE)
    assert plan.break_even_steps(saved) == pytest.approx(1e6 * plan.seconds / saved)
    assert saving_per_step(new, old, tokens, "deepseek-v3-fp8", method="makespan") < 0
    assert plan.break_even_steps(-saved) == math.inf
    with pytest.raises(ValueError, match="objective tokens counts"):
        saving_per_step(old, new, tokens, "tokens")


# --- what is refused ---


def test_an_expert_that_is_nowhere_is_named() -> None:
    """With its layer; one that need not move may be missing."""
    old = Placement([[[0, 1], [2, 3]], [[0, 1], [2, EMPTY]]], 4, allow_missing=True)
    new = Placement([[[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    with pytest.raises(InvalidPlacementError, match="layer 1: expert 3 must move to GPU 1"):
        plan_transfer(old, new, SIZE)
    assert len(plan_transfer(old, old, SIZE).round) == 0


@pytest.mark.parametrize(
    "other",
    [[[0, 1], [2, 3], [0, 1]], [[0, 1, 2], [3, 0, 1]], [[0, 1], [2, 4]], [[[0, 1], [2, 3]]]],
)
def test_placements_of_other_shapes_are_refused(other: list[list[int]]) -> None:
    """More GPUs, slots or experts, or a layer axis."""
    old = Placement([[0, 1], [2, 3]])
    new = Placement(other, allow_missing=True)
    with pytest.raises(InvalidPlacementError, match="as many layers, GPUs, slots and experts"):
        plan_transfer(old, new, SIZE)


@pytest.mark.parametrize(
    "links", [(0.0, 0.0, 8), (1e9, 2e9, 8), (math.nan, 1e9, 8), (math.inf, 1e9, 8), (1e9, 1e9, 0)]
)
def test_links_that_cannot_be_are_refused(links: tuple[float, float, int]) -> None:
    """No bandwidth, a faster link between nodes than inside, no GPU in a node."""
    with pytest.raises(ValueError, match=r"bandwidths|node"):
        Links(*links)


@pytest.mark.parametrize(
    ("links", "error", "message"),
    [
        ({"inside": "x"}, TypeError, "inside must be a number, not 'x'"),
        ({"gpus_per_node": 1.5}, TypeError, r"gpus_per_node must be an integer, not 1\.5"),
        ({"gpus_per_node": 2**40}, ValueError, "gpus_per_node must be at most 1024"),
    ],
)
def test_links_of_other_types(links: dict[str, Any], error: type[Exception], message: str) -> None:
    """What is no number of that size is named."""
    with pytest.raises(error, match=message):
        Links(**links)


def test_sizes_below_one_are_refused() -> None:
    """Of an expert and of a batch of layers; and what is no integer."""
    placement = Placement([[0], [1]])
    plan: Any = partial(plan_transfer, placement, placement)
    with pytest.raises(ValueError, match="expert_bytes must be at least 1, not 0"):
        plan(0)
    with pytest.raises(ValueError, match="layers_at_once must be at least 1, not 0"):
        plan(1, layers_at_once=0)
    with pytest.raises(ValueError, match="expert_bytes must be at most 9223372036854775807"):
        plan(10**400)
    with pytest.raises(TypeError, match=r"expert_bytes must be an integer, not 1\.5"):
        plan(1.5)


def test_more_layers_at_once_than_there_are() -> None:
    """They are one batch."""
    pair = Placement([[[0], [1]]] * 3), Placement([[[1], [0]]] * 3)
    plan = plan_transfer(*pair, SIZE, layers_at_once=2**40)
    assert (plan.layers_at_once, plan.rounds.tolist()) == (3, [3])
    assert plan.seconds == pytest.approx(3 * SIZE / 450e9)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan, 1e305])
def test_bytes_of_a_weight_are_finite(wrong: float) -> None:
    """And above 0, so that an expert has bytes."""
    with pytest.raises(ValueError, match="bytes_per_weight must be above 0 and finite"):
        expert_bytes(model_shape("deepseek-v3"), wrong)
    assert expert_bytes(model_shape("deepseek-v3"), 1e-9) == 1


# --- real loads ---


@pytest.mark.parametrize(("gpus", "slots"), [(32, 9), (144, 2), (320, 1)])
def test_from_one_recorded_load_to_another(
    recorded_load: Callable[[str], NDArray[np.int64]], gpus: int, slots: int
) -> None:
    """EPLB's placements of two DeepSeek-V3 recordings: few buffers, close to the bound."""
    old, new = (
        solve_placement(recorded_load(name), num_gpus=gpus, slots_per_gpu=slots).placement
        for name in ("decode_in1000out1000", "decode_in2000out100")
    )
    plan = plan_transfer(old, new, expert_bytes(model_shape("deepseek-v3")))
    assert plan.replay() == plan.placement
    assert np.array_equal(np.sort(plan.placement.slots), np.sort(new.slots))
    assert len(plan.round) == count_moves(old, new).sum()
    assert plan.buffers <= 4
    assert plan.bound <= plan.seconds <= 1.25 * plan.bound
