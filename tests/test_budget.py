"""Budgets of moves: which layers get them, and the curve of moves against makespan."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt.budget import MoveCurve, spend

STATES = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 40).map(float)), min_size=1, max_size=5
).map(lambda states: [(0, 50.0), *states])
LAYERS = st.lists(STATES, min_size=1, max_size=4)


@given(LAYERS, st.integers(0, 20))
def test_a_budget_is_kept_and_well_spent(
    layers: list[list[tuple[int, float]]], budget: int
) -> None:
    """No choice within it is better than the hulls allow, what is chosen fits, more is no worse."""
    chosen = spend(layers, budget)
    picked = [states[k] for states, k in zip(layers, chosen, strict=True)]
    assert sum(moves for moves, _ in picked) <= budget
    curve = MoveCurve.of(layers)
    reachable = np.interp(budget, curve.moves, curve.makespan)
    best = min(
        sum(cost for _, cost in choice)
        for choice in product(*layers)
        if sum(moves for moves, _ in choice) <= budget
    )
    assert reachable <= best + 1e-9
    assert sum(cost for _, cost in picked) >= best
    more = [states[k] for states, k in zip(layers, spend(layers, budget + 1), strict=True)]
    assert sum(cost for _, cost in more) <= sum(cost for _, cost in picked)


def test_makespans_near_the_end_of_doubles() -> None:
    """Slopes decide, which stay finite where products do not."""
    layers = [[(0, 1.5e308), (100, 1e308), (200, 1.4e308), (300, 1e307)]]
    assert MoveCurve.of(layers).moves.tolist() == [0, 100, 300]


@given(LAYERS)
def test_the_corners_of_the_curve_are_reached(layers: list[list[tuple[int, float]]]) -> None:
    """Every point of the curve is what its budget buys; moves rise and makespans fall."""
    curve = MoveCurve.of(layers)
    assert (np.diff(curve.moves) > 0).all()
    assert (np.diff(curve.makespan) < 0).all()
    assert (np.diff(np.diff(curve.makespan) / np.diff(curve.moves)) >= -1e-9).all()
    last = spend(layers, int(curve.moves[-1]))
    reached = sum(states[k][1] for states, k in zip(layers, last, strict=True))
    assert reached == pytest.approx(curve.makespan[-1])
    assert reached == min(sum(cost for _, cost in choice) for choice in product(*layers))


def test_any_number_of_moves() -> None:
    """Without a budget every layer goes to where its search ended."""
    assert spend([[(0, 3.0)], [(0, 9.0), (2, 4.0), (4, 3.0)]], None).tolist() == [0, 2]


def test_what_is_left_goes_to_a_cheaper_layer() -> None:
    """A segment that does not fit ends its own layer only."""
    layers = [[(0, 100.0), (9, 1.0)], [(0, 10.0), (2, 9.0)]]
    assert spend(layers, 3).tolist() == [0, 1]
