"""The kernels' sources, compiled by NVRTC to cubins and kept on disk.

Needs the extra ``gpu``; no driver, no GPU and no nvcc.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TextIO

from eplb_opt import gpu
from eplb_opt.errors import EplbError, SolverUnavailableError
from eplb_opt.gpu.launches import KERNELS

__all__ = [
    "ARCHITECTURES",
    "Usage",
    "cache_folder",
    "compile_file",
    "cuda_core",
    "kernel_files",
    "source",
    "usage",
]

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""Those that the project's checks compile for; sm_80 is the least that the kernels need."""

_OLDEST = 80
_REPORTED = ("registers", "bytes smem", "bytes spill stores", "bytes spill loads")
_INSTRUCTION_BYTES = 16
_INCLUDE = re.compile(r'^#include "([a-z_]+\.cuh)"$', re.MULTILINE)


def kernel_files() -> tuple[str, ...]:
    """Return the names of the files that hold kernels."""
    return tuple(dict.fromkeys(KERNELS.values()))


def source(file: str) -> str:
    """Return a file of kernels in one piece, what it includes put in its place.

    NVRTC then needs no folder to search, and the text says all that a cached program depends on.

    Raises
    ------
    SolverUnavailableError
        The package was installed without its kernels.

    Examples
    --------
    >>> '#include' in source('metro_batched.cu')
    False
    """
    included: set[str] = set()

    def read(name: str) -> str:
        if name in included:
            return ""
        included.add(name)
        text = _folder().joinpath(name).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda line: read(line[1]), text)

    return read(file)


def cache_folder() -> Path:
    """Return the folder of compiled programs.

    ``$EPLB_OPT_CACHE``, or ``eplb-opt`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
    """
    own = os.environ.get("EPLB_OPT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "eplb-opt"


def compile_file(
    file: str, arch: str, cache: Path | None = None, log: TextIO | None = None
) -> bytes:
    """Compile a file of kernels to a cubin, or take it from the cache.

    Parameters
    ----------
    file
        One of `kernel_files`.
    arch
        ``sm_80`` or newer.
    cache
        Folder of compiled programs, by default `cache_folder`. A program is found again by its
        text, its options and the compiler's version.
    log
        Where the assembler's report goes; it is compiled anew to get one.

    Raises
    ------
    SolverUnavailableError
        Without the extra ``gpu``.
    EplbError
        A cache folder that cannot be written.
    ValueError
        An architecture that is none, that is older than sm_80, or that the compiler does not know.
    """
    version = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if version is None or int(version[1]) < _OLDEST:
        raise ValueError(f"arch must be sm_{_OLDEST} or newer, as in sm_90, not {arch!r}")
    core = cuda_core()
    utils = import_module("cuda.core.utils")
    text = source(file)
    options = core.ProgramOptions(arch=arch, std="c++17", name=file, ptxas_options=["-v"])
    key = utils.make_program_cache_key(
        code=text, code_type="c++", options=options, target_type="cubin"
    )
    folder = cache_folder() if cache is None else cache
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = utils.FileStreamProgramCache(folder)
    except OSError as error:
        raise EplbError(
            f"{folder} cannot hold compiled kernels ({error.strerror}); set EPLB_OPT_CACHE, or "
            "--cache, to a folder that can be written"
        ) from error
    with opened as store:
        kept = store.get(key) if log is None else None
        if kept is not None:
            return bytes(kept)
        try:
            compiled = core.Program(text, "c++", options).compile("cubin", logs=log)
        except Exception as error:  # the classes of cuda.core's errors are private
            raise ValueError(f"{file} does not compile for {arch}: {error}") from error
        store[key] = compiled
        return bytes(compiled.code)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a kernel takes of a multiprocessor.

    Attributes
    ----------
    kernel, arch
        Which, and compiled for what.
    registers
        Of each thread.
    shared_bytes
        Of shared memory, for each block.
    spilled_bytes
        Of registers that found no room.
    instructions
        In the kernel's code, of 16 bytes each, padding included.
    """

    kernel: str
    arch: str
    registers: int
    shared_bytes: int
    spilled_bytes: int
    instructions: int


def usage(file: str, arch: str, cache: Path | None = None) -> list[Usage]:
    """Compile a file of kernels, keep it, and say what each of them takes.

    Raises
    ------
    SolverUnavailableError, ValueError
        As `compile_file`.
    """
    log = StringIO()
    sizes = _code_sizes(compile_file(file, arch, cache, log))
    found = []
    for report in log.getvalue().split("Compiling entry function")[1:]:
        kernel = report.split("'")[1]
        counts = [re.search(rf"(\d+) {what}", report) for what in _REPORTED]
        registers, shared, stores, loads = (int(m[1]) if m else 0 for m in counts)
        size = sizes[f".text.{kernel}"] // _INSTRUCTION_BYTES
        found.append(Usage(kernel, arch, registers, shared, stores + loads, size))
    return found


def cuda_core() -> ModuleType:
    """Return `cuda.core`.

    Raises
    ------
    SolverUnavailableError
        It, or NVRTC, is not installed.
    """
    try:
        core = import_module("cuda.core")
        import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise SolverUnavailableError(
            f"the CUDA kernels need cuda-core and NVRTC ({error}): pip install 'eplb-opt[gpu]'"
        ) from error
    return core


def _code_sizes(cubin: bytes) -> dict[str, int]:
    """Return the bytes of a cubin's sections, by name: it is an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    names = headers[names_at][4]
    return {
        cubin[names + name : cubin.index(b"\0", names + name)].decode(): length
        for name, _, _, _, _, length in headers
    }


def _folder() -> Path:
    for path in gpu.__path__:
        folder = Path(path) / "kernels"
        if folder.is_dir():
            return folder
    raise SolverUnavailableError(
        "the kernels' sources are not where eplb_opt.gpu is installed: install the package again"
    )
