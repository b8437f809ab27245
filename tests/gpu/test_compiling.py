"""The kernels' sources and their compilation, which needs NVRTC and no GPU."""

from __future__ import annotations

import importlib
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eplb_opt.cli import app
from eplb_opt.errors import EplbError, SolverUnavailableError
from eplb_opt.gpu import compiling, device
from eplb_opt.gpu.launches import KERNELS


def require_nvrtc() -> None:
    """Skip where NVRTC is not installed."""
    pytest.importorskip("cuda.core")
    pytest.importorskip("cuda.bindings.nvrtc")


def test_sources_are_package_data() -> None:
    """Every file is there, whole, and holds its kernels."""
    for kernel, file in KERNELS.items():
        text = compiling.source(file)
        assert "#include" not in text
        assert text.count("struct Layer {") == 1
        assert f" {kernel}(" in text


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    """The package, its GPU part and the command line need neither CUDA nor torch."""
    heavy = "[m for m in sys.modules if m.split('.')[0] in ('cuda', 'torch')]"
    code = f"import sys, eplb_opt.gpu, eplb_opt.gpu.device, eplb_opt.cli; print({heavy})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "[]\n"


def test_a_program_is_compiled_once(tmp_path: Path) -> None:
    """The second time it comes from the disk."""
    require_nvrtc()
    first = compiling.compile_file("assign_shares.cu", "sm_90", tmp_path)
    files = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*") if f.is_file()}
    assert first[:4] == b"\x7fELF"
    assert compiling.compile_file("assign_shares.cu", "sm_90", tmp_path) == first
    assert {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*") if f.is_file()} == files


def test_usage_is_the_assemblers(tmp_path: Path) -> None:
    """Registers, shared memory and code of a kernel, none spilled."""
    require_nvrtc()
    (usage,) = compiling.usage("metro_locked.cu", "sm_90", tmp_path)
    assert usage.kernel == "metro_locked"
    assert 16 <= usage.registers <= 64
    assert usage.shared_bytes == 2 * 4 * 1024 + 8
    assert usage.spilled_bytes == 0
    assert 100 < usage.instructions < 2000


@pytest.mark.parametrize("arch", ["sm_75", "compute_90", "90", "sm_999"])
def test_unknown_architectures_are_refused(tmp_path: Path, arch: str) -> None:
    """Too old, not one, or not known to the compiler: an error that names it."""
    require_nvrtc()
    with pytest.raises(ValueError, match=arch):
        compiling.compile_file("metro_locked.cu", arch, tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """The error names the folder and what to set."""
    require_nvrtc()
    (tmp_path / "file").write_text("")
    with pytest.raises(EplbError, match=r"cannot hold compiled kernels.*EPLB_OPT_CACHE"):
        compiling.compile_file(compiling.kernel_files()[0], "sm_90", tmp_path / "file" / "kernels")


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which package is missing and how to get it."""
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(SolverUnavailableError, match=r"eplb-opt\[gpu\]"):
        compiling.compile_file("metro_locked.cu", "sm_90")


def test_without_a_driver_that_is_said() -> None:
    """The error says that a GPU and its driver are missing."""
    require_nvrtc()
    with suppress(Exception):
        importlib.import_module("cuda.core").Device(0).set_current()
        pytest.skip("there is a GPU")
    with pytest.raises(SolverUnavailableError, match="driver"):
        device.Device(0)


def test_command_compiles_ahead_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpu compile` fills the folder and lists every kernel of the files it compiles."""
    require_nvrtc()
    monkeypatch.setattr("eplb_opt.cli.kernel_files", lambda: ("assign_shares.cu",))
    command = ["gpu", "compile", "--arch", "sm_80", "--cache", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "assign_shares" in result.output
    assert any(f.is_file() for f in tmp_path.rglob("*"))
    bad = CliRunner().invoke(app, ["gpu", "compile", "--arch", "sm_1"])
    assert bad.exit_code == 1
    assert "sm_80 or newer" in bad.output
