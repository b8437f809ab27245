"""Lower bounds that are counted: of a routing from a GPU set, of any placement from its slots.

**Routing.** An expert whose replicas all lie in a GPU set Q must be served in Q. So Q activates at
least one replica for each such live expert, and takes all of their tokens. A GPU that activates j
replicas or takes j tokens needs a least time for it; the smallest time by which the GPUs of Q
together can have as many as they must is a lower bound on any routing's makespan. With equal GPUs
it is the time of ``ceil(count / |Q|)``, the share of the fullest of them. For the objectives
``"activations"`` and ``"tokens"`` some Q makes this bound equal the optimum (max-flow = min-cut),
and the exact routers return it.

**Placement.** Slots are few: who gets a copy leaves none for others, and GPUs that hold the hottest
experts must hold others too. `placement_bound` counts both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import reduce

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt.demand import as_tokens, reject_tokens
from eplb_opt.errors import InvalidTokensError
from eplb_opt.objective import Curve, Objective
from eplb_opt.placement import Placement

__all__ = ["certified_bound", "confined_experts", "placement_bound"]

_LeastTime = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""The least nominal time, at slowness 1, of a GPU that has counts of something; never falling."""


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
        `Objective`, its name or its file.

    Returns
    -------
    NDArray[np.float64]
        ``[..., layers]``; at least the objective's `idle`, and that for an empty set.

    Raises
    ------
    InvalidTokensError, InfeasibleError
        Tokens or a certificate of another shape; tokens that are negative or cannot be served.
    ValueError
        An unknown objective, or one with the slowness of another number of GPUs.

    Notes
    -----
    The larger of two bounds, by activations and by tokens.

    *Least times.* A GPU with j activated replicas has j tiles and j tokens or more; one with j
    tokens, j > 0, has one activated replica and ``ceil(j / tile_tokens)`` tiles or more. Linear
    pieces never fall as these counts rise. A curve's time is at least j times that of one token,
    and by `Curve.floor` at least a linear piece, which tokens alone bound.

    *Equal GPUs.* Some GPU of Q has ``ceil(count / |Q|)`` or more.

    *Unequal slowness.* With `cap_g(t)` the largest j whose least time on GPU g is within t, a
    routing of makespan t has at most `cap_g(t)` on g, so the caps of Q sum to its count or more.
    The bound is the smallest t for which they do. For every smaller one they do not, which anyone
    can check.

    *Rounding.* Least times are evaluated as `Objective.time` evaluates a routing, step by step, and
    a rounded step never falls where the exact one rises. So no routing's makespan, as evaluated, is
    below the bound.

    O(slots) per problem, in numpy, sharing no code with the solvers whose answers it checks; with
    unequal slowness some hundred evaluations per GPU.

    Examples
    --------
    >>> placement = Placement([[0, 1], [0, 2]])
    >>> certified_bound(placement, [1, 1, 1], [True, True])
    array(2.)
    >>> certified_bound(placement, [1, 1, 1], [True, True], "qwen3-30b-fp8")
    array(3.48)
    """
    objective = Objective.of(objective)
    objective.require_gpus(placement.num_gpus)
    demand = as_tokens(placement, tokens)
    reject_tokens(placement, demand)
    lead = demand.shape[:-1]
    given = np.asarray(certificate, dtype=np.bool_)
    if given.shape != (*lead, placement.num_gpus):
        raise InvalidTokensError(
            f"a certificate for these tokens has shape {[*lead, placement.num_gpus]}, "
            f"not {list(given.shape)}"
        )
    batches = demand.size // (placement.num_layers * placement.num_experts)
    members = given.reshape(batches, placement.num_layers, placement.num_gpus)
    weights = demand.reshape(batches, placement.num_layers, placement.num_experts)
    confined = np.where(confined_experts(placement, members), weights, 0)

    slowness = np.array(objective.slowness or [1.0] * placement.num_gpus)
    by_activations = _bound(
        (confined > 0).sum(axis=-1),
        members,
        slowness,
        _least_time_of_activations(objective, placement.slots_per_gpu),
        placement.slots_per_gpu,
    )
    tokens_confined = confined.sum(axis=-1)
    by_tokens = _bound(
        tokens_confined,
        members,
        slowness,
        _least_time_of_tokens(objective),
        int(tokens_confined.max(initial=0)),
    )
    bound = np.maximum(by_activations, by_tokens)
    return np.asarray(np.maximum(bound, objective.idle)).reshape(lead)


def confined_experts(placement: Placement, members: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return bool ``[batches, layers, experts]``: no slot outside the set holds the expert.

    Of `members`, bool ``[batches, layers, gpus]``, by layer of a placement.
    """
    outside = np.repeat(~members, placement.slots_per_gpu, axis=-1) & (placement.expert_of >= 0)
    escapes = np.zeros((*members.shape[:2], placement.num_experts), np.bool_)
    batch, layer, slot = np.nonzero(outside)
    escapes[batch, layer, placement.expert_of[layer, slot]] = True
    return ~escapes


def _least_time_of_activations(objective: Objective, slots: int) -> _LeastTime:
    """Return the least nominal time of GPUs that activate so many of their slots."""
    # One token in each of the first j slots, for every j, priced as a routing is.
    staircase = np.tri(slots + 1, slots, -1, dtype=np.int64)
    times = dataclasses.replace(objective, slowness=None).time(staircase)
    return lambda counts: np.asarray(times[counts])


def _least_time_of_tokens(objective: Objective) -> _LeastTime:
    """Return the least nominal time of GPUs that take so many tokens."""
    pieces = [
        linear
        for piece in objective.pieces
        for linear in (piece.floor() if isinstance(piece, Curve) else (piece,))
    ]

    def least(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        activated = (tokens > 0).astype(np.float64)
        tiles = (-(-tokens // objective.tile_tokens)).astype(np.float64)
        total = tokens.astype(np.float64)
        return np.asarray(
            reduce(np.maximum, (piece.time(activated, tiles, total) for piece in pieces))
        )

    return least


def _bound(
    count: NDArray[np.int64],
    members: NDArray[np.bool_],
    slowness: NDArray[np.float64],
    least: _LeastTime,
    most: int,
) -> NDArray[np.float64]:
    """Return the smallest times by which the sets can have their counts.

    Parameters
    ----------
    count
        ``[batches, layers]``: what the sets must have.
    members
        Bool ``[batches, layers, gpus]``.
    slowness
        ``[gpus]``.
    least
        The least nominal time of a GPU that has counts.
    most
        The largest count that a GPU can have.
    """
    share = -(-count // np.maximum(members.sum(axis=-1), 1))
    nominal = least(share)
    # Before the fastest can have a share, none can; when the slowest can, all can.
    each = np.broadcast_to(slowness, members.shape)
    low = nominal * each.min(axis=-1, where=members, initial=slowness.max())
    high = nominal * each.max(axis=-1, where=members, initial=slowness.min())

    fewest = np.zeros((*count.shape, slowness.size), np.int64)
    largest = np.full_like(fewest, most)
    while (low < high).any():
        # Doubles from 0 are in the order of their bits, so that halving between bits ends soon,
        # however far apart the two are.
        first, last = low.view(np.int64), high.view(np.int64)
        middle = (first + (last - first) // 2).view(np.float64)
        caps = _caps(middle, fewest, largest, slowness, least)
        enough = (caps * members).sum(axis=-1) >= count
        # Between the times that occur nothing changes.
        now = np.where(caps > 0, slowness * least(caps), 0.0)
        after = np.where(caps < most, slowness * least(np.minimum(caps + 1, most)), np.inf)
        high = np.where(enough, now.max(axis=-1, where=members, initial=0.0), high)
        low = np.where(enough, low, after.min(axis=-1, where=members, initial=np.inf))
        largest = np.where(enough[..., None], caps, largest)
        fewest = np.where(enough[..., None], fewest, caps)
    return np.asarray(high)


def _caps(
    time: NDArray[np.float64],
    fewest: NDArray[np.int64],
    largest: NDArray[np.int64],
    slowness: NDArray[np.float64],
    least: _LeastTime,
) -> NDArray[np.int64]:
    """Return ``[batches, layers, gpus]``: the most of each GPU within the times, between two."""
    low, high = fewest, largest
    while (low < high).any():
        middle = high - (high - low) // 2
        within = slowness * least(middle) <= time[..., None]
        low, high = np.where(within, middle, low), np.where(within, high, middle - 1)
    return low


def placement_bound(
    load: NDArray[np.float64],
    *,
    num_gpus: int,
    slots_per_gpu: int,
    num_nodes: int = 1,
    num_groups: int = 1,
) -> NDArray[np.float64]:
    """Return the largest GPU load that no placement gets below, by counting slots.

    It holds for every placement that has every expert, split equally or freely, with two copies of
    an expert on one GPU or without, with slots left empty or without. With more nodes than one, for
    every such placement that keeps each group of experts to one node and gives the nodes equally
    many groups.

    Parameters
    ----------
    load
        Float64 ``[..., experts]``; finite, not negative.
    num_gpus, slots_per_gpu
        The slots, at least as many as experts.
    num_nodes, num_groups
        As `eplb_opt.solve_placement` has them; the nodes divide the groups.

    Returns
    -------
    NDArray[np.float64]
        ``[...]``; true up to the rounding of sums.

    Notes
    -----
    With G GPUs of S slots and R = G*S - E redundant ones, the largest of

    - the mean GPU load;
    - by copies: the (R+1)-th largest of all load[e]/c, c = 1, 2, ... At makespan t an expert has at
      least load[e]/t copies, so every load[e]/c above t takes a redundant slot;
    - for every h, the h hottest with copies: (their load + that of the (R+h)*(S-1) lightest) /
      (R+h). They have R+h copies at most, so they lie on some R+h GPUs. All other GPUs together
      have slots for all but (R+h)*(S-1) of the other experts, which therefore are confined to these
      GPUs. Without redundancy: (the k hottest + the k*(S-1) lightest)/k;
    - for every n = R + q*G + k with 1 <= k <= G, the k GPUs with the most of the n hottest experts:
      n - R of these have one copy, so k GPUs have k*(q+1) of them whole, and in all k*S - R experts
      to themselves: (the k*(q+1) lightest of the n hottest + the k*(S-q-1) - R lightest of all)/k.

    - without redundancy, for every i, w[i] the i-th hottest and v[j] the j-th lightest:
      w[i] + the smaller of w[i] and v[i*(S-1)] + the S-2 lightest. Of the i hottest two share a
      GPU, or i GPUs have i*(S-1) others among them, one of which is v[i*(S-1)] or hotter. With two
      slots it is the optimum.

    With R >= G the last four are at most the mean, and are not counted. With several nodes
    they count within a node too, for each group, and for groups on nodes.

    O(experts log experts + R log R) per row of loads, in numpy.

    Examples
    --------
    Two experts of load 6 on two GPUs: there each has another beside it, unless it has copies.

    >>> load = np.array([6.0, 6.0, 1.0, 1.0, 1.0, 1.0])
    >>> placement_bound(load, num_gpus=3, slots_per_gpu=2)
    array(7.)
    >>> placement_bound(load, num_gpus=3, slots_per_gpu=3)
    array(5.33333333)

    A group of the first three is one node's load:

    >>> placement_bound(load, num_gpus=2, slots_per_gpu=3, num_nodes=2, num_groups=2)
    array(13.)
    """
    experts = load.shape[-1]
    redundant = num_gpus * slots_per_gpu - experts
    bound = np.asarray(load.sum(axis=-1) / num_gpus)
    if num_nodes == 1 and redundant >= num_gpus:
        return bound
    lightest = _sums(np.sort(load, axis=-1))
    if redundant < num_gpus:
        bound = np.maximum(bound, _least_peak(load, lightest, num_gpus, slots_per_gpu, redundant))
    if num_nodes == 1:
        return np.asarray(bound)
    grouped = load.reshape(*load.shape[:-1], num_groups, -1)
    groups, gpus, spare = grouped.sum(axis=-1), num_gpus // num_nodes, redundant // num_nodes
    of_nodes = _least_peak(
        groups, _sums(np.sort(groups, axis=-1)), num_nodes, num_groups // num_nodes, 0
    )
    bound = np.maximum(bound, of_nodes / gpus)
    if spare < gpus:
        of_groups = _least_peak(grouped, lightest[..., None, :], gpus, slots_per_gpu, spare)
        bound = np.maximum(bound, of_groups.max(axis=-1))
    return np.asarray(bound)


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``[..., n + 1]``: sums of the first so many of ``[..., n]`` values."""
    start = np.zeros((*values.shape[:-1], 1))
    return np.concatenate([start, values.cumsum(axis=-1)], axis=-1)


def _least_peak(
    load: NDArray[np.float64],
    lightest: NDArray[np.float64],
    gpus: int,
    slots: int,
    redundant: int,
) -> NDArray[np.float64]:
    """Return the largest bound but the mean, for experts that go to GPUs with these slots.

    Parameters
    ----------
    load
        ``[..., experts]``: all experts that have these slots, or some.
    lightest
        ``[..., all experts + 1]``: the load of the lightest so many of all.
    gpus, slots, redundant
        GPUs, the slots of each, and how many are redundant: fewer than `gpus`.
    """
    experts = load.shape[-1]
    hot = -np.sort(-load, axis=-1)
    hottest = _sums(hot)

    # Of all load[e]/c only those with rank * c <= R + 1 can be the (R+1)-th largest: with e of that
    # rank (from 1), rank * c values are no smaller.
    rank = np.repeat(np.arange(redundant + 1), (redundant + 1) // np.arange(1, redundant + 2))
    copies = np.arange(1, len(rank) + 1) - np.searchsorted(rank, rank)
    shares = hot[..., rank[rank < experts]] / copies[rank < experts]
    kth = shares.shape[-1] - redundant - 1
    by_copies = np.partition(shares, kth, axis=-1)[..., kth]

    h = np.arange(1, min(experts, gpus - redundant) + 1)
    spread = redundant + h
    with_copies = (hottest[..., h] + lightest[..., spread * (slots - 1)]) / spread

    n = np.arange(redundant, min(experts, redundant + gpus * slots))
    q, k = divmod(n - redundant, gpus)
    k += 1
    whole = hottest[..., n + 1] - hottest[..., n + 1 - k * (q + 1)]
    beside = np.maximum(k * (slots - q - 1) - redundant, 0)
    crowded = (whole + lightest[..., beside]) / k
    bound = np.maximum(by_copies, with_copies.max(axis=-1))
    bound = np.maximum(bound, crowded.max(axis=-1, initial=0))
    if redundant == 0 and slots > 1:
        i = np.arange(1, min(experts, gpus) + 1)
        companion = lightest[..., i * (slots - 1)] - lightest[..., i * (slots - 1) - 1]
        hotter = hot[..., i - 1]
        paired = hotter + np.minimum(companion, hotter) + lightest[..., slots - 2, None]
        bound = np.maximum(bound, paired.max(axis=-1))
    return np.asarray(bound)
