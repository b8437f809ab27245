"""What a GPU's time is taken to be: the quantity whose maximum over GPUs a routing minimises."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt import _core

if TYPE_CHECKING:
    from eplb_opt.fitting import Fit

__all__ = ["OBJECTIVES", "Curve", "Objective", "Piece"]

# No sum or product of times and counts overflows: at most 2**51 tokens, and slowness.
_LONGEST = 1e100
_MOST_TOKENS = _core.MAX_TOKENS_PER_EXPERT


@dataclass(frozen=True, slots=True)
class Piece:
    """A linear time: ``offset + activation * A + tile * T + token * N``.

    A counts a GPU's activated replicas, N its tokens, and T its tiles, ``ceil(x / tile_tokens)`` of
    a replica with x tokens.

    Parameters
    ----------
    offset
        Time of a GPU without tokens.
    activation, tile, token
        Time of one activated replica, tile, token.

    Raises
    ------
    ValueError
        A coefficient that is not a number from 0 to 1e100.
    """

    offset: float = 0.0
    activation: float = 0.0
    tile: float = 0.0
    token: float = 0.0

    def __post_init__(self) -> None:
        for name in ("offset", "activation", "tile", "token"):
            value = _as_time(getattr(self, name), f"a piece's {name}")
            object.__setattr__(self, name, value)

    @property
    def grows(self) -> bool:
        """Whether the time depends on what a GPU is given."""
        return max(self.activation, self.tile, self.token) > 0

    def time(
        self,
        activated: NDArray[np.float64] | float,
        tiles: NDArray[np.float64] | float,
        tokens: NDArray[np.float64] | float,
    ) -> NDArray[np.float64] | float:
        """Return the time of GPUs with these counts, in their common shape."""
        # In this order, so that another program can repeat it to the bit, and each step of it never
        # falls as a count rises, however it is rounded.
        return (
            (self.offset + self.activation * activated) + self.tile * tiles
        ) + self.token * tokens


@dataclass(frozen=True, slots=True)
class Curve:
    """A measured time of one expert over its tokens, summed over the GPU's replicas.

    What a grouped matrix product's profile gives, steps and all. Between two measured counts the
    time is linear, below the first it is that of the first, above the last it goes on as between
    the last two: end a profile with a rise, not within a step, where further tokens would seem to
    be free. A replica without tokens takes no time.

    Parameters
    ----------
    tokens
        Token counts, rising from 1 or more.
    times
        Time of one expert with so many tokens; never falling.

    Raises
    ------
    ValueError
        Fewer than two rows, counts that are not integers or do not rise, times that fall or are not
        numbers from 0 to 1e100.

    Examples
    --------
    >>> Curve((1, 128, 129), (10.0, 10.0, 20.0)).time(np.array([[0, 64, 129, 130]]))
    array([60.])
    """

    tokens: tuple[int, ...]
    times: tuple[float, ...]

    def __post_init__(self) -> None:
        tokens = tuple(_as_count(n, "a curve's token count") for n in self.tokens)
        times = tuple(_as_time(t, "a curve's time") for t in self.times)
        if len(tokens) != len(times) or len(tokens) < 2:
            raise ValueError(
                f"a curve needs two rows or more of tokens and times, not {len(tokens)} token "
                f"counts and {len(times)} times"
            )
        for row, (a, b) in enumerate(pairwise(tokens), 1):
            if b <= a:
                raise ValueError(
                    f"a curve's token counts must rise, and row {row} has {b} after {a}"
                )
        for row, (earlier, later) in enumerate(pairwise(times), 1):
            if later < earlier:
                raise ValueError(
                    f"a curve's times must not fall, and row {row} has {later} after {earlier}; "
                    "np.maximum.accumulate smooths a noisy profile"
                )
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "times", times)

    @property
    def grows(self) -> bool:
        """Whether the time depends on what a GPU is given."""
        return self.times[-1] > 0

    def replica_time(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the time of replicas with these tokens, in the same shape."""
        counts = np.array(self.tokens, np.float64)
        times = np.array(self.times)
        slopes = np.diff(times) / np.diff(counts)
        row = np.searchsorted(counts, tokens, side="right") - 1
        row = np.clip(row, 0, len(slopes) - 1)
        above = np.maximum(tokens - counts[row], 0.0)
        return np.where(tokens > 0, times[row] + slopes[row] * above, 0.0)

    def time(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the time of GPUs, from tokens ``[..., slots]``."""
        # Added slot by slot, not pairwise, so that another program can repeat it to the bit.
        return np.asarray(np.add.accumulate(self.replica_time(tokens), axis=-1)[..., -1])

    def floor(self) -> tuple[Piece, ...]:
        """Return linear pieces whose time is never above the curve's, whatever a GPU is given.

        Each is a line ``activation + token * n`` at or below the curve for every n of 1 or more.
        Summed over A replicas with N tokens in all it gives ``activation * A + token * N``, which
        therefore is at most the curve's time. Of these lines, with both coefficients at least 0,
        the pieces are those that are highest somewhere: the edges of the curve's lower convex hull,
        up to where time per token is least.

        Notes
        -----
        The lines are exact rationals until they are rounded once, downwards by a factor of 1 -
        2**-36, which is more than `time` loses to rounding on a GPU of up to 2**16 slots.

        Examples
        --------
        A staircase: reading the weights costs 10, and no token costs less than 20 / 256.

        >>> steps = Curve((1, 128, 129, 256, 257), (10.0, 10.0, 20.0, 20.0, 30.0))
        >>> [(round(p.activation, 6), round(p.token, 6)) for p in steps.floor()]
        [(10.0, 0.0), (0.0, 0.078125)]
        """
        points = [(Fraction(n), Fraction(t)) for n, t in zip(self.tokens, self.times, strict=True)]
        (n1, t1), (n2, t2) = points[-2:]
        # A steeper line cuts the curve far out, or has a negative coefficient.
        steepest = min((t2 - t1) / (n2 - n1), *(t / n for n, t in points))
        lines = []
        at, height = Fraction(1), points[0][1]
        while right := [(n, t) for n, t in points if n > at]:
            slope = min((t - height) / (n - at) for n, t in right)
            if slope >= steepest:
                break
            lines.append((height - slope * at, slope))
            at, height = max((n, t) for n, t in right if t - height == slope * (n - at))
        lines.append((min(t - steepest * n for n, t in points), steepest))
        shrink = 1 - Fraction(1, 2**36)
        return tuple(Piece(activation=float(a * shrink), token=float(b * shrink)) for a, b in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A GPU's time from what it is given; a routing minimises its maximum over GPUs.

    ``time[g] = slowness[g] * max over pieces of the piece's time``. With one piece that counts
    activated replicas it is METRO's objective (arXiv 2512.09277), with one that counts tokens that
    of DeepSeek EPLB and LPLB, and with both, measured, TEMPO's (arXiv 2608.13057): a decode kernel
    reads the weights of each activated replica, which takes longer than the arithmetic of few
    tokens and less long than that of many.

    Parameters
    ----------
    pieces
        One or more of `Piece` and `Curve`.
    name
        For tables and messages.
    tile_tokens
        Tokens that a tile of the matrix product holds.
    slowness
        Time of each GPU relative to a nominal one; None: all 1.
    split
        Whether an expert's tokens may be split over its replicas. Without, the problem is the
        restricted makespan with weights, NP-hard for tokens too.
    source
        Where the coefficients come from.

    Raises
    ------
    ValueError
        No piece, or none that grows; a slowness that is not above 0 and at most 1e100; a tile that
        does not hold a whole number of tokens, 1 or more.

    Examples
    --------
    >>> objective = Objective(pieces=(Piece(activation=15), Piece(token=0.1)))
    >>> objective.time(np.array([[100, 0], [100, 100], [0, 1000]]))
    array([ 15.,  30., 100.])
    >>> objective.break_even
    150.0
    """

    pieces: tuple[Piece | Curve, ...]
    name: str = "makespan"
    tile_tokens: int = 128
    slowness: tuple[float, ...] | None = None
    split: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        pieces = tuple(self.pieces)
        for at, piece in enumerate(pieces):
            if not isinstance(piece, Piece | Curve):
                raise ValueError(f"pieces[{at}] is neither a Piece nor a Curve, but {piece!r}")
        if not pieces:
            raise ValueError("an objective needs at least one piece")
        if sum(isinstance(piece, Curve) for piece in pieces) > 1:
            raise ValueError("an objective takes at most one curve: the time of its expert kernel")
        if not any(piece.grows for piece in pieces):
            raise ValueError("no piece of the objective grows: every routing would be as good")
        object.__setattr__(self, "pieces", pieces)
        object.__setattr__(self, "split", bool(self.split))
        object.__setattr__(self, "tile_tokens", _as_count(self.tile_tokens, "tile_tokens"))
        if self.slowness is None:
            return
        slowness = tuple(
            _as_time(value, f"the slowness of GPU {gpu}") for gpu, value in enumerate(self.slowness)
        )
        if 0 in slowness:
            raise ValueError(
                f"the slowness of GPU {slowness.index(0)} is 0; it must be above 0. A dead GPU is "
                "one whose slots are all empty"
            )
        object.__setattr__(self, "slowness", slowness)

    @classmethod
    def preset(cls, name: str) -> Objective:
        """Return an objective by name.

        Raises
        ------
        ValueError
            If no preset has the name; the message lists them.
        """
        try:
            return OBJECTIVES[name]
        except KeyError:
            known = ", ".join(OBJECTIVES)
            raise ValueError(f"unknown objective {name!r}; known: {known}") from None

    @classmethod
    def of(cls, objective: Objective | str) -> Objective:
        """Return `objective` itself, the preset of that name, or what the .json file holds.

        Raises
        ------
        ValueError
            If no preset has the name.
        FormatError, OSError
            As `eplb_opt.formats.objectives.read_objective`.
        """
        if isinstance(objective, Objective):
            return objective
        if objective.lower().endswith(".json"):
            from eplb_opt.formats.objectives import read_objective

            return read_objective(objective)
        return cls.preset(objective)

    @classmethod
    def fit(
        cls,
        samples: ArrayLike,
        *,
        pieces: Sequence[str] = ("offset + activation + tile", "offset + token"),
        tile_tokens: int = 128,
        name: str = "fitted",
        starts: int = 16,
        seed: int = 0,
    ) -> Fit:
        """Fit pieces to measured times; see `eplb_opt.fitting.fit_objective`.

        Examples
        --------
        Four to sixteen experts, of so many tokens each, on a GPU that takes 20 to start, 9 to read
        an expert's weights and 0.1 to multiply a token:

        >>> rows = [
        ...     (a, a * -(-n // 128), a * n, max(20 + 9 * a, 0.1 * a * n))
        ...     for a in (4, 8, 16)
        ...     for n in (1, 32, 64, 129, 256, 500)
        ... ]
        >>> fit = Objective.fit(rows)
        >>> fit.rows, round(fit.objective.break_even), fit.rms < 1e-9
        (18, 90, True)
        """
        from eplb_opt.fitting import fit_objective

        return fit_objective(
            samples, pieces=pieces, tile_tokens=tile_tokens, name=name, starts=starts, seed=seed
        )

    @classmethod
    def from_json(cls, text: str) -> Objective:
        """Return the objective that `to_json` wrote as this text.

        Of the keys only ``pieces`` is required; the others have the defaults of the parameters.

        Raises
        ------
        FormatError
            Naming the place in the text, such as ``pieces[1].token``.
        """
        from eplb_opt.formats.objectives import parse_objective

        return parse_objective(text, "JSON text")

    def to_json(self) -> str:
        """Return the objective as JSON, to the last bit; a file of it can stand for its name.

        Examples
        --------
        >>> objective = Objective(pieces=(Piece(activation=15), Piece(token=0.1)), split=False)
        >>> Objective.from_json(objective.to_json()) == objective
        True
        """
        pieces = [
            {field: value for field, value in asdict(piece).items() if value}
            for piece in self.pieces
        ]
        content = {
            "name": self.name,
            "pieces": pieces,
            "tile_tokens": self.tile_tokens,
            "slowness": self.slowness,
            "split": self.split,
            "source": self.source,
        }
        return json.dumps(content, indent=2)

    @property
    def linear(self) -> tuple[Piece, ...]:
        """The pieces that are not curves."""
        return tuple(p for p in self.pieces if isinstance(p, Piece))

    @property
    def curves(self) -> tuple[Curve, ...]:
        """The pieces that are curves."""
        return tuple(p for p in self.pieces if isinstance(p, Curve))

    @property
    def has_tiles(self) -> bool:
        """Whether a piece counts tiles."""
        return any(p.tile > 0 for p in self.linear)

    @property
    def counts_activations(self) -> bool:
        """Whether the time is the number of activated replicas, which `matching` minimises."""
        return self.pieces == _ACTIVATIONS and self.slowness is None

    @property
    def counts_tokens(self) -> bool:
        """Whether the time is the number of tokens, and `flow` may split experts to lower it."""
        return self.pieces == _TOKENS and self.slowness is None and self.split

    @property
    def break_even(self) -> float:
        """Tokens of an expert (n*) that take as long as activating it does.

        The largest time of a replica's activation and first tile over the largest time of a token;
        inf where no linear piece counts tokens. Curves are left out.
        """
        token = max((p.token for p in self.linear), default=0.0)
        activation = max((p.activation + p.tile for p in self.linear), default=0.0)
        return activation / token if token else float("inf")

    @property
    def idle(self) -> float:
        """Time of the slowest GPU when none has tokens: what offsets alone cost."""
        offset = max((p.offset for p in self.linear), default=0.0)
        return offset * max(self.slowness or (1.0,))

    def time(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the time of every GPU, float64 ``[..., gpus]``.

        Parameters
        ----------
        tokens
            Int64 ``[..., gpus, slots]``: tokens of every replica.

        Raises
        ------
        ValueError
            If `slowness` is not of as many GPUs.
        """
        activated: NDArray[np.float64] | float = 0.0
        tiles: NDArray[np.float64] | float = 0.0
        total: NDArray[np.float64] | float = 0.0
        if any(piece.activation for piece in self.linear):
            activated = np.asarray((tokens > 0).sum(axis=-1), np.float64)
        if self.has_tiles:
            tiles = np.asarray((-(-tokens // self.tile_tokens)).sum(axis=-1), np.float64)
        if any(piece.token for piece in self.linear):
            total = np.asarray(tokens.sum(axis=-1), np.float64)
        times = (
            piece.time(tokens) if isinstance(piece, Curve) else piece.time(activated, tiles, total)
            for piece in self.pieces
        )
        most = np.asarray(reduce(np.maximum, times))
        if self.slowness is None:
            return most
        self.require_gpus(tokens.shape[-2])
        return np.asarray(np.array(self.slowness) * most)

    def require_gpus(self, gpus: int) -> None:
        """Raise `ValueError` if the slowness is of another number of GPUs."""
        if self.slowness is not None and len(self.slowness) != gpus:
            raise ValueError(
                f"the objective gives the slowness of {len(self.slowness)} GPUs; the placement has "
                f"{gpus}"
            )


def _as_time(value: float, what: str) -> float:
    """Return a time or a factor of one as a float, or raise `ValueError`."""
    try:
        time = float(value)
    except OverflowError:  # an int beyond the largest float
        time = float("inf")
    if not 0 <= time <= _LONGEST:
        raise ValueError(f"{what} must be a number from 0 to {_LONGEST:g}, not {time}")
    return time


def _as_count(value: int, what: str) -> int:
    """Return a number of tokens as an int, or raise `ValueError`."""
    try:
        count = operator.index(value)
    except TypeError:
        raise ValueError(f"{what} must be an integer, not {value!r}") from None
    if not 1 <= count <= _MOST_TOKENS:
        raise ValueError(f"{what} must be from 1 to {_MOST_TOKENS}, not {count}")
    return count


_ACTIVATIONS: tuple[Piece | Curve, ...] = (Piece(activation=1.0),)
_TOKENS: tuple[Piece | Curve, ...] = (Piece(token=1.0),)


def _kernel(name: str, activation: float, token: float, what: str) -> Objective:
    """Return TEMPO's expert kernel: the larger of reading weights and arithmetic, microseconds."""
    source = (
        f"TEMPO (arXiv 2608.13057), {what}, microseconds; launch and communication are not given "
        "for it and are left at 0"
    )
    return Objective(
        pieces=(Piece(activation=activation), Piece(token=token)), name=name, source=source
    )


def _tiled(name: str, launch: float, activation: float, tile: float, what: str) -> Objective:
    """Return TEMPO's memory piece alone: ``a + b A + b2 (T - A)``, microseconds."""
    source = (
        f"TEMPO (arXiv 2608.13057), {what}, microseconds; the token piece is not given for it and "
        "left out"
    )
    piece = Piece(offset=launch, activation=activation - tile, tile=tile)
    return Objective(pieces=(piece,), name=name, source=source)


OBJECTIVES: Mapping[str, Objective] = MappingProxyType(
    {
        objective.name: objective
        for objective in (
            Objective(
                pieces=_ACTIVATIONS,
                name="activations",
                source="replicas with tokens: decode reads the weights of each once (METRO, "
                "arXiv 2512.09277)",
            ),
            Objective(
                pieces=_TOKENS,
                name="tokens",
                source="tokens: prefill is bound by arithmetic (DeepSeek EPLB, LPLB)",
            ),
            _kernel("deepseek-v3-fp8", 14.78, 0.0945, "DeepSeek-V3 in fp8"),
            _kernel("deepseek-v3-bf16", 45.29, 0.1370, "DeepSeek-V3 in bf16, a loop over experts"),
            _kernel("deepseek-v2-lite-fp8", 2.99, 0.0179, "DeepSeek-V2-Lite in fp8"),
            _kernel("qwen3-30b-fp8", 1.74, 0.0108, "Qwen3-30B in fp8"),
            _tiled("deepseek-v3-tiles", 37.1, 8.32, 2.65, "DeepSeek-V3 on its second testbed"),
            _tiled("qwen3-235b-tiles", 34.9, 3.95, 1.23, "Qwen3-235B on its second testbed"),
        )
    }
)
"""Objectives by name."""
