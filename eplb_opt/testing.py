"""For people's own routers: strategies that draw problems, checkers for answers, and the truth.

Needs the extra ``testing`` (hypothesis).

Examples
--------
A property test of a router of one's own::

    @given(problems())
    def test_my_router(problem):
        routing = solve_routing(problem.placement, problem.tokens, method=MyRouter())
        check_routing(problem.placement, problem.tokens, routing)

and of an exact one, against every routing there is::

    @given(problems(max_gpus=3, max_experts=4, max_tokens=6), objectives())
    def test_my_exact_router(problem, objective):
        placement, tokens = problem.placement, problem.tokens
        routing = solve_routing(placement, tokens, objective=objective, method=MyRouter())
        assert (routing.makespan == optimal_makespan(placement, tokens, objective)).all()
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt import _core
from eplb_opt.bounds import certified_bound
from eplb_opt.demand import as_tokens, reject_tokens
from eplb_opt.errors import SolverUnavailableError
from eplb_opt.objective import Curve, Objective, Piece
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.routing import Routing, solve_routing
from eplb_opt.status import Proof, Status

try:
    from hypothesis import strategies as st
except ImportError:
    raise SolverUnavailableError(
        "eplb_opt.testing needs hypothesis: pip install 'eplb-opt[testing]'"
    ) from None

__all__ = [
    "Problem",
    "batches",
    "check_certificate",
    "check_routing",
    "objectives",
    "optimal_makespan",
    "placements",
    "problems",
]

_MOST_ROUTINGS = 2**20
_ROUTINGS_AT_ONCE = 2**14


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A placement and tokens that it can serve."""

    placement: Placement
    tokens: NDArray[np.int64]


def placements(
    *,
    max_layers: int = 2,
    max_gpus: int = 9,
    max_slots_per_gpu: int = 6,
    max_experts: int = 20,
    layered: bool | None = None,
) -> st.SearchStrategy[Placement]:
    """Draw placements: every expert placed somewhere, redundant slots filled at random or empty.

    Duplicates on one GPU, GPUs without any expert and experts on all GPUs occur. Shrinks to one
    layer, one GPU, one slot.

    Parameters
    ----------
    max_layers, max_gpus, max_slots_per_gpu, max_experts
        Limits of the shape.
    layered
        Whether the placement has a layer axis; None draws both.
    """

    @st.composite
    def draw_placement(draw: st.DrawFn) -> Placement:
        with_layers = draw(st.booleans()) if layered is None else layered
        layers = draw(st.integers(1, max_layers)) if with_layers else 1
        gpus = draw(st.integers(1, max_gpus))
        per_gpu = draw(st.integers(1, max_slots_per_gpu))
        experts = draw(st.integers(1, min(max_experts, gpus * per_gpu)))
        redundant = st.lists(
            st.integers(EMPTY, experts - 1),
            min_size=gpus * per_gpu - experts,
            max_size=gpus * per_gpu - experts,
        )
        rows = []
        for _ in range(layers):
            filled = [*range(experts), *draw(redundant)]
            order = draw(st.permutations(range(gpus * per_gpu)))
            rows.append(np.array(filled)[order].reshape(gpus, per_gpu))
        return Placement(np.stack(rows) if with_layers else rows[0], num_experts=experts)

    return draw_placement()


def batches(
    placement: Placement, *, max_tokens: int = 50, max_batches: int = 3, huge: bool = True
) -> st.SearchStrategy[NDArray[np.int64]]:
    """Draw tokens that fit a placement: none, one, or up to `max_batches` along a leading axis.

    About half of the experts are live; unless `huge` is false a count is huge now and then.
    """
    count = st.one_of(st.just(0), st.integers(0, max_tokens))
    if huge:
        count = count | st.sampled_from([1, 2**31, _core.MAX_TOKENS_PER_EXPERT])
    tail = placement.batch_shape

    @st.composite
    def draw_batch(draw: st.DrawFn) -> NDArray[np.int64]:
        batches = draw(st.integers(0, max_batches))
        shape = (batches, *tail) if batches else tail
        size = int(np.prod(shape))
        values = draw(st.lists(count, min_size=size, max_size=size))
        return np.array(values, dtype=np.int64).reshape(shape)

    return draw_batch()


def problems(
    *, max_tokens: int = 50, max_batches: int = 3, huge: bool = True, **limits: Any
) -> st.SearchStrategy[Problem]:
    """Draw a placement and tokens that fit it.

    Parameters
    ----------
    max_tokens, max_batches, huge
        As of `batches`.
    limits
        As of `placements`.
    """
    return placements(**limits).flatmap(
        lambda placement: batches(
            placement, max_tokens=max_tokens, max_batches=max_batches, huge=huge
        ).map(lambda tokens: Problem(placement, tokens))
    )


def objectives(*, num_gpus: int | None = None, curves: bool = True) -> st.SearchStrategy[Objective]:
    """Draw objectives of every kind.

    The pieces of ``"activations"`` and of ``"tokens"``, both, or up to three with offsets and tiles
    of few tokens; one of them may be a curve. Experts may be split or not. Shrinks to
    ``"activations"``.

    Parameters
    ----------
    num_gpus
        GPUs of the placement, to which the objective may give unequal slowness; None draws none.
    curves
        Whether a piece may be a curve.
    """
    cost = st.integers(0, 100).map(lambda tenths: tenths / 10)  # most are rounded, as real ones are
    maybe = st.just(0.0) | cost
    piece = st.builds(Piece, offset=maybe, activation=maybe, tile=maybe, token=maybe)
    pieces = st.lists(piece, min_size=1, max_size=3)
    if curves:
        with_curve = st.tuples(st.lists(piece, max_size=2), _curves(cost))
        pieces = st.one_of(pieces, with_curve.map(lambda drawn: [*drawn[0], drawn[1]]))
    slowness = st.sampled_from([1.0, 0.7, 1.5, 3.0])

    @st.composite
    def draw_objective(draw: st.DrawFn) -> Objective:
        counted = (Piece(activation=1.0),), (Piece(token=1.0),)
        roofline = st.tuples(cost, cost).map(lambda c: (Piece(activation=c[0]), Piece(token=c[1])))
        drawn = tuple(draw(st.one_of(st.sampled_from(counted), roofline, pieces)))
        unequal = num_gpus is not None and draw(st.booleans())
        return Objective(
            pieces=drawn if any(p.grows for p in drawn) else (*drawn, Piece(activation=1.0)),
            tile_tokens=draw(st.just(128) | st.integers(1, 5)),
            slowness=tuple(draw(slowness) for _ in range(num_gpus or 0)) if unequal else None,
            split=not draw(st.booleans()),
        )

    return draw_objective()


def _curves(cost: st.SearchStrategy[float]) -> st.SearchStrategy[Curve]:
    rows = st.lists(st.tuples(st.integers(1, 5), cost), min_size=2, max_size=4)
    return rows.map(
        lambda steps: Curve(
            tuple(accumulate(step for step, _ in steps)),
            tuple(accumulate(rise for _, rise in steps)),
        )
    )


def optimal_makespan(
    placement: Placement, tokens: ArrayLike, objective: Objective | str = "activations"
) -> NDArray[np.float64]:
    """Return the least makespan of all routings, by trying every one of them.

    Parameters
    ----------
    placement, tokens, objective
        As of `solve_routing`.

    Returns
    -------
    NDArray[np.float64]
        ``[..., layers]``.

    Raises
    ------
    InvalidTokensError, InfeasibleError
        As of `solve_routing`.
    ValueError
        A problem with more than 2**20 routings.

    Notes
    -----
    For tiny problems: n tokens can be split over r replicas in ``binomial(n + r - 1, r - 1)`` ways,
    and the numbers of all experts multiply. Two slots of one expert on one GPU are one replica
    here, unless the objective has a curve, under which two can take less time than one.

    Examples
    --------
    >>> placement = Placement([[0, 1], [0, 2]])
    >>> optimal_makespan(placement, [5, 3, 0], "tokens")
    array(4.)
    """
    objective = Objective.of(objective)
    objective.require_gpus(placement.num_gpus)
    demand = as_tokens(placement, tokens)
    reject_tokens(placement, demand)
    lead = demand.shape[:-1]
    flat = demand.reshape(math.prod(lead), placement.num_experts)
    makespan = np.empty(len(flat))
    for at, row in enumerate(flat):
        replicas = _choices(placement, at % placement.num_layers, objective)
        shares = [(slots, int(count)) for slots, count in zip(replicas, row, strict=True) if count]
        ways = math.prod(
            math.comb(count + len(slots) - 1, count) if objective.split else len(slots)
            for slots, count in shares
        )
        if ways > _MOST_ROUTINGS:
            where = tuple(int(i) for i in np.unravel_index(at, lead)) if lead else ()
            raise ValueError(
                f"problem {where} has {ways} routings, too many to try; at most {_MOST_ROUTINGS} "
                "are tried"
            )
        makespan[at] = min(
            float(objective.time(routed).max(axis=-1).min())
            for routed in _every_routing(placement, shares, ways, objective.split)
        )
    return makespan.reshape(lead)


def _choices(placement: Placement, layer: int, objective: Objective) -> list[list[int]]:
    """Return the slots among which each expert's tokens are shared."""
    slots = [placement.replicas(e, layer).tolist() for e in range(placement.num_experts)]
    if objective.curves:
        return slots
    per_gpu = placement.slots_per_gpu
    return [list({slot // per_gpu: slot for slot in of_expert}.values()) for of_expert in slots]


def _every_routing(
    placement: Placement, shares: list[tuple[list[int], int]], ways: int, split: bool
) -> Iterator[NDArray[np.int64]]:
    """Yield all routings of one problem, int64 ``[some, gpus, slots]``."""
    tables = [_ways_to_share(count, len(slots), split) for slots, count in shares]
    for first in range(0, ways, _ROUTINGS_AT_ONCE):
        left = np.arange(first, min(first + _ROUTINGS_AT_ONCE, ways))
        routed = np.zeros((left.size, placement.num_gpus * placement.slots_per_gpu), np.int64)
        for (slots, _), table in zip(shares, tables, strict=True):
            left, way = np.divmod(left, len(table))
            routed[:, slots] = table[way]
        yield routed.reshape(-1, placement.num_gpus, placement.slots_per_gpu)


def _ways_to_share(count: int, replicas: int, split: bool) -> NDArray[np.int64]:
    """Return int64 ``[ways, replicas]``: all ways to share an expert's tokens."""
    if not split:
        return count * np.eye(replicas, dtype=np.int64)
    # Of count + replicas - 1 places in a row, some are bars and the rest are tokens between them.
    places = count + replicas - 1
    bars = combinations(range(places), replicas - 1)
    return np.array([[b - a - 1 for a, b in pairwise((-1, *at, places))] for at in bars], np.int64)


def check_routing(placement: Placement, tokens: ArrayLike, routing: Routing) -> None:
    """Check that a routing serves every token once, where its expert is, and says so correctly.

    Raises
    ------
    AssertionError
        Naming what is wrong: a negative share, tokens in a slot that does not hold their expert,
        tokens lost or invented, an expert split under an objective that does not allow it, a
        derived figure that does not follow from the tokens, a makespan below its bound, a bound
        that another routing refutes or that nobody proved, a status that the bound does not
        support, a certificate that does not prove the bound.
    """
    demand = as_tokens(placement, tokens)
    routed = np.asarray(routing.tokens)
    shape = (*demand.shape[:-1], placement.num_gpus, placement.slots_per_gpu)
    _require(routed.shape == shape, f"tokens have shape {routed.shape}, not {shape}")
    status = np.asarray(routing.status)
    _require(bool(np.isin(status, list(Status)).all()), "a status is no Status")
    solved = status != Status.UNSOLVED
    _require(not routed[~solved].any(), "a problem that is UNSOLVED has tokens routed")
    _require(bool((routed >= 0).all()), "a replica takes a negative number of tokens")

    _require_served(placement, np.where(solved[..., None], demand, 0), routed)
    if not routing.objective.split:
        _require_whole(placement, routed)

    activated = (routed > 0).sum(axis=-1)
    _require(bool(np.array_equal(routing.activated, activated)), "activated does not follow")
    makespan = _makespan(routing.objective, routed)
    _require(
        bool(np.array_equal(routing.makespan[solved], makespan[solved])), "makespan does not follow"
    )
    _require(bool(np.isnan(routing.makespan[~solved]).all()), "an UNSOLVED problem has a makespan")
    proved_by = np.asarray(routing.proved_by)
    _require(bool(np.isin(proved_by, list(Proof)).all()), "proved_by is no Proof")
    _require(
        bool(np.array_equal(proved_by == Proof.NONE, np.isnan(routing.bound))),
        "proved_by is not NONE exactly where there is no bound",
    )
    proven = ~np.isnan(routing.bound) & solved
    _require(
        bool((routing.bound[proven] <= makespan[proven]).all()), "a makespan is below its bound"
    )
    # A valid routing refutes any bound above it, wherever the routing comes from.
    for other in _other_routings(placement, demand, routing.objective):
        _require_served(placement, demand, other)
        refuted = routing.bound > _makespan(routing.objective, other)
        _require(not refuted.any(), "a bound is above the optimum")
    optimal = status == Status.OPTIMAL
    _require(
        bool(np.array_equal(routing.bound[optimal], makespan[optimal])),
        "status is OPTIMAL where the makespan does not meet the bound",
    )
    check_certificate(placement, demand, routing)


def check_certificate(placement: Placement, tokens: ArrayLike, routing: Routing) -> None:
    """Check, by counting, that every certificate in a routing proves the bound beside it.

    Problems whose certificate is empty (none was asked for, or an engine proved its bound by
    branch and bound) are passed over.

    Raises
    ------
    AssertionError
        Naming the problem, the bound stated and the one that the GPU set proves.
    """
    proved = certified_bound(placement, tokens, routing.certificate, routing.objective)
    differs = routing.certificate.any(axis=-1) & (proved != routing.bound)
    if differs.any():
        at = tuple(int(i) for i in np.argwhere(differs)[0])
        raise AssertionError(
            f"the certificate of problem {at} proves a bound of {proved[at]:g}, "
            f"stated is {routing.bound[at]:g}"
        )


def _require_served(
    placement: Placement, demand: NDArray[np.int64], routed: NDArray[np.int64]
) -> None:
    layers, slots = placement.expert_of.shape
    by_layer = routed.reshape(demand.size // (layers * placement.num_experts), layers, slots)
    _require(not (by_layer * (placement.expert_of == EMPTY)).any(), "an empty slot takes tokens")
    served = np.zeros((*by_layer.shape[:2], placement.num_experts), np.int64)
    layer = np.arange(layers)
    for slot in range(slots):
        served[:, layer, placement.expert_of[:, slot]] += by_layer[:, :, slot]
    wrong = served.reshape(demand.shape) != demand
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"expert {at[-1]} of problem {at[:-1]} has {demand[at]} tokens and "
            f"{served.reshape(demand.shape)[at]} are routed"
        )


def _require_whole(placement: Placement, routed: NDArray[np.int64]) -> None:
    """Require that at most one replica of every expert takes tokens."""
    table = placement.logical_to_physical
    layers, slots = placement.expert_of.shape
    by_layer = (routed > 0).reshape(routed.size // (layers * slots), layers, slots)
    layer = np.arange(layers)[:, None, None]
    taking = (by_layer[:, layer, np.maximum(table, 0)] & (table >= 0)).sum(axis=-1)
    if (taking > 1).any():
        batch, at, expert = (int(i) for i in np.argwhere(taking > 1)[0])
        raise AssertionError(
            f"expert {expert} of layer {at} in batch {batch} is split over "
            f"{taking[batch, at, expert]} replicas, and the objective does not allow it"
        )


def _other_routings(
    placement: Placement, demand: NDArray[np.int64], objective: Objective
) -> Iterator[NDArray[np.int64]]:
    """Yield valid routings: the one with fewest activations, and with fewest tokens if split."""
    yield solve_routing(placement, demand, objective="activations", method="matching").tokens
    if objective.split:
        yield solve_routing(placement, demand, objective="tokens", method="flow").tokens


def _makespan(objective: Objective, routed: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(objective.time(routed).max(axis=-1, initial=0.0))


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise AssertionError(problem)
