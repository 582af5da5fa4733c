# SPDX-License-Identifier: Apache-2.0
"""Bytes that one rank receives for one prefill batch, on either path. Pure integers, no torch.

The same numbers that :mod:`.counters` adds up while serving, before the batch has run: they decide
in ``VLLM_B12X_MLA_CKV_GATHER=auto`` and fill the tables of ``vllm-ckv plan``. Everything here is
equal on all ranks of a DCP group: configuration, and the batch's global lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.attention.backends.mla.ckv_gather.counters import (
    candidate_bytes,
    combine_bytes,
    query_gather_bytes,
    selection_bytes,
)
from vllm.v1.attention.backends.mla.ckv_gather.geometry import INDEX_RECORD_BYTES, local_length

HEAD_BYTES = 512 * 2
"""Bytes of one head of one query, or of its partial output: 512 bfloat16 values."""


PAIRS_PER_BYTE = 10
"""(Row, pool) pairs that a GPU scores in the time in which it receives one byte.

One H200, 32 index heads: 4,096 rows over 8,192 pools take 0.32 ms of scoring and 0.12 ms of top-k,
over 32,768 pools 1.17 and 0.31 ms, so 10.3 ps a pair beyond the first. An all-gather of 8 MiB,
4 MiB of them received, takes about 0.4 ms through host memory: 95 ps a byte, 9.3 pairs. Over NVLink
it takes about 60 us: 1.4 pairs. The slow link counts, so that a share pays on both."""

PAIRS_PER_EXCHANGE = 4_000_000
"""Pairs scored in the 40 us that one more collective is taken to cost however small it is: its
launch, and the wait for the slowest rank. An assumption, not a measurement."""


def shards_selection(rows: int, pools: int, world: int, pool_topk: int) -> bool:
    """Whether each rank selects for a share of a gathered batch's rows, instead of all of them.

    It scores ``rows * pools * (N - 1) / N`` fewer pairs, and receives the pool ids of the other
    shares, :func:`.counters.selection_bytes`. The model has even shares: in a prompt's first chunk
    the last share sees more pools than the first, and less is saved. All arguments are equal on all
    ranks.

    rows: T, padding included. pools: visible to a row, on average. world: ranks N.
    pool_topk: pools that a row selects.
    """
    saved = rows * pools * (world - 1) // world
    return saved > PAIRS_PER_EXCHANGE + PAIRS_PER_BYTE * selection_bytes(rows, pool_topk, world)


def last_gain(gains: Callable[[int], bool], least: int) -> int:
    """The longest context at which a gather gains; 0 if it does not at ``least``, the shortest.

    gains: whether it does at a context; once it does not, it never does again.
    """
    if not gains(least):
        return 0
    low, high = least, 2 * least
    while gains(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gains(middle) else (low, middle)
    return low


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

    def gathered(
        self, lengths: Sequence[int], sharded_rows: Iterable[int] = (), own: Sequence[int] = ()
    ) -> int:
        """Bytes received when all records and index keys of a batch are gathered.

        In one window or in several: rank 0 stores as many records as any other rank of every
        request and of every window of its context, so what is padded for one adds up.

        lengths: visible tokens of each request. sharded_rows: rows of each span, if its selection
            is shared out over the ranks. own: the last tokens of each request, whose records and
            pools every rank writes by itself; empty: none.
        """
        # No rank stores more of a request than rank 0, so its span is the padded one.
        rank = {"rank": 0, "dcp_world_size": self.dcp_world_size}
        records = pools = 0
        for length, written in zip(lengths, own or [0] * len(lengths), strict=True):
            context = length - written
            records += local_length(context, interleave=self.interleave, **rank)
            pools += local_length(
                context // self.pool_size, interleave=self.interleave // self.pool_size, **rank
            )
        others = self.dcp_world_size - 1
        keys_and_records = records * self.record_bytes + pools * INDEX_RECORD_BYTES
        selection = sum(
            selection_bytes(rows, self.pool_topk, self.dcp_world_size) for rows in sharded_rows
        )
        return others * keys_and_records + selection

    def ordinary(self, query_tokens: int) -> int:
        """Bytes received when queries, partial outputs and pool candidates are exchanged."""
        world = self.dcp_world_size
        all_heads = world * self.local_heads
        return (
            query_gather_bytes(query_tokens, self.local_heads, HEAD_BYTES, world)
            + combine_bytes(query_tokens, all_heads, HEAD_BYTES, world, a2a=self.a2a)
            + candidate_bytes(query_tokens, self.pool_topk, world)
        )

    @property
    def ordinary_collectives(self) -> int:
        """Collectives of the ordinary path: candidates, queries and outputs.

        Log-sum-exps travel with the outputs under a2a, and on their own otherwise.
        """
        return 3 if self.a2a else 4
