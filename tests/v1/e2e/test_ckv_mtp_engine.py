# SPDX-License-Identifier: Apache-2.0
"""The real engine with an MTP layer that drafts two tokens: two ranks, gather on against off.

vLLM builds metadata once for the MTP layer and the model's own layers, and runs the MTP layer over
the target's batches: prompts gather in the model while the MTP layer stays ordinary, verification
and drafting stay ordinary altogether.
"""

import json

import pytest
import torch

from vllm.entrypoints.ckv.engine import (
    EngineJob,
    EngineResult,
    backend_arguments,
    collect,
    gpu_count,
    run_engine,
)
from vllm.entrypoints.ckv.model import tokenise, weight_shapes, write_model
from vllm.entrypoints.ckv.verify import LIMIT_VS_DCP

GATHER = "VLLM_B12X_MLA_CKV_GATHER"
SPECULATIVE, ANSWER, BUDGET = 2, 8, 101
PROMPTS = [150, 34, 7]  # tokens; the first one is cut in two


def write_models(folder):
    """A target and the checkpoint of its MTP layer; returns both folders.

    The MTP layer passes on the token that it sees, and the head names the one that follows it, so
    that some drafts are accepted.
    """
    from safetensors.torch import load_file, save_file

    target, draft = folder / "target", folder / "draft"
    config = write_model(target, mhc=False) | {"num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(config))
    depth, hidden = config["num_hidden_layers"], config["hidden_size"]
    deeper = config | {
        "num_hidden_layers": depth + 1,
        "layer_types": [*config["layer_types"], "full_attention"],
        "mlp_layer_types": [*config["mlp_layer_types"][:-1], "dense", "sparse"],
    }
    prefix = f"model.layers.{depth}."
    shapes = {name: s for name, s in weight_shapes(deeper).items() if name.startswith(prefix)}
    shapes |= {prefix + name: (hidden,) for name in ("enorm.weight", "hnorm.weight")}
    shapes[prefix + "shared_head.norm.weight"] = (hidden,)
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator) * (0.3 / shape[-1] ** 0.5)
        if name.endswith("norm.weight"):
            values = torch.ones(shape)
        exact = name.endswith(("e_score_correction_bias", "index_kpool_compress_ape"))
        tensors[name] = values.to(torch.float32 if exact else torch.bfloat16).contiguous()
    passes_on = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    tensors[prefix + "eh_proj.weight"] = passes_on.to(torch.bfloat16)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    tensors[prefix + "embed_tokens.weight"] = embedding.clone()
    draft.mkdir()
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    # The MTP layer takes its kind of MLP from the model's last layer.
    text = config | {"mlp_layer_types": [*config["mlp_layer_types"][:-1], "sparse"]}
    outer = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "torch_dtype": "bfloat16",
        "text_config": text,
    }
    (draft / "config.json").write_text(json.dumps(outer))
    return target, draft


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, EngineResult]:
    folder = tmp_path_factory.mktemp("mtp")
    target, draft = write_models(folder)
    text = b"Pack my box with five dozen liquor jugs; how vexingly quick daft zebras jump! " * 4
    groups = [[tokenise(text[length : 2 * length])] for length in PROMPTS]
    arguments = backend_arguments(target, tp=2, dcp=2) | {
        "block_size": 512,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": BUDGET,
        "kv_cache_memory_bytes": 1 << 28,
        "speculative_config": {
            "method": "mtp",
            "model": str(draft),
            "num_speculative_tokens": SPECULATIVE,
        },
    }
    found = {}
    for gather in ("1", "0"):
        job = EngineJob(
            f"mtp, gather {gather}",
            arguments,
            {GATHER: gather, f"{GATHER}_MIN_TOKENS": "0"},
            groups,
            ANSWER,
        )
        log = folder / f"gather-{gather}.log"
        found[gather] = collect(run_engine(job, log, use_gpu=gpu_count() >= 2))
    return found


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_tokens_and_log_probabilities_are_those_without_the_gather(results, number):
    on, off = (results[gather].groups[number] for gather in ("1", "0"))
    assert on.tokens == off.tokens and len(on.tokens[0]) == ANSWER
    pairs = zip(on.logprobs[0], off.logprobs[0], strict=True)
    assert max(abs(mine - other) for mine, other in pairs) <= LIMIT_VS_DCP


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_prompts_gather_and_verification_does_not(results, number):
    on, off = (results[gather].groups[number].counters for gather in ("1", "0"))
    assert on["gathered_batches"] == -(-PROMPTS[number] // BUDGET)
    assert on["gathered_query_tokens"] == PROMPTS[number]
    assert off["gathered_batches"] == 0
    assert {k for k, v in on["ordinary_batches"].items() if v} == {"decode_only"}
    # The MTP layer's ordinary collectives are not the prompts' to count.
    assert on["dcp_bytes"] == 0 < off["dcp_bytes"]


def test_some_drafts_were_accepted_and_some_rejected(results):
    """Each step gives one token to three: neither of the two alone would test both."""
    groups = results["1"].groups
    steps = sum(group.counters["ordinary_batches"]["decode_only"] for group in groups)
    after_the_first = len(PROMPTS) * (ANSWER - 1)
    assert after_the_first / (1 + SPECULATIVE) < steps < after_the_first
