"""Regime advice: which router a deployment needs at which batch size.

Reading weights costs by the activated replica, arithmetic by the token. In small batches the first
decides and METRO's routing is right, in large ones the second and token balance is. Real batches
hold both hot and cold experts, so where one takes over from the other is measured here, on drawn
batches, beside the boundary that TEMPO (arXiv 2608.13057) derives from averages.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from eplb_opt.batches import Traffic, moe_layers, opened
from eplb_opt.demand import count_tokens
from eplb_opt.gap import as_csv, as_json, deployments
from eplb_opt.objective import Objective
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.placing import solve_placement
from eplb_opt.routing import Router, Routing
from eplb_opt.status import Status
from eplb_opt.trace import TokenTrace
from eplb_opt.workload import ModelShape, Workload

__all__ = ["CHOICES", "Choice", "Crossover", "RegimeMap", "RegimeRow", "regime_map"]

Choice: TypeAlias = Literal["no-replicas", "uniform", "metro", "token-balance", "makespan"]
"""What to serve with, the simplest first."""

CHOICES: tuple[Choice, ...] = get_args(Choice)


@dataclass(frozen=True, slots=True)
class RegimeRow:
    """One deployment, skew and batch size. Times are means over layers and batches.

    Attributes
    ----------
    gpus, redundant, replication
        GPUs, slots beyond one per expert, and slots over experts.
    skew
        Zipf exponent of the experts' popularity; None for the traffic's own.
    tokens_per_gpu
        Tokens of a batch over GPUs.
    problems
        Layers times batches.
    no_replicas, uniform, metro, token_balance, makespan
        Time of the slowest GPU: on a placement without redundant slots; and with them under the
        equal split that EPLB assumes, METRO's greedy router, the proven balance of tokens, and the
        search for the least time itself.
    bound
        Mean of what the search proves that no routing with the redundant slots gets below.
    proven
        Share of the problems where `makespan` is proven to be the optimum.
    best
        The simplest choice whose time is within `RegimeMap.within` of the least.
    mixed
        Share of the problems that hold both hot and cold experts. An expert is hot if its tokens
        per replica are more than the break-even count n*, so that even an equal split leaves each
        of its replicas bound by arithmetic; any other live expert is cold.
    """

    gpus: int
    redundant: int
    replication: float
    skew: float | None
    tokens_per_gpu: int
    problems: int
    no_replicas: float
    uniform: float
    metro: float
    token_balance: float
    makespan: float
    bound: float
    proven: float
    best: Choice
    mixed: float

    def time(self, choice: Choice) -> float:
        """Return the time of a choice."""
        return float(getattr(self, choice.replace("-", "_")))

    def ratio(self, choice: Choice) -> float:
        """Return the time of a choice over that of `makespan`."""
        return _ratio(self.time(choice), self.makespan)


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where token balance takes over from METRO in one deployment, as batches grow.

    Attributes
    ----------
    gpus, redundant, replication, skew
        As in `RegimeRow`.
    tokens_per_gpu
        The batch at which both take as long, between the two samples below: the logarithm of their
        ratio is taken to be linear in the logarithm of the batch. NaN where a sample is missing.
    below, above
        Batches tried, one after the other: from `above` on token balance is the faster of the two,
        up to `below` METRO is at least as fast. None where the batches do not reach so far.
    ratio_below, ratio_above
        METRO's time over token balance's at these; NaN where there is none.
    flip, flip_hottest
        TEMPO's boundary, tokens per GPU, mean over layers: the batch in which the average activated
        replica, and the hottest expert, reaches the break-even count n* (see `flip_batch`). NaN for
        an objective without one.
    """

    gpus: int
    redundant: int
    replication: float
    skew: float | None
    tokens_per_gpu: float
    below: int | None
    above: int | None
    ratio_below: float
    ratio_above: float
    flip: float
    flip_hottest: float


@dataclass(frozen=True, slots=True)
class RegimeMap:
    """Which choice wins where.

    Attributes
    ----------
    traffic
        What the batches were drawn from.
    objective
        What a GPU's time is taken to be.
    break_even
        Its n*, tokens of an expert whose arithmetic takes as long as reading its weights.
    within
        What share of the least time a simpler choice may take longer and still be called best.
    batches, layers
        Batches drawn of each size, and layers of each.
    rows
        One per deployment, skew and batch size, batches rising.
    crossovers
        One per deployment and skew.
    """

    traffic: str
    objective: str
    break_even: float
    within: float
    batches: int
    layers: int
    rows: tuple[RegimeRow, ...]
    crossovers: tuple[Crossover, ...]

    def to_json(self) -> str:
        """Return the map as a JSON object; numbers that are not finite are null."""
        return as_json(self)

    def to_csv(self) -> str:
        """Return the rows as CSV with a header line."""
        return as_csv(RegimeRow, self.rows)


def regime_map(
    traffic: Traffic | ModelShape | None = None,
    *,
    gpus: Sequence[int] = (8, 16, 32),
    replication: Sequence[float] = (1.125, 1.25, 1.5),
    redundant: Sequence[int] | None = None,
    tokens_per_gpu: Sequence[int] = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 2048),
    skew: Sequence[float] | None = None,
    objective: Objective | str = "deepseek-v3-fp8",
    within: float = 0.01,
    steps: int = 1,
    layers: int = 8,
    top_k: int = 8,
    seed: int = 0,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> RegimeMap:
    """Say which router a deployment needs at which batch size, and where the choice changes.

    Parameters
    ----------
    traffic
        A `Workload`; a `ModelShape`, for its calibrated decode traffic (DeepSeek-V3's by default);
        or recorded traffic or its path, whose popularity batches are drawn from.
    gpus, replication, redundant
        Deployments to try, as for `eplb_opt.optimality_gap`.
    tokens_per_gpu
        Batches to try. Smaller ones are the first tokens of the largest, so that what differs is
        their size.
    skew
        Zipf exponents s to try instead of the traffic's own popularity: its share of the i-th
        expert is in proportion to ``i**-s``, but for what distinct top-k choices cannot reach.
    objective
        What a GPU's time is taken to be: an `Objective`, a preset's name or a JSON file.
    within
        What share of the least time a simpler choice may take longer and still be called best.
    steps, layers
        Batches of each size, and how many layers of each are drawn: the traffic's own evenly, or so
        many of its popularity under a skew.
    top_k
        Experts per token, where the traffic is recorded counts.
    seed
        For drawing batches, where `traffic` is not a `Workload`, which has its own.
    threads
        Threads over problems.
    progress
        Called with (done, total) drawn batches.

    Returns
    -------
    RegimeMap

    Raises
    ------
    InvalidTokensError, InvalidPlacementError
        As for `eplb_opt.optimality_gap`.
    ValueError
        Nothing to try, numbers out of range, an unknown objective, or one that forbids splits:
        token balance and the equal split are nothing but splits.

    Notes
    -----
    Experts are placed by DeepSeek's EPLB on the popularity that batches are drawn from. The time is
    that of drawing the largest batch (0.05 s for 4,096 tokens of a layer of 256 experts), once for
    every skew and step.

    Examples
    --------
    >>> regimes = regime_map(gpus=[8], replication=[1.25], tokens_per_gpu=[16, 1024], layers=2)
    >>> [(row.tokens_per_gpu, row.ratio("metro") < row.ratio("token-balance"))
    ...  for row in regimes.rows]
    [(16, True), (1024, False)]
    """
    objective = Objective.of(objective)
    if not objective.split:
        raise ValueError(
            f"{objective.name} forbids splitting an expert's tokens, which token balance and the "
            "equal split do: there is nothing to compare"
        )
    name, workload = _workload(traffic, top_k, seed)
    batches = sorted(set(tokens_per_gpu))
    _require_positive(tokens_per_gpu=batches, steps=[steps], layers=[layers])
    skews: Sequence[float | None] = [None] if skew is None else list(dict.fromkeys(skew))
    if not skews:
        raise ValueError("no skew to try; None is the traffic's own")
    if not 0 <= within < math.inf:
        raise ValueError(f"within is a share of the least time, 0 or more, not {within}")
    tried = deployments(workload.popularity.shape[1], gpus, replication, redundant)

    rows: list[RegimeRow] = []
    crossovers: list[Crossover] = []
    for at, exponent in enumerate(skews):
        drawn = replace(workload, popularity=_popularity(workload, exponent, layers))
        sizes = sorted({g * batch for g, _ in tried for batch in batches})
        counts = _counts(drawn, sizes, steps, at, len(skews), progress)
        for num_gpus, per_gpu in tried:
            demand = np.stack([counts[num_gpus * batch] for batch in batches])
            placement = solve_placement(
                drawn.popularity, num_gpus=num_gpus, slots_per_gpu=per_gpu
            ).placement
            single = _without_replicas(drawn, num_gpus)
            routed = _route(placement, single, demand, objective, threads)
            of_deployment = _rows(placement, demand, routed, batches, exponent, objective, within)
            rows += of_deployment
            crossovers.append(_crossover(of_deployment, *flip_batch(objective, drawn, placement)))
    return RegimeMap(
        traffic=name,
        objective=objective.name,
        break_even=objective.break_even,
        within=within,
        batches=steps,
        layers=len(drawn.popularity),
        rows=tuple(rows),
        crossovers=tuple(crossovers),
    )


def flip_batch(
    objective: Objective, workload: Workload, placement: Placement
) -> tuple[float, float]:
    """Return TEMPO's boundary between reading weights and arithmetic, tokens per GPU.

    A batch of B tokens per GPU makes ``M = B K G`` choices of experts, which activate about
    ``E(B) = sum over experts of (1 - (1 - p)^M) * copies`` replicas, as many as there are under the
    equal split. The average of them has n* tokens when ``B = n* E(B) / (K G)``, and the hottest
    expert, of popularity p1 and not split, as long a time as all the weights of an average GPU when
    ``B = n* E(B) / (p1 K G^2)``.

    Returns
    -------
    tuple[float, float]
        The two, means over layers; NaN where the objective has no finite n* above 0. 0 where the
        hottest expert takes longer whatever the batch.

    Notes
    -----
    The right-hand sides are concave in B and 0 at 0, so that each meets the left at most once above
    0, and bisection finds it.
    """
    break_even = objective.break_even
    if not 0 < break_even < math.inf:
        return math.nan, math.nan
    gpus, top_k = placement.num_gpus, workload.top_k
    popularity, copies = _reachable(workload.popularity, top_k), placement.copies

    def solved(factor: NDArray[np.float64]) -> float:
        low, high = np.zeros(len(popularity)), factor * copies.sum(axis=1)
        for _ in range(60):
            batch = (low + high) / 2
            unread = (1 - popularity) ** (batch * top_k * gpus)[:, None]
            short = batch < factor * ((1 - unread) * copies).sum(axis=1)
            low, high = np.where(short, batch, low), np.where(short, high, batch)
        return float(high.mean())

    average = np.full(len(popularity), break_even / (top_k * gpus))
    return solved(average), solved(average / (popularity.max(axis=1) * gpus))


def _workload(traffic: Traffic | ModelShape | None, top_k: int, seed: int) -> tuple[str, Workload]:
    """Return what to draw from, its dense layers left out, and what to call it."""
    if traffic is None or isinstance(traffic, ModelShape):
        shape = "deepseek-v3" if traffic is None else traffic.name
        traffic = Workload.preset(shape, seed=seed)
        name = f"{shape} decode, synthetic"
    else:
        name = str(traffic) if isinstance(traffic, (str, os.PathLike)) else "traffic in memory"
    source = opened(traffic)
    if not isinstance(source, Workload):
        k = source.top_k if isinstance(source, TokenTrace) else top_k
        source = Workload.from_load(source.load(), k, seed=seed)
        name += ", drawn from its popularity"
    return name, replace(source, popularity=moe_layers(source.popularity, 0)[0])


def _popularity(workload: Workload, skew: float | None, layers: int) -> NDArray[np.float64]:
    """Return the popularity of the layers to draw: the traffic's, evenly chosen, or Zipf's."""
    given, experts = workload.popularity.shape
    if skew is None:
        drawn = min(layers, given)
        return np.asarray(workload.popularity[np.arange(drawn) * given // drawn])
    if not 0 <= skew < math.inf:
        raise ValueError(f"a Zipf exponent is a finite number of at least 0, not {skew}")
    share = np.arange(1, experts + 1) ** -float(skew)
    return np.tile(share / share.sum(), (layers, 1))


def _counts(
    workload: Workload,
    sizes: Sequence[int],
    steps: int,
    at: int,
    of: int,
    progress: Callable[[int, int], None] | None,
) -> dict[int, NDArray[np.int64]]:
    """Return tokens [steps, layers, experts] of the first so many rows of the largest batch."""
    experts = workload.popularity.shape[1]
    counts: dict[int, list[NDArray[np.int64]]] = {size: [] for size in sizes}
    for step in range(steps):
        ids = workload.draw(sizes[-1], first_step=step)[0]
        for size, of_steps in counts.items():
            of_steps.append(count_tokens(ids[:, :size], experts))
        if progress is not None:
            progress(at * steps + step + 1, of * steps)
    return {size: np.stack(of_steps) for size, of_steps in counts.items()}


def _without_replicas(workload: Workload, gpus: int) -> Placement:
    """Return a placement with one replica of every expert."""
    load = workload.popularity
    per_gpu = -(-load.shape[1] // gpus)
    slots = solve_placement(load, num_gpus=gpus, slots_per_gpu=per_gpu).placement.slots.copy()
    # Where experts do not divide over the GPUs some have two: the first is kept.
    for layer in slots.reshape(len(load), -1):
        layer[~np.isin(np.arange(layer.size), np.unique(layer, return_index=True)[1])] = EMPTY
    return Placement(slots, num_experts=load.shape[1])


def _route(
    placement: Placement,
    single: Placement,
    demand: NDArray[np.int64],
    objective: Objective,
    threads: int,
) -> dict[Choice, Routing]:
    """Route tokens [batch sizes, steps, layers, experts] by every choice."""

    def route(onto: Placement, minimised: Objective | str, method: str) -> Routing:
        router = Router(onto, objective=minimised, method=method, threads=threads)
        return router.route(demand, bound=method == "makespan")

    return {
        "no-replicas": route(single, objective, "uniform"),
        "uniform": route(placement, objective, "uniform"),
        "metro": route(placement, objective, "metro"),
        "token-balance": route(placement, "tokens", "flow"),
        "makespan": route(placement, objective, "makespan"),
    }


def _rows(
    placement: Placement,
    demand: NDArray[np.int64],
    routed: dict[Choice, Routing],
    batches: Sequence[int],
    skew: float | None,
    objective: Objective,
    within: float,
) -> list[RegimeRow]:
    """Time the routings: a row per batch size."""
    slots = placement.num_gpus * placement.slots_per_gpu
    means = {
        choice: objective.time(routing.tokens).max(axis=-1).mean(axis=(1, 2))
        for choice, routing in routed.items()
    }
    search = routed["makespan"]
    hot = demand > objective.break_even * placement.copies
    mixed = np.asarray(hot.any(axis=-1) & ((demand > 0) & ~hot).any(axis=-1))
    rows = []
    for at, batch in enumerate(batches):
        time = {choice: float(mean[at]) for choice, mean in means.items()}
        good = (1 + within) * min(time.values())
        rows.append(
            RegimeRow(
                gpus=placement.num_gpus,
                redundant=slots - placement.num_experts,
                replication=slots / placement.num_experts,
                skew=skew,
                tokens_per_gpu=batch,
                problems=mixed[at].size,
                no_replicas=time["no-replicas"],
                uniform=time["uniform"],
                metro=time["metro"],
                token_balance=time["token-balance"],
                makespan=time["makespan"],
                bound=float(search.bound[at].mean()),
                proven=float((search.status[at] == Status.OPTIMAL).mean()),
                best=next(choice for choice in CHOICES if time[choice] <= good),
                mixed=float(mixed[at].mean()),
            )
        )
    return rows


def _crossover(rows: Sequence[RegimeRow], flip: float, flip_hottest: float) -> Crossover:
    """Find where token balance takes over, from the rows of one deployment, batches rising."""
    ratio = [_ratio(row.metro, row.token_balance) for row in rows]
    slower = (at for at in range(len(rows)) if ratio[at] > 1 and min(ratio[at:]) >= 1)
    above = next(slower, len(rows))
    has_below, has_above = above > 0, above < len(rows)
    batch = math.nan
    if has_below and has_above:
        logs = np.log(ratio[above - 1 : above + 1])
        ends = np.log([row.tokens_per_gpu for row in rows[above - 1 : above + 1]])
        batch = float(np.exp(np.interp(0.0, logs, ends)))
    return Crossover(
        gpus=rows[0].gpus,
        redundant=rows[0].redundant,
        replication=rows[0].replication,
        skew=rows[0].skew,
        tokens_per_gpu=batch,
        below=rows[above - 1].tokens_per_gpu if has_below else None,
        above=rows[above].tokens_per_gpu if has_above else None,
        ratio_below=ratio[above - 1] if has_below else math.nan,
        ratio_above=ratio[above] if has_above else math.nan,
        flip=flip,
        flip_hottest=flip_hottest,
    )


def _ratio(time: float, other: float) -> float:
    """Divide times, of which a measured curve can give zero."""
    if other:
        return time / other
    return math.inf if time else 1.0


def _reachable(popularity: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """Return the shares of distinct choices: none above 1 / top_k, the rest in proportion."""
    share, sure = popularity, np.zeros(popularity.shape, np.bool_)
    for _ in range(top_k):
        sure |= share >= 1 / top_k
        rest = np.where(sure, 0.0, popularity)
        left = 1 - sure.sum(axis=1, keepdims=True) / top_k
        total = rest.sum(axis=1, keepdims=True)
        scaled = np.divide(rest * left, total, out=np.zeros(rest.shape), where=total > 0)
        share = np.where(sure, 1 / top_k, scaled)
    return share


def _require_positive(**numbers: Sequence[int]) -> None:
    for name, values in numbers.items():
        if not len(values) or min(values) < 1:
            raise ValueError(f"{name} must be 1 or more, not {list(values)}")
