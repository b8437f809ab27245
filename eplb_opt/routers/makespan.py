"""`makespan`: any objective at serving speed, with the best bound that the core proves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.pricing import core_pricing
from eplb_opt.routers.base import Context, Solve, Traits, refuse

if TYPE_CHECKING:
    from eplb_opt.routing import Routing


@dataclass(frozen=True, slots=True)
class Makespan:
    """Search and bounds for the makespan under any objective, in the compiled core.

    The fewest activations A* (matching) and the fewest tokens N* (flow) on the fullest GPU each
    need a time; no routing is faster than either. Where neither answer, nor a greedy one, meets
    that bound, target times are tried. For each, the caps on activations and tokens that the target
    gives every GPU are refuted, by the replicas that each expert needs under them (its k-demand), a
    flow, a b-matching, and branching on what is left; or a routing within them is found, or one
    near them, which chains of moves then improve. Written out in ``solvers/cpp/makespan.hpp``,
    ``branching.hpp`` and ``rebalance.hpp``.

    Parameters
    ----------
    work
        When to stop: links of chains tried, some 35 ns each, and as much of whatever else takes as
        long. What 1,950 leave more than 10 % above the best bound, or 2 % and the time of an
        activated replica, gets 60 times the work, up to 120,000. The same work gives the same
        answer, on every machine and number of threads.

    Raises
    ------
    ValueError
        Work that is negative.

    Examples
    --------
    >>> from eplb_opt.routing import solve_routing
    >>> placement = Placement([[0, 1], [0, 2]])
    >>> routing = solve_routing(
    ...     placement, [400, 90, 10], objective="deepseek-v3-fp8", method="makespan"
    ... )
    >>> routing.tokens.tolist(), float(routing.makespan), float(routing.gap)
    ([[98, 90], [302, 10]], 29.56, 0.0)
    """

    traits: ClassVar[Traits] = Traits(
        "search with bounds for any objective, at serving speed", exact=True, compiled=True
    )

    work: int = 1950

    def __post_init__(self) -> None:
        if self.work < 0:
            raise ValueError(f"makespan: work must be at least 0, not {self.work}")

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        core, work = placement.core, self.work
        pricing = core_pricing(objective, placement.num_gpus)

        def solve(tokens: NDArray[np.int64], out: Routing, _: Context) -> None:
            bad = _core.route_makespan(core, tokens, out.core, threads, pricing, work)
            if bad >= 0:
                refuse(placement, tokens, bad)

        return solve


Prove = Callable[[_core.Placement, object, _core.Answer, int], int]
"""Write bounds into an answer; return the first problem with bad tokens, or -1."""


def prover(placement: Placement, objective: Objective) -> Prove:
    """Return what proves a bound for an answer that another method gave."""
    if objective.counts_activations:
        return _core.prove_activations
    if objective.counts_tokens:
        return _core.prove_tokens
    pricing, work = core_pricing(objective, placement.num_gpus), Makespan().work
    return lambda core, tokens, answer, threads: _core.prove_makespan(
        core, tokens, answer, threads, pricing, work
    )
