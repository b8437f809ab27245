"""Objectives: what a GPU's time is."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from eplb_opt.objective import Objective


@pytest.mark.parametrize(("name", "time"), [("activations", [2.0, 0.0]), ("tokens", [9.0, 0.0])])
def test_time_is_the_named_quantity(name: str, time: list[float]) -> None:
    """Activations count replicas, tokens count tokens; both as floats of the same shape."""
    activated, tokens = np.array([[2, 0]]), np.array([[9, 0]])
    found = Objective(name).time(activated, tokens)
    assert found.dtype == np.float64
    assert found.tolist() == [time]


def test_huge_counts_stay_exact() -> None:
    """The tokens of 4,096 experts with the most tokens each fit a float without rounding."""
    most = np.array([4096 * (2**39 - 1)])
    assert int(Objective("tokens").time(most, most)[0]) == int(most[0])


def test_an_unknown_name_lists_the_known() -> None:
    """A misspelt objective is an error that names the presets."""
    with pytest.raises(ValueError, match=r"unknown objective 'token'; known: activations, tokens"):
        Objective("token")


def test_of_takes_names_and_objectives() -> None:
    """A name gives the preset, an objective itself."""
    tokens = Objective("tokens")
    assert Objective.of(tokens) is tokens
    assert Objective.of("tokens") == tokens
    with pytest.raises(ValueError, match="unknown objective"):
        Objective.of("latency")


def test_objectives_are_values() -> None:
    """Equal by name, hashable, picklable, frozen."""
    assert Objective("tokens") == pickle.loads(pickle.dumps(Objective("tokens")))
    assert len({Objective(name) for name in (*Objective.PRESETS, *Objective.PRESETS)}) == 2
    with pytest.raises(AttributeError):
        Objective("tokens").name = "activations"  # type: ignore[misc]
