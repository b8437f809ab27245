"""Fits: known objectives are found again, and what the rows do not determine is said."""

from __future__ import annotations

import math
import warnings
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb_opt.fitting import Fit
from eplb_opt.objective import Objective, Piece

TEMPO = Objective(pieces=(Piece(offset=37.1, activation=5.67, tile=2.65), Piece(25, token=0.1)))


def measured(
    objective: Objective,
    *,
    rows: int = 200,
    noise: float = 0.01,
    most_activated: int = 32,
    most_tokens: int = 1500,
    seed: int = 1,
) -> NDArray[np.float64]:
    """Draw batches of few and many tokens per expert, and their times with noise in proportion."""
    rng = np.random.default_rng(seed)
    mean = np.exp(rng.uniform(0, math.log(most_tokens), (rows, 1)))
    tokens = 1 + rng.gamma(1.5, mean / 1.5, (rows, most_activated)).astype(np.int64)
    tokens *= np.arange(most_activated) < rng.integers(1, most_activated + 1, (rows, 1))
    tiles = -(-tokens // objective.tile_tokens)
    time = objective.time(tokens[:, None, :])[:, 0] * np.exp(rng.normal(0, noise, rows))
    return np.column_stack([(tokens > 0).sum(axis=1), tiles.sum(axis=1), tokens.sum(axis=1), time])


def quiet_fit(samples: Any, **options: Any) -> Fit:
    """Fit, with the warnings left to the field."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Objective.fit(samples, **options)


@pytest.mark.parametrize(
    "name", ["deepseek-v3-fp8", "deepseek-v3-bf16", "deepseek-v2-lite-fp8", "qwen3-30b-fp8"]
)
def test_presets_are_found_again(name: str) -> None:
    """From 200 rows with 2 % of noise: reading weights, arithmetic and n* to a few per cent."""
    preset = Objective.preset(name)
    fit = quiet_fit(measured(preset, noise=0.02), starts=8)
    memory, arithmetic = fit.objective.linear
    reading, token = preset.linear[0].activation, preset.linear[1].token
    assert memory.activation + memory.tile == pytest.approx(reading, rel=0.03)
    assert memory.offset < reading
    assert arithmetic.token == pytest.approx(token, rel=0.02)
    assert fit.objective.break_even == pytest.approx(preset.break_even, rel=0.04)
    assert fit.rms == pytest.approx(0.02, rel=0.2)
    assert fit.rows == sum(fit.largest_in) == 200


def test_offsets_and_tiles_are_found_again() -> None:
    """TEMPO's second testbed with its communication: five coefficients from 1 % of noise."""
    fit = quiet_fit(measured(TEMPO, rows=400))
    for found, true in zip(fit.objective.linear, TEMPO.linear, strict=True):
        assert found.offset == pytest.approx(true.offset, rel=0.05)
        assert found.activation == pytest.approx(true.activation, rel=0.1)
        assert found.tile == pytest.approx(true.tile, rel=0.2)
        assert found.token == pytest.approx(true.token, rel=0.02)


def test_without_noise_the_fit_is_exact() -> None:
    """To rounding: times, and every coefficient."""
    fit = quiet_fit(measured(TEMPO, noise=0))
    assert fit.worst < 1e-9
    for found, true in zip(fit.objective.linear, TEMPO.linear, strict=True):
        for name in ("offset", "activation", "tile", "token"):
            assert getattr(found, name) == pytest.approx(getattr(true, name), abs=1e-6)


def test_the_form_of_the_pieces_can_be_said() -> None:
    """One piece that adds reading and arithmetic, tiles of 64, a name of one's own."""
    added = Objective(pieces=(Piece(offset=5, activation=3, token=0.2),), tile_tokens=64)
    fit = Objective.fit(
        measured(added, noise=0),
        pieces=["offset+activation + token"],
        tile_tokens=64,
        name="added",
    )
    (piece,) = fit.objective.linear
    assert (piece.offset, piece.activation, piece.tile, piece.token) == pytest.approx(
        (5, 3, 0, 0.2)
    )
    assert (fit.objective.name, fit.objective.tile_tokens) == ("added", 64)
    assert fit.objective.source.startswith("fitted to 200 rows")
    assert not fit.warnings


def test_three_pieces() -> None:
    """TEMPO's third piece, communication, where its time per token is largest at last."""
    three = Objective(
        pieces=(Piece(offset=37, activation=8), Piece(200, token=0.03), Piece(token=0.06))
    )
    fit = quiet_fit(
        measured(three, noise=0, rows=300),
        pieces=["offset + activation", "offset + token", "offset + token"],
    )
    assert fit.worst < 1e-9
    assert min(fit.largest_in) > 10


def test_the_same_samples_give_the_same_fit() -> None:
    """Starts are seeded, and the samples are not written to."""
    samples = measured(TEMPO)
    samples.flags.writeable = False
    first, second = quiet_fit(samples, starts=3, seed=5), quiet_fit(samples, starts=3, seed=5)
    assert first == second


def test_the_unit_of_time_does_not_matter() -> None:
    """Seconds for microseconds: the same fit, a millionth of each coefficient."""
    samples = measured(TEMPO)
    in_seconds = quiet_fit(samples * [1, 1, 1, 1e-6], starts=3)
    for small, large in zip(
        in_seconds.objective.linear, quiet_fit(samples, starts=3).objective.linear, strict=True
    ):
        assert small.token * 1e6 == pytest.approx(large.token)
        assert small.activation * 1e6 == pytest.approx(large.activation)


def test_no_nonnegative_coefficients_come_closer() -> None:
    """The least squares of one piece beat every point of a grid around them."""
    rng = np.random.default_rng(3)
    samples = measured(TEMPO, rows=30, noise=0.3)
    (piece,) = quiet_fit(samples, pieces=["offset + activation + token"], starts=1).objective.linear
    columns = np.column_stack([np.ones(30), samples[:, [0, 2]]]) / samples[:, 3:]
    found = np.array([piece.offset, piece.activation, piece.token])

    def error(coefficients: NDArray[np.float64]) -> float:
        return float(((columns @ coefficients - 1) ** 2).sum())

    scale = np.maximum(found, 1e-3)
    for step in product((-0.1, 0, 0.1), repeat=3):
        for size in rng.uniform(0.01, 1, 5):
            assert error(found) <= error(np.maximum(0, found + scale * step * size)) + 1e-12


def warned(samples: Any, **options: Any) -> tuple[Fit, str]:
    """Fit and return what it warned of, as warning and as field."""
    with pytest.warns(UserWarning, match="measure") as caught:
        fit = Objective.fit(samples, **options)
    assert [str(warning.message) for warning in caught] == list(fit.warnings)
    assert {warning.filename for warning in caught} == {__file__}
    return fit, "\n".join(fit.warnings)


def test_activated_replicas_that_hardly_vary_are_noticed() -> None:
    """TEMPO's trap: with 28 to 32 activated in every row, offset and activation are one sum."""
    samples = [(a, a, n, 20 + 9 * a + n % 3) for a in range(28, 33) for n in range(100, 600, 50)]
    fit, said = warned(samples, pieces=["offset + activation"])
    assert "pieces[0] (offset + activation): the estimates of offset and activation" in said
    assert "a correlation of -0.99" in said
    assert said.endswith("measure GPUs with few activated replicas and GPUs with many")
    (piece,) = fit.objective.linear
    assert piece.offset + 30 * piece.activation == pytest.approx(291, rel=0.01)


def test_experts_of_one_tile_leave_tiles_open() -> None:
    """At 128 tokens or fewer each expert is one tile: the smaller set of coefficients is taken."""
    samples = measured(TEMPO, most_tokens=8)
    fit, said = warned(samples, pieces=["offset + activation + tile"])
    assert "the estimates of activation and tile have a correlation of -1.000" in said
    assert "measure experts of one tile and experts of several" in said
    (piece,) = fit.objective.linear
    assert piece.tile == 0
    assert piece.activation == pytest.approx(8.32, rel=0.01)


def test_pieces_that_are_never_largest_are_noticed() -> None:
    """Decode batches alone show no arithmetic: its piece is left out, or told to rest on little."""
    # As a constant, which 100 tokens in every row make it, the token piece would help no row.
    samples = [(a, a, 100, 10 * a - (a in (1, 9))) for a in range(1, 10)]
    fit, said = warned(samples, pieces=["activation", "token"])
    assert fit.largest_in == (9, 0)
    (piece,) = fit.objective.linear
    assert piece.activation == pytest.approx(10, rel=0.02)
    assert "pieces[1] (token) is the largest in no row and is left out" in said
    assert "measure batches with more tokens per expert" in said
    few = [*samples, (1, 40, 5000, 350), (1, 50, 6000, 420)]
    fit, said = warned(few, pieces=["activation", "token"])
    assert fit.largest_in == (9, 2)
    assert "pieces[1] (token) is the largest in 2 rows only, few for 1 coefficients" in said


def test_rows_that_determine_all_do_not_warn() -> None:
    """With experts of several tiles among those that reading weights commands, nothing is open."""
    cheap = Objective(pieces=(Piece(offset=37.1, activation=5.67, tile=2.65), Piece(token=0.03)))
    fit = Objective.fit(measured(cheap, rows=400, most_tokens=4000))  # a warning would be an error
    assert fit.warnings == ()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((3, 3, math.nan, 50), r"row 2 of the samples is \(3, 3, nan, 50\): .* finite"),
        ((3, 3, 9, math.inf), "row 2 .* finite"),
        ((3, -3, 9, 50), "row 2 .* must not be negative"),
        ((3, 3, 9, 0), "row 2 .* its time must be above 0"),
        ((10, 10, 9, 50), "row 2 .* each activated replica has a token or more"),
        ((3, 2, 9, 50), "row 2 .* its tiles must be as many as its activated replicas"),
        ((3, 10, 9, 50), "row 2 .* no more than its tokens"),
        ((3, 3, 385, 50), "row 2 .* do not fit its tiles of 128 tokens each; give tile_tokens"),
    ],
)
def test_bad_rows_are_named(row: tuple[float, ...], message: str) -> None:
    """A number that no measurement gives, or counts that contradict each other."""
    samples = [(1, 1, 10, 20), (2, 2, 20, 30), row, *[(4, 4, 40, 50)] * 5]
    with pytest.raises(ValueError, match=message):
        Objective.fit(samples)


def test_tiles_are_only_looked_at_where_a_piece_counts_them() -> None:
    """Whoever has no tiles can leave the column at 0."""
    samples = [(a, 0, 1000 * a, 7 * a) for a in (1, 2, 3)]
    assert quiet_fit(samples, pieces=["activation"]).objective.linear[
        0
    ].activation == pytest.approx(7)


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        ([(1, 1, 1)] * 9, {}, r"rows of \(activated replicas, tiles, tokens, time\), not an array"),
        ([1, 2, 3, 4], {}, r"of shape \(4,\)"),
        (np.zeros((0, 4)), {}, "0 rows cannot determine 5 coefficients"),
        ([(1, 1, 1, 1)] * 4, {}, "4 rows cannot determine 5 coefficients; measure more"),
        ([(1, 1, 1, 1)] * 9, {"pieces": []}, "9 rows cannot determine 0 coefficients"),
        ([(1, 1, 1, 1)] * 9, {"pieces": ["ofset"]}, "unknown coefficient 'ofset' in the piece"),
        ([(1, 1, 1, 1)] * 9, {"pieces": ["tile + tile"]}, "occurs twice in the piece 'tile"),
        ([(1, 1, 1, 1)] * 9, {"starts": 0}, "at least one start, not 0"),
        ([(1, 1, 1, 1)] * 9, {"tile_tokens": 0}, "tile"),
        ([(1, 1, 1, 1)] * 9, {"pieces": ["offset"]}, "no piece of the objective grows"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    samples: Any, options: dict[str, Any], message: str
) -> None:
    """Wrong shapes, too few rows, unknown forms."""
    with pytest.raises(ValueError, match=message):
        Objective.fit(samples, **options)
