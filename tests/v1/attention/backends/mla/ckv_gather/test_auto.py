# SPDX-License-Identifier: Apache-2.0
"""``VLLM_B12X_MLA_CKV_GATHER=auto``: the byte model decides, alike on every rank."""

import pytest

from vllm.v1.attention.backends.mla.ckv_gather import plan as plan_module
from vllm.v1.attention.backends.mla.ckv_gather.eligibility import Reason


@pytest.fixture
def make_auto(make_gather, monkeypatch):
    def make(world=2, **changes):
        monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", "auto")
        return make_gather(world, **changes)

    return make


def plan(gather, batch, **changes):
    return gather.plan_batch(batch, num_decode_tokens=0, capturing=False, **changes)


def test_it_gathers_exactly_while_that_moves_fewer_bytes(make_auto, make_common):
    gather = make_auto(max_model_len=100_000)
    chunk = 17
    last = gather.byte_model.break_even(chunk)
    assert chunk < last < 100_000
    assert plan(gather, make_common([chunk], [last])) is not None
    assert plan(gather, make_common([chunk], [last + 1])) is None
    assert gather.counters.ordinary == {Reason.NO_GAIN: 1}
    assert "1 without gain" in gather.counters.summary()


def test_requests_are_added_up(make_auto, make_common):
    gather = make_auto(max_model_len=100_000)
    lengths = [5000, 7, 900]
    queries = [20, 7, 400]
    expected = gather.byte_model.gains(sum(queries), lengths)
    assert (plan(gather, make_common(queries, lengths)) is not None) == expected


def test_padding_rows_do_not_count(make_auto, make_common):
    gather = make_auto(max_model_len=100_000)
    last = gather.byte_model.break_even(17)
    assert plan(gather, make_common([17], [last], pad_rows=3)) is not None


def test_one_stays_whenever_eligible(make_gather, make_common):
    gather = make_gather(max_model_len=100_000)
    assert gather.byte_model is None
    assert plan(gather, make_common([17], [100_000])) is not None


def test_without_context_parallelism_it_is_off(make_auto, make_common):
    gather = make_auto(world=1)
    assert plan(gather, make_common([500], [500])) is None
    assert gather.counters.ordinary == {Reason.NO_CONTEXT_PARALLELISM: 1}


def test_the_model_is_that_of_the_configuration(make_auto):
    model = make_auto(world=4, dcp_comm_backend="ag_rs", cp_kv_cache_interleave_size=16).byte_model
    assert (model.dcp_world_size, model.interleave, model.pool_size) == (4, 16, 4)
    assert (model.local_heads, model.pool_topk, model.a2a) == (2, 32, False)
    assert model.record_bytes == 528


def test_ranks_in_different_modes_disagree(make_auto, make_gather):
    from vllm.v1.attention.backends.mla.ckv_gather.startup import require_agreement

    # Built first: the flag is read when a gather is.
    always = make_gather().facts
    automatic = make_auto().facts
    with pytest.raises(RuntimeError, match="VLLM_B12X_MLA_CKV_GATHER is 1 on rank 0 and 'auto'"):
        require_agreement([always, automatic])


def test_inputs_are_in_the_debug_log_and_nothing_is_warned(make_auto, make_common, monkeypatch):
    lines = []
    monkeypatch.setattr(plan_module.logger, "debug", lambda text, *a: lines.append(text % a))
    warned = []
    monkeypatch.setattr(plan_module.logger, "warning", lambda *a: warned.append(a))
    gather = make_auto(max_model_len=100_000)
    plan(gather, make_common([17], [100_000]))
    assert not warned
    model = gather.byte_model
    assert lines == [
        "full-CKV gather auto: 17 query tokens over 100000 visible tokens of 1 requests, a layer "
        f"receives {model.gathered([100_000])} bytes gathered, {model.ordinary(17)} ordinary: "
        "no_gain"
    ]
