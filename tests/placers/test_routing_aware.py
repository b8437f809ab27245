"""`routing-aware`: laws of its placements, and that routed batches gain."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt.demand import count_tokens
from eplb_opt.errors import InfeasibleError, InvalidTokensError
from eplb_opt.placement import Placement
from eplb_opt.placers import RoutingAware
from eplb_opt.placers.routing_aware import _drawn
from eplb_opt.placing import PlacementPlan, solve_placement
from eplb_opt.routing import solve_routing
from eplb_opt.trace import TokenTrace
from eplb_opt.workload import Workload, visit_chances

place = partial(solve_placement, method="routing-aware:work=30000")


def drawn(load: NDArray[np.float64], tokens: int, batches: int, top_k: int) -> NDArray[np.int64]:
    """Draw batches by popularity: int64 ``[batches, layers, experts]``."""
    workload = Workload.from_load(load, top_k, correlation=0, seed=3)
    return count_tokens(workload.draw(tokens, batches), load.shape[-1])


def makespan(
    placement: Placement, batches: NDArray[np.int64], objective: str = "activations"
) -> float:
    """Return the mean makespan over batches and layers, routed to the optimum."""
    return float(solve_routing(placement, batches, objective=objective).makespan.mean())


def skewed(layers: int, experts: int, seed: int = 0) -> NDArray[np.float64]:
    """Draw loads as skewed as recorded ones."""
    return np.random.default_rng(seed).lognormal(0, 0.8, (layers, experts))


def assert_lawful(plan: PlacementPlan, slots_per_gpu: int, experts: int) -> None:
    """Every expert is placed, none twice on a GPU, and no slot is empty without need."""
    assert (plan.placement.copies >= 1).all()
    assert plan.duplicates == 0
    filled = (plan.placement.slots >= 0).sum(axis=-1)
    assert (filled == min(slots_per_gpu, experts)).all()


@settings(max_examples=25)
@given(
    st.integers(0, 2**32),
    st.integers(1, 12),
    st.integers(1, 6),
    st.sampled_from([1, 7, 300, 2**39 - 1]),
    st.booleans(),
)
def test_every_expert_is_placed_and_none_twice(
    seed: int, gpus: int, per_gpu: int, tokens: int, recorded: bool
) -> None:
    """On any number of GPUs, by loads or batches, also with more slots than copies can fill."""
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(1, gpus * per_gpu + 1))
    load = rng.integers(0, 5, (3, 2, experts)) * rng.integers(0, 2, (1, 2, 1))
    top_k = int(rng.integers(1, experts + 1))
    plan = place(
        load,
        num_gpus=gpus,
        slots_per_gpu=per_gpu,
        tokens_per_batch=None if recorded else tokens,
        top_k=top_k,
    )
    assert_lawful(plan, per_gpu, experts)


@pytest.mark.parametrize("gpus", [8, 16])
def test_same_input_same_answer(gpus: int) -> None:
    """On every call and on any number of threads, and whatever the scale of the loads."""
    load = skewed(5, 64)
    on = partial(place, num_gpus=gpus, slots_per_gpu=96 // gpus, tokens_per_batch=16, top_k=4)
    once = on(load).placement
    assert on(load).placement == once
    assert on(load, threads=3).placement == once
    assert on(load * 1024).placement == once
    batches = drawn(load, 16, 30, 4)
    recorded = partial(place, batches, num_gpus=gpus, slots_per_gpu=96 // gpus)
    assert recorded().placement == recorded(threads=3).placement


@pytest.mark.parametrize(
    ("gpus", "redundant", "least"), [(8, 64, 0.9), (16, 64, 0.7), (32, 64, 0.4)]
)
def test_held_out_batches_gain(gpus: int, redundant: int, least: float) -> None:
    """Batches of 32 tokens lose this part of what they are above their floor with EPLB."""
    load = Workload.preset("deepseek-v3").popularity[10:12]
    on = partial(solve_placement, load, num_gpus=gpus, slots_per_gpu=(256 + redundant) // gpus)
    batches = drawn(load, 32, 300, 8)
    floor = np.ceil((batches > 0).sum(axis=-1) / gpus).mean()
    eplb = makespan(on().placement, batches)
    ours = makespan(on(method="routing-aware", tokens_per_batch=32).placement, batches)
    assert (eplb - ours) / (eplb - floor) > least


@pytest.mark.parametrize("gpus", [8, 16])
def test_annealed_on_batches_it_is_not_worse_on_them(gpus: int) -> None:
    """On the batches that it was given, annealing does not raise the mean makespan of the start."""
    batches = drawn(skewed(3, 24, seed=1), 12, 256, 4)
    on = partial(solve_placement, batches, num_gpus=gpus, slots_per_gpu=32 // gpus)
    start = on(method="routing-aware:work=0").placement
    ours = on(method="routing-aware:work=1000000").placement
    for layer in range(3):
        before, after = (
            makespan(Placement(of.slots[layer], 24), batches[:, layer]) for of in (start, ours)
        )
        assert after <= before + 1e-9
    assert makespan(ours, batches) < makespan(start, batches)


def test_experts_that_are_live_together_are_kept_apart() -> None:
    """Each batch is a pair of experts; all pairs end up on two GPUs."""
    pairs = np.zeros((64, 1, 8), np.int64)
    for batch in range(64):
        pairs[batch, 0, [batch % 4, batch % 4 + 4]] = 1
    plan = place(pairs, num_gpus=2, slots_per_gpu=4, top_k=2)
    assert makespan(plan.placement, pairs) == 1


@pytest.mark.parametrize("objective", ["tokens", "deepseek-v3-fp8"])
def test_other_objectives(objective: str) -> None:
    """Recorded or drawn, batches under another objective are no slower than on EPLB's placement."""
    load = skewed(2, 24, seed=4)
    batches = drawn(load, 40, 24, 4)
    on = partial(solve_placement, num_gpus=4, slots_per_gpu=8)
    eplb = makespan(on(load).placement, batches, objective)
    ours = partial(on, method="routing-aware:work=60000", objective=objective)
    assert makespan(ours(batches).placement, batches, objective) <= eplb
    by_load = ours(load, tokens_per_batch=40, top_k=4)
    assert_lawful(by_load, 8, 24)
    assert makespan(by_load.placement, batches, objective) <= eplb


def test_liveness_is_that_of_drawn_batches() -> None:
    """Copies follow how often experts are live: those in every batch count alike."""
    load = np.array([1000.0, 100.0, 100.0, 1.0, 1.0, 1.0])
    plan = place(load, num_gpus=3, slots_per_gpu=3, tokens_per_batch=64, top_k=2)
    assert plan.placement.copies[0].tolist()[:3] == [2, 2, 2]


def test_recorded_tokens(recorded_tokens: dict[str, TokenTrace]) -> None:
    """On gpt-oss-20b's second half, placed by its first, at least half of EPLB's excess goes."""
    trace = recorded_tokens["gpt-oss"]
    tokens = count_tokens(trace.batches(32)[:, :3], trace.num_experts)
    seen, unseen = np.array_split(tokens, 2)
    floor = np.ceil((unseen > 0).sum(axis=-1) / 8).mean()
    on = partial(solve_placement, num_gpus=8, slots_per_gpu=5)
    eplb = makespan(on(seen.sum(axis=0)).placement, unseen)
    ours = makespan(on(seen, method="routing-aware:work=1000000").placement, unseen)
    assert (eplb - ours) / (eplb - floor) > 0.5


def test_empty_slots_stay_empty() -> None:
    """A dead GPU and a dead slot get nothing; the floor is that of the others."""
    now = [[[-1, -1, -1], [0, 1, -1], [2, 3, 0], [4, 0, 1]]]
    plan = place(
        [[9, 1, 1, 1, 5]], num_gpus=4, slots_per_gpu=3, previous=now, tokens_per_batch=2, top_k=2
    )
    slots = plan.placement.slots[0]
    assert (slots >= 0).sum(axis=-1).tolist() == [0, 2, 3, 3]
    assert plan.duplicates == 0
    assert (plan.placement.copies >= 1).all()


def test_many_gpus() -> None:
    """1,024 GPUs need no more than a moment and a little memory."""
    load = skewed(1, 1024, seed=2)
    plan = place(load, num_gpus=1024, slots_per_gpu=2, tokens_per_batch=64)
    assert_lawful(plan, 2, 1024)


@pytest.mark.parametrize("load", [[0.0] * 6, [5.0] + [0.0] * 5], ids=["no load", "one expert"])
@pytest.mark.parametrize("gpus", [1, 3, 10])
def test_degenerate_loads(load: list[float], gpus: int) -> None:
    """Without load, or with fewer experts than a token visits, all are placed."""
    on = partial(place, load, num_gpus=gpus, slots_per_gpu=6, tokens_per_batch=4, top_k=3)
    assert_lawful(on(), 6, 6)
    assert_lawful(on(objective="tokens"), 6, 6)


def test_batches_are_integers() -> None:
    """Without tokens_per_batch every window is a batch; a fraction is named with its place."""
    windows = np.ones((2, 2, 4))
    windows[1, 0, 2] = 0.5
    with pytest.raises(InvalidTokensError, match=r"window 1, layer 0, expert 2 has load 0\.5"):
        place(windows, num_gpus=2, slots_per_gpu=2, top_k=1)
    windows[1, 0, 2] = 2.0**39
    with pytest.raises(InvalidTokensError, match="at most 549755813887"):
        place(windows, num_gpus=2, slots_per_gpu=2, top_k=1)


def test_bad_arguments() -> None:
    """Work below 0, more tokens or choices than there can be, too few slots alive."""
    on = partial(place, [1.0, 2.0], num_gpus=2, slots_per_gpu=1)
    with pytest.raises(ValueError, match="routing-aware: work must be at least 0, not -1"):
        on(method="routing-aware:work=-1")
    with pytest.raises(TypeError, match="routing-aware: work must be an integer, not nan"):
        RoutingAware(work=float("nan"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tokens_per_batch is 549755813888; at most"):
        on(tokens_per_batch=2**39, top_k=1)
    with pytest.raises(ValueError, match="top_k is 3, and there are 2 experts"):
        on(tokens_per_batch=1, top_k=3)
    with pytest.raises(InfeasibleError, match="2 experts need 2 slots"):
        on(tokens_per_batch=1, top_k=1, previous=[[0], [-1]])


def test_what_stays_on_a_gpu_keeps_its_slot() -> None:
    """So do the slots that are empty."""
    now = [[-1, 0], [1, 2]]
    plan = place([5, 4, 3], num_gpus=2, slots_per_gpu=2, previous=now, tokens_per_batch=4, top_k=1)
    for row, before in zip(plan.placement.slots.tolist(), now, strict=True):
        assert all(e == old for e, old in zip(row, before, strict=True) if old in (*row, -1))


def test_the_unit_of_loads_makes_no_difference_to_batches() -> None:
    """Experts without load are drawn as rarely beside small loads as beside large ones."""
    load = np.array([8.0, 4, 2, 1, 0, 0, 0, 0])
    on = partial(place, num_gpus=4, slots_per_gpu=3, tokens_per_batch=16, top_k=5)
    plans = [on(load * 2.0**n, objective="tokens") for n in (0, -30, -1070, 1000)]
    assert all(plan.placement == plans[0].placement for plan in plans)


def test_large_batches_are_drawn_as_counts() -> None:
    """Their means are exact, their covariances those of tokens with distinct experts."""
    load, tokens, top_k = skewed(1, 12), 5000, 3
    chance = visit_chances(Workload.from_load(load, top_k).popularity, top_k)
    counts = _drawn(load, tokens, top_k)[0]
    assert abs(counts.sum(axis=-1) - tokens * top_k).max() <= 6
    deviation = np.sqrt(tokens * chance * (1 - chance))[0]
    assert abs(counts.mean(axis=0) - tokens * chance[0]).max() < 4 * deviation.max() / 48**0.5
    singly = drawn(load, tokens, 200, top_k)[:, 0]
    assert counts.std(axis=0) == pytest.approx(singly.std(axis=0), rel=0.4)
    assert (counts.std(axis=0) / singly.std(axis=0)).mean() == pytest.approx(1, abs=0.1)


def test_batches_of_any_size_are_placed_for() -> None:
    """Within a fraction of a second, for the objective that needs batches."""
    plan = place(
        skewed(1, 16),
        num_gpus=4,
        slots_per_gpu=5,
        tokens_per_batch=2**30,
        top_k=2,
        objective="tokens",
    )
    assert_lawful(plan, 5, 16)


def test_nodes_are_not_heeded() -> None:
    """The plan says so."""
    plan = place([1.0] * 4, num_gpus=4, slots_per_gpu=1, num_nodes=2, tokens_per_batch=1, top_k=1)
    assert plan.note == "nodes and groups are not heeded"
