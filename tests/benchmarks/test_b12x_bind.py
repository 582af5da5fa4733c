# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/b12x_bind.py`` with few calls: it binds every kind of operation and prints times."""

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("b12x")
pytest.importorskip("cutlass")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "b12x_bind.py"


def test_each_kind_of_operation_is_bound_and_timed(capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location("b12x_bind", SCRIPT)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for name in ("ROUNDS", "CALLS", "WARM_UP_CALLS"):
        monkeypatch.setattr(tool, name, 2)
    monkeypatch.setattr(tool.torch, "set_num_threads", lambda count: None)
    tool.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["attention"] * 4 + ["selection"] * 3
    for line in lines:
        least, median = re.search(r"([\d.]+) us, median +([\d.]+)$", line).groups()
        assert 0 < float(least) <= float(median)
