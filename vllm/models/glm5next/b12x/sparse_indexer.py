# SPDX-License-Identifier: Apache-2.0
"""The C4 indexer of glm5_next for the B12X_MLA_SPARSE backend.

Replaces stock's op for every glm5_next layer of the process and defers to it unless the layer's
attention implementation is ours (only that calls ``follow``). It differs from stock in three ways:
pools are right whatever the chunk cuts, the kernels come from the provider, and a batch that
gathers selects on the keys of all ranks. Runs without metadata (profiling) do nothing here: the
implementation's ``reserve_workspace`` runs the same kernels at their largest shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.models.glm5next.sparse_indexer import SparseAttnIndexerKpool

from vllm.v1.attention.backends.mla.ckv_gather import debug
from vllm.v1.attention.backends.mla.ckv_gather.exchange import all_gather_candidates
from vllm.v1.attention.backends.mla.sparse_mla_kernels import get_kernels
from vllm.v1.attention.backends.mla.sparse_mla_kernels.base import IndexQueries


@eager_break_during_capture
def select_tokens(
    op: B12xSparseAttnIndexer,
    q_fp8: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    gate_score: torch.Tensor,
    compress_ape: torch.Tensor,
    pool_size: int,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Write this step's pools, select pools, and leave token ids in ``op.topk_indices_buffer``.

    Args:
        op: the layer's indexer.
        q_fp8: (T, heads, 128) e4m3, Hadamard-rotated queries.
        k: (T, 128) bf16, raw keys of this step's tokens.
        weights: (T, heads) float32, the query scale folded in.
        gate_score: (T, 128) bf16, pool weights before softmax.
        compress_ape: (pool_size, 128) float32.
        pool_size: tokens per pool.
        positions: (T,) int, global position of each token.

    Returns:
        ``op.topk_indices_buffer``: int32 (max tokens, width); rows past T are untouched.

    """
    buffer = op.topk_indices_buffer
    attn_metadata = get_forward_context().attn_metadata
    if not isinstance(attn_metadata, dict):
        return buffer
    index: Any = attn_metadata[op.k_cache.prefix]
    tail: Any = attn_metadata[op.tail_cache.prefix]
    attention: Any = attn_metadata[op.layer_name]
    num_tokens = attention.num_actual_tokens
    q_fp8, weights = q_fp8[:num_tokens], weights[:num_tokens]
    positions = positions[:num_tokens]
    req_id = attention.req_id_per_token[:num_tokens]
    kernels = get_kernels()
    if op.gather.debug:
        # Rows behind the last request are padding, with slots of an earlier batch.
        rows = int(attention.query_start_loc[-1])
        debug.check_pool_slots(index.slot_mapping[:rows], op.k_cache.kv_cache)
        debug.check_tail_slots(tail.slot_mapping[:rows], op.tail_cache.kv_cache)
    pool_slots = index.slot_mapping[:num_tokens]
    if op.is_draft:
        # vLLM leaves the positions of rejected tokens as they were, but not their slots. Whatever
        # such a slot gets is written anew before anybody sees the pool.
        pool_slots = pool_slots.masked_fill((positions + 1) % pool_size != 0, -1)
    plan = None if op.is_draft else attention.ckv_plan
    kernels.write_pools(
        k[:num_tokens],
        gate_score[:num_tokens],
        compress_ape,
        op.k_cache.kv_cache,
        pool_slots,
        op.tail_cache.kv_cache,
        tail.slot_mapping[:num_tokens],
        positions,
        attention.query_start_loc,
        None if plan is None else op.gather.own_pools(plan),
    )
    pool_topk = op.topk_tokens // pool_size
    # A query at position p sees p + 1 tokens, so (p + 1) // pool_size complete pools.
    visible_pools = ((positions + 1) // pool_size).to(torch.int32)
    first, table = num_tokens, index.block_table
    if plan is not None:
        # In front of the rows that gather are those of decodes, if any.
        first, table = plan.first_row, table[: attention.num_decodes]
    if first:
        pool_ids = _select_ordinary(
            op,
            table,
            q_fp8[:first],
            weights[:first],
            req_id[:first],
            visible_pools[:first],
            pool_topk,
            num_prompt_rows=max(first - attention.num_decode_tokens, 0),
        )
        buffer[:first] = kernels.expand_pools(
            pool_ids, positions[:first], pool_size, buffer.shape[1]
        )
    if plan is not None:
        pool_ids = op.gather.select_pools(
            plan,
            kernels,
            IndexQueries(
                op.k_cache.kv_cache,
                index.block_table,
                q_fp8,
                weights,
                req_id,
                visible_pools,
                pool_topk,
            ),
        )
        buffer[first:num_tokens] = kernels.expand_pools(
            pool_ids, positions[first:], pool_size, buffer.shape[1]
        )
    return buffer


def _select_ordinary(
    op: B12xSparseAttnIndexer,
    block_table: torch.Tensor,
    q_fp8: torch.Tensor,
    weights: torch.Tensor,
    req_id: torch.Tensor,
    visible_pools: torch.Tensor,
    pool_topk: int,
    *,
    num_prompt_rows: int,
) -> torch.Tensor:
    """Pool ids (T, pool_topk) int32 of T rows: each rank's best of its own pools, then merged.

    num_prompt_rows: rows among them that might have gathered.
    """
    kernels, cache = get_kernels(), op.k_cache.kv_cache
    local_pools, ownership = visible_pools, None
    if op.dcp_world_size != 1:
        ownership = op.gather.pool_ownership
        local_pools = ownership.local_lengths(visible_pools, op.dcp_rank)
    # Positions of a draft layer's rejected tokens may name pages that the request does not have.
    if op.gather.debug and not op.is_draft:
        debug.check_index_pages(block_table, req_id, local_pools, cache)
    pool_ids, scores = kernels.select_pools(
        q_fp8,
        weights,
        cache,
        block_table,
        req_id,
        local_pools,
        pool_topk,
        op.gather.ordinary_scratch.borrow_selection(),
    )
    if ownership is None:
        return pool_ids
    if not op.is_draft:
        op.gather.count_candidates(num_prompt_rows, pool_topk)
    all_scores, all_ids = all_gather_candidates(scores, ownership.global_ids(pool_ids, op.dcp_rank))
    return kernels.merge_pool_candidates(all_scores, all_ids, pool_topk)[0]


class B12xSparseAttnIndexer(SparseAttnIndexerKpool):
    """Stock's indexer op with our path for layers that run on our backend."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer_name = ""
        self.gather: Any = None
        self.is_draft = False

    def follow(self, layer_name: str, gather: Any, *, is_draft: bool = False) -> None:
        """Read decisions from ``layer_name``'s metadata from now on; draft layers stay ordinary.

        The name is empty until the builder knows it, which is before the first metadata.
        """
        self.layer_name = layer_name
        self.gather = gather
        self.is_draft = is_draft

    def forward_native(
        self,
        hidden_states: torch.Tensor,
        q_quant: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        k: torch.Tensor,
        weights: torch.Tensor,
        *,
        gate_score: torch.Tensor | None = None,
        compress_ape: torch.Tensor | None = None,
        index_kpool: int = 1,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # The layer's attention runs on another backend.
        if self.gather is None:
            return super().forward_cuda(
                hidden_states,
                q_quant,
                k,
                weights,
                gate_score=gate_score,
                compress_ape=compress_ape,
                index_kpool=index_kpool,
                positions=positions,
            )
        assert isinstance(q_quant, torch.Tensor), "FP4 index keys are not supported"
        assert gate_score is not None and compress_ape is not None and positions is not None
        return select_tokens(
            self, q_quant, k, weights, gate_score, compress_ape, index_kpool, positions
        )

    forward_cuda = forward_native
    forward_cpu = forward_native
    forward_oot = forward_native


def register() -> None:
    """Make every glm5_next layer built from now on use this op. Idempotent."""
    from vllm.model_executor.custom_op import op_registry_oot

    name = SparseAttnIndexerKpool.__name__
    if name not in op_registry_oot:
        CustomOp.register_oot(B12xSparseAttnIndexer, name=name)
