"""`Quotas`: every expert split by fixed shares, such as a routing of earlier batches gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import SPLITTING, Solve, Traits, allows_split
from eplb_opt.routers.shares import route_shares


@dataclass(frozen=True, slots=True, eq=False)
class Quotas:
    """A table of shares, as engines serve that solve now and then instead of for every batch.

    Replica i of an expert with t tokens takes ``rint(c_i t) - rint(c_(i-1) t)`` of them, where c_i
    is the sum of the shares of replicas 0 to i: at most one from its share.

    Parameters
    ----------
    weights : not negative, [layers, gpus, slots] or [gpus, slots]
        What the shares of an expert's replicas are in proportion to: tokens of a routing, say. The
        first replica takes all of an expert whose weights are all 0.

    Raises
    ------
    ValueError
        Weights that are not finite or negative; when it is bound, of another shape than the slots.

    Examples
    --------
    >>> from eplb_opt.routing import solve_routing
    >>> placement = Placement([[0, 1], [0, 2]])
    >>> table = Quotas(solve_routing(placement, [6, 2, 0], objective="tokens").tokens)
    >>> solve_routing(placement, [90, 3, 4], method=table).tokens.tolist()
    [[30, 3], [60, 4]]
    """

    traits: ClassVar[Traits] = Traits(
        "fixed shares of an expert's replicas, solved on earlier counts",
        objectives=SPLITTING,
        solves=allows_split,
        compiled=True,
    )

    weights: ArrayLike = field(repr=False)

    def __post_init__(self) -> None:
        weights = np.array(self.weights, np.float64)
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError("quotas: weights are finite and not negative")
        weights.flags.writeable = False
        object.__setattr__(self, "weights", weights)

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        weights = np.asarray(self.weights)
        if weights.shape != placement.slots.shape:
            problem = f"quotas: weights are {list(weights.shape)}"
            raise ValueError(f"{problem}, the placement's slots {list(placement.slots.shape)}")
        ends = _ends(placement, weights.reshape(placement.expert_of.shape))
        return route_shares(placement, objective, threads, ends)


def _ends(placement: Placement, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the parts of an expert's tokens at which its replicas' own end, one after the other.

    Float64 [layers, experts, most copies], from weights [layers, slots]; the last is exactly 1.
    """
    table = placement.logical_to_physical
    each = np.take_along_axis(weights[:, None], np.maximum(table, 0), axis=2)
    each[table < 0] = 0
    each[..., 0] = np.where(each.any(axis=-1), each[..., 0], 1)
    ends = np.cumsum(each, axis=-1)
    return np.asarray(ends / ends[..., -1:])
