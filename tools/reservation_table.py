# SPDX-License-Identifier: Apache-2.0
"""Print the README's table of what the gather reserves, from the code that reserves it.

python tools/reservation_table.py [--record fp8_ds_mla] [--max-num-seqs 256] [--interleave 4]
"""

import argparse

from vllm.v1.attention.backends.mla.ckv_gather import geometry as g
from vllm.v1.attention.backends.mla.ckv_gather.byte_model import ordinary_peak_bytes
from vllm.v1.attention.backends.mla.ckv_gather.staging import device_bytes
from vllm.v1.attention.backends.mla.ckv_gather.workspace import WorkspacePlan

POOL_SIZE = 4
HEADS = 64
BUDGET = 8192
PAGES = {2: 4352, 4: 2304, 8: 1280}
"""Tokens in a page of the real model at this tensor-parallel size."""

TOKENS = (131_072, 262_144, 524_288, 1_048_576)
RECORDS = {record.name: record for record in (g.FP8_DS_MLA, g.NVFP4_DS_MLA)}


def mib(count: int) -> str:
    """Bytes as MiB with one decimal."""
    return f"{count / 2**20:,.1f}"


def table(record: g.RecordFormat, max_num_seqs: int, interleave: int) -> str:
    """The table in Markdown; sizes per GPU."""
    lines = [
        "| TP | DCP | page (tokens) | `max_model_len` | limit (visible tokens) | records/rank "
        "| workspace (MiB) | staging (MiB) | ordinary prefill peak (MiB) |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for tp, page in PAGES.items():
        for world in (n for n in (2, 4, 8) if n <= tp):
            geometry = g.PageGeometry(page, record, POOL_SIZE, interleave, world)
            for length in TOKENS:
                limit = min(length, g.MAX_VISIBLE_TOKENS)
                sizes = {"max_tokens": limit, "max_num_seqs": max_num_seqs}
                plan = WorkspacePlan.from_geometry(geometry, **sizes)
                pages = g.max_index_pages(limit, POOL_SIZE)
                peak = ordinary_peak_bytes(BUDGET, HEADS // tp * world)
                lines.append(
                    f"| {tp} | {world} | {page:,} | {length:,} | {limit:,} "
                    f"| {geometry.capacity(**sizes):,} | {mib(plan.num_bytes)} "
                    f"| {mib(device_bytes(max_num_seqs, world, pages))} | {mib(peak)} |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", choices=RECORDS, default=g.FP8_DS_MLA.name)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--interleave", type=int, default=4)
    arguments = parser.parse_args()
    print(table(RECORDS[arguments.record], arguments.max_num_seqs, arguments.interleave))
