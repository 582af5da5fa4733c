# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/memory_gpu.sh`` without a GPU, and the verdict on results made up for it."""

import copy
import json
import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/memory_gpu.sh"
BLOCK, STAGING = 10_000_000, 500_000


def run(*words: str, **variables: str) -> subprocess.CompletedProcess:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", **variables}
    command = ["bash", str(SCRIPT), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_a_dry_run_prints_commands_that_their_programs_accept(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    for words, model in (((), "benchmarks/models/slice_h64"), ((str(tmp_path),), str(tmp_path))):
        result = run("--dry-run", *words, OUT=str(tmp_path / "out"))
        assert result.returncode == 0, result.stderr
        *runs, verdict = (line.split() for line in result.stdout.splitlines())
        eager, graphs, _ = runs
        for line in runs:
            assert line[1] == "benchmarks/traffic.py" and model in line
            flags = dict(pairwise(line[2:]))
            assert (flags["--gpu-memory-utilization"], flags["--first-prompt"]) == ("0.93", "54639")
        assert json.loads(eager[eager.index("--engine") + 1]) == {}
        assert json.loads(graphs[graphs.index("--engine") + 1]) == {"enforce_eager": False}
        out = [line[line.index("--out") + 1] for line in runs]
        assert verdict[-3:] == out and model in verdict
        assert not (tmp_path / "out").exists()
    # traffic.py takes every flag: its parser stops at --help, which comes last.
    help_of = [sys.executable, *eager[1:], "--help"]
    assert subprocess.run(help_of, cwd=ROOT, capture_output=True, timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [({}, (2, 2)), ({"TP": "4"}, (4, 4)), ({"TP": "4", "DCP": "2"}, (4, 2))],
)
def test_every_command_has_the_ranks_that_were_asked_for(variables, ranks):
    for line in run("--dry-run", **variables).stdout.splitlines():
        assert "--tp {} --dcp {} ".format(*ranks) in line


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("a", "b"), "usage"),
        (("--fast",), "usage"),
        (("no such folder",), "no such folder/config.json"),
        ((), "needs 2 GPUs, found 0"),
    ],
)
def test_what_cannot_run_is_refused_in_words(tmp_path, words, text):
    python = f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "$@"\n'
    (tmp_path / "python").write_text(python)
    (tmp_path / "python").chmod(0o755)
    result = run(*words, BIN=str(tmp_path), OUT=str(tmp_path / "out"))
    assert result.returncode == 2 and text in result.stderr
    assert not (tmp_path / "out").exists()


def test_every_rank_needs_a_gpu(tmp_path):
    (tmp_path / "python").write_text("#!/bin/bash\necho 3\n")
    (tmp_path / "python").chmod(0o755)
    result = run(BIN=str(tmp_path), OUT=str(tmp_path / "out"), TP="4", DCP="2")
    assert result.returncode == 2 and "needs 4 GPUs, found 3" in result.stderr


@pytest.fixture(scope="module")
def verdict(load_benchmark):
    return load_benchmark("memory_verdict")


def side(blocks: int, workspace: int, seconds: float) -> dict:
    memory = {"workspace": [[4096, 300_000_000]], "locked": True, "gather": workspace}
    return {
        "cache_blocks": blocks,
        "start_seconds": seconds,
        "memory": {"start": memory, "end": copy.deepcopy(memory)},
    }


@pytest.fixture
def document():
    """The gather asked for 200 MB and the cache has 20 blocks fewer."""
    return {
        "violations": [],
        "comparison": {},
        "on": side(980, 200_000_000, 48.0),
        "off": side(1000, 0, 40.0),
        "engine": {"block_size": 256, "max_model_len": 65_536, "max_num_seqs": 12},
    }


def failures(verdict, document) -> list[str]:
    return [
        check.text for check in verdict.judge("eager", document, BLOCK, STAGING) if not check.passed
    ]


def test_a_sound_run_passes(verdict, document):
    assert failures(verdict, document) == []
    assert verdict.judge_start("eager", document).passed


def test_each_fault_fails_with_its_numbers(verdict, document):
    broken = copy.deepcopy(document)
    broken["violations"] = ["reserved grew"]
    for comparison, judged in (({}, "outputs and memory"), (None, "memory")):
        broken["comparison"] = comparison
        assert failures(verdict, broken) == [
            f"eager: {judged}, 1 violations",
            "eager: reserved grew",
        ]
    # 26 blocks for 200.5 MB: two for rounding and 32 MiB of noise are allowed, which 25 are within.
    for blocks, wrong in ((975, 0), (974, 1)):
        broken = copy.deepcopy(document)
        broken["on"]["cache_blocks"] = blocks
        assert len(failures(verdict, broken)) == wrong
    assert "gave up 260,000,000 bytes for 200,500,000" in failures(verdict, broken)[0]
    for change in ({"locked": False}, {"workspace": [[8192, 200_000_000]]}):
        broken = copy.deepcopy(document)
        broken["on"]["memory"]["start"] |= change
        assert ["workspace stayed" in text for text in failures(verdict, broken)] == [True]
    slow = verdict.judge_start("graphs", {**document, "on": side(980, 0, 50.1)})
    assert not slow.passed and "50.1 s, 40.0 s with the gather off" in slow.text


def test_the_verdict_of_files(verdict, document, tmp_path, monkeypatch, capsys):
    for name in ("eager", "graphs"):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    model = str(ROOT / "benchmarks/models/slice_h64")
    # The slice at TP2: pages of 4,352 tokens, two sparse MLA layers.
    assert verdict.sizes_of(model, document, 2, 2)[0] == 2 * 4352 * 561

    def judged(*names: str) -> tuple[int, list[str]]:
        files = [str(tmp_path / f"{name}.json") for name in names]
        arguments = ["--model", model, "--tp", "2", "--dcp", "2"]
        monkeypatch.setattr(sys, "argv", ["verdict", *arguments, *files])
        return verdict.main(), capsys.readouterr().out.splitlines()

    status, lines = judged("eager", "graphs")
    assert status == 0 and all(line.startswith("PASS ") for line in lines)
    # The first run compiles, so its start is not judged.
    assert [line for line in lines if "the start took" in line] == [lines[-1]]
    status, lines = judged("eager", "lost")
    assert status == 1 and lines[-1].startswith("FAIL lost: there is no ")
