# SPDX-License-Identifier: Apache-2.0
"""The beginning of an MLA layer, where an early exchange starts.

Stock's outer MLA layer is replaced by one that calls our implementation before its first projection
if that asks for it: with ``VLLM_B12X_MLA_CKV_EARLY_EXCHANGE``, read anew by every engine of a
process. In a piecewise CUDA graph that call is one more break of a layer, as it has to run anew in
every replay.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as envs
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper


@eager_break_during_capture
def begin_layer(layer: Any) -> None:
    """Call ``layer.impl.begin_layer(layer)``; layer: vLLM's attention layer."""
    layer.impl.begin_layer(layer)


class B12xMLAWrapper(MultiHeadLatentAttentionWrapper):
    """Stock's outer MLA layer; layers whose implementation does not begin early are left alone."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if getattr(self.mla_attn.impl, "begins_early", False):
            begin_layer(self.mla_attn)
        return super().forward(*args, **kwargs)


def register() -> None:
    """Make every MLA layer built from now on begin so. Idempotent.

    Raises:
        RuntimeError: another plugin has replaced that layer, and exchanges are to begin early.
    """
    name = MultiHeadLatentAttentionWrapper.__name__
    known = op_registry_oot.setdefault(name, B12xMLAWrapper)
    if known is not B12xMLAWrapper and envs.VLLM_B12X_MLA_CKV_EARLY_EXCHANGE:
        raise RuntimeError(
            f"VLLM_B12X_MLA_CKV_EARLY_EXCHANGE=1 needs {name}, which another plugin has replaced "
            f"by {known.__module__}.{known.__qualname__}; set it to 0 or disable that plugin"
        )
