# SPDX-License-Identifier: Apache-2.0
"""A batch in windows: how it is cut to fit the reserved rows, and how partial results are merged.

A *span* is a run of consecutive requests that fit together, or one request that does not fit alone.
The records of a span are gathered in one *window*, those of a request that does not fit in several:
its context from front to back. A batch that fits is one span with one window.

Where to cut follows from the capacity and the batch's lengths alone, so all ranks cut alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.attention.backends.mla.sparse_mla_kernels.base import SparseMLAKernels

Candidates = tuple[torch.Tensor, torch.Tensor]
"""Pool ids (T, K) int32, -1 where there is none, and their scores (T, K) float32."""


@dataclass(frozen=True)
class Span:
    """What is computed together, from one window of records or several.

    requests, rows: of the batch. The last span has the padding rows as well.
    bounds: where its windows begin, in tokens of the context, and where the last one ends; empty if
        one window holds whole requests.
    first_position: position of the first row in its request.
    """

    requests: slice
    rows: slice
    bounds: tuple[int, ...] = ()
    first_position: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the span."""
        return self.rows.stop - self.rows.start

    @property
    def num_windows(self) -> int:
        """Windows of the span."""
        return max(1, len(self.bounds) - 1)

    def pieces(
        self, seq_lens: Sequence[int]
    ) -> list[tuple[tuple[int, ...], tuple[int, int] | None]]:
        """For every window the tokens of each request in it, and its own of :attr:`bounds`.

        seq_lens: visible tokens of each request of the batch.
        """
        if not self.bounds:
            return [(tuple(seq_lens[self.requests]), None)]
        return [((end - begin,), (begin, end)) for begin, end in pairwise(self.bounds)]

    def rows_from(self, position: int) -> slice:
        """The rows at ``position`` and behind it: those that see the token there."""
        skipped = min(max(position - self.first_position, 0), self.num_rows)
        return slice(self.rows.start + skipped, self.rows.stop)


def own_lengths(
    seq_lens: Sequence[int], query_lens: Sequence[int], spans: Sequence[Span]
) -> Sequence[int]:
    """Tokens of each gathered request that an early exchange leaves out; empty: none.

    They are the query tokens, which every rank computes. What is exchanged must have been written
    before this step. Lengths tell so of a request that is alone, and of prompts without a context:
    vLLM lets a request begin with blocks that another one of the same step is only about to write.

    seq_lens, query_lens: visible tokens and query tokens of each request of the batch.
    """
    if len(spans) != 1 or spans[0].num_windows != 1:
        return ()
    requests = spans[0].requests
    own = query_lens[requests]
    return own if len(seq_lens) == 1 or own == seq_lens[requests] else ()


def plan_spans(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    capacity: int,
    granule: int,
    num_rows: int,
    first: int = 0,
) -> list[Span]:
    """Cut a batch into spans: greedily, in the order of its requests.

    seq_lens, query_lens: visible tokens and query tokens of each request.
    capacity: visible tokens that a window holds, over its requests.
    granule: tokens that windows of a context are a multiple of, so that what every rank stores of
        them begins with a page.
    num_rows: rows of the batch, with padding rows behind the last request's.
    first: requests at the beginning that are left out, with their rows.

    Raises:
        ValueError: a request does not fit, and neither does a window of it.
    """
    spans: list[Span] = []
    first_request, held = first, 0
    first_row = row = sum(query_lens[:first])

    def close(request: int) -> None:
        if request > first_request:
            spans.append(Span(slice(first_request, request), slice(first_row, row)))

    for request in range(first, len(seq_lens)):
        length, queries = seq_lens[request], query_lens[request]
        if held + length > capacity:
            close(request)
            first_request, first_row, held = request, row, 0
        held += length
        row += queries
        if length > capacity:
            size = capacity // granule * granule
            if not size:
                raise ValueError(
                    f"a request sees {length} tokens, buffers are reserved for {capacity}, less "
                    f"than the {granule} of one window"
                )
            bounds = (*range(0, length, size), length)
            rows = slice(first_row, row)
            spans.append(Span(slice(request, request + 1), rows, bounds, length - queries))
            first_request, first_row, held = request + 1, row, 0
    close(len(seq_lens))
    if spans:
        spans[-1] = replace(spans[-1], rows=slice(spans[-1].rows.start, num_rows))
    return spans


def merge_attention(
    parts: Iterable[tuple[int, torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over the windows of a span by log-sum-exp, in float32.

    parts: for each window the rows it leaves out at the beginning, none in the first window; then
        output (rows, H, D) and natural log-sum-exp (rows, H) of the others. A row that sees nothing
        of a window has 0 and -inf. They are taken one by one.

    Returns:
        Output, of the parts' type, and log-sum-exp. A single window's are returned as they are.
    """
    results = iter(parts)
    _, total, lse = next(results)
    dtype = total.dtype
    for skipped, out, part_lse in results:
        total = total.float()
        before = lse[skipped:]
        both = torch.logaddexp(before, part_lse)
        # -inf - (-inf) would be NaN in a row that has seen nothing yet.
        shift = torch.where(both == -torch.inf, 0.0, both)
        old, new = (before - shift).exp_(), (part_lse - shift).exp_()
        total[skipped:].mul_(old.unsqueeze(-1)).addcmul_(out, new.unsqueeze(-1))
        before.copy_(both)
    return total.to(dtype), lse


def merge_candidates(
    kernels: SparseMLAKernels, best: Candidates, skipped: int, found: Candidates, first_pool: int
) -> None:
    """Merge a window's candidates into the best ones of the windows before it, in place.

    best: of all rows. skipped: rows at the beginning that see no pool of the window.
    found: of the other rows; ids count from ``first_pool``.
    """
    ids, scores = (tensor[skipped:] for tensor in best)
    found_ids = torch.where(found[0] >= 0, found[0] + first_pool, -1)
    merged = kernels.merge_pool_candidates(
        torch.cat((scores, found[1]), 1), torch.cat((ids, found_ids), 1), ids.shape[1]
    )
    ids.copy_(merged[0])
    scores.copy_(merged[1])
