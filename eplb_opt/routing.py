"""Which replica takes which tokens: the answer, and the front door to every router."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt import _core
from eplb_opt.demand import as_tokens, as_topk_ids, reject_tokens
from eplb_opt.errors import EplbError, InvalidTokensError
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.routers import resolve_method
from eplb_opt.routers.base import NO_CONTEXT, Context, RoutingMethod, refuse
from eplb_opt.routers.makespan import prover
from eplb_opt.status import Proof, Status
from eplb_opt.stopping import TimeLimit

__all__ = ["Proof", "Router", "Routing", "RoutingSummary", "Status", "solve_routing"]


@dataclass(frozen=True, slots=True)
class RoutingSummary:
    """A routing in a few numbers, of the problems that were answered; NaN where none was.

    Attributes
    ----------
    problems
        Problems (a layer and a batch each) with an answer.
    unsolved
        Problems without one: an exact engine ran out of time.
    live_experts
        Live experts, mean per problem.
    replicas_available
        Replicas of live experts, mean per problem.
    replicas_activated
        Replicas that receive tokens, mean per problem.
    tokens_per_activated
        Tokens over activated replicas.
    makespan, bound
        Means over problems times layers: what a batch waits for, since every layer waits for its
        own slowest GPU.
    gap
        ``makespan / bound - 1`` of these sums; NaN without a bound.
    time_p50, time_p95, time_p99, time_max
        Percentiles of a GPU's time.
    balance
        Mean over problems of (mean time over GPUs) / (largest); 1 for a problem without tokens.
    proven_optimal
        Share of the problems with `Status.OPTIMAL`.
    """

    problems: int
    unsolved: int
    live_experts: float
    replicas_available: float
    replicas_activated: float
    tokens_per_activated: float
    makespan: float
    bound: float
    gap: float
    time_p50: float
    time_p95: float
    time_p99: float
    time_max: float
    balance: float
    proven_optimal: float

    def __str__(self) -> str:
        return "\n".join(f"{name:<21}{value:.6g}" for name, value in asdict(self).items())


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The answer to a batch of routing problems. Without a layer axis, the axis is absent here too.

    Attributes
    ----------
    placement, objective
        What was routed on, and what was minimised.
    tokens
        Int64 ``[..., layers, gpus, slots]``: tokens that each replica takes.
    activated
        Int64 ``[..., layers, gpus]``: replicas with tokens.
    makespan
        Float64 ``[..., layers]``: the largest GPU's time under the objective; NaN where the status
        is UNSOLVED.
    bound
        Float64 ``[..., layers]``: a proven lower bound on any routing's makespan; NaN where none
        was asked for.
    status
        Int8 ``[..., layers]``: `Status` values.
    proved_by
        Int8 ``[..., layers]``: `Proof` values, who proved the bound.
    certificate
        Bool ``[..., layers, gpus]``: the GPU set that proves the bound, see
        `eplb_opt.bounds.certified_bound`; all false where there is none.
    """

    placement: Placement
    objective: Objective
    tokens: NDArray[np.int64]
    activated: NDArray[np.int64]
    makespan: NDArray[np.float64]
    bound: NDArray[np.float64]
    status: NDArray[np.int8]
    proved_by: NDArray[np.int8]
    certificate: NDArray[np.bool_]
    core: _core.Answer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "core", _core.Answer(*self._arrays()))

    @property
    def gap(self) -> NDArray[np.float64]:
        """Float64 ``[..., layers]``: ``makespan / bound - 1``; 0 where both are 0."""
        return _gap(self.makespan, self.bound)

    @property
    def gap_beyond_idle(self) -> NDArray[np.float64]:
        """`gap` without the time that offsets alone cost: of what a routing can change."""
        idle = self.objective.idle
        return _gap(self.makespan - idle, self.bound - idle)

    def gpu_tokens(self) -> NDArray[np.int64]:
        """Return int64 ``[..., layers, gpus]``: the tokens of every GPU."""
        return np.asarray(self.tokens.sum(axis=-1))

    def gpu_time(self) -> NDArray[np.float64]:
        """Return float64 ``[..., layers, gpus]``: the time of every GPU under the objective."""
        return self.objective.time(self.tokens)

    def expert_tokens(self) -> NDArray[np.int64]:
        """Return int64 ``[..., layers, experts]``: the tokens routed, by expert."""
        table = self.placement.logical_to_physical
        layer = np.arange(self.placement.num_layers)[:, None, None]
        routed = self._by_layer(self.tokens)[:, layer, np.maximum(table, 0)] * (table >= 0)
        lead = self.makespan.shape
        return np.asarray(routed.sum(axis=-1).reshape(*lead, self.placement.num_experts))

    def assign(self, topk_ids: ArrayLike) -> NDArray[np.int32]:
        """Say which physical slot serves each token's k-th expert.

        Shares of split experts are honoured to the token: of an expert's tokens in their order in
        the batch, its lowest slot takes the first, the next slot the following ones.

        Parameters
        ----------
        topk_ids
            Int ``[..., layers, rows, k]`` (or with further axes before ``rows``): the batch that
            was routed; -1 is padding.

        Returns
        -------
        NDArray[np.int32]
            Physical ids in the shape of `topk_ids`; -1 for padding.

        Raises
        ------
        InvalidTokensError
            If the ids are not as many as the tokens routed, naming the problem and the expert.

        Notes
        -----
        O(ids + slots) per problem.

        Examples
        --------
        >>> placement = Placement([[0, 1], [0, 2]])
        >>> routing = solve_routing(placement, [3, 1, 0], objective="tokens")
        >>> routing.assign([[0, 1], [0, -1], [0, -1]])
        array([[ 0,  1],
               [ 2, -1],
               [ 2, -1]], dtype=int32)
        """
        ids = as_topk_ids(topk_ids, self.placement.num_experts)
        lead = self.makespan.shape
        if ids.shape[: len(lead)] != lead or ids.ndim < len(lead) + 2:
            raise InvalidTokensError(
                f"topk_ids must be {list(lead)} + [rows, k] for this routing, "
                f"not of shape {ids.shape}"
            )
        physical = np.empty(ids.shape, np.int32)
        problem, expert = _core.assign(self.placement.core, self.tokens, ids, physical)
        if problem >= 0:
            at = tuple(int(i) for i in np.unravel_index(problem, lead)) if lead else ()
            raise InvalidTokensError(
                f"topk_ids of problem {at} do not hold as many tokens of expert {expert} as were "
                f"routed; pass the ids whose counts were solved"
            )
        return physical

    def summary(self) -> RoutingSummary:
        """Return the routing in a few numbers."""
        answered = self.status != Status.UNSOLVED
        time = self.gpu_time()[answered]
        expert_tokens = self.expert_tokens()
        live = expert_tokens > 0
        copies = self.placement.copies if self.placement.layered else self.placement.copies[0]
        available = (live * copies).sum(axis=-1)
        activated = self.activated.sum(axis=-1)

        def mean(of_problem: NDArray[Any]) -> float:
            return float(of_problem[answered].mean()) if answered.any() else math.nan

        largest = time.max(axis=-1, initial=0)
        balance = np.divide(
            time.mean(axis=-1), largest, out=np.ones_like(largest), where=largest > 0
        )
        layers = self.placement.num_layers
        makespan, bound = mean(self.makespan) * layers, mean(self.bound) * layers
        p50, p95, p99, most = (
            np.percentile(time, [50, 95, 99, 100]) if time.size else [math.nan] * 4
        )
        return RoutingSummary(
            problems=int(answered.sum()),
            unsolved=int((~answered).sum()),
            live_experts=mean(live.sum(axis=-1)),
            replicas_available=mean(available),
            replicas_activated=mean(activated),
            tokens_per_activated=float(expert_tokens.sum()) / max(1, int(activated.sum())),
            makespan=makespan,
            bound=bound,
            gap=float(_gap(np.float64(makespan), np.float64(bound))),
            time_p50=float(p50),
            time_p95=float(p95),
            time_p99=float(p99),
            time_max=float(most),
            balance=float(balance.mean()) if balance.size else math.nan,
            proven_optimal=mean(self.status == Status.OPTIMAL),
        )

    def _by_layer(self, array: NDArray[Any]) -> NDArray[Any]:
        """Reshape ``[..., layers, x]`` to ``[batches, layers, x]``, adding an absent layer axis."""
        layers = self.placement.num_layers
        each = math.prod(array.shape[self.makespan.ndim :])
        return array.reshape(self.makespan.size // layers, layers, each)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_routing, (self.placement, self.objective, *self._arrays())

    def _arrays(self) -> tuple[NDArray[Any], ...]:
        counts = (self.tokens, self.activated)
        return (*counts, self.makespan, self.bound, self.status, self.proved_by, self.certificate)


def _empty_arrays(placement: Placement, shape: Sequence[int]) -> dict[str, Any]:
    """Return the arrays of an unsolved routing for tokens of that shape."""
    lead = tuple(shape)[:-1]
    gpus = (*lead, placement.num_gpus)
    return {
        "tokens": np.zeros((*gpus, placement.slots_per_gpu), np.int64),
        "activated": np.zeros(gpus, np.int64),
        "makespan": np.zeros(lead),
        "bound": np.full(lead, np.nan),
        "status": np.zeros(lead, np.int8),
        "proved_by": np.zeros(lead, np.int8),
        "certificate": np.zeros(gpus, np.bool_),
    }


def _rebuild_routing(placement: Placement, objective: Objective, *arrays: NDArray[Any]) -> Routing:
    """Unpickle: the arrays may lie in buffers that cannot be written to, as a Routing's can."""
    return Routing(placement, objective, *(np.require(a, requirements="W") for a in arrays))


def _rebuild_router(
    placement: Placement, objective: Objective, method: RoutingMethod, threads: int
) -> Router:
    return Router(placement, objective=objective, method=method, threads=threads)


def _gap(
    makespan: NDArray[np.float64] | np.float64, bound: NDArray[np.float64] | np.float64
) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        gap = makespan / bound - 1
    return np.where((makespan == 0) & (bound == 0), 0.0, gap)


class Router:
    """A placement, an objective and a method bound once, to route batch after batch.

    Parameters
    ----------
    placement
        Where the replicas are.
    objective
        `Objective` or its name.
    method
        A method's name (see `eplb_opt.routing_methods`), a name with options
        (``"metro:order=random,seed=3"``), or an instance of a method, one's own included.
    threads
        Threads over the problems of a batch.

    Raises
    ------
    ValueError
        Unknown method or objective, or a method that does not solve the objective.

    Examples
    --------
    >>> router = Router(Placement([[0, 1], [0, 2]]), method="metro")
    >>> out = router.allocate((3,))
    >>> router.route(np.array([5, 2, 2]), out=out).activated
    array([2, 1])
    """

    MAX_THREADS = 1024

    __slots__ = (
        "_compiled",
        "_prove",
        "_proves",
        "_solve",
        "method",
        "objective",
        "placement",
        "threads",
    )

    def __init__(
        self,
        placement: Placement,
        *,
        objective: Objective | str = "activations",
        method: str | RoutingMethod = "optimal",
        threads: int = 1,
    ) -> None:
        if not 1 <= operator.index(threads) <= self.MAX_THREADS:
            raise ValueError(f"threads must be 1 to {self.MAX_THREADS}, not {threads}")
        self.placement = placement
        self.objective = Objective.of(objective)
        self.method = resolve_method(method, self.objective)
        self.threads = threads
        self._solve = self.method.bind(placement, self.objective, threads)
        self._compiled = self.method.traits.compiled
        self._proves = self.method.traits.exact
        self._prove = prover(placement, self.objective)

    def allocate(self, shape: Sequence[int]) -> Routing:
        """Return an empty answer for tokens of that shape, to pass to `route` as ``out=``.

        Raises
        ------
        InvalidTokensError
            The shape is not one that tokens for the placement can have.
        """
        tail = self.placement.batch_shape
        if tuple(shape)[-len(tail) :] != tail:
            raise InvalidTokensError(
                f"tokens for this placement are of shape [..., {', '.join(map(str, tail))}], "
                f"not {list(shape)}"
            )
        return Routing(self.placement, self.objective, **_empty_arrays(self.placement, shape))

    def route(
        self,
        tokens: ArrayLike,
        *,
        out: Routing | None = None,
        bound: bool = False,
        source_tokens: ArrayLike | None = None,
        topk_ids: ArrayLike | None = None,
        stop: TimeLimit | None = None,
    ) -> Routing:
        """Route a batch; see `solve_routing` for the parameters.

        With ``out=`` from `allocate`, nothing is allocated per problem and the answer overwrites
        `out`. After an error the contents of `out` are unspecified. Exact methods prove their
        answer in any case; for the others ``bound=True`` does.
        """
        if out is None:
            tokens = as_tokens(self.placement, tokens)
            out = self.allocate(tokens.shape)
        elif out.placement is not self.placement or (
            out.objective is not self.objective and out.objective != self.objective
        ):
            raise ValueError("out is for another placement or objective; make it with allocate()")
        context = NO_CONTEXT
        if source_tokens is not None or topk_ids is not None or stop is not None:
            tokens = as_tokens(self.placement, tokens)
            context = Context.of(self.placement, tokens, source_tokens, topk_ids, stop)
        if not self._compiled:
            tokens = self._made_ready(tokens, out)
            reject_tokens(self.placement, tokens)
        try:
            self._solve(tokens, out, context)  # type: ignore[arg-type]  # refuses all else
        except (TypeError, ValueError):
            # The core refuses what is not a contiguous int64 array of the answer's shape. Only then
            # is it worth finding out what the caller gave.
            ready = self._made_ready(tokens, out)
            if ready is tokens:
                raise
            self._solve(ready, out, context)
            tokens = ready
        if bound and not self._proves:
            bad = self._prove(self.placement.core, tokens, out.core, self.threads)
            if bad >= 0:
                refuse(self.placement, as_tokens(self.placement, tokens), bad)
            if (out.makespan < out.bound).any():
                raise EplbError(
                    f"{self.method!r} answers with less than the proven bound, so it does not "
                    f"serve every token; eplb_opt.testing.check_routing says which"
                )
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_router, (self.placement, self.objective, self.method, self.threads)

    def __repr__(self) -> str:
        return f"Router({self.placement!r}, {self.objective.name}, {self.method!r})"

    def _made_ready(self, tokens: ArrayLike, out: Routing) -> NDArray[np.int64]:
        ready = as_tokens(self.placement, tokens)
        if out.makespan.shape != ready.shape[:-1]:
            raise InvalidTokensError(
                f"out is for tokens of shape {[*out.makespan.shape, self.placement.num_experts]}, "
                f"not {list(ready.shape)}; make it with allocate(tokens.shape)"
            )
        return ready


def solve_routing(
    placement: Placement,
    tokens: ArrayLike,
    *,
    objective: Objective | str = "activations",
    method: str | RoutingMethod = "optimal",
    source_tokens: ArrayLike | None = None,
    topk_ids: ArrayLike | None = None,
    stop: TimeLimit | None = None,
    bound: bool = True,
    threads: int = 1,
) -> Routing:
    """Decide which replica takes which tokens, and prove how good the decision is.

    Parameters
    ----------
    placement
        Where the replicas are.
    tokens
        Int ``[..., layers, experts]`` (``[..., experts]`` for a placement without a layer axis):
        each expert's tokens. Leading axes are independent batches. At most 2**39 - 1 per expert.
    objective
        ``"activations"`` (the fullest GPU's activated replicas) or ``"tokens"`` (its tokens).
    method
        ``"optimal"`` picks the exact compiled method of the objective. Others by name, by name with
        options, or as an instance: see `eplb_opt.routing_methods`.
    source_tokens
        Int ``[..., layers, sources, experts]``: tokens by the GPU that sends them, for rules that
        depend on it. `topk_ids` by source say the same.
    topk_ids
        Int ``[..., layers, rows, k]`` or ``[..., layers, sources, rows, k]``: the experts of every
        token, by local batch; -1 is padding. For rules that depend on them.
    stop
        `TimeLimit` for the exact engines, over the whole call.
    bound
        Also prove a bound for methods that do not prove their own answer.
    threads
        Threads over the problems.

    Returns
    -------
    Routing
        With tokens, makespan, bound, gap, status and certificate per problem.

    Raises
    ------
    InvalidTokensError, InfeasibleError, SolverUnavailableError, ValueError
        Each names the place and what to do.

    Examples
    --------
    >>> placement = Placement([[0, 1], [0, 2], [1, 3], [2, 3]])
    >>> uniform = solve_routing(placement, [4, 4, 4, 4], method="uniform")
    >>> best = solve_routing(placement, [4, 4, 4, 4])
    >>> uniform.activated.tolist(), best.activated.tolist(), float(best.bound)
    ([2, 2, 2, 2], [1, 1, 1, 1], 1.0)
    """
    router = Router(placement, objective=objective, method=method, threads=threads)
    return router.route(
        tokens, bound=bound, source_tokens=source_tokens, topk_ids=topk_ids, stop=stop
    )
