"""Objectives in files: what is read, and where an error is said to be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eplb_opt.errors import FormatError
from eplb_opt.formats.objectives import parse_objective, read_objective
from eplb_opt.objective import Curve, Objective, Piece


def test_the_least_that_a_file_can_say(tmp_path: Path) -> None:
    """Only the pieces are required; whole numbers are numbers."""
    path = tmp_path / "objective.json"
    path.write_text('{"pieces": [{"offset": 20, "activation": 15.5}, {"token": 1e-1}]}')
    assert read_objective(path) == Objective(
        pieces=(Piece(offset=20, activation=15.5), Piece(token=0.1))
    )


def test_all_that_a_file_can_say() -> None:
    """A curve, tiles, slow GPUs, whole experts, a name and a source."""
    text = """{"name": "mine", "source": "profile of 3 May", "split": false, "tile_tokens": 64,
        "slowness": [1, 1.5], "pieces": [{"tokens": [1, 128], "times": [3, 5.5]}, {"tile": 2}]}"""
    assert parse_objective(text, "x.json") == Objective(
        pieces=(Curve((1, 128), (3, 5.5)), Piece(tile=2)),
        name="mine",
        source="profile of 3 May",
        split=False,
        tile_tokens=64,
        slowness=(1, 1.5),
    )


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("", "", "not JSON"),
        ('{"pieces": [{"token": 1}]', "", "not JSON"),
        ("[" * 100_000, "", "not JSON"),
        ('{"pieces": [], "pieces": [{"token": 1}]}', "", "a key occurs twice"),
        ("[]", "", "expected an object, not a list"),
        ("{}", "", "the key 'pieces' is missing"),
        ('{"pieces": [{"token": 1}], "tiles": 3}', "", "unknown key 'tiles'; known are pieces"),
        ('{"pieces": {"token": 1}}', "pieces", "expected a list, not an object"),
        ('{"pieces": []}', "", "at least one piece"),
        ('{"pieces": [{"offset": 1}]}', "", "no piece of the objective grows"),
        ('{"pieces": [7]}', "pieces[0]", "expected an object, not an integer"),
        ('{"pieces": [{}, {"tokn": 1}]}', "pieces[1]", "unknown key 'tokn'; known are offset"),
        ('{"pieces": [{}, {"token": "1"}]}', "pieces[1].token", "expected a number, not a string"),
        ('{"pieces": [{}, {"token": true}]}', "pieces[1].token", "not true or false"),
        ('{"pieces": [{}, {"token": null}]}', "pieces[1].token", "not null"),
        ('{"pieces": [{}, {"token": NaN}]}', "pieces[1].token", "a finite number from 0, not nan"),
        ('{"pieces": [{}, {"token": -0.5}]}', "pieces[1].token", "from 0, not -0.5"),
        ('{"pieces": [{"tile": Infinity}]}', "pieces[0].tile", "finite"),
        ('{"pieces": [{"tile": 1e400}]}', "pieces[0].tile", "finite"),
        ('{"pieces": [{"tile": 1%s}]}' % ("0" * 400), "pieces[0]", "a piece's tile must be"),
        ('{"pieces": [{"tokens": [1, 2]}]}', "pieces[0]", "the key 'times' is missing"),
        ('{"pieces": [{"tokens": 1, "times": []}]}', "pieces[0].tokens", "expected a list"),
        (
            '{"pieces": [{"tokens": [1, 2.0], "times": [1, 2]}]}',
            "pieces[0].tokens[1]",
            "expected an integer, not a number",
        ),
        (
            '{"pieces": [{"tokens": [1, 2], "times": [1, NaN]}]}',
            "pieces[0].times[1]",
            "not nan",
        ),
        (
            '{"pieces": [{"tokens": [1, 2], "times": [2, 1]}]}',
            "pieces[0]",
            "times must not fall, and row 1",
        ),
        ('{"pieces": [{"token": 1}], "slowness": [1, -2]}', "slowness[1]", "from 0, not -2"),
        ('{"pieces": [{"token": 1}], "slowness": [1, 0]}', "", "slowness of GPU 1 is 0"),
        ('{"pieces": [{"token": 1}], "slowness": 2}', "slowness", "expected a list"),
        ('{"pieces": [{"token": 1}], "split": 1}', "split", "expected true or false"),
        ('{"pieces": [{"token": 1}], "name": 1}', "name", "expected a string, not an integer"),
        ('{"pieces": [{"token": 1}], "tile_tokens": 1.5}', "tile_tokens", "expected an integer"),
        ('{"pieces": [{"token": 1}], "tile_tokens": 0}', "", "tile_tokens must be from 1"),
    ],
)
def test_errors_name_the_place(text: str, place: str, problem: str) -> None:
    """What is not an objective is a `FormatError` with file, place and what was expected."""
    with pytest.raises(FormatError) as caught:
        parse_objective(text, "objective.json")
    assert caught.value.path == "objective.json"
    assert caught.value.place == place
    assert problem in caught.value.problem


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files_are_format_errors(
    tmp_path: Path, damage: Callable[[st.DataObject, bytes], bytes], data: st.DataObject
) -> None:
    """Changed bytes give another objective or our error, nothing else."""
    curve = Curve((1, 128), (3, 5.5))
    intact = Objective(pieces=(curve, Piece(token=0.1)), slowness=(1, 2)).to_json().encode()
    path = tmp_path / "damaged.json"
    path.write_bytes(damage(data, intact))
    with contextlib.suppress(FormatError):
        assert isinstance(read_objective(path), Objective)
