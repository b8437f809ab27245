"""What a GPU's time is taken to be: the quantity whose maximum over GPUs a routing minimises."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Objective"]


@dataclass(frozen=True, slots=True)
class Objective:
    """A GPU's time as a function of its activated replicas and its tokens.

    Parameters
    ----------
    name
        ``"activations"``: the replicas that receive at least one token, since decoding reads the
        weights of each once (METRO, arXiv 2512.09277). ``"tokens"``: the tokens, since prefill is
        bound by arithmetic (DeepSeek EPLB, LPLB).

    Raises
    ------
    ValueError
        If the name is not a preset; the message lists the presets.

    Examples
    --------
    >>> Objective("tokens").time(np.array([2, 1]), np.array([8, 9]))
    array([8., 9.])
    """

    PRESETS: ClassVar[tuple[str, ...]] = ("activations", "tokens")

    name: str

    def __post_init__(self) -> None:
        if self.name not in self.PRESETS:
            raise ValueError(f"unknown objective {self.name!r}; known: {', '.join(self.PRESETS)}")

    @classmethod
    def of(cls, objective: Objective | str) -> Objective:
        """Return `objective` itself, or the preset of that name."""
        return objective if isinstance(objective, Objective) else _preset(objective)

    def time(self, activated: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the time of GPUs with these activated replicas and tokens (same shape, any)."""
        return np.asarray(activated if self.name == "activations" else tokens, dtype=np.float64)


@cache
def _preset(name: str) -> Objective:
    return Objective(name)
