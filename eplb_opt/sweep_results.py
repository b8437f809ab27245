"""What a sweep finds: a row per deployment and router, the best ones, and those on the frontier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from math import inf, nan
from types import MappingProxyType
from typing import Any

from eplb_opt.batches import STAGES
from eplb_opt.gap import as_json, csv_of
from eplb_opt.heat import HeatStage
from eplb_opt.memory import MemoryPerGpu
from eplb_opt.replaying import StageTimes
from eplb_opt.workload import Stage

__all__ = ["COLUMNS", "Sweep", "SweepRow"]

_NESTED: Mapping[str, type[Any]] = MappingProxyType(
    {**dict.fromkeys(STAGES, StageTimes), "memory": MemoryPerGpu}
)


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One router on one deployment.

    Attributes
    ----------
    gpus, redundant
        The EP size, and slots beyond one per expert.
    placer
        The placement method; None where experts lie in order.
    stage, interval
        Which steps' load placements are made for, and the steps from one to the next; None where
        that does not matter, or where the first placement stays.
    method
        The router.
    decode, prefill
        The steps of each stage; None where there are none.
    tokens_per_second
        As in `eplb_opt.ReplayRow`.
    decisions, moves
        Times that the loop decided, and weights that GPUs received.
    memory
        Of a GPU, routed experts alone; None where the model is not known.
    """

    gpus: int
    redundant: int
    placer: str | None
    stage: HeatStage | None
    interval: int | None
    method: str
    decode: StageTimes | None
    prefill: StageTimes | None
    tokens_per_second: float
    decisions: int
    moves: int
    memory: MemoryPerGpu | None

    @property
    def cost(self) -> int:
        """What redundancy costs a GPU: bytes of its memory, or the deployment's redundant slots."""
        return self.redundant if self.memory is None else self.memory.total

    def mean(self, stage: Stage) -> float | None:
        """Return milliseconds of a stage's step; None where it has none."""
        times: StageTimes | None = getattr(self, stage)
        return None if times is None else times.mean

    def flat(self) -> dict[str, Any]:
        """Return the figures by name, as in `COLUMNS`; None for what is not known."""
        figures: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in _NESTED:
                figures[field.name] = value
                continue
            known = {} if value is None else asdict(value)
            for name in _NESTED[field.name].__dataclass_fields__:
                figures[f"{field.name}_{name}"] = known.get(name)
        # What was not asked for is NaN in a replay, and no number at all in a table.
        return {name: None if value != value else value for name, value in figures.items()}

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> SweepRow:
        """Return the row that has these figures."""
        given: dict[str, Any] = {}
        for field in fields(cls):
            name, nested = field.name, _NESTED.get(field.name)
            if nested is None:
                given[name] = _known(name, figures[name])
                continue
            columns = {n: f"{name}_{n}" for n in nested.__dataclass_fields__}
            there = any(figures[column] is not None for column in columns.values())
            known = {n: _known(column, figures[column]) for n, column in columns.items()}
            given[name] = nested(**known) if there else None
        return cls(**given)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was swept, and a row for every deployment and router.

    Attributes
    ----------
    traffic, objective
        What was served, and the name of what experts were priced by.
    experts
        Experts per layer.
    first_step, steps
        The first step that was served, and how many.
    cells
        Deployments that were asked for.
    rows
        By GPUs, redundant slots, placers, stages, intervals and routers, each in the order in which
        they were given; of the deployments that are done.
    """

    traffic: str
    objective: str
    experts: int
    first_step: int
    steps: int
    cells: int
    rows: tuple[SweepRow, ...]

    @property
    def gpus(self) -> tuple[int, ...]:
        """The EP sizes of the rows."""
        return tuple(dict.fromkeys(row.gpus for row in self.rows))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that any steps were of."""
        return tuple(s for s in STAGES if any(row.mean(s) is not None for row in self.rows))

    def frontier(self, gpus: int, stage: Stage = "decode") -> tuple[SweepRow, ...]:
        """Return the rows of an EP size that no other beats, by rising cost and falling time.

        Another beats a row if it costs no more (`SweepRow.cost`) and its mean step of the stage
        takes no longer, and one of the two is less; of equal rows the first stands for all.
        """
        timed = [
            (row.cost, time, row)
            for row in self.rows
            if row.gpus == gpus and (time := row.mean(stage)) is not None
        ]
        best, least = [], inf
        for _, time, row in sorted(timed, key=lambda item: item[:2]):
            if time < least:
                best.append(row)
                least = time
        return tuple(best)

    def best(self, gpus: int, stage: Stage = "decode") -> SweepRow | None:
        """Return the row of an EP size whose mean step of a stage is the shortest, if there is any.

        Of several, the one that costs the least.
        """
        return next(reversed(self.frontier(gpus, stage)), None)

    def to_json(self) -> str:
        """Return the sweep as a JSON object, its rows as `SweepRow.flat`."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return as_json(known | {"rows": [row.flat() for row in self.rows]})

    def to_csv(self) -> str:
        """Return the rows as CSV with a header line."""
        return csv_of(list(COLUMNS), [row.flat() for row in self.rows])


def _known(column: str, value: Any) -> Any:
    return nan if value is None and COLUMNS[column] == "float" else value


def _columns() -> Iterator[tuple[str, str]]:
    for field in fields(SweepRow):
        nested = _NESTED.get(field.name)
        if nested is None:
            kind = str(field.type).partition(" ")[0]
            yield field.name, "str" if kind == "HeatStage" else kind
        else:
            for name, of in nested.__dataclass_fields__.items():
                yield f"{field.name}_{name}", of.type


COLUMNS: Mapping[str, str] = MappingProxyType(dict(_columns()))
"""The columns of a sweep's table: ``"int"``, ``"float"`` or ``"str"`` by name."""
