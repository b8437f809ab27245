"""The placement methods, one file each, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from eplb_opt.placers.base import PlacementMethod
from eplb_opt.placers.deepseek import DeepSeek

__all__ = ["DeepSeek", "PlacementMethod", "placement_methods", "resolve_placer"]

_METHODS: Mapping[str, type[PlacementMethod]] = MappingProxyType({"deepseek": DeepSeek})


def placement_methods() -> dict[str, str]:
    """Return one line on each placement method, by name.

    Examples
    --------
    >>> print(placement_methods()["deepseek"])
    DeepSeek EPLB, global: replicate the hottest, pack the heaviest first
    """
    return {name: method.summary for name, method in _METHODS.items()}


def resolve_placer(method: str | PlacementMethod) -> PlacementMethod:
    """Return the placement method that a name or an instance stands for.

    Raises
    ------
    ValueError
        An unknown name; the message lists the known.
    TypeError
        Neither a name nor an instance of a method.

    Examples
    --------
    >>> resolve_placer("deepseek")
    DeepSeek()
    """
    if isinstance(method, type) or not (isinstance(method, str) or hasattr(method, "place")):
        raise TypeError(f"method must be a name or an instance of a method, not {method!r}")
    if not isinstance(method, str):
        return method
    if method not in _METHODS:
        raise ValueError(f"unknown placement method {method!r}; known: {', '.join(_METHODS)}")
    return _METHODS[method]()
