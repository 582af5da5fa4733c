# SPDX-License-Identifier: Apache-2.0
"""Exchanges are timed one of a kind per batch, and nobody waits for the device."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm.v1.attention.backends.mla.ckv_gather import counters, exchange, timing
from vllm.v1.attention.backends.mla.ckv_gather import plan as plan_module
from vllm.v1.attention.backends.mla.ckv_gather.counters import Histogram
from vllm.v1.attention.backends.mla.sparse_mla_kernels.base import IndexQueries


def timed(timer):
    return {kind: sum(durations.counts) for kind, durations in timer.histograms.items()}


def make_timer(device="cpu"):
    timer = timing.ExchangeTimer({"index_keys": Histogram(), "records": Histogram()})
    timer.prepare(torch.device(device))
    return timer


def layers(timer, count):
    for _ in range(count):
        for kind in ("index_keys", "records"):
            with timer.exchange(kind):
                pass


def test_the_first_layer_of_a_batch_that_gathers():
    timer = make_timer()
    layers(timer, 3)  # nothing began
    assert timed(timer) == {"index_keys": 0, "records": 0}
    for step, expected in ((True, 1), (False, 1), (True, 2)):
        timer.begin_step(gathers=step)
        layers(timer, 3)
        assert timed(timer) == {"index_keys": expected, "records": expected}


def test_nothing_is_timed_before_it_is_prepared():
    timer = timing.ExchangeTimer({"records": Histogram()})
    timer.begin_step(gathers=True)
    with timer.exchange("records"):
        pass
    assert timed(timer) == {"records": 0}


def test_the_hosts_clock_is_right_without_a_device(monkeypatch):
    clock = iter([10.0, 10.03])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    timer = make_timer()
    timer.begin_step(gathers=True)
    with timer.exchange("records"):
        pass
    assert timer.histograms["records"].total == pytest.approx(0.03)


class Device:
    """A device that gets on by hand; events are finished up to ``done``."""

    def __init__(self):
        self.made = self.recorded = self.done = 0

    def event(self, *, enable_timing):
        assert enable_timing
        self.made += 1
        device = self

        class Event:
            at = 0

            def record(self):
                device.recorded += 1
                self.at = device.recorded

            def query(self):
                return self.at <= device.done

            def elapsed_time(self, end):
                assert self.query() and end.query(), "would wait for the device"
                return 2.0 * (end.at - self.at)

            def synchronize(self):
                raise AssertionError("waits for the device")

        return Event()


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits for the device"))
    return device


def test_events_are_read_when_they_are_finished_and_not_before(device):
    timer = make_timer("cuda")
    made = device.made
    assert made == device.recorded == 2 * timing.PAIRS
    timer.begin_step(gathers=True)
    layers(timer, 5)
    assert device.recorded == made + 4
    timer.begin_step(gathers=False)
    assert timed(timer) == {"index_keys": 0, "records": 0}
    device.done = made + 3  # the second exchange has begun
    timer.begin_step(gathers=False)
    assert timed(timer) == {"index_keys": 1, "records": 0}
    device.done = made + 4
    timer.begin_step(gathers=False)
    assert timed(timer) == {"index_keys": 1, "records": 1}
    # Two milliseconds each.
    assert timer.histograms["records"].total == pytest.approx(2e-3)
    assert device.made == made


def test_a_device_that_lags_behind_costs_samples_not_events(device):
    timer = make_timer("cuda")
    made = device.made
    for _ in range(timing.PAIRS):
        timer.begin_step(gathers=True)
        layers(timer, 2)
    assert device.made == made and device.recorded == made + 2 * timing.PAIRS
    device.done = device.recorded
    timer.begin_step(gathers=True)
    assert sum(timed(timer).values()) == timing.PAIRS
    layers(timer, 1)
    assert device.recorded == made + 2 * timing.PAIRS + 4


@pytest.mark.parametrize("shares", [1, 2])
def test_a_batch_is_timed_by_the_builder_that_counts_it(
    make_gather, make_common, monkeypatch, shares
):
    """A gather's own exchanges, on one rank's buffers; a selection's only if it is shared out."""
    gather = make_gather()
    gather.timer.prepare(torch.device("cpu"))
    entered = []
    monkeypatch.setattr(plan_module, "get_dcp_group", lambda: SimpleNamespace(
        device_group=None, rank_in_group=0))  # fmt: skip
    monkeypatch.setattr(exchange, "gather_pools", lambda *a, **k: entered.append("index_keys"))
    monkeypatch.setattr(exchange, "gather_latents", lambda *a: entered.append("records"))
    monkeypatch.setattr(exchange, "gather_selection", lambda *a: entered.append("selection"))
    kinds = ["index_keys", "records"] if shares == 1 else ["index_keys", "selection", "records"]
    times = dict.fromkeys(counters.EXCHANGES, 0)
    pages = torch.zeros(1, 64 * 132, dtype=torch.uint8)
    ids = torch.zeros(40, 2)
    buffers = SimpleNamespace(records=torch.zeros(8, 528), pages=pages, selection=ids, scratch=())
    gather.workspace = SimpleNamespace(
        borrow_index=lambda *a: buffers, borrow_latents=lambda *a: buffers
    )
    kernels = SimpleNamespace(remap=lambda *a, **k: None, select_pools=lambda *a: (ids, None))
    table = torch.zeros(1, 8, dtype=torch.int32)

    def step(**options):
        plan = gather.plan_batch(make_common([40], [40]), num_decode_tokens=0, **options)
        spans = gather.plan_spans([40], [40], 40)
        plan = plan or gather.layout_batch([40], spans, torch.device("cpu"))
        return replace(plan, selection_shares=shares)

    def layer(plan):
        gather.select_pools(plan, kernels, IndexQueries(pages, table, ids, ids, ids, ids, 2))
        gather.gather_latents(plan.windows[0], kernels, buffers.records, table, table, table)

    layer(step(capturing=False, count=False))
    layer(step(capturing=True))
    assert timed(gather.timer) == times
    plan = step(capturing=False)
    for _ in range(3):
        layer(plan)
    assert timed(gather.timer) == times | dict.fromkeys(kinds, 1)
    assert gather.counters.as_dict()["exchange_seconds"]["records"]["total"] > 0
    assert entered == kinds * 5
