"""Sweep deployments: redundancy x placer x EP size x collected stage x interval, with all routers.

Each deployment, a cell, is a `Scenario` that is replayed with all routers side by side. Cells are
worked on by many processes and stored as they are done, so that a sweep which ended early goes on
where it was.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_opt.batches import Batches, BatchFacts, Traffic
from eplb_opt.errors import FormatError, InvalidPlacementError, SweepError
from eplb_opt.fingerprint import fingerprint
from eplb_opt.heat import HeatStage
from eplb_opt.memory import WeightFormat, memory_per_gpu
from eplb_opt.placement import slots_for
from eplb_opt.placers import PlacementMethod
from eplb_opt.replaying import Stale
from eplb_opt.routers import RoutingMethod, resolve_for
from eplb_opt.scenario import Scenario
from eplb_opt.step_time import Migration, StepTime
from eplb_opt.sweep_folder import Contents, SweepFolder
from eplb_opt.sweep_results import Sweep, SweepRow
from eplb_opt.workers import Backend, Lost, Workers
from eplb_opt.workload import ModelShape, shape_for

__all__ = ["sweep"]


def sweep(
    traffic: Traffic,
    *,
    gpus: Sequence[int],
    redundant: Sequence[int] = (0,),
    placers: Sequence[str | PlacementMethod | None] = (None, "deepseek"),
    stages: Sequence[HeatStage] = ("all",),
    intervals: Sequence[int | None] = (None,),
    methods: Sequence[str | RoutingMethod | Stale] = ("uniform", "metro", "makespan"),
    time: StepTime,
    folder: str | os.PathLike[str],
    learn: float = 0.25,
    migration: Migration | None = None,
    model: ModelShape | str | None = None,
    weights: WeightFormat | str = "bf16",
    steps: int | None = None,
    tokens: int = 256,
    top_k: int = 8,
    most_decode_tokens: int | None = None,
    slo: float | None = None,
    prefill_slo: float | None = None,
    backend: Backend = "loky",
    jobs: int | None = None,
    address: str | None = None,
    replace: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Sweep:
    """Replay every combination of deployments and routers, and store what is done.

    Parameters
    ----------
    traffic
        As for `eplb_opt.replay`. A path is opened by every process, so that it must be there on
        all machines; what is in memory is pickled once.
    gpus, redundant, placers, stages, intervals
        EP sizes, redundant slots, placement methods (None: experts in order), the stages whose load
        placements are made for, and steps from one placement to the next (None: the first stays);
        each with each. Without a placer the last two do not matter, and stand once.
    methods
        Routers, as for `eplb_opt.replay`; all are compared on the same placements.
    time
        What steps are priced by.
    folder
        Where results are stored, one Parquet file per deployment; it is made if need be. What is
        there already of a sweep of the same inputs is not computed again. Inputs are all parameters
        above and below but `backend`, `jobs`, `address` and `progress`, and this version of
        eplb-opt; of files their content counts. A sweep of the same inputs over other deployments
        may share the folder.
    learn
        Share of the steps that are collected first, and not served.
    migration, slo, prefill_slo
        As for `eplb_opt.replay`.
    model, weights
        Whose experts' memory is told, and how they are stored, as for `eplb_opt.memory_per_gpu`:
        with statistics of `interval` steps and staging where experts are rearranged.
    steps, tokens, top_k, most_decode_tokens
        As for `eplb_opt.replay`.
    backend, jobs, address
        Who works, see `eplb_opt.workers.Workers`: processes of this machine, as many as cores by
        default, or a Dask or Ray cluster.
    replace
        Remove the results of another sweep, instead of refusing its folder.
    progress
        Called with (done, total) deployments.

    Returns
    -------
    Sweep

    Raises
    ------
    InvalidPlacementError
        Slots that do not divide over the GPUs, before any work; it names which.
    FileExistsError
        When the folder is another sweep's.
    SweepError
        When deployments failed, or took their workers down: the others are stored. The same call
        computes just these.
    FormatError, InvalidTokensError, ValueError, TypeError
        Traffic, names or numbers that are none; methods that are no dataclasses.
    SolverUnavailableError
        When a package is missing: the extras are ``sweep``, ``dask`` and ``ray``.
    OSError
        When results cannot be written: those before are whole, and the same call goes on.

    Warns
    -----
    UserWarning
        When a result that is there cannot be read; it is computed anew, for its name is that of a
        result alone.

    Notes
    -----
    Every process replays one deployment at a time, on one thread. Times that the routers take here
    are left out of the results, so that the same inputs give the same table, on any backend.

    Examples
    --------
    >>> import tempfile
    >>> from eplb_opt import StepTime, Workload
    >>> traffic = Workload.preset("qwen3-30b", seed=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = sweep(
    ...         traffic,
    ...         gpus=[8],
    ...         redundant=[0, 64],
    ...         placers=["deepseek"],
    ...         methods=["uniform", "makespan"],
    ...         time=StepTime("qwen3-30b-fp8"),
    ...         folder=folder,
    ...         tokens=32,
    ...         steps=4,
    ...         jobs=1,
    ...     )
    >>> [(row.redundant, row.method) for row in found.frontier(8)]
    [(0, 'uniform'), (64, 'makespan')]
    """
    if not 0 <= learn < 1:
        raise ValueError(f"learn is {learn}; expected a share from 0, and below 1")
    if not methods:
        raise ValueError("no router to try: methods is empty")
    for method in methods:
        resolve_for(method.method if isinstance(method, Stale) else method, time.pricing)
    workers = Workers(backend, jobs, address)
    results = SweepFolder(folder)
    given: dict[str, Any] = {"tokens": tokens, "steps": steps, "top_k": top_k}
    batches = Batches.of(traffic, **given)
    experts = batches.load.shape[1]
    first_step = int(batches.steps * learn)
    settings = {"time": time, "migration": migration, "slo": slo, "prefill_slo": prefill_slo}
    task = _Task(
        Path(traffic).absolute() if isinstance(traffic, (str, os.PathLike)) else traffic,
        given,
        most_decode_tokens,
        tuple(methods),
        settings | {"first_step": first_step},
        None if model is None else shape_for(model, experts),
        weights,
    )
    scenarios = _grid(gpus, redundant, placers, stages, intervals, experts)
    inputs = fingerprint(version("eplb-opt"), task)
    cells = {c.key: c for c in (_Cell.of(inputs, scenario) for scenario in scenarios)}
    contents = Contents(
        inputs,
        batches.name,
        time.pricing.name,
        experts,
        first_step,
        batches.steps - first_step,
        tuple(cells),
    )
    results.begin(contents, replace=replace)
    found = {key: rows for key in cells if (rows := _stored(results, key)) is not None}
    failed: dict[str, str] = {}

    def tell() -> None:
        if progress is not None:
            progress(len(found) + len(failed), len(cells))

    tell()
    for done in _work(workers, task, [cell for key, cell in cells.items() if key not in found]):
        if isinstance(done, Lost):
            failed[done.item.key] = done.reason
        elif isinstance(done.answer, str):
            failed[done.key] = done.answer
        else:
            results.write(done.key, done.answer)
            found[done.key] = done.answer
        tell()
    if failed:
        reasons = {cells[key].name: failed[key] for key in cells if key in failed}
        raise SweepError(reasons, len(cells), results.path)
    return contents.sweep(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """What all cells have in common, and so what is hashed of them."""

    traffic: Traffic
    given: Mapping[str, Any]  # how batches are made of it
    most_decode_tokens: int | None
    methods: tuple[str | RoutingMethod | Stale, ...]
    settings: Mapping[str, Any]
    model: ModelShape | None
    weights: WeightFormat | str

    def facts(self) -> BatchFacts:
        """Open the traffic."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the caller has opened it too
            batches = Batches.of(self.traffic, **self.given)
        return BatchFacts(batches, self.given["top_k"], self.most_decode_tokens)

    def rows(self, scenario: Scenario, facts: BatchFacts) -> tuple[SweepRow, ...]:
        """Replay a deployment."""
        replay = scenario.replay(facts, self.methods, **self.settings)
        memory = None
        if self.model is not None:
            memory = memory_per_gpu(
                self.model,
                scenario.num_gpus,
                scenario.redundant,
                weights=self.weights,
                window_steps=scenario.interval or 0,
                moves=scenario.interval is not None,
            )
        placed = scenario.placer is not None
        return tuple(
            SweepRow(
                scenario.num_gpus,
                scenario.redundant,
                str(scenario.placer) if placed else None,
                scenario.stage if placed else None,
                scenario.interval,
                row.method,
                row.decode,
                row.prefill,
                row.tokens_per_second,
                len(replay.decisions),
                replay.moves,
                memory,
            )
            for row in replay.rows
        )


@dataclass(frozen=True, slots=True)
class _Cell:
    """A deployment: its key, and that of what it has in common with others."""

    key: str
    inputs: str
    scenario: Scenario

    @classmethod
    def of(cls, inputs: str, scenario: Scenario) -> _Cell:
        return cls(fingerprint(inputs, scenario), inputs, scenario)

    @property
    def name(self) -> str:
        """For messages."""
        s = self.scenario
        name = f"{s.num_gpus} GPUs, {s.redundant} redundant slots, {s.label}"
        return name if s.placer is None else f"{name}, placed for {s.stage}"


@dataclass(frozen=True, slots=True)
class _Done:
    """A cell's rows, or why there are none."""

    key: str
    answer: tuple[SweepRow, ...] | str


def _grid(
    gpus: Sequence[int],
    redundant: Sequence[int],
    placers: Sequence[str | PlacementMethod | None],
    stages: Sequence[HeatStage],
    intervals: Sequence[int | None],
    experts: int,
) -> list[Scenario]:
    """Return all deployments in order; refuse slots that cannot be."""
    scenarios = []
    for num_gpus, extra, placer in product(gpus, redundant, placers):
        try:
            slots_for(experts + extra, num_gpus)
        except InvalidPlacementError as error:
            problem = f"{num_gpus} GPUs, {extra} redundant slots: {error}"
            raise InvalidPlacementError(problem) from None
        if extra < 0:
            raise InvalidPlacementError(f"{extra} redundant slots; expected 0 or more")
        when = product(stages, intervals) if placer is not None else [("all", None)]
        scenarios += [Scenario(num_gpus, extra, placer, *each) for each in when]
    if not scenarios:
        raise ValueError("no deployment to try: a list is empty")
    return scenarios


def _stored(results: SweepFolder, key: str) -> tuple[SweepRow, ...] | None:
    """Return a cell's rows if they are there."""
    try:
        return results.read(key)
    except FormatError as error:
        warnings.warn(f"{error}; it is computed anew", UserWarning, stacklevel=3)
        return None


def _work(workers: Workers, task: _Task, cells: Sequence[_Cell]) -> Iterator[_Done | Lost[_Cell]]:
    """Yield the answers to cells as they come."""
    if not cells:
        return
    import cloudpickle

    # As an array, which joblib hands to each process, or machine, but once.
    packed = np.frombuffer(cloudpickle.dumps(task), np.uint8)
    try:
        yield from workers.answers(_replayed, packed, cells)
    finally:
        _opened.clear()  # where this process worked


_opened: dict[str, tuple[_Task, BatchFacts]] = {}  # by inputs: a process works on one sweep


def _replayed(packed: NDArray[np.uint8], cell: _Cell) -> _Done:
    """Replay a cell in some process."""
    try:
        there = _opened.get(cell.inputs)
        if there is None:
            task: _Task = pickle.loads(packed.data)
            there = task, task.facts()
            _opened.clear()
            _opened[cell.inputs] = there
        task, facts = there
        return _Done(cell.key, task.rows(cell.scenario, facts))
    except Exception as error:  # one cell's, whatever it is: the others go on
        return _Done(cell.key, f"{type(error).__name__}: {error}")
