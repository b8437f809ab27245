"""The folder of a sweep: whole files only, and none of another's."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from eplb_opt.errors import FormatError
from eplb_opt.memory import MemoryPerGpu
from eplb_opt.sweep_folder import Contents, SweepFolder, read_sweep
from eplb_opt.sweep_results import COLUMNS, SweepRow

pq = pytest.importorskip("pyarrow.parquet")

KEYS = tuple(digit * 32 for digit in "ab")
CONTENTS = Contents("1" * 32, "traffic", "makespan", 256, 10, 30, KEYS)
MEMORY = MemoryPerGpu(800, 200, 30, 4)
ROW = SweepRow(8, 32, None, None, None, "metro", None, None, 5e4, 0, 0, MEMORY)


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    """Begin a sweep of two cells, and store the first."""
    made = SweepFolder(tmp_path / "results")
    made.begin(CONTENTS, replace=False)
    made.write(KEYS[0], [ROW, replace(ROW, method="uniform")])
    return made


def test_what_is_stored_is_read(folder: SweepFolder) -> None:
    """Cells that are there, in the order of the sweep, also before it is done."""
    assert [row.method for row in read_sweep(folder.path).rows] == ["metro", "uniform"]
    folder.write(KEYS[1], [replace(ROW, gpus=16)])
    found = read_sweep(folder.path)
    assert [row.gpus for row in found.rows] == [8, 8, 16]
    assert found.rows[0] == SweepRow.of(ROW.flat())
    assert (found.traffic, found.experts, found.cells) == ("traffic", 256, 2)


def test_any_reader_of_parquet_takes_the_folder(folder: SweepFolder) -> None:
    """As one table, whose columns have types also where no value is known."""
    (folder.path / f".cell-{KEYS[1]}.parquet.unfinished").write_bytes(b"PAR1")
    folder.write(KEYS[1], [ROW])
    table = pq.read_table(folder.path)
    assert table.column_names == list(COLUMNS)
    assert table.num_rows == 3
    assert str(table.schema.field("decode_mean").type) == "double"


def test_another_sweeps_folder_is_refused(folder: SweepFolder) -> None:
    """Unless it is to be replaced; what is not of a sweep stays then too."""
    other = replace(CONTENTS, inputs="2" * 32)
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="results holds a sweep of other traffic"):
        folder.begin(other, replace=False)
    assert folder.read(KEYS[0]) is not None
    folder.begin(CONTENTS, replace=True)
    assert folder.read(KEYS[0]) is not None
    folder.begin(other, replace=True)
    assert sorted(path.name for path in folder.path.iterdir()) == ["_sweep.json", "notes.txt"]


def test_other_cells_of_the_same_inputs_share_a_folder(folder: SweepFolder) -> None:
    """The last that were asked for are the sweep; the others stay for who asks for them again."""
    folder.begin(replace(CONTENTS, cells=KEYS[1:]), replace=False)
    assert read_sweep(folder.path).rows == ()
    assert folder.read(KEYS[0]) is not None


@pytest.mark.parametrize("content", [b"", b"PAR1", b"[]", b'{"inputs": 1}', b"\xff"])
def test_a_damaged_file_of_contents(folder: SweepFolder, content: bytes) -> None:
    """It is named; the sweep can be begun anew."""
    (folder.path / "_sweep.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"_sweep\.json: damaged, or not of a sweep"):
        folder.begin(CONTENTS, replace=False)
    folder.begin(CONTENTS, replace=True)
    assert folder.read(KEYS[0]) is None


def test_damaged_cells_are_named(folder: SweepFolder) -> None:
    """Cut anywhere, or of another sweep, or no sweep's at all."""
    path = folder.path / f"cell-{KEYS[0]}.parquet"
    content = path.read_bytes()
    for end in (0, 3, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.raises(FormatError, match=rf"{path.name}: damaged"):
            folder.read(KEYS[0])
    path.rename(folder.path / f"cell-{KEYS[1]}.parquet")
    (folder.path / f"cell-{KEYS[1]}.parquet").write_bytes(content)
    with pytest.raises(FormatError, match=f"metadata: the cell is {KEYS[0]}, not {KEYS[1]}"):
        read_sweep(folder.path)
    pq.write_table(pq.read_table(folder.path / f"cell-{KEYS[1]}.parquet").select([0]), path)
    with pytest.raises(FormatError, match="damaged, or not of a sweep"):
        folder.read(KEYS[0])


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    """It is no sweep's, and says so."""
    with pytest.raises(FormatError, match=r"not the folder of a sweep: it has no _sweep\.json"):
        read_sweep(tmp_path)


def test_a_full_disk(folder: SweepFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is named, nothing is left of it, and what was written stays readable."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(folder.path.iterdir())
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device: this file is not written") as error:
        folder.write(KEYS[1], [ROW])
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename.endswith(f"cell-{KEYS[1]}.parquet")
    assert sorted(folder.path.iterdir()) == before
    assert len(read_sweep(folder.path).rows) == 2
