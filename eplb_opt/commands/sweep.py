"""``eplb-opt sweep``: many deployments and routers on recorded traffic, resumed where it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from eplb_opt.commands.options import (
    BatchTokensOption,
    BytesPerWeightOption,
    CsvOption,
    ExchangeOption,
    JsonOption,
    LatencyOption,
    LinksOption,
    ModelNameOption,
    MostDecodeOption,
    OverlapOption,
    PrefillRestOption,
    Pricing,
    QuietOption,
    RestOption,
    RouterTimeOption,
    StepsOption,
    TimedObjectiveOption,
    TopKOption,
    TraceArgument,
    numbers_of,
    progress_bar,
    require_writable,
    write_text,
)
from eplb_opt.heat import HeatStage
from eplb_opt.memory import WeightFormat
from eplb_opt.plots import plot_sweep
from eplb_opt.report import print_sweep
from eplb_opt.sweeping import sweep as sweep_deployments
from eplb_opt.workers import Backend

__all__ = ["EPILOG", "sweep"]

EPILOG = (
    "Examples:\n\n"
    "  eplb-opt sweep decode.trace --gpus 8,16 --redundant 0,32 --placer none,deepseek,search"
    " --folder results --plot pareto.svg\n\n"
    "  eplb-opt sweep decode.trace --gpus 16 --redundant 16,32,64 --placer search --interval"
    " none,500,2000 --model deepseek-v3 --folder results --backend dask --address"
    " tcp://10.0.0.1:8786"
)

_METHODS = ("uniform", "metro", "makespan")
_NONE = "none"
_PLACERS = (_NONE, "deepseek")


def sweep(
    trace: TraceArgument,
    gpus: Annotated[
        str, typer.Option(metavar="N,N,...", help="EP sizes.", rich_help_panel="Deployments")
    ],
    folder: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="Where results are stored, a Parquet file for each deployment; what is there"
            " already is not computed again.",
            rich_help_panel="Output",
        ),
    ],
    redundant: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="Slots beyond one per expert.",
            rich_help_panel="Deployments",
        ),
    ] = "0",
    placer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...|NAME:OPTION=VALUE,...",
            show_default="none,deepseek",
            help="Placement methods, see eplb-opt presets, and none: experts in order. Repeat for"
            " more; one with options stands alone.",
            rich_help_panel="Deployments",
        ),
    ] = None,
    collect: Annotated[
        str,
        typer.Option(
            metavar="all,decode,prefill",
            help="Which steps' load placements are made for.",
            rich_help_panel="Deployments",
        ),
    ] = "all",
    interval: Annotated[
        str,
        typer.Option(
            metavar="STEPS|none,...",
            help="Place anew every so many steps, on the load of as many; none: once.",
            rich_help_panel="Deployments",
        ),
    ] = _NONE,
    gpus_per_node: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="GPUs of a node.", rich_help_panel="Deployments"),
    ] = 8,
    learn: Annotated[
        float,
        typer.Option(
            min=0,
            max=0.99,
            metavar="SHARE",
            help="Share of the steps that are collected first, and not served.",
            rich_help_panel="Deployments",
        ),
    ] = 0.25,
    tokens: BatchTokensOption = 256,
    top_k: TopKOption = 8,
    steps: StepsOption = None,
    most_decode_tokens: MostDecodeOption = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            show_default="uniform, metro, makespan",
            help="A routing method, see eplb-opt presets; repeat for more.",
            rich_help_panel="Methods",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default="all cores",
            help="Deployments at a time.",
            rich_help_panel="Workers",
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            metavar="loky|dask|ray",
            help="Who works: processes of this machine, or a cluster, one of this machine where no"
            " address is given.",
            rich_help_panel="Workers",
        ),
    ] = "loky",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            show_default=False,
            help="Of the cluster; TRACE must be there on all its machines.",
            rich_help_panel="Workers",
        ),
    ] = None,
    objective: TimedObjectiveOption = "deepseek-v3-fp8",
    model: ModelNameOption = None,
    bytes_per_weight: BytesPerWeightOption = 1.0,
    exchange: ExchangeOption = "all-to-all",
    latency: LatencyOption = 0.0,
    links: LinksOption = "450,50",
    rest: RestOption = "0,0",
    prefill_rest: PrefillRestOption = None,
    router_time: RouterTimeOption = None,
    overlap: OverlapOption = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Remove what FOLDER holds of another sweep; else it is refused.",
            rich_help_panel="Output",
        ),
    ] = False,
    json: JsonOption = None,
    csv: CsvOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Draw memory against time, and activated replicas: .pdf, .svg or .png.",
            rich_help_panel="Output",
        ),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Replay recorded steps on many deployments, each with several routers, and compare.

    Every combination of GPUs, redundant slots, placers, collected stages and intervals is a
    deployment. A sweep that ended early goes on where it was when it is called again.
    """
    require_writable(json, csv, plot)
    pricing = Pricing(
        objective,
        model,
        bytes_per_weight,
        exchange,
        latency,
        links,
        rest,
        prefill_rest,
        router_time or (),
        overlap,
    )
    time, migration = pricing.of(gpus_per_node, 1)
    with progress_bar(quiet, "sweeping") as progress:
        found = sweep_deployments(
            trace,
            gpus=numbers_of("--gpus", gpus, int, least=1),
            redundant=numbers_of("--redundant", redundant, int, least=0),
            placers=[_placer(name) for part in placer or _PLACERS for name in _names(part)],
            stages=cast("list[HeatStage]", collect.split(",")),
            intervals=[
                None if text == _NONE else numbers_of("--interval", text, int, least=1)[0]
                for text in interval.split(",")
            ],
            methods=method or _METHODS,
            time=time,
            folder=folder,
            learn=learn,
            migration=migration,
            model=model,
            weights=WeightFormat(round(8 * bytes_per_weight)),
            steps=steps,
            tokens=tokens,
            top_k=top_k,
            most_decode_tokens=most_decode_tokens,
            backend=cast(Backend, backend),
            jobs=jobs,
            address=address,
            replace=replace,
            progress=progress,
        )
    if not quiet and "-" not in (json, csv):
        print_sweep(found)
    write_text(json, found.to_json() + "\n")
    write_text(csv, found.to_csv())
    if plot is not None:
        plot_sweep(found, plot)


def _names(text: str) -> list[str]:
    """Cut names apart, but for one with options, which have commas too."""
    return [text] if ":" in text else text.split(",")


def _placer(name: str) -> str | None:
    return None if name == _NONE else name
