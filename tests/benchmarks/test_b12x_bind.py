# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/b12x_bind.py`` with few calls: it binds every kind of operation and prints times."""

import re

import pytest

pytest.importorskip("b12x")
pytest.importorskip("cutlass")


def test_each_kind_of_operation_is_bound_and_timed(capsys, monkeypatch, load_benchmark):
    tool = load_benchmark("b12x_bind")
    for name in ("ROUNDS", "CALLS", "WARM_UP_CALLS"):
        monkeypatch.setattr(tool, name, 2)
    monkeypatch.setattr(tool.torch, "set_num_threads", lambda count: None)
    tool.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["attention"] * 4 + ["selection"] * 3
    for line in lines:
        least, median = re.search(r"([\d.]+) us, median +([\d.]+)$", line).groups()
        assert 0 < float(least) <= float(median)
