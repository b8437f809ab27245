"""Which source GPU sends its tokens where: a routing's shares split so that few tokens travel far.

A routing says how many tokens of each expert a replica takes, not whose. Any split over the source
GPUs leaves the GPUs' loads, and so the makespan, as they are; this one keeps as many tokens as
possible on the GPU that they are on, and of the others as many as possible in its node.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt import _core
from eplb_opt.demand import as_topk_ids
from eplb_opt.errors import InvalidTokensError
from eplb_opt.placement import Placement
from eplb_opt.routers.base import Context
from eplb_opt.routing import Routing
from eplb_opt.status import Status

__all__ = ["Transport", "transport"]


@dataclass(frozen=True, slots=True, eq=False)
class Transport:
    """A routing's shares by source GPU. Without a layer axis, the axis is absent here too.

    A token that visits k experts counts k times, once for each.

    Attributes
    ----------
    routing
        What was split; its loads are unchanged.
    gpus_per_node
        GPUs joined by the fast link.
    tokens
        Int64 ``[..., layers, sources, gpus, slots]``: tokens that each replica takes from each
        source GPU; summed over the sources, `Routing.tokens`.
    same_gpu, same_node, cross_node
        Int64 ``[..., layers]``: tokens that stay on their GPU, that go to another GPU of the node,
        and that go to another node. Together they are all tokens.
    """

    routing: Routing
    gpus_per_node: int
    tokens: NDArray[np.int64]
    same_gpu: NDArray[np.int64]
    same_node: NDArray[np.int64]
    cross_node: NDArray[np.int64]

    def assign(self, topk_ids: ArrayLike) -> NDArray[np.int32]:
        """Say which physical slot serves each token's k-th expert, source by source.

        Of a source's tokens of an expert in their order, its lowest slot takes the first.

        Parameters
        ----------
        topk_ids
            Int ``[..., layers, sources, rows, k]``: the local batches whose counts were split; -1
            is padding.

        Returns
        -------
        NDArray[np.int32]
            Physical ids in the shape of `topk_ids`; -1 for padding.

        Raises
        ------
        InvalidTokensError
            If the ids are not as many as the tokens split, naming the problem, source and expert.

        Notes
        -----
        O(ids + sources * slots) per problem.

        Examples
        --------
        >>> from eplb_opt.routing import solve_routing
        >>> routing = solve_routing(Placement([[0, 1], [0, 2]]), [2, 1, 0], objective="tokens")
        >>> transport(routing, [[1, 1, 0], [1, 0, 0]]).assign([[[1], [0]], [[0], [-1]]]).tolist()
        [[[1], [0]], [[2], [-1]]]
        """
        placement, lead = self.routing.placement, self.routing.makespan.shape
        layers, sources = placement.num_layers, placement.num_gpus
        ids = as_topk_ids(topk_ids, placement.num_experts)
        if ids.shape[:-2] != (*lead, sources):
            raise InvalidTokensError(
                f"topk_ids must be {[*lead, sources]} + [rows, k] for this transport, not of shape "
                f"{ids.shape}"
            )
        # The core takes problems whose layer runs fastest: sources come before layers.
        batches, slots = self.routing.makespan.size // layers, placement.expert_of.shape[1]
        each = ids.shape[-2] * ids.shape[-1]
        by_source = ids.reshape(batches, layers, sources, each).swapaxes(1, 2)
        shares = self.tokens.reshape(batches, layers, sources, slots).swapaxes(1, 2)
        physical = np.empty(by_source.shape, np.int32)
        problem, expert = _core.assign(
            placement.core, np.ascontiguousarray(shares), np.ascontiguousarray(by_source), physical
        )
        if problem >= 0:
            batch, source, layer = np.unravel_index(problem, by_source.shape[:3])
            at = tuple(int(i) for i in np.unravel_index(batch * layers + layer, lead))
            raise InvalidTokensError(
                f"topk_ids of problem {at}, source {source} do not hold as many tokens of expert "
                f"{expert} as were split; pass the ids whose counts were given as source_tokens"
            )
        return np.ascontiguousarray(physical.swapaxes(1, 2)).reshape(ids.shape)


def transport(routing: Routing, source_tokens: ArrayLike, *, gpus_per_node: int = 8) -> Transport:
    """Split a routing's shares over the source GPUs: same GPU first, then same node, then any.

    Parameters
    ----------
    routing
        The answer to split.
    source_tokens
        Int ``[..., layers, sources, experts]``: tokens of each expert by the GPU that they are on,
        sources being the GPUs in their order; summed over sources, the tokens routed.
    gpus_per_node
        GPUs joined by the fast link, consecutive ones; the last node may hold fewer.

    Returns
    -------
    Transport
        Of all splits the one with the most tokens on their own GPU and the fewest between nodes.

    Raises
    ------
    InvalidTokensError
        Wrong shape, counts that are not those routed, or a problem without an answer.
    ValueError
        No GPUs in a node.

    Notes
    -----
    Every expert is a transportation problem of its own: what source g has of it, s[g], is to fill
    what its replicas on GPU h take, x[h]. No split keeps more than min(s[g], x[g]) of it on GPU g,
    nor more than min(Σ s, Σ x over the GPUs of n) in node n. The first step attains the former
    everywhere. It takes the same number from both sums of a node, hence from their minimum, so that
    the second step, which matches what is left in each node, still attains the latter. So the two
    aims never compete: both are met at once. The third step matches what is left anywhere.

    A step lays what sources have and what replicas lack end to end along a line each (the
    north-west corner rule); a source sends a replica the overlap of their stretches. That is
    O(sources + replicas) entries per expert and step. The answer holds the zeros too and is written
    in O(sources * slots) per problem: 9.5 MB for 58 layers of 320 slots on 64 GPUs.

    Examples
    --------
    Four GPUs, two to a node; expert 0 has a replica on every one and 12 tokens, all from GPU 0:

    >>> from eplb_opt.routing import solve_routing
    >>> placement = Placement([[0, 1], [0, 2], [0, 3], [0, 4]])
    >>> source_tokens = [[12, 0, 0, 0, 0], [0, 1, 3, 0, 0], [0] * 5, [0, 0, 0, 0, 4]]
    >>> routing = solve_routing(placement, [12, 1, 3, 0, 4], objective="tokens")
    >>> routing.tokens.tolist()
    [[4, 1], [2, 3], [5, 0], [1, 4]]
    >>> split = transport(routing, source_tokens, gpus_per_node=2)
    >>> int(split.same_gpu), int(split.same_node), int(split.cross_node)
    (11, 3, 6)
    """
    if operator.index(gpus_per_node) < 1:
        raise ValueError(f"gpus_per_node must be at least 1, not {gpus_per_node}")
    placement, lead = routing.placement, routing.makespan.shape
    supply = _checked(routing, source_tokens)
    slots = placement.expert_of.shape[1]
    lack = routing.tokens.reshape(*supply.shape[:2], slots)
    shares = np.zeros((*supply.shape[:3], slots), np.int64)
    counts = []
    for gpus_per_part in (1, gpus_per_node, placement.num_gpus):
        source, slot, sent, supply, lack = _match(placement, supply, lack, gpus_per_part)
        shares[:, :, source, slot] += sent
        counts.append(sent.sum(axis=-1).reshape(lead))
    tokens = shares.reshape(*lead, placement.num_gpus, *routing.tokens.shape[-2:])
    return Transport(routing, gpus_per_node, tokens, *counts)


def _checked(routing: Routing, source_tokens: ArrayLike) -> NDArray[np.int64]:
    """Return tokens by source as int64 [batches, layers, gpus, experts] that are those routed."""
    unsolved = routing.status == Status.UNSOLVED
    if unsolved.any():
        at = tuple(int(i) for i in np.argwhere(unsolved)[0])
        raise InvalidTokensError(f"problem {at} has no answer to split: its status is UNSOLVED")
    placement = routing.placement
    context = Context.of(placement, routing.expert_tokens(), source_tokens, None, None)
    by_source = context.source_tokens
    if by_source is None or by_source.shape[2] != placement.num_gpus:
        given = "none" if by_source is None else f"those of {by_source.shape[2]}"
        raise InvalidTokensError(
            f"a transport needs the tokens of all {placement.num_gpus} source GPUs, not {given}"
        )
    return by_source


def _match(
    placement: Placement, supply: NDArray[np.int64], lack: NDArray[np.int64], gpus_per_part: int
) -> tuple[NDArray[np.int64], ...]:
    """Match what sources have with what replicas lack, as far as it goes, within parts of the GPUs.

    From int64 [batches, layers, gpus, experts] and [batches, layers, P] to the pairs of a source
    and a slot in one part, int64 [pairs] each, what goes between them, int64 [batches, layers,
    pairs], and what is left of both.
    """
    gpus, layers = placement.num_gpus, placement.num_layers
    layer, expert = np.arange(layers)[:, None], placement.expert_of
    part_of_gpu = np.arange(gpus) // gpus_per_part
    part_of_slot = np.repeat(part_of_gpu, placement.slots_per_gpu)
    parts = int(part_of_gpu[-1]) + 1

    # Stretches on the line of each part and expert: a source's and a replica's, by their ends.
    supply_end = np.cumsum(supply, axis=2)
    supply_end -= (supply_end - supply)[:, :, part_of_gpu * gpus_per_part]
    lack_end = _lack_end(placement, lack, part_of_slot)

    # How far both sides of a line reach. Of several values assigned to one place the last one
    # stays, which is the end of a part's last replica; empty slots have the last column.
    reach = np.zeros((len(lack), layers, parts, placement.num_experts + 1), np.int64)
    reach[:, layer, part_of_slot, expert] = lack_end
    last_gpu = np.minimum(np.arange(1, parts + 1) * gpus_per_part, gpus) - 1
    np.minimum(reach[..., :-1], supply_end[:, :, last_gpu], out=reach[..., :-1])

    source, slot = np.nonzero(part_of_gpu[:, None] == part_of_slot)
    line = source * placement.num_experts + np.maximum(expert, 0)[:, slot]
    by_line = (len(lack), layers, gpus * placement.num_experts)
    sent = np.minimum(supply_end.reshape(by_line)[:, layer, line], lack_end[..., slot])
    sent -= np.maximum(
        (supply_end - supply).reshape(by_line)[:, layer, line], (lack_end - lack)[..., slot]
    )
    np.maximum(sent, 0, out=sent)

    supply_left = _beyond(supply_end, supply, reach[:, :, part_of_gpu, :-1])
    lack_left = _beyond(lack_end, lack, reach[:, layer, part_of_slot, expert])
    return source, slot, sent, supply_left, lack_left


def _lack_end(
    placement: Placement, lack: NDArray[np.int64], part_of_slot: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return int64 [batches, layers, P]: what a slot and its part's earlier ones of it lack."""
    order = np.argsort(placement.expert_of, axis=-1, kind="stable")
    expert, part = np.take_along_axis(placement.expert_of, order, axis=-1), part_of_slot[order]
    opens = np.ones(order.shape, np.bool_)
    opens[:, 1:] = (expert[:, 1:] != expert[:, :-1]) | (part[:, 1:] != part[:, :-1])
    layer = np.arange(len(order))[:, None]
    ordered = lack[:, layer, order]
    end = np.cumsum(ordered, axis=-1)
    # Sums never fall, so the largest start seen is that of the current part and expert.
    end -= np.maximum.accumulate(np.where(opens, end - ordered, 0), axis=-1)
    placed = np.empty_like(lack)
    placed[:, layer, order] = end
    return placed


def _beyond(
    end: NDArray[np.int64], length: NDArray[np.int64], reach: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how much of the stretches that end there lies beyond `reach`."""
    return np.asarray(np.clip(end - reach, 0, length))
