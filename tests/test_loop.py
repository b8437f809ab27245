"""The loop: what happens at which iteration, and when new placements are worth their moves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb_opt.errors import FormatError, InvalidPlacementError, InvalidTokensError
from eplb_opt.formats.placements import read_placement
from eplb_opt.heat import CollectThenDecide, Heat, PeriodicDump, SlidingWindow, StageFilter
from eplb_opt.loop import BreakEven, EplbLoop, Worth
from eplb_opt.metrics import PlacementMetrics, count_moves
from eplb_opt.placement import Placement
from eplb_opt.placers import first_placement
from eplb_opt.placing import solve_placement
from eplb_opt.routing import Router

LAYERS, EXPERTS, GPUS, PER_GPU = 3, 8, 4, 3
START = Placement(first_placement(LAYERS, GPUS, PER_GPU, num_experts=EXPERTS), EXPERTS)


def skewed(hot: int, *, tokens: int = 100) -> NDArray[np.int64]:
    """Give an iteration in which two experts of every layer are hot."""
    counts = np.full((LAYERS, EXPERTS), 5)
    counts[:, [hot, hot + 1]] = tokens
    return counts


def events(loop: EplbLoop, iterations: int) -> dict[int, str]:
    """Give what happens at which iteration, from 1: Decide, and the layers that commit."""
    found = {}
    for n in range(1, iterations + 1):
        step = loop.step(skewed(n % 3))
        layers = "".join(str(commit.layer) for commit in step.commits)
        if happened := ("D" if step.decision is not None else "") + layers:
            found[n] = happened
    return found


# The cycles


@pytest.mark.parametrize(
    ("heat", "expected"),
    [
        # C = 3 to collect, A = 2 to decide beside, one iteration for each of 3 layers, again.
        (
            CollectThenDecide(3, 2),
            {3: "D", 6: "0", 7: "1", 8: "2", 11: "D", 14: "0", 15: "1", 16: "2"},
        ),
        # First after a quarter of 8, then every 8, all layers at once.
        (SlidingWindow(4, 8), {2: "D012", 10: "D012"}),
        # At the end of iteration 4 + 1, then every 4.
        (PeriodicDump(4), {5: "D012", 9: "D012", 13: "D012"}),
        # In chunks of 2 layers from the next iteration on; the count starts with the last chunk.
        (PeriodicDump(4, None, 2), {5: "D", 6: "01", 7: "2", 11: "D", 12: "01", 13: "2"}),
    ],
)
def test_an_engines_cycle_is_followed(heat: Heat, expected: dict[int, str]) -> None:
    """Decisions and commits come at the iterations of the engine's documented cycle."""
    assert events(EplbLoop(START, heat, method="search"), 16) == expected


def test_a_layer_is_served_anew_from_its_commit_on() -> None:
    """Until then the loop's placement has the old layer, and moves count what is received."""
    loop = EplbLoop(START, CollectThenDecide(1, 1), method="search")
    decision = loop.step(skewed(0)).decision
    assert decision is not None
    assert decision.moves.tolist() == count_moves(START, decision.placement).tolist()
    loop.step(skewed(0))
    for layer in range(LAYERS):
        assert loop.placement.slots[layer].tolist() == START.slots[layer].tolist()
        (commit,) = loop.step(skewed(0)).commits
        assert (commit.layer, commit.moves) == (layer, decision.moves[layer])
        assert loop.placement.slots[layer].tolist() == decision.placement.slots[layer].tolist()
    assert loop.placement == decision.placement


@pytest.mark.parametrize("method", ["deepseek", "search", "ascend-default", "swift"])
def test_a_decision_is_the_placement_methods_on_the_windows_load(method: str) -> None:
    """The load is that of the collected iterations, and the old placement is given along."""
    loop = EplbLoop(START, CollectThenDecide(2, 1), method=method)
    loop.step(skewed(0))
    decision = loop.step(skewed(4)).decision
    plan = solve_placement(
        skewed(0) + skewed(4), num_gpus=GPUS, slots_per_gpu=PER_GPU, previous=START, method=method
    )
    assert decision is not None
    assert decision.placement == plan.placement
    assert decision.expected.peak.tolist() == plan.metrics.peak.tolist()


def test_iterations_of_another_stage_are_left_out() -> None:
    """A decode of 8 tokens is collected, a prefill of 9 neither counts nor advances the cycle."""
    heat = CollectThenDecide(2, 1, StageFilter("decode", most_decode_tokens=8))
    loop = EplbLoop(START, heat, method="search")
    steps = [loop.step(skewed(0), scheduled) for scheduled in (8, 9, 9, 8)]
    assert [step.collected for step in steps] == [True, False, False, True]
    assert [step.decision is not None for step in steps] == [False, False, False, True]


@pytest.mark.parametrize("served", ["decode", "prefill"])
def test_the_stage_that_is_collected_is_the_one_that_gains(served: str) -> None:
    """Of mixed traffic whose stages have other hot experts, each does best on its own heat."""
    batches = {"decode": skewed(0, tokens=60), "prefill": skewed(4, tokens=9000)}
    scheduled = {"decode": 8, "prefill": 1024}
    makespan = {}
    for stage in ("decode", "prefill"):
        heat = CollectThenDecide(4, 1, StageFilter(stage, most_decode_tokens=8))
        loop = EplbLoop(START, heat, method="search")
        for n in range(12):
            now = ("decode", "prefill")[n % 2]
            loop.step(batches[now], scheduled[now])
        router = Router(loop.placement, objective="tokens", method="uniform")
        makespan[stage] = float(router.route(batches[served]).makespan.sum())
    other = "prefill" if served == "decode" else "decode"
    assert makespan[served] < makespan[other]


# What moves are worth


def decide(worth: Worth, tokens: NDArray[np.int64] | None = None, *, method: str = "search") -> Any:
    """Give the decision after one iteration."""
    loop = EplbLoop(START, CollectThenDecide(1, 1), method=method, worth=worth)
    return loop.step(skewed(0) if tokens is None else tokens).decision


def test_a_gain_below_the_least_changes_nothing() -> None:
    """And one at the least does; the reason is given."""
    free = decide(Worth())
    gain = 1 - free.expected.peak.sum() / free.current.peak.sum()
    assert 0.1 < gain < 0.9
    assert decide(Worth(min_gain=gain - 1e-9)).declined == ""
    declined = decide(Worth(min_gain=gain + 0.01))
    assert "by less than" in declined.declined
    assert (declined.placement, int(declined.moves.sum())) == (START, 0)


def test_layers_that_gain_too_little_stay() -> None:
    """Layer 1 is balanced but for a little, the others are not."""
    tokens = skewed(0)
    tokens[1] = [5, 5, 5, 5, 5, 5, 5, 5]
    tokens[1, 0] += 1
    decision = decide(Worth(min_layer_gain=0.3), tokens)
    assert (decision.moves > 0).tolist() == [True, False, True]
    assert decision.placement.slots[1].tolist() == START.slots[1].tolist()


@pytest.mark.parametrize("method", ["search", "deepseek"])
def test_a_budget_of_moves_is_kept(method: str) -> None:
    """By a method that heeds it, and by the choice of layers for one that does not."""
    free = decide(Worth(), method=method)
    one = int(free.moves.max())
    decision = decide(Worth(max_moves=one), method=method)
    assert 0 < decision.moves.sum() <= one < free.moves.sum()
    assert free.expected.peak.sum() < decision.expected.peak.sum() < decision.current.peak.sum()
    assert decide(Worth(max_moves=0), method=method).moves.sum() == 0


def test_moves_have_to_break_even() -> None:
    """Within the steps that they take to be repaid they are made, within fewer not."""
    tokens = skewed(0, tokens=600)

    def rule(steps: int) -> Worth:
        return Worth(break_even=BreakEven(steps, 44_040_192, "deepseek-v3-fp8"))

    assert decide(rule(100), tokens).declined == ""
    decision = decide(rule(1), tokens)
    assert "are repaid after" in decision.declined
    assert decision.placement == START
    with pytest.raises(ValueError, match="microseconds"):
        BreakEven(1, 1, "activations")


def test_sglang_counts_on_when_the_balance_is_good_enough() -> None:
    """A dump that rebalances nothing has no chunks, and the next is as many iterations later."""
    even = np.full((LAYERS, EXPERTS), 5)
    loop = EplbLoop(
        START, PeriodicDump(4, None, 2), method="search", worth=Worth(max_balancedness=0.3)
    )
    steps = [loop.step(even) for _ in range(13)]
    assert [n for n, step in enumerate(steps, 1) if step.decision is not None] == [5, 9, 13]
    assert not any(step.commits for step in steps)
    balancedness = PlacementMetrics.of(START, even.astype(float)).balancedness_sglang
    assert steps[4].decision is not None
    assert f"balancedness {balancedness:.3f} is above 0.3" in steps[4].decision.declined


def test_no_load_changes_nothing() -> None:
    """A window of dummy iterations says nothing about where experts should be."""
    decision = decide(Worth(), np.zeros((LAYERS, EXPERTS), np.int64))
    assert decision.declined == "no load was collected"


@pytest.mark.parametrize(
    "wrong",
    [{"min_gain": -0.1}, {"min_layer_gain": float("nan")}, {"max_balancedness": 2}],
)
def test_thresholds_are_fractions(wrong: dict[str, float]) -> None:
    """The message names the one that is not."""
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is .*; expected 0 to 1"):
        Worth(**wrong)  # type: ignore[arg-type]  # one of the fractions


# Static placements, logs, bad input


def test_a_recorded_map_is_served_statically(tmp_path: Path) -> None:
    """It is written when the last layer is updated, and stays where it is loaded."""
    path = tmp_path / "map.json"
    loop = EplbLoop(
        START, CollectThenDecide(1, 1), method="swift", record=path, record_format="vllm-ascend"
    )
    for _ in range(4):
        loop.step(skewed(0))
        assert not path.exists()
    loop.step(skewed(0))
    static = EplbLoop(read_placement(path, num_experts=EXPERTS), None)
    assert static.placement == loop.placement
    step = static.step(skewed(4))
    assert (step.collected, step.decision, step.commits) == (False, None, ())


def test_a_decision_is_logged_as_engine_users_search_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """PAR, current and expected, mean and largest, and by layer at level DEBUG."""
    with caplog.at_level(logging.DEBUG, logger="eplb_opt.loop"):
        decision = decide(Worth())
    now, then = decision.current, decision.expected
    assert caplog.messages[0] == (
        f"[Expert Hotness] Current: mean={now.par_mean:.3f}, max={now.par_max:.3f}, "
        f"Updated: mean={then.par_mean:.3f}, max={then.par_max:.3f}"
    )
    assert caplog.messages[3] == (
        f"[Expert Hotness] layer 2: Current: {now.par[2]:.3f}, Updated: {then.par[2]:.3f}"
    )


def test_bad_input_is_refused_at_once() -> None:
    """No layer axis, an unknown method, a record's suffix, counts of another shape."""
    with pytest.raises(InvalidPlacementError, match="layers"):
        EplbLoop(Placement([[0, 1]]), None)
    with pytest.raises(ValueError, match="unknown placement method"):
        EplbLoop(START, None, method="best")
    with pytest.raises(FormatError):
        EplbLoop(START, None, record="map.yaml", record_format="vllm-ascend")
    with pytest.raises(
        InvalidTokensError, match=r"tokens are \[2, 8\]; the placement has \[3, 8\]"
    ):
        EplbLoop(START, SlidingWindow()).step(skewed(0)[:2])
