# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own: ``python -m vllm.entrypoints.ckv.engine``.

A process per engine, because the flags, the platform and vLLM's distributed state are properties of
a process. The parent passes a job as JSON on standard input and reads events, one JSON object a
line, from the file descriptor that the job names; everything vLLM prints goes to a log file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAG_PREFIX = "VLLM_B12X_MLA_"

TAIL_LINES = 80
"""Lines of a log that an error shows: a worker's reason stands before vLLM's traceback of it."""

TERMINATION_SECONDS = 30
"""An engine that is asked to end has this long; its workers end with it."""


@dataclass(frozen=True)
class EngineJob:
    """What one engine process does.

    name: for logs and errors.
    arguments: keyword arguments of ``vllm.LLM``.
    environment: variables set for the process, beside :func:`base_environment`.
    groups: prompts (token ids) that are submitted together, group after group.
    max_tokens: greedy tokens to generate for every prompt.
    profile_last: run the last group under the profiler, see :mod:`.layer_times`; it yields an event
        of its own instead of a result.
    """

    name: str
    arguments: dict[str, Any]
    environment: dict[str, str]
    groups: list[list[list[int]]]
    max_tokens: int
    profile_last: bool = False


@dataclass
class GroupResult:
    """What one group of prompts gave.

    tokens: the generated ids of each prompt.
    logprobs: log-probability of each of them.
    cached_tokens: tokens of each prompt that the prefix cache had.
    counters: increase of the backend's counters on rank 0, see ``ckv_gather.plan.counters``.
    seconds: from submission to the last token.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached_tokens: list[int]
    counters: dict[str, Any]
    seconds: float


@dataclass
class EngineResult:
    """Results of the groups, in order, and of the start.

    start_seconds: until the engine could serve.
    cache_blocks: blocks of the KV cache, ``block_size`` tokens each on every rank.
    layer_times: of rank 0, see :func:`.layer_times.split`; None unless the job profiles.
    """

    start_seconds: float = 0.0
    cache_blocks: int = 0
    block_size: int = 0
    groups: list[GroupResult] = field(default_factory=list)
    layer_times: dict[str, Any] | None = None


def backend_arguments(
    model: Path, *, tp: int, dcp: int = 1, interleave: int = 4, **further: Any
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for B12X_MLA_SPARSE with FP8 records, in eager mode.

    model: a folder; no tokenizer is needed. interleave: of the KV cache, with ``dcp`` above 1.
    further: other arguments, or other values of these.
    """
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "attention_backend": "B12X_MLA_SPARSE",
        "kv_cache_dtype": "fp8_ds_mla",
        "tensor_parallel_size": tp,
    }
    if dcp > 1:
        arguments["decode_context_parallel_size"] = dcp
        arguments["cp_kv_cache_interleave_size"] = interleave
    return arguments | further


def log_folder(chosen: Path | None, name: str) -> Path:
    """``chosen``, made if it is not there; if None, a temporary folder whose name begins with
    ``name``."""
    folder = chosen or Path(tempfile.mkdtemp(prefix=f"{name}-"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def gpu_count() -> int:
    """NVIDIA GPUs this process may use; creates no CUDA context."""
    import torch

    return torch.cuda.device_count()


def base_environment(ranks: int, *, use_gpu: bool) -> dict[str, str]:
    """The environment of an engine process with ``ranks`` workers.

    Flags of the caller's shell are dropped: a job states its own.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(FLAG_PREFIX)}
    # In process, both sides of a comparison see identical batches; arrival timing alone moves
    # log-probabilities.
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    env["VLLM_NO_USAGE_STATS"] = "1"
    # The counters are read by a function sent to the workers.
    env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if not use_gpu:
        from vllm.platforms.ckv_reference import environment

        env.update(environment())
        cores = len(os.sched_getaffinity(0))
        env["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
    return env


def run_engine(job: EngineJob, log: Path, *, use_gpu: bool) -> Iterator[dict[str, Any]]:
    """Run ``job`` and yield its events for :func:`add_event`: the start, then group after group.

    Raises:
        RuntimeError: the process failed; the message has the end of its log.
    """
    work = {
        "groups": job.groups,
        "max_tokens": job.max_tokens,
        "profile_last": job.profile_last,
    }
    yield from run_program(
        "vllm.entrypoints.ckv.engine",
        job.name,
        {"arguments": job.arguments, **work},
        job.environment,
        log,
        use_gpu=use_gpu,
    )


def run_program(
    module: str,
    name: str,
    payload: dict[str, Any],
    environment: dict[str, str],
    log: Path,
    *,
    use_gpu: bool,
) -> Iterator[dict[str, Any]]:
    """Run ``module``, a program that calls :func:`start_engine`, and yield its events.

    module: the name of a module, or the path of a script. name: for errors.
    payload: the job; ``payload["arguments"]`` are those of ``vllm.LLM``.
    environment: variables set for the process, beside :func:`base_environment`.

    Raises:
        RuntimeError: the process failed; the message has the end of its log.
    """
    ranks = int(payload["arguments"].get("tensor_parallel_size", 1))
    env = base_environment(ranks, use_gpu=use_gpu) | environment
    program = [module] if module.endswith(".py") else ["-m", module]
    read_end, write_end = os.pipe()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *program, str(write_end)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=(write_end,),
        )
    os.close(write_end)
    try:
        assert process.stdin is not None
        # An engine that ended already is reported below, by its status and its log.
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps(payload).encode())
        with os.fdopen(read_end) as events:
            for line in events:
                yield json.loads(line)
        if process.wait() != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            raise RuntimeError(
                f"the engine '{name}' ended with status {process.returncode}; "
                f"the end of {log}:\n{tail}"
            )
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(TERMINATION_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def collect(events: Iterator[dict[str, Any]]) -> EngineResult:
    """Gather the events of :func:`run_engine` into one result."""
    result = EngineResult()
    for event in events:
        add_event(result, event)
    return result


def add_event(result: EngineResult, event: dict[str, Any]) -> None:
    """Add one event of :func:`run_engine` to ``result``."""
    kind = event.pop("event")
    if kind == "start":
        result.start_seconds = event["seconds"]
        result.cache_blocks = event["cache_blocks"]
        result.block_size = event["block_size"]
    elif kind == "layer_times":
        result.layer_times = event
    else:
        result.groups.append(GroupResult(**event))


def counters_of(llm: Any) -> dict[str, Any]:
    """The backend's counters on rank 0; empty with another backend, which counts nothing."""
    backend = llm.llm_engine.vllm_config.attention_config.backend
    if getattr(backend, "name", None) != "B12X_MLA_SPARSE":
        return {}
    from vllm.v1.attention.backends.mla.ckv_gather.plan import counters

    return llm.collective_rpc(counters)[0]


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """``after - before``, number by number; what ``before`` lacks counts as 0."""
    change: dict[str, Any] = {}
    for key, value in after.items():
        if isinstance(value, dict):
            change[key] = difference(value, before.get(key, {}))
        else:
            change[key] = value - before.get(key, 0)
    return change


def _chosen(completion: Any) -> list[float]:
    steps = zip(completion.logprobs, completion.token_ids, strict=True)
    return [step[token].logprob for step, token in steps]


def start_engine() -> tuple[dict[str, Any], Any, Callable[..., None]]:
    """In an engine process: read the job, start the engine, report the start.

    Returns:
        The payload of :func:`run_program`, the ``vllm.LLM``, and what emits further events.
    """
    # Only here, in a process whose environment is final.
    from vllm.platforms.ckv_reference import declare_torchvision_ops, enabled

    if enabled():
        declare_torchvision_ops()
    from vllm import LLM

    job = json.load(sys.stdin)
    events = os.fdopen(int(sys.argv[1]), "w")

    def emit(**event: Any) -> None:
        print(json.dumps(event), file=events, flush=True)

    began = time.monotonic()
    llm = LLM(**job["arguments"])
    seconds = time.monotonic() - began
    cache = llm.llm_engine.vllm_config.cache_config
    emit(
        event="start",
        seconds=seconds,
        cache_blocks=cache.num_gpu_blocks or 0,
        block_size=cache.block_size,
    )
    return job, llm, emit


def _main() -> None:
    job, llm, emit = start_engine()
    from vllm.inputs import TokensPrompt

    from vllm import SamplingParams
    from vllm.entrypoints.ckv import layer_times

    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, logprobs=1, detokenize=False
    )
    for number, group in enumerate(job["groups"], start=1):
        profiles = job["profile_last"] and number == len(job["groups"])
        if profiles:
            llm.collective_rpc(layer_times.start)
        before = counters_of(llm)
        began = time.monotonic()
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in group], sampling, use_tqdm=False
        )
        seconds = time.monotonic() - began
        if profiles:
            emit(event="layer_times", **llm.collective_rpc(layer_times.stop)[0])
            continue
        completions = [output.outputs[0] for output in outputs]
        emit(
            event="group",
            tokens=[list(completion.token_ids) for completion in completions],
            logprobs=[_chosen(completion) for completion in completions],
            cached_tokens=[output.num_cached_tokens or 0 for output in outputs],
            counters=difference(counters_of(llm), before),
            seconds=seconds,
        )


if __name__ == "__main__":
    _main()
