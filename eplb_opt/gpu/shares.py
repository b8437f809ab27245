"""The torch operator ``eplb_opt::assign_shares``: a rank's part of experts split over slots.

Importing this module registers it. Needs torch, and on CUDA the extra ``gpu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from eplb_opt.errors import InvalidPlacementError, InvalidTokensError
from eplb_opt.gpu import launches
from eplb_opt.gpu.launches import Launch
from eplb_opt.gpu.operator import NOBODY, PADDING, check_ids, check_placed, on_stream
from eplb_opt.gpu.tables import MAX_EXPERTS
from eplb_opt.routing import Routing

# isort: split
import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["assign_shares", "shares_of"]

_MOST = 2**31 - 1


def assign_shares(topk_ids: Tensor, slots: Tensor, shares: Tensor, before: Tensor) -> Tensor:
    """Say which physical slot serves each of a rank's tokens, where experts are split over slots.

    All ranks' batches, rank after rank, are taken for one: of an expert's tokens in their order
    its lowest slot takes the first, the next slot the following ones, as `Routing.assign` has it.
    Ranks that know the shares, and how many tokens those before them have, need no exchange.

    Parameters
    ----------
    topk_ids
        Int32 or int64 ``[layers, ...]``, or of any shape for one layer; contiguous. -1 is padding.
    slots, shares
        Int32 ``[layers, experts, copies]``: every expert's slots, ascending, then -1, and the
        tokens that each takes of all ranks. `shares_of` has them of a routing.
    before
        Int32 ``[layers, experts]``: the tokens of the ranks before this one; a negative number
        counts as 0.

    Returns
    -------
    Tensor
        Int32 of the ids' shape: -1 for padding, -2 for an id that is no expert and for tokens
        beyond the shares.

    Raises
    ------
    InvalidTokensError, InvalidPlacementError
        A wrong dtype, shape, stride or device; more than 2,048 experts.
    SolverUnavailableError
        CUDA tensors without the extra ``gpu``.

    Examples
    --------
    Of five tokens of expert 0 slot 0 takes two; the rank before has one of them:

    >>> slots, shares = torch.tensor([[[0, 2]]]).int(), torch.tensor([[[2, 3]]]).int()
    >>> assign_shares(torch.tensor([0, -1, 0, 0]), slots, shares, torch.tensor([[1]]).int())
    tensor([ 0, -1,  2,  2], dtype=torch.int32)
    """
    assigned: Tensor = torch.ops.eplb_opt.assign_shares(topk_ids, slots, shares, before)
    return assigned


def shares_of(routing: Routing) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return slots and shares of a batch's routing: int32 ``[layers, experts, copies]`` each.

    Raises
    ------
    InvalidTokensError
        A routing of several batches, or a slot that takes 2**31 tokens or more.
    """
    table = routing.placement.logical_to_physical
    if routing.makespan.size != len(table):
        raise InvalidTokensError(
            f"shares are those of one batch; this routing has {routing.makespan.size // len(table)}"
        )
    layer = np.arange(len(table))[:, None, None]
    routed = routing.tokens.reshape(len(table), -1)[layer, np.maximum(table, 0)]
    large = np.argwhere((routed > _MOST) & (table >= 0))
    if large.size:
        at, expert, copy = large[0]
        raise InvalidTokensError(
            f"layer {at}, expert {expert}: slot {table[at, expert, copy]} takes "
            f"{routed[at, expert, copy]} tokens; {_MOST} at most fit int32"
        )
    return table, np.where(table >= 0, routed, 0).astype(np.int32)


def launch_of(
    topk_ids: Tensor, slots: Tensor, shares: Tensor, before: Tensor, physical: Tensor
) -> Launch:
    """Return the launch that writes the operator's answer to `physical`."""
    layers, experts, copies = slots.shape
    return launches.assign_shares(
        layers,
        experts,
        copies,
        topk_ids.data_ptr(),
        topk_ids.element_size(),
        topk_ids.numel() // layers,
        slots.data_ptr(),
        shares.data_ptr(),
        before.data_ptr(),
        physical.data_ptr(),
    )


def _on_cuda(topk_ids: Tensor, slots: Tensor, shares: Tensor, before: Tensor) -> Tensor:
    physical = _room(topk_ids, slots, shares, before)
    if physical.numel():
        on_stream(launch_of(topk_ids, slots, shares, before, physical), topk_ids.device)
    return physical


def _on_cpu(topk_ids: Tensor, slots: Tensor, shares: Tensor, before: Tensor) -> Tensor:
    _check(topk_ids, slots, shares, before)
    layers, experts, copies = slots.shape
    layer = np.arange(layers)[:, None]
    ids = topk_ids.numpy().reshape(layers, -1)
    expert = np.clip(ids, 0, experts - 1)
    known = ids == expert
    # Which of its expert's ids each one is: its place in a stable order less that of the first.
    key = np.where(known, ids, experts)
    order = np.argsort(key, axis=1, kind="stable")
    ordered = np.take_along_axis(key, order, axis=1)
    first = np.stack([np.searchsorted(row, row) for row in ordered]) if ids.size else ordered
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(ids.shape[1]) - first, axis=1)
    place = place + np.maximum(before.numpy(), 0)[layer, expert]

    end = np.cumsum(shares.numpy(), axis=-1, dtype=np.int64)[layer, expert]
    copy = (place[..., None] >= end).sum(axis=-1)
    slot = slots.numpy()[layer, expert, np.minimum(copy, copies - 1)]
    served = known & (copy < copies) & (slot >= 0)
    physical = np.where(served, slot, np.where(ids == PADDING, PADDING, NOBODY))
    return torch.from_numpy(physical.astype(np.int32).reshape(topk_ids.shape))


def _room(topk_ids: Tensor, slots: Tensor, shares: Tensor, before: Tensor) -> Tensor:
    """Return room for the answer, which is all that torch.compile asks for."""
    _check(topk_ids, slots, shares, before)
    return torch.empty_like(topk_ids, dtype=torch.int32)


def _check(topk_ids: Tensor, slots: Tensor, shares: Tensor, before: Tensor) -> None:
    """Check all but the values, which stay on their device."""
    if slots.ndim != 3 or 0 in slots.shape:
        raise InvalidTokensError(
            f"slots must be [layers, experts, copies], not of shape {tuple(slots.shape)}"
        )
    layers, experts, _ = slots.shape
    if experts > MAX_EXPERTS:
        raise InvalidPlacementError(
            f"{experts} experts per layer; the CUDA kernels support 1 to {MAX_EXPERTS}"
        )
    check_ids(topk_ids, layers)
    wanted = {"slots": slots.shape, "shares": slots.shape, "before": slots.shape[:2]}
    for (name, shape), tensor in zip(wanted.items(), (slots, shares, before), strict=True):
        if tensor.dtype != torch.int32 or tensor.shape != shape:
            raise InvalidTokensError(
                f"{name} must be int32 {list(shape)}, not {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}"
            )
        check_placed(name, tensor, topk_ids.device)


torch.library.define(
    "eplb_opt::assign_shares",
    "(Tensor topk_ids, Tensor slots, Tensor shares, Tensor before) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.impl("eplb_opt::assign_shares", "CPU", _on_cpu)
torch.library.impl("eplb_opt::assign_shares", "CUDA", _on_cuda)
torch.library.register_fake("eplb_opt::assign_shares", _room)
