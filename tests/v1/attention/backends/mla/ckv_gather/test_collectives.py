# SPDX-License-Identifier: Apache-2.0
"""Every rank issues the same collectives with the same sizes, whatever the batch.

Simulated ranks run the real decision, indexer, exchange and attention around kernels that compute
nothing. The sequence is compared between ranks, which real ones would wait for, and with what the
batch's numbers say it has to be.
"""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from ckv_ranks import INDEX_HEADS, Inputs, Sizes, Step, run_step, simulated_ranks
from ckv_rates import NOTHING
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lockstep import Call, Lockstep, LockstepDist, Mismatch

from vllm.v1.attention.backends.mla.ckv_gather.time_model import Rates
from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import TorchReferenceKernels

CASES = int(os.environ.get("CKV_COLLECTIVE_CASES", "400"))


pytestmark = pytest.mark.usefixtures("gather_on")


class NoKernels(TorchReferenceKernels):
    """Results of the right shapes: no token is selected and nothing is read or written."""

    def nothing(self, *args, **kwargs) -> None:
        pass

    write_records = write_pools = pack_records = pack_pools = unpack_pools = nothing

    def select_pools(self, q_fp8, weights, pages, table, req_id, counts, topk, scratch=None):
        ids = torch.full((q_fp8.shape[0], topk), -1, dtype=torch.int32)
        return ids, torch.full(ids.shape, float("-inf"))

    def merge_pool_candidates(self, scores, global_ids, topk):
        return global_ids[:, :topk].contiguous(), scores[:, :topk].contiguous()

    def filter_local(self, token_ids, req_id, *args, **kwargs):
        return torch.full_like(token_ids, -1), torch.zeros_like(req_id)

    def attend(self, q, records, row_ids, counts, scale, scratch=None):
        return torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"))


@dataclass(frozen=True)
class Batch:
    """One batch and everything else that a decision reads.

    held: what is reserved, in percent of need, but no less than has to be. spare: added to it.
    auto: gather only where that moves fewer bytes. shard: share the selection out. mixed: prompts
    may gather beside decodes. rates: of the time model, which then decides. early: exchange the
    records of a context alone, behind its keys.
    """

    world: int
    interleave: int
    cached: tuple[int, ...]
    rows: tuple[int, ...]
    prefilling: tuple[bool, ...]
    spare: int
    min_tokens: int
    max_num_seqs: int
    decodes: bool
    capturing: bool
    draft: bool
    overlap: bool
    pad_tokens: int
    auto: bool = False
    record: str = "fp8_ds_mla"
    shard: bool = False
    held: int = 100
    mixed: bool = False
    rates: Rates | None = None
    early: bool = False


@st.composite
def batches(draw) -> Batch:
    count = draw(st.integers(1, 6))
    several = st.tuples
    rarely = st.sampled_from([False] * 9 + [True])
    return Batch(
        world=draw(st.integers(2, 8)),
        interleave=draw(st.sampled_from([4, 8, 64])),
        cached=draw(several(*[st.sampled_from([0, 0, 1, 3, 4, 5, 63, 300, 2000])] * count)),
        rows=draw(several(*[st.sampled_from([3, 1, 2, 4, 5, 17])] * count)),
        prefilling=draw(several(*[st.sampled_from([True] * 12 + [False])] * count)),
        spare=draw(st.sampled_from([50, 50, 0, 1])),
        min_tokens=draw(st.sampled_from([0, 0, 0, 16])),
        max_num_seqs=draw(st.sampled_from([6, 6, 6, 3])),
        decodes=draw(st.booleans()),
        capturing=draw(rarely),
        draft=draw(rarely),
        overlap=draw(rarely),
        pad_tokens=draw(st.sampled_from([0, 3])),
        auto=draw(st.booleans()),
        record=draw(st.sampled_from(["fp8_ds_mla", "nvfp4_ds_mla"])),
        shard=draw(st.booleans()),
        mixed=draw(st.booleans()),
        early=draw(st.booleans()),
        held=draw(st.sampled_from([100, 100, 60, 30, 0])),
    )


def gathers(batch: Batch, sizes: Sizes) -> bool:
    """The decision as the design states it."""
    decodes = num_decodes(batch)
    prompts = step_order(batch)[decodes:]
    if batch.auto and received(prompt_calls(batch, sizes)) >= received(
        ordinary_calls(sum(batch.rows) - decodes, sizes)
    ):
        return False
    return (
        not (batch.capturing or batch.draft or batch.overlap)
        and (batch.mixed or not decodes)
        and all(batch.prefilling[r] for r in prompts)
        and batch.min_tokens < sum(batch.rows[r] for r in prompts)
        and len(prompts) <= batch.max_num_seqs
    )


def num_decodes(batch: Batch) -> int:
    return batch.rows.count(1) if batch.decodes else 0


def step_order(batch: Batch) -> list[int]:
    """The requests as vLLM sorts them."""
    return sorted(range(len(batch.rows)), key=lambda r: batch.rows[r] != 1)


def spans(batch: Batch, sizes: Sizes) -> list[tuple[int, list[list[int]]]]:
    """Rows of each span, and for each of its windows the tokens of the requests in it.

    As the design states it: as many requests together as fit; one that does not fit alone in
    windows of as many pages on every rank as fit.
    """
    found: list[tuple[int, list[list[int]]]] = []
    window = sizes.capacity - sizes.capacity % (batch.world * sizes.page_size)
    for r in step_order(batch)[num_decodes(batch) :]:
        rows, length = batch.rows[r], batch.cached[r] + batch.rows[r]
        if length > sizes.capacity:
            full, rest = divmod(length, window)
            found.append((rows, [[window]] * full + [[rest]] * (rest > 0)))
        elif found and len(found[-1][1]) == 1 and sum(found[-1][1][0]) + length <= sizes.capacity:
            found[-1] = found[-1][0] + rows, [[*found[-1][1][0], length]]
        else:
            found.append((rows, [[length]]))
    if found:
        found[-1] = found[-1][0] + batch.pad_tokens, found[-1][1]
    return found


def gathered_calls(batch: Batch, sizes: Sizes) -> list[Call]:
    """One layer's collectives of a gather: those of decodes come before each exchange's."""
    selection, attention = exchanges(batch, sizes)
    decodes = num_decodes(batch)
    ordinary = ordinary_calls(decodes, sizes) if decodes else []
    return [*ordinary[:1], *selection, *ordinary[1:], *attention]


def prompt_calls(batch: Batch, sizes: Sizes) -> list[Call]:
    """Those of the prompts alone."""
    selection, attention = exchanges(batch, sizes)
    return selection + attention


def exchanges(batch: Batch, sizes: Sizes) -> tuple[list[Call], list[Call]]:
    """Of keys and selections, and of records, from numbers that every rank knows.

    Records that start early are among the former, between keys and selection: those of the context.
    """
    world, interleave = batch.world, batch.interleave
    cut, prompts = spans(batch, sizes), step_order(batch)[num_decodes(batch) :]
    early = (
        batch.early
        and [len(windows) for _, windows in cut] == [1]
        # Nobody else writes what is sent: a batch of one request, or no context at all.
        and (len(batch.rows) == 1 or not any(batch.cached[r] for r in prompts))
    )

    def largest(units: list[int], run: int) -> int:
        return max(
            sum(sum(u // run % world == rank for u in range(n)) for n in units)
            for rank in range(world)
        )

    selection, attention = [], []
    for rows, windows in cut:
        for tokens in windows:
            sent = [batch.cached[r] for r in prompts] if early else tokens
            selection.append(largest([n // 4 for n in sent], interleave // 4) * 132)
            records = selection if early else attention
            records.append(largest(sent, interleave) * sizes.record_bytes)
        selection.append(batch.shard * -(-rows // world) * sizes.pool_topk * 4)

    def calls(sent: list[int]) -> list[Call]:
        return [Call("all_gather_into_tensor", size, world * size) for size in sent if size]

    return calls(selection), calls(attention)


def ordinary_calls(rows: int, sizes: Sizes) -> list[Call]:
    """One layer's collectives of ``rows`` on the ordinary path."""
    world = sizes.world
    candidates = 2 * rows * sizes.pool_topk * 4
    query = rows * 512 * 2
    partial = world * rows * (512 + 2) * 2
    return [
        Call("all_gather_into_tensor", candidates, world * candidates),
        Call("all_gather_into_tensor", query, world * query),
        Call("all_to_all_single", partial, partial),
    ]


def received(calls: list[Call]) -> int:
    """Bytes received. One share of every call is the rank's own, so sums compare as without it."""
    return sum(call.received for call in calls)


def expected_calls(batch: Batch, sizes: Sizes) -> list[Call]:
    if gathers(batch, sizes):
        return gathered_calls(batch, sizes)
    return ordinary_calls(sum(batch.rows) + batch.pad_tokens, sizes)


def play(batch: Batch, change=lambda rank: None) -> tuple[Lockstep, Sizes]:
    lengths = [c + r for c, r in zip(batch.cached, batch.rows, strict=True)]
    least = min(batch.world * Sizes.page_size, max(lengths))
    sizes = Sizes(
        batch.world,
        batch.interleave,
        capacity=max(sum(lengths) * batch.held // 100 + batch.spare, least),
        max_model_len=max(lengths),
        mixed=batch.mixed,
        min_tokens=batch.min_tokens,
        max_num_seqs=batch.max_num_seqs,
        record=batch.record,
        shard_selection=batch.shard,
        early_exchange=batch.early,
    )
    order = step_order(batch)
    step = Step(
        requests=order,
        query_lens=[batch.rows[r] for r in order],
        seq_lens=[batch.cached[r] + batch.rows[r] for r in order],
        prefilling=[batch.prefilling[r] for r in order],
        num_decode_tokens=num_decodes(batch),
        pad_tokens=batch.pad_tokens,
    )
    rows = step.num_tokens + batch.pad_tokens
    nothing = torch.zeros(rows, 128, dtype=torch.bfloat16)
    inputs = Inputs(
        latents=torch.zeros(rows, 512, dtype=torch.bfloat16),
        k=nothing,
        gate=nothing,
        q=torch.zeros(rows, batch.world, 512, dtype=torch.bfloat16),
        index_q=torch.zeros(rows, INDEX_HEADS, 128, dtype=torch.uint8).view(torch.float8_e4m3fn),
        weights=torch.zeros(rows, INDEX_HEADS),
        ape=torch.zeros(4, 128),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_B12X_MLA_CKV_GATHER", "auto" if batch.auto else "1")
        return run_batch(batch, sizes, step, inputs, change)


def run_batch(
    batch: Batch, sizes: Sizes, step: Step, inputs: Inputs, change
) -> tuple[Lockstep, Sizes]:
    with simulated_ranks(sizes, NoKernels()) as (lockstep, ranks):
        for rank in ranks:
            # The tail cache has a block for each of max_num_seqs requests; no kernel reads it.
            rank.tables.pages = [[r * 20 + i for i in range(20)] for r in range(len(batch.rows))]
            rank.decision_options = {"capturing": batch.capturing, "is_draft_layer": batch.draft}
            rank.gather.vllm_config.parallel_config.use_ubatching = batch.overlap
            if batch.rates is not None:
                rank.gather.adopt(batch.rates)
            change(rank)
        for calls in lockstep.calls:
            calls.clear()
        run_step(lockstep, ranks, step, [inputs])
    return lockstep, sizes


@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(batches())
def test_ranks_meet_in_the_collectives_that_the_batch_calls_for(batch):
    lockstep, sizes = play(batch)
    for calls in lockstep.calls:
        assert calls == expected_calls(batch, sizes)


PLAIN = Batch(
    world=4, interleave=4, cached=(0,), rows=(4,), prefilling=(True,), spare=0, min_tokens=0,
    max_num_seqs=6, decodes=False, capturing=False, draft=False, overlap=False, pad_tokens=0,
)  # fmt: skip


@pytest.mark.parametrize("rows", [(1,), (2,), (3,), (4,), (5,), (1, 1), (3, 5)], ids=str)
def test_ranks_that_own_nothing_enter_all_the_same(rows):
    batch = replace(PLAIN, rows=rows, cached=(0,) * len(rows), prefilling=(True,) * len(rows))
    lockstep, sizes = play(batch)
    assert all(calls == expected_calls(batch, sizes) for calls in lockstep.calls)
    # Prompts below one pool have no index exchange, on any rank.
    assert len(lockstep.calls[3]) == 1 + (max(rows) >= 4)


@pytest.mark.parametrize("pad_tokens", [0, 3])
@pytest.mark.parametrize("rows", [(1,), (3,), (4,), (5,), (1, 1), (17, 5)], ids=str)
def test_shares_of_the_selection_meet_between_keys_and_records(rows, pad_tokens):
    """Four ranks; with fewer rows some have none to select for, and enter all the same."""
    count = len(rows)
    batch = replace(
        PLAIN,
        rows=rows,
        cached=(300,) * count,
        prefilling=(True,) * count,
        pad_tokens=pad_tokens,
        shard=True,
    )
    lockstep, sizes = play(batch)
    plain = gathered_calls(replace(batch, shard=False), sizes)
    size = -(-(sum(rows) + pad_tokens) // 4) * sizes.pool_topk * 4
    calls = [plain[0], Call("all_gather_into_tensor", size, 4 * size), plain[1]]
    assert lockstep.calls == [calls] * 4


def test_the_counters_add_the_bytes_that_the_shares_receive():
    received_bytes = []

    def change(rank):
        counted.append(rank.gather.counters)

    for shard in (False, True):
        counted: list = []
        lockstep, _ = play(replace(PLAIN, rows=(17,), cached=(300,), shard=shard), change)
        for rank, counters in enumerate(counted):
            others = sum(call.received - call.sent for call in lockstep.calls[rank])
            assert counters.ckv_bytes == others
        received_bytes.append(counted[0].ckv_bytes)
    assert received_bytes[1] - received_bytes[0] == 3 * 5 * 4 * 4


def test_the_model_notices_a_rank_that_shares_alone():
    def change(rank):
        rank.gather.shard_selection = rank.rank == 1

    with pytest.raises(Mismatch, match=r"rank 0: Call.*rank 1: Call"):
        play(replace(PLAIN, rows=(17,), shard=True), change)


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_case_4_the_last_batch_that_fits_and_the_first_that_does_not(world):
    full = replace(
        PLAIN, world=world, cached=(2000, 300, 63, 5), rows=(4,) * 4, prefilling=(True,) * 4
    )
    lockstep, sizes = play(full)
    assert [len(calls) for calls in lockstep.calls] == [2] * world
    assert lockstep.calls[0] == expected_calls(full, sizes)
    # The last request in a span of its own.
    lockstep, sizes = play(replace(full, spare=-1))
    assert [len(calls) for calls in lockstep.calls] == [4] * world
    assert lockstep.calls[0] == expected_calls(full, sizes)


@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_decodes_meet_before_the_prompts_beside_them(mixed, chunk):
    """Of two decodes and prompts of 17 and 5 rows; by default no decode is in a gather.

    chunk: one of the decodes is a prompt's chunk of a single token.
    """
    batch = replace(
        PLAIN, rows=(17, 1, 5, 1), cached=(3, 300, 40, 9), prefilling=(True, chunk, True, False),
        decodes=True, mixed=mixed,
    )  # fmt: skip
    lockstep, sizes = play(batch)
    if not mixed:
        assert lockstep.calls == [ordinary_calls(24, sizes)] * 4
        return
    candidates, query, partial = ordinary_calls(2, sizes)
    keys, records = (5 // 4 + 1 + 11 // 4 + 1) * 132, (20 // 16 * 4 + 4 + 45 // 16 * 4 + 4) * 528
    gather = [Call("all_gather_into_tensor", size, 4 * size) for size in (keys, records)]
    assert lockstep.calls == [[candidates, gather[0], query, partial, gather[1]]] * 4


@pytest.mark.parametrize("shard", [False, True])
def test_windows_of_a_context_meet_one_after_the_other(shard):
    """Four ranks, pages of 256: windows of 1,024, the last one with 952 + 4 tokens."""
    batch = replace(
        PLAIN, cached=(3000, 3), rows=(4, 5), prefilling=(True,) * 2, held=0, shard=shard
    )
    lockstep, sizes = play(batch)
    assert sizes.capacity == 1024
    # Keys of 256, 256 and 239 pools, four ids for each of one row, then the other request's.
    keys = [64 * 132, 64 * 132, 60 * 132, *[1 * 4 * 4] * shard, 1 * 132, *[2 * 4 * 4] * shard]
    records = [256 * 528, 256 * 528, 240 * 528, 4 * 528]
    assert [[call.sent for call in calls] for calls in lockstep.calls] == [keys + records] * 4


@pytest.mark.parametrize("record", ["fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_auto_gathers_the_longest_context_that_moves_fewer_bytes(world, record):
    """One token more of context, and all ranks take the other path."""
    batch = replace(PLAIN, world=world, rows=(17,), auto=True, record=record)
    sizes = replace(play(batch)[1], capacity=10**6)
    ordinary = received(ordinary_calls(sum(batch.rows), sizes))
    context = 0
    while received(gathered_calls(replace(batch, cached=(context,)), sizes)) < ordinary:
        context += 1
    assert context > 17
    for cached, calls in ((context - 1, 2), (context, 3)):
        lockstep, _ = play(replace(batch, cached=(cached,)))
        assert [len(rank) for rank in lockstep.calls] == [calls] * world


@pytest.mark.parametrize("auto", [False, True])
def test_late_numbers_on_a_device_change_no_decision(auto):
    """Only the host's numbers are equal on all ranks in time; nothing else may be read."""

    def change(rank):
        decide = rank.gather.plan_batch

        def late(common, **options):
            common.seq_lens = torch.full_like(common.seq_lens, [-1, 0, 10**6, 7][rank.rank])
            common.query_start_loc = torch.full_like(common.query_start_loc, rank.rank)
            return decide(common, **options)

        rank.gather.plan_batch = late

    lockstep, _ = play(replace(PLAIN, rows=(17,), cached=(63,), auto=auto), change)
    assert all(calls == lockstep.calls[0] for calls in lockstep.calls)
    assert len(lockstep.calls[0]) == 2


def test_the_model_notices_a_rank_that_decides_alone():
    def change(rank):
        if rank.rank == 2:
            rank.gather.limits = replace(rank.gather.limits, min_query_tokens=100)

    with pytest.raises(Mismatch, match=r"rank 1: Call.*rank 2: Call"):
        play(replace(PLAIN, rows=(17,)), change)


def test_the_model_notices_a_rank_that_counts_other_bytes():
    def change(rank):
        if rank.rank == 1:
            model = rank.gather.time_model
            rank.gather.time_model = replace(model, bytes=replace(model.bytes, record_bytes=10**6))

    with pytest.raises(Mismatch, match=r"rank 0: Call.*rank 1: Call"):
        play(replace(PLAIN, rows=(17,), auto=True), change)


# A received byte costs a second, and everything else nothing; or a collective, or a pair.
BYTES, COLLECTIVES, PAIRS = (
    replace(NOTHING, **{name: 1.0}) for name in ("byte", "collective", "pair")
)


@st.composite
def timed_batches(draw) -> Batch:
    batch = draw(batches())
    return replace(batch, auto=True, rates=draw(st.sampled_from([BYTES, COLLECTIVES, PAIRS])))


@settings(max_examples=CASES // 4, deadline=None, suppress_health_check=list(HealthCheck))
@given(timed_batches())
def test_ranks_meet_whatever_takes_the_time(batch):
    """Which path that is depends on the rates, and on no rank."""
    lockstep, sizes = play(batch)
    every = lockstep.calls[0]
    assert all(calls == every for calls in lockstep.calls)
    shared = gathered_calls(batch, sizes), gathered_calls(replace(batch, shard=False), sizes)
    ordinary = ordinary_calls(sum(batch.rows) + batch.pad_tokens, sizes)
    assert every in (*shared, ordinary)


@pytest.mark.parametrize(
    ("rates", "calls"), [(NOTHING, 3), (BYTES, 2), (COLLECTIVES, 2), (PAIRS, 3)], ids=str
)
def test_the_dearest_thing_decides(rates, calls):
    """A gather takes two collectives and not three; four times as many pairs; here, fewer bytes."""
    batch = replace(PLAIN, rows=(17,), auto=True, rates=rates)
    lockstep, _ = play(batch)
    assert [len(rank) for rank in lockstep.calls] == [calls] * 4


@pytest.mark.parametrize(("rates", "calls"), [(COLLECTIVES, 2), (PAIRS, 3)], ids=str)
def test_a_selection_is_shared_out_if_pairs_are_dear(rates, calls):
    """Not by itself a reason to gather: the flag is 1."""
    batch = replace(PLAIN, rows=(17,), cached=(300,), shard=True, rates=rates)
    lockstep, _ = play(batch)
    assert [len(rank) for rank in lockstep.calls] == [calls] * 4


def test_the_model_notices_a_rank_with_other_rates():
    def change(rank):
        if rank.rank == 3:
            rank.gather.adopt(PAIRS)

    with pytest.raises(Mismatch, match=r"rank 2: Call.*rank 3: Call"):
        play(replace(PLAIN, rows=(17,), auto=True, rates=BYTES), change)


def test_the_model_notices_a_rank_that_ends_early_and_passes_errors_on():
    lockstep = Lockstep(3)
    dist = LockstepDist(lockstep)

    def run(rank):
        if rank < 2:
            dist.all_gather_into_tensor(torch.empty(3), torch.empty(1))

    with pytest.raises(Mismatch, match="rank 2: has ended"):
        lockstep.run(run)

    def fail(rank):
        if rank == 1:
            raise ZeroDivisionError("of rank 1")
        dist.all_gather_into_tensor(torch.empty(3), torch.empty(1))

    with pytest.raises(ZeroDivisionError, match="of rank 1"):
        lockstep.run(fail)
    every = lockstep.run(lambda rank: gathered(dist, rank))
    assert every == [[0.0, 1.0, 2.0]] * 3


def gathered(dist, rank):
    every = torch.empty(3)
    dist.all_gather_into_tensor(every, torch.tensor([float(rank)]))
    return every.tolist()
