"""Figures of studies, for papers and pages; matplotlib is imported when one is drawn."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from eplb_opt.batches import STAGES
from eplb_opt.comparison import PlacementComparison
from eplb_opt.errors import SolverUnavailableError
from eplb_opt.gap import GapStudy
from eplb_opt.regime import CHOICES, Choice, Crossover, RegimeMap
from eplb_opt.replaying import PARTS, Replay
from eplb_opt.sweep_results import Sweep, SweepRow
from eplb_opt.workload import Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_comparison", "plot_gap", "plot_regimes", "plot_replay", "plot_sweep"]

_INK, _GRID = "#333333", "#e6e6e6"
# Okabe and Ito's colours, told apart with every kind of colour vision, but for their yellow, which
# is too faint for lines on white, and black, which is for the optimum.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#7F7F7F")
_MARKERS = "sD^vPXh<>p"
_LABEL_SIZE = 7.0  # points, like all lengths of type below
_STYLE: Mapping[Any, Any] = MappingProxyType(
    {
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "xtick.labelsize": _LABEL_SIZE,
        "ytick.labelsize": _LABEL_SIZE,
        "text.color": _INK,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
        "lines.linewidth": 1.0,
        "lines.markersize": 3.5,
        "lines.markeredgewidth": 0.4,
        "pdf.fonttype": 42,  # many journals refuse the Type 3 fonts of the default
    }
)
# Pale, so that the figures in the cells can be read on them.
_CHOICE_COLOURS: Mapping[Choice, str] = MappingProxyType(
    {
        "no-replicas": "#e8e8e8",
        "uniform": "#f7e6b5",
        "metro": "#b8d8ee",
        "token-balance": "#f3c6a5",
        "makespan": "#aadccb",
    }
)


def plot_gap(study: GapStudy, path: str | os.PathLike[str]) -> None:
    """Draw how far each method is from the optimum, or its best proven bound, by replication.

    A panel per number of GPUs, with one y axis for all: the mean gap in per cent as a line per
    method, and a pale one up to the 95th percentile. If the gaps span a wide range, the axis is
    drawn on a square-root scale, which shows zero. A study without two replication ratios for any
    number of GPUs gives a row per method instead.

    Parameters
    ----------
    study
        What `eplb_opt.optimality_gap` returned.
    path
        Where to write it; the suffix decides: ``.pdf`` and ``.svg`` are vector graphics, ``.png``
        has 200 dots per inch. One panel fits a column of a two-column paper, three fit its page.

    Raises
    ------
    SolverUnavailableError
        When matplotlib is not installed.
    ValueError
        When the study has no rows, or matplotlib does not know the suffix.
    OSError
        When the file cannot be written.
    """
    if not study.rows:
        raise ValueError("the study has no rows to draw")
    panels = _panels(study)
    proven = all(row.optimum_proven == 1 for row in study.rows if row.problems)
    label = f"gap to the {'proven optimum' if proven else 'best bound'} (%)\n"
    label += "mean, to the 95th percentile"
    with _figure(path, f"Optimality gap: {study.traffic}, {study.objective}") as figure:
        if any(line.ratio.size > 1 for lines in panels.values() for line in lines):
            _draw_lines(figure, panels, label)
        else:
            _draw_rows(figure, panels, label)


def plot_regimes(regimes: RegimeMap, path: str | os.PathLike[str]) -> None:
    """Draw a phase diagram: the best choice by batch size, and by skew or replication.

    With two skews or more a panel per deployment, with a row per skew; else a panel per number of
    GPUs, with a row per replication. A cell's colour is the best choice, and its figure the time of
    the faster of METRO and token balance over that of ``makespan``. Lines across the rows are where
    METRO and token balance cross, and TEMPO's boundaries (see `eplb_opt.regime.Crossover`).

    Parameters
    ----------
    regimes
        What `eplb_opt.regime_map` returned.
    path
        Where to write it, as for `plot_gap`.

    Raises
    ------
    SolverUnavailableError, ValueError, OSError
        As `plot_gap`.
    """
    panels: dict[str, list[int]] = {}
    by_skew = len({crossover.skew for crossover in regimes.crossovers}) > 1
    for at, c in enumerate(regimes.crossovers):
        title = f"{c.gpus} GPUs" + (f", replication {c.replication:.5g}" if by_skew else "")
        panels.setdefault(title, []).append(at)
    with _figure(path, f"Regimes: {regimes.traffic}, {regimes.objective}") as figure:
        _draw_phases(figure, regimes, panels, by_skew)


def plot_comparison(comparison: PlacementComparison, path: str | os.PathLike[str]) -> None:
    """Draw a placement's GPU loads before and after, and who has copies.

    Two heat maps, of the placement before and of the first one compared, with a row per layer and a
    column per GPU: load over the layer's mean, white at the mean, a dot on the layer's largest.
    Beside them the largest by layer, before and after. Below them the copies of an expert by its
    rank in load: mean over layers, least and most.

    Parameters
    ----------
    comparison
        What was placed.
    path
        Where to write it, as for `plot_gap`. It fits a page of a paper.

    Raises
    ------
    SolverUnavailableError, ValueError, OSError
        As `plot_gap`.
    """
    row = comparison.rows[0]
    with _figure(path, f"Placement: {comparison.loads}, {row.method}") as figure:
        _draw_loads(figure, comparison)


def plot_replay(replays: Sequence[Replay], path: str | os.PathLike[str]) -> None:
    """Draw the time of steps, and what steps are made of.

    A row per replay: on the left the running median of a stage's step times by method, with a tick
    for every decision of the loop; on the right the parts of a mean step.

    Parameters
    ----------
    replays
        Of the same steps, on a placement that stays, and as a loop keeps it.
    path
        Where to write it, as for `plot_gap`.

    Raises
    ------
    SolverUnavailableError, ValueError, OSError
        As `plot_gap`.
    """
    with _figure(path, f"Replay: {replays[0].traffic}, {replays[0].objective}") as figure:
        _draw_replays(figure, replays)


def plot_sweep(sweep: Sweep, path: str | os.PathLike[str]) -> None:
    """Draw what redundancy costs and buys, and what it does to the experts that are activated.

    A column per EP size, a colour per router. Above, a point per deployment: the mean decode step
    over a GPU's memory, or over redundant slots where the memory is not known, with a line along
    those that no other beats (`Sweep.frontier`). Below, by replication, experts per layer: live
    ones, their replicas, and the replicas that are activated, means over deployments. Where no step
    is of decode, both are of prefill.

    Parameters
    ----------
    sweep
        What `eplb_opt.sweep` returned.
    path
        Where to write it, as for `plot_gap`.

    Raises
    ------
    ValueError
        When the sweep has no rows.
    SolverUnavailableError, OSError
        As `plot_gap`.
    """
    if not sweep.rows:
        raise ValueError("the sweep has no rows to draw")
    with _figure(path, f"Sweep: {sweep.traffic}, {sweep.objective}") as figure:
        _draw_sweep(figure, sweep)


@contextmanager
def _figure(path: str | os.PathLike[str], title: str) -> Iterator[Figure]:
    """Make a figure in the style of all, and write it."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise SolverUnavailableError(
            "plots need matplotlib: pip install 'eplb-opt[plot]'"
        ) from None
    with mpl.rc_context(dict(_STYLE)):
        figure = Figure(layout="constrained", dpi=200)
        yield figure
        figure.savefig(Path(path), metadata={"Title": title})


@dataclass(frozen=True, slots=True)
class _Line:
    """One method in one panel: gaps in per cent by rising replication, float64 each."""

    method: str
    colour: str
    marker: str
    ratio: NDArray[np.float64]
    mean: NDArray[np.float64]
    p95: NDArray[np.float64]

    @property
    def high(self) -> NDArray[np.float64]:
        """Where the whiskers end: a mean can lie above the 95th percentile."""
        return np.fmax(self.mean, self.p95)


def _panels(study: GapStudy) -> dict[int, list[_Line]]:
    """Return the lines of every number of GPUs, methods in the study's order."""
    looks = _looks(study)
    panels = {}
    for gpus in sorted({row.gpus for row in study.rows}):
        lines = []
        for method, look in looks.items():
            # By ratio, since several that were asked for may round to one.
            points = {
                row.replication: (row.replication, 100 * row.gap_mean, 100 * row.gap_p95)
                for row in study.rows
                if (row.gpus, row.method) == (gpus, method)
            }
            if points:
                ratio, mean, p95 = np.array(sorted(points.values())).T
                lines.append(_Line(method, *look, ratio, mean, p95))
        panels[gpus] = lines
    return panels


def _looks(study: GapStudy) -> dict[str, tuple[str, str]]:
    """Return colour and marker by method; methods without any gap are drawn in ink."""
    looks = cycle(zip(cycle(_COLOURS), _MARKERS * len(_COLOURS), strict=False))
    gapped = {row.method for row in study.rows if row.gap_max != 0}
    methods = dict.fromkeys(row.method for row in study.rows)
    return {method: next(looks) if method in gapped else (_INK, "o") for method in methods}


def _draw_lines(figure: Figure, panels: Mapping[int, Sequence[_Line]], label: str) -> None:
    """Draw gap over replication: a panel per number of GPUs, a line per method."""
    most = max(map(len, panels.values()))
    figure.set_size_inches(1.75 + 1.75 * len(panels), max(2.6, 0.8 + 0.13 * most))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    _scale(axes[0], "y", panels)
    step = np.diff(
        np.unique([r for lines in panels.values() for line in lines for r in line.ratio])
    )
    apart = min(0.06, 0.6 / most) * step.min()  # side by side, lest the whiskers hide each other
    for ax, (gpus, lines) in zip(axes, panels.items(), strict=True):
        ratios = np.unique(np.concatenate([line.ratio for line in lines]))
        for at, line in enumerate(lines):
            shift = 0 if line.colour == _INK else (at - (len(lines) - 1) / 2) * apart
            x = line.ratio + shift
            ax.vlines(x, line.mean, line.high, color=line.colour, alpha=0.35, linewidth=1.2)
            ax.plot(x, line.mean, line.marker + "-", color=line.colour, mec="white", clip_on=False)
        ax.set_xticks(ratios, _tick_labels(ratios))
        ax.grid(axis="y", color=_GRID, linewidth=0.5)
        ax.set_title(f"{gpus} GPUs")
    axes[0].set_ylabel(label)
    axes[len(axes) // 2].set_xlabel("replication (slots / experts)")
    _label_ends(figure, axes[-1], list(panels.values())[-1])


def _tick_labels(ratios: NDArray[np.float64]) -> list[str]:
    """Return the ratios as text, empty where the label before leaves no room."""
    room = 0.2 * (ratios[-1] - ratios[0])
    labels, last = [], -np.inf
    for ratio in ratios:
        fits = ratio - last > room
        last = ratio if fits else last
        labels.append(f"{ratio:.5g}" if fits else "")
    return labels


def _draw_rows(figure: Figure, panels: Mapping[int, Sequence[_Line]], label: str) -> None:
    """Draw gaps of one replication ratio: a panel per number of GPUs, a row per method."""
    methods = list(dict.fromkeys(line.method for lines in panels.values() for line in lines))
    figure.set_size_inches(1.75 + 1.75 * len(panels), 0.8 + 0.17 * len(methods))
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    _scale(axes[0], "x", panels)
    for ax, (gpus, lines) in zip(axes, panels.items(), strict=True):
        for line in lines:
            y = methods.index(line.method)
            ax.hlines(y, line.mean, line.high, color=line.colour, alpha=0.35, linewidth=1.2)
            ax.plot(line.mean, y, line.marker, color=line.colour, mec="white", clip_on=False)
        ax.grid(axis="x", color=_GRID, linewidth=0.5)
        ax.set_title(f"{gpus} GPUs, replication {lines[0].ratio[0]:.5g}")
    axes[0].set_yticks(range(len(methods)), [_short(method) for method in methods])
    axes[0].set_ylim(len(methods) - 0.5, -0.5)
    axes[len(axes) // 2].set_xlabel(label)


def _scale(ax: Axes, along: Literal["x", "y"], panels: Mapping[int, Sequence[_Line]]) -> None:
    """Set scale, limits and ticks of the axis along which gaps are drawn."""
    from matplotlib.scale import FuncScale

    axis = ax.xaxis if along == "x" else ax.yaxis
    means = np.concatenate([line.mean for lines in panels.values() for line in lines])
    highs = np.concatenate([line.high for lines in panels.values() for line in lines])
    top = float(np.fmax.reduce(highs, initial=1.0))
    ax.set(**{f"{along}lim": (0, 1.05 * top)})
    if top <= 20 * np.fmin.reduce(means[means > 0], initial=top):
        return
    root = FuncScale(axis, (lambda gap: np.sqrt(np.maximum(gap, 0)), np.square))
    ax.set(**{f"{along}scale": root})
    ticks = [0.0]
    for tick in (factor * 10.0**power for power in range(9) for factor in (1, 2, 5)):
        if tick <= 1.05 * top and np.sqrt(tick) > np.sqrt(ticks[-1]) + np.sqrt(top) / 12:
            ticks.append(tick)
    axis.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])


def _label_ends(figure: Figure, ax: Axes, lines: Sequence[_Line]) -> None:
    """Write the methods beside the ends of their lines, moved apart where they would meet."""
    from matplotlib.transforms import ScaledTranslation, blended_transform_factory

    figure.draw_without_rendering()  # settles the height that the labels share
    height = 72 * ax.get_window_extent().height / figure.dpi
    to_axes = ax.transData - ax.transAxes
    drawn = [line for line in lines if np.isfinite(line.mean[-1])]
    if not drawn:
        return
    ends = [to_axes.transform((line.ratio[-1], line.mean[-1]))[1] for line in drawn]
    heights = _apart(np.array(ends), 1.3 * _LABEL_SIZE / height)
    # Across: inches from the right edge. Up: share of the axes' height.
    in_axes: Any = ax.transAxes  # declared as a wider type than the one that it has
    beside = blended_transform_factory(
        figure.dpi_scale_trans + ScaledTranslation(1, 0, in_axes), in_axes
    )
    for line, end, y in zip(drawn, ends, heights, strict=True):
        look: dict[str, Any] = {"color": line.colour, "transform": beside, "clip_on": False}
        ax.plot([0.03, 0.15, 0.2], [end, y, y], linewidth=0.4, **look)
        ax.plot(0.24, y, line.marker, **look)
        ax.text(0.31, y, _short(line.method), fontsize=_LABEL_SIZE, va="center", transform=beside)


def _short(method: str) -> str:
    return method if len(method) <= 32 else method[:31] + "…"


def _apart(wanted: NDArray[np.float64], distance: float) -> NDArray[np.float64]:
    """Return the places nearest to those wanted (least squares) with this distance between them.

    Without the distances the places must not fall: isotonic regression, by pooling neighbours.
    """
    order = np.argsort(wanted, kind="stable")
    offsets = distance * np.arange(len(wanted))
    pools: list[list[float]] = []
    for place in wanted[order] - offsets:
        pools.append([place])
        while len(pools) > 1 and np.mean(pools[-2]) >= np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    places = np.empty_like(wanted)
    places[order] = np.concatenate([np.full(len(p), np.mean(p)) for p in pools]) + offsets
    return places


def _draw_phases(
    figure: Figure, regimes: RegimeMap, panels: Mapping[str, Sequence[int]], by_skew: bool
) -> None:
    """Draw the panels, each of the deployments and skews of those numbers."""
    from matplotlib.patches import Patch

    size = len(regimes.rows) // len(regimes.crossovers)
    batches = np.array([row.tokens_per_gpu for row in regimes.rows[:size]])
    columns = 2 if len(panels) == 1 else 4  # of the legend
    tallest = max(map(len, panels.values()))
    width = 1.2 + max(2.2, 0.31 * size) * len(panels)
    figure.set_size_inches(width, 1.1 + 0.24 * tallest + 0.2 * (8 // columns))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (title, members) in zip(axes, panels.items(), strict=True):
        crossovers = [regimes.crossovers[at] for at in members]
        for y, at in enumerate(members):
            for x, row in enumerate(regimes.rows[at * size : (at + 1) * size]):
                colour = _CHOICE_COLOURS[row.best]
                ax.fill_between([x - 0.5, x + 0.5], y - 0.5, y + 0.5, color=colour)
                pure = min(row.ratio("metro"), row.ratio("token-balance"))
                where = {"ha": "center", "va": "center", "zorder": 3}
                ax.text(x, y, f"{pure:.2f}", fontsize=6, **where)
        lines = _draw_boundaries(ax, crossovers, batches)
        ax.set(xlim=(-0.5, size - 0.5), ylim=(-0.5, len(members) - 0.5), title=title)
        ax.set_xticks(range(size), list(map(str, batches)))
        labels = [f"{c.skew if by_skew else c.replication:.5g}" for c in crossovers]
        ax.set_yticks(range(len(members)), labels)
    axes[0].set_ylabel("Zipf exponent" if by_skew else "replication\n(slots / experts)")
    axes[len(axes) // 2].set_xlabel("tokens of a batch per GPU")
    best = {row.best for row in regimes.rows}
    patches = [Patch(color=_CHOICE_COLOURS[c], label=c) for c in CHOICES if c in best]
    figure.legend(
        handles=[*patches, *lines], loc="outside lower center", ncols=columns, frameon=False
    )


def _draw_boundaries(
    ax: Axes, crossovers: Sequence[Crossover], batches: NDArray[np.int64]
) -> list[Any]:
    """Draw where METRO and token balance cross, and TEMPO's boundaries: a stroke in every row."""
    looks = (
        ("METRO = token balance", "-", _INK, [c.tokens_per_gpu for c in crossovers]),
        ("TEMPO's boundary", "--", _COLOURS[1], [c.flip for c in crossovers]),
        ("hottest expert", ":", _COLOURS[1], [c.flip_hottest for c in crossovers]),
    )
    ends = np.arange(len(crossovers))[:, None] + [-0.5, 0.5, np.nan]  # NaN lifts the pen
    lines = []
    scale = np.log(batches), np.arange(len(batches))
    for label, style, colour, crossed in looks:
        # Between the columns, which stand apart equally, along the logarithm.
        x = np.interp(np.log(np.maximum(crossed, 1)), *scale, left=np.nan, right=np.nan)
        lines += ax.plot(np.repeat(x, 3), ends.ravel(), style, color=colour, label=label)
    return lines


def _draw_loads(figure: Figure, comparison: PlacementComparison) -> None:
    """Draw the heat maps, the largest loads by layer, and the copies below."""
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    row, layers = comparison.rows[0], len(comparison.layers)
    after = row.plan.metrics
    figure.set_size_inches(7, 2.6 + min(3.2, 0.06 * layers))
    grid = figure.add_gridspec(
        2, 3, width_ratios=(1, 1, 0.55), height_ratios=(0.8 + min(3.2, 0.06 * layers), 1)
    )
    colours = LinearSegmentedColormap.from_list("load", (_COLOURS[0], "white", _COLOURS[1]))
    peak = max(comparison.before.par_max, after.par_max)
    norm = TwoSlopeNorm(1, vmin=0, vmax=max(peak, 1.01))
    first, maps = figure.add_subplot(grid[0, 0]), []
    for column, (title, metrics) in enumerate(
        (
            (f"before: {_short(comparison.started_from)}", comparison.before),
            (_short(row.method), after),
        )
    ):
        ax = first if column == 0 else figure.add_subplot(grid[0, column], sharey=first)
        mean = metrics.mean[:, None]
        over = np.where(mean > 0, metrics.gpu_load / np.where(mean > 0, mean, 1.0), 1.0)
        maps.append(
            ax.imshow(over, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
        )
        ax.plot(over.argmax(axis=1), range(layers), ".", color=_INK, markersize=1.5)
        ax.set(title=title, xlabel="GPU")
        ax.locator_params(axis="x", integer=True)
        if column:
            ax.tick_params(labelleft=False)
    peaks = figure.add_subplot(grid[0, 2], sharey=first)
    for colour, label, metrics in (
        (_COLOURS[1], "before", comparison.before),
        (_COLOURS[0], "after", after),
    ):
        peaks.plot(metrics.par, range(layers), ".-", color=colour, label=label, markersize=2.5)
    peaks.axvline(1, color=_INK, linewidth=0.6)
    peaks.set(title="largest over mean", xlabel="PAR")
    peaks.tick_params(labelleft=False)
    peaks.legend(frameon=False)
    step = -(-layers // 8)
    first.set_yticks(range(0, layers, step), [str(n) for n in comparison.layers[::step]])
    first.set(ylabel="layer", ylim=(layers - 0.5, -0.5))
    bar = figure.colorbar(maps[-1], ax=first, location="left", fraction=0.05, pad=0.02)
    bar.set_label("GPU load over the layer's mean")

    order = np.argsort(-comparison.load, axis=1, kind="stable")
    copies = np.take_along_axis(after.copies, order, axis=1)
    rank = np.arange(1, copies.shape[1] + 1)
    ax = figure.add_subplot(grid[1, :])
    ax.fill_between(
        rank, copies.min(axis=0), copies.max(axis=0), step="mid", color=_COLOURS[0], alpha=0.25
    )
    ax.plot(rank, copies.mean(axis=0), drawstyle="steps-mid", color=_COLOURS[0])
    ax.grid(axis="y", color=_GRID, linewidth=0.5)
    ax.set(xlabel="experts of a layer by falling load", ylabel="copies\n(mean, range of layers)")
    ax.set(xlim=(0.5, copies.shape[1] + 0.5), ylim=(0, None))
    ax.locator_params(integer=True)


def _draw_replays(figure: Figure, replays: Sequence[Replay]) -> None:
    """Draw a row of panels per replay and stage."""
    rows = [
        (replay, at)
        for replay in replays
        for at in range(len(STAGES))
        if (replay.stages == at).any()
    ]
    figure.set_size_inches(7, 0.3 + 1.9 * len(rows))
    panels = figure.subplots(len(rows), 2, width_ratios=(1.7, 1), squeeze=False)
    for (replay, at), (course, parts) in zip(rows, panels, strict=True):
        steps = replay.first_step + np.flatnonzero(replay.stages == at)
        updates = "updated" if replay.decisions else "stays"
        course.set(title=f"{STAGES[at]}, placement {updates}", xlabel="step", ylabel="ms")
        for colour, row in zip(cycle(_COLOURS), replay.rows, strict=False):
            x, times = _medians(steps, row.step_times[replay.stages == at] / 1e3)
            course.plot(x, times, color=colour, label=row.method)
        for decided in replay.decisions:
            course.axvline(decided.step + 1, ymax=0.04, color=_INK, linewidth=0.6)
        course.set_ylim(0, None)
        course.grid(axis="y", color=_GRID, linewidth=0.5)
        _draw_parts(parts, replay, STAGES[at])
    _legend_below(figure, panels[:, 0].tolist(), "outside lower left")
    _legend_below(figure, panels[:, 1].tolist(), "outside lower right")


def _legend_below(
    figure: Figure,
    panels: Sequence[Axes],
    place: Literal["outside lower left", "outside lower right"],
) -> None:
    """Draw one legend for all that some panels show."""
    named: dict[str, Any] = {}
    for ax in panels:
        handles, labels = ax.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(list(named.values()), list(named), loc=place, ncols=2, frameon=False)


_POINTS = 400  # more than a panel's width shows


def _medians(
    steps: NDArray[np.int64], times: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the medians of so many runs of steps, or every step where there are fewer."""
    runs = np.array_split(np.arange(len(steps)), min(len(steps), _POINTS))
    return (
        np.array([steps[run].mean() for run in runs]),
        np.array([np.median(times[run]) for run in runs]),
    )


def _draw_parts(ax: Axes, replay: Replay, stage: Stage) -> None:
    """Draw what a mean step is made of, a bar per method."""
    rows = [getattr(row, stage) for row in replay.rows]
    place = np.arange(len(rows))
    left = np.zeros(len(rows))
    for colour, part in zip(_COLOURS, PARTS, strict=False):
        wide = np.array([getattr(row, part) for row in rows])
        if wide.any():
            ax.barh(place, wide, left=left, color=colour, label=part, height=0.7)
            left += wide
    ax.set_yticks(place, [_short(row.method) for row in replay.rows])
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlabel="ms of a mean step")


def _draw_sweep(figure: Figure, sweep: Sweep) -> None:
    """Draw two panels for each EP size."""
    stage = sweep.stages[0]
    figure.set_size_inches(1.2 + 2.4 * max(2, len(sweep.gpus)), 4.6)
    panels = figure.subplots(2, len(sweep.gpus), sharey="row", squeeze=False)
    looks = zip(cycle(_COLOURS), _MARKERS * len(_COLOURS), strict=False)
    routers = dict(zip(dict.fromkeys(row.method for row in sweep.rows), looks, strict=False))
    for gpus, (pareto, activated) in zip(sweep.gpus, panels.T, strict=True):
        rows = [row for row in sweep.rows if row.gpus == gpus and row.mean(stage) is not None]
        pareto.set_title(f"{gpus} GPUs")
        _draw_frontier(pareto, rows, sweep.frontier(gpus, stage), stage, routers)
        _draw_activated(activated, rows, sweep.experts, stage, routers)
        for ax in (pareto, activated):
            ax.grid(color=_GRID, linewidth=0.5)
    panels[0, 0].set_ylabel("ms per token" if stage == "decode" else "ms of a prefill step")
    panels[1, 0].set_ylabel("experts or replicas\nper layer")
    _legend_below(figure, panels.ravel().tolist(), "outside lower left")


def _draw_frontier(
    ax: Axes,
    rows: Sequence[SweepRow],
    frontier: Sequence[SweepRow],
    stage: Stage,
    routers: Mapping[str, tuple[str, str]],
) -> None:
    """Draw time over cost: a point per row, and a line along the best."""
    known = all(row.memory is not None for row in rows)
    unit = 1e9 if known else 1
    x, y = np.array([(row.cost / unit, row.mean(stage)) for row in frontier], np.float64).T
    ax.plot(x, y, color=_INK, drawstyle="steps-post", linewidth=0.8, label="frontier")
    ax.plot(x, y, "o", color=_INK, mfc="none", markersize=7)
    for method, (colour, marker) in routers.items():
        own = [(row.cost / unit, row.mean(stage)) for row in rows if row.method == method]
        if own:
            x, y = np.array(own, np.float64).T
            ax.plot(x, y, marker, color=colour, mec="white", label=method)
    ax.set_xlabel("GB of a GPU for routed experts" if known else "redundant slots")


def _draw_activated(
    ax: Axes,
    rows: Sequence[SweepRow],
    experts: int,
    stage: Stage,
    routers: Mapping[str, tuple[str, str]],
) -> None:
    """Draw live experts, their replicas, and those activated by each router, over replication."""

    def means(rows: Sequence[SweepRow], figure: str) -> tuple[list[float], list[float]]:
        slots = sorted({row.redundant for row in rows})
        of = [[getattr(getattr(r, stage), figure) for r in rows if r.redundant == s] for s in slots]
        return [1 + s / experts for s in slots], [float(np.mean(values)) for values in of]

    ax.plot(*means(rows, "live_experts"), ":", color=_INK, label="live experts", zorder=3)
    ax.plot(*means(rows, "replicas_available"), "--", color=_INK, label="their replicas")
    for method, (colour, marker) in routers.items():
        own = [row for row in rows if row.method == method]
        ax.plot(*means(own, "activated"), marker + "-", color=colour, mec="white")
    ax.set_xlabel("replication (slots / experts)")
