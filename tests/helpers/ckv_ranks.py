# SPDX-License-Identifier: Apache-2.0
"""DCP ranks in one process that run the real indexer, exchange, kernels and attention.

What vLLM itself would do is repeated here in a few lines: block tables, slots, the rows of a step.
Everything else is the product's code, on caches and workspaces that hold NaN until written.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from lockstep import Lockstep, LockstepDist, LockstepGroup, replaced

from vllm.platforms.ckv_reference import declare_torchvision_ops

declare_torchvision_ops()

import vllm.distributed.parallel_state as parallel_state  # noqa: E402
import vllm.forward_context as forward_context  # noqa: E402
from vllm.v1.attention.backends.mla.indexer import (  # noqa: E402
    DeepseekV32IndexerMetadata,
    compute_kpool_tail_slot_mapping,
)
from vllm.v1.worker import workspace  # noqa: E402

from vllm.models.glm5next.b12x import mla, sparse_indexer  # noqa: E402
from vllm.platforms.ckv_reference import ops  # noqa: E402
from vllm.v1.attention.backends.mla import b12x_mla_sparse as backend  # noqa: E402
from vllm.v1.attention.backends.mla.ckv_gather import (  # noqa: E402
    byte_model,
    exchange,
    plan,
    startup,
)

POOL = 4
RING = 4
INDEX_HEADS = 2
SCALE = 512**-0.5
POISON_ID = 0x7FFFFFF0
LAYER = "model.layers.0.self_attn.attn"
GATHER = "VLLM_B12X_MLA_CKV_GATHER"
SHARD_SELECTION = "VLLM_B12X_MLA_CKV_SHARD_SELECTION"
MAX_TOKENS = "VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS"
MIXED = "VLLM_B12X_MLA_CKV_GATHER_MIXED"
EARLY = "VLLM_B12X_MLA_CKV_EARLY_EXCHANGE"


@dataclass(frozen=True)
class Sizes:
    """What a server is started with.

    capacity: visible tokens the gather reserves for. max_model_len: 0: the capacity.
    max_rows: rows of a step.
    record: ``--kv-cache-dtype``. shard_selection: gathered batches share their selection out,
    however small they are. mixed: prompts gather beside decodes. early_exchange: contexts are
    exchanged from the beginning of a layer on, where they may be. auto: prompts gather only where
    that gains.
    """

    world: int
    interleave: int = 4
    page_size: int = 256
    pool_topk: int = 4
    heads: int = 1
    capacity: int = 600
    min_tokens: int = 0
    max_num_seqs: int = 8
    max_rows: int = 128
    layers: int = 1
    record: str = "fp8_ds_mla"
    shard_selection: bool = False
    max_model_len: int = 0
    mixed: bool = False
    early_exchange: bool = False
    auto: bool = False

    @property
    def record_bytes(self) -> int:
        return plan.CkvGather.record_format(self.record).record_bytes

    @property
    def width(self) -> int:
        """Columns of a selection, a few more than needed as in vLLM's padded buffer."""
        return self.pool_topk * POOL + POOL - 1 + 2


@dataclass
class Inputs:
    """One layer's inputs of a step, rows of padding included.

    latents (T, 512), k and gate (T, 128), q (T, N * heads, 512): bf16. index_q (T, 2, 128): e4m3.
    weights (T, 2): float32. ape (4, 128): float32.
    """

    latents: torch.Tensor
    k: torch.Tensor
    gate: torch.Tensor
    q: torch.Tensor
    index_q: torch.Tensor
    weights: torch.Tensor
    ape: torch.Tensor


@dataclass
class Step:
    """The rows of one step, request after request, decodes first.

    requests: which requests. query_lens, seq_lens: rows and visible tokens of each.
    prefilling: whether its prompt was unfinished before. num_decode_tokens: rows of decodes.
    num_decodes: requests of these rows; None: one of each.
    """

    requests: list[int]
    query_lens: list[int]
    seq_lens: list[int]
    prefilling: list[bool]
    num_decode_tokens: int = 0
    pad_rows: int = 0
    pad_tokens: int = 0
    num_decodes: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    def positions(self) -> torch.Tensor:
        parts = [
            torch.arange(n - q, n) for q, n in zip(self.query_lens, self.seq_lens, strict=True)
        ]
        # Positions of padding rows are those of an earlier batch.
        return torch.cat([*parts, torch.full((self.pad_tokens,), 777)])

    def request_rows(self) -> torch.Tensor:
        rows = torch.repeat_interleave(
            torch.arange(len(self.requests)), torch.tensor(self.query_lens, dtype=torch.int64)
        )
        return torch.cat([rows, torch.full((self.pad_tokens,), -1)]).int()


@dataclass
class Result:
    """What one rank computed for one layer of a step.

    token_ids: the selection. out: attention of the rank's own heads. lse: of the kernel call.
    first_row: the first one that gathered, if any. selection_shares: see ``CkvBatchPlan``, 0 for an
    ordinary batch. spans: windows of each span, none for an ordinary batch. own_rows: records that
    were not exchanged.
    """

    token_ids: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    gathered: bool
    first_row: int
    selection_shares: int
    spans: list[int]
    own_rows: int = 0


def configuration(sizes: Sizes) -> SimpleNamespace:
    """The parts of a VllmConfig that the gather reads."""
    return SimpleNamespace(
        kv_transfer_config=None,
        additional_config={},
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=sizes.world,
            tensor_parallel_size=sizes.world,
            cp_kv_cache_interleave_size=sizes.interleave,
            dcp_comm_backend="a2a",
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        model_config=SimpleNamespace(
            max_model_len=sizes.max_model_len or sizes.capacity,
            hf_text_config=SimpleNamespace(
                index_kpool=POOL,
                model_type="glm5_next",
                num_attention_heads=sizes.world * sizes.heads,
                index_topk=sizes.pool_topk * POOL,
            ),
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=sizes.max_num_seqs, max_num_batched_tokens=sizes.max_rows
        ),
        cache_config=SimpleNamespace(
            block_size=sizes.page_size, cache_dtype=sizes.record, mamba_cache_mode="none"
        ),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


class Arena:
    """Cache memory that reaches beyond 2^31 bytes; only pages that are written exist.

    All ranks use one arena with pages of their own, so a page of another rank is a wrong one.
    """

    SPAN = 2**31 + (96 << 20)
    _known: dict[Any, torch.Tensor] = {}  # noqa: RUF012

    @classmethod
    def view(cls, key: Any, rows: int, width: int, gap_rows: int) -> torch.Tensor:
        """(pages, rows, width) uint8; pages lie ``gap_rows`` rows further apart than need be."""
        if key not in cls._known:
            cls._known[key] = torch.empty(cls.SPAN, dtype=torch.uint8)
        stride = (rows + gap_rows) * width
        pages = (cls.SPAN - rows * width) // stride + 1
        return cls._known[key].as_strided((pages, rows, width), (stride, width, 1))

    @staticmethod
    def first_high_page(cache: torch.Tensor) -> int:
        """The first page that begins beyond 2^31 bytes."""
        return 2**31 // cache.stride(0) + 1


@dataclass
class BlockTables:
    """The blocks of every request on one rank: a list of page numbers each.

    high_page, high_index_page: latent pages from the first number on have their index pages from
        the second number on. A test that wants high pages of both kinds sets them.
    """

    pages: list[list[int]] = field(default_factory=list)
    high_page: int = 2**31
    high_index_page: int = 0

    def latents(self, requests: list[int], pad_rows: int) -> torch.Tensor:
        """(rows, B) int32: the latent pages of the requests of a step."""
        return self._tensor([self.pages[r] for r in requests], pad_rows)

    def index(self, requests: list[int], per_block: int, pad_rows: int) -> torch.Tensor:
        """(rows, B * per_block) int32: their index pages, ``per_block`` for every latent page."""
        first = {p: p * per_block for r in requests for p in self.pages[r]}
        for page in first:
            if page >= self.high_page:
                first[page] = self.high_index_page + (page - self.high_page) * per_block
        return self._tensor(
            [[first[p] + i for p in self.pages[r] for i in range(per_block)] for r in requests],
            pad_rows,
        )

    @staticmethod
    def _tensor(rows: list[list[int]], pad_rows: int) -> torch.Tensor:
        # What lies past a request's pages is stale, and so are the rows of padding.
        width = max([len(row) for row in rows], default=0) + 1
        table = torch.full((len(rows) + pad_rows, width), POISON_ID, dtype=torch.int32)
        for number, row in enumerate(rows):
            table[number, : len(row)] = torch.tensor(row, dtype=torch.int32)
        return table


class SimulatedRank:
    """One rank: its gather, indexer, attention implementation and caches, as after start-up."""

    def __init__(
        self, rank: int, sizes: Sizes, kernels: Any, dist: LockstepDist, gap_rows: int = 0
    ) -> None:
        self.rank, self.sizes, self.kernels, self.dist = rank, sizes, kernels, dist
        flags = {
            SHARD_SELECTION: str(int(sizes.shard_selection)),
            MAX_TOKENS: str(sizes.capacity),
            MIXED: str(int(sizes.mixed)),
            EARLY: str(int(sizes.early_exchange)),
        }
        if sizes.auto:
            flags[GATHER] = "auto"
        with patch.dict(os.environ, flags):
            self.gather = plan.CkvGather(configuration(sizes))
        self.gather.limits = replace(self.gather.limits, min_query_tokens=sizes.min_tokens)
        self.tables = BlockTables()
        self.decision_options: dict[str, bool] = {"capturing": False}
        self.caches = [
            Arena.view(("latents", i), sizes.page_size, sizes.record_bytes, gap_rows)
            for i in range(sizes.layers)
        ]
        self.index_caches = [
            Arena.view(("index", i), 64, 132, gap_rows) for i in range(sizes.layers)
        ]
        self.tails = [
            torch.full((sizes.max_num_seqs + 1, 2, RING, 128), float("nan"), dtype=torch.bfloat16)
            for _ in range(sizes.layers)
        ]
        self.buffer = torch.full((sizes.max_rows, sizes.width), POISON_ID, dtype=torch.int32)
        self.op = self._indexer()
        self.impl = self._implementation()
        self.query_gather = backend.OrdinaryOnly(
            self._query_gather, LAYER, self.gather.count_query_gather
        )
        self.combine = backend.OrdinaryOnly(
            self._combine, LAYER, partial(self.gather.count_combine, True)
        )

    def _indexer(self) -> sparse_indexer.B12xSparseAttnIndexer:
        # Stock's constructor wants a whole configuration.
        op = object.__new__(sparse_indexer.B12xSparseAttnIndexer)
        torch.nn.Module.__init__(op)
        op.k_cache = SimpleNamespace(prefix="index")
        op.tail_cache = SimpleNamespace(prefix="tail")
        op.topk_tokens = self.sizes.pool_topk * POOL
        op.topk_indices_buffer = self.buffer
        op.dcp_world_size, op.dcp_rank = self.sizes.world, self.rank
        op.follow(LAYER, self.gather)
        return op

    def _implementation(self) -> backend.B12xMLASparseImpl:
        impl = object.__new__(backend.B12xMLASparseImpl)
        impl.kernels, impl.gather, impl.scale = self.kernels, self.gather, SCALE
        impl.topk_indices_buffer = self.buffer
        impl.dcp_world_size = self.sizes.world
        impl.indexer = SimpleNamespace(indexer_op=self.op)
        return impl

    def start(self) -> None:
        """What the profiling run does: agree, freeze, reserve; then lock."""
        workspace._manager = workspace.WorkspaceManager(torch.device("cpu"))
        shapes = startup.LayerShapes(
            num_tokens=self.sizes.max_rows,
            local_heads=self.sizes.heads,
            width=self.sizes.width,
            pool_topk=self.sizes.pool_topk,
            index_heads=INDEX_HEADS,
            ring=RING,
            scale=SCALE,
        )
        assert self.gather.freeze(self.kernels)
        self.gather.reserve(self.kernels, shapes)
        workspace._manager.lock()
        self.manager = workspace._manager

    def _query_gather(self, query: torch.Tensor) -> torch.Tensor:
        world, (rows, heads, dims) = self.sizes.world, query.shape
        every = query.new_empty((world * rows, heads, dims))
        self.dist.all_gather_into_tensor(every, query.contiguous())
        by_rank = every.view(world, rows, heads, dims)
        return by_rank.transpose(0, 1).reshape(rows, world * heads, dims)

    def _combine(self, out, lse, *, seq_lens, query_start_loc) -> torch.Tensor:
        world, (rows, heads, dims) = self.sizes.world, out.shape
        sent = out.new_empty((world, rows, heads // world, dims + 2))
        ops.a2a_pack_send(out, lse, sent, world, heads // world, dims, 2, seq_lens, query_start_loc)
        received = torch.empty_like(sent)
        self.dist.all_to_all_single(received, sent)
        return ops.a2a_unpack_combine(received, dims, 2, False, True)

    def poison(self) -> None:
        """Overwrite what another user of vLLM's workspace and of the id buffer may overwrite."""
        for buffer in self.manager._current_workspaces:
            if buffer is not None:
                buffer.fill_(0xFF)
        self.buffer.fill_(POISON_ID)

    def slots(self, step: Step) -> torch.Tensor:
        """vLLM's slot mapping: -1 for tokens of other ranks and for padding rows."""
        world, interleave, page = self.sizes.world, self.sizes.interleave, self.sizes.page_size
        slots: list[int] = []
        for request, query, length in zip(
            step.requests, step.query_lens, step.seq_lens, strict=True
        ):
            for position in range(length - query, length):
                if position // interleave % world != self.rank:
                    slots.append(-1)
                    continue
                local = position // (interleave * world) * interleave + position % interleave
                slots.append(self.tables.pages[request][local // page] * page + local % page)
        return torch.tensor(slots + [-1] * step.pad_tokens, dtype=torch.int64)

    def metadata(self, step: Step, count: bool = True) -> dict[str, Any]:
        """The step's metadata of all three caches, with its decision."""
        starts = torch.tensor([0, *step.query_lens, *[0] * step.pad_rows]).cumsum(0).int()
        lengths = torch.tensor([*step.seq_lens, *[777] * step.pad_rows], dtype=torch.int32)
        positions, slots = step.positions(), self.slots(step)
        num_tokens = step.num_tokens + step.pad_tokens
        common = SimpleNamespace(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            is_prefilling=torch.tensor([*step.prefilling, *[False] * step.pad_rows]),
            num_actual_tokens=num_tokens,
            num_reqs=len(lengths),
        )
        decision = self.gather.plan_batch(
            common,
            num_decode_tokens=step.num_decode_tokens,
            count=count,
            **self.decision_options,
        )
        world, interleave = self.sizes.world, self.sizes.interleave
        rest = lengths % (world * interleave) - self.rank * interleave
        local = lengths // (world * interleave) * interleave + rest.clamp(0, interleave)
        decodes = step.num_decode_tokens if step.num_decodes is None else step.num_decodes
        attention = backend.B12xMLASparseMetadata(
            num_reqs=len(lengths),
            max_query_len=max(step.query_lens, default=0),
            max_seq_len=max(step.seq_lens, default=0),
            num_actual_tokens=num_tokens,
            query_start_loc=starts,
            slot_mapping=slots,
            num_decodes=decodes,
            num_decode_tokens=step.num_decode_tokens,
            num_prefills=len(step.requests) - decodes,
            block_table=self.tables.latents(step.requests, step.pad_rows),
            req_id_per_token=step.request_rows(),
            seq_lens=local,
            block_size=self.sizes.page_size,
            cp_kv_cache_interleave_size=interleave,
            ckv_plan=decision,
        )
        index_table = self.tables.index(step.requests, self.sizes.page_size // 256, step.pad_rows)
        pool_slots = torch.full_like(slots, POISON_ID)
        ops.compressed_slot_mapping(
            pool_slots, slots, starts, lengths, index_table, 64, POOL, world, interleave
        )
        tail_table = torch.tensor([[r + 1] for r in step.requests] + [[0]] * step.pad_rows)
        tail_slots = compute_kpool_tail_slot_mapping(
            slots, tail_table.int(), starts, positions, step.num_tokens, len(lengths), RING
        )

        def index(mapping: torch.Tensor, table: torch.Tensor | None) -> DeepseekV32IndexerMetadata:
            return DeepseekV32IndexerMetadata(
                seq_lens=lengths,
                max_seq_len=attention.max_seq_len,
                slot_mapping=mapping,
                num_decodes=attention.num_decodes,
                num_decode_tokens=attention.num_decode_tokens,
                num_prefills=attention.num_prefills,
                num_prefill_tokens=step.num_tokens - step.num_decode_tokens,
                block_table=table,
            )

        return {
            LAYER: attention,
            "index": index(pool_slots, index_table),
            "tail": index(tail_slots, None),
        }

    def forward(self, step: Step, inputs: list[Inputs], write_only: bool = False) -> list[Result]:
        """One step through all layers; with ``write_only``, just its records, pools and tails."""
        metadata = self.metadata(step, count=not write_only)
        positions = step.positions()
        context = forward_context.ForwardContext(
            no_compile_layers={}, attn_metadata=metadata, slot_mapping={}
        )
        results = []
        with forward_context.override_forward_context(context):
            for layer, given in enumerate(inputs):
                attention = metadata[LAYER]
                if write_only:
                    self._update_cache(layer, given, attention)
                    self.kernels.write_pools(
                        given.k, given.gate, given.ape, self.index_caches[layer],
                        metadata["index"].slot_mapping, self.tails[layer],
                        metadata["tail"].slot_mapping, positions, attention.query_start_loc,
                    )  # fmt: skip
                    continue
                self.poison()
                results.append(self._layer(layer, given, attention, positions))
        return results

    def _update_cache(self, layer: int, given: Inputs, attention: Any) -> None:
        self.impl.do_kv_cache_update(
            given.latents, given.latents[:, :0], self.caches[layer],
            attention.slot_mapping, self.sizes.record, torch.ones(1),
        )  # fmt: skip

    def _layer(self, layer: int, given: Inputs, attention: Any, positions: torch.Tensor) -> Result:
        self.op.k_cache.kv_cache = self.index_caches[layer]
        self.op.tail_cache.kv_cache = self.tails[layer]
        attending = self._attending(layer, attention)
        rows = positions.shape[0]
        if self.impl.begins_early:
            mla.begin_layer(attending)
        self.op.forward_native(
            given.latents, given.index_q, given.k, given.weights,
            gate_score=given.gate, compress_ape=given.ape, index_kpool=POOL, positions=positions,
        )  # fmt: skip
        token_ids = self.buffer[:rows].clone()
        # As in vLLM not before the indexer has run.
        self._update_cache(layer, given, attention)
        heads = slice(self.rank * self.sizes.heads, (self.rank + 1) * self.sizes.heads)
        query = given.q[:, heads].contiguous()
        if self.sizes.world > 1:
            query = self.query_gather(query)
        out, lse = attending.forward_impl(query, given.latents)
        if self.sizes.world > 1:
            out = self.combine(
                out, lse, seq_lens=attention.seq_lens, query_start_loc=attention.query_start_loc
            )
        plan = attention.ckv_plan
        if plan is None:
            return Result(token_ids, out, lse, False, 0, 0, [])
        spans = [len(span.windows) for span in plan.spans]
        return Result(
            token_ids, out, lse, True, plan.first_row, plan.selection_shares, spans,
            0 if plan.early is None else plan.early.layout.own_rows,
        )  # fmt: skip

    def _attending(self, layer: int, attention: Any) -> Any:
        """What the product sees of vLLM's attention layer."""
        attending = SimpleNamespace(
            impl=self.impl,
            layer_name=LAYER,
            kv_cache=self.caches[layer],
            dcp_manager=SimpleNamespace(query_gather=self.query_gather, combine=self.combine),
        )
        attending.forward_impl = lambda query, latents: self.impl.forward_mqa(
            (query, query[..., :0]), attending.kv_cache, attention, attending
        )
        if self.sizes.early_exchange:
            backend.hand_latents_over(attending, self.impl)
        return attending


@contextmanager
def simulated_ranks(sizes: Sizes, kernels: Any, gap_rows: int = 0):
    """Yield a started :class:`Lockstep` and its ranks; needs the gather's flag to be set."""
    lockstep = Lockstep(
        sizes.world, [(forward_context, "_forward_context"), (workspace, "_manager")]
    )
    dist, group = LockstepDist(lockstep), LockstepGroup(lockstep)
    with replaced(
        (exchange, "dist", dist),
        (plan, "get_dcp_group", lambda: group),
        (backend, "get_dcp_group", lambda: group),
        (parallel_state, "get_dcp_group", lambda: group),
        (sparse_indexer, "get_kernels", lambda: kernels),
        # With these, and the flag, all batches share their selection out.
        (byte_model, "PAIRS_PER_BYTE", 0),
        (byte_model, "PAIRS_PER_EXCHANGE", -1),
        # Without an accelerator torch raises.
        (torch.accelerator, "empty_cache", lambda: None),
    ):
        ranks = [
            SimulatedRank(number, sizes, kernels, dist, gap_rows) for number in range(sizes.world)
        ]

        def start(number: int) -> None:
            ranks[number].start()

        lockstep.run(start)
        # Each rank finds its own workspace again.
        yield lockstep, ranks


def run_step(
    lockstep: Lockstep,
    ranks: list[SimulatedRank],
    step: Step,
    inputs: list[Inputs],
    write_only: bool = False,
) -> list[list[Result]]:
    """Run one step on all ranks; results by rank and layer."""

    def forward(number: int) -> list[Result]:
        workspace._manager = ranks[number].manager
        return ranks[number].forward(step, inputs, write_only)

    return lockstep.run(forward)
