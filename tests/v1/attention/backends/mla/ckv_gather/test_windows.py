# SPDX-License-Identifier: Apache-2.0
"""Batches beyond the reserved tokens: how they are cut, and that windows change no result."""

from dataclasses import replace
from itertools import pairwise

import ckv_fuzz
import pytest
import torch
from ckv_fuzz import Case, Request
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.attention.backends.mla.ckv_gather import geometry as g
from vllm.v1.attention.backends.mla.ckv_gather import plan as plan_module
from vllm.v1.attention.backends.mla.ckv_gather.layout import plan_layout
from vllm.v1.attention.backends.mla.ckv_gather.windows import (
    Span,
    merge_attention,
    merge_candidates,
    own_lengths,
    plan_spans,
)
from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import TorchReferenceKernels

# Cutting


def cut(lengths, rows=None, *, capacity=1000, granule=100, pad=0):
    rows = [1] * len(lengths) if rows is None else rows
    return plan_spans(lengths, rows, capacity=capacity, granule=granule, num_rows=sum(rows) + pad)


def test_a_batch_that_fits_is_one_span_with_one_window():
    assert cut([400, 600], [3, 4], pad=2) == [Span(slice(0, 2), slice(0, 9))]
    assert cut([400, 601], [3, 4], pad=2) == [
        Span(slice(0, 1), slice(0, 3)),
        Span(slice(1, 2), slice(3, 9)),
    ]
    assert cut([]) == []


def test_a_request_that_does_not_fit_is_alone_and_in_windows():
    spans = cut([300, 2350, 20, 30], [3, 40, 5, 6], capacity=1099)
    assert spans == [
        Span(slice(0, 1), slice(0, 3)),
        # Windows are multiples of 100 tokens, and the rows are at positions 2310 to 2349.
        Span(slice(1, 2), slice(3, 43), (0, 1000, 2000, 2350), 2310),
        Span(slice(2, 4), slice(43, 54)),
    ]
    assert [span.num_windows for span in spans] == [1, 3, 1]
    assert spans[0].pieces([300, 2350, 20, 30]) == [((300,), None)]
    assert spans[1].pieces([300, 2350, 20, 30]) == [
        ((1000,), (0, 1000)),
        ((1000,), (1000, 2000)),
        ((350,), (2000, 2350)),
    ]
    assert spans[2].pieces([300, 2350, 20, 30]) == [((20, 30), None)]


def test_rows_before_a_window_do_not_take_part_in_it():
    (span,) = cut([250], [60], capacity=100, pad=3)
    assert (span.first_position, span.bounds) == (190, (0, 100, 200, 250))
    assert [span.rows_from(begin) for begin in (0, 100, 190, 191, 200)] == [
        slice(0, 63), slice(0, 63), slice(0, 63), slice(1, 63), slice(10, 63)
    ]  # fmt: skip


def test_a_request_without_room_for_one_window_is_refused():
    with pytest.raises(ValueError, match=r"sees 1001 tokens, .* for 99, less than the 100 of"):
        cut([1001], capacity=99)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 20)), min_size=1, max_size=9),
    st.integers(64, 700),
    st.sampled_from([16, 64]),
    st.integers(0, 3),
)
def test_every_record_and_row_is_in_one_place_and_no_window_is_too_large(
    requests, capacity, granule, pad
):
    lengths = [max(length, rows) for length, rows in requests]
    rows = [rows for _, rows in requests]
    spans = cut(lengths, rows, capacity=capacity, granule=granule, pad=pad)
    seen, row, request = [0] * len(lengths), 0, 0
    for span in spans:
        assert (span.requests.start, span.rows.start) == (request, row)
        request, row = span.requests.stop, span.rows.stop
        for pieces, bounds in span.pieces(lengths):
            assert 0 < sum(pieces) <= capacity
            for number, tokens in zip(range(request)[span.requests], pieces, strict=True):
                assert bounds in (None, (seen[number], seen[number] + tokens))
                assert bounds is None or bounds[0] % granule == 0
                seen[number] += tokens
        if span.num_windows > 1:
            assert request - span.requests.start == 1 and lengths[span.requests.start] > capacity
    assert (seen, request, row) == (lengths, len(lengths), sum(rows) + pad)
    # Greedy: the next request did not fit any more.
    for span, after in pairwise(spans):
        if span.num_windows == 1:
            assert sum(lengths[span.requests]) + lengths[after.requests.start] > capacity


@pytest.mark.parametrize(
    ("page", "world", "interleave"), [(256, 2, 4), (2304, 4, 64), (512, 3, 256), (1280, 8, 16)]
)
def test_a_window_begins_with_a_page_on_every_rank_and_fits_what_is_reserved(
    page, world, interleave
):
    geometry = g.PageGeometry(page, g.FP8_DS_MLA, 4, interleave, world)
    granule = geometry.window_granule
    for windows in (1, 3):
        for rank in range(world):
            local = g.local_length(
                windows * granule, rank, dcp_world_size=world, interleave=interleave
            )
            assert local == windows * page
        # A window's first token lies where token 0 would.
        assert g.owner_of(windows * granule, dcp_world_size=world, interleave=interleave) == 0
        layout = plan_layout(
            torch.tensor([windows * granule]), dcp_world_size=world, interleave=interleave
        )
        least = geometry.capacity(max_tokens=windows * granule, max_num_seqs=1)
        assert layout.padded == windows * page <= least


def test_the_least_capacity_is_a_window_of_one_request_or_the_longest_one():
    geometry = g.PageGeometry(2304, g.FP8_DS_MLA, 4, 4, 4)
    geometry.check_window(9216, max_model_len=100_000)
    with pytest.raises(ValueError) as error:
        geometry.check_window(9215, max_model_len=100_000)
    for part in ("MAX_TOKENS=9215", "max_model_len 100000", "2304 tokens on each of 4", "9216"):
        assert part in str(error.value)
    geometry.check_window(500, max_model_len=500)
    with pytest.raises(ValueError, match="set it to at least 500"):
        geometry.check_window(499, max_model_len=500)


# Merging


def attention(scores, values):
    """(rows, heads, tokens) scores and (tokens, D) values, float64, -inf: not seen."""
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
    return weights @ values, lse


def test_outputs_of_windows_merge_to_those_of_one():
    make = torch.Generator().manual_seed(1)
    scores = 3 * torch.randn(6, 2, 30, generator=make, dtype=torch.float64)
    values = torch.randn(30, 8, generator=make, dtype=torch.float64)
    scores[0, :, 10:] = -torch.inf  # sees the first window only
    scores[1, :, :10] = -torch.inf  # nothing of the first
    scores[2, :, 10:20] = -torch.inf  # nothing of the second
    scores[3] = -torch.inf  # padding
    scores[4] += 400  # exp of it alone is no float32
    out, lse = attention(scores, values)
    parts = []
    # The last window leaves two rows out.
    scores[:2, :, 20:] = -torch.inf
    out, lse = attention(scores, values)
    for skipped, begin, end in ((0, 0, 10), (0, 10, 20), (2, 20, 30)):
        part, part_lse = attention(scores[skipped:, :, begin:end], values[begin:end])
        parts.append((skipped, part.float(), part_lse.float()))
    merged, merged_lse = merge_attention(iter(parts))
    assert merged.dtype == torch.float32
    assert torch.allclose(merged.double(), out, atol=1e-5)
    assert torch.equal(merged[3], torch.zeros(2, 8)) and bool((merged_lse[3] == -torch.inf).all())
    assert torch.allclose(merged_lse.double(), lse, atol=1e-4)


def test_partial_outputs_are_summed_in_float32():
    """In bf16 the sum of many windows would stop growing or drift."""
    parts = [
        (0, torch.full((1, 1, 4), 1.0 + i / 64).bfloat16(), torch.zeros(1, 1)) for i in range(64)
    ]
    merged, lse = merge_attention(iter(parts))
    assert merged.dtype == torch.bfloat16
    want = sum(float(part[0, 0, 0]) for _, part, _ in parts) / 64
    assert float(merged[0, 0, 0]) == float(torch.tensor(want).bfloat16())
    assert float(lse) == pytest.approx(float(torch.tensor(64.0).log()), rel=1e-6)


def test_a_single_window_is_not_touched():
    out, lse = torch.randn(3, 2, 4).bfloat16(), torch.randn(3, 2)
    merged = merge_attention(iter([(0, out, lse)]))
    assert merged[0] is out and merged[1] is lse


@pytest.mark.parametrize("topk", [2, 5, 64, 100])
def test_candidates_of_windows_merge_to_the_selection_of_one(topk):
    """Keys repeat, so that equal scores meet across windows: the lower id has to win."""
    kernels, make = TorchReferenceKernels(), torch.Generator().manual_seed(topk)
    keys = torch.randn(40, 132, generator=make).to(torch.float8_e4m3fn).view(torch.uint8)
    keys[:, 128:] = torch.ones(40, 1).view(torch.uint8)
    pages = torch.empty(3, 8448, dtype=torch.uint8)
    for page in range(3):
        records = keys[(torch.arange(64) + 64 * page) % 40]
        pages[page, :8192] = records[:, :128].flatten()
        pages[page, 8192:] = records[:, 128:].flatten()
    rows = 7
    q = torch.randn(rows, 2, 128, generator=make).to(torch.float8_e4m3fn)
    weights = torch.rand(rows, 2, generator=make)
    counts = torch.tensor([3, 64, 65, 66, 128, 129, 192], dtype=torch.int32)
    table, req = torch.arange(3).int()[None], torch.zeros(rows, dtype=torch.int32)
    want = kernels.select_pools(q, weights, pages, table, req, counts, topk)
    best = None
    for page in range(3):
        skipped = int((counts <= 64 * page).sum()) if page else 0
        found = kernels.select_pools(
            q[skipped:], weights[skipped:], pages, table[:, page:], req[skipped:],
            (counts[skipped:] - 64 * page).clamp(max=64), topk,
        )  # fmt: skip
        if best is None:
            best = found
        else:
            merge_candidates(kernels, best, skipped, found, 64 * page)
    assert torch.equal(best[0], want[0])
    assert torch.equal(best[1], want[1])


# The whole way


ROWS = (13, 11, 2)
LONG = Case(
    world=2, interleave=8, page_size=256, pool_topk=8, layers=1, heads=2, slack=0, min_tokens=0,
    gap_rows=1, pages=3, cut=71, pad_rows=2, pad_tokens=3, held=0,
    requests=(
        # The chunk lies across the border of two windows, then behind it; three windows.
        Request(start=3, cached=1018, shares=None, rows=ROWS, prompt_steps=3),
    ),
)  # fmt: skip
PACKED = replace(
    LONG,
    world=3,
    requests=(
        Request(start=3, cached=5, shares=None, rows=(4, 4, 4), prompt_steps=3),
        Request(start=40, cached=900, shares=None, rows=ROWS, prompt_steps=3),
        Request(start=90, cached=770, shares=None, rows=(3, 2, 5), prompt_steps=3),
        Request(start=7, cached=30, shares=None, rows=(5, 2, 5), prompt_steps=3),
    ),
)


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("shard_selection", [False, True])
@pytest.mark.parametrize("record", ["fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize("case", [LONG, PACKED], ids=["long", "packed"])
def test_windows_select_and_compute_what_one_rank_does(
    gather_on, case, record, shard_selection, debug
):
    """Selections are compared with the oracle's, order included.

    The text of 2,048 places holds every key once; the test below has equal ones.
    """
    gather_on.setenv("VLLM_CKV_DEBUG", debug)
    case = replace(case, record=record, shard_selection=shard_selection)
    seen = ckv_fuzz.run_case(case)
    assert seen["gathered"] == 3 and seen[f"context in windows, {record}"] == 3
    assert seen[f"several spans, {record}"] == (3 if case.world == 3 else 0)
    gather_on.setenv("VLLM_CKV_DEBUG", "0")


def test_equal_scores_in_different_windows_go_to_the_lower_pool(gather_on, monkeypatch):
    """The same 64 tokens again and again: most scores are those of sixteen other pools."""
    player = ckv_fuzz.Player(replace(LONG, pool_topk=4))
    player.places = [places % 64 for places in player.places]
    chosen = player.play()
    assert chosen["context in windows, fp8_ds_mla"] == 3


def test_the_first_batch_in_windows_is_logged_once(make_gather, make_common, monkeypatch):
    lines = []
    monkeypatch.setattr(plan_module.logger, "info", lambda text, *a: lines.append(text % a))
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS", "512")
    gather = make_gather(2, max_model_len=600_000)
    for visible in (500, 1300, 600):
        assert gather.plan_batch(make_common([40], [visible]), num_decode_tokens=0, capturing=False)
    (line,) = [line for line in lines if "in windows" in line]
    assert line == (
        "first batch in windows: 3, because buffers are reserved for 512 of its 1300 visible "
        "tokens; VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS=1300 would make it one"
    )
    assert gather.counters.gathered_windows == 1 + 3 + 2
    assert "gathered 3 batches in 6 windows" in gather.counters.summary()
    lines.clear()
    gather = make_gather(2, max_model_len=600_000)
    gather.plan_batch(make_common([40], [600_000]), num_decode_tokens=0, capturing=False)
    assert "at most 524288 can be reserved" in lines[-1]


def test_a_batch_that_stays_ordinary_is_not_cut(make_gather, make_common):
    """Lengths of verification are bounds, and may lie beyond everything that is reserved."""
    gather = make_gather(2, max_model_len=300)
    common = make_common([40, 40], [301, 90], [False, True])
    assert gather.plan_batch(common, num_decode_tokens=0, capturing=False) is None
    assert gather.counters.gathered_windows == 0


def test_a_window_is_staged_once_however_many_there_are(make_gather, make_common, monkeypatch):
    """What a plan takes of the memory that exists does not grow with the context."""
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS", "512")
    gather = make_gather(2, max_model_len=500_000, max_num_seqs=3)
    plan = gather.plan_batch(
        make_common([40, 40, 40], [400_001, 300_002, 200_003]), num_decode_tokens=0, capturing=False
    )
    layouts = {id(window.layout) for window in plan.windows}
    assert len(plan.windows) == 782 + 586 + 391 and len(layouts) == 4
    tables = [window.layout.page_table.data_ptr() for window in plan.windows]
    assert len(set(tables)) == 4


def test_a_span_counts_its_own_rows():
    span = Span(slice(1, 2), slice(5, 9), (0, 8, 20), first_position=6)
    assert span.num_rows == 4 and span.num_windows == 2
    # Positions 6 to 9: two rows lie before the second window.
    assert span.rows_from(8) == slice(7, 9) and span.rows_from(10) == slice(9, 9)


def test_a_request_as_long_as_the_capacity_has_one_window():
    (span,) = plan_spans([20], [3], capacity=20, granule=4, num_rows=3)
    assert span == Span(slice(0, 1), slice(0, 3))
    assert (span.bounds, span.first_position) == ((), 0)


@pytest.mark.parametrize("first", [15, 100])
def test_requests_behind_a_span_fit_exactly(first):
    spans = plan_spans([first, 10, 10], [3, 2, 1], capacity=20, granule=4, num_rows=7)
    assert [span.requests for span in spans] == [slice(0, 1), slice(1, 3)]
    assert [span.rows for span in spans] == [slice(0, 3), slice(3, 7)]


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "first", "capacity", "own"),
    [
        ([100], [30], 0, 1024, [30]),  # alone, with a context
        ([100], [100], 0, 1024, [100]),
        ([40, 50], [40, 50], 0, 1024, [40, 50]),  # prompts without a context
        ([40, 50], [40, 20], 0, 1024, []),
        ([90, 50], [1, 50], 1, 1024, [50]),  # beside a decode
        ([90, 50], [1, 20], 1, 1024, []),
        ([600, 600], [600, 600], 0, 1024, []),  # two spans
        ([2000], [30], 0, 1024, []),  # two windows
    ],
)
def test_an_early_exchange_leaves_out_what_nobody_else_of_the_step_writes(
    seq_lens, query_lens, first, capacity, own
):
    spans = plan_spans(
        seq_lens, query_lens, capacity=capacity, granule=1024, num_rows=sum(query_lens), first=first
    )
    assert list(own_lengths(seq_lens, query_lens, spans)) == own
