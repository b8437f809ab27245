"""Reading recorded traffic: what is exact, what is refused and where, and that nothing crashes."""

from __future__ import annotations

import io
import json
import pickle
import sys
import tracemalloc
import zipfile
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
from eplb_opt.trace import LoadTrace, TokenTrace, read_trace

Array = npt.NDArray[Any]

LARGEST = 2**63 - 1
ONE_GPU = "ignore:.*counts of one GPU only:UserWarning"


def as_json(tokens: Array) -> bytes:
    """Write counts as SGLang does."""
    return json.dumps({"rank": 0, "logical_count": tokens.tolist()}).encode()


def as_csv(tokens: Array) -> bytes:
    """Write counts [layers, experts] or [steps, layers, experts] as text."""
    steps = tokens if tokens.ndim == 3 else tokens[np.newaxis]
    rows = ["\n".join(",".join(map(str, row)) for row in step.tolist()) for step in steps]
    return "\n\n".join(rows).encode()


def as_npy(array: Array) -> bytes:
    """Write one array as .npy."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def as_npz(**arrays: Any) -> bytes:
    """Write named arrays as a compressed .npz."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def as_npz_tokens(tokens: Array) -> bytes:
    """Write counts as .npz."""
    return as_npz(tokens=tokens)


WRITERS: dict[str, Callable[[Array], bytes]] = {
    ".json": as_json,
    ".csv": as_csv,
    ".npy": as_npy,
    ".npz": as_npz_tokens,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples of a property: each rewrites its file."""
    return tmp_path_factory.mktemp("traces")


def written(folder: Path, suffix: str, content: bytes) -> Path:
    """Put ``content`` in a file with that suffix."""
    path = folder / f"trace{suffix}"
    path.unlink(missing_ok=True)  # an earlier example may still be mapped
    path.write_bytes(content)
    return path


def read_load(path: Path) -> LoadTrace:
    """Read a file that holds counts."""
    trace = read_trace(path)
    assert isinstance(trace, LoadTrace)
    return trace


def loaded(trace: LoadTrace) -> Array:
    """Load all of a trace's counts."""
    return np.asarray(trace.tokens)


def read_tokens(path: Path, num_experts: int | None = None) -> TokenTrace:
    """Read a file that holds top-k ids."""
    trace = read_trace(path, num_experts=num_experts)
    assert isinstance(trace, TokenTrace)
    return trace


def refusal(path: Path, num_experts: int | None = None) -> FormatError:
    """Read a file that must be refused."""
    with pytest.raises(FormatError) as caught:
        read_trace(path, num_experts=num_experts)
    return caught.value


# Round trips


@pytest.mark.filterwarnings(ONE_GPU)
@pytest.mark.parametrize("suffix", WRITERS)
@given(
    tokens=hnp.arrays(
        np.int64,
        hnp.array_shapes(min_dims=2, max_dims=3, max_side=4),
        elements=st.integers(0, 9) | st.integers(0, LARGEST),
    )
)
@settings(max_examples=40, deadline=None)
def test_counts_come_back_exactly(folder: Path, suffix: str, tokens: Array) -> None:
    """Integers up to 2^63-1 survive every format to the unit; [L, E] is one step."""
    trace = read_load(written(folder, suffix, WRITERS[suffix](tokens)))
    assert trace.tokens.dtype == np.int64
    expected = tokens if tokens.ndim == 3 else tokens[np.newaxis]
    np.testing.assert_array_equal(trace.tokens, expected)
    assert (trace.num_steps, trace.num_layers, trace.num_experts) == expected.shape


@pytest.mark.filterwarnings(ONE_GPU)
@pytest.mark.parametrize("suffix", WRITERS)
@given(
    tokens=hnp.arrays(
        np.float64,
        hnp.array_shapes(min_dims=2, max_dims=3, max_side=4),
        elements=st.integers(0, 2**53 - 1).map(float),
    )
)
@settings(max_examples=20, deadline=None)
def test_whole_floats_are_counts(folder: Path, suffix: str, tokens: Array) -> None:
    """Counts that a file spells as floats, as SGLang's do, become int64 without loss."""
    trace = read_load(written(folder, suffix, WRITERS[suffix](tokens)))
    assert trace.tokens.dtype == np.int64
    np.testing.assert_array_equal(loaded(trace).reshape(tokens.shape), tokens)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint32, np.dtype(">i4"), np.uint64])
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_integer_arrays_keep_their_dtype(tmp_path: Path, suffix: str, dtype: npt.DTypeLike) -> None:
    """No integer array is copied to another dtype; uint64, which numpy mixes badly, is reread."""
    tokens = np.array([[1, 2], [3, 4]], dtype=dtype)
    trace = read_load(written(tmp_path, suffix, WRITERS[suffix](tokens)))
    assert trace.tokens.dtype == (np.int64 if dtype is np.uint64 else dtype)
    assert trace.load().dtype == np.int64
    assert trace.load().tolist() == [[1, 2], [3, 4]]


@given(
    ids=hnp.arrays(
        st.sampled_from([np.int64, np.int32, np.int8]),
        hnp.array_shapes(min_dims=2, max_dims=3, max_side=5),
        elements=st.integers(-1, 7),
    ),
    key=st.sampled_from(["topk_ids", "topk", "data"]),
)
@settings(max_examples=40, deadline=None)
def test_topk_ids_come_back(folder: Path, ids: Array, key: str) -> None:
    """Ids keep value and dtype, [tokens, k] is one layer, and load counts all but padding."""
    trace = read_tokens(written(folder, ".npz", as_npz(**{key: ids})), num_experts=8)
    expected = ids if ids.ndim == 3 else ids[:, np.newaxis]
    np.testing.assert_array_equal(trace.topk_ids, expected)
    assert trace.topk_ids.dtype == ids.dtype
    assert (trace.num_tokens, trace.num_layers, trace.top_k) == expected.shape
    assert trace.generation.tolist() == [0] * len(ids)
    for layer, row in enumerate(trace.load()):
        assert row.tolist() == [int((expected[:, layer] == e).sum()) for e in range(8)]


# Worked examples


def test_csv_is_rows_of_layers_with_comments(tmp_path: Path) -> None:
    """Blank lines part the steps, however many; comments and a byte-order mark change nothing."""
    text = "\ufeff# layer by expert\n\n1, 2 ,3 # dense\n#\n4,5.0,6\n\n\n# next\n7,8,9\r\n0,1,2\n\n"
    trace = read_load(written(tmp_path, ".csv", text.encode()))
    assert loaded(trace).tolist() == [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [0, 1, 2]]]


def test_the_number_of_experts_is_the_largest_id_unless_given(tmp_path: Path) -> None:
    """An expert that no token chose is known only to the caller."""
    path = written(tmp_path, ".npz", as_npz(topk=np.array([[0, 5], [2, -1]])))
    assert read_tokens(path).num_experts == 6
    assert read_tokens(path, num_experts=8).load().tolist() == [[1, 0, 1, 0, 0, 1, 0, 0]]


def test_generations_are_read(tmp_path: Path) -> None:
    """The optional member ``generation`` comes with the ids."""
    ids = np.array([[0, 1], [1, 0]], dtype=np.uint8)
    content = as_npz(topk=ids, generation=np.array([3, 4], dtype=np.uint16), source=np.array(["a"]))
    assert read_tokens(written(tmp_path, ".npz", content)).generation.tolist() == [3, 4]


def test_batches_are_views_of_consecutive_tokens() -> None:
    """Batch s holds tokens s*B..s*B+B-1 without a copy; the incomplete last one is dropped."""
    ids = np.arange(7 * 2 * 3).reshape(7, 2, 3)
    trace = TokenTrace(ids, 42, np.zeros(7, dtype=np.int64))
    batches = trace.batches(2)
    assert batches.shape == (3, 2, 2, 3)
    assert np.shares_memory(batches, ids)
    for step in range(3):
        for token in range(2):
            np.testing.assert_array_equal(batches[step, :, token], ids[2 * step + token])
    np.testing.assert_array_equal(trace.batches(2, steps=2), batches[:2])


@pytest.mark.parametrize(
    ("tokens_per_batch", "steps"), [(8, None), (0, None), (-1, None), (2, 4), (2, 0)]
)
def test_batches_that_the_trace_cannot_fill_are_refused(
    tokens_per_batch: int, steps: int | None
) -> None:
    """Seven tokens make no batch of eight and no four batches of two."""
    trace = TokenTrace(np.zeros((7, 1, 1), dtype=int), 1, np.zeros(7, dtype=int))
    with pytest.raises(InvalidTokensError, match=r"complete batches|at least 1"):
        trace.batches(tokens_per_batch, steps=steps)


def test_layers_are_selected_as_views_where_they_are_consecutive() -> None:
    """MoE layers behind dense ones stay where they are; any other choice is copied in order."""
    tokens = np.arange(2 * 4 * 3).reshape(2, 4, 3)
    tokens[:, 0] = 0
    trace = LoadTrace(tokens)
    assert trace.moe_layers().tolist() == [1, 2, 3]
    selected = trace.select_layers(trace.moe_layers())
    assert np.shares_memory(selected.tokens, tokens)
    np.testing.assert_array_equal(selected.tokens, tokens[:, 1:])
    np.testing.assert_array_equal(trace.select_layers([3, 1]).tokens, tokens[:, [3, 1]])


@pytest.mark.parametrize("layers", [[4], [-1, 0], [], [0.5], 1, [True]])
def test_layers_that_do_not_exist_are_refused(layers: Any) -> None:
    """Negative indices are not the last layers, and an empty choice is a mistake."""
    with pytest.raises(InvalidTokensError, match="layer"):
        LoadTrace(np.ones((1, 4, 2), dtype=int)).select_layers(layers)


@pytest.mark.parametrize(
    "tokens", [np.ones((2, 3)), np.ones((2, 3), dtype=int), np.ones((1, 0, 3), dtype=int)]
)
def test_a_load_trace_has_three_axes_of_integers(tokens: Array) -> None:
    """A hand-made trace is held to the form that the class promises."""
    with pytest.raises(InvalidTokensError, match="steps, layers, experts"):
        LoadTrace(tokens)


# Size


def test_sums_pass_int32(tmp_path: Path) -> None:
    """Four int32 counts near 2^31 add up past it."""
    tokens = np.full((4, 1, 2), 2**31 - 1, dtype=np.int32)
    trace = read_load(written(tmp_path, ".npy", as_npy(tokens)))
    assert trace.load().tolist() == [[4 * (2**31 - 1)] * 2]


@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_a_sum_past_int64_is_refused(steps: int) -> None:
    """A sum that int64 would wrap, however often, names layer and expert instead."""
    tokens = np.zeros((steps, 2, 3), dtype=np.int64)
    tokens[:, 1, 2] = LARGEST
    with pytest.raises(InvalidTokensError, match="layer 1, expert 2"):
        LoadTrace(tokens).load()
    assert LoadTrace(tokens[:1]).load()[1, 2] == LARGEST


def test_a_negative_sum_is_refused() -> None:
    """The counts of a hand-made trace are not checked; a sum below 0 names layer and expert."""
    with pytest.raises(InvalidTokensError, match="layer 1, expert 0: a count is negative, or"):
        LoadTrace(np.array([[[1, 2], [-3, 4]]])).load()


def test_large_files_stay_on_disk(tmp_path: Path) -> None:
    """Reading and summing 2,000 x 61 x 256 int32 steps allocates a small part of their size."""
    path = tmp_path / "trace.npy"
    tokens = np.lib.format.open_memmap(path, "w+", np.int32, (2000, 61, 256))
    tokens[::500, 3:] = 2**31 - 1
    tokens.flush()
    size = tokens.nbytes
    del tokens
    tracemalloc.start()
    try:
        trace = read_load(path)
        load = trace.load()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 8
    assert not loaded(trace).flags.writeable
    assert load[3:].min() == load.max() == 4 * (2**31 - 1)
    assert trace.moe_layers().tolist() == list(range(3, 61))


def test_json_is_streamed(tmp_path: Path) -> None:
    """Beside the result, reading keeps a buffer, not the nested lists: five times the result."""
    tokens = np.random.default_rng(0).integers(1000, 9000, (120, 8, 256))
    path = written(tmp_path, ".json", as_json(tokens))
    tracemalloc.start()
    try:
        trace = read_load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(trace.tokens, tokens)
    assert peak < tokens.nbytes + 2**21


# What is refused, and where

NOT_NUMBERS = ["true", "null", '"x"', "[1]", "{}", "NaN", "Infinity", "-Infinity", "1e400"]
NOT_COUNTS = ["-1", "-1.0", "0.5", "9223372036854775808", "9007199254740992.0"]


@pytest.mark.parametrize("text", [*NOT_NUMBERS, *NOT_COUNTS])
@pytest.mark.parametrize("neighbour", ["1", "1.0"])
def test_json_values_that_are_not_counts_are_named(
    tmp_path: Path, text: str, neighbour: str
) -> None:
    """A wrong value is named by its path in the file, with and without a step axis."""
    rows = f"[[{neighbour}, 2], [3, {text}]]"
    path = written(tmp_path, ".json", f'{{"a": [5], "logical_count": {rows}}}'.encode())
    assert refusal(path).place == "logical_count[1][1]"
    content = f'{{"a": [5], "logical_count": [[[1, 1], [1, 1]], {rows}]}}'
    assert refusal(written(tmp_path, ".json", content.encode())).place == "logical_count[1][1][1]"


def test_integers_beside_floats_stay_exact(tmp_path: Path) -> None:
    """A float in a row does not round the integers beside it."""
    path = written(tmp_path, ".json", b'{"logical_count": [[9007199254740993, 1.0, 0]]}')
    assert loaded(read_load(path)).tolist() == [[[2**53 + 1, 1, 0]]]


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        ("", "", "damaged, or not a .json file"),
        ("not json", "", "damaged"),
        ("\x00\x01", "", "damaged"),
        ("[[1, 2]]", "", "expected an object with the key 'logical_count'; keys found: none"),
        ("{}", "", "keys found: none"),
        ('{"rank": 0, "counts": [[1]]}', "", "keys found: 'rank', 'counts'"),
        ('{"x": {"logical_count": [[1]]}}', "", "keys found: 'x'"),
        ('{"logical_count.item": [[1]]}', "", "keys found"),
        ('{"logical_count": 5}', "logical_count", "number found; expected numbers in lists"),
        ('{"logical_count": null}', "logical_count", "null found"),
        ('{"logical_count": {"item": [[1]]}}', "logical_count", "map found"),
        ('{"logical_count": []}', "logical_count", "empty list"),
        ('{"logical_count": [1, 2]}', "logical_count", "counts at this depth"),
        ('{"logical_count": [[]]}', "logical_count[0]", "empty list"),
        ('{"logical_count": [[[]]]}', "logical_count[0][0]", "empty list"),
        ('{"logical_count": [[1, 2], [3]]}', "logical_count[1]", "1 counts; the first row has 2"),
        ('{"logical_count": [[[1]], [[1], [2]]]}', "step 1", "2 layers; step 0 has 1"),
        ('{"logical_count": [[[1]], []]}', "logical_count[1]", "empty list"),
        ('{"logical_count": [[[1]], [2]]}', "logical_count[1]", "counts at this depth"),
        ('{"logical_count": [[1], [[2]]]}', "logical_count[1][0]", "counts at this depth"),
        ('{"logical_count": [[[1], 2]]}', "logical_count[0]", "counts at this depth"),
        ('{"logical_count": [[[[1]]]]}', "logical_count[0][0][0]", "array found"),
        ('{"logical_count": [[1]], "logical_count": [[2]]}', "logical_count", "occurs twice"),
        ('{"logical_count": [[1, 2], [3', "logical_count[1][1]", "damaged"),
        ('{"logical_count": [[1, 2]]} extra', "", "damaged"),
    ],
)
def test_json_of_another_form_is_refused(
    tmp_path: Path, content: str, place: str, message: str
) -> None:
    """Missing keys, wrong nesting, ragged rows and broken text say where and what."""
    error = refusal(written(tmp_path, ".json", content.encode()))
    assert (error.place, message in error.problem) == (place, True), str(error)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@pytest.mark.parametrize("value", [-1.0, 0.5, np.nan, np.inf, -np.inf, 2.0**53])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_array_values_that_are_not_counts_are_named(
    tmp_path: Path, suffix: str, value: float, dtype: type[np.floating]
) -> None:
    """The place is the array's name and the index in the file."""
    name = "tokens" if suffix == ".npz" else ""
    tokens = np.ones((3, 4), dtype=dtype)
    tokens[2, 1] = value
    path = written(tmp_path, suffix, WRITERS[suffix](tokens))
    assert refusal(path).place == f"{name}[2][1]"
    path = written(tmp_path, suffix, WRITERS[suffix](np.stack([np.ones_like(tokens), tokens])))
    assert refusal(path).place == f"{name}[1][2][1]"


def test_a_late_bad_value_is_found_in_its_part(tmp_path: Path) -> None:
    """Checking part by part loses neither the value nor its step."""
    tokens = np.zeros((90, 61, 256), dtype=np.int32)
    tokens[77, 60, 255] = -5
    error = refusal(written(tmp_path, ".npy", as_npy(tokens)))
    assert error.place == "[77][60][255]"
    assert error.problem.startswith("-5;")


@pytest.mark.parametrize(
    "array",
    [
        np.ones((2, 3), dtype=bool),
        np.ones(3, dtype=int),
        np.ones((1, 1, 2, 3), dtype=int),
        np.ones((0, 3), dtype=int),
        np.ones((2, 3), dtype=complex),
        np.array([["1", "2"]]),
        np.array([[1, 2]], dtype="m8[s]"),
        np.array([[(1, 2)]], dtype=[("a", int), ("b", int)]),
        np.array([[2**63]], dtype=np.uint64),
        np.array(7),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_arrays_that_are_not_counts_are_refused(tmp_path: Path, suffix: str, array: Array) -> None:
    """Booleans, text, records, and all shapes but two are no counts."""
    assert refusal(written(tmp_path, suffix, WRITERS[suffix](array))).problem


class Bomb:
    """Raises when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Say what unpickling calls."""
        return sys.exit, ("a pickle was executed",)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".json", ".csv"])
def test_pickles_are_never_executed(tmp_path: Path, suffix: str) -> None:
    """Object arrays and bare pickles are refused before any of their code runs."""
    bomb = np.array([[Bomb()]], dtype=object)
    contents = [pickle.dumps(Bomb())]
    if suffix == ".npy":
        contents.append(as_npy(bomb))
    if suffix == ".npz":
        contents += [as_npz(tokens=bomb), as_npz(topk=bomb)]
        contents.append(as_npz(topk=np.array([[0]]), generation=bomb))
    for content in contents:
        assert refusal(written(tmp_path, suffix, content)).problem


@pytest.mark.parametrize(
    ("arrays", "place", "message"),
    [
        ({}, "", "arrays found: none"),
        ({"routes": np.array([[1]])}, "", "arrays found: routes"),
        ({"topk": np.array([[1]]), "counts": np.array([[1]])}, "", "exactly one array of"),
        ({"topk": np.array([1, 2])}, "topk", "expected integers [tokens, layers, k]"),
        ({"topk": np.array(1)}, "topk", "expected integers"),
        ({"topk": np.array([[0.5]])}, "topk", "float64"),
        ({"topk": np.array([["a"]])}, "topk", "expected integers"),
        ({"topk": np.zeros((0, 2), dtype=int)}, "topk", "not empty"),
        ({"topk": np.array([[0, -2]])}, "topk", "token 0, layer 0, choice 1: -2"),
        ({"topk": np.array([[-1, -1]])}, "topk", "largest id -1"),
        ({"data": np.array([[151_642]])}, "data", "are these expert ids?"),
        ({"data": np.array([[2**64 - 1]], dtype=np.uint64)}, "data", "are these expert ids?"),
        (
            {"topk": np.array([[0], [1]]), "generation": np.array([0])},
            "topk",
            "generation has 1 tokens, topk_ids 2",
        ),
        ({"topk": np.array([[0]]), "generation": np.array([0.0])}, "topk", "generation is float64"),
    ],
)
def test_archives_of_another_form_are_refused(
    tmp_path: Path, arrays: dict[str, Array], place: str, message: str
) -> None:
    """Names decide what an archive holds; ids outside the experts are named by token and layer."""
    error = refusal(written(tmp_path, ".npz", as_npz(**arrays)))
    assert (error.place, message in error.problem) == (place, True), str(error)


def test_ids_past_the_given_experts_are_refused(tmp_path: Path) -> None:
    """An id is a mistake of the file or of ``num_experts``, never dropped."""
    path = written(tmp_path, ".npz", as_npz(topk=np.array([[[0, 1]], [[2, 9]]], dtype=np.uint8)))
    assert "token 1, layer 0, choice 1: 9 is no id of 9 experts" in refusal(path, 9).problem


@pytest.mark.parametrize("suffix", WRITERS)
def test_counts_must_have_the_given_experts(tmp_path: Path, suffix: str) -> None:
    """``num_experts`` is checked where the file says otherwise."""
    path = written(tmp_path, suffix, WRITERS[suffix](np.ones((2, 3), dtype=int)))
    assert "3 experts per layer, but num_experts=4" in refusal(path, 4).problem
    assert isinstance(read_trace(path, num_experts=3), LoadTrace)


def test_a_header_that_asks_for_too_much_memory_is_refused(tmp_path: Path) -> None:
    """In an archive nothing but the header bounds the allocation, so its failure is the file's."""
    header = {"descr": "<i8", "fortran_order": False, "shape": (2**28, 2**28)}
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, header)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tokens.npy", member.getvalue())
    assert refusal(written(tmp_path, ".npz", buffer.getvalue())).place == "tokens"
    assert refusal(written(tmp_path, ".npy", member.getvalue())).problem


def test_arrays_behind_the_first_are_not_lost_in_silence(tmp_path: Path) -> None:
    """Steps appended to one .npy by repeated saving would be read as the first step only."""
    content = as_npy(np.ones((2, 2), dtype=int))
    error = refusal(written(tmp_path, ".npy", content + content))
    assert f"{len(content)} bytes follow the array" in error.problem


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", "", "no counts"),
        ("\n# only a comment\n\n", "", "no counts"),
        ("layer,e0\n0,1\n", "line 1, column 1", "'layer'"),
        ("# a\n1,2\n3,-4\n", "line 3, column 2", "-4;"),
        ("1,2\n3,nan\n", "line 2, column 2", "nan;"),
        ("1,2\n3,4.5\n", "line 2, column 2", "4.5;"),
        ("1,2\n3,9223372036854775808\n", "line 2, column 2", "9223372036854775808;"),
        ("1,2,\n", "line 1, column 3", "'';"),
        ("1;2\n", "line 1, column 1", "'1;2'"),
        ("True,1\n", "line 1, column 1", "'True'"),
        ("1,2\n3\n", "line 2", "1 counts; the first row has 2"),
        ("1,2\n3,4\n\n5,6\n", "step 1", "1 layers; step 0 has 2"),
    ],
)
def test_csv_of_another_form_is_refused(
    tmp_path: Path, text: str, place: str, message: str
) -> None:
    """The place is a line and a column, both from 1."""
    error = refusal(written(tmp_path, ".csv", text.encode()))
    assert (error.place, message in error.problem) == (place, True), str(error)


def test_text_in_another_encoding_is_refused(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are a matter of the file's form."""
    assert "utf-8" in refusal(written(tmp_path, ".csv", b"1,2\n\xff,3\n")).problem


@pytest.mark.parametrize("name", ["trace.txt", "trace", "trace.npy.gz"])
def test_the_suffix_decides(tmp_path: Path, name: str) -> None:
    """A suffix that no reader knows is refused with the list of those that are known."""
    error = refusal(tmp_path / name)
    assert ".json, .pt, .pth, .npy, .csv, .safetensors, .npz" in error.problem


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_missing_file_is_the_systems_error(tmp_path: Path, suffix: str) -> None:
    """What the operating system refuses is not the file's form."""
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / f"missing{suffix}")


def test_a_folder_without_traffic_says_what_it_could_be(tmp_path: Path) -> None:
    """The three kinds of folders are named, whatever the folder's own suffix."""
    folder = tmp_path / "folder.npy"
    folder.mkdir()
    for part in ("steps-000000000.safetensors", ".pt", "meta_info.json"):
        assert part in refusal(folder).problem


# Counts of one GPU only


@pytest.mark.parametrize(
    ("loaded", "warns"),
    [(range(32, 48), True), (range(128), True), (range(129), False), (range(0), False)],
)
def test_load_on_one_block_of_experts_is_suspected(
    tmp_path: Path, loaded: range, warns: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """All load on consecutive experts, at most half of them, looks like one GPU's counts."""
    tokens = np.zeros((3, 4, 256), dtype=int)
    tokens[:, 1:, list(loaded)] = 5
    read_trace(written(tmp_path, ".npy", as_npy(tokens)))
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == warns
    if warns:
        assert f"only experts {loaded[0]} to {loaded[-1]} of 256" in messages[0]
        assert recwarn[0].filename == __file__


def test_one_step_with_all_experts_clears_the_suspicion(tmp_path: Path) -> None:
    """The last step may be the one that shows load elsewhere."""
    tokens = np.zeros((100, 61, 256), dtype=np.uint8)
    tokens[:, 3, 0] = 1
    tokens[99, 5, 255] = 1
    read_trace(written(tmp_path, ".npy", as_npy(tokens)))


# Real files


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("decode_in1000out1000", 8_543_895_552),
        ("decode_in2000out100", 1_378_080_000),
        ("prefill_in4096", 3_892_314_112),
        ("prefill_in512", 3_892_314_112),
    ],
)
def test_deepseek_v3_statistics(shared_data: Path, name: str, total: int) -> None:
    """SGLang's published counts: 61 layers, the first three dense, the same sum in all others."""
    path = shared_data / "sglang_deepseek_v3" / f"{name}.json"
    trace = read_load(path)
    assert trace.tokens.shape == (1, 61, 256)
    assert trace.moe_layers().tolist() == list(range(3, 61))
    assert trace.load().sum() == total
    assert set(trace.load().sum(axis=1).tolist()) == {0, total // 58}
    np.testing.assert_array_equal(trace.load(), json.loads(path.read_text())["logical_count"])


def test_gpt_oss_routes(shared_data: Path) -> None:
    """Every token of the recorded gpt-oss routes chooses 4 of 32 experts in each of 24 layers."""
    trace = read_tokens(shared_data / "gpt_oss_20b" / "routes.npz")
    assert trace.topk_ids.shape == (45_043, 24, 4)
    assert (trace.num_experts, int(trace.generation.max())) == (32, 140)
    assert trace.load().sum(axis=1).tolist() == [45_043 * 4] * 24
    assert trace.batches(128).shape == (351, 24, 128, 4)


@pytest.mark.parametrize(("name", "rows"), [("b1024_022_016", 1024), ("b64_032_012", 64)])
def test_qwen3_batches(shared_data: Path, name: str, rows: int) -> None:
    """The Qwen3 batches are one layer of top-8 ids of 128 experts."""
    path = shared_data / "qwen3_30b_batches" / f"qwen_{name}.npz"
    trace = read_tokens(path, num_experts=128)
    assert trace.topk_ids.shape == (rows, 1, 8)
    assert trace.load().sum() == 8 * rows


@pytest.mark.parametrize(
    "name", ["omni_placements/placements.npz", "vllm_ascend/expert_map.json", "golden_cases.json"]
)
def test_placements_are_not_traffic(shared_data: Path, name: str) -> None:
    """A placement file handed in by mistake is refused by what it lacks."""
    assert "expected" in refusal(shared_data / name).problem


# PyTorch files


def test_pt_without_pytorch_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch is wanted by .pt files alone, and said so."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SolverUnavailableError, match="pip install torch"):
        read_trace(tmp_path / "trace.pt")


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
def test_pt_files_of_sglang(tmp_path: Path, dtype: str) -> None:
    """The recorder's dict is read whatever its dtype, [L, E] or [T, L, E]."""
    torch = pytest.importorskip("torch")
    tokens = torch.arange(2 * 3 * 4).reshape(2, 3, 4).to(getattr(torch, dtype))
    path = tmp_path / "trace.pt"
    for counts in (tokens, tokens[0]):
        torch.save({"rank": 0, "logical_count": counts, "window": None}, path)
        trace = read_load(path)
        assert trace.tokens.shape == (tokens.shape if counts.ndim == 3 else (1, 3, 4))
        assert loaded(trace).reshape(-1).tolist() == list(range(counts.numel()))
        assert trace.tokens.dtype == (np.int64 if dtype == "float32" else dtype)


def test_pt_files_of_another_form_are_refused(tmp_path: Path) -> None:
    """Other keys, other values, damage and pickled code are refused, never executed."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "trace.pt"
    with pytest.raises(FileNotFoundError):
        read_trace(path)
    ones = torch.ones(2, 3, dtype=torch.int64)
    refused = [
        {"records": [], "last_physical_to_logical_map": ones},
        ones,
        {"logical_count": [[1, 2]]},
        {"logical_count": ones.bool()},
        {"logical_count": ones.to(torch.bfloat16)},
        {"logical_count": ones.to_sparse()},
        {"logical_count": -ones},
        {"logical_count": ones, "bomb": Bomb()},
    ]
    for content in refused:
        torch.save(content, path)
        assert refusal(path).problem
    torch.save({"logical_count": ones}, path)
    intact = path.read_bytes()
    for content in (b"", b"PK", intact[:100], intact[:-40], pickle.dumps(Bomb())):
        path.write_bytes(content)
        assert refusal(path).problem


# Fuzz: a trace or FormatError, whatever the bytes

_IDS = np.array([[[0, 1], [2, 3]], [[3, -1], [1, 0]]])
_TOKENS = np.array([[[0, 0, 0], [5, 1, 7]], [[0, 0, 0], [2, 4, 6]]])
INTACT = [
    (".json", as_json(_TOKENS)),
    (".csv", as_csv(_TOKENS)),
    (".npy", as_npy(_TOKENS)),
    (".npy", as_npy(_TOKENS.astype(np.float64))),
    (".npz", as_npz(counts=_TOKENS)),
    (".npz", as_npz(topk=_IDS, generation=np.array([0, 1]))),
]


def survives(path: Path) -> None:
    """Read whatever it is: the only error is FormatError, and what is read can be summed."""
    try:
        trace = read_trace(path)
    except FormatError:
        return
    with suppress(InvalidTokensError):  # the sum may pass 2^63-1
        assert trace.load().min() >= 0


@pytest.mark.filterwarnings(ONE_GPU)
@pytest.mark.parametrize("suffix", WRITERS)
@given(content=st.binary(max_size=200), magic=st.sampled_from([b"", b"\x93NUMPY\x01\x00", b"PK"]))
@settings(max_examples=60, deadline=None)
def test_no_bytes_crash_a_reader(folder: Path, suffix: str, content: bytes, magic: bytes) -> None:
    """Random bytes, also behind a format's magic number."""
    survives(written(folder, suffix, magic + content))


@pytest.mark.filterwarnings(ONE_GPU)
@pytest.mark.parametrize(("suffix", "intact"), INTACT)
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_no_damage_crashes_a_reader(
    damage: Callable[[st.DataObject, bytes], bytes],
    folder: Path,
    suffix: str,
    intact: bytes,
    data: st.DataObject,
) -> None:
    """Valid files with bytes changed, cut short or prolonged."""
    survives(written(folder, suffix, damage(data, intact)))


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw lists and objects of such leaves, in any nesting."""
    keys = st.sampled_from(["logical_count", "item", "logical_count.item", ""])
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=2),
        max_leaves=12,
    )


@pytest.mark.filterwarnings(ONE_GPU)
@given(
    value=nested(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)),
    wrapped=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_no_json_crashes_the_reader(folder: Path, value: Any, wrapped: bool) -> None:
    """Valid JSON of any structure, and the near-JSON that Python writes for NaN."""
    content = json.dumps({"logical_count": value} if wrapped else value)
    survives(written(folder, ".json", content.encode()))


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"logical_count":[', '{"logical_count":'])
def test_deep_nesting_is_refused(tmp_path: Path, opening: str) -> None:
    """Nesting without end neither overflows a stack nor hangs."""
    assert refusal(written(tmp_path, ".json", (opening + "[" * 50_000).encode())).problem
