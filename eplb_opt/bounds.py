"""Lower bounds from certificates: a set of GPUs, a count, and nothing to trust.

Tokens of an expert whose replicas all lie in a GPU set Q must be served in Q. So some GPU of Q has
at least ``ceil(count / |Q|)`` of them, where the count is of live experts (each activates at least
one replica) or of tokens. For both objectives some Q makes this bound equal the optimum (max-flow =
min-cut), and the exact routers return it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt.demand import as_tokens, reject_tokens
from eplb_opt.errors import InvalidTokensError
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement

__all__ = ["certified_bound"]


def certified_bound(
    placement: Placement,
    tokens: ArrayLike,
    certificate: ArrayLike,
    objective: Objective | str = "activations",
) -> NDArray[np.float64]:
    """Return the makespan that a GPU set proves to be needed, by counting alone.

    Parameters
    ----------
    placement
        Where the replicas are.
    tokens
        Int ``[..., layers, experts]``.
    certificate
        Bool ``[..., layers, gpus]``, as `Routing.certificate`.
    objective
        ``"activations"`` or ``"tokens"``.

    Returns
    -------
    NDArray[np.float64]
        ``[..., layers]``; 0 for an empty set.

    Raises
    ------
    InvalidTokensError, InfeasibleError
        Tokens or a certificate of another shape; tokens that are negative or cannot be served.

    Notes
    -----
    O(slots) per problem, in numpy, sharing no code with the solvers whose answers it checks.

    Examples
    --------
    >>> placement = Placement([[0, 1], [0, 2]])
    >>> certified_bound(placement, [1, 1, 1], [True, True])
    array(2.)
    """
    demand = as_tokens(placement, tokens)
    reject_tokens(placement, demand)
    lead = demand.shape[:-1]
    given = np.asarray(certificate, dtype=np.bool_)
    if given.shape != (*lead, placement.num_gpus):
        raise InvalidTokensError(
            f"a certificate for these tokens has shape {[*lead, placement.num_gpus]}, "
            f"not {list(given.shape)}"
        )
    experts, slots = placement.num_experts, placement.slots_per_gpu
    batches = demand.size // (placement.num_layers * experts)
    members = given.reshape(batches, placement.num_layers, placement.num_gpus)

    # An expert is confined to Q when no slot outside Q holds it.
    outside = np.repeat(~members, slots, axis=-1) & (placement.expert_of >= 0)
    escapes = np.zeros((*members.shape[:2], experts), np.bool_)
    batch, layer, slot = np.nonzero(outside)
    escapes[batch, layer, placement.expert_of[layer, slot]] = True

    weights = demand.reshape(batches, placement.num_layers, experts)
    if Objective.of(objective).counts_activations:
        weights = (weights > 0).astype(np.int64)
    count = np.where(escapes, 0, weights).sum(axis=-1)
    size = members.sum(axis=-1)
    return np.asarray(-(-count // np.maximum(size, 1)) * (size > 0), np.float64).reshape(lead)
