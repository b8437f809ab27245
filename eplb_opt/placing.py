"""Which experts get copies and where they live: the answer, and the front door to every placer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt import _core
from eplb_opt.arrays import as_array, as_integer
from eplb_opt.budget import MoveCurve
from eplb_opt.errors import InvalidPlacementError, InvalidTokensError
from eplb_opt.measure import Measure, Split
from eplb_opt.metrics import PlacementMetrics, count_moves
from eplb_opt.objective import Objective
from eplb_opt.placement import EMPTY, Placement, require_slots
from eplb_opt.placers import (
    Batches,
    Placed,
    PlacementMethod,
    PlacementProblem,
    Search,
    placement_methods,
    resolve_placer,
)
from eplb_opt.status import Proof, Status
from eplb_opt.stopping import TimeLimit

__all__ = ["PlacementPlan", "as_load", "move_curve", "solve_placement"]

MAX_SLOTS = 2**31 - 1

_ROUNDING = _core.MAX_EXPERTS * 2.0**-52  # between sums of a layer's loads in different orders


@dataclass(frozen=True, slots=True, eq=False)
class PlacementPlan:
    """A placement and how well it balances the load that it was made for.

    Attributes
    ----------
    placement
        The placement.
    makespan
        Float64 ``[layers]`` (a scalar array without a layer axis): the largest GPU's load, by the
        measure that was asked for.
    bound
        Float64, the same shape: what no placement on the method's nodes gets below
        (`eplb_opt.bounds.placement_bound`); where this one leaves empty what was empty before, no
        other that does. From a method that proves its own answer, none that fills the other slots
        without shared copies.
    proved_by
        Int8 `Proof`, the same shape: who proved the bound.
    measure
        How copies share a load and windows sum up.
    metrics
        The placement by the measures that engines print, on the windows' mean load split equally;
        always with a layer axis.
    before
        The same of the placement that was served before, on the same load; None without one.
    moves
        Int64, as `makespan`: weights that GPUs must receive (`eplb_opt.metrics.count_moves`); None
        without a previous placement.
    note
        What the method decided by itself, such as a form that it fell back to; may be empty.

    Examples
    --------
    Layer 1 is balanced, layer 0 cannot be; in either, a GPU has two copies of one expert:

    >>> plan = solve_placement([[90, 10, 10, 10], [6, 3, 2, 1]], num_gpus=2, slots_per_gpu=3)
    >>> plan.makespan.tolist(), plan.bound.tolist(), plan.status.tolist(), plan.duplicates
    ([70.0, 6.0], [60.0, 6.0], [1, 2], 2)
    """

    placement: Placement
    makespan: NDArray[np.float64]
    bound: NDArray[np.float64]
    proved_by: NDArray[np.int8]
    measure: Measure
    metrics: PlacementMetrics
    before: PlacementMetrics | None = None
    moves: NDArray[np.int64] | None = None
    note: str = ""

    @property
    def balance(self) -> NDArray[np.float64]:
        """Float64, as `makespan`: mean GPU load over the largest; 1 for a layer without load."""
        balance = 1 / self.metrics.par
        return np.asarray(balance.reshape(self.makespan.shape))

    @property
    def gap(self) -> NDArray[np.float64]:
        """Float64, as `makespan`: makespan over bound, less 1; 0 for a layer without load."""
        loaded = self.bound > 0
        over = np.where(loaded, self.makespan / np.where(loaded, self.bound, 1.0), 1.0)
        return np.asarray(over - 1)

    @property
    def status(self) -> NDArray[np.int8]:
        """Int8, as `makespan`: `Status.OPTIMAL` where makespan meets bound, to rounding."""
        met = self.makespan <= self.bound * (1 + _ROUNDING)
        return np.asarray(np.where(met, Status.OPTIMAL, Status.FEASIBLE), dtype=np.int8)

    @property
    def duplicates(self) -> int:
        """Slots, over all layers, whose expert has an earlier slot on the same GPU."""
        return int(self.metrics.duplicates.sum())


def solve_placement(
    load: ArrayLike,
    *,
    num_gpus: int,
    slots_per_gpu: int,
    num_nodes: int = 1,
    num_groups: int = 1,
    previous: Placement | ArrayLike | None = None,
    max_moves: int | None = None,
    method: str | PlacementMethod = "deepseek",
    distinct: bool = False,
    split: Split | str = Split.EQUAL,
    over_windows: str | float = "mean",
    tokens_per_batch: int | None = None,
    top_k: int = 8,
    objective: Objective | str | None = None,
    stop: TimeLimit | None = None,
    threads: int = 1,
) -> PlacementPlan:
    """Decide which experts get copies and where every copy lives.

    Parameters
    ----------
    load
        Int or float ``[layers, experts]`` (or ``[experts]``): tokens of each expert, or any measure
        of its load; finite, not negative. A layer without any load is spread evenly. At most 4,096
        experts. Or several windows of time, ``[windows, layers, experts]``: engines' policies place
        for their mean (`flashlb` for their variance too), and the plan is measured on each.
    num_gpus, slots_per_gpu
        The slots to fill; at most 1,024 GPUs.
    num_nodes
        Nodes, joined inside by the fast link: that many runs of consecutive GPUs of equal length.
    num_groups
        Groups of experts that the model's gate picks together: that many runs of consecutive
        experts of equal length.
    previous
        The placement that is served now (a `Placement`, or its slots): what the methods that change
        a placement start from, and what moves are counted against. In the methods that look at it,
        slots that are empty stay empty.
    max_moves
        The most weights that GPUs may receive over all layers, to get from `previous` here; copies
        that share a GPU there may then stay, but for `distinct`.
    method
        A name from `eplb_opt.placement_methods`, with options as in ``"deepseek:form=global"``, or
        an instance.
    distinct
        Repair what the method answers where two copies of an expert share a GPU: by swaps that keep
        the peak at what it was where they can, within the nodes that the method kept experts to.
        Copies beyond one per GPU go to other experts.
    split, over_windows
        What the makespan is: see `Measure`. Methods of our own minimise it, engines' policies do
        what they do.
    tokens_per_batch
        For a method that places for the routing of batches: tokens of one over all GPUs, whose
        experts are drawn by `load`. Without it, every window is one batch as recorded.
    top_k
        Experts per token, with `tokens_per_batch`.
    objective
        What a GPU's time is taken to be when batches are routed, for such a method;
        ``"activations"`` if not given.
    stop
        `TimeLimit` for the exact engines, over all layers.
    threads
        Threads over the layers, for methods that take long.

    Returns
    -------
    PlacementPlan
        The placement, with makespan, bound, balance and status per layer. Without a layer axis in
        the load, there is none in the placement either.

    Raises
    ------
    InvalidTokensError
        A load of the wrong shape or type, or one that is NaN, infinite or negative, naming layer
        and expert; or a layer whose loads have no finite sum.
    InfeasibleError
        More experts than slots; the message says how many are missing.
    InvalidPlacementError
        More GPUs, experts or slots than are supported; a previous placement of another shape or
        with wrong ids, or one that the method cannot start from, or not with so few moves; an
        answer below its bound, from a method of one's own.
    ValueError
        No GPUs, slots, nodes or groups; nodes that do not divide the GPUs, or groups that do not
        divide the experts; an unknown method or option; an argument that the method does not heed,
        or a budget of moves without a previous placement.
    TypeError
        Numbers of GPUs, slots, nodes, groups, moves, tokens or threads that are not integers.

    Notes
    -----
    The method's time (see its class), and O(slots) per layer to measure the answer.

    Examples
    --------
    >>> plan = solve_placement([90, 10, 10, 10], num_gpus=2, slots_per_gpu=3)
    >>> plan.placement.copies.tolist(), float(plan.makespan)
    ([[3, 1, 1, 1]], 70.0)

    Distinct copies, one per GPU at most, and what it takes to get there:

    >>> now = plan.placement
    >>> plan = solve_placement(
    ...     [90, 10, 10, 10], num_gpus=2, slots_per_gpu=3, previous=now, distinct=True
    ... )
    >>> plan.placement.slots.tolist(), float(plan.makespan), int(plan.moves)
    ([[0, 1, 3], [0, 1, 2]], 60.0, 1)
    """
    placer = resolve_placer(method)
    heeded = {
        "max_moves": max_moves,
        "tokens_per_batch": tokens_per_batch,
        "objective": objective,
        "stop": stop,
    }
    _require_heeded(placer, method, {name for name, given in heeded.items() if given is not None})
    problem, layered = _as_problem(
        load, num_gpus, slots_per_gpu, num_nodes, num_groups, previous, threads
    )
    problem = replace(
        problem,
        max_moves=_as_budget(max_moves, previous),
        measure=Measure(Split(split), over_windows),
        batches=_as_batches(placer, tokens_per_batch, top_k, objective, problem.load.shape[1]),
        distinct=bool(distinct),
        stop=stop,
    )
    placed = placer.place(problem)
    slots = placed.slots
    if slots.shape != problem.shape:
        raise InvalidPlacementError(
            f"{method} answered slots of shape {slots.shape} where {problem.shape} was asked for"
        )
    if distinct:
        slots = np.array(slots, dtype=np.int32, order="C")
        _core.make_distinct(problem.load, placed.nodes, slots)
    placement = Placement(slots if layered else slots[0], num_experts=problem.load.shape[1])
    return _measured(problem, placement, placed, method)


def move_curve(
    load: ArrayLike,
    previous: Placement | ArrayLike,
    *,
    num_nodes: int = 1,
    num_groups: int = 1,
    over_windows: str | float = "mean",
    threads: int = 1,
) -> MoveCurve:
    """Return how much balance each number of moved weights buys.

    What `solve_placement` with ``method="search"`` and `max_moves` reaches, for every budget.

    Parameters
    ----------
    load, num_nodes, num_groups, over_windows, threads
        As for `solve_placement`.
    previous
        The placement that is served now (a `Placement`, or its slots). The curve begins with what
        it takes to mend it, if an expert is missing or a group split.

    Returns
    -------
    MoveCurve
        Moves and makespans summed over the layers.

    Raises
    ------
    InvalidTokensError
        As `solve_placement`, or if the layers' makespans have no finite sum.
    InfeasibleError, InvalidPlacementError, ValueError, TypeError
        As `solve_placement`.

    Notes
    -----
    As long as one placement by `search`, two for layers with shared copies.

    Examples
    --------
    >>> curve = move_curve([9, 1, 1, 9], Placement([[0, 3], [1, 2]]))
    >>> curve.moves.tolist(), curve.makespan.tolist()
    ([0, 2], [18.0, 10.0])
    """
    slots = _previous_slots(previous)
    problem, _ = _as_problem(
        load, slots.shape[-2], slots.shape[-1], num_nodes, num_groups, previous, threads
    )
    curve = Search().curve(replace(problem, measure=Measure(over_windows=over_windows)))
    if not np.isfinite(curve.makespan).all():
        raise InvalidTokensError("the layers' makespans have no finite sum; scale the loads down")
    return curve


def _as_problem(
    load: ArrayLike,
    num_gpus: int,
    slots_per_gpu: int,
    num_nodes: int,
    num_groups: int,
    previous: Placement | ArrayLike | None,
    threads: int,
) -> tuple[PlacementProblem, bool]:
    """Return what any method is asked, checked, and if the load has a layer axis."""
    windows, layered = _as_windows(load)
    gpus, per_gpu = as_integer(num_gpus, "num_gpus"), as_integer(slots_per_gpu, "slots_per_gpu")
    nodes, groups = as_integer(num_nodes, "num_nodes"), as_integer(num_groups, "num_groups")
    layers, experts = windows.shape[1:]
    _require_sizes(experts, gpus, per_gpu)
    _require_divides(nodes, "nodes", gpus, "GPUs")
    _require_divides(groups, "groups", experts, "experts")
    problem = PlacementProblem(
        windows,
        windows[0] if len(windows) == 1 else windows.mean(axis=0),
        gpus,
        per_gpu,
        nodes,
        groups,
        _as_previous(previous, (layers, gpus, per_gpu), experts),
        threads=min(as_integer(threads, "threads"), layers),
    )
    return problem, layered


def _measured(
    problem: PlacementProblem,
    placement: Placement,
    placed: Placed,
    method: str | PlacementMethod,
) -> PlacementPlan:
    measure, metrics = problem.measure, PlacementMetrics.of(placement, problem.load)
    if len(problem.windows) == 1 and measure.split is Split.EQUAL:
        makespan = metrics.peak  # which is measured already
    else:
        makespan = measure.makespan(placement, problem.windows)
    old = problem.old_slots()
    fills = old is not None and (placement.slots.reshape(old.shape)[old == EMPTY] != EMPTY).any()
    bound = (replace(problem, previous=None) if fills else problem).floor(placed.nodes)
    proved_by = np.full(len(bound), Proof.COUNT, np.int8)
    if placed.bound is not None:
        proved_by[placed.bound > bound] = placed.proved_by
        bound = np.maximum(bound, placed.bound)
    rounded = bound * _ROUNDING + measure.slack(problem.windows)
    for layer in np.flatnonzero(makespan < bound - rounded):
        raise InvalidPlacementError(
            f"{method}, layer {layer}: the makespan of its answer is {makespan[layer]:.10g}, below "
            f"the bound of {bound[layer]:.10g} for placements on {placed.nodes} nodes; its answer "
            "splits groups, or its bound is wrong"
        )
    bound = np.minimum(bound, makespan)
    moves, before = None, None
    if problem.previous is not None:
        before = PlacementMetrics.of(problem.previous, problem.load)
        moves = count_moves(problem.previous, placement)
    if not placement.layered:
        makespan, bound, proved_by = (np.asarray(of[0]) for of in (makespan, bound, proved_by))
        moves = None if moves is None else np.asarray(moves[0])
    return PlacementPlan(
        placement,
        makespan,
        bound,
        proved_by,
        measure,
        metrics,
        before,
        moves,
        placed.note,
    )


def _require_heeded(
    placer: PlacementMethod, method: str | PlacementMethod, given: set[str]
) -> None:
    """Refuse arguments that the method would not heed."""
    for name in sorted(given - placer.traits.takes):
        known = [other for other, traits in placement_methods().items() if name in traits.takes]
        raise ValueError(f"{method} does not heed {name}; methods that do: {', '.join(known)}")


def _as_budget(max_moves: int | None, previous: object) -> int | None:
    if max_moves is None:
        return None
    if previous is None:
        raise ValueError("max_moves counts from a previous placement; give previous")
    return as_integer(max_moves, "max_moves", least=0)


def _as_batches(
    placer: PlacementMethod,
    tokens: int | None,
    top_k: int,
    objective: Objective | str | None,
    experts: int,
) -> Batches | None:
    if "tokens_per_batch" not in placer.traits.takes:
        return None
    k = as_integer(top_k, "top_k")
    given = None if tokens is None else as_integer(tokens, "tokens_per_batch")
    if given is not None and k > experts:
        raise ValueError(f"top_k is {k}, and there are {experts} experts")
    return Batches(given, k, Objective.of("activations" if objective is None else objective))


def as_load(load: ArrayLike) -> NDArray[np.float64]:
    """Return a load as contiguous float64 ``[layers, experts]`` or ``[experts]``, checked.

    Raises
    ------
    InvalidTokensError
        Wrong shape or type, an entry that is NaN, infinite or negative, or a layer whose sum is
        beyond the range of float64.

    Examples
    --------
    >>> as_load([3, 0, 1])
    array([3., 0., 1.])
    """
    return _checked(load, {1: "[experts]", 2: "[layers, experts]"})


def _as_windows(load: ArrayLike) -> tuple[NDArray[np.float64], bool]:
    """Return a checked load as float64 [windows, layers, experts], and if it had a layer axis."""
    axes = {1: "[experts]", 2: "[layers, experts]", 3: "[windows, layers, experts]"}
    checked = _checked(load, axes)
    shape = (1,) * (3 - checked.ndim) + checked.shape
    return checked.reshape(shape), checked.ndim > 1


def _checked(load: ArrayLike, axes: dict[int, str]) -> NDArray[np.float64]:
    array = as_array(load, "load", InvalidTokensError)
    if array.dtype.kind not in "iuf" or array.ndim not in axes or 0 in array.shape:
        raise InvalidTokensError(
            f"load must be numbers {' or '.join(reversed(axes.values()))}, "
            f"not {array.dtype} of shape {array.shape}"
        )
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise InvalidTokensError(
            f"{_place(at)} has load {array[at]}; loads are finite and not negative"
        )
    with np.errstate(over="ignore"):
        checked = np.ascontiguousarray(array, dtype=np.float64)  # of a longdouble, too
        sums = checked.sum(axis=-1)
        if checked.ndim == 3:
            sums = sums.sum(axis=0)
        overflows = np.flatnonzero(np.isinf(sums))
    if overflows.size:
        place = f" of layer {overflows[0]}" if array.ndim > 1 else ""
        raise InvalidTokensError(f"the loads{place} have no finite sum; scale them down")
    return checked


def _place(at: tuple[int, ...]) -> str:
    names = ("window", "layer", "expert")[-len(at) :]
    return ", ".join(f"{name} {i}" for name, i in zip(names, at, strict=True))


def _as_previous(
    previous: Placement | ArrayLike | None, shape: tuple[int, int, int], experts: int
) -> Placement | None:
    if previous is None:
        return None
    slots = _previous_slots(previous)
    if (1,) * (3 - slots.ndim) + slots.shape != shape:
        raise InvalidPlacementError(
            f"previous must have slots {list(shape)} (layers, GPUs, slots), "
            f"not of shape {slots.shape}"
        )
    try:
        return Placement(slots.reshape(shape), experts, allow_missing=True)
    except InvalidPlacementError as error:
        raise InvalidPlacementError(f"previous: {error}") from None


def _previous_slots(previous: Placement | ArrayLike) -> NDArray[Any]:
    """Return the slots of a previous placement, ``[layers, gpus, slots]`` or ``[gpus, slots]``."""
    if isinstance(previous, Placement):
        return previous.slots
    slots = as_array(previous, "previous", InvalidPlacementError)
    if slots.ndim not in (2, 3):
        raise InvalidPlacementError(
            f"previous must have slots [layers, gpus, slots] or [gpus, slots], not of shape "
            f"{slots.shape}"
        )
    return slots


def _require_sizes(experts: int, gpus: int, per_gpu: int) -> None:
    if gpus > _core.MAX_GPUS or experts > _core.MAX_EXPERTS:
        raise InvalidPlacementError(
            f"{experts} experts per layer on {gpus} GPUs; at most {_core.MAX_EXPERTS} experts and "
            f"{_core.MAX_GPUS} GPUs are supported"
        )
    if gpus * per_gpu > MAX_SLOTS:
        raise InvalidPlacementError(
            f"{gpus} x {per_gpu} slots; physical ids are int32, {MAX_SLOTS} at most"
        )
    require_slots(experts, gpus * per_gpu)


def _require_divides(parts: int, name: str, whole: int, of_what: str) -> None:
    if whole % parts:
        raise ValueError(
            f"{parts} {name} do not divide {whole} {of_what}; they are of equal size, so "
            f"{_nearest_divisors(whole, parts)} would do"
        )


def _nearest_divisors(whole: int, parts: int) -> str:
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    below = [d for d in divisors if d < parts][-1:]
    above = [d for d in divisors if d > parts][:1]
    return " or ".join(map(str, below + above))
