# SPDX-License-Identifier: Apache-2.0
"""Bytes reserved equal bytes borrowed, with vLLM's own workspace manager."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.platforms.ckv_reference import declare_torchvision_ops
from vllm.v1.attention.backends.mla.ckv_gather import geometry as g
from vllm.v1.attention.backends.mla.ckv_gather.layout import plan_index_pages, plan_layout
from vllm.v1.attention.backends.mla.ckv_gather.workspace import KernelScratch, WorkspacePlan

# vLLM's workspace module imports torchvision, which needs this beside a CPU build of torch.
declare_torchvision_ops()

from vllm.v1.worker import workspace as stock  # noqa: E402

PAGE_SIZES = [64, 128, 192, 256, 320, 512, 1280, 2048, 2304, 4352, 8704]


def geometry(page_size, world=4, record=g.FP8_DS_MLA, interleave=4):
    return g.PageGeometry(page_size, record, 4, interleave, world)


def layouts(lengths, world, interleave=4):
    lengths = torch.tensor(lengths, dtype=torch.int64)
    return (
        plan_layout(lengths, dcp_world_size=world, interleave=interleave),
        plan_layout(lengths // 4, dcp_world_size=world, interleave=interleave // 4),
    )


def borrow_index(plan, pools):
    return plan.borrow_index(pools, plan_index_pages(pools.seq_lens)[1])


@pytest.fixture(autouse=True, scope="module")
def no_accelerator_cache():
    # The manager empties the accelerator's cache before it allocates; without one torch raises.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        yield


@pytest.fixture
def manager():
    stock.reset_workspace_manager()
    stock.init_workspace_manager(torch.device("cpu"))
    yield stock.current_workspace_manager()
    stock.reset_workspace_manager()


def allocated(manager):
    return manager._current_workspaces[0]


@pytest.mark.parametrize("record", [g.FP8_DS_MLA, g.NVFP4_DS_MLA], ids=lambda r: r.name)
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_reserved_equals_borrowed(manager, page_size, world, record):
    max_tokens, max_num_seqs = 5000, 8
    plan = WorkspacePlan.from_geometry(geometry(page_size, world, record), max_tokens, max_num_seqs)
    assert plan.reserve() == torch.device("cpu")
    before = allocated(manager)
    reserved = plan.num_bytes
    assert reserved == before.numel()
    manager.lock()
    # The unluckiest admitted batch: every request ends just after rank 0's turn.
    step = 4 * world
    lengths = [step * 2 + 4] * 7
    lengths.append(max_tokens - sum(lengths))
    layout, pools = layouts(lengths, world)
    assert layout.visible == max_tokens
    latents, index = plan.borrow_latents(layout), borrow_index(plan, pools)
    assert allocated(manager) is before
    assert latents.records.shape == (world * layout.padded, record.record_bytes)
    assert index.records.shape == (world * pools.padded, 132)
    assert index.pages.shape[1] == 8448
    # Both exchanges take the same bytes, one after the other; within one they are disjoint.
    ends = []
    for tensors in ((latents.records,), (index.records, index.pages)):
        spans = []
        for tensor in tensors:
            assert tensor.is_contiguous() and tensor.dtype == torch.uint8
            begin = tensor.data_ptr() - before.data_ptr()
            assert begin % 256 == 0
            spans.append((begin, begin + tensor.numel()))
        assert [b for span in spans for b in span] == sorted(b for span in spans for b in span)
        ends.append(spans[-1][1])
    assert max(ends) <= reserved


@pytest.mark.parametrize("record", [g.FP8_DS_MLA, g.NVFP4_DS_MLA], ids=lambda r: r.name)
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_early_exchange_has_memory_of_its_own(manager, page_size, world, record):
    """Context and own rows of every division of the unluckiest batch, none of it in the scratch."""
    max_tokens, step = 5000, 4 * world
    size = geometry(page_size, world, record)
    plan = WorkspacePlan.from_geometry(
        size, max_tokens, 8, KernelScratch(attention=SCRATCH), early_exchange=True
    )
    plan.reserve()
    scratch = allocated(manager)
    manager.lock()
    contexts = [step * 2 + 4] * 7
    contexts.append(max_tokens - sum(contexts))
    layout, pools = layouts(contexts, world)
    index = borrow_index(plan, pools)
    buffers = plan.borrow_latents(layout).records, index.records, index.pages
    kept = sum(buffer.untyped_storage().nbytes() for buffer in buffers)
    assert plan.num_bytes == scratch.numel() + kept
    for own_rows in (1, min(page_size, 4000), 3000, max_tokens):
        lengths = [min(n, (max_tokens - own_rows) // 8) for n in contexts]
        layout, _ = layouts(lengths, world)
        first = world * layout.padded
        records, own = plan.kept_records(layout, own_rows)
        assert records.shape == (first + own_rows, record.record_bytes)
        assert plan.borrow_latents(layout, own_rows).records.data_ptr() == records.data_ptr()
        assert own.shape == (-(-own_rows // page_size), page_size, record.record_bytes)
        assert own.data_ptr() == records[first:].data_ptr()
    assert allocated(manager) is scratch
    rows = plan.latents[0]
    with pytest.raises(ValueError, match=rf"{first + rows + 1} gathered latent rows, {rows} are"):
        plan.kept_records(layout, rows + 1)


@pytest.mark.parametrize("page_size, records", [(64, 131_200), (2304, 131_328)])
def test_case_1_bytes_of_the_real_sizes(page_size, records):
    plan = WorkspacePlan.from_geometry(geometry(page_size), 524_288, 32)
    assert plan.latents == (4 * records, 528)
    assert plan.num_bytes == 4 * records * 528


@pytest.mark.parametrize(("early", "mib"), [("0", "264.5"), ("1", "298.9")])
def test_case_1_the_line_at_start(make_gather, monkeypatch, manager, early, mib):
    from types import SimpleNamespace

    from vllm.v1.attention.backends.mla.ckv_gather import exchange, startup
    from vllm.v1.attention.backends.mla.ckv_gather import plan as plan_module
    from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import (
        TorchReferenceKernels,
    )

    lines = []
    monkeypatch.setattr(plan_module.logger, "info", lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(plan_module, "get_dcp_group", lambda: SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(exchange, "all_gather_facts", lambda facts, group: [facts])
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_EARLY_EXCHANGE", early)
    gather = make_gather(4, freeze=False, block_size=2304, max_model_len=1_000_000, max_num_seqs=32)
    shapes = startup.LayerShapes(8192, 16, 2051, 512, 32, 4, 0.1)
    assert gather.freeze(TorchReferenceKernels())
    gather.reserve(TorchReferenceKernels(), shapes)
    assert lines == [
        f"full-CKV gather: on, page 2304 tokens, capacity 131,328 records/rank, workspace {mib} "
        "MiB/GPU (limit 524,288 visible tokens), kernels TorchReferenceKernels"
    ]
    kept = sum(tensor.numel() for tensor in manager._persistent_resources[0].values())
    if early == "0":
        assert gather.workspace.num_bytes == allocated(manager).numel() == 4 * 131_328 * 528
    else:
        # All of it; the reference kernels take no scratch.
        assert gather.workspace.num_bytes == kept and allocated(manager) is None


def test_case_1_a_plan_of_the_early_page_cannot_serve_the_final_one(manager):
    early = WorkspacePlan.from_geometry(geometry(64), 524_288, 32)
    final = WorkspacePlan.from_geometry(geometry(2304), 524_288, 32)
    assert final.num_bytes - early.num_bytes >= 4 * 128 * 528
    early.reserve()
    manager.lock()
    with pytest.raises(AssertionError, match="locked"):
        final.borrow_latents(layouts([16], 4)[0])


@pytest.mark.parametrize("page_size", [64, 2304])
def test_case_4_every_admitted_batch_fits_and_a_larger_one_raises(manager, page_size):
    plan = WorkspacePlan.from_geometry(geometry(page_size), 4096, 8)
    plan.reserve()
    manager.lock()
    largest = layouts([512] * 8, 4)
    plan.borrow_latents(largest[0])
    borrow_index(plan, largest[1])
    rows = plan.latents[0]
    full, _ = layouts([rows], 4)
    assert plan.borrow_latents(full).records.shape[0] == rows
    with pytest.raises(ValueError, match=rf"{rows + 4} gathered latent rows, {rows} are"):
        plan.borrow_latents(layouts([rows + 1], 4)[0])
    index_rows = plan.index[0]
    with pytest.raises(ValueError, match=rf"gathered pool rows, {index_rows} are"):
        borrow_index(plan, layouts([index_rows * 4 + 4], 4)[1])
    many = layouts([4] * 200, 4)
    with pytest.raises(ValueError, match=r"200 index pages|gathered pool rows"):
        borrow_index(plan, many[1])


def test_case_5_cached_tokens_need_rows(manager):
    token_budget = WorkspacePlan.from_geometry(geometry(64), 8192, 4)
    visible = WorkspacePlan.from_geometry(geometry(64), 4 * 40_064, 4)
    batch = layouts([40_064] * 4, 4)
    with pytest.raises(ValueError, match="160256 gathered latent rows"):
        token_budget.borrow_latents(batch[0])
    visible.reserve()
    manager.lock()
    assert visible.borrow_latents(batch[0]).records.shape[0] == 160_256
    borrow_index(visible, batch[1])


@pytest.mark.parametrize(("max_tokens", "more"), [(16, True), (5000, False)])
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("rows", [64, 65, 127])
def test_reserved_equals_borrowed_with_a_selection(manager, rows, world, max_tokens, more):
    """It lies behind the pages, in bytes that the records need anyway if there are enough."""
    sizes = (geometry(64, world), max_tokens, 8)
    bare = WorkspacePlan.from_geometry(*sizes).num_bytes
    plan = WorkspacePlan.from_geometry(*sizes, selection=(rows, 512))
    plan.reserve()
    before = allocated(manager)
    assert plan.num_bytes == before.numel()
    assert (plan.num_bytes > bare) == more
    manager.lock()
    _, pools = layouts([max_tokens // 8] * 8, world)
    # Every rank's span is as long as the longest.
    exchanged = world * (-(-rows // world))
    index = plan.borrow_index(pools, plan_index_pages(pools.seq_lens)[1], exchanged)
    assert allocated(manager) is before
    assert index.selection.shape == (exchanged, 512) and index.selection.dtype == torch.int32
    begin = index.selection.data_ptr() - before.data_ptr()
    assert begin >= index.pages.data_ptr() - before.data_ptr() + plan.index_pages[0] * 8448
    assert begin + index.selection.numel() * 4 <= before.numel()
    with pytest.raises(ValueError, match=rf"selection of {exchanged + 1} rows, {exchanged} are"):
        plan.borrow_index(pools, 1, exchanged + 1)


def test_without_shares_no_byte_is_reserved_for_a_selection(manager):
    plan = WorkspacePlan.from_geometry(geometry(2304), 16, 2)
    plan.reserve()
    index = borrow_index(plan, layouts([16], 4)[1])
    assert index.selection is None
    with pytest.raises(ValueError, match="selection of 1 rows, 0 are"):
        plan.borrow_index(layouts([16], 4)[1], 1, 1)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=9),
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([4, 16, 64]),
)
def test_whatever_eligibility_admits_can_be_borrowed(lengths, world, interleave):
    stock.reset_workspace_manager()
    stock.init_workspace_manager(torch.device("cpu"))
    try:
        plan = WorkspacePlan.from_geometry(
            geometry(64, world, interleave=interleave), max(sum(lengths), 1), len(lengths)
        )
        plan.reserve()
        stock.lock_workspace()
        layout, pools = layouts(lengths, world, interleave)
        plan.borrow_latents(layout)
        borrow_index(plan, pools)
    finally:
        stock.reset_workspace_manager()


SCRATCH = (((3, 5), torch.float32), ((7,), torch.int32))


def test_scratch_of_attention_lies_beside_the_records(manager):
    kernels = KernelScratch(attention=SCRATCH)
    plan = WorkspacePlan.from_geometry(geometry(64), 512, 2, kernels)
    plan.reserve()
    assert plan.num_bytes == allocated(manager).numel()
    buffers = plan.borrow_latents(layouts([100, 200], 4)[0])
    buffers.records.fill_(7)
    buffers.scratch[0].fill_(1.5)
    buffers.scratch[1].fill_(9)
    assert buffers.scratch[0].shape == (3, 5)
    assert int(buffers.records.min()) == int(buffers.records.max()) == 7
    assert buffers.scratch[0].eq(1.5).all() and buffers.scratch[1].eq(9).all()


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_scratch_of_a_selection_lies_beside_keys_pages_and_selection(manager, size):
    """A small one and one that makes the index exchange the larger of the two."""
    kernels = KernelScratch(selection=(((size,), torch.uint8), ((7,), torch.int32)))
    plan = WorkspacePlan.from_geometry(geometry(64), 512, 2, kernels, (9, 8))
    plan.reserve()
    before = allocated(manager)
    assert plan.num_bytes == before.numel()
    manager.lock()
    pools = layouts([100, 200], 4)[1]
    index = plan.borrow_index(pools, plan_index_pages(pools.seq_lens)[1], 12)
    tensors = (index.records, index.pages, index.selection, *index.scratch)
    assert [tuple(tensor.shape) for tensor in index.scratch] == [(size,), (7,)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert tensor.numel() and bool((tensor == number).all())
    assert allocated(manager) is before


def test_scratch_of_ordinary_batches_is_reserved_for_the_larger_operation(manager):
    scratch = KernelScratch(attention=SCRATCH, selection=(((2, 300), torch.uint8),))
    scratch.reserve()
    assert scratch.num_bytes == allocated(manager).numel() == 768
    manager.lock()
    before = allocated(manager)
    for borrow, shapes in (
        (scratch.borrow_attention, [(3, 5), (7,)]),
        (scratch.borrow_selection, [(2, 300)]),
    ):
        tensors = borrow()
        assert [tuple(tensor.shape) for tensor in tensors] == shapes
        assert tensors[0].data_ptr() == before.data_ptr()
    assert allocated(manager) is before


def test_scratch_is_reserved_where_the_call_is_made(monkeypatch):
    """vLLM has a workspace for every micro-batch, and locks them all at once."""
    stock.reset_workspace_manager()
    stock.init_workspace_manager(torch.device("cpu"), num_ubatches=2)
    try:
        scratch = KernelScratch(attention=SCRATCH)

        def of_both(call):
            results = []
            for batch in (0, 1):
                monkeypatch.setattr(stock, "dbo_current_ubatch_id", lambda batch=batch: batch)
                results.append(call())
            return results

        of_both(scratch.reserve)
        stock.lock_workspace()
        first, second = of_both(scratch.borrow_attention)
        assert first[0].data_ptr() != second[0].data_ptr()
    finally:
        stock.reset_workspace_manager()


def test_no_address_outlives_a_workspace_that_is_unlocked_and_grows(manager):
    """vLLM unlocks it while experts move to other ranks, and another user may take more then."""
    early, scratch = geometry(256), KernelScratch(attention=SCRATCH)
    plan = WorkspacePlan.from_geometry(early, 2000, 4, scratch, early_exchange=True)
    plan.reserve()
    manager.lock()
    layout, pools = layouts([1000, 900], 4)
    kept, keys = plan.borrow_latents(layout, 90).records, borrow_index(plan, pools)
    manager.unlock()
    manager.get_simultaneous(((4 * allocated(manager).numel(),), torch.uint8))
    manager.lock()
    memory = allocated(manager)
    latents, index = plan.borrow_latents(layout, 90), borrow_index(plan, pools)
    for tensor in (*latents.scratch, *scratch.borrow_attention()):
        assert tensor.untyped_storage().data_ptr() == memory.data_ptr()
    # What an exchange fills while others use the scratch stays where it is.
    for now, before in (
        (latents.records, kept), (index.records, keys.records), (index.pages, keys.pages)
    ):  # fmt: skip
        assert now.data_ptr() == before.data_ptr()


def test_kernels_that_take_no_scratch_need_no_workspace():
    stock.reset_workspace_manager()
    scratch = KernelScratch()
    scratch.reserve()
    assert scratch.borrow_attention() == scratch.borrow_selection() == []
    assert scratch.num_bytes == 0


def test_a_layout_of_other_ranks_is_refused():
    plan = WorkspacePlan.from_geometry(geometry(64), 512, 2)
    with pytest.raises(ValueError, match=r"2 ranks.*4"):
        plan.borrow_latents(layouts([16], 2)[0])
