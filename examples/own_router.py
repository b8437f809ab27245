"""Plug in a router of one's own: test it on drawn problems, then measure it beside METRO.

A method is an object with `traits` and `bind`. This one lets the experts with the fewest replicas
choose first, since they have the least choice; each takes the GPU with the fewest activated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from hypothesis import given, settings
from numpy.typing import NDArray

import eplb_opt as eo
from eplb_opt.routers import Context, Solve, Traits, finish
from eplb_opt.testing import Problem, check_routing, problems


@dataclass(frozen=True)
class RarestFirst:
    """Live experts in rising number of replicas, each to its GPU with the fewest activated."""

    traits: ClassVar[Traits] = Traits("fewest replicas first, to the GPU with the fewest activated")

    def bind(self, placement: eo.Placement, objective: eo.Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        layers, experts = placement.num_layers, placement.num_experts
        rarest_first = np.argsort(placement.copies, axis=1, kind="stable")

        def solve(tokens: NDArray[np.int64], out: eo.Routing, _: Context) -> None:
            demands = tokens.reshape(-1, experts)  # layer after layer, batch after batch
            routed = np.zeros((len(demands), placement.expert_of.shape[1]), np.int64)
            for at, demand in enumerate(demands):
                layer = at % layers
                activated = np.zeros(placement.num_gpus, np.int64)
                for expert in rarest_first[layer]:
                    if demand[expert]:
                        replicas = placement.replicas(expert, layer)
                        gpus = replicas // placement.slots_per_gpu
                        chosen = np.argmin(activated[gpus])
                        activated[gpus[chosen]] += 1
                        routed[at, replicas[chosen]] = demand[expert]
            finish(out, routed)

        return solve


@settings(max_examples=200, deadline=None)
@given(problems())
def test_rarest_first(problem: Problem) -> None:
    """Every token is served once, by a GPU that holds its expert, and no bound is undercut."""
    routing = eo.solve_routing(problem.placement, problem.tokens, method=RarestFirst())
    check_routing(problem.placement, problem.tokens, routing)


def main() -> None:
    """Test the router, then print its gap beside METRO's."""
    test_rarest_first()
    print("200 drawn problems routed and checked")
    methods = (RarestFirst(), "metro", "metro:order=single-copy-first")
    study = eo.optimality_gap(gpus=[32], replication=[1.5], methods=methods, steps=2)
    for row in study.rows:
        print(f"{row.method:30} mean gap {row.gap_mean:6.1%}, worst {row.gap_max:6.1%}")


if __name__ == "__main__":
    main()
