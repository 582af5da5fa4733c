# SPDX-License-Identifier: Apache-2.0
"""Rates of known GPUs against everything that was measured on two H200s."""

import csv
import json
import re
from pathlib import Path

import pytest

from vllm.entrypoints.ckv.known_rates import COLLECTIVE, GPUS, LINK_EFFICIENCY, known_rates
from vllm.v1.attention.backends.mla.ckv_gather.byte_model import ByteModel, last_gain
from vllm.v1.attention.backends.mla.ckv_gather.time_model import TimeModel, at
from vllm.v1.attention.backends.mla.ckv_gather.windows import plan_spans

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
H200 = GPUS["h200"]
NVLINK = H200.link_gbps * LINK_EFFICIENCY


def rates(gpu=H200, **changes):
    sizes = {"local_heads": 32, "index_heads": 32, "world": 2, "pool_size": 4, "link_gbps": NVLINK}
    return known_rates(gpu, **(sizes | changes))


# Bytes that one of two ranks received, and microseconds: records of 32,768 and 131,072 tokens, 512
# candidates, the queries and the outputs (a reduce-scatter) of 4,096 rows of 64 heads.
COLLECTIVES = [
    (32_768 * 561 // 2, 88),
    (131_072 * 561 // 2, 201),
    (4096 * 512 * 8, 118),
    (4096 * 32 * 1024, 593),
    (4096 * 32 * 1024, 634),
]


@pytest.mark.parametrize(("received", "measured"), COLLECTIVES)
def test_collectives_over_nvlink(received, measured):
    predicted = COLLECTIVE + received * rates().byte
    assert predicted * 1e6 == pytest.approx(measured, rel=0.06)


def kernels(name):
    """(sizes, microseconds) of each measurement of a kernel at 4,096 rows."""
    with (RESULTS / "kernels_h200.csv").open() as file:
        for row in csv.DictReader(file):
            sizes = {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", row["shape"])}
            if row["kernel"] == name and sizes.get("T") == 4096:
                yield sizes, float(row["measured_us"])


def test_attention_on_either_path():
    found = 0
    for name, of in (("attend", "own_heads"), ("attend without scratch", "all_heads")):
        for sizes, measured in kernels(name):
            world = 1 if of == "own_heads" else 2
            given = rates(local_heads=sizes["H"] // world)
            predicted = sizes["T"] * at(getattr(given, of), sizes["W"])
            assert predicted * 1e6 == pytest.approx(measured, rel=0.08)
            found += 1
    assert found == 8


def test_selection():
    (few, many), given = kernels("select_pools"), rates()
    for sizes, measured in (few, many):
        rows = at(given.gathered, 4096) - at(given.gathered, 0) - (14.3 + 25.2 + 80) * 1e-6
        predicted = rows + sizes["T"] * sizes["pools"] * given.pair
        assert predicted * 1e6 == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(("world", "merges"), [(2, 1), (3, 2), (4, 2), (8, 4)])
def test_a_merge_takes_as_long_as_its_candidates_are_many(world, merges):
    """512 of every rank, padded; 4,096 rows of two ranks' take 94.1 us. Heads do not change."""
    heads = 48 // world
    given, two = rates(world=world, local_heads=heads), rates(world=2, local_heads=24)
    more = at(given.ordinary, 4096) - at(two.ordinary, 4096)
    assert more == pytest.approx((merges - 1) * 94.1e-6, abs=1e-12)
    # A window is merged with those before it, whatever the ranks.
    assert given.merged_row == rates(world=2, local_heads=heads).merged_row


def model(heads, link_gbps=NVLINK, gpu=H200):
    sizes = ByteModel(2, 4, 4, 528, heads // 2, 512, True)
    return TimeModel(sizes, rates(gpu, local_heads=heads // 2, link_gbps=link_gbps))


def layer(heads, path):
    """Mean microseconds of a layer over the chunks of 4,096 of a prompt of 32,320 tokens."""
    total, ends = 0.0, [*range(4096, 32_320, 4096), 32_320]
    for end in ends:
        rows = end - (end - 1) // 4096 * 4096
        spans = plan_spans([end], [rows], capacity=65_536, granule=8704, num_rows=rows)
        total += getattr(model(heads).costs([end], [rows], spans), f"{path}_seconds")
    return total / len(ends) * 1e6


@pytest.mark.parametrize(
    ("name", "mode", "heads", "path"),
    [("slice_h32", "ours_dcp", 32, "ordinary"), ("slice_h32", "ours_ckv", 32, "gathered")],
)
def test_layers_of_the_real_engine(name, mode, heads, path):
    """Within 15 %: kernels of a DSA layer, the collectives among them, without its projections.

    The profile is older than the kernel of attention without scratch, which then took 6,524 us for
    32 heads of 4,096 rows.
    """
    rows = json.loads((RESULTS / "layer_times_h200x2.json").read_text())
    (profile,) = (
        row
        for row in rows
        if (row["model"], row["mode"]) == (name, mode) and "p2p" not in row.get("link", "")
    )
    times = profile["microseconds"]
    measured = sum(times[kind] for kind in ("pack", "exchange", "selection", "attention"))
    if path == "ordinary":
        now = {sizes["H"]: us for sizes, us in kernels("attend without scratch")}
        measured -= profile["kernels"]["_attend_kernel"] * (1 - now[heads] / 6524)
    assert layer(heads, path) == pytest.approx(measured, rel=0.15)


def test_other_gpus_are_scaled():
    fast, slow = rates(), rates(GPUS["gb10"], link_gbps=12.5)
    for name in ("byte", "pair", "token"):
        assert getattr(slow, name) > getattr(fast, name)
    for name in ("ordinary", "gathered", "own_heads"):
        assert at(getattr(slow, name), 100) > at(getattr(fast, name), 100)
    # b12x has one kernel: N times the heads for 1/N of the tokens take as long.
    assert at(slow.all_heads, 100) == pytest.approx(2 * at(slow.own_heads, 100))


def test_the_slower_the_link_the_more_bytes_decide():
    def spans(context):
        return plan_spans([context], [256], capacity=10**7, granule=8704, num_rows=256)

    def ends(link_gbps):
        given = model(64, link_gbps)
        return last_gain(lambda n: given.costs([n], [256], spans(n)).gains, 256)

    sizes = model(64).bytes
    in_bytes = last_gain(lambda n: sizes.gathered([n]) < sizes.ordinary(256), 256)
    assert in_bytes < ends(24.7) < ends(244)
    assert ends(0.1) == pytest.approx(in_bytes, rel=0.01)
    # That is where it ends: one token more does not pay.
    slow, last = model(64, 24.7), ends(24.7)
    assert slow.costs([last], [256], spans(last)).gains
    assert not slow.costs([last + 1], [256], spans(last + 1)).gains
