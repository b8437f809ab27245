"""Recorded MoE traffic: token counts per step, or the top-k choice of every token."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_opt.demand import count_tokens
from eplb_opt.errors import FormatError, InvalidTokensError
from eplb_opt.formats.arrays import TOPK_KEYS, read_csv, read_npy, read_npz
from eplb_opt.formats.counts import checked_counts, step_slices
from eplb_opt.formats.recording import TraceWriter, holds_recording, read_recording
from eplb_opt.formats.sglang import read_dumps, read_json, read_pt
from eplb_opt.formats.trtllm import META, read_statistics
from eplb_opt.load_trace import LoadTrace, StepFacts, check_integers
from eplb_opt.step_array import StepArray, StepPart

__all__ = ["LoadTrace", "StepFacts", "TokenTrace", "read_trace", "write_trace"]

_MOST_EXPERTS_INFERRED = 2**16  # far above any model, below most vocabularies


@dataclass(frozen=True, slots=True, eq=False)
class TokenTrace:
    """The experts that every token chose, layer by layer.

    Parameters
    ----------
    topk_ids : integer array, [tokens, layers, k]
        Expert ids; -1 is padding. Keeps its dtype.
    num_experts
        Experts per layer.
    generation : integer array, [tokens]
        Which generation (one sequence being written) each token belongs to. The tokens of one
        share experts; to measure how far, and set `Workload.correlation` by it, is what this is
        for. Batches do not depend on it.

    Raises
    ------
    InvalidTokensError
        When an id is neither -1 nor an expert (the message names token, layer and choice), or the
        arrays' dtypes or shapes are not these.

    Examples
    --------
    >>> import numpy as np
    >>> ids = np.array([[[0, 1]], [[1, 2]], [[2, -1]]])
    >>> trace = TokenTrace(ids, num_experts=4, generation=np.zeros(3, dtype=np.int64))
    >>> trace.load().tolist()
    [[1, 2, 2, 0]]
    >>> trace.batches(2).shape
    (1, 1, 2, 2)
    """

    topk_ids: npt.NDArray[np.integer]
    num_experts: int
    generation: npt.NDArray[np.integer]

    def __post_init__(self) -> None:
        """Refuse what the class does not describe."""
        check_integers("topk_ids", self.topk_ids, "tokens", "layers", "k")
        check_integers("generation", self.generation, "tokens")
        if len(self.generation) != self.num_tokens:
            problem = f"generation has {len(self.generation)} tokens, topk_ids {self.num_tokens}"
            raise InvalidTokensError(problem)
        outside = (self.topk_ids < -1) | (self.topk_ids >= self.num_experts)
        if outside.any():
            token, layer, choice = np.argwhere(outside)[0].tolist()
            problem = (
                f"token {token}, layer {layer}, choice {choice}: "
                f"{self.topk_ids[token, layer, choice]} is no id of {self.num_experts} experts "
                "(0 is the first, -1 is padding)"
            )
            raise InvalidTokensError(problem)

    @property
    def num_tokens(self) -> int:
        """Recorded tokens."""
        return int(self.topk_ids.shape[0])

    @property
    def num_layers(self) -> int:
        """Recorded layers."""
        return int(self.topk_ids.shape[1])

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return int(self.topk_ids.shape[2])

    def load(self) -> npt.NDArray[np.int64]:
        """Count the tokens of every expert; padding counts for nothing.

        Returns
        -------
        int64 array, [layers, experts]
        """
        load = np.empty((self.num_layers, self.num_experts), dtype=np.int64)
        for layer in range(self.num_layers):
            ids = self.topk_ids[:, layer]
            load[layer] = np.bincount(ids[ids >= 0].astype(np.int64), minlength=self.num_experts)
        return load

    def batches(
        self, tokens_per_batch: int, *, steps: int | None = None
    ) -> npt.NDArray[np.integer]:
        """Cut the trace into batches of consecutive tokens; an incomplete last one is dropped.

        Parameters
        ----------
        tokens_per_batch
            Tokens in each batch.
        steps
            How many batches, from the first; all complete ones by default.

        Returns
        -------
        integer array, [steps, layers, tokens_per_batch, k]
            Expert ids, a view of `topk_ids`.

        Raises
        ------
        InvalidTokensError
            When the trace has not that many complete batches, or not even one.
        """
        if tokens_per_batch < 1 or (steps is not None and steps < 1):
            problem = f"tokens_per_batch={tokens_per_batch}, steps={steps}: both must be at least 1"
            raise InvalidTokensError(problem)
        complete = self.num_tokens // tokens_per_batch
        wanted = max(1, complete) if steps is None else steps
        if wanted > complete:
            problem = (
                f"{self.num_tokens} tokens make {complete} complete batches of {tokens_per_batch}; "
                f"{wanted} wanted"
            )
            raise InvalidTokensError(problem)
        used = self.topk_ids[: wanted * tokens_per_batch]
        shape = (wanted, tokens_per_batch, self.num_layers, self.top_k)
        return used.reshape(shape).swapaxes(1, 2)

    def counted(self, tokens_per_batch: int) -> LoadTrace:
        """Make a step of every batch of `batches`: its counts, which are taken when it is loaded.

        Raises
        ------
        InvalidTokensError
            When the trace has not even one complete batch.

        Examples
        --------
        >>> import numpy as np
        >>> ids = np.array([[[0, 1]], [[1, 2]], [[2, -1]]])
        >>> trace = TokenTrace(ids, num_experts=4, generation=np.zeros(3, dtype=np.int64))
        >>> trace.counted(2).tokens[0].tolist()
        [[1, 2, 1, 0]]
        """
        ids = StepPart.of(self.batches(tokens_per_batch))
        counts = ids.map(lambda batches: count_tokens(batches, self.num_experts))
        scheduled = np.full(counts.shape[0], tokens_per_batch)
        facts = StepFacts(scheduled=scheduled)
        return LoadTrace(StepArray([counts]), facts=facts, top_k=self.top_k)


def read_trace(
    path: str | os.PathLike[str], *, num_experts: int | None = None
) -> LoadTrace | TokenTrace:
    r"""Read recorded traffic; suffix and array names decide how, never guesses from the values.

    ============= ==================================================== ==============
    suffix        content                                              gives
    ============= ==================================================== ==============
    .json         SGLang's ``logical_count``, [L][E] or [T][L][E]      `LoadTrace`
    .pt, .pth     a dump of SGLang's recorder (needs PyTorch): the     `LoadTrace`
                  same from ``stat``, or one rank's passes from
                  ``per_pass`` or ``per_token``, the latter with stage
                  and scheduled tokens
    .npy          counts [L, E] or [T, L, E]; memory-mapped            `LoadTrace`
    .csv          counts: a row per layer, a blank line between steps, `LoadTrace`
                  ``#`` starts a comment
    .npz          counts under exactly one of the names ``tokens``,    `LoadTrace`
                  ``counts``, ``logical_count``, ``load``
    .npz          ids [tokens, k] (one layer) or [tokens, layers, k]   `TokenTrace`
                  under exactly one of ``topk_ids``, ``topk``,
                  ``data``; may add ``generation`` [tokens]
    .safetensors  one file of a recording (see `write_trace`)          `LoadTrace`
    (a folder)    a recording: ``steps-{first step}.safetensors``;     `LoadTrace`
                  memory-mapped (needs the extra ``files``)
    (a folder)    the .pt files that SGLang's recorder wrote, one for  `LoadTrace`
                  each rank, summed over ranks
    (a folder)    TensorRT-LLM's expert statistics: ``meta_info.json`` `LoadTrace`
                  and ``rank{r}.safetensors`` with counts [E] under
                  ``{iteration}_{layer}``, summed over ranks (needs the
                  extra ``files``)
    ============= ==================================================== ==============

    Counts are whole numbers below 2^63, or floats that are whole and below 2^53. Counts [L, E] are
    one step.

    Parameters
    ----------
    path
        The file, or the folder.
    num_experts
        Experts per layer. Where the file holds ids, 1 + the largest id by default, which misses
        experts that no token chose. Where it holds counts, the number that must be found.

    Returns
    -------
    LoadTrace or TokenTrace

    Warns
    -----
    UserWarning
        When every count that is not zero falls in one block of consecutive experts, at most half
        of them: counts of one GPU only?

    Raises
    ------
    FormatError
        For all that is not as above: the message names the place in the file. Python objects in a
        file (pickles) are refused, never loaded.
    SolverUnavailableError
        When the file needs PyTorch or safetensors and it is missing.
    OSError
        When the file cannot be read.

    Notes
    -----
    Memory-mapped integers are checked part by part and never copied: .npy and .pt files may be
    larger than memory, and recordings are not even read before they are used. JSON and CSV are
    streamed: beside the int64 result, one row is in memory. An .npz is read into memory once.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "load.csv"
    ...     _ = path.write_text("# two layers, three experts\n3,0,1\n2,2,0\n")
    ...     read_trace(path).load().tolist()
    [[3, 0, 1], [2, 2, 0]]
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if path.is_dir():
        return _checked(path, _read_folder(path), num_experts)
    if suffix == ".npz":
        key, array, generation = read_npz(path)
        if key in TOPK_KEYS:
            return _token_trace(path, key, array, generation, num_experts)
        return _checked(path, LoadTrace(checked_counts(path, key, array)), num_experts)
    if suffix not in _COUNT_READERS:
        known = ", ".join([*_COUNT_READERS, ".npz"])
        raise FormatError(path, "", f"unknown suffix {path.suffix!r}; known are {known}")
    return _checked(path, _COUNT_READERS[suffix](path), num_experts)


def write_trace(trace: LoadTrace, folder: str | os.PathLike[str], *, append: bool = False) -> None:
    """Write counts as a recording, with what is known of the steps, a few steps at a time.

    Parameters
    ----------
    trace
        The counts; those of a `TokenTrace` are its `~TokenTrace.counted`.
    folder
        The recording, a folder of safetensors files: ``tokens`` or ``source_tokens``, ``stage``,
        ``scheduled``, ``time``, with the rest in the metadata. Counts are written in the narrowest
        integers that hold them. It is made if need be, and must not hold a recording yet.
    append
        Go on after the last step of the recording that is there.

    Raises
    ------
    FileExistsError
        When the folder holds a recording and `append` is false.
    FormatError, InvalidTokensError
        When the steps do not go with those that are there.
    SolverUnavailableError
        When safetensors is not installed: it comes with the extra ``files``.
    OSError
        When it cannot be written: the message says which steps are missing.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> trace = LoadTrace(np.array([[[3, 1]], [[2, 5]]]), top_k=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_trace(trace, folder)
    ...     read_trace(folder).load().tolist()
    [[5, 6]]
    """
    columns = {name: column.tolist() for name, column in trace.facts.columns().items()}
    counts = trace.tokens if trace.source_tokens is None else trace.source_tokens
    with TraceWriter(
        folder,
        model=trace.model,
        top_k=trace.top_k,
        layer_ids=trace.layer_ids,
        append=append,
    ) as writer:
        for part in step_slices(counts):
            for step, tokens in enumerate(np.asarray(counts[part]), start=part.start):
                facts = {name: column[step] for name, column in columns.items()}
                writer.append(tokens, **facts)


_COUNT_READERS: dict[str, Callable[[Path], LoadTrace]] = {
    ".json": lambda path: LoadTrace(read_json(path)),
    ".pt": read_pt,
    ".pth": read_pt,
    ".npy": lambda path: LoadTrace(read_npy(path)),
    ".csv": lambda path: LoadTrace(read_csv(path)),
    ".safetensors": read_recording,
}


def _read_folder(folder: Path) -> LoadTrace:
    if holds_recording(folder):
        return read_recording(folder)
    if (folder / META).exists():
        return read_statistics(folder)
    if any(path.suffix in (".pt", ".pth") for path in folder.iterdir()):
        return read_dumps(folder)
    problem = (
        "no traffic in this folder; known are a recording (steps-000000000.safetensors), "
        f"SGLang's dumps (.pt) and TensorRT-LLM's statistics ({META})"
    )
    raise FormatError(folder, "", problem)


def _checked(path: Path, trace: LoadTrace, num_experts: int | None) -> LoadTrace:
    if num_experts not in (None, trace.num_experts):
        problem = f"{trace.num_experts} experts per layer, but num_experts={num_experts}"
        raise FormatError(path, "", problem)
    _warn_of_one_gpu(path, trace)
    return trace


def _token_trace(
    path: Path,
    key: str,
    ids: npt.NDArray[Any],
    generation: npt.NDArray[Any] | None,
    num_experts: int | None,
) -> TokenTrace:
    if generation is None:
        generation = np.zeros(len(ids) if ids.ndim else 0, dtype=np.int64)
    try:
        ids = ids[:, np.newaxis] if ids.ndim == 2 else ids
        check_integers(key, ids, "tokens", "layers", "k")
        if num_experts is None:
            num_experts = _inferred_experts(ids)
        return TokenTrace(ids, num_experts, generation)
    except InvalidTokensError as error:
        raise FormatError(path, key, str(error)) from error


def _inferred_experts(ids: npt.NDArray[np.integer]) -> int:
    experts = int(ids.max()) + 1
    if not 1 <= experts <= _MOST_EXPERTS_INFERRED:
        problem = f"largest id {experts - 1}: are these expert ids? If so, give num_experts"
        raise InvalidTokensError(problem)
    return experts


def _warn_of_one_gpu(path: Path, trace: LoadTrace) -> None:
    """Warn when all load lies on few consecutive experts: stops at the first part that refutes."""
    num_experts = trace.num_experts
    used = np.zeros(num_experts, dtype=bool)
    for part in step_slices(trace.tokens):
        used |= np.asarray(trace.tokens[part]).any(axis=(0, 1))
        experts = np.flatnonzero(used)
        if experts.size and 2 * (experts[-1] - experts[0] + 1) > num_experts:
            return
    if experts.size:
        message = (
            f"{path}: only experts {experts[0]} to {experts[-1]} of {num_experts} have any load. "
            "If these are the counts of one GPU only, sum those of all GPUs before you use them."
        )
        warnings.warn(message, UserWarning, stacklevel=4)
