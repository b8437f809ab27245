"""The command line: what each command prints, writes and refuses, and with which exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from eplb_opt import cli
from eplb_opt.cli import app
from eplb_opt.demand import count_tokens
from eplb_opt.formats.placements import read_placement
from eplb_opt.gap import default_methods
from eplb_opt.objective import OBJECTIVES, Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.placers import placement_methods
from eplb_opt.placing import solve_placement
from eplb_opt.routers import routing_methods
from eplb_opt.routing import solve_routing
from eplb_opt.trace import LoadTrace, StepFacts, read_trace, write_trace
from eplb_opt.workload import MODEL_SHAPES

DEFAULT_METHODS = default_methods(Objective.preset("activations"))
SLOTS = [[0, 1], [0, 2], [1, 3], [2, 3]]
SMALL = ["--model", "mixtral-8x7b", "--gpus", "4", "--steps", "2"]


def run(*arguments: object, code: int = 0, columns: int | None = None) -> Any:
    """Run a command; the result has `stdout` and `stderr`."""
    environment = {"COLUMNS": None if columns is None else str(columns)}
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)
    assert result.exit_code == code, result.output
    return result


def refusal(*arguments: object, code: int = 1) -> str:
    """Run a command that must fail; give what it says."""
    result = run(*arguments, code=code)
    assert result.stdout == ""
    return str(result.stderr)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the colours that some CI services ask for."""
    monkeypatch.setattr("typer.rich_utils.FORCE_TERMINAL", False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def placement(tmp_path: Path) -> Path:
    """Write the four-GPU example."""
    path = tmp_path / "placement.npy"
    np.save(path, np.array(SLOTS))
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Write a batch for it: four tokens for each expert."""
    path = tmp_path / "tokens.npy"
    np.save(path, np.full((1, 1, 4), 4))
    return path


# Help


def test_the_version_is_that_of_the_package() -> None:
    """As pip knows it."""
    assert run("--version").stdout == f"eplb-opt {version('eplb-opt')}\n"


@pytest.mark.parametrize(
    "command", ["gap", "regime", "place", "route", "validate", "convert", "presets"]
)
def test_every_command_has_help_with_an_example(command: str) -> None:
    """Help says what the command does and how to call it."""
    assert command in run("--help").stdout
    assert f"eplb-opt {command} " in run(command, "--help").stdout or command == "presets"
    assert "Example" in run(command, "--help").stdout


def test_presets_lists_all_there_is() -> None:
    """Models, objectives and methods, by the names that the options take."""
    for columns in (None, 80):
        printed = run("presets", columns=columns).stdout
        for names in (
            MODEL_SHAPES,
            OBJECTIVES,
            routing_methods(),
            placement_methods(),
        ):
            for name in names:
                assert name in printed
        assert "optimal" in printed


# gap


def test_gap_prints_a_table_per_deployment() -> None:
    """Plain text in a pipe, with every method and column."""
    printed = run("gap", "--gpus", "8,16", "--redundant", "32", "--steps", "1").stdout
    assert "DeepSeek-V3 decode, synthetic" in printed
    for gpus in (8, 16):
        assert f"{gpus} GPUs, replication 1.125 (32 redundant slots)" in printed
    for text in (*DEFAULT_METHODS, "live experts", "even share", "optimum", "p50", "p99", "worst"):
        assert text in printed
    assert "proven" not in printed.partition("\n")[2]  # all are
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_gap_fits_a_narrow_terminal() -> None:
    """Eighty columns hold the table without p50, p99 and the optimum, on one line per method."""
    arguments = ["gap", "--gpus", "16", "--replication", "1.25", "--steps", "1"]
    lines = run(*arguments, columns=80).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("metro") for line in lines) == 2
    assert not any("p99" in line for line in lines)


def test_gap_writes_what_it_measured(tmp_path: Path) -> None:
    """JSON, CSV and a figure hold the same study; quiet prints nothing."""
    files = {option: tmp_path / f"gap.{option}" for option in ("json", "csv")}
    options = [text for option, path in files.items() for text in (f"--{option}", path)]
    pytest.importorskip("matplotlib")
    plot = tmp_path / "gap.svg"
    result = run("gap", *SMALL, *options, "--plot", plot, "--quiet", "--seed", 3)
    assert result.output == ""
    study = json.loads(files["json"].read_text())
    assert (study["traffic"], study["layers"]) == ("Mixtral-8x7B decode, synthetic", 32)
    assert len(files["csv"].read_text().splitlines()) == 1 + len(study["rows"])
    assert "<svg" in plot.read_text(encoding="utf-8")


def test_gap_writes_to_standard_output() -> None:
    """A dash puts the file in place of the tables."""
    assert json.loads(run("gap", *SMALL, "--json", "-").stdout)["objective"] == "activations"
    lines = run("gap", *SMALL, "--csv", "-", "--replication", "1.5").stdout.splitlines()
    assert lines[0].startswith("gpus,redundant,replication,method")
    assert len(lines) == 1 + len(DEFAULT_METHODS)


def test_gap_takes_methods_objective_and_stage() -> None:
    """The options reach the study; a method keeps its own options."""
    method = "metro:order=random,seed=3"
    options = ["--method", method, "--method", "uniform", "--objective", "tokens"]
    result = run("gap", *SMALL, *options, "--stage", "prefill", "--threads", 2, "--json", "-")
    study = json.loads(result.stdout)
    assert {row["method"] for row in study["rows"]} == {method, "uniform"}
    assert (study["traffic"], study["objective"]) == ("Mixtral-8x7B prefill, synthetic", "tokens")


def test_gap_replays_counts_with_the_methods_that_they_serve(tmp_path: Path) -> None:
    """Default methods that need top-k ids are left out, by name; one that was asked for fails."""
    path = tmp_path / "counts.npy"
    np.save(path, np.random.default_rng(0).integers(0, 9, (3, 2, 16)))
    options = ["gap", path, "--gpus", 4, "--replication", 1.5]
    result = run(*options, "--json", "-")
    assert "holds counts only; left out: nearest, rank-mod, trtllm, vllm-hash" in result.stderr
    study = json.loads(result.stdout)
    assert (study["traffic"], study["batches"]) == (str(path), 3)
    assert "vllm-hash needs topk_ids" in refusal(*options, "--method", "vllm-hash")


def test_gap_with_an_engine(tmp_path: Path) -> None:
    """An exact engine within its time limit agrees with the optimum."""
    pytest.importorskip("highspy")
    options = ["--method", "highs", "--time-limit", 60, "--replication", "1.5", "--json", "-"]
    (row,) = json.loads(run("gap", *SMALL, *options).stdout)["rows"]
    assert row["gap_max"] == 0
    assert "proven" not in run("gap", *SMALL, *options[:-2]).stdout


def test_gap_tells_an_engine_that_ran_out_of_time() -> None:
    """What was not proven has a column and a line."""
    pytest.importorskip("highspy")
    cold = "highs:warm_start=false"
    options = ["--method", "highs", "--method", cold, "--method", "metro", "--time-limit", 0]
    for columns in (80, 100):
        printed = run("gap", *SMALL, "--replication", "1.5", *options, columns=columns).stdout
        assert "proven" in printed
        assert re.search(r"highs: \d+ of its 64 problems were not proven;", printed)
        assert f"{cold}: 64 of its 64 problems were not proven;" in printed
        assert "64 have no answer and are left out" in printed
        assert "metro: " not in printed
        assert "nan" not in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "8,x"], "expected numbers between commas, not '8,x'"),
        (["--gpus", "0"], "expected numbers from 1, not 0"),
        (["--replication", "nan"], "expected numbers from 1, not nan"),
        (["--replication", "1.5", "--redundant", "8"], "one of --replication and --redundant"),
        (["--redundant", "-8"], "expected numbers from 0"),
        (["--json", "-", "--csv", "-"], "only one of"),
        (["--json", "missing/gap.json"], "missing is not a folder"),
        (["--plot", "gap.doc"], "does not end in .pdf or .svg or .png"),
        (["--tokens", "0"], "--tokens"),
        (["traffic.npy", "--model", "kimi-k2"], "leave FILE out"),
        (["--nonsense"], "nonsense"),
    ],
)
def test_gap_with_wrong_options_is_a_usage_error(options: list[str], message: str) -> None:
    """Exit code 2, before any work."""
    assert message in " ".join(refusal("gap", *options, code=2).replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "gpt-7"], "no model is called 'gpt-7'; the known ones are: deepseek-v3"),
        (["--method", "metr0"], "unknown method 'metr0'; known: optimal"),
        (["--method", "metro:speed=1"], "metro has no option 'speed'; it has: order, seed"),
        (["--gpus", "7", "--redundant", "30"], "286 slots do not divide over 7 GPUs; 280 or 287"),
        (["--objective", "speed"], "unknown objective 'speed'; known: activations, tokens, deep"),
        (["--objective", "no.json"], "no.json: No such file or directory"),
        (["missing.json"], "missing.json: No such file or directory"),
        (["missing.xyz"], "unknown suffix '.xyz'"),
    ],
)
def test_gap_says_what_is_wrong_in_a_line(options: list[str], message: str) -> None:
    """Exit code 1 and one line without a traceback."""
    said = refusal("gap", *options)
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.fixture
def objective(tmp_path: Path) -> Path:
    """Write an objective of one's own: launch, weights and arithmetic."""
    path = tmp_path / "mine.json"
    pieces = (Piece(offset=5, activation=4), Piece(offset=5, token=0.5))
    path.write_text(Objective(pieces=pieces, name="mine").to_json())
    return path


def test_gap_under_a_measured_objective(objective: Path) -> None:
    """From a preset or a file: the bound's proof is told, and gaps beyond what offsets cost."""
    options = ["gap", *SMALL, "--replication", "1.5", "--objective"]
    printed = run(*options, "qwen3-30b-fp8").stdout
    assert "objective qwen3-30b-fp8" in printed
    for method in ("makespan", "matching", "flow", "uniform"):
        assert method in printed
    assert "beyond" not in printed
    assert "even share" not in printed
    assert "nan" not in printed
    printed = run(*options, objective).stdout
    assert "objective mine" in printed
    assert "beyond idle: without what the offsets alone cost" in printed
    assert json.loads(run(*options, objective, "--json", "-").stdout)["idle"] == 5


# regime


def test_regime_prints_a_table_per_deployment() -> None:
    """Times, ratios, the best, and the crossing beside TEMPO's boundary; narrow and wide."""
    options = ["--gpus", "8", "--redundant", "32,64", "--batch", "16,1024", "--layers", 2]
    for columns in (None, 80):
        printed = run("regime", *options, columns=columns).stdout
        assert "DeepSeek-V3 decode, synthetic" in printed
        assert "1 x 2 problems of each size" in printed
        assert "break-even 156.4 tokens of an expert" in " ".join(printed.split())
        for redundant, ratio in ((32, 1.125), (64, 1.25)):
            assert f"8 GPUs, replication {ratio} ({redundant} redundant slots)" in printed
        assert len(re.findall(r"cross at \d+ tokens per GPU .METRO takes 0", printed)) == 2
        assert len(re.findall(r"TEMPO's boundary: \d+, hottest \d+", printed)) == 2
        tables = [line for line in printed.splitlines() if line.lstrip()[:4] in ("16  ", "1024")]
        assert "nan" not in printed
        assert len([line for line in printed.splitlines() if line.endswith("token-balance")]) == 2
        assert max(map(len, tables)) <= 80


def test_regime_says_where_nothing_crosses() -> None:
    """One of the two wins everywhere, and a pure count has no boundary."""
    options = ["regime", *SMALL, "--layers", 1, "--batch", "1,2"]
    assert "METRO is at least as fast as token balance up to 2 tokens per GPU" in (
        run(*options, "--objective", "activations").stdout
    )
    printed = run(*options, "--objective", "tokens").stdout
    assert "token balance is faster than METRO from 1 token per GPU on" in printed
    assert "boundary" not in printed
    assert "break-even" not in printed
    assert "mixed" not in printed


def test_regime_writes_what_it_measured(tmp_path: Path, objective: Path) -> None:
    """JSON, CSV and a figure hold the same map; the options reach it."""
    pytest.importorskip("matplotlib")
    files = {option: tmp_path / f"regime.{option}" for option in ("json", "csv")}
    options: list[object] = [x for name, path in files.items() for x in (f"--{name}", path)]
    options += ["--skew", "0,1.2", "--batch", "4,8,16", "--layers", 2, "--within", 5]
    options += ["--objective", objective, "--stage", "prefill", "--plot", tmp_path / "r.svg"]
    result = run("regime", *SMALL, "--replication", "1.5", *options, "--quiet")
    assert result.output == ""
    read = json.loads(files["json"].read_text())
    assert read["traffic"] == "Mixtral-8x7B prefill, synthetic"
    assert (read["objective"], read["within"], read["batches"]) == ("mine", 0.05, 2)
    assert [row["skew"] for row in read["rows"]] == [0.0] * 3 + [1.2] * 3
    assert len(files["csv"].read_text().splitlines()) == 1 + 6
    assert "Zipf exponent" in (tmp_path / "r.svg").read_text(encoding="utf-8")


def test_regime_draws_from_a_recording(tmp_path: Path) -> None:
    """Its popularity, with the experts per token that are given."""
    path = tmp_path / "counts.npy"
    np.save(path, np.random.default_rng(0).integers(1, 9, (1, 2, 16)))
    options = ["--gpus", 4, "--replication", 1.5, "--batch", 4, "--top-k", 2, "--json", "-"]
    read = json.loads(run("regime", path, *options).stdout)
    assert (read["traffic"], read["layers"]) == (f"{path}, drawn from its popularity", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "expected numbers from 1, not 0"),
        (["--skew", "-1"], "expected numbers from 0, not -1"),
        (["--replication", "1.5", "--redundant", "8"], "one of --replication and --redundant"),
        (["--json", "-", "--csv", "-"], "only one of"),
        (["traffic.npy", "--stage", "prefill"], "leave FILE out"),
    ],
)
def test_regime_with_wrong_options_is_a_usage_error(options: list[str], message: str) -> None:
    """Exit code 2, before any work."""
    assert message in " ".join(refusal("regime", *options, code=2).replace("│", " ").split())


# place

LOAD = [[0, 0, 0, 0], [90, 10, 10, 10], [6, 3, 2, 1]]  # a dense layer first
DEPLOYED = ["--gpus", 2, "--slots", 3]


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    """Write counts of four experts in two MoE layers."""
    path = tmp_path / "loads.csv"
    path.write_text("\n".join(",".join(map(str, row)) for row in LOAD))
    return path


def test_place_says_how_good_a_placement_is(loads: Path) -> None:
    """Beside the placement that engines start with: balance, bound, duplicates, every layer."""
    for columns in (None, 80):
        result = run("place", loads, *DEPLOYED, "--method", "deepseek", columns=columns)
        assert result.stderr == ""
        lines = result.stdout.splitlines()
        assert lines[:2] == [str(loads), "2 layers, 2 GPUs x 3 slots, 4 experts"]
        (before,) = (line.split() for line in lines if line.startswith("before: experts in turn"))
        assert before[4:] == ["1.042", "1.083", "0.962", "0.992", "0"]
        (placed,) = (line.split() for line in lines if line.startswith("deepseek "))
        assert placed[1:-1] == ["1.083", "1.167", "8.33", "16.67", "1/2", "0.929", "0.868", "2"]
        _, _, table = result.stdout.partition("By layer")
        assert [line.split()[:3] for line in table.split("─\n")[1].splitlines()[:2]] == [
            ["1", "1.000", "1.167"],
            ["2", "1.083", "1.000"],
        ]
        assert "deepseek: bounds proven by count" in lines
        assert max(map(len, lines[1:])) <= (columns or 100)


def test_place_prints_the_least_balanced_of_many_layers(tmp_path: Path) -> None:
    """Thirteen layers are too many; layer 7 is the worst of these, though it has the least load."""
    counts = np.tile(np.array([50, 50, 50, 50]), (13, 1))
    counts[7] = [9, 1, 1, 1]
    np.save(tmp_path / "loads.npy", counts)
    printed = run("place", tmp_path / "loads.npy", "--gpus", 4, "--redundant", 0).stdout
    _, _, table = printed.partition("The least balanced 5 of 13 layers")
    assert table.split("─\n")[1].split()[:3] == ["7", "3.000", "3.000"]


def test_place_by_several_methods(loads: Path) -> None:
    """A row each, in the order asked for, with their own options; layers only for one."""
    methods = ["--method", "deepseek:form=global", "--method", "flashlb", "--method", "swift"]
    result = run("place", loads, *DEPLOYED, *methods, "--json", "-")
    rows = json.loads(result.stdout)["placements"]
    assert [row["method"] for row in rows] == ["deepseek:form=global", "flashlb", "swift"]
    printed = run("place", loads, *DEPLOYED, *methods).stdout
    for text in ("deepseek:form=global", "flashlb", "swift"):
        assert text in printed
    assert "By layer" not in printed


def test_place_writes_figures_as_json(loads: Path, tmp_path: Path) -> None:
    """What the plan holds, layer by layer; quiet prints nothing."""
    out = tmp_path / "placed.json"
    options = [*DEPLOYED, "--json", out, "--quiet", "--distinct", "--split", "free"]
    assert run("place", loads, *options).output == ""
    read = json.loads(out.read_text())
    plan = solve_placement(LOAD[1:], num_gpus=2, slots_per_gpu=3, distinct=True, split="free")
    (placed,) = read["placements"]
    assert placed["makespan"] == plan.makespan.tolist()
    assert placed["bound"] == plan.bound.tolist()
    assert placed["status"] == ["optimal", "optimal"]
    assert placed["duplicates"] == [0, 0]
    assert (placed["moves"], placed["transfer"]) == (None, None)
    assert (read["layers"], read["split"], read["over_windows"]) == ([1, 2], "free", "mean")
    assert read["before"]["par"] == pytest.approx([1, 13 / 12])


@pytest.mark.parametrize("name", ["map.json", "map.npz", "map.yaml"])
def test_place_writes_the_placement(loads: Path, tmp_path: Path, name: str) -> None:
    """In any format, the layers numbered as in the recording where the format numbers them."""
    out = tmp_path / name
    if name == "map.yaml":
        pytest.importorskip("yaml")
    to = ["--to", "sglang"] if name == "map.json" else []
    assert run("place", loads, *DEPLOYED, "-o", out, *to, "--quiet").output == ""
    plan = solve_placement(LOAD[1:], num_gpus=2, slots_per_gpu=3, method="search")
    dense = 1 if name == "map.json" else 0
    assert read_placement(out, num_gpus=2, dense_layers=dense) == plan.placement
    if name == "map.yaml":
        assert "\n  1: [" in out.read_text()


def test_place_tells_when_the_recording_does_not_number_layers(loads: Path, tmp_path: Path) -> None:
    """Counts of MoE layers only begin with 0, unless told otherwise."""
    loads.write_text("90,10,10,10\n")
    options = [*DEPLOYED, "-o", tmp_path / "map.json", "--to", "sglang", "--quiet"]
    assert "--first-layer" in run("place", loads, *options).stderr
    assert run("place", loads, *options, "--first-layer", 3).stderr == ""
    assert len(json.loads((tmp_path / "map.json").read_text())["physical_to_logical_map"]) == 4


def test_place_draws_what_it_did(loads: Path, tmp_path: Path) -> None:
    """GPU loads before and after, in a figure."""
    pytest.importorskip("matplotlib")
    plot = tmp_path / "placed.svg"
    run("place", loads, *DEPLOYED, "--quiet", "--plot", plot)
    assert "<!-- before: experts in turn" in plot.read_text(encoding="utf-8")


def test_place_from_a_previous_placement(loads: Path, tmp_path: Path) -> None:
    """Moves, their rounds and time, and when they are repaid; as many slots as it has."""
    old = tmp_path / "old.npy"
    np.save(old, np.array([[[0, 1, 2], [3, 2, 1]]] * 2))
    options = ["place", loads, "--gpus", 2, "--previous", old, "--method", "flashlb"]
    printed = run(*options).stdout
    assert "Moves from old.npy" in printed
    assert "rounds" not in printed
    model = [*options, "--model", "mixtral-8x7b", "--top-k", 1]
    assert "rounds" in run(*model).stdout
    batches = [*model, "--tokens-per-batch", 4000, "--objective", "deepseek-v3-fp8"]
    printed = run(*batches, columns=80).stdout
    assert "repaid in" in printed
    assert max(map(len, printed.splitlines()[1:])) <= 80
    (placed,) = json.loads(run(*batches, "--json", "-").stdout)["placements"]
    moved = placed["transfer"]
    assert (placed["moves"], moved["rounds"], moved["buffers"]) == ([1, 1], [1, 1], 1)
    size = 3 * 4096 * 14336
    assert (moved["expert_bytes"], moved["bytes_inside"], moved["bytes_between"]) == (
        size,
        2 * size,
        0,
    )
    assert moved["seconds"] == pytest.approx(2 * size / 450e9)
    steps = 1e6 * moved["seconds"] / moved["saved_us_per_step"]
    assert moved["break_even_steps"] == pytest.approx(steps)
    slow = ["--nodes", 2, "--links", "450,25", "--bytes-per-weight", 2, "--layers-at-once", 2]
    (placed,) = json.loads(run(*model, *slow, "--json", "-").stdout)["placements"]
    assert placed["transfer"]["rounds"] == [2]
    assert placed["transfer"]["seconds"] == pytest.approx(2 * 2 * size / 25e9)
    assert placed["transfer"]["break_even_steps"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bytes-per-weight", "inf"], "bytes_per_weight must be above 0 and finite, not inf"),
        (["--bytes-per-weight", "nan"], "bytes_per_weight must be above 0 and finite, not nan"),
        (["--bytes-per-weight", "0"], "bytes_per_weight must be above 0 and finite, not 0.0"),
        (["--tokens-per-batch", "8"], "search does not heed tokens_per_batch"),
        (["--objective", "deepseek-v3-fp8"], "search does not heed objective"),
    ],
)
def test_place_says_which_moves_cannot_be_planned(
    loads: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    """Weights without bytes; what a step saves needs both the tokens and the objective."""
    old = tmp_path / "old.npy"
    np.save(old, np.array([[[0, 1, 2], [3, 2, 1]]] * 2))
    moving = ["--gpus", "2", "--previous", str(old), "--model", "mixtral-8x7b", "--top-k", "1"]
    said = refusal("place", loads, *moving, *options)
    assert said.startswith(f"error: {message}")


def test_place_says_when_moving_never_pays(loads: Path, tmp_path: Path) -> None:
    """And that a count is no time."""
    old = tmp_path / "old.npy"
    np.save(old, np.array([[[0, 1, 2], [0, 3, 1]]] * 2))
    options = ["place", loads, "--gpus", 2, "--previous", old, "--model", "mixtral-8x7b"]
    options += ["--method", "deepseek", "--top-k", 1, "--tokens-per-batch", 4000, "--objective"]
    assert "never" in run(*options, "deepseek-v3-fp8").stdout
    result = run(*options, "tokens")
    assert result.stderr == "note: no break-even steps: tokens is not in microseconds\n"
    assert "repaid" not in result.stdout


def test_place_by_windows(tmp_path: Path) -> None:
    """Steps, or tokens, are cut into windows; the makespan is the mean over them, or the worst."""
    counts, ids = tmp_path / "counts.npy", tmp_path / "ids.npz"
    np.save(counts, np.array([[[8, 0]], [[0, 0]], [[0, 4]], [[2, 0]], [[2, 2]]]))
    np.savez(ids, topk=np.array([[0], [0], [1], [1], [1]]))
    for path, options, makespan in (
        (counts, ["--windows", 2], 8.0),  # 8 and 0, then 4 and 6
        (counts, ["--windows", 2, "--over-windows", "mean"], 7.0),
        (counts, ["--windows", 2, "--over-windows", "0.5"], 7.0),
        (counts, [], 12.0),
        (ids, ["--windows", 2], 2.0),  # the last token is left over
        (ids, [], 3.0),
    ):
        over = [] if "--over-windows" in options else ["--over-windows", "worst"]
        result = run("place", path, "--gpus", 2, "--slots", 1, *over, *options, "--json", "-")
        assert json.loads(result.stdout)["placements"][0]["makespan"] == [makespan]
    said = refusal("place", counts, "--gpus", 2, "--slots", 1, "--windows", 6)
    assert "6 windows of 5 steps or tokens" in said


def test_place_takes_what_broke_other_systems(loads: Path, tmp_path: Path) -> None:
    """Sums above 2^31, one hot expert, counts of one GPU only, a GPU that is dead."""
    loads.write_text(f"{2**40},1,1,1\n")
    read = json.loads(run("place", loads, *DEPLOYED, "--json", "-", "--distinct").stdout)
    assert read["placements"][0]["duplicates"] == [0]
    assert read["placements"][0]["makespan"] == [2**39 + 1.5]
    loads.write_text("5,7,0,0\n")
    assert "counts of one GPU only" in run("place", loads, *DEPLOYED, "--quiet").stderr
    old = tmp_path / "old.npy"
    np.save(old, np.array([[0, 1, 2], [-1, -1, -1]]))
    loads.write_text("5,7,3,1\n")
    options = ["place", loads, "--gpus", 2, "--previous", old, "--quiet"]
    run(*options, "--method", "deepseek")
    assert "4 experts need 4 slots and 3 are filled" in refusal(*options)
    assert "expert 3 has no replica, and swift keeps" in refusal(*options, "--method", "swift")
    said = refusal(*options, "--method", "deepseek", "--model", "mixtral-8x7b")
    assert "layer 0: expert 3 must move to GPU" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "2"], "give --redundant or --slots"),
        (["--gpus", "2", "--slots", "3", "--redundant", "2"], "one of --redundant and --slots"),
        (["--slots", "3"], "Missing option '--gpus'"),
        ([*DEPLOYED, "--model", "kimi-k2"], "--model is for moves: give --previous"),
        ([*DEPLOYED, "--over-windows", "most"], "expected numbers between commas, not 'most'"),
        ([*DEPLOYED, "--plot", "a.doc"], "does not end in .pdf or .svg or .png"),
        ([*DEPLOYED, "--out", "missing/map.npz"], "missing is not a folder"),
        ([*DEPLOYED, "--split", "half"], "'half' is not one of 'equal', 'free'"),
        ([*DEPLOYED, "--previous", "a.npy", "--model", "kimi-k2", "--links", "9"], "two numbers"),
        (
            [*DEPLOYED, "--method", "swift", "--method", "flashlb", "--out", "a.npz"],
            "--out and --plot are for one --method",
        ),
        ([*DEPLOYED, "--nodes", "4"], "4 nodes do not divide 2 GPUs"),
    ],
)
def test_place_with_wrong_options_is_a_usage_error(
    loads: Path, options: list[str], message: str
) -> None:
    """Exit code 2, before any work."""
    said = refusal("place", loads, *options, code=2)
    assert message in " ".join(said.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "3", "--redundant", "0"], "4 slots do not divide over 3 GPUs; 3 or 6 would"),
        (["--gpus", "3", "--slots", "1"], "4 experts need 4 slots and there are 3: 1 missing"),
        ([*DEPLOYED, "--groups", "3"], "3 groups"),
        ([*DEPLOYED, "--method", "swifft"], "unknown placement method 'swifft'; known: search"),
        ([*DEPLOYED, "--method", "deepseek:form=flat"], "form is auto, global, hierarchical"),
        ([*DEPLOYED, "--tokens-per-batch", "8"], "search does not heed tokens_per_batch"),
        ([*DEPLOYED, "--over-windows", "2"], "'mean', 'worst' or from 0 to 1, not 2.0"),
        ([*DEPLOYED, "--draft-layers", "3"], "draft_layers is 3; the traffic has 3 layers"),
        ([*DEPLOYED, "--out", "map.json"], "give one of sglang, vllm, vllm-ascend"),
        ([*DEPLOYED, "--previous", "none.npy"], "none.npy: No such file or directory"),
    ],
)
def test_place_says_what_is_wrong_in_a_line(loads: Path, options: list[str], message: str) -> None:
    """Exit code 1 and one line without a traceback."""
    said = refusal("place", loads, *options)
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0,0,0,0\n", "no tokens in any layer"),
        ("1,-1,2,3\n", "-1"),
        ("1,nan,2,3\n", "line 1, column 2: nan"),
        ("1,2,3,4\n1,2\n", "line 2"),
    ],
)
def test_place_says_what_is_wrong_with_the_loads(loads: Path, content: str, message: str) -> None:
    """Where in the file."""
    loads.write_text(content)
    said = refusal("place", loads, *DEPLOYED)
    assert said.startswith("error: ")
    assert message in said


def test_place_refuses_a_previous_placement_of_another_shape(loads: Path, tmp_path: Path) -> None:
    """Other layers, slots, GPUs or experts; a map of one layer does for loads of one."""
    old = tmp_path / "old.npy"
    for slots, message in (
        ([[0, 1, 2], [3, 0, 1]], "previous must have slots [2, 2, 3]"),
        ([[[0, 1], [2, 3]]] * 2, "previous must have slots [2, 2, 3]"),
        ([[[0, 1, 2, 3]]] * 2, "num_gpus=2, but the file has 1"),
        ([[[0, 1, 2], [3, 4, 1]]] * 2, "expert 4 is out of range"),
    ):
        np.save(old, np.array(slots))
        assert message in refusal("place", loads, *DEPLOYED, "--previous", old)
    loads.write_text("5,7,3,1\n")
    np.save(old, np.array([[0, 1, 2], [3, 0, 1]]))
    options = [*DEPLOYED, "--previous", old, "--model", "mixtral-8x7b", "--quiet"]
    assert run("place", loads, *options).output == ""


def test_place_a_real_recording(shared_data: Path, tmp_path: Path) -> None:
    """DeepSeek-V3's 61 layers, three of them dense, become a map of 61 rows that reads back."""
    loads, out = (
        shared_data / "sglang_deepseek_v3" / "decode_in2000out100.json",
        tmp_path / "m.json",
    )
    options = ["--gpus", 32, "--redundant", 32, "-o", out, "--to", "sglang", "--json", "-"]
    read = json.loads(run("place", loads, *options).stdout)
    assert read["layers"] == list(range(3, 61))
    assert np.mean(read["placements"][0]["par"]) < 1.02 < np.mean(read["before"]["par"])
    assert "58 layers" in run("validate", out, "--gpus", 32, "--dense-layers", 3).stdout


# route


def test_route_in_measured_time(placement: Path, tokens: Path, objective: Path) -> None:
    """The slowest GPU's time, who proved the bounds, and the gap beyond what offsets cost."""
    printed = run("route", placement, tokens, "--method", "makespan", "--objective", objective)
    said = " ".join(printed.stdout.split())
    assert "mine time of the slowest GPU" in said
    assert "mine time of a GPU p50 9, p95 9, p99 9, worst 9" in said
    assert "makespan 9.00 (sum over layers)" in said
    assert re.search(r"bound 9.00 \(proven by [a-z-]+\)", said)
    assert "gap 0.00 %, 0.00 % beyond the 5 that a GPU takes without tokens" in said
    said = " ".join(run("route", placement, tokens).stdout.split())
    assert "activations of the fullest GPU" in said
    assert "beyond" not in said


def test_route_refuses_a_damaged_objective(placement: Path, tokens: Path, tmp_path: Path) -> None:
    """A line that names the file."""
    path = tmp_path / "mine.json"
    path.write_text("{")
    assert f"error: {path}: damaged" in refusal("route", placement, tokens, "--objective", path)


@pytest.mark.parametrize(("method", "activated"), [("uniform", 2), ("optimal", 1)])
def test_route_the_four_gpu_example(
    placement: Path, tokens: Path, tmp_path: Path, method: str, activated: int
) -> None:
    """Two activated per GPU under the equal split, one at the optimum; tokens stay balanced."""
    out = tmp_path / "routing.npz"
    printed = run("route", placement, tokens, "--method", method, "--out", out).stdout
    assert f"makespan              {activated}.00" in printed
    with np.load(out) as routing:
        assert routing["activated"].tolist() == [[activated] * 4]
        assert routing["tokens"].shape == (1, 4, 2)
        assert routing["tokens"].sum(axis=-1).tolist() == [[4] * 4]
        assert (routing["makespan"], routing["bound"]) == (activated, 1)
        assert sorted(routing.files) == sorted(
            ["tokens", "activated", "makespan", "bound", "status", "proved_by", "certificate"]
        )
    gap = {"uniform": "100.00 %", "optimal": "0.00 %"}[method]
    assert gap in printed
    assert f"{2 - activated} of 1 problems proven optimal" in printed


def test_route_prints_few_layers_or_the_fullest(tmp_path: Path) -> None:
    """Three layers are all shown, thirteen are not; layers without tokens are left out."""
    for layers in (3, 13):
        placed, counts = tmp_path / "placed.npy", tmp_path / "counts.npy"
        np.save(placed, np.tile(np.array(SLOTS), (layers, 1, 1)))
        np.save(counts, np.pad(np.full((2, layers, 4), 7), ((0, 0), (1, 0), (0, 0))))
        result = run("route", placed, counts)
        assert ("By layer" in result.stdout) == (layers == 3)
        assert ("The fullest 5 of 13 layers" in result.stdout) == (layers == 13)
        assert "left out 1 layer" in result.stderr


def test_route_counts_topk_ids(placement: Path, tmp_path: Path) -> None:
    """Ids are one batch, or batches of the given size."""
    ids, out = tmp_path / "ids.npz", tmp_path / "routing.npz"
    np.savez(ids, topk=np.array([[0, 1], [0, -1], [2, 3], [3, 1]]))
    for options, batches in (([], 1), (["--batch", 2], 2)):
        run("route", placement, ids, "--objective", "tokens", "--out", out, *options)
        with np.load(out) as routing:
            assert routing["tokens"].shape == (batches, 4, 2)
            assert routing["tokens"].sum() == 7


def test_route_reads_a_map(tokens: Path, tmp_path: Path) -> None:
    """A physical-to-logical map needs --gpus, and the error says so."""
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"physical_to_logical_map": [np.ravel(SLOTS).tolist()]}))
    assert "--gpus" in refusal("route", path, tokens)
    assert "4 GPUs x 2 slots" in run("route", path, tokens, "--gpus", 4).stdout


def test_route_tells_an_engine_that_ran_out_of_time(placement: Path, tokens: Path) -> None:
    """Without time there is no proof; the command still succeeds."""
    pytest.importorskip("highspy")
    options = ["--method", "highs:warm_start=false", "--time-limit", 0]
    printed = run("route", placement, tokens, *options).stdout
    assert "0 of 1 problems proven optimal" in printed
    assert "1 unsolved" in printed


@pytest.mark.parametrize("method", [m for m, t in routing_methods().items() if t.needs])
def test_route_by_a_method_that_needs_ids(
    placement: Path, tokens: Path, tmp_path: Path, method: str
) -> None:
    """From ids, cut into a local batch per GPU, it routes; from counts, the error says why not."""
    said = refusal("route", placement, tokens, "--method", method)
    assert f"error: {method} needs " in said
    assert f"{tokens} holds counts: give TOKENS as top-k ids" in said

    rows = np.random.default_rng(0).permuted(np.tile(np.arange(4), (18, 1)), axis=1)[:, :2]
    counts = count_tokens(rows.reshape(2, 9, 2), 4)
    by_gpu = np.full((2, 4, 3, 2), -1)  # nine rows for four GPUs: 3, 2, 2, 2
    for gpu, (begin, end) in enumerate([(0, 3), (3, 5), (5, 7), (7, 9)]):
        by_gpu[:, gpu, : end - begin] = rows.reshape(2, 9, 2)[:, begin:end]
    ids, layered, out = (tmp_path / name for name in ("ids.npz", "layered.npy", "routing.npz"))
    np.save(layered, np.array([SLOTS, SLOTS]))
    with_dense = np.stack([rows, np.full_like(rows, -1), rows], axis=1)
    for onto, topk, wanted, given in (
        (placement, rows, counts, by_gpu),
        (layered, with_dense, np.stack([counts] * 2, axis=1), np.stack([by_gpu] * 2, axis=1)),
    ):
        np.savez(ids, topk=topk)
        run("route", onto, ids, "--batch", 9, "--method", method, "--out", out)
        expected = solve_routing(Placement(np.load(onto)), wanted, method=method, topk_ids=given)
        with np.load(out) as routing:
            np.testing.assert_array_equal(routing["tokens"], expected.tokens)


def test_route_refuses_tokens_of_another_model(placement: Path, tmp_path: Path) -> None:
    """Other experts, other layers, negative counts: each in a line."""
    counts = tmp_path / "counts.npy"
    for values, message in (
        (np.ones((1, 1, 5), dtype=int), "num_experts=4"),
        (np.ones((1, 2, 4), dtype=int), "the traffic has 2 layers, the placement 1"),
        (-np.ones((1, 1, 4), dtype=int), "[0][0][0]: -1"),
    ):
        np.save(counts, values)
        assert message in refusal("route", placement, counts)


def test_route_writes_npz_only(placement: Path, tokens: Path, tmp_path: Path) -> None:
    """Another suffix is a usage error, since numpy would add its own to it."""
    said = refusal("route", placement, tokens, "--out", tmp_path / "x.foo", code=2)
    assert "does not end in .npz" in " ".join(said.replace("│", " ").split())
    assert not list(tmp_path.glob("x.foo*"))


# validate


def test_validate_a_placement(tmp_path: Path) -> None:
    """Copies, redundant and empty slots, dead GPUs; a second copy on a GPU is told, not refused."""
    path = tmp_path / "placement.npy"
    np.save(path, np.array([[[0, 1, 2], [0, 3, 0], [4, 4, 5], [-1, -1, -1]]] * 2))
    printed = run("validate", path).stdout
    for text in (
        "a valid placement",
        "2 layers, 4 GPUs x 3 slots, 6 experts",
        "1 least, 1 median, 3 most",
        "redundant slots of a layer  3",
        "empty slots                 6",
        "GPUs without any expert     1",
        "4: layer 0, GPU 1: expert 0; layer 0, GPU 2: expert 4; layer 1, GPU 1: expert 0; ...",
    ):
        assert text in " ".join(printed.split()) or text in printed


def test_validate_a_trace(tmp_path: Path) -> None:
    """Shape, dense layers and skew; counts of one GPU only are a warning."""
    path = tmp_path / "tokens.csv"
    path.write_text("0,0,0,0\n1,2,3,4\n")
    result = run("validate", path)
    assert "--as" not in result.stderr
    printed = result.stdout
    for text in ("valid trace", "1 step, 2 layers, 4 experts", "1: 0", "1.60"):
        assert text in printed
    path.write_text("1,2,0,0\n")
    assert "warning: " in run("validate", path).stderr
    ids = tmp_path / "ids.npz"
    np.savez(ids, topk=np.array([[[0, 1]], [[2, 1]]]))
    result = run("validate", ids)
    assert "top-2 ids of 2 tokens, 1 layer, 3 experts" in result.stdout
    assert result.stderr == ""  # the name in the file says what it is


def test_validate_can_be_told_what_a_file_is(placement: Path) -> None:
    """A bare array that looks like slots can be insisted to be counts, and the other way round."""
    assert "a valid placement" in run("validate", placement).stdout
    assert "a valid trace" in run("validate", placement, "--as", "trace").stdout
    np.save(placement, np.array([[0, 0, 5], [3, 3, 1]]))
    result = run("validate", placement)
    assert "a valid trace" in result.stdout
    assert "--as placement" in result.stderr
    said = refusal("validate", placement, "--as", "placement")
    assert "layer 0: expert 2 has no replica (nor have 1 more)" in said


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"layer_list": 3}', "layer_list: 3; expected a list"),
        ("a.json", b'{"logical_count": [[1, -1]]}', "logical_count[0][1]: -1; expected a whole"),
        ("a.json", b"{", "damaged, or not a .json file"),
        ("a.npz", b"PK", "damaged, or not a .npz file"),
        ("a.npy", b"", "damaged, or not a .npy file"),
        ("a.csv", b"1,x\n", "line 1, column 2: 'x'; expected a whole number"),
        ("a.txt", b"", "unknown suffix '.txt'"),
    ],
)
def test_validate_says_what_is_wrong_where(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    """Exit code 1; the line names the file, the place in it and what was expected."""
    path = tmp_path / name
    path.write_bytes(content)
    said = refusal("validate", path).splitlines()[-1]
    assert said.startswith(f"error: {path}: ")
    assert message in said


def test_validate_every_real_file(shared_data: Path) -> None:
    """All files are valid as what they are; the placements of another layout are refused."""
    kinds = {
        "sglang_deepseek_v3/prefill_in512.json": "trace",
        "gpt_oss_20b/routes.npz": "trace",
        "qwen3_30b_batches/qwen_b64_032_012.npz": "trace",
        "vllm_ascend/expert_map.json": "placement",
    }
    for name, kind in kinds.items():
        assert f"a valid {kind}" in run("validate", shared_data / name).stdout
    assert "arrays found: A2_900" in refusal(
        "validate", shared_data / "omni_placements" / "placements.npz"
    )


def test_validate_files_of_another_layout(tmp_path: Path) -> None:
    """GPUs first, a map with dense and draft layers, TensorRT-LLM's configuration and counts."""
    mask = tmp_path / "placement.npy"
    np.save(mask, np.array([[[1, 1], [0, 1], [0, 1]], [[0, 1], [1, 0], [1, 0]]], dtype=bool))
    assert "3 layers, 2 GPUs" in run("validate", mask, "--format", "device-mask").stdout
    table = tmp_path / "map.json"
    table.write_text('{"physical_to_logical_map": [[9], [0, 1, 2, 0], [7]]}')
    said = run("validate", table, "--gpus", 2, "--dense-layers", 1, "--draft-layers", 1).stdout
    assert "1 layer, 2 GPUs x 2 slots, 3 experts" in said
    pytest.importorskip("yaml")
    balancer = tmp_path / "balancer.yaml"
    balancer.write_text("initial_global_assignments: {3: [0, 1, 2, x]}")
    assert "initial_global_assignments[3][3]: 'x'" in refusal("validate", balancer, "--gpus", 2)
    safetensors = pytest.importorskip("safetensors.numpy")
    (tmp_path / "meta_info.json").write_text('{"num_experts": 2}')
    counts = {"7_3": np.array([4, 4]), "8_3": np.array([0, 1])}
    (tmp_path / "rank0.safetensors").write_bytes(safetensors.save(counts))
    assert "counts of 2 steps, 1 layer, 2 experts" in run("validate", tmp_path).stdout


def test_validate_tells_what_is_known_of_the_steps(tmp_path: Path) -> None:
    """Of a recording: stage, scheduled tokens, time, sources, and steps without tokens."""
    pytest.importorskip("safetensors")
    sources = np.ones((4, 1, 2, 4), dtype=np.uint8)
    sources[2] = 0
    facts = StepFacts(
        stage=np.array(["decode", "prefill", "", "decode"]),
        scheduled=np.array([2, 9, 0, 4]),
        time=np.array([1.0, 1.0005, 1.25, 2.0]),
    )
    known = {"model": "DeepSeek-V3", "top_k": 2, "layer_ids": (7,)}
    write_trace(LoadTrace.from_sources(sources, facts=facts, **known), tmp_path / "a.trace")
    said = re.sub(" +", " ", run("validate", tmp_path / "a.trace", columns=120).stdout)
    for line in (
        "model DeepSeek-V3",
        "experts per token 2",
        "layers in the model 7",
        "counted by source GPU 2 GPUs",
        "steps by stage 2 decode, 1 prefill, 1 unknown",
        "scheduled tokens of a step 0 least, 3 median, 9 most",
        "seconds from step to step 0.0005 least, 0.2495 median, 0.7500 most",
        "steps without tokens 1, the first is step 2",
    ):
        assert line in said


# convert


@pytest.mark.parametrize("to", ["sglang", "vllm", "vllm-ascend"])
def test_convert_to_json_and_back(placement: Path, tmp_path: Path, to: str) -> None:
    """The slots survive; what is written is summed up as by validate."""
    there, back = tmp_path / "there.json", tmp_path / "back.npy"
    result = run("convert", placement, there, "--to", to)
    assert f"there.json: written as {to}" in result.stdout
    assert "4 GPUs x 2 slots, 4 experts" in result.stdout
    assert ("--first-layer" in result.stderr) == (to == "sglang")
    run("convert", there, back, *([] if to == "vllm-ascend" else ["--gpus", 4]))
    assert np.load(back).reshape(4, 2).tolist() == SLOTS


def test_convert_between_engines_that_count_layers_differently(
    placement: Path, tmp_path: Path
) -> None:
    """One counts the model's dense layers, the other does not."""
    ascend, sglang = tmp_path / "ascend.json", tmp_path / "sglang.json"
    run("convert", placement, ascend, "--to", "vllm-ascend")
    result = run("convert", ascend, sglang, "--to", "sglang", "--first-layer", 2)
    assert result.stderr == ""
    rows = json.loads(sglang.read_text())["physical_to_logical_map"]
    assert rows == [[0, 1, 2, 3, 0, 1, 2, 3]] * 2 + [[0, 1, 0, 2, 1, 3, 2, 3]]
    again = tmp_path / "again.json"
    options = ["--gpus", 4, "--dense-layers", 2, "--to", "vllm-ascend"]
    run("convert", sglang, again, *options)
    assert again.read_text() == ascend.read_text()
    balancer = tmp_path / "balancer.yaml"
    run("convert", ascend, balancer, "--first-layer", 3)
    assert "  3: [0, 1, 0, 2, 1, 3, 2, 3]\n" in balancer.read_text()


def test_convert_warns_of_empty_slots(tmp_path: Path) -> None:
    """No engine's own format has them, though they come back."""
    path = tmp_path / "a.npy"
    np.save(path, np.array([[0, -1], [1, 2]]))
    out = tmp_path / "a.json"
    said = run("convert", path, out, "--to", "vllm-ascend").stderr
    assert said == f"warning: {out}: 1 empty slots, which vLLM-Ascend does not know\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["a.json"], "give one of sglang, vllm, vllm-ascend"),
        (["a.csv"], "unknown suffix '.csv'"),
        (["a.npz", "--to", "trtllm"], "format trtllm goes with the suffixes .yaml, .yml"),
        (["a.npz", "--first-layer", "3"], "format slots does not number layers"),
        (["a.npz", "--gpus", "3"], "num_gpus=3, but the file has 4"),
        (["a.npz", "--format", "vllm"], "a .npy file holds nothing of format vllm"),
        (["a.npz", "--dense-layers", "1"], "has no layers to leave out"),
    ],
)
def test_convert_says_what_is_wrong(
    placement: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    """In a line, and nothing is written."""
    name, *rest = options
    assert message in refusal("convert", placement, tmp_path / name, *rest)
    assert not (tmp_path / name).exists()


def test_convert_traffic_to_a_recording(tokens: Path, tmp_path: Path) -> None:
    """It is summed up, reads as the file did, and is not overwritten."""
    pytest.importorskip("safetensors")
    csv = tmp_path / "a.csv"
    csv.write_text("1,2,3\n\n4,5,6\n")
    out = tmp_path / "a.trace"
    said = run("convert", csv, out).stdout
    assert f"{out.name}: written as a recording" in said
    assert "counts of 2 steps, 1 layer, 3 experts" in said
    trace = read_trace(out)
    assert isinstance(trace, LoadTrace)
    np.testing.assert_array_equal(trace.tokens, [[[1, 2, 3]], [[4, 5, 6]]])
    assert "holds a recording already" in refusal("convert", csv, out)
    assert "--batch is for top-k ids" in refusal("convert", csv, out, "--batch", 2, code=2)
    assert "--batch alone" in refusal("convert", csv, out, "--gpus", 2, code=2)
    slots = write_slots(tmp_path)
    placed = refusal("convert", slots, tmp_path / "a.npz", "--batch", 2, code=2)
    assert "--batch is for traffic" in placed
    assert run("route", slots, out).stdout == run("route", slots, csv).stdout


def test_convert_ids_to_a_recording_by_batch(tmp_path: Path) -> None:
    """So many tokens make a step; the incomplete last one is dropped, as by route."""
    pytest.importorskip("safetensors")
    ids = tmp_path / "ids.npz"
    np.savez(ids, topk=np.array([[0, 1], [1, 2], [3, 0], [0, 2], [1, 1]]))
    assert "give --batch" in refusal("convert", ids, tmp_path / "out", code=2)
    run("convert", ids, tmp_path / "out", "--batch", 2)
    trace = read_trace(tmp_path / "out")
    assert isinstance(trace, LoadTrace)
    np.testing.assert_array_equal(trace.tokens, [[[1, 2, 1, 0]], [[2, 0, 1, 1]]])
    assert trace.top_k == 2


def write_slots(folder: Path) -> Path:
    """Write a placement of three experts."""
    path = folder / "slots.npy"
    np.save(path, np.array([[0, 1], [2, 0]]))
    return path


# The process


def test_no_command_prints_help() -> None:
    """A lone `eplb-opt` shows the commands."""
    result = CliRunner().invoke(app, [])
    assert "validate" in result.output


def test_interruption_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the command as it ends a shell's."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "optimality_gap", interrupted)
    assert "Traceback" not in run("gap", code=130).output


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is raised on purpose becomes a line."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "optimality_gap", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        CliRunner().invoke(app, ["gap"], catch_exceptions=False)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The line says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("gap", *SMALL, "--quiet", "--plot", tmp_path / "gap.png", code=1)
    assert result.output == "error: plots need matplotlib: pip install 'eplb-opt[plot]'\n"


def test_the_installed_command(placement: Path, tokens: Path, tmp_path: Path) -> None:
    """The entry point runs as a process: results and errors on their own streams, nothing else."""
    command = [sys.executable, "-c", "from eplb_opt.cli import app; app()"]
    good = subprocess.run(
        [*command, "route", placement, tokens],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,  # not where the sources are: the installed package is meant
    )
    assert (good.returncode, good.stderr) == (0, "")
    assert "1 of 1 problems proven optimal" in good.stdout
    bad = subprocess.run(
        [*command, "route", placement, tmp_path / "none.npy"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr == f"error: {tmp_path / 'none.npy'}: No such file or directory\n"


def test_the_entry_point_is_the_app() -> None:
    """What pip installs as `eplb-opt` is a Typer app."""
    assert isinstance(app, typer.Typer)
