# SPDX-License-Identifier: Apache-2.0
"""The operations every sparse MLA kernel provider offers.

Notation: T query tokens (rows), R requests, H heads on this rank, N ``dcp_world_size``, I
``interleave``, P tokens in one physical page of one rank.

FP8 latent record, 528 bytes: 512 e4m3 values, then four fp32 scales, one per 128 values.
Index pool record, 132 bytes: 128 e4m3 key bytes, then one fp32 scale. A *page* of 64 pools is
planar: 64 x 128 key bytes, then 64 scales from byte 8,192. On the wire the record is contiguous.

Only -1 (any negative id) is invalid in a list of ids. A row whose request id is negative is a
padding row: it owns nothing, its ids are not looked at, and its result is -1 throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from vllm.v1.attention.backends.mla.ckv_gather.geometry import (
    FP8_DS_MLA,
    INDEX_KEY_BYTES,
    POOLS_PER_INDEX_PAGE,
)

LATENT_DIM = 512
SCALE_GROUP = 128
FP8_RECORD_BYTES = FP8_DS_MLA.record_bytes
INDEX_DIM = INDEX_KEY_BYTES  # one e4m3 byte a dimension
INDEX_SCALE_OFFSET = POOLS_PER_INDEX_PAGE * INDEX_DIM
FP8_MAX = 448.0

ScratchShapes: TypeAlias = list[tuple[tuple[int, ...], torch.dtype]]
"""(shape, dtype) of each tensor."""
Scratch: TypeAlias = Sequence[torch.Tensor]
"""Tensors of the shapes that a provider gave, in that order."""


@dataclass(frozen=True)
class IndexQueries:
    """What a layer's indexer selects by: this rank's keys, and all rows of a batch.

    index_cache: (ipages, 64, 132) uint8. block_table: (R, B) int32, its pages of each request.
    q_fp8: (T, heads, 128) e4m3. weights: (T, heads) float32. req_id: (T,) int32, negative for
        padding. pool_counts: (T,) int32, pools that each row sees. topk: pools K to choose.
    """

    index_cache: torch.Tensor
    block_table: torch.Tensor
    q_fp8: torch.Tensor
    weights: torch.Tensor
    req_id: torch.Tensor
    pool_counts: torch.Tensor
    topk: int


@dataclass(frozen=True)
class PoolPlaces:
    """Planar pages in which a request's pools lie in global order, whoever owns them.

    pages: (pages, 64, 132) or (pages, 8448) uint8. page_starts: (R,) int32, the first page of each
        request from ``first_request`` on; those before it have none.
    """

    pages: torch.Tensor
    page_starts: torch.Tensor
    first_request: int = 0


@runtime_checkable
class SparseMLAKernels(Protocol):
    """Device operations of one provider.

    Every method raises ``ValueError`` when a width, a stride or a dtype is not the documented one;
    the message names both sides. Errors about values, which lie on the device, are raised where
    reading them costs nothing, by the torch reference on a CPU; a GPU provider never waits for the
    device and leaves unwritten what such an error would concern.
    """

    def scratch_shapes(
        self, *, max_records: int | None, max_tokens: int, num_heads: int, width: int
    ) -> ScratchShapes:
        """What :meth:`attend` can use beside its arguments, to be reserved with the records.

        To be asked after :meth:`warm_up`.

        Args:
            max_records: rows of the largest ``records``; None for vLLM's own cache, whose size
                follows from what is reserved.
            max_tokens: rows of the largest ``q``.
            num_heads: heads of ``q``.
            width: columns of ``row_ids``.

        Returns:
            Empty where scratch would not make it faster.
        """
        ...

    def selection_scratch_shapes(self) -> ScratchShapes:
        """The same for :meth:`select_pools`, to be reserved with the index keys."""
        ...

    def warm_up(
        self,
        device: torch.device,
        *,
        head_counts: Sequence[int],
        index_heads: int,
        pool_size: int,
        topk: int,
        width: int,
        dcp_world_size: int,
        interleave: int,
        page_size: int,
        record_bytes: int,
        scale: float,
    ) -> None:
        """Compile every kernel that serving uses and allocate what the provider keeps.

        To be called in the profiling run, so that the memory profiler sees the bytes. Afterwards
        no method compiles, and what is allocated is results, if calls get the scratch they need.

        Args:
            device: where the tensors of all later calls lie.
            head_counts: every number of heads that :meth:`attend` will see: local heads, and
                those of all ranks for ordinary DCP.
            index_heads: heads of the index queries.
            pool_size: tokens in a pool.
            topk: pools to choose.
            width: columns of a token list.
            dcp_world_size: N.
            interleave: I, tokens.
            page_size: P of the latent cache.
            record_bytes: bytes of a latent record.
            scale: softmax scale of :meth:`attend`.

        Raises:
            ValueError: the provider has no kernel for one of the sizes. The message has both.
        """
        ...

    def write_records(
        self, latents: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Quantise latents into the paged FP8 cache.

        Per group of 128: scale = amax / 448 (1.0 for a group of zeros), value / scale rounded to
        nearest even e4m3, saturating.

        Args:
            latents: [T, 512], bf16.
            cache: [pages, P, 528], uint8. The page stride may be padded.
            slot_mapping: [T], int32 or int64. ``page * P + offset``; negative rows are skipped.
        """
        ...

    def pack_records(
        self,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        local_lens: torch.Tensor,
        starts: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Copy this rank's visible records, request after request, into its send span.

        Local token j of request r lies at ``cache[block_table[r, j // P], j % P]`` and goes to
        ``out[starts[r] + j]``. Rows of ``out`` that belong to no request are not written.

        Args:
            cache: [pages, P, 528], uint8. The page stride may be padded.
            block_table: [R, B], int32. Physical pages of each request.
            local_lens: [R], int32. Records of each request on this rank.
            starts: [R], int32. First row of each request in ``out``.
            out: [padded, 528], uint8.
        """
        ...

    def write_pools(
        self,
        k: torch.Tensor,
        gate: torch.Tensor,
        ape: torch.Tensor,
        index_cache: torch.Tensor,
        pool_slots: torch.Tensor,
        tail_cache: torch.Tensor | None,
        tail_slots: torch.Tensor,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        gathered: PoolPlaces | None = None,
    ) -> None:
        """Compress the pools that end in this batch and keep the last tokens for later pools.

        Pool: softmax over its tokens of ``gate + ape``, per dimension; weighted sum of ``k``; bf16;
        128-wide Hadamard / sqrt(128); bf16; scale ``2 ** ceil(log2(max(amax, 1e-4) / 448))``; e4m3.
        The formula is the one of the GLM-5.3-Flash indexer in stock vLLM.

        Tokens of a pool that precede this batch are read from the tail cache, before the tail
        cache receives this batch's tokens. Chunk cuts may therefore fall anywhere.

        Args:
            k: [T, 128], bf16.
            gate: [T, 128], bf16.
            ape: [pool_size, 128], fp32. Bias of each place in the pool.
            index_cache: [index pages, 64, 132], uint8, planar. The page stride may be padded.
            pool_slots: [T], int64. ``index page * 64 + place``; >= 0 only on the last token of a
                pool that this rank owns.
            tail_cache: [tail blocks, 2, ring, 128], bf16, or None. Half 0 holds k, half 1 gate.
            tail_slots: [T], int64. ``block * ring + position % ring``; negative: not stored.
            positions: [T], int64. Position in its own request.
            query_start_loc: [R + 1], int32. Tokens from ``query_start_loc[-1]`` on are padding.
            gathered: where every pool that ends in this batch goes besides, as the same bytes: pool
                ``p = position // pool_size`` of request r to place ``p % 64`` of page
                ``page_starts[r] + p // 64``. None: nowhere.

        Raises:
            ValueError: a pool began before this batch and there is no tail to complete it from.
        """
        ...

    def pack_pools(
        self,
        index_cache: torch.Tensor,
        block_table: torch.Tensor,
        local_lens: torch.Tensor,
        starts: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Copy this rank's visible index pools into its send span, as 132-byte records.

        Args:
            index_cache: [index pages, 64, 132], uint8, planar. The page stride may be padded.
            block_table: [R, B], int32. Index pages of each request.
            local_lens: [R], int32. Pools of each request on this rank.
            starts: [R], int32. First row of each request in ``out``.
            out: [padded, 132], uint8. Rows that belong to no request are not written.
        """
        ...

    def unpack_pools(
        self,
        gathered: torch.Tensor,
        starts: torch.Tensor,
        pool_lens: torch.Tensor,
        interleave: int,
        out: torch.Tensor,
        page_starts: torch.Tensor,
    ) -> None:
        """Lay gathered pools out in global order, in planar pages.

        Args:
            gathered: [N * padded, 132], uint8, rank-major.
            starts: [N, R], int32. First row of each request inside each rank's span.
            pool_lens: [R], int32. Global pools of each request.
            interleave: pools (tokens / pool_size) that stay on one rank before the next.
            out: [pages, 8448], uint8. Places past a request's last pool are not written.
            page_starts: [R], int32. First page of each request.
        """
        ...

    def check_index_cache(self, index_cache: torch.Tensor) -> None:
        """Check that :meth:`select_pools` can read a cache: called when vLLM binds it.

        Reads sizes and strides only.

        Args:
            index_cache: [index pages, 64, 132], uint8, planar. The page stride may be padded.

        Raises:
            ValueError: the layout is another one, or the cache is larger than page numbers reach.
        """
        ...

    def select_pools(
        self,
        q_fp8: torch.Tensor,
        weights: torch.Tensor,
        index_pages: torch.Tensor,
        page_table: torch.Tensor,
        req_id: torch.Tensor,
        pool_counts: torch.Tensor,
        topk: int,
        scratch: Scratch | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose each row's best pools.

        ``score = scale_k * sum over heads of relu(q . k) * weight``.

        Args:
            q_fp8: [T, H, 128], e4m3.
            weights: [T, H], fp32. Include the query scale and the softmax scale.
            index_pages: [index pages, 64, 132] or [index pages, 8448], uint8, planar.
            page_table: [R, W], int32. Index pages of each request.
            req_id: [T], int32. Request of each row, negative for padding.
            pool_counts: [T], int32. Pools the row may see.
            topk: pools to choose.
            scratch: tensors of :meth:`selection_scratch_shapes`. Contents are lost.

        Returns:
            pool_ids: [T, topk], int32. The visible pools of the highest scores, ties to the lower
                id, in ascending order of ids. -1 after the last one.
            scores: [T, topk], fp32. Score of each id, -inf where the id is -1.
        """
        ...

    def merge_pool_candidates(
        self, scores: torch.Tensor, global_ids: torch.Tensor, topk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge the candidates of all ranks (ordinary DCP), or of two windows of a context.

        Args:
            scores: [T, C], fp32. Ignored where the id is negative.
            global_ids: [T, C], int32. Global pool ids, without duplicates.
            topk: pools to keep.

        Returns:
            pool_ids: [T, topk], int32. What :meth:`select_pools` would give over all pools.
            scores: [T, topk], fp32. Score of each id, -inf where the id is -1.
        """
        ...

    def expand_pools(
        self, pool_ids: torch.Tensor, positions: torch.Tensor, pool_size: int, width: int
    ) -> torch.Tensor:
        """Turn chosen pools into token ids and append the incomplete pool.

        Args:
            pool_ids: [T, topk], int32. Ids that are negative or not complete at the row's position
                are dropped.
            positions: [T], int64. Position of each row, negative for padding.
            pool_size: tokens in a pool.
            width: columns of the result, at least ``topk * pool_size + pool_size - 1``.

        Returns:
            [T, width], int32: history tokens in the order of ``pool_ids``, then those from
            ``(position + 1) // pool_size * pool_size`` to ``position``, then -1.
        """
        ...

    def remap(
        self,
        token_ids: torch.Tensor,
        req_id: torch.Tensor,
        starts: torch.Tensor,
        padded: int,
        dcp_world_size: int,
        interleave: int,
        out: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        window: tuple[int, int] | None = None,
        context_lens: torch.Tensor | None = None,
        own_starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids of each request -> rows of the gathered rank-major buffer. Order is kept.

        Token t lies on rank ``(t // I) % N`` at local index ``t // (I * N) * I + t % I``; its
        row is ``rank * padded + starts[rank, request] + local index``. Tokens behind the context
        were not gathered: their row is ``own_starts[request] + t``.

        Of a window only the tokens from its first to its last lie in the buffer, and count from 0
        there. What is left of a row is moved to its beginning.

        Args:
            token_ids: [T, W], int32.
            req_id: [T], int32, negative for padding rows.
            starts: [N, R], int32.
            padded: rows of one rank's span.
            dcp_world_size: N.
            interleave: I, tokens.
            out: [T, W], int32, or None to allocate it. May be ``token_ids`` itself.
            counts: [T], int32, or None. Receives the number of valid entries of each row, which
                is where the row ends if they come first in it.
            window: (begin, end), tokens; begin is a multiple of N * I. None: the buffer holds whole
                requests, and invalid ids stay where they are.
            context_lens: [R], int32. Tokens of each request that lie in the spans, of a window's
                those in it; None: all.
            own_starts: [R], int32. See above; given with ``context_lens``.

        Returns:
            ``out``.
        """
        ...

    def filter_local(
        self,
        token_ids: torch.Tensor,
        req_id: torch.Tensor,
        block_table: torch.Tensor,
        block_stride_rows: int,
        page_size: int,
        rank: int,
        dcp_world_size: int,
        interleave: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids -> flat cache rows of the tokens this rank owns (ordinary DCP, or N = 1).

        Args:
            token_ids: [T, W], int32.
            req_id: [T], int32, negative for padding rows.
            block_table: [R, B], int32. Physical pages of each request on this rank.
            block_stride_rows: records between the starts of two pages.
            page_size: P.
            rank: this rank.
            dcp_world_size: N.
            interleave: I, tokens.

        Returns:
            rows: [T, W], int32. Compacted to the left in the order of ``token_ids``, -1 after.
            counts: [T], int32. Rows kept.
        """
        ...

    def attend(
        self,
        q: torch.Tensor,
        records: torch.Tensor,
        row_ids: torch.Tensor,
        counts: torch.Tensor,
        scale: float,
        scratch: Scratch | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of every row over its own list of records; the latent is both key and value.

        Args:
            q: [T, H, 512], bf16.
            records: [rows, 528], uint8. The row stride may be padded.
            row_ids: [T, W], int32. Negative ids are masked.
            counts: [T], int32. Columns that may be read; what lies past them is ignored.
            scale: softmax scale.
            scratch: tensors of :meth:`scratch_shapes`, or larger in the first dimension. Contents
                are lost. What the call does not fit is left alone.

        Returns:
            out: [T, H, 512], bf16. 0 for a row without a valid id.
            lse: [T, H], fp32. Natural log-sum-exp of the scaled scores; -inf for such a row.
        """
        ...
