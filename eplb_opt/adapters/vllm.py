"""vLLM's ``vllm.distributed.eplb.policy.default.DefaultEplbPolicy``."""

from __future__ import annotations

from typing import Any

import numpy as np

from eplb_opt import _core
from eplb_opt.adapters.deepseek import place
from eplb_opt.adapters.tensors import as_given, to_array
from eplb_opt.errors import InvalidPlacementError

__all__ = ["DefaultEplbPolicy"]


class DefaultEplbPolicy:
    """vLLM's default policy: DeepSeek's EPLB, then experts that stay on a GPU keep their slots."""

    @classmethod
    def rebalance_experts(
        cls,
        weight: Any,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: Any | None = None,
    ) -> Any:
        """Place the experts; hierarchical if the nodes divide the groups.

        Parameters
        ----------
        weight
            ``[layers, experts]``, tensor or array: the load of each expert.
        num_replicas
            Physical slots; the GPUs divide them.
        num_groups, num_nodes, num_ranks
            Groups of experts, nodes, GPUs.
        old_global_expert_indices
            ``[layers, num_replicas]``, tensor or array: the expert in every slot now, or None.

        Returns
        -------
        Tensor or NDArray
            Int64 ``[layers, num_replicas]``, of the kind of `weight`: the expert in every slot.

        Raises
        ------
        EplbError, ValueError
            As `eplb_opt.solve_placement`; old indices of another shape.

        Examples
        --------
        >>> load, old = np.array([[90, 10, 10, 10]]), np.array([[3, 1, 0, 2, 1, 0]])
        >>> policy = DefaultEplbPolicy()
        >>> policy.rebalance_experts(load, 6, 1, 1, 2).tolist()
        [[0, 0, 3, 0, 1, 2]]
        >>> policy.rebalance_experts(load, 6, 1, 1, 2, old).tolist()
        [[3, 0, 0, 2, 1, 0]]
        """
        hierarchical = num_nodes > 0 and num_groups % num_nodes == 0
        placement = place(weight, num_replicas, num_groups, num_nodes, num_ranks, hierarchical)
        slots = np.array(placement.slots)
        if old_global_expert_indices is not None:
            old = to_array(old_global_expert_indices)
            if old.shape != placement.expert_of.shape:
                raise InvalidPlacementError(
                    f"old_global_expert_indices must be {list(placement.expert_of.shape)}, "
                    f"not of shape {old.shape}"
                )
            _core.keep_slots(np.ascontiguousarray(old.reshape(slots.shape), np.int32), slots)
        return as_given(slots.reshape(placement.expert_of.shape).astype(np.int64), weight)
