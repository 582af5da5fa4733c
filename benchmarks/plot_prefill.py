# SPDX-License-Identifier: Apache-2.0
"""Draw what ``prefill_engine.py`` measured.

    python benchmarks/plot_prefill.py --rows prefill.json --out prefill.png
    python benchmarks/plot_prefill.py --layer-times layers.json --out layers.png

Needs matplotlib (``pip install 'vllm-b12x-ckv[plot]'``).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from vllm.entrypoints.ckv.layer_times import KINDS

MODES = {
    "stock_no_dcp": ("stock, no DCP", "0.55"),
    "stock_dcp": ("stock, ordinary DCP", "0.75"),
    "ours_no_dcp": ("ours, no DCP", "tab:blue"),
    "ours_dcp": ("ours, ordinary DCP", "tab:orange"),
    "ours_ckv": ("ours, full-CKV", "tab:green"),
}


def draw_rows(rows: list[dict[str, Any]], title: str) -> Any:
    """Tokens per second over prompt length: a panel per model, a bar per mode."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(1, len(models), figsize=(6.2 * len(models), 4), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        own = [row for row in rows if row["model"] == model]
        lengths = sorted({row["prompt_tokens"] for row in own})
        modes = [mode for mode in MODES if any(row["mode"] == mode for row in own)]
        width = 0.8 / len(modes)
        for number, mode in enumerate(modes):
            label, colour = MODES[mode]
            bars = {row["prompt_tokens"]: row["tok_s"] for row in own if row["mode"] == mode}
            places = [lengths.index(length) + number * width for length in bars]
            axis.bar(places, bars.values(), width, label=label, color=colour)
        ticks = [place + width * (len(modes) - 1) / 2 for place in range(len(lengths))]
        axis.set_xticks(ticks, [f"{length:,}" for length in lengths])
        axis.set_xlabel("prompt tokens")
        axis.set_ylabel("tokens per second")
        axis.set_title(model)
    handles = {}
    for axis in axes[0]:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles, ncols=len(handles), fontsize=8, loc="upper center",
        bbox_to_anchor=(0.5, 0.02),
    )  # fmt: skip
    figure.suptitle(title)
    return figure


def draw_layer_times(rows: list[dict[str, Any]], title: str) -> Any:
    """One stacked bar per model and mode: where a DSA layer's time goes."""
    figure, axis = plt.subplots(figsize=(9, 0.55 * len(rows) + 1.6))
    labels = [f"{row['model']}: {MODES[row['mode']][0]}" for row in rows]
    if len({row.get("link") for row in rows}) > 1:
        labels = [f"{label}, {row['link']}" for label, row in zip(labels, rows, strict=True)]
    left = [0.0] * len(rows)
    for kind in KINDS:
        parts = [row["microseconds"][kind] / 1e3 for row in rows]
        axis.barh(labels, parts, left=left, label=kind)
        left = [begin + part for begin, part in zip(left, parts, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds of one DSA layer in one chunk")
    axis.legend(ncols=len(KINDS), fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.suptitle(title)
    return figure


def main() -> None:
    """Draw one of the two pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--rows", type=Path, help="the file of prefill_engine.py --out")
    source.add_argument("--layer-times", type=Path, help="the file of --layer-times")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.rows:
        figure = draw_rows(json.loads(arguments.rows.read_text()), arguments.title)
    else:
        figure = draw_layer_times(json.loads(arguments.layer_times.read_text()), arguments.title)
    figure.savefig(arguments.out, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
