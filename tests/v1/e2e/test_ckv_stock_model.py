# SPDX-License-Identifier: Apache-2.0
"""A model that has nothing to do with us: the same tokens and bits with our plugin and without.

On a GPU with stock's kernels; else on the reference platform with stock's CPU backend, whose three
compiled operations the CUDA build of vLLM lacks and torch functions stand in for.
"""

import json
import os

import pytest

from vllm.entrypoints.ckv.engine import EngineJob, collect, gpu_count, run_engine

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}

STAND_INS = """
import torch
import vllm._custom_ops as ops


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, isa, **unused):
    size = key_cache.shape[2]
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // size, :, slot % size] = key[row]
            value_cache[slot // size, :, slot % size] = value[row]


def attention(query, key_cache, value_cache, output, query_start_loc, seq_lens, scale, causal,
              alibi_slopes, sliding_window, block_table, softcap, **unused):
    starts, size = query_start_loc.tolist(), key_cache.shape[2]
    for request, length in enumerate(seq_lens.tolist()[: len(starts) - 1]):
        begin, end = starts[request], starts[request + 1]
        pages = block_table[request, : -(-length // size)].long()
        keys, values = (
            cache[pages].transpose(1, 2).flatten(0, 1)[:length].float()
            for cache in (key_cache, value_cache)
        )
        queries = query[begin:end].float()
        group = queries.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
        scores = torch.einsum("thd,shd->hts", queries, keys) * scale
        mask = torch.ones(end - begin, length, dtype=torch.bool).triu(length - (end - begin) + 1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        rows = torch.einsum("hts,shd->thd", weights, values)
        output[begin:end] = rows.reshape(output[begin:end].shape).to(output.dtype)


ops.cpu_attn_get_scheduler_metadata = lambda **unused: torch.empty(0)
ops.cpu_attn_reshape_and_cache = reshape_and_cache
ops.cpu_attention_with_kv_cache = attention


class Extension:
    pass
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What the engine gives, and its log: with every plugin, and with ours kept out."""
    folder = tmp_path_factory.mktemp("stock-model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "ckv_stand_ins.py").write_text(STAND_INS)
    use_gpu = gpu_count() >= 1
    arguments = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "load_format": "dummy",
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 1 << 26,
    }
    if not use_gpu:
        arguments["worker_extension_cls"] = "ckv_stand_ins.Extension"
        # Layers in torch: their compiled CPU operations are missing as well.
        arguments["compilation_config"] = {"custom_ops": ["none"]}
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    prompts = [[list(range(3, 103))], [list(range(40, 60)), list(range(90, 140))]]
    found = {}
    for name, environment in (
        ("with", {"VLLM_B12X_MLA_CKV_GATHER": "1"}),
        ("without", {"VLLM_B12X_MLA_CKV_GATHER": "1", "VLLM_PLUGINS": "ckv_reference"}),
    ):
        log = folder / f"{name}.log"
        job = EngineJob(name, arguments, {"PYTHONPATH": path} | environment, prompts, 4)
        found[name] = collect(run_engine(job, log, use_gpu=use_gpu)), log.read_text()
    return found


def test_tokens_and_log_probabilities_are_equal_bit_for_bit(outcomes):
    with_us, without = (outcomes[name][0].groups for name in ("with", "without"))
    assert [group.tokens for group in with_us] == [group.tokens for group in without]
    assert [group.logprobs for group in with_us] == [group.logprobs for group in without]
    assert [len(tokens) for group in with_us for tokens in group.tokens] == [4, 4, 4]


def test_our_plugin_was_there_in_one_of_them_only(outcomes):
    """vLLM names variables that nobody registered."""
    unknown = "Unknown vLLM environment variable detected: VLLM_B12X_MLA_CKV_GATHER"
    assert unknown not in outcomes["with"][1]
    assert unknown in outcomes["without"][1]
    for _, log in outcomes.values():
        assert "full-CKV gather" not in log
