# SPDX-License-Identifier: Apache-2.0
"""The Triton provider: the suite under the interpreter, and what only a GPU can show."""

import importlib
import os
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vllm.platforms
from vllm.v1.attention.backends.mla import sparse_mla_kernels
from vllm.v1.attention.backends.mla.sparse_mla_kernels import torch_reference as ref

pytest.importorskip("triton")
RECORD, INDEX, PLACES, PAGE_BYTES = 528, 132, 64, 8448
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_suite_passes_under_the_interpreter():
    # A process of its own: Triton reads the variable when it is first imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    suite = Path(__file__).with_name("test_kernels.py")
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    assert "[interpreter" in child.stdout or " passed" in child.stdout


@pytest.mark.parametrize(
    ("cuda", "capability", "expected"),
    [(True, 90, "TritonKernels"), (True, 80, "TritonKernels"), (False, 0, "TorchReferenceKernels")],
)
def test_the_platform_chooses_the_provider(monkeypatch, cuda, capability, expected):
    platform = SimpleNamespace(
        is_cuda=lambda: cuda,
        has_device_capability=lambda wanted: capability >= wanted,
        is_device_capability_family=lambda family: capability // 10 == family // 10,
        get_device_capability=lambda: capability,
    )
    monkeypatch.setattr(vllm.platforms, "current_platform", platform, raising=False)
    choose = sparse_mla_kernels.get_kernels.__wrapped__
    assert type(choose()).__name__ == expected
    if cuda:
        platform.has_device_capability = lambda wanted: wanted <= 75
        with pytest.raises(RuntimeError, match=r"8\.0"):
            choose()


def test_warm_up_threads_work_on_the_callers_stream(monkeypatch):
    """On another one they could read what the caller has not written yet."""
    from vllm.v1.attention.backends.mla.sparse_mla_kernels import triton

    current = threading.local()

    @contextmanager
    def stream(chosen):
        current.stream = chosen
        yield

    cuda = SimpleNamespace(
        current_stream=lambda device: "the caller's",
        stream=stream,
        device=lambda device: nullcontext(),
        device_count=lambda: 2,
    )
    monkeypatch.setattr(triton.torch, "cuda", cuda)
    seen = []

    def task(number):
        seen.append((number, current.stream))

    triton._run_tasks([partial(task, number) for number in range(20)], torch.device("cuda", 1))
    assert sorted(seen) == [(number, "the caller's") for number in range(20)]


@on_gpu
def test_warm_up_threads_read_what_the_caller_wrote_on_a_stream_of_its_own():
    from vllm.v1.attention.backends.mla.sparse_mla_kernels import triton

    found = []
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        written = torch.ones(1 << 20, device="cuda")
        tasks = [lambda: found.append(written.sum())] * 8
        triton._run_tasks(tasks, torch.device("cuda", 0))
    torch.cuda.synchronize()
    assert [int(total) for total in found] == [1 << 20] * 8


@pytest.mark.parametrize(
    ("heads", "record_bytes", "refused"),
    [((), 304, False), ((), RECORD, False), ((16,), RECORD, False), ((16,), 304, True)],
)
def test_only_attention_cares_for_the_record_format(monkeypatch, heads, record_bytes, refused):
    """b12x leaves packing to this provider, and attention over either format to itself."""
    from vllm.v1.attention.backends.mla.sparse_mla_kernels.triton import TritonKernels

    class Went(Exception):
        pass

    def write_records(*arguments):
        raise Went

    monkeypatch.setattr(TritonKernels, "write_records", write_records)
    with pytest.raises(ValueError if refused else Went):
        TritonKernels().warm_up(
            torch.device("cpu"),
            head_counts=heads,
            index_heads=0,
            pool_size=4,
            topk=512,
            width=2176,
            dcp_world_size=2,
            interleave=4,
            record_bytes=record_bytes,
        )


# On a GPU


@pytest.fixture
def kernels():
    torch.manual_seed(0)
    module = importlib.import_module(f"{sparse_mla_kernels.__name__}.triton")
    return module.TritonKernels()


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device="cuda")


SIZES = {
    "head_counts": [16, 32],
    "index_heads": 32,
    "pool_size": 4,
    "topk": 512,
    "width": 2051,
    "dcp_world_size": 2,
    "interleave": 4,
}


@on_gpu
def test_pages_beyond_two_to_the_31_words(kernels):
    page_size, stride, pages = 2304, 2304 * 561, 7000
    assert 6999 * stride > 2**33
    memory = torch.empty(pages * stride, dtype=torch.uint8, device="cuda")
    cache = memory.as_strided((pages, page_size, RECORD), (stride, RECORD, 1))
    latents = torch.randn(3, 512, device="cuda").bfloat16()
    slots = ints([1700 * page_size + 5, 6999 * page_size + 2303, -1], torch.int64)
    kernels.write_records(latents, cache, slots)
    want = ref.quantize_records(latents[:2].cpu())
    assert torch.equal(cache[1700, 5].cpu(), want[0])
    assert torch.equal(cache[6999, 2303].cpu(), want[1])
    out = torch.full((page_size + 6, RECORD), 0x5A, dtype=torch.uint8, device="cuda")
    kernels.pack_records(cache, ints([[6999, 1700]]), ints([page_size + 6]), ints([0]), out)
    assert torch.equal(out[-1].cpu(), want[0]) and torch.equal(out[2303].cpu(), want[1])

    # Attention over flat rows of the same cache, and the rows themselves.
    flat = memory.as_strided((pages * 561 * 2304 // RECORD, RECORD), (RECORD, 1))
    block_rows = stride // RECORD
    tokens = ints([[2303 + page_size * 6999, 5 + page_size * 1700, -1]])
    table = torch.arange(pages, dtype=torch.int32, device="cuda").unsqueeze(0)
    rows, counts = kernels.filter_local(tokens, ints([0]), table, block_rows, page_size, 0, 1, 4)
    assert rows[0].tolist() == [6999 * block_rows + 2303, 1700 * block_rows + 5, -1]
    q = torch.randn(1, 16, 512, device="cuda").bfloat16()
    got, lse = kernels.attend(q, flat, rows, counts, 0.05)
    small = ref.TorchReferenceKernels().attend(
        q.cpu(), want[[1, 0]], torch.tensor([[0, 1]]).int(), torch.tensor([2]).int(), 0.05
    )
    torch.testing.assert_close(got.cpu().float(), small[0].float(), rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(lse.cpu(), small[1], rtol=1e-4, atol=1e-4)

    # Index pages: 7,000 with the same stride, the last two in use.
    index = memory.as_strided((pages, PLACES, INDEX), (stride, INDEX, 1))
    records = torch.randint(0, 120, (128, INDEX), dtype=torch.uint8)
    records[:, 128:] = torch.ones(128, 1).view(torch.uint8)
    for n, page in enumerate((6999, 1701)):
        flat_page = memory[page * stride : page * stride + PAGE_BYTES]
        mine = records[n * PLACES : (n + 1) * PLACES]
        flat_page[:8192] = mine[:, :128].flatten().cuda()
        flat_page[8192:] = mine[:, 128:].flatten().cuda()
    packed = torch.zeros(128, INDEX, dtype=torch.uint8, device="cuda")
    kernels.pack_pools(index, ints([[6999, 1701]]), ints([128]), ints([0]), packed)
    assert torch.equal(packed.cpu(), records)
    q8 = torch.randn(1, 4, 128).to(torch.float8_e4m3fn)
    args = (torch.ones(1, 4), torch.tensor([0]).int(), torch.tensor([128]).int())
    ids, _ = kernels.select_pools(
        q8.cuda(), args[0].cuda(), index, ints([[6999, 1701]]), args[1].cuda(), args[2].cuda(), 16
    )
    pages_cpu = torch.stack([index[6999].cpu(), index[1701].cpu()])
    want_ids, _ = ref.TorchReferenceKernels().select_pools(
        q8, args[0], pages_cpu, torch.tensor([[0, 1]]).int(), args[1], args[2], 16
    )
    assert set(ids[0].tolist()) == set(want_ids[0].tolist())
    k = torch.randn(4, 128, device="cuda").bfloat16()
    kernels.write_pools(
        k,
        k,
        torch.zeros(4, 128, device="cuda"),
        index,
        ints([-1, -1, -1, 6998 * PLACES + 63], torch.int64),
        None,
        ints([-1] * 4, torch.int64),
        ints([0, 1, 2, 3], torch.int64),
        ints([0, 4]),
    )
    want = ref.compress_pools(k.cpu()[None], k.cpu()[None], torch.zeros(4, 128))[0]
    page = memory[6998 * stride : 6998 * stride + PAGE_BYTES].cpu()
    assert torch.equal(page[63 * 128 : 64 * 128], want[:128])
    assert torch.equal(page[-4:], want[128:])


@on_gpu
def test_more_rows_than_a_grid_dimension_holds(kernels):
    rows = 70_001
    tokens = torch.arange(rows, dtype=torch.int32, device="cuda")[:, None] % 1000
    starts = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    req = torch.zeros(rows, dtype=torch.int32, device="cuda")
    got = kernels.remap(tokens, req, starts, 500, 2, 4)
    want = ref.TorchReferenceKernels().remap(tokens.cpu(), req.cpu(), starts.cpu(), 500, 2, 4)
    assert torch.equal(got.cpu(), want)
    records = ref.quantize_records(torch.randn(1000, 512)).cuda()
    q = torch.randn(rows, 4, 512, device="cuda").bfloat16()
    ones = torch.ones(rows, dtype=torch.int32, device="cuda")
    out, _ = kernels.attend(q, records, tokens, ones, 1.0)
    want = ref.dequantize_records(records)[tokens[:, 0].long()]
    torch.testing.assert_close(out.float(), want[:, None].expand_as(out), rtol=2**-7, atol=1e-3)
    cache = torch.zeros(1100, 64, RECORD, dtype=torch.uint8, device="cuda")
    latents = torch.randn(rows, 512, device="cuda").bfloat16()
    kernels.write_records(latents, cache, torch.arange(rows, device="cuda"))
    assert torch.equal(
        cache.view(-1, RECORD)[:rows].cpu()[-500:], ref.quantize_records(latents.cpu()[-500:])
    )


COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm.v1.attention.backends.mla.sparse_mla_kernels import triton as provider

TYPES = {"q": "*bf16", "records": "*u8", "row_ids": "*i32", "counts": "*i32", "scale": "fp32",
         "out": "*bf16", "lse": "*fp32", "partial": "*fp32", "partial_lse": "*fp32"}
kernel = provider._attend_kernel
for capability, native in ((80, False), (90, True), (120, True)):
    for heads, (columns, warps, stages) in provider._ATTEND_TILES.items():
        given = dict(heads=heads, HB=heads, BN=columns, SPLIT=True, NATIVE=native)
        types = {n: "constexpr" if n in given else TYPES.get(n, "i32") for n in kernel.arg_names}
        aligned = {
            (at,): [["tt.divisibility", 16]]
            for at, (name, kind) in enumerate(types.items())
            if kind[0] == "*" and name not in ("row_ids", "counts")
        }
        compiled = triton.compile(
            ASTSource(kernel, types, given, aligned),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": warps, "num_stages": stages},
        )
        ptx = compiled.asm["ptx"]
        pairs = columns * 512 // (warps * 32) // 2  # of one thread
        bytewise = len(re.findall(r"ld\\.shared\\S*\\.[bsu]8\\b", ptx))
        # One for two codes, either way.
        instruction = r"cvt\\.rn\\.f16x2\\.e4m3x2" if native else r"prmt\\.b32"
        converted = len(re.findall(instruction, ptx))
        print(capability, heads, bytewise, converted, pairs)
"""


def test_attention_converts_every_code_once():
    """No warp reads codes byte by byte, or converts those of another: see ``_operand``."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stdout + child.stderr[-3000:]
    lines = [[int(n) for n in line.split()] for line in child.stdout.splitlines()[-6:]]
    assert [line[:2] for line in lines] == [[c, h] for c in (80, 90, 120) for h in (16, 32)]
    for capability, heads, bytewise, converted, pairs in lines:
        assert (bytewise, converted) == (0, pairs), (capability, heads)


@pytest.mark.parametrize("resident", [2, 96, 264, 376])
@pytest.mark.parametrize("programs", [1, 2, 16, 128, 129, 264, 265, 500, 8192])
def test_rows_are_split_so_that_they_end_first(programs, resident):
    from vllm.v1.attention.backends.mla.sparse_mla_kernels.triton import _split_count

    def waves(count):
        """Time, of which a program that owns a whole row takes 1."""
        return -(-programs * count // resident) / count

    for most in (0, 1, 2, 8, 32):
        count = _split_count(programs, resident, most)
        assert 1 <= count <= max(1, most)
        others = {other: waves(other) for other in range(1, max(1, most) + 1)}
        assert waves(count) == min(others.values())
        assert all(others[less] > waves(count) for less in range(1, count))


def test_128_rows_of_32_heads_are_halved_on_an_h200():
    """What was measured: 257 us in one part, 157 in two, 156 + combining in four."""
    from vllm.v1.attention.backends.mla.sparse_mla_kernels import triton

    rows, heads = 128, 32
    fit = triton.PARTIAL_BYTES // (rows * heads * (512 + 1) * 4)
    assert triton._split_count(rows, 2 * 132, fit) == 2


@pytest.mark.parametrize("multiprocessors", [48, 108, 132, 188])
def test_the_warm_up_attends_with_and_without_a_split(monkeypatch, multiprocessors):
    """Whatever the number of heads: serving compiles neither."""
    from vllm.v1.attention.backends.mla.sparse_mla_kernels import triton

    seen = []
    choose = triton._split_count

    def split_count(programs, resident, most):
        count = choose(programs, resident, most)
        seen.append(count > 1)
        return count

    class Launch:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    monkeypatch.setattr(triton, "_split_count", split_count)
    monkeypatch.setattr(triton, "_multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(triton, "_flashmla", lambda: None)
    for name in ("_attend_kernel", "_combine_kernel"):
        monkeypatch.setattr(triton, name, Launch())
    for name in ("write_records", "_pack", "unpack_pools", "write_pools", "select_pools"):
        monkeypatch.setattr(triton.TritonKernels, name, lambda *args, **kwargs: None)
    for name in ("merge_pool_candidates", "expand_pools", "remap", "filter_local"):
        monkeypatch.setattr(triton.TritonKernels, name, lambda *args, **kwargs: None)
    for heads in (1, 4, 8, 16, 24, 32, 64, 128):
        seen.clear()
        triton.TritonKernels().warm_up(torch.device("cpu"), **(SIZES | {"head_counts": (heads,)}))
        assert set(seen) == {False, True}, heads


@on_gpu
@pytest.mark.parametrize("native", [True, False])
def test_attention_knows_every_code(kernels, monkeypatch, native):
    """Converted by the instruction, and by the bits as on compute capability 8.0."""
    module = sys.modules[type(kernels).__module__]
    monkeypatch.setattr(module, "_native_e4m3", lambda: native)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(3)[:512]
    scales = torch.tensor([1.0, 0.25, 3.0, 1e-3]).view(torch.uint8)
    # A row that sees one record returns it.
    records = torch.stack([torch.cat([codes.roll(by), scales]) for by in range(64)]).cuda()
    q = torch.randn(64, 16, 512, device="cuda").bfloat16()
    ids = torch.arange(64, dtype=torch.int32, device="cuda")[:, None].expand(64, 128).contiguous()
    ones = torch.ones(64, dtype=torch.int32, device="cuda")
    out, _ = kernels.attend(q, records, ids, ones, 0.04)
    want = ref.dequantize_records(records.cpu()).bfloat16()
    torch.testing.assert_close(
        out.cpu(), want[:, None].expand(64, 16, 512), rtol=2**-8, atol=2**-9 * 448e-3
    )
    # Keys of the same codes; vLLM's own scorer is out of the way.
    monkeypatch.setattr(module, "_deepgemm", lambda: None)
    page = torch.cat([records[:, :128].flatten(), torch.ones(64, device="cuda").view(torch.uint8)])
    q8 = torch.randn(5, 32, 128, device="cuda").to(torch.float8_e4m3fn)
    weights, zero = torch.rand(5, 32, device="cuda"), ints([0] * 5)
    given = (q8, weights, page[None], ints([[0]]), zero, ints([1, 7, 33, 63, 64]), 64)
    ids, scores = kernels.select_pools(*given)
    want_ids, want_scores = ref.TorchReferenceKernels().select_pools(
        *(part.cpu() if isinstance(part, torch.Tensor) else part for part in given)
    )
    assert torch.equal(ids.cpu(), want_ids)
    torch.testing.assert_close(scores.cpu(), want_scores, rtol=2e-3, atol=1e-2)


@on_gpu
def test_a_hundred_runs_give_the_same_bits(kernels):
    rows, pools, heads = 600, 5000, 32
    records = torch.randint(0, 120, (-(-pools // PLACES), PAGE_BYTES), dtype=torch.uint8)
    records[:, 8192:] = torch.ones(records.shape[0], PLACES).view(torch.uint8)
    # Every key occurs many times: equal scores, whose order must not depend on timing.
    records[20:] = records[:1]
    pages = records.cuda()
    q8 = torch.randn(rows, heads, 128, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.rand(rows, heads, device="cuda")
    table = torch.arange(pages.shape[0], dtype=torch.int32, device="cuda").unsqueeze(0)
    req = torch.zeros(rows, dtype=torch.int32, device="cuda")
    counts = torch.randint(600, pools, (rows,), dtype=torch.int32, device="cuda")
    latents = ref.quantize_records(torch.randn(20_003, 512)).cuda()
    q = torch.randn(rows, 32, 512, device="cuda").bfloat16()
    scratch = [
        torch.empty(shape, dtype=dtype, device="cuda")
        for shape, dtype in kernels.scratch_shapes(
            max_records=20_003, max_tokens=rows, num_heads=32, width=2051
        )
    ]
    positions = counts.long() * 4 + 3
    first = None
    for _ in range(100):
        ids, scores = kernels.select_pools(q8, weights, pages, table, req, counts, 512)
        merged, _ = kernels.merge_pool_candidates(scores, ids, 512)
        tokens = kernels.expand_pools(ids, positions, 4, 2051)
        kept, lengths = kernels.filter_local(tokens, req, table, 100, 64 * 100, 1, 2, 4)
        results = [ids, scores, merged, tokens, kept, lengths]
        results += kernels.attend(q, latents, tokens, lengths, 0.04)
        results += kernels.attend(q[:3], latents, tokens[:3], lengths[:3], 0.04)
        results += kernels.attend(q, latents, tokens, lengths, 0.04, scratch=scratch)
        if first is None:
            first = results
            # All candidates fit.
            assert torch.equal(merged, ids)
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


@on_gpu
def test_serving_neither_compiles_nor_waits_nor_allocates_much(kernels):
    module = sys.modules[type(kernels).__module__]
    device = torch.device("cuda", torch.cuda.current_device())
    kernels.warm_up(device, **SIZES)
    functions = [f for f in vars(module).values() if hasattr(f, "device_caches")]

    def compiled():
        return sum(len(cache[0]) for f in functions for cache in f.device_caches.values())

    before = compiled()
    assert before > 20
    world, heads = 2, 32
    for tokens, context, requests in ((1, 100, 1), (3, 4097, 2), (777, 9001, 5), (1500, 40_003, 3)):
        pools = context // 4
        ipages = -(-pools // PLACES)
        table = torch.arange(requests * ipages, dtype=torch.int32, device=device).view(requests, -1)
        pages = torch.zeros(requests * ipages, PLACES, INDEX, dtype=torch.uint8, device=device)
        cache = torch.zeros(-(-context // 64) + 1, 64, RECORD, dtype=torch.uint8, device=device)
        blocks = torch.zeros(requests, cache.shape[0], dtype=torch.int32, device=device)
        lens = torch.full((world, requests), 7, dtype=torch.int32, device=device)
        starts = (lens.cumsum(1) - lens).int()
        padded = 7 * requests
        req = torch.arange(tokens, device=device).int() % requests
        positions = torch.full((tokens,), context - 1, device=device)
        bounds = torch.arange(requests + 1, dtype=torch.int32, device=device)
        counts = torch.full((tokens,), pools, dtype=torch.int32, device=device)
        k = torch.randn(tokens, 128, device=device).bfloat16()
        ape = torch.zeros(4, 128, device=device)
        tail = torch.zeros(requests, 2, 4, 128, dtype=torch.bfloat16, device=device)
        slots = torch.arange(tokens, device=device)
        q8 = torch.zeros(tokens, 32, 128, device=device).to(torch.float8_e4m3fn)
        weights = torch.rand(tokens, 32, device=device)
        q = torch.randn(tokens, heads, 512, device=device).bfloat16()
        latents = torch.randn(tokens, 512, device=device).bfloat16()
        send = torch.zeros(world * padded, RECORD, dtype=torch.uint8, device=device)
        isend = torch.zeros(world * padded, INDEX, dtype=torch.uint8, device=device)
        laid = torch.zeros(requests, PAGE_BYTES, dtype=torch.uint8, device=device)
        page_starts = torch.arange(requests, dtype=torch.int32, device=device)
        scratch = [
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in kernels.scratch_shapes(
                max_records=50_000, max_tokens=2000, num_heads=heads, width=2051
            )
        ]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            kernels.write_records(latents, cache, slots % 64)
            kernels.write_pools(k, k, ape, pages, slots, tail, slots % 4, positions, bounds)
            kernels.pack_records(cache, blocks, lens[1], starts[1], send[padded:])
            kernels.pack_pools(pages, table, lens[1], starts[1], isend[padded:])
            kernels.unpack_pools(isend, starts, lens[0] * 2, 1, laid, page_starts)
            ids, scores = kernels.select_pools(q8, weights, pages, table, req, counts, 512)
            kernels.merge_pool_candidates(scores.repeat(1, 2), torch.cat([ids, -1 - ids], 1), 512)
            chosen = kernels.expand_pools(ids, positions, 4, 2051)
            kernels.filter_local(chosen, req, blocks, 64, 64, 1, world, 4)
            rows = kernels.remap(chosen, req, starts, padded, world, 4, counts=counts)
            for given in (None, scratch):
                kernels.attend(q, cache.flatten(0, 1), rows, counts, 0.04, scratch=given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results = tokens * (2051 * 4 * 4 + 512 * 4 * 12 + 2 * heads * (512 * 2 + 4 * 4) + 64)
        # DeepGEMM's scores are the only large tensor; their bound is fixed.
        scores = module._DEEPGEMM_BYTES if module._deepgemm() else 0
        assert torch.cuda.max_memory_allocated() - held < results + scores + (1 << 20)
    assert compiled() == before
