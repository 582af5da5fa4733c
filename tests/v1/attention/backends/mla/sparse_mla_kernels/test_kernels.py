# SPDX-License-Identifier: Apache-2.0
"""Every provider against independent, per-element Python and fp64 computations.

Copies are compared byte for byte, selections in order, attention with an absolute, a relative and
a cosine tolerance. Memory a provider allocates for its results is poisoned.
"""

import importlib.util
import math
import mmap
import sys
from pathlib import Path

import pytest
import torch

from vllm.v1.attention.backends.mla.sparse_mla_kernels import SparseMLAKernels
from vllm.v1.attention.backends.mla.sparse_mla_kernels import scratch as scratch_sizes
from vllm.v1.attention.backends.mla.sparse_mla_kernels import torch_reference as ref
from vllm.v1.attention.backends.mla.sparse_mla_kernels.base import PoolPlaces

# The test folders are no packages; a name of our own keeps the module apart from others.
_SPEC = importlib.util.spec_from_file_location(
    "sparse_mla_kernel_providers", Path(__file__).with_name("providers.py")
)
providers = sys.modules.setdefault(_SPEC.name, importlib.util.module_from_spec(_SPEC))
_SPEC.loader.exec_module(providers)
pick = providers.pick

RECORD, INDEX, PLACES, PAGE_BYTES = 528, 132, 64, 8448
POISON = 0x7FFFFFFF
MAP_NORESERVE = 0x4000  # Python names it from 3.13 on


@pytest.fixture(params=providers.names())
def kernels(request):
    torch.manual_seed(0)
    # Fills fresh tensors with NaN or the largest integer, so that what is left unwritten shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield providers.make(request.param)
    torch.use_deterministic_algorithms(False)


def kernels_are_exact(kernels):
    """Whether scores come from products and sums in at least fp32."""
    return not isinstance(kernels, providers.OnDevice)


def reference_only(kernels):
    if not isinstance(kernels, ref.TorchReferenceKernels):
        pytest.skip("a value on the device: only the reference reads it on the host")


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def local_length(length, rank, world, interleave):
    return sum(1 for t in range(length) if t // interleave % world == rank)


def layout(lengths, world, interleave):
    """Local lengths and starts [N, R], and the padded span, counted token by token."""
    lens = torch.tensor(
        [[local_length(n, k, world, interleave) for n in lengths] for k in range(world)]
    )
    starts = lens.cumsum(1) - lens
    return lens.int(), starts.int(), int(lens.sum(1).max())


def strided_pages(pages, inner, gap, fill):
    """[pages, *inner] uint8 whose page stride is larger than a page; the gap holds ``fill`` too."""
    size = math.prod(inner)
    return torch.full((pages, size + gap), fill, dtype=torch.uint8)[:, :size].unflatten(1, inner)


def test_satisfies_the_protocol(kernels):
    assert isinstance(getattr(kernels, "kernels", kernels), SparseMLAKernels)


# Records


def test_record_bytes_and_round_trip():
    latents = torch.zeros(2, 512, dtype=torch.bfloat16)
    latents[0, 0], latents[0, 1] = 448.0, -1.0
    latents[0, 128] = 896.0
    latents[0, 384:] = 0.001
    record = ref.quantize_records(latents)
    assert record.shape == (2, RECORD)
    scales = record[:, 512:].contiguous().view(torch.float32)
    assert scales[0, :3].tolist() == [1.0, 2.0, 1.0]
    assert scales[1].tolist() == [1.0] * 4
    assert record[0, 0] == 0x7E and record[0, 1] == 0xB8 and record[0, 128] == 0x7E
    back = ref.dequantize_records(record)
    assert back[0, 0] == 448 and back[0, 1] == -1 and back[0, 128] == 896
    assert torch.equal(back[1], torch.zeros(512))
    torch.testing.assert_close(back[0, 384:], latents[0, 384:].float())


def test_round_trip_error_is_half_a_step():
    latents = (torch.randn(64, 512) * torch.logspace(-30, 4, 64).unsqueeze(1)).bfloat16()
    back = ref.dequantize_records(ref.quantize_records(latents))
    amax = latents.float().unflatten(1, (4, 128)).abs().amax(2, keepdim=True).expand(-1, -1, 128)
    bound = torch.maximum(latents.float().abs() / 16, amax.flatten(1) / 448 * 2**-10)
    assert bool(((back - latents.float()).abs() <= bound * 1.0001).all())


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_write_skips_negative_slots_and_touches_nothing_else(kernels, slot_dtype):
    cache = strided_pages(3, (64, RECORD), 512, 0xAB)
    latents = torch.randn(5, 512).bfloat16()
    kernels.write_records(latents, cache, torch.tensor([-1, 130, 5, -1, -7], dtype=slot_dtype))
    expected = torch.full((3, 64, RECORD), 0xAB, dtype=torch.uint8)
    records = ref.quantize_records(latents)
    expected[2, 2], expected[0, 5] = records[1], records[2]
    assert torch.equal(cache, expected)


def test_wrong_width_or_stride_names_both_sides(kernels):
    latents, slots = torch.zeros(1, 512).bfloat16(), torch.zeros(1).long()
    for width in (352, 656):
        with pytest.raises(ValueError, match=f"{width}.*528"):
            kernels.write_records(latents, torch.zeros(1, 64, width).byte(), slots)
    inner2 = torch.zeros(1, 64, 2 * RECORD).byte()[:, :, ::2]
    with pytest.raises(ValueError, match=r"\(1056, 2\).*\(528, 1\)"):
        kernels.write_records(latents, inner2, slots)
    with pytest.raises(ValueError, match=r"131.*132"):
        kernels.pack_pools(
            torch.zeros(1, 64, 132).byte(),
            int32([[0]]),
            int32([1]),
            int32([0]),
            torch.zeros(1, 131).byte(),
        )


def test_pack_records_over_strided_pages_and_a_high_page_id(kernels):
    if isinstance(kernels, providers.OnDevice):
        pytest.skip("allocates on the device itself in test_triton.py")
    page_size, stride = 2304, 2304 * 561
    # Page 6,699 begins beyond 2^31 words of 4 bytes. Memory that is not touched costs nothing.
    pages = 6700
    memory = mmap.mmap(
        -1, pages * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    )
    cache = torch.frombuffer(memory, dtype=torch.uint8).as_strided(
        (pages, page_size, RECORD), (stride, RECORD, 1)
    )
    content = torch.randint(0, 256, (2, page_size, RECORD), dtype=torch.uint8)
    cache[6699], cache[3] = content[0], content[1]
    out = torch.full((page_size + 20, RECORD), 0x5A, dtype=torch.uint8)
    kernels.pack_records(
        cache,
        int32([[6699, 3], [POISON, POISON], [3, POISON]]),
        int32([page_size + 7, 0, 5]),
        int32([0, page_size + 7, page_size + 9]),
        out,
    )
    expected = torch.full_like(out, 0x5A)
    expected[:page_size], expected[page_size : page_size + 7] = content[0], content[1, :7]
    expected[page_size + 9 : page_size + 14] = content[1, :5]
    assert torch.equal(out, expected)


def test_pack_refuses_more_rows_than_the_span_holds(kernels):
    reference_only(kernels)
    with pytest.raises(ValueError, match=r"9 rows.*holds 8"):
        kernels.pack_records(
            torch.zeros(1, 64, RECORD).byte(),
            int32([[0]]),
            int32([5]),
            int32([4]),
            torch.zeros(8, RECORD).byte(),
        )


# Pools


def run_chunks(
    kernels,
    requests,
    batches,
    ape,
    places=lambda batch: None,
    *,
    ring=4,
    world=1,
    rank=0,
    interleave=4,
):
    """Write pools of ``requests`` (list of (k, gate)) batch by batch.

    ``batches``: list of lists of (request, begin, end). ``places``: what a batch's pools go to
    besides. Returns the index cache; request r owns index pages 3r+1 .. 3r+3 and tail block 2r+1.
    """
    pool = ape.shape[0]
    cache = strided_pages(3 * len(requests) + 1, (PLACES, INDEX), 256, 0xEE)
    tail = torch.full((2 * len(requests), 2, ring, 128), math.nan, dtype=torch.bfloat16)
    for batch in batches:
        pad = 2
        spans = [(r, t) for r, begin, end in batch for t in range(begin, end)]
        k = torch.cat(
            [requests[r][0][b:e] for r, b, e in batch] + [torch.full((pad, 128), 9.0).bfloat16()]
        )
        gate = torch.cat(
            [requests[r][1][b:e] for r, b, e in batch] + [torch.full((pad, 128), 9.0).bfloat16()]
        )
        slots = []
        for r, t in spans:
            g = t // pool
            owner = t // interleave % world == rank
            local = t // (interleave * world) * (interleave // pool) + t % interleave // pool
            assert world > 1 or local == g
            slots.append((3 * r + 1) * PLACES + local if owner and t % pool == pool - 1 else -1)
        tails = [(2 * r + 1) * ring + t % ring for r, t in spans]
        starts = [0]
        for _, begin, end in batch:
            starts.append(starts[-1] + end - begin)
        # The padding rows claim a slot: they must not be believed.
        kernels.write_pools(
            k,
            gate,
            ape,
            cache,
            torch.tensor([*slots, 0, 1]),
            tail,
            torch.tensor([*tails, 0, 1]),
            torch.tensor([t for _, t in spans] + [3, 3]),
            int32(starts),
            places(batch),
        )
    return cache


def random_requests(lengths, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 128, generator=g).bfloat16(),
            (2 * torch.randn(n, 128, generator=g)).bfloat16(),
        )
        for n in lengths
    ], torch.randn(4, 128, generator=g)


def test_pool_formula_against_fp64():
    (request,), ape = random_requests([4 * 50])
    k, gate = (x.unflatten(0, (50, 4)) for x in request)
    records = ref.compress_pools(k, gate, ape)
    weights = (gate.double() + ape.double()).softmax(dim=1)
    pooled = (weights * k.double()).sum(1)
    signs = torch.tensor(
        [[(-1.0) ** bin(i & j).count("1") for j in range(128)] for i in range(128)],
        dtype=torch.float64,
    )
    exact = pooled @ signs / math.sqrt(128)
    scale = records[:, 128:].contiguous().view(torch.float32).double()
    # A power of two, the smallest one that holds the amax, give or take two bf16 roundings.
    amax = exact.abs().amax(1, keepdim=True)
    low, high = (torch.ceil(torch.log2(amax * f / 448)) for f in (0.99, 1.01))
    assert torch.equal(scale.log2(), scale.log2().round())
    assert bool(((scale.log2() >= low) & (scale.log2() <= high)).all())
    assert bool((low == high).sum() > 40)
    got = records[:, :128].contiguous().view(torch.float8_e4m3fn).double() * scale
    error = (got - exact).abs()
    assert bool(
        (error <= exact.abs() / 16 + scale * 2**-9 + exact.abs().amax(1, keepdim=True) / 64).all()
    )
    assert error.mean() < exact.abs().mean() / 30


def test_pool_scale_stays_at_an_exact_power_of_two():
    # (19.75 + 0.049) / sqrt(128) rounds to the bf16 1.75 = 448 / 256.
    k = torch.zeros(1, 4, 128)
    k[..., 0], k[..., 1] = 19.75, 0.049
    record = ref.compress_pools(k.bfloat16(), torch.zeros_like(k).bfloat16(), torch.zeros(4, 128))
    assert record[0, 128:].view(torch.float32).item() == 2.0**-8
    assert record[0, 0] == 0x7E


CUTS = {
    "cut at 10": [[(0, 0, 10)], [(0, 10, 37)]],
    "cut inside one pool twice": [[(0, 0, 9)], [(0, 9, 10)], [(0, 10, 11)], [(0, 11, 37)]],
    "single tokens": [[(0, t, t + 1)] for t in range(37)],
    "whole pools": [[(0, 0, 8)], [(0, 8, 36)], [(0, 36, 37)]],
}


@pytest.mark.parametrize("ring", pick([4, 8], [8]))
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_any_cut_gives_the_bytes_of_the_uncut_run(kernels, cuts, ring):
    requests, ape = random_requests([37])
    whole = run_chunks(kernels, requests, [[(0, 0, 37)]], ape, ring=ring)
    assert torch.equal(run_chunks(kernels, requests, cuts, ape, ring=ring), whole)
    written = (whole.flatten(1)[1, : 9 * 128] != 0xEE).any()
    assert bool(written) and bool((whole[0] == 0xEE).all())


def test_packed_requests_do_not_mix(kernels):
    requests, ape = random_requests([37, 30, 3])
    whole = run_chunks(kernels, requests, [[(0, 0, 37)], [(1, 0, 30)], [(2, 0, 3)]], ape)
    packed = run_chunks(
        kernels,
        requests,
        [[(1, 0, 7), (0, 0, 10)], [(2, 0, 2), (1, 7, 29), (0, 10, 37)], [(1, 29, 30), (2, 2, 3)]],
        ape,
    )
    assert torch.equal(packed, whole)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_every_rank_has_the_pools_that_end_in_its_batch(kernels, rank, first):
    """Beside its own ones in its cache, in global order; not those of requests in front."""
    requests, ape = random_requests([37, 261, 3])
    batches = [
        [(1, 0, 7), (0, 0, 10)],
        [(2, 0, 2), (1, 7, 259), (0, 10, 37)],
        [(1, 259, 261), (2, 2, 3)],
    ]
    whole = run_chunks(kernels, requests, [[(0, 0, 37)], [(1, 0, 261)], [(2, 0, 3)]], ape)
    gathered = strided_pages(9, (PLACES, INDEX), 256, 0xEE)

    def places(batch):
        starts = int32([3 * r + 1 for r, _, _ in batch[first:]])
        return PoolPlaces(gathered, starts, first)

    sharded = {"world": 2, "rank": rank}
    own = run_chunks(kernels, requests, batches, ape, **sharded)
    assert torch.equal(run_chunks(kernels, requests, batches, ape, places, **sharded), own)
    for (r, begin, end), *_ in batches[: first * len(batches)]:
        for pool in range(begin // 4, end // 4):
            for plane in ref.index_planes(whole):
                plane[3 * r + 1 + pool // PLACES, pool % PLACES] = 0xEE
    assert torch.equal(gathered, whole[:9])


def test_pool_257_lands_in_page_4_place_1(kernels):
    requests, ape = random_requests([1032])
    begins = pick([0, 1028], [1000, 1028])
    cache = torch.full((6, PLACES, INDEX), 0xEE, dtype=torch.uint8)
    tail = torch.zeros(1, 2, 4, 128, dtype=torch.bfloat16)
    for begin, end in zip(begins, [1028, 1032], strict=True):
        t = torch.arange(begin, end)
        slots = torch.where(t % 4 == 3, t // 4, -1)
        kernels.write_pools(
            requests[0][0][begin:end],
            requests[0][1][begin:end],
            ape,
            cache,
            slots,
            tail,
            t % 4,
            t,
            int32([0, end - begin]),
        )
    record = ref.compress_pools(requests[0][0][None, 1028:], requests[0][1][None, 1028:], ape)[0]
    page = cache[4].flatten()
    assert torch.equal(page[128:256], record[:128])
    assert torch.equal(page[8192 + 4 : 8192 + 8], record[128:])
    assert bool((page[256:8192] == 0xEE).all()) and bool((page[8200:] == 0xEE).all())


def test_a_pool_without_its_beginning_is_an_error(kernels):
    reference_only(kernels)
    requests, ape = random_requests([4])
    args = (ape, torch.zeros(1, PLACES, INDEX).byte(), torch.tensor([-1, 0]))
    rest = (torch.tensor([2, 3]), torch.tensor([2, 3]), int32([0, 2]))
    with pytest.raises(ValueError, match="no tail"):
        kernels.write_pools(requests[0][0][2:], requests[0][1][2:], *args, None, *rest)
    with pytest.raises(ValueError, match="does not end a pool"):
        kernels.write_pools(
            requests[0][0][2:], requests[0][1][2:], ape, args[1], torch.tensor([0, -1]), None, *rest
        )


@pytest.mark.parametrize(
    ("world", "interleave"),
    pick([(n, i) for n in (2, 3, 4) for i in (4, 8, 64)], [(2, 8), (3, 4)]),
)
def test_gathered_pools_equal_the_single_rank_cache(kernels, world, interleave):
    lengths = pick([37, 530, 3, 256], [9, 270, 3, 16])
    requests, ape = random_requests(lengths)
    pools = [n // 4 for n in lengths]
    batch = [[(r, 0, n) for r, n in enumerate(lengths)]]
    single = run_chunks(kernels, requests, batch, ape)
    pages = [-(-n // PLACES) for n in pools]
    table = int32([[3 * r + 1 + b for b in range(3)] for r in range(len(lengths))])

    lens, starts, padded = layout(pools, world, interleave // 4)
    gathered = torch.full((world * padded, INDEX), 0x77, dtype=torch.uint8)
    for rank in range(world):
        cache = run_chunks(
            kernels, requests, batch, ape, world=world, rank=rank, interleave=interleave
        )
        span = gathered[rank * padded : (rank + 1) * padded]
        kernels.pack_pools(cache, table, lens[rank], starts[rank], span)
    out = torch.full((sum(pages), PAGE_BYTES), 0xEE, dtype=torch.uint8)
    page_starts = int32([sum(pages[:r]) for r in range(len(pages))])
    kernels.unpack_pools(gathered, starts, int32(pools), interleave // 4, out, page_starts)
    expected = torch.cat([single[3 * r + 1 : 3 * r + 1 + n] for r, n in enumerate(pages)])
    assert torch.equal(out, expected.flatten(1))


# Selection


def random_index(pools, seed=3):
    """Planar pages of one request, with ties: every key occurs twice."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(pools, 128, generator=g)
    keys[pools // 2 : pools // 2 * 2] = keys[: pools // 2]
    records = torch.cat(
        [
            keys.to(torch.float8_e4m3fn).view(torch.uint8),
            torch.full((pools, 1), 0.5).view(torch.uint8),
        ],
        1,
    )
    return records


def planar(records):
    pages = torch.zeros(-(-records.shape[0] // PLACES), PAGE_BYTES, dtype=torch.uint8)
    for p in range(records.shape[0]):
        page, place = divmod(p, PLACES)
        pages[page, place * 128 : place * 128 + 128] = records[p, :128]
        pages[page, 8192 + place * 4 : 8196 + place * 4] = records[p, 128:]
    return pages


def queries(rows, heads=4, seed=5):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads, 128, generator=g).to(torch.float8_e4m3fn)
    return q, torch.randn(rows, heads, generator=g)


def test_selection_against_fp64_with_ties_and_short_rows(kernels):
    records, (q, w) = random_index(200), queries(6)
    counts, topk = [200, 17, 16, 0, 150, POISON], 16
    req = int32([0, 0, 0, 0, 0, -1])
    ids, scores = kernels.select_pools(
        q, w, planar(records), int32([[0, 1, 2, 3]]), req, int32(counts), topk
    )
    key = records[:, :128].contiguous().view(torch.float8_e4m3fn).double()
    exact = (torch.einsum("thd,pd->thp", q.double(), key).relu() * w.double().unsqueeze(2)).sum(
        1
    ) / 2
    for row in (0, 1, 4):
        ranked = sorted(range(counts[row]), key=lambda p: (-float(exact[row, p].float()), p))[:topk]
        # Matrix units keep about 13 bits of a sum of e4m3 products.
        tolerance = (1e-5 if kernels_are_exact(kernels) else 1e-3) * float(exact.abs().max())
        chosen = ids[row].long()
        assert bool((chosen[1:] > chosen[:-1]).all())
        assert float(exact[row, chosen].min() - exact[row, ranked[-1]]) >= -tolerance
        torch.testing.assert_close(scores[row].double(), exact[row, chosen], rtol=0, atol=tolerance)
        if kernels_are_exact(kernels):
            assert ids[row].tolist() == sorted(ranked)
    assert ids[2].tolist() == list(range(16))
    for row in (3, 5):
        assert ids[row].tolist() == [-1] * topk and bool((scores[row] == -math.inf).all())


def test_case_9_masked_rows_beside_a_long_prompt(kernels):
    """A 2-token prompt has no pool, a prompt of 30,000 tokens has 7,500."""
    pools, topk = 7500, 16
    (q, w), pages = queries(4), -(-pools // PLACES)
    table = torch.stack([torch.full((pages,), POISON), torch.arange(pages)]).int()
    counts, req = int32([0, 0, pools, pools - 1]), int32([0, 0, 1, 1])
    ids, scores = kernels.select_pools(q, w, planar(random_index(pools)), table, req, counts, topk)
    assert bool((ids[:2] == -1).all()) and bool((scores[:2] == -math.inf).all())
    for row in (2, 3):
        assert ids[row].unique().numel() == topk
        assert int(ids[row].min()) >= 0 and int(ids[row].max()) < int(counts[row])
    records = ref.quantize_records(torch.randn(40, 512))
    rows = torch.arange(16).int().repeat(4, 1)
    rows[:2] = -1
    query = torch.randn(4, 2, 512).bfloat16()
    out, lse = kernels.attend(query, records, rows, int32([0, 0, 16, 3]), 512**-0.5)
    assert bool((out[:2] == 0).all()) and bool((lse[:2] == -math.inf).all())
    assert bool((out[2:] != 0).any(-1).all()) and bool(lse[2:].isfinite().all())


@pytest.mark.parametrize("world", [2, 4])
def test_ordinary_merge_equals_the_single_rank_selection(kernels, world):
    pools, interleave, topk = 300, 2, 32
    records, (q, w) = random_index(pools), queries(9)
    counts = int32([300, 299, 33, 32, 31, 1, 0, 130, 64])
    req = torch.zeros(9, dtype=torch.int32)
    expected, expected_scores = kernels.select_pools(
        q, w, planar(records), int32([[0, 1, 2, 3, 4]]), req, counts, topk
    )
    all_scores, all_ids = [], []
    for rank in range(world):
        mine = [p for p in range(pools) if p // interleave % world == rank]
        local = int32([sum(p < n for p in mine) for n in counts.tolist()])
        ids, scores = kernels.select_pools(
            q, w, planar(records[mine]), int32([[0, 1, 2]]), req, local, topk
        )
        lookup = torch.tensor([*mine, -1], dtype=torch.int32)
        all_ids.append(lookup[ids.long()])
        all_scores.append(scores)
    merged, scores = kernels.merge_pool_candidates(
        torch.cat(all_scores, 1), torch.cat(all_ids, 1), topk
    )
    assert torch.equal(merged, expected)
    assert torch.equal(scores, expected_scores)


def integer_index(pools, heads, rows, seed):
    """Keys, queries and weights of small integers: scores are exact, so ties are many and exact."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randint(-1, 2, (pools, 128), generator=g).float()
    scales = 2.0 ** torch.randint(-1, 1, (pools, 1), generator=g)
    records = torch.cat(
        [keys.to(torch.float8_e4m3fn).view(torch.uint8), scales.view(torch.uint8)], 1
    )
    q = torch.randint(-2, 3, (rows, heads, 128), generator=g).float().to(torch.float8_e4m3fn)
    return records, q, torch.randint(-2, 3, (rows, heads), generator=g).float()


@pytest.mark.parametrize(
    ("pools", "topk"),
    # The widest choice takes three passes from fewer pools than any other.
    pick(
        [(9000, 512), (2100, 100), (70000, 512), (17000, 2100)],
        [(9000, 512), (2100, 100), (17000, 2100)],
    ),
)
def test_long_rows_with_exact_ties_are_selected_as_by_the_reference(kernels, pools, topk):
    records, q, w = integer_index(pools, 2, 5, pools)
    counts = int32([pools, pools - 1, topk + 1, topk, min(pools, 8192)])
    args = (planar(records), torch.arange(-(-pools // PLACES)).int().unsqueeze(0))
    req = torch.zeros(5, dtype=torch.int32)
    ids, scores = kernels.select_pools(q, w, *args, req, counts, topk)
    want_ids, want_scores = ref.TorchReferenceKernels().select_pools(q, w, *args, req, counts, topk)
    assert torch.equal(ids, want_ids) and torch.equal(scores, want_scores)


@pytest.mark.skipif(not providers.INTERPRETED, reason="of the Triton kernels, on CPU tensors")
def test_rows_whose_candidates_do_not_fit_at_once(kernels, monkeypatch):
    # Two rows of two blocks at a time.
    module = sys.modules[type(kernels).__module__]
    monkeypatch.setattr(module, "CANDIDATE_BYTES", 40 << 10)
    records, q, w = integer_index(9000, 2, 5, 1)
    table, req = torch.arange(141).int().unsqueeze(0), torch.zeros(5, dtype=torch.int32)
    args = (q, w, planar(records), table, req, int32([9000, 600, 8999, 300, 8193]), 512)
    got = type(kernels)().select_pools(*args)
    want = ref.TorchReferenceKernels().select_pools(*args)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.skipif(providers.INTERPRETED, reason="long")
@pytest.mark.parametrize(("heads", "topk"), [(32, 512), (64, 512), (32, 64)])
def test_many_rows_of_many_requests(kernels, heads, topk):
    """Enough rows for DeepGEMM, where there is one; the table's unused entries are no pages."""
    rows, requests = 700, 3
    records, q, w = integer_index(40 * PLACES, heads, rows, heads)
    w[:, 2:] = 0  # two heads: so few different scores that the last place is always contested
    table = torch.full((requests, 20), POISON, dtype=torch.int32)
    counts = torch.zeros(rows, dtype=torch.int32)
    order = torch.randperm(40).int()
    begin = 0
    req = torch.arange(rows).int() * requests // rows
    for r, pages in enumerate((20, 1, 19)):
        table[r, :pages] = order[begin : begin + pages]
        begin += pages
        mine = req == r
        counts[mine] = torch.randint(0, pages * PLACES + 1, (int(mine.sum()),)).int()
    req[::50] = -1
    counts[::50] = POISON
    args = (q, w, planar(records), table, req, counts, topk)
    got = kernels.select_pools(*args)
    want = ref.TorchReferenceKernels().select_pools(*args)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("heads", pick([4, 5, 16, 32, 64], [5, 32]))
@pytest.mark.parametrize("rows", [3, 11])
def test_rows_of_several_requests_in_one_tile(kernels, heads, rows):
    pools, topk, gap = 500, 32, 64
    records, q, w = integer_index(pools, heads, rows, heads)
    pages = planar(records)
    strided = torch.full((pages.shape[0], PAGE_BYTES + gap), 0x7F, dtype=torch.uint8)
    strided[:, :PAGE_BYTES] = pages
    strided = strided[:, :PAGE_BYTES].unflatten(1, (PLACES, INDEX))
    table = torch.full((3, 9), POISON, dtype=torch.int32)
    order = torch.randperm(8).int()
    for r, n in enumerate((4, 8, 1)):
        table[r, :n] = order.roll(r)[:n]
    req = int32([0, 0, 2, 1, 1, -1, 1, 0, 2, -1, 1][:rows])
    counts = int32([256, 31, 64, 500, 33, POISON, 0, 129, 7, 3, 65][:rows])
    got = kernels.select_pools(q, w, strided, table, req, counts, topk)
    want = ref.TorchReferenceKernels().select_pools(q, w, strided, table, req, counts, topk)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_merge_of_unordered_candidates_with_ties(kernels):
    rows, columns, topk = 6, 300, 40
    ids = torch.stack([torch.randperm(5000)[:columns] for _ in range(rows)]).int()
    scores = torch.randint(-3, 4, (rows, columns)).float()
    scores[0], scores[1, ::2] = 0.0, -0.0
    ids[2, 30:], ids[3, 40:], ids[4, 41:], ids[5] = -1, -1, -1, -1
    scores[ids < 0] = math.nan
    got = kernels.merge_pool_candidates(scores, ids, topk)
    want = ref.TorchReferenceKernels().merge_pool_candidates(scores, ids, topk)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_expand_order_is_history_tail_then_nothing(kernels):
    topk, width = 512, 2051
    positions = [4002, 3999, 4000, 2, -1, 9]
    ids = torch.full((6, topk), -1, dtype=torch.int32)
    for row in range(3):
        ids[row] = torch.randperm(999, generator=torch.Generator().manual_seed(row))[:topk]
    ids[4] = POISON
    ids[5, :3] = int32([1, POISON, 0])
    expected = torch.full((6, width), -1, dtype=torch.int32)
    for row, p in enumerate(positions):
        kept = [g for g in ids[row].tolist() if 0 <= g < (p + 1) // 4]
        tokens = [g * 4 + i for g in kept for i in range(4)]
        tokens += list(range((p + 1) // 4 * 4, p + 1))
        expected[row, : len(tokens)] = int32(tokens)
    assert [int((expected[r] >= 0).sum()) for r in range(6)] == [2051, 2048, 2049, 3, 0, 10]
    for _ in range(pick(100, 3)):
        assert torch.equal(kernels.expand_pools(ids, torch.tensor(positions), 4, width), expected)
    with pytest.raises(ValueError, match=r"2050.*2051"):
        kernels.expand_pools(ids, torch.tensor(positions), 4, 2050)


# Rows


@pytest.mark.parametrize(("world", "interleave"), [(4, 4), (3, 64), (2, 8)])
def test_remap_finds_every_token(kernels, world, interleave):
    lengths = [19, 33, 700]
    _, starts, padded = layout(lengths, world, interleave)
    buffer = {}
    for rank in range(world):
        row = rank * padded
        for r, n in enumerate(lengths):
            for t in range(n):
                if t // interleave % world == rank:
                    buffer[row] = (r, t)
                    row += 1
    for r, n in enumerate(lengths):
        tokens = torch.cat([torch.randperm(n), torch.tensor([-1])]).int().unsqueeze(0)
        rows = kernels.remap(tokens, int32([r]), starts, padded, world, interleave)
        assert rows.dtype == torch.int32 and rows[0, -1] == -1
        assert [buffer[x] for x in rows[0, :-1].tolist()] == [
            (r, t) for t in tokens[0, :-1].tolist()
        ]


def test_remap_worked_example_and_padding_rows(kernels):
    _, starts, padded = layout([19, 33], 4, 4)
    assert starts[:, 1].tolist() == [7, 4, 4, 4] and padded == 16
    tokens = torch.full((5, 4), POISON, dtype=torch.int32)
    tokens[:3] = int32([[18, 0, -1, 7], [32, -1, 4, 16], [-1, -1, -1, -1]])
    out = torch.full_like(tokens, POISON)
    counts = int32([POISON] * 5)
    got = kernels.remap(tokens, int32([0, 1, 0, -1, -1]), starts, padded, 4, 4, out, counts)
    assert got is out
    assert counts.tolist() == [3, 3, 0, 0, 0]
    assert out.tolist() == [[6, 0, -1, 19], [15, -1, 20, 11], [-1] * 4, [-1] * 4, [-1] * 4]


@pytest.mark.parametrize(("world", "interleave"), [(4, 4), (3, 64), (2, 8)])
def test_remap_finds_tokens_of_the_batch_behind_the_spans(kernels, world, interleave):
    """Contexts and chunks of irregular sizes, in a row wider than a program's block."""
    contexts, own, width = [19, 0, 701, 5], [3, 130, 1, 0], 1100
    _, starts, padded = layout(contexts, world, interleave)
    place = {}
    for rank in range(world):
        row = rank * padded
        for r, n in enumerate(contexts):
            for t in (t for t in range(n) if t // interleave % world == rank):
                place[r, t] = row
                row += 1
    row, own_starts = world * padded, []
    for r, (n, count) in enumerate(zip(contexts, own, strict=True)):
        own_starts.append(row - n)
        for t in range(n, n + count):
            place[r, t] = row
            row += 1
    assert len(set(place.values())) == sum(contexts) + sum(own)
    tokens = torch.full((6, width), -1, dtype=torch.int32)
    want = torch.full_like(tokens, -1)
    for r, (n, count) in enumerate(zip(contexts, own, strict=True)):
        chosen = torch.randperm(n + count)
        columns = torch.randperm(width)[: n + count]
        tokens[r, columns] = chosen.int()
        want[r, columns] = int32([place[r, t] for t in chosen.tolist()])
    tokens[4], tokens[5] = tokens[2], POISON
    counts = int32([POISON] * 6)
    got = kernels.remap(
        tokens,
        int32([0, 1, 2, 3, -1, -1]),
        starts,
        padded,
        world,
        interleave,
        counts=counts,
        context_lens=int32(contexts),
        own_starts=int32(own_starts),
    )
    assert torch.equal(got, want)
    assert counts.tolist() == [22, 130, 702, 5, 0, 0]


@pytest.mark.parametrize(("world", "interleave"), [(4, 4), (3, 64), (2, 8)])
@pytest.mark.parametrize("in_place", [False, True])
def test_remap_of_a_window_keeps_its_tokens_in_order_without_holes(
    kernels, world, interleave, in_place
):
    """Rows are wider than a program's block; a window's tokens lie as if they were the first."""
    step, width = world * interleave, 700
    begin, end = 2 * step, 5 * step + 3
    _, starts, padded = layout([end - begin], world, interleave)
    tokens = torch.full((5, width), -1, dtype=torch.int32)
    for row in range(3):
        tokens[row, :600] = torch.randint(0, 8 * step, (600,)).int()
    tokens[1, 17] = tokens[1, 300] = -1
    tokens[2] = torch.arange(width) % begin  # nothing of the window
    tokens[3], tokens[4] = POISON, POISON
    counts = int32([POISON] * 5)
    want = torch.full_like(tokens, -1)
    lengths = []
    for row in range(3):
        kept = torch.tensor([t - begin for t in tokens[row].tolist() if begin <= t < end]).int()
        lengths.append(kept.numel())
        want[row, : kept.numel()] = kernels.remap(
            kept[None], int32([0]), starts, padded, world, interleave
        )[0]
    req = int32([0, 0, 0, -1, -1])
    out = tokens if in_place else torch.full_like(tokens, POISON)
    got = kernels.remap(tokens, req, starts, padded, world, interleave, out, counts, (begin, end))
    assert torch.equal(got, want)
    assert counts.tolist() == [*lengths, 0, 0] and lengths[2] == 0 < min(lengths[:2])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_filter_local_splits_tokens_over_ranks_in_order(kernels, world):
    page, stride, interleave = 64, 70, 4
    table = int32([[9, 2, 30], [5, 7, 1]])
    tokens = torch.full((3, 200), -1, dtype=torch.int32)
    tokens[0, :180], tokens[1, :150:2] = torch.randperm(180).int(), torch.randperm(150)[:75].int()
    tokens[2] = POISON
    total = torch.zeros(3, dtype=torch.int32)
    for rank in range(world):
        rows, counts = kernels.filter_local(
            tokens, int32([0, 1, -1]), table, stride, page, rank, world, interleave
        )
        for r in range(3):
            mine = []
            for t in tokens[r].tolist() if r < 2 else []:
                if t >= 0 and t // interleave % world == rank:
                    j = t // (interleave * world) * interleave + t % interleave
                    mine.append(int(table[r, j // page]) * stride + j % page)
            assert rows[r].tolist() == mine + [-1] * (200 - len(mine)) and counts[r] == len(mine)
        total += counts
    assert total.tolist() == [180, 75, 0]


# Attention


def oracle(q, records, row_ids, counts, scale):
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for t in range(q.shape[0]):
        ids = [i for i in row_ids[t, : int(counts[t])].tolist() if i >= 0]
        if ids:
            kv = ref.dequantize_records(records[ids], torch.float64)
            scores = q[t].double() @ kv.t() * scale
            lse[t] = torch.logsumexp(scores, 1)
            out[t] = scores.softmax(1) @ kv
    return out, lse


def tolerances(kernels):
    """Absolute, relative and cosine tolerance of the output, and tolerance of the log-sum-exp.

    Softmax weights are rounded to fp16 (Triton) or, with the latents, to bf16 (FlashMLA).
    """
    if isinstance(kernels, ref.TorchReferenceKernels):
        return 1e-5, 2**-8, 1e-5, 1e-5
    if getattr(kernels, "scratch", False):
        return 2e-2, 2**-6, 5e-5, 2e-2
    return 2e-3, 2**-7, 1e-5, 1e-4


@pytest.mark.parametrize(
    ("rows", "heads", "width", "pool"),
    pick(
        [
            (5, 2, 3, 7),
            (40, 16, 517, 900),
            (3, 64, 2051, 4000),
            (7, 4, 70, 90),
            (300, 8, 131, 700),
            (1061, 32, 200, 900),
            (270, 64, 300, 901),
            (260, 128, 129, 500),
            (3, 20, 2051, 5000),
        ],
        [(5, 2, 3, 7), (4, 16, 130, 300), (3, 80, 70, 90), (3, 4, 600, 700)],
    ),
)
def test_attention_against_fp64(kernels, rows, heads, width, pool):
    records = torch.zeros(pool, RECORD + 48, dtype=torch.uint8)[:, :RECORD]
    records.copy_(ref.quantize_records(torch.randn(pool, 512)))
    # Row 0 is what a masked column would read by accident: all bytes NaN.
    records[0] = 0xFF
    q = torch.randn(rows, heads, 512).bfloat16()
    ids = torch.randint(1, pool, (rows, width), dtype=torch.int32)
    ids[torch.rand(rows, width) < 0.2] = -1
    counts = torch.randint(1, width + 1, (rows,), dtype=torch.int32)
    counts[0] = width
    ids[1], counts[2] = -1, 0
    ids[torch.arange(width) >= counts.unsqueeze(1)] = POISON
    scale = 512**-0.5
    out, lse = kernels.attend(q, records, ids, counts, scale)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    want, want_lse = oracle(q, records, ids, counts, scale)
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    for row in (1, 2):
        assert bool((out[row] == 0).all()) and bool((lse[row] == -math.inf).all())
    absolute, relative, cosine, lse_error = tolerances(kernels)
    torch.testing.assert_close(lse.double(), want_lse, rtol=lse_error, atol=lse_error)
    torch.testing.assert_close(out.double(), want, rtol=relative, atol=absolute)
    x, y = out.double(), want
    assert 1 - 2 * (x * y).sum() / (x * x + y * y).sum() < cosine


@pytest.mark.skipif(not providers.INTERPRETED, reason="the GPU has the real kernels")
@pytest.mark.parametrize("topk", [16, 20])
def test_the_way_to_compiled_selection_and_back(kernels, monkeypatch, topk):
    def scores_of(q, kv, weights, begins, ends, most):
        out = torch.full((q[0].shape[0], most + 8), math.nan)
        for t in range(out.shape[0]):
            keys, scales = (x[begins[t] : ends[t]].float() for x in kv)
            dots = (q[0][t].float() @ keys.t()).relu() * weights[t][:, None]
            out[t, : keys.shape[0]] = dots.sum(0) * scales
        return out

    def any_best(logits, begins, ends, out, rows, stride0, stride1, count):
        assert (stride0, stride1) == logits.stride() and not begins.any() and rows == len(out)
        for t in range(rows):
            # The last of equal ones, the best first: neither the choice nor the order asked for.
            row = logits[t, : ends[t]].flip(0).sort(stable=True, descending=True).indices
            best = int(ends[t]) - 1 - row[:count]
            out[t] = -1
            out[t, : len(best)] = best.int()

    module = sys.modules[type(kernels).__module__]
    monkeypatch.setattr(module, "_deepgemm", lambda: scores_of)
    monkeypatch.setattr(module, "_vllm_topk", lambda: any_best)
    monkeypatch.setattr(module, "_VLLM_TOPK", 16)
    monkeypatch.setattr(module, "_DEEPGEMM_ROWS", 1)
    monkeypatch.setattr(module, "_DEEPGEMM_BYTES", 2 * 4 * 9 * PLACES)
    monkeypatch.setattr(module, "_SETTLE_BLOCK", 64)
    rows = 9
    records, q, w = integer_index(500, 32, rows, topk)
    w[:, 2:] = 0  # two heads: so few different scores that the last place is always contested
    table = torch.full((2, 9), POISON, dtype=torch.int32)
    table[0, :8], table[1, :3] = torch.randperm(8).int(), int32([5, 0, 2])
    args = (q, w, planar(records), table, int32([0, 1, 1, 0, -1, 0, 1, 0, 1]))
    counts = int32([500, 192, 17, 16, POISON, 0, 21, 300, 20])
    got = kernels.select_pools(*args, counts, topk)
    want = ref.TorchReferenceKernels().select_pools(*args, counts, topk)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def settle(kernels, scores, chosen):
    """The second of three rows through the kernel behind vLLM's top-k: 20 ids and scores.

    chosen: 21 ids.
    """
    topk, count = 20, len(scores)
    # Behind the last visible pool lies no score of this row.
    logits = torch.full((3, 256), math.inf)
    logits[1, :count] = scores
    ids = torch.full((3, topk), POISON, dtype=torch.int32)
    out = torch.full((3, topk), 77.0)
    sys.modules[type(kernels).__module__]._settle_kernel[(1,)](
        logits[1:], 256, int32([*chosen]), int32([0, 0, 0]), int32([9, count, 9]), 256, 1, 1, out,
        ids, TOPK=topk, SLOTS=32, BLOCK=64,
    )  # fmt: skip
    assert bool((ids[::2] == POISON).all()) and bool((out[::2] == 77).all())
    return ids[1], out[1]


@pytest.mark.skipif(not providers.INTERPRETED, reason="of the Triton kernels, on CPU tensors")
@pytest.mark.parametrize(("least", "end"), [(0, 1), (-2, 3), (0, 30), (0, 100), (55, 60)])
def test_the_lowest_of_equal_scores_are_taken_in_every_block(kernels, least, end):
    scores = torch.randint(min(least, 0), end, (199,)).clamp(min=least).float()
    zeros = scores == 0
    scores[zeros] *= (-1.0) ** torch.arange(int(zeros.sum()))
    best = scores.sort(stable=True, descending=True).indices[:20].sort().values
    chosen = 198 - scores.flip(0).sort(stable=True, descending=True).indices[:21]
    chosen = chosen[torch.randperm(21)]
    ids, out = settle(kernels, scores, chosen.tolist())
    assert torch.equal(ids.long(), best) and torch.equal(out, scores[best])


@pytest.mark.skipif(not providers.INTERPRETED, reason="of the Triton kernels, on CPU tensors")
@pytest.mark.parametrize("spare", [20, 7, 0])
def test_the_least_of_one_more_than_asked_for_is_left_out(kernels, spare):
    """Wherever it lies."""
    scores = torch.randperm(199).float()
    best = scores.sort(descending=True).indices[:21]
    chosen = torch.cat((best[:spare], best[spare + 1 :], best[spare : spare + 1]))
    ids, out = settle(kernels, scores, chosen.tolist())
    want = best[:20].sort().values
    assert torch.equal(ids.long(), want) and torch.equal(out, scores[want])
    # Others are not looked at, though they are better.
    worse = scores.sort().indices[:21]
    ids, _ = settle(kernels, scores, worse.tolist())
    assert torch.equal(ids.long(), worse[1:].sort().values)


@pytest.mark.skipif(not providers.INTERPRETED, reason="of the Triton kernels, on CPU tensors")
@pytest.mark.parametrize(
    "chosen",
    [
        range(100, 121),  # all numbers, none of the NaN
        range(178, 199),  # NaN alone
        [160, *range(20)],
        [7] * 21,
        [3] * 20 + [4],  # the best one, and one of eight behind it
        [-1] * 21,
        [5, -1, 199, 2**31 - 1, 9, -1, 199] * 3,
    ],
)
@pytest.mark.parametrize("nan", [math.nan, -math.nan])
def test_scores_that_are_no_numbers_leave_other_rows_alone(kernels, chosen, nan):
    """Which of them vLLM's top-k chooses is not said, nor whether it chooses enough."""
    scores = torch.randperm(199).float()
    scores[150:], scores[3], scores[4:12] = nan, 1000, 999
    ids, out = settle(kernels, scores, chosen)
    kept = ids[ids >= 0].long()
    assert bool((kept[1:] >= kept[:-1]).all()) and bool((kept < 150).all())
    assert torch.equal(out[: len(kept)], scores[kept])
    assert ids[len(kept) :].tolist() == [-1] * (20 - len(kept))
    assert bool((out[len(kept) :] == -math.inf).all())


def sparse_prefill(q, kv, indices, sm_scale, topk_length=None, out=None):
    """What FlashMLA's sparse prefill computes, for the code around it."""
    assert q.shape[1] in (64, 128) and indices.shape[2] % 128 == 0
    assert q.dtype == kv.dtype == torch.bfloat16 and out.is_contiguous()
    lse = torch.full(q.shape[:2], math.nan)
    out.fill_(math.nan)
    for t in range(q.shape[0]):
        ids = indices[t, 0, : int(topk_length[t])].long()
        ids = ids[(ids >= 0) & (ids < kv.shape[0])]
        if ids.numel():
            scores = q[t].float() @ kv[ids, 0].float().t() * sm_scale
            lse[t] = scores.logsumexp(1)
            out[t] = (scores.softmax(1) @ kv[ids, 0].float()).bfloat16()
    return out, lse, lse


@pytest.mark.skipif(not providers.INTERPRETED, reason="the GPU has the real FlashMLA")
@pytest.mark.parametrize(("rows", "heads"), [(9, 20), (3, 64), (5, 128)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_the_way_to_flashmla_and_back(kernels, monkeypatch, rows, heads, contiguous):
    module = sys.modules[type(kernels).__module__]
    monkeypatch.setattr(module, "_flashmla", lambda: sparse_prefill)
    monkeypatch.setattr(module, "_FLASHMLA_MIN_TOKENS", 1)
    monkeypatch.setattr(scratch_sizes, "FLASHMLA_ROWS", 4)
    pool, width = 50, 70
    records = torch.zeros(pool, RECORD + 16, dtype=torch.uint8)[:, :RECORD]
    records.copy_(ref.quantize_records(torch.randn(pool, 512)))
    records[0] = 0xFF
    q = torch.randn(rows, heads, 512).bfloat16()
    if not contiguous:
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
    ids = torch.randint(1, pool, (rows, width), dtype=torch.int32)
    counts = torch.randint(1, width + 1, (rows,), dtype=torch.int32)
    ids[1], counts[2] = -1, 0
    # Garbage past the count: a NaN record too.
    ids[torch.arange(width) >= counts.unsqueeze(1)] = 0
    scratch = providers.poisoned_scratch(kernels, q, records, ids)
    assert [t.shape[0] for t in scratch[:2]] == [pool + 3, rows + 5]
    out, lse = kernels.attend(q, records, ids, counts, 512**-0.5, scratch=scratch)
    want, want_lse = oracle(q, records, ids, counts, 512**-0.5)
    assert out.is_contiguous() and bool((scratch[0][1:pool].isfinite()).all())
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out.double(), want, rtol=2**-6, atol=2e-2)


def test_attention_reads_rows_beyond_any_table_bound(kernels):
    records = ref.quantize_records(torch.randn(70_000, 512))
    q = torch.randn(1, 1, 512).bfloat16()
    out, lse = kernels.attend(q, records, int32([[69_999]]), int32([1]), 0.1)
    kv = ref.dequantize_records(records[69_999:])
    torch.testing.assert_close(out[0].float(), kv, rtol=2**-8, atol=0)
    torch.testing.assert_close(lse[0], 0.1 * (q[0].float() @ kv.t())[0], rtol=1e-4, atol=1e-4)


def test_attention_without_rows_or_records(kernels):
    out, lse = kernels.attend(
        torch.ones(2, 3, 512).bfloat16(),
        torch.zeros(0, RECORD).byte(),
        int32([[-1], [POISON]]),
        int32([1, 0]),
        1.0,
    )
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())
    out, lse = kernels.attend(
        torch.ones(0, 3, 512).bfloat16(),
        torch.zeros(4, RECORD).byte(),
        torch.zeros(0, 5).int(),
        int32([]),
        1.0,
    )
    assert out.shape == (0, 3, 512) and lse.shape == (0, 3)


# NVFP4 records


def test_nvfp4_record_bytes():
    latents = torch.zeros(3, 512, dtype=torch.bfloat16)
    # The token's scale is 2688 / 2688 = 1, the first group's scale 448: codes in steps of 448.
    latents[0, :8] = torch.tensor([2688, -1344, 448, 224, 0, 672, -112, -96]).bfloat16()
    # A group of its own: scale 96 / 6 = 16.
    latents[0, 16:20] = torch.tensor([96, -48, 8, 16]).bfloat16()
    latents[1, 511] = 6.0
    records = ref.quantize_nvfp4_records(latents)
    assert records.shape == (3, 304) and records.dtype == torch.uint8
    # 224 = 0.5 steps; 112 = 0.25 steps is a tie that goes to 0, 96 rounds to 0.
    assert records[0, :4].tolist() == [0xD7, 0x12, 0x30, 0x88]
    assert records[0, 8:10].tolist() == [0xD7, 0x21]
    scales = records[:, 256:288].contiguous().view(torch.float8_e4m3fn).float()
    assert scales[0, :3].tolist() == [448, 16, 0] and scales[1, 31] == 448
    token = records[:, 292:296].contiguous().view(torch.float32).flatten()
    torch.testing.assert_close(token, torch.tensor([1.0, 6 / 2688, 0.0]))
    assert bool((records[:, 288:292] == 0).all()) and bool((records[:, 296:] == 0).all())
    assert bool((records[2] == 0).all())
    back = ref.dequantize_records(records)
    assert back[0, :8].tolist() == [2688, -1344, 448, 224, 0, 672, 0, 0]
    torch.testing.assert_close(back[1, 511], torch.tensor(6.0))


def test_every_e2m1_border_goes_to_the_even_code():
    borders = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    latents = torch.zeros(1, 512)
    latents[0, 0], latents[0, 1:8], latents[0, 8:15] = (
        6.0,
        torch.tensor(borders),
        -torch.tensor(borders),
    )
    back = ref.dequantize_records(ref.quantize_nvfp4_records(latents * 448))[0] / 448
    want = [0, 1, 1, 2, 2, 4, 4]
    torch.testing.assert_close(back[1:8], torch.tensor(want).float())
    torch.testing.assert_close(back[8:15], -torch.tensor(want).float())


def test_nvfp4_round_trip_error_is_half_a_step():
    latents = (torch.randn(64, 512) * torch.logspace(-20, 4, 64).unsqueeze(1)).bfloat16()
    back = ref.dequantize_records(ref.quantize_nvfp4_records(latents), torch.float64)
    x = latents.double().unflatten(1, (32, 16))
    amax = x.abs().amax(2, keepdim=True)
    token = amax.amax(1, keepdim=True)
    # Half of the widest step, 2 of 6; a scale is off by 1/16 of it, or half an e4m3 subnormal.
    bound = (amax / 6) * (1 + 1 / 16) + token / 2688 * 2**-10 * 7
    assert bool(((back.unflatten(1, (32, 16)) - x).abs() <= bound).all())


def test_nvfp4_records_are_packed(kernels):
    cache = strided_pages(3, (64, 304), 16 * 11, 0xAB)
    cache.copy_(torch.randint(0, 256, cache.shape, dtype=torch.uint8))
    out = torch.full((75, 304), 0x5A, dtype=torch.uint8)
    kernels.pack_records(cache, int32([[2, 0], [1, POISON]]), int32([66, 5]), int32([0, 68]), out)
    want = torch.full_like(out, 0x5A)
    want[:64], want[64:66], want[68:73] = cache[2], cache[0, :2], cache[1, :5]
    assert torch.equal(out, want)


def test_attention_over_nvfp4_records(kernels):
    reference_only(kernels)
    latents = torch.randn(40, 512).bfloat16()
    cache = torch.zeros(1, 64, 304, dtype=torch.uint8)
    kernels.write_records(latents, cache, torch.arange(40))
    q = torch.randn(2, 8, 512).bfloat16()
    ids = torch.randint(0, 40, (2, 35), dtype=torch.int32)
    out, lse = kernels.attend(q, cache[0], ids, int32([35, 3]), 0.0625)
    keys = ref.dequantize_records(cache[0], torch.float64)
    for row, count in enumerate((35, 3)):
        key = keys[ids[row, :count].long()]
        scores = q[row].double() @ key.T * 0.0625
        torch.testing.assert_close(lse[row].double(), scores.logsumexp(1), rtol=1e-5, atol=1e-5)
        want = scores.softmax(1) @ key
        torch.testing.assert_close(out[row].double(), want, rtol=2**-8, atol=1e-3)
