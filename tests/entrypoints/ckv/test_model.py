# SPDX-License-Identifier: Apache-2.0
"""The small random model: what transformers expects, and the same every time."""

import json

import pytest
import torch
from safetensors import safe_open

from vllm.entrypoints.ckv import model
from vllm.entrypoints.ckv.oracle import TransformersOracle


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "small"
    model.write_model(folder)
    return folder


def tensors(folder) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def oracle(folder):
    return TransformersOracle(folder)


def test_transformers_finds_every_weight_and_scores_finitely(oracle):
    steps = oracle.score([5, 6, 7, 8, 9], [3, 4])
    assert len(steps) == 2
    for step in steps:
        assert -20 < step.logprob < 0 and step.lead >= 0


def test_the_oracle_is_teacher_forced(oracle):
    """A token's score depends on what came before it and on nothing after it."""
    prompt = list(range(3, 43))
    one, two = oracle.score(prompt, [100, 200]), oracle.score([*prompt, 100], [200])
    assert one[1].logprob == pytest.approx(two[0].logprob, abs=1e-4)
    assert one[0].logprob == pytest.approx(oracle.score(prompt, [100])[0].logprob, abs=1e-4)


def test_the_lead_measures_from_one_likeliest_token(oracle):
    prompt = list(range(3, 43))
    steps = [oracle.score(prompt, [token])[0] for token in (3, 77, 300)]
    likeliest = {round(step.logprob + step.lead, 4) for step in steps}
    assert len(likeliest) == 1
    assert all(step.lead > 0 for step in steps)


def test_attention_reaches_the_logits(oracle):
    """Another first token of the prompt moves the answer, or nothing would be compared."""
    prompt = list(range(3, 203))
    changed = [400, *prompt[1:]]
    a, b = oracle.score(prompt, [7])[0], oracle.score(changed, [7])[0]
    assert abs(a.logprob - b.logprob) > 1e-4


@pytest.mark.parametrize(
    "missing", ["layers.1.input_layernorm.weight", "self_attn.indexer.wk.weight"]
)
def test_a_checkpoint_without_a_weight_is_refused(folder, tmp_path, missing):
    from safetensors.torch import save_file

    kept = {name: value for name, value in tensors(folder).items() if missing not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(RuntimeError, match=missing):
        TransformersOracle(tmp_path)


def test_a_checkpoint_with_a_weight_too_many_is_refused(folder, tmp_path):
    from safetensors.torch import save_file

    more = {**tensors(folder), "model.layers.0.self_attn.extra.weight": torch.zeros(2)}
    save_file(more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(RuntimeError, match=r"extra\.weight"):
        TransformersOracle(tmp_path)


def test_names_shapes_and_types_of_the_file(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config == model.small_config()
    written = tensors(folder)
    assert {name: tuple(value.shape) for name, value in written.items()} == model.weight_shapes(
        config
    )
    for name, value in written.items():
        assert value.isfinite().all(), name
        exact = ".hc_" in name or name.endswith(("A_log", "dt_bias", "bias", "compress_ape"))
        assert name.endswith("k_norm.bias") or (value.dtype == torch.float32) is exact, name


def test_the_same_seed_gives_the_same_bytes(folder, tmp_path):
    model.write_model(tmp_path / "again")
    model.write_model(tmp_path / "other", seed=4)
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    assert (tmp_path / "other" / name).read_bytes() != (folder / name).read_bytes()


def test_without_hyper_connections_only_their_weights_are_left_out(tmp_path):
    config = model.write_model(tmp_path / "plain", mhc=False)
    assert config == {**model.small_config(), "mhc": False}
    left_out = model.weight_shapes(model.small_config()).keys() - model.weight_shapes(config).keys()
    assert left_out and all(".hc_" in name or "hc_head" in name for name in left_out), left_out


def test_attention_geometry_is_the_true_one_and_every_dsa_layer_feeds_another():
    config = model.small_config()
    assert (config["kv_lora_rank"], config["index_head_dim"], config["index_kpool"]) == (
        512,
        128,
        4,
    )
    assert config["qk_rope_head_dim"] == 0
    kinds = config["layer_types"]
    assert kinds.count("full_attention") >= 2 and kinds[-1] != "full_attention"
    assert "sparse" in config["mlp_layer_types"] and config["mhc"]
    assert config["index_topk"] < 256


def test_tokens_are_bytes_behind_the_special_ids():
    assert model.tokenise(bytes(range(256))) == list(range(3, 259))
    assert model.tokenise(b"") == []
    assert model.small_config()["vocab_size"] > 255 + model.BYTE_OFFSET
