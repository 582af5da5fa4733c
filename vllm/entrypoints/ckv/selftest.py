# SPDX-License-Identifier: Apache-2.0
"""A gather of two ranks in one process, through one kernel provider, against float64.

One request of a few thousand tokens. Both ranks' caches are written, packed into one rank-major
buffer, unpacked, selected from and attended to by the provider: in one window, in one with the last
records written by every rank itself, and in two windows, whose candidates and outputs are merged.
The answers are computed once more in float64 from the records' bytes, by code that shares nothing
with a provider.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch

from vllm.v1.attention.backends.mla.ckv_gather.geometry import (
    FP8_DS_MLA,
    INDEX_PAGE_BYTES,
    INDEX_RECORD_BYTES,
    POOLS_PER_INDEX_PAGE,
    local_length,
)
from vllm.v1.attention.backends.mla.ckv_gather.layout import (
    StagedLayout,
    plan_index_pages,
    plan_layout,
    plan_own_rows,
)
from vllm.v1.attention.backends.mla.ckv_gather.windows import (
    Candidates,
    merge_attention,
    merge_candidates,
)
from vllm.v1.attention.backends.mla.sparse_mla_kernels.base import PoolPlaces

if TYPE_CHECKING:
    from vllm.v1.attention.backends.mla.sparse_mla_kernels import SparseMLAKernels

WORLD, INTERLEAVE, POOL, PAGE = 2, 4, 4, 256
# Eight heads and 512 pools are the least that b12x has kernels for.
TOKENS, ROWS, HEADS, INDEX_HEADS, TOPK = 4003, 5, 8, 32, 512
LATENT, KEY = 512, 128
OWN, SPLIT = 300, 2048
"""Records that are not gathered, and where the second window begins: with a page of every rank."""
WIDTH = TOPK * POOL + POOL - 1
OUTPUT_LIMIT, LSE_LIMIT, SCORE_LIMIT = 2.0**-4, 5e-2, 1e-3
"""Wide enough for kernels that quantise queries and weights to e4m3 (4 % and 0.01 here)."""


@dataclass(frozen=True)
class SelfTest:
    """What was compared; differences are the largest, relative to the largest value.

    records_equal: bytes of the records, gathered or written, against the caches of their owners.
    pools_equal: bytes of the unpacked index keys against an unsplit cache.
    score_error: by how much a pool that was chosen is worse than one that was not.
    output_error, lse_error: of attention.
    """

    records_equal: bool
    pools_equal: bool
    score_error: float
    output_error: float
    lse_error: float

    @property
    def failures(self) -> list[str]:
        """What is wrong, in words; empty if nothing is. NaN differences fail."""
        checks = (
            (self.records_equal, "gathered records differ from the caches"),
            (self.pools_equal, "gathered index keys differ from an unsplit cache"),
            (self.score_error <= SCORE_LIMIT, f"selection is off by {self.score_error:.1e}"),
            (self.output_error <= OUTPUT_LIMIT, f"attention is off by {self.output_error:.1e}"),
            (self.lse_error <= LSE_LIMIT, f"log-sum-exps are off by {self.lse_error:.1e}"),
        )
        return [words for right, words in checks if not right]


def _latents(records: torch.Tensor) -> torch.Tensor:
    """(n, 528) uint8 on the CPU -> (n, 512) float64."""
    values = records[:, :LATENT].contiguous().view(torch.float8_e4m3fn).double()
    scales = records[:, LATENT:].contiguous().view(torch.float32).double()
    return values * scales.repeat_interleave(LATENT // scales.shape[1], dim=1)


def _keys(pages: torch.Tensor, count: int) -> torch.Tensor:
    """(pages, 8448) uint8 planar pages on the CPU -> (count, 128) float64."""
    planes = pages.reshape(pages.shape[0], INDEX_PAGE_BYTES)
    keys = planes[:, : POOLS_PER_INDEX_PAGE * KEY].reshape(-1, KEY).contiguous()
    scales = planes[:, POOLS_PER_INDEX_PAGE * KEY :].contiguous().view(torch.float32)
    values = keys.view(torch.float8_e4m3fn).double() * scales.reshape(-1, 1).double()
    return values[:count]


def run_self_test(kernels: SparseMLAKernels, device: torch.device | str = "cpu") -> SelfTest:
    """Run the gather through ``kernels`` on ``device``; takes a second or two once compiled."""
    scale = LATENT**-0.5
    kernels.warm_up(
        torch.device(device),
        head_counts=(HEADS,),
        index_heads=INDEX_HEADS,
        pool_size=POOL,
        topk=TOPK,
        width=WIDTH,
        dcp_world_size=WORLD,
        interleave=INTERLEAVE,
        page_size=PAGE,
        record_bytes=FP8_DS_MLA.record_bytes,
        scale=scale,
    )
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    def move(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype)

    tokens = torch.arange(TOKENS)
    owner = tokens // INTERLEAVE % WORLD
    place = tokens // (INTERLEAVE * WORLD) * INTERLEAVE + tokens % INTERLEAVE
    pages = -(-local_length(TOKENS, 0, dcp_world_size=WORLD, interleave=INTERLEAVE) // PAGE)
    # Physical pages in reverse order, so that a table that is not read shows.
    table = torch.arange(pages - 1, -1, -1)
    latents = move(normal(TOKENS, LATENT), torch.bfloat16)
    width = FP8_DS_MLA.record_bytes
    kept = torch.zeros((TOKENS, width), dtype=torch.uint8)
    page_table = move(table[None], torch.int32)
    caches = []
    for rank in range(WORLD):
        cache = torch.zeros((pages, PAGE, width), dtype=torch.uint8, device=device)
        slots = torch.where(owner == rank, table[place // PAGE] * PAGE + place % PAGE, -1)
        kernels.write_records(latents, cache, move(slots))
        mine = owner == rank
        kept[mine] = cache.cpu().flatten(0, 1)[slots[mine]]
        caches.append(cache)

    pools = TOKENS // POOL
    k, gate = (move(normal(TOKENS, KEY), torch.bfloat16) for _ in range(2))
    ape = move(normal(POOL, KEY), torch.float32)
    index_shape = (-(-pools // POOLS_PER_INDEX_PAGE), POOLS_PER_INDEX_PAGE, INDEX_RECORD_BYTES)
    index_table = move(torch.arange(index_shape[0])[None], torch.int32)
    bounds = move(torch.tensor([0, TOKENS]), torch.int32)
    ends = tokens % POOL == POOL - 1

    def write_pools(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's index cache, and the pages in which every rank writes all of a batch's pools."""
        cache, own = torch.zeros((2, *index_shape), dtype=torch.uint8, device=device)
        nothing = move(torch.full_like(slots, -1))
        places = PoolPlaces(own, move(torch.zeros(1), torch.int32))
        kernels.write_pools(
            k, gate, ape, cache, move(slots), None, nothing, move(tokens), bounds, places
        )
        return cache, own

    unsplit, _ = write_pools(torch.where(ends, tokens // POOL, -1))
    index_caches, own_pools = zip(
        *(
            write_pools(torch.where(ends & (owner == rank), place // POOL, -1))
            for rank in range(WORLD)
        ),
        strict=True,
    )

    def gather_keys(begin: int, end: int) -> torch.Tensor:
        """(pages, 64, 132) uint8 planar: the pools of a window of all ranks."""
        counts = torch.tensor([(end - begin) // POOL])
        layout = plan_layout(counts, dcp_world_size=WORLD, interleave=INTERLEAVE // POOL)
        staged = StagedLayout.stage(layout, device)
        rows, padded = INDEX_RECORD_BYTES, layout.padded
        gathered = torch.zeros((WORLD * padded, rows), dtype=torch.uint8, device=device)
        first_page = begin // POOL // WORLD // POOLS_PER_INDEX_PAGE
        for rank in range(WORLD):
            kernels.pack_pools(
                index_caches[rank],
                index_table[:, first_page:],
                staged.local_lens[rank],
                staged.starts[rank],
                gathered[rank * padded : (rank + 1) * padded],
            )
        page_starts, num_pages = plan_index_pages(counts)
        unpacked = torch.zeros((num_pages, INDEX_PAGE_BYTES), dtype=torch.uint8, device=device)
        kernels.unpack_pools(
            gathered,
            staged.starts,
            staged.seq_lens,
            INTERLEAVE // POOL,
            unpacked,
            move(page_starts, torch.int32),
        )
        return unpacked.view(num_pages, *index_shape[1:])

    index_query = normal(ROWS, INDEX_HEADS, KEY).to(torch.float8_e4m3fn)
    weights = normal(ROWS, INDEX_HEADS)
    positions = TOKENS - ROWS + torch.arange(ROWS)
    visible = (positions + 1) // POOL
    row_of = move(torch.zeros(ROWS), torch.int32)
    query = move(normal(ROWS, HEADS, LATENT), torch.bfloat16)

    def select(begin: int, end: int) -> tuple[torch.Tensor, Candidates]:
        """A window's keys, and each row's best pools of it."""
        keys = gather_keys(begin, end)
        found = kernels.select_pools(
            move(index_query),
            move(weights),
            keys,
            move(torch.arange(keys.shape[0])[None], torch.int32),
            row_of,
            move((visible - begin // POOL).clamp(0, (end - begin) // POOL), torch.int32),
            TOPK,
        )
        return keys, found

    def attend(
        chosen: torch.Tensor, begin: int, end: int, own: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A window's records, the last ``own`` of them written behind the others; attention."""
        lengths = torch.tensor([end - begin - own])
        layout = plan_layout(lengths, dcp_world_size=WORLD, interleave=INTERLEAVE)
        staged = StagedLayout.stage(layout, device)
        padded, own_pages = layout.padded, -(-own // PAGE)
        spans = WORLD * padded
        records = torch.zeros((spans + own_pages * PAGE, width), dtype=torch.uint8, device=device)
        for rank in range(WORLD):
            kernels.pack_records(
                caches[rank],
                page_table[:, begin // (WORLD * PAGE) :],
                staged.local_lens[rank],
                staged.starts[rank],
                records[rank * padded : (rank + 1) * padded],
            )
        if own:
            behind = records[spans:].view(own_pages, PAGE, width)
            kernels.write_records(latents[end - own : end], behind, move(torch.arange(own)))
        records = records[: spans + own]
        counts = torch.zeros(ROWS, dtype=torch.int32, device=device)
        rows = kernels.remap(
            kernels.expand_pools(chosen, move(positions), POOL, WIDTH),
            row_of,
            staged.starts,
            padded,
            WORLD,
            INTERLEAVE,
            counts=counts,
            window=(begin, end) if (begin, end) != (0, TOKENS) else None,
            context_lens=staged.seq_lens,
            own_starts=move(plan_own_rows(layout, torch.tensor([own])), torch.int32),
        )
        return records, *kernels.attend(query, records, rows, counts, scale)

    unpacked, (chosen, _) = select(0, TOKENS)
    records, out, lse = attend(chosen, 0, TOKENS)
    early = attend(chosen, 0, TOKENS, OWN)
    windows = ((0, SPLIT), (SPLIT, TOKENS))
    best, found = (select(*window)[1] for window in windows)
    merge_candidates(kernels, best, 0, found, SPLIT // POOL)
    merged = merge_attention((0, *attend(best[0], *window)[1:]) for window in windows)
    answers = ((chosen, out, lse), (chosen, *early[1:]), (best[0], *merged))

    # From here on float64, from bytes.
    flat = records.cpu()
    padded = flat.shape[0] // WORLD
    packed = torch.stack([flat[int(owner[t]) * padded + int(place[t])] for t in tokens])
    own = early[0][-OWN:].cpu()
    keys = _keys(unsplit.cpu(), pools)
    similar = torch.einsum("thd,pd->thp", index_query.double(), keys).relu()
    scores = torch.einsum("thp,th->tp", similar, weights.double())
    score_error = output_error = lse_error = 0.0
    values = _latents(kept)
    for row, (pool_ids, output, sums) in product(range(ROWS), answers):
        count = int(visible[row])
        ids = pool_ids[row].cpu().long()
        ids = ids[ids >= 0]
        if ids.unique().numel() != min(TOPK, count) or int(ids.max()) >= count:
            score_error = float("inf")
            continue
        rest = torch.ones(count, dtype=torch.bool)
        rest[ids] = False
        worst, best_left = scores[row, ids].min(), scores[row, :count][rest].max()
        largest = scores[row, :count].abs().max()
        score_error = max(score_error, float((best_left - worst) / largest))
        tail = torch.arange(count * POOL, int(positions[row]) + 1)
        seen = torch.cat([(ids[:, None] * POOL + torch.arange(POOL)).flatten(), tail])
        logits = query[row].cpu().double() @ values[seen].T * scale
        exact = logits.softmax(dim=1) @ values[seen]
        off = (output[row].cpu().double() - exact).abs().max() / exact.abs().max()
        output_error = max(output_error, float(off.nan_to_num(float("inf"))))
        off = (sums[row].cpu().double() - logits.logsumexp(dim=1)).abs().max()
        lse_error = max(lse_error, float(off.nan_to_num(float("inf"))))
    return SelfTest(
        records_equal=torch.equal(packed, kept) and torch.equal(own, kept[-OWN:]),
        pools_equal=all(
            torch.equal(_keys(pages.cpu(), pools), keys) for pages in (unpacked, *own_pools)
        ),
        score_error=score_error,
        output_error=output_error,
        lse_error=lse_error,
    )
