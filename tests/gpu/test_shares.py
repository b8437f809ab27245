"""A rank's part of experts that are split over slots, on the CPU and by the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import host_build
import numpy as np
import pytest
from numpy.typing import NDArray

from eplb_opt import solve_routing
from eplb_opt.demand import count_tokens
from eplb_opt.errors import InvalidPlacementError, InvalidTokensError
from eplb_opt.placement import Placement
from eplb_opt.testing import Problem

torch = pytest.importorskip("torch")

from eplb_opt.gpu.shares import assign_shares, launch_of, shares_of  # noqa: E402


def test_ranks_share_split_experts_to_the_token(
    fibers: host_build.Fibers,
    draw_problem: Callable[..., Problem],
    draw_ids: Callable[..., NDArray[np.int64]],
) -> None:
    """Each rank's part is its part of the whole batch's assignment, whoever computes it."""
    rng = np.random.default_rng(9)
    for rows in (0, 1, 40, 300):
        placement = draw_problem(rng, 8, 5, 24, 2, 1).placement
        ids = draw_ids(rng, placement, (), (3, rows, 4))
        by_rank = np.stack([count_tokens(ids[:, r], 24) for r in range(3)])
        routing = solve_routing(placement, by_rank.sum(axis=0), objective="tokens")
        whole = routing.assign(ids)
        slots, shares = (torch.from_numpy(a.copy()) for a in shares_of(routing))
        for rank in range(3):
            local = torch.from_numpy(ids[:, rank].copy())
            before = torch.from_numpy(by_rank[:rank].sum(axis=0).astype(np.int32))
            physical = assign_shares(local, slots, shares, before)
            np.testing.assert_array_equal(physical.numpy(), whole[:, rank])
            written = torch.full_like(physical, -77)
            fibers.launch(launch_of(local, slots, shares, before, written), rows + rank)
            assert torch.equal(written, physical)


def test_tokens_beyond_the_shares_and_unknown_ids_get_the_sentinel(
    fibers: host_build.Fibers,
) -> None:
    """What nobody has a share for is -2, on the CPU and by the kernel."""
    slots = torch.tensor([[[0, 3], [1, -1]]]).int()
    shares = torch.tensor([[[1, 1], [1, 0]]]).int()
    ids = torch.tensor([0, 0, 0, 1, 1, -1, 2, -5, 2**33])
    before = torch.zeros(1, 2, dtype=torch.int32)
    physical = assign_shares(ids, slots, shares, before)
    assert physical.tolist() == [0, 3, -2, 1, -2, -1, -2, -2, -2]
    written = torch.full_like(physical, -77)
    fibers.launch(launch_of(ids, slots, shares, before, written))
    assert torch.equal(written, physical)


def test_counts_that_add_up_beyond_int32(fibers: host_build.Fibers) -> None:
    """Shares and the ranks before fit int32 each, their sums do not; a negative count is 0."""
    most = 2**31 - 1
    slots = torch.tensor([[[0, 1], [2, -1]]]).int()
    shares = torch.tensor([[[most, most], [2, 0]]]).int()
    before = torch.tensor([[most, -3]]).int()
    ids = torch.tensor([0, 0, 1, 0, 1, 1])
    physical = assign_shares(ids, slots, shares, before)
    assert physical.tolist() == [1, 1, 2, 1, 2, -2]
    written = torch.full_like(physical, -77)
    fibers.launch(launch_of(ids, slots, shares, before, written))
    assert torch.equal(written, physical)


def test_shares_are_of_one_batch_that_fits() -> None:
    """Several batches, or a slot with too many tokens, are refused; the message says where."""
    placement = Placement([[0, 1], [0, 2]])
    several = solve_routing(placement, [[4, 1, 0], [6, 0, 2]], objective="tokens")
    with pytest.raises(InvalidTokensError, match="of one batch; this routing has 2"):
        shares_of(several)
    large = solve_routing(placement, [2**33 + 4, 1, 0])
    with pytest.raises(InvalidTokensError, match="layer 0, expert 0: slot 2 takes 8589934596"):
        shares_of(large)


def test_operator_is_well_formed() -> None:
    """What torch.library checks: schema, fake kernel."""
    slots, shares = torch.tensor([[[0, 2]]]).int(), torch.tensor([[[2, 3]]]).int()
    args = (torch.tensor([0, -1, 0]), slots, shares, torch.tensor([[1]]).int())
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.eplb_opt.assign_shares.default, args, test_utils=checks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.zeros(1, 2).int()}, r"\[layers, experts, copies\]"),
        ({"slots": torch.zeros(1, 2, 0).int()}, r"\[layers, experts, copies\]"),
        ({"slots": torch.zeros(1, 2049, 1).int()}, "2049 experts"),
        ({"slots": torch.zeros(1, 2, 2)}, "slots must be int32"),
        ({"shares": torch.zeros(1, 2, 3).int()}, "shares must be int32"),
        ({"before": torch.zeros(1, 3).int()}, "before must be int32"),
        ({"shares": torch.zeros(1, 4, 2).int()[:, ::2]}, "shares must be contiguous"),
        ({"topk_ids": torch.zeros(3)}, "int32 or int64"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    """A wrong dtype, shape or stride: an error before any launch."""
    args = {
        "topk_ids": torch.tensor([0, 1]),
        "slots": torch.zeros(1, 2, 2).int(),
        "shares": torch.zeros(1, 2, 2).int(),
        "before": torch.zeros(1, 2).int(),
    } | change
    with pytest.raises((InvalidTokensError, InvalidPlacementError), match=message):
        assign_shares(**args)
