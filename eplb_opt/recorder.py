"""Record the experts that tokens choose, layer by layer, while a model runs."""

from __future__ import annotations

import os
import time as clock
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_opt.adapters.tensors import to_array
from eplb_opt.errors import InvalidTokensError
from eplb_opt.formats.recording import TraceWriter
from eplb_opt.workload import Stage

__all__ = ["Recorder"]


class Recorder:
    """Count the tokens of every expert, step by step, into a recording.

    A step is added layer by layer with `add` and ended with `end_step`, or recorded at once with
    `record`. Only ended steps are written; what is written when, and what a killed process loses,
    is said at `TraceWriter`.

    Parameters
    ----------
    folder
        The recording, which `read_trace` reads.
    num_experts
        Experts per layer.
    layer_ids
        The number of each MoE layer in the model, ascending; every step has them all.
    sources
        GPUs whose tokens are counted apart; by default they are not.
    model, top_k, append, steps_per_file
        As for `TraceWriter`.

    Raises
    ------
    InvalidTokensError
        When `num_experts` or `sources` is below 1, or the layers' numbers do not rise.

    Examples
    --------
    >>> import tempfile
    >>> from eplb_opt.trace import read_trace
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Recorder(folder, num_experts=4, layer_ids=[3, 4]) as recorder:
    ...         recorder.add(3, [[0, 1], [1, 2], [-1, -1]])  # three rows, one of them padding
    ...         recorder.add(4, [[3, 1], [3, 0], [-1, -1]])
    ...         recorder.end_step(stage="decode")
    ...     trace = read_trace(folder)
    ...     print(trace.load().tolist(), trace.facts.scheduled)
    [[1, 2, 1, 0], [1, 1, 0, 2]] [3]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        num_experts: int,
        layer_ids: Sequence[int],
        *,
        sources: int | None = None,
        model: str | None = None,
        top_k: int | None = None,
        append: bool = False,
        steps_per_file: int = 256,
    ) -> None:
        layers = list(map(int, layer_ids))
        if min(num_experts, 1 if sources is None else sources, len(layers)) < 1:
            problem = f"{num_experts=}, {sources=}, {len(layers)} layers; expected at least 1 each"
            raise InvalidTokensError(problem)
        if any(a >= b for a, b in zip([-1, *layers], layers, strict=False)):
            raise InvalidTokensError(f"layer_ids are {layers}; expected rising numbers, from 0 up")
        self.num_experts = num_experts
        self._writer = TraceWriter(
            folder,
            model=model,
            top_k=top_k,
            layer_ids=layers,
            append=append,
            steps_per_file=steps_per_file,
        )
        self._row = {layer: row for row, layer in enumerate(layers)}
        self._sources = sources
        self._counts = np.zeros((len(layers), sources or 1, num_experts), dtype=np.int64)
        self._rows = np.full((len(layers), sources or 1), -1, dtype=np.int64)  # -1: no ids yet
        self._began: float | None = None
        # The system's clock may be set back while a recording runs; this one is not.
        self._epoch = clock.time() - clock.monotonic()

    @property
    def num_steps(self) -> int:
        """Steps of the recording, those in memory among them."""
        return self._writer.num_steps

    def begin_step(self) -> None:
        """Forget what was added since a step was ended; else the first `add` begins one."""
        self._counts.fill(0)
        self._rows.fill(-1)
        self._began = None

    def add(self, layer: int, topk_ids: Any, *, source: int = 0) -> None:
        """Count what tokens chose in one layer; a layer's tokens may come in several calls.

        Parameters
        ----------
        layer
            One of `layer_ids`.
        topk_ids : integer array or torch tensor, [rows, k]
            Expert ids; -1 is padding, and counts nowhere.
        source
            The GPU whose tokens they are, below `sources`.

        Raises
        ------
        InvalidTokensError
            When the layer or the source is not of this recording, or an id is no expert's; nothing
            is counted then.
        """
        if layer not in self._row:
            known = f"{min(self._row)} to {max(self._row)}"
            raise InvalidTokensError(f"layer {layer} is none of the {len(self._row)}, {known}")
        if not 0 <= source < self._counts.shape[1]:
            problem = f"layer {layer}: source {source} is none of {self._counts.shape[1]}"
            raise InvalidTokensError(problem)
        ids = self._checked(layer, to_array(topk_ids))
        if self._began is None:
            self._began = self._epoch + clock.monotonic()
        place = self._row[layer], source
        self._counts[place] += np.bincount(ids[ids >= 0], minlength=self.num_experts)
        self._rows[place] = max(0, self._rows[place]) + len(ids)

    def end_step(
        self,
        *,
        stage: Stage | None = None,
        scheduled: int | None = None,
        time: float | None = None,
    ) -> None:
        """End a step: every layer has been added.

        Parameters
        ----------
        stage
            ``"decode"`` or ``"prefill"``, if known.
        scheduled
            Tokens that the engine ran, padding included; by default the rows of a layer.
        time
            When the step began, in seconds; by default the clock at its first `add`.

        Raises
        ------
        InvalidTokensError
            When a layer had no ids. The step may be completed, or given up with `begin_step`.
        OSError
            When a file cannot be written; see `TraceWriter.flush`.
        """
        missing = [layer for layer, row in self._row.items() if self._rows[row].max() < 0]
        if missing:
            problem = f"step {self.num_steps}: no ids of layer {missing[0]}"
            others = f", nor of {len(missing) - 1} others" if len(missing) > 1 else ""
            raise InvalidTokensError(problem + others)
        counts = self._counts[:, 0] if self._sources is None else self._counts
        rows = int(self._rows.clip(min=0).sum(axis=1).max())
        self._writer.append(
            counts,
            stage=stage,
            scheduled=rows if scheduled is None else scheduled,
            time=self._began if time is None else time,
        )
        self.begin_step()

    def record(
        self,
        topk_ids: Any,
        *,
        stage: Stage | None = None,
        scheduled: int | None = None,
        time: float | None = None,
    ) -> None:
        """Record a whole step.

        Parameters
        ----------
        topk_ids : integer arrays or torch tensors, [layers, rows, k]
            Expert ids in the order of `layer_ids`; with `sources`, [layers, sources, rows, k].
        stage, scheduled, time
            As for `end_step`.

        Raises
        ------
        InvalidTokensError
            As `add` and `end_step`, and for other layers or sources; nothing is recorded then.
        """
        self.begin_step()
        layers = list(topk_ids)
        if len(layers) != len(self._row):
            raise InvalidTokensError(f"ids of {len(layers)} layers; expected {len(self._row)}")
        for layer, ids in zip(self._row, layers, strict=True):
            of_sources = [ids] if self._sources is None else list(ids)
            if len(of_sources) != self._counts.shape[1]:
                problem = f"ids of {len(of_sources)} sources; expected {self._counts.shape[1]}"
                raise InvalidTokensError(f"layer {layer}: {problem}")
            for source, own in enumerate(of_sources):
                self.add(layer, own, source=source)
        self.end_step(stage=stage, scheduled=scheduled, time=time)

    def flush(self) -> None:
        """Write the ended steps that are in memory; see `TraceWriter.flush`."""
        self._writer.flush()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def _checked(self, layer: int, ids: npt.NDArray[Any]) -> npt.NDArray[np.integer]:
        if ids.dtype.kind not in "iu" or ids.ndim != 2:
            problem = f"ids are {ids.dtype} {list(ids.shape)}; expected integers [rows, k]"
            raise InvalidTokensError(f"layer {layer}: {problem}")
        outside = (ids < -1) | (ids >= self.num_experts)
        for token, choice in np.argwhere(outside)[:1].tolist():
            problem = (
                f"{ids[token, choice]} is no id of {self.num_experts} experts "
                "(0 is the first, -1 is padding)"
            )
            raise InvalidTokensError(f"layer {layer}, token {token}, choice {choice}: {problem}")
        return ids
