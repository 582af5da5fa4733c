# SPDX-License-Identifier: Apache-2.0
"""Rates are measured on a simulated machine, and predict what it takes for other batches."""

import gc
import weakref
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from vllm.v1.attention.backends.mla.ckv_gather import exchange, measuring
from vllm.v1.attention.backends.mla.ckv_gather import plan as plan_module
from vllm.v1.attention.backends.mla.ckv_gather.measuring import Clock, line, measure_rates
from vllm.v1.attention.backends.mla.ckv_gather.rehearsal import (
    EmptyBatch,
    KeptBatch,
    Layer,
    LayerShapes,
    SeeingBatch,
)
from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import TorchReferenceKernels

WORLD, HEADS, POOL, TOPK = 2, 4, 4, 8
CPU = torch.device("cpu")
SHAPES = LayerShapes(
    num_tokens=256, local_heads=HEADS, width=36, pool_topk=TOPK, index_heads=32, ring=4, scale=0.1
)

COLLECTIVE, BYTE = 40e-6, 4e-12
LAUNCH, HOST = 5e-6, 30e-6
PAIR, SELECT_ROW = 1e-9, 10e-9
OWN_HEAD, PAGED_HEAD, HEAD_ROW = 0.3e-9, 0.9e-9, 2e-9
RECORD, POOL_RECORD, CONVERT = 0.4e-9, 0.1e-9, 0.2e-9
MERGE, COPY = 30e-9, 5e-9


class Machine(TorchReferenceKernels):
    """Kernels that compute nothing and take the time that their sizes say; ``now`` in seconds.

    launched: seconds that the host has taken. host: that it takes for each.
    """

    def __init__(self):
        self.now = self.launched = 0.0
        self.host = HOST

    def take(self, seconds, launch=LAUNCH):
        self.now += launch + seconds
        self.launched += self.host

    def durations(self, call):
        """Of the device and of the host."""
        began = self.now, self.launched
        call()
        return self.now - began[0], self.launched - began[1]

    @property
    def clock(self):
        return Clock(lambda call: self.durations(call)[0], lambda call: self.durations(call)[1])

    def all_gather(self, received, own, group):
        self.take(received.nbytes // WORLD * (WORLD - 1) * BYTE, COLLECTIVE)

    def pack_records(self, cache, table, lengths, starts, out):
        self.take(int(lengths.sum()) * RECORD)

    def pack_pools(self, cache, table, lengths, starts, out):
        self.take(int(lengths.sum()) * POOL_RECORD)

    def unpack_pools(self, gathered, starts, lengths, interleave, out, page_starts):
        self.take(int(lengths.sum()) * POOL_RECORD)

    def scratch_shapes(self, *, max_records, **sizes):
        return [] if max_records is None else [((max_records,), torch.uint8)]

    def select_pools(self, q_fp8, weights, pages, table, req_id, counts, topk, scratch=()):
        rows = q_fp8.shape[0]
        self.take(rows * SELECT_ROW + int(counts.sum()) * PAIR)
        return torch.full((rows, topk), -1, dtype=torch.int32), torch.zeros(rows, topk)

    def merge_pool_candidates(self, scores, ids, topk):
        self.take(scores.shape[0] * MERGE)
        return ids[:, :topk], scores[:, :topk]

    def expand_pools(self, ids, positions, pool_size, width):
        self.take(ids.shape[0] * COPY)

    def filter_local(self, ids, req_id, table, *, rank, dcp_world_size, interleave, **pages):
        self.take(ids.shape[0] * COPY)
        own = (ids >= 0) & (ids // interleave % dcp_world_size == rank)
        return ids, own.sum(1).int()

    def remap(self, ids, *args, counts, window=None, **own):
        self.take(ids.shape[0] * COPY)
        first, last = window or (0, 10**9)
        counts.copy_(((ids >= first) & (ids < last)).sum(1))
        return ids

    def attend(self, query, records, ids, counts, scale, scratch=()):
        rows, heads = query.shape[:2]
        each = OWN_HEAD if scratch else PAGED_HEAD
        converted = records.shape[0] * CONVERT if scratch else 0
        self.take(heads * (rows * HEAD_ROW + int(counts.sum()) * each) + converted)
        return query, torch.zeros(rows, heads)

    def query_gather(self, query):
        self.take(query.nbytes * (WORLD - 1) * BYTE, COLLECTIVE)
        return query.repeat(1, WORLD, 1)

    def combine(self, out, lse, **lengths):
        """With log-sum-exps beside the outputs: ``a2a``."""
        received = (out.nbytes + lse.nbytes) // WORLD * (WORLD - 1)
        self.take(received * BYTE + out.shape[0] * COPY, COLLECTIVE)


@pytest.fixture
def machine(make_gather, monkeypatch):
    """A machine, and a layer on it that has gone through its start."""
    from vllm.distributed import parallel_state
    from vllm.v1.worker import workspace as stock

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", "auto")
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_SHARD_SELECTION", "1")
    group = SimpleNamespace(rank_in_group=0, cpu_group=None, device_group="dcp")
    for module in (plan_module, measuring, parallel_state):
        monkeypatch.setattr(module, "get_dcp_group", lambda: group)
    monkeypatch.setattr(exchange, "all_gather_facts", lambda facts, group: [facts])
    monkeypatch.setattr(exchange, "_place", lambda group: (WORLD, 0))
    made = Machine()
    monkeypatch.setattr(exchange, "_all_gather", made.all_gather)
    merge = plan_module.merge_attention

    def merge_attention(parts):
        parts = list(parts)
        made.now += sum(out.shape[0] for _, out, _ in parts[1:]) * COPY
        return merge(parts)

    monkeypatch.setattr(plan_module, "merge_attention", merge_attention)
    stock.reset_workspace_manager()
    stock.init_workspace_manager(CPU)
    gather = make_gather(
        WORLD, freeze=False, index_topk=TOPK * POOL, max_model_len=8192, num_attention_heads=8
    )
    gather.freeze(made)
    gather.reserve(made, SHAPES)
    stock.lock_workspace()
    yield made, Layer(gather, made, CPU, made.query_gather, made.combine)
    stock.reset_workspace_manager()


def measured(machine):
    made, layer = machine
    return measure_rates(layer, SHAPES, SHAPES.num_tokens, made.clock)


def test_rates_are_the_machines(machine):
    rates = measured(machine)
    about = lambda value: pytest.approx(value, rel=0.01)  # noqa: E731
    assert (rates.collective, rates.byte) == (about(COLLECTIVE), about(BYTE))
    assert rates.pair == about(PAIR)
    width = SHAPES.width
    for curve, most, token in (
        (rates.own_heads, width, HEADS * OWN_HEAD),
        (rates.all_heads, width // WORLD, WORLD * HEADS * PAGED_HEAD),
    ):
        assert [tokens for tokens, _ in curve] == [0, -(-most // 4), most]
        assert [s for _, s in curve] == [about(tokens * token) for tokens, _ in curve]
    all_heads_row = SELECT_ROW + MERGE + 3 * COPY + WORLD * HEADS * HEAD_ROW
    own_heads_row = SELECT_ROW + COPY + HEADS * HEAD_ROW
    assert [rows for rows, _ in rates.ordinary] == [16, 64, SHAPES.num_tokens]
    for curve, launches, row in (
        (rates.ordinary, 5, all_heads_row), (rates.gathered, 6, own_heads_row)
    ):  # fmt: skip
        assert [s for _, s in curve] == [about(launches * LAUNCH + n * row) for n, _ in curve]
    assert rates.token == about(RECORD / WORLD + POOL_RECORD / POOL * (1 + 1 / WORLD) + CONVERT)
    assert (rates.merged, rates.merged_row) == (about(LAUNCH), about(MERGE + COPY))
    assert rates.ordinary_host == about((5 + 3) * HOST)
    assert rates.gathered_host == about((6 + 2) * HOST)


def test_nothing_is_kept_or_counted(machine):
    from vllm.v1.worker.workspace import current_workspace_manager

    _, layer = machine
    before = current_workspace_manager()._current_workspaces[0]
    first, again = measured(machine), measured(machine)
    for name, value in asdict(first).items():
        for one, other in zip(
            torch.tensor(value).flatten(), torch.tensor(getattr(again, name)).flatten(), strict=True
        ):
            assert one == pytest.approx(other)
    # The lock proves that no more was taken than is reserved.
    assert current_workspace_manager()._current_workspaces[0] is before
    counters = layer.gather.counters
    assert counters.ckv_bytes == counters.dcp_bytes == 0


def test_inputs_go_with_their_batch(machine, monkeypatch):
    """Not when Python looks for cycles: the profiler would count those of every size together."""
    made, layer = machine
    zeros, alive, most = EmptyBatch.zeros, [], [0]

    def tracked(batch, *shape, **kwargs):
        tensor = zeros(batch, *shape, **kwargs)
        alive.append((weakref.ref(tensor), tensor.nbytes))
        most[0] = max(most[0], held())
        return tensor

    def held():
        return sum(size for tensor, size in alive if tensor() is not None)

    monkeypatch.setattr(EmptyBatch, "zeros", tracked)
    sizes = SimpleNamespace(**vars(SHAPES) | {"num_tokens": 8192})
    gc.collect()
    gc.disable()
    try:
        largest = KeptBatch(sizes, 8192, CPU)
        for make in (layer.ordinary, lambda batch: layer.gathered(batch, [POOL])):
            make(largest)()
        alone = most[0]
        del largest
        assert held() == 0 < alone
        most[0] = 0
        measure_rates(layer, sizes, 8192, made.clock)
        assert held() == 0
        # Smaller batches are measured before it, and go before it comes.
        assert most[0] <= alone
    finally:
        gc.enable()


# Lengths and query tokens of each request, and the tokens of a window if there are several.
CHUNKS = [((tokens,), (rows,), None) for rows in (64, 256) for tokens in (256, 1000, 3000, 8000)]
SUFFIXES = [((tokens,), (rows,), None) for rows in (17, 40) for tokens in (100, 512, 2000, 8191)]
SEVERAL = [
    ((100, 200), (100, 100), None),
    ((100, 3, 7), (30, 3, 7), None),
    ((4000, 4000), (20, 20), None),
    ((1000,) * 8, (32,) * 8, None),
    ((500, 2000, 5000), (200, 20, 3), None),
    ((8,) * 8, (8,) * 8, None),
]
WINDOWS = [
    ((1024,), (200,), 512),
    ((4096,), (64,), 512),
    ((8000,), (256,), 2048),
    ((700,), (256,), 512),
    ((300, 300), (30, 60), 512),
    ((100, 3000, 400), (20, 100, 40), 1024),
    ((8000, 100), (17, 100), 4096),
    ((2047,), (255,), 1536),
]
BATCHES = CHUNKS + SUFFIXES + SEVERAL + WINDOWS


def test_there_are_thirty_batches():
    assert len(set(BATCHES)) == 30


# Rows of longer contexts together make shares uneven, which the model knows nothing of.
EVEN = [batch for batch in BATCHES if len(set(batch[0])) == 1]


@pytest.mark.parametrize(
    ("batch", "shares"), [(b, 1) for b in BATCHES] + [(b, WORLD) for b in EVEN], ids=str
)
def test_other_batches_take_what_is_predicted(machine, batch, shares):
    """Of rows that see and select; ranks do not own exactly equal parts of it: 3 %."""
    made, layer = machine
    gather = layer.gather
    lengths, queries, window = batch
    if window is not None or shares > 1:
        # The model leaves out what merging and one more exchange take the host.
        made.host = 0.0
    gather.adopt(measured(machine))
    spans = gather.plan_spans(lengths, queries, sum(queries), capacity=window)
    costs = gather.time_model.costs(lengths, queries, spans, shares=shares)
    real = SeeingBatch.of(SHAPES, CPU, lengths, queries, POOL)
    gathered = layer.gathered(real, lengths, queries, capacity=window, selection_shares=shares)
    assert costs.gathered_seconds == pytest.approx(max(made.durations(gathered)), rel=0.03)
    ordinary = layer.ordinary(real, len(lengths))
    assert costs.ordinary_seconds == pytest.approx(max(made.durations(ordinary)), rel=0.03)


def test_what_is_timed_differs_from_row_to_row(machine):
    """Equal scores take a selection longer than real ones."""
    _, layer = machine
    batch = SeeingBatch.of(SHAPES, CPU, (100,), (30,), POOL)
    queries, weights = batch.index_queries()
    assert queries.float().isfinite().all() and batch.index_queries()[0] is queries
    # All pages of pools, keys in front of their scales, and a table has all of them.
    pages = layer.index_cache.flatten(1)
    assert len(pages) == min(layer.gather.max_pages, 64) > 1
    assert set(layer.index_table(1, 100)[0].tolist()) == set(range(len(pages)))
    keys = pages[:, : 64 * 128].reshape(-1, 128)
    for values in (queries.view(torch.uint8).flatten(1), weights, keys, batch.query().flatten(1)):
        assert len({tuple(row) for row in values.tolist()}) == len(values)
    assert len({tuple(row) for row in layer.cache[0].tolist()}) == layer.cache.shape[1]


@pytest.mark.parametrize("lengths", [(100,), (5,), (3, 200)])
def test_rows_of_a_batch_see_what_serving_would_give_them(lengths):
    queries = tuple(min(3, length) for length in lengths)
    batch = SeeingBatch.of(SHAPES, CPU, lengths, queries, POOL)
    assert batch.req_id().tolist() == [r for r, n in enumerate(queries) for _ in range(n)]
    seen = [end - n + 1 + i for end, n in zip(lengths, queries, strict=True) for i in range(n)]
    assert batch.pool_counts().tolist() == [n // POOL for n in seen]
    for ids, tokens in zip(batch.token_ids().tolist(), seen, strict=True):
        count = min(tokens // POOL, TOPK) * POOL + tokens % POOL
        assert ids[count:] == [-1] * (SHAPES.width - count)
        chosen = ids[:count]
        assert len(set(chosen)) == count and max(chosen) < tokens
        assert chosen == sorted(chosen)
        if tokens % POOL:
            assert chosen[-1] == tokens - 1
    assert batch.token_ids() is batch.token_ids()


def test_a_line_is_never_negative():
    assert line(1, 3.0, 2, 5.0) == (1.0, 2.0)
    assert line(1, 5.0, 2, 3.0) == (5.0, 0.0)
    assert line(10, 1.0, 20, 4.0) == (0.0, pytest.approx(0.3))
    assert line(6, 1.0, 6, 2.0) == (1.0, 0.0)
