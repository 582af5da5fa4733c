# SPDX-License-Identifier: Apache-2.0
"""The process's one gather: limits and workspace at start, one plan per batch, the two exchanges.

``CkvGather`` ties the pure modules together for the backend and the indexer. All layers of a
process share one instance, so that the geometry is frozen once and refusals are counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm.envs as envs
from vllm.distributed import get_dcp_group
from vllm.logger import init_logger

from vllm.v1.attention.backends.mla.ckv_gather import debug, exchange, metrics, remap, startup
from vllm.v1.attention.backends.mla.ckv_gather.byte_model import ByteModel
from vllm.v1.attention.backends.mla.ckv_gather.counters import (
    NOT_PREFILL,
    GatherCounters,
    candidate_bytes,
    combine_bytes,
    query_gather_bytes,
    selection_bytes,
)
from vllm.v1.attention.backends.mla.ckv_gather.eligibility import (
    BatchFacts,
    Decision,
    Limits,
    Reason,
    decide,
)
from vllm.v1.attention.backends.mla.ckv_gather.geometry import (
    FORMATS_ADVICE,
    FP8_DS_MLA,
    INDEX_RECORD_BYTES,
    MAX_VISIBLE_TOKENS,
    NVFP4_DS_MLA,
    POOLS_PER_INDEX_PAGE,
    FrozenGeometry,
    PageGeometry,
    RecordFormat,
    max_index_pages,
)
from vllm.v1.attention.backends.mla.ckv_gather.layout import (
    RankMajorLayout,
    RowShares,
    StagedLayout,
    plan_index_pages,
    plan_layout,
    plan_own_rows,
)
from vllm.v1.attention.backends.mla.ckv_gather.side_stream import SideStream
from vllm.v1.attention.backends.mla.ckv_gather.staging import (
    PageTables,
    StagingRing,
    numbers_per_batch,
)
from vllm.v1.attention.backends.mla.ckv_gather.time_model import Rates, TimeModel
from vllm.v1.attention.backends.mla.ckv_gather.timing import ExchangeTimer
from vllm.v1.attention.backends.mla.ckv_gather.windows import (
    Candidates,
    Span,
    merge_attention,
    merge_candidates,
    own_lengths,
    plan_spans,
)
from vllm.v1.attention.backends.mla.ckv_gather.workspace import (
    NO_SCRATCH,
    IndexBuffers,
    KernelScratch,
    WorkspacePlan,
)
from vllm.v1.attention.backends.mla.sparse_mla_kernels.base import PoolPlaces

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm.v1.attention.backends.mla.ckv_gather.rehearsal import LayerShapes
    from vllm.v1.attention.backends.mla.sparse_mla_kernels import SparseMLAKernels
    from vllm.v1.attention.backends.mla.sparse_mla_kernels.base import IndexQueries

logger = init_logger(__name__)

SUMMARY_BATCHES = 1000
"""One summary line is logged every so many batches that hold a prompt."""

# Refusals that the configuration asks for, and batches that have no prompt: not worth a warning.
_EXPECTED = NOT_PREFILL | {Reason.DISABLED, Reason.NO_CONTEXT_PARALLELISM, Reason.NO_GAIN}


@dataclass(frozen=True)
class CkvLayout:
    """Where the records and index keys of R requests land when they are gathered.

    tokens, pools: the rank-major layouts, on the host. The batch's own tokens and the pools that
        end in it are among them, or every rank writes them: records behind the spans, pools in
        their places of the planar pages.
    staged_tokens, staged_pools: the same on the device.
    own_rows: records behind the spans, in the order of the rows.
    own_starts: (R,) int32. Where they begin, see ``layout.plan_own_rows``.
    num_index_pages: planar index pages of all requests.
    page_starts: (R,) int32. First planar index page of each request.
    page_table: (R, W) int32. Planar index pages of each request, in order.
    """

    tokens: RankMajorLayout
    pools: RankMajorLayout
    staged_tokens: StagedLayout
    staged_pools: StagedLayout
    own_rows: int
    own_starts: torch.Tensor
    num_index_pages: int
    page_starts: torch.Tensor
    page_table: torch.Tensor


@dataclass(frozen=True)
class CkvWindow:
    """Records that are gathered together.

    layout: of the requests, as if what is in the window were all of them.
    requests: of the batch.
    rows, pool_rows: of the batch; those that see a token of the window, or a pool.
    bounds: the first token of the context that is in the window, and the first one behind it; None
        if the window holds whole requests.
    """

    layout: CkvLayout
    requests: slice
    rows: slice
    pool_rows: slice
    bounds: tuple[int, int] | None = None

    @property
    def begin(self) -> int:
        """Tokens of the context before the window."""
        return 0 if self.bounds is None else self.bounds[0]

    def numbered(self, req_id: torch.Tensor) -> torch.Tensor:
        """Requests of rows, ``req_id`` (T,) int32, as the window counts them; negative stays so."""
        first = self.requests.start
        return req_id - first if first else req_id


@dataclass(frozen=True)
class CkvSpan:
    """Rows that are computed together, see :class:`.windows.Span`.

    rows: of the batch. windows: in the order of the context.
    """

    rows: slice
    windows: tuple[CkvWindow, ...]


@dataclass(frozen=True)
class CkvBatchPlan:
    """What one gathered batch is computed from; a batch that fits is one span with one window.

    spans: they cover the rows of the batch behind those of decodes, in order.
    selection_shares: N if each rank selects for a share of a span's rows, 1 if every rank selects
        for all.
    """

    spans: tuple[CkvSpan, ...]
    selection_shares: int

    @property
    def windows(self) -> tuple[CkvWindow, ...]:
        """The windows of all spans, in the order in which they are gathered."""
        return tuple(window for span in self.spans for window in span.windows)

    @property
    def first_row(self) -> int:
        """Rows before the first one that gathers: those of decodes, on the ordinary path."""
        return self.spans[0].rows.start

    @property
    def early(self) -> CkvWindow | None:
        """The window whose exchange begins with the layer, before the batch's own is written."""
        window = self.spans[0].windows[0]
        return window if window.layout.own_rows else None


@dataclass(frozen=True)
class PoolOwnership:
    """Which pools of a request a rank stores: N ranks, ``interleave`` consecutive pools each."""

    dcp_world_size: int
    interleave: int

    def local_lengths(self, pool_counts: torch.Tensor, rank: int) -> torch.Tensor:
        """Pools among the first ``pool_counts`` that ``rank`` stores."""
        return remap.local_lengths(
            pool_counts, rank, dcp_world_size=self.dcp_world_size, interleave=self.interleave
        )

    def global_ids(self, local_ids: torch.Tensor, rank: int) -> torch.Tensor:
        """Global ids of ``rank``'s pools ``local_ids``; -1 stays -1."""
        return remap.global_ids(
            local_ids, rank, dcp_world_size=self.dcp_world_size, interleave=self.interleave
        )


class CkvGather:
    """The gather of one process. See the module's description."""

    _instance: CkvGather | None = None

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        parallel = vllm_config.parallel_config
        self.dcp_world_size = parallel.decode_context_parallel_size
        sizes = vllm_config.model_config.hf_text_config
        self.pool_size = int(sizes.index_kpool)
        self.pool_topk = sizes.index_topk // self.pool_size
        self.mode = envs.VLLM_B12X_MLA_CKV_GATHER
        self.why_off = startup.why_off(vllm_config, self.mode)
        self.enabled = self.why_off is None
        self.shard_selection = self.enabled and bool(envs.VLLM_B12X_MLA_CKV_SHARD_SELECTION)
        self.mixed = self.enabled and bool(envs.VLLM_B12X_MLA_CKV_GATHER_MIXED)
        self.early_exchange = self.enabled and bool(envs.VLLM_B12X_MLA_CKV_EARLY_EXCHANGE)
        self.debug = bool(envs.VLLM_CKV_DEBUG)
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.max_visible_tokens = self._max_visible_tokens()
        self.geometry = FrozenGeometry()
        self.workspace: WorkspacePlan | None = None
        self.ordinary_scratch = NO_SCRATCH
        self.counters = GatherCounters()
        self.timer = ExchangeTimer(self.counters.exchange_seconds)
        self.counting_layer: str | None = None
        self._staged: tuple[StagingRing, PageTables] | None = None
        self._side: SideStream | None = None
        self._own_slots = torch.empty(0)
        self._begun = False
        self.limits = Limits(
            enabled=self.enabled,
            supported_geometry=True,  # the backend refuses every other model at start
            dcp_world_size=self.dcp_world_size,
            min_query_tokens=int(envs.VLLM_B12X_MLA_CKV_GATHER_MIN_TOKENS),
            max_num_seqs=self.max_num_seqs,
            gains_only=self.mode == "auto",
            mixed=self.mixed,
        )
        # Decides what depends on the batch, if anything does.
        decides = self.enabled and (self.limits.gains_only or self.shard_selection)
        self.time_model = TimeModel(self._byte_model()) if decides else None

    def _byte_model(self) -> ByteModel:
        parallel = self.vllm_config.parallel_config
        sizes = self.vllm_config.model_config.hf_text_config
        return ByteModel(
            dcp_world_size=self.dcp_world_size,
            interleave=parallel.cp_kv_cache_interleave_size,
            pool_size=self.pool_size,
            record_bytes=self.record_format(self.vllm_config.cache_config.cache_dtype).record_bytes,
            local_heads=sizes.num_attention_heads // parallel.tensor_parallel_size,
            pool_topk=self.pool_topk,
            a2a=parallel.dcp_comm_backend == "a2a",
        )

    def adopt(self, rates: Rates | None) -> None:
        """Decide by ``rates`` from now on; None: by bytes alone. Equal on all ranks.

        Nothing to do where no decision needs them.
        """
        if self.time_model is None:
            return
        self.time_model = replace(self.time_model, rates=rates)
        if rates is None:
            logger.info(
                "full-CKV gather: nothing is measured on this platform; what depends on the "
                "batch is decided by bytes alone"
            )
        else:
            logger.info("full-CKV gather: decides by time, measured on the slowest rank: %s", rates)

    @classmethod
    def from_config(cls, vllm_config: VllmConfig) -> CkvGather:
        """The instance for ``vllm_config``; a new engine in the same process gets a new one.

        A draft model has a configuration of its own around the same compilation config, and
        shares the instance: there is one page geometry and one workspace.
        """
        known = cls._instance
        if known is None or (
            known.vllm_config.compilation_config is not vllm_config.compilation_config
        ):
            known = cls._instance = cls(vllm_config)
        return known

    @classmethod
    def of_worker(cls, worker: Any) -> CkvGather | None:
        """The gather of ``worker``'s layers, None if none of them runs on this backend."""
        layers = worker.vllm_config.compilation_config.static_forward_context.values()
        gathers = (getattr(getattr(layer, "impl", None), "gather", None) for layer in layers)
        return next((gather for gather in gathers if isinstance(gather, cls)), None)

    @staticmethod
    def record_format(cache_dtype: str | None) -> RecordFormat:
        """The record format selected by ``--kv-cache-dtype``.

        Raises:
            ValueError: the format is not supported.
        """
        for record in (FP8_DS_MLA, NVFP4_DS_MLA):
            if cache_dtype == record.name:
                return record
        raise ValueError(
            f"--kv-cache-dtype {cache_dtype} is not supported by B12X_MLA_SPARSE; {FORMATS_ADVICE}"
        )

    @property
    def pool_ownership(self) -> PoolOwnership:
        """Ownership of pools under the frozen geometry."""
        return PoolOwnership(self.dcp_world_size, self.geometry.get().pool_interleave)

    def _max_visible_tokens(self) -> int:
        configured = envs.VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS
        if configured is not None:
            return int(configured)
        max_model_len = self.vllm_config.model_config.max_model_len
        return min(max_model_len, MAX_VISIBLE_TOKENS)

    @property
    def facts(self) -> dict[str, Any]:
        """What all ranks of the DCP group have to start with alike."""
        cache, parallel = self.vllm_config.cache_config, self.vllm_config.parallel_config
        return {
            "VLLM_B12X_MLA_CKV_GATHER": self.mode if self.mode == "auto" else int(self.mode),
            "VLLM_B12X_MLA_CKV_GATHER_MIN_TOKENS": self.limits.min_query_tokens,
            "VLLM_B12X_MLA_CKV_GATHER_MIXED": int(self.mixed),
            "VLLM_B12X_MLA_CKV_SHARD_SELECTION": int(self.shard_selection),
            "VLLM_B12X_MLA_CKV_EARLY_EXCHANGE": int(self.early_exchange),
            "the capacity in visible tokens": self.max_visible_tokens,
            "--max-num-seqs": self.max_num_seqs,
            "the block size": cache.block_size,
            "--kv-cache-dtype": cache.cache_dtype,
            "--cp-kv-cache-interleave-size": parallel.cp_kv_cache_interleave_size,
            "--dcp-comm-backend": parallel.dcp_comm_backend,
            "index_kpool": self.pool_size,
        }

    def freeze(self, kernels: SparseMLAKernels) -> bool:
        """Freeze the geometry from the final block size.

        Runs in the profiling run, once per layer; only the first call does anything new. Under
        DCP the first call compares :attr:`facts` over the ranks, so all of them have to make it.

        Returns:
            Whether this was the first call.

        Raises:
            RuntimeError: the ranks' facts differ, or the block size changed after the first call.
            ValueError: block size or interleave break a rule of ``PageGeometry``, or the buffers
                would hold less than one window of one request.
        """
        cache, parallel = self.vllm_config.cache_config, self.vllm_config.parallel_config
        first = not self.geometry.is_frozen
        if first and self.dcp_world_size > 1:
            # Before anything that one rank alone could refuse: the others would wait for it.
            facts = {**self.facts, "the kernel provider": type(kernels).__name__}
            startup.require_agreement(exchange.all_gather_facts(facts, get_dcp_group().cpu_group))
        # Without DCP there is no owner to compute; one page run per rank describes that case.
        interleave = (
            parallel.cp_kv_cache_interleave_size if self.dcp_world_size > 1 else self.pool_size
        )
        geometry = PageGeometry(
            page_size=cache.block_size,
            record=self.record_format(cache.cache_dtype),
            pool_size=self.pool_size,
            interleave=interleave,
            dcp_world_size=self.dcp_world_size,
        )
        geometry.check_index_page()
        self.geometry.freeze(geometry)
        if first and self.enabled:
            geometry.check_window(
                self.max_visible_tokens, max_model_len=self.vllm_config.model_config.max_model_len
            )
        return first

    def reserve(self, kernels: SparseMLAKernels, shapes: LayerShapes) -> None:
        """Reserve everything a batch borrows: in the profiling run, once, behind :meth:`freeze`.

        kernels: warmed up, so that they know what they take. shapes: the layer's largest.
        """
        geometry, provider = self.geometry.get(), type(kernels).__name__

        def scratch(max_records: int | None, num_heads: int) -> KernelScratch:
            attention = kernels.scratch_shapes(
                max_records=max_records,
                max_tokens=shapes.num_tokens,
                num_heads=num_heads,
                width=shapes.width,
            )
            return KernelScratch(tuple(attention), tuple(kernels.selection_scratch_shapes()))

        self.ordinary_scratch = scratch(None, self.dcp_world_size * shapes.local_heads)
        parallel = self.vllm_config.parallel_config
        first_rank = getattr(parallel, "rank", 0) == 0
        # One rank speaks for the engine, whose scheduler cuts for all.
        if first_rank and (about_chunks := startup.chunk_remark(self.vllm_config)):
            logger.info(about_chunks)
        if not self.enabled:
            self.reserve_again()
            logger.info(
                "full-CKV gather: off, page %d tokens, kernels %s: %s",
                geometry.page_size,
                provider,
                self.why_off,
            )
            return
        capacity = geometry.capacity(
            max_tokens=self.max_visible_tokens, max_num_seqs=self.max_num_seqs
        )
        self.workspace = WorkspacePlan.from_geometry(
            geometry,
            self.max_visible_tokens,
            self.max_num_seqs,
            scratch(self.dcp_world_size * capacity, shapes.local_heads),
            (shapes.num_tokens, shapes.pool_topk) if self.shard_selection else (0, 0),
            early_exchange=self.early_exchange,
        )
        device = self.workspace.reserve()
        if self.early_exchange:
            self._side = SideStream(device, ("index_keys", "records"))
            self._own_slots = torch.arange(shapes.num_tokens, device=device)
        self.reserve_again()
        self._staging(device)
        self.timer.prepare(device)
        if first_rank:
            metrics.publish(self.counters.as_dict, getattr(parallel, "data_parallel_index", 0))
        logger.info(
            "full-CKV gather: on, page %d tokens, capacity %s records/rank, workspace "
            "%.1f MiB/GPU (limit %s visible tokens), kernels %s",
            geometry.page_size,
            f"{capacity:,}",
            self.workspace.num_bytes_beside(self.ordinary_scratch) / 2**20,
            f"{self.max_visible_tokens:,}",
            provider,
        )

    def reserve_again(self) -> None:
        """Reserve for ordinary batches where the call is made: every micro-batch has a workspace.

        Costs nothing where that has been done. A gathered batch has no micro-batches.
        """
        self.ordinary_scratch.reserve()

    def counts_for(self, layer_name: str) -> bool:
        """Whether the builder of ``layer_name`` counts its batches: the first one that asks.

        Layers in several cache groups have a builder each, and all see every step. Draft layers
        do not ask.
        """
        if self.counting_layer is None:
            self.counting_layer = layer_name
        return self.counting_layer == layer_name

    def plan_batch(
        self,
        common: CommonAttentionMetadata,
        *,
        num_decode_tokens: int,
        capturing: bool,
        is_draft_layer: bool = False,
        count: bool = True,
    ) -> CkvBatchPlan | None:
        """Decide for one batch and lay it out; None means the ordinary path.

        Reads host data only, which the scheduler made equal on all ranks.

        common: the step's metadata; ``seq_lens_cpu_upper_bound`` is exact for prefill rows.
        num_decode_tokens: tokens the builder's split put on the decode path.
        capturing: the metadata is for a CUDA-graph capture.
        is_draft_layer: the layers belong to a draft (MTP) model.
        count: add the batch to the counters, see :meth:`counts_for`.
        """
        # In numpy, because every step of decode passes here too.
        starts, lengths, prefilling = (
            None if numbers is None else numbers.numpy()
            for numbers in (
                common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound, common.is_prefilling
            )
        )  # fmt: skip
        assert starts is not None
        query_lens = np.diff(starts)
        # Rows without query tokens are padding.
        num_requests = int(np.count_nonzero(query_lens))
        # vLLM sorts decodes before prompts.
        ends = starts[1 : num_requests + 1]
        num_decodes = int(np.count_nonzero(ends <= num_decode_tokens)) if num_decode_tokens else 0
        prompts = slice(num_decodes, num_requests)
        facts = BatchFacts(
            num_requests=num_requests - num_decodes,
            num_prefilling=0 if prefilling is None else int(np.count_nonzero(prefilling[prompts])),
            num_query_tokens=int(starts[-1]),
            num_decode_tokens=num_decode_tokens,
            visible_tokens=0 if lengths is None else int(lengths[prompts].sum()),
            is_draft_layer=is_draft_layer,
            for_graph_capture=capturing,
            dual_batch_overlap=self.vllm_config.parallel_config.use_ubatching,
        )
        shares = 1
        seq_lens: list[int] = []
        own_lens: Sequence[int] = ()
        spans: list[Span] = []
        decision = decide(facts, self.limits)
        # Lengths are exact, and no longer than the model's, for batches that may gather alone. Only
        # what it costs, the last reason, is still to be known.
        if lengths is not None and decision.reason in (Reason.ELIGIBLE, Reason.NO_GAIN):
            seq_lens, queries = lengths[:num_requests].tolist(), query_lens[:num_requests].tolist()
            spans = self.plan_spans(seq_lens, queries, common.num_actual_tokens, first=num_decodes)
            if self.early_exchange:
                own_lens = own_lengths(seq_lens, queries, spans)
            batch = seq_lens[num_decodes:], queries[num_decodes:]
            pairs = None
            if self.time_model is not None and self.shard_selection:
                pairs = self.time_model.pairs(*batch)
                shares = self.time_model.selection_shares(pairs, spans)
            if self.time_model is not None and self.limits.gains_only:
                costs = self.time_model.costs(
                    *batch,
                    spans,
                    shares=shares,
                    own=own_lens,
                    beside_decodes=num_decode_tokens > 0,
                    pairs=pairs,
                )
                facts = replace(facts, costs=costs)
                decision = decide(facts, self.limits)
        num_windows = sum(span.num_windows for span in spans)
        if self.debug and self.dcp_world_size > 1:
            exchange.require_same(
                "decision, query tokens, requests, visible tokens, rows, selection shares and "
                "windows of a batch",
                [
                    decision.gather,
                    facts.num_query_tokens,
                    num_requests,
                    facts.visible_tokens,
                    common.num_actual_tokens - num_decode_tokens,
                    shares,
                    num_windows,
                ],
                get_dcp_group().cpu_group,
            )
        if count:
            self._count(facts, decision, num_windows)
            if not capturing:
                self.timer.begin_step(gathers=decision.gather)
        if not decision.gather:
            return None
        return self.layout_batch(seq_lens, spans, common.seq_lens.device, shares, own_lens)

    def plan_spans(
        self,
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        num_rows: int,
        *,
        first: int = 0,
        capacity: int | None = None,
    ) -> list[Span]:
        """Cut a batch to fit the reserved rows, see :func:`.windows.plan_spans`.

        capacity: visible tokens of a window; left out, what is reserved.
        """
        return plan_spans(
            seq_lens,
            query_lens,
            capacity=self.max_visible_tokens if capacity is None else capacity,
            granule=self.geometry.get().window_granule,
            num_rows=num_rows,
            first=first,
        )

    def _count(self, facts: BatchFacts, decision: Decision, num_windows: int) -> None:
        counters = self.counters
        if facts.costs is not None:
            logger.debug(
                "full-CKV gather auto: %d query tokens over %d visible tokens of %d requests in %d "
                "windows, %s: %s",
                facts.num_prompt_tokens,
                facts.visible_tokens,
                facts.num_requests,
                num_windows,
                facts.costs,
                decision.reason.value,
            )
        if decision.gather:
            if counters.gathered_batches == 0:
                logger.info("first batch: %s", decision.message)
            if num_windows > 1 and counters.gathered_windows == counters.gathered_batches:
                logger.info(
                    "first batch in windows: %d, because buffers are reserved for %d of its %d "
                    "visible tokens; %s",
                    num_windows,
                    self.max_visible_tokens,
                    facts.visible_tokens,
                    f"VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS={facts.visible_tokens} would make it one"
                    if facts.visible_tokens <= MAX_VISIBLE_TOKENS
                    else f"at most {MAX_VISIBLE_TOKENS} can be reserved",
                )
            counters.gathered_windows += num_windows
            counters.gathered_batches += 1
            counters.mixed_batches += facts.num_decode_tokens > 0
            counters.gathered_query_tokens += facts.num_prompt_tokens
            counters.gathered_visible_tokens += facts.visible_tokens
        else:
            if counters.ordinary[decision.reason] == 0 and decision.reason not in _EXPECTED:
                logger.warning(decision.message)
            counters.ordinary[decision.reason] += 1
        if (
            self.enabled
            and decision.reason not in NOT_PREFILL
            and counters.prefill_batches % SUMMARY_BATCHES == 0
        ):
            logger.info("full-CKV gather: %s", counters.summary())

    def count_query_gather(self, rows: int, query: torch.Tensor) -> None:
        """Count an ordinary query gather: ``rows`` prefill rows of ``query`` (T, heads, dims)."""
        heads, dims = query.shape[1:]
        self.counters.dcp_bytes += query_gather_bytes(
            rows, heads, dims * query.element_size(), self.dcp_world_size
        )

    def count_combine(self, a2a: bool, rows: int, partial_output: torch.Tensor) -> None:
        """Count an ordinary combine of ``partial_output`` (T, heads of all ranks, dims)."""
        heads, dims = partial_output.shape[1:]
        self.counters.dcp_bytes += combine_bytes(
            rows, heads, dims * partial_output.element_size(), self.dcp_world_size, a2a=a2a
        )

    def count_candidates(self, rows: int, width: int) -> None:
        """Count an ordinary exchange of ``width`` pool candidates for ``rows`` prefill rows."""
        self.counters.dcp_bytes += candidate_bytes(rows, width, self.dcp_world_size)

    def layout_batch(
        self,
        seq_lens: Sequence[int],
        spans: Sequence[Span],
        device: torch.device,
        selection_shares: int = 1,
        own_lens: Sequence[int] = (),
    ) -> CkvBatchPlan:
        """Lay out the windows of ``spans`` and stage the plan to ``device``.

        seq_lens: visible tokens of each request. own_lens: see
            :func:`.windows.own_lengths`.

        One transfer that the host does not wait for, into memory that :meth:`reserve` took;
        valid until the next batches, see :mod:`.staging`.
        """
        pieces = [span.pieces(seq_lens) for span in spans]
        layouts = self._layouts(
            [lengths for windows in pieces for lengths, _ in windows], own_lens, device
        )

        def window(span: Span, lengths: tuple[int, ...], bounds: tuple[int, int] | None):
            begin = bounds[0] if bounds else 0
            # A window's first pool is complete with its last token.
            pool = begin + self.pool_size - 1 if begin else 0
            return CkvWindow(
                layouts[lengths],
                span.requests,
                rows=span.rows_from(begin),
                pool_rows=span.rows_from(pool),
                bounds=bounds,
            )

        return CkvBatchPlan(
            tuple(
                CkvSpan(span.rows, tuple(window(span, *piece) for piece in windows))
                for span, windows in zip(spans, pieces, strict=True)
            ),
            selection_shares,
        )

    def _layouts(
        self, pieces: Sequence[tuple[int, ...]], own_lens: Sequence[int], device: torch.device
    ) -> dict[tuple[int, ...], CkvLayout]:
        """Lay out requests of the lengths of every piece; alike ones, most windows, only once.

        own_lens: of the one piece that there is then.
        """
        geometry, world = self.geometry.get(), self.dcp_world_size
        planned = []
        for piece in dict.fromkeys(pieces):
            lengths = torch.tensor(piece, dtype=torch.int64)
            own = torch.tensor(own_lens or [0] * len(piece), dtype=torch.int64)
            context = lengths - own
            tokens = plan_layout(context, dcp_world_size=world, interleave=geometry.interleave)
            pools = plan_layout(
                context // self.pool_size,
                dcp_world_size=world,
                interleave=geometry.pool_interleave,
            )
            pages = plan_index_pages(lengths // self.pool_size)
            planned.append((piece, tokens, pools, plan_own_rows(tokens, own), *pages))
        ring, tables = self._staging(device)
        staged = iter(
            ring.stage(
                [
                    numbers
                    for _, tokens, pools, own_starts, page_starts, _ in planned
                    for numbers in (
                        StagedLayout.numbers(tokens),
                        StagedLayout.numbers(pools),
                        own_starts,
                        page_starts,
                    )
                ]
            )
        )
        layouts, first_row = {}, 0
        for piece, tokens, pools, _, _, num_pages in planned:
            staged_tokens, staged_pools = next(staged), next(staged)
            own_starts, starts = next(staged), next(staged)
            width = max(1, -(-(max(piece) // self.pool_size) // POOLS_PER_INDEX_PAGE))
            layouts[piece] = CkvLayout(
                tokens,
                pools,
                StagedLayout.over(staged_tokens, tokens),
                StagedLayout.over(staged_pools, pools),
                sum(own_lens),
                own_starts,
                num_pages,
                starts,
                tables.fill(starts, width, num_pages, first_row),
            )
            first_row += len(piece)
        return layouts

    def _staging(self, device: torch.device) -> tuple[StagingRing, PageTables]:
        if self._staged is None:
            numbers = numbers_per_batch(self.max_num_seqs, self.dcp_world_size)
            self._staged = (
                StagingRing(device, numbers),
                PageTables(device, self.max_num_seqs, self.max_pages),
            )
        return self._staged

    @property
    def max_pages(self) -> int:
        """Planar index pages of the longest request that a window holds."""
        return max_index_pages(self.max_visible_tokens, self.pool_size)

    def select_pools(
        self,
        plan: CkvBatchPlan,
        kernels: SparseMLAKernels,
        queries: IndexQueries,
    ) -> torch.Tensor:
        """Select pools among the index keys of all ranks, as one rank without DCP would.

        Returns:
            pool ids (T - plan.first_row, K) int32 of the rows that gather, the same on every rank.
            Valid until the next user of vLLM's workspace.
        """
        given = plan.selection_shares, kernels, queries
        first, req_id = plan.first_row, queries.req_id
        if len(plan.spans) == 1:
            pool_ids = self._select_span(plan.spans[0], *given)
        else:
            pool_ids = req_id.new_empty((req_id.shape[0] - first, queries.topk))
            for span in plan.spans:
                selected = self._select_span(span, *given)
                pool_ids[span.rows.start - first : span.rows.stop - first] = selected
        if self.debug:
            debug.check_selection(pool_ids, req_id[first:], queries.pool_counts[first:])
        return pool_ids

    def _select_span(
        self,
        span: CkvSpan,
        selection_shares: int,
        kernels: SparseMLAKernels,
        queries: IndexQueries,
    ) -> torch.Tensor:
        """Pool ids of the span's rows; shares of them are exchanged once all windows are seen."""
        group = get_dcp_group()
        first, last = span.rows.start, span.rows.stop
        shares = RowShares(last - first, selection_shares)
        own = shares.rows_of(group.rank_in_group)
        first, last = first + own.start, first + own.stop
        best: Candidates | None = None
        for window in span.windows:
            pages, page_table, selection, scratch = self.gather_index_keys(
                window, kernels, queries.index_cache, queries.block_table, shares.exchanged_rows
            )
            rows = slice(max(window.pool_rows.start, first), last)
            if best is not None and rows.start >= last:
                continue
            first_pool = window.begin // self.pool_size
            seen = queries.pool_counts[rows]
            if window.bounds is not None:
                seen = (seen - first_pool).clamp(0, window.layout.pools.visible)
            found = kernels.select_pools(
                queries.q_fp8[rows],
                queries.weights[rows],
                pages,
                page_table,
                window.numbered(queries.req_id[rows]),
                seen,
                queries.topk,
                scratch,
            )
            if best is None:
                best = found
            else:
                merge_candidates(kernels, best, rows.start - first, found, first_pool)
        assert best is not None
        pool_ids = best[0]
        if shares.exchanged_rows:
            assert selection is not None
            if self._side is not None:
                # One communicator is not to work on two streams at a time.
                self._side.wait("records")
            with self.timer.exchange("selection"):
                exchange.gather_selection(
                    pool_ids, selection, exchange.communicator_of(group), group.rank_in_group
                )
            pool_ids = selection[: shares.num_rows]
            self.counters.ckv_bytes += selection_bytes(
                shares.num_rows, queries.topk, self.dcp_world_size
            )
        return pool_ids

    def gather_index_keys(
        self,
        window: CkvWindow,
        kernels: SparseMLAKernels,
        index_cache: torch.Tensor,
        block_table: torch.Tensor,
        selection_rows: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]]:
        """Exchange the index keys of a window, or wait for what :meth:`begin_layer` began.

        block_table: (R, B) int32, of all requests of the batch.
        selection_rows: ``layout.RowShares.exchanged_rows``.

        Returns:
            Planar pages (pages, 64, 132) uint8 in global pool order, their page table (R, W)
            int32, room for the selection (selection_rows, K) int32 if selections are shared out,
            and the scratch that ``kernels`` asked for. All but the table are valid until the next
            user of vLLM's workspace.
        """
        assert self.workspace is not None
        layout = window.layout
        buffers = self.workspace.borrow_index(layout.pools, layout.num_index_pages, selection_rows)
        if self.debug and buffers.selection is not None:
            debug.poison((buffers.selection,))
        if layout.own_rows:
            self._wait_for("index_keys")
        else:
            self._exchange_keys(window, kernels, index_cache, block_table, buffers)
        # A size of -1 would be ambiguous for prompts below one pool, which have no page at all.
        num_pages = buffers.pages.shape[0]
        pages = buffers.pages.view(num_pages, POOLS_PER_INDEX_PAGE, INDEX_RECORD_BYTES)
        return pages, layout.page_table, buffers.selection, buffers.scratch

    def _table_of(
        self, window: CkvWindow, block_table: torch.Tensor, per_page: int
    ) -> torch.Tensor:
        """The part of a batch's ``block_table`` (R, B) that a window reads.

        per_page: entries for every page of this rank; a window begins with a page on every rank.
        """
        return block_table[
            window.requests, window.begin // self.geometry.get().window_granule * per_page :
        ]

    def attend(
        self,
        plan: CkvBatchPlan,
        kernels: SparseMLAKernels,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        token_ids: torch.Tensor,
        req_id: torch.Tensor,
        query: torch.Tensor,
        scale: float,
        latents: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of this rank's heads to the records of all ranks.

        token_ids: (T, W) int32, the selection. req_id: (T,) int32. query: (T, H, 512) bf16.
        latents: (T, 512) bf16, of the batch's own tokens; not looked at if ``plan.early`` is None.

        Returns:
            Output (T - plan.first_row, H, 512) bf16 and natural log-sum-exp (T - plan.first_row, H)
            float32 of the rows that gather, see ``SparseMLAKernels.attend``.
        """

        def attended(window: CkvWindow, first_row: int) -> tuple[int, torch.Tensor, torch.Tensor]:
            records, rows, counts, scratch = self.gather_latents(
                window, kernels, cache, block_table, token_ids, req_id, latents
            )
            out, lse = kernels.attend(query[window.rows], records, rows, counts, scale, scratch)
            return window.rows.start - first_row, out, lse

        results = [
            merge_attention(attended(window, span.rows.start) for window in span.windows)
            for span in plan.spans
        ]
        if len(results) == 1:
            return results[0]
        outputs, sums = zip(*results, strict=True)
        return torch.cat(outputs), torch.cat(sums)

    def gather_latents(
        self,
        window: CkvWindow,
        kernels: SparseMLAKernels,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        token_ids: torch.Tensor,
        req_id: torch.Tensor,
        latents: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Exchange the latent records of a window, or wait for what :meth:`begin_layer` began, and
        remap the selection onto them.

        block_table: (R, B) int32, of all requests of the batch. token_ids, req_id: of all rows.
        latents: see :meth:`attend`.

        Returns:
            records (N * padded + own rows, record_bytes) uint8; for the window's rows the gathered
            rows (T, W) int32 and their counts (T,) int32; and the scratch that ``kernels`` asked
            for. Records and scratch are valid until the next user of vLLM's workspace.
        """
        assert self.workspace is not None
        layout = window.layout
        buffers = self.workspace.borrow_latents(layout.tokens, layout.own_rows)
        records = buffers.records
        if layout.own_rows:
            self._wait_for("records")
            self._begun = False
            assert latents is not None, "the layer's latents were not handed over"
            first, count, own = window.rows.start, layout.own_rows, buffers.own
            assert own is not None
            kernels.write_records(latents[first : first + count], own, self._own_slots[:count])
        else:
            self._exchange_records(window, kernels, cache, block_table, records)
        token_ids, req_id = token_ids[window.rows], window.numbered(req_id[window.rows])
        # History, then tail, then -1: the valid entries are a prefix of every row.
        counts = torch.empty_like(req_id)
        rows = kernels.remap(
            token_ids,
            req_id,
            layout.staged_tokens.starts,
            layout.tokens.padded,
            self.dcp_world_size,
            self.geometry.get().interleave,
            counts=counts,
            window=window.bounds,
            context_lens=layout.staged_tokens.seq_lens,
            own_starts=layout.own_starts,
        )
        if self.debug:
            debug.check_below("gathered rows", rows, records.shape[0])
        return records, rows, counts, buffers.scratch

    def begin_layer(
        self,
        window: CkvWindow,
        kernels: SparseMLAKernels,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        index_cache: torch.Tensor,
        index_table: torch.Tensor,
    ) -> None:
        """Begin the exchange of a layer's context, keys before records, beside the current stream.

        window: :attr:`CkvBatchPlan.early`. cache: (pages, P, record_bytes) uint8. index_cache:
        (ipages, 64, 132) uint8. block_table, index_table: (R, B) int32, pages of either, of all
        requests of the batch.

        The layer's :meth:`select_pools` and :meth:`attend` have to follow before another layer
        begins.
        """
        assert self.workspace is not None and self._side is not None
        layout = window.layout
        keys = self.workspace.borrow_index(layout.pools, layout.num_index_pages)
        records, _ = self.workspace.kept_records(layout.tokens, layout.own_rows)
        with self._side.run("index_keys"):
            self._exchange_keys(window, kernels, index_cache, index_table, keys)
        with self._side.run("records"):
            self._exchange_records(window, kernels, cache, block_table, records)
        self._begun = True

    def own_pools(self, plan: CkvBatchPlan) -> PoolPlaces | None:
        """Where the pools that end in a batch go beside the cache; None if they are exchanged.

        Behind :meth:`begin_layer`, and before the selection.
        """
        window = plan.early
        if window is None:
            return None
        assert self.workspace is not None
        layout = window.layout
        buffers = self.workspace.borrow_index(layout.pools, layout.num_index_pages)
        return PoolPlaces(buffers.pages, layout.page_starts, window.requests.start)

    def _wait_for(self, exchanged: str) -> None:
        # Without it the buffers hold another layer's context.
        assert self._side is not None and self._begun, "the layer's exchange was not begun"
        self._side.wait(exchanged)

    def _exchange_keys(
        self,
        window: CkvWindow,
        kernels: SparseMLAKernels,
        index_cache: torch.Tensor,
        block_table: torch.Tensor,
        buffers: IndexBuffers,
    ) -> None:
        """Fill the spans of ``buffers.records``, and the places of their pools in the pages."""
        group = get_dcp_group()
        layout = window.layout
        index_pages = self.geometry.get().pools_per_page // POOLS_PER_INDEX_PAGE
        table = self._table_of(window, block_table, index_pages)
        if self.debug:
            debug.poison((buffers.records, buffers.pages))
            # Waits for the poison as well: the current stream may write own pools from here on.
            debug.check_pages(
                "index keys",
                table,
                layout.staged_pools.local_lens[group.rank_in_group],
                POOLS_PER_INDEX_PAGE,
                index_cache.shape[0],
            )
        if not layout.pools.padded:
            # Nothing to send; a time of nothing would count as a fast exchange.
            return
        with self.timer.exchange("index_keys"):
            exchange.gather_pools(
                kernels,
                index_cache,
                table,
                layout.staged_pools,
                buffers.records,
                buffers.pages,
                layout.page_starts,
                exchange.communicator_of(group),
                group.rank_in_group,
                interleave=self.pool_ownership.interleave,
            )
        self.counters.ckv_bytes += (
            (self.dcp_world_size - 1) * layout.pools.padded * INDEX_RECORD_BYTES
        )

    def _exchange_records(
        self,
        window: CkvWindow,
        kernels: SparseMLAKernels,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        records: torch.Tensor,
    ) -> None:
        """Fill the spans of ``records``."""
        group = get_dcp_group()
        layout = window.layout
        table = self._table_of(window, block_table, 1)
        if self.debug:
            debug.poison((records,))
            debug.check_pages(
                "latent records",
                table,
                layout.staged_tokens.local_lens[group.rank_in_group],
                cache.shape[1],
                cache.shape[0],
            )
        if not layout.tokens.padded:
            return
        with self.timer.exchange("records"):
            exchange.gather_latents(
                kernels,
                cache,
                table,
                layout.staged_tokens,
                records[: self.dcp_world_size * layout.tokens.padded],
                exchange.communicator_of(group),
                group.rank_in_group,
            )
        self.counters.ckv_bytes += (
            (self.dcp_world_size - 1) * layout.tokens.padded * cache.shape[-1]
        )


def counters(worker: Any) -> dict[str, Any]:
    """This rank's totals since start, for ``LLM.collective_rpc(counters)``.

    worker: the worker (or its wrapper), which ``collective_rpc`` passes.

    Returns:
        :meth:`.counters.GatherCounters.as_dict`. Batches that vLLM runs to warm up are among them:
        take the difference of two calls for one piece of work.

    Raises:
        RuntimeError: no layer of this worker runs on B12X_MLA_SPARSE.
    """
    gather = CkvGather.of_worker(worker)
    if gather is None:
        raise RuntimeError(
            "no layer of this worker runs on B12X_MLA_SPARSE, so nothing was counted; start with "
            "--attention-backend B12X_MLA_SPARSE"
        )
    return gather.counters.as_dict()
