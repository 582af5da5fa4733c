# SPDX-License-Identifier: Apache-2.0
"""A small random glm5_next model: every kind of layer, true attention geometry, minutes on a CPU.

Latent 512, index key 128, four tokens to a pool, as in GLM-5.3-Flash. :data:`SMALL` selects few
tokens, so that selection is sparse at a few hundred; :data:`FOR_B12X` selects as many as the true
model, because b12x has no kernel for fewer. Both DSA layers are followed by another layer:
what the gather does to a prompt's inner tokens then reaches the logits.

Random weights amplify rounding, and would hide an error behind it. Three choices keep the
comparison sharp without making it blind to attention: every expert is active (a router's choice
flips at near ties), hidden states enter the logits at a moderate scale, and the attention outputs
are as large as the other branches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BYTE_OFFSET = 3
"""Ids 0, 1, 2 are padding, end and start; byte b is token ``b + BYTE_OFFSET``."""

HEAD_SCALE = 0.36 / 16
"""Puts the likeliest logit near 5 (embeddings have norm 16): some 20 % of the probability."""


@dataclass(frozen=True)
class Sizes:
    """What differs between the models here.

    heads: attention heads of all ranks. index_topk: tokens that a query selects.
    linear_heads: KDA heads of all ranks; their state is what vLLM aligns pages to.
    """

    heads: int
    index_topk: int
    linear_heads: int = 4


SMALL = Sizes(heads=8, index_topk=128)
FOR_B12X = Sizes(heads=32, index_topk=2048)
"""b12x has kernels for multiples of 8 heads a rank (of up to four ranks), and for 512 pools."""

_FLOAT32_SUFFIXES = ("A_log", "dt_bias", "e_score_correction_bias", "index_kpool_compress_ape")


def small_config(*, mhc: bool = True, sizes: Sizes = SMALL) -> dict[str, Any]:
    """The model's ``config.json``.

    mhc: hyper-connections, as in GLM-5.3-Flash; vLLM's CUDA build needs tilelang for them.
    """
    layers = ["full_attention", "linear_attention"] * 2
    numbered = list(enumerate(layers, start=1))
    return {
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next_text",
        "torch_dtype": "bfloat16",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": len(layers),
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "index_topk": sizes.index_topk,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_kpool": 4,
        "indexer_rope_interleave": True,
        "layer_types": layers,
        "mlp_layer_types": ["dense"] + ["sparse"] * (len(layers) - 2) + ["dense"],
        "linear_head_dim": 128,
        "linear_num_heads": sizes.linear_heads,
        "linear_attn_config": {
            "head_dim": 128,
            "num_heads": sizes.linear_heads,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [i for i, kind in numbered if kind == "linear_attention"],
            "full_attn_layers": [i for i, kind in numbered if kind == "full_attention"],
        },
        "max_position_embeddings": 8192,
        # Read by vLLM, unknown to transformers.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "mla_use_nope": True,
        "mhc": mhc,
        # bfloat16 logits are 0.03 apart at 4: coarser than what is to be measured.
        "head_dtype": "float32",
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def _linear_attention_shapes(prefix: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config["hidden_size"], config["linear_head_dim"]
    heads = config["linear_num_heads"]
    width, kernel = heads * head_dim, config["linear_attn_config"]["short_conv_kernel_size"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.A_log": (heads,),
        f"{prefix}.dt_bias": (width,),
        f"{prefix}.b_proj.weight": (heads, hidden),
        f"{prefix}.o_norm.weight": (head_dim,),
        f"{prefix}.o_proj.weight": (hidden, width),
    }
    for gate in ("f", "g"):
        shapes[f"{prefix}.{gate}_a_proj.weight"] = (head_dim, hidden)
        shapes[f"{prefix}.{gate}_b_proj.weight"] = (width, head_dim)
    for part in ("q", "k", "v"):
        shapes[f"{prefix}.{part}_proj.weight"] = (width, hidden)
        shapes[f"{prefix}.{part}_conv1d.weight"] = (width, 1, kernel)
    return shapes


def _full_attention_shapes(prefix: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, query_rank = config["kv_lora_rank"], config["q_lora_rank"]
    key, value = config["qk_nope_head_dim"], config["v_head_dim"]
    index_dim, index_heads = config["index_head_dim"], config["index_n_heads"]
    return {
        f"{prefix}.q_a_proj.weight": (query_rank, hidden),
        f"{prefix}.q_a_layernorm.weight": (query_rank,),
        f"{prefix}.q_b_proj.weight": (heads * key, query_rank),
        f"{prefix}.kv_a_proj_with_mqa.weight": (latent, hidden),
        f"{prefix}.kv_a_layernorm.weight": (latent,),
        f"{prefix}.kv_b_proj.weight": (heads * (key + value), latent),
        f"{prefix}.o_proj.weight": (hidden, heads * value),
        f"{prefix}.indexer.wq_b.weight": (index_heads * index_dim, query_rank),
        f"{prefix}.indexer.wk.weight": (index_dim, hidden),
        f"{prefix}.indexer.k_norm.weight": (index_dim,),
        f"{prefix}.indexer.k_norm.bias": (index_dim,),
        f"{prefix}.indexer.weights_proj.weight": (index_heads, hidden),
        f"{prefix}.indexer.index_kpool_compress_gate": (index_dim, hidden),
        f"{prefix}.indexer.index_kpool_compress_ape": (config["index_kpool"], index_dim),
    }


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    streams = 4  # residual streams of mHC; its maps have 2 x streams + streams^2 outputs
    maps = 2 * streams + streams * streams
    for i, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{i}"
        attention = f"{layer}.self_attn"
        if kind == "linear_attention":
            shapes |= _linear_attention_shapes(attention, config)
        else:
            shapes |= _full_attention_shapes(attention, config)
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if config["mhc"]:
            for branch in ("attn", "ffn"):
                shapes[f"{layer}.hc_{branch}_base"] = (maps,)
                shapes[f"{layer}.hc_{branch}_fn"] = (maps, streams * hidden)
                shapes[f"{layer}.hc_{branch}_scale"] = (3,)
        if config["mlp_layer_types"][i] == "dense":
            shapes |= _mlp_shapes(f"{layer}.mlp", hidden, config["intermediate_size"])
            continue
        width = config["moe_intermediate_size"]
        experts = config["n_routed_experts"]
        shapes[f"{layer}.mlp.gate.weight"] = (experts, hidden)
        shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (experts,)
        for expert in range(experts):
            shapes |= _mlp_shapes(f"{layer}.mlp.experts.{expert}", hidden, width)
        shared = width * config["n_shared_experts"]
        shapes |= _mlp_shapes(f"{layer}.mlp.shared_experts", hidden, shared)
    return shapes


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith(("layernorm.weight", "norm.weight")):
        return torch.ones(shape)
    if name == "model.embed_tokens.weight":
        return values
    if "conv1d" in name:
        return values * 0.4
    if values.dim() > 1:
        return values * (0.7 / shape[-1] ** 0.5)
    return values * 0.1


def write_model(
    folder: Path, *, mhc: bool = True, sizes: Sizes = SMALL, seed: int = 3
) -> dict[str, Any]:
    """Write ``config.json`` and ``model.safetensors`` with random weights; return the config."""
    from safetensors.torch import save_file

    config = small_config(mhc=mhc, sizes=sizes)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in weight_shapes(config).items():
        keep = name.endswith(_FLOAT32_SUFFIXES) or ".hc_" in name
        dtype = torch.float32 if keep else torch.bfloat16
        tensors[name] = _draw(name, shape, generator).to(dtype).contiguous()
    # The likeliest next token is a fixed function of the last one: row j of the head is the
    # embedding of the token that j follows.
    embedding = tensors["model.embed_tokens.weight"]
    followed = torch.randperm(config["vocab_size"], generator=generator)
    tensors["lm_head.weight"] = (embedding[followed] * HEAD_SCALE).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return config


def tokenise(text: bytes) -> list[int]:
    """One token per byte."""
    return [byte + BYTE_OFFSET for byte in text]
