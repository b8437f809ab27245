"""`deepseek`: DeepSeek's EPLB, the placement that every engine ships."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core


@dataclass(frozen=True, slots=True)
class DeepSeek:
    """EPLB's global form: replicate the hottest per copy, pack the heaviest first.

    Every redundant slot gives one more copy to the expert with the largest load per copy; the
    replicas then go, heaviest first, to the lightest GPU with a free slot (``eplb.py`` of
    github.com/deepseek-ai/EPLB). Ties are settled by fewer copies, then lower ids.

    Up to ties and rounding (the original calculates in float32, and leaves ties to PyTorch) the
    GPUs have the loads that the original gives them, and like there nothing keeps two copies of an
    expert off one GPU. Among equal loads other experts may get the copies, or another place. With
    one slot per GPU the original packs by id instead of by load: the same loads, on other GPUs.

    Notes
    -----
    O(redundant log experts + slots x GPUs) per layer, in the compiled core.

    Examples
    --------
    Both redundant slots go to expert 0, two of whose copies meet on GPU 0:

    >>> DeepSeek().place(np.array([[90.0, 10.0, 10.0, 10.0]]), num_gpus=2, slots_per_gpu=3).tolist()
    [[[0, 0, 3], [0, 1, 2]]]
    """

    summary: ClassVar[str] = "DeepSeek EPLB, global: replicate the hottest, pack the heaviest first"

    def place(
        self, load: NDArray[np.float64], num_gpus: int, slots_per_gpu: int
    ) -> NDArray[np.int32]:
        """Return int32 ``[layers, gpus, slots]`` for a checked load ``[layers, experts]``."""
        slots = np.empty((load.shape[0], num_gpus, slots_per_gpu), np.int32)
        _core.place_deepseek(load, slots)
        return slots
