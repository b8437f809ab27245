"""vLLM-Ascend's policies (``vllm_ascend.eplb.core.policy``), under their names.

Each has ``rebalance_experts(current_expert_table, expert_workload) -> (change, priority, table)``:
whether to change at all (1 or 0), the layers by falling gain, and the new table. Tables are
``[layers, devices, slots]``, the workload is of the same shape, the tokens of each slot; what comes
back is of the kind of the current table. Empty slots (-1) stay empty.

Unlike the originals, equal gains are in layer order, and a layer without load has no gain.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_opt.adapters.tensors import as_given, to_array
from eplb_opt.errors import InvalidTokensError
from eplb_opt.placement import EMPTY, Placement
from eplb_opt.placers import AscendRandom, FlashLb, PlacementProblem
from eplb_opt.placers.ascend_default import place_with_peaks as place_default
from eplb_opt.placers.flashlb import score
from eplb_opt.placers.swift import place_with_peaks as place_swift
from eplb_opt.placing import as_load

__all__ = ["DefaultEplb", "FlashLB", "RandomLoadBalance", "SwiftBalanceEplb"]

_WORTH_A_CHANGE = 0.95  # of the summed peak
_DEVIATIONS, _GROUPS, _WIDTH = FlashLb().z, FlashLb().depth, FlashLb().width


class _WithoutSettings:
    """A policy that takes the engine's settings and looks at none of them."""

    def __init__(self, config: object = None) -> None:
        del config


class RandomLoadBalance(_WithoutSettings):
    """Policy 0: the last slots of devices 1 and 3 change places; always says to change.

    Parameters
    ----------
    config
        Not looked at.
    """

    def rebalance_experts(
        self, current_expert_table: Any, expert_workload: Any
    ) -> tuple[int, list[int], Any]:
        """Return 1, the layers in turn as 0, -1, -2, ... (as the original) and the new table.

        Raises
        ------
        InvalidPlacementError
            Fewer than 4 devices, or a table that is no placement.
        """
        problem = _problem(current_expert_table, expert_workload)
        slots = AscendRandom().place(problem).slots
        return 1, [-layer for layer in range(len(slots))], _table(slots, current_expert_table)


class DefaultEplb(_WithoutSettings):
    """Policy 1, the default; see `eplb_opt.placers.AscendDefault`.

    Parameters
    ----------
    config
        Not looked at.

    Examples
    --------
    >>> table = np.array([[[0, 1], [2, 3], [0, 1]]])
    >>> workload = np.array([[[10, 0], [60, 20], [10, 0]]])
    >>> change, priority, new = DefaultEplb().rebalance_experts(table, workload)
    >>> change, priority.tolist(), new.tolist()
    (1, [0], [[[0, 2], [2, 1], [3, 2]]])
    """

    def rebalance_experts(
        self, current_expert_table: Any, expert_workload: Any
    ) -> tuple[int, NDArray[np.int64], Any]:
        """Return whether the summed peak falls below 0.95 of what it is, layers and new table.

        Raises
        ------
        EplbError
            A table that is no placement, or a workload that does not fit it.
        """
        before = _peaks(expert_workload)
        slots, after = place_default(_problem(current_expert_table, expert_workload))
        return (*_gain(before, after), _table(slots, current_expert_table))


class SwiftBalanceEplb(_WithoutSettings):
    """Policy 2, the one that is recommended; see `eplb_opt.placers.Swift`.

    Parameters
    ----------
    config
        Not looked at.
    """

    def rebalance_experts(
        self, current_expert_table: Any, expert_workload: Any
    ) -> tuple[int, NDArray[np.int64], Any]:
        """Return whether the summed peak falls below 0.95 of what it is, layers and new table.

        The summed peak counts what was found for a layer also where it keeps its old placement, as
        in the original.

        Raises
        ------
        EplbError
            A table that is no placement, or a workload that does not fit it.
        """
        before = _peaks(expert_workload)
        slots, after = place_swift(_problem(current_expert_table, expert_workload))
        after = np.where(np.isnan(after), before, after)
        return (*_gain(before, after), _table(slots, current_expert_table))


class FlashLB:
    """Policy 3; see `eplb_opt.placers.FlashLb`. Remembers the workloads that it was given.

    Parameters
    ----------
    config
        May have ``max_stage_window`` (samples to remember, default 1,000), ``threshold_ratio``
        (0.95) and ``threshold_value`` (0.9): a layer is placed anew at first, and when its mean
        balance falls below the ratio of what it was placed for, or below the value;
        ``layers_upper_bound`` (-1: any) layers to change at a time; ``z_score``, ``depth`` and
        ``width`` as `z`, `depth` and `width` of the placer.
    """

    def __init__(self, config: object = None) -> None:
        self._window: int = getattr(config, "max_stage_window", 1000)
        self._ratio: float = getattr(config, "threshold_ratio", 0.95)
        self._value: float = getattr(config, "threshold_value", 0.9)
        self._most_layers: int = getattr(config, "layers_upper_bound", -1)
        self._placer = FlashLb(
            z=getattr(config, "z_score", _DEVIATIONS),
            depth=getattr(config, "depth", _GROUPS),
            width=getattr(config, "width", _WIDTH),
        )
        self._samples: NDArray[np.float64] | None = None
        self._balance: NDArray[np.float64] | None = None  # that each layer was placed for, or 0

    def rebalance_experts(
        self, current_expert_table: Any, expert_workload: Any
    ) -> tuple[bool, NDArray[np.int64], Any]:
        """Return whether any layer gets better, which, and the new table of all layers.

        Parameters
        ----------
        current_expert_table
            ``[layers, devices, slots]``.
        expert_workload
            The same shape, or ``[samples, layers, devices, slots]``.

        Raises
        ------
        EplbError
            A table that is no placement, or a workload that does not fit it.
        """
        current = Placement(to_array(current_expert_table))
        loads = _loads(current, expert_workload)
        samples = self._remember(loads)
        balance = self._balance
        if balance is None or len(balance) != current.num_layers:
            balance = np.zeros(current.num_layers)
        served = 1 / score(samples, current.slots)
        stale = self._stale(served, balance, len(samples))

        slots = np.array(current.slots)
        found = np.where(balance > 0, balance, 1.0)
        if stale.any():
            layers = np.flatnonzero(stale)
            windows = np.ascontiguousarray(samples[:, layers])
            problem = PlacementProblem(
                windows,
                windows.mean(axis=0),
                current.num_gpus,
                current.slots_per_gpu,
                previous=Placement(current.slots[layers], current.num_experts),
            )
            slots[layers], scores = self._placer.place_with_scores(problem)
            found[layers] = 1 / scores
        gain = np.where(stale, found - served, 0.0)
        priority = np.argsort(-gain, kind="stable")
        priority = priority[gain[priority] > 0]
        if self._most_layers > 0:
            priority = priority[: self._most_layers]
        balance = balance.copy()
        balance[priority] = found[priority]
        self._balance = balance
        return bool(len(priority)), priority, _table(slots, current_expert_table)

    def _remember(self, loads: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the samples so far, these included; loads are ``[samples, layers, experts]``."""
        if self._samples is not None and self._samples.shape[1:] == loads.shape[1:]:
            loads = np.concatenate([self._samples, loads])
        self._samples = loads[-self._window :]
        return self._samples

    def _stale(
        self, served: NDArray[np.float64], balance: NDArray[np.float64], samples: int
    ) -> NDArray[np.bool_]:
        # The original takes the mean over its whole window, and what it has not yet seen as 1.
        seen = samples / self._window
        now = 1 / (seen / served + (1 - seen))
        return np.asarray((balance == 0) | (now < balance * self._ratio) | (now < self._value))


def _problem(table: Any, workload: Any) -> PlacementProblem:
    current = Placement(to_array(table))
    windows = _loads(current, workload)
    if len(windows) != 1:
        raise InvalidTokensError("only FlashLB takes several samples of a workload")
    return PlacementProblem(
        windows, windows[0], current.num_gpus, current.slots_per_gpu, previous=current
    )


def _loads(current: Placement, workload: Any) -> NDArray[np.float64]:
    """Return float64 [samples, layers, experts]: what the slots of each expert took together."""
    tokens = to_array(workload)
    shape = current.slots.shape
    if len(shape) != 3 or tokens.shape[-3:] != shape or tokens.ndim not in (3, 4):
        raise InvalidTokensError(
            f"the workload must have the shape of the table, [layers, devices, slots], and the "
            f"table is of shape {shape}, the workload of shape {tokens.shape}"
        )
    samples = tokens.reshape(-1, *shape)
    filled = current.slots != EMPTY
    layer = np.broadcast_to(np.arange(shape[0])[:, None, None], shape)
    index = (layer * current.num_experts + current.slots)[filled]
    size = shape[0] * current.num_experts
    rows = [np.bincount(index, weights=sample[filled], minlength=size) for sample in samples]
    loads = np.array(rows).reshape(-1, current.num_experts)
    return as_load(loads).reshape(len(samples), shape[0], -1)


def _peaks(workload: Any) -> NDArray[np.float64]:
    """Return float64 [layers]: the tokens of the fullest device, as they were."""
    return np.asarray(to_array(workload).sum(axis=-1, dtype=np.float64).max(axis=-1))


def _gain(before: NDArray[np.float64], after: NDArray[np.float64]) -> tuple[int, NDArray[np.int64]]:
    loaded = before > 0
    ratio = np.where(loaded, after / np.where(loaded, before, 1.0), 1.0)
    change = int(after.sum() < _WORTH_A_CHANGE * before.sum())
    return change, np.argsort(ratio, kind="stable").astype(np.int64)


def _table(slots: NDArray[np.int32], given: Any) -> Any:
    return as_given(slots.astype(np.int64), given)
