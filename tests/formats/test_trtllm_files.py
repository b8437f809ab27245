"""TensorRT-LLM's files: its configuration as a placement, its statistics as traffic."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_opt.errors import FormatError, SolverUnavailableError
from eplb_opt.formats.placements import holds_placement, read_placement, write_placement
from eplb_opt.placement import Placement
from eplb_opt.trace import LoadTrace, read_trace

yaml = pytest.importorskip("yaml")
safetensors = pytest.importorskip("safetensors.numpy")

Counts = dict[str, npt.NDArray[Any]]

ASSIGNMENTS = "initial_global_assignments"
ONE_GPU = "ignore:.*have any load"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples of a property: each rewrites its files."""
    return tmp_path_factory.mktemp("trtllm")


# The configuration


def config(folder: Path, text: str | bytes) -> Path:
    """Put ``text`` in a YAML file."""
    path = folder / "balancer.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(path: Path, **given: Any) -> FormatError:
    """Read a configuration that must be refused."""
    with pytest.raises(FormatError) as caught:
        read_placement(path, **{"num_gpus": 2, **given})
    return caught.value


def test_the_engines_own_layout_is_read(tmp_path: Path) -> None:
    """Layers by their number in the model, in any order; keys that matter elsewhere are ignored."""
    text = """
    initial_global_assignments:
      4: [2, 1, 0, 3]
      3: [0, 1, 2, 3]
      5: &shared [3, 2, 1, 0]
      6: *shared
    num_slots: 4
    ep_size: 2
    layer_updates_per_iter: 2
    """
    found = read_placement(config(tmp_path, text), num_gpus=2)
    assert found.expert_of.tolist() == [[0, 1, 2, 3], [2, 1, 0, 3], [3, 2, 1, 0], [3, 2, 1, 0]]
    left = read_placement(tmp_path / "balancer.yaml", num_gpus=2, dense_layers=1, draft_layers=2)
    assert left.expert_of.tolist() == [[2, 1, 0, 3]]
    assert holds_placement(tmp_path / "balancer.yaml")


def test_what_is_written_is_plain_yaml(tmp_path: Path) -> None:
    """As any parser of YAML sees it; without numbers, layers count from 0."""
    placement = Placement([[[0, 1], [2, 0]], [[2, 1], [0, 1]]])
    for numbers in ([3, 4], [1, 3], None):
        write_placement(placement, tmp_path / "b.yml", layer_ids=numbers)
        assert yaml.safe_load((tmp_path / "b.yml").read_text()) == {
            "num_slots": 4,
            ASSIGNMENTS: dict(zip(numbers or [0, 1], [[0, 1, 2, 0], [2, 1, 0, 1]], strict=True)),
            "layer_updates_per_iter": 0,
        }
        assert read_placement(tmp_path / "b.yml", num_gpus=2) == placement


def test_empty_slots_are_told_to_be_unknown(tmp_path: Path) -> None:
    """TensorRT-LLM checks that every slot has an expert (moeLoadBalancer.cpp)."""
    with pytest.warns(UserWarning, match="2 empty slots, which TensorRT-LLM does not know"):
        write_placement(Placement([[[0, -1], [1, -1]]]), tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", "", "exactly one key of initial_global_assignments; keys found: none"),
        ("[1]", "", "keys found: none"),
        ("num_slots: 4", "", "keys found: num_slots"),
        ("moe_config: {load_balancer: b.yaml}", "", "keys found: moe_config"),
        (f"{ASSIGNMENTS}: 3", ASSIGNMENTS, "3; expected an object"),
        (f"{ASSIGNMENTS}: {{}}", ASSIGNMENTS, "slots is empty"),
        (f"{ASSIGNMENTS}: {{x: [0]}}", ASSIGNMENTS, "'x'; expected the number of a layer"),
        (f"{ASSIGNMENTS}: {{true: [0]}}", ASSIGNMENTS, "True; expected the number of a layer"),
        (f"{ASSIGNMENTS}: {{-1: [0]}}", ASSIGNMENTS, "-1; expected the number of a layer"),
        (f"{ASSIGNMENTS}: {{3: 5}}", f"{ASSIGNMENTS}[3]", "5; expected a list of expert ids"),
        (f"{ASSIGNMENTS}: {{3: [0, no]}}", f"{ASSIGNMENTS}[3][1]", "False; expected an expert id"),
        (f"{ASSIGNMENTS}: {{3: [0, 1.0]}}", f"{ASSIGNMENTS}[3][1]", "1.0; expected an expert id"),
        (f"{ASSIGNMENTS}: {{3: [0, [1]]}}", f"{ASSIGNMENTS}[3][1]", "[1]; expected an expert id"),
        (f"{ASSIGNMENTS}: {{3: [0, 2]}}", f"{ASSIGNMENTS}[3]", "layer 0: expert 1 has no replica"),
        (f"{ASSIGNMENTS}: {{3: [0]}}", f"{ASSIGNMENTS}[3]", "1 slots do not divide over 2 GPUs"),
        (
            f"{ASSIGNMENTS}: {{3: [0, 1], 4: [0]}}",
            f"{ASSIGNMENTS}[4]",
            f"1 slots; {ASSIGNMENTS}[3] has 2",
        ),
        (
            f"{{num_slots: 4, {ASSIGNMENTS}: {{3: [0, 1]}}}}",
            f"{ASSIGNMENTS}[3]",
            "2 slots; num_slots says 4",
        ),
        (
            f"{ASSIGNMENTS}: {{3: [0, 1], 4: [0, 1], 6: [0, 1]}}",
            ASSIGNMENTS,
            "layer 5 is missing between 4 and 6",
        ),
        (f"{{num_slots: x, {ASSIGNMENTS}: {{}}}}", "num_slots", "'x'; expected a whole number"),
        (
            f"{{layer_updates_per_iter: -1, {ASSIGNMENTS}: {{}}}}",
            "layer_updates_per_iter",
            "-1; expected a whole number, not negative",
        ),
        (f"{ASSIGNMENTS}: {{3: [0, 1], 3: [1, 0]}}", "", "a key occurs twice"),
        (f"a: &a {{b: 1}}\n{ASSIGNMENTS}: {{<<: *a}}", "", "merged mappings (<<) are not read"),
        (f"{ASSIGNMENTS}: !!python/object/apply:os.getcwd []", "", "damaged"),
        (f"{ASSIGNMENTS}: {{[1]: 2}}", "", "damaged"),
        (f"{ASSIGNMENTS}: &a [*a]", ASSIGNMENTS, "expected an object"),
        (f"{ASSIGNMENTS}: {{3: &a [0, *a]}}", f"{ASSIGNMENTS}[3][1]", "expected an expert id"),
        (f"{ASSIGNMENTS}: " + "[" * 100_000, "", "damaged"),
        ("- " * 100_000, "", "damaged"),
        ("a: 1\n---\nb: 2", "", "damaged"),
    ],
)
def test_yaml_of_another_form_is_refused(
    tmp_path: Path, text: str, place: str, message: str
) -> None:
    """The place is a path inside the file, with the model's number of the layer in it."""
    error = refusal(config(tmp_path, text))
    assert (error.place, message in error.problem) == (place, True), str(error)


def test_the_number_of_gpus_is_not_in_the_file(tmp_path: Path) -> None:
    """The engine learns it from its own options."""
    path = config(tmp_path, f"{ASSIGNMENTS}: {{3: [0, 1]}}")
    assert "give num_gpus" in refusal(path, num_gpus=None).problem
    assert "holds nothing of format vllm" in refusal(path, format="vllm").problem
    error = refusal(path, num_experts=1)
    assert (error.place, "out of range" in error.problem) == (f"{ASSIGNMENTS}[3][1]", True)


INTACT_CONFIG = f"num_slots: 4\n{ASSIGNMENTS}:\n  3: [0, 1, 2, 0]\n  4: [2, 1, 0, -1]\n".encode()


def survives(path: Path) -> None:
    """Read whatever it is: the only error is FormatError."""
    with suppress(FormatError):
        read_placement(path, num_gpus=2)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_damage_crashes_the_reader_of_yaml(
    damage: Callable[[st.DataObject, bytes], bytes], folder: Path, data: st.DataObject
) -> None:
    """A valid file with bytes changed, cut short or prolonged; and bytes of any kind."""
    survives(config(folder, damage(data, INTACT_CONFIG)))
    survives(config(folder, data.draw(st.binary(max_size=60))))


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-2, 5) | st.integers() | st.floats() | st.dates(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([ASSIGNMENTS, "num_slots", "layer_updates_per_iter"])
                | st.integers(-1, 4),
                inner,
                max_size=3,
            )
        ),
        max_leaves=12,
    ),
    wrapped=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_no_yaml_crashes_the_reader(folder: Path, value: Any, wrapped: bool) -> None:
    """Valid YAML of any structure."""
    survives(config(folder, yaml.safe_dump({ASSIGNMENTS: value} if wrapped else value)))


# The statistics


def statistics(folder: Path, *ranks: Counts, meta: object = None) -> Path:
    """Write a folder of statistics."""
    for old in folder.glob("rank*"):
        old.unlink()
    experts = next((len(row) for counts in ranks for row in counts.values()), 1)
    meta = {"num_experts": experts, "num_experts_per_token": 2} if meta is None else meta
    (folder / "meta_info.json").write_text(json.dumps(meta))
    for rank, counts in enumerate(ranks):
        (folder / f"rank{rank}.safetensors").write_bytes(safetensors.save(counts))
    return folder


def trace_refusal(folder: Path) -> FormatError:
    """Read statistics that must be refused."""
    with pytest.raises(FormatError) as caught:
        read_trace(folder)
    return caught.value


def row(*counts: int, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
    """Give one key's counts."""
    return np.array(counts, dtype=dtype)


@pytest.mark.filterwarnings(ONE_GPU)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_ranks_counts_are_summed(folder: Path, data: st.DataObject) -> None:
    """Iterations and layers keep their order, whatever numbers they start from and step by."""
    shape = data.draw(hnp.array_shapes(min_dims=4, max_dims=4, max_side=3))
    parts = data.draw(hnp.arrays(np.int64, shape, elements=st.integers(0, 2**33)))
    dtype = data.draw(st.sampled_from([np.int64, np.uint64, np.float64]))
    first, layer, step = (data.draw(st.integers(low, 12)) for low in (0, 0, 1))
    ranks = [
        {
            f"{first + i}_{layer + step * n}": np.array(counts, dtype=dtype)
            for i, layers in enumerate(part)
            for n, counts in enumerate(layers)
        }
        for part in parts
    ]
    trace = read_trace(statistics(folder, *ranks), num_experts=shape[-1])
    assert isinstance(trace, LoadTrace)
    np.testing.assert_array_equal(trace.tokens, parts.sum(axis=0))


def test_a_worked_example(tmp_path: Path) -> None:
    """Two ranks; the second served no token in layer 4 of iteration 9; other files are not read."""
    ranks = (
        {"9_3": row(1, 2), "9_4": row(0, 3), "10_3": row(1, 0), "10_4": row(0, 1)},
        {"9_3": row(5, 5), "10_3": row(2, 2), "10_4": row(3, 0)},
    )
    path = statistics(tmp_path, *ranks)
    (path / "rank0_raw.safetensors").write_bytes(b"else")
    (path / "rank1_numtokens.json").write_bytes(b"else")
    trace = read_trace(path)
    assert isinstance(trace, LoadTrace)
    np.testing.assert_array_equal(trace.tokens, [[[6, 7], [0, 3]], [[3, 2], [3, 1]]])
    assert trace.load().tolist() == [[9, 9], [3, 4]]
    assert (trace.top_k, trace.layer_ids) == (2, (3, 4))
    assert not holds_placement(path)


def test_counts_of_one_gpu_are_suspected(tmp_path: Path) -> None:
    """As in every other file of counts."""
    with pytest.warns(UserWarning, match="only experts 0 to 0 of 4 have any load"):
        read_trace(statistics(tmp_path, {"0_0": row(3, 0, 0, 0)}))


@pytest.mark.parametrize(
    ("ranks", "file", "place", "message"),
    [
        ([], "", "rank0.safetensors", "this file is missing"),
        ([{}], "", "", "no counts in any rank's file"),
        ([{"3": row(1)}], "rank0.safetensors", "3", "expected a key {iteration}_{layer}"),
        ([{"1_02": row(1)}], "rank0.safetensors", "1_02", "expected a key"),
        ([{"1_-2": row(1)}], "rank0.safetensors", "1_-2", "expected a key"),
        ([{"1_2": row(1), "1_3": row(1, 2)}], "rank0.safetensors", "1_3", "says 1 experts"),
        ([{"1_2": row(1, dtype=np.bool_)}], "rank0.safetensors", "1_2", "dtype bool"),
        ([{"1_2": row(1)}, {"1_2": row(-1)}], "rank1.safetensors", "1_2[0]", "-1; expected"),
        (
            [{"0_0": row(1, 1), "0_1": np.array([0.0, 0.5])}],
            "rank0.safetensors",
            "0_1",
            "dtype float64; 0_0 has int64",
        ),
        ([{"0_0": np.array([1.0, np.nan])}], "rank0.safetensors", "0_0[1]", "nan; expected"),
        ([{"1_2": row(1), "3_2": row(1)}], "", "2_2", "iteration 2 is missing between 1 and 3"),
        (
            [{"1_2": row(1), "1_3": row(1), "1_5": row(1)}],
            "",
            "",
            "layer 4 is missing between 3 and 5",
        ),
        ([{"1_2": row(1), "2_2": row(1), "1_3": row(1)}], "", "2_3", "no rank has these counts"),
        ([{"1_2": row(0, 2**62)}] * 2, "", "1_2[1]", "the sum over ranks exceeds 2^63-1"),
        ([{"1_2": row(0, 2**62)}] * 4, "", "1_2[1]", "the sum over ranks exceeds 2^63-1"),
    ],
)
def test_statistics_of_another_form_are_refused(
    tmp_path: Path, ranks: list[Counts], file: str, place: str, message: str
) -> None:
    """The error names the file and the key in it, or the folder and what it lacks."""
    error = trace_refusal(statistics(tmp_path, *ranks))
    assert error.path == tmp_path / file
    assert (error.place, message in error.problem) == (place, True), str(error)


@pytest.mark.parametrize(
    ("meta", "place", "message"),
    [
        ([], "", "expected an object with the key 'num_experts'"),
        ({"num_experts": "8"}, "num_experts", "'8'; expected a whole number"),
        ({"num_experts": True}, "num_experts", "True; expected a whole number"),
        ({"num_experts": 0}, "num_experts", "0; expected at least 1"),
    ],
)
def test_meta_info_of_another_form_is_refused(
    tmp_path: Path, meta: object, place: str, message: str
) -> None:
    """The number of experts is there, and a number."""
    error = trace_refusal(statistics(tmp_path, {"0_0": row(1)}, meta=meta))
    assert error.path == tmp_path / "meta_info.json"
    assert (error.place, message in error.problem) == (place, True), str(error)


def test_a_rank_between_others_is_missed(tmp_path: Path) -> None:
    """Counts without one rank's would be planned for as if they were all."""
    path = statistics(tmp_path, *[{"0_0": row(1)}] * 3)
    (path / "rank1.safetensors").unlink()
    assert trace_refusal(path).place == "rank1.safetensors"


def test_without_safetensors_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder alone needs it."""
    path = statistics(tmp_path, {"0_0": row(1)})
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(SolverUnavailableError, match=r"eplb-opt\[files\]"):
        read_trace(path)


@pytest.mark.filterwarnings(ONE_GPU)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_damage_crashes_the_reader_of_statistics(
    damage: Callable[[st.DataObject, bytes], bytes], folder: Path, data: st.DataObject
) -> None:
    """A valid folder with one file's bytes changed, cut short or prolonged."""
    path = statistics(folder, {"0_0": row(1, 2), "0_1": row(3, 4)}, {"0_1": row(5, 6)})
    file = path / data.draw(st.sampled_from(["rank0.safetensors", "meta_info.json"]))
    file.write_bytes(damage(data, file.read_bytes()))
    with suppress(FormatError):
        assert read_trace(path).load().min() >= 0
