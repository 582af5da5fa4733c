# SPDX-License-Identifier: Apache-2.0
"""The rates of :mod:`.time_model`, measured on this machine while vLLM profiles memory.

What a batch costs beside its collectives, its scores and its attention is measured as a whole, with
batches of several sizes that see nothing. The rest are differences between two sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from vllm.distributed import get_dcp_group

from vllm.v1.attention.backends.mla.ckv_gather import exchange
from vllm.v1.attention.backends.mla.ckv_gather.rehearsal import (
    EmptyBatch,
    KeptBatch,
    Layer,
    LayerShapes,
)
from vllm.v1.attention.backends.mla.ckv_gather.time_model import Curve, Rates, at
from vllm.v1.attention.backends.mla.sparse_mla_kernels.base import LATENT_DIM

FEW_ROWS, MANY_ROWS, MANY_TOKENS = 16, 2048, 65_536
"""Rows and visible tokens of the smaller and larger batches, or the largest there are: the larger
ones fill a GPU, and all of it should take about a second."""

ROUNDS = 3
"""Times that something is measured; the least counts. What disturbs it makes it longer."""

REPETITIONS = 4
"""Calls in a row that one time is the mean of."""

SLEEP_CYCLES = 20_000_000
"""Cycles that a device sleeps at first, about 10 ms, while the host launches what is to be timed.
Twice as many in the next round if that was not enough, and the device waited for the host."""

Measure = Callable[[Callable[[], object]], float]
"""Seconds that a call takes. It may make the call several times, equally often on every rank."""


@dataclass(frozen=True)
class Clock:
    """Two durations of a call.

    device: its work there. host: launching it.
    """

    device: Measure
    host: Measure


def device_clock(device: torch.device) -> Clock | None:
    """The clock for work on ``device``; None where there is nothing to learn."""
    if device.type != "cuda":
        return None
    cycles = SLEEP_CYCLES

    def on_device(call: Callable[[], object]) -> float:
        nonlocal cycles
        # Otherwise small work would take as long as its launches.
        torch.cuda._sleep(cycles)
        # Not timed: ranks meet in its collectives, if it has any, and begin together.
        call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPETITIONS):
            call()
        end.record()
        if begin.query():
            cycles = min(2 * cycles, 16 * SLEEP_CYCLES)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / REPETITIONS

    def on_host(call: Callable[[], object]) -> float:
        call()
        began = time.perf_counter()
        for _ in range(REPETITIONS):
            call()
        seconds = (time.perf_counter() - began) / REPETITIONS
        torch.cuda.synchronize(device)
        return seconds

    def least(measure: Measure) -> Measure:
        return lambda call: min(measure(call) for _ in range(ROUNDS))

    return Clock(least(on_device), least(on_host))


def agree(rates: Rates) -> Rates:
    """The slowest rank's rates, the same on every rank. All ranks have to call it."""
    every = exchange.all_gather_facts(asdict(rates), get_dcp_group().cpu_group)
    return Rates.slowest([Rates(**each) for each in every])


def measure_rates(layer: Layer, shapes: LayerShapes, largest: int, clock: Clock) -> Rates:
    """Measure this rank's rates, after everything has run once.

    All ranks of the DCP group have to call it, with the same arguments: it enters collectives. It
    takes reserved bytes, and no more of others than the largest batch and its inputs; none is kept.

    shapes: the layer's largest. largest: rows of the largest batch.
    """
    return _Measurement(layer, shapes, largest, clock).rates()


def line(few: float, seconds: float, many: float, more: float) -> tuple[float, float]:
    """Seconds of nothing and of each unit, if ``few`` units take ``seconds`` and ``many`` ``more``.

    Neither is below 0. Where both sizes are the same, units cost nothing.
    """
    each = max(0.0, (more - seconds) / (many - few)) if many > few else 0.0
    return max(0.0, seconds - few * each), each


class _Measurement:
    def __init__(self, layer: Layer, shapes: LayerShapes, largest: int, clock: Clock) -> None:
        gather = layer.gather
        assert gather.workspace is not None and gather.time_model is not None
        self.layer, self.shapes, self.clock = layer, shapes, clock
        self.gather, self.workspace = gather, gather.workspace
        self.sizes = gather.time_model.bytes
        self.largest = largest
        self.few, self.many = (self.batch(rows) for rows in (FEW_ROWS, MANY_ROWS))
        self.tokens = min(gather.max_visible_tokens, MANY_TOKENS)
        self.collective = self.byte = 0.0

    def batch(self, rows: int) -> KeptBatch:
        """One of ``rows`` rows, or of the most there are; inputs are made when it first runs."""
        return KeptBatch(self.shapes, min(rows, self.largest), self.layer.device)

    def rates(self) -> Rates:
        received = self.gather.counters.ckv_bytes
        self.collective, self.byte = self.link()
        pool = self.gather.pool_size
        ordinary, gathered = self.rows(pool)
        # The smallest context that has a pool, known by now, and the largest.
        base, more = gathered[0][1], self.gathered(self.few, self.tokens)
        token = line(pool, base, self.tokens, more)[1]
        own_heads, all_heads = self.attention()
        merged = self.merging(gathered, token)
        rates = Rates(
            collective=self.collective,
            byte=self.byte,
            pair=self.scoring(),
            own_heads=own_heads,
            all_heads=all_heads,
            ordinary=ordinary,
            gathered=gathered,
            token=token,
            merged=merged[0],
            merged_row=merged[1],
            ordinary_host=self.clock.host(self.layer.ordinary(self.few)),
            gathered_host=self.clock.host(self.layer.gathered(self.few, [pool])),
        )
        self.gather.counters.ckv_bytes = received
        return rates

    def rows(self, visible: int) -> tuple[Curve, Curve]:
        """Batches of more and more rows that see nothing, on either path, without collectives.

        visible: tokens of the context that is gathered.
        """
        most, numbers = self.largest, {min(MANY_ROWS, self.largest), self.largest}
        numbers |= {FEW_ROWS * 4**n for n in range(8) if FEW_ROWS * 4**n < most}
        ordinary, gathered = [], []
        for number in sorted(numbers):
            batch = self.batch(number)
            ordinary.append((number, max(0.0, self.ordinary(batch))))
            gathered.append((number, max(0.0, self.gathered(batch, visible))))
        return tuple(ordinary), tuple(gathered)

    def records(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Room for gathered records (rows, record_bytes) uint8, and the scratch of attention."""
        spans = self.gather.plan_spans([self.tokens], [1], 1)
        plan = self.gather.layout_batch([self.tokens], spans, self.layer.device)
        buffers = self.workspace.borrow_latents(plan.windows[0].layout.tokens)
        return buffers.records, buffers.scratch

    def link(self) -> tuple[float, float]:
        """Of a collective, and of each byte that it brings: all-gathers of one record and many."""
        records, _ = self.records()
        group, world = get_dcp_group(), self.gather.dcp_world_size
        communicator, rank = exchange.communicator_of(group), group.rank_in_group

        def all_gather(padded: int) -> float:
            buffer = records[: world * padded]
            return self.clock.device(
                lambda: exchange.all_gather_in_place(buffer, padded, communicator, rank)
            )

        padded, size = records.shape[0] // world, (world - 1) * records.shape[1]
        return line(size, all_gather(1), padded * size, all_gather(padded))

    def ordinary(self, batch: EmptyBatch) -> float:
        """Of an ordinary batch, without its collectives."""
        seconds = self.clock.device(self.layer.ordinary(batch))
        received = self.sizes.ordinary(batch.num_tokens)
        return seconds - self.sizes.ordinary_collectives * self.collective - received * self.byte

    def gathered(self, batch: EmptyBatch, visible: int, window: int | None = None) -> float:
        """Of a batch over ``visible`` tokens in windows of ``window``, without its collectives."""
        seconds = self.clock.device(self.layer.gathered(batch, [visible], capacity=window))
        windows = 1 if window is None else visible // window
        received = self.sizes.gathered([visible])
        return seconds - 2 * windows * self.collective - received * self.byte

    def attention(self) -> tuple[Curve, Curve]:
        """Of a row's attention to tokens: own heads to gathered records, all heads to a cache."""
        (records, scratch), world = self.records(), self.gather.dcp_world_size
        # What was there before may be no number, with which nothing is slower, but a test may fail.
        records.zero_()
        cache, width = self.layer.cache.flatten(0, 1), self.shapes.width
        own = self._attention(self.shapes.local_heads, records, width, scratch)
        # In the bytes of the records, which are no longer needed.
        scratch = tuple(self.gather.ordinary_scratch.borrow_attention())
        heads = world * self.shapes.local_heads
        return own, self._attention(heads, cache, -(-width // world), scratch)

    def _attention(
        self,
        heads: int,
        records: torch.Tensor,
        tokens: int,
        scratch: tuple[torch.Tensor, ...],
    ) -> Curve:
        batch, shapes = self.many, self.shapes
        query = batch.zeros(heads, LATENT_DIM, dtype=torch.bfloat16)
        # From all over, as a selection has them, which caches of the device serve worst.
        ids = batch.zeros(shapes.width).random_(0, records.shape[0])

        def attend(tokens: int) -> float:
            counts = batch.zeros().fill_(tokens)
            given = (query, records, ids, counts, shapes.scale, scratch)
            return self.clock.device(lambda: self.layer.kernels.attend(*given))

        # The first tokens take longer than further ones: FlashMLA skips rows without any.
        nothing, seconds, curve = attend(0), 0.0, [(0, 0.0)]
        for number in sorted({-(-tokens // 4), tokens}):
            seconds = max(seconds, (attend(number) - nothing) / batch.num_tokens)
            curve.append((number, seconds))
        return tuple(curve)

    def scoring(self) -> float:
        """Of a row's score of a pool: between a quarter of the most pools and all of them."""
        batch, layer = self.many, self.layer
        table = layer.index_table(1, self.gather.max_pages)
        scratch = self.gather.ordinary_scratch.borrow_selection()

        def select(pools: int) -> float:
            pages, counts = layer.index_cache, batch.zeros().fill_(pools)
            return self.clock.device(
                lambda: layer.kernels.select_pools(
                    *batch.index_queries(),
                    pages,
                    table,
                    batch.req_id(),
                    counts,
                    self.shapes.pool_topk,
                    scratch,
                )
            )

        most = self.tokens // self.gather.pool_size
        rows, part = batch.num_tokens, -(-most // 4)
        return line(rows * part, select(part), rows * most, select(most))[1]

    def merging(self, window: Curve, token: float) -> tuple[float, float]:
        """Of a window that is not its span's first, and of a row in it, beside the arguments."""
        size = self.gather.geometry.get().window_granule
        if size > self.tokens:
            return 0.0, 0.0  # no request is longer than what is reserved

        def merged(batch: EmptyBatch) -> float:
            known = 2 * (at(window, batch.num_tokens) + size * token)
            return self.gathered(batch, 2 * size, size) - known

        # All rows see both windows.
        many = replace(self.many, num_tokens=min(self.many.num_tokens, size))
        return line(self.few.num_tokens, merged(self.few), many.num_tokens, merged(many))
