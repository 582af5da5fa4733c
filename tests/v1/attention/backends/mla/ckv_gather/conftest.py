# SPDX-License-Identifier: Apache-2.0
"""Gathers built from small configurations, as a process has them after its profiling run."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from vllm.platforms.ckv_reference import declare_torchvision_ops

# vLLM's modules import torchvision, which needs this beside a CPU build of torch.
declare_torchvision_ops()


def configuration(world: int = 2, **changes) -> SimpleNamespace:
    """The parts of a VllmConfig that the gather reads; ``changes`` replace leaves by name."""
    leaves = {
        "decode_context_parallel_size": world,
        "cp_kv_cache_interleave_size": 4,
        "dcp_comm_backend": "a2a",
        "prefill_context_parallel_size": 1,
        "use_ubatching": False,
        "tensor_parallel_size": world,
        "num_attention_heads": 8,
        "index_topk": 128,
        "max_model_len": 1000,
        "index_kpool": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_num_scheduled_tokens": None,
        "num_speculative_tokens": 0,
        "block_size": 256,
        "cache_dtype": "fp8_ds_mla",
        "mamba_cache_mode": "none",
        "kv_transfer_config": None,
        "additional_config": {},
        **changes,
    }

    def part(*names: str, **more) -> SimpleNamespace:
        return SimpleNamespace(**{name: leaves[name] for name in names}, **more)

    return part(
        "kv_transfer_config",
        "additional_config",
        "num_speculative_tokens",
        parallel_config=part(
            "decode_context_parallel_size",
            "cp_kv_cache_interleave_size",
            "dcp_comm_backend",
            "prefill_context_parallel_size",
            "use_ubatching",
            "tensor_parallel_size",
        ),
        model_config=part(
            "max_model_len",
            hf_text_config=part(
                "index_kpool", "index_topk", "num_attention_heads", model_type="glm5_next"
            ),
        ),
        scheduler_config=part("max_num_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens"),
        cache_config=part("block_size", "cache_dtype", "mamba_cache_mode"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


@pytest.fixture(scope="module")
def gather_on():
    """The flag on, the backend registered, vLLM quiet; gives the MonkeyPatch for more flags."""
    import ckv_fuzz

    from vllm.plugins.b12x_mla_sparse import register

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_B12X_MLA_CKV_GATHER", "1")
        register()
        with ckv_fuzz.quiet():
            yield patch


@pytest.fixture
def make_config() -> Callable:
    """:func:`configuration`."""
    return configuration


@pytest.fixture
def make_gather(monkeypatch) -> Callable:
    """Builds a gather with the flag on; ``freeze=False`` leaves its geometry open."""
    from vllm.plugins.b12x_mla_sparse import register
    from vllm.v1.attention.backends.mla.ckv_gather import geometry as g
    from vllm.v1.attention.backends.mla.ckv_gather.plan import CkvGather

    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", "1")
    register()

    def make(world: int = 2, freeze: bool = True, **changes) -> CkvGather:
        gather = CkvGather(configuration(world, **changes))
        if freeze:
            gather.geometry.freeze(g.PageGeometry(256, g.FP8_DS_MLA, 4, 4, world))
        return gather

    return make


@pytest.fixture(scope="session")
def make_common() -> Callable:
    """Builds the metadata of a step from query and sequence lengths, padding rows appended."""

    def common(query_lens, seq_lens, prefilling=None, *, pad_rows: int = 0, pad_tokens: int = 0):
        starts = torch.tensor([0, *query_lens, *[0] * pad_rows]).cumsum(0).to(torch.int32)
        # What lies past the requests is stale in vLLM's buffers.
        lengths = torch.tensor([*seq_lens, *[777] * pad_rows], dtype=torch.int32)
        flags = [True] * len(seq_lens) if prefilling is None else list(prefilling)
        return SimpleNamespace(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            is_prefilling=torch.tensor([*flags, *[False] * pad_rows]),
            num_actual_tokens=sum(query_lens) + pad_tokens,
            num_reqs=len(lengths),
        )

    return common
