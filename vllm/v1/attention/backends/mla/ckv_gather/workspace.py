# SPDX-License-Identifier: Apache-2.0
"""What is reserved at start and borrowed per batch: one list of shapes serves both.

vLLM's workspace is one scratch allocation that every user starts at offset 0. It is requested in
the profiling run, so that the memory profiler sees the bytes, and locked before serving. Asking
again with the same shapes returns the same bytes and cannot grow the allocation.

Operations borrow one after the other: the index exchange with the selection behind it, then the
latent exchange with the attention behind it; of an ordinary batch the selection and the attention
alone. All get the same bytes, so the largest of them counts. A borrowed buffer is valid until
anybody else asks the manager: borrow once per operation, so scratch of the kernels is a part of the
request of their exchange.

Until vLLM locks the workspace, a larger request moves it; hence no address is kept between calls.
CUDA graphs do keep addresses, as those of vLLM's own users do: all requests have been made in the
profiling run, which comes before any capture.

What is exchanged from the beginning of a layer on outlasts other users. Its memory is not a part of
the scratch, but persistent tensors of the manager, made in the profiling run as well.
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
from vllm.v1.attention.backends.mla.ckv_gather.layout import RankMajorLayout, RowShares

KEPT_RECORDS = "vllm_b12x_ckv records"
KEPT_KEYS = "vllm_b12x_ckv index keys"
KEPT_PAGES = "vllm_b12x_ckv index pages"
"""Keys of the persistent tensors."""

_ALIGNMENT = 256
"""vLLM places every tensor of one request at a multiple of this many bytes."""

Shape = tuple[int, ...]


Request = tuple[Shape, torch.dtype]


@dataclass(frozen=True)
class LatentBuffers:
    """Views of the borrowed workspace, cut to one batch. Contents are undefined.

    records: (N * padded + own rows, record_bytes), uint8.
    scratch: whole tensors of the plan's ``kernels.attention`` shapes.
    own: the own rows as pages (pages, P, record_bytes), the last one with rows to spare; None where
        records lie in the scratch.
    """

    records: torch.Tensor
    scratch: tuple[torch.Tensor, ...]
    own: torch.Tensor | None = None


@dataclass(frozen=True)
class IndexBuffers:
    """Views of the borrowed workspace, cut to one batch. Contents are undefined.

    records: (N * pool_padded, 132), uint8.
    pages: (pages, 8448), uint8. Planar pages of 64 pools in global order.
    selection: (N * S, K), int32. Pool ids of all rows, where each rank selects for a share of them;
        None in a process where every rank selects for all.
    scratch: whole tensors of the plan's ``kernels.selection`` shapes.
    """

    records: torch.Tensor
    pages: torch.Tensor
    selection: torch.Tensor | None
    scratch: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class KernelScratch:
    """(shape, dtype) of what the kernels take beside their arguments, for one kind of batches.

    attention: ``SparseMLAKernels.scratch_shapes``.
    selection: ``SparseMLAKernels.selection_scratch_shapes``.
    """

    attention: tuple[Request, ...] = ()
    selection: tuple[Request, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of workspace that :meth:`reserve` makes vLLM allocate."""
        return max(_num_bytes(self.attention), _num_bytes(self.selection))

    def reserve(self) -> None:
        """Allocate :attr:`num_bytes` of workspace, for batches that borrow nothing else."""
        _reserve(self.attention, self.selection)

    def borrow_attention(self) -> list[torch.Tensor]:
        """Scratch of an attention whose arguments are not in the workspace."""
        return _take(self.attention)

    def borrow_selection(self) -> list[torch.Tensor]:
        """Scratch of a selection whose arguments are not in the workspace."""
        return _take(self.selection)


NO_SCRATCH = KernelScratch()


@dataclass(frozen=True)
class WorkspacePlan:
    """The shapes of one process, all uint8 but ``selection`` and ``kernels``.

    latents: (N * capacity, record_bytes).
    index: (N * pool_capacity, 132).
    index_pages: (pages, 8448), room for every request to start on a page of its own.
    dcp_world_size: ranks N.
    kernels: what selection and attention over the gathered keys and latents need.
    selection: (N * S, K) int32, pool ids of the largest batch; no row where no batch shares its
        selection out.
    own_page: rows P of the pages that a batch writes its own records in, if exchanges begin with
        the layer; 0 if none does, and records and keys lie in the scratch.
    """

    latents: Shape
    index: Shape
    index_pages: Shape
    dcp_world_size: int
    kernels: KernelScratch = NO_SCRATCH
    selection: Shape = (0, 0)
    own_page: int = 0

    @classmethod
    def from_geometry(
        cls,
        geometry: PageGeometry,
        max_tokens: int,
        max_num_seqs: int,
        kernels: KernelScratch = NO_SCRATCH,
        selection: Shape = (0, 0),
        *,
        early_exchange: bool = False,
    ) -> WorkspacePlan:
        """Size the buffers for every batch of ``max_num_seqs`` requests that see ``max_tokens``.

        geometry: the frozen one; a plan of an earlier page size would be too small.
        selection: (T, K), rows of the largest batch and pools that a row selects, if selections
            are shared out over the ranks.
        early_exchange: whether exchanges begin with the layer.
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
            kernels=kernels,
            selection=(RowShares(selection[0], world).exchanged_rows, selection[1]),
            own_page=geometry.page_size if early_exchange else 0,
        )

    @property
    def latent_requests(self) -> tuple[Request, ...]:
        """What reserving and borrowing for the latent exchange both pass to the manager."""
        records = () if self.own_page else ((self.latents, torch.uint8),)
        return (*records, *self.kernels.attention)

    @property
    def index_requests(self) -> tuple[Request, ...]:
        """The same for the index exchange."""
        keys = ((self.index, torch.uint8), (self.index_pages, torch.uint8))
        ids = (self.selection, torch.int32)
        return (
            *(() if self.own_page else keys),
            *((ids,) if self.selection[0] else ()),
            *self.kernels.selection,
        )

    @property
    def kept(self) -> dict[str, Shape]:
        """Key -> shape of the records, index keys and index pages that are no scratch, uint8.

        The spans of a batch's context and its own rows are no more than the spans of all it sees.
        Its last page of own rows may reach beyond.
        """
        if not self.own_page:
            return {}
        records = (self.latents[0] + self.own_page, self.latents[1])
        return {KEPT_RECORDS: records, KEPT_KEYS: self.index, KEPT_PAGES: self.index_pages}

    @property
    def kept_bytes(self) -> int:
        """Bytes of :attr:`kept`."""
        return sum(prod(shape) for shape in self.kept.values())

    @property
    def num_bytes(self) -> int:
        """Bytes that :meth:`reserve` makes vLLM allocate, :attr:`kept` among them."""
        scratch = max(_num_bytes(self.latent_requests), _num_bytes(self.index_requests))
        return scratch + self.kept_bytes

    def num_bytes_beside(self, ordinary: KernelScratch) -> int:
        """The same beside the scratch of ordinary batches, in whose bytes all but the kept lie."""
        return max(self.num_bytes, ordinary.num_bytes + self.kept_bytes)

    def reserve(self) -> torch.device:
        """Allocate :attr:`num_bytes` of workspace (profiling run) and return where they lie."""
        tensors = _reserve(self.latent_requests, self.index_requests)
        tensors += [self._keep(key) for key in self.kept]
        return tensors[0].device

    def _keep(self, key: str) -> torch.Tensor:
        from vllm.v1.worker.workspace import current_workspace_manager

        return current_workspace_manager().get_persistent(key, self.kept[key], torch.uint8)

    def kept_records(
        self, layout: RankMajorLayout, own_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The records of a batch where exchanges begin with the layer.

        layout, own_rows: see :meth:`borrow_latents`, which gives the same records.

        Returns:
            (N * padded + own_rows, record_bytes) uint8, and the rows behind ``N * padded`` as pages
            (pages, P, record_bytes), the last one with rows to spare. Valid until the next layer.

        Raises:
            ValueError: as :meth:`borrow_latents`.
        """
        rows = self._rows("latent", layout, self.latents[0], own_rows)
        kept, page = self._keep(KEPT_RECORDS), self.own_page
        pages = -(-own_rows // page)
        own = kept[rows - own_rows :][: pages * page].view(pages, page, kept.shape[1])
        return kept[:rows], own

    def borrow_latents(self, layout: RankMajorLayout, own_rows: int = 0) -> LatentBuffers:
        """Return the buffers of one batch's latent exchange out of the reserved bytes.

        layout: the token layout of the batch. own_rows: rows behind it.

        Raises:
            ValueError: the batch needs more rows than are reserved, or has another number of
                ranks. Nothing has been taken then: an eligible batch never gets here, because
                eligibility bounds it by the same sizes.
        """
        if self.own_page:
            records, own = self.kept_records(layout, own_rows)
            return LatentBuffers(records, tuple(_take(self.latent_requests)), own)
        rows = self._rows("latent", layout, self.latents[0])
        latents, *scratch = _take(self.latent_requests)
        return LatentBuffers(latents[:rows], tuple(scratch))

    def borrow_index(
        self, layout: RankMajorLayout, num_pages: int, selection_rows: int = 0
    ) -> IndexBuffers:
        """Return the buffers of one batch's index exchange out of the reserved bytes.

        layout: the pool layout of the batch. num_pages: planar pages that it takes, see
            ``layout.plan_index_pages``. selection_rows: ``layout.RowShares.exchanged_rows``.

        Raises:
            ValueError: as :meth:`borrow_latents`, for pools, index pages and rows.
        """
        rows = self._rows("pool", layout, self.index[0])
        if num_pages > self.index_pages[0]:
            raise ValueError(
                f"the batch needs {num_pages} index pages, {self.index_pages[0]} are reserved; "
                "cut the batch into windows"
            )
        if selection_rows > self.selection[0]:
            raise ValueError(
                f"the batch exchanges the selection of {selection_rows} rows, {self.selection[0]} "
                "are reserved; select for all rows on every rank"
            )
        taken = _take(self.index_requests)
        if self.own_page:
            taken = [self._keep(KEPT_KEYS), self._keep(KEPT_PAGES), *taken]
        index, pages, *scratch = taken
        selection = scratch.pop(0)[:selection_rows] if self.selection[0] else None
        return IndexBuffers(index[:rows], pages[:num_pages], selection, tuple(scratch))

    def _rows(self, what: str, layout: RankMajorLayout, reserved: int, own_rows: int = 0) -> int:
        if layout.dcp_world_size != self.dcp_world_size:
            raise ValueError(
                f"the {what} layout has {layout.dcp_world_size} ranks, the workspace was reserved "
                f"for {self.dcp_world_size}; plan both from one geometry"
            )
        rows = layout.dcp_world_size * layout.padded + own_rows
        if rows > reserved:
            raise ValueError(
                f"the batch needs {rows} gathered {what} rows, {reserved} are reserved; cut "
                "the batch into windows"
            )
        return rows


def _num_bytes(requests: tuple[Request, ...]) -> int:
    return sum(
        -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in requests
    )


def _reserve(*requests: tuple[Request, ...]) -> list[torch.Tensor]:
    """Tensors of the last of ``requests`` that was made."""
    # The larger one first: the workspace grows by a second allocation otherwise.
    for request in sorted(requests, key=_num_bytes, reverse=True):
        tensors = _take(request)
    return tensors


def _take(requests: tuple[Request, ...]) -> list[torch.Tensor]:
    if not requests:
        return []
    from vllm.v1.worker.workspace import current_workspace_manager

    return current_workspace_manager().get_simultaneous(*requests)
