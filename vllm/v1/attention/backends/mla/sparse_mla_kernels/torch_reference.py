# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA operations in plain torch: the CPU provider and the oracle of the others.

Written for clarity and exactness, not speed; memory is bounded by working on row chunks. Reading
lengths on the host is free here, so it is done freely; a GPU provider must not.
"""

import math

import torch

from vllm.v1.attention.backends.mla.ckv_gather.geometry import (
    INDEX_PAGE_BYTES,
    INDEX_RECORD_BYTES,
    NVFP4_DS_MLA,
    POOLS_PER_INDEX_PAGE,
)
from vllm.v1.attention.backends.mla.ckv_gather.remap import gathered_rows, owner_and_local

from .base import (
    FP8_MAX,
    FP8_RECORD_BYTES,
    INDEX_DIM,
    INDEX_SCALE_OFFSET,
    LATENT_DIM,
    SCALE_GROUP,
    ScratchShapes,
)

_CHUNK_ELEMENTS = 1 << 24
NVFP4_GROUP = 16
E2M1_MAX = 6.0
_E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_E2M1_BORDERS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_RECORD_WIDTHS = (FP8_RECORD_BYTES, NVFP4_DS_MLA.record_bytes)


def quantize_records(latents: torch.Tensor) -> torch.Tensor:
    """[T, 512] bf16 or float -> [T, 528] uint8 FP8 records (see ``base``)."""
    if latents.dim() != 2 or latents.shape[1] != LATENT_DIM:
        raise ValueError(f"latents must be [tokens, {LATENT_DIM}], got {tuple(latents.shape)}")
    groups = latents.float().unflatten(1, (LATENT_DIM // SCALE_GROUP, SCALE_GROUP))
    scales = groups.abs().amax(dim=2) / FP8_MAX
    # amax / 448 may underflow to zero for a non-zero group as well.
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = (groups / scales.unsqueeze(2)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return torch.cat([values.flatten(1).view(torch.uint8), scales.view(torch.uint8)], dim=1)


def quantize_nvfp4_records(latents: torch.Tensor) -> torch.Tensor:
    """[T, 512] bf16 or float -> [T, 304] uint8 NVFP4 records.

    Bytes [0, 256): e2m1 codes, element 2i in the low half of byte i. [256, 288): e4m3 scales of 16
    elements each. [288, 292): zero. [292, 296): fp32 scale of the token, amax / (6 * 448), so that
    the largest group's scale is 448. The rest is zero. An element is code * both scales.
    """
    if latents.dim() != 2 or latents.shape[1] != LATENT_DIM:
        raise ValueError(f"latents must be [tokens, {LATENT_DIM}], got {tuple(latents.shape)}")
    groups = latents.float().unflatten(1, (LATENT_DIM // NVFP4_GROUP, NVFP4_GROUP))
    largest = groups.abs().amax(dim=2)
    token = largest.amax(dim=1, keepdim=True) / (E2M1_MAX * FP8_MAX)
    # A token that is all zeros, or whose scale underflows, is stored as zeros.
    divisor = torch.where(token > 0, token, torch.ones_like(token))
    scales = (largest / divisor / E2M1_MAX).clamp(max=FP8_MAX)
    scales = torch.where(token > 0, scales, torch.zeros_like(scales)).to(torch.float8_e4m3fn)
    step = (scales.float() * divisor).unsqueeze(2)
    values = torch.where(step > 0, groups / step, torch.zeros_like(groups))
    size = torch.bucketize(values.abs(), _E2M1_BORDERS.to(values.device))
    # A border belongs to the neighbour with the even code: bucketize gives it to the lower one.
    on_border = torch.isin(values.abs(), _E2M1_BORDERS.to(values.device))
    size = torch.where(on_border & (size % 2 == 1), size + 1, size)
    codes = (size | torch.where(values < 0, 8, 0)).to(torch.uint8).flatten(1)
    zeros = torch.zeros(latents.shape[0], 8, dtype=torch.uint8, device=latents.device)
    # Without rows it has a stride that does not allow a view of its bytes.
    token = torch.empty_like(token, memory_format=torch.contiguous_format).copy_(token)
    return torch.cat(
        [
            codes[:, 0::2] | (codes[:, 1::2] << 4),
            scales.view(torch.uint8),
            zeros[:, :4],
            token.view(torch.uint8),
            zeros,
        ],
        dim=1,
    )


def _dequantize_nvfp4(records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    packed = records[..., : LATENT_DIM // 2]
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    values = _E2M1_VALUES.to(records.device, dtype)[codes.long()]
    scales = records[..., NVFP4_DS_MLA.scale_offset : 288].contiguous()
    token = records[..., 292:296].contiguous().view(torch.float32).to(dtype)
    step = scales.view(torch.float8_e4m3fn).to(dtype) * token
    return (values.unflatten(-1, (-1, NVFP4_GROUP)) * step.unsqueeze(-1)).flatten(-2)


def dequantize_records(records: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[..., 528] FP8 or [..., 304] NVFP4 records, uint8 -> [..., 512] latents in ``dtype``."""
    _check_width("records are", records.shape[-1])
    if records.shape[-1] == NVFP4_DS_MLA.record_bytes:
        return _dequantize_nvfp4(records, dtype)
    values = records[..., :LATENT_DIM].contiguous().view(torch.float8_e4m3fn).to(dtype)
    scales = records[..., LATENT_DIM:].contiguous().view(torch.float32).to(dtype)
    grouped = values.unflatten(-1, (LATENT_DIM // SCALE_GROUP, SCALE_GROUP))
    return (grouped * scales.unsqueeze(-1)).flatten(-2)


def hadamard128(x: torch.Tensor) -> torch.Tensor:
    """Rotate the last dimension (128) of an fp32 tensor; fp32 butterflies, stride 1 first."""
    shape = x.shape
    for log_stride in range(7):
        pairs = x.reshape(-1, INDEX_DIM >> (log_stride + 1), 2, 1 << log_stride)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack([a + b, a - b], dim=2)
    return x.reshape(shape) * (1.0 / math.sqrt(INDEX_DIM))


def compress_pools(k: torch.Tensor, gate: torch.Tensor, ape: torch.Tensor) -> torch.Tensor:
    """[n, pool, 128] k and gate, [pool, 128] ape -> [n, 132] uint8 index records."""
    score = gate.float() + ape.float()
    # exp in fp64, rounded once: the fp32 one may differ with an element's place in a vector
    # register, and pools must not depend on how a prompt was cut.
    prob = (score - score.amax(dim=1, keepdim=True)).double().exp().float()
    k = k.float()
    total, norm = torch.zeros_like(prob[:, 0]), torch.zeros_like(prob[:, 0])
    for place in range(ape.shape[0]):
        norm = norm + prob[:, place]
        total = total + k[:, place] * prob[:, place]
    x = (total / norm).bfloat16().float()
    x = hadamard128(x).bfloat16().float()
    target = x.abs().amax(dim=1).clamp(min=1e-4) * (1.0 / FP8_MAX)
    # ceil(log2(.)) from the exponent itself, exact at powers of two.
    mantissa, exponent = torch.frexp(target)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = torch.ldexp(torch.ones_like(target), exponent).unsqueeze(1)
    keys = (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return torch.cat([keys.view(torch.uint8), scale.view(torch.uint8)], dim=1)


def index_planes(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Planar index pages -> views of keys [pages, 64, 128] and scales [pages, 64, 4], uint8.

    Accepts [pages, 64, 132] and [pages, 8448]; the page stride may be padded, the bytes of one page
    may not.
    """
    width = pages.shape[1:].numel()
    if pages.dtype != torch.uint8 or width != INDEX_PAGE_BYTES:
        raise ValueError(
            f"an index page is {width} elements of {pages.dtype}, need {INDEX_PAGE_BYTES} bytes"
        )
    inner = pages.stride()[1:]
    expected = (INDEX_RECORD_BYTES, 1) if pages.dim() == 3 else (1,)
    if inner != expected:
        raise ValueError(f"index page strides inside a page are {inner}, need {expected}")
    flat = pages.as_strided(
        (pages.shape[0], INDEX_PAGE_BYTES), (pages.stride(0), 1), pages.storage_offset()
    )
    keys = flat[:, :INDEX_SCALE_OFFSET].unflatten(1, (POOLS_PER_INDEX_PAGE, INDEX_DIM))
    scales = flat[:, INDEX_SCALE_OFFSET:].unflatten(1, (POOLS_PER_INDEX_PAGE, 4))
    return keys, scales


def _place_pools(
    records: torch.Tensor, planes: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
) -> None:
    """Write records [n, 132] to ``slots`` (page * 64 + place) of the planes of index pages."""
    page, place = slots // POOLS_PER_INDEX_PAGE, slots % POOLS_PER_INDEX_PAGE
    for plane, part in zip(planes, records.split((INDEX_DIM, 4), dim=1), strict=True):
        plane[page, place] = part


def _check_width(what: str, width: int) -> None:
    if width not in _RECORD_WIDTHS:
        raise ValueError(
            f"{what} {width} bytes wide, need {FP8_RECORD_BYTES} (FP8) or "
            f"{NVFP4_DS_MLA.record_bytes} (NVFP4)"
        )


def _check_cache(cache: torch.Tensor) -> None:
    if cache.dim() != 3 or cache.dtype != torch.uint8:
        raise ValueError(
            f"the cache is {tuple(cache.shape)} of {cache.dtype}, need "
            f"[pages, page_size, {FP8_RECORD_BYTES}] of uint8"
        )
    _check_width("the cache has records", cache.shape[2])
    if cache.stride()[1:] != (cache.shape[2], 1):
        raise ValueError(
            f"the cache's strides inside a page are {cache.stride()[1:]} bytes, need "
            f"({cache.shape[2]}, 1)"
        )


def _check_span(out: torch.Tensor, width: int, rows: int) -> None:
    if out.dim() != 2 or out.dtype != torch.uint8 or out.shape[1] != width:
        raise ValueError(
            f"the packed buffer is {tuple(out.shape)} of {out.dtype}, need [rows, {width}] of uint8"
        )
    if rows > out.shape[0]:
        raise ValueError(f"{rows} rows to pack, the packed buffer holds {out.shape[0]}")


def _spans(
    local_lens: torch.Tensor, starts: torch.Tensor, page_size: int, block_table: torch.Tensor
):
    """Yield (physical pages, offsets, destination slice) of each request that owns something."""
    lens, begins = local_lens.tolist(), starts.tolist()
    for r, (length, begin) in enumerate(zip(lens, begins[: len(lens)], strict=True)):
        if length <= 0:
            continue
        j = torch.arange(length, device=block_table.device)
        yield block_table[r].long()[j // page_size], j % page_size, slice(begin, begin + length)


def _end_row(local_lens: torch.Tensor, starts: torch.Tensor) -> int:
    ends = [
        begin + length
        for begin, length in zip(starts.tolist(), local_lens.tolist(), strict=False)
        if length > 0
    ]
    return max(ends, default=0)


class TorchReferenceKernels:
    """:class:`~.base.SparseMLAKernels` in torch.

    Args:
        compute_dtype: accumulation dtype of :meth:`attend`; ``torch.float64`` makes it an oracle.
    """

    def __init__(self, compute_dtype: torch.dtype = torch.float32) -> None:
        self.compute_dtype = compute_dtype

    def scratch_shapes(self, **sizes) -> ScratchShapes:
        """See :meth:`SparseMLAKernels.scratch_shapes`: none."""
        return []

    def selection_scratch_shapes(self) -> ScratchShapes:
        """See :meth:`SparseMLAKernels.selection_scratch_shapes`: none."""
        return []

    def warm_up(self, device, **sizes) -> None:
        """See :meth:`SparseMLAKernels.warm_up`: nothing is compiled here."""

    def write_records(self, latents, cache, slot_mapping) -> None:
        """See :meth:`SparseMLAKernels.write_records`."""
        _check_cache(cache)
        slots = slot_mapping.long()
        rows = (slots >= 0).nonzero().squeeze(1)
        slots = slots[rows]
        page_size = cache.shape[1]
        nvfp4 = cache.shape[2] == NVFP4_DS_MLA.record_bytes
        quantize = quantize_nvfp4_records if nvfp4 else quantize_records
        cache[slots // page_size, slots % page_size] = quantize(latents[rows])

    def pack_records(self, cache, block_table, local_lens, starts, out) -> None:
        """See :meth:`SparseMLAKernels.pack_records`."""
        _check_cache(cache)
        _check_span(out, cache.shape[2], _end_row(local_lens, starts))
        for pages, offsets, span in _spans(local_lens, starts, cache.shape[1], block_table):
            out[span] = cache[pages, offsets]

    def write_pools(
        self,
        k,
        gate,
        ape,
        index_cache,
        pool_slots,
        tail_cache,
        tail_slots,
        positions,
        query_start_loc,
        gathered=None,
    ) -> None:
        """See :meth:`SparseMLAKernels.write_pools`."""
        planes = index_planes(index_cache)
        pool_size = ape.shape[0]
        bounds = query_start_loc.long()
        tokens = torch.arange(int(bounds[-1]), device=k.device)
        request = torch.searchsorted(bounds, tokens, right=True) - 1
        first, end = bounds[request], bounds[request + 1]

        wanted = pool_slots[: tokens.numel()] >= 0
        if gathered is not None:
            ends = (positions[: tokens.numel()] + 1) % pool_size == 0
            besides = ends & (request >= gathered.first_request)
            wanted = wanted | besides
        last = wanted.nonzero().squeeze(1)
        if last.numel():
            ends_inside = (positions[last] + 1) % pool_size
            if bool(ends_inside.any()):
                wrong = last[ends_inside != 0][0]
                raise ValueError(
                    f"token {int(wrong)} at position {int(positions[wrong])} has a pool slot but "
                    f"does not end a pool of {pool_size}"
                )
            back = torch.arange(pool_size - 1, -1, -1, device=k.device)
            members = last.unsqueeze(1) - back
            here = members >= first[last].unsqueeze(1)
            source = members.clamp(min=0)
            pool_k, pool_gate = k[source], gate[source]
            if not bool(here.all()):
                needy = last[~here.all(dim=1)]
                if tail_cache is None or bool((tail_slots[needy] < 0).any()):
                    raise ValueError(
                        f"the pool that ends at token {int(needy[0])} began before this batch and "
                        "there is no tail to complete it from"
                    )
                ring = tail_cache.shape[2]
                block = (tail_slots[last].long() // ring).clamp(min=0).unsqueeze(1)
                place = (positions[last].long().unsqueeze(1) - back) % ring
                here = here.unsqueeze(2)
                pool_k = torch.where(here, pool_k, tail_cache[block, 0, place])
                pool_gate = torch.where(here, pool_gate, tail_cache[block, 1, place])
            records = compress_pools(pool_k, pool_gate, ape)
            owned = pool_slots[last] >= 0
            _place_pools(records[owned], planes, pool_slots[last][owned].long())
            if gathered is not None:
                sent = besides[last]
                own, pools = last[sent], positions[last][sent].long() // pool_size
                starts = gathered.page_starts.long()[request[own] - gathered.first_request]
                places = starts * POOLS_PER_INDEX_PAGE + pools
                _place_pools(records[sent], index_planes(gathered.pages), places)

        if tail_cache is not None:
            ring = tail_cache.shape[2]
            # Older tokens of the chunk would land on the same places.
            keep = (tail_slots[: tokens.numel()] >= 0) & (tokens >= end - ring)
            kept = keep.nonzero().squeeze(1)
            slots = tail_slots[kept].long()
            tail_cache[slots // ring, 0, slots % ring] = k[kept].to(tail_cache.dtype)
            tail_cache[slots // ring, 1, slots % ring] = gate[kept].to(tail_cache.dtype)

    def pack_pools(self, index_cache, block_table, local_lens, starts, out) -> None:
        """See :meth:`SparseMLAKernels.pack_pools`."""
        keys, scales = index_planes(index_cache)
        _check_span(out, INDEX_RECORD_BYTES, _end_row(local_lens, starts))
        for pages, offsets, span in _spans(local_lens, starts, POOLS_PER_INDEX_PAGE, block_table):
            out[span, :INDEX_DIM] = keys[pages, offsets]
            out[span, INDEX_DIM:] = scales[pages, offsets]

    def unpack_pools(self, gathered, starts, pool_lens, interleave, out, page_starts) -> None:
        """See :meth:`SparseMLAKernels.unpack_pools`."""
        keys, scales = index_planes(out)
        world = starts.shape[0]
        padded = gathered.shape[0] // world
        _check_span(gathered, INDEX_RECORD_BYTES, 0)
        begins = starts.long()
        for r, (length, page) in enumerate(
            zip(pool_lens.tolist(), page_starts.tolist()[: pool_lens.shape[0]], strict=True)
        ):
            if length <= 0:
                continue
            pool = torch.arange(length, device=gathered.device)
            rank, local = owner_and_local(pool, dcp_world_size=world, interleave=interleave)
            records = gathered[rank * padded + begins[rank, r] + local]
            pages, places = page + pool // POOLS_PER_INDEX_PAGE, pool % POOLS_PER_INDEX_PAGE
            keys[pages, places] = records[:, :INDEX_DIM]
            scales[pages, places] = records[:, INDEX_DIM:]

    def check_index_cache(self, index_cache) -> None:
        """See :meth:`SparseMLAKernels.check_index_cache`: whole pages."""
        index_planes(index_cache)

    def select_pools(
        self, q_fp8, weights, index_pages, page_table, req_id, pool_counts, topk, scratch=None
    ):
        """See :meth:`SparseMLAKernels.select_pools`.

        A score is a pure function of (query, key): dot products are exact in fp64 and heads are
        added in order, so the same key scores the same bits on one rank and on N.
        """
        keys, scales = index_planes(index_pages)
        rows = q_fp8.shape[0]
        pool_ids = torch.full((rows, topk), -1, dtype=torch.int32, device=q_fp8.device)
        scores = torch.full((rows, topk), -math.inf, dtype=torch.float32, device=q_fp8.device)
        live = (req_id >= 0) & (pool_counts > 0)
        for r in req_id[live].unique().tolist():
            members = ((req_id == r) & live).nonzero().squeeze(1)
            most = int(pool_counts[members].max())
            pool = torch.arange(most, device=q_fp8.device)
            pages = page_table[r].long()[pool // POOLS_PER_INDEX_PAGE]
            places = pool % POOLS_PER_INDEX_PAGE
            key = keys[pages, places].contiguous().view(torch.float8_e4m3fn).double().t()
            scale = scales[pages, places].contiguous().view(torch.float32).squeeze(1).double()
            for chunk in members.split(max(1, _CHUNK_ELEMENTS // (most * 4))):
                score = torch.zeros(chunk.numel(), most, dtype=torch.float64, device=q_fp8.device)
                for head in range(q_fp8.shape[1]):
                    dots = (q_fp8[chunk, head].double() @ key).relu_()
                    score += dots * weights[chunk, head].double().unsqueeze(1)
                score = (score * scale).float()
                unseen = pool.unsqueeze(0) >= pool_counts[chunk].unsqueeze(1)
                score.masked_fill_(unseen, -math.inf)
                ids = torch.where(unseen, -1, pool.unsqueeze(0))
                best_ids, best_scores = _best(score, ids, topk)
                width = best_ids.shape[1]
                pool_ids[chunk, :width] = best_ids.int()
                scores[chunk, :width] = best_scores
        return pool_ids, scores

    def merge_pool_candidates(self, scores, global_ids, topk):
        """See :meth:`SparseMLAKernels.merge_pool_candidates`."""
        ids = global_ids.long()
        unknown = torch.iinfo(torch.int64).max
        ids, order = torch.where(ids < 0, unknown, ids).sort(dim=1, stable=True)
        ids = torch.where(ids == unknown, -1, ids)
        best, best_scores = _best(scores.gather(1, order), ids, topk)
        shape = (ids.shape[0], topk)
        out = torch.full(shape, -1, dtype=torch.int32, device=ids.device)
        out_scores = torch.full(shape, -math.inf, dtype=torch.float32, device=ids.device)
        out[:, : best.shape[1]] = best.int()
        out_scores[:, : best.shape[1]] = best_scores
        return out, out_scores

    def expand_pools(self, pool_ids, positions, pool_size, width):
        """See :meth:`SparseMLAKernels.expand_pools`."""
        rows, topk = pool_ids.shape
        needed = topk * pool_size + pool_size - 1
        if width < needed:
            raise ValueError(
                f"width {width} cannot hold {topk} pools of {pool_size} and a tail: need {needed}"
            )
        seen = positions.long().unsqueeze(1) + 1
        ids = pool_ids.long()
        ids = torch.where((ids >= 0) & (ids < seen // pool_size), ids, -1)
        inside = torch.arange(pool_size, device=ids.device)
        history = torch.where(
            ids.unsqueeze(2) >= 0, ids.unsqueeze(2) * pool_size + inside, -1
        ).flatten(1)
        tail = seen // pool_size * pool_size + inside[: pool_size - 1]
        tail = torch.where(tail < seen, tail, -1)
        tokens, _ = _compact(torch.cat([history, tail], dim=1))
        out = torch.full((rows, width), -1, dtype=torch.int32, device=ids.device)
        out[:, :needed] = tokens.int()
        return out

    def remap(
        self,
        token_ids,
        req_id,
        starts,
        padded,
        dcp_world_size,
        interleave,
        out=None,
        counts=None,
        window=None,
        context_lens=None,
        own_starts=None,
    ) -> torch.Tensor:
        """See :meth:`SparseMLAKernels.remap`."""
        if starts.shape[0] != dcp_world_size:
            raise ValueError(f"starts has {starts.shape[0]} ranks, dcp_world_size={dcp_world_size}")
        if window is not None:
            begin, end = window
            inside = (token_ids >= begin) & (token_ids < end)
            token_ids, _ = _compact(torch.where(inside, token_ids - begin, -1))
        rows = gathered_rows(
            token_ids,
            req_id,
            starts,
            padded,
            dcp_world_size=dcp_world_size,
            interleave=interleave,
            context_lens=context_lens,
            own_starts=own_starts,
        )
        if counts is not None:
            counts.copy_((rows >= 0).sum(1))
        return rows if out is None else out.copy_(rows)

    def filter_local(
        self,
        token_ids,
        req_id,
        block_table,
        block_stride_rows,
        page_size,
        rank,
        dcp_world_size,
        interleave,
    ):
        """See :meth:`SparseMLAKernels.filter_local`."""
        valid = (token_ids >= 0) & (req_id >= 0).unsqueeze(1)
        token = torch.where(valid, token_ids, 0).long()
        owner, local = owner_and_local(token, dcp_world_size=dcp_world_size, interleave=interleave)
        valid &= owner == rank
        local = torch.where(valid, local, 0)
        page = block_table.long()[req_id.clamp(min=0).long().unsqueeze(1), local // page_size]
        row = torch.where(valid, page * block_stride_rows + local % page_size, -1)
        rows, counts = _compact(row)
        if rows.numel() and int(rows.max()) > torch.iinfo(torch.int32).max:
            raise ValueError(f"cache row {int(rows.max())} does not fit int32")
        return rows.int(), counts.int()

    def attend(self, q, records, row_ids, counts, scale, scratch=None):
        """See :meth:`SparseMLAKernels.attend`."""
        if records.dim() != 2 or records.stride(1) != 1:
            raise ValueError(
                f"records are {tuple(records.shape)} with strides {records.stride()}, need "
                f"[rows, {FP8_RECORD_BYTES}] with inner stride 1"
            )
        _check_width("records are", records.shape[1])
        rows, heads = q.shape[0], q.shape[1]
        out = torch.zeros_like(q)
        lse = torch.full((rows, heads), -math.inf, dtype=torch.float32, device=q.device)
        if rows == 0 or records.shape[0] == 0:
            return out, lse
        dtype = self.compute_dtype
        width = row_ids.shape[1]
        column = torch.arange(width, device=q.device)
        per_row = max(1, width) * (LATENT_DIM + heads)
        for chunk in torch.arange(rows, device=q.device).split(max(1, _CHUNK_ELEMENTS // per_row)):
            ids = row_ids[chunk].long()
            valid = (column < counts[chunk].unsqueeze(1)) & (ids >= 0)
            # Rows share most of their records, so each is decoded once. Masked columns get zeros
            # behind the last one: any record may hold NaN.
            distinct, place = torch.unique(ids[valid], return_inverse=True)
            decoded = dequantize_records(records[distinct], dtype)
            decoded = torch.cat((decoded, decoded.new_zeros(1, LATENT_DIM)))
            latents = decoded[torch.full_like(ids, len(distinct)).masked_scatter_(valid, place)]
            scores = torch.bmm(q[chunk].to(dtype), latents.transpose(1, 2)) * scale
            scores.masked_fill_(~valid.unsqueeze(1), -math.inf)
            log_sum = torch.logsumexp(scores, dim=2)
            empty = ~valid.any(dim=1)
            # -inf - (-inf) would be NaN in an empty row.
            shift = torch.where(empty.unsqueeze(1), 0.0, log_sum)
            out[chunk] = torch.bmm((scores - shift.unsqueeze(2)).exp(), latents).to(q.dtype)
            lse[chunk] = log_sum.float()
        return out, lse


def _best(scores: torch.Tensor, ids: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Best ``topk`` columns, ties to the lower id.

    ``ids`` ascend along a row, with -1 after the last one; so do those that are returned.
    """
    valid = ids >= 0
    scores = torch.where(valid, scores, -math.inf)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    # NaN and -inf scores of real ids still come before the invalid columns.
    order = order.gather(1, (~valid.gather(1, order)).int().sort(dim=1, stable=True).indices)
    order = order[:, :topk].sort(dim=1).values
    return ids.gather(1, order), scores.gather(1, order)


def _compact(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the non-negative entries of each row to the left, in order; also count them."""
    valid = ids >= 0
    order = (~valid).int().sort(dim=1, stable=True).indices
    return ids.gather(1, order), valid.sum(dim=1)
