# SPDX-License-Identifier: Apache-2.0
"""The device forms of ownership against the integer ones, and the plan of one batch."""

from types import SimpleNamespace

import pytest
import torch

from vllm.v1.attention.backends.mla.ckv_gather import geometry, remap
from vllm.v1.attention.backends.mla.ckv_gather.layout import plan_index_pages


@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 4), (3, 1), (4, 4), (8, 16)])
def test_device_ownership_equals_the_integer_form(world: int, interleave: int) -> None:
    kwargs = {"dcp_world_size": world, "interleave": interleave}
    lengths = torch.randint(0, 5000, (400,), dtype=torch.int32)
    for rank in range(world):
        got = remap.local_lengths(lengths, rank, **kwargs)
        assert got.dtype == torch.int32
        want = [geometry.local_length(n, rank, **kwargs) for n in lengths.tolist()]
        assert got.tolist() == want
        ids = remap.global_ids(torch.tensor([[3, -1], [0, 77]], dtype=torch.int32), rank, **kwargs)
        first = geometry.global_index_of(3, rank, **kwargs)
        last = geometry.global_index_of(77, rank, **kwargs)
        zero = geometry.global_index_of(0, rank, **kwargs)
        assert ids.tolist() == [[first, -1], [zero, last]]


def test_plan_of_a_batch_covers_tokens_pools_and_pages(make_gather) -> None:
    gather = make_gather(4, max_model_len=2000)
    lengths = torch.tensor([19, 33, 3, 1030])
    spans = gather.plan_spans(lengths.tolist(), [1] * 4, 4)
    (window,) = gather.layout_batch(lengths.tolist(), spans, torch.device("cpu")).windows
    assert (window.requests, window.rows, window.bounds) == (slice(0, 4), slice(0, 4), None)
    plan = window.layout
    assert plan.tokens.visible == int(lengths.sum())
    assert plan.pools.seq_lens.tolist() == [4, 8, 0, 257]
    assert plan.page_starts.tolist() == [0, 1, 2, 2]
    assert plan.page_table[3].tolist() == [2, 3, 4, 5, 6]
    assert plan.num_index_pages == plan_index_pages(lengths // 4)[1]
    assert int(plan.page_table.max()) < plan.num_index_pages
    assert plan.staged_tokens.padded == plan.tokens.padded


def test_ordinary_only_skips_exactly_the_batches_that_gather(monkeypatch) -> None:
    from vllm.v1.attention.backends.mla import b12x_mla_sparse as module

    context = SimpleNamespace(attn_metadata=None)
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    calls: list[tuple] = []

    def inner(tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        calls.append((args, kwargs))
        return tensor + 1

    counted: list[int] = []
    gate = module.OrdinaryOnly(inner, "layer", lambda rows, tensor: counted.append(rows))
    x = torch.randn(3)
    assert torch.equal(gate(x), x + 1)
    context.attn_metadata = {"layer": SimpleNamespace(ckv_plan=None, num_decode_tokens=1)}
    assert torch.equal(gate(x, 5, seq_lens=x), x + 1)
    assert calls[-1][0] == (5,)
    context.attn_metadata = {"layer": SimpleNamespace(ckv_plan=object(), num_decode_tokens=0)}
    assert gate(x, 5, seq_lens=x) is x
    assert len(calls) == 2
    # Dummy runs and gathered batches are not counted; decode rows are no prefill rows.
    assert counted == [2]


@pytest.mark.parametrize(
    ("flag", "rows", "cached", "shares"),
    [
        ("1", 4096, 200_000, 4),
        ("0", 4096, 200_000, 1),
        ("1", 4096, 1000, 1),
        ("1", 17, 200_000, 1),
    ],
)
def test_selections_are_shared_by_flag_rows_and_context(
    make_gather, make_common, monkeypatch, flag, rows, cached, shares
) -> None:
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_SHARD_SELECTION", flag)
    gather = make_gather(4, max_model_len=400_000, index_topk=2048)
    assert gather.facts["VLLM_B12X_MLA_CKV_SHARD_SELECTION"] == int(flag)
    plan = gather.plan_batch(
        make_common([rows, 1], [cached + rows, 1]), num_decode_tokens=0, capturing=False
    )
    assert plan is not None and plan.selection_shares == shares


def test_without_the_gather_no_selection_is_shared(make_gather, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_SHARD_SELECTION", "1")
    assert make_gather(4).shard_selection
    assert not make_gather(1).shard_selection


@pytest.mark.parametrize(("visible", "shares"), [(89_100, 1), (89_250, 4)])
def test_decodes_beside_prompts_do_not_share_a_selection_out(
    make_gather, make_common, monkeypatch, visible, shares
):
    """Their pools would tip the balance of the first batch."""
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_SHARD_SELECTION", "1")
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER_MIXED", "1")
    gather = make_gather(4, max_model_len=500_000, index_topk=2048)
    common = make_common([1, 4096], [500_000, visible], [False, True])
    plan = gather.plan_batch(common, num_decode_tokens=1, capturing=False)
    assert plan is not None and (plan.first_row, plan.selection_shares) == (1, shares)
