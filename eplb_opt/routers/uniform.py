"""`uniform`: the equal split that EPLB's placement assumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import SPLITTING, Solve, Traits, allows_split
from eplb_opt.routers.shares import route_shares


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every replica of an expert takes the same share, to the token.

    Of t tokens over c replicas each takes ``t // c``; the ``t % c`` left over go one each to
    replicas e, e + 1, ... (mod c) of expert e, so that the turn does not always start at low GPUs.

    Notes
    -----
    O(experts + slots) per problem, in the compiled core.

    Examples
    --------
    Expert 0's odd token goes to its first replica, expert 1's to its second:

    >>> from eplb_opt.routing import solve_routing
    >>> solve_routing(Placement([[0, 1], [0, 1]]), [7, 7], method=Uniform()).tokens
    array([[4, 3],
           [3, 4]])
    """

    traits: ClassVar[Traits] = Traits(
        "equal split over an expert's replicas (EPLB's assumption)",
        objectives=SPLITTING,
        solves=allows_split,
        compiled=True,
    )

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        table, copies = placement.logical_to_physical, placement.copies[:, :, None]
        turn = np.arange(table.shape[2])
        replica = (turn + np.arange(placement.num_experts)[:, None]) % np.maximum(copies, 1)
        in_turn = np.take_along_axis(table, np.where(turn < copies, replica, turn), axis=2)
        return route_shares(placement, objective, threads, in_turn)
