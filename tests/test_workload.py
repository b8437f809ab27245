"""Synthetic traffic: laws of the generator, and its statistics against recorded traffic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_opt import workload as module
from eplb_opt.errors import InvalidTokensError
from eplb_opt.trace import TokenTrace, read_trace
from eplb_opt.workload import MODEL_SHAPES, Workload, model_shape

LOAD = [[900, 50, 0, 20, 400, 30], [0, 0, 0, 0, 0, 0], [7, 8, 9, 8, 7, 9]]


def independent(workload: Workload) -> Workload:
    """Tokens that have nothing in common but popularity."""
    return replace(workload, correlation=0.0)


def visited(ids: npt.NDArray[np.int32], experts: int) -> npt.NDArray[np.bool_]:
    """Which experts each token visits, bool [..., tokens, experts]."""
    mask = np.zeros((*ids.shape[:-1], experts), dtype=np.bool_)
    np.put_along_axis(mask, ids, True, axis=-1)
    return mask


def live(workload: Workload, tokens: int, steps: int = 4) -> float:
    """Live experts in a batch, mean over layers and steps."""
    ids = workload.draw(tokens, steps)
    return float(visited(ids, workload.popularity.shape[1]).any(axis=-2).sum(axis=-1).mean())


def peaks(popularity: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Largest load over the mean: least, median and most over layers."""
    return np.asarray(np.quantile(popularity.max(axis=1) / popularity.mean(axis=1), [0, 0.5, 1]))


def recorded_load(folder: Path, name: str) -> npt.NDArray[np.int64]:
    """Read one of the DeepSeek-V3 recordings: 61 layers, of which the first three are dense."""
    path = folder / "sglang_deepseek_v3" / f"{name}.json"
    return np.array(json.loads(path.read_text())["logical_count"], dtype=np.int64)


# --- model shapes ---


def test_every_preset_has_traffic_of_its_own_shape() -> None:
    """Each model's batches have its layers and its top-k of its experts."""
    for name, shape in MODEL_SHAPES.items():
        workload = Workload.preset(name)
        assert workload.popularity.shape == (shape.layers, shape.experts)
        ids = workload.draw(3)
        assert ids.shape == (1, shape.layers, 3, shape.top_k)
        assert (visited(ids, shape.experts).sum(axis=-1) == shape.top_k).all()


def test_a_model_is_found_in_any_case_and_an_unknown_one_lists_the_known() -> None:
    """Names ignore case; the error for an unknown name is a list to choose from."""
    assert model_shape("DeepSeek-V3") is MODEL_SHAPES["deepseek-v3"]
    with pytest.raises(ValueError, match=r"'gpt-2'.*deepseek-v3.*mixtral-8x7b"):
        model_shape("gpt-2")
    with pytest.raises(ValueError, match=r"'train'.*decode, prefill"):
        Workload.preset("deepseek-v3", "train")  # type: ignore[arg-type]


# --- laws of drawing ---


@pytest.mark.parametrize("drift", [0.0, 0.3])
@pytest.mark.parametrize(("generation_tokens", "generation_steps"), [(1, 4), (3, 1), (64, 320)])
def test_a_batch_depends_on_seed_and_step_alone(
    drift: float, generation_tokens: int, generation_steps: int
) -> None:
    """Ten steps at once are five and five, and fewer rows are the first rows of more."""
    workload = Workload.from_load(
        LOAD,
        top_k=2,
        drift=drift,
        generation_tokens=generation_tokens,
        generation_steps=generation_steps,
    )
    whole = workload.draw(16, 10)
    np.testing.assert_array_equal(whole[:5], workload.draw(16, 5))
    np.testing.assert_array_equal(whole[5:], workload.draw(16, 5, first_step=5))
    np.testing.assert_array_equal(whole[:, :, :7], workload.draw(7, 10))
    assert (replace(workload, seed=1).draw(16, 10) != whole).any()
    assert (whole[1:] != whole[:-1]).any()


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is the same whether layers are drawn together or one by one."""
    workload = Workload.preset("gpt-oss-20b", "prefill")
    together = workload.draw(8, 2)
    monkeypatch.setattr(module, "_BLOCK", 1)
    np.testing.assert_array_equal(together, workload.draw(8, 2))


@given(
    load=st.lists(
        st.lists(st.integers(0, 2**40) | st.floats(1e-3, 1e200), min_size=5, max_size=5),
        min_size=1,
        max_size=3,
    ),
    top_k=st.integers(1, 5),
    correlation=st.sampled_from([0.0, 0.5, 1.0]),
    drift=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=100, deadline=None)
def test_a_token_visits_distinct_experts_that_have_load(
    load: list[list[float]], top_k: int, correlation: float, drift: float
) -> None:
    """Every token picks top_k different experts with load; a dense layer only -1."""
    counts = np.array(load, dtype=np.float64)
    some = np.count_nonzero(counts, axis=1)
    if ((some > 0) & (some < top_k)).any():
        with pytest.raises(InvalidTokensError, match=r"layer \d+\] has \d experts.*top_k=\d"):
            Workload.from_load(counts, top_k)
        return
    ids = Workload.from_load(counts, top_k, correlation=correlation, drift=drift).draw(6, 2)
    for layer, row in enumerate(counts):
        drawn = np.sort(ids[:, layer], axis=-1)
        if not row.any():
            assert (drawn == -1).all()
        else:
            assert (row[drawn] > 0).all()
            assert (np.diff(drawn, axis=-1) > 0).all()


@pytest.mark.parametrize(
    ("model", "worst"), [("gpt-oss-20b", 0.01), ("qwen3-30b", 0.01), ("mixtral-8x7b", 0.04)]
)
@pytest.mark.parametrize("correlation", [0.0, 0.47])
def test_visits_are_proportional_to_popularity(
    model: str, worst: float, correlation: float
) -> None:
    """The hottest quarter of the experts gets its share of visits, at any correlation."""
    workload = replace(Workload.preset(model), correlation=correlation)
    experts = workload.popularity.shape[1]
    hot = workload.popularity.argsort(axis=1)[:, -experts // 4 :]
    visits = visited(workload.draw(3000), experts)[0].mean(axis=1)
    seen = np.take_along_axis(visits, hot, axis=1).sum(axis=1)
    wanted = np.take_along_axis(workload.popularity * workload.top_k, hot, axis=1).sum(axis=1)
    assert abs(seen / wanted - 1).mean() < worst


def test_a_share_above_one_visit_per_token_is_drawn_as_one() -> None:
    """An expert with more than 1 / top_k of the load is in every token, the rest in proportion."""
    workload = Workload.from_load([[900, *[20] * 9, *[10] * 20]], top_k=5, correlation=0.0)
    visits = visited(workload.draw(20_000), 30)[0, 0].mean(axis=0)
    wanted = 4 * np.array([20] * 9 + [10] * 20) / 380
    assert visits[0] == 1
    np.testing.assert_allclose(visits[1:], wanted, atol=0.01)


# --- generations ---


def test_tokens_of_one_generation_share_experts() -> None:
    """More correlation, fewer live experts in 32 tokens of one generation; none, no difference."""
    mixed = Workload.preset("deepseek-v3")
    one = replace(mixed, generation_tokens=32, generation_steps=1)
    counts = [live(replace(one, correlation=share), 32) for share in (0.0, 0.2, 0.47, 1.0)]
    assert counts[0] == pytest.approx(live(mixed, 32), rel=0.02)
    assert counts[0] > 1.1 * counts[1] > 1.2 * counts[2]
    assert counts[3] == 8


def test_a_decode_row_stays_in_its_generation_until_another_takes_over() -> None:
    """A row repeats experts from step to step, less once its generation has ended."""
    workload = replace(Workload.preset("deepseek-v3"), generation_steps=10)
    mask = visited(workload.draw(32, 11), 256)
    shared = (mask[:1] & mask[1:]).sum(axis=-1).mean(axis=(1, 2)) / 8
    assert shared[0] > 3 * shared[-1]
    assert (np.diff(shared) < 0.02).all()  # one row after the other


# --- drift ---


def test_without_drift_popularity_stays() -> None:
    """Popularity a thousand steps on is the same array."""
    workload = Workload.preset("deepseek-v3")
    assert workload.popularity_at(1000) is workload.popularity


def test_drift_moves_the_hot_experts_slowly() -> None:
    """Most of the 16 hottest stay over ten steps, fewer over a thousand; the skew stays."""
    workload = replace(Workload.preset("deepseek-v3"), drift=0.005)

    def hot(step: int) -> npt.NDArray[np.bool_]:
        popularity = workload.popularity_at(step)
        return visited(popularity.argsort(axis=1)[:, -16:].astype(np.int32)[:, None], 256)[:, 0]

    after = [(hot(0) & hot(lag)).sum(axis=1).mean() / 16 for lag in (10, 100, 1000)]
    assert after[0] > 0.9 > after[1] > after[2] > 0.5
    later = workload.popularity_at(1000)
    np.testing.assert_allclose(later.sum(axis=1), 1)
    np.testing.assert_allclose(peaks(later), peaks(workload.popularity), rtol=0.35)
    logs = np.log(workload.popularity_at(0)), np.log(later)
    agree = [np.corrcoef(*pair)[0, 1] for pair in zip(*logs, strict=True)]
    assert np.mean(agree) == pytest.approx(0.9, abs=0.03)


def test_batches_follow_the_drift() -> None:
    """Visits at a step are closer to that step's popularity than to where it started."""
    workload = replace(independent(Workload.preset("qwen3-30b")), drift=0.01)
    visits = visited(workload.draw(2000, first_step=500), 128)[0].mean(axis=1) / 8
    away = [abs(visits - workload.popularity_at(step)).sum() for step in (500, 0)]
    assert away[0] < 0.4 * away[1]


# --- statistics of recorded traffic ---


@pytest.mark.parametrize(
    ("model", "stage", "peak", "live_32", "live_128"),
    [
        ("deepseek-v3", "decode", (2.6, 5.8, 10.5), 141.8, 232.2),
        ("deepseek-v3", "prefill", (4.0, 8.2, 13.4), 132.9, 221.6),
        ("gpt-oss-20b", "decode", (1.95, 2.48, 3.92), 26.8, 30.5),
    ],
)
def test_presets_have_the_tail_and_the_body_of_recorded_traffic(
    model: str, stage: module.Stage, peak: tuple[float, ...], live_32: float, live_128: float
) -> None:
    """Per-layer peaks and live experts are those of the recordings, for any seed."""
    workload = independent(Workload.preset(model, stage, seed=7))
    np.testing.assert_allclose(peaks(workload.popularity), peak, rtol=0.01)
    assert live(workload, 32) == pytest.approx(live_32, rel=0.03)
    assert live(workload, 128) == pytest.approx(live_128, rel=0.01)


def test_what_is_hot_on_decode_tends_to_be_hot_on_prefill() -> None:
    """The two stages of one seed agree as recordings do; two seeds have nothing in common."""
    decode = Workload.preset("deepseek-v3", "decode", seed=3)
    for seed, agreement in ((3, 0.8), (4, 0.0)):
        prefill = Workload.preset("deepseek-v3", "prefill", seed=seed)
        logs = np.log(decode.popularity), np.log(prefill.popularity)
        agree = [np.corrcoef(*pair)[0, 1] for pair in zip(*logs, strict=True)]
        assert np.mean(agree) == pytest.approx(agreement, abs=0.03)


@pytest.mark.parametrize(
    ("stage", "name"), [("decode", "decode_in2000out100"), ("prefill", "prefill_in4096")]
)
def test_presets_match_the_deepseek_recordings(
    shared_data: Path, stage: module.Stage, name: str
) -> None:
    """Peaks, shares by rank and live experts of preset and recording agree."""
    recorded = independent(Workload.from_load(recorded_load(shared_data, name)[3:], top_k=8))
    preset = independent(Workload.preset("deepseek-v3", stage))
    np.testing.assert_allclose(peaks(preset.popularity), peaks(recorded.popularity), rtol=0.005)
    by_rank = [np.median(np.sort(w.popularity, axis=1), axis=0) for w in (preset, recorded)]
    np.testing.assert_allclose(by_rank[0][16:], by_rank[1][16:], rtol=0.12)
    for tokens, away in ((8, 0.02), (32, 0.03), (128, 0.015)):
        assert live(preset, tokens) == pytest.approx(live(recorded, tokens), rel=away)


@pytest.mark.parametrize(
    "name", ["decode_in1000out1000", "decode_in2000out100", "prefill_in4096", "prefill_in512"]
)
def test_a_recorded_load_is_drawn_as_it_is(shared_data: Path, name: str) -> None:
    """Live experts are the sum of 1 - (1 - top_k * share)**tokens; dense layers draw -1."""
    load = recorded_load(shared_data, name)
    workload = independent(Workload.from_load(load, top_k=8))
    assert (workload.draw(4)[:, :3] == -1).all()
    share = load[3:] / load[3:].sum(axis=1, keepdims=True)
    workload = independent(Workload.from_load(load[3:], top_k=8))
    for tokens in (32, 128):
        expected = (1 - (1 - 8 * share) ** tokens).sum(axis=1).mean()
        assert live(workload, tokens) == pytest.approx(expected, rel=0.02)


def test_generations_share_experts_as_recorded_ones_do(shared_data: Path) -> None:
    """Runs of one generation against mixed tokens: the ratio of live experts is gpt-oss-20b's."""
    trace = read_trace(shared_data / "gpt_oss_20b" / "routes.npz")
    assert isinstance(trace, TokenTrace)
    topk, generation = trace.topk_ids.astype(np.int32), trace.generation
    mixed = Workload.from_load(trace.load(), top_k=4)
    np.testing.assert_allclose(
        peaks(Workload.preset("gpt-oss-20b").popularity), peaks(mixed.popularity), rtol=0.005
    )
    mask = visited(topk, 32)
    for tokens in (8, 32, 128):
        start = np.arange(0, len(topk) - tokens, 53)
        start = start[generation[start] == generation[start + tokens - 1]]
        recorded = np.mean([mask[s : s + tokens].any(axis=0).sum(axis=-1) for s in start])
        one = replace(mixed, generation_tokens=tokens, generation_steps=1)
        assert live(one, tokens, 20) == pytest.approx(recorded, rel=0.04)
        assert live(mixed, tokens, 20) > 1.2 * recorded


# --- input ---


def test_integers_floats_and_huge_counts_give_the_same_popularity() -> None:
    """Only proportions count, even where an int32 or a float sum would overflow."""
    wanted = Workload.from_load(LOAD, top_k=2).popularity
    assert wanted.sum(axis=1).tolist() == pytest.approx([1, 0, 1])
    for load in (
        np.array(LOAD, dtype=np.int32) * 2_000_000,
        np.array(LOAD, dtype=np.uint64) * 2**53,
        np.array(LOAD, dtype=np.float64) * 1e305,
    ):
        np.testing.assert_allclose(Workload.from_load(load, top_k=2).popularity, wanted)


def test_a_workload_keeps_its_own_popularity() -> None:
    """The caller's array is neither written to nor kept, and the workload's cannot be written."""
    popularity = np.array([[0.5, 0.25, 0.25]])
    workload = Workload(popularity, top_k=1)
    popularity[0, 0] = 9
    assert workload.popularity[0, 0] == 0.5
    with pytest.raises(ValueError, match="read-only"):
        workload.popularity[0, 0] = 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_load_that_is_no_count_is_named(bad: float) -> None:
    """The error gives the layer, the expert and the value."""
    load = np.ones((3, 4))
    load[1, 2] = bad
    with pytest.raises(InvalidTokensError, match=rf"load\[layer 1, expert 2\] is {bad}"):
        Workload.from_load(load, top_k=2)


@pytest.mark.parametrize(
    "load", [[1, 2, 3], [[[1, 2]]], [["a", "b"]], [[True, True]], np.ones((0, 4)), np.ones((3, 0))]
)
def test_a_load_of_another_kind_is_refused(load: npt.ArrayLike) -> None:
    """Anything but numbers [layers, experts] is an error that says so."""
    with pytest.raises(InvalidTokensError, match=r"load is .*expected numbers \[layers, experts\]"):
        Workload.from_load(load, top_k=1)


def test_a_ragged_load_is_refused() -> None:
    """Layers of different numbers of experts, by name and not in numpy's words."""
    with pytest.raises(InvalidTokensError, match="load has rows of different lengths"):
        Workload.from_load([[1, 2], [3]], top_k=1)


def test_a_layer_with_too_few_experts_is_named() -> None:
    """A token cannot visit more experts than have load."""
    with pytest.raises(InvalidTokensError, match=r"layer 1\] has 2 experts above 0.*top_k=3"):
        Workload.from_load([[1, 1, 1], [1, 0, 1]], top_k=3)


def test_popularity_must_be_shares() -> None:
    """Counts given as popularity are refused with the way to pass them."""
    with pytest.raises(InvalidTokensError, match=r"layer 0\] sums to 10.*from_load"):
        Workload(np.array([[4.0, 6.0]]), top_k=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 0),
        ("correlation", 1.5),
        ("correlation", float("nan")),
        ("drift", -0.1),
        ("generation_tokens", 0),
        ("generation_steps", 0),
        ("seed", -1),
    ],
)
def test_parameters_out_of_range_are_named(name: str, value: float) -> None:
    """The error names the parameter, its value and its range."""
    with pytest.raises(ValueError, match=f"{name} is {value}; expected"):
        replace(Workload.from_load([[1, 1]], top_k=1), **{name: value})  # type: ignore[arg-type]


def test_drawing_nothing_or_from_the_past_is_refused() -> None:
    """At least one token, one step, and no step before the first."""
    workload = Workload.from_load([[1, 1]], top_k=1)
    with pytest.raises(ValueError, match="tokens is 0"):
        workload.draw(0)
    with pytest.raises(ValueError, match="steps is 0"):
        workload.draw(1, 0)
    with pytest.raises(ValueError, match="first_step is -1"):
        workload.draw(1, first_step=-1)
    with pytest.raises(ValueError, match="step is -1"):
        workload.popularity_at(-1)
    with pytest.raises(ValueError, match="seed is -1"):
        Workload.preset("mixtral-8x7b", seed=-1)
