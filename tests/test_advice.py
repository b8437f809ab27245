"""The verdict: what an interval says of the gain that is asked for."""

from __future__ import annotations

import pytest

from eplb_opt.advice import Candidate, Verdict, judged
from eplb_opt.bootstrap import Estimate


@pytest.mark.parametrize(
    ("gain", "ceiling", "verdict", "more"),
    [
        ((0.05, 0.02, 0.08), 0.3, Verdict.YES, None),
        ((0.005, 0.0, 0.009), 0.3, Verdict.NO, None),
        ((-0.05, -0.08, 0.2), 0.3, Verdict.UNCLEAR, 1637),
        ((0.03, 0.0, 0.09), 0.3, Verdict.UNCLEAR, 125),
        ((0.01, 0.0, 0.02), 0.3, Verdict.UNCLEAR, None),
        ((0.011, -0.1, 0.1), 0.3, Verdict.UNCLEAR, None),
        ((0.005, -0.1, 0.1), 0.009, Verdict.NO, None),
    ],
)
def test_the_verdict_hangs_on_the_interval(
    gain: tuple[float, float, float], ceiling: float, verdict: Verdict, more: int | None
) -> None:
    """Above 1 %, below it, or neither; what cannot be reached is no, however wide it is."""
    assert judged(Estimate(*gain), 0.01, ceiling, 100) == (verdict, more)


def test_so_many_more_steps_make_it_clear() -> None:
    """An interval of as many steps, narrower by the root, ends where it must."""
    gain = Estimate(0.03, -0.01, 0.07)
    verdict, more = judged(gain, 0.01, 1.0, 100)
    assert (verdict, more) == (Verdict.UNCLEAR, 300)
    narrower = (100 / (100 + 300 + 1)) ** 0.5
    again = Estimate(0.03, 0.03 - 0.04 * narrower, 0.03 + 0.04 * narrower)
    assert judged(again, 0.01, 1.0, 401) == (Verdict.YES, None)


def test_a_candidate_in_a_line() -> None:
    """Without slots there is nothing to route."""
    known = {"steps": 9, "gain": 0.1, "decode": 1.0, "prefill": None, "moves": 0, "memory": None}
    with_slots = Candidate(16, "search", "metro", 500, "decode", **known)  # type: ignore[arg-type]
    without = Candidate(0, "deepseek", "uniform", None, "all", **known)  # type: ignore[arg-type]
    assert with_slots.label == (
        "search every 500 steps on decode's load, 16 redundant slots, routed by metro"
    )
    assert without.label == "deepseek once, no redundant slots"
