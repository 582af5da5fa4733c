# SPDX-License-Identifier: Apache-2.0
"""Pools and token lists against stock vLLM's Triton kernels, run by Triton's interpreter.

Runs in a child process, since the interpreter is chosen by an environment variable when Triton is
first imported.
"""

import os
import subprocess
import sys

import pytest

CHILD = r"""
import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import bfloat16, float8_e4m3fn, float32

# Triton 3.8's interpreter truncates when it narrows floats; hardware rounds to nearest even.
NARROW = {"fp8e4nv": (float8_e4m3fn, torch.uint8), "bf16": (bfloat16, torch.int16)}
stock_convert = interpreter._convert_float

def convert(value, source, target, rounding):
    if source.name != "fp32" or target.name not in NARROW:
        return stock_convert(value, source, target, rounding)
    bits = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.int32).copy())
    dtype, carrier = NARROW[target.name]
    narrow = bits.view(float32).to(dtype).view(carrier).numpy()
    return narrow.view(np.uint8 if carrier is torch.uint8 else np.uint16).reshape(value.shape)

interpreter._convert_float = convert

# Stock's kernel file alone, with stand-ins for its imports: its package needs a platform.
for name, members in {
    "vllm.triton_utils": {"tl": tl, "triton": triton},
    "vllm.utils.deep_gemm": {"mqa_logits_use_mx_scales": lambda: False},
    "vllm.v1.attention.ops.common": {"pack_ue8m0_x4": None},
}.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)
path = Path(importlib.util.find_spec("vllm").origin).parent
path = path / "models/glm5next/nvidia/ops/kpool_compress.py"
spec = importlib.util.spec_from_file_location("stock_kpool", path)
stock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stock)
from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import (
    TorchReferenceKernels, compress_pools)

torch.manual_seed(0)
pools = 70
k, gate = torch.randn(pools * 4, 128).bfloat16(), (2 * torch.randn(pools * 4, 128)).bfloat16()
k[40:48] = 0
ape = torch.randn(4, 128)
theirs = torch.zeros(3, 64, 132, dtype=torch.uint8)
ours = torch.zeros_like(theirs)
slots = torch.randperm(3 * 64)[:pools]
stock.kpool_compress_and_write_cache(
    theirs, k.view(-1, 4, 128), gate.view(-1, 4, 128), ape, slots, 4)
per_token = torch.full((pools, 4), -1)
per_token[:, 3] = slots
kernels = TorchReferenceKernels()
token = torch.arange(pools * 4)
no_tail = torch.full_like(token, -1)
starts = torch.tensor([0, pools * 4], dtype=torch.int32)
kernels.write_pools(k, gate, ape, ours, per_token.flatten(), None, no_tail, token, starts)
assert int((theirs != 0).sum()) > pools * 100
flat = (ours.flatten(1).int() - theirs.flatten(1).int())[:, : 64 * 128]
# exp of another library may flip the last rounding of a key: one e4m3 step, seldom; scales never.
assert torch.equal(ours.flatten(1)[:, 64 * 128 :], theirs.flatten(1)[:, 64 * 128 :])
print("differing key bytes", int((flat != 0).sum()), "largest", int(flat.abs().max()))
assert int(flat.abs().max()) <= 1 and int((flat != 0).sum()) <= pools * 128 // 1000

ids = torch.full((5, 8), -1, dtype=torch.int32)
ids[0], ids[1, :3] = torch.randperm(20)[:8], torch.tensor([2, 0, 1])
ids[3, :1], ids[4] = 0, torch.randperm(25)[:8]
lengths = torch.tensor([83, 12, 2, 5, 100], dtype=torch.int32)
expected = stock.expand_pools_and_append_tail(ids, lengths, 4)
mine = kernels.expand_pools(ids, lengths.long() - 1, 4, 35)
for a, b in zip(expected.tolist(), mine.tolist()):
    assert [t for t in a if t >= 0] == [t for t in b if t >= 0]
print("agreed")
"""


def test_pools_and_token_lists_agree_with_stock():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0 and "agreed" in child.stdout, child.stdout + child.stderr[-4000:]
