"""Files that are there whole or not at all, whatever ends the writing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["remove_unfinished", "write_whole"]

_UNFINISHED = ".unfinished"


def write_whole(path: Path, content: bytes, lost: str) -> None:
    """Write a file under another name, and rename it once it is on the disk.

    Parameters
    ----------
    path, content
        The file, which is replaced if it is there.
    lost
        What it means if that fails, for the message.

    Raises
    ------
    OSError
        When it fails; nothing of the file is left.
    """
    unfinished = path.with_name(f".{path.name}{_UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise OSError(error.errno, f"{error.strerror}: {lost}", str(path)) from error


def remove_unfinished(folder: Path) -> None:
    """Remove what a writer left that was killed."""
    for rest in folder.glob(f".*{_UNFINISHED}"):
        rest.unlink()
