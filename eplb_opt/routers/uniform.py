"""`uniform`: the equal split that EPLB's placement assumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
        return route_shares(placement, objective, threads)
