"""Heat: the load that engines collect to rearrange experts by, and when they act on it.

Each engine's cycle is a small state machine that is told of every forward iteration. At its end the
machine says whether the iteration was collected, which load is complete, and which layers have
their new placement from the next iteration on. Iterations count from 1 here:

=================== =========== ==================================================================
`SlidingWindow`     vLLM        sums the last W iterations and rearranges every N, all layers at
                                once
`CollectThenDecide` vLLM-Ascend collects C iterations, decides for A, updates a layer in each of
                                the next L, and starts again
`PeriodicDump`      SGLang      sums the last W iterations, dumps and empties that every N, and
                                updates the layers in chunks
=================== =========== ==================================================================
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from eplb_opt.arrays import as_array, narrowed
from eplb_opt.errors import InvalidTokensError
from eplb_opt.workload import Stage

__all__ = [
    "CollectThenDecide",
    "Heat",
    "HeatStage",
    "HeatStep",
    "PeriodicDump",
    "SlidingWindow",
    "StageFilter",
    "stage_of",
]

HeatStage: TypeAlias = Literal["all", "decode", "prefill"]


def stage_of(scheduled: int, most_decode_tokens: int) -> Stage:
    """Tell an iteration's stage as vLLM-Ascend does: by its size, so that mixed ones are prefill.

    Parameters
    ----------
    scheduled
        Tokens that were run, padding included.
    most_decode_tokens
        The most that a decode iteration can have: sequences at a time (``max_num_seqs``) times
        tokens each, 1 plus those speculated. Of one GPU or of all, as `scheduled`.

    Examples
    --------
    >>> stage_of(256, 256), stage_of(257, 256)
    ('decode', 'prefill')
    """
    return "prefill" if scheduled > most_decode_tokens else "decode"


@dataclass(frozen=True, slots=True)
class StageFilter:
    """Which iterations are collected: ``eplb_heat_collection_stage``.

    Parameters
    ----------
    stage
        ``"all"``, or one stage.
    most_decode_tokens
        As for `stage_of`; needed for one stage.

    Raises
    ------
    ValueError
        When the stage is unknown, or `most_decode_tokens` is missing or below 1.
    """

    stage: HeatStage = "all"
    most_decode_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse what the class does not describe."""
        if self.stage not in get_args(HeatStage):
            known = ", ".join(get_args(HeatStage))
            raise ValueError(f"no stage is called {self.stage!r}; the known ones are: {known}")
        if self.stage != "all" and (self.most_decode_tokens or 0) < 1:
            problem = f"most_decode_tokens is {self.most_decode_tokens}"
            raise ValueError(f"stage {self.stage!r} is told by the tokens of a decode: {problem}")

    def takes(self, scheduled: int | None) -> bool:
        """Tell whether an iteration is collected.

        Raises
        ------
        ValueError
            When a stage is wanted and `scheduled` is not known.
        """
        if self.stage == "all" or self.most_decode_tokens is None:
            return True
        if scheduled is None:
            raise ValueError(f"stage {self.stage!r} is told by the scheduled tokens; give them")
        return stage_of(scheduled, self.most_decode_tokens) == self.stage


@dataclass(frozen=True, slots=True, eq=False)
class HeatStep:
    """What an iteration was to the cycle, at its end.

    Attributes
    ----------
    collected
        Whether its load was added to the window.
    load : int64 array, [layers, experts], or None
        The load of a window that is complete now: what to decide by.
    committed
        The layers that have their new placement from the next iteration on.
    """

    collected: bool
    load: npt.NDArray[np.int64] | None = None
    committed: range = range(0)


class Heat(Protocol):
    """A cycle of collecting, deciding and updating."""

    def step(self, tokens: npt.ArrayLike, scheduled: int | None = None) -> HeatStep:
        """Tell the cycle of an iteration that has been run.

        Parameters
        ----------
        tokens : integers, [layers, experts]
            Tokens of each expert over all GPUs; all zero for a dummy iteration.
        scheduled
            Tokens that were run, padding included; needed where a stage is collected.

        Raises
        ------
        InvalidTokensError
            When the counts are none, negative, or of another shape than before.
        ValueError
            When `scheduled` is needed.
        """

    def decline(self) -> None:
        """Tell the cycle that nothing changes by the load that its last step gave."""


@dataclass(slots=True)
class SlidingWindow:
    """vLLM's cycle: a sliding window, and a rearrangement every so often.

    At every `step_interval`-th iteration the load of the last `window_size` is complete, and all
    layers are rearranged at once (``use_async=False``; moves in the background commit when they are
    done, which no interval says). The count starts at three quarters, so that the first time comes
    early. The window goes on afterwards. A dummy iteration leaves the window as it is and advances
    the interval, for all ranks have to rearrange together; one of another stage does neither.

    Parameters
    ----------
    window_size, step_interval
        vLLM's ``EPLBConfig``.
    collect
        Which iterations count; vLLM takes all. (The ``load_collection_phase`` of vLLM-Ascend's
        second model runner differs: what it does not collect advances the interval.)

    References
    ----------
    vLLM, ``vllm/distributed/eplb/eplb_state.py``. It counts by replica, and takes the whole window
    for the placement of the day; here counts are by expert, which differs where a window is longer
    than the interval.

    Examples
    --------
    >>> heat = SlidingWindow(window_size=2, step_interval=4)
    >>> for n in (1, 2, 3, 4, 5):
    ...     step = heat.step([[n, 0]])
    ...     print(n, step.load, step.committed)
    1 [[1 0]] range(0, 1)
    2 None range(0, 0)
    3 None range(0, 0)
    4 None range(0, 0)
    5 [[9 0]] range(0, 1)
    """

    window_size: int = 1000
    step_interval: int = 3000
    collect: StageFilter = StageFilter()
    _window: _Window = field(init=False, repr=False)
    _since: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Start three quarters through the interval."""
        _check_at_least_one(window_size=self.window_size, step_interval=self.step_interval)
        self._window = _Window(self.window_size)
        self._since = self.step_interval - self.step_interval // 4

    def step(self, tokens: npt.ArrayLike, scheduled: int | None = None) -> HeatStep:
        """Tell the cycle of an iteration; see `Heat.step`."""
        counts = self._window.checked(tokens)
        if not self.collect.takes(scheduled):
            return HeatStep(False)
        collected = bool(counts.any())
        if collected:
            self._window.add(counts)
        self._since += 1
        if self._since < self.step_interval:
            return HeatStep(collected)
        self._since = 0
        return HeatStep(collected, self._window.load(), range(len(counts)))

    def decline(self) -> None:
        """Nothing: the interval goes on as it would."""


@dataclass(slots=True)
class CollectThenDecide:
    """vLLM-Ascend's cycle: collect, decide, update layer by layer, and start again.

    Iterations 1 to C are collected, and at the end of the C-th their load is complete. The decision
    has the next A iterations to run beside. Layer l then has its new placement at the end of
    iteration C + A + 1 + l, and after the last layer the cycle starts again with an empty window.
    While it collects, an iteration of another stage neither counts nor advances the cycle; later on
    every iteration advances it.

    Parameters
    ----------
    collection_interval, algorithm_interval
        C and A: ``expert_heat_collection_interval`` and ``algorithm_execution_interval``.
    collect
        Which iterations count: ``eplb_heat_collection_stage``.

    References
    ----------
    vLLM-Ascend, ``vllm_ascend/eplb/eplb_updator.py``, and its user guide on EPLB.

    Examples
    --------
    >>> heat = CollectThenDecide(collection_interval=2, algorithm_interval=1)
    >>> for n in (1, 2, 3, 4, 5, 6):
    ...     step = heat.step([[n, 0], [0, n]])
    ...     print(n, step.collected, None if step.load is None else step.load[0], step.committed)
    1 True None range(0, 0)
    2 True [3 0] range(0, 0)
    3 False None range(0, 0)
    4 False None range(0, 1)
    5 False None range(1, 2)
    6 True None range(0, 0)
    """

    collection_interval: int = 600
    algorithm_interval: int = 50
    collect: StageFilter = StageFilter()
    _window: _Window = field(init=False, repr=False)
    _done: int = field(init=False, repr=False, default=0)  # iterations of this cycle

    def __post_init__(self) -> None:
        """Start with nothing collected."""
        _check_at_least_one(
            collection_interval=self.collection_interval,
            algorithm_interval=self.algorithm_interval,
        )
        self._window = _Window()

    def step(self, tokens: npt.ArrayLike, scheduled: int | None = None) -> HeatStep:
        """Tell the cycle of an iteration; see `Heat.step`."""
        counts = self._window.checked(tokens)
        if self._done < self.collection_interval:
            if not self.collect.takes(scheduled):
                return HeatStep(False)
            self._window.add(counts)
            self._done += 1
            if self._done < self.collection_interval:
                return HeatStep(True)
            return HeatStep(True, self._window.dump())
        layer = self._done - self.collection_interval - self.algorithm_interval
        self._done = 0 if layer + 1 == len(counts) else self._done + 1
        return HeatStep(False, committed=range(layer, layer + 1) if layer >= 0 else range(0))

    def decline(self) -> None:
        """Nothing: layers take their iterations also where none changes."""


@dataclass(slots=True)
class PeriodicDump:
    """SGLang's cycle: dump the recorder every so often, and update chunks of layers.

    At the end of iteration ``iterations + 1`` the load of the last `window_size` iterations is
    complete, and the window is emptied. Without chunks all layers have their new placement then,
    and the next dump is `iterations` later. With chunks, each takes an iteration from the next on,
    and the count towards the next dump starts with the last chunk. All iterations are recorded.

    Parameters
    ----------
    iterations
        ``--eplb-rebalance-num-iterations``.
    window_size
        ``--expert-distribution-recorder-buffer-size``, at most `iterations`; by default as many.
    layers_per_chunk
        ``--eplb-rebalance-layers-per-chunk``; by default all layers at once.

    References
    ----------
    SGLang, ``srt/eplb/eplb_manager.py`` and ``srt/eplb/expert_distribution.py``.

    Examples
    --------
    >>> heat = PeriodicDump(iterations=2)
    >>> steps = [heat.step([[n, 0]]) for n in (1, 2, 3, 4, 5)]
    >>> [None if step.load is None else step.load.tolist() for step in steps]
    [None, None, [[5, 0]], None, [[9, 0]]]
    """

    iterations: int = 1000
    window_size: int | None = None
    layers_per_chunk: int | None = None
    _window: _Window = field(init=False, repr=False)
    _since: int = field(init=False, repr=False, default=0)
    _next_layer: int | None = field(init=False, repr=False, default=None)  # while chunks remain

    def __post_init__(self) -> None:
        """Start with nothing collected."""
        size = self.iterations if self.window_size is None else self.window_size
        _check_at_least_one(iterations=self.iterations, window_size=size)
        if self.layers_per_chunk is not None:
            _check_at_least_one(layers_per_chunk=self.layers_per_chunk)
        if size > self.iterations:
            problem = f"window_size is {size}, iterations {self.iterations}"
            raise ValueError(f"{problem}; the window must not be longer")
        self._window = _Window(size)

    def step(self, tokens: npt.ArrayLike, scheduled: int | None = None) -> HeatStep:
        """Tell the cycle of an iteration; see `Heat.step`."""
        counts = self._window.checked(tokens)
        self._window.add(counts)
        layers = len(counts)
        if self._next_layer is not None:
            first, last = self._next_layer, min(self._next_layer + self._chunk(layers), layers)
            self._next_layer = last if last < layers else None
            self._since = 1
            return HeatStep(True, committed=range(first, last))
        if self._since < self.iterations:
            self._since += 1
            return HeatStep(True)
        load = self._window.dump()
        if self._chunk(layers) < layers:
            self._next_layer = 0
            return HeatStep(True, load)
        self._since = 1
        return HeatStep(True, load, range(layers))

    def decline(self) -> None:
        """Count towards the next dump from this one on; no chunk is updated."""
        self._next_layer = None
        self._since = 1

    def _chunk(self, layers: int) -> int:
        return layers if self.layers_per_chunk is None else self.layers_per_chunk


class _Window:
    """The sum over the last iterations, at most `size` of them; exact, in int64."""

    def __init__(self, size: int | None = None) -> None:
        self._size = size
        self._kept: deque[npt.NDArray[np.integer]] = deque()
        self._sum = np.zeros((0, 0), dtype=np.int64)

    def checked(self, tokens: npt.ArrayLike) -> npt.NDArray[np.integer]:
        """Return an iteration's counts; the first one settles their shape."""
        counts: npt.NDArray[Any] = as_array(tokens, "tokens", InvalidTokensError)
        if counts.dtype.kind not in "iu" or counts.ndim != 2 or counts.size == 0:
            problem = f"tokens are {counts.dtype} {list(counts.shape)}"
            raise InvalidTokensError(f"{problem}; expected integers [layers, experts], not empty")
        if self._sum.size == 0:
            self._sum = np.zeros(counts.shape, dtype=np.int64)
        if counts.shape != self._sum.shape:
            problem = f"tokens are {list(counts.shape)}, and {list(self._sum.shape)} before"
            raise InvalidTokensError(problem)
        for layer, expert in np.argwhere(counts < 0)[:1].tolist():
            problem = f"layer {layer}, expert {expert}: {counts[layer, expert]} tokens"
            raise InvalidTokensError(f"{problem}; expected 0 or more")
        return counts

    def add(self, counts: npt.NDArray[np.integer]) -> None:
        self._sum += counts.astype(np.int64, copy=False)
        if self._size is None:
            return
        self._kept.append(narrowed(counts))
        if len(self._kept) > self._size:
            self._sum -= self._kept.popleft().astype(np.int64)

    def load(self) -> npt.NDArray[np.int64]:
        return self._sum.copy()

    def dump(self) -> npt.NDArray[np.int64]:
        """Return the sum, and start again."""
        load = self._sum
        self._sum = np.zeros_like(load)
        self._kept.clear()
        return load


def _check_at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; expected 1 or more")
