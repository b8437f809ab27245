"""``eplb-opt replay``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from eplb_opt.cli import app
from eplb_opt.formats.placements import write_placement
from eplb_opt.placement import Placement
from eplb_opt.placers import first_placement
from eplb_opt.trace import LoadTrace, StepFacts, write_trace

LAYERS, EXPERTS = 3, 16


def run(*arguments: object, code: int = 0) -> Any:
    """Run the command; the result has `stdout` and `stderr`."""
    words = ["replay", *map(str, arguments)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "130"})
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write 40 steps of decode and of prefill."""
    tokens = np.random.default_rng(1).integers(0, 20, (40, LAYERS, EXPERTS))
    stage = np.array(["decode", "decode", "prefill", "decode"] * 10)
    tokens[stage == "prefill"] *= 30
    facts = StepFacts(stage=stage, scheduled=np.where(stage == "decode", 90, 2000))
    write_trace(LoadTrace(tokens, facts=facts, top_k=2), tmp_path / "mixed")
    return tmp_path / "mixed"


def test_methods_stand_side_by_side_with_and_without_updates(trace: Path) -> None:
    """A table per stage, on the placement that stays and as the loop keeps it."""
    options = ("--gpus", 4, "--redundant", 4, "--placer", "search", "--interval", 5)
    time = ("--model", "mixtral-8x7b", "--rest", "900,2", "--slo", 5, "--router-time", "metro=3")
    found = run(trace, *options, *time, "--stale", "flow", "--window", 5)
    out = found.stdout
    assert "steps 10 to 39; 4 GPUs, 4 redundant slots; objective deepseek-v3-fp8" in out
    assert out.count("decode; placement: stays") == out.count("prefill; placement: stays") == 1
    assert out.count("decisions (0 declined), ") == 2
    assert out.count("PAR 1.") == 2
    assert out.count("flow, stale 5") == 4
    assert "in SLO" in out
    assert found.stderr == ""


def test_figures_are_written_as_they_are_printed(trace: Path, tmp_path: Path) -> None:
    """JSON holds both replays, CSV a row per method of each, the figure is a picture."""
    plot, csv = tmp_path / "steps.svg", tmp_path / "rows.csv"
    options = ("--gpus", 4, "--placer", "deepseek", "--interval", 4, "--method", "flow")
    found = run(trace, *options, "--json", "-", "--csv", csv, "--plot", plot)
    replays = json.loads(found.stdout)["replays"]
    assert [len(replay["rows"]) for replay in replays] == [1, 1]
    assert replays[0]["moves"] == 0 == len(replays[0]["decisions"])
    assert [told["step"] for told in replays[1]["decisions"]] == list(range(10, 40, 4))
    assert set(replays[1]["decisions"][0]) >= {"par_mean", "expected_mean", "moves", "declined"}
    assert len(replays[1]["rows"][0]["layer_makespan"]) == LAYERS
    assert replays[0]["rows"][0]["decode_within_slo"] is None
    header, *rows = csv.read_text().splitlines()
    assert header.startswith("decisions,moves,method,decode_steps,decode_mean")
    assert len(rows) == 2
    assert "<svg" in plot.read_text()
    assert "note: tokens and weights move in no time here" in found.stderr


def test_a_placement_file_is_served_from_the_first_step(trace: Path, tmp_path: Path) -> None:
    """Nothing needs to be collected where the placement is given."""
    slots = first_placement(LAYERS, 4, 5, num_experts=EXPERTS)
    path = tmp_path / "map.npz"
    write_placement(Placement(slots, EXPERTS), path)
    out = run(trace, "--gpus", 4, "--placement", path, "--method", "metro").stdout
    assert "steps 0 to 39; 4 GPUs, 4 redundant slots" in out


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("vllm", {"window_size": 4, "step_interval": 8, "num_redundant_experts": 4}),
        ("sglang", {"enable_eplb": True, "eplb_rebalance_num_iterations": 7}),
        (
            "vllm-ascend",
            {
                "dynamic_eplb": True,
                "expert_heat_collection_interval": 2,
                "algorithm_execution_interval": 3,
                "expert_map_record_path": "map.json",
            },
        ),
    ],
)
def test_an_engines_settings_make_its_loop(
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    settings: dict[str, object],
) -> None:
    """The loop decides as often as the engine's cycle says; no map is recorded by a replay."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(settings))
    options = ("--gpus", 4, "--settings", path, "--engine", engine, "--method", "flow")
    out = run(trace, *options, "--json", "-").stdout
    fixed, updated = json.loads(out)["replays"]
    assert fixed["decisions"] == []
    assert len(updated["decisions"]) == 5
    assert not Path("map.json").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--interval", 4), "--interval needs a --placer"),
        (("--settings", "x.json"), "--settings and --engine go together"),
        (("--engine", "vllm"), "--settings and --engine go together"),
        (("--settings", "x.json", "--engine", "x"), "no engine is called 'x'"),
        (("--settings", "x", "--engine", "vllm", "--placement", "y"), "give one of --placement"),
        (("--settings", "x", "--engine", "vllm", "--placer", "search"), "say who places"),
        (("--settings", "x", "--engine", "vllm", "--redundant", 4), "say how many are redundant"),
        (("--settings", "x", "--engine", "vllm", "--collect", "decode"), "say what is collected"),
        (("--min-gain", 0.1), "are for --interval"),
        (("--placer", "search", "--interval", 4, "--break-even", 9), "give --model"),
        (("--nodes", 3), "3 nodes do not divide 4 GPUs"),
        (("--router-time", "metroo=3"), "'metroo' is not replayed"),
        (("--gathers", "flow"), "'flow' is not replayed"),
        (("--latency", 3), "of what moves: give --model"),
        (("--rest", "1,2,3"), "expected OFFSET or OFFSET,PER_TOKEN"),
        (("--router-time", "metro"), "expected METHOD=MICROSECONDS"),
        (("--router-time", "metro=-1"), "expected numbers from 0"),
        (("--plot", "x.txt"), "does not end in"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    trace: Path, options: tuple[object, ...], problem: str
) -> None:
    """Before any work, with exit code 2."""
    stderr = run(trace, "--gpus", 4, *options, code=2).stderr
    assert problem in " ".join(stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--collect", "both"), "no stage is called 'both'"),
        (("--objective", "activations"), "objective activations counts, and a step takes"),
        (("--model", "mixtral-8x7b", "--exchange", "ring"), "no exchange is called 'ring'"),
        (("--redundant", 3), "divide"),
        (("--learn", 0, "--placer", "search"), "no step of stage all was collected"),
        (("--method", "vllm-hash"), "vllm-hash needs topk_ids"),
    ],
)
def test_what_cannot_be_replayed_is_told_in_a_line(
    trace: Path, options: tuple[object, ...], problem: str
) -> None:
    """With exit code 1, and nothing on standard output."""
    found = run(trace, "--gpus", 4, *options, code=1)
    assert found.stdout == ""
    assert problem in found.stderr


def test_what_moves_are_worth_is_heeded(trace: Path) -> None:
    """A gain that no placement reaches, no budget, and no steps to repay: nothing moves."""
    options = ("--gpus", 4, "--redundant", 4, "--placer", "search", "--interval", 5)
    slow = ("--model", "mixtral-8x7b", "--links", "0.001,0.001", "--overlap", "--gathers", "metro")
    for worth in (("--min-gain", 1), ("--max-moves", 0), ("--break-even", 1)):
        out = run(trace, *options, *slow, *worth, "--method", "metro", "--json", "-").stdout
        updated = json.loads(out)["replays"][1]
        assert updated["moves"] == 0 < len(updated["decisions"])


def test_a_trace_that_does_not_tell_the_experts_per_token_is_noted(tmp_path: Path) -> None:
    """Tokens per second hang on it."""
    path = tmp_path / "steps.npy"
    np.save(path, np.ones((4, LAYERS, EXPERTS), np.int64))
    found = run(path, "--gpus", 4, "--method", "flow")
    assert "does not tell the experts per token; 8, see --top-k" in found.stderr


def test_settings_that_are_no_object_are_told_with_their_file(trace: Path, tmp_path: Path) -> None:
    """Their path comes first."""
    path = tmp_path / "settings.json"
    for text, problem in (("[]", "expected a JSON object"), ("{", "not JSON")):
        path.write_text(text)
        found = run(trace, "--gpus", 4, "--settings", path, "--engine", "vllm", code=1)
        assert f"settings.json: {problem}" in found.stderr
