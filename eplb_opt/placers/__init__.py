"""The placement methods, one file each, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from eplb_opt.placers.base import PlacementMethod
from eplb_opt.placers.deepseek import DeepSeek

__all__ = ["DeepSeek", "PlacementMethod", "placement_methods", "resolve_placer"]

_METHODS: Mapping[str, type[PlacementMethod]] = MappingProxyType({"deepseek": DeepSeek})


def placement_methods() -> dict[str, str]:
    """Return one line on each placement method, by name."""
    return {name: method.summary for name, method in _METHODS.items()}


def resolve_placer(method: str | PlacementMethod) -> PlacementMethod:
    """Return the placement method that a name or an instance stands for."""
    if not isinstance(method, str):
        return method
    if method not in _METHODS:
        raise ValueError(f"unknown placement method {method!r}; known: {', '.join(_METHODS)}")
    return _METHODS[method]()
