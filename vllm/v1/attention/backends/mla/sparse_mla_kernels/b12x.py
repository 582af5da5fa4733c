# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA operations on b12x's own kernels, for compute capability 12.0 and 12.1.

b12x 1.5 gives the record writer, pool selection and attention; what it lacks (packing, unpacking,
pools of packed prompts, merging, rows under DCP) comes from the Triton provider. So do the rows of
a cache without DCP, though b12x has an operation from pools to these: tokens, not rows, are what
vLLM hands from an indexer to the layers that follow it, and b12x compiles in the page stride,
which is not known at the warm-up. That operation is an oracle in the tests.

Every b12x operation is planned, prepared, bound and run; all plans of a process are made by
:func:`declare` from one :class:`Sizes` and prepared by :meth:`B12xKernels.warm_up`. All layers
share them. b12x's session is never told to freeze or to capture: both would hold for the whole
process, and stop what vLLM itself compiles with b12x on first use. A plan that is not prepared
raises here instead.

Three choices keep the number of programs small and independent of the cache that vLLM allocates
after the warm-up:

* Records are read as flat rows, never as pages: row ids are what the callers have anyway, and one
  program then serves the local cache of any page size and the gathered buffer.
* Index pages are addressed in units of :attr:`Sizes.page_unit` bytes: the page table that b12x
  sees holds ``page * (page stride / unit)``, and the cache it sees is a view whose pages start one
  unit apart. b12x compiles the page stride into its program; this way it is the same for every
  cache and for the gathered buffer.
* Attention of many rows goes through one plan per head count, in pieces of its row limit. Few rows
  are split over the columns, by one plan for every power of two.

Scratch comes from the caller with every call: in the engine out of vLLM's workspace, where it is
reserved for the largest plan before the KV cache is sized, and shared with vLLM's other users. The
workspace may move until it is locked. That does no harm: what b12x prepares holds programs and no
addresses, and every call binds anew to the scratch that it is given. Results of b12x lie in it and
are copied out, so nothing in it outlives a call.

Bindings are not kept. That of a selection writes into the scratch, which others overwrite between
two calls. That of attention holds its operands: one that is kept keeps a step's activations alive,
which nobody reserved, and since their memory is then never given out again, no later call would
find its own addresses among the kept ones. Binding is work of the host, some tens of microseconds
an operation (``benchmarks/b12x_bind.py``), and none where a CUDA graph is replayed.
"""

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from vllm.logger import init_logger

from vllm.v1.attention.backends.mla.ckv_gather.geometry import (
    FP8_DS_MLA,
    INDEX_PAGE_BYTES,
    INDEX_RECORD_BYTES,
    MAX_ROW,
    NVFP4_DS_MLA,
    POOLS_PER_INDEX_PAGE,
)

from .base import INDEX_DIM, LATENT_DIM, Scratch, ScratchShapes, SparseMLAKernels
from .triton import TritonKernels, sort_by_id

logger = init_logger(__name__)

_RECORD_BYTES = (FP8_DS_MLA.record_bytes, NVFP4_DS_MLA.record_bytes)
_LN2 = math.log(2)

FLAT_PAGE = 64
"""Page size of plans over flat rows. Any would do."""
MAX_PAGES = 8192
"""Columns of the widest page table: 524,288 pools, 2,097,152 tokens."""
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Row limits of the attention plans that split columns: decode, and most CUDA-graph sizes.

vLLM captures 51 sizes up to 512 by its own choice, and users name others. A plan also serves fewer
rows than its limit, so powers of two cover them all, and eager batches of any size, with nine plans
for a head count. Above 256 rows the plan for many rows takes over, in one piece up to 512 rows.

Into how many parts columns are split follows from the limit. By b12x's own rule for that, not by
measurement, it costs decode under DCP (64 heads) nothing on average over vLLM's sizes; 16 heads
read up to 2.2 times as many columns one after the other as with a plan for each size.
"""
SELECT_ROWS = (8, 64, 512)
"""Row limits of the selection plans."""
EXTEND_TOPK = (512, 1024, 2048, 2051, 2112)
"""Columns that attention of many rows is written for."""
SELECT_TOPK = (512, 1024, 2048)
MAX_INDEX_HEADS = 64
_SUPERTILE = 16384
"""Pools whose scores a selection holds at a time: 32 MiB for 512 rows."""
_ATTEND_BYTES = 64 << 20
"""Bound on an attention plan's scratch, where it is a matter of choice."""
_TABLE_BYTES = 8 << 20
_CHUNK_COLUMNS = 64
"""Columns of a row that one part of a split takes at least."""


# Plans


@dataclass(frozen=True)
class Sizes:
    """What the plans of a process follow from.

    page_size: P, tokens in a physical page of the latent cache.
    record_bytes: 528 (FP8) or 304 (NVFP4).
    head_counts: heads that attention will see.
    index_heads: heads of the index queries.
    topk: pools to choose.
    width: columns that attention reads of a list of row ids.
    scale: softmax scale.
    pool_size: tokens in a pool.

    Raises:
        ValueError: b12x has no kernel for a size. The message has the sizes that it has.
    """

    page_size: int
    record_bytes: int
    head_counts: tuple[int, ...]
    index_heads: int
    topk: int
    width: int
    scale: float
    pool_size: int = 4

    @property
    def page_unit(self) -> int:
        """Bytes between the pages of the view of an index cache that selection sees.

        Page tables are int32, and vLLM spreads the pages of a layer over all memory that it has
        for caches, so the unit decides how much of that selection reaches. Where vLLM cuts blocks
        into several index pages, it addresses these by number, and 2^31 of them are 18 TB. A block
        of one index page is only whole records: 2^31 units are 1.1 TB for FP8, 34 GB for NVFP4
        records. No page of GLM-5.3-Flash is that small.
        """
        if self.page_size // self.pool_size > POOLS_PER_INDEX_PAGE:
            return INDEX_PAGE_BYTES
        return math.gcd(self.record_bytes, INDEX_PAGE_BYTES)

    def __post_init__(self) -> None:
        _check(
            self.record_bytes in _RECORD_BYTES,
            f"records of {self.record_bytes} bytes, b12x has kernels for {_RECORD_BYTES}",
        )
        _check(self.page_size > 0, f"page_size is {self.page_size}, need at least 1")
        _check(
            self.width in EXTEND_TOPK,
            f"lists of {self.width} rows, b12x has kernels for {EXTEND_TOPK} columns",
        )
        for heads in self.head_counts:
            _check(
                heads > 0 and heads % 8 == 0,
                f"{heads} heads, b12x has kernels for multiples of 8; use fewer ranks "
                "(--tensor-parallel-size)",
            )
        _check(
            self.topk in SELECT_TOPK,
            f"topk is {self.topk}, b12x has kernels for {SELECT_TOPK} pools",
        )
        tiles = -(-self.index_heads // 16)
        _check(
            0 < self.index_heads <= MAX_INDEX_HEADS and tiles in (1, 2, 4),
            f"{self.index_heads} index heads, b12x has kernels for 1 to 32 and 49 to "
            f"{MAX_INDEX_HEADS}",
        )
        _check(
            math.isfinite(self.scale) and self.scale > 0,
            f"the softmax scale is {self.scale}, need a positive number",
        )


@dataclass(frozen=True)
class RowPlan:
    """A plan for at most ``rows`` rows.

    natural_lse: its log-sum-exp is a natural logarithm, not one of base 2.
    """

    rows: int
    plan: Any
    natural_lse: bool = False


@dataclass(frozen=True)
class Plans:
    """Every plan of a process. Immutable, shared by all layers.

    decode: by heads, ascending in their row limits.
    extend: by heads.
    select: ascending in their row limits.
    """

    decode: Mapping[int, tuple[RowPlan, ...]]
    extend: Mapping[int, RowPlan]
    select: tuple[RowPlan, ...]

    def attention(self, rows: int, heads: int) -> RowPlan:
        """The plan for a batch of ``rows``: split if one is large enough, else in pieces."""
        split = self.decode[heads]
        return _smallest(split, rows) if rows <= split[-1].rows else self.extend[heads]

    def names(self) -> list[tuple[str, Any]]:
        """(name, plan) of each, the name unique."""
        named = []
        for heads, plans in self.decode.items():
            named += [(f"decode/{heads} heads/{p.rows} rows", p.plan) for p in plans]
        named += [
            (f"extend/{heads} heads/{p.rows} rows", p.plan) for heads, p in self.extend.items()
        ]
        named += [(f"select/{p.rows} rows", p.plan) for p in self.select]
        return named


def extend_rows(heads: int) -> int:
    """Row limit of the plan for many rows: a multiple of 256, at most 4,096."""
    row_bytes = heads * (LATENT_DIM * 2 + 4)
    return min(4096, max(256, _ATTEND_BYTES // row_bytes // 256 * 256))


def split_parts(heads: int, rows: int, width: int) -> int:
    """Most parts that a row's columns are split into, within the bytes for partial results."""
    part_bytes = rows * heads * (LATENT_DIM * 2 + 4)
    return max(1, min(-(-width // _CHUNK_COLUMNS), _ATTEND_BYTES // part_bytes))


def attention_caps(sizes: Sizes, device: torch.device, *, heads: int, rows: int, mode: str) -> Any:
    """b12x's capacities of one attention plan. mode: ``"decode"`` or ``"extend"``."""
    mla = importlib.import_module("b12x.attention.sparse_mla")
    record: dict[str, Any] = {"cache_record_bytes": sizes.record_bytes}
    if sizes.record_bytes == NVFP4_DS_MLA.record_bytes:
        record |= {"scale_format": 2, "latent_scale_per_token": True}
    if mode == "decode":
        record["max_chunks_per_row"] = split_parts(heads, rows, sizes.width)
    return mla.Caps(
        device=device,
        num_q_heads=heads,
        max_q_rows=rows,
        max_width=sizes.width,
        softmax_scale=sizes.scale,
        kv_dtype=torch.uint8,
        head_dim=LATENT_DIM,
        v_head_dim=LATENT_DIM,
        model_type=mla.ModelType.GLM_NEXT,
        mode=mode,
        page_size=FLAT_PAGE,
        return_lse=True,
        # What is not split knows base 2 only and is converted here.
        lse_scale="natural" if mode == "decode" else "base2",
        **record,
    )


def selection_caps(sizes: Sizes, device: torch.device, *, rows: int) -> Any:
    """b12x's capacities of one selection plan."""
    dsa = importlib.import_module("b12x.attention.dsa_indexer")
    return dsa.Caps(
        device=device,
        num_q_heads=sizes.index_heads,
        max_q_rows=rows,
        max_page_table_width=MAX_PAGES,
        topk=sizes.topk,
        # The other mode reads the first row's page table for all rows.
        mode="decode",
        route="paged_tiled",
        supertile_k=_SUPERTILE,
    )


def selection_operands(sizes: Sizes, *, rows: int) -> dict[str, dict[str, Any]]:
    """Shapes, strides, dtypes and alignments of what a selection plan will be bound to."""

    def operand(dtype: str, *shape: int, strides: tuple[int, ...] | None = None) -> dict[str, Any]:
        dense = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return {
            "shape": shape,
            "strides": dense if strides is None else strides,
            "dtype": dtype,
            "alignment": 16,
        }

    heads = sizes.index_heads
    return {
        "q_fp8": operand("float8_e4m3fn", rows, heads, INDEX_DIM),
        "query_weights": operand("float32", rows, heads),
        "index_k_cache": operand("uint8", 1, INDEX_PAGE_BYTES, strides=(sizes.page_unit, 1)),
        "page_table": operand("int32", rows, MAX_PAGES),
        "cache_lengths": operand("int32", rows),
        "active_width": operand("int32", 1),
        "output_indices": operand("int32", rows, sizes.topk),
        "output_scores": operand("float32", rows, sizes.topk),
    }


def declare(sizes: Sizes, device: torch.device) -> Plans:
    """Declare every plan but the writers', which b12x derives from tensors. Compiles nothing.

    device: with an index, for example ``cuda:0``.
    """
    mla = importlib.import_module("b12x.attention.sparse_mla")
    dsa = importlib.import_module("b12x.attention.dsa_indexer")

    def attention(heads: int, rows: int, mode: str) -> RowPlan:
        caps = attention_caps(sizes, device, heads=heads, rows=rows, mode=mode)
        return RowPlan(rows, mla.plan(caps), caps.lse_scale == "natural")

    def selection(rows: int) -> RowPlan:
        caps = selection_caps(sizes, device, rows=rows)
        operands = selection_operands(sizes, rows=rows)
        invocation = dsa.invocation_from_descriptors(caps, operands=operands)
        return RowPlan(rows, dsa.plan(caps, invocation=invocation))

    heads = sorted(set(sizes.head_counts))
    return Plans(
        decode=MappingProxyType(
            {h: tuple(attention(h, rows, "decode") for rows in DECODE_ROWS) for h in heads}
        ),
        extend=MappingProxyType({h: attention(h, extend_rows(h), "extend") for h in heads}),
        select=tuple(selection(rows) for rows in SELECT_ROWS),
    )


def attention_scratch(sizes: Sizes, plans: Plans, heads: int, width: int) -> ScratchShapes:
    """What attention of ``heads`` heads takes: for the largest plan, and narrower lists.

    width: columns of the lists that vLLM passes. Wider ones than ``sizes.width`` are copied.
    """
    row_plans = (*plans.decode[heads], plans.extend[heads])
    shapes: ScratchShapes = [((_most_bytes(row_plans),), torch.uint8)]
    if width > sizes.width:
        shapes.append(((max(plan.rows for plan in row_plans), sizes.width), torch.int32))
    return shapes


def selection_scratch(plans: Plans) -> ScratchShapes:
    """What a selection takes: for the largest plan, and page tables and lengths of rows."""
    return [
        ((_most_bytes(plans.select),), torch.uint8),
        ((_TABLE_BYTES // 4,), torch.int32),
        ((SELECT_ROWS[-1],), torch.int32),
    ]


def _most_bytes(row_plans: Sequence[RowPlan]) -> int:
    return max(_scratch_bytes(row_plan.plan) for row_plan in row_plans)


def _smallest(plans: Sequence[RowPlan], rows: int) -> RowPlan:
    """The plan with the lowest limit that takes ``rows``, else the one with the highest."""
    return next((p for p in plans if rows <= p.rows), plans[-1])


# What b12x leaves to its caller


@triton.jit(
    do_not_specialize=["row_stride", "width"],
    do_not_specialize_on_alignment=["row_ids", "counts", "lengths", "out"],
)
def _lengths_kernel(
    row_ids, row_stride, counts, lengths, out, width, COPY: tl.constexpr, BLOCK: tl.constexpr
):
    """Columns to read: up to the last valid one, 0 where none is valid. Copies these columns.

    b12x's result is undefined for a row whose columns are all invalid.
    """
    row = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(counts + row), width)
    last = tl.full([BLOCK], 0, tl.int32)
    for base in range(0, count, BLOCK):
        column = base + tl.arange(0, BLOCK)
        index = tl.load(row_ids + row * row_stride + column, mask=column < count, other=-1)
        last = tl.maximum(last, tl.where(index >= 0, column + 1, 0))
        if COPY:
            tl.store(out + row * width + column, index, mask=column < count)
    tl.store(lengths + row, tl.max(last, axis=0))


@triton.jit(
    do_not_specialize=["table_stride", "columns", "units", "row0"],
    do_not_specialize_on_alignment=["table", "req_id", "pool_counts"],
)
def _row_tables_kernel(
    table,
    table_stride,
    req_id,
    pool_counts,
    out,
    lengths,
    columns,
    units,
    row0,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Page table and length of each row, from those of its request; padding rows see nothing."""
    row = tl.program_id(0)
    request = tl.load(req_id + row0 + row).to(tl.int64)
    seen = tl.minimum(tl.maximum(tl.load(pool_counts + row0 + row), 0), columns * PLACES)
    seen = tl.where(request >= 0, seen, 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < (seen + PLACES - 1) // PLACES
    page = tl.load(table + request * table_stride + column, mask=live)
    tl.store(out + row.to(tl.int64) * columns + column, page * units, mask=live)
    if tl.program_id(1) == 0:
        tl.store(lengths + row, seen)


@triton.jit
def _order_kernel(ids, scores, lengths, TOPK: tl.constexpr):
    """Put one row of a selection in the order of the contract, in place.

    b12x gives the first ids in ascending order to a row that sees at most TOPK pools, and the best
    ones in no order to any other.
    """
    row = tl.program_id(0)
    place = row.to(tl.int64) * TOPK + tl.arange(0, TOPK)
    seen = tl.load(lengths + row)
    index = tl.load(ids + place)
    score = tl.load(scores + place)
    if seen <= TOPK:
        live = tl.arange(0, TOPK) < seen
        index = tl.where(live, index, -1)
        score = tl.where(live, score, float("-inf"))
    else:
        index, score = sort_by_id(index, score)
    tl.store(ids + place, index)
    tl.store(scores + place, score)


def _launch_lengths(
    row_ids: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor | None = None,
) -> None:
    """out: [rows, fewer columns] to copy the columns that are read to, or None."""
    width = (row_ids if out is None else out).shape[1]
    _lengths_kernel[(row_ids.shape[0],)](
        row_ids,
        row_ids.stride(0),
        counts,
        lengths,
        lengths if out is None else out,
        width,
        COPY=out is not None,
        BLOCK=1024,
        num_warps=4,
    )


def _launch_row_tables(
    page_table: torch.Tensor,
    req_id: torch.Tensor,
    pool_counts: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    units: int,
    row0: int,
) -> None:
    rows, columns = table.shape
    _row_tables_kernel[(rows, triton.cdiv(columns, 1024))](
        page_table,
        page_table.stride(0),
        req_id,
        pool_counts,
        table,
        lengths,
        columns,
        units,
        row0,
        PLACES=POOLS_PER_INDEX_PAGE,
        BLOCK=1024,
        num_warps=4,
    )


def _launch_order(ids: torch.Tensor, scores: torch.Tensor, lengths: torch.Tensor) -> None:
    rows, topk = ids.shape
    _order_kernel[(rows,)](ids, scores, lengths, TOPK=topk, num_warps=4)


def compile_own(sizes: Sizes, device: torch.device) -> None:
    """Compile the kernels of this module: launch each once, on one row that selects nothing."""
    one = torch.zeros(1, dtype=torch.int32, device=device)
    ids = torch.zeros(1, sizes.width, dtype=torch.int32, device=device)
    _launch_lengths(ids, one, one.clone())
    _launch_lengths(ids, one, one.clone(), ids.clone())
    _launch_row_tables(one.view(1, 1), one, one, one.view(1, 1).clone(), one.clone(), 1, 0)
    ids = torch.zeros(1, sizes.topk, dtype=torch.int32, device=device)
    _launch_order(ids, torch.zeros_like(ids, dtype=torch.float32), one)


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _check_tensor(
    name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int | None]
) -> None:
    """Check dtype, rank and sizes (None: any size)."""
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits or tensor.dtype not in dtypes:
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        kinds = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, need [{wanted}] of {kinds}"
        )


def _check_aligned(name: str, tensor: torch.Tensor, multiple: int, *strides: int) -> None:
    _check(
        tensor.data_ptr() % multiple == 0 and all(s % multiple == 0 for s in strides),
        f"{name} starts at {tensor.data_ptr():#x} with strides of {strides} bytes, need multiples "
        f"of {multiple}",
    )


def page_units(pages: int, page_stride: int, unit: int) -> int:
    """The page stride of an index cache in units.

    page_stride, unit: bytes.

    Raises:
        ValueError: pages do not start on units, or the last one has no int32 number of units.
    """
    _check(
        page_stride % unit == 0 and page_stride >= INDEX_PAGE_BYTES,
        f"index pages lie {page_stride} bytes apart, need a multiple of {unit} and at least "
        f"{INDEX_PAGE_BYTES}",
    )
    units = page_stride // unit
    _check(
        (pages - 1) * units <= MAX_ROW,
        f"an index cache of {pages:,} pages, {page_stride:,} bytes apart, spans "
        f"{pages * page_stride:,} bytes; selection reaches {(MAX_ROW + 1) * unit:,}: lower "
        "--gpu-memory-utilization or set --num-gpu-blocks-override",
    )
    return units


class B12xKernels:
    """:class:`~.base.SparseMLAKernels` on SM120 and SM121.

    Keeps nothing but plans and one number. A call without scratch allocates it, which tools may do
    and the engine never does.

    Sizes that b12x has no kernel for are served by ``shared`` altogether; the log says so.

    After :meth:`warm_up`, a call for which nothing was prepared raises ``RuntimeError``: b12x would
    compile in the middle of serving, and could not while a graph is captured.

    Args:
        shared: the provider of what b12x lacks; left out, the Triton provider.
    """

    def __init__(self, shared: SparseMLAKernels | None = None) -> None:
        self.passes_on = False
        """Whether ``shared`` serves everything."""
        self.sizes: Sizes | None = None
        self.plans: Plans | None = None
        self._writers: dict[torch.dtype, Any] = {}
        self._mla = importlib.import_module("b12x.attention.sparse_mla")
        self._dsa = importlib.import_module("b12x.attention.dsa_indexer")
        self._session: Any = None
        self._width = 0
        self._capacity = torch.empty(0)
        self._attention_scratch: dict[int, ScratchShapes] = {}
        self._selection_scratch: ScratchShapes = []
        self._shared = shared = TritonKernels() if shared is None else shared
        self.pack_records = shared.pack_records
        self.pack_pools = shared.pack_pools
        self.unpack_pools = shared.unpack_pools
        self.write_pools = shared.write_pools
        self.merge_pool_candidates = shared.merge_pool_candidates
        self.expand_pools = shared.expand_pools
        self.remap = shared.remap
        self.filter_local = shared.filter_local

    def scratch_shapes(
        self, *, max_records: int | None, max_tokens: int, num_heads: int, width: int
    ) -> ScratchShapes:
        """See :meth:`SparseMLAKernels.scratch_shapes`: the largest need of all plans."""
        if self.passes_on:
            return self._shared.scratch_shapes(
                max_records=max_records, max_tokens=max_tokens, num_heads=num_heads, width=width
            )
        self._planned()
        return self._attention_scratch[num_heads]

    def selection_scratch_shapes(self) -> ScratchShapes:
        """See :meth:`SparseMLAKernels.selection_scratch_shapes`."""
        if self.passes_on:
            return self._shared.selection_scratch_shapes()
        self._planned()
        return self._selection_scratch

    def _planned(self) -> tuple[Sizes, Plans]:
        if self.sizes is None or self.plans is None:
            raise RuntimeError(
                "nothing is prepared yet: call warm_up in the profiling run, before the first batch"
            )
        return self.sizes, self.plans

    # Preparation

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
        """See :meth:`SparseMLAKernels.warm_up`.

        Raises:
            ValueError: neither b12x nor the other provider has a kernel for one of the sizes.
            RuntimeError: other sizes have been prepared before.
        """
        common: dict[str, Any] = {
            "pool_size": pool_size,
            "topk": topk,
            "width": width,
            "dcp_world_size": dcp_world_size,
            "interleave": interleave,
            "page_size": page_size,
            "record_bytes": record_bytes,
            "scale": scale,
        }
        try:
            sizes = Sizes(
                page_size=page_size,
                record_bytes=record_bytes,
                head_counts=tuple(sorted(set(head_counts))),
                index_heads=index_heads,
                topk=topk,
                # vLLM aligns its lists to more columns than a selection fills.
                width=min(width, topk * pool_size + pool_size - 1),
                scale=scale,
                pool_size=pool_size,
            )
        except ValueError as error:
            name = type(self._shared).__name__
            logger.warning("%s: %s serves this model instead of b12x", error, name)
            self.passes_on = True
            self._shared.warm_up(device, head_counts=head_counts, index_heads=index_heads, **common)
            return
        if self.sizes is not None:
            if (sizes, width) != (self.sizes, self._width):
                raise RuntimeError(f"{self.sizes} is prepared and cannot become {sizes}; restart")
            return
        self._width = width
        if device.type == "cuda" and device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        # Its own attention and selection are not used here.
        self._shared.warm_up(device, head_counts=(), index_heads=0, **common)
        self.sizes, self.plans = sizes, declare(sizes, device)
        self._attention_scratch = {
            heads: attention_scratch(sizes, self.plans, heads, width) for heads in sizes.head_counts
        }
        self._selection_scratch = selection_scratch(self.plans)
        capacity = MAX_PAGES * POOLS_PER_INDEX_PAGE
        self._capacity = torch.full((1,), capacity, dtype=torch.int32, device=device)
        self._prepare(device)
        compile_own(sizes, device)

    def _prepare(self, device: torch.device) -> None:
        """Compile and run every plan once, on inputs that select nothing, at its row limit.

        The first run of a split plan fixes for how many rows and parts it is good.
        """
        preparation = importlib.import_module("b12x.preparation")
        # Held for ever: closing a session releases its plans. Compiles in this process, because
        # vLLM's workers may not have children.
        self._session = preparation.PreparationSession(
            device=device, autotune=False, compile_workers=0
        )
        sizes, plans = self._planned()
        most = max(_scratch_bytes(plan) for _, plan in plans.names())
        scratch = torch.empty(most, dtype=torch.uint8, device=device)

        def call(run: Any) -> Any:
            return preparation.PreparedCall(run=run)

        def attention(heads: int, rows: int) -> Any:
            q = torch.zeros(rows, heads, LATENT_DIM, dtype=torch.bfloat16, device=device)
            ids = torch.zeros(rows, sizes.width, dtype=torch.int32, device=device)
            none = torch.zeros(rows, dtype=torch.int32, device=device)
            cache = torch.zeros(1, FLAT_PAGE, sizes.record_bytes, dtype=torch.uint8, device=device)

            def prepare(state: Any) -> Any:
                binding = state.bind_for_preparation(
                    scratch=scratch,
                    q=q,
                    selected_indices=ids,
                    cache_seqlens_int32=none,
                    nsa_cache_seqlens_int32=none,
                    kv_cache=cache,
                )
                return call(lambda: state.run(binding, kv_cache=cache))

            return prepare

        def selection(rows: int) -> Any:
            # As large as b12x wants a cache to be, for the same choice as with the real one.
            storage = torch.zeros(1 << 18, dtype=torch.uint8, device=device)
            cache = storage.as_strided((2, INDEX_PAGE_BYTES), (sizes.page_unit, 1))
            q = torch.zeros(rows, sizes.index_heads, INDEX_DIM, dtype=torch.uint8, device=device)
            weights = torch.zeros(rows, sizes.index_heads, dtype=torch.float32, device=device)
            ids = torch.zeros(rows, sizes.topk, dtype=torch.int32, device=device)
            scores = torch.zeros(rows, sizes.topk, dtype=torch.float32, device=device)
            table = torch.zeros(rows, 1, dtype=torch.int32, device=device)
            none = torch.zeros(rows, dtype=torch.int32, device=device)

            def prepare(state: Any) -> Any:
                binding = state.bind(
                    scratch=scratch,
                    real_page_table=table,
                    cache_seqlens_int32=none,
                    active_width=self._capacity,
                    expected_num_q_heads=sizes.index_heads,
                )
                return call(
                    lambda: state.run(
                        binding,
                        q_fp8=q.view(torch.float8_e4m3fn),
                        query_weights=weights,
                        index_k_cache=cache,
                        output_indices=ids,
                        output_scores=scores,
                    )
                )

            return prepare

        for heads, split in plans.decode.items():
            for row_plan in (*split, plans.extend[heads]):
                self._session.prepare(
                    [
                        row_plan.plan.request(
                            name=f"attention/{heads}/{row_plan.rows}/{row_plan.plan.query.mode}",
                            prepare_call=attention(heads, row_plan.rows),
                        )
                    ]
                )
        for row_plan in plans.select:
            self._session.prepare(
                [
                    row_plan.plan.request(
                        name=f"selection/{row_plan.rows}", prepare_call=selection(row_plan.rows)
                    )
                ]
            )
        cache = torch.zeros(
            2, sizes.page_size, sizes.record_bytes, dtype=torch.uint8, device=device
        )
        latents = torch.zeros(1, LATENT_DIM, dtype=torch.bfloat16, device=device)
        for dtype in (torch.int32, torch.int64):
            slots = torch.full((1,), -1, dtype=dtype, device=device)
            plan = self._mla.plan_cache_writer(latents, cache, slots)
            self._session.prepare(
                [
                    plan.request(
                        name=f"writer/{dtype}",
                        prepare_call=lambda state, slots=slots: call(
                            lambda: state.run(latents, cache, slots)
                        ),
                    )
                ]
            )
            self._writers[dtype] = plan

    @staticmethod
    def _prepared(plan: Any, what: str) -> Any:
        if plan.prepared is None:
            raise RuntimeError(
                f"{what} is not prepared, and b12x would compile it now; warm_up has to be told of "
                "every size before the first batch"
            )
        return plan

    # Operations

    def write_records(
        self, latents: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See :meth:`SparseMLAKernels.write_records`. Records have the planned width.

        A value byte or a scale may differ by one step from another provider's: b12x multiplies by
        an approximate reciprocal.
        """
        if self.passes_on:
            return self._shared.write_records(latents, cache, slot_mapping)
        sizes, _ = self._planned()
        width = sizes.record_bytes
        _check_tensor("the cache", cache, [torch.uint8], (None, sizes.page_size, width))
        _check(
            cache.stride()[1:] == (width, 1),
            f"the cache's strides inside a page are {cache.stride()[1:]} bytes, need ({width}, 1)",
        )
        _check(
            cache.stride(0) >= sizes.page_size * width or cache.shape[0] == 1,
            f"pages of {sizes.page_size * width} bytes lie {cache.stride(0)} bytes apart",
        )
        _check_aligned("the cache", cache, 16, cache.stride(0))
        _check_tensor("latents", latents, [torch.bfloat16], (None, LATENT_DIM))
        _check(
            latents.stride(1) == 1 and latents.shape[0] >= slot_mapping.shape[0],
            f"latents are {tuple(latents.shape)} with strides {latents.stride()}, need at least "
            f"{slot_mapping.shape[0]} rows with an inner stride of 1",
        )
        _check_aligned("latents", latents, 4, latents.stride(0) * 2)
        _check_tensor("slot_mapping", slot_mapping, [torch.int32, torch.int64], (None,))
        _check(
            slot_mapping.is_contiguous(),
            f"slot_mapping has a stride of {slot_mapping.stride(0)}, need 1",
        )
        if not slot_mapping.shape[0]:
            return
        plan = self._prepared(self._writers[slot_mapping.dtype], "the record writer")
        self._mla.concat_and_cache_glm_next_mla(latents, cache, slot_mapping, plan=plan)

    def check_index_cache(self, index_cache: torch.Tensor) -> None:
        """See :meth:`SparseMLAKernels.check_index_cache`: the last page has an int32 number."""
        if self.passes_on:
            return self._shared.check_index_cache(index_cache)
        self._index_view(index_cache, self._planned()[0].page_unit)

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
        """See :meth:`SparseMLAKernels.select_pools`.

        Of pools with equal scores at the last place, any may be chosen; the order of what was
        chosen is the documented one.
        """
        if self.passes_on:
            return self._shared.select_pools(
                q_fp8, weights, index_pages, page_table, req_id, pool_counts, topk, scratch
            )
        sizes, plans = self._planned()
        heads, i32 = sizes.index_heads, [torch.int32]
        rows = q_fp8.shape[0]
        _check_tensor("q_fp8", q_fp8, [torch.float8_e4m3fn], (None, heads, INDEX_DIM))
        _check_tensor("weights", weights, [torch.float32], (rows, heads))
        _check_tensor("page_table", page_table, i32, (None, None))
        _check_tensor("req_id", req_id, i32, (rows,))
        _check_tensor("pool_counts", pool_counts, i32, (rows,))
        _check(topk == sizes.topk, f"topk is {topk}, {sizes.topk} is prepared")
        for name, tensor in (("page_table", page_table), ("req_id", req_id)):
            _check(tensor.stride(-1) == 1, f"{name} has strides {tensor.stride()}, need 1 inside")
        columns = page_table.shape[1]
        _check(
            columns <= MAX_PAGES,
            f"the page table has {columns} columns, {MAX_PAGES} are prepared: "
            f"{MAX_PAGES * POOLS_PER_INDEX_PAGE:,} pools a request",
        )
        cache, units = self._index_view(index_pages, sizes.page_unit)
        device = q_fp8.device
        ids = torch.empty((rows, topk), dtype=torch.int32, device=device)
        scores = torch.empty((rows, topk), dtype=torch.float32, device=device)
        if not rows:
            return ids, scores
        if not columns or not page_table.shape[0] or not index_pages.shape[0]:
            return ids.fill_(-1), scores.fill_(-math.inf)
        q_fp8, weights = q_fp8.contiguous(), weights.contiguous()
        bytes_, tables, all_lengths = _fitting(scratch, self._selection_scratch, device)
        # A piece may not begin in the middle of 16 bytes; all limits are multiples of 8 rows.
        most = min(SELECT_ROWS[-1], tables.numel() // columns // 8 * 8)
        for begin in range(0, rows, most):
            end = min(begin + most, rows)
            count = end - begin
            table = tables[: count * columns].view(count, columns)
            lengths = all_lengths[:count]
            _launch_row_tables(page_table, req_id, pool_counts, table, lengths, units, begin)
            row_plan = _smallest(plans.select, count)
            binding = self._dsa.bind(
                self._prepared(row_plan.plan, f"a selection for {count} rows"),
                scratch=bytes_,
                q_fp8=q_fp8[begin:end],
                query_weights=weights[begin:end],
                index_k_cache=cache,
                page_table=table,
                cache_lengths=lengths,
                active_width=self._capacity,
                output_indices=ids[begin:end],
                output_scores=scores[begin:end],
            )
            self._dsa.run(binding)
            _launch_order(ids[begin:end], scores[begin:end], lengths)
        return ids, scores

    @staticmethod
    def _index_view(index_pages: torch.Tensor, unit: int) -> tuple[torch.Tensor, int]:
        """The cache with pages ``unit`` bytes apart, and how many of these a page is."""
        width = index_pages.shape[1:].numel()
        _check(
            index_pages.dtype == torch.uint8
            and index_pages.dim() in (2, 3)
            and width == INDEX_PAGE_BYTES
            and (index_pages.dim() == 2 or index_pages.shape[2] == INDEX_RECORD_BYTES),
            f"index pages are {tuple(index_pages.shape)} of {index_pages.dtype}, need pages of "
            f"{POOLS_PER_INDEX_PAGE} x {INDEX_RECORD_BYTES} or {INDEX_PAGE_BYTES} bytes",
        )
        inner = (INDEX_RECORD_BYTES, 1) if index_pages.dim() == 3 else (1,)
        _check(
            index_pages.stride()[1:] == inner,
            f"index page strides inside a page are {index_pages.stride()[1:]}, need {inner}",
        )
        pages = index_pages.shape[0]
        if pages <= 1:
            return index_pages.as_strided((pages, INDEX_PAGE_BYTES), (unit, 1)), 0
        units = page_units(pages, index_pages.stride(0), unit)
        _check_aligned("index_pages", index_pages, 16)
        view = ((pages - 1) * units + 1, INDEX_PAGE_BYTES)
        return index_pages.as_strided(view, (unit, 1)), units

    def attend(
        self,
        q: torch.Tensor,
        records: torch.Tensor,
        row_ids: torch.Tensor,
        counts: torch.Tensor,
        scale: float,
        scratch: Scratch | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`SparseMLAKernels.attend`. Records are contiguous.

        A list may be wider than a selection can fill, but only as many columns as a selection
        fills are read: ``topk * pool_size + pool_size - 1``. That a row id names a record is not
        checked, by b12x neither; callers do under ``VLLM_CKV_DEBUG``.

        Raises:
            RuntimeError: nothing was prepared for the number of heads.
        """
        if self.passes_on:
            return self._shared.attend(q, records, row_ids, counts, scale, scratch)
        sizes, plans = self._planned()
        width = sizes.record_bytes
        _check_tensor("records", records, [torch.uint8], (None, width))
        _check(
            records.is_contiguous(),
            f"records have strides {records.stride()}, need ({width}, 1)",
        )
        _check_aligned("records", records, 16)
        _check(
            records.shape[0] <= MAX_ROW,
            f"{records.shape[0]:,} records, row ids of int32 reach {MAX_ROW:,}; lower "
            "--gpu-memory-utilization or set --num-gpu-blocks-override",
        )
        _check_tensor("q", q, [torch.bfloat16], (None, None, LATENT_DIM))
        rows, heads = q.shape[:2]
        _check_tensor("row_ids", row_ids, [torch.int32], (rows, self._width))
        _check_tensor("counts", counts, [torch.int32], (rows,))
        _check(
            row_ids.is_contiguous() and counts.is_contiguous(),
            f"row_ids and counts have strides {row_ids.stride()} and {counts.stride()}, need "
            "contiguous rows",
        )
        _check(
            math.isclose(scale, sizes.scale, rel_tol=1e-6),
            f"the softmax scale is {scale}, {sizes.scale} is prepared",
        )
        if heads not in plans.extend:
            raise RuntimeError(
                f"attention of {heads} heads is not prepared, only of {sorted(plans.extend)}"
            )
        out = torch.empty((rows, heads, LATENT_DIM), dtype=q.dtype, device=q.device)
        lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
        if not rows:
            return out, lse
        if not records.shape[0]:
            return out.zero_(), lse.fill_(-math.inf)
        q = q.contiguous()
        _check_aligned("q", q, 16)
        lengths = torch.empty(rows, dtype=torch.int32, device=q.device)
        bytes_, *ids = _fitting(scratch, self._attention_scratch[heads], q.device)
        row_plan = plans.attention(rows, heads)
        plan = self._prepared(row_plan.plan, f"attention of {rows} rows and {heads} heads")
        for begin in range(0, rows, row_plan.rows):
            part = slice(begin, min(begin + row_plan.rows, rows))
            narrow = ids[0][: part.stop - begin] if ids else None
            _launch_lengths(row_ids[part], counts[part], lengths[part], narrow)
            binding = self._mla.bind(
                plan,
                scratch=bytes_,
                q=q[part],
                kv_cache=records.unsqueeze(0),
                selected_indices=row_ids[part] if narrow is None else narrow,
                cache_lengths=lengths[part],
                selected_lengths=lengths[part],
            )
            part_out, part_lse = self._mla.run(binding)
            out[part].copy_(part_out)
            if row_plan.natural_lse:
                lse[part].copy_(part_lse)
            else:
                torch.mul(part_lse, _LN2, out=lse[part])
        return out, lse


def _fitting(
    scratch: Scratch | None, shapes: ScratchShapes, device: torch.device
) -> list[torch.Tensor]:
    """The caller's scratch, checked; tensors of their own for a caller that gave none.

    Raises:
        ValueError: a tensor is missing, or smaller than was asked for.
    """
    if not scratch:
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
    _check(
        len(scratch) == len(shapes),
        f"{len(scratch)} tensors of scratch, need {len(shapes)}",
    )
    for number, (tensor, (shape, dtype)) in enumerate(zip(scratch, shapes, strict=True)):
        _check_tensor(f"scratch {number}", tensor, [dtype], (None, *shape[1:]))
        _check(
            tensor.shape[0] >= shape[0] and tensor.is_contiguous(),
            f"scratch {number} is {tuple(tensor.shape)}, need at least {shape}, contiguous",
        )
        _check_aligned(f"scratch {number}", tensor, 16)
    return list(scratch)


def _scratch_bytes(plan: Any) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in plan.scratch_specs())
