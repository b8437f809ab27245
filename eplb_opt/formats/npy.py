"""NumPy's own files: an array of .npy, memory-mapped, and the arrays of .npz, by name."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_opt.errors import FormatError
from eplb_opt.formats.parsing import parsing

__all__ = ["Archive", "map_npy", "open_npz"]


def map_npy(path: Path) -> npt.NDArray[Any]:
    """Memory-map the one array of a .npy file.

    Returns
    -------
    array
        As stored, unchecked and read-only.

    Raises
    ------
    FormatError
        When the file is damaged or goes on after the array; Python objects in it are never loaded.
    OSError
        When it cannot be read.
    """
    with parsing(path):
        array = np.lib.format.open_memmap(path, mode="r")
    surplus = path.stat().st_size - array.offset - array.nbytes
    if surplus:
        raise FormatError(path, "", f"{surplus} bytes follow the array; save all as one array")
    return np.asarray(array)


@dataclass(frozen=True, slots=True)
class Archive:
    """An open .npz file.

    Attributes
    ----------
    path
        The file, for errors.
    names
        Names of its arrays.
    """

    path: Path
    names: tuple[str, ...]
    _members: zipfile.ZipFile

    def read(self, name: str) -> npt.NDArray[Any]:
        """Read an array into memory, as stored.

        Raises
        ------
        FormatError
            When it is damaged; Python objects in it are never loaded.
        """
        with parsing(self.path, lambda: name), self._members.open(f"{name}.npy") as member:
            try:
                return np.lib.format.read_array(member, allow_pickle=False)
            except MemoryError as error:  # the header alone says how much to allocate
                raise FormatError(self.path, name, str(error)) from error


@contextmanager
def open_npz(path: Path) -> Iterator[Archive]:
    """Open a .npz file for reading; what goes wrong inside the block is a damaged file.

    Raises
    ------
    FormatError
        When it is no .npz file, or damaged.
    OSError
        When it cannot be read.
    """
    with path.open("rb") as file, parsing(path), zipfile.ZipFile(file) as members:
        names = tuple(name.removesuffix(".npy") for name in members.namelist())
        yield Archive(path, names, members)
