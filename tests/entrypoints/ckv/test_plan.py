# SPDX-License-Identifier: Apache-2.0
"""``vllm-ckv plan``: sizes against vLLM's own functions and the runtime's, and what people see."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm.entrypoints.ckv import cli
from vllm.entrypoints.ckv import plan as p
from vllm.entrypoints.ckv.output import UsageError, size

MODEL = Path(__file__).parent / "models" / "flash_slice"


@pytest.fixture(scope="module")
def sizes():
    return p.read_model(str(MODEL))


def make(sizes, gpu="rtx-pro-6000", **changes):
    arguments = {
        "tp": 4,
        "dcp": 4,
        "max_model_len": 524_288,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 8192,
    }
    return p.make_plan(sizes, p.GPUS[gpu], **(arguments | changes))


def test_reads_the_layer_sizes(sizes):
    assert (sizes.attention_layers, sizes.state_layers, sizes.heads) == (2, 6, 64)
    assert (sizes.pool_size, sizes.index_topk, sizes.state_heads) == (4, 2048, 64)


def test_a_multimodal_configuration_and_the_file_itself_are_read_alike(sizes, tmp_path):
    inner = json.loads((MODEL / "config.json").read_text())
    outer = {"model_type": "glm5_next", "text_config": inner}
    (tmp_path / "any.json").write_text(json.dumps(outer))
    assert replace(p.read_model(str(tmp_path / "any.json")), name=sizes.name) == sizes


@pytest.mark.parametrize(("tp", "page"), [(1, 8704), (2, 4352), (4, 2304), (8, 1280)])
def test_pages_of_the_real_layer_sizes(sizes, tp, page):
    assert p.vllm_page_size(sizes, tp=tp, family=120) == page


def vllms_page(monkeypatch, sizes, tp, pools, block_size, spec):
    """What vLLM's own alignment gives for the same sizes."""
    import torch

    from vllm.platforms.ckv_reference import declare_torchvision_ops

    declare_torchvision_ops()
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms.interface import Platform

    from vllm.v1.attention.backends.mla.b12x_mla_sparse import B12xMLASparseBackend

    class Index:
        @staticmethod
        def get_name():
            return "INDEX"

        @staticmethod
        def get_supported_kernel_block_sizes():
            return [sizes.pool_size * n for n in pools]

        @classmethod
        def supports_block_size(cls, block_size):
            return any(block_size % n == 0 for n in cls.get_supported_kernel_block_sizes())

    class Model:
        @staticmethod
        def get_mamba_state_shape_from_config(config):
            return MambaStateShapeCalculator.kda_state_shape(
                tp,
                sizes.state_heads,
                sizes.state_dim,
                conv_kernel_size=sizes.state_kernel,
                num_spec=spec,
            )

        @staticmethod
        def get_mamba_state_dtype_from_config(config):
            return torch.bfloat16, torch.float32

    backends = [B12xMLASparseBackend, Index]
    monkeypatch.setattr(Platform, "_find_non_ssm_backends", lambda config: backends)
    monkeypatch.setattr(ModelRegistry, "resolve_model_cls", lambda *a, **k: (Model, ""))
    monkeypatch.setattr("vllm.config.vllm.set_current_vllm_config", lambda c: _nothing())
    cache = SimpleNamespace(
        cache_dtype="fp8_ds_mla",
        block_size=block_size,
        user_specified_block_size=block_size is not None,
        mamba_cache_mode="none",
        mamba_page_size_padded=None,
        kv_cache_dtype_skip_layers=[],
    )
    config = SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(
            use_mla=True,
            is_hybrid=True,
            architecture="",
            get_num_kv_heads=lambda parallel: 1,
            get_head_size=lambda: 512,
        ),
        parallel_config=None,
    )
    Platform.update_block_size_for_backend(config)
    return cache.block_size


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return False


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(("family", "pools"), [(120, (64,)), (90, (32, 64))])
@pytest.mark.parametrize("block_size", [None, 256, 2304, 16384])
@pytest.mark.parametrize("spec", [0, 3])
def test_pages_are_those_of_vllms_alignment(
    monkeypatch, sizes, tp, family, pools, block_size, spec
):
    mine = p.vllm_page_size(
        sizes, tp=tp, family=family, block_size=block_size, speculative_tokens=spec
    )
    assert mine == vllms_page(monkeypatch, sizes, tp, pools, block_size, spec)


@pytest.mark.parametrize(("tp", "page"), [(2, 4352), (4, 2304), (8, 1280)])
@pytest.mark.parametrize("gpu", ["h200", "rtx-pro-6000"])
def test_pages_of_the_real_model_hold_whole_index_pages_on_every_gpu(sizes, gpu, tp, page):
    assert make(sizes, gpu=gpu, tp=tp, dcp=2).page_tokens == page


def test_sizes_are_those_of_the_runtime(sizes):
    from vllm.v1.attention.backends.mla.ckv_gather.geometry import FP8_DS_MLA, PageGeometry
    from vllm.v1.attention.backends.mla.ckv_gather.workspace import WorkspacePlan

    plan = make(sizes)
    # 131,328 records/rank at a page of 2,304.
    assert plan.capacity_records == 131_328
    workspace = WorkspacePlan.from_geometry(PageGeometry(2304, FP8_DS_MLA, 4, 4, 4), 524_288, 32)
    assert plan.workspace_bytes - plan.scratch_bytes == workspace.num_bytes
    assert plan.kv_block_bytes == 2 * 2304 * 561
    # What b12x takes in ordinary batches is not given up for the gather.
    more = plan.workspace_bytes + plan.staging_bytes - plan.kernel_bytes
    assert plan.kernels == "b12x" and plan.kernel_bytes > 0
    assert plan.kv_tokens_given_up == -(-more // plan.kv_block_bytes) * 2304 * 4


@pytest.mark.parametrize("max_tokens", [9216, 524_288])
def test_a_shared_selection_needs_its_bytes_only_where_others_do_not_have_them(sizes, max_tokens):
    """512 ids of 8,192 rows are 16 MiB; they come after the index keys, before the records."""
    plain, shared = (
        make(sizes, gpu="b200", max_tokens=max_tokens, shard_selection=share)
        for share in (False, True)
    )
    # Index keys twice, as records of 132 bytes for each four tokens and as pages.
    index = 16 * 2**20 + 2 * 33 * max_tokens
    assert shared.workspace_bytes >= max(plain.workspace_bytes, index)
    assert (shared.workspace_bytes > plain.workspace_bytes) == (max_tokens == 9216)


def test_a_selection_is_shared_where_the_rates_say_so(sizes):
    plain, shared = (make(sizes, gpu="h200", shard_selection=switch) for switch in (False, True))
    assert {row.selection_shares for row in plain.rows} == {1}
    # Over the first chunk nothing is gained, over the longest context most.
    assert [row.selection_shares for row in shared.rows] == sorted(
        row.selection_shares for row in shared.rows
    )
    assert shared.rows[0] == plain.rows[0]
    one, other = plain.rows[-1], shared.rows[-1]
    assert other.selection_shares == 4 and other.ckv_seconds < one.ckv_seconds
    # Of 8,192 rows those of three ranks, 512 ids each.
    ids = 3 * 8192 // 4 * 512 * 4
    assert other.ckv_bytes == one.ckv_bytes + sizes.attention_layers * ids
    assert shared.break_even_seconds > plain.break_even_seconds
    assert shared.break_even_bytes < plain.break_even_bytes
    assert "shares" in p.describe(shared) and "shares" not in p.describe(plain)


def test_beside_decodes_the_ordinary_path_costs_less(sizes):
    alone, mixed = (make(sizes, gpu="h200", mixed=switch) for switch in (False, True))
    for one, other in zip(alone.rows, mixed.rows, strict=True):
        assert (one.ckv_bytes, one.dcp_bytes) == (other.ckv_bytes, other.dcp_bytes)
        assert one.ckv_seconds == other.ckv_seconds and one.dcp_seconds > other.dcp_seconds
    assert alone.break_even_seconds > mixed.break_even_seconds > 0
    assert alone.break_even_bytes == mixed.break_even_bytes
    assert alone.workspace_bytes == mixed.workspace_bytes
    assert "GB/s, beside decodes" in p.describe(mixed)
    assert "beside decodes\n" not in p.describe(alone)


@pytest.mark.parametrize("gpu", ["b200", "h200", "rtx-pro-6000"])
def test_an_early_exchange_has_memory_of_its_own_and_moves_the_context_alone(sizes, gpu):
    plain, early = (make(sizes, gpu=gpu, early_exchange=switch) for switch in (False, True))
    # Four ranks' records and a page of them, beside what lies in the same bytes otherwise, and keys
    # twice: as they come, and in pages.
    records = (4 * early.capacity_records + early.page_tokens) * 528
    keys = 4 * early.capacity_records // 4 * 2 * 132
    assert records < early.workspace_bytes <= plain.workspace_bytes + records + keys
    chunk = plain.rows[0].context_tokens
    for one, other in zip(plain.rows, early.rows, strict=True):
        assert one.ckv_bytes - other.ckv_bytes == sizes.attention_layers * 3 * chunk // 4 * 561
    # It gains up to longer contexts, by the chunk in bytes.
    plain, early = (
        make(sizes, gpu=gpu, max_num_batched_tokens=512, early_exchange=switch)
        for switch in (False, True)
    )
    further = early.break_even_bytes - plain.break_even_bytes
    assert early.break_even_bytes < early.max_model_len
    assert further == pytest.approx(512, abs=16)
    assert early.break_even_seconds > plain.break_even_seconds > 512
    windows = [make(sizes, max_tokens=9216, early_exchange=switch).rows for switch in (False, True)]
    assert windows[0][1:] == windows[1][1:] and windows[0][1].windows > 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_num_batched_tokens": 4096}, "2,304 of 4,096;\n--max-num-batched-tokens 4640 makes"),
        ({"max_num_batched_tokens": 4640}, None),
        (
            {"max_num_batched_tokens": 4640, "speculative_tokens": 3},
            "4,608 of 4,640, 2,304 beside more than 32 tokens of decodes;\n"
            "--max-num-batched-tokens 4736 makes that 4,608 beside up to 128 tokens of decodes",
        ),
        ({"max_num_batched_tokens": 4096, "tp": 2, "dcp": 2}, "2,176 of 4,096 on average;\n"),
    ],
)
def test_a_budget_that_pages_do_not_fill_is_remarked_on(sizes, changes, said):
    plan = make(sizes, **changes)
    page = f"prefix caching cuts chunks at pages of {plan.page_tokens:,} tokens: "
    text = p.describe(plan)
    assert (page in text) == (plan.chunks is not None) == (said is not None)
    if said is not None:
        assert page + said in text
    # Without KDA layers there is no state to cache.
    assert make(replace(sizes, state_layers=0), block_size=2304, **changes).chunks is None


def test_smaller_records(sizes):
    plan = make(sizes, kv_cache_dtype="nvfp4_ds_mla")
    assert plan.page_tokens == 2304
    # Whole records of 304 and whole index pages of 8,448 bytes: multiples of 160,512.
    assert plan.kv_block_bytes == 10 * 160_512 >= 2 * 2304 * 337 > 9 * 160_512
    assert plan.rows[0].ckv_bytes == 2 * 3 * 8192 // 4 * 337
    # With one layer a block still has to hold a KDA state.
    one = replace(sizes, attention_layers=1)
    assert p.block_bytes(one, 2304, p.RECORDS["nvfp4_ds_mla"]) == 8 * 160_512 >= 2304 * 512
    # A single index page needs no step of its own.
    assert p.block_bytes(one, 256, p.RECORDS["nvfp4_ds_mla"]) == -(-256 * 512 // 304) * 304


@pytest.mark.parametrize("heads", [4, 16, 64, 80, 128, 256])
def test_hopper_scratch_is_the_providers(monkeypatch, sizes, heads):
    triton = pytest.importorskip("vllm.v1.attention.backends.mla.sparse_mla_kernels.triton")
    from vllm.v1.attention.backends.mla.ckv_gather.geometry import FP8_DS_MLA, PageGeometry
    from vllm.v1.attention.backends.mla.ckv_gather.workspace import KernelScratch, WorkspacePlan

    monkeypatch.setattr(triton, "_flashmla", lambda: object())
    plan = make(replace(sizes, heads=2 * heads), gpu="h200", tp=2, dcp=2)
    theirs = triton.TritonKernels().scratch_shapes(
        max_records=2 * plan.capacity_records,
        max_tokens=8192,
        num_heads=heads,
        width=p.list_width(sizes),
    )
    assert bool(theirs) == (heads <= 128) == bool(plan.scratch_bytes)
    geometry = PageGeometry(plan.page_tokens, FP8_DS_MLA, 4, 4, 2)
    workspace = WorkspacePlan.from_geometry(geometry, 524_288, 32, KernelScratch(tuple(theirs)))
    assert plan.workspace_bytes == workspace.num_bytes
    assert ("of it because of FlashMLA" in p.describe(plan)) == (heads <= 128)


def test_lists_are_as_wide_as_vllms(sizes):
    from vllm.platforms.ckv_reference import declare_torchvision_ops

    declare_torchvision_ops()
    from vllm.models.glm5next.common.model import get_sparse_topk_buffer_width

    for topk, pool in ((2048, 4), (512, 4), (1984, 1), (128, 8)):
        config = SimpleNamespace(index_topk=topk, index_kpool=pool)
        mine = p.list_width(replace(sizes, index_topk=topk, pool_size=pool))
        assert mine == get_sparse_topk_buffer_width(config)


class Shared(SimpleNamespace):
    """In place of the provider that b12x shares operations with."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def test_what_b12x_takes_is_what_it_asks_for(monkeypatch, sizes):
    pytest.importorskip("b12x")
    import torch

    from vllm.v1.attention.backends.mla.ckv_gather.geometry import FP8_DS_MLA, PageGeometry
    from vllm.v1.attention.backends.mla.ckv_gather.workspace import KernelScratch, WorkspacePlan
    from vllm.v1.attention.backends.mla.sparse_mla_kernels import b12x as provider

    monkeypatch.setattr(provider.B12xKernels, "_prepare", lambda self, device: None)
    monkeypatch.setattr(provider, "compile_own", lambda sizes, device: None)
    plan = make(sizes)
    assert plan.kernels == "b12x"
    kernels = provider.B12xKernels(Shared())
    kernels.warm_up(
        torch.device("cpu"),
        head_counts=(16, 64),
        index_heads=32,
        pool_size=4,
        topk=512,
        width=p.list_width(sizes),
        dcp_world_size=4,
        interleave=4,
        page_size=2304,
        record_bytes=528,
        scale=0.0442,
    )
    gathered, ordinary = (
        KernelScratch(
            tuple(
                kernels.scratch_shapes(
                    max_records=None, max_tokens=8192, num_heads=heads, width=p.list_width(sizes)
                )
            ),
            tuple(kernels.selection_scratch_shapes()),
        )
        for heads in (16, 64)
    )
    geometry = PageGeometry(2304, FP8_DS_MLA, 4, 4, 4)
    workspace = WorkspacePlan.from_geometry(geometry, 524_288, 32, gathered)
    assert plan.workspace_bytes == workspace.num_bytes > ordinary.num_bytes == plan.kernel_bytes
    said = p.describe(plan)
    assert f"{size(plan.scratch_bytes)} of it because of b12x" in said
    assert f"b12x takes {size(plan.kernel_bytes)}/GPU of the workspace with the gather off" in said
    # Twelve heads a rank are no multiple of 8: the Triton kernels serve, and hold what they do.
    other = make(replace(sizes, heads=48))
    assert (other.kernels, other.kernel_bytes) == ("Triton", 58 << 20)


def test_what_cannot_be_known_is_said(monkeypatch, sizes, capsys):
    find_spec = p.find_spec
    monkeypatch.setattr(p, "find_spec", lambda name: None if name == "b12x" else find_spec(name))
    plan = make(sizes)
    assert plan.kernel_bytes is None
    assert plan.scratch_bytes == 0
    assert "b12x takes more, unknown here: it is not installed" in p.describe(plan)
    assert "Triton holds 78.1 MB/GPU more" in p.describe(make(sizes, gpu="h200"))
    assert "Triton holds 60.8 MB/GPU more" in p.describe(make(sizes, gpu="b200"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for arguments, said in (([], True), (["--gpu", "rtx-pro-6000"], False)):
        assert cli.main(["plan", str(MODEL), *arguments]) == 0
        assert (
            "assumed: there is no GPU here; say which with --gpu" in capsys.readouterr().out
        ) == said


def test_rows_and_break_even(sizes):
    plan = make(sizes, max_model_len=1_048_576)
    assert [row.context_tokens for row in plan.rows][:3] == [8192, 16_384, 32_768]
    # Windows of 524,288 tokens have 56 pages of 2,304 on every rank: 516,096.
    assert [row.windows for row in plan.rows[-2:]] == [1, 3]
    assert plan.rows[-1].context_tokens == 1_048_576
    assert "up to max_model_len, 1,048,576 tokens" in p.describe(plan)
    assert plan.rows[0].ckv_bytes == 2 * 3 * 8192 // 4 * 561
    assert len({row.dcp_bytes for row in plan.rows}) == 1
    assert 0 < plan.break_even_seconds < plan.break_even_bytes
    # A faster link leaves less to gain; bytes do not change.
    faster = make(sizes, link_gbps=10 * plan.link_gbps)
    assert faster.break_even_bytes == plan.break_even_bytes
    assert faster.break_even_seconds < plan.break_even_seconds
    small = make(sizes, max_num_batched_tokens=64)
    assert small.break_even_bytes < plan.break_even_bytes // 100
    # Four heads a rank, a chunk of one token and 128 requests' worth of context: never.
    assert "never" in p._pays(10, 64, 1000)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dcp": 3}, "--dcp 3 does not divide --tp 4: choose 2, 4"),
        ({"dcp": 1}, "--dcp 1 leaves nothing to gather"),
        ({"tp": 3, "dcp": 3}, "--tp 3 does not divide the model's 64 attention heads"),
        ({"interleave": 3}, "set --cp-kv-cache-interleave-size to 4"),
        ({"interleave": 0}, "--interleave 0 is not possible"),
        ({"max_num_seqs": 0}, "--max-num-seqs 0 is not possible"),
        ({"link_gbps": 0.0}, "--link-gbps 0 is not a speed"),
        ({"max_tokens": 0}, "--max-tokens 0 is not possible"),
        ({"max_tokens": 524_289}, "--max-tokens 524289 is above the 524288"),
        ({"max_tokens": 9215}, "2304 tokens on each of 4 ranks; set it to at least 9216"),
        ({"block_size": 300}, "--block-size 300 is no multiple of 256: leave it out"),
        ({"block_size": -256}, "or give 256"),
        ({"speculative_tokens": -1}, "--num-speculative-tokens -1 is not possible"),
    ],
)
def test_sizes_that_do_not_go_together_say_what_to_do(sizes, changes, words):
    with pytest.raises(ValueError, match=r"choose|set|give") as error:
        make(sizes, **changes)
    assert words in str(error.value)


def test_the_longest_context_may_be_shorter_than_a_window(sizes):
    plan = make(sizes, max_model_len=8192, max_num_batched_tokens=4096)
    # A page of 2,304 tokens on each of four ranks.
    assert plan.dcp * plan.page_tokens > plan.limit_tokens == 8192
    assert [(row.context_tokens, row.windows) for row in plan.rows] == [(4096, 1), (8192, 1)]
    assert plan.break_even_seconds > 8192


def test_a_length_of_nothing_is_not_the_models(capsys):
    assert cli.main(["plan", str(MODEL), "--max-model-len", "0"]) == 2
    assert "--max-model-len 0 is not possible: give at least 1" in capsys.readouterr().out


def test_an_unknown_gpu_lists_the_known():
    with pytest.raises(UsageError, match="choose one of rtx-pro-6000") as error:
        p.find_gpu("voodoo2")
    assert "--link-gbps" in str(error.value)
    assert p.find_gpu("H200") == (p.GPUS["h200"], False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no config.json in"),
        ("{", "is not a model's config.json"),
        ("[1]", "is not a model's config.json"),
        ('{"model_type": "llama"}', "works with glm5_next"),
        ('{"model_type": "glm5_next_text", "index_kpool": 3}', "not a usable glm5_next"),
        ('{"model_type": "glm5_next_text", "kv_lora_rank": 256}', "reads latents of 512"),
    ],
)
def test_a_wrong_configuration_gets_a_sentence(tmp_path, capsys, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert cli.main(["plan", str(tmp_path)]) == 2
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [("no-such-folder", "does not exist"), ("no/such-model", "hf download no/such-model")],
)
def test_no_model_at_all_gets_a_sentence(monkeypatch, tmp_path, capsys, name, words):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", name]) == 2
    assert words in capsys.readouterr().out


def test_the_command_prints_writes_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    document, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    command = ["plan", str(MODEL), "--gpu", "h200", "--json", str(document), "--plot", str(picture)]
    switches = ["--shard-selection", "--early-exchange", "--mixed"]
    assert cli.main([*command, "--max-model-len", "600000", *switches]) == 0
    text = capsys.readouterr().out
    for words in ("page ", "capacity ", "workspace ", "KV cache ", "less time ", "524,288"):
        assert words in text
    plan = json.loads(document.read_text())
    assert plan["page_tokens"] == 2304 and plan["rows"][0]["context_tokens"] == 8192
    assert plan["model"]["name"] == "flash_slice"
    assert plan["shard_selection"] and plan["early_exchange"] and plan["mixed"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_or_folder_gets_a_sentence(monkeypatch, tmp_path, capsys):
    command = ["plan", str(MODEL), "--plot"]
    if pytest.importorskip("matplotlib"):
        assert cli.main([*command, str(tmp_path / "no" / "plan.png")]) == 2
        assert cli.main([*command, str(tmp_path / "plan.sound")]) == 2
    capsys.readouterr()
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert cli.main([*command, str(tmp_path / "plan.png")]) == 2
    assert "pip install 'vllm-b12x-ckv[plot]'" in capsys.readouterr().out


def test_sizes_for_readers():
    assert [size(n) for n in (0, 999, 608_256, 2.5e6, 7.2e12)] == [
        "0 B",
        "999 B",
        "608.3 kB",
        "2.5 MB",
        "7,200.0 GB",
    ]
