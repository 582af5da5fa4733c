# SPDX-License-Identifier: Apache-2.0
"""The engine runner, with small programs in the place of the engine process."""

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from vllm.entrypoints.ckv import engine
from vllm.platforms import ckv_reference

PROLOGUE = """\
import json, os, sys, time
events = int(sys.argv[3])
def emit(**event):
    os.write(events, (json.dumps(event) + "\\n").encode())
"""


@pytest.fixture
def job():
    return engine.EngineJob("the job", {"tensor_parallel_size": 2}, {}, [[[3, 4]], [[5], [6]]], 2)


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Makes ``code`` run where the engine would; it has ``events`` and ``emit``."""

    def install(code: str) -> None:
        path = tmp_path / "program"
        path.write_text(f"#!{sys.executable}\n{PROLOGUE}{code}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(engine.sys, "executable", str(path))

    return install


def run(job, tmp_path) -> engine.EngineResult:
    return engine.collect(engine.run_engine(job, tmp_path / "log", use_gpu=False))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_job_arrives_and_the_events_come_back(job, program, tmp_path):
    program(
        "assert sys.argv[1:3] == ['-m', 'vllm.entrypoints.ckv.engine']\n"
        "job = json.load(sys.stdin)\n"
        "emit(event='start', seconds=2.5, cache_blocks=7, block_size=256)\n"
        "for group in job['groups']:\n"
        "    emit(event='group', tokens=group, logprobs=[[-0.5]] * len(group), cached_tokens=[0],\n"
        "         counters={'ranks': job['arguments']['tensor_parallel_size']},\n"
        "         seconds=job['max_tokens'])\n"
        "print('to the log')\n"
    )
    result = run(job, tmp_path)
    assert (result.start_seconds, result.cache_blocks, result.block_size) == (2.5, 7, 256)
    assert [group.tokens for group in result.groups] == job.groups
    assert result.groups[1].logprobs == [[-0.5], [-0.5]]
    assert result.groups[0].counters == {"ranks": 2} and result.groups[0].seconds == 2
    assert (tmp_path / "log").read_text() == "to the log\n"


def test_events_come_while_the_engine_still_works(job, program, tmp_path):
    program("emit(event='start')\ntime.sleep(60)\n")
    events = engine.run_engine(job, tmp_path / "log", use_gpu=False)
    began = time.monotonic()
    assert next(events) == {"event": "start"}
    events.close()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("before", ["", "emit(event='start')\n"])
def test_a_failing_engine_raises_with_the_end_of_its_log(job, program, tmp_path, before):
    program(
        f"{before}for i in range(100): print('line', i)\n"
        "sys.stdout.flush()\nsys.stderr.write('the reason\\n')\nsys.exit(3)\n"
    )
    with pytest.raises(RuntimeError) as error:
        list(engine.run_engine(job, tmp_path / "log", use_gpu=False))
    message = str(error.value)
    assert "'the job' ended with status 3" in message and str(tmp_path / "log") in message
    assert message.endswith("line 99\nthe reason")
    assert "line 10\n" not in message


def test_an_engine_that_a_signal_ends_raises(job, program, tmp_path):
    program("emit(event='start')\nos.kill(os.getpid(), 9)\n")
    with pytest.raises(RuntimeError, match="status -9"):
        list(engine.run_engine(job, tmp_path / "log", use_gpu=False))


def test_an_engine_that_ends_before_it_reads_its_job_is_reported_as_such(program, tmp_path):
    program("sys.stderr.write('no import\\n')\nsys.exit(5)\n")
    # More than a pipe holds, so that writing it meets the closed end.
    job = engine.EngineJob("long", {}, {}, [[[7] * 200_000]], 1)
    with pytest.raises(RuntimeError, match=r"status 5(.|\n)*no import"):
        list(engine.run_engine(job, tmp_path / "log", use_gpu=False))


def test_no_process_is_left_when_the_caller_stops(job, program, tmp_path):
    program("emit(event='start', pid=os.getpid())\ntime.sleep(600)\n")
    events = engine.run_engine(job, tmp_path / "log", use_gpu=False)
    pid = next(events)["pid"]
    assert is_running(pid)
    events.close()
    assert not is_running(pid)


def test_an_engine_that_ignores_termination_is_killed(job, program, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "TERMINATION_SECONDS", 1)
    program(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "emit(event='start', pid=os.getpid())\ntime.sleep(600)\n"
    )
    events = engine.run_engine(job, tmp_path / "log", use_gpu=False)
    pid = next(events)["pid"]
    try:
        events.close()
        assert not is_running(pid)
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def test_no_descriptor_is_left_behind(job, program, tmp_path):
    program("json.load(sys.stdin)\n")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert run(job, tmp_path).groups == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_flags_of_the_callers_shell_are_dropped_and_the_jobs_own_are_set(
    job, program, tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", "1")
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS", "nonsense")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("UNRELATED", "kept")
    job.environment["VLLM_B12X_MLA_CKV_GATHER_MIN_TOKENS"] = "0"
    program("json.load(sys.stdin)\nprint(json.dumps(dict(os.environ)))\n")
    run(job, tmp_path)
    environment = json.loads((tmp_path / "log").read_text())
    flags = {k: v for k, v in environment.items() if k.startswith("VLLM_B12X_MLA_")}
    assert flags == {"VLLM_B12X_MLA_CKV_GATHER_MIN_TOKENS": "0"}
    assert environment["UNRELATED"] == "kept"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize("use_gpu", [True, False])
def test_the_reference_platform_is_set_up_only_without_gpus(monkeypatch, use_gpu):
    for name in ckv_reference.environment():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    monkeypatch.setattr(engine.os, "sched_getaffinity", lambda pid: set(range(6)))
    environment = engine.base_environment(2, use_gpu=use_gpu)
    found = {k: v for k, v in environment.items() if k in ckv_reference.environment()}
    assert found == ({} if use_gpu else ckv_reference.environment())
    assert environment["OMP_NUM_THREADS"] == ("77" if use_gpu else "3")
    assert engine.base_environment(8, use_gpu=False)["OMP_NUM_THREADS"] == "1"


def test_differences_of_counters():
    before = {"gathered_batches": 2, "ordinary_batches": {"disabled": 3}}
    after = {"gathered_batches": 5, "ordinary_batches": {"disabled": 3, "capacity": 1}}
    assert engine.difference(after, before) == {
        "gathered_batches": 3,
        "ordinary_batches": {"disabled": 0, "capacity": 1},
    }
