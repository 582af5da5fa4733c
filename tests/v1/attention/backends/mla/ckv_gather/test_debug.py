# SPDX-License-Identifier: Apache-2.0
"""``VLLM_CKV_DEBUG=1`` names a corrupted block table, slot, row or decision; good batches pass."""

from dataclasses import replace

import ckv_fuzz
import pytest
import torch
from ckv_oracle import Bank
from ckv_ranks import POISON_ID, Sizes, Step, run_step, simulated_ranks

from vllm.plugins.b12x_mla_sparse import register
from vllm.v1.attention.backends.mla.ckv_gather import debug, exchange
from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import TorchReferenceKernels


@pytest.fixture(autouse=True)
def debug_on(monkeypatch):
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", "1")
    monkeypatch.setenv("VLLM_CKV_DEBUG", "1")
    register()
    with ckv_fuzz.quiet():
        yield


@pytest.fixture(scope="module")
def bank():
    return Bank(seed=2, size=256, queries=32)


def play(bank, change, gathers=True, shard_selection=False):
    """One step of two requests on three ranks; ``change`` spoils a rank or its metadata."""
    sizes = Sizes(
        3,
        pool_topk=2,
        capacity=200,
        min_tokens=0 if gathers else 150,
        shard_selection=shard_selection,
    )
    with simulated_ranks(sizes, TorchReferenceKernels()) as (lockstep, ranks):
        for rank in ranks:
            rank.tables.pages = [[5 * rank.rank + r] for r in range(2)]
            change(rank)
        places = torch.cat([torch.arange(21), torch.arange(64, 77)])
        step = Step([0, 1], [21, 13], [21, 13], [True, True])
        return run_step(lockstep, ranks, step, [bank.inputs(places, 0, 0, 3)])


def spoil_metadata(which, field, value, on_rank=1):
    def change(rank):
        build = rank.metadata

        def metadata(step, count=True):
            made = build(step, count)
            if rank.rank == on_rank:
                getattr(made[which], field)[1, ...] = value
            return made

        rank.metadata = metadata

    return change


LAYER = "model.layers.0.self_attn.attn"


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("shard_selection", [True, False])
def test_a_good_batch_passes(bank, gathers, shard_selection):
    for (result,) in play(bank, lambda rank: None, gathers, shard_selection):
        assert result.gathered == gathers
        assert result.selection_shares == (0 if not gathers else 3 if shard_selection else 1)
        assert bool(result.out.isfinite().all())


@pytest.mark.parametrize(
    ("which", "what"), [(LAYER, "latent records"), ("index", "index keys")], ids=str
)
@pytest.mark.parametrize("page", [-1, POISON_ID])
def test_a_corrupted_block_table_entry_is_named(bank, which, what, page):
    with pytest.raises(ValueError, match=f"{what}: entry 0 of request 1 .* page {page}, the cache"):
        play(bank, spoil_metadata(which, "block_table", page))


@pytest.mark.parametrize("page", [-1, POISON_ID])
def test_a_corrupted_index_table_is_named_on_the_ordinary_path(bank, page):
    with pytest.raises(ValueError, match=f"index keys: entry 0 of request 1 .* page {page}, the"):
        play(bank, spoil_metadata("index", "block_table", page), gathers=False)


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize(
    ("which", "what"),
    [(LAYER, "latent slots"), ("index", "index pool slots"), ("tail", "index tail slots")],
    ids=str,
)
def test_a_slot_beyond_the_cache_is_named(bank, which, what, gathers):
    with pytest.raises(ValueError, match=rf"{what}: {2**40} at \(1,\), there are"):
        play(bank, spoil_metadata(which, "slot_mapping", 2**40), gathers)


def test_a_row_beyond_the_cache_is_named(bank):
    """No kernel checks that bound: the ordinary path trusts vLLM's block table."""
    with pytest.raises(ValueError, match=r"cache rows: \d+ at \(\d+, 0\), there are \d+"):
        play(bank, spoil_metadata(LAYER, "block_table", 2**20), gathers=False)


def test_a_row_beyond_what_was_gathered_is_named(bank, monkeypatch):
    def remap(self, *args, **kwargs):
        rows = stock(self, *args, **kwargs)
        rows[3, 0] = 2**30
        return rows

    stock = TorchReferenceKernels.remap
    monkeypatch.setattr(TorchReferenceKernels, "remap", remap)
    with pytest.raises(ValueError, match=rf"gathered rows: {2**30} at \(3, 0\), there are \d+"):
        play(bank, lambda rank: None)


def test_slots_may_reach_the_last_one():
    index_cache, tail_cache = torch.zeros(3, 64, 132), torch.zeros(5, 2, 4, 128)
    debug.check_pool_slots(torch.tensor([-1, 3 * 64 - 1]), index_cache)
    debug.check_tail_slots(torch.tensor([-1, 5 * 4 - 1]), tail_cache)
    with pytest.raises(ValueError, match="index pool slots: 192"):
        debug.check_pool_slots(torch.tensor([3 * 64]), index_cache)
    with pytest.raises(ValueError, match="index tail slots: 20"):
        debug.check_tail_slots(torch.tensor([5 * 4]), tail_cache)


def test_index_pages_are_checked_as_far_as_a_row_reads():
    table, cache = torch.tensor([[0, 9], [1, 2]]), torch.zeros(3, 64, 132)
    rows = torch.tensor([0, 1, 1, -1])
    debug.check_index_pages(table, rows, torch.tensor([64, 65, 3, 128]), cache)
    with pytest.raises(ValueError, match="entry 1 of request 0 in the block table is page 9"):
        debug.check_index_pages(table, rows, torch.tensor([65, 65, 3, 128]), cache)


def test_padding_is_not_checked(bank):
    """Its slots and tables are those of an earlier batch."""
    sizes = Sizes(3, pool_topk=2, capacity=200)
    with simulated_ranks(sizes, TorchReferenceKernels()) as (lockstep, ranks):
        for rank in ranks:
            rank.tables.pages = [[5 * rank.rank]]
        for min_tokens in (0, 150):
            for rank in ranks:
                rank.gather.limits = replace(rank.gather.limits, min_query_tokens=min_tokens)
            step = Step([0], [5], [5], [True], pad_rows=2, pad_tokens=3)
            inputs = bank.inputs(torch.arange(5), 0, 3, 3)
            for (result,) in run_step(lockstep, ranks, step, [inputs]):
                assert result.gathered == (min_tokens == 0)


def test_a_rank_that_decides_alone_is_named(bank):
    def change(rank):
        if rank.rank == 2:
            rank.gather.limits = replace(rank.gather.limits, min_query_tokens=100)

    with pytest.raises(
        RuntimeError, match=r"\[1, 34, 2, 34, 34, 1, 1\] on rank 0, \[0, 34, 2, 34, 34, 1, 0\] on"
    ):
        play(bank, change)


def test_a_rank_that_shares_its_selection_alone_is_named(bank):
    def change(rank):
        rank.gather.shard_selection = rank.rank == 1

    with pytest.raises(
        RuntimeError, match=r"34, 34, 1, 1\] on rank 0, \[.*34, 34, 3, 1\] on rank 1"
    ):
        play(bank, change, shard_selection=True)


@pytest.mark.parametrize("share", [0, 1, 2])
def test_a_share_that_does_not_arrive_is_named(bank, share, monkeypatch):
    """The buffer is poisoned, so that rows nobody wrote select nothing."""

    def lose(selected, gathered, group, rank):
        return send(selected[:0] if rank == share else selected, gathered, group, rank)

    send = exchange.gather_selection
    monkeypatch.setattr(exchange, "gather_selection", lose)
    play(bank, lambda rank: None)
    # Shares of twelve rows; rows 0 to 2 of the first request see no pool yet.
    row = {0: 3, 1: 12, 2: 24}[share]
    with pytest.raises(ValueError, match=rf"selected pools: row {row} sees \d, 0 are chosen"):
        play(bank, lambda rank: None, shard_selection=True)


def test_selections_are_checked_row_by_row():
    ids = torch.tensor([[0, 1], [2, -1], [-1, -1], [7, 7]], dtype=torch.int32)
    rows, counts = torch.tensor([0, 0, 1, -1]), torch.tensor([2, 3, 0, 9])
    with pytest.raises(ValueError, match="row 1 sees 3, 1 are chosen, the largest is 2"):
        debug.check_selection(ids, rows, counts)
    ids[1, 1] = 3
    with pytest.raises(ValueError, match="row 1 sees 3, 2 are chosen, the largest is 3"):
        debug.check_selection(ids, rows, counts)
    ids[1, 1] = 1
    debug.check_selection(ids, rows, counts)


def test_a_table_that_is_too_short_is_named():
    table, lens = torch.zeros((2, 1), dtype=torch.int32), torch.tensor([64, 65])
    debug.check_pages("x", table, lens[:1], 64, 1)
    with pytest.raises(ValueError, match="x: request 1 needs 2 pages, its block table has 1"):
        debug.check_pages("x", table, lens, 64, 1)


def test_rows_may_reach_the_last_one():
    debug.check_below("rows", torch.tensor([[-1, 4]]), 5)
    with pytest.raises(ValueError, match=r"rows: 5 at \(0, 1\), there are 5"):
        debug.check_below("rows", torch.tensor([[-1, 5]]), 5)


def test_off_by_default(bank, monkeypatch):
    monkeypatch.delenv("VLLM_CKV_DEBUG")
    seen = []
    monkeypatch.setattr(debug, "poison", lambda buffers: seen.append(buffers))
    play(bank, lambda rank: None)
    assert seen == []
