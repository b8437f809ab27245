"""`flow`: the fewest tokens on the fullest GPU, proven by a max-flow, documented to the bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_opt import _core
from eplb_opt.errors import InfeasibleError, InvalidTokensError
from eplb_opt.placement import Placement
from eplb_opt.routing import Status, solve_routing
from eplb_opt.testing import Problem, check_routing, problems

DrawProblem = Callable[..., Problem]
Answer = tuple[list[list[int]], int, list[bool]]  # tokens by slot, makespan, certificate
Rename = Callable[[Problem, int, str], Problem]

# GPUs, slots, experts, batches, placements: one line for each width of the compiled GPU sets.
WIDTHS = [
    (1, 5, 5, 20, 3),
    (16, 6, 70, 25, 20),
    (64, 6, 256, 25, 10),
    (65, 5, 256, 20, 10),
    (128, 4, 300, 20, 5),
    (200, 4, 500, 20, 5),
    (512, 3, 1000, 10, 3),
    (700, 3, 2048, 10, 3),
    (1024, 2, 2048, 10, 2),
]
LINES = (2, 3, 7, 20, 64, 65, 128, 300, 600)

WAVE = 63  # distances


def can_be_served(gpus: list[list[int]], tokens: list[int], most: int) -> bool:
    """Say whether at most so many tokens on each GPU suffice: a max-flow by shortest paths.

    Nodes: experts 0.., then GPUs; an expert's tokens flow to any GPU that holds it.
    """
    experts = len(tokens)
    flow: dict[tuple[int, int], int] = {}
    holders = [[g for g, row in enumerate(gpus) if expert in row] for expert in range(experts)]
    held = [[e for e in range(experts) if g in holders[e]] for g in range(len(gpus))]
    room = [most] * len(gpus)
    left = list(tokens)
    while any(left):
        start = next(expert for expert in range(experts) if left[expert])
        parent: dict[int, int] = {start: start}
        queue = deque([start])
        end = None
        while queue and end is None:
            node = queue.popleft()
            if node < experts:
                onward = [experts + g for g in holders[node]]
            elif room[node - experts]:
                end = node
                continue
            else:
                onward = [e for e in held[node - experts] if flow.get((e, node), 0)]
            for other in onward:
                if other not in parent:
                    parent[other] = node
                    queue.append(other)
        if end is None:
            return False
        path = [end]
        while path[-1] != start:
            path.append(parent[path[-1]])
        back = [(b, a) for a, b in pairwise(path) if b >= experts]
        amount = min([left[start], room[end - experts], *(flow[a, b] for b, a in back)])
        for there, here in pairwise(path):
            if here < experts:
                flow[here, there] = flow.get((here, there), 0) + amount
            else:
                flow[there, here] -= amount
        left[start] -= amount
        room[end - experts] -= amount
    return True


def distances(
    rows: list[list[int]], held: list[dict[int, int]], load: list[int], target: int
) -> dict[int, int]:
    """Say how far each GPU is from one below the target, over the experts that it serves."""
    reached = [
        {other for e in row if e >= 0 and held[e].get(g, 0) for other in held[e]}
        for g, row in enumerate(rows)
    ]
    near = {g for g, row in enumerate(rows) if load[g] < target and any(e >= 0 for e in row)}
    found: dict[int, int] = {}
    distance = 0
    while near:
        found |= dict.fromkeys(near, distance)
        near = {g for g in range(len(rows)) if g not in found and reached[g] & near}
        distance += 1
    return found


def by_the_rule(rows: list[list[int]], tokens: list[int]) -> Answer:
    """Follow the rule at the head of `flow.hpp`."""
    filled = [any(e >= 0 for e in row) for row in rows]
    held: list[dict[int, int]] = [{} for _ in tokens]  # an expert's tokens by GPU
    for g, row in enumerate(rows):
        for e in row:
            if e >= 0:
                held[e][g] = 0
    load = [0] * len(rows)

    def put(expert: int, gpu: int, amount: int) -> None:
        held[expert][gpu] += amount
        load[gpu] += amount

    for e, candidates in enumerate(held):  # step 1
        for g in candidates:
            put(e, g, tokens[e] // len(candidates))
    alone = [sum(tokens[e] for e, c in enumerate(held) if list(c) == [g]) for g in range(len(rows))]
    for e in sorted(range(len(tokens)), key=lambda e: len(held[e])):
        if len(held[e]) < 2:
            continue
        for g, amount in held[e].items():
            put(e, g, -amount)
        wet = sorted(held[e])
        while True:
            level, left_over = divmod(tokens[e] + sum(load[g] for g in wet), len(wet))
            if all(load[g] <= level for g in wet):
                break
            wet = [g for g in wet if load[g] <= level]
        for i, g in enumerate(wet):
            put(e, g, level + (i < left_over) - load[g])

    target = -(-sum(tokens) // max(1, sum(filled)))  # step 2
    certificate = filled
    if max(alone) > target:
        target = max(alone)
        certificate = [g == alone.index(target) for g in range(len(rows))]

    while max(load) > target:
        distance = distances(rows, held, load, target)  # step 3
        over = [g for g, tokens_on in enumerate(load) if tokens_on > target]
        if any(g not in distance for g in over):
            certificate = [filled[g] and g not in distance for g in range(len(rows))]
            confined = sum(load[g] for g, member in enumerate(certificate) if member)
            target = -(-confined // sum(certificate))
            continue
        farthest = max(distance[g] for g in over)  # step 4
        for far in range(farthest, max(0, farthest - WAVE), -1):
            for g in (g for g in sorted(distance) if distance[g] == far):
                for e in dict.fromkeys(e for e in rows[g] if e >= 0):
                    for end in (h for h in sorted(held[e]) if distance.get(h) == far - 1):
                        amount = min(load[g] - target, held[e][g])
                        if far == 1:
                            amount = min(amount, target - load[end])
                        if amount > 0:
                            put(e, g, -amount)
                            put(e, end, amount)
    routed = [
        [held[e][g] if e >= 0 and row.index(e) == i else 0 for i, e in enumerate(row)]
        for g, row in enumerate(rows)
    ]
    return routed, target, certificate


def routed_problems(problem: Problem) -> Iterator[tuple[list[list[int]], list[int], Answer]]:
    """Route all problems in one call; yield each one's slots by GPU, tokens and answer."""
    placement = problem.placement
    routing = solve_routing(placement, problem.tokens, objective="tokens")
    layers = placement.slots.reshape(-1, *placement.slots.shape[-2:]).tolist()
    shares = routing.tokens.reshape(-1, *placement.slots.shape[-2:]).tolist()
    certificates = routing.certificate.reshape(-1, placement.num_gpus).tolist()
    answers = zip(shares, routing.makespan.ravel().astype(int).tolist(), certificates, strict=True)
    counts = problem.tokens.reshape(-1, placement.num_experts).tolist()
    for i, (tokens, answer) in enumerate(zip(counts, answers, strict=True)):
        yield layers[i % len(layers)], tokens, answer


@pytest.mark.parametrize(
    ("most", "possible"), [(0, False), (4, False), (5, True), (10, True), (2**40, True)]
)
def test_the_reference_itself(most: int, possible: bool) -> None:
    """Ten tokens, eight of them for one expert that two GPUs hold, need five on one."""
    assert can_be_served([[0, 1], [0, 2]], [8, 1, 1], most) is possible


@given(problems(max_gpus=5, max_slots_per_gpu=4, max_experts=8, layered=False))
def test_one_token_less_is_impossible(problem: Problem) -> None:
    """The makespan can be reached, and no smaller one can, by a max-flow that shares no code."""
    gpus = problem.placement.slots.tolist()
    for tokens in problem.tokens.reshape(-1, problem.placement.num_experts).tolist():
        makespan = int(solve_routing(problem.placement, tokens, objective="tokens").makespan)
        assert can_be_served(gpus, tokens, makespan)
        assert makespan == 0 or not can_be_served(gpus, tokens, makespan - 1)


def test_a_max_flow_agrees_on_production_shapes(draw_problem: DrawProblem) -> None:
    """At 8 to 64 GPUs with 128 experts, too, the makespan suffices and one token less does not."""
    rng = np.random.default_rng(7)
    for gpus, slots in ((8, 24), (16, 12), (32, 6), (64, 3)):
        for rows, tokens, answer in routed_problems(draw_problem(rng, gpus, slots, 128, batches=3)):
            makespan = answer[1]
            assert can_be_served(rows, tokens, makespan)
            assert makespan == 0 or not can_be_served(rows, tokens, makespan - 1)


@given(problems())
def test_the_rule_to_the_bit(problem: Problem) -> None:
    """Any implementation of the rule at the head of `flow.hpp` gives the same answer."""
    for rows, tokens, answer in routed_problems(problem):
        assert by_the_rule(rows, tokens) == answer


def test_the_rule_at_every_width(draw_problem: DrawProblem, draw_line: DrawProblem) -> None:
    """Also on many GPUs, and where a wave does not cover all distances."""
    rng = np.random.default_rng(6)
    shapes = ((16, 18, 256), (64, 6, 256), (100, 4, 300), (300, 3, 800))
    drawn = [draw_problem(rng, *shape, batches=6) for shape in shapes]
    drawn += [draw_line(rng, gpus, batches=6) for gpus in (9, 64, 200)]
    for problem in drawn:
        for rows, tokens, answer in routed_problems(problem):
            assert by_the_rule(rows, tokens) == answer


def test_farther_than_a_wave() -> None:
    """Tokens pass down a line of 100 GPUs, from the only one that has too many to the only room."""
    gpus = 100
    own = [97, *[100] * (gpus - 2), 106]
    shared = [6] * (gpus - 1)  # each by a GPU and the next
    rows = [[gpus - 1 + g, g - 1 if g else -1, g if g < gpus - 1 else -1] for g in range(gpus)]
    problem = Problem(Placement(rows), np.array(shared + own))
    ((_, tokens, answer),) = routed_problems(problem)
    assert answer[1] == 106
    assert by_the_rule(rows, tokens) == answer


@given(problems())
def test_every_answer_is_proven(problem: Problem) -> None:
    """Integral shares, with the makespan that the certificate proves."""
    routing = solve_routing(problem.placement, problem.tokens, objective="tokens")
    check_routing(problem.placement, problem.tokens, routing)
    assert (routing.status == Status.OPTIMAL).all()


def test_certificates_at_every_width(draw_problem: DrawProblem, draw_line: DrawProblem) -> None:
    """Thousands of answers, on 1 to 1,024 GPUs, each with a proof that counting confirms."""
    rng = np.random.default_rng(5)
    drawn = [
        draw_problem(rng, gpus, slots, experts, layers=2, batches=batches)
        for gpus, slots, experts, batches, repeats in WIDTHS
        for _ in range(repeats)
    ]
    drawn += [draw_line(rng, gpus, batches=50) for gpus in LINES]
    checked = 0
    for problem in drawn:
        routing = solve_routing(problem.placement, problem.tokens, objective="tokens")
        check_routing(problem.placement, problem.tokens, routing)
        assert (routing.status == Status.OPTIMAL).all()
        assert (routing.certificate.any(axis=-1) | (routing.makespan == 0)).all()
        checked += routing.makespan.size
    assert checked >= 3000


def test_real_files(real_problems: dict[str, Problem]) -> None:
    """All recorded loads, token batches and production placements are balanced, with proof."""
    for problem in real_problems.values():
        routing = solve_routing(problem.placement, problem.tokens, objective="tokens")
        check_routing(problem.placement, problem.tokens, routing)
        assert (routing.status == Status.OPTIMAL).all()


def test_huge_counts_are_balanced_to_the_token() -> None:
    """The most tokens per expert are split to the token, and sums of them are exact."""
    most = _core.MAX_TOKENS_PER_EXPERT
    placement = Placement([[0, 1], [0, 1], [0, 2]])
    routing = solve_routing(placement, [most, most - 1, most - 3], objective="tokens")
    assert sorted(routing.gpu_tokens().tolist()) == [most - 2, most - 1, most - 1]
    crowded = Placement([range(1000), [-1] * 1000])
    routing = solve_routing(crowded, [most] * 1000, objective="tokens")
    assert int(routing.makespan) == int(routing.bound) == 1000 * most


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(1, 8))
def test_replicas_everywhere_reach_the_ceiling(tokens: list[int], gpus: int) -> None:
    """Where every GPU holds every expert, the fullest has the mean, rounded up."""
    placement = Placement([list(range(len(tokens)))] * gpus)
    routing = solve_routing(placement, tokens, objective="tokens")
    assert int(routing.makespan) == -(-sum(tokens) // gpus)


@given(problems(), st.integers(0, 2**32 - 1), st.sampled_from(["gpus", "slots", "experts"]))
def test_names_do_not_matter(rename: Rename, problem: Problem, seed: int, what: str) -> None:
    """Renaming GPUs, slots or experts leaves the makespan alone."""
    other = rename(problem, seed, what)
    before = solve_routing(problem.placement, problem.tokens, objective="tokens")
    after = solve_routing(other.placement, other.tokens, objective="tokens")
    assert np.array_equal(before.makespan, after.makespan)


@given(problems(), st.integers(2, 1000))
def test_scaling_the_tokens_scales_the_makespan(problem: Problem, factor: int) -> None:
    """So many times the tokens, so many times the makespan, less what rounding up had cost."""
    tokens = np.minimum(problem.tokens, 10**6)
    once = solve_routing(problem.placement, tokens, objective="tokens").makespan
    scaled = solve_routing(problem.placement, tokens * factor, objective="tokens").makespan
    assert (scaled <= once * factor).all()
    assert ((scaled > (once - 1) * factor) | (once == 0)).all()


@given(problems())
def test_no_rule_balances_better(problem: Problem) -> None:
    """Uniform, random and whole-expert routing have at least as many tokens on the fullest."""
    best = solve_routing(problem.placement, problem.tokens, objective="tokens").makespan
    for method in ("uniform", "random", "metro"):
        routing = solve_routing(
            problem.placement, problem.tokens, objective="tokens", method=method
        )
        assert (routing.makespan >= best).all()
        assert np.array_equal(routing.bound, best)


def test_worked_examples() -> None:
    """Splits by hand: even, odd, confined, and a duplicate that is one candidate."""
    for slots, tokens, expected in (
        ([[0], [0]], [7], [[4], [3]]),
        ([[0, 1], [0, 2]], [4, 6, 0], [[0, 6], [4, 0]]),
        ([[0, 1], [0, 2]], [4, 3, 1], [[1, 3], [3, 1]]),
        ([[0, 0], [0, -1]], [8], [[4, 0], [4, 0]]),
    ):
        routing = solve_routing(Placement(slots), tokens, objective="tokens")
        assert routing.tokens.tolist() == expected


def test_bad_tokens_are_refused() -> None:
    """Counts out of range and absent experts are named."""
    placement = Placement([[0, 1], [0, -1]], num_experts=3, allow_missing=True)
    with pytest.raises(InfeasibleError, match="expert 2 has tokens but no replica"):
        solve_routing(placement, [1, 1, 1], objective="tokens")
    with pytest.raises(InvalidTokensError, match="expert 1 has -4 tokens"):
        solve_routing(placement, [1, -4, 0], objective="tokens")
    with pytest.raises(ValueError, match="only, not activations"):
        solve_routing(placement, [1, 1, 0], method="flow")
