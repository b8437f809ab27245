"""Placements of one load side by side: how balanced, how far from the bound, what moving costs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_opt.metrics import PlacementMetrics
from eplb_opt.placing import PlacementPlan
from eplb_opt.status import Proof, Status
from eplb_opt.transfer import TransferPlan

__all__ = ["ComparedPlan", "PlacementComparison"]


@dataclass(frozen=True, slots=True, eq=False)
class ComparedPlan:
    """One method's placement.

    Attributes
    ----------
    method
        As it was asked for.
    plan
        Its answer, with a layer axis.
    seconds
        Wall time of the call.
    transfer
        The moves from the previous placement, if they were asked for.
    saved
        Microseconds that a step takes less than on the previous placement, if known.
    """

    method: str
    plan: PlacementPlan
    seconds: float
    transfer: TransferPlan | None = None
    saved: float | None = None

    @property
    def break_even_steps(self) -> float | None:
        """Steps after which the move has repaid its time; None if not known."""
        if self.transfer is None or self.saved is None:
            return None
        return self.transfer.break_even_steps(self.saved)

    @property
    def proven(self) -> int:
        """Layers whose makespan is proven to be optimal."""
        return int((self.plan.status == Status.OPTIMAL).sum())


@dataclass(frozen=True, slots=True, eq=False)
class PlacementComparison:
    """Placements by several methods, and the one before.

    Attributes
    ----------
    loads
        Where the loads are from.
    layers
        Int ``[layers]``: the layers' numbers there, dense ones counted.
    load
        Float64 ``[layers, experts]``: what was placed for, the mean of its windows.
    started_from
        What `before` is of.
    before
        The previous placement on the load; without one, that which engines start with.
    rows
        One per method, at least one.
    """

    loads: str
    layers: NDArray[np.intp]
    load: NDArray[np.float64]
    started_from: str
    before: PlacementMetrics
    rows: tuple[ComparedPlan, ...]

    def to_json(self) -> str:
        """Return all but the slots as a JSON object; what is not known, or never comes, is null."""
        plan = self.rows[0].plan
        content = {
            "loads": self.loads,
            "layers": self.layers.tolist(),
            "gpus": plan.placement.num_gpus,
            "slots_per_gpu": plan.placement.slots_per_gpu,
            "experts": plan.placement.num_experts,
            "split": plan.measure.split.value,
            "over_windows": plan.measure.over_windows,
            "before": {"placement": self.started_from, **_measured(self.before)},
            "placements": [_placed(row) for row in self.rows],
        }
        return json.dumps(content, indent=2, allow_nan=False)


def _placed(row: ComparedPlan) -> dict[str, Any]:
    plan = row.plan
    return {
        "method": row.method,
        "seconds": row.seconds,
        "note": plan.note,
        "makespan": plan.makespan.tolist(),
        "bound": plan.bound.tolist(),
        "status": [Status(status).name.lower() for status in plan.status],
        "proved_by": [Proof(proof).name.lower() for proof in plan.proved_by],
        **_measured(plan.metrics),
        "moves": None if plan.moves is None else plan.moves.tolist(),
        "transfer": None if row.transfer is None else _moved(row.transfer, row),
    }


def _measured(metrics: PlacementMetrics) -> dict[str, Any]:
    return {
        "par": metrics.par.tolist(),
        "balancedness_sglang": metrics.balancedness_sglang,
        "balancedness_vllm": metrics.balancedness_vllm,
        "duplicates": metrics.duplicates.tolist(),
    }


def _moved(transfer: TransferPlan, row: ComparedPlan) -> dict[str, Any]:
    steps = row.break_even_steps
    return {
        "rounds": transfer.rounds.tolist(),
        "seconds": transfer.seconds,
        "bound": transfer.bound,
        "bytes_inside": transfer.bytes_inside,
        "bytes_between": transfer.bytes_between,
        "buffers": transfer.buffers,
        "expert_bytes": transfer.expert_bytes,
        "saved_us_per_step": row.saved,
        "break_even_steps": steps if steps is not None and np.isfinite(steps) else None,
    }
