"""Which steps to take in which layer, when the weights that may move are few.

A search from a placement takes a layer through states, step by step from one or several starts: so
many weights moved so far, such a makespan. A budget over all layers is spent where a moved weight
lowers the sum of makespans most: along the lower convex hull of every layer's states, steepest
segments first. For budgets that end with a segment no choice of states is better (the hull is what
Lagrange's relaxation reaches; Everett 1963); in between, what is left over is less than a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["MoveCurve", "spend"]

States = Sequence[tuple[int, float]]
"""A layer's states: weights moved, makespan; the first is where it starts."""

_Hull = list[tuple[int, float, int]]
"""Corners of a lower convex hull: weights moved, makespan, state; makespans falling."""


@dataclass(frozen=True, slots=True, eq=False)
class MoveCurve:
    """How the makespan falls as weights move.

    Attributes
    ----------
    moves
        Int64 ``[points]``: weights moved over all layers, rising.
    makespan
        Float64 ``[points]``: the sum of the layers' makespans, falling.

    Examples
    --------
    Two layers; the first move pays most in the second:

    >>> curve = MoveCurve.of([[(0, 9.0), (2, 7.0)], [(0, 9.0), (1, 6.0), (3, 5.0)]])
    >>> curve.moves.tolist(), curve.makespan.tolist()
    ([0, 1, 3, 5], [18.0, 15.0, 13.0, 12.0])
    """

    moves: NDArray[np.int64]
    makespan: NDArray[np.float64]

    @classmethod
    def of(cls, layers: Sequence[States]) -> MoveCurve:
        """Return the curve of layers, each by its states."""
        hulls = [_hull(states) for states in layers]
        start, segments = [hull[0] for hull in hulls], _segments(hulls)
        moves = [sum(moves for moves, _, _ in start), *(s.moves for s in segments)]
        makespan = [sum(cost for _, cost, _ in start), *(-s.gain for s in segments)]
        return cls(np.cumsum(np.array(moves, np.int64)), np.cumsum(np.array(makespan)))


def spend(layers: Sequence[States], budget: int | None) -> NDArray[np.int64]:
    """Return int64 ``[layers]``: which state each layer is to reach.

    Parameters
    ----------
    layers
        The states of every layer. The least moves of all layers together are within the budget.
    budget
        The most weights to move over all layers; None: any number, so the last states.

    Notes
    -----
    O(states log states). A larger budget never ends with a larger sum: where two budgets part, the
    larger takes a segment for which the smaller has no room, and which gains more than as many
    moves as the smaller has left gain on any later segments.

    Examples
    --------
    >>> spend([[(0, 9.0), (2, 7.0)], [(0, 9.0), (1, 6.0), (3, 5.0)]], budget=2)
    array([0, 1])
    """
    if budget is None:
        return np.array([len(states) - 1 for states in layers], np.int64)
    hulls = [_hull(states) for states in layers]
    reached = np.array([hull[0][2] for hull in hulls], np.int64)
    left = budget - sum(hull[0][0] for hull in hulls)
    stuck = np.zeros(len(layers), np.bool_)
    for segment in _segments(hulls):
        if stuck[segment.layer]:
            continue
        if segment.moves > left:
            stuck[segment.layer] = True
        else:
            left -= segment.moves
            reached[segment.layer] = segment.state
    return reached


@dataclass(frozen=True, slots=True)
class _Segment:
    """From one corner of a layer's hull to the next."""

    layer: int
    moves: int
    gain: float
    state: int


def _segments(hulls: Sequence[_Hull]) -> list[_Segment]:
    """Return all segments, those that gain most by move first; a layer's stay in order."""
    segments = []
    for layer, hull in enumerate(hulls):
        for (moves, cost, _), (more, less, state) in pairwise(hull):
            segments.append(_Segment(layer, more - moves, cost - less, state))
    return sorted(segments, key=lambda s: -s.gain / s.moves)


def _hull(states: States) -> _Hull:
    """Return the hull of a layer's states."""
    hull: _Hull = []
    for moves, cost, state in sorted((m, c, k) for k, (m, c) in enumerate(states)):
        if hull and cost >= hull[-1][1]:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], (moves, cost)):
            hull.pop()
        hull.append((moves, cost, state))
    return hull


def _above(a: tuple[int, float, int], b: tuple[int, float, int], c: tuple[int, float]) -> bool:
    """Say whether b is on or above the line from a to c."""
    return (b[1] - a[1]) / (b[0] - a[0]) >= (c[1] - a[1]) / (c[0] - a[0])
