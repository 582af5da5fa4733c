# SPDX-License-Identifier: Apache-2.0
"""Chunks of long prompts against vLLM's own scheduler, which is asked step after step.

The engine itself is asked in ``tests/v1/e2e/test_ckv_chunks.py``.
"""

from itertools import count, product
from math import ceil
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm.v1.attention.backends.mla.ckv_gather import chunks


def cut(page, budget, decode_tokens, pages, *, dcp=2, exports=False):
    """Chunks of a long prompt's first ``pages`` pages; the last one is 0 if it would wait.

    exports: whether the KDA kernels save states within a chunk, as FlashKDA does.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=page),
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        # What an engine with these pages has: MLA groups are sharded, KDA groups are not.
        block_size=page * dcp,
        hash_block_size=page,
        mamba_partial_cache_hit=dcp > 1,
        mamba_shared_prefix_checkpoint=False,
        mamba_has_prefill_checkpoint_blocks=exports,
        mamba_prefill_checkpoint_alignment=16 if exports else None,
        max_num_scheduled_tokens=budget,
        use_eagle_block_drop=False,
        num_hash_lookahead_tokens=0,
    )
    length = (pages + 3) * page + budget + 1
    request = SimpleNamespace(
        num_computed_tokens=0,
        num_prompt_tokens=length,
        num_tokens=length,
        shared_prefix_boundary=0,
    )
    sizes = []
    while request.num_computed_tokens < pages * page:
        wanted = min(length - request.num_computed_tokens, budget - decode_tokens)
        sizes.append(Scheduler._mamba_block_aligned_split(scheduler, request, wanted))
        request.num_computed_tokens += sizes[-1]
        if not sizes[-1]:
            break
    return sizes


BUDGETS = [64, 1000, 1280, 2048, 2304, 4096, 4352, 4353, 4608, 4864, 8192, 16_384]


@pytest.mark.parametrize("exports", [False, True])
@pytest.mark.parametrize("dcp", [1, 2, 8])
@pytest.mark.parametrize("page", [256, 1280, 2304, 4352, 8704])
def test_chunks_are_those_of_vllms_scheduler(page, dcp, exports):
    for budget in BUDGETS:
        for decode_tokens in (0, 1, 16, budget // 2):
            mean = chunks.average_chunk(page, budget, decode_tokens)
            # As many pages as whole chunks have.
            pages = 3 * max(1, int(mean // page))
            sizes = cut(page, budget, decode_tokens, pages, dcp=dcp, exports=exports)
            assert sum(sizes) / len(sizes) == pytest.approx(mean), (budget, decode_tokens, sizes)


def test_a_page_above_the_budget_leaves_a_rest_and_one_below_leaves_room():
    assert cut(4352, 4096, 0, 2) == [4096, 256, 4096, 256]
    assert cut(2304, 4096, 0, 2) == [2304, 2304]
    assert cut(4352, 4352, 1, 2) == [0]


@pytest.mark.parametrize("page", [256, 2304])
def test_decodes_that_take_everything_leave_nothing(page):
    assert chunks.average_chunk(page, 512, 512) == chunks.average_chunk(page, 512, 600) == 0


SIZES = {
    "page": st.integers(1, 40).map(lambda n: 256 * n),
    "left": st.integers(16, 20_000),
    "decode_tokens": st.integers(0, 2048),
}


@settings(max_examples=300, deadline=None)
@given(**SIZES)
@example(page=2304, left=4608, decode_tokens=0)
@example(page=2304, left=600, decode_tokens=1024)
@example(page=1280, left=600, decode_tokens=1024)
@example(page=1280, left=600, decode_tokens=660)
@example(page=4352, left=4352 - 256, decode_tokens=256)
@example(page=8704, left=4096, decode_tokens=0)
def test_the_better_budget_is_the_least_that_chunks_fill(page, left, decode_tokens):
    budget = left + decode_tokens
    better = chunks.filled_budget(page, budget, decode_tokens)
    assert better >= budget
    # Rounding up alone separates the mean from what decodes leave.
    mean = chunks.average_chunk(page, better, decode_tokens)
    assert ceil(mean) == better - decode_tokens
    assert chunks.remark(page, better, decode_tokens) is None
    # Fewer decodes leave chunks no smaller, a smaller budget does, and leaves some of it empty.
    for fewer in (0, decode_tokens // 2):
        assert chunks.average_chunk(page, better, fewer) >= mean
    for less in range(budget, better):
        chunk = chunks.average_chunk(page, less, decode_tokens)
        assert chunk < mean and ceil(chunk) < less - decode_tokens


def test_there_is_no_lesser_budget_for_any_small_page():
    """Chunks are filled that have, rounded up, all that decodes leave."""

    def filled(page, budget, decode_tokens):
        mean = chunks.average_chunk(page, budget, decode_tokens)
        return ceil(mean) == budget - decode_tokens > 0

    for page, decode_tokens in product(range(1, 24), range(12)):
        for budget in range(1, 60):
            better = next(b for b in count(budget) if filled(page, b, decode_tokens))
            assert chunks.filled_budget(page, budget, decode_tokens) == better


@pytest.mark.parametrize(
    ("page", "budget", "decode_tokens", "said"),
    [
        (2304, 4096, 256, "2,304 of 4,096; --max-num-batched-tokens 4864 makes that 4,608 beside"),
        (4352, 4096, 256, "2,176 of 4,096 on average; --max-num-batched-tokens 4608 makes that"),
        # A multiple of the page is not filled beside a decode; the page itself not at all.
        (2304, 4608, 256, "4,608 of 4,608, 2,304 beside any decode; --max-num-batched-tokens 4864"),
        (4352, 4352, 256, "4,352 of 4,352, none beside any decode; --max-num-batched-tokens 4608"),
        (512, 515, 8, "512 of 515, none beside more than 3 tokens of decodes; "),
        (2304, 2048, 1024, "1,152 of 2,048 on average, 768 beside more than 896 tokens of"),
        (36, 9, 2, "9 of 9 on average, 7 beside any decode; --max-num-batched-tokens 10 makes"),
    ],
)
def test_the_remark_has_the_numbers(page, budget, decode_tokens, said):
    text = chunks.remark(page, budget, decode_tokens)
    assert f"prefix caching cuts chunks at pages of {page:,} tokens: {said}" in text
    assert text.endswith(f" beside up to {decode_tokens:,} tokens of decodes")


@pytest.mark.parametrize(
    ("page", "budget", "decode_tokens"),
    [
        (2304, 4864, 256),
        (2304, 4608, 0),
        (1280, 8192, 256),
        (512, 101, 8),
        (4352, 4608, 256),
        # Just nine tenths, and a single token.
        (9, 10, 0),
        (40, 9, 8),
        # No budget is better, by less than a token.
        (5, 3, 1),
    ],
)
def test_nothing_is_said_of_chunks_that_fill_the_budget_but_for_a_tenth(
    page, budget, decode_tokens
):
    assert chunks.remark(page, budget, decode_tokens) is None
