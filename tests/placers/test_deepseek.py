"""DeepSeek's EPLB: its rule by plain search, its README, and what it falls back to."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt.placers import DeepSeek
from eplb_opt.placing import solve_placement


def pack(weight: list[float], bins: int) -> list[list[int]]:
    """Return the items of each bin: heaviest first to the lightest with room, or one in turn."""
    room = len(weight) // bins
    if room == 1:
        return [[item] for item in range(bins)]
    packed: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(weight)), key=lambda i: -weight[i]):
        loads = [sum(weight[i] for i in items) for items in packed]
        lightest = min((b for b in range(bins) if len(packed[b]) < room), key=lambda b: loads[b])
        packed[lightest].append(item)
    return packed


def deepseek(
    load: list[float], groups: int, nodes: int, gpus: int, per_gpu: int
) -> list[list[int]]:
    """Place one layer as DeepSeek's EPLB does, by the plainest search."""
    size = len(load) // groups
    of_group = [range(g * size, (g + 1) * size) for g in range(groups)]
    slots: list[list[int]] = []
    for on_node in pack([sum(load[e] for e in group) for group in of_group], nodes):
        experts = [e for group in on_node for e in of_group[group]]
        replicas, copies = list(range(len(experts))), [1] * len(experts)
        while len(replicas) < gpus // nodes * per_gpu:
            hottest = max(
                range(len(experts)), key=lambda i: (load[experts[i]] / copies[i], -copies[i], -i)
            )
            copies[hottest] += 1
            replicas.append(hottest)
        weight = [load[experts[i]] / copies[i] for i in replicas]
        slots += [[experts[replicas[r]] for r in items] for items in pack(weight, gpus // nodes)]
    return slots


SIZES = st.tuples(*[st.integers(1, 3)] * 4, st.integers(0, 2))


@given(SIZES, st.data())
def test_it_follows_its_rule(sizes: tuple[int, ...], data: st.DataObject) -> None:
    """The compiled placement is, slot by slot, that of a plain search, in both forms."""
    nodes, node_gpus, node_groups, group_size, extra = sizes
    gpus, groups = nodes * node_gpus, nodes * node_groups
    experts = groups * group_size
    per_gpu = -(-experts // gpus) + extra
    entries = st.one_of(st.integers(0, 9), st.integers(0, 2**40)).map(float)
    load = data.draw(st.lists(entries, min_size=experts, max_size=experts))
    plan = solve_placement(
        load, num_gpus=gpus, slots_per_gpu=per_gpu, num_nodes=nodes, num_groups=groups
    )
    assert plan.placement.slots.tolist() == deepseek(load, groups, nodes, gpus, per_gpu)
    assert plan.note == ""
    plan = solve_placement(
        load,
        num_gpus=gpus,
        slots_per_gpu=per_gpu,
        num_nodes=nodes,
        num_groups=groups,
        method="deepseek:form=global",
    )
    assert plan.placement.slots.tolist() == deepseek(load, 1, 1, gpus, per_gpu)


def test_the_readme(shared_data: Path) -> None:
    """On the README's weights every GPU has the load that the README's two-node map gives it."""
    golden = json.loads((shared_data / "golden_cases.json").read_text())["eplb_readme"]
    load = np.array(golden["weight"], dtype=np.float64)
    gpus, per_gpu = golden["num_gpus"], golden["num_replicas"] // golden["num_gpus"]
    plan = solve_placement(
        load,
        num_gpus=gpus,
        slots_per_gpu=per_gpu,
        num_nodes=golden["num_nodes"],
        num_groups=golden["num_groups"],
    )
    assert plan.placement.copies.tolist() == golden["logcnt"]
    share = load / np.array(golden["logcnt"])
    published = np.take_along_axis(share, np.array(golden["phy2log"]), axis=1)
    expected = published.reshape(2, gpus, -1).sum(axis=-1)
    assert plan.metrics.gpu_load == pytest.approx(expected)
    free = solve_placement(load, num_gpus=gpus, slots_per_gpu=per_gpu)
    assert (free.makespan <= plan.makespan).all()


def test_packing_of_sglang(shared_data: Path) -> None:
    """SGLang's packing example: 9, 1, 1, 1 in two full packs weigh at most 10."""
    golden = json.loads((shared_data / "golden_cases.json").read_text())["sglang_balanced_packing"]
    weight, packs = golden["weight"], golden["packs"]
    plan = solve_placement(weight, num_gpus=packs, slots_per_gpu=len(weight) // packs)
    assert float(plan.makespan) == golden["max_pack"]


def test_groups_stay_on_a_node(recorded_load: Callable[[str], NDArray[np.int64]]) -> None:
    """Recorded loads in 4 nodes x 8 groups: each node holds whole groups, equally many."""
    load = recorded_load("prefill_in4096")
    plan = solve_placement(load, num_gpus=32, slots_per_gpu=9, num_nodes=4, num_groups=8)
    for layer in plan.placement.slots.reshape(len(load), 4, -1) // 32:
        assert [len(set(node.tolist())) for node in layer] == [2] * 4
    row = load[20].astype(float).tolist()
    assert plan.placement.slots[20].tolist() == deepseek(row, 8, 4, 32, 9)


def test_nodes_that_do_not_divide_the_groups() -> None:
    """By DeepSeek's rule the global form takes over, the plan says why; by order it is an error."""
    load = [6, 5, 4, 3, 2, 1]
    place = partial(solve_placement, load, num_gpus=4, slots_per_gpu=2, num_nodes=2, num_groups=3)
    plan = place()
    assert plan.note == "global: 2 nodes do not divide 3 groups"
    assert plan.placement == solve_placement(load, num_gpus=4, slots_per_gpu=2).placement
    with pytest.raises(ValueError, match="2 nodes do not divide 3 groups; deepseek's global form"):
        place(method="deepseek:form=hierarchical")


def test_an_unknown_form() -> None:
    """The forms are named."""
    with pytest.raises(ValueError, match="form is auto, global, hierarchical, not 'flat'"):
        DeepSeek(form="flat")
