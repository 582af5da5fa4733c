# SPDX-License-Identifier: Apache-2.0
"""What a process has done so far: batches by decision, tokens gathered, bytes received per path.

Bytes are those that one rank receives from the other ranks of its DCP group, computed from shapes:
no transport adds its own headers, and a rank's own share of an all-gather is not counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.attention.backends.mla.ckv_gather.eligibility import Reason

LSE_BYTES = 4
"""Bytes of one log-sum-exp, which travels with every partial output: float32."""

CANDIDATE_BYTES = 8
"""Bytes of one pool candidate of the ordinary indexer: a float32 score and an int32 id."""

POOL_ID_BYTES = 4
"""Bytes of one pool id of a selection that is shared out over the ranks: int32."""

EXCHANGES = ("index_keys", "selection", "records")
"""The exchanges of a layer, in the order in which they happen; the selection's only where it is
shared out over the ranks."""

SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Upper bounds of a histogram's buckets, inclusive; one more bucket has none."""

_WORDS = {
    Reason.DECODE_TOKENS: "mixed",
    Reason.NOT_ALL_PREFILLING: "not all prefilling",
    Reason.TOO_FEW_TOKENS: "short",
    Reason.TOO_MANY_REQUESTS: "over the request limit",
    Reason.NO_GAIN: "without gain",
}

NOT_PREFILL = frozenset({Reason.DECODE_ONLY, Reason.GRAPH_CAPTURE, Reason.DRAFT_LAYER})
"""Reasons of batches that the summary leaves out: they hold no prompt that could have gathered."""


def query_gather_bytes(rows: int, local_heads: int, head_bytes: int, world: int) -> int:
    """Bytes received when the ranks all-gather the heads of ``rows`` queries.

    local_heads: heads of one rank. head_bytes: bytes of one head of one query.
    """
    return (world - 1) * rows * local_heads * head_bytes


def combine_bytes(rows: int, all_heads: int, head_bytes: int, world: int, *, a2a: bool) -> int:
    """Bytes received when N partial outputs of ``rows`` queries are merged.

    all_heads: heads of the DCP group. head_bytes: bytes of one head's partial output.
    a2a: every rank receives its own heads' outputs and log-sum-exps. Otherwise it receives all
        log-sum-exps, then its heads of a reduce-scatter, of which a ring moves N - 1 shares.
    """
    own = all_heads // world
    lse_heads = own if a2a else all_heads
    return (world - 1) * rows * (own * head_bytes + lse_heads * LSE_BYTES)


def candidate_bytes(rows: int, width: int, world: int) -> int:
    """Bytes received when every rank's ``width`` pool candidates of ``rows`` queries are merged."""
    return (world - 1) * rows * width * CANDIDATE_BYTES


def selection_bytes(rows: int, width: int, world: int) -> int:
    """Bytes received when every rank selects ``width`` pools for its share of ``rows`` queries."""
    return (world - 1) * -(-rows // world) * width * POOL_ID_BYTES


@dataclass
class Histogram:
    """Durations by bucket.

    counts: durations in each bucket of :data:`SECONDS`, then those beyond the last.
    total: their sum in seconds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def as_dict(self) -> dict[str, Any]:
        """``counts`` by upper bound, ``"+Inf"`` the last, and ``total``."""
        bounds = [*map(str, SECONDS), "+Inf"]
        return {"counts": dict(zip(bounds, self.counts, strict=True)), "total": self.total}


@dataclass
class GatherCounters:
    """Running totals of one process.

    gathered_batches: batches that took the full-CKV path.
    gathered_windows: windows in which they did, one for each that fits the reserved buffers.
    mixed_batches: those of them that held decodes, which took the ordinary path.
    gathered_query_tokens: their query tokens, without those of decodes.
    gathered_visible_tokens: their visible tokens, summed over requests.
    ordinary: batches that did not, by reason.
    ckv_bytes: bytes received by exchanges of records, index keys and shared-out selections, all
        layers.
    dcp_bytes: bytes received by query gather, combine and candidate exchange for prefill rows of
        ordinary batches, all layers. Decode rows are left out: they never gather.
    exchange_seconds: durations by kind of exchange, of one layer a batch, see :mod:`.timing`.
    """

    gathered_batches: int = 0
    gathered_windows: int = 0
    mixed_batches: int = 0
    gathered_query_tokens: int = 0
    gathered_visible_tokens: int = 0
    ordinary: Counter[Reason] = field(default_factory=Counter)
    ckv_bytes: int = 0
    dcp_bytes: int = 0
    exchange_seconds: dict[str, Histogram] = field(
        default_factory=lambda: {kind: Histogram() for kind in EXCHANGES}
    )

    @property
    def prefill_batches(self) -> int:
        """Batches that held a prompt: the clock of the summary line."""
        refused = sum(n for reason, n in self.ordinary.items() if reason not in NOT_PREFILL)
        return self.gathered_batches + refused

    def as_dict(self) -> dict[str, Any]:
        """The totals as plain numbers; ``ordinary_batches`` maps reason names to counts."""
        return {
            "gathered_batches": self.gathered_batches,
            "gathered_windows": self.gathered_windows,
            "mixed_batches": self.mixed_batches,
            "gathered_query_tokens": self.gathered_query_tokens,
            "gathered_visible_tokens": self.gathered_visible_tokens,
            "ordinary_batches": {
                reason.value: self.ordinary[reason] for reason in Reason if self.ordinary[reason]
            },
            "ckv_bytes": self.ckv_bytes,
            "dcp_bytes": self.dcp_bytes,
            "exchange_seconds": {
                kind: durations.as_dict() for kind, durations in self.exchange_seconds.items()
            },
        }

    def summary(self) -> str:
        """One line: ``gathered 812 batches in 815 windows, 3.1 M tokens; ordinary: 10 mixed``."""
        refused = [
            f"{self.ordinary[reason]:,} {_WORDS.get(reason, reason.value)}"
            for reason in Reason
            if self.ordinary[reason] and reason not in NOT_PREFILL
        ]
        beside = f"{self.mixed_batches:,} of them beside decodes, " if self.mixed_batches else ""
        return (
            f"gathered {self.gathered_batches:,} batches in {self.gathered_windows:,} windows, "
            f"{beside}{_short(self.gathered_query_tokens)} tokens; "
            f"ordinary: {', '.join(refused) or 'none'}"
        )


def _short(count: int) -> str:
    if count < 10_000:
        return f"{count:,}"
    return f"{count / 1e3:.1f} k" if count < 1_000_000 else f"{count / 1e6:.1f} M"
