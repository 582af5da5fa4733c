# SPDX-License-Identifier: Apache-2.0
"""NVFP4 records, 304 bytes, in the real engine: it starts, binds packed pages and serves.

On the reference platform only. On a GPU b12x's kernels alone read these records.
"""

import re

import pytest

from vllm.entrypoints.ckv.engine import EngineJob, backend_arguments, collect, run_engine
from vllm.entrypoints.ckv.model import tokenise, write_model
from vllm.entrypoints.ckv.verify import LIMIT_VS_DCP

GATHER = "VLLM_B12X_MLA_CKV_GATHER"
LENGTH, BUDGET, PAGE = 150, 101, 512


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """Results and logs of two ranks with the gather on and off; a prompt cut inside a pool."""
    folder = tmp_path_factory.mktemp("nvfp4")
    write_model(folder / "model", mhc=False)
    text = b"Pack my box with five dozen liquor jugs; how vexingly quick daft zebras jump! " * 2
    arguments = backend_arguments(folder / "model", tp=2, dcp=2) | {
        "kv_cache_dtype": "nvfp4_ds_mla",
        "block_size": PAGE,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": BUDGET,
        "kv_cache_memory_bytes": 1 << 28,
    }
    found = {}
    for gather in ("1", "0"):
        flags = {GATHER: gather, f"{GATHER}_MIN_TOKENS": "0"}
        job = EngineJob(f"nvfp4, {gather}", arguments, flags, [[tokenise(text[:LENGTH])]], 3)
        log = folder / f"gather-{gather}.log"
        found[gather] = collect(run_engine(job, log, use_gpu=False)), log.read_text()
    return found


def test_tokens_and_log_probabilities_are_those_without_the_gather(sides):
    on, off = (sides[gather][0].groups[0] for gather in ("1", "0"))
    assert on.tokens == off.tokens
    pairs = zip(on.logprobs[0], off.logprobs[0], strict=True)
    assert max(abs(mine - other) for mine, other in pairs) <= LIMIT_VS_DCP


def test_the_gather_moves_records_of_304_bytes(sides):
    counters = sides["1"][0].groups[0].counters
    assert counters["gathered_batches"] == 2 and counters["dcp_bytes"] == 0
    # Two DSA layers; rank 0 receives rank 1's span, as long as its own: local lengths of 101 and
    # 150 tokens over two ranks, and of 25 and 37 pools.
    records, pools = 52 + 76, 13 + 19
    assert counters["ckv_bytes"] == 2 * (304 * records + 132 * pools)
    assert sides["0"][0].groups[0].counters["gathered_batches"] == 0


def test_a_block_of_the_cache_holds_whole_records_and_whole_index_pages(sides):
    """Two layers of 512 tokens make 345,088 bytes; KDA states need less."""
    result = sides["1"][0]
    assert result.block_size == PAGE
    assert result.cache_blocks == (1 << 28) // (3 * 160_512)


def test_the_line_at_start_counts_records_of_304_bytes(sides):
    """1,024 visible tokens, four sequences, two ranks: 528 records a rank, in steps of 256."""
    (line, *_) = re.findall(r"full-CKV gather: on, page 512 tokens, .*", sides["1"][1])
    assert "capacity 768 records/rank" in line and f"{2 * 768 * 304 / 2**20:.1f} MiB/GPU" in line
