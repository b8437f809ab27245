"""``eplb-opt replay``: what recorded traffic takes on a deployment, as its placement is kept up."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from eplb_opt.batches import Batches, BatchFacts
from eplb_opt.commands.options import (
    BatchTokensOption,
    BytesPerWeightOption,
    CsvOption,
    ExchangeOption,
    GathersOption,
    GroupsOption,
    JsonOption,
    LatencyOption,
    LinksOption,
    ModelNameOption,
    MostDecodeOption,
    MoveShareOption,
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
    WireBytesOption,
    cores,
    progress_bar,
    require_writable,
    say,
    write_text,
)
from eplb_opt.errors import FormatError
from eplb_opt.formats.placements import read_placement
from eplb_opt.gap import as_json, csv_of
from eplb_opt.heat import HeatStage
from eplb_opt.loop import BreakEven, EplbLoop, Worth
from eplb_opt.placement import Placement
from eplb_opt.plots import plot_replay
from eplb_opt.replaying import Stale
from eplb_opt.replaying import replay as replay_steps
from eplb_opt.report import print_replay
from eplb_opt.scenario import Scenario
from eplb_opt.settings import AscendEplb, Deployment, SglangEplb, VllmEplb
from eplb_opt.step_time import Migration, StepTime

__all__ = ["EPILOG", "replay"]

EPILOG = (
    "Examples:\n\n"
    "  eplb-opt replay decode.trace --gpus 16 --redundant 64 --placer search --method uniform"
    " --method makespan\n\n"
    "  eplb-opt replay decode.trace --gpus 16 --redundant 16 --placer deepseek --interval 1000"
    " --model deepseek-v3 --rest 9000,5 --slo 50\n\n"
    "  eplb-opt replay decode.trace --gpus 16 --settings eplb_config.json --engine vllm-ascend"
)

_ENGINES: Mapping[str, Any] = {"vllm-ascend": AscendEplb, "vllm": VllmEplb, "sglang": SglangEplb}
_ALLOWED = {"DYNAMIC_EPLB": "true"}  # on the machine that serves, or else nothing would be
_METHODS = ("uniform", "metro", "makespan")


def replay(
    trace: TraceArgument,
    gpus: Annotated[
        int, typer.Option(min=1, metavar="N", help="GPUs.", rich_help_panel="Deployment")
    ],
    redundant: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Slots beyond one per expert.",
            rich_help_panel="Deployment",
        ),
    ] = 0,
    nodes: NodesOption = 1,
    groups: GroupsOption = 1,
    placer: Annotated[
        str,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]|none",
            help="The placement method, see eplb-opt presets; none: experts in order.",
            rich_help_panel="Deployment",
        ),
    ] = "none",
    collect: Annotated[
        str,
        typer.Option(
            metavar="all|decode|prefill",
            help="Which steps' load placements are made for.",
            rich_help_panel="Deployment",
        ),
    ] = "all",
    learn: Annotated[
        float,
        typer.Option(
            min=0,
            max=0.99,
            metavar="SHARE",
            help="Share of the steps that are collected first, and not served; 0 with --placement"
            " or --settings.",
            rich_help_panel="Deployment",
        ),
    ] = 0.25,
    interval: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            show_default="placed once",
            help="Place anew every so many steps, on the load of as many; a quarter to the first.",
            rich_help_panel="Deployment",
        ),
    ] = None,
    min_gain: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            show_default="any",
            help="With --interval: change nothing unless the peaks fall by so much.",
            rich_help_panel="Deployment",
        ),
    ] = None,
    max_moves: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            show_default="any number",
            help="With --interval: the most weights that move at a time, over all layers.",
            rich_help_panel="Deployment",
        ),
    ] = None,
    break_even: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            show_default="any number",
            help="With --interval: change nothing that is not repaid in so many steps.",
            rich_help_panel="Deployment",
        ),
    ] = None,
    placement: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Serve on this placement instead, as for validate.",
            rich_help_panel="Deployment",
        ),
    ] = None,
    dense_layers: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Layers without experts at the start of --placement, or of the map in --settings;"
            " left out.",
            rich_help_panel="Deployment",
        ),
    ] = 0,
    settings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            show_default=False,
            help="The settings of --engine as a JSON object: start as it does, and keep its cycle.",
            rich_help_panel="Deployment",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(_ENGINES),
            show_default=False,
            help="Whose settings these are.",
            rich_help_panel="Deployment",
        ),
    ] = None,
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
    stale: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            show_default=False,
            help="One that routes by a table for the last --window steps; repeat for more.",
            rich_help_panel="Methods",
        ),
    ] = None,
    window: Annotated[
        int,
        typer.Option(
            min=1, metavar="STEPS", help="Steps that a table is for.", rich_help_panel="Methods"
        ),
    ] = 100,
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
    gathers: GathersOption = None,
    wire_bytes: WireBytesOption = "2,2",
    overlap: OverlapOption = False,
    move_share: MoveShareOption = 1.0,
    slo: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="MILLISECONDS",
            show_default=False,
            help="Say how many decode steps take no longer.",
            rich_help_panel="Output",
        ),
    ] = None,
    prefill_slo: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="MILLISECONDS",
            show_default=False,
            help="The same of prefill steps.",
            rich_help_panel="Output",
        ),
    ] = None,
    json: JsonOption = None,
    csv: CsvOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Draw the time of steps: .pdf, .svg or .png.",
            rich_help_panel="Output",
        ),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Serve recorded steps, routed by several methods, and say what a step takes.

    Experts are placed once, on the steps that are collected first, and all methods are compared on
    that placement. With --interval or --settings they are compared again with updates on. Steps
    after the collected ones are served in both cases.
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
        gathers or (),
        wire_bytes,
        move_share,
    )
    time, migration = pricing.of(gpus, nodes)
    if model is None:
        say("note", "tokens and weights move in no time here; --model says whose they are")
    asked = Scenario(
        gpus,
        redundant,
        None if placer == "none" else placer,
        cast(HeatStage, collect),
        interval,
        num_nodes=nodes,
        num_groups=groups,
        worth=_worth(min_gain, max_moves, break_even, time, migration),
    )
    if interval is None and asked.worth != Worth():
        raise typer.BadParameter("--min-gain, --max-moves and --break-even are for --interval")
    chosen = _Served(asked, placement, settings, engine, dense_layers)
    labels = [*(method or _METHODS), *(Stale(name, window).label for name in stale or ())]
    for label in (*time.routers, *time.exchanges):
        if label not in labels:
            known = ", ".join(labels)
            raise typer.BadParameter(f"{label!r} is not replayed; those that are: {known}")
    batches = Batches.of(trace, tokens=tokens, steps=steps, top_k=top_k)
    if batches.top_k is None:
        say("note", f"the trace does not tell the experts per token; {top_k}, see --top-k")
    facts = BatchFacts(batches, top_k, most_decode_tokens)
    first = int(batches.steps * learn) if chosen.learns else 0
    methods = [*(method or _METHODS), *(Stale(name, window) for name in stale or ())]
    with progress_bar(quiet) as progress:
        replays = [
            replay_steps(
                facts,
                served,
                methods,
                time=time,
                migration=migration,
                first_step=first,
                slo=slo,
                prefill_slo=prefill_slo,
                threads=threads or cores(),
                progress=progress,
            )
            for served in chosen.of(facts, first)
        ]
    if not quiet and "-" not in (json, csv):
        print_replay(replays)
    figures = [replay.figures() for replay in replays]
    write_text(json, as_json({"replays": figures}) + "\n")
    rows = [
        {"decisions": len(replay.decisions), "moves": replay.moves, **row.flat()}
        for replay in replays
        for row in replay.rows
    ]
    write_text(csv, csv_of(list(rows[0]), rows))
    if plot is not None:
        plot_replay(replays, plot)


@dataclass(frozen=True, slots=True)
class _Served:
    """What the options of the panel Deployment say is served."""

    scenario: Scenario
    placement: Path | None
    settings: Path | None
    engine: str | None
    dense_layers: int

    def __post_init__(self) -> None:
        """Refuse options that do not go together."""
        if self.placement is not None and self.settings is not None:
            raise typer.BadParameter("give one of --placement and --settings")
        if (self.settings is None) != (self.engine is None):
            raise typer.BadParameter("--settings and --engine go together")
        if self.engine is not None and self.engine not in _ENGINES:
            known = ", ".join(_ENGINES)
            raise typer.BadParameter(f"no engine is called {self.engine!r}; known: {known}")
        if self.scenario.interval is not None and self.scenario.placer is None:
            raise typer.BadParameter("--interval needs a --placer")
        if self.settings is not None and self.scenario.placer is not None:
            raise typer.BadParameter("--settings say who places; leave --placer out")
        if not self.learns and self.scenario.redundant:
            raise typer.BadParameter("--placement and --settings say how many are redundant")
        if self.settings is not None and self.scenario.stage != "all":
            raise typer.BadParameter("--settings say what is collected; leave --collect out")

    @property
    def learns(self) -> bool:
        """Whether the first steps are collected before any is served."""
        return self.placement is None and self.settings is None

    def of(self, facts: BatchFacts, first_step: int) -> list[Placement | EplbLoop]:
        """Return what is served: a placement that stays, and a loop that keeps it, if one does."""
        if self.settings is not None:
            loop = self._engines_loop(facts)
            return [loop.placement] if loop.heat is None else [loop.placement, loop]
        collected = facts.collect(0, first_step, self.scenario.stage)
        start = self.scenario.start(collected) if self.placement is None else self._read(facts)
        if self.scenario.interval is None:
            return [start]
        return [start, self.scenario.loop(start, collected)]

    def _read(self, facts: BatchFacts) -> Placement:
        assert self.placement is not None
        return read_placement(
            self.placement,
            num_gpus=self.scenario.num_gpus,
            num_experts=facts.batches.load.shape[1],
            dense_layers=self.dense_layers,
        )

    def _engines_loop(self, facts: BatchFacts) -> EplbLoop:
        assert self.settings is not None
        assert self.engine is not None
        try:
            given = json_text.loads(self.settings.read_bytes())
        except ValueError as error:
            raise FormatError(self.settings, "", f"not JSON: {error}") from None
        if not isinstance(given, dict):
            raise FormatError(self.settings, "", "expected a JSON object, a setting by name")
        layers, experts = facts.batches.load.shape
        deployment = Deployment(
            layers,
            experts,
            self.scenario.num_gpus,
            self.scenario.num_nodes,
            self.scenario.num_groups,
            most_decode_tokens=facts.decode_limit,
            dense_layers=self.dense_layers,
        )
        read = _ENGINES[self.engine].of
        loop: EplbLoop = (
            read(given, _ALLOWED) if self.engine == "vllm-ascend" else read(given)
        ).loop(deployment)
        loop.record = None  # what was recorded in earnest stays
        return loop


def _worth(
    min_gain: float | None,
    max_moves: int | None,
    break_even: int | None,
    time: StepTime,
    migration: Migration | None,
) -> Worth:
    rule = None
    if break_even is not None:
        if migration is None:
            raise typer.BadParameter("--break-even needs what the moves take: give --model")
        rule = BreakEven(break_even, migration.expert_bytes, time.pricing, migration.links)
    return Worth(min_gain, max_moves=max_moves, break_even=rule)
