"""Recording top-k ids: counted exactly, and refused by layer, token and id."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_opt.demand import count_tokens
from eplb_opt.errors import InvalidTokensError
from eplb_opt.load_trace import LoadTrace
from eplb_opt.recorder import Recorder
from eplb_opt.trace import read_trace

pytest.importorskip("safetensors")

pytestmark = pytest.mark.filterwarnings("ignore:.*have any load")


def read(folder: Path) -> LoadTrace:
    """Read a recording."""
    trace = read_trace(folder)
    assert isinstance(trace, LoadTrace)
    return trace


@given(data=st.data(), by_source=st.booleans())
@settings(max_examples=30, deadline=None)
def test_what_is_recorded_is_what_is_counted(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, by_source: bool
) -> None:
    """Padding counts for nothing but is scheduled; layer by layer or at once is the same."""
    shape = data.draw(hnp.array_shapes(min_dims=5, max_dims=5, max_side=3))  # steps, L, S, rows, k
    ids = data.draw(hnp.arrays(np.int16, shape, elements=st.integers(-1, 5)))
    if not by_source:
        ids = ids[:, :, 0]
    folder = tmp_path_factory.mktemp("recording")
    layers = range(3, 3 + shape[1])
    sources = shape[2] if by_source else None
    with Recorder(folder, 6, layers, sources=sources, steps_per_file=2) as recorder:
        for step, of_step in enumerate(ids):
            if step % 2:
                recorder.record(of_step, stage="prefill")
                continue
            for layer, of_layer in reversed(list(zip(layers, of_step, strict=True))):
                for source, own in enumerate(of_layer if by_source else [of_layer]):
                    recorder.add(layer, own[:1], source=source)
                    recorder.add(layer, own[1:], source=source)
            recorder.end_step(stage="decode")
    trace = read(folder)
    found = trace.source_tokens if by_source else trace.tokens
    np.testing.assert_array_equal(found, count_tokens(ids, 6))
    assert trace.facts.stage is not None
    assert trace.facts.scheduled is not None
    assert trace.facts.stage.tolist() == [("decode", "prefill")[n % 2] for n in range(len(ids))]
    rows = shape[3] * (shape[2] if by_source else 1)
    assert trace.facts.scheduled.tolist() == [rows] * len(ids)
    assert trace.layer_ids == tuple(layers)


def test_torch_tensors_are_taken(tmp_path: Path) -> None:
    """On the CPU or not, in any integer dtype."""
    torch = pytest.importorskip("torch")
    with Recorder(tmp_path, 4, [0]) as recorder:
        recorder.record(torch.tensor([[[0, 1], [3, -1]]], dtype=torch.int32))
    assert read(tmp_path).load().tolist() == [[1, 1, 0, 1]]


def test_steps_have_the_time_at_which_they_began(tmp_path: Path) -> None:
    """The clock at the first ids, unless it is given."""
    before = time.time()
    with Recorder(tmp_path, 2, [0]) as recorder:
        recorder.record([[[0]]])
        recorder.record([[[1]]])
        recorder.record([[[1]]], time=before + 1e6, scheduled=7)
    facts = read(tmp_path).facts
    assert facts.time is not None
    assert facts.scheduled is not None
    assert before - 1 <= facts.time[0] <= facts.time[1] <= time.time() + 1
    assert facts.time[2] == before + 1e6
    assert facts.scheduled.tolist() == [1, 1, 7]


@pytest.mark.parametrize(
    ("layer", "ids", "source", "message"),
    [
        (4, [[0, 1], [2, 6]], 0, "layer 4, token 1, choice 1: 6 is no id of 6 experts"),
        (4, [[-2, 1]], 0, "layer 4, token 0, choice 0: -2 is no id"),
        (5, [[0]], 0, "layer 5 is none of the 2, 3 to 4"),
        (3, [[0.0]], 0, "layer 3: ids are float64"),
        (3, [0, 1], 0, r"layer 3: ids are int64 \[2\]; expected integers \[rows, k\]"),
        (3, [[0]], 2, "layer 3: source 2 is none of 2"),
        (3, [[0]], -1, "layer 3: source -1 is none of 2"),
    ],
)
def test_ids_that_do_not_fit_are_named(
    tmp_path: Path, layer: int, ids: Any, source: int, message: str
) -> None:
    """Nothing of them is counted."""
    with Recorder(tmp_path, 6, [3, 4], sources=2) as recorder:
        recorder.add(3, [[5]])
        recorder.add(4, [[5]])
        with pytest.raises(InvalidTokensError, match=message):
            recorder.add(layer, ids, source=source)
        recorder.end_step()
    assert read(tmp_path).load().sum() == 2


def test_every_layer_must_be_there(tmp_path: Path) -> None:
    """A layer that vanishes is named; the step can be completed, or given up."""
    with Recorder(tmp_path, 2, [3, 4, 5]) as recorder:
        recorder.add(4, [[0]])
        with pytest.raises(InvalidTokensError, match="step 0: no ids of layer 3, nor of 1 others"):
            recorder.end_step()
        recorder.add(3, [[0]])
        recorder.add(5, np.empty((0, 1), dtype=int))
        recorder.end_step()
        recorder.add(3, [[1]])
        recorder.begin_step()
        recorder.record([[[0]]] * 3)
        with pytest.raises(InvalidTokensError, match="ids of 2 layers; expected 3"):
            recorder.record([[[0]]] * 2)
        recorder.add(3, [[1]])  # left out: it is not ended
    np.testing.assert_array_equal(
        read(tmp_path).tokens, [[[1, 0], [1, 0], [0, 0]], [[1, 0], [1, 0], [1, 0]]]
    )


def test_a_step_by_source_has_every_source(tmp_path: Path) -> None:
    """A rank that is missing is told by the layer."""
    with Recorder(tmp_path, 2, [3], sources=2) as recorder:
        recorder.record([[[[0]], [[1]]]])
        with pytest.raises(InvalidTokensError, match="layer 3: ids of 1 sources; expected 2"):
            recorder.record([[[[0]]]])


@pytest.mark.parametrize(
    "arguments", [(0, [0]), (4, []), (4, [1, 1]), (4, [2, 1]), (4, [-1])], ids=str
)
def test_recorders_of_nothing_are_refused(tmp_path: Path, arguments: Any) -> None:
    """There are experts, and layers that rise."""
    with pytest.raises(InvalidTokensError):
        Recorder(tmp_path, *arguments)
