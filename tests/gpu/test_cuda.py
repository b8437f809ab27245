"""On a GPU: the operators, batches and captured graphs give the CPU's answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from eplb_opt import solve_routing
from eplb_opt.testing import Problem

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from eplb_opt.gpu import Batch, Router  # noqa: E402
from eplb_opt.gpu.shares import assign_shares  # noqa: E402


@pytest.mark.parametrize("method", ["optimal", "metro", "metro:order=random,seed=3"])
def test_batches_are_the_cpus(draw_problem: Callable[..., Problem], method: str) -> None:
    """Every width of GPU sets, to the bit."""
    rng = np.random.default_rng(0)
    for gpus, slots, experts in ((5, 4, 12), (16, 20, 256), (64, 6, 256), (320, 2, 500)):
        problem = draw_problem(rng, gpus, slots, experts, 2, 20)
        batch = Batch(problem.placement, 40, method=method)
        batch.solve(torch.from_numpy(problem.tokens).cuda())
        routing = solve_routing(problem.placement, problem.tokens, method=method)
        assert (batch.makespan.cpu().numpy() == routing.makespan.ravel()).all()
        assert (batch.activated.cpu().numpy() == routing.activated.reshape(40, -1)).all()
        if method == "optimal":
            certificate = routing.certificate.reshape(40, -1)
            assert (batch.certificate.cpu().numpy() == certificate).all()


def test_locks_are_let_go(draw_problem: Callable[..., Problem]) -> None:
    """Algorithm 1 ends, and counts every live expert once."""
    problem = draw_problem(np.random.default_rng(1), 16, 20, 256, 1, 200)
    tokens = torch.from_numpy(problem.tokens).cuda()
    batch = Batch(problem.placement, 200, method="metro", locked=True)
    batch.solve(tokens)
    live = (tokens.reshape(200, -1) > 0).sum(dim=1)
    assert torch.equal(batch.activated.sum(dim=1), live)


@pytest.mark.parametrize("method", ["optimal", "metro"])
def test_operators_are_the_cpus(draw_problem: Callable[..., Problem], method: str) -> None:
    """Any ids, sentinels among the answers."""
    rng = np.random.default_rng(2)
    placement = draw_problem(rng, 8, 5, 32, 2, 1).placement
    router = Router(placement, method=method)
    ids = torch.from_numpy(rng.integers(-4, 36, (2, 100, 4)))
    counts = torch.from_numpy(rng.integers(-1, 5, (2, 32)).astype(np.int32))
    here = [router(ids), router(ids, counts=counts)]
    router.to("cuda")
    there = [router(ids.cuda()), router(ids.cuda(), counts=counts.cuda())]
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one, other.cpu())
    slots = torch.from_numpy(placement.logical_to_physical.copy())
    args = (ids, slots, (slots >= 0).int() * 3, counts.clamp(min=0))
    assert torch.equal(assign_shares(*args), assign_shares(*(a.cuda() for a in args)).cpu())


def test_a_captured_graph_sees_new_ids_and_a_new_placement(
    draw_problem: Callable[..., Problem],
) -> None:
    """A graph captured once serves every batch and placement of its shape."""
    rng = np.random.default_rng(3)
    placements = [draw_problem(rng, 8, 5, 32, 1, 1).placement for _ in range(2)]
    router = Router(placements[0], device="cuda")
    ids = torch.zeros(50, 4, dtype=torch.int64, device="cuda")
    router(ids)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        physical = router(ids)
    for placement in placements:
        router.swap(placement)
        ids.copy_(torch.from_numpy(rng.integers(0, 32, (50, 4))))
        graph.replay()
        assert torch.equal(physical.cpu(), Router(placement)(ids.cpu()))
