# SPDX-License-Identifier: Apache-2.0
"""Torch stand-ins for operations that need a GPU or a CPU build of vLLM, and their installation.

Each replacement takes the place of one named attribute; :func:`install` is the only function that
changes anything outside this package. Stand-ins for Triton kernels replace the launcher object,
so that every caller of the function around it is covered.
"""

import ctypes
import importlib
from typing import Any

import torch

from vllm.platforms.ckv_reference import kda

_OPERATORS = {
    "init_cpu_memory_env": "(int[] nodes) -> ()",
    "greedy_argmax": "(Tensor logits) -> Tensor",
    "fused_gumbel_argmax": "(Tensor logits, Tensor seeds) -> Tensor",
    "prepack_moe_weight": "(Tensor weight, Tensor(a!) out, str isa) -> ()",
    "cpu_fused_moe": "(Tensor(a!) out, Tensor x, Tensor w13, Tensor w2, Tensor? b13, Tensor? b2, "
    "Tensor weights, Tensor ids, bool skip_weighted, str act, str isa) -> ()",
}
_libraries: list[torch.library.Library] = []
_installed = False


# Operators of vLLM's CPU extension


def init_cpu_memory_env(nodes: list[int]) -> None:
    """Memory binding of a CPU build; nothing to bind here."""


def greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    """(R, V) -> (R,) int64."""
    return logits.argmax(-1)


def fused_gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Sample one token a row by the Gumbel-max trick.

    logits: (R, V) float32. seeds: (R,) int64, one generator a row. Returns (R,) int64. Equal seeds
    and logits give equal tokens; the stream differs from the compiled operator's.
    """
    result = torch.empty(logits.shape[0], dtype=torch.int64)
    for row, seed in enumerate(seeds.tolist()):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.empty(logits.shape[1]).exponential_(generator=generator)
        result[row] = (logits[row].float() - noise.log()).argmax()
    return result


def prepack_moe_weight(weight: torch.Tensor, out: torch.Tensor, isa: str) -> None:
    """Copy: the stand-in for the fused MoE reads the checkpoint's own layout."""
    out.copy_(weight)


def cpu_fused_moe(out, x, w13, w2, b13, b2, weights, ids, skip_weighted, act, isa) -> None:
    """SwiGLU experts, summed in float32.

    out, x: (T, D). w13: (E, 2*I, D). w2: (E, D, I). b13, b2: (E, 2*I), (E, D) or None. weights,
    ids: (T, top_k). ``skip_weighted`` leaves the routing weights out.

    Raises:
        ValueError: another activation than silu.
    """
    if act != "silu":
        raise ValueError(f"the reference MoE knows silu only, not {act!r}")
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(w13.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if not token.numel():
            continue
        hidden = x[token] @ w13[expert].T
        if b13 is not None:
            hidden = hidden + b13[expert]
        gate, up = hidden.chunk(2, -1)
        y = (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype) @ w2[expert].T
        if b2 is not None:
            y = y + b2[expert]
        scale = 1.0 if skip_weighted else weights[token, choice].float()[:, None]
        total.index_add_(0, token, y.float() * scale)
    out.copy_(total)


def _define_operators() -> None:
    library = torch.library.Library("_C", "FRAGMENT")
    for name, schema in _OPERATORS.items():
        # A CPU build of vLLM has its own; those are left alone.
        if hasattr(torch.ops._C, name):
            continue
        library.define(name + schema)
        library.impl(name, globals()[name], "CompositeExplicitAutograd")
    _libraries.append(library)


# Hyper-connections (mHC)


def mhc_pre(
    residual,
    fn,
    hc_scale,
    hc_base,
    rms_eps,
    hc_pre_eps,
    hc_sinkhorn_eps,
    hc_post_mult_value,
    sinkhorn_repeat,
    n_splits=1,
    norm_weight=None,
    norm_eps=0.0,
):
    """vLLM's torch mHC pre block followed by the layer's norm, which that version leaves out.

    residual: (..., streams, D) bf16. norm_weight: (D,) or None. Returns post mix (..., streams),
    residual mix (..., streams, streams), both float32, and the layer input (..., D).
    """
    from vllm.model_executor.kernels.mhc import mhc_pre_torch
    from vllm.model_executor.layers.mhc import _apply_mhc_norm

    post, comb, layer_input = mhc_pre_torch(
        residual,
        fn,
        hc_scale,
        hc_base,
        rms_eps,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
    )
    return post, comb, _apply_mhc_norm(layer_input, norm_weight, norm_eps)


def mhc_fused_post_pre(
    self,
    x,
    residual,
    post_layer_mix,
    comb_res_mix,
    fn,
    hc_scale,
    hc_base,
    rms_eps,
    hc_pre_eps,
    hc_sinkhorn_eps,
    hc_post_mult_value,
    sinkhorn_repeat,
    n_splits=1,
    tile_n=1,
    norm_weight=None,
    norm_eps=0.0,
):
    """Post block of one layer and pre block of the next, norm included.

    The CPU method of vLLM 0.33.0 accepts ``norm_weight`` and drops it: wrong tokens, no error.
    """
    from vllm.model_executor.kernels.mhc import mhc_post_torch

    residual = mhc_post_torch(x, residual, post_layer_mix, comb_res_mix)
    return residual, *mhc_pre(
        residual,
        fn,
        hc_scale,
        hc_base,
        rms_eps,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
        n_splits,
        norm_weight,
        norm_eps,
    )


# Triton kernels that are right but slow in the interpreter


class TorchLauncher:
    """Takes the place of a kernel launcher: calls ``function``, else behaves as ``stock``."""

    def __init__(self, function, stock):
        self._function, self._stock = function, stock

    def __call__(self, *args, **kwargs):
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def convert_req_index(
    req_id,
    block_table,
    token_indices,
    out,
    valid_counts,
    prefill_request_ids,
    prefill_starts,
    idx_mapping,
    *,
    workspace_rank_stride,
    max_num_blocks_per_req,
    BLOCK_SIZE,
    BLOCK_STRIDE_ROWS,
    HAS_PREFILL_WORKSPACE,
    HAS_IDX_MAPPING,
    COUNT_VALID,
    COMPACT_TO_FRONT,
    DCP_SIZE,
    DCP_RANK,
    DCP_INTERLEAVE,
    **_,
) -> None:
    """Token ids of each row -> cache rows of this rank, -1 for invalid and foreign ones.

    req_id: (T,), block_table: (R, B), token_indices and out: (T, W), valid_counts: (T,) or None,
    all int32. Rows keep their order; ``COMPACT_TO_FRONT`` moves valid ones to the front, stably.
    """
    token = token_indices.long()
    request = req_id.long()
    if HAS_IDX_MAPPING:
        request = idx_mapping.long()[request].clamp_min(0)
    owner = token // DCP_INTERLEAVE % DCP_SIZE
    local = token // (DCP_SIZE * DCP_INTERLEAVE) * DCP_INTERLEAVE + token % DCP_INTERLEAVE
    block = local // BLOCK_SIZE
    valid = (token >= 0) & (block < max_num_blocks_per_req)
    here = owner == DCP_RANK
    prefill = torch.zeros_like(valid)
    if HAS_PREFILL_WORKSPACE:
        prefill = (prefill_request_ids >= 0)[:, None].expand_as(valid)
    in_table = block.clamp(0, max_num_blocks_per_req - 1)
    row = block_table.long()[request[:, None], in_table] * BLOCK_STRIDE_ROWS + local % BLOCK_SIZE
    if HAS_PREFILL_WORKSPACE:
        start = prefill_starts.long()[prefill_request_ids.long().clamp_min(0)][:, None]
        row = torch.where(prefill, owner * workspace_rank_stride + start + local, row)
    valid &= here | prefill
    row = torch.where(valid, row, -1)
    if COMPACT_TO_FRONT:
        row = row.gather(1, torch.argsort((~valid).int(), dim=1, stable=True))
    out.copy_(row)
    if COUNT_VALID:
        valid_counts.copy_(valid.sum(1))


def correct_attn_out(outputs, new_output, lses, vlse, lse_idx, ctx, *, is_base_e) -> None:
    """Weigh this rank's partial output by exp(own lse - global lse).

    outputs, new_output: (T, H, D), may be the same tensor. lses: (N, T, H). vlse: (T, H), receives
    the global log-sum-exp. NaN and +inf count as an empty shard (weight 0).
    """
    clean = torch.where(lses.isnan() | (lses == float("inf")), float("-inf"), lses.float())
    if is_base_e:
        total = torch.logsumexp(clean, 0)
        factor = (lses[lse_idx].float() - total).exp()
    else:
        total = torch.logsumexp(clean * _LN2, 0) / _LN2
        factor = (lses[lse_idx].float() - total).exp2()
    factor = torch.where(factor.isfinite(), factor, 0.0)[..., None]
    vlse.copy_(total)
    new_output.copy_(torch.where(factor == 0, 0.0, outputs.float() * factor))


_LN2 = 0.6931471805599453


def a2a_pack_send(
    cp_attn_out,
    cp_attn_lse,
    send_buffer,
    world_size,
    h_per_rank,
    head_dim,
    lse_pack_dim,
    seq_lens=None,
    query_start_loc=None,
) -> None:
    """Pack outputs (T, N*H, D) and lse (T, N*H) into ``send_buffer`` (N, T, H, D + lse columns).

    The float32 lse takes two columns of a 16-bit type (low half first) or one of a 32-bit type.
    Rows of requests without local tokens get lse -inf.
    """
    from vllm.v1.attention.ops.dcp import mask_dcp_empty_shards_

    lse = cp_attn_lse.to(torch.float32, copy=True)
    mask_dcp_empty_shards_(lse, seq_lens, query_start_loc)
    tokens = cp_attn_out.shape[0]
    columns = lse.contiguous()[..., None].view(send_buffer.dtype)
    for part, values in (
        (send_buffer[..., :head_dim], cp_attn_out),
        (send_buffer[..., head_dim:], columns),
    ):
        part.copy_(values.reshape(tokens, world_size, h_per_rank, -1).transpose(0, 1))


def a2a_unpack_combine(recv_buffer, head_dim, lse_pack_dim, return_lse, is_lse_base_on_e):
    """Combine the partial outputs of all ranks: (N, T, H, D + lse columns) -> (T, H, D).

    Also returns the global lse (T, H) float32 when asked for. Empty shards weigh 0; rows where
    every shard is empty come out as 0 with lse -inf.
    """
    lse = recv_buffer[..., head_dim:].contiguous().view(torch.float32)[..., 0]
    lse = torch.where(lse.isnan() | (lse == float("inf")), float("-inf"), lse)
    lse = lse if is_lse_base_on_e else lse * _LN2
    total = torch.logsumexp(lse, 0)
    weight = (lse - total).exp()
    weight = torch.where(weight.isnan(), 0.0, weight)[..., None]
    partial = torch.where(weight == 0, 0.0, recv_buffer[..., :head_dim].float())
    out = (partial * weight).sum(0).to(recv_buffer.dtype)
    if return_lse:
        return out, total if is_lse_base_on_e else total / _LN2
    return out


def compressed_slot_mapping(
    out,
    slot_mapping,
    query_start_loc,
    seq_lens,
    block_table,
    block_size,
    compress_ratio,
    dcp_world_size,
    cp_interleave,
) -> None:
    """Slots of the pools that end in this step, written to ``out`` (T,) int64.

    slot_mapping: (T,), -1 for padding and tokens of other ranks. query_start_loc: (R+1,).
    seq_lens: (R,). block_table: (R, B) of index pages of ``block_size`` pools. Only a pool's last
    token gets a slot, every other token of the requests -1; entries past them are left alone.
    """
    requests = block_table.shape[0]
    start, end = int(query_start_loc[0]), int(query_start_loc[requests])
    if end <= start:
        return
    token = torch.arange(start, end)
    bounds = query_start_loc[: requests + 1].long()
    request = torch.searchsorted(bounds[1:].contiguous(), token, right=True)
    position = seq_lens.long()[request] - bounds[request + 1] + token
    valid = ((position + 1) % compress_ratio == 0) & (position >= 0)
    valid &= slot_mapping[start:end] != -1
    stride = cp_interleave * dcp_world_size
    pool = (position // stride * cp_interleave + position % cp_interleave) // compress_ratio
    page = torch.where(valid, pool // block_size, 0)
    slot = block_table.long()[request, page] * block_size + pool % block_size
    out[start:end] = torch.where(valid, slot, -1)


def build_prefill_chunk_metadata(
    query_start_loc,
    uncompressed_seq_lens,
    cu_seq_lens,
    row_start_cu,
    token_to_seq,
    cu_seq_len_ks,
    cu_seq_len_ke,
    query_slice_start,
    query_slice_stop,
    dcp_rank,
    dcp_world,
    dcp_interleave,
    *,
    num_reqs,
    COMPRESS_RATIO,
    **_,
) -> None:
    """Row bounds of each query token over the gathered keys, and each key's request.

    query_start_loc, cu_seq_lens, row_start_cu: (R+1,). uncompressed_seq_lens: (R,). Writes
    token_to_seq (keys,), and cu_seq_len_ks/ke for the query tokens of the slice. Lengths are in
    pools; under DCP the end counts this rank's pools of the token's causal length.
    """
    counts = (cu_seq_lens[1 : num_reqs + 1] - cu_seq_lens[:num_reqs]).long()
    owner = torch.repeat_interleave(torch.arange(num_reqs), counts)
    token_to_seq[: owner.shape[0]] = owner.to(token_to_seq.dtype)
    token = torch.arange(query_slice_start, query_slice_stop)
    bounds = query_start_loc[: num_reqs + 1].long()
    request = torch.searchsorted(bounds[1:].contiguous(), token, right=True)
    length = uncompressed_seq_lens.long()[request] - bounds[request + 1] + token + 1
    length = length // COMPRESS_RATIO
    if dcp_world > 1:
        base = length // (dcp_interleave * dcp_world) * dcp_interleave
        rest = length - base * dcp_world - dcp_rank * dcp_interleave
        length = base + rest.clamp(0, dcp_interleave)
    first = row_start_cu.long()[request]
    cu_seq_len_ks[: token.shape[0]] = first.to(cu_seq_len_ks.dtype)
    cu_seq_len_ke[: token.shape[0]] = (first + length).to(cu_seq_len_ke.dtype)


def fwht128_quant_fp8(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hadamard-128 rotation, rounded to bf16, then e4m3 with a power-of-two scale a row.

    q: (rows, 128) bf16. Returns (rows, 128) e4m3 and (rows, 1) float32 scales, where
    ``scale = 2 ** ceil(log2(max(amax, 1e-4) / 448))``.
    """
    x = q.float()
    # The butterflies pair neighbours first; the order decides the last bit of the sums.
    for stride in (1, 2, 4, 8, 16, 32, 64):
        a, b = x.view(-1, 64 // stride, 2, stride).unbind(2)
        x = torch.stack([a + b, a - b], 2).view(-1, 128)
    x = (x * 0.08838834764831845).to(torch.bfloat16).float()
    amax = x.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax * (1.0 / 448.0))))
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def fused_q_kv_rmsnorm(q, kv, q_out, kv_out, q_weight, kv_weight, eps) -> None:
    """RMSNorm of the rows of q and of kv, in float32: (T, D) each, weights (D,)."""
    for x, out, weight in ((q, q_out, q_weight), (kv, kv_out, kv_weight)):
        row = x.float()
        scale = torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)
        out.copy_(row * scale * weight.float())


def zero_kv_blocks(addresses, block_strides, page_sizes, block_ids, *, BLOCK_SIZE) -> None:
    """Zero blocks of the KV cache: in each of S segments, a page at every block's place.

    addresses: (S,) uint64, bytes. block_strides, page_sizes: (S,) int64, units of four bytes.
    block_ids: (B,) int64.
    """
    segments = list(
        zip(addresses.tolist(), block_strides.tolist(), page_sizes.tolist(), strict=True)
    )
    for block in block_ids.tolist():
        for address, stride, size in segments:
            ctypes.memset(address + 4 * stride * block, 0, 4 * size)


class AnyGrid:
    """Takes the place of a Triton kernel: calls ``function``, whatever the grid."""

    def __init__(self, function):
        self._function = function

    def __getitem__(self, grid):
        return self._function


def apply_top_k_top_p(logits, k, p, **unused):
    """Mask ``logits`` (rows, vocabulary) to the top k or top p by vLLM's own torch function."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)


_DCP = "vllm.v1.attention.ops.dcp"
_SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"
_MLA = "vllm.v1.attention.backends.mla"
_NORM = "vllm.models.common.ops.fused_qk_rmsnorm"
_KDA = "vllm.models.glm5next.common.kda"

# (module, attribute, replacement, whether the attribute is a kernel launcher object)
REPLACEMENTS = (
    ("vllm.model_executor.kernels.mhc", "mhc_pre_cpu", mhc_pre, False),
    (_KDA, "chunk_kda_with_fused_gate", kda.chunk_kda_with_fused_gate, False),
    (_KDA, "fused_recurrent_kda", kda.fused_recurrent_kda, False),
    (_KDA, "gather_initial_states", kda.gather_initial_states, False),
    (_KDA, "scatter_states", kda.scatter_states, False),
    (_KDA, "causal_conv1d_update", kda.causal_conv1d_update, False),
    # Triton's interpreter cannot run the kernel; the V1 runner profiles with it.
    (_SAMPLER, "apply_top_k_top_p_triton", apply_top_k_top_p, False),
    ("vllm.models.glm5next.common.attention", "fwht128_quant_fp8", fwht128_quant_fp8, False),
    (_NORM, "_FUSED_Q_KV_RMSNORM_KERNEL", fused_q_kv_rmsnorm, True),
    ("vllm.v1.worker.utils", "_zero_kv_blocks_kernel", AnyGrid(zero_kv_blocks), False),
    (_DCP, "_CORRECT_ATTN_CP_OUT_KERNEL", correct_attn_out, True),
    (_DCP, "_dcp_a2a_pack_send", a2a_pack_send, False),
    (_DCP, "_dcp_a2a_unpack_combine", a2a_unpack_combine, False),
    (_MLA + ".sparse_utils", "_CONVERT_REQ_INDEX_TO_GLOBAL_INDEX_KERNEL", convert_req_index, True),
    (_MLA + ".compressor_utils", "_COMPRESSED_SLOT_MAPPING_KERNEL", compressed_slot_mapping, True),
    (_MLA + ".indexer", "_BUILD_PREFILL_CHUNK_METADATA_KERNEL", build_prefill_chunk_metadata, True),
)


def install() -> None:
    """Define the missing operators and put every replacement in place, once per process.

    Raises:
        RuntimeError: an attribute to replace does not exist (another vLLM version).
    """
    global _installed
    if _installed:
        return
    from vllm.platforms.ckv_reference import interpreter

    interpreter.install()
    _define_operators()
    for path, attribute, replacement, launcher in REPLACEMENTS:
        module = importlib.import_module(path)
        if not hasattr(module, attribute):
            raise RuntimeError(
                f"{path} has no {attribute}; the reference platform supports vLLM 0.33.x only."
            )
        value = TorchLauncher(replacement, getattr(module, attribute)) if launcher else replacement
        setattr(module, attribute, value)
    kernels: Any = importlib.import_module("vllm.model_executor.kernels.mhc")
    kernels.mhc_post_cpu = kernels.mhc_post_torch
    layers: Any = importlib.import_module("vllm.model_executor.layers.mhc")
    layers.MHCFusedPostPreOp.forward_cpu = mhc_fused_post_pre
    _installed = True
