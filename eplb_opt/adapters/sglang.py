"""SGLang's ``sglang.srt.eplb.eplb_algorithms.deepseek.rebalance_experts``."""

from __future__ import annotations

from typing import Any

from eplb_opt.adapters.deepseek import maps, place

__all__ = ["rebalance_experts"]


def rebalance_experts(
    weight: Any,
    num_replicas: int,
    num_groups: int | None,
    num_nodes: int,
    num_gpus: int,
    enable_hierarchical: bool,
) -> tuple[Any, Any, Any]:
    """Place the experts as DeepSeek's EPLB does, in the form that is asked for.

    Parameters
    ----------
    weight, num_replicas, num_groups, num_nodes, num_gpus
        As in `eplb_opt.adapters.deepseek.rebalance_experts`; the groups may be None if
        `enable_hierarchical` is false.
    enable_hierarchical
        Whether groups stay on nodes; else groups and nodes are ignored.

    Returns
    -------
    tuple
        As in `eplb_opt.adapters.deepseek.rebalance_experts`.

    Raises
    ------
    EplbError, ValueError
        As `eplb_opt.solve_placement`; no groups, or nodes that do not divide them, in the
        hierarchical form.

    Examples
    --------
    >>> import numpy as np
    >>> load = np.array([[8, 6, 5, 5]])
    >>> rebalance_experts(load, 4, 2, 2, 2, enable_hierarchical=True)[0].tolist()
    [[0, 1, 2, 3]]
    >>> rebalance_experts(load, 4, 2, 2, 2, enable_hierarchical=False)[0].tolist()
    [[0, 3, 1, 2]]
    """
    if enable_hierarchical and num_groups is None:
        raise ValueError("the hierarchical form needs the number of expert groups")
    placement = place(weight, num_replicas, num_groups, num_nodes, num_gpus, enable_hierarchical)
    return maps(placement, weight)
