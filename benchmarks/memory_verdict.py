# SPDX-License-Identifier: Apache-2.0
"""Judge the memory of runs of benchmarks/traffic.py; benchmarks/memory_gpu.sh calls it.

    python benchmarks/memory_verdict.py --model MODEL --tp 2 --dcp 2 eager.json starts.json

One line a check, PASS or FAIL with the numbers. The exit status is 1 if one failed, or if a result
is missing. Start-up is judged in the last run alone: the runs before it compile, the gathering
side, which is the first, also what vLLM itself needs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.entrypoints.ckv import plan as p
from vllm.v1.attention.backends.mla.ckv_gather.geometry import max_index_pages
from vllm.v1.attention.backends.mla.ckv_gather.staging import device_bytes

START_SECONDS = 10
"""A start with the gather on may take this much longer."""

NOISE = 32 << 20
"""Bytes by which two starts of one engine may differ besides, in NCCL and in the driver."""


@dataclass(frozen=True)
class Check:
    """One line of the verdict."""

    passed: bool
    text: str


def judge(name: str, document: dict[str, Any], block: int, staging: int) -> list[Check]:
    """Check one run, without its start-up time.

    document: traffic.py's result. block: bytes of a block of the KV cache. staging: bytes that the
        gather takes besides the workspace.
    """
    on, off = document["on"], document["off"]
    violations = document["violations"]
    compared = "memory" if document["comparison"] is None else "outputs and memory"
    checks = [Check(not violations, f"{name}: {compared}, {len(violations)} violations")]
    checks += [Check(False, f"{name}: {violation}") for violation in violations]
    # vLLM's workspace is the largest of its users, so the cache may give up less.
    additional = on["memory"]["start"]["gather"] + staging
    given_up = (off["cache_blocks"] - on["cache_blocks"]) * block
    checks.append(
        Check(
            # A block is given up as a whole, on either side.
            given_up <= additional + 2 * block + NOISE,
            f"{name}: the KV cache gave up {given_up:,} bytes for {additional:,} of workspace and "
            f"staging (blocks of {block:,} bytes)",
        )
    )
    start, end = (on["memory"][when] for when in ("start", "end"))
    checks.append(
        Check(
            start["workspace"] == end["workspace"] and start["locked"],
            f"{name}: the workspace stayed locked at {start['workspace']} (address, bytes)",
        )
    )
    return checks


def judge_start(name: str, document: dict[str, Any]) -> Check:
    """Compare the start-up times of both sides."""
    on, off = (document[side]["start_seconds"] for side in ("on", "off"))
    return Check(
        on - off <= START_SECONDS,
        f"{name}: the start took {on:.1f} s, {off:.1f} s with the gather off; allowed are "
        f"{START_SECONDS} s more",
    )


def sizes_of(model: str, document: dict[str, Any], tp: int, dcp: int) -> tuple[int, int]:
    """Bytes of a block of the KV cache, and of the gather's staging, on one rank of Hopper."""
    sizes, engine = p.read_model(model), document["engine"]
    page = p.vllm_page_size(sizes, tp=tp, family=90, block_size=engine["block_size"])
    pages = max_index_pages(engine["max_model_len"], sizes.pool_size)
    return p.block_bytes(sizes, page), device_bytes(engine["max_num_seqs"], dcp, pages)


def main() -> int:
    """Print the verdict; the exit status is 1 unless everything passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--dcp", type=int, required=True)
    parser.add_argument("results", nargs="+", type=Path)
    arguments = parser.parse_args()
    checks = []
    for path in arguments.results:
        if not path.is_file():
            checks.append(Check(False, f"{path.stem}: there is no {path}, see the log of that run"))
            continue
        document = json.loads(path.read_text())
        block, staging = sizes_of(arguments.model, document, arguments.tp, arguments.dcp)
        checks += judge(path.stem, document, block, staging)
        if path == arguments.results[-1]:
            checks.append(judge_start(path.stem, document))
    for check in checks:
        print("PASS" if check.passed else "FAIL", check.text)
    return int(not all(check.passed for check in checks))


if __name__ == "__main__":
    raise SystemExit(main())
