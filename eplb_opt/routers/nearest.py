"""`nearest`: one fixed replica per source GPU and expert, near it if possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers.base import Solve, Traits
from eplb_opt.routers.dispatch import send_by_source


@dataclass(frozen=True, slots=True)
class Nearest:
    """SGLang's static dispatch.

    Every source GPU sends all of an expert's tokens to one replica: the only one; else the first on
    the same GPU; else the first on the same node, if not all replicas are there; else one of a fair
    draw, in which the replicas are dealt to the remaining sources as evenly as they go round.

    Parameters
    ----------
    gpus_per_node
        GPUs joined by the fast link.
    seed
        For the draw.
    """

    traits: ClassVar[Traits] = Traits(
        "a fixed replica per source GPU, near it if possible (SGLang static)",
        needs=("source_tokens",),
    )

    gpus_per_node: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node must be at least 1, not {self.gpus_per_node}")

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        rng = np.random.default_rng(self.seed)
        layers, gpus, experts = placement.num_layers, placement.num_gpus, placement.num_experts
        chosen = np.full((layers, gpus, experts), -1, np.int32)
        for layer in range(layers):
            for expert in range(experts):
                replicas = placement.replicas(expert, layer)
                if replicas.size:
                    chosen[layer, :, expert] = self._replica_for_each_source(
                        replicas, replicas // placement.slots_per_gpu, gpus, rng
                    )
        return send_by_source(placement, chosen, "nearest")

    def _replica_for_each_source(
        self,
        replicas: NDArray[np.int32],
        homes: NDArray[np.int32],
        gpus: int,
        rng: np.random.Generator,
    ) -> NDArray[np.int32]:
        if replicas.size == 1:
            return np.repeat(replicas, gpus)
        sources = np.arange(gpus)[:, None]
        same_gpu = homes == sources
        same_node = homes // self.gpus_per_node == sources // self.gpus_per_node
        narrows = same_node.any(axis=1) & ~same_node.all(axis=1)
        near = np.where(same_gpu.any(axis=1, keepdims=True), same_gpu, same_node)
        chosen: NDArray[np.int32] = replicas[near.argmax(axis=1)]
        far = np.flatnonzero(~same_gpu.any(axis=1) & ~narrows)
        rounds, rest = divmod(far.size, replicas.size)
        dealt = np.concatenate([np.tile(replicas, rounds), rng.permutation(replicas)[:rest]])
        chosen[far] = rng.permutation(dealt)
        return chosen
