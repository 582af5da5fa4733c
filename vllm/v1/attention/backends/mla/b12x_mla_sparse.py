# SPDX-License-Identifier: Apache-2.0
"""B12X sparse MLA backend with full-CKV prefill under decode context parallelism.

Backend, metadata, builder and implementation, in that order. This file holds no arithmetic: the
batch decision, the ownership of tokens, the exchange and the kernels live in ``ckv_gather`` and
``sparse_mla_kernels``.

One decision is taken per batch, on the host, and travels in the metadata as ``ckv_plan``. The query
gather, the output combine, the indexer and the implementation read that one value, so a row either
skips all three ordinary collectives and gathers records, or does neither. All rows of a batch do
alike, unless prompts may gather beside decodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.distributed import get_dcp_group
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view

from vllm.plugins.b12x_mla_sparse import MIN_CAPABILITY
from vllm.v1.attention.backends.mla.ckv_gather import debug, startup
from vllm.v1.attention.backends.mla.ckv_gather.geometry import FORMATS_ADVICE, POOLS_PER_INDEX_PAGE
from vllm.v1.attention.backends.mla.ckv_gather.measuring import device_clock
from vllm.v1.attention.backends.mla.ckv_gather.plan import CkvBatchPlan, CkvGather
from vllm.v1.attention.backends.mla.ckv_gather.rehearsal import LayerShapes
from vllm.v1.attention.backends.mla.sparse_mla_kernels import get_kernels
from vllm.v1.attention.backends.mla.sparse_mla_kernels.base import LATENT_DIM

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec

logger = init_logger(__name__)

PAGE_GRANULE = POOLS_PER_INDEX_PAGE * 4
"""Tokens of one index page: glm5_next has pools of four tokens."""

MODEL_TYPES = ("glm5_next", "glm5_next_text")


class B12xMLASparseBackend(AttentionBackend):
    """``--attention-backend B12X_MLA_SPARSE``: glm5_next, FP8 or NVFP4 records."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    # 528-byte FP8 and 304-byte NVFP4 records; the latter only with kernels that know them.
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["fp8_ds_mla", "nvfp4_ds_mla"]

    @staticmethod
    def get_name() -> str:
        return "B12X_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[B12xMLASparseImpl]:
        return B12xMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[B12xMLASparseMetadataBuilder]:
        return B12xMLASparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        # The latent page cannot be cut into smaller kernel blocks: it shares its block with the
        # index page, so whole pages are read. They hold whole index pages of 64 pools, where vLLM
        # would otherwise settle for halves of one on most GPUs.
        return [MultipleOf(PAGE_GRANULE)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT_DIM]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Set the record width and keep blocks a whole number of records apart."""
        record_bytes = CkvGather.record_format(spec.cache_dtype_str).record_bytes  # type: ignore[attr-defined]
        return align_blocks_to_rows(replace(spec, state_content_bytes=record_bytes))

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        # None: the reference platform.
        return capability is None or capability.to_int() >= MIN_CAPABILITY

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        # "auto" and "fp8" are canonicalised by vLLM to formats of other widths; only the exact
        # name selects the record format.
        return kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        reasons = super().validate_configuration(*args, **kwargs)
        kv_cache_dtype = kwargs.get("kv_cache_dtype", args[2] if len(args) > 2 else None)
        if not cls.supports_kv_cache_dtype(kv_cache_dtype):
            reasons.append(f"got --kv-cache-dtype {kv_cache_dtype}; {FORMATS_ADVICE}")
        vllm_config = get_current_vllm_config()
        model_config = vllm_config.model_config
        model_type = getattr(getattr(model_config, "hf_text_config", None), "model_type", None)
        if model_config is None:
            return reasons
        if model_type not in MODEL_TYPES:
            return [*reasons, f"model type {model_type!r} is not supported; only glm5_next is"]
        return reasons + startup.refusals(vllm_config, envs.VLLM_B12X_MLA_CKV_GATHER)


@dataclass(kw_only=True)
class B12xMLASparseMetadata(SparseMLACommonMetadata):
    """Sparse MLA metadata plus the batch's one decision."""

    ckv_plan: CkvBatchPlan | None = None
    """The windows of a batch that gathers; None for every ordinary batch. Draft layers may
    share this object with the model's layers, and stay ordinary: none of them reads it."""


def current_metadata(layer_name: str) -> Any:
    """This step's metadata of ``layer_name``, of an attention layer or of one of its caches.

    None in dummy runs.
    """
    attn_metadata = get_forward_context().attn_metadata
    return attn_metadata.get(layer_name) if isinstance(attn_metadata, dict) else None


class OrdinaryOnly:
    """Wraps a per-layer DCP callable: batches that gather skip it and keep their local heads.

    ``query_gather(q)`` and ``combine(out, lse, ...)`` both return their first argument unchanged
    in a gathered batch, in which every rank already holds the whole result for its own heads. If it
    holds decodes too, the implementation calls ``inner`` for them.

    inner: the callable. layer_name: whose decision it follows.
    count: called with the prefill rows and the tensor (rows, heads, dims) of an ordinary batch.
    """

    def __init__(
        self, inner: Any, layer_name: str, count: Callable[[int, torch.Tensor], None]
    ) -> None:
        self.inner = inner
        self.layer_name = layer_name
        self.count = count

    def __call__(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        metadata = current_metadata(self.layer_name)
        if metadata is not None:
            if metadata.ckv_plan is not None:
                return tensor
            self.count(max(tensor.shape[0] - metadata.num_decode_tokens, 0), tensor)
        return self.inner(tensor, *args, **kwargs)


def is_draft_layer(layer_name: str, num_hidden_layers: int) -> bool:
    """Whether ``layer_name`` belongs to an MTP layer, which vLLM numbers after the model's own."""
    number = re.search(r"\blayers\.(\d+)\b", layer_name)
    return number is not None and int(number[1]) >= num_hidden_layers


def check_when_bound(layer: Any, check: Callable[[torch.Tensor], object]) -> None:
    """Call ``check`` with ``layer.kv_cache`` whenever vLLM binds a cache to ``layer``. Idempotent.

    vLLM tells a layer, but not its implementation, about its cache.
    """
    bind = layer.bind_kv_cache
    if getattr(bind, "checks_geometry", False):
        return

    def bind_kv_cache(kv_cache: torch.Tensor) -> None:
        bind(kv_cache)
        check(layer.kv_cache)

    bind_kv_cache.checks_geometry = True  # type: ignore[attr-defined]
    layer.bind_kv_cache = bind_kv_cache


def hand_latents_over(layer: Any, impl: B12xMLASparseImpl) -> None:
    """Let ``impl`` have the latents of the batch's own tokens while ``layer`` attends. Idempotent.

    vLLM passes them to an implementation only for the cache, and a piecewise CUDA graph holds that
    update: in its replay no code of ours runs. ``forward_impl`` has them too and runs outside the
    graph, as :meth:`B12xMLASparseImpl.forward_mqa` inside it does.
    """
    forward = layer.forward_impl
    if getattr(forward, "hands_latents_over", False):
        return

    def forward_impl(q: torch.Tensor, latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        impl.latents = latents
        try:
            return forward(q, latents, *args, **kwargs)
        finally:
            impl.latents = None

    forward_impl.hands_latents_over = True  # type: ignore[attr-defined]
    layer.forward_impl = forward_impl


class B12xMLASparseMetadataBuilder(SparseMLACommonMetadataBuilder[B12xMLASparseMetadata]):
    """Builds the metadata of a step and takes its decision from exact host lengths."""

    metadata_cls = B12xMLASparseMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Rows of one token are decodes; verification batches stay on the ordinary path as well.
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )
        self._capturing = False
        self._rows = torch.empty_like(self.req_id_per_token_buffer)
        layers = vllm_config.compilation_config.static_forward_context
        self.gather = layers[layer_names[0]].impl.gather
        # A builder means that caches are about to be bound.
        self.gather.geometry.get()
        depth = vllm_config.model_config.hf_text_config.num_hidden_layers
        # vLLM builds once for all layers that are alike, a draft layer among the model's own. It
        # also makes a builder for the draft layers alone.
        drafts = {name for name in layer_names if is_draft_layer(name, depth)}
        self._is_draft = len(drafts) == len(layer_names)
        self._counts = not self._is_draft and self.gather.counts_for(layer_names[0])
        for name in layer_names:
            layers[name].impl.attach_layer(layers[name], name, is_draft=name in drafts)

    def _build_req_id_per_token(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> torch.Tensor:
        """The request of each row, -1 for padding rows, which vLLM maps to request 0.

        A padding row of request 0 would read at a stale position. Copied, because vLLM shares its
        buffer with the builders of other layers.
        """
        rows = super()._build_req_id_per_token(common_attn_metadata)
        num_tokens = int(common_attn_metadata.query_start_loc_cpu[-1])
        own = self._rows[: rows.shape[0]]
        own[:num_tokens].copy_(rows[:num_tokens])
        own[num_tokens:].fill_(-1)
        return own

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> B12xMLASparseMetadata:
        self._capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._capturing = False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> B12xMLASparseMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.ckv_plan = self.gather.plan_batch(
            common_attn_metadata,
            num_decode_tokens=metadata.num_decode_tokens,
            capturing=self._capturing,
            is_draft_layer=self._is_draft,
            count=self._counts,
        )
        return metadata


def register_stock_warm_ups() -> None:
    """Register the JIT warm-ups of vLLM's metadata kernels, which go by a list of backend names."""
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa

    compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL.register_warmup()
    indexer._PREPARE_UNIFORM_DECODE_KERNEL.register_warmup()
    indexer._BUILD_PREFILL_CHUNK_METADATA_KERNEL.register_warmup()
    sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL.register_warmup()


class B12xMLASparseImpl(SparseMLACommonImpl[B12xMLASparseMetadata]):
    """Attention over latent records: ordinary path and gathered path.

    Both paths end in one kernel call, ``attend``; they differ in the rows it reads and in the
    number of heads in ``q``: all heads of the DCP group (ordinary), local heads (gathered).
    """

    supports_dcp: bool = True
    supports_pcp: bool = False
    can_return_lse_for_decode: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    supports_dense_mha_prefill: bool = False
    group_conversion_decode_only: ClassVar[bool] = True
    supports_quant_query_input: bool = False
    lse_base_on_e: bool = True

    is_draft: bool = False
    """Whether the layer belongs to a draft model, which never gathers; the builder finds out."""
    latents: torch.Tensor | None = None
    """(T, 512) bf16, see :func:`hand_latents_over`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.kv_lora_rank != LATENT_DIM or self.qk_rope_head_dim != 0:
            raise ValueError(
                f"B12X_MLA_SPARSE reads latents of {LATENT_DIM} dims without rope; got "
                f"kv_lora_rank {self.kv_lora_rank}, qk_rope_head_dim {self.qk_rope_head_dim}; "
                "use another backend"
            )
        vllm_config = get_current_vllm_config()
        self.kernels = get_kernels()
        self.gather = CkvGather.from_config(vllm_config)
        self.indexer = kwargs.get("indexer")
        if self.indexer is not None:
            self.indexer.indexer_op.follow("", self.gather)
        if self.gather.enabled:
            startup.separate_startup_plans(vllm_config, self.gather.facts)
        if vllm_config.kernel_config.enable_jit_warmup:
            register_stock_warm_ups()

    def attach_layer(self, layer: Any, layer_name: str, *, is_draft: bool = False) -> None:
        """Tie the layer's collectives, indexer and caches to our decision and geometry.

        Called by the builder, which vLLM makes twice: idempotent. Collectives of draft layers are
        left alone.
        """
        self.is_draft = is_draft
        geometry = self.gather.geometry
        check_when_bound(layer, geometry.check_bound)
        if self.gather.early_exchange and not is_draft:
            hand_latents_over(layer, self)
        manager = None if is_draft else layer.dcp_manager
        if manager is not None and not isinstance(manager.combine, OrdinaryOnly):
            manager.query_gather = OrdinaryOnly(
                manager.query_gather, layer_name, self.gather.count_query_gather
            )
            manager.combine = OrdinaryOnly(
                manager.combine, layer_name, partial(self.gather.count_combine, manager.use_a2a)
            )
        if self.indexer is not None:
            self.indexer.indexer_op.follow(layer_name, self.gather, is_draft=is_draft)
            check_when_bound(self.indexer.k_cache, self._check_index_cache)

    @property
    def begins_early(self) -> bool:
        """Whether :meth:`begin_layer` may have something to do."""
        return self.gather.early_exchange and not self.is_draft

    def begin_layer(self, layer: Any) -> None:
        """Begin the exchange of what earlier steps left in ``layer``'s caches, if the batch may.

        Before anything of this step is written to them, see ``vllm.models.glm5next.b12x.mla``.
        """
        metadata = current_metadata(layer.layer_name)
        window = None
        if metadata is not None and metadata.ckv_plan is not None:
            window = metadata.ckv_plan.early
        if window is None:
            return
        assert self.indexer is not None
        keys = self.indexer.indexer_op.k_cache
        self.gather.begin_layer(
            window,
            self.kernels,
            layer.kv_cache,
            metadata.block_table,
            keys.kv_cache,
            current_metadata(keys.prefix).block_table,
        )

    def _check_index_cache(self, cache: torch.Tensor) -> None:
        self.gather.geometry.check_bound_index(cache)
        self.kernels.check_index_cache(cache)

    def reserve_workspace(self) -> None:
        """Called in the profiling run: freeze the geometry, reserve buffers, run everything once.

        vLLM's profiling run does not enter attention, so the first layer does it here.
        """
        if self.indexer is None:
            # The layer uses another one's selection, and that one has been here.
            return
        assert self.topk_indices_buffer is not None
        shapes, device = self.layer_shapes(), self.topk_indices_buffer.device
        if not self.gather.freeze(self.kernels):
            self.gather.reserve_again()
            return
        startup.warm_up(self.gather, self.kernels, shapes, device)
        self.gather.reserve(self.kernels, shapes)
        layers = self.gather.vllm_config.compilation_config.static_forward_context.values()
        manager = next(
            (layer.dcp_manager for layer in layers if getattr(layer, "impl", None) is self), None
        )
        startup.run_everything_once(
            self.gather,
            self.kernels,
            shapes,
            device,
            None if manager is None else manager.query_gather,
            None if manager is None else manager.combine,
            device_clock(device),
        )

    def layer_shapes(self) -> LayerShapes:
        """The largest shapes of a layer with an indexer."""
        assert self.indexer is not None and self.topk_indices_buffer is not None
        vllm_config, op = self.gather.vllm_config, self.indexer.indexer_op
        return LayerShapes(
            num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            local_heads=self.num_heads,
            width=self.topk_indices_buffer.shape[1],
            pool_topk=op.topk_tokens // self.gather.pool_size,
            # The indexer pads its heads to the 32 that the logits kernels take.
            index_heads=max(self.indexer.n_head, 32),
            ring=op.tail_cache.get_kv_cache_spec(vllm_config).block_size,
            scale=self.scale,
        )

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        *unused: Any,
    ) -> None:
        if self.gather.debug:
            debug.check_below("latent slots", slot_mapping, kv_cache.shape[0] * kv_cache.shape[1])
        self.kernels.write_records(kv_c_normed[: slot_mapping.shape[0]], kv_cache, slot_mapping)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: B12xMLASparseMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # NoPE model: the rope part of a split query has width 0.
        query = q[0] if isinstance(q, tuple) else q
        num_tokens = query.shape[0]
        assert self.topk_indices_buffer is not None
        token_ids = self.topk_indices_buffer[:num_tokens]
        req_id = attn_metadata.req_id_per_token[:num_tokens]
        plan = None if self.is_draft else attn_metadata.ckv_plan
        if plan is None:
            return self._attend_ordinary(
                query, kv_c_and_k_pe_cache, attn_metadata, token_ids, req_id
            )
        decodes = None
        if plan.first_row:
            decodes = self._attend_decodes(
                plan.first_row, query, kv_c_and_k_pe_cache, attn_metadata, token_ids, layer
            )
        out, lse = self.gather.attend(
            plan,
            self.kernels,
            kv_c_and_k_pe_cache,
            attn_metadata.block_table,
            token_ids,
            req_id,
            query,
            self.scale,
            self.latents,
        )
        if decodes is None:
            return out, lse
        # The combine of decodes kept theirs, and that of the whole batch reads none.
        unknown = lse.new_full((plan.first_row, lse.shape[1]), torch.nan)
        return torch.cat((decodes, out)), torch.cat((unknown, lse))

    def _attend_decodes(
        self,
        num_rows: int,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: B12xMLASparseMetadata,
        token_ids: torch.Tensor,
        layer: Any,
    ) -> torch.Tensor:
        """Output (num_rows, local heads, 512) of a mixed batch's decodes.

        On the ordinary path, as in a batch of their own: with the collectives that vLLM calls
        around :meth:`forward_mqa`, and that this batch's other rows skip.
        """
        count, manager = attn_metadata.num_decodes, layer.dcp_manager
        assert attn_metadata.seq_lens is not None
        out, lse = self._attend_ordinary(
            manager.query_gather.inner(query[:num_rows]),
            kv_cache,
            attn_metadata,
            token_ids[:num_rows],
            attn_metadata.req_id_per_token[:num_rows],
        )
        return manager.combine.inner(
            out,
            lse,
            seq_lens=attn_metadata.seq_lens[:count],
            query_start_loc=attn_metadata.query_start_loc[: count + 1],
        )

    def _attend_ordinary(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: B12xMLASparseMetadata,
        token_ids: torch.Tensor,
        req_id: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of all heads in ``query`` to this rank's own records."""
        records, block_stride_rows = flat_kv_row_view(kv_cache, attn_metadata.block_size)
        rows, counts = self.kernels.filter_local(
            token_ids,
            req_id,
            attn_metadata.block_table,
            block_stride_rows=block_stride_rows,
            page_size=attn_metadata.block_size,
            rank=get_dcp_group().rank_in_group if self.dcp_world_size > 1 else 0,
            dcp_world_size=self.dcp_world_size,
            interleave=attn_metadata.cp_kv_cache_interleave_size,
        )
        if self.gather.debug:
            debug.check_below("cache rows", rows, records.shape[0])
        scratch = self.gather.ordinary_scratch.borrow_attention()
        return self.kernels.attend(query, records, rows, counts, self.scale, scratch)
