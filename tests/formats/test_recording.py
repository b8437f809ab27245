"""Recordings: what is appended comes back, what is whole stays readable, and what is wrong."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb_opt.errors import FormatError, InvalidTokensError, SolverUnavailableError
from eplb_opt.formats.recording import TraceWriter
from eplb_opt.load_trace import LoadTrace, StepFacts
from eplb_opt.trace import read_trace, write_trace

safetensors = pytest.importorskip("safetensors.numpy")

pytestmark = pytest.mark.filterwarnings("ignore:.*have any load")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the recordings of all examples of a property."""
    return tmp_path_factory.mktemp("recordings")


def read(folder: Path) -> LoadTrace:
    """Read a recording."""
    trace = read_trace(folder)
    assert isinstance(trace, LoadTrace)
    return trace


def refusal(folder: Path) -> FormatError:
    """Read a recording that must be refused."""
    with pytest.raises(FormatError) as caught:
        read_trace(folder)
    return caught.value


def emptied(root: Path) -> Path:
    """Give a folder without anything in it."""
    folder = root / "r.trace"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    return folder


# What is appended comes back


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_steps_come_back_exactly(root: Path, data: st.DataObject) -> None:
    """Whatever their size, by source or not, over files of any length, appended to at any point."""
    folder = emptied(root)
    ndim = data.draw(st.sampled_from([3, 4]))
    shape = data.draw(hnp.array_shapes(min_dims=ndim, max_dims=ndim, max_side=5))
    sizes = st.sampled_from([9, 300, 70_000, 2**33, 2**63 - 1]).flatmap(lambda n: st.integers(0, n))
    counts = data.draw(hnp.arrays(np.int64, shape, elements=sizes))
    steps = len(counts)
    stages = st.sampled_from(["decode", "prefill", ""])
    stage = data.draw(st.none() | hnp.arrays("U7", steps, elements=stages))
    scheduled = data.draw(st.none() | hnp.arrays(np.int64, steps, elements=st.integers(0, 2**40)))
    times = hnp.arrays(np.float64, steps, elements=st.floats(0, 1e12)).map(np.sort)
    facts = StepFacts(stage=stage, scheduled=scheduled, time=data.draw(st.none() | times))
    ids = tuple(range(3, 3 + shape[1]))
    known: dict[str, Any] = {"model": "DeepSeek-V3", "top_k": 8, "layer_ids": ids}
    columns = {name: column.tolist() for name, column in facts.columns().items()}
    cut = data.draw(st.integers(0, steps))
    for begin, end in ((0, cut), (cut, steps)):
        size = data.draw(st.integers(1, 4))
        with TraceWriter(folder, append=True, steps_per_file=size, **known) as writer:
            for step in range(begin, end):
                writer.append(counts[step], **{name: c[step] for name, c in columns.items()})
    trace = read(folder)
    if ndim == 4:
        np.testing.assert_array_equal(trace.source_tokens, counts)
    else:
        assert trace.source_tokens is None
        np.testing.assert_array_equal(trace.tokens, counts)
    if stage is not None and not stage.any():
        columns.pop("stage")  # not known of any step
    back = trace.facts.columns()
    assert {name: column.tolist() for name, column in back.items()} == columns
    assert {name: getattr(trace, name) for name in known} == known


def test_counts_are_written_in_narrow_integers(tmp_path: Path) -> None:
    """Each file has the narrowest that holds its own counts; together they are the widest."""
    with TraceWriter(tmp_path, steps_per_file=1) as writer:
        for most in (255, 256, 65_536, 2**32):
            writer.append([[0, most]])
    for path, dtype in zip(sorted(tmp_path.iterdir()), ["u1", "u2", "u4", "i8"], strict=True):
        assert safetensors.load_file(path)["tokens"].dtype == dtype
    assert read(tmp_path).tokens.dtype == np.int64
    assert read(tmp_path).load().tolist() == [[0, 255 + 256 + 65_536 + 2**32]]


def test_a_trace_of_any_kind_is_written(tmp_path: Path) -> None:
    """By source, with all that is known; a copy of the copy is the same, tensor by tensor."""
    sources = np.arange(60).reshape(3, 2, 2, 5)
    facts = StepFacts(stage=np.array(["decode", "", "prefill"]), time=np.array([1.0, 2.0, 2.0]))
    write_trace(LoadTrace.from_sources(sources, facts=facts, top_k=2), tmp_path / "a")
    write_trace(read(tmp_path / "a"), tmp_path / "b")
    names = [path.name for path in (tmp_path / "a").iterdir()]
    assert names == ["steps-000000000.safetensors"]
    first, second = (safetensors.load_file(tmp_path / folder / names[0]) for folder in "ab")
    assert sorted(first) == sorted(second) == ["source_tokens", "stage", "time"]
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name], strict=True)
    assert read(tmp_path / "b").top_k == 2
    one = read(tmp_path / "a" / names[0])
    np.testing.assert_array_equal(one.source_tokens, sources)


def test_long_recordings_stay_on_disk(tmp_path: Path) -> None:
    """Writing and reading 2,000 steps x 61 x 256 takes memory for a file of steps, not for all."""
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 256, (8, 61, 256), dtype=np.uint8)
    tracemalloc.start()
    try:
        with TraceWriter(tmp_path, steps_per_file=64) as writer:
            for step in range(2000):
                writer.append(steps[step % 8])
        trace = read(tmp_path)
        assert trace.num_steps == 2000
        load = trace.load()
        np.testing.assert_array_equal(trace.tokens[1777], steps[1777 % 8])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert load.sum() == 250 * steps.sum(dtype=np.int64)
    assert peak < 20e6  # the counts are 31 MB


# What is whole stays readable


def test_a_killed_recording_keeps_its_files(tmp_path: Path) -> None:
    """SIGKILL loses the steps after the last whole file, and appending goes on from there."""
    script = (
        "import os, sys; from eplb_opt.formats.recording import TraceWriter\n"
        "with TraceWriter(sys.argv[1], steps_per_file=4) as writer:\n"
        "    for n in range(11): writer.append([[n, 1]])\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, cwd=tmp_path)
    (tmp_path / ".steps-000000008.safetensors.unfinished").write_bytes(b"half")
    assert np.asarray(read(tmp_path).tokens)[:, 0, 0].tolist() == list(range(8))
    with TraceWriter(tmp_path, append=True) as writer:
        assert writer.num_steps == 8
        writer.append([[50, 1]])
    assert np.asarray(read(tmp_path).tokens)[:, 0, 0].tolist() == [*range(8), 50]
    assert len(list(tmp_path.iterdir())) == 3


def test_an_exception_writes_what_there_is(tmp_path: Path) -> None:
    """The steps before it are in the recording."""
    with suppress(KeyboardInterrupt), TraceWriter(tmp_path) as writer:
        writer.append([[1, 2]])
        raise KeyboardInterrupt
    assert read(tmp_path).load().tolist() == [[1, 2]]


def test_a_full_disk_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written stays readable; the rest is kept, and written once there is room."""
    real = os.fsync

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = TraceWriter(tmp_path, steps_per_file=2)
    writer.append([[1, 0]])
    writer.append([[2, 0]])
    writer.append([[3, 0]])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="steps 2 to 3 are not written; the 2 before are") as caught:
        writer.append([[4, 0]])
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["steps-000000000.safetensors"]
    assert read(tmp_path).load().tolist() == [[3, 0]]
    monkeypatch.setattr(os, "fsync", real)
    writer.flush()
    assert np.asarray(read(tmp_path).tokens)[:, 0, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_disk_without_room(tmp_path: Path) -> None:
    """The same from the system itself: the file to write is a device that is always full."""
    writer = TraceWriter(tmp_path)
    writer.append([[1, 0]])
    (tmp_path / ".steps-000000000.safetensors.unfinished").symlink_to("/dev/full")
    with pytest.raises(OSError, match="steps 0 to 0 are not written"):
        writer.flush()
    assert list(tmp_path.iterdir()) == []
    writer.flush()
    assert read(tmp_path).num_steps == 1


def test_recordings_are_not_overwritten(tmp_path: Path) -> None:
    """Another recording in the same folder is refused unless it goes on from the first."""
    write_trace(LoadTrace(np.ones((1, 1, 2), dtype=int), top_k=2), tmp_path)
    with pytest.raises(FileExistsError, match="holds a recording already"):
        TraceWriter(tmp_path)
    with pytest.raises(FormatError, match="the recording has 2, not 3"):
        TraceWriter(tmp_path, top_k=3, append=True)


# What is wrong


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ([[1, 2, 3]], r"counts are \[1, 3\], and \[1, 2\] before"),
        ([[1, 2], [3, 4]], r"counts are \[2, 2\], and \[1, 2\] before"),
        ([[1, -2]], "layer 0, expert 1: -2 tokens"),
        ([[0.5, 1]], "float64"),
        ([[1], [1, 2]], "rows of different lengths"),
        (np.array([[0, 2**63]], dtype=np.uint64), "layer 0, expert 1: 9223372036854775808 tokens"),
    ],
)
def test_steps_that_do_not_fit_are_refused(tmp_path: Path, step: Any, message: str) -> None:
    """The message has the step; what is refused leaves no trace."""
    with TraceWriter(tmp_path) as writer:
        writer.append([[1, 2]])
        with pytest.raises(InvalidTokensError, match=f"step 1: .*{message}"):
            writer.append(step)
        writer.append([[3, 4]])
    assert read(tmp_path).load().tolist() == [[4, 6]]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"time": 4.0, "scheduled": 1}, r"time is 4.0, and 5.0 before"),
        ({"time": np.nan, "scheduled": 1}, "nan"),
        ({"time": 6.0, "scheduled": -1}, "-1"),
        ({"time": 6.0}, "scheduled is known of some steps and not of others"),
        ({"time": 6.0, "scheduled": 1, "stage": "idle"}, "'idle'"),
    ],
)
def test_facts_that_do_not_fit_are_refused(
    tmp_path: Path, facts: dict[str, Any], message: str
) -> None:
    """Time does not turn back, and what is known is known of all steps."""
    writer = TraceWriter(tmp_path)
    writer.append([[1, 2]], time=5.0, scheduled=1)
    with pytest.raises(InvalidTokensError, match=f"step 1: .*{message}"):
        writer.append([[1, 2]], **facts)
    writer.append([[1, 2]], time=5.0, scheduled=0)
    assert writer.num_steps == 2


def put(folder: Path, first: int, metadata: dict[str, str] | None = None, **tensors: Any) -> Path:
    """Write one file of a recording by hand."""
    path = folder / f"steps-{first:09}.safetensors"
    given = {"first_step": str(first), **(metadata or {})}
    safetensors.save_file(tensors, path, given)
    return path


def ones(*shape: int, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
    """Give counts."""
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("tensors", "place", "message"),
    [
        ({}, "", "exactly one tensor of tokens, source_tokens"),
        ({"tokens": ones(1, 2, 3), "source_tokens": ones(1, 2, 1, 3)}, "", "exactly one"),
        ({"weight": ones(1, 2, 3)}, "", "tensors found: weight"),
        ({"tokens": ones(2, 3)}, "tokens", "expected [steps, layers, experts]"),
        ({"tokens": ones(0, 2, 3)}, "tokens", "not empty"),
        ({"tokens": ones(1, 2, 3, dtype=np.float64)}, "tokens[0][0][0]", "expected a whole number"),
        ({"tokens": ones(1, 2, 3, dtype=np.float32)}, "tokens", "F32"),
        ({"tokens": -ones(1, 2, 3, dtype=np.int64)}, "tokens[0][0][0]", "-1; expected"),
        ({"tokens": ones(1, 2, 3), "other": ones(1)}, "other", "unknown tensor"),
        ({"tokens": ones(1, 2, 3), "time": ones(1)}, "time", "expected float64 [1]"),
        ({"tokens": ones(2, 2, 3), "time": ones(1, dtype=np.float64)}, "time", "float64 [2]"),
        ({"tokens": ones(1, 2, 3), "stage": 3 * ones(1)}, "stage[0]", "3; expected 0, 1 or 2"),
        (
            {"tokens": ones(1, 2, 3), "time": np.array([np.nan])},
            "",
            "time[0] is nan; expected seconds",
        ),
        ({"tokens": ones(1, 2, 3), "scheduled": np.array([-1])}, "", "scheduled[0] is -1"),
    ],
)
def test_files_of_another_form_are_refused(
    tmp_path: Path, tensors: Any, place: str, message: str
) -> None:
    """The error has the file and the tensor."""
    path = put(tmp_path, 0, **tensors)
    error = refusal(tmp_path)
    assert (error.path, error.place, message in error.problem) == (path, place, True), str(error)


@pytest.mark.parametrize(
    ("metadata", "tensors", "place", "message"),
    [
        ({}, {"tokens": ones(1, 3, 3)}, "tokens", "3 layers; steps-000000000.safetensors has 2"),
        ({}, {"tokens": ones(1, 2, 4)}, "tokens", "4 experts"),
        ({}, {"source_tokens": ones(1, 2, 1, 3)}, "source_tokens", "has tokens"),
        ({"layer_ids": "[3, 5]"}, {"tokens": ones(1, 2, 3)}, "layer_ids", "(3, 5); "),
        ({"layer_ids": "[3, x"}, {"tokens": ones(1, 2, 3)}, "layer_ids", "damaged"),
        ({"layer_ids": "{}"}, {"tokens": ones(1, 2, 3)}, "layer_ids", "a list of whole numbers"),
        ({"top_k": "two"}, {"tokens": ones(1, 2, 3)}, "top_k", "'two'; expected a whole number"),
        ({"first_step": "1"}, {"tokens": ones(1, 2, 3)}, "first_step", "000000002"),
        ({"first_step": ""}, {"tokens": ones(1, 2, 3)}, "first_step", "expected a whole number"),
        ({}, {"tokens": ones(1, 2, 3), "scheduled": np.array([1])}, "scheduled", "some do not"),
        ({}, {"tokens": ones(1, 2, 3), "time": np.array([4.0])}, "time[0]", "ends at 5.0"),
    ],
)
def test_files_that_do_not_go_together_are_refused(
    tmp_path: Path, metadata: dict[str, str], tensors: Any, place: str, message: str
) -> None:
    """Layers that appear or vanish, other experts or sources, time that turns back."""
    timed: Any = {"time": np.array([5.0, 5.0])} if "time" in tensors else {}
    put(tmp_path, 0, tokens=ones(2, 2, 3), **timed)
    path = put(tmp_path, 2, metadata, **tensors)
    error = refusal(tmp_path)
    assert (error.path, error.place, message in error.problem) == (path, place, True), str(error)


def test_a_missing_source_is_found(tmp_path: Path) -> None:
    """A file in which one rank's counts are missing."""
    put(tmp_path, 0, source_tokens=ones(1, 2, 4, 3))
    put(tmp_path, 1, source_tokens=ones(1, 2, 3, 3))
    assert "3 sources; steps-000000000.safetensors has 4" in refusal(tmp_path).problem


def test_missing_and_renamed_files_are_found(tmp_path: Path) -> None:
    """Steps in between, or in another order, are not skipped in silence."""
    for first in (0, 2, 4):
        put(tmp_path, first, tokens=ones(2, 1, 2))
    middle = tmp_path / "steps-000000002.safetensors"
    saved = middle.read_bytes()
    middle.unlink()
    error = refusal(tmp_path)
    assert error.problem == ("4; the file to come here is steps-000000002.safetensors, of step 2")
    middle.write_bytes((tmp_path / "steps-000000004.safetensors").read_bytes())
    assert refusal(tmp_path).path == middle
    middle.write_bytes(saved)
    (tmp_path / "steps-000000000.safetensors").unlink()
    assert refusal(tmp_path).place == "first_step"


def test_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    """Neither opening nor keeping every step holds files open."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with TraceWriter(tmp_path, steps_per_file=1) as writer:
        for step in range(100):
            writer.append([[step]], time=float(step))
    resource.setrlimit(resource.RLIMIT_NOFILE, (90, hard))
    try:
        trace = read(tmp_path)
        kept = list(trace.tokens)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [step.item() for step in kept] == list(range(100))


def test_a_file_that_is_cut_later_is_an_error_not_a_crash(tmp_path: Path) -> None:
    """Its counts are mapped when they are used, and it may have changed by then."""
    path = put(tmp_path, 0, tokens=ones(100, 3, 100))
    trace = read(tmp_path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(FormatError, match="tokens: damaged"):
        np.asarray(trace.tokens)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_damage_crashes_the_reader(
    damage: Callable[[st.DataObject, bytes], bytes], root: Path, data: st.DataObject
) -> None:
    """A valid file with bytes changed, cut short or prolonged."""
    folder = emptied(root)
    facts = StepFacts(time=np.array([1.0, 2.0]), stage=np.array(["decode", ""]))
    write_trace(LoadTrace(np.array([[[1, 2]], [[3, 4]]]), facts=facts, layer_ids=(3,)), folder)
    path = folder / "steps-000000000.safetensors"
    path.write_bytes(damage(data, path.read_bytes()))
    with suppress(FormatError):
        assert read(folder).load().min() >= 0


def test_a_header_that_lies_is_refused(tmp_path: Path) -> None:
    """Offsets outside the file never reach the map."""
    path = put(tmp_path, 0, tokens=ones(1, 2, 4))
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["tokens"]["shape"] = [1, 2, 2**40]
    lying = json.dumps(header).encode()
    path.write_bytes(len(lying).to_bytes(8, "little") + lying + content[8 + length :])
    assert "damaged" in refusal(tmp_path).problem


def test_without_safetensors_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways need it."""
    write_trace(LoadTrace(np.ones((1, 1, 2), dtype=int)), tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(SolverUnavailableError, match=r"eplb-opt\[files\]"):
        read_trace(tmp_path)
    with pytest.raises(SolverUnavailableError, match=r"eplb-opt\[files\]"):
        TraceWriter(tmp_path / "other")
