# SPDX-License-Identifier: Apache-2.0
"""Prefill of one engine with its switches thrown between prompts: what does each of them bring?

    python benchmarks/variants.py --models slice_h64 --no-eager --out variants.json

The engine starts with everything on, so that all is reserved and warmed up. Then every sample runs
once with each variant, one after the other, so that what changes on the machine changes for all of
them. That saves the starts, and the differences between engines, of ``prefill_engine.py``:

- ``ordinary``: the ordinary DCP path
- ``plain``: full-CKV, the switches off
- ``shared``: as with ``VLLM_B12X_MLA_CKV_SHARD_SELECTION=1``
- ``early``: as with ``VLLM_B12X_MLA_CKV_EARLY_EXCHANGE=1``
- ``windows``: as with ``VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS`` at a quarter of the longest prompt
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from prefill_engine import add_engine_options, make_job, model_folder, spread_of, use_small_model

from vllm.entrypoints.ckv.bench import make_prompt
from vllm.entrypoints.ckv.engine import (
    counters_of,
    difference,
    log_folder,
    run_program,
    start_engine,
)

VARIANTS = ("ordinary", "plain", "shared", "early", "windows")
ON = ("VLLM_B12X_MLA_CKV_SHARD_SELECTION", "VLLM_B12X_MLA_CKV_EARLY_EXCHANGE")


@dataclass(frozen=True)
class Row:
    """One line of the result: ``tok_s`` is the median over ``samples`` prompts.

    ratio: to ``plain``, the median over the samples' own ratios. spread: (slowest - fastest) /
    median. gathered_windows, ckv_bytes: of one prompt, the latter received by one rank in all
    layers.
    """

    model: str
    tp: int
    dcp: int
    variant: str
    prompt_tokens: int
    samples: int
    tok_s: float
    ratio: float
    spread: float
    gathered_windows: int
    ckv_bytes: int


def switch(worker: Any, variant: str, window: int) -> None:
    """Throw one rank's switches, for ``LLM.collective_rpc``.

    window: tokens, for ``windows``; at least a page of every rank.
    """
    from dataclasses import replace

    from vllm.v1.attention.backends.mla.ckv_gather.plan import CkvGather

    gather = CkvGather.of_worker(worker)
    reserved = gather.vllm_config.model_config.max_model_len
    window = max(window, gather.geometry.get().window_granule)
    gather.limits = replace(gather.limits, enabled=variant != "ordinary")
    gather.shard_selection = variant == "shared"
    gather.early_exchange = variant == "early"
    gather.max_visible_tokens = min(window, reserved) if variant == "windows" else reserved


def serve() -> None:
    """The engine's side."""
    job, llm, emit = start_engine()
    from vllm.inputs import TokensPrompt

    from vllm import SamplingParams

    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    for length in job["lengths"]:
        for sample in range(1 + job["samples"]):
            for variant in job["variants"]:
                llm.collective_rpc(switch, args=(variant, job["window"]))
                rng = random.Random(f"{length} {sample} {variant}")
                prompt = TokensPrompt(prompt_token_ids=make_prompt(length, job["vocabulary"], rng))
                before = counters_of(llm)
                began = time.perf_counter()
                llm.generate([prompt], one, use_tqdm=False)
                seconds = time.perf_counter() - began
                counters = difference(counters_of(llm), before)
                if sample:
                    emit(
                        event="sample",
                        variant=variant,
                        length=length,
                        seconds=seconds,
                        windows=counters["gathered_windows"],
                        ckv_bytes=counters["ckv_bytes"],
                    )


def rows_of(samples: list[dict[str, Any]], **about: Any) -> list[Row]:
    """The rows of one engine's samples, which are in the order in which they ran."""
    rows = []
    for length in dict.fromkeys(sample["length"] for sample in samples):
        of = {
            variant: [s for s in samples if (s["length"], s["variant"]) == (length, variant)]
            for variant in dict.fromkeys(sample["variant"] for sample in samples)
        }
        for variant, found in of.items():
            seconds = [sample["seconds"] for sample in found]
            median = statistics.median(seconds)
            pairs = zip(of.get("plain", found), found, strict=True)
            ratios = [plain["seconds"] / one["seconds"] for plain, one in pairs]
            rows.append(
                Row(
                    **about,
                    variant=variant,
                    prompt_tokens=length,
                    samples=len(found),
                    tok_s=round(length / median, 1),
                    ratio=round(statistics.median(ratios), 4),
                    spread=spread_of(seconds),
                    gathered_windows=found[-1]["windows"],
                    ckv_bytes=found[-1]["ckv_bytes"],
                )
            )
    return rows


def format_table(rows: list[Row]) -> str:
    """Tokens per second and ratios to ``plain``, by model and variant."""
    lengths = sorted({row.prompt_tokens for row in rows})
    lines = [f"{'model':<12}{'variant':<10}" + "".join(f"{length:>20,}" for length in lengths)]
    for model, variant in dict.fromkeys((row.model, row.variant) for row in rows):
        cells = {r.prompt_tokens: r for r in rows if (r.model, r.variant) == (model, variant)}
        line = "".join(f"{cells[n].tok_s:>12,.0f} {cells[n].ratio:>6.3f}x" for n in lengths)
        lines.append(f"{model:<12}{variant:<10}{line}")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_engine_options(parser, models=["slice_h64"], modes=["ours_ckv"], chunk=4096)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 32320, 131072])
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    arguments = parser.parse_args()
    arguments.environment = dict.fromkeys(ON, "1") | arguments.environment
    arguments.max_num_seqs = 8
    logs = log_folder(arguments.logs, "variants")
    if arguments.cpu:
        use_small_model(arguments, logs / "small")
    rows: list[Row] = []
    for name in arguments.models:
        model = model_folder(name)
        job = make_job(model, "ours_ckv", arguments, max(arguments.lengths) + 256)
        payload = {
            "arguments": job.arguments,
            "lengths": arguments.lengths,
            "samples": arguments.samples,
            "variants": arguments.variants,
            "window": max(arguments.lengths) // 4,
            "vocabulary": json.loads((model / "config.json").read_text())["vocab_size"],
        }
        log = logs / f"{model.name}.log"
        use_gpu = not arguments.cpu
        events = run_program(__file__, job.name, payload, job.environment, log, use_gpu=use_gpu)
        samples = [event for event in events if event["event"] == "sample"]
        found = rows_of(samples, model=model.name, tp=arguments.tp, dcp=arguments.dcp)
        rows += found
        print(format_table(found), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].isdigit():
        serve()
    else:
        raise SystemExit(main())
