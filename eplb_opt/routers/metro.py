"""`metro`: the greedy router of METRO, its locks serialised."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

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
        others. Or the order itself, as a sequence of all expert ids, for all layers; it is kept as
        a tuple.
    seed
        For ``order="random"``; not negative.

    Raises
    ------
    ValueError
        An unknown name of an order, a negative seed; and from `bind`, ids that are not every expert
        of the placement once.
    TypeError
        An order of what are not integers.

    Notes
    -----
    O(candidates) per problem.

    Examples
    --------
    Expert 0 takes GPU 0, and expert 1, which has no other, comes second there. The other way round
    each has a GPU:

    >>> from eplb_opt.routing import solve_routing
    >>> placement = Placement([[0, 1], [0, 2]])
    >>> solve_routing(placement, [1, 1, 0], method="metro").activated
    array([2, 0])
    >>> solve_routing(placement, [1, 1, 0], method=Metro(order=[1, 0, 2])).activated
    array([1, 1])
    """

    traits: ClassVar[Traits] = Traits(
        "METRO's greedy router (Algorithm 1) in a fixed order", compiled=True
    )

    order: Order | Sequence[int] | NDArray[np.integer[Any]] = "expert"
    seed: int = 0

    def __post_init__(self) -> None:
        known = ", ".join(get_args(Order))
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, not {self.seed}")
        if isinstance(self.order, str):
            if self.order not in get_args(Order):
                raise ValueError(f"unknown order {self.order!r}; known: {known}")
            return
        try:
            ids = tuple(operator.index(expert) for expert in self.order)
        except TypeError:
            raise TypeError(
                f"order must be one of {known}, or a sequence of integers, not {self.order!r}"
            ) from None
        object.__setattr__(self, "order", ids)

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it.

        Raises
        ------
        ValueError
            If an order of one's own does not hold every expert once.
        """
        core, order = placement.core, self.orders(placement)
        counts_activations = objective.counts_activations

        def solve(tokens: NDArray[np.int64], out: Routing, _: Context) -> None:
            bad = _core.route_metro(core, tokens, out.core, threads, order)
            if bad >= 0:
                refuse(placement, tokens, bad)
            if not counts_activations:
                evaluate(out)

        return solve

    def orders(self, placement: Placement) -> NDArray[np.int32] | None:
        """Return int32 [layers, experts], or None for ascending ids, which need no table."""
        layers, experts = placement.num_layers, placement.num_experts
        if self.order == "expert":
            return None
        if self.order == "random":
            ids = np.tile(np.arange(experts, dtype=np.int32), (layers, 1))
            return np.random.default_rng(self.seed).permuted(ids, axis=1)
        if self.order == "single-copy-first":
            return np.argsort(placement.candidates > 1, axis=1, kind="stable").astype(np.int32)
        _require_every_expert_once(self.order, experts)
        return np.tile(np.array(self.order, dtype=np.int32), (layers, 1))


def _require_every_expert_once(order: Sequence[int] | NDArray[Any], experts: int) -> None:
    times = Counter(order)
    wrong = (
        f"{expert} is {'missing' if times[expert] == 0 else 'repeated'}"
        for expert in range(experts)
        if times[expert] != 1
    )
    unknown = (f"{expert} is not an expert" for expert in times if not 0 <= expert < experts)
    problem = next(unknown, None) or next(wrong, None)
    if problem:
        raise ValueError(f"order must hold every expert from 0 to {experts - 1} once; {problem}")
