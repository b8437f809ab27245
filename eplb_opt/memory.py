"""What replicas cost: bytes of a GPU's memory for weights, statistics and moving them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from eplb_opt.workload import ModelShape, model_shape

__all__ = ["WEIGHT_FORMATS", "MemoryPerGpu", "WeightFormat", "memory_per_gpu"]

_COUNT_BYTES = 4  # vLLM and SGLang count in int32


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How an expert's matrices are stored.

    Parameters
    ----------
    bits
        Per weight.
    block
        Rows and columns of the matrix that share a scale; 0 for all of them.
    scale_bytes
        Of one scale; 0 where there is none.
    """

    bits: int
    block: tuple[int, int] = (0, 0)
    scale_bytes: int = 0

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of one matrix with its scales; rows are outputs."""
        high, wide = self.block
        scales = ceil(rows / (high or rows)) * ceil(columns / (wide or columns))
        return ceil(rows * columns * self.bits / 8) + scales * self.scale_bytes


WEIGHT_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "fp32": WeightFormat(32),
        "bf16": WeightFormat(16),
        "fp16": WeightFormat(16),
        "fp8": WeightFormat(8, (128, 128), 4),  # DeepSeek-V3's blocks, float32 scales
        "int8": WeightFormat(8, (1, 0), 4),  # W8A8: a float32 scale for each output
        "mxfp4": WeightFormat(4, (1, 32), 1),  # OCP microscaling: an 8-bit exponent for 32
        "nvfp4": WeightFormat(4, (1, 16), 1),  # an 8-bit float for 16
    }
)
"""Weight formats by name."""


@dataclass(frozen=True, slots=True)
class MemoryPerGpu:
    """Bytes on each GPU, routed experts alone.

    Attributes
    ----------
    experts
        Weights of the replicas that a placement without redundant slots would have, rounded up to
        whole slots.
    redundant
        Weights of the other slots.
    window
        The load statistics.
    staging
        Where weights arrive while experts are rearranged.
    """

    experts: int
    redundant: int
    window: int
    staging: int

    @property
    def weights(self) -> int:
        """Weights in all slots."""
        return self.experts + self.redundant

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.window + self.staging


def memory_per_gpu(
    model: ModelShape | str,
    num_gpus: int,
    redundant: int = 0,
    *,
    weights: WeightFormat | str = "bf16",
    window_steps: int = 0,
    moves: bool = True,
) -> MemoryPerGpu:
    """Say what a deployment's replicas take of each GPU's memory.

    With E experts, R redundant slots, G GPUs, S = (E + R) / G slots on each, L MoE layers, W steps
    in the window, and B bytes of an expert (its three matrices of hidden x ffn weights, with their
    scales):

    - weights L S B, of which L ceil(E / G) B are there without redundancy;
    - window 4 W L (E + R): each rank keeps every replica's count of each step, as int32;
    - staging S B: one layer at a time is rearranged, and as much as its slots may arrive.

    Parameters
    ----------
    model
        A shape, or the name of one of `MODEL_SHAPES`.
    num_gpus, redundant
        G and R.
    weights
        A format, or the name of one of `WEIGHT_FORMATS`.
    window_steps
        W: vLLM's ``window_size``, SGLang's ``--expert-distribution-recorder-buffer-size``;
        vLLM-Ascend keeps sums only, 1. By default there are no statistics.
    moves
        Whether experts are rearranged while serving; a static placement needs no staging.

    Raises
    ------
    ValueError
        When a name is unknown, a number is negative, or (E + R) does not divide over G.

    References
    ----------
    Weights: vLLM's documentation, "Expert Parallel Deployment", gives this sum, and 2.4 GB for a
    redundant expert on each rank of DeepSeek-V3. Window: ``expert_load_window`` in vLLM's
    ``eplb_state.py``, ``_CircularBuffer`` in SGLang's ``expert_distribution.py``. Staging: a copy
    of one layer's local experts in all three (``rebalance_execute.py``; ``create_temp_buffers`` in
    SGLang's ``expert_location_updater.py``; ``init_buffer_tensor`` in vLLM-Ascend's
    ``vllm_adaptor.py``).

    Examples
    --------
    >>> memory = memory_per_gpu("deepseek-v3", 32, 32, weights="fp8", window_steps=1000)
    >>> round(memory.redundant / 2**30, 2), memory.window // 2**20, memory.staging // 2**20
    (2.38, 63, 378)
    """
    shape = model_shape(model) if isinstance(model, str) else model
    if isinstance(weights, str):
        if weights not in WEIGHT_FORMATS:
            known = ", ".join(WEIGHT_FORMATS)
            raise ValueError(f"no weight format is called {weights!r}; the known ones are: {known}")
        weights = WEIGHT_FORMATS[weights]
    if num_gpus < 1 or redundant < 0 or window_steps < 0:
        problem = f"{num_gpus=}, {redundant=}, {window_steps=}"
        raise ValueError(f"{problem}; expected at least 1, 0 and 0")
    slots = shape.experts + redundant
    if slots % num_gpus:
        problem = f"{shape.experts} experts and {redundant} redundant"
        raise ValueError(f"{problem} do not divide over {num_gpus} GPUs")
    per_gpu, least = slots // num_gpus, ceil(shape.experts / num_gpus)
    gate_or_up = weights.matrix_bytes(shape.ffn, shape.hidden)
    down = weights.matrix_bytes(shape.hidden, shape.ffn)
    expert = 2 * gate_or_up + down
    return MemoryPerGpu(
        experts=shape.layers * least * expert,
        redundant=shape.layers * (per_gpu - least) * expert,
        window=_COUNT_BYTES * window_steps * shape.layers * slots,
        staging=per_gpu * expert if moves else 0,
    )
