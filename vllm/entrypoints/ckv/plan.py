# SPDX-License-Identifier: Apache-2.0
"""``vllm-ckv plan``: what the gather costs and saves for a model and its flags, before serving.

Needs a ``config.json`` and nothing else. Sizes come from the modules that reserve and count while
serving; what vLLM decides (the page size, the bytes of a block) is repeated here and compared with
vLLM's own functions in the tests. Times are those of the model that decides while serving, with
rates of :mod:`.known_rates` where serving measures its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.entrypoints.ckv.known_rates import GPUS, LINK_EFFICIENCY, Gpu, known_rates
from vllm.entrypoints.ckv.output import (
    UsageError,
    check_folders,
    format_table,
    new_figure,
    save_figure,
    size,
)
from vllm.v1.attention.backends.mla.ckv_gather import chunks
from vllm.v1.attention.backends.mla.ckv_gather.byte_model import (
    ByteModel,
    last_gain,
    ordinary_peak_bytes,
)
from vllm.v1.attention.backends.mla.ckv_gather.geometry import (
    FP8_DS_MLA,
    INDEX_PAGE_BYTES,
    INDEX_RECORD_BYTES,
    MAX_VISIBLE_TOKENS,
    NVFP4_DS_MLA,
    PageGeometry,
    RecordFormat,
    max_index_pages,
)
from vllm.v1.attention.backends.mla.ckv_gather.time_model import Costs, TimeModel

if TYPE_CHECKING:
    from vllm.v1.attention.backends.mla.ckv_gather.workspace import KernelScratch

MODEL_TYPES = ("glm5_next", "glm5_next_text")
RECORDS = {record.name: record for record in (FP8_DS_MLA, NVFP4_DS_MLA)}
STATE_BYTES_PER_TOKEN = 512
"""Bytes of a token by which vLLM aligns pages to KDA states, whatever the record."""

KERNEL_BLOCK = 256
"""Tokens that the attention backend's pages are a multiple of."""

MLA_BLOCK = 128
"""vLLM keeps blocks of hybrid MLA models at a multiple of this many tokens."""

DEFAULT_GPU = "rtx-pro-6000"


@dataclass(frozen=True)
class ModelSizes:
    """What the plan reads from a model's configuration.

    attention_layers: sparse MLA layers, each with an indexer. state_layers: KDA layers.
    state_heads, state_dim, state_kernel: of a KDA layer.
    """

    name: str
    attention_layers: int
    state_layers: int
    heads: int
    index_heads: int
    index_topk: int
    pool_size: int
    state_heads: int
    state_dim: int
    state_kernel: int
    max_model_len: int


def find_config(model: str) -> Path:
    """The ``config.json`` of ``model``: the file, its folder, or a name in the local HF cache.

    Raises:
        UsageError: there is none.
    """
    path = Path(model)
    if path.is_dir() and (path / "config.json").is_file():
        return path / "config.json"
    if path.is_file():
        return path
    if path.is_dir():
        raise UsageError(
            f"there is no config.json in {model}: give the folder of the model, or the file itself"
        )
    if not path.is_absolute() and model.count("/") == 1 and not model.startswith("."):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        raise UsageError(
            f"{model} is neither a folder here nor in the local Hugging Face cache: run "
            f"'hf download {model} config.json', then this command again"
        )
    raise UsageError(f"{model} does not exist: give a folder with a config.json, or the file")


def read_model(model: str) -> ModelSizes:
    """Read the sizes of ``model``, see :func:`find_config`.

    Raises:
        UsageError: no configuration, not one of glm5_next, or with sizes that the backend refuses.
    """
    path = find_config(model)
    try:
        document = json.loads(path.read_text())
        model_type = document.get("model_type")
    except (OSError, UnicodeDecodeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is not a model's config.json: {error}") from error
    if model_type not in MODEL_TYPES:
        raise UsageError(
            f"{path} is of model type {model_type!r}: full-CKV prefill works with glm5_next "
            "(GLM-5.3-Flash) only"
        )
    from transformers import Glm5NextTextConfig

    try:
        config = Glm5NextTextConfig(**document.get("text_config", document))
    except Exception as error:
        raise UsageError(f"{path} is not a usable glm5_next configuration: {error}") from error
    if config.kv_lora_rank != 512 or config.index_head_dim != 128:
        raise UsageError(
            f"{path} has kv_lora_rank {config.kv_lora_rank} and index_head_dim "
            f"{config.index_head_dim}: the backend reads latents of 512 and index keys of 128"
        )
    layers = config.layer_types or []
    return ModelSizes(
        name=path.parent.resolve().name,
        attention_layers=layers.count("indexed_attention"),
        state_layers=layers.count("linear_attention"),
        heads=config.num_attention_heads,
        index_heads=config.index_n_heads,
        index_topk=config.index_topk,
        pool_size=config.index_kpool,
        state_heads=config.linear_num_heads,
        state_dim=config.linear_head_dim,
        state_kernel=config.linear_conv_kernel_dim,
        max_model_len=config.max_position_embeddings,
    )


def state_bytes(sizes: ModelSizes, tp: int, speculative_tokens: int) -> int:
    """Bytes of one KDA layer's state on one rank: bfloat16 convolution, float32 recurrence."""
    if not sizes.state_layers:
        return 0
    width = 3 * sizes.state_heads * sizes.state_dim // tp
    convolution = width * (sizes.state_kernel - 1 + speculative_tokens) * 2
    return convolution + sizes.state_heads // tp * sizes.state_dim**2 * 4


def vllm_page_size(
    sizes: ModelSizes,
    *,
    tp: int,
    family: int,
    block_size: int | None = None,
    speculative_tokens: int = 0,
) -> int:
    """Tokens in a page as vLLM aligns it: a page is at least as large as a KDA state.

    family: of the GPU; the index kernels of family 120 take pages of 64 pools only, those of
        others 32 as well. block_size: ``--block-size``; None: vLLM's choice.
    """
    pools = 64 if family == 120 else 32
    granule = lcm(KERNEL_BLOCK, pools * sizes.pool_size)
    block = block_size or granule
    alignment = max(KERNEL_BLOCK, block, MLA_BLOCK)
    needed = (
        -(-state_bytes(sizes, tp, speculative_tokens) // (alignment * STATE_BYTES_PER_TOKEN))
        * alignment
    )
    needed = -(-needed // granule) * granule
    return max(block, needed)


def block_bytes(sizes: ModelSizes, page_size: int, record: RecordFormat = FP8_DS_MLA) -> int:
    """Bytes of one block of the KV cache on one rank.

    The records and index keys of all sparse MLA layers; KDA states use the same blocks, at least
    one state each. Row numbers address records and page numbers address index pages, so blocks are
    whole ones of both apart, unless a block has a single index page.
    """
    index = page_size // sizes.pool_size * INDEX_RECORD_BYTES
    content = sizes.attention_layers * (page_size * record.record_bytes + index)
    if sizes.state_layers:
        content = max(content, page_size * STATE_BYTES_PER_TOKEN)
    step = record.record_bytes
    if index > INDEX_PAGE_BYTES:
        step = lcm(step, INDEX_PAGE_BYTES)
    return -(-content // step) * step


@dataclass(frozen=True)
class ContextRow:
    """One chunk at one context length; bytes are those one rank receives, in all layers.

    context_tokens: visible to the last query of the chunk, which is part of it.
    ckv_seconds, dcp_seconds: of exchanges, selection and attention, in all layers.
    windows: in which it is gathered; more than one if the context exceeds the reserved tokens.
    selection_shares: ranks that select for a share of the chunk each, 1 if every one selects for
        all of it.
    """

    context_tokens: int
    ckv_bytes: int
    dcp_bytes: int
    ckv_seconds: float
    dcp_seconds: float
    windows: int
    selection_shares: int


@dataclass(frozen=True)
class Plan:
    """The answer; every size is that of one GPU unless it says otherwise.

    gpu_assumed: nobody named a GPU and there is none here.
    page_tokens: the page that vLLM chooses, on every rank.
    chunks: how prefix caching cuts prompts, and a better budget; None: chunks fill the budget.
    limit_tokens: visible tokens that buffers are reserved for, and that one window holds.
    scratch_bytes: the part of ``workspace_bytes`` that b12x takes, or on Hopper FlashMLA.
    kernels: that would serve.
    kernel_bytes: what they take with the gather off, b12x of the workspace, Triton besides it;
        None: b12x's sizes are its own to tell, and it is not installed here.
    ordinary_peak_bytes: what ordinary DCP prefill takes at its largest chunk, for comparison.
    kv_tokens_given_up: tokens of the KV cache of all ranks that the bytes would have held which
        are reserved with the gather on and not with it off.
    shard_selection, early_exchange, mixed: options that estimates and sizes are for.
    break_even_bytes: context up to which a gather moves fewer bytes. break_even_seconds: up to
        which it takes less time by this estimate. A shared selection may gain once more behind it.
    """

    model: ModelSizes
    gpu: Gpu
    gpu_assumed: bool
    tp: int
    dcp: int
    interleave: int
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dcp_comm_backend: str
    shard_selection: bool
    early_exchange: bool
    mixed: bool
    link_gbps: float
    page_tokens: int
    chunks: str | None
    limit_tokens: int
    capacity_records: int
    workspace_bytes: int
    scratch_bytes: int
    kernels: str
    kernel_bytes: int | None
    staging_bytes: int
    ordinary_peak_bytes: int
    kv_block_bytes: int
    kv_tokens_given_up: int
    break_even_bytes: int
    break_even_seconds: int
    rows: list[ContextRow]


def _check(tp: int, dcp: int, sizes: ModelSizes, **counts: int) -> None:
    for name, value in {"tp": tp, "dcp": dcp, **counts}.items():
        if value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value} is not possible: give at least 1")
    for name, heads in (("attention", sizes.heads), ("KDA", sizes.state_heads)):
        if heads % tp:
            raise UsageError(
                f"--tp {tp} does not divide the model's {heads} {name} heads: choose a divisor"
            )
    if tp % dcp:
        fitting = ", ".join(str(n) for n in range(2, tp + 1) if tp % n == 0) or "1"
        raise UsageError(f"--dcp {dcp} does not divide --tp {tp}: choose {fitting}")
    if dcp == 1:
        raise UsageError(
            "--dcp 1 leaves nothing to gather, every rank has all records: give --dcp 2 or more, "
            "or serve without this backend"
        )


def list_width(sizes: ModelSizes) -> int:
    """Columns of vLLM's lists of selected tokens: the selection, aligned."""
    return -(-(sizes.index_topk + sizes.pool_size - 1) // 128) * 128


def b12x_scratch(
    sizes: ModelSizes, page: int, record: RecordFormat, heads: Sequence[int]
) -> list[KernelScratch] | None:
    """What b12x takes of the workspace for each of ``heads``; None if it is not installed.

    Empty: b12x has no kernel for one of the sizes, and Triton serves.
    """
    from vllm.v1.attention.backends.mla.ckv_gather.workspace import KernelScratch

    if find_spec("b12x") is None:
        return None
    try:
        from vllm.v1.attention.backends.mla.sparse_mla_kernels import b12x
    except ImportError:
        return None
    try:
        planned = b12x.Sizes(
            page_size=page,
            record_bytes=record.record_bytes,
            head_counts=tuple(sorted(set(heads))),
            index_heads=max(sizes.index_heads, 32),
            topk=sizes.index_topk // sizes.pool_size,
            width=sizes.index_topk + sizes.pool_size - 1,
            scale=1.0,  # no size follows from it
        )
    except ValueError:
        return []
    import torch

    plans = b12x.declare(planned, torch.device("cpu"))
    selection = tuple(b12x.selection_scratch(plans))
    return [
        KernelScratch(
            tuple(b12x.attention_scratch(planned, plans, count, list_width(sizes))), selection
        )
        for count in heads
    ]


def layer_model(
    sizes: ModelSizes,
    gpu: Gpu,
    *,
    tp: int,
    dcp: int,
    link_gbps: float,
    interleave: int = 4,
    record: RecordFormat = FP8_DS_MLA,
    dcp_comm_backend: str = "ag_rs",
) -> TimeModel:
    """One sparse MLA layer of ``sizes`` on one of ``tp`` GPUs, with the rates of a known ``gpu``.

    link_gbps: GB/s that a rank receives in an all-gather.
    """
    model = ByteModel(
        dcp_world_size=dcp,
        interleave=interleave,
        pool_size=sizes.pool_size,
        record_bytes=record.record_bytes,
        local_heads=sizes.heads // tp,
        pool_topk=sizes.index_topk // sizes.pool_size,
        a2a=dcp_comm_backend == "a2a",
    )
    rates = known_rates(
        gpu,
        local_heads=sizes.heads // tp,
        index_heads=sizes.index_heads,
        world=dcp,
        pool_size=sizes.pool_size,
        link_gbps=link_gbps,
    )
    return TimeModel(model, rates)


def make_plan(
    sizes: ModelSizes,
    gpu: Gpu,
    *,
    tp: int,
    dcp: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    interleave: int = 4,
    kv_cache_dtype: str = FP8_DS_MLA.name,
    dcp_comm_backend: str = "ag_rs",
    link_gbps: float | None = None,
    block_size: int | None = None,
    max_tokens: int | None = None,
    speculative_tokens: int = 0,
    shard_selection: bool = False,
    early_exchange: bool = False,
    mixed: bool = False,
    gpu_assumed: bool = False,
) -> Plan:
    """Plan ``sizes`` on ``gpu``; the arguments are vLLM's flags of the same names.

    max_tokens: ``VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS``.
    shard_selection: ``VLLM_B12X_MLA_CKV_SHARD_SELECTION``, which needs memory and shares out where
        these rates say so.
    early_exchange: ``VLLM_B12X_MLA_CKV_EARLY_EXCHANGE``, which needs memory and moves the context
        alone; that it moves beside other work is left out of the times.
    mixed: ``VLLM_B12X_MLA_CKV_GATHER_MIXED``: times are those of a chunk beside decodes, whose
        ordinary collectives are there on either path; bytes are the chunk's alone in any case.

    Raises:
        UsageError, ValueError: the sizes do not go together; the message has the remedy.
    """
    from vllm.v1.attention.backends.mla.ckv_gather.staging import device_bytes
    from vllm.v1.attention.backends.mla.ckv_gather.windows import own_lengths, plan_spans
    from vllm.v1.attention.backends.mla.ckv_gather.workspace import (
        NO_SCRATCH,
        KernelScratch,
        WorkspacePlan,
    )
    from vllm.v1.attention.backends.mla.sparse_mla_kernels.scratch import (
        flashmla_shapes,
        triton_bytes,
    )

    _check(
        tp,
        dcp,
        sizes,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        interleave=interleave,
        max_tokens=1 if max_tokens is None else max_tokens,
    )
    if max_tokens is not None and max_tokens > MAX_VISIBLE_TOKENS:
        raise UsageError(
            f"--max-tokens {max_tokens} is above the {MAX_VISIBLE_TOKENS} tokens that a gather "
            "takes: give less, or leave it out"
        )
    if block_size is not None and (block_size < 1 or block_size % KERNEL_BLOCK):
        raise UsageError(
            f"--block-size {block_size} is no multiple of {KERNEL_BLOCK}: leave it out, vLLM "
            f"chooses one, or give {-(-max(block_size, 1) // KERNEL_BLOCK) * KERNEL_BLOCK}"
        )
    if speculative_tokens < 0:
        raise UsageError(f"--num-speculative-tokens {speculative_tokens} is not possible: give 0")
    link = gpu.link_gbps * LINK_EFFICIENCY if link_gbps is None else link_gbps
    if not link > 0:
        raise UsageError(f"--link-gbps {link:g} is not a speed: give GB/s above 0")
    record = RECORDS[kv_cache_dtype]
    page_of = {"tp": tp, "family": gpu.family, "speculative_tokens": speculative_tokens}
    page = vllm_page_size(sizes, block_size=block_size, **page_of)
    geometry = PageGeometry(page, record, sizes.pool_size, interleave, dcp)
    geometry.check_index_page()

    limit = min(max_model_len, MAX_VISIBLE_TOKENS) if max_tokens is None else max_tokens
    geometry.check_window(limit, max_model_len=max_model_len)
    reserve = {"max_tokens": limit, "max_num_seqs": max_num_seqs}
    capacity = geometry.capacity(**reserve)
    local_heads = sizes.heads // tp
    kernels, gathered, ordinary = "Triton", NO_SCRATCH, NO_SCRATCH
    held: int | None = triton_bytes(gpu.family)
    if gpu.family == 90:
        flashmla = flashmla_shapes(
            max_records=dcp * capacity,
            max_tokens=max_num_batched_tokens,
            num_heads=local_heads,
            width=list_width(sizes),
        )
        gathered = KernelScratch(tuple(flashmla))
    elif gpu.family == 120:
        scratch = b12x_scratch(sizes, page, record, (local_heads, dcp * local_heads))
        if scratch is None:
            kernels, held = "b12x", None
        elif scratch:
            gathered, ordinary = scratch
            kernels, held = "b12x", ordinary.num_bytes
    shared = (max_num_batched_tokens, sizes.index_topk // sizes.pool_size)
    selection = shared if shard_selection else (0, 0)
    sized = partial(
        WorkspacePlan.from_geometry,
        geometry,
        limit,
        max_num_seqs,
        selection=selection,
        early_exchange=early_exchange,
    )
    bare = sized().num_bytes
    workspace = sized(gathered).num_bytes_beside(ordinary)
    staging = device_bytes(max_num_seqs, dcp, max_index_pages(limit, sizes.pool_size))
    block = block_bytes(sizes, page, record)
    # Scratch of ordinary batches is there with the gather off too.
    more = workspace + staging - ordinary.num_bytes
    times = layer_model(
        sizes,
        gpu,
        tp=tp,
        dcp=dcp,
        link_gbps=link,
        interleave=interleave,
        record=record,
        dcp_comm_backend=dcp_comm_backend,
    )
    chunk = min(max_num_batched_tokens, max_model_len)
    layers = sizes.attention_layers

    @cache
    def judged(context: int) -> tuple[Costs, int, int]:
        """What a chunk costs, its windows, and the ranks that select for a share of it."""
        granule = geometry.window_granule
        # Less than a window is reserved where no context is longer; the search for the end of the
        # gain passes that all the same.
        window = max(limit, granule)
        batch = [context], [chunk]
        cut = plan_spans(*batch, capacity=window, granule=granule, num_rows=chunk)
        own = own_lengths(*batch, cut) if early_exchange else ()
        pairs = times.pairs(*batch)
        shares = times.selection_shares(pairs, cut) if shard_selection else 1
        costs = times.costs(*batch, cut, shares=shares, own=own, beside_decodes=mixed, pairs=pairs)
        return costs, sum(span.num_windows for span in cut), shares

    def row(context: int) -> ContextRow:
        costs, windows, shares = judged(context)
        assert costs.gathered_seconds is not None and costs.ordinary_seconds is not None
        return ContextRow(
            context_tokens=context,
            ckv_bytes=layers * costs.gathered_bytes,
            dcp_bytes=layers * costs.ordinary_bytes,
            ckv_seconds=layers * costs.gathered_seconds,
            dcp_seconds=layers * costs.ordinary_seconds,
            windows=windows,
            selection_shares=shares,
        )

    def fewer_bytes(context: int) -> bool:
        costs, _, _ = judged(context)
        return costs.gathered_bytes < costs.ordinary_bytes

    def less_time(context: int) -> bool:
        return judged(context)[0].gains

    contexts = [chunk]
    while contexts[-1] * 2 < max_model_len:
        contexts.append(contexts[-1] * 2)
    if contexts[-1] != max_model_len:
        contexts.append(max_model_len)
    return Plan(
        model=sizes,
        gpu=gpu,
        gpu_assumed=gpu_assumed,
        tp=tp,
        dcp=dcp,
        interleave=interleave,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        dcp_comm_backend=dcp_comm_backend,
        shard_selection=shard_selection,
        early_exchange=early_exchange,
        mixed=mixed,
        link_gbps=link,
        page_tokens=page,
        chunks=(
            chunks.remark(page, max_num_batched_tokens, max_num_seqs * (1 + speculative_tokens))
            if sizes.state_layers
            else None
        ),
        limit_tokens=limit,
        capacity_records=capacity,
        workspace_bytes=workspace,
        scratch_bytes=workspace - bare,
        kernels=kernels,
        kernel_bytes=held,
        staging_bytes=staging,
        ordinary_peak_bytes=ordinary_peak_bytes(chunk, local_heads * dcp),
        kv_block_bytes=block,
        kv_tokens_given_up=-(-more // block) * page * dcp,
        break_even_bytes=last_gain(fewer_bytes, chunk),
        break_even_seconds=last_gain(less_time, chunk),
        rows=[row(context) for context in contexts],
    )


def _pays(context: int, chunk: int, max_model_len: int) -> str:
    if context < chunk:
        return "never, not even for a prompt's first chunk"
    if context >= max_model_len:
        return f"up to max_model_len, {max_model_len:,} tokens"
    return f"up to {context:,} tokens of context"


def describe(plan: Plan) -> str:
    """The text that people read."""
    sizes = plan.model
    chunk = plan.rows[0].context_tokens
    reserved = plan.workspace_bytes + plan.staging_bytes
    user = "b12x" if plan.kernels == "b12x" else "FlashMLA"
    scratch = f", {size(plan.scratch_bytes)} of it because of {user}" if plan.scratch_bytes else ""
    if plan.kernel_bytes is None:
        held = f"{plan.kernels} takes more, unknown here: it is not installed"
    elif plan.kernels == "b12x":
        held = f"b12x takes {size(plan.kernel_bytes)}/GPU of the workspace with the gather off too"
    else:
        held = f"{plan.kernels} holds {size(plan.kernel_bytes)}/GPU more, with the gather off too"
    lines = [
        f"{sizes.name}: {sizes.attention_layers} sparse MLA layers, {sizes.state_layers} KDA "
        f"layers, {sizes.heads} heads; TP {plan.tp}, DCP {plan.dcp}, {plan.gpu.title}"
        + (" (assumed: there is no GPU here; say which with --gpu)" if plan.gpu_assumed else ""),
        "",
        f"page            {plan.page_tokens:,} tokens",
        f"capacity        {plan.capacity_records:,} records/rank "
        f"({plan.limit_tokens:,} visible tokens, {plan.max_num_seqs} requests)",
        f"workspace       {size(reserved)}/GPU at most "
        f"(ordinary prefill's own peak: {size(plan.ordinary_peak_bytes)}){scratch}",
        f"kernels         {held}",
        f"KV cache        {plan.kv_tokens_given_up:,} tokens given up, of all ranks together",
        f"fewer bytes     {_pays(plan.break_even_bytes, chunk, plan.max_model_len)}",
        f"less time       {_pays(plan.break_even_seconds, chunk, plan.max_model_len)}, "
        f"estimated for {plan.link_gbps:.3g} GB/s" + (", beside decodes" if plan.mixed else ""),
        *([] if plan.chunks is None else ["", plan.chunks.replace("; ", ";\n")]),
        "",
        f"a chunk of {chunk:,} tokens in all sparse MLA layers: received by one rank, and how long",
        "their collectives, selection and attention take, which is a part of the prefill:",
    ]
    table = [["context", "full-CKV", "ordinary DCP", "ratio", "ms", "(DCP ms)", "windows"]]
    if plan.shard_selection:
        table[0].append("shares")
    table += [
        [
            f"{row.context_tokens:,}",
            size(row.ckv_bytes),
            size(row.dcp_bytes),
            f"{row.dcp_bytes / row.ckv_bytes:.1f}x" if row.ckv_bytes else "-",
            f"{row.ckv_seconds * 1e3:.2f}",
            f"{row.dcp_seconds * 1e3:.2f}",
            f"{row.windows}",
            *([f"{row.selection_shares}"] if plan.shard_selection else []),
        ]
        for row in plan.rows
    ]
    return "\n".join(lines) + "\n" + format_table(table)


def draw(plan: Plan, path: Path) -> None:
    """Bytes of a chunk over context, both paths, to an image at ``path``.

    Raises:
        UsageError: matplotlib is not installed, or ``path`` cannot be written.
    """
    figure = new_figure()
    axes = figure.subplots()
    contexts = [row.context_tokens for row in plan.rows]
    axes.plot(contexts, [row.dcp_bytes / 1e9 for row in plan.rows], "o-", label="ordinary DCP")
    axes.plot(contexts, [row.ckv_bytes / 1e9 for row in plan.rows], "o-", label="full-CKV")
    if plan.limit_tokens < contexts[-1]:
        axes.axvline(plan.limit_tokens, linestyle=":", color="grey", label="one window")
    if contexts[0] <= plan.break_even_seconds < contexts[-1]:
        label = f"break-even at {plan.link_gbps:.3g} GB/s"
        axes.axvline(plan.break_even_seconds, linestyle="--", color="black", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context / 1024:g}k" for context in contexts])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel(f"GB received per chunk of {contexts[0]:,} tokens")
    axes.set_title(f"{plan.model.name}, TP {plan.tp}, DCP {plan.dcp}")
    axes.legend()
    save_figure(figure, path)


def find_gpu(name: str | None) -> tuple[Gpu, bool]:
    """The GPU called ``name``; None: this machine's, or :data:`DEFAULT_GPU` where there is none.

    Returns:
        the GPU, and whether it had to be assumed.

    Raises:
        UsageError: the name is unknown.
    """
    if name is not None:
        if name.lower() not in GPUS:
            raise UsageError(
                f"--gpu {name} is not known: choose one of {', '.join(GPUS)}, the nearest by "
                "family, and give your link's speed with --link-gbps"
            )
        return GPUS[name.lower()], False
    import torch

    if not torch.cuda.is_available():
        return GPUS[DEFAULT_GPU], True
    title = torch.cuda.get_device_name(0)
    plain = title.lower().replace(" ", "-")
    family = torch.cuda.get_device_capability(0)[0] * 10
    near = [gpu for key, gpu in GPUS.items() if key in plain] or [
        gpu for gpu in GPUS.values() if gpu.family == family
    ]
    known = near[0] if near else GPUS[DEFAULT_GPU]
    return replace(known, title=title, family=family), False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "Needs a config.json and no GPU. exit status: 0, or 2 for input that cannot be planned."
    )
    parser.add_argument(
        "model",
        metavar="MODEL_OR_CONFIG",
        help="folder with a config.json, the file, or a name in the local Hugging Face cache",
    )
    parser.add_argument("--tp", type=int, default=4, help="--tensor-parallel-size (default: 4)")
    parser.add_argument(
        "--dcp", type=int, help="--decode-context-parallel-size (default: that of --tp)"
    )
    parser.add_argument("--max-model-len", type=int, help="default: the model's")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="default: 256")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="default: 8192")
    parser.add_argument(
        "--interleave", type=int, default=4, help="--cp-kv-cache-interleave-size (default: 4)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        help="VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS (default: unset)",
    )
    parser.add_argument(
        "--shard-selection",
        action="store_true",
        help="plan for VLLM_B12X_MLA_CKV_SHARD_SELECTION=1: its memory, bytes and times",
    )
    parser.add_argument(
        "--early-exchange",
        action="store_true",
        help="plan for VLLM_B12X_MLA_CKV_EARLY_EXCHANGE=1: its memory and bytes, not its overlap",
    )
    parser.add_argument(
        "--mixed",
        action="store_true",
        help="plan for VLLM_B12X_MLA_CKV_GATHER_MIXED=1: times of a chunk beside decodes",
    )
    parser.add_argument("--kv-cache-dtype", choices=RECORDS, default=FP8_DS_MLA.name)
    parser.add_argument("--block-size", type=int, help="default: vLLM's choice")
    parser.add_argument("--dcp-comm-backend", choices=("ag_rs", "a2a"), default="ag_rs")
    parser.add_argument("--num-speculative-tokens", type=int, default=0, help="of MTP")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"{', '.join(GPUS)} (default: this machine's; {DEFAULT_GPU} where there is none)",
    )
    parser.add_argument(
        "--link-gbps",
        type=float,
        help="GB/s that a GPU receives in an all-gather (default: 54 %% of the link's nominal)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it, as .png or .svg")


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0, or 2 for input that cannot be planned."""
    try:
        check_folders(json=arguments.json, plot=arguments.plot)
        sizes = read_model(arguments.model)
        gpu, assumed = find_gpu(arguments.gpu)
        plan = make_plan(
            sizes,
            gpu,
            gpu_assumed=assumed,
            tp=arguments.tp,
            dcp=arguments.tp if arguments.dcp is None else arguments.dcp,
            max_model_len=(
                sizes.max_model_len if arguments.max_model_len is None else arguments.max_model_len
            ),
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            interleave=arguments.interleave,
            kv_cache_dtype=arguments.kv_cache_dtype,
            dcp_comm_backend=arguments.dcp_comm_backend,
            link_gbps=arguments.link_gbps,
            block_size=arguments.block_size,
            max_tokens=arguments.max_tokens,
            speculative_tokens=arguments.num_speculative_tokens,
            shard_selection=arguments.shard_selection,
            early_exchange=arguments.early_exchange,
            mixed=arguments.mixed,
        )
        if arguments.plot is not None:
            draw(plan, arguments.plot)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(asdict(plan), indent=1) + "\n")
    except (OSError, ValueError) as error:
        print(f"vllm-ckv plan: {error}")
        return 2
    print(describe(plan))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m vllm.entrypoints.ckv.plan``."""
    parser = argparse.ArgumentParser(prog="vllm-ckv plan", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
