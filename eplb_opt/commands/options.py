"""What commands have in common: options, and how their values are read and answers written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from eplb_opt.step_time import Communication, Exchange, Line, Migration, StepTime
from eplb_opt.transfer import Links, expert_bytes
from eplb_opt.workload import model_shape

_Number = TypeVar("_Number", int, float)

ThreadsOption = Annotated[
    int | None,
    typer.Option(
        min=1, show_default="all cores", help="Threads over problems.", rich_help_panel="Methods"
    ),
]
JsonOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|-",
        show_default=False,
        help="Write the study as JSON; - for standard output, in place of the tables.",
        rich_help_panel="Output",
    ),
]
CsvOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|-",
        show_default=False,
        help="Write the rows as CSV, likewise.",
        rich_help_panel="Output",
    ),
]
QuietOption = Annotated[
    bool,
    typer.Option("--quiet", help="No tables, no progress bar.", rich_help_panel="Output"),
]
TopKOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Experts per token, where batches are drawn from counts.",
        rich_help_panel="Traffic",
    ),
]


TraceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="Recorded traffic: a recording, counts of several steps (.npy, .npz, .csv), SGLang's"
        " dumps, TensorRT-LLM's statistics, or top-k ids (.npz), cut into batches.",
    ),
]
NodesOption = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Nodes: so many runs of consecutive GPUs.",
        rich_help_panel="Deployment",
    ),
]
GroupsOption = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Groups of consecutive experts that the gate picks together.",
        rich_help_panel="Deployment",
    ),
]
BatchTokensOption = Annotated[
    int,
    typer.Option(
        "--tokens",
        min=1,
        help="Tokens of a batch over all GPUs, where batches are drawn or cut from top-k ids.",
        rich_help_panel="Traffic",
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="all; 20 where batches are drawn",
        help="Use the first steps only.",
        rich_help_panel="Traffic",
    ),
]
MostDecodeOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        show_default="as recorded; else all is decode",
        help="Steps of more scheduled tokens are prefill: max_num_seqs, over all GPUs.",
        rich_help_panel="Traffic",
    ),
]
TimedObjectiveOption = Annotated[
    str,
    typer.Option(
        "--objective",
        metavar="NAME|FILE.json",
        help="A GPU's time in microseconds, as measured on a model's kernel (see eplb-opt presets),"
        " or pieces of one's own in a file.",
        rich_help_panel="Time",
    ),
]
ModelNameOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        show_default="tokens and weights move in no time",
        help="Whose tokens and weights move; see eplb-opt presets.",
        rich_help_panel="Time",
    ),
]
BytesPerWeightOption = Annotated[
    float,
    typer.Option(
        "--bytes-per-weight", metavar="B", help="1 for fp8, 2 for bf16.", rich_help_panel="Time"
    ),
]
ExchangeOption = Annotated[
    str,
    typer.Option(
        "--exchange",
        metavar="all-to-all|all-gather",
        help="How tokens get to their experts and back; all-gather is METRO's.",
        rich_help_panel="Time",
    ),
]
LatencyOption = Annotated[
    float,
    typer.Option(
        "--latency",
        min=0,
        metavar="MICROSECONDS",
        help="Of dispatch and of combine each, whatever they carry.",
        rich_help_panel="Time",
    ),
]
LinksOption = Annotated[
    str,
    typer.Option(
        "--links",
        metavar="INSIDE,BETWEEN",
        help="GB/s that a GPU sends inside its node, and to other nodes.",
        rich_help_panel="Time",
    ),
]
RestOption = Annotated[
    str,
    typer.Option(
        "--rest",
        metavar="OFFSET,PER_TOKEN",
        help="Microseconds of a decode step without its experts (attention, dense layers), and more"
        " for each token of a GPU.",
        rich_help_panel="Time",
    ),
]
PrefillRestOption = Annotated[
    str | None,
    typer.Option(
        "--prefill-rest",
        metavar="OFFSET,PER_TOKEN",
        show_default="as --rest",
        help="The same of a prefill step.",
        rich_help_panel="Time",
    ),
]
RouterTimeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--router-time",
        metavar="METHOD=MICROSECONDS",
        show_default="0",
        help="What a router itself takes per layer; repeat for more. METRO's kernel: metro=26.",
        rich_help_panel="Time",
    ),
]
GathersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gathers",
        metavar="METHOD",
        show_default=False,
        help="A method whose tokens are all-gathered, whatever --exchange says; repeat for more.",
        rich_help_panel="Time",
    ),
]
WireBytesOption = Annotated[
    str,
    typer.Option(
        "--wire-bytes",
        metavar="DISPATCH,COMBINE",
        help="Bytes of a token's value on its way to its experts and back; 1 for fp8.",
        rich_help_panel="Time",
    ),
]
MoveShareOption = Annotated[
    float,
    typer.Option(
        "--move-share",
        min=0.001,
        max=1,
        metavar="SHARE",
        help="Of the links' bandwidth that moves of weights reach.",
        rich_help_panel="Time",
    ),
]
OverlapOption = Annotated[
    bool,
    typer.Option(
        "--overlap",
        help="Weights move beside serving, while links carry no tokens; else serving stops.",
        rich_help_panel="Time",
    ),
]


def numbers_of(option: str, text: str, kind: type[_Number], *, least: int) -> list[_Number]:
    """Read the value of an option as numbers between commas."""
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        problem = f"expected numbers between commas, not {text!r}"
        raise typer.BadParameter(problem, param_hint=option) from None
    for number in numbers:
        if not least <= number < float("inf"):
            problem = f"expected numbers from {least}, not {number}"
            raise typer.BadParameter(problem, param_hint=option)
    return numbers


def links_of(text: str, gpus: int, nodes: int) -> Links:
    """Read ``--links``: GB/s inside a node and between nodes."""
    inside, between = _two("--links", text)
    if gpus % nodes:
        raise typer.BadParameter(f"{nodes} nodes do not divide {gpus} GPUs", param_hint="--nodes")
    return Links(1e9 * inside, 1e9 * between, gpus // nodes)


def cores() -> int:
    """Return the cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def say(kind: str, message: object) -> None:
    """Write one line beside the results."""
    typer.echo(f"{kind}: {message}", err=True)


def require_writable(json: str | None, csv: str | None, plot: Path | None) -> None:
    """Refuse outputs of a study that could not be written."""
    if json == csv == "-":
        raise typer.BadParameter("only one of --json and --csv can be -")
    require_folders(json, csv, plot)
    require_suffix(plot, ".pdf", ".svg", ".png")


def require_folders(*targets: str | Path | None) -> None:
    """Refuse a file that could not be written, before the work and not after it."""
    for target in targets:
        if target is not None and not Path(target).parent.is_dir():
            raise typer.BadParameter(f"{Path(target).parent} is not a folder")


def require_suffix(target: Path | None, *suffixes: str) -> None:
    """Refuse a file whose suffix is none of these."""
    if target is not None and target.suffix not in suffixes:
        raise typer.BadParameter(f"{target} does not end in {' or '.join(suffixes)}")


def write_text(target: str | None, text: str) -> None:
    """Write an answer to a file, to standard output for ``-``, or nowhere."""
    if target == "-":
        typer.echo(text, nl=False)
    elif target is not None:
        Path(target).write_text(text, encoding="utf-8")


@contextmanager
def progress_bar(
    quiet: bool, doing: str = "routing"
) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn(doing), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@dataclass(frozen=True, slots=True)
class Pricing:
    """What a step takes, and what its moves do, as the options of the panel Time say.

    Parameters
    ----------
    objective, model, bytes_per_weight, exchange, latency, links, rest, prefill_rest, router_time, \
overlap
        The options' values.
    """

    objective: str
    model: str | None
    bytes_per_weight: float
    exchange: str
    latency: float
    links: str
    rest: str
    prefill_rest: str | None
    router_time: Sequence[str]
    overlap: bool
    gathers: Sequence[str] = ()
    wire_bytes: str = "2,2"
    move_share: float = 1.0

    def of(self, gpus: int, nodes: int) -> tuple[StepTime, Migration | None]:
        """Return both, for so many GPUs on so many nodes."""
        links = links_of(self.links, gpus, nodes)
        communication = migration = None
        if self.model is not None:
            shape = model_shape(self.model)
            exchange = cast(Exchange, self.exchange)
            moving = _two("--wire-bytes", self.wire_bytes)
            communication = Communication(shape.hidden, links, exchange, self.latency, *moving)
            size = expert_bytes(shape, self.bytes_per_weight)
            migration = Migration(size, links, self.overlap, self.move_share)
        elif self.latency or self.overlap:
            raise typer.BadParameter("--latency and --overlap are of what moves: give --model")
        decode = _line("--rest", self.rest)
        prefill = self.prefill_rest
        time = StepTime(
            self.objective,
            communication,
            decode,
            decode if prefill is None else _line("--prefill-rest", prefill),
            dict(map(_router_time, self.router_time)),
            dict.fromkeys(self.gathers, "all-gather"),
        )
        return time, migration


def _two(option: str, text: str) -> tuple[float, float]:
    numbers = numbers_of(option, text, float, least=0)
    if len(numbers) != 2:
        problem = f"expected two numbers with a comma between, not {text!r}"
        raise typer.BadParameter(problem, param_hint=option)
    return numbers[0], numbers[1]


def _line(option: str, text: str) -> Line:
    numbers = numbers_of(option, text, float, least=0)
    if len(numbers) > 2:
        problem = f"expected OFFSET or OFFSET,PER_TOKEN, not {text!r}"
        raise typer.BadParameter(problem, param_hint=option)
    return Line(*numbers)


def _router_time(text: str) -> tuple[str, float]:
    label, equals, time = text.rpartition("=")
    if not equals:
        problem = f"expected METHOD=MICROSECONDS, not {text!r}"
        raise typer.BadParameter(problem, param_hint="--router-time")
    return label, numbers_of("--router-time", time, float, least=0)[0]
