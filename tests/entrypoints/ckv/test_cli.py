# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-ckv`` command line."""

import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vllm.entrypoints.ckv import cli

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["usage: vllm-ckv", "verify"]),
        (["verify", "--help"], ["--dcp", "--text", "--json", "--device", "--no-oracle"]),
    ],
)
def test_help_in_a_process_of_its_own(arguments, words):
    result = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.ckv.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    for word in words:
        assert word in result.stdout


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_no_or_an_unknown_command_is_misuse(arguments, capsys):
    with pytest.raises(SystemExit) as status:
        cli.main(arguments)
    assert status.value.code == 2
    assert "usage: vllm-ckv" in capsys.readouterr().err


def test_the_console_script_leads_here():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pkgutil.resolve_name(project["scripts"]["vllm-ckv"]) is cli.main
