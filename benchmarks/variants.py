# SPDX-License-Identifier: Apache-2.0
"""Prefill of one engine with its switches thrown between prompts: what does each of them bring?

    python benchmarks/variants.py --models slice_h64 --no-eager --out variants.json

The engine starts with everything on, so that all is reserved and warmed up. Then every sample runs
once with each variant, one after the other, so that what changes on the machine changes for all of
them. That saves the starts, and the differences between engines, of ``prefill_engine.py``.

A shape is ``[COUNTx][PREFIX+]TOKENS``: so many prompts at once, a cached prefix, and what is
computed of each. Shapes with a prefix have an engine of their own, because prefix caching changes
how vLLM cuts prompts into chunks. The variants:

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
import re
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import product
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
SHAPES = ("4096", "8192", "32320", "131072", "4x6000", "130560+512")
"""The last prefix is thirty pages of the slices at TP2."""

ON = ("VLLM_B12X_MLA_CKV_SHARD_SELECTION", "VLLM_B12X_MLA_CKV_EARLY_EXCHANGE")


@dataclass(frozen=True)
class Row:
    """One line of the result: ``tok_s`` is the median over ``samples``, of computed tokens.

    cached_tokens: of every prompt, found in the prefix cache. ratio: to ``plain``, the median over
    the samples' own ratios. spread: (slowest - fastest) / median. gathered_windows, ckv_bytes: of
    one sample, the latter received by one rank in all layers.
    """

    model: str
    tp: int
    dcp: int
    variant: str
    shape: str
    cached_tokens: int
    samples: int
    tok_s: float
    ratio: float
    spread: float
    gathered_windows: int
    ckv_bytes: int


@dataclass(frozen=True)
class Shape:
    """``count`` prompts at once: ``prefix`` tokens that all samples share, then their own."""

    count: int
    prefix: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Of ``[COUNTx][PREFIX+]TOKENS``."""
        found = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)\+)?(\d+)", text)
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r} is no [COUNTx][PREFIX+]TOKENS")
        count, prefix, tokens = found.groups()
        shape = cls(int(count or 1), int(prefix or 0), int(tokens))
        if not (shape.count and shape.tokens):
            raise argparse.ArgumentTypeError(f"{text!r} has no tokens")
        return shape

    def __str__(self) -> str:
        count = f"{self.count}x" if self.count > 1 else ""
        return f"{count}{f'{self.prefix}+' if self.prefix else ''}{self.tokens}"


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

    def random_tokens(count: int, seed: str) -> list[int]:
        return make_prompt(count, job["vocabulary"], random.Random(seed)) if count else []

    for text in job["shapes"]:
        shape = Shape.parse(text)
        prefix = random_tokens(shape.prefix, text)
        if prefix:
            llm.generate([TokensPrompt(prompt_token_ids=prefix)], one, use_tqdm=False)
        for sample in range(1 + job["samples"]):
            for variant in job["variants"]:
                llm.collective_rpc(switch, args=(variant, job["window"]))
                prompts = [
                    TokensPrompt(
                        prompt_token_ids=prefix
                        + random_tokens(shape.tokens, f"{text} {sample} {variant} {number}")
                    )
                    for number in range(shape.count)
                ]
                before = counters_of(llm)
                began = time.perf_counter()
                outputs = llm.generate(prompts, one, use_tqdm=False)
                seconds = time.perf_counter() - began
                counters = difference(counters_of(llm), before)
                if sample:
                    emit(
                        event="sample",
                        variant=variant,
                        shape=text,
                        seconds=seconds,
                        cached_tokens=max(output.num_cached_tokens or 0 for output in outputs),
                        windows=counters["gathered_windows"],
                        ckv_bytes=counters["ckv_bytes"],
                    )


def rows_of(samples: list[dict[str, Any]], **about: Any) -> list[Row]:
    """The rows of one engine's samples, which are in the order in which they ran."""
    rows = []
    for text in dict.fromkeys(sample["shape"] for sample in samples):
        shape = Shape.parse(text)
        of = {
            variant: [s for s in samples if (s["shape"], s["variant"]) == (text, variant)]
            for variant in dict.fromkeys(sample["variant"] for sample in samples)
        }
        for variant, found in of.items():
            seconds = [sample["seconds"] for sample in found]
            cached = found[-1]["cached_tokens"]
            computed = shape.count * (shape.prefix + shape.tokens - cached)
            pairs = zip(of.get("plain", found), found, strict=True)
            ratios = [plain["seconds"] / one["seconds"] for plain, one in pairs]
            rows.append(
                Row(
                    **about,
                    variant=variant,
                    shape=text,
                    cached_tokens=cached,
                    samples=len(found),
                    tok_s=round(computed / statistics.median(seconds), 1),
                    ratio=round(statistics.median(ratios), 4),
                    spread=spread_of(seconds),
                    gathered_windows=found[-1]["windows"],
                    ckv_bytes=found[-1]["ckv_bytes"],
                )
            )
    return rows


def format_table(rows: list[Row]) -> str:
    """Tokens per second and ratios to ``plain``, by model and variant."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    lines = [f"{'model':<12}{'variant':<10}" + "".join(f"{shape:>20}" for shape in shapes)]
    for model, variant in dict.fromkeys((row.model, row.variant) for row in rows):
        cells = {r.shape: r for r in rows if (r.model, r.variant) == (model, variant)}
        line = "".join(f"{cells[n].tok_s:>12,.0f} {cells[n].ratio:>6.3f}x" for n in shapes)
        lines.append(f"{model:<12}{variant:<10}{line}")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_engine_options(parser, models=["slice_h64"], modes=["ours_ckv"], chunk=4096)
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=Shape.parse,
        default=[Shape.parse(text) for text in SHAPES],
        metavar="[COUNTx][PREFIX+]TOKENS",
    )
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    arguments = parser.parse_args()
    arguments.environment = dict.fromkeys(ON, "1") | arguments.environment
    arguments.max_num_seqs = 8
    logs = log_folder(arguments.logs, "variants")
    if arguments.cpu:
        use_small_model(arguments, logs / "small")
    longest = max(shape.prefix + shape.tokens for shape in arguments.shapes)
    rows: list[Row] = []
    for name, caching in product(arguments.models, (False, True)):
        shapes = [shape for shape in arguments.shapes if bool(shape.prefix) == caching]
        if not shapes:
            continue
        model = model_folder(name)
        job = make_job(model, "ours_ckv", arguments, longest + 256)
        payload = {
            "arguments": job.arguments | {"enable_prefix_caching": caching},
            "shapes": [str(shape) for shape in shapes],
            "samples": arguments.samples,
            "variants": arguments.variants,
            "window": longest // 4,
            "vocabulary": json.loads((model / "config.json").read_text())["vocab_size"],
        }
        log = logs / f"{model.name}{'-prefix' * caching}.log"
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
