# SPDX-License-Identifier: Apache-2.0
"""The b12x provider on a GPU of compute capability 12.x, against the torch reference.

Written without such a GPU and not run yet: ``benchmarks/qualify_sm120.sh`` runs it. Each test
prints what it measured. The tolerances are a first guess, for kernels that quantise the query to
e4m3 (about 2^-4 relative for an element, which averages out over 512): cosine of every row at least
0.99, log-sum-exp within 0.1. Correct them from the printed numbers.
"""

import math

import pytest
import torch

from vllm.v1.attention.backends.mla.sparse_mla_kernels import torch_reference as ref

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 12:
    pytest.skip("needs a GPU of compute capability 12.x", allow_module_level=True)
pytest.importorskip("b12x")
from vllm.v1.attention.backends.mla.sparse_mla_kernels import b12x as provider

SCALE, PAGE, STRIDE = 256**-0.5, 2304, 2400
CUDA = torch.device("cuda", 0)
SIZES = {
    "head_counts": (16, 64),
    "index_heads": 32,
    "pool_size": 4,
    "topk": 512,
    "width": 2176,
    "dcp_world_size": 4,
    "interleave": 4,
    "page_size": PAGE,
    "scale": SCALE,
}


@pytest.fixture(scope="module", params=[528, 304], ids=["fp8", "nvfp4"])
def kernels(request):
    made = provider.B12xKernels()
    before = torch.cuda.memory_allocated()
    made.warm_up(CUDA, record_bytes=request.param, **SIZES)
    print(f"warm-up keeps {(torch.cuda.memory_allocated() - before) / 2**20:.1f} MiB")
    yield made


@pytest.fixture
def frozen():
    """While it lasts, b12x refuses to prepare or compile."""
    from b12x._lib.runtime_control import kernel_resolution_guard

    with kernel_resolution_guard("a test of serving"):
        yield


def quantize(latents, width):
    return (ref.quantize_records if width == 528 else ref.quantize_nvfp4_records)(latents)


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


def test_records_are_the_references_give_or_take_a_step(kernels, frozen):
    width = kernels.sizes.record_bytes
    latents = (torch.randn(300, 512) * torch.logspace(-3, 3, 300).unsqueeze(1)).bfloat16()
    latents[5] = 0
    storage = torch.full((3, STRIDE * width), 0xAB, dtype=torch.uint8, device=CUDA)
    cache = storage[:, : PAGE * width].unflatten(1, (PAGE, width))
    slots = torch.randperm(3 * PAGE)[:300]
    slots[7], slots[8] = -1, 3 * PAGE
    for dtype in (torch.int32, torch.int64):
        kernels.write_records(latents.cuda(), cache, slots.to(CUDA, dtype))
    rows = [i for i in range(300) if i not in (7, 8)]
    got = cache.flatten(0, 1)[slots[rows].cuda()].cpu()
    want = quantize(latents[rows], width)
    values = ref.dequantize_records(got), ref.dequantize_records(want)
    step = latents[rows].float().abs().amax(1, keepdim=True) / (14 if width == 528 else 5)
    print(f"bytes that differ: {float((got != want).float().mean()):.4%}")
    assert bool(((values[0] - values[1]).abs() <= step).all())
    assert int((storage == 0xAB).sum()) >= storage.numel() - 298 * width


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("rows", [1, 3, 8, 100, 256, 257, 800, 4000])
def test_attention(kernels, frozen, heads, rows):
    width = kernels.sizes.record_bytes
    generator = torch.Generator().manual_seed(rows)
    records = quantize(torch.randn(9000, 512, generator=generator).bfloat16(), width)
    q = torch.randn(rows, heads, 512, generator=generator).bfloat16()
    ids = torch.randint(-1, 9000, (rows, 2176), dtype=torch.int32, generator=generator)
    counts = torch.randint(1, 2052, (rows,), dtype=torch.int32, generator=generator)
    if rows > 2:
        counts[1], ids[2] = 0, -1
    out, lse = kernels.attend(q.cuda(), records.cuda(), ids.cuda(), counts.cuda(), SCALE)
    pick = torch.unique(torch.linspace(0, rows - 1, 12).long())
    want, want_lse = ref.TorchReferenceKernels(torch.float64).attend(
        q[pick], records, ids[pick], counts[pick], SCALE
    )
    out, lse = out[pick.cuda()].cpu().float(), lse[pick.cuda()].cpu()
    empty = torch.isneginf(want_lse)
    assert torch.equal(torch.isneginf(lse), empty) and bool((out[empty] == 0).all())
    cosine = torch.cosine_similarity(out[~empty], want[~empty].float(), dim=-1)
    error = (lse - want_lse)[~empty].abs().max()
    print(f"{rows} rows, {heads} heads: cosine {float(cosine.min()):.6f}, lse {float(error):.5f}")
    assert float(cosine.min()) > 0.99 and float(error) < 0.1


def test_rows_beyond_two_to_the_31_bytes(kernels, frozen):
    width = kernels.sizes.record_bytes
    count = 2**32 // width + 10
    cache = torch.empty(count, width, dtype=torch.uint8, device=CUDA)
    latents = torch.randn(4, 512).bfloat16()
    places = int32([[count - 1, count - 7, 2**31 // width + 3, 5]])
    cache[places[0].long()] = quantize(latents, width).cuda()
    q = torch.randn(1, 16, 512).bfloat16()
    for rows in (1, 300):
        ids = torch.full((rows, 2176), -1, dtype=torch.int32, device=CUDA)
        ids[:, :4] = places
        out, _ = kernels.attend(q.cuda().repeat(rows, 1, 1), cache, ids, int32([4] * rows), SCALE)
        want, _ = ref.TorchReferenceKernels().attend(
            q,
            quantize(latents, width),
            torch.arange(4).int().unsqueeze(0),
            torch.tensor([4]),
            SCALE,
        )
        got = out[-1].cpu().float()
        assert float(torch.cosine_similarity(got, want[0].float(), dim=-1).min()) > 0.99


@pytest.mark.parametrize("gap", [0, 8448 * 5])
@pytest.mark.parametrize("rows", [1, 8, 70, 1100])
def test_selection(kernels, frozen, gap, rows):
    requests, columns = 3, 300
    pages = requests * columns
    generator = torch.Generator().manual_seed(rows)
    storage = torch.zeros(pages, 8448 + gap, dtype=torch.uint8)
    index = storage[:, :8448].unflatten(1, (64, 132))
    keys, scales = ref.index_planes(index)
    random = torch.randn(keys.shape, generator=generator)
    keys.copy_(random.to(torch.float8_e4m3fn).view(torch.uint8))
    scales.copy_(torch.rand(pages, 64, 1, generator=generator).view(torch.uint8))
    table = torch.randperm(pages, generator=generator).int().view(requests, columns)
    req = torch.randint(-1, requests, (rows,), dtype=torch.int32, generator=generator)
    counts = torch.randint(0, columns * 64, (rows,), dtype=torch.int32, generator=generator)
    counts[: rows // 2] = torch.randint(0, 1200, (rows // 2,), generator=generator).int()
    q = torch.randn(rows, 32, 128, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(rows, 32, generator=generator)
    on_gpu = storage.cuda()[:, :8448].unflatten(1, (64, 132))
    arguments = (table, req, counts)
    ids, scores = kernels.select_pools(
        q.cuda(), weights.cuda(), on_gpu, *(a.cuda() for a in arguments), 512
    )
    pick = torch.unique(torch.linspace(0, rows - 1, 12).long())
    want, want_scores = ref.TorchReferenceKernels().select_pools(
        q[pick], weights[pick], index, table, req[pick], counts[pick], 512
    )
    ids, scores = ids[pick.cuda()].cpu(), scores[pick.cuda()].cpu()
    assert torch.equal(ids < 0, want < 0)
    # Sums in fp32 in another order may give the last places to other pools.
    ranked, want_ranked = scores.sort().values, want_scores.sort().values
    torch.testing.assert_close(ranked, want_ranked, rtol=1e-3, atol=1e-2)
    common = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(ids, want, strict=True)]
    wanted = [len(set(b.tolist())) for b in want]
    print(f"{rows} rows: {sum(wanted) - sum(common)} of {sum(wanted)} chosen differently")
    assert sum(common) > 0.99 * sum(wanted)


def test_a_captured_graph_replays(kernels):
    """Decode inside a CUDA graph, with new ids and lengths at every replay.

    Scratch as the engine gives it: at a place of its own inside a larger buffer, the same for every
    replay, and overwritten by others between two.
    """
    width = kernels.sizes.record_bytes
    records = quantize(torch.randn(5000, 512).bfloat16(), width).cuda()
    q = torch.randn(8, 16, 512, device=CUDA).bfloat16()
    ids = torch.zeros(8, 2176, dtype=torch.int32, device=CUDA)
    counts = torch.zeros(8, dtype=torch.int32, device=CUDA)
    (most, _), *_ = shapes = kernels.scratch_shapes(
        max_records=None, max_tokens=8, num_heads=16, width=2176
    )
    workspace = torch.empty(most[0] + 256, dtype=torch.uint8, device=CUDA)
    scratch = [workspace[256:]]
    scratch += [torch.empty(shape, dtype=dtype, device=CUDA) for shape, dtype in shapes[1:]]
    kernels.attend(q, records, ids, counts, SCALE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernels.attend(q, records, ids, counts, SCALE, scratch)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids.copy_(torch.randint(0, 5000, (8, 2176), generator=generator))
        counts.copy_(torch.randint(1, 2052, (8,), generator=generator))
        workspace.fill_(0xFF)
        graph.replay()
        eager, eager_lse = kernels.attend(q, records, ids, counts, SCALE)
        assert torch.equal(out, eager) and torch.equal(lse, eager_lse)
    assert not math.isnan(float(out.float().sum()))
