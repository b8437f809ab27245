"""DeepSeek's ``eplb.rebalance_experts`` (github.com/deepseek-ai/EPLB)."""

from __future__ import annotations

from typing import Any

import numpy as np

from eplb_opt.adapters.tensors import as_given, to_array
from eplb_opt.placement import Placement, slots_for
from eplb_opt.placing import solve_placement

__all__ = ["place", "rebalance_experts"]


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Any, Any, Any]:
    """Place the experts as DeepSeek's EPLB does; hierarchical if the nodes divide the groups.

    Parameters
    ----------
    weight
        ``[layers, experts]``, tensor or array: the load of each expert.
    num_replicas
        Physical slots; the GPUs divide them.
    num_groups, num_nodes, num_gpus
        Groups of experts, nodes, GPUs.

    Returns
    -------
    tuple
        Int64, of the kind of `weight`: the expert in every slot, ``[layers, num_replicas]``; each
        expert's slots by rising id, then -1, ``[layers, experts, most copies]``; its copies,
        ``[layers, experts]``. The original gives an expert's slots in another order.

    Raises
    ------
    EplbError, ValueError
        As `eplb_opt.solve_placement`, where the original fails an assertion.

    Examples
    --------
    >>> import numpy as np
    >>> phy2log, log2phy, logcnt = rebalance_experts(np.array([[90, 10, 10, 10]]), 6, 1, 1, 2)
    >>> phy2log.tolist(), logcnt.tolist()
    ([[0, 0, 3, 0, 1, 2]], [[3, 1, 1, 1]])
    """
    hierarchical = num_nodes > 0 and num_groups % num_nodes == 0
    placement = place(weight, num_replicas, num_groups, num_nodes, num_gpus, hierarchical)
    return maps(placement, weight)


def place(
    weight: Any,
    num_replicas: int,
    num_groups: int | None,
    num_nodes: int,
    num_gpus: int,
    hierarchical: bool,
) -> Placement:
    """Place by DeepSeek's EPLB in the form that is asked for; the global one ignores the nodes."""
    if not hierarchical or num_groups is None:
        num_groups = num_nodes = 1
    return solve_placement(
        to_array(weight),
        num_gpus=num_gpus,
        slots_per_gpu=slots_for(num_replicas, num_gpus),
        num_nodes=num_nodes,
        num_groups=num_groups,
        method="deepseek:form=hierarchical",
    ).placement


def maps(placement: Placement, given: Any) -> tuple[Any, Any, Any]:
    """Return phy2log, log2phy and logcnt of a placement, int64, of the kind that was given."""
    arrays = (placement.expert_of, placement.logical_to_physical, placement.copies)
    phy2log, log2phy, logcnt = (as_given(array.astype(np.int64), given) for array in arrays)
    return phy2log, log2phy, logcnt
