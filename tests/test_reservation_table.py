# SPDX-License-Identifier: Apache-2.0
"""The README's table of reserved bytes: it is the tool's, and the tool's is what vLLM reserves."""

import importlib.util
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from vllm.platforms.ckv_reference import declare_torchvision_ops
from vllm.v1.attention.backends.mla.ckv_gather import geometry as g
from vllm.v1.attention.backends.mla.ckv_gather.workspace import KernelScratch, WorkspacePlan
from vllm.v1.attention.backends.mla.sparse_mla_kernels.scratch import flashmla_shapes

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location(
        "reservation_table", ROOT / "tools/reservation_table.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(tool) -> list[list[str]]:
    """The tool's table with the README's sizes, cell by cell."""
    return [split(line) for line in tool.table(max_num_seqs=256).splitlines()]


def split(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_readme_shows_what_the_tool_prints(tool, rows):
    readme = (ROOT / "README.md").read_text()
    begin = readme.index(f"| {' | '.join(tool.COLUMNS)} |")
    shown = [split(line) for line in readme[begin:].split("\n\n")[0].splitlines()]
    assert len(rows) == 2 + 6 * 4 and {len(row) for row in rows} == {len(tool.COLUMNS)}
    column = tool.COLUMNS.index("workspace of b12x (MiB)")
    # Only the installed package knows.
    if find_spec("b12x") is None:
        for row in rows[2:] + shown[2:]:
            row[column] = ""
    else:
        assert all(row[column] for row in rows[2:])
    assert shown == rows
    assert " ".join(tool.triton_sentence().split()) in " ".join(readme.split())


@pytest.fixture
def reserve(monkeypatch):
    """What vLLM's own manager allocates for a plan, in bytes."""
    declare_torchvision_ops()
    from vllm.v1.worker import workspace as stock

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)

    def allocated(plan: WorkspacePlan) -> int:
        stock.reset_workspace_manager()
        stock.init_workspace_manager(torch.device("meta"))
        plan.reserve()
        return stock.current_workspace_manager()._current_workspaces[0].numel()

    yield allocated
    stock.reset_workspace_manager()


@pytest.mark.parametrize(("length", "limit"), [(131_072, 131_072), (1_048_576, 524_288)])
def test_a_row_is_what_vllm_reserves(tool, rows, reserve, length, limit):
    """TP4, DCP4, with and without what FlashMLA needs for 16 heads and 2,051 ids a row."""
    (row,) = [row for row in rows if row[:2] == ["4", "4"] and row[3] == f"{length:,}"]
    geometry = g.PageGeometry(2304, g.FP8_DS_MLA, 4, 4, 4)
    capacity = geometry.capacity(max_tokens=limit, max_num_seqs=256)
    scratch = flashmla_shapes(max_records=4 * capacity, max_tokens=8192, num_heads=16, width=2051)
    plain = WorkspacePlan.from_geometry(geometry, limit, 256)
    hopper = WorkspacePlan.from_geometry(geometry, limit, 256, KernelScratch(tuple(scratch)))
    sizes = [tool.mib(reserve(plan)) for plan in (plain, hopper)]
    assert row[2:8] == ["2,304", f"{length:,}", f"{limit:,}", f"{capacity:,}", *sizes]


def test_what_nobody_knows_is_left_empty(tool):
    assert tool.mib(None) == "" and tool.mib(3 << 19) == "1.5"
