"""The torch operator ``eplb_opt::route``: from top-k ids to physical ids, on the CPU and on CUDA.

Importing this module registers it. Needs torch, and on CUDA the extra ``gpu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.demand import count_tokens
from eplb_opt.errors import InvalidTokensError, SolverUnavailableError
from eplb_opt.gpu import launches
from eplb_opt.gpu.device import device
from eplb_opt.gpu.launches import Launch
from eplb_opt.gpu.tables import Shape, read_tables
from eplb_opt.placement import Placement
from eplb_opt.routing import Router

try:
    import torch
except ImportError:
    raise SolverUnavailableError(
        "the operator eplb_opt::route needs torch: pip install 'eplb-opt[gpu]'"
    ) from None

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NOBODY", "PADDING", "route"]

PADDING = -1
NOBODY = -2
"""The physical id of an id that is no expert or has no replica."""

_METHODS = ("metro", "optimal")


def route(
    topk_ids: Tensor,
    tables: Tensor,
    gpus: int,
    slots_per_gpu: int,
    experts: int,
    method: str,
    counts: Tensor | None = None,
) -> Tensor:
    """Say which physical slot serves each token's k-th expert.

    `eplb_opt.gpu.Router` fills in all but the ids. On CUDA it is one kernel on the current stream:
    nothing is waited for, nothing but the answer is allocated, and a graph can capture it (after
    one call outside, which loads the kernel).

    Parameters
    ----------
    topk_ids
        Int32 or int64 ``[layers, ...]``, or of any shape for one layer; contiguous. -1 is padding.
    tables
        Int32 ``[layers, row]`` of `eplb_opt.gpu.tables.make_tables`, made for `method`.
    gpus, slots_per_gpu, experts
        Of the placement.
    method
        ``"metro"`` or ``"optimal"``.
    counts
        Int32 ``[layers, experts]``: the tokens of all ranks, already reduced, so that every rank
        routes its own tokens alike. Without them the ids are counted.

    Returns
    -------
    Tensor
        Int32 of the ids' shape: -1 for padding; -2 for an id that is no expert, or whose expert
        has no replica or, by `counts`, no tokens; else ``gpu * slots_per_gpu + slot``.

    Raises
    ------
    InvalidTokensError, InvalidPlacementError, ValueError
        A wrong dtype, shape, stride or device, sizes above the kernels' limits, or an unknown
        method.
    SolverUnavailableError
        CUDA tensors without the extra ``gpu``.

    Notes
    -----
    One block of threads per layer: meant for the batches of decoding, up to some thousand tokens.
    """
    routed: Tensor = torch.ops.eplb_opt.route(
        topk_ids, tables, gpus, slots_per_gpu, experts, method, counts
    )
    return routed


def launch_of(
    topk_ids: Tensor,
    tables: Tensor,
    shape: Shape,
    method: str,
    counts: Tensor | None,
    physical: Tensor,
) -> Launch:
    """Return the launch that writes the operator's answer to `physical`."""
    return launches.route(
        method,
        shape,
        tables.data_ptr(),
        topk_ids.data_ptr(),
        topk_ids.element_size(),
        topk_ids.numel() // shape.layers,
        0 if counts is None else counts.data_ptr(),
        physical.data_ptr(),
    )


def on_stream(launch: Launch, of: torch.device) -> None:
    """Put a launch on a device's current stream.

    Raises
    ------
    SolverUnavailableError
        The device is no GPU; the extra ``gpu`` or the driver is missing.
    """
    if of.type != "cuda":
        raise SolverUnavailableError(f"the kernels need tensors on an NVIDIA GPU, not on {of}")
    with torch.cuda.device(of):
        stream = torch.cuda.current_stream()
        device(stream.device.index).launch(launch, stream.cuda_stream)


def _on_cuda(
    topk_ids: Tensor,
    tables: Tensor,
    gpus: int,
    slots_per_gpu: int,
    experts: int,
    method: str,
    counts: Tensor | None = None,
) -> Tensor:
    shape = _checked(topk_ids, tables, gpus, slots_per_gpu, experts, method, counts)
    if tables.data_ptr() % 16:
        raise InvalidTokensError("tables must begin at a multiple of 16 bytes: clone them")
    physical = torch.empty_like(topk_ids, dtype=torch.int32)
    if physical.numel():
        launch = launch_of(topk_ids, tables, shape, method, counts, physical)
        on_stream(launch, topk_ids.device)
    return physical


def _on_cpu(
    topk_ids: Tensor,
    tables: Tensor,
    gpus: int,
    slots_per_gpu: int,
    experts: int,
    method: str,
    counts: Tensor | None = None,
) -> Tensor:
    shape = _checked(topk_ids, tables, gpus, slots_per_gpu, experts, method, counts)
    placement, order = read_tables(tables.numpy(), shape)
    layer = np.arange(shape.layers)[:, None]
    ids = topk_ids.numpy().reshape(shape.layers, -1)
    expert = np.clip(ids, 0, experts - 1)
    served = (ids == expert) & (placement.copies[layer, expert] > 0)
    if counts is None:
        tokens = count_tokens(np.where(served, ids, PADDING)[..., None], experts)
    else:
        tokens = np.where(placement.copies > 0, np.maximum(counts.numpy(), 0), 0).astype(np.int64)
    home = _homes(placement, tokens, order if method == "metro" else None)
    physical = np.where(served, home[layer, expert], np.where(ids == PADDING, PADDING, NOBODY))
    return torch.from_numpy(physical.astype(np.int32).reshape(topk_ids.shape))


def _homes(
    placement: Placement, tokens: NDArray[np.int64], order: NDArray[np.int32] | None
) -> NDArray[np.int64]:
    """Return int [layers, experts]: the slot that takes an expert's tokens, or `NOBODY`."""
    out = Router(placement).allocate(tokens.shape)
    if order is None:
        _core.route_matching(placement.core, tokens, out.core, 1, False)
    else:
        _core.route_metro(placement.core, tokens, out.core, 1, order)
    home = np.full(tokens.shape, NOBODY)
    layer, slot = np.nonzero(out.tokens.reshape(len(tokens), -1))
    home[layer, placement.expert_of[layer, slot]] = slot
    return home


def _fake(
    topk_ids: Tensor,
    tables: Tensor,
    gpus: int,
    slots_per_gpu: int,
    experts: int,
    method: str,
    counts: Tensor | None = None,
) -> Tensor:
    _checked(topk_ids, tables, gpus, slots_per_gpu, experts, method, counts)
    return torch.empty_like(topk_ids, dtype=torch.int32)


def _checked(
    topk_ids: Tensor,
    tables: Tensor,
    gpus: int,
    slots_per_gpu: int,
    experts: int,
    method: str,
    counts: Tensor | None,
) -> Shape:
    """Check all but the values, which stay on their device."""
    if method not in _METHODS:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(_METHODS)}")
    shape = Shape(tables.shape[0] if tables.ndim else 0, gpus, slots_per_gpu, experts)
    layers = shape.layers
    if tables.dtype != torch.int32 or tuple(tables.shape) != (layers, shape.row):
        raise InvalidTokensError(
            f"tables must be int32 [layers, {shape.row}] for {gpus} GPUs, {slots_per_gpu} slots "
            f"per GPU and {experts} experts, not {tables.dtype} of shape {tuple(tables.shape)}"
        )
    if counts is not None and (
        counts.dtype != torch.int32 or tuple(counts.shape) != (layers, experts)
    ):
        raise InvalidTokensError(
            f"counts must be int32 [{layers}, {experts}], not {counts.dtype} of shape "
            f"{tuple(counts.shape)}"
        )
    check_ids(topk_ids, layers)
    check_placed("tables", tables, topk_ids.device)
    if counts is not None:
        check_placed("counts", counts, topk_ids.device)
    return shape


def check_ids(topk_ids: Tensor, layers: int) -> None:
    """Require contiguous int32 or int64 ids, ``[layers, ...]`` if there are several layers.

    Raises
    ------
    InvalidTokensError
        They are not.
    """
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise InvalidTokensError(f"topk_ids must be int32 or int64, not {topk_ids.dtype}")
    if layers != 1 and (topk_ids.ndim == 0 or topk_ids.shape[0] != layers):
        raise InvalidTokensError(
            f"topk_ids must be [{layers}, ...] for {layers} layers, "
            f"not of shape {tuple(topk_ids.shape)}"
        )
    check_placed("topk_ids", topk_ids, topk_ids.device)


def check_placed(name: str, tensor: Tensor, beside: torch.device) -> None:
    """Require a contiguous tensor on a device.

    Raises
    ------
    InvalidTokensError
        It is not.
    """
    if not tensor.is_contiguous():
        raise InvalidTokensError(f"{name} must be contiguous, not of strides {tensor.stride()}")
    if tensor.device != beside:
        raise InvalidTokensError(f"{name} is on {tensor.device}, topk_ids on {beside}")


torch.library.define(
    "eplb_opt::route",
    "(Tensor topk_ids, Tensor tables, int gpus, int slots_per_gpu, int experts, str method, "
    "Tensor? counts=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.impl("eplb_opt::route", "CPU", _on_cpu)
torch.library.impl("eplb_opt::route", "CUDA", _on_cuda)
torch.library.register_fake("eplb_opt::route", _fake)
