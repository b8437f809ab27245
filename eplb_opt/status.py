"""What is known of an answer."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Status"]


class Status(IntEnum):
    """What is known of one problem's answer."""

    UNSOLVED = 0
    """No answer: an exact engine stopped without one; its tokens are all zero."""
    FEASIBLE = 1
    """A valid routing that its method has not proven to be optimal."""
    OPTIMAL = 2
    """A valid routing whose makespan equals a proven lower bound."""
