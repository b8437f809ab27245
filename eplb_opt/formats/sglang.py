"""SGLang's expert statistics, in JSON and in the .pt files of its recorder.

``logical_count`` [L, E] or [T, L, E] is what published statistics and ``--init-expert-location``
have, and what the recorder (``/dump_expert_distribution_record``) writes in mode ``stat``, summed
over ranks. In modes ``per_pass`` and ``per_token`` each rank writes a file of its own: ``records``,
one for each forward pass, with ``global_physical_count`` [L, P], and
``last_physical_to_logical_map`` [L, P] (sglang, ``srt/eplb/expert_distribution.py``). Every layer
of the model has a row: dense layers are all zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import ijson  # type: ignore[import-untyped]  # ships neither stubs nor py.typed
import numpy as np
import numpy.typing as npt

from eplb_opt.errors import FormatError
from eplb_opt.formats.counts import checked_counts, stack_rows, step_slices
from eplb_opt.formats.parsing import parsing, top_level_keys
from eplb_opt.formats.pt import load_tensors, tensor_array
from eplb_opt.formats.values import value_of
from eplb_opt.load_trace import LoadTrace, StepFacts
from eplb_opt.step_array import StepArray, StepPart

__all__ = ["read_dumps", "read_json", "read_pt"]

_KEY = "logical_count"
_RECORDS = "records"
_MAP = "last_physical_to_logical_map"
_COUNT = "global_physical_count"
# ForwardMode (sglang, srt/model_executor/forward_batch_info.py): extend, decode, mixed, idle,
# target verify (a decode pass of several tokens); later numbers changed their meaning.
_STAGES = {1: "prefill", 2: "decode", 3: "prefill", 4: "", 5: "decode"}

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


def read_pt(path: Path) -> LoadTrace:
    """Read what the recorder wrote in any mode; nothing in the file is executed.

    Parameters
    ----------
    path
        A dict with a tensor ``logical_count`` [L, E] or [T, L, E], or with ``records``, which are
        one rank's passes.

    Returns
    -------
    LoadTrace
        Memory-mapped, with the tensors' dtype; float tensors are copied to int64.

    Raises
    ------
    FormatError
        When it is anything else; the place is a path such as ``records[12].global_physical_count``.
    SolverUnavailableError
        When PyTorch is not installed.
    """
    saved = load_tensors(path)
    if _RECORDS in saved:
        return _summed([_Dump.read(path, saved)])
    if _KEY not in saved:
        raise _no_key(path, list(saved))
    counts = tensor_array(path, _KEY, saved[_KEY])
    return LoadTrace(checked_counts(path, _KEY, counts))


def read_dumps(folder: Path) -> LoadTrace:
    """Sum the passes that all ranks recorded: the .pt files of one dump, and no others.

    Parameters
    ----------
    folder
        A file of mode ``stat``, or a file for each rank of ``per_pass`` or ``per_token``. Mode
        ``per_token`` gives the stage of each step, and its tokens, as scheduled and by rank. Ranks
        that run the same tokens (tensor parallelism without data parallelism of attention) count
        them once each, as ``stat`` does.

    Raises
    ------
    FormatError
        When a rank is missing or is there twice, or its passes or replicas are not those of the
        others; and as `read_pt`.
    SolverUnavailableError
        When PyTorch is not installed.
    """
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".pt", ".pth"))
    if len(paths) == 1:
        return read_pt(paths[0])
    dumps = sorted((_Dump.read(path, load_tensors(path)) for path in paths), key=lambda d: d.rank)
    for rank, dump in enumerate(dumps):
        if dump.rank < rank:
            problem = f"rank {dump.rank} is in {dumps[rank - 1].path.name} too; give one dump"
            raise FormatError(dump.path, "", problem)
        if dump.rank > rank:
            raise FormatError(
                folder, "", f"rank {rank} is missing; {dump.path.name} has {dump.rank}"
            )
        dump.require_like(dumps[0])
    return _summed(dumps)


@dataclass(frozen=True, slots=True)
class _Dump:
    """One rank's passes. `counts` are by expert, [passes, L, E]."""

    path: Path
    rank: int
    passes: list[int]
    experts: npt.NDArray[np.int64]
    counts: StepPart
    stages: list[str] | None
    scheduled: list[int]

    @classmethod
    def read(cls, path: Path, saved: dict[str, Any]) -> _Dump:
        records = value_of(path, "", saved, _RECORDS, list)
        if not records:
            raise FormatError(path, _RECORDS, "no forward pass was recorded")
        ids = [value_of(path, _record(i), r, "forward_pass_id", int) for i, r in enumerate(records)]
        for at, (before, after) in enumerate(pairwise(ids), start=1):
            if after <= before:
                problem = f"{after} after {before}; expected passes in their order"
                raise FormatError(path, f"{_record(at)}.forward_pass_id", problem)
        ranks = [value_of(path, _record(i), r, "rank", int) for i, r in enumerate(records)]
        for at, rank in enumerate(ranks):
            if rank != ranks[0] or rank < 0:
                problem = f"{rank}; expected one rank in a file, and {_record(0)} has {ranks[0]}"
                raise FormatError(path, f"{_record(at)}.rank", problem)
        experts = _experts(path, saved)
        physical = [_physical_count(path, i, record, experts) for i, record in enumerate(records)]
        by_token = "topk_ids_of_layer" in records[0]
        dump = cls(
            path,
            ranks[0],
            ids,
            experts,
            _logical(path, physical, experts),
            [_stage(path, i, record) for i, record in enumerate(records)] if by_token else None,
            [
                len(value_of(path, _record(i), record, "input_ids", list)) if by_token else 0
                for i, record in enumerate(records)
            ],
        )
        steps = StepArray([dump.counts])
        for part in step_slices(steps):
            np.asarray(steps[part])  # raises where a count is negative
        return dump

    def require_like(self, other: _Dump) -> None:
        """Refuse another rank's passes if they are not the same, or were run on other replicas."""
        if self.passes != other.passes:
            wrong = min({*self.passes} ^ {*other.passes})
            problem = f"rank {self.rank} or rank {other.rank} has no pass {wrong}"
            raise FormatError(self.path, _RECORDS, problem)
        if not np.array_equal(self.experts, other.experts):
            raise FormatError(self.path, _MAP, f"not that of {other.path.name}")
        if (self.stages is None) != (other.stages is None):
            raise FormatError(self.path, _RECORDS, f"not of the mode of {other.path.name}")


def _summed(dumps: Sequence[_Dump]) -> LoadTrace:
    parts = [dump.counts for dump in dumps]

    def by_rank(begin: int, end: int) -> npt.NDArray[np.int64]:
        return np.stack([part.load(begin, end) for part in parts], axis=2)

    shape = (*parts[0].shape[:2], len(parts), parts[0].shape[2])
    trace = LoadTrace.from_sources(StepArray([StepPart(shape, parts[0].dtype, by_rank)]))
    if dumps[0].stages is None:
        # A rank counts its own tokens, or those that its GPU received: the file does not tell.
        return LoadTrace(trace.tokens)
    stages = zip(*(dump.stages or () for dump in dumps), strict=True)
    facts = StepFacts(
        stage=np.array([max(stage) for stage in stages]),  # a prefill on any rank makes it one
        scheduled=np.array([dump.scheduled for dump in dumps]).sum(axis=0),
    )
    return LoadTrace(trace.tokens, trace.source_tokens, facts)


def _record(index: int) -> str:
    return f"{_RECORDS}[{index}]"


def _experts(path: Path, saved: dict[str, Any]) -> npt.NDArray[np.int64]:
    """Return the expert of each physical id, int64 [L, P]."""
    if _MAP not in saved:
        raise _no_key(path, list(saved), _MAP)
    experts = tensor_array(path, _MAP, saved[_MAP])
    if experts.dtype.kind != "i" or experts.ndim != 2 or experts.size == 0 or experts.min() < 0:
        problem = f"{experts.dtype} {list(experts.shape)}; expected the experts' ids [layers, P]"
        raise FormatError(path, _MAP, problem)
    return experts.astype(np.int64)


def _physical_count(
    path: Path, index: int, record: object, experts: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    place = f"{_record(index)}.{_COUNT}"
    if not isinstance(record, dict) or _COUNT not in record:
        raise FormatError(path, _record(index), f"expected an object with the key {_COUNT!r}")
    counts = tensor_array(path, place, record[_COUNT])
    if counts.dtype.kind != "i" or counts.shape != experts.shape:
        expected = f"integers {list(experts.shape)}, as {_MAP}"
        raise FormatError(path, place, f"{counts.dtype} {list(counts.shape)}; expected {expected}")
    return counts


def _logical(
    path: Path, physical: Sequence[npt.NDArray[Any]], experts: npt.NDArray[np.int64]
) -> StepPart:
    """Sum the counts of an expert's replicas, as steps are loaded."""
    layers, most = len(experts), int(experts.max()) + 1
    keys = (experts + most * np.arange(layers)[:, np.newaxis]).ravel()
    order = np.argsort(keys, kind="stable")
    found, starts = np.unique(keys[order], return_index=True)

    def load(begin: int, end: int) -> npt.NDArray[np.int64]:
        counts = np.stack(physical[begin:end]).reshape(end - begin, -1)
        for step, replica in np.argwhere(counts < 0)[:1].tolist():
            layer, replica_of_layer = divmod(replica, experts.shape[1])
            place = f"{_record(begin + step)}.{_COUNT}[{layer}][{replica_of_layer}]"
            raise FormatError(path, place, f"{counts[step, replica]}; expected a count")
        summed = np.zeros((end - begin, layers * most), dtype=np.int64)
        summed[:, found] = np.add.reduceat(counts[:, order], starts, axis=1, dtype=np.int64)
        return summed.reshape(end - begin, layers, most)

    return StepPart((len(physical), layers, most), np.dtype(np.int64), load)


def _stage(path: Path, index: int, record: object) -> str:
    return _STAGES.get(value_of(path, _record(index), record, "forward_mode", int), "")


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


def _no_key(path: Path, keys: list[str], key: str = _KEY) -> FormatError:
    found = ", ".join(map(repr, keys[:8])) or "none"
    return FormatError(path, "", f"expected an object with the key {key!r}; keys found: {found}")
