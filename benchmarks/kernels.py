# SPDX-License-Identifier: Apache-2.0
"""Device operations against their floor and against a peer, on one GPU.

    python benchmarks/kernels.py [--csv benchmarks/results/kernels_h200.csv] [--only NAME]

Floor: the larger of bytes (every input read once, every output written once) over the copy
bandwidth and operations over the matrix rate, both measured on an H200: 4.26 TB/s, 790 TFLOP/s in
bf16. Time: a CUDA graph of flushes of the L2 cache, each followed by the call, minus a graph of the
flushes alone; median of the replays. So the host takes no part, and inputs come from memory.

Peers run in the same process on the same inputs: FlashMLA's sparse prefill with the same number of
heads on latents that are in bf16 already, DeepGEMM's logits with vLLM's top-k on keys that are
contiguous already, a copy of the same bytes.
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Callable

import torch

from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import quantize_records
from vllm.v1.attention.backends.mla.sparse_mla_kernels.triton import TritonKernels

COPY_BYTES_PER_US = 4.26e6
OPERATIONS_PER_US = 790e6
TOKENS, CONTEXT, TOPK, WIDTH, POOL = 4096, 32_768, 512, 2051, 4
RECORD, INDEX, PLACES, PAGE_BYTES = 528, 132, 64, 8448
DEVICE = torch.device("cuda")

Call = Callable[[], object]


class Timer:
    """Median time of one call in microseconds, by the difference of two graphs."""

    def __init__(self, calls: int = 5, samples: int = 9) -> None:
        self.calls, self.samples = calls, samples
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        self.empty = self._replays(self._graph(lambda: None))

    def _graph(self, call: Call) -> torch.cuda.CUDAGraph:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.calls):
                self.flush.zero_()
                call()
        return graph

    def _replays(self, graph: torch.cuda.CUDAGraph) -> float:
        graph.replay()
        times = []
        for _ in range(self.samples):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / self.calls)
        return statistics.median(times)

    def __call__(self, call: Call) -> float:
        return self._replays(self._graph(call)) - self.empty


def int32(*shape: int, high: int = 1) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.int32, device=DEVICE)


def sorted_choice(rows: int, of: int, count: int) -> torch.Tensor:
    """[rows, count] distinct numbers below ``of``."""
    scores = torch.rand(rows, of, device=DEVICE)
    return scores.topk(count, dim=1).indices.int()


def flashmla_ids(ids: torch.Tensor) -> torch.Tensor:
    """[rows, 2176]: row ids with -1 behind them, up to a multiple of 128 columns."""
    padded = torch.full((ids.shape[0], 2176), -1, dtype=torch.int32, device=DEVICE)
    padded[:, : ids.shape[1]] = ids
    return padded


class Cases:
    """Yields (kernel, shape, floor in us, call, peer name, peer call)."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.kernels = TritonKernels()

    def floor(self, num_bytes: float, operations: float = 0.0) -> float:
        return max(num_bytes / COPY_BYTES_PER_US, operations / OPERATIONS_PER_US)

    def attend(self):
        records = quantize_records(torch.randn(CONTEXT, 512, device=DEVICE))
        ids = torch.cat([sorted_choice(512, CONTEXT, WIDTH) for _ in range(TOKENS // 512)])
        counts = torch.full((TOKENS,), WIDTH, dtype=torch.int32, device=DEVICE)
        bf16 = torch.empty(CONTEXT, 1, 512, dtype=torch.bfloat16, device=DEVICE).normal_()
        padded = flashmla_ids(ids)[:, None]
        for heads in (16, 32, 64, 128):
            q = torch.randn(TOKENS, heads, 512, device=DEVICE).bfloat16()
            out = torch.empty_like(q)
            scratch = [
                torch.empty(shape, dtype=dtype, device=DEVICE)
                for shape, dtype in self.kernels.scratch_shapes(
                    max_records=CONTEXT, max_tokens=TOKENS, num_heads=heads, width=WIDTH
                )
            ]
            num_bytes = 2 * q.numel() * 2 + ids.numel() * 4 + records.numel()
            floor = self.floor(num_bytes, 4.0 * TOKENS * WIDTH * heads * 512)
            peer = None
            if scratch:
                from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

                def peer(q=q, out=out):
                    flash_mla_sparse_fwd(q, bf16, padded, 0.04, topk_length=counts, out=out)

            shape = f"T={TOKENS} H={heads} records={CONTEXT} W={WIDTH}"
            for name, given in (("attend", scratch), ("attend without scratch", None)):
                if name == "attend" and not scratch:
                    continue
                yield (
                    name,
                    shape,
                    floor,
                    lambda q=q, given=given: self.kernels.attend(
                        q, records, ids, counts, 0.04, scratch=given
                    ),
                    "FlashMLA, same heads, bf16 latents",
                    peer,
                )
        # Each query has a context of its own, as requests have: nothing is found in the L2 cache.
        count = 1 << 20
        records = quantize_records(torch.randn(CONTEXT, 512, device=DEVICE)).repeat(
            count // CONTEXT, 1
        )
        # FlashMLA's rows hold 64 dimensions with positions in bf16 behind latents and scales.
        pages = torch.zeros(count // PLACES, PLACES, 1, 656, dtype=torch.uint8, device=DEVICE)
        pages.view(count, 656)[:, :RECORD] = records
        table, lengths = int32(1, 1), int32(1)
        for rows, heads in ((1, 64), (16, 64), (128, 16), (128, 32), (128, 64)):
            q = torch.randn(rows, heads, 512, device=DEVICE).bfloat16()
            ids = int32(rows, WIDTH, high=count)
            counts = torch.full((rows,), WIDTH, dtype=torch.int32, device=DEVICE)
            num_bytes = rows * WIDTH * (RECORD + 4) + 4 * q.numel()
            yield (
                "attend, decode",
                f"T={rows} H={heads} records={count} W={WIDTH}",
                self.floor(num_bytes, 4.0 * rows * WIDTH * heads * 512),
                lambda q=q, ids=ids, counts=counts: self.kernels.attend(
                    q, records, ids, counts, 0.04
                ),
                "FlashMLA FP8 decode, 64 heads",
                self.flashmla_decode(q, pages, ids, table, lengths) if scratch else None,
            )

    @staticmethod
    def flashmla_decode(q, pages, ids, table, lengths) -> Call:
        """As stock vLLM calls it: all rows as one request, queries and ids padded beforehand."""
        from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

        rows, heads = q.shape[:2]
        wide = torch.zeros(1, rows, 64, 576, dtype=q.dtype, device=DEVICE)
        wide[0, :, :heads, :512] = q
        padded = flashmla_ids(ids)[None]
        metadata, _ = get_mla_metadata()
        return lambda: flash_mla_with_kvcache(
            q=wide,
            k_cache=pages,
            block_table=table,
            head_dim_v=512,
            cache_seqlens=lengths,
            tile_scheduler_metadata=metadata,
            is_fp8_kvcache=True,
            indices=padded,
            softmax_scale=0.04,
        )

    def records(self):
        page = 2304
        for tokens, requests in ((512, 4), (32_768, 8), (131_072, 32)):
            pages = -(-tokens // requests // page)
            cache = torch.randint(
                0, 256, (pages * requests, page + 64, RECORD), dtype=torch.uint8, device=DEVICE
            )[:, :page]
            table = torch.randperm(pages * requests, device=DEVICE).int().view(requests, pages)
            lens = torch.full((requests,), tokens // requests, dtype=torch.int32, device=DEVICE)
            starts = (lens.cumsum(0) - lens).int()
            out = torch.empty(tokens, RECORD, dtype=torch.uint8, device=DEVICE)
            source = torch.empty_like(out)
            yield (
                "pack_records",
                f"tokens={tokens} requests={requests} page={page}",
                self.floor(2 * out.numel()),
                lambda c=cache, t=table, n=lens, s=starts, o=out: self.kernels.pack_records(
                    c, t, n, s, o
                ),
                "copy of the same bytes",
                lambda o=out, s=source: o.copy_(s),
            )
        latents = torch.randn(TOKENS, 512, device=DEVICE).bfloat16()
        cache = torch.empty(40, page, RECORD, dtype=torch.uint8, device=DEVICE)
        slots = torch.randperm(40 * page, device=DEVICE)[:TOKENS]
        yield (
            "write_records",
            f"T={TOKENS}",
            self.floor(TOKENS * (1024 + RECORD)),
            lambda: self.kernels.write_records(latents, cache, slots),
            "",
            None,
        )

    def pools(self):
        world = 2
        for pools, requests in ((128, 4), (8192, 8), (32_768, 32)):
            local = pools // world
            pages = -(-local // requests // PLACES)
            cache = torch.randint(
                0, 256, (pages * requests, PLACES, INDEX), dtype=torch.uint8, device=DEVICE
            )
            table = torch.randperm(pages * requests, device=DEVICE).int().view(requests, pages)
            lens = torch.full((requests,), local // requests, dtype=torch.int32, device=DEVICE)
            starts = (lens.cumsum(0) - lens).int()
            span = torch.empty(local, INDEX, dtype=torch.uint8, device=DEVICE)
            source = torch.empty_like(span)
            yield (
                "pack_pools",
                f"pools={local} requests={requests}",
                self.floor(2 * span.numel()),
                lambda c=cache, t=table, n=lens, s=starts, o=span: self.kernels.pack_pools(
                    c, t, n, s, o
                ),
                "copy of the same bytes",
                lambda o=span, s=source: o.copy_(s),
            )
            gathered = torch.empty(pools, INDEX, dtype=torch.uint8, device=DEVICE)
            other = torch.empty_like(gathered)
            each = -(-(pools // requests) // PLACES)
            out = torch.empty(each * requests, PAGE_BYTES, dtype=torch.uint8, device=DEVICE)
            begin = torch.arange(requests, dtype=torch.int32, device=DEVICE) * each
            both = starts.expand(world, -1).contiguous()
            yield (
                "unpack_pools",
                f"pools={pools} requests={requests} N={world}",
                self.floor(2 * gathered.numel()),
                lambda g=gathered, s=both, n=lens * 2, o=out, b=begin: self.kernels.unpack_pools(
                    g, s, n, 1, o, b
                ),
                "copy of the same bytes",
                lambda o=other, s=gathered: o.copy_(s),
            )
        k, gate = (torch.randn(TOKENS, 128, device=DEVICE).bfloat16() for _ in range(2))
        positions = torch.arange(TOKENS, device=DEVICE)
        slots = torch.where(positions % POOL == POOL - 1, positions // POOL, -1)
        cache = torch.empty(TOKENS // POOL // PLACES, PLACES, INDEX, device=DEVICE).byte()
        tail = torch.zeros(8, 2, 4, 128, dtype=torch.bfloat16, device=DEVICE)
        tail_slots = positions % 4
        bounds = torch.tensor([0, TOKENS], dtype=torch.int32, device=DEVICE)
        ape = torch.zeros(POOL, 128, device=DEVICE)
        yield (
            "write_pools",
            f"T={TOKENS}",
            self.floor(TOKENS * (512 + 33)),
            lambda: self.kernels.write_pools(
                k, gate, ape, cache, slots, tail, tail_slots, positions, bounds
            ),
            "",
            None,
        )

    def select(self):
        heads = 32
        q = torch.randn(TOKENS, heads, 128, device=DEVICE).to(torch.float8_e4m3fn)
        weights = torch.rand(TOKENS, heads, device=DEVICE)
        req = int32(TOKENS)
        for pools in (8192, 32_768):
            keys = torch.randn(pools, 128, device=DEVICE).to(torch.float8_e4m3fn)
            scales = torch.rand(pools, device=DEVICE) + 0.5
            pages = torch.empty(pools // PLACES, PAGE_BYTES, dtype=torch.uint8, device=DEVICE)
            pages[:, :8192] = keys.view(torch.uint8).view(-1, 8192)
            pages[:, 8192:] = scales.view(torch.uint8).view(-1, 256)
            table = torch.arange(pools // PLACES, dtype=torch.int32, device=DEVICE).unsqueeze(0)
            # The last chunk of a prompt that fills the context.
            counts = (
                pools - TOKENS // POOL + torch.arange(1, TOKENS + 1, device=DEVICE) // POOL
            ).int()
            peer = self.deepgemm(q, weights, keys, scales, counts, pools)
            yield (
                "select_pools",
                f"T={TOKENS} H={heads} pools={pools} topk={TOPK}",
                # e4m3 products run at twice the rate of bf16.
                self.floor(
                    pages.numel() + q.numel() + TOKENS * TOPK * 8,
                    1.0 * TOKENS * pools * heads * 128,
                ),
                lambda p=pages, t=table, c=counts: self.kernels.select_pools(
                    q, weights, p, t, req, c, TOPK
                ),
                "DeepGEMM logits + vLLM top-k",
                peer,
            )
        candidates = torch.rand(TOKENS, 2 * TOPK, device=DEVICE)
        ids = torch.stack([torch.randperm(2 * TOPK, device=DEVICE).int()] * TOKENS)
        yield (
            "merge_pool_candidates",
            f"T={TOKENS} C={2 * TOPK} topk={TOPK}",
            self.floor(TOKENS * TOPK * (16 + 4)),
            lambda: self.kernels.merge_pool_candidates(candidates, ids, TOPK),
            "",
            None,
        )

    @staticmethod
    def deepgemm(q, weights, keys, scales, counts, pools) -> Call | None:
        try:
            from vllm.utils.deep_gemm import fp8_fp4_mqa_logits

            from vllm import _custom_ops as ops
        except ImportError:
            return None
        begins = torch.zeros_like(counts)
        out = torch.empty(counts.shape[0], TOPK, dtype=torch.int32, device=DEVICE)

        def call() -> None:
            logits = fp8_fp4_mqa_logits((q, None), (keys, scales), weights, begins, counts, pools)
            ops.top_k_per_row_prefill(
                logits,
                begins,
                counts,
                out,
                logits.shape[0],
                logits.stride(0),
                logits.stride(1),
                TOPK,
            )

        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:
            print("no DeepGEMM:", str(error)[:300], file=sys.stderr)
            return None
        return call

    def rows(self):
        ids = sorted_choice(TOKENS, CONTEXT // POOL, TOPK)
        positions = torch.full((TOKENS,), CONTEXT - 2, device=DEVICE)
        tokens = self.kernels.expand_pools(ids, positions, POOL, WIDTH)
        req = int32(TOKENS)
        starts = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
        out, counts = torch.empty_like(tokens), int32(TOKENS)
        table = int32(1, 64, high=64)
        yield (
            "expand_pools",
            f"T={TOKENS} W={WIDTH}",
            self.floor(ids.numel() * 4 + tokens.numel() * 4),
            lambda: self.kernels.expand_pools(ids, positions, POOL, WIDTH),
            "",
            None,
        )
        yield (
            "remap with lengths",
            f"T={TOKENS} W={WIDTH} N=2",
            self.floor(tokens.numel() * 8),
            lambda: self.kernels.remap(tokens, req, starts, CONTEXT // 2, 2, 4, out, counts),
            "copy of the same bytes",
            lambda: out.copy_(tokens),
        )
        yield (
            "filter_local",
            f"T={TOKENS} W={WIDTH} N=2",
            self.floor(tokens.numel() * 8),
            lambda: self.kernels.filter_local(tokens, req, table, 1024, 512, 0, 2, 4),
            "copy of the same bytes",
            lambda: out.copy_(tokens),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv")
    parser.add_argument("--only", help="one group: attend, records, pools, select, rows")
    arguments = parser.parse_args()
    import triton

    import vllm

    device = torch.cuda.get_device_properties(0)
    print(
        f"{device.name}, {device.multi_processor_count} SMs; torch {torch.__version__}, triton "
        f"{triton.__version__}, vLLM {vllm.__version__}"
    )
    timer, cases, lines = Timer(), Cases(), []
    print(f"{timer.calls} calls a graph, median of {timer.samples} replays, microseconds")
    print(f"{'kernel':24}{'shape':44}{'floor':>9}{'measured':>10}{'peer':>9}  peer")
    for group in ("attend", "records", "pools", "select", "rows"):
        if arguments.only not in (None, group):
            continue
        for kernel, shape, floor, call, peer, peer_call in getattr(cases, group)():
            try:
                measured = timer(call)
                peer_us = timer(peer_call) if peer_call else None
            except Exception as error:
                print(f"{kernel:24}{shape:44} failed: {str(error)[:300]}", flush=True)
                continue
            shown = f"{peer_us:9.1f}" if peer_us is not None else " " * 9
            print(f"{kernel:24}{shape:44}{floor:9.1f}{measured:10.1f}{shown}  {peer}", flush=True)
            lines.append(
                [
                    kernel,
                    shape,
                    f"{floor:.1f}",
                    f"{measured:.1f}",
                    peer,
                    "" if peer_us is None else f"{peer_us:.1f}",
                ]
            )
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["kernel", "shape", "floor_us", "measured_us", "peer", "peer_us"])
            writer.writerows(lines)


if __name__ == "__main__":
    main()
