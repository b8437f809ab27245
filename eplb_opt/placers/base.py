"""What a placement method is, what it is asked and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from eplb_opt.bounds import placement_bound
from eplb_opt.errors import InfeasibleError, InvalidPlacementError
from eplb_opt.measure import Measure
from eplb_opt.objective import Objective
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.status import Proof
from eplb_opt.stopping import TimeLimit

__all__ = [
    "Batches",
    "Placed",
    "PlacementMethod",
    "PlacementProblem",
    "PlacerTraits",
    "first_placement",
]


@dataclass(frozen=True, slots=True)
class PlacerTraits:
    """What a placement method can do.

    Attributes
    ----------
    summary
        One line.
    takes
        What it heeds, of the arguments of `eplb_opt.solve_placement` that others refuse:
        ``"max_moves"``, ``"tokens_per_batch"``, ``"objective"``, ``"stop"``.
    exact
        Whether it proves its own answer.
    extra
        The extra that installs what it needs, or None.
    """

    summary: str
    takes: frozenset[str] = frozenset()
    exact: bool = False
    extra: str | None = None


@dataclass(frozen=True, slots=True)
class Batches:
    """What the batches to come look like, for a method that places for their routing.

    Attributes
    ----------
    tokens
        Tokens of a batch over all GPUs, each routed to `top_k` experts by the loads' popularity; or
        None: every window of loads is a batch as recorded.
    top_k
        Experts per token.
    objective
        What a GPU's time is taken to be when a batch is routed.
    """

    tokens: int | None
    top_k: int
    objective: Objective


@dataclass(frozen=True, slots=True, eq=False)
class PlacementProblem:
    """What a placement method is asked; checked.

    Attributes
    ----------
    windows
        Float64 ``[windows, layers, experts]``: the loads of one or more spans of time; contiguous,
        finite, not negative.
    load
        Float64 ``[layers, experts]``: their mean, which methods that ignore windows place for.
    num_gpus, slots_per_gpu
        The slots to fill, at least as many as experts.
    num_nodes
        Nodes of consecutive GPUs, equally many each.
    num_groups
        Groups of consecutive experts, equally many each.
    previous
        The placement that is served now, or None; an expert may be missing.
    max_moves
        The most weights that GPUs may receive over all layers, from `previous`; None: any number.
    measure
        What the answer's makespan will be.
    batches
        What will be routed, or None: the loads say all.
    distinct
        Whether copies of an expert that share a GPU are parted in the answer.
    stop
        Time limit over all layers, or None.
    threads
        Threads over the layers.
    """

    windows: NDArray[np.float64]
    load: NDArray[np.float64]
    num_gpus: int
    slots_per_gpu: int
    num_nodes: int = 1
    num_groups: int = 1
    previous: Placement | None = None
    max_moves: int | None = None
    measure: Measure = field(default_factory=Measure)
    batches: Batches | None = None
    distinct: bool = False
    stop: TimeLimit | None = None
    threads: int = 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, GPUs, slots: the shape of an answer."""
        return (self.load.shape[0], self.num_gpus, self.slots_per_gpu)

    def new_slots(self) -> NDArray[np.int32]:
        """Return an answer to be: int32 of `shape`, all empty."""
        return np.full(self.shape, EMPTY, np.int32)

    def old_slots(self) -> NDArray[np.int32] | None:
        """Return the slots of `previous`, int32 of `shape`, or None."""
        return None if self.previous is None else self.previous.slots.reshape(self.shape)

    def require_all_held(self, method: str) -> NDArray[np.int32]:
        """Return the slots to start from: those of `previous`, or `first_placement`.

        Raises
        ------
        InvalidPlacementError
            If an expert is missing in `previous`; the message names it, its layer and the method.
        """
        slots = self.old_slots()
        if self.previous is None or slots is None:
            return first_placement(*self.shape, num_experts=self.load.shape[1])
        missing = np.argwhere(self.previous.copies == 0)
        if missing.size:
            layer, expert = missing[0]
            raise InvalidPlacementError(
                f"previous, layer {layer}: expert {expert} has no replica, and {method} keeps one "
                "of each where it is; place with a method that starts afresh"
            )
        return slots

    def topology(self) -> tuple[int, int, str]:
        """Return the nodes and groups to honour, and a note where they are not those asked for.

        Nodes that divide the groups are honoured: each group on one node, equally many on each. If
        they do not, all GPUs count as one node (DeepSeek's rule).
        """
        if self.num_groups % self.num_nodes == 0:
            return self.num_nodes, self.num_groups, ""
        why = f"{self.num_nodes} nodes do not divide {self.num_groups} groups"
        return 1, 1, f"as one node: {why}"

    def floor(self, nodes: int) -> NDArray[np.float64]:
        """Return float64 ``[layers]``: makespans that no placement gets below, by counting.

        For placements that keep groups to so many nodes and leave empty what `previous` has empty.
        """
        each = placement_bound(
            self.windows,
            num_gpus=self.num_gpus,
            slots_per_gpu=self.slots_per_gpu,
            num_nodes=nodes,
            num_groups=self.num_groups,
        )
        room = self.room()
        live, most = (room > 0).sum(axis=-1), room.max(axis=-1)
        for gpus, slots in {*zip(live.tolist(), most.tolist(), strict=True)}:
            if (gpus, slots) != self.shape[1:]:  # fewer are left: counted without groups
                of = (live == gpus) & (most == slots)
                left = placement_bound(self.windows[:, of], num_gpus=gpus, slots_per_gpu=slots)
                each[:, of] = np.maximum(each[:, of], left)
        return self.measure.sum_up(each)

    def defect(self, layer: int) -> str:
        """Say what keeps a method from starting at a layer of `previous`, where something does.

        An expert without a replica, a group on several nodes, a node with another number of groups
        than the others, or else an expert that is twice on a GPU.
        """
        previous, slots = self.previous, self.old_slots()
        assert previous is not None
        assert slots is not None
        missing = np.flatnonzero(previous.copies[layer] == 0)
        if missing.size:
            return f"expert {missing[0]} has no replica"
        nodes, groups, _ = self.topology()
        size = self.load.shape[1] // groups
        gpu, slot = np.nonzero(slots[layer] != EMPTY)
        on = np.zeros((groups, nodes), np.bool_)
        on[slots[layer, gpu, slot] // size, gpu * nodes // self.num_gpus] = True
        for group in np.flatnonzero(on.sum(axis=1) > 1):
            homes = " and ".join(map(str, np.flatnonzero(on[group])))
            return (
                f"experts {group * size} to {(group + 1) * size - 1} are a group, on nodes {homes}"
            )
        for node in np.flatnonzero(on.sum(axis=0) != groups // nodes):
            return f"node {node} has {on[:, node].sum()} groups, not {groups // nodes}"
        shared = ((gpu, expert) for at, gpu, expert in previous.duplicates() if at == layer)
        return "GPU {} has expert {} twice".format(*next(shared))

    def require_node_room(self, nodes: int) -> None:
        """Check that every node has slots for its share of the experts.

        Raises
        ------
        InfeasibleError
            If one has not; the message names it and its layer.
        """
        share = self.load.shape[1] // nodes
        room = self.room().reshape(len(self.load), nodes, -1).sum(axis=-1)
        short = np.argwhere(room < share)
        if short.size:
            layer, node = short[0]
            raise InfeasibleError(
                f"layer {layer}: node {node} has {room[layer, node]} slots filled in previous for "
                f"{share} experts; empty slots stay empty"
            )

    def room(self) -> NDArray[np.int32]:
        """Return int32 ``[layers, gpus]``: the slots to fill, where `previous` has them filled.

        Raises
        ------
        InfeasibleError
            If a layer has fewer of them than experts.
        """
        slots = self.old_slots()
        if slots is None:
            return np.full(self.shape[:2], self.slots_per_gpu, np.int32)
        room = np.asarray((slots != EMPTY).sum(axis=-1, dtype=np.int32))
        experts, filled = self.load.shape[1], room.sum(axis=-1)
        short = np.flatnonzero(filled < experts)
        if short.size:
            raise InfeasibleError(
                f"previous, layer {short[0]}: {experts} experts need {experts} slots and "
                f"{filled[short[0]]} are filled; empty slots stay empty"
            )
        return room


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """What a placement method answers.

    Attributes
    ----------
    slots
        Int32 of `PlacementProblem.shape`: the expert in every slot, -1 where empty.
    note
        What the method decided by itself, such as a form that it fell back to; may be empty.
    nodes
        Nodes, each with all slots of its experts: what is repaired later stays within. 1 for a
        method that does not keep experts to nodes.
    bound
        Float64 ``[layers]``: makespans, by the problem's measure, that the method has proven no
        placement on these nodes that fills the slots without shared copies to get below; None from
        one that proves nothing.
    proved_by
        Who proved it.
    """

    slots: NDArray[np.int32]
    note: str = ""
    nodes: int = 1
    bound: NDArray[np.float64] | None = None
    proved_by: Proof = Proof.NONE


class PlacementMethod(Protocol):
    """A placement method: an immutable object that holds its options.

    Examples
    --------
    One's own, which gives the experts out in turn:

    >>> class InTurn:
    ...     traits = PlacerTraits("experts in turn")
    ...
    ...     def place(self, problem):
    ...         return Placed(first_placement(*problem.shape, num_experts=problem.load.shape[1]))
    >>> from eplb_opt.placing import solve_placement
    >>> plan = solve_placement([3, 2, 1], num_gpus=2, slots_per_gpu=2, method=InTurn())
    >>> plan.placement.slots.tolist(), float(plan.makespan)
    ([[0, 1], [2, 0]], 3.5)
    """

    traits: ClassVar[PlacerTraits]

    def place(self, problem: PlacementProblem) -> Placed:
        """Place the experts of all layers."""
        ...


def first_placement(
    layers: int, num_gpus: int, slots_per_gpu: int, *, num_experts: int
) -> NDArray[np.int32]:
    """Return the placement that vLLM and SGLang start with: expert p mod E in physical slot p.

    Returns
    -------
    NDArray
        Int32 ``[layers, gpus, slots]``.

    Examples
    --------
    >>> first_placement(1, 2, 2, num_experts=3).tolist()
    [[[0, 1], [2, 0]]]
    """
    physical = np.arange(num_gpus * slots_per_gpu, dtype=np.int32)
    slots = (physical % num_experts).reshape(num_gpus, slots_per_gpu)
    return np.tile(slots, (layers, 1, 1))
