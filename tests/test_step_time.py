"""What a step takes beside its experts: worked examples, limits, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt.step_time import Communication, Line, Migration, StepTime
from eplb_opt.transfer import Links

SLOW = Links(inside=100e9, between=10e9, gpus_per_node=2)


def by_hand(flows: npt.NDArray[np.int64], links: Links) -> float:
    """Return the seconds of the busiest GPU for a byte per token, flow by flow."""
    gpus = len(flows)
    busiest = 0.0
    for gpu in range(gpus):
        for row in (flows[gpu], flows[:, gpu]):
            inside = between = 0
            for other in range(gpus):
                if other // links.gpus_per_node != gpu // links.gpus_per_node:
                    between += int(row[other])
                elif other != gpu:
                    inside += int(row[other])
            busiest = max(busiest, inside / links.inside, between / links.between)
    return busiest


@given(st.data(), st.integers(1, 6), st.integers(1, 4))
def test_an_all_to_all_takes_as_long_as_its_busiest_gpu(
    data: st.DataObject, gpus: int, per_node: int
) -> None:
    """Bytes inside and between nodes, sent and received, are counted flow by flow."""
    cells = st.lists(st.integers(0, 1000), min_size=gpus, max_size=gpus)
    flows = np.array(data.draw(st.lists(cells, min_size=gpus, max_size=gpus)))
    links = Links(100e9, 10e9, per_node)
    moving = Communication(hidden=1000, links=links)
    tokens = flows.sum(axis=0)
    found = moving.time(tokens, np.array(float(flows.sum())), flows)
    wanted = 1e6 * 4000 * by_hand(flows, links) if flows.any() else 0
    assert found == pytest.approx(wanted)


@given(st.lists(st.integers(0, 50), min_size=8, max_size=8), st.sampled_from([1, 2, 4, 8]))
def test_unknown_sources_are_every_gpu_alike(counts: list[int], per_node: int) -> None:
    """Without flows, each GPU's tokens come from all GPUs in equal parts."""
    tokens = np.array(counts) * 8
    flows = np.broadcast_to(tokens // 8, (8, 8))
    moving = Communication(hidden=512, links=Links(100e9, 10e9, per_node), latency=3)
    batch = np.array(1.0)
    assert moving.time(tokens, batch) == pytest.approx(moving.time(tokens, batch, flows))


def test_an_all_gather_brings_every_token_to_every_gpu() -> None:
    """METRO's 2 MB per GPU at 600 GB/s take about 3 µs; other nodes' tokens come in once a node."""
    one_node = Communication(1024, Links(600e9, 600e9, 8), "all-gather", combine_bytes=0)
    tokens = np.full(8, 128)
    assert one_node.time(tokens, np.array(1024.0)) == pytest.approx(3.06, abs=0.01)
    two_nodes = Communication(1000, SLOW, "all-gather", combine_bytes=0)
    # 100 tokens on 4 GPUs in nodes of 2: 50 from the other node, half of them by each GPU.
    assert two_nodes.time(np.full(4, 25), np.array(100.0)) == pytest.approx(25 * 2000 / 10e9 * 1e6)


def test_latency_counts_twice_and_not_without_tokens() -> None:
    """Dispatch and combine wait once each; an empty layer exchanges nothing."""
    moving = Communication(1, latency=5, dispatch_bytes=0, combine_bytes=0)
    times = moving.time(np.array([[3, 1], [0, 0]]), np.array([1.0, 0.0]))
    assert times.tolist() == [10, 0]


def test_overlapped_moves_hold_up_what_does_not_fit_beside_the_step() -> None:
    """They use links while these carry no tokens; without overlap serving stops."""
    stop = Migration(1000, share=0.5)
    beside = Migration(1000, share=0.5, overlapped=True)
    assert stop.stall(400, step=1000, communication=300) == 800
    assert beside.stall(400, step=1000, communication=300) == 100
    assert beside.stall(300, step=1000, communication=300) == 0


def test_prefill_and_decode_have_rests_of_their_own() -> None:
    """Each grows with a GPU's tokens along its own line."""
    time = StepTime("deepseek-v3-fp8", decode=Line(10, 1), prefill=Line(20, 2))
    assert time.rest("decode", np.array([5.0])).tolist() == [15]
    assert time.rest("prefill", np.array([5.0])).tolist() == [30]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Line(-1), "offset is -1; expected a number from 0"),
        (lambda: Line(0, float("nan")), "per_token is nan"),
        (lambda: Communication(0), "hidden is 0; expected 1 or more"),
        (lambda: Communication(8, exchange="ring"), "no exchange is called 'ring'"),  # type: ignore[arg-type]
        (lambda: Communication(8, latency=float("inf")), "latency is inf"),
        (lambda: StepTime("activations"), "objective activations counts, and a step takes"),
        (lambda: StepTime("no-such"), "unknown objective 'no-such'"),
        (lambda: StepTime("deepseek-v3-fp8", routers={"metro": -1}), "router metro takes -1 µs"),
        (lambda: Migration(0), "expert_bytes=0, share=1.0"),
        (lambda: Migration(8, share=0), "expert_bytes=8, share=0"),
    ],
)
def test_what_takes_no_time_is_refused(make: object, problem: str) -> None:
    """The message has the number and what was expected."""
    assert callable(make)
    with pytest.raises(ValueError, match=re.escape(problem)):
        make()
