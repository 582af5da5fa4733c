# SPDX-License-Identifier: Apache-2.0
"""The b12x provider against the installed package, on a CPU.

The package's own plans, scratch layouts, checks and reference functions run here; its kernels do
not, they need compute capability 12.x. They are compiled for it (slowly, in a process of their
own), and a torch emulation that promises no more than the package stands in for them.
"""

import contextlib
import csv
import gc
import importlib
import importlib.util
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vllm.platforms
from vllm.v1.attention.backends.mla import sparse_mla_kernels
from vllm.v1.attention.backends.mla.sparse_mla_kernels import SparseMLAKernels
from vllm.v1.attention.backends.mla.sparse_mla_kernels import torch_reference as ref

pytest.importorskip("b12x")
pytest.importorskip("cutlass")
from vllm.v1.attention.backends.mla.sparse_mla_kernels import b12x as provider


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
ROOT = HERE.parents[5]
emulation = load("b12x_emulation", HERE / "b12x_emulation.py")
CPU, CUDA0 = torch.device("cpu"), torch.device("cuda", 0)
RECORD, INDEX, PLACES, PAGE_BYTES = 528, 132, 64, 8448
SCALE = 256**-0.5
GLM = {
    "page_size": 2304,
    "record_bytes": RECORD,
    "head_counts": (16, 64),
    "index_heads": 32,
    "topk": 512,
    "width": 2051,
    "scale": SCALE,
}


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(scope="module")
def warm():
    with pytest.MonkeyPatch.context() as monkeypatch:
        fake = emulation.Emulation()
        kernels = provider.B12xKernels(ref.TorchReferenceKernels())
        fake.attach(kernels, monkeypatch).warm_up(
            CPU, pool_size=4, dcp_world_size=4, interleave=4, **GLM
        )
        assert not fake.log
        yield kernels, fake


@pytest.fixture
def started(warm):
    """A provider at TP4/DCP4 sizes that has been warmed up, and what it launches on."""
    torch.manual_seed(0)
    warm[1].log.clear()
    return warm


def test_satisfies_the_protocol():
    assert isinstance(provider.B12xKernels(ref.TorchReferenceKernels()), SparseMLAKernels)


@pytest.mark.parametrize("capability", [120, 121])
def test_sm120_and_sm121_choose_b12x_or_say_how_to_install_it(monkeypatch, capability):
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        has_device_capability=lambda wanted: capability >= wanted,
        is_device_capability_family=lambda family: capability // 10 == family // 10,
    )
    monkeypatch.setattr(vllm.platforms, "current_platform", platform, raising=False)
    choose = sparse_mla_kernels.get_kernels.__wrapped__
    assert type(choose()) is provider.B12xKernels
    # Stock vLLM's logger does not propagate, so look at what it is given.
    lines = []
    monkeypatch.setattr(
        sparse_mla_kernels.logger, "warning", lambda text, *args: lines.append(text % args)
    )
    # None in sys.modules is a module that cannot be imported.
    for missing in ("b12x.attention.sparse_mla", "b12x.attention.dsa_indexer"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            assert type(choose()).__name__ == "TritonKernels"
    assert len(lines) == 2
    for line in lines:
        assert "pip install 'vllm-b12x-ckv[b12x]'" in line and "\n" not in line


# The package's contract


def test_the_package_is_the_one_the_provider_is_written_for():
    from importlib.metadata import version

    assert version("b12x") == "1.5.1"
    assert version("nvidia-cutlass-dsl") == "4.8.0"


@pytest.mark.parametrize(("record", "name"), [(528, "fp8"), (304, "nvfp4")])
@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_attention_capacities(record, name, mode):
    sizes = provider.Sizes(**GLM | {"record_bytes": record})
    caps = provider.attention_caps(sizes, CUDA0, heads=16, rows=8, mode=mode)
    assert caps.cache_record_bytes == record and caps.kv_dtype == torch.uint8
    assert (caps.head_dim, caps.v_head_dim, caps.max_width) == (512, 512, 2051)
    assert caps.softmax_scale == SCALE and caps.return_lse
    assert caps.lse_scale == ("natural" if mode == "decode" else "base2")
    assert caps.latent_scale_per_token == (name == "nvfp4")


def test_scratch_is_the_maximum_over_all_plans_and_bounded():
    plans = provider.declare(provider.Sizes(**GLM | {"head_counts": (8, 16, 32, 64)}), CPU)
    needs = {name: provider._scratch_bytes(plan) for name, plan in plans.names()}
    assert len(needs) == 4 * 10 + 3
    assert max(needs.values()) < 65 << 20
    # 16 heads: out and log-sum-exp of 3,840 rows, then alignment.
    assert 0 <= needs["extend/16 heads/3840 rows"] - 3840 * 16 * 1028 <= 3 * 1024
    # Partial results of 33 parts a row.
    assert 0 <= needs["decode/16 heads/8 rows"] - 8 * 33 * 16 * 1028 <= 8 * 1024
    # Tiled scores of 512 rows x 16,384 pools dominate a selection.
    assert needs["select/512 rows"] > 512 * 16384 * 4
    sizes = provider.Sizes(**GLM)
    for heads in (8, 16, 32, 64):
        most = max(size for name, size in needs.items() if f"/{heads} heads/" in name)
        own = ((most,), torch.uint8)
        assert provider.attention_scratch(sizes, plans, heads, 2051) == [own]
        rows = max(256, provider.extend_rows(heads))
        narrow = ((rows, 2051), torch.int32)
        assert provider.attention_scratch(sizes, plans, heads, 2176) == [own, narrow]
    most = max(size for name, size in needs.items() if name.startswith("select"))
    assert provider.selection_scratch(plans)[0] == ((most,), torch.uint8)


def test_declaring_on_a_cuda_device_needs_no_device():
    plans = provider.declare(provider.Sizes(**GLM), CUDA0)
    assert {p.plan.query.mode for p in plans.extend.values()} == {"extend"}
    assert all(plan.prepared is None for _, plan in plans.names())


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_splits_and_pieces_stay_within_their_bytes(heads):
    row = heads * 1028
    assert provider.extend_rows(heads) % 256 == 0
    assert provider.extend_rows(heads) * row <= 64 << 20
    for rows in provider.DECODE_ROWS:
        parts = provider.split_parts(heads, rows, 2051)
        assert 1 <= parts <= 33
        assert parts == 1 or parts * rows * row <= 64 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"record_bytes": 656}, r"656 bytes.*528, 304"),
        ({"page_size": 0}, r"page_size is 0"),
        ({"width": 2052}, r"2052 rows.*2051"),
        ({"head_counts": (16, 12)}, r"12 heads.*multiples of 8.*--tensor-parallel-size"),
        ({"topk": 256}, r"256.*512, 1024, 2048"),
        ({"index_heads": 40}, r"40 index heads"),
        ({"index_heads": 65}, r"65 index heads"),
        ({"scale": math.inf}, r"inf"),
    ],
)
def test_sizes_without_a_kernel_are_refused_before_b12x_sees_them(change, message):
    with pytest.raises(ValueError, match=message):
        provider.Sizes(**GLM | change)


def test_the_package_checks_what_a_selection_is_bound_to():
    """What its bind does and does not check, on its own layout, is what the provider relies on."""
    plan = provider.declare(provider.Sizes(**GLM), CPU).select[0].plan
    state = emulation._Selection(plan, [])
    scratch = torch.empty(provider._scratch_bytes(plan), dtype=torch.uint8)
    good = {
        "scratch": scratch,
        "real_page_table": torch.zeros(8, 4, dtype=torch.int32),
        "cache_seqlens_int32": torch.zeros(8, dtype=torch.int32),
        "active_width": torch.zeros(1, dtype=torch.int32),
    }
    state.bind(**good)
    for name, bad in (
        ("real_page_table", torch.zeros(8, 4)),
        ("real_page_table", torch.zeros(9, 4, dtype=torch.int32)),
        ("real_page_table", torch.zeros(8, 8, dtype=torch.int32)[:, ::2]),
        ("real_page_table", torch.zeros(8, provider.MAX_PAGES + 1, dtype=torch.int32)),
        ("cache_seqlens_int32", torch.zeros(7, dtype=torch.int32)),
        ("active_width", torch.zeros(2, dtype=torch.int32)),
        ("scratch", scratch[:-1]),
    ):
        with pytest.raises((ValueError, TypeError)):
            state.bind(**good | {name: bad})


# Refusals of the provider, which come before those of the package


def attend_arguments(rows=3, heads=16, records=100, width=2051):
    return {
        "q": torch.zeros(rows, heads, 512, dtype=torch.bfloat16),
        "records": torch.zeros(records, RECORD, dtype=torch.uint8),
        "row_ids": torch.zeros(rows, width, dtype=torch.int32),
        "counts": torch.zeros(rows, dtype=torch.int32),
        "scale": SCALE,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"records": torch.zeros(9, 304, dtype=torch.uint8)}, r"304.*528"),
        ({"records": torch.zeros(9, RECORD)}, r"float32.*uint8"),
        ({"records": torch.zeros(9, 2 * RECORD).byte()[:, :RECORD]}, r"1056.*528"),
        ({"records": torch.zeros(RECORD * 9 + 4).byte()[4:].view(9, RECORD)}, r"multiples of 16"),
        ({"q": torch.zeros(3, 16, 512)}, r"float32.*bfloat16"),
        ({"q": torch.zeros(3, 16, 576).bfloat16()}, r"576.*512"),
        ({"q": torch.zeros(4, 16, 512).bfloat16()}, r"row_ids is \(3, 2051\).*\[4, 2051\]"),
        ({"row_ids": torch.zeros(3, 2048).int()}, r"2048.*2051"),
        ({"row_ids": torch.zeros(3, 2051).long()}, r"int64.*int32"),
        ({"row_ids": torch.zeros(3, 4102).int()[:, ::2]}, r"contiguous"),
        ({"counts": torch.zeros(3).long()}, r"int64.*int32"),
        ({"counts": torch.zeros(2).int()}, r"\(2,\).*\[3\]"),
        ({"scale": 0.5}, r"0\.5.*0\.0625"),
    ],
)
def test_attention_refuses(started, change, message):
    kernels, fake = started
    with pytest.raises(ValueError, match=message):
        kernels.attend(**attend_arguments() | change)
    assert not fake.log


def test_attention_of_heads_that_were_not_prepared(started):
    with pytest.raises(RuntimeError, match=r"32 heads is not prepared.*\[16, 64\]"):
        started[0].attend(**attend_arguments(heads=32))


def test_sizes_without_a_kernel_are_served_by_the_other_provider_and_the_log_says_so(monkeypatch):
    lines = []
    monkeypatch.setattr(provider.logger, "warning", lambda text, *args: lines.append(text % args))
    kernels = provider.B12xKernels(ref.TorchReferenceKernels())
    small = {"head_counts": (4, 8), "topk": 8, "width": 35}
    kernels.warm_up(CPU, pool_size=4, dcp_world_size=2, interleave=4, **GLM | small)
    assert lines == [
        "lists of 35 rows, b12x has kernels for (512, 1024, 2048, 2051, 2112) columns: "
        "TorchReferenceKernels serves this model instead of b12x"
    ]
    cache = torch.zeros(1, 2304, RECORD, dtype=torch.uint8)
    latents, q = torch.randn(9, 512).bfloat16(), torch.randn(2, 4, 512).bfloat16()
    kernels.write_records(latents, cache, torch.arange(9))
    ids = torch.randint(0, 9, (2, 35), dtype=torch.int32)
    arguments = (q, cache[0], ids, int32([9, 35]), 0.5)
    for got, want in zip(
        kernels.attend(*arguments), ref.TorchReferenceKernels().attend(*arguments), strict=True
    ):
        assert torch.equal(got, want)
    q8 = torch.randn(2, 32, 128).to(torch.float8_e4m3fn)
    pages = torch.zeros(1, PLACES, INDEX, dtype=torch.uint8)
    chosen, _ = kernels.select_pools(
        q8, torch.zeros(2, 32), pages, int32([[0]]), int32([0, 0]), int32([3, 8]), 8
    )
    assert chosen[0].tolist() == [0, 1, 2, -1, -1, -1, -1, -1]


def test_nothing_runs_before_the_warm_up(monkeypatch):
    kernels = provider.B12xKernels(ref.TorchReferenceKernels())
    with pytest.raises(RuntimeError, match="warm_up"):
        kernels.attend(**attend_arguments())


def write_arguments(tokens=3, pages=2):
    return {
        "latents": torch.zeros(tokens, 512, dtype=torch.bfloat16),
        "cache": torch.zeros(pages, 2304, RECORD, dtype=torch.uint8),
        "slot_mapping": torch.zeros(tokens, dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache": torch.zeros(2, 64, RECORD).byte()}, r"\(2, 64, 528\).*2304, 528"),
        ({"cache": torch.zeros(2, 2304, 304).byte()}, r"304.*528"),
        ({"cache": torch.zeros(2, 2304, RECORD)}, r"float32.*uint8"),
        ({"cache": torch.zeros(2, 2304, 2 * RECORD).byte()[..., ::2]}, r"\(1056, 2\).*\(528, 1\)"),
        ({"latents": torch.zeros(3, 512)}, r"float32.*bfloat16"),
        ({"latents": torch.zeros(2, 512).bfloat16()}, r"at least 3 rows"),
        ({"latents": torch.zeros(3, 1024).bfloat16()[:, ::2]}, r"inner stride of 1"),
        ({"slot_mapping": torch.zeros(3).short()}, r"int16.*int32 or torch.int64"),
        ({"slot_mapping": torch.zeros(6).long()[::2]}, r"stride of 2"),
    ],
)
def test_the_writer_refuses(started, change, message):
    kernels, fake = started
    with pytest.raises(ValueError, match=message):
        kernels.write_records(**write_arguments() | change)
    assert not fake.log


def test_what_the_writer_accepts_the_package_accepts(started):
    kernels, fake = started
    wide = torch.randn(5, 600).bfloat16()[:, :512]
    padded = torch.zeros(2, 2304 * RECORD + 1024, dtype=torch.uint8)
    cache = padded[:, : 2304 * RECORD].unflatten(1, (2304, RECORD))
    for dtype in (torch.int32, torch.int64):
        cache.fill_(0xAB)
        slots = torch.tensor([-1, 2304 + 7, 3, -5, 2 * 2304], dtype=dtype)
        kernels.write_records(wide, cache, slots)
        expected = torch.full_like(cache, 0xAB)
        expected[1, 7], expected[0, 3] = ref.quantize_records(wide)[1:3]
        assert torch.equal(cache, expected)
    assert [launch.kind for launch in fake.log] == ["write", "write"]


def select_arguments(rows=3, requests=2, columns=4, pages=8):
    return {
        "q_fp8": torch.zeros(rows, 32, 128).to(torch.float8_e4m3fn),
        "weights": torch.zeros(rows, 32),
        "index_pages": torch.zeros(pages, PLACES, INDEX, dtype=torch.uint8),
        "page_table": torch.zeros(requests, columns, dtype=torch.int32),
        "req_id": torch.zeros(rows, dtype=torch.int32),
        "pool_counts": torch.zeros(rows, dtype=torch.int32),
        "topk": 512,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_fp8": torch.zeros(3, 32, 128)}, r"float32.*float8_e4m3fn"),
        ({"q_fp8": torch.zeros(3, 16, 128).to(torch.float8_e4m3fn)}, r"16, 128.*32, 128"),
        ({"weights": torch.zeros(3, 32).bfloat16()}, r"weights.*bfloat16.*float32"),
        ({"weights": torch.zeros(3, 16)}, r"weights.*\(3, 16\).*\[3, 32\]"),
        ({"index_pages": torch.zeros(8, 32, INDEX).byte()}, r"32, 132.*64 x 132"),
        ({"index_pages": torch.zeros(8, PAGE_BYTES)}, r"float32"),
        ({"index_pages": torch.zeros(8, 3 * 8448).byte()[:, :PAGE_BYTES]}, None),
        ({"index_pages": torch.zeros(8, 8448 + 528).byte()[:, :PAGE_BYTES]}, r"multiple of 8448"),
        ({"index_pages": torch.zeros(8, 8456).byte()[:, :PAGE_BYTES]}, r"8456 bytes apart"),
        ({"page_table": torch.zeros(2, 4).long()}, r"int64.*int32"),
        ({"page_table": torch.zeros(1, 8193).int()}, r"8193 columns, 8192"),
        ({"pool_counts": torch.zeros(2).int()}, r"\(2,\).*\[3\]"),
        ({"topk": 1024}, r"1024, 512 is prepared"),
    ],
)
def test_selection_refuses(started, change, message):
    kernels, fake = started
    if message is None:
        kernels.select_pools(**select_arguments() | change)
        return
    with pytest.raises(ValueError, match=message):
        kernels.select_pools(**select_arguments() | change)
    assert not fake.log


@pytest.mark.parametrize(
    ("page_size", "record", "unit", "reach"),
    [
        (512, 528, 8448, "18,141,941,858,304"),
        (2304, 304, 8448, "18,141,941,858,304"),
        # One index page a page: a block is whole records, and no multiple of an index page.
        (256, 528, 528, "1,133,871,366,144"),
        (256, 304, 16, "34,359,738,368"),
    ],
)
def test_an_index_cache_beyond_int32_units_is_refused_with_the_numbers(
    page_size, record, unit, reach
):
    sizes = provider.Sizes(**GLM | {"page_size": page_size, "record_bytes": record})
    assert sizes.page_unit == unit
    stride = unit * math.lcm(record, 8448)
    most = (2**31 - 1) // (stride // unit) + 1
    assert provider.page_units(most, stride, unit) == stride // unit
    with pytest.raises(ValueError) as error:
        provider.page_units(most + 1, stride, unit)
    for part in (f"{most + 1:,} pages", f"{stride:,} bytes", reach, "utilization"):
        assert part in str(error.value)


@pytest.mark.parametrize("record", [528, 304])
def test_selection_reaches_all_memory_of_eight_gpus(record):
    """vLLM lays the pages of all layers into one allocation: a layer's span all of it."""
    unit = provider.Sizes(**GLM | {"record_bytes": record}).page_unit
    assert provider.page_units(8 * 288 * 10**9 // PAGE_BYTES, PAGE_BYTES, unit) == 1


def test_a_cache_that_is_bound_is_checked_like_one_that_is_read(started):
    kernels, fake = started
    kernels.check_index_cache(torch.zeros(8, PLACES, INDEX, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"8976 bytes apart, need a multiple of 8448"):
        kernels.check_index_cache(
            torch.zeros(8, 8976).byte()[:, :PAGE_BYTES].unflatten(1, (PLACES, INDEX))
        )
    # No memory behind them.
    most = torch.empty((2**31, PLACES, INDEX), dtype=torch.uint8, device="meta")
    kernels.check_index_cache(most)
    more = torch.empty((2**31 + 1, PLACES, INDEX), dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match=r"2,147,483,649 pages.*18,141,941,858,304"):
        kernels.check_index_cache(more)
    assert not fake.log


# Results, on the emulation


@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (3, 64), (17, 16), (257, 16)])
def test_attention_is_the_reference(started, rows, heads):
    kernels, fake = started
    records = ref.quantize_records(torch.randn(500, 512))
    q = torch.randn(rows, heads, 512).bfloat16()
    ids = torch.randint(-1, 500, (rows, 2051), dtype=torch.int32)
    counts = torch.randint(0, 60, (rows,), dtype=torch.int32)
    counts[0] = 2051 if rows < 20 else 100
    if rows > 2:
        counts[1], counts[2] = 0, 40
        ids[2] = -1  # columns to read, none of them valid
    out, lse = kernels.attend(q, records, ids, counts, SCALE)
    want, want_lse = ref.TorchReferenceKernels(torch.float64).attend(q, records, ids, counts, SCALE)
    torch.testing.assert_close(out, want, rtol=0, atol=0)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    assert out.is_contiguous() and lse.is_contiguous()
    if rows > 2:
        assert bool((out[1:3] == 0).all()) and bool(torch.isneginf(lse[1:3]).all())
    assert {launch.kind for launch in fake.log} == {"decode" if rows <= 256 else "extend"}


def test_the_lists_of_the_real_engine_are_wider_than_a_selection(monkeypatch):
    """vLLM's buffer has 2,176 columns, b12x takes 2,051 or 2,112; what lies past is never read."""
    fake = emulation.Emulation()
    kernels = provider.B12xKernels(ref.TorchReferenceKernels())
    monkeypatch.setattr(provider, "DECODE_ROWS", (1, 4))
    fake.attach(kernels, monkeypatch).warm_up(
        CPU,
        pool_size=4,
        dcp_world_size=4,
        interleave=4,
        **GLM | {"width": 2176, "head_counts": (8,)},
    )
    assert kernels.sizes.width == 2051 and not kernels.passes_on
    records = ref.quantize_records(torch.randn(90, 512))
    for rows in (3, 9):
        q = torch.randn(rows, 8, 512).bfloat16()
        ids = torch.full((rows, 2176), 0x7FFFFFFF, dtype=torch.int32)
        ids[:, :2051] = torch.randint(-1, 90, (rows, 2051), dtype=torch.int32)
        counts = torch.full((rows,), 40, dtype=torch.int32)
        counts[0] = 2051
        out, lse = kernels.attend(q, records, ids, counts, SCALE)
        want = ref.TorchReferenceKernels(torch.float64).attend(q, records, ids, counts, SCALE)
        torch.testing.assert_close(out, want[0], rtol=0, atol=0)
        torch.testing.assert_close(lse, want[1], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"2051.*2176"):
        kernels.attend(q, records, ids[:, :2051].contiguous(), counts, SCALE)


def scratch_of(shapes):
    return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]


def attention_shapes(kernels, heads=16):
    return kernels.scratch_shapes(max_records=None, max_tokens=8192, num_heads=heads, width=2051)


def test_results_do_not_lie_in_the_scratch(started):
    kernels, fake = started
    records = ref.quantize_records(torch.randn(50, 512))
    scratch = scratch_of(attention_shapes(kernels))
    for rows in (2, 300):
        arguments = attend_arguments(rows=rows) | {"records": records, "scratch": scratch}
        arguments["counts"].fill_(1)
        out, lse = kernels.attend(**arguments)
        before = out.clone(), lse.clone()
        scratch[0].fill_(0xFF)
        assert torch.equal(out, before[0]) and torch.equal(lse, before[1])
    places = {launch.tensors["scratch"].data_ptr() for launch in fake.log}
    assert places == {scratch[0].data_ptr()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scratch: scratch[:1], "1 tensors of scratch, need 3"),
        (lambda scratch: [scratch[0][:-1], *scratch[1:]], r"scratch 0 is .* need at least"),
        (lambda scratch: [scratch[0].short(), *scratch[1:]], r"scratch 0 is .*int16.*uint8"),
        (lambda scratch: [scratch[0], scratch[1].repeat(2)[::2], scratch[2]], r"contiguous"),
        (
            lambda scratch: [torch.empty(scratch[0].numel() + 8).byte()[8:], *scratch[1:]],
            r"scratch 0 starts at .*multiples of 16",
        ),
    ],
)
def test_scratch_that_does_not_fit_is_refused(started, change, message):
    kernels, fake = started
    scratch = change(scratch_of(kernels.selection_scratch_shapes()))
    with pytest.raises(ValueError, match=message):
        kernels.select_pools(**select_arguments(), scratch=scratch)
    assert not fake.log


@pytest.fixture
def manager(monkeypatch):
    from vllm.platforms.ckv_reference import declare_torchvision_ops

    declare_torchvision_ops()
    from vllm.v1.worker import workspace as stock

    # It empties the accelerator's cache before it allocates; without one torch raises.
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    stock.reset_workspace_manager()
    stock.init_workspace_manager(CPU)
    yield stock.current_workspace_manager()
    stock.reset_workspace_manager()


def test_a_workspace_that_grew_after_the_reservation_leaves_no_stale_address(started, manager):
    """As when another user of vLLM's workspace asks for more, later in the profiling run."""
    from vllm.v1.attention.backends.mla.ckv_gather.workspace import KernelScratch

    kernels, fake = started
    scratch = KernelScratch(
        tuple(attention_shapes(kernels)), tuple(kernels.selection_scratch_shapes())
    )
    scratch.reserve()
    assert manager._current_workspaces[0].numel() == scratch.num_bytes
    records = ref.quantize_records(torch.randn(50, 512))
    arguments = attend_arguments(rows=3) | {"records": records}
    arguments["counts"].fill_(1)

    def launched():
        fake.log.clear()
        results = kernels.attend(**arguments, scratch=scratch.borrow_attention())
        kernels.select_pools(**select_arguments(), scratch=scratch.borrow_selection())
        first = manager._current_workspaces[0].data_ptr()
        end = first + manager._current_workspaces[0].numel()
        for launch in fake.log:
            names = ["scratch", "table", "lengths"] if launch.kind == "select" else ["scratch"]
            for name in names:
                assert first <= launch.tensors[name].data_ptr() < end, (launch.kind, name)
        assert [launch.kind for launch in fake.log] == ["decode", "select"]
        return results

    before, old = launched(), manager._current_workspaces[0]
    manager.get_simultaneous(((scratch.num_bytes + 1,), torch.uint8))
    manager.lock()
    assert manager._current_workspaces[0].data_ptr() != old.data_ptr()
    old.fill_(0xAB)
    after = launched()
    assert all(map(torch.equal, before, after)) and bool((old == 0xAB).all())


def tensors_in(thing):
    """Every tensor among the fields of ``thing``, of its fields, and so on."""
    seen, todo, found = set(), [thing], []
    while todo:
        thing = todo.pop()
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        elif id(thing) not in seen and not isinstance(thing, type):
            seen.add(id(thing))
            if isinstance(thing, dict):
                todo += thing.values()
            elif isinstance(thing, list | tuple):
                todo += thing
            elif type(thing).__module__.startswith("b12x") and hasattr(thing, "__dict__"):
                todo += vars(thing).values()
    return found


def test_what_the_package_prepares_keeps_no_address():
    """Its own states and decode launches; what an extension compiles is called with addresses."""
    launch = importlib.import_module("b12x.attention._shared.mla.kernel")
    preparation = importlib.import_module("b12x.attention.dsa_indexer._preparation")
    device = SimpleNamespace(identity=SimpleNamespace(sm_count=emulation.MULTIPROCESSORS))
    plans = provider.declare(provider.Sizes(**GLM), CPU)
    for row_plan in (plans.decode[16][3], plans.extend[16]):
        state = row_plan.plan._materialize(None, device)
        rows = row_plan.rows
        ids = torch.zeros(rows, 2051, dtype=torch.int32)
        cache = torch.zeros(1, 64, RECORD, dtype=torch.uint8)
        q = torch.zeros(rows, 16, 512, dtype=torch.bfloat16)
        given = [torch.empty(provider._scratch_bytes(row_plan.plan)).byte() for _ in range(2)]
        for scratch in given:
            binding = state.bind(
                scratch=scratch,
                q=q,
                selected_indices=ids,
                cache_seqlens_int32=ids[:, 0].contiguous(),
                nsa_cache_seqlens_int32=ids[:, 0].contiguous(),
                kv_cache=cache,
            )
            begin, end = scratch.data_ptr(), scratch.data_ptr() + scratch.numel()
            views = tensors_in(binding.scratch)
            assert len(views) > 1
            assert all(begin <= view.data_ptr() <= end for view in views)
        assert not tensors_in(state)
        if state.caps.mode == "decode":
            prepared = launch.prepare_unified_decode_launch(
                q_all=q,
                swa_k_cache=cache,
                swa_indices=ids,
                workspace=binding.scratch,
                swa_page_size=64,
                sm_count=state.sm_count,
                scale_format_override=state.caps.scale_format,
                model_type_override=state.caps.model_type,
                fp8_rope_override=state.caps.fp8_rope,
                return_lse=True,
                controls={},
            )
            assert prepared.rows == rows and not tensors_in(prepared)
    selection = emulation._Selection(plans.select[0].plan, [])
    state = preparation._DsaIndexerState(selection.layout, None, {})
    scratch = torch.empty(provider._scratch_bytes(plans.select[0].plan)).byte()
    state.bind(
        scratch=scratch,
        real_page_table=torch.zeros(8, 4, dtype=torch.int32),
        cache_seqlens_int32=torch.zeros(8, dtype=torch.int32),
        active_width=torch.zeros(1, dtype=torch.int32),
    )
    assert not tensors_in(state)


@pytest.mark.parametrize("gap", [0, PAGE_BYTES * 3])
def test_selection_is_the_reference(started, gap):
    kernels, fake = started
    lengths = [3, 64 * 9 + 5, 700]  # of three requests, in pools
    pages = 30
    storage = torch.full((pages, PAGE_BYTES + gap), 0x7F, dtype=torch.uint8)
    index = storage[:, :PAGE_BYTES].unflatten(1, (PLACES, INDEX))
    keys, scales = ref.index_planes(index)
    keys.copy_(torch.randn(keys.shape).to(torch.float8_e4m3fn).view(torch.uint8))
    scales.copy_(torch.rand(pages, PLACES, 1).view(torch.uint8))
    table = torch.randperm(pages)[: 3 * 10].int().view(3, 10)
    table = torch.cat([table, torch.full((3, 2), 0x7FFFFFFF, dtype=torch.int32)], 1)
    req = int32([1, -1, 0, 2, 2, 1, -1])
    counts = int32([lengths[1], 99, 3, 700, 12, 513, 0])
    table[2, 9:] = table[2, 1]  # 700 pools need eleven pages
    table[2, 10] = table[2, 2]
    q = torch.randn(7, 32, 128).to(torch.float8_e4m3fn)
    weights = torch.randn(7, 32)
    got = kernels.select_pools(q, weights, index, table, req, counts, 512)
    want = ref.TorchReferenceKernels().select_pools(q, weights, index, table, req, counts, 512)
    # Two requests' pages are one here, so that equal scores occur: compare what they score.
    assert torch.equal(got[1], want[1])
    same = got[0] == want[0]
    assert bool(same[[0, 1, 2, 4, 5, 6]].all())
    assert len(set(got[0][3].tolist())) == 512
    assert [launch.kind for launch in fake.log] == ["select"]


# What is launched at TP4/DCP4


def test_every_plan_is_prepared_once_in_the_warm_up_and_nothing_later(started):
    kernels, fake = started
    names = len(provider.DECODE_ROWS) + 1
    assert len(fake.prepared) == len(set(fake.prepared)) == 2 * names + 3 + 2
    assert all(plan.prepared is not None for _, plan in kernels.plans.names())
    prepared, plans = list(fake.prepared), kernels.plans
    kernels.warm_up(CPU, pool_size=4, dcp_world_size=4, interleave=4, **GLM)
    assert (fake.prepared, kernels.plans) == (prepared, plans)
    with pytest.raises(RuntimeError, match="cannot become"):
        kernels.warm_up(CPU, pool_size=4, dcp_world_size=4, interleave=4, **GLM | {"page_size": 64})


OPERATIONS = {
    "attend": lambda rows: attend_arguments(rows) | {"counts": torch.ones(rows).int()},
    "select_pools": lambda rows: select_arguments(rows),
    "write_records": lambda rows: write_arguments(rows),
}
"""What launches on b12x, with arguments for a number of rows."""


def test_nothing_but_preparing_is_asked_of_the_packages_session(monkeypatch):
    """To freeze or to capture stops whatever compiles in this process, stock vLLM's kernels too."""
    runtime = importlib.import_module("b12x._lib.runtime_control")
    guards = []

    def guard(reason=None):
        guards.append(reason)
        return contextlib.nullcontext()

    for module in (runtime, importlib.import_module("b12x.preparation.session")):
        monkeypatch.setattr(module, "kernel_resolution_guard", guard)
    fake = emulation.Emulation()
    kernels = provider.B12xKernels(ref.TorchReferenceKernels())
    monkeypatch.setattr(provider, "DECODE_ROWS", (1, 4))
    fake.attach(kernels, monkeypatch).warm_up(
        CPU, pool_size=4, dcp_world_size=4, interleave=4, **GLM | {"head_counts": (16,)}
    )
    for name, arguments in OPERATIONS.items():
        for rows in (3, 300):
            getattr(kernels, name)(**arguments(rows))
    assert {launch.kind for launch in fake.log} == {"decode", "extend", "select", "write"}
    # Two sizes and the plan for many rows, three selections, two writers.
    assert [name for name, *_ in fake.session.method_calls] == ["prepare"] * (3 + 3 + 2)
    assert not guards and not runtime.kernel_resolution_frozen()


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_keeps_none_of_its_operands(started, operation, rows):
    """Kept bindings would keep a step's activations, which nobody has reserved memory for."""
    kernels, fake = started
    arguments = OPERATIONS[operation](rows)
    results = getattr(kernels, operation)(**arguments) or ()
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    alive = [weakref.ref(tensor) for tensor in (*tensors, *results)]
    assert len(alive) >= 3 and fake.log
    fake.log.clear()
    del arguments, tensors, results
    gc.collect()
    assert not any(tensor() is not None for tensor in alive)


def record_only(fake, monkeypatch):
    """Keep the launches, compute nothing."""

    def run(self, binding, *, kv_cache):
        q, scratch = binding.q, binding.scratch
        rows = q.shape[0]
        tensors = {"scratch": scratch.shared_scratch}
        fake.log.append(emulation.Launch(self.caps.mode, rows, self.plan, tensors))
        assert self.caps.mode == "extend" or rows <= self.primed_rows
        return scratch.output_buffer[:rows], scratch.final_lse[:rows, : q.shape[1]]

    monkeypatch.setattr(emulation._Attention, "run", run)


def test_no_plan_is_missing_for_any_row_count(started):
    plans = started[0].plans
    for heads in (16, 64):
        for rows in range(1, 16_385):
            row_plan = plans.attention(rows, heads)
            if rows <= provider.DECODE_ROWS[-1]:
                # One launch, by the plan of the next power of two.
                assert rows <= row_plan.rows < 2 * rows and row_plan.natural_lse
            else:
                assert row_plan is plans.extend[heads] and not row_plan.natural_lse
    for rows in range(1, provider.SELECT_ROWS[-1] + 1):
        assert rows <= provider._smallest(plans.select, rows).rows


def cuda_graph_sizes(monkeypatch, max_num_seqs, tokens_per_request):
    """The batch sizes for which stock vLLM captures graphs on compute capability 12.x."""
    from vllm.platforms.ckv_reference import declare_torchvision_ops

    declare_torchvision_ops()
    from vllm.config import VllmConfig
    from vllm.config.compilation import CUDAGraphMode

    platform = SimpleNamespace(is_device_capability_family=lambda family: family == 120)
    monkeypatch.setattr(vllm.platforms, "current_platform", platform, raising=False)
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        max_cudagraph_capture_size=None,
        cudagraph_capture_sizes=None,
        post_init_cudagraph_sizes=lambda: None,
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192),
        uniform_decode_query_len=tokens_per_request,
        speculative_config=None,
        performance_mode="balanced",
    )
    VllmConfig._set_cudagraph_sizes(config)
    return compilation.cudagraph_capture_sizes


@pytest.mark.parametrize(
    ("max_num_seqs", "tokens_per_request", "largest"),
    [(1, 1, 2), (37, 4, 288), (256, 1, 512), (1024, 2, 512)],
)
def test_every_cuda_graph_is_one_launch_in_the_same_scratch(
    started, monkeypatch, max_num_seqs, tokens_per_request, largest
):
    """A graph holds one address, so one batch size must always take one plan, whole."""
    kernels, fake = started
    sizes = cuda_graph_sizes(monkeypatch, max_num_seqs, tokens_per_request)
    assert (sizes[0], sizes[-1]) == (1, largest)
    record_only(fake, monkeypatch)
    for heads in (16, 64):
        scratch = scratch_of(attention_shapes(kernels, heads))
        arguments = attend_arguments(rows=sizes[-1], heads=heads) | {"scratch": scratch}
        for rows in sizes:
            fake.log.clear()
            part = {k: v[:rows] for k, v in arguments.items() if k in ("q", "row_ids", "counts")}
            for _capture_and_replay in range(2):
                kernels.attend(**arguments | part)
            assert [launch.rows for launch in fake.log] == [rows] * 2
            assert len({id(launch.plan) for launch in fake.log}) == 1
            expected = "decode" if rows <= provider.DECODE_ROWS[-1] else "extend"
            assert {launch.kind for launch in fake.log} == {expected}
            places = {launch.tensors["scratch"].data_ptr() for launch in fake.log}
            assert places == {scratch[0].data_ptr()}


@pytest.mark.parametrize(
    ("multiprocessors", "heads", "mean", "most"),
    [
        (188, 64, 1.0, 1.3),
        (170, 64, 1.0, 1.6),
        (48, 64, 1.0, 1.3),
        (188, 16, 1.2, 1.8),
        (170, 16, 1.3, 2.2),
        (48, 16, 1.1, 1.4),
    ],
)
def test_what_plans_for_powers_of_two_cost_by_the_packages_own_rule(
    monkeypatch, multiprocessors, heads, mean, most
):
    """Columns that a multiprocessor reads one after the other, in chunks of 64.

    Against a plan for each size that vLLM captures. RTX PRO 6000, RTX 5090, DGX Spark; 64 heads are
    all those of GLM-5.3-Flash, which decode has under DCP. A count, not a time: it decides into how
    many parts b12x splits, and the rows of a plan's limit do too.
    """
    kernel = importlib.import_module("b12x.attention._shared.mla.kernel")

    def chunks(rows, limit):
        blocks = -(-heads // 16)
        _, parts, chunks = kernel.plan_unified_decode_splits(
            topk=2051,
            max_chunks=provider.split_parts(heads, limit, 2051),
            num_tokens=limit,
            h_blocks=blocks,
            sm_count=multiprocessors,
        )
        return -(-rows * blocks * parts // multiprocessors) * chunks

    sizes = [n for n in cuda_graph_sizes(monkeypatch, 256, 1) if n <= provider.DECODE_ROWS[-1]]
    limits = [next(limit for limit in provider.DECODE_ROWS if n <= limit) for n in sizes]
    costs = [chunks(n, limit) / chunks(n, n) for n, limit in zip(sizes, limits, strict=True)]
    assert len(costs) > 30 and sum(costs) / len(costs) <= mean and max(costs) <= most


@pytest.mark.parametrize("heads", [16, 64])
def test_a_graph_of_a_whole_chunk_is_the_same_pieces_each_time(started, monkeypatch, heads):
    """Users may name sizes beyond vLLM's own; a piece more is a launch more in the graph."""
    kernels, fake = started
    record_only(fake, monkeypatch)
    scratch = scratch_of(attention_shapes(kernels, heads))
    arguments = attend_arguments(rows=4096, heads=heads) | {"scratch": scratch}
    runs = []
    for _capture_and_replay in range(2):
        fake.log.clear()
        kernels.attend(**arguments)
        runs.append([(id(x.plan), x.rows, x.tensors["scratch"].data_ptr()) for x in fake.log])
    assert runs[0] == runs[1]
    assert sum(rows for _, rows, _ in runs[0]) == 4096
    assert {place for *_, place in runs[0]} == {scratch[0].data_ptr()}


@pytest.mark.parametrize("columns", [4, 2048, provider.MAX_PAGES])
def test_every_cuda_graph_selects_on_the_same_plans_in_the_same_scratch(
    started, monkeypatch, columns
):
    kernels, fake = started

    def run(self, runtime, *, output_scores, **tensors):
        output_scores.zero_()
        tensors = {"scratch": self.scratch, "table": runtime.real_page_table}
        rows = tensors["table"].shape[0]
        assert rows <= self.query.max_q_rows
        fake.log.append(emulation.Launch("select", rows, self.plan, tensors))

    monkeypatch.setattr(emulation._Selection, "run", run)
    monkeypatch.setattr(provider, "_launch_row_tables", lambda *args: None)
    monkeypatch.setattr(provider, "_launch_order", lambda *args: None)
    scratch = scratch_of(kernels.selection_scratch_shapes())
    for rows in (*cuda_graph_sizes(monkeypatch, 1024, 2), 4096):
        arguments = select_arguments(rows=rows, columns=columns) | {"scratch": scratch}
        runs = []
        for _capture_and_replay in range(2):
            fake.log.clear()
            kernels.select_pools(**arguments)
            runs.append(
                [
                    (id(x.plan), x.rows, *(t.data_ptr() for t in x.tensors.values()))
                    for x in fake.log
                ]
            )
        assert runs[0] == runs[1]
        assert sum(count for _, count, *_ in runs[0]) == rows
        if rows <= provider.SELECT_ROWS[-1] and columns <= 4096:
            assert len(runs[0]) == 1
        places = {run[2:] for run in runs[0]}
        assert places == {(scratch[0].data_ptr(), scratch[1].data_ptr())}


@pytest.mark.parametrize(
    ("rows", "heads", "expected"),
    [
        (1, 64, [("decode", 1)]),
        (5, 64, [("decode", 5)]),
        (256, 64, [("decode", 256)]),
        (257, 64, [("extend", 257)]),
        (2000, 64, [("extend", 768), ("extend", 768), ("extend", 464)]),
        (3840, 16, [("extend", 3840)]),
        (8192, 16, [("extend", 3840), ("extend", 3840), ("extend", 512)]),
    ],
)
def test_launches_of_attention(started, monkeypatch, rows, heads, expected):
    kernels, fake = started
    record_only(fake, monkeypatch)
    kernels.attend(**attend_arguments(rows=rows, heads=heads))
    assert [(launch.kind, launch.rows) for launch in fake.log] == expected
    assert len({id(launch.plan) for launch in fake.log}) == 1


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (1, 2, [1]),
        (9, 2, [9]),
        (65, 2048, [65]),
        (1100, 128, [512, 512, 76]),
        (300, 8192, [256, 44]),
    ],
)
def test_launches_of_selection(started, monkeypatch, rows, columns, expected):
    kernels, _fake = started
    shapes = []

    def run(self, runtime, *, output_scores, **tensors):
        shapes.append((runtime.real_page_table.shape, self.query.max_q_rows))
        output_scores.zero_()

    monkeypatch.setattr(emulation._Selection, "run", run)
    kernels.select_pools(**select_arguments(rows=rows, columns=columns))
    assert [shape for shape, _ in shapes] == [(n, columns) for n in expected]
    for (count, _), limit in shapes:
        assert limit == next(n for n in provider.SELECT_ROWS if count <= n)


def test_an_unprepared_plan_is_an_error_and_not_a_compilation(started, monkeypatch):
    kernels, fake = started
    monkeypatch.setattr(kernels, "plans", provider.declare(provider.Sizes(**GLM), CPU))
    with pytest.raises(RuntimeError, match=r"3 rows and 16 heads is not prepared"):
        kernels.attend(**attend_arguments(rows=3))
    with pytest.raises(RuntimeError, match="selection for 3 rows is not prepared"):
        kernels.select_pools(**select_arguments())
    assert not fake.log


def test_the_doctors_self_test_runs_on_b12x(monkeypatch):
    """Its sizes are ones that b12x has kernels for, and they are prepared before the first call."""
    from vllm.entrypoints.ckv.selftest import run_self_test

    fake = emulation.Emulation()
    kernels = fake.attach(provider.B12xKernels(ref.TorchReferenceKernels()), monkeypatch)
    assert not run_self_test(kernels).failures
    assert not kernels.passes_on
    assert {launch.kind for launch in fake.log} == {"write", "select", "decode"}


# The tests for a GPU of compute capability 12.x


@pytest.fixture(params=[528, 304], ids=["fp8", "nvfp4"])
def gpu_tests(request):
    """Their module, as if there were such a GPU, and a provider that they are passed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
        module = load("b12x_sm120_on_cpu", HERE / "test_b12x_sm120.py")
        patch.undo()
        patch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
        patch.setattr(module, "CUDA", CPU)
        patch.setattr(provider, "DECODE_ROWS", (1, 8))
        kernels = provider.B12xKernels(ref.TorchReferenceKernels())
        sizes = module.SIZES | {"record_bytes": request.param}
        emulation.Emulation().attach(kernels, patch).warm_up(CPU, **sizes)
        yield module, kernels


def test_the_gpu_tests_pass_on_the_emulation(gpu_tests):
    """What they pass is what the provider takes, and what they expect is what a GPU should give.

    All but the one that captures a graph. Nobody may come by such a GPU twice.
    """
    module, kernels = gpu_tests
    module.test_records_are_the_references_give_or_take_a_step(kernels, None)
    module.test_rows_beyond_two_to_the_31_bytes(kernels, None)
    for rows in (3, 257):
        module.test_attention(kernels, None, 16, rows)
    (gaps,) = [mark.args[1] for mark in module.test_selection.pytestmark if mark.args[0] == "gap"]
    for gap in gaps:
        module.test_selection(kernels, None, gap, 8)


# Native compilation


def test_the_programs_of_tp4_dcp4_compile_for_sm_120a():
    """In a process of its own; all geometries: benchmarks/compile_b12x.py."""
    tool = load("compile_b12x", ROOT / "benchmarks" / "compile_b12x.py")
    rows = tool.compile_set("tp4dcp4", timeout=600)
    programs = {row["program"] for row in rows}
    assert programs >= {
        "attention.mla.glm_next_kv_cache",
        "attention.mla.sm120.decode",
        "attention.mla.merge",
        "attention.mla.sm120.prefill_mg",
        "attention.indexer.paged_tiled_logits",
        "attention.indexer.tiled_topk",
        "triton._split_decode_final_lse_kernel",
        "triton._lengths_kernel",
        "triton._row_tables_kernel",
        "triton._order_kernel",
        # Of the Triton provider.
        "triton._pack_kernel",
        "triton._unpack_kernel",
        "triton._write_pools_kernel",
        "triton._expand_kernel",
        "triton._remap_kernel",
        "triton._filter_kernel",
        "triton._merge_kernel",
    }
    for row in rows:
        assert row["spill_bytes"] == 0, row
        assert row["shared_bytes"] <= tool.SHARED_LIMIT + 1024 and row["registers"] <= 255, row


def test_the_table_of_compiled_programs_is_complete():
    with (ROOT / "benchmarks" / "results" / "b12x_sm120a.csv").open() as file:
        rows = list(csv.DictReader(file))
    attention = {row["geometry"] for row in rows if "mla.sm120" in row["program"]}
    pages = [row["geometry"] for row in rows if "kv_cache" in row["program"]]
    for record in ("528 bytes", "304 bytes", "528 bytes, sm_121"):
        for heads in (8, 16, 32, 64):
            limit = provider.extend_rows(heads)
            assert f"extend/{heads} heads/{limit} rows, {record}" in attention
            for few in provider.DECODE_ROWS:
                assert f"decode/{heads} heads/{few} rows, {record}" in attention
    for page in (64, 1280, 2304, 4352, 8704):
        for record in (528, 304):
            assert f"page {page}, int64 slots, {record} bytes" in pages
    # Selection on index pages that are numbered, and on pages of 256 tokens.
    selection = {row["geometry"] for row in rows if "paged_tiled_logits" in row["program"]}
    for record in (528, 304):
        for limit in provider.SELECT_ROWS:
            assert selection >= {
                f"select/{limit} rows, {record} bytes",
                f"select/{limit} rows, page 256, {record} bytes",
            }
    assert all(int(row["spill_bytes"]) == 0 for row in rows)


def test_the_table_of_the_triton_programs_has_every_gpu_family():
    with (ROOT / "benchmarks" / "results" / "triton_families.csv").open() as file:
        rows = list(csv.DictReader(file))
    shared = {"sm_80": 163, "sm_89": 99, "sm_100": 227, "sm_120": 99, "sm_121": 99}  # KiB
    for family, limit in shared.items():
        own = [row for row in rows if row["geometry"].startswith(f"{family},")]
        assert {row["program"] for row in own} >= {
            f"triton._{name}_kernel"
            for name in (
                "write_records",
                "write_pools",
                "pack",
                "unpack",
                "logits",
                "topk",
                "settle",
            )
        } | {f"triton._{name}_kernel" for name in ("merge", "expand", "remap", "filter", "attend")}
        assert all(int(row["shared_bytes"]) <= limit * 1024 for row in own)


# The package's reference functions as oracle


def test_records_are_those_of_the_packages_reference_codec():
    """Byte for byte: both divide by amax / 448. Its kernel does not, see the next test."""
    from b12x.attention.sparse_mla import reference

    latents = (torch.randn(64, 512) * torch.logspace(-30, 4, 64).unsqueeze(1)).bfloat16()
    latents[3], latents[4, 128:256] = 0, 0
    packed = reference.pack_mla_kv_cache_reference(latents).squeeze(1)
    assert torch.equal(packed, ref.quantize_records(latents))
    unpacked = reference.unpack_mla_kv_cache_reference(packed).squeeze(1)
    assert torch.equal(unpacked, ref.dequantize_records(packed))


def test_two_writers_of_records_differ_by_one_step():
    """What to expect of b12x's kernel: scale = amax * (1 / 448), value * (1 / scale) in fp32.

    Absolute tolerance one e4m3 step of the value; scales one unit in the last place.
    """
    latents = torch.randn(200, 512).bfloat16()
    mine = ref.quantize_records(latents)
    groups = latents.float().unflatten(1, (4, 128))
    scales = groups.abs().amax(2) * torch.tensor(1 / 448, dtype=torch.float32)
    values = (groups * (1 / scales).unsqueeze(2)).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = values.flatten(1).view(torch.uint8).short()
    apart = (codes - mine[:, :512].short()).abs()
    assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 0.01
    bits = scales.view(torch.int32) - mine[:, 512:].contiguous().view(torch.int32)
    assert int(bits.abs().max()) <= 1


def test_attention_against_the_packages_reference():
    """Output one step of bf16 (2^-7 relative) or 1e-5 absolute, log-sum-exp 1e-5, cosine 1 - 1e-6.

    Both sum in float32, in an order that depends on the machine, and then round to bf16. One
    element in a thousand may differ at all; it was one in 5,000.
    """
    from b12x.attention.sparse_mla import reference

    records = ref.quantize_records(torch.randn(300, 512))
    q = torch.randn(9, 16, 512).bfloat16()
    ids = torch.randint(-1, 300, (9, 2051), dtype=torch.int32)
    counts = int32([2051, 0, 1, 63, 64, 65, 100, 2000, 7])
    ids[8] = -1
    want, want_lse = reference.sparse_mla_reference(
        q_all=q,
        kv_cache=records.unsqueeze(1),
        page_table_1=ids,
        active_token_counts=counts,
        sm_scale=SCALE,
        v_head_dim=512,
        return_lse=True,
    )
    out, lse = ref.TorchReferenceKernels().attend(q, records, ids, counts, SCALE)
    torch.testing.assert_close(out.float(), want.float(), rtol=2**-7, atol=1e-5)
    assert float((out != want).float().mean()) < 1e-3
    # Its log-sum-exp is of base 2 whatever the plan says.
    torch.testing.assert_close(lse, want_lse * math.log(2), rtol=1e-5, atol=1e-5)
    live = [0, 2, 3, 4, 5, 6, 7]
    cosine = torch.cosine_similarity(out[live].flatten(1).float(), want[live].flatten(1).float())
    assert float(cosine.min()) > 1 - 1e-6
    assert bool((want[[1, 8]] == 0).all()) and bool(torch.isneginf(want_lse[[1, 8]]).all())


def test_index_pages_and_logits_against_the_packages_reference():
    """Pages byte for byte; scores 1e-4 relative or 1e-4 absolute (fp32 sums of 32 heads)."""
    from b12x.attention.dsa_indexer import reference

    keys = torch.randn(64 * 5 + 9, 128)
    cache = reference.pack_index_k_cache_reference(keys)
    planes, scales = ref.index_planes(cache)
    assert cache.shape == (6, PAGE_BYTES)
    flat = planes.contiguous().view(torch.float8_e4m3fn).float().flatten(0, 1)
    flat = flat * scales.contiguous().view(torch.float32).flatten().unsqueeze(1)
    unpacked = reference.unpack_index_k_cache_reference(cache, num_tokens=keys.shape[0])
    assert torch.equal(flat[: keys.shape[0]], unpacked)

    table = torch.randperm(6).int().unsqueeze(0)
    q = torch.randn(4, 32, 128).to(torch.float8_e4m3fn)
    weights = torch.randn(4, 32)
    counts = int32([1, 64, 200, 329])
    logits = reference.paged_decode_logits_reference(
        q_fp8=q,
        weights=weights,
        index_k_cache=cache,
        real_page_table=table,
        query_row_to_batch=torch.zeros(4, dtype=torch.int32),
        seqlens_per_query=counts,
    )
    ids, scores = ref.TorchReferenceKernels().select_pools(
        q, weights, cache, table, torch.zeros(4, dtype=torch.int32), counts, 512
    )
    for row in range(4):
        live = int(counts[row])
        assert ids[row, :live].tolist() == list(range(live))
        torch.testing.assert_close(scores[row, :live], logits[row, :live], rtol=1e-4, atol=1e-4)


# Under Triton's interpreter, in a process of its own


def test_the_kernels_of_this_module_under_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    suite = HERE / "b12x_interpreted.py"
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    assert " passed" in child.stdout and " failed" not in child.stdout


# NVFP4


def test_nvfp4_selects_its_record_and_its_capacity():
    from vllm.platforms.ckv_reference import declare_torchvision_ops

    declare_torchvision_ops()
    from vllm.v1.attention.backends.mla.b12x_mla_sparse import B12xMLASparseBackend
    from vllm.v1.attention.backends.mla.ckv_gather.geometry import PageGeometry
    from vllm.v1.attention.backends.mla.ckv_gather.plan import CkvGather
    from vllm.v1.attention.backends.mla.ckv_gather.workspace import WorkspacePlan

    assert B12xMLASparseBackend.supports_kv_cache_dtype("nvfp4_ds_mla")
    records = [CkvGather.record_format(name) for name in ("fp8_ds_mla", "nvfp4_ds_mla")]
    wanted = r"pass --kv-cache-dtype fp8_ds_mla, or nvfp4_ds_mla on .* 12\.x with b12x"
    with pytest.raises(ValueError, match=wanted):
        CkvGather.record_format("auto")
    rows = []
    for record, width in zip(records, (528, 304), strict=True):
        geometry = PageGeometry(2304, record, 4, 4, 4)
        plan = WorkspacePlan.from_geometry(geometry, 524_288, 32)
        assert plan.latents == (525_312, width)
        rows.append(plan.num_bytes)
    assert rows[0] - rows[1] == 525_312 * (528 - 304)


def test_other_cuda_kernels_refuse_nvfp4_at_start():
    triton_kernels = importlib.import_module(f"{sparse_mla_kernels.__name__}.triton")
    with pytest.raises(ValueError, match=r"528 bytes, not of 304.*fp8_ds_mla"):
        triton_kernels.TritonKernels().warm_up(
            CPU, pool_size=4, dcp_world_size=1, interleave=4, **GLM | {"record_bytes": 304}
        )


def test_nvfp4_on_the_emulation(monkeypatch):
    fake = emulation.Emulation()
    kernels = provider.B12xKernels(ref.TorchReferenceKernels())
    monkeypatch.setattr(provider, "DECODE_ROWS", (1, 4))
    sizes = GLM | {"record_bytes": 304, "head_counts": (8,), "page_size": 64}
    fake.attach(kernels, monkeypatch).warm_up(
        CPU, pool_size=4, dcp_world_size=1, interleave=4, **sizes
    )
    cache = torch.zeros(2, 64, 304, dtype=torch.uint8)
    kernels.write_records(torch.randn(99, 512).bfloat16(), cache, torch.arange(99))
    assert torch.equal(cache[1, 35:], torch.zeros(29, 304, dtype=torch.uint8))
    q = torch.randn(3, 8, 512).bfloat16()
    ids = torch.randint(0, 99, (3, 2051), dtype=torch.int32)
    arguments = (q, cache.flatten(0, 1), ids, int32([50, 1, 0]), SCALE)
    out, lse = kernels.attend(*arguments)
    want, want_lse = ref.TorchReferenceKernels(torch.float64).attend(*arguments)
    torch.testing.assert_close(out, want, rtol=0, atol=0)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
