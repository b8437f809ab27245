"""The torch operator on the CPU, and what it would launch on CUDA, run as host C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import host_build
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt import Placement, solve_routing
from eplb_opt.demand import count_tokens
from eplb_opt.errors import InvalidPlacementError, InvalidTokensError
from eplb_opt.gpu.tables import Shape, make_tables
from eplb_opt.testing import Problem, placements

torch = pytest.importorskip("torch")

from eplb_opt.gpu import Router  # noqa: E402
from eplb_opt.gpu.operator import launch_of, route  # noqa: E402

SMALL = Placement([[0, 1], [0, 2]])
IDS = [[0, 1], [2, 0], [1, -1]]


def arguments(placement: Placement, method: str = "optimal") -> tuple[Any, ...]:
    """Return the operator's arguments after the ids."""
    shape = Shape.of(placement)
    tables = torch.from_numpy(make_tables(placement, method))
    return tables, shape.gpus, shape.slots_per_gpu, shape.experts, method


@pytest.mark.parametrize("method", ["optimal", "metro"])
@given(data=st.data())
def test_equals_solve_and_assign(method: str, data: st.DataObject) -> None:
    """Every token gets one replica of its expert, the one that solve_routing's answer gives it."""
    placement = data.draw(placements(layered=True))
    rows = data.draw(st.integers(0, 30))
    seed = data.draw(st.integers(0, 2**32 - 1))
    size = (placement.num_layers, rows, 2)
    ids = np.random.default_rng(seed).integers(-1, placement.num_experts, size)
    routing = solve_routing(placement, count_tokens(ids, placement.num_experts), method=method)
    physical = route(torch.from_numpy(ids), *arguments(placement, method))
    np.testing.assert_array_equal(physical.numpy(), routing.assign(ids))


@pytest.mark.parametrize("method", ["optimal", "metro"])
def test_cpu_and_kernel_agree_on_any_ids(
    fibers: host_build.Fibers, draw_problem: Callable[..., Problem], method: str
) -> None:
    """Ids out of range, experts without a replica, counts of all ranks: the same on both."""
    rng = np.random.default_rng(0)
    for case in range(20):
        problem = draw_problem(rng, 6, 4, 16, 2, 1)
        tables, gpus, slots_per_gpu, experts, _ = arguments(problem.placement, method)
        ids = torch.from_numpy(rng.integers(-4, 20, (2, 30, 4))).to(
            (torch.int32, torch.int64)[case % 2]
        )
        counts = torch.from_numpy(rng.integers(-1, 5, (2, 16)).astype(np.int32))
        for given_counts in (None, counts):
            physical = torch.empty(ids.shape, dtype=torch.int32)
            shape = Shape.of(problem.placement)
            fibers.launch(launch_of(ids, tables, shape, method, given_counts, physical), case)
            routed = route(ids, tables, gpus, slots_per_gpu, experts, method, given_counts)
            assert torch.equal(physical, routed)


def test_operator_is_well_formed() -> None:
    """What torch.library checks: schema, fake kernel, tracing with sizes that vary."""
    counts = torch.tensor([[2, 2, 1]], dtype=torch.int32)
    args = (torch.tensor(IDS), *arguments(SMALL), counts)
    torch.library.opcheck(torch.ops.eplb_opt.route.default, args)


def test_compiles_in_one_graph() -> None:
    """torch.compile keeps the operator, for batches of any size."""
    router = Router(SMALL)
    compiled = torch.compile(
        lambda ids: router(ids) + 1, backend="aot_eager", fullgraph=True, dynamic=True
    )
    for rows in (3, 5, 9):
        ids = torch.arange(2 * rows).reshape(rows, 2) % 3
        assert torch.equal(compiled(ids), router(ids) + 1)


def test_a_layer_by_itself_is_routed_as_with_the_others() -> None:
    """A model calls layer by layer; the answers are those of all at once."""
    router = Router(Placement([[[0, 1], [0, 2]], [[2, 1], [0, 1]]]), method="metro")
    ids = torch.tensor([IDS, IDS])
    both = router(ids)
    for layer in range(2):
        assert torch.equal(router(ids[layer], layer=layer), both[layer])
    with pytest.raises(IndexError, match="no layer 2"):
        router(ids[0], layer=2)


def test_a_swapped_placement_is_routed_on_where_the_old_one_was() -> None:
    """The tables stay where a captured graph reads them."""
    router = Router(SMALL)
    before = router.tables.data_ptr()
    other = Placement([[2, 1], [1, 0]])
    router.swap(other)
    assert router.tables.data_ptr() == before
    assert torch.equal(router(torch.tensor(IDS)), Router(other)(torch.tensor(IDS)))
    with pytest.raises(InvalidPlacementError, match="cannot replace"):
        router.swap(Placement([[0, 1, 2], [0, 1, 2]]))


def test_a_router_made_in_inference_mode_is_swapped_outside_it() -> None:
    """Engines build their models in inference mode, and rearrange experts elsewhere."""
    with torch.inference_mode():
        router = Router(SMALL)
    other = Placement([[2, 1], [1, 0]])
    router.swap(other)
    assert torch.equal(router(torch.tensor(IDS)), Router(other)(torch.tensor(IDS)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_ids": torch.tensor(IDS, dtype=torch.float32)}, "int32 or int64"),
        ({"topk_ids": torch.tensor(IDS).T}, "contiguous"),
        ({"topk_ids": torch.tensor(IDS, device="meta")}, "tables is on"),
        ({"tables": torch.zeros(1, 4, dtype=torch.int32)}, r"int32 \[layers, 20\]"),
        ({"tables": torch.zeros(1, 20)}, r"int32 \[layers, 20\]"),
        ({"tables": torch.zeros(2, 20, dtype=torch.int32)}, "2 layers"),
        ({"counts": torch.zeros(1, 3)}, "counts must be int32"),
        ({"counts": torch.zeros(3, 1, dtype=torch.int32)}, "counts must be int32"),
        ({"method": "flow"}, "unknown method 'flow'"),
        ({"gpus": 1025}, "1025 GPUs"),
        ({"experts": 2049}, "2049 experts"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    """A wrong dtype, shape, stride, device, size or method: an error before any launch."""
    tables, gpus, slots_per_gpu, experts, method = arguments(SMALL)
    args = {
        "topk_ids": torch.tensor(IDS),
        "tables": tables,
        "gpus": gpus,
        "slots_per_gpu": slots_per_gpu,
        "experts": experts,
        "method": method,
    } | change
    with pytest.raises((InvalidTokensError, InvalidPlacementError, ValueError), match=message):
        route(**args)
