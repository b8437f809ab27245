"""The optimality-gap study: its numbers are those of `solve_routing`, whatever the traffic."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from eplb_opt import batches
from eplb_opt.demand import count_tokens
from eplb_opt.errors import EplbError, InvalidPlacementError, InvalidTokensError
from eplb_opt.formats.recording import TraceWriter
from eplb_opt.gap import GapRow, GapStudy, default_methods, optimality_gap
from eplb_opt.objective import Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.placing import solve_placement
from eplb_opt.routers import Flow, Matching, Traits, Uniform, finish
from eplb_opt.routers.base import Solve
from eplb_opt.routing import Routing, solve_routing
from eplb_opt.stopping import TimeLimit
from eplb_opt.trace import LoadTrace, TokenTrace
from eplb_opt.workload import Workload

Ids = npt.NDArray[np.int32]

DEFAULT_METHODS = default_methods(Objective.preset("activations"))
MEASURED = Objective(pieces=(Piece(activation=3), Piece(token=1)), name="measured")

SMALL: dict[str, Any] = {"gpus": [4], "replication": [1.5], "tokens": 6, "steps": 3}


@pytest.fixture(scope="module")
def workload() -> Workload:
    """Draw from three layers of sixteen experts, the first of them dense."""
    load = np.random.default_rng(0).integers(1, 40, (3, 16))
    load[0] = 0
    return Workload.from_load(load, top_k=2)


@pytest.fixture(scope="module")
def ids(workload: Workload) -> Ids:
    """Forty batches of six tokens, [steps, layers, rows, k]."""
    return workload.draw(6, 40)


def token_trace(ids: Ids) -> TokenTrace:
    """Make a trace whose batches of six are those ids."""
    tokens = ids.swapaxes(1, 2).reshape(-1, ids.shape[1], ids.shape[3])
    return TokenTrace(tokens, 16, np.zeros(len(tokens), dtype=np.int64))


def placed(load: npt.ArrayLike, gpus: int = 4, per_gpu: int = 6) -> Placement:
    """Place the load as the study does."""
    return solve_placement(load, num_gpus=gpus, slots_per_gpu=per_gpu).placement


def without_times(study: GapStudy) -> list[GapRow]:
    """Leave out what differs from run to run."""
    return [dataclasses.replace(row, microseconds=0.0) for row in study.rows]


def assert_row_is(row: GapRow, routing: Routing, best: Routing, placement: Placement) -> None:
    """Check a row against the routings that it sums up."""
    of_each = (routing.makespan / best.makespan - 1).ravel()
    assert row.problems == of_each.size
    assert row.gap_mean == pytest.approx(of_each.mean())
    percentiles = np.percentile(of_each, [50, 95, 99, 100])
    assert [row.gap_p50, row.gap_p95, row.gap_p99, row.gap_max] == pytest.approx(percentiles)
    assert row.makespan == pytest.approx(routing.makespan.mean())
    assert row.optimum == pytest.approx(best.makespan.mean())
    summary = routing.summary()
    assert row.activated == pytest.approx(summary.replicas_activated)
    assert row.tokens_per_activated == pytest.approx(summary.tokens_per_activated)
    assert row.live_experts == pytest.approx(summary.live_experts)
    assert row.replicas_available == pytest.approx(summary.replicas_available)
    tokens = routing.expert_tokens()
    total = (tokens > 0).sum(axis=-1) if routing.objective.name == "activations" else tokens.sum(-1)
    assert row.even == pytest.approx(total.mean() / placement.num_gpus)
    assert row.microseconds > 0


# Laws


@pytest.mark.parametrize("objective", ["activations", "tokens"])
def test_no_method_beats_the_optimum(workload: Workload, objective: str) -> None:
    """The optimum has no gap anywhere, and no method a negative one."""
    study = optimality_gap(
        workload, gpus=[2, 4], replication=[1, 1.5], tokens=6, steps=3, objective=objective
    )
    assert len(study.rows) == 2 * 2 * len(DEFAULT_METHODS)
    for row in study.rows:
        assert row.problems == 3 * 2
        assert 0 <= row.gap_mean <= row.gap_max
        assert row.gap_p50 <= row.gap_p95 <= row.gap_p99 <= row.gap_max
        assert row.optimum >= row.even
        assert row.optimum_proven == 1
        assert row.gap_beyond_idle == pytest.approx(row.makespan / row.optimum - 1)
        assert row.exact == row.proven == (row.method == "optimal")
        if row.method == "optimal":
            assert row.gap_max == 0
            assert row.makespan == row.optimum


def test_replicas_only_help_the_optimum(workload: Workload) -> None:
    """Without redundancy all methods are one; with it the optimum falls."""
    study = optimality_gap(workload, gpus=[4], replication=[1, 1.5, 2], tokens=6, steps=5)
    by_ratio = {row.replication: row.optimum for row in study.rows}
    assert [row.gap_max for row in study.rows if row.replication == 1] == [0] * 9
    assert by_ratio[1] > by_ratio[1.5] >= by_ratio[2]


def test_long_traffic_is_routed_in_parts(
    ids: Ids, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty steps in parts of 32 give what they give at once; so do drawn ones."""
    # Those that draw random numbers anew at every call are left out.
    methods = [method for method in DEFAULT_METHODS if method not in ("random", "nearest")]
    setting: dict[str, Any] = {**SMALL, "steps": 40, "methods": methods}
    for traffic in (token_trace(ids), workload, LoadTrace(count_tokens(ids, 16))):
        if isinstance(traffic, LoadTrace):
            setting["methods"] = ["optimal", "metro", "uniform"]
        monkeypatch.setattr(batches, "_STEPS_AT_ONCE", 32)
        in_parts = optimality_gap(traffic, **setting)
        monkeypatch.setattr(batches, "_STEPS_AT_ONCE", 40)
        at_once = optimality_gap(traffic, **setting)
        assert without_times(in_parts) == without_times(at_once)
        assert in_parts.rows[0].problems == 80


def test_threads_change_nothing(workload: Workload) -> None:
    """The same answers with one thread and with three."""
    one, three = (optimality_gap(workload, **SMALL, threads=threads) for threads in (1, 3))
    assert without_times(one) == without_times(three)


def test_progress_counts_to_the_total(workload: Workload) -> None:
    """Steps times methods times deployments, and never backwards."""
    seen: list[tuple[int, int]] = []
    optimality_gap(
        workload,
        **{**SMALL, "gpus": [2, 4], "steps": 40},
        methods=["optimal", "metro"],
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (2 * 2 * 40, 2 * 2 * 40)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# Any objective


def test_a_measured_objective_is_compared_with_the_proven_bound(workload: Workload) -> None:
    """`makespan` is the reference where no optimum is proven for sure; all are priced alike."""
    setting: dict[str, Any] = {**SMALL, "tokens": 24, "objective": MEASURED}
    study = optimality_gap(workload, **setting)
    assert study.reference == "makespan"
    assert [row.method for row in study.rows] == list(default_methods(MEASURED))
    rows = {row.method: row for row in study.rows}
    demand = count_tokens(workload.draw(24, 3), 16)[:, 1:]
    placement = placed(workload.popularity[1:])
    for method, objective in (("matching", "activations"), ("flow", "tokens")):
        routing = solve_routing(placement, demand, objective=objective)
        time = MEASURED.time(routing.tokens).max(axis=-1)
        assert rows[method].makespan == pytest.approx(time.mean())
        assert (rows[method].exact, rows[method].proven) == (False, 0)
        assert rows["makespan"].makespan <= rows[method].makespan
    assert all(row.gap_mean >= 0 for row in study.rows)
    assert 0 < rows["makespan"].optimum_proven <= 1
    assert np.isnan([row.even for row in study.rows]).all()


def test_a_bound_that_an_engine_proves_is_used(workload: Workload) -> None:
    """An engine that proves every problem leaves no doubt of the optimum, for all methods."""
    pytest.importorskip("highspy")
    setting: dict[str, Any] = {**SMALL, "tokens": 24, "objective": MEASURED}
    study = optimality_gap(workload, **setting, methods=["metro", "highs"])
    metro, highs = study.rows
    assert (metro.optimum_proven, highs.proven) == (1, 1)
    assert highs.gap_max == 0


def test_offsets_are_told_apart(workload: Workload) -> None:
    """What every GPU takes without tokens makes gaps small; beyond it they are what they were."""
    offset = replace(MEASURED, pieces=(Piece(offset=50, activation=3), Piece(offset=50, token=1)))
    # With work enough to prove every optimum: how far bounds get in less depends on the offset.
    setting: dict[str, Any] = {**SMALL, "tokens": 24, "methods": ["metro", "makespan:work=20000"]}
    plain, idle = (
        optimality_gap(workload, **setting, objective=objective) for objective in (MEASURED, offset)
    )
    assert (plain.idle, idle.idle) == (0, 50)
    before, after = plain.rows[0], idle.rows[0]
    assert (before.optimum_proven, after.optimum_proven) == (1, 1)
    assert after.makespan == pytest.approx(before.makespan + 50)
    assert after.gap_mean < before.gap_mean
    assert after.gap_beyond_idle == pytest.approx(before.gap_beyond_idle)


def test_the_optimum_of_one_objective_under_the_other(workload: Workload) -> None:
    """Token balance is a rule when activations are counted, and its gap is no error."""
    study = optimality_gap(workload, **SMALL, methods=["flow", "optimal"])
    flow, optimal = study.rows
    assert flow.gap_mean > optimal.gap_mean == 0
    assert not flow.exact


# Replay


@pytest.mark.parametrize("objective", ["activations", "tokens"])
@pytest.mark.parametrize("method", ["metro", "uniform", "vllm-hash", "rank-mod"])
def test_a_token_trace_is_replayed(ids: Ids, objective: str, method: str) -> None:
    """Consecutive rows share a GPU; every number follows from the routings."""
    trace = token_trace(ids)
    study = optimality_gap(trace, **SMALL, methods=[method], objective=objective)
    placement = placed(trace.load()[1:])
    served = ids[:3, 1:]
    by_gpu = np.full((3, 2, 4, 2, 2), -1)
    for gpu, rows in enumerate([[0, 1], [2], [3, 4], [5]]):
        by_gpu[:, :, gpu, : len(rows)] = served[:, :, rows]
    tokens = count_tokens(served, 16)
    routing = solve_routing(placement, tokens, objective=objective, method=method, topk_ids=by_gpu)
    best = solve_routing(placement, tokens, objective=objective)
    (row_of_study,) = study.rows
    assert_row_is(row_of_study, routing, best, placement)
    assert (study.batches, study.layers, study.tokens_per_batch) == (3, 2, 6)
    assert (study.objective, row_of_study.method) == (objective, method)


def test_counts_of_several_steps_are_replayed(ids: Ids) -> None:
    """Each step of a load trace is a batch, the dense layer left out, all of them by default."""
    tokens = count_tokens(ids, 16)
    trace = LoadTrace(tokens.astype(np.int32))
    study = optimality_gap(trace, gpus=[4], replication=[1.5], methods=["metro"])
    placement = placed(trace.load()[1:])
    served = np.ascontiguousarray(tokens[:, 1:])
    routing = solve_routing(placement, served, method="metro")
    assert_row_is(study.rows[0], routing, solve_routing(placement, served), placement)
    assert (study.batches, study.layers, study.tokens_per_batch) == (40, 2, None)
    assert optimality_gap(trace, **{**SMALL, "steps": 7}, methods=["metro"]).batches == 7


def test_a_recording_is_replayed_from_its_files(ids: Ids, tmp_path: Path) -> None:
    """Counts in parts give the study of the same counts in memory, over their borders too."""
    pytest.importorskip("safetensors")
    counts = count_tokens(ids, 16)
    with TraceWriter(tmp_path, steps_per_file=7) as writer:
        for step in counts:
            writer.append(step)
    setting: dict[str, Any] = {"gpus": [4], "replication": [1.5], "methods": ["metro"]}
    recorded = optimality_gap(tmp_path, **setting)
    rows = [replace(row, microseconds=0.0) for row in recorded.rows]
    in_memory = optimality_gap(LoadTrace(counts), **setting)
    assert rows == [replace(row, microseconds=0.0) for row in in_memory.rows]


def test_more_steps_than_recorded_are_refused(ids: Ids) -> None:
    """Counts and ids alike: fewer batches than asked for are no answer."""
    for trace, message in (
        (LoadTrace(count_tokens(ids, 16)), "the trace has 40 steps; 41 wanted"),
        (token_trace(ids), "40 complete batches of 6; 41 wanted"),
    ):
        with pytest.raises(InvalidTokensError, match=message):
            optimality_gap(trace, **{**SMALL, "steps": 41})


def test_counts_alone_do_not_serve_every_method(ids: Ids) -> None:
    """A method that depends on ids says so, by name."""
    trace = LoadTrace(count_tokens(ids, 16))
    with pytest.raises(InvalidTokensError, match="vllm-hash needs topk_ids"):
        optimality_gap(trace, **SMALL, methods=["vllm-hash"])


def test_one_step_of_counts_is_drawn_from(workload: Workload) -> None:
    """A recorded load is popularity: the study equals that of the workload made from it."""
    load = np.random.default_rng(0).integers(1, 40, (3, 16))
    load[0] = 0
    study = optimality_gap(LoadTrace(load[np.newaxis]), **SMALL, top_k=2)
    assert without_times(study) == without_times(optimality_gap(workload, **SMALL))
    assert "drawn from its popularity" in study.traffic


def test_default_traffic_is_drawn() -> None:
    """Without traffic: DeepSeek-V3's 58 layers, and the seed makes the batches."""
    setting: dict[str, Any] = {"gpus": [8], "replication": [1.25], "steps": 1, "methods": ["metro"]}
    study = optimality_gap(**setting)
    assert (study.layers, study.tokens_per_batch, study.rows[0].problems) == (58, 32, 58)
    assert without_times(study) == without_times(optimality_gap(**setting))
    assert without_times(study) != without_times(optimality_gap(**setting, seed=1))


# Deployments


def test_the_placement_can_be_made_for_other_traffic(ids: Ids, workload: Workload) -> None:
    """A load, a trace or a workload to place on; each gives the placement of its load."""
    other = np.random.default_rng(1).integers(1, 40, (3, 16))
    trace = LoadTrace(other[np.newaxis])
    tokens = count_tokens(ids[:3, 1:], 16)
    for place_on, load in ((other[1:], other[1:]), (workload, workload.popularity[1:])):
        study = optimality_gap(token_trace(ids), **SMALL, methods=["uniform"], place_on=place_on)
        placement = placed(load)
        routing = solve_routing(placement, tokens, method="uniform")
        assert_row_is(study.rows[0], routing, solve_routing(placement, tokens), placement)
    with pytest.raises(InvalidTokensError, match=r"shape \(2, 16\)"):  # one layer too few
        optimality_gap(trace, **SMALL, top_k=2, place_on=other[1:])


def test_layers_to_place_on_are_those_of_the_traffic(ids: Ids) -> None:
    """As many layers as the traffic has: each is taken for the same one, whichever are empty."""
    other = np.random.default_rng(1).integers(1, 40, (3, 16))
    gap_of_layers = []
    for load in (other, other * np.array([[1], [1], [0]])):  # the traffic has no tokens in layer 0
        for place_on in (load, LoadTrace(load[np.newaxis])):
            study = optimality_gap(
                token_trace(ids), **SMALL, methods=["uniform"], place_on=place_on
            )
            placement = placed(load[1:])
            tokens = count_tokens(ids[:3, 1:], 16)
            routing = solve_routing(placement, tokens, method="uniform")
            assert_row_is(study.rows[0], routing, solve_routing(placement, tokens), placement)
            gap_of_layers.append(study.rows[0].gap_mean)
    assert len(set(gap_of_layers)) == 2
    study = optimality_gap(
        token_trace(ids), **SMALL, methods=["metro"], draft_layers=1, place_on=other
    )
    placement = placed(other[1:2])
    tokens = count_tokens(ids[:3, 1:2], 16)
    routing = solve_routing(placement, tokens, method="metro")
    assert_row_is(study.rows[0], routing, solve_routing(placement, tokens), placement)


def test_what_is_no_load_to_place_on_is_refused(ids: Ids) -> None:
    """A list of layers that is none, and a load that is not finite."""
    for place_on, message in (([1, 2, 3], "shape"), (np.full((3, 16), np.nan), "layer 0")):
        with pytest.raises(InvalidTokensError, match=message):
            optimality_gap(token_trace(ids), **SMALL, place_on=place_on)


def test_slots_fill_every_gpu(workload: Workload) -> None:
    """A ratio is rounded up to whole slots per GPU; a number of redundant slots is kept."""
    study = optimality_gap(workload, gpus=[3, 5], replication=[1.25], tokens=6, steps=1)
    assert {(row.gpus, row.redundant) for row in study.rows} == {(3, 5), (5, 4)}
    assert {row.replication for row in study.rows} == {21 / 16, 20 / 16}
    study = optimality_gap(workload, gpus=[2, 4], redundant=[0, 8], tokens=6, steps=1)
    assert [row.redundant for row in study.rows[:: len(DEFAULT_METHODS)]] == [
        0,
        8,
        0,
        8,
    ]


def test_a_deployment_is_tried_once(workload: Workload) -> None:
    """Ratios that come to the same slots per GPU are one deployment."""
    study = optimality_gap(workload, gpus=[4], replication=[1.1, 1.25], methods=["metro"], steps=1)
    assert [row.redundant for row in study.rows] == [4]


def test_draft_layers_are_left_out(workload: Workload, ids: Ids) -> None:
    """The last layers are as if the traffic did not have them, drawn or replayed."""
    study = optimality_gap(workload, **SMALL, methods=["metro"], draft_layers=1)
    assert (study.layers, study.rows[0].problems) == (1, study.batches)
    whole = LoadTrace(count_tokens(ids, 16))
    shorter = LoadTrace(whole.tokens[:, :2])
    left_out = optimality_gap(whole, gpus=[4], replication=[1.5], draft_layers=1)
    assert without_times(left_out) == without_times(
        optimality_gap(shorter, gpus=[4], replication=[1.5])
    )


def test_redundant_slots_must_divide(workload: Workload) -> None:
    """The error names the nearest counts of slots that do."""
    with pytest.raises(InvalidPlacementError, match="19 slots do not divide over 4 GPUs; 16 or 20"):
        optimality_gap(workload, gpus=[4], redundant=[3])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"replication": [0.5]}, "at least 1"),
        ({"replication": [float("nan")]}, "at least 1"),
        ({"replication": [float("inf")]}, "at least 1"),
        ({"gpus": [0]}, "at least 1"),
        ({"draft_layers": 3}, "the traffic has 3 layers"),
        ({"tokens": 0}, "at least 1"),
        ({"steps": 0}, "at least 1"),
        ({"gpus": []}, "no deployment to try"),
        ({"replication": []}, "no deployment to try"),
        ({"redundant": []}, "no deployment to try"),
        ({"methods": ["metr0"]}, "unknown method"),
        ({"methods": []}, r"methods is \[\]; expected a list"),
        ({"methods": "metro"}, "methods is 'metro'; expected a list"),
        ({"objective": "speed"}, "unknown objective"),
        ({"methods": [Flow()]}, "solves tokens"),
        ({"placer": "none"}, "unknown placement method"),
    ],
)
def test_wrong_settings_are_refused(
    workload: Workload, setting: dict[str, Any], message: str
) -> None:
    """Each says what is wrong with it."""
    with pytest.raises(ValueError, match=message):
        optimality_gap(workload, **{**SMALL, **setting})


# Methods of one's own


@dataclass(frozen=True)
class Renamed:
    """A user's method: the optimum under another name."""

    traits: ClassVar[Traits] = Matching.traits

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Route as the optimal method does."""
        return Matching().bind(placement, objective, threads)


def test_instances_are_methods(workload: Workload) -> None:
    """A user's method stands in the study under its repr."""
    study = optimality_gap(workload, **SMALL, methods=[Renamed(), "metro"])
    assert [row.method for row in study.rows] == ["Renamed()", "metro"]
    assert study.rows[0].gap_max == 0


# What a study writes


def test_answers_that_were_not_proven_are_told(workload: Workload) -> None:
    """An engine stopped at once keeps what it started from, no worse than METRO, not all proven."""
    pytest.importorskip("highspy")
    study = optimality_gap(workload, **SMALL, methods=["highs", "metro"], stop=TimeLimit(0.0))
    engine, metro = study.rows
    assert (engine.exact, engine.unsolved) == (True, 0)
    assert engine.proven < 1
    assert engine.gap_mean <= metro.gap_mean


def test_json_holds_the_whole_study(workload: Workload) -> None:
    """Reading it back gives the study."""
    study = optimality_gap(workload, **SMALL)
    read = json.loads(study.to_json())
    rows = tuple(GapRow(**row) for row in read.pop("rows"))
    assert GapStudy(**read, rows=rows) == study


def test_problems_without_an_answer_are_counted(workload: Workload) -> None:
    """An engine that is stopped at once leaves a row of nothing, which JSON says as null."""
    pytest.importorskip("highspy")
    study = optimality_gap(
        workload, **SMALL, methods=["highs:warm_start=false", "metro"], stop=TimeLimit(0.0)
    )
    engine, metro = study.rows
    assert (engine.problems, engine.unsolved) == (0, metro.problems)
    assert np.isnan([engine.gap_mean, engine.makespan, engine.activated, engine.proven]).all()
    assert (engine.exact, metro.exact) == (True, False)
    assert engine.microseconds > 0
    assert metro.unsolved == 0
    assert json.loads(study.to_json())["rows"][0]["gap_mean"] is None


def test_csv_holds_the_rows(workload: Workload) -> None:
    """A header and a line per row, numbers to the last digit."""
    study = optimality_gap(workload, **SMALL)
    read = list(csv.DictReader(io.StringIO(study.to_csv())))
    names = [field.name for field in dataclasses.fields(GapRow)]
    assert list(read[0]) == names
    for text, row in zip(read, study.rows, strict=True):
        assert text["method"] == row.method
        assert text["exact"] == str(row.exact)
        for name in names:
            if name not in ("method", "exact"):
                assert float(text[name]) == getattr(row, name)


# Real files


@pytest.mark.parametrize("name", ["decode_in2000out100", "prefill_in512"])
def test_deepseek_statistics(shared_data: Path, name: str) -> None:
    """Methods come in the order that recorded traffic gives, on SGLang's published counts."""
    path = shared_data / "sglang_deepseek_v3" / f"{name}.json"
    study = optimality_gap(path, gpus=[16], replication=[1.5], steps=3)
    gaps = {row.method: row.gap_mean for row in study.rows}
    assert study.layers == 58
    assert study.traffic == f"{path}, drawn from its popularity"
    assert 0 == gaps["optimal"] < gaps["metro:order=single-copy-first"] < gaps["metro"]
    assert gaps["metro"] < min(gaps[m] for m in DEFAULT_METHODS[3:])


def test_placing_on_the_other_stage_is_worse(shared_data: Path) -> None:
    """Decode traffic, tokens balanced by the optimum: a placement made on prefill counts loses."""
    folder = shared_data / "sglang_deepseek_v3"
    decode, prefill = (folder / f"{name}.json" for name in ("decode_in2000out100", "prefill_in512"))
    setting: dict[str, Any] = {
        "gpus": [32],
        "replication": [1.125],
        "tokens": 512,
        "steps": 1,
        "objective": "tokens",
        "methods": ["optimal"],
    }
    own, other = (optimality_gap(decode, place_on=on, **setting) for on in (decode, prefill))
    assert own.rows[0].makespan < other.rows[0].makespan


def test_gpt_oss_routes(shared_data: Path) -> None:
    """The recorded ids of gpt-oss replay under every default method."""
    path = shared_data / "gpt_oss_20b" / "routes.npz"
    study = optimality_gap(path, gpus=[8], replication=[1.5], tokens=64, steps=20)
    assert (study.layers, study.batches) == (24, 20)
    assert min(row.gap_mean for row in study.rows[1:]) > 0


# What a study refuses


class Splits:
    """A method that splits experts and does not say so."""

    traits: ClassVar[Traits] = Traits("splits")

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Route as `uniform` does."""
        return Uniform().bind(placement, objective, threads)


def test_a_method_that_splits_is_exposed(workload: Workload) -> None:
    """Where experts must stay whole, the default methods keep them so, and others are refused."""
    whole = replace(MEASURED, split=False)
    assert set(default_methods(whole)) < set(default_methods(MEASURED))
    setting: dict[str, Any] = {**SMALL, "tokens": 64, "objective": whole}
    study = optimality_gap(workload, **setting)
    assert [row.method for row in study.rows] == list(default_methods(whole))
    with pytest.raises(ValueError, match="uniform solves any with split only, not measured"):
        optimality_gap(workload, **setting, methods=["uniform"])
    exposed = "splits an expert's tokens|less than the proven optimum"
    for method in ("flow", Splits()):
        with pytest.raises(EplbError, match=exposed):
            optimality_gap(workload, **setting, methods=[method])


class Loses:
    """A method that serves nothing."""

    traits: ClassVar[Traits] = Traits("serves nothing")

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Leave every slot without tokens."""
        return lambda tokens, out, _: finish(out, np.zeros_like(out.tokens))


def test_a_method_below_the_optimum_is_exposed(workload: Workload) -> None:
    """What is less than the proven optimum cannot serve every token: no row is made of it."""
    with pytest.raises(EplbError, match="less than the proven optimum"):
        optimality_gap(workload, **SMALL, methods=[Loses()])
    with pytest.raises(EplbError, match="less than the proven bound"):
        solve_routing(Placement([[0, 1], [0, 2]]), [3, 1, 1], method=Loses())


def test_wrong_counts_are_named_by_step_and_layer(ids: Ids) -> None:
    """In the numbers of the trace, dense layers and earlier steps included."""
    counts = count_tokens(ids, 16)
    counts[35, 2, 5] = 2**39
    with pytest.raises(InvalidTokensError, match="step 35, layer 2, expert 5 has 549755813888"):
        optimality_gap(LoadTrace(counts), gpus=[4], replication=[1.5], methods=["metro"])


def test_bare_counts_are_no_traffic() -> None:
    """An array does not say what its axes are: the error names what does."""
    with pytest.raises(TypeError, match="make a LoadTrace"):
        optimality_gap(np.ones((2, 3, 16), int))  # type: ignore[arg-type]
