# SPDX-License-Identifier: Apache-2.0
"""Rates of the time model for GPUs that are not here, scaled from what one H200 was measured at.

Kernels: ``benchmarks/results/kernels_h200.csv``, microseconds at 4,096 rows. Collectives:
all-gathers of two H200, 9 to 37 MB received over NVLink. Nothing of another GPU was measured: its
arithmetic is taken to be slower or faster as its nominal FP8 rate is, copies as its memory's, links
as theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.attention.backends.mla.ckv_gather.byte_model import HEAD_BYTES
from vllm.v1.attention.backends.mla.ckv_gather.time_model import Curve, Rates

US = 1e-6

LINK_EFFICIENCY = 0.54
"""Share of a link's nominal speed that NCCL's all-gathers reach: 244 of 450 GB/s."""

COLLECTIVE = 50 * US
"""An all-gather, however small: what is left of 88 us for 9.2 MB and 201 us for 36.8 MB. Through
host memory 38 us were left."""

LAUNCHES = 80 * US
"""Of either path: attention of few rows takes 30 to 60 us, packing and unpacking 3 to 5 us each."""

ROWS, WIDTH = 4096, 2051
"""Of the measurements."""

PAIR = (1584.6 - 427.7) * US / (ROWS * (32_768 - 8_192))
"""select_pools, 32 heads, over 32,768 and 8,192 pools."""

CHOICE = 427.7 * US / ROWS - 8_192 * PAIR
"""What select_pools takes for a row beside its pairs."""

FLASHMLA_US, FLASHMLA_HEADS = (2297.8 + 2135.4 + 2166.6) / 3, 64
"""Attention with scratch, on Hopper: 16, 32 and 64 heads take alike, 128 twice as long."""

TRITON_LEAST_US, TRITON_US, TRITON_HEAD_US = 3360, 235, 127.1
"""Attention without scratch: up to 16 heads, and a line through 32, 64 and 128, within 1 %."""

ROW_US = {"merge_pool_candidates": 94.1, "expand_pools": 14.3, "filter_local": 43.5, "remap": 25.2}

MERGED_RANKS = 2
"""Ranks whose candidates were merged there, 512 of each."""

FLASHMLA_COPIES_US = 80
"""Copying the queries and the results of FlashMLA's padding heads."""

PACKED = (41.6 - 13.7) * US / (131_072 - 32_768)
"""A record packed: pack_records of 131,072 and 32,768."""

UNPACKED = (5.2 - 3.6) * US / (32_768 - 8_192)
"""A pool unpacked; packing one takes half as long."""

CONVERTED = 14 * US / 32_768
"""A record converted to bf16 for FlashMLA."""

PASSES = 6
"""Times that the bytes of all heads are read or written beside attention, to order queries after
their gather and to scale and order outputs before they are scattered. Counted, not measured."""


@dataclass(frozen=True)
class Gpu:
    """Nominal figures of one kind of GPU.

    family: compute capability, major x 10. link_gbps: GB/s that one GPU receives from others of
    its host. fp8_tflops: dense, with float32 accumulation. memory_gbps: GB/s of its memory.
    """

    title: str
    family: int
    link_gbps: float
    fp8_tflops: float
    memory_gbps: float


GPUS = {
    "rtx-pro-6000": Gpu("RTX PRO 6000 Blackwell, PCIe 5.0", 120, 63, 1000, 1792),
    "rtx-5090": Gpu("GeForce RTX 5090, PCIe 5.0", 120, 63, 419, 1792),
    "gb10": Gpu("GB10 (DGX Spark), 200 Gb/s network", 120, 25, 250, 273),
    "b200": Gpu("B200, NVLink 5", 100, 900, 4500, 8000),
    "b300": Gpu("B300, NVLink 5", 100, 900, 4500, 8000),
    "h100": Gpu("H100 SXM, NVLink 4", 90, 450, 1979, 3350),
    "h200": Gpu("H200 SXM, NVLink 4", 90, 450, 1979, 4800),
    "l40s": Gpu("L40S, PCIe 4.0", 80, 31, 733, 864),
    "a100": Gpu("A100 SXM, NVLink 3", 80, 300, 312, 2039),
}
"""``--gpu`` values. Links are one direction; ``--link-gbps`` takes what you measured instead."""


def known_rates(
    gpu: Gpu, *, local_heads: int, index_heads: int, world: int, pool_size: int, link_gbps: float
) -> Rates:
    """Rates of one rank of ``world``, with ``local_heads`` of its own, on ``gpu``.

    link_gbps: GB/s that a rank receives in an all-gather.
    """
    base = GPUS["h200"]
    arithmetic = base.fp8_tflops / gpu.fp8_tflops
    copies = base.memory_gbps / gpu.memory_gbps
    flashmla = gpu.family == 90 and local_heads <= 128

    def attention(heads: int, *, gathered: bool) -> Curve:
        if gpu.family == 120:  # b12x has one kernel for both paths; taken to be as good as FlashMLA
            us = heads / FLASHMLA_HEADS * FLASHMLA_US
        elif flashmla and gathered:
            us = -(-heads // FLASHMLA_HEADS) * FLASHMLA_US
        else:
            us = max(TRITON_LEAST_US, TRITON_US + heads * TRITON_HEAD_US)
        return ((0, 0.0), (WIDTH, us * arithmetic * US / ROWS))

    def rows(*names: str) -> float:
        return sum(ROW_US[name] for name in names) * US / ROWS

    def curve(row: float) -> Curve:
        return ((0, LAUNCHES), (ROWS, LAUNCHES + copies * ROWS * row))

    # Every step of the merge's search looks at all candidates, padded to a power of two. Taken to
    # be all that it does, though putting the best in order takes the same for any number. More than
    # 1,024 were not measured.
    merges = 2 ** (world - 1).bit_length() / MERGED_RANKS
    all_heads = world * local_heads
    heads_copied = PASSES * HEAD_BYTES / (base.memory_gbps * 1e9)
    padding = FLASHMLA_COPIES_US * US / ROWS if flashmla else 0.0
    merging = rows("merge_pool_candidates") + 2 * local_heads * heads_copied
    unpacking = UNPACKED * (1 + 0.5 / world) / pool_size
    return Rates(
        collective=COLLECTIVE,
        byte=1 / (link_gbps * 1e9),
        pair=PAIR * arithmetic * max(index_heads, 32) / 32,
        own_heads=attention(local_heads, gathered=True),
        all_heads=attention(all_heads, gathered=False),
        ordinary=curve(
            CHOICE
            + merges * rows("merge_pool_candidates")
            + rows("expand_pools", "filter_local")
            + all_heads * heads_copied
        ),
        gathered=curve(CHOICE + rows("expand_pools", "remap") + padding),
        token=copies * (PACKED / world + unpacking + (CONVERTED if flashmla else 0.0)),
        merged=LAUNCHES,
        merged_row=copies * merging,
        # Of a host that launches ahead of the GPU.
        ordinary_host=0.0,
        gathered_host=0.0,
    )
