"""`makespan`: valid answers and true bounds under any objective, the same for the same work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.bounds import certified_bound
from eplb_opt.errors import InfeasibleError, InvalidTokensError
from eplb_opt.objective import Curve, Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.placing import solve_placement
from eplb_opt.routers import Makespan, resolve_method
from eplb_opt.routing import Proof, Router, Routing, Status, solve_routing
from eplb_opt.testing import Problem, check_routing, objectives, optimal_makespan, problems

DrawProblem = Callable[..., Problem]
Rename = Callable[[Problem, int, str], Problem]

V3 = Objective.preset("deepseek-v3-fp8")
PROVERS = [Proof.COUNT, Proof.MATCHING, Proof.FLOW, Proof.K_DEMAND, Proof.BRANCHING]
CERTIFIED = [Proof.MATCHING, Proof.FLOW]

# A line for everything that an objective can have.
KINDS = {
    "roofline": Objective(pieces=(Piece(activation=4), Piece(token=1))),
    "offsets": Objective(pieces=(Piece(offset=3, activation=4), Piece(offset=5, token=1))),
    "mixed pieces": Objective(pieces=(Piece(activation=2, token=0.3), Piece(offset=1, token=0.7))),
    "three pieces": Objective(pieces=(Piece(activation=5), Piece(3, token=1), Piece(token=1.2))),
    "tiles": Objective(pieces=(Piece(activation=2, tile=3), Piece(token=1)), tile_tokens=3),
    "whole": Objective(pieces=(Piece(activation=4), Piece(token=1)), split=False),
    "whole tiles": Objective(pieces=(Piece(1, 2, 3, 0.1),), tile_tokens=4, split=False),
    "curve": Objective(pieces=(Curve((1, 3, 4, 6), (2.1, 2.1, 4.3, 4.9)), Piece(token=0.5))),
    "whole curve": Objective(pieces=(Curve((2, 9), (0.1, 0.7)),), split=False),
}


def route(
    problem: Problem,
    objective: Objective | str,
    work: int = Makespan().work,
    threads: int = 1,
) -> Routing:
    """Route by `makespan`."""
    router = Router(problem.placement, objective=objective, method=Makespan(work), threads=threads)
    return router.route(problem.tokens)


def slow(objective: Objective, gpus: int) -> Objective:
    """Make the GPUs of an objective unequal."""
    return replace(objective, slowness=tuple(np.resize([1.0, 1.5, 0.7, 3.0, 1.0], gpus)))


def of_every_kind(gpus: int) -> list[Objective]:
    """Return an objective of every kind, with equal GPUs and with unequal ones."""
    return [o for kind in KINDS.values() for o in (kind, slow(kind, gpus))]


def flip(seed: int, gpus: int = 16, batches: int = 4) -> Problem:
    """Draw batches of DeepSeek-V3 where neither activations nor tokens alone decide."""
    rng = np.random.default_rng(seed)
    popularity = rng.permutation((1.0 + np.arange(256)) ** -0.8)
    popularity /= popularity.sum()
    plan = solve_placement(popularity * 1e6, num_gpus=gpus, slots_per_gpu=320 // gpus)
    return Problem(plan.placement, rng.multinomial(35_000, popularity, batches))


def check(problem: Problem, routing: Routing) -> None:
    """Check an answer, and that what is said of its bound is right."""
    check_routing(problem.placement, problem.tokens, routing)
    met = routing.makespan == routing.bound
    assert np.array_equal(routing.status, np.where(met, Status.OPTIMAL, Status.FEASIBLE))
    assert np.isin(routing.proved_by, PROVERS).all()
    certified = routing.certificate.any(axis=-1)
    assert np.isin(routing.proved_by[certified], CERTIFIED).all()


# --- answers and bounds ---


@given(st.data(), problems())
def test_every_answer_is_valid(data: st.DataObject, problem: Problem) -> None:
    """Tokens served once, the makespan that `Objective.time` gives, a bound that is not above."""
    objective = data.draw(objectives(num_gpus=problem.placement.num_gpus))
    check(problem, route(problem, objective, data.draw(st.sampled_from([0, 100, 1000]))))


@settings(max_examples=60)
@given(
    st.data(),
    problems(max_gpus=3, max_experts=4, max_slots_per_gpu=3, max_tokens=5, huge=False),
)
def test_no_routing_refutes_the_bound(data: st.DataObject, problem: Problem) -> None:
    """No routing of a tiny problem is below the bound, and the makespan is that of one of them."""
    objective = data.draw(objectives(num_gpus=problem.placement.num_gpus))
    least = optimal_makespan(problem.placement, problem.tokens, objective)
    for work in (0, 1000):
        routing = route(problem, objective, work)
        assert (routing.bound <= least).all()
        assert (routing.makespan >= least).all()


@pytest.mark.parametrize("kind", KINDS)
def test_small_problems_of_every_kind(kind: str) -> None:
    """With some work most small problems are solved to the optimum that trying everything finds."""
    rng = np.random.default_rng(5)
    reached = []
    for _ in range(8):
        slots = np.concatenate([np.arange(4), rng.integers(-1, 4, 5)])
        placement = Placement(rng.permutation(slots).reshape(3, 3), 4)
        problem = Problem(placement, rng.integers(0, 7, (3, 4)))
        for objective in (KINDS[kind], slow(KINDS[kind], 3)):
            routing = route(problem, objective)
            check(problem, routing)
            least = optimal_makespan(placement, problem.tokens, objective)
            assert (routing.bound <= least).all()
            assert (routing.makespan >= least).all()
            # An expert twice on a GPU is one candidate, where a curve can make two slots quicker.
            reached.append(routing.makespan <= least * (1 + 1e-12))
    assert np.mean(reached) > (0.6 if KINDS[kind].curves else 0.9)


@pytest.mark.parametrize("kind", KINDS)
def test_never_above_a_pure_optimum(kind: str, draw_problem: DrawProblem) -> None:
    """The optimum of activations, and of tokens where experts may be split, are no better."""
    rng = np.random.default_rng(7)
    for gpus, slots, experts in ((3, 4, 7), (8, 5, 30), (70, 3, 150)):
        problem = draw_problem(rng, gpus, slots, experts, batches=12)
        for objective in (KINDS[kind], slow(KINDS[kind], gpus)):
            pure = ["activations", "tokens"] if objective.split else ["activations"]
            for work in (0, 300):
                routing = route(problem, objective, work)
                check(problem, routing)
                for name in pure:
                    other = solve_routing(problem.placement, problem.tokens, objective=name)
                    makespan = objective.time(other.tokens).max(axis=-1)
                    # The search adds up a curve's times in an order of its own.
                    assert (routing.makespan <= makespan * (1 + 1e-12)).all()
                    if not objective.curves:
                        assert (routing.makespan <= makespan).all()


def test_pure_objectives_are_solved(draw_problem: DrawProblem) -> None:
    """One kind of count alone is matching's or flow's problem, however it is scaled: proven."""
    rng = np.random.default_rng(8)
    for gpus, slots, experts in ((5, 4, 12), (16, 6, 60), (100, 3, 200)):
        problem = draw_problem(rng, gpus, slots, experts, batches=20)
        for name, piece in (("activations", Piece(activation=3)), ("tokens", Piece(token=3))):
            fewest = solve_routing(problem.placement, problem.tokens, objective=name).makespan
            for slowness in (None, (1.5,) * gpus):
                objective = Objective(pieces=(piece,), slowness=slowness)
                routing = route(problem, objective)
                check(problem, routing)
                assert (routing.status == Status.OPTIMAL).all()
                assert np.array_equal(routing.makespan, 3 * fewest * (1.5 if slowness else 1))


def test_a_commanding_piece_decides() -> None:
    """Where tokens cost far more than activations the token optimum is the answer, and reversed."""
    problem = flip(1)
    for name, pieces in (
        ("tokens", (Piece(activation=1e-3), Piece(offset=1, token=1))),
        ("activations", (Piece(offset=1, activation=1e6), Piece(token=1))),
    ):
        routing = route(problem, Objective(pieces=pieces))
        fewest = solve_routing(problem.placement, problem.tokens, objective=name).makespan
        assert (routing.status == Status.OPTIMAL).all()
        assert np.array_equal(
            routing.makespan, 1 + fewest * max(p.token or p.activation for p in pieces)
        )


def test_better_than_both_pure_optima() -> None:
    """A split where one is due: the worked example of the class, better than either optimum."""
    placement, tokens = Placement([[0, 1], [0, 2]]), np.array([400, 90, 10])
    routing = solve_routing(placement, tokens, objective=V3, method="makespan")
    check(Problem(placement, tokens), routing)
    assert routing.activated.tolist() == [2, 2]
    assert float(routing.makespan) == float(routing.bound) == 2 * 14.78
    hard = flip(1)
    routing = route(hard, V3)
    for name in ("activations", "tokens"):
        other = solve_routing(hard.placement, hard.tokens, objective=name).tokens
        assert (routing.makespan < V3.time(other).max(axis=-1)).all()


# --- who proved it ---


def proof_of(
    slots: list[list[int]], tokens: list[int], objective: Objective, work: int = 1000
) -> tuple[Proof, bool]:
    """Return who proved a bound that is met, and whether it has a certificate."""
    problem = Problem(Placement(slots), np.array(tokens))
    routing = route(problem, objective, work)
    check(problem, routing)
    assert routing.status == Status.OPTIMAL
    confirmed = certified_bound(problem.placement, tokens, routing.certificate, objective)
    assert not routing.certificate.any() or confirmed == routing.bound
    return Proof(int(routing.proved_by)), bool(routing.certificate.any())


def test_matching_and_flow_certify() -> None:
    """Bounds by matching and by flow carry the GPU set that proves them; others carry none."""
    slots = [[0, 1, 2], [0, 1, 2]]
    assert proof_of(slots, [9, 9, 9], KINDS["roofline"]) == (Proof.FLOW, True)
    assert proof_of(slots, [1, 1, 1], KINDS["roofline"]) == (Proof.MATCHING, True)


def test_k_demand() -> None:
    """Six live experts need 3 activations each, 12; but 20 tokens within 13 need two replicas."""
    slots = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert proof_of(slots, [20, 1, 1, 1, 1, 1], KINDS["roofline"]) == (Proof.K_DEMAND, False)


def test_branching() -> None:
    """Of three whole experts two share a GPU, 12 tokens, which only trying tells: 9 by flow."""
    slots, whole = [[0, 1, 2], [0, 1, 2]], Objective(pieces=(Piece(token=1),), split=False)
    assert proof_of(slots, [6, 6, 6], whole, work=20_000) == (Proof.BRANCHING, False)


def test_counting() -> None:
    """A GPU's own experts, on a GPU of its own slowness, need its time: no certificate."""
    objective = Objective(pieces=(Piece(activation=1, token=1),), slowness=(1, 3))
    assert proof_of([[0, 1], [2, 0]], [9, 2, 8], objective) == (Proof.COUNT, False)


def test_certificates_of_drawn_problems(draw_problem: DrawProblem) -> None:
    """On equal GPUs whoever proves by matching or flow shows the set; and all provers occur."""
    rng = np.random.default_rng(9)
    seen: set[int] = set()
    for _ in range(12):
        problem = draw_problem(rng, 6, 5, 18, batches=20)
        few = Problem(problem.placement, np.minimum(problem.tokens, rng.integers(1, 12)))
        for kind in ("roofline", "offsets", "mixed pieces", "whole"):
            routing = route(few, KINDS[kind])
            check(few, routing)
            shown = routing.certificate.any(axis=-1) | (few.tokens.sum(axis=-1) == 0)
            assert np.array_equal(shown[np.isin(routing.proved_by, CERTIFIED)].all(), True)
            seen |= set(routing.proved_by.ravel().tolist())
    assert {Proof.MATCHING, Proof.FLOW, Proof.K_DEMAND} <= seen


# --- the same work, the same answer ---


def same(one: Routing, other: Routing, order: NDArray[np.int64] | None = None) -> None:
    """Require two answers to be equal in everything, one of them in another order."""
    for name in ("tokens", "activated", "makespan", "bound", "status", "proved_by", "certificate"):
        left, right = getattr(one, name), getattr(other, name)
        assert np.array_equal(left if order is None else left[order], right)


@pytest.mark.parametrize("kind", ["roofline", "tiles", "whole", "curve"])
def test_one_answer(kind: str, draw_problem: DrawProblem) -> None:
    """On every call, with any number of threads, in any order and alone, and into a used `out`."""
    rng = np.random.default_rng(11)
    drawn = draw_problem(rng, 8, 5, 30, layers=2, batches=24)
    problem = Problem(drawn.placement, np.minimum(drawn.tokens, 40))
    objective = KINDS[kind]
    router = Router(problem.placement, objective=objective, method="makespan")
    first = router.route(problem.tokens)
    same(first, router.route(problem.tokens))
    for threads in (2, 5):
        same(first, route(problem, objective, threads=threads))
    order = rng.permutation(24)
    out = router.route(problem.tokens[order])
    same(first, out, order)
    same(first, router.route(problem.tokens, out=out))
    for at in (0, 17):
        alone = router.route(problem.tokens[at])
        assert np.array_equal(alone.tokens, first.tokens[at])
        assert np.array_equal(alone.bound, first.bound[at])


def test_more_work_is_never_worse(draw_problem: DrawProblem) -> None:
    """As the work grows the makespan does not rise, nor the bound fall; both move in the end."""
    rng = np.random.default_rng(12)
    drawn = draw_problem(rng, 8, 5, 30, batches=10)
    small = Problem(drawn.placement, np.minimum(drawn.tokens, 40))
    for problem, kinds in ((small, of_every_kind(8)), (flip(2), [V3, replace(V3, split=False)])):
        for objective in kinds:
            before = route(problem, objective, 0)
            for work in (1, 200, 1000, 5000):
                routing = route(problem, objective, work)
                assert (routing.makespan <= before.makespan * (1 + 1e-12)).all()
                assert (routing.bound >= before.bound * (1 - 1e-12)).all()
                before = routing
    first, last = route(flip(2), V3, 0), route(flip(2), V3, 5000)
    assert (last.gap < first.gap).all()


@settings(max_examples=60)
@given(
    st.data(),
    problems(max_gpus=6, max_slots_per_gpu=4),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["gpus", "slots", "experts"]),
)
def test_bounds_do_not_depend_on_names(
    rename: Rename, data: st.DataObject, problem: Problem, seed: int, what: str
) -> None:
    """Each of two problems that differ in names only has a makespan not below the other's bound."""
    objective = data.draw(objectives(curves=False))
    one, other = (route(p, objective) for p in (problem, rename(problem, seed, what)))
    assert (one.bound <= other.makespan).all()
    assert (other.bound <= one.makespan).all()


def test_slowness_goes_with_the_gpu(draw_problem: DrawProblem) -> None:
    """Renaming unequal GPUs with their slowness leaves the bounds true."""
    rng = np.random.default_rng(13)
    problem = draw_problem(rng, 5, 4, 12, batches=20)
    for kind in KINDS.values():
        objective = slow(kind, 5)
        one = route(problem, objective)
        order = rng.permutation(5)
        renamed = Placement(problem.placement.slots[..., order, :], 12, allow_missing=True)
        slowness = tuple(np.array(objective.slowness)[order])
        other = route(Problem(renamed, problem.tokens), replace(objective, slowness=slowness))
        rounded = 1 - 1e-12 if kind.curves else 1
        assert (one.bound * rounded <= other.makespan).all()
        assert (other.bound * rounded <= one.makespan).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_unit_of_time_does_not_matter(kind: str, draw_problem: DrawProblem) -> None:
    """All coefficients times a power of two: the same tokens, the times as much longer."""
    problem = draw_problem(np.random.default_rng(14), 8, 5, 30, batches=12)
    few = Problem(problem.placement, np.minimum(problem.tokens, 50))
    for objective in (KINDS[kind], slow(KINDS[kind], 8)):
        plain = route(few, objective)
        for factor in (2.0**-30, 2.0**20):
            other = route(few, scaled(objective, factor))
            assert np.array_equal(other.tokens, plain.tokens)
            assert np.array_equal(other.makespan, plain.makespan * factor)
            assert np.array_equal(other.bound, plain.bound * factor)


def scaled(objective: Objective, factor: float) -> Objective:
    """Measure an objective in another unit of time."""
    pieces = tuple(
        Curve(p.tokens, tuple(t * factor for t in p.times))
        if isinstance(p, Curve)
        else Piece(p.offset * factor, p.activation * factor, p.tile * factor, p.token * factor)
        for p in objective.pieces
    )
    return replace(objective, pieces=pieces)


# --- production size ---


@pytest.mark.parametrize("name", ["deepseek-v3-fp8", "deepseek-v3-tiles"])
def test_real_files(name: str, real_problems: dict[str, Problem]) -> None:
    """Recorded loads, token batches and production placements: valid, and nearly all proven."""
    gaps = []
    for problem in real_problems.values():
        routing = route(problem, name)
        check(problem, routing)
        gaps.append(routing.gap.ravel())
    gap = np.concatenate(gaps)
    assert gap.mean() < 0.01
    assert np.mean(gap == 0) > 0.9


@pytest.mark.parametrize("split", [True, False])
def test_around_the_flip_batch(split: bool) -> None:
    """Where no pure optimum suffices, within a few per cent of the bound at serving speed."""
    objective = replace(V3, split=split)
    for gpus in (8, 16, 32):
        problem = flip(gpus, gpus)
        routing = route(problem, objective)
        check(problem, routing)
        assert routing.gap.mean() < 0.1


@pytest.mark.parametrize("kind", ["roofline", "tiles", "whole", "curve"])
def test_the_largest_that_is_allowed(kind: str) -> None:
    """1,024 GPUs, 4,096 experts with up to 2**39 - 1 tokens each, and unequal GPUs."""
    rng = np.random.default_rng(15)
    gpus, experts = _core.MAX_GPUS, _core.MAX_EXPERTS
    slots = np.concatenate([np.arange(experts), rng.integers(0, experts, gpus)])
    placement = Placement(rng.permutation(slots).reshape(gpus, 5), experts)
    most = _core.MAX_TOKENS_PER_EXPERT
    tokens = np.stack([np.full(experts, most), rng.integers(0, most + 1, experts)])
    problem = Problem(placement, tokens)
    for objective in (KINDS[kind], slow(KINDS[kind], gpus)):
        routing = route(problem, objective)
        check(problem, routing)
        assert (routing.gap < 1).all()


def test_all_on_one_gpu() -> None:
    """4,096 experts with the most tokens each on one GPU: as much as a GPU can have, to the bit."""
    experts, most = _core.MAX_EXPERTS, _core.MAX_TOKENS_PER_EXPERT
    placement = Placement(np.arange(experts)[None, :])
    tokens = np.full(experts, most)
    for kind in KINDS.values():
        routing = route(Problem(placement, tokens), kind)
        assert np.array_equal(routing.tokens[0], tokens)
        assert routing.makespan == kind.time(routing.tokens)[0]
        assert routing.bound <= routing.makespan


def test_without_a_choice() -> None:
    """Where every expert has one replica the only routing is proven, unless a curve decides."""
    placement = Placement([[1, 0, 2], [3, 4, -1]])
    for objective in of_every_kind(2):
        routing = solve_routing(placement, [9, 2, 7, 3, 3], objective=objective, method="makespan")
        check(Problem(placement, np.array([9, 2, 7, 3, 3])), routing)
        assert objective.curves or routing.status == Status.OPTIMAL


def test_two_slots_of_a_gpu_under_a_curve() -> None:
    """Four tokens in two slots take 4.2, in one 4.3, which is no bound, though it is the answer."""
    placement, tokens = Placement([[0, 0], [1, 1]]), np.array([4, 1])
    for slowness in (None, (1.0, 1.5)):
        objective = replace(KINDS["curve"], slowness=slowness)
        routing = solve_routing(placement, tokens, objective=objective, method="makespan")
        check(Problem(placement, tokens), routing)
        assert float(routing.makespan) == 4.3
        assert routing.bound <= optimal_makespan(placement, tokens, objective) == 4.2


# --- edges ---


def test_no_tokens() -> None:
    """Nothing to serve takes the time of offsets alone, proven; on no living GPU too."""
    placement = Placement([[0, 1], [1, 0], [-1, -1]])
    dead = Placement([[-1], [-1], [-1]], 2, allow_missing=True)
    for objective in of_every_kind(3):
        for on in (placement, dead):
            routing = solve_routing(on, [0, 0], objective=objective, method="makespan")
            check(Problem(on, np.zeros(2, np.int64)), routing)
            assert not routing.tokens.any()
            assert routing.makespan == routing.bound == objective.idle
            assert routing.status == Status.OPTIMAL


def test_dead_gpus_take_nothing(draw_problem: DrawProblem) -> None:
    """GPUs without experts, even the quickest, change no bound into a false one."""
    rng = np.random.default_rng(16)
    problem = draw_problem(rng, 4, 4, 10, batches=12)
    alive = np.insert(problem.placement.slots[0], [0, 2, 4], -1, axis=0)
    dying = Placement(alive, 10, allow_missing=True)
    slowness = (0.1, 1.0, 1.5, 0.1, 1.0, 2.0, 0.1)
    tokens = problem.tokens[:, 0]
    for kind in KINDS.values():
        with_dead = replace(kind, slowness=slowness)
        without = replace(kind, slowness=tuple(s for s in slowness if s != 0.1))
        one = route(Problem(dying, tokens), with_dead)
        check(Problem(dying, tokens), one)
        assert not one.tokens[:, [0, 3, 6]].any()
        other = solve_routing(
            Placement(problem.placement.slots[0], 10, allow_missing=True),
            tokens,
            objective=without,
            method="makespan",
        )
        rounded = 1 - 1e-12 if kind.curves else 1
        assert (one.bound * rounded <= other.makespan).all()
        assert (other.bound * rounded <= one.makespan).all()


def test_duplicates_are_one_candidate() -> None:
    """An expert twice on a GPU takes tokens in its lower slot there."""
    placement = Placement([[-1, 0, 0], [1, 1, 0]])
    for kind in KINDS.values():
        routing = solve_routing(placement, [30, 20], objective=kind, method="makespan")
        check(Problem(placement, np.array([30, 20])), routing)
        assert routing.tokens[0, 2] == routing.tokens[1, 1] == 0


def test_slow_gpus_get_less() -> None:
    """A GPU three times as slow takes a third of the tokens; a fourfold one, no expert."""
    placement = Placement([[0], [0]])
    tokens = Objective(pieces=(Piece(token=1),), slowness=(1, 3))
    routing = solve_routing(placement, [8], objective=tokens, method="makespan")
    assert routing.tokens.tolist() == [[6], [2]]
    assert routing.makespan == routing.bound == 6
    both = Placement([[0, 1], [0, 1]])
    activations = Objective(pieces=(Piece(activation=1),), slowness=(1, 4))
    routing = solve_routing(both, [5, 5], objective=activations, method="makespan")
    assert routing.activated.tolist() == [2, 0]
    assert routing.makespan == routing.bound == 2


def test_layers_have_their_own_placement() -> None:
    """Every layer is routed on its own replicas."""
    placement = Placement([[[0, 1], [0, 1]], [[0, 0], [1, 1]]])
    tokens = np.array([[[9, 3], [9, 3]], [[0, 0], [1, 0]]])
    routing = solve_routing(placement, tokens, objective=KINDS["roofline"], method="makespan")
    check(Problem(placement, tokens), routing)
    assert routing.makespan.tolist() == [[8, 9], [0, 4]]
    assert (routing.status == Status.OPTIMAL).all()


# --- bounds for other methods ---


@pytest.mark.parametrize("method", ["metro", "uniform"])
def test_bounds_of_other_methods(method: str, draw_problem: DrawProblem) -> None:
    """`bound=True` proves the search's own bound, and says where a rule's answer meets it."""
    problem = draw_problem(np.random.default_rng(17), 6, 4, 15, layers=2, batches=10)
    for objective in of_every_kind(6):
        if method == "uniform" and not objective.split:
            continue
        router = Router(problem.placement, objective=objective, method=method, threads=2)
        bare = router.route(problem.tokens)
        assert np.isnan(bare.bound).all()
        routing = router.route(problem.tokens, bound=True)
        assert np.array_equal(routing.tokens, bare.tokens)
        check(problem, routing)
        best = route(problem, objective)
        for name in ("bound", "proved_by", "certificate"):
            assert np.array_equal(getattr(routing, name), getattr(best, name))


def test_a_rule_that_meets_the_bound() -> None:
    """METRO's answer is OPTIMAL where it is; the uniform split of a general objective is not."""
    placement, tokens = Placement([[0, 1], [0, 1]]), [2, 2]
    objective = KINDS["roofline"]
    metro, uniform = (
        solve_routing(placement, tokens, objective=objective, method=method)
        for method in ("metro", "uniform")
    )
    assert metro.makespan == metro.bound == uniform.bound == 4
    assert metro.status == Status.OPTIMAL
    assert uniform.makespan == 8
    assert uniform.status == Status.FEASIBLE


# --- bad input ---


def test_work_is_a_count() -> None:
    """Work may be zero; negative work and text are refused."""
    assert resolve_method("makespan:work=0", V3) == Makespan(work=0)
    assert resolve_method("makespan", V3) == Makespan()
    with pytest.raises(ValueError, match="work must be at least 0, not -1"):
        Makespan(work=-1)
    with pytest.raises(ValueError, match="work must be at least 0, not -5"):
        resolve_method("makespan:work=-5", V3)
    with pytest.raises(ValueError, match=r"work='much' is not an? int"):
        resolve_method("makespan:work=much", V3)


def test_bad_tokens_are_refused() -> None:
    """Counts out of range and absent experts are named, in the first problem that has one."""
    placement = Placement([[[0, 1]], [[0, -1]]], num_experts=2, allow_missing=True)
    tokens = np.ones((3, 2, 2), np.int64)
    tokens[:, 1, 1] = 0
    router = Router(placement, objective=V3, method="makespan")
    router.route(tokens)
    tokens[2, 1, 1] = 4
    with pytest.raises(InfeasibleError, match=r"batch \(2,\), layer 1, expert 1 has tokens but no"):
        router.route(tokens)
    with pytest.raises(InfeasibleError, match=r"batch \(2,\), layer 1, expert 1 has tokens but no"):
        solve_routing(placement, tokens, objective=V3, method="metro", bound=True)
    for count in (-1, 2**39, -(2**63)):
        tokens[1, 0, 0] = count
        with pytest.raises(InvalidTokensError, match=rf"batch \(1,\), layer 0, expert 0 .*{count}"):
            router.route(tokens)


@pytest.mark.parametrize("method", ["makespan", "metro"])
def test_slowness_of_other_gpus_is_refused(method: str) -> None:
    """The slowness of three GPUs is not that of two, for answers and for bounds."""
    objective = Objective(pieces=(Piece(token=1),), slowness=(1, 1, 1))
    with pytest.raises(ValueError, match="slowness of 3 GPUs; the placement has 2"):
        Router(Placement([[0], [0]]), objective=objective, method=method)
