# SPDX-License-Identifier: Apache-2.0
"""The documentation: it builds, its links hold, its commands parse, its log lines exist."""

import ast
import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vllm.entrypoints.ckv import cli
from vllm.platforms.ckv_reference import environment

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
EXAMPLES = ROOT / "examples"
MODEL = str(ROOT / "tests" / "entrypoints" / "ckv" / "models" / "flash_slice")

# Run where vLLM's parser can be built without a GPU: prints an error for each line it refuses.
PARSE_SERVE = """
import json, sys
from vllm.platforms.ckv_reference import declare_torchvision_ops
declare_torchvision_ops()
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for arguments in json.load(sys.stdin):
    try:
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    except SystemExit:
        sys.exit(f"refused: {arguments}")
    assert parsed.decode_context_parallel_size > 1 and parsed.cp_kv_cache_interleave_size % 4 == 0
"""


def shell_lines(text):
    """Commands of the ``bash`` blocks of a page, continuation lines joined."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, flags=re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip():
                yield shlex.split(line)


COMMANDS = [
    pytest.param(words, id=f"{page.stem}: {' '.join(words)[:60]}")
    for page in PAGES
    for words in shell_lines(page.read_text())
]


def serve_parses(lines):
    result = subprocess.run(
        [sys.executable, "-c", PARSE_SERVE],
        input=json.dumps(lines),
        env=os.environ | environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def targets():
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_parses(words):
    program, *rest = words
    if program == "vllm-ckv":
        arguments = cli.build_parser().parse_args(rest)
        assert callable(arguments.run)
    elif program == "make":
        assert rest and set(rest) <= targets()
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        asked = re.findall(r"\[(\w+)\]", " ".join(rest))
        assert rest[0] == "install" and set(asked) <= set(project["optional-dependencies"])
    elif program == "export":
        from vllm.plugins.b12x_mla_sparse import FLAGS

        name, _, value = rest[0].partition("=")
        (flag,) = (flag for flag in FLAGS if flag.name == name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            flag.read()
    elif program == "bash":
        assert (ROOT / rest[0]).is_file()
    elif program == "curl":
        assert rest[0].startswith("http://localhost:8000/")
        if "-d" in rest:
            json.loads(rest[rest.index("-d") + 1])
    elif program == "vllm":
        assert rest[0] == "serve"  # parsed by vLLM's own parser below
    else:
        assert words == ["source", ".venv/bin/activate"], words


def test_every_serve_command_is_accepted_by_vllm():
    lines = [
        words[2:] for page in PAGES for words in shell_lines(page.read_text()) if words[0] == "vllm"
    ]
    assert lines
    serve_parses(lines)


def test_chunks_fill_the_budgets_of_serve_commands():
    """With prefix caching, which vLLM turns on by itself."""
    from vllm.entrypoints.ckv.plan import read_model, vllm_page_size
    from vllm.v1.attention.backends.mla.ckv_gather import chunks

    sizes, found = read_model(MODEL), 0
    lines = [p.values[0] for p in COMMANDS if p.values[0][:2] == ["vllm", "serve"]]
    for line in lines:
        if "--max-num-batched-tokens" not in line:
            continue
        tp, seqs, budget = (
            int(line[line.index(flag) + 1])
            for flag in ("--tensor-parallel-size", "--max-num-seqs", "--max-num-batched-tokens")
        )
        for family in (90, 120):
            page = vllm_page_size(sizes, tp=tp, family=family)
            assert chunks.remark(page, budget, seqs) is None
            assert chunks.filled_budget(page, budget, seqs) == budget
        found += 1
    assert found


@pytest.mark.parametrize(
    "words",
    [p.values[0] for p in COMMANDS if p.values[0][:2] == ["vllm-ckv", "plan"]],
    ids=" ".join,
)
def test_every_plan_command_runs(words, tmp_path, monkeypatch):
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert cli.main([MODEL if word == "MODEL" else word for word in words[1:]]) == 0


def test_generated_pages_are_up_to_date():
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "docs.py", "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, f"{result.stdout}run python tools/docs.py"


def test_the_site_builds_and_links_hold(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "figures" / "gather.svg").is_file()
    listed = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert page.name in listed


def messages():
    """Every text in the sources, with ``…`` for what is filled in."""
    found = []
    for path in (ROOT / "vllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d+)?[sdf]", "…", node.value))
    return found


def quoted_lines():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"^### `(.*?)`", text, flags=re.M)


@pytest.mark.parametrize("line", quoted_lines())
def test_every_quoted_log_line_exists(line):
    # Filled-in texts may bring words of their own: "…" stands for any.
    wanted = re.escape(line.removeprefix("PROBLEM: ")).replace("…", "[^\n]*?")
    assert any(re.search(wanted, message) for message in messages()), line


def test_documented_metrics_are_those_that_are_served(tmp_path):
    from vllm.v1.attention.backends.mla.ckv_gather.metrics import GatherCollector

    page = (ROOT / "docs" / "measuring.md").read_text()
    documented = re.findall(r"^\| `(vllm:\w+?)(?:_total)?`", page, flags=re.M)
    assert documented == [family.name for family in GatherCollector(tmp_path).collect()]


def test_troubleshooting_names_the_start_up_lines_as_they_are():
    page = (ROOT / "docs" / "quickstart.md").read_text()
    known = messages()
    for start in ("full-CKV gather: on, page", "first batch: "):
        assert start in page and any(text.startswith(start) for text in known)


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.name)
def test_example_scripts_call_vllm_rightly(script, tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    # Programs that write down how they were called instead of running.
    calls = tmp_path / "calls"
    for name in ("vllm", "vllm-ckv"):
        stub = tmp_path / name
        stub.write_text(f'#!/bin/sh\nprintf "%s\\037" {name} "$@" >>{calls}\necho >>{calls}\n')
        stub.chmod(0o755)
    # A link to the interpreter would lose its environment.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL": MODEL}
    if "reference" in script.name:
        env["MODEL"] = str(tmp_path / "small")
    command = ["bash", str(script), "--port", "8123"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    called = [line.split("\037")[:-1] for line in calls.read_text().splitlines()]
    for program, *rest in called[:-1]:
        assert program == "vllm-ckv"
        cli.build_parser().parse_args(rest)
    assert called[-1][:2] == ["vllm", "serve"] and called[-1][-2:] == ["--port", "8123"]
    serve_parses([called[-1][2:]])
    if "reference" in script.name:
        assert (tmp_path / "small" / "model.safetensors").is_file()


def test_the_launch_script_asks_for_a_model():
    env = {k: v for k, v in os.environ.items() if k != "MODEL"}
    result = subprocess.run(
        ["bash", EXAMPLES / "serve.sh"], env=env, capture_output=True, text=True, timeout=60
    )
    assert result.returncode != 0 and "set MODEL to the folder" in result.stderr


def test_the_unit_runs_the_launch_script():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(EXAMPLES / "vllm-ckv.service")
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    assert "examples/serve.sh" in unit["Service"]["ExecStart"]
    if shutil.which("systemd-analyze"):
        command = ["systemd-analyze", "verify", str(EXAMPLES / "vllm-ckv.service")]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
        assert "Unknown" not in told, told


def test_every_reason_of_a_refusal_is_explained_with_its_words():
    from vllm.v1.attention.backends.mla.ckv_gather.counters import _WORDS
    from vllm.v1.attention.backends.mla.ckv_gather.eligibility import Reason

    page = (ROOT / "docs/measuring.md").read_text()
    for reason in set(Reason) - {Reason.ELIGIBLE}:
        assert f"`{reason.value}`" in page
    for reason, words in _WORDS.items():
        assert f"| `{reason.value}` | {words} |" in page
