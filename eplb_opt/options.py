"""Methods by name with options: ``"metro:order=random,seed=3"``."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["make_method"]

_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a word"}


def make_method(name: str, cls: type[Any], given: str) -> Any:
    """Return a method's class, a dataclass, made with options as text.

    Parameters
    ----------
    name
        What the method is called, for messages.
    cls
        The class; an option has the type of its default.
    given
        ``key=value`` pairs with commas between them, or nothing.

    Raises
    ------
    ValueError
        An option that there is not, the message lists those there are; or a value of another type.

    Examples
    --------
    >>> from eplb_opt.routers import Metro
    >>> make_method("metro", Metro, "order=random,seed=3")
    Metro(order='random', seed=3)
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    options: dict[str, object] = {}
    for part in filter(None, given.split(",")):
        key, _, value = part.partition("=")
        if key not in fields:
            known = ", ".join(fields) or "none"
            raise ValueError(f"{name} has no option {key!r}; it has: {known}")
        options[key] = _convert(name, key, value, fields[key].default)
    return cls(**options)


def _convert(name: str, key: str, value: str, default: object) -> object:
    """Read an option's text as the type of its default."""
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[value.lower()]
        return type(default)(value)  # type: ignore[call-arg]
    except (KeyError, ValueError):
        expected = _KINDS[type(default)]
        raise ValueError(f"{name}: {key}={value!r} is not {expected}") from None
