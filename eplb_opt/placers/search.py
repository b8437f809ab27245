"""`search`: our placer for loads, which replicates and packs together, to the bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.budget import MoveCurve, spend
from eplb_opt.placers.base import Placed, PlacementProblem, PlacerTraits

_ANY_STEPS = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Search:
    """Local search for the least makespan of equal split: swaps, chains of swaps, other copies.

    Afresh, spare slots go to the largest load per copy and copies, heaviest first, to the lightest
    GPU that lacks the expert; then steps that relieve the fullest GPU, until the bound is met or
    none helps (``solvers/cpp/placement_search.hpp``). No two copies of an expert share a GPU.
    Several windows are placed for together, by the sum that was asked for.

    With nodes that divide the groups, every group stays on one node, equally many on each, packed
    by the same search; otherwise as one node, which `PlacementPlan.note` says.

    With a previous placement the steps start from it, after copies that share a GPU are parted. A
    layer that stays above the bound is placed afresh too, its GPUs named so that fewest weights
    move, and the better is taken; on a tie the first. With `max_moves` they only start from it, and
    the budget goes to the layers where a move lowers the sum of makespans most (`eplb_opt.budget`).

    For free split it places as for equal split, whose makespan is never the smaller.

    Parameters
    ----------
    within
        How near to the bound is near enough, as a fraction.
    work
        Trials per layer, each of a change of two or three GPUs.

    Raises
    ------
    ValueError
        Numbers below 0.

    Notes
    -----
    O(steps x slots) per layer and window, most of them swaps; see the header for the others.

    Examples
    --------
    >>> from eplb_opt.placing import solve_placement
    >>> load = [600, 560, 120, 120, 20, 10, 10, 10]
    >>> plan = solve_placement(load, num_gpus=8, slots_per_gpu=2, method="search")
    >>> round(float(plan.makespan), 2), plan.duplicates
    (196.67, 0)
    """

    traits: ClassVar[PlacerTraits] = PlacerTraits(
        "ours: replication and packing together, to the bound; from a placement, within few moves",
        takes=frozenset({"max_moves"}),
    )

    within: float = 1e-4
    work: int = 100_000

    def __post_init__(self) -> None:
        if not (self.within >= 0 and self.work >= 0):
            raise ValueError(
                f"search: within and work are at least 0, not {self.within} and {self.work}"
            )

    def place(self, problem: PlacementProblem) -> Placed:
        """Place the experts of all layers."""
        nodes, groups, note = problem.topology()
        problem.require_node_room(nodes)
        if problem.max_moves is not None:
            return Placed(self._within_budget(problem, nodes, problem.max_moves), note, nodes)
        slots = problem.new_slots()
        _core.place_search(
            problem.windows,
            nodes,
            groups,
            problem.measure.quantile,
            problem.old_slots(),
            problem.floor(),
            self.within,
            self.work,
            problem.threads,
            slots,
        )
        return Placed(slots, note, nodes)

    def curve(self, problem: PlacementProblem) -> MoveCurve:
        """Return how the makespan falls from the previous placement's as weights move.

        Raises
        ------
        InvalidPlacementError
            If an expert is missing in the previous placement.
        """
        nodes, _, _ = problem.topology()
        return MoveCurve.of(self._improve(problem, nodes, _start(problem)))

    def _within_budget(
        self, problem: PlacementProblem, nodes: int, budget: int
    ) -> NDArray[np.int32]:
        """Return the previous slots after the steps that a budget of moves is best spent on."""
        slots = _start(problem)
        _core.make_distinct(problem.load, nodes, slots)
        states = self._improve(problem, nodes, slots.copy())
        if sum(of_layer[0][0] for of_layer in states) > budget:  # to part copies takes too many
            slots = _start(problem)
            states = self._improve(problem, nodes, slots.copy())
        self._improve(problem, nodes, slots, spend(states, budget))
        return slots

    def _improve(
        self,
        problem: PlacementProblem,
        nodes: int,
        slots: NDArray[np.int32],
        steps: NDArray[np.int64] | None = None,
    ) -> list[list[tuple[int, float]]]:
        """Improve slots in place, by so many steps or all; return each layer's states."""
        previous = problem.old_slots()
        assert previous is not None
        states: list[list[tuple[int, float]]] = _core.improve_search(
            problem.windows,
            nodes,
            problem.measure.quantile,
            previous,
            problem.floor(),
            self.within,
            self.work,
            np.full(len(slots), _ANY_STEPS) if steps is None else steps,
            problem.threads,
            slots,
        )
        return states


def _start(problem: PlacementProblem) -> NDArray[np.int32]:
    """Return a copy of the previous slots, which hold every expert."""
    return np.array(problem.require_all_held("search"), dtype=np.int32, order="C")
