"""What a forward step takes: its experts, and all that goes on around them.

A step is the sum over its MoE layers of experts, dispatch, combine and router, and the rest of the
model. The experts of a layer take as long as its slowest GPU. Moves of weights come on top where a
placement changes, see `Migration`. Times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from eplb_opt.arrays import as_integer
from eplb_opt.objective import Objective
from eplb_opt.transfer import Links
from eplb_opt.workload import Stage

__all__ = ["Communication", "Exchange", "Line", "Migration", "StepTime"]

Exchange: TypeAlias = Literal["all-to-all", "all-gather"]

_MICROSECONDS = 1e6


def _require_finite(owner: object, *names: str) -> None:
    for name in names:
        if not 0 <= (value := getattr(owner, name)) < np.inf:
            raise ValueError(f"{name} is {value}; expected a number from 0")


def _require_known(exchange: str) -> None:
    if exchange not in get_args(Exchange):
        known = ", ".join(get_args(Exchange))
        raise ValueError(f"no exchange is called {exchange!r}; the known ones are: {known}")


@dataclass(frozen=True, slots=True)
class Line:
    """A time that grows with a GPU's tokens: ``offset + per_token * tokens``.

    Raises
    ------
    ValueError
        A coefficient that is not a number from 0.
    """

    offset: float = 0.0
    per_token: float = 0.0

    def __post_init__(self) -> None:
        _require_finite(self, "offset", "per_token")

    def time(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the time with so many tokens, in their shape."""
        return np.asarray(self.offset + self.per_token * tokens)


@dataclass(frozen=True, slots=True)
class Communication:
    """Dispatch of tokens to their experts' GPUs, and combine of what these answer.

    Parameters
    ----------
    hidden
        Values of a token.
    links
        What a GPU's links carry; those inside a node and those between nodes work side by side.
    exchange
        ``"all-to-all"``: a token goes to each of its experts' replicas, once for each.
        ``"all-gather"``, METRO's: every GPU receives all tokens, before the top-k choice; combine
        is a reduce-scatter of as much.
    latency
        Of dispatch and of combine each, whatever they carry.
    dispatch_bytes, combine_bytes
        Of one value; scales of blocks are left out.

    Raises
    ------
    ValueError
        A number that is not finite, or too small; an unknown exchange.

    Notes
    -----
    *All-to-all.* A direction takes as long as its busiest GPU: the larger of the bytes inside its
    node over `Links.inside` and the bytes to other nodes over `Links.between`. Where it is not
    known whose the tokens are, every GPU holds an equal part of each expert's. A GPU that receives
    N of them then gets ``N (n - 1) / G`` inside its node of n GPUs and ``N (G - n) / G`` from
    others.

    *All-gather.* Of T tokens, the n GPUs of a node bring in the ``T (G - n) / G`` of other nodes
    together, and pass on inside what each of them lacks.

    References
    ----------
    METRO (arXiv 2512.09277) gathers 2 MB per GPU in about 3 µs at 600 GB/s. Tokens of several
    experts on one GPU are sent once by DeepEP's normal kernels, and once for each expert by its
    low-latency kernels, as here.

    Examples
    --------
    Two GPUs, of which one serves 300 of 400 tokens, half of them its own:

    >>> links = Links(inside=100e9, between=100e9)
    >>> moving = Communication(hidden=1000, links=links)
    >>> moving.time(np.array([300, 100]), np.array(50.0)).round(2)
    np.float64(6.0)
    """

    hidden: int
    links: Links = field(default_factory=Links)
    exchange: Exchange = "all-to-all"
    latency: float = 0.0
    dispatch_bytes: float = 2.0
    combine_bytes: float = 2.0

    def __post_init__(self) -> None:
        _require_finite(self, "latency", "dispatch_bytes", "combine_bytes")
        as_integer(self.hidden, "hidden")
        _require_known(self.exchange)

    def time(
        self,
        gpu_tokens: NDArray[np.int64],
        batch_tokens: NDArray[np.float64],
        flows: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float64]:
        """Return the time of dispatch and combine together.

        Parameters
        ----------
        gpu_tokens : [..., gpus]
            Tokens that each GPU's replicas take; a token counts once for each of its experts.
        batch_tokens : [...]
            Tokens of the batch, each counted once.
        flows : [..., sources, gpus], optional
            Tokens by the GPU that they come from, such as `eplb_opt.transport` finds.

        Returns
        -------
        float64 array, [...]
            0 where there are no tokens.
        """
        gpus = gpu_tokens.shape[-1]
        if self.exchange == "all-gather":
            seconds = batch_tokens * self._gathering(gpus)
        elif flows is None:
            seconds = self._evenly(gpu_tokens)
        else:
            seconds = self._flowing(flows)
        values = self.hidden * (self.dispatch_bytes + self.combine_bytes)
        moving = _MICROSECONDS * values * seconds + 2 * self.latency
        return np.where(gpu_tokens.any(axis=-1), moving, 0.0)

    def _evenly(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds for a byte of each token, of which every GPU holds an equal part."""
        gpus = tokens.shape[-1]
        same = self._same_node(gpus)
        own = same.sum(axis=1)
        of_node = tokens @ same.astype(np.float64)
        total = tokens.sum(axis=-1, keepdims=True)
        received = np.maximum(
            tokens * (own - 1) / self.links.inside, tokens * (gpus - own) / self.links.between
        )
        sent = np.maximum(
            (of_node - tokens) / self.links.inside, (total - of_node) / self.links.between
        )
        return np.asarray(np.maximum(received, sent).max(axis=-1) / gpus)

    def _gathering(self, gpus: int) -> float:
        """Seconds for a byte of each token of a batch that every GPU receives."""
        own = self._same_node(gpus).sum(axis=1)
        fetched = (gpus - own) / gpus / own
        passed = (gpus - 1) / gpus - fetched
        return float(np.maximum(passed / self.links.inside, fetched / self.links.between).max())

    def _flowing(self, flows: NDArray[np.int64]) -> NDArray[np.float64]:
        same = self._same_node(flows.shape[-1])
        inside = np.where(same & ~np.eye(len(same), dtype=np.bool_), flows, 0)
        between = np.where(same, 0, flows)
        busiest = [
            np.maximum(
                inside.sum(axis=axis) / self.links.inside,
                between.sum(axis=axis) / self.links.between,
            ).max(axis=-1)
            for axis in (-1, -2)
        ]
        return np.asarray(np.maximum(*busiest))

    def _same_node(self, gpus: int) -> NDArray[np.bool_]:
        node = np.arange(gpus) // self.links.gpus_per_node
        return np.asarray(node[:, None] == node)


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step is priced by.

    Parameters
    ----------
    objective
        A GPU's time on a layer's experts in microseconds, or the name of one.
    communication
        Dispatch and combine; None: they take no time.
    decode, prefill
        All else of a step (attention, dense layers, sampling), by the tokens of a GPU.
    routers
        Microseconds that a router itself takes per layer, by the label of its method; 0 for others.
    exchanges
        The exchange of some methods, by label, where it is not that of `communication`: METRO
        gathers all tokens before the top-k choice.

    Raises
    ------
    ValueError
        An objective that counts instead of taking time; a router's time that is not from 0.
    """

    objective: Objective | str
    communication: Communication | None = None
    decode: Line = Line()
    prefill: Line = Line()
    routers: Mapping[str, float] = field(default_factory=dict, hash=False)
    exchanges: Mapping[str, Exchange] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        objective = Objective.of(self.objective)
        if objective.counts_activations or objective.counts_tokens:
            problem = f"objective {objective.name} counts, and a step takes microseconds"
            raise ValueError(f"{problem}; eplb-opt presets lists measured ones")
        object.__setattr__(self, "objective", objective)
        object.__setattr__(self, "routers", dict(self.routers))
        object.__setattr__(self, "exchanges", dict(self.exchanges))
        for exchange in self.exchanges.values():
            _require_known(exchange)
        for label, time in self.routers.items():
            if not 0 <= time < np.inf:
                raise ValueError(f"router {label} takes {time} µs; expected a number from 0")

    @property
    def pricing(self) -> Objective:
        """The objective itself."""
        return Objective.of(self.objective)

    def communication_of(self, label: str) -> Communication | None:
        """Return dispatch and combine under a method."""
        if self.communication is None or label not in self.exchanges:
            return self.communication
        return replace(self.communication, exchange=self.exchanges[label])

    def rest(self, stage: Stage, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what all else takes, [...], by the tokens of a GPU, [...]."""
        return (self.decode if stage == "decode" else self.prefill).time(tokens)

    def rests(self, stages: NDArray[np.int8], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the same for steps of both stages, 0 for decode and 1 for prefill, [steps]."""
        return np.where(stages, self.rest("prefill", tokens), self.rest("decode", tokens))


@dataclass(frozen=True, slots=True)
class Migration:
    """How weights move when a placement changes.

    Parameters
    ----------
    expert_bytes
        Bytes of one expert's weights, `eplb_opt.expert_bytes`.
    links
        What carries them.
    overlapped
        Whether serving goes on meanwhile. Links carry tokens or weights, not both, so what does not
        fit beside a step's dispatch and combine holds it up. By default serving stops.
    share
        Of the links' bandwidth that the moves reach, above 0 and at most 1.

    Raises
    ------
    ValueError
        Numbers that are not these.

    Examples
    --------
    >>> Migration(44_040_192, overlapped=True).stall(1500.0, step=1200.0, communication=300.0)
    600.0
    """

    expert_bytes: int
    links: Links = field(default_factory=Links)
    overlapped: bool = False
    share: float = 1.0

    def __post_init__(self) -> None:
        as_integer(self.expert_bytes, "expert_bytes")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; expected above 0 up to 1")

    def stall(self, transfer: float, step: float, communication: float) -> float:
        """Return by how much a step takes longer.

        Parameters
        ----------
        transfer
            Microseconds of the moves at full bandwidth, `eplb_opt.TransferPlan.seconds`.
        step
            What the step takes without them.
        communication
            Dispatch and combine therein.
        """
        moving = transfer / self.share
        return max(0.0, moving - (step - communication)) if self.overlapped else moving
