"""Model shapes, and seeded synthetic traffic whose statistics are those of recorded traffic.

A `Workload` knows how popular each expert is and draws batches of top-k choices from that. Three
things are calibrated apart, each on recorded counts (origins in the comments on the constants):

- the *tail*, a layer's hottest expert over its mean: what makes token balance hard;
- the *body*, how unequal the other experts are: it decides how many experts are live in a batch;
- how far the tokens of one generation share experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache, partial
from math import erfc, sqrt
from statistics import NormalDist
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from eplb_opt.arrays import as_array
from eplb_opt.errors import InvalidTokensError

__all__ = ["MODEL_SHAPES", "ModelShape", "Stage", "Workload", "model_shape"]

Float64: TypeAlias = npt.NDArray[np.float64]
Float32: TypeAlias = npt.NDArray[np.float32]
Stage: TypeAlias = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a mixture-of-experts model that placement and routing depend on.

    Parameters
    ----------
    name
        As its authors write it.
    layers
        MoE layers; dense layers do not count.
    experts, top_k
        Routed experts in a layer, and how many of them a token visits.
    hidden, ffn
        Width of a token and of one expert's inner layer.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    ffn: int


MODEL_SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name.lower(): shape
        for shape in (
            ModelShape("DeepSeek-V3", 58, 256, 8, 7168, 2048),
            ModelShape("Kimi-K2", 60, 384, 8, 7168, 2048),
            ModelShape("Kimi-K3", 92, 896, 16, 3584, 3072),
            ModelShape("Qwen3-235B", 94, 128, 8, 4096, 1536),
            ModelShape("Qwen3-30B", 48, 128, 8, 2048, 768),
            ModelShape("GLM-4.5", 89, 160, 8, 5120, 1536),
            ModelShape("MiniMax-M2", 62, 256, 8, 3072, 1536),
            ModelShape("gpt-oss-120b", 36, 128, 4, 2880, 2880),
            ModelShape("gpt-oss-20b", 24, 32, 4, 2880, 2880),
            ModelShape("Llama-4-Maverick", 24, 128, 1, 5120, 8192),
            ModelShape("Mixtral-8x7B", 32, 8, 2, 4096, 14336),
        )
    }
)
"""Model shapes by lower-case name."""


def model_shape(name: str) -> ModelShape:
    """Look a model up by name, in any case.

    Raises
    ------
    ValueError
        If no model has that name; the message lists the names.

    Examples
    --------
    >>> model_shape("DeepSeek-V3").experts
    256
    """
    try:
        return MODEL_SHAPES[name.lower()]
    except KeyError:
        known = ", ".join(MODEL_SHAPES)
        raise ValueError(f"no model is called {name!r}; the known ones are: {known}") from None


def shape_for(model: ModelShape | str, experts: int) -> ModelShape:
    """Return a model's shape, by name or as it is, for traffic of so many experts.

    Raises
    ------
    ValueError
        An unknown name, or a model of other experts.
    """
    shape = model_shape(model) if isinstance(model, str) else model
    if shape.experts != experts:
        raise ValueError(f"{shape.name} has {shape.experts} experts, the traffic {experts}")
    return shape


@dataclass(frozen=True, slots=True)
class _Popularity:
    """How unequal the layers of one recording are: least, quartiles and most over its layers.

    With z a layer's normal scores, log popularity is close to `spread * z + bend * z**2 / 2`:
    `spread` (its slope on z) sets the body, and `bend` follows from `peak`, the largest popularity
    over the mean. `experts` is the count that `peak` was seen with.
    """

    experts: int
    spread: tuple[float, ...]
    peak: tuple[float, ...]

    def layers(self, quantile: Float64, experts: int) -> Float64:
        """Return shares [layers, experts], each layer's in rising order.

        A layer at quantile q has the recording's spread and peak at q: over layers they rise
        together (rank correlation 0.45-0.6).
        """
        ticks = np.linspace(0, 1, len(self.spread))
        spread = np.interp(quantile, ticks, self.spread)[:, None]
        peak = np.exp(np.interp(quantile, ticks, np.log(self.peak)))[:, None]
        low, high = np.full_like(peak, -2.0), np.full_like(peak, 2.0)
        for _ in range(40):  # the peak rises with the bend
            bend = (low + high) / 2
            short = _curve(spread, bend, self.experts)[:, -1:] * self.experts < peak
            low, high = np.where(short, bend, low), np.where(short, high, bend)
        return _curve(spread, low, experts)


def _curve(spread: Float64, bend: Float64, experts: int) -> Float64:
    ranks = (np.arange(1, experts + 1) - 0.375) / (experts + 0.25)  # Blom's normal scores
    scores = np.array([NormalDist().inv_cdf(rank) for rank in ranks])
    slope = spread + bend * scores
    # Past the parabola's vertex it would fall again; popularity stays flat there.
    vertex = -spread / np.where(bend == 0, np.inf, bend)
    scores = np.where(slope < 0, vertex, scores)
    return _shares(np.exp(spread * scores + bend * scores**2 / 2))


# sglang_deepseek_v3: decode_in2000out100 and prefill_in4096, 58 layers each (SGLang's published
# expert statistics); gpt_oss_20b: 45,043 tokens x 24 layers (GPT-OSS-MoE-ExpertFingerprinting).
_DEEPSEEK: Mapping[Stage, _Popularity] = {
    "decode": _Popularity(
        256, (0.437, 0.591, 0.685, 0.759, 0.903), (2.606, 4.539, 5.790, 7.426, 10.495)
    ),
    "prefill": _Popularity(
        256, (0.491, 0.710, 0.859, 0.942, 1.061), (3.969, 5.934, 8.204, 10.069, 13.358)
    ),
}
_GPT_OSS = _Popularity(32, (0.516, 0.901, 1.129, 1.302, 1.556), (1.949, 2.254, 2.477, 2.940, 3.915))

# Correlation of an expert's log popularity between two recordings, median over layers, of
# sglang_deepseek_v3: decode with prefill 0.68-0.92 (mean 0.80); decode with decode, and prefill
# with prefill, 0.90.
_STAGES_AGREE = 0.80
_TIMES_AGREE = 0.90

# gpt_oss_20b: runs of 4, 8, 32, 128 consecutive tokens of one generation have 0.78, 0.72, 0.71,
# 0.77 times the live experts of as many mixed tokens; this value gives 0.79, 0.72, 0.71, 0.78.
# Tokens picked at random from a generation share less (0.79 for 32 of them; 0.36 would give that).
_CORRELATION = 0.47
_GENERATION_STEPS = 320  # tokens in a generation of gpt_oss_20b, mean
_PROMPT_TOKENS = 512  # the longest runs that the correlation was measured on

_BLOCK = 1 << 21  # random numbers drawn at a time
_LIMIT = 15.0  # gates are clipped to it; bars stay within 6, and no deviate reaches 9


class _Noise(IntEnum):
    """What a random stream is for; streams of different kinds never meet."""

    TOKENS = 0
    GENERATIONS = 1
    DRIFT = 2
    SHAPE = 3


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Traffic of one model on one stage: popularity, and the batches that are drawn from it.

    A token's gate for an expert is the expert's bar plus a normal deviate; the token visits the
    `top_k` largest. A bar is the normal quantile of the chance ``min(1, top_k * popularity)``
    (order sampling, Rosén 1997). Part of the deviate is common to the tokens of a generation, and
    whatever that part, it stays standard normal, so that `correlation` leaves the chances alone.
    They come out within 1 % for a model's hot experts where top_k >= 4 (cold ones: 2 % for 8 of
    256, 5 % for 4 of 32), and within 5 % for 2 of 8 and 9 % for 1 of 128.

    Row r of a batch belongs to generation ``r // generation_tokens``. A generation keeps its rows
    for `generation_steps` steps, then another takes them over; the turns are spread over steps.
    On decode each row is a generation of its own, and what its tokens share shows from step to
    step, not within a batch. On prefill a batch holds prompts of 512 tokens, new ones every step.

    Parameters
    ----------
    popularity
        Float [layers, experts], each expert's share of its layer's tokens. A row sums to 1, or is
        all zero for a dense layer, which draws only -1.
    top_k
        Distinct experts that a token visits; each layer needs as many with a share above 0.
    correlation
        Share of the deviates' variance that the tokens of a generation have in common, 0 to 1.
    generation_tokens, generation_steps
        Rows of a batch that belong to one generation, and how many steps it lives.
    drift
        Popularity turns over in about ``1 / drift`` steps, around `popularity`; 0 keeps it still.
    seed
        Same seed and step, same batch (with one release of NumPy), however many steps or rows are
        drawn at once. Not negative.

    Raises
    ------
    InvalidTokensError
        If a share is not a number or negative, a row's sum is neither 1 nor 0, or a layer has
        fewer than `top_k` experts to visit.
    ValueError
        If another parameter is out of its range.

    Examples
    --------
    >>> workload = Workload.preset("deepseek-v3", "decode", seed=1)
    >>> workload.draw(tokens=32, steps=2).shape
    (2, 58, 32, 8)
    """

    popularity: Float64 = field(repr=False)
    top_k: int
    correlation: float = _CORRELATION
    generation_tokens: int = 1
    generation_steps: int = _GENERATION_STEPS
    drift: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the parameters and keep a copy of `popularity` that nobody can write to."""
        popularity = _checked_load(self.popularity, "popularity", self.top_k)
        total = popularity.sum(axis=1)
        for layer in np.flatnonzero((abs(total - 1) > 1e-6) & (total != 0))[:1]:
            raise InvalidTokensError(
                f"popularity[layer {layer}] sums to {total[layer]:g}; expected 1, or 0 for a dense "
                "layer (Workload.from_load takes counts)"
            )
        for name in ("correlation", "drift"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 to 1")
        _check_at_least(1, top_k=self.top_k, generation_tokens=self.generation_tokens)
        _check_at_least(1, generation_steps=self.generation_steps)
        _check_at_least(0, seed=self.seed)
        popularity.flags.writeable = False
        object.__setattr__(self, "popularity", popularity)

    @classmethod
    def preset(
        cls,
        model: str,
        stage: Stage = "decode",
        *,
        correlation: float = _CORRELATION,
        drift: float = 0.0,
        seed: int = 0,
    ) -> Workload:
        """Make traffic for a model of `MODEL_SHAPES`.

        Popularity follows DeepSeek-V3's recordings on that stage, or gpt-oss-20b's (which do not
        tell the stages apart) for models of at most 32 experts. The same seed gives both stages of
        one deployment: experts that are hot on one tend to be hot on the other.

        Raises
        ------
        ValueError
            If the model or the stage is unknown.

        Examples
        --------
        >>> decode = Workload.preset("deepseek-v3", "decode")
        >>> (decode.popularity.max(axis=1) * 256).round(1).max()
        np.float64(10.5)
        """
        shape = model_shape(model)
        if stage not in get_args(Stage):
            raise ValueError(f"no stage is called {stage!r}; the known ones are: decode, prefill")
        _check_at_least(0, seed=seed)
        family = _GPT_OSS if shape.experts <= _GPT_OSS.experts else _DEEPSEEK[stage]
        model_noise = _stream(seed, _Noise.SHAPE, 0)
        stage_noise = _stream(seed, _Noise.SHAPE, 1 + get_args(Stage).index(stage))
        quantile = model_noise.permutation(np.linspace(0, 1, shape.layers))
        size = shape.layers, shape.experts
        heat = sqrt(_STAGES_AGREE) * model_noise.standard_normal(size)
        heat += sqrt(1 - _STAGES_AGREE) * stage_noise.standard_normal(size)
        rank = heat.argsort(axis=1).argsort(axis=1)
        return cls(
            np.take_along_axis(family.layers(quantile, shape.experts), rank, axis=1),
            shape.top_k,
            correlation,
            generation_tokens=1 if stage == "decode" else _PROMPT_TOKENS,
            generation_steps=_GENERATION_STEPS if stage == "decode" else 1,
            drift=drift,
            seed=seed,
        )

    @classmethod
    def from_load(
        cls,
        load: npt.ArrayLike,
        top_k: int,
        *,
        correlation: float = _CORRELATION,
        generation_tokens: int = 1,
        generation_steps: int = _GENERATION_STEPS,
        drift: float = 0.0,
        seed: int = 0,
    ) -> Workload:
        """Make traffic that follows a recorded load.

        Parameters
        ----------
        load
            Int or float [layers, experts], tokens or any multiple of them; an all-zero layer is
            dense. A share above ``1 / top_k``, which distinct visits cannot reach, is drawn as
            ``1 / top_k`` and the rest is spread over the others in proportion.
        top_k, correlation, generation_tokens, generation_steps, drift, seed
            As for `Workload`.

        Examples
        --------
        >>> Workload.from_load([[30, 10, 40, 20]], top_k=2).popularity
        array([[0.3, 0.1, 0.4, 0.2]])
        """
        share = _shares(_checked_load(load, "load", top_k))
        return cls(
            share, top_k, correlation, generation_tokens, generation_steps, drift=drift, seed=seed
        )

    def popularity_at(self, step: int) -> Float64:
        """Popularity at one step: `popularity` itself unless it drifts.

        Log popularity keeps its mean and variance in each layer and moves smoothly between normal
        deviates ``1 / drift`` steps apart; far-apart steps correlate as recordings of one stage do.

        Returns
        -------
        numpy.ndarray
            Float64 [layers, experts].
        """
        _check_at_least(0, step=step)
        if not self.drift:
            return self.popularity
        turn, phase = divmod(step * self.drift, 1)
        before, after = (
            _stream(self.seed, _Noise.DRIFT, int(turn) + i).standard_normal(self.popularity.shape)
            for i in (0, 1)
        )
        wave = np.cos(np.pi / 2 * phase) * before + np.sin(np.pi / 2 * phase) * after
        live = self.popularity > 0
        count = np.maximum(live.sum(axis=1, keepdims=True), 1)
        heat = np.log(self.popularity, out=np.zeros(live.shape), where=live)
        heat = np.where(live, heat - heat.sum(axis=1, keepdims=True) / count, 0)
        wave *= np.sqrt((heat**2).sum(axis=1, keepdims=True) / count)
        moved = sqrt(_TIMES_AGREE) * heat + sqrt(1 - _TIMES_AGREE) * wave
        return _shares(np.where(live, np.exp(moved), 0))

    def draw(self, tokens: int, steps: int = 1, *, first_step: int = 0) -> npt.NDArray[np.int32]:
        """Draw the batches of consecutive steps.

        Parameters
        ----------
        tokens
            Rows of a batch.
        steps
            How many batches.
        first_step
            Where to start; ``draw(n, 10)`` is ``draw(n, 5)``, then ``draw(n, 5, first_step=5)``.

        Returns
        -------
        numpy.ndarray
            The experts visited, int32 [steps, layers, tokens, top_k], largest gate first; -1 in
            dense layers.

        Raises
        ------
        ValueError
            If `tokens` or `steps` is below 1, or `first_step` below 0.

        Notes
        -----
        O(steps * layers * tokens * experts) time. Beside the answer, a few blocks of 2**21 numbers,
        or of one layer's tokens * experts where that is more.

        Examples
        --------
        >>> np.sort(Workload.from_load([[5, 5, 0], [0, 0, 0]], top_k=2).draw(tokens=2))
        array([[[[ 0,  1],
                 [ 0,  1]],
        <BLANKLINE>
                [[-1, -1],
                 [-1, -1]]]], dtype=int32)
        """
        _check_at_least(1, tokens=tokens, steps=steps)
        _check_at_least(0, first_step=first_step)
        layers, experts = self.popularity.shape
        chosen = np.full((steps, layers, tokens, self.top_k), -1, dtype=np.int32)
        served = np.flatnonzero(self.popularity.any(axis=1))
        generation = np.arange(tokens) // self.generation_tokens
        still = None if self.drift else _bars(self.popularity, self.top_k)
        depth = max(1, _BLOCK // (tokens * experts))
        for block in (served[start : start + depth] for start in range(0, served.size, depth)):
            # A step needs two turns at most, and the next step mostly the same two.
            turns = lru_cache(maxsize=2)(partial(self._turn, block, int(generation[-1]) + 1))
            for i, step in enumerate(range(first_step, first_step + steps)):
                bars = _bars(self.popularity_at(step), self.top_k) if still is None else still
                gates = self._normals(_Noise.TOKENS, step, block, tokens)
                if self.correlation:
                    gates *= np.float32(sqrt(1 - self.correlation))
                    gates += self._common(step, turns)[:, generation]
                gates += bars[block, None]
                chosen[i, block] = _largest(gates, self.top_k)
        return chosen

    def _common(self, step: int, turns: Callable[[int], Float32]) -> Float32:
        """Return what generations share at one step, float32 [layers, generations, experts]."""
        turn = step // self.generation_steps
        common = turns(turn)
        # Golden-ratio offsets spread the ends of generations evenly over the steps.
        offset = np.arange(common.shape[1]) * 0.6180339887498949 % 1 * self.generation_steps
        ended = (step + offset.astype(np.int64)) // self.generation_steps > turn
        return np.where(ended[:, None], turns(turn + 1), common) if ended.any() else common

    def _turn(self, layers: npt.NDArray[np.intp], generations: int, turn: int) -> Float32:
        common = self._normals(_Noise.GENERATIONS, turn, layers, generations)
        common *= np.float32(sqrt(self.correlation))
        return common

    def _normals(
        self, kind: _Noise, index: int, layers: npt.NDArray[np.intp], rows: int
    ) -> Float32:
        """Return deviates [layers, rows, experts]; each layer has a stream, filled row by row."""
        normals = np.empty((layers.size, rows, self.popularity.shape[1]), dtype=np.float32)
        for layer, out in zip(layers.tolist(), normals, strict=True):
            _stream(self.seed, kind, index, layer).standard_normal(out=out, dtype=np.float32)
        return normals


def visit_chances(popularity: Float64, top_k: int) -> Float64:
    """Return the chance that a token visits each expert, float64 [layers, experts]."""
    sure = np.zeros(popularity.shape, dtype=np.bool_)
    while True:  # at most top_k + 1 rounds: each makes one more expert of some layer sure
        share = np.where(sure, 0, popularity)
        total = share.sum(axis=1, keepdims=True)
        left = top_k - sure.sum(axis=1, keepdims=True)
        chance = left * np.divide(share, total, out=np.zeros(share.shape), where=total > 0)
        if not (over := chance >= 1).any():
            return np.where(sure, 1.0, chance)
        sure |= over


def _bars(popularity: Float64, top_k: int) -> Float32:
    """Return the gates' bars [layers, experts]: normal quantiles of the chance of a visit."""
    chance = visit_chances(popularity, top_k)
    some, sure = chance > 0, chance == 1
    odds = np.divide(chance, 1 - chance, out=np.ones(chance.shape), where=some & ~sure)
    bars = np.interp(np.log(odds), _LOG_ODDS, _QUANTILES)
    return np.where(sure, np.inf, np.where(some, bars, -np.inf)).astype(np.float32)


_QUANTILES = np.linspace(-6, 6, 1201)
_LOG_ODDS = np.array([np.log(erfc(-x / sqrt(2)) / erfc(x / sqrt(2))) for x in _QUANTILES.tolist()])


def _largest(gates: Float32, top_k: int) -> npt.NDArray[np.int32]:
    """Return the ids of the `top_k` largest gates on the last axis, largest first.

    The id fills a key's low bits under the rounded gate, so that no two keys tie: the answer hangs
    on no sort's order, and partitioning integers is five times as fast as `numpy.argpartition`.
    """
    experts = gates.shape[-1]
    bits = (experts - 1).bit_length()
    np.clip(gates, -_LIMIT, _LIMIT, out=gates)
    gates *= -float(1 << (27 - bits))  # under 2**31 once shifted, since _LIMIT is under 2**4
    keys = np.rint(gates, out=gates).astype(np.int32)
    keys <<= bits
    keys |= np.arange(experts, dtype=np.int32)
    best = np.partition(keys, top_k - 1, axis=-1)[..., :top_k]
    best.sort(axis=-1)
    ids: npt.NDArray[np.int32] = best & np.int32((1 << bits) - 1)
    return ids


def _shares(values: Float64) -> Float64:
    """Divide each layer by its sum; a layer of zeros stays."""
    most = values.max(axis=1, keepdims=True, initial=0)  # first, lest the sum overflow
    scaled: Float64 = np.divide(values, most, out=np.zeros(values.shape), where=most > 0)
    total = scaled.sum(axis=1, keepdims=True)
    np.divide(scaled, total, out=scaled, where=total > 0)
    return scaled


def _stream(seed: int, kind: _Noise, index: int, layer: int = 0) -> np.random.Generator:
    # The seed comes last: it alone may take more than one word, and no two lists must be alike.
    return np.random.default_rng((kind, index, layer, seed))


def _checked_load(load: npt.ArrayLike, name: str, top_k: int) -> Float64:
    """Return a float64 copy of a load [layers, experts], or say what is wrong with it."""
    _check_at_least(1, top_k=top_k)
    given = as_array(load, name, InvalidTokensError)
    if given.ndim != 2 or not given.size or given.dtype.kind not in "iuf":
        problem = f"{name} is {given.dtype} of shape {given.shape}"
        raise InvalidTokensError(f"{problem}; expected numbers [layers, experts]")
    values = given.astype(np.float64)
    for layer, expert in np.argwhere(~(np.isfinite(values) & (values >= 0)))[:1]:
        place = f"{name}[layer {layer}, expert {expert}]"
        raise InvalidTokensError(f"{place} is {values[layer, expert]}; expected finite and >= 0")
    some = np.count_nonzero(values, axis=1)
    for layer in np.flatnonzero((some > 0) & (some < top_k))[:1]:
        raise InvalidTokensError(
            f"{name}[layer {layer}] has {some[layer]} experts above 0, too few for top_k={top_k}"
        )
    return values


def _check_at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} is {value}; expected {least} or more")
