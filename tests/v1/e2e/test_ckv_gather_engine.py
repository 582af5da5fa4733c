# SPDX-License-Identifier: Apache-2.0
"""The real engine with and without the gather: tokens, log-probabilities, decisions, processes.

Six engines serve all tests of this file, each started once: on GPUs if there is one for every rank,
else on the reference platform. Without context parallelism, ordinary and full-CKV at two ranks;
full-CKV with the other runner, the other DCP backend, a spawned engine core, selections shared out
over the ranks, contexts in windows and prompts that gather beside decodes; full-CKV at four ranks;
full-CKV with three faults built in, to see that the judgement finds each.

The token budget is smaller than a page, so that chunks end where neither pages nor pools do.
"""

import json
import os
import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm.entrypoints.ckv import verify
from vllm.entrypoints.ckv.engine import EngineJob, EngineResult, collect, gpu_count, run_engine
from vllm.entrypoints.ckv.model import tokenise, write_model
from vllm.entrypoints.ckv.oracle import TransformersOracle

PAGE, BUDGET, MAX_TOKENS = 512, 101, 2
SHARED = 512  # of the prefix that later prompts find in the cache
CAPACITY = 8 * (SHARED + 4)
WINDOW = 2 * PAGE  # of the engine whose contexts come in windows: the least, a page of each rank
BACKEND = "B12X_MLA_SPARSE"
MARK = "CKV_TEST_RUN"
GATHER = "VLLM_B12X_MLA_CKV_GATHER"
FLAGS = {GATHER: "1", f"{GATHER}_MIN_TOKENS": "0", f"{GATHER}_MAX_TOKENS": str(CAPACITY)}
DCP = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 4}


@dataclass(frozen=True)
class Group:
    """Prompts that are submitted together.

    gathered: batches that take the full-CKV path. more_windows: windows beyond one a batch.
    ordinary: prompt batches that do not, by reason.
    first_gathered: for each prompt, whether the batch that ends it gathers.
    cached: tokens of each prompt that the prefix cache has.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    gathered: int
    first_gathered: tuple[bool, ...]
    ordinary: tuple[tuple[str, int], ...] = ()
    cached: int = 0
    more_windows: int = 0


def make_groups() -> list[Group]:
    """All groups, in the order in which an engine runs them."""
    text = b"Pack my box with five dozen liquor jugs; how vexingly quick daft zebras jump! " * 40

    def cut(start: int, length: int, *, shared: bool = False) -> tuple[int, ...]:
        prefix = text[5 : 5 + SHARED] if shared else b""
        return tuple(tokenise(prefix + text[start : start + length]))

    def group(name: str, *prompts: tuple[int, ...], gathered: int, **more) -> Group:
        more.setdefault("first_gathered", (gathered > 0,) * len(prompts))
        return Group(name, prompts, gathered, **more)

    def eight(start: int, last: int) -> list[tuple[int, ...]]:
        starts = range(start, start + 80, 10)
        return [cut(i, last if i == starts[-1] else 4, shared=True) for i in starts]

    return [
        group("4 tokens", cut(0, 4), gathered=1),
        group("5 tokens", cut(1, 5), gathered=1),
        group("2 tokens", cut(2, 2), gathered=1),
        group("3 tokens", cut(3, 3), gathered=1),
        # One query token is a decode to vLLM.
        group("1 token", cut(9, 1), gathered=0),
        # Ends of chunks: 101, 202, 250.
        group("odd cuts", cut(4, 250), gathered=3),
        # Batches: 101 of a; 49 of a and 52 of b; 8 of b beside a's first decode.
        group(
            "packed behind a chunk",
            cut(10, 150),
            cut(11, 60),
            gathered=2,
            first_gathered=(True, False),
            ordinary=(("decode_tokens", 1),),
        ),
        # b is cut at 10, inside a pool.
        group(
            "cut in a pool",
            cut(12, 91),
            cut(13, 60),
            gathered=1,
            first_gathered=(True, False),
            ordinary=(("decode_tokens", 1),),
        ),
        group("pair", cut(14, 45), cut(15, 50), gathered=1),
        group("three", cut(16, 25), cut(17, 30), cut(18, 35), gathered=1),
        # b's first chunk is a single token, a decode to vLLM; the second one sees 1 + 94, beside a
        # decode of a if a has not ended.
        group(
            "one token first",
            cut(19, 100),
            cut(20, 95),
            gathered=0,
            ordinary=(("decode_tokens", 2),),
        ),
        group("prefix", cut(700, 4, shared=True), gathered=7),
        group("prefix hit", cut(800, 60, shared=True), gathered=1, cached=SHARED),
        group("at capacity", *eight(900, 4), gathered=1, cached=SHARED),
        # Chunks end at 613, 714, 815, 916, 1,017, 1,024 (a page of each rank) and 1,030 tokens.
        group("long", cut(1100, 518, shared=True), gathered=7, cached=SHARED),
        # Seven requests together, then the last one.
        group("over capacity", *eight(1000, 5), gathered=1, cached=SHARED, more_windows=1),
    ]


GROUPS = {group.name: group for group in make_groups()}
ALONE = [name for name, group in GROUPS.items() if len(group.prompts) == 1]

SABOTAGE = '''
"""Breaks full-CKV prefill in the worker: one fault per number of requests in the batch.

Attention does not see the order of its records, so each fault changes which ones it reads.
"""
import torch

from vllm.v1.attention.backends.mla.ckv_gather.plan import CkvGather

correct = CkvGather.gather_latents


def gather_latents(self, window, *args):
    records, rows, counts, *rest = correct(self, window, *args)
    requests = window.layout.tokens.num_requests
    if requests == 1:  # remapped with half the stride
        rows = torch.where(rows >= 0, rows // 2, rows)
    elif requests == 2:  # the second rank packed its first record again and again
        padded = window.layout.tokens.padded
        span = records[padded : 2 * padded]
        span.copy_(span[:1].clone().expand_as(span))
    else:  # causal lengths of one rank's share
        counts = (counts // 2).clamp(min=1)
    return records, rows, counts, *rest


CkvGather.gather_latents = gather_latents


class Extension:
    pass
'''


SHARING = '''
"""All gathered batches share their selection out; these are too small to do it by themselves."""
from vllm.v1.attention.backends.mla.ckv_gather import byte_model

byte_model.PAIRS_PER_BYTE, byte_model.PAIRS_PER_EXCHANGE = 0, -1


class Extension:
    pass
'''


LIFECYCLE = '''
"""Each worker writes down when it passes the stages of its life, with the workspace's size then.

One JSON list a line, [stage, bytes], in a file of the worker's own; a stage that repeats itself
with the same bytes, like serving, is one line.
"""
import json
import os
from pathlib import Path

from vllm.v1.worker import workspace
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm.v1.attention.backends.mla import b12x_mla_sparse
from vllm.v1.attention.backends.mla.ckv_gather import startup
from vllm.v1.attention.backends.mla.ckv_gather.geometry import FrozenGeometry
from vllm.v1.attention.backends.mla.ckv_gather.plan import CkvGather

last = None


def note(stage):
    global last
    allocated = workspace.current_workspace_manager()._current_workspaces
    line = [stage, sum(memory.nbytes for memory in allocated if memory is not None)]
    if line != last:
        path = Path(os.environ["CKV_TEST_RECORD"]) / f"lifecycle.{os.getpid()}.jsonl"
        with path.open("a") as file:
            print(json.dumps(line), file=file)
    last = line


def record(owner, name, stage, after=None):
    inner = getattr(owner, name)

    def call(*args, **kwargs):
        note(stage)
        result = inner(*args, **kwargs)
        if after is not None:
            note(after)
        return result

    setattr(owner, name, call)


record(GPUModelRunner, "profile_run", "profile", "profiled")
record(FrozenGeometry, "freeze", "finalise")
record(startup, "warm_up", "warm up")
record(CkvGather, "reserve", "reserve")
record(startup, "run_everything_once", "run once")
record(FrozenGeometry, "check_bound", "bind")
record(b12x_mla_sparse.B12xMLASparseMetadataBuilder, "build_for_cudagraph_capture", "capture")
record(workspace.WorkspaceManager, "lock", "lock")
record(CkvGather, "plan_batch", "plan")


class Extension:
    pass
'''


class Engines:
    """Starts engines one at a time and keeps their results and logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.model = folder / "model"
        self.mhc = verify.has_hyper_connections(gpu_count() >= 2)
        write_model(self.model, mhc=self.mhc)

    def run(
        self,
        name: str,
        arguments: dict,
        environment: dict[str, str],
        groups: list[str] | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> tuple[EngineResult, str]:
        """Run ``groups`` (all of them if left out); returns the results and the log."""
        common = {
            "model": str(self.model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "kv_cache_dtype": "fp8_ds_mla",
            "block_size": PAGE,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "max_num_batched_tokens": BUDGET,
            "kv_cache_memory_bytes": 1 << 28,
            "enable_prefix_caching": True,
            "tensor_parallel_size": 2,
        }
        prompts = [[list(p) for p in GROUPS[group].prompts] for group in groups or GROUPS]
        merged = common | arguments
        job = EngineJob(name, merged, {MARK: self.mark} | environment, prompts, max_tokens)
        log = self.folder / f"{name}.log"
        use_gpu = gpu_count() >= merged["tensor_parallel_size"]
        result = collect(run_engine(job, log, use_gpu=use_gpu))
        return result, log.read_text(errors="replace")

    def extension(self, name: str, text: str) -> tuple[dict, dict[str, str]]:
        """Arguments and environment with which workers import ``text`` as the module ``name``."""
        (self.folder / f"{name}.py").write_text(text)
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        return {"worker_extension_cls": f"{name}.Extension"}, {"PYTHONPATH": path}

    def processes(self) -> list[str]:
        """Command lines of processes that any of these engines left behind."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    return Engines(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def no_dcp(engines):
    return engines.run("no-dcp", {"attention_backend": BACKEND}, {})


@pytest.fixture(scope="module")
def ordinary(engines):
    arguments = {"attention_backend": BACKEND, "dcp_comm_backend": "a2a"} | DCP
    return engines.run("ordinary", arguments, {f"{GATHER}_MIN_TOKENS": "0"})


@pytest.fixture(scope="module")
def full(engines):
    arguments = {"attention_backend": BACKEND, "dcp_comm_backend": "a2a"} | DCP
    recording, path = engines.extension("ckv_lifecycle", LIFECYCLE)
    path["CKV_TEST_RECORD"] = str(engines.folder)
    return engines.run("full", arguments | recording, {**FLAGS, **path})


MIXED = "packed behind a chunk"
OTHER = ["4 tokens", "5 tokens", "odd cuts", "prefix", "prefix hit", "long", MIXED]


@pytest.fixture(scope="module")
def other_runner(engines):
    """Everything the other way round, in a spawned engine core."""
    sharing, path = engines.extension("ckv_sharing", SHARING)
    backend = {"attention_config": {"backend": BACKEND}, "dcp_comm_backend": "ag_rs"}
    return engines.run(
        "other-runner",
        backend | DCP | sharing,
        {
            **FLAGS,
            **path,
            f"{GATHER}_MAX_TOKENS": str(WINDOW),
            "VLLM_B12X_MLA_CKV_SHARD_SELECTION": "1",
            f"{GATHER}_MIXED": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        },
        OTHER,
    )


FOUR = ["4 tokens", "5 tokens", "2 tokens", "3 tokens", "odd cuts", "three", "one token first"]


@pytest.fixture(scope="module")
def four_ranks(engines):
    arguments = {"attention_backend": BACKEND} | DCP
    sizes = {"tensor_parallel_size": 4, "decode_context_parallel_size": 4}
    early = {**FLAGS, "VLLM_B12X_MLA_CKV_EARLY_EXCHANGE": "1"}
    return engines.run("four-ranks", arguments | sizes, early, FOUR, max_tokens=1)


BROKEN = ["odd cuts", "pair", "three"]


@pytest.fixture(scope="module")
def sabotaged(engines):
    faults, path = engines.extension("ckv_sabotage", SABOTAGE)
    arguments = {"attention_backend": BACKEND, "dcp_comm_backend": "a2a"} | DCP
    return engines.run("sabotaged", arguments | faults, {**FLAGS, **path}, BROKEN)


def judge(
    results: dict[str, tuple[EngineResult, str]], names: list[str], oracle=None
) -> tuple[list[verify.Case], list[verify.CaseReport]]:
    """``verify``'s cases and reports of the groups ``names``, which the last engine ran alone."""
    cases = [
        verify.Case(f"{name} {i}", number, list(prompt), expects_cached=GROUPS[name].cached > 0)
        for number, name in enumerate(names)
        for i, prompt in enumerate(GROUPS[name].prompts)
    ]
    picked = {}
    for key, (result, _) in results.items():
        ran = names if len(result.groups) == len(names) else list(GROUPS)
        picked[key] = EngineResult(groups=[result.groups[ran.index(name)] for name in names])
    return cases, verify.report_cases(cases, picked, oracle)


def result_of(engine: tuple[EngineResult, str], name: str, names: list[str] | None = None):
    return engine[0].groups[list(names or GROUPS).index(name)]


GATHERING = [name for name, group in GROUPS.items() if group.gathered]


@pytest.mark.parametrize("name", GROUPS)
def test_tokens_and_log_probabilities_are_those_of_ordinary_dcp(name, no_dcp, ordinary, full):
    results = {verify.NO_DCP: no_dcp, verify.ORDINARY: ordinary, verify.FULL_CKV: full}
    _, reports = judge(results, [name])
    for report in reports:
        assert report.tokens_equal
        assert report.max_logprob_delta_vs_dcp <= verify.LIMIT_VS_DCP


def test_the_judgement_of_verify_is_right(no_dcp, ordinary, full):
    results = {verify.NO_DCP: no_dcp, verify.ORDINARY: ordinary, verify.FULL_CKV: full}
    cases, reports = judge(results, GATHERING)
    assert verify.find_failures(cases, reports) == []


def test_transformers_agrees(engines, full):
    if not engines.mhc:
        pytest.skip("transformers has no glm5_next without hyper-connections; install tilelang")
    oracle = TransformersOracle(engines.model)
    for name in ("5 tokens", "odd cuts", "three"):
        result = result_of(full, name)
        for i, prompt in enumerate(GROUPS[name].prompts):
            steps = oracle.score(list(prompt), result.tokens[i])
            for step, logprob in zip(steps, result.logprobs[i], strict=True):
                assert abs(step.logprob - logprob) <= verify.LIMIT_VS_ORACLE
                assert step.lead <= verify.LIMIT_VS_ORACLE


@pytest.mark.parametrize("name", GROUPS)
def test_each_group_gathers_the_batches_it_should(name, full):
    group, result = GROUPS[name], result_of(full, name)
    assert result.cached_tokens == [group.cached] * len(group.prompts)
    counters = result.counters
    assert counters["gathered_batches"] == group.gathered
    assert counters["gathered_windows"] == group.gathered + group.more_windows
    refused = {k: v for k, v in counters["ordinary_batches"].items() if v and k != "decode_only"}
    assert refused == dict(group.ordinary)
    if not group.ordinary:
        assert counters["dcp_bytes"] == 0
        computed = sum(map(len, group.prompts)) - sum(result.cached_tokens)
        assert counters["gathered_query_tokens"] == (computed if group.gathered else 0)


def test_chunks_end_inside_pools(full):
    """The batches of "odd cuts" see 101, 202 and 250 tokens."""
    counters = result_of(full, "odd cuts").counters
    assert counters["gathered_visible_tokens"] == 101 + 202 + 250


def test_without_the_flag_nothing_gathers(no_dcp, ordinary):
    for result, log in (no_dcp, ordinary):
        assert all(group.counters["gathered_batches"] == 0 for group in result.groups)
        assert all(group.counters["ckv_bytes"] == 0 for group in result.groups)
        assert "CKV gather not used" not in log
    assert all(group.counters["dcp_bytes"] == 0 for group in no_dcp[0].groups)
    assert result_of(ordinary, "odd cuts").counters["dcp_bytes"] > 0


def test_the_gather_moves_fewer_bytes(ordinary, full):
    for name in ("odd cuts", "pair", "three"):
        ckv, dcp = (result_of(engine, name).counters for engine in (full, ordinary))
        assert 0 < ckv["ckv_bytes"] < dcp["dcp_bytes"]


@pytest.mark.parametrize("name", GATHERING)
def test_first_token_is_that_of_no_dcp_bit_for_bit(name, no_dcp, full):
    """A prompt whose batches all gathered is computed as without context parallelism."""
    mine, other = result_of(full, name), result_of(no_dcp, name)
    for i, whole in enumerate(GROUPS[name].first_gathered):
        assert mine.tokens[i][0] == other.tokens[i][0]
        difference = abs(mine.logprobs[i][0] - other.logprobs[i][0])
        # GPUs may split sums differently in batches that are otherwise alike.
        assert difference <= (verify.LIMIT_VS_DCP if gpu_count() >= 2 or not whole else 0.0)


def test_the_first_batch_beyond_the_capacity_is_one_line_with_both_numbers(full):
    lines = [line for line in full[1].splitlines() if "first batch in windows" in line]
    assert len(lines) == 2
    for line in lines:
        assert "INFO" in line and f"windows: 2, because buffers are reserved for {CAPACITY}" in line
        assert f"of its {CAPACITY + 1} visible tokens" in line
    assert "CKV gather not used" not in re.sub(r".*tokens are decodes", "", full[1])


def test_contexts_in_windows_give_the_same_tokens(full, other_runner):
    """The last chunk of the long prompt lies behind a window of 1,024 tokens."""
    for name, windows in (("odd cuts", 3), ("prefix", 7), ("prefix hit", 1), ("long", 8)):
        mine, whole = result_of(other_runner, name, OTHER), result_of(full, name)
        assert mine.counters["gathered_windows"] == windows
        assert mine.tokens == whole.tokens
        for logprobs, other in zip(mine.logprobs[0], whole.logprobs[0], strict=True):
            assert abs(logprobs - other) <= verify.LIMIT_VS_DCP


def test_the_other_runner_and_dcp_backend_in_a_spawned_engine_core(no_dcp, full, other_runner):
    log = other_runner[1]
    assert "EngineCore" in log and "Using V2 Model Runner" not in log
    assert "EngineCore pid" not in full[1] and "Using V2 Model Runner" in full[1]
    first = [line for line in log.splitlines() if "first batch: CKV gather: 4 query tokens" in line]
    assert len(first) == 2
    assert "CKV gather not used" not in log
    for name in OTHER:
        mine, single = result_of(other_runner, name, OTHER), result_of(no_dcp, name)
        assert mine.tokens == result_of(full, name).tokens
        difference = abs(mine.logprobs[0][0] - single.logprobs[0][0])
        # The runners' softmaxes differ in the last bit of a float32, and outputs of windows are
        # rounded before they are merged.
        exact = gpu_count() < 2 and mine.counters["gathered_windows"] == GROUPS[name].gathered
        assert difference <= (1e-6 if exact else verify.LIMIT_VS_DCP)
        assert set(mine.cached_tokens) == {GROUPS[name].cached}


def test_prompts_gather_beside_decodes_where_they_may(no_dcp, full, other_runner):
    """The last chunk of the second prompt comes beside the first decode of the first one."""
    mine, default = result_of(other_runner, MIXED, OTHER), result_of(full, MIXED)
    assert default.counters["mixed_batches"] == 0
    assert default.counters["ordinary_batches"]["decode_tokens"] == 1
    assert mine.counters["mixed_batches"] == 1
    assert mine.counters["gathered_batches"] == default.counters["gathered_batches"] + 1
    assert "decode_tokens" not in mine.counters["ordinary_batches"]
    assert mine.counters["dcp_bytes"] == 0 < default.counters["dcp_bytes"]
    for prompt, other in zip(mine.logprobs, result_of(no_dcp, MIXED).logprobs, strict=True):
        for logprob, expected in zip(prompt, other, strict=True):
            assert abs(logprob - expected) <= verify.LIMIT_VS_DCP


def test_the_other_engine_shares_its_selections_out(engines, full, other_runner):
    """Same tokens as without, see above; and the ids of the other rank's rows are received."""
    config = json.loads((engines.model / "config.json").read_text())
    config = config.get("text_config", config)
    layers = config["layer_types"].count("full_attention")
    for name, batches in (("4 tokens", [4]), ("5 tokens", [5]), ("odd cuts", [101, 101, 48])):
        shared = result_of(other_runner, name, OTHER).counters["ckv_bytes"]
        ids = sum(-(-rows // 2) for rows in batches) * config["index_topk"] // config["index_kpool"]
        assert shared - result_of(full, name).counters["ckv_bytes"] == layers * ids * 4


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(name, no_dcp, four_ranks):
    """At four ranks, prompts of up to four tokens leave three of them empty.

    Every request ends with its first token, so that the second chunk of "one token first" gathers.
    """
    mine, other = result_of(four_ranks, name, FOUR), result_of(no_dcp, name)
    assert mine.counters["gathered_batches"] == max(GROUPS[name].gathered, 1)
    for i in range(len(GROUPS[name].prompts)):
        assert mine.tokens[i][0] == other.tokens[i][0]
        # Other numbers of heads a rank round differently, also without context parallelism.
        assert abs(mine.logprobs[i][0] - other.logprobs[i][0]) <= verify.LIMIT_VS_DCP


def test_four_ranks_exchange_nothing_of_the_chunk_itself(engines, four_ranks):
    """A prompt in one chunk gathers, and receives no byte."""
    config = json.loads((engines.model / "config.json").read_text())
    layers = config.get("text_config", config)["layer_types"].count("full_attention")
    for name in ("2 tokens", "3 tokens", "4 tokens", "5 tokens"):
        counters = result_of(four_ranks, name, FOUR).counters
        assert counters["gathered_batches"] == 1 and counters["ckv_bytes"] == 0
    assert result_of(four_ranks, "odd cuts", FOUR).counters["ckv_bytes"] > layers * 3 * 528


def test_one_token_then_a_chunk(four_ranks):
    """The gathered batch sees the token before it and its own 94."""
    counters = result_of(four_ranks, "one token first", FOUR).counters
    assert counters["gathered_query_tokens"] == 94
    assert counters["gathered_visible_tokens"] == 95
    assert counters["ordinary_batches"]["decode_tokens"] == 1


@pytest.mark.parametrize("name", BROKEN)
def test_the_judgement_finds_a_fault_of_each_kind(name, no_dcp, ordinary, full, sabotaged):
    """Wrong rows ("odd cuts"), a rank's pack ("pair"), causal lengths ("three")."""
    assert result_of(sabotaged, name, BROKEN).counters["gathered_batches"] > 0
    picked = EngineResult(groups=[result_of(sabotaged, name, BROKEN)])
    results = {verify.NO_DCP: no_dcp, verify.ORDINARY: ordinary}
    cases, reports = judge(results | {verify.FULL_CKV: (picked, "")}, [name])
    failures = verify.find_failures(cases, reports)
    assert any("log-probabilities differ from ordinary DCP" in failure for failure in failures)


def test_a_refusal_on_two_ranks_names_its_reason_and_leaves_no_process(engines):
    """Also of the engines before it: their workers end with them."""
    arguments = {"attention_backend": BACKEND} | DCP | {"cp_kv_cache_interleave_size": 6}
    with pytest.raises(RuntimeError, match=r"interleave-size 6 would split an index pool of 4"):
        engines.run("refused", arguments, FLAGS, ["4 tokens"])
    deadline = time.monotonic() + 30
    while engines.processes() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert engines.processes() == []


def test_workers_say_what_they_reserved(full):
    """One line a rank, with the capacity that the flag asked for."""
    lines = re.findall(r"full-CKV gather: on, page (\d+) tokens, .*limit ([\d,]+) visible", full[1])
    assert lines == [(str(PAGE), f"{CAPACITY:,}")] * 2


def test_stages_of_a_worker_come_in_order_and_nothing_grows_after_the_reservation(engines, full):
    """Eager: a CPU captures nothing, so ``capture`` has to be absent."""
    files = sorted(engines.folder.glob("lifecycle.*.jsonl"))
    assert len(files) == 2
    for file in files:
        recorded = [json.loads(line) for line in file.read_text().splitlines()]
        stages = [stage for stage, _ in recorded]
        once = list(dict.fromkeys(stages))
        assert once == [
            "profile", "finalise", "warm up", "reserve", "run once", "profiled",
            "bind", "lock", "plan",
        ]  # fmt: skip
        for stage in ("profile", "warm up", "reserve", "run once", "profiled"):
            assert stages.count(stage) == 1
        # A later layer freezes again, in the profiling run: the same geometry.
        assert stages.index("profiled") > max(i for i, s in enumerate(stages) if s == "finalise")
        assert "bind" not in stages[stages.index("lock") :]
        sizes = {size for _, size in recorded[stages.index("run once") :]}
        assert len(sizes) == 1 and sizes != {0}
