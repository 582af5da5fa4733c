# SPDX-License-Identifier: Apache-2.0
"""Byte formulas against stock's buffers, totals, and the worker-side function."""

from types import SimpleNamespace

import pytest
import torch

from vllm.v1.attention.backends.mla.ckv_gather import counters as c
from vllm.v1.attention.backends.mla.ckv_gather import plan as plan_module
from vllm.v1.attention.backends.mla.ckv_gather.eligibility import Reason

NOTHING_TIMED = {"counts": dict.fromkeys([*map(str, c.SECONDS), "+Inf"], 0), "total": 0.0}


def test_a_duration_goes_to_the_first_bucket_that_holds_it():
    durations = c.Histogram()
    for seconds in (0.0, 1e-4, 1.1e-4, 1.0, 7.5):
        durations.add(seconds)
    counts = durations.as_dict()["counts"]
    assert {bound: count for bound, count in counts.items() if count} == {
        "0.0001": 2,
        "0.00025": 1,
        "1.0": 1,
        "+Inf": 1,
    }
    assert durations.total == pytest.approx(8.50021)
    assert list(c.SECONDS) == sorted(c.SECONDS)


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


def test_decisions_are_counted_once_per_step_and_by_reason(make_gather, make_common):
    gather = make_gather()
    assert gather.counts_for("a") and gather.counts_for("a") and not gather.counts_for("b")
    batches = [
        (make_common([20, 30], [120, 30]), 0),
        (make_common([40], [40]), 0),
        (make_common([1, 1], [50, 60], [False, False]), 2),
        (make_common([1, 40], [50, 60], [False, True]), 1),
        (make_common([900], [900]), 0),
        # Beyond the 1,000 tokens that are reserved: a span for each.
        (make_common([400, 501], [500, 501]), 0),
    ]
    for batch, decodes in batches:
        # The builder of another cache group plans the same step and must not count it again.
        plan = gather.plan_batch(batch, num_decode_tokens=decodes, capturing=False)
        again = gather.plan_batch(batch, num_decode_tokens=decodes, capturing=False, count=False)
        assert (plan is None) == (again is None)
    gather.plan_batch(make_common([20], [20]), num_decode_tokens=0, capturing=True)
    assert gather.counters.as_dict() == {
        "gathered_batches": 4,
        "gathered_windows": 5,
        "mixed_batches": 0,
        "gathered_query_tokens": 990 + 901,
        "gathered_visible_tokens": 150 + 40 + 900 + 1001,
        "ordinary_batches": {
            "graph_capture": 1,
            "decode_only": 1,
            "decode_tokens": 1,
        },
        "ckv_bytes": 0,
        "dcp_bytes": 0,
        "exchange_seconds": dict.fromkeys(("index_keys", "selection", "records"), NOTHING_TIMED),
    }
    assert gather.counters.summary() == (
        "gathered 4 batches in 5 windows, 1,891 tokens; ordinary: 1 mixed"
    )


def test_summary_of_large_numbers():
    totals = c.GatherCounters(
        gathered_batches=812, gathered_windows=1815, gathered_query_tokens=3_140_000
    )
    totals.ordinary.update(
        {Reason.DECODE_TOKENS: 10, Reason.TOO_FEW_TOKENS: 2, Reason.DECODE_ONLY: 9999}
    )
    assert totals.summary() == (
        "gathered 812 batches in 1,815 windows, 3.1 M tokens; ordinary: 10 mixed, 2 short"
    )
    assert totals.prefill_batches == 824
    totals.mixed_batches = 1400
    assert "1,815 windows, 1,400 of them beside decodes, 3.1 M tokens; " in totals.summary()
    assert c.GatherCounters().summary() == (
        "gathered 0 batches in 0 windows, 0 tokens; ordinary: none"
    )


def test_one_summary_line_every_so_many_prompts(monkeypatch, make_gather, make_common):
    lines, warnings = [], []
    monkeypatch.setattr(plan_module, "SUMMARY_BATCHES", 3)
    monkeypatch.setattr(plan_module.logger, "info", lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(plan_module.logger, "warning", lambda text, *args: warnings.append(text))
    gather = make_gather()
    for _ in range(7):
        gather.plan_batch(make_common([20], [20]), num_decode_tokens=0, capturing=False)
        gather.plan_batch(make_common([1], [20], [False]), num_decode_tokens=1, capturing=False)
    summaries = [line for line in lines if line.startswith("full-CKV gather: gathered")]
    assert [line.split()[3] for line in summaries] == ["3", "6"]
    assert warnings == []
    for _ in range(2):
        gather.plan_batch(make_common([9], [9]), num_decode_tokens=0, capturing=False)
        mixed = make_common([1, 40], [50, 60], [False, True])
        gather.plan_batch(mixed, num_decode_tokens=1, capturing=False)
    assert len(warnings) == 2
    assert "9 query tokens, it takes more than 16" in warnings[0]
    assert "1 of 41 tokens are decodes" in warnings[1]


def test_ordinary_bytes_of_prefill_rows_only(make_gather):
    gather = make_gather(world=2)
    query = torch.empty(10, 4, 512, dtype=torch.bfloat16)
    gather.count_query_gather(6, query)
    assert gather.counters.dcp_bytes == 6 * 4 * 512 * 2
    gather.count_combine(True, 6, torch.empty(10, 8, 512, dtype=torch.bfloat16))
    gather.count_candidates(6, 512)
    assert gather.counters.dcp_bytes == 6 * 4 * 512 * 2 + 6 * 4 * (512 * 2 + 4) + 6 * 512 * 8


def test_counters_of_a_worker(make_gather):
    gather = make_gather()
    layers = {"kda": SimpleNamespace(), "mla": SimpleNamespace(impl=SimpleNamespace(gather=gather))}
    compilation = SimpleNamespace(static_forward_context=layers)
    worker = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation))
    gather.counters.ckv_bytes = 5
    assert plan_module.counters(worker)["ckv_bytes"] == 5
    del layers["mla"]
    with pytest.raises(RuntimeError, match="--attention-backend B12X_MLA_SPARSE"):
        plan_module.counters(worker)
