"""The compiled exact routers against general-purpose exact engines, which know nothing of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import eplb_opt as eo
from eplb_opt.testing import Problem, check_routing

PROBLEMS = 500


def drawn_problems() -> Iterator[Problem]:
    """Yield problems of 2-10 GPUs and 4-40 experts: duplicates, empty slots, skewed tokens."""
    rng = np.random.default_rng(20251209)
    for _ in range(PROBLEMS):
        gpus, experts = int(rng.integers(2, 11)), int(rng.integers(4, 41))
        per_gpu = -(-int(experts * rng.uniform(1.0, 2.0)) // gpus)
        spare = rng.integers(-1, experts, gpus * per_gpu - experts)
        slots = rng.permutation(np.concatenate([np.arange(experts), spare]))
        placement = eo.Placement(slots.reshape(gpus, per_gpu), num_experts=experts)
        live = rng.random(experts) < rng.uniform(0.2, 1.0)
        tokens = np.where(live, np.ceil(rng.lognormal(1.0, 1.2, experts)).astype(np.int64), 0)
        yield Problem(placement, tokens)


@pytest.mark.parametrize(("engine", "package"), [("highs", "highspy"), ("cp-sat", "ortools")])
@pytest.mark.parametrize("objective", ["activations", "tokens"])
def test_engines_confirm_the_optimum(engine: str, package: str, objective: str) -> None:
    """On 500 drawn problems the engine proves the makespan of `optimal`, and finishes 99 %."""
    pytest.importorskip(package)
    finished = 0
    for problem in drawn_problems():
        placement, tokens = problem.placement, problem.tokens
        optimal = eo.solve_routing(placement, tokens, objective=objective)
        judged = eo.solve_routing(
            placement, tokens, objective=objective, method=engine, stop=eo.TimeLimit(10.0)
        )
        check_routing(placement, tokens, optimal)
        check_routing(placement, tokens, judged)
        assert judged.bound <= optimal.makespan
        if judged.status == eo.Status.OPTIMAL:
            finished += 1
            assert judged.makespan == optimal.makespan
    assert finished >= 0.99 * PROBLEMS
