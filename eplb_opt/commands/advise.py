"""``eplb-opt advise``: yes or no to EPLB for recorded traffic, with which settings, and why."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from eplb_opt.advising import advise as advise_on
from eplb_opt.commands.options import (
    BatchTokensOption,
    BytesPerWeightOption,
    ExchangeOption,
    JsonOption,
    LatencyOption,
    LinksOption,
    ModelNameOption,
    MostDecodeOption,
    NodesOption,
    OverlapOption,
    PrefillRestOption,
    Pricing,
    QuietOption,
    RestOption,
    RouterTimeOption,
    StepsOption,
    ThreadsOption,
    TimedObjectiveOption,
    TopKOption,
    TraceArgument,
    cores,
    numbers_of,
    progress_bar,
    require_folders,
    write_text,
)
from eplb_opt.heat import HeatStage
from eplb_opt.memory import WeightFormat
from eplb_opt.report import print_advice

__all__ = ["EPILOG", "advise"]

EPILOG = (
    "Examples:\n\n"
    "  eplb-opt advise decode.trace --gpus 16 --model deepseek-v3 --rest 9000,5\n\n"
    "  eplb-opt advise mixed.trace --gpus 32 --target prefill --redundant 0,32 --interval 0,500"
    " --method uniform --min-gain 2\n\n"
    "  eplb-opt advise decode.json --gpus 16 --tokens 512"
)


def advise(
    trace: TraceArgument,
    gpus: Annotated[
        int, typer.Option(min=1, metavar="N", help="GPUs.", rich_help_panel="Deployment")
    ],
    nodes: NodesOption = 1,
    redundant: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            show_default="none, one and two for each GPU",
            help="Slots beyond one per expert to try.",
            rich_help_panel="Candidates",
        ),
    ] = None,
    placer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            show_default="deepseek, search",
            help="A placement method to try, see eplb-opt presets; repeat for more.",
            rich_help_panel="Candidates",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            show_default="uniform, metro, makespan",
            help="A routing method to try beside uniform, see eplb-opt presets; repeat for more.",
            rich_help_panel="Candidates",
        ),
    ] = None,
    interval: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS,STEPS,...",
            show_default="0, a fourth and a sixteenth of the served steps",
            help="How often to place anew; 0: once.",
            rich_help_panel="Candidates",
        ),
    ] = None,
    collect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="all|decode|prefill",
            show_default="all, and each where both are recorded",
            help="Which steps' load placements are made for; repeat for more.",
            rich_help_panel="Candidates",
        ),
    ] = None,
    learn: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=0.9,
            metavar="SHARE",
            help="Share of the steps that experts are placed by first, and that are not served.",
            rich_help_panel="Traffic",
        ),
    ] = 0.25,
    tokens: BatchTokensOption = 256,
    top_k: TopKOption = 8,
    steps: StepsOption = None,
    most_decode_tokens: MostDecodeOption = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="all|decode|prefill",
            show_default="decode where there is any",
            help="Whose mean step time is to fall.",
            rich_help_panel="Answer",
        ),
    ] = None,
    min_gain: Annotated[
        float,
        typer.Option(
            min=0,
            max=100,
            metavar="PERCENT",
            help="The least gain that is worth it.",
            rich_help_panel="Answer",
        ),
    ] = 1.0,
    slo: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="MILLISECONDS",
            show_default=False,
            help="Say how many decode steps take no longer.",
            rich_help_panel="Answer",
        ),
    ] = None,
    prefill_slo: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="MILLISECONDS",
            show_default=False,
            help="The same of prefill steps.",
            rich_help_panel="Answer",
        ),
    ] = None,
    threads: ThreadsOption = None,
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
    json: JsonOption = None,
    quiet: QuietOption = False,
) -> None:
    """Say whether EPLB pays for recorded traffic: yes or no, with what, by how much, and why.

    Experts are placed by the first steps, deployments are compared on the next, and the best is
    judged on the last against the same steps without EPLB.
    """
    require_folders(None if json == "-" else json)
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
    time, migration = pricing.of(gpus, nodes)
    slots = None if redundant is None else numbers_of("--redundant", redundant, int, least=0)
    cycles = None if interval is None else numbers_of("--interval", interval, int, least=0)
    with progress_bar(quiet, "replaying") as progress:
        advice = advise_on(
            trace,
            num_gpus=gpus,
            time=time,
            redundant=slots,
            placers=placer or ("deepseek", "search"),
            methods=method or ("uniform", "metro", "makespan"),
            intervals=None if cycles is None else [cycle or None for cycle in cycles],
            stages=None if collect is None else cast(list[HeatStage], collect),
            target=cast("HeatStage | None", target),
            learn=learn,
            min_gain=min_gain / 100,
            model=model,
            weights=WeightFormat(round(8 * bytes_per_weight)),
            migration=migration,
            slo=slo,
            prefill_slo=prefill_slo,
            num_nodes=nodes,
            steps=steps,
            tokens=tokens,
            top_k=top_k,
            most_decode_tokens=most_decode_tokens,
            threads=threads or cores(),
            progress=progress,
        )
    if not quiet and json != "-":
        print_advice(advice)
    write_text(json, advice.to_json() + "\n")
