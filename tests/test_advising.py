"""Advice on traffic that is made so that the answer is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb_opt.advice import Advice, Verdict
from eplb_opt.advising import advise
from eplb_opt.batches import Batches, BatchFacts
from eplb_opt.errors import InvalidTokensError
from eplb_opt.memory import memory_per_gpu
from eplb_opt.objective import Objective, Piece
from eplb_opt.scenario import Scenario
from eplb_opt.step_time import Communication, Line, Migration, StepTime
from eplb_opt.trace import LoadTrace, StepFacts, write_trace
from eplb_opt.transfer import Links
from eplb_opt.workload import ModelShape, Workload

GPUS, EXPERTS, LAYERS, TOP_K = 4, 16, 2, 2
BOTH = Objective(pieces=(Piece(activation=15), Piece(token=0.1)), name="both")
TIME = StepTime(BOTH, decode=Line(50), prefill=Line(50))


def trace(
    shares: NDArray[np.float64],
    tokens: NDArray[np.int64] | int,
    *,
    stage: NDArray[np.str_] | str = "decode",
    seed: int = 0,
    **known: Any,
) -> LoadTrace:
    """Draw steps of so many tokens from shares [steps, experts], which every layer has."""
    rng = np.random.default_rng(seed)
    steps = len(shares)
    counts = np.empty((steps, LAYERS, EXPERTS), np.int64)
    size = np.broadcast_to(tokens, steps)
    for step in range(steps):
        chances = shares[step] / shares[step].sum()
        counts[step] = rng.multinomial(TOP_K * size[step], chances, LAYERS)
    facts = StepFacts(stage=np.broadcast_to(np.array(stage), steps), **known)
    return LoadTrace(counts, facts=facts, top_k=TOP_K)


def skewed(steps: int, first_hot: NDArray[np.intp] | int = 0) -> NDArray[np.float64]:
    """Four experts in a row, those of one GPU at the start, get three fifths of all tokens."""
    expert = (np.arange(EXPERTS) - np.broadcast_to(first_hot, steps)[:, None]) % EXPERTS
    return np.where(expert < 4, 4.5, 1.0)


@pytest.fixture(scope="module")
def skew() -> LoadTrace:
    """160 steps of prefill whose hot experts stay."""
    return trace(skewed(160), 4000, stage="prefill")


@pytest.fixture(scope="module")
def advice(skew: LoadTrace) -> Advice:
    """Advice on them, with all that can be priced."""
    links = Links(1e9, 1e9)
    return advise(
        skew,
        num_gpus=GPUS,
        time=StepTime(BOTH, Communication(8, links), prefill=Line(300), routers={"metro": 5}),
        migration=Migration(1000, links),
        model=ModelShape("tiny", LAYERS, EXPERTS, TOP_K, 100, 10),
        prefill_slo=1.0,
    )


def test_skewed_prefill_is_worth_it(advice: Advice) -> None:
    """Three fifths of the tokens on one of four GPUs take 2.4 times an even share."""
    assert advice.verdict is Verdict.YES
    assert advice.target == "prefill"
    assert advice.min_gain < advice.gain.low <= advice.gain.value <= advice.why.ceiling
    assert advice.why.par_mean == pytest.approx(2.4, abs=0.05)
    assert advice.reasons[0].startswith(f"Yes: {advice.best.label}.")
    assert advice.best.interval is None
    assert "arithmetic decides" in advice.summary()


def test_steps_are_learned_from_chosen_on_and_judged_once(advice: Advice, skew: LoadTrace) -> None:
    """The gain is the chosen deployment's on the last steps, whoever replays it."""
    parts = advice.parts
    assert (parts.learned, parts.chosen, parts.judged, parts.target) == (40, 60, 60, 60)
    batches = Batches.of(skew, tokens=1, steps=None, top_k=TOP_K)
    best, time = advice.best, StepTime(BOTH, Communication(8, Links(1e9, 1e9)), prefill=Line(300))
    times = []
    for scenario in (
        Scenario(GPUS),
        Scenario(GPUS, best.redundant, best.placer, best.stage, best.interval),
    ):
        replayed = scenario.replay(
            BatchFacts(batches, TOP_K, None), [best.router], first_step=40, time=time
        )
        times.append(replayed.rows[0].step_times)
    old, new = times
    assert advice.gain.value == pytest.approx(1 - new[60:].mean() / old[60:].mean())
    assert advice.best.gain == pytest.approx(1 - new[:60].mean() / old[:60].mean())
    assert advice.before["prefill p99"] == pytest.approx(np.percentile(old[60:], 99) / 1e3)


def test_the_ladder_sums_to_the_gain(advice: Advice) -> None:
    """Placement, slots, router and updates, one after the other."""
    assert sum(advice.why.ladder.values()) == pytest.approx(advice.gain.value)
    assert advice.why.ladder["placement"] > 0.1
    assert sum(advice.why.shares.values()) == pytest.approx(1)


def test_costs_are_told(advice: Advice) -> None:
    """Memory is that of the slots; the first moves are repaid by what a step saves."""
    model = ModelShape("tiny", LAYERS, EXPERTS, TOP_K, 100, 10)
    with_slots = memory_per_gpu(model, GPUS, 4, moves=False).total
    extra = with_slots - memory_per_gpu(model, GPUS, moves=False).total
    assert {c.memory for c in advice.candidates if c.redundant == 4 and not c.interval} == {extra}
    costs = advice.costs
    assert costs.first_move is not None
    assert costs.repaid_in == pytest.approx(
        costs.first_move / (advice.before["prefill mean"] - advice.after["prefill mean"])
    )
    assert costs.migration == 0
    assert advice.before["prefill within SLO"] < advice.after["prefill within SLO"] == 1


def test_all_figures_are_written(advice: Advice) -> None:
    """As JSON without a figure that is not finite."""
    content = json.loads(advice.to_json())
    assert content["verdict"] == "yes"
    assert content["gain"]["value"] == advice.gain.value
    assert len(content["candidates"]) == len(advice.candidates)
    assert content["reasons"] == list(advice.reasons)


def test_the_best_candidates_come_first(advice: Advice) -> None:
    """And each is there once: two without slots, six with, for each of three intervals."""
    gains = [candidate.gain for candidate in advice.candidates]
    assert gains == sorted(gains, reverse=True)
    labels = {candidate.label for candidate in advice.candidates}
    assert len(labels) == len(gains) == 3 * (2 + 2 * 2 * 3)


def test_prefill_that_drifts_is_placed_anew() -> None:
    """Popularity is another every 80 steps: a placement that stays is soon wrong."""
    rng = np.random.default_rng(3)
    drifting = trace(
        np.repeat(rng.lognormal(0, 1, (6, EXPERTS)), 80, axis=0), 4000, stage="prefill"
    )
    found = advise(
        drifting,
        num_gpus=GPUS,
        time=TIME,
        redundant=[0, 4],
        placers=["search"],
        methods=["uniform"],
        intervals=[None, 10, 180],
    )
    assert found.verdict is Verdict.YES
    assert found.best.interval == 10
    assert found.why.ladder["updates"] > 0.1
    assert "placing anew every 10 steps +" in found.summary()


def test_uniform_traffic_is_not_worth_it() -> None:
    """All experts alike: nothing to balance but chance, which no placement knows."""
    found = advise(
        trace(np.ones((160, EXPERTS)), 40_000, stage="prefill"), num_gpus=GPUS, time=TIME
    )
    assert found.verdict is Verdict.NO
    assert found.reasons[0].startswith("No: ")


def test_a_communication_bound_deployment_is_not_worth_it(skew: LoadTrace) -> None:
    """Experts are tiny, and every GPU gathers all tokens, wherever they go."""
    tiny = Objective(pieces=(Piece(token=1e-5),), name="tiny")
    gather = Communication(7168, Links(1e9, 1e9), "all-gather")
    found = advise(skew, num_gpus=GPUS, time=StepTime(tiny, gather), intervals=[None])
    assert found.verdict is Verdict.NO
    assert found.why.ceiling < found.min_gain
    assert found.why.shares["communication"] > 0.99
    assert "even perfect balance would lower the mean prefill time by 0.0 %" in found.reasons[0]
    assert "communication-bound" in found.summary()


def test_a_deployment_that_waits_for_the_rest_is_not_worth_it(skew: LoadTrace) -> None:
    """Attention takes a second."""
    found = advise(skew, num_gpus=GPUS, time=StepTime(BOTH, prefill=Line(1e6)), intervals=[None])
    assert found.verdict is Verdict.NO
    assert "bound by the rest" in found.summary()


def test_decode_is_routed_by_activated_replicas() -> None:
    """Copies under the equal split activate more and lose; a router that activates few gains."""
    decode = trace(np.ones((240, EXPERTS)), 10)
    asked: Any = {"num_gpus": GPUS, "time": TIME, "redundant": [8], "intervals": [None]}
    found = advise(decode, **asked)
    assert found.verdict is Verdict.YES
    assert found.best.router in ("metro", "makespan")
    assert max(c.gain for c in found.candidates if c.router == "uniform") < 0
    assert found.why.ladder["redundancy"] < 0 < found.why.ladder["router"]
    assert "reading weights decides" in found.summary()
    assert "every copy of a live expert is activated" in found.summary()

    even = advise(decode, methods=["uniform"], **asked)
    assert even.verdict is Verdict.NO
    assert even.gain.high < 0
    assert " more mean decode time" in even.reasons[0]


def test_each_stage_is_best_served_by_its_own_load() -> None:
    """Decode and prefill have other hot experts, and prefill has nearly all tokens."""
    prefill = np.arange(320) % 4 == 0
    decodes, prefills = np.random.default_rng(2).lognormal(0, 1, (2, EXPERTS))
    mixed = trace(
        np.where(prefill[:, None], prefills, decodes),
        np.where(prefill, 20_000, 500),
        stage=np.where(prefill, "prefill", "decode"),
    )
    tokens = StepTime(Objective(pieces=(Piece(token=0.1),), name="tokens in µs"))
    asked: Any = {"num_gpus": GPUS, "time": tokens, "methods": ["uniform"], "intervals": [None]}
    asked |= {"redundant": [0], "placers": ["search"]}
    for target in ("decode", "prefill"):
        found = advise(mixed, target=target, **asked)
        assert found.verdict is Verdict.YES
        gains = {c.stage: c.gain for c in found.candidates}
        assert set(gains) == {"all", "decode", "prefill"}
        assert found.best.gain > min(gains.values()) + 0.1
        assert found.best.stage == ("decode" if target == "decode" else "all")
    decode = advise(mixed, **asked)
    assert decode.target == "decode"
    assert decode.best.gain > gains["decode"]
    assert set(decode.gains) == {"decode mean", "prefill mean"}
    together = advise(mixed, target="all", **asked)
    assert together.parts.target == together.parts.judged


def test_a_warm_up_is_left_out() -> None:
    """Twelve steps whose tokens all go to two experts come before 160 that are skewed."""
    dummy = np.zeros((12, EXPERTS))
    dummy[:, :2] = 1
    warmed = trace(np.concatenate([dummy, skewed(160)]), 4000, stage="prefill")
    found = advise(warmed, num_gpus=GPUS, time=TIME, methods=["uniform"], intervals=[None])
    assert (found.parts.warm_up, found.parts.learned) == (12, 40)
    assert any("the first 12 steps" in note for note in found.notes)


def test_many_steps_are_screened() -> None:
    """Of 1,600 steps 256 are looked at first, then three deployments are replayed in full."""
    long = trace(skewed(1600), 4000, stage="prefill")
    calls: list[tuple[int, int]] = []
    found = advise(
        long,
        num_gpus=GPUS,
        time=TIME,
        methods=["uniform"],
        intervals=[None],
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(n, 9) for n in range(1, 10)]
    assert sorted(c.steps for c in found.candidates) == [256] * 3 + [600] * 3
    assert found.best.steps == 600
    assert found.gains["prefill mean"] == found.gain
    assert found.gains["prefill p99"].low > 0.1


def test_only_what_is_asked_for_is_tried(skew: LoadTrace) -> None:
    """One placer, one number of slots, always anew; what is asked twice is tried once."""
    found = advise(
        skew, num_gpus=GPUS, time=TIME, redundant=[4, 4], placers=["swift"], intervals=[30]
    )
    tried = {(c.redundant, c.placer, c.interval) for c in found.candidates}
    assert tried == {(4, "swift", 30)}
    assert [c.router for c in found.candidates].count("uniform") == 1
    assert set(found.why.ladder) >= {"placement", "redundancy", "updates"}


def test_what_is_drawn_says_so() -> None:
    """Counts of one step are drawn from; what is drawn does not change."""
    one = LoadTrace(skewed(1)[:, None].astype(np.int64) * 10)
    found = advise(one, num_gpus=GPUS, time=TIME, top_k=TOP_K, tokens=400)
    assert found.traffic.endswith("drawn from its popularity")
    assert "nothing of how traffic varies" in found.summary()
    assert {c.interval for c in found.candidates} == {None}
    assert sum((found.parts.learned, found.parts.chosen, found.parts.judged)) == 64


def test_few_steps_cannot_tell() -> None:
    """The answer is how many more to record."""
    few = trace(np.where(np.arange(EXPERTS) < 4, 1.1, 1.0) * np.ones((40, 1)), 100)
    tokens = StepTime(Objective(pieces=(Piece(token=0.1),), name="tokens in µs"))
    found = advise(few, num_gpus=GPUS, time=tokens, redundant=[0], intervals=[None])
    assert found.verdict is Verdict.UNCLEAR
    assert found.more_steps is not None
    assert 100 < found.more_steps < 4000
    assert found.reasons[0].startswith("Too close to call with 40 steps")
    assert all(rule.agrees is None for rule in found.rules)


def test_rules_of_thumb_are_held_against_the_trace(advice: Advice) -> None:
    """Four experts on a GPU speak against EPLB, and are wrong; 1,000 tokens speak for it."""
    experts, tokens, prompts = advice.rules
    assert (experts.value, experts.against, experts.agrees) == (4, True, False)
    assert (tokens.value, tokens.against, tokens.agrees) == (1000, False, True)
    assert (prompts.value, prompts.against, prompts.agrees) == (1000, True, False)
    assert advice.summary().count("the trace disagrees") == 2


def test_experts_that_do_not_divide_start_with_the_fewest_slots() -> None:
    """16 experts on 6 GPUs need two slots more, with and without EPLB."""
    found = advise(
        trace(skewed(80), 4000, stage="prefill"),
        num_gpus=6,
        time=TIME,
        methods=["uniform"],
        intervals=[None],
        placers=["search"],
    )
    assert {c.redundant for c in found.candidates} == {2, 8, 14}


def test_counts_of_one_gpu_are_detected() -> None:
    """Of its experts: refused. Of its tokens: told, for a quarter of those scheduled is counted."""
    own = trace(np.eye(EXPERTS)[:4].sum(axis=0) * np.ones((80, 1)), 100)
    with pytest.raises(InvalidTokensError, match="only experts 0 to 3 of 16 have tokens"):
        advise(own, num_gpus=GPUS, time=TIME)
    part = trace(skewed(80), 100, scheduled=np.full(80, 400))
    found = advise(part, num_gpus=GPUS, time=TIME, methods=["uniform"], intervals=[None])
    assert any("counts are 1/4 of the scheduled tokens" in note for note in found.notes)


@pytest.mark.parametrize(
    ("traffic", "given", "problem"),
    [
        (trace(skewed(15), 100), {}, "15 steps are too few"),
        (trace(skewed(80), 100), {"learn": 1.0}, "learn is 1.0"),
        (trace(skewed(80), 100), {"target": "prefill"}, "none has tokens of stage prefill"),
        (trace(skewed(80), 100), {"model": "mixtral-8x7b"}, "has 8 experts, the traffic 16"),
        (trace(skewed(80), 100), {"placers": ["best"]}, "unknown placement method 'best'"),
        (trace(skewed(80), 100), {"redundant": [3]}, "do not divide over 4 GPUs"),
    ],
)
def test_what_cannot_be_advised_on_is_refused(
    traffic: LoadTrace, given: dict[str, Any], problem: str
) -> None:
    """The message says why."""
    with pytest.raises(ValueError, match=problem):
        advise(traffic, num_gpus=GPUS, time=TIME, **given)


def test_a_recording_on_disk_is_the_same(skew: LoadTrace, tmp_path: Path) -> None:
    """Its path is the traffic's name."""
    write_trace(skew, tmp_path / "prefill")
    asked: Any = {"num_gpus": GPUS, "time": TIME, "methods": ["uniform"], "intervals": [None]}
    read, held = advise(tmp_path / "prefill", **asked), advise(skew, **asked)
    assert read.traffic == str(tmp_path / "prefill")
    assert read.gain == held.gain
    assert read.candidates == held.candidates


def test_synthetic_traffic_has_its_own_name() -> None:
    """Batches are drawn, and methods that need top-k ids are told that there are none."""
    traffic = Workload.from_load(skewed(1), TOP_K)
    with pytest.raises(InvalidTokensError, match="vllm-hash needs topk_ids"):
        advise(traffic, num_gpus=GPUS, time=TIME, methods=["vllm-hash"], tokens=64, steps=16)
