"""Engines' settings: what is read, what is refused and how, and the loop that comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_opt.errors import FormatError
from eplb_opt.formats.placements import write_placement
from eplb_opt.heat import CollectThenDecide, PeriodicDump, SlidingWindow, StageFilter
from eplb_opt.placement import Placement
from eplb_opt.placers import DeepSeek, Swift
from eplb_opt.placing import solve_placement
from eplb_opt.settings import AscendEplb, Deployment, SglangEplb, VllmEplb

DEPLOYMENT = Deployment(num_layers=2, num_experts=8, num_gpus=4, most_decode_tokens=16)
BOTH = {"DYNAMIC_EPLB": "true", "EXPERT_MAP_RECORD": "1"}


def balanced() -> Placement:
    """Give a placement that no engine starts with."""
    return solve_placement(
        np.tile(np.arange(1, 9), (2, 1)), num_gpus=4, slots_per_gpu=3, method="search"
    ).placement


# vLLM-Ascend


def test_the_user_guides_eplb_config_is_a_collect_then_decide_cycle() -> None:
    """With swift, the policy that it recommends, and the stage that is asked for."""
    config = {
        "dynamic_eplb": True,
        "expert_heat_collection_interval": 400,
        "algorithm_execution_interval": 30,
        "eplb_policy_type": 2,
        "num_redundant_experts": 4,
        "eplb_heat_collection_stage": "decode",
    }
    loop = AscendEplb.of(config, {"DYNAMIC_EPLB": "True"}).loop(DEPLOYMENT)
    assert isinstance(loop.heat, CollectThenDecide)
    assert (loop.heat.collection_interval, loop.heat.algorithm_interval) == (400, 30)
    assert loop.heat.collect == StageFilter("decode", 16)
    assert loop.method == Swift()
    assert loop.placement.slots[1].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3]]


@pytest.mark.parametrize(
    ("config", "environ", "message"),
    [
        ({"dynamic_eplb": True}, {}, "dynamic_eplb needs .* DYNAMIC_EPLB=true"),
        ({"dynamic_eplb": True}, {"EXPERT_MAP_RECORD": "true"}, "dynamic_eplb needs"),
        ({"dynamic_eplb": True}, {"DYNAMIC_EPLB": "no"}, "dynamic_eplb needs"),
        (
            {"expert_map_record_path": "map.json"},
            {},
            "expert_map_record_path needs .* DYNAMIC_EPLB=true or EXPERT_MAP_RECORD=true",
        ),
    ],
)
def test_ascends_guards_are_kept(
    config: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    """Dynamic placements and records are refused without their environment variable."""
    with pytest.raises(ValueError, match=message):
        AscendEplb.of(config, environ)


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine does."""
    monkeypatch.setenv("DYNAMIC_EPLB", "1")
    assert AscendEplb.of({"dynamic_eplb": True}).dynamic_eplb
    monkeypatch.delenv("DYNAMIC_EPLB")
    with pytest.raises(ValueError, match="DYNAMIC_EPLB"):
        AscendEplb.of({"dynamic_eplb": True})


def test_ascends_record_is_its_static_map(tmp_path: Path) -> None:
    """What a run with EXPERT_MAP_RECORD writes, a run without any guard loads and leaves."""
    path = str(tmp_path / "map.json")
    config = {
        "expert_map_record_path": path,
        "expert_heat_collection_interval": 1,
        "algorithm_execution_interval": 1,
        "num_redundant_experts": 4,
    }
    recording = AscendEplb.of(config, {"EXPERT_MAP_RECORD": "true"}).loop(DEPLOYMENT)
    for _ in range(4):
        recording.step([[90, 90, 1, 1, 1, 1, 1, 1]] * 2)
    static = AscendEplb.of({"expert_map_path": path}, {}).loop(DEPLOYMENT)
    assert static.heat is None
    assert static.placement == recording.placement
    dynamic = AscendEplb.of({"expert_map_path": path, "dynamic_eplb": True}, BOTH)
    assert dynamic.loop(DEPLOYMENT).heat is not None
    with pytest.raises(ValueError, match=r"expert_map_path: .* has 2 layers, .* deployment 3"):
        AscendEplb.of({"expert_map_path": path}, {}).loop(Deployment(3, 8, 4))
    with pytest.raises(FormatError):
        AscendEplb.of({"expert_map_path": path}, {}).loop(Deployment(2, 8, 2))


# vLLM and SGLang


def test_vllms_config_is_a_sliding_window() -> None:
    """With vLLM's defaults, and DeepSeek's EPLB by its automatic rule."""
    loop = VllmEplb.of({"num_redundant_experts": 4, "use_async": True}).loop(DEPLOYMENT)
    assert isinstance(loop.heat, SlidingWindow)
    assert (loop.heat.window_size, loop.heat.step_interval) == (1000, 3000)
    assert loop.method == DeepSeek()


def test_sglangs_command_line_is_a_periodic_dump(tmp_path: Path) -> None:
    """Other flags are passed over; a map and the threshold are taken."""
    path = tmp_path / "map.json"
    write_placement(balanced(), path, format="sglang", layer_ids=[1, 2])
    words = ["python", "-m", "sglang.launch_server", "--tp-size", "4", "--enable-eplb"]
    words += ["--eplb-rebalance-num-iterations", "50", "--eplb-rebalance-layers-per-chunk=1"]
    words += ["--eplb-algorithm", "deepseek_hierarchical", "--init-expert-location", str(path)]
    words += ["--eplb-min-rebalancing-utilization-threshold", "0.8"]
    words += ["--expert-distribution-recorder-buffer-size", "20"]
    deployment = Deployment(2, 8, 4, dense_layers=1)
    loop = SglangEplb.of(words).loop(deployment)
    assert isinstance(loop.heat, PeriodicDump)
    assert (loop.heat.iterations, loop.heat.window_size, loop.heat.layers_per_chunk) == (50, 20, 1)
    assert loop.method == DeepSeek("hierarchical")
    assert loop.placement == balanced()
    assert loop.worth.max_balancedness is None  # without the metrics, the engine heeds none
    measured = SglangEplb.of([*words, "--enable-expert-distribution-metrics"])
    assert measured.loop(deployment).worth.max_balancedness == 0.8
    assert SglangEplb.of({"ep_num_redundant_experts": 4}).loop(DEPLOYMENT).heat is None


# What is refused


@pytest.mark.parametrize("engine", ["ascend", "vllm", "sglang"])
def test_slots_have_to_divide_over_the_gpus(engine: str) -> None:
    """The message has the engine's name, the sum, and the next number that divides."""
    settings: Any = {
        "ascend": AscendEplb(num_redundant_experts=3),
        "vllm": VllmEplb(num_redundant_experts=3),
        "sglang": SglangEplb(ep_num_redundant_experts=3),
    }[engine]
    message = r"num_redundant_experts is 3: 8 experts \+ 3 redundant .* EP size 4; 4 would be"
    with pytest.raises(ValueError, match=message):
        settings.loop(DEPLOYMENT)


@pytest.mark.parametrize(
    ("cls", "given", "message"),
    [
        (AscendEplb, {"expert_heat_collection_interval": 0}, "interval is 0; .* 1 or more"),
        (AscendEplb, {"algorithm_execution_interval": 2.5}, "algorithm_execution_interval is 2.5"),
        (AscendEplb, {"num_redundant_experts": -1}, "num_redundant_experts is -1"),
        (AscendEplb, {"num_redundant_experts": True}, "num_redundant_experts is True"),
        (AscendEplb, {"eplb_policy_type": 4}, "eplb_policy_type is 4; .*: 0, 1, 2, 3"),
        (AscendEplb, {"eplb_heat_collection_stage": "both"}, "'both'; .*: all, decode, prefill"),
        (AscendEplb, {"expert_map_path": "map.npz"}, "expert_map_path is 'map.npz'"),
        (AscendEplb, {"dynamic_epbl": True}, "no 'dynamic_epbl'; it has: dynamic_eplb, "),
        (VllmEplb, {"window_size": 0}, "window_size is 0"),
        (VllmEplb, {"step_interval": "3000"}, "step_interval is '3000'"),
        (VllmEplb, {"policy": "swift"}, "policy is 'swift'; the known ones are: default"),
        (SglangEplb, {"eplb_algorithm": "deepseek_vec"}, "eplb_algorithm is 'deepseek_vec'"),
        (SglangEplb, {"eplb_rebalance_layers_per_chunk": 0}, "layers_per_chunk is 0"),
        (
            SglangEplb,
            {"eplb_min_rebalancing_utilization_threshold": 1.5},
            "utilization_threshold is 1.5",
        ),
        (
            SglangEplb,
            {"expert_distribution_recorder_buffer_size": 2000},
            "num_iterations is 1000; .*buffer_size, 2000",
        ),
        (SglangEplb, ["--eplb-rebalance-num-iterations", "many"], "'many'; expected int"),
        (SglangEplb, ["--eplb-rebalance-num-iterations"], "None; expected int"),
        (SglangEplb, ["--init-expert-location"], "None; expected str"),
    ],
)
def test_wrong_settings_are_refused_by_the_engines_names(
    cls: Any, given: Any, message: str
) -> None:
    """Every message says which setting, what it is, and what it should be."""
    with pytest.raises(ValueError, match=message):
        cls.of(given)


def test_a_stage_is_told_by_the_tokens_of_a_decode() -> None:
    """Without them, one stage cannot be collected."""
    config = {"dynamic_eplb": True, "eplb_heat_collection_stage": "prefill"}
    with pytest.raises(ValueError, match="most_decode_tokens"):
        AscendEplb.of(config, BOTH).loop(Deployment(2, 8, 4))
