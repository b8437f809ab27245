"""What the readers share: parsers' own errors made `FormatError`, finding names, safetensors."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eplb_opt.errors import EplbError, FormatError, SolverUnavailableError

__all__ = ["import_safetensors", "parsing", "the_one", "top_level_keys"]


@contextmanager
def parsing(path: Path, locate: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turn whatever a parser raises on bad bytes into `FormatError`.

    The parsers behind the readers (numpy, zipfile and its codecs, ijson, torch) document no
    closed set of errors: a flipped bit gives anything from `KeyError` to `zlib.error`. Hence the
    wide net, to be cast as closely around their calls as it goes.

    Parameters
    ----------
    path
        The file.
    locate
        Called on failure: the place in the file, as a path inside it.

    Raises
    ------
    FormatError
        For every error but our own, `MemoryError`, and the operating system's (`OSError` with an
        error number: a missing file, no permission, a failing disk), which pass unchanged.
    """
    try:
        yield
    except (EplbError, MemoryError):
        raise
    except OSError as error:
        # bz2 raises a bare OSError on a bad stream, and a wild offset gives "invalid argument".
        if error.errno not in (None, errno.EINVAL):
            raise
        raise _format_error(path, locate(), error) from error
    except Exception as error:
        raise _format_error(path, locate(), error) from error


def the_one(
    path: Path, what: str, names: Sequence[str], known: Sequence[str], expected: str = ""
) -> str:
    """Return the one known name among those of a file.

    Parameters
    ----------
    path
        The file, for errors.
    what
        What bears the names: ``"array"`` or ``"key"``.
    names, known
        Names in the file, and those that a reader knows.
    expected
        The known names in words; by default in a row.

    Raises
    ------
    FormatError
        When there is none of them, or more than one.
    """
    there = [name for name in known if name in names]
    if len(there) != 1:
        found = ", ".join(names[:8]) or "none"
        expected = expected or ", ".join(known)
        problem = f"expected exactly one {what} of {expected}; {what}s found: {found}"
        raise FormatError(path, "", problem)
    return there[0]


def top_level_keys(events: Iterator[tuple[str, Any]]) -> Iterator[str]:
    """Yield the keys of a JSON file's outermost object, as its events (`ijson`) come by.

    What is left unread of the keys' values is skipped.
    """
    depth = 0
    for event, value in events:
        if event in ("start_map", "start_array"):
            depth += 1
        elif event in ("end_map", "end_array"):
            depth -= 1
        elif event == "map_key" and depth == 1:
            yield value


def import_safetensors(doing: str, module: str = "safetensors") -> Any:
    """Return a module of the safetensors package.

    Raises
    ------
    SolverUnavailableError
        When it is not installed: the message says what needs it, and the extra that has it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        problem = f"{doing} needs safetensors: pip install 'eplb-opt[files]'"
        raise SolverUnavailableError(problem) from error


def _format_error(path: Path, place: str, error: Exception) -> FormatError:
    # ijson draws a caret under the fault on further lines, at times inside a bytes repr.
    first_line = str(error).replace("\\n", "\n").partition("\n")[0]
    problem = first_line.removeprefix("b'").removeprefix('b"') or type(error).__name__
    return FormatError(path, place, f"damaged, or not a {path.suffix} file ({problem})")
