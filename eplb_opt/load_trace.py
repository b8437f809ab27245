"""Recorded traffic as token counts, step by step, with what is known of each step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from eplb_opt.errors import InvalidTokensError
from eplb_opt.formats.counts import step_slices
from eplb_opt.step_array import StepArray, StepCounts, StepPart
from eplb_opt.workload import Stage

__all__ = ["LoadTrace", "StepFacts", "check_integers"]

_STAGES = ("", *get_args(Stage))


@dataclass(frozen=True, slots=True, eq=False)
class StepFacts:
    """What is known of each step besides its counts; None where it is not known.

    Parameters
    ----------
    stage : str array, [steps]
        ``"decode"``, ``"prefill"``, or ``""`` for a step of which it is not known.
    scheduled : integer array, [steps]
        Tokens that the engine ran, over all GPUs, padding included: engines tell the stage by it.
    time : float array, [steps]
        When the step began: seconds on a clock that does not turn back.

    Raises
    ------
    InvalidTokensError
        When a column breaks this, or has other steps than the others; the message names the step.
    """

    stage: npt.NDArray[np.str_] | None = None
    scheduled: npt.NDArray[np.integer] | None = None
    time: npt.NDArray[np.floating] | None = None

    def __post_init__(self) -> None:
        """Refuse what the class does not describe."""
        for name, column in self.columns().items():
            if column.ndim != 1 or column.dtype.kind not in _KINDS[name]:
                problem = f"{name} is {column.dtype} {list(column.shape)}"
                raise InvalidTokensError(f"{problem}; expected {_EXPECTED[name]} [steps]")
        if self.stage is not None:
            _refuse("stage", self.stage, ~np.isin(self.stage, _STAGES), "'decode', 'prefill' or ''")
        if self.scheduled is not None:
            _refuse("scheduled", self.scheduled, self.scheduled < 0, "0 or more tokens")
        if self.time is not None:
            wrong = ~((self.time >= 0) & (self.time < np.inf))
            _refuse("time", self.time, wrong, "seconds from 0 up, and finite")
            back = np.diff(self.time, prepend=self.time[:1]) < 0
            _refuse("time", self.time, back, "no less than at the step before")

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return what is known, by name."""
        names = ("stage", "scheduled", "time")
        return {name: found for name in names if (found := getattr(self, name)) is not None}


_KINDS = {"stage": "U", "scheduled": "iu", "time": "f"}
_EXPECTED = {"stage": "strings", "scheduled": "integers", "time": "floats"}


def _refuse(
    name: str, column: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], expected: str
) -> None:
    for step in np.flatnonzero(wrong)[:1]:
        problem = f"{name}[{step}] is {column[step].item()!r}; expected {expected}"
        raise InvalidTokensError(problem)


@dataclass(frozen=True, slots=True, eq=False)
class LoadTrace:
    """Token counts per step, layer and expert.

    Parameters
    ----------
    tokens : integer array or `StepArray`, [steps, layers, experts]
        Not negative, which `read_trace` has checked for its files and nobody for a hand-made trace.
        It may be memory-mapped, and keeps its dtype. ``numpy.asarray(tokens[a:b])`` loads steps,
        whichever of the two it is.
    source_tokens : the same, [steps, layers, sources, experts]
        The counts by the GPU whose tokens they are, where they were recorded so; they sum to
        `tokens`, see `from_sources`.
    facts
        What is known of each step.
    model
        The model's name.
    top_k
        Experts per token.
    layer_ids
        Each layer's number in the model, ascending, its dense layers counted.

    Raises
    ------
    InvalidTokensError
        When the shapes or dtypes are not these.

    Examples
    --------
    >>> import numpy as np
    >>> trace = LoadTrace(np.array([[[0, 0], [3, 1]], [[0, 0], [2, 5]]]))
    >>> trace.load().tolist()
    [[0, 0], [5, 6]]
    >>> trace.moe_layers().tolist()
    [1]
    >>> trace.select_layers([1]).tokens.shape
    (2, 1, 2)
    """

    tokens: StepCounts
    source_tokens: StepCounts | None = None
    facts: StepFacts = StepFacts()
    model: str | None = None
    top_k: int | None = None
    layer_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what the class does not describe."""
        check_integers("tokens", self.tokens, "steps", "layers", "experts")
        if (sources := self.source_tokens) is not None:
            check_integers("source_tokens", sources, "steps", "layers", "sources", "experts")
            if (*sources.shape[:2], sources.shape[3]) != self.tokens.shape:
                problem = f"source_tokens is {list(sources.shape)}, tokens {self.tokens.shape}"
                raise InvalidTokensError(problem)
        for name, column in self.facts.columns().items():
            if len(column) != self.num_steps:
                problem = f"{name} has {len(column)} steps, tokens {self.num_steps}"
                raise InvalidTokensError(problem)
        if self.top_k is not None and self.top_k < 1:
            raise InvalidTokensError(f"top_k is {self.top_k}; expected 1 or more")
        if self.layer_ids is not None:
            rising = all(a < b for a, b in zip((-1, *self.layer_ids), self.layer_ids, strict=False))
            if len(self.layer_ids) != self.num_layers or not rising:
                problem = f"layer_ids are {list(self.layer_ids)}; expected {self.num_layers} rising"
                raise InvalidTokensError(f"{problem} numbers, from 0 or more")

    @classmethod
    def from_sources(cls, source_tokens: StepCounts, **known: Any) -> LoadTrace:
        """Make a trace of counts by source GPU; their sums are taken as steps are loaded.

        Parameters
        ----------
        source_tokens : integer array or `StepArray`, [steps, layers, sources, experts]
            Not negative.
        **known
            As for the class: ``facts``, ``model``, ``top_k``, ``layer_ids``.

        Examples
        --------
        >>> import numpy as np
        >>> trace = LoadTrace.from_sources(np.array([[[[1, 2], [3, 0]]]]))
        >>> np.asarray(trace.tokens).tolist()
        [[[4, 2]]]
        """
        check_integers("source_tokens", source_tokens, "steps", "layers", "sources", "experts")
        steps = StepPart(
            source_tokens.shape,
            source_tokens.dtype,
            lambda begin, end: np.asarray(source_tokens[begin:end]),
        )
        tokens = StepArray([steps.map(lambda counts: counts.sum(axis=2, dtype=np.int64))])
        return cls(tokens, source_tokens, **known)

    @property
    def num_steps(self) -> int:
        """Recorded steps."""
        return int(self.tokens.shape[0])

    @property
    def num_layers(self) -> int:
        """Layers, dense ones included where the file has rows for them."""
        return int(self.tokens.shape[1])

    @property
    def num_experts(self) -> int:
        """Experts per layer."""
        return int(self.tokens.shape[2])

    def load(self) -> npt.NDArray[np.int64]:
        """Sum the tokens over all steps, a few MiB at a time.

        Returns
        -------
        int64 array, [layers, experts]

        Raises
        ------
        InvalidTokensError
            When an expert's sum is negative or exceeds 2^63-1.
        """
        total = np.zeros(self.tokens.shape[1:], dtype=np.int64)
        rounded = np.zeros(total.shape)
        for part in step_slices(self.tokens):
            counts = np.asarray(self.tokens[part])
            total += counts.sum(axis=0, dtype=np.int64)
            if counts.dtype.itemsize == 8:  # smaller counts would need 2^31 steps
                rounded += counts.sum(axis=0, dtype=np.float64)
        # int64 wraps in silence: to a negative number first, and by 2^64 or more after that.
        wrapped = (total < 0) | (rounded >= 1.5 * 2**63)
        if wrapped.any():
            layer, expert = np.argwhere(wrapped)[0].tolist()
            problem = (
                f"layer {layer}, expert {expert}: a count is negative, "
                "or the sum over steps exceeds 2^63-1"
            )
            raise InvalidTokensError(problem)
        return total

    def moe_layers(self) -> npt.NDArray[np.intp]:
        """Find the layers with any token; dense layers are recorded as rows of zeros.

        Returns
        -------
        intp array, [MoE layers], ascending
        """
        return np.flatnonzero(self.load().any(axis=1))

    def idle_steps(self) -> npt.NDArray[np.intp]:
        """Find the steps without any token, such as the unused end of a recorder's buffer.

        Returns
        -------
        intp array, [idle steps], ascending
        """
        used = [np.asarray(self.tokens[part]).any(axis=(1, 2)) for part in step_slices(self.tokens)]
        return np.flatnonzero(~np.concatenate(used))

    def select_layers(self, layers: npt.ArrayLike) -> LoadTrace:
        """Keep some layers, in the given order.

        Parameters
        ----------
        layers : integers, [selected]
            Indices into this trace's layers, such as `moe_layers` returns. Consecutive ones give a
            view, which leaves a memory-mapped trace on disk; others are copied. Of a `StepArray`,
            nothing is loaded either way.

        Raises
        ------
        InvalidTokensError
            When there is none, or one is not a layer of this trace.
        """
        chosen = np.asarray(layers)
        check_integers("layers", chosen, "selected")
        outside = chosen[(chosen < 0) | (chosen >= self.num_layers)]
        if outside.size:
            problem = f"layer {outside[0]} is outside 0..{self.num_layers - 1}"
            raise InvalidTokensError(problem)
        steps = np.diff(chosen.astype(np.int64))
        ids = None
        if self.layer_ids is not None and (steps > 0).all():  # otherwise they no longer rise
            ids = tuple(self.layer_ids[layer] for layer in chosen.tolist())
        kept = slice(int(chosen[0]), int(chosen[-1]) + 1) if (steps == 1).all() else chosen
        sources = self.source_tokens
        return replace(
            self,
            tokens=self.tokens[:, kept],
            source_tokens=None if sources is None else sources[:, kept],
            layer_ids=ids,
        )


def check_integers(name: str, array: StepCounts, *axes: str) -> None:
    """Raise `InvalidTokensError` unless an array holds integers and has these axes, none empty."""
    if array.dtype.kind not in "iu" or array.ndim != len(axes) or array.size == 0:
        expected = f"expected integers [{', '.join(axes)}], not empty"
        raise InvalidTokensError(f"{name} is {array.dtype} {list(array.shape)}; {expected}")
