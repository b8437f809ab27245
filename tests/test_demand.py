"""A batch's demand: what counts as tokens and ids, how they are counted, and who is blamed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from eplb_opt import _core
from eplb_opt.demand import as_tokens, as_topk_ids, count_tokens, reject_tokens
from eplb_opt.errors import InfeasibleError, InvalidTokensError
from eplb_opt.placement import Placement

MOST = _core.MAX_TOKENS_PER_EXPERT
LAYERED = Placement([[[0, 1], [0, 2]], [[2, 1], [1, 0]]])
FLAT = Placement([[0, 1], [0, 2]])
DEAD = Placement([[0, -1], [0, 2]], num_experts=3, allow_missing=True)

# --- tokens ---


def test_tokens_that_fit_are_taken_as_they_are() -> None:
    """A contiguous int64 array is passed on, not copied."""
    for placement, shape in ((LAYERED, (5, 2, 3)), (LAYERED, (2, 3)), (FLAT, (3,)), (FLAT, (0, 3))):
        tokens = np.ones(shape, np.int64)
        assert as_tokens(placement, tokens) is tokens


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.uint64, ">i8"])
def test_other_integers_are_converted(dtype: str) -> None:
    """Every integer type and memory order gives the same int64 tokens."""
    tokens = np.arange(12, dtype=dtype).reshape(2, 2, 3)
    for variant in (tokens, np.asfortranarray(tokens), tokens[::-1][::-1], tokens.tolist()):
        ready = as_tokens(LAYERED, variant)
        assert ready.dtype == np.int64
        assert ready.dtype.isnative
        assert ready.flags.c_contiguous
        assert ready.tolist() == tokens.tolist()


def test_misaligned_tokens_are_aligned() -> None:
    """A view into packed bytes becomes an aligned array of the same counts."""
    packed = np.frombuffer(b"\0" + np.arange(3).tobytes(), dtype=np.int64, offset=1)
    assert not packed.flags.aligned
    ready = as_tokens(FLAT, packed)
    assert ready.flags.aligned
    assert ready.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1.0, 2.0, 3.0], "must be integers, not float64"),
        ([True, False, True], "must be integers, not bool"),
        ([float("nan"), 1, 2], "must be integers, not float64"),
        ([2**80, 0, 0], "must be integers, not object"),
        (5, r"\[..., experts\].*\(3,\).*\(\)"),
        ([1, 2], r"\[..., experts\].*\(3,\).*not of shape \(2,\)"),
        ([[1], [2], [3]], r"not of shape \(3, 1\)"),
    ],
)
def test_what_is_no_count_is_refused(tokens: object, message: str) -> None:
    """Floats, bools and wrong shapes are refused with what was expected."""
    with pytest.raises(InvalidTokensError, match=message):
        as_tokens(FLAT, tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(3,), (2,), (3, 2), (1, 3), (2, 2, 3, 1), (4, 3)])
def test_layers_must_be_there(shape: tuple[int, ...]) -> None:
    """A placement with layers takes tokens with the same layers."""
    with pytest.raises(InvalidTokensError, match=r"\[..., layers, experts\] ending in \(2, 3\)"):
        as_tokens(LAYERED, np.zeros(shape, np.int64))


def test_unsigned_counts_do_not_wrap() -> None:
    """An unsigned count beyond the limit is refused, not taken for a negative one."""
    tokens = np.array([[0, 1, 2], [3, 2**64 - 1, 0]], dtype=np.uint64)
    with pytest.raises(InvalidTokensError, match="layer 1, expert 1 has 18446744073709551615"):
        as_tokens(LAYERED, tokens)


@pytest.mark.parametrize("count", [-1, -(2**63), MOST + 1, 2**63 - 1])
def test_counts_out_of_range_are_named(count: int) -> None:
    """The first wrong count is named with its batch, layer and expert."""
    tokens = np.zeros((4, 2, 3), np.int64)
    tokens[2, 1, 0] = tokens[3, 0, 0] = count
    with pytest.raises(InvalidTokensError, match=rf"batch \(2,\), layer 1, expert 0 has {count} "):
        reject_tokens(LAYERED, tokens)
    with pytest.raises(InvalidTokensError, match=rf"^expert 2 has {count} tokens; counts are 0 to"):
        reject_tokens(FLAT, np.array([0, 0, count]))
    with pytest.raises(InvalidTokensError, match=r"^batch \(0, 1\), expert 2"):
        reject_tokens(FLAT, np.array([[[0, 0, 0], [0, 0, count]]]))


def test_tokens_of_an_absent_expert_are_named() -> None:
    """Only tokens make an absent expert a problem."""
    reject_tokens(DEAD, np.array([[MOST, 0, 0], [0, 0, MOST]]))
    with pytest.raises(InfeasibleError, match=r"batch \(1,\), expert 1 has tokens but no replica"):
        reject_tokens(DEAD, np.array([[1, 0, 1], [1, 3, 1]]))


# --- top-k ids ---


@given(st.data(), st.integers(1, 9))
def test_counting_is_counting(data: st.DataObject, experts: int) -> None:
    """Counts of ids [..., rows, k] are what a loop counts; padding counts nowhere."""
    shapes = hnp.array_shapes(min_dims=2, max_dims=4, min_side=0, max_side=4)
    ids = data.draw(hnp.arrays(np.int64, shapes, elements=st.integers(-1, experts - 1)))
    counts = count_tokens(ids, experts)
    assert counts.dtype == np.int64
    assert counts.shape == (*ids.shape[:-2], experts)
    for at in np.ndindex(*ids.shape[:-2]):
        chosen = ids[at].ravel().tolist()
        assert counts[at].tolist() == [chosen.count(expert) for expert in range(experts)]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.uint64])
def test_ids_become_int32(dtype: type[np.integer]) -> None:
    """Ids of any integer type are converted; contiguous int32 ones are passed on."""
    ids = np.arange(6, dtype=dtype).reshape(3, 2)
    ready = as_topk_ids(ids.T, 6)
    assert ready.dtype == np.int32
    assert ready.flags.c_contiguous
    assert ready.tolist() == ids.T.tolist()
    assert as_topk_ids(ready, 6) is ready


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 1], [2, 3]], r"topk_ids\[1, 1\] is 3; ids are 0 to 2, or -1 for padding"),
        ([[[0, -2]]], r"topk_ids\[0, 0, 1\] is -2"),
        (np.array([[2**64 - 1]], dtype=np.uint64), r"topk_ids\[0, 0\] is 18446744073709551615"),
        ([0, 1], r"\[..., rows, k\], not int64 of shape \(2,\)"),
        ([[0.0]], "not float64"),
        ([[True]], "not bool"),
    ],
)
def test_bad_ids_are_refused(ids: object, message: str) -> None:
    """An id that is no expert is named with its place; -1 is padding and nothing else is."""
    with pytest.raises(InvalidTokensError, match=message):
        as_topk_ids(ids, 3)  # type: ignore[arg-type]


def test_a_step_without_tokens_counts_zero() -> None:
    """No batches, no rows, or only padding: zeros of the right shape."""
    for ids in (np.zeros((0, 5, 2), int), np.zeros((2, 0, 2), int), np.full((2, 3, 2), -1)):
        counts = count_tokens(ids, 4)
        assert counts.shape == (len(ids), 4)
        assert not counts.any()


def test_inputs_are_never_written_to() -> None:
    """Read-only ids and tokens are fine."""
    ids: NDArray[np.int64] = np.array([[0, 1], [1, -1]])
    ids.flags.writeable = False
    assert count_tokens(ids, 2).tolist() == [1, 2]
    tokens = np.array([1, 2, 3])
    tokens.flags.writeable = False
    reject_tokens(FLAT, as_tokens(FLAT, tokens))
