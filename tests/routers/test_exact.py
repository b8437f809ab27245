"""The exact engines: what they prove, that they agree, and that nothing is reported unchecked."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eplb_opt import _core
from eplb_opt.engines import seconds_left
from eplb_opt.errors import EplbError, InfeasibleError, InvalidTokensError, SolverUnavailableError
from eplb_opt.objective import Curve, Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.routers.base import NO_CONTEXT, Context
from eplb_opt.routers.exact import NOTHING, Found, Pairs, Program, judge
from eplb_opt.routing import Proof, Router, Routing, Status, solve_routing
from eplb_opt.stopping import TimeLimit
from eplb_opt.testing import Problem, check_routing, optimal_makespan

PACKAGES = {
    "highs": ["highspy"],
    "cp-sat": ["ortools"],
    "pulp": ["pulp"],
    "pulp:solver=HiGHS": ["pulp", "highspy"],
}
OBJECTIVES = ("activations", "tokens")
FOUR_GPUS = Placement([[0, 1], [0, 2], [1, 3], [2, 3]])


@pytest.fixture(params=PACKAGES)
def engine(request: pytest.FixtureRequest) -> str:
    """Name every exact method in turn, PuLP with two solvers; skip what is not installed."""
    name: str = request.param
    for package in PACKAGES[name]:
        pytest.importorskip(package)
    return name


def cold(engine: str) -> str:
    """Return the engine's name without its warm start."""
    return f"{engine}{',' if ':' in engine else ':'}warm_start=false"


def draw(rng: np.random.Generator, gpus: int, experts: int, most_tokens: int) -> Problem:
    """Draw three batches on one layer: duplicates on a GPU, empty slots, dead experts."""
    per_gpu = -(-int(experts * rng.uniform(1.2, 2.0)) // gpus)
    others = rng.integers(-1, experts, gpus * per_gpu - experts)
    slots = rng.permutation(np.concatenate([np.arange(experts), others]))
    live = rng.random((3, experts)) < [[0.9], [0.5], [0.1]]
    tokens = live * rng.integers(1, most_tokens + 1, (3, experts))
    return Problem(Placement(slots.reshape(gpus, per_gpu), experts), tokens)


@pytest.mark.parametrize(("objective", "optimum"), [("activations", 1), ("tokens", 4)])
def test_four_gpus(engine: str, objective: str, optimum: int) -> None:
    """The example of four GPUs is proven: one activated and four tokens on each."""
    routing = solve_routing(FOUR_GPUS, [4, 4, 4, 4], objective=objective, method=engine)
    check_routing(FOUR_GPUS, [4, 4, 4, 4], routing)
    assert routing.makespan == routing.bound == optimum
    assert routing.status == Status.OPTIMAL
    assert routing.gpu_tokens().tolist() == [4, 4, 4, 4]
    assert not routing.certificate.any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_agrees_with_the_compiled_optimum(engine: str, objective: str) -> None:
    """On drawn problems every engine proves the makespan that the compiled method proves."""
    rng = np.random.default_rng(1)
    for gpus, experts in ((2, 5), (4, 9), (5, 24), (9, 40)):
        problem = draw(rng, gpus, experts, most_tokens=30)
        optimal = solve_routing(problem.placement, problem.tokens, objective=objective)
        judged = solve_routing(
            problem.placement, problem.tokens, objective=objective, method=engine
        )
        check_routing(problem.placement, problem.tokens, judged)
        assert (judged.status == Status.OPTIMAL).all()
        assert np.array_equal(judged.makespan, optimal.makespan)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_agrees_with_trying_everything(engine: str, objective: str) -> None:
    """On tiny problems the proven makespan is the smallest of all routings."""
    rng = np.random.default_rng(2)
    for _ in range(3):
        problem = draw(rng, gpus=3, experts=4, most_tokens=3)
        judged = solve_routing(
            problem.placement, problem.tokens, objective=objective, method=engine
        )
        smallest = optimal_makespan(problem.placement, problem.tokens, objective)
        assert np.array_equal(judged.makespan, smallest)
        assert np.array_equal(judged.bound, smallest)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_start_changes_no_makespan(engine: str, objective: str) -> None:
    """With and without METRO's answer to start from, the same makespans are proven."""
    problem = draw(np.random.default_rng(3), gpus=6, experts=20, most_tokens=9)
    warm = solve_routing(problem.placement, problem.tokens, objective=objective, method=engine)
    without = solve_routing(
        problem.placement, problem.tokens, objective=objective, method=cold(engine)
    )
    for name in ("makespan", "bound", "status"):
        assert np.array_equal(getattr(warm, name), getattr(without, name))


def test_production_size(engine: str) -> None:
    """256 experts in 320 slots on 32 GPUs, 150 of them live, are proven optimal."""
    rng = np.random.default_rng(4)
    copies = rng.zipf(1.6, 64) % 256
    slots = rng.permutation(np.concatenate([np.arange(256), copies])).reshape(32, 10)
    placement = Placement(slots)
    tokens = np.bincount(rng.permutation(256)[:150], np.ceil(rng.lognormal(0, 1, 150)), 256)
    for objective in OBJECTIVES:
        batch = tokens.astype(np.int64)
        judged = solve_routing(placement, batch, objective=objective, method=engine)
        check_routing(placement, batch, judged)
        assert judged.status == Status.OPTIMAL
        assert judged.makespan == solve_routing(placement, batch, objective=objective).makespan


def test_first_slot_stands_for_duplicates(engine: str) -> None:
    """An expert in two slots of a GPU is one candidate: its first slot there takes its tokens."""
    placement = Placement([[-1, 0, 1, 0], [1, 0, -1, 1]])
    routing = solve_routing(placement, [6, 1], objective="tokens", method=engine)
    assert routing.makespan == 4
    assert routing.tokens[:, 3].tolist() == [0, 0]


def test_layers_without_tokens_are_proven(engine: str) -> None:
    """A problem without live experts has makespan and bound 0 and is OPTIMAL, even at once."""
    placement = Placement([[[0, 1], [1, -1]], [[1, 0], [0, -1]]])
    tokens = np.array([[0, 0], [0, 0]])
    for stop in (None, TimeLimit(0)):
        routing = solve_routing(placement, tokens, method=engine, stop=stop)
        check_routing(placement, tokens, routing)
        assert routing.status.tolist() == [Status.OPTIMAL] * 2
        assert routing.makespan.tolist() == routing.bound.tolist() == [0, 0]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_stopped_at_once(engine: str, objective: str) -> None:
    """Without time a warm start is METRO's answer; a cold one is UNSOLVED; both are bounded."""
    problem = draw(np.random.default_rng(5), gpus=5, experts=20, most_tokens=9)
    placement, tokens = problem.placement, problem.tokens
    optimum = solve_routing(placement, tokens, objective=objective).makespan
    stop = TimeLimit(0)
    warm = solve_routing(placement, tokens, objective=objective, method=engine, stop=stop)
    check_routing(placement, tokens, warm)
    counted = warm.makespan == warm.bound
    assert np.array_equal(warm.status, np.where(counted, Status.OPTIMAL, Status.FEASIBLE))
    assert not counted.all()
    assert (warm.proved_by == Proof.COUNT).all()
    assert (warm.bound <= optimum).all()
    assert np.array_equal(warm.tokens, solve_routing(placement, tokens, method="metro").tokens)

    router = Router(placement, objective=objective, method=cold(engine))
    out = router.route(tokens)
    router.route(tokens, out=out, stop=stop)
    check_routing(placement, tokens, out)
    assert (out.status == Status.UNSOLVED).all()
    assert not out.tokens.any()
    assert not out.activated.any()
    assert np.isnan(out.makespan).all()
    assert np.array_equal(out.bound, warm.bound)


def test_stopped_on_the_way(engine: str) -> None:
    """Whatever time there is, the answer is valid and its status is what was proven."""
    problem = draw(np.random.default_rng(6), gpus=16, experts=120, most_tokens=9)
    placement, tokens = problem.placement, problem.tokens
    for seconds in (1e-6, 1e-3, 1e-2):
        for name in (engine, cold(engine)):
            routing = solve_routing(placement, tokens, method=name, stop=TimeLimit(seconds))
            check_routing(placement, tokens, routing)


def test_threads_change_nothing(engine: str) -> None:
    """The answers are the same to the token on any number of threads, and from run to run."""
    problem = draw(np.random.default_rng(7), gpus=4, experts=15, most_tokens=9)
    one, two = (
        solve_routing(problem.placement, problem.tokens, method=engine, threads=threads)
        for threads in (1, 2)
    )
    assert np.array_equal(one.tokens, two.tokens)


def test_bad_tokens(engine: str) -> None:
    """Bad tokens are refused as everywhere, by place."""
    with pytest.raises(InvalidTokensError, match="expert 2 has -1 tokens"):
        solve_routing(FOUR_GPUS, [1, 1, -1, 1], method=engine)
    with pytest.raises(InvalidTokensError, match="of shape"):
        solve_routing(FOUR_GPUS, [1, 1], method=engine)
    placement = Placement([[0], [2]], allow_missing=True)
    with pytest.raises(InfeasibleError, match="expert 1 has tokens but no replica"):
        solve_routing(placement, [1, 1, 1], method=cold(engine))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_huge_counts_are_judged_honestly(engine: str, objective: str) -> None:
    """With the largest counts the bound holds, the answer is whole, and CP-SAT still proves it."""
    problem = draw(np.random.default_rng(8), gpus=4, experts=15, most_tokens=9)
    placement = problem.placement
    tokens = np.where(problem.tokens % 3, problem.tokens, _core.MAX_TOKENS_PER_EXPERT)
    optimal = solve_routing(placement, tokens, objective=objective)
    if engine == "pulp":
        with pytest.raises(EplbError, match=r"pulp, problem \(\d,\): CBC hands back eight digits"):
            solve_routing(placement, tokens, objective=objective, method=cold(engine))
        return
    judged = solve_routing(placement, tokens, objective=objective, method=engine)
    check_routing(placement, tokens, judged)
    assert (judged.bound <= optimal.makespan).all()
    assert (judged.bound >= optimal.makespan * (1 - 2e-6)).all()
    assert (judged.status == Status.OPTIMAL).all() or engine != "cp-sat"


@pytest.mark.parametrize(("engine", "packages"), PACKAGES.items())
def test_missing_package(engine: str, packages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package a method says at once what to install."""
    monkeypatch.setitem(sys.modules, packages[0], None)
    method = engine.partition(":")[0]
    expected = rf"{method} needs {packages[0]}: pip install 'eplb-opt\[exact\]'"
    with pytest.raises(SolverUnavailableError, match=expected):
        Router(FOUR_GPUS, method=engine)


def test_silent_and_imported_late(tmp_path: Path) -> None:
    """To bind a router imports no engine, and to route writes nothing, from C neither."""
    for package in ("highspy", "ortools", "pulp"):
        pytest.importorskip(package)
    script = """
import sys
from eplb_opt.placement import Placement
from eplb_opt.routing import Router
placement = Placement([[0, 1], [0, 2], [1, 3], [2, 3]])
methods = ("highs", "cp-sat", "pulp", "pulp:solver=HiGHS")
routers = [Router(placement, objective=o, method=m) for m in methods for o in sys.argv[1:]]
assert not {"highspy", "ortools", "pulp"} & set(sys.modules)
for router in routers:
    router.route([[4, 4, 4, 4], [1, 0, 7, 0]])
"""
    # A process of its own, since HiGHS prints its banner once in a process; and in another folder,
    # since -c looks for modules where it runs, and would find the sources, which lack the core.
    run = subprocess.run(
        [sys.executable, "-c", script, *OBJECTIVES], capture_output=True, text=True, cwd=tmp_path
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def fake(found: Found) -> Routing:
    """Judge what an engine proposes for the four GPUs with two tokens for each of two experts.

    The pairs are expert 0 on GPUs 0 and 1, expert 3 on GPUs 2 and 3.
    """
    objective = Objective.preset("activations")
    solve = judge(Proof.HIGHS, lambda *_: found, FOUR_GPUS, objective, 1, warm_start=False)
    out = Router(FOUR_GPUS).allocate((1, 4))
    solve(np.array([[2, 0, 0, 2]]), out, NO_CONTEXT)
    return out


@pytest.mark.parametrize(
    ("taken", "bound", "proof"),
    [
        ([2, 0, 0, 2], 1.0, Proof.HIGHS),
        ([2, 0, 0, 2], 1e-6, Proof.HIGHS),
        ([1.0000001, 0.9999999, -1e-9, 2], 0.5, Proof.HIGHS),
        ([2, 0, 0, 2], 0.0, Proof.COUNT),
        ([2, 0, 0, 2], -np.inf, Proof.COUNT),
    ],
)
def test_the_bound_is_the_better_of_the_engines_and_the_counted(
    taken: list[float], bound: float, proof: Proof
) -> None:
    """An engine's bound counts raised to a value that occurs; who proved the larger is named."""
    out = fake(Found(np.array(taken), bound))
    check_routing(FOUR_GPUS, [[2, 0, 0, 2]], out)
    assert (out.makespan[0], out.bound[0], out.status[0]) == (1, 1, Status.OPTIMAL)
    assert out.proved_by[0] == proof


def test_worse_answers_stay_feasible() -> None:
    """What is above the bound is FEASIBLE, whatever the engine thinks of it."""
    placement = Placement([[0, 1], [0, 1]])
    found = Found(np.array([3, 0, 3, 0]), 0.9)
    objective = Objective.preset("activations")
    solve = judge(Proof.PULP, lambda *_: found, placement, objective, 1, warm_start=False)
    out = Router(placement).allocate((1, 2))
    solve(np.array([[3, 3]]), out, NO_CONTEXT)
    assert (out.makespan[0], out.bound[0], out.status[0]) == (2, 1, Status.FEASIBLE)


@pytest.mark.parametrize(
    ("taken", "bound", "complaint"),
    [
        ([2, 0, 0, 1], 1.0, "serves 1 of the 2 tokens of expert 3"),
        ([2, 1, 0, 2], 1.0, "serves 3 of the 2 tokens of expert 0"),
        ([3, -1, 0, 2], 1.0, "negative"),
        ([2, 0, np.nan, 2], 1.0, "not numbers"),
        ([2, 0, 0, 2], 1.5, "proves a makespan of 1.5 or more where 1 is in hand"),
        ([2, 0, 0, 2], np.inf, "proves a makespan of inf or more where 1 is in hand"),
    ],
)
def test_wrong_answers_raise(taken: list[float], bound: float, complaint: str) -> None:
    """What does not serve the tokens, or contradicts itself, is an error and no answer."""
    with pytest.raises(EplbError, match=rf"^highs, problem \(0,\): .*{complaint}"):
        fake(Found(np.array(taken), bound))


def test_split_where_none_is_allowed() -> None:
    """An engine that splits an expert against the objective is in error."""
    objective = Objective(pieces=(Piece(token=1),), split=False)
    found = Found(np.array([1, 1]), 0.0)
    placement = Placement([[0], [0]])
    solve = judge(Proof.CP_SAT, lambda *_: found, placement, objective, 1, warm_start=False)
    out = Router(placement, objective=objective, method="cp-sat").allocate((1,))
    with pytest.raises(EplbError, match=r"^cp-sat, problem \(\): its answer splits expert 0"):
        solve(np.array([2]), out, NO_CONTEXT)


def test_no_answer_keeps_the_bound() -> None:
    """An engine that stops without an answer leaves its bound behind."""
    out = fake(Found(None, 0.3))
    assert (out.bound[0], out.status[0]) == (1, Status.UNSOLVED)


def test_worse_answer_than_the_start() -> None:
    """The better of the start and of the engine's answer is kept."""
    # METRO sends expert 0 to GPU 0 and finds GPU 1 for expert 1: one token more than counted.
    placement, objective = Placement([[0, 1], [0, 2], [1, 2]]), Objective.preset("tokens")
    found = Found(np.array([5, 0, 4, 0, 3, 0]), 0.0)
    solve = judge(Proof.HIGHS, lambda *_: found, placement, objective, 1, warm_start=True)
    out = Router(placement, objective=objective).allocate((3,))
    solve(np.array([5, 4, 3]), out, NO_CONTEXT)
    assert (float(out.makespan), float(out.bound)) == (5, 4)
    assert out.status == Status.FEASIBLE


def test_time_is_shared_problem_after_problem() -> None:
    """The time limit is over the call: early problems have it, late ones find it spent."""

    def slow(program: Program, start: object, deadline: float) -> Found:
        time.sleep(min(0.06, seconds_left(deadline)))
        return NOTHING if seconds_left(deadline) == 0 else Found(np.array([1, 0]), 1.0)

    placement, objective = Placement([[0], [0]]), Objective.preset("activations")
    solve = judge(Proof.HIGHS, slow, placement, objective, 1, warm_start=False)
    out = Router(placement).allocate((20, 1))
    began = time.monotonic()
    solve(np.ones((20, 1), np.int64), out, Context(stop=TimeLimit(0.2)))
    assert time.monotonic() - began < 1
    assert out.status[0] == Status.OPTIMAL
    assert out.status[-1] == Status.UNSOLVED
    assert (np.diff(out.status) <= 0).all()


def test_counted_bound() -> None:
    """All GPUs that hold a live expert share the demand; one alone serves what only it holds."""
    placement = Placement([[0, 1, 2], [0, 3, -1], [4, -1, -1]])
    pairs = Pairs.of(placement, 0)

    def bounds(tokens: list[int]) -> list[float]:
        program = [
            Program.of(placement, pairs, np.array(tokens), Objective.preset(name))
            for name in OBJECTIVES
        ]
        return [p.counted_bound() for p in program]

    assert bounds([5, 0, 0, 0, 0]) == [1, 3]
    assert bounds([1, 1, 1, 0, 0]) == [2, 2]
    assert bounds([9, 1, 0, 1, 2]) == [2, 5]
    assert bounds([1, 1, 6, 0, 0]) == [2, 7]


MIXED = Objective(pieces=(Piece(activation=15), Piece(offset=3, token=0.5)))
TILED = Objective(pieces=(Piece(offset=2, activation=3, tile=1.5), Piece(token=1)), tile_tokens=4)
SLOW = Objective(pieces=TILED.pieces, tile_tokens=4, slowness=(1, 1, 2, 1.25))
WHOLE = Objective(pieces=MIXED.pieces, split=False)


@pytest.mark.parametrize("objective", [MIXED, TILED, SLOW, WHOLE], ids=str)
def test_all_linear_objectives_agree_with_trying_everything(
    engine: str, objective: Objective
) -> None:
    """Tiles, offsets, slowness, whole experts: what an engine proves is the smallest there is."""
    rng = np.random.default_rng(9)
    for _ in range(3):
        problem = draw(rng, gpus=4, experts=5, most_tokens=6)
        smallest = optimal_makespan(problem.placement, problem.tokens, objective)
        for name in (engine, cold(engine)):
            judged = solve_routing(
                problem.placement, problem.tokens, objective=objective, method=name, bound=False
            )
            check_routing(problem.placement, problem.tokens, judged)
            assert np.array_equal(judged.makespan, smallest)
            assert np.array_equal(judged.bound, smallest)
            assert (judged.status == Status.OPTIMAL).all()


@pytest.mark.parametrize("seconds_per_us", [1e-6, 1e6])
def test_the_unit_of_time_changes_nothing(engine: str, seconds_per_us: float) -> None:
    """Times in seconds or in picoseconds are proven as in microseconds."""
    problem = draw(np.random.default_rng(10), gpus=4, experts=8, most_tokens=90)
    pieces = (Piece(activation=14.78 * seconds_per_us), Piece(token=0.0945 * seconds_per_us))
    scaled = solve_routing(
        problem.placement, problem.tokens, objective=Objective(pieces=pieces), method=engine
    )
    plain = solve_routing(
        problem.placement, problem.tokens, objective="deepseek-v3-fp8", method=engine
    )
    assert (scaled.status == Status.OPTIMAL).all()
    assert np.allclose(scaled.makespan, plain.makespan * seconds_per_us, rtol=1e-12)


def test_the_search_leads(engine: str) -> None:
    """With more than one thing to count an engine starts from what the search finds."""
    problem = draw(np.random.default_rng(12), gpus=6, experts=24, most_tokens=40)
    routings = [
        solve_routing(
            problem.placement, problem.tokens, objective=MIXED, method=method, stop=TimeLimit(0)
        )
        for method in (engine, "makespan")
    ]
    assert np.array_equal(routings[0].makespan, routings[1].makespan)


def test_twins_are_put_in_order() -> None:
    """GPUs that may be renamed are found, and a start is renamed so that the first takes most."""
    placement = Placement([[0, 1, 4], [0, 1, 5], [0, 1, -1], [1, 0, -1], [0, 2, -1], [0, 3, -1]])
    tokens = np.array([9, 9, 7, 7, 5, 5])
    program = Program.of(placement, Pairs.of(placement, 0), tokens, Objective.preset("tokens"))
    assert [gpus.tolist() for gpus in program.twins()] == [[0, 1], [2, 3], [4, 5]]
    taken = np.arange(len(program.gpu))
    ordered = program.in_order(taken)
    sizes = program.sizes(ordered)
    assert all(np.diff(sizes[gpus]) <= 0 for gpus in program.twins())
    assert sorted(program.sizes(taken)) == sorted(sizes)


def test_room_and_fewest_replicas() -> None:
    """Within a makespan a replica takes so many tokens, and an expert needs so many replicas."""
    placement = Placement([[0, 1], [0, 2], [0, -1]])
    objective = Objective(pieces=(Piece(offset=1, activation=2, token=1),))
    program = Program.of(placement, Pairs.of(placement, 0), np.array([12, 3, 1]), objective)
    assert program.room().tolist() == [12, 12, 12]
    tight = replace(program, most=10.0)
    assert tight.room().tolist() == [2, 4, 7]
    assert tight.fewest_replicas(tight.room()).tolist() == [3]
    assert tight.activation_room().tolist() == [1, 1, 1]


def test_counted_bound_of_what_is_priced() -> None:
    """The counted bound of any objective is not above the smallest makespan."""
    rng = np.random.default_rng(11)
    curve = Objective(pieces=(Curve((1, 4, 5, 8), (2.0, 2.0, 5.0, 5.0)),))
    for objective in (MIXED, TILED, SLOW, WHOLE, curve):
        for _ in range(20):
            problem = draw(rng, gpus=4, experts=5, most_tokens=4)
            smallest = optimal_makespan(problem.placement, problem.tokens, objective)
            pairs = Pairs.of(problem.placement, 0, every_slot=bool(objective.curves))
            for tokens, makespan in zip(problem.tokens, smallest, strict=True):
                program = Program.of(problem.placement, pairs, tokens, objective)
                assert program.counted_bound() <= makespan


@pytest.mark.parametrize("engine", ["highs", "pulp", "pulp:solver=HiGHS"])
def test_curves_are_refused_by_name(engine: str) -> None:
    """HiGHS and PuLP say that they do not take curves."""
    curve = Objective(pieces=(Curve((1, 2), (1.0, 2.0)),), name="measured")
    with pytest.raises(ValueError, match="solves pieces that are not curves only, not measured"):
        Router(FOUR_GPUS, objective=curve, method=engine)


def test_slowness_of_other_gpus(engine: str) -> None:
    """A slowness for another number of GPUs is refused."""
    two = Objective(pieces=MIXED.pieces, slowness=(1, 2))
    with pytest.raises(ValueError, match="slowness of 2 GPUs; the placement has 4"):
        solve_routing(FOUR_GPUS, [1, 1, 1, 1], objective=two, method=engine)
