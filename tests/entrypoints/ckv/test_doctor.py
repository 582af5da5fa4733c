# SPDX-License-Identifier: Apache-2.0
"""``vllm-ckv doctor``: what it finds, what it calls a problem, and what it does not tell."""

import ctypes.util
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from vllm.entrypoints.ckv import doctor as d
from vllm.entrypoints.ckv.selftest import SelfTest, run_self_test
from vllm.platforms.ckv_reference import environment
from vllm.plugins.b12x_mla_sparse import FLAGS
from vllm.v1.attention.backends.mla.ckv_gather import metrics
from vllm.v1.attention.backends.mla.ckv_gather.counters import GatherCounters
from vllm.v1.attention.backends.mla.ckv_gather.eligibility import Reason
from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import TorchReferenceKernels

TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t0-47\t0\t\tN/A
NIC0\tPIX\tSYS\t X\t

Legend:

  X    = Self
"""


def doctor(*arguments, **variables):
    """Run the command in a process of its own, on a machine that seems to have no GPU."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "NCCL_"))}
    return subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.ckv.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=env | {"CUDA_VISIBLE_DEVICES": ""} | variables,
    )


def test_ready_on_the_reference_platform(tmp_path):
    document = tmp_path / "report.json"
    result = doctor("--json", str(document), **environment())
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    text = result.stdout
    assert text.rstrip().endswith("verdict: ready")
    assert "B12X_MLA_SPARSE registered" in text
    assert "torch reference  right" in text
    assert "VLLM_B12X_MLA_CKV_GATHER_MIN_TOKENS  16 (default)" in text
    report = json.loads(document.read_text())
    assert report["ready"] and report["sections"]["versions"]["vllm"].startswith("0.33")
    for secret in (str(Path.home()), os.getcwd(), sys.prefix):
        assert secret not in text and secret not in document.read_text()


def test_wrong_surroundings_are_named_with_a_remedy():
    libm = ctypes.util.find_library("m")
    result = doctor(
        "--no-self-test",
        VLLM_PLUGINS="other",
        VLLM_B12X_MLA_CKV_GATHER="yes",
        VLLM_NCCL_SO_PATH=libm,
        VLLM_API_KEY="sk-secret",
    )
    assert result.returncode == 1, result.stderr[-2000:]
    problems = [line for line in result.stdout.splitlines() if line.startswith("PROBLEM")]
    for words in (
        "add b12x_mla_sparse",
        "VLLM_B12X_MLA_CKV_GATHER='yes' is not accepted",
        "needs an NVIDIA GPU",
        "ncclCommSuspend",
    ):
        assert any(words in line for line in problems), words
    assert "B12X_MLA_SPARSE NOT registered" in result.stdout
    assert "'yes' (environment), NOT accepted" in result.stdout
    assert "sk-secret" not in result.stdout
    assert "self-test" not in result.stdout
    assert result.stdout.rstrip().endswith("verdict: 4 problems")


@pytest.mark.parametrize("mode", [None, "0", "1", "auto"])
def test_options_of_a_gather_that_is_off_are_named(monkeypatch, mode):
    for flag in FLAGS:
        monkeypatch.delenv(flag.name, raising=False)
    if mode is not None:
        monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", mode)
    monkeypatch.setenv("VLLM_CKV_DEBUG", "1")
    report = d.Report()
    d.examine_flags(report)
    assert not report.notes and not report.problems
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_EARLY_EXCHANGE", "1")
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER_MIXED", "1")
    d.examine_flags(report)
    said = (
        "VLLM_B12X_MLA_CKV_GATHER_MIXED and VLLM_B12X_MLA_CKV_EARLY_EXCHANGE without effect here: "
        f"VLLM_B12X_MLA_CKV_GATHER is {mode or 'unset'}; set it to 1 or auto"
    )
    assert report.notes == ([said] if mode in (None, "0") else [])
    # Every flag is shown, whatever it is set to.
    assert set(report.sections["flags"]) >= {flag.name for flag in FLAGS}


def test_the_bug_report_asks_for_it():
    template = Path(__file__).parents[3] / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml"
    assert "vllm-ckv doctor" in template.read_text()


@pytest.fixture
def fake_nccl(tmp_path):
    """Builds a library with the functions it is given and a version."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")

    def build(names, version):
        source = tmp_path / "nccl.c"
        lines = [f"int {name}(void) {{ return 0; }}" for name in names if name != "ncclGetVersion"]
        lines.append(f"int ncclGetVersion(int *v) {{ *v = {version}; return 0; }}")
        source.write_text("\n".join(lines))
        library = tmp_path / f"libnccl{version}.so.2"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        return str(library)

    return build


def needed():
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return [function.name for function in NCCLLibrary.exported_functions]


def test_an_nccl_that_lacks_functions_is_a_problem(fake_nccl, monkeypatch):
    old = [name for name in needed() if name not in ("ncclCommSuspend", "ncclCommResume")]
    library = fake_nccl(old, 22809)
    assert d.inspect_nccl(library) == d.NcclLibrary("2.28.9", ("ncclCommSuspend", "ncclCommResume"))
    monkeypatch.setattr("vllm.utils.nccl.find_nccl_library", lambda: library)
    report = d.Report()
    d.examine_nccl(report)
    (problem,) = report.problems
    assert "NCCL 2.28.9 lacks ncclCommSuspend, ncclCommResume" in problem
    assert "set VLLM_NCCL_SO_PATH" in problem


def test_an_nccl_is_judged_as_vllm_judges_it(fake_nccl):
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    # Every function on its own: vLLM's wrapper gives up on the library, or does not.
    everything = needed()
    for number, left_out in enumerate(everything):
        if left_out == "ncclGetVersion":
            continue
        library = fake_nccl([n for n in everything if n != left_out], 23000 + number)
        try:
            NCCLLibrary(library)
            gives_up = False
        except AttributeError:
            gives_up = True
        assert bool(d.inspect_nccl(library).missing) == gives_up, left_out


def test_a_complete_nccl_and_one_that_does_not_load(fake_nccl, monkeypatch):
    library = fake_nccl(needed(), 22907)
    monkeypatch.setattr("vllm.utils.nccl.find_nccl_library", lambda: library)
    report = d.Report()
    d.examine_nccl(report)
    assert not report.problems
    assert report.sections["NCCL"]["functions vLLM needs"] == "all there"
    monkeypatch.setattr("vllm.utils.nccl.find_nccl_library", lambda: "libnone.so.9")
    d.examine_nccl(report)
    assert "does not load" in report.problems[0]


@pytest.mark.parametrize(("code", "text"), [(22809, "2.28.9"), (23102, "2.31.2"), (2708, "2.7.8")])
def test_nccl_versions(code, text):
    assert d.nccl_version(code) == text


def test_links_without_colours_and_legend():
    assert d.links(TOPOLOGY).split() == [
        *("GPU0", "GPU1"),
        *("GPU0", "X", "NV18"),
        *("GPU1", "NV18", "X"),
    ]
    assert d.links("") == "unknown"


class Cuda:
    """A platform with GPUs of one capability."""

    def __init__(self, capability, count=2):
        self.capability, self.count = capability, count

    def is_cuda(self):
        return True

    def has_device_capability(self, least):
        return self.capability >= least

    def is_device_capability_family(self, family):
        return self.capability // 10 == family // 10

    def get_device_capability(self):
        return SimpleNamespace(as_version_str=lambda: f"{self.capability / 10:.1f}")

    def device_count(self):
        return self.count

    def get_device_name(self):
        return "Test GPU"


def test_gpus_links_and_one_gpu(monkeypatch):
    answers = {"--query-gpu=driver_version": "590.1\n590.1", "topo": TOPOLOGY}
    monkeypatch.setattr(d, "_ask", lambda command, *rest: answers[rest[0]])
    report = d.Report()
    d.examine_hardware(report, Cuda(90))
    values = report.sections["hardware"]
    assert values["driver"] == "590.1" and values["GPUs"] == "2 x Test GPU"
    assert values["family"] == "compute capability 9.0" and "NV18" in report.text()
    assert not report.problems and not report.notes
    d.examine_hardware(report, Cuda(90, count=1))
    assert "decode context parallelism" in report.notes[0]


def test_an_old_gpu_is_a_problem():
    report = d.Report()
    d.examine_hardware(report, Cuda(75))
    assert any("needs compute capability 8.0" in problem for problem in report.problems)


def test_paths_and_the_host_are_not_told(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "build-7")
    told = d.scrub("at /home/ann/x.so, ~/m, on build-7; 2/3 of PCIe/NVLink, https://a.b/c, /x")
    assert told == "at (path), (path), on (host); 2/3 of PCIe/NVLink, https://a.b/c, /x"


class Broken(TorchReferenceKernels):
    """A provider with one fault."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def pack_records(self, cache, block_table, local_lens, starts, out):
        super().pack_records(cache, block_table, local_lens, starts, out)
        if self.fault == "records":
            out[3] = out[2]

    def write_records(self, latents, cache, slots):
        # Those that every rank writes by itself lie in order.
        if self.fault == "own records" and slots[0] == 0 and slots[1] == 1 and (slots >= 0).all():
            latents = latents.roll(1, 0)
        super().write_records(latents, cache, slots)

    def remap(self, *args, **options):
        if self.fault == "own rows":
            options["own_starts"] = options["own_starts"] - 1
        if self.fault == "window" and options["window"]:
            begin, end = options["window"]
            options["window"] = (begin, (begin + end) // 2)
        return super().remap(*args, **options)

    def merge_pool_candidates(self, scores, global_ids, topk):
        ids, best = super().merge_pool_candidates(scores, global_ids, topk)
        return (global_ids[:, :topk] if self.fault == "merge" else ids), best

    def write_pools(self, *args):
        super().write_pools(*args)
        if self.fault == "own pools":
            args[-1].pages[0, 5] = args[-1].pages[0, 4]

    def unpack_pools(self, *args):
        super().unpack_pools(*args)
        if self.fault == "pools":
            args[4][0, 0] ^= 1

    def select_pools(self, *args):
        ids, scores = super().select_pools(*args)
        if self.fault == "selection":
            ids[0] = ids[0].sort().values[0] + ids[0].argsort().argsort()
        return ids, scores

    def attend(self, *args):
        out, lse = super().attend(*args)
        return (out * 1.1 if self.fault == "output" else out), (
            lse * float("nan") if self.fault == "lse" else lse
        )


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("records", "gathered records differ"),
        ("pools", "gathered index keys differ"),
        ("selection", "selection is off"),
        ("output", "attention is off"),
        ("lse", "log-sum-exps are off"),
        ("own records", "gathered records differ"),
        ("own pools", "gathered index keys differ"),
        ("own rows", "attention is off"),
        ("window", "attention is off"),
        ("merge", "selection is off"),
        ("none", None),
    ],
)
def test_the_self_test_sees_each_fault(fault, words):
    failures = run_self_test(Broken(fault)).failures
    assert failures == [] if words is None else any(words in failure for failure in failures)


def test_the_self_test_has_sizes_that_b12x_has_kernels_for():
    """Without them, or before a warm-up, its provider would hand the test to another or refuse."""
    pytest.importorskip("b12x")
    from vllm.v1.attention.backends.mla.sparse_mla_kernels.b12x import Sizes

    warmed = []

    class Warm(TorchReferenceKernels):
        def warm_up(self, device, **sizes):
            warmed.append(sizes)

        def write_records(self, *args):
            assert warmed, "an operation before the warm-up"
            super().write_records(*args)

    assert not run_self_test(Warm()).failures
    (sizes,) = warmed
    names = ("page_size", "record_bytes", "head_counts", "index_heads", "topk", "width", "scale")
    assert Sizes(**{name: sizes[name] for name in names}).topk == 512


def test_nan_fails():
    right = SelfTest(True, True, 0.0, 0.0, 0.0)
    assert not right.failures
    assert replace(right, output_error=float("nan")).failures


def test_a_provider_that_raises_is_a_problem(monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel image\nfor this device")

    monkeypatch.setattr("vllm.entrypoints.ckv.selftest.run_self_test", fail)
    report = d.Report()
    d.examine_kernels(report, use_gpu=False)
    assert report.problems == ["self-test of torch reference: no kernel image"]


def scraped(folder: Path, *totals: GatherCounters) -> str:
    for number, counters in enumerate(totals):
        (folder / f"{number}.json").write_text(json.dumps(counters.as_dict()))
    registry = CollectorRegistry()
    registry.register(metrics.GatherCollector(folder))
    return generate_latest(registry).decode()


def test_a_servers_counters_are_shown_as_in_its_log(tmp_path):
    counters = GatherCounters(gathered_batches=812, gathered_windows=815)
    counters.ordinary[Reason.DECODE_TOKENS] = 10
    report = d.Report()
    d.examine_server(report, scraped(tmp_path, counters))
    assert report.sections["server"] == {"engine 0": counters.summary()}
    assert not report.notes and not report.problems


def test_a_server_that_does_not_gather_is_told_why(tmp_path):
    idle, refusing = GatherCounters(), GatherCounters()
    refusing.ordinary.update({Reason.TOO_FEW_TOKENS: 5, Reason.DECODE_TOKENS: 2})
    refusing.ordinary[Reason.DECODE_ONLY] = 99
    report = d.Report()
    d.examine_server(report, scraped(tmp_path, idle, refusing))
    (note,) = report.notes
    assert "engine 1 gathered none of 7 batches" in note and "too_few_tokens" in note
    report = d.Report()
    d.examine_server(report, "vllm:other_total 3.0\n")
    assert "runs without the gather" in report.problems[0]


def test_no_server_at_the_address(capsys):
    assert d.main(["--url", "http://127.0.0.1:9"]) == 2
    assert "no vLLM server answers" in capsys.readouterr().out
