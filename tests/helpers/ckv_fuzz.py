# SPDX-License-Identifier: Apache-2.0
"""Random servers and schedules for the differential test: strategy, runner, kept failures.

A case is plain numbers. ``run_case`` plays it on simulated ranks and compares every selection and
every output with the oracle. The command line runs or keeps a case that failed:

    python tests/helpers/ckv_fuzz.py run [FILE]      # the last failure, or a file
    python tests/helpers/ckv_fuzz.py keep NAME       # makes it a regression test of that name
    python tests/helpers/ckv_fuzz.py search N SEED   # N new cases; prints what was in them
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path

import torch
from ckv_oracle import Bank, Expected
from ckv_ranks import Arena, Result, Sizes, Step, run_step, simulated_ranks
from ckv_rates import NOTHING
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import TorchReferenceKernels

ROOT = Path(__file__).resolve().parents[2]
LAST_FAILURE = ROOT / ".pytest_cache" / "ckv_fuzz_failure.json"
KEPT = ROOT / "tests/v1/attention/backends/mla/ckv_gather/fuzz_regressions"
TOLERANCE = {"atol": 0.02, "rtol": 0.02}
LOW_PAGES = 48


@dataclass(frozen=True)
class Request:
    """One request.

    start: first place in the bank, divided by 4. cached: tokens that earlier steps have written.
    shares: an earlier request whose whole blocks it begins with, as far as its cached part goes.
    rows: query tokens in each step. prompt_steps: steps that are prompt; later ones are decodes.
    """

    start: int
    cached: int
    shares: int | None
    rows: tuple[int, ...]
    prompt_steps: int


@dataclass(frozen=True)
class Case:
    """One server and its steps.

    held: visible tokens that are reserved, in percent of those of the largest step, but no fewer
        than have to be; 100: every step is one window. slack: added to it.
    gap_rows: rows between the pages of the strided caches. pages: seed of the page numbers.
    cut: part of the cached tokens, in percent, that was written first.
    auto: prompts gather only where that gains. rates: by which that is judged, and which batches
        share their selection out: of a collective, a byte, a pair and an ordinary row; None: bytes.
    decode_rows: rows of a request that still count as decodes, more than one where vLLM verifies.
    """

    world: int
    interleave: int
    page_size: int
    pool_topk: int
    layers: int
    heads: int
    slack: int
    min_tokens: int
    gap_rows: int
    pages: int
    cut: int
    pad_rows: int
    pad_tokens: int
    requests: tuple[Request, ...]
    record: str = "fp8_ds_mla"
    shard_selection: bool = False
    held: int = 100
    mixed: bool = False
    early_exchange: bool = False
    auto: bool = False
    rates: tuple[int, int, int, int] | None = None
    decode_rows: int = 1

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def parse(cls, text: str) -> Case:
        values = json.loads(text)
        requests = [Request(**{**r, "rows": tuple(r["rows"])}) for r in values["requests"]]
        rates = values.get("rates")
        rates = None if rates is None else tuple(rates)
        return cls(**{**values, "requests": tuple(requests), "rates": rates})


@st.composite
def cases(draw) -> Case:
    world = draw(st.sampled_from([2, 2, 3, 3, 4, 4, 1, 5, 6, 7, 8]))
    page_size = draw(st.sampled_from([256, 256, 256, 512, 768, 2304]))
    interleave = draw(st.sampled_from([i for i in (4, 4, 8, 12, 16, 36, 64) if page_size % i == 0]))
    num_steps = draw(st.integers(1, 3))
    rows = st.tuples(*[st.sampled_from([2, 1, 0, 3, 4, 5, 7, 8, 11, 13])] * num_steps)
    block = world * page_size
    lengths = [*range(10), 15, 16, 17, 31, 47, 64, 70]
    if block <= 1024:
        lengths += range(block - 2, block + 9)
    # The least capacity, and a request that does not fit it.
    window = block <= 1024 and draw(st.sampled_from([False, False, True]))
    # Prompts that all begin in the first step.
    fresh = not window and draw(st.sampled_from([False, False, False, True]))
    beyond = [*range(block - 2, block + 9), block + 300, 2 * block - 3, 2 * block + 5]
    requests = []
    for number in range(draw(st.sampled_from([1, 2, 2, 3, 4, 5]))):
        shares = None
        if number and block <= 1024:
            shares = draw(st.sampled_from([None, *range(number)]))
        requests.append(
            Request(
                start=draw(st.integers(0, 511)),
                cached=0
                if fresh
                else draw(st.sampled_from(lengths if number or not window else beyond)),
                shares=shares,
                rows=draw(rows),
                prompt_steps=draw(st.sampled_from([3] * 9 + [2, 1, 0])),
            )
        )
    slack, min_tokens = draw(st.sampled_from([(100, 0)] * 4 + [(0, 0), (1, 0), (100, 16)]))
    gap_rows, cut = draw(st.sampled_from([(0, 0), (0, 37), (1, 71), (5, 0)]))
    pad_rows, pad_tokens = draw(st.sampled_from([(0, 0), (0, 0), (2, 0), (0, 3), (2, 3)]))
    return Case(
        world=world,
        interleave=interleave,
        page_size=page_size,
        pool_topk=draw(st.sampled_from([4, 1, 2, 8])),
        layers=draw(st.sampled_from([1, 1, 1, 2])),
        heads=draw(st.sampled_from([1, 2])) if world <= 4 else 1,
        slack=slack,
        min_tokens=min_tokens,
        gap_rows=gap_rows,
        pages=draw(st.integers(0, 99)),
        cut=cut,
        pad_rows=pad_rows,
        pad_tokens=pad_tokens,
        requests=tuple(requests),
        record=draw(st.sampled_from(["fp8_ds_mla", "nvfp4_ds_mla"])),
        shard_selection=draw(st.booleans()),
        mixed=draw(st.booleans()),
        early_exchange=draw(st.booleans()),
        held=0 if window else draw(st.sampled_from([100, 100, 70, 50, 34, 0])),
        auto=draw(st.sampled_from([False, False, False, True])),
        rates=draw(st.sampled_from([None, None, (0, 0, 1, 40), (9, 1, 0, 400), (0, 1, 1, 3000)])),
        decode_rows=draw(st.sampled_from([1, 1, 1, 2, 4])),
    )


@cache
def bank(record: str = "fp8_ds_mla") -> Bank:
    return Bank(record=record)


@contextmanager
def quiet():
    """Thousands of servers log their start; and intra-op threads would multiply by the ranks."""
    threads, disabled = torch.get_num_threads(), logging.root.manager.disable
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        logging.disable(disabled)


class Player:
    """Plays one case; ``seen`` counts what happened in it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.seen: Counter[str] = Counter()
        self.bank = bank(case.record)
        self.places: list[torch.Tensor] = []
        self.shared: list[int] = []
        for request in case.requests:
            own = request.start * 4 + torch.arange(request.cached + sum(request.rows))
            shared = 0
            if request.shares is not None:
                block = case.world * case.page_size
                donor = case.requests[request.shares].cached
                shared = min(donor, request.cached) // block * block
                own[:shared] = self.places[request.shares][:shared]
            self.places.append(own % self.bank.size)
            self.shared.append(shared)
        self.done = [request.cached for request in case.requests]

    def sizes(self) -> Sizes:
        case = self.case
        visible, done = [0], list(self.done)
        for number in range(len(case.requests[0].rows)):
            done = [n + r.rows[number] for n, r in zip(done, case.requests, strict=True)]
            visible.append(
                sum(n for n, r in zip(done, case.requests, strict=True) if r.rows[number])
            )
        longest = max(*done, 1)
        least = min(case.world * case.page_size, longest)
        return Sizes(
            world=case.world,
            interleave=case.interleave,
            page_size=case.page_size,
            pool_topk=case.pool_topk,
            heads=case.heads,
            capacity=max(max(visible) * case.held // 100 + case.slack, least),
            max_model_len=longest,
            min_tokens=case.min_tokens,
            max_num_seqs=len(case.requests),
            layers=case.layers,
            record=case.record,
            shard_selection=case.shard_selection,
            mixed=case.mixed,
            early_exchange=case.early_exchange,
            auto=case.auto,
        )

    def play(self) -> Counter[str]:
        case = self.case
        with simulated_ranks(self.sizes(), TorchReferenceKernels(), case.gap_rows) as started:
            self.lockstep, self.ranks = started
            if case.rates is not None:
                collective, byte, pair, row = map(float, case.rates)
                rates = replace(
                    NOTHING,
                    collective=collective,
                    byte=byte,
                    pair=pair,
                    ordinary=((0, 0.0), (1, row)),
                )
                for rank in self.ranks:
                    rank.gather.adopt(rates)
            self._allocate()
            first = [max(r.cached * case.cut // 100, s) for r, s in self._cached()]
            self._write(self.shared, first)
            self._write(first, [r.cached for r in case.requests])
            for number in range(len(case.requests[0].rows)):
                self._step(number)
        return self.seen

    def _cached(self):
        return zip(self.case.requests, self.shared, strict=True)

    def _allocate(self) -> None:
        """Give every rank pages of its own, low and high ones, all full of NaN."""
        case = self.case
        high = Arena.first_high_page(self.ranks[0].caches[0])
        free = [*range(LOW_PAGES), *range(high, high + LOW_PAGES)]
        random.Random(case.pages).shuffle(free)
        block, per_block = case.world * case.page_size, case.page_size // 256
        for rank in self.ranks:
            tables = rank.tables
            tables.high_page = high
            tables.high_index_page = Arena.first_high_page(rank.index_caches[0])
            for number, places in enumerate(self.places):
                pages = []
                if self.shared[number]:
                    donor = tables.pages[self.case.requests[number].shares]
                    pages = donor[: self.shared[number] // block]
                needed = -(-places.numel() // block)
                pages = pages + [free.pop() for _ in range(needed - len(pages))]
                tables.pages.append(pages)
                # Rows that no token of this case could reach stay as they are.
                reach = min(case.page_size, places.numel() // case.world + 2 * case.interleave)
                for latents, index in zip(rank.caches, rank.index_caches, strict=True):
                    latents[pages, :reach] = 0xFF
                    for page in tables.index([number], per_block, 0)[0, :-1].tolist():
                        index[page] = 0xFF

    def _rows(self, requests: list[int], begins: list[int], ends: list[int]):
        places = [self.places[r][b:e] for r, b, e in zip(requests, begins, ends, strict=True)]
        return torch.cat(places) if places else torch.empty(0, dtype=torch.int64)

    def _write(self, begins: list[int], ends: list[int]) -> None:
        requests = [r for r, (b, e) in enumerate(zip(begins, ends, strict=True)) if e > b]
        if not requests:
            return
        begins, ends = [begins[r] for r in requests], [ends[r] for r in requests]
        step = Step(
            requests=requests,
            query_lens=[e - b for b, e in zip(begins, ends, strict=True)],
            seq_lens=ends,
            prefilling=[True] * len(requests),
        )
        places = self._rows(requests, begins, ends)
        inputs = [self.bank.inputs(places, layer, 0, 1) for layer in range(self.case.layers)]
        run_step(self.lockstep, self.ranks, step, inputs, write_only=True)

    def _step(self, number: int) -> None:
        case = self.case
        active = [r for r, request in enumerate(case.requests) if request.rows[number]]
        if not active:
            return
        # As vLLM sorts: what has a context and few rows, what has more, prompts that begin.
        active.sort(
            key=lambda r: (not self.done[r], case.requests[r].rows[number] > case.decode_rows)
        )
        before = [self.done[r] for r in active]
        query_lens = [case.requests[r].rows[number] for r in active]
        ends = [b + q for b, q in zip(before, query_lens, strict=True)]
        # And as it splits: a prompt of few rows behind a longer one is no decode.
        decodes = list(takewhile(lambda count: count <= case.decode_rows, query_lens))
        for r, end in zip(active, ends, strict=True):
            self.done[r] = end
        step = Step(
            requests=active,
            query_lens=query_lens,
            seq_lens=ends,
            prefilling=[number < case.requests[r].prompt_steps for r in active],
            num_decode_tokens=sum(decodes),
            num_decodes=len(decodes),
            pad_rows=case.pad_rows,
            pad_tokens=case.pad_tokens,
        )
        places = self._rows(active, before, ends)
        heads = case.world * case.heads
        inputs = [
            self.bank.inputs(places, layer, case.pad_tokens, heads) for layer in range(case.layers)
        ]
        results = run_step(self.lockstep, self.ranks, step, inputs)
        paths = {result.gathered for layers in results for result in layers}
        assert len(paths) == 1, f"step {number}: some ranks gather and some do not"
        path = "gathered" if paths.pop() else "ordinary"
        self.seen[path] += 1
        self.seen[f"{path}, {case.record}"] += 1
        first_rows = {result.first_row for layers in results for result in layers}
        assert len(first_rows) == 1, f"step {number}: the ranks gather different rows"
        first_row = first_rows.pop()
        assert first_row in (0, step.num_decode_tokens)
        self.seen[f"beside decodes, {case.record}"] += first_row > 0
        self.seen["beside verification"] += first_row > len(decodes)
        self.seen[f"auto, {path}"] += case.auto
        shares = {result.selection_shares for layers in results for result in layers}
        assert len(shares) == 1, f"step {number}: the ranks share the selection differently"
        if shares.pop() > 1:
            self.seen["shared selection"] += 1
            # Ranks behind the last share have no row at all.
            self.seen["shared selection, fewer rows than ranks"] += (
                step.num_tokens + case.pad_tokens - first_row < case.world
            )
        own_rows = {result.own_rows for layers in results for result in layers}
        assert len(own_rows) == 1, f"step {number}: the ranks exchange different records"
        if own_rows.pop():
            self.seen[f"early exchange, {case.record}"] += 1
            self.seen["early exchange of a context"] += any(before)
            self.seen["early exchange, several requests"] += len(active) > 1
        spans = [result.spans for layers in results for result in layers]
        assert all(other == spans[0] for other in spans), f"step {number}: ranks cut differently"
        self.seen[f"several spans, {case.record}"] += len(spans[0]) > 1
        self.seen[f"context in windows, {case.record}"] += max(spans[0], default=0) > 1
        for layer in range(case.layers):
            row = 0
            for r, begin, end in zip(active, before, ends, strict=True):
                expected = self.bank.expected(
                    self.places[r][:end], begin, layer, case.pool_topk, heads
                )
                rows = slice(row, row + end - begin)
                for rank, layers in enumerate(results):
                    where = f"step {number}, layer {layer}, request {r}, rank {rank}"
                    self._compare(where, layers[layer], rows, expected, rank)
                row += end - begin
            for rank, layers in enumerate(results):
                where = f"step {number}, layer {layer}, rank {rank}"
                padding = layers[layer].out[row:]
                assert padding.shape[0] == case.pad_tokens, where
                assert bool((padding == 0).all()), f"{where}: a padding row is not 0"

    def _compare(
        self, where: str, result: Result, rows: slice, expected: Expected, rank: int
    ) -> None:
        gathered = result.gathered and rows.start >= result.first_row
        for row, tokens in enumerate(expected.token_ids):
            got = result.token_ids[rows][row].tolist()
            want = tokens + [-1] * (len(got) - len(tokens))
            assert got == want, f"{where}, row {row} selects {got}, expected {want}"
        heads = slice(rank * self.case.heads, (rank + 1) * self.case.heads)
        out, want = result.out[rows].double(), expected.out[:, heads]
        close = torch.isclose(out, want, **TOLERANCE)
        assert bool(close.all()), (
            f"{where}: outputs differ by up to {float((out - want).abs().max()):.3g}, "
            f"first at (row, head, dim) {(~close).nonzero()[0].tolist()}"
        )
        if gathered or self.case.world == 1:
            lse = expected.lse[:, heads]
            assert torch.allclose(result.lse[rows].double(), lse, atol=1e-3), f"{where}: lse"
        self.seen["rows"] += out.shape[0]


def run_case(case: Case) -> Counter[str]:
    """Play ``case``; what fails is written to :data:`LAST_FAILURE` first."""
    try:
        return Player(case).play()
    except BaseException:
        LAST_FAILURE.parent.mkdir(exist_ok=True)
        LAST_FAILURE.write_text(case.text() + "\n")
        raise


def search(count: int, number: int) -> Counter[str]:
    """Play ``count`` random cases of seed ``number``; a failing one is shrunk, then raised."""
    seen: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def play(case: Case) -> None:
        seen.update(run_case(case), cases=1)

    with quiet():
        play()
    return seen


def gather_on() -> None:
    os.environ["VLLM_B12X_MLA_CKV_GATHER"] = "1"
    from vllm.plugins.b12x_mla_sparse import register

    register()


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["keep"] and len(arguments) == 2:
        KEPT.mkdir(exist_ok=True)
        target = KEPT / f"{arguments[1]}.json"
        target.write_text(LAST_FAILURE.read_text())
        print(target)
        return 0
    if arguments[:1] == ["run"] and len(arguments) <= 2:
        path = Path(arguments[1]) if len(arguments) == 2 else LAST_FAILURE
        gather_on()
        print(dict(run_case(Case.parse(path.read_text()))))
        return 0
    if arguments[:1] == ["search"] and len(arguments) == 3:
        gather_on()
        print(json.dumps(search(int(arguments[1]), int(arguments[2]))))
        return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
