"""The placement methods, one file each, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from eplb_opt.options import make_method
from eplb_opt.placers.ascend_default import AscendDefault
from eplb_opt.placers.ascend_random import AscendRandom
from eplb_opt.placers.base import (
    Batches,
    Placed,
    PlacementMethod,
    PlacementProblem,
    PlacerTraits,
    first_placement,
)
from eplb_opt.placers.cp_sat import CpSat
from eplb_opt.placers.deepseek import DeepSeek
from eplb_opt.placers.flashlb import FlashLb
from eplb_opt.placers.highs import Highs
from eplb_opt.placers.routing_aware import RoutingAware
from eplb_opt.placers.search import Search
from eplb_opt.placers.swift import Swift
from eplb_opt.placers.trtllm import TrtLlm

__all__ = [
    "AscendDefault",
    "AscendRandom",
    "Batches",
    "CpSat",
    "DeepSeek",
    "FlashLb",
    "Highs",
    "Placed",
    "PlacementMethod",
    "PlacementProblem",
    "PlacerTraits",
    "RoutingAware",
    "Search",
    "Swift",
    "TrtLlm",
    "first_placement",
    "placement_methods",
    "resolve_placer",
]

_METHODS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "search": Search,
        "deepseek": DeepSeek,
        "trtllm": TrtLlm,
        "ascend-random": AscendRandom,
        "ascend-default": AscendDefault,
        "swift": Swift,
        "flashlb": FlashLb,
        "highs": Highs,
        "cp-sat": CpSat,
        "routing-aware": RoutingAware,
    }
)


def placement_methods() -> dict[str, PlacerTraits]:
    """Return what each placement method can do, by name.

    Examples
    --------
    >>> print(placement_methods()["swift"].summary)
    vLLM-Ascend policy 2: regrant copies, then a few swaps
    """
    return {name: method.traits for name, method in _METHODS.items()}


def resolve_placer(method: str | PlacementMethod) -> PlacementMethod:
    """Return the placement method that a name, a name with options or an instance stands for.

    Raises
    ------
    ValueError
        An unknown name or option; the message lists the known.
    TypeError
        Neither a name nor an instance of a method.

    Examples
    --------
    >>> resolve_placer("deepseek:form=global")
    DeepSeek(form='global')
    """
    if isinstance(method, type) or not (isinstance(method, str) or hasattr(method, "place")):
        raise TypeError(f"method must be a name or an instance of a method, not {method!r}")
    if not isinstance(method, str):
        return method
    name, _, options = method.partition(":")
    if name not in _METHODS:
        raise ValueError(f"unknown placement method {name!r}; known: {', '.join(_METHODS)}")
    made: PlacementMethod = make_method(name, _METHODS[name], options)
    return made
