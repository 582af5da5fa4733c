# SPDX-License-Identifier: Apache-2.0
"""The byte model against the layout that the exchange uses, and worked numbers."""

import pytest
import torch

from vllm.v1.attention.backends.mla.ckv_gather.byte_model import ByteModel
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


@pytest.mark.parametrize("chunk", [1, 17, 512, 8192])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_break_even_is_the_last_length_that_gains(world, chunk):
    layer = model(dcp_world_size=world)
    length = layer.break_even(chunk)
    assert layer.gains(chunk, [length])
    assert not layer.gains(chunk, [length + 1])


def test_without_other_ranks_there_is_nothing_to_gain():
    layer = model(dcp_world_size=1)
    assert not layer.gains(8192, [8192])
    assert layer.break_even(8192) == 0


def test_a_layer_that_exchanges_nothing_else_never_gains():
    layer = model(local_heads=0, pool_topk=0)
    assert layer.break_even(100) == 0
