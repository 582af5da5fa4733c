# SPDX-License-Identifier: Apache-2.0
"""The time model's predictions against measurements: both paths of 30 batches, on two GPUs.

    python benchmarks/time_model.py --out benchmarks/results/time_model.json

One engine for each model; its start measures the rates. Then, on every rank, both paths of a layer
run for every batch through the engine's kernels and communicators, over caches of one page, call
after call as in a model's layers. Prints and writes what was predicted and measured, the error of
each, and whether the model decides as the measurement does. A batch is *relevant* for the decision
if neither path takes more than twice as long as the other. The exit status is 1 if a relevant one
is more than 15 % off, or decided wrongly although the paths differ by more than that.

``--cpu`` runs small batches of a small model on CPU ranks, where the numbers mean nothing, to try
the program.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from prefill_engine import add_engine_options, make_job, model_folder, use_small_model

from vllm.entrypoints.ckv.engine import log_folder, run_program, start_engine

LIMIT = 0.15
"""Largest relative error of a relevant prediction."""

CHUNK = 4096

BATCHES: list[tuple[list[int], list[int]]] = [
    *(([visible], [CHUNK]) for visible in (4096, 16_384, 65_536, 131_072)),
    *(([visible], [32]) for visible in (8192, 131_072)),
    *(([visible], [128]) for visible in (32_768, 131_072)),
    *(([visible], [512]) for visible in (32_768, 131_072)),
    ([65_536], [1024]),
    ([1024] * 4, [1024] * 4),
    ([4096] * 8, [512] * 8),
    ([8192] * 16, [64] * 16),
    ([65_536] * 2, [16] * 2),
]
"""Visible tokens and query tokens of each request: chunks of a long prompt, short suffixes of long
prefixes, several requests. Two models of 64 and 32 heads make 30 of them."""

SMALL = [([64], [32]), ([512], [20]), ([100, 300], [20, 30])]
"""For ``--cpu``."""


@dataclass(frozen=True)
class Row:
    """Both paths of one batch: microseconds of one layer, of the slowest rank.

    ordinary, gathered: measured. The others: predicted.
    """

    model: str
    lengths: list[int]
    queries: list[int]
    predicted_ordinary: float
    ordinary: float
    predicted_gathered: float
    gathered: float

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of the ordinary and the gathered path."""
        return (
            self.predicted_ordinary / self.ordinary - 1,
            self.predicted_gathered / self.gathered - 1,
        )

    @property
    def relevant(self) -> bool:
        """Neither path takes more than twice as long as the other."""
        return 0.5 <= self.gathered / self.ordinary <= 2

    @property
    def right(self) -> bool:
        """The model decides as the measurement does."""
        return (self.predicted_gathered < self.predicted_ordinary) == (
            self.gathered < self.ordinary
        )

    @property
    def fails(self) -> bool:
        """A relevant prediction is off, or a decision that matters is wrong."""
        if not self.relevant:
            return False
        differ = abs(self.gathered / self.ordinary - 1) > LIMIT
        return max(map(abs, self.errors)) > LIMIT or (differ and not self.right)


CALLS = 10
"""Of one path of one batch, behind one to warm up."""


def mean_seconds(device: Any, call: Callable[[], object]) -> float:
    """Seconds of ``call``, if it is made time after time: of the device or of the host."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    wait()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    wait()
    return (time.perf_counter() - began) / CALLS


def measure(worker: Any, batches: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Rates, predictions and measurements of one rank, for ``LLM.collective_rpc``.

    batches: (lengths, queries). Seconds, and the rates by name.
    """
    import torch

    from vllm.v1.attention.backends.mla.b12x_mla_sparse import B12xMLASparseImpl
    from vllm.v1.attention.backends.mla.ckv_gather.measuring import (
        ROUNDS,
        Clock,
        agree,
        device_clock,
        measure_rates,
    )
    from vllm.v1.attention.backends.mla.ckv_gather.rehearsal import Layer, SeeingBatch

    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    attention = next(
        layer
        for layer in layers
        if isinstance(getattr(layer, "impl", None), B12xMLASparseImpl)
        and layer.impl.indexer is not None
    )
    impl, manager = attention.impl, attention.dcp_manager
    gather, shapes, device = impl.gather, impl.layer_shapes(), impl.topk_indices_buffer.device
    # Behind the gates, which ask for a step's decision.
    layer = Layer(gather, impl.kernels, device, manager.query_gather.inner, manager.combine.inner)
    seconds = partial(mean_seconds, device)
    clock = device_clock(device) or Clock(seconds, seconds)
    # As the engine's workspace was made.
    with torch.inference_mode():
        if gather.time_model.rates is None:
            largest = min(shapes.num_tokens, 64)
            gather.adopt(agree(measure_rates(layer, shapes, largest, clock)))
        rows = []
        for lengths, queries in batches:
            spans = gather.plan_spans(lengths, queries, sum(queries))
            costs = gather.time_model.costs(lengths, queries, spans)
            rows.append(
                {
                    "lengths": lengths,
                    "queries": queries,
                    "predicted_ordinary": costs.ordinary_seconds,
                    "ordinary": math.inf,
                    "predicted_gathered": costs.gathered_seconds,
                    "gathered": math.inf,
                }
            )
        # The least of some rounds, as the rates are. All batches before one has its next turn:
        # virtual machines have hosts that are half as fast for seconds.
        for row in rows * ROUNDS:
            lengths, queries = row["lengths"], row["queries"]
            batch = SeeingBatch.of(shapes, device, lengths, queries, gather.pool_size)
            ordinary = seconds(layer.ordinary(batch, len(lengths)))
            gathered = seconds(layer.gathered(batch, lengths, queries))
            row["ordinary"] = min(row["ordinary"], ordinary)
            row["gathered"] = min(row["gathered"], gathered)
    return {"rates": asdict(gather.time_model.rates), "rows": rows}


def rows_of(model: str, ranks: list[dict[str, Any]]) -> list[Row]:
    """The measurements of all ranks of one engine: the slowest one's, in microseconds."""
    rows = []
    for same in zip(*(rank["rows"] for rank in ranks), strict=True):
        numbers = {
            name: max(row[name] for row in same) * 1e6
            for name in ("predicted_ordinary", "ordinary", "predicted_gathered", "gathered")
        }
        rows.append(Row(model, same[0]["lengths"], same[0]["queries"], **numbers))
    return rows


def format_row(row: Row) -> str:
    """One line of the table."""
    count = len(row.lengths)
    batch = f"{count} x {row.queries[0]} / {row.lengths[0]:,}" if count > 1 else (
        f"{row.queries[0]} / {row.lengths[0]:,}"
    )  # fmt: skip
    cells = [
        f"{predicted:>10,.0f}{measured:>10,.0f}{error:>+8.1%}"
        for predicted, measured, error in (
            (row.predicted_ordinary, row.ordinary, row.errors[0]),
            (row.predicted_gathered, row.gathered, row.errors[1]),
        )
    ]
    words = ["relevant"] * row.relevant + ["wrong"] * (not row.right) + ["FAILS"] * row.fails
    return f"{row.model:<12}{batch:<22}{''.join(cells)}  {' '.join(words)}".rstrip()


HEAD = (
    f"{'model':<12}{'rows / visible':<22}{'ordinary':>10}{'measured':>10}{'error':>8}"
    f"{'gathered':>10}{'measured':>10}{'error':>8}"
)


def serve() -> None:
    """The engine's side."""
    job, llm, emit = start_engine()
    emit(event="ranks", ranks=llm.collective_rpc(measure, args=(job["batches"],)))


def main() -> int:
    """Run the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_engine_options(parser, models=["slice_h64", "slice_h32"], modes=["ours_ckv"], chunk=CHUNK)
    arguments = parser.parse_args()
    batches = SMALL if arguments.cpu else BATCHES
    arguments.environment = {"VLLM_B12X_MLA_CKV_GATHER": "auto"} | arguments.environment
    logs = log_folder(arguments.logs, "time-model")
    longest = max(sum(lengths) for lengths, _ in batches)
    arguments.max_num_seqs = max(len(lengths) for lengths, _ in batches)
    if arguments.cpu:
        arguments.chunk = 64
        use_small_model(arguments, logs / "small")
    rows: list[Row] = []
    engines = []
    print(HEAD)
    for name in arguments.models:
        model = model_folder(name)
        job = make_job(model, "ours_ckv", arguments, longest)
        payload = {"arguments": job.arguments, "batches": batches}
        events = list(
            run_program(
                __file__,
                job.name,
                payload,
                job.environment,
                logs / f"{model.name}.log",
                use_gpu=not arguments.cpu,
            )
        )
        ranks = next(event for event in events if event["event"] == "ranks")["ranks"]
        found = rows_of(model.name, ranks)
        rows += found
        engines.append({"model": model.name, "cpu": arguments.cpu, "rates": ranks[0]["rates"]})
        print(*map(format_row, found), sep="\n", flush=True)
    failed = [row for row in rows if row.fails]
    relevant = sum(row.relevant for row in rows)
    print(f"{len(rows)} batches, {relevant} relevant, {len(failed)} of them fail")
    if arguments.out:
        document = {"engines": engines, "rows": [asdict(row) for row in rows]}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(failed) and not arguments.cpu)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].isdigit():
        serve()
    else:
        raise SystemExit(main())
