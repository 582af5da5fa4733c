# SPDX-License-Identifier: Apache-2.0
"""b12x 1.5.1 on a CPU: its own plans, scratch layouts and checks, with torch in place of kernels.

What b12x leaves undefined comes out as NaN, its results lie in the caller's scratch, a split plan
serves the rows it was first run with, selections come in a random order, and every launch is
recorded. So a provider that relies on more than the package promises fails here.
"""

import importlib
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import create_autospec

import torch

from vllm.v1.attention.backends.mla.sparse_mla_kernels import b12x as provider
from vllm.v1.attention.backends.mla.sparse_mla_kernels import torch_reference as ref

MULTIPROCESSORS = 188
CPU = torch.device("cpu")


@dataclass
class Launch:
    """One launch: what ran, with what plan, and the tensors it was given."""

    kind: str
    rows: int
    plan: object
    tensors: dict = field(repr=False)


class _Attention:
    """The state of an attention plan, prepared or not."""

    def __init__(self, plan, log):
        device = SimpleNamespace(identity=SimpleNamespace(sm_count=MULTIPROCESSORS))
        real = plan._materialize(None, device)
        self.plan, self.log = plan, log
        self.caps, self.layout = real.caps, real.layout
        self.primed_rows = 0

    def bind_for_preparation(self, **tensors):
        return self.layout.bind(**tensors)

    def run(self, binding, *, kv_cache):
        caps, q = self.caps, binding.q
        rows, heads = q.shape[:2]
        if caps.mode == "decode":
            self.primed_rows = self.primed_rows or rows
            assert rows <= self.primed_rows, "the first run fixed a lower row limit"
        else:
            assert heads % 8 == 0 and caps.max_width in provider.EXTEND_TOPK
        ids, lengths = binding.selected_indices, binding.nsa_cache_seqlens_int32
        scratch = binding.scratch
        self.log.append(
            Launch(
                caps.mode,
                rows,
                self.plan,
                {
                    "q": q,
                    "kv_cache": kv_cache,
                    "ids": ids,
                    "lengths": lengths,
                    "scratch": scratch.shared_scratch,
                },
            )
        )
        records = kv_cache.flatten(0, 1)
        # Columns that no row reads only cost time.
        ids = ids[:, : int(lengths.max())]
        out, lse = ref.TorchReferenceKernels(torch.float64).attend(
            q, records, ids, lengths, caps.softmax_scale
        )
        column = torch.arange(ids.shape[1])
        read = (column < lengths.unsqueeze(1)) & (ids >= 0)
        undefined = (lengths > 0) & ~read.any(1)
        out[undefined], lse[undefined] = math.nan, math.nan
        if not (caps.mode == "decode" and caps.lse_scale == "natural"):
            lse = lse / math.log(2)
        scratch.output_buffer[:rows].copy_(out)
        scratch.final_lse[:rows, :heads].copy_(lse)
        return scratch.output_buffer[:rows], scratch.final_lse[:rows, :heads]


class _Selection:
    def __init__(self, plan, log):
        preparation = importlib.import_module("b12x.attention.dsa_indexer._preparation")
        scratch = importlib.import_module("b12x.attention.dsa_indexer.scratch")
        self.plan, self.log, self.query = plan, log, plan.query
        caps = preparation._scratch_caps(plan.query, device=CPU, config=None)
        self.layout = scratch.plan_indexer_scratch(caps)

    def bind(self, **tensors):
        self.scratch = tensors["scratch"]
        return self.layout.bind(**tensors)

    def run(
        self, runtime, *, q_fp8, query_weights, index_k_cache, output_indices, output_scores=None
    ):
        query = self.query
        planned = query.operands["index_k_cache"]["strides"]
        assert tuple(index_k_cache.stride()) == planned, "the page stride is compiled in"
        assert query_weights.dtype == torch.float32 and query_weights.is_contiguous()
        assert not query.shared_page_table
        rows = q_fp8.shape[0]
        table, lengths = runtime.real_page_table, runtime.cache_seqlens_int32
        assert table.shape[0] == rows <= query.max_q_rows
        assert output_indices.shape == (rows, query.top_k) and output_indices.is_contiguous()
        self.log.append(
            Launch(
                "select",
                rows,
                self.plan,
                {
                    "q": q_fp8,
                    "cache": index_k_cache,
                    "table": table,
                    "lengths": lengths,
                    "capacity": runtime.active_width,
                    "ids": output_indices,
                    "scores": output_scores,
                    "scratch": self.scratch,
                },
            )
        )
        lengths = torch.minimum(lengths, runtime.active_width)
        generator = torch.Generator().manual_seed(rows)
        output_indices.fill_(0x7FFFFFFF)
        output_scores.fill_(math.nan)
        for row in range(rows):
            seen = int(lengths[row])
            output_indices[row] = -1
            if not seen:
                continue
            pages = table[row, : -(-seen // 64)].long()
            assert int(pages.min()) >= 0
            # Only what is addressed may be read: the view overlaps itself.
            ids, scores = ref.TorchReferenceKernels().select_pools(
                q_fp8[row : row + 1],
                query_weights[row : row + 1],
                torch.stack([index_k_cache[page] for page in pages]),
                torch.arange(pages.numel(), dtype=torch.int32).unsqueeze(0),
                torch.zeros(1, dtype=torch.int32),
                torch.tensor([seen], dtype=torch.int32),
                query.top_k,
            )
            count = min(seen, query.top_k)
            order = torch.arange(count)
            if seen > query.top_k:
                order = torch.randperm(count, generator=generator)
            output_indices[row, :count] = ids[0, order]
            output_scores[row, :count] = scores[0, order]


class _WriterPlan:
    """A record writer's plan; the real one needs a CUDA device to be declared."""

    def __init__(self, cache, slots):
        self.page_size, self.record_bytes = cache.shape[1:]
        self.slot_dtype = slots.dtype
        self.prepared = None

    def request(self, *, name, prepare_call):
        return SimpleNamespace(name=name, plan=self, prepare_call=prepare_call)


class _Writer:
    def __init__(self, plan, log):
        self.plan, self.log = plan, log

    def run(self, latents, cache, slots):
        check_writer(latents, cache, slots)
        assert cache.shape[1] == self.plan.page_size
        assert slots.dtype == self.plan.slot_dtype
        self.log.append(
            Launch(
                "write",
                slots.shape[0],
                self.plan,
                {"latents": latents, "cache": cache, "slots": slots},
            )
        )
        capacity = cache.shape[0] * cache.shape[1]
        keep = (slots >= 0) & (slots < capacity)
        inside = torch.where(keep, slots, -1)
        ref.TorchReferenceKernels().write_records(latents[: slots.shape[0]], cache, inside)


def check_writer(latents, cache, slots):
    """The package's own checks, all but the last, which wants CUDA tensors."""
    module = importlib.import_module("b12x.attention._shared.mla.kv_cache")
    try:
        module._validate_glm_next_mla_cache_writer_args(latents, cache, slots)
    except ValueError as error:
        if "on CUDA" not in str(error):
            raise


class Emulation:
    """Stands in for the modules that a provider calls.

    log: launches of serving. prepared: names of the prepared requests, in order. session: stands
    for the package's session, takes the calls that it takes, and keeps a list of them.
    """

    def __init__(self):
        self.log = []
        self.prepared = []
        self.session = None
        self.mla = SimpleNamespace(
            bind=self._bind_attention,
            run=self._run_attention,
            plan_cache_writer=lambda latents, cache, slots: _WriterPlan(cache, slots),
            concat_and_cache_glm_next_mla=self._write,
        )
        self.dsa = SimpleNamespace(bind=self._bind_selection, run=self._run_selection)

    def attach(self, kernels, monkeypatch):
        """Make ``kernels`` launch here."""
        kernels._mla, kernels._dsa = self.mla, self.dsa
        preparation = importlib.import_module("b12x.preparation")
        monkeypatch.setattr(preparation, "PreparationSession", self._session)
        for name in ("_launch_lengths", "_launch_row_tables", "_launch_order"):
            monkeypatch.setattr(provider, name, globals()[name])
        return kernels

    def _session(self, *, device, autotune, compile_workers):
        # Anything else would need a benchmark, or child processes.
        assert (autotune, compile_workers) == (False, 0)
        preparation = importlib.import_module("b12x.preparation.session")
        self.session = create_autospec(preparation.PreparationSession, instance=True)
        self.session.prepare.side_effect = lambda requests: self._prepare(requests)
        return self.session

    def _prepare(self, requests):
        for request in requests:
            plan, serving = request.plan, len(self.log)
            if isinstance(plan, _WriterPlan):
                state = _Writer(plan, self.log)
            elif plan.component_id == "attention.dsa_indexer":
                state = _Selection(plan, self.log)
            else:
                state = _Attention(plan, self.log)
            request.prepare_call(state).run()
            specs = () if isinstance(plan, _WriterPlan) else plan.scratch_specs()
            payload = SimpleNamespace(state=state, closed=False, scratch=specs)
            if isinstance(plan, _WriterPlan):
                plan.prepared = payload
            else:
                object.__setattr__(plan, "_prepared", payload)
            self.prepared.append(request.name)
            del self.log[serving:]

    @staticmethod
    def _state(plan):
        assert plan.prepared is not None, "b12x would compile here"
        return plan.prepared.state

    def _bind_attention(
        self, plan, *, scratch, q, kv_cache, selected_indices, cache_lengths, selected_lengths
    ):
        binding = self._state(plan).layout.bind(
            scratch=scratch,
            q=q,
            selected_indices=selected_indices,
            cache_seqlens_int32=cache_lengths,
            nsa_cache_seqlens_int32=selected_lengths,
            kv_cache=kv_cache,
        )
        return SimpleNamespace(plan=plan, runtime=binding, kv_cache=kv_cache)

    def _run_attention(self, binding):
        return self._state(binding.plan).run(binding.runtime, kv_cache=binding.kv_cache)

    def _bind_selection(
        self,
        plan,
        *,
        scratch,
        q_fp8,
        query_weights,
        index_k_cache,
        page_table,
        cache_lengths,
        active_width,
        output_indices,
        output_scores,
    ):
        state = self._state(plan)
        runtime = state.bind(
            scratch=scratch,
            real_page_table=page_table,
            cache_seqlens_int32=cache_lengths,
            active_width=active_width,
            expected_num_q_heads=plan.query.num_q_heads,
        )
        return SimpleNamespace(
            plan=plan,
            runtime=runtime,
            tensors={
                "q_fp8": q_fp8,
                "query_weights": query_weights,
                "index_k_cache": index_k_cache,
                "output_indices": output_indices,
                "output_scores": output_scores,
            },
        )

    def _run_selection(self, binding):
        self._state(binding.plan).run(binding.runtime, **binding.tensors)

    def _write(self, latents, cache, slots, *, plan):
        self._state(plan).run(latents, cache, slots)


# The provider's own kernels in torch; test_b12x.py compares both under Triton's interpreter.


def _launch_lengths(row_ids, counts, lengths, out=None):
    width = (row_ids if out is None else out).shape[1]
    column = torch.arange(width)
    read = column < counts.unsqueeze(1)
    lengths.copy_(torch.where(read & (row_ids[:, :width] >= 0), column + 1, 0).amax(1))
    if out is not None:
        out[read] = row_ids[:, :width][read]


def _launch_row_tables(page_table, req_id, pool_counts, table, lengths, units, row0):
    rows, columns = table.shape
    request, count = req_id[row0 : row0 + rows], pool_counts[row0 : row0 + rows]
    seen = torch.where(request >= 0, count.clamp(0, columns * 64), 0)
    live = torch.arange(columns) < (-(-seen // 64)).unsqueeze(1)
    table[live] = (page_table[request.clamp(min=0).long()] * units).int()[live]
    lengths.copy_(seen)


def _launch_order(ids, scores, lengths):
    topk = ids.shape[1]
    for row in range(ids.shape[0]):
        seen = int(lengths[row])
        if seen <= topk:
            ids[row, seen:], scores[row, seen:] = -1, -math.inf
            continue
        order = ids[row].argsort()
        ids[row], scores[row] = ids[row, order], scores[row, order]
