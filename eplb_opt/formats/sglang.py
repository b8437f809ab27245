"""SGLang's expert statistics: ``logical_count`` [L, E] or [T, L, E] in a JSON or .pt file.

The recorder (``/dump_expert_distribution_record``, mode ``stat``) writes .pt; published statistics
and ``--init-expert-location`` use either. Every layer of the model has a row: dense layers are all
zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import ijson  # type: ignore[import-untyped]  # ships neither stubs nor py.typed
import numpy as np
import numpy.typing as npt

from eplb_opt.errors import FormatError
from eplb_opt.formats.counts import checked_counts, stack_rows
from eplb_opt.formats.parsing import parsing, top_level_keys
from eplb_opt.formats.pt import load_tensors, tensor_array

__all__ = ["read_json", "read_pt"]

_KEY = "logical_count"

_Events = Iterator[tuple[str, Any]]


def read_json(path: Path) -> npt.NDArray[np.int64]:
    """Stream the counts out of a JSON file: beside the result, one row is in memory at a time.

    Parameters
    ----------
    path
        An object with the key ``logical_count``: lists of whole numbers, nested as [L][E] or
        [T][L][E]. Other keys are skipped, at any size.

    Returns
    -------
    int64 array, [steps, layers, experts]

    Raises
    ------
    FormatError
        When it is anything else; the place is a path such as ``logical_count[3][17]``.
    """
    with path.open("rb") as file:
        return stack_rows(path, _rows(path, file), lambda row, expert: f"{row}[{expert}]")


def read_pt(path: Path) -> npt.NDArray[np.integer]:
    """Map the counts of a file that `torch.save` wrote; nothing in it is executed.

    Parameters
    ----------
    path
        A dict with a tensor ``logical_count`` [L, E] or [T, L, E].

    Returns
    -------
    integer array, [steps, layers, experts]
        Memory-mapped, with the tensor's dtype; float tensors are copied to int64.

    Raises
    ------
    FormatError
        When it is anything else.
    SolverUnavailableError
        When PyTorch is not installed.
    """
    saved = load_tensors(path)
    if _KEY not in saved:
        raise _no_key(path, list(saved))
    counts = tensor_array(path, _KEY, saved[_KEY])
    return checked_counts(path, _KEY, counts)


@dataclass(slots=True)
class _Cursor:
    """Where the reader is in the list of counts."""

    ended: list[int] = field(default_factory=list)  # per open list, the lists that ended in it
    row: list[Any] = field(default_factory=list)  # the numbers of the innermost list so far

    def row_place(self) -> str:
        """Give the path of the innermost open list; empty outside the list of counts."""
        return _KEY + "".join(f"[{i}]" for i in self.ended[:-1]) if self.ended else ""

    def place(self) -> str:
        """Give the path of the next value; empty outside the list of counts."""
        return f"{self.row_place()}[{len(self.row) or self.ended[-1]}]" if self.ended else ""


def _rows(path: Path, file: BinaryIO) -> Iterator[tuple[int, str, list[Any]]]:
    """Yield (step, place, counts) row by row.

    From bare events, not ijson's ready-made items: those take time quadratic in the depth of the
    nesting, which lets a small file hang the reader.
    """
    cursor = _Cursor()
    with parsing(path, cursor.place):
        events = ijson.basic_parse(file, use_float=True)
        keys = top_level_keys(events)
        others = []
        for key in keys:
            if key == _KEY:
                yield from _rows_of_list(path, events, cursor)
                break
            others.append(key)
        else:
            raise _no_key(path, others)
        if _KEY in keys:
            raise FormatError(path, _KEY, "this key occurs twice")


def _rows_of_list(
    path: Path, events: _Events, cursor: _Cursor
) -> Iterator[tuple[int, str, list[Any]]]:
    """Read the list that comes next; its first row tells whether it is [L][E] or [T][L][E]."""
    row_depth = 0
    for event, run in groupby(events, key=itemgetter(0)):  # the numbers of a row are one run
        if event == "number" and cursor.ended:
            cursor.row.extend(map(itemgetter(1), run))
            continue
        for _ in run:
            if event == "start_array" and not cursor.row and len(cursor.ended) < 3:
                cursor.ended.append(0)
                continue
            if event != "end_array":
                found = event.removeprefix("start_")
                problem = f"{found} found; expected numbers in lists nested as [L][E] or [T][L][E]"
                raise FormatError(path, cursor.place() or _KEY, problem)
            if cursor.row:
                row_depth = row_depth or len(cursor.ended)
                if len(cursor.ended) != row_depth or row_depth == 1:
                    problem = "counts at this depth; expected lists nested as [L][E] or [T][L][E]"
                    raise FormatError(path, cursor.row_place(), problem)
                yield (cursor.ended[0] if row_depth == 3 else 0), cursor.row_place(), cursor.row
                cursor.row = []
            elif cursor.ended[-1] == 0:
                raise FormatError(path, cursor.row_place(), "empty list")
            cursor.ended.pop()
            if not cursor.ended:
                return
            cursor.ended[-1] += 1


def _no_key(path: Path, keys: list[str]) -> FormatError:
    found = ", ".join(map(repr, keys[:8])) or "none"
    return FormatError(path, "", f"expected an object with the key {_KEY!r}; keys found: {found}")
