"""`routing-aware`: places for a router that serves every batch to its optimum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.arrays import as_integer
from eplb_opt.demand import count_tokens
from eplb_opt.errors import InvalidTokensError
from eplb_opt.objective import Objective
from eplb_opt.placers.base import Placed, PlacementProblem, PlacerTraits
from eplb_opt.pricing import core_pricing
from eplb_opt.workload import Workload, visit_chances

_ACTIVATIONS, _TOKENS = Objective.of("activations"), Objective.of("tokens")
_DRAWN = 48  # batches per layer, where loads are given and the objective needs batches
_DRAWN_SINGLY = 2**12  # tokens of a batch up to which each is drawn


@dataclass(frozen=True, slots=True)
class RoutingAware:
    """Copies by how often experts are live, slots by the chance that a batch routes to its floor.

    Other placements balance loads as if copies shared them equally. A router chooses per batch, and
    an optimal one keeps a batch of n live experts at its floor ``ceil(n / GPUs)`` unless some set
    of GPUs X confines more than ``floor * |X|`` live experts, ones without a replica outside X
    (Hall's condition). This method makes that rare.

    Given `tokens_per_batch`, each token draws `top_k` distinct experts with chances in proportion
    to the load. An expert visited with chance q is live in N tokens with ``p = 1 - (1 - q)**N``;
    drawing distinct experts makes them repel each other, ``Cov(e, f) = -u_e u_f`` with
    ``u = sqrt(N / sum(q (1 - q))) q (1 - q)**N`` (Hájek's approximation), which halves the variance
    of n at 32 tokens. The experts with largest p get second copies, as many as single GPUs need not
    to hold too many live experts that are nowhere else; the hottest get the other copies, that keep
    GPUs from having too few (``solvers/cpp/live_copies.hpp``). Slots are then annealed by swaps, on
    the chance of a batch above its floor: set by set on up to 8 GPUs, by the cavity method on more,
    where sets are too many (``hall.hpp``, ``cavity.hpp``).

    Without it, every window is a recorded batch of integer token counts. Chances and covariances
    are then as counted. Annealing on the optimal routings of these batches would be fitted to
    chance: it raises the makespan of others (``batch_annealing.hpp``).

    Any other objective is annealed on batches, solved anew after every swap by `flow` or a short
    `makespan` search, from that placement or from a packing by tokens, whichever is faster; from
    loads, 48 batches are drawn per layer, token by token or, of more than 4,096 tokens, as counts.

    Never two copies of an expert on one GPU: slots stay empty where that leaves nothing to hold.
    Slots that are empty in a previous placement do too, and what stays on a GPU keeps its slot.
    Nodes and groups are not heeded, as the plan's note says.

    Parameters
    ----------
    work
        How many batches are solved in annealing a layer for another objective than activated
        replicas; some hundred thousand a second. 0: none.

    Raises
    ------
    ValueError
        Negative work, or more than an int64 holds; when it places, more tokens per batch than are
        supported.
    TypeError
        Work that is not an integer.
    InvalidTokensError
        Recorded batches that are not integers, or too large, naming window, layer and expert.

    Notes
    -----
    With P slots, S of them on a GPU, and t the floor: 6,500 swaps at O(2**GPUs + experts) on up to
    8 GPUs, else 70 P tried at O(S GPUs), those made at O(t (S - t)), every eighth of them at GPUs
    times that; fewer where the chance falls to 0. Memory O(experts² + GPUs²), with batches also
    O(batches x experts), per thread.

    Examples
    --------
    Experts 0 and 1 are always live, so that a batch of one token is balanced if they are apart:

    >>> from eplb_opt.placing import solve_placement
    >>> load = [90, 90, 5, 5, 5, 5]
    >>> plan = solve_placement(
    ...     load, num_gpus=2, slots_per_gpu=3, method="routing-aware", tokens_per_batch=1, top_k=2
    ... )
    >>> (plan.placement.slots < 2).sum(axis=-1).tolist()
    [1, 1]
    """

    traits: ClassVar[PlacerTraits] = PlacerTraits(
        "ours, for batches routed optimally: few above their floor",
        takes=frozenset({"tokens_per_batch", "objective"}),
    )

    work: int = 200_000

    def __post_init__(self) -> None:
        as_integer(self.work, "routing-aware: work", least=0, most=2**63 - 1)

    def place(self, problem: PlacementProblem) -> Placed:
        """Place the experts of all layers."""
        batches = problem.batches
        if batches is None:
            raise ValueError("routing-aware places for batches: a problem needs them")
        slots, room, threads = problem.new_slots(), problem.room(), problem.threads
        objective, recorded = batches.objective, None
        objective.require_gpus(problem.num_gpus)
        if batches.tokens is None:
            recorded = _recorded(problem.windows)
            _core.place_for_live_batches(recorded, room, threads, slots)
        else:
            most = _core.MAX_TOKENS_PER_EXPERT
            if batches.tokens > most:
                raise ValueError(
                    f"tokens_per_batch is {batches.tokens}; at most {most} are supported"
                )
            load = problem.load
            _core.place_for_loads(load, room, batches.tokens, batches.top_k, threads, slots)
            if objective != _ACTIVATIONS:
                recorded = _drawn(load, batches.tokens, batches.top_k)
        if recorded is not None and objective != _ACTIVATIONS and self.work:
            priced = objective != _TOKENS
            pricing = core_pricing(objective, problem.num_gpus) if priced else None
            _core.anneal_objective(recorded, room, self.work, threads, slots, pricing)
        previous = problem.old_slots()
        if previous is not None:
            _core.keep_slots(previous, slots)
        heeds = problem.num_nodes == problem.num_groups == 1
        return Placed(slots, "" if heeds else "nodes and groups are not heeded")


def _recorded(windows: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the windows as batches, int64 ``[layers, batches, experts]``."""
    wrong = (windows != np.floor(windows)) | (windows > _core.MAX_TOKENS_PER_EXPERT)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise InvalidTokensError(
            f"window {at[0]}, layer {at[1]}, expert {at[2]} has load {windows[at]}; without "
            "tokens_per_batch every window is a batch of integer token counts, at most "
            f"{_core.MAX_TOKENS_PER_EXPERT}"
        )
    return np.ascontiguousarray(windows.astype(np.int64).transpose(1, 0, 2))


def _drawn(load: NDArray[np.float64], tokens: int, top_k: int) -> NDArray[np.int64]:
    """Return batches as int64 ``[layers, batches, experts]``, drawn by popularity."""
    most = load.max(axis=-1, keepdims=True)
    share = load / np.where(most > 0, most, 1.0)
    # An expert without load is still there to be drawn, where others are too few.
    some = np.count_nonzero(share, axis=-1, keepdims=True) >= top_k
    drawable = np.where(some, share, np.maximum(share, 2.0**-20))
    workload = Workload.from_load(drawable, top_k, correlation=0)
    if tokens > _DRAWN_SINGLY:
        return _counts(visit_chances(workload.popularity, top_k), tokens)
    steps = [
        count_tokens(workload.draw(tokens, first_step=step)[0], load.shape[-1])
        for step in range(_DRAWN)
    ]
    return np.ascontiguousarray(np.stack(steps, axis=1))


def _counts(chance: NDArray[np.float64], tokens: int) -> NDArray[np.int64]:
    """Return counts of batches, int64 ``[layers, batches, experts]``, by chances of a visit.

    Independent binomials, of which the sum is then spread as far as it is off, by variance. Means
    and variances are those of tokens that draw distinct experts, and covariances Hájek's; counts
    are rounded, so that their sum is off by half a token per expert at most.
    """
    drawn = np.random.default_rng(0).binomial(
        tokens, chance[:, None], (len(chance), _DRAWN, chance.shape[1])
    )
    variance = chance * (1 - chance)
    whole = variance.sum(axis=-1, keepdims=True)
    part = np.divide(variance, whole, out=np.zeros_like(variance), where=whole > 0)[:, None]
    over = drawn.sum(axis=-1, keepdims=True) - tokens * chance.sum(axis=-1)[:, None, None]
    return np.asarray(np.clip(np.rint(drawn - over * part), 0, tokens).astype(np.int64))
