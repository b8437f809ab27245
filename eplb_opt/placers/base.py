"""What a placement method is."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["PlacementMethod"]


class PlacementMethod(Protocol):
    """A placement method: an immutable object that holds its options."""

    summary: ClassVar[str]

    def place(
        self, load: NDArray[np.float64], num_gpus: int, slots_per_gpu: int
    ) -> NDArray[np.int32]:
        """Return int32 ``[layers, gpus, slots]`` for a checked load ``[layers, experts]``."""
        ...
