"""Launching the kernels on a GPU, by `cuda.core`.

Needs the extra ``gpu`` and NVIDIA's driver.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from eplb_opt.errors import SolverUnavailableError
from eplb_opt.gpu.compiling import compile_file, cuda_core
from eplb_opt.gpu.launches import KERNELS, Launch

__all__ = ["Device", "device"]

_LEGACY_STREAM = 1
"""The handle that names the default stream, which torch calls 0."""


class Device:
    """A GPU's kernels, loaded when they are first launched.

    What a launch needs besides its arguments is made once: the kernel, its grid and block, the
    wrapped stream.

    Parameters
    ----------
    index
        Of the GPU, as CUDA counts.
    folder
        Of compiled programs; see `eplb_opt.gpu.compiling.compile_file`.

    Raises
    ------
    SolverUnavailableError
        Without the extra, the driver, or such a GPU.
    """

    def __init__(self, index: int = 0, folder: Path | None = None) -> None:
        self._core = cuda_core()
        try:
            self._device = self._core.Device(index)
            self._device.set_current()
            self.arch = f"sm_{self._device.arch}"
        except Exception as error:  # the classes of cuda.core's errors are private
            raise SolverUnavailableError(
                f"the CUDA kernels need an NVIDIA GPU and its driver: {error}"
            ) from error
        self._folder = folder
        self._kernels: dict[str, Any] = {}
        self._configs: dict[tuple[int, int], Any] = {}
        self._streams: dict[int, Any] = {}

    def load(self, kernel: str) -> Any:
        """Return a kernel, compiled for this GPU; not while a graph is captured."""
        loaded = self._kernels.get(kernel)
        if loaded is None:
            cubin = compile_file(KERNELS[kernel], self.arch, self._folder)
            loaded = self._core.ObjectCode.from_cubin(cubin).get_kernel(kernel)
            self._kernels[kernel] = loaded
        return loaded

    def launch(self, launch: Launch, stream: int) -> None:
        """Put a launch on a stream, given by its handle; nothing is waited for."""
        sizes = (launch.blocks, launch.threads)
        config = self._configs.get(sizes)
        if config is None:
            config = self._configs[sizes] = self._core.LaunchConfig(grid=sizes[0], block=sizes[1])
        wrapped = self._streams.get(stream)
        if wrapped is None:
            wrapped = self._core.Stream.from_handle(stream or _LEGACY_STREAM)
            self._streams[stream] = wrapped
        self._core.launch(wrapped, config, self.load(launch.kernel), *launch.args)


@cache
def device(index: int) -> Device:
    """Return a GPU's `Device`, one for all callers."""
    return Device(index)
