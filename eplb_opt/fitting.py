"""From measured times of a GPU to an objective: alternating max-affine regression."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt.objective import Objective, Piece

__all__ = ["Fit", "fit_objective"]

_TERMS = ("offset", "activation", "tile", "token")
_ROUNDS = 100  # of reassigning rows in one start; a handful is common, and it may cycle
_ROWS_EACH = 3  # for each coefficient; with fewer a piece mostly repeats their noise
_CONFUSED = 0.99  # correlation of two estimates beyond which only their sum is known

# What to measure where two estimates depend on each other.
_ADVICE = {
    ("offset", "activation"): "GPUs with few activated replicas and GPUs with many",
    ("offset", "tile"): "GPUs with few tiles and GPUs with many",
    ("offset", "token"): "GPUs with few tokens and GPUs with many",
    ("activation", "tile"): "experts of one tile and experts of several",
    ("activation", "token"): "experts with few tokens and experts with many",
    (
        "tile",
        "token",
    ): "experts whose last tile is full and experts whose last tile is nearly empty",
}


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted objective and how well it tells the measured times.

    Attributes
    ----------
    objective
        With the pieces that are the largest in some row.
    rows
        Rows fitted to.
    largest_in
        For each piece asked for, the rows in which it is the largest.
    rms, worst
        Root mean square and largest of ``|fitted / measured - 1|`` over the rows.
    warnings
        Which coefficients the rows do not determine, and what to measure to separate them.
    """

    objective: Objective
    rows: int
    largest_in: tuple[int, ...]
    rms: float
    worst: float
    warnings: tuple[str, ...]


def fit_objective(
    samples: ArrayLike,
    *,
    pieces: Sequence[str],
    tile_tokens: int,
    name: str,
    starts: int,
    seed: int,
) -> Fit:
    """Fit an objective's linear pieces to measured times; called as `Objective.fit`.

    Parameters
    ----------
    samples
        ``[rows, 4]``: a GPU's activated replicas, tiles, tokens, and its measured time, in any unit
        of time. Repeated and averaged rows are welcome.
    pieces
        For each piece the coefficients that it may have, as ``"offset + activation + tile"``; the
        others are 0. By default TEMPO's two, for reading weights and for arithmetic.
    tile_tokens
        Tokens that a tile holds.
    name
        The objective's.
    starts, seed
        Random starts of the search, of which the best fit is kept, and what they are drawn from.

    Returns
    -------
    Fit
        With the least sum of squared relative errors found. Noise in a measured time is usually in
        proportion to it.

    Raises
    ------
    ValueError
        Samples of another shape; a row that holds NaN, infinity or a negative number, takes no
        time, or has counts that contradict each other; fewer rows than coefficients; unknown or
        repeated coefficients; no start.

    Warns
    -----
    UserWarning
        For each of `Fit.warnings`.

    Notes
    -----
    Magnani and Boyd, "Convex piecewise-linear fitting" (Optimization and Engineering 10, 2009):
    each row belongs to the piece that is largest there, each piece is fitted to its rows by least
    squares, and so on until no row changes its piece. That ends at a local optimum, hence several
    starts. Negative coefficients have no meaning, so the least squares are nonnegative ones, solved
    exactly. A round takes O(rows * pieces).

    Two estimates whose correlation is beyond 0.99 cannot be told apart by these rows. TEMPO (arXiv
    2608.13057) met -0.997 between offset and activation: its GPUs activated nearly the same number
    of experts in every row.
    """
    forms = [_as_form(text) for text in pieces]
    counts, time = _as_samples(samples, forms, tile_tokens)
    if starts < 1:
        raise ValueError(f"a fit needs at least one start, not {starts}")
    # Divided by the measured time, a row's fitted time is to be 1.
    rows = np.column_stack([np.ones_like(time), counts]) / time[:, None]
    rng = np.random.default_rng(seed)
    found = (_alternate(rows, forms, _drawn_pieces(rng, counts, len(forms))) for _ in range(starts))
    fitted, _ = min(found, key=lambda pair: pair[1])

    ratio = rows @ fitted.T
    largest = ratio.argmax(axis=1)
    error = np.abs(ratio.max(axis=1) - 1)
    rms, worst = math.sqrt(float((error**2).mean())), float(error.max())
    own = [rows[largest == piece] for piece in range(len(forms))]
    unsure = list(
        chain.from_iterable(
            _doubts(number, form, of_piece)
            for number, (form, of_piece) in enumerate(zip(forms, own, strict=True))
        )
    )
    objective = Objective(
        pieces=tuple(
            Piece(*map(float, coefficients))
            for coefficients, of_piece in zip(fitted, own, strict=True)
            if len(of_piece)
        ),
        name=name,
        tile_tokens=tile_tokens,
        source=f"fitted to {len(rows)} rows, relative error {rms:.2%} RMS, {worst:.2%} at most",
    )
    for message in unsure:
        warnings.warn(message, UserWarning, stacklevel=3)
    return Fit(objective, len(rows), tuple(map(len, own)), rms, worst, tuple(unsure))


def _as_form(text: str) -> list[int]:
    """Return the coefficients that a piece may have, as indices into `_TERMS`."""
    names = [name.strip() for name in text.split("+")]
    for name in names:
        if name not in _TERMS:
            known = " + ".join(_TERMS)
            raise ValueError(f"unknown coefficient {name!r} in the piece {text!r}; known: {known}")
    if len(set(names)) != len(names):
        raise ValueError(f"a coefficient occurs twice in the piece {text!r}")
    return sorted(_TERMS.index(name) for name in names)


def _as_samples(
    samples: ArrayLike, forms: list[list[int]], tile_tokens: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return counts ``[rows, 3]`` and times ``[rows]``, checked."""
    table = np.asarray(samples, np.float64)
    if table.ndim != 2 or table.shape[1] != 4:
        raise ValueError(
            "samples must be rows of (activated replicas, tiles, tokens, time), not an array of "
            f"shape {table.shape}"
        )
    _refuse(table, np.any(~np.isfinite(table), axis=1), "its values must be finite")
    _refuse(table, np.any(table < 0, axis=1), "its values must not be negative")
    activated, tiles, tokens, time = table.T
    _refuse(table, time == 0, "its time must be above 0")
    slack = 1 + 1e-9  # averages of rows are rounded
    _refuse(table, activated > tokens * slack, "each activated replica has a token or more")
    if any(_TERMS.index("tile") in form for form in forms):
        fits = (activated <= tiles * slack) & (tiles <= tokens * slack)
        _refuse(
            table,
            ~fits,
            "its tiles must be as many as its activated replicas or more, and "
            "no more than its tokens",
        )
        _refuse(
            table,
            tokens > tiles * tile_tokens * slack,
            f"its tokens do not fit its tiles of {tile_tokens} tokens each; give tile_tokens "
            "as measured",
        )
    unknowns = sum(map(len, forms))
    if not unknowns <= len(table) or not unknowns:
        raise ValueError(
            f"{len(table)} rows cannot determine {unknowns} coefficients; measure more, or ask for "
            "fewer pieces"
        )
    return table[:, :3], time


def _refuse(table: NDArray[np.float64], wrong: NDArray[Any], rule: str) -> None:
    if wrong.any():
        at = int(wrong.argmax())
        values = ", ".join(f"{value:g}" for value in table[at])
        raise ValueError(f"row {at} of the samples is ({values}): {rule}")


def _drawn_pieces(
    rng: np.random.Generator, counts: NDArray[np.float64], pieces: int
) -> NDArray[np.int64]:
    """Give each row the piece of the nearest of some rows drawn, in the logarithms of counts."""
    place = np.log1p(counts)
    centres = place[rng.choice(len(place), pieces, replace=False)]
    return np.asarray(((place[:, None] - centres) ** 2).sum(axis=-1).argmin(axis=1))


def _alternate(
    rows: NDArray[np.float64], forms: list[list[int]], piece_of: NDArray[np.int64]
) -> tuple[NDArray[np.float64], float]:
    """Alternate from an assignment of rows; return the best coefficients seen and their error."""
    coefficients = np.zeros((len(forms), len(_TERMS)))
    best, least = coefficients, math.inf
    for _ in range(_ROUNDS):
        for piece, form in enumerate(forms):
            own = rows[piece_of == piece][:, form]
            if len(own) >= len(form):  # fewer would be met exactly, noise and all
                coefficients[piece, form] = _nonnegative_least_squares(own)
        ratio = rows @ coefficients.T
        error = float(((ratio.max(axis=1) - 1) ** 2).sum())
        if error < least:
            best, least = coefficients.copy(), error
        before, piece_of = piece_of, ratio.argmax(axis=1)
        if np.array_equal(before, piece_of):
            break
    return best, least


def _nonnegative_least_squares(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the nonnegative coefficients under which the rows come closest to 1.

    The optimum is the plain least squares of the columns that it does not set to 0, and some
    optimum has independent columns there. So the best of all sets of columns whose plain least
    squares is nonnegative is exact, collinear or not; there are 16 at most. Of equally good sets
    the smallest is taken.
    """
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1
    # Rotated to a triangle, the same least squares take as many rows as columns.
    system = np.column_stack([rows / scale, np.ones(len(rows))])
    _, triangle = np.linalg.qr(system)
    columns, target = triangle[:, :-1], triangle[:, -1]
    best, least = np.zeros(len(scale)), float(np.linalg.norm(target))
    for size in range(1, len(scale) + 1):
        for support in map(list, combinations(range(len(scale)), size)):
            solution = np.linalg.lstsq(columns[:, support], target, rcond=None)[0]
            residual = float(np.linalg.norm(columns[:, support] @ solution - target))
            if (solution >= 0).all() and residual < least * (1 - 1e-9):
                best, least = np.zeros(len(scale)), residual
                best[support] = solution
    return np.asarray(best / scale)


def _doubts(number: int, form: list[int], rows: NDArray[np.float64]) -> list[str]:
    """Say what the rows in which a piece is the largest leave open about it."""
    piece = f"pieces[{number}] ({' + '.join(_TERMS[term] for term in form)})"
    if not len(rows):
        return [f"{piece} is the largest in no row and is left out; measure {_where_largest(form)}"]
    few = len(rows) < _ROWS_EACH * len(form)
    doubts = [
        f"{piece} is the largest in {len(rows)} rows only, few for {len(form)} coefficients; "
        f"measure {_where_largest(form)}"
    ]
    correlation = _correlation(rows[:, form])
    return doubts[: int(few)] + [
        f"{piece}: the estimates of {a} and {b} have a correlation of {correlation[i, j]:.3f} and "
        f"cannot be told apart; measure {_ADVICE[a, b]}"
        for (i, a), (j, b) in combinations([(i, _TERMS[term]) for i, term in enumerate(form)], 2)
        if abs(correlation[i, j]) > _CONFUSED
    ]


def _where_largest(form: list[int]) -> str:
    """Say which batches show a piece: those that grow what it counts and the others do not."""
    if _TERMS.index("token") in form:
        return "batches with more tokens per expert"
    return "batches with fewer tokens per expert"


def _correlation(rows: NDArray[np.float64]) -> NDArray[Any]:
    """Return the correlations of least-squares estimates: of the inverse of the Gram matrix."""
    scale = np.linalg.norm(rows, axis=0)
    rows = rows / np.where(scale > 0, scale, 1)
    # The ridge makes the inverse of dependent columns large instead of undefined.
    inverse = np.linalg.inv(rows.T @ rows + 1e-12 * np.eye(rows.shape[1]))
    spread = np.sqrt(np.diag(inverse))
    return np.asarray(inverse / np.outer(spread, spread))
