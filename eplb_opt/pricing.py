"""Objectives as the compiled core takes them, and the times that it finds by them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.objective import Objective

__all__ = ["core_pricing", "slowest_gpu"]


def core_pricing(objective: Objective, num_gpus: int) -> _core.Pricing:
    """Return an objective as the core takes it.

    Raises
    ------
    ValueError
        If its slowness is of another number of GPUs.
    """
    objective.require_gpus(num_gpus)
    pieces = [(p.offset, p.activation, p.tile, p.token) for p in objective.linear]
    curve = objective.curves[0] if objective.curves else None
    return _core.Pricing(
        np.array(pieces, np.float64).reshape(-1, 4),
        np.array(curve.tokens if curve else (), np.float64),
        np.array(curve.times if curve else (), np.float64),
        float(objective.tile_tokens),
        np.array(objective.slowness or (1.0,) * num_gpus, np.float64),
        objective.split,
    )


def slowest_gpu(tokens: NDArray[np.int64], objective: Objective) -> NDArray[np.float64]:
    """Return the largest GPU's time, float64 ``[...]``: `Objective.time`'s maximum, to the bit.

    Parameters
    ----------
    tokens
        Int64 ``[..., gpus, slots]``, contiguous: tokens of every replica.
    objective
        What they are priced by.

    Raises
    ------
    ValueError
        If its slowness is of another number of GPUs.

    Examples
    --------
    >>> slowest_gpu(np.array([[[300, 2], [0, 9]]]), Objective.preset("deepseek-v3-fp8"))
    array([29.56])
    """
    makespan = np.empty(tokens.shape[:-2])
    _core.price(tokens, core_pricing(objective, tokens.shape[-2]), makespan)
    return makespan
