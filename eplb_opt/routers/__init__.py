"""The routing methods, one file each, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from eplb_opt.objective import Objective
from eplb_opt.options import make_method
from eplb_opt.routers.base import Context, RoutingMethod, Solve, Traits, finish
from eplb_opt.routers.cp_sat import CpSat
from eplb_opt.routers.flow import Flow
from eplb_opt.routers.highs import Highs
from eplb_opt.routers.lst import Lst
from eplb_opt.routers.makespan import Makespan
from eplb_opt.routers.matching import Matching
from eplb_opt.routers.metro import Metro
from eplb_opt.routers.nearest import Nearest
from eplb_opt.routers.optimal import Optimal, compiled_for
from eplb_opt.routers.pulp import Pulp
from eplb_opt.routers.random import Random
from eplb_opt.routers.rank_mod import RankMod
from eplb_opt.routers.trtllm import TrtLlm
from eplb_opt.routers.uniform import Uniform
from eplb_opt.routers.vllm_hash import VllmHash

__all__ = [
    "Context",
    "CpSat",
    "Flow",
    "Highs",
    "Lst",
    "Makespan",
    "Matching",
    "Metro",
    "Nearest",
    "Optimal",
    "Pulp",
    "Random",
    "RankMod",
    "RoutingMethod",
    "Solve",
    "Traits",
    "TrtLlm",
    "Uniform",
    "VllmHash",
    "finish",
    "resolve_for",
    "resolve_method",
    "routing_methods",
]

_METHODS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "matching": Matching,
        "flow": Flow,
        "makespan": Makespan,
        "highs": Highs,
        "cp-sat": CpSat,
        "pulp": Pulp,
        "lst": Lst,
        "metro": Metro,
        "uniform": Uniform,
        "nearest": Nearest,
        "random": Random,
        "vllm-hash": VllmHash,
        "trtllm": TrtLlm,
        "rank-mod": RankMod,
    }
)


def routing_methods() -> dict[str, Traits]:
    """Return what each routing method can do, by name.

    ``"optimal"`` is not among them: it stands for the compiled exact method of the objective, or
    for `Optimal` where there is none.

    Examples
    --------
    >>> routing_methods()["metro"].exact
    False
    """
    return {name: method.traits for name, method in _METHODS.items()}


def resolve_method(method: str | RoutingMethod, objective: Objective) -> RoutingMethod:
    """Return the method that a name, a name with options or an instance stands for.

    Raises
    ------
    ValueError
        Unknown name or option, or a method that does not solve the objective; the message lists
        what there is.

    Examples
    --------
    >>> resolve_method("metro:order=random,seed=3", Objective.preset("activations"))
    Metro(order='random', seed=3)
    """
    resolved = _parse(method, objective) if isinstance(method, str) else method
    if isinstance(resolved, type) or not hasattr(resolved, "traits"):
        raise TypeError(f"method must be a name or an instance of a method, not {method!r}")
    if not resolved.traits.solves(objective):
        raise ValueError(
            f"{method} solves {resolved.traits.objectives} only, not {objective.name}; 'optimal' "
            "picks the method by objective"
        )
    return resolved


def resolve_for(
    method: str | RoutingMethod, objective: Objective
) -> tuple[str, RoutingMethod, Objective]:
    """Return a method's label, the method, and what it minimises when `objective` is priced.

    ``"matching"`` and ``"flow"`` solve one objective only; under another they are rules, whose
    answers are priced like all others.

    Raises
    ------
    ValueError
        As `resolve_method`.

    Examples
    --------
    >>> label, method, own = resolve_for("flow", Objective.preset("activations"))
    >>> label, own.name
    ('flow', 'tokens')
    """
    label = method if isinstance(method, str) else repr(method)
    name = label.partition(":")[0]
    own = objective
    if name in _OWN_OBJECTIVE and not _METHODS[name].traits.solves(objective):
        own = Objective.preset(_OWN_OBJECTIVE[name])
    return label, resolve_method(method, own), own


_OWN_OBJECTIVE = {"matching": "activations", "flow": "tokens"}


def _parse(spec: str, objective: Objective) -> RoutingMethod:
    name, _, given = spec.partition(":")
    cls = _METHODS.get(name)
    if name == "optimal":
        cls = compiled_for(objective) or Optimal
    if cls is None:
        raise ValueError(f"unknown method {name!r}; known: optimal, {', '.join(_METHODS)}")
    made: RoutingMethod = make_method(name, cls, given)
    return made
