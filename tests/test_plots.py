"""The figures of a study: written in every format, whatever the study holds."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_opt.comparison import ComparedPlan, PlacementComparison
from eplb_opt.errors import SolverUnavailableError
from eplb_opt.gap import GapRow, GapStudy
from eplb_opt.memory import MemoryPerGpu
from eplb_opt.metrics import PlacementMetrics
from eplb_opt.placement import Placement
from eplb_opt.placers import first_placement
from eplb_opt.placing import solve_placement
from eplb_opt.plots import _apart, plot_comparison, plot_gap, plot_regimes, plot_sweep
from eplb_opt.regime import Choice, Crossover, RegimeMap, RegimeRow
from eplb_opt.replaying import StageTimes
from eplb_opt.sweep_results import Sweep, SweepRow

mpl = pytest.importorskip("matplotlib")


def row(gpus: int, replication: float, method: str, mean: float) -> GapRow:
    """Make a row with a gap."""
    gaps = (mean, mean, 1.5 * mean, 1.8 * mean, 2 * mean)
    redundant = round(256 * (replication - 1))
    rest = (12.0, 10.0, 9.0, 150.0, 2.0, 144.0, 200.0, 5.0)
    proofs = {"proven": 1.0, "optimum_proven": 1.0, "gap_beyond_idle": mean}
    return GapRow(gpus, redundant, replication, method, 58, 0, *gaps, *rest, exact=True, **proofs)


def study(*rows: GapRow) -> GapStudy:
    """Make a study of rows."""
    return GapStudy("DeepSeek-V3 decode", "activations", 32, 20, 58, "x86_64", rows, "optimal", 0.0)


def grid(gpus: list[int], replication: list[float], methods: tuple[str, ...]) -> GapStudy:
    """Make a study with a row for each, the first method without any gap."""
    return study(
        *(
            row(g, r, method, 0.1 * rank**2 * (r - 1) * (1 + g / 32))
            for g in gpus
            for r in replication
            for rank, method in enumerate(methods)
        )
    )


def texts(path: Path) -> str:
    """Give what an SVG says, whose letters matplotlib notes in comments."""
    return path.read_text(encoding="utf-8")


def test_the_suffix_decides_the_format(tmp_path: Path) -> None:
    """Vector graphics for papers; a bitmap for pages, 200 dots per inch of 3.5 inches."""
    plot_gap(grid([8], [1.25], ("metro",)), tmp_path / "gap.pdf")
    assert (tmp_path / "gap.pdf").read_bytes().startswith(b"%PDF-")
    plot_gap(grid([8], [1.25], ("metro",)), tmp_path / "gap.png")
    header = (tmp_path / "gap.png").read_bytes()
    assert header.startswith(b"\x89PNG\r\n")
    assert int.from_bytes(header[16:20], "big") == 700


def test_everything_is_said(tmp_path: Path) -> None:
    """Panels, axes, ratios and methods are named."""
    path = tmp_path / "gap.svg"
    plot_gap(grid([8, 16], [1.125, 1.5], ("optimal", "metro", "uniform")), path)
    for text in ("8 GPUs", "16 GPUs", "1.125", "optimal", "metro", "uniform", "replication (slots"):
        assert f"<!-- {text}" in texts(path)
    assert "Optimality gap: DeepSeek-V3 decode, activations" in texts(path)
    assert texts(path).startswith("<?xml")
    assert f'width="{72 * 5.25:g}pt"' in texts(path)  # two panels


def test_a_bound_is_not_called_an_optimum(tmp_path: Path) -> None:
    """Where one problem is open, the axis says that the gap is to a bound."""
    whole = grid([8], [1.25, 1.5], ("metro",))
    for proven, named in ((1.0, "proven optimum"), (0.9, "best bound")):
        rows = (replace(row, optimum_proven=proven) for row in whole.rows)
        plot_gap(study(*rows), tmp_path / "gap.svg")
        assert f"<!-- gap to the {named}" in texts(tmp_path / "gap.svg")


def test_one_ratio_gives_a_row_per_method(tmp_path: Path) -> None:
    """Without two ratios there is no line to draw."""
    path = tmp_path / "gap.svg"
    plot_gap(grid([8, 16], [1.25], ("optimal", "metro")), path)
    assert "<!-- 8 GPUs, replication 1.25 -->" in texts(path)
    assert "<!-- metro -->" in texts(path)


@pytest.mark.parametrize(
    ("ratios", "means"),
    [
        ([1.25], [0.0]),
        ([1.25], [math.nan]),
        ([1.25], [0.0, 0.05, 40.0, math.nan]),
        ([1.25, 1.5], [1e-9]),
        ([1.25, 1.5], [math.nan]),
        ([1.25, 1.5], [0.0, 0.05, 40.0, math.nan]),
    ],
)
def test_any_gap_can_be_drawn(tmp_path: Path, ratios: list[float], means: list[float]) -> None:
    """No gap at all, a tiny one, a huge one, and the NaN of an engine that ran out of time."""
    rows = [row(8, r, f"method {i}", mean) for r in ratios for i, mean in enumerate(means)]
    plot_gap(study(*rows), tmp_path / "gap.svg")


def test_odd_studies_can_be_drawn(tmp_path: Path) -> None:
    """Rows that repeat, methods that are missing somewhere, long names, many lines."""
    path = tmp_path / "gap.svg"
    twice = row(8, 1.5, "a", 0.1)
    plot_gap(study(twice, twice, row(16, 1.25, "b", 0.1), row(16, 1.5, "b", 0.1)), path)
    long = "Mine(" + "9, " * 300 + ")"
    plot_gap(grid([8], [1.0625, 1.07, 1.5], (*(f"method {i}" for i in range(11)), long)), path)


def test_a_study_without_rows_is_refused(tmp_path: Path) -> None:
    """There is nothing to draw."""
    with pytest.raises(ValueError, match="no rows"):
        plot_gap(study(), tmp_path / "gap.png")


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    """Matplotlib names those that it knows."""
    with pytest.raises(ValueError, match="supported formats"):
        plot_gap(grid([8], [1.25], ("metro",)), tmp_path / "gap.xyz")


def test_nothing_global_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pyplot, its windows and the caller's style stay out of it."""
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    before = mpl.rcParams.copy()
    plot_gap(grid([8], [1.25], ("metro",)), tmp_path / "gap.png")
    assert "matplotlib.pyplot" not in sys.modules
    # Not `==`: to look the backend up through the mapping imports pyplot.
    assert dict.__eq__(mpl.rcParams, before) is True


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A serving process does not install it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SolverUnavailableError, match=r"pip install 'eplb-opt\[plot\]'"):
        plot_gap(grid([8], [1.25], ("metro",)), tmp_path / "gap.png")


def regimes(
    gpus: tuple[int, ...], ratios: tuple[float, ...], skews: tuple[float | None, ...], flip: float
) -> RegimeMap:
    """Make a map of three batches, METRO best in the first and token balance in the last."""
    best: tuple[tuple[int, float, Choice], ...] = (
        (16, 1.0, "metro"),
        (64, 1.07, "makespan"),
        (256, 1.3, "token-balance"),
    )
    rows, crossovers = [], []
    for skew in skews:
        for g, r in ((g, r) for g in gpus for r in ratios):
            deployment = (g, round(256 * (r - 1)), r, skew)
            rows += [
                RegimeRow(*deployment, b, 8, 2.0, 1.5, metro, 1.2, 1.0, 1.0, 1.0, choice, 0.5)
                for b, metro, choice in best
            ]
            crossovers.append(Crossover(*deployment, flip, 64, 256, 0.9, 1.1, 2 * flip, 9 * flip))
    return RegimeMap(
        "DeepSeek-V3", "deepseek-v3-fp8", 156, 0.01, 1, 8, tuple(rows), tuple(crossovers)
    )


@pytest.mark.parametrize(
    ("skews", "titles", "label", "ticks"),
    [
        ((None,), ("8 GPUs", "32 GPUs"), "replication", ("1.125", "1.5")),
        (
            (0.0, 1.4),
            tuple(f"{g} GPUs, replication {r}" for g in (8, 32) for r in (1.125, 1.5)),
            "Zipf exponent",
            ("0", "1.4"),
        ),
    ],
)
def test_a_phase_diagram_says_everything(
    tmp_path: Path,
    skews: tuple[float | None, ...],
    titles: tuple[str, ...],
    label: str,
    ticks: tuple[str, ...],
) -> None:
    """Panels, rows, batches, choices that occur, what they gain, and the three boundaries."""
    path = tmp_path / "regime.svg"
    plot_regimes(regimes((8, 32), (1.125, 1.5), skews, 100.0), path)
    said = texts(path)
    for text in (*titles, *ticks, label, "16", "64", "256", "1.07", "tokens of a batch per GPU"):
        assert f"<!-- {text}" in said
    for text in ("metro", "makespan", "token-balance", "METRO = token balance", "hottest expert"):
        assert f"<!-- {text} -->" in said
    assert "<!-- uniform -->" not in said
    assert "Regimes: DeepSeek-V3, deepseek-v3-fp8" in said
    assert ("<!-- 8 GPUs -->" in said) == (skews == (None,))


@pytest.mark.parametrize("flip", [math.nan, 1e-3, 1e9])
def test_boundaries_outside_the_batches_are_not_drawn(tmp_path: Path, flip: float) -> None:
    """None at all, before the first and after the last: one row and one panel are enough."""
    plot_regimes(regimes((8,), (1.25,), (None,), flip), tmp_path / "regime.png")


def comparison(load: list[list[float]], gpus: int, slots: int) -> PlacementComparison:
    """Place a load by DeepSeek's policy, beside the experts in turn."""
    loads = np.array(load, np.float64)
    plan = solve_placement(loads, num_gpus=gpus, slots_per_gpu=slots)
    first = first_placement(len(load), gpus, slots, num_experts=loads.shape[1])
    before = PlacementMetrics.of(Placement(first, loads.shape[1]), loads)
    rows = (ComparedPlan("deepseek", plan, 0.001),)
    layers = np.arange(3, 3 + len(load))
    return PlacementComparison("decode.json", layers, loads, "experts in turn", before, rows)


def test_a_placement_is_drawn_before_and_after(tmp_path: Path) -> None:
    """Heat maps, peaks and copies, with the layers' own numbers."""
    path = tmp_path / "placed.svg"
    plot_comparison(comparison([[90, 10, 10, 10], [6, 3, 2, 1]], 2, 3), path)
    said = texts(path)
    for text in ("before: experts in turn", "deepseek", "3", "4", "GPU", "layer", "PAR", "copies"):
        assert f"<!-- {text}" in said
    for text in ("GPU load over the layer's mean", "experts of a layer by falling load"):
        assert f"<!-- {text} -->" in said
    assert "Placement: decode.json, deepseek" in said


@pytest.mark.parametrize(
    ("load", "gpus", "slots"),
    [([[0, 0]], 1, 2), ([[0, 0], [1, 0]], 2, 1), ([[1.0]], 1, 1), ([[1, 2, 3]] * 100, 3, 1)],
)
def test_any_placement_can_be_drawn(
    tmp_path: Path, load: list[list[float]], gpus: int, slots: int
) -> None:
    """No load, one GPU, one expert, many layers."""
    plot_comparison(comparison(load, gpus, slots), tmp_path / "placed.png")


@settings(max_examples=50)
@given(
    wanted=hnp.arrays(np.float64, st.integers(1, 12), elements=st.floats(0, 1)),
    distance=st.floats(0.01, 0.2),
)
def test_labels_are_moved_apart(wanted: np.ndarray, distance: float) -> None:
    """Labels keep their order and distance, and stay where they are if they have it already."""
    places = _apart(wanted, distance)
    order = np.argsort(wanted, kind="stable")
    assert (np.diff(places[order]) >= distance - 1e-9).all()
    assert places.mean() == pytest.approx(wanted.mean())
    np.testing.assert_allclose(_apart(places, distance), places, atol=1e-9)


def swept(gpus: int, redundant: int, method: str, mean: float) -> SweepRow:
    """Make a row of a sweep, of which the memory is known."""
    times = (mean, 0.9 * mean, 1.1 * mean, 1.2 * mean, math.nan, mean, 0.0, 0.0, 0.0, 0.0)
    decode = StageTimes(30, *times, 7.0, 10.0, 8.0, 4.0, 12.0, 5e4)
    memory = MemoryPerGpu(10**9, 10**7 * redundant, 0, 0)
    return SweepRow(gpus, redundant, None, None, None, method, decode, None, 1e5, 0, 0, memory)


def test_a_sweep(tmp_path: Path) -> None:
    """A column per EP size; memory, or redundant slots; the stage that there is; or nothing."""
    path = tmp_path / "sweep.svg"
    rows = [
        swept(gpus, redundant, method, 2.0 + redundant / 10)
        for gpus in (8, 16)
        for redundant in (0, 4)
        for method in ("uniform", "metro")
    ]
    sweep = Sweep("traffic", "makespan", 16, 0, 30, 4, tuple(rows))
    plot_sweep(sweep, path)
    for text in ("8 GPUs", "16 GPUs", "GB of a GPU", "ms per token", "frontier", "live experts"):
        assert f"<!-- {text}" in texts(path)
    bare = replace(rows[0], memory=None, decode=None, prefill=rows[0].decode)
    plot_sweep(replace(sweep, rows=(bare,)), path)
    assert "<!-- redundant slots" in texts(path)
    assert "<!-- ms of a prefill step" in texts(path)
    with pytest.raises(ValueError, match="the sweep has no rows to draw"):
        plot_sweep(replace(sweep, rows=()), path)
