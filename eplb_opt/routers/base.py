"""What a routing method is, and what it may be given besides the tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NoReturn, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb_opt.arrays import as_array
from eplb_opt.demand import (
    COUNTS_ALLOWED,
    as_topk_ids,
    count_tokens,
    out_of_range,
    reject_tokens,
)
from eplb_opt.errors import InvalidTokensError
from eplb_opt.objective import Objective
from eplb_opt.placement import Placement
from eplb_opt.pricing import slowest_gpu
from eplb_opt.status import Proof, Status
from eplb_opt.stopping import TimeLimit

if TYPE_CHECKING:
    from eplb_opt.routing import Routing

__all__ = ["Context", "RoutingMethod", "Traits"]


@dataclass(frozen=True, slots=True)
class Context:
    """What some methods need besides the tokens.

    Attributes
    ----------
    source_tokens
        Int64 ``[batches, layers, sources, experts]``, or None.
    topk_ids
        Int32 ``[batches, layers, sources, rows, k]``, or None.
    stop
        Time limit, or None.
    """

    source_tokens: NDArray[np.int64] | None = None
    topk_ids: NDArray[np.int32] | None = None
    stop: TimeLimit | None = None

    @classmethod
    def of(
        cls,
        placement: Placement,
        tokens: NDArray[np.int64],
        source_tokens: ArrayLike | None,
        topk_ids: ArrayLike | None,
        stop: TimeLimit | None,
    ) -> Context:
        """Check what the caller gave against the tokens and bring it to one form.

        Raises
        ------
        InvalidTokensError
            Wrong shape, or counts that differ from the tokens.
        """
        if stop is not None and not isinstance(stop, TimeLimit):
            raise TypeError(f"stop must be a TimeLimit, not {stop!r}")
        layers, experts = placement.num_layers, placement.num_experts
        lead = tokens.shape[:-1]
        batches = tokens.size // (layers * experts)
        by_problem = tokens.reshape(batches, layers, experts)
        ids = by_source = None
        if topk_ids is not None:
            ids = as_topk_ids(topk_ids, experts)
            if ids.shape[: len(lead)] != lead or ids.ndim - len(lead) not in (2, 3):
                raise InvalidTokensError(
                    f"topk_ids must be {list(lead)} + [rows, k] or [sources, rows, k], "
                    f"not of shape {ids.shape}"
                )
            sources = ids.shape[len(lead)] if ids.ndim - len(lead) == 3 else 1
            ids = ids.reshape(batches, layers, sources, *ids.shape[-2:])
            by_source = count_tokens(ids, experts)
            _require_sum(by_source, by_problem, "topk_ids")
        if source_tokens is not None:
            given = as_array(source_tokens, "source_tokens", InvalidTokensError)
            wanted = (*lead, *given.shape[-2:-1], experts)
            if given.dtype.kind not in "iu" or given.ndim < 2 or given.shape != wanted:
                raise InvalidTokensError(
                    f"source_tokens must be int {list(lead)} + [sources, {experts}], "
                    f"not {given.dtype} of shape {given.shape}"
                )
            wrong = out_of_range(given)
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                raise InvalidTokensError(
                    f"source_tokens{list(at)} is {given[at]}; {COUNTS_ALLOWED}"
                )
            counted = given.reshape(batches, layers, *given.shape[-2:]).astype(np.int64)
            _require_sum(counted, by_problem, "source_tokens")
            if by_source is not None and not np.array_equal(counted, by_source):
                raise InvalidTokensError("source_tokens and topk_ids differ: give one of them")
            by_source = counted
        return cls(by_source, ids, stop)


NO_CONTEXT = Context()

Solve = Callable[[NDArray[np.int64], "Routing", Context], None]
"""Route tokens into the answer, whose arrays are overwritten.

The tokens are contiguous int64 of the answer's shape, none negative, none of an expert without
replica. (A compiled method is handed what the caller gave: the core checks as it reads.)
"""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a method can do.

    Attributes
    ----------
    summary
        One line.
    objectives
        Which objectives it solves, in words. A rule that ignores the objective solves any.
    solves
        Whether it solves an objective.
    exact
        Whether it proves its own answer.
    needs
        Inputs besides the tokens, ``"source_tokens"`` or ``"topk_ids"``.
    extra
        The extra that installs what it needs, or None.
    compiled
        Whether the core solves it, which checks tokens itself.
    """

    summary: str
    objectives: str = "any"
    solves: Callable[[Objective], bool] = lambda objective: True
    exact: bool = False
    needs: tuple[str, ...] = ()
    extra: str | None = None
    compiled: bool = False


SPLITTING = "any with split"
"""The objectives of a rule that splits experts over their replicas, whatever it is asked for."""


def allows_split(objective: Objective) -> bool:
    """Say whether an expert's tokens may be split: `Traits.solves` of a rule that does."""
    return objective.split


class RoutingMethod(Protocol):
    """A routing method: an immutable object that holds its options.

    To plug in one's own, give it `traits` and `bind`; `eplb_opt.testing.check_routing` checks what
    it answers.
    """

    traits: ClassVar[Traits]

    def bind(self, placement: Placement, objective: Objective, threads: int) -> Solve:
        """Prepare for a placement and return the function that routes on it."""
        ...


def refuse(placement: Placement, tokens: NDArray[np.int64], problem: int) -> NoReturn:
    """Raise what is wrong with the tokens, of which the core found `problem` to be the first."""
    reject_tokens(placement, tokens)
    raise AssertionError(f"the core refuses the tokens of problem {problem}, which are in order")


def finish(out: Routing, routed: NDArray[np.int64]) -> None:
    """Fill an answer from the tokens per slot that a rule chose; no bound, no certificate."""
    out.tokens[...] = routed.reshape(out.tokens.shape)
    out.activated[...] = (out.tokens > 0).sum(axis=-1)
    evaluate(out)
    out.bound.fill(np.nan)
    out.status.fill(Status.FEASIBLE)
    out.proved_by.fill(Proof.NONE)
    out.certificate.fill(False)


def evaluate(out: Routing) -> None:
    """Fill in the makespan of an answer's tokens under its objective."""
    out.makespan[...] = slowest_gpu(out.tokens, out.objective)


def _require_sum(by_source: NDArray[np.int64], tokens: NDArray[np.int64], name: str) -> None:
    differs = by_source.sum(axis=2) != tokens
    if differs.any():
        batch, layer, expert = (int(i) for i in np.argwhere(differs)[0])
        raise InvalidTokensError(
            f"{name} holds {by_source[batch, layer, :, expert].sum()} tokens of expert {expert} in "
            f"layer {layer} of batch {batch}, tokens says {tokens[batch, layer, expert]}"
        )
