"""A sweep: every deployment once, the same table whoever works and whatever is lost on the way."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from eplb_opt.batches import Batches, BatchFacts
from eplb_opt.errors import InvalidPlacementError, SweepError
from eplb_opt.memory import memory_per_gpu
from eplb_opt.objective import Objective, Piece
from eplb_opt.placers import DeepSeek
from eplb_opt.placers.base import Placed, PlacementProblem, PlacerTraits
from eplb_opt.scenario import Scenario
from eplb_opt.step_time import StepTime
from eplb_opt.sweep_folder import read_sweep
from eplb_opt.sweep_results import Sweep
from eplb_opt.sweeping import sweep
from eplb_opt.trace import LoadTrace
from eplb_opt.workload import ModelShape

pytest.importorskip("joblib")
pytest.importorskip("pyarrow")

TIME = StepTime(Objective(pieces=(Piece(activation=15.0), Piece(token=0.5))))
TINY = ModelShape("tiny", layers=2, experts=8, top_k=2, hidden=64, ffn=32)
COUNTS = np.random.default_rng(1).integers(0, 30, (16, 2, 8))
GRID: dict[str, Any] = {
    "gpus": [2, 4],
    "redundant": [0, 4],
    "placers": [None, "deepseek"],
    "methods": ["uniform", "makespan"],
    "time": TIME,
    "jobs": 1,
}


def run(folder: Path, **changed: Any) -> Sweep:
    """Sweep the counts over the grid."""
    return sweep(LoadTrace(COUNTS, top_k=2), folder=folder, **GRID | changed)


def table(found: Sweep) -> list[dict[str, Any]]:
    """Return the rows as a table holds them, where NaN is no number."""
    return [row.flat() for row in found.rows]


class Cells:
    """Counts deployments as they are done."""

    def __init__(self) -> None:
        self.done: list[int] = []

    def __call__(self, done: int, total: int) -> None:
        """Remember how many are done."""
        self.done.append(done)

    @property
    def computed(self) -> int:
        """How many were not there before."""
        return self.done[-1] - self.done[0]


def test_every_deployment_once(tmp_path: Path) -> None:
    """In order, routers last; without a placer neither stage nor interval makes a difference."""
    given = {"stages": ["all", "decode"], "intervals": [None, 4], "placers": [None, "deepseek"]}
    found = run(tmp_path, gpus=[4, 2, 4], **given)
    rows = [(r.gpus, r.redundant, r.placer, r.stage, r.interval, r.method) for r in found.rows]
    assert rows == [
        (gpus, redundant, placer, stage, interval, method)
        for gpus in (4, 2)
        for redundant in (0, 4)
        for placer, stage, interval in (
            (None, None, None),
            *(
                ("deepseek", stage, interval)
                for stage in ("all", "decode")
                for interval in (None, 4)
            ),
        )
        for method in ("uniform", "makespan")
    ]
    assert len(list(tmp_path.glob("*.parquet"))) == found.cells == 20
    assert any(row.moves for row in found.rows if row.interval == 4)


def test_a_row_is_a_replay(tmp_path: Path) -> None:
    """The same figures as of the deployment by itself, after the steps that are collected."""
    found = run(tmp_path, intervals=[4], learn=0.5, slo=0.05)
    scenario = Scenario(4, 4, "deepseek", interval=4)
    facts = BatchFacts(
        Batches.of(LoadTrace(COUNTS, top_k=2), tokens=256, steps=None, top_k=8), 8, None
    )
    replay = scenario.replay(facts, GRID["methods"], first_step=8, time=TIME, slo=0.05)
    rows = found.rows[-2:]
    assert [row.method for row in rows] == ["uniform", "makespan"]
    assert [row.decode for row in rows] == [row.decode for row in replay.rows]
    assert [row.moves for row in rows] == [replay.moves] * 2
    assert (found.first_step, found.steps) == (8, 8)


def test_memory_of_the_model(tmp_path: Path) -> None:
    """With a window and staging where experts are rearranged, and only there."""
    given = {"gpus": [4], "redundant": [4], "placers": ["deepseek"], "weights": "fp8"}
    found = run(tmp_path, **given, intervals=[None, 4], model=TINY)
    still, moving = (row.memory for row in found.rows[::2])
    assert still == memory_per_gpu(TINY, 4, 4, weights="fp8", moves=False)
    assert moving == memory_per_gpu(TINY, 4, 4, weights="fp8", window_steps=4)
    with pytest.raises(ValueError, match="DeepSeek-V3 has 256 experts, the traffic 8"):
        run(tmp_path, model="deepseek-v3")


def test_a_later_call_computes_what_is_missing(tmp_path: Path) -> None:
    """Nothing the second time; a cell that is lost, or damaged, which is told by name."""
    whole, again = Cells(), Cells()
    found = run(tmp_path, progress=whole)
    assert table(run(tmp_path, progress=again)) == table(found) == table(read_sweep(tmp_path))
    assert (whole.computed, again.computed) == (8, 0)
    last = Cells()
    lost, damaged, *_ = sorted(tmp_path.glob("*.parquet"))
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-9])
    (tmp_path / "foreign.parquet").write_bytes(b"not of this sweep")
    with pytest.warns(UserWarning, match=f"{damaged.name}: damaged.*it is computed anew"):
        assert table(run(tmp_path, progress=last)) == table(found)
    assert last.computed == 2
    assert (tmp_path / "foreign.parquet").exists()


def test_more_deployments_in_the_same_folder(tmp_path: Path) -> None:
    """Only the new ones are computed, and the table is that of a sweep of them all."""
    cells = Cells()
    run(tmp_path / "one", gpus=[4])
    assert table(run(tmp_path / "one", progress=cells)) == table(run(tmp_path / "all"))
    assert cells.computed == 4


@pytest.mark.parametrize(
    "changed",
    [
        {"methods": ["uniform"]},
        {"time": StepTime(Objective(pieces=(Piece(activation=16.0),)))},
        {"learn": 0.5},
        {"slo": 1.0},
        {"model": TINY},
        {"steps": 12},
    ],
)
def test_other_inputs_are_another_sweep(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Their folder is refused, unless it is to be replaced."""
    given = {"gpus": [4], "redundant": [4], "placers": [None]}
    run(tmp_path, **given)
    with pytest.raises(FileExistsError, match="holds a sweep of other traffic, routers"):
        run(tmp_path, **given, **changed)
    run(tmp_path, **given, **changed, replace=True)
    assert len(list(tmp_path.glob("*.parquet"))) == 1


def test_traffic_is_known_by_its_content(tmp_path: Path) -> None:
    """A trace may be moved and copied; a count that changes makes it another one."""
    given = {"folder": tmp_path / "results", **GRID}
    cells = Cells()
    for name in ("one.npy", "two.npy"):
        np.save(tmp_path / name, COUNTS)
        os.utime(tmp_path / name, (1, 1))
        sweep(tmp_path / name, **given, progress=cells)
    assert (cells.done[-1], cells.computed) == (8, 8)
    np.save(tmp_path / "two.npy", COUNTS + 1)
    with pytest.raises(FileExistsError, match=r"results holds a sweep .*two\.npy"):
        sweep(tmp_path / "two.npy", **given)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"redundant": [0, 3]}, InvalidPlacementError, "2 GPUs, 3 redundant slots: 11 slots"),
        ({"redundant": [-4]}, InvalidPlacementError, "-4 redundant slots"),
        ({"gpus": []}, ValueError, "no deployment to try"),
        ({"placers": ["nobody"]}, ValueError, "unknown placement method 'nobody'"),
        ({"methods": ["nobody"]}, ValueError, "unknown method 'nobody'"),
        ({"methods": []}, ValueError, "no router to try"),
        ({"stages": ["dec"]}, ValueError, "no stage is called 'dec'"),
        ({"learn": 1.0}, ValueError, "learn is 1.0"),
        ({"backend": "spark"}, ValueError, "no backend is called 'spark'"),
        ({"traffic": "nowhere.npy"}, FileNotFoundError, "nowhere"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    tmp_path: Path, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The folder is not even made."""
    given: dict[str, Any] = {"traffic": LoadTrace(COUNTS), **GRID, **changed}
    with pytest.raises(error, match=message):
        sweep(folder=tmp_path / "results", **given)
    assert not (tmp_path / "results").exists()


@dataclass(frozen=True)
class Failing:
    """DeepSeek's placer, but for a number of slots where an engine gives up."""

    traits: ClassVar[PlacerTraits] = DeepSeek.traits

    slots: int

    def place(self, problem: PlacementProblem) -> Placed:
        """Place, or fail."""
        if problem.num_gpus * problem.slots_per_gpu == self.slots:
            raise MemoryError("no room")
        return DeepSeek().place(problem)


def test_a_failure_leaves_the_others_alone(tmp_path: Path) -> None:
    """The error names what failed, and why; all else is stored."""
    with pytest.raises(
        SweepError, match="2 of 4 deployments failed; the others are stored"
    ) as told:
        run(tmp_path, placers=[Failing(12)])
    assert list(told.value.failed) == [
        f"{gpus} GPUs, 4 redundant slots, {Failing(12)}, placed for all" for gpus in (2, 4)
    ]
    assert set(told.value.failed.values()) == {"MemoryError: no room"}
    assert {row.redundant for row in read_sweep(tmp_path).rows} == {0}
    with pytest.raises(SweepError, match="no step of stage prefill was collected"):
        run(tmp_path / "prefill", stages=["prefill"])


def test_a_lost_worker(tmp_path: Path) -> None:
    """Killed by one deployment, it costs that one alone; a later call computes just this."""

    @dataclass(frozen=True, repr=False)
    class Deadly:  # within the function, so that it is pickled with its code
        traits: ClassVar[PlacerTraits] = DeepSeek.traits

        flag: str

        def __repr__(self) -> str:
            return "deadly"

        def place(self, problem: PlacementProblem) -> Placed:
            if problem.slots_per_gpu == 6 and os.path.exists(self.flag):
                os.kill(os.getpid(), signal.SIGKILL)
            return DeepSeek().place(problem)

    flag = tmp_path / "deadly"
    flag.touch()
    given = {"gpus": [2], "redundant": [0, 4], "placers": [Deadly(str(flag))]}
    with pytest.raises(SweepError, match="1 of 2 deployments failed") as told:
        run(tmp_path / "some", **given, jobs=2)
    (reason,) = told.value.failed.values()
    assert "worker was lost" in reason
    flag.unlink()
    cells = Cells()
    found = run(tmp_path / "some", **given, progress=cells)
    assert cells.computed == 1
    assert table(found) == table(run(tmp_path / "all", **given))


KILLED = """
import os, signal, sys
import numpy as np
from eplb_opt import LoadTrace, Objective, Piece, StepTime, sweep

def kill(done, total):
    if done == 3:
        os.kill(os.getpid(), signal.SIGKILL)

sweep(
    sys.argv[1],
    gpus=[2, 4],
    redundant=[0, 4],
    placers=[None, "deepseek"],
    methods=["uniform", "makespan"],
    time=StepTime(Objective(pieces=(Piece(activation=15.0), Piece(token=0.5)))),
    folder=sys.argv[2],
    jobs=1,
    progress=kill,
)
"""


def test_a_sweep_that_is_killed_goes_on(tmp_path: Path) -> None:
    """With a real SIGKILL in the middle: what is there stays, and the table is the same."""
    trace = tmp_path / "trace.npy"
    np.save(trace, COUNTS)
    command = [sys.executable, "-c", KILLED, str(trace), str(tmp_path / "killed")]
    killed = subprocess.run(command, check=False, cwd=tmp_path)  # away from the sources
    assert killed.returncode == -signal.SIGKILL
    assert len(read_sweep(tmp_path / "killed").rows) == 3 * 2
    cells = Cells()
    found = sweep(trace, folder=tmp_path / "killed", progress=cells, **GRID)
    assert cells.computed == 5
    assert table(found) == table(sweep(trace, folder=tmp_path / "whole", **GRID))


def test_a_full_disk_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the sweep, is told, and what was written stays readable."""
    real, calls = os.fsync, []

    def full(file: int) -> None:
        calls.append(file)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        run(tmp_path)
    assert len(calls) == 4
    assert len(read_sweep(tmp_path).rows) == 2 * 2
    monkeypatch.setattr(os, "fsync", real)
    assert len(run(tmp_path).rows) == 8 * 2


def test_a_dask_cluster_gives_the_same_table(tmp_path: Path) -> None:
    """Whoever works; the traffic in memory travels with the work."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        found = run(tmp_path / "dask", backend="dask", address=cluster.scheduler_address, jobs=None)
    assert table(found) == table(run(tmp_path / "here"))
