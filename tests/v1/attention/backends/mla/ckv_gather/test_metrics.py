# SPDX-License-Identifier: Apache-2.0
"""Totals travel from a worker process to a scrape of the process that started it."""

import os
import subprocess
import sys
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm.v1.attention.backends.mla.ckv_gather import metrics
from vllm.v1.attention.backends.mla.ckv_gather.counters import GatherCounters
from vllm.v1.attention.backends.mla.ckv_gather.eligibility import Reason


def scrape(folder):
    registry = CollectorRegistry()
    registry.register(metrics.GatherCollector(folder))
    lines = generate_latest(registry).decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def wait_for(folder, name, value):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if scrape(folder).get(name) == value:
            return
        time.sleep(0.02)
    raise AssertionError(scrape(folder))


def test_nothing_without_workers(tmp_path):
    assert scrape(tmp_path) == {}


def test_totals_appear_and_grow(tmp_path, monkeypatch):
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path))
    monkeypatch.setattr(metrics, "INTERVAL_SECONDS", 0.01)
    counters = GatherCounters(gathered_batches=3, gathered_query_tokens=600, dcp_bytes=7)
    counters.ordinary[Reason.CAPACITY] = 2
    thread = metrics.publish(counters.as_dict, 0)
    wait_for(tmp_path, 'vllm:ckv_gather_batches_total{engine="0"}', "3.0")
    seen = scrape(tmp_path)
    assert seen['vllm:ckv_gather_query_tokens_total{engine="0"}'] == "600.0"
    name = 'vllm:ckv_gather_ordinary_batches_total{engine="0",reason="capacity"}'
    assert seen[name] == "2.0"
    assert seen['vllm:ckv_gather_received_bytes_total{engine="0",path="dcp"}'] == "7.0"
    counters.gathered_batches += 1
    wait_for(tmp_path, 'vllm:ckv_gather_batches_total{engine="0"}', "4.0")
    # A server that went away ends the thread at the next change.
    monkeypatch.setattr("pathlib.Path.write_text", _fail)
    counters.gathered_batches += 1
    thread.join(20)
    assert not thread.is_alive()


def _fail(*_, **__):
    raise FileNotFoundError


def test_nobody_asked(monkeypatch):
    monkeypatch.delenv(metrics.FOLDER, raising=False)
    assert metrics.publish(dict, 0) is None


SERVER = """
import os, subprocess, sys
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.attention.backends.mla.ckv_gather import metrics
metrics.offer()
metrics.offer()
print(os.environ[metrics.FOLDER])
worker = '''
import time
from vllm.v1.attention.backends.mla.ckv_gather import metrics
from vllm.v1.attention.backends.mla.ckv_gather.counters import GatherCounters
metrics.offer()
metrics.publish(GatherCounters(gathered_batches=5).as_dict, 1)
time.sleep(0.5)
'''
subprocess.run([sys.executable, "-c", worker], check=True)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
unregister_vllm_metrics()
print(generate_latest(REGISTRY).decode())
"""


def test_from_a_worker_process_to_vllms_registry():
    env = {k: v for k, v in os.environ.items() if k != metrics.FOLDER}
    result = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=240, env=env
    )
    assert result.returncode == 0, result.stderr
    folder, *lines = result.stdout.splitlines()
    assert 'vllm:ckv_gather_batches_total{engine="1"} 5.0' in lines
    assert sum(line.startswith("# TYPE vllm:ckv_gather_batches_total") for line in lines) == 1
    assert not os.path.exists(folder)


@pytest.mark.parametrize("flag", ["0", "1"])
def test_the_plugin_offers_them_with_the_gather_on(monkeypatch, flag):
    from vllm.plugins import b12x_mla_sparse as plugin

    offered = []
    monkeypatch.setattr(metrics, "offer", lambda: offered.append(True))
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", flag)
    plugin.register()
    assert offered == [True] * int(flag)
