"""Placements in files: every format round trips, faults are named to the place, none crash."""

from __future__ import annotations

import io
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

from eplb_opt.errors import FormatError, InvalidPlacementError, SolverUnavailableError
from eplb_opt.formats.placements import (
    PlacementFormat,
    holds_placement,
    read_placement,
    write_placement,
)
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.testing import placements

Array = npt.NDArray[Any]

MAP = "physical_to_logical_map"


def as_npy(array: Array) -> bytes:
    """Write one array as .npy."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def as_npz(**arrays: Array) -> bytes:
    """Write named arrays as .npz."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # numpy's stub takes them for allow_pickle
    return buffer.getvalue()


def as_map(placement: Placement) -> Array:
    """Give the physical-to-logical map of a placement."""
    return placement.expert_of if placement.layered else placement.expert_of[0]


def as_ascend(placement: Placement) -> bytes:
    """Write a placement as vLLM-Ascend does, in its order, with ids that mean nothing."""
    layers = [
        {
            "layer_id": 99 - layer,
            "device_count": placement.num_gpus,
            "device_list": [
                {"device_id": 7, "device_expert": [e for e in row if e != EMPTY]} for row in gpus
            ],
        }
        for layer, gpus in enumerate(placement.slots.tolist())
    ]
    return json.dumps({"moe_layer_count": len(layers), "layer_list": layers}).encode()


WRITERS: dict[str, tuple[str, Callable[[Placement], bytes]]] = {
    "npy": (".npy", lambda placement: as_npy(placement.slots)),
    "npz slots": (".npz", lambda placement: as_npz(slots=placement.slots)),
    "npz map": (".npz", lambda placement: as_npz(**{MAP: as_map(placement)})),
    "json map": (
        ".json",
        lambda placement: json.dumps({"epoch": 3, MAP: as_map(placement).tolist()}).encode(),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples of a property: each rewrites its file."""
    return tmp_path_factory.mktemp("placements")


def written(folder: Path, suffix: str, content: bytes) -> Path:
    """Put ``content`` in a file with that suffix."""
    path = folder / f"placement{suffix}"
    path.unlink(missing_ok=True)  # an earlier example may still be mapped
    path.write_bytes(content)
    return path


def refusal(path: Path, **given: Any) -> FormatError:
    """Read a file that must be refused."""
    with pytest.raises(FormatError) as caught:
        read_placement(path, **given)
    return caught.value


def holds(placement: Placement) -> Array:
    """Give a placement as a mask [layers, gpus, experts] or [gpus, experts]."""
    mask = np.zeros((*placement.slots.shape[:-1], placement.num_experts + 1), dtype=bool)
    np.put_along_axis(
        mask, placement.slots.astype(np.int64) % (placement.num_experts + 1), True, -1
    )
    return mask[..., :-1]


# Round trips


@pytest.mark.parametrize("form", WRITERS)
@given(placement=placements())
@settings(max_examples=40, deadline=None)
def test_placements_come_back(folder: Path, form: str, placement: Placement) -> None:
    """Every slot, empty ones included, and the layer axis or its absence survive each format."""
    suffix, write = WRITERS[form]
    path = written(folder, suffix, write(placement))
    assert read_placement(path, num_gpus=placement.num_gpus) == placement
    given: dict[str, Any] = {"num_gpus": placement.num_gpus, "num_experts": placement.num_experts}
    assert read_placement(str(path), **given) == placement


@given(placement=placements(layered=True))
@settings(max_examples=40, deadline=None)
def test_ascend_maps_come_back(folder: Path, placement: Placement) -> None:
    """GPUs keep their experts in order; shorter ones end in empty slots; ids are not read."""
    found = read_placement(written(folder, ".json", as_ascend(placement)))
    assert (found.num_layers, found.num_gpus) == (placement.num_layers, placement.num_gpus)
    for before, after in zip(
        placement.slots.reshape(-1, placement.slots_per_gpu),
        found.slots.reshape(-1, found.slots_per_gpu),
        strict=True,
    ):
        filled = before[before != EMPTY].tolist()
        assert after.tolist() == filled + [EMPTY] * (found.slots_per_gpu - len(filled))


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@given(placement=placements())
@settings(max_examples=30, deadline=None)
def test_masks_are_booleans(folder: Path, suffix: str, placement: Placement) -> None:
    """A mask gives the experts of each GPU in ascending order, as many as it has columns."""
    mask = holds(placement)
    content = as_npy(mask) if suffix == ".npy" else as_npz(mask=mask)
    found = read_placement(written(folder, suffix, content), num_experts=placement.num_experts)
    assert found == Placement.from_mask(mask)


# What is written

EMPTY_SLOTS = "ignore:.*empty slots, which"
WRITTEN = [
    ("slots", ".npz"),
    ("slots", ".npy"),
    ("sglang", ".json"),
    ("sglang", ".pt"),
    ("vllm", ".json"),
    ("vllm-ascend", ".json"),
    ("trtllm", ".yaml"),
    ("trtllm", ".yml"),
]
LAYERED = ("device-mask", "vllm-ascend", "trtllm")


def needed(suffix: str) -> None:
    """Skip without the package that reads files with this suffix."""
    package = {".pt": "torch", ".yaml": "yaml", ".yml": "yaml"}.get(suffix)
    if package is not None:
        pytest.importorskip(package)


@pytest.mark.filterwarnings(EMPTY_SLOTS)
@pytest.mark.parametrize(("form", "suffix"), WRITTEN)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_what_is_written_comes_back(
    folder: Path, form: str, suffix: str, data: st.DataObject
) -> None:
    """Slots in their order, empty ones included, whatever the format; its suffix tells it."""
    needed(suffix)
    placement = data.draw(placements(layered=True if form in LAYERED else None))
    path = written(folder, suffix, b"")
    write_placement(placement, path, format=form)
    for format in (None, form, PlacementFormat(form)):
        assert read_placement(path, num_gpus=placement.num_gpus, format=format) == placement
    assert holds_placement(path) or suffix == ".npy"


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
@pytest.mark.parametrize("form", ["mask", "device-mask"])
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_masks_come_back_in_order_of_the_experts(
    folder: Path, form: str, suffix: str, data: st.DataObject
) -> None:
    """A mask says which experts a GPU holds; one that is there twice is refused, by name."""
    placement = data.draw(placements(layered=True if form in LAYERED else None))
    path = written(folder, suffix, b"")
    twice = next(placement.duplicates(), None)
    if twice is not None:
        layer, gpu, expert = twice
        with pytest.raises(
            InvalidPlacementError, match=f"layer {layer}, GPU {gpu}: expert {expert}"
        ):
            write_placement(placement, path, format=form)
        return
    write_placement(placement, path, format=form)
    given = form if suffix == ".npy" else None
    assert read_placement(path, format=given) == Placement.from_mask(holds(placement))


def test_experts_without_any_replica_come_back(tmp_path: Path) -> None:
    """A dead GPU took experts 3 and 4: the number of experts is kept, and reading insists."""
    placement = Placement([[[0, 1], [2, 0], [-1, -1]]], num_experts=5, allow_missing=True)
    path = tmp_path / "placement.npz"
    write_placement(placement, path)
    assert read_placement(path, allow_missing=True) == placement
    error = refusal(path)
    assert (error.place, "expert 3 has no replica" in error.problem) == ("slots[0]", True)
    assert "num_experts=4, but the file has 5" in refusal(path, num_experts=4).problem


@pytest.mark.parametrize(
    ("form", "suffix", "text"),
    [
        ("sglang", ".json", '{"physical_to_logical_map": [\n[0, 1, 2, 0]\n]}\n'),
        ("vllm", ".json", '{"physical_to_logical": [\n[0, 1, 2, 0]\n]}\n'),
        (
            "vllm-ascend",
            ".json",
            '{"moe_layer_count": 1, "layer_list": [\n'
            '  {"layer_id": 0, "device_count": 2, "device_list": [\n'
            '    {"device_id": 0, "device_expert": [0, 1]},\n'
            '    {"device_id": 1, "device_expert": [2, 0]}\n'
            "  ]}\n]}\n",
        ),
    ],
)
def test_json_is_written_for_people(tmp_path: Path, form: str, suffix: str, text: str) -> None:
    """A line per layer, or per device, so that two files can be compared."""
    path = tmp_path / f"placement{suffix}"
    write_placement(Placement([[[0, 1], [2, 0]]]), path, format=form)
    assert path.read_text() == text


def test_ascend_devices_of_eight_and_nine(tmp_path: Path) -> None:
    """Redundancy may differ by device and layer: no -1 is written where a list can be shorter."""
    slots = [[[0, 1, 2], [3, 4, -1]], [[0, 1, -1], [2, -1, 4]], [[0, 1, -1], [2, 3, 4]]]
    placement = Placement(slots, num_experts=5, allow_missing=True)
    path = tmp_path / "expert_map.json"
    with pytest.warns(UserWarning, match="4 empty slots, which vLLM-Ascend does not know"):
        write_placement(placement, path, format="vllm-ascend")
    devices = [
        [device["device_expert"] for device in layer["device_list"]]
        for layer in json.loads(path.read_text())["layer_list"]
    ]
    assert devices == [[[0, 1, 2], [3, 4]], [[0, 1], [2, -1, 4]], [[0, 1], [2, 3, 4]]]
    assert read_placement(path, allow_missing=True) == placement


@pytest.mark.parametrize("layers", [[1, 2], [1, 3], [0, 1]])
def test_sglang_has_a_row_for_every_layer_of_the_model(tmp_path: Path, layers: list[int]) -> None:
    """Dense layers get the experts in turn, and are left out when read back."""
    placement = Placement([[[0, 1], [2, 0]], [[2, 1], [0, 1]]])
    path = tmp_path / "map.json"
    write_placement(placement, path, format="sglang", layer_ids=layers)
    rows = json.loads(path.read_text())[MAP]
    assert len(rows) == layers[-1] + 1
    for layer, row in enumerate(rows):
        at = layers.index(layer) if layer in layers else None
        assert row == ([0, 1, 2, 0] if at is None else placement.expert_of[at].tolist())
    if layers == [1, 2]:
        assert read_placement(path, num_gpus=2, dense_layers=1) == placement


@pytest.mark.parametrize(
    ("form", "layer_ids"),
    [
        ("sglang", [1]),
        ("sglang", [1, 1]),
        ("sglang", [-1, 0]),
        ("trtllm", [4, 3]),
        ("vllm", [0, 1]),
    ],
)
def test_layer_numbers_must_fit(tmp_path: Path, form: str, layer_ids: list[int]) -> None:
    """One rising number per layer, and only where the format has numbers; nothing is written."""
    path = tmp_path / ("a.yaml" if form == "trtllm" else "a.json")
    with pytest.raises(ValueError, match="layer_ids"):
        write_placement(Placement([[[0]], [[0]]]), path, format=form, layer_ids=layer_ids)
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "form", "message"),
    [
        ("a.json", None, "give one of sglang, vllm, vllm-ascend"),
        ("a.csv", None, "unknown suffix '.csv'; known are .npz, .npy"),
        ("a.npz", "sglang", "format sglang goes with the suffixes .json, .pt, .pth"),
        ("a.json", "tensorrt", "unknown format 'tensorrt'; known are slots, mask"),
    ],
)
def test_format_and_suffix_go_together(
    tmp_path: Path, name: str, form: str | None, message: str
) -> None:
    """What cannot be read back is not written."""
    with pytest.raises(FormatError, match=message):
        write_placement(Placement([[0]]), tmp_path / name, format=form)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch and PyYAML are wanted by their files alone; YAML is written without."""
    for module in ("torch", "yaml"):
        monkeypatch.setitem(sys.modules, module, None)
    placement = Placement([[[0]]])
    write_placement(placement, tmp_path / "a.yaml")
    with pytest.raises(SolverUnavailableError, match=r"eplb-opt\[files\]"):
        read_placement(tmp_path / "a.yaml", num_gpus=1)
    with pytest.raises(SolverUnavailableError, match=r"writing .* pip install torch"):
        write_placement(placement, tmp_path / "a.pt")
    with pytest.raises(SolverUnavailableError, match=r"reading .* pip install torch"):
        holds_placement(tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()


# Worked examples


def test_a_map_lists_the_slots_of_one_gpu_after_the_other(tmp_path: Path) -> None:
    """Two GPUs share four slots two by two."""
    path = written(tmp_path, ".json", json.dumps({MAP: [[0, 1, 2, 0]]}).encode())
    assert read_placement(path, num_gpus=2).slots.tolist() == [[[0, 1], [2, 0]]]
    assert read_placement(path, num_gpus=1).slots.tolist() == [[[0, 1, 2, 0]]]


def test_shorter_devices_are_padded(tmp_path: Path) -> None:
    """A device without experts is a dead GPU, not an error."""
    layer = {"device_count": 3, "device_list": [{"device_expert": e} for e in ([1, 0], [], [2])]}
    content = json.dumps({"moe_layer_count": 1, "layer_list": [layer]}).encode()
    found = read_placement(written(tmp_path, ".json", content))
    assert found.slots.tolist() == [[[1, 0], [-1, -1], [2, -1]]]


def test_layers_of_a_map_may_differ_in_length(tmp_path: Path) -> None:
    """Redundancy that differs by layer: the shorter layer's GPUs end in empty slots."""
    path = written(tmp_path, ".json", json.dumps({MAP: [[0, 1, 2, 0], [2, 1], [0, 3, 1]]}).encode())
    found = read_placement(path, num_gpus=2, draft_layers=1, allow_missing=True)
    assert found.slots.tolist() == [[[0, 1], [2, 0]], [[2, -1], [1, -1]]]
    error = refusal(path, num_gpus=2)
    assert (error.place, "3 slots do not divide" in error.problem) == (f"{MAP}[2]", True)


@pytest.mark.parametrize("form", ["slots", "mask", "device-mask", "sglang", "vllm-ascend"])
def test_dense_and_draft_layers_are_left_out_unread(tmp_path: Path, form: str) -> None:
    """What is wrong in them does not matter, what is wrong between them is named as in the file."""
    good, bad = [[0, 1], [2, 0]], [[0, 1], [1, 1]]
    suffix = ".json" if form in ("sglang", "vllm-ascend") else ".npz"
    path = tmp_path / f"placement{suffix}"
    stacked = [bad, good, good, bad]
    if form == "sglang":
        path.write_text(json.dumps({MAP: ["x", [0, 1, 2, 0], [0, 1, 2, 0], [9]]}))
    elif form == "vllm-ascend":
        path.write_text(json.dumps(ascend_map(5, ascend(*good), ascend(*good), {})))
    elif form == "slots":
        path.write_bytes(as_npz(slots=np.array(stacked)))
    else:
        mask = np.stack([np.isin(np.arange(3), row) for gpus in stacked for row in gpus])
        mask = mask.reshape(4, 2, 3)
        named = {"mask": mask} if form == "mask" else {"device_mask": np.moveaxis(mask, 1, 0)}
        path.write_bytes(as_npz(**named))
    found = read_placement(path, num_gpus=2, dense_layers=1, draft_layers=1)
    assert found == Placement(np.sort([good, good]) if "mask" in form else [good, good])
    last = {
        "slots": "slots[3]",
        "mask": "mask[3]",
        "device-mask": "device_mask[:, 3]",
        "sglang": f"{MAP}[3]",
        "vllm-ascend": "layer_list[3]",
    }
    assert refusal(path, num_gpus=2, dense_layers=1).place == last[form]
    assert "leave none" in refusal(path, num_gpus=2, dense_layers=2, draft_layers=2).problem


def test_a_placement_without_layers_has_none_to_leave_out(tmp_path: Path) -> None:
    """Neither an array nor a list of ids; and there are no negative numbers of layers."""
    for suffix, content in (
        (".npy", as_npy(np.array([[0], [1]]))),
        (".npz", as_npz(**{MAP: np.array([0, 1])})),
        (".json", json.dumps({MAP: [0, 1]}).encode()),
    ):
        path = written(tmp_path, suffix, content)
        assert "to leave out" in refusal(path, num_gpus=2, dense_layers=1).problem
    with pytest.raises(ValueError, match="draft_layers=-1"):
        read_placement(path, num_gpus=2, draft_layers=-1)


def test_what_the_file_cannot_say_can_be_given(tmp_path: Path) -> None:
    """GPUs may come first in a bare array, and an archive's one array may have any name."""
    mask = np.array([[[1, 1], [0, 1], [0, 1]], [[0, 1], [1, 0], [1, 0]]], dtype=bool)
    wanted = Placement([[[0, 1], [1, -1]], [[1, -1], [0, -1]], [[1, -1], [0, -1]]])
    for suffix, content in ((".npy", as_npy(mask)), (".npz", as_npz(placement_4_devices=mask))):
        path = written(tmp_path, suffix, content)
        assert read_placement(path, format="device-mask") == wanted
        assert read_placement(path, format="mask").num_gpus == 3
        assert refusal(path, format="vllm").problem
    assert "arrays found: placement_4_devices" in refusal(path).problem
    path = written(tmp_path, ".npy", as_npy(np.array([[0, 1, 2, 0]])))
    assert read_placement(path, num_gpus=2, format="sglang").slots.tolist() == [[[0, 1], [2, 0]]]
    assert "holds nothing of format vllm" in refusal(path, format="vllm").problem
    path = written(tmp_path, ".json", json.dumps({MAP: [[0]]}).encode())
    assert "exactly one key of physical_to_logical;" in refusal(path, format="vllm").problem
    assert "holds nothing of format slots" in refusal(path, format="slots").problem


# Real files


def test_the_ascend_map(shared_data: Path) -> None:
    """Two devices with five slots each hold eight experts, two of them twice."""
    path = shared_data / "vllm_ascend" / "expert_map.json"
    found = read_placement(path)
    assert found.slots.tolist() == [[[7, 2, 0, 3, 5], [6, 1, 4, 7, 2]]]
    assert found.copies.tolist() == [[1, 1, 2, 1, 1, 1, 1, 2]]
    assert holds_placement(path)


def test_the_ascend_map_is_written_as_it_was(shared_data: Path, tmp_path: Path) -> None:
    """To the character, but for white space."""
    path = shared_data / "vllm_ascend" / "expert_map.json"
    write_placement(read_placement(path), tmp_path / "again.json", format="vllm-ascend")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(path.read_text())


def test_the_omni_placements(shared_data: Path, tmp_path: Path) -> None:
    """Axes in another order are the caller's to move; from there it is a mask like any other."""
    with np.load(shared_data / "omni_placements" / "placements.npz") as archive:
        for name in archive.files:
            held = np.moveaxis(archive[name], 0, 1)  # [device, layer, expert]
            placement = Placement.from_mask(held)
            assert placement.num_layers == 58
            assert placement.copies.sum() == held.sum()
            path = written(tmp_path, ".npz", as_npz(mask=held))
            assert read_placement(path, num_gpus=held.shape[1]) == placement
            path = written(tmp_path, ".npy", as_npy(archive[name]))
            assert read_placement(path, format="device-mask") == placement
            write_placement(placement, tmp_path / "again.npz", format="device-mask")
            with np.load(tmp_path / "again.npz") as again:
                assert np.array_equal(again["device_mask"], archive[name])


@pytest.mark.parametrize(
    "name",
    [
        "sglang_deepseek_v3/decode_in2000out100.json",
        "gpt_oss_20b/routes.npz",
        "qwen3_30b_batches/qwen_b64_032_012.npz",
    ],
)
def test_traffic_is_not_a_placement(shared_data: Path, name: str) -> None:
    """A trace handed in by mistake is refused by what it lacks."""
    assert "expected exactly one" in refusal(shared_data / name).problem
    assert not holds_placement(shared_data / name)


# What is refused, and where


def test_a_map_needs_the_number_of_gpus(tmp_path: Path) -> None:
    """Nothing in a physical-to-logical map tells where a GPU ends."""
    path = written(tmp_path, ".json", json.dumps({MAP: [[0, 1, 2, 0]]}).encode())
    assert "give num_gpus" in refusal(path).problem
    error = refusal(path, num_gpus=3)
    assert (error.place, "3 or 6 would" in error.problem) == (f"{MAP}[0]", True)


def ascend(*experts: object, **changes: object) -> dict[str, object]:
    """Give a layer of an expert map."""
    devices = [{"device_expert": ids} for ids in experts]
    return {"device_count": len(devices), "device_list": devices, **changes}


def ascend_map(*layers: object, **changes: object) -> dict[str, object]:
    """Give an expert map."""
    return {"moe_layer_count": len(layers), "layer_list": list(layers), **changes}


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        ([], "", "expected exactly one key"),
        ({}, "", "keys found: none"),
        ({"a": 1}, "", "keys found: a"),
        ({MAP: [[0]], "layer_list": []}, "", "exactly one key"),
        ({MAP: 3}, MAP, "3; expected a list"),
        ({MAP: []}, MAP, "empty"),
        ({MAP: [[]]}, MAP, "empty"),
        ({MAP: [[0, 1], 5]}, f"{MAP}[1]", "5; expected a list of expert ids"),
        ({MAP: [[0, 1], [0]]}, f"{MAP}[1]", "layer 1: expert 1 has no replica"),
        ({MAP: [[0, 1], [0, True]]}, f"{MAP}[1][1]", "True; expected an expert id"),
        ({MAP: [[0, 1.0]]}, f"{MAP}[0][1]", "1.0; expected an expert id"),
        ({MAP: [[0, -2]]}, f"{MAP}[0][1]", "-2; expected an expert id"),
        ({MAP: [0, 2**70]}, f"{MAP}[1]", "expected an expert id"),
        ({MAP: [[0, 2]]}, f"{MAP}[0]", "layer 0: expert 1 has no replica"),
        ({MAP: [[-1, -1]]}, MAP, "no slot is filled"),
        (
            ascend_map(ascend([0, 1], [1, 0]), ascend([0, 1], [0, 0, 0, -2])),
            "layer_list[1].device_list[1].device_expert[3]",
            "-2; expected an expert id",
        ),
        (
            ascend_map(ascend([0, 1], [1, 0]), ascend([0, 0], [0, 0])),
            "layer_list[1]",
            "expert 1 has no replica",
        ),
        (ascend_map(5), "layer_list[0]", "expected an object with the key 'device_list'"),
        ({"layer_list": []}, "", "expected an object with the key 'moe_layer_count'"),
        (ascend_map(), "layer_list", "slots is empty"),
        (ascend_map(ascend()), "layer_list", "slots is empty"),
        (ascend_map(ascend([])), "layer_list", "slots is empty"),
        (ascend_map(ascend([0]), moe_layer_count=2), "layer_list", "moe_layer_count says 2"),
        (ascend_map(ascend([0]), moe_layer_count=True), "moe_layer_count", "expected a whole"),
        (
            ascend_map(ascend([0]), ascend([0], device_count=4)),
            "layer_list[1].device_list",
            "1 entries; device_count says 4",
        ),
        (
            ascend_map(ascend([0]), ascend([0], [0])),
            "layer_list[1].device_list",
            "2 devices; layer_list[0] has 1",
        ),
        (
            ascend_map(ascend([0], device_list={}, device_count=0)),
            "layer_list[0].device_list",
            "{}; expected a list",
        ),
        (
            ascend_map(ascend([0], device_list=[[0]])),
            "layer_list[0].device_list[0]",
            "expected an object with the key 'device_expert'",
        ),
        (
            ascend_map(ascend([0, 1], [1, 0]), ascend([0, 1], [1, "x"])),
            "layer_list[1].device_list[1].device_expert[1]",
            "'x'; expected an expert id",
        ),
        (
            ascend_map(ascend([0, 1], 1)),
            "layer_list[0].device_list[1].device_expert",
            "1; expected a list",
        ),
    ],
)
def test_json_of_another_form_is_refused(
    tmp_path: Path, content: object, place: str, message: str
) -> None:
    """The place is a path inside the file; what is missing, ragged or no expert is named."""
    error = refusal(written(tmp_path, ".json", json.dumps(content).encode()), num_gpus=1)
    assert (error.place, message in error.problem) == (place, True), str(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged, or not a .json file"),
        (b"\xff\xfe\xfd", "damaged"),
        (b'{"layer_list": [', "damaged"),
        (b'{"layer_list": [], "layer_list": []}', "a key occurs twice"),
        (b'{"layer_list":' + b"[" * 100_000, "damaged"),
        (b"[" * 100_000, "damaged"),
        (b'{"physical_to_logical_map": [' + b"9" * 5000 + b"]}", ""),
    ],
)
def test_broken_json_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """Text that is no JSON, repeated keys, nesting without end and numbers without end."""
    assert message in refusal(written(tmp_path, ".json", content), num_gpus=1).problem


@pytest.mark.parametrize(
    ("arrays", "place", "message"),
    [
        ({}, "", "arrays found: none"),
        ({"tokens": np.array([[1]])}, "", "arrays found: tokens"),
        ({"slots": np.array([[0]]), "mask": np.array([[True]])}, "", "exactly one array"),
        (
            {"slots": np.array([[0, 1]]), "num_experts": np.array(1)},
            "slots[0][1]",
            "expert 1 is out of range",
        ),
        (
            {"slots": np.array([[0]]), "num_experts": np.array([1])},
            "num_experts",
            "expected one whole number",
        ),
        (
            {"slots": np.array([[0]]), "num_experts": np.array(1.0)},
            "num_experts",
            "expected one whole number",
        ),
        ({"slots": np.array([[0]]), "num_experts": np.array(2**40)}, "slots", "experts per layer"),
        ({MAP: np.array([2**64 - 1], dtype=np.uint64)}, MAP, "experts per layer"),
        ({"device_mask": np.array([[True]])}, "device_mask", "[gpus, layers, experts]"),
        ({"device_mask": np.array([[[1]]])}, "device_mask", "must be bool"),
        (
            {"device_mask": np.array([[[True, True], [True, False]]])},
            "device_mask[:, 1]",
            "expert 1 has no replica",
        ),
        ({"slots": np.array([[True]])}, "slots", "must be integers, not bool"),
        ({"slots": np.array([0])}, "slots", "not of shape (1,)"),
        ({"slots": np.array([[[0, 3]]])}, "slots[0]", "expert 1 has no replica (nor have 1 more)"),
        ({"slots": np.array([[0, -2]])}, "slots[0][1]", "layer 0, GPU 0, slot 1: expert -2"),
        ({"slots": np.array([[0.0]])}, "slots", "not float64"),
        ({"slots": np.array([["a"]])}, "slots", "must be integers"),
        ({"mask": np.array([[1]])}, "mask", "must be bool"),
        ({"mask": np.zeros((2, 3), dtype=bool)}, "mask", "no true entry"),
        ({"mask": np.array([[True, False]])}, "mask", "expert 1 has no replica"),
        ({MAP: np.array([[True]])}, f"{MAP}[0]", "must be integers"),
        ({MAP: np.array([[[0]]])}, MAP, "expected [layers, P]"),
    ],
)
def test_archives_of_another_form_are_refused(
    tmp_path: Path, arrays: dict[str, Array], place: str, message: str
) -> None:
    """Names decide what an array is, and it must be that."""
    error = refusal(written(tmp_path, ".npz", as_npz(**arrays)), num_gpus=1)
    assert (error.place, message in error.problem) == (place, True), str(error)


def test_no_advice_that_a_file_cannot_follow(tmp_path: Path) -> None:
    """The argument that `Placement` offers for missing experts is not one of a file's."""
    assert "allow_missing" not in str(refusal(written(tmp_path, ".npy", as_npy(np.array([[1]])))))


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize(("given", "found"), [("num_gpus", 2), ("num_experts", 3)])
def test_given_numbers_must_be_found(tmp_path: Path, form: str, given: str, found: int) -> None:
    """What the caller knows of the placement is checked against the file."""
    suffix, write = WRITERS[form]
    path = written(tmp_path, suffix, write(Placement([[0, 1], [2, 0]])))
    numbers: dict[str, Any] = {"num_gpus": 2, "num_experts": 3}
    assert read_placement(path, **numbers).num_gpus == 2
    assert refusal(path, **{**numbers, given: found + 1}).problem


def test_arrays_behind_the_first_are_not_lost_in_silence(tmp_path: Path) -> None:
    """Layers appended to one .npy by repeated saving would be read as the first only."""
    content = as_npy(np.array([[0, 1]]))
    error = refusal(written(tmp_path, ".npy", content + content))
    assert f"{len(content)} bytes follow the array" in error.problem


@pytest.mark.parametrize("name", ["map.txt", "map", "map.csv"])
def test_the_suffix_decides(tmp_path: Path, name: str) -> None:
    """A suffix that no reader knows is refused with the list of those that are known."""
    assert ".json, .npy, .npz" in refusal(tmp_path / name).problem


@pytest.mark.parametrize("suffix", [".json", ".npy", ".npz"])
def test_a_missing_file_is_the_systems_error(tmp_path: Path, suffix: str) -> None:
    """What the operating system refuses is not the file's form."""
    for read in (read_placement, holds_placement):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / f"missing{suffix}")


# Placement or traffic


@given(placement=placements())
@settings(max_examples=60, deadline=None)
def test_slots_are_told_from_counts(folder: Path, placement: Placement) -> None:
    """A bare array of slots is a placement if no GPU repeats an expert, and any mask is one."""
    if next(placement.duplicates(), None) is None:
        assert holds_placement(written(folder, ".npy", as_npy(placement.slots)))
    assert holds_placement(written(folder, ".npy", as_npy(holds(placement))))


@pytest.mark.parametrize("tokens", [1, 8, 32, 1024, 10**6])
@pytest.mark.parametrize("experts", [8, 32, 256])
def test_counts_are_told_from_slots(tmp_path: Path, tokens: int, experts: int) -> None:
    """Small counts leave out no number either, but repeat; large ones exceed the slots."""
    rng = np.random.default_rng(tokens)
    share = rng.dirichlet(np.ones(experts), size=4)
    counts = rng.multinomial(8 * tokens, share, size=(3, 4))
    assert not holds_placement(written(tmp_path, ".npy", as_npy(counts)))
    assert not holds_placement(written(tmp_path, ".npy", as_npy(counts.astype(np.float64))))


def test_a_negative_entry_is_an_empty_slot(tmp_path: Path) -> None:
    """A broken placement with empty slots is still one, so that its own error is shown."""
    assert holds_placement(written(tmp_path, ".npy", as_npy(np.array([[0, -1], [5, 3]]))))
    assert not holds_placement(tmp_path / "counts.csv")


def entries(value: Any, place: str = "") -> list[tuple[str, list[Any], int]]:
    """List every expert id in a document: its path, the list that it is in, and where."""
    if isinstance(value, dict):
        inner = [
            (f"{place}[{key}]" if isinstance(key, int) else f"{place}.{key}".strip("."), held)
            for key, held in value.items()
        ]
        return [entry for path, held in inner for entry in entries(held, path)]
    if isinstance(value, list) and value and isinstance(value[0], int):
        return [(f"{place}[{i}]", value, i) for i in range(len(value))]
    if isinstance(value, list):
        return [entry for i, held in enumerate(value) for entry in entries(held, f"{place}[{i}]")]
    return []


NOT_IDS = [None, True, False, -2, 5000, 2**70, 0.0, "0", "", [], [0], {}, {"a": 1}]


@pytest.mark.parametrize(
    ("form", "suffix"), [pair for pair in WRITTEN if pair[1] in (".json", ".yaml")]
)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_whatever_is_no_expert_is_named(
    folder: Path, form: str, suffix: str, data: st.DataObject
) -> None:
    """Of one entry that is wrong the path is given exactly; of one that is missing, the list's."""
    needed(suffix)
    layers, gpus = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    slots = np.tile(np.arange(gpus * 2), (layers, 1)).reshape(layers, gpus, 2)
    path = written(folder, suffix, b"")
    write_placement(Placement(slots), path, format=form)
    text = path.read_text()
    load = json.loads if suffix == ".json" else pytest.importorskip("yaml").safe_load
    dump = json.dumps if suffix == ".json" else pytest.importorskip("yaml").safe_dump
    content = load(text)
    place, holder, at = data.draw(st.sampled_from(entries(content)))
    holder[at] = data.draw(st.sampled_from(NOT_IDS))
    path.write_text(dump(content))
    assert refusal(path, num_gpus=gpus, num_experts=gpus * 2).place == place
    del holder[at]
    path.write_text(dump(content))
    error = refusal(path, num_gpus=gpus, num_experts=gpus * 2)
    assert error.place
    assert place.startswith(error.place)


# Fuzz: a placement or FormatError, whatever the bytes

_SLOTS = np.array([[[0, 1], [2, -1]], [[2, 1], [0, 0]]])
INTACT = [
    (".npy", as_npy(_SLOTS)),
    (".npy", as_npy(_SLOTS > 0)),
    (".npz", as_npz(slots=_SLOTS)),
    (".npz", as_npz(mask=_SLOTS > 0)),
    (".json", json.dumps({MAP: _SLOTS.reshape(2, 4).tolist()}).encode()),
    (".json", as_ascend(Placement(_SLOTS))),
    (".json", json.dumps({"physical_to_logical": [[0, 1, 2, 0], [0, 1]]}).encode()),
    (".npz", as_npz(slots=_SLOTS, num_experts=np.array(3))),
    (".npz", as_npz(device_mask=_SLOTS > 0)),
]


def survives(path: Path) -> None:
    """Read whatever it is: the only error is FormatError."""
    with suppress(FormatError):
        read_placement(path, num_gpus=2)
    with suppress(FormatError):
        read_placement(path, num_gpus=2, format="device-mask", draft_layers=1)
    with suppress(FormatError):
        holds_placement(path)


@pytest.mark.parametrize("suffix", [".json", ".npy", ".npz"])
@given(content=st.binary(max_size=200), magic=st.sampled_from([b"", b"\x93NUMPY\x01\x00", b"PK"]))
@settings(max_examples=60, deadline=None)
def test_no_bytes_crash_a_reader(folder: Path, suffix: str, content: bytes, magic: bytes) -> None:
    """Random bytes, also behind a format's magic number."""
    survives(written(folder, suffix, magic + content))


@pytest.mark.parametrize(("suffix", "intact"), INTACT)
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_no_damage_crashes_a_reader(
    damage: Callable[[st.DataObject, bytes], bytes],
    folder: Path,
    suffix: str,
    intact: bytes,
    data: st.DataObject,
) -> None:
    """Valid files with bytes changed, cut short or prolonged."""
    survives(written(folder, suffix, damage(data, intact)))


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw lists and objects of such leaves, in any nesting, under the keys that are read."""
    ascend_keys = ["moe_layer_count", "layer_list", "device_count", "device_list", "device_expert"]
    keys = st.sampled_from([MAP, "physical_to_logical", *ascend_keys])
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=16,
    )


@given(
    value=nested(st.none() | st.booleans() | st.integers(-2, 5) | st.integers() | st.floats()),
    key=st.sampled_from([None, MAP, "layer_list"]),
    layers=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_no_json_crashes_the_reader(folder: Path, value: Any, key: str | None, layers: int) -> None:
    """Valid JSON of any structure, and the near-JSON that Python writes for NaN."""
    content = value if key is None else {key: value, "moe_layer_count": layers}
    survives(written(folder, ".json", json.dumps(content).encode()))


def test_pt_files_of_another_form_are_refused(tmp_path: Path) -> None:
    """Other keys, other values, damage and pickled code; SGLang's map is read as a placement."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "map.pt"
    good = torch.tensor([[0, 1, 2, 0], [2, 1, 0, 0]])
    torch.save({MAP: good, "epoch": 3}, path)
    assert read_placement(path, num_gpus=2).slots.tolist() == good.reshape(2, 2, 2).tolist()
    intact = path.read_bytes()
    for content, place, message in (
        ({"logical_count": good}, "", "exactly one tensor of physical_to_logical_map"),
        (good, "", "tensors found: none"),
        ({MAP: [[0]]}, MAP, "a list; expected a tensor"),
        ({MAP: good.float()}, f"{MAP}[0]", "must be integers, not float32"),
        ({MAP: good.reshape(2, 2, 2)}, MAP, "expected [layers, P] or [P]"),
        ({MAP: good * -2}, f"{MAP}[0][1]", "expert -2 is out of range"),
        ({MAP: good.to_sparse()}, MAP, "damaged"),
        ({MAP: good, "code": Path}, "", "damaged"),
    ):
        torch.save(content, path)
        error = refusal(path, num_gpus=2)
        assert (error.place, message in error.problem) == (place, True), str(error)
    for damaged in (b"", b"PK", intact[:100], intact[:-40]):
        path.write_bytes(damaged)
        assert refusal(path, num_gpus=2).problem


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_damage_crashes_the_reader_of_pt(
    damage: Callable[[st.DataObject, bytes], bytes], folder: Path, data: st.DataObject
) -> None:
    """Valid files of `torch.save` with bytes changed, cut short or prolonged."""
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save({MAP: torch.tensor(_SLOTS)}, buffer)
    survives(written(folder, ".pt", damage(data, buffer.getvalue())))
