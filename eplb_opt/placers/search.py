"""`search`: our placer for loads, which replicates and packs together, to the bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.arrays import as_integer
from eplb_opt.budget import MoveCurve, spend
from eplb_opt.errors import InvalidPlacementError
from eplb_opt.placers.base import Placed, PlacementProblem, PlacerTraits


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
    move, and the better is taken; on a tie the first. One that lacks an expert or splits a group
    is only placed afresh.

    With `max_moves` the steps start from the previous placement with shared copies parted and, but
    for `distinct`, from it as it is. The budget goes to the layers where a move lowers the sum of
    makespans most (`eplb_opt.budget`), so that a larger one never ends with a larger sum. Only a
    layer from which no step may start is placed afresh.

    For free split it places as for equal split, whose makespan is never the smaller.

    Parameters
    ----------
    within
        How near to the bound is near enough, as a fraction.
    work
        Trials per layer, each of a trade between two GPUs, alone or before others that follow it.

    Raises
    ------
    ValueError
        Numbers below 0, or more work than an int64 holds.
    TypeError
        Work that is not an integer.
    InvalidPlacementError
        When it places, `max_moves` that are too few to mend a layer of the previous placement that
        lacks an expert, splits a group or, with `distinct`, has shared copies.

    Notes
    -----
    O(steps x slots x slots per GPU) per layer and window, most steps swaps; see the header for the
    others.

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
        as_integer(self.work, "search: work", least=0, most=2**63 - 1)
        if not self.within >= 0:
            raise ValueError(f"search: within must be at least 0, not {self.within}")

    def place(self, problem: PlacementProblem) -> Placed:
        """Place the experts of all layers."""
        nodes, groups, note = problem.topology()
        if problem.max_moves is not None:
            return Placed(self._within_budget(problem, problem.max_moves), note, nodes)
        problem.require_node_room(nodes)
        slots = problem.new_slots()
        _core.place_search(
            problem.windows,
            nodes,
            groups,
            problem.measure.quantile,
            problem.old_slots(),
            problem.floor(nodes),
            self.within,
            self.work,
            problem.threads,
            slots,
        )
        return Placed(slots, note, nodes)

    def curve(self, problem: PlacementProblem) -> MoveCurve:
        """Return how the makespan falls from the previous placement's as weights move."""
        return MoveCurve.of(self._walk(problem, problem.new_slots(), None))

    def _within_budget(self, problem: PlacementProblem, budget: int) -> NDArray[np.int32]:
        """Return the slots of the states that a budget of moves is best spent on."""
        slots = problem.new_slots()
        states = self._walk(problem, slots, None)
        least = np.array([min(moves for moves, _ in of_layer) for of_layer in states])
        if least.sum() > budget:
            layer = np.flatnonzero(least)[0]
            raise InvalidPlacementError(
                f"previous, layer {layer}: {problem.defect(layer)}; search takes {least[layer]} "
                f"moves to mend it, {least.sum()} for all layers, and max_moves is {budget}"
            )
        self._walk(problem, slots, spend(states, budget))
        return slots

    def _walk(
        self, problem: PlacementProblem, slots: NDArray[np.int32], reach: NDArray[np.int64] | None
    ) -> list[list[tuple[int, float]]]:
        """Return each layer's states from the previous placement on: moves and makespan.

        Up to the one numbered `reach`, int64 ``[layers]``, which `slots` get; or all.
        """
        nodes, groups, _ = problem.topology()
        problem.require_node_room(nodes)
        previous = problem.old_slots()
        assert previous is not None
        states: list[list[tuple[int, float]]] = _core.walk_search(
            problem.windows,
            nodes,
            groups,
            problem.measure.quantile,
            previous,
            problem.floor(nodes),
            self.within,
            self.work,
            not problem.distinct,
            np.full(len(slots), -1) if reach is None else reach,
            problem.threads,
            slots,
        )
        return states
