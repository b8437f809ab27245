"""Routing on the GPU: the kernels of ``solvers/cuda``, compiled where they run, for torch.

`Router` is a module for a model's forward pass, `Batch` solves recorded problems in one launch.
They need torch, and with CUDA tensors the extra ``gpu``. Nothing is compiled before the first
launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eplb_opt.gpu.batch import Batch
    from eplb_opt.gpu.router import Router

__all__ = ["Batch", "Router"]


def __getattr__(name: str) -> Any:
    if name == "Batch":
        from eplb_opt.gpu.batch import Batch

        return Batch
    if name == "Router":
        from eplb_opt.gpu.router import Router

        return Router
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
