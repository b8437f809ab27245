"""vLLM-Ascend's policies: what they say about the change, and the table they propose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from eplb_opt.adapters.vllm_ascend import (
    DefaultEplb,
    FlashLB,
    RandomLoadBalance,
    SwiftBalanceEplb,
)
from eplb_opt.errors import InvalidPlacementError, InvalidTokensError
from eplb_opt.metrics import PlacementMetrics
from eplb_opt.placement import Placement
from eplb_opt.placing import solve_placement

POLICIES = (RandomLoadBalance, DefaultEplb, SwiftBalanceEplb, FlashLB)


def draw(seed: int, *, layers: int = 3) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a table of 12 experts on 4 devices x 4 slots, and the tokens of each slot."""
    rng = np.random.default_rng(seed)
    table = np.array([(np.arange(16) % 12).reshape(4, 4)] * layers)
    return table, rng.lognormal(5, 1, table.shape).astype(np.int64) + 1


def loads(table: NDArray[np.int64], workload: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the load of each expert: what its slots took together."""
    load = np.zeros((len(table), int(table.max()) + 1))
    for layer, (slots, tokens) in enumerate(zip(table, workload, strict=True)):
        np.add.at(load[layer], slots, tokens)
    return load


def peaks(table: NDArray[np.int64], load: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each layer's peak under the equal split."""
    return PlacementMetrics.of(Placement(table, load.shape[1]), load).peak


@pytest.mark.parametrize("policy", POLICIES)
def test_the_table_is_the_placers(policy: type[Any]) -> None:
    """The new table is what the placement method of the same rule answers."""
    method = dict(
        zip(POLICIES, ("ascend-random", "ascend-default", "swift", "flashlb"), strict=True)
    )[policy]
    table, workload = draw(0)
    _, _, new = policy().rebalance_experts(table, workload)
    plan = solve_placement(
        loads(table, workload), num_gpus=4, slots_per_gpu=4, previous=table, method=method
    )
    assert new.tolist() == plan.placement.slots.tolist()
    assert new.dtype == np.int64


@pytest.mark.parametrize("policy", [DefaultEplb, SwiftBalanceEplb])
def test_the_change_must_be_worth_it(policy: type[Any]) -> None:
    """Change if the summed peak falls below 0.95 of the measured; layers by their gain."""
    table, workload = draw(1)
    change, priority, new = policy().rebalance_experts(table, workload)
    before = workload.sum(axis=-1).max(axis=-1)
    after = peaks(new, loads(table, workload))
    assert change == 1
    assert after.sum() < 0.95 * before.sum()
    assert priority.tolist() == np.argsort(after / before, kind="stable").tolist()
    load = loads(table, workload)
    share = np.take_along_axis(load / Placement(new).copies, new.reshape(3, -1), axis=1)
    change, _, _ = policy().rebalance_experts(new, share.reshape(new.shape))
    assert change == 0


def test_without_load_nothing_changes() -> None:
    """All-zero workloads divide nothing by zero: no change, layers in order."""
    table, workload = draw(2)
    for policy in (DefaultEplb, SwiftBalanceEplb):
        change, priority, new = policy().rebalance_experts(table, 0 * workload)
        assert (change, priority.tolist()) == (0, [0, 1, 2])
        assert (Placement(new).copies >= 1).all()


def test_random_always_changes() -> None:
    """As the original: 1, layers as 0, -1, -2, and two slots swapped."""
    table, workload = draw(3)
    change, priority, new = RandomLoadBalance().rebalance_experts(table, workload)
    assert (change, priority) == (1, [0, -1, -2])
    assert int((new != table).sum()) == 6


def test_flashlb_waits_until_balance_worsens() -> None:
    """A layer is placed at first, then left alone while its balance holds, then placed again."""
    policy = FlashLB(SimpleNamespace(max_stage_window=1, threshold_value=0.5))
    table, workload = draw(4)
    change, priority, new = policy.rebalance_experts(table, workload)
    assert change is True
    assert set(priority.tolist()) <= {0, 1, 2}
    load = loads(table, workload)
    assert (peaks(new, load)[priority] < peaks(table, load)[priority]).all()
    table = new
    served = np.take_along_axis(
        (load / Placement(table).copies), table.reshape(3, -1), axis=1
    ).reshape(table.shape)
    change, priority, new = policy.rebalance_experts(table, served)
    assert (change, priority.tolist(), new.tolist()) == (False, [], table.tolist())
    served[1] = served[1][::-1] ** 3
    change, priority, new = policy.rebalance_experts(table, served)
    assert (change, priority.tolist()) == (True, [1])
    assert np.array_equal(new[[0, 2]], table[[0, 2]])


def test_flashlb_remembers_samples() -> None:
    """Samples given one after another count like samples given at once, the oldest forgotten."""
    table, _ = draw(5)
    samples = np.random.default_rng(6).lognormal(5, 1, (5, *table.shape))
    config = SimpleNamespace(max_stage_window=4, threshold_value=2.0)
    together, policy = FlashLB(config), FlashLB(config)
    for sample in samples:
        by_turns = policy.rebalance_experts(table, sample)
    at_once = together.rebalance_experts(table, samples[1:])
    assert by_turns[2].tolist() == at_once[2].tolist()


def test_flashlb_may_change_few_layers() -> None:
    """`layers_upper_bound` limits how many layers are named, the best first."""
    table, workload = draw(7)
    every = FlashLB().rebalance_experts(table, workload)[1]
    assert len(every) > 1
    one = FlashLB(SimpleNamespace(layers_upper_bound=1)).rebalance_experts(table, workload)[1]
    assert one.tolist() == every[:1].tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_tensors_in_tensors_out(policy: type[Any]) -> None:
    """Tables as tensors give tables as tensors."""
    torch = pytest.importorskip("torch")
    table, workload = draw(8)
    new = policy().rebalance_experts(torch.tensor(table), torch.tensor(workload))[2]
    assert isinstance(new, torch.Tensor)
    assert new.tolist() == policy().rebalance_experts(table, workload)[2].tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_does_not_fit_is_refused(policy: type[Any]) -> None:
    """A workload of another shape, a table with a lost expert, a negative count: each by name."""
    table, workload = draw(9)
    with pytest.raises(InvalidTokensError, match="the workload must have the shape of the table"):
        policy().rebalance_experts(table, workload[:, :, :2])
    with pytest.raises(InvalidPlacementError, match="layer 0: expert 3 has no replica"):
        policy().rebalance_experts(np.where(table == 3, 2, table), workload)
    with pytest.raises(InvalidTokensError, match="has load -"):
        policy().rebalance_experts(table, workload - 10**6)
