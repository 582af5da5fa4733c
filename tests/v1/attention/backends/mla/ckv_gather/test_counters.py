# SPDX-License-Identifier: Apache-2.0
"""Byte formulas against stock's buffers, totals, and the worker-side function."""

from types import SimpleNamespace

import pytest
import torch

from vllm.platforms.ckv_reference import declare_torchvision_ops

declare_torchvision_ops()

from vllm.v1.attention.backends.mla.ckv_gather import counters as c  # noqa: E402
from vllm.v1.attention.backends.mla.ckv_gather import plan as plan_module  # noqa: E402
from vllm.v1.attention.backends.mla.ckv_gather.eligibility import (  # noqa: E402
    Limits,
    Reason,
)


def gather_for_tests(world: int = 2, **changes) -> plan_module.CkvGather:
    """A gather with a frozen geometry of 256-token pages, as ``freeze_and_reserve`` leaves it."""
    from vllm.v1.attention.backends.mla.ckv_gather import geometry as g

    gather = plan_module.CkvGather.__new__(plan_module.CkvGather)
    gather.dcp_world_size, gather.pool_size, gather.enabled = world, 4, True
    gather.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(enable_dbo=False))
    gather.geometry = g.FrozenGeometry()
    gather.geometry.freeze(g.PageGeometry(256, g.FP8_DS_MLA, 4, 4, world))
    gather.counters, gather.counting_layer = c.GatherCounters(), None
    limits = {
        "enabled": True,
        "supported_geometry": True,
        "dcp_world_size": world,
        "min_query_tokens": 16,
        "max_query_tokens": 1000,
        "max_visible_tokens": 1000,
        "max_num_seqs": 8,
    }
    gather.limits = Limits(**{**limits, **changes})
    return gather


def common(query_lens: list[int], seq_lens: list[int], prefilling: list[bool] | None = None):
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return SimpleNamespace(
        query_start_loc_cpu=starts,
        seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=torch.int32),
        is_prefilling=torch.tensor([True] * len(seq_lens) if prefilling is None else prefilling),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
    )


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_those_of_stock_buffers(world):
    from vllm.v1.attention.ops.dcp import _dcp_a2a_lse_pack_dim

    rows, heads, dims = 7, 8, 512
    others = world - 1
    query = torch.empty(rows, heads // world, dims, dtype=torch.bfloat16)
    gathered = torch.empty(rows, heads, dims, dtype=torch.bfloat16)
    assert c.query_gather_bytes(rows, heads // world, dims * 2, world) == (
        gathered.nbytes - query.nbytes
    )
    # The buffer of stock's all-to-all holds one share per rank, and the own one does not travel.
    width = dims + _dcp_a2a_lse_pack_dim(torch.bfloat16)
    receive = torch.empty(world, rows, heads // world, width, dtype=torch.bfloat16)
    assert c.combine_bytes(rows, heads, dims * 2, world, a2a=True) == (
        receive.nbytes // world * others
    )
    every_lse = torch.empty(world, rows, heads, dtype=torch.float32)
    scattered = torch.empty(rows, heads // world, dims, dtype=torch.bfloat16)
    assert c.combine_bytes(rows, heads, dims * 2, world, a2a=False) == (
        every_lse.nbytes // world * others + scattered.nbytes * others
    )
    candidates = torch.empty(2, rows, 512, dtype=torch.int32)
    assert c.candidate_bytes(rows, 512, world) == candidates.nbytes * others


def test_decisions_are_counted_once_per_step_and_by_reason():
    gather = gather_for_tests()
    assert gather.counts_for("a") and gather.counts_for("a") and not gather.counts_for("b")
    batches = [
        (common([20, 30], [120, 30]), 0),
        (common([40], [40]), 0),
        (common([1, 1], [50, 60], [False, False]), 2),
        (common([1, 40], [50, 60], [False, True]), 1),
        (common([900], [900]), 0),
        (common([901], [1001]), 0),
    ]
    for batch, decodes in batches:
        # The builder of another cache group plans the same step and must not count it again.
        plan = gather.plan_batch(batch, num_decode_tokens=decodes, capturing=False)
        again = gather.plan_batch(batch, num_decode_tokens=decodes, capturing=False, count=False)
        assert (plan is None) == (again is None)
    gather.plan_batch(common([20], [20]), num_decode_tokens=0, capturing=True)
    assert gather.counters.as_dict() == {
        "gathered_batches": 3,
        "gathered_query_tokens": 990,
        "gathered_visible_tokens": 150 + 40 + 900,
        "ordinary_batches": {
            "graph_capture": 1,
            "decode_only": 1,
            "decode_tokens": 1,
            "capacity": 1,
        },
        "ckv_bytes": 0,
        "dcp_bytes": 0,
    }
    assert gather.counters.summary() == (
        "gathered 3 batches, 990 tokens; ordinary: 1 mixed, 1 over capacity"
    )


def test_summary_of_large_numbers():
    totals = c.GatherCounters(gathered_batches=812, gathered_query_tokens=3_140_000)
    totals.ordinary.update({Reason.DECODE_TOKENS: 10, Reason.CAPACITY: 2, Reason.DECODE_ONLY: 9999})
    assert totals.summary() == (
        "gathered 812 batches, 3.1 M tokens; ordinary: 10 mixed, 2 over capacity"
    )
    assert totals.prefill_batches == 824
    assert c.GatherCounters().summary() == "gathered 0 batches, 0 tokens; ordinary: none"


def test_one_summary_line_every_so_many_prompts(monkeypatch):
    lines, warnings = [], []
    monkeypatch.setattr(plan_module, "SUMMARY_BATCHES", 3)
    monkeypatch.setattr(plan_module.logger, "info", lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(plan_module.logger, "warning", lambda text, *args: warnings.append(text))
    gather = gather_for_tests()
    for _ in range(7):
        gather.plan_batch(common([20], [20]), num_decode_tokens=0, capturing=False)
        gather.plan_batch(common([1], [20], [False]), num_decode_tokens=1, capturing=False)
    summaries = [line for line in lines if line.startswith("full-CKV gather: gathered")]
    assert [line.split()[3] for line in summaries] == ["3", "6"]
    assert warnings == []
    for _ in range(2):
        gather.plan_batch(common([9], [9]), num_decode_tokens=0, capturing=False)
        gather.plan_batch(common([500], [1001]), num_decode_tokens=0, capturing=False)
    assert len(warnings) == 2
    assert "9 query tokens, it takes more than 16" in warnings[0]
    assert "1001 visible tokens, buffers are reserved for 1000" in warnings[1]


def test_ordinary_bytes_of_prefill_rows_only():
    gather = gather_for_tests(world=2)
    query = torch.empty(10, 4, 512, dtype=torch.bfloat16)
    gather.count_query_gather(6, query)
    assert gather.counters.dcp_bytes == 6 * 4 * 512 * 2
    gather.count_combine(True, 6, torch.empty(10, 8, 512, dtype=torch.bfloat16))
    gather.count_candidates(6, 512)
    assert gather.counters.dcp_bytes == 6 * 4 * 512 * 2 + 6 * 4 * (512 * 2 + 4) + 6 * 512 * 8


def test_counters_of_a_worker():
    gather = gather_for_tests()
    layers = {"kda": SimpleNamespace(), "mla": SimpleNamespace(impl=SimpleNamespace(gather=gather))}
    compilation = SimpleNamespace(static_forward_context=layers)
    worker = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation))
    gather.counters.ckv_bytes = 5
    assert plan_module.counters(worker)["ckv_bytes"] == 5
    del layers["mla"]
    with pytest.raises(RuntimeError, match="--attention-backend B12X_MLA_SPARSE"):
        plan_module.counters(worker)
