# SPDX-License-Identifier: Apache-2.0
"""The decision table: every reason, every boundary, and the order of refusals."""

from dataclasses import replace

import pytest

from vllm.v1.attention.backends.mla.ckv_gather.eligibility import (
    BatchFacts,
    Limits,
    Reason,
    decide,
)
from vllm.v1.attention.backends.mla.ckv_gather.time_model import Costs

LIMITS = Limits(
    enabled=True,
    supported_geometry=True,
    dcp_world_size=4,
    min_query_tokens=16,
    max_num_seqs=32,
)
FACTS = BatchFacts(
    num_requests=2,
    num_prefilling=2,
    num_query_tokens=600,
    num_decode_tokens=0,
    visible_tokens=5000,
)

# (reason, changed facts, changed limits, numbers the message must have), in order of precedence.
REFUSALS = [
    (Reason.DISABLED, {}, {"enabled": False}, ["VLLM_B12X_MLA_CKV_GATHER"]),
    (Reason.UNSUPPORTED_GEOMETRY, {}, {"supported_geometry": False}, ["glm5_next"]),
    (Reason.NO_CONTEXT_PARALLELISM, {}, {"dcp_world_size": 1}, ["1", "2"]),
    (Reason.DRAFT_LAYER, {"is_draft_layer": True}, {}, ["draft"]),
    (Reason.GRAPH_CAPTURE, {"for_graph_capture": True}, {}, ["capture"]),
    (Reason.DUAL_BATCH_OVERLAP, {"dual_batch_overlap": True}, {}, ["overlap"]),
    (Reason.DECODE_ONLY, {"num_decode_tokens": 600}, {}, ["all 600"]),
    (Reason.DECODE_TOKENS, {"num_decode_tokens": 599}, {}, ["599 of 600"]),
    (Reason.NOT_ALL_PREFILLING, {"num_prefilling": 1}, {}, ["1 of 2"]),
    (Reason.TOO_FEW_TOKENS, {"num_query_tokens": 16}, {}, ["16 query", "more than 16"]),
    (
        Reason.TOO_MANY_REQUESTS,
        {"num_requests": 33, "num_prefilling": 33},
        {},
        ["33", "32"],
    ),
    (
        Reason.NO_GAIN,
        {"costs": Costs(9001, 9001)},
        {"gains_only": True},
        ["9001 bytes a layer", "5000 visible", "600 query"],
    ),
]


@pytest.mark.parametrize("reason, facts, limits, parts", REFUSALS, ids=lambda v: str(v)[:30])
def test_each_refusal(reason, facts, limits, parts):
    decision = decide(replace(FACTS, **facts), replace(LIMITS, **limits))
    assert not decision.gather
    assert decision.reason is reason
    for part in parts:
        assert part in decision.message


def test_every_reason_has_a_row():
    assert [row[0] for row in REFUSALS] == [r for r in Reason if r is not Reason.ELIGIBLE]


@pytest.mark.parametrize("index", range(len(REFUSALS) - 1))
def test_the_earlier_refusal_counts(index):
    (first, facts, limits, _), (_, later_facts, later_limits, _) = REFUSALS[index : index + 2]
    # The earlier row is applied last: two rows may change the same number.
    both = decide(
        replace(replace(FACTS, **later_facts), **facts),
        replace(replace(LIMITS, **later_limits), **limits),
    )
    assert both.reason is first


@pytest.mark.parametrize(
    "facts, limits",
    [
        ({}, {}),
        ({"num_query_tokens": 17}, {}),
        ({"num_requests": 32, "num_prefilling": 32}, {}),
        # Whatever a batch sees and asks, it gathers in windows.
        ({"visible_tokens": 10**9, "num_query_tokens": 10**6}, {}),
        ({"num_query_tokens": 1}, {"min_query_tokens": 0}),
        ({}, {"dcp_world_size": 2}),
        ({"costs": Costs(9000, 9001)}, {"gains_only": True}),
        # Where times are known, bytes do not count.
        ({"costs": Costs(9001, 9001, 1e-3, 2e-3)}, {"gains_only": True}),
        ({"num_decode_tokens": 583}, {"mixed": True}),
        ({"costs": Costs(9001, 9001)}, {}),
    ],
)
def test_the_last_admitted_value(facts, limits):
    decision = decide(replace(FACTS, **facts), replace(LIMITS, **limits))
    assert decision.gather
    assert decision.reason is Reason.ELIGIBLE


def test_decodes_beside_prompts_do_not_count():
    """Neither as query tokens, nor in what is said about the batch."""
    mixed = replace(LIMITS, mixed=True)
    assert "17 query tokens of 2 requests over 5000 visible tokens beside 583 of decodes" in (
        decide(replace(FACTS, num_decode_tokens=583), mixed).message
    )
    few = decide(replace(FACTS, num_decode_tokens=584), mixed)
    assert few.reason is Reason.TOO_FEW_TOKENS and "16 query tokens" in few.message
    assert decide(replace(FACTS, num_decode_tokens=600), mixed).reason is Reason.DECODE_ONLY


def test_an_empty_batch_never_gathers():
    facts = BatchFacts(0, 0, 0, 0, 0)
    assert decide(facts, replace(LIMITS, min_query_tokens=0)).reason is Reason.TOO_FEW_TOKENS


def test_times_come_before_bytes():
    costs = Costs(9000, 9001, 2e-3, 2e-3)
    decision = decide(replace(FACTS, costs=costs), replace(LIMITS, gains_only=True))
    assert decision.reason is Reason.NO_GAIN
    for part in ("9000 bytes", "2000 us gathered", "2000 us ordinary"):
        assert part in decision.message


def test_costs_that_nobody_set_are_no_gain():
    assert FACTS.costs is None
    assert decide(FACTS, replace(LIMITS, gains_only=True)).reason is Reason.NO_GAIN
