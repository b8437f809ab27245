"""Plain arrays of counts or of top-k ids: .npy, .npz and CSV."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_opt.formats.counts import checked_counts, stack_rows
from eplb_opt.formats.npy import map_npy, open_npz
from eplb_opt.formats.parsing import parsing, the_one

__all__ = ["COUNT_KEYS", "GENERATION_KEY", "TOPK_KEYS", "read_csv", "read_npy", "read_npz"]

TOPK_KEYS = ("topk_ids", "topk", "data")
COUNT_KEYS = ("tokens", "counts", "logical_count", "load")
GENERATION_KEY = "generation"


def read_npy(path: Path) -> npt.NDArray[np.integer]:
    """Memory-map an array of counts [layers, experts] or [steps, layers, experts].

    Returns
    -------
    integer array, [steps, layers, experts]
        Memory-mapped, read-only, with the file's dtype; floats are copied to int64.

    Raises
    ------
    FormatError
        When the file is not one whole array of counts; Python objects in it are never loaded.
    """
    return checked_counts(path, "", map_npy(path))


def read_npz(path: Path) -> tuple[str, npt.NDArray[Any], npt.NDArray[Any] | None]:
    """Read the one known array of an archive, once.

    Returns
    -------
    key : str
        The array's name, one of `TOPK_KEYS` or `COUNT_KEYS`; it decides what the array is.
    array
        As stored, unchecked.
    generation
        The array `GENERATION_KEY`, or None where the archive has none.

    Raises
    ------
    FormatError
        When the archive holds none or several of the known names, or is damaged; Python objects in
        it are never loaded.
    """
    expected = f"{', '.join(TOPK_KEYS)} (top-k ids) or {', '.join(COUNT_KEYS)} (counts)"
    with open_npz(path) as archive:
        key = the_one(path, "array", archive.names, (*TOPK_KEYS, *COUNT_KEYS), expected)
        array = archive.read(key)
        generation = archive.read(GENERATION_KEY) if GENERATION_KEY in archive.names else None
        return key, array, generation


def read_csv(path: Path) -> npt.NDArray[np.int64]:
    """Read counts as text: a row per layer, a column per expert, a blank line between steps.

    Values are separated by commas; ``#`` starts a comment (a header belongs in one), and a line
    that holds only a comment counts for nothing.

    Returns
    -------
    int64 array, [steps, layers, experts]

    Raises
    ------
    FormatError
        For anything else; the place is ``line 12, column 3``, both from 1.
    """

    def cell(row: str, expert: int) -> str:
        return f"{row}, column {expert + 1}"

    return stack_rows(path, _csv_rows(path), cell)


def _csv_rows(path: Path) -> Iterator[tuple[int, str, list[Any]]]:
    step = 0
    inside = False  # whether the current step has a row yet
    with path.open(encoding="utf-8-sig") as lines, parsing(path):
        for number, line in enumerate(lines, start=1):
            row, comment, _ = line.partition("#")
            if row.strip():
                inside = True
                yield step, f"line {number}", _numbers(row.split(","))
            elif inside and not comment:
                inside = False
                step += 1


def _numbers(fields: list[str]) -> list[Any]:
    try:
        return list(map(int, fields))
    except ValueError:
        return [_number(field) for field in fields]


def _number(field: str) -> int | float | str:
    """Give the number that ``field`` spells, or the text itself, which is no count."""
    with suppress(ValueError):
        return int(field)
    with suppress(ValueError):
        return float(field)
    return field.strip()
