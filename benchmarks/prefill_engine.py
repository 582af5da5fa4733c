# SPDX-License-Identifier: Apache-2.0
"""Prefill throughput of the real engine: stock vLLM and ours, with and without DCP, in one run.

    python benchmarks/prefill_engine.py --tp 2 --dcp 2 --out benchmarks/results/prefill.json

Every engine is a process of its own and serves the same unique prompts with one output token; the
first prompt of each length warms up and is not counted. Models are folders with a ``config.json``
(``benchmarks/models``: eight layers with the layer sizes of GLM-5.3-Flash); weights are vLLM's
dummy ones, which change no shape and no amount of work.

``--layer-times LENGTH FILE`` adds one prompt under PyTorch's profiler to every engine, after the
measured ones, and prints how a DSA layer's time divides. ``plot_prefill.py`` draws both results.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vllm.entrypoints.ckv.bench import make_prompt
from vllm.entrypoints.ckv.engine import (
    EngineJob,
    EngineResult,
    add_event,
    log_folder,
    run_engine,
)
from vllm.entrypoints.ckv.layer_times import KINDS
from vllm.entrypoints.ckv.model import write_model
from vllm.entrypoints.ckv.output import json_object

MODES = ("stock_no_dcp", "stock_dcp", "ours_no_dcp", "ours_dcp", "ours_ckv")
MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Row:
    """One line of the result: ``tok_s`` is the median over ``samples`` prompts.

    best_tok_s: the fastest sample, the one that a busy host disturbed least.
    spread: (slowest - fastest) / median. kv_cache_tokens: capacity of the cache, all ranks.
    concurrent: prompts submitted together; ``tok_s`` counts the tokens of all.
    ckv_bytes, dcp_bytes: received by one rank per group of prompts and DSA layer.
    """

    model: str
    tp: int
    dcp: int
    mode: str
    prompt_tokens: int
    concurrent: int
    samples: int
    tok_s: float
    best_tok_s: float
    spread: float
    kv_cache_tokens: int
    ckv_bytes: int
    dcp_bytes: int


def model_folder(name: str) -> Path:
    """The folder ``name``, or that of one of our own models."""
    return Path(name) if Path(name).is_dir() else MODELS / name


def spread_of(seconds: list[float]) -> float:
    """(slowest - fastest) / median."""
    return round((max(seconds) - min(seconds)) / statistics.median(seconds), 3)


def use_small_model(arguments: argparse.Namespace, folder: Path) -> None:
    """Have CPU ranks run a model that suits them, written to ``folder``."""
    write_model(folder, mhc=False)
    arguments.models = [str(folder)]
    arguments.engine = {"kv_cache_memory_bytes": 256 << 20} | arguments.engine


def make_job(model: Path, mode: str, arguments: argparse.Namespace, longest: int) -> EngineJob:
    """The engine of ``mode`` for requests of up to ``longest`` tokens; no prompts yet."""
    ours = mode.startswith("ours")
    engine: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": arguments.eager,
        "kv_cache_dtype": "fp8_ds_mla",
        "attention_backend": "B12X_MLA_SPARSE" if ours else "FLASHMLA_SPARSE",
        "max_model_len": longest,
        "max_num_batched_tokens": arguments.chunk,
        "max_num_seqs": arguments.max_num_seqs,
        "enable_prefix_caching": False,
        "disable_custom_all_reduce": True,
        "tensor_parallel_size": arguments.tp,
        "seed": 0,
    }
    if mode in ("stock_dcp", "ours_dcp", "ours_ckv"):
        engine["decode_context_parallel_size"] = arguments.dcp
        engine["cp_kv_cache_interleave_size"] = arguments.interleave
    engine |= arguments.engine
    environment = {"VLLM_B12X_MLA_CKV_GATHER": "1" if mode == "ours_ckv" else "0"}
    if mode == "ours_ckv":
        environment |= arguments.environment
    return EngineJob(f"{model.name} {mode}", engine, environment, [], max_tokens=1)


def make_groups(
    lengths: list[int], samples: int, concurrent: int, vocabulary: int
) -> list[list[list[int]]]:
    """``1 + samples`` groups of ``concurrent`` prompts for every length."""
    return [
        [
            make_prompt(length, vocabulary, random.Random(f"{length} {sample} {number}"))
            for number in range(concurrent)
        ]
        for length in lengths
        for sample in range(1 + samples)
    ]


def rows_of(
    job: EngineJob, result: EngineResult, mode: str, lengths: list[int], layers: int, samples: int
) -> Iterator[Row]:
    """The measured rows of one engine."""
    dcp = job.arguments.get("decode_context_parallel_size", 1)
    for number, length in enumerate(lengths):
        first = number * (1 + samples) + 1
        groups = result.groups[first : first + samples]
        if len(groups) < samples:
            return
        seconds = [group.seconds for group in groups]
        median = statistics.median(seconds)
        yield Row(
            model=Path(job.arguments["model"]).name,
            tp=job.arguments["tensor_parallel_size"],
            dcp=dcp,
            mode=mode,
            prompt_tokens=length,
            concurrent=len(groups[0].tokens),
            samples=samples,
            tok_s=round(length * len(groups[0].tokens) / median, 1),
            best_tok_s=round(length * len(groups[0].tokens) / min(seconds), 1),
            spread=spread_of(seconds),
            kv_cache_tokens=result.cache_blocks * result.block_size * dcp,
            ckv_bytes=groups[0].counters.get("ckv_bytes", 0) // layers,
            dcp_bytes=groups[0].counters.get("dcp_bytes", 0) // layers,
        )


def format_table(rows: list[Row]) -> str:
    """Tokens per second by model and mode, one column per prompt length."""
    lengths = sorted({row.prompt_tokens for row in rows})
    lines = [f"{'model':<12}{'mode':<14}" + "".join(f"{length:>12,}" for length in lengths)]
    for model, mode in dict.fromkeys((row.model, row.mode) for row in rows):
        cells = {r.prompt_tokens: r.tok_s for r in rows if (r.model, r.mode) == (model, mode)}
        line = "".join(f"{cells[n]:>12,.0f}" if n in cells else f"{'-':>12}" for n in lengths)
        lines.append(f"{model:<12}{mode:<14}{line}")
    return "\n".join(lines)


def format_layer_times(rows: list[dict[str, Any]]) -> str:
    """Microseconds of one DSA layer in one chunk by model and mode, one column per kind."""
    columns = (*KINDS, "total", "host", "launches", "waits")
    lines = [f"{'model':<12}{'mode':<14}" + "".join(f"{name:>11}" for name in columns)]
    for row in rows:
        cells = "".join(f"{(row['microseconds'] | row)[name]:>11,.1f}" for name in columns)
        lines.append(f"{row['model']:<12}{row['mode']:<14}{cells}")
    return "\n".join(lines)


def add_engine_options(
    parser: argparse.ArgumentParser, *, models: list[str], modes: list[str], chunk: int
) -> None:
    """Declare which engines run and where their results go; the arguments are defaults."""
    parser.add_argument("--models", nargs="+", default=models)
    parser.add_argument("--modes", nargs="+", default=modes, choices=MODES)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dcp", type=int, default=2)
    parser.add_argument("--interleave", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=chunk, help="max_num_batched_tokens")
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--engine", type=json_object, default={}, help="JSON: further arguments of vllm.LLM"
    )
    parser.add_argument(
        "--environment", type=json_object, default={}, help="JSON: further variables of ours_ckv"
    )
    parser.add_argument("--cpu", action="store_true", help="the reference platform, a small model")
    parser.add_argument("--out", type=Path, help="write the rows here as JSON, after every engine")
    parser.add_argument("--logs", type=Path, help="keep the engines' logs here")


def main() -> int:
    """Run the benchmark; the exit status is 1 if an engine of ours failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_engine_options(parser, models=["slice_h32", "slice_h64"], modes=list(MODES), chunk=4096)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 32320, 131072])
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--concurrent", type=int, default=1, help="prompts submitted together")
    parser.add_argument("--layer-times", nargs=2, metavar=("LENGTH", "FILE"))
    arguments = parser.parse_args()
    logs = log_folder(arguments.logs, "prefill-engine")
    if arguments.cpu:
        use_small_model(arguments, logs / "small")
    rows: list[Row] = []
    layer_times: list[dict[str, Any]] = []
    failed = False
    for name in arguments.models:
        model = model_folder(name)
        config = json.loads((model / "config.json").read_text())
        positions = config["max_position_embeddings"]
        lengths = [n for n in arguments.lengths if n + 256 <= positions]
        layers = config["num_hidden_layers"] // 4 or 1
        if "layer_types" in config:
            layers = sum(kind != "linear_attention" for kind in config["layer_types"])
        for mode in arguments.modes:
            groups = make_groups(
                lengths, arguments.samples, arguments.concurrent, config["vocab_size"]
            )
            if arguments.layer_times:
                length = int(arguments.layer_times[0])
                groups += make_groups([length], 0, 1, config["vocab_size"])
            job = replace(
                make_job(model, mode, arguments, max(lengths) + 256),
                groups=groups,
                profile_last=bool(arguments.layer_times),
            )
            result = EngineResult()
            try:
                for event in run_engine(
                    job, logs / f"{model.name}-{mode}.log", use_gpu=not arguments.cpu
                ):
                    add_event(result, event)
            except RuntimeError as error:
                print(f"{job.name}: {str(error).splitlines()[0]}; see {logs}", file=sys.stderr)
                failed |= mode.startswith("ours")
            new = list(rows_of(job, result, mode, lengths, layers, arguments.samples))
            rows += new
            for row in new:
                print(
                    f"{job.name}: {row.prompt_tokens:,} tokens {row.tok_s:,.0f} tok/s "
                    f"(best {row.best_tok_s:,.0f}, spread {row.spread:.1%})",
                    flush=True,
                )
            if result.layer_times:
                about = {"model": model.name, "tp": arguments.tp, "mode": mode}
                about["dcp"] = job.arguments.get("decode_context_parallel_size", 1)
                about["prompt_tokens"] = int(arguments.layer_times[0])
                layer_times.append(about | result.layer_times)
                Path(arguments.layer_times[1]).write_text(json.dumps(layer_times, indent=1) + "\n")
            if arguments.out:
                arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(format_table(rows))
    if layer_times:
        print("\nmicroseconds of one DSA layer in one chunk\n" + format_layer_times(layer_times))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
