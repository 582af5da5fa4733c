# SPDX-License-Identifier: Apache-2.0
"""``VLLM_B12X_MLA_CKV_GATHER=auto``: the byte model decides, alike on every rank."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from ckv_rates import NOTHING

from vllm.v1.attention.backends.mla.ckv_gather import exchange, startup
from vllm.v1.attention.backends.mla.ckv_gather import plan as plan_module
from vllm.v1.attention.backends.mla.ckv_gather.byte_model import last_gain
from vllm.v1.attention.backends.mla.ckv_gather.eligibility import Reason
from vllm.v1.attention.backends.mla.ckv_gather.time_model import TimeModel
from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import TorchReferenceKernels


@pytest.fixture
def make_auto(make_gather, monkeypatch):
    def make(world=2, **changes):
        monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", "auto")
        return make_gather(world, **changes)

    return make


def break_even(gather, chunk):
    """The longest context of one request at which its ``chunk`` moves fewer bytes."""
    sizes = gather.time_model.bytes
    return last_gain(lambda context: sizes.gathered([context]) < sizes.ordinary(chunk), chunk)


def plan(gather, batch, **changes):
    return gather.plan_batch(batch, num_decode_tokens=0, capturing=False, **changes)


def test_it_gathers_exactly_while_that_moves_fewer_bytes(make_auto, make_common):
    gather = make_auto(max_model_len=100_000)
    chunk = 17
    last = break_even(gather, chunk)
    assert chunk < last < 100_000
    assert plan(gather, make_common([chunk], [last])) is not None
    assert plan(gather, make_common([chunk], [last + 1])) is None
    assert gather.counters.ordinary == {Reason.NO_GAIN: 1}
    assert "1 without gain" in gather.counters.summary()


def test_requests_are_added_up(make_auto, make_common):
    gather = make_auto(max_model_len=100_000)
    lengths = [5000, 7, 900]
    queries = [20, 7, 400]
    sizes = gather.time_model.bytes
    expected = sizes.gathered(lengths) < sizes.ordinary(sum(queries))
    assert (plan(gather, make_common(queries, lengths)) is not None) == expected


def test_padding_rows_do_not_count(make_auto, make_common):
    gather = make_auto(max_model_len=100_000)
    last = break_even(gather, 17)
    assert plan(gather, make_common([17], [last], pad_rows=3)) is not None


def test_decodes_beside_the_prompts_move_no_bytes(make_auto, make_common, monkeypatch):
    """Neither their context on one side, nor their rows on the other."""
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER_MIXED", "1")
    gather = make_auto(max_model_len=100_000)
    last = break_even(gather, 17)
    for visible in (last, last + 1):
        batch = make_common([1, 17], [90_000, visible], [False, True])
        made = gather.plan_batch(batch, num_decode_tokens=1, capturing=False)
        assert (made is not None) == (visible == last)


def test_time_decides_where_rates_are_known(make_auto, make_common, monkeypatch):
    """A launch of the ordinary path, and nothing else: decodes pay for it in any case."""
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER_MIXED", "1")
    gather = make_auto(max_model_len=100_000)
    gather.adopt(replace(NOTHING, ordinary=((0, 1.0),)))
    assert plan(gather, make_common([17], [90_000])) is not None
    mixed = make_common([1, 17], [50, 90_000], [False, True])
    assert gather.plan_batch(mixed, num_decode_tokens=1, capturing=False) is None
    gather.adopt(replace(NOTHING, gathered=((0, 1.0),)))
    assert plan(gather, make_common([17], [17])) is None
    gather.adopt(None)
    assert plan(gather, make_common([17], [17])) is not None


def test_pairs_are_counted_once_a_batch(make_auto, make_common, monkeypatch):
    """Both what is shared out and what is gathered depend on them."""
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_SHARD_SELECTION", "1")
    gather = make_auto(max_model_len=100_000)
    gather.adopt(replace(NOTHING, pair=1.0, ordinary=((0, 0.0), (1, 1e9))))
    counted, pairs = [], TimeModel.pairs
    monkeypatch.setattr(
        TimeModel, "pairs", lambda model, *a: counted.append(pairs(model, *a)) or counted[-1]
    )
    made = plan(gather, make_common([20, 9], [90_000, 9]))
    assert made is not None and made.selection_shares == 2
    assert counted == [sum(n // 4 for n in [*range(89_981, 90_001), *range(1, 10)])]


def test_one_stays_whenever_eligible(make_gather, make_common):
    gather = make_gather(max_model_len=100_000)
    assert gather.time_model is None
    assert plan(gather, make_common([17], [100_000])) is not None


def test_without_context_parallelism_it_is_off(make_auto, make_common):
    gather = make_auto(world=1)
    assert plan(gather, make_common([500], [500])) is None
    assert gather.counters.ordinary == {Reason.DISABLED: 1}


OBSTACLES = [
    ({"use_ubatching": True}, "drop --enable-dbo"),
    ({"kv_transfer_config": object()}, "drop --kv-transfer-config"),
]


@pytest.mark.parametrize(("changes", "remedy"), OBSTACLES)
def test_where_it_cannot_run_auto_is_off_and_one_refuses(
    make_auto, make_gather, make_config, make_common, changes, remedy
):
    config = make_config(2, **changes)
    assert startup.refusals(config, "auto") == startup.refusals(config, False) == []
    (reason,) = startup.refusals(config, True)
    assert remedy in reason and "to auto or 0" in reason
    # A refusal is no state of the gather: one that says 1 does not turn itself off.
    assert make_gather(**changes).enabled
    gather = make_auto(**changes)
    assert not gather.enabled and remedy in gather.why_off
    assert plan(gather, make_common([500], [500])) is None
    assert gather.counters.ordinary == {Reason.DISABLED: 1}


@pytest.mark.parametrize(
    ("mode", "changes", "words"),
    [
        ("0", {}, "is 0 or unset"),
        ("1", {"world": 1}, "without decode context parallelism"),
        ("auto", {"world": 1}, "without decode context parallelism"),
        ("auto", {"kv_transfer_config": object()}, "is auto and there is a KV connector"),
    ],
)
def test_one_line_says_why_it_is_off(make_gather, monkeypatch, mode, changes, words):
    monkeypatch.setattr(plan_module, "get_dcp_group", lambda: SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(exchange, "all_gather_facts", lambda facts, group: [facts])
    lines = []
    monkeypatch.setattr(plan_module.logger, "info", lambda text, *a: lines.append(text % a))
    monkeypatch.setattr(plan_module.logger, "warning_once", lambda *a: lines.append(a))
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", mode)
    # Longer than the cap, which is no news where nothing is reserved.
    gather = make_gather(**{"freeze": False, "max_model_len": 1_000_000, **changes})
    shapes = startup.LayerShapes(512, 4, 131, 32, 32, 4, 0.1)
    for _ in range(2):
        if gather.freeze(TorchReferenceKernels()):
            gather.reserve(TorchReferenceKernels(), shapes)
    (line,) = lines
    assert line.startswith("full-CKV gather: off, page 256 tokens, kernels TorchReferenceKernels: ")
    assert words in line and gather.workspace is None


def test_the_model_is_that_of_the_configuration(make_auto):
    model = make_auto(
        world=4, dcp_comm_backend="ag_rs", cp_kv_cache_interleave_size=16
    ).time_model.bytes
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
    model = gather.time_model.bytes
    assert lines == [
        "full-CKV gather auto: 17 query tokens over 100000 visible tokens of 1 requests in 1 "
        f"windows, {model.gathered([100_000])} bytes a layer gathered, {model.ordinary(17)} "
        "ordinary: no_gain"
    ]
