"""When an anytime method or an exact engine stops."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TimeLimit"]


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Stop after so many seconds of wall time, over all problems or layers of a call."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise ValueError(f"a time limit is at least 0 seconds, not {self.seconds}")
