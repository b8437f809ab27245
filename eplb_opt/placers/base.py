"""What a placement method is."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["PlacementMethod"]


class PlacementMethod(Protocol):
    """A placement method: an immutable object that holds its options.

    Examples
    --------
    One's own, which gives the experts out in turn:

    >>> class InTurn:
    ...     summary = "experts in turn"
    ...
    ...     def place(self, load, num_gpus, slots_per_gpu):
    ...         turn = np.arange(num_gpus * slots_per_gpu, dtype=np.int32) % load.shape[1]
    ...         return np.tile(turn, (len(load), 1)).reshape(len(load), num_gpus, slots_per_gpu)
    >>> from eplb_opt.placing import solve_placement
    >>> plan = solve_placement([3, 2, 1], num_gpus=2, slots_per_gpu=2, method=InTurn())
    >>> plan.placement.slots.tolist(), float(plan.makespan)
    ([[0, 1], [2, 0]], 3.5)
    """

    summary: ClassVar[str]

    def place(
        self, load: NDArray[np.float64], num_gpus: int, slots_per_gpu: int
    ) -> NDArray[np.int32]:
        """Return int32 ``[layers, gpus, slots]`` for a checked load ``[layers, experts]``."""
        ...
