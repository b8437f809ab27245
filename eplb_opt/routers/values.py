"""Which values a makespan can take: what a proven bound may be raised to.

A makespan is the time of one GPU by one piece, ``slowness * (offset + activation*i + tile*j +
token*n)`` for integers that one GPU can have. No makespan lies between two such values, so a bound
may be raised to the next: it is what makes an engine's bound, lowered by its tolerance, meet the
optimum again. The arithmetic is that of `Objective.time`, operation by operation, so that "the same
value" means the same double.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb_opt.objective import Curve, Objective, Piece

ROUNDING = 1e-15
"""`Objective.time` of linear pieces is exact to this share: eight roundings of 2^-53, no less."""

MOST_COMBINATIONS = 1 << 20


class Range(NamedTuple):
    """What one GPU can be given at most.

    Attributes
    ----------
    activated
        Replicas that it can activate.
    tokens
        Tokens that it can take.
    """

    activated: int
    tokens: int


def next_value(objective: Objective, within: Range, bound: float) -> float:
    """Return the smallest time of a GPU that is not below a bound.

    Parameters
    ----------
    objective
        What is minimised.
    within
        What one GPU can be given at most.
    bound
        A lower bound on the makespan.

    Returns
    -------
    float
        At least `bound`, and not above any makespan that is at least `bound`. The bound itself
        where the values are too many to try, or not known (a `Curve` of times that doubles do not
        add exactly).

    Notes
    -----
    All combinations of all but the last kind of count are tried, and the last found by bisection,
    since the time does not fall in it. Vectorised; O(combinations * log tokens) per piece.

    Examples
    --------
    Values are multiples of 15 and of 0.1; the first is that of 3 activated replicas:

    >>> objective = Objective(pieces=(Piece(activation=15), Piece(token=0.1)))
    >>> next_value(objective, Range(8, 1000), 44.91), next_value(objective, Range(8, 1000), 44.89)
    (45.0, 44.900000000000006)
    """
    bound = max(bound, objective.idle)
    slowness = np.unique(objective.slowness or (1.0,))
    values = [
        _next_of_curve(p, slowness, within, bound)
        if isinstance(p, Curve)
        else _next_of_piece(p, objective.tile_tokens, slowness, within, bound)
        for p in objective.pieces
    ]
    value = min(values)
    # No routing's makespan reaches the bound: it is no bound, and the caller will find that out.
    return value if math.isfinite(value) else bound


def _next_of_piece(
    piece: Piece, tile_tokens: int, slowness: NDArray[np.float64], within: Range, bound: float
) -> float:
    """Return a piece's smallest time from `bound` on; inf if there is none, `bound` if unknown."""
    prices = [piece.activation, piece.tile, piece.token]
    last = max((kind for kind, price in enumerate(prices) if price), default=0)
    most = (within.activated, within.activated + within.tokens // tile_tokens)
    tried = [1 + most[kind] * bool(prices[kind] and kind < last) for kind in (0, 1)]
    if slowness.size * math.prod(tried) > MOST_COMBINATIONS:
        return bound
    i, j = np.ogrid[: tried[0], : tried[1]]
    base: NDArray[np.float64] = piece.offset + np.zeros((*tried,))
    if last > 0:
        base = base + piece.activation * i
    if last > 1:
        base = base + piece.tile * j

    # The counts of the last kind that go with i activated replicas and j tiles.
    low: Any
    high: Any
    if last == 0:
        low, high = 0 * i, within.activated + 0 * i
    elif last == 1:
        low, high = i, within.tokens // tile_tokens + (i if piece.activation else within.activated)
    elif piece.tile:
        low = i + tile_tokens * (j - i) if piece.activation else j
        high = np.where(j < i, -1, np.minimum(tile_tokens * j, within.tokens))
    else:
        low, high = i, np.where((i > 0) | (piece.activation == 0), within.tokens, 0)

    def time(count: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(by_gpu * (base + prices[last] * count))

    by_gpu = slowness[:, None, None]
    shape = (slowness.size, *tried)
    end = np.broadcast_to(high, shape) + 1
    low, high = np.broadcast_to(low, shape), end
    while (low < high).any():
        middle = (low + high) // 2
        reaches = time(middle) >= bound
        low, high = np.where(reaches, low, middle + 1), np.where(reaches, middle, high)
        low = np.minimum(low, high)
    return float(time(low)[low < end].min(initial=math.inf))


def _next_of_curve(
    curve: Curve, slowness: NDArray[np.float64], within: Range, bound: float
) -> float:
    """Return the next multiple of what all times of a curve are multiples of, if there is such."""
    grain = exact_grain(curve, slowness, within)
    return bound if grain is None else math.ceil(bound / grain) * grain


def exact_grain(curve: Curve, slowness: NDArray[np.float64], within: Range) -> float | None:
    """Return a power of two that divides all of a curve's times and slopes, times the slowness.

    Sums of so many multiples of it are exact in doubles. None if there is none; so for most
    measured times, unless they are rounded to sixteenths, say.
    """
    times = np.array(curve.times)
    slopes = np.diff(times) / np.diff(np.array(curve.tokens, np.float64))
    most = max(float(times[-1]), float(slopes[-1]) * within.tokens + float(times[-1]))
    most *= float(slowness.max()) * max(1, within.activated)
    grain = 2.0**-20
    parts = np.concatenate([times, slopes]) / grain
    parts = np.concatenate([parts, (slowness[:, None] * parts).ravel()])
    exact = bool((parts == np.rint(parts)).all())
    return grain if exact and most / grain < 2**52 else None
