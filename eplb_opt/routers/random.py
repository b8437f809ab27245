"""`random`: every token's replica at random."""

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
class Random:
    """SGLang's dynamic dispatch: each token picks one of its expert's replicas uniformly.

    The rule is that of ``python/sglang/srt/eplb/expert_location_dispatch.py`` (sgl-project/sglang).
    Only counts matter here, so an expert's tokens are drawn at once from the multinomial
    distribution. The same seed gives the same answer to the same call.

    Parameters
    ----------
    seed
        Of the generator; not negative.

    Raises
    ------
    ValueError
        A negative seed.

    Notes
    -----
    O(experts x most copies) per problem, vectorised.

    Examples
    --------
    >>> from eplb_opt.routing import solve_routing
    >>> placement = Placement([[0, 1], [0, 2]])
    >>> first, again = (solve_routing(placement, [99, 7, 7], method="random:seed=4") for _ in "ab")
    >>> first.expert_tokens().tolist(), bool((first.tokens == again.tokens).all())
    ([99, 7, 7], True)
    """

    traits: ClassVar[Traits] = Traits(
        "a random replica for every token (SGLang dynamic)",
        objectives=SPLITTING,
        solves=allows_split,
    )

    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, not {self.seed}")

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        layers, slots = placement.expert_of.shape
        table = placement.logical_to_physical
        # Replicas fill the table's columns from the right: multinomial gives the tokens that
        # rounding leaves over to the last column, which must be a replica.
        copies, width = placement.copies, table.shape[-1]
        unused = width - copies[..., None]
        shares = (np.arange(width) >= unused) / np.maximum(copies[..., None], 1)
        layer, expert, replica = np.nonzero(table >= 0)
        slot = table[layer, expert, replica]
        column = replica + width - copies[layer, expert]

        def solve(tokens: NDArray[np.int64], out: Routing, _: Context) -> None:
            demand = tokens.reshape(-1, layers, placement.num_experts)
            drawn = np.random.default_rng(self.seed).multinomial(demand, shares)
            routed = np.zeros((demand.shape[0], layers, slots), np.int64)
            routed[:, layer, slot] = drawn[:, layer, expert, column]
            finish(out, routed)

        return solve
