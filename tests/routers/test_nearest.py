"""`nearest`: SGLang's static dispatch, rule by rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt.errors import InfeasibleError, InvalidTokensError
from eplb_opt.placement import Placement
from eplb_opt.routers import Nearest
from eplb_opt.routing import Router, solve_routing
from eplb_opt.testing import Problem, check_routing, placements


def choices(placement: Placement, method: Nearest) -> NDArray[np.int64]:
    """Ask for every source's slot of every expert: [sources, layers, experts], -1 without replica.

    Batch s holds one token of every expert, all from source s.
    """
    gpus, layers, experts = placement.num_gpus, placement.num_layers, placement.num_experts
    held = placement.copies > 0
    tokens = np.tile(held.astype(np.int64), (gpus, 1, 1))
    sources = np.zeros((gpus, layers, gpus, experts), np.int64)
    sources[np.arange(gpus), :, np.arange(gpus)] = held
    if not placement.layered:
        tokens, sources = tokens[:, 0], sources[:, 0]
    routing = solve_routing(placement, tokens, method=method, source_tokens=sources)
    check_routing(placement, tokens, routing)
    routed = routing.tokens.reshape(gpus, layers, -1)
    chosen = np.full((gpus, layers, experts), -1)
    source, layer, slot = np.nonzero(routed)
    assert (routed <= 1).all()
    chosen[source, layer, placement.expert_of[layer, slot]] = slot
    return chosen


@given(placements(max_gpus=12), st.integers(1, 5), st.integers(0, 99))
def test_every_source_follows_the_rule(placement: Placement, per_node: int, seed: int) -> None:
    """The only one, else the same GPU, else the same node if that narrows it, else a fair draw."""
    chosen = choices(placement, Nearest(gpus_per_node=per_node, seed=seed))
    for layer in range(placement.num_layers):
        for expert in range(placement.num_experts):
            replicas = placement.replicas(expert, layer).tolist()
            drawn: Counter[int] = Counter()
            for source in range(placement.num_gpus):
                here = [r for r in replicas if r // placement.slots_per_gpu == source]
                near = [
                    r
                    for r in replicas
                    if r // placement.slots_per_gpu // per_node == source // per_node
                ]
                slot = int(chosen[source, layer, expert])
                if len(replicas) == 1:
                    assert slot == replicas[0]
                elif here:
                    assert slot == here[0]
                elif near and len(near) < len(replicas):
                    assert slot == near[0]
                else:
                    drawn[slot] += 1
            assert drawn.keys() <= set(replicas)
            dealt = [drawn[replica] for replica in replicas]
            assert max(dealt) - min(dealt) <= 1


def test_worked_example() -> None:
    """Two nodes of two GPUs; expert 0 is on GPUs 0 and 2, expert 1 on GPU 3 only."""
    placement = Placement([[0, -1], [2, 3], [0, 2], [1, 3]])
    chosen = choices(placement, Nearest(gpus_per_node=2))[:, 0]
    assert chosen[:, 0].tolist() == [0, 0, 4, 4]
    assert chosen[:, 1].tolist() == [6, 6, 6, 6]
    assert chosen[:, 2].tolist() == [2, 2, 5, 5]


def test_one_node_narrows_nothing() -> None:
    """All replicas on the source's node: the draw decides, and deals them out evenly."""
    placement = Placement([[0], [0], *[[1]] * 8])
    chosen = choices(placement, Nearest(gpus_per_node=10**12))[:, 0, 0]
    assert np.array_equal(chosen, choices(placement, Nearest(gpus_per_node=10))[:, 0, 0])
    assert chosen[:2].tolist() == [0, 1]
    assert sorted(chosen[2:].tolist()) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_draw_depends_on_the_seed() -> None:
    """The same seed draws the same; over seeds every source gets either replica."""
    placement = Placement([[0], [0], *[[1]] * 8])
    drawn = [
        choices(placement, Nearest(gpus_per_node=16, seed=seed))[2:, 0, 0] for seed in range(9)
    ]
    assert np.array_equal(drawn[0], choices(placement, Nearest(gpus_per_node=16))[2:, 0, 0])
    assert {tuple(source) for source in np.sort(np.array(drawn).T, axis=1)[:, [0, -1]]} == {(0, 1)}


@pytest.mark.parametrize("batches", [(), (3,), (2, 0)])
def test_counts_of_a_source_stay_together(
    draw_problem: Callable[..., Problem], batches: tuple[int, ...]
) -> None:
    """Sums by slot are those of a loop over sources, for any leading axes, from counts or ids."""
    rng = np.random.default_rng(4)
    placement = draw_problem(rng, 6, 4, 13, layers=2).placement
    held = placement.copies > 0
    sources = rng.integers(0, 9, (*batches, 2, 6, 13)) * held[:, None]
    tokens = sources.sum(axis=-2)
    chosen = choices(placement, Nearest())
    routing = solve_routing(placement, tokens, method="nearest", source_tokens=sources)
    check_routing(placement, tokens, routing)
    expected = np.zeros((*batches, 2, 24), np.int64)
    for at in np.ndindex(*sources.shape):
        *_, layer, source, expert = at
        if sources[at]:
            expected[(*at[:-2], chosen[source, layer, expert])] += sources[at]
    assert np.array_equal(routing.tokens.reshape(expected.shape), expected)
    # The same from ids: a row per token, padded to the largest source.
    rows = int(sources.sum(axis=-1).max(initial=0))
    ids = np.full((*batches, 2, 6, rows, 1), -1)
    for at in np.ndindex(*sources.shape[:-1]):
        of_source = np.repeat(np.arange(13), sources[at])
        ids[at][: of_source.size, 0] = of_source
    by_ids = solve_routing(placement, tokens, method="nearest", topk_ids=ids)
    assert np.array_equal(by_ids.tokens, routing.tokens)


@pytest.mark.parametrize(
    ("given_inputs", "message"),
    [
        ({}, r"nearest sends by source GPU: pass source_tokens=\[..., layers, 2, 3\] or topk_ids="),
        ({"topk_ids": [[0], [1], [2]]}, "tokens of all 2 source GPUs, not of 1"),
        ({"source_tokens": [[1, 1, 1]]}, "tokens of all 2 source GPUs, not of 1"),
        ({"source_tokens": [[1, 1, 0], [0, 0, 0]]}, r"source_tokens holds 0 tokens of expert 2"),
        ({"source_tokens": [[2, 1, 1], [-1, 0, 0]]}, r"source_tokens\[1, 0\] is -1"),
        ({"source_tokens": [[1, 1], [0, 0]]}, r"must be int .*3\], not int64 of shape \(2, 2\)"),
        ({"source_tokens": [[1], [1]]}, r"shape \(2, 1\)"),
        ({"source_tokens": [1, 1, 1]}, r"shape \(3,\)"),
        ({"source_tokens": [[[1, 1, 1], [0, 0, 0]]]}, r"shape \(1, 2, 3\)"),
        ({"source_tokens": [[1.0, 1, 1], [0, 0, 0]]}, "not float64"),
        ({"topk_ids": [[[0], [1]], [[2], [2]]]}, "topk_ids holds 2 tokens of expert 2"),
    ],
)
def test_missing_or_wrong_sources(given_inputs: dict[str, object], message: str) -> None:
    """What the rule needs is asked for; what disagrees with the tokens is refused."""
    placement = Placement([[0, 1], [0, 2]])
    with pytest.raises(InvalidTokensError, match=message):
        solve_routing(placement, [1, 1, 1], method="nearest", **given_inputs)  # type: ignore[arg-type]


def test_absent_experts() -> None:
    """Without tokens they are passed over, with tokens they are an error."""
    placement = Placement([[1], [-1]], num_experts=2, allow_missing=True)
    sources = np.array([[0, 2], [0, 3]])
    routing = solve_routing(placement, [0, 5], method="nearest", source_tokens=sources)
    assert routing.tokens.tolist() == [[5], [0]]
    with pytest.raises(InfeasibleError, match="expert 0 has tokens but no replica"):
        solve_routing(placement, [1, 5], method="nearest", source_tokens=[[1, 2], [0, 3]])


def test_inputs_are_never_written_to() -> None:
    """Source tokens may be read-only, and of any integer type and order."""
    placement = Placement([[0, 1], [0, 2]])
    sources = np.asfortranarray(np.array([[3, 0, 1], [2, 2, 0]], dtype=np.uint16))
    sources.flags.writeable = False
    routing = solve_routing(placement, [5, 2, 1], method="nearest", source_tokens=sources)
    assert routing.tokens.tolist() == [[3, 2], [2, 1]]


@pytest.mark.parametrize("gpus_per_node", [0, -8])
def test_nodes_have_gpus(gpus_per_node: int) -> None:
    """A node without GPUs is refused by name."""
    placement = Placement([[0, 1], [0, 2]])
    with pytest.raises(ValueError, match="gpus_per_node"):
        Router(placement, method=Nearest(gpus_per_node=gpus_per_node))


def test_a_negative_seed_is_refused() -> None:
    """The error names the option."""
    with pytest.raises(ValueError, match="seed must not be negative, not -1"):
        Nearest(seed=-1)


def test_experts_draw_on_their_own() -> None:
    """The draws of experts and layers are different, and every way to deal occurs as often."""
    per_gpu = np.repeat(np.arange(300)[None], 2, axis=0)
    slots = np.stack([per_gpu, per_gpu, -np.ones_like(per_gpu), -np.ones_like(per_gpu)], axis=1)
    placement = Placement(slots)
    drawn = choices(placement, Nearest())[2:] // 300
    assert sorted(set(map(tuple, drawn.reshape(2, -1).T.tolist()))) == [(0, 1), (1, 0)]
    first = drawn[0] == 0
    assert abs(first.mean() - 0.5) < 0.1
    assert abs((first[0] == first[1]).mean() - 0.5) < 0.15
