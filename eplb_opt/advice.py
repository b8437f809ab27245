"""Yes or no to EPLB: an answer, its figures and their uncertainty, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from eplb_opt.bootstrap import Estimate
from eplb_opt.gap import as_json
from eplb_opt.heat import HeatStage

__all__ = ["Advice", "Candidate", "Costs", "Parts", "Rule", "Verdict", "Why", "judged"]

_MOST_TIMES_LONGER = 100.0


class Verdict(str, Enum):
    """Whether EPLB pays."""

    YES = "yes"
    """The gain is above what was asked for, with a confidence of 95 %."""
    NO = "no"
    """It is below, or no placement and no routing can reach it."""
    UNCLEAR = "unclear"
    """The steps that were recorded cannot tell."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A deployment that was tried, on steps that its placement was not made for.

    Attributes
    ----------
    redundant
        Slots beyond one per expert.
    placer, router
        The methods.
    interval
        Steps from one placement to the next; None: one placement stays.
    stage
        Which steps' load placements are made for.
    steps
        Of the target stage, on which it was tried.
    gain
        By which share they take less time than without EPLB, mean.
    decode, prefill
        Milliseconds of a step, mean; None where there are none.
    moves
        Weights that GPUs received while it served.
    memory
        Bytes that it needs on each GPU beyond what is needed without EPLB; None where the model is
        not known.
    """

    redundant: int
    placer: str
    router: str
    interval: int | None
    stage: HeatStage
    steps: int
    gain: float
    decode: float | None
    prefill: float | None
    moves: int
    memory: int | None

    @property
    def cycle(self) -> str:
        """For tables: how often experts are placed."""
        return "once" if self.interval is None else f"every {self.interval} steps"

    @property
    def label(self) -> str:
        """In a line."""
        slots = f"{self.redundant} redundant slots" if self.redundant else "no redundant slots"
        load = "" if self.stage == "all" else f" on {self.stage}'s load"
        routed = f", routed by {self.router}" if self.redundant else ""
        return f"{self.placer} {self.cycle}{load}, {slots}{routed}"


@dataclass(frozen=True, slots=True)
class Parts:
    """What the steps were used for, in their order.

    Attributes
    ----------
    warm_up
        First steps, left out.
    learned
        Steps by whose load experts are placed first.
    chosen
        Steps on which candidates are compared, and one is chosen.
    judged
        Steps on which that one is judged.
    target
        Those of the target stage among them.
    """

    warm_up: int
    learned: int
    chosen: int
    judged: int
    target: int


@dataclass(frozen=True, slots=True)
class Why:
    """What the gain is made of, on the target stage.

    Attributes
    ----------
    shares
        Of a step without EPLB: experts, communication, router, rest.
    ceiling
        The gain if experts took what is proven that they need with any placement and routing, and
        dispatch and combine were even.
    par_mean, par_max
        Peak over average of the GPUs' tokens without EPLB, over layers.
    tokens_per_gpu
        Of a step.
    tokens_per_activated
        Tokens over activated replicas, without EPLB.
    break_even
        Tokens of an expert (n*) that take as long as activating it does; inf where none do.
    ladder
        What each adds to the gain, one after the other: placement without redundant slots, slots
        under the equal split, router, updates.
    """

    shares: Mapping[str, float]
    ceiling: float
    par_mean: float
    par_max: float
    tokens_per_gpu: float
    tokens_per_activated: float
    break_even: float
    ladder: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Costs:
    """What the chosen deployment costs.

    Attributes
    ----------
    memory
        As `Candidate.memory`.
    migration
        Share of the time that moves take while serving; None where they were not priced.
    first_move
        Milliseconds of the moves from experts in order to the first placement, if they are not
        loaded so; None where moves were not priced.
    repaid_in
        Steps of the target stage that repay them; inf where nothing is saved.
    """

    memory: int | None
    migration: float | None
    first_move: float | None
    repaid_in: float | None


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of thumb, and what it says here.

    Attributes
    ----------
    rule
        When EPLB does not pay, by vLLM-Ascend's guide.
    value
        What it is here.
    against
        Whether the rule speaks against EPLB.
    agrees
        Whether the trace does too; None where it cannot tell.
    """

    rule: str
    value: float
    against: bool
    agrees: bool | None


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether EPLB pays, with what, and why.

    Attributes
    ----------
    verdict
        The answer.
    traffic, objective
        What was served, and the name of what experts were priced by.
    num_gpus
        The EP size.
    target
        The stage whose mean step time is to fall.
    min_gain
        By which share at least.
    best
        The candidate that was chosen; its own figures are of the steps that it was chosen on.
    gain
        Its gain on other steps: what the verdict hangs on.
    gains
        The same of each stage, mean and, with 100 steps or more, p99: ``decode mean`` and so on.
    before, after
        Milliseconds without EPLB and with it, by the same names; with an SLO also
        ``decode within SLO``, shares of steps.
    more_steps
        Steps to record until the verdict is clear, about; None where it is, or never will be.
    parts
        What the steps were used for.
    why, costs, rules
        See there.
    candidates
        All that were tried, the best first.
    reasons
        Sentences.
    notes
        What was left out, or taken for granted.
    """

    verdict: Verdict
    traffic: str
    objective: str
    num_gpus: int
    target: HeatStage
    min_gain: float
    best: Candidate
    gain: Estimate
    gains: Mapping[str, Estimate]
    before: Mapping[str, float]
    after: Mapping[str, float]
    more_steps: int | None
    parts: Parts
    why: Why
    costs: Costs
    rules: tuple[Rule, ...]
    candidates: tuple[Candidate, ...] = field(repr=False)
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return the answer and its reasons as text."""
        return "\n".join([*self.reasons, *(f"Note: {note}" for note in self.notes)])

    def to_json(self) -> str:
        """Return all of it as a JSON object; numbers that are not finite are null."""
        return as_json(self)


def judged(
    gain: Estimate, min_gain: float, ceiling: float, steps: int
) -> tuple[Verdict, int | None]:
    """Return the verdict, and about how many more steps would make it clear.

    Parameters
    ----------
    gain
        As measured.
    min_gain
        What it should be at least.
    ceiling
        What it can be at most.
    steps
        That were recorded.

    Returns
    -------
    verdict : Verdict
    more : int or None
        None where the verdict is clear, or where a hundred times as many steps would not do.

    Notes
    -----
    An interval narrows with the square root of the steps.

    Examples
    --------
    >>> judged(Estimate(0.03, 0.0, 0.06), 0.01, 0.2, 100)
    (<Verdict.UNCLEAR: 'unclear'>, 125)
    """
    if gain.low > min_gain:
        return Verdict.YES, None
    if gain.high < min_gain or ceiling < min_gain:
        return Verdict.NO, None
    above = gain.value > min_gain
    half = gain.value - gain.low if above else gain.high - gain.value
    distance = abs(gain.value - min_gain)
    times = (half / distance) ** 2 if distance else math.inf
    if not times <= _MOST_TIMES_LONGER:
        return Verdict.UNCLEAR, None
    needed = math.ceil(round(steps * times, 6))  # not one more for a last bit
    return Verdict.UNCLEAR, max(1, needed - steps)
