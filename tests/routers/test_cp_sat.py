"""CP-SAT alone: what it does to the process, and its exactness."""

from __future__ import annotations

import signal

import pytest

from eplb_opt import _core
from eplb_opt.placement import Placement
from eplb_opt.routing import Status, solve_routing

pytest.importorskip("ortools")


def test_interrupts_still_reach_python() -> None:
    """After a call Ctrl-C raises KeyboardInterrupt as before, though CP-SAT would undo that."""
    solve_routing(Placement([[0, 1], [1, 0]]), [3, 2], method="cp-sat")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_exact_to_the_last_token() -> None:
    """The largest counts are split to the token."""
    most = _core.MAX_TOKENS_PER_EXPERT
    placement = Placement([[0, 1], [0, 2], [0, -1]])
    routing = solve_routing(placement, [most, 1, 2], objective="tokens", method="cp-sat")
    assert routing.makespan == -(-(most + 3) // 3)
    assert routing.status == Status.OPTIMAL
