"""Regime advice: its times are those of the routings, and its boundaries those of the formulas."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_opt.demand import count_tokens
from eplb_opt.errors import InvalidPlacementError
from eplb_opt.objective import Curve, Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.placing import solve_placement
from eplb_opt.regime import (
    CHOICES,
    RegimeMap,
    RegimeRow,
    _crossover,
    _reachable,
    _without_replicas,
    flip_batch,
    regime_map,
)
from eplb_opt.routing import solve_routing
from eplb_opt.trace import LoadTrace
from eplb_opt.workload import Workload, model_shape

MEASURED = Objective(pieces=(Piece(activation=15), Piece(token=1)), name="measured")
SMALL: dict[str, Any] = {"gpus": [4], "replication": [1.5], "objective": MEASURED}


@pytest.fixture(scope="module")
def workload() -> Workload:
    """Draw from three layers of sixteen experts, the first of them dense."""
    load = np.random.default_rng(0).integers(1, 40, (3, 16))
    load[0] = 0
    return Workload.from_load(load, top_k=2)


@pytest.fixture(scope="module")
def regimes(workload: Workload) -> RegimeMap:
    """Map a small deployment."""
    return regime_map(workload, **SMALL, tokens_per_gpu=[256, 2, 16, 64], steps=2)


# Times


def test_times_are_those_of_the_routings(workload: Workload, regimes: RegimeMap) -> None:
    """A batch is the first tokens of the largest, and every choice has the time of its routing."""
    served = replace(workload, popularity=workload.popularity[1:])
    placement = solve_placement(served.popularity, num_gpus=4, slots_per_gpu=6).placement
    lone = solve_placement(served.popularity, num_gpus=4, slots_per_gpu=4).placement
    assert (regimes.batches, regimes.layers, regimes.break_even) == (2, 2, 15)
    assert [row.tokens_per_gpu for row in regimes.rows] == [2, 16, 64, 256]
    ids = served.draw(4 * 256, 2)
    for row in regimes.rows:
        demand = count_tokens(ids[:, :, : 4 * row.tokens_per_gpu], 16)
        times = {
            "no-replicas": solve_routing(lone, demand),
            "uniform": solve_routing(placement, demand, method="uniform"),
            "metro": solve_routing(placement, demand, method="metro"),
            "token-balance": solve_routing(placement, demand, objective="tokens"),
            "makespan": solve_routing(placement, demand, objective=MEASURED, method="makespan"),
        }
        for choice, routing in zip(CHOICES, times.values(), strict=True):
            assert row.time(choice) == pytest.approx(
                MEASURED.time(routing.tokens).max(axis=-1).mean()
            )
        assert row.problems == 4
        assert row.bound <= row.makespan
        hot = demand / placement.copies > 15
        cold = (demand > 0) & ~hot
        assert row.mixed == (hot.any(axis=-1) & cold.any(axis=-1)).mean()


def test_the_best_is_the_simplest_that_is_good_enough(workload: Workload) -> None:
    """Within nothing it is the fastest, ties to the simplest; within much it has no replicas."""
    strict = regime_map(workload, **SMALL, tokens_per_gpu=[2, 64, 256], within=0)
    for row in strict.rows:
        least = min(row.time(choice) for choice in CHOICES)
        assert row.time(row.best) == least
        assert all(row.time(c) > least for c in CHOICES[: CHOICES.index(row.best)])
    loose = regime_map(workload, **SMALL, tokens_per_gpu=[2, 64, 256], within=9)
    assert {row.best for row in loose.rows} == {"no-replicas"}


def test_metro_wins_small_batches_and_token_balance_large_ones(regimes: RegimeMap) -> None:
    """What the two rules are for."""
    first, last = regimes.rows[0], regimes.rows[-1]
    assert first.metro < first.token_balance
    assert last.token_balance < last.metro
    assert last.ratio("token-balance") == pytest.approx(1)


def test_a_commanding_communication_piece_makes_token_balance_optimal(workload: Workload) -> None:
    """Where tokens always decide, the makespan optimum is the token optimum, to the last bit."""
    kernel = Objective.preset("deepseek-v2-lite-fp8")
    commanding = replace(kernel, pieces=(*kernel.pieces, Piece(offset=25, token=0.10)))
    setting: dict[str, Any] = {**SMALL, "objective": commanding, "within": 0}
    for row in regime_map(workload, **setting, tokens_per_gpu=[2, 16, 64, 256]).rows:
        assert row.makespan == row.token_balance
        assert row.proven == 1
    crossover = regime_map(workload, **setting, tokens_per_gpu=[2, 16]).crossovers[0]
    assert (crossover.below, crossover.above) == (None, 2)


@pytest.mark.parametrize("name", ["activations", "tokens"])
def test_the_pure_objectives_have_one_answer(workload: Workload, name: str) -> None:
    """Counting one thing, the search is that thing's optimum, and no batch is mixed."""
    mapped = regime_map(workload, **{**SMALL, "objective": name}, tokens_per_gpu=[4, 64])
    for row, crossover in zip(mapped.rows, mapped.crossovers * 2, strict=True):
        assert row.proven == 1
        assert row.mixed == 0
        assert row.makespan == row.bound <= min(row.metro, row.token_balance)
        assert math.isnan(crossover.flip)


def test_without_redundant_slots_all_choices_are_one(workload: Workload) -> None:
    """Nothing to choose: the simplest is best, and METRO is never slower."""
    setting = {**SMALL, "replication": [1.0]}
    mapped = regime_map(workload, **setting, tokens_per_gpu=[2, 64], within=0)
    for row in mapped.rows:
        assert len({row.time(choice) for choice in CHOICES}) == 1
        assert row.best == "no-replicas"
    assert (mapped.crossovers[0].below, mapped.crossovers[0].above) == (64, None)
    assert math.isnan(mapped.crossovers[0].tokens_per_gpu)


@pytest.mark.parametrize("gpus", [2, 3, 5])
def test_the_placement_without_replicas_has_one_of_each(workload: Workload, gpus: int) -> None:
    """Also where experts do not divide over GPUs: other slots stay empty."""
    placement = _without_replicas(replace(workload, popularity=workload.popularity[1:]), gpus)
    assert (placement.copies == 1).all()
    assert placement.num_gpus == gpus


# Traffic


def test_skew_is_zipf(workload: Workload) -> None:
    """At 0 all experts are alike; the more skew, the more time the same batch takes."""
    mapped = regime_map(
        workload, **SMALL, tokens_per_gpu=[256], skew=[0.0, 0.7, 1.4], layers=5, steps=2
    )
    assert [row.skew for row in mapped.rows] == [0.0, 0.7, 1.4]
    assert [row.problems for row in mapped.rows] == [10] * 3
    times = [row.no_replicas for row in mapped.rows]
    assert times == sorted(times)
    assert len(mapped.crossovers) == 3


def test_what_traffic_can_be(workload: Workload, tmp_path: Path) -> None:
    """A model's shape, a recording in memory or in a file, and DeepSeek-V3 if nothing is said."""
    setting: dict[str, Any] = {"gpus": [4], "replication": [1.5], "tokens_per_gpu": [4]}
    shape = regime_map(model_shape("mixtral-8x7b"), **setting, layers=3)
    assert (shape.traffic, shape.layers) == ("Mixtral-8x7B decode, synthetic", 3)
    counts = np.random.default_rng(0).integers(1, 40, (1, 3, 16))
    counts[:, 0] = 0
    np.save(tmp_path / "counts.npy", counts)
    from_file = regime_map(tmp_path / "counts.npy", **setting, top_k=2)
    assert from_file.traffic == f"{tmp_path / 'counts.npy'}, drawn from its popularity"
    in_memory = regime_map(LoadTrace(counts), **setting, top_k=2)
    assert from_file.rows == in_memory.rows == regime_map(workload, **setting).rows
    assert regime_map(**setting, layers=1).traffic == "deepseek-v3 decode, synthetic"


def test_layers_are_drawn_evenly() -> None:
    """Of 32 layers four stand for eight each; no more are drawn than there are."""
    shape = model_shape("mixtral-8x7b")
    setting: dict[str, Any] = {"gpus": [4], "replication": [1.5], "tokens_per_gpu": [4]}
    workload = Workload.preset("mixtral-8x7b")
    four = regime_map(shape, **setting, layers=4)
    same = regime_map(replace(workload, popularity=workload.popularity[::8]), **setting, layers=99)
    assert four.rows == same.rows


# Boundaries


@settings(max_examples=30)
@given(
    popularity=hnp.arrays(np.float64, (2, 16), elements=st.floats(0.1, 9)),
    gpus=st.sampled_from([4, 8]),
    activation=st.floats(0.5, 500),
)
def test_the_flip_solves_its_equation(popularity: np.ndarray, gpus: int, activation: float) -> None:
    """Put back, the boundaries of TEMPO's formulas are fixed points, layer by layer."""
    for load in popularity:
        workload = Workload.from_load([load], top_k=2)
        placement = solve_placement(
            workload.popularity, num_gpus=gpus, slots_per_gpu=24 // gpus
        ).placement
        objective = Objective(pieces=(Piece(activation=activation), Piece(token=1)))
        p, copies = _reachable(workload.popularity, 2)[0], placement.copies[0]

        def replicas(batch: float, p: Any = p, copies: Any = copies) -> float:
            return float(((1 - (1 - p) ** (batch * 2 * gpus)) * copies).sum())

        average, hottest = flip_batch(objective, workload, placement)
        for batch, factor in (
            (average, activation / (2 * gpus)),
            (hottest, activation / (2 * gpus**2 * p.max())),
        ):
            assert batch == pytest.approx(factor * replicas(batch), abs=1e-9)


def test_the_flip_of_equal_experts() -> None:
    """All live: B* = n* replicas / (K G), and the hottest E / G times as far."""
    workload = Workload.from_load(np.ones((1, 256)), top_k=8)
    placement = solve_placement(workload.popularity, num_gpus=8, slots_per_gpu=40).placement
    average, hottest = flip_batch(Objective.preset("deepseek-v3-fp8"), workload, placement)
    assert average == pytest.approx(14.78 / 0.0945 * 320 / (8 * 8))
    assert hottest == pytest.approx(average * 256 / 8)


def test_an_objective_without_break_even_has_no_flip() -> None:
    """Curves and pure counts: NaN, not a number that means something else."""
    workload = Workload.from_load(np.ones((1, 4)), top_k=2)
    placement = Placement([[[0, 1], [2, 3]]])
    curve = Objective(pieces=(Curve((1, 128), (0.0, 10.0)),))
    for objective in (Objective.preset("activations"), Objective.preset("tokens"), curve):
        assert np.isnan(flip_batch(objective, workload, placement)).all()


def test_reachable_shares_are_those_that_are_drawn() -> None:
    """A token visits an expert once: no share is above 1 / top_k, and what is over is spread."""
    share = np.array([[0.7, 0.2, 0.06, 0.04], [0.25, 0.25, 0.25, 0.25]])
    expected = [[0.5, 1 / 3, 0.1, 1 / 15], [0.25] * 4]
    np.testing.assert_allclose(_reachable(share, 2), expected)
    np.testing.assert_allclose(_reachable(share, 4), 0.25)


def row(batch: int, metro: float, balance: float) -> RegimeRow:
    """Make a row with the times of the two."""
    times = (9.0, 9.0, metro, balance, 1.0, 1.0)
    return RegimeRow(8, 64, 1.25, None, batch, 4, *times, proven=1.0, best="metro", mixed=0.5)


@pytest.mark.parametrize(
    ("ratios", "below", "above", "batch"),
    [
        ([0.5, 0.5, 2, 2], 20, 40, math.sqrt(20 * 40)),
        ([0.5, 1, 1, 2], 40, 80, 40),
        ([2, 0.5, 0.5, 2], 40, 80, math.sqrt(40 * 80)),
        ([0.5, 2, 0.5, 0.5], 80, None, math.nan),
        ([2, 2, 1, 2], None, 10, math.nan),
        ([1, 1, 1, 1], 80, None, math.nan),
    ],
)
def test_the_crossover_is_where_token_balance_takes_over_for_good(
    ratios: list[float], below: int | None, above: int | None, batch: float
) -> None:
    """Between neighbouring samples, on logarithms; none where the samples do not reach."""
    rows = [row(10 * 2**at, ratio, 1.0) for at, ratio in enumerate(ratios)]
    crossover = _crossover(rows, 1.0, 2.0)
    assert (crossover.below, crossover.above) == (below, above)
    assert crossover.tokens_per_gpu == pytest.approx(batch, nan_ok=True)
    by_batch = {r.tokens_per_gpu: r.metro for r in rows}
    if below is not None:
        assert crossover.ratio_below == by_batch[below]
    if above is not None:
        assert crossover.ratio_above == by_batch[above]


def test_times_of_nothing_are_alike() -> None:
    """A curve may give small batches no time: no division by zero, and no winner."""
    assert replace(row(1, 0.0, 0.0), makespan=0.0).ratio("metro") == 1
    assert replace(row(1, 1.0, 0.0), makespan=0.0).ratio("metro") == math.inf


# What a map writes and refuses


def test_json_and_csv_hold_the_map(regimes: RegimeMap) -> None:
    """Numbers to the last digit; what is not a number is null."""
    whole = replace(regimes, crossovers=(replace(regimes.crossovers[0], tokens_per_gpu=math.nan),))
    read = json.loads(whole.to_json())
    assert read["rows"] == [asdict(row) for row in regimes.rows]
    assert read["crossovers"][0]["tokens_per_gpu"] is None
    lines = list(csv.DictReader(io.StringIO(regimes.to_csv())))
    assert list(lines[0]) == [field.name for field in fields(RegimeRow)]
    assert [float(line["makespan"]) for line in lines] == [row.makespan for row in regimes.rows]


def test_threads_and_repetition_change_nothing(workload: Workload, regimes: RegimeMap) -> None:
    """The same map with three threads, and batches in another order."""
    seen: list[tuple[int, int]] = []
    again = regime_map(
        workload,
        **SMALL,
        tokens_per_gpu=[2, 16, 64, 256, 16],
        steps=2,
        threads=3,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert again == regimes
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"tokens_per_gpu": []}, "tokens_per_gpu must be 1 or more"),
        ({"tokens_per_gpu": [0]}, "tokens_per_gpu must be 1 or more"),
        ({"steps": 0}, "steps must be 1 or more"),
        ({"layers": 0}, "layers must be 1 or more"),
        ({"skew": []}, "no skew to try"),
        ({"skew": [-1.0]}, "a Zipf exponent is a finite number of at least 0, not -1"),
        ({"skew": [math.nan]}, "a Zipf exponent"),
        ({"within": -0.1}, "within is a share"),
        ({"gpus": []}, "no deployment to try"),
        ({"objective": "speed"}, "unknown objective"),
        ({"objective": replace(MEASURED, split=False)}, "measured forbids splitting"),
        ({"objective": replace(MEASURED, slowness=(1.0, 2.0))}, "slowness of 2 GPUs"),
    ],
)
def test_wrong_settings_are_refused(
    workload: Workload, setting: dict[str, Any], message: str
) -> None:
    """Each says what is wrong with it."""
    with pytest.raises(ValueError, match=message):
        regime_map(workload, **{**SMALL, "tokens_per_gpu": [4], **setting})


def test_redundant_slots_must_divide(workload: Workload) -> None:
    """As for the gap study."""
    with pytest.raises(InvalidPlacementError, match="19 slots do not divide over 4 GPUs"):
        regime_map(workload, gpus=[4], redundant=[3], tokens_per_gpu=[4])
