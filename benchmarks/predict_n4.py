# SPDX-License-Identifier: Apache-2.0
"""Bytes, memory and times of a prefill on four H200s, written down before anyone measures them.

    python benchmarks/predict_n4.py --out benchmarks/results/prediction_h200x4.json

Needs no GPU. Bytes and memory are exact: the integers that the engine counts and reserves. Times
are estimates, of ``vllm-ckv plan``'s model for one DSA layer's exchange, selection and attention,
and of :func:`others` for everything else. The same estimates for two GPUs stand beside what was
measured there, which says how far off they are.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prefill_engine import model_folder

from vllm.entrypoints.ckv.known_rates import GPUS, LINK_EFFICIENCY
from vllm.entrypoints.ckv.output import format_table
from vllm.entrypoints.ckv.plan import layer_model, make_plan, read_model
from vllm.v1.attention.backends.mla.ckv_gather.time_model import TimeModel
from vllm.v1.attention.backends.mla.ckv_gather.windows import plan_spans

RESULTS = Path(__file__).parent / "results"
MODEL = "slice_h64"
GROUPS = ((4, 4), (4, 2))
"""TP and DCP."""

LENGTHS = (4096, 8192, 32_320, 131_072)
PROFILED_TOKENS = 32_320
"""Of the prompt in ``layer_times_h200x2.json``."""

CHUNK, MAX_NUM_SEQS, SPARE_TOKENS = 4096, 8, 256
"""As ``prefill_engine.py`` has them; ``max_model_len`` is the longest prompt and the spare."""

EXPERT_LAYERS = 2.5
"""Layers with experts of the four that a DSA layer stands for: the slice's first three of eight
have dense ones, its two DSA layers do not."""

H200 = GPUS["h200"]
LINK_GBPS = H200.link_gbps * LINK_EFFICIENCY
PROFILE = "layer_times_h200x2.json"
MEASURED = {
    ("slice_h64", "ckv"): "prefill_engine_h200x2_h64_graphs.json",
    ("slice_h64", "no_dcp"): "prefill_engine_h200x2_h64_graphs.json",
    ("slice_h64", "dcp"): "prefill_engine_h200x2.json",
    ("slice_h32", "ckv"): "prefill_engine_h200x2_graphs.json",
    ("slice_h32", "no_dcp"): "prefill_engine_h200x2_graphs.json",
    ("slice_h32", "dcp"): "prefill_engine_h200x2_graphs.json",
}
"""Where throughput on two GPUs is: with CUDA graphs, in which the host launches in time, where
such a run was made."""


@dataclass(frozen=True)
class Prompt:
    """One prompt in chunks, on one rank, in one DSA layer.

    ckv_bytes, dcp_bytes: received for the whole prompt, by a gather and by ordinary DCP.
    ckv_us, dcp_us, no_dcp_us: microseconds of exchange, selection and attention in a chunk, mean
        over the chunks. ckv_exchange_us, dcp_exchange_us: the collectives' part of them.
    """

    prompt_tokens: int
    chunks: int
    ckv_bytes: int
    dcp_bytes: int
    ckv_us: float
    dcp_us: float
    no_dcp_us: float
    ckv_exchange_us: float
    dcp_exchange_us: float


@dataclass(frozen=True)
class Throughput:
    """Tokens per second by mode, if the layers' other kernels take ``other_us``.

    other_us: of a DSA layer and the three layers between it and the next, in a full chunk.
    """

    prompt_tokens: int
    others: str
    other_us: float
    ckv: float
    dcp: float
    no_dcp: float
    ckv_to_dcp: float
    ckv_to_no_dcp: float


def chunks_of(length: int) -> list[tuple[int, int]]:
    """Visible tokens and query tokens of each chunk of a prompt."""
    return [
        (min(begin + CHUNK, length), min(CHUNK, length - begin))
        for begin in range(0, length, CHUNK)
    ]


def without_dcp(name: str, tp: int) -> TimeModel:
    """The model whose ordinary path is ours without DCP.

    A group of one exchanges nothing and merges nothing. It reads pages, which the Triton kernel
    does on Hopper too, so it has the rows of a gather that does not use FlashMLA.
    """
    gpu = replace(H200, family=80)
    alone = layer_model(read_model(str(model_folder(name))), gpu, tp=tp, dcp=1, link_gbps=LINK_GBPS)
    assert alone.rates is not None
    return replace(alone, rates=replace(alone.rates, collective=0.0, ordinary=alone.rates.gathered))


def predict_prompt(name: str, tp: int, dcp: int, length: int) -> Prompt:
    """One prompt of ``length`` tokens on the model ``name``."""
    model = layer_model(
        read_model(str(model_folder(name))), H200, tp=tp, dcp=dcp, link_gbps=LINK_GBPS
    )
    rates = model.rates
    assert rates is not None
    # What is left when links take no time is kernels.
    kernels = replace(model, rates=replace(rates, collective=0.0, byte=0.0))
    alone = without_dcp(name, tp)
    chunks = chunks_of(length)

    def costs(of: TimeModel) -> tuple[int, int, float, float]:
        found = []
        for visible, rows in chunks:
            # Of one window: max_model_len is reserved for.
            spans = plan_spans([visible], [rows], capacity=length, granule=1, num_rows=rows)
            found.append(of.costs([visible], [rows], spans))
        return (
            sum(c.gathered_bytes for c in found),
            sum(c.ordinary_bytes for c in found),
            sum(c.gathered_seconds or 0.0 for c in found) / len(found) * 1e6,
            sum(c.ordinary_seconds or 0.0 for c in found) / len(found) * 1e6,
        )

    ckv_bytes, dcp_bytes, ckv, dcp_us = costs(model)
    _, _, ckv_kernels, dcp_kernels = costs(kernels)
    times = (ckv, dcp_us, costs(alone)[3], ckv - ckv_kernels, dcp_us - dcp_kernels)
    return Prompt(length, len(chunks), ckv_bytes, dcp_bytes, *(round(time, 1) for time in times))


def predict_memory(name: str, tp: int, dcp: int) -> dict[str, int]:
    """Bytes that one rank reserves, and what they follow from."""
    plan = make_plan(
        read_model(str(model_folder(name))),
        H200,
        tp=tp,
        dcp=dcp,
        max_model_len=max(LENGTHS) + SPARE_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=CHUNK,
    )
    names = (
        "page_tokens",
        "limit_tokens",
        "capacity_records",
        "workspace_bytes",
        "scratch_bytes",
        "staging_bytes",
        "kernel_bytes",
        "ordinary_peak_bytes",
        "kv_block_bytes",
    )
    return {name: getattr(plan, name) for name in names}


def others(name: str) -> dict[str, float]:
    """Microseconds of all other kernels of a DSA layer and the three next to it, in a full chunk.

    As two GPUs took: the profile of a gather's rest and of the layers elsewhere, waiting for the
    host left out. On four, a rank has half of the heads, of the experts' and of the dense layers'
    columns. Either all kernels take half as long for it, or those of the experts alone do, which
    are known by name. A ring's all-reduce moves 2 (N - 1) / N of its tensor, so 1.5 times as much;
    those of the DSA layer are known, and taken to be alike in the others.
    """
    (profile,) = (
        row
        for row in json.loads((RESULTS / PROFILE).read_text())
        if (row["model"], row["mode"], row["link"]) == (name, "ours_ckv", "NVLink")
    )
    chunks = len(chunks_of(PROFILED_TOKENS))
    full = CHUNK * chunks / PROFILED_TOKENS
    measured = profile["microseconds"]["rest"] + profile["elsewhere"]["kernels"]
    reduces = 4 * profile["kernels"]["ncclDevKernel_AllReduce_Sum_bf16_RING_LL"]
    experts = EXPERT_LAYERS * profile["kernels"]["fused_moe_kernel"]
    found = {
        "as on two GPUs": measured,
        "all kernels halved": (measured - reduces) / 2 + 1.5 * reduces,
        "experts halved": measured - experts / 2 + reduces / 2,
    }
    return {name: round(full * microseconds, 1) for name, microseconds in found.items()}


def throughput(name: str, prompt: Prompt, others_name: str) -> Throughput:
    """What ``prompt`` gives with the :func:`others` of that name."""
    other = others(name)[others_name]
    layers = read_model(str(model_folder(name))).attention_layers
    chunks = prompt.prompt_tokens / CHUNK

    def speed(layer_us: float) -> float:
        seconds = layers * (prompt.chunks * layer_us + chunks * other) * 1e-6
        return round(prompt.prompt_tokens / seconds, 1)

    ckv, dcp, no_dcp = (speed(us) for us in (prompt.ckv_us, prompt.dcp_us, prompt.no_dcp_us))
    ratios = round(ckv / dcp, 3), round(ckv / no_dcp, 3)
    return Throughput(prompt.prompt_tokens, others_name, other, ckv, dcp, no_dcp, *ratios)


def measured_speed(name: str, mode: str, length: int) -> float:
    """Tokens per second of two GPUs."""
    (row,) = (
        row
        for row in json.loads((RESULTS / MEASURED[name, mode]).read_text())
        if (row["model"], row["mode"], row["prompt_tokens"]) == (name, f"ours_{mode}", length)
    )
    return row["tok_s"]


def check(name: str) -> dict[str, Any]:
    """The prediction for two GPUs beside what they were measured at."""
    prompt = predict_prompt(name, 2, 2, PROFILED_TOKENS)
    predicted = throughput(name, prompt, "as on two GPUs")
    modes = ("ckv", "dcp", "no_dcp")
    speeds = {mode: measured_speed(name, mode, PROFILED_TOKENS) for mode in modes}
    return {
        "model": name,
        "predicted": asdict(predicted),
        "measured": speeds
        | {
            "ckv_to_dcp": round(speeds["ckv"] / speeds["dcp"], 3),
            "ckv_to_no_dcp": round(speeds["ckv"] / speeds["no_dcp"], 3),
            "files": {mode: MEASURED[name, mode] for mode in modes},
        },
    }


def predict() -> dict[str, Any]:
    """The whole document."""
    groups = []
    for tp, dcp in GROUPS:
        prompts = [predict_prompt(MODEL, tp, dcp, length) for length in LENGTHS]
        speeds = [
            throughput(MODEL, prompt, name)
            for prompt in prompts
            for name in ("all kernels halved", "experts halved")
        ]
        groups.append(
            {
                "tp": tp,
                "dcp": dcp,
                "memory": predict_memory(MODEL, tp, dcp),
                "prompts": [asdict(prompt) for prompt in prompts],
                "throughput": [asdict(speed) for speed in speeds],
            }
        )
    return {
        "model": MODEL,
        "gpu": H200.title,
        "link_gbps": round(LINK_GBPS, 1),
        "chunk": CHUNK,
        "groups": groups,
        "two_gpus": [check("slice_h64"), check("slice_h32")],
    }


def describe(document: dict[str, Any]) -> str:
    """The text that people read."""
    lines = []
    for group in document["groups"]:
        lines += ["", f"TP {group['tp']}, DCP {group['dcp']}: bytes of a prompt, us of a chunk"]
        table = [["prompt", "full-CKV", "DCP", "us", "(DCP)", "(no DCP)", "to DCP", "to no DCP"]]
        for row in group["prompts"]:
            same = [t for t in group["throughput"] if t["prompt_tokens"] == row["prompt_tokens"]]
            times = (f"{row[name]:,.0f}" for name in ("ckv_us", "dcp_us", "no_dcp_us"))
            between = (
                f"{min(t[name] for t in same):.2f} to {max(t[name] for t in same):.2f}"
                for name in ("ckv_to_dcp", "ckv_to_no_dcp")
            )
            table.append(
                [
                    f"{row['prompt_tokens']:,}",
                    f"{row['ckv_bytes']:,}",
                    f"{row['dcp_bytes']:,}",
                    *times,
                    *between,
                ]
            )
        lines += [format_table(table)]
        lines += [", ".join(f"{name} {value:,}" for name, value in group["memory"].items())]
    lines += ["", f"two GPUs, {PROFILED_TOKENS:,} tokens"]
    names = ("ckv", "dcp", "no_dcp", "ckv_to_dcp", "ckv_to_no_dcp")
    table = [["model", "", *names]]
    for row in document["two_gpus"]:
        for kind in ("predicted", "measured"):
            cells = (row[kind][name] for name in names)
            numbers = (f"{n:,.0f}" if n > 100 else f"{n:.3f}" for n in cells)
            table.append([row["model"], kind, *numbers])
    return "\n".join([*lines, format_table(table)]).lstrip()


def main() -> int:
    """Print the prediction. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write it here as JSON")
    arguments = parser.parse_args()
    document = predict()
    print(describe(document))
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
