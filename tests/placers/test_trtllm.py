"""TensorRT-LLM's placement: its rule by plain search, and its own tests' figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt.placing import solve_placement


def trtllm(load: list[float], gpus: int, per_gpu: int) -> list[list[int]]:
    """Place one layer as TensorRT-LLM does, by the plainest search."""
    experts, physical = len(load), gpus * per_gpu
    copies = [1] * experts
    if any(load):
        for _ in range(physical - experts):
            copies[max(range(experts), key=lambda e: (load[e] / copies[e], e))] += 1
    else:
        copies = [physical // experts + (e < physical % experts) for e in range(experts)]
    replicas = [e for e in range(experts) for _ in range(copies[e])]
    slots: list[list[int]] = [[] for _ in range(gpus)]
    filled = [0.0] * gpus
    for e in sorted(replicas, key=lambda e: (-load[e] / copies[e], e)):
        gpu = min((g for g in range(gpus) if len(slots[g]) < per_gpu), key=lambda g: filled[g])
        slots[gpu].append(e)
        filled[gpu] += load[e] / copies[e]
    return slots


@given(
    st.lists(st.one_of(st.integers(0, 4), st.integers(0, 2**30)).map(float), min_size=1),
    st.integers(1, 6),
    st.integers(0, 4),
)
def test_it_follows_its_rule(load: list[float], gpus: int, extra: int) -> None:
    """The compiled placement is, slot by slot, that of a plain search."""
    per_gpu = -(-len(load) // gpus) + extra
    plan = solve_placement(load, num_gpus=gpus, slots_per_gpu=per_gpu, method="trtllm")
    assert plan.placement.slots.tolist() == trtllm(load, gpus, per_gpu)


def test_its_own_tests(shared_data: Path) -> None:
    """The copies that TensorRT-LLM's tests expect, and rank loads as close as they ask for."""
    golden = json.loads((shared_data / "golden_cases.json").read_text())
    for case in golden["trtllm_replication"]["cases"] + golden["trtllm_placement"]["cases"]:
        for method in ("trtllm", "deepseek"):
            plan = solve_placement(
                case["load"],
                num_gpus=case["ep"],
                slots_per_gpu=case["slots_per_rank"],
                method=method,
            )
            assert plan.placement.copies[0].tolist() == case["replicas"]
            assert np.ptp(plan.metrics.gpu_load) <= case.get("max_diff", np.inf)
