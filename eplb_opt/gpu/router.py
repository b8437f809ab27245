"""A router as a torch module, whose placement can be exchanged where it stands."""

from __future__ import annotations

from eplb_opt.gpu.operator import route  # first: it says what to install if torch is missing

# isort: split
import torch

from eplb_opt.errors import InvalidPlacementError
from eplb_opt.gpu.tables import Shape, kernel_method, make_tables
from eplb_opt.placement import Placement
from eplb_opt.routers import Metro, RoutingMethod

__all__ = ["Router"]


class Router(torch.nn.Module):
    """Route top-k ids to physical ids inside a model's forward pass.

    The answers are those of ``solve_routing(placement, counts, method=method).assign(topk_ids)``
    where all ids can be served.

    Parameters
    ----------
    placement
        Where the replicas are.
    method
        ``"optimal"``, or ``"metro"`` with its options.
    device
        Where the tables are kept; `to` moves them as it does other modules' buffers.

    Raises
    ------
    InvalidPlacementError
        More than 1,024 GPUs, 2,048 experts or 65,535 slots of a GPU.
    ValueError
        A method that has no kernel.
    SolverUnavailableError
        Without torch.

    Examples
    --------
    >>> router = Router(Placement([[0, 1], [0, 2]]))
    >>> router(torch.tensor([[0, 1], [2, 0], [1, -1]]))
    tensor([[ 2,  1],
            [ 3,  2],
            [ 1, -1]], dtype=torch.int32)
    """

    tables: torch.Tensor

    def __init__(
        self,
        placement: Placement,
        *,
        method: str | RoutingMethod = "optimal",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._method = kernel_method(method)
        self._shape = Shape.of(placement)
        with torch.inference_mode(False):  # a tensor of that mode could not be swapped outside it
            tables = torch.from_numpy(make_tables(placement, self._method)).to(device)
        self.register_buffer("tables", tables, persistent=False)

    def forward(
        self,
        topk_ids: torch.Tensor,
        *,
        layer: int | None = None,
        counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return each id's physical id; see `eplb_opt.gpu.operator.route`.

        Parameters
        ----------
        topk_ids
            Int32 or int64: of all layers ``[layers, ...]``, or of one.
        layer
            Which layer the ids are of; None for all.
        counts
            Int32 ``[layers, experts]``, or ``[1, experts]`` for one layer: reduced over the ranks.

        Raises
        ------
        IndexError
            No such layer.
        InvalidTokensError
            A wrong dtype, shape, stride or device.
        """
        tables = self.tables
        if layer is not None:
            if not 0 <= layer < self._shape.layers:
                raise IndexError(f"no layer {layer}: there are {self._shape.layers}")
            tables = tables[layer : layer + 1]
        shape, name = self._shape, "metro" if isinstance(self._method, Metro) else "optimal"
        sizes = (shape.gpus, shape.slots_per_gpu, shape.experts)
        return route(topk_ids, tables, *sizes, name, counts)

    def swap(self, placement: Placement) -> None:
        """Route on another placement from now on, captured graphs included.

        The tables are overwritten on the current stream: launches before it see the old placement,
        those behind it the new one.

        Raises
        ------
        InvalidPlacementError
            Another number of layers, GPUs, slots or experts.
        """
        shape = Shape.of(placement)
        if shape != self._shape:
            raise InvalidPlacementError(
                f"a placement of {shape} cannot replace one of {self._shape}"
            )
        self.tables.copy_(torch.from_numpy(make_tables(placement, self._method)))

    def extra_repr(self) -> str:
        """Return what `repr` says between the parentheses."""
        return f"{self._method}, {self._shape}"
