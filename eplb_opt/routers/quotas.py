"""`Quotas`: every expert split by fixed shares, such as a routing of earlier batches gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import SPLITTING, Context, Solve, Traits, allows_split, finish

if TYPE_CHECKING:
    from eplb_opt.routing import Routing


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
        layers = placement.num_layers
        layer = np.arange(layers)[:, None]
        filled = placement.expert_of >= 0
        begin, end = _intervals(placement, weights.reshape(layers, -1))

        def solve(tokens: NDArray[np.int64], out: Routing, _: Context) -> None:
            demand = tokens.reshape(-1, layers, placement.num_experts)
            each = demand[:, layer, np.maximum(placement.expert_of, 0)]
            taken = np.rint(end * each) - np.rint(begin * each)
            finish(out, (taken * filled).astype(np.int64))

        return solve


def _intervals(
    placement: Placement, weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return, [layers, slots], the part of its expert's tokens at which each slot begins and ends.

    The parts of an expert's replicas, one after the other, are exactly 0 to 1.
    """
    table = placement.logical_to_physical
    held = table >= 0
    layer = np.arange(len(table))[:, None, None]
    each = np.where(held, weights[layer, np.maximum(table, 0)], 0)
    total = each.sum(axis=-1, keepdims=True)
    each[..., :1] = np.where(total > 0, each[..., :1], 1)
    ends = np.cumsum(each, axis=-1)
    ends /= ends[..., -1:]
    begins = np.concatenate([np.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1)
    begin, end = np.zeros((2, *weights.shape))
    at = np.broadcast_to(layer, table.shape)[held], table[held]
    begin[at], end[at] = begins[held], ends[held]
    return begin, end
