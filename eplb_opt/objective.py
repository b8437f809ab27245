"""What a GPU's time is taken to be: the quantity whose maximum over GPUs a routing minimises."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

__all__ = ["OBJECTIVES", "Curve", "Objective", "Piece"]


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
        A coefficient that is negative or not finite.
    """

    offset: float = 0.0
    activation: float = 0.0
    tile: float = 0.0
    token: float = 0.0

    def __post_init__(self) -> None:
        for name in ("offset", "activation", "tile", "token"):
            value = float(getattr(self, name))
            if not 0 <= value < math.inf:
                raise ValueError(f"a piece's {name} is a finite time of at least 0, not {value}")
            object.__setattr__(self, name, value)

    @property
    def grows(self) -> bool:
        """Whether the time depends on what a GPU is given."""
        return max(self.activation, self.tile, self.token) > 0


@dataclass(frozen=True, slots=True)
class Curve:
    """A measured time of one expert over its tokens, summed over the GPU's replicas.

    What a grouped matrix product's profile gives, steps and all. Between two measured counts the
    time is linear, below the first it is that of the first, above the last it goes on as between
    the last two. A replica without tokens takes no time.

    Parameters
    ----------
    tokens
        Token counts, rising from 1 or more.
    times
        Time of one expert with so many tokens; never falling.

    Raises
    ------
    ValueError
        Fewer than two rows, counts that do not rise, times that fall, are negative or not finite.

    Examples
    --------
    >>> Curve((1, 128, 129), (10.0, 10.0, 20.0)).time(np.array([[0, 64, 129, 130]]))
    array([60.])
    """

    tokens: tuple[int, ...]
    times: tuple[float, ...]

    def __post_init__(self) -> None:
        tokens = tuple(int(n) for n in self.tokens)
        times = tuple(float(t) for t in self.times)
        if len(tokens) != len(times) or len(tokens) < 2:
            raise ValueError(
                f"a curve needs two rows or more of tokens and times, not {len(tokens)} token "
                f"counts and {len(times)} times"
            )
        if tokens[0] < 1 or any(a >= b for a, b in pairwise(tokens)):
            raise ValueError("a curve's token counts must rise, from 1 or more")
        if not all(0 <= t < math.inf for t in times):
            raise ValueError("a curve's times must be finite and not negative")
        for row, (a, b) in enumerate(pairwise(times)):
            if b < a:
                raise ValueError(
                    f"a curve's times must not fall, and row {row + 1} has {b} after {a}; "
                    "np.maximum.accumulate smooths a noisy profile"
                )
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "times", times)

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
        No piece, or none that grows; a slowness that is not a finite positive number; a tile
        without tokens.

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
        if not pieces:
            raise ValueError("an objective needs at least one piece")
        if not any(p.grows if isinstance(p, Piece) else p.times[-1] > 0 for p in pieces):
            raise ValueError("no piece of the objective grows: every routing would be as good")
        if self.tile_tokens < 1:
            raise ValueError(f"a tile holds at least 1 token, not {self.tile_tokens}")
        object.__setattr__(self, "pieces", pieces)
        if self.slowness is None:
            return
        slowness = tuple(float(s) for s in self.slowness)
        for gpu, value in enumerate(slowness):
            if not 0 < value < math.inf:
                raise ValueError(
                    f"the slowness of GPU {gpu} is {value}; it must be above 0, finite"
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
        """Return `objective` itself, or the preset of that name."""
        return objective if isinstance(objective, Objective) else cls.preset(objective)

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
        """Tokens of an expert (n*) whose arithmetic takes as long as reading its weights.

        The largest activation coefficient over the largest token coefficient; inf without one.
        """
        token = max((p.token for p in self.linear), default=0.0)
        activation = max((p.activation + p.tile for p in self.linear), default=0.0)
        return activation / token if token else math.inf

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
        count: dict[str, NDArray[np.float64]] = {}
        times = []
        for piece in self.pieces:
            if isinstance(piece, Curve):
                times.append(piece.time(tokens))
                continue
            time = np.full(tokens.shape[:-1], piece.offset)
            for name in ("activation", "tile", "token"):
                if getattr(piece, name):
                    if name not in count:
                        count[name] = self._count(name, tokens)
                    time += getattr(piece, name) * count[name]
            times.append(time)
        most = times[0] if len(times) == 1 else np.maximum.reduce(times)
        if self.slowness is None:
            return most
        self.require_gpus(tokens.shape[-2])
        return np.asarray(most * np.array(self.slowness))

    def _count(self, name: str, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return every GPU's activated replicas, tiles or tokens."""
        if name == "activation":
            return np.asarray((tokens > 0).sum(axis=-1), np.float64)
        each = -(-tokens // self.tile_tokens) if name == "tile" else tokens
        return np.asarray(each.sum(axis=-1), np.float64)

    def require_gpus(self, gpus: int) -> None:
        """Raise `ValueError` if the slowness is of another number of GPUs."""
        if self.slowness is not None and len(self.slowness) != gpus:
            raise ValueError(
                f"the objective gives the slowness of {len(self.slowness)} GPUs; the placement has "
                f"{gpus}"
            )


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
