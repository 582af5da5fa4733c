# SPDX-License-Identifier: Apache-2.0
"""One host-to-device transfer per batch, out of memory that exists before serving.

Pageable host memory would make the copy wait for the device, and fresh pinned memory can make the
whole device wait while it is registered. Both are avoided by a ring of pinned slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

SLOTS = 4
"""Batches whose numbers exist at the same time. vLLM prepares at most two steps ahead."""


def table_rows(max_num_seqs: int) -> int:
    """Requests that one batch lays out.

    A request in windows counts once, with what its last window holds; all other windows of a batch
    hold equally much, and are laid out once.
    """
    return max_num_seqs + 1


def numbers_per_batch(max_num_seqs: int, dcp_world_size: int) -> int:
    """Numbers that one batch stages.

    For each request two layouts of 2N + 1, where its own rows begin, and its first page.
    """
    return table_rows(max_num_seqs) * (2 * (2 * dcp_world_size + 1) + 2)


def device_bytes(max_num_seqs: int, dcp_world_size: int, max_pages: int) -> int:
    """Device memory of a :class:`StagingRing` and :class:`PageTables` for these limits."""
    numbers = SLOTS * numbers_per_batch(max_num_seqs, dcp_world_size)
    return 4 * (numbers + max_pages + table_rows(max_num_seqs) * max_pages)


class StagingRing:
    """``SLOTS`` pinned host buffers of int32 numbers and a device buffer for each.

    A slot is taken again only after its copy has run: the host waits for that copy if it has to,
    which takes ``SLOTS`` batches in flight. On the CPU host and device buffer are one, and staged
    tensors stay valid until ``SLOTS`` further batches.

    device: where the numbers go. capacity: numbers that one batch may stage.
    """

    def __init__(self, device: torch.device | str, capacity: int) -> None:
        self.device = torch.device(device)
        self.capacity = capacity
        on_cuda = self.device.type == "cuda"
        self._host = torch.empty((SLOTS, capacity), dtype=torch.int32, pin_memory=on_cuda)
        self._staged = self._host
        self._copied: list[torch.cuda.Event | None] = [None] * SLOTS
        if self.device.type != "cpu":
            self._staged = torch.empty((SLOTS, capacity), dtype=torch.int32, device=self.device)
        if on_cuda:
            self._copied = [torch.cuda.Event() for _ in range(SLOTS)]
        self._next = 0

    def stage(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy host tensors to the device together.

        parts: integer tensors on the CPU, of any shapes.

        Returns:
            An int32 view of the device buffer per part, contiguous and of the part's shape.

        Raises:
            ValueError: the parts hold more numbers than a slot. Nothing has been copied then.
        """
        total = sum(part.numel() for part in parts)
        if total > self.capacity:
            raise ValueError(
                f"the batch stages {total} numbers, a slot holds {self.capacity}; plan it from the "
                "limits the slots were sized for"
            )
        slot, self._next = self._next, (self._next + 1) % SLOTS
        copied = self._copied[slot]
        if copied is not None:
            copied.synchronize()
        host, staged = self._host[slot], self._staged[slot]
        views, begin = [], 0
        for part in parts:
            end = begin + part.numel()
            host[begin:end].view(part.shape).copy_(part)
            views.append(staged[begin:end].view(part.shape))
            begin = end
        if staged.data_ptr() != host.data_ptr():
            staged[:total].copy_(host[:total], non_blocking=True)
        if copied is not None:
            copied.record()
        return views


class PageTables:
    """Tables of consecutive planar pages, computed on the device into memory of their own.

    device: where the tables lie. max_num_seqs: see :func:`table_rows`. max_pages: columns of the
        widest table.
    """

    def __init__(self, device: torch.device | str, max_num_seqs: int, max_pages: int) -> None:
        self._columns = torch.arange(max_pages, dtype=torch.int32, device=device)
        rows = table_rows(max_num_seqs)
        self._table = torch.empty(rows * max_pages, dtype=torch.int32, device=device)

    def fill(
        self, starts: torch.Tensor, width: int, num_pages: int, first_row: int = 0
    ) -> torch.Tensor:
        """The pages of every request, valid until the next call that uses the same rows.

        starts: (R,) int32 on the device. First page of each request.
        width: columns W, the most pages of a request. num_pages: pages of all requests.
        first_row: rows that other tables of the batch take.

        Returns:
            (R, W) int32, ``starts[r] + column``. Columns past a request's pages name some other
            valid page; the number of pools keeps them from being read.
        """
        rows = starts.shape[0]
        begin = first_row * self._columns.numel()
        table = self._table[begin : begin + rows * width].view(rows, width)
        torch.add(starts[:, None], self._columns[:width], out=table)
        return table.clamp_(max=max(num_pages - 1, 0))
