"""The folder of a sweep: a Parquet file for each deployment, and what they are all of.

``cell-{key}.parquet`` holds the rows of a deployment, one for each router, in the columns
`eplb_opt.sweep_results.COLUMNS`. The key is a hash of all that its figures hang on, and stands in
the file's metadata too. ``_sweep.json`` says what is swept, and names the cells in order; other
readers of Parquet pass over it, so that the folder is a table for all of them.

A file is written beside its place, flushed to disk, and renamed. So those that are there are whole,
whatever happened to the sweep.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from eplb_opt.errors import FormatError, SolverUnavailableError
from eplb_opt.formats.whole_files import remove_unfinished, write_whole
from eplb_opt.sweep_results import COLUMNS, Sweep, SweepRow

__all__ = ["Contents", "SweepFolder", "read_sweep"]

_CONTENTS = "_sweep.json"
_CELL = re.compile(r"cell-[0-9a-f]{32}\.parquet")
_LOST = "this file is not written; those before are whole"
_KEY = b"eplb-opt sweep"  # of a cell's metadata


@dataclass(frozen=True, slots=True)
class Contents:
    """What a folder is a sweep of.

    Attributes
    ----------
    inputs
        Hash of all that the cells have in common.
    traffic, objective, experts, first_step, steps
        As for `Sweep`.
    cells
        The keys of the deployments that were asked for last, in order.
    """

    inputs: str
    traffic: str
    objective: str
    experts: int
    first_step: int
    steps: int
    cells: tuple[str, ...]

    def sweep(self, found: Mapping[str, Sequence[SweepRow]]) -> Sweep:
        """Return the sweep with the rows that were found, by key."""
        return Sweep(
            self.traffic,
            self.objective,
            self.experts,
            self.first_step,
            self.steps,
            len(self.cells),
            tuple(row for key in self.cells for row in found.get(key, ())),
        )


class SweepFolder:
    """Reads and writes the files.

    Parameters
    ----------
    path
        The folder.

    Raises
    ------
    SolverUnavailableError
        When pyarrow is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            problem = "the results of a sweep need pyarrow: pip install 'eplb-opt[sweep]'"
            raise SolverUnavailableError(problem) from None
        self._pa, self._parquet = pa, pq
        self.path = Path(path)

    def contents(self) -> Contents | None:
        """Return what the folder is a sweep of; None where it is none, or is not there.

        Raises
        ------
        FormatError
            When the file that says so is damaged.
        """
        path = self.path / _CONTENTS
        if not path.exists():
            return None
        try:
            given = json.loads(path.read_bytes())
            contents = Contents(**{f.name: given[f.name] for f in fields(Contents)})
        except (ValueError, KeyError, TypeError) as error:
            problem = f"damaged, or not of a sweep ({type(error).__name__}: {error})"
            raise FormatError(path, "", problem) from None
        return Contents(**asdict(contents) | {"cells": tuple(contents.cells)})

    def begin(self, contents: Contents, *, replace: bool) -> None:
        """Make the folder one of this sweep; cells that it has already stay.

        Parameters
        ----------
        contents
            What is swept.
        replace
            Remove the cells of another sweep, instead of refusing its folder.

        Raises
        ------
        FileExistsError
            When it is another's.
        FormatError
            As `contents`, unless it is to be replaced.
        OSError
            When it cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.path)
        if replace:
            self._clear(contents)
        there = self.contents()
        if there is not None and there.inputs != contents.inputs:
            raise FileExistsError(
                f"{self.path} holds a sweep of other traffic, routers, times or options "
                f"({there.traffic}, {there.objective}, from step {there.first_step}); name another "
                "folder, or have it replaced"
            )
        write_whole(self.path / _CONTENTS, json.dumps(asdict(contents), indent=2).encode(), _LOST)

    def read(self, key: str) -> tuple[SweepRow, ...] | None:
        """Return the rows of a cell; None where they are not there.

        Raises
        ------
        FormatError
            When the file is damaged, or holds something else.
        """
        path = self._cell(key)
        if not path.exists():
            return None
        try:
            content = io.BytesIO(path.read_bytes())
            table = self._parquet.read_table(content, page_checksum_verification=True)
            known = dict(table.schema.metadata or {}).get(_KEY, b"").decode()
            rows = tuple(map(SweepRow.of, table.to_pylist()))
        except (self._pa.ArrowException, ValueError, KeyError, OSError) as error:
            raise FormatError(path, "", f"damaged, or not of a sweep ({error})") from None
        if known != key:
            raise FormatError(path, "metadata", f"the cell is {known or 'none'}, not {key}")
        return rows

    def write(self, key: str, rows: Sequence[SweepRow]) -> None:
        """Store the rows of a cell.

        Raises
        ------
        OSError
            When that fails; there is no trace of it then.
        """
        kinds = {"int": self._pa.int64(), "float": self._pa.float64(), "str": self._pa.string()}
        columns = [(name, kinds[kind]) for name, kind in COLUMNS.items()]
        schema = self._pa.schema(columns, {_KEY: key.encode()})
        table = self._pa.Table.from_pylist([row.flat() for row in rows], schema=schema)
        content = io.BytesIO()
        self._parquet.write_table(table, content, write_page_checksum=True)
        write_whole(self._cell(key), content.getvalue(), _LOST)

    def _cell(self, key: str) -> Path:
        return self.path / f"cell-{key}.parquet"

    def _clear(self, contents: Contents) -> None:
        with suppress(FormatError):
            there = self.contents()
            if there is None or there.inputs == contents.inputs:
                return
        for path in self.path.iterdir():
            if _CELL.fullmatch(path.name) or path.name == _CONTENTS:
                path.unlink()


def read_sweep(path: str | os.PathLike[str]) -> Sweep:
    """Read what `sweep` stored in a folder, also while it is going on.

    Raises
    ------
    FormatError
        When the folder is not a sweep's, or a file is damaged: `sweep` computes it anew.
    SolverUnavailableError
        When pyarrow is not installed.
    OSError
        When a file cannot be read.
    """
    folder = SweepFolder(path)
    contents = folder.contents()
    if contents is None:
        raise FormatError(path, "", f"not the folder of a sweep: it has no {_CONTENTS}")
    return contents.sweep({key: folder.read(key) or () for key in contents.cells})
