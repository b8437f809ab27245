"""Objectives: what a GPU's time is."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt.objective import OBJECTIVES, Curve, Objective, Piece
from eplb_opt.testing import objectives

ROOFLINE = Objective(
    pieces=(Piece(offset=20, activation=15), Piece(token=0.1)), name="roofline", source="a profile"
)


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


def test_of_takes_names_files_and_objectives(tmp_path: Path) -> None:
    """A name gives the preset, a path to a .json file what it holds, an objective itself."""
    path = tmp_path / "kernel.json"
    path.write_text(ROOFLINE.to_json())
    assert Objective.of(str(path)) == ROOFLINE
    with pytest.raises(FileNotFoundError):
        Objective.of(str(tmp_path / "absent.json"))
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


def test_between_and_beyond_counts_a_curve_is_linear() -> None:
    """Exact at measured counts, never falling, from one token on."""
    curve = Curve((2, 5, 6), (1.0, 4.0, 4.5))
    found = curve.replica_time(np.arange(10))
    assert found.tolist() == [0, 1, 1, 2, 3, 4, 4.5, 5, 5.5, 6]


def in_plain_floats(objective: Objective, slots: list[int], gpu: int) -> float:
    """Price one GPU by loops in the order that is promised to the last bit."""
    activated = sum(x > 0 for x in slots)
    tiles = sum(-(-x // objective.tile_tokens) for x in slots)
    times = []
    for piece in objective.pieces:
        if isinstance(piece, Piece):
            time = piece.offset + piece.activation * activated
            times.append((time + piece.tile * tiles) + piece.token * sum(slots))
            continue
        total = 0.0
        for x in slots:
            total += float(piece.replica_time(np.array(x)))
        times.append(total)
    return (objective.slowness or (1.0,) * (gpu + 1))[gpu] * max(times)


@given(st.data(), st.integers(1, 3), st.integers(1, 12))
def test_times_are_those_of_plain_floats_to_the_bit(
    data: st.DataObject, gpus: int, slots: int
) -> None:
    """The order of additions is part of the definition: other programs repeat it."""
    objective = data.draw(objectives(num_gpus=gpus))
    count = st.integers(0, 9) | st.integers(0, 2**39 - 1)
    values = data.draw(st.lists(count, min_size=gpus * slots, max_size=gpus * slots))
    tokens = np.array(values, np.int64).reshape(gpus, slots)
    expected = [in_plain_floats(objective, row, gpu) for gpu, row in enumerate(tokens.tolist())]
    assert objective.time(tokens).tolist() == expected


@given(st.data(), st.integers(1, 3))
def test_idle_is_the_time_without_tokens(data: st.DataObject, gpus: int) -> None:
    """Offsets, on the slowest GPU."""
    objective = data.draw(objectives(num_gpus=gpus))
    assert objective.idle == objective.time(np.zeros((gpus, 2), np.int64)).max()


@given(objectives(num_gpus=2), st.data())
def test_one_more_token_never_takes_less_time(objective: Objective, data: st.DataObject) -> None:
    """As evaluated, rounding included: what bounds rely on."""
    tokens = data.draw(st.lists(st.integers(0, 40), min_size=4, max_size=4))
    more = np.array(tokens)
    more[data.draw(st.integers(0, 3))] += data.draw(st.integers(1, 3))
    before = objective.time(np.array(tokens).reshape(2, 2))
    assert (objective.time(more.reshape(2, 2)) >= before).all()


@given(objectives(), st.lists(st.integers(0, 60), min_size=1, max_size=5))
def test_the_floor_of_a_curve_is_below_it(objective: Objective, tokens: list[int]) -> None:
    """Whatever a GPU is given, no linear piece of the floor takes more than the curve."""
    routed = np.array(tokens)
    activated, total = float((routed > 0).sum()), float(routed.sum())
    for curve in objective.curves:
        for piece in curve.floor():
            assert piece.time(activated, 0.0, total) <= curve.time(routed)


@given(objectives())
def test_the_floor_of_a_curve_touches_it(objective: Objective) -> None:
    """One token is as dear as measured; no line could be higher where time per token is least."""
    for curve in objective.curves:
        floor = curve.floor()
        assert max(p.activation + p.token for p in floor) == pytest.approx(curve.times[0], rel=1e-9)
        per_token = [t / n for n, t in zip(curve.tokens, curve.times, strict=True)]
        rise = (curve.times[-1] - curve.times[-2]) / (curve.tokens[-1] - curve.tokens[-2])
        steepest = max(p.token for p in floor)
        assert steepest == pytest.approx(min(*per_token, rise), rel=1e-9, abs=1e-12)


def test_a_convex_curve_is_its_own_floor() -> None:
    """With a rising time per further token, the lines are those between the measured counts."""
    floor = Curve((1, 11, 21), (5.0, 6.0, 8.0)).floor()
    lines = [(round(p.activation, 9), round(p.token, 9)) for p in floor]
    assert lines == [(4.9, 0.1), (3.8, 0.2)]


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("activations", math.inf),
        ("tokens", 0),
        ("deepseek-v3-fp8", 156),
        ("deepseek-v3-bf16", 331),
        ("deepseek-v2-lite-fp8", 167),
        ("qwen3-30b-fp8", 161),
        ("deepseek-v3-tiles", math.inf),
    ],
)
def test_tokens_at_which_arithmetic_takes_over(name: str, tokens: float) -> None:
    """The presets' n*, as TEMPO prints them (168 for DeepSeek-V2-Lite, from unrounded times)."""
    assert Objective.preset(name).break_even == pytest.approx(tokens, abs=0.5)


def test_presets_say_where_they_come_from() -> None:
    """Every preset is found under its name and gives a source."""
    assert all(name == objective.name for name, objective in OBJECTIVES.items())
    assert all(objective.source for objective in OBJECTIVES.values())


def test_activations_and_tokens_are_recognised() -> None:
    """By what is counted, not by name: whole experts and slow GPUs are other problems."""
    activations, tokens = (Piece(activation=1),), (Piece(token=1),)
    assert Objective(pieces=activations, name="mine").counts_activations
    assert Objective(pieces=activations, split=False).counts_activations
    assert not Objective(pieces=activations, slowness=(1.0, 2.0)).counts_activations
    assert not Objective(pieces=(Piece(activation=2),)).counts_activations
    assert Objective(pieces=tokens).counts_tokens
    assert not Objective(pieces=tokens, split=False).counts_tokens
    assert not Objective(pieces=(*tokens, *activations)).counts_tokens


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf, 1e101])
def test_times_that_are_none_are_refused(value: float) -> None:
    """In every coefficient, curve and slowness, by name."""
    for name in ("offset", "activation", "tile", "token"):
        with pytest.raises(ValueError, match=f"a piece's {name} must be a number from 0 to"):
            Piece(**{name: value})
    with pytest.raises(ValueError, match="a curve's time must be"):
        Curve((1, 2), (0.0, value))
    with pytest.raises(ValueError, match="the slowness of GPU 1 must be"):
        Objective(pieces=(Piece(token=1),), slowness=(1.0, value))


def test_the_largest_times_do_not_overflow() -> None:
    """With every factor at its limit a time is still finite."""
    objective = Objective(
        pieces=(Piece(offset=1e100, activation=1e100, tile=1e100, token=1e100),), slowness=(1e100,)
    )
    assert np.isfinite(objective.time(np.full((1, 4096), 2**39 - 1))).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pieces": ()}, "at least one piece"),
        ({"pieces": (Piece(), Piece(offset=3))}, "no piece of the objective grows"),
        ({"pieces": (Curve((1, 2), (0, 0)),)}, "no piece of the objective grows"),
        ({"pieces": (Piece(token=1), 0.5)}, r"pieces\[1\] is neither a Piece nor a Curve"),
        ({"tile_tokens": 0}, "tile_tokens must be from 1"),
        ({"tile_tokens": math.nan}, "tile_tokens must be an integer, not nan"),
        ({"tile_tokens": 64.5}, "tile_tokens must be an integer, not 64"),
        ({"tile_tokens": 2**40}, "tile_tokens must be from 1"),
        ({"slowness": (1.0, 0.0)}, "the slowness of GPU 1 is 0; it must be above 0"),
    ],
)
def test_objectives_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str) -> None:
    """Nothing to minimise, tiles without tokens, GPUs that take no time."""
    with pytest.raises(ValueError, match=message):
        Objective(**{"pieces": (Piece(token=1),), **wrong})


@pytest.mark.parametrize(
    ("tokens", "times", "message"),
    [
        ((1,), (1.0,), "two rows or more"),
        ((1, 2), (1.0,), "2 token counts and 1 times"),
        ((0, 2), (1.0, 2.0), "token count must be from 1"),
        ((1, 1), (1.0, 2.0), "must rise, and row 1 has 1 after 1"),
        ((1, 2.5), (1.0, 2.0), "token count must be an integer, not 2"),
        ((1, math.nan), (1.0, 2.0), "token count must be an integer, not nan"),
        ((1, 2, 3), (1.0, 2.0, 1.5), "must not fall, and row 2 has 1.5 after 2.0"),
    ],
)
def test_curves_that_are_none_are_refused(
    tokens: tuple[Any, ...], times: tuple[float, ...], message: str
) -> None:
    """Too few rows, counts that do not rise, times that fall."""
    with pytest.raises(ValueError, match=message):
        Curve(tokens, times)


def test_the_slowness_must_be_of_the_gpus_given() -> None:
    """A vector of another length is an error, not a broadcast."""
    slow = Objective(pieces=(Piece(token=1),), slowness=(1.0,))
    with pytest.raises(ValueError, match="slowness of 1 GPUs; the placement has 2"):
        slow.time(np.ones((2, 1), np.int64))


@given(objectives(num_gpus=3))
def test_json_keeps_objectives_to_the_bit(objective: Objective) -> None:
    """Every kind: curves, slowness, whole experts."""
    assert Objective.from_json(objective.to_json()) == objective


@given(st.floats(0, 1e100), st.floats(0, 1e100, exclude_min=True), st.text())
def test_json_keeps_every_float_and_name(offset: float, token: float, name: str) -> None:
    """The shortest text of a double gives the same double; names are any text."""
    objective = Objective(pieces=(Piece(offset=offset, token=token),), name=name, source=name)
    assert Objective.from_json(objective.to_json()) == objective


def test_numbers_of_numpy_are_written() -> None:
    """Objectives built from arrays hold plain numbers."""
    half: Any = np.float32(0.5)
    counts: Any = np.array([1, 2])
    options: dict[str, Any] = {
        "tile_tokens": np.int64(64),
        "slowness": np.array([1.0, 2.0]),
        "split": np.False_,
    }
    objective = Objective(pieces=(Piece(token=half), Curve(counts, counts / 2)), **options)
    assert Objective.from_json(objective.to_json()) == objective
