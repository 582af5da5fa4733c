# SPDX-License-Identifier: Apache-2.0
"""A little mixed traffic in the real engine, gather on against off; ``benchmarks/traffic.py`` plays
more of it. The side that gathers runs under ``VLLM_CKV_DEBUG=1``, which has to find nothing.

Prefix hits are left to ``test_ckv_gather_engine.py``: a block of the prefix cache takes seconds.
"""

from dataclasses import replace

import pytest

from vllm.entrypoints.ckv import traffic, verify
from vllm.entrypoints.ckv.engine import gpu_count
from vllm.entrypoints.ckv.model import write_model

SCALE = replace(traffic.CPU, budget=32, prefix=0, long=70, medium=40, short=14, answer=4, wave=8)


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traffic")
    use_gpu = gpu_count() >= 2
    write_model(folder / "model", mhc=verify.has_hyper_connections(use_gpu))
    waves = traffic.make_waves(24, SCALE, seed=7, vocabulary=512)
    arguments = traffic.engine_arguments(folder / "model", SCALE, tp=2, dcp=2, use_gpu=use_gpu)
    sides = {}
    for gather in ("1", "0"):
        side = sides[gather] = traffic.Side()
        events = traffic.run_side(
            gather,
            arguments,
            waves,
            folder / f"gather-{gather}.log",
            use_gpu=use_gpu,
            environment={"VLLM_CKV_DEBUG": gather},
        )
        for event in events:
            side.add(event)
    return sides


def test_outputs_and_batches_are_those_without_the_gather(sides):
    found = traffic.compare(sides["1"], sides["0"])
    assert found.violations == []
    assert found.requests == 24 and found.tokens >= 24


def test_nothing_is_kept(sides):
    for gather, side in sides.items():
        assert traffic.find_leaks(f"gather {gather}", side) == []


def test_the_traffic_was_mixed(sides):
    assert traffic.find_gaps(sides["1"], sides["0"], SCALE, short_of_blocks=False) == []
