# SPDX-License-Identifier: Apache-2.0
"""Refusals, agreement of the ranks, the first run of everything, and the lock."""

import importlib
import os
import tempfile
from dataclasses import asdict, fields
from types import SimpleNamespace

import ckv_rates
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from vllm.v1.attention.backends.mla.ckv_gather import exchange, measuring, startup
from vllm.v1.attention.backends.mla.ckv_gather import geometry as g
from vllm.v1.attention.backends.mla.ckv_gather import plan as plan_module
from vllm.v1.attention.backends.mla.ckv_gather.time_model import Rates
from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import TorchReferenceKernels

SHAPES = startup.LayerShapes(
    num_tokens=6, local_heads=2, width=35, pool_topk=8, index_heads=32, ring=4, scale=0.1
)


@pytest.mark.parametrize(
    ("changes", "mode", "parts"),
    [
        ({"cp_kv_cache_interleave_size": 1}, False, ["size 1 ", "pool of 4", "set it to 4"]),
        ({"cp_kv_cache_interleave_size": 6}, True, ["size 6 ", "pool of 4", "set it to 8"]),
        ({"use_ubatching": True}, True, ["micro-batches", "--enable-dbo"]),
        ({"prefill_context_parallel_size": 2}, False, ["prefill context parallelism of 2"]),
        ({"prefill_context_parallel_size": 3}, True, ["of 3", "--prefill-context-parallel-size 1"]),
        ({"kv_transfer_config": object()}, True, ["KV connector", "--kv-transfer-config"]),
    ],
)
def test_each_refusal_is_one_sentence_with_a_remedy(make_config, changes, mode, parts):
    (reason,) = startup.refusals(make_config(2, **changes), mode)
    for part in parts:
        assert part in reason
    assert "\n" not in reason and ". " not in reason


def test_what_only_the_gather_cannot_do_is_allowed_without_it(make_config):
    config = make_config(2, use_ubatching=True, kv_transfer_config=object())
    assert startup.refusals(config, False) == []
    assert startup.refusals(make_config(2), True) == []
    # Without context parallelism there is no owner to split a pool over.
    assert startup.refusals(make_config(1, cp_kv_cache_interleave_size=1), True) == []


ALIGNED = {"mamba_cache_mode": "align", "block_size": 2304, "max_num_batched_tokens": 4096}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"max_num_seqs": 256}, ["2,304 of 4,096; --max-num-batched-tokens 4864", "to 256 tokens"]),
        ({"num_speculative_tokens": 3}, ["--max-num-batched-tokens 4640", "up to 32 tokens"]),
        ({"max_num_scheduled_tokens": 4000}, ["of 4,000; --max-num-scheduled-tokens 4616"]),
        ({"max_num_scheduled_tokens": 4096}, ["of 4,096; --max-num-batched-tokens 4616"]),
        ({"max_num_batched_tokens": 4616}, None),
        ({"mamba_cache_mode": "none"}, None),
        ({"mamba_cache_mode": "all"}, None),
    ],
)
def test_chunks_are_remarked_on_where_pages_cut_them(make_config, changes, parts):
    remark = startup.chunk_remark(make_config(2, **(ALIGNED | changes)))
    assert (remark is None) == (parts is None)
    for part in parts or ():
        assert part in remark


@pytest.mark.parametrize("mode", ["1", "0"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_remarks_on_chunks(make_gather, monkeypatch, mode, rank):
    """With the gather off too; a configuration without ranks is the first one's."""
    lines = []
    monkeypatch.setattr(plan_module.logger, "info", lambda text, *args: lines.append(text % args))
    gather = make_gather(2, **ALIGNED)
    gather.vllm_config.parallel_config.rank = rank
    gather.enabled = gather.enabled and mode == "1"
    monkeypatch.setattr(plan_module.WorkspacePlan, "reserve", lambda self: torch.device("cpu"))
    monkeypatch.setattr(plan_module.CkvGather, "reserve_again", lambda self: None)
    monkeypatch.setattr(plan_module.metrics, "publish", lambda *args: None)
    gather.reserve(TorchReferenceKernels(), SHAPES)
    said = [line for line in lines if line.startswith("prefix caching cuts chunks at pages")]
    assert len(said) == (rank == 0)
    assert [line for line in lines if line.startswith("full-CKV gather: ")]


def test_backend_validation_lists_the_refusals(make_config, monkeypatch):
    from vllm.plugins.b12x_mla_sparse import register
    from vllm.v1.attention.backends.mla import b12x_mla_sparse as module

    register()
    config = make_config(2, cp_kv_cache_interleave_size=6, use_ubatching=True)
    monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    arguments = {
        "head_size": 512,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "fp8_ds_mla",
        "block_size": 256,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": True,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": None,
        "attn_type": "decoder",
    }
    validate = module.B12xMLASparseBackend.validate_configuration
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", "0")
    assert len(validate(**arguments)) == 1
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", "1")
    reasons = validate(**arguments)
    assert len(reasons) == 2
    assert "--cp-kv-cache-interleave-size 6" in reasons[0] and "--enable-dbo" in reasons[1]
    assert "PCP not supported" in validate(**arguments, use_pcp=True)


def test_start_up_plans_of_on_and_off_have_different_names(make_config, monkeypatch):
    from vllm.config import DeviceConfig, VllmConfig

    off, on, smaller = (VllmConfig(device_config=DeviceConfig("cpu")) for _ in range(3))
    startup.separate_startup_plans(on, {"capacity": 2000})
    startup.separate_startup_plans(smaller, {"capacity": 1000})
    assert len({config.compute_hash() for config in (off, on, smaller)}) == 3
    opaque = make_config(2, additional_config=object())
    startup.separate_startup_plans(opaque, {})
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    with pytest.raises(ValueError, match="unset VLLM_ENABLE_STARTUP_PLAN"):
        startup.separate_startup_plans(opaque, {})


@pytest.mark.parametrize("mode", ["0", "1", "auto"])
def test_a_layer_tells_vllm_what_its_start_up_plan_is_for(make_config, monkeypatch, mode):
    """While the model is loaded, and so before vLLM looks for a plan."""
    from vllm.plugins.b12x_mla_sparse import register
    from vllm.v1.attention.backends.mla import b12x_mla_sparse as module

    def initialise(self):
        self.kv_lora_rank, self.qk_rope_head_dim = 512, 0

    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", mode)
    register()
    monkeypatch.setattr(module.SparseMLACommonImpl, "__init__", initialise)
    monkeypatch.setattr(module, "get_kernels", TorchReferenceKernels)
    monkeypatch.setattr(module.CkvGather, "_instance", None)
    config = make_config(2, additional_config={})
    config.kernel_config = SimpleNamespace(enable_jit_warmup=False)
    monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    impl = object.__new__(module.B12xMLASparseImpl)
    impl.__init__()
    facts = {startup.CONFIG_KEY: impl.gather.facts}
    assert config.additional_config == ({} if mode == "0" else facts)


def test_agreement_names_the_flag_both_ranks_and_both_values():
    same = {"VLLM_B12X_MLA_CKV_GATHER": 1, "the block size": 256}
    startup.require_agreement([same, dict(same), dict(same)])
    with pytest.raises(RuntimeError) as error:
        startup.require_agreement([same, same, {**same, "VLLM_B12X_MLA_CKV_GATHER": 0}])
    assert "VLLM_B12X_MLA_CKV_GATHER is 1 on rank 0 and 0 on rank 2" in str(error.value)
    with pytest.raises(RuntimeError, match="extra is None on rank 0 and 3 on rank 1"):
        startup.require_agreement([same, {**same, "extra": 3}])


def _worker(rank: int, world: int, path: str, body_name: str, results) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    try:
        results[rank] = globals()[body_name](rank, world)
    finally:
        dist.destroy_process_group()


def run_ranks(world: int, body_name: str) -> list:
    """Run a function of this module on ``world`` gloo ranks; returns their results."""
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(
            _worker,
            args=(world, os.path.join(folder, "store"), body_name, results),
            nprocs=world,
            # A forked child would wait for the parent's OpenMP threads, which it does not have.
            start_method="spawn",
        )
        return [results[rank] for rank in range(world)]


def disagree(rank: int, world: int) -> str:
    facts = {"VLLM_B12X_MLA_CKV_GATHER": 1 if rank else 0, "pages": 256}
    try:
        startup.require_agreement(exchange.all_gather_facts(facts, dist.group.WORLD))
    except RuntimeError as error:
        return str(error)
    return "agreed"


def test_all_ranks_raise_when_one_differs():
    messages = run_ranks(2, "disagree")
    assert messages[0] == messages[1]
    assert "VLLM_B12X_MLA_CKV_GATHER is 0 on rank 0 and 1 on rank 1" in messages[0]


class Failing(TorchReferenceKernels):
    def warm_up(self, *args, **kwargs):
        raise ValueError("no compiler")


def fail_alone(rank: int, world: int) -> str:
    group = SimpleNamespace(rank_in_group=rank, cpu_group=dist.group.WORLD)
    startup.get_dcp_group = lambda: group
    geometry = g.FrozenGeometry()
    geometry.freeze(g.PageGeometry(256, g.FP8_DS_MLA, 4, 4, world))
    gather = SimpleNamespace(dcp_world_size=world, geometry=geometry, pool_size=4)
    kernels = Failing() if rank else TorchReferenceKernels()
    try:
        startup.warm_up(gather, kernels, SHAPES, torch.device("cpu"))
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "ready"


def test_no_rank_waits_for_one_whose_kernels_do_not_start():
    messages = run_ranks(3, "fail_alone")
    assert messages[1] == messages[2] == "ValueError: no compiler"
    assert messages[0].startswith("RuntimeError: the kernels of rank 1 ")
    assert "ValueError('no compiler')" in messages[0]


class Recording(TorchReferenceKernels):
    """The reference kernels; notes which operations run, and with how many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.scratch: list[tuple[str, list]] = []
        self.sizes: list[dict] = []
        self.own_pools: list[list[int]] = []

    def __getattribute__(self, name: str):
        value = super().__getattribute__(name)
        if name.startswith("_") or not callable(value):
            return value

        def call(*args, **kwargs):
            if name == "warm_up":
                assert kwargs["head_counts"] == [2, 4] and kwargs["topk"] == SHAPES.pool_topk
            if name == "write_pools" and any(places is not None for places in args[9:]):
                self.own_pools.append(args[7][[0, -1]].tolist())
            # Compiled before the first use.
            self.calls.append((name, 0 if name in SETUP else args[0].shape[0]))
            if name in ("attend", "select_pools"):
                self.scratch.append((name, [tuple(tensor.shape) for tensor in args[-1]]))
                for tensor in args[-1]:
                    # In the workspace, and none of the arguments is lost with it.
                    before = [other.clone() for other in args if isinstance(other, torch.Tensor)]
                    tensor.fill_(-1)
                    after = [other for other in args if isinstance(other, torch.Tensor)]
                    assert all(map(torch.equal, before, after))
            return value(*args, **kwargs)

        def scratch_shapes(**sizes):
            self.calls.append((name, 0))
            self.sizes.append(sizes)
            return [((3, 5 if sizes["max_records"] else 6), torch.float32)]

        def selection_scratch_shapes():
            self.calls.append((name, 0))
            return [((7,), torch.int32)]

        own = {f.__name__: f for f in (scratch_shapes, selection_scratch_shapes)}
        return own.get(name, call)


SETUP = {"scratch_shapes", "selection_scratch_shapes", "warm_up"}
OPERATIONS = {
    *SETUP,
    "write_records", "pack_records", "write_pools", "pack_pools", "unpack_pools", "select_pools",
    "merge_pool_candidates", "expand_pools", "remap", "filter_local", "attend",
}  # fmt: skip


def start(rank: int, world: int, changes: dict | None = None, *, clock: bool = False) -> dict:
    """Reserve and run everything once, as the first layer of a rank does."""
    # First: it prepares the import of vLLM's modules beside a CPU build of torch.
    conftest = importlib.import_module(f"{__name__.rpartition('.')[0]}.conftest")
    from vllm.v1.worker import workspace as stock

    from vllm.plugins.b12x_mla_sparse import register

    torch.accelerator.empty_cache = lambda: None
    os.environ.setdefault("VLLM_B12X_MLA_CKV_GATHER", "1")
    register()
    stock.reset_workspace_manager()
    stock.init_workspace_manager(torch.device("cpu"))
    group = SimpleNamespace(
        rank_in_group=rank, cpu_group=dist.group.WORLD, device_group=dist.group.WORLD
    )
    for module in (plan_module, measuring, startup):
        module.get_dcp_group = lambda: group
    log: list[str] = []
    plan_module.logger.info = lambda text, *values: log.append(text % values)
    candidates = exchange.all_gather_candidates
    exchange.all_gather_candidates = lambda *args: candidates(*args, group=dist.group.WORLD)
    entered: list[tuple] = []

    def note(inner):
        def collective(*args, **kwargs):
            entered.append((inner.__name__, getattr(args[0], "shape", None)))
            return inner(*args, **kwargs)

        return collective

    for name in ("all_gather_into_tensor", "all_gather_object"):
        setattr(exchange.dist, name, note(getattr(dist, name)))
    dcp: list[tuple] = []

    def query_gather(query):
        dcp.append(("query", tuple(query.shape)))
        return query.repeat(1, world, 1)

    def combine(out, lse, *, seq_lens, query_start_loc):
        dcp.append(("combine", tuple(out.shape)))
        assert lse.shape == out.shape[:2] and int(query_start_loc[-1]) == int(seq_lens[0])
        return out

    gather = plan_module.CkvGather(conftest.configuration(world, **(changes or {})))
    kernels = Recording()
    first, device = gather.freeze(kernels), torch.device("cpu")
    startup.warm_up(gather, kernels, SHAPES, device)
    gather.reserve(kernels, SHAPES)
    before = stock.current_workspace_manager()._current_workspaces[0]
    stock.lock_workspace()
    layer = (gather, kernels, SHAPES, device, query_gather, combine)

    def count_operations(call) -> float:
        """A microsecond each; a machine with other work has no better clock."""
        before = len(kernels.calls)
        call()
        return float(len(kernels.calls) - before)

    startup.run_everything_once(
        *layer, measuring.Clock(count_operations, count_operations) if clock else None
    )
    again = gather.freeze(kernels)
    gather.reserve_again()
    return {
        "first": (first, again),
        "setup": [name for name, _ in kernels.calls][:6],
        "scratch": kernels.scratch,
        "sizes": kernels.sizes,
        "own_pools": kernels.own_pools,
        "operations": {name for name, _ in kernels.calls},
        "attended": [rows for name, rows in kernels.calls if name == "attend"],
        "entered": entered,
        "dcp": dcp,
        "same_bytes": stock.current_workspace_manager()._current_workspaces[0] is before,
        "reserved": None if before is None else (before.numel(), gather.workspace.num_bytes),
        "counters": gather.counters.as_dict(),
        "rates": gather.time_model and gather.time_model.rates,
        "log": log,
    }


def test_the_first_run_takes_every_operation_through_every_collective():
    ranks = run_ranks(2, "start")
    for result in ranks:
        assert result["first"] == (True, False)
        assert result["operations"] == OPERATIONS
        # Kernels compile before their use, and then know their scratch: of ordinary batches, which
        # read a cache with the heads of all ranks, and of gathered ones.
        asked = ["scratch_shapes", "selection_scratch_shapes"] * 2
        assert result["setup"] == ["warm_up", *asked, "write_records"]
        assert result["sizes"] == [
            {"max_records": None, "max_tokens": 6, "num_heads": 4, "width": 35},
            {"max_records": 1280, "max_tokens": 6, "num_heads": 2, "width": 35},
        ]
        ordinary = [("select_pools", [(7,)]), ("attend", [(3, 6)])]
        assert result["scratch"][:4] == ordinary * 2
        assert dict(result["scratch"][4:]) == {
            "select_pools": [(7,)], "attend": [(3, 5)]
        }  # fmt: skip
        # One row and the largest batch on both ordinary runs, then three gathered lengths, and one
        # in two windows, both of which all rows see.
        assert result["attended"] == [1, 6, 6, 6, 6, 6, 6]
        assert result["dcp"] == [
            ("query", (1, 2, 512)), ("combine", (1, 4, 512)),
            ("query", (6, 2, 512)), ("combine", (6, 4, 512)),
        ]  # fmt: skip
        # The lock proves it as well: nothing but the reserved bytes was used.
        assert result["same_bytes"] and result["reserved"][0] == result["reserved"][1]
        assert result["counters"]["ckv_bytes"] == result["counters"]["dcp_bytes"] == 0
        # Compiling is no exchange.
        for durations in result["counters"]["exchange_seconds"].values():
            assert not any(durations["counts"].values())
    assert ranks[0]["entered"] == ranks[1]["entered"]
    names = [name for name, _ in ranks[0]["entered"]]
    assert names[:2] == ["all_gather_object"] * 2 and names.count("all_gather_object") == 2
    shapes = [tuple(shape) for name, shape in ranks[0]["entered"][2:]]
    # Candidates of both batches; one token, with no pool; one pool; then the whole capacity; then
    # 1,001 tokens, keys of windows of 512 and 489, and their records.
    assert shapes == [
        (4, 1, 8), (4, 6, 8), (2, 528), (2, 132), (8, 528), (250, 132), (1000, 528),
        (128, 132), (122, 132), (512, 528), (490, 528),
    ]  # fmt: skip


def start_short(rank: int, world: int) -> dict:
    return start(rank, world, {"max_model_len": 300})


def test_without_room_for_a_window_the_first_run_takes_several_requests():
    """No request can be longer than 300 tokens then, but a batch can see more."""
    ranks = run_ranks(2, "start_short")
    for result in ranks:
        assert result["attended"] == [1, 6, 6, 6, 6, 1, 5]
        assert result["same_bytes"] and result["reserved"][0] == result["reserved"][1]
    assert ranks[0]["entered"] == ranks[1]["entered"]
    shapes = [tuple(shape) for _, shape in ranks[0]["entered"][2:]]
    assert shapes[-4:] == [(76, 132), (76, 132), (304, 528), (304, 528)]


def differ(rank: int, world: int) -> tuple[dict, dict]:
    """One rank is slower at this, another at that."""
    group = SimpleNamespace(cpu_group=dist.group.WORLD)
    measuring.get_dcp_group = lambda: group
    names = [field.name for field in fields(Rates)]
    values: dict = {name: 1.0 + (n + rank) % world for n, name in enumerate(names)}
    for name in ("ordinary", "gathered"):
        values[name] = ((16, values[name]), (64, 3.0 - values[name]))
    rates = Rates(**values)
    return asdict(measuring.agree(rates)), asdict(rates)


def test_all_ranks_take_the_slowest_ones_rates():
    (first, there), (second, here) = run_ranks(2, "differ")
    assert there != here
    curve = ((16, 2.0), (64, 2.0))
    assert first == second == dict.fromkeys(first, 2.0) | {"ordinary": curve, "gathered": curve}


def start_measuring(rank: int, world: int) -> dict:
    os.environ["VLLM_B12X_MLA_CKV_GATHER"] = "auto"
    return start(rank, world, clock=True)


def test_the_first_run_measures_what_auto_decides_by():
    ranks = run_ranks(2, "start_measuring")
    assert ranks[0]["entered"] == ranks[1]["entered"]
    assert ranks[0]["entered"][-1][0] == "all_gather_object"
    for result in ranks:
        # Out of the reserved bytes, and serving starts from nothing.
        assert result["same_bytes"] and result["counters"]["ckv_bytes"] == 0
        assert result["rates"] == ranks[0]["rates"]
        rates = asdict(result["rates"])
        curves = {name: {s for _, s in rates.pop(name)} for name in ckv_rates.CURVES}
        # Of any number of rows: a row, a token, a byte cost no operation, a merged window one.
        assert curves == {
            "ordinary": {5.0}, "gathered": {6.0}, "own_heads": {0.0}, "all_heads": {0.0}
        }  # fmt: skip
        hosts = rates.pop("ordinary_host"), rates.pop("gathered_host")
        assert hosts == (5.0, 6.0)
        assert {name: s for name, s in rates.items() if s} == {"merged": 1.0}


def start_without_a_clock(rank: int, world: int) -> dict:
    os.environ["VLLM_B12X_MLA_CKV_GATHER"] = "auto"
    return start(rank, world)


def test_without_a_clock_bytes_decide_and_the_log_says_so():
    for result in run_ranks(2, "start_without_a_clock"):
        assert result["rates"] is None
        assert [name for name, _ in result["entered"]].count("all_gather_object") == 2
        assert any("nothing is measured on this platform" in line for line in result["log"])


def start_sharing(rank: int, world: int) -> dict:
    os.environ["VLLM_B12X_MLA_CKV_SHARD_SELECTION"] = "1"
    return start(rank, world)


def test_the_first_run_shares_selections_out_as_well():
    ranks = run_ranks(2, "start_sharing")
    for result in ranks:
        # The lock proves that the exchanged ids lie in reserved bytes.
        assert result["same_bytes"] and result["reserved"][0] == result["reserved"][1]
        assert result["counters"]["ckv_bytes"] == 0
        assert result["attended"] == [1, 6, 6, 6, 6, 6, 6, 1, 6]
    assert ranks[0]["entered"] == ranks[1]["entered"]
    shapes = [tuple(shape) for _, shape in ranks[0]["entered"][2:]]
    # After everything else: one row, of which rank 1 has none; then six.
    keys, records = (250, 132), (1000, 528)
    assert shapes[11:] == [keys, (2, 8), records, keys, (6, 8), records]


def start_early(rank: int, world: int) -> dict:
    os.environ["VLLM_B12X_MLA_CKV_EARLY_EXCHANGE"] = "1"
    return start(rank, world)


def test_the_first_run_begins_layers_as_well():
    ranks = run_ranks(2, "start_early")
    for result in ranks:
        assert result["same_bytes"] and result["counters"]["ckv_bytes"] == 0
        assert result["attended"] == [1, 6, 6, 6, 6, 6, 6, 6, 6]
        # First and last position of six own tokens: without a context, and behind 994.
        assert result["own_pools"] == [[0, 5], [992, 997]]
    assert ranks[0]["entered"] == ranks[1]["entered"]
    shapes = [tuple(shape) for _, shape in ranks[0]["entered"][2:]]
    # After everything else: nothing, then the keys and records of the context.
    assert shapes[11:] == [(248, 132), (996, 528)]


def test_a_new_page_size_after_the_first_call_names_both(make_gather, monkeypatch):
    from vllm.v1.worker import workspace as stock

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    stock.reset_workspace_manager()
    stock.init_workspace_manager(torch.device("cpu"))
    group = SimpleNamespace(cpu_group=None)
    monkeypatch.setattr(plan_module, "get_dcp_group", lambda: group)
    monkeypatch.setattr(exchange, "all_gather_facts", lambda facts, group: [facts, facts])
    try:
        gather = make_gather(2, freeze=False)
        assert gather.freeze(TorchReferenceKernels())
        assert not gather.freeze(TorchReferenceKernels())
        gather.vllm_config.cache_config.block_size = 2304
        with pytest.raises(RuntimeError, match=r"page_size 256.*page_size 2304"):
            gather.freeze(TorchReferenceKernels())
    finally:
        stock.reset_workspace_manager()


@pytest.mark.parametrize("block_size", [128, 384, 640])
def test_index_pages_of_32_pools_are_refused_at_the_freeze(make_gather, monkeypatch, block_size):
    monkeypatch.setattr(plan_module, "get_dcp_group", lambda: SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(exchange, "all_gather_facts", lambda facts, group: [facts])
    gather = make_gather(2, freeze=False, block_size=block_size)
    with pytest.raises(ValueError) as error:
        gather.freeze(TorchReferenceKernels())
    for part in (f"page_size {block_size}", "64 pools", "(256 tokens)", "--block-size"):
        assert part in str(error.value)
    assert not gather.geometry.is_frozen


@pytest.mark.parametrize("mode", ["1", "auto", "0"])
def test_less_than_a_window_is_refused_at_the_freeze(make_gather, monkeypatch, mode):
    """A page of 256 tokens on both ranks; with the gather off nothing is reserved."""
    monkeypatch.setattr(plan_module, "get_dcp_group", lambda: SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(exchange, "all_gather_facts", lambda facts, group: [facts])
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", mode)
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS", "512")
    assert make_gather(2, freeze=False).freeze(TorchReferenceKernels())
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS", "511")
    gather = make_gather(2, freeze=False)
    if mode == "0":
        assert gather.freeze(TorchReferenceKernels())
        return
    with pytest.raises(ValueError) as error:
        gather.freeze(TorchReferenceKernels())
    for part in ("VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS=511", "max_model_len 1000",
                 "256 tokens on each of 2 ranks", "at least 512"):  # fmt: skip
        assert part in str(error.value)


@pytest.mark.parametrize("page_size", [256, 512, 1280, 2304, 4352, 8704])
def test_pages_of_the_real_model_hold_whole_index_pages(page_size):
    g.PageGeometry(page_size, g.FP8_DS_MLA, 4, 4, 2).check_index_page()


def test_lock_needs_a_layer_that_gathers(make_gather, monkeypatch):
    from vllm.v1.worker import workspace as stock

    stock.reset_workspace_manager()
    gather = make_gather(2)
    layers = {"kda": SimpleNamespace(), "mla": SimpleNamespace(impl=SimpleNamespace(gather=gather))}
    compilation = SimpleNamespace(static_forward_context=layers)
    worker = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation))
    assert not startup.lock_after_warm_up(worker)
    stock.init_workspace_manager(torch.device("cpu"))
    try:
        assert not startup.lock_after_warm_up(worker)
        assert not stock.current_workspace_manager().is_locked()
        gather.workspace = object()
        assert startup.lock_after_warm_up(worker) and startup.lock_after_warm_up(worker)
        assert stock.current_workspace_manager().is_locked()
    finally:
        stock.reset_workspace_manager()
