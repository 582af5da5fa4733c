# SPDX-License-Identifier: Apache-2.0
"""Gathered rows and causal lengths against plain Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.attention.backends.mla.ckv_gather import geometry as g
from vllm.v1.attention.backends.mla.ckv_gather.layout import plan_layout, plan_own_rows
from vllm.v1.attention.backends.mla.ckv_gather.remap import causal_lengths, gathered_rows


def test_worked_causal_lengths():
    lengths = causal_lengths(torch.tensor([5, 12]), torch.tensor([0, 2, 5]))
    assert lengths.tolist() == [4, 5, 10, 11, 12]
    assert lengths.dtype == torch.int32


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_case_3_lengths_are_global(length):
    # With N=4 a rank stores at most 4 of these; the last row still sees all of them.
    lengths = causal_lengths(torch.tensor([length]), torch.tensor([0, length]))
    assert lengths.tolist() == list(range(1, length + 1))


def test_case_11_prefix_of_one_token():
    lengths = causal_lengths(torch.tensor([3671]), torch.tensor([0, 3670]))
    assert lengths.tolist() == list(range(2, 3672))


def test_padding_rows_see_nothing():
    lengths = causal_lengths(torch.tensor([3]), torch.tensor([0, 3]), num_tokens=5)
    assert lengths.tolist() == [1, 2, 3, 0, 0]
    empty = torch.zeros(0, dtype=torch.int32)
    assert causal_lengths(empty, torch.tensor([0]), num_tokens=2).tolist() == [0, 0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_causal_lengths_against_a_loop(requests):
    starts, expected = [0], []
    for cached, new in requests:
        expected += [cached + i + 1 for i in range(new)]
        starts.append(starts[-1] + new)
    seq_lens = torch.tensor([cached + new for cached, new in requests], dtype=torch.int32)
    assert causal_lengths(seq_lens, torch.tensor(starts, dtype=torch.int32)).tolist() == expected


@given(
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 9)), min_size=1, max_size=5),
    st.integers(1, 5),
    st.sampled_from([1, 4, 8]),
)
def test_rows_cover_the_gathered_records_once(requests, world, interleave):
    """Requests of a context and own tokens, which lie behind the spans."""
    split = {"dcp_world_size": world, "interleave": interleave}
    contexts, own = (torch.tensor(numbers) for numbers in zip(*requests, strict=True))
    layout = plan_layout(contexts, **split)
    # The gathered buffer as the ranks would fill it, by hand.
    gathered = {}
    for rank in range(world):
        row = rank * layout.padded
        for request, length in enumerate(contexts.tolist()):
            for local in range(g.local_length(length, rank, **split)):
                gathered[row] = (request, g.global_index_of(local, rank, **split))
                row += 1
    row = world * layout.padded
    for request, (begin, count) in enumerate(requests):
        for token in range(begin, begin + count):
            gathered[row] = (request, token)
            row += 1
    lengths = (contexts + own).tolist()
    width = max(*lengths, 1)
    ids = torch.full((len(lengths), width), -1, dtype=torch.int32)
    for request, length in enumerate(lengths):
        ids[request, :length] = torch.arange(length - 1, -1, -1)
    req_id = torch.arange(len(lengths), dtype=torch.int32)
    rows = gathered_rows(
        ids, req_id, layout.starts, layout.padded, **split,
        context_lens=layout.seq_lens, own_starts=plan_own_rows(layout, own),
    )  # fmt: skip
    assert rows.dtype == torch.int32
    seen = []
    for request in range(len(lengths)):
        for token, row in zip(ids[request].tolist(), rows[request].tolist(), strict=True):
            if token < 0:
                assert row == -1
            else:
                assert gathered[row] == (request, token)
                seen.append(row)
    assert sorted(seen) == sorted(gathered)


def test_padding_rows_and_poison_become_minus_one():
    ids = torch.full((3, 4), 0x7FFFFFFF, dtype=torch.int32)
    ids[0] = torch.tensor([5, -1, 0, -1])
    layout = plan_layout(torch.tensor([6]), dcp_world_size=4, interleave=4)
    rows = gathered_rows(
        ids, torch.tensor([0, -1, -1]), layout.starts, layout.padded,
        dcp_world_size=4, interleave=4,
    )  # fmt: skip
    assert rows.tolist() == [[5, -1, 0, -1], [-1] * 4, [-1] * 4]


def test_case_13_large_rows_are_kept():
    starts = torch.zeros((4, 1), dtype=torch.int32)
    padded = 2**29 - 1
    rows = gathered_rows(
        torch.tensor([[15]]), torch.tensor([0]), starts, padded, dcp_world_size=4, interleave=4
    )
    assert rows.item() == 3 * padded + 3


def test_no_requests_at_all():
    starts = torch.zeros((4, 0), dtype=torch.int32)
    rows = gathered_rows(
        torch.zeros((2, 3), dtype=torch.int32), torch.tensor([-1, -1]), starts, 0,
        dcp_world_size=4, interleave=4,
    )  # fmt: skip
    assert rows.tolist() == [[-1] * 3] * 2
