"""Shares by source GPU: loads stay, no split keeps more at home or sends less between nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt.demand import count_tokens
from eplb_opt.errors import InvalidTokensError
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.placing import solve_placement
from eplb_opt.routing import Routing, solve_routing
from eplb_opt.status import Status
from eplb_opt.testing import Problem, problems
from eplb_opt.topology import Transport, transport

FOUR_GPUS = Placement([[0, 1], [0, 2], [0, 3], [0, 4]])
BY_SOURCE = [[12, 0, 0, 0, 0], [0, 1, 3, 0, 0], [0] * 5, [0, 0, 0, 0, 4]]


def split_at_random(rng: np.random.Generator, problem: Problem) -> NDArray[np.int64]:
    """Spread every expert's tokens over the sources, a source now and then having most."""
    gpus = problem.placement.num_gpus
    weight = rng.dirichlet(np.full(gpus, rng.choice([0.1, 1.0, 10.0])), problem.tokens.shape)
    return np.moveaxis(rng.multinomial(problem.tokens, weight), -1, -2)


def drawn(
    rng: np.random.Generator, problem: Problem, gpus_per_node: int, method: str = "flow"
) -> Transport:
    """Route a problem and split the answer over sources that are drawn."""
    routing = solve_routing(
        problem.placement, problem.tokens, objective="tokens", method=method, bound=False
    )
    source_tokens = split_at_random(rng, problem)
    return transport(routing, source_tokens, gpus_per_node=gpus_per_node)


def distances(transport: Transport) -> NDArray[np.int64]:
    """Return the tokens that stay, that stay in the node and that leave it, int64 [..., 3]."""
    gpu = np.arange(transport.routing.placement.num_gpus)
    node = gpu // transport.gpus_per_node
    between = transport.tokens.sum(axis=-1)
    here, near = np.equal.outer(gpu, gpu), np.equal.outer(node, node)
    return np.stack([(between * m).sum(axis=(-2, -1)) for m in (here, near & ~here, ~near)], -1)


# --- laws ---


@given(problems(), st.integers(0, 2**32), st.integers(1, 10), st.sampled_from(["flow", "uniform"]))
def test_splits_the_shares_and_nothing_else(
    problem: Problem, seed: int, gpus_per_node: int, method: str
) -> None:
    """Over sources the shares are those routed, over slots those of the source; none is negative.

    This holds for tokens of every size, with several slots of an expert on one GPU too.
    """
    rng = np.random.default_rng(seed)
    problem = Problem(problem.placement, np.minimum(problem.tokens, 2**31))
    routing = solve_routing(
        problem.placement, problem.tokens, objective="tokens", method=method, bound=False
    )
    source_tokens = split_at_random(rng, problem)
    before = source_tokens.copy()
    split = transport(routing, source_tokens, gpus_per_node=gpus_per_node)

    assert np.array_equal(source_tokens, before)
    assert (split.tokens >= 0).all()
    assert np.array_equal(split.tokens.sum(axis=-3), routing.tokens)
    sent = split.tokens.reshape(*split.tokens.shape[:-2], -1)
    expert_of = problem.placement.expert_of
    owner = np.eye(problem.placement.num_experts + 1, dtype=np.int64)[expert_of][..., :-1]
    owner = owner if problem.placement.layered else owner[0]
    assert np.array_equal(sent @ owner, source_tokens)
    counted = np.stack([split.same_gpu, split.same_node, split.cross_node], -1)
    assert np.array_equal(counted, distances(split))


@settings(max_examples=40)
@given(
    problems(max_layers=1, max_gpus=5, max_slots_per_gpu=3, max_experts=6, layered=False),
    st.integers(0, 2**32),
    st.integers(1, 5),
)
def test_no_split_is_nearer(problem: Problem, seed: int, gpus_per_node: int) -> None:
    """A linear program keeps no more tokens on their GPU, and sends no fewer between nodes."""
    pytest.importorskip("highspy")
    rng = np.random.default_rng(seed)
    tokens = np.minimum(problem.tokens.reshape(-1, problem.placement.num_experts), 1000)[:1]
    split = drawn(rng, Problem(problem.placement, tokens), gpus_per_node, "uniform")
    if not tokens.size:
        return
    gpu = np.arange(problem.placement.num_gpus)
    node = gpu // gpus_per_node
    assert split.same_gpu == -cheapest(split, -np.equal.outer(gpu, gpu).astype(float))
    assert split.cross_node == cheapest(split, np.not_equal.outer(node, node).astype(float))


def cheapest(split: Transport, cost: NDArray[np.float64]) -> int:
    """Return the least cost [source, gpu] of any split of the same shares over the same sources."""
    from highspy._core import HighsModelStatus, _Highs

    placement = split.routing.placement
    expert_of = placement.expert_of[0]
    have = split.tokens[0].reshape(placement.num_gpus, -1)
    take = split.routing.tokens[0].ravel()
    engine = _Highs()
    engine.setOptionValue("output_flag", False)
    column: dict[tuple[int, int], int] = {}
    for source, slot in np.ndindex(have.shape):
        if expert_of[slot] != EMPTY:
            column[source, slot] = len(column)
            engine.addCol(cost[source, slot // placement.slots_per_gpu], 0, np.inf, 0, [], [])
    for slot, tokens in enumerate(take.tolist()):
        some = [at for (_, to), at in column.items() if to == slot]
        engine.addRow(tokens, tokens, len(some), some, np.ones(len(some)))
    for source in range(placement.num_gpus):
        for expert in range(placement.num_experts):
            held = have[source, expert_of == expert].sum()
            some = [
                at for (of, to), at in column.items() if (of, expert_of[to]) == (source, expert)
            ]
            engine.addRow(held, held, len(some), some, np.ones(len(some)))
    engine.run()
    assert engine.getModelStatus() == HighsModelStatus.kOptimal
    return round(engine.getInfo().objective_function_value)


def test_one_node_is_all_nodes() -> None:
    """With all GPUs in one node nothing crosses; with one GPU a node, all that moves does."""
    rng = np.random.default_rng(0)
    slots = rng.integers(0, 12, (2, 6, 4))
    slots[:, :3] = np.arange(12).reshape(3, 4)
    problem = Problem(Placement(slots), rng.integers(0, 100, (3, 2, 12)))
    one, each = (drawn(np.random.default_rng(1), problem, n) for n in (6, 1))
    assert not one.cross_node.any()
    assert not each.same_node.any()
    assert np.array_equal(one.same_gpu, each.same_gpu)
    assert np.array_equal(one.same_node, each.cross_node)


@given(problems(max_gpus=5), st.integers(0, 2**32), st.integers(1, 5))
def test_assigns_every_token_as_split(problem: Problem, seed: int, gpus_per_node: int) -> None:
    """Ids by source get physical slots that hold their expert and add up to the shares."""
    rng = np.random.default_rng(seed)
    placement = problem.placement
    lead = (2, *placement.batch_shape[:-1])
    ids = rng.integers(-1, placement.num_experts, (*lead, placement.num_gpus, 6, 2))
    source_tokens = count_tokens(ids, placement.num_experts)
    routing = solve_routing(placement, source_tokens.sum(axis=-2), objective="tokens")
    split = transport(routing, source_tokens, gpus_per_node=gpus_per_node)
    physical = split.assign(ids)

    assert physical.shape == ids.shape
    assert np.array_equal(physical == EMPTY, ids == EMPTY)
    by_layer = physical.reshape(2, placement.num_layers, -1)
    layer = np.arange(placement.num_layers)[:, None]
    served = np.where(by_layer == EMPTY, EMPTY, placement.expert_of[layer, by_layer])
    assert np.array_equal(served.ravel(), ids.ravel())
    counted = count_tokens(physical, placement.expert_of.shape[1])
    assert np.array_equal(counted.reshape(split.tokens.shape), split.tokens)


# --- worked examples and real files ---


def test_stays_home_then_in_the_node() -> None:
    """GPU 0 keeps 4 of its 12 tokens, its neighbour takes 2, the other node what is left."""
    routing = solve_routing(FOUR_GPUS, [12, 1, 3, 0, 4], objective="tokens")
    split = transport(routing, BY_SOURCE, gpus_per_node=2)
    assert routing.tokens[:, 0].tolist() == [4, 2, 5, 1]
    assert split.tokens[0].tolist() == [[4, 0], [2, 0], [5, 0], [1, 0]]
    assert split.tokens[1].tolist() == [[0, 1], [0, 3], [0, 0], [0, 0]]
    assert [split.same_gpu, split.same_node, split.cross_node] == [4 + 3 + 4, 2 + 1, 6]


def test_neighbours_swap_rather_than_cross() -> None:
    """Two GPUs of a node with too many tokens of an expert and two with too few stay among them."""
    placement = Placement([[0], [0], [0], [0]])
    routing = solve_routing(placement, [8], objective="tokens")
    split = transport(routing, [[4], [0], [0], [4]], gpus_per_node=2)
    assert split.tokens[..., 0].tolist() == [[2, 2, 0, 0], [0] * 4, [0] * 4, [0, 0, 2, 2]]


def test_last_node_may_be_smaller() -> None:
    """Five GPUs in nodes of two: the fifth is alone, and what leaves it crosses nodes."""
    placement = Placement([[0], [0], [0], [0], [0]])
    routing = solve_routing(placement, [5], objective="tokens")
    split = transport(routing, [[0], [0], [0], [0], [5]], gpus_per_node=2)
    assert [split.same_gpu, split.same_node, split.cross_node] == [1, 0, 4]


def test_no_batch() -> None:
    """Without problems, the answer is empty and of the right shape."""
    routing = solve_routing(FOUR_GPUS, np.zeros((0, 5), np.int64), objective="tokens")
    split = transport(routing, np.zeros((0, 4, 5), np.int64))
    assert split.tokens.shape == (0, 4, 4, 2)
    assert split.cross_node.shape == (0,)
    assert split.assign(np.zeros((0, 4, 3, 1), np.int64)).shape == (0, 4, 3, 1)


def test_two_slots_on_one_gpu() -> None:
    """Both slots of an expert on its tokens' GPU are filled from there first."""
    placement = Placement([[0, 0], [0, 1]])
    routing = solve_routing(placement, [9, 0], objective="tokens", method="uniform")
    split = transport(routing, [[7, 0], [2, 0]], gpus_per_node=1)
    assert split.tokens.tolist() == [[[3, 3], [1, 0]], [[0, 0], [2, 0]]]


def test_recorded_batches(recorded_load: Callable[[str], NDArray[np.int64]]) -> None:
    """On DeepSeek-V3's popularity, fewer tokens cross nodes than if replicas are filled in turn.

    Four nodes: with two, filling sources and slots in their order crosses least already.
    """
    load = recorded_load("decode_in2000out100")[::8]
    rng = np.random.default_rng(0)
    gpus, slots = 32, 10
    plan = solve_placement(load, num_gpus=gpus, slots_per_gpu=slots)
    share = load / load.sum(axis=-1, keepdims=True)
    ids = np.stack([rng.choice(256, (gpus, 32, 8), p=p) for p in share])
    source_tokens = count_tokens(ids, 256)
    routing = solve_routing(plan.placement, source_tokens.sum(axis=-2), objective="tokens")
    split = transport(routing, source_tokens)

    def crossing(physical: NDArray[np.int32]) -> int:
        node = np.arange(gpus)[:, None, None] // 8
        return int((physical // slots // 8 != node).sum())

    assert crossing(split.assign(ids)) == split.cross_node.sum()
    assert split.cross_node.sum() < crossing(routing.assign(ids))


# --- bad input ---


def four() -> Routing:
    """Return the worked example's routing."""
    return solve_routing(FOUR_GPUS, [12, 1, 3, 0, 4], objective="tokens")


@pytest.mark.parametrize(
    ("source_tokens", "message"),
    [
        ([*BY_SOURCE[:1], [0, 1, 3, 0, 4]], "all 4 source GPUs, not those of 2"),
        ([[0] * 5] * 4, "holds 0 tokens of expert 0 in layer 0 of batch 0, tokens says 12"),
        ([[1.0] * 5] * 4, "must be int"),
        ([[0] * 4] * 4, "must be int"),
        ([[13, 0, 0, 0, 0], [-1, 1, 3, 0, 0], [0] * 5, [0, 0, 0, 0, 4]], r"\[1, 0\] is -1"),
    ],
)
def test_refuses_other_tokens(source_tokens: Any, message: str) -> None:
    """Tokens by source must be those routed, of all GPUs, and counts."""
    with pytest.raises(InvalidTokensError, match=message):
        transport(four(), source_tokens)


def test_refuses_a_node_without_gpus() -> None:
    """A node has at least one GPU."""
    with pytest.raises(ValueError, match="gpus_per_node must be at least 1, not 0"):
        transport(four(), BY_SOURCE, gpus_per_node=0)


def test_refuses_a_problem_without_answer() -> None:
    """A problem that an engine left unsolved has no shares to split."""
    routing = four()
    routing.status.fill(Status.UNSOLVED)
    with pytest.raises(InvalidTokensError, match=r"problem \(\) has no answer"):
        transport(routing, BY_SOURCE)


def test_refuses_ids_that_were_not_split() -> None:
    """Ids of another batch, or without a source axis, are named by problem, source and expert."""
    placement = Placement(np.stack([FOUR_GPUS.slots, FOUR_GPUS.slots]))
    ids = np.zeros((3, 2, 4, 2, 1), np.int64)
    source_tokens = count_tokens(ids, 5)
    routing = solve_routing(placement, source_tokens.sum(axis=-2), objective="tokens")
    split = transport(routing, source_tokens)
    ids[2, 1, 3, 0, 0] = 4
    with pytest.raises(InvalidTokensError, match=r"problem \(2, 1\), source 3 .* of expert"):
        split.assign(ids)
    with pytest.raises(InvalidTokensError, match=r"must be \[3, 2, 4\] \+ \[rows, k\]"):
        split.assign(ids[:, :, 0])
