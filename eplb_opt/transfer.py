"""From one placement to another: which GPU sends which expert's weights to which, and when.

Moves go in rounds in which every GPU sends one expert's weights at most and receives one at most.
Any GPU can send that has the expert before the first round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt import _core
from eplb_opt.arrays import as_integer
from eplb_opt.errors import InvalidPlacementError
from eplb_opt.objective import Objective
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.routers import RoutingMethod
from eplb_opt.routing import solve_routing
from eplb_opt.workload import ModelShape

__all__ = ["Links", "TransferPlan", "expert_bytes", "plan_transfer", "saving_per_step"]

_MATRICES = 3  # of a gated expert: gate, up and down
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Links:
    """What a GPU's links carry, bytes per second in each direction.

    Attributes
    ----------
    inside
        To the other GPUs of its node; by default NVLink 4 of an H100.
    between
        To GPUs of other nodes; by default one adapter of 400 Gbit/s per GPU.
    gpus_per_node
        GPUs of a node, consecutive ones, at most 1,024; the last node may have fewer.

    Raises
    ------
    ValueError
        A bandwidth that is not above 0, one inside that is below that between, or no GPU in a node
        or too many.
    TypeError
        What is no number.
    """

    inside: float = 450e9
    between: float = 50e9
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name in ("inside", "between"):
            if not isinstance(getattr(self, name), Real):
                raise TypeError(f"{name} must be a number, not {getattr(self, name)!r}")
        if not 0 < self.between <= self.inside < np.inf:
            raise ValueError(
                "bandwidths are above 0, and that inside a node at least that between nodes, not "
                f"inside={self.inside}, between={self.between}"
            )
        as_integer(self.gpus_per_node, "gpus_per_node", most=_core.MAX_GPUS)


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """Moves of weights in rounds. Arrays of moves are ordered by batch of layers and round.

    In a round every GPU sends one expert's weights at most and receives one at most. What comes in
    goes to a buffer beside the slots, and from there into its slot at the end of the round `lands`,
    when the slot's old weights have been sent for the last time. An expert's second slot on a GPU
    is filled within the GPU after the last round, and is no move.

    Attributes
    ----------
    previous
        The placement before.
    placement
        The placement after: each GPU's experts as asked for. Those that stay keep their slots; the
        others take the slots that are left in the order in which these become free.
    layer, expert
        Int32 ``[moves]``: the weights that move.
    sender, sender_slot, receiver, receiver_slot
        Int32 ``[moves]``: the GPUs and their slots.
    round
        Int32 ``[moves]``, from 0 in every batch of layers.
    lands
        Int32 ``[moves]``: the round at whose end the weights are in their slot.
    rounds
        Int64 ``[batches]``: rounds of each batch of layers; no plan in which only the GPUs send
        that have an expert in `previous` does with fewer.
    buffers
        How many experts' weights a GPU must have room for beside its slots. An engine that serves
        the old placement until a batch has arrived needs room for all that a GPU receives in it, at
        most `rounds`.
    bound
        Seconds that no such plan gets below; see `plan_transfer`.
    expert_bytes
        Bytes of one expert's weights.
    links
        The bandwidths.
    layers_at_once
        Layers of a batch, all at most.

    Examples
    --------
    Two GPUs exchange an expert each:

    >>> plan = plan_transfer(Placement([[0, 1], [2, 3]]), Placement([[0, 2], [1, 3]]), 44_000_000)
    >>> for step in plan.steps():
    ...     print(step)
    layer 0, round 0: GPU 0 sends expert 1 from slot 1 to GPU 1, slot 0
    layer 0, round 0: GPU 1 sends expert 2 from slot 0 to GPU 0, slot 1
    >>> plan.rounds.tolist(), plan.buffers, f"{1e6 * plan.seconds:.0f} µs"
    ([1], 1, '98 µs')
    """

    previous: Placement
    placement: Placement
    layer: NDArray[np.int32]
    expert: NDArray[np.int32]
    sender: NDArray[np.int32]
    sender_slot: NDArray[np.int32]
    receiver: NDArray[np.int32]
    receiver_slot: NDArray[np.int32]
    round: NDArray[np.int32]
    lands: NDArray[np.int32]
    rounds: NDArray[np.int64]
    buffers: int
    bound: float
    expert_bytes: int
    links: Links
    layers_at_once: int

    @property
    def between(self) -> NDArray[np.bool_]:
        """Bool ``[moves]``: which moves are between nodes."""
        per_node = self.links.gpus_per_node
        return np.asarray(self.sender // per_node != self.receiver // per_node)

    @property
    def bytes_inside(self) -> int:
        """Bytes sent inside nodes, over all layers."""
        return int((~self.between).sum()) * self.expert_bytes

    @property
    def bytes_between(self) -> int:
        """Bytes sent between nodes, over all layers."""
        return int(self.between.sum()) * self.expert_bytes

    @property
    def buffer_bytes(self) -> int:
        """Memory of a GPU's buffers."""
        return self.buffers * self.expert_bytes

    @property
    def seconds(self) -> float:
        """Time with serving stopped: round after round, each as long as its slowest move."""
        slow = np.zeros((len(self.rounds), int(self.rounds.max(initial=0))), np.bool_)
        far = self.between
        slow[self.layer[far] // self.layers_at_once, self.round[far]] = True
        rounds_between = int(slow.sum())
        rounds_inside = int(self.rounds.sum()) - rounds_between
        return self.expert_bytes * (
            rounds_between / self.links.between + rounds_inside / self.links.inside
        )

    def break_even_steps(self, saved: float) -> float:
        """Return after how many steps the move has repaid its `seconds`; inf if it never does.

        Parameters
        ----------
        saved
            Microseconds that a step over all layers takes less on the new placement; see
            `saving_per_step`.

        Examples
        --------
        >>> before = Placement([[0, 1], [2, 3]])
        >>> plan = plan_transfer(before, Placement([[0, 2], [1, 3]]), 45_000_000)
        >>> plan.break_even_steps(0.5), plan.break_even_steps(-0.5)
        (200.0, inf)
        """
        if not len(self.round):
            return 0.0
        return 1e6 * self.seconds / saved if saved > 0 else np.inf

    def steps(self) -> Iterator[str]:
        """Yield a line for every move, in order."""
        columns = (self.layer, self.round, self.sender, self.expert, self.sender_slot)
        arrivals = (self.receiver, self.receiver_slot, self.lands)
        for row in zip(*(column.tolist() for column in columns + arrivals), strict=True):
            layer, at, sender, expert, slot, receiver, new_slot, lands = row
            wait = f" after round {lands}" if lands > at else ""
            yield (
                f"layer {layer}, round {at}: GPU {sender} sends expert {expert} from slot {slot} "
                f"to GPU {receiver}, slot {new_slot}{wait}"
            )

    def replay(self) -> Placement:
        """Return what comes out when the moves are made, round after round.

        What is sent is what the sender's slot holds by then; it comes out as `placement`, as no
        slot is filled anew too early.
        """
        shape = (self.previous.num_layers, self.previous.num_gpus, self.previous.slots_per_gpu)
        slots = self.previous.slots.reshape(shape).copy()
        wanted = self.placement.slots.reshape(shape)
        on_the_way = np.full(len(self.round), EMPTY, np.int32)
        for at in range(int(self.rounds.max(initial=0))):
            now = self.round == at
            on_the_way[now] = slots[self.layer[now], self.sender[now], self.sender_slot[now]]
            now = self.lands == at
            slots[self.layer[now], self.receiver[now], self.receiver_slot[now]] = on_the_way[now]
        held = (slots[..., None, :] == wanted[..., None]).any(axis=-1)
        slots = np.where(held | (wanted == EMPTY), wanted, slots)
        return Placement(
            slots if self.placement.layered else slots[0],
            self.placement.num_experts,
            allow_missing=True,
        )


def plan_transfer(
    previous: Placement,
    placement: Placement,
    expert_bytes: int,
    *,
    links: Links | None = None,
    layers_at_once: int = 1,
) -> TransferPlan:
    """Plan the moves from one placement to another in as few rounds as there can be.

    Parameters
    ----------
    previous, placement
        Before and after: as many layers, GPUs, slots and experts. An expert may be missing in
        either, unless it must move.
    expert_bytes
        Bytes of one expert's weights, `eplb_opt.transfer.expert_bytes`.
    links
        The bandwidths and nodes; `Links` by default.
    layers_at_once
        Layers whose moves share their rounds. Engines go layer by layer; several at once need fewer
        rounds in all, since GPUs that wait for one layer can work for another.

    Returns
    -------
    TransferPlan
        As many moves as `eplb_opt.metrics.count_moves` counts, in the fewest rounds; with so few,
        senders such that the fewest moves are between nodes.

    Raises
    ------
    InvalidPlacementError
        Placements of different shapes; an expert that must move and is on no GPU before, naming
        its layer.
    ValueError
        `expert_bytes` or `layers_at_once` below 1, or more bytes than an int64 holds.
    TypeError
        They are not integers.

    Notes
    -----
    With senders given, moves are edges between senders and receivers, and as many rounds as the
    largest degree are enough (König's theorem on edge colouring). What GPUs receive is given;
    senders are chosen so that the most that a GPU sends is least, or what some GPU receives, with
    the fewest moves between nodes (successive shortest paths). Rounds with moves between nodes are
    kept few, without a proof. Rounds are ordered so that slots become free early.

    *Buffers.* A slot is filled anew only after its old weights were sent for the last time. What
    comes in waits in a buffer, so that no GPUs wait for each other's slots. A buffer per round is
    always enough.

    *Bound.* The largest, over GPUs, of the time of what it receives, each from the nearest GPU that
    has it, and of what it alone can send; or the rounds as if all were inside nodes. Summed over
    batches of layers.

    O(M) for the first choice of senders, O(G M) for each that is changed, O(G + R) for the round of
    a move and O(R M) for the order of rounds, with M moves, G GPUs and R rounds of a batch; in the
    compiled core.

    Examples
    --------
    >>> before = Placement([[0, 1], [2, 3], [4, 5]])
    >>> plan = plan_transfer(before, Placement([[0, 2], [4, 3], [1, 5]]), 44_000_000)
    >>> plan.rounds.tolist(), plan.replay() == plan.placement
    ([1], True)
    """
    links = Links() if links is None else links
    size = as_integer(expert_bytes, "expert_bytes", most=2**63 - 1)
    at_once = min(as_integer(layers_at_once, "layers_at_once"), previous.num_layers)
    _require_alike(previous, placement)
    old, new = _Held.of(previous), _Held.of(placement)
    moves = _Moves.between(old, new)
    batch = moves.layer // at_once
    batches = -(-previous.num_layers // at_once)
    holder, round_ = np.empty((2, len(moves.layer)), np.int32)
    rounds = np.zeros(batches, np.int32)
    _core.plan_transfer(
        np.searchsorted(batch, np.arange(batches + 1)).astype(np.int32),
        moves.receiver,
        moves.weight,
        moves.first,
        moves.holders,
        moves.leaves,
        previous.num_gpus,
        links.gpus_per_node,
        holder,
        round_,
        rounds,
    )
    sender, sender_slot = moves.holders[holder], moves.slots[holder]
    slots, receiver_slot, lands = _settle(old, new, moves, sender, sender_slot, round_)
    order = np.lexsort((sender, moves.layer, round_, batch))
    return TransferPlan(
        previous,
        Placement(
            slots if placement.layered else slots[0], placement.num_experts, allow_missing=True
        ),
        moves.layer[order],
        moves.expert[order],
        sender[order],
        sender_slot[order],
        moves.receiver[order],
        receiver_slot[order],
        round_[order],
        lands[order],
        rounds.astype(np.int64),
        _buffers(batch, moves.receiver, round_, lands, rounds, previous.num_gpus),
        _bound(moves, batch, rounds, links, previous.num_gpus, size),
        size,
        links,
        at_once,
    )


def expert_bytes(shape: ModelShape, bytes_per_weight: float = 1) -> int:
    """Return the bytes of one expert's weights: three matrices of hidden x ffn.

    Parameters
    ----------
    shape
        The model.
    bytes_per_weight
        1 for fp8, 2 for bf16, 0.5 for fp4; scales of blocks are left out.

    Raises
    ------
    ValueError
        Bytes that are not above 0, or not finite.

    Examples
    --------
    >>> from eplb_opt.workload import model_shape
    >>> expert_bytes(model_shape("deepseek-v3"))
    44040192
    """
    size = _MATRICES * shape.hidden * shape.ffn * bytes_per_weight
    if not 0 < size < np.inf:
        raise ValueError(f"bytes_per_weight must be above 0 and finite, not {bytes_per_weight}")
    return max(1, round(size))


def saving_per_step(
    previous: Placement,
    placement: Placement,
    tokens: ArrayLike,
    objective: Objective | str,
    *,
    method: str | RoutingMethod = "uniform",
) -> float:
    """Return the microseconds that a step takes less on the new placement.

    Parameters
    ----------
    previous, placement
        Before and after.
    tokens
        Int ``[..., layers, experts]``: batches such as will be served.
    objective
        A GPU's time in microseconds, such as ``"deepseek-v3-fp8"``.
    method
        Who routes the batches; by default the equal split that engines count on.

    Returns
    -------
    float
        Makespans summed over layers, mean over batches, before less after.

    Raises
    ------
    ValueError
        An objective that counts instead of taking time.
    InvalidTokensError, InfeasibleError
        As `solve_routing`.

    Examples
    --------
    >>> before, after = Placement([[0, 1], [2, 3]]), Placement([[0, 2], [1, 3]])
    >>> round(saving_per_step(before, after, [900, 900, 300, 300], "deepseek-v3-fp8"), 1)
    56.7
    """
    objective = Objective.of(objective)
    if objective.counts_activations or objective.counts_tokens:
        raise ValueError(f"objective {objective.name} counts; a saving in time needs microseconds")
    before, after = (
        solve_routing(p, tokens, objective=objective, method=method, bound=False).makespan.mean()
        for p in (previous, placement)
    )
    return float(before - after) * previous.num_layers


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """The filled slots of a placement, by GPU, expert and slot.

    GPUs are numbered through all layers, and so are slots. `key` is GPU * experts + expert, and
    `rank` which of the GPU's slots of the expert it is; all int64 ``[filled slots]``.
    """

    placement: Placement
    key: NDArray[np.int64]
    slot: NDArray[np.int64]
    rank: NDArray[np.int64]

    @classmethod
    def of(cls, placement: Placement) -> _Held:
        flat = placement.expert_of.ravel()
        slot = np.flatnonzero(flat != EMPTY)
        key = slot // placement.slots_per_gpu * placement.num_experts + flat[slot]
        order = np.argsort(key, kind="stable")
        key = key[order]
        rank = np.arange(len(key)) - np.searchsorted(key, key)
        return cls(placement, key, slot[order], rank)

    def count(self, key: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many slots of a GPU have an expert."""
        return np.searchsorted(self.key, key, "right") - np.searchsorted(self.key, key)


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """Who must receive what, by layer and receiver, and who has it; all int32.

    The holders of a weight (layer * experts + expert) are `holders` from `first` of it to the next,
    each with its slot, and 1 in `leaves` if other weights may take it.
    """

    layer: NDArray[np.int32]
    expert: NDArray[np.int32]
    receiver: NDArray[np.int32]
    weight: NDArray[np.int32]
    first: NDArray[np.int32]
    holders: NDArray[np.int32]
    slots: NDArray[np.int32]
    leaves: NDArray[np.int32]

    @classmethod
    def between(cls, old: _Held, new: _Held) -> _Moves:
        gpus, experts = old.placement.num_gpus, old.placement.num_experts
        arrives = (new.rank == 0) & (old.count(new.key) == 0)
        gpu, expert = np.divmod(new.key[arrives], experts)
        layer, receiver = np.divmod(gpu, gpus)
        weight = layer * experts + expert

        lowest = old.rank == 0
        gpu, held = np.divmod(old.key[lowest], experts)
        by_weight = (gpu // gpus * experts + held) * gpus + gpu % gpus
        order = np.argsort(by_weight)
        weights = np.arange(old.placement.num_layers * experts + 1)
        first = np.searchsorted(by_weight[order], weights * gpus)
        nowhere = np.flatnonzero(first[weight] == first[weight + 1])
        if nowhere.size:
            at = nowhere[0]
            raise InvalidPlacementError(
                f"layer {layer[at]}: expert {expert[at]} must move to GPU {receiver[at]} and is on "
                "no GPU of the previous placement; load it there first"
            )
        columns = (
            layer,
            expert,
            receiver,
            weight,
            first,
            (gpu % gpus)[order],
            (old.slot[lowest] % old.placement.slots_per_gpu)[order],
            (new.count(old.key[lowest]) == 0)[order],
        )
        return cls(*(column.astype(np.int32) for column in columns))


def _settle(
    old: _Held,
    new: _Held,
    moves: _Moves,
    sender: NDArray[np.int32],
    sender_slot: NDArray[np.int32],
    round_: NDArray[np.int32],
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Return the slots afterwards, and of every move the slot and the round at whose end it lands.

    On every GPU what comes in first takes the slot that is free first.
    """
    before = old.placement
    gpus, per_gpu, experts = before.num_gpus, before.slots_per_gpu, before.num_experts
    slots = np.full(before.expert_of.size, EMPTY, np.int32)
    stays = old.slot[old.rank < new.count(old.key)]
    slots[stays] = before.expert_of.ravel()[stays]
    free_from = np.full(slots.size, -1, np.int32)
    np.maximum.at(free_from, (moves.layer * gpus + sender) * per_gpu + sender_slot, round_)
    free = np.flatnonzero(slots == EMPTY)
    free = free[np.lexsort((free_from[free], free // per_gpu))]

    # Last come second slots of an expert, which are filled within the GPU.
    again = new.key[(new.rank > 0) & (new.rank >= old.count(new.key))]
    gpu = np.append(moves.layer.astype(np.int64) * gpus + moves.receiver, again // experts)
    expert = np.append(moves.expert, again % experts)
    order = np.lexsort((np.append(round_, np.full(len(again), _NEVER)), gpu))
    in_turn = np.arange(len(order)) - np.searchsorted(gpu[order], gpu[order])
    taken = np.empty(len(order), np.int64)
    taken[order] = free[np.searchsorted(free // per_gpu, gpu[order]) + in_turn]
    slots[taken] = expert
    landed = taken[: len(round_)]
    shape = (before.num_layers, gpus, per_gpu)
    return (
        slots.reshape(shape),
        (landed % per_gpu).astype(np.int32),
        np.maximum(round_, free_from[landed]),
    )


def _buffers(
    batch: NDArray[np.int32],
    receiver: NDArray[np.int32],
    round_: NDArray[np.int32],
    lands: NDArray[np.int32],
    rounds: NDArray[np.int32],
    gpus: int,
) -> int:
    """Return the most weights that any GPU has beside its slots in any round."""
    change = np.zeros((len(rounds), gpus, int(rounds.max(initial=0)) + 1), np.int32)
    np.add.at(change, (batch, receiver, round_), 1)
    np.add.at(change, (batch, receiver, lands + 1), -1)
    return int(change.cumsum(axis=-1).max(initial=0))


def _bound(
    moves: _Moves,
    batch: NDArray[np.int32],
    rounds: NDArray[np.int32],
    links: Links,
    gpus: int,
    size: int,
) -> float:
    """Return the seconds that some GPU is busy at least, summed over batches."""
    nodes = -(-gpus // links.gpus_per_node)
    copies = np.diff(moves.first)
    in_node = np.zeros((len(copies), nodes), np.bool_)
    in_node[np.repeat(np.arange(len(copies)), copies), moves.holders // links.gpus_per_node] = True
    near = in_node[moves.weight, moves.receiver // links.gpus_per_node]
    takes = np.where(near, 1 / links.inside, 1 / links.between)
    alone = copies[moves.weight] == 1
    only_sender = moves.holders[moves.first[moves.weight[alone]]]
    busy = np.zeros((2, len(rounds), gpus))
    np.add.at(busy[0], (batch, moves.receiver), takes)
    np.add.at(busy[1], (batch[alone], only_sender), takes[alone])
    return size * float(np.maximum(busy.max(axis=(0, 2)), rounds / links.inside).sum())


def _require_alike(previous: Placement, placement: Placement) -> None:
    shapes = [(*p.slots.shape, p.num_experts) for p in (previous, placement)]
    if shapes[0] != shapes[1]:
        raise InvalidPlacementError(
            f"moves are between placements of as many layers, GPUs, slots and experts, not between "
            f"{shapes[0]} and {shapes[1]}; -1 stands for a slot that is not there"
        )
