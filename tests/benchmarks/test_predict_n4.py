# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/predict_n4.py says, against its file and against what two GPUs counted."""

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def module(load_benchmark):
    return load_benchmark("predict_n4")


def test_bytes_and_memory_of_the_file_are_those_of_the_code(module):
    document = json.loads((RESULTS / "prediction_h200x4.json").read_text())
    assert [(group["tp"], group["dcp"]) for group in document["groups"]] == [(4, 4), (4, 2)]
    for group in document["groups"]:
        ranks = group["tp"], group["dcp"]
        assert group["memory"] == module.predict_memory(document["model"], *ranks)
        assert [row["prompt_tokens"] for row in group["prompts"]] == [4096, 8192, 32_320, 131_072]
        for row in group["prompts"]:
            now = module.predict_prompt(document["model"], *ranks, row["prompt_tokens"])
            assert (row["ckv_bytes"], row["dcp_bytes"]) == (now.ckv_bytes, now.dcp_bytes)


def test_the_tables_are_those_of_the_file():
    document = json.loads((RESULTS / "prediction_h200x4.json").read_text())
    text = (RESULTS / "README.md").read_text()
    tables = text[text.index("## Prediction for four GPUs") :].split("\n## ")[0]
    rows = [{c.strip() for c in line.split("|")} for line in tables.splitlines() if "|" in line]
    for group in document["groups"]:
        for prompt in group["prompts"]:
            length = f"{prompt['prompt_tokens']:,}"
            cells = {f"{prompt[name]:,}" for name in ("ckv_bytes", "dcp_bytes")}
            assert any(cells < row and length in row for row in rows)
            cells = {
                f"{prompt[f'{path}_us']:,.0f} ({prompt[f'{path}_exchange_us']:,.0f})"
                for path in ("ckv", "dcp")
            }
            cells.add(f"{prompt['no_dcp_us']:,.0f}")
            assert any(cells < row and length in row for row in rows)
        for name, value in group["memory"].items():
            assert f"{value:,}" in tables or name == "kv_block_bytes"
        halved, experts = (row for row in group["throughput"] if row["prompt_tokens"] == 32_320)
        for name in ("ckv_to_dcp", "ckv_to_no_dcp"):
            cells = {f"{row[name]:.2f}" for row in (halved, experts)}
            assert any(cells < row and f"DCP{group['dcp']}" in " ".join(row) for row in rows)
    for row in document["two_gpus"]:
        for kind in ("predicted", "measured"):
            ratios = {f"{row[kind][name]:.3f}" for name in ("ckv_to_dcp", "ckv_to_no_dcp")}
            assert any({f"{row[kind]['ckv']:,.0f}"} | ratios < cells for cells in rows)


def test_the_first_chunk_by_hand(module):
    """4,096 tokens on four ranks: the records and keys of three others; queries, outputs with their
    log-sum-exps, and candidates."""
    prompt = module.predict_prompt("slice_h64", 4, 4, 4096)
    assert prompt.ckv_bytes == 3 * (1024 * 528 + 256 * 132)
    assert prompt.dcp_bytes == 3 * 4096 * (16 * 1024 + 16 * 1024 + 64 * 4 + 512 * 8)


def test_two_gpus_counted_the_predicted_bytes(module):
    found = 0
    for row in json.loads((RESULTS / "prefill_engine_h200x2.json").read_text()):
        if row["mode"] in ("ours_ckv", "ours_dcp"):
            name = f"{row['mode'].removeprefix('ours_')}_bytes"
            predicted = module.predict_prompt(row["model"], 2, 2, row["prompt_tokens"])
            assert row[name] == getattr(predicted, name)
            found += 1
    assert found == 16


def test_a_gather_and_no_dcp_differ_by_what_the_model_says(module):
    """Without DCP the selection is that of a gather, and the attention the Triton kernel's."""
    prompt = module.predict_prompt("slice_h64", 4, 4, 4096)
    assert module.without_dcp("slice_h64", 4).bytes.ordinary(4096) == 0
    # 16 heads take 3,352 us on pages and 2,168 of gathered records if all rows see 2,051 tokens; a
    # first chunk has 0.75 of these. A gather exchanges, unpacks and copies besides.
    besides = prompt.ckv_exchange_us + 80 + 20
    assert prompt.no_dcp_us - prompt.ckv_us == pytest.approx(
        0.75 * (3352 - 2168) - besides, rel=0.03
    )


def test_others_are_scaled_as_their_docstring_says(module, monkeypatch, tmp_path):
    profile = {
        "model": "slice_h64",
        "mode": "ours_ckv",
        "link": "NVLink",
        "microseconds": {"rest": 1000.0},
        "elsewhere": {"kernels": 3000.0},
        "kernels": {
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": 100.0,
            "fused_moe_kernel": 400.0,
        },
    }
    (tmp_path / module.PROFILE).write_text(json.dumps([profile]))
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    # The profiled chunks have 4,040 tokens on average.
    full = 4096 / 4040
    assert module.others("slice_h64") == pytest.approx(
        {
            "as on two GPUs": 4000 * full,
            "all kernels halved": (3600 / 2 + 600) * full,
            "experts halved": (4000 - 500 + 200) * full,
        },
        abs=0.05,
    )


def test_throughput_is_tokens_by_the_time_of_both_layers(module, monkeypatch):
    monkeypatch.setattr(module, "others", lambda name: {"some": 1000.0})
    prompt = module.Prompt(8192, 2, 0, 0, 500.0, 1500.0, 1000.0, 0.0, 0.0)
    speed = module.throughput("slice_h64", prompt, "some")
    # Two chunks, two layers, each with its own and the others' time.
    assert speed.ckv == pytest.approx(8192 / (4 * 1500e-6), abs=0.1)
    assert speed.dcp == pytest.approx(8192 / (4 * 2500e-6), abs=0.1)
    assert (speed.ckv_to_dcp, speed.ckv_to_no_dcp) == (1.667, 1.333)
