"""Objectives in JSON files, as `Objective.to_json` writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from eplb_opt.errors import FormatError
from eplb_opt.formats.values import without_repeats
from eplb_opt.objective import Curve, Objective, Piece

__all__ = ["parse_objective", "read_objective"]

_Made = TypeVar("_Made")


def read_objective(path: str | os.PathLike[str]) -> Objective:
    """Read an objective from a JSON file.

    The keys are the parameters of `Objective`, of which only ``pieces`` is required. A piece has
    the parameters of `Piece`, all optional, or those of `Curve`, both required.

    Raises
    ------
    FormatError
        For all else; the message names the place in the file (``pieces[1].token``).
    OSError
        When the file cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "kernel.json"
    ...     _ = path.write_text('{"pieces": [{"activation": 15.0}, {"token": 0.1}]}')
    ...     read_objective(path).break_even
    150.0
    """
    return parse_objective(Path(path).read_bytes(), path)


def parse_objective(text: str | bytes, path: str | os.PathLike[str]) -> Objective:
    """Return the objective in the text; `path` is for errors."""
    try:
        content = json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise FormatError(path, "", f"damaged, or not JSON ({error})") from error
    reader = _Reader(path)
    entries = reader.entries("", content, Objective, required=("pieces",))
    pieces = reader.items("pieces", entries.pop("pieces"))
    entries["pieces"] = [reader.piece(f"pieces[{at}]", entry) for at, entry in enumerate(pieces)]
    if entries.get("slowness") is not None:
        entries["slowness"] = reader.numbers("slowness", entries["slowness"])
    for key, kind in (("name", str), ("source", str), ("split", bool), ("tile_tokens", int)):
        if key in entries:
            reader.require(key, entries[key], kind)
    return reader.made("", Objective, entries)


class _Reader:
    """Checks of JSON values that know the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path

    def piece(self, place: str, value: object) -> Piece | Curve:
        """Return a piece, a curve where its keys say so."""
        if isinstance(value, dict) and ("tokens" in value or "times" in value):
            entries = self.entries(place, value, Curve, required=("tokens", "times"))
            for at, count in enumerate(self.items(f"{place}.tokens", entries["tokens"])):
                self.require(f"{place}.tokens[{at}]", count, int)
            self.numbers(f"{place}.times", entries["times"])
            return self.made(place, Curve, entries)
        entries = self.entries(place, value, Piece)
        for key, number in entries.items():
            self.number(f"{place}.{key}", number)
        return self.made(place, Piece, entries)

    def entries(
        self, place: str, value: object, cls: type[Any], required: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return an object's entries, whose keys are parameters of a class."""
        if not isinstance(value, dict):
            raise FormatError(self.path, place, f"expected an object, not {_kind(value)}")
        known = [field.name for field in fields(cls)]
        for key in value:
            if key not in known:
                raise FormatError(
                    self.path, place, f"unknown key {key!r}; known are {', '.join(known)}"
                )
        for key in required:
            if key not in value:
                raise FormatError(self.path, place, f"the key {key!r} is missing")
        return value

    def items(self, place: str, value: Any) -> list[Any]:
        """Return a list."""
        self.require(place, value, list)
        return list(value)

    def numbers(self, place: str, value: object) -> list[Any]:
        """Return a list of numbers from 0."""
        values = self.items(place, value)
        for at, number in enumerate(values):
            self.number(f"{place}[{at}]", number)
        return values

    def number(self, place: str, value: object) -> None:
        """Require a number from 0."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FormatError(self.path, place, f"expected a number, not {_kind(value)}")
        if not 0 <= value < float("inf"):
            raise FormatError(self.path, place, f"expected a finite number from 0, not {value}")

    def require(self, place: str, value: object, kind: type[Any]) -> None:
        """Require a value of exactly that kind: true and false are no integers."""
        if type(value) is not kind:
            raise FormatError(self.path, place, f"expected {_KINDS[kind]}, not {_kind(value)}")

    def made(self, place: str, cls: Callable[..., _Made], entries: dict[str, Any]) -> _Made:
        """Return the object of these entries; what is wrong with them together is the file's."""
        try:
            return cls(**entries)
        except ValueError as error:
            raise FormatError(self.path, place, str(error)) from error


_KINDS = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _kind(value: object) -> str:
    return _KINDS[type(value)]
