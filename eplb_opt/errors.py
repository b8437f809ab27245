"""What can go wrong, as one small tree: catch `EplbError` to catch all of it."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "EplbError",
    "FormatError",
    "InfeasibleError",
    "InvalidPlacementError",
    "InvalidTokensError",
    "SolverUnavailableError",
    "SweepError",
]


_FAILURES_TOLD = 10


class EplbError(Exception):
    """Base of every error that eplb-opt raises on purpose."""


class InvalidPlacementError(EplbError, ValueError):
    """A placement breaks a rule; the message names the layer, GPU, slot or expert."""


class InvalidTokensError(EplbError, ValueError):
    """Token counts, top-k ids or loads break a rule; the message names the place."""


class InfeasibleError(EplbError):
    """No answer exists: a token's expert has no replica, or experts outnumber slots."""


class FormatError(EplbError, ValueError):
    """A file is not what its reader expects.

    Parameters
    ----------
    path
        The file.
    place
        Where in it, as a path inside it (``logical_count[3][17]``, ``line 12``); may be empty.
    problem
        What is wrong there, and what was expected.
    """

    def __init__(self, path: object, place: str, problem: str) -> None:
        self.path = path
        self.place = place
        self.problem = problem
        super().__init__(f"{path}: {place}: {problem}" if place else f"{path}: {problem}")

    def __reduce__(self) -> tuple[type[FormatError], tuple[object, str, str]]:
        return type(self), (self.path, self.place, self.problem)


class SolverUnavailableError(EplbError, ImportError):
    """A method needs a package that is not installed; the message names the extra to install."""


class SweepError(EplbError):
    """Deployments of a sweep failed; the others are stored.

    Parameters
    ----------
    failed
        Why, by deployment.
    deployments
        How many were asked for.
    folder
        Where the others are.
    """

    def __init__(self, failed: Mapping[str, str], deployments: int, folder: object) -> None:
        self.failed = dict(failed)
        self.deployments = deployments
        self.folder = folder
        lines = [f"\n  {name}: {reason}" for name, reason in failed.items()]
        if len(lines) > _FAILURES_TOLD:
            lines[_FAILURES_TOLD:] = [f"\n  and {len(lines) - _FAILURES_TOLD} more"]
        super().__init__(
            f"{len(failed)} of {deployments} deployments failed; the others are stored in {folder},"
            f" and the same call computes just these:{''.join(lines)}"
        )

    def __reduce__(self) -> tuple[type[SweepError], tuple[dict[str, str], int, object]]:
        return type(self), (self.failed, self.deployments, self.folder)
