"""`matching`: proven, documented to the bit, and the same whatever things are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt.errors import InfeasibleError, InvalidTokensError
from eplb_opt.placement import Placement
from eplb_opt.routers import Matching
from eplb_opt.routing import Status, solve_routing
from eplb_opt.testing import Problem, check_routing, placements, problems

DrawProblem = Callable[..., Problem]
Rename = Callable[[Problem, int, str], Problem]

# GPUs (least, most), slots, experts, layers, batches, placements: one line for each width of the
# compiled core's GPU sets (64, 128, 256, 512 and 1,024 GPUs), 10,160 problems in all.
WIDTHS = [
    (1, 64, 8, 300, 2, 25, 150),
    (65, 128, 6, 500, 2, 25, 30),
    (129, 256, 4, 800, 1, 40, 15),
    (257, 512, 4, 1500, 1, 40, 8),
    (513, 1024, 3, 2048, 1, 40, 5),
    (64, 64, 4, 256, 1, 20, 1),
    (1024, 1024, 2, 2048, 1, 20, 1),
]
LINES = (2, 3, 7, 20, 63, 64, 65, 128, 200, 300, 600)


def sizes(rng: np.random.Generator, width: tuple[int, ...]) -> tuple[int, int, int]:
    """Draw GPUs, slots and experts of a line of `WIDTHS`."""
    least, most, most_slots, most_experts, *_ = width
    gpus = int(rng.integers(least, most + 1))
    slots = int(rng.integers(1, most_slots + 1))
    return gpus, slots, int(rng.integers(1, min(gpus * slots, most_experts) + 1))


# --- proofs ---


def test_certificates_of_10_000_problems(draw_problem: DrawProblem, draw_line: DrawProblem) -> None:
    """Every answer is a routing with a proof that counting confirms, at every width of GPU sets."""
    rng = np.random.default_rng(20240601)
    checked = 0
    for width in WIDTHS:
        for _ in range(width[6]):
            problem = draw_problem(rng, *sizes(rng, width), layers=width[4], batches=width[5])
            routing = solve_routing(problem.placement, problem.tokens, method="matching")
            check_routing(problem.placement, problem.tokens, routing)
            assert (routing.status == Status.OPTIMAL).all()
            assert (routing.certificate.any(axis=-1) | (routing.makespan == 0)).all()
            checked += routing.makespan.size
    for gpus in LINES:
        problem = draw_line(rng, gpus, batches=50)
        routing = solve_routing(problem.placement, problem.tokens, method="matching")
        check_routing(problem.placement, problem.tokens, routing)
        assert (routing.status == Status.OPTIMAL).all()
        checked += routing.makespan.size
    assert checked >= 10_000


@given(problems())
def test_every_answer_is_proven(problem: Problem) -> None:
    """Whole experts, every one at one replica, with the makespan that the certificate proves."""
    for method in ("matching", "matching:lexicographic=true"):
        routing = solve_routing(problem.placement, problem.tokens, method=method)
        check_routing(problem.placement, problem.tokens, routing)
        assert (routing.status == Status.OPTIMAL).all()
        assert routing.activated.sum() == (problem.tokens > 0).sum()


def test_real_files(real_problems: dict[str, Problem]) -> None:
    """All recorded loads, token batches and production placements are solved and proven."""
    assert len(real_problems) == 24 + 24 + 6
    for problem in real_problems.values():
        routing = solve_routing(problem.placement, problem.tokens, method="matching")
        check_routing(problem.placement, problem.tokens, routing)
        assert (routing.status == Status.OPTIMAL).all()
        assert (routing.certificate.any(axis=-1) | (routing.makespan == 0)).all()


# --- brute force ---


def all_vectors(placement: Placement, tokens: list[int]) -> set[tuple[int, ...]]:
    """Return every vector of activations, sorted downwards, over all choices of replicas."""
    choices = [
        sorted({int(slot) // placement.slots_per_gpu for slot in placement.replicas(expert)})
        for expert, count in enumerate(tokens)
        if count
    ]
    vectors = set()
    for chosen in product(*choices):
        counts = Counter(chosen)
        vectors.add(tuple(sorted((counts[g] for g in range(placement.num_gpus)), reverse=True)))
    return vectors


@given(problems(max_gpus=4, max_slots_per_gpu=3, max_experts=6, layered=False))
def test_no_choice_of_replicas_is_better(problem: Problem) -> None:
    """Over all choices, none has a smaller makespan; lexicographic, none a smaller vector."""
    for tokens in problem.tokens.reshape(-1, problem.placement.num_experts).tolist():
        vectors = all_vectors(problem.placement, tokens)
        plain = solve_routing(problem.placement, tokens, method="matching")
        assert float(plain.makespan) == min(vector[0] for vector in vectors)
        best = solve_routing(problem.placement, tokens, method=Matching(lexicographic=True))
        assert tuple(sorted(best.activated.tolist(), reverse=True)) == min(vectors)


@given(problems())
def test_splitting_an_expert_never_helps(problem: Problem) -> None:
    """The uniform and the token-optimal routing, which split, activate no fewer on the fullest."""
    best = solve_routing(problem.placement, problem.tokens)
    for method, objective in (("uniform", "activations"), ("flow", "tokens")):
        other = solve_routing(problem.placement, problem.tokens, method=method, objective=objective)
        assert (other.activated.max(axis=-1) >= best.makespan).all()


# --- lexicographic ---


def downwards(activated: NDArray[np.int64]) -> list[list[int]]:
    """Sort each problem's activations downwards."""
    ordered: list[list[int]] = (
        (-np.sort(-activated, axis=-1)).reshape(-1, activated.shape[-1]).tolist()
    )
    return ordered


def test_lexicographic_is_never_worse(draw_problem: DrawProblem, draw_line: DrawProblem) -> None:
    """The first entry is the makespan; the vector is at most the plain one, and often smaller."""
    rng = np.random.default_rng(3)
    drawn = [draw_problem(rng, *sizes(rng, width), batches=20) for width in WIDTHS]
    drawn += [draw_line(rng, gpus, batches=20) for gpus in LINES]
    smaller = 0
    for problem in drawn:
        plain = solve_routing(problem.placement, problem.tokens)
        best = solve_routing(problem.placement, problem.tokens, method="optimal:lexicographic=true")
        check_routing(problem.placement, problem.tokens, best)
        assert np.array_equal(plain.makespan, best.makespan)
        pairs = zip(downwards(best.activated), downwards(plain.activated), strict=True)
        for left, right in pairs:
            assert left <= right
            smaller += left < right
    assert smaller > 100


def test_lexicographic_evens_out_below_the_fullest() -> None:
    """A GPU that is full for good does not excuse the others."""
    placement = Placement([[0, 1, 2], [3, 4, -1], [3, 4, -1], [-1, -1, -1]])
    routing = solve_routing(placement, [1, 1, 1, 1, 1], method=Matching(lexicographic=True))
    assert routing.activated.tolist() == [3, 1, 1, 0]


def test_lexicographic_is_for_activations_only() -> None:
    """The objective `tokens` has no such option."""
    with pytest.raises(ValueError, match="no option 'lexicographic'"):
        solve_routing(
            Placement([[0]]), [1], objective="tokens", method="optimal:lexicographic=true"
        )


# --- the documented rule ---


class DocumentedRule:
    """The rule as the header of ``solvers/cpp/matching.hpp`` words it, in plain Python."""

    def __init__(self, gpus: list[list[int]], tokens: list[int]) -> None:
        self.tokens = tokens
        self.slots_per_gpu = len(gpus[0])
        self.filled = sum(any(expert >= 0 for expert in row) for row in gpus)
        self.slot_of: dict[int, dict[int, int]] = {expert: {} for expert in range(len(tokens))}
        for gpu, row in enumerate(gpus):
            for place, expert in enumerate(row):
                if expert >= 0:
                    self.slot_of[expert].setdefault(gpu, gpu * self.slots_per_gpu + place)
        self.served: list[set[int]] = [set() for _ in gpus]  # live experts, by GPU

    def activated(self, gpu: int) -> int:
        """Count the experts served on a GPU."""
        return len(self.served[gpu])

    def fullest(self) -> int:
        """Return the largest count of a GPU."""
        return max(map(len, self.served))

    def solve(self, *, lexicographic: bool) -> list[int]:
        """Return the tokens of every physical slot."""
        live = [expert for expert, count in enumerate(self.tokens) if count]
        # 1. Experts with one candidate go there.
        for expert in live:
            if len(self.slot_of[expert]) == 1:
                self.served[min(self.slot_of[expert])].add(expert)
        fixed = self.fullest()
        # 2. The others by (number of candidates, id) to the smallest (activated, tokens, GPU id).
        for expert in sorted(live, key=lambda e: (len(self.slot_of[e]), e)):
            if len(self.slot_of[expert]) > 1:
                gpu = min(self.slot_of[expert], key=lambda g: (self.activated(g), self.load(g), g))
                self.served[gpu].add(expert)
        # 3. Paths from the lowest of the fullest GPUs, until the bound is met or there is none.
        bound = max(-(-len(live) // self.filled) if self.filled else 0, fixed)
        while self.fullest() > bound:
            level = self.fullest()
            start = min(gpu for gpu in range(len(self.served)) if self.activated(gpu) == level)
            path = self.path(start, level - 2)
            if path is None:
                break
            self.move_along(path)
        # 4. The same from every GPU, by falling level.
        for level in range(self.fullest() if lexicographic else 0, 0, -1):
            for gpu in range(len(self.served)):
                path = self.path(gpu, level - 2) if self.activated(gpu) == level else None
                if path is not None:
                    self.move_along(path)
        routed = [0] * (len(self.served) * self.slots_per_gpu)
        for gpu, experts in enumerate(self.served):
            for expert in experts:
                routed[self.slot_of[expert][gpu]] = self.tokens[expert]
        return routed

    def load(self, gpu: int) -> int:
        """Sum the tokens served on a GPU."""
        return sum(self.tokens[expert] for expert in self.served[gpu])

    def path(self, start: int, most: int) -> list[int] | None:
        """Search level by level, in ascending order, for the first GPU that reaches a light one."""
        parent = {start: start}
        level = [start]
        while level:
            following = []
            for gpu in level:
                seen = {other for expert in self.served[gpu] for other in self.slot_of[expert]}
                found = sorted(seen - parent.keys())
                parent.update(dict.fromkeys(found, gpu))
                following += found
                light = [other for other in found if self.activated(other) <= most]
                if light:
                    path = [light[0]]
                    while path[-1] != start:
                        path.append(parent[path[-1]])
                    return path[::-1]
            level = sorted(following)
        return None

    def move_along(self, path: list[int]) -> None:
        """From the end, the expert in the lowest slot with a replica on the next GPU moves."""
        for here, there in reversed(list(pairwise(path))):
            movable = [e for e in self.served[here] if there in self.slot_of[e]]
            expert = min(movable, key=lambda e: self.slot_of[e][here])
            self.served[here].remove(expert)
            self.served[there].add(expert)


def assert_follows_the_rule(problem: Problem, *, lexicographic: bool) -> None:
    """Compare every slot of every problem with the plain rule."""
    placement = problem.placement
    routing = solve_routing(placement, problem.tokens, method=Matching(lexicographic=lexicographic))
    for at in np.ndindex(*routing.makespan.shape):
        gpus = placement.expert_of[at[-1] if placement.layered else 0]
        rule = DocumentedRule(
            gpus.reshape(placement.num_gpus, -1).tolist(), problem.tokens[at].tolist()
        )
        assert routing.tokens[at].ravel().tolist() == rule.solve(lexicographic=lexicographic)


@given(problems(), st.booleans())
def test_the_rule_can_be_followed_to_the_bit(problem: Problem, lexicographic: bool) -> None:
    """A reader of the header alone gets the same tokens in every slot."""
    assert_follows_the_rule(problem, lexicographic=lexicographic)


@pytest.mark.parametrize("lexicographic", [False, True])
def test_the_rule_at_every_width(
    draw_problem: DrawProblem, draw_line: DrawProblem, lexicographic: bool
) -> None:
    """So it does on many GPUs, and where the paths are long."""
    rng = np.random.default_rng(11)
    for width in WIDTHS[:5]:
        for _ in range(30 if width[1] == 64 else 1):
            problem = draw_problem(rng, *sizes(rng, width), batches=2)
            assert_follows_the_rule(problem, lexicographic=lexicographic)
    for gpus in LINES:
        assert_follows_the_rule(draw_line(rng, gpus, batches=4), lexicographic=lexicographic)


def test_the_rule_on_recorded_traffic(real_problems: dict[str, Problem]) -> None:
    """Ties and paths as they occur in practice: one layer of a batch of every recording."""
    for problem in real_problems.values():
        layered = problem.placement.layered
        placement = Placement(
            problem.placement.expert_of[0].reshape(problem.placement.num_gpus, -1),
            problem.placement.num_experts,
            allow_missing=True,
        )
        tokens = problem.tokens[..., 0, :] if layered else problem.tokens
        one = Problem(placement, tokens.reshape(-1, tokens.shape[-1])[:1])
        assert_follows_the_rule(one, lexicographic=True)


def test_ties_are_broken_as_documented() -> None:
    """Fewer activated, then fewer tokens, then the lower GPU; fewer candidates come first."""
    both = Placement([[0, 1, 2], [0, 1, 2]])
    routing = solve_routing(both, [5, 3, 4], method="matching")
    # 0 goes to GPU 0 (lowest), 1 to GPU 1 (fewer activated), 2 to GPU 1 (fewer tokens).
    assert routing.tokens.tolist() == [[5, 0, 0], [0, 3, 4]]
    wide_first = Placement([[0, 1], [0, 1], [0, -1]])
    # 1 has fewer candidates and comes first although its id is higher; 0 finds GPUs 1 and 2 free.
    assert solve_routing(wide_first, [1, 1]).tokens.tolist() == [[0, 1], [1, 0], [0, 0]]


def test_the_lower_slot_of_a_duplicate_is_used() -> None:
    """An expert twice on a GPU is one candidate, in its lower slot."""
    placement = Placement([[-1, 0, 0], [1, 1, 0]])
    routing = solve_routing(placement, [3, 2])
    assert routing.tokens.tolist() == [[0, 3, 0], [2, 0, 0]]


def test_dead_gpus_do_not_count_in_the_bound() -> None:
    """Two live experts on one living GPU need two there, whatever is dead."""
    placement = Placement([[-1, -1], [0, 1], [-1, -1]])
    routing = solve_routing(placement, [1, 1])
    assert routing.activated.tolist() == [0, 2, 0]
    assert float(routing.bound) == 2


# --- invariances ---


@given(problems(), st.integers(0, 2**32 - 1), st.sampled_from(["gpus", "slots", "experts"]))
def test_names_do_not_matter(rename: Rename, problem: Problem, seed: int, what: str) -> None:
    """Renaming GPUs, slots or experts leaves the makespan and the lexicographic vector alone."""
    other = rename(problem, seed, what)
    plain, again = (solve_routing(p.placement, p.tokens) for p in (problem, other))
    assert np.array_equal(plain.makespan, again.makespan)
    best, again = (
        solve_routing(p.placement, p.tokens, method=Matching(lexicographic=True))
        for p in (problem, other)
    )
    assert downwards(best.activated) == downwards(again.activated)


@given(problems(), st.integers(2, 10**6))
def test_how_many_tokens_does_not_matter(problem: Problem, count: int) -> None:
    """Only liveness counts in the makespan."""
    few = solve_routing(problem.placement, np.minimum(problem.tokens, 1))
    many = solve_routing(problem.placement, np.minimum(problem.tokens, 1) * count)
    drawn = solve_routing(problem.placement, problem.tokens)
    assert np.array_equal(few.tokens > 0, many.tokens > 0)
    assert np.array_equal(few.makespan, drawn.makespan)


@given(st.data(), placements(layered=False))
def test_another_replica_never_hurts(data: st.DataObject, placement: Placement) -> None:
    """More slots on every GPU, with any experts in them, do not raise the makespan."""
    tokens = data.draw(
        st.lists(st.integers(0, 3), min_size=placement.num_experts, max_size=placement.num_experts)
    )
    extra = data.draw(
        st.lists(
            st.integers(-1, placement.num_experts - 1),
            min_size=placement.num_gpus,
            max_size=placement.num_gpus,
        )
    )
    more = Placement(np.column_stack([placement.slots, extra]), placement.num_experts)
    before, after = (solve_routing(p, tokens) for p in (placement, more))
    assert after.makespan <= before.makespan


# --- bad input ---


def test_bad_tokens_are_refused() -> None:
    """Counts out of range and absent experts are named, in the first problem that has one."""
    placement = Placement([[[0, 1]], [[0, -1]]], num_experts=2, allow_missing=True)
    tokens = np.ones((3, 2, 2), np.int64)
    tokens[:, 1, 1] = 0
    solve_routing(placement, tokens, method="matching")
    tokens[2, 1, 1] = 4
    with pytest.raises(InfeasibleError, match=r"batch \(2,\), layer 1, expert 1 has tokens but no"):
        solve_routing(placement, tokens, method="matching")
    tokens[1, 0, 0] = -1
    with pytest.raises(InvalidTokensError, match=r"batch \(1,\), layer 0, expert 0 has -1 tokens"):
        solve_routing(placement, tokens, method="matching")


def test_other_objectives_are_refused() -> None:
    """Matching solves activations only and points to `optimal`."""
    with pytest.raises(ValueError, match="activations only, not tokens; 'optimal' picks"):
        solve_routing(Placement([[0]]), [1], objective="tokens", method="matching")
