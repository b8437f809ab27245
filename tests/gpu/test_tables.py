"""A placement as the kernels read it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from eplb_opt.errors import InvalidPlacementError
from eplb_opt.gpu.tables import Shape, make_tables, read_tables
from eplb_opt.placement import Placement
from eplb_opt.routers import Matching, Metro
from eplb_opt.testing import placements


@given(placements())
def test_what_is_written_is_read_back(placement: Placement) -> None:
    """All but second copies on a GPU, and the order of routing."""
    read, order = read_tables(make_tables(placement), Shape.of(placement))
    np.testing.assert_array_equal(read.candidates, placement.candidates)
    kept = read.slots.reshape(placement.slots.shape)
    assert (kept[kept >= 0] == placement.slots[kept >= 0]).all()
    by_candidates = np.argsort(placement.candidates, axis=1, kind="stable")
    np.testing.assert_array_equal(order, by_candidates)


def test_metro_routes_in_its_own_order() -> None:
    """An order of one's own is the tables'."""
    placement = Placement([[0, 1], [0, 2]])
    order = read_tables(make_tables(placement, Metro(order=[2, 0, 1])), Shape.of(placement))[1]
    assert order.tolist() == [[2, 0, 1]]


def test_rows_are_whole_loads() -> None:
    """A layer's row begins where the GPU can load 16 bytes."""
    for gpus, slots in ((1, 1), (3, 5), (33, 2)):
        assert Shape(1, gpus, slots, gpus * slots).row % 4 == 0


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ((1, 1025, 1, 1), "1025 GPUs"),
        ((1, 1, 1, 2049), "2049 experts"),
        ((1, 1, 2**16, 1), "65536 slots"),
        ((1, 0, 1, 1), "0 GPUs"),
    ],
)
def test_sizes_above_the_limits_are_refused(shape: tuple[int, ...], what: str) -> None:
    """The error says what is too large and how large it may be."""
    with pytest.raises(InvalidPlacementError, match=what):
        Shape(*shape)


def test_methods_without_a_kernel_are_refused() -> None:
    """The error names those that have one."""
    for method in ("flow", Matching(lexicographic=True)):
        with pytest.raises(ValueError, match="optimal"):
            make_tables(Placement([[0]]), method)
