# SPDX-License-Identifier: Apache-2.0
"""Sizes of what the Triton provider holds beside its arguments: no Triton, no GPU.

The provider takes its sizes from here, and so does ``vllm-ckv plan``.
"""

import torch

from vllm.v1.attention.backends.mla.ckv_gather.geometry import INDEX_RECORD_BYTES

from .base import LATENT_DIM, ScratchShapes

LOGITS_BYTES = 32 << 20
CANDIDATE_BYTES = 9 << 20
"""Candidates of a selection: 513 of 4,599 rows."""
PARTIAL_BYTES = 17 << 20
"""Parts of split rows: a wave of 264 programs of 32 heads on an H200, 16.5 MiB."""
DEEPGEMM_KEYS = 131_072
"""Keys that fit the buffer DeepGEMM reads them from: 512K tokens, 16.5 MiB."""
DEEPGEMM_KEYS_BYTES = DEEPGEMM_KEYS * INDEX_RECORD_BYTES
FLASHMLA_TOPK = 128
"""FlashMLA reads ids in multiples of this many."""
FLASHMLA_ROWS = 1056
"""Rows of one FlashMLA call with padded heads: eight waves on 132 multiprocessors."""


def flashmla_heads(heads: int) -> int:
    """Heads that FlashMLA is called with for ``heads``; 0 where it has no kernel."""
    if heads > 128:
        return 0
    return 64 if heads <= 64 else 128


def flashmla_shapes(
    *, max_records: int, max_tokens: int, num_heads: int, width: int
) -> ScratchShapes:
    """What FlashMLA takes, as ``SparseMLAKernels.scratch_shapes`` gives it.

    Latents in bf16, row ids with masked columns; for head counts that are padded also a chunk of
    queries and a chunk of results.
    """
    padded = flashmla_heads(num_heads)
    if not padded:
        return []
    columns = -(-width // FLASHMLA_TOPK) * FLASHMLA_TOPK
    shapes: ScratchShapes = [
        ((max_records, LATENT_DIM), torch.bfloat16),
        ((max_tokens, columns), torch.int32),
    ]
    if padded != num_heads:
        rows = min(max_tokens, FLASHMLA_ROWS)
        shapes += [
            ((rows * num_heads + padded - num_heads, LATENT_DIM), torch.bfloat16),
            ((rows, padded, LATENT_DIM), torch.bfloat16),
        ]
    return shapes


def triton_bytes(family: int) -> int:
    """Bytes that the Triton provider keeps for selection and split attention.

    family: compute capability, major x 10; on Hopper keys for DeepGEMM are among them.
    """
    keys = DEEPGEMM_KEYS_BYTES if family == 90 else 0
    return LOGITS_BYTES + CANDIDATE_BYTES + PARTIAL_BYTES + keys
