# SPDX-License-Identifier: Apache-2.0
"""The providers the suite runs on, all called with CPU tensors.

Triton chooses between its interpreter and a GPU when it is first imported, so a process has one of
the two: the interpreter if it was started with ``TRITON_INTERPRET=1``, else a GPU if there is one.
``test_triton.py`` starts the suite once more with the interpreter.
"""

import importlib
import os
from dataclasses import fields, is_dataclass

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PACKAGE = "vllm.v1.attention.backends.mla.sparse_mla_kernels"


def names():
    if INTERPRETED:
        return ["interpreter"]
    return ["reference", "gpu", "gpu_scratch"] if torch.cuda.is_available() else ["reference"]


def make(name):
    if name == "reference":
        return importlib.import_module(f"{PACKAGE}.torch_reference").TorchReferenceKernels()
    if name == "interpreter":
        from vllm.platforms.ckv_reference import interpreter

        interpreter.install()
    kernels = importlib.import_module(f"{PACKAGE}.triton").TritonKernels()
    if name == "interpreter":
        return kernels
    return OnDevice(kernels, "cuda", scratch=name == "gpu_scratch")


def pick(everywhere, interpreter):
    """Parameters of a test; fewer or smaller ones where every program is interpreted."""
    return interpreter if INTERPRETED else everywhere


class OnDevice:
    """A provider called with CPU tensors: whole storages travel, so views keep their layout."""

    def __init__(self, kernels, device, scratch):
        self.kernels = kernels
        self.device = device
        self.scratch = scratch

    def __getattr__(self, method):
        function = getattr(self.kernels, method)
        if method in ("scratch_shapes", "warm_up"):
            return function

        def call(*given, **kwargs):
            storages = {}

            def moved(value):
                if is_dataclass(value):
                    return type(value)(*(moved(getattr(value, f.name)) for f in fields(value)))
                if not isinstance(value, torch.Tensor):
                    return value
                storage = value.untyped_storage()
                key = storage.data_ptr()
                if key not in storages:
                    raw = torch.empty(0, dtype=torch.uint8).set_(storage)
                    storages[key] = raw, raw.to(self.device)
                target = torch.empty(0, dtype=value.dtype, device=self.device)
                return target.set_(
                    storages[key][1].untyped_storage(),
                    value.storage_offset(),
                    value.shape,
                    value.stride(),
                )

            args = [moved(a) for a in given]
            kwargs = {k: moved(v) for k, v in kwargs.items()}
            if method == "attend" and self.scratch:
                kwargs["scratch"] = poisoned_scratch(self.kernels, *args[:3])
            result = function(*args, **kwargs)
            for raw, copy in storages.values():
                raw.copy_(copy)
            if method == "remap" and len(given) > 6:
                return given[6]  # the caller's ``out``, which holds the result now
            if isinstance(result, tuple):
                return tuple(r.cpu() for r in result)
            return result.cpu() if isinstance(result, torch.Tensor) else result

        return call


def poisoned_scratch(kernels, q, records, row_ids):
    """Scratch of a process whose batches may be a little larger than this one."""
    shapes = kernels.scratch_shapes(
        max_records=records.shape[0] + 3,
        max_tokens=q.shape[0] + 5,
        num_heads=q.shape[1],
        width=row_ids.shape[1],
    )
    return [
        torch.full(
            shape,
            float("nan") if dtype.is_floating_point else 0x7FFFFFF0,
            dtype=dtype,
            device=q.device,
        )
        for shape, dtype in shapes
    ]
