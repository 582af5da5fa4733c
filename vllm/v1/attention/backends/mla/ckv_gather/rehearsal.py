# SPDX-License-Identifier: Apache-2.0
"""One layer's two paths without a model: over caches of one page, as calls that can be repeated.

The first run at start and the measuring of rates go through these calls, and so does whoever wants
to know how long a batch of given sizes takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from vllm.v1.attention.backends.mla.ckv_gather import exchange
from vllm.v1.attention.backends.mla.ckv_gather.geometry import (
    INDEX_RECORD_BYTES,
    POOLS_PER_INDEX_PAGE,
)
from vllm.v1.attention.backends.mla.ckv_gather.windows import own_lengths
from vllm.v1.attention.backends.mla.sparse_mla_kernels.base import (
    INDEX_DIM,
    LATENT_DIM,
    IndexQueries,
    PoolPlaces,
)

if TYPE_CHECKING:
    from vllm.v1.attention.backends.mla.ckv_gather.plan import CkvGather
    from vllm.v1.attention.backends.mla.sparse_mla_kernels import SparseMLAKernels


Input = TypeVar("Input")

INDEX_PAGES = 64
"""Different pages of pools: 4,096 pools, so that no more than eight of 32,768 score alike."""


@dataclass(frozen=True)
class LayerShapes:
    """The largest shapes of one layer.

    num_tokens: rows T of a batch.
    local_heads: heads of this rank.
    width: columns of a selection.
    pool_topk: pools that a row selects.
    index_heads: heads of the indexer's query.
    ring: tokens in the tail cache of one request.
    scale: softmax scale.
    """

    num_tokens: int
    local_heads: int
    width: int
    pool_topk: int
    index_heads: int
    ring: int
    scale: float


@dataclass(frozen=True)
class EmptyBatch:
    """Inputs of ``num_tokens`` rows of one request that see nothing and own no slot.

    Made when asked for, so that they live as long as those of a layer.
    """

    shapes: LayerShapes
    num_tokens: int
    device: torch.device

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """(num_tokens, *shape)."""
        return torch.zeros((self.num_tokens, *shape), dtype=dtype, device=self.device)

    def nothing(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """(num_tokens, *shape) of -1."""
        return self.zeros(*shape, dtype=dtype).fill_(-1)

    def req_id(self) -> torch.Tensor:
        """(T,) int32. The request of each row."""
        return self.zeros()

    def pool_counts(self) -> torch.Tensor:
        """(T,) int32. Pools that each row sees."""
        return self.zeros()

    def token_ids(self) -> torch.Tensor:
        """(T, width) int32. Tokens that each row selects."""
        return self.nothing(self.shapes.width)

    def index_queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, heads, 128) e4m3 and their weights (T, heads) float32."""
        heads = self.shapes.index_heads
        return (
            self.zeros(heads, INDEX_DIM, dtype=torch.uint8).view(torch.float8_e4m3fn),
            self.zeros(heads, dtype=torch.float32),
        )

    def query(self) -> torch.Tensor:
        """(T, local heads, 512) bf16."""
        return self.zeros(self.shapes.local_heads, LATENT_DIM, dtype=torch.bfloat16)

    def latents(self) -> torch.Tensor:
        """(T, 512) bf16. Of the rows' own tokens."""
        return self.zeros(LATENT_DIM, dtype=torch.bfloat16)


def kept(make: Callable[[Any], Input]) -> Callable[[Any], Input]:
    """Let a :class:`KeptBatch` call ``make`` once.

    What it gives lies beside the batch's fields. A cache around a bound method would hold the batch
    in a cycle, and its tensors until Python looks for cycles: beyond the profiled peak of a batch.
    """

    @wraps(make)
    def once(self: KeptBatch) -> Input:
        if make.__name__ not in self.made:
            self.made[make.__name__] = make(self)
        return self.made[make.__name__]

    return once


@dataclass(frozen=True)
class KeptBatch(EmptyBatch):
    """The same, made once, for calls that are timed: with random queries.

    Equal scores take a selection longer than real ones do. The inputs go with the batch.
    """

    made: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What :func:`kept` keeps."""

    req_id = kept(EmptyBatch.req_id)
    pool_counts = kept(EmptyBatch.pool_counts)
    token_ids = kept(EmptyBatch.token_ids)

    @kept
    def index_queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        queries, weights = super().index_queries()
        # All finite numbers that are not negative.
        queries.view(torch.uint8).random_(0, 0x7F)
        return queries, weights.normal_()

    @kept
    def query(self) -> torch.Tensor:
        return super().query().normal_()


@dataclass(frozen=True)
class SeeingBatch(KeptBatch):
    """Requests of ``lengths`` tokens, the last ``queries`` of each are rows.

    A row selects random pools of those it sees, from all over the context, as many as it can, and
    the tokens behind the last whole pool. The same on every rank.
    """

    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    pool_size: int

    @classmethod
    def of(
        cls,
        shapes: LayerShapes,
        device: torch.device,
        lengths: Sequence[int],
        queries: Sequence[int],
        pool_size: int,
    ) -> SeeingBatch:
        """The batch; its rows follow from ``queries``."""
        return cls(shapes, sum(queries), device, tuple(lengths), tuple(queries), pool_size)

    @kept
    def req_id(self) -> torch.Tensor:
        counts = torch.tensor(self.queries, device=self.device)
        numbers = torch.arange(len(self.queries), dtype=torch.int32, device=self.device)
        return numbers.repeat_interleave(counts)

    def _seen(self) -> torch.Tensor:
        ends = zip(self.lengths, self.queries, strict=True)
        seen = [torch.arange(end - rows, end, device=self.device) + 1 for end, rows in ends]
        return torch.cat(seen)

    @kept
    def pool_counts(self) -> torch.Tensor:
        return (self._seen() // self.pool_size).int()

    @kept
    def token_ids(self) -> torch.Tensor:
        topk, size = self.shapes.pool_topk, self.pool_size
        seen = self._seen().unsqueeze(1)
        pools, tail = seen // size, seen % size
        taken = pools.clamp(max=topk)
        generator = torch.Generator(self.device).manual_seed(0)
        steps = torch.arange(topk, device=self.device)
        # One pool out of each of equal parts of the context; a part is a pool where all are taken.
        jitter = torch.rand((self.num_tokens, topk), generator=generator, device=self.device)
        parts = taken.clamp(min=1)
        first, behind = (-(-bound * pools // parts) for bound in (steps, steps + 1))
        chosen = first + (jitter * (behind - first)).long()
        tokens = (chosen * size).repeat_interleave(size, 1)
        tokens += torch.arange(size, device=self.device).repeat(topk)
        ids = self.nothing(self.shapes.width)
        column = torch.arange(self.shapes.width, device=self.device)
        whole = topk * size
        ids[:, :whole] = torch.where(column[:whole] < taken * size, tokens, -1).int()
        place = column - taken * size
        in_tail = (place >= 0) & (place < tail)
        return torch.where(in_tail, (pools * size + place).int(), ids)


@dataclass(frozen=True)
class Layer:
    """One layer's two paths over small caches, as calls that can be repeated.

    A batch's tables name their pages everywhere: what is read does not matter, only how much. But
    equal scores take a selection longer, so pools repeat seldom; of records there is one page.
    query_gather, combine: the layer's DCP callables, None without DCP.
    """

    gather: CkvGather
    kernels: SparseMLAKernels
    device: torch.device
    query_gather: Callable[..., torch.Tensor] | None
    combine: Callable[..., torch.Tensor] | None

    @cached_property
    def cache(self) -> torch.Tensor:
        """(1, P, record_bytes) uint8. Random records."""
        geometry, device = self.gather.geometry.get(), self.device
        size = geometry.page_size
        shape = (1, size, geometry.record.record_bytes)
        cache = torch.zeros(shape, dtype=torch.uint8, device=device)
        latents = torch.randn((size, LATENT_DIM), dtype=torch.bfloat16, device=device)
        self.kernels.write_records(latents, cache, torch.arange(size, device=device))
        return cache

    @cached_property
    def index_cache(self) -> torch.Tensor:
        """(pages, 64, 132) uint8. Random pools."""
        device, pool_size = self.device, self.gather.pool_size
        pages = min(self.gather.max_pages, INDEX_PAGES)
        cache = torch.zeros(
            (pages, POOLS_PER_INDEX_PAGE, INDEX_RECORD_BYTES), dtype=torch.uint8, device=device
        )
        tokens = torch.arange(pages * POOLS_PER_INDEX_PAGE * pool_size, device=device)
        keys, gate = torch.randn(
            (2, len(tokens), INDEX_DIM), dtype=torch.bfloat16, device=device
        ).unbind()
        ends = (tokens + 1) % pool_size == 0
        self.kernels.write_pools(
            keys,
            gate,
            torch.zeros((pool_size, INDEX_DIM), dtype=torch.float32, device=device),
            cache,
            torch.where(ends, tokens // pool_size, -1),
            None,
            torch.full_like(tokens, -1),
            tokens,
            torch.tensor([0, len(tokens)], dtype=torch.int32, device=device),
        )
        return cache

    def table(self, num_requests: int, pages: int) -> torch.Tensor:
        """(num_requests, pages) int32."""
        return torch.zeros((num_requests, pages), dtype=torch.int32, device=self.device)

    def index_table(self, num_requests: int, pages: int) -> torch.Tensor:
        """(num_requests, pages) int32. The pages of :attr:`index_cache` in turn."""
        numbers = torch.arange(pages, dtype=torch.int32, device=self.device)
        return (numbers % self.index_cache.shape[0]).repeat(num_requests, 1)

    def write(self, batch: EmptyBatch, places: PoolPlaces | None = None, begin: int = 0) -> None:
        """Write no record, and no pool to the caches.

        places: where the pools that end in the batch go; its tokens are those of one request from
            ``begin`` on, which is the first token of a pool.
        """
        bf16, pool_size = torch.bfloat16, self.gather.pool_size
        slots = batch.nothing(dtype=torch.int64)
        self.kernels.write_records(batch.zeros(LATENT_DIM, dtype=bf16), self.cache, slots)
        ring = batch.shapes.ring
        self.kernels.write_pools(
            batch.zeros(INDEX_DIM, dtype=bf16),
            batch.zeros(INDEX_DIM, dtype=bf16),
            torch.zeros((pool_size, INDEX_DIM), dtype=torch.float32, device=self.device),
            self.index_cache,
            slots,
            torch.zeros((1, 2, ring, INDEX_DIM), dtype=bf16, device=self.device),
            slots,
            torch.arange(batch.num_tokens, device=self.device) + begin,
            torch.tensor([0, batch.num_tokens], dtype=torch.int32, device=self.device),
            places,
        )

    def ordinary(self, batch: EmptyBatch, num_requests: int = 1) -> Callable[[], None]:
        """The ordinary path of ``batch``; every rank takes the tokens of rank 0 for its own."""
        gather, kernels, device = self.gather, self.kernels, self.device
        geometry, shapes, world = gather.geometry.get(), batch.shapes, gather.dcp_world_size
        table, index_table = (
            make(num_requests, gather.max_pages) for make in (self.table, self.index_table)
        )
        req_id, own_pools = batch.req_id(), batch.pool_counts()
        if world > 1:
            own_pools = gather.pool_ownership.local_lengths(own_pools, 0)
        positions = batch.nothing(dtype=torch.int64)
        bounds = torch.tensor([0, batch.num_tokens], dtype=torch.int32, device=device)

        def run() -> None:
            pool_ids, scores = kernels.select_pools(
                *batch.index_queries(),
                self.index_cache,
                index_table,
                req_id,
                own_pools,
                shapes.pool_topk,
                gather.ordinary_scratch.borrow_selection(),
            )
            if world > 1:
                pool_ids, _ = kernels.merge_pool_candidates(
                    *exchange.all_gather_candidates(scores, pool_ids), shapes.pool_topk
                )
            kernels.expand_pools(pool_ids, positions, gather.pool_size, shapes.width)
            del pool_ids, scores
            query = batch.query()
            if self.query_gather is not None:
                query = self.query_gather(query)
            rows, counts = kernels.filter_local(
                batch.token_ids(),
                req_id,
                table,
                block_stride_rows=geometry.page_size,
                page_size=geometry.page_size,
                rank=0,
                dcp_world_size=world,
                interleave=geometry.interleave,
            )
            records = self.cache.flatten(0, 1)
            scratch = gather.ordinary_scratch.borrow_attention()
            out, lse = kernels.attend(query, records, rows, counts, shapes.scale, scratch)
            if self.combine is not None:
                self.combine(out, lse, seq_lens=bounds[1:], query_start_loc=bounds)

        return run

    def gathered(
        self,
        batch: EmptyBatch,
        lengths: Sequence[int],
        queries: Sequence[int] | None = None,
        *,
        capacity: int | None = None,
        selection_shares: int = 1,
        early: bool = False,
    ) -> Callable[[], None]:
        """The gathered path of ``batch``, whose requests see ``lengths`` tokens.

        queries: rows of each request; left out, the last has as many as it can, the others one.
        capacity: visible tokens of a window; left out, what is reserved.
        early: begin the exchanges before anything else, if the batch may.
        """
        gather, kernels, shapes = self.gather, self.kernels, batch.shapes
        others = len(lengths) - 1
        if queries is None:
            queries = [1] * others + [batch.num_tokens - others]
        spans = gather.plan_spans(lengths, queries, batch.num_tokens, capacity=capacity)
        # A batch of the first run may have more rows than it sees tokens.
        seen = [min(pair) for pair in zip(lengths, queries, strict=True)]
        own, pool = own_lengths(lengths, seen, spans) if early else (), gather.pool_size
        plan = gather.layout_batch(lengths, spans, self.device, selection_shares, own)
        records = max(lengths) // gather.dcp_world_size + gather.geometry.get().interleave
        pages = records // POOLS_PER_INDEX_PAGE + 1
        table, index_table = (make(len(lengths), pages) for make in (self.table, self.index_table))
        req_id, pool_counts = batch.req_id(), batch.pool_counts()

        def run() -> None:
            if plan.early is not None:
                gather.begin_layer(
                    plan.early, kernels, self.cache, table, self.index_cache, index_table
                )
                written = replace(batch, num_tokens=own[0])
                self.write(written, gather.own_pools(plan), (lengths[0] - own[0]) // pool * pool)
            gather.select_pools(
                plan,
                kernels,
                IndexQueries(
                    self.index_cache,
                    index_table,
                    *batch.index_queries(),
                    req_id,
                    pool_counts,
                    shapes.pool_topk,
                ),
            )
            gather.attend(
                plan,
                kernels,
                self.cache,
                table,
                batch.token_ids(),
                req_id,
                batch.query(),
                shapes.scale,
                None if plan.early is None else batch.latents(),
            )

        return run
