"""Is a recording what it seems: steps that warm the engine up, counts of one GPU only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eplb_opt.batches import STAGES, BatchFacts
from eplb_opt.errors import InvalidTokensError
from eplb_opt.load_trace import StepFacts
from eplb_opt.workload import Stage

__all__ = ["Steps", "picked", "steps_of", "warm_up"]

_MOST_WARM_UP = 128
_ODD, _USUAL = 5.0, 2.5  # deviations from the median, in robust standard deviations
_NEXT = 8
_WITHIN = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """What every step is.

    Attributes
    ----------
    stages : int8 array, [steps]
        0 for decode, 1 for prefill.
    tokens : float64 array, [steps]
        Tokens of the batch, each once; 0 for an idle step.
    scheduled : float64 array, [steps]
        Tokens that were run, padding included.
    """

    stages: NDArray[np.int8]
    tokens: NDArray[np.float64]
    scheduled: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.stages)

    def of(self, stage: Stage) -> NDArray[np.bool_]:
        """Return bool ``[steps]``: the steps of a stage that have tokens."""
        return np.asarray((self.stages == STAGES.index(stage)) & (self.tokens > 0))

    def since(self, first: int) -> Steps:
        """Return the steps from one on."""
        return Steps(self.stages[first:], self.tokens[first:], self.scheduled[first:])

    def like_one_of(self, num_gpus: int) -> bool:
        """Tell whether counts are those of one GPU's tokens: 1/G of what was scheduled."""
        busy = (self.tokens > 0) & (self.scheduled > 0)
        if num_gpus == 1 or not busy.any():
            return False
        share = num_gpus * self.tokens[busy] / self.scheduled[busy]
        return bool(np.mean(np.abs(share - 1) < _WITHIN) > 0.5)


def steps_of(facts: BatchFacts) -> Steps:
    """Look at every step once.

    Raises
    ------
    InvalidTokensError
        When all tokens go to one block of consecutive experts, at most half of them, as if one GPU
        had counted its own experts.
    """
    columns: list[tuple[NDArray[np.int8], NDArray[np.float64], NDArray[np.float64]]] = []
    used = np.zeros(facts.batches.load.shape[1], np.bool_)
    for batch in facts.batches.chunks(1):
        columns.append(facts.of(batch))
        used |= batch.tokens.any(axis=(0, 1))
    experts = np.flatnonzero(used)
    if experts.size and 2 * (experts[-1] - experts[0] + 1) <= len(used):
        raise InvalidTokensError(
            f"only experts {experts[0]} to {experts[-1]} of {len(used)} have tokens, as if one GPU "
            f"had counted those that it holds; sum the counts of all GPUs"
        )
    stages, tokens, scheduled = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Steps(stages, tokens, scheduled)


def warm_up(facts: BatchFacts, steps: Steps) -> int:
    """Count the first steps that are unlike those after them, such as an engine's dummy batches.

    Parameters
    ----------
    facts
        The traffic.
    steps
        Its steps.

    Returns
    -------
    int
        At most a fourth of the steps, and at most 128.

    Notes
    -----
    A step is compared with those of its stage in a stretch that begins where a warm-up would end at
    the latest: its number of tokens, and the cosine of its experts' shares with the stretch's mean,
    each as deviations from the stretch's median. A step without tokens, or with the same count for
    every expert, is always odd. A warm-up is the longest run of odd steps at the start after which
    steps are usual at once; where the traffic drifts, no step is that much odder than the next.
    """
    span = min(_MOST_WARM_UP, len(steps) // 4)
    if span == 0:
        return 0
    shares = np.empty((2 * span, facts.batches.load.size), np.float32)
    dummy = steps.tokens[: 2 * span] == 0
    for batch in facts.batches.chunks(1, 0, 2 * span):
        these = slice(batch.first, batch.first + len(batch))
        layer = batch.tokens.sum(axis=-1, keepdims=True)
        shares[these] = (batch.tokens / np.maximum(layer, 1)).reshape(len(batch), -1)
        dummy[these] |= (batch.tokens == batch.tokens[..., :1]).all(axis=(1, 2))
    odd = np.where(dummy, 2 * _ODD, 0.0)
    for stage in range(len(STAGES)):
        own = np.flatnonzero((steps.stages[: 2 * span] == stage) & ~dummy)
        late = own >= span
        if late.sum() < 4:
            continue
        usual = shares[own[late]].mean(axis=0)
        unit = np.linalg.norm(shares[own], axis=1) * np.linalg.norm(usual)
        likeness = (shares[own] @ usual) / unit
        for feature, least in ((likeness, 0.01), (np.log(steps.tokens[own]), 0.1)):
            odd[own] = np.maximum(odd[own], _deviations(feature, late, least))
    odd = np.minimum(odd, 2 * _ODD)
    for end in range(span, 0, -1):
        changes = odd[end - 1] >= _ODD > odd[end]
        if changes and odd[:end].mean() >= _ODD and odd[end : end + _NEXT].mean() < _USUAL:
            return end
    return 0


def _deviations(
    feature: NDArray[np.floating], usual: NDArray[np.bool_], least: float
) -> NDArray[np.float64]:
    """Return how far from the usual ones' median, in their spread, which is at least `least`."""
    middle = np.median(feature[usual])
    spread = 1.4826 * np.median(np.abs(feature[usual] - middle))
    return np.asarray(np.abs(feature - middle) / max(float(spread), least))


def picked(facts: BatchFacts, steps: NDArray[np.intp]) -> BatchFacts:
    """Return the traffic of some steps, which are numbered anew, in rising order."""
    batches = facts.batches
    by_source = batches.sources

    def counts(begin: int, end: int) -> NDArray[np.integer]:
        return np.concatenate([batches.counts(a, b) for a, b in _runs(steps[begin:end])])

    def sources(begin: int, end: int) -> NDArray[np.integer]:
        assert by_source is not None
        return np.concatenate([by_source(a, b) for a, b in _runs(steps[begin:end])])

    return replace(
        facts,
        batches=replace(
            batches,
            steps=len(steps),
            counts=counts,
            sources=None if by_source is None else sources,
            facts=StepFacts(**{name: c[steps] for name, c in batches.facts.columns().items()}),
        ),
    )


def _runs(steps: NDArray[np.intp]) -> list[tuple[int, int]]:
    """Return the runs of consecutive steps, from one number to another."""
    cuts = np.flatnonzero(np.diff(steps) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(steps, cuts)]
