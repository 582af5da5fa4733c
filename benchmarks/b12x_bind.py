#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time what the host does to bind one b12x operation. No GPU needed, nothing is launched.

    python benchmarks/b12x_bind.py

Microseconds of one call of the package's own scratch layout and checks, at GLM-5.3-Flash's sizes
and 16 heads: least and median of several rounds, on one thread. The package's public ``bind`` adds
a look-up of the prepared plan and refuses CPU tensors, so its layouts are called directly, which
are private to b12x 1.5.1. On a GPU a selection also launches one fill.
"""

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

ROUNDS, CALLS, WARM_UP_CALLS = 9, 500, 100
HEADS, INDEX_HEADS, PAGES = 16, 32, 40
CPU = torch.device("cpu")


def microseconds(call: Callable[[], object]) -> list[float]:
    """One mean of ``CALLS`` calls for each round."""
    for _ in range(WARM_UP_CALLS):
        call()
    means = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        means.append((time.perf_counter() - begin) / CALLS * 1e6)
    return means


def main() -> None:
    from b12x.attention.dsa_indexer import _preparation, scratch

    from vllm.v1.attention.backends.mla.sparse_mla_kernels import b12x

    torch.set_num_threads(1)
    sizes = b12x.Sizes(
        page_size=2304,
        record_bytes=528,
        head_counts=(HEADS,),
        index_heads=INDEX_HEADS,
        topk=512,
        width=2051,
        scale=256**-0.5,
    )
    plans = b12x.declare(sizes, CPU)

    def attention(row_plan: b12x.RowPlan) -> Callable[[], object]:
        # Any number of multiprocessors: binding does not look at it.
        device = SimpleNamespace(identity=SimpleNamespace(sm_count=188))
        state, rows = row_plan.plan._materialize(None, device), row_plan.rows
        lengths = torch.zeros(rows, dtype=torch.int32)
        operands = {
            "scratch": torch.empty(b12x._scratch_bytes(row_plan.plan), dtype=torch.uint8),
            "q": torch.zeros(rows, HEADS, 512, dtype=torch.bfloat16),
            "selected_indices": torch.zeros(rows, sizes.width, dtype=torch.int32),
            "cache_seqlens_int32": lengths,
            "nsa_cache_seqlens_int32": lengths,
            "kv_cache": torch.zeros(1, b12x.FLAT_PAGE, sizes.record_bytes, dtype=torch.uint8),
        }
        return lambda: state.bind(**operands)

    def selection(row_plan: b12x.RowPlan) -> Callable[[], object]:
        caps = _preparation._scratch_caps(row_plan.plan.query, device=CPU, config=None)
        layout = scratch.plan_indexer_scratch(caps)
        operands = {
            "scratch": torch.empty(b12x._scratch_bytes(row_plan.plan), dtype=torch.uint8),
            "real_page_table": torch.zeros(row_plan.rows, PAGES, dtype=torch.int32),
            "cache_seqlens_int32": torch.zeros(row_plan.rows, dtype=torch.int32),
            "active_width": torch.zeros(1, dtype=torch.int32),
            "expected_num_q_heads": INDEX_HEADS,
        }
        return lambda: layout.bind(**operands)

    calls = {f"attention, split, {p.rows} rows": attention(p) for p in plans.decode[HEADS][::4]}
    many = plans.extend[HEADS]
    calls[f"attention, many, {many.rows} rows"] = attention(many)
    calls |= {f"selection, {p.rows} rows": selection(p) for p in plans.select}
    with torch.inference_mode():
        for name, call in calls.items():
            times = microseconds(call)
            print(f"{name:28} {min(times):6.1f} us, median {statistics.median(times):6.1f}")


if __name__ == "__main__":
    main()
