# SPDX-License-Identifier: Apache-2.0
"""A worker extension: the real engine on the b12x provider, every launch of b12x written down.

Runs inside the workers of ``test_b12x_engine.py``. The provider, its plans and the package's
scratch layouts and checks are the real ones; torch stands in for the kernels (``b12x_emulation``).
Each rank writes one JSON object a line to a file of its own: plans, preparations, launches with the
addresses of their tensors, what is held for good, how far results are from the torch reference's,
and what a few calls that must fail said.

From the end of the start on, planning or preparing raises, in the provider and in the package.
"""

import json
import os
import weakref
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
import torch
from b12x._lib.runtime_control import kernel_resolution_frozen, kernel_resolution_guard
from b12x.attention import dsa_indexer, sparse_mla
from b12x_emulation import Emulation
from vllm.v1.worker.workspace import current_workspace_manager

from vllm.models.glm5next.b12x import sparse_indexer
from vllm.platforms.ckv_reference.worker import CkvReferenceWorker
from vllm.v1.attention.backends.mla import b12x_mla_sparse
from vllm.v1.attention.backends.mla.sparse_mla_kernels import b12x as provider
from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import TorchReferenceKernels


def place(tensor: torch.Tensor) -> list[int]:
    """[first byte, number of bytes to the last one]."""
    if not tensor.numel():
        return [tensor.data_ptr(), 0]
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return [tensor.data_ptr(), (last + 1) * tensor.element_size()]


def storage(tensor: torch.Tensor) -> list[int]:
    """The same of the memory that ``tensor`` is a view of."""
    memory = tensor.untyped_storage()
    return [memory.data_ptr(), memory.nbytes()]


def attend_columns_read(q, records, row_ids, counts, scale, scratch=None):
    """The reference's attention. Columns that no row reads, most of them here, only cost time."""
    columns = max(1, int(counts.max()))
    return TorchReferenceKernels(torch.float64).attend(
        q, records, row_ids[:, :columns], counts, scale
    )


class Launches(list):
    """Stands for the emulation's log: writes launches down and keeps them only while preparing."""

    def __init__(self, recorder: "Recorder") -> None:
        self.recorder = recorder

    def append(self, launch) -> None:
        recorder = self.recorder
        if recorder.phase == "prepare":
            super().append(launch)
            return
        query = launch.plan.query if hasattr(launch.plan, "query") else None
        recorder.write(
            "launch",
            kind=launch.kind,
            rows=launch.rows,
            heads=0 if query is None else query.num_q_heads,
            limit=0 if query is None else query.max_q_rows,
            width=0 if query is None or launch.kind == "select" else query.max_width,
            places={name: place(tensor) for name, tensor in launch.tensors.items()},
        )


class Recorder:
    """Puts the provider into this worker's backend and writes down what it does."""

    def __init__(self) -> None:
        self.phase = "start"
        self.file = None
        self.patches = pytest.MonkeyPatch()
        self.emulation = emulation = Emulation()
        emulation.log = Launches(self)
        self.kernels = provider.B12xKernels(TorchReferenceKernels())
        emulation.attach(self.kernels, self.patches)
        self.kernels.warm_up = self.with_more_heads(self.kernels.warm_up)
        self.compare("attend", attend_columns_read)
        self.compare("select_pools", TorchReferenceKernels().select_pools)
        for module in (b12x_mla_sparse, sparse_indexer):
            self.patches.setattr(module, "get_kernels", lambda: self.kernels)
        for module in (sparse_mla, dsa_indexer):
            self.patches.setattr(module, "plan", self.planning(module.plan))
        emulation.mla.plan_cache_writer = self.planning(emulation.mla.plan_cache_writer)
        self.prepare, emulation._prepare = emulation._prepare, self.preparing
        self.patches.setattr(CkvReferenceWorker, "initialize_from_config", self.caches())
        self.patches.setattr(CkvReferenceWorker, "compile_or_warm_up_model", self.last_of_start())

    def with_more_heads(self, warm_up):
        """Plans for heads of more ranks than there are here."""
        more = int(os.environ["CKV_TEST_MORE_HEADS"])

        def wrapped(device, *, head_counts, **sizes):
            warm_up(device, head_counts=[*head_counts, more], **sizes)

        return wrapped

    def compare(self, name: str, expected: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        """Compute every call of serving once more, and write down how far the results are apart."""
        operation = getattr(self.kernels, name)

        def compared(*args):
            results = operation(*args)
            if self.phase == "serve":
                for number, (got, want) in enumerate(zip(results, expected(*args), strict=True)):
                    # Equal infinities are no distance apart; a NaN is as far as can be.
                    apart = torch.where(got == want, 0.0, (got.double() - want).abs())
                    largest = float(apart.nan_to_num(float("inf")).max())
                    self.write("compared", what=f"{name} {number}", apart=largest)
            return results

        setattr(self.kernels, name, compared)

    def write(self, event: str, **values) -> None:
        if self.file is None:
            rank = torch.distributed.get_rank()
            path = Path(os.environ["CKV_TEST_RECORD"]) / f"rank{rank}.jsonl"
            self.file = path.open("w", buffering=1)
        print(json.dumps({"event": event, "phase": self.phase} | values), file=self.file)

    def planning(self, plan):
        def wrapped(*args, **kwargs):
            if self.phase == "serve":
                raise RuntimeError("planned in serving")
            made = plan(*args, **kwargs)
            query = getattr(made, "query", None)
            what = str(made.slot_dtype) if query is None else str(query)
            self.write("plan", what=what)
            return made

        return wrapped

    def preparing(self, requests) -> None:
        if self.phase == "serve":
            raise RuntimeError("prepared in serving")
        before, self.phase = self.phase, "prepare"
        self.prepare(requests)
        for request in requests:
            self.write("prepare", name=request.name)
        self.phase = before

    def caches(self):
        stock = CkvReferenceWorker.initialize_from_config

        def initialize_from_config(worker, *args):
            self.write("caches")
            return stock(worker, *args)

        return initialize_from_config

    def last_of_start(self):
        stock = CkvReferenceWorker.compile_or_warm_up_model

        def compile_or_warm_up_model(worker):
            times = stock(worker)
            self.phase = "probe"
            with torch.inference_mode():
                self.probe(worker.vllm_config.scheduler_config.max_num_batched_tokens)
            self.write("held", places=self.held(worker))
            session = [name for name, *_ in self.emulation.session.method_calls]
            self.write("session", calls=session, frozen=kernel_resolution_frozen())
            self.phase = "serve"
            # Never left: the package refuses to compile from here on.
            self.guard = kernel_resolution_guard("serving")
            self.guard.__enter__()
            return times

        return compile_or_warm_up_model

    def held(self, worker) -> dict[str, list[int]]:
        """Memory that has to stay where it is while the engine serves."""
        kernels = self.kernels
        tensors = {
            "capacity": kernels._capacity,
            "workspace": current_workspace_manager()._current_workspaces[0],
        }
        for name, layer in worker.vllm_config.compilation_config.static_forward_context.items():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.numel():
                tensors[f"cache of {name}"] = cache
        for name, tensor in tensors.items():
            # At exit everything goes; before, nothing may.
            weakref.finalize(tensor, self.write, "freed", name=name).atexit = False
        return {name: storage(tensor) for name, tensor in tensors.items()}

    def probe(self, most: int) -> None:
        """Look for a plan for every number of rows; make calls that would compile."""
        kernels, plans = self.kernels, self.kernels.plans
        for heads in plans.extend:
            chosen = [plans.attention(rows, heads) for rows in range(1, most + 1)]
            self.write(
                "plans",
                heads=heads,
                unprepared=sum(plan.plan.prepared is None for plan in chosen),
                runs=[
                    [mode, limit, len(list(group))]
                    for (mode, limit), group in groupby(
                        (plan.plan.query.mode, plan.rows) for plan in chosen
                    )
                ],
            )
        for rows in (3, 257):
            self.attend(max(plans.extend), rows)
        self.refused("heads that were not declared", lambda: self.attend(24))
        prepared = kernels.plans
        kernels.plans = provider.declare(kernels.sizes, torch.device("cpu"))
        self.refused("an attention plan", lambda: self.attend(min(prepared.extend)))
        self.refused("a selection plan", self.select)
        kernels.plans = prepared
        slots = torch.zeros(1, dtype=torch.int64)
        cache = torch.zeros(1, kernels.sizes.page_size, kernels.sizes.record_bytes).byte()
        latents = torch.zeros(1, 512, dtype=torch.bfloat16)
        writers = kernels._writers
        kernels._writers = {
            slots.dtype: self.emulation.mla.plan_cache_writer(latents, cache, slots)
        }
        self.refused("a writer", lambda: kernels.write_records(latents, cache, slots))
        kernels._writers = writers

    def refused(self, what: str, call) -> None:
        try:
            call()
        except RuntimeError as error:
            self.write("refused", what=what, words=str(error))

    def attend(self, heads: int, rows: int = 3):
        sizes = self.kernels.sizes
        ids = torch.zeros(rows, self.kernels._width, dtype=torch.int32)
        return self.kernels.attend(
            torch.zeros(rows, heads, 512, dtype=torch.bfloat16),
            torch.zeros(64, sizes.record_bytes, dtype=torch.uint8),
            ids,
            torch.ones(rows, dtype=torch.int32),
            sizes.scale,
        )

    def select(self):
        sizes, row = self.kernels.sizes, torch.zeros(1, dtype=torch.int32)
        return self.kernels.select_pools(
            torch.zeros(1, sizes.index_heads, 128, dtype=torch.uint8).view(torch.float8_e4m3fn),
            torch.zeros(1, sizes.index_heads),
            torch.zeros(1, 64, 132, dtype=torch.uint8),
            row.view(1, 1),
            row,
            row,
            sizes.topk,
        )


class Extension:
    """What vLLM mixes into its worker; importing this module did the work."""


RECORDER = Recorder()
