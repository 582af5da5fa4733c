# SPDX-License-Identifier: Apache-2.0
"""Whether a batch gathers all records: one pure function of host integers, no torch.

Every rank of the DCP group builds the same facts from the same schedule, so every rank decides
alike and enters, or skips, the same collectives. A fact that only one rank knows (free memory, a
local length) must therefore never become part of the decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.attention.backends.mla.ckv_gather.time_model import Costs


class Reason(Enum):
    """Why a batch gathers or does not; the value is a stable name for counters and logs."""

    ELIGIBLE = "eligible"
    DISABLED = "disabled"
    UNSUPPORTED_GEOMETRY = "unsupported_geometry"
    NO_CONTEXT_PARALLELISM = "no_context_parallelism"
    DRAFT_LAYER = "draft_layer"
    GRAPH_CAPTURE = "graph_capture"
    DUAL_BATCH_OVERLAP = "dual_batch_overlap"
    DECODE_ONLY = "decode_only"
    DECODE_TOKENS = "decode_tokens"
    NOT_ALL_PREFILLING = "not_all_prefilling"
    TOO_FEW_TOKENS = "too_few_tokens"
    TOO_MANY_REQUESTS = "too_many_requests"
    NO_GAIN = "no_gain"


@dataclass(frozen=True)
class BatchFacts:
    """What is known on the host about one batch. Padding requests and tokens are not counted."""

    num_requests: int
    """Requests that the batch split did not put on the decode path."""
    num_prefilling: int
    """Requests of them whose prompt is not yet finished before this step."""
    num_query_tokens: int
    """Query tokens of the whole batch."""
    num_decode_tokens: int
    """Query tokens that the batch split put on the decode path (MTP verification included)."""
    visible_tokens: int
    """Sum over the requests of cached plus new tokens: the records that a gather would move."""
    is_draft_layer: bool = False
    """The layer belongs to a draft (MTP) model."""
    for_graph_capture: bool = False
    """The metadata is built for a CUDA-graph capture."""
    dual_batch_overlap: bool = False
    """The step runs as overlapping micro-batches, whose collectives would interleave."""
    costs: Costs | None = None
    """Of both paths in one layer. Set only where ``gains_only`` asks for them."""

    @property
    def num_prompt_tokens(self) -> int:
        """Query tokens that would gather."""
        return self.num_query_tokens - self.num_decode_tokens


@dataclass(frozen=True)
class Limits:
    """What was configured and reserved at start."""

    enabled: bool
    """The feature flag."""
    supported_geometry: bool
    """The model has the glm5_next sparse MLA geometry."""
    dcp_world_size: int
    """Ranks that share a request."""
    min_query_tokens: int
    """A batch must have more query tokens than this (exclusive), those of decodes left out."""
    max_num_seqs: int
    """Requests for which the buffers have been sized."""
    gains_only: bool = False
    """A batch gathers only if that takes less time than the ordinary path, or fewer bytes."""
    mixed: bool = False
    """The prompts of a batch may gather while its decodes take the ordinary path."""


@dataclass(frozen=True)
class Decision:
    """The one value that query gather, combine, indexer and attention all read.

    gather: whether this batch takes the full-CKV path.
    reason: why.
    message: the same for a reader, with the numbers that decided.
    """

    gather: bool
    reason: Reason
    message: str


def decide(facts: BatchFacts, limits: Limits) -> Decision:
    """Decide whether a batch gathers. The first refusal, in the order of :class:`Reason`, counts.

    Static refusals come first, so that a run in which the feature can never work says so instead
    of naming the batch.
    """

    def refuse(reason: Reason, message: str) -> Decision:
        return Decision(False, reason, f"CKV gather not used: {message}")

    if not limits.enabled:
        return refuse(Reason.DISABLED, "VLLM_B12X_MLA_CKV_GATHER is off, see the line at start")
    if not limits.supported_geometry:
        return refuse(Reason.UNSUPPORTED_GEOMETRY, "the model has no glm5_next sparse MLA geometry")
    if limits.dcp_world_size <= 1:
        return refuse(
            Reason.NO_CONTEXT_PARALLELISM,
            f"decode_context_parallel_size is {limits.dcp_world_size}, it takes at least 2",
        )
    if facts.is_draft_layer:
        return refuse(Reason.DRAFT_LAYER, "the layer belongs to a draft model")
    if facts.for_graph_capture:
        return refuse(Reason.GRAPH_CAPTURE, "the batch is built for a CUDA-graph capture")
    if facts.dual_batch_overlap:
        return refuse(Reason.DUAL_BATCH_OVERLAP, "the step runs with dual-batch overlap")
    if facts.num_decode_tokens and facts.num_decode_tokens >= facts.num_query_tokens:
        return refuse(Reason.DECODE_ONLY, f"all {facts.num_decode_tokens} tokens are decodes")
    if facts.num_decode_tokens and not limits.mixed:
        return refuse(
            Reason.DECODE_TOKENS,
            f"{facts.num_decode_tokens} of {facts.num_query_tokens} tokens are decodes; "
            "VLLM_B12X_MLA_CKV_GATHER_MIXED=1 would let the others gather",
        )
    if facts.num_prefilling != facts.num_requests:
        return refuse(
            Reason.NOT_ALL_PREFILLING,
            f"{facts.num_prefilling} of {facts.num_requests} requests are prefilling",
        )
    if facts.num_prompt_tokens <= limits.min_query_tokens:
        return refuse(
            Reason.TOO_FEW_TOKENS,
            f"{facts.num_prompt_tokens} query tokens, it takes more than {limits.min_query_tokens}",
        )
    if facts.num_requests > limits.max_num_seqs:
        return refuse(
            Reason.TOO_MANY_REQUESTS,
            f"{facts.num_requests} requests, buffers are reserved for {limits.max_num_seqs}",
        )
    if limits.gains_only and not (facts.costs and facts.costs.gains):
        return refuse(
            Reason.NO_GAIN,
            f"{facts.num_prompt_tokens} query tokens over {facts.visible_tokens} visible tokens: "
            f"{facts.costs}",
        )
    return Decision(
        True,
        Reason.ELIGIBLE,
        f"CKV gather: {facts.num_prompt_tokens} query tokens of {facts.num_requests} requests "
        f"over {facts.visible_tokens} visible tokens"
        + (f" beside {facts.num_decode_tokens} of decodes" if facts.num_decode_tokens else ""),
    )
