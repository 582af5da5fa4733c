# SPDX-License-Identifier: Apache-2.0
"""What the indexer selects, on one rank and on simulated ranks, against a count by hand.

A row at position p sees p + 1 tokens: of the (p + 1) // 4 complete pools the best ones, and always
the tokens of the pool that p stands in, unless p ends it.
"""

import pytest
import torch
from ckv_oracle import Bank
from ckv_ranks import POISON_ID, Sizes, Step, run_step, simulated_ranks

from vllm.plugins.b12x_mla_sparse import register
from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import TorchReferenceKernels

PATHS = [
    # (ranks, interleave, whether the batch gathers)
    (1, 4, False),
    (2, 4, False),
    (2, 4, True),
    (3, 8, False),
    (3, 8, True),
    (4, 4, False),
    (4, 4, True),
    (8, 4, True),
]


@pytest.fixture(scope="module")
def bank():
    return Bank(seed=3, size=512, queries=64)


@pytest.fixture(autouse=True)
def gather_on(monkeypatch):
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", "1")
    register()


def select(bank, path, chunks, pool_topk, *, pad_tokens=0, pad_rows=0):
    """Run chunks, a list of steps of {request: rows}; return (request, position, ids) of all ranks.

    Request r reads the bank from place 64 * r on.
    """
    world, interleave, gathers = path
    sizes = Sizes(
        world,
        interleave,
        pool_topk=pool_topk,
        min_tokens=0 if gathers else 500,
        capacity=400,
    )
    done = {}
    with simulated_ranks(sizes, TorchReferenceKernels()) as (lockstep, ranks):
        for rank in ranks:
            rank.tables.pages = [[3 + 2 * r + 20 * rank.rank] for r in range(8)]
        for chunk in chunks:
            before = {r: done.get(r, 0) for r in chunk}
            done.update({r: before[r] + rows for r, rows in chunk.items()})
            step = Step(
                requests=list(chunk),
                query_lens=list(chunk.values()),
                seq_lens=[done[r] for r in chunk],
                prefilling=[True] * len(chunk),
                pad_rows=pad_rows,
                pad_tokens=pad_tokens,
            )
            places = torch.cat([64 * r + torch.arange(before[r], done[r]) for r in chunk])
            results = run_step(lockstep, ranks, step, [bank.inputs(places, 0, pad_tokens, world)])
            for rank, (result,) in enumerate(results):
                assert result.gathered == gathers
                row = 0
                for r in chunk:
                    for position in range(before[r], done[r]):
                        yield rank, r, position, result.token_ids[row].tolist()
                        row += 1
                # Rows past the step's belong to nobody and are not written.
                after = ranks[rank].buffer[row + pad_tokens :]
                assert bool((after == POISON_ID).all())


def by_hand(bank, request, position, pool_topk):
    """The selection in plain Python and float64."""
    seen = position + 1
    query = (64 * request + position) * 5 % bank.queries
    pools = []
    while 4 * len(pools) + 4 <= seen:
        pools.append(len(pools))
    if len(pools) > pool_topk:
        score = {p: float(bank.scores[query, 16 * request + p]) for p in pools}
        best = []
        while len(best) < pool_topk:
            best.append(max((p for p in pools if p not in best), key=lambda p: (score[p], -p)))
        pools = sorted(best)
    history = [4 * p + i for p in pools for i in range(4)]
    tail = [t for t in range(seen) if t // 4 == seen // 4]
    return history + tail


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("pool_topk", [2, 64])
def test_every_position_of_a_prompt(bank, path, pool_topk):
    for _, request, position, ids in select(bank, path, [{0: 41}], pool_topk):
        expected = by_hand(bank, request, position, pool_topk)
        assert ids[: len(expected)] == expected, position
        assert set(ids[len(expected) :]) <= {-1}


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_what_a_row_sees_does_not_depend_on_cuts_and_neighbours(bank, path):
    # Cuts at 10, 11, 13: no chunk but the first starts where a pool starts.
    chunks = [{1: 10, 0: 2}, {0: 1, 1: 1, 2: 5}, {2: 7, 1: 2}, {1: 30, 2: 1, 0: 21}]
    for _, request, position, ids in select(bank, path, chunks, 3):
        expected = by_hand(bank, request, position, 3)
        assert ids == expected + [-1] * (len(ids) - len(expected)), (request, position)


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_padding_rows_change_nothing(bank, path):
    plain = list(select(bank, path, [{0: 9, 3: 14}], 2))
    padded = list(select(bank, path, [{0: 9, 3: 14}], 2, pad_tokens=5, pad_rows=3))
    assert plain == padded


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_cases_2_and_3_prompts_that_some_ranks_store_nothing_of(bank, path, length):
    rows = list(select(bank, path, [{5: length}], 8))
    assert len(rows) == path[0] * length
    for _, _, position, ids in rows:
        # All is selected: complete pools first, then the tail, which is ascending order.
        assert [i for i in ids if i >= 0] == list(range(position + 1))
