# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/sanitize.sh`` with stand-ins for compute-sanitizer, the GPU and the interpreter."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "sanitize.sh"
SUITE = ROOT / "tests/v1/attention/backends/mla/sparse_mla_kernels/test_kernels.py"

# Says what the real ones say; a run under a tool is told apart by what comes before.
PYTHON = """\
case "$*" in
*control.py) echo "========= Invalid __global__ write of size 4 bytes"; exit 0;;
*pytest*) sleep ${SLEEP:-0}; echo "=== ${TESTS:-12 passed} in 3.21s ==="; exit ${STATUS:-0};;
*) echo "torch 2 triton 3";;
esac
"""
SANITIZER = """\
[ "$1" = --version ] && { echo "Version 2025.1"; exit 0; }
tool=$2; shift 4
[ "$tool" = "$CRASHES" ] && exit 1
"$@"; status=$?
case "$*" in *control.py) [ -n "$BLIND" ] && exit 0; exit 9;; esac
if [ $tool = memcheck ]; then echo "========= ERROR SUMMARY: ${MEMCHECK:-0} errors"
else echo "========= RACECHECK SUMMARY: ${RACECHECK:-0} hazards displayed (0 errors)"; fi
[ ${MEMCHECK:-0} = 0 ] && [ ${RACECHECK:-0} = 0 ] || exit 9
exit $status
"""


@pytest.fixture
def sanitize(tmp_path):
    programs = {
        "python": PYTHON,
        "compute-sanitizer": SANITIZER,
        "nvidia-smi": 'echo "NVIDIA H200, 570"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text("#!/bin/bash\n" + text)
        (tmp_path / name).chmod(0o755)

    def run(**variables: str) -> tuple[int, str]:
        env = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHON": str(tmp_path / "python"),
            **variables,
        }
        report = tmp_path / "report.md"
        command = ["bash", str(SCRIPT), str(report)]
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert result.returncode in (0, 1), result.stderr
        return result.returncode, report.read_text()

    return run


def test_a_clean_run_is_reported(sanitize, tmp_path):
    status, report = sanitize()
    assert status == 0 and "Nothing found" in report and "H200" in report
    assert re.search(
        r"\| memcheck \| 12 passed in 3\.21s \| ERROR SUMMARY: 0 errors \| 0 \|", report
    )
    assert re.search(r"\| racecheck \| 12 passed .*RACECHECK SUMMARY: 0 hazards", report)
    assert (tmp_path / "report.memcheck.log").is_file()


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"MEMCHECK": "1"}, ["memcheck"]),
        ({"RACECHECK": "2"}, ["racecheck"]),
        ({"CRASHES": "racecheck"}, ["racecheck"]),
        (
            {"STATUS": "1", "TESTS": "1 failed, 11 passed"},
            ["without a tool", "memcheck", "racecheck"],
        ),
        ({"BLIND": "1", "CRASHES": "memcheck"}, ["memcheck", "the control"]),
        ({"LIMIT": "3", "SLEEP": "9"}, ["without a tool", "memcheck", "racecheck"]),
    ],
    ids=str,
)
def test_whatever_is_wrong_fails_and_is_named(sanitize, variables, names):
    status, report = sanitize(**variables)
    failed = report.partition("FAILED: ")[2]
    assert status == 1 and all(name in failed for name in names)
    if "LIMIT" in variables:
        assert "did not end" in report


def test_the_selected_tests_exist():
    suite = SUITE.read_text()
    (block,) = re.findall(r"^TESTS=\((.*?)\)", SCRIPT.read_text(), flags=re.S | re.M)
    names = block.split()
    assert len(names) > 9
    for name in names:
        assert f"def {name}(kernels" in suite, name
    assert '"gpu", "gpu_scratch"' in (SUITE.parent / "providers.py").read_text()
