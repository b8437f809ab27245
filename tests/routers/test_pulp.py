"""PuLP alone: the model itself, and its solvers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eplb_opt.errors import EplbError, InfeasibleError, InvalidTokensError, SolverUnavailableError
from eplb_opt.objective import Curve, Objective, Piece
from eplb_opt.placement import Placement
from eplb_opt.routers.pulp import Pulp
from eplb_opt.routing import Proof, solve_routing

pulp = pytest.importorskip("pulp")

PLACEMENT = Placement([[0, 1], [0, -1]])


def rows(model: object) -> list[str]:
    """Return the constraints of a model as text."""
    return str(model).split("SUBJECT TO\n")[1].split("\nVARIABLES")[0].strip().split("\n\n")


def test_model_is_the_program_of_the_paper() -> None:
    """The activations are stated as METRO states them, one named row each."""
    assert rows(Pulp.model(PLACEMENT, [3, 2])) == [
        "gpu_0: - makespan + y_0_0 + y_1_0 <= 0",
        "gpu_1: - makespan + y_0_1 <= 0",
        "expert_0: x_0_0 + x_0_1 = 3",
        "expert_1: x_1_0 = 2",
        "activates_0_0: x_0_0 - 3 y_0_0 <= 0",
        "activates_0_1: x_0_1 - 3 y_0_1 <= 0",
        "activates_1_0: x_1_0 - 2 y_1_0 <= 0",
    ]


def test_model_of_tokens_has_no_y() -> None:
    """The tokens need no binary variable; experts without tokens need no row."""
    assert rows(Pulp.model(PLACEMENT, [3, 0], "tokens")) == [
        "gpu_0: - makespan + x_0_0 <= 0",
        "gpu_1: - makespan + x_0_1 <= 0",
        "expert_0: x_0_0 + x_0_1 = 3",
        "twins_0_1: - x_0_0 + x_0_1 <= 0",
    ]


def test_model_of_tiles_slowness_and_two_pieces() -> None:
    """Pieces are named rows, each with its prices; tiles are started and filled."""
    pieces = (Piece(offset=2, activation=3, tile=1.5), Piece(token=0.5))
    objective = Objective(pieces=pieces, slowness=(1, 2))
    assert rows(Pulp.model(PLACEMENT, [300, 2], objective)) == [
        "gpu_0_piece_0: - makespan + 3 y_0_0 + 3 y_1_0 + 1.5 z_0_0 + 1.5 z_1_0 <= -2",
        "gpu_1_piece_0: - makespan + 6 y_0_1 + 3 z_0_1 <= -4",
        "gpu_0_piece_1: - makespan + 0.5 x_0_0 + 0.5 x_1_0 <= 0",
        "gpu_1_piece_1: - makespan + x_0_1 <= 0",
        "expert_0: x_0_0 + x_0_1 = 300",
        "expert_1: x_1_0 = 2",
        "activates_0_0: x_0_0 - 300 y_0_0 <= 0",
        "activates_0_1: x_0_1 - 300 y_0_1 <= 0",
        "activates_1_0: x_1_0 - 2 y_1_0 <= 0",
        "tiles_0_0: x_0_0 - 128 z_0_0 <= 0",
        "tiles_0_1: x_0_1 - 128 z_0_1 <= 0",
        "tiles_1_0: x_1_0 - 128 z_1_0 <= 0",
        "starts_a_tile_0_0: y_0_0 - z_0_0 <= 0",
        "starts_a_tile_0_1: y_0_1 - z_0_1 <= 0",
        "starts_a_tile_1_0: y_1_0 - z_1_0 <= 0",
    ]


def test_model_of_whole_experts() -> None:
    """Without splits there is no x: each expert is at one GPU, with all its tokens and tiles."""
    objective = Objective(pieces=(Piece(tile=1, token=0.5),), split=False)
    assert rows(Pulp.model(PLACEMENT, [300, 2], objective)) == [
        "gpu_0: - makespan + 153 y_0_0 + 2 y_1_0 <= 0",
        "gpu_1: - makespan + 153 y_0_1 <= 0",
        "expert_0: y_0_0 + y_0_1 = 1",
        "expert_1: y_1_0 = 1",
    ]


def test_model_is_exported(tmp_path: Path) -> None:
    """The model is written as LP and MPS, and solved from there it has the same optimum."""
    objective = Objective.preset("deepseek-v3-fp8")
    placement, tokens = Placement([[0, 1], [0, 2], [1, 2]]), [300, 200, 90]
    model = Pulp.model(placement, tokens, objective)
    model.writeLP(str(tmp_path / "problem.lp"))
    model.writeMPS(str(tmp_path / "problem.mps"))
    assert "gpu_0_piece_1" in (tmp_path / "problem.lp").read_text()
    _, again = pulp.LpProblem.fromMPS(str(tmp_path / "problem.mps"))
    again.solve(pulp.PULP_CBC_CMD(msg=False, _skip_v4_deprecation=True))
    routing = solve_routing(placement, tokens, objective=objective, method="pulp", bound=False)
    assert pulp.value(again.objective) == pytest.approx(float(routing.makespan))


def test_model_refuses_curves() -> None:
    """A curve has no linear rows; the error names the engine that takes it."""
    curve = Objective(pieces=(Curve((1, 2), (1.0, 2.0)),))
    with pytest.raises(ValueError, match="cp-sat takes it"):
        Pulp.model(PLACEMENT, [3, 2], curve)


def test_model_of_a_layer(tmp_path: Path) -> None:
    """A layer is chosen by number, and the model can be written for other solvers."""
    placement = Placement([[[0, 1], [0, -1]], [[1, 0], [1, -1]]])
    model = Pulp.model(placement, [[3, 2], [0, 5]], layer=1)
    assert rows(model)[2] == "expert_1: x_1_0 + x_1_1 = 5"
    model.writeLP(str(tmp_path / "problem.lp"))
    assert "x_1_0 + x_1_1 = 5" in (tmp_path / "problem.lp").read_text()


def test_model_refuses_what_is_not_one_problem() -> None:
    """Batch axes, bad counts and experts without a replica are errors."""
    with pytest.raises(InvalidTokensError, match=r"no batch axes, not be of shape \(1, 2\)"):
        Pulp.model(PLACEMENT, [[3, 2]])
    with pytest.raises(InvalidTokensError, match="expert 1 has -2 tokens"):
        Pulp.model(PLACEMENT, [3, -2])
    with pytest.raises(InfeasibleError, match="expert 0 has tokens but no replica"):
        Pulp.model(Placement([[1], [2]], allow_missing=True), [3, 2, 0])


def test_unknown_solver() -> None:
    """A solver that PuLP does not find is an error that lists those it finds."""
    for solver in ("MOSEK", "nonsense"):
        with pytest.raises(SolverUnavailableError, match=rf"{solver}.* finds: .*PULP_CBC_CMD"):
            solve_routing(PLACEMENT, [3, 2], method=f"pulp:solver={solver}")


def test_solver_without_a_gap_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of a solver whose gap PuLP cannot set is lowered by 1e-4 before it proves."""
    options = frozenset({"msg", "_skip_v4_deprecation"})
    monkeypatch.setattr("eplb_opt.routers.pulp._options", lambda _: options)
    placement = Placement([[0, 1], [0, 2]])
    few = solve_routing(placement, [9_999, 1, 1], objective="tokens", method="pulp")
    many = solve_routing(placement, [40_000, 1, 1], objective="tokens", method="pulp")
    assert few.proved_by == Proof.PULP
    assert many.proved_by == Proof.COUNT


def test_unfinished_search_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """PuLP's status calls a search that time ended optimal; the answer counts, the value not."""
    whole = pulp.LpProblem.solve

    def stopped(model: Any, solver: Any) -> None:
        whole(model, solver)
        model.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)

    monkeypatch.setattr(pulp.LpProblem, "solve", stopped)
    routing = solve_routing(PLACEMENT, [3, 2], method="pulp:warm_start=false")
    assert routing.makespan == routing.bound == 1
    assert routing.proved_by == Proof.COUNT


def test_failing_solver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that breaks down raises an error that names it and the problem."""

    def fail(*_: object) -> None:
        raise pulp.PulpError("no licence")

    monkeypatch.setattr(pulp.LpProblem, "solve", fail)
    with pytest.raises(EplbError, match=r"^pulp, problem \(\): PULP_CBC_CMD: no licence"):
        solve_routing(PLACEMENT, [3, 2], method="pulp")
