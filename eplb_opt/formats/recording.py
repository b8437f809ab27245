"""Recordings: folders to which steps are appended, file by file.

Each file, ``steps-{number of its first step}.safetensors``, holds some consecutive steps::

    tokens           [steps, layers, experts], or instead
    source_tokens    [steps, layers, sources, experts]
    stage            [steps]    1: decode, 2: prefill, 0: not known
    scheduled        [steps]    tokens that the engine ran, padding included
    time             [steps]    seconds

with counts as uint8, uint16 or uint32, whichever is the narrowest that holds them, or int64. What
is not known of each step has no tensor, in any of the files. The metadata have ``first_step`` and,
where known, ``model``, ``top_k`` and ``layer_ids``, a JSON list.

A file is written beside its place, flushed to disk, and renamed. So those that are there are whole,
whatever happened to the recording, and headers are all that opening it reads: counts are
memory-mapped when they are used.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from eplb_opt.arrays import as_array, narrowed
from eplb_opt.errors import FormatError, InvalidTokensError
from eplb_opt.formats.parsing import import_safetensors, parsing, the_one
from eplb_opt.formats.whole_files import remove_unfinished, write_whole
from eplb_opt.load_trace import LoadTrace, StepFacts
from eplb_opt.step_array import StepArray, StepPart
from eplb_opt.workload import Stage

__all__ = ["TraceWriter", "holds_recording", "read_recording"]

_NAME = re.compile(r"steps-[0-9]{9,18}\.safetensors")
_STAGES = ("", *get_args(Stage))  # a stage's number in a file is its place here
_AXES = {
    "tokens": ("steps", "layers", "experts"),
    "source_tokens": ("steps", "layers", "sources", "experts"),
}
_DTYPES = {"U8": "u1", "U16": "<u2", "U32": "<u4", "I64": "<i8", "F64": "<f8"}
_LARGEST = 2**63 - 1
_COLUMNS = {"stage": "u1", "scheduled": "<i8", "time": "<f8"}


# Reading


def holds_recording(folder: Path) -> bool:
    """Tell whether a folder has files of a recording."""
    return any(_NAME.fullmatch(path.name) for path in folder.iterdir())


def read_recording(path: Path) -> LoadTrace:
    """Open a recording; its counts are memory-mapped when they are used, so it must stay there.

    Parameters
    ----------
    path
        The folder, or one of its files, whose steps are then all that there are.

    Raises
    ------
    FormatError
        When a file is damaged or of another form, steps are missing, or a file has other layers,
        experts, sources or facts than the first; the error's path is that of the file.
    SolverUnavailableError
        When safetensors is not installed.
    """
    files = _files(path) if path.is_dir() else [_File.read(path)]
    if not files:
        raise FormatError(path, "", "a recording without any step")
    counts = StepArray([file.counts for file in files])
    columns = [file.facts.columns() for file in files]
    known = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
    if "stage" in known and not (known["stage"] != "").any():
        del known["stage"]
    facts = StepFacts(**known)
    with _as_format_error(files[0].path):
        if files[0].name == "source_tokens":
            return LoadTrace.from_sources(counts, facts=facts, **files[0].known)
        return LoadTrace(counts, facts=facts, **files[0].known)


@dataclass(frozen=True, slots=True)
class _File:
    """What one file holds: steps of `name`, and what `LoadTrace` takes as it is, in `known`."""

    path: Path
    first_step: int
    name: str
    counts: StepPart
    facts: StepFacts
    known: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> _File:
        metadata, tensors = _map_tensors(path)
        name = the_one(path, "tensor", list(tensors), list(_AXES))
        counts = tensors.pop(name)
        if len(counts.shape) != len(_AXES[name]) or 0 in counts.shape:
            expected = f"[{', '.join(_AXES[name])}], not empty"
            raise FormatError(path, name, f"shape {list(counts.shape)}; expected {expected}")
        _require_counts(path, name, counts)
        columns = {other: _column(path, other, tensors[other], counts) for other in tensors}
        with _as_format_error(path):
            facts = StepFacts(**columns)
        first_step = _number(path, metadata, "first_step")
        return cls(path, first_step, name, counts, facts, _known(path, metadata))


def _files(folder: Path) -> list[_File]:
    """Read the headers of a recording's files: in order, none missing, all of one form."""
    paths = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    files = [_File.read(path) for path in paths]
    step = 0
    for file in files:
        if file.first_step != step or file.path.name != _name(step):
            problem = f"{file.first_step}; the file to come here is {_name(step)}, of step {step}"
            raise FormatError(file.path, "first_step", problem)
        step += file.counts.shape[0]
        _require_same_form(files[0], file)
    for before, after in pairwise(files):
        _require_later(before, after)
    return files


def _name(first_step: int) -> str:
    return f"steps-{first_step:09}.safetensors"


def _map_tensors(path: Path) -> tuple[dict[str, str], dict[str, StepPart]]:
    """Return a file's metadata, and its tensors, not loaded."""
    safetensors = import_safetensors(f"reading {path}")
    with path.open("rb") as file, parsing(path):
        # The library checks the header, and that the tensors fill the file, neither more nor less.
        with safetensors.safe_open(path, framework="numpy") as checked:
            metadata = checked.metadata() or {}
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES or not entry["shape"]:
            problem = (
                f"{entry['dtype']} {entry['shape']}; expected a row per step, of a dtype among"
            )
            raise FormatError(path, name, f"{problem} {', '.join(_DTYPES)}")
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
        tensors[name] = _mapped(path, name, dtype, shape, 8 + length + entry["data_offsets"][0])
    return metadata, tensors


def _mapped(
    path: Path, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int
) -> StepPart:
    """Return steps that are mapped when they are loaded, for as long as they are used.

    A map holds a file descriptor, and a recording may have more files than a process may open.
    """

    def load(begin: int, end: int) -> npt.NDArray[Any]:
        size = math.prod(shape[1:])
        # numpy.memmap takes six times as long; a file that has been cut since raises here too.
        with path.open("rb") as file, parsing(path, lambda: name):
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            first = offset + begin * size * dtype.itemsize
            steps = np.frombuffer(content, dtype, (end - begin) * size, first)
        return steps.reshape(end - begin, *shape[1:])

    return StepPart(shape, dtype, load)


def _require_counts(path: Path, name: str, counts: StepPart) -> None:
    if counts.dtype.kind == "u":  # needs no look
        return
    values = counts.load(0, counts.shape[0])
    wrong = ~(values >= 0) | (values.dtype.kind != "i")
    if wrong.any():
        index = np.argwhere(wrong)[0].tolist()
        place = name + "".join(f"[{i}]" for i in index)
        raise FormatError(path, place, f"{values[tuple(index)]}; expected a whole number from 0 up")


def _column(path: Path, name: str, column: StepPart, counts: StepPart) -> npt.NDArray[Any]:
    if name not in _COLUMNS:
        raise FormatError(path, name, f"unknown tensor; known are {', '.join([*_AXES, *_COLUMNS])}")
    if column.dtype != _COLUMNS[name] or column.shape != counts.shape[:1]:
        expected = f"{np.dtype(_COLUMNS[name])} [{counts.shape[0]}]"
        raise FormatError(path, name, f"{column.dtype} {list(column.shape)}; expected {expected}")
    values = column.load(0, column.shape[0]).copy()  # lets go of the map
    if name != "stage":
        return values
    for step in np.flatnonzero(values >= len(_STAGES))[:1]:
        raise FormatError(path, f"stage[{step}]", f"{values[step]}; expected 0, 1 or 2")
    return np.asarray(np.array(_STAGES)[values])


def _known(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    known: dict[str, Any] = {}
    if "model" in metadata:
        known["model"] = metadata["model"]
    if "top_k" in metadata:
        known["top_k"] = _number(path, metadata, "top_k")
    if "layer_ids" in metadata:
        with parsing(path, lambda: "layer_ids"):
            ids = json.loads(metadata["layer_ids"])
        if not isinstance(ids, list) or any(type(layer) is not int for layer in ids):
            raise FormatError(path, "layer_ids", f"{ids!r}; expected a list of whole numbers")
        known["layer_ids"] = tuple(ids)
    return known


def _number(path: Path, metadata: dict[str, str], key: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", metadata.get(key, "")):
        problem = f"{metadata.get(key)!r}; expected a whole number in the metadata"
        raise FormatError(path, key, problem)
    return int(metadata[key])


@contextmanager
def _as_format_error(path: Path) -> Iterator[None]:
    """Turn what a trace refuses into an error with the file's path."""
    try:
        yield
    except InvalidTokensError as error:
        raise FormatError(path, "", str(error)) from error


def _require_same_form(first: _File, other: _File) -> None:
    """Refuse a file whose layers, experts, sources or facts are not those of the first."""
    if other.name != first.name:
        raise FormatError(other.path, other.name, f"{first.path.name} has {first.name}")
    axes = zip(_AXES[first.name], first.counts.shape, other.counts.shape, strict=True)
    for axis, was, now in list(axes)[1:]:
        if was != now:
            raise FormatError(other.path, other.name, f"{now} {axis}; {first.path.name} has {was}")
    for key in ("model", "top_k", "layer_ids"):
        if other.known.get(key) != first.known.get(key):
            problem = f"{other.known.get(key)!r}; {first.path.name} has {first.known.get(key)!r}"
            raise FormatError(other.path, key, problem)
    for column in _COLUMNS:
        if (column in other.facts.columns()) != (column in first.facts.columns()):
            raise FormatError(other.path, column, "some files have this, and some do not")


def _require_later(before: _File, after: _File) -> None:
    if before.facts.time is None or after.facts.time is None:
        return
    if after.facts.time[0] < before.facts.time[-1]:
        problem = f"{after.facts.time[0]}; {before.path.name} ends at {before.facts.time[-1]}"
        raise FormatError(after.path, "time[0]", problem)


# Writing


class TraceWriter:
    """Append steps to a recording, the folder that `read_trace` reads.

    Whole files are written, `steps_per_file` steps each. A process that is killed loses the steps
    since the last of them, at most ``steps_per_file - 1``; leaving the context, by an exception or
    not, writes what there is. If that fails, as on a full disk, the error says which steps are
    missing; they are kept, and `flush` tries again.

    Parameters
    ----------
    folder
        The recording. It must not hold one yet, unless `append`.
    model, top_k, layer_ids
        As for `LoadTrace`.
    append
        Go on after the last step of the recording that is there, which must be of the same form.
    steps_per_file
        Steps in memory at a time.

    Raises
    ------
    FileExistsError
        When the folder holds a recording.
    FormatError
        When the recording to append to is damaged.
    SolverUnavailableError
        When safetensors is not installed.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with TraceWriter(folder, layer_ids=[3, 4]) as writer:
    ...         for step in range(3):
    ...             writer.append([[step, 1], [1, 300]], stage="decode", scheduled=1)
    ...     trace = read_recording(Path(folder))
    ...     print(trace.load().tolist(), trace.facts.stage[0], trace.layer_ids)
    [[3, 3], [3, 900]] decode (3, 4)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: str | None = None,
        top_k: int | None = None,
        layer_ids: Sequence[int] | None = None,
        append: bool = False,
        steps_per_file: int = 256,
    ) -> None:
        if steps_per_file < 1:
            raise ValueError(f"steps_per_file is {steps_per_file}; expected 1 or more")
        self._safetensors = import_safetensors("recording", "safetensors.numpy")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, Any] = {"model": model, "top_k": top_k}
        self._known["layer_ids"] = None if layer_ids is None else tuple(map(int, layer_ids))
        self._steps_per_file = steps_per_file
        self._buffer: list[tuple[npt.NDArray[Any], dict[str, Any]]] = []
        self._shape: tuple[int, ...] | None = None
        self._columns: set[str] = set()
        self._time = 0.0
        self._written = 0
        files = _files(self.folder)
        if files and not append:
            raise FileExistsError(errno.EEXIST, "holds a recording already", str(self.folder))
        remove_unfinished(self.folder)
        if files:
            self._continue(files)

    @property
    def num_steps(self) -> int:
        """Steps of the recording, those in memory among them."""
        return self._written + len(self._buffer)

    def append(
        self,
        tokens: npt.ArrayLike,
        *,
        stage: Stage | None = None,
        scheduled: int | None = None,
        time: float | None = None,
    ) -> None:
        """Append a step.

        Parameters
        ----------
        tokens
            Counts [layers, experts], or [layers, sources, experts] by the GPU whose tokens they
            are.
        stage
            ``"decode"`` or ``"prefill"``, if known.
        scheduled, time
            As for `StepFacts`; known of all steps or of none.

        Raises
        ------
        InvalidTokensError
            When a count is negative, or the step is not of the form of those before; nothing is
            appended then.
        OSError
            When a file cannot be written; see `flush`.
        """
        facts: dict[str, Any] = {"stage": stage or ""}
        if scheduled is not None:
            facts["scheduled"] = scheduled
        if time is not None:
            facts["time"] = float(time)
        try:
            counts = as_array(tokens, "tokens", InvalidTokensError)
            self._check(counts, facts)
        except InvalidTokensError as error:
            raise InvalidTokensError(f"step {self.num_steps}: {error}") from error
        self._shape, self._columns = counts.shape, set(facts)
        self._time = facts.get("time", 0.0)
        self._buffer.append((narrowed(counts), facts))
        if len(self._buffer) >= self._steps_per_file:
            self.flush()

    def flush(self) -> None:
        """Write the steps that are in memory as a file of their own.

        Raises
        ------
        OSError
            When that fails: the message says which steps are not written. They are still in memory:
            make room, and call this again.
        """
        if not self._buffer:
            return
        path = self.folder / _name(self._written)
        missing = f"steps {self._written} to {self.num_steps - 1} are not written"
        write_whole(path, self._content(), f"{missing}; the {self._written} before are")
        self._written = self.num_steps
        self._buffer.clear()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def _continue(self, files: list[_File]) -> None:
        last = files[-1]
        self._written = last.first_step + last.counts.shape[0]
        self._shape = last.counts.shape[1:]
        self._columns = set(last.facts.columns()) | {"stage"}
        if last.facts.time is not None:
            self._time = float(last.facts.time[-1])
        for key, given in self._known.items():
            if given not in (None, last.known.get(key)):
                problem = f"the recording has {last.known.get(key)!r}, not {given!r}"
                raise FormatError(self.folder, key, problem)
        self._known = last.known

    def _check(self, counts: npt.NDArray[Any], facts: dict[str, Any]) -> None:
        """Refuse a step that the recording cannot have; what a trace refuses is the most of it."""
        if self._shape not in (None, counts.shape):
            problem = f"counts are {list(counts.shape)}, and {list(self._shape or ())} before"
            raise InvalidTokensError(problem)
        if self.num_steps and set(facts) != self._columns:
            name = min(set(facts) ^ self._columns)
            raise InvalidTokensError(f"{name} is known of some steps and not of others")
        columns = {name: np.array([value]) for name, value in facts.items()}
        of = LoadTrace.from_sources if counts.ndim == 3 else LoadTrace
        of(counts[np.newaxis], facts=StepFacts(**columns), **self._known)
        if facts.get("time", self._time) < self._time:
            raise InvalidTokensError(f"time is {facts['time']}, and {self._time} before")
        if counts.min() < 0 or counts.max() > _LARGEST:
            index = np.argwhere((counts < 0) | (counts > _LARGEST))[0].tolist()
            place = f"layer {index[0]}, expert {index[-1]}"
            problem = f"{counts[tuple(index)]} tokens; expected 0 to 2^63-1"
            raise InvalidTokensError(f"{place}: {problem}")

    def _content(self) -> bytes:
        """Return the file of the steps in memory."""
        metadata = {"first_step": str(self._written)}
        if self._known.get("model") is not None:
            metadata["model"] = self._known["model"]
        if self._known.get("top_k") is not None:
            metadata["top_k"] = str(self._known["top_k"])
        if self._known.get("layer_ids") is not None:
            metadata["layer_ids"] = json.dumps(self._known["layer_ids"])
        counts = np.stack([counts for counts, _ in self._buffer])
        name = "source_tokens" if counts.ndim == 4 else "tokens"
        rows = [facts for _, facts in self._buffer]
        codes = np.array([_STAGES.index(row["stage"]) for row in rows], _COLUMNS["stage"])
        columns = {
            column: np.array([row[column] for row in rows], _COLUMNS[column])
            for column in sorted(self._columns - {"stage"})
        }
        tensors = {name: counts, "stage": codes, **columns}
        content: bytes = self._safetensors.save(tensors, metadata)
        return content
