"""`metro`: the greedy router of METRO, its locks serialised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import Context, Solve, Traits, evaluate, refuse

if TYPE_CHECKING:
    from eplb_opt.routing import Routing

Order = Literal["expert", "random", "single-copy-first"]


@dataclass(frozen=True, slots=True)
class Metro:
    """Each live expert in turn goes to the GPU with the fewest activated so far.

    Algorithm 1 of METRO (arXiv 2512.09277): there a thread per expert takes the locks of its
    candidate GPUs and adds itself to the smallest counter, so the order is whatever the locks make
    it. Here the order is explicit; ties go to the lowest GPU.

    Parameters
    ----------
    order
        ``"expert"``: ascending expert id. ``"random"``: a permutation per layer drawn from `seed`.
        ``"single-copy-first"``: experts with one candidate GPU, which have no choice, before the
        others. Or the order itself, as a tuple of the expert ids, for all layers.
    seed
        For ``order="random"``.

    Notes
    -----
    O(candidates) per problem.
    """

    traits: ClassVar[Traits] = Traits(
        "METRO's greedy router (Algorithm 1) in a fixed order", compiled=True
    )

    order: Order | tuple[int, ...] = "expert"
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.order, str) and self.order not in get_args(Order):
            raise ValueError(f"unknown order {self.order!r}; known: {', '.join(get_args(Order))}")

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        core, order = placement.core, self._orders(placement)
        counts_activations = objective.name == "activations"

        def solve(tokens: NDArray[np.int64], out: Routing, _: Context) -> None:
            bad = _core.route_metro(core, tokens, out.core, threads, order)
            if bad >= 0:
                refuse(placement, tokens, bad)
            if not counts_activations:
                evaluate(out)

        return solve

    def _orders(self, placement: Placement) -> NDArray[np.int32] | None:
        """Return int32 [layers, experts], or None for ascending ids, which need no table."""
        layers, experts = placement.num_layers, placement.num_experts
        if self.order == "expert":
            return None
        if self.order == "random":
            ids = np.tile(np.arange(experts, dtype=np.int32), (layers, 1))
            return np.random.default_rng(self.seed).permuted(ids, axis=1)
        if self.order == "single-copy-first":
            return np.argsort(placement.candidates > 1, axis=1, kind="stable").astype(np.int32)
        given = np.asarray(self.order, dtype=np.int32)
        if not np.array_equal(np.sort(given), np.arange(experts)):
            raise ValueError(f"order must hold every expert from 0 to {experts - 1} once")
        return np.tile(given, (layers, 1))
