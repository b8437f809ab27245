"""A batch's demand: tokens per expert, checked and counted."""

from __future__ import annotations

import math
import operator
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt import _core
from eplb_opt.arrays import as_array
from eplb_opt.errors import InfeasibleError, InvalidTokensError
from eplb_opt.placement import Placement

__all__ = ["as_tokens", "as_topk_ids", "count_tokens", "out_of_range", "reject_tokens"]

COUNTS_ALLOWED = f"counts are 0 to {_core.MAX_TOKENS_PER_EXPERT}"


def as_tokens(placement: Placement, tokens: ArrayLike) -> NDArray[np.int64]:
    """Return `tokens` as contiguous int64 ``[..., layers, experts]`` that fits the placement.

    A placement without a layer axis takes ``[..., experts]``. Values are left to `reject_tokens`.

    Raises
    ------
    InvalidTokensError
        Wrong shape, or counts that are not integers.
    """
    array = as_array(tokens, "tokens", InvalidTokensError)
    if array.dtype.kind not in "iu":
        raise InvalidTokensError(f"tokens are counts and must be integers, not {array.dtype}")
    tail = placement.batch_shape
    if array.shape[-len(tail) :] != tail:
        names = "[..., layers, experts]" if placement.layered else "[..., experts]"
        raise InvalidTokensError(
            f"tokens must be {names} ending in {tail} for this placement, "
            f"not of shape {array.shape}"
        )
    if array.dtype == np.uint64 and (wrong := out_of_range(array)).any():
        _refuse_counts(placement, array, wrong)
    return np.require(array, np.int64, ["C", "ALIGNED"])


def reject_tokens(placement: Placement, tokens: NDArray[np.int64]) -> None:
    """Raise if a count is negative or too large, or an expert with tokens has no replica.

    Raises
    ------
    InvalidTokensError, InfeasibleError
        The message names the batch, layer and expert.
    """
    wrong = out_of_range(tokens)
    if wrong.any():
        _refuse_counts(placement, tokens, wrong)
    if placement.copies.all():
        return
    absent = placement.copies == 0
    stranded = (tokens != 0) & (absent if placement.layered else absent[0])
    if stranded.any():
        raise InfeasibleError(
            f"{_where(placement, stranded)} has tokens but no replica; place it, or drop its tokens"
        )


def out_of_range(counts: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Return where counts of any shape are none that an expert can have in a batch."""
    return np.asarray((counts < 0) | (counts > _core.MAX_TOKENS_PER_EXPERT))


def count_tokens(topk_ids: ArrayLike, num_experts: int) -> NDArray[np.int64]:
    """Count each expert's tokens in a batch of top-k ids.

    Parameters
    ----------
    topk_ids
        Int ``[..., rows, k]``: the experts of each token; -1 is padding and counts nowhere.
    num_experts
        Experts per layer.

    Returns
    -------
    NDArray[np.int64]
        ``[..., experts]``.

    Raises
    ------
    InvalidTokensError
        An id below -1 or not below `num_experts`.
    ValueError
        No experts.

    Examples
    --------
    >>> count_tokens([[0, 2], [2, -1]], num_experts=3)
    array([1, 0, 2])
    """
    if operator.index(num_experts) < 1:
        raise ValueError(f"num_experts must be at least 1, not {num_experts}")
    ids = as_topk_ids(topk_ids, num_experts)
    lead = ids.shape[:-2]
    problems, each = math.prod(lead), math.prod(ids.shape[-2:])
    shifted = ids.reshape(problems, each) + (1 + np.arange(problems)[:, None] * (num_experts + 1))
    counts = np.bincount(shifted.ravel(), minlength=problems * (num_experts + 1))
    return np.ascontiguousarray(
        counts.reshape(*lead, num_experts + 1)[..., 1:].astype(np.int64, copy=False)
    )


def as_topk_ids(topk_ids: ArrayLike, num_experts: int) -> NDArray[np.int32]:
    """Return top-k ids as contiguous int32 ``[..., rows, k]``, checked.

    Raises
    ------
    InvalidTokensError
        Not integers, fewer than two axes, an id below -1 or not below `num_experts`.
    """
    ids = as_array(topk_ids, "topk_ids", InvalidTokensError)
    if ids.dtype.kind not in "iu" or ids.ndim < 2:
        raise InvalidTokensError(
            f"topk_ids must be int [..., rows, k], not {ids.dtype} of shape {ids.shape}"
        )
    if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= num_experts):
        at = tuple(int(i) for i in np.argwhere((ids < -1) | (ids >= num_experts))[0])
        raise InvalidTokensError(
            f"topk_ids{list(at)} is {ids[at]}; ids are 0 to {num_experts - 1}, or -1 for padding"
        )
    return np.ascontiguousarray(ids, dtype=np.int32)


def _refuse_counts(
    placement: Placement, tokens: NDArray[Any], wrong: NDArray[np.bool_]
) -> NoReturn:
    value = tokens[tuple(np.argwhere(wrong)[0])]
    raise InvalidTokensError(f"{_where(placement, wrong)} has {value} tokens; {COUNTS_ALLOWED}")


def _where(placement: Placement, wrong: NDArray[np.bool_]) -> str:
    """Name the first true place of a [..., layers, experts] or [..., experts] mask."""
    *lead, expert = (int(i) for i in np.argwhere(wrong)[0])
    layer = [f"layer {lead.pop()}"] if placement.layered else []
    batch = [f"batch {tuple(lead)}"] if lead else []
    return ", ".join([*batch, *layer, f"expert {expert}"])
