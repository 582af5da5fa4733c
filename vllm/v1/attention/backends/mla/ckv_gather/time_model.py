# SPDX-License-Identifier: Apache-2.0
"""Time of one batch in one sparse MLA layer, on either path. Pure arithmetic, no torch.

A device's time on a path is its collectives, its index scoring, its attention, and the rest::

    ordinary = collectives + bytes / speed + kernels of its rows
             + pairs / N x pair + tokens / N x attention of all ranks' heads
    gathered = collectives + bytes / speed + kernels of the rows of each window
             + pairs x pair + tokens x attention of this rank's heads
             + visible tokens x token
             + further windows x launches + their rows x merge

*Pairs* are those of a row and a pool that it sees, *tokens* those of a row and a token that it
selects. The rows of a window are those that see it. The ordinary path scores and attends to 1/N of
pairs and tokens on each rank, with N times the heads; a shared-out selection scores 1/N too. Bytes
are those of :mod:`.byte_model`. A path takes three or four collectives; a gather two for every
window, or none where nothing but the batch's own is visible and every rank writes that, and one for
every span whose selection is shared out.

A small batch takes as long as the host takes to launch it, whatever its sizes: the path's time is
the longer of the two.

Kernels of rows are interpolated, because they choose other ways for few and for many, and so is a
row's attention over its tokens, of which the first take longer. Every other term is linear in the
sizes of a batch. The coefficients (:class:`Rates`) are measured at start or,
for ``vllm-ckv plan``, known from elsewhere. Where there are none, bytes decide. What both paths
have in common, writing records and pools for example, is left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backends.mla.ckv_gather.byte_model import (
    ByteModel,
    shards_selection,
)
from vllm.v1.attention.backends.mla.ckv_gather.counters import selection_bytes

if TYPE_CHECKING:
    from vllm.v1.attention.backends.mla.ckv_gather.windows import Span


Curve = tuple[tuple[int, float], ...]
"""Seconds of some numbers of rows or tokens, the least first; none: nothing takes time."""


def at(curve: Curve, rows: int) -> float:
    """Seconds of ``rows`` rows: between two points, on beyond the last, no less than the first."""
    if len(curve) < 2:
        return curve[0][1] if curve else 0.0
    right = min(max(bisect_left(curve, (rows,)), 1), len(curve) - 1)
    (few, seconds), (many, more) = curve[right - 1], curve[right]
    return max(0.0, seconds + (more - seconds) * (max(rows, few) - few) / (many - few))


@dataclass(frozen=True)
class Rates:
    """Seconds that things take on one rank; none is negative.

    :mod:`.measuring` says how each is measured, ``vllm.entrypoints.ckv.known_rates``
    where those of ``vllm-ckv plan`` come from. What something takes however small is what is left
    when rows, tokens and bytes are taken away.
    """

    collective: float
    """One collective, however small."""
    byte: float
    """A byte that a collective brings."""
    pair: float
    """A row's score of one pool."""
    own_heads: Curve
    """Gathered tokens that a row attends to, heads of this rank. It begins at none, with 0."""
    all_heads: Curve
    """Tokens of the own cache, heads of all ranks. It begins at none, with 0."""
    ordinary: Curve
    """Rows of the ordinary path: choosing and merging candidates, reading queries, combining
    outputs."""
    gathered: Curve
    """Rows in one window: choosing pools, row numbers, reading queries, writing outputs."""
    token: float
    """A visible token: packing and unpacking its record and key, converting the record."""
    merged: float
    """Kernels that merge a window with those before it."""
    merged_row: float
    """A row in such a window: merging its candidates and outputs."""
    ordinary_host: float
    """The host's launching of the ordinary path."""
    gathered_host: float
    """The host's launching of one window."""

    @classmethod
    def slowest(cls, every: Sequence[Rates]) -> Rates:
        """The largest of each, for ranks that have to decide alike."""

        def most(values: list[Any]) -> Any:
            if not isinstance(values[0], tuple):
                return max(values)
            return tuple(
                (points[0][0], max(seconds for _, seconds in points))
                for points in zip(*values, strict=True)
            )

        return cls(*(most([getattr(rates, f.name) for rates in every]) for f in fields(cls)))


@dataclass(frozen=True)
class Costs:
    """What one batch costs one rank in one layer; seconds are None where nothing is measured."""

    gathered_bytes: int
    ordinary_bytes: int
    gathered_seconds: float | None = None
    ordinary_seconds: float | None = None

    @property
    def gains(self) -> bool:
        """Whether a gather takes less time or, without rates, moves fewer bytes."""
        if self.gathered_seconds is None or self.ordinary_seconds is None:
            return self.gathered_bytes < self.ordinary_bytes
        return self.gathered_seconds < self.ordinary_seconds

    def __str__(self) -> str:
        text = f"{self.gathered_bytes} bytes a layer gathered, {self.ordinary_bytes} ordinary"
        if self.gathered_seconds is None or self.ordinary_seconds is None:
            return text
        return (
            f"{text}, by estimate {self.gathered_seconds * 1e6:.0f} us gathered, "
            f"{self.ordinary_seconds * 1e6:.0f} us ordinary"
        )


def sum_of_floors(last: int, divisor: int) -> int:
    """The sum of ``n // divisor`` over ``n`` from 1 to ``last``."""
    full, rest = divmod(last, divisor)
    return divisor * full * (full - 1) // 2 + full * (rest + 1)


def sum_of_least(last: int, most: int) -> int:
    """The sum of ``min(n, most)`` over ``n`` from 1 to ``last``."""
    ramp = min(last, most)
    return ramp * (ramp + 1) // 2 + (last - ramp) * most


@dataclass(frozen=True)
class TimeModel:
    """One sparse MLA layer with its indexer under DCP.

    bytes: its sizes. rates: None if nothing is measured.
    Equal on all ranks of a DCP group, so that they decide alike.
    """

    bytes: ByteModel
    rates: Rates | None = None

    def costs(
        self,
        lengths: Sequence[int],
        queries: Sequence[int],
        spans: Sequence[Span],
        *,
        shares: int = 1,
        own: Sequence[int] = (),
        beside_decodes: bool = False,
        pairs: int | None = None,
    ) -> Costs:
        """Both paths of one batch.

        lengths, queries: visible tokens and query tokens of each prompt; padding is left out.
        spans: in which it would be gathered, see :func:`.windows.plan_spans`.
        shares: N if its selection is shared out over the ranks, else 1.
        own: see :meth:`.ByteModel.gathered`; that their exchange overlaps a selection is left out.
        beside_decodes: it holds decodes as well. They take the ordinary path in any case, so what
            that costs however small is theirs.
        pairs: of :meth:`pairs`, if they have been counted.
        """
        sizes, rates = self.bytes, self.rates
        rows = sum(queries)
        shared = [span.num_rows for span in spans if shares > 1]
        gathered_bytes = sizes.gathered(lengths, shared, own)
        ordinary_bytes = sizes.ordinary(rows)
        if rates is None:
            return Costs(gathered_bytes, ordinary_bytes)
        if pairs is None:
            pairs = self.pairs(lengths, queries)
        firsts = [span.num_rows for span in spans]
        others = [
            span.rows.stop - span.rows_from(begin).start
            for span in spans
            for begin in span.bounds[1:-1]
        ]
        windows = len(firsts) + len(others)
        # Without a context there is nothing to exchange where every rank writes the batch's own.
        exchanges = 2 * windows * (sum(own) != sum(lengths)) + len(shared)
        gathered = (
            exchanges * rates.collective
            + gathered_bytes * rates.byte
            + sum(at(rates.gathered, seen) for seen in firsts + others)
            + pairs / shares * rates.pair
            + self._attention(rates.own_heads, lengths, queries, 1)
            + sum(lengths) * rates.token
            + len(others) * rates.merged
            + sum(others) * rates.merged_row
        )
        world = sizes.dcp_world_size
        ordinary = (
            ordinary_bytes * rates.byte
            + at(rates.ordinary, rows)
            + pairs / world * rates.pair
            + self._attention(rates.all_heads, lengths, queries, world)
        )
        gathered = max(gathered, windows * rates.gathered_host)
        if beside_decodes:
            ordinary -= at(rates.ordinary, 0)
        else:
            ordinary += sizes.ordinary_collectives * rates.collective
            ordinary = max(ordinary, rates.ordinary_host)
        return Costs(gathered_bytes, ordinary_bytes, gathered, ordinary)

    def pairs(self, lengths: Sequence[int], queries: Sequence[int]) -> int:
        """Pairs of a row and a pool that it sees."""
        pool = self.bytes.pool_size
        return sum(
            sum_of_floors(length, pool) - sum_of_floors(length - rows, pool)
            for length, rows in zip(lengths, queries, strict=True)
        )

    def _attention(
        self, curve: Curve, lengths: Sequence[int], queries: Sequence[int], world: int
    ) -> float:
        """Seconds of all rows, each of which selects what it sees, at most a selection's width.

        curve: seconds of a row by the tokens of one rank of ``world``, which own equal parts.
        """
        width = (self.bytes.pool_topk + 1) * self.bytes.pool_size - 1

        def selected(most: int) -> int:
            """Tokens of all rows, of each no more than its first ``most``."""
            return sum(
                sum_of_least(length, most) - sum_of_least(length - rows, most)
                for length, rows in zip(lengths, queries, strict=True)
            )

        ends = [min(width, world * tokens) for tokens, _ in curve[1:-1]] + [width]
        parts = zip(pairwise(curve), pairwise([0, *ends]), strict=False)
        return sum(
            (more - seconds) / (many - few) * (selected(end) - selected(begin)) / world
            for ((few, seconds), (many, more)), (begin, end) in parts
        )

    def selection_shares(self, pairs: int, spans: Sequence[Span]) -> int:
        """N if sharing out the selection of a gathered batch takes clearly less time, else 1.

        pairs: of :meth:`pairs`. spans: as of :meth:`costs`. Without rates by
        :func:`.byte_model.shards_selection`. Shares are taken to be even: in a prompt's first chunk
        the last one sees more pools than the first.
        """
        sizes, rates = self.bytes, self.rates
        world, rows = sizes.dcp_world_size, sum(span.num_rows for span in spans)
        if rates is None:
            worth = shards_selection(rows, pairs // max(rows, 1), world, sizes.pool_topk)
        else:
            received = sum(selection_bytes(s.num_rows, sizes.pool_topk, world) for s in spans)
            saved = (pairs - pairs / world) * rates.pair
            exchanged = len(spans) * rates.collective + received * rates.byte
            # Twice, for the host's part is left out: where less is saved, two H200s were no faster.
            worth = saved > 2 * exchanged
        return world if worth else 1
