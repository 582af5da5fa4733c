# SPDX-License-Identifier: Apache-2.0
"""Bytes that one rank receives for one prefill batch, on either path. Pure integers, no torch.

The same numbers that :mod:`.counters` adds up while serving, before the batch has run: they decide
in ``VLLM_B12X_MLA_CKV_GATHER=auto`` and fill the tables of ``vllm-ckv plan``. Everything here is
equal on all ranks of a DCP group: configuration, and the batch's global lengths.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.v1.attention.backends.mla.ckv_gather.counters import (
    candidate_bytes,
    combine_bytes,
    query_gather_bytes,
)
from vllm.v1.attention.backends.mla.ckv_gather.geometry import INDEX_RECORD_BYTES, local_length

HEAD_BYTES = 512 * 2
"""Bytes of one head of one query, or of its partial output: 512 bfloat16 values."""


def ordinary_peak_bytes(query_tokens: int, all_heads: int) -> int:
    """Bytes that one rank holds for a moment in an ordinary batch of ``query_tokens``.

    Query of all heads of the DCP group, its output, and what the combine sends and receives.
    """
    return 4 * query_tokens * all_heads * HEAD_BYTES


@dataclass(frozen=True)
class ByteModel:
    """One sparse MLA layer with its indexer under DCP; all sizes are those of one rank.

    dcp_world_size: ranks N. interleave: tokens. pool_size: tokens of an index pool.
    record_bytes: bytes of a latent record. local_heads: attention heads of one rank.
    pool_topk: pools that a query selects. a2a: ``--dcp-comm-backend a2a``.
    """

    dcp_world_size: int
    interleave: int
    pool_size: int
    record_bytes: int
    local_heads: int
    pool_topk: int
    a2a: bool

    def gathered(self, lengths: Iterable[int]) -> int:
        """Bytes received when all records and index keys of a batch are gathered.

        lengths: visible tokens of each request.
        """
        # No rank stores more of a request than rank 0, so its span is the padded one.
        rank = {"rank": 0, "dcp_world_size": self.dcp_world_size}
        records = pools = 0
        for length in lengths:
            records += local_length(length, interleave=self.interleave, **rank)
            pools += local_length(
                length // self.pool_size, interleave=self.interleave // self.pool_size, **rank
            )
        others = self.dcp_world_size - 1
        return others * (records * self.record_bytes + pools * INDEX_RECORD_BYTES)

    def ordinary(self, query_tokens: int) -> int:
        """Bytes received when queries, partial outputs and pool candidates are exchanged."""
        world = self.dcp_world_size
        all_heads = world * self.local_heads
        return (
            query_gather_bytes(query_tokens, self.local_heads, HEAD_BYTES, world)
            + combine_bytes(query_tokens, all_heads, HEAD_BYTES, world, a2a=self.a2a)
            + candidate_bytes(query_tokens, self.pool_topk, world)
        )

    def gains(self, query_tokens: int, lengths: Iterable[int]) -> bool:
        """Whether a gather moves fewer bytes than the ordinary path."""
        return self.gathered(lengths) < self.ordinary(query_tokens)

    def break_even(self, query_tokens: int) -> int:
        """Longest context, in tokens of one request with the chunk itself, at which a gather gains.

        query_tokens: of the chunk. 0: a gather never gains.
        """
        if not self.gains(query_tokens, [1]):
            return 0
        low, high = 1, 2
        while self.gains(query_tokens, [high]):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.gains(query_tokens, [middle]) else (low, middle)
        return low
