"""Many problems in one launch: recorded traffic replayed on the GPU.

Needs torch, and on CUDA the extra ``gpu``.
"""

from __future__ import annotations

from eplb_opt.gpu.operator import on_stream  # first: it says what to install if torch is missing

# isort: split
import torch

from eplb_opt.errors import InvalidTokensError
from eplb_opt.gpu import launches
from eplb_opt.gpu.launches import Launch
from eplb_opt.gpu.tables import Shape, kernel_method, make_tables
from eplb_opt.placement import Placement
from eplb_opt.routers import Metro, RoutingMethod

__all__ = ["Batch"]


class Batch:
    """A placement, a method and room for the answers to so many problems.

    Problem i is on layer ``i % layers``, so that tokens ``[batches, layers, experts]`` are
    ``batches * layers`` problems. `solve` allocates nothing and waits for nothing.

    Parameters
    ----------
    placement
        Where the replicas are.
    problems
        How many are solved at a time, a multiple of the layers.
    method
        ``"optimal"``, or ``"metro"`` with its options.
    locked
        Metro as published, a thread per expert with locks: answers differ from run to run.
    device
        A CUDA device.

    Attributes
    ----------
    home
        Int32 ``[problems, experts]``: the slot that takes all of an expert's tokens, -1 for an
        expert without tokens.
    activated
        Int32 ``[problems, gpus]``.
    makespan
        Int32 ``[problems]``: of ``"optimal"`` the proven optimum; -1 for tokens out of range or of
        an expert without a replica, and then nobody has a slot.
    certificate
        Bool ``[problems, gpus]`` of ``"optimal"``: the GPU set that proves the makespan, see
        `eplb_opt.bounds.certified_bound`.

    Raises
    ------
    InvalidPlacementError
        More GPUs, experts or slots than the kernels have room for.
    ValueError
        A method without a kernel, locks for another than metro, a number of problems that is not
        a multiple of the layers.
    """

    def __init__(
        self,
        placement: Placement,
        problems: int,
        *,
        method: str | RoutingMethod = "optimal",
        locked: bool = False,
        device: torch.device | str = "cuda",
    ) -> None:
        shape = self._shape = Shape.of(placement)
        if problems < 1 or problems % shape.layers:
            raise ValueError(
                f"problems must be a multiple of the {shape.layers} layers, not {problems}"
            )
        resolved = kernel_method(method)
        if locked and not isinstance(resolved, Metro):
            raise ValueError(f"only metro has locks, not {method!r}")
        self._locked, self._proves = locked, not isinstance(resolved, Metro)
        self._tables = torch.from_numpy(make_tables(placement, resolved)).to(device)

        def room(each: int) -> torch.Tensor:
            return torch.empty(problems, each, dtype=torch.int32, device=device)

        self.home, self.activated = room(shape.experts), room(shape.gpus)
        self.makespan = room(1)[:, 0]
        self._certificate = room(shape.words)

    @property
    def certificate(self) -> torch.Tensor:
        """The certificates, unpacked."""
        if not self._proves:
            raise AttributeError("metro proves nothing")
        gpu = torch.arange(self._shape.gpus, device=self._certificate.device)
        return (self._certificate[:, gpu // 32] >> gpu % 32 & 1).bool()

    def launch(self, tokens: torch.Tensor) -> Launch:
        """Return the launch that `solve` carries out.

        Raises
        ------
        InvalidTokensError
            Not contiguous int64 of this many problems, on the device of the answers.
        """
        wanted = (len(self.makespan), self._shape.experts)
        fits = tokens.shape[-1:] == wanted[1:] and tokens.numel() == wanted[0] * wanted[1]
        if tokens.dtype != torch.int64 or not fits or not tokens.is_contiguous():
            raise InvalidTokensError(
                f"tokens must be contiguous int64 of {wanted[0]} problems of {wanted[1]} experts, "
                f"not {tokens.dtype} of shape {tuple(tokens.shape)}"
            )
        if tokens.device != self.home.device:
            raise InvalidTokensError(f"tokens are on {tokens.device}, not on {self.home.device}")
        shape, problems = self._shape, wanted[0]
        pointers = (
            self._tables.data_ptr(),
            tokens.data_ptr(),
            self.home.data_ptr(),
            self.activated.data_ptr(),
            self.makespan.data_ptr(),
        )
        if self._proves:
            certificate = self._certificate.data_ptr()
            return launches.optimal_batched(shape, problems, *pointers, certificate)
        metro = launches.metro_locked if self._locked else launches.metro_batched
        return metro(shape, problems, *pointers)

    def solve(self, tokens: torch.Tensor) -> None:
        """Solve problems on the current stream, into this object's arrays.

        Parameters
        ----------
        tokens
            Int64 ``[..., layers, experts]``, contiguous, on the device of the answers.

        Raises
        ------
        InvalidTokensError
            As `launch`.
        SolverUnavailableError
            Without the extra ``gpu``, or a GPU.
        """
        on_stream(self.launch(tokens), tokens.device)
