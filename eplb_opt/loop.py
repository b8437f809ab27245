"""The loop that engines run: collect load, decide on a placement, update it layer by layer, repeat.

When is the business of a `Heat`, and where of a placement method. The loop adds what makes a new
placement worth its moves (`Worth`), and keeps the placement that is served.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt.arrays import as_integer
from eplb_opt.budget import spend
from eplb_opt.errors import InvalidPlacementError, InvalidTokensError
from eplb_opt.formats.placements import PlacementFormat, format_to_write, write_placement
from eplb_opt.heat import Heat, HeatStep
from eplb_opt.metrics import PlacementMetrics, count_moves
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.placers import PlacementMethod, resolve_placer
from eplb_opt.placing import solve_placement
from eplb_opt.transfer import Links, plan_transfer, saving_per_step

__all__ = ["BreakEven", "Commit", "Decision", "EplbLoop", "LoopStep", "Worth"]

_logger = logging.getLogger(__name__)

_REMEMBERED = 1000  # iterations whose balancedness SGLang averages


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Moves have to repay their time: at a step's saving, within so many steps.

    Parameters
    ----------
    steps
        At most so many, such as those of a cycle.
    expert_bytes
        Bytes of one expert's weights, `eplb_opt.transfer.expert_bytes`.
    objective
        A GPU's time in microseconds, or the name of one.
    links
        What the moves take: as if serving stopped for them.

    Raises
    ------
    ValueError
        Numbers below 1, or an objective that counts instead of taking time.
    """

    steps: int
    expert_bytes: int
    objective: Objective | str
    links: Links = field(default_factory=Links)

    def __post_init__(self) -> None:
        as_integer(self.steps, "steps")
        as_integer(self.expert_bytes, "expert_bytes")
        objective = Objective.of(self.objective)
        if objective.counts_activations or objective.counts_tokens:
            raise ValueError(f"objective {objective.name} counts; breaking even needs microseconds")


@dataclass(frozen=True, slots=True)
class Worth:
    """When a new placement is worth its moves; by default always.

    Parameters
    ----------
    min_gain
        The least fall of the peaks, summed over layers, as a fraction of what they are; below it
        nothing changes. 0.05 is what vLLM-Ascend's policies answer by, though its worker does not
        look at the answer.
    min_layer_gain
        The same for every layer by itself.
    max_balancedness
        Above so much, nothing changes: the mean over the last 1,000 iterations of SGLang's
        balancedness, ``--eplb-min-rebalancing-utilization-threshold``.
    max_moves
        The most weights that GPUs may receive in a decision. A method that heeds a budget gets it;
        of another's answer the layers are taken that gain most by move.
    break_even
        Within how many steps the moves have to be repaid.

    Raises
    ------
    ValueError
        A gain outside 0 to 1, a balancedness outside 0 to 1, or a negative budget.
    """

    min_gain: float | None = None
    min_layer_gain: float | None = None
    max_balancedness: float | None = None
    max_moves: int | None = None
    break_even: BreakEven | None = None

    def __post_init__(self) -> None:
        for name in ("min_gain", "min_layer_gain", "max_balancedness"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; expected 0 to 1")
        if self.max_moves is not None:
            as_integer(self.max_moves, "max_moves", least=0)


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What was decided on a window's load.

    Attributes
    ----------
    placement
        What will be served when all layers are updated; the one that is served now if nothing
        changes.
    moves : int64 array, [layers]
        Weights that GPUs will receive.
    current, expected : PlacementMetrics
        Of the placement that is served and of `placement`, on the window's load.
    declined
        Why nothing changes; empty if something does.
    """

    placement: Placement
    moves: NDArray[np.int64]
    current: PlacementMetrics
    expected: PlacementMetrics
    declined: str = ""


@dataclass(frozen=True, slots=True)
class Commit:
    """A layer that has its new placement from the next iteration on, and the weights moved."""

    layer: int
    moves: int


@dataclass(frozen=True, slots=True, eq=False)
class LoopStep:
    """What happened at an iteration, at its end.

    Attributes
    ----------
    collected
        Whether its load was added to the window.
    decision
        What was decided on the window that became complete, if one did.
    commits
        The layers that were updated.
    """

    collected: bool = False
    decision: Decision | None = None
    commits: tuple[Commit, ...] = ()


@dataclass(slots=True, eq=False)
class EplbLoop:
    """A placement that is kept up with its traffic.

    An engine, or a replay, calls `step` after every iteration and serves the next one on
    `placement`. Each decision is logged as vLLM-Ascend does, ``[Expert Hotness]`` with the PAR of
    the window's load, mean and largest over layers; for every layer at level DEBUG.

    Parameters
    ----------
    placement
        What is served first, with a layer axis.
    heat
        The cycle; None for a static placement, which stays.
    method
        The placement method, as for `eplb_opt.solve_placement`; it is given the placement that is
        served and the load of one window.
    num_nodes, num_groups, distinct, threads
        As for `eplb_opt.solve_placement`.
    worth
        When a new placement is worth its moves.
    top_k
        Experts per token, for methods that place for a router: they are given the mean batch.
    record
        A file for the placement, written anew whenever the last layer is updated; static mode loads
        it with `eplb_opt.read_placement`.
    record_format
        Its format, as for `eplb_opt.write_placement`.

    Raises
    ------
    InvalidPlacementError
        A placement without a layer axis.
    FormatError
        A suffix of `record` that does not go with the format.
    ValueError
        An unknown method.

    Examples
    --------
    Two iterations are collected, one is for deciding, and then a layer is updated in each:

    >>> from eplb_opt.heat import CollectThenDecide
    >>> loop = EplbLoop(Placement([[[0, 1], [2, 3]]] * 2), CollectThenDecide(2, 1), method="search")
    >>> tokens = [[9, 9, 1, 1], [5, 5, 5, 5]]
    >>> for n in range(1, 6):
    ...     step = loop.step(tokens)
    ...     print(n, step.collected, step.decision is not None, step.commits)
    1 True False ()
    2 True True ()
    3 False False ()
    4 False False (Commit(layer=0, moves=2),)
    5 False False (Commit(layer=1, moves=0),)
    >>> loop.placement.slots[0].tolist()
    [[2, 1], [0, 3]]
    """

    placement: Placement
    heat: Heat | None
    method: str | PlacementMethod = "deepseek"
    num_nodes: int = 1
    num_groups: int = 1
    distinct: bool = False
    worth: Worth = Worth()
    top_k: int = 8
    record: str | os.PathLike[str] | None = None
    record_format: PlacementFormat | str | None = None
    threads: int = 1
    _decision: Decision | None = field(init=False, repr=False, default=None)
    _window: _Window = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse now what would fail in the middle of serving."""
        if not self.placement.layered:
            raise InvalidPlacementError("the loop updates layers; give slots [layers, gpus, slots]")
        self.method = resolve_placer(self.method)
        as_integer(self.top_k, "top_k")
        if self.record is not None:
            format_to_write(Path(self.record), self.record_format)
        self._window = _Window()

    def step(self, tokens: ArrayLike, scheduled: int | None = None) -> LoopStep:
        """Tell the loop of an iteration that has been run.

        Parameters
        ----------
        tokens, scheduled
            As for `Heat.step`.

        Returns
        -------
        LoopStep
            What happened; `placement` is what the next iteration is served on.

        Raises
        ------
        InvalidTokensError
            Counts that are none, negative, or of another shape than the placement's.
        ValueError
            When `scheduled` is needed.
        EplbError
            What the placement method raises.
        OSError
            When the record cannot be written.

        Notes
        -----
        O(layers x experts), but where a window is complete: the method's time.
        """
        if self.heat is None:
            return LoopStep()
        counts = np.asarray(tokens)
        shape = (self.placement.num_layers, self.placement.num_experts)
        if counts.shape != shape:
            problem = f"tokens are {list(counts.shape)}"
            raise InvalidTokensError(f"{problem}; the placement has {list(shape)}")
        heat = self.heat.step(counts, scheduled)
        if heat.collected:
            balancedness = None
            if self.worth.max_balancedness is not None:
                served = PlacementMetrics.of(self.placement, counts.astype(np.float64))
                balancedness = served.balancedness_sglang
            self._window.add(int(counts.sum(dtype=np.int64)), balancedness)
        decision = None
        if heat.load is not None:
            decision = self._decide(heat.load)
            _log(decision)
            if decision.declined:
                self.heat.decline()
            self._decision = decision
        return LoopStep(heat.collected, decision, self._commit(heat))

    def _decide(self, load: NDArray[np.int64]) -> Decision:
        batch = self._window.mean_batch(load)
        current = PlacementMetrics.of(self.placement, load.astype(np.float64))
        declined = self._before_placing(load)
        placement = self.placement if declined else self._placed(load, current, batch)
        moves = count_moves(self.placement, placement)
        expected = PlacementMetrics.of(placement, load.astype(np.float64))
        declined = declined or self._after_placing(placement, moves, current, expected, batch)
        if declined:
            return Decision(self.placement, np.zeros_like(moves), current, current, declined)
        return Decision(placement, moves, current, expected)

    def _before_placing(self, load: NDArray[np.int64]) -> str:
        if not load.any():
            return "no load was collected"
        most, now = self.worth.max_balancedness, self._window.balancedness
        if most is not None and now > most:
            return f"balancedness {now:.3f} is above {most}"
        return ""

    def _after_placing(
        self,
        placement: Placement,
        moves: NDArray[np.int64],
        current: PlacementMetrics,
        expected: PlacementMetrics,
        batch: NDArray[np.int64],
    ) -> str:
        least, now, then = self.worth.min_gain, current.peak.sum(), expected.peak.sum()
        if least is not None and then > now * (1 - least):
            return f"the summed peaks fall from {now:.6g} to {then:.6g}, by less than {least} of it"
        rule = self.worth.break_even
        if rule is None or not moves.any():
            return ""
        plan = plan_transfer(self.placement, placement, rule.expert_bytes, links=rule.links)
        saved = saving_per_step(self.placement, placement, batch, rule.objective)
        steps = plan.break_even_steps(saved)
        if steps <= rule.steps:
            return ""
        return f"the moves are repaid after {steps:.0f} steps, and {rule.steps} are allowed"

    def _placed(
        self, load: NDArray[np.int64], current: PlacementMetrics, batch: NDArray[np.int64]
    ) -> Placement:
        """Return what the method answers, in the layers that gain enough and within the budget."""
        budget = self.worth.max_moves
        takes = resolve_placer(self.method).traits.takes
        heeds = budget is not None and "max_moves" in takes
        tokens = max(1, round(int(batch.sum(axis=1).max()) / self.top_k))
        plan = solve_placement(
            load,
            num_gpus=self.placement.num_gpus,
            slots_per_gpu=self.placement.slots_per_gpu,
            num_nodes=self.num_nodes,
            num_groups=self.num_groups,
            previous=self.placement,
            max_moves=budget if heeds else None,
            method=self.method,
            distinct=self.distinct,
            tokens_per_batch=tokens if "tokens_per_batch" in takes else None,
            top_k=self.top_k,
            threads=self.threads,
        )
        before, after = current.peak, plan.metrics.peak
        changes = np.ones(len(before), np.bool_)
        if self.worth.min_layer_gain is not None:
            changes &= after <= before * (1 - self.worth.min_layer_gain)
        if budget is not None and plan.moves is not None:
            moves = np.where(changes, plan.moves, 0).tolist()
            if sum(moves) > budget:
                reached = np.where(changes, after, before).tolist()
                ends = zip(before.tolist(), moves, reached, strict=True)
                changes &= spend([[(0, was), (n, will)] for was, n, will in ends], budget) > 0
        slots = np.where(changes[:, None, None], plan.placement.slots, self.placement.slots)
        return Placement(slots, self.placement.num_experts, allow_missing=True)

    def _commit(self, heat: HeatStep) -> tuple[Commit, ...]:
        decision = self._decision
        if decision is None or decision.declined or not heat.committed:
            return ()
        slots = np.array(self.placement.slots)
        layers = list(heat.committed)
        slots[layers] = decision.placement.slots[layers]
        self.placement = Placement(slots, self.placement.num_experts, allow_missing=True)
        if heat.committed.stop == len(slots) and self.record is not None:
            write_placement(self.placement, self.record, format=self.record_format)
        return tuple(Commit(layer, int(decision.moves[layer])) for layer in layers)


class _Window:
    """What a decision needs to know of the iterations beside their load."""

    def __init__(self) -> None:
        self._tokens = self._iterations = 0
        self._balancedness: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, tokens: int, balancedness: float | None) -> None:
        self._tokens += tokens
        self._iterations += 1
        if balancedness is not None:
            self._balancedness.append(balancedness)

    @property
    def balancedness(self) -> float:
        """The mean over the last iterations."""
        return sum(self._balancedness) / max(len(self._balancedness), 1)

    def mean_batch(self, load: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a batch as large as those since the last window, shared as `load`; start again."""
        share = self._tokens / max(self._iterations, 1) / max(int(load.sum()), 1)
        self._tokens = self._iterations = 0
        return np.asarray(np.rint(load * share), dtype=np.int64)


def _log(decision: Decision) -> None:
    now, then = decision.current, decision.expected
    _logger.info(
        "[Expert Hotness] Current: mean=%.3f, max=%.3f, Updated: mean=%.3f, max=%.3f",
        now.par_mean,
        now.par_max,
        then.par_mean,
        then.par_max,
    )
    for layer, pair in enumerate(zip(now.par.tolist(), then.par.tolist(), strict=True)):
        _logger.debug("[Expert Hotness] layer %d: Current: %.3f, Updated: %.3f", layer, *pair)
    if decision.declined:
        _logger.info("[Expert Hotness] nothing changes: %s", decision.declined)
