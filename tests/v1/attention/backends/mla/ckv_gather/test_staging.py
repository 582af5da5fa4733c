# SPDX-License-Identifier: Apache-2.0
"""One transfer a batch, slots that are not overwritten in flight, and page tables."""

import pytest
import torch

from vllm.v1.attention.backends.mla.ckv_gather.layout import StagedLayout
from vllm.v1.attention.backends.mla.ckv_gather.staging import (
    SLOTS,
    PageTables,
    StagingRing,
    device_bytes,
)


def test_parts_become_views_of_one_slot():
    ring = StagingRing("cpu", 20)
    parts = (torch.arange(6).view(2, 3), torch.zeros(0, 4, dtype=torch.int64), torch.tensor([7]))
    views = ring.stage(parts)
    for part, view in zip(parts, views, strict=True):
        assert view.dtype == torch.int32 and view.is_contiguous()
        assert view.tolist() == part.tolist()
    storage = views[0].untyped_storage().data_ptr()
    assert all(view.untyped_storage().data_ptr() == storage for view in views)


def test_batches_in_flight_keep_their_numbers():
    # One batch runs on the device while the next is prepared, and one more is scheduled.
    assert SLOTS >= 3
    ring = StagingRing("cpu", 4)
    kept = [ring.stage([torch.full((4,), batch)])[0] for batch in range(SLOTS)]
    assert [view.tolist() for view in kept] == [[batch] * 4 for batch in range(SLOTS)]
    ring.stage([torch.full((4,), 99)])
    # Only the oldest slot was taken again.
    assert [view[0].item() for view in kept] == [99, *range(1, SLOTS)]


def test_a_slot_waits_for_its_own_copy_only():
    class Event:
        def __init__(self, name):
            self.name = name

        def synchronize(self):
            calls.append(("wait", self.name))

        def record(self):
            calls.append(("record", self.name))

    calls: list[tuple[str, int]] = []
    ring = StagingRing("cpu", 1)
    ring._copied = [Event(slot) for slot in range(SLOTS)]
    for _ in range(SLOTS + 1):
        ring.stage([torch.tensor([1])])
    assert calls == [
        (what, slot % SLOTS) for slot in range(SLOTS + 1) for what in ("wait", "record")
    ]


def test_more_numbers_than_a_slot_are_refused():
    ring = StagingRing("cpu", 5)
    with pytest.raises(ValueError, match="stages 6 numbers, a slot holds 5"):
        ring.stage([torch.zeros(2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)])
    assert ring.stage([torch.arange(5)])[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_host_does_not_wait():
    ring = StagingRing("cuda", 1000)
    tables = PageTables("cuda", 4, 10)
    assert ring._host.is_pinned()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in range(3 * SLOTS):
            view, starts = ring.stage([torch.full((990,), batch), torch.tensor([0, 3, 4])])
            table = tables.fill(starts, 3, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert view.is_cuda and view.unique().tolist() == [3 * SLOTS - 1]
    assert table.tolist() == [[0, 1, 2], [3, 4, 4], [4, 4, 4]]


def test_page_tables_reuse_their_memory_and_name_valid_pages_only():
    tables = PageTables("cpu", 3, 4)
    wide = tables.fill(torch.tensor([0, 3, 4], dtype=torch.int32), 4, 6)
    assert wide.tolist() == [[0, 1, 2, 3], [3, 4, 5, 5], [4, 5, 5, 5]]
    narrow = tables.fill(torch.tensor([0], dtype=torch.int32), 1, 0)
    assert narrow.tolist() == [[0]]
    assert narrow.data_ptr() == wide.data_ptr()
    # Tables of one batch keep apart: three rows, and the one that windows share.
    first = tables.fill(torch.tensor([0, 2], dtype=torch.int32), 4, 9)
    rest = [tables.fill(torch.tensor([5], dtype=torch.int32), 4, 9, row) for row in (2, 3)]
    assert first.tolist() == [[0, 1, 2, 3], [2, 3, 4, 5]]
    assert [table.tolist() for table in rest] == [[[5, 6, 7, 8]]] * 2


def test_a_whole_plan_is_one_transfer_without_new_memory(make_gather, monkeypatch):
    gather = make_gather(4)
    staged: list[int] = []
    real = StagingRing.stage
    monkeypatch.setattr(
        StagingRing, "stage", lambda self, parts: staged.append(len(parts)) or real(self, parts)
    )

    def lay_out(lengths):
        spans = gather.plan_spans(lengths, [1] * len(lengths), len(lengths))
        (window,) = gather.layout_batch(lengths, spans, torch.device("cpu")).windows
        return window.layout

    first, again = lay_out([19, 33]), lay_out([1, 2, 3])
    assert staged == [4, 4]
    # Each view holds its own layout's numbers, though they travelled together.
    for plan in (first, again):
        for layout, view in (
            (plan.tokens, plan.staged_tokens),
            (plan.pools, plan.staged_pools),
        ):
            alone = StagedLayout.stage(layout, "cpu")
            assert view.padded == alone.padded
            for name in ("local_lens", "starts", "seq_lens"):
                assert torch.equal(getattr(view, name), getattr(alone, name))
    ring, tables = gather._staged
    for plan in (first, again):
        for tensor in (
            plan.staged_tokens.starts,
            plan.staged_tokens.local_lens,
            plan.staged_tokens.seq_lens,
            plan.staged_pools.starts,
            plan.staged_pools.local_lens,
            plan.staged_pools.seq_lens,
            plan.page_starts,
        ):
            assert tensor.untyped_storage().data_ptr() == ring._staged.untyped_storage().data_ptr()
        assert plan.page_table.data_ptr() == tables._table.data_ptr()
    taken = (ring._staged, tables._columns, tables._table)
    assert sum(tensor.nbytes for tensor in taken) == device_bytes(
        gather.max_num_seqs, 4, gather.max_pages
    )
    # The largest window fits: as many requests as reserved, one of them the longest.
    lengths = [1] * gather.max_num_seqs
    lengths[3] = gather.max_visible_tokens - gather.max_num_seqs + 1
    assert lay_out(lengths).page_table.shape == (gather.max_num_seqs, gather.max_pages)


def test_case_8_padding_rows_are_not_part_of_the_plan(make_gather, make_common):
    gather = make_gather(2)
    plain = gather.plan_batch(
        make_common([20, 30], [120, 30]), num_decode_tokens=0, capturing=False
    )
    padded = gather.plan_batch(
        make_common([20, 30], [120, 30], pad_rows=6, pad_tokens=14),
        num_decode_tokens=0,
        capturing=False,
    )
    (plain,), (padded,) = plain.windows, padded.windows
    assert plain.layout.tokens.seq_lens.tolist() == [120, 30]
    assert padded.layout.tokens.seq_lens.tolist() == [120, 30]
    assert padded.layout.staged_tokens.starts.shape == (2, 2)
    # Their rows are selected for and attend all the same, and get nothing.
    assert (plain.rows, padded.rows) == (slice(0, 50), slice(0, 64))
    assert gather.counters.gathered_query_tokens == 100
    assert gather.counters.gathered_visible_tokens == 300
