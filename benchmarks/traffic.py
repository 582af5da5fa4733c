# SPDX-License-Identifier: Apache-2.0
"""Mixed traffic through the real engine, gather on against off: outputs, pages, tensors, bytes.

    python benchmarks/traffic.py --cpu --requests 200 --out benchmarks/results/traffic_cpu.json
    python benchmarks/traffic.py --requests 2000 --tp 2 --dcp 2 --out traffic_h200x2.json

Random lengths, shared prefixes, aborts, priorities, more requests than ``max_num_seqs``, a cache
that is too small (preemption), resets of the prefix cache and, on GPUs, sleeping and waking. The
exit status is 1 if outputs differ, something is kept, or the traffic lacked one of these.

With ``--gpu-memory-utilization 0.93 --first-prompt 54639`` the cache takes all the memory that is
left (nobody is preempted for want of pages then) and the first request is a long one. A model
without weights gets vLLM's dummy ones: its outputs follow from rounding, and are not compared.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vllm.entrypoints.ckv import traffic
from vllm.entrypoints.ckv.engine import log_folder
from vllm.entrypoints.ckv.model import write_model
from vllm.entrypoints.ckv.output import json_object, versions
from vllm.entrypoints.ckv.verify import has_hyper_connections


def prepare_model(arguments: argparse.Namespace, folder: Path) -> tuple[Path, int]:
    """The model's folder, written if none was given, and its vocabulary."""
    if arguments.model is not None:
        config = json.loads((arguments.model / "config.json").read_text())
        return arguments.model, config["vocab_size"]
    model = folder / "model"
    config = write_model(model, mhc=has_hyper_connections(not arguments.cpu))
    # The model has no positions, so a longer context changes nothing else.
    config["max_position_embeddings"] = 1 << 20
    (model / "config.json").write_text(json.dumps(config, indent=1))
    return model, config["vocab_size"]


def run_both(
    arguments: argparse.Namespace, engine: dict[str, Any], waves: list[traffic.Wave], folder: Path
) -> dict[str, traffic.Side]:
    """Both sides, one engine after the other or at once; prints a line a wave."""

    def run(gather: str) -> traffic.Side:
        side = traffic.Side()
        log = folder / f"gather-{gather}.log"
        for event in traffic.run_side(gather, engine, waves, log, use_gpu=not arguments.cpu):
            side.add(event)
            if side.waves:
                wave = side.waves[-1]
                print(
                    f"gather {gather}: wave {len(side.waves)} of {len(waves)}, "
                    f"{len(wave.steps)} steps, {wave.seconds:.1f} s",
                    flush=True,
                )
        print(f"gather {gather}: {format_memory(side)}", flush=True)
        return side

    with ThreadPoolExecutor(max_workers=2 if arguments.at_once else 1) as pool:
        sides = {gather: pool.submit(run, gather) for gather in ("1", "0")}
        try:
            return {gather: side.result() for gather, side in sides.items()}
        except RuntimeError:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def format_memory(side: traffic.Side) -> str:
    """Memory of rank 0 after the start and at the end."""
    before, after = side.memory[0], side.waves[-1].memory[0]
    return ", ".join(
        f"{name} {before[name]:,} -> {after[name]:,}"
        for name in before
        if isinstance(before[name], int) and not isinstance(before[name], bool)
    )


def main() -> int:
    """Run both sides and compare; the exit status is 1 on any violation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dcp", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="the reference platform")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a folder; default: verify's random model")
    parser.add_argument("--first-prompt", type=int, help="tokens of a first request of its own")
    parser.add_argument("--prefix", type=int, help="tokens of a shared prefix")
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--sleep", action=argparse.BooleanOptionalAction, help="default: on GPUs")
    parser.add_argument(
        "--at-once", action="store_true", help="run both sides at once; give each its memory"
    )
    parser.add_argument(
        "--engine", type=json_object, default={}, help="JSON: further arguments of vllm.LLM"
    )
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    parser.add_argument("--logs", type=Path, help="keep the engines' logs here")
    arguments = parser.parse_args()
    folder = log_folder(arguments.logs, "traffic")
    scale = traffic.CPU if arguments.cpu else traffic.GPU
    if arguments.prefix is not None:
        scale = replace(
            scale,
            prefix=arguments.prefix,
            max_model_len=scale.max_model_len - scale.prefix + arguments.prefix,
        )
    sleep = not arguments.cpu if arguments.sleep is None else arguments.sleep
    model, vocabulary = prepare_model(arguments, folder)
    waves = traffic.make_waves(
        arguments.requests,
        scale,
        seed=arguments.seed,
        vocabulary=vocabulary,
        first_prompt=arguments.first_prompt,
        sleep=sleep,
    )
    engine = traffic.engine_arguments(
        model,
        scale,
        tp=arguments.tp,
        dcp=arguments.dcp,
        use_gpu=not arguments.cpu,
        first_prompt=arguments.first_prompt,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
    )
    engine |= {"enable_sleep_mode": True} if sleep else {}
    engine |= arguments.engine
    began = time.monotonic()
    try:
        sides = run_both(arguments, engine, waves, folder)
    except RuntimeError as error:
        print(f"{error}\nlogs are kept in {folder}")
        return 1
    on, off = sides["1"], sides["0"]
    comparison = None if engine.get("load_format") == "dummy" else traffic.compare(on, off)
    violations = [
        *(comparison.violations if comparison else []),
        *traffic.find_leaks("gather on", on),
        *traffic.find_leaks("gather off", off),
        *traffic.find_growth_beyond(on, off),
        *traffic.find_gaps(
            on, off, scale, short_of_blocks=arguments.gpu_memory_utilization is None
        ),
    ]
    document = {
        "ok": not violations,
        "violations": violations,
        "comparison": comparison
        and {k: v for k, v in asdict(comparison).items() if k != "violations"},
        "limits": {"log-probability": traffic.LIMIT_VS_DCP, "near tie": traffic.NEAR_TIE},
        "device": "cpu" if arguments.cpu else "gpu",
        "seed": arguments.seed,
        "engine": engine | {"model": model.name},
        "on": traffic.summary(on),
        "off": traffic.summary(off),
        "seconds": round(time.monotonic() - began, 1),
        "versions": versions(),
    }
    text = json.dumps(document, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    if violations:
        print(f"logs are kept in {folder}")
    return int(bool(violations))


if __name__ == "__main__":
    raise SystemExit(main())
