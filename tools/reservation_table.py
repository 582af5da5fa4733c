# SPDX-License-Identifier: Apache-2.0
"""Print the README's table of what the gather reserves, from the code that reserves it.

    python tools/reservation_table.py [--kv-cache-dtype nvfp4_ds_mla] [--max-num-seqs 256]

GLM-5.3-Flash's layer sizes, chunks of 8,192 tokens. b12x on compute capability 12.x, Triton on
others. The column of b12x is empty where that package is not installed: its sizes are its own to
tell.
"""

import argparse
from pathlib import Path

from vllm.entrypoints.ckv import plan as p
from vllm.v1.attention.backends.mla.sparse_mla_kernels.scratch import triton_bytes

MODEL = Path(__file__).resolve().parents[1] / "benchmarks/models/slice_h64"
"""Layer sizes of GLM-5.3-Flash; nothing here depends on how many layers there are."""

SETUPS = ((2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8))
"""Tensor and decode context parallelism."""

TOKENS = (131_072, 262_144, 524_288, 1_048_576)
BUDGET = 8192

COLUMNS = (
    "TP",
    "DCP",
    "page (tokens)",
    "`max_model_len`",
    "limit (visible tokens)",
    "records/rank",
    "workspace (MiB)",
    "workspace on Hopper (MiB)",
    "workspace of b12x (MiB)",
    "staging (MiB)",
    "ordinary prefill peak (MiB)",
)


def mib(count: int | None) -> str:
    """Bytes as MiB with one decimal; nothing for bytes that nobody here knows."""
    return "" if count is None else f"{count / 2**20:,.1f}"


def table(**options: int | str) -> str:
    """The table in Markdown, sizes per GPU. options: of ``make_plan``."""
    sizes = p.read_model(str(MODEL))
    lines = [f"| {' | '.join(COLUMNS)} |", "|---:" * len(COLUMNS) + "|"]
    for tp, dcp in SETUPS:
        for length in TOKENS:
            b12x, hopper = (
                p.make_plan(
                    sizes,
                    p.GPUS[gpu],
                    tp=tp,
                    dcp=dcp,
                    max_model_len=length,
                    max_num_batched_tokens=BUDGET,
                    **options,  # type: ignore[arg-type]
                )
                for gpu in ("rtx-pro-6000", "h200")
            )
            cells = (
                f"{tp}",
                f"{dcp}",
                f"{b12x.page_tokens:,}",
                f"{length:,}",
                f"{b12x.limit_tokens:,}",
                f"{b12x.capacity_records:,}",
                mib(b12x.workspace_bytes - b12x.scratch_bytes),
                mib(hopper.workspace_bytes),
                mib(b12x.workspace_bytes if b12x.scratch_bytes else None),
                mib(b12x.staging_bytes),
                mib(b12x.ordinary_peak_bytes),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def triton_sentence() -> str:
    """What the Triton kernels hold beside the table's bytes, the same in every row."""
    other, hopper = (mib(triton_bytes(family)) for family in (80, 90))
    return (
        f"The Triton kernels hold {other} MiB for themselves, {hopper} MiB on Hopper, with the "
        "gather off too."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kv-cache-dtype", choices=p.RECORDS, default=p.FP8_DS_MLA.name)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--interleave", type=int, default=4)
    print(table(**vars(parser.parse_args())), triton_sentence(), sep="\n\n")
