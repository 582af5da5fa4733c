# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks/decode_engine.py`` times, with an engine that answers at once."""

import time
from types import SimpleNamespace

import pytest

from vllm.platforms.ckv_reference import declare_torchvision_ops

declare_torchvision_ops()

STEP, YARDSTICK = 0.002, 0.03
"""Seconds that a step takes at least, and that a yardstick takes: far more."""


class Engine:
    """Requests get their first token one after the other, a step each."""

    vllm_config = SimpleNamespace(attention_config=SimpleNamespace(backend=None))

    def __init__(self, worker: SimpleNamespace) -> None:
        self.worker = worker
        self.steps = 0
        self.requests: list[str] = []

    def add_request(self, name, prompt, sampling) -> None:
        self.requests.append(name)

    def step(self):
        self.steps += 1
        self.worker.execute_model()
        self.worker.sample_tokens()
        time.sleep(STEP)
        return [
            SimpleNamespace(
                request_id=name,
                finished=False,
                outputs=[SimpleNamespace(token_ids=[1] * (self.steps - number))],
            )
            for number, name in enumerate(self.requests)
        ]


class Llm:
    """One whose only worker runs in this process."""

    def __init__(self) -> None:
        self.worker = SimpleNamespace(execute_model=lambda: None, sample_tokens=lambda: None)
        self.llm_engine = Engine(self.worker)

    def collective_rpc(self, function):
        return [function(self.worker)]


@pytest.fixture
def decode(load_benchmark):
    return load_benchmark("decode_engine")


@pytest.mark.parametrize("split", [True, False])
def test_every_timed_step_has_its_yardstick(decode, monkeypatch, split):
    """Which is a part of it only where the workers go on meanwhile."""
    job = {
        "requests": 2,
        "context": 4,
        "answer": 30,
        "samples": 3,
        "split": split,
        "device_steps": 2,
        "beside": 0,
        "beside_samples": 0,
        "vocabulary": 16,
    }
    calls = iter(range(100))

    def yardstick() -> float:
        time.sleep(YARDSTICK)
        return float(next(calls))

    events, llm = [], Llm()
    monkeypatch.setattr(decode, "yardstick", yardstick)
    monkeypatch.setattr(
        decode, "record_device", lambda worker: setattr(worker, "recorded", llm.llm_engine.steps)
    )
    monkeypatch.setattr(
        decode,
        "device_times",
        lambda worker: {"kernel": 8.0 * (llm.llm_engine.steps - worker.recorded), "none": 0.0},
    )
    monkeypatch.setattr(
        decode, "start_engine", lambda: (job, llm, lambda **event: events.append(event))
    )
    decode.serve()
    (event,) = events
    steps, yardsticks = event["step_seconds"], event["yardstick_seconds"]
    # Those of the steps that warm up are left out.
    assert yardsticks == [decode.WARM_UP_STEPS + n for n in range(3)]
    assert len(steps) == 3
    assert len(event["worker_seconds"]) == (3 if split else 0)
    assert min(steps) >= (STEP if split else STEP + YARDSTICK)
    assert (min(steps) < YARDSTICK) == split
    # Of a step, out of two further ones.
    assert event["device_us"] == {"kernel": 8.0}


def test_the_device_is_summed_up_by_its_longest_kernels(decode):
    found = decode.device_summary({"short": 0.9, "long": 60.0, "longer": 139.1})
    assert found == {"all": 200.0, "kernels": {"longer": 139.1, "long": 60.0}}
    assert list(found["kernels"]) == ["longer", "long"]


def test_what_is_beside_the_workers_is_told_step_by_step(decode):
    """Medians of 5 and 4 ms would leave 1 ms, which no step has."""
    found = decode.timings(
        {
            "step_seconds": [0.004, 0.005, 0.009],
            "worker_seconds": [0.001, 0.004, 0.006],
            "yardstick_seconds": [0.001, 0.001, 0.002],
        }
    )
    assert found["main_ms"]["median"] == 3
    assert found["each_ms"] == [4, 5, 9]
    assert found["each_yardstick_ms"] == [1, 1, 2]
    assert found["yardstick_ms"]["median"] == 1


def test_steps_scheduled_ahead_tell_no_parts(decode):
    times = {"step_seconds": [0.004, 0.005], "yardstick_seconds": [0.001, 0.001]}
    found = decode.timings(times | {"worker_seconds": []})
    assert "worker_ms" not in found and "main_ms" not in found
    assert found["step_ms"]["best"] == 4


def test_the_yardstick_is_work_and_no_waiting(decode, monkeypatch):
    """Four times the turns take longer; pauses in between do not."""
    few = min(decode.yardstick() for _ in range(20))
    monkeypatch.setattr(decode, "YARDSTICK_TURNS", 4 * decode.YARDSTICK_TURNS)
    assert min(decode.yardstick() for _ in range(20)) > 2 * few
    monkeypatch.setattr(decode, "str", lambda number: time.sleep(1e-3) or "1", raising=False)
    monkeypatch.setattr(decode, "YARDSTICK_TURNS", 20)
    began = time.perf_counter()
    measured = decode.yardstick()
    assert 0 < measured < (time.perf_counter() - began) / 2
