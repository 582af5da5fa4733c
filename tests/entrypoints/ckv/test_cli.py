# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-ckv`` command line."""

import pkgutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from vllm.entrypoints.ckv import cli, output

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], "usage: vllm-ckv verify plan doctor bench"),
        (["verify", "--help"], "--dcp --text --json --device --no-oracle"),
        (
            ["plan", "--help"],
            "MODEL_OR_CONFIG --tp --dcp --max-model-len --max-num-seqs --max-num-batched-tokens "
            "--gpu rtx-pro-6000 --link-gbps --json --plot",
        ),
        (["doctor", "--help"], "--json --no-self-test"),
        (
            ["bench", "--help"],
            "examples: --on --off --url --label --model --compare --lengths --samples --json "
            "--plot",
        ),
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
    assert arguments == ["--help"] or "exit status: 0" in result.stdout
    for word in words.split():
        assert word in result.stdout


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_no_or_an_unknown_command_is_misuse(arguments, capsys):
    with pytest.raises(SystemExit) as status:
        cli.main(arguments)
    assert status.value.code == 2
    assert "usage: vllm-ckv" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["verify"], ["bench", "--model", "small"]])
@pytest.mark.parametrize(
    ("text", "words"), [("[", "'[' is not JSON"), ("[1]", "'[1]' is not a JSON object")]
)
def test_engine_arguments_are_an_object(command, text, words, capsys):
    with pytest.raises(SystemExit) as status:
        cli.main([*command, "--engine", text])
    assert status.value.code == 2 and words in capsys.readouterr().err


def test_versions_tell_what_is_missing(monkeypatch):
    def version(name):
        if name in ("b12x", "flashinfer-python"):
            raise PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(output, "version", version)
    found = output.versions()
    assert found["b12x"] == "not installed" and "flashinfer-python" not in found
    assert found["vllm"] == found["nvidia-cutlass-dsl"] == "1.2"
    assert found["python"] in sys.version and found["system"].startswith("Linux")


MODEL = str(Path(__file__).parent / "models" / "flash_slice")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *[
            ([*command, "--json", "{}/no/x.json"], "--json: there is no folder")
            for command in (
                ["verify"],
                ["plan", MODEL],
                ["doctor"],
                ["bench", "--model", "small"],
                ["bench", "--compare", "a.json", "b.json"],
            )
        ],
        (["plan", MODEL, "--plot", "{}/no/x.png"], "--plot: there is no folder"),
        (["bench", "--model", "small", "--plot", "{}/no/x.png"], "--plot: there is no folder"),
        (["bench", "--model", "small", "--interleave", "3"], "split an index pool of 4"),
        (["bench", "--model", "small", "--interleave", "0"], "give 4 or another multiple"),
    ],
)
def test_what_cannot_be_used_gets_a_sentence_before_the_work(
    arguments, words, tmp_path, capsys, monkeypatch
):
    def work(*_, **__):
        raise AssertionError("an engine, or an examination, was started")

    monkeypatch.setattr("vllm.entrypoints.ckv.bench.run_engine", work)
    monkeypatch.setattr("vllm.entrypoints.ckv.verify.run_engine", work)
    monkeypatch.setattr("vllm.entrypoints.ckv.doctor.examine", work)
    assert cli.main([argument.format(tmp_path) for argument in arguments]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"vllm-ckv {arguments[0]}: ") and words in line


def test_the_console_script_leads_here():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pkgutil.resolve_name(project["scripts"]["vllm-ckv"]) is cli.main
