"""`deepseek`: DeepSeek's EPLB, the placement that every engine ships."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from eplb_opt import _core
from eplb_opt.placers.base import Placed, PlacementProblem, PlacerTraits

_FORMS = ("auto", "global", "hierarchical")


@dataclass(frozen=True, slots=True)
class DeepSeek:
    """EPLB: replicate the hottest per copy, pack the heaviest first; by nodes where groups allow.

    Every redundant slot gives one more copy to the expert with the largest load per copy; the
    replicas then go, heaviest first, to the lightest GPU with a free slot. The hierarchical form
    first packs the groups of experts to nodes, equally many to each, and does the rest within every
    node, so that a group's experts stay on one node (``eplb.py`` of github.com/deepseek-ai/EPLB).
    Ties are settled by fewer copies, then lower ids.

    Up to ties and rounding (the original calculates in float32, and leaves ties to PyTorch) every
    GPU has the load that the original gives it, and like there nothing keeps two copies of an
    expert off one GPU. Among equal loads other experts may get the copies, or another place.

    Parameters
    ----------
    form
        ``"hierarchical"``, ``"global"``, which ignores groups and nodes, or DeepSeek's own rule,
        ``"auto"``: hierarchical if the nodes divide the groups, else global, as the plan's note
        then says.

    Raises
    ------
    ValueError
        An unknown form; when it places, the hierarchical form with nodes that do not divide the
        groups.

    Notes
    -----
    O((experts + slots) log (experts + slots)) per layer, in the compiled core.

    Examples
    --------
    Both redundant slots go to expert 0, two of whose copies meet on GPU 0:

    >>> from eplb_opt.placing import solve_placement
    >>> plan = solve_placement([90, 10, 10, 10], num_gpus=2, slots_per_gpu=3, method="deepseek")
    >>> plan.placement.slots.tolist()
    [[0, 0, 3], [0, 1, 2]]
    """

    traits: ClassVar[PlacerTraits] = PlacerTraits(
        "DeepSeek EPLB: replicate the hottest, pack the heaviest first; groups to nodes"
    )

    form: str = "auto"

    def __post_init__(self) -> None:
        if self.form not in _FORMS:
            raise ValueError(f"deepseek: form is {', '.join(_FORMS)}, not {self.form!r}")

    def place(self, problem: PlacementProblem) -> Placed:
        """Place the experts of all layers."""
        groups, nodes, note = problem.num_groups, problem.num_nodes, ""
        if self.form == "global":
            groups = nodes = 1
        elif groups % nodes:
            why = f"{nodes} nodes do not divide {groups} groups"
            if self.form == "hierarchical":
                raise ValueError(f"{why}; deepseek's global form does without")
            groups = nodes = 1
            note = f"global: {why}"
        slots = problem.new_slots()
        _core.place_deepseek(problem.load, groups, nodes, slots)
        return Placed(slots, note, nodes)
