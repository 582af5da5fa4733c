# SPDX-License-Identifier: Apache-2.0
"""A second opinion: HF transformers' own glm5_next on the same weights, teacher-forced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class OracleStep:
    """What the oracle thinks of one generated token.

    logprob: its log-probability.
    lead: how far the oracle's likeliest token is ahead of it, in log-probability; 0 if it is it.
    """

    logprob: float
    lead: float


class TransformersOracle:
    """The model in float32, without a KV cache and without FP8 records."""

    def __init__(self, model: Path) -> None:
        """Load ``model``, a folder with ``config.json`` and ``model.safetensors``."""
        from vllm.platforms.ckv_reference import declare_torchvision_ops

        declare_torchvision_ops()
        import transformers
        from safetensors import safe_open
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

        # Silent from here on, or it advises on GPU kernels and lists the head as unexpected.
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        loaded: Any = Glm5NextTextModel.from_pretrained(
            model, dtype=torch.float32, output_loading_info=True
        )
        body, loading = loaded
        unloaded = loading["missing_keys"] | set(loading["unexpected_keys"]) - {"lm_head.weight"}
        if unloaded:
            raise RuntimeError(f"transformers did not match these weights: {sorted(unloaded)}")
        self.body = body.eval()
        with safe_open(model / "model.safetensors", "pt") as weights:
            self.head = weights.get_tensor("lm_head.weight").float()

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], generated: Sequence[int]) -> list[OracleStep]:
        """Score each of ``generated`` after ``prompt`` and the tokens generated before it."""
        sequence = torch.tensor([[*prompt, *generated[:-1]]])
        hidden = self.body(sequence, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
        logprobs = torch.log_softmax(hidden.float() @ self.head.T, dim=-1)
        chosen = logprobs.gather(1, torch.tensor(generated).unsqueeze(1)).squeeze(1)
        leads = logprobs.max(dim=1).values - chosen
        return [
            OracleStep(logprob, lead)
            for logprob, lead in zip(chosen.tolist(), leads.tolist(), strict=True)
        ]
