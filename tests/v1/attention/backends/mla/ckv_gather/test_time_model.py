# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the time model: counts by brute force, and each rate on its own."""

from dataclasses import replace

import pytest
from ckv_rates import NOTHING

from vllm.v1.attention.backends.mla.ckv_gather.byte_model import ByteModel
from vllm.v1.attention.backends.mla.ckv_gather.time_model import (
    Costs,
    Rates,
    TimeModel,
    at,
    sum_of_floors,
    sum_of_least,
)
from vllm.v1.attention.backends.mla.ckv_gather.windows import plan_spans

SIZES = ByteModel(
    dcp_world_size=4, interleave=4, pool_size=4, record_bytes=528, local_heads=16, pool_topk=8,
    a2a=False,
)  # fmt: skip
LENGTHS, QUERIES = [100, 3000, 7], [20, 500, 7]


ONE, EACH = ((0, 1.0),), ((0, 0.0), (1, 1.0))
"""Curves: a second however many rows, and a second a row."""


def costs(
    rate, lengths=LENGTHS, queries=QUERIES, capacity=10_000, sizes=SIZES, value=1.0, **options
):
    spans = plan_spans(
        lengths, queries, capacity=capacity, granule=1024, num_rows=sum(queries)
    )  # fmt: skip
    rates = replace(NOTHING, **{rate: value})
    made = TimeModel(sizes, rates).costs(lengths, queries, spans, **options)
    return made.ordinary_seconds, made.gathered_seconds


@pytest.mark.parametrize("last", [0, 1, 3, 4, 5, 7, 8, 1000])
def test_sums(last):
    assert sum_of_floors(last, 4) == sum(n // 4 for n in range(1, last + 1))
    assert sum_of_least(last, 5) == sum(min(n, 5) for n in range(1, last + 1))


def test_each_rate_counts_what_it_says():
    seen = [n for end, rows in zip(LENGTHS, QUERIES, strict=True)
            for n in range(end - rows + 1, end + 1)]  # fmt: skip
    pairs, tokens = sum(n // 4 for n in seen), sum(min(n, 35) for n in seen)
    assert costs("collective") == (4, 2)
    assert costs("byte") == (SIZES.ordinary(527), SIZES.gathered(LENGTHS))
    assert costs("pair") == (pairs / 4, pairs)
    assert costs("own_heads", value=EACH) == (0, tokens)
    assert costs("all_heads", value=EACH) == (tokens / 4, 0)
    assert costs("ordinary", value=ONE) == (1, 0) and costs("gathered", value=ONE) == (0, 1)
    assert costs("ordinary", value=EACH) == (527, 0) and costs("gathered", value=EACH) == (0, 527)
    assert costs("token") == (0, 3107)
    assert costs("merged") == costs("merged_row") == (0, 0)


@pytest.mark.parametrize("rate", ["pair", "own_heads"])
def test_every_request_has_its_rows(rate):
    with pytest.raises(ValueError, match="longer"):
        costs(rate, [100, 3000], [20, 500, 7], value=1.0 if rate == "pair" else EACH)


def test_attention_is_interpolated_over_the_tokens_of_a_row():
    """The first 8 of its 35 tokens take three times as long as others; ranks own a quarter."""
    seen = [n for end, rows in zip(LENGTHS, QUERIES, strict=True)
            for n in range(end - rows + 1, end + 1)]  # fmt: skip
    curve = ((0, 0.0), (8, 24.0), (20, 36.0))
    seconds = [at(curve, min(n, 35)) for n in seen]
    assert costs("own_heads", value=curve) == (0, pytest.approx(sum(seconds)))
    own = ((0, 0.0), (2, 24.0), (5, 36.0))
    assert costs("all_heads", value=own) == (pytest.approx(sum(seconds)), 0)


def test_a_small_batch_takes_as_long_as_its_launches():
    assert costs("ordinary_host") == (1, 0) and costs("gathered_host") == (0, 1)
    assert costs("gathered_host", capacity=1024) == (0, 5)
    assert costs("ordinary_host", beside_decodes=True) == (0, 0)
    spans = plan_spans(LENGTHS, QUERIES, capacity=10_000, granule=1024, num_rows=527)

    def longer(**rates):
        made = TimeModel(SIZES, replace(NOTHING, **rates)).costs(LENGTHS, QUERIES, spans)
        return made.ordinary_seconds, made.gathered_seconds

    two = ((1, 2.0),)
    assert longer(ordinary=two, ordinary_host=3.0, gathered=two, gathered_host=1.0) == (3, 2)


def test_prompts_without_a_context_exchange_nothing_of_their_own():
    assert costs("collective", [20, 7], [20, 7], own=[20, 7]) == (4, 0)
    assert costs("collective", [20, 7], [20, 7], own=[20, 7], shares=4) == (4, 1)
    assert costs("collective", [20, 7], [20, 7]) == (4, 2)
    assert costs("collective", [100], [20], own=[20]) == (4, 2)


def test_a2a_takes_a_collective_less():
    assert costs("collective", sizes=replace(SIZES, a2a=True)) == (3, 2)


def test_windows():
    """Requests of 100, 3,000 and 7 tokens: the second one in windows of 1,024, 1,024 and 952."""
    options = {"capacity": 1024}
    assert costs("collective", **options) == (4, 10)
    assert costs("gathered", value=ONE, **options) == (0, 5)
    assert costs("gathered", value=EACH, **options) == (0, 527 + 2 * 500)
    assert costs("merged", **options) == (0, 2)
    assert costs("merged_row", **options) == (0, 1000)
    assert costs("token", **options) == (0, 3107)
    # The first of 1,200 rows sees 300 tokens: 724 see no token of the second window.
    assert costs("merged_row", [1500], [1200], **options) == (0, 1200 - 724)


def test_a_shared_selection():
    ordinary, gathered = costs("pair")
    assert costs("pair", shares=4) == (ordinary, gathered / 4)
    assert costs("collective", shares=4) == (4, 3) == costs("collective", shares=2)
    assert costs("collective", shares=4, capacity=1024) == (4, 13)
    assert costs("byte", shares=4)[1] == SIZES.gathered(LENGTHS, [527])
    assert costs("pair", pairs=8) == (2, 8)


def test_decodes_pay_for_what_the_ordinary_path_costs_however_small():
    assert costs("collective", beside_decodes=True) == (0, 2)
    assert costs("ordinary", value=ONE, beside_decodes=True) == (0, 0)
    assert costs("ordinary", value=((16, 2.0), (32, 18.0)), beside_decodes=True) == (511, 0)
    assert costs("ordinary", value=((0, 2.0), (32, 18.0)), beside_decodes=True) == (527 / 2, 0)


def shares(lengths=(8000,), queries=(100,), capacity=10_000, **rates):
    spans = plan_spans(lengths, queries, capacity=capacity, granule=1024, num_rows=sum(queries))
    model = TimeModel(SIZES, replace(NOTHING, **rates) if rates else None)
    return model.selection_shares(model.pairs(lengths, queries), spans)


def test_shares_where_the_pairs_saved_take_twice_as_long_as_the_exchange():
    pairs = TimeModel(SIZES).pairs([8000], [100])
    saved, received = pairs * 3 / 4 / 2, 3 * 25 * 8 * 4
    assert shares(pair=1.0, collective=saved * 0.999) == 4
    assert shares(pair=1.0, collective=saved) == shares(pair=1.0, collective=saved * 1.001) == 1
    assert shares(pair=0.5, collective=saved * 0.5001) == 1
    assert shares(pair=1.0, byte=saved / received * 0.999) == 4
    assert shares(pair=1.0, byte=saved / received * 1.001) == 1
    # Every span has an exchange of its own.
    halves = {"lengths": (4000, 4000), "queries": (50, 50), "capacity": 4000}
    pairs = 2 * TimeModel(SIZES).pairs([4000], [50])
    assert shares(**halves, pair=1.0, collective=pairs * 3 / 16 * 0.999) == 4
    assert shares(**halves, pair=1.0, collective=pairs * 3 / 16 * 1.001) == 1


def test_without_rates_the_constants_decide():
    assert shares() == 1
    assert shares((2_000_000,), (8192,), 3_000_000) == 4


def test_time_decides_where_it_is_known_and_bytes_elsewhere():
    assert Costs(1, 2).gains and not Costs(2, 2).gains
    assert Costs(2, 1, 1.0, 2.0).gains and not Costs(1, 2, 2.0, 2.0).gains
    # One of two times says nothing.
    assert Costs(1, 2, 1.0).gains and Costs(1, 2, None, 1.0).gains
    made = TimeModel(SIZES).costs([100], [20], plan_spans(
        [100], [20], capacity=100, granule=64, num_rows=20))  # fmt: skip
    assert (made.gathered_seconds, made.ordinary_seconds) == (None, None)


def test_slowest():
    one = replace(NOTHING, pair=2.0, token=1.0)
    other = replace(NOTHING, pair=1.0, byte=3.0)
    assert Rates.slowest([one, other]) == replace(NOTHING, pair=2.0, token=1.0, byte=3.0)
    one = replace(NOTHING, gathered=((16, 1.0), (32, 5.0)))
    other = replace(NOTHING, gathered=((16, 2.0), (32, 4.0)))
    assert Rates.slowest([one, other]).gathered == ((16, 2.0), (32, 5.0))
    assert Rates.slowest([one]) == one
    with pytest.raises(ValueError, match="shorter"):
        Rates.slowest([one, NOTHING])


def test_costs_in_words():
    assert str(Costs(1, 2)) == str(Costs(1, 2, 3e-6)) == "1 bytes a layer gathered, 2 ordinary"
    assert str(Costs(1, 2, 3e-6, 4e-6)).endswith(
        "ordinary, by estimate 3 us gathered, 4 us ordinary"
    )


def test_rows_lie_between_points():
    curve = ((16, 2.0), (32, 3.0), (128, 9.0))
    assert [at(curve, rows) for rows in (0, 16, 24, 32, 80, 128, 160)] == [2, 2, 2.5, 3, 6, 9, 11]
    assert at((), 5) == 0 and at(((16, 2.0),), 1) == at(((16, 2.0),), 99) == 2
    assert at(((1, 2.0), (2, 1.0)), 9) == 0
