"""What SGLang's recorder dumps: passes of one rank or of all, by the layout of its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from eplb_opt.errors import FormatError
from eplb_opt.load_trace import LoadTrace
from eplb_opt.trace import read_trace

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:.*have any load")

# Two layers, four experts in six slots, other replicas in each layer.
MAP = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 3]]


def record(number: int, rank: int, counts: Any, **more: Any) -> dict[str, Any]:
    """Give one pass as the recorder keeps it."""
    return {
        "forward_pass_id": number,
        "rank": rank,
        "gatherer_key": "primary",
        "global_physical_count": torch.tensor(counts, dtype=torch.int32),
        **more,
    }


def by_token(number: int, rank: int, mode: int, ids: Any) -> dict[str, Any]:
    """Give one pass of mode per_token: physical ids [layers, tokens, k]."""
    topk = torch.tensor(ids, dtype=torch.int32)
    counts = [np.bincount(np.ravel(layer), minlength=6).tolist() for layer in ids]
    return record(
        number,
        rank,
        counts,
        input_ids=[7] * topk.shape[1],
        positions=[0] * topk.shape[1],
        extend_seq_lens=None,
        forward_mode=mode,
        topk_ids_of_layer=topk,
        misc_objects=[],
    )


def dump(folder: Path, rank: int, *records: dict[str, Any], replicas: Any = MAP) -> Path:
    """Write one rank's file, under the recorder's name for it."""
    path = folder / f"expert_distribution_recorder_17{rank}.5_{rank}.pt"
    content = {
        "records": list(records),
        "last_physical_to_logical_map": torch.tensor(replicas),
    }
    torch.save(content, path)
    return path


def read(path: Path) -> LoadTrace:
    """Read dumps."""
    trace = read_trace(path)
    assert isinstance(trace, LoadTrace)
    return trace


def refusal(path: Path) -> FormatError:
    """Read dumps that must be refused."""
    with pytest.raises(FormatError) as caught:
        read_trace(path)
    return caught.value


ONES = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]


def test_replicas_are_summed_by_expert(tmp_path: Path) -> None:
    """Layer 0 has experts 0 and 1 twice, layer 1 has expert 3 three times."""
    path = dump(tmp_path, 0, record(7, 0, ONES), record(9, 0, np.multiply(ONES, 10)))
    expected = [[6, 8, 3, 4], [4, 3, 2, 12]]
    trace = read(path)
    np.testing.assert_array_equal(trace.tokens, [expected, np.multiply(expected, 10)])
    assert trace.tokens[1][1].tolist() == [40, 30, 20, 120]
    assert (trace.source_tokens, trace.facts.columns()) == (None, {})


def test_ranks_are_summed_by_pass(tmp_path: Path) -> None:
    """Whether a rank counts its own tokens or those it received, all ranks together have all."""
    for rank in (2, 0, 1):
        dump(tmp_path, rank, *(record(n, rank, np.multiply(ONES, 10**rank)) for n in (4, 5)))
    np.testing.assert_array_equal(
        read(tmp_path).tokens, np.multiply([[[6, 8, 3, 4], [4, 3, 2, 12]]] * 2, 111)
    )
    (tmp_path / "expert_distribution_recorder_171.5_1.pt").unlink()
    error = refusal(tmp_path)
    assert (error.path, "rank 1 is missing" in error.problem) == (tmp_path, True)


def test_tokens_tell_stage_scheduled_and_source(tmp_path: Path) -> None:
    """One rank prefills while the other decodes; then one decodes while the other is idle."""
    none: npt.NDArray[Any] = np.zeros((2, 0, 2), dtype=int)
    dump(
        tmp_path,
        0,
        by_token(1, 0, 1, [[[0, 1], [4, 5], [2, 3]], [[0, 1], [2, 3], [4, 5]]]),
        by_token(2, 0, 2, [[[0, 4]], [[0, 4]]]),
    )
    dump(tmp_path, 1, by_token(1, 1, 2, [[[2, 3]], [[3, 2]]]), by_token(2, 1, 4, none))
    trace = read(tmp_path)
    assert trace.facts.stage is not None
    assert trace.facts.scheduled is not None
    assert trace.facts.stage.tolist() == ["prefill", "decode"]
    assert trace.facts.scheduled.tolist() == [4, 1]
    np.testing.assert_array_equal(
        trace.source_tokens,
        [
            [[[2, 2, 1, 1], [0, 0, 1, 1]], [[1, 1, 1, 3], [1, 1, 0, 0]]],
            [[[2, 0, 0, 0], [0, 0, 0, 0]], [[0, 0, 0, 2], [0, 0, 0, 0]]],
        ],
    )
    np.testing.assert_array_equal(trace.tokens[0], [[2, 2, 2, 2], [2, 2, 1, 3]])


def test_a_folder_with_one_dump_of_all_ranks(tmp_path: Path) -> None:
    """Mode stat sums over ranks itself; its unused buffer shows as idle steps."""
    counts = torch.zeros((3, 2, 4), dtype=torch.int32)
    counts[0] = 5
    content = {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}
    torch.save(content, tmp_path / "expert_distribution_recorder_17.5.pt")
    assert read(tmp_path).idle_steps().tolist() == [1, 2]


NEGATIVE = [[1, 2, 3, 4, 5, 6], [1, 2, -3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("records", "place", "message"),
    [
        ([], "records", "no forward pass was recorded"),
        ([record(2, 0, ONES), record(1, 0, ONES)], "records[1].forward_pass_id", "1 after 2"),
        ([record(2, 0, ONES), record(2, 0, ONES)], "records[1].forward_pass_id", "2 after 2"),
        ([record(1, 0, ONES), record(2, 1, ONES)], "records[1].rank", "expected one rank"),
        ([record(1, 0, [ONES[0]])], "records[0].global_physical_count", "expected integers [2, 6]"),
        ([record(1, 0, NEGATIVE)], "records[0].global_physical_count[1][2]", "-3; expected"),
        ([{"forward_pass_id": 1, "rank": 0}], "records[0]", "the key 'global_physical_count'"),
        ([{"rank": 0}], "records[0]", "the key 'forward_pass_id'"),
        ([7], "records[0]", "expected an object"),
        (
            [by_token(1, 0, 2, [[[0, 1]], [[0, 1]]]), record(2, 0, ONES)],
            "records[1]",
            "the key 'forward_mode'",
        ),
        (
            [record(1, 0, ONES, global_physical_count=[1])],
            "records[0].global_physical_count",
            "expected a tensor",
        ),
    ],
)
def test_passes_of_another_form_are_refused(
    tmp_path: Path, records: Any, place: str, message: str
) -> None:
    """The record is told by its number in the file."""
    path = dump(tmp_path, 0, *records)
    error = refusal(path)
    assert (error.path, error.place, message in error.problem) == (path, place, True), str(error)


@pytest.mark.parametrize("replicas", [[0, 1], [[0.0, 1.0]], [[0, -1, 2, 3, 0, 1]] * 2])
def test_maps_of_another_form_are_refused(tmp_path: Path, replicas: Any) -> None:
    """Each slot has an expert."""
    path = dump(tmp_path, 0, record(1, 0, ONES), replicas=replicas)
    assert refusal(path).place == "last_physical_to_logical_map"


def test_a_dump_without_the_map_is_refused(tmp_path: Path) -> None:
    """Without it nobody knows whose counts these are."""
    torch.save({"records": [record(1, 0, ONES)]}, tmp_path / "a.pt")
    assert "'last_physical_to_logical_map'" in refusal(tmp_path / "a.pt").problem


def test_ranks_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    """Another dump of the same rank, other passes, other replicas, another mode."""
    dump(tmp_path, 0, record(1, 0, ONES), record(2, 0, ONES))
    other = dump(tmp_path, 1, record(1, 0, ONES))
    assert "rank 0 is in" in refusal(tmp_path).problem
    dump(tmp_path, 1, record(1, 1, ONES), record(3, 1, ONES))
    assert "has no pass 2" in refusal(tmp_path).problem
    dump(tmp_path, 1, record(1, 1, ONES), record(2, 1, ONES), replicas=MAP[::-1])
    assert refusal(tmp_path).place == "last_physical_to_logical_map"
    passes = (by_token(n, 1, 2, [[[0, 1]], [[0, 1]]]) for n in (1, 2))
    dump(tmp_path, 1, *passes)
    assert (refusal(tmp_path).path, refusal(tmp_path).place) == (other, "records")


def test_a_truncated_dump_is_refused(tmp_path: Path) -> None:
    """A file that was not written to its end."""
    path = dump(tmp_path, 0, record(1, 0, ONES))
    dump(tmp_path, 1, record(1, 1, ONES))
    path.write_bytes(path.read_bytes()[:-100])
    error = refusal(tmp_path)
    assert (error.path, "damaged" in error.problem) == (path, True)
