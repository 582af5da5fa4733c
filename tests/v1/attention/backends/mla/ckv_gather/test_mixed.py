# SPDX-License-Identifier: Apache-2.0
"""Prompts that gather beside decodes: the decodes compute, bit for bit, what they do alone."""

import ckv_fuzz
import pytest
import torch
from ckv_oracle import Bank
from ckv_ranks import Sizes, Step, run_step, simulated_ranks

from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import TorchReferenceKernels

WORLD = 3
CACHED = [37, 530, 90, 1700, 12]
DECODES = 3
"""The first requests decode, the others are prompts, one of them in windows."""


pytestmark = pytest.mark.usefixtures("gather_on")


def play(record, rows, mixed, with_prompts):
    """One step after what is cached; rows of each request. Results by rank, and the collectives."""
    bank = ckv_fuzz.bank(record)
    sizes = Sizes(
        WORLD, pool_topk=4, heads=2, capacity=WORLD * 256, max_model_len=2000, record=record,
        mixed=mixed,
    )  # fmt: skip
    with simulated_ranks(sizes, TorchReferenceKernels()) as (lockstep, ranks):
        for rank in ranks:
            pages, free = [], iter(range(20 * rank.rank, 20 * rank.rank + 20))
            for cached, queries in zip(CACHED, rows, strict=True):
                pages.append([next(free) for _ in range(-(-(cached + queries) // (WORLD * 256)))])
            rank.tables.pages = pages
        for r, cached in enumerate(CACHED):
            places = (300 * r + torch.arange(cached)) % bank.size
            written = Step([r], [cached], [cached], [True])
            inputs = [bank.inputs(places, 0, 0, 1)]
            run_step(lockstep, ranks, written, inputs, write_only=True)
        requests = list(range(len(CACHED) if with_prompts else DECODES))
        step = Step(
            requests=requests,
            query_lens=[rows[r] for r in requests],
            seq_lens=[CACHED[r] + rows[r] for r in requests],
            prefilling=[r >= DECODES for r in requests],
            num_decode_tokens=sum(rows[:DECODES]),
            num_decodes=DECODES,
        )
        places = torch.cat(
            [(300 * r + torch.arange(CACHED[r], CACHED[r] + rows[r])) % bank.size for r in requests]
        )
        inputs = [bank.inputs(places, 0, 0, WORLD * sizes.heads)]
        for calls in lockstep.calls:
            calls.clear()
        results = run_step(lockstep, ranks, step, inputs)
        return [layer for (layer,) in results], lockstep.calls


@pytest.mark.parametrize("record", ["fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize(
    "decode_rows", [(1, 1, 1), (3, 3, 3), (1, 3, 2)], ids=["decode", "verification", "both"]
)
def test_decodes_are_bit_equal_to_those_of_a_step_of_their_own(record, decode_rows):
    """Verification rows, several of a request, are decodes here as well."""
    rows = [*decode_rows, 20, 5]
    count = sum(decode_rows)
    alone, own_calls = play(record, rows, mixed=True, with_prompts=False)
    mixed, calls = play(record, rows, mixed=True, with_prompts=True)
    for mine, other in zip(mixed, alone, strict=True):
        assert mine.gathered and mine.first_row == count and mine.spans == [3, 1]
        assert not other.gathered
        assert torch.equal(mine.token_ids[:count], other.token_ids)
        assert torch.equal(mine.out[:count], other.out)
        assert bool((mine.out[count:] != 0).any(2).all())
    # Candidates, queries and outputs of the decodes, in the same order and of the same size.
    for rank in range(WORLD):
        assert [call for call in calls[rank] if call in own_calls[rank]] == own_calls[rank]
        assert len(calls[rank]) == 3 + 2 * 4


def test_by_default_no_decode_is_in_a_batch_that_gathers():
    results, calls = play("fp8_ds_mla", [1, 1, 1, 20, 5], mixed=False, with_prompts=True)
    assert all(not result.gathered for result in results)
    assert [len(rank) for rank in calls] == [3] * WORLD


def test_the_prompts_compute_what_they_do_without_decodes():
    """The batch with them in it, against the oracle of one rank."""
    bank: Bank = ckv_fuzz.bank()
    rows = [1, 3, 2, 20, 5]
    results, _ = play("fp8_ds_mla", rows, mixed=True, with_prompts=True)
    begin = sum(rows[:DECODES])
    for r in (3, 4):
        places = (300 * r + torch.arange(CACHED[r] + rows[r])) % bank.size
        expected = bank.expected(places, CACHED[r], 0, 4, WORLD * 2)
        for rank, result in enumerate(results):
            part = slice(begin, begin + rows[r])
            for got, want in zip(result.token_ids[part].tolist(), expected.token_ids, strict=True):
                assert got == want + [-1] * (len(got) - len(want))
            heads = slice(2 * rank, 2 * rank + 2)
            out = result.out[part].double()
            assert torch.allclose(out, expected.out[:, heads], **ckv_fuzz.TOLERANCE)
            lse = result.lse[part].double()
            assert torch.allclose(lse, expected.lse[:, heads], atol=1e-3)
        begin += rows[r]
