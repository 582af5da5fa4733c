# SPDX-License-Identifier: Apache-2.0
"""The platform class: vLLM's CPU platform plus sparse attention, hybrid pages and our worker."""

import os
from typing import TYPE_CHECKING

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm.plugins.b12x_mla_sparse import BACKEND_NAME

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

WORKER_PATH = "vllm.platforms.ckv_reference.worker.CkvReferenceWorker"


class CkvReferencePlatform(CpuPlatform):
    """CPU platform that runs sparse MLA backends through their torch or interpreted kernels."""

    simple_compile_backend = "eager"
    """Inductor needs a C++ compiler, and a path to torch without spaces."""

    @classmethod
    def import_kernels(cls) -> None:
        """Import the CPU extension; where there is none, hide what vLLM has kernels for in it only.

        vLLM asks torch whether the processor has AMX or AVX512-BF16, and calls the extension if so.
        """
        super().import_kernels()
        if not hasattr(torch.ops._C, "convert_weight_packed"):
            torch.cpu._is_amx_tile_supported = lambda: False
            torch.cpu._is_avx512_bf16_supported = lambda: False

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: "AttentionBackendEnum | None",
        attn_selector_config: "AttentionSelectorConfig",
        num_heads: int | None = None,
    ) -> str:
        """Path of the selected backend; the CPU platform decides when attention is not sparse.

        Raises:
            ValueError: sparse attention without a selected backend, or a backend that refuses
                the configuration (every reason is listed, as on a GPU).
        """
        # The base class replaces any backend that is not its own; ours then refuses in words.
        ours = selected_backend is not None and selected_backend.name == BACKEND_NAME
        if not attn_selector_config.use_sparse and not ours:
            # The base class takes None, though its annotation does not say so.
            return super().get_attn_backend_cls(
                selected_backend,  # type: ignore[arg-type]
                attn_selector_config,
                num_heads,
            )
        if selected_backend is None:
            raise ValueError(
                "The reference platform chooses no sparse attention backend by itself; "
                "name one, for example --attention-backend B12X_MLA_SPARSE."
            )
        path = selected_backend.get_path()
        reasons = resolve_obj_by_qualname(path).validate_configuration(
            device_capability=cls.get_device_capability(), **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(
                f"Selected backend {selected_backend.name} is not valid for this configuration. "
                f"Reason: {reasons}"
            )
        return path

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Run the CPU platform's checks, then undo what it changes for its own MLA kernels.

        The CPU platform forces 16-token blocks and switches chunked prefill and prefix caching
        off for every MLA model; neither limit applies to the backends that run here, and both
        would hide the behaviour this platform exists to show.
        """
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        block_size, prefix = cache.block_size, cache.enable_prefix_caching
        chunked, budget = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        super().check_and_update_config(vllm_config)
        cache.block_size, cache.enable_prefix_caching = block_size, prefix
        scheduler.enable_chunked_prefill = chunked
        scheduler.max_num_batched_tokens = budget
        vllm_config.parallel_config.worker_cls = WORKER_PATH
        # vLLM's default, from which its CPU platform departs: forked workers have imported
        # everything already, which takes longer than all that a small model computes.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
