# SPDX-License-Identifier: Apache-2.0
"""Token ids to gathered rows, and causal lengths: plain torch, the meaning kernels must match."""

from __future__ import annotations

import torch


def causal_lengths(
    seq_lens: torch.Tensor, query_start_loc: torch.Tensor, num_tokens: int | None = None
) -> torch.Tensor:
    """Return how many tokens each query row sees, itself included.

    The length is the global one: a bound by what one rank stores would cut short contexts.

    seq_lens: (R,), integer. Visible length of each request, this step's tokens included.
    query_start_loc: (R + 1,), integer. Where each request's rows begin, and where the last ends.
    num_tokens: rows of the result, with padding rows. Left out, it is ``query_start_loc[-1]``,
        which makes the host wait if that is on a device.

    Returns:
        (T,), int32. Row t of request r sees ``seq_lens[r] - (query_start_loc[r + 1] - 1 - t)``
        tokens; padding rows, after the last request, see 0.
    """
    if num_tokens is None:
        num_tokens = int(query_start_loc[-1])
    rows = torch.arange(num_tokens, device=query_start_loc.device, dtype=torch.int64)
    if seq_lens.numel() == 0:
        return torch.zeros_like(rows, dtype=torch.int32)
    ends = query_start_loc[1:].to(torch.int64).contiguous()
    # right=True steps over requests without rows, whose end equals their start.
    request = torch.searchsorted(ends, rows, right=True).clamp_(max=ends.numel() - 1)
    lengths = seq_lens.to(torch.int64)[request] - ends[request] + rows + 1
    return torch.where(rows < ends[-1], lengths, 0).to(torch.int32)


def owner_and_local(
    ids: torch.Tensor, *, dcp_world_size: int, interleave: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rank that stores each token (or pool), and its position on that rank.

    The device form of ``geometry.owner_of`` and ``geometry.local_index_of``; shape and type of
    ``ids``, which must not be negative, are kept.
    """
    chunk = interleave * dcp_world_size
    return ids // interleave % dcp_world_size, ids // chunk * interleave + ids % interleave


def gathered_rows(
    token_ids: torch.Tensor,
    req_id: torch.Tensor,
    starts: torch.Tensor,
    padded: int,
    *,
    dcp_world_size: int,
    interleave: int,
    context_lens: torch.Tensor | None = None,
    own_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gathered row of every selected token, in the order of the selection.

    token_ids: (T, W), integer. Positions in the request of the row; negative means no token.
    req_id: (T,), integer. Request of each row; negative for a padding row, whose ids may be
        anything and are not read as tokens.
    starts: (N, R), integer. See :class:`.layout.RankMajorLayout`.
    padded: rows of every rank's span.
    context_lens, own_starts: (R,), integer. Tokens of a request that lie in the spans, and where
        those behind them begin, see :func:`.layout.plan_own_rows`. None: all lie in the spans.

    Returns:
        (T, W), int32. ``owner * padded + starts[owner, request] + local index``, of tokens behind
        the context ``own_starts[request] + token``, -1 where there is no token. Row numbers have no
        other bound than int32; -1 alone is invalid.
    """
    tokens = token_ids.to(torch.int64)
    request = req_id.to(torch.int64)[:, None]
    valid = (tokens >= 0) & (request >= 0)
    # Invalid ids are replaced before the arithmetic, so that they never become an address.
    tokens = torch.where(valid, tokens, 0)
    request = request.clamp(min=0).expand_as(tokens)
    owner, local = owner_and_local(tokens, dcp_world_size=dcp_world_size, interleave=interleave)
    if starts.shape[1] == 0:
        return torch.full_like(tokens, -1, dtype=torch.int32)
    rows = owner * padded + starts.to(torch.int64)[owner, request] + local
    if context_lens is not None and own_starts is not None:
        own = own_starts.to(torch.int64)[request] + tokens
        rows = torch.where(tokens < context_lens[request], rows, own)
    return torch.where(valid, rows, -1).to(torch.int32)


def local_lengths(
    lengths: torch.Tensor, rank: int, *, dcp_world_size: int, interleave: int
) -> torch.Tensor:
    """Return how many of the first ``lengths`` tokens (or pools) ``rank`` stores.

    The device form of ``geometry.local_length``; shape and type of ``lengths`` are kept.
    """
    chunk = interleave * dcp_world_size
    rest = lengths % chunk - rank * interleave
    return lengths // chunk * interleave + rest.clamp(0, interleave)


def global_ids(
    local_ids: torch.Tensor, rank: int, *, dcp_world_size: int, interleave: int
) -> torch.Tensor:
    """Return the global ids of what ``rank`` stores at ``local_ids``; negative ids become -1.

    The device form of ``geometry.global_index_of``; shape and type of ``local_ids`` are kept.
    """
    chunk = local_ids // interleave * dcp_world_size + rank
    ids = chunk * interleave + local_ids % interleave
    return torch.where(local_ids >= 0, ids, -1)
