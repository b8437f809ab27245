"""What a placement's makespan is on loads: how copies share a load, and how windows sum up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from eplb_opt.bounds import confined_experts
from eplb_opt.metrics import PlacementMetrics
from eplb_opt.placement import Placement
from eplb_opt.routing import solve_routing

__all__ = ["Measure", "Split", "free_split"]

_TOKENS = 2.0**38  # what the largest load of a layer counts as when loads are made integers


class Split(str, Enum):
    """How an expert's load is shared by its copies."""

    EQUAL = "equal"
    """Every copy takes the same share, as engines count on."""
    FREE = "free"
    """Copies take what makes the largest GPU load least, as an exact router of tokens does."""

    @classmethod
    def _missing_(cls, value: object) -> Split:
        raise ValueError(f"split is 'equal' or 'free', not {value!r}")


@dataclass(frozen=True, slots=True)
class Measure:
    """What a placement's makespan is, layer by layer.

    Attributes
    ----------
    split
        How an expert's load is shared by its copies.
    over_windows
        How the makespans of several windows sum up: ``"mean"``, ``"worst"``, or a quantile from 0
        to 1, between neighbours by interpolation.

    Raises
    ------
    ValueError
        Another split or sum.

    Examples
    --------
    >>> placement = Placement([[0, 1], [0, 2]])
    >>> windows = np.array([[[90.0, 10.0, 10.0]], [[0.0, 30.0, 10.0]]])
    >>> for measure in (Measure(), Measure(Split.FREE), Measure(over_windows="worst")):
    ...     print(measure.makespan(placement, windows))
    [42.5]
    [42.5]
    [55.]
    """

    split: Split = Split.EQUAL
    over_windows: str | float = "mean"

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", Split(self.split))
        over = self.over_windows
        named = isinstance(over, str) and over in ("mean", "worst")
        share = isinstance(over, Real) and not isinstance(over, bool) and 0 <= over <= 1
        if not (named or share):
            raise ValueError(f"over_windows is 'mean', 'worst' or from 0 to 1, not {over!r}")
        if share:
            object.__setattr__(self, "over_windows", float(over))

    @property
    def quantile(self) -> float:
        """`over_windows` as a quantile; -1 for the mean."""
        if isinstance(self.over_windows, str):
            return {"mean": -1.0, "worst": 1.0}[self.over_windows]
        return float(self.over_windows)

    def sum_up(self, makespans: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the windows' makespans, or bounds, float64 ``[windows, layers]``, as ``[layers]``.

        It never falls where a window's makespan rises, so bounds of windows sum up to a bound.
        """
        if self.quantile < 0:
            return np.asarray(makespans.mean(axis=0))
        return np.asarray(np.quantile(makespans, self.quantile, axis=0))

    def slack(self, windows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return float64 ``[layers]``: what `makespan` may be too small by, for these loads.

        Beside the rounding of sums. With equal split no more than numbers without full precision
        are rounded by; with free split each expert, and the load per GPU, a step of the integers.
        """
        if self.split is Split.EQUAL:
            return np.full(windows.shape[1], np.finfo(np.float64).tiny)
        return np.asarray(windows.max(axis=(0, 2)) * ((windows.shape[2] + 1) / _TOKENS))

    def makespan(self, placement: Placement, windows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return float64 ``[layers]`` for loads, float64 ``[windows, layers, experts]``.

        O(slots) per layer and window for equal split, an exact routing for free split.
        """
        if self.split is Split.EQUAL:
            each = [PlacementMetrics.of(placement, load).peak for load in windows]
        else:
            each = [free_split(placement, load) for load in windows]
        return self.sum_up(np.array(each))


def free_split(placement: Placement, load: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return float64 ``[layers]``: the least that the largest GPU load can be, by any split.

    Loads are brought to integers of up to 2**38, routed exactly as tokens, and the certificate's
    load per GPU is returned: no split gets below it, and one is above it by a rounding of 2**-38
    of the largest load per expert at most.

    Parameters
    ----------
    placement
        Every expert with load has a replica.
    load
        Float64 ``[layers, experts]``.

    Examples
    --------
    >>> free_split(Placement([[0, 1], [0, 2]]), np.array([[1.0, 0.5, 0.0]]))
    array([0.75])
    """
    largest = load.max(axis=-1, keepdims=True)
    tokens = np.rint(load / np.where(largest > 0, largest, 1.0) * _TOKENS).astype(np.int64)
    tokens = tokens if placement.layered else tokens[0]
    routing = solve_routing(placement, tokens, objective="tokens")
    sets = np.atleast_2d(routing.certificate)
    confined = np.where(confined_experts(placement, sets[None])[0], load, 0.0)
    return np.asarray(confined.sum(axis=-1) / np.maximum(sets.sum(axis=-1), 1))
