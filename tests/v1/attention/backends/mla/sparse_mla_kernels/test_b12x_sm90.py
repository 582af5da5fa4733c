# SPDX-License-Identifier: Apache-2.0
"""b12x's own kernels as oracles of the Triton ones, on a GPU of compute capability 9.x.

Of b12x's kernels, the writer of FP8 records and the pooled expansion also assemble for sm_90a; the
others need 12.x. Both are called as the package documents it: planned, prepared, then run. Needs
b12x, nvidia-cutlass-dsl and cuda-python beside torch and Triton, as in ``requirements/b12x.txt``:

    python -m pytest -rP tests/v1/attention/backends/mla/sparse_mla_kernels/test_b12x_sm90.py
"""

import pytest
import torch

from vllm.v1.attention.backends.mla.sparse_mla_kernels import torch_reference as ref

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a GPU of compute capability 9.x", allow_module_level=True)
pytest.importorskip("b12x")
pytest.importorskip("cutlass")
pytest.importorskip("cuda.bindings.driver")
from b12x.attention import sparse_mla
from b12x.preparation import PreparationSession, PreparedCall

from vllm.v1.attention.backends.mla.sparse_mla_kernels.triton import TritonKernels

CUDA = torch.device("cuda", 0)
RECORD, VALUES, POISON = 528, 512, 0xAB


@pytest.fixture(scope="module")
def session():
    """Keeps every prepared plan alive for the module."""
    made = PreparationSession(device=CUDA, autotune=False, compile_workers=0)
    yield made
    torch.cuda.synchronize()
    made.close()


def b12x_write(session, latents, cache, slots) -> None:
    plan = sparse_mla.plan_cache_writer(latents, cache, slots)
    nothing = torch.full_like(slots, -1)
    session.prepare(
        [
            plan.request(
                name=f"writer/{cache.shape[1]}/{slots.dtype}",
                prepare_call=lambda state: PreparedCall(
                    run=lambda: state.run(latents, cache, nothing)
                ),
            )
        ]
    )
    sparse_mla.concat_and_cache_glm_next_mla(latents, cache, slots, plan=plan)


def draw_latents(rows: int) -> torch.Tensor:
    """Rows of many magnitudes; one of zeros, one with a group of zeros, one with one large value.

    Rows are 600 elements apart, as in a buffer that holds more than the latents.
    """
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, 600, generator=generator)
    wide *= torch.logspace(-12, 4, rows).unsqueeze(1)
    if rows > 3:
        wide[1] = 0
        wide[2, 128:256] = 0
        wide[3, 77] = 3e4
    return wide.bfloat16().to(CUDA)[:, :VALUES]


def compare_records(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """theirs, ours: (n, 528) records of the same latents.

    b12x multiplies by fp32(1/448) and by an approximate reciprocal, ours divides: scales differ by
    at most one unit in the last place, values by at most one e4m3 step, and seldom.
    """
    scales = [r[:, VALUES:].contiguous().view(torch.int32) for r in (theirs, ours)]
    ulp = (scales[0] - scales[1]).abs()
    codes = [r[:, :VALUES].short() for r in (theirs, ours)]
    # The sign is the highest bit; the rest ascends with the magnitude.
    assert torch.equal(codes[0] & 0x80, codes[1] & 0x80)
    step = (codes[0] - codes[1]).abs()
    differ = float((step > 0).float().mean())
    print(
        f"{theirs.shape[0]} records: {float((ulp > 0).float().mean()):.1%} of scales differ by up "
        f"to {int(ulp.max())} ulp, {differ:.4%} of values by up to {int(step.max())} step"
    )
    assert int(ulp.max()) <= 1 and int(step.max()) <= 1 and differ < 0.01


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page", [64, 2304])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_records_are_b12xs_give_or_take_a_step(session, rows, page, dtype):
    pages, stride = 3, page + 96
    latents = draw_latents(rows)
    slots = torch.randperm(pages * page, generator=torch.Generator().manual_seed(1))[:rows]
    # The smaller pages hold 192 records; what is left over is not written.
    slots = torch.cat([slots, torch.full((rows - slots.numel(),), -1)])
    if rows > 8:
        slots[4], slots[7] = -1, -9
    written = []
    for write in (lambda *a: b12x_write(session, *a), TritonKernels().write_records):
        storage = torch.full((pages, stride * RECORD), POISON, dtype=torch.uint8, device=CUDA)
        cache = storage[:, : page * RECORD].unflatten(1, (page, RECORD))
        write(latents, cache, slots.to(CUDA, dtype))
        written.append(storage.view(pages * stride, RECORD))
    live = slots >= 0
    places = (slots // page * stride + slots % page)[live].to(CUDA)
    theirs, ours = (storage[places] for storage in written)
    compare_records(theirs, ours)
    # The torch reference stands between them.
    compare_records(ref.quantize_records(latents[live.to(CUDA)].cpu()).to(CUDA), ours)
    for storage in written:
        storage[places] = POISON
        assert bool((storage == POISON).all()), "a byte outside the records was written"


def test_pages_beyond_two_to_the_32_bytes(session):
    """Page 2 begins past 4 GiB: both writers have to multiply in 64 bits."""
    page, stride = 64, -(-(2**31) // RECORD) * RECORD
    storage = torch.empty(2 * stride + page * RECORD, dtype=torch.uint8, device=CUDA)
    cache = storage.as_strided((3, page, RECORD), (stride, RECORD, 1))
    latents = draw_latents(6)
    slots = torch.tensor([2 * page + 63, 2 * page, page + 1, 5, -1, page], device=CUDA)
    records = []
    for write in (lambda *a: b12x_write(session, *a), TritonKernels().write_records):
        storage.fill_(POISON)
        write(latents, cache, slots)
        live = slots[slots >= 0]
        records.append(cache[live // page, live % page].clone())
        assert int((storage != POISON).sum()) <= 5 * RECORD
    compare_records(*records)


@pytest.mark.parametrize("planned", [False, True], ids=["on demand", "planned"])
@pytest.mark.parametrize(("page", "stride"), [(64, 64), (64, 80), (2304, 2400)])
def test_expansion_is_b12xs(session, page, stride, planned):
    """Pools to cache rows: b12x in one step, ours in two. Same rows, same counts, same order."""
    generator = torch.Generator().manual_seed(page + stride)
    rows, requests, columns, pool, topk = 200, 3, 150, 4, 512
    last = torch.randint(0, columns * page, (rows,), generator=generator)
    # No complete pool; ends of pools; where topk pools are just reached, and just passed.
    edges = torch.tensor([0, 1, 2, 3, 4, 2046, 2047, 2048, 2050, 2051, columns * page - 1])
    last[: edges.numel()] = edges
    request = torch.randint(0, requests, (rows,), generator=generator).int()
    blocks = requests * columns
    table = torch.randperm(blocks, generator=generator).int().view(requests, columns)
    pools = torch.full((rows, topk), -1, dtype=torch.int32)
    for row, position in enumerate(last.tolist()):
        chosen = torch.randperm((position + 1) // pool, generator=generator)[:topk].int()
        pools[row, : chosen.numel()] = chosen
    last, request, table, pools = (t.to(CUDA) for t in (last, request, table, pools))
    out = torch.full((rows, topk * pool + pool - 1), 77, dtype=torch.int32, device=CUDA)
    active = torch.full((rows,), 77, dtype=torch.int32, device=CUDA)
    sizes = {
        "pool_size": pool,
        "block_size": page,
        "block_stride_rows": stride,
        "num_cache_blocks": blocks,
    }
    arguments = (pools, last, request, table, out, active)
    plan = None
    if planned:
        plan = sparse_mla.plan_pooled_selection(
            device=CUDA,
            max_rows=rows,
            page_size=page,
            max_page_table_width=columns,
            num_cache_blocks=blocks,
            pool_size=pool,
            pool_topk=topk,
            block_stride_rows=stride,
        )
        session.prepare(
            [
                plan.request(
                    name=f"expansion/{page}/{stride}",
                    prepare_call=lambda state: PreparedCall(
                        run=lambda: state.run(*arguments, **sizes)
                    ),
                )
            ]
        )
        out.fill_(77)
        active.fill_(77)
    sparse_mla.expand_pooled_topk_to_physical_slots(*arguments, **sizes, plan=plan)
    kernels = TritonKernels()
    tokens = kernels.expand_pools(pools, last, pool, out.shape[1])
    ours, counts = kernels.filter_local(tokens, request, table, stride, page, 0, 1, pool)
    assert torch.equal(counts, active)
    column = torch.arange(out.shape[1], device=CUDA)
    read = column < counts.unsqueeze(1)
    assert torch.equal(ours[read], out[read])
    # Past what is read, b12x leaves -1.
    assert bool((out[~read] == -1).all())
