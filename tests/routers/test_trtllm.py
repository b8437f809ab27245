"""`trtllm`: TensorRT-LLM's dispatch, the replicas in turn within blocks of 1,024 ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb_opt.demand import count_tokens
from eplb_opt.errors import InfeasibleError, InvalidTokensError
from eplb_opt.placement import Placement
from eplb_opt.routing import solve_routing
from eplb_opt.testing import Problem, check_routing
from eplb_opt.trace import TokenTrace


@pytest.mark.parametrize("shape", [(), (2,), (0,)])
@pytest.mark.parametrize("sources", [None, 1, 2])
def test_every_id_has_its_turn(
    draw_problem: Callable[..., Problem],
    draw_ids: Callable[..., NDArray[np.int64]],
    shape: tuple[int, ...],
    sources: int | None,
) -> None:
    """Sums by slot are those of a loop over ids; the turn starts anew in each local batch."""
    rng = np.random.default_rng(9)
    for gpus, slots, experts, rows, k in (
        (1, 3, 3, 1, 1),
        (4, 5, 9, 40, 3),
        (5, 3, 7, 600, 4),  # three blocks, the last one short
        (3, 2, 2, 1024, 1),
        (9, 2, 11, 0, 2),
    ):
        placement = draw_problem(rng, gpus, slots, experts, layers=2).placement
        local = (rows, k) if sources is None else (sources, rows, k)
        ids = draw_ids(rng, placement, shape, local)
        counts = count_tokens(ids, experts)
        tokens = counts if sources is None else counts.sum(axis=-2)
        routing = solve_routing(placement, tokens, method="trtllm", topk_ids=ids)
        check_routing(placement, tokens, routing)
        expected = np.zeros((*shape, 2, gpus * slots), np.int64)
        for at in np.ndindex(*ids.shape[:-2]):
            lead, at_layer = at[: len(shape)], at[len(shape)]
            seen: Counter[tuple[int, int]] = Counter()
            for place, expert in enumerate(ids[at].ravel().tolist()):
                block = place // 1024
                if expert >= 0:
                    replicas = placement.replicas(expert, at_layer)
                    number = (seen[block, expert] + block) % replicas.size
                    seen[block, expert] += 1
                    expected[(*lead, at_layer, replicas[number])] += 1
        assert np.array_equal(routing.tokens.reshape(expected.shape), expected)


def test_worked_example() -> None:
    """Five tokens over three replicas in turn: 2, 2, 1; the second block starts one further on."""
    placement = Placement([[0], [0], [0]])
    ids = np.full((1026, 1), -1)
    ids[:5] = 0
    routing = solve_routing(placement, [5], method="trtllm", topk_ids=ids)
    assert routing.tokens.ravel().tolist() == [2, 2, 1]
    ids[1024:] = 0
    routing = solve_routing(placement, [7], method="trtllm", topk_ids=ids)
    assert routing.tokens.ravel().tolist() == [2, 3, 2]


def test_within_a_block_replicas_differ_by_one() -> None:
    """As turns go round, no replica is ahead of another by more than a token."""
    placement = Placement([[0, 1], [0, 1], [0, 2], [0, -1]])
    ids = np.random.default_rng(0).integers(-1, 3, (100, 2))
    routing = solve_routing(placement, count_tokens(ids, 3), method="trtllm", topk_ids=ids)
    assert np.ptp(routing.tokens[:, 0]) <= 1


def test_recorded_tokens(recorded_tokens: dict[str, TokenTrace]) -> None:
    """A recorded batch of 1,024 tokens, eight blocks: nothing is lost."""
    trace = recorded_tokens["qwen3-1024"]
    ids = trace.batches(1024)
    slots = np.arange(192).reshape(8, 24) % 128
    placement = Placement(slots[None])
    tokens = count_tokens(ids, 128)
    routing = solve_routing(placement, tokens, method="trtllm", topk_ids=ids)
    check_routing(placement, tokens, routing)


def test_missing_ids_and_absent_experts() -> None:
    """What the rule needs is named; experts without replica are an error if they have tokens."""
    placement = Placement([[1], [1]], num_experts=2, allow_missing=True)
    with pytest.raises(InvalidTokensError, match="trtllm depends on each token's place in its"):
        solve_routing(placement, [0, 1], method="trtllm")
    with pytest.raises(InvalidTokensError, match="trtllm depends on each token's place in its"):
        solve_routing(placement, [0, 1], method="trtllm", source_tokens=[[0, 1], [0, 0]])
    with pytest.raises(InfeasibleError, match="expert 0 has tokens but no replica"):
        solve_routing(placement, [1, 1], method="trtllm", topk_ids=[[0], [1]])
    routing = solve_routing(placement, [0, 2], method="trtllm", topk_ids=[[1], [1], [-1]])
    assert routing.tokens.tolist() == [[1], [1]]
