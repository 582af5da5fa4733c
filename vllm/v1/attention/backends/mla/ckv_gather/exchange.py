# SPDX-License-Identifier: Apache-2.0
"""Bring every rank's records to every rank. The only module that calls a collective.

Whether a collective is entered depends on ``padded`` and on shapes that are the same on every rank,
never on what this rank stores: a rank without records enters like the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

if TYPE_CHECKING:
    from vllm.v1.attention.backends.mla.ckv_gather.layout import StagedLayout
    from vllm.v1.attention.backends.mla.sparse_mla_kernels.base import SparseMLAKernels


Communicator = dist.ProcessGroup | PyNcclCommunicator


def communicator_of(coordinator: Any) -> Communicator:
    """What the exchanges of a vLLM ``GroupCoordinator`` go through.

    vLLM's NCCL communicator where it is in use, because vLLM has one for the group anyway (the
    process group's would take several hundred MiB of its own), it works on the current stream
    instead of switching to another one and back, and graphs capture it. Else the process group.
    """
    pynccl = getattr(getattr(coordinator, "device_communicator", None), "pynccl_comm", None)
    return coordinator.device_group if pynccl is None or pynccl.disabled else pynccl


def _place(group: Communicator) -> tuple[int, int]:
    """Ranks of ``group``, and which of them this process is."""
    if isinstance(group, PyNcclCommunicator):
        return group.world_size, group.rank
    return dist.get_world_size(group), dist.get_rank(group)


def _all_gather(received: torch.Tensor, own: torch.Tensor, group: Communicator) -> None:
    if isinstance(group, PyNcclCommunicator):
        group.all_gather(received, own)
    else:
        dist.all_gather_into_tensor(received, own, group=group)


def all_gather_in_place(
    gathered: torch.Tensor, padded: int, group: Communicator, rank: int
) -> None:
    """Exchange the rank spans of ``gathered``; this rank's span must be filled before.

    gathered: (N * padded, columns), contiguous, of any type. Rank k's rows are
        ``[k * padded, (k + 1) * padded)``. The send buffer is a view of the receive buffer, so no
        second buffer exists and the own span is not copied.
    padded: rows of one span, the same on every rank. 0 means that no rank has a record, and then
        none enters the collective.
    group: the DCP ranks.
    rank: this rank's number in ``group``.

    Raises:
        ValueError: shape or layout of ``gathered`` or ``rank`` does not fit the group.
            All but ``rank`` are the same everywhere, so ranks fail together instead of waiting.
    """
    world, place = _place(group)
    if gathered.dim() != 2 or gathered.shape[0] != world * padded:
        raise ValueError(
            f"the gather buffer has shape {tuple(gathered.shape)}, expected "
            f"({world} * {padded}, columns); borrow it for this batch's layout"
        )
    if not gathered.is_contiguous():
        raise ValueError(f"the gather buffer has strides {gathered.stride()}; pass contiguous rows")
    if rank != place:
        raise ValueError(
            f"rank {rank} was passed, the group numbers this process {place}; "
            "pass the rank within the DCP group"
        )
    if padded == 0:
        return
    own = gathered[rank * padded : (rank + 1) * padded]
    _all_gather(gathered, own, group)


def gather_latents(
    kernels: SparseMLAKernels,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    staged: StagedLayout,
    gathered: torch.Tensor,
    group: Communicator,
    rank: int,
) -> None:
    """Pack this rank's visible latent records into its span and exchange the spans.

    cache: (pages, P, record_bytes), uint8; pages may be padded.
    block_table: (R, B), int32. This rank's pages of each request.
    staged: the token layout of the batch.
    gathered: (N * padded, record_bytes), uint8. Receives all records, rank-major.
    """
    padded = staged.padded
    if padded:
        kernels.pack_records(
            cache,
            block_table,
            staged.local_lens[rank],
            staged.starts[rank],
            gathered[rank * padded : (rank + 1) * padded],
        )
    all_gather_in_place(gathered, padded, group, rank)


def gather_pools(
    kernels: SparseMLAKernels,
    index_cache: torch.Tensor,
    block_table: torch.Tensor,
    staged: StagedLayout,
    gathered: torch.Tensor,
    pages: torch.Tensor,
    page_starts: torch.Tensor,
    group: Communicator,
    rank: int,
    *,
    interleave: int,
) -> None:
    """Pack this rank's index records, exchange them, and lay them out in global pool order.

    index_cache: (ipages, 64, 132), uint8, planar within a page; pages may be padded.
    block_table: (R, B), int32. This rank's index pages of each request.
    staged: the pool layout of the batch.
    gathered: (N * padded, 132), uint8. Receives all index records, rank-major.
    pages: (n_ipages, 8448), uint8. Receives planar pages of 64 pools.
    page_starts: (R,), int32. First page of each request, see ``layout.plan_index_pages``.
    interleave: consecutive POOLS on one rank.
    """
    padded = staged.padded
    if padded:
        kernels.pack_pools(
            index_cache,
            block_table,
            staged.local_lens[rank],
            staged.starts[rank],
            gathered[rank * padded : (rank + 1) * padded],
        )
    all_gather_in_place(gathered, padded, group, rank)
    if padded:
        kernels.unpack_pools(
            gathered, staged.starts, staged.seq_lens, interleave, pages, page_starts
        )


def gather_selection(
    selected: torch.Tensor, gathered: torch.Tensor, group: Communicator, rank: int
) -> None:
    """Put this rank's share of a selection into its span and exchange the spans.

    selected: (rows, K), int32. Pool ids of the rows of this rank's share, see
        ``layout.RowShares``; no row where the batch has fewer than ranks.
    gathered: (N * S, K), int32. Receives the pool ids of all rows, in their order: shares are
        consecutive and only the last ones are short. Rows past the batch's may hold anything.
    """
    rows_per_share = gathered.shape[0] // _place(group)[0]
    first = rank * rows_per_share
    gathered[first : first + selected.shape[0]] = selected
    all_gather_in_place(gathered, rows_per_share, group, rank)


def all_gather_candidates(
    scores: torch.Tensor, global_ids: torch.Tensor, group: Communicator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring every rank's pool candidates to every rank, for selection without a full gather.

    scores: (T, K), float32.
    global_ids: (T, K), int32. Global pool ids, -1 where there is none.
    group: the DCP ranks; left out, :func:`communicator_of` vLLM's DCP group.

    Returns:
        scores and ids, (T, N * K) each; rank k's candidates are columns ``[k * K, (k + 1) * K)``.

    Raises:
        ValueError: shapes or types differ from the above.
    """
    if (
        scores.shape != global_ids.shape
        or scores.dim() != 2
        or (scores.dtype, global_ids.dtype) != (torch.float32, torch.int32)
    ):
        raise ValueError(
            f"scores {tuple(scores.shape)} {scores.dtype} and ids {tuple(global_ids.shape)} "
            f"{global_ids.dtype}; pass float32 scores and int32 ids of one shape (T, K)"
        )
    if group is None:
        from vllm.distributed.parallel_state import get_dcp_group

        group = communicator_of(get_dcp_group())
    world, _ = _place(group)
    rows, width = scores.shape
    if rows == 0 or width == 0:
        return scores.new_empty((rows, world * width)), global_ids.new_empty((rows, world * width))
    # Both have 4-byte elements, so one exchange of their bits moves them together.
    own = torch.stack((scores.contiguous().view(torch.int32), global_ids))
    every = torch.empty((world * 2, rows, width), dtype=torch.int32, device=own.device)
    _all_gather(every, own, group)
    both = every.view(world, 2, rows, width).permute(1, 2, 0, 3).reshape(2, rows, world * width)
    return both[0].view(torch.float32), both[1]


def require_same(what: str, numbers: list[int], group: dist.ProcessGroup) -> None:
    """Check that every rank passes the same ``numbers``, by one tiny exchange on the host.

    For ``VLLM_CKV_DEBUG``. group: a CPU group of the DCP ranks.

    Raises:
        RuntimeError: they differ, on every rank. The message has both lists.
    """
    # gloo takes shares of the result along its first dimension, with all dimensions that it has.
    own = torch.tensor([numbers], dtype=torch.int64)
    every = own.new_empty((dist.get_world_size(group), len(numbers)))
    dist.all_gather_into_tensor(every, own, group=group)
    for rank, other in enumerate(every.tolist()):
        if other != every[0].tolist():
            raise RuntimeError(
                f"{what} differ between ranks: {every[0].tolist()} on rank 0, {other} on rank "
                f"{rank}; the ranks would wait for each other in different collectives"
            )


def all_gather_facts(facts: dict[str, Any], group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Bring every rank's start-up facts to every rank, in rank order.

    facts: a dictionary of plain values. group: a CPU group of the DCP ranks; used at start only.
    """
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, facts, group=group)
    return every
