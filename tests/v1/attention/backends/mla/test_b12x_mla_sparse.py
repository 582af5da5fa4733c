# SPDX-License-Identifier: Apache-2.0
"""Builder and implementation: padding rows, graph capture, draft layers, bound caches, wrapping."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from vllm.platforms.ckv_reference import declare_torchvision_ops

declare_torchvision_ops()

from vllm.plugins.b12x_mla_sparse import register  # noqa: E402
from vllm.v1.attention.backends.mla import b12x_mla_sparse as module  # noqa: E402
from vllm.v1.attention.backends.mla.ckv_gather import geometry as g  # noqa: E402
from vllm.v1.attention.backends.mla.ckv_gather.eligibility import Reason  # noqa: E402
from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import (  # noqa: E402
    TorchReferenceKernels,
)

Stock = module.SparseMLACommonMetadataBuilder


class Layer:
    """What the builder touches of an attention layer or of an index cache."""

    def __init__(self, impl=None) -> None:
        self.impl = impl
        self.kv_cache = torch.tensor([])
        self.forward_impl = lambda q, latents: None
        self.dcp_manager = SimpleNamespace(
            query_gather=lambda q: q, combine=lambda out, lse, **kwargs: out, use_a2a=True
        )

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache.squeeze(1)


def implementation(gather) -> module.B12xMLASparseImpl:
    impl = object.__new__(module.B12xMLASparseImpl)
    impl.gather = gather
    impl.kernels = TorchReferenceKernels()
    op = SimpleNamespace(followed=[])
    op.follow = lambda name, gather, is_draft: op.followed.append((name, gather, is_draft))
    impl.indexer = SimpleNamespace(indexer_op=op, k_cache=Layer())
    return impl


@pytest.fixture
def gather(monkeypatch):
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", "1")
    register()
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=2, cp_kv_cache_interleave_size=4, use_ubatching=False
        ),
        model_config=SimpleNamespace(
            max_model_len=1000,
            hf_text_config=SimpleNamespace(index_kpool=4, index_topk=2048, num_hidden_layers=5),
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    gather = module.CkvGather(config)
    gather.geometry.freeze(g.PageGeometry(256, g.FP8_DS_MLA, 4, 4, 2))
    return gather


def builder(monkeypatch, gather, *names: str) -> module.B12xMLASparseMetadataBuilder:
    """A builder on top of a stand-in for stock's: it splits and maps rows as stock does."""

    def init(self, spec, layer_names, vllm_config, device):
        self.req_id_per_token_buffer = torch.full((64,), 0x7FFFFFF, dtype=torch.int32)

    def rows(self, common):
        real = int(common.query_start_loc_cpu[-1])
        lengths = torch.diff(common.query_start_loc_cpu)
        mapped = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
        buffer = self.req_id_per_token_buffer[: common.num_actual_tokens]
        buffer[:real] = mapped.int()
        buffer[real:] = 0
        return buffer

    def build(self, prefix, common, fast_build=False):
        return SimpleNamespace(
            num_decode_tokens=common.num_decode_tokens,
            req_id_per_token=self._build_req_id_per_token(common),
        )

    monkeypatch.setattr(Stock, "__init__", init)
    monkeypatch.setattr(Stock, "_build_req_id_per_token", rows)
    monkeypatch.setattr(Stock, "build", build)
    monkeypatch.setattr(Stock, "_init_reorder_batch_threshold", lambda *args, **kwargs: None)
    layers = gather.vllm_config.compilation_config.static_forward_context
    for name in names:
        layers.setdefault(name, Layer(implementation(gather)))
    return module.B12xMLASparseMetadataBuilder(
        None, list(names), gather.vllm_config, torch.device("cpu")
    )


def step(query_lens, seq_lens, *, decodes: int = 0, pad_rows: int = 0, pad_tokens: int = 0):
    starts = torch.tensor([0, *query_lens, *[0] * pad_rows]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([*seq_lens, *[777] * pad_rows], dtype=torch.int32)
    return SimpleNamespace(
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        is_prefilling=torch.tensor([True] * len(seq_lens) + [False] * pad_rows),
        num_actual_tokens=sum(query_lens) + pad_tokens,
        num_decode_tokens=decodes,
    )


@pytest.mark.parametrize("early", [False, True])
def test_layers_of_the_model_alone_begin_early(monkeypatch, gather, early):
    gather.early_exchange = early
    names = ["model.layers.1.self_attn.attn", "model.layers.5.self_attn.attn"]
    builder(monkeypatch, gather, *names)
    layers = gather.vllm_config.compilation_config.static_forward_context
    assert [layers[name].impl.begins_early for name in names] == [early, False]


def test_case_8_padding_rows_belong_to_no_request(monkeypatch, gather):
    made = builder(monkeypatch, gather, "model.layers.1.self_attn.attn")
    metadata = made.build(0, step([2, 1], [9, 5], decodes=1, pad_rows=2, pad_tokens=2))
    assert metadata.req_id_per_token.tolist() == [0, 0, 1, -1, -1]
    # Other builders share stock's rows and must see them as stock wrote them.
    assert made.req_id_per_token_buffer[:5].tolist() == [0, 0, 1, 0, 0]
    # A captured graph reads the same address at every replay.
    again = made.build(0, step([1], [6], decodes=1, pad_tokens=4))
    assert again.req_id_per_token.data_ptr() == metadata.req_id_per_token.data_ptr()
    assert again.req_id_per_token.tolist() == [0, -1, -1, -1, -1]


def test_padded_and_plain_batches_take_the_same_decision(monkeypatch, gather):
    made = builder(monkeypatch, gather, "model.layers.1.self_attn.attn")
    plain = made.build(0, step([20, 30], [120, 30])).ckv_plan
    padded = made.build(0, step([20, 30], [120, 30], pad_rows=3, pad_tokens=14)).ckv_plan
    for plan in (plain, padded):
        assert plan.windows[0].layout.tokens.seq_lens.tolist() == [120, 30]
    assert made.build(0, step([1, 1], [9, 5], decodes=8, pad_tokens=6)).ckv_plan is None
    assert gather.counters.ordinary == {Reason.DECODE_ONLY: 1}


def test_a_capture_never_gathers_and_the_next_step_does(monkeypatch, gather):
    made = builder(monkeypatch, gather, "model.layers.1.self_attn.attn")
    batch = step([20, 30], [120, 30])
    monkeypatch.setattr(
        Stock, "build_for_cudagraph_capture", lambda self, common: self.build(0, common)
    )
    captured = made.build_for_cudagraph_capture(batch)
    assert captured.ckv_plan is None
    assert gather.counters.ordinary == {Reason.GRAPH_CAPTURE: 1}
    # Nothing was staged for it, so a graph cannot hold an address of the gather.
    assert gather._staged is None
    assert made.build(0, batch).ckv_plan is not None
    assert made.build_for_cudagraph_capture(batch).ckv_plan is None

    def fails(self, common):
        raise ValueError("out of memory")

    monkeypatch.setattr(Stock, "build_for_cudagraph_capture", fails)
    with pytest.raises(ValueError, match="out of memory"):
        made.build_for_cudagraph_capture(batch)
    assert made.build(0, batch).ckv_plan is not None


def test_metadata_lets_go_of_a_plan_with_its_step(monkeypatch, gather):
    made = builder(monkeypatch, gather, "model.layers.1.self_attn.attn")
    metadata = made.build(0, step([20], [20]))
    plan = weakref.ref(metadata.ckv_plan)
    del metadata
    assert plan() is None


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("model.layers.4.self_attn.mla_attn.attn", False),
        ("model.layers.5.self_attn.mla_attn.attn", True),
        ("model.layers.15.mtp_block.self_attn.attn", True),
        ("model.embed", False),
    ],
)
def test_draft_layers_stay_ordinary_and_are_not_counted(monkeypatch, gather, name, draft):
    made = builder(monkeypatch, gather, name)
    plan = made.build(0, step([20], [20])).ckv_plan
    assert (plan is None) == draft
    assert gather.counters.gathered_batches == (not draft)
    assert not gather.counters.ordinary
    # The model's own layers count whoever came first.
    target = builder(monkeypatch, gather, "model.layers.3.self_attn.attn")
    assert target.build(0, step([20], [20])).ckv_plan is not None
    assert gather.counters.gathered_batches == 1


def test_a_builder_before_the_profiling_run_is_refused(monkeypatch, gather):
    gather.geometry = g.FrozenGeometry()
    with pytest.raises(RuntimeError, match=r"not frozen yet.*before a cache is bound"):
        builder(monkeypatch, gather, "model.layers.1.self_attn.attn")


def test_layers_are_wrapped_once_though_builders_are_made_twice(monkeypatch, gather):
    name = "model.layers.1.self_attn.attn"
    builder(monkeypatch, gather, name)
    layer = gather.vllm_config.compilation_config.static_forward_context[name]
    wrapped = (layer.bind_kv_cache, layer.dcp_manager.combine, layer.dcp_manager.query_gather)
    index_bind = layer.impl.indexer.k_cache.bind_kv_cache
    builder(monkeypatch, gather, name)
    assert wrapped == (
        layer.bind_kv_cache, layer.dcp_manager.combine, layer.dcp_manager.query_gather
    )  # fmt: skip
    assert layer.impl.indexer.k_cache.bind_kv_cache is index_bind
    assert layer.impl.indexer.indexer_op.followed == [(name, gather, False)] * 2


def packed(pages: int, rows: int, width: int, stride_rows: int) -> torch.Tensor:
    """A cache as vLLM binds it: (pages, 1, rows, width) bytes, pages ``stride_rows`` rows apart."""
    block = torch.zeros((pages, 1, stride_rows, width), dtype=torch.uint8)
    return block[:, :, :rows]


def test_bound_caches_must_have_the_frozen_page_and_record(monkeypatch, gather):
    name = "model.layers.1.self_attn.attn"
    builder(monkeypatch, gather, name)
    layer = gather.vllm_config.compilation_config.static_forward_context[name]
    # A trial capture binds a small cache first, the real one follows; both are checked.
    layer.bind_kv_cache(packed(2, 256, 528, 300))
    assert layer.kv_cache.shape == (2, 256, 528)
    layer.bind_kv_cache(packed(7, 256, 528, 256))
    for wrong, parts in (
        (packed(2, 64, 528, 64), ["64 tokens", "256"]),
        (packed(2, 256, 304, 256), ["304", "528", "fp8_ds_mla"]),
        (packed(2, 256, 656, 256), ["656", "528"]),
        (packed(2, 256, 528, 256)[..., ::2], ["264", "528"]),
        (torch.zeros(2, 1, 256 * 528 + 8, dtype=torch.uint8)[..., : 256 * 528].unflatten(
            2, (256, 528)), [str(256 * 528 + 8), "multiple"]),
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            layer.bind_kv_cache(wrong)
        for part in parts:
            assert part in str(error.value)
    index = layer.impl.indexer.k_cache
    index.bind_kv_cache(packed(3, 64, 132, 64))
    for wrong, part in ((packed(3, 32, 132, 32), "(3, 32, 132)"), (packed(3, 64, 68, 64), "68")):
        with pytest.raises(ValueError) as error:
            index.bind_kv_cache(wrong)
        assert part in str(error.value) and "(pages, 64, 132)" in str(error.value)
        assert "--block-size to a multiple of 256" in str(error.value)


def unbacked(pages: int, rows: int, width: int, stride: int) -> torch.Tensor:
    """A cache of any size, with pages ``stride`` bytes apart and no memory behind it."""
    return torch.empty_strided(
        (pages, 1, rows, width), (stride, stride, width, 1), dtype=torch.uint8, device="meta"
    )


def test_a_cache_beyond_int32_row_ids_is_refused_when_it_is_bound(monkeypatch, gather):
    name = "model.layers.1.self_attn.attn"
    builder(monkeypatch, gather, name)
    layer = gather.vllm_config.compilation_config.static_forward_context[name]
    most = 2**31 // 1024
    # The last row of page `most` - 1 is 2^31 - 769; one page later every row is too far.
    layer.bind_kv_cache(unbacked(most, 256, 528, 1024 * 528))
    with pytest.raises(ValueError) as error:
        layer.bind_kv_cache(unbacked(most + 1, 256, 528, 1024 * 528))
    for part in ("2,097,153 pages", "540,672 bytes", "2,147,483,903", "2,147,483,647",
                 "--gpu-memory-utilization"):  # fmt: skip
        assert part in str(error.value)


def test_an_index_cache_that_b12x_cannot_select_from_is_refused_when_it_is_bound(
    monkeypatch, gather
):
    """So no batch meets it. NVFP4 records in pages of 256 tokens, the smallest reach there is."""
    pytest.importorskip("b12x")
    pytest.importorskip("cutlass")
    from vllm.v1.attention.backends.mla.sparse_mla_kernels import b12x

    name = "model.layers.1.self_attn.attn"
    builder(monkeypatch, gather, name)
    layer = gather.vllm_config.compilation_config.static_forward_context[name]
    layer.impl.kernels = kernels = b12x.B12xKernels(TorchReferenceKernels())
    kernels.sizes = b12x.Sizes(256, 304, (), 32, 512, 2051, 1.0)
    kernels.plans = b12x.declare(kernels.sizes, torch.device("cpu"))
    index, stride = layer.impl.indexer.k_cache, 304 * 1024
    most = 2**31 // (stride // 16) + 1
    index.bind_kv_cache(unbacked(most, 64, 132, stride))
    assert index.kv_cache.shape == (most, 64, 132)
    with pytest.raises(ValueError) as error:
        index.bind_kv_cache(unbacked(most + 1, 64, 132, stride))
    for part in (f"{most + 1:,} pages", "311,296 bytes", f"{(most + 1) * stride:,} bytes",
                 "34,359,738,368", "--gpu-memory-utilization"):  # fmt: skip
        assert part in str(error.value)


def test_the_first_layer_warms_up_then_reserves_then_runs_and_others_reserve(monkeypatch, gather):
    """What to reserve is known once kernels are warm; every micro-batch has a workspace."""
    calls: list[str] = []
    impl = implementation(gather)
    impl.num_heads, impl.scale = 8, 0.1
    impl.topk_indices_buffer = torch.zeros(4, 2176, dtype=torch.int32)
    impl.indexer.n_head = 8
    impl.indexer.indexer_op.topk_tokens = 2048
    impl.indexer.indexer_op.tail_cache = SimpleNamespace(
        get_kv_cache_spec=lambda config: SimpleNamespace(block_size=4)
    )
    gather.vllm_config.scheduler_config.max_num_batched_tokens = 64
    first = iter((True, False))
    monkeypatch.setattr(gather, "freeze", lambda kernels: next(first))
    for owner, name in (
        (module.startup, "warm_up"),
        (gather, "reserve"),
        (module.startup, "run_everything_once"),
        (gather, "reserve_again"),
    ):
        monkeypatch.setattr(owner, name, lambda *args, name=name: calls.append(name))
    impl.reserve_workspace()
    assert calls == ["warm_up", "reserve", "run_everything_once"]
    impl.reserve_workspace()
    assert calls[3:] == ["reserve_again"]


def test_draft_and_target_share_one_gather_and_a_new_engine_gets_its_own(monkeypatch):
    register()

    def config(compilation):
        return SimpleNamespace(
            parallel_config=SimpleNamespace(decode_context_parallel_size=2),
            model_config=SimpleNamespace(
                max_model_len=100, hf_text_config=SimpleNamespace(index_kpool=4, index_topk=2048)
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            compilation_config=compilation,
        )

    monkeypatch.setattr(module.CkvGather, "_instance", None)
    first, second = SimpleNamespace(), SimpleNamespace()
    target = module.CkvGather.from_config(config(first))
    assert module.CkvGather.from_config(config(first)) is target
    assert module.CkvGather.from_config(config(second)) is not target


def test_stock_warm_ups_are_registered(monkeypatch):
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa

    registered = []
    for owner, name in (
        (compressor_utils, "_COMPRESSED_SLOT_MAPPING_KERNEL"),
        (indexer, "_PREPARE_UNIFORM_DECODE_KERNEL"),
        (indexer, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL"),
        (sparse_swa, "_COMPUTE_PREFILL_METADATA_KERNEL"),
    ):
        kernel = SimpleNamespace(register_warmup=lambda name=name: registered.append(name))
        monkeypatch.setattr(owner, name, kernel)
    module.register_stock_warm_ups()
    assert len(registered) == 4
