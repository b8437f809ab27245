"""Routing on the GPU: the kernels of ``solvers/cuda``, compiled where they run, and a torch module.

`Router` needs torch, and with CUDA tensors the extra ``gpu``; nothing is compiled or loaded before
the first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eplb_opt.gpu.router import Router

__all__ = ["Router"]


def __getattr__(name: str) -> Any:
    if name == "Router":
        from eplb_opt.gpu.router import Router

        return Router
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
