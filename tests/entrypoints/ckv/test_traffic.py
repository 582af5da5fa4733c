# SPDX-License-Identifier: Apache-2.0
"""The traffic test's own judgement: every kind of violation is found, and nothing else."""

import importlib.util
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from vllm.entrypoints.ckv import traffic
from vllm.entrypoints.ckv.traffic import Request, Side, WaveResult

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "traffic.py"


def test_the_same_seed_draws_the_same_requests():
    waves, again, other = (
        traffic.make_waves(60, traffic.CPU, seed=seed, vocabulary=512) for seed in (4, 4, 5)
    )
    assert waves == again != other
    arrivals = [arrival for wave in waves for arrival in wave.arrivals]
    assert len(arrivals) == 60
    for arrival in arrivals:
        assert 0 < len(arrival.prompt) + arrival.max_tokens < traffic.CPU.max_model_len
        assert max(arrival.prompt) < 512


def test_waves_hold_everything_that_is_asked_for():
    waves = traffic.make_waves(2000, traffic.GPU, seed=0, vocabulary=512, sleep=True)
    arrivals = [arrival for wave in waves for arrival in wave.arrivals]
    assert {wave.then for wave in waves} == {"", "reset", "sleep"}
    assert any(wave.reset_at is not None for wave in waves)
    assert {arrival.priority for arrival in arrivals} == {-1, 0, 1}
    assert any(arrival.abort_after == 0 for arrival in arrivals)
    starts = [tuple(arrival.prompt[: traffic.GPU.prefix]) for arrival in arrivals]
    assert len(starts) - len(set(starts)) > 100
    assert any(len(arrival.prompt) > traffic.GPU.budget for arrival in arrivals)
    assert len({arrival.step for arrival in waves[0].arrivals}) > 5


def test_a_first_prompt_comes_alone_and_fits():
    waves = traffic.make_waves(21, traffic.CPU, seed=0, vocabulary=512, first_prompt=5000)
    assert [len(arrival.prompt) for arrival in waves[0].arrivals] == [5000]
    assert [len(wave.arrivals) for wave in waves] == [1, 10, 10]
    arguments = traffic.engine_arguments(
        Path("/none"), traffic.CPU, tp=2, dcp=2, use_gpu=False, first_prompt=5000
    )
    assert arguments["max_model_len"] >= 5000 + traffic.CPU.answer
    assert arguments["num_gpu_blocks_override"] > traffic.CPU.cache_blocks
    assert arguments["load_format"] == "dummy"


def test_the_cache_takes_what_is_left_if_asked():
    arguments = traffic.engine_arguments(
        Path("/none"), traffic.GPU, tp=2, dcp=2, use_gpu=True, gpu_memory_utilization=0.93
    )
    assert arguments["gpu_memory_utilization"] == 0.93
    assert "num_gpu_blocks_override" not in arguments


def memory(**changes):
    found = {
        "objects": 9000,
        "tensors": 10,
        "tensor_bytes": 100,
        "resident": 1 << 30,
        "locked": True,
    }
    found |= {"allocated": 500, "reserved": 600, "retries": 0, "ooms": 0}
    found |= {"allocated_peak": 570, "reserved_peak": 600, "device_used": 900, "profiled": 70}
    return found | {"workspace": [[64, 1000]], "locked": True} | changes


def make_wave(**changes) -> WaveResult:
    requests = [
        Request([5, 6], [-0.5, -1.0], [0.3, 0.01], 512, True),
        Request([7], [-0.7], [0.2], 0, False),
    ]
    counters = {
        "gathered_batches": 2,
        "gathered_query_tokens": 30,
        "ordinary_batches": {"decode_tokens": 1},
    }
    wave = WaveResult(
        requests=requests,
        steps=[{"0": 8}, {"0": 1, "1": 3}],
        preempted=1,
        reset=1,
        most_running=traffic.CPU.max_num_seqs,
        most_waiting=1,
        free_blocks=12,
        known_requests=0,
        counters=counters,
        memory=[memory(), memory()],
        seconds=1.0,
    )
    return replace(wave, **changes)


def make_side(*waves: WaveResult, **changes) -> Side:
    side = Side(13, 1.0, 12, [memory(), memory()], list(waves) or [make_wave()] * 4)
    return replace(side, **changes)


def with_first(**changes) -> Side:
    request = replace(make_wave().requests[0], **changes)
    return make_side(make_wave(requests=[request, make_wave().requests[1]]))


OTHER = make_side(make_wave())


def test_equal_sides_have_no_violation():
    found = traffic.compare(make_side(), make_side())
    assert found.violations == [] and found.requests == 8 and found.tokens == 12
    assert traffic.find_leaks("x", make_side()) == []


def test_near_ties_are_counted_and_end_the_comparison():
    other = with_first(tokens=[5, 6, 8], logprobs=[-0.5, -1.0, -9.0], lead=[0.3, 0.01, 5.0])
    mine = with_first(tokens=[5, 9, 9], logprobs=[-0.5, -1.01, -1.0], lead=[0.3, 0.0, 5.0])
    found = traffic.compare(mine, other)
    assert found.violations == [] and found.near_ties == 1 and found.tokens == 3
    assert found.max_logprob_delta == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": [4, 6]}, "token 0: 4 with the gather, 5 without, which leads by 0.3000"),
        ({"logprobs": [-0.521, -1.0]}, "differ by 0.0210"),
        ({"logprobs": [-0.5, math.nan]}, "differ by nan"),
        ({"finished": False}, "did not finish"),
        ({"tokens": [5], "logprobs": [-0.5], "lead": [0.3]}, "not with as many tokens"),
    ],
)
def test_other_outputs_are_violations(changes, said):
    (violation,) = traffic.compare(with_first(**changes), OTHER).violations
    assert said in violation and "wave 0, request 0" in violation


def test_other_batches_are_a_violation_unless_the_caches_differ():
    mine = make_side(make_wave(steps=[{"0": 8}, {"0": 1, "1": 2}]))
    found = traffic.compare(mine, OTHER)
    assert found.other_batches == 1 and "1 steps" in found.violations[0]
    found = traffic.compare(replace(mine, cache_blocks=14), OTHER)
    assert found.other_batches == 1 and found.violations == []


def test_a_missing_wave_is_a_violation():
    assert "4 waves with" in traffic.compare(make_side(), OTHER).violations[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"free_blocks": 11}, "11 of 12 blocks are free after wave 3"),
        ({"known_requests": 1}, "1 requests remain after wave 3"),
        ({"memory": [memory(), memory(tensors=11)]}, "rank 1: tensors reached"),
        ({"memory": [memory(tensor_bytes=4197), memory()]}, "rank 0: tensor_bytes reached"),
        ({"memory": [memory(allocated=501), memory()]}, "allocated reached"),
        ({"memory": [memory(), memory(allocated_peak=571)]}, "held 71 bytes for a moment"),
        ({"memory": [memory(), memory(objects=9501)]}, "objects reached"),
        ({"memory": [memory(workspace=[[64, 1001]]), memory()]}, "the workspace was"),
        ({"memory": [memory(workspace=[[128, 1000]]), memory()]}, "the workspace was"),
        ({"memory": [memory(retries=1), memory()]}, "1 retries"),
        ({"memory": [memory(ooms=1), memory()]}, "1 ooms"),
    ],
)
def test_what_is_kept_is_found(changes, said):
    (leak,) = traffic.find_leaks("x", make_side(*[make_wave()] * 3, make_wave(**changes)))
    assert leak.startswith("x") and said in leak


@pytest.mark.parametrize(("what", "allowed"), traffic.GROWTH_BEYOND_OFF.items())
def test_what_grows_with_the_gather_only_is_found(what, allowed):
    def grown(by: int) -> Side:
        large = memory(**{what: memory()[what] + by})
        return make_side(*[make_wave()] * 3, make_wave(memory=[memory(), large]))

    (found,) = traffic.find_growth_beyond(grown(allowed + 1), make_side())
    assert f"rank 1: {what} bytes grew by {allowed + 1:,}" in found
    assert traffic.find_growth_beyond(grown(allowed), make_side()) == []
    assert traffic.find_growth_beyond(grown(allowed + 1), grown(1)) == []


def test_growth_in_the_first_half_is_no_leak():
    small = make_wave(memory=[memory(tensors=3, allocated=9, allocated_peak=79)] * 2)
    assert traffic.find_leaks("x", make_side(small, *[make_wave()] * 3)) == []


def test_what_the_last_batch_leaves_behind_is_no_leak():
    large = make_wave(memory=[memory(tensor_bytes=180)] * 2)
    waves = [large, make_wave(), make_wave(), large]
    assert traffic.find_leaks("x", make_side(*waves)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"preempted": 0}, "preempted nobody"),
        ({"reset": 0}, "reset no running request"),
        ({"most_running": 3}, "never ran 4 requests"),
        ({"most_waiting": 0}, "let nobody wait"),
        ({"requests": [replace(make_wave().requests[0], cached_tokens=0)] * 2}, "no prefix"),
        ({"requests": [replace(r, finished=True) for r in make_wave().requests]}, "no request ab"),
        ({"counters": make_wave().counters | {"gathered_batches": 0}}, "gathered no batch"),
        ({"counters": make_wave().counters | {"ordinary_batches": {}}}, "no prompt beside"),
    ],
)
def test_traffic_that_lacks_something_says_so(changes, said):
    off = make_side(make_wave(counters=make_wave().counters | {"gathered_batches": 0}))
    assert traffic.find_gaps(OTHER, off, traffic.CPU, short_of_blocks=True) == []
    gaps = traffic.find_gaps(
        make_side(make_wave(**changes)), off, traffic.CPU, short_of_blocks=True
    )
    assert any(said in gap for gap in gaps)


def test_the_other_side_must_not_gather_and_the_workspace_must_be_locked():
    unlocked = make_side(memory=[memory(locked=False), memory()])
    gaps = traffic.find_gaps(unlocked, OTHER, traffic.CPU, short_of_blocks=True)
    assert any("unlocked" in gap for gap in gaps) and any("without" in gap for gap in gaps)


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("traffic_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("free_blocks", "weights"), [(12, True), (11, True), (12, False)])
def test_the_script_writes_its_result_and_fails_on_a_violation(
    script, monkeypatch, tmp_path, free_blocks, weights
):
    asked = []

    def run_side(gather, arguments, waves, log, *, use_gpu):
        asked.append((gather, arguments["seed"], use_gpu, len(waves)))
        counters = make_wave().counters | {"gathered_batches": 2 * int(gather)}
        yield {"event": "start", "cache_blocks": 13, "seconds": 1.0}
        yield {"event": "empty", "free_blocks": 12, "memory": [memory(), memory()]}
        for _ in waves:
            wave = make_wave(counters=counters, free_blocks=free_blocks)
            yield {"event": "wave"} | json.loads(json.dumps(asdict(wave)))

    monkeypatch.setattr(script.traffic, "run_side", run_side)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 512}')
    if weights:
        (tmp_path / "model" / "model.safetensors").touch()
    out = tmp_path / "out.json"
    arguments = ["--cpu", "--requests", "20", "--engine", '{"seed": 3}', "--out", str(out)]
    arguments += ["--model", str(tmp_path / "model"), "--logs", str(tmp_path / "logs")]
    monkeypatch.setattr("sys.argv", ["traffic.py", *arguments])
    assert script.main() == (free_blocks != 12)
    assert asked == [("1", 3, False, 2), ("0", 3, False, 2)]
    document = json.loads(out.read_text())
    assert document["ok"] == (free_blocks == 12) == (not document["violations"])
    assert document["on"]["gathered_batches"] == 4 and document["off"]["gathered_batches"] == 0
    # The outputs of dummy weights mean nothing.
    assert document["comparison"]["tokens"] == 6 if weights else document["comparison"] is None
