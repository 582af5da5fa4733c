# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-ckv`` command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm.entrypoints.ckv import bench, doctor, plan, verify

_COMMANDS = (
    ("verify", verify, "run the real engine with and without the gather and compare"),
    ("plan", plan, "show what the gather costs and saves for a model and its flags"),
    ("doctor", doctor, "report versions, flags, hardware and what would go wrong here"),
    ("bench", bench, "measure prefill with the gather on and off"),
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command and its sub-commands."""
    parser = argparse.ArgumentParser(
        prog="vllm-ckv", description="Full-CKV prefill for B12X sparse MLA on stock vLLM."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, summary in _COMMANDS:
        command = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
