# SPDX-License-Identifier: Apache-2.0
"""Choosing the backend, and being refused, through vLLM's public ways in.

Whole engines that were started by keyword and by ``attention_config``, the latter in a spawned
engine core, are in ``tests/v1/e2e``. Here each way ends where an engine's layer asks for its
backend: in a spawned process that got the configuration as an argument, as vLLM's engine core and
workers do, and has loaded no plugin before it unpickles it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.entrypoints.ckv.engine import base_environment
from vllm.entrypoints.ckv.model import small_config

BACKEND = "B12X_MLA_SPARSE"

PROGRAM = '''
import json, multiprocessing, pickle, sys

from vllm.platforms.ckv_reference import declare_torchvision_ops


def make_config(model, ways):
    """A configuration from command-line flags (list) or from keywords (dictionary)."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if isinstance(ways, list):
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        arguments = EngineArgs.from_cli_args(
            parser.parse_args(["--model", model, "--skip-tokenizer-init", *ways])
        )
    else:
        arguments = EngineArgs(model=model, skip_tokenizer_init=True, **ways)
    return arguments.create_engine_config()


def select(vllm_config):
    """What a sparse MLA layer of this configuration gets: the class, or the refusal."""
    from vllm.config import set_current_vllm_config
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.selector import get_attn_backend

    load_general_plugins()
    text = vllm_config.model_config.hf_text_config
    sparse = hasattr(text, "index_topk")
    with set_current_vllm_config(vllm_config):
        try:
            backend = get_attn_backend(
                text.kv_lora_rank if sparse else 64,
                vllm_config.model_config.dtype,
                vllm_config.cache_config.cache_dtype,
                use_mla=sparse,
                use_sparse=sparse,
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return f"{backend.__module__}.{backend.__qualname__}"


def child(vllm_config, connection):
    import vllm.plugins

    assert not vllm.plugins.plugins_loaded, "the test would prove nothing"
    connection.send([vllm_config.attention_config.backend.name, select(vllm_config)])


if __name__ == "__main__":
    declare_torchvision_ops()
    mode, *requests = sys.argv[1:]
    for request in requests:
        try:
            vllm_config = make_config(*json.loads(request))
        except Exception as error:
            print("RESULT", json.dumps(f"{type(error).__name__}: {error}"))
            continue
        if mode == "here":
            print("RESULT", json.dumps(select(vllm_config)))
            continue
        context = multiprocessing.get_context("spawn")
        parent_end, child_end = context.Pipe()
        process = context.Process(target=child, args=(vllm_config, child_end))
        process.start()
        child_end.close()
        print("RESULT", json.dumps(parent_end.recv()), flush=True)
        process.join()
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selection")
    (folder / "program.py").write_text(PROGRAM)
    configs = {
        "glm": small_config(),
        "deepseek": {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "torch_dtype": "bfloat16",
            "vocab_size": 512,
            "hidden_size": 256,
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 512,
            "q_lora_rank": 128,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "index_topk": 128,
            "index_head_dim": 128,
            "index_n_heads": 16,
            "max_position_embeddings": 4096,
        },
        "llama": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "vocab_size": 512,
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "max_position_embeddings": 4096,
        },
    }
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def run(folder: Path, mode: str, requests: list[tuple], **flags: str) -> list:
    """What each request (model, way) gives, in one fresh process with ``flags`` in its environment.

    mode: ``spawn`` hands every configuration to a process of its own, ``here`` does not.
    """
    result = subprocess.run(
        [
            sys.executable,
            str(folder / "program.py"),
            mode,
            *(json.dumps([str(folder / model), way]) for model, way in requests),
        ],
        env=base_environment(1, use_gpu=False) | flags,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(requests), result.stdout + result.stderr
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


CLASS = "vllm.v1.attention.backends.mla.b12x_mla_sparse.B12xMLASparseBackend"
DTYPE = {"kv_cache_dtype": "fp8_ds_mla"}


def test_flag_keyword_and_attention_config_reach_a_spawned_process(folder):
    ways: list = [
        ["--attention-backend", BACKEND, "--kv-cache-dtype", "fp8_ds_mla"],
        {"attention_backend": BACKEND, **DTYPE},
        {"attention_config": {"backend": BACKEND}, **DTYPE},
    ]
    assert run(folder, "spawn", [("glm", way) for way in ways]) == [[BACKEND, CLASS]] * 3


def keywords(**changes) -> dict:
    return {"attention_backend": BACKEND, **DTYPE, **changes}


CONNECTOR = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}

REFUSED = {
    "interleave": (
        "glm",
        keywords(
            tensor_parallel_size=2, decode_context_parallel_size=2, cp_kv_cache_interleave_size=3
        ),
        "--cp-kv-cache-interleave-size 3 would split an index pool of 4 tokens",
    ),
    "auto": (
        "glm",
        keywords(kv_cache_dtype="auto"),
        "--kv-cache-dtype auto; pass --kv-cache-dtype fp8_ds_mla, or nvfp4_ds_mla on GPUs of "
        "compute capability 12.x with b12x",
    ),
    # vLLM replaces this one by another format, which is then refused by its own name.
    "fp8": ("glm", keywords(kv_cache_dtype="fp8"), "pass --kv-cache-dtype fp8_ds_mla"),
    "connector": (
        "glm",
        keywords(kv_transfer_config=CONNECTOR),
        "with a KV connector, whose layer-wise loads it would not wait for",
    ),
    "prefill context parallelism": (
        "glm",
        keywords(prefill_context_parallel_size=2),
        "prefill context parallelism of 2 splits the queries as well, which no batch of this "
        "backend can do; set --prefill-context-parallel-size 1",
    ),
    "overlapping micro-batches": (
        "glm",
        # vLLM wants one of these for micro-batches, and drops --enable-dbo on CPUs.
        keywords(ubatch_size=2, all2all_backend="deepep_low_latency"),
        "full-CKV gather does not run with overlapping micro-batches, whose collectives would "
        "interleave; drop --enable-dbo and --ubatch-size",
    ),
    "another sparse model": (
        "deepseek",
        keywords(),
        "model type 'deepseek_v32' is not supported; only glm5_next is",
    ),
    "a model without sparse attention": (
        "llama",
        keywords(kv_cache_dtype="auto"),
        "model type 'llama' is not supported; only glm5_next is",
    ),
}


@pytest.fixture(scope="module")
def answers(folder):
    """What the refused configurations give, and one that is right."""
    requests = [(model, way) for model, way, _ in REFUSED.values()]
    requests.append(("glm", keywords()))
    results = run(folder, "here", requests, VLLM_B12X_MLA_CKV_GATHER="1")
    return dict(zip([*REFUSED, "right"], results, strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_cannot_work_is_refused_in_words(answers, name):
    assert answers[name].startswith("ValueError: ") and BACKEND in answers[name]
    assert REFUSED[name][2] in answers[name]


def test_the_right_configuration_beside_them_is_accepted(answers):
    assert answers["right"] == CLASS


def test_auto_starts_where_one_is_refused(folder):
    requests: list[tuple] = [("glm", keywords(kv_transfer_config=CONNECTOR))]
    assert run(folder, "here", requests, VLLM_B12X_MLA_CKV_GATHER="auto") == [CLASS]


def test_a_malformed_flag_stops_the_engines_arguments(folder):
    name = "VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS"
    (result,) = run(folder, "here", [("glm", keywords())], **{name: "64k"})
    accepted = "an integer from 1 to 524288"
    assert result == f"ValueError: {name}='64k' is not accepted: set it to {accepted}"


def test_other_backends_are_chosen_as_without_us(folder):
    """The plugin is loaded, or kept out by VLLM_PLUGINS: the same classes for another model."""
    requests: list[tuple] = [("llama", {}), ("llama", {"attention_backend": "TRITON_ATTN"})]
    with_us = run(folder, "here", requests)
    *without, unknown = run(
        folder, "here", [*requests, ("glm", keywords())], VLLM_PLUGINS="ckv_reference"
    )
    assert with_us == without
    assert all(BACKEND not in result for result in with_us)
    # Proof that it was kept out.
    assert BACKEND in unknown and "Error" in unknown
