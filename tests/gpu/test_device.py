"""Launching by cuda.core, with a stand-in for it where there is no GPU."""

from __future__ import annotations

import ctypes
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from eplb_opt.gpu import device as device_module
from eplb_opt.gpu.device import Device
from eplb_opt.gpu.launches import Launch


class Stand:
    """Stands in for `cuda.core`: counts what is made and keeps what is launched."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()
        self.launched: list[tuple[Any, ...]] = []
        self.Device = lambda index: SimpleNamespace(arch="90", set_current=lambda: None)
        self.Stream = SimpleNamespace(from_handle=lambda handle: self._make("stream", handle))
        self.ObjectCode = SimpleNamespace(from_cubin=self._load)

    def LaunchConfig(self, *, grid: int, block: int) -> tuple[str, Any]:  # noqa: N802
        """Return a configuration that says what it is."""
        return self._make("config", (grid, block))

    def launch(self, *what: Any) -> None:
        """Keep a launch."""
        self.launched.append(what)

    def _make(self, kind: str, value: Any) -> tuple[str, Any]:
        self.made[kind] += 1
        return kind, value

    def _load(self, cubin: bytes) -> Any:
        return SimpleNamespace(get_kernel=lambda name: self._make("kernel", (cubin, name)))


def test_a_launch_makes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel, configuration and wrapped stream are made once; stream 0 is named by its handle."""
    stand = Stand()
    monkeypatch.setattr(device_module, "cuda_core", lambda: stand)
    monkeypatch.setattr(
        device_module, "compile_file", lambda file, arch, folder: f"{file} {arch}".encode()
    )
    gpu = Device(0)
    launch = Launch("route_metro", 58, 256, (4096, ctypes.c_int(3)))
    for _ in range(3):
        gpu.launch(launch, 0)
    assert stand.made == {"kernel": 1, "config": 1, "stream": 1}
    kernel = ("kernel", (b"route.cu sm_90", "route_metro"))
    assert stand.launched == [(("stream", 1), ("config", (58, 256)), kernel, *launch.args)] * 3
    gpu.launch(launch._replace(blocks=1), 77)
    assert stand.made == {"kernel": 1, "config": 2, "stream": 2}
    assert stand.launched[-1][0] == ("stream", 77)
