# SPDX-License-Identifier: Apache-2.0
"""What happens once, at start: refusals, the ranks' agreement, and a first run of everything.

The first run takes every operation that serving uses through its smallest and its largest shape
while vLLM profiles memory: kernels compile, communicators connect, and the profiler sees the peak
of both paths, because vLLM's own profiling run stops short of attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_dcp_group
from vllm.logger import init_logger

from vllm.v1.attention.backends.mla.ckv_gather import chunks, exchange
from vllm.v1.attention.backends.mla.ckv_gather.measuring import Clock, agree, measure_rates
from vllm.v1.attention.backends.mla.ckv_gather.rehearsal import EmptyBatch, Layer, LayerShapes

if TYPE_CHECKING:
    from vllm.v1.attention.backends.mla.ckv_gather.plan import CkvGather
    from vllm.v1.attention.backends.mla.sparse_mla_kernels import SparseMLAKernels

logger = init_logger(__name__)

CONFIG_KEY = "vllm_b12x_ckv"
"""Entry of ``VllmConfig.additional_config`` that keeps start-up plans of on and off apart."""


def obstacles(vllm_config: Any) -> list[tuple[str, str]]:
    """What the gather does not run with: (what and why, what to do about it), in words.

    vllm_config: the engine's configuration.
    """
    parallel = vllm_config.parallel_config
    found = []
    if parallel.use_ubatching:
        found.append(
            (
                "overlapping micro-batches, whose collectives would interleave",
                "drop --enable-dbo and --ubatch-size",
            )
        )
    if vllm_config.kv_transfer_config is not None:
        found.append(
            (
                "a KV connector, whose layer-wise loads it would not wait for",
                "drop --kv-transfer-config",
            )
        )
    return found


def refusals(vllm_config: Any, mode: bool | str) -> list[str]:
    """Reasons, one sentence each, why this configuration cannot run on B12X_MLA_SPARSE.

    vllm_config: the engine's configuration. mode: the value of ``VLLM_B12X_MLA_CKV_GATHER``.
    """
    parallel = vllm_config.parallel_config
    pool_size = int(getattr(vllm_config.model_config.hf_text_config, "index_kpool", 1))
    interleave = parallel.cp_kv_cache_interleave_size
    reasons = []
    if parallel.decode_context_parallel_size > 1 and interleave % pool_size:
        reasons.append(
            f"--cp-kv-cache-interleave-size {interleave} would split an index pool of {pool_size} "
            f"tokens over ranks; set it to {-(-interleave // pool_size) * pool_size} or another "
            f"multiple of {pool_size}"
        )
    prefill = parallel.prefill_context_parallel_size
    if prefill > 1:
        reasons.append(
            f"prefill context parallelism of {prefill} splits the queries as well, which no batch "
            "of this backend can do; set --prefill-context-parallel-size 1"
        )
    if mode is True:
        reasons += [
            f"full-CKV gather does not run with {what}; {remedy}, or set "
            "VLLM_B12X_MLA_CKV_GATHER to auto or 0"
            for what, remedy in obstacles(vllm_config)
        ]
    return reasons


def why_off(vllm_config: Any, mode: bool | str) -> str | None:
    """Why no batch of this configuration gathers; None if batches may. Both as of :func:`refusals`.

    With ``auto`` the gather is off where it cannot run, instead of refusing to start.
    """
    if not mode:
        return "VLLM_B12X_MLA_CKV_GATHER is 0 or unset"
    if vllm_config.parallel_config.decode_context_parallel_size == 1:
        return "without decode context parallelism every rank has all records"
    if mode == "auto":
        for what, remedy in obstacles(vllm_config):
            return f"VLLM_B12X_MLA_CKV_GATHER is auto and there is {what}; to gather, {remedy}"
    return None


def chunk_remark(vllm_config: Any) -> str | None:
    """What :func:`.chunks.remark` has to say about this configuration, whose page is final.

    None as well if vLLM does not align chunks to pages: its scheduler asks for the same mode.
    """
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if cache.mamba_cache_mode != "align":
        return None
    budget, flag = scheduler.max_num_batched_tokens, "--max-num-batched-tokens"
    scheduled = scheduler.max_num_scheduled_tokens
    if scheduled is not None and scheduled < budget:
        budget, flag = scheduled, "--max-num-scheduled-tokens"
    decode_tokens = scheduler.max_num_seqs * (1 + vllm_config.num_speculative_tokens)
    return chunks.remark(cache.block_size, budget, decode_tokens, flag)


def separate_startup_plans(vllm_config: Any, facts: dict[str, Any]) -> None:
    """Make ``facts`` a part of the configuration's hash, by which vLLM files start-up plans.

    A plan saved with the gather off promises the KV cache the bytes that the gather reserves.

    Raises:
        ValueError: ``additional_config`` is an object of somebody else's type, which offers no
            place for the facts, and start-up plans are on.
    """
    import vllm.envs as envs

    if isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config[CONFIG_KEY] = facts
    elif envs.VLLM_ENABLE_STARTUP_PLAN:
        raise ValueError(
            "VLLM_ENABLE_STARTUP_PLAN=1 could reuse a plan that was saved without the full-CKV "
            f"gather, because additional_config is a {type(vllm_config.additional_config).__name__}"
            " and not a dictionary; unset VLLM_ENABLE_STARTUP_PLAN"
        )


def require_agreement(facts: Sequence[dict[str, Any]]) -> None:
    """Check that all ranks of a DCP group start with the same facts.

    facts: one dictionary per rank, in rank order, the same list on every rank: so all of them
        raise, or none.

    Raises:
        RuntimeError: a value differs. The message names it, both ranks and both values.
    """
    for rank, other in enumerate(facts):
        for name in facts[0].keys() | other.keys():
            here, there = facts[0].get(name), other.get(name)
            if here != there:
                raise RuntimeError(
                    f"the ranks of the DCP group disagree: {name} is {here!r} on rank 0 and "
                    f"{there!r} on rank {rank}; start every rank with the same flags and the same "
                    "version, or they would wait for each other in different collectives"
                )


def warm_up(
    gather: CkvGather, kernels: SparseMLAKernels, shapes: LayerShapes, device: torch.device
) -> None:
    """Have ``kernels`` compile for the frozen geometry, and log how long it took.

    Most of a machine's first start is this. All ranks of the DCP group have to call it.

    Raises:
        RuntimeError: it failed on another rank. What fails on this one is raised as it is.
    """
    geometry, world = gather.geometry.get(), gather.dcp_world_size
    begin, failure = _moment(device), None
    try:
        kernels.warm_up(
            device,
            head_counts=sorted({shapes.local_heads, world * shapes.local_heads}),
            index_heads=shapes.index_heads,
            pool_size=gather.pool_size,
            topk=shapes.pool_topk,
            width=shapes.width,
            dcp_world_size=world,
            interleave=geometry.interleave,
            page_size=geometry.page_size,
            record_bytes=geometry.record.record_bytes,
            scale=shapes.scale,
        )
        end = _moment(device)
    except Exception as error:
        failure = repr(error)
        raise
    finally:
        if world > 1:
            # The others would wait in their next collective for a rank that has given up.
            found = {"failure": failure}
            every = exchange.all_gather_facts(found, get_dcp_group().cpu_group)
            require_success([rank["failure"] for rank in every], get_dcp_group().rank_in_group)
    logger.info("full-CKV gather: warming kernels up took %.1f s", end - begin)


def require_success(failures: Sequence[str | None], rank: int) -> None:
    """Stop a rank whose kernels are ready if those of another one are not.

    failures: what failed on each rank, None where nothing did. rank: this one's number.

    Raises:
        RuntimeError: something failed elsewhere, and nothing here.
    """
    failed = [number for number, failure in enumerate(failures) if failure is not None]
    if failed and rank not in failed:
        first = failed[0]
        raise RuntimeError(
            f"the kernels of rank {first} of the DCP group did not start: {failures[first]}; see "
            "that rank's lines of the log. This rank stops as well, or it would wait for it"
        )


def run_everything_once(
    gather: CkvGather,
    kernels: SparseMLAKernels,
    shapes: LayerShapes,
    device: torch.device,
    query_gather: Callable[..., torch.Tensor] | None,
    combine: Callable[..., torch.Tensor] | None,
    clock: Clock | None = None,
) -> None:
    """Run both paths on empty batches: one token, then the largest batch.

    All ranks of the DCP group have to call it, with the same shapes: it enters every collective
    in one order. Ends with as little memory as it began with, the profiler keeps the peak. Logs
    what it cost.

    query_gather, combine: the layer's DCP callables, None without DCP.
    clock: for rates, if a decision depends on them; None: it has to do without.
    """
    # Nothing profiles host memory, and the reference kernels would take minutes.
    largest = shapes.num_tokens if device.type == "cuda" else min(shapes.num_tokens, 8)
    layer = Layer(gather, kernels, device, query_gather, combine)
    moments = [_moment(device)]
    for num_tokens in dict.fromkeys((1, largest)):
        batch = EmptyBatch(shapes, num_tokens, device)
        layer.write(batch)
        layer.ordinary(batch)()
    moments.append(_moment(device))
    if gather.workspace is not None:
        _all_gathered_once(layer, EmptyBatch(shapes, largest, device))
    moments.append(_moment(device))
    if gather.time_model is not None:
        rates = None if clock is None else agree(measure_rates(layer, shapes, largest, clock))
        gather.adopt(rates)
    moments.append(_moment(device))
    logger.info(
        "full-CKV gather: first run of everything took %.1f s: ordinary path %.1f s, gathered path "
        "%.1f s, measuring %.1f s",
        moments[-1] - moments[0],
        *(end - begin for begin, end in pairwise(moments)),
    )


def _moment(device: torch.device) -> float:
    """Seconds on the host's clock when all work that was given to ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def _all_gathered_once(layer: Layer, batch: EmptyBatch) -> None:
    gather = layer.gather
    most, granule = gather.max_visible_tokens, gather.geometry.get().window_granule
    visible = most if batch.device.type == "cuda" else min(most, max(4096, granule))
    # One token leaves every rank but the first without a record, and all without a pool; a pool
    # on the first rank alone comes next.
    batches = [[length] for length in dict.fromkeys((1, min(gather.pool_size, visible), visible))]
    # The largest batch in windows: of one request, all of whose rows see at least two, or, if none
    # can be that long, of several requests.
    window = visible // granule * granule
    batches.append([max(visible + 1, window + batch.num_tokens)] if window else [visible, visible])
    received = gather.counters.ckv_bytes
    for lengths in batches:
        layer.gathered(batch, lengths, capacity=visible)()
    if gather.early_exchange:
        # With nothing to exchange, and with a context.
        for length in dict.fromkeys((min(batch.num_tokens, visible), visible)):
            layer.gathered(batch, [length], capacity=visible, early=True)()
    if gather.shard_selection:
        # One row leaves every rank but the first without a row to select for.
        for rows in dict.fromkeys((1, batch.num_tokens)):
            few = replace(batch, num_tokens=rows)
            shares = gather.dcp_world_size
            layer.gathered(few, [visible], capacity=visible, selection_shares=shares)()
    gather.counters.ckv_bytes = received


def lock_after_warm_up(worker: Any) -> bool:
    """Lock vLLM's workspace if a layer of ``worker`` gathers; returns whether it did.

    vLLM locks after it has captured graphs, and so never in eager mode. Locking again is harmless.
    """
    from vllm.v1.worker.workspace import is_workspace_manager_initialized, lock_workspace

    from vllm.v1.attention.backends.mla.ckv_gather.plan import CkvGather

    gather = CkvGather.of_worker(worker)
    if gather is None or gather.workspace is None or not is_workspace_manager_initialized():
        return False
    lock_workspace()
    return True
