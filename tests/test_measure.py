"""What a placement's makespan is: splits and sums over windows."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from eplb_opt.measure import Measure, Split, free_split
from eplb_opt.metrics import PlacementMetrics
from eplb_opt.placement import Placement


@st.composite
def placed_loads(draw: st.DrawFn) -> tuple[Placement, NDArray[np.float64]]:
    """Draw a placement of one or two layers and a load for it."""
    layers, gpus, slots = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    experts = draw(st.integers(1, gpus * slots))
    spare = st.lists(st.integers(0, experts - 1), min_size=gpus * slots - experts)
    rows = [
        draw(st.permutations([*range(experts), *draw(spare)[: gpus * slots - experts]]))
        for _ in range(layers)
    ]
    load = draw(
        st.lists(
            st.one_of(st.just(0.0), st.floats(0, 1e12), st.integers(0, 9).map(float)),
            min_size=layers * experts,
            max_size=layers * experts,
        )
    )
    placement = Placement(np.array(rows).reshape(layers, gpus, slots), experts)
    return placement, np.array(load).reshape(layers, experts)


@given(placed_loads())
def test_free_split_is_the_largest_share_of_any_gpu_set(
    drawn: tuple[Placement, NDArray[np.float64]],
) -> None:
    """By max-flow = min-cut: the load confined to a set of GPUs, by GPU, over all sets."""
    placement, load = drawn
    for layer in range(placement.num_layers):
        slots = np.array(placement.slots[layer])
        largest = 0.0
        for size in range(1, placement.num_gpus + 1):
            for chosen in combinations(range(placement.num_gpus), size):
                outside = np.delete(slots, chosen, axis=0)
                confined = np.setdiff1d(np.arange(placement.num_experts), outside)
                largest = max(largest, load[layer, confined].sum() / size)
        found = free_split(placement, load)[layer]
        assert found == pytest.approx(largest, rel=1e-9)
        assert found <= PlacementMetrics.of(placement, load).peak[layer] * (1 + 1e-9)


def test_windows_sum_up() -> None:
    """Mean, worst and quantiles of the windows' makespans; bounds sum up likewise."""
    placement = Placement([[0], [1]])
    windows = np.array([[[4.0, 1.0]], [[0.0, 1.0]], [[2.0, 3.0]]])
    for over, makespan in (("mean", 8 / 3), ("worst", 4), (0, 1), (0.5, 3), (0.75, 3.5), (1, 4)):
        assert Measure(over_windows=over).makespan(placement, windows).tolist() == [makespan]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "half"}, "split is 'equal' or 'free', not 'half'"),
        ({"over_windows": "best"}, "over_windows is 'mean', 'worst' or from 0 to 1, not 'best'"),
        ({"over_windows": 1.5}, "from 0 to 1, not 1.5"),
        ({"over_windows": float("nan")}, "from 0 to 1, not nan"),
        ({"over_windows": True}, "from 0 to 1, not True"),
        ({"over_windows": np.array([0.5, 0.6])}, "from 0 to 1, not array"),
    ],
)
def test_wrong_measures_are_refused(wrong: dict[str, object], message: str) -> None:
    """The message says what there is."""
    with pytest.raises(ValueError, match=message):
        Measure(**wrong)  # type: ignore[arg-type]


def test_splits_by_name() -> None:
    """A split's name does as well."""
    assert Measure("free").split is Split.FREE  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="split is 'equal' or 'free', not 'half'"):
        Split("half")


def test_quantiles_of_any_type() -> None:
    """A number of numpy is one."""
    assert Measure(over_windows=np.float32(0.5)).over_windows == 0.5  # type: ignore[arg-type]
