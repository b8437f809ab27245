"""``eplb-opt sweep``: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from eplb_opt.cli import app
from eplb_opt.memory import WeightFormat, memory_per_gpu
from eplb_opt.sweep_folder import read_sweep
from eplb_opt.trace import LoadTrace, StepFacts, write_trace

pytest.importorskip("joblib")
pytest.importorskip("pyarrow")

EXPERTS = 8  # as Mixtral has
OPTIONS = ("--gpus", "2,4", "--redundant", "0,4", "--jobs", 1, "--rest", "900,2")


def run(*arguments: object, code: int = 0) -> Any:
    """Run the command; the result has `stdout` and `stderr`."""
    words = ["sweep", *map(str, arguments)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "130"})
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write 16 steps of decode and of prefill."""
    tokens = np.random.default_rng(1).integers(0, 20, (16, 2, EXPERTS))
    stage = np.array(["decode", "decode", "prefill", "decode"] * 4)
    tokens[stage == "prefill"] *= 30
    facts = StepFacts(stage=stage, scheduled=np.where(stage == "decode", 90, 2000))
    write_trace(LoadTrace(tokens, facts=facts, top_k=2), tmp_path / "mixed")
    return tmp_path / "mixed"


def test_the_frontier_of_every_ep_size_and_stage(trace: Path, tmp_path: Path) -> None:
    """Tables of what nothing beats, of all rows that the folder holds."""
    folder = tmp_path / "results"
    more = (
        "--placer",
        "none,deepseek",
        "--placer",
        "search:within=0.02,work=9",
        "--interval",
        "none,4",
    )
    out = run(trace, *OPTIONS, *more, "--collect", "all,decode", "--folder", folder).stdout
    assert "steps 4 to 15; 36 deployments, 108 rows with their routers" in out
    for gpus in (2, 4):
        for stage in ("decode", "prefill"):
            assert f"{gpus} GPUs, {stage}: " in out
    assert "no other has less redundancy" in out
    assert {row.placer for row in read_sweep(folder).rows} == {
        None,
        "deepseek",
        "search:within=0.02,work=9",
    }


def test_figures_are_written(trace: Path, tmp_path: Path) -> None:
    """JSON and CSV hold a row per deployment and router, the figure is a picture."""
    plot, rows = tmp_path / "pareto.svg", tmp_path / "rows.csv"
    time = ("--model", "mixtral-8x7b", "--method", "flow", "--bytes-per-weight", 2)
    written = ("--json", "-", "--csv", rows, "--plot", plot, "--folder", tmp_path / "results")
    found = json.loads(run(trace, *OPTIONS, *time, *written).stdout)
    assert len(found["rows"]) == found["cells"] == 8
    weights = memory_per_gpu("mixtral-8x7b", 2, weights=WeightFormat(16)).experts
    assert found["rows"][0]["memory_experts"] == weights
    with rows.open() as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["flow"] * 8
    assert plot.read_text(encoding="utf-8").startswith("<?xml")


def test_what_cannot_be(trace: Path, tmp_path: Path) -> None:
    """A line says what is wrong; a folder of another sweep stays as it is, unless told."""
    folder = ("--folder", tmp_path / "results")
    assert (
        "2 GPUs, 3 redundant slots: 11 slots do not divide"
        in run(trace, "--gpus", 2, "--redundant", 3, *folder, code=1).stderr
    )
    run(trace, "--gpus", 2, "--jobs", 1, *folder)
    other = (trace, "--gpus", 2, "--jobs", 1, *folder, "--method", "flow")
    assert "holds a sweep of other traffic, routers" in run(*other, code=1).stderr
    run(*other, "--replace", "--quiet")
    run(trace, "--gpus", 2, "--interval", "4,often", *folder, code=2)
    failed = run(trace, "--gpus", 2, "--jobs", 1, "--learn", 0, *folder, "--replace", code=1).stderr
    assert "error: 1 of 2 deployments failed; the others are stored" in failed
    assert "2 GPUs, 0 redundant slots, deepseek, placed for all: InvalidTokensError" in failed
