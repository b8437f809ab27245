"""Batches to route, cut from traffic of any kind: a few steps at a time, over its MoE layers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt.arrays import as_integer
from eplb_opt.demand import COUNTS_ALLOWED, count_tokens, out_of_range
from eplb_opt.errors import InvalidTokensError
from eplb_opt.heat import HeatStage
from eplb_opt.trace import LoadTrace, StepFacts, TokenTrace, read_trace
from eplb_opt.workload import Stage, Workload

__all__ = [
    "STAGES",
    "BatchFacts",
    "BatchSteps",
    "Batches",
    "Collected",
    "Traffic",
    "local_batches",
    "moe_layers",
    "opened",
]

Traffic: TypeAlias = "Workload | LoadTrace | TokenTrace | str | os.PathLike[str]"

STAGES: tuple[Stage, ...] = get_args(Stage)

_STEPS_AT_ONCE = 32  # bounds the memory of a study, whatever the length of its trace


class Given(TypedDict, total=False):
    """What `eplb_opt.Router.route` takes beside the tokens."""

    source_tokens: NDArray[np.int64]
    topk_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class BatchSteps:
    """The batches of a few consecutive steps.

    Attributes
    ----------
    first
        The first step's number.
    tokens
        Int64 ``[steps, layers, experts]``.
    source_tokens
        Int64 ``[steps, layers, gpus, experts]`` where counts were recorded by source, else None.
    topk_ids
        Int32 ``[steps, layers, gpus, rows, k]``, local batches, where the traffic has them.
    """

    first: int
    tokens: NDArray[np.int64]
    source_tokens: NDArray[np.int64] | None = None
    topk_ids: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def by_source(self) -> NDArray[np.int64] | None:
        """Return int64 ``[steps, layers, sources, experts]``, recorded or of local batches."""
        if self.source_tokens is None and self.topk_ids is not None:
            return count_tokens(self.topk_ids, self.tokens.shape[-1])
        return self.source_tokens

    def cut(self, steps: slice) -> BatchSteps:
        """Return some of the steps; `steps` counts from the first of these."""
        return BatchSteps(
            self.first + steps.start,
            self.tokens[steps],
            None if self.source_tokens is None else self.source_tokens[steps],
            None if self.topk_ids is None else self.topk_ids[steps],
        )

    def given(self, needs: Sequence[str], label: str) -> Given:
        """Return what a method needs beside the tokens, as `Router.route` takes it.

        Raises
        ------
        InvalidTokensError
            When the traffic does not have it; `label` is the method's.
        """
        if not needs:
            return {}
        if self.topk_ids is not None:
            return {"topk_ids": self.topk_ids}
        if "source_tokens" in needs and self.source_tokens is not None:
            return {"source_tokens": self.source_tokens}
        raise InvalidTokensError(
            f"{label} needs {needs[0]} and the trace holds counts only; leave the method out, or "
            f"draw batches from the trace's load"
        )


@dataclass(frozen=True, slots=True)
class Batches:
    """All batches of some traffic.

    Attributes
    ----------
    name
        What the traffic is.
    steps
        How many.
    tokens
        Of a batch over all GPUs, where batches are drawn or cut from a token trace.
    top_k
        Experts per token; None where a trace does not tell.
    recorded_layers
        Layers of the traffic, dense ones included.
    load
        Float64 ``[layers, experts]``, of the MoE layers.
    layers
        Which of the recorded layers these are.
    counts
        Gives tokens ``[steps, recorded layers, experts]``, or top-k ids ``[steps, recorded layers,
        rows, k]``, of the steps from one number to another.
    holds_ids
        Which of the two.
    sources
        Gives tokens ``[steps, recorded layers, sources, experts]`` where they were recorded.
    num_sources
        Of how many sources.
    facts
        What is known of each step.
    """

    name: str
    steps: int
    tokens: int | None
    top_k: int | None
    recorded_layers: int
    load: NDArray[np.float64]
    layers: NDArray[np.intp]
    counts: Callable[[int, int], NDArray[np.integer]]
    holds_ids: bool
    sources: Callable[[int, int], NDArray[np.integer]] | None = None
    num_sources: int = 1
    facts: StepFacts = field(default_factory=StepFacts)

    @classmethod
    def of(
        cls,
        traffic: Traffic | None,
        *,
        tokens: int,
        steps: int | None,
        top_k: int,
        draft_layers: int = 0,
        seed: int = 0,
    ) -> Batches:
        """Take the batches of some traffic.

        Parameters
        ----------
        traffic
            A trace is replayed, but for counts of a single step, whose load batches are drawn by.
            None: DeepSeek-V3's synthetic decode traffic.
        tokens
            Tokens of a batch over all GPUs, where batches are drawn or cut from a token trace.
        steps
            Batches; default 20, or the whole of a trace that is replayed, which must hold as many.
        top_k
            Experts per token, where batches are drawn from counts.
        draft_layers
            Layers at the end of the traffic that belong to a draft model; left out.
        seed
            For drawing batches, where `traffic` is not a `Workload`, which has its own.

        Raises
        ------
        InvalidTokensError
            Traffic without any token, or with fewer steps.
        ValueError
            Numbers out of range.
        """
        if tokens < 1 or (steps is not None and steps < 1):
            raise ValueError(f"tokens and steps must be at least 1, not {tokens} and {steps}")
        as_integer(top_k, "top_k")
        if traffic is None:
            traffic = Workload.preset("deepseek-v3", seed=seed)
        name = str(traffic) if isinstance(traffic, (str, os.PathLike)) else "traffic in memory"
        source = opened(traffic)
        if isinstance(source, LoadTrace) and source.num_steps == 1:
            name += ", drawn from its popularity"
            source = Workload.from_load(source.load(), source.top_k or top_k, seed=seed)
        if isinstance(source, Workload):
            popularity, drawn = source.popularity, source
            if source is traffic:
                layers, experts = popularity.shape
                name = (
                    f"synthetic traffic, {layers} layers of {experts} experts, top-{source.top_k}"
                )
            return cls(
                name,
                steps or 20,
                tokens,
                source.top_k,
                len(popularity),
                *moe_layers(popularity, draft_layers),
                counts=lambda begin, end: drawn.draw(tokens, end - begin, first_step=begin),
                holds_ids=True,
            )
        if isinstance(source, LoadTrace):
            if steps is not None and steps > source.num_steps:
                raise InvalidTokensError(f"the trace has {source.num_steps} steps; {steps} wanted")
            counts, by_source = source.tokens[:steps], source.source_tokens
            return cls(
                name,
                len(counts),
                None,
                source.top_k,
                source.num_layers,
                *moe_layers(source.load(), draft_layers),
                counts=lambda begin, end: np.asarray(counts[begin:end]),
                holds_ids=False,
                sources=None
                if by_source is None
                else lambda begin, end: np.asarray(by_source[begin:end]),
                num_sources=1 if by_source is None else by_source.shape[2],
                facts=source.facts,
            )
        cut = source.batches(tokens, steps=steps)
        return cls(
            name,
            len(cut),
            tokens,
            source.top_k,
            source.num_layers,
            *moe_layers(source.load(), draft_layers),
            counts=lambda begin, end: cut[begin:end],
            holds_ids=True,
        )

    def chunks(
        self, gpus: int, begin: int = 0, end: int | None = None, *, most: int | None = None
    ) -> Iterator[BatchSteps]:
        """Yield the steps from one number to another, a few at a time: 32, or as many as said.

        Raises
        ------
        InvalidTokensError
            A count that no batch has, naming the step, the layer and the expert.
        """
        end = self.steps if end is None else end
        at_once = max(1, (most or _STEPS_AT_ONCE) // self.num_sources)
        for first in range(begin, end, at_once):
            yield self._chunk(first, min(first + at_once, end), gpus)

    def _chunk(self, begin: int, end: int, gpus: int) -> BatchSteps:
        part = self.counts(begin, end)[:, self.layers]
        if self.holds_ids:
            tokens = count_tokens(part, self.load.shape[1])
            return BatchSteps(begin, tokens, topk_ids=local_batches(part, gpus))
        wrong = out_of_range(part)
        if wrong.any():
            step, layer, expert = (int(i) for i in np.argwhere(wrong)[0])
            raise InvalidTokensError(
                f"step {begin + step}, layer {self.layers[layer]}, expert {expert} has "
                f"{part[step, layer, expert]} tokens; {COUNTS_ALLOWED}"
            )
        by_source = None
        if self.sources is not None:
            by_source = self.sources(begin, end)[:, self.layers].astype(np.int64)
        return BatchSteps(begin, np.ascontiguousarray(part, dtype=np.int64), by_source)


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What is known of the steps of some batches beside their counts, or follows from these.

    Parameters
    ----------
    batches
        All of them.
    top_k
        Experts per token, where they do not tell.
    most_decode_tokens
        Steps of more scheduled tokens are prefill where they do not tell; None: they are decode.
    """

    batches: Batches
    top_k: int
    most_decode_tokens: int | None = None

    def __post_init__(self) -> None:
        as_integer(self.top_k, "top_k")
        if self.most_decode_tokens is not None:
            as_integer(self.most_decode_tokens, "most_decode_tokens")

    @property
    def decode_limit(self) -> int | None:
        """The most tokens that a decode step has: as given, or of those that a trace calls so.

        O(steps) where the trace does not tell what was scheduled.
        """
        known = self.batches.facts
        if self.most_decode_tokens is not None or known.stage is None:
            return self.most_decode_tokens
        if known.scheduled is not None:
            return int(known.scheduled[known.stage == "decode"].max(initial=1))
        told = map(self.of, self.batches.chunks(1))
        return max(int(np.ceil(tokens[stages == 0].max(initial=1))) for stages, tokens, _ in told)

    def of(
        self, batch: BatchSteps
    ) -> tuple[NDArray[np.int8], NDArray[np.float64], NDArray[np.float64]]:
        """Look at a few of the steps.

        Returns
        -------
        stages : int8 array, [steps]
            0 for decode, 1 for prefill.
        tokens : float64 array, [steps]
            Tokens of the batch, each once.
        scheduled : float64 array, [steps]
            Tokens that were run, padding included.
        """
        these = slice(batch.first, batch.first + len(batch))
        known = self.batches.facts
        tokens = batch.tokens.sum(axis=-1).max(axis=-1) / (self.batches.top_k or self.top_k)
        scheduled = tokens if known.scheduled is None else known.scheduled[these].astype(np.float64)
        most = math.inf if self.most_decode_tokens is None else self.most_decode_tokens
        stages = (scheduled > most).astype(np.int8)
        if known.stage is not None:
            told = known.stage[these]
            stages = np.where(told == "", stages, told == "prefill").astype(np.int8)
        return stages, tokens, scheduled

    def collect(self, begin: int, end: int, stage: HeatStage) -> Collected:
        """Sum the tokens of a stage's steps, from one step to another."""
        load, steps = np.zeros(self.batches.load.shape, np.int64), 0
        for batch in self.batches.chunks(1, begin, end):
            stages = self.of(batch)[0]
            taken = (
                np.ones(len(batch), np.bool_) if stage == "all" else stages == STAGES.index(stage)
            )
            load += batch.tokens[taken].sum(axis=0)
            steps += int(taken.sum())
        limit = None if stage == "all" else self.decode_limit
        return Collected(load, steps, self.batches.top_k or self.top_k, limit)


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """The load of a stage's steps.

    Attributes
    ----------
    load
        Int64 ``[layers, experts]``.
    steps
        Steps of the stage.
    top_k
        Experts per token.
    decode_limit
        The most tokens that a decode step has; None where that is not known, or for all stages.
    """

    load: NDArray[np.int64]
    steps: int
    top_k: int
    decode_limit: int | None

    def mean_batch(self) -> NDArray[np.int64]:
        """Return int64 ``[layers, experts]``: the mean batch, counts rounded up."""
        return -(-self.load // max(self.steps, 1))

    @property
    def batch_tokens(self) -> int:
        """Tokens of a batch, each once, mean over steps; at least 1."""
        largest = int(self.load.sum(axis=1).max())
        return max(1, round(largest / self.top_k / max(self.steps, 1)))


def opened(traffic: Traffic) -> Workload | LoadTrace | TokenTrace:
    """Return the traffic, read if it is a path."""
    if isinstance(traffic, (str, os.PathLike)):
        return read_trace(traffic)
    if not isinstance(traffic, (Workload, LoadTrace, TokenTrace)):
        raise TypeError(
            f"traffic must be a Workload, LoadTrace, TokenTrace or a path, not {type(traffic)}; "
            f"counts [steps, layers, experts] make a LoadTrace"
        )
    return traffic


def moe_layers(load: ArrayLike, draft_layers: int) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return the rows with any load, but for a draft model's, and which they are."""
    array = np.asarray(load, dtype=np.float64)
    if not 0 <= draft_layers < len(array):
        raise ValueError(f"draft_layers is {draft_layers}; the traffic has {len(array)} layers")
    array = array[: len(array) - draft_layers]
    layers = np.flatnonzero(array.any(axis=-1))
    if not layers.size:
        raise InvalidTokensError("the traffic holds no tokens in any layer")
    return array[layers], layers


def local_batches(ids: NDArray[np.integer], gpus: int) -> NDArray[np.int32]:
    """Cut ``[steps, layers, rows, k]`` into ``[steps, layers, gpus, rows / gpus, k]``, padded.

    Consecutive rows stay together, as the tokens of a prompt do; blocks differ by one row at most.
    """
    steps, layers, rows, k = ids.shape
    by_gpu = np.full((steps, layers, gpus, -(-rows // gpus), k), -1, np.int32)
    row = np.arange(rows)
    gpu = row * gpus // rows
    first_row = -(-gpu * rows // gpus)
    by_gpu[:, :, gpu, row - first_row] = ids
    return by_gpu
