# SPDX-License-Identifier: Apache-2.0
"""The exchange on real gloo ranks: byte-exact, in place, over poisoned and reused buffers."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from vllm.v1.attention.backends.mla.ckv_gather import exchange
from vllm.v1.attention.backends.mla.ckv_gather import geometry as g
from vllm.v1.attention.backends.mla.ckv_gather.layout import (
    RowShares,
    StagedLayout,
    plan_index_pages,
    plan_layout,
)
from vllm.v1.attention.backends.mla.ckv_gather.remap import gathered_rows

POISON = 0xEE
PAGE = 64
BATCHES = {
    # Cases 2 and 3: contexts of 1 to 5 tokens; most ranks are empty.
    "one": [[4], [5], [1], [2], [3]],
    "example": [[19, 33]],
    # Case 17: lengths shrink and grow over the same buffers, down to nothing.
    "reuse": [[300, 7], [0, 1], [2, 1], [1, 3], [0, 0], [19, 33], []],
    "many": [[1] * 20, [130, 0, 64, 65, 1, 517]],
}


def record_of(request, token, width):
    """The bytes of one record: a function of request and global token only, never POISON."""
    return (torch.arange(width) * 7 + request * 131 + token * 17) % 200


class CopyKernels:
    """Packs and unpacks by plain loops; records what it was asked to do."""

    def pack_records(self, cache, block_table, local_lens, starts, out):
        for request, length in enumerate(local_lens.tolist()):
            for j in range(length):
                page = int(block_table[request, j // cache.shape[1]])
                out[int(starts[request]) + j] = cache[page, j % cache.shape[1]]

    def pack_pools(self, index_cache, block_table, local_lens, starts, out):
        for request, length in enumerate(local_lens.tolist()):
            for j in range(length):
                page = index_cache[int(block_table[request, j // 64])].reshape(-1)
                slot = j % 64
                row = out[int(starts[request]) + j]
                row[:128] = page[slot * 128 : (slot + 1) * 128]
                row[128:] = page[8192 + slot * 4 : 8196 + slot * 4]

    def unpack_pools(self, gathered, starts, pool_lens, interleave, out, page_starts):
        world = starts.shape[0]
        padded = gathered.shape[0] // world
        split = {"dcp_world_size": world, "interleave": interleave}
        for request, length in enumerate(pool_lens.tolist()):
            for pool in range(length):
                rank = g.owner_of(pool, **split)
                local = g.local_index_of(pool, **split)
                record = gathered[rank * padded + int(starts[rank, request]) + local]
                page = out[int(page_starts[request]) + pool // 64]
                slot = pool % 64
                page[slot * 128 : (slot + 1) * 128] = record[:128]
                page[8192 + slot * 4 : 8196 + slot * 4] = record[128:]


def count_collectives(counter):
    original = dist.all_gather_into_tensor

    def counted(output, own, group=None, **kwargs):
        counter.append((output.untyped_storage().data_ptr(), own.untyped_storage().data_ptr()))
        return original(output, own, group=group, **kwargs)

    dist.all_gather_into_tensor = counted


def fill_cache(lengths, rank, split, width, shape_of_page, write):
    """Return a cache and a block table that hold this rank's part of every request."""
    per_request = max([g.local_length(n, 0, **split) for n in lengths], default=0) // PAGE + 1
    table = torch.randperm(max(len(lengths), 1) * per_request).reshape(-1, per_request).int()
    cache = torch.full((table.numel(), *shape_of_page), POISON, dtype=torch.uint8)
    for request, length in enumerate(lengths):
        for local in range(g.local_length(length, rank, **split)):
            token = g.global_index_of(local, rank, **split)
            page = cache[int(table[request, local // PAGE])]
            write(page, local % PAGE, record_of(request, token, width).to(torch.uint8))
    return cache, table[: len(lengths)]


def write_row(page, slot, record):
    page[slot] = record


def write_planar(page, slot, record):
    flat = page.view(-1)
    flat[slot * 128 : (slot + 1) * 128] = record[:128]
    flat[8192 + slot * 4 : 8196 + slot * 4] = record[128:]


def check_latents(lengths, world, rank, interleave, buffer, width, counter):
    split = {"dcp_world_size": world, "interleave": interleave}
    layout = plan_layout(torch.tensor(lengths, dtype=torch.int64), **split)
    cache, table = fill_cache(lengths, rank, split, width, (PAGE, width), write_row)
    gathered = buffer[: world * layout.padded]
    staged = StagedLayout.stage(layout, "cpu")
    before = len(counter)
    exchange.gather_latents(CopyKernels(), cache, table, staged, gathered, dist.group.WORLD, rank)
    # One collective, or none on any rank; it sends from the buffer it receives into.
    assert len(counter) - before == (1 if layout.padded else 0)
    assert all(output == own for output, own in counter[before:])
    for request, length in enumerate(lengths):
        tokens = torch.arange(length)[None]
        rows = gathered_rows(
            tokens, torch.tensor([request]), staged.starts, layout.padded, **split
        )[0]
        for token, row in enumerate(rows.tolist()):
            expected = record_of(request, token, width).to(torch.uint8)
            different = (gathered[row] != expected).nonzero()
            assert not len(different), (
                f"rank {rank}, lengths {lengths}: request {request} token {token} row {row} "
                f"differs first at byte {int(different[0])}"
            )
    assert bool((buffer[world * layout.padded :] == POISON).all())


def check_pools(lengths, world, rank, interleave, buffer, pages):
    split = {"dcp_world_size": world, "interleave": interleave // 4}
    pools = [n // 4 for n in lengths]
    layout = plan_layout(torch.tensor(pools, dtype=torch.int64), **split)
    cache, table = fill_cache(pools, rank, split, 132, (64, 132), write_planar)
    page_starts, num_pages = plan_index_pages(layout.seq_lens)
    exchange.gather_pools(
        CopyKernels(), cache, table, StagedLayout.stage(layout, "cpu"),
        buffer[: world * layout.padded], pages[:num_pages], page_starts.int(),
        dist.group.WORLD, rank, interleave=interleave // 4,
    )  # fmt: skip
    for request, length in enumerate(pools):
        for pool in range(length):
            page = pages[int(page_starts[request]) + pool // 64]
            slot = pool % 64
            expected = record_of(request, pool, 132).to(torch.uint8)
            assert torch.equal(page[slot * 128 : (slot + 1) * 128], expected[:128])
            assert torch.equal(page[8192 + slot * 4 : 8196 + slot * 4], expected[128:])
    assert bool((pages[num_pages:] == POISON).all())


def check_candidates(world, rank):
    scores = torch.arange(6, dtype=torch.float32).reshape(2, 3) + 100 * rank
    scores[0, 2] = float("-inf")
    ids = torch.arange(6, dtype=torch.int32).reshape(2, 3) + 1000 * rank
    all_scores, all_ids = exchange.all_gather_candidates(scores, ids, dist.group.WORLD)
    assert all_scores.shape == all_ids.shape == (2, 3 * world)
    for other in range(world):
        columns = slice(other * 3, other * 3 + 3)
        assert torch.equal(all_ids[:, columns], ids + 1000 * (other - rank))
        assert torch.equal(all_scores[:, columns], scores + 100 * (other - rank))
    empty = exchange.all_gather_candidates(scores[:0], ids[:0], dist.group.WORLD)
    assert empty[0].shape == (0, 3 * world)
    with pytest.raises(ValueError, match="int64"):
        exchange.all_gather_candidates(scores, ids.long(), dist.group.WORLD)


def check_selection(world, rank):
    """Shares of int32 pool ids; with one row, and with one more than the ranks divide."""
    for num_rows in (1, world + 1, 3 * world):
        shares = RowShares(num_rows, world)
        every = torch.arange(num_rows * 512, dtype=torch.int32).view(num_rows, 512) + 2**24
        gathered = torch.full((shares.exchanged_rows, 512), -7, dtype=torch.int32)
        own = every[shares.rows_of(rank)]
        exchange.gather_selection(own, gathered, dist.group.WORLD, rank)
        assert torch.equal(gathered[:num_rows], every)


def check_numbers(rank):
    exchange.require_same("numbers", [1, 34, 2], dist.group.WORLD)
    with pytest.raises(RuntimeError, match=r"\[1, 0, 2\] on rank 0, \[1, 1, 2\] on rank 1"):
        exchange.require_same("numbers", [1, rank, 2], dist.group.WORLD)


def check_refusals(world, rank):
    good = torch.zeros((world * 2, 528), dtype=torch.uint8)
    for bad, padded, at in (
        (good[:-1], 2, rank),
        (good, 3, rank),
        (good[:, ::2], 2, rank),
        (good, 2, rank + 1),
    ):
        with pytest.raises(ValueError):
            exchange.all_gather_in_place(bad, padded, dist.group.WORLD, at)


def run_rank(rank, world, store):
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    counter = []
    count_collectives(counter)
    try:
        for width in (528, 304):
            for batches in BATCHES.values():
                for interleave in (4, 16):
                    buffer = torch.full((world * 600, width), POISON, dtype=torch.uint8)
                    index = torch.full((world * 200, 132), POISON, dtype=torch.uint8)
                    pages = torch.full((40, 8448), POISON, dtype=torch.uint8)
                    for lengths in batches:
                        check_latents(lengths, world, rank, interleave, buffer, width, counter)
                        if width == 528:
                            check_pools(lengths, world, rank, interleave, index, pages)
                        # Rows of this batch must come from this batch: stale ones would pass
                        # only if the next batch read them, so poison what it may not read.
                        for stale in (buffer, index, pages):
                            stale.fill_(POISON)
        check_reuse_without_poison(world, rank, counter)
        check_candidates(world, rank)
        check_selection(world, rank)
        check_numbers(rank)
        check_refusals(world, rank)
        # Every rank entered the same number of collectives.
        counts = [None] * world
        dist.all_gather_object(counts, len(counter))
        assert len(set(counts)) == 1
    finally:
        dist.destroy_process_group()


def check_reuse_without_poison(world, rank, counter):
    """Case 17 proper: nothing cleans the buffer between batches."""
    buffer = torch.full((world * 600, 528), POISON, dtype=torch.uint8)
    for lengths in BATCHES["reuse"]:
        rows = (
            world
            * plan_layout(
                torch.tensor(lengths, dtype=torch.int64), dcp_world_size=world, interleave=4
            ).padded
        )
        check_latents(lengths, world, rank, 4, buffer[:rows], 528, counter)


@pytest.mark.parametrize("world", [2, 4])
def test_gather_on_gloo_ranks(world, tmp_path):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(run_rank, args=(world, str(tmp_path / "store")), nprocs=world, join=True)
