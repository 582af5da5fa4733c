# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/qualify_sm120.sh`` as far as it goes without a GPU of compute capability 12.x.

Its commands are parsed by the programs they call; the script itself runs with stand-ins for these
programs, which play a machine with such GPUs.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.entrypoints.ckv import cli
from vllm.platforms.ckv_reference import environment

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "qualify_sm120.sh"
FOLDER = str(ROOT / "benchmarks" / "models" / "slice_h64")


def run(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        cwd=cwd,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def commands(*arguments: str, **more) -> list[list[str]]:
    result = run("--dry-run", *arguments, **more)
    assert result.returncode == 0, result.stderr
    return [shlex.split(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("ranks", ["2", "4", "8"])
def test_each_command_is_one_that_its_program_takes(ranks):
    planned = commands(FOLDER, ranks)
    assert len(planned) == 6
    tools = [words[1:] for words in planned if words[0] == ".venv/bin/vllm-ckv"]
    parsed = [cli.build_parser().parse_args(words) for words in tools]
    assert [p.command for p in parsed] == ["doctor", "verify", "bench"]
    _, verify, bench = parsed
    # Four ranks are the most that verify's model is made for.
    assert (verify.dcp, verify.sizes) == (min(int(ranks), 4), "b12x")
    assert (bench.tp, bench.lengths, bench.model) == (int(ranks), [32320], FOLDER)
    others = [words for words in planned if words[0] != ".venv/bin/vllm-ckv"]
    assert {words[0] for words in others} == {".venv/bin/python"}
    for words in others:
        files = [word for word in words if word.endswith(".py")]
        assert files and all((ROOT / name).is_file() for name in files)


def test_the_tests_that_it_runs_can_be_collected():
    for words in commands(FOLDER):
        if "pytest" not in words:
            continue
        result = subprocess.run(
            [sys.executable, *words[1:], "--collect-only"],
            cwd=ROOT,
            env=os.environ | environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        # 5: nothing was collected, since the module skips itself.
        skips = "test_b12x_sm120.py" in words[-1]
        assert result.returncode == (5 if skips else 0), result.stdout + result.stderr


@pytest.mark.parametrize(
    ("heads", "ranks", "status", "words"),
    [
        (64, "4", 0, "b12x has kernels for Sizes("),
        (64, "8", 0, "head_counts=(8, 64)"),
        (64, "16", 1, "no kernels for this model at 16 ranks: 4 heads"),
    ],
)
def test_the_sizes_of_a_model_are_judged(tmp_path, heads, ranks, status, words):
    pytest.importorskip("b12x")
    text = (Path(FOLDER) / "config.json").read_text()
    assert f'"num_attention_heads": {heads},' in text
    (tmp_path / "config.json").write_text(text)
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "b12x_sizes.py"), str(tmp_path), ranks],
        env=os.environ | environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == status, result.stderr
    assert "provider: TorchReferenceKernels" in result.stdout and words in result.stdout


def test_a_model_without_weights_gets_dummy_ones(tmp_path):
    def bench(model: str, **more) -> list[str]:
        return commands(model, **more)[-1]

    assert '{"load_format": "dummy"}' in bench(FOLDER)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.safetensors").touch()
    # A relative folder is the caller's.
    words = bench("model", cwd=tmp_path)
    assert "--engine" not in words and str(tmp_path / "model") in words
    named = bench("somebody/some-model")
    assert "--engine" not in named and "somebody/some-model" in named


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage:"),
        (["a", "2", "3"], "usage:"),
        ([FOLDER, "3"], "need 2, 4 or 8"),
        ([FOLDER, "two"], "need 2, 4 or 8"),
        (["nowhere"], "neither a folder nor a name"),
        (["./no/where"], "neither a folder nor a name"),
        ([FOLDER], "found: none"),
    ],
)
def test_what_cannot_work_ends_with_a_sentence(tmp_path, arguments, words):
    # There may be a GPU here, but not one that this Python knows of.
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    result = run(*arguments, BIN=str(tmp_path), OUT=str(tmp_path / "out"))
    assert result.returncode == 2 and words in result.stderr
    assert not (tmp_path / "out").exists()


STAND_IN = """#!/bin/sh
# Plays python, vllm-ckv and nvidia-smi of a machine with two such GPUs.
case "$(basename "$0") $*" in
    *get_device_capability*) echo 12.0; exit ;;
    *device_count*) echo 2; exit ;;
esac
echo "ran $(basename "$0") $*" >>"$CALLS"
case "$(basename "$0") $*" in
    *b12x_sizes*) echo "provider: $PROVIDER" ;;
    *test_b12x_sm120*) echo "8 rows, 16 heads: cosine 0.999"; echo noise; echo "9 passed" ;;
    *verify*) echo "kernels: $PROVIDER; a query selects 2,048 tokens" ;;
    *bench*) echo "on  12,345" ;;
esac
case " $* " in *" $FAILS "*) echo "it broke"; exit 3 ;; esac
"""


@pytest.fixture
def machine(tmp_path):
    """Runs the script on stand-ins; returns its result, its report and what it called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python", "vllm-ckv", "nvidia-smi"):
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)

    def play(provider: str = "B12xKernels", fails: str = "none", ranks: str = "2"):
        out, calls = tmp_path / "out", tmp_path / "calls"
        shutil.rmtree(out, ignore_errors=True)
        calls.write_text("")
        result = run(
            FOLDER,
            ranks,
            BIN=str(folder),
            OUT=str(out),
            PATH=f"{folder}:{os.environ['PATH']}",
            PROVIDER=provider,
            FAILS=fails,
            CALLS=str(calls),
        )
        report = out / "report.md"
        return result, report.read_text() if report.exists() else "", calls.read_text()

    return play


def test_a_run_in_which_nothing_fails(machine):
    result, report, calls = machine()
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(calls.splitlines()) == 1 + 6
    assert report.startswith("# b12x kernels on compute capability 12.0\n")
    for part in ("2 of 2 GPUs", "cosine 0.999", "9 passed", "kernels: B12xKernels", "12,345"):
        assert part in report
    assert "noise" not in report and "FAILED" not in report
    assert report.count("```") == 2 * (1 + 6)
    assert "Nothing failed." in report


def test_a_step_that_fails_is_reported_and_the_others_still_run(machine):
    result, report, calls = machine(fails="verify")
    assert result.returncode == 1
    assert "ran vllm-ckv bench" in calls and "12,345" in report
    assert "it broke" in report and "**FAILED**: Engine: no DCP" in report
    assert "Failed: Engine: no DCP, ordinary DCP, full CKV; " in report
    assert "Nothing failed" not in report


def test_other_kernels_than_b12xs_are_a_failure(machine):
    result, report, _ = machine(provider="TritonKernels")
    assert result.returncode == 1
    assert "Failed: the machine's choice is not b12x; the engine is not b12x; " in report


def test_too_few_gpus(machine):
    result, report, calls = machine(ranks="4")
    assert result.returncode == 2 and "needs 4 GPUs, found 2" in result.stderr
    assert not report and not calls
