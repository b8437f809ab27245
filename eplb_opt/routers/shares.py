"""How fixed shares of an expert's replicas become tokens per slot, in the compiled core."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.pricing import core_pricing
from eplb_opt.routers.base import Context, Solve, refuse

if TYPE_CHECKING:
    from eplb_opt.routing import Routing


def route_shares(
    placement: Placement,
    objective: Objective,
    threads: int,
    ends: NDArray[np.float64] | None = None,
) -> Solve:
    """Return a router that splits every expert as ``solvers/cpp/shares.hpp`` says.

    `ends`, float64 in the shape of `Placement.logical_to_physical`, says at which part of its
    expert's tokens a replica's own end; None: all take the same, to the token.
    """
    core, pricing = placement.core, core_pricing(objective, placement.num_gpus)
    held = placement.logical_to_physical >= 0
    slots = placement.logical_to_physical[held]
    first = np.concatenate([[0], np.cumsum(placement.copies)]).astype(np.int32)
    of_slots = None if ends is None else ends[held]

    def solve(tokens: NDArray[np.int64], out: Routing, _: Context) -> None:
        bad = _core.route_shares(core, tokens, out.core, threads, pricing, first, slots, of_slots)
        if bad >= 0:
            refuse(placement, tokens, bad)

    return solve
