"""The values that a makespan can take: none is skipped, and the arithmetic is the objective's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eplb_opt.objective import Curve, Objective, Piece
from eplb_opt.routers.values import Range, exact_grain, next_value

WITHIN = Range(activated=3, tokens=14)


def attainable(objective: Objective) -> set[float]:
    """Return every makespan of GPUs with up to 3 replicas and 14 tokens."""
    counts = np.stack(np.meshgrid(*[np.arange(15)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    counts = counts[counts.sum(axis=1) <= 14]
    slowness = sorted(set(objective.slowness or (1.0,)))
    alone = Objective(pieces=objective.pieces, tile_tokens=objective.tile_tokens)
    time = alone.time(counts[:, None, :])
    # Less than the slowest GPU's idle time is no makespan.
    return {v for s in slowness for t in np.unique(time) if (v := float(s * t)) >= objective.idle}


PIECES = [
    (Piece(activation=15), Piece(token=0.1)),
    (Piece(offset=1.3, activation=0.7, token=0.09),),
    (Piece(activation=0.7, tile=1.1),),
    (Piece(tile=0.3, token=0.07),),
    (Piece(offset=2, activation=0.7, tile=0.3, token=0.07), Piece(offset=4.9)),
    (Piece(tile=2), Piece(activation=3, tile=0.1)),
    (Piece(activation=3),),
]


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("slowness", [None, (1.0, 1.1, 3.0)])
def test_no_value_is_skipped(pieces: tuple[Piece, ...], slowness: tuple[float, ...] | None) -> None:
    """From just below a value that occurs the next is at most that, from the value it is that."""
    objective = Objective(pieces=pieces, slowness=slowness, tile_tokens=4)
    values = attainable(objective)
    for value in values:
        assert next_value(objective, WITHIN, value) == value
        below = next_value(objective, WITHIN, math.nextafter(value, 0))
        assert value * (1 - 1e-15) <= below <= value
        assert next_value(objective, WITHIN, value * 0.9) <= min(
            v for v in values if v >= value * 0.9
        )


def test_values_of_one_count() -> None:
    """What counts one thing takes its multiples, however many tokens there are."""
    many = Range(activated=1000, tokens=2**51)
    tokens, activations = Objective.preset("tokens"), Objective.preset("activations")
    assert next_value(tokens, many, 2.0**50 - 0.3) == 2**50
    assert next_value(activations, many, 6.000001) == 7
    assert next_value(activations, many, -math.inf) == 0
    assert next_value(Objective(pieces=(Piece(offset=3, token=2),)), many, 0) == 3


def test_too_many_values_to_try() -> None:
    """Where every combination would have to be tried, the bound stays as it is."""
    objective = Objective(pieces=(Piece(activation=1.1, tile=0.3, token=0.7),))
    assert next_value(objective, Range(1000, 2**40), 12345.678) == 12345.678


def test_above_all_values() -> None:
    """A bound that no makespan reaches stays what it is."""
    assert next_value(Objective.preset("activations"), Range(5, 9), 5.5) == 5.5


def test_values_of_curves() -> None:
    """A curve whose sums doubles hold takes multiples of 2**-20; of others nothing is known."""
    exact = Curve((1, 2, 6), (0.5, 0.75, 1.75))
    assert exact_grain(exact, np.array([1.0, 1.5]), WITHIN) == 2**-20
    assert next_value(Objective(pieces=(exact,)), WITHIN, 1.7499999) == 1.75
    thirds = Curve((1, 4), (0.0, 0.1))
    assert exact_grain(thirds, np.ones(1), WITHIN) is None
    assert next_value(Objective(pieces=(thirds,)), WITHIN, 0.0123) == 0.0123
    beside = Objective(pieces=(exact, Piece(activation=2)))
    assert next_value(beside, WITHIN, 1.99999999) == 2
    assert exact_grain(exact, np.ones(1), Range(8, 2**51)) is None
