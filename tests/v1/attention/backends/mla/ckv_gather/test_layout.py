# SPDX-License-Identifier: Apache-2.0
"""The rank-major plan of a batch, its staged form and the index pages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.attention.backends.mla.ckv_gather import geometry as g
from vllm.v1.attention.backends.mla.ckv_gather.layout import (
    RowShares,
    StagedLayout,
    plan_index_pages,
    plan_layout,
    plan_own_rows,
)


def plan(lengths, world=4, interleave=4):
    tensor = torch.tensor(lengths, dtype=torch.int32)
    return plan_layout(tensor, dcp_world_size=world, interleave=interleave)


def test_worked_example():
    layout = plan([19, 33])
    assert layout.local_lens.tolist() == [[7, 9], [4, 8], [4, 8], [4, 8]]
    assert layout.starts.tolist() == [[0, 7], [0, 4], [0, 4], [0, 4]]
    assert layout.totals() == [16, 12, 12, 12]
    assert (layout.padded, layout.visible) == (16, 52)
    assert layout.local_lens.dtype == layout.starts.dtype == torch.int64
    assert layout.seq_lens.tolist() == [19, 33]


def test_the_same_function_lays_out_pools():
    layout = plan([19 // 4, 33 // 4], interleave=1)
    assert layout.local_lens.tolist() == [[1, 2]] * 4
    assert (layout.padded, layout.visible) == (3, 12)


@given(
    st.lists(st.integers(0, 500), max_size=8), st.integers(1, 8), st.sampled_from([1, 4, 16, 64])
)
def test_plan_agrees_with_the_integer_formulas(lengths, world, interleave):
    layout = plan(lengths, world, interleave)
    split = {"dcp_world_size": world, "interleave": interleave}
    for rank in range(world):
        expected = [g.local_length(n, rank, **split) for n in lengths]
        assert layout.local_lens[rank].tolist() == expected
        assert layout.starts[rank].tolist() == [sum(expected[:r]) for r in range(len(lengths))]
        assert sum(expected) <= layout.padded
    assert layout.padded == max(layout.totals())
    assert layout.visible == sum(lengths)


def test_case_2_ranks_that_own_nothing():
    assert plan([4]).local_lens.tolist() == [[4], [0], [0], [0]]
    assert plan([5]).local_lens.tolist() == [[4], [1], [0], [0]]
    assert plan([4]).padded == plan([5]).padded == 4


def test_nothing_visible():
    for lengths in ([], [0], [0, 0]):
        layout = plan(lengths)
        assert (layout.padded, layout.visible) == (0, 0)
        assert layout.local_lens.shape == (4, len(lengths))


def test_case_5_the_plan_counts_cached_tokens():
    layout = plan([40_064] * 4)
    assert layout.visible == 160_256
    assert layout.padded == 40_064


@pytest.mark.parametrize(
    "lengths, part",
    [
        (torch.zeros(2, device="meta", dtype=torch.int32), "meta"),
        (torch.zeros(2), "float32"),
        (torch.zeros((1, 2), dtype=torch.int64), "(1, 2)"),
        (torch.tensor([3, -1]), "-1"),
        (torch.tensor([2**31]), "2147483648"),
    ],
)
def test_refused_lengths(lengths, part):
    with pytest.raises(ValueError) as error:
        plan_layout(lengths, dcp_world_size=4, interleave=4)
    assert part in str(error.value)


def test_staging_keeps_the_numbers_as_int32():
    layout = plan([19, 33, 0])
    staged = StagedLayout.stage(layout, "cpu")
    for name in ("local_lens", "starts", "seq_lens"):
        tensor = getattr(staged, name)
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        assert tensor.tolist() == getattr(layout, name).tolist()
    assert staged.padded == 16


def test_case_17_staging_shares_nothing_with_the_batch_before():
    kept = []
    for lengths in ([0, 1], [2, 1], [1, 3], [0, 0]):
        layout = plan(lengths)
        kept.append((layout, StagedLayout.stage(layout, "cpu")))
    for layout, staged in kept:
        assert staged.starts.tolist() == layout.starts.tolist()
        assert staged.local_lens.tolist() == layout.local_lens.tolist()


def test_index_pages_start_on_a_page_of_their_own():
    starts, pages = plan_index_pages(torch.tensor([0, 64, 65, 1, 0, 128]))
    assert starts.tolist() == [0, 0, 1, 3, 4, 4]
    assert pages == 6
    assert plan_index_pages(torch.zeros(0, dtype=torch.int64))[1] == 0


def test_the_last_row_that_int32_can_name():
    layout = plan([2**31 - 1], world=1)
    assert (layout.padded, layout.num_requests) == (2**31 - 1, 1)
    with pytest.raises(ValueError, match="2147483648 gathered rows do not fit"):
        plan_layout(torch.tensor([2**31]), dcp_world_size=1, interleave=4)
    assert plan([4, 5, 6]).num_requests == 3


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 8, 9, 100])
def test_shares_are_consecutive_and_cover_every_row_once(num_rows, world):
    shares = RowShares(num_rows, world)
    slices = [shares.rows_of(rank) for rank in range(world)]
    assert [row for own in slices for row in range(num_rows)[own]] == list(range(num_rows))
    for rank, own in enumerate(slices):
        # A share begins where its span of the exchange does; only the last ones are short.
        size = own.stop - own.start
        assert 0 <= size <= shares.rows_per_share == -(-num_rows // world)
        if size:
            assert own.start == rank * shares.rows_per_share
    assert shares.exchanged_rows == (0 if world == 1 else world * shares.rows_per_share)


def test_without_shares_every_rank_takes_all_rows():
    assert [RowShares(5, 1).rows_of(rank) for rank in range(4)] == [slice(0, 5)] * 4


def test_own_rows_follow_the_spans_request_after_request():
    """Contexts of 9, 0 and 17 tokens on two ranks; 5, 3 and 1 tokens behind them."""
    tokens = plan_layout(torch.tensor([9, 0, 17]), dcp_world_size=2, interleave=4)
    assert tokens.padded == 5 + 9
    starts = plan_own_rows(tokens, torch.tensor([5, 3, 1]))
    rows = [int(starts[r]) + t for r, begin, own in ((0, 9, 5), (1, 0, 3), (2, 17, 1))
            for t in range(begin, begin + own)]  # fmt: skip
    assert rows == list(range(28, 28 + 9))
