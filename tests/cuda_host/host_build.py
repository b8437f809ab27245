"""Build the kernels as host C++ and launch them."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_opt.gpu.launches import KERNELS, Launch

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "solvers" / "cuda"
MOST_SWITCHES = 20_000_000

Edit = tuple[str, str, str]
"""A file of `SOURCES`, a text in it, and what to put in its place."""


def compiler() -> str | None:
    """Return the C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "c++"))


class HostLaunchError(Exception):
    """What a schedule came to: a deadlock, lanes that differ, no end."""


class Fibers:
    """Kernels whose threads are fibers."""

    def __init__(
        self, folder: Path, kernels: Sequence[str] = (), edits: Sequence[Edit] = ()
    ) -> None:
        library = folder / "fibers.so"
        build(library, ["-shared", "-fPIC"], kernels, edits)
        loaded = ctypes.CDLL(str(library))
        self._call, self._exchanges = loaded.launch, loaded.exchanges
        self._call.restype, self._exchanges.restype = ctypes.c_char_p, ctypes.c_uint64

    def launch(self, launch: Launch, seed: int = 0, most_switches: int = MOST_SWITCHES) -> None:
        """Carry out a launch under the schedules of a seed.

        Raises
        ------
        HostLaunchError
            What a schedule came to.
        """
        values = [_boxed(arg) for arg in launch.args]
        boxes = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        error = self._call(
            launch.kernel.encode(),
            ctypes.c_uint(launch.blocks),
            ctypes.c_uint(launch.threads),
            ctypes.c_uint64(seed),
            ctypes.c_uint64(most_switches),
            boxes,
        )
        if error:
            raise HostLaunchError(error.decode())

    def exchanges(self) -> int:
        """Return the warp exchanges of the last launch."""
        return int(self._exchanges())


class Sanitized:
    """Kernels whose threads are threads, under ThreadSanitizer."""

    def __init__(
        self, folder: Path, kernels: Sequence[str] = (), edits: Sequence[Edit] = ()
    ) -> None:
        self._folder = folder
        self._program = folder / "sanitized"
        flags = ["-fsanitize=thread", "-g1", "-DCUDA_HOST_THREADS", "-pthread"]
        build(self._program, flags, kernels, edits)

    def launch(self, launch: Launch, arrays: Mapping[int, NDArray[Any]]) -> str:
        """Carry out a launch; return what the sanitizer says, which is nothing if all is well.

        `arrays` are those behind the launch's pointers, which are written to.
        """
        file = self._folder / "launch"
        parts = [struct.pack("<3Q", launch.blocks, launch.threads, len(launch.args))]
        places: list[tuple[int, NDArray[Any]]] = []
        for arg in launch.args:
            if isinstance(arg, int) and arg:
                array = arrays[arg]
                parts.append(struct.pack("<2Q", 1, array.nbytes))
                places.append((sum(map(len, parts)), array))
                parts.append(array.tobytes())
            else:
                value = bytes(_boxed(arg))
                parts.append(struct.pack("<2Q", 0, len(value)) + value)
        file.write_bytes(b"".join(parts))
        # Some kernels lay out memory in a way that the sanitizer of older compilers cannot work in.
        fixed = ["setarch", "-R"] if shutil.which("setarch") else []
        done = subprocess.run(
            [*fixed, str(self._program), launch.kernel, str(file)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        content = file.read_bytes()
        for at, array in places:
            array[...] = np.frombuffer(content, array.dtype, array.size, at).reshape(array.shape)
        return done.stderr if done.stderr or done.returncode == 0 else f"exit {done.returncode}"


def build(
    target: Path, flags: Sequence[str], kernels: Sequence[str] = (), edits: Sequence[Edit] = ()
) -> None:
    """Compile some kernels, or all, after some edits of their sources."""
    sources = SOURCES
    if edits:
        sources = target.parent / "sources"
        shutil.copytree(SOURCES, sources)
    for name, old, new in edits:
        text = (sources / name).read_text()
        if text.count(old) != 1:
            raise ValueError(f"{name} holds {old!r} {text.count(old)} times, not once")
        (sources / name).write_text(text.replace(old, new))
    names = kernels or list(KERNELS)
    lines = [f'#include "{file}"' for file in dict.fromkeys(KERNELS[name] for name in names)]
    lines.append(f"#define KERNELS {' '.join(f'KERNEL({name})' for name in names)}\n")
    (target.parent / "kernels.hpp").write_text("\n".join(lines))
    # A fortified longjmp takes a switch of stacks for a fault.
    command = [str(compiler()), "-std=c++17", "-O1", "-U_FORTIFY_SOURCE"]
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    includes = [f"-I{target.parent}", f"-I{sources}"]
    files = [str(HERE / "host.cpp"), "-o", str(target)]
    subprocess.run([*command, *warnings, *includes, *flags, *files], check=True)


def _boxed(arg: Any) -> Any:
    return ctypes.c_void_p(arg) if isinstance(arg, int) else arg
