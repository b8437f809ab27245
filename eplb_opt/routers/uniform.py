"""`uniform`: the equal split that EPLB's placement assumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import SPLITTING, Context, Solve, Traits, allows_split, finish

if TYPE_CHECKING:
    from eplb_opt.routing import Routing


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every replica of an expert takes the same share, to the token.

    Of t tokens over c replicas each takes ``t // c``; the ``t % c`` left over go one each to
    replicas e, e + 1, ... (mod c) of expert e, so that the turn does not always start at low GPUs.

    Notes
    -----
    O(slots) per problem, vectorised.

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
    )

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        layer = np.arange(placement.num_layers)[:, None]
        expert = np.maximum(placement.expert_of, 0)
        filled = placement.expert_of >= 0
        copies = np.maximum(placement.copies[layer, expert], 1)
        turn = (placement.replica_index - expert) % copies

        def solve(tokens: NDArray[np.int64], out: Routing, _: Context) -> None:
            demand = tokens.reshape(-1, placement.num_layers, placement.num_experts)
            share, left = np.divmod(demand[:, layer, expert], copies)
            finish(out, (share + (turn < left)) * filled)

        return solve
