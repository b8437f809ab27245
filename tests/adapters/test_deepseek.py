"""DeepSeek's and SGLang's functions: the README's map, the forms, and the kinds of arrays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eplb_opt.adapters import deepseek, sglang
from eplb_opt.errors import InfeasibleError, InvalidPlacementError
from eplb_opt.placement import Placement


def test_the_readme(shared_data: Path) -> None:
    """The README's call gives its copies, and every GPU the load of its map."""
    golden = json.loads((shared_data / "golden_cases.json").read_text())["eplb_readme"]
    weight = np.array(golden["weight"])
    replicas, groups, nodes, gpus = (
        golden[key] for key in ("num_replicas", "num_groups", "num_nodes", "num_gpus")
    )
    phy2log, log2phy, logcnt = deepseek.rebalance_experts(weight, replicas, groups, nodes, gpus)
    assert logcnt.tolist() == golden["logcnt"]
    assert phy2log.dtype == log2phy.dtype == logcnt.dtype == np.int64
    share = weight / logcnt
    loads = [
        np.take_along_axis(share, np.array(p2l), axis=1).reshape(2, 8, 2).sum(axis=-1)
        for p2l in (phy2log, golden["phy2log"])
    ]
    assert loads[0] == pytest.approx(loads[1])
    same = sglang.rebalance_experts(weight, replicas, groups, nodes, gpus, True)
    assert all(map(np.array_equal, same, (phy2log, log2phy, logcnt)))


def test_the_maps_agree() -> None:
    """log2phy lists exactly the slots in which phy2log has the expert, then -1."""
    weight = np.random.default_rng(0).integers(0, 99, (3, 24))
    phy2log, log2phy, logcnt = deepseek.rebalance_experts(weight, 40, 6, 2, 8)
    assert log2phy.shape == (3, 24, logcnt.max())
    for layer in range(3):
        for expert in range(24):
            slots = np.flatnonzero(phy2log[layer] == expert).tolist()
            assert logcnt[layer, expert] == len(slots)
            padding = [-1] * (logcnt.max() - len(slots))
            assert log2phy[layer, expert].tolist() == slots + padding


def test_groups_that_nodes_do_not_divide() -> None:
    """DeepSeek's rule takes the global form, and SGLang's only where it is told to."""
    weight = np.random.default_rng(1).integers(0, 99, (2, 12))
    free = deepseek.rebalance_experts(weight, 16, 3, 2, 8)
    told = sglang.rebalance_experts(weight, 16, None, 2, 8, enable_hierarchical=False)
    assert all(map(np.array_equal, free, told))
    with pytest.raises(ValueError, match="2 nodes do not divide 3 groups"):
        sglang.rebalance_experts(weight, 16, 3, 2, 8, enable_hierarchical=True)
    with pytest.raises(ValueError, match="needs the number of expert groups"):
        sglang.rebalance_experts(weight, 16, None, 2, 8, enable_hierarchical=True)


def test_what_the_originals_assert() -> None:
    """Sizes that do not fit are errors that say what would."""
    with pytest.raises(InvalidPlacementError, match="256 slots do not divide over 3 GPUs; 255 or"):
        deepseek.rebalance_experts(np.ones((1, 250)), 256, 1, 1, 3)
    with pytest.raises(InfeasibleError, match="2 missing"):
        deepseek.rebalance_experts(np.ones((1, 10)), 8, 1, 1, 4)
    with pytest.raises(ValueError, match="num_groups must be at least 1"):
        deepseek.rebalance_experts(np.ones((1, 4)), 4, 0, 1, 2)
    with pytest.raises(ValueError, match="num_nodes must be at least 1"):
        sglang.rebalance_experts(np.ones((1, 4)), 4, 1, 0, 2, enable_hierarchical=True)


def test_tensors_in_tensors_out() -> None:
    """Any torch dtype in, int64 tensors out, as for an array; the input is not written to."""
    torch = pytest.importorskip("torch")
    weight = np.random.default_rng(2).integers(0, 99, (2, 12))
    expected = deepseek.rebalance_experts(weight, 16, 2, 2, 4)
    for dtype in (torch.int32, torch.int64, torch.float32, torch.bfloat16):
        given = torch.tensor(weight, dtype=dtype)
        found = deepseek.rebalance_experts(given, 16, 2, 2, 4)
        assert all(isinstance(part, torch.Tensor) for part in found)
        assert all(part.dtype == torch.int64 for part in found)
        assert all(map(np.array_equal, found, expected))
        assert (given == torch.tensor(weight, dtype=dtype)).all()


def test_torch_is_not_imported(tmp_path: Path) -> None:
    """The adapters do without torch until they are given a tensor."""
    code = (
        "import sys, numpy, eplb_opt.adapters.deepseek as d, eplb_opt.adapters.vllm, "
        "eplb_opt.adapters.vllm_ascend; d.rebalance_experts(numpy.ones((1, 4)), 4, 1, 1, 2); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_the_answer_is_a_placement() -> None:
    """phy2log is what `Placement.from_physical_to_logical` reads."""
    phy2log, _, logcnt = deepseek.rebalance_experts(np.array([[5, 1, 1]]), 4, 1, 1, 2)
    placement = Placement.from_physical_to_logical(phy2log, num_gpus=2)
    assert placement.copies.tolist() == logcnt.tolist()
