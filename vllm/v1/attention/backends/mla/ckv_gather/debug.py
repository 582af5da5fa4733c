# SPDX-License-Identifier: Apache-2.0
"""What ``VLLM_CKV_DEBUG=1`` checks. The host waits for the device in every layer: not for serving.

Each check names what is wrong where it is wrong, instead of a bad output or a crash later on.
What it costs is in ``docs/troubleshooting.md``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vllm.v1.attention.backends.mla.ckv_gather.geometry import POOLS_PER_INDEX_PAGE

POISON = 0xFF
"""Byte of buffers that nobody has written: NaN as e4m3 and as float32."""


def poison(buffers: Iterable[torch.Tensor]) -> None:
    """Overwrite borrowed ``buffers``, so that a row nobody wrote cannot look right."""
    for buffer in buffers:
        buffer.view(torch.uint8).fill_(POISON)


def check_pages(
    what: str, block_table: torch.Tensor, local_lens: torch.Tensor, page_size: int, num_pages: int
) -> None:
    """Check the entries of ``block_table`` that this rank is going to read.

    block_table: (R, B) int32. local_lens: (R,) int32, what this rank stores of each request.
    page_size, num_pages: of the cache.

    Raises:
        ValueError: an entry names no page of the cache, or the table is too short. The message
            has the request, the entry and the limit.
    """
    needed = -(-local_lens.cpu().long() // page_size)
    table = block_table.cpu()
    for request, count in enumerate(needed.tolist()):
        if count > table.shape[1]:
            raise ValueError(
                f"{what}: request {request} needs {count} pages, its block table has "
                f"{table.shape[1]} entries"
            )
        pages = table[request, :count]
        wrong = ((pages < 0) | (pages >= num_pages)).nonzero()
        if wrong.numel():
            entry = int(wrong[0])
            raise ValueError(
                f"{what}: entry {entry} of request {request} in the block table is page "
                f"{int(pages[entry])}, the cache has {num_pages} pages"
            )


def check_below(what: str, ids: torch.Tensor, limit: int) -> None:
    """Check that no id (row or slot; negative ones mean none) reaches ``limit``.

    Raises:
        ValueError: one does. The message has its place, the id and the limit.
    """
    wrong = (ids >= limit).nonzero()
    if wrong.numel():
        place = tuple(wrong[0].tolist())
        raise ValueError(f"{what}: {int(ids[place])} at {place}, there are {limit}")


def check_pool_slots(slots: torch.Tensor, index_cache: torch.Tensor) -> None:
    """Check that every slot lies in ``index_cache`` (ipages, 64, 132). slots: (T,) int64.

    Raises:
        ValueError: as :func:`check_below`.
    """
    check_below("index pool slots", slots, index_cache.shape[0] * POOLS_PER_INDEX_PAGE)


def check_tail_slots(slots: torch.Tensor, tail_cache: torch.Tensor) -> None:
    """Check that every slot lies in ``tail_cache`` (blocks, 2, ring, 128). slots: (T,) int64.

    Raises:
        ValueError: as :func:`check_below`.
    """
    check_below("index tail slots", slots, tail_cache.shape[0] * tail_cache.shape[2])


def check_selection(
    pool_ids: torch.Tensor, req_id: torch.Tensor, pool_counts: torch.Tensor
) -> None:
    """Check that every row has as many pools as it can, and sees them.

    Finds rows that a rank should have selected for and did not, and rows of another share.

    pool_ids: (T, K) int32. req_id: (T,) int32, -1 for padding. pool_counts: (T,), pools that a row
        sees.

    Raises:
        ValueError: a row has not. The message has the row and its numbers.
    """
    counts = torch.where(req_id >= 0, pool_counts, 0)
    chosen = (pool_ids >= 0).sum(1)
    wrong = chosen != counts.clamp(max=pool_ids.shape[1])
    wrong |= pool_ids.amax(1) >= pool_counts.clamp(min=1)
    wrong &= req_id >= 0
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"selected pools: row {row} sees {int(counts[row])}, {int(chosen[row])} are chosen, "
            f"the largest is {int(pool_ids[row].max())}"
        )


def check_index_pages(
    block_table: torch.Tensor, req_id: torch.Tensor, pools: torch.Tensor, index_cache: torch.Tensor
) -> None:
    """Check the index pages that rows read from this rank's own cache.

    block_table: (R, B) int32. req_id: (T,) int32, -1 for padding. pools: (T,), what the row sees
        of this rank's pools.

    Raises:
        ValueError: as :func:`check_pages`.
    """
    real = req_id >= 0
    most = pools.new_zeros(block_table.shape[0])
    most.scatter_reduce_(0, req_id[real].long(), pools[real], "amax")
    check_pages("index keys", block_table, most, POOLS_PER_INDEX_PAGE, index_cache.shape[0])
