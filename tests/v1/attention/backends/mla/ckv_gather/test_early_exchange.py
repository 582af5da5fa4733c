# SPDX-License-Identifier: Apache-2.0
"""A context that travels from the beginning of a layer on, and what every rank writes itself."""

import os
import random
from contextlib import contextmanager
from types import SimpleNamespace

import ckv_fuzz
import pytest
import torch
from ckv_ranks import EARLY, Sizes, Step, run_step, simulated_ranks

from vllm.models.glm5next.b12x import mla
from vllm.v1.attention.backends.mla import b12x_mla_sparse as backend
from vllm.v1.attention.backends.mla.ckv_gather import debug, exchange, rehearsal, startup
from vllm.v1.attention.backends.mla.ckv_gather import plan as plan_module
from vllm.v1.attention.backends.mla.ckv_gather.layout import plan_layout, plan_own_rows
from vllm.v1.attention.backends.mla.ckv_gather.workspace import (
    KEPT_KEYS,
    KEPT_PAGES,
    KEPT_RECORDS,
)
from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import (
    TorchReferenceKernels,
    index_planes,
)

WORLD = 3
RECORDS = ["fp8_ds_mla", "nvfp4_ds_mla"]

pytestmark = pytest.mark.usefixtures("gather_on")


class Selecting(TorchReferenceKernels):
    """Says when pools are selected."""

    def __init__(self, happened):
        super().__init__()
        self.happened = happened

    def select_pools(self, *args):
        self.happened.append("selection")
        return super().select_pools(*args)


class Late:
    """Delivers only what is waited for; until then the buffers hold NaN."""

    buffers = {"index_keys": (KEPT_KEYS, KEPT_PAGES), "records": (KEPT_RECORDS,)}  # noqa: RUF012

    def __init__(self, rank, happened):
        self.rank, self.happened, self.arrived = rank, happened, {}

    @contextmanager
    def run(self, name):
        self.happened.append(f"start {name}")
        buffers = [kept(self.rank, key) for key in self.buffers[name]]
        debug.poison(buffers)
        yield
        self.arrived[name] = [buffer.clone() for buffer in buffers]
        debug.poison(buffers)

    def wait(self, name):
        self.happened.append(f"wait {name}")
        for key, arrived in zip(self.buffers[name], self.arrived[name], strict=True):
            # What was written meanwhile lies elsewhere, where nothing has arrived.
            buffer = kept(self.rank, key)
            buffer.copy_(torch.where(arrived == debug.POISON, buffer, arrived))


class Careless(Late):
    """Does not wait for one of the two."""

    forgotten = ""

    def wait(self, name):
        if name != self.forgotten:
            super().wait(name)


class CarelessOfKeys(Careless):
    forgotten = "index_keys"


class CarelessOfRecords(Careless):
    forgotten = "records"


def play(
    cached,
    rows,
    record="fp8_ds_mla",
    side=None,
    inspect=lambda ranks: None,
    *,
    poisoned=False,
    decodes=0,
    **flags,
):
    """One step of prompts of ``rows`` tokens behind ``cached`` ones; the first ``decodes`` decode.

    Returns the results of both layers, rank after rank, and what happened on them in this order.
    """
    bank, happened = ckv_fuzz.bank(record), []
    flags = {"early_exchange": True} | flags
    sizes = Sizes(WORLD, heads=2, capacity=1500, record=record, layers=2, **flags)
    with simulated_ranks(sizes, Selecting(happened)) as (lockstep, ranks):
        for rank in ranks:
            rank.tables.pages = [
                [20 * rank.rank + 3 * r, 20 * rank.rank + 3 * r + 1] for r in range(len(rows))
            ]
            rank.gather.debug = poisoned
            if side is not None:
                rank.gather._side = side(rank, happened)

        def inputs(begins, ends, heads):
            places = [
                300 * r + torch.arange(b, e)
                for r, (b, e) in enumerate(zip(begins, ends, strict=True))
            ]
            return [bank.inputs(torch.cat(places) % bank.size, i, 0, heads) for i in range(2)]

        requests, none = list(range(len(rows))), [0] * len(rows)
        ends = [n + q for n, q in zip(cached, rows, strict=True)]
        prefilling = [True] * len(rows)
        written = Step(requests, list(cached), list(cached), prefilling)
        run_step(lockstep, ranks, written, inputs(none, cached, 1), write_only=True)
        prefilling = [r >= decodes for r in requests]
        step = Step(requests, list(rows), ends, prefilling, sum(rows[:decodes]))
        results = run_step(lockstep, ranks, step, inputs(cached, ends, WORLD * 2))
        inspect(ranks)
        return [result for layers in results for result in layers], happened


def kept(rank, key):
    return rank.manager.get_persistent(key, rank.gather.workspace.kept[key], torch.uint8)


def equal(results, others):
    return all(
        torch.equal(mine.out, other.out) and torch.equal(mine.lse, other.lse)
        for mine, other in zip(results, others, strict=True)
    )


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize(("cached", "rows"), [([89], [37]), ([0, 0], [61, 20])])
def test_own_rows_are_the_records_of_their_owners(record, cached, rows):
    """Byte for byte, of the last layer; every rank writes what another one has in its cache."""

    def inspect(ranks):
        layout = plan_layout(torch.tensor(cached), dcp_world_size=WORLD, interleave=4)
        row = WORLD * layout.padded
        buffers = [kept(rank, KEPT_RECORDS) for rank in ranks]
        for request, (begin, count) in enumerate(zip(cached, rows, strict=True)):
            for token in range(begin, begin + count):
                owner = ranks[token // 4 % WORLD]
                local = token // (4 * WORLD) * 4 + token % 4
                record_of_owner = owner.caches[1][owner.tables.pages[request][0], local]
                for buffer in buffers:
                    assert torch.equal(buffer[row], record_of_owner)
                row += 1

    results, _ = play(cached, rows, record, inspect=inspect)
    assert {result.own_rows for result in results} == {sum(rows)}


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("shard_selection", [False, True])
def test_nothing_is_read_before_it_has_arrived(record, shard_selection):
    flags = {"record": record, "shard_selection": shard_selection}
    plain, happened = play([530], [37], early_exchange=False, **flags)
    assert set(happened) == {"selection"}
    # Also what no exchange fills and no row writes is NaN.
    late, happened = play([530], [37], side=Late, poisoned=True, **flags)
    assert [result.own_rows for result in late] == [37] * 2 * WORLD
    assert equal(late, plain)
    # On every rank and in both layers exchanges begin first, and are awaited where they are read
    # and before the communicator is used again.
    order = ("start index_keys", "start records", "wait index_keys", "selection", "wait records")
    counts = [happened.count(what) for what in order]
    assert counts == [2 * WORLD] * 4 + [(4 if shard_selection else 2) * WORLD]
    firsts = [happened.index(what) for what in order]
    assert firsts == sorted(firsts)
    for careless in (CarelessOfKeys, CarelessOfRecords):
        wrong, _ = play([530], [37], side=careless, **flags)
        assert not equal(wrong, plain)


def test_only_the_context_is_sent():
    def bytes_sent(ranks):
        sent.append(ranks[0].gather.counters.ckv_bytes)

    sent = []
    for early_exchange in (False, True):
        play([530], [37], inspect=bytes_sent, early_exchange=early_exchange)
    padded = [
        plan_layout(torch.tensor([n]), dcp_world_size=WORLD, interleave=4).padded
        for n in (530 + 37, 530)
    ]
    pools = [
        plan_layout(torch.tensor([n // 4]), dcp_world_size=WORLD, interleave=1).padded
        for n in (530 + 37, 530)
    ]
    fewer = 528 * (padded[0] - padded[1]) + 132 * (pools[0] - pools[1])
    assert sent[0] - sent[1] == 2 * (WORLD - 1) * fewer > 0


@pytest.mark.parametrize("rows", [[61], [61, 20], [3]])
def test_what_a_first_chunk_sees_is_not_sent(monkeypatch, rows):
    """No collective at all, and the results of a plain exchange."""
    none = [0] * len(rows)
    plain, _ = play(none, rows, early_exchange=False)
    calls, gather = [], exchange._all_gather
    monkeypatch.setattr(exchange, "_all_gather", lambda *a: calls.append(a) or gather(*a))
    received = []
    results, happened = play(
        none, rows, side=Late, inspect=lambda ranks: received.append(ranks[0].gather.counters)
    )
    assert equal(results, plain)
    assert not calls and received[0].ckv_bytes == 0 and received[0].gathered_batches == 1
    assert happened.count("start records") == 2 * WORLD
    # Nothing was exchanged, so nothing is timed.
    for durations in received[0].exchange_seconds.values():
        assert sum(durations.counts) == 0


def test_pools_across_the_boundary_are_completed_from_the_tail():
    """Chunks cut anywhere: the pool that the context began is among the batch's own."""
    for cached in range(88, 92):
        plain, _ = play([cached], [37], early_exchange=False)
        late, _ = play([cached], [37], side=Late, poisoned=True)
        assert equal(late, plain)


@pytest.mark.parametrize("decodes", [1, 2])
def test_pools_of_prompts_behind_decodes(decodes):
    """Requests in front have no place in the gathered pages, though pools end in them."""
    cached, rows = [*[87, 130][:decodes], 0, 0], [*[1] * decodes, 61, 20]
    plain, _ = play(cached, rows, early_exchange=False, mixed=True, decodes=decodes)
    late, _ = play(cached, rows, side=Late, poisoned=True, mixed=True, decodes=decodes)
    assert {(r.first_row, r.own_rows) for r in late} == {(decodes, 81)}
    for mine, other in zip(late, plain, strict=True):
        assert torch.equal(mine.token_ids, other.token_ids) and torch.equal(mine.out, other.out)


@pytest.mark.parametrize("name", ["write_pools", "unpack_pools"])
def test_pools_that_nobody_writes_are_no_numbers_with_debug(monkeypatch, name):
    """Not those of another batch, which would look right."""

    def pages(ranks):
        kept_pages.append([index_planes(kept(rank, KEPT_PAGES))[0][:3] for rank in ranks])

    kept_pages = []
    play([530], [37], poisoned=True, inspect=pages)
    write = TorchReferenceKernels.write_pools
    without = {
        "write_pools": lambda self, *args: write(self, *args[:9]),
        "unpack_pools": lambda self, *args: None,
    }
    monkeypatch.setattr(Selecting, name, without[name])
    play([530], [37], poisoned=True, inspect=pages)
    for have, lost in zip(*kept_pages, strict=True):
        context, own = slice(0, 530 // 4), slice(530 // 4, 567 // 4)
        gone, there = (own, context) if name == "write_pools" else (context, own)
        have, lost = have.flatten(0, 1), lost.flatten(0, 1)
        assert bool((lost[gone] == debug.POISON).all()) and torch.equal(lost[there], have[there])


def test_records_that_nobody_sends_are_no_numbers_with_debug(monkeypatch):
    def context(ranks):
        padded = plan_layout(torch.tensor([530]), dcp_world_size=WORLD, interleave=4).padded
        for rank in ranks:
            assert bool((kept(rank, KEPT_RECORDS)[: WORLD * padded] == debug.POISON).all())

    monkeypatch.setattr(Selecting, "pack_records", lambda self, *args: None)
    play([530], [37], poisoned=True, inspect=context)


def test_own_pools_are_those_of_their_owners():
    """Byte for byte, of the last layer, in the planar pages of every rank."""

    def inspect(ranks):
        for pool in range(89 // 4, (89 + 37) // 4):
            owner = ranks[pool % WORLD]
            # A latent page of 256 tokens has one index page.
            page, place = owner.tables.index([0], 1, 0)[0, 0], pool // WORLD
            of_owner = index_planes(owner.index_caches[1])
            for rank in ranks:
                pages = index_planes(kept(rank, KEPT_PAGES))
                for mine, theirs in zip(pages, of_owner, strict=True):
                    assert torch.equal(mine[pool // 64, pool % 64], theirs[page, place])

    play([89], [37], inspect=inspect)


@pytest.mark.parametrize("first", [0, 1])
def test_a_layer_that_did_not_begin_is_an_error(monkeypatch, first):
    """Also behind one that did."""
    begun, begin_layer = [], mla.begin_layer

    def begin(layer):
        begun.append(layer.impl)
        if begun.count(layer.impl) <= first:
            begin_layer(layer)

    monkeypatch.setattr(mla, "begin_layer", begin)
    with pytest.raises(AssertionError, match="exchange was not begun"):
        play([530], [37], side=Late)


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "own"),
    [
        ([700], [40], [40]),
        ([40], [40], [40]),
        ([40, 7], [40, 7], [40, 7]),
        # The second may begin with blocks that the first one is about to write.
        ([300, 290], [300, 34], []),
        ([300, 40], [1, 40], []),
        # Several windows: of two requests, and of one.
        ([600, 600], [600, 600], []),
        ([1400], [40], []),
    ],
)
def test_which_batches_leave_their_own_records_out(
    make_gather, make_common, monkeypatch, seq_lens, query_lens, own
):
    monkeypatch.setenv(EARLY, "1")
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS", "1000")
    gather = make_gather(max_model_len=2000)
    plan = gather.plan_batch(
        make_common(query_lens, seq_lens), num_decode_tokens=0, capturing=False
    )
    early = None if plan is None else plan.early
    assert (0 if early is None else early.layout.own_rows) == sum(own)
    if early is not None:
        context = [n - q for n, q in zip(seq_lens, query_lens, strict=True)]
        assert early.layout.tokens.seq_lens.tolist() == context
        assert early.layout.pools.seq_lens.tolist() == [n // 4 for n in context]
        assert early.layout.num_index_pages == sum(-(-(n // 4) // 64) for n in seq_lens)
        own_starts = plan_own_rows(early.layout.tokens, torch.tensor(own))
        assert early.layout.own_starts.tolist() == own_starts.tolist()


@pytest.mark.parametrize("value", ["0", "1"])
def test_ranks_have_to_agree_on_the_switch(make_gather, monkeypatch, value):
    monkeypatch.setenv(EARLY, value)
    assert make_gather().facts[EARLY] == int(value)


def test_latents_are_handed_over_outside_of_piecewise_graphs(monkeypatch):
    """vLLM's own custom ops under its capture: a replay updates caches without the implementation.

    What CUDA would capture is a stand-in; what is inside a graph and what is not is vLLM's.
    """
    import vllm.forward_context as forward_context
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.utils import torch_utils

    graph = SimpleNamespace(
        capture_begin=lambda **k: None, capture_end=lambda: None, replay=lambda: None
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.ops._C, "weak_ref_tensor", lambda t: t, raising=False)
    assert torch_utils.weak_ref_tensor(torch.ones(1)) == 1
    called, latents = [], torch.ones(3, 512)
    impl = SimpleNamespace(latents=None)
    layer = SimpleNamespace(
        kv_cache=None,
        hisparse_cache=None,
        prepare_kv_cache_update=lambda metadata: None,
        update_kv_cache=lambda *a: called.append("cache"),
        forward_impl=lambda *a, **k: called.append(impl.latents),
    )
    backend.hand_latents_over(layer, impl)
    once = layer.forward_impl
    backend.hand_latents_over(layer, impl)
    assert layer.forward_impl is once
    context = forward_context.ForwardContext(
        no_compile_layers={"layer": layer},
        attn_metadata={"layer": None},
        slot_mapping={"layer": torch.zeros(3)},
    )
    with forward_context.override_forward_context(context):
        with BreakableCUDAGraphCapture() as capture:
            mla_attention.unified_mla_kv_cache_update(latents, None, "layer", "", None)
            mla_attention.unified_mla_attention_with_output(latents, latents, None, None, "layer")
        assert called[0] == "cache" and called[1] is latents and impl.latents is None
        called.clear()
        capture.replay()
    assert len(called) == 1 and called[0] is latents and impl.latents is None


def test_the_first_run_takes_the_early_path(make_gather, monkeypatch):
    monkeypatch.setenv(EARLY, "1")
    seen = []
    monkeypatch.setattr(
        rehearsal.Layer, "gathered", lambda self, batch, lengths, **options: lambda: seen.append(
            (lengths, options.get("early", False))
        ),
    )  # fmt: skip
    gather = make_gather(max_model_len=4096)
    shapes = rehearsal.LayerShapes(8, 1, 515, 128, 32, 4, 1.0)
    layer = rehearsal.Layer(gather, TorchReferenceKernels(), torch.device("cpu"), None, None)
    startup._all_gathered_once(layer, rehearsal.EmptyBatch(shapes, 8, layer.device))
    assert [lengths for lengths, early in seen if early] == [[8], [4096]]


RUNS = int(os.environ.get("CKV_EARLY_RUNS", "1000"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_thousand_late_exchanges_equal_the_plain_one(make_gather, monkeypatch):
    """The other rank is a copy of this one, which sends late, by another time in every run."""
    from vllm.v1.worker import workspace

    from vllm.v1.attention.backends.mla.sparse_mla_kernels.triton import TritonKernels

    monkeypatch.setenv(EARLY, "1")
    device, page, rows, context = torch.device("cuda"), 256, 512, 8192
    monkeypatch.setattr(workspace, "_manager", workspace.WorkspaceManager(device))
    group = SimpleNamespace(rank_in_group=0, cpu_group=None)
    for module in (plan_module, startup):
        monkeypatch.setattr(module, "get_dcp_group", lambda: group)
    monkeypatch.setattr(exchange, "all_gather_facts", lambda facts, group: [facts])
    monkeypatch.setattr(exchange, "communicator_of", lambda group: None)
    monkeypatch.setattr(exchange, "_place", lambda group: (2, 0))
    cycles = [0]

    def all_gather(received, own, group):
        # Alike on both ranks: lengths are a multiple of two interleaves, and the pages the same.
        if cycles[0]:
            torch.cuda._sleep(cycles[0])
        received[own.shape[0] :].copy_(own)

    monkeypatch.setattr(exchange, "_all_gather", all_gather)
    kernels, outcome = TritonKernels(), []
    gather = make_gather(max_model_len=context + rows, max_num_batched_tokens=rows)
    shapes = rehearsal.LayerShapes(rows, 8, 4 * 32 + 3, 32, 32, 4, 512**-0.5)
    startup.warm_up(gather, kernels, shapes, device)
    gather.reserve(kernels, shapes)
    for name in ("select_pools", "attend"):
        call = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *a, call=call: outcome.append(call(*a)) or outcome[-1]
        )
    torch.manual_seed(0)
    records = torch.randn(page, 512, device=device).bfloat16()
    query = torch.randn(rows, 8, 512, device=device).bfloat16()
    tokens = torch.arange(context, context + rows, device=device)

    class Batch(rehearsal.SeeingBatch):
        def query(self):
            return query

        def latents(self):
            # As the only page of the caches has them, where the plain exchange finds them.
            return records[(tokens // 8 * 4 + tokens % 4) % page]

        def pool_counts(self):
            # Of the context: the batch's own are not those of the index cache.
            return torch.full((rows,), context // 4, dtype=torch.int32, device=device)

    batch = Batch.of(shapes, device, [context + rows], [rows], 4)
    layer = rehearsal.Layer(gather, kernels, device, None, None)
    kernels.write_records(records, layer.cache, torch.arange(page, device=device))

    def run(early):
        outcome.clear()
        layer.gathered(batch, [context + rows], [rows], early=early)()
        (pool_ids, scores), (out, lse) = outcome
        return pool_ids.clone(), scores.clone(), out.clone(), lse.clone()

    want = run(early=False)
    assert all(bool(tensor.any()) for tensor in want)
    chance = random.Random(0)

    def differing(run_number):
        # What an earlier run left would be right.
        debug.poison(gather.workspace._keep(key) for key in gather.workspace.kept)
        cycles[0] = chance.randrange(1_000_000)
        have = run(early=True)
        return torch.stack([(a != b).any() for a, b in zip(have, want, strict=True)]).any()

    assert not bool(torch.stack([differing(number) for number in range(RUNS)]).any())
    # The same without waiting, to see that waiting is what made them equal.
    chance, wait = SimpleNamespace(randrange=lambda most: 100_000_000), gather._side.wait
    for forgotten in ("index_keys", "records"):
        monkeypatch.setattr(
            gather._side, "wait", lambda name, f=forgotten: None if name == f else wait(name)
        )
        assert bool(differing(0))
        torch.cuda.synchronize()
