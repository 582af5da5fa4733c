# SPDX-License-Identifier: Apache-2.0
"""Chunks of the real engine with prefix caching on, against what the line at start says of them.

One engine of two ranks. Its budget is a page and three tokens: a prompt waits beside four decodes.
"""

import re

import pytest

from vllm.entrypoints.ckv import traffic, verify
from vllm.entrypoints.ckv.engine import backend_arguments, gpu_count
from vllm.entrypoints.ckv.model import write_model
from vllm.v1.attention.backends.mla.ckv_gather import chunks

PAGE, SPARE, MAX_NUM_SEQS = 512, 3, 8
LENGTH = 2 * PAGE + 64
PROMPT = 4  # the number of the long request in the second wave


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The engine's log, and what the waves gave: a prompt alone, then one beside decodes."""
    folder = tmp_path_factory.mktemp("chunks")
    use_gpu = gpu_count() >= 2
    write_model(folder / "model", mhc=verify.has_hyper_connections(use_gpu))
    further = {} if use_gpu else {"kv_cache_memory_bytes": 1 << 28}
    arguments = backend_arguments(folder / "model", tp=2, dcp=2) | {
        "block_size": PAGE,
        "max_model_len": 2048,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": PAGE + SPARE,
        # With it, when a batch is scheduled depends on when the one before has ended.
        "async_scheduling": False,
        **further,
    }

    def arrival(step, seed, length, answer):
        prompt = [3 + (seed + 7 * place) % 250 for place in range(length)]
        return traffic.Arrival(step, prompt, answer, priority=0, abort_after=None)

    # One of the four decodes ends early.
    decodes = [arrival(0, 20 + n, 2, 6 if n == 0 else 14) for n in range(4)]
    waves = [
        traffic.Wave([arrival(0, 0, LENGTH, 1)], reset_at=None, then=""),
        traffic.Wave([*decodes, arrival(2, 100, LENGTH, 1)], reset_at=None, then=""),
    ]
    log, side = folder / "engine.log", traffic.Side()
    for event in traffic.run_side("1", arguments, waves, log, use_gpu=use_gpu):
        side.add(event)
    return log.read_text(errors="replace"), side.waves


def test_a_page_is_that_of_one_rank(engine):
    """And not that of both, of which the budget holds none."""
    _, (alone, _) = engine
    assert [step["0"] for step in alone.steps] == [PAGE, PAGE, LENGTH - 2 * PAGE]
    assert chunks.average_chunk(PAGE, PAGE + SPARE) == PAGE


def test_a_prompt_waits_while_decodes_leave_less_than_a_page(engine):
    _, (_, beside) = engine
    served = [(len(step.keys() - {str(PROMPT)}), step.get(str(PROMPT), 0)) for step in beside.steps]
    # It arrives before the third step.
    begins = next(place for place, (_, tokens) in enumerate(served) if tokens)
    assert served[2:begins] == [(SPARE + 1, 0)] * (begins - 2) and begins > 3
    assert served[begins : begins + 2] == [(SPARE, PAGE)] * 2
    assert chunks.average_chunk(PAGE, PAGE + SPARE, SPARE + 1) == 0
    assert chunks.average_chunk(PAGE, PAGE + SPARE, SPARE) == PAGE


def test_the_engine_says_so_once(engine):
    log, _ = engine
    said = re.findall(r"prefix caching cuts chunks at pages of .*", log)
    assert said == [
        f"prefix caching cuts chunks at pages of {PAGE} tokens: {PAGE} of {PAGE + SPARE}, none "
        f"beside more than {SPARE} tokens of decodes; --max-num-batched-tokens "
        f"{PAGE + MAX_NUM_SEQS} makes that {PAGE} beside up to {MAX_NUM_SEQS} tokens of decodes"
    ]
    assert len(re.findall(r"full-CKV gather: on, page", log)) == 2
