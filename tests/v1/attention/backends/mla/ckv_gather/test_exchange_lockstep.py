# SPDX-License-Identifier: Apache-2.0
"""The exchange on simulated ranks: the same checks as on gloo ranks, in milliseconds."""

from types import SimpleNamespace

import pytest
import torch
from lockstep import Call, Lockstep, LockstepDist, replaced
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

from vllm.v1.attention.backends.mla.ckv_gather import exchange
from vllm.v1.attention.backends.mla.ckv_gather.layout import (
    RowShares,
    StagedLayout,
    plan_index_pages,
    plan_layout,
)
from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import TorchReferenceKernels

POISON = 0xEE
PADDED = 3


class SpanKernels(TorchReferenceKernels):
    """Insists on the documented span: what it may write is its own rank's, to the last row."""

    def pack_records(self, cache, block_table, local_lens, starts, out):
        super().pack_records(cache, block_table, local_lens, starts, out)
        self.latent_rows = out.shape[0]

    def pack_pools(self, index_cache, block_table, local_lens, starts, out):
        super().pack_pools(index_cache, block_table, local_lens, starts, out)
        self.pool_rows = out.shape[0]


@pytest.fixture(params=[2, 3])
def lockstep(request):
    lockstep = Lockstep(request.param)
    with replaced((exchange, "dist", LockstepDist(lockstep))):
        yield lockstep


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_spans_meet_in_place(lockstep, dtype):
    def run(rank):
        buffer = torch.full((lockstep.world * PADDED, 5), POISON, dtype=dtype)
        buffer[rank * PADDED : (rank + 1) * PADDED] = rank + 1
        exchange.all_gather_in_place(buffer, PADDED, "group", rank)
        return buffer

    for buffer in lockstep.run(run):
        assert buffer[:, 0].tolist() == [k + 1 for k in range(lockstep.world) for _ in range(3)]
        assert bool((buffer == buffer[:, :1]).all())
    assert [len(calls) for calls in lockstep.calls] == [1] * lockstep.world


def test_nothing_to_exchange_enters_nothing(lockstep):
    empty = torch.empty((0, 5), dtype=torch.uint8)
    lockstep.run(lambda rank: exchange.all_gather_in_place(empty, 0, "group", rank))
    assert lockstep.calls == [[]] * lockstep.world


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda buffer, rank: (buffer[:-1], PADDED, rank), ["shape (", " * 3"]),
        (lambda buffer, rank: (buffer, PADDED + 1, rank), ["shape (", " * 4"]),
        (lambda buffer, rank: (buffer[:, None], PADDED, rank), ["shape ("]),
        (lambda buffer, rank: (buffer[:, ::2], PADDED, rank), ["strides (6, 2)"]),
        (lambda buffer, rank: (buffer, PADDED, rank + 1), ["rank ", "numbers this process"]),
    ],
)
def test_each_misuse_is_refused_before_the_collective(lockstep, change, parts):
    def run(rank):
        buffer = torch.zeros((lockstep.world * PADDED, 6), dtype=torch.uint8)
        with pytest.raises(ValueError) as error:
            exchange.all_gather_in_place(
                *change(buffer, rank)[:2], "group", change(buffer, rank)[2]
            )
        return str(error.value)

    for message in lockstep.run(run):
        for part in parts:
            assert part in message
    assert lockstep.calls == [[]] * lockstep.world


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 6, 7])
def test_shares_of_a_selection_meet(lockstep, num_rows):
    """Fewer rows than ranks, and rows that the ranks do not divide, included."""
    every = torch.arange(num_rows * 5, dtype=torch.int32).view(num_rows, 5)
    shares = RowShares(num_rows, lockstep.world)

    def run(rank):
        buffer = torch.full((shares.exchanged_rows, 5), -7, dtype=torch.int32)
        own = every[shares.rows_of(rank)]
        exchange.gather_selection(own, buffer, "group", rank)
        return buffer

    for buffer in lockstep.run(run):
        assert torch.equal(buffer[:num_rows], every)
    size = -(-num_rows // lockstep.world) * 5 * 4
    call = [Call("all_gather_into_tensor", size, lockstep.world * size)] if num_rows else []
    assert lockstep.calls == [call] * lockstep.world


@pytest.mark.parametrize("lengths", [[9, 0, 23], [1], [4], [0, 0], [300]])
def test_records_and_pools_reach_their_places(lockstep, lengths):
    world = lockstep.world
    split = {"dcp_world_size": world, "interleave": 4}
    tokens = plan_layout(torch.tensor(lengths), **split)
    pools = plan_layout(torch.tensor(lengths) // 4, dcp_world_size=world, interleave=1)
    page_starts, num_pages = plan_index_pages(pools.seq_lens)

    def run(rank):
        kernels = SpanKernels()
        cache = torch.full((8, 256, 528), POISON, dtype=torch.uint8)
        index = torch.full((8, 64, 132), POISON, dtype=torch.uint8)
        table = torch.tensor([[2 * r + 1, 2 * r] for r in range(len(lengths))], dtype=torch.int32)
        keys = index.view(8, -1)[:, : 64 * 128].view(8, 64, 128)
        for r, length in enumerate(lengths):
            for token in range(length):
                if token // 4 % world == rank:
                    local = token // (4 * world) * 4 + token % 4
                    cache[2 * r + 1, local] = 10 * r + token % 7
            for pool in range(length // 4):
                if pool % world == rank:
                    local = pool // world
                    keys[2 * r + 1 - local // 64, local % 64] = 10 * r + pool % 9
        records = torch.full((world * tokens.padded, 528), POISON, dtype=torch.uint8)
        exchange.gather_latents(
            kernels, cache, table, StagedLayout.stage(tokens, "cpu"), records, "group", rank
        )
        gathered = torch.full((world * pools.padded, 132), POISON, dtype=torch.uint8)
        pages = torch.full((num_pages, 8448), POISON, dtype=torch.uint8)
        exchange.gather_pools(
            kernels, index, table, StagedLayout.stage(pools, "cpu"), gathered, pages,
            page_starts.int(), "group", rank, interleave=1,
        )  # fmt: skip
        assert getattr(kernels, "latent_rows", 0) == tokens.padded
        assert getattr(kernels, "pool_rows", 0) == pools.padded
        return records, pages

    for records, pages in lockstep.run(run):
        for r, length in enumerate(lengths):
            for token in range(length):
                owner, local = token // 4 % world, token // (4 * world) * 4 + token % 4
                row = owner * tokens.padded + int(tokens.starts[owner, r]) + local
                assert bool((records[row] == 10 * r + token % 7).all()), (r, token)
            for pool in range(length // 4):
                page = pages[int(page_starts[r]) + pool // 64]
                key = page[pool % 64 * 128 : pool % 64 * 128 + 128]
                assert bool((key == 10 * r + pool % 9).all()), (r, pool)


def candidates(rank, rows=2, width=3):
    ids = torch.arange(rows * width, dtype=torch.int32).view(rows, width) + 100 * rank
    return ids.float() + 0.5, ids


def test_candidates_of_all_ranks_lie_side_by_side(lockstep):
    def run(rank):
        return exchange.all_gather_candidates(*candidates(rank), "group")

    for scores, ids in lockstep.run(run):
        every = [candidates(rank) for rank in range(lockstep.world)]
        assert torch.equal(scores, torch.cat([s for s, _ in every], 1))
        assert torch.equal(ids, torch.cat([i for _, i in every], 1))
    assert [len(calls) for calls in lockstep.calls] == [1] * lockstep.world


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_candidates_enter_nothing(lockstep, shape):
    def run(rank):
        return exchange.all_gather_candidates(*candidates(rank, *shape), "group")

    for scores, ids in lockstep.run(run):
        assert scores.shape == ids.shape == (shape[0], shape[1] * lockstep.world)
        assert (scores.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert lockstep.calls == [[]] * lockstep.world


def test_candidates_travel_in_vllms_group_unless_told(lockstep, monkeypatch):
    from vllm.distributed import parallel_state

    group = SimpleNamespace(device_group="device group")
    monkeypatch.setattr(parallel_state, "get_dcp_group", lambda: group)
    seen = []
    gather = exchange.dist.all_gather_into_tensor
    monkeypatch.setattr(
        exchange.dist,
        "all_gather_into_tensor",
        lambda *args, group: seen.append(group) or gather(*args, group=group),
    )
    lockstep.run(lambda rank: exchange.all_gather_candidates(*candidates(rank)))
    lockstep.run(lambda rank: exchange.all_gather_candidates(*candidates(rank), "own"))
    assert seen == ["device group"] * lockstep.world + ["own"] * lockstep.world


def pynccl(rank, world, disabled=False):
    """vLLM's NCCL communicator without its library; notes what it is asked to gather."""
    communicator = object.__new__(PyNcclCommunicator)
    communicator.rank, communicator.world_size, communicator.disabled = rank, world, disabled
    communicator.gathered = []
    communicator.all_gather = lambda received, own: communicator.gathered.append((received, own))
    return communicator


def test_vllms_nccl_communicator_is_used_where_it_is():
    group = SimpleNamespace(
        device_group="device group", device_communicator=SimpleNamespace(pynccl_comm=pynccl(1, 3))
    )
    communicator = exchange.communicator_of(group)
    assert isinstance(communicator, PyNcclCommunicator)
    buffer = torch.arange(3 * PADDED * 5, dtype=torch.uint8).view(3 * PADDED, 5)
    exchange.all_gather_in_place(buffer, PADDED, communicator, 1)
    ((received, own),) = communicator.gathered
    assert received is buffer
    # In place for NCCL: what is sent lies where it would be received.
    assert own.data_ptr() == buffer[PADDED].data_ptr() and own.shape == (PADDED, 5)
    scores, ids = torch.rand(4, 2), torch.zeros(4, 2, dtype=torch.int32)
    assert exchange.all_gather_candidates(scores, ids, communicator)[0].shape == (4, 6)
    assert len(communicator.gathered) == 2
    with pytest.raises(ValueError, match="rank 2 was passed, the group numbers this process 1"):
        exchange.all_gather_in_place(buffer, PADDED, communicator, 2)


@pytest.mark.parametrize(
    "device_communicator",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(pynccl_comm=None),
        SimpleNamespace(pynccl_comm=pynccl(0, 2, disabled=True)),
    ],
)
def test_else_the_process_group_is(device_communicator):
    group = SimpleNamespace(device_group="group", device_communicator=device_communicator)
    assert exchange.communicator_of(group) == "group"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda scores, ids: (scores, ids.long()), "int64"),
        (lambda scores, ids: (scores.double(), ids), "float64"),
        (lambda scores, ids: (scores[:1], ids), "(1, 3)"),
        (lambda scores, ids: (scores[0], ids[0]), "(3,)"),
    ],
)
def test_candidates_of_other_shapes_or_types_are_refused(lockstep, change, part):
    def run(rank):
        with pytest.raises(ValueError) as error:
            exchange.all_gather_candidates(*change(*candidates(rank)), "group")
        return str(error.value)

    assert all(part in message for message in lockstep.run(run))
    assert lockstep.calls == [[]] * lockstep.world


def test_numbers_that_have_to_be_the_same(lockstep):
    lockstep.run(lambda rank: exchange.require_same("numbers", [1, 7], "group"))

    def run(rank):
        with pytest.raises(RuntimeError) as error:
            exchange.require_same("numbers", [1, 7 + (rank == 1)], "group")
        return str(error.value)

    for message in lockstep.run(run):
        assert "numbers differ" in message
        assert "[1, 7] on rank 0, [1, 8] on rank 1" in message


def test_facts_come_in_rank_order(lockstep):
    every = lockstep.run(lambda rank: exchange.all_gather_facts({"rank": rank}, "group"))
    assert every == [[{"rank": rank} for rank in range(lockstep.world)]] * lockstep.world
