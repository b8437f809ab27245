"""Objectives: what a GPU's time is."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from eplb_opt.objective import OBJECTIVES, Curve, Objective, Piece


@pytest.mark.parametrize(("name", "time"), [("activations", [2.0, 0.0]), ("tokens", [9.0, 0.0])])
def test_time_is_the_named_quantity(name: str, time: list[float]) -> None:
    """Activations count replicas, tokens count tokens; both as floats."""
    found = Objective.preset(name).time(np.array([[[4, 5, 0], [0, 0, 0]]]))
    assert found.dtype == np.float64
    assert found.tolist() == [time]


def test_huge_counts_stay_exact() -> None:
    """The tokens of 4,096 experts with the most tokens each fit a float without rounding."""
    most = np.full((1, 4096), 2**39 - 1)
    assert int(Objective.preset("tokens").time(most)[0]) == int(most.sum())


def test_an_unknown_name_lists_the_known() -> None:
    """A misspelt objective is an error that names the presets."""
    with pytest.raises(ValueError, match=r"unknown objective 'token'; known: activations, tokens"):
        Objective.preset("token")


def test_of_takes_names_and_objectives() -> None:
    """A name gives the preset, an objective itself."""
    tokens = Objective.preset("tokens")
    assert Objective.of(tokens) is tokens
    assert Objective.of("tokens") is tokens
    with pytest.raises(ValueError, match="unknown objective"):
        Objective.of("latency")


def test_objectives_are_values() -> None:
    """Equal by value, hashable, picklable, frozen."""
    tokens = Objective.preset("tokens")
    assert tokens == pickle.loads(pickle.dumps(tokens))
    assert len({*OBJECTIVES.values(), *OBJECTIVES.values()}) == len(OBJECTIVES)
    with pytest.raises(AttributeError):
        tokens.name = "activations"  # type: ignore[misc]


def test_the_time_is_the_largest_piece_times_the_slowness() -> None:
    """Two pieces, a tile of 4, one GPU twice as slow: worked by hand."""
    objective = Objective(
        pieces=(Piece(offset=1, activation=2, tile=3), Piece(token=1.5)),
        tile_tokens=4,
        slowness=(1.0, 2.0),
    )
    tokens = np.array([[5, 1, 0], [20, 0, 0]])
    assert objective.time(tokens).tolist() == [1 + 2 * 2 + 3 * 3, 2 * 30]


def test_a_curve_is_summed_over_replicas() -> None:
    """Flat below the first count, linear between counts, on as before above the last."""
    objective = Objective(pieces=(Curve((10, 20, 30), (1.0, 2.0, 4.0)),))
    assert objective.time(np.array([[1, 15, 40], [0, 0, 30]])).tolist() == [1 + 1.5 + 6, 4]
