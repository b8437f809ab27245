"""What is known of an answer, and who proved it."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Proof", "Status"]


class Status(IntEnum):
    """What is known of one problem's answer."""

    UNSOLVED = 0
    """No answer: an exact engine stopped without one; its tokens are all zero."""
    FEASIBLE = 1
    """A valid routing that its method has not proven to be optimal."""
    OPTIMAL = 2
    """A valid routing whose makespan equals a proven lower bound."""


class Proof(IntEnum):
    """Who proved one problem's bound."""

    NONE = 0
    """Nobody: no bound was asked for."""
    COUNT = 1
    """Counting: all GPUs together, or one GPU alone."""
    MATCHING = 2
    """The fewest activated replicas, by matching."""
    FLOW = 3
    """The fewest tokens, by maximum flow."""
    K_DEMAND = 4
    """The fewest replicas that every expert's tokens need, by b-matching."""
    BRANCHING = 5
    """The compiled branch and bound."""
    LP = 6
    """The linear relaxation."""
    HIGHS = 7
    CP_SAT = 8
    PULP = 9
