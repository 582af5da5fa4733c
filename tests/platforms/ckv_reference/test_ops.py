# SPDX-License-Identifier: Apache-2.0
"""Each torch stand-in against the stock kernel, which runs in Triton's interpreter.

The interpreter is chosen when kernels are decorated, so the comparisons run in a child process
with the platform's environment; every comparison is one function of the child, named on its
command line.
"""

import functools
import os
import subprocess
import sys

import pytest

from vllm.platforms import ckv_reference

COMPARISONS = [
    "convert_req_index",
    "correct_attn_out",
    "a2a",
    "compressed_slots",
    "prefill_chunk",
    "fwht",
    "conv_update",
    "recurrent_kda",
    "gather_states",
    "qk_norm",
    "zero_blocks",
]


def _stock_and_ours():
    """Import the stock modules, then repair the interpreter only, so that both sides can run."""
    from vllm.platforms.ckv_reference import declare_torchvision_ops

    declare_torchvision_ops()
    from vllm.platforms.ckv_reference import interpreter, kda, ops

    interpreter.install()
    return ops, kda


def convert_req_index():
    import itertools

    import torch

    ops, _ = _stock_and_ours()
    from vllm.v1.attention.backends.mla import sparse_utils as stock

    g = torch.Generator().manual_seed(1)
    for world, interleave, width, compact in itertools.product(
        (1, 2, 3), (4, 16), (128, 256), (False, True)
    ):
        for rank in range(world):
            request = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
            table = torch.randint(0, 40, (3, 5), dtype=torch.int32, generator=g)
            # Beyond the table too: those must come out as -1.
            token = torch.randint(-1, 400, (4, width), dtype=torch.int32, generator=g)
            token[2] = -1
            arguments = {
                "dcp_size": world,
                "dcp_rank": rank,
                "cp_kv_cache_interleave_size": interleave,
                "BLOCK_SIZE": 64,
                "BLOCK_STRIDE_ROWS": 80,
                "NUM_TOPK_TOKENS": width,
                "return_valid_counts": compact,
            }
            if world > 1:
                arguments["compact_valid_to_front"] = compact
                call = stock.triton_filter_and_convert_dcp_index
            else:
                call = stock.triton_convert_req_index_to_global_index
            want = call(request, table, token, **arguments)
            launcher = stock._CONVERT_REQ_INDEX_TO_GLOBAL_INDEX_KERNEL
            stock._CONVERT_REQ_INDEX_TO_GLOBAL_INDEX_KERNEL = ops.TorchLauncher(
                ops.convert_req_index, launcher
            )
            got = call(request, table, token, **arguments)
            stock._CONVERT_REQ_INDEX_TO_GLOBAL_INDEX_KERNEL = launcher
            pairs = zip(got, want, strict=True) if compact else [(got, want)]
            assert all(torch.equal(a, b) for a, b in pairs), (world, rank, interleave, width)


def correct_attn_out():
    import torch

    ops, _ = _stock_and_ours()
    from vllm.v1.attention.ops import dcp as stock

    torch.manual_seed(0)
    for base_e in (True, False):
        out = torch.randn(5, 4, 64).to(torch.bfloat16)
        lses = torch.randn(2, 5, 4) * 3
        lses[0, 0] = float("-inf")
        lses[:, 1] = float("-inf")
        lses[1, 2, 0] = float("nan")
        lses[0, 3, 0] = float("inf")
        for rank in range(2):
            want, want_lse = stock.correct_attn_out(
                out.clone(), lses, rank, None, is_lse_base_on_e=base_e
            )
            got, got_lse = torch.empty_like(out), torch.empty(5, 4)
            ops.correct_attn_out(out, got, lses, got_lse, rank, None, is_base_e=base_e)
            torch.testing.assert_close(got_lse, want_lse, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-2)
            assert (got[1] == 0).all()


def a2a():
    import torch

    ops, _ = _stock_and_ours()
    from vllm.v1.attention.ops import dcp as stock

    torch.manual_seed(0)
    world, tokens, heads, dim = 2, 5, 3, 64
    masks = [
        (None, None),
        (torch.tensor([3, 0], dtype=torch.int32), torch.tensor([0, 2, 4], dtype=torch.int32)),
    ]
    for dtype, columns in ((torch.bfloat16, 2), (torch.float32, 1)):
        out = torch.randn(tokens, world * heads, dim).to(dtype)
        lse = torch.randn(tokens, world * heads)
        for lens, starts in masks:
            buffers = [
                torch.zeros(world, tokens, heads, dim + columns, dtype=dtype) for _ in range(2)
            ]
            for pack, buffer in zip(
                (stock._dcp_a2a_pack_send, ops.a2a_pack_send), buffers, strict=True
            ):
                pack(out, lse.clone(), buffer, world, heads, dim, columns, lens, starts)
            want, got = (b.contiguous().view(torch.uint8) for b in buffers)
            assert torch.equal(got, want)
            for base_e in (True, False):
                want = stock._dcp_a2a_unpack_combine(buffers[0], dim, columns, True, base_e)
                got = ops.a2a_unpack_combine(buffers[0], dim, columns, True, base_e)
                torch.testing.assert_close(got[0], want[0], atol=1e-3, rtol=1e-2)
                torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=1e-5)
                assert not got[0].isnan().any()
            if lens is not None:
                assert (got[0][2:] == 0).all() and (got[1][2:] == float("-inf")).all()


def compressed_slots():
    import torch

    ops, _ = _stock_and_ours()
    from vllm.v1.attention.backends.mla import compressor_utils as stock

    starts = torch.tensor([0, 7, 7, 30], dtype=torch.int32)
    lens = torch.tensor([19, 4, 33], dtype=torch.int32)
    table = torch.randint(1, 50, (3, 4), dtype=torch.int32)
    slots = torch.arange(100, 133, dtype=torch.int64)
    slots[[3, 12]] = -1
    for world, interleave in ((1, 4), (2, 4), (4, 8)):
        arguments = (slots, starts, lens, table, 4, 4, world, interleave)
        want = torch.full((33,), -1, dtype=torch.int64)
        got = want.clone()
        stock._COMPRESSED_SLOT_MAPPING_KERNEL(want, *arguments)
        ops.compressed_slot_mapping(got, *arguments)
        assert torch.equal(got, want), (world, got, want)
        assert (want >= 0).any()


def prefill_chunk():
    import torch

    ops, _ = _stock_and_ours()
    from vllm.v1.attention.backends.mla import indexer as stock

    starts = torch.tensor([0, 5, 17], dtype=torch.int32)
    lens = torch.tensor([21, 30], dtype=torch.int32)
    keys = torch.tensor([0, 5, 12], dtype=torch.int32)
    for first, last in ((0, 17), (3, 9)):
        for rank, world, local in ((0, 1, keys), (0, 2, [0, 3, 7]), (1, 2, [0, 2, 5])):
            local = torch.as_tensor(local, dtype=torch.int32)
            results = []
            for call in (
                stock._BUILD_PREFILL_CHUNK_METADATA_KERNEL,
                ops.build_prefill_chunk_metadata,
            ):
                owner = torch.full((12,), 9, dtype=torch.int32)
                ks, ke = (torch.full((last - first,), 99, dtype=torch.int32) for _ in range(2))
                call(
                    starts, lens, keys, local, owner, ks, ke, first, last, rank, world, 1,
                    num_reqs=2, COMPRESS_RATIO=4,
                )  # fmt: skip
                results.append((owner, ks, ke))
            for want, got in zip(*results, strict=True):
                assert torch.equal(got, want), (rank, world, got, want)


def fwht():
    import torch

    ops, _ = _stock_and_ours()
    from vllm.models.glm5next.nvidia.ops import kpool_compress as stock

    torch.manual_seed(0)
    q = (torch.randn(70, 128) * torch.logspace(-5, 3, 70)[:, None]).to(torch.bfloat16)
    q[0] = 0
    want, got = stock.fwht128_quant_fp8(q), ops.fwht128_quant_fp8(q)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])


def conv_update():
    import torch

    _, kda = _stock_and_ours()
    from vllm.model_executor.layers.mamba.ops import causal_conv1d as stock

    torch.manual_seed(0)
    weight, bias = torch.randn(64, 4), torch.randn(64)
    for accepted in (None, torch.tensor([1, 3, 2], dtype=torch.int32)):
        state = torch.randn(6, 64, 3 if accepted is None else 5)
        slots = torch.tensor([2, 0, 5], dtype=torch.int32)
        x = torch.randn(3, 64) if accepted is None else torch.randn(9, 64)
        arguments = {"bias": bias, "activation": "silu", "conv_state_indices": slots}
        if accepted is not None:
            arguments.update(
                num_accepted_tokens=accepted,
                query_start_loc=torch.tensor([0, 3, 6, 9], dtype=torch.int32),
                max_query_len=3,
            )
        states = [state.clone(), state.clone()]
        want = stock.causal_conv1d_update(x.clone(), states[0], weight, **arguments)
        got = kda.causal_conv1d_update(x.clone(), states[1], weight, **arguments)
        torch.testing.assert_close(states[1], states[0])
        # The request in the null block has no defined output.
        rows = [0, 2] if accepted is None else [0, 1, 2, 6, 7, 8]
        torch.testing.assert_close(got[rows], want[rows], atol=1e-5, rtol=1e-5)


def _call(module, name, x):
    # Looked up at each call: the interpreter swaps the functions while a kernel runs.
    return getattr(module, name)(x)


def recurrent_kda():
    import torch

    _, kda = _stock_and_ours()
    from vllm.models.glm5next.nvidia.ops.third_party.kda import fused_recurrent_kda as stock
    from vllm.triton_utils import tl

    # The interpreter does not see aliases of its builtins made at import.
    module = sys.modules[stock.__module__]
    for name in ("exp", "exp2", "log", "log2"):
        for target in (module, sys.modules.get(module.__package__ + ".fused_recurrent")):
            if target is not None and hasattr(target, name):
                setattr(target, name, functools.partial(_call, tl, name))
    torch.manual_seed(0)
    heads, dim = 2, 64
    for accepted in (None, torch.tensor([1, 2], dtype=torch.int32)):
        step = 1 if accepted is None else 2
        tokens = 2 * step
        q, k, v = (torch.randn(1, tokens, heads, dim).to(torch.bfloat16) for _ in range(3))
        g = torch.randn(1, tokens, heads * dim).to(torch.bfloat16)
        beta = torch.randn(1, tokens, heads).to(torch.bfloat16)
        slots = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
        arguments = {
            "use_qk_l2norm_in_kernel": True,
            "cu_seqlens": torch.tensor([0, step, tokens], dtype=torch.int32),
            "ssm_state_indices": slots[:, 0].contiguous() if accepted is None else slots,
            "num_accepted_tokens": accepted,
            "sigmoid_beta": True,
            "a_log": torch.randn(heads),
            "g_bias": torch.randn(heads * dim),
            "compute_gate": True,
            "lower_bound": -5.0,
        }
        pool = torch.randn(6, heads, dim, dim)
        pools = [pool.clone(), pool.clone()]
        want, _ = stock(q, k, v, g, beta, initial_state=pools[0], **arguments)
        got, _ = kda.fused_recurrent_kda(q, k, v, g, beta, initial_state=pools[1], **arguments)
        torch.testing.assert_close(pools[1], pools[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
        assert not torch.equal(pools[1], pool)


def gather_states():
    import torch

    _, kda = _stock_and_ours()
    state = torch.arange(24.0).view(4, 2, 3)
    got = kda.gather_initial_states(state, torch.tensor([3, 99]), torch.tensor([True, False]))
    assert torch.equal(got[0], state[3]) and (got[1] == 0).all()
    kda.scatter_states(state, got, torch.tensor([0, 3], dtype=torch.int32))
    assert torch.equal(state[0], got[0]) and (state[3] == 0).all()


def qk_norm():
    import torch

    ops, _ = _stock_and_ours()
    import vllm.models.common.ops.fused_qk_rmsnorm as stock

    torch.manual_seed(0)
    # Columns of one projection, so rows are further apart than they are long.
    both = (torch.randn(7, 176) * torch.logspace(-3, 2, 7)[:, None]).to(torch.bfloat16)
    q, kv = both.split((96, 80), 1)
    weights = torch.randn(96).to(torch.bfloat16), torch.randn(80).to(torch.bfloat16)
    want = stock.fused_q_kv_rmsnorm(q, kv, *weights, 1e-5)
    got = [torch.full_like(x, float("nan")) for x in want]
    ops.fused_q_kv_rmsnorm(q, kv, *got, *weights, 1e-5)
    for one, other in zip(got, want, strict=True):
        # Sums in another order: one step of bf16 at most, and rarely.
        torch.testing.assert_close(one, other, atol=0, rtol=2**-7)
        assert (one != other).float().mean() < 0.01


def zero_blocks():
    import torch

    ops, _ = _stock_and_ours()
    from vllm.v1.worker import utils as stock

    results = []
    for kernel in (stock._zero_kv_blocks_kernel, ops.AnyGrid(ops.zero_kv_blocks)):
        caches = [torch.full((6, size), 7, dtype=torch.int32) for size in (40, 24)]
        kernel[3, 2, 3](
            torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.uint64),
            torch.tensor([40, 24]),
            torch.tensor([33, 16]),
            torch.tensor([4, 0, 5]),
            BLOCK_SIZE=16,
        )
        results.append(caches)
    for want, got in zip(*results, strict=True):
        assert torch.equal(got, want) and (got == 0).any()


@pytest.mark.parametrize("name", COMPARISONS)
def test_stand_in_equals_stock_kernel(name):
    # Without our platform: with it, vLLM takes its CPU operators instead of the Triton kernels.
    environment = {**os.environ, **ckv_reference.environment(), "VLLM_CKV_REFERENCE": "0"}
    result = subprocess.run(
        [sys.executable, __file__, name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]


if __name__ == "__main__":
    globals()[sys.argv[1]]()


def test_top_k_and_top_p_are_masked_in_torch():
    """Stock's kernel cannot run in the interpreter, so counts and sums stand for it."""
    import torch

    from vllm.platforms.ckv_reference import declare_torchvision_ops, ops

    declare_torchvision_ops()
    replaced = [(path, name) for path, name, function, _ in ops.REPLACEMENTS]
    assert ("vllm.v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p_triton") in replaced
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    top_k = ops.apply_top_k_top_p(logits.clone(), torch.tensor([1, 7, 50]), None)
    assert top_k.isfinite().sum(1).tolist() == [1, 7, 50]
    kept = ops.apply_top_k_top_p(logits.clone(), None, torch.tensor([0.5, 0.9, 1.0])).isfinite()
    mass = (logits.softmax(1) * kept).sum(1)
    assert (mass >= torch.tensor([0.5, 0.9, 1.0]) - 1e-5).all() and kept[2].all()
    assert kept[0].sum() < kept[1].sum() < 50
