# SPDX-License-Identifier: Apache-2.0
"""Bad numbers stay in their request; a rank that dies or stops leaves the others with an error."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ckv_oracle import Bank
from ckv_ranks import Sizes, Step, run_step, simulated_ranks

from vllm.v1.attention.backends.mla.ckv_gather import exchange
from vllm.v1.attention.backends.mla.ckv_gather.layout import StagedLayout, plan_layout
from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import TorchReferenceKernels

pytestmark = pytest.mark.usefixtures("gather_on")


@pytest.fixture(scope="module")
def bank():
    return Bank(seed=1, size=256, queries=32)


ROWS = [9, 14, 6]


def play(bank, world, gathers, spoil):
    """Two steps of three requests; ``spoil`` changes the first step's inputs."""
    sizes = Sizes(world, pool_topk=2, capacity=200, min_tokens=0 if gathers else 150)
    with simulated_ranks(sizes, TorchReferenceKernels()) as (lockstep, ranks):
        for rank in ranks:
            rank.tables.pages = [[5 * rank.rank + r] for r in range(3)]
            # Zeros, unlike what a test before may have left: only ``spoil`` is not a number.
            for r in range(3):
                rank.caches[0][5 * rank.rank + r] = 0
                rank.index_caches[0][5 * rank.rank + r] = 0
        outputs = []
        for number in range(2):
            ends = [(number + 1) * n for n in ROWS]
            step = Step(list(range(3)), ROWS, ends, [True] * 3)
            places = torch.cat(
                [
                    64 * r + torch.arange(e - n, e)
                    for r, (n, e) in enumerate(zip(ROWS, ends, strict=True))
                ]
            )
            inputs = bank.inputs(places, 0, 0, world)
            if number == 0:
                spoil(inputs)
            results = run_step(lockstep, ranks, step, [inputs])
            assert all(result.gathered == gathers for (result,) in results)
            outputs.append([result for (result,) in results])
    return outputs


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("what", "bad"),
    [
        *[("latents", bad) for bad in (NAN, INF, -INF)],
        *[(what, bad) for what in ("k", "gate") for bad in (NAN, INF)],
        ("q", NAN),
        ("weights", NAN),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [(1, False), (3, False), (3, True)], ids=str)
@pytest.mark.parametrize("request_and_token", [(0, 0), (1, 5)], ids=str)
def test_a_bad_number_stays_in_its_request_and_in_its_future(
    bank, what, bad, path, request_and_token
):
    request, token = request_and_token
    begin = sum(ROWS[:request])

    def spoil(inputs):
        getattr(inputs, what)[begin + token, ..., 3 if what != "weights" else 0] = bad

    clean = play(bank, *path, lambda inputs: None)
    spoiled = play(bank, *path, spoil)
    for number in range(2):
        # The next step's rows of the request come after the token, all of them.
        first = begin + (token if number == 0 else 0)
        touched = torch.zeros(sum(ROWS), dtype=torch.bool)
        touched[first : begin + ROWS[request]] = True
        for was, now in zip(clean[number], spoiled[number], strict=True):
            assert torch.equal(was.token_ids[~touched], now.token_ids[~touched])
            assert torch.equal(was.out[~touched], now.out[~touched])
            assert torch.equal(was.lse[~touched], now.lse[~touched])


def exchange_with_a_fault(rank, world, store, fault, results):
    """Two exchanges; rank 1 dies or stops between them. The others report what they got, when."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    # Starting may take long; only the exchange has to notice in time.
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=6))
    layout = plan_layout(torch.tensor([30]), dcp_world_size=world, interleave=4)
    staged = StagedLayout.stage(layout, "cpu")
    cache, table = torch.zeros((1, 64, 528), dtype=torch.uint8), torch.zeros((1, 1)).int()
    records = torch.empty((world * layout.padded, 528), dtype=torch.uint8)
    arguments = TorchReferenceKernels(), cache, table, staged, records, group, rank
    exchange.gather_latents(*arguments)
    if rank == 1:
        if fault == "stops":
            time.sleep(20)
        os._exit(9)
    begin = time.monotonic()
    try:
        exchange.gather_latents(*arguments)
        results[rank] = ("no error", 0.0)
    except RuntimeError as error:
        results[rank] = (str(error), time.monotonic() - begin)
    # A process group with a dead member cannot be destroyed in order.
    os._exit(0)


@pytest.mark.parametrize("fault", ["dies", "stops"])
def test_a_lost_rank_ends_the_others_with_an_error_in_time(fault, tmp_path):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = mp.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        processes = [
            context.Process(
                target=exchange_with_a_fault,
                args=(rank, 3, str(tmp_path / "store"), fault, results),
            )
            for rank in range(3)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(180)
        assert [process.exitcode for process in processes] == [0, 9, 0]
        assert sorted(results.keys()) == [0, 2]
        for message, seconds in results.values():
            assert message != "no error"
            # gloo says whom it lost, or that it waited long enough.
            assert any(part in message for part in ("Connection", "Timed out", "closed")), message
            assert seconds < 18
