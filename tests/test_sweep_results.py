"""Rows of a sweep: the frontier's law, and nothing lost in a table."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from eplb_opt.memory import MemoryPerGpu
from eplb_opt.replaying import StageTimes
from eplb_opt.sweep_results import COLUMNS, Sweep, SweepRow

DECODE = StageTimes(9, 2.0, 1.9, 2.5, 3.0, math.nan, *(0.5,) * 5, 7.0, 10.0, 8.0, 4.0, 12.0, 5e4)
MEMORY = MemoryPerGpu(800, 200, 30, 4)
ROW = SweepRow(8, 32, "search", "decode", 100, "metro", DECODE, None, 5e4, 3, 40, MEMORY)


def timed(cost: int, mean: float, gpus: int = 8) -> SweepRow:
    """Make a row without memory, whose redundant slots are what it costs."""
    decode = replace(DECODE, mean=mean)
    return replace(ROW, gpus=gpus, redundant=cost, decode=decode, memory=None)


def sweep(*rows: SweepRow) -> Sweep:
    """Make a sweep of rows."""
    return Sweep("traffic", "makespan", 256, 10, 30, len(rows), rows)


@given(points=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=12))
def test_the_frontier_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    """Each row is on it, or one of it costs no more and takes no longer; it falls as it rises."""
    frontier = sweep(*(timed(*point) for point in points), timed(0, 0.5, gpus=16)).frontier(8)
    best = [(row.cost, row.mean("decode") or 0.0) for row in frontier]
    assert set(best) <= set(points)
    for cost, mean in points:
        assert any(c <= cost and m <= mean for c, m in best)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(best))


def test_the_best_of_an_ep_size() -> None:
    """The shortest mean step, and of several the cheapest; none where no step is of the stage."""
    found = sweep(timed(32, 2.0), timed(16, 1.0), timed(64, 1.0), timed(0, 0.1, gpus=16))
    assert found.best(8) == timed(16, 1.0)
    assert found.best(8, "prefill") is None
    assert (found.gpus, found.stages) == ((8, 16), ("decode",))


def test_memory_counts_where_it_is_known() -> None:
    """Bytes of a GPU with all that goes with redundancy, else redundant slots."""
    assert ROW.cost == 800 + 200 + 30 + 4
    assert replace(ROW, memory=None).cost == 32


def test_a_table_loses_nothing() -> None:
    """A row comes back from its figures; what is not known is no number in a table."""
    bare = replace(ROW, placer=None, stage=None, interval=None, memory=None, prefill=DECODE)
    for row in (ROW, bare, replace(ROW, decode=None, tokens_per_second=math.nan)):
        flat = row.flat()
        assert list(flat) == list(COLUMNS)
        assert repr(SweepRow.of(flat)) == repr(row)
    assert ROW.flat()["decode_within_slo"] is None
    assert ROW.flat()["prefill_mean"] is None


def test_json_and_csv() -> None:
    """What is swept, and a row for each, under the names of the columns."""
    given = json.loads(sweep(ROW).to_json())
    assert given["traffic"] == "traffic"
    assert given["rows"] == [ROW.flat()]
    header, line = sweep(ROW).to_csv().splitlines()
    assert header.split(",") == list(COLUMNS)
    assert line.startswith("8,32,search,decode,100,metro,9,2.0,")
