# SPDX-License-Identifier: Apache-2.0
"""What the commands share in what they print: versions, tables, sizes, figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


class UsageError(ValueError):
    """Input that cannot be used; the message says what to do. Commands end with status 2."""


NEEDED = (
    "vllm-b12x-ckv",
    "vllm",
    "torch",
    "triton",
    "transformers",
    "b12x",
    "nvidia-cutlass-dsl",
)
"""Packages whose absence says something as well."""

FURTHER = ("flashinfer-python", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def versions() -> dict[str, str]:
    """Versions of Python, the system and the packages that results depend on, by name."""
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {os.uname().machine}",
    }
    for name in NEEDED + FURTHER:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name in NEEDED:
                found[name] = "not installed"
    return found


def check_folders(**files: Path | None) -> None:
    """Check, before the work, that what will be written has a folder; options by name.

    Raises:
        UsageError: a folder is missing.
    """
    for option, path in files.items():
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{option}: there is no folder {path.parent}, make it first")


def json_object(text: str) -> dict[str, Any]:
    """The type of an option that takes a JSON object."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object, {{...}}")
    return found


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """A table with a rule under its first row; the first column is aligned left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    """Bytes for a reader, in decimal units: ``608.3 kB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            return f"{num_bytes:,.0f} B" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError


def new_figure(width: float = 7.0, height: float = 4.2) -> Any:
    """An empty matplotlib figure that needs no display.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "--plot needs matplotlib: pip install 'vllm-b12x-ckv[plot]', or leave --plot out"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write ``figure`` to ``path`` in the format of its suffix.

    Raises:
        UsageError: the folder does not exist, or the suffix is none of an image.
    """
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}") from error
