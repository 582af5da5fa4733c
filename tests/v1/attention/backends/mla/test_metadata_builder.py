# SPDX-License-Identifier: Apache-2.0
"""Our builder on top of vLLM's own: verification, draft layers, graph capture, padded batches.

Nothing of stock is replaced but its process groups and the Triton kernel that maps rows to
requests, so the split into decodes and prefills and the lifetime of every tensor are vLLM's.
Speculation of two tokens, so that three query tokens are a decode to vLLM.
"""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from vllm.platforms.ckv_reference import declare_torchvision_ops

declare_torchvision_ops()

from vllm.model_executor.layers.attention import sparse_mla_attention as stock  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.ops import metadata as metadata_ops  # noqa: E402
from vllm.v1.kv_cache_interface import MLAAttentionSpec  # noqa: E402
from vllm.v1.worker import workspace as stock_workspace  # noqa: E402

from vllm.plugins.b12x_mla_sparse import register  # noqa: E402
from vllm.v1.attention.backends.mla import b12x_mla_sparse as module  # noqa: E402
from vllm.v1.attention.backends.mla.ckv_gather import geometry as g  # noqa: E402
from vllm.v1.attention.backends.mla.ckv_gather.eligibility import Reason  # noqa: E402
from vllm.v1.attention.backends.mla.ckv_gather.workspace import WorkspacePlan  # noqa: E402

TARGET, DRAFT = "model.layers.3.self_attn.attn", "model.layers.4.mtp_block.self_attn.attn"
NUM_SEQS, BUDGET, SPECULATIVE, WORLD = 8, 64, 2, 2


class Layer:
    """What stock's builder and ours touch of an attention layer or of an index cache."""

    def __init__(self, impl=None) -> None:
        self.impl = impl
        self.kv_cache = torch.tensor([])
        self.prefill_backend = None
        self.dcp_manager = object.__new__(stock.MLADCPManager)
        self.dcp_manager.query_gather = lambda query: query
        self.dcp_manager.combine = lambda out, lse, **kwargs: out
        self.dcp_manager.use_a2a = True

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache.squeeze(1)


def map_rows(starts, out, num_mapped: int, num_tokens: int) -> torch.Tensor:
    """Stock's ``compute_token_to_req_indices``: the request of each row, 0 for padding rows."""
    rows = torch.arange(num_mapped)
    out[:num_mapped] = torch.searchsorted(starts[1:].contiguous(), rows, right=True, out_int32=True)
    out[num_mapped:num_tokens] = 0
    return out[:num_tokens]


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", "1")
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER_MIN_TOKENS", "0")
    register()
    group = SimpleNamespace(world_size=WORLD, rank_in_group=0)
    monkeypatch.setattr(stock, "get_dcp_group", lambda: group)
    monkeypatch.setattr(metadata_ops, "compute_token_to_req_indices", map_rows)
    # Without an accelerator torch pins no memory; the reference platform says so to vLLM.
    monkeypatch.setattr(stock, "PIN_MEMORY", torch.cuda.is_available())
    text = SimpleNamespace(
        index_kpool=4,
        index_topk=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        q_lora_rank=128,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=0,
        v_head_dim=64,
    )
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=WORLD,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=4,
            use_ubatching=False,
        ),
        model_config=SimpleNamespace(
            max_model_len=1000,
            dtype=torch.bfloat16,
            hf_text_config=text,
            model_arch_config=SimpleNamespace(total_num_attention_heads=8),
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=NUM_SEQS, max_num_batched_tokens=BUDGET),
        cache_config=SimpleNamespace(block_size=256, cache_dtype="fp8_ds_mla"),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=SPECULATIVE, parallel_drafting=False
        ),
        compilation_config=SimpleNamespace(static_forward_context={}),
        kv_transfer_config=None,
        use_v2_model_runner=True,
    )


@pytest.fixture
def gather(config):
    gather = module.CkvGather(config)
    gather.geometry.freeze(g.PageGeometry(256, g.FP8_DS_MLA, 4, 4, WORLD))
    return gather


def make_builder(config, gather, *names: str) -> module.B12xMLASparseMetadataBuilder:
    for name in names:
        impl = object.__new__(module.B12xMLASparseImpl)
        impl.gather, impl.indexer = gather, None
        config.compilation_config.static_forward_context.setdefault(name, Layer(impl))
    spec = MLAAttentionSpec(
        block_size=256,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
    )
    spec = module.B12xMLASparseBackend.customize_spec(spec)
    return module.B12xMLASparseMetadataBuilder(spec, list(names), config, torch.device("cpu"))


class Runner:
    """Makes a step's metadata in tensors that live as long as the runner's, as vLLM does."""

    def __init__(self) -> None:
        self.starts = torch.zeros(NUM_SEQS + 1, dtype=torch.int32)
        self.lengths = torch.zeros(NUM_SEQS, dtype=torch.int32)
        self.table = torch.zeros((NUM_SEQS, 4), dtype=torch.int32)
        self.slots = torch.zeros(BUDGET, dtype=torch.int64)

    def step(
        self,
        queries: list[int],
        lengths: list[int],
        prefilling: bool | list[bool],
        *,
        pad_rows: int = 0,
        pad_tokens: int = 0,
    ) -> CommonAttentionMetadata:
        rows = len(queries) + pad_rows
        flags = [prefilling] * len(queries) if isinstance(prefilling, bool) else prefilling
        starts = torch.tensor([0, *queries, *[0] * pad_rows]).cumsum(0).to(torch.int32)
        self.starts[: rows + 1] = starts
        # Stale lengths of an earlier step lie behind the requests.
        self.lengths.fill_(777)
        self.lengths[: len(queries)] = torch.tensor(lengths)
        return CommonAttentionMetadata(
            query_start_loc=self.starts[: rows + 1],
            query_start_loc_cpu=starts,
            seq_lens=self.lengths[:rows],
            num_reqs=rows,
            num_actual_tokens=sum(queries) + pad_tokens,
            max_query_len=max(queries),
            max_seq_len=max(lengths),
            block_table_tensor=self.table[:rows],
            slot_mapping=self.slots[: sum(queries) + pad_tokens],
            is_prefilling=torch.tensor([*flags, *[False] * pad_rows]),
            seq_lens_cpu_upper_bound=self.lengths[:rows].clone(),
        )


def tensors(metadata) -> dict[str, torch.Tensor]:
    values = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("threshold", [1, 1 + SPECULATIVE])
@pytest.mark.parametrize(
    ("queries", "lengths"), [([3, 3], [120, 90]), ([3], [120]), ([3, 1, 2], [50, 60, 70])]
)
def test_verification_is_ordinary_on_either_side_of_the_split(
    config, gather, threshold, queries, lengths
):
    """vLLM may route a query of three tokens as a decode or as a short prefill."""
    builder = make_builder(config, gather, TARGET)
    assert builder.reorder_batch_threshold == 1 + SPECULATIVE
    builder.reorder_batch_threshold = threshold
    metadata = builder.build(0, Runner().step(queries, lengths, False))
    assert (metadata.num_decode_tokens == sum(queries)) == (threshold > 1)
    assert metadata.ckv_plan is None
    reason = Reason.DECODE_ONLY if threshold > 1 else Reason.NOT_ALL_PREFILLING
    assert gather.counters.ordinary == {reason: 1}


@pytest.mark.parametrize("threshold", [1, 1 + SPECULATIVE])
def test_a_prompt_beside_verification_is_ordinary(config, gather, threshold):
    builder = make_builder(config, gather, TARGET)
    builder.reorder_batch_threshold = threshold
    batch = Runner().step([3, 40], [120, 40], [False, True])
    assert builder.build(0, batch).ckv_plan is None
    # The same prompt alone gathers.
    assert builder.build(0, Runner().step([40], [40], True)).ckv_plan is not None


@pytest.mark.parametrize("threshold", [1, 1 + SPECULATIVE])
def test_a_prompt_gathers_beside_verification_if_it_may(config, monkeypatch, threshold):
    """Verification counts as decode where vLLM's split says so; else all rows stay ordinary."""
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER_MIXED", "1")
    gather = module.CkvGather(config)
    gather.geometry.freeze(g.PageGeometry(256, g.FP8_DS_MLA, 4, 4, WORLD))
    builder = make_builder(config, gather, TARGET)
    builder.reorder_batch_threshold = threshold
    batch = Runner().step([1, 3, 40], [50, 120, 60], [False, False, True], pad_rows=1, pad_tokens=2)
    metadata = builder.build(0, batch)
    if threshold == 1:
        assert metadata.ckv_plan is None
        assert gather.counters.ordinary == {Reason.NOT_ALL_PREFILLING: 1}
        return
    (window,) = metadata.ckv_plan.windows
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, 4)
    assert (window.requests, window.rows) == (slice(2, 3), slice(4, 46))
    assert metadata.ckv_plan.first_row == 4
    counters = gather.counters
    assert (counters.gathered_batches, counters.mixed_batches) == (1, 1)
    assert (counters.gathered_query_tokens, counters.gathered_visible_tokens) == (40, 60)
    # Verification alone never gathers.
    alone = builder.build(0, Runner().step([1, 3], [51, 123], False))
    assert alone.ckv_plan is None and gather.counters.ordinary == {Reason.DECODE_ONLY: 1}


def test_a_draft_layer_is_ordinary_where_the_model_gathers(config, gather):
    target, draft = (make_builder(config, gather, name) for name in (TARGET, DRAFT))
    batch = Runner().step([20, 30], [120, 30], True)
    assert target.build(0, batch).ckv_plan is not None
    for metadata in (
        draft.build(0, batch),
        draft.build_for_drafting(batch, 0),
        draft.build_for_drafting(Runner().step([1, 1], [121, 31], False), 1),
    ):
        assert metadata.ckv_plan is None
        # Its caches are cut over the ranks like the model's.
        assert draft.dcp_world_size == WORLD and metadata.cp_kv_cache_interleave_size == 4
    assert gather.counters.gathered_batches == 1 and not gather.counters.ordinary


@pytest.mark.parametrize("names", [(TARGET, DRAFT), (DRAFT, TARGET)])
def test_a_draft_layer_in_the_model_s_group_keeps_nobody_from_gathering(config, gather, names):
    """vLLM builds once for layers that are alike; the draft layer gets the model's metadata."""
    builder = make_builder(config, gather, *names)
    # The draft model's own builder comes second, and the draft layer is attached again.
    make_builder(config, gather, DRAFT)
    assert builder.build(0, Runner().step([20, 30], [120, 30], True)).ckv_plan is not None
    assert gather.counters.gathered_batches == 1
    layers = config.compilation_config.static_forward_context
    for name, draft in ((TARGET, False), (DRAFT, True)):
        assert layers[name].impl.is_draft == draft
        manager = layers[name].dcp_manager
        for collective in (manager.query_gather, manager.combine):
            assert isinstance(collective, module.OrdinaryOnly) != draft


def test_an_implementation_knows_its_ranks_before_it_is_initialised(monkeypatch):
    """A draft layer's as well: vLLM sets them on every implementation that it makes."""
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "get_dcp_world_size_and_rank", lambda enabled: (WORLD, 1))
    impl = module.B12xMLASparseImpl.__new__(module.B12xMLASparseImpl)
    assert (impl.dcp_world_size, impl.dcp_rank) == (WORLD, 1)
    assert impl.need_to_return_lse_for_decode


@pytest.mark.parametrize("name", [TARGET, DRAFT])
def test_updates_keep_every_address(config, gather, name):
    """A graph that was captured over a step's metadata reads the next step's at its addresses."""
    builder, runner = make_builder(config, gather, name), Runner()
    before = tensors(builder.build_for_cudagraph_capture(runner.step([3] * 4, [9] * 4, False)))
    values = {key: tensor.data_ptr() for key, tensor in before.items()}
    assert {"req_id_per_token", "block_table", "query_start_loc", "slot_mapping"} <= set(values)
    for queries, lengths in (([3] * 4, [50, 9, 7, 12]), ([3, 3], [51, 10])):
        rows = 4 - len(queries)
        batch = runner.step(queries, lengths, False, pad_rows=rows, pad_tokens=3 * rows)
        after = tensors(builder.build(0, batch))
        assert {key: tensor.data_ptr() for key, tensor in after.items()} == values
        assert {key: after[key].shape for key in after} == {k: before[k].shape for k in before}
    # The captured tensors show the last step: its padding rows belong to nobody.
    assert before["req_id_per_token"].tolist() == [0] * 3 + [1] * 3 + [-1] * 6


@pytest.fixture
def workspace(monkeypatch, gather):
    """The gather's buffers, as the profiling run reserves and locks them."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    stock_workspace.reset_workspace_manager()
    stock_workspace.init_workspace_manager(torch.device("cpu"))
    gather.workspace = WorkspacePlan.from_geometry(
        gather.geometry.get(), gather.max_visible_tokens, NUM_SEQS
    )
    gather.workspace.reserve()
    gather._staging(torch.device("cpu"))
    stock_workspace.lock_workspace()
    yield stock_workspace.current_workspace_manager()._current_workspaces[0]
    stock_workspace.reset_workspace_manager()


def test_a_capture_holds_nothing_of_the_gather(config, gather, workspace):
    builder, runner = make_builder(config, gather, TARGET), Runner()
    ring, tables = gather._staged
    theirs = {
        tensor.untyped_storage().data_ptr()
        for owner in (ring, tables)
        for tensor in vars(owner).values()
        if isinstance(tensor, torch.Tensor)
    } | {workspace.untyped_storage().data_ptr()}
    assert len(theirs) >= 3
    # A batch of prompts, which would gather if it were served.
    batch = runner.step([20, 30], [120, 30], True)
    for again in (False, True):
        captured = builder.build_for_cudagraph_capture(batch)
        assert captured.ckv_plan is None
        held = {tensor.untyped_storage().data_ptr() for tensor in tensors(captured).values()}
        assert not held & theirs
        # Serving in between gathers, out of the bytes that were there before.
        plan = builder.build(0, batch).ckv_plan
        table = plan.windows[0].layout.page_table
        assert table.untyped_storage().data_ptr() in theirs
        assert gather.counters.gathered_batches == 1 + again
    assert gather.counters.ordinary == {Reason.GRAPH_CAPTURE: 2}


def test_a_padded_decode_batch_is_ordinary_and_its_padding_reads_nothing(config, gather):
    builder = make_builder(config, gather, TARGET)
    batch = Runner().step([1, 1], [9, 5], False, pad_rows=2, pad_tokens=2)
    metadata = builder.build(0, batch)
    assert metadata.ckv_plan is None
    assert metadata.req_id_per_token.tolist() == [0, 1, -1, -1]
    assert gather.counters.ordinary == {Reason.DECODE_ONLY: 1}


def test_a_padded_batch_of_prompts_gathers_its_requests_alone(config, gather):
    builder = make_builder(config, gather, TARGET)
    plain = builder.build(0, Runner().step([20, 30], [120, 30], True))
    padded = builder.build(0, Runner().step([20, 30], [120, 30], True, pad_rows=3, pad_tokens=14))
    for metadata in (padded, plain):
        (window,) = metadata.ckv_plan.windows
        assert window.layout.tokens.seq_lens.tolist() == [120, 30]
    assert padded.req_id_per_token.tolist() == [0] * 20 + [1] * 30 + [-1] * 14
    assert gather.counters.gathered_query_tokens == 100
    assert gather.counters.gathered_visible_tokens == 300


def test_a_draft_layer_with_a_geometry_of_its_own_is_refused(config, gather):
    """All layers of a process have one geometry; the message has both."""
    make_builder(config, gather, TARGET, DRAFT)
    layer = config.compilation_config.static_forward_context[DRAFT]
    layer.bind_kv_cache(torch.zeros((2, 1, 256, 528), dtype=torch.uint8))
    for rows, width, words in (
        (512, 528, "pages of 512 tokens, the frozen page_size is 256"),
        (256, 304, "records of 304 bytes, the frozen format fp8_ds_mla has 528 bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            layer.bind_kv_cache(torch.zeros((2, 1, rows, width), dtype=torch.uint8))
