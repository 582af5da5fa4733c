# SPDX-License-Identifier: Apache-2.0
"""Long mixed traffic through the real engine, gather on against off: ``benchmarks/traffic.py``.

Requests arrive at numbered engine steps, never at times, and the engine is stepped in one process:
both sides are asked to schedule the same batches, and a difference in output is the path's own.
Arrivals come in waves that share the engine; between waves it is empty, and there its pages,
tensors and bytes are counted.

As a program (``python -m vllm.entrypoints.ckv.traffic``) this is the engine's side, see
:mod:`.engine`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm.entrypoints.ckv.bench import make_prompt
from vllm.entrypoints.ckv.engine import (
    backend_arguments,
    counters_of,
    difference,
    run_program,
    start_engine,
)
from vllm.entrypoints.ckv.verify import INTERLEAVE, LIMIT_VS_DCP, PAGE_TOKENS

NEAR_TIE = 0.02
"""Two best log-probabilities this close may change places: each may move by ``LIMIT_VS_DCP``."""

TENSOR_GROWTH = 4096
"""Bytes by which tensors, no more in number, may exceed those of the first half.

What a batch leaves behind has its size, and a later one may be the largest. Seen: 64 and 80.
"""

GROWTH_BEYOND_OFF = {"resident": 64 << 20, "reserved": 20 << 20}
"""Bytes by which the gathering side may grow over the second half beyond the other side's growth.

Both sides grow: torch keeps something on CPUs for every shape that it has multiplied, and its
allocator on GPUs takes a segment, of up to 20 MiB, when the free pieces do not fit.
"""

OBJECT_GROWTH = 500
"""Python objects that a process may hold more in the second half; a step makes thousands."""

GATHER = "VLLM_B12X_MLA_CKV_GATHER"


@dataclass(frozen=True)
class Scale:
    """Sizes of a server and of its traffic, in tokens unless said otherwise.

    budget: ``max_num_batched_tokens``, smaller than long prompts, so that they are chunked.
    cache_blocks: blocks of the KV cache, too few for ``max_num_seqs`` long requests.
    prefix: length of a shared prefix, more than one block of the prefix cache. 0: none is shared.
    long, medium, short: most tokens of a prompt's own part.
    answer: most tokens generated for a prompt. wave: requests of a wave.
    """

    max_model_len: int
    budget: int
    max_num_seqs: int
    cache_blocks: int
    prefix: int
    long: int
    medium: int
    short: int
    answer: int
    wave: int


CPU = Scale(1024, 96, 4, 13, PAGE_TOKENS + 8, 400, 130, 40, 6, 10)
GPU = Scale(8192, 2048, 12, 44, 4 * PAGE_TOKENS + 8, 6000, 2000, 300, 24, 50)


@dataclass(frozen=True)
class Arrival:
    """One request.

    step: of its wave; the request is added before this step.
    abort_after: it is aborted so many steps later, waiting, running or done. None: never.
    priority: smaller ones are scheduled first, and preempt larger ones.
    """

    step: int
    prompt: list[int]
    max_tokens: int
    priority: int
    abort_after: int | None


@dataclass(frozen=True)
class Wave:
    """Requests that share an engine which is empty before and after.

    reset_at: before this step every running request loses its pages and starts anew. None: never.
    then: what the empty engine does afterwards: "", "reset" (of the prefix cache) or "sleep".
    """

    arrivals: list[Arrival]
    reset_at: int | None
    then: str


@dataclass
class Request:
    """What one request gave; parallel lists over its generated tokens.

    lead: by how much the likeliest token's log-probability exceeds the next one's.
    """

    tokens: list[int]
    logprobs: list[float]
    lead: list[float]
    cached_tokens: int
    finished: bool


@dataclass
class WaveResult:
    """What one wave gave.

    requests: in the order of the wave's arrivals.
    steps: scheduled tokens of each request, by its number, for every step.
    preempted: preemptions for want of blocks. reset: requests that a reset preempted.
    most_running, most_waiting: requests at once.
    free_blocks, known_requests: of the scheduler, when the engine was empty again.
    counters: increase of the backend's counters on rank 0.
    memory: one dictionary a rank, see :func:`memory`, when the engine was empty again.
    """

    requests: list[Request]
    steps: list[dict[str, int]]
    preempted: int
    reset: int
    most_running: int
    most_waiting: int
    free_blocks: int
    known_requests: int
    counters: dict[str, Any]
    memory: list[dict[str, Any]]
    seconds: float


@dataclass
class Side:
    """One engine's run. ``free_blocks`` and ``memory``: after the start, before any request."""

    cache_blocks: int = 0
    start_seconds: float = 0.0
    free_blocks: int = 0
    memory: list[dict[str, Any]] = field(default_factory=list)
    waves: list[WaveResult] = field(default_factory=list)

    def add(self, event: dict[str, Any]) -> None:
        """Add one event of the engine's process."""
        kind = event.pop("event")
        if kind == "start":
            self.cache_blocks, self.start_seconds = event["cache_blocks"], event["seconds"]
        elif kind == "empty":
            self.free_blocks, self.memory = event["free_blocks"], event["memory"]
        else:
            requests = [Request(**request) for request in event.pop("requests")]
            self.waves.append(WaveResult(requests=requests, **event))


def make_waves(
    count: int,
    scale: Scale,
    *,
    seed: int,
    vocabulary: int,
    first_prompt: int | None = None,
    sleep: bool = False,
) -> list[Wave]:
    """Draw ``count`` requests; the same arguments draw the same ones.

    vocabulary: ids of prompts are below it. first_prompt: tokens of a first request that comes
        alone. sleep: let the engine sleep and wake in two places.
    """
    rng = random.Random(seed)
    prefixes = [make_prompt(scale.prefix, vocabulary, rng) for _ in range(2)]
    waves = []
    if first_prompt is not None:
        alone = Arrival(0, make_prompt(first_prompt, vocabulary, rng), scale.answer, 0, None)
        waves.append(Wave([alone], None, ""))
        count -= 1
    sizes = [scale.wave] * (count // scale.wave) + [count % scale.wave]
    sizes = [size for size in sizes if size]
    for number, size in enumerate(sizes):
        step, arrivals = 0, []
        for place in range(size):
            # Waves begin with a burst, whose prompts are computed before anybody decodes; later
            # requests meet decodes, and sometimes a full engine.
            if place >= size // 3 and rng.random() < 0.6:
                step += rng.randrange(1, 2 * scale.answer)
            arrivals.append(_draw(step, prefixes, scale, vocabulary, rng))
        then = ""
        if sleep and number in (len(sizes) // 4, 3 * len(sizes) // 4):
            then = "sleep"
        elif number % 5 == 2:
            then = "reset"
        waves.append(Wave(arrivals, rng.randrange(2, 12) if number % 3 == 1 else None, then))
    return waves


def _draw(
    step: int, prefixes: list[list[int]], scale: Scale, vocabulary: int, rng: random.Random
) -> Arrival:
    kind = rng.random()
    most = scale.short if kind < 0.55 else scale.medium if kind < 0.93 else scale.long
    shared = rng.choice(prefixes) if rng.random() < 0.15 else []
    own = min(most, scale.max_model_len - scale.answer - len(shared) - 1)
    prompt = shared + make_prompt(rng.randint(1, own), vocabulary, rng)
    return Arrival(
        step=step,
        prompt=prompt,
        max_tokens=rng.randint(1, scale.answer),
        priority=rng.choice([0, 0, 0, 1, -1]),
        abort_after=rng.choice([0, 1, 2, 5, 9]) if rng.random() < 0.1 else None,
    )


def engine_arguments(
    model: Path,
    scale: Scale,
    *,
    tp: int,
    dcp: int,
    use_gpu: bool,
    first_prompt: int | None = None,
    gpu_memory_utilization: float | None = None,
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for both sides.

    gpu_memory_utilization: let the cache take the memory that is left instead of
        ``scale.cache_blocks``; the sides then have different numbers of blocks, and none is short.
    """
    longest = max(scale.max_model_len, (first_prompt or 0) + scale.answer)
    arguments = backend_arguments(model, tp=tp, dcp=dcp, interleave=INTERLEAVE) | {
        "block_size": PAGE_TOKENS,
        "max_model_len": -(-longest // 64) * 64,
        "max_num_seqs": scale.max_num_seqs,
        "max_num_batched_tokens": scale.budget,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        # Admit prompts that do not fit as a whole: somebody will be preempted.
        "scheduler_reserve_full_isl": False,
        # With it, when a batch is scheduled depends on when the one before has ended.
        "async_scheduling": False,
    }
    if not list(model.glob("*.safetensors")):
        arguments["load_format"] = "dummy"
    if gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = gpu_memory_utilization
    else:
        blocks = scale.cache_blocks * arguments["max_model_len"] // scale.max_model_len
        arguments["num_gpu_blocks_override"] = blocks
        if not use_gpu:
            arguments["kv_cache_memory_bytes"] = 1 << 28
    return arguments


def run_side(
    gather: str,
    arguments: dict[str, Any],
    waves: Sequence[Wave],
    log: Path,
    *,
    use_gpu: bool,
    environment: dict[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Run ``waves`` in an engine process of its own; yield its events for :meth:`Side.add`.

    gather: the flag's value. environment: further variables.

    Raises:
        RuntimeError: the process failed; the message has the end of its log.
    """
    yield from run_program(
        "vllm.entrypoints.ckv.traffic",
        f"traffic, gather {gather}",
        {"arguments": arguments, "waves": [asdict(wave) for wave in waves]},
        # Short prompts are a part of the traffic.
        {GATHER: gather, f"{GATHER}_MIN_TOKENS": "0"} | (environment or {}),
        log,
        use_gpu=use_gpu,
    )


def memory(worker: Any) -> dict[str, Any]:
    """What one rank's process holds, for ``LLM.collective_rpc(memory)``.

    Returns:
        ``objects``, ``tensors`` and ``tensor_bytes`` (of distinct storages) that Python knows,
        ``resident`` bytes of the process, ``workspace`` (address and bytes of each allocation),
        whether it is ``locked``, and ``gather``, the bytes of it that the gather asked for. On a
        GPU also ``allocated``, ``reserved`` and their peaks since the last call, ``retries`` and
        ``ooms`` of the allocator, ``device_used`` bytes, and ``profiled``, the bytes of activations
        that vLLM's profiling run saw.
    """
    import gc
    from contextlib import suppress

    import torch
    from vllm.v1.worker.workspace import current_workspace_manager

    from vllm.v1.attention.backends.mla.ckv_gather.plan import CkvGather

    gc.collect()
    # isinstance would ask lazy modules for their class, and import them.
    objects = gc.get_objects()
    tensors = [found for found in objects if issubclass(type(found), torch.Tensor)]
    storages = {}
    for tensor in tensors:
        # Tensors of a compiler have no memory, and say so.
        with suppress(RuntimeError, NotImplementedError):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    manager = current_workspace_manager()
    gather = CkvGather.of_worker(worker)
    reserved = None if gather is None else gather.workspace
    with open("/proc/self/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    found: dict[str, Any] = {
        "objects": len(objects),
        "tensors": len(tensors),
        "tensor_bytes": sum(storages.values()),
        "resident": resident * 1024,
        "workspace": [
            [w.data_ptr(), w.nbytes] for w in manager._current_workspaces if w is not None
        ],
        "locked": manager.is_locked(),
        "gather": 0 if reserved is None else reserved.num_bytes,
    }
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        found |= {
            "allocated": stats["allocated_bytes.all.current"],
            "allocated_peak": stats["allocated_bytes.all.peak"],
            "reserved": stats["reserved_bytes.all.current"],
            "reserved_peak": stats["reserved_bytes.all.peak"],
            "retries": stats["num_alloc_retries"],
            "ooms": stats["num_ooms"],
            "device_used": total - free,
            "profiled": int(getattr(worker, "peak_activation_memory", 0)),
        }
        torch.cuda.reset_peak_memory_stats()
    return found


class Driver:
    """Plays waves in an engine of this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``).

    llm: a ``vllm.LLM``.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.schedule = self.scheduler.schedule
        self.scheduler.schedule = self._recorded
        self.numbers: dict[str, str] = {}
        self.steps: list[dict[str, int]] = []
        self.preempted = self.reset = self.most_running = self.most_waiting = 0

    def _recorded(self, *args: Any, **kwargs: Any) -> Any:
        scheduled = self.schedule(*args, **kwargs)
        tokens = scheduled.num_scheduled_tokens
        if tokens:
            self.steps.append({self.numbers[name]: count for name, count in tokens.items()})
        self.preempted += len(scheduled.preempted_req_ids or ())
        self.most_running = max(self.most_running, len(self.scheduler.running))
        self.most_waiting = max(self.most_waiting, len(self.scheduler.waiting))
        return scheduled

    @property
    def free_blocks(self) -> int:
        """Blocks of the KV cache that no request holds."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def play(self, wave: dict[str, Any]) -> WaveResult:
        """Play one :class:`Wave`, given as a dictionary, until the engine is empty again."""
        self.numbers, self.steps = {}, []
        self.preempted = self.reset = self.most_running = self.most_waiting = 0
        before, began = counters_of(self.llm), time.monotonic()
        outputs = self._serve(wave)
        seconds = time.monotonic() - began
        counters = difference(counters_of(self.llm), before)
        held = self.free_blocks, len(self.scheduler.requests)
        if wave["then"] == "reset":
            assert self.llm.reset_prefix_cache(), "the empty engine keeps its prefix cache"
        elif wave["then"] == "sleep":
            self.llm.sleep(level=1)
            self.llm.wake_up()
        return WaveResult(
            requests=[_request_of(outputs.get(str(n))) for n in range(len(wave["arrivals"]))],
            steps=self.steps,
            preempted=self.preempted - self.reset,
            reset=self.reset,
            most_running=self.most_running,
            most_waiting=self.most_waiting,
            free_blocks=held[0],
            known_requests=held[1],
            counters=counters,
            memory=self.llm.collective_rpc(memory),
            seconds=seconds,
        )

    def _serve(self, wave: dict[str, Any]) -> dict[str, Any]:
        arrivals = [Arrival(**arrival) for arrival in wave["arrivals"]]
        last = max(a.step + (a.abort_after or 0) for a in arrivals)
        outputs: dict[str, Any] = {}
        step = 0
        while step <= last or self.scheduler.has_requests():
            for number, arrival in enumerate(arrivals):
                if arrival.step == step:
                    self._add(str(number), arrival)
                if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                    self.engine.abort_request([str(number)])
            if step == wave["reset_at"]:
                self.reset += len(self.scheduler.running)
                self.llm.reset_prefix_cache(reset_running_requests=True)
            for output in self.engine.step():
                outputs[output.request_id] = output
            step += 1
        return outputs

    def _add(self, number: str, arrival: Arrival) -> None:
        from vllm.inputs import TokensPrompt

        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            max_tokens=arrival.max_tokens,
            ignore_eos=True,
            logprobs=2,
            detokenize=False,
        )
        # Times order requests of one priority; a clock would order them anew in every run.
        inner = self.engine.add_request(
            number,
            TokensPrompt(prompt_token_ids=arrival.prompt),
            sampling,
            arrival_time=float(number),
            priority=arrival.priority,
        )
        self.numbers[inner] = number


def _request_of(output: Any) -> Request:
    if output is None:
        return Request([], [], [], 0, False)
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    steps = completion.logprobs
    best = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in steps]
    return Request(
        tokens=tokens,
        logprobs=[step[token].logprob for step, token in zip(steps, tokens, strict=True)],
        lead=[first - second for first, second, *_ in best],
        cached_tokens=output.num_cached_tokens or 0,
        finished=output.finished,
    )


@dataclass
class Comparison:
    """Both sides' outputs.

    tokens: compared. near_ties: requests whose tokens part where the two best are within
        ``NEAR_TIE``; nothing is compared behind that token.
    max_logprob_delta: largest difference of a log-probability.
    other_batches: steps in which the sides scheduled different tokens.
    violations: one sentence each.
    """

    requests: int = 0
    tokens: int = 0
    near_ties: int = 0
    max_logprob_delta: float = 0.0
    other_batches: int = 0
    violations: list[str] = field(default_factory=list)


def compare(on: Side, off: Side) -> Comparison:
    """Compare the outputs and the schedules of both sides."""
    found = Comparison()
    if len(on.waves) != len(off.waves):
        found.violations.append(f"{len(on.waves)} waves with the gather, {len(off.waves)} without")
    for number, (mine, other) in enumerate(zip(on.waves, off.waves, strict=False)):
        found.other_batches += abs(len(mine.steps) - len(other.steps)) + sum(
            a != b for a, b in zip(mine.steps, other.steps, strict=False)
        )
        for place, pair in enumerate(zip(mine.requests, other.requests, strict=True)):
            found.requests += 1
            _compare_requests(found, f"wave {number}, request {place}", *pair)
    if found.other_batches and on.cache_blocks == off.cache_blocks:
        found.violations.append(
            f"{found.other_batches} steps scheduled different batches with equal caches"
        )
    return found


def _compare_requests(found: Comparison, where: str, mine: Request, other: Request) -> None:
    if mine.finished != other.finished or (mine.finished and len(mine.tokens) != len(other.tokens)):
        found.violations.append(f"{where}: one side did not finish, or not with as many tokens")
    # An aborted request may have come further on one side.
    pairs = zip(mine.tokens, other.tokens, mine.logprobs, other.logprobs, other.lead, strict=False)
    for place, (token, theirs, logprob, their_logprob, lead) in enumerate(pairs):
        delta = abs(logprob - their_logprob)
        found.tokens += 1
        if not delta <= LIMIT_VS_DCP:  # so that NaN is one, too
            found.violations.append(
                f"{where}, token {place}: log-probabilities differ by {delta:.4f}, the limit is "
                f"{LIMIT_VS_DCP}"
            )
        else:
            found.max_logprob_delta = max(found.max_logprob_delta, delta)
        if token == theirs:
            continue
        if lead <= NEAR_TIE:
            found.near_ties += 1
        else:
            found.violations.append(
                f"{where}, token {place}: {token} with the gather, {theirs} without, which leads "
                f"by {lead:.4f}"
            )
        return


def find_leaks(name: str, side: Side) -> list[str]:
    """Pages, requests, tensors and bytes that a side has kept, one sentence each."""
    found = []
    for number, wave in enumerate(side.waves):
        if wave.free_blocks != side.free_blocks:
            found.append(
                f"{name}: {wave.free_blocks} of {side.free_blocks} blocks are free after wave "
                f"{number}"
            )
        if wave.known_requests:
            found.append(f"{name}: {wave.known_requests} requests remain after wave {number}")
    for rank, start in enumerate(side.memory):
        samples = [wave.memory[rank] for wave in side.waves]
        where = f"{name}, rank {rank}"
        for sample in samples:
            if sample["workspace"] != start["workspace"]:
                found.append(
                    f"{where}: the workspace was {start['workspace']} (address, bytes) after the "
                    f"start and is {sample['workspace']}"
                )
                break
        # What is made once, in the first waves, is no leak; and what the last batch leaves behind
        # has that batch's size, so single samples differ.
        half = len(samples) // 2 + 1
        for what, allowed in _ALLOWED_GROWTH.items():
            values = [sample[what] for sample in samples if what in sample]
            if not values[half:]:
                continue
            before, after = max(values[:half]), max(values[half:])
            if after - before > allowed:
                found.append(
                    f"{where}: {what} reached {after:,} in the second half and {before:,} in the "
                    f"first, allowed are {allowed:,} more"
                )
        for sample in samples:
            held = sample.get("allocated_peak", 0) - sample.get("allocated", 0)
            if held > sample.get("profiled", held):
                found.append(
                    f"{where}: a batch held {held:,} bytes for a moment, the profiling run saw "
                    f"{sample['profiled']:,}"
                )
                break
        for what in ("retries", "ooms"):
            if what in start and samples[-1][what] != start[what]:
                found.append(f"{where}: {samples[-1][what] - start[what]} {what} of the allocator")
    return found


_ALLOWED_GROWTH = {
    "tensors": 0,
    "tensor_bytes": TENSOR_GROWTH,
    "allocated": 0,
    "objects": OBJECT_GROWTH,
}


def find_growth_beyond(on: Side, off: Side) -> list[str]:
    """Ranks that took more of the machine's memory with the gather only, one sentence each."""
    found = []
    for rank in range(len(on.memory)):
        for what, allowed in GROWTH_BEYOND_OFF.items():
            if what not in on.memory[rank]:
                continue
            grown, usual = (
                side.waves[-1].memory[rank][what]
                - side.waves[len(side.waves) // 2].memory[rank][what]
                for side in (on, off)
            )
            if grown - max(usual, 0) > allowed:
                found.append(
                    f"gather on, rank {rank}: {what} bytes grew by {grown:,} over the second half, "
                    f"by {usual:,} with the gather off; allowed are {allowed:,} more"
                )
    return found


def find_gaps(on: Side, off: Side, scale: Scale, *, short_of_blocks: bool) -> list[str]:
    """What this traffic should have contained and did not, one sentence each.

    short_of_blocks: the cache is smaller than what the requests want.
    """
    requests = [request for wave in on.waves for request in wave.requests]
    counters = [wave.counters for wave in on.waves]
    mixed = sum(c["ordinary_batches"].get("decode_tokens", 0) for c in counters)
    seen = {
        "gathered no batch": any(c["gathered_batches"] for c in counters),
        "had no prompt beside decodes": mixed,
        "had no prefix in the cache": not scale.prefix or any(r.cached_tokens for r in requests),
        "had no request aborted on its way": any(not r.finished for r in requests),
        f"never ran {scale.max_num_seqs} requests at once": any(
            wave.most_running >= scale.max_num_seqs for wave in on.waves
        ),
        "let nobody wait": any(wave.most_waiting for wave in on.waves),
        "preempted nobody": not short_of_blocks or any(wave.preempted for wave in on.waves),
        "reset no running request": any(wave.reset for wave in on.waves),
        "ran with the workspace unlocked": all(m["locked"] for m in on.memory),
    }
    gaps = [f"the side with the gather {text}" for text, happened in seen.items() if not happened]
    if any(wave.counters["gathered_batches"] for wave in off.waves):
        gaps.append("the side without the gather gathered")
    return gaps


def summary(side: Side) -> dict[str, Any]:
    """One side in numbers; memory of rank 0 after the start, in the middle, at the end, at most."""
    requests = [request for wave in side.waves for request in wave.requests]
    counters = [wave.counters for wave in side.waves]
    refused: dict[str, int] = {}
    for counted in counters:
        for reason, batches in counted["ordinary_batches"].items():
            refused[reason] = refused.get(reason, 0) + batches
    middle = side.waves[len(side.waves) // 2]
    return {
        "seconds": round(sum(wave.seconds for wave in side.waves), 1),
        "start_seconds": round(side.start_seconds, 1),
        "cache_blocks": side.cache_blocks,
        "waves": len(side.waves),
        "steps": sum(len(wave.steps) for wave in side.waves),
        "requests": len(requests),
        "unfinished_by_abort": sum(not request.finished for request in requests),
        "tokens": sum(len(request.tokens) for request in requests),
        "computed_tokens": sum(sum(step.values()) for wave in side.waves for step in wave.steps),
        "cached_tokens": sum(request.cached_tokens for request in requests),
        "preempted": sum(wave.preempted for wave in side.waves),
        "preempted_by_reset": sum(wave.reset for wave in side.waves),
        "most_running": max(wave.most_running for wave in side.waves),
        "most_waiting": max(wave.most_waiting for wave in side.waves),
        "gathered_batches": sum(counted["gathered_batches"] for counted in counters),
        "gathered_query_tokens": sum(counted["gathered_query_tokens"] for counted in counters),
        "ordinary_batches": refused,
        "memory": {
            "start": side.memory[0],
            "middle": middle.memory[0],
            "end": side.waves[-1].memory[0],
            "by_wave": {
                name: [wave.memory[0][name] for wave in side.waves]
                for name in (*_ALLOWED_GROWTH, *GROWTH_BEYOND_OFF)
                if name in side.memory[0]
            },
            "largest": {
                name: max(wave.memory[0][name] for wave in side.waves)
                for name in ("allocated_peak", "reserved_peak", "device_used")
                if name in side.memory[0]
            },
        },
    }


def _main() -> None:
    job, llm, emit = start_engine()
    driver = Driver(llm)
    emit(event="empty", free_blocks=driver.free_blocks, memory=llm.collective_rpc(memory))
    for wave in job["waves"]:
        emit(event="wave", **asdict(driver.play(wave)))


if __name__ == "__main__":
    _main()
