"""For people's own routers: hypothesis strategies that draw problems, and checkers for answers.

Needs the extra ``testing`` (hypothesis).

Examples
--------
A property test of a router of one's own::

    @given(problems())
    def test_my_router(problem):
        routing = solve_routing(problem.placement, problem.tokens, method=MyRouter())
        check_routing(problem.placement, problem.tokens, routing)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt import _core
from eplb_opt.bounds import certified_bound
from eplb_opt.demand import as_tokens
from eplb_opt.errors import SolverUnavailableError
from eplb_opt.objective import Objective
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.routing import Routing, solve_routing
from eplb_opt.status import Status

try:
    from hypothesis import strategies as st
except ImportError:
    raise SolverUnavailableError(
        "eplb_opt.testing needs hypothesis: pip install 'eplb-opt[testing]'"
    ) from None

__all__ = ["Problem", "batches", "check_certificate", "check_routing", "placements", "problems"]


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
    placement: Placement, *, max_tokens: int = 50, max_batches: int = 3
) -> st.SearchStrategy[NDArray[np.int64]]:
    """Draw tokens that fit a placement: none, one, or up to `max_batches` along a leading axis.

    About half of the experts are live; now and then a count is huge.
    """
    huge = st.sampled_from([1, 2**31, _core.MAX_TOKENS_PER_EXPERT])
    count = st.one_of(st.just(0), st.integers(0, max_tokens), huge)
    tail = placement.batch_shape

    @st.composite
    def draw_batch(draw: st.DrawFn) -> NDArray[np.int64]:
        batches = draw(st.integers(0, max_batches))
        shape = (batches, *tail) if batches else tail
        size = int(np.prod(shape))
        values = draw(st.lists(count, min_size=size, max_size=size))
        return np.array(values, dtype=np.int64).reshape(shape)

    return draw_batch()


def problems(**limits: Any) -> st.SearchStrategy[Problem]:
    """Draw a placement (within `limits`, see `placements`) and tokens that fit it."""
    return placements(**limits).flatmap(
        lambda placement: batches(placement).map(lambda tokens: Problem(placement, tokens))
    )


def check_routing(placement: Placement, tokens: ArrayLike, routing: Routing) -> None:
    """Check that a routing serves every token once, where its expert is, and says so correctly.

    Raises
    ------
    AssertionError
        Naming what is wrong: a negative share, tokens in a slot that does not hold their expert,
        tokens lost or invented, a derived figure that does not follow from the tokens, a makespan
        below its bound, a status that the bound does not support, a certificate that does not
        prove the bound.
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

    activated = (routed > 0).sum(axis=-1)
    _require(bool(np.array_equal(routing.activated, activated)), "activated does not follow")
    makespan = _makespan(routing.objective, routed)
    _require(
        bool(np.array_equal(routing.makespan[solved], makespan[solved])), "makespan does not follow"
    )
    proven = ~np.isnan(routing.bound) & solved
    _require(
        bool((routing.bound[proven] <= makespan[proven]).all()), "a makespan is below its bound"
    )
    # A valid routing refutes any bound above it, wherever the routing comes from.
    other = solve_routing(placement, demand, objective=routing.objective).tokens
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


def _makespan(objective: Objective, routed: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.asarray(objective.time(routed).max(axis=-1, initial=0.0))


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise AssertionError(problem)
