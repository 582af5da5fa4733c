# SPDX-License-Identifier: Apache-2.0
"""Mutation check: flip operators and constants in the pure modules, run their fast tests.

    .venv/bin/python tools/mutate.py [--module layout] [--only N] [--write]

Every mutant is one changed operator or constant in a copy of ``vllm/``; the tests run in a forked
process that has stock vLLM imported already. A mutant that no test notices survives. ``--write``
puts the result into benchmarks/results/mutation.json. Needs ``make dev``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PACKAGE = Path("vllm/v1/attention/backends/mla/ckv_gather")
TESTS = REPO / "tests/v1/attention/backends/mla/ckv_gather"
RESULT = REPO / "benchmarks/results/mutation.json"
SECONDS = 120

# The fast tests of each module, cheapest first.
MODULES = {
    "geometry": ["test_geometry.py", "test_windows.py"],
    "eligibility": ["test_eligibility.py"],
    "layout": ["test_layout.py", "test_plan.py"],
    "remap": ["test_remap.py", "test_plan.py"],
    "exchange": ["test_exchange_lockstep.py", "test_collectives.py"],
    "windows": ["test_windows.py"],
    "chunks": ["test_chunks.py"],
    "time_model": ["test_time_model.py"],
}

# Mutants that change nothing, with the reason.
EQUIVALENT: dict[str, str] = {
    "remap.gathered_rows: 0 -> 1 (3)": (
        "the stand-in of an id that is not valid: any position that exists will do, because the "
        "row computed from it is replaced by -1"
    ),
    "remap.gathered_rows: context_lens is not None and own_starts is not None -> "
    "context_lens is not None or own_starts is not None": "both are given or neither",
    "windows.merge_candidates: 1 -> 2": (
        "-1 becomes -2: to the merge all negative ids are no candidate"
    ),
    "chunks.filled_budget: budget < page -> budget <= page": (
        "of a budget of one page the parts, and the decodes beside them, make no less than a page"
    ),
    "chunks.remark: 1 -> 2": (
        "a single token that decodes leave is filled, and then no budget is better"
    ),
    "chunks.remark: spare < decode_tokens -> spare <= decode_tokens": (
        "decodes that take just what chunks leave make them no smaller, so nothing is said"
    ),
    "time_model.TimeModel._attention.selected: True -> False": (
        "the pairs of the same lengths are counted before, and refuse them"
    ),
    "time_model.TimeModel.selection_shares: 1 -> 2": ("a batch that gathers has rows"),
}

_BINARY = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_COMPARE = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


class _Sites(ast.NodeVisitor):
    """Collects the nodes that can be mutated, with the function they stand in."""

    def __init__(self) -> None:
        self.sites: list[tuple[ast.AST, str]] = []
        self.where: list[str] = []

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr):
            # A message; its numbers are checked by tests of messages, not here.
            return
        named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if named:
            self.where.append(node.name)  # type: ignore[attr-defined]
        if _replacement(node) is not None:
            self.sites.append((node, ".".join(self.where) or "module"))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)
        if named:
            self.where.pop()


def _replacement(node: ast.AST) -> ast.AST | None:
    """A changed copy of ``node``, or None where nothing is to be changed."""
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return ast.BinOp(node.left, _BINARY[type(node.op)](), node.right)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARE:
        ops = [_COMPARE[type(node.ops[0])](), *node.ops[1:]]
        return ast.Compare(node.left, ops, node.comparators)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        return node.operand
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            return ast.Constant(not node.value)
        if isinstance(node.value, int):
            return ast.Constant(node.value + 1)
    return None


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """Yield (name, changed source) for every site of ``source``."""
    count = len(_find(ast.parse(source)))
    known: dict[str, int] = {}
    for index in range(count):
        tree = ast.parse(source)
        node, where = _find(tree)[index]
        changed = _replacement(node)
        assert changed is not None
        name = f"{where}: {ast.unparse(node)} -> {ast.unparse(changed)}"
        known[name] = known.get(name, 0) + 1
        if known[name] > 1:
            name += f" ({known[name]})"
        for parent in ast.walk(tree):
            for field, value in ast.iter_fields(parent):
                if value is node:
                    setattr(parent, field, changed)
                elif isinstance(value, list):
                    value[:] = [changed if item is node else item for item in value]
        yield name, ast.unparse(ast.fix_missing_locations(tree))


def _find(tree: ast.AST) -> list[tuple[ast.AST, str]]:
    sites = _Sites()
    sites.visit(tree)
    return sites.sites


def _import_stock() -> None:
    """Import what the tests import of other packages, so that a forked process need not."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401

    from vllm.platforms.ckv_reference import declare_torchvision_ops

    declare_torchvision_ops()
    helpers = REPO / "tests/helpers"
    sys.path.insert(0, str(helpers))
    import ckv_fuzz

    ckv_fuzz.bank()
    # They hold on to modules that mutants replace.
    for path in helpers.glob("*.py"):
        sys.modules.pop(path.stem, None)


def _run_tests(root: Path, files: list[Path]) -> int:
    """In the forked process: forget the overlay's modules, then run."""
    import hypothesis
    import pytest

    # A deadline on a busy machine would kill mutants that no test notices.
    hypothesis.settings.register_profile("mutation", max_examples=40, deadline=None, database=None)
    hypothesis.settings.load_profile("mutation")
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).is_relative_to(root):
            del sys.modules[name]
            parent, _, attribute = name.rpartition(".")
            with contextlib.suppress(AttributeError, KeyError):
                delattr(sys.modules[parent], attribute)
    arguments = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", *map(str, files)]
    return int(pytest.main(arguments))


def _survives(root: Path, files: list[Path]) -> bool:
    """Whether all tests pass; a run that hangs or dies is a killed mutant."""
    child = os.fork()
    if child == 0:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os._exit(_run_tests(root, files))
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def check(root: Path, only: list[str], limit: int | None) -> dict[str, object]:
    killed, total, survivors = 0, 0, []
    for module in only:
        target = root / PACKAGE / f"{module}.py"
        source = target.read_text()
        files = [TESTS / name for name in MODULES[module]]
        if not _survives(root, files):
            raise SystemExit(f"the tests of {module} fail without any change")
        for number, (name, changed) in enumerate(mutants(source)):
            if limit is not None and number >= limit:
                break
            target.write_text(changed)
            total += 1
            name = f"{module}.{name}"
            if _survives(root, files):
                survivors.append({"mutant": name, "reason": EQUIVALENT.get(name, "unexplained")})
                print(f"survives: {name}", flush=True)
            else:
                killed += 1
        target.write_text(source)
        print(f"{module}: {killed} of {total} killed so far", flush=True)
    return {"killed": killed, "total": total, "survivors": survivors}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--module", choices=MODULES, action="append")
    parser.add_argument("--only", type=int, help="at most so many mutants of a module")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(REPO)}")
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.root is None:
        # The developer hook reads the checkout to use when Python starts.
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(
                REPO / "vllm",
                Path(folder) / "vllm",
                ignore=shutil.ignore_patterns("__pycache__"),
            )
            environment = {
                **os.environ,
                "CKV_DEV_ROOT": folder,
                "VLLM_B12X_MLA_CKV_GATHER": "1",
                "CKV_COLLECTIVE_CASES": "60",
                "OMP_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONPATH": str(REPO / "tests/helpers"),
            }
            arguments = [sys.executable, __file__, *sys.argv[1:], "--root", folder]
            return os.spawnve(os.P_WAIT, sys.executable, arguments, environment)
    os.chdir(REPO)
    _import_stock()
    result = check(options.root, options.module or list(MODULES), options.only)
    print(json.dumps(result, indent=1))
    if options.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    unexplained = [s for s in result["survivors"] if s["reason"] == "unexplained"]  # type: ignore[attr-defined]
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
