# SPDX-License-Identifier: Apache-2.0
"""``vllm-ckv verify``: cases, judgement, table, JSON and misuse, with hand-made engine results."""

import argparse
import json
import math
from argparse import Namespace
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from vllm.entrypoints.ckv import cli, verify
from vllm.entrypoints.ckv.engine import EngineResult, GroupResult
from vllm.entrypoints.ckv.model import BYTE_OFFSET, small_config
from vllm.entrypoints.ckv.oracle import OracleStep

NAN = float("nan")
TEXT = bytes(range(256)) * 20


def group(count: int, **changes) -> GroupResult:
    """A group of ``count`` prompts, two tokens each."""
    fields = {
        "tokens": [[7, 8]] * count,
        "logprobs": [[-1.0, -2.0]] * count,
        "cached_tokens": [0] * count,
        "counters": {"gathered_batches": 0, "ckv_bytes": 0, "dcp_bytes": 0},
        "seconds": 1.5,
        **changes,
    }
    return GroupResult(**fields)


def counted(batches: int = 0, ckv: int = 0, dcp: int = 0) -> dict:
    return {"gathered_batches": batches, "ckv_bytes": ckv, "dcp_bytes": dcp}


@pytest.fixture
def cases() -> list[verify.Case]:
    """One prompt alone, then two together."""
    return [
        verify.Case("alone", 0, [3] * 10),
        verify.Case("pair, a", 1, [4] * 20),
        verify.Case("pair, b", 1, [5] * 30),
    ]


@pytest.fixture
def results() -> dict[str, EngineResult]:
    """What three engines that agree give for ``cases``."""
    return {
        verify.NO_DCP: EngineResult(groups=[group(1), group(2)]),
        verify.ORDINARY: EngineResult(
            groups=[
                group(1, counters=counted(dcp=1000), seconds=4.0),
                group(2, counters=counted(dcp=9000), seconds=5.0),
            ],
        ),
        verify.FULL_CKV: EngineResult(
            groups=[group(1, counters=counted(1, ckv=100)), group(2, counters=counted(3, ckv=500))],
        ),
    }


def right(**changes) -> verify.CaseReport:
    """A report that no rule objects to."""
    report = verify.CaseReport(
        name="case",
        prompt_tokens=10,
        cached_tokens=4,
        tokens_equal=True,
        max_logprob_delta_vs_dcp=0.02,
        max_logprob_delta_vs_no_dcp=0.06,
        dcp_logprob_delta_vs_no_dcp=0.03,
        oracle_logprob_delta=0.1,
        oracle_tokens_equal=True,
        gathered_batches=1,
        bytes_per_token_ckv=1122.0,
        bytes_per_token_dcp=65536.0,
        seconds=1.0,
        dcp_seconds=2.0,
    )
    return replace(report, **changes)


CASE = verify.Case("case", 0, [3] * 10, expects_cached=True)


@pytest.mark.parametrize("sizes", verify.SIZES.values(), ids=verify.SIZES.keys())
@pytest.mark.parametrize("dcp", [2, 4])
def test_cases_cover_what_the_command_promises(dcp, sizes):
    cases = verify.make_cases(TEXT, dcp, sizes.index_topk)
    assert [case.group for case in cases] == [0, 1, 2, 2, 3, 4]
    lengths = [len(case.prompt) for case in cases]
    assert lengths[0] == 256
    assert all(length > verify.CHUNK_TOKENS for length in lengths[1:])
    assert lengths[1] > 2 * verify.CHUNK_TOKENS
    first, second = cases[4].prompt, cases[5].prompt
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    assert shared >= 2 * verify.PAGE_TOKENS * dcp
    assert shared > 2 * sizes.index_topk
    assert [case.expects_cached for case in cases] == [False] * 5 + [True]
    # No other two prompts share even one cache block, or a case would answer the next.
    for a, b in pairwise(cases[:5]):
        assert a.prompt[: verify.PAGE_TOKENS] != b.prompt[: verify.PAGE_TOKENS]
    for job in verify.make_jobs(Path("model"), cases, dcp):
        assert max(lengths) + job.max_tokens <= job.arguments["max_model_len"]


@pytest.mark.parametrize("text", [b"x", b"ab", b"short text of 27 characters"])
def test_a_short_text_is_repeated(text):
    for case in verify.make_cases(text, 2):
        assert set(case.prompt) == {byte + BYTE_OFFSET for byte in text}
    prompt = verify.make_cases(text, 2)[0].prompt
    assert prompt == [text[i % len(text)] + BYTE_OFFSET for i in range(256)]


def test_an_empty_text_is_refused():
    with pytest.raises(ValueError, match="the text is empty"):
        verify.make_cases(b"", 2)


def test_jobs_differ_in_what_is_compared_and_in_nothing_else():
    cases = verify.make_cases(TEXT, 4)
    none, ordinary, full = verify.make_jobs(Path("model"), cases, 4)
    assert ordinary.arguments == full.arguments
    assert (ordinary.environment, full.environment) == ({}, {"VLLM_B12X_MLA_CKV_GATHER": "1"})
    assert ordinary.arguments.items() - none.arguments.items() == {
        ("decode_context_parallel_size", 4),
        ("cp_kv_cache_interleave_size", verify.INTERLEAVE),
    }
    assert none.arguments.items() <= ordinary.arguments.items()
    assert none.arguments["tensor_parallel_size"] == 4
    assert none.groups == ordinary.groups == full.groups
    assert [len(prompts) for prompts in full.groups] == [1, 1, 2, 1, 1]
    assert full.groups[2] == [cases[2].prompt, cases[3].prompt]


def test_further_arguments_reach_every_engine():
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    arguments = parser.parse_args(["--engine", '{"enforce_eager": false}'])
    jobs = verify.make_jobs(Path("model"), verify.make_cases(TEXT, 2), 2, arguments.engine)
    assert [job.arguments["enforce_eager"] for job in jobs] == [False] * 3
    plain = verify.make_jobs(Path("model"), verify.make_cases(TEXT, 2), 2)
    assert [job.arguments["enforce_eager"] for job in plain] == [True] * 3


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_further_arguments_that_are_no_object_are_refused(text, capsys):
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--engine", text])
    assert "is not" in capsys.readouterr().err


def test_report_of_engines_that_agree(cases, results):
    alone, a, b = verify.report_cases(cases, results, None)
    assert [report.name for report in (alone, a, b)] == ["alone", "pair, a", "pair, b"]
    assert [report.prompt_tokens for report in (alone, a, b)] == [10, 20, 30]
    assert alone.tokens_equal and alone.max_logprob_delta_vs_dcp == 0
    assert (alone.gathered_batches, a.gathered_batches, b.gathered_batches) == (1, 3, 3)
    # Bytes are the group's, over the group's prompt tokens.
    assert (alone.bytes_per_token_ckv, alone.bytes_per_token_dcp) == (10, 100)
    assert (a.bytes_per_token_ckv, b.bytes_per_token_dcp) == (10, 180)
    assert (alone.seconds, alone.dcp_seconds) == (1.5, 4.0)
    assert alone.oracle_logprob_delta is None and alone.oracle_tokens_equal is None
    assert verify.find_failures(cases, [alone, a, b]) == []


def test_cached_tokens_do_not_dilute_bytes_per_token(cases, results):
    results[verify.FULL_CKV].groups[1].cached_tokens = [0, 25]
    _, a, b = verify.report_cases(cases, results, None)
    assert (a.cached_tokens, b.cached_tokens) == (0, 25)
    assert a.bytes_per_token_ckv == b.bytes_per_token_ckv == 20


def test_each_prompt_is_compared_with_its_own_counterpart(cases, results):
    results[verify.ORDINARY].groups[1].logprobs = [[-1.0, -2.0], [-1.0, -2.25]]
    results[verify.NO_DCP].groups[1].logprobs = [[-1.5, -2.0], [-1.0, -2.0]]
    _, a, b = verify.report_cases(cases, results, None)
    assert (a.max_logprob_delta_vs_dcp, b.max_logprob_delta_vs_dcp) == (0, 0.25)
    assert (a.max_logprob_delta_vs_no_dcp, b.max_logprob_delta_vs_no_dcp) == (0.5, 0)
    assert (a.dcp_logprob_delta_vs_no_dcp, b.dcp_logprob_delta_vs_no_dcp) == (0.5, 0.25)


def test_differences_count_up_to_the_first_token_that_differs(cases, results):
    full = results[verify.FULL_CKV].groups[0]
    full.tokens, full.logprobs = [[7, 9, 1]], [[-1.0, -2.5, -9.0]]
    for name in (verify.ORDINARY, verify.NO_DCP):
        other = results[name].groups[0]
        other.tokens, other.logprobs = [[7, 8, 2]], [[-1.0, -2.0, -1.0]]
    report = verify.report_cases(cases, results, None)[0]
    assert not report.tokens_equal
    # Later tokens answer other prompts: 8.0 would mean nothing.
    assert report.max_logprob_delta_vs_dcp == 0.5


def test_engines_that_return_different_numbers_of_tokens_are_no_result(cases, results):
    results[verify.FULL_CKV].groups[0].tokens = [[7]]
    results[verify.FULL_CKV].groups[0].logprobs = [[-1.0]]
    with pytest.raises(ValueError):
        verify.report_cases(cases, results, None)


def test_the_oracle_scores_the_tokens_of_full_ckv(cases, results):
    near = [OracleStep(-1.0, 0.0), OracleStep(-2.05, 0.05)]
    far = [OracleStep(-1.0, 0.0), OracleStep(-2.0, 0.3)]
    a, b, c = verify.report_cases(cases, results, [near, far, near])
    assert a.oracle_logprob_delta == pytest.approx(0.05)
    assert (a.oracle_tokens_equal, b.oracle_tokens_equal) == (True, False)
    assert c.oracle_tokens_equal
    assert verify.find_failures(cases, [a, b, c]) == [
        "pair, a: a token is not transformers' choice, nor near a tie"
    ]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", [verify.NO_DCP, verify.ORDINARY, verify.FULL_CKV])
def test_a_nan_of_any_engine_at_any_token_is_wrong(cases, results, name, place):
    results[name].groups[1].logprobs = [[-1.0, -2.0], [-1.0, -2.0]]
    results[name].groups[1].logprobs[0][place] = NAN
    reports = verify.report_cases(cases, results, None)
    assert verify.find_failures(cases, reports)


@pytest.mark.parametrize("place", [0, 1])
def test_a_nan_of_the_oracle_is_wrong(cases, results, place):
    steps = [OracleStep(-1.0, 0.0), OracleStep(-2.0, 0.0)]
    broken = list(steps)
    broken[place] = OracleStep(NAN, NAN)
    reports = verify.report_cases(cases, results, [steps, broken, steps])
    assert math.isnan(reports[1].oracle_logprob_delta or 0)
    assert len(verify.find_failures(cases, reports)) == 2


def test_limits_are_inclusive():
    assert verify.find_failures([CASE], [right()]) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens_equal": False}, ["case:", "tokens differ from ordinary DCP"]),
        ({"max_logprob_delta_vs_dcp": 0.0201}, ["case:", "ordinary DCP by 0.0201", "0.02"]),
        ({"max_logprob_delta_vs_dcp": NAN}, ["case:", "ordinary DCP by nan"]),
        ({"max_logprob_delta_vs_no_dcp": 0.0601}, ["no DCP is 0.0601", "2 x", "0.0300"]),
        ({"max_logprob_delta_vs_no_dcp": NAN}, ["no DCP is nan"]),
        ({"dcp_logprob_delta_vs_no_dcp": NAN}, ["own nan"]),
        ({"dcp_logprob_delta_vs_no_dcp": 0.0}, ["no DCP is 0.0600", "0.0000"]),
        ({"gathered_batches": 0}, ["case:", "no batch gathered"]),
        ({"cached_tokens": 0}, ["case:", "nothing came from the prefix cache"]),
        ({"oracle_logprob_delta": 0.101}, ["case:", "transformers by 0.1010", "0.1"]),
        ({"oracle_logprob_delta": NAN}, ["case:", "transformers by nan"]),
        ({"oracle_tokens_equal": False}, ["case:", "not transformers' choice"]),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_every_kind_of_failure_is_found_alone_and_among_right_cases(changes, words, before):
    # The yardstick is the largest of all cases, so the right neighbour must not raise it.
    neighbour = right(max_logprob_delta_vs_no_dcp=0.0, dcp_logprob_delta_vs_no_dcp=0.0)
    reports = [right(**changes), neighbour] if before else [neighbour, right(**changes)]
    (failure,) = verify.find_failures([CASE, CASE], reports)
    for word in words:
        assert word in failure


def test_failures_of_one_case_are_all_listed():
    failures = verify.find_failures([CASE], [right(tokens_equal=False, gathered_batches=0)])
    assert len(failures) == 2


def test_the_table_has_a_row_per_case_and_marks_what_differs():
    odd = right(
        name="a much longer name",
        tokens_equal=False,
        oracle_logprob_delta=None,
        max_logprob_delta_vs_dcp=NAN,
        prompt_tokens=1100,
    )
    header, rule, first, second = verify.format_table([right(), odd]).splitlines()
    assert header.split()[:3] == ["case", "tokens", "cached"]
    assert set(rule) == {"-"} and len(rule) == len(header)
    cells = ["case", "10", "4", "yes", "0.0200", "0.0600", "0.0300", "0.1000"]
    assert first.split() == [*cells, "1", "1,122", "65,536", "1.0", "2.0"]
    assert second.startswith("a much longer name") and " NO " in second
    assert "1,100" in second and "nan" in second and " - " in second
    assert len(first) == len(second) == len(header)


@pytest.fixture
def fake_engines(monkeypatch, results, tmp_path):
    """Runs the command on ``results`` and ``cases``; returns what engines were started."""
    started = []

    def run_engine(job, log, *, use_gpu):
        started.append((job.name, use_gpu))
        log.write_text(
            f"INFO full-CKV gather: on, page 512 tokens, kernels {job.name[:4]}Kernels\n"
        )
        result = results[job.name]
        yield {"event": "start", "seconds": 9.0, "cache_blocks": 5, "block_size": 256}
        for one in result.groups:
            yield {"event": "group", **vars(one)}

    class Oracle:
        def __init__(self, model):
            assert (model / "config.json").is_file()

        def score(self, prompt, generated):
            return [OracleStep(-1.0, 0.0), OracleStep(-2.0, 0.0)]

    def write_model(folder, *, mhc, sizes):
        assert mhc and sizes == verify.SMALL
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(verify, "run_engine", run_engine)
    monkeypatch.setattr(verify, "TransformersOracle", Oracle)
    monkeypatch.setattr(verify, "write_model", write_model)
    monkeypatch.setattr(verify, "gpu_count", lambda: 0)
    monkeypatch.setattr(verify, "find_spec", lambda name: object())
    monkeypatch.setattr(verify, "choose_sizes", lambda wanted, use_gpu: verify.SMALL)
    monkeypatch.setattr(verify.tempfile, "tempdir", str(tmp_path))
    return started


@pytest.fixture
def small_cases(monkeypatch, cases):
    monkeypatch.setattr(verify, "make_cases", lambda text, dcp, index_topk: cases)


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.rglob("*.log"))


def test_a_right_run(fake_engines, small_cases, tmp_path, capsys):
    document = tmp_path / "result.json"
    assert cli.main(["verify", "--json", str(document)]) == 0
    output = capsys.readouterr().out
    assert "TP2, DCP2, 3 greedy cases, on the reference platform" in output
    assert "RIGHT" in output and "WRONG" not in output
    assert fake_engines == [
        (name, False) for name in (verify.NO_DCP, verify.ORDINARY, verify.FULL_CKV)
    ]
    assert kept(tmp_path) == []
    written = json.loads(document.read_text())
    assert written["ok"] is True and written["failures"] == []
    assert (written["dcp"], written["device"]) == (2, "cpu")
    assert written["kernels"] == "fullKernels"
    assert written["sizes"] == {"heads": 8, "index_topk": 128, "linear_heads": 4}
    assert "kernels: fullKernels; a query selects 128 tokens" in output
    assert {"python", "vllm", "torch", "vllm-b12x-ckv"} <= set(written["versions"])
    first = written["cases"][0]
    promised = {
        "name": "alone",
        "tokens_equal": True,
        "max_logprob_delta_vs_dcp": 0.0,
        "max_logprob_delta_vs_no_dcp": 0.0,
        "gathered_batches": 1,
        "bytes_per_token_ckv": 10.0,
        "bytes_per_token_dcp": 100.0,
        "seconds": 1.5,
    }
    assert promised.items() <= first.items()
    assert len(written["cases"]) == 3


def test_a_wrong_run(fake_engines, small_cases, results, tmp_path, capsys):
    results[verify.FULL_CKV].groups[0].tokens = [[7, 9]]
    document = tmp_path / "result.json"
    assert cli.main(["verify", "--no-oracle", "--json", str(document)]) == 1
    output = capsys.readouterr().out
    assert "WRONG: alone: tokens differ from ordinary DCP" in output and "RIGHT" not in output
    assert "logs are kept in" in output
    assert kept(tmp_path) == ["full-CKV.log", "no_DCP.log", "ordinary_DCP.log"]
    written = json.loads(document.read_text())
    assert written["ok"] is False
    assert written["failures"] == ["alone: tokens differ from ordinary DCP"]
    assert written["cases"][0]["oracle_logprob_delta"] is None


def test_an_engine_that_fails_is_reported_and_its_log_kept(
    fake_engines, small_cases, monkeypatch, tmp_path, capsys
):
    def run_engine(job, log, *, use_gpu):
        log.write_text("the log\n")
        yield {"event": "start", "seconds": 9.0, "cache_blocks": 5, "block_size": 256}
        raise RuntimeError("the engine 'no DCP' ended with status 9")

    monkeypatch.setattr(verify, "run_engine", run_engine)
    assert cli.main(["verify"]) == 1
    output = capsys.readouterr().out
    assert "the engine 'no DCP' ended with status 9" in output and "RIGHT" not in output
    assert "logs are kept in" in output and kept(tmp_path) == ["no_DCP.log"]


@pytest.mark.parametrize(
    ("gpus", "device", "use_gpu"),
    [
        (0, "auto", False),
        (1, "auto", False),
        (2, "auto", True),
        (8, "cpu", False),
        (2, "gpu", True),
    ],
)
def test_gpus_are_used_if_every_rank_has_one(
    fake_engines, small_cases, monkeypatch, capsys, gpus, device, use_gpu
):
    monkeypatch.setattr(verify, "gpu_count", lambda: gpus)
    assert cli.main(["verify", "--device", device]) == 0
    assert {used for _, used in fake_engines} == {use_gpu}
    assert ("on 2 GPUs" in capsys.readouterr().out) is use_gpu


def test_gpus_without_hyper_connections_leave_the_oracle_out_and_say_so(
    fake_engines, small_cases, monkeypatch, tmp_path, capsys
):
    written = []
    monkeypatch.setattr(verify, "gpu_count", lambda: 2)
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    monkeypatch.setattr(verify, "write_model", lambda folder, *, mhc, sizes: written.append(mhc))
    document = tmp_path / "result.json"
    assert cli.main(["verify", "--json", str(document)]) == 0
    assert written == [False]
    assert "tilelang is not installed" in capsys.readouterr().out
    assert json.loads(document.read_text())["cases"][0]["oracle_logprob_delta"] is None


def test_b12x_has_kernels_for_the_sizes_that_are_made_for_it_and_for_no_others():
    pytest.importorskip("b12x")
    from vllm.v1.attention.backends.mla.sparse_mla_kernels import b12x

    def plan_sizes(sizes: verify.Sizes, dcp: int) -> b12x.Sizes:
        config = small_config(sizes=sizes)
        heads, pool = config["num_attention_heads"], config["index_kpool"]
        return b12x.Sizes(
            page_size=verify.PAGE_TOKENS,
            record_bytes=528,
            head_counts=(heads // dcp, heads),
            index_heads=max(config["index_n_heads"], 32),
            topk=config["index_topk"] // pool,
            width=config["index_topk"] + pool - 1,
            scale=config["qk_nope_head_dim"] ** -0.5,
        )

    for dcp in (2, 4):
        assert plan_sizes(verify.FOR_B12X, dcp).topk == 512
        with pytest.raises(ValueError, match="b12x has kernels for"):
            plan_sizes(verify.SMALL, dcp)


def test_sizes_follow_the_kernels_of_the_gpu_unless_told(monkeypatch):
    from vllm.v1.attention.backends.mla import sparse_mla_kernels

    def gpu_with(name: str) -> None:
        monkeypatch.setattr(sparse_mla_kernels, "get_kernels", lambda: type(name, (), {})())

    gpu_with("B12xKernels")
    assert verify.choose_sizes("auto", use_gpu=True) == verify.FOR_B12X
    assert verify.choose_sizes("auto", use_gpu=False) == verify.SMALL
    assert verify.choose_sizes("small", use_gpu=True) == verify.SMALL
    gpu_with("TritonKernels")
    assert verify.choose_sizes("auto", use_gpu=True) == verify.SMALL
    assert verify.choose_sizes("b12x", use_gpu=True) == verify.FOR_B12X


def test_the_kernels_are_those_that_ran():
    """b12x hands a model that it has no kernels for to another provider, and says so later."""
    chosen = "INFO full-CKV gather: on, page 512 tokens, capacity 9, kernels B12xKernels\n"
    assert verify.kernels_of(chosen) == "B12xKernels"
    handed = "WARNING topk is 32, ...: TritonKernels serves this model instead of b12x\n"
    assert verify.kernels_of(chosen + handed) == "TritonKernels"
    assert verify.kernels_of("") == "unknown"


def test_asking_for_gpus_that_are_not_there_is_misuse(fake_engines, monkeypatch, capsys):
    monkeypatch.setattr(verify, "gpu_count", lambda: 3)
    assert cli.main(["verify", "--dcp", "4", "--device", "gpu"]) == 2
    output = capsys.readouterr().out
    assert "needs 4 GPUs, found 3" in output and "--device cpu" in output
    assert fake_engines == []


@pytest.mark.parametrize("kind", ["empty", "missing", "folder"])
def test_a_text_that_cannot_be_read_is_misuse(fake_engines, tmp_path, capsys, kind):
    path = tmp_path / "text"
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.mkdir()
    assert cli.main(["verify", "--text", str(path)]) == 2
    output = capsys.readouterr().out
    assert output.startswith("vllm-ckv verify: ")
    assert ("--text" if kind == "empty" else str(path)) in output
    assert fake_engines == []


def test_a_place_for_json_that_does_not_exist_is_noticed_before_the_work(
    fake_engines, small_cases, tmp_path, capsys
):
    path = tmp_path / "missing" / "result.json"
    assert cli.main(["verify", "--json", str(path)]) == 2
    assert str(path.parent) in capsys.readouterr().out
    assert fake_engines == []


@pytest.mark.parametrize(
    "arguments", [["--dcp", "3"], ["--dcp", "two"], ["--device", "tpu"], ["--nonsense"], ["more"]]
)
def test_malformed_arguments_are_misuse(arguments, capsys):
    with pytest.raises(SystemExit) as status:
        cli.main(["verify", *arguments])
    assert status.value.code == 2
    assert "usage: vllm-ckv" in capsys.readouterr().err


def test_the_default_text_is_the_readme():
    text = verify._read_text(None)
    assert text.startswith(b"# vllm-b12x-ckv") and len(text) > 1000


def test_module_entry_point_takes_the_same_arguments(fake_engines, small_cases):
    assert verify.main(["--no-oracle"]) == 0


def test_defaults():
    arguments = cli.build_parser().parse_args(["verify"])
    assert isinstance(arguments, Namespace)
    assert (arguments.dcp, arguments.device, arguments.text) == (2, "auto", None)
    assert arguments.json is None and arguments.no_oracle is False
