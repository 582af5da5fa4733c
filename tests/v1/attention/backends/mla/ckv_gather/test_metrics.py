# SPDX-License-Identifier: Apache-2.0
"""Totals travel from a worker process to a scrape of the process that started it."""

import json
import os
import subprocess
import sys
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm.v1.attention.backends.mla.ckv_gather import metrics
from vllm.v1.attention.backends.mla.ckv_gather.counters import GatherCounters
from vllm.v1.attention.backends.mla.ckv_gather.eligibility import Reason

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


def scraped(folder):
    registry = CollectorRegistry()
    registry.register(metrics.GatherCollector(folder))
    return generate_latest(registry).decode()


def scrape(folder):
    lines = scraped(folder).splitlines()
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
    monkeypatch.delenv(MULTIPROCESS, raising=False)
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path))
    monkeypatch.setattr(metrics, "INTERVAL_SECONDS", 0.01)
    counters = GatherCounters(
        gathered_batches=3, gathered_windows=8, gathered_query_tokens=600, dcp_bytes=7
    )
    counters.ordinary[Reason.TOO_FEW_TOKENS] = 2
    for seconds in (3e-4, 4e-4, 0.03, 9.0):
        counters.exchange_seconds["records"].add(seconds)
    thread = metrics.publish(counters.as_dict, 0)
    wait_for(tmp_path, 'vllm:ckv_gather_batches_total{engine="0"}', "3.0")
    seen = scrape(tmp_path)
    assert seen['vllm:ckv_gather_windows_total{engine="0"}'] == "8.0"
    assert seen['vllm:ckv_gather_query_tokens_total{engine="0"}'] == "600.0"
    name = 'vllm:ckv_gather_ordinary_batches_total{engine="0",reason="too_few_tokens"}'
    assert seen[name] == "2.0"
    assert seen['vllm:ckv_gather_received_bytes_total{engine="0",path="dcp"}'] == "7.0"
    check_durations(seen, 0)
    counters.gathered_batches += 1
    wait_for(tmp_path, 'vllm:ckv_gather_batches_total{engine="0"}', "4.0")
    # A server that went away ends the thread at the next change.
    monkeypatch.setattr("pathlib.Path.write_text", _fail)
    counters.gathered_batches += 1
    thread.join(20)
    assert not thread.is_alive()


def test_a_later_engine_of_the_process_takes_the_thread_over(tmp_path, monkeypatch):
    monkeypatch.delenv(MULTIPROCESS, raising=False)
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path))
    monkeypatch.setattr(metrics, "INTERVAL_SECONDS", 0.01)
    threads = [
        metrics.publish(GatherCounters(gathered_batches=batches).as_dict, engine)
        for batches, engine in ((3, 0), (5, 0), (7, 1))
    ]
    assert threads[0] is threads[1] is not threads[2]
    wait_for(tmp_path, 'vllm:ckv_gather_batches_total{engine="0"}', "5.0")
    wait_for(tmp_path, 'vllm:ckv_gather_batches_total{engine="1"}', "7.0")


def test_a_scrape_is_read_back(tmp_path):
    counters = GatherCounters(
        gathered_batches=3,
        gathered_windows=4,
        mixed_batches=1,
        gathered_query_tokens=600,
        gathered_visible_tokens=700,
        ckv_bytes=8,
        dcp_bytes=7,
    )
    counters.ordinary[Reason.TOO_MANY_REQUESTS] = 2
    for engine, totals in ((0, counters), (5, GatherCounters())):
        (tmp_path / f"{engine}.json").write_text(json.dumps(totals.as_dict()))
    read = metrics.read(scraped(tmp_path) + "vllm:other_total 3.0\n")
    assert read == {"0": counters, "5": GatherCounters()}
    assert metrics.read("vllm:other_total 3.0\n") == {}


def check_durations(seen, engine):
    """Buckets add up, as Prometheus wants them."""
    name, labels = "vllm:ckv_gather_exchange_seconds", f'engine="{engine}",exchange="records"'
    counts = {"0.00025": 0, "0.0005": 2, "0.025": 2, "0.05": 3, "1.0": 3, "+Inf": 4}
    for bound, count in counts.items():
        assert seen[f'{name}_bucket{{{labels},le="{bound}"}}'] == str(float(count)), bound
    assert seen[f"{name}_count{{{labels}}}"] == "4.0"
    assert float(seen[f"{name}_sum{{{labels}}}"]) == pytest.approx(9.0307)
    assert seen[f'{name}_count{{engine="{engine}",exchange="index_keys"}}'] == "0.0"


def _fail(*_, **__):
    raise FileNotFoundError


def test_nobody_asked(monkeypatch):
    monkeypatch.delenv(metrics.FOLDER, raising=False)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
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
    env = {k: v for k, v in os.environ.items() if k not in (metrics.FOLDER, MULTIPROCESS)}
    result = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=240, env=env
    )
    assert result.returncode == 0, result.stderr
    folder, *lines = result.stdout.splitlines()
    assert 'vllm:ckv_gather_batches_total{engine="1"} 5.0' in lines
    assert sum(line.startswith("# TYPE vllm:ckv_gather_batches_total") for line in lines) == 1
    assert not os.path.exists(folder)


API_SERVERS = """
import multiprocessing, sys, time
from vllm.v1.metrics.prometheus import get_prometheus_registry, setup_multiprocess_prometheus
from prometheus_client import generate_latest
from vllm.v1.attention.backends.mla.ckv_gather import metrics
from vllm.v1.attention.backends.mla.ckv_gather.counters import GatherCounters

setup_multiprocess_prometheus()  # what vllm serve does for several API servers
metrics.offer()

def rank_0(engine, done):
    counters = GatherCounters(gathered_batches=5 + engine)
    for seconds in (3e-4, 4e-4):
        counters.exchange_seconds["records"].add(seconds)
    reads = []
    def read():
        reads.append(None)
        return counters.as_dict()
    metrics.INTERVAL_SECONDS = 0.01
    metrics.publish(read, engine)
    for seconds in (0.03, 9.0):
        counters.exchange_seconds["records"].add(seconds)
    seen = len(reads)
    while len(reads) < seen + 3:
        time.sleep(0.01)
    done.wait()

def server(answers):
    answers.put(generate_latest(get_prometheus_registry()).decode())

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    done, answers = context.Barrier(3), context.Queue()
    workers = [context.Process(target=rank_0, args=(engine, done)) for engine in (0, 1)]
    for worker in workers:
        worker.start()
    done.wait()
    for _ in range(2):
        context.Process(target=server, args=(answers,)).start()
        print(answers.get())
        print("END")
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_every_api_server_shows_every_engine(method, tmp_path):
    """vLLM's own multi-process mode: two engines, two servers, forked workers as well."""
    env = {k: v for k, v in os.environ.items() if k not in (metrics.FOLDER, MULTIPROCESS)}
    script = tmp_path / "servers.py"
    script.write_text(API_SERVERS)
    result = subprocess.run(
        [sys.executable, script, method], capture_output=True, text=True, timeout=300, env=env
    )
    assert result.returncode == 0, result.stderr
    answers = result.stdout.split("END\n")[:2]
    assert len(answers) == 2
    for answer in answers:
        lines = [line for line in answer.splitlines() if line.startswith(metrics.PREFIX)]
        seen = dict(line.rsplit(" ", 1) for line in lines)
        for engine in (0, 1):
            name = f'vllm:ckv_gather_batches_total{{engine="{engine}"}}'
            assert seen[name] == f"{5.0 + engine}"
            check_durations(seen, engine)
        assert "# TYPE vllm:ckv_gather_exchange_seconds histogram" in answer


@pytest.mark.parametrize("flag", ["0", "1"])
def test_the_plugin_offers_them_with_the_gather_on(monkeypatch, flag):
    from vllm.plugins import b12x_mla_sparse as plugin

    offered = []
    monkeypatch.setattr(metrics, "offer", lambda: offered.append(True))
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", flag)
    plugin.register()
    assert offered == [True] * int(flag)
