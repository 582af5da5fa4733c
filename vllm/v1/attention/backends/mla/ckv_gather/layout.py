# SPDX-License-Identifier: Apache-2.0
"""The rank-major layout of one batch: planned on the host, staged to the device.

Rank k's records of all requests, concatenated in request order, occupy gathered rows
``[k * padded, k * padded + total_k)``, where ``padded`` is the largest total. Rows from ``total_k``
to the next span belong to nobody: they may hold anything and nothing reads them.

The functions count tokens; for pools call them with ``seq_lens // pool_size`` and
``interleave // pool_size``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm.v1.attention.backends.mla.ckv_gather.geometry import MAX_ROW, POOLS_PER_INDEX_PAGE


@dataclass(frozen=True)
class RankMajorLayout:
    """Where every request's records land.

    local_lens: (N, R), int64 on the CPU. Records that rank k stores of request r.
    starts: (N, R), int64 on the CPU. First row of request r within rank k's span.
    padded: rows of every rank's span, the largest sum of ``local_lens`` over a rank. The same on
        every rank, so it alone may decide whether a collective is entered.
    visible: records of all ranks together.
    """

    local_lens: torch.Tensor
    starts: torch.Tensor
    padded: int
    visible: int

    @property
    def dcp_world_size(self) -> int:
        """Ranks N."""
        return self.local_lens.shape[0]

    @property
    def num_requests(self) -> int:
        """Requests R."""
        return self.local_lens.shape[1]

    @property
    def seq_lens(self) -> torch.Tensor:
        """(R,), int64 on the CPU. Global length of every request."""
        return self.local_lens.sum(0)

    def totals(self) -> list[int]:
        """Return the records of each rank's span."""
        return self.local_lens.sum(1).tolist()


def plan_layout(
    seq_lens_cpu: torch.Tensor, *, dcp_world_size: int, interleave: int
) -> RankMajorLayout:
    """Lay out one batch.

    seq_lens_cpu: (R,), any integer type, on the CPU. Exact visible length of each request.
    dcp_world_size, interleave: see :mod:`.geometry`, whose ``local_length`` this repeats for all
        ranks and requests at once.

    Raises:
        ValueError: the lengths are not a CPU vector of integers, one is negative, or the gathered
            rows do not fit int32, the type of row ids.
    """
    if seq_lens_cpu.device.type != "cpu":
        # Reading lengths back from the device would stall every step.
        raise ValueError(
            f"seq_lens_cpu is on {seq_lens_cpu.device}; pass the exact lengths kept on the CPU"
        )
    if seq_lens_cpu.dim() != 1 or seq_lens_cpu.is_floating_point():
        raise ValueError(
            f"seq_lens_cpu has shape {tuple(seq_lens_cpu.shape)} and type {seq_lens_cpu.dtype}; "
            "pass a vector of integers"
        )
    lengths = seq_lens_cpu.to(torch.int64)
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"a length is {int(lengths.min())}; lengths must be at least 0")
    chunk = interleave * dcp_world_size
    ranks = torch.arange(dcp_world_size, dtype=torch.int64)[:, None]
    rest = lengths % chunk - ranks * interleave
    local_lens = lengths // chunk * interleave + rest.clamp(0, interleave)
    ends = local_lens.cumsum(1)
    padded = int(ends[:, -1].max()) if lengths.numel() else 0
    if padded * dcp_world_size > MAX_ROW:
        raise ValueError(
            f"{padded * dcp_world_size} gathered rows do not fit int32 row ids, the limit is "
            f"{MAX_ROW}; lower the gather capacity"
        )
    return RankMajorLayout(local_lens, ends - local_lens, padded, int(lengths.sum()))


def plan_own_rows(layout: RankMajorLayout, own_lens_cpu: torch.Tensor) -> torch.Tensor:
    """Place tokens that follow what is laid out: behind the spans, request after request.

    layout: of the tokens before them. own_lens_cpu: (R,), int64 on the CPU. Tokens of each request.

    Returns:
        (R,) int64 on the CPU, may be negative: token t of request r, counted from the beginning of
        the request, lies in gathered row ``own_starts[r] + t``.
    """
    first = layout.dcp_world_size * layout.padded
    return first + own_lens_cpu.cumsum(0) - own_lens_cpu - layout.seq_lens


def plan_index_pages(pool_lens_cpu: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Place the pools of each request in planar index pages of its own, in global order.

    pool_lens_cpu: (R,), int64 on the CPU. Complete pools of each request.

    Returns:
        (R,) int64 on the CPU, the first page of each request, and the number of pages. At most
        ``ceil(sum / 64) + R`` pages, which is what the workspace reserves.
    """
    pages = (pool_lens_cpu.to(torch.int64) + POOLS_PER_INDEX_PAGE - 1) // POOLS_PER_INDEX_PAGE
    ends = pages.cumsum(0)
    return ends - pages, int(pages.sum())


@dataclass(frozen=True)
class RowShares:
    """The rows of a batch that each rank selects pools for: consecutive ones, or all of them.

    num_rows: rows T of the batch.
    shares: 1, every rank selects for all rows, or N, rank k selects for rows
        ``[k * S, (k + 1) * S)`` as far as there are any.
    """

    num_rows: int
    shares: int

    @property
    def rows_per_share(self) -> int:
        """Rows S of a share: ``ceil(T / shares)``."""
        return -(-self.num_rows // self.shares)

    @property
    def exchanged_rows(self) -> int:
        """Rows of the buffer in which the shares meet: ``N * S``, 0 without an exchange."""
        return self.shares * self.rows_per_share if self.shares > 1 else 0

    def rows_of(self, rank: int) -> slice:
        """The rows that ``rank`` selects for; an empty slice behind the last row."""
        begin = min(rank % self.shares * self.rows_per_share, self.num_rows)
        return slice(begin, min(begin + self.rows_per_share, self.num_rows))


@dataclass(frozen=True)
class StagedLayout:
    """A layout on the device, as kernels read it.

    local_lens: (N, R), int32. Records that rank k stores of request r.
    starts: (N, R), int32. First row of request r within rank k's span.
    seq_lens: (R,), int32. Global length of every request.
    padded: rows of every rank's span.
    """

    local_lens: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    padded: int

    @staticmethod
    def numbers(layout: RankMajorLayout) -> torch.Tensor:
        """The numbers to stage: (2 * N + 1, R), int64 on the CPU, in the order of the fields."""
        return torch.cat((layout.local_lens, layout.starts, layout.seq_lens[None]))

    @classmethod
    def over(cls, staged: torch.Tensor, layout: RankMajorLayout) -> StagedLayout:
        """Name the parts of ``staged``: :meth:`numbers` of ``layout`` as int32 on a device."""
        world = layout.dcp_world_size
        return cls(
            local_lens=staged[:world],
            starts=staged[world : 2 * world],
            seq_lens=staged[2 * world],
            padded=layout.padded,
        )

    @classmethod
    def stage(cls, layout: RankMajorLayout, device: torch.device | str) -> StagedLayout:
        """Copy one layout to ``device`` into fresh memory; the host may wait for the copy.

        Batches are staged by :class:`.staging.StagingRing`, which does not wait.
        """
        return cls.over(cls.numbers(layout).to(torch.int32).to(device), layout)
