"""`nearest`: one fixed replica per source GPU and expert, near it if possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt.objective import Objective
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.routers.base import SPLITTING, Solve, Traits, allows_split
from eplb_opt.routers.dispatch import send_by_source


@dataclass(frozen=True, slots=True)
class Nearest:
    """SGLang's static dispatch.

    The rule is `compute_logical_to_rank_dispatch_physical_map` in
    ``python/sglang/srt/eplb/expert_location.py`` (sgl-project/sglang); the generator is another.
    Every source GPU sends all of an expert's tokens to one replica: the only one; else the first on
    the same GPU; else the first on the same node, if not all replicas are there; else one of a fair
    draw, in which the replicas are dealt to the remaining sources as evenly as they go round.

    Parameters
    ----------
    gpus_per_node
        GPUs joined by the fast link, at least 1.
    seed
        For the draw; not negative.

    Raises
    ------
    ValueError
        No GPUs in a node, or a negative seed.

    Notes
    -----
    Needs `source_tokens`, or `topk_ids` by source. O(sources x experts) per problem, vectorised.

    Examples
    --------
    Nodes of two GPUs: sources 0 and 1 use the replica of expert 0 on GPU 0, sources 2 and 3 the
    one on GPU 3.

    >>> from eplb_opt.routing import solve_routing
    >>> placement = Placement([[0], [1], [2], [0]])
    >>> by_source = [[1, 0, 0], [10, 0, 0], [100, 0, 0], [1000, 0, 0]]
    >>> nearest = Nearest(gpus_per_node=2)
    >>> routing = solve_routing(placement, [1111, 0, 0], method=nearest, source_tokens=by_source)
    >>> routing.gpu_tokens()
    array([  11,    0,    0, 1100])
    """

    traits: ClassVar[Traits] = Traits(
        "a fixed replica per source GPU, near it if possible (SGLang static)",
        objectives=SPLITTING,
        solves=allows_split,
        needs=("source_tokens",),
    )

    gpus_per_node: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node must be at least 1, not {self.gpus_per_node}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, not {self.seed}")

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        chosen = _near_replica(placement, self.gpus_per_node)
        chosen = _with_draw(placement, chosen, np.random.default_rng(self.seed))
        return send_by_source(placement, chosen, "nearest")


def _near_replica(placement: Placement, gpus_per_node: int) -> NDArray[np.int32]:
    """Return int32 [layers, sources, experts]: the replica that nearness settles, or -1.

    It settles experts with one replica, or with one on the source's GPU; or with one on the
    source's node, if that leaves some out.
    """
    table = placement.logical_to_physical
    lowest, highest = table[..., 0], table.max(axis=-1)
    gpus_per_node = min(gpus_per_node, placement.num_gpus)
    slots_per_node = placement.slots_per_gpu * gpus_per_node
    node_of_gpu = np.arange(placement.num_gpus) // gpus_per_node

    same_gpu = _first_replica(placement, placement.slots_per_gpu)
    same_node = _first_replica(placement, slots_per_node)[:, node_of_gpu]
    # Physical ids ascend with the nodes: the first and the last replica tell whether one has all.
    on_several_nodes = (lowest // slots_per_node != highest // slots_per_node)[:, None]
    near = np.where(on_several_nodes & (same_gpu == EMPTY), same_node, same_gpu)
    return np.where(placement.copies[:, None] == 1, lowest[:, None], near)


def _first_replica(placement: Placement, slots_per_part: int) -> NDArray[np.int32]:
    """Return int32 [layers, parts, experts]: an expert's lowest slot in a GPU or node, or -1."""
    layers, slots = placement.expert_of.shape
    parts = -(-slots // slots_per_part)
    first = np.full((layers, parts, placement.num_experts), EMPTY, np.int32)
    # Of several values assigned to one place the last one stays: the slots come downwards.
    layer, slot = (axis[::-1] for axis in np.nonzero(placement.expert_of != EMPTY))
    first[layer, slot // slots_per_part, placement.expert_of[layer, slot]] = slot
    return first


def _with_draw(
    placement: Placement, chosen: NDArray[np.int32], rng: np.random.Generator
) -> NDArray[np.int32]:
    """Deal the replicas of every expert to the sources that have none yet, in a random order."""
    undecided = (chosen == EMPTY) & (placement.copies > 0)[:, None]
    layer, expert = np.nonzero(undecided.any(axis=1))
    far = undecided[layer, :, expert]
    copies = placement.copies[layer, expert, None]
    replicas = placement.logical_to_physical[layer, expert]
    # Sorting random keys shuffles: far sources among themselves, replicas before the padding.
    turn = _shuffled(far, rng).argsort(axis=1, kind="stable")
    deal = _shuffled(replicas != EMPTY, rng)
    drawn = np.take_along_axis(replicas, np.take_along_axis(deal, turn % copies, axis=1), axis=1)
    chosen[layer, :, expert] = np.where(far, drawn, chosen[layer, :, expert])
    return chosen


def _shuffled(members: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int64]:
    """Return int64 [rows, n]: the places of each row's members in random order, then the others."""
    keys = np.where(members, rng.random(members.shape), 1.0)
    return np.argsort(keys, axis=1, kind="stable")
