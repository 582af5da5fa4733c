# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA operations in Triton, for CUDA GPUs of compute capability 8.0 and newer.

Nothing here waits for the device, and no launch depends on a value that lies on it: grids come from
shapes, counts only mask. So errors about values (a span too short, a pool without its beginning)
are not raised here; what they concern is left unwritten. Offsets into caches are 64 bits wide.

Every number that differs from step to step is excluded from specialisation, so that
:meth:`TritonKernels.warm_up` compiles what serving uses.

On Hopper, :meth:`TritonKernels.attend` hands long batches to the sparse prefill of FlashMLA, which
vLLM ships, if it is given scratch for the latents in bf16. Its head counts are 64 and 128; fewer
heads are padded without a copy, by letting a row's missing heads be those of the rows after it.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from threading import Lock

import torch
import triton
import triton.language as tl

from vllm.v1.attention.backends.mla.ckv_gather.geometry import (
    INDEX_PAGE_BYTES,
    INDEX_RECORD_BYTES,
    NVFP4_DS_MLA,
    POOLS_PER_INDEX_PAGE,
)

from .base import FP8_MAX, FP8_RECORD_BYTES, INDEX_DIM, LATENT_DIM, Scratch, ScratchShapes
from .scratch import (
    CANDIDATE_BYTES,
    DEEPGEMM_KEYS,
    DEEPGEMM_KEYS_BYTES,
    LOGITS_BYTES,
    PARTIAL_BYTES,
    flashmla_heads,
    flashmla_shapes,
)

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_ALIGNMENT = 16
_DEEPGEMM_BYTES = 128 << 20
"""Scores of one call of DeepGEMM."""
_DEEPGEMM_ROWS = 512
_VLLM_TOPK = 512
"""The number of pools vLLM calls its top-k with."""
_SETTLE_BLOCK, _SETTLE_WARPS = 1024, 4
_PACK_ROWS = 8
_ROW_BLOCK, _ROW_WARPS = 512, 4
_TOPK_BLOCKS = (2048, 8192)
_TOPK_WARPS = {2048: 4, 8192: 4}
_LOGITS_LAUNCH = {"num_warps": 4, "num_stages": 4}
_STRIP = 2048
"""Pools scored by one program."""

# Triton reads module constants in kernels only when they are constexpr.
_E4M3_MAX = tl.constexpr(FP8_MAX)
_RECORD = tl.constexpr(FP8_RECORD_BYTES)
_DIM = tl.constexpr(LATENT_DIM)
_KEY = tl.constexpr(INDEX_DIM)
_PLACES = tl.constexpr(POOLS_PER_INDEX_PAGE)
_PAGE_WORDS = tl.constexpr(INDEX_PAGE_BYTES // 4)
_INT32_MAX = tl.constexpr(2**31 - 1)
_LOG2E = tl.constexpr(1 / math.log(2))
_LN2 = tl.constexpr(math.log(2))
_FLASHMLA_LOG = tl.constexpr(1.0)
_ROOT = tl.constexpr(1 / math.sqrt(INDEX_DIM))
_INVERSE_MAX = tl.constexpr(1 / FP8_MAX)
_COMPILED = tl.constexpr(not _INTERPRETED)
_E4M3_NATIVE = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
"""Four e4m3 codes of a register -> four fp16 of two, on compute capability 8.9 and newer."""
_E4M3_BITS = tl.constexpr(
    "{ .reg .b32 sign, size;"
    + "".join(
        f"""
    prmt.b32 size, $2, 0, {codes};
    and.b32 sign, size, 0x00800080;
    and.b32 size, size, 0x007f007f;
    shl.b32 sign, sign, 8;
    shl.b32 size, size, 7;
    or.b32 ${half}, sign, size;"""
        for half, codes in enumerate(("0x4140", "0x4342"))
    )
    + "}"
)
"""As :func:`_half_of_e4m3`, two codes at once."""


@triton.jit
def _encode_e4m3(x):
    """fp32, at most 448 in size or NaN -> e4m3 code in int32, to nearest even.

    In integers, since compute capability 8 has no such conversion.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below 2^-6 the step is 2^-9, which is the last bit of 2^14: the adder rounds.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
    return sign | tl.where(size > 0x7F800000, 0x7F, code)


@triton.jit
def _half_of_e4m3(code):
    """e4m3 code (uint8) -> its value / 256 in fp16, exact; the code of NaN becomes 480 / 256."""
    wide = code.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _decode_e4m3(code):
    """e4m3 code (uint8) -> fp32, exact."""
    value = _half_of_e4m3(code).to(tl.float32) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _operand(code, NATIVE: tl.constexpr):
    """e4m3 codes -> fp16 dot operand: the value itself (NATIVE) or the value / 256.

    Four codes at a time, in assembler that claims side effects: Triton moves any other conversion
    behind that of the layout, and then every warp reads the codes of its operands byte by byte from
    shared memory and converts them again (1.7 times the time of attention on an H200).
    """
    # A conditional expression would give both sides one type.
    if _COMPILED:
        value = tl.inline_asm_elementwise(
            _E4M3_NATIVE if NATIVE else _E4M3_BITS,
            "=&r,=&r,r",
            [code],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    else:
        value = _half_of_e4m3(code)
    return value


@triton.jit
def _sortable(score):
    """fp32 -> int32 that orders alike; both zeros are one value."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unsortable(key):
    """Inverse of :func:`_sortable`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def sort_by_id(index, score):
    """Ids (int32) and their scores (fp32) -> both in ascending order of ids, -1 at the end."""
    # As an unsigned number -1 is the largest.
    both = index.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    both = tl.sort(both | score.to(tl.uint32, bitcast=True).to(tl.uint64))
    index = (both >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    return index, both.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _sort_ids(index):
    """Ids (int32) in ascending order, -1 at the end."""
    # As an unsigned number -1 is the largest.
    return tl.sort(index.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)


@triton.jit
def _look_up(source, index, count):
    """Scores (fp32) of a row's first ``count`` pools; NaN for any other id."""
    known = (index >= 0) & (index < count)
    return tl.load(source + index, mask=known, other=float("nan"))


@triton.jit
def _take(above, equal, room):
    """All ``above`` and the first ``room`` of ``equal``, at most 32,767 of either in a block.

    Returns which to take, how many of these come before each, how many they are, and how many of
    them are equal.
    """
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(both, axis=0) - both
    equal_before = before >> 16
    take = above | (equal & (equal_before < room))
    place = (before & 0xFFFF) + tl.minimum(equal_before, room)
    total = tl.sum(both, axis=0)
    filled = tl.minimum(total >> 16, room)
    return take, place, (total & 0xFFFF) + filled, filled


# Records


@triton.jit(do_not_specialize=["page_size", "page_stride16", "latent_stride"])
def _write_records_kernel(
    latents, latent_stride, cache, slots, page_size, page_stride16, GROUPS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        group = tl.arange(0, GROUPS)
        inside = tl.arange(0, _DIM // GROUPS)
        column = group[:, None] * (_DIM // GROUPS) + inside[None, :]
        x = tl.load(latents + token * latent_stride + column).to(tl.float32)
        scale = tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full([GROUPS], _E4M3_MAX, tl.float32))
        scale = tl.where(scale > 0, scale, 1.0)
        x = tl.div_rn(x, tl.broadcast_to(scale[:, None], [GROUPS, _DIM // GROUPS]))
        # Comparisons, unlike minimum and maximum, let a NaN through.
        x = tl.where(x > _E4M3_MAX, _E4M3_MAX, tl.where(x < -_E4M3_MAX, -_E4M3_MAX, x))
        record = cache + slot // page_size * page_stride16 * 16 + slot % page_size * _RECORD
        tl.store(record + column, _encode_e4m3(x).to(tl.uint8))
        tl.store((record + _DIM).to(tl.pointer_type(tl.float32)) + group, scale)


@triton.jit
def _owner_of_rows(row, starts, lengths, requests, BLOCK: tl.constexpr, PER: tl.constexpr):
    """Request of each row of a concatenation, or ``requests``: how many spans end before it.

    Request r's span is ``ceil(lengths[r] / PER)`` rows from ``starts[r]``; ends ascend.
    """
    request = tl.zeros_like(row)
    for base in range(0, requests, BLOCK):
        r = base + tl.arange(0, BLOCK)
        length = tl.maximum(tl.load(lengths + r, mask=r < requests, other=0), 0)
        end = tl.load(starts + r, mask=r < requests, other=_INT32_MAX) + (length + PER - 1) // PER
        end = tl.where(r < requests, end, _INT32_MAX)
        request += tl.sum((end[None, :] <= row[:, None]).to(tl.int32), axis=1)
    return request


@triton.jit(
    do_not_specialize=["rows", "requests", "table_stride", "page_size", "page_stride16"],
    do_not_specialize_on_alignment=["table", "lengths", "starts", "out"],
)
def _pack_kernel(
    cache,
    table,
    lengths,
    starts,
    out,
    rows,
    requests,
    table_stride,
    page_size,
    page_stride16,
    PLANAR: tl.constexpr,
    WORDS: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy 4-byte words. A record is WORDS words, a power of two, and then REST more."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = _owner_of_rows(row, starts, lengths, requests, BLOCK, 1)
    owned = (row < rows) & (request < requests)
    j = row - tl.load(starts + request, mask=owned, other=0)
    owned = owned & (j >= 0)
    entry = request.to(tl.int64) * table_stride + j // page_size
    page = tl.load(table + entry, mask=owned, other=0).to(tl.int64) * page_stride16 * 4
    place = j % page_size
    body = tl.arange(0, WORDS)
    if PLANAR:
        # 32 key words a pool, then one scale word a pool behind all keys of the page.
        source = cache + page + place * WORDS
        target = out + row.to(tl.int64) * (WORDS + 1)
        scale = tl.load(cache + page + _PLACES * WORDS + place, mask=owned)
        tl.store(target + WORDS, scale, mask=owned)
    else:
        tail = tl.arange(0, 4 if REST == 4 else 16)
        inside = owned[:, None] & (tail < REST)[None, :]
        source = cache + page + place * (WORDS + REST)
        target = out + row.to(tl.int64) * (WORDS + REST)
        rest = tl.load(source[:, None] + WORDS + tail[None, :], mask=inside)
        tl.store(target[:, None] + WORDS + tail[None, :], rest, mask=inside)
    value = tl.load(source[:, None] + body[None, :], mask=owned[:, None])
    tl.store(target[:, None] + body[None, :], value, mask=owned[:, None])


@triton.jit(do_not_specialize=["rows", "record_stride16"])
def _upconvert_kernel(records, record_stride16, out, rows, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    record = records + row * record_stride16 * 16
    column = tl.arange(0, _DIM)
    code = tl.load(record[:, None] + column[None, :], mask=live[:, None], other=0)
    group = tl.arange(0, 4)
    scale = tl.load(
        (record + _DIM).to(tl.pointer_type(tl.float32))[:, None] + group[None, :],
        mask=live[:, None],
        other=0.0,
    )
    value = tl.reshape(_decode_e4m3(code), [ROWS, 4, _DIM // 4]) * scale[:, :, None]
    value = tl.reshape(value, [ROWS, _DIM]).to(tl.bfloat16)
    tl.store(out + row[:, None] * _DIM + column[None, :], value, mask=live[:, None])


# Pools


@triton.jit
def _pool_member(
    values, value_stride, tail, tail_offset, tail_row, token, first, place, column, HAS_TAIL
):
    """One member of a pool in fp32, from this batch or from the tail cache."""
    if token >= first:
        member = tl.load(values + token.to(tl.int64) * value_stride + column).to(tl.float32)
    else:
        if HAS_TAIL:
            member = tl.load(tail + tail_offset + place * tail_row + column).to(tl.float32)
        else:
            member = tl.zeros_like(column).to(tl.float32)
    return member


@triton.jit
def _store_pool(page, place, key, scale):
    """One pool's place in a planar page."""
    tl.store(page + place * _KEY + tl.arange(0, _KEY), key)
    tl.store((page + _PLACES * _KEY).to(tl.pointer_type(tl.float32)) + place, scale)


@triton.jit(
    do_not_specialize=[
        "requests",
        "k_stride",
        "gate_stride",
        "page_stride16",
        "gathered_stride16",
        "first_request",
        "ring",
        "tail_block",
        "tail_half",
        "tail_row",
    ],
    do_not_specialize_on_alignment=[
        "pool_slots",
        "page_starts",
        "tail_slots",
        "positions",
        "bounds",
    ],
)
def _write_pools_kernel(
    k,
    k_stride,
    gate,
    gate_stride,
    ape,
    cache,
    page_stride16,
    pool_slots,
    gathered,
    gathered_stride16,
    page_starts,
    first_request,
    tail,
    tail_block,
    tail_half,
    tail_row,
    ring,
    tail_slots,
    positions,
    bounds,
    requests,
    POOL: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The pool that ends at this program's token, if one does. Only reads the tail cache."""
    token = tl.program_id(0)
    slot = tl.load(pool_slots + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    known = (token < tl.load(bounds + requests)) & ((position + 1) % POOL == 0)
    if known & ((slot >= 0) | (first_request < requests)):
        first = 0
        request = -1
        for base in range(0, requests + 1, BLOCK):
            r = base + tl.arange(0, BLOCK)
            bound = tl.load(bounds + r, mask=r <= requests, other=_INT32_MAX)
            first = tl.maximum(first, tl.max(tl.where(bound <= token, bound, 0), axis=0))
            request += tl.sum((bound <= token).to(tl.int32), axis=0)
        tail_slot = tl.load(tail_slots + token).to(tl.int64)
        whole = token - (POOL - 1) >= first
        if HAS_TAIL:
            whole = whole | (tail_slot >= 0)
        if whole & ((slot >= 0) | (request >= first_request)):
            column = tl.arange(0, _KEY)
            block = tl.maximum(tail_slot, 0) // ring * tail_block
            most = tl.full([_KEY], float("-inf"), tl.float32)
            for back in tl.static_range(POOL - 1, -1, -1):
                place = (tl.maximum(position - back, 0) % ring).to(tl.int64)
                score = _pool_member(
                    gate,
                    gate_stride,
                    tail,
                    block + tail_half,
                    tail_row,
                    token - back,
                    first,
                    place,
                    column,
                    HAS_TAIL,
                ) + tl.load(ape + (POOL - 1 - back) * _KEY + column)
                most = tl.maximum(most, score)
            total = tl.zeros([_KEY], tl.float32)
            norm = tl.zeros([_KEY], tl.float32)
            for back in tl.static_range(POOL - 1, -1, -1):
                place = (tl.maximum(position - back, 0) % ring).to(tl.int64)
                score = _pool_member(
                    gate,
                    gate_stride,
                    tail,
                    block + tail_half,
                    tail_row,
                    token - back,
                    first,
                    place,
                    column,
                    HAS_TAIL,
                ) + tl.load(ape + (POOL - 1 - back) * _KEY + column)
                value = _pool_member(
                    k, k_stride, tail, block, tail_row, token - back, first, place, column, HAS_TAIL
                )
                # fp64, rounded once: the result does not depend on the exponential at hand.
                prob = tl.exp((score - most).to(tl.float64)).to(tl.float32)
                norm += prob
                total += value * prob
            x = tl.div_rn(total, norm).to(tl.bfloat16).to(tl.float32)
            for log in tl.static_range(7):
                partner = tl.gather(x, column ^ (1 << log), 0)
                x = tl.where((column >> log) & 1 == 1, partner - x, x + partner)
            x = (x * _ROOT).to(tl.bfloat16).to(tl.float32)
            target = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-4) * _INVERSE_MAX
            bits = target.to(tl.int32, bitcast=True)
            # ceil(log2(.)) as a biased exponent: exact at powers of two.
            exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
            scale = (exponent << 23).to(tl.float32, bitcast=True)
            x = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            x = tl.where(x > _E4M3_MAX, _E4M3_MAX, tl.where(x < -_E4M3_MAX, -_E4M3_MAX, x))
            key = _encode_e4m3(x).to(tl.uint8)
            if slot >= 0:
                _store_pool(
                    cache + slot // _PLACES * page_stride16 * 16, slot % _PLACES, key, scale
                )
            if request >= first_request:
                start = tl.load(page_starts + request - first_request).to(tl.int64)
                pool = position // POOL
                page = gathered + (start + pool // _PLACES) * gathered_stride16 * 16
                _store_pool(page, pool % _PLACES, key, scale)


@triton.jit(
    do_not_specialize=[
        "requests",
        "k_stride",
        "gate_stride",
        "ring",
        "tail_block",
        "tail_half",
        "tail_row",
    ],
    do_not_specialize_on_alignment=["tail_slots", "bounds"],
)
def _write_tail_kernel(
    k,
    k_stride,
    gate,
    gate_stride,
    tail,
    tail_block,
    tail_half,
    tail_row,
    ring,
    tail_slots,
    bounds,
    requests,
    BLOCK: tl.constexpr,
):
    """Keep a token that is among the last ``ring`` of its request in this batch.

    Those have places of their own, so there is a program for each token, and no order among them.
    """
    token = tl.program_id(0)
    slot = tl.load(tail_slots + token).to(tl.int64)
    if (slot >= 0) & (token < tl.load(bounds + requests)):
        end = _INT32_MAX
        for base in range(0, requests + 1, BLOCK):
            r = base + tl.arange(0, BLOCK)
            bound = tl.load(bounds + r, mask=r <= requests, other=_INT32_MAX)
            end = tl.minimum(end, tl.min(tl.where(bound > token, bound, _INT32_MAX), axis=0))
        if token >= end - ring:
            column = tl.arange(0, _KEY)
            target = tail + slot // ring * tail_block + slot % ring * tail_row + column
            row = token.to(tl.int64)
            tl.store(target, tl.load(k + row * k_stride + column))
            tl.store(target + tail_half, tl.load(gate + row * gate_stride + column))


@triton.jit(
    do_not_specialize=["requests", "padded", "starts_stride"],
    do_not_specialize_on_alignment=["gathered", "starts", "lengths", "page_starts"],
)
def _unpack_kernel(
    gathered,
    starts,
    starts_stride,
    lengths,
    page_starts,
    out,
    requests,
    padded,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One planar page, in 4-byte words."""
    page = tl.program_id(0)
    request = tl.sum(
        _owner_of_rows(
            page + tl.zeros([1], tl.int32), page_starts, lengths, requests, BLOCK, _PLACES
        ),
        axis=0,
    )
    if request < requests:
        place = tl.arange(0, _PLACES)
        pool = (page - tl.load(page_starts + request)) * _PLACES + place
        live = (pool >= 0) & (pool < tl.load(lengths + request))
        pool = tl.where(live, pool, 0)
        rank = pool // INTERLEAVE % WORLD
        local = pool // (INTERLEAVE * WORLD) * INTERLEAVE + pool % INTERLEAVE
        begin = tl.load(starts + rank.to(tl.int64) * starts_stride + request, mask=live, other=0)
        source = gathered + (rank.to(tl.int64) * padded + begin + local) * (WORDS + 1)
        target = out + page.to(tl.int64) * _PAGE_WORDS
        word = tl.arange(0, WORDS)
        key = tl.load(source[:, None] + word[None, :], mask=live[:, None])
        scale = tl.load(source + WORDS, mask=live)
        tl.store(target + place[:, None] * WORDS + word[None, :], key, mask=live[:, None])
        tl.store(target + _PLACES * WORDS + place, scale, mask=live)


# Selection


@triton.jit
def _index_operand(code, NATIVE: tl.constexpr):
    """e4m3 codes -> dot operand: e4m3 (NATIVE), or the value / 256 in fp16."""
    if NATIVE:  # noqa: SIM108
        value = code.to(tl.float8e4nv, bitcast=True)
    else:
        value = _operand(code, False)
    return value


@triton.jit(
    do_not_specialize=["num_pages", "page_stride16", "table_stride", "columns"],
    do_not_specialize_on_alignment=["table"],
)
def _spread_keys_kernel(
    pages,
    num_pages,
    page_stride16,
    table,
    table_stride,
    columns,
    keys,
    scales,
    WORDS: tl.constexpr,
):
    """One planar page -> contiguous keys and scales, page after page of each request.

    Entries behind a request's last page may be anything, so an impossible page is not read.
    """
    target = tl.program_id(0)
    entry = target // columns * table_stride + target % columns
    page = tl.load(table + entry)
    if (page >= 0) & (page < num_pages):
        source = pages + page.to(tl.int64) * page_stride16 * 4
        word = tl.arange(0, _PLACES * WORDS)
        place = tl.arange(0, _PLACES)
        first = target.to(tl.int64) * _PLACES
        tl.store(keys + first * WORDS + word, tl.load(source + word))
        tl.store(scales + first + place, tl.load(source + _PLACES * WORDS + place))


@triton.jit(
    do_not_specialize=["rows", "limit"],
    do_not_specialize_on_alignment=["req_id", "counts", "begins", "ends", "zeros", "lengths"],
)
def _key_bounds_kernel(
    req_id, counts, begins, ends, zeros, lengths, rows, limit, BLOCK: tl.constexpr
):
    """Where each row's keys begin and end among the contiguous ones, and its scores in a row."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = tl.load(req_id + row, mask=row < rows, other=-1)
    count = tl.minimum(tl.load(counts + row, mask=row < rows, other=0), limit)
    count = tl.where(request >= 0, tl.maximum(count, 0), 0)
    begin = tl.maximum(request, 0) * limit
    tl.store(begins + row, begin, mask=row < rows)
    tl.store(ends + row, begin + count, mask=row < rows)
    tl.store(zeros + row, 0, mask=row < rows)
    tl.store(lengths + row, count, mask=row < rows)


@triton.jit
def _page_scales(pages, page_stride16, entry, place):
    page = pages + tl.load(entry).to(tl.int64) * page_stride16 * 16
    return tl.load((page + _PLACES * _KEY).to(tl.pointer_type(tl.float32)) + place)


@triton.jit(
    do_not_specialize=[
        "row0",
        "rows",
        "q_stride",
        "weight_stride",
        "table_stride",
        "page_stride16",
        "limit",
        "out_stride",
    ],
    do_not_specialize_on_alignment=["weights", "table", "req_id", "counts"],
)
def _logits_kernel(
    q,
    q_stride,
    weights,
    weight_stride,
    pages,
    page_stride16,
    table,
    table_stride,
    limit,
    req_id,
    counts,
    out,
    out_stride,
    row0,
    rows,
    heads: tl.constexpr,
    HEADS: tl.constexpr,
    BQ: tl.constexpr,
    STRIP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Scores of BQ rows over one strip of pools. Keys are the tall side of the product.

    A score depends on its query and its key alone: not on the place of either in a tile.
    """
    GAIN: tl.constexpr = 1.0 if NATIVE else 65536.0
    first = tl.program_id(0) * BQ
    lane = tl.arange(0, BQ * HEADS)
    lane_row = first + lane // HEADS
    lane_live = (lane_row < rows) & (lane % HEADS < heads)
    depth = tl.arange(0, _KEY)
    offset = (row0 + lane_row).to(tl.int64) * q_stride + lane % HEADS * _KEY
    query = tl.load(q + offset[None, :] + depth[:, None], mask=lane_live[None, :], other=0)
    weight = tl.load(
        weights + (row0 + lane_row).to(tl.int64) * weight_stride + lane % HEADS,
        mask=lane_live,
        other=0.0,
    )
    query = _index_operand(query, NATIVE)

    row = first + tl.arange(0, BQ)
    request = tl.load(req_id + row0 + row, mask=row < rows, other=-1)
    count = tl.load(counts + row0 + row, mask=row < rows, other=0)
    count = tl.where(request >= 0, tl.minimum(count, limit), 0)
    begin = tl.program_id(1) * STRIP
    place = tl.arange(0, _PLACES)
    # Rows of a tile may belong to several requests, each with keys of its own.
    current = tl.min(tl.where(count > begin, request, _INT32_MAX), axis=0)
    while current < _INT32_MAX:
        mine = (request == current) & (count > begin)
        end = tl.minimum(tl.max(tl.where(mine, count, 0), axis=0), begin + STRIP)
        entry = table + current.to(tl.int64) * table_stride
        scale = _page_scales(pages, page_stride16, entry + begin // _PLACES, place)
        for p in range(begin, end, _PLACES):
            page = pages + tl.load(entry + p // _PLACES).to(tl.int64) * page_stride16 * 16
            key = tl.load(page + place[:, None] * _KEY + depth[None, :])
            # Read one step ahead, so that its latency hides behind the product.
            ahead = tl.minimum(p + _PLACES, end - 1) // _PLACES
            next_scale = _page_scales(pages, page_stride16, entry + ahead, place)
            dots = tl.dot(_index_operand(key, NATIVE), query) * GAIN
            dots = tl.maximum(dots, 0.0) * weight[None, :]
            score = tl.sum(tl.reshape(dots, [_PLACES, BQ, HEADS]), axis=2) * scale[:, None]
            seen = mine[None, :] & ((p + place)[:, None] < count[None, :])
            target = out + row.to(tl.int64)[None, :] * out_stride + (p + place)[:, None]
            tl.store(target, score, mask=seen)
            scale = next_scale
        current = tl.min(
            tl.where((count > begin) & (request > current), request, _INT32_MAX), axis=0
        )


@triton.jit(
    do_not_specialize=["row0", "stride", "limit", "out_stride", "out_row0", "level"],
    do_not_specialize_on_alignment=["req_id", "counts"],
)
def _topk_kernel(
    scores,
    ids,
    stride,
    req_id,
    counts,
    limit,
    level,
    out_scores,
    out_ids,
    out_stride,
    out_row0,
    row0,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    """The best TOPK of one block of candidates, in the order of the block; ties to the first.

    The first pass reads scores of pools 0, 1, ...; a later one reads the results of the one before,
    SLOTS candidates for every ``level`` pools, as far as pools are visible. So ids ascend.
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    count = tl.minimum(tl.load(counts + row0 + row), limit)
    count = tl.where(tl.load(req_id + row0 + row) >= 0, tl.maximum(count, 0), 0)
    if HAS_IDS:
        count = (count + level - 1) // level * SLOTS
    if (block == 0) | (block * BLOCK < count):
        column = block * BLOCK + tl.arange(0, BLOCK)
        valid = column < count
        source = row.to(tl.int64) * stride + column
        key = _sortable(tl.load(scores + source, mask=valid, other=float("-inf")))
        if HAS_IDS:
            valid = valid & (tl.load(ids + source, mask=valid, other=-1) >= 0)
        total = tl.sum(valid.to(tl.int32), axis=0)
        low = tl.min(tl.where(valid, key, _INT32_MAX), axis=0).to(tl.int64)
        high = tl.max(tl.where(valid, key, -_INT32_MAX - 1), axis=0).to(tl.int64) + 1
        if total <= TOPK:
            high = low
        # low: at least TOPK keys reach it. high: fewer do.
        while high - low > 1:
            middle = low + (high - low) // 2
            reach = tl.sum((valid & (key >= middle.to(tl.int32))).to(tl.int32), axis=0)
            if reach >= TOPK:
                low = middle
            else:
                high = middle
            if reach == TOPK:
                high = low
        above = valid & (key > low.to(tl.int32))
        equal = valid & (key == low.to(tl.int32))
        room = TOPK - tl.sum(above.to(tl.int32), axis=0)
        take, position, _, _ = _take(above, equal, room)
        target = (out_row0 + row).to(tl.int64) * out_stride + block * SLOTS
        tl.store(out_scores + target + position, _unsortable(key), mask=take)
        index = tl.load(ids + source, mask=take) if HAS_IDS else column
        tl.store(out_ids + target + position, index, mask=take)
        slot = tl.arange(0, SLOTS)
        # Of results, unlike candidates, a row has but TOPK.
        rest = (slot >= tl.minimum(total, TOPK)) & (slot < out_stride)
        tl.store(out_scores + target + slot, float("-inf"), mask=rest)
        tl.store(out_ids + target + slot, -1, mask=rest)


@triton.jit(
    do_not_specialize=["score_stride", "id_stride", "columns"],
)
def _merge_kernel(
    scores,
    score_stride,
    ids,
    id_stride,
    columns,
    out_scores,
    out_ids,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best TOPK of a row of candidates in any order, by ascending ids; ties to the lower id."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    index = tl.load(ids + row * id_stride + column, mask=column < columns, other=-1)
    valid = index >= 0
    score = tl.load(scores + row * score_stride + column, mask=valid, other=float("-inf"))
    # Unique keys, since ids are.
    key = (_sortable(score).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    total = tl.sum(valid.to(tl.int32), axis=0)
    low = tl.min(tl.where(valid, key, 0x7FFFFFFFFFFFFFFF), axis=0)
    high = tl.max(tl.where(valid, key, -0x7FFFFFFFFFFFFFFF), axis=0)
    done = total <= TOPK
    while (low < high) & (done == 0):
        # The upper middle, without overflow: at least one key is above low.
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        middle = tl.where(middle == low, high, middle)
        reach = tl.sum((valid & (key >= middle)).to(tl.int32), axis=0)
        if reach >= TOPK:
            low = middle
        else:
            high = middle - 1
        done = reach == TOPK
    take = valid & ((key >= low) | (total <= TOPK))
    position = tl.cumsum(take.to(tl.int32), axis=0) - 1
    target = row * TOPK
    tl.store(out_scores + target + position, score, mask=take)
    tl.store(out_ids + target + position, index, mask=take)
    tl.debug_barrier()
    place = tl.arange(0, SLOTS)
    kept = place < tl.minimum(total, TOPK)
    index = tl.load(out_ids + target + place, mask=kept, other=-1)
    score = tl.load(out_scores + target + place, mask=kept, other=float("-inf"))
    # All places are read before one is written again.
    tl.debug_barrier()
    index, score = sort_by_id(index, score)
    tl.store(out_ids + target + place, index, mask=place < TOPK)
    tl.store(out_scores + target + place, score, mask=place < TOPK)


# The stride of scores, unlike other numbers, is specialised: it is a multiple of 64, which lets a
# thread read 16 bytes at once.
@triton.jit(
    do_not_specialize=["row0", "rows", "limit"],
    do_not_specialize_on_alignment=["req_id", "counts"],
)
def _settle_kernel(
    logits,
    logits_stride,
    chosen,
    req_id,
    counts,
    limit,
    row0,
    rows,
    out_scores,
    out_ids,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """TOPK + 1 best pools in any order, any of equal ones -> the contract's choice and order.

    If one of them alone has the least score, the others are the choice. If several have, all pools
    above them are among the chosen, and what is left of TOPK is how many of the equal ones are
    wanted: those of the lowest ids, for which all scores are looked at.

    That pass takes no NaN. Beside some, less may have been chosen than asked for, or one twice.
    """
    # The last rows first: their scores are those that the cache still holds.
    row = rows - 1 - tl.program_id(0)
    count = tl.minimum(tl.load(counts + row0 + row), limit)
    count = tl.where(tl.load(req_id + row0 + row) >= 0, tl.maximum(count, 0), 0)
    slot = tl.arange(0, SLOTS)
    source = logits + row.to(tl.int64) * logits_stride
    target = (row0 + row).to(tl.int64) * TOPK
    if count <= TOPK:
        index = tl.where(slot < count, slot, -1)
        score = tl.load(source + slot, mask=slot < count, other=float("-inf"))
    else:
        begin = chosen + row.to(tl.int64) * (TOPK + 1)
        # In the order of memory, in which looking scores up takes the least.
        index = _sort_ids(tl.load(begin + slot, mask=slot < TOPK, other=-1))
        score = _look_up(source, index, count)
        spare = tl.load(begin + TOPK)
        last = _look_up(source, spare, count)
        least = tl.min(tl.where(score == score, score, float("inf")), axis=0)
        least = tl.where(last < least, last, least)
        numbers = tl.sum((score == score).to(tl.int32), axis=0) + (last == last).to(tl.int32)
        equal = tl.sum((score == least).to(tl.int32), axis=0) + (last == least).to(tl.int32)
        if (numbers == TOPK + 1) & (equal == 1):
            if last > least:
                index = _sort_ids(tl.where(score == least, spare, index))
                score = _look_up(source, index, count)
        else:
            room = TOPK - tl.sum((score > least).to(tl.int32), axis=0) - (last > least).to(tl.int32)
            taken = tl.zeros_like(count)
            # Whole 16 bytes; there are scores, of no meaning, to the end of a page.
            readable = (count + 3) // 4 * 4
            for base in range(0, count, BLOCK):
                column = base + tl.arange(0, BLOCK)
                value = tl.load(source + column, mask=column < readable)
                value = tl.where(column < count, value, float("nan"))
                take, place, more, filled = _take(value > least, value == least, room)
                place += taken
                tl.store(out_ids + target + place, column, mask=take & (place < TOPK))
                taken += more
                room -= filled
            tl.debug_barrier()
            known = slot < tl.minimum(taken, TOPK)
            index = tl.load(out_ids + target + slot, mask=known, other=-1)
            score = _look_up(source, index, count)
        score = tl.where(index >= 0, score, float("-inf"))
    tl.store(out_ids + target + slot, index, mask=slot < TOPK)
    tl.store(out_scores + target + slot, score, mask=slot < TOPK)


# Rows


@triton.jit(
    do_not_specialize=["id_stride", "width", "out_stride"],
    do_not_specialize_on_alignment=["positions", "out"],
)
def _expand_kernel(
    pool_ids,
    id_stride,
    positions,
    out,
    out_stride,
    width,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    POOL: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    index = tl.load(pool_ids + row * id_stride + slot, mask=slot < TOPK, other=-1)
    seen = (tl.load(positions + row).to(tl.int64) + 1).to(tl.int32)
    valid = (index >= 0) & (index < seen // POOL)
    order = tl.cumsum(valid.to(tl.int32), axis=0) - 1
    inside = tl.arange(0, PLACES)
    target = out + row * out_stride
    tl.store(
        target + (order * POOL)[:, None] + inside[None, :],
        (index * POOL)[:, None] + inside[None, :],
        mask=valid[:, None] & (inside < POOL)[None, :],
    )
    history = tl.sum(valid.to(tl.int32), axis=0) * POOL
    tail = seen // POOL * POOL
    for base in range(0, width, BLOCK):
        column = base + tl.arange(0, BLOCK)
        token = tail + column - history
        token = tl.where(token < seen, token, -1)
        tl.store(target + column, token, mask=(column >= history) & (column < width))


@triton.jit(
    do_not_specialize=[
        "width",
        "id_stride",
        "out_stride",
        "starts_stride",
        "padded",
        "first",
        "end",
    ],
    do_not_specialize_on_alignment=[
        "req_id",
        "starts",
        "context_lens",
        "own_starts",
        "counts",
        "token_ids",
        "out",
    ],
)
def _remap_kernel(
    token_ids,
    id_stride,
    req_id,
    starts,
    starts_stride,
    context_lens,
    own_starts,
    padded,
    out,
    out_stride,
    counts,
    width,
    first,
    end,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    COUNT: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """WINDOW: tokens count from ``first``, and the row of those before ``end`` has no holes."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(req_id + row)
    known = request >= 0
    context = tl.load(context_lens + request, mask=known, other=0)
    own = tl.load(own_starts + request, mask=known, other=0)
    total = tl.zeros([BLOCK], tl.int32)
    kept = 0
    for base in range(0, width, BLOCK):
        column = base + tl.arange(0, BLOCK)
        token = tl.load(token_ids + row * id_stride + column, mask=column < width, other=-1)
        valid = (token >= 0) & known
        if WINDOW:
            valid = valid & (token >= first) & (token < end)
            token = token - first
        token = tl.where(valid, token, 0)
        rank = token // INTERLEAVE % WORLD
        local = token // (INTERLEAVE * WORLD) * INTERLEAVE + token % INTERLEAVE
        if WORLD <= 8:
            # A few selections cost less than a gather.
            begin = tl.zeros([BLOCK], tl.int32)
            for other in tl.static_range(WORLD):
                here = tl.load(starts + other * starts_stride + request, mask=known, other=0)
                begin = tl.where(rank == other, here, begin)
        else:
            begin = tl.load(starts + rank * starts_stride + request, mask=valid, other=0)
        found = tl.where(token < context, rank * padded + begin + local, own + token)
        found = tl.where(valid, found, -1)
        if WINDOW:
            order = kept + tl.cumsum(valid.to(tl.int32), axis=0) - 1
            kept += tl.sum(valid.to(tl.int32), axis=0)
            tl.store(out + row * out_stride + order, found, mask=valid)
        else:
            tl.store(out + row * out_stride + column, found, mask=column < width)
        total += valid.to(tl.int32)
    if WINDOW:
        for base in range(0, width, BLOCK):
            column = base + tl.arange(0, BLOCK)
            nothing = tl.full([BLOCK], -1, tl.int32)
            rest = (column >= kept) & (column < width)
            tl.store(out + row * out_stride + column, nothing, mask=rest)
    if COUNT:
        tl.store(counts + row, tl.sum(total, axis=0))


@triton.jit(
    do_not_specialize=[
        "width",
        "id_stride",
        "table_stride",
        "block_stride_rows",
        "page_size",
        "rank",
    ],
    do_not_specialize_on_alignment=["req_id", "table", "token_ids", "out"],
)
def _filter_kernel(
    token_ids,
    id_stride,
    req_id,
    table,
    table_stride,
    block_stride_rows,
    page_size,
    rank,
    out,
    counts,
    width,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(req_id + row)
    known = request >= 0
    target = out + row * width
    kept = 0
    for base in range(0, width, BLOCK):
        column = base + tl.arange(0, BLOCK)
        token = tl.load(token_ids + row * id_stride + column, mask=column < width, other=-1)
        valid = (token >= 0) & known
        valid = valid & (token // INTERLEAVE % WORLD == rank)
        token = tl.where(valid, token, 0)
        local = token // (INTERLEAVE * WORLD) * INTERLEAVE + token % INTERLEAVE
        entry = table + request.to(tl.int64) * table_stride + local // page_size
        page = tl.load(entry, mask=valid, other=0).to(tl.int64)
        found = page * block_stride_rows + local % page_size
        order = kept + tl.cumsum(valid.to(tl.int32), axis=0) - 1
        tl.store(target + order, found.to(tl.int32), mask=valid)
        kept += tl.sum(valid.to(tl.int32), axis=0)
    for base in range(0, width, BLOCK):
        column = base + tl.arange(0, BLOCK)
        nothing = tl.full([BLOCK], -1, tl.int32)
        tl.store(target + column, nothing, mask=(column >= kept) & (column < width))
    tl.store(counts + row, kept)


@triton.jit(
    do_not_specialize=["row_stride", "out_stride", "width", "padded_width"],
    do_not_specialize_on_alignment=["row_ids", "counts"],
)
def _mask_rows_kernel(
    row_ids, row_stride, counts, out, out_stride, lengths, width, padded_width, BLOCK: tl.constexpr
):
    """Row ids with -1 for all that must not be read; columns to read, 0 where no id is valid."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(counts + row), width)
    best = tl.full([BLOCK], -1, tl.int32)
    for base in range(0, padded_width, BLOCK):
        column = base + tl.arange(0, BLOCK)
        index = tl.load(row_ids + row * row_stride + column, mask=column < count, other=-1)
        best = tl.maximum(best, index)
        tl.store(out + row * out_stride + column, index, mask=column < padded_width)
    tl.store(lengths + row, tl.where(tl.max(best, axis=0) >= 0, count, 0))


@triton.jit(do_not_specialize_on_alignment=["lengths", "out_lse"])
def _finish_rows_kernel(
    wide,
    wide_lse,
    lengths,
    out,
    out_lse,
    heads: tl.constexpr,
    PADDED: tl.constexpr,
    HB: tl.constexpr,
):
    """FlashMLA's result of one row -> the contract's: real heads only, rows without ids defined."""
    row = tl.program_id(0).to(tl.int64)
    filled = tl.load(lengths + row) > 0
    column = tl.arange(0, _DIM)
    for base in tl.static_range(0, heads, HB):
        head = base + tl.arange(0, HB)
        if (heads != PADDED) | (not filled):
            source = wide + (row * PADDED + head)[:, None] * _DIM + column[None, :]
            value = tl.load(source, mask=(head < heads)[:, None] & filled, other=0.0)
            target = out + (row * heads + head)[:, None] * _DIM + column[None, :]
            tl.store(target, value, mask=(head < heads)[:, None])
        log_sum = tl.load(wide_lse + row * PADDED + head, mask=(head < heads) & filled, other=0.0)
        log_sum = tl.where(filled, log_sum * _FLASHMLA_LOG, float("-inf"))
        tl.store(out_lse + row * heads + head, log_sum, mask=head < heads)


# Attention


@triton.jit
def _scaled_query(q, offset, lanes, depth, GROUP: tl.constexpr):
    return tl.load(
        q + offset[:, None] + (depth + GROUP * (_DIM // 4))[None, :], mask=lanes[:, None], other=0.0
    ).to(tl.float32)


@triton.jit
def _record_part(record, ok, depth, GROUP: tl.constexpr):
    return tl.load(
        record[:, None] + (depth + GROUP * (_DIM // 4))[None, :], mask=ok[:, None], other=0
    )


@triton.jit(
    do_not_specialize=[
        "scale",
        "width",
        "q_row",
        "q_head",
        "record_stride16",
        "id_stride",
        "splits",
    ],
    do_not_specialize_on_alignment=["row_ids", "counts"],
)
def _attend_kernel(
    q,
    q_row,
    q_head,
    records,
    record_stride16,
    row_ids,
    id_stride,
    counts,
    width,
    scale,
    out,
    lse,
    partial,
    partial_lse,
    splits,
    heads: tl.constexpr,
    HB: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One row, HB heads, one part of the row's records.

    Records go through shared memory once, as fp16, and serve both products from there: e4m3 goes to
    fp16 exactly. A record's largest group scale is folded into the softmax weight before
    the running maximum is taken, so that what becomes an fp16 weight is at most 1 whatever the
    scales are; queries are brought to about 1 for the same reason.
    """
    TILES: tl.constexpr = (heads + HB - 1) // HB
    GAIN: tl.constexpr = 1.0 if NATIVE else 256.0
    row = (tl.program_id(0) // TILES).to(tl.int64)
    head = tl.program_id(0) % TILES * HB + tl.arange(0, HB)
    lanes = head < heads
    depth = tl.arange(0, _DIM // 4)
    offset = row * q_row + head * q_head
    q0 = _scaled_query(q, offset, lanes, depth, 0)
    q1 = _scaled_query(q, offset, lanes, depth, 1)
    q2 = _scaled_query(q, offset, lanes, depth, 2)
    q3 = _scaled_query(q, offset, lanes, depth, 3)
    most = tl.maximum(
        tl.maximum(tl.max(tl.abs(q0), axis=1), tl.max(tl.abs(q1), axis=1)),
        tl.maximum(tl.max(tl.abs(q2), axis=1), tl.max(tl.abs(q3), axis=1)),
    )
    # The power of two below it, so that the division is exact.
    most = (tl.maximum(most, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000).to(
        tl.float32, bitcast=True
    )
    shrink = (1.0 / most)[:, None]
    q0 = (q0 * shrink).to(tl.float16)
    q1 = (q1 * shrink).to(tl.float16)
    q2 = (q2 * shrink).to(tl.float16)
    q3 = (q3 * shrink).to(tl.float16)
    grow = most * (scale * _LOG2E * GAIN)

    peak = tl.full([HB], float("-inf"), tl.float32)
    norm = tl.zeros([HB], tl.float32)
    acc0 = tl.zeros([HB, _DIM // 4], tl.float32)
    acc1 = tl.zeros([HB, _DIM // 4], tl.float32)
    acc2 = tl.zeros([HB, _DIM // 4], tl.float32)
    acc3 = tl.zeros([HB, _DIM // 4], tl.float32)
    end = tl.minimum(tl.load(counts + row), width)
    begin = 0
    if SPLIT:
        # Parts of this row's count, not of the width: under DCP a rank has few of the columns.
        columns = tl.cdiv(tl.cdiv(end, splits), BN) * BN
        begin = tl.program_id(1) * columns
        end = tl.minimum(end, begin + columns)
    for base in range(begin, end, BN):
        column = base + tl.arange(0, BN)
        index = tl.load(row_ids + row * id_stride + column, mask=column < end, other=-1)
        ok = index >= 0
        record = records + tl.where(ok, index, 0).to(tl.int64) * record_stride16 * 16
        k0 = _operand(_record_part(record, ok, depth, 0), NATIVE)
        k1 = _operand(_record_part(record, ok, depth, 1), NATIVE)
        k2 = _operand(_record_part(record, ok, depth, 2), NATIVE)
        k3 = _operand(_record_part(record, ok, depth, 3), NATIVE)
        scales = (record + _DIM).to(tl.pointer_type(tl.float32))
        s0 = tl.load(scales, mask=ok, other=0.0)
        s1 = tl.load(scales + 1, mask=ok, other=0.0)
        s2 = tl.load(scales + 2, mask=ok, other=0.0)
        s3 = tl.load(scales + 3, mask=ok, other=0.0)
        score = tl.dot(q0, tl.permute(k0, (1, 0))) * s0[None, :]
        score += tl.dot(q1, tl.permute(k1, (1, 0))) * s1[None, :]
        score += tl.dot(q2, tl.permute(k2, (1, 0))) * s2[None, :]
        score += tl.dot(q3, tl.permute(k3, (1, 0))) * s3[None, :]
        largest = tl.maximum(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), 1e-30)
        weight = score * grow[:, None] + tl.log2(largest)[None, :]
        weight = tl.where(ok[None, :], weight, float("-inf"))
        new = tl.maximum(peak, tl.max(weight, axis=1))
        # -inf - (-inf) would be NaN while nothing valid has been seen.
        shift = tl.where(new == float("-inf"), 0.0, new)
        fade = tl.exp2(peak - shift)
        weight = tl.exp2(weight - shift[:, None])
        inverse = 1.0 / largest
        norm = norm * fade + tl.sum(weight * inverse[None, :], axis=1)
        peak = new
        w0 = (weight * (s0 * inverse)[None, :]).to(tl.float16)
        w1 = (weight * (s1 * inverse)[None, :]).to(tl.float16)
        w2 = (weight * (s2 * inverse)[None, :]).to(tl.float16)
        w3 = (weight * (s3 * inverse)[None, :]).to(tl.float16)
        acc0 = tl.dot(w0, k0, acc0 * fade[:, None])
        acc1 = tl.dot(w1, k1, acc1 * fade[:, None])
        acc2 = tl.dot(w2, k2, acc2 * fade[:, None])
        acc3 = tl.dot(w3, k3, acc3 * fade[:, None])

    empty = norm == 0.0
    gain = (tl.where(empty, 0.0, GAIN / tl.where(empty, 1.0, norm)))[:, None]
    log_sum = tl.where(empty, float("-inf"), (peak + tl.log2(norm)) * _LN2)
    # The peak and the sum carry the folded scale in opposite senses; it cancels.
    if SPLIT:
        slot = (row * splits + tl.program_id(1)) * heads + head
        tl.store(partial_lse + slot, log_sum, mask=lanes)
        target = partial + slot[:, None] * _DIM + depth[None, :]
    else:
        slot = row * heads + head
        tl.store(lse + slot, log_sum, mask=lanes)
        target = out + slot[:, None] * _DIM + depth[None, :]
    kind = target.dtype.element_ty
    tl.store(target, (acc0 * gain).to(kind), mask=lanes[:, None])
    tl.store(target + _DIM // 4, (acc1 * gain).to(kind), mask=lanes[:, None])
    tl.store(target + _DIM // 2, (acc2 * gain).to(kind), mask=lanes[:, None])
    tl.store(target + _DIM // 4 * 3, (acc3 * gain).to(kind), mask=lanes[:, None])


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(partial, partial_lse, out, lse, splits, heads: tl.constexpr):
    """Merge the parts of one row and head, in the order of the parts."""
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    column = tl.arange(0, _DIM)
    slot = row * splits * heads + head
    peak = tl.load(partial_lse + slot)
    for s in range(1, splits):
        peak = tl.maximum(peak, tl.load(partial_lse + slot + s * heads))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = 0.0
    acc = tl.zeros([_DIM], tl.float32)
    for s in range(splits):
        weight = tl.exp(tl.load(partial_lse + slot + s * heads) - shift)
        acc += weight * tl.load(partial + (slot + s * heads) * _DIM + column)
        total += weight
    empty = total == 0.0
    acc = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
    tl.store(out + (row * heads + head) * _DIM + column, acc.to(tl.bfloat16))
    log_sum = tl.where(empty, float("-inf"), shift + tl.log(tl.where(empty, 1.0, total)))
    tl.store(lse + row * heads + head, log_sum)


# The provider


def _stride16(tensor: torch.Tensor, what: str) -> int:
    """Stride of the first dimension in units of 16 bytes, the width of one access."""
    stride = tensor.stride(0) * tensor.element_size()
    if not (stride % _ALIGNMENT == 0 and tensor.data_ptr() % _ALIGNMENT == 0):
        raise ValueError(
            f"{what} starts at {tensor.data_ptr():#x} with a stride of {stride} bytes, need "
            f"multiples of {_ALIGNMENT}"
        )
    return stride // _ALIGNMENT


def _check_cache(cache: torch.Tensor, widths: Sequence[int] = (FP8_RECORD_BYTES,)) -> None:
    if not (cache.dim() == 3 and cache.dtype == torch.uint8 and cache.shape[2] in widths):
        raise ValueError(
            f"the cache is {tuple(cache.shape)} of {cache.dtype}, need "
            f"[pages, page_size, {' or '.join(map(str, widths))}] of uint8"
        )
    if cache.stride()[1:] != (cache.shape[2], 1):
        raise ValueError(
            f"the cache's strides inside a page are {cache.stride()[1:]} bytes, need "
            f"({cache.shape[2]}, 1)"
        )


def _check_index_pages(pages: torch.Tensor) -> None:
    width = pages.shape[1:].numel()
    if not (pages.dtype == torch.uint8 and width == INDEX_PAGE_BYTES):
        raise ValueError(
            f"an index page is {width} elements of {pages.dtype}, need {INDEX_PAGE_BYTES} bytes"
        )
    expected = (INDEX_RECORD_BYTES, 1) if pages.dim() == 3 else (1,)
    if pages.stride()[1:] != expected:
        raise ValueError(
            f"index page strides inside a page are {pages.stride()[1:]}, need {expected}"
        )


def _check_span(out: torch.Tensor, width: int) -> None:
    if not (
        out.dim() == 2
        and out.dtype == torch.uint8
        and out.shape[1] == width
        and out.is_contiguous()
        and out.data_ptr() % 4 == 0
    ):
        raise ValueError(
            f"the packed buffer is {tuple(out.shape)} of {out.dtype} with strides {out.stride()}, "
            f"need contiguous [rows, {width}] of uint8, aligned to 4 bytes"
        )


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The first word of a uint8 tensor, as an int32 tensor that only carries the address."""
    return tensor.as_strided((4,), (1,)).view(torch.int32)


def _row_block(width: int) -> int:
    """Columns of one step of a program that owns a row: all of them, up to a limit."""
    return min(_ROW_BLOCK, max(128, triton.next_power_of_2(width)))


def _check_inner(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}, need an inner stride of 1")


@cache
def _capability() -> tuple[int, int]:
    if _INTERPRETED or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability()


def _native_e4m3() -> bool:
    return _capability() >= (8, 9)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        # The interpreter splits as an H200 does.
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def _partial_rows(heads: int) -> int:
    """Rows of which one part fits the buffer for partial results: an output and its sum a head."""
    return PARTIAL_BYTES // (heads * (LATENT_DIM + 1) * 4)


def _split_count(programs: int, resident: int, most: int) -> int:
    """Parts of every row, at most ``most``, with which ``programs`` end first.

    A part takes 1 / count of a row's time; ``resident`` programs run at once. Of equal counts the
    least.
    """
    counts = range(1, max(1, most) + 1)
    return min(counts, key=lambda count: triton.cdiv(programs * count, resident) / count)


@cache
def _flashmla():
    """FlashMLA's sparse prefill where it is the faster way, else None."""
    if _capability() != (9, 0):
        return None
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd, is_flashmla_sparse_supported

    return flash_mla_sparse_fwd if is_flashmla_sparse_supported()[0] else None


@cache
def _deepgemm():
    """DeepGEMM's scores of e4m3 queries and keys, or None."""
    if _capability() != (9, 0):
        return None
    from vllm.utils.deep_gemm import fp8_fp4_mqa_logits, is_deep_gemm_supported

    return fp8_fp4_mqa_logits if is_deep_gemm_supported() else None


@cache
def _vllm_topk():
    """vLLM's compiled top-k of a row: the right scores, in no order, with any of equal ones."""
    if _INTERPRETED:
        return None
    try:
        from vllm import _custom_ops as ops
    except ImportError:
        return None
    return ops.top_k_per_row_prefill


def _flashmla_heads(heads: int) -> int:
    """Heads that FlashMLA is called with; 0 where it is not called."""
    return 0 if _flashmla() is None else flashmla_heads(heads)


_ATTEND_TILES = {16: (32, 4, 3), 32: (32, 4, 2)}
"""Heads of a program -> records of one step, warps, pipeline stages."""
_ATTEND_RESIDENT = 2
"""Programs of these on one multiprocessor, whose registers they fill."""
_COMPILE_THREADS = 8
_FLASHMLA_MIN_TOKENS = 256
"""Fewer rows leave multiprocessors without one; converting all records would not pay either."""


class TritonKernels:
    """:class:`~.base.SparseMLAKernels` on CUDA GPUs.

    Selection and split attention keep fixed scratch of their own, 75 MiB at most, which
    :meth:`warm_up` allocates and nothing enlarges. Calls on one instance must be ordered by one
    stream.
    """

    def __init__(self) -> None:
        self._reserved: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._reserving = Lock()

    def _reserve(self, name: str, num_bytes: int, device: torch.device) -> torch.Tensor:
        key = (name, device)
        if key not in self._reserved:
            # The first users are the threads of the warm-up.
            with self._reserving:
                if key not in self._reserved:
                    self._reserved[key] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._reserved[key]

    def scratch_shapes(
        self, *, max_records: int | None, max_tokens: int, num_heads: int, width: int
    ) -> ScratchShapes:
        """See :meth:`SparseMLAKernels.scratch_shapes`: what FlashMLA takes, where it is used.

        Records of a cache are not converted for it.
        """
        if max_records is None or _flashmla() is None:
            return []
        return flashmla_shapes(
            max_records=max_records, max_tokens=max_tokens, num_heads=num_heads, width=width
        )

    def write_records(self, latents, cache, slot_mapping) -> None:
        """See :meth:`SparseMLAKernels.write_records`."""
        _check_cache(cache)
        if not (latents.dim() == 2 and latents.shape[1] == LATENT_DIM):
            raise ValueError(f"latents must be [tokens, {LATENT_DIM}], got {tuple(latents.shape)}")
        _check_inner(latents=latents, slot_mapping=slot_mapping)
        if slot_mapping.shape[0]:
            _write_records_kernel[(slot_mapping.shape[0],)](
                latents,
                latents.stride(0),
                cache,
                slot_mapping,
                cache.shape[1],
                _stride16(cache, "the cache"),
                GROUPS=4,
                num_warps=1,
            )

    def pack_records(self, cache, block_table, local_lens, starts, out) -> None:
        """See :meth:`SparseMLAKernels.pack_records`."""
        # Packing only copies, so it knows the records of the b12x provider as well.
        _check_cache(cache, (FP8_RECORD_BYTES, NVFP4_DS_MLA.record_bytes))
        _check_span(out, cache.shape[2])
        self._pack(cache, block_table, local_lens, starts, out, cache.shape[1], planar=False)

    def pack_pools(self, index_cache, block_table, local_lens, starts, out) -> None:
        """See :meth:`SparseMLAKernels.pack_pools`."""
        _check_index_pages(index_cache)
        _check_span(out, INDEX_RECORD_BYTES)
        self._pack(
            index_cache, block_table, local_lens, starts, out, POOLS_PER_INDEX_PAGE, planar=True
        )

    def _pack(self, cache, block_table, local_lens, starts, out, page_size, *, planar) -> None:
        _check_inner(block_table=block_table, local_lens=local_lens, starts=starts)
        rows, requests = out.shape[0], local_lens.shape[0]
        if not rows or not requests:
            return
        per_program = 32 if planar else _PACK_ROWS
        words = 128 if cache.shape[2] == FP8_RECORD_BYTES else 64
        _pack_kernel[(triton.cdiv(rows, per_program),)](
            _words(cache),
            block_table,
            local_lens,
            starts,
            _words(out),
            rows,
            requests,
            block_table.stride(0),
            page_size,
            _stride16(cache, "the cache"),
            PLANAR=planar,
            WORDS=32 if planar else words,
            REST=1 if planar else cache.shape[2] // 4 - words,
            ROWS=per_program,
            BLOCK=64,
            num_warps=4,
        )

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
        """See :meth:`SparseMLAKernels.write_pools`.

        A pool that is not completed by its token, or whose beginning is nowhere, is not written.
        """
        _check_index_pages(index_cache)
        _check_inner(k=k, gate=gate)
        if not (ape.is_contiguous() and ape.dtype == torch.float32):
            raise ValueError(
                f"ape is {ape.dtype} with strides {ape.stride()}, need contiguous fp32"
            )
        tokens, requests = k.shape[0], query_start_loc.shape[0] - 1
        if not tokens:
            return
        has_tail = tail_cache is not None
        tail = k if tail_cache is None else tail_cache
        tail_strides = tail.stride()[:3] if has_tail else (0, 0, 0)
        ring = tail.shape[2] if has_tail else 1
        _check_inner(tail_cache=tail)
        if gathered is None:
            pages, page_starts, first_request = index_cache, query_start_loc, requests
        else:
            pages, page_starts = gathered.pages, gathered.page_starts
            first_request = gathered.first_request
            _check_index_pages(pages)
        # Two launches: all tails are read before one is overwritten.
        _write_pools_kernel[(tokens,)](
            k,
            k.stride(0),
            gate,
            gate.stride(0),
            ape,
            index_cache,
            _stride16(index_cache, "the index cache"),
            pool_slots,
            pages,
            _stride16(pages, "the gathered pages"),
            page_starts,
            first_request,
            tail,
            *tail_strides,
            ring,
            tail_slots,
            positions,
            query_start_loc,
            requests,
            POOL=ape.shape[0],
            HAS_TAIL=has_tail,
            BLOCK=64,
            num_warps=1,
            enable_fp_fusion=False,
        )
        if has_tail:
            _write_tail_kernel[(tokens,)](
                k,
                k.stride(0),
                gate,
                gate.stride(0),
                tail,
                *tail_strides,
                ring,
                tail_slots,
                query_start_loc,
                requests,
                BLOCK=64,
                num_warps=1,
            )

    def unpack_pools(self, gathered, starts, pool_lens, interleave, out, page_starts) -> None:
        """See :meth:`SparseMLAKernels.unpack_pools`."""
        _check_span(gathered, INDEX_RECORD_BYTES)
        _check_index_pages(out)
        if not out.is_contiguous():
            raise ValueError(f"out has strides {out.stride()}, need contiguous pages")
        _stride16(out, "out")
        world, requests = starts.shape[0], pool_lens.shape[0]
        if not out.shape[0] or not requests:
            return
        _unpack_kernel[(out.shape[0],)](
            _words(gathered),
            starts,
            starts.stride(0),
            pool_lens,
            page_starts,
            _words(out),
            requests,
            gathered.shape[0] // world,
            WORLD=world,
            INTERLEAVE=interleave,
            WORDS=INDEX_DIM // 4,
            BLOCK=64,
            num_warps=4,
        )

    def check_index_cache(self, index_cache) -> None:
        """See :meth:`SparseMLAKernels.check_index_cache`: whole pages, 16 bytes aligned."""
        _check_index_pages(index_cache)
        _stride16(index_cache, "the index cache")

    def selection_scratch_shapes(self) -> ScratchShapes:
        """See :meth:`SparseMLAKernels.selection_scratch_shapes`: none, what it needs is held."""
        return []

    def select_pools(
        self, q_fp8, weights, index_pages, page_table, req_id, pool_counts, topk, scratch=None
    ):
        """See :meth:`SparseMLAKernels.select_pools`.

        Rows are scored in chunks whose scores fit a fixed buffer; a table of many pages only makes
        the chunks smaller.
        """
        _check_index_pages(index_pages)
        if not (
            q_fp8.dim() == 3 and q_fp8.shape[2] == INDEX_DIM and q_fp8.stride()[1:] == (128, 1)
        ):
            raise ValueError(
                f"q_fp8 is {tuple(q_fp8.shape)} with strides {q_fp8.stride()}, need [rows, heads, "
                f"{INDEX_DIM}] with contiguous rows"
            )
        if not (0 < topk <= _TOPK_BLOCKS[-1] // 2):
            raise ValueError(f"topk is {topk}, need 1 to {_TOPK_BLOCKS[-1] // 2}")
        _check_inner(weights=weights, page_table=page_table, req_id=req_id, counts=pool_counts)
        rows = q_fp8.shape[0]
        device = q_fp8.device
        pool_ids = torch.empty((rows, topk), dtype=torch.int32, device=device)
        scores = torch.empty((rows, topk), dtype=torch.float32, device=device)
        limit = page_table.shape[1] * POOLS_PER_INDEX_PAGE
        if not rows:
            return pool_ids, scores
        if not limit or not page_table.shape[0]:
            return pool_ids.fill_(-1), scores.fill_(-math.inf)
        slots = triton.next_power_of_2(topk)
        block = _TOPK_BLOCKS[0] if max(limit, slots) <= _TOPK_BLOCKS[0] else _TOPK_BLOCKS[-1]
        blocks = triton.cdiv(limit, block)
        # Scores and ids of one pass, and of the next.
        candidates = self._reserve("candidates", CANDIDATE_BYTES, device).view(2, 2, -1)
        # With about one row a request there is nothing to share between neighbouring rows.
        decoding = rows <= 2 * page_table.shape[0]
        # vLLM's selection gives a row one program, which suits many rows.
        compiled_topk = _vllm_topk() if topk == _VLLM_TOPK and not decoding else None
        chunk = rows
        if compiled_topk:
            chunk = min(rows, CANDIDATE_BYTES // (4 * (topk + 1)))
        elif blocks > 1:
            chunk = min(rows, CANDIDATE_BYTES // (16 * blocks * slots))
        bounds = torch.empty((4, rows), dtype=torch.int32, device=device)
        _key_bounds_kernel[(triton.cdiv(rows, 256),)](
            req_id, pool_counts, *bounds, rows, limit, BLOCK=256, num_warps=4
        )
        score = self._deepgemm_scorer(q_fp8, weights, index_pages, page_table, bounds, limit, chunk)
        if score is not None:
            chunk = min(chunk, _DEEPGEMM_BYTES // (limit * 4))
        else:
            chunk = min(chunk, LOGITS_BYTES // (limit * 4))
            score = self._triton_scorer(
                q_fp8, weights, index_pages, page_table, req_id, pool_counts, limit, decoding
            )
        if chunk <= 0:
            raise ValueError(
                f"a table of {page_table.shape[1]} pages needs {limit * 4} bytes of scores a row, "
                f"{LOGITS_BYTES} are reserved"
            )
        for row0 in range(0, rows, chunk):
            count = min(chunk, rows - row0)
            logits = score(row0, count)
            if compiled_topk:
                # One more, which tells whether the last place is contested.
                chosen = candidates.view(torch.int32).view(-1)[: count * (topk + 1)]
                compiled_topk(
                    logits,
                    bounds[2, row0 : row0 + count],
                    bounds[3, row0 : row0 + count],
                    chosen.view(count, topk + 1),
                    count,
                    logits.stride(0),
                    logits.stride(1),
                    topk + 1,
                )
                _settle_kernel[(count,)](
                    logits,
                    logits.stride(0),
                    chosen,
                    req_id,
                    pool_counts,
                    limit,
                    row0,
                    count,
                    scores,
                    pool_ids,
                    TOPK=topk,
                    SLOTS=slots,
                    BLOCK=_SETTLE_BLOCK,
                    num_warps=_SETTLE_WARPS,
                )
                continue
            level, width, step, parts = 1, logits.stride(0), block, blocks
            source_scores, source_ids, turn = logits, None, 0
            while True:
                best_scores, best_ids, stride, first = scores, pool_ids, topk, row0
                if parts > 1:
                    best_scores = candidates[turn, 0].view(torch.float32)
                    best_ids = candidates[turn, 1].view(torch.int32)
                    stride, first = parts * slots, 0
                _topk_kernel[(count, parts)](
                    source_scores,
                    best_ids if source_ids is None else source_ids,
                    width,
                    req_id,
                    pool_counts,
                    limit,
                    level,
                    best_scores,
                    best_ids,
                    stride,
                    first,
                    row0,
                    TOPK=topk,
                    SLOTS=slots,
                    BLOCK=step,
                    HAS_IDS=source_ids is not None,
                    num_warps=_TOPK_WARPS[step],
                )
                if parts == 1:
                    break
                source_scores, source_ids, turn = best_scores, best_ids, 1 - turn
                level = step if level == 1 else level * (step // slots)
                width, step = stride, _TOPK_BLOCKS[-1]
                parts = triton.cdiv(width, step)
        return pool_ids, scores

    def _triton_scorer(
        self, q_fp8, weights, pages, page_table, req_id, pool_counts, limit, decoding
    ):
        """A function of (first row, rows) that returns their scores, in the reserved buffer."""
        heads = q_fp8.shape[1]
        logits = self._reserve("logits", LOGITS_BYTES, q_fp8.device).view(torch.float32)
        per_tile = 1 if decoding else 4
        head_slots = max(triton.next_power_of_2(heads), 16 if per_tile == 1 else 4)

        def score(row0: int, count: int) -> torch.Tensor:
            _logits_kernel[(triton.cdiv(count, per_tile), triton.cdiv(limit, _STRIP))](
                q_fp8.view(torch.uint8),
                q_fp8.stride(0),
                weights,
                weights.stride(0),
                pages,
                _stride16(pages, "index_pages"),
                page_table,
                page_table.stride(0),
                limit,
                req_id,
                pool_counts,
                logits,
                limit,
                row0,
                count,
                heads=heads,
                HEADS=head_slots,
                BQ=per_tile,
                STRIP=_STRIP,
                NATIVE=_native_e4m3(),
                **_LOGITS_LAUNCH,
            )
            return logits[: count * limit].view(count, limit)

        return score

    def _deepgemm_scorer(self, q_fp8, weights, pages, page_table, bounds, limit, chunk):
        """The same through DeepGEMM, or None where that is not possible or not faster.

        DeepGEMM allocates the scores itself; the bound is ours.
        """
        requests, columns = page_table.shape
        heads = q_fp8.shape[1]
        keys = requests * limit
        if (
            _deepgemm() is None
            or heads not in (32, 64)
            or keys > DEEPGEMM_KEYS
            # Its programs own rows, so that few rows leave multiprocessors idle.
            or min(chunk, _DEEPGEMM_BYTES // (limit * 4)) < _DEEPGEMM_ROWS
            or not (q_fp8.is_contiguous() and weights.is_contiguous())
        ):
            return None
        device = q_fp8.device
        buffer = self._reserve("keys", DEEPGEMM_KEYS_BYTES, device)
        key = buffer[: keys * INDEX_DIM].view(torch.float8_e4m3fn).view(keys, INDEX_DIM)
        scale = buffer[DEEPGEMM_KEYS * INDEX_DIM :].view(torch.float32)[:keys]
        _spread_keys_kernel[(requests * columns,)](
            _words(pages),
            pages.shape[0],
            _stride16(pages, "index_pages"),
            page_table,
            page_table.stride(0),
            columns,
            buffer.view(torch.int32),
            scale.view(torch.int32),
            WORDS=INDEX_DIM // 4,
            num_warps=4,
        )

        def score(row0: int, count: int) -> torch.Tensor:
            end = row0 + count
            return _deepgemm()(
                (q_fp8[row0:end], None),
                (key, scale),
                weights[row0:end],
                bounds[0, row0:end],
                bounds[1, row0:end],
                limit,
            )

        return score

    def merge_pool_candidates(self, scores, global_ids, topk):
        """See :meth:`SparseMLAKernels.merge_pool_candidates`."""
        if not (scores.shape == global_ids.shape and scores.shape[1] <= 4 * _TOPK_BLOCKS[-1]):
            raise ValueError(
                f"scores are {tuple(scores.shape)} and ids {tuple(global_ids.shape)}, need one "
                f"shape of at most {4 * _TOPK_BLOCKS[-1]} columns"
            )
        _check_inner(scores=scores, global_ids=global_ids)
        rows, columns = scores.shape
        device = scores.device
        out = torch.empty((rows, topk), dtype=torch.int32, device=device)
        out_scores = torch.empty((rows, topk), dtype=torch.float32, device=device)
        if rows:
            slots = triton.next_power_of_2(topk)
            block = max(triton.next_power_of_2(columns), slots)
            _merge_kernel[(rows,)](
                scores,
                scores.stride(0),
                global_ids,
                global_ids.stride(0),
                columns,
                out_scores,
                out,
                TOPK=topk,
                SLOTS=slots,
                BLOCK=block,
                num_warps=4 if block <= _TOPK_BLOCKS[0] else 8,
            )
        return out, out_scores

    def expand_pools(self, pool_ids, positions, pool_size, width):
        """See :meth:`SparseMLAKernels.expand_pools`."""
        rows, topk = pool_ids.shape
        needed = topk * pool_size + pool_size - 1
        if width < needed:
            raise ValueError(
                f"width {width} cannot hold {topk} pools of {pool_size} and a tail: need {needed}"
            )
        _check_inner(pool_ids=pool_ids, positions=positions)
        out = torch.empty((rows, width), dtype=torch.int32, device=pool_ids.device)
        if rows:
            _expand_kernel[(rows,)](
                pool_ids,
                pool_ids.stride(0),
                positions,
                out,
                width,
                width,
                TOPK=topk,
                SLOTS=triton.next_power_of_2(topk),
                POOL=pool_size,
                PLACES=triton.next_power_of_2(pool_size),
                BLOCK=1024,
                num_warps=4,
            )
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
        _check_inner(token_ids=token_ids, req_id=req_id)
        if out is None:
            out = torch.empty(token_ids.shape, dtype=torch.int32, device=token_ids.device)
        if not (out.shape == token_ids.shape and out.dtype == torch.int32 and out.stride(-1) == 1):
            raise ValueError(
                f"out is {tuple(out.shape)} of {out.dtype}, need {tuple(token_ids.shape)} of int32"
            )
        rows, width = token_ids.shape
        first, end = (0, 0) if window is None else window
        if context_lens is None:
            # No token lies behind this, so any starts will do.
            context_lens, own_starts = starts.new_full(starts.shape[1:], 2**31 - 1), starts[0]
        if rows and not starts.shape[1]:
            out.fill_(-1)
            if counts is not None:
                counts.zero_()
        elif rows:
            _remap_kernel[(rows,)](
                token_ids,
                token_ids.stride(0),
                req_id,
                starts,
                starts.stride(0),
                context_lens,
                own_starts,
                padded,
                out,
                out.stride(0),
                out if counts is None else counts,
                width,
                first,
                end,
                WORLD=dcp_world_size,
                INTERLEAVE=interleave,
                COUNT=counts is not None,
                WINDOW=window is not None,
                BLOCK=_row_block(width),
                num_warps=_ROW_WARPS,
            )
        return out

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
        """See :meth:`SparseMLAKernels.filter_local`. Rows are not checked to fit int32."""
        _check_inner(token_ids=token_ids, req_id=req_id, block_table=block_table)
        out = torch.empty(token_ids.shape, dtype=torch.int32, device=token_ids.device)
        rows, width = token_ids.shape
        counts = torch.empty(rows, dtype=torch.int32, device=token_ids.device)
        if rows:
            _filter_kernel[(rows,)](
                token_ids,
                token_ids.stride(0),
                req_id,
                block_table,
                block_table.stride(0),
                block_stride_rows,
                page_size,
                rank,
                out,
                counts,
                width,
                WORLD=dcp_world_size,
                INTERLEAVE=interleave,
                BLOCK=_row_block(width),
                num_warps=_ROW_WARPS,
            )
        return out, counts

    def attend(self, q, records, row_ids, counts, scale, scratch=None):
        """See :meth:`SparseMLAKernels.attend`."""
        if not (
            records.dim() == 2
            and records.dtype == torch.uint8
            and records.shape[1] == FP8_RECORD_BYTES
            and records.stride(1) == 1
        ):
            raise ValueError(
                f"records are {tuple(records.shape)} of {records.dtype} with strides "
                f"{records.stride()}, need [rows, {FP8_RECORD_BYTES}] of uint8 with inner stride 1"
            )
        if not (q.dim() == 3 and q.dtype == torch.bfloat16 and q.shape[2] == LATENT_DIM):
            raise ValueError(
                f"q is {tuple(q.shape)} of {q.dtype}, need [rows, heads, {LATENT_DIM}] of bfloat16"
            )
        _check_inner(q=q, row_ids=row_ids, counts=counts)
        rows, heads = q.shape[:2]
        out = torch.empty((rows, heads, LATENT_DIM), dtype=q.dtype, device=q.device)
        if not rows:
            return out, torch.empty((rows, heads), dtype=torch.float32, device=q.device)
        if not records.shape[0]:
            empty = torch.full((rows, heads), -math.inf, dtype=torch.float32, device=q.device)
            return out.zero_(), empty
        if scratch and self._flashmla_fits(q, records, row_ids, scratch):
            return out, self._attend_flashmla(q, records, row_ids, counts, scale, scratch, out)
        return out, self._attend_triton(q, records, row_ids, counts, scale, out)

    def _attend_triton(self, q, records, row_ids, counts, scale, out) -> torch.Tensor:
        rows, heads = q.shape[:2]
        width = row_ids.shape[1]
        lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
        head_block = min(max(_ATTEND_TILES), max(16, triton.next_power_of_2(heads)))
        columns, warps, stages = _ATTEND_TILES[head_block]
        programs = rows * triton.cdiv(heads, head_block)
        splits = _split_count(
            programs,
            _ATTEND_RESIDENT * _multiprocessors(q.device),
            min(width // (2 * columns), _partial_rows(heads) // rows),
        )
        partial = partial_lse = lse
        if splits > 1:
            buffer = self._reserve("partial", PARTIAL_BYTES, q.device).view(torch.float32)
            size = rows * splits * heads
            partial, partial_lse = buffer, buffer[size * LATENT_DIM :]
        _attend_kernel[(programs, splits)](
            q,
            q.stride(0),
            q.stride(1),
            records,
            _stride16(records, "records"),
            row_ids,
            row_ids.stride(0),
            counts,
            width,
            scale,
            out,
            lse,
            partial,
            partial_lse,
            splits,
            heads=heads,
            HB=head_block,
            BN=columns,
            SPLIT=splits > 1,
            NATIVE=_native_e4m3(),
            num_warps=warps,
            num_stages=stages,
        )
        if splits > 1:
            _combine_kernel[(rows * heads,)](
                partial, partial_lse, out, lse, splits, heads=heads, num_warps=4
            )
        return lse

    @staticmethod
    def _flashmla_fits(q, records, row_ids, scratch: Scratch) -> bool:
        rows, heads = q.shape[:2]
        padded = _flashmla_heads(heads)
        return bool(
            padded
            and rows >= _FLASHMLA_MIN_TOKENS
            and records.shape[0] <= scratch[0].shape[0]
            and rows <= scratch[1].shape[0]
            and row_ids.shape[1] <= scratch[1].shape[1]
            and len(scratch) == (2 if padded == heads else 4)
        )

    def _attend_flashmla(self, q, records, row_ids, counts, scale, scratch, out) -> torch.Tensor:
        sparse_prefill = _flashmla()
        rows, heads = q.shape[:2]
        padded = _flashmla_heads(heads)
        latents, ids = scratch[0][: records.shape[0]], scratch[1][:rows]
        lengths = torch.empty(rows, dtype=torch.int32, device=q.device)
        lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
        _upconvert_kernel[(triton.cdiv(records.shape[0], 8),)](
            records, _stride16(records, "records"), latents, records.shape[0], ROWS=8, num_warps=4
        )
        _mask_rows_kernel[(rows,)](
            row_ids,
            row_ids.stride(0),
            counts,
            ids,
            ids.stride(0),
            lengths,
            row_ids.shape[1],
            ids.shape[1],
            BLOCK=1024,
            num_warps=4,
        )
        latents, ids = latents.unsqueeze(1), ids.unsqueeze(1)
        step = rows if padded == heads else scratch[3].shape[0]
        for begin in range(0, rows, step):
            end = min(rows, begin + step)
            part, result = q[begin:end], out
            if padded == heads:
                part = part.contiguous()
            else:
                reach = (end - 1) * heads + padded
                if reach > rows * heads or not q.is_contiguous():
                    # Padding reads on past the last row: that has to be memory of ours.
                    copy = scratch[2][: (end - begin) * heads]
                    part = copy.view(end - begin, heads, LATENT_DIM).copy_(part)
                part = part.as_strided(
                    (end - begin, padded, LATENT_DIM), (heads * LATENT_DIM, LATENT_DIM, 1)
                )
                result = scratch[3][: end - begin]
            part_lengths = lengths[begin:end]
            _, _, part_lse = sparse_prefill(
                part, latents, ids[begin:end], scale, topk_length=part_lengths, out=result
            )
            _finish_rows_kernel[(end - begin,)](
                result,
                part_lse,
                part_lengths,
                out[begin:end],
                lse[begin:end],
                heads=heads,
                PADDED=padded,
                HB=min(16, triton.next_power_of_2(heads)),
                num_warps=4,
            )
        return lse

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
        page_size: int = POOLS_PER_INDEX_PAGE,
        record_bytes: int = FP8_RECORD_BYTES,
        scale: float = 1.0,
    ) -> None:
        """See :meth:`SparseMLAKernels.warm_up`. No heads: nothing is warmed up for that operation.

        One program serves every page size and scale.
        """
        if head_counts and record_bytes != FP8_RECORD_BYTES:
            raise ValueError(
                f"attention on this GPU reads records of {FP8_RECORD_BYTES} bytes, not of "
                f"{record_bytes}; start with --kv-cache-dtype fp8_ds_mla"
            )
        world, pool_interleave = dcp_world_size, max(1, interleave // pool_size)

        def ints(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        def long(*shape: int, fill: int = 0) -> torch.Tensor:
            return ints(*shape, fill=fill, dtype=torch.int64)

        def octets(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.uint8, device=device)

        def halves(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16, device=device)

        cache = octets(1, POOLS_PER_INDEX_PAGE, FP8_RECORD_BYTES)
        index_cache = octets(1, POOLS_PER_INDEX_PAGE, INDEX_RECORD_BYTES)
        one = ints(1, fill=1)
        table, zero = ints(1, 1), ints(1)

        def records_and_pools() -> None:
            self.write_records(halves(1, LATENT_DIM), cache, long(1))
            packed = octets(1, POOLS_PER_INDEX_PAGE, record_bytes)
            self.pack_records(packed, table, one, zero, octets(1, record_bytes))
            self.pack_pools(index_cache, table, one, zero, octets(1, INDEX_RECORD_BYTES))
            self.unpack_pools(
                octets(world, INDEX_RECORD_BYTES),
                ints(world, 1),
                one,
                pool_interleave,
                octets(1, INDEX_PAGE_BYTES),
                zero,
            )

        def new_pools(tail: torch.Tensor | None) -> None:
            self.write_pools(
                halves(pool_size, INDEX_DIM),
                halves(pool_size, INDEX_DIM),
                torch.zeros(pool_size, INDEX_DIM, device=device),
                index_cache,
                long(pool_size),
                tail,
                long(pool_size),
                torch.arange(pool_size, device=device),
                ints(2, fill=pool_size),
            )

        def selection(rows: int, pools: int) -> None:
            self.select_pools(
                octets(rows, index_heads, INDEX_DIM).view(torch.float8_e4m3fn),
                torch.zeros(rows, index_heads, device=device),
                index_cache,
                ints(1, triton.cdiv(pools, POOLS_PER_INDEX_PAGE)),
                ints(rows),
                ints(rows, fill=1),
                topk,
            )

        def merged(sources: int) -> None:
            scores = torch.zeros(1, sources * topk, device=device)
            self.merge_pool_candidates(scores, ints(1, sources * topk, fill=-1), topk)

        def token_rows() -> None:
            self.expand_pools(ints(1, topk), long(1), pool_size, width)
            ids = ints(1, width)
            for window in (None, (0, 1)):
                self.remap(ids, zero, ints(world, 1), 1, world, interleave, None, one, window)
            self.filter_local(ids, zero, table, 1, 1, 0, world, interleave)

        def attention(rows: int, heads: int, scratch: Scratch = ()) -> None:
            self.attend(
                halves(rows, heads, LATENT_DIM),
                cache[0, :1],
                ints(rows, width),
                ints(rows),
                1.0,
                scratch=scratch,
            )

        # Of the selection: both tile heights, every block size, one and several passes.
        tail = halves(1, 2, pool_size, INDEX_DIM)
        tasks: list[Callable[[], None]] = [records_and_pools, token_rows]
        tasks += [partial(new_pools, None), partial(new_pools, tail)]
        tasks += [
            partial(selection, rows, pools)
            for rows in ((1, 8) if index_heads else ())
            for pools in (1, _TOPK_BLOCKS[0] + 1, _TOPK_BLOCKS[1] + 1)
        ]
        if index_heads and _deepgemm() is not None:
            # A peak that the memory profiler has to know of.
            octets(_DEEPGEMM_BYTES)
            tasks.append(partial(selection, _DEEPGEMM_ROWS, 1))
        if world > 1:
            # Candidates of all ranks, and of two windows of a context.
            tasks += [partial(merged, sources) for sources in {2, world}]
        for heads in head_counts:
            # Split, and with so many rows that two parts of each would not fit their buffer.
            tasks += [partial(attention, rows, heads) for rows in (1, _partial_rows(heads))]
            shapes = self.scratch_shapes(
                max_records=1, max_tokens=_FLASHMLA_MIN_TOKENS, num_heads=heads, width=width
            )
            if shapes:
                scratch = [torch.empty(s, dtype=d, device=device) for s, d in shapes]
                tasks.append(partial(attention, _FLASHMLA_MIN_TOKENS, heads, scratch))
        _run_tasks(tasks, device)


def _run_tasks(tasks: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Run ``tasks``, which mostly compile, side by side.

    Ranks of one machine begin at different places, so that each finds much of what it needs in the
    cache on disk, compiled by another. The interpreter compiles nothing and takes one at a time.
    """
    if device.type != "cuda":
        for task in tasks:
            task()
        return

    # vLLM's own, not the default one: there a task would not wait for tensors that the caller made.
    stream = torch.cuda.current_stream(device)

    def run(task: Callable[[], None]) -> None:
        # All three are properties of a thread.
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.inference_mode():
            task()

    first = (device.index or 0) * len(tasks) // torch.cuda.device_count()
    with ThreadPoolExecutor(_COMPILE_THREADS) as pool:
        for done in [pool.submit(run, task) for task in (*tasks[first:], *tasks[:first])]:
            done.result()
