# SPDX-License-Identifier: Apache-2.0
"""How long exchanges take, without waiting for the device.

Of every gathered batch the first exchange of each kind is timed, so of one layer. On CUDA two
events of a fixed few are recorded around it, and read in a later step that finds them finished; a
batch that finds no free pair goes untimed. On the CPU the host's clock is right by itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from vllm.v1.attention.backends.mla.ckv_gather.counters import Histogram

PAIRS = 8
"""Exchanges that may be timed at the same time: three of a batch at most, a few in flight."""


class ExchangeTimer:
    """Adds durations to a histogram per kind of exchange. Times nothing until :meth:`prepare`.

    A duration is that of packing, the collective and unpacking, and so holds the wait for ranks
    that come later.

    histograms: kind -> where its durations go.
    """

    def __init__(self, histograms: Mapping[str, Histogram]) -> None:
        self.histograms = histograms
        self._prepared = self._on_cuda = False
        self._due: set[str] = set()
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    def prepare(self, device: torch.device) -> None:
        """Make everything that timing on ``device`` takes. Called in the profiling run."""
        self._prepared = True
        self._on_cuda = device.type == "cuda"
        if not self._on_cuda:
            return
        for _ in range(PAIRS):
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for event in pair:
                event.record()  # the driver makes an event when it is first recorded
            self._free.append(pair)

    def begin_step(self, *, gathers: bool) -> None:
        """Read the pairs that are finished, and time this step's first exchanges if it ``gathers``.

        Must not be called while a graph is being captured: asking for an event breaks a capture.
        """
        while self._pending and self._pending[0][2].query():
            kind, start, end = self._pending.popleft()
            self.histograms[kind].add(start.elapsed_time(end) / 1e3)
            self._free.append((start, end))
        self._due = set(self.histograms) if gathers and self._prepared else set()

    @contextmanager
    def exchange(self, kind: str) -> Iterator[None]:
        """Time what happens inside, if it is the step's first exchange of ``kind``."""
        if kind not in self._due:
            yield
            return
        self._due.remove(kind)
        if not self._on_cuda:
            began = time.perf_counter()
            yield
            self.histograms[kind].add(time.perf_counter() - began)
        elif self._free:
            start, end = self._free.pop()
            start.record()
            yield
            end.record()
            self._pending.append((kind, start, end))
        else:
            yield
