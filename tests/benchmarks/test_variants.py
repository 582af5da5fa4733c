# SPDX-License-Identifier: Apache-2.0
"""The table of ``benchmarks/variants.py``, and the switches that it throws."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def variants(load_benchmark):
    return load_benchmark("variants")


def samples(variant, seconds, shape="1000", cached=0):
    about = {"variant": variant, "shape": shape, "cached_tokens": cached}
    return [about | {"seconds": s, "windows": 1, "ckv_bytes": 7} for s in seconds]


def test_ratios_are_those_of_samples_that_ran_together(variants):
    """The machine got twice as slow after the first sample; the ratio does not show it."""
    found = samples("plain", [1.0, 2.0, 2.0]) + samples("early", [0.5, 1.0, 1.0])
    plain, early = variants.rows_of(found, model="small", tp=2, dcp=2)
    assert (plain.ratio, early.ratio) == (1.0, 2.0)
    assert (plain.tok_s, plain.spread, plain.samples) == (500.0, 0.5, 3)
    table = variants.format_table([plain, early])
    assert "500  1.000x" in table and "1,000  2.000x" in table


def test_only_computed_tokens_count(variants):
    """Of two prompts of 1,000 and 60 tokens, 960 were in the cache."""
    found = samples("plain", [2.0], shape="2x1000+60", cached=960)
    (row,) = variants.rows_of(found, model="small", tp=2, dcp=2)
    assert (row.tok_s, row.cached_tokens) == (100.0, 960)


@pytest.mark.parametrize("text", ["4096", "4x6000", "130560+512", "2x1000+60"])
def test_a_shape_is_read_as_it_is_written(variants, text):
    assert str(variants.Shape.parse(text)) == text


@pytest.mark.parametrize("text", ["", "x5", "4x", "5+", "0x4", "4x0", "1e3"])
def test_other_shapes_are_refused(variants, text):
    with pytest.raises(variants.argparse.ArgumentTypeError, match=r"is no|has no"):
        variants.Shape.parse(text)


@pytest.mark.parametrize("variant", ["ordinary", "plain", "shared", "early", "windows"])
def test_each_variant_throws_its_own_switch_alone(variants, monkeypatch, variant):
    from vllm.v1.attention.backends.mla.ckv_gather.eligibility import Limits
    from vllm.v1.attention.backends.mla.ckv_gather.plan import CkvGather

    gather = SimpleNamespace(
        limits=Limits(True, True, 2, 16, 8),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(max_model_len=131_328)),
        geometry=SimpleNamespace(get=lambda: SimpleNamespace(window_granule=8704)),
    )
    monkeypatch.setattr(CkvGather, "of_worker", lambda worker: gather)
    for before in variants.VARIANTS:
        variants.switch(None, before, 1000)
        variants.switch(None, variant, 1000)
        thrown = {
            "ordinary": not gather.limits.enabled,
            "shared": gather.shard_selection,
            "early": gather.early_exchange,
            "windows": gather.max_visible_tokens == 8704,
        }
        assert [name for name, on in thrown.items() if on] == [variant] * (variant != "plain")
        assert gather.max_visible_tokens == (8704 if variant == "windows" else 131_328)
