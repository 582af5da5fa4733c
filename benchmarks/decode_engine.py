# SPDX-License-Identifier: Apache-2.0
"""Decode of the real engine with many running requests: stock vLLM and ours, in one run.

    python benchmarks/decode_engine.py --requests 128 --context 32768 --out decode.json

Every request has a prompt of its own. When the last one has its first token, all of them decode;
the steps from there on are timed one by one, from tokens to tokens. vLLM schedules a step while the
workers are at the one before, as it does by default: a step takes as long as the slower of the two.
Full-CKV prefill is on in ``ours_ckv``: its decode is the ordinary path, compared here with stock's.

``--split`` schedules a step only when the last one is done, and tells the workers' part of it, from
the scheduler's decision to the sampled tokens, from the rest: vLLM's scheduler, which knows no
backend.

Most of a step is Python on the host, and the cores of a virtual machine may have two speeds, up to
1.8 apart, that change from one moment to the next without a trace in the guest. So the main process
times a fixed piece of Python after every step. Two engines whose ``yardstick_ms`` differ ran on
different machines in effect: compare them again, several times and in turn
(``--modes stock_dcp ours_ckv stock_dcp ours_ckv``).

``--device-steps`` then has PyTorch's profiler add up what the first rank's device does in further
steps, kernel by kernel: the part of a step that no host can slow down.

``--beside TOKENS`` then adds prompts of that length, one after the other, while all others go on
decoding, and times each until its first token. Their batches are mixed; ``ours_ckv`` gathers in
them with ``--environment '{"VLLM_B12X_MLA_CKV_GATHER_MIXED":"1"}'``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

from prefill_engine import add_engine_options, make_job, model_folder, use_small_model

from vllm.entrypoints.ckv.bench import make_prompt
from vllm.entrypoints.ckv.engine import counters_of, log_folder, run_program, start_engine

WARM_UP_STEPS = 8
"""Steps with all requests decoding before the first timed one."""

YARDSTICK_TURNS = 2000
"""Turns of the loop of :func:`yardstick`: a few tenths of a millisecond, little beside a step."""


def yardstick() -> float:
    """CPU seconds of this thread for a fixed piece of Python, to see how fast its core is now.

    Waiting for a core is not in it. No object in it is one that Python's garbage collector follows:
    a collection would take longer than the rest.
    """
    began = time.thread_time()
    lengths: dict[int, int] = {}
    for number in range(YARDSTICK_TURNS):
        lengths[number & 63] = lengths.get(number & 31, 0) + len(str(number))
    return time.thread_time() - began


def time_steps(worker: Any) -> None:
    """Have a rank note what its steps take from now on, for ``LLM.collective_rpc``."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    seconds = worker.step_seconds = []
    execute_model, sample_tokens = worker.execute_model, worker.sample_tokens
    began = 0.0

    def execute(*args: Any, **kwargs: Any) -> Any:
        nonlocal began
        began = time.perf_counter()
        return execute_model(*args, **kwargs)

    def sample(*args: Any, **kwargs: Any) -> Any:
        output = sample_tokens(*args, **kwargs)
        if isinstance(output, AsyncModelRunnerOutput):
            # Its tokens are on their way from the device.
            output = output.get_output()
        seconds.append(time.perf_counter() - began)
        return output

    worker.execute_model, worker.sample_tokens = execute, sample


def step_seconds(worker: Any) -> list[float]:
    """What :func:`time_steps` noted on a rank."""
    return list(worker.step_seconds)


def record_device(worker: Any) -> None:
    """Have a rank record what its device does from now on, for ``LLM.collective_rpc``."""
    import torch

    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    worker.device_record = torch.profiler.profile(activities=activities)
    worker.device_record.start()


def device_times(worker: Any) -> dict[str, float]:
    """Microseconds of each kernel and copy since :func:`record_device`, by name."""
    import torch

    torch.cuda.synchronize()
    worker.device_record.stop()
    kernels = worker.device_record.key_averages()
    return {kernel.key: kernel.self_device_time_total for kernel in kernels}


def serve() -> None:
    """The engine's side: bring all requests to decode, then time the steps."""
    job, llm, emit = start_engine()
    from vllm.inputs import TokensPrompt

    from vllm import SamplingParams

    engine = llm.llm_engine
    rng = random.Random(job["context"])
    sampling = SamplingParams(
        temperature=0, max_tokens=job["answer"], ignore_eos=True, detokenize=False
    )
    one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    for number in range(job["requests"]):
        prompt = TokensPrompt(prompt_token_ids=make_prompt(job["context"], job["vocabulary"], rng))
        engine.add_request(str(number), prompt, sampling)
    began = time.perf_counter()
    waiting = {str(number) for number in range(job["requests"])}
    while waiting:
        waiting -= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    prefill = time.perf_counter() - began
    if job["split"]:
        llm.collective_rpc(time_steps)
    seconds, yardsticks = [], []
    ended = time.perf_counter()
    for _ in range(WARM_UP_STEPS + job["samples"]):
        # Workers that are ahead go on during the yardstick: it is a part of the step then.
        began = time.perf_counter() if job["split"] else ended
        outputs = engine.step()
        ended = time.perf_counter()
        seconds.append(ended - began)
        assert len(outputs) == job["requests"], "a request ended before the last step"
        yardsticks.append(yardstick())
    # The engine waits for the first rank's tokens.
    workers = llm.collective_rpc(step_seconds)[0] if job["split"] else []
    device: dict[str, float] = {}
    if job["device_steps"]:
        llm.collective_rpc(record_device)
        for _ in range(job["device_steps"]):
            engine.step()
        total = llm.collective_rpc(device_times)[0]
        device = {name: spent / job["device_steps"] for name, spent in total.items() if spent}
    beside = []
    for number in range(job["beside_samples"]):
        name = f"beside {number}"
        tokens = make_prompt(job["beside"], job["vocabulary"], rng)
        engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), one_token)
        began = time.perf_counter()
        while name not in {output.request_id for output in engine.step() if output.finished}:
            pass
        beside.append(time.perf_counter() - began)
    emit(
        event="decode",
        prefill_seconds=prefill,
        step_seconds=seconds[WARM_UP_STEPS:],
        worker_seconds=workers[WARM_UP_STEPS:],
        yardstick_seconds=yardsticks[WARM_UP_STEPS:],
        beside_seconds=beside[1:],
        device_us=device,
        counters=counters_of(llm),
    )


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """The least of ``seconds`` and their quartiles, in milliseconds."""
    numbers = min(seconds), *statistics.quantiles(seconds, n=4)
    names = ("best", "lower", "median", "upper")
    return {name: round(n * 1e3, 3) for name, n in zip(names, numbers, strict=True)}


def describe(times: dict[str, float]) -> str:
    """What :func:`milliseconds` says, in words."""
    return (
        f"{times['median']:.2f} ms (best {times['best']:.2f}, quartiles {times['lower']:.2f} and "
        f"{times['upper']:.2f})"
    )


def timings(result: dict[str, Any]) -> dict[str, Any]:
    """What :func:`serve` says of its steps, in milliseconds.

    ``main_ms`` is what each step takes beside its workers, if they are told apart. ``each_ms`` has
    the steps one by one, ``each_yardstick_ms`` what :func:`yardstick` gave after them.
    """
    steps, workers = result["step_seconds"], result["worker_seconds"]
    yardsticks = result["yardstick_seconds"]
    split = {}
    if workers:
        main = [step - worker for step, worker in zip(steps, workers, strict=True)]
        split = {"worker_ms": milliseconds(workers), "main_ms": milliseconds(main)}
    return {
        "step_ms": milliseconds(steps),
        **split,
        "yardstick_ms": milliseconds(yardsticks),
        "each_ms": [round(second * 1e3, 3) for second in steps],
        "each_yardstick_ms": [round(second * 1e3, 3) for second in yardsticks],
    }


def device_summary(microseconds: dict[str, float]) -> dict[str, Any]:
    """What the device did in a step: in all, and the kernels of 1 % of it and more, by length."""
    total = sum(microseconds.values())
    longest = sorted(microseconds.items(), key=lambda item: -item[1])
    return {
        "all": round(total, 1),
        "kernels": {name[:120]: round(spent, 1) for name, spent in longest if spent >= total / 100},
    }


def main() -> int:
    """Run the benchmark; the exit status is 1 if an engine of ours failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_engine_options(parser, models=["slice_h32"], modes=["stock_dcp", "ours_ckv"], chunk=16384)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--context", type=int, default=32768, help="prompt tokens of a request")
    parser.add_argument("--samples", type=int, default=64, help="timed steps")
    parser.add_argument(
        "--split", action="store_true", help="no step is scheduled ahead; tell the workers' part"
    )
    parser.add_argument("--device-steps", type=int, default=0, help="further steps, profiled")
    parser.add_argument("--beside", type=int, default=0, metavar="TOKENS", help="further prompts")
    parser.add_argument("--beside-samples", type=int, default=5, help="timed ones of them")
    arguments = parser.parse_args()
    if arguments.beside and arguments.chunk <= arguments.requests:
        parser.error(
            f"--chunk {arguments.chunk} leaves no row for prompts beside {arguments.requests} "
            "decoding requests: raise it"
        )
    beside_samples = 1 + arguments.beside_samples if arguments.beside else 0
    arguments.max_num_seqs = arguments.requests + bool(arguments.beside)
    logs = log_folder(arguments.logs, "decode-engine")
    if arguments.cpu:
        use_small_model(arguments, logs / "small")
    # Early requests decode while the others' prompts are computed.
    chunks = -(-arguments.context * arguments.requests // arguments.chunk)
    answer = 2 * chunks + arguments.requests + WARM_UP_STEPS + arguments.samples + 2
    answer += arguments.device_steps
    if arguments.beside:
        rows_left = arguments.chunk - arguments.requests
        answer += beside_samples * (-(-arguments.beside // rows_left) + 1)
    rows: list[dict[str, Any]] = []
    failed = False
    for name in arguments.models:
        model = model_folder(name)
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        for number, mode in enumerate(arguments.modes):
            longest = max(arguments.context + answer, arguments.beside + 256)
            job = make_job(model, mode, arguments, longest)
            payload = {
                "arguments": job.arguments | {"async_scheduling": not arguments.split},
                "split": arguments.split,
                "requests": arguments.requests,
                "context": arguments.context,
                "answer": answer,
                "samples": arguments.samples,
                "device_steps": arguments.device_steps,
                "beside": arguments.beside,
                "beside_samples": beside_samples,
                "vocabulary": vocabulary,
            }
            again = f"-{number}" if arguments.modes.count(mode) > 1 else ""
            log = logs / f"{model.name}-{mode}{again}.log"
            use_gpu = not arguments.cpu
            try:
                events = run_program(
                    __file__, job.name, payload, job.environment, log, use_gpu=use_gpu
                )
                result = next(event for event in list(events) if event["event"] == "decode")
            except RuntimeError as error:
                print(f"{job.name}: {str(error).splitlines()[0]}; see {logs}", file=sys.stderr)
                failed |= mode.startswith("ours")
                continue
            steps = result["step_seconds"]
            rows.append(
                {
                    "model": model.name,
                    "tp": arguments.tp,
                    "dcp": job.arguments.get("decode_context_parallel_size", 1),
                    "mode": mode,
                    "eager": arguments.eager,
                    "requests": arguments.requests,
                    "context": arguments.context,
                    "scheduled_ahead": not arguments.split,
                    "samples": len(steps),
                    "tok_s": round(arguments.requests / statistics.median(steps), 1),
                    "prefill_seconds": round(result["prefill_seconds"], 1),
                }
                | timings(result)
            )
            row = rows[-1]
            if arguments.device_steps:
                row["device_us"] = device_summary(result["device_us"])
            if arguments.beside:
                beside = statistics.median(result["beside_seconds"])
                row |= {
                    "beside_tokens": arguments.beside,
                    "beside_samples": len(result["beside_seconds"]),
                    "beside_tok_s": round(arguments.beside / beside, 1),
                    "gathered_batches": result["counters"].get("gathered_batches", 0),
                }
            print(
                f"{job.name}: {row['requests']} requests of {row['context']:,} tokens: "
                f"{describe(row['step_ms'])} a step"
                + (
                    f", {describe(row['worker_ms'])} of it in the workers, "
                    f"{describe(row['main_ms'])} beside them"
                    if arguments.split
                    else ""
                )
                + f"; a yardstick of {describe(row['yardstick_ms'])}; {row['tok_s']:,.0f} tok/s"
                + (
                    f"; the device is at work for {row['device_us']['all'] / 1e3:.2f} ms"
                    if arguments.device_steps
                    else ""
                )
                + (f"; beside them {row['beside_tok_s']:,.0f} tok/s" if arguments.beside else ""),
                flush=True,
            )
            if arguments.out:
                arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].isdigit():
        serve()
    else:
        raise SystemExit(main())
