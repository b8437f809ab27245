"""What uses of the integer programming engines share: presence, time, threads, settings, rows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt.errors import SolverUnavailableError
from eplb_opt.status import Proof

if TYPE_CHECKING:
    import highspy
    from highspy._core import _Highs
    from ortools.sat.python import cp_model

TOLERANCE = 1e-9
BOUND_TOLERANCE = 1e-6


class EngineError(Exception):
    """What an engine did instead of answering; `failure` adds the engine and the problem."""

    by: Proof = Proof.NONE


def installed(package: str) -> bool:
    """Say whether a package can be imported; import nothing."""
    return find_spec(package) is not None


def require(engine: str, package: str) -> None:
    """Raise `SolverUnavailableError` if an engine's package is not installed; import nothing."""
    if not installed(package):
        raise SolverUnavailableError(f"{engine} needs {package}: pip install 'eplb-opt[exact]'")


def seconds_left(deadline: float) -> float:
    """Return the seconds to a deadline on the monotonic clock, inf if it is inf, never below 0."""
    return max(0.0, deadline - time.monotonic())


def at_a_time(threads: int, work: Callable[[int], None], problems: Iterable[int]) -> None:
    """Call `work` for every problem, so many of them at a time.

    Not in the caller's thread: HiGHS keeps a scheduler per thread, and ours would stop the caller
    from choosing the threads of their own HiGHS models.
    """
    with ThreadPoolExecutor(threads) as pool:
        deque(pool.map(work, problems), maxlen=0)


def new_highs(presolve: str, seconds: float) -> _Highs:
    """Return a silent HiGHS without a model."""
    from highspy._core import _Highs

    # The class that highspy.Highs derives from, whose constructor prints a banner that no option
    # can come in time to suppress.
    engine = _Highs()
    options: dict[str, bool | int | float | str] = {
        "output_flag": False,
        "threads": 1,
        "time_limit": seconds,
        "presolve": presolve,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": 0.0,
        "mip_feasibility_tolerance": TOLERANCE,
        "primal_feasibility_tolerance": TOLERANCE,
        "dual_feasibility_tolerance": TOLERANCE,
    }
    for option, value in options.items():
        engine.setOptionValue(option, value)
    return engine


def new_cp_sat(seconds: float) -> cp_model.CpSolver:
    """Return a CP-SAT of one worker, whose proofs are exact and whose answers repeat."""
    from ortools.sat.python import cp_model

    engine = cp_model.CpSolver()
    parameters = engine.parameters
    parameters.num_workers = 1
    parameters.random_seed = 0
    parameters.relative_gap_limit = parameters.absolute_gap_limit = 0.0
    # CP-SAT would take Ctrl-C for a time limit, and leave the process without Python's handler.
    parameters.catch_sigint_signal = False
    parameters.max_time_in_seconds = seconds
    return engine


class Rows:
    """Rows of a linear program in the making, group by group."""

    def __init__(self) -> None:
        self.entries: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []
        self.lower: list[NDArray[np.float64]] = []
        self.upper: list[NDArray[np.float64]] = []
        self.count = 0

    def add(self, lower: ArrayLike, upper: ArrayLike, *entries: tuple[Any, Any, Any]) -> None:
        """Add rows between two limits; an entry is row (counted in the group), column, value."""
        low, high = np.broadcast_arrays(np.atleast_1d(lower).astype(float), upper)
        self.lower.append(low)
        self.upper.append(high)
        for row, column, value in entries:
            at, columns, values = np.broadcast_arrays(row, column, value)
            self.entries.append((self.count + at, columns, values))
        self.count += len(low)

    def finish(self, lp: highspy.HighsLp) -> None:
        """Hand the rows to a program."""
        import highspy

        row, column, value = (
            np.concatenate([e[k].ravel() for e in self.entries]) for k in range(3)
        )
        order = np.argsort(row, kind="stable")
        start = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=self.count))])
        lp.num_row_ = self.count
        lp.row_lower_, lp.row_upper_ = np.concatenate(self.lower), np.concatenate(self.upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = start.astype(np.int32)
        lp.a_matrix_.index_ = column[order].astype(np.int32)
        lp.a_matrix_.value_ = value[order].astype(np.float64)
