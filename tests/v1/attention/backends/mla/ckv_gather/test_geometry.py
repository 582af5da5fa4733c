# SPDX-License-Identifier: Apache-2.0
"""Ownership, capacity, validation and freezing of the page geometry."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.attention.backends.mla.ckv_gather import geometry as g

GLM = {"record": g.FP8_DS_MLA, "pool_size": 4, "interleave": 4, "dcp_world_size": 4}


def make(page_size=2304, **changes):
    return g.PageGeometry(page_size=page_size, **{**GLM, **changes})


ranks = st.integers(1, 9)
interleaves = st.sampled_from([1, 2, 4, 12, 64])


def test_sizes_of_the_records():
    assert (g.FP8_DS_MLA.record_bytes, g.FP8_DS_MLA.scale_offset) == (528, 512)
    assert g.NVFP4_DS_MLA.record_bytes == 304
    assert g.INDEX_RECORD_BYTES == g.INDEX_KEY_BYTES + 4 == 132
    assert g.INDEX_RECORD_BYTES / 4 == 33
    assert g.INDEX_PAGE_BYTES == 8448


@pytest.mark.parametrize("page_size, capacity", [(64, 131_200), (2304, 131_328)])
def test_worked_capacity(page_size, capacity):
    sizes = {"max_tokens": 524_288, "max_num_seqs": 32}
    assert make(page_size).capacity(**sizes) == capacity
    assert (
        g.per_rank_capacity(interleave=4, page_size=page_size, dcp_world_size=4, **sizes)
        == capacity
    )


def test_worked_shortage_of_a_plan_made_too_early():
    sizes = {"max_tokens": 524_288, "max_num_seqs": 32}
    early, final = make(64).capacity(**sizes), make(2304).capacity(**sizes)
    assert final * 4 == 525_312
    # Nine rank-sized spans, each 128 records of 528 bytes short.
    assert (final - early) * 528 * 9 == 608_256


@pytest.mark.parametrize(
    "page_size, world, expected", [(2048, 4, 512), (2048, 2, 1024), (512, 4, 128), (512, 3, 512)]
)
def test_worked_alignments(page_size, world, expected):
    assert g.rank_alignment(page_size=page_size, dcp_world_size=world) == expected
    # One record more than a whole span takes the next one.
    span = g.per_rank_capacity(
        max_tokens=world * expected, max_num_seqs=1, interleave=1, page_size=page_size,
        dcp_world_size=world,
    )  # fmt: skip
    assert span == 2 * expected


@given(ranks, interleaves, st.integers(0, 5_000_000_000))
def test_owner_and_local_index_invert(world, interleave, token):
    split = {"dcp_world_size": world, "interleave": interleave}
    rank, local = g.owner_of(token, **split), g.local_index_of(token, **split)
    assert 0 <= rank < world
    assert g.global_index_of(local, rank, **split) == token


@given(ranks, interleaves, st.integers(0, 700))
def test_local_lengths_count_the_owned_tokens(world, interleave, length):
    split = {"dcp_world_size": world, "interleave": interleave}
    owned = [[] for _ in range(world)]
    for token in range(length):
        owned[g.owner_of(token, **split)].append(g.local_index_of(token, **split))
    for rank in range(world):
        # The owned tokens of a prefix fill the local indices 0, 1, 2, ... without a hole.
        assert owned[rank] == list(range(g.local_length(length, rank, **split)))


@given(st.integers(1, 9), st.integers(0, 40), st.sampled_from([1, 2, 4]), st.integers(0, 3000))
def test_a_pool_lives_where_its_tokens_live(world, pool, pool_size, length):
    interleave = pool_size * 3
    pools = {"dcp_world_size": world, "interleave": interleave // pool_size}
    tokens = {"dcp_world_size": world, "interleave": interleave}
    for offset in range(pool_size):
        token = pool * pool_size + offset
        assert g.owner_of(token, **tokens) == g.owner_of(pool, **pools)
        assert g.local_index_of(token, **tokens) // pool_size == g.local_index_of(pool, **pools)
    for rank in range(world):
        local = g.local_length(length, rank, **tokens)
        assert g.local_length(length // pool_size, rank, **pools) == local // pool_size


@given(
    st.integers(2, 8),
    st.sampled_from([4, 16, 64]),
    st.lists(st.integers(0, 900), min_size=1, max_size=12),
)
def test_capacity_holds_every_admitted_batch(world, interleave, lengths):
    total = max(sum(lengths), 1)
    geometry = make(64, interleave=interleave, dcp_world_size=world)
    sizes = {"max_tokens": total, "max_num_seqs": len(lengths)}
    for rank in range(world):
        split = {"dcp_world_size": world, "interleave": interleave}
        assert sum(g.local_length(n, rank, **split) for n in lengths) <= geometry.capacity(**sizes)
        split = {"dcp_world_size": world, "interleave": interleave // 4}
        pools = sum(g.local_length(n // 4, rank, **split) for n in lengths)
        assert pools <= geometry.pool_capacity(**sizes)
    assert geometry.capacity(**sizes) * world % 64 == 0
    assert geometry.pool_capacity(**sizes) * world % 64 == 0


@pytest.mark.parametrize("page_size", [64, 1280, 2304, 4352, 8704])
def test_pages_of_the_real_model_are_accepted(page_size):
    geometry = make(page_size)
    assert geometry.page_bytes == page_size * 528
    assert geometry.pools_per_page == page_size // 4
    assert geometry.pool_interleave == 1


@pytest.mark.parametrize(
    "page_size, changes, parts",
    [
        (100, {}, ["page_size 100", "64", "--block-size to 128"]),
        (2304, {"interleave": 6}, ["interleave 6", "pool_size 4", "to 8"]),
        (64, {"interleave": 128}, ["interleave 128", "page_size 64", "divisor"]),
        (0, {}, ["page_size is 0", "1"]),
        (64, {"dcp_world_size": 0}, ["dcp_world_size is 0"]),
    ],
)
def test_refused_sizes_name_value_and_limit(page_size, changes, parts):
    with pytest.raises(ValueError) as error:
        make(page_size, **changes)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("value", [64.0, "64", True, None])
def test_sizes_must_be_integers(value):
    with pytest.raises(TypeError, match="page_size"):
        make(value)


def test_case_6_kernel_page_smaller_than_the_manager_page():
    # With I=64, N=2 token 64 belongs to rank 1 whatever the page; a rank whose page is 256
    # stores its first 256 tokens, which are not the first 256 of the request, in page 0.
    geometry = make(256, interleave=64, dcp_world_size=2)
    split = {"dcp_world_size": 2, "interleave": 64}
    assert g.owner_of(64, **split) == 1
    assert g.local_index_of(448, **split) == 0 + 192
    assert g.local_index_of(512, **split) == 256 == geometry.page_size
    frozen = g.FrozenGeometry()
    frozen.freeze(geometry)
    with pytest.raises(ValueError, match=r"pages of 64 tokens.*256"):
        frozen.check_cache((8, 64, 528), (64 * 528, 528, 1))


def test_case_1_freeze_is_idempotent_and_names_both_pages():
    frozen = g.FrozenGeometry()
    assert not frozen.is_frozen
    with pytest.raises(RuntimeError, match="not frozen"):
        frozen.get()
    with pytest.raises(RuntimeError, match="not frozen"):
        frozen.check_cache((8, 2304, 528), (2304 * 528, 528, 1))
    assert frozen.freeze(make(2304)) == make(2304)
    assert frozen.freeze(make(2304)) is frozen.get()
    with pytest.raises(RuntimeError, match=r"page_size 2304.*page_size 64"):
        frozen.freeze(make(64))
    with pytest.raises(RuntimeError, match=r"528.*304"):
        frozen.freeze(make(2304, record=g.NVFP4_DS_MLA))
    assert frozen.get().page_size == 2304


def test_check_cache_accepts_padding_of_whole_records():
    frozen = g.FrozenGeometry()
    frozen.freeze(make(64))
    assert frozen.check_cache((8, 64, 528), (64 * 528, 528, 1)) == 64
    assert frozen.check_cache((8, 64, 528), (70 * 528, 528, 1)) == 70


@pytest.mark.parametrize(
    "shape, strides, parts",
    [
        ((8, 64, 304), (64 * 304, 304, 1), ["304", "528", "fp8_ds_mla"]),
        ((8, 64, 656), (64 * 656, 656, 1), ["656", "528"]),
        ((8, 128, 528), (128 * 528, 528, 1), ["128", "64"]),
        ((8, 64, 528), (64 * 1056, 1056, 2), ["(1056, 2)", "(528, 1)"]),
        ((8, 64, 528), (64 * 656, 656, 1), ["(656, 1)", "(528, 1)"]),
        ((8, 64, 528), (63 * 528, 528, 1), [str(63 * 528), str(64 * 528)]),
        ((8, 64, 528), (64 * 528 + 8, 528, 1), [str(64 * 528 + 8), "528"]),
        ((8, 528), (528, 1), ["(8, 528)", "(pages, 64, 528)"]),
    ],
)
def test_case_18_a_cache_of_another_width_or_stride(shape, strides, parts):
    frozen = g.FrozenGeometry()
    frozen.freeze(make(64))
    with pytest.raises(ValueError) as error:
        frozen.check_cache(shape, strides)
    for part in parts:
        assert part in str(error.value)


def test_rows_beyond_int32_are_refused():
    frozen = g.FrozenGeometry()
    frozen.freeze(make(64))
    strides = (64 * 528, 528, 1)
    # The last row of 2**25 pages of 64 records is the largest int32.
    assert frozen.check_cache((2**25, 64, 528), strides) == 64
    with pytest.raises(ValueError, match=r"2,147,483,711, row ids of int32 reach 2,147,483,647"):
        frozen.check_cache((2**25 + 1, 64, 528), strides)
    with pytest.raises(ValueError, match="row ids of int32"):
        frozen.check_cache((2**25, 64, 528), (65 * 528, 528, 1))


def test_geometry_needs_no_torch():
    # Loaded by path, because importing the package's parents imports vLLM itself.
    code = (
        "import importlib.util as u, sys\n"
        f"s = u.spec_from_file_location('geometry', {str(Path(g.__file__))!r})\n"
        "m = u.module_from_spec(s); sys.modules['geometry'] = m; s.loader.exec_module(m)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True)


def test_record_formats_and_their_bounds():
    assert (g.FP8_DS_MLA.record_bytes, g.FP8_DS_MLA.scale_offset) == (528, 512)
    assert (g.NVFP4_DS_MLA.record_bytes, g.NVFP4_DS_MLA.scale_offset) == (304, 256)
    assert g.RecordFormat("least", 1, 0).record_bytes == 1
    for record_bytes, scale_offset in ((0, 0), (8, -1), (8, 8), (8, 9)):
        with pytest.raises(ValueError):
            g.RecordFormat("wrong", record_bytes, scale_offset)


def test_constants_that_people_are_told():
    assert g.MAX_VISIBLE_TOKENS == 524_288
    assert (g.INDEX_KEY_BYTES, g.INDEX_RECORD_BYTES, g.POOLS_PER_INDEX_PAGE) == (128, 132, 64)
    assert (g.INDEX_PAGE_BYTES, g.PAGE_MULTIPLE) == (8448, 64)


def test_index_pages_of_the_longest_request():
    # 64 pools of 4 tokens each.
    assert [g.max_index_pages(n, 4) for n in (0, 1, 256, 257, 1024)] == [0, 1, 1, 2, 4]
    assert g.max_index_pages(524_288, 4) == 2048


@pytest.mark.parametrize("page_size", [256, 512, 2304])
def test_a_page_of_whole_index_pages(page_size):
    g.PageGeometry(page_size, g.FP8_DS_MLA, 4, 4, 2).check_index_page()


@pytest.mark.parametrize(("page_size", "better"), [(64, 256), (128, 256), (320, 512)])
def test_case_7_a_page_that_would_be_cut_into_other_index_pages(page_size, better):
    with pytest.raises(ValueError) as error:
        g.PageGeometry(page_size, g.FP8_DS_MLA, 4, 4, 2).check_index_page()
    for part in (f"page_size {page_size}", "(256 tokens)", f"example {better}"):
        assert part in str(error.value)


def test_worked_pool_capacity():
    geometry = g.PageGeometry(256, g.FP8_DS_MLA, 4, 8, 4)
    # 251 pools over 4 ranks, 2 more for each of 8 requests: 63 + 16, then whole 16ths.
    assert geometry.pool_capacity(max_tokens=1001, max_num_seqs=8) == 80
    assert geometry.pool_capacity(max_tokens=1004, max_num_seqs=9) == 96


def test_bound_caches_are_checked_in_bytes():
    import torch

    frozen = g.FrozenGeometry()
    frozen.freeze(make(64))
    frozen.check_bound(torch.zeros((2, 64, 528), dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"strides of \(1056, 2\)"):
        frozen.check_bound(torch.zeros((2, 64, 528), dtype=torch.int16))
    frozen.check_bound_index(torch.zeros((3, 64, 132), dtype=torch.uint8))
    for shape in ((3, 32, 132), (3, 64, 131), (64, 132)):
        with pytest.raises(ValueError, match="expected"):
            frozen.check_bound_index(torch.zeros(shape, dtype=torch.uint8))


def test_shape_and_strides_need_three_dimensions_each():
    frozen = g.FrozenGeometry()
    frozen.freeze(make(64))
    for shape, strides in (((8, 64, 528), (528, 1)), ((64, 528), (64 * 528, 528, 1))):
        with pytest.raises(ValueError, match="expected three dimensions"):
            frozen.check_cache(shape, strides)
