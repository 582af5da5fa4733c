# SPDX-License-Identifier: Apache-2.0
"""What is reserved at start and borrowed per batch: one list of shapes serves both.

vLLM's workspace is one scratch allocation that every user starts at offset 0. It is requested in
the profiling run, so that the memory profiler sees the bytes, and locked before serving. Asking
again with the same shapes returns the same bytes and cannot grow the allocation.

A borrowed buffer is valid until anybody else asks the manager: borrow once per operation, and list
further scratch of that operation in ``scratch`` instead of asking a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from vllm.v1.attention.backends.mla.ckv_gather.geometry import (
    INDEX_PAGE_BYTES,
    INDEX_RECORD_BYTES,
    PageGeometry,
    max_index_pages,
)
from vllm.v1.attention.backends.mla.ckv_gather.layout import RankMajorLayout, plan_index_pages

_ALIGNMENT = 256
"""vLLM places every tensor of one request at a multiple of this many bytes."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class GatherBuffers:
    """Views of the borrowed workspace, cut to one batch. Contents are undefined.

    latents: (N * padded, record_bytes), uint8.
    index: (N * pool_padded, 132), uint8.
    index_pages: (pages, 8448), uint8. Planar pages of 64 pools in global order.
    scratch: whole tensors of the plan's ``scratch`` shapes.
    """

    latents: torch.Tensor
    index: torch.Tensor
    index_pages: torch.Tensor
    scratch: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class WorkspacePlan:
    """The shapes of one process, all uint8 but ``scratch``.

    latents: (N * capacity, record_bytes).
    index: (N * pool_capacity, 132).
    index_pages: (pages, 8448), room for every request to start on a page of its own.
    dcp_world_size: ranks N.
    scratch: (shape, dtype) of further tensors the operation needs at the same time.
    """

    latents: Shape
    index: Shape
    index_pages: Shape
    dcp_world_size: int
    scratch: tuple[tuple[Shape, torch.dtype], ...] = ()

    @classmethod
    def from_geometry(
        cls,
        geometry: PageGeometry,
        max_tokens: int,
        max_num_seqs: int,
        scratch: tuple[tuple[Shape, torch.dtype], ...] = (),
    ) -> WorkspacePlan:
        """Size the buffers for every batch of ``max_num_seqs`` requests that see ``max_tokens``.

        geometry: the frozen one; a plan of an earlier page size would be too small.
        """
        world = geometry.dcp_world_size
        sizes = {"max_tokens": max_tokens, "max_num_seqs": max_num_seqs}
        return cls(
            latents=(world * geometry.capacity(**sizes), geometry.record.record_bytes),
            index=(world * geometry.pool_capacity(**sizes), INDEX_RECORD_BYTES),
            index_pages=(
                max_index_pages(max_tokens, geometry.pool_size) + max_num_seqs,
                INDEX_PAGE_BYTES,
            ),
            dcp_world_size=world,
            scratch=tuple(scratch),
        )

    @property
    def requests(self) -> tuple[tuple[Shape, torch.dtype], ...]:
        """The (shape, dtype) list that reserving and borrowing both pass to the manager."""
        records = (self.latents, self.index, self.index_pages)
        return (*((shape, torch.uint8) for shape in records), *self.scratch)

    @property
    def num_bytes(self) -> int:
        """Bytes of workspace that :meth:`reserve` makes vLLM allocate."""
        return sum(
            -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            for shape, dtype in self.requests
        )

    def _take(self) -> list[torch.Tensor]:
        from vllm.v1.worker.workspace import current_workspace_manager

        return current_workspace_manager().get_simultaneous(*self.requests)

    def reserve(self) -> torch.device:
        """Allocate :attr:`num_bytes` of workspace (profiling run) and return where they lie."""
        return self._take()[0].device

    def borrow(
        self, layout: RankMajorLayout, pool_layout: RankMajorLayout | None = None
    ) -> GatherBuffers:
        """Return buffers for one batch out of the reserved bytes.

        layout: the token layout of the batch.
        pool_layout: its pool layout; left out, the index buffers have no rows.

        Raises:
            ValueError: the batch needs more rows than are reserved, or has another number of
                ranks. Nothing has been taken then: an eligible batch never gets here, because
                eligibility bounds it by the same sizes.
        """
        index_rows = index_pages = 0
        if pool_layout is not None:
            index_rows = self._rows("pool", pool_layout, self.index[0])
            index_pages = plan_index_pages(pool_layout.seq_lens)[1]
            if index_pages > self.index_pages[0]:
                raise ValueError(
                    f"the batch needs {index_pages} index pages, {self.index_pages[0]} are "
                    "reserved; take the ordinary path"
                )
        latent_rows = self._rows("latent", layout, self.latents[0])
        latents, index, pages, *scratch = self._take()
        return GatherBuffers(
            latents=latents[:latent_rows],
            index=index[:index_rows],
            index_pages=pages[:index_pages],
            scratch=tuple(scratch),
        )

    def _rows(self, what: str, layout: RankMajorLayout, reserved: int) -> int:
        if layout.dcp_world_size != self.dcp_world_size:
            raise ValueError(
                f"the {what} layout has {layout.dcp_world_size} ranks, the workspace was reserved "
                f"for {self.dcp_world_size}; plan both from one geometry"
            )
        rows = layout.dcp_world_size * layout.padded
        if rows > reserved:
            raise ValueError(
                f"the batch needs {rows} gathered {what} rows, {reserved} are reserved; take the "
                "ordinary path"
            )
        return rows
