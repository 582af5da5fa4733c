# SPDX-License-Identifier: Apache-2.0
"""The byte model against the layout that the exchange uses, and worked numbers."""

import pytest
import torch

from vllm.v1.attention.backends.mla.ckv_gather import byte_model
from vllm.v1.attention.backends.mla.ckv_gather.byte_model import (
    ByteModel,
    last_gain,
    shards_selection,
)
from vllm.v1.attention.backends.mla.ckv_gather.layout import plan_layout


def model(**changes):
    sizes = {
        "dcp_world_size": 4,
        "interleave": 4,
        "pool_size": 4,
        "record_bytes": 528,
        "local_heads": 16,
        "pool_topk": 512,
        "a2a": False,
    }
    return ByteModel(**(sizes | changes))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("interleave", [4, 16, 64])
@pytest.mark.parametrize("lengths", [[1], [3, 4, 5], [19, 33], [1000, 1, 63, 64, 65], [100_003]])
def test_the_padded_span_is_the_layouts(world, interleave, lengths):
    tensor = torch.tensor(lengths)
    tokens = plan_layout(tensor, dcp_world_size=world, interleave=interleave)
    pools = plan_layout(tensor // 4, dcp_world_size=world, interleave=interleave // 4)
    expected = (world - 1) * (tokens.padded * 528 + pools.padded * 132)
    assert model(dcp_world_size=world, interleave=interleave).gathered(lengths) == expected


def test_worked_numbers():
    # 8,192 queries of 16 heads: three other ranks' queries, 1,024 bytes a head; the combine with
    # the log-sum-exps of 64 heads; 512 candidates of 8 bytes.
    ordinary = 3 * 8192 * (16 * 1024 + 16 * 1024 + 64 * 4 + 512 * 8)
    assert model().ordinary(8192) == ordinary
    assert model(a2a=True).ordinary(8192) == ordinary - 3 * 8192 * (64 - 16) * 4
    # 561 bytes a token, a quarter of the tokens from each of three ranks.
    assert model().gathered([65_536]) == 3 * 65_536 // 4 * 561


@pytest.mark.parametrize("least", [1, 17, 9999])
@pytest.mark.parametrize("last", [17, 18, 9999, 10_000])
def test_the_last_context_that_gains(least, last):
    tried = []

    def gains(context):
        tried.append(context)
        return context <= last

    assert last_gain(gains, least) == (last if least <= last else 0)
    assert min(tried) == least


@pytest.mark.parametrize("chunk", [1, 17, 512, 8192])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_gathered_bytes_grow_with_the_context_and_ordinary_ones_do_not(world, chunk):
    layer = model(dcp_world_size=world)
    length = last_gain(lambda n: layer.gathered([n]) < layer.ordinary(chunk), 1)
    assert layer.gathered([length]) < layer.ordinary(chunk) <= layer.gathered([length + 1])


def test_without_other_ranks_nothing_is_received():
    layer = model(dcp_world_size=1)
    assert layer.gathered([8192]) == layer.ordinary(8192) == 0


def test_a_shared_selection_adds_the_ids_of_the_other_shares():
    # 4,096 rows of 512 ids, 4 bytes each, three quarters from other ranks; 4,097 rows are padded.
    plain = model().gathered([65_536])
    assert model().gathered([65_536], [4096]) - plain == 3 * 1024 * 512 * 4
    assert model().gathered([65_536], [4097]) - plain == 3 * 1025 * 512 * 4
    # Each span shares its own rows.
    assert model().gathered([65_536], [4097, 2]) - plain == 3 * (1025 + 1) * 512 * 4


def test_what_every_rank_writes_is_not_received():
    assert model().gathered([65_536], own=[65_536]) == 0
    assert model().gathered([65_536], own=[4096]) == model().gathered([65_536 - 4096])
    # A token has 33 bytes of keys beside its 528 of records.
    assert model().gathered([65_536], own=[4096]) == 3 * (65_536 - 4096) // 4 * 561
    # What is left of each request is padded on its own, and a pool that ends in the batch is its.
    assert model().gathered([3, 12, 7], own=[1, 9, 2]) == 3 * ((2 + 3 + 4) * 528 + 1 * 132)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_windows_receive_the_same_bytes(world):
    """Spans of whole requests, and windows of a context of 2,304 tokens on every rank."""
    layer, size = model(dcp_world_size=world, interleave=64), 2304 * world
    lengths = [100_003, 77, 5 * size + 1000]
    windows = [[100_003, 77], *[[size]] * 5, [1000]]
    assert layer.gathered(lengths) == sum(map(layer.gathered, windows))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_selections_are_shared_from_where_saved_pairs_outweigh_bytes(world):
    """Worked by hand: 2,048 bytes a row cost 20,480 pairs a row, saved by as many pools."""
    rows = 4096
    limit = 20_480 + 4_000_000 * world // ((world - 1) * rows)
    assert not shards_selection(rows, limit, world, 512)
    assert shards_selection(rows, limit + 1, world, 512)


@pytest.mark.parametrize("rows", [17, 4096])
def test_short_contexts_and_few_rows_are_not_shared(rows):
    assert not shards_selection(rows, 8192, 2, 512)
    # One more collective costs more than seventeen rows save, however long the context.
    assert shards_selection(rows, 131_072, 2, 512) == (rows == 4096)


def test_one_rank_shares_nothing():
    assert not shards_selection(4096, 10**6, 1, 512)


def test_the_threshold_is_the_slow_links(monkeypatch):
    """With the number of NVLink, selections over 8,192 pools are shared as well."""
    assert not shards_selection(4096, 8192, 2, 512)
    monkeypatch.setattr(byte_model, "PAIRS_PER_BYTE", 1.4)
    assert shards_selection(4096, 8192, 2, 512)
