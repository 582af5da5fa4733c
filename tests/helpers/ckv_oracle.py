# SPDX-License-Identifier: Apache-2.0
"""Random model inputs, and what one rank without context parallelism computes of them in float64.

Dense torch and no cache: every row attends to a mask over its whole sequence. Nothing here reads a
page, a slot, a rank or a record; only the bytes of an index pool come from the provider's formula,
over pools that no chunk cut has touched, because a selection has to be equal and not just close.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ckv_ranks import INDEX_HEADS, POOL, SCALE, Inputs

from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import compress_pools

LAYER_SHIFT = 512
MAX_HEADS = 8


def e4m3_values() -> torch.Tensor:
    """All non-negative finite e4m3 numbers, ascending, float64."""
    subnormal = [m * 2.0**-9 for m in range(8)]
    normal = [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)]
    return torch.tensor(subnormal + normal[:-1], dtype=torch.float64)


E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
"""All non-negative e2m1 numbers, ascending."""


def rounded(magnitude: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The value of ``table`` nearest to each ``magnitude`` >= 0, float64; ties to the even code."""
    middle = (table[1:] + table[:-1]) / 2
    code = torch.bucketize(magnitude, middle)
    tie = magnitude == middle[code.clamp(max=middle.numel() - 1)]
    return table[code + (tie & (code % 2 == 1)).long()]


def stored_latents(latents: torch.Tensor, record: str = "fp8_ds_mla") -> torch.Tensor:
    """[T, 512] bf16 -> float64 as a record of the format ``record`` holds them.

    What comes before a rounding is float32, as the formats say; bf16 latents make many ties.
    """
    if record == "nvfp4_ds_mla":
        groups = latents.float().view(-1, 32, 16)
        largest = groups.abs().amax(2, keepdim=True)
        # An e2m1 code times an e4m3 scale reaches 6 * 448.
        token = largest.amax(1, keepdim=True) / 2688
        scale = rounded((largest / token / 6).double(), e4m3_values()).float() * token
        size = rounded((groups / scale).abs().double(), E2M1_VALUES)
    else:
        groups = latents.float().view(-1, 4, 128)
        scale = groups.abs().amax(2, keepdim=True) / 448
        scale = torch.where(scale > 0, scale, 1.0)
        size = rounded((groups / scale).abs().double(), e4m3_values())
    return (size * groups.double().sign() * scale.double()).flatten(1)


@dataclass
class Expected:
    """What a chunk's rows select and compute.

    token_ids: one list of ascending positions per row. out: (rows, heads, 512). lse: (rows, heads).
    """

    token_ids: list[list[int]]
    out: torch.Tensor
    lse: torch.Tensor


class Bank:
    """A long random text. A request is a list of its places, so requests can share a prefix.

    size: places, a multiple of 4; the pools of a request start at multiples of 4 too.
    queries: different queries; place p uses query ``5 * p % queries``.
    record: the format of latent records.
    """

    def __init__(
        self, seed: int = 0, size: int = 2048, queries: int = 128, record: str = "fp8_ds_mla"
    ) -> None:
        make = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=make)

        self.size, self.queries = size, queries
        self.latents = normal(size, 512).bfloat16()
        self.k = normal(size, 128).bfloat16()
        self.gate = normal(size, 128).bfloat16()
        self.ape = normal(POOL, 128)
        self.q = (2 * normal(queries, MAX_HEADS, 512)).bfloat16()
        self.index_q = (8 * normal(queries, INDEX_HEADS, 128)).to(torch.float8_e4m3fn)
        self.weights = normal(queries, INDEX_HEADS)
        self.stored = stored_latents(self.latents, record)
        self.logits = torch.einsum("qhd,td->qht", self.q.double(), self.stored) * SCALE
        records = compress_pools(
            self.k.view(-1, POOL, 128), self.gate.view(-1, POOL, 128), self.ape
        )
        keys = records[:, :128].view(torch.float8_e4m3fn).double()
        key_scale = records[:, 128:].contiguous().view(torch.float32).double()
        dots = torch.einsum("qhd,pd->qhp", self.index_q.double(), keys).clamp(min=0)
        weighted = (dots * self.weights.double()[:, :, None]).sum(1)
        self.scores = (weighted * key_scale.T).float()

    def inputs(self, places: torch.Tensor, layer: int, pad: int, world_heads: int) -> Inputs:
        """The inputs of rows at ``places``; rows of padding are NaN."""
        places = (places + layer * LAYER_SHIFT) % self.size
        query = places * 5 % self.queries

        def padded(values: torch.Tensor) -> torch.Tensor:
            filler = torch.full((pad, *values.shape[1:]), float("nan")).to(values.dtype)
            return torch.cat([values, filler]) if pad else values

        return Inputs(
            latents=padded(self.latents[places]),
            k=padded(self.k[places]),
            gate=padded(self.gate[places]),
            q=padded(self.q[query, :world_heads]),
            index_q=padded(self.index_q.view(torch.uint8)[query]).view(torch.float8_e4m3fn),
            weights=padded(self.weights[query]),
            ape=self.ape,
        )

    def expected(
        self, places: torch.Tensor, first: int, layer: int, pool_topk: int, heads: int
    ) -> Expected:
        """Rows ``first`` to the end of the request at ``places``."""
        places = (places + layer * LAYER_SHIFT) % self.size
        length = places.numel()
        query = places[first:] * 5 % self.queries
        seen = torch.arange(first, length) + 1
        complete = seen // POOL
        scores = self.scores[query][:, places[: length // POOL * POOL : POOL] // POOL]
        selected, lists = torch.zeros(length - first, length, dtype=torch.bool), []
        for row in range(length - first):
            pools = list(range(int(complete[row])))
            if len(pools) > pool_topk:
                value = scores[row].tolist()
                best = sorted(pools, key=lambda p, value=value: (-value[p], p))
                pools = sorted(best[:pool_topk])
            tokens = [p * POOL + i for p in pools for i in range(POOL)]
            tokens += range(int(complete[row]) * POOL, int(seen[row]))
            lists.append(tokens)
            selected[row, tokens] = True
        logits = self.logits[query[:, None, None], torch.arange(heads)[:, None], places]
        logits = logits.masked_fill(~selected[:, None], float("-inf"))
        return Expected(lists, logits.softmax(-1) @ self.stored[places], logits.logsumexp(-1))
