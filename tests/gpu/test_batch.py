"""Many problems in one launch, run as host C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import host_build
import numpy as np
import pytest

from eplb_opt import Placement, solve_routing
from eplb_opt.bounds import certified_bound
from eplb_opt.errors import InvalidTokensError, SolverUnavailableError
from eplb_opt.testing import Problem

torch = pytest.importorskip("torch")

from eplb_opt.gpu import Batch  # noqa: E402

SMALL = Placement([[0, 1], [0, 2]])


@pytest.mark.parametrize(
    ("method", "locked"), [("optimal", False), ("metro", False), ("metro", True)]
)
def test_a_batch_is_one_launch(
    fibers: host_build.Fibers, draw_problem: Callable[..., Problem], method: str, locked: bool
) -> None:
    """Batches of layers are problems in a row; the optimum comes with its proof."""
    rng = np.random.default_rng(4)
    problem = draw_problem(rng, 6, 4, 16, 3, 5)
    batch = Batch(problem.placement, 15, method=method, locked=locked, device="cpu")
    launch = batch.launch(torch.from_numpy(problem.tokens))
    fibers.launch(launch)
    routing = solve_routing(problem.placement, problem.tokens, method=method)
    assert launch.blocks == 15
    if not locked:
        assert (batch.makespan.numpy() == routing.makespan.ravel()).all()
        assert (batch.activated.numpy() == routing.activated.reshape(15, -1)).all()
    if method == "optimal":
        certificate = batch.certificate.numpy().reshape(routing.certificate.shape)
        bound = certified_bound(problem.placement, problem.tokens, certificate, "activations")
        assert (bound == routing.makespan).all()
    else:
        with pytest.raises(AttributeError, match="proves nothing"):
            _ = batch.certificate


@pytest.mark.parametrize(
    "tokens",
    [
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(1, 3, dtype=torch.int64),
        torch.zeros(3, 2, dtype=torch.int64),
        torch.zeros(3, 2, dtype=torch.int64).T,
        torch.zeros(2, 3, dtype=torch.int64, device="meta"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tokens: Any) -> None:
    """Another dtype, number, shape, stride or device."""
    with pytest.raises(InvalidTokensError, match="tokens"):
        Batch(SMALL, 2, device="cpu").launch(tokens)


def test_what_cannot_be_is_refused() -> None:
    """Locks without metro, and problems that are not whole batches."""
    with pytest.raises(ValueError, match="only metro has locks"):
        Batch(SMALL, 1, locked=True, device="cpu")
    layers = Placement([[[0, 1], [0, 2]]] * 2)
    with pytest.raises(ValueError, match="multiple of the 2 layers"):
        Batch(layers, 3, device="cpu")


def test_without_a_gpu_solving_says_so() -> None:
    """The launch is refused where torch has no CUDA."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SolverUnavailableError, match="GPU"):
        Batch(SMALL, 1, device="cpu").solve(torch.ones(1, 3, dtype=torch.int64))
