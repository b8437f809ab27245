"""The table of routing methods: names, options, and methods of one's own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from eplb_opt.objective import Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.routers import (
    Flow,
    Matching,
    Metro,
    Nearest,
    Random,
    Traits,
    Uniform,
    resolve_method,
    routing_methods,
)
from eplb_opt.routers.base import Context, Solve, finish
from eplb_opt.routing import Router, Routing, Status, solve_routing
from eplb_opt.stopping import TimeLimit
from eplb_opt.testing import Problem, check_routing, problems

ACTIVATIONS, TOKENS = Objective.preset("activations"), Objective.preset("tokens")


def test_all_methods_are_listed_with_what_they_can_do() -> None:
    """Names, exactness, objectives, inputs and extras, as documented."""
    methods = routing_methods()
    assert list(methods) == [
        "matching",
        "flow",
        "makespan",
        "highs",
        "cp-sat",
        "pulp",
        "lst",
        "metro",
        "uniform",
        "nearest",
        "random",
        "vllm-hash",
        "trtllm",
        "rank-mod",
    ]
    exact = {name for name, traits in methods.items() if traits.exact}
    assert exact == {"matching", "flow", "makespan", "highs", "cp-sat", "pulp"}
    extras = {name: traits.extra for name, traits in methods.items() if traits.extra}
    assert extras == dict.fromkeys(("highs", "cp-sat", "pulp", "lst"), "exact")
    compiled = {name for name, traits in methods.items() if traits.compiled}
    assert compiled == {"matching", "flow", "makespan", "metro", "uniform"}
    needs = {name: traits.needs for name, traits in methods.items() if traits.needs}
    assert needs == {
        "nearest": ("source_tokens",),
        "rank-mod": ("source_tokens",),
        "vllm-hash": ("topk_ids",),
        "trtllm": ("topk_ids",),
    }
    assert methods["matching"].objectives == "activations"
    assert methods["flow"].objectives == "tokens (split allowed)"
    assert methods["makespan"].objectives == methods["metro"].objectives == "any"
    assert all(traits.summary and "\n" not in traits.summary for traits in methods.values())


def test_rules_that_split_are_no_methods_for_whole_experts() -> None:
    """Where experts stay whole, the rules that split them are refused, and no others."""
    whole = Objective(pieces=(Piece(token=1.0),), split=False)
    refused = {name for name, traits in routing_methods().items() if not traits.solves(whole)}
    rules = {"uniform", "nearest", "random", "vllm-hash", "trtllm", "rank-mod"}
    assert refused == rules | {"matching", "flow"}
    for name in rules:
        assert routing_methods()[name].solves(replace(whole, split=True))
        with pytest.raises(ValueError, match=f"{name} solves any with split only, not makespan"):
            resolve_method(name, whole)


def test_the_table_is_a_copy() -> None:
    """Changing what was returned changes nothing."""
    routing_methods().clear()
    assert "metro" in routing_methods()


@pytest.mark.parametrize(
    ("spec", "objective", "expected"),
    [
        ("optimal", ACTIVATIONS, Matching()),
        ("optimal", TOKENS, Flow()),
        ("optimal:lexicographic=true", ACTIVATIONS, Matching(lexicographic=True)),
        ("matching:lexicographic=False", ACTIVATIONS, Matching()),
        ("metro", TOKENS, Metro()),
        ("metro:order=random,seed=3", ACTIVATIONS, Metro(order="random", seed=3)),
        ("metro:order=single-copy-first", ACTIVATIONS, Metro(order="single-copy-first")),
        ("nearest:gpus_per_node=4,seed=2", TOKENS, Nearest(gpus_per_node=4, seed=2)),
        ("random:seed=7", ACTIVATIONS, Random(seed=7)),
        ("uniform", TOKENS, Uniform()),
    ],
)
def test_names_with_options(spec: str, objective: Objective, expected: object) -> None:
    """A name, options after a colon, read as their types."""
    assert resolve_method(spec, objective) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mertro", r"unknown method 'mertro'; known: optimal, matching, flow, .*metro.*rank-mod"),
        ("", "unknown method ''"),
        ("Metro", "unknown method 'Metro'"),
        ("metro:sead=3", r"metro has no option 'sead'; it has: order, seed"),
        ("uniform:seed=3", r"uniform has no option 'seed'; it has: none"),
        ("metro:seed=three", r"metro: seed='three' is not an? int"),
        ("metro:seed=", r"metro: seed='' is not an? int"),
        ("metro:seed=1.5", r"metro: seed='1.5' is not an? int"),
        ("matching:lexicographic=yes", r"matching: lexicographic='yes' is not true or false"),
        ("metro:order=load", r"unknown order 'load'"),
        ("flow", r"flow solves tokens \(split allowed\) only, not activations; 'optimal' picks"),
    ],
)
def test_what_is_unknown_lists_what_is_known(spec: str, message: str) -> None:
    """Misspelt names and options, and values of the wrong type, say what there is."""
    with pytest.raises(ValueError, match=message):
        resolve_method(spec, ACTIVATIONS)


@pytest.mark.parametrize("method", [Metro, 3, None])
def test_what_is_no_method_is_refused(method: Any) -> None:
    """A class instead of an instance, or anything else, is an error that says so."""
    with pytest.raises((TypeError, ValueError), match="method"):
        solve_routing(Placement([[0]]), [1], method=method)


def test_time_limits_are_not_negative() -> None:
    """Zero and infinity are limits; negative and NaN are not."""
    assert TimeLimit(0).seconds == 0
    assert TimeLimit(float("inf")).seconds == float("inf")
    for seconds in (-1, float("nan")):
        with pytest.raises(ValueError, match="at least 0 seconds"):
            TimeLimit(seconds)


@dataclass(frozen=True)
class LastReplica:
    """A method of one's own: every expert to its replica with the highest physical id."""

    traits: ClassVar[Traits] = Traits("always the last replica")

    seen: list[Context] = field(default_factory=list)

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        layer = np.arange(placement.num_layers)[:, None]
        last = placement.logical_to_physical[
            layer, np.arange(placement.num_experts), np.maximum(placement.copies - 1, 0)
        ]
        shape = (placement.num_layers, placement.expert_of.shape[1])

        def solve(tokens: NDArray[np.int64], out: Routing, context: Context) -> None:
            self.seen.append(context)
            demand = tokens.reshape(-1, placement.num_layers, placement.num_experts)
            routed = np.zeros((len(demand), *shape), np.int64)
            routed[:, layer, last] = demand
            finish(out, routed)

        return solve


@given(problems())
def test_a_method_of_ones_own(problem: Problem) -> None:
    """An instance that follows the protocol is routed with, proven against and checked."""
    for objective in ("activations", "tokens"):
        routing = solve_routing(
            problem.placement, problem.tokens, method=LastReplica(), objective=objective
        )
        check_routing(problem.placement, problem.tokens, routing)
        best = solve_routing(problem.placement, problem.tokens, objective=objective)
        assert np.array_equal(routing.bound, best.makespan)
        optimal = routing.makespan == best.makespan
        assert np.array_equal(routing.status == Status.OPTIMAL, optimal)


def test_a_method_of_ones_own_gets_what_was_given() -> None:
    """Lists become arrays before it sees them; context arrives in one form."""
    method = LastReplica()
    router = Router(Placement([[0, 1], [0, 2]]), method=method)
    assert router.method is method
    out = router.allocate((3,))
    assert router.route([2, 1, 0], out=out).tokens.tolist() == [[0, 1], [2, 0]]
    assert method.seen[-1] == Context()
    stop = TimeLimit(5)
    router.route([2, 1, 0], topk_ids=[[0, 1], [0, -1]], stop=stop)
    ids, sources = method.seen[-1].topk_ids, method.seen[-1].source_tokens
    assert ids is not None
    assert sources is not None
    assert ids.shape == (1, 1, 1, 2, 2)
    assert sources.tolist() == [[[[2, 1, 0]]]]
    assert method.seen[-1].stop is stop


def test_an_objective_that_a_method_lacks() -> None:
    """An instance is held to its traits as a name is."""

    @dataclass(frozen=True)
    class TokensOnly(LastReplica):
        traits: ClassVar[Traits] = Traits(
            "tokens only", objectives="tokens", solves=lambda objective: objective.counts_tokens
        )

    assert resolve_method(TokensOnly(), TOKENS) == TokensOnly()
    with pytest.raises(ValueError, match="solves tokens only"):
        resolve_method(TokensOnly(), ACTIVATIONS)
