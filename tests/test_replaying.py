"""Replay: what steps take against a price by hand, as placements change; stages and tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from eplb_opt import replaying
from eplb_opt.batches import Batches, BatchFacts
from eplb_opt.errors import EplbError, InvalidPlacementError, InvalidTokensError
from eplb_opt.heat import CollectThenDecide, SlidingWindow, StageFilter
from eplb_opt.loop import EplbLoop
from eplb_opt.objective import Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.placing import solve_placement
from eplb_opt.replaying import ReplayRow, StageTimes, Stale, replay
from eplb_opt.routers.quotas import Quotas
from eplb_opt.routing import solve_routing
from eplb_opt.scenario import Scenario
from eplb_opt.step_time import Communication, Line, Migration, StepTime
from eplb_opt.trace import LoadTrace, StepFacts, TokenTrace, write_trace
from eplb_opt.transfer import Links, plan_transfer

KERNEL = Objective(pieces=(Piece(activation=10), Piece(token=1)), name="kernel")
TIME = StepTime(KERNEL)
LAYERS, EXPERTS = 3, 8
PLACEMENT = Placement([[[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 4, 2]]] * LAYERS)


def counts(steps: int, seed: int = 0, most: int = 12) -> npt.NDArray[np.int64]:
    """Draw tokens [steps, layers, experts], some experts without any."""
    return np.random.default_rng(seed).integers(0, most, (steps, LAYERS, EXPERTS)) // 3 * 3


def decode(row: ReplayRow) -> StageTimes:
    """Return a row's decode steps, which must be there."""
    assert row.decode is not None
    return row.decode


def test_a_step_is_the_sum_of_its_layers_slowest_gpus() -> None:
    """Each method's answer is priced by the same objective, whatever it minimises itself."""
    tokens = counts(40)
    methods = ("uniform", "metro", "matching", "flow", "makespan")
    answer = replay(LoadTrace(tokens), PLACEMENT, methods, time=TIME)
    for row in answer.rows:
        own: Any = {"matching": "activations", "flow": "tokens"}.get(row.method, KERNEL)
        routed = solve_routing(PLACEMENT, tokens, objective=own, method=row.method)
        makespan = KERNEL.time(routed.tokens).max(axis=-1)
        assert row.step_times == pytest.approx(makespan.sum(axis=-1))
        assert row.layer_times == pytest.approx(makespan.mean(axis=0))
        assert decode(row).mean == pytest.approx(makespan.sum(axis=-1).mean() / 1e3)
        assert decode(row).slowest_gpu == pytest.approx(makespan.mean())
        assert decode(row).activated == pytest.approx(routed.activated.sum(axis=-1).mean())
    best = decode(answer.row("makespan")).mean
    assert all(decode(row).mean >= best for row in answer.rows)


def test_all_parts_of_a_step_are_in_its_time() -> None:
    """Dispatch and combine, the router's own time, and the rest by stage add up."""
    tokens = counts(10)
    time = StepTime(
        KERNEL,
        Communication(1000, Links(1e9, 1e9, 2), latency=2),
        decode=Line(100, 1),
        prefill=Line(1000, 2),
        routers={"metro": 7},
    )
    stage = np.array(["decode", "prefill"] * 5)
    scheduled = np.arange(10) * 4
    facts = StepFacts(stage=stage, scheduled=scheduled)
    answer = replay(LoadTrace(tokens, facts=facts, top_k=2), PLACEMENT, ["metro"], time=time)
    routed = solve_routing(PLACEMENT, tokens, objective=KERNEL, method="metro")
    assert time.communication is not None
    moving = time.communication.time(routed.gpu_tokens(), np.zeros((10, LAYERS)))
    rest = np.where(stage == "decode", 100 + scheduled / 4, 1000 + 2 * scheduled / 4)
    wanted = routed.makespan.sum(axis=-1) + moving.sum(axis=-1) + 7 * LAYERS + rest
    row = answer.rows[0]
    assert row.step_times == pytest.approx(wanted)
    assert row.prefill is not None
    assert row.prefill.rest == pytest.approx(rest[1::2].mean() / 1e3)
    for times in (decode(row), row.prefill):
        parts = (times.experts, times.communication, times.router, times.rest, times.migration)
        assert sum(parts) == pytest.approx(times.mean)
    once = tokens.sum(axis=-1).max(axis=-1) / 2
    assert row.tokens_per_second == pytest.approx(1e6 * once.sum() / wanted.sum())


def test_percentiles_and_slos_are_of_a_stage() -> None:
    """The steps of the other stage do not count."""
    tokens = counts(30)
    facts = StepFacts(scheduled=np.where(np.arange(30) % 3 == 0, 500, 5))
    answer = replay(
        LoadTrace(tokens, facts=facts),
        PLACEMENT,
        ["uniform"],
        time=TIME,
        most_decode_tokens=5,
        slo=0.1,
        prefill_slo=0,
    )
    assert answer.stages.tolist() == [1, 0, 0] * 10
    row = answer.rows[0]
    of_stage = row.step_times[answer.stages == 0] / 1e3
    times = decode(row)
    assert times.steps == 20
    assert [times.p50, times.p95, times.p99] == np.percentile(of_stage, [50, 95, 99]).tolist()
    assert times.within_slo == (of_stage <= 0.1).mean()
    assert row.prefill is not None
    assert row.prefill.within_slo == 0


def test_a_loops_placements_take_over_when_its_cycle_says() -> None:
    """A step is served on the placement before the commits at its end, and pays for the moves."""
    tokens = counts(30, seed=3, most=40)
    migration = Migration(1_000_000, Links(1e9, 1e9, 4))

    def loop() -> EplbLoop:
        return EplbLoop(PLACEMENT, CollectThenDecide(4, 2), method="search")

    answer = replay(LoadTrace(tokens), loop(), ["makespan"], time=TIME, migration=migration)
    again, wanted, moves = loop(), [], 0
    decided = []
    for step, batch in enumerate(tokens):
        before = again.placement
        routed = solve_routing(before, batch, objective=KERNEL, method="makespan")
        happened = again.step(batch, 0)
        if happened.decision is not None:
            decided.append(step)
        plan = plan_transfer(before, again.placement, 1_000_000, links=migration.links)
        moves += len(plan.layer)
        wanted.append(routed.makespan.sum() + 1e6 * plan.seconds)
    assert answer.rows[0].step_times == pytest.approx(np.array(wanted))
    assert [told.step for told in answer.decisions] == decided
    assert len(decided) > 1
    assert answer.moves == moves > 0
    assert answer.placement == again.placement


def test_overlapped_moves_take_what_does_not_fit_beside_the_step() -> None:
    """Links carry tokens or weights: the step's other time is what moves can hide behind."""
    tokens = counts(20, seed=3, most=40)
    time = StepTime(KERNEL, Communication(1000, Links(1e9, 1e9, 4)))
    rows = []
    for overlapped in (False, True):
        loop = EplbLoop(PLACEMENT, SlidingWindow(4, 4), method="search")
        migration = Migration(100_000, Links(1e9, 1e9, 4), overlapped)
        answer = replay(LoadTrace(tokens), loop, ["flow"], time=time, migration=migration)
        rows.append(answer.rows[0].step_times)
    still = replay(LoadTrace(tokens), PLACEMENT, ["flow"], time=time).rows[0].step_times
    stopped, beside = rows
    first = 0  # vLLM's first interval is a quarter: the first step's end moves weights
    routed = solve_routing(PLACEMENT, tokens[first], objective="tokens")
    moving = time.communication_of("flow")
    assert moving is not None
    sent = moving.time(routed.gpu_tokens(), np.zeros(LAYERS)).sum()
    transfer = stopped[first] - still[first]
    assert transfer > 0
    hidden = max(0.0, transfer - (still[first] - sent))
    assert beside[first] - still[first] == pytest.approx(hidden)


def test_a_stale_table_is_that_of_the_window_before() -> None:
    """The first one is of the steps before the first that is served, as many as there are."""
    tokens = counts(13, seed=5, most=30)
    methods: list[Any] = [Stale("flow", 4), "flow"]
    answer = replay(LoadTrace(tokens), PLACEMENT, methods, time=TIME, first_step=3)
    wanted = []
    for step, batch in enumerate(tokens[3:]):
        end = 3 + step // 4 * 4
        window = tokens[max(0, end - 4) : end]
        mean = np.maximum(-(-window.sum(axis=0) // len(window)), 1)
        table = solve_routing(PLACEMENT, mean, objective="tokens").tokens
        routed = solve_routing(PLACEMENT, batch, objective=KERNEL, method=Quotas(table))
        wanted.append(routed.makespan.sum())
    stale, fresh = answer.rows
    assert stale.method == "flow, stale 4"
    assert stale.step_times == pytest.approx(np.array(wanted))
    assert decode(fresh).mean < decode(stale).mean


def test_a_table_without_steps_before_it_counts_all_experts_alike() -> None:
    """An expert without a replica is left out of it."""
    slots = [[[0, 1, 2], [3, 4, 5], [6, 0, -1], [1, 4, 2]]] * LAYERS
    tokens = counts(3)
    tokens[..., 7] = 0
    placement = Placement(slots, EXPERTS, allow_missing=True)
    answer = replay(LoadTrace(tokens), placement, [Stale("flow", 5)], time=TIME)
    table = solve_routing(placement, [[1] * 7 + [0]] * LAYERS, objective="tokens").tokens
    routed = solve_routing(placement, tokens, objective=KERNEL, method=Quotas(table))
    assert answer.rows[0].step_times == pytest.approx(routed.makespan.sum(axis=-1))


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int) -> None:
    """Parts come back in their order, with a loop and a table beside."""
    tokens = counts(100, seed=7, most=40)
    rows = [
        replay(
            LoadTrace(tokens),
            EplbLoop(PLACEMENT, SlidingWindow(8, 8), method="search"),
            ["metro", Stale("makespan", 6)],
            time=TIME,
            migration=Migration(1000),
            threads=count,
        ).rows
        for count in (1, threads)
    ]
    for one, other in zip(*rows, strict=True):
        assert one.step_times.tolist() == other.step_times.tolist()


def test_recorded_sources_decide_what_travels() -> None:
    """Counts by source give rules their sources, and dispatch what it really carries."""
    by_source = np.zeros((4, LAYERS, 4, EXPERTS), np.int64)
    by_source[:, :, 0, 3] = 100  # all tokens are on GPU 0, and expert 3 is on GPU 1 alone
    trace = LoadTrace.from_sources(by_source, top_k=1)
    time = StepTime(KERNEL, Communication(500, Links(1e9, 1e9, 4)))
    answer = replay(trace, PLACEMENT, ["nearest", "rank-mod", "flow"], time=time)
    for row in answer.rows:
        assert decode(row).communication == pytest.approx(LAYERS * 100 * 2000 / 1e9 * 1e3)


def test_a_replica_near_its_tokens_saves_the_way() -> None:
    """Sources in two nodes: each keeps its tokens, though the shares alone do not say so."""
    by_source = np.zeros((2, LAYERS, 4, EXPERTS), np.int64)
    by_source[:, :, [0, 2], 0] = 60  # expert 0 sits on GPUs 0 and 2, which are nodes apart
    time = StepTime(KERNEL, Communication(500, Links(1e9, 1e8, 2)))
    known = LoadTrace.from_sources(by_source, top_k=1)
    unknown = LoadTrace(by_source.sum(axis=2), top_k=1)
    answers = [replay(t, PLACEMENT, ["uniform"], time=time) for t in (known, unknown)]
    near, spread = (decode(answer.rows[0]).communication for answer in answers)
    assert near == 0
    assert spread == pytest.approx(LAYERS * 60 / 2 * 2000 / 1e8 * 1e3)


def test_local_batches_are_sources_too() -> None:
    """Rows are cut over the GPUs, and dispatched from there."""
    ids = np.repeat([0, 3, 6, 4], 5)[:, None, None].repeat(LAYERS, axis=1)
    trace = TokenTrace(ids, EXPERTS, np.zeros(20, np.int64))
    time = StepTime(KERNEL, Communication(500, Links(1e9, 1e9, 4)))
    answer = replay(trace, PLACEMENT, ["flow"], time=time, tokens=20)
    # The tokens of GPUs 0 to 2 are served there; expert 4 is on GPUs 1 and 3, 5 tokens of GPU 3.
    assert decode(answer.rows[0]).communication == 0


def test_each_method_has_its_exchange() -> None:
    """METRO gathers all tokens, whatever it routes; the others' go to their experts."""
    tokens = counts(6)
    moving = Communication(1000, Links(1e9, 1e9, 4))
    time = StepTime(KERNEL, moving, exchanges={"metro": "all-gather"})
    answer = replay(LoadTrace(tokens, top_k=3), PLACEMENT, ["metro", "flow"], time=time)
    gathered, sent = (decode(row).communication for row in answer.rows)
    batch = tokens.sum(axis=-1).max(axis=-1) / 3
    assert gathered == pytest.approx((batch * 3 / 4 * 4000 / 1e9 * 1e3).mean() * LAYERS)
    routed = solve_routing(PLACEMENT, tokens, objective="tokens")
    fullest = routed.gpu_tokens().max(axis=-1).sum(axis=-1)
    assert sent == pytest.approx((fullest * 3 / 4 * 4000 / 1e9 * 1e3).mean())


def test_what_a_stage_counts_is_counted_by_hand() -> None:
    """Live experts, their replicas, those activated, tokens of each, and tokens per second."""
    tokens = np.zeros((2, LAYERS, EXPERTS), np.int64)
    tokens[:, :, 0] = 6  # two replicas
    tokens[1, :, 3] = 3  # one replica
    answer = replay(LoadTrace(tokens, top_k=3), PLACEMENT, ["uniform"], time=TIME)
    times = decode(answer.rows[0])
    assert times.live_experts == 1.5
    assert times.replicas_available == 2.5
    assert times.activated == 2.5
    assert times.tokens_per_activated == (6 + 9) / 5
    assert times.slowest_gpu == 10
    assert times.tokens_per_second == pytest.approx(1e6 * (2 + 3) / 60)


def test_a_loop_is_told_the_tokens_that_were_scheduled() -> None:
    """Padding makes a step prefill to the engine, whatever it holds."""
    facts = StepFacts(scheduled=np.array([64, 8] * 8))
    loop = EplbLoop(PLACEMENT, SlidingWindow(4, 4, StageFilter("decode", 8)), method="search")
    answer = replay(LoadTrace(counts(16, most=40), facts=facts), loop, ["flow"], time=TIME)
    assert [told.step for told in answer.decisions] == [1, 9]


def test_a_recording_on_disk_and_ids_are_replayed(tmp_path: Any) -> None:
    """Files, token traces and drawn batches are taken as they are elsewhere."""
    tokens = counts(70, most=20)
    write_trace(LoadTrace(tokens, top_k=2), tmp_path / "steps")
    from_disk = replay(tmp_path / "steps", PLACEMENT, ["makespan"], time=TIME)
    in_memory = replay(LoadTrace(tokens, top_k=2), PLACEMENT, ["makespan"], time=TIME)
    assert from_disk.rows[0].step_times.tolist() == in_memory.rows[0].step_times.tolist()
    ids = np.random.default_rng(1).integers(0, EXPERTS, (60, LAYERS, 2))
    trace = TokenTrace(ids, EXPERTS, np.zeros(60, np.int64))
    answer = replay(trace, PLACEMENT, ["vllm-hash", "nearest"], time=TIME, tokens=20)
    assert answer.steps == 3


def test_memory_does_not_grow_with_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most threads + 1 parts are in memory, whatever the number of steps."""
    alive = most = 0

    def parts(self: Any, begin: int, end: int) -> Any:
        nonlocal alive, most
        for part in course(self, begin, end):
            alive += 1
            most = max(most, alive)
            yield part

    added = replaying._Answers.add

    def add(self: Any, *given: Any) -> None:
        nonlocal alive
        alive -= 1
        added(self, *given)

    course = replaying._Course.parts
    monkeypatch.setattr(replaying._Course, "parts", parts)
    monkeypatch.setattr(replaying._Answers, "add", add)
    replay(LoadTrace(counts(1000)), PLACEMENT, ["flow"], time=TIME, threads=2)
    assert alive == 0
    assert most <= 3


def test_a_worker_that_fails_ends_the_replay() -> None:
    """Errors of a part come out of threads as they are."""
    tokens = counts(100)
    tokens[70, 1, 2] = -1
    for threads in (1, 2):
        with pytest.raises(InvalidTokensError, match="step 70, layer 1, expert 2 has -1 tokens"):
            replay(LoadTrace(tokens), PLACEMENT, ["flow"], time=TIME, threads=threads)


def test_what_cannot_be_replayed_is_refused() -> None:
    """Layers that the placement lacks, steps that are none, ids where counts alone are there."""
    trace = LoadTrace(counts(4))
    with pytest.raises(InvalidPlacementError, match="3 layers of 8 experts, the traffic 2 of 8"):
        replay(LoadTrace(counts(4)[:, :2]), PLACEMENT, time=TIME)
    with pytest.raises(InvalidPlacementError, match=r"needs slots \[layers, gpus, slots\]"):
        replay(trace, Placement(PLACEMENT.slots[0]), time=TIME)
    with pytest.raises(ValueError, match="first_step is 4; there are steps 0 to 3 to serve"):
        replay(trace, PLACEMENT, time=TIME, first_step=4)
    with pytest.raises(InvalidTokensError, match="vllm-hash needs topk_ids"):
        replay(trace, PLACEMENT, ["vllm-hash"], time=TIME)
    with pytest.raises(ValueError, match="unknown method 'no-such'"):
        replay(trace, PLACEMENT, ["no-such"], time=TIME)
    with pytest.raises(ValueError, match="window is 0"):
        Stale("flow", 0)
    with pytest.raises(KeyError, match="'metro' was not replayed"):
        replay(trace, PLACEMENT, ["flow"], time=TIME).row("metro")


def test_an_input_is_not_written_to_and_idle_steps_are_served() -> None:
    """A dummy iteration has no tokens, and takes the rest alone."""
    tokens = counts(5)
    tokens[2] = 0
    kept = tokens.copy()
    time = StepTime(KERNEL, Communication(10, latency=5), decode=Line(50))
    answer = replay(LoadTrace(tokens), PLACEMENT, time=time)
    assert (tokens == kept).all()
    assert all(row.step_times[2] == 50 for row in answer.rows)


def facts_of(tokens: npt.NDArray[np.int64], **known: Any) -> BatchFacts:
    """Return a trace's batches with what is known of its steps."""
    trace = LoadTrace(tokens, facts=StepFacts(**known), top_k=2)
    return BatchFacts(Batches.of(trace, tokens=1, steps=None, top_k=2), 2, None)


def test_a_scenario_places_on_what_was_collected_and_serves_the_rest() -> None:
    """The steps before the first one served decide, those of its stage alone."""
    tokens = counts(40, seed=9, most=40)
    stage = np.array(["decode", "prefill"] * 20)
    facts = facts_of(tokens, stage=stage)
    scenario = Scenario(4, 4, "search", stage="prefill")
    answer = scenario.replay(facts, ["uniform"], first_step=10, time=TIME)
    load = tokens[:10][stage[:10] == "prefill"].sum(axis=0)
    placed = solve_placement(load, num_gpus=4, slots_per_gpu=3, method="search").placement
    assert answer.placement == placed
    assert (answer.first_step, answer.steps, answer.redundant) == (10, 30, 4)


def test_a_scenario_without_placer_serves_experts_in_order() -> None:
    """Expert p mod E sits in physical slot p, as engines start."""
    scenario = Scenario(4, 4)
    start = scenario.start(facts_of(counts(2)).collect(0, 0, "all"))
    assert start.expert_of[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]


def test_a_scenarios_loop_collects_its_stage_by_the_largest_decode_step() -> None:
    """Engines tell stages by scheduled tokens: labels say where the line is."""
    tokens = counts(40, seed=9, most=40)
    stage = np.array(["decode", "prefill"] * 20)
    scheduled = np.where(stage == "decode", 16, 300)
    facts = facts_of(tokens, stage=stage, scheduled=scheduled)
    collected = facts.collect(0, 10, "decode")
    assert collected.decode_limit == 16
    scenario = Scenario(4, 4, "search", "decode", interval=5)
    loop = scenario.loop(scenario.start(collected), collected)
    steps = zip(tokens[:4], scheduled.tolist(), strict=False)
    assert [loop.step(t, ran).collected for t, ran in steps] == [True, False, True, False]


def test_where_no_stage_is_known_every_step_is_decode() -> None:
    """A loop that collects decode takes all steps, and one that collects prefill is refused."""
    collected = facts_of(counts(10)).collect(0, 10, "decode")
    assert (collected.steps, collected.decode_limit) == (10, None)
    loop = Scenario(4, 4, "search", "decode", interval=2).loop(PLACEMENT, collected)
    assert all(loop.step(tokens, 10**6).collected for tokens in counts(4))
    with pytest.raises(ValueError, match="give most_decode_tokens"):
        Scenario(4, 4, "search", "prefill", interval=2).loop(PLACEMENT, collected)


def test_a_routing_aware_loop_is_told_the_mean_batch() -> None:
    """Methods that place for a router get tokens per batch from the window."""
    facts = facts_of(counts(24, seed=2, most=8))
    scenario = Scenario(4, 4, "routing-aware", interval=8)
    answer = scenario.replay(facts, ["matching"], first_step=8, time=TIME)
    assert len(answer.decisions) == 2


def test_what_a_scenario_lacks_is_told() -> None:
    """Stages, intervals, steps to learn from, slots that do not divide."""
    facts = facts_of(counts(10), stage=np.array(["decode"] * 10))
    with pytest.raises(ValueError, match="no stage is called 'both'"):
        Scenario(4, stage="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="interval is 0"):
        Scenario(4, interval=0)
    with pytest.raises(InvalidTokensError, match="no step of stage prefill was collected"):
        Scenario(4, 4, "search", "prefill").replay(facts, first_step=5, time=TIME)
    with pytest.raises(ValueError, match="a loop needs a placer and an interval"):
        Scenario(4, 4, interval=3).replay(facts, first_step=5, time=TIME)
    with pytest.raises(EplbError, match="divide"):
        Scenario(4, 3).replay(facts, first_step=5, time=TIME)
