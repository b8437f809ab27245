"""Deployments are tried on a recording: which steps are for what, and who does best on them.

The first steps are learned from, candidates are compared on the next, and the last are kept to
judge the one that is chosen: the best of many is partly the luckiest, on the steps that it was
chosen on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from eplb_opt.advice import Candidate, Parts
from eplb_opt.batches import BatchFacts
from eplb_opt.errors import InvalidTokensError
from eplb_opt.heat import HeatStage
from eplb_opt.replaying import Replay, ReplayRow
from eplb_opt.scenario import Scenario
from eplb_opt.step_time import Migration, StepTime
from eplb_opt.vetting import Steps, picked
from eplb_opt.workload import Stage

__all__ = ["EQUAL_SPLIT", "Bench", "Plan", "Search", "simplest"]

EQUAL_SPLIT = "uniform"
"""The router that EPLB counts on."""

_LEAST_STEPS = 16
_SCREENED_STEPS = 256
_FINALISTS = 3
_KEPT = 0.9  # of the best gain, by the simplest candidate that keeps so much


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Which steps are for what.

    Attributes
    ----------
    steps
        All that are left after a warm-up.
    first, middle
        The first that is served, and the first that is judged on.
    target
        The stage whose mean step time is to fall.
    mask : bool array, [steps]
        Those of the target stage that have tokens.
    """

    steps: Steps
    first: int
    middle: int
    target: HeatStage
    mask: NDArray[np.bool_]

    @classmethod
    def of(cls, steps: Steps, learn: float, target: HeatStage | None) -> Plan:
        """Divide steps: a share to learn from, and half of the others for each of the rest.

        Raises
        ------
        InvalidTokensError
            Too few steps, or none of the target stage to choose by or to judge on.
        ValueError
            A share outside 0 to 1, or an unknown stage.
        """
        count = len(steps)
        if count < _LEAST_STEPS:
            raise InvalidTokensError(
                f"{count} steps are too few to learn from, to choose by and to judge on; record "
                f"{_LEAST_STEPS} at least, a few hundred better"
            )
        if not 0 < learn < 1:
            raise ValueError(
                f"learn is {learn}; expected a share of the steps, above 0 and below 1"
            )
        first = min(max(1, round(learn * count)), count - 2)
        middle = first + (count - first) // 2
        if target is None:
            target = "decode" if steps.of("decode").any() else "prefill"
        if target not in get_args(HeatStage):
            known = ", ".join(get_args(HeatStage))
            raise ValueError(f"no stage is called {target!r}; the known ones are: {known}")
        mask = steps.tokens > 0 if target == "all" else steps.of(target)
        for begin, end, what in ((first, middle, "choose by"), (middle, count, "judge on")):
            if not mask[begin:end].any():
                raise InvalidTokensError(
                    f"steps {begin} to {end - 1} after the warm-up are there to {what}, and none "
                    f"has tokens of stage {target}; record a mix, or give another target"
                )
        return cls(steps, first, middle, target, mask)

    @property
    def chosen_target(self) -> NDArray[np.intp]:
        """Steps of the target stage to choose by, counted from the first that is served."""
        return np.flatnonzero(self.mask[self.first : self.middle])

    @property
    def judged_target(self) -> NDArray[np.intp]:
        """Those to judge on, counted likewise."""
        return self._at(self.mask)

    def judged_stages(self) -> dict[Stage, NDArray[np.intp]]:
        """Return for each stage that occurs its steps to judge on, counted likewise."""
        stages: tuple[Stage, ...] = ("decode", "prefill")
        found = {stage: self._at(self.steps.of(stage)) for stage in stages}
        return {stage: mask for stage, mask in found.items() if mask.size}

    def _at(self, mask: NDArray[np.bool_]) -> NDArray[np.intp]:
        return np.flatnonzero(mask[self.middle :]) + self.middle - self.first

    def mean(
        self, stage: Stage, steps: NDArray[np.intp], times: NDArray[np.float64]
    ) -> float | None:
        """Return milliseconds of a stage's steps among some, counted likewise, with their times."""
        own = self.steps.of(stage)[self.first + steps]
        return float(times[own].mean()) / 1e3 if own.any() else None

    def stages(self) -> tuple[HeatStage, ...]:
        """Return whose load placements may be made for."""
        learned = slice(0, self.first)
        both = all(self.steps.of(stage)[learned].any() for stage in ("decode", "prefill"))
        return ("all", "decode", "prefill") if both else ("all",)

    def intervals(self, drawn: bool) -> tuple[int | None, ...]:
        """Return how often to place; what is drawn from one popularity does not change."""
        served = len(self.steps) - self.first
        some = [served // parts for parts in (4, 16) if served // parts > 1]
        return (None,) if drawn else (None, *some)

    def parts(self, warm: int) -> Parts:
        """Return the numbers of steps."""
        count = len(self.steps)
        of_target = int(self.judged_target.size)
        return Parts(warm, self.first, self.middle - self.first, count - self.middle, of_target)


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """Replays deployments on the steps that are served, each once."""

    facts: BatchFacts
    plan: Plan
    time: StepTime
    methods: tuple[str, ...]
    migration: Migration | None
    threads: int
    _done: dict[Scenario, Replay] = field(default_factory=dict)

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return int(self.facts.batches.load.shape[1])

    def replay(self, scenario: Scenario) -> Replay:
        """Serve all steps after those that are learned from."""
        if scenario not in self._done:
            self._done[scenario] = self._replay(self.facts, scenario)
        return self._done[scenario]

    def row(self, scenario: Scenario, router: str = EQUAL_SPLIT) -> ReplayRow:
        """Return a router's row; without copies all are alike, and one stands for them."""
        rows = self.replay(scenario).rows
        return next((row for row in rows if row.method == router), rows[0])

    def screen(self, scenario: Scenario, sample: NDArray[np.intp]) -> Replay:
        """Serve only some of the steps, counted from the first that is served."""
        steps = np.concatenate([np.arange(self.plan.first), self.plan.first + sample])
        return self._replay(picked(self.facts, steps), scenario)

    def _replay(self, facts: BatchFacts, scenario: Scenario) -> Replay:
        copies = scenario.redundant > 0 and scenario.placer is not None
        return scenario.replay(
            facts,
            self.methods if copies else self.methods[:1],
            first_step=self.plan.first,
            time=self.time,
            migration=self.migration,
            threads=self.threads,
        )


@dataclass(slots=True, eq=False)
class Search:
    """Tries candidates on the steps to choose by.

    Attributes
    ----------
    bench
        What they are tried on.
    start
        The deployment without EPLB.
    redundant, placers, intervals, stages
        What is tried, each with each.
    memory
        Says what a deployment needs beyond `start`.
    progress
        Called with (done, total) replays.
    finalists
        Candidates that were replayed in full.
    """

    bench: Bench
    start: Scenario
    redundant: Sequence[int]
    placers: Sequence[str]
    intervals: Sequence[int | None]
    stages: Sequence[HeatStage]
    memory: Callable[[Scenario], int | None]
    progress: Callable[[int, int], None] | None = None
    finalists: list[Candidate] = field(default_factory=list)
    _tried: int = 0
    _to_try: int = 0

    def run(self) -> list[Candidate]:
        """Return all candidates, the best first."""
        once = [
            replace(self.start, redundant=slots, placer=placer, stage=stage)
            for slots in dict.fromkeys(self.redundant)
            for placer in dict.fromkeys(self.placers)
            for stage in dict.fromkeys(self.stages)
        ]
        intervals = dict.fromkeys(self.intervals)
        chosen = self.bench.plan.chosen_target
        others: list[Candidate] = []
        if len(chosen) <= _SCREENED_STEPS:
            self._to_try = len(intervals) * len(once)
        else:
            self._to_try = len(once) + len(intervals) * min(_FINALISTS, len(once))
            once, others = self._screened(once, chosen)
        for scenario in once:
            for interval in intervals:
                self.finalists += self._try(replace(scenario, interval=interval))
        again = {self._key(candidate) for candidate in self.finalists}
        others = [candidate for candidate in others if self._key(candidate) not in again]
        return sorted(self.finalists + others, key=lambda candidate: -candidate.gain)

    def _screened(
        self, scenarios: list[Scenario], chosen: NDArray[np.intp]
    ) -> tuple[list[Scenario], list[Candidate]]:
        """Return the best of placements that stay, and all their candidates, on some steps."""
        spread = np.linspace(0, len(chosen) - 1, _SCREENED_STEPS).astype(np.intp)
        found = [self._try(scenario, chosen[spread]) for scenario in scenarios]
        gains = np.array([max(candidate.gain for candidate in some) for some in found])
        best = np.argsort(-gains, kind="stable")[:_FINALISTS]
        return [scenarios[at] for at in best], [c for some in found for c in some]

    def scenario(self, candidate: Candidate) -> Scenario:
        """Return the deployment of a candidate."""
        return replace(
            self.start,
            redundant=candidate.redundant,
            placer=candidate.placer,
            stage=candidate.stage,
            interval=candidate.interval,
        )

    def _key(self, candidate: Candidate) -> tuple[Scenario, str]:
        return self.scenario(candidate), candidate.router

    def _try(self, scenario: Scenario, sample: NDArray[np.intp] | None = None) -> list[Candidate]:
        """Return a candidate for each router, tried in full or on some steps."""
        plan = self.bench.plan
        if sample is None:
            steps = np.arange(plan.middle - plan.first)
            served = self.bench.replay(scenario)
        else:
            steps = sample
            served = self.bench.screen(scenario, sample)
        target = plan.mask[plan.first + steps]
        before = self.bench.row(self.start).step_times[steps[target]].mean()
        candidates = []
        for row in served.rows:
            times = row.step_times[: len(steps)]
            candidate = Candidate(
                redundant=scenario.redundant,
                placer=str(scenario.placer),
                router=row.method,
                interval=scenario.interval,
                stage=scenario.stage,
                steps=int(target.sum()),
                gain=float(1 - times[target].mean() / before),
                decode=plan.mean("decode", steps, times),
                prefill=plan.mean("prefill", steps, times),
                moves=served.moves,
                memory=self.memory(scenario),
            )
            candidates.append(candidate)
        self._tried += 1
        if self.progress is not None:
            self.progress(self._tried, self._to_try)
        return candidates


def simplest(
    finalists: Sequence[Candidate],
    min_gain: float,
    methods: Sequence[str],
    placers: Sequence[str],
) -> Candidate:
    """Return the simplest candidate of those that are as good as the best."""
    most = max(candidate.gain for candidate in finalists)
    enough = most - min((1 - _KEPT) * abs(most), min_gain * (1 - most))
    return min(
        (candidate for candidate in finalists if candidate.gain >= enough),
        key=lambda c: (
            c.redundant,
            c.interval is not None,
            c.stage != "all",
            methods.index(c.router),
            placers.index(c.placer),
        ),
    )
