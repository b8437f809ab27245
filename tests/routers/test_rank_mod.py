"""`rank-mod`: vLLM-Ascend's dispatch, one replica per source GPU and expert."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from eplb_opt.errors import InfeasibleError, InvalidTokensError
from eplb_opt.placement import Placement
from eplb_opt.routing import solve_routing
from eplb_opt.testing import Problem, check_routing


@pytest.mark.parametrize("batches", [(), (1,), (2, 3), (0,)])
def test_every_source_sends_to_its_number_modulo_the_copies(
    draw_problem: Callable[..., Problem], batches: tuple[int, ...]
) -> None:
    """Sums by slot are those of a loop over sources and experts; duplicates are replicas."""
    rng = np.random.default_rng(6)
    for gpus, slots, experts in ((1, 3, 3), (4, 5, 9), (7, 4, 20), (16, 3, 30)):
        placement = draw_problem(rng, gpus, slots, experts, layers=2).placement
        sources = rng.integers(0, 9, (*batches, 2, gpus, experts))
        sources = sources * (placement.copies > 0)[:, None]
        tokens = sources.sum(axis=-2)
        routing = solve_routing(placement, tokens, method="rank-mod", source_tokens=sources)
        check_routing(placement, tokens, routing)
        expected = np.zeros((*batches, 2, gpus * slots), np.int64)
        for at in np.ndindex(*sources.shape):
            *lead, layer, source, expert = at
            replicas = placement.replicas(expert, layer)
            if replicas.size:
                expected[(*lead, layer, replicas[source % replicas.size])] += sources[at]
        assert np.array_equal(routing.tokens.reshape(expected.shape), expected)


def test_worked_example() -> None:
    """Sources 0 and 2 share replica 0 of an expert with two copies, source 1 has the other."""
    placement = Placement([[0, 1], [0, 2], [3, 4]])
    sources = [[1, 0, 0, 0, 0], [10, 0, 0, 0, 0], [100, 5, 0, 0, 0]]
    routing = solve_routing(
        placement, np.sum(sources, axis=0), method="rank-mod", source_tokens=sources
    )
    assert routing.tokens.tolist() == [[101, 5], [10, 0], [0, 0]]


def test_sources_from_ids() -> None:
    """Top-k ids by source GPU are counted first; padding counts nowhere."""
    placement = Placement([[0, 1], [0, 2]])
    ids = [[[0, 1], [0, -1]], [[-1, -1], [2, 0]]]
    routing = solve_routing(placement, [3, 1, 1], method="rank-mod", topk_ids=ids)
    assert routing.tokens.tolist() == [[2, 1], [1, 1]]


def test_missing_or_wrong_sources() -> None:
    """What the rule needs is named; fewer sources than GPUs are refused."""
    placement = Placement([[0, 1], [0, 2]])
    with pytest.raises(
        InvalidTokensError, match="rank-mod sends by source GPU: pass source_tokens"
    ):
        solve_routing(placement, [1, 1, 1], method="rank-mod")
    with pytest.raises(InvalidTokensError, match=r"rank-mod needs .* all 2 source GPUs, not of 1"):
        solve_routing(placement, [1, 1, 1], method="rank-mod", source_tokens=[[1, 1, 1]])
    absent = Placement([[0], [-1]], num_experts=2, allow_missing=True)
    with pytest.raises(InfeasibleError, match="expert 1 has tokens but no replica"):
        solve_routing(absent, [0, 1], method="rank-mod", source_tokens=[[0, 1], [0, 0]])
