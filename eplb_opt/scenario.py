"""A deployment in few words: its GPUs and slots, who places experts, on what load, how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from eplb_opt.batches import BatchFacts, Collected
from eplb_opt.errors import InvalidTokensError
from eplb_opt.heat import HeatStage, SlidingWindow, StageFilter
from eplb_opt.loop import EplbLoop, Worth
from eplb_opt.placement import Placement, slots_for
from eplb_opt.placers import PlacementMethod, first_placement, resolve_placer
from eplb_opt.placing import solve_placement
from eplb_opt.replaying import Replay, Stale, replay
from eplb_opt.routers import RoutingMethod

__all__ = ["Scenario"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A deployment whose first steps are collected, and whose other steps are served.

    Parameters
    ----------
    num_gpus
        The EP size.
    redundant
        Slots beyond one per expert.
    placer
        The placement method; None leaves expert p mod E in physical slot p, as engines start.
    stage
        Which steps' load placements are made for.
    interval
        Steps from one placement to the next, a quarter of them to the first; None: what is placed
        on the collected steps stays.
    num_nodes, num_groups
        As for `eplb_opt.solve_placement`.
    worth
        When a new placement is worth its moves.

    Raises
    ------
    ValueError
        Names that are not known, or an interval without steps.
    """

    num_gpus: int
    redundant: int = 0
    placer: str | PlacementMethod | None = None
    stage: HeatStage = "all"
    interval: int | None = None
    num_nodes: int = 1
    num_groups: int = 1
    worth: Worth = field(default_factory=Worth)

    def __post_init__(self) -> None:
        if self.stage not in get_args(HeatStage):
            known = ", ".join(get_args(HeatStage))
            raise ValueError(f"no stage is called {self.stage!r}; the known ones are: {known}")
        if self.interval is not None and self.interval < 1:
            raise ValueError(f"interval is {self.interval}; expected at least one step")
        if self.placer is not None:
            resolve_placer(self.placer)

    @property
    def label(self) -> str:
        """For tables: the placer, and how often it places."""
        name = "in order" if self.placer is None else str(self.placer)
        return name if self.interval is None else f"{name}, every {self.interval} steps"

    def start(self, collected: Collected, *, threads: int = 1) -> Placement:
        """Return what is served first, made for a load.

        Raises
        ------
        InvalidTokensError
            When nothing was collected to place by.
        InvalidPlacementError
            Slots that do not divide over the GPUs.
        EplbError
            What the placement method raises.
        """
        layers, experts = collected.load.shape
        per_gpu = slots_for(experts + self.redundant, self.num_gpus)
        if self.placer is None:
            first = first_placement(layers, self.num_gpus, per_gpu, num_experts=experts)
            return Placement(first, experts)
        if not collected.steps:
            problem = f"no step of stage {self.stage} was collected"
            raise InvalidTokensError(
                f"{problem}; collect more steps before the first that is served"
            )
        routes = "tokens_per_batch" in resolve_placer(self.placer).traits.takes
        return solve_placement(
            collected.load,
            num_gpus=self.num_gpus,
            slots_per_gpu=per_gpu,
            num_nodes=self.num_nodes,
            num_groups=self.num_groups,
            method=self.placer,
            tokens_per_batch=collected.batch_tokens if routes else None,
            top_k=collected.top_k,
            threads=threads,
        ).placement

    def loop(self, start: Placement, collected: Collected, *, threads: int = 1) -> EplbLoop:
        """Return the loop that keeps a placement up, every `interval` steps on the load of as many.

        It is vLLM's, `eplb_opt.SlidingWindow`, whose first interval is a quarter as long. Steps of
        which no stage is known are decode, as in a replay.

        Raises
        ------
        ValueError
            Without a placer and an interval, or when it is not known how stages are told.
        """
        if self.interval is None or self.placer is None:
            raise ValueError("a loop needs a placer and an interval")
        limit = collected.decode_limit
        if self.stage == "prefill" and limit is None:
            raise ValueError(
                "the trace does not tell its prefill steps; give most_decode_tokens "
                "(--most-decode-tokens)"
            )
        collect = StageFilter() if limit is None else StageFilter(self.stage, limit)
        return EplbLoop(
            start,
            SlidingWindow(self.interval, self.interval, collect),
            method=self.placer,
            num_nodes=self.num_nodes,
            num_groups=self.num_groups,
            worth=self.worth,
            top_k=collected.top_k,
            threads=threads,
        )

    def replay(
        self,
        facts: BatchFacts,
        methods: Sequence[str | RoutingMethod | Stale] = ("uniform", "metro", "makespan"),
        *,
        first_step: int,
        threads: int = 1,
        **settings: Any,
    ) -> Replay:
        """Collect the steps before `first_step`, and serve the others.

        Parameters
        ----------
        facts
            The traffic, and how its steps' stages are told.
        methods
            As for `eplb_opt.replay`.
        first_step
            The first step that is served.
        threads
            For placing, and for replaying.
        **settings
            As for `eplb_opt.replay`: ``time``, ``migration``, ``slo`` and so on.

        Raises
        ------
        EplbError, ValueError
            As `start`, `loop` and `eplb_opt.replay`.
        """
        collected = facts.collect(0, first_step, self.stage)
        start = self.start(collected, threads=threads)
        served = start if self.interval is None else self.loop(start, collected, threads=threads)
        return replay(facts, served, methods, first_step=first_step, threads=threads, **settings)
