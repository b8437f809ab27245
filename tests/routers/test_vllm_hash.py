"""`vllm-hash`: vLLM's dispatch, the replica by a hash of the token's row."""

from __future__ import annotations

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


@pytest.mark.parametrize("shape", [(), (1,), (2, 2), (0,)])
@pytest.mark.parametrize("sources", [None, 1, 3])
def test_every_row_has_its_replica(
    draw_problem: Callable[..., Problem],
    draw_ids: Callable[..., NDArray[np.int64]],
    shape: tuple[int, ...],
    sources: int | None,
) -> None:
    """Sums by slot are those of a loop over tokens, whose row starts anew in each local batch."""
    rng = np.random.default_rng(7)
    for gpus, slots, experts, rows, k in ((1, 3, 3, 1, 1), (4, 5, 9, 40, 3), (9, 2, 11, 0, 2)):
        placement = draw_problem(rng, gpus, slots, experts, layers=2).placement
        local = (rows, k) if sources is None else (sources, rows, k)
        ids = draw_ids(rng, placement, shape, local)
        counts = count_tokens(ids, experts)
        tokens = counts if sources is None else counts.sum(axis=-2)
        routing = solve_routing(placement, tokens, method="vllm-hash", topk_ids=ids)
        check_routing(placement, tokens, routing)
        expected = np.zeros((*shape, 2, gpus * slots), np.int64)
        for at in np.ndindex(*ids.shape):
            at_layer, row = at[len(shape)], at[-2]
            if ids[at] >= 0:
                replicas = placement.replicas(int(ids[at]), at_layer)
                number = (row * 2654435769) % 2**32 % replicas.size
                expected[(*at[: len(shape)], at_layer, replicas[number])] += 1
        assert np.array_equal(routing.tokens.reshape(expected.shape), expected)


def test_worked_example() -> None:
    """Rows 0 to 3 hash to 0, 2654435769, 1013904242, 3668340011: even, odd, even, odd."""
    placement = Placement([[0, 1], [0, 1]])
    ids = [[0, 1], [0, 1], [0, -1], [0, 1]]
    routing = solve_routing(placement, [4, 3], method="vllm-hash", topk_ids=ids)
    assert routing.tokens.tolist() == [[2, 1], [2, 2]]


def test_duplicates_are_replicas() -> None:
    """Two slots on one GPU are two replicas, numbered by physical id; empty slots are none."""
    placement = Placement([[-1, 0, 0], [-1, -1, 0]])
    routing = solve_routing(placement, [6], method="vllm-hash", topk_ids=np.zeros((6, 1), int))
    numbers = [(row * 2654435769) % 2**32 % 3 for row in range(6)]
    assert routing.tokens.ravel().tolist() == [
        0,
        numbers.count(0),
        numbers.count(1),
        0,
        0,
        numbers.count(2),
    ]


def test_recorded_tokens(recorded_tokens: dict[str, TokenTrace]) -> None:
    """Recorded batches: nothing is lost, and replicas of one row are chosen alike in all layers."""
    trace = recorded_tokens["gpt-oss"]
    ids = trace.batches(128)[:4]
    slots = np.arange(64).reshape(8, 8) % 32
    placement = Placement(np.tile(slots, (trace.num_layers, 1, 1)))
    tokens = count_tokens(ids, 32)
    routing = solve_routing(placement, tokens, method="vllm-hash", topk_ids=ids)
    check_routing(placement, tokens, routing)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, r"vllm-hash depends on each token's place.*pass topk_ids=\[..., layers, rows, k\]"),
        ([[0, 1]], "topk_ids holds 0 tokens of expert 2"),
        ([[0, 1, 3]], "is 3; ids are 0 to 2"),
        ([[0, 1, -2]], "is -2"),
        ([0, 1, 2], "not int64 of shape"),
        ([[[[0, 1, 2]]]], r"must be \[\] \+ \[rows, k\] or \[sources, rows, k\]"),
        ([[0.0, 1, 2]], "not float64"),
    ],
)
def test_missing_or_wrong_ids(ids: object, message: str) -> None:
    """What the rule needs is named, and what disagrees with the tokens is refused."""
    with pytest.raises(InvalidTokensError, match=message):
        solve_routing(Placement([[0, 1], [0, 2]]), [1, 1, 1], method="vllm-hash", topk_ids=ids)  # type: ignore[arg-type]


def test_absent_experts() -> None:
    """An id without a replica is an error; its absence alone is none."""
    placement = Placement([[1], [1]], num_experts=2, allow_missing=True)
    routing = solve_routing(placement, [0, 2], method="vllm-hash", topk_ids=[[1], [1], [-1]])
    assert routing.tokens.tolist() == [[1], [1]]
    with pytest.raises(InfeasibleError, match="expert 0 has tokens but no replica"):
        solve_routing(placement, [1, 1], method="vllm-hash", topk_ids=[[0], [1]])
