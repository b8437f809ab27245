"""``eplb-opt advise``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from eplb_opt.cli import app
from eplb_opt.trace import LoadTrace, StepFacts, write_trace


def run(*arguments: object, code: int = 0) -> Any:
    """Run the command; the result has `stdout` and `stderr`."""
    words = ["advise", *map(str, arguments)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "130"})
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write 80 steps, every other of prefill, for a model of eight experts; two are hot."""
    share = np.array([4.0, 4, 1, 1, 1, 1, 1, 1]) / 14
    stage = np.array(["decode", "prefill"] * 40)
    size = np.where(stage == "decode", 64, 8000)
    rng = np.random.default_rng(1)
    tokens = rng.multinomial(2 * size[:, None], share, (80, 2))
    write_trace(LoadTrace(tokens, facts=StepFacts(stage=stage), top_k=2), tmp_path / "mixed")
    return tmp_path / "mixed"


def test_the_answer_is_printed_with_its_reasons(trace: Path) -> None:
    """Yes for prefill, with a table of what was tried."""
    options = ("--gpus", 4, "--target", "prefill", "--model", "mixtral-8x7b", "--prefill-slo", 9)
    tried = ("--placer", "search", "--interval", "0,10")
    found = run(trace, *options, *tried, "--rest", "900,2")
    out = " ".join(found.stdout.split())
    assert "20 steps to learn from, 30 to choose by, 30 to judge on" in out
    assert "Yes: " in out
    assert "less mean prefill time" in out
    assert "42 candidates, the best 12" in out
    assert "GiB more on each GPU" in out
    assert "within the SLO" in out
    assert found.stderr == ""


def test_figures_are_written(trace: Path, tmp_path: Path) -> None:
    """To a file beside what is printed, or in place of it."""
    path = tmp_path / "advice.json"
    tried = ("--redundant", 4, "--placer", "search", "--method", "metro", "--interval", 0)
    options = ("--gpus", 4, *tried, "--collect", "all", "--min-gain", 3)
    run(trace, *options, "--quiet", "--json", path)
    written = json.loads(path.read_text())
    assert json.loads(run(trace, *options, "--json", "-").stdout) == written
    assert {(c["placer"], c["router"]) for c in written["candidates"]} == {
        ("search", "uniform"),
        ("search", "metro"),
    }
    assert written["min_gain"] == 0.03
    assert written["costs"]["memory"] is None


@pytest.mark.parametrize(
    ("options", "code", "problem"),
    [
        (("--redundant", "four"), 2, "expected numbers between commas"),
        (("--interval", "-1"), 2, "expected numbers from 0"),
        (("--json", "nowhere/x.json"), 2, "is not a folder"),
        (("--target", "both"), 1, "no stage is called 'both'"),
        (("--model", "deepseek-v3"), 1, "has 256 experts, the traffic 8"),
        (("--objective", "tokens"), 1, "objective tokens counts, and a step takes"),
        (("--steps", 9), 1, "9 steps are too few"),
    ],
)
def test_what_cannot_be_advised_on_is_told(
    trace: Path, options: tuple[object, ...], code: int, problem: str
) -> None:
    """With nothing on standard output."""
    found = run(trace, "--gpus", 4, *options, code=code)
    assert found.stdout == ""
    assert problem in " ".join(found.stderr.replace("│", " ").split())
