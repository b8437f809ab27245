"""The command line: ``eplb-opt gap | regime | place | route | convert | ...``."""

from __future__ import annotations

import errno
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from numpy.typing import NDArray
from typer.core import TyperGroup

from eplb_opt.batches import local_batches, moe_layers
from eplb_opt.commands import advise, replay, sweep
from eplb_opt.commands.options import (
    CsvOption,
    GroupsOption,
    JsonOption,
    NodesOption,
    QuietOption,
    ThreadsOption,
    TopKOption,
    cores,
    links_of,
    numbers_of,
    progress_bar,
    require_folders,
    require_suffix,
    require_writable,
    say,
    write_text,
)
from eplb_opt.comparison import ComparedPlan, PlacementComparison
from eplb_opt.demand import count_tokens
from eplb_opt.errors import EplbError, InvalidTokensError
from eplb_opt.formats.placements import (
    NUMBERED,
    PLACEMENT_SUFFIXES,
    PlacementFormat,
    format_to_write,
    holds_placement,
    read_placement,
    write_placement,
)
from eplb_opt.gap import default_methods, optimality_gap
from eplb_opt.gpu.compiling import ARCHITECTURES, kernel_files, usage
from eplb_opt.measure import Split
from eplb_opt.metrics import PlacementMetrics
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement, slots_for
from eplb_opt.placers import first_placement, resolve_placer
from eplb_opt.placing import solve_placement
from eplb_opt.plots import plot_comparison, plot_gap, plot_regimes
from eplb_opt.regime import regime_map
from eplb_opt.report import (
    many,
    print_comparison,
    print_kernels,
    print_placement,
    print_presets,
    print_regimes,
    print_routing,
    print_study,
    print_trace,
)
from eplb_opt.routers import resolve_method
from eplb_opt.routing import solve_routing
from eplb_opt.stopping import TimeLimit
from eplb_opt.trace import LoadTrace, TokenTrace, read_trace, write_trace
from eplb_opt.transfer import Links, expert_bytes, plan_transfer, saving_per_step
from eplb_opt.workload import Stage, Workload, model_shape

__all__ = ["app"]

_Number = TypeVar("_Number", int, float)

_BATCHES_TO_TIME = 4


class _Commands(TyperGroup):
    """The commands, with what they raise on purpose turned into a line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        with _warnings_as_lines():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                raise typer.Exit(130) from None
            except OSError as error:
                if error.errno == errno.EPIPE:  # `eplb-opt ... | head`: nobody is left to tell
                    raise
                say("error", f"{error.filename}: {error.strerror}" if error.filename else error)
            except (EplbError, ValueError) as error:
                say("error", error)
        raise typer.Exit(1)


app = typer.Typer(
    name="eplb-opt",
    cls=_Commands,
    help="Expert placement and routing for mixture-of-experts serving, with proven optima.",
    epilog="Start with [bold]eplb-opt gap[/bold]: how far METRO and the serving engines' rules are"
    " from the optimum, on DeepSeek-V3 traffic, in seconds.\n\n"
    "Exit codes: 0 when done, 1 after an error (told in a line), 2 for wrong options,"
    " 130 when interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


class _Stage(str, Enum):
    decode = "decode"
    prefill = "prefill"


class _Kind(str, Enum):
    placement = "placement"
    trace = "trace"


_GpusOption = Annotated[
    str, typer.Option(metavar="N,N,...", help="Numbers of GPUs.", rich_help_panel="Deployments")
]
_ReplicationOption = Annotated[
    str | None,
    typer.Option(
        metavar="R,R,...",
        show_default="1.125,1.25,1.5",
        help="Slots over experts, rounded up to fill every GPU equally.",
        rich_help_panel="Deployments",
    ),
]
_RedundantOption = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        show_default=False,
        help="Slots beyond one per expert, instead of ratios.",
        rich_help_panel="Deployments",
    ),
]
_ModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default="deepseek-v3",
        help="Model of synthetic traffic; see eplb-opt presets.",
        rich_help_panel="Traffic",
    ),
]
_StageOption = Annotated[
    _Stage | None,
    typer.Option(
        show_default="decode", help="Stage of synthetic traffic.", rich_help_panel="Traffic"
    ),
]
_SeedOption = Annotated[
    int, typer.Option(min=0, help="For drawing batches.", rich_help_panel="Traffic")
]
_ObjectiveOption = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE.json",
        help="A GPU's time: activations (decode), tokens (prefill), both as measured on a model's"
        " kernel (see eplb-opt presets), or pieces of one's own in a file.",
        rich_help_panel="Methods",
    ),
]
_ToOption = Annotated[
    PlacementFormat | None,
    typer.Option(
        show_default="by the suffix of OUT", help="What OUT is to be; a .json does not tell."
    ),
]
_FirstLayerOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        show_default="0",
        help="The model's number of the first layer written, its dense layers counted (sglang,"
        " trtllm).",
    ),
]
_FormatOption = Annotated[
    PlacementFormat | None,
    typer.Option(
        "--format",
        show_default="by suffix and content",
        help="What FILE must be; a bare .npy with the GPUs first needs device-mask.",
    ),
]
_DenseLayersOption = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Layers at the start of a placement that have no experts; left out.",
    ),
]
_DraftLayersOption = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Layers at the end of a placement that belong to a draft model; left out.",
    ),
]
_TimeLimitOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="SECONDS",
        show_default=False,
        help="Time limit of each call of an exact engine (highs, cp-sat, pulp), not of a problem:"
        " gap has a call for every 32 batches with all their layers, route one for all of TOKENS.",
        rich_help_panel="Methods",
    ),
]


@app.callback()
def main(
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=lambda wanted: _show_version() if wanted else None,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Expert placement and routing for mixture-of-experts serving, with proven optima."""


@app.command(
    epilog="Examples:\n\n"
    "  eplb-opt gap\n\n"
    "  eplb-opt gap decode.json --gpus 32 --redundant 32,64 --plot gap.pdf\n\n"
    "  eplb-opt gap --model qwen3-235b --method metro --method highs --time-limit 60 --steps 2"
)
def gap(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            show_default=False,
            help="Recorded traffic: SGLang's logical_count (.json, .pt), counts (.npy, .npz, .csv),"
            " top-k ids (.npz), or a folder: a recording, an engine's statistics. Counts of several"
            " steps and ids are replayed; from one step of counts, batches are drawn. Without a"
            " file: synthetic DeepSeek-V3 decode traffic.",
        ),
    ] = None,
    gpus: _GpusOption = "8,16,32",
    replication: _ReplicationOption = None,
    redundant: _RedundantOption = None,
    place_on: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default="the traffic itself",
            help="Traffic that the placement is made for; judge it on another stage's.",
            rich_help_panel="Deployments",
        ),
    ] = None,
    model: _ModelOption = None,
    stage: _StageOption = None,
    tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens of a batch over all GPUs, where batches are drawn or cut from top-k ids.",
            rich_help_panel="Traffic",
        ),
    ] = 32,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="20, or all of a trace",
            help="Batches.",
            rich_help_panel="Traffic",
        ),
    ] = None,
    top_k: TopKOption = 8,
    draft_layers: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Layers at the end of FILE that belong to a draft model; left out.",
            rich_help_panel="Traffic",
        ),
    ] = 0,
    seed: _SeedOption = 0,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            show_default="optimal, METRO, engines' rules",
            help="A routing method, see eplb-opt presets; repeat for more.",
            rich_help_panel="Methods",
        ),
    ] = None,
    objective: _ObjectiveOption = "activations",
    threads: ThreadsOption = None,
    time_limit: _TimeLimitOption = None,
    json: JsonOption = None,
    csv: CsvOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Draw gap over replication: .pdf, .svg or .png.",
            rich_help_panel="Output",
        ),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Measure how far routing methods are from the proven optimum.

    For every deployment (GPUs x replication) experts are placed by DeepSeek's EPLB, every method
    routes the same batches, and the optimum of each problem (a layer and a batch) is proven, or
    bounded where the objective makes that hard.
    """
    _require_one_traffic(file, model, stage)
    require_writable(json, csv, plot)
    counts, ratios, extra = _deployments(gpus, replication, redundant)
    minimised = Objective.of(objective)
    name, workload = _synthetic(model, stage, seed)
    with progress_bar(quiet) as progress:
        study = optimality_gap(
            file or workload,
            gpus=counts,
            replication=ratios,
            redundant=extra,
            methods=method or None,
            objective=minimised,
            tokens=tokens,
            steps=steps,
            top_k=top_k,
            draft_layers=draft_layers,
            place_on=place_on,
            seed=seed,
            threads=threads or cores(),
            stop=None if time_limit is None else TimeLimit(time_limit),
            progress=progress,
        )
    if file is None:
        study = replace(study, traffic=name)
    wanted = () if method else default_methods(minimised)
    left_out = sorted({*wanted} - {row.method for row in study.rows})
    if left_out:
        say("note", f"the trace holds counts only; left out: {', '.join(left_out)}")
    if not quiet and "-" not in (json, csv):
        print_study(study)
    write_text(json, study.to_json() + "\n")
    write_text(csv, study.to_csv())
    if plot is not None:
        plot_gap(study, plot)


@app.command(
    epilog="Examples:\n\n"
    "  eplb-opt regime\n\n"
    "  eplb-opt regime --gpus 8 --redundant 64 --skew 0,0.5,1,1.5 --plot regime.pdf\n\n"
    "  eplb-opt regime decode.json --objective measured.json --batch 64,128,256"
)
def regime(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            show_default=False,
            help="Recorded traffic, as for gap; batches are drawn from its popularity. Without a"
            " file: synthetic DeepSeek-V3 decode traffic.",
        ),
    ] = None,
    gpus: _GpusOption = "8,16,32",
    replication: _ReplicationOption = None,
    redundant: _RedundantOption = None,
    batch: Annotated[
        str,
        typer.Option(
            metavar="N,N,...", help="Tokens of a batch per GPU.", rich_help_panel="Traffic"
        ),
    ] = "16,32,64,128,192,256,384,512,768,1024,2048",
    skew: Annotated[
        str | None,
        typer.Option(
            metavar="S,S,...",
            show_default="the traffic's own popularity",
            help="Zipf exponents of the experts' popularity.",
            rich_help_panel="Traffic",
        ),
    ] = None,
    model: _ModelOption = None,
    stage: _StageOption = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Batches of each size.", rich_help_panel="Traffic")
    ] = 1,
    layers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Layers of each batch, evenly from those that there are.",
            rich_help_panel="Traffic",
        ),
    ] = 8,
    top_k: TopKOption = 8,
    seed: _SeedOption = 0,
    objective: _ObjectiveOption = "deepseek-v3-fp8",
    within: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="PERCENT",
            help="How much longer a simpler choice may take and still be called best.",
            rich_help_panel="Methods",
        ),
    ] = 1.0,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    csv: CsvOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Draw the best choice over batch and skew or replication: .pdf, .svg or .png.",
            rich_help_panel="Output",
        ),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Say which router wins at which batch size: METRO, token balance, makespan, or no replicas.

    For every deployment (GPUs x replication) experts are placed by DeepSeek's EPLB, batches of
    growing size are routed by every choice, and the slowest GPU's time is compared; beside TEMPO's
    boundary between reading weights and arithmetic.
    """
    _require_one_traffic(file, model, stage)
    require_writable(json, csv, plot)
    counts, ratios, extra = _deployments(gpus, replication, redundant)
    name, workload = _synthetic(model, stage, seed)
    with progress_bar(quiet, "drawing") as progress:
        regimes = regime_map(
            file or workload,
            gpus=counts,
            replication=ratios,
            redundant=extra,
            tokens_per_gpu=numbers_of("--batch", batch, int, least=1),
            skew=None if skew is None else numbers_of("--skew", skew, float, least=0),
            objective=objective,
            within=within / 100,
            steps=steps,
            layers=layers,
            top_k=top_k,
            seed=seed,
            threads=threads or cores(),
            progress=progress,
        )
    if file is None:
        regimes = replace(regimes, traffic=name)
    if not quiet and "-" not in (json, csv):
        print_regimes(regimes)
    write_text(json, regimes.to_json() + "\n")
    write_text(csv, regimes.to_csv())
    if plot is not None:
        plot_regimes(regimes, plot)


@app.command(
    epilog="Examples:\n\n"
    "  eplb-opt place decode.json --gpus 32 --redundant 32 --out map.json --to sglang\n\n"
    "  eplb-opt place decode.json --gpus 32 --redundant 32 --method deepseek --method flashlb\n\n"
    "  eplb-opt place decode.json --gpus 32 --redundant 32 --nodes 4 --previous map.json"
    " --dense-layers 3 --model deepseek-v3 --tokens-per-batch 4096 --objective deepseek-v3-fp8"
)
def place(
    loads: Annotated[
        Path,
        typer.Argument(
            metavar="LOADS",
            help="Recorded traffic: SGLang's logical_count (.json, .pt), counts (.npy, .npz, .csv)"
            " or top-k ids (.npz). Layers without any token are dense, and left out.",
        ),
    ],
    gpus: Annotated[
        int, typer.Option(min=1, metavar="N", help="GPUs.", rich_help_panel="Deployment")
    ],
    redundant: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            show_default="as PREVIOUS has",
            help="Slots beyond one per expert.",
            rich_help_panel="Deployment",
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default=False,
            help="Slots of a GPU, instead.",
            rich_help_panel="Deployment",
        ),
    ] = None,
    nodes: NodesOption = 1,
    groups: GroupsOption = 1,
    draft_layers: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Layers at the end of LOADS and PREVIOUS that belong to a draft model; left out.",
            rich_help_panel="Traffic",
        ),
    ] = 0,
    windows: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Cut the steps, or tokens, of LOADS into so many windows.",
            rich_help_panel="Traffic",
        ),
    ] = 1,
    tokens_per_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default=False,
            help="Tokens of a batch over all GPUs, for methods that place for routing and for what"
            " a step saves.",
            rich_help_panel="Traffic",
        ),
    ] = None,
    top_k: TopKOption = 8,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            show_default="search",
            help="A placement method, see eplb-opt presets; repeat to compare.",
            rich_help_panel="Methods",
        ),
    ] = None,
    distinct: Annotated[
        bool,
        typer.Option(
            "--distinct",
            help="Repair placements with two copies of an expert on one GPU.",
            rich_help_panel="Methods",
        ),
    ] = False,
    split: Annotated[
        Split,
        typer.Option(
            help="How an expert's load is shared by its copies.", rich_help_panel="Methods"
        ),
    ] = Split.EQUAL,
    over_windows: Annotated[
        str,
        typer.Option(
            metavar="mean|worst|Q",
            help="How the makespans of windows sum up; Q is a quantile from 0 to 1.",
            rich_help_panel="Methods",
        ),
    ] = "mean",
    objective: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.json",
            show_default=False,
            help="A GPU's time, for methods that place for routing and for what a step saves.",
            rich_help_panel="Methods",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            show_default=False,
            help="Time limit of an exact method, over all layers.",
            rich_help_panel="Methods",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, show_default="all cores", help="Threads over layers.", rich_help_panel="Methods"
        ),
    ] = None,
    previous: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="The placement that is served now, as for validate.",
            rich_help_panel="Moves",
        ),
    ] = None,
    dense_layers: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Layers at the start of PREVIOUS that have no experts; left out.",
            rich_help_panel="Moves",
        ),
    ] = 0,
    max_moves: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            show_default="any number",
            help="The most weights that may move, over all layers.",
            rich_help_panel="Moves",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="The model whose weights move: plan the transfer. See eplb-opt presets.",
            rich_help_panel="Moves",
        ),
    ] = None,
    bytes_per_weight: Annotated[
        float,
        typer.Option(metavar="B", help="1 for fp8, 2 for bf16.", rich_help_panel="Moves"),
    ] = 1.0,
    links: Annotated[
        str,
        typer.Option(
            metavar="INSIDE,BETWEEN",
            help="GB/s that a GPU sends inside its node, and to other nodes.",
            rich_help_panel="Moves",
        ),
    ] = "450,50",
    layers_at_once: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Layers whose weights move together: fewer rounds, more buffers.",
            rich_help_panel="Moves",
        ),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT",
            show_default=False,
            help="Write the placement, as convert does.",
            rich_help_panel="Output",
        ),
    ] = None,
    to: _ToOption = None,
    first_layer: _FirstLayerOption = None,
    json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            show_default=False,
            help="Write the figures as JSON; - for standard output, in place of the tables.",
            rich_help_panel="Output",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Draw GPU loads before and after, and copies: .pdf, .svg or .png.",
            rich_help_panel="Output",
        ),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Decide which experts get copies and where they live, and prove how good that is.

    A method's makespan is compared with a proven bound, its balance with that of the placement
    before: PREVIOUS, or without it the one that engines start with.
    """
    require_writable(json, None, plot)
    require_folders(out)
    methods = method or ["search"]
    if len(methods) > 1 and (out is not None or plot is not None):
        raise typer.BadParameter("--out and --plot are for one --method")
    if model is not None and previous is None:
        raise typer.BadParameter("--model is for moves: give --previous")
    written = None if out is None else format_to_write(out, to)
    fabric, over = links_of(links, gpus, nodes), _over_windows(over_windows)

    load, layers = _windows(loads, draft_layers, windows)
    mean = load.mean(axis=0)
    served = None
    if previous is not None:
        served = read_placement(
            previous,
            num_gpus=gpus,
            num_experts=mean.shape[1],
            dense_layers=dense_layers,
            draft_layers=draft_layers,
            allow_missing=True,
        )
        served = served if served.layered else _with_layer_axis(served)
    per_gpu = _slots_per_gpu(mean.shape[1], gpus, redundant, slots, served)
    moving = None
    if served is not None and model is not None:
        size = expert_bytes(model_shape(model), bytes_per_weight)
        batches = _batches_to_time(mean, tokens_per_batch, top_k, objective)
        moving = _Moving(served, size, fabric, layers_at_once, batches)

    rows = []
    with progress_bar(quiet, "placing") as progress:
        for name in methods:
            described = {"tokens_per_batch": tokens_per_batch, "objective": objective}
            if moving is not None and None not in (tokens_per_batch, objective):
                # What a step saves uses them, whatever the method does.
                takes = resolve_placer(name).traits.takes
                described = {key: value for key, value in described.items() if key in takes}
            began = time.perf_counter()
            plan = solve_placement(
                load,
                num_gpus=gpus,
                slots_per_gpu=per_gpu,
                num_nodes=nodes,
                num_groups=groups,
                previous=served,
                max_moves=max_moves,
                method=name,
                distinct=distinct,
                split=split,
                over_windows=over,
                top_k=top_k,
                stop=None if time_limit is None else TimeLimit(time_limit),
                threads=threads or cores(),
                **described,  # type: ignore[arg-type]  # each value is of its key
            )
            row = ComparedPlan(name, plan, time.perf_counter() - began)
            rows.append(row if moving is None else moving.added_to(row))
            if progress is not None:
                progress(len(rows), len(methods))

    comparison = PlacementComparison(
        str(loads),
        layers,
        mean,
        "experts in turn" if previous is None else previous.name,
        rows[0].plan.before or _first_metrics(mean, rows[0].plan.placement),
        tuple(rows),
    )
    if not quiet and json != "-":
        print_comparison(comparison)
    write_text(json, comparison.to_json() + "\n")
    if plot is not None:
        plot_comparison(comparison, plot)
    if out is not None and written is not None:
        placement = rows[0].plan.placement
        numbers = _numbers_to_write(written, placement, first_layer, layers)
        write_placement(placement, out, format=written, layer_ids=numbers)


app.command(epilog=replay.EPILOG)(replay.replay)
app.command(epilog=advise.EPILOG)(advise.advise)
app.command(epilog=sweep.EPILOG)(sweep.sweep)


@app.command(
    epilog="Examples:\n\n"
    "  eplb-opt route placement.npy tokens.npy\n\n"
    "  eplb-opt route map.json tokens.csv --gpus 8 --method metro --out routing.npz"
)
def route(
    placement: Annotated[
        Path,
        typer.Argument(
            metavar="PLACEMENT",
            help="The placement: slots or a mask (.npy, .npz), a physical-to-logical map (.json,"
            " .npz) or vLLM-Ascend's expert map (.json).",
        ),
    ],
    tokens: Annotated[
        Path,
        typer.Argument(
            metavar="TOKENS",
            help="The batches: counts per step, layer and expert (.json, .pt, .npy, .npz, .csv, a"
            " folder) or top-k ids (.npz). Dense layers, without any token, are left out if need"
            " be.",
        ),
    ],
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default="as the file says",
            help="GPUs; a physical-to-logical map does not tell.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default="all",
            help="Tokens of a batch, where TOKENS holds top-k ids; rules that need the ids get them"
            " cut into equal local batches, one per GPU.",
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            help="The routing method; see eplb-opt presets.",
            rich_help_panel="Methods",
        ),
    ] = "optimal",
    objective: _ObjectiveOption = "activations",
    threads: ThreadsOption = None,
    time_limit: _TimeLimitOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            show_default=False,
            help="Write tokens (by step, layer, GPU and slot), activated, makespan, bound, status,"
            " proved_by and certificate.",
        ),
    ] = None,
) -> None:
    """Route recorded batches on a placement, and prove how good the routing is."""
    require_folders(out)
    require_suffix(out, ".npz")
    minimised = Objective.of(objective)
    needs = resolve_method(method, minimised).traits.needs
    onto = read_placement(placement, num_gpus=gpus)
    trace = read_trace(tokens, num_experts=onto.num_experts)
    if needs and isinstance(trace, LoadTrace):
        raise InvalidTokensError(
            f"{method} needs {needs[0]}, and {tokens} holds counts: give TOKENS as top-k ids"
        )
    demand, ids = _demand(trace, onto, batch)
    routing = solve_routing(
        onto,
        demand,
        objective=minimised,
        method=method,
        topk_ids=ids if needs else None,
        stop=None if time_limit is None else TimeLimit(time_limit),
        threads=threads or cores(),
    )
    print_routing(routing, method)
    if out is not None:
        np.savez_compressed(
            out,
            tokens=routing.tokens,
            activated=routing.activated,
            makespan=routing.makespan,
            bound=routing.bound,
            status=routing.status,
            proved_by=routing.proved_by,
            certificate=routing.certificate,
        )


@app.command(
    epilog="What a file holds is decided by the names in it (.json, .npz, .pt) or its suffix (.yaml"
    " holds a placement, .csv traffic; so does a folder: a recording, SGLang's dumps or"
    " TensorRT-LLM's statistics). A bare .npy is a placement if it is boolean, or if its integers"
    " can be the slots of a placement: every expert occurs, seldom twice on a GPU. --as overrules"
    " that."
    "\n\nExample:\n\n  eplb-opt validate expert_map.json"
)
def validate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A placement, or recorded traffic.")],
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default="as the file says",
            help="GPUs of a placement; a physical-to-logical map does not tell.",
        ),
    ] = None,
    kind: Annotated[
        _Kind | None,
        typer.Option("--as", show_default="by content", help="What the file holds."),
    ] = None,
    form: _FormatOption = None,
    dense_layers: _DenseLayersOption = 0,
    draft_layers: _DraftLayersOption = 0,
) -> None:
    """Check a file: what it holds, whether it is valid, and what is odd about it."""
    if kind is None and form is not None:
        kind = _Kind.placement
    found = kind or (_Kind.placement if holds_placement(file) else _Kind.trace)
    if kind is None and found is _Kind.trace and file.suffix.lower() == ".npy":
        say("note", "no placement was recognised in it; --as placement insists")
    if found is _Kind.placement:
        placement = read_placement(
            file,
            num_gpus=gpus,
            format=form,
            dense_layers=dense_layers,
            draft_layers=draft_layers,
        )
        print_placement(placement, f"{file}: a valid placement")
    else:
        print_trace(read_trace(file), f"{file}: a valid trace")


@app.command(
    epilog="Formats: slots, mask and device-mask are .npz or .npy; sglang is .json or .pt; vllm and"
    " vllm-ascend are .json; trtllm is .yaml. A placement with dense layers in it (sglang) becomes"
    " one without by --dense-layers, and the other way round by --first-layer. Traffic becomes a"
    " recording, a folder of safetensors files that is quick to open.\n\nExamples:\n\n"
    "  eplb-opt convert expert_map.json balancer.yaml --first-layer 3\n\n"
    "  eplb-opt convert map.json expert_map.json --gpus 32 --dense-layers 3 --to vllm-ascend\n\n"
    "  eplb-opt convert sglang_dumps/ decode.trace"
)
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A placement, or recorded traffic.")],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="The file to write; for traffic, the folder of a new recording."
        ),
    ],
    to: _ToOption = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default="as the file says",
            help="GPUs; where slots are listed GPU after GPU the file does not tell.",
        ),
    ] = None,
    form: _FormatOption = None,
    dense_layers: _DenseLayersOption = 0,
    draft_layers: _DraftLayersOption = 0,
    first_layer: _FirstLayerOption = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default=False,
            help="Tokens of a step, where FILE holds the top-k ids of traffic.",
        ),
    ] = None,
) -> None:
    """Write a placement in another format, or traffic as a recording."""
    require_folders(out)
    is_file = out.suffix.lower() in PLACEMENT_SUFFIXES  # a recording is a folder
    if not (is_file or form or to or holds_placement(file)):
        if gpus or dense_layers or draft_layers or first_layer is not None:
            raise typer.BadParameter(
                f"{file} holds traffic: of the options, --batch alone is for it"
            )
        _convert_trace(file, out, batch)
        return
    if batch is not None:
        raise typer.BadParameter("--batch is for traffic, whose recording is a folder")
    written = format_to_write(out, to)
    placement = read_placement(
        file, num_gpus=gpus, format=form, dense_layers=dense_layers, draft_layers=draft_layers
    )
    numbers = _numbers_to_write(written, placement, first_layer)
    write_placement(placement, out, format=written, layer_ids=numbers)
    print_placement(placement, f"{out}: written as {written.value}")


def _convert_trace(file: Path, out: Path, batch: int | None) -> None:
    trace = read_trace(file)
    if isinstance(trace, TokenTrace):
        if batch is None:
            raise typer.BadParameter(f"{file} holds top-k ids: give --batch, the tokens of a step")
        trace = trace.counted(batch)
    elif batch is not None:
        raise typer.BadParameter(f"--batch is for top-k ids; {file} holds counts")
    write_trace(trace, out)
    print_trace(trace, f"{out}: written as a recording")


@app.command(epilog="Example:\n\n  eplb-opt gap --model kimi-k2 --method metro:order=random,seed=3")
def presets() -> None:
    """List the models, objectives, routing methods and placement methods."""
    print_presets()


gpu = typer.Typer(help="The CUDA kernels; needs the extra gpu.", no_args_is_help=True)
app.add_typer(gpu, name="gpu")


@gpu.callback()
def _gpu() -> None:
    """Make `compile` a command by name, as others to come."""


@gpu.command(
    "compile",
    epilog="Example:\n\n  eplb-opt gpu compile --arch sm_90 --cache kernels\n\n"
    "A machine finds them by EPLB_OPT_CACHE=kernels.",
)
def compile_kernels(
    arch: Annotated[
        str, typer.Option(metavar="ARCH,ARCH,...", help="GPU architectures, sm_80 or newer.")
    ] = ",".join(ARCHITECTURES),
    cache: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            show_default="EPLB_OPT_CACHE, or ~/.cache/eplb-opt",
            help="Folder to keep them in.",
        ),
    ] = None,
) -> None:
    """Compile the CUDA kernels ahead of time, without a GPU, and say what each takes of one."""
    found = [
        u for a in arch.split(",") for file in kernel_files() for u in usage(file, a.strip(), cache)
    ]
    print_kernels(found)
    spilling = [f"{u.kernel} for {u.arch}" for u in found if u.spilled_bytes]
    if spilling:
        raise EplbError(f"registers find no room in {', '.join(spilling)}")


# What the commands read


def _deployments(
    gpus: str, replication: str | None, redundant: str | None
) -> tuple[list[int], list[float], list[int] | None]:
    """Read the options that say which deployments to try."""
    if replication is not None and redundant is not None:
        raise typer.BadParameter("give one of --replication and --redundant")
    ratios = numbers_of("--replication", replication or "1.125,1.25,1.5", float, least=1)
    extra = None if redundant is None else numbers_of("--redundant", redundant, int, least=0)
    return numbers_of("--gpus", gpus, int, least=1), ratios, extra


def _synthetic(model: str | None, stage: _Stage | None, seed: int) -> tuple[str, Workload]:
    """Return the synthetic traffic that the options ask for, and its name."""
    shape = model_shape(model or "deepseek-v3")
    drawn: Stage = "prefill" if stage is _Stage.prefill else "decode"
    name = f"{shape.name} {drawn}, synthetic"
    return name, Workload.preset(shape.name, drawn, seed=seed)


def _demand(
    trace: LoadTrace | TokenTrace, placement: Placement, batch: int | None
) -> tuple[NDArray[np.integer], NDArray[np.int32] | None]:
    """Return the batches of a trace for a placement, with a layer axis if that has one.

    Tokens are int [steps, layers, experts], and ids, if the trace has them, int32 [steps, layers,
    gpus, rows, k].
    """
    counts: NDArray[np.integer]
    if isinstance(trace, LoadTrace):
        counts, ids = np.asarray(trace.tokens), None
    else:
        whole = trace.batches(trace.num_tokens if batch is None else batch)
        counts = count_tokens(whole, placement.num_experts)
        ids = local_batches(whole, placement.num_gpus)
    if counts.shape[1] != placement.num_layers:
        served = np.flatnonzero(counts.any(axis=(0, 2)))
        if served.size == placement.num_layers:
            dense = counts.shape[1] - served.size
            say("note", f"left out {many(dense, 'layer')} without any token")
            counts = counts[:, served]
            ids = None if ids is None else ids[:, served]
    if counts.shape[1] != placement.num_layers:
        raise InvalidTokensError(
            f"the traffic has {many(counts.shape[1], 'layer')}, "
            f"the placement {placement.num_layers}"
        )
    if placement.layered:
        return counts, ids
    return counts[:, 0], None if ids is None else ids[:, 0]


def _windows(
    path: Path, draft_layers: int, count: int
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Read loads, float64 [windows, MoE layers, experts], and the layers' numbers in the file."""
    trace = read_trace(path)
    load, layers = moe_layers(trace.load(), draft_layers)
    if count == 1:
        return load[None], layers
    steps = trace.num_steps if isinstance(trace, LoadTrace) else trace.num_tokens
    if count > steps:
        raise InvalidTokensError(f"{path}: {count} windows of {steps} steps or tokens")
    if isinstance(trace, LoadTrace):
        starts = np.arange(count) * steps // count
        counts = trace.select_layers(layers).tokens
        return np.add.reduceat(counts, starts, axis=0, dtype=np.float64), layers
    cut = trace.batches(steps // count, steps=count)[:, layers]
    return count_tokens(cut, trace.num_experts).astype(np.float64), layers


def _slots_per_gpu(
    experts: int, gpus: int, redundant: int | None, slots: int | None, served: Placement | None
) -> int:
    """Return the slots that the options ask for, or that the placement before has."""
    if redundant is not None and slots is not None:
        raise typer.BadParameter("give one of --redundant and --slots")
    if redundant is not None:
        return slots_for(experts + redundant, gpus)
    if slots is not None:
        return slots
    if served is not None:
        return served.slots_per_gpu
    raise typer.BadParameter("give --redundant or --slots")


def _with_layer_axis(placement: Placement) -> Placement:
    return Placement(placement.slots[None], placement.num_experts, allow_missing=True)


def _over_windows(text: str) -> str | float:
    if text in ("mean", "worst"):
        return text
    return numbers_of("--over-windows", text, float, least=0)[0]


def _batches_to_time(
    load: NDArray[np.float64], tokens: int | None, top_k: int, objective: str | None
) -> tuple[NDArray[np.int64], Objective] | None:
    """Return batches like those to come, int64 [batches, layers, experts], and their time."""
    if tokens is None or objective is None:
        return None
    timed = Objective.of(objective)
    if timed.counts_activations or timed.counts_tokens:
        say("note", f"no break-even steps: {objective} is not in microseconds")
        return None
    drawn = Workload.from_load(load, top_k).draw(tokens, _BATCHES_TO_TIME)
    return count_tokens(drawn, load.shape[1]), timed


@dataclass(frozen=True, slots=True)
class _Moving:
    """What moves from the placement that is served now are planned with."""

    served: Placement
    expert_bytes: int
    links: Links
    layers_at_once: int
    batches: tuple[NDArray[np.int64], Objective] | None

    def added_to(self, row: ComparedPlan) -> ComparedPlan:
        """Return a method's answer with the moves to it, and what a step then saves."""
        placement = row.plan.placement
        transfer = plan_transfer(
            self.served,
            placement,
            self.expert_bytes,
            links=self.links,
            layers_at_once=self.layers_at_once,
        )
        if self.batches is None:
            return replace(row, transfer=transfer)
        routes = "tokens_per_batch" in resolve_placer(row.method).traits.takes
        exact = routes or row.plan.measure.split is Split.FREE
        router = "makespan" if exact else "uniform"
        saved = saving_per_step(self.served, placement, *self.batches, method=router)
        return replace(row, transfer=transfer, saved=saved)


def _first_metrics(load: NDArray[np.float64], placement: Placement) -> PlacementMetrics:
    """Measure the placement that engines start with, of the same shape."""
    first = first_placement(*placement.slots.shape, num_experts=placement.num_experts)
    return PlacementMetrics.of(Placement(first, placement.num_experts), load)


# What the commands write


def _show_version() -> None:
    typer.echo(f"eplb-opt {version('eplb-opt')}")
    raise typer.Exit


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=UserWarning, module="eplb_opt")
        warnings.showwarning = lambda message, *_, **__: say("warning", message)
        yield


def _numbers_to_write(
    written: PlacementFormat,
    placement: Placement,
    first_layer: int | None,
    recorded: NDArray[np.intp] | None = None,
) -> Sequence[int] | None:
    """Return the layers' numbers for a file: as told, or as recorded beside dense layers."""
    if first_layer is not None:
        return range(first_layer, first_layer + placement.num_layers)
    if written not in NUMBERED:
        return None
    if recorded is not None and recorded[-1] >= recorded.size:
        return [int(number) for number in recorded]
    say("note", f"{written.value} numbers layers; from 0 here, see --first-layer")
    return None


def _require_one_traffic(file: Path | None, model: str | None, stage: _Stage | None) -> None:
    if file is not None and (model is not None or stage is not None):
        raise typer.BadParameter("--model and --stage are for synthetic traffic: leave FILE out")
