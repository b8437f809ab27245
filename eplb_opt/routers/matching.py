"""`matching`: fewest activated replicas on the fullest GPU, proven."""

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
class Matching:
    """Optimal semi-matching of live experts to GPUs, in the compiled core.

    Sending all of a live expert's tokens to one replica loses nothing (METRO's Lemma 1), so the
    problem is to match live experts to GPUs that hold them with the smallest largest count: greedy,
    then alternating paths from the fullest GPU until a bound is met or no path exists (Harvey,
    Ladner, Lovász, Tamir 2003). By duality the optimum is the maximum over GPU sets Q of
    ``ceil(live experts whose replicas all lie in Q / |Q|)``; the certificate is such a Q. The
    deterministic rule is written out in ``solvers/cpp/matching.hpp``.

    Parameters
    ----------
    lexicographic
        Make the whole vector of activations, sorted downwards, the smallest, not only its first
        entry.

    Notes
    -----
    O(candidates) for the greedy start, O(slots x GPUs / 64) for each path; few paths in practice.

    Examples
    --------
    Five live experts on four GPUs: one GPU must activate two replicas, but not two of them.

    >>> from eplb_opt.routing import solve_routing
    >>> placement = Placement([[4, 0], [1, 3], [4, 2], [2, 0]])
    >>> solve_routing(placement, [1, 1, 1, 1, 1], method="matching").activated
    array([2, 2, 1, 0])
    >>> spread = Matching(lexicographic=True)
    >>> solve_routing(placement, [1, 1, 1, 1, 1], method=spread).activated
    array([1, 2, 1, 1])
    """

    traits: ClassVar[Traits] = Traits(
        "optimal semi-matching: fewest activated replicas on the fullest GPU",
        objectives="activations",
        solves=lambda objective: objective.counts_activations,
        exact=True,
        compiled=True,
    )

    lexicographic: bool = False

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        core, lexicographic = placement.core, self.lexicographic

        def solve(tokens: NDArray[np.int64], out: Routing, _: Context) -> None:
            bad = _core.route_matching(core, tokens, out.core, threads, lexicographic)
            if bad >= 0:
                refuse(placement, tokens, bad)

        return solve
