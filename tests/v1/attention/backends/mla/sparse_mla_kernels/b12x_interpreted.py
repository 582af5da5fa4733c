# SPDX-License-Identifier: Apache-2.0
"""The b12x provider's own kernels, and the package's expansion, under Triton's interpreter.

``test_b12x.py`` runs this file in a process that was started with ``TRITON_INTERPRET=1``.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from vllm.v1.attention.backends.mla.sparse_mla_kernels import b12x as provider
from vllm.v1.attention.backends.mla.sparse_mla_kernels import torch_reference as ref

_SPEC = importlib.util.spec_from_file_location(
    "b12x_emulation", Path(__file__).with_name("b12x_emulation.py")
)
emulation = sys.modules.setdefault(_SPEC.name, importlib.util.module_from_spec(_SPEC))
_SPEC.loader.exec_module(emulation)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def test_lengths():
    ids = torch.randint(-1, 9, (40, 2051), dtype=torch.int32)
    ids[torch.rand(40, 2051) < 0.9] = -1
    ids[5], ids[6, 1:], ids[7, :2050] = -1, -1, -1
    counts = torch.randint(0, 2100, (40,), dtype=torch.int32)
    counts[:8] = int32([0, 1, 2051, 5000, 1024, 2051, 2051, 2051])
    got, want = torch.full((2, 40), 77, dtype=torch.int32)
    provider._launch_lengths(ids, counts, got)
    emulation._launch_lengths(ids, counts, want)
    assert torch.equal(got, want)
    copy, copied = torch.full((2, 40, 2048), 77, dtype=torch.int32)
    provider._launch_lengths(ids, counts, got, copy)
    emulation._launch_lengths(ids, counts, want, copied)
    assert torch.equal(got, want) and torch.equal(copy, copied)


@pytest.mark.parametrize("columns", [3, 1025])
def test_row_tables(columns):
    table = torch.randint(0, 1000, (4, columns + 2), dtype=torch.int32)[:, :columns]
    req = torch.randint(-1, 4, (30,), dtype=torch.int32)
    counts = torch.randint(-3, columns * 64 + 90, (30,), dtype=torch.int32)
    got, want = torch.full((2, 20, columns), 77, dtype=torch.int32)
    lengths, want_lengths = torch.full((2, 20), 77, dtype=torch.int32)
    provider._launch_row_tables(table, req, counts, got, lengths, 80_784, 8)
    emulation._launch_row_tables(table, req, counts, want, want_lengths, 80_784, 8)
    assert torch.equal(lengths, want_lengths) and torch.equal(got, want)


def test_order():
    scores = torch.randn(6, 512).round(decimals=1)
    scores[0, :9] = -0.0
    ids = torch.stack([torch.randperm(100_000)[:512].int() for _ in range(6)])
    lengths = int32([600, 100_000, 512, 3, 0, 513])
    pairs = [(ids.clone(), scores.clone()) for _ in range(2)]
    provider._launch_order(*pairs[0], lengths)
    emulation._launch_order(*pairs[1], lengths)
    assert torch.equal(pairs[0][0], pairs[1][0]) and torch.equal(pairs[0][1], pairs[1][1])


def test_expansion_is_the_packages():
    """b12x goes from pools to cache rows in one step; the providers take two. Same rows.

    Not used in serving: it looks up the request of padding rows, which is -1 here, and it keeps
    columns of pools that are not complete.
    """
    from b12x.attention.sparse_mla import expand_pooled_topk_to_physical_slots

    page_size, stride, rows = 64, 80, 5
    positions = torch.tensor([2, 3, 500, 2046, 9000])
    req = int32([0, 1, 1, 0, 1])
    block_table = torch.randperm(400)[:300].int().view(2, 150)
    pools = torch.full((rows, 512), -1, dtype=torch.int32)
    for row, position in enumerate(positions.tolist()):
        seen = (position + 1) // 4
        chosen = torch.randperm(seen)[:512].int()
        pools[row, : chosen.numel()] = chosen
    out = torch.zeros(rows, 2051, dtype=torch.int32)
    active = torch.zeros(rows, dtype=torch.int32)
    expand_pooled_topk_to_physical_slots(
        pools, positions, req, block_table, out, active,
        pool_size=4, block_size=page_size, block_stride_rows=stride, num_cache_blocks=400,
    )  # fmt: skip
    kernels = ref.TorchReferenceKernels()
    tokens = kernels.expand_pools(pools, positions, 4, 2051)
    want, counts = kernels.filter_local(tokens, req, block_table, stride, page_size, 0, 1, 4)
    assert torch.equal(active, counts) and torch.equal(out, want)
