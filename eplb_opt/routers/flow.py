"""`flow`: fewest tokens on the fullest GPU, proven."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import Context, Solve, Traits, refuse

if TYPE_CHECKING:
    from eplb_opt.routing import Routing


@dataclass(frozen=True, slots=True)
class Flow:
    """Parametric max-flow from experts to GPUs, integral, in the compiled core.

    Experts are poured over their replicas like water; then GPUs above the target push tokens, in
    waves, towards GPUs below it. The GPUs Q that reach none below it hold every replica of what
    they serve, so the target rises to ``ceil(tokens held in Q / |Q|)``, a bound whose certificate
    is Q (``solvers/cpp/flow.hpp``).

    Notes
    -----
    A wave takes O(slots x GPUs / 64) for the distances to GPUs below the target; at 64 GPUs there
    are about ten at most, and no new target or one.

    Examples
    --------
    Five tokens of expert 0, on both GPUs, are split so that both GPUs serve four:

    >>> from eplb_opt.routing import solve_routing
    >>> placement = Placement([[0, 1], [0, 2]])
    >>> routing = solve_routing(placement, [5, 3, 0], method=Flow(), objective="tokens")
    >>> routing.tokens.tolist(), float(routing.bound)
    ([[1, 3], [4, 0]], 4.0)
    """

    traits: ClassVar[Traits] = Traits(
        "max-flow: fewest tokens on the fullest GPU, experts split to the token",
        objectives="tokens (split allowed)",
        solves=lambda objective: objective.counts_tokens,
        exact=True,
        compiled=True,
    )

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        core = placement.core

        def solve(tokens: NDArray[np.int64], out: Routing, _: Context) -> None:
            bad = _core.route_flow(core, tokens, out.core, threads)
            if bad >= 0:
                refuse(placement, tokens, bad)

        return solve
