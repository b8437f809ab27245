"""The one place where a parser's own errors become `FormatError`."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eplb_opt.errors import EplbError, FormatError

__all__ = ["parsing"]


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


def _format_error(path: Path, place: str, error: Exception) -> FormatError:
    # ijson draws a caret under the fault on further lines, at times inside a bytes repr.
    first_line = str(error).replace("\\n", "\n").partition("\n")[0]
    problem = first_line.removeprefix("b'").removeprefix('b"') or type(error).__name__
    return FormatError(path, place, f"damaged, or not a {path.suffix} file ({problem})")
