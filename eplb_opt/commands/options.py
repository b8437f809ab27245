"""What commands have in common: options, and how their values are read and answers written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from eplb_opt.transfer import Links

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
    bandwidths = numbers_of("--links", text, float, least=0)
    if len(bandwidths) != 2:
        problem = f"expected two numbers, inside and between nodes, not {text!r}"
        raise typer.BadParameter(problem, param_hint="--links")
    inside, between = bandwidths
    return Links(1e9 * inside, 1e9 * between, max(1, gpus // nodes))


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
