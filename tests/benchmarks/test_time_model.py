# SPDX-License-Identifier: Apache-2.0
"""The verdicts of benchmarks/time_model.py; the program itself runs with ``--cpu``."""

from dataclasses import replace

import pytest


@pytest.fixture
def module(load_benchmark):
    return load_benchmark("time_model")


@pytest.fixture
def row(module):
    return module.Row("m", [100], [20], 100.0, 100.0, 150.0, 150.0)


def test_there_are_thirty_batches_with_two_models(module):
    assert 2 * len(module.BATCHES) == 30
    for lengths, queries in module.BATCHES + module.SMALL:
        assert all(n <= length for n, length in zip(queries, lengths, strict=True))
        assert sum(queries) <= module.CHUNK and sum(lengths) <= 131_072


def test_a_path_that_takes_more_than_twice_as_long_is_not_relevant(row):
    assert row.relevant and not row.fails
    far = replace(row, gathered=201.0)
    assert not far.relevant and not far.fails
    assert replace(row, gathered=49.0).relevant is False


def test_a_relevant_prediction_may_be_fifteen_percent_off(row):
    assert not replace(row, predicted_ordinary=114.9).fails
    assert replace(row, predicted_ordinary=115.1).fails
    assert replace(row, predicted_gathered=150 * 0.84).fails


def test_a_wrong_decision_counts_where_the_paths_differ(row):
    wrong = replace(row, gathered=120.0, predicted_ordinary=112.0, predicted_gathered=110.0)
    assert not wrong.right and max(map(abs, wrong.errors)) < 0.15 and wrong.fails
    close = replace(row, gathered=101.0, predicted_gathered=99.0)
    assert not close.right and not close.fails


def test_the_slowest_rank_counts(module):
    def rank(gathered, ordinary):
        return {"rows": [{
            "lengths": [9], "queries": [3], "predicted_ordinary": 1e-6, "ordinary": ordinary,
            "predicted_gathered": 2e-6, "gathered": gathered,
        }]}  # fmt: skip

    (row,) = module.rows_of("m", [rank(3e-6, 5e-6), rank(4e-6, 1e-6)])
    assert (row.gathered, row.ordinary) == pytest.approx((4.0, 5.0))
    assert "3 / 9" in module.format_row(row)
