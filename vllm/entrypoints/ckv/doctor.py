# SPDX-License-Identifier: Apache-2.0
"""``vllm-ckv doctor``: what is installed, what this machine would run, and what would go wrong.

The text is made to be pasted into a bug report: it names versions, flags and hardware, but no
path, no key and no host. Starts no engine and writes nothing. With ``--url`` it also shows what a
running server has gathered.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

from vllm.entrypoints.ckv.bench import Server
from vllm.entrypoints.ckv.output import UsageError, check_folders, versions

ENVIRONMENT = (
    "VLLM_PLUGINS",
    "VLLM_NCCL_SO_PATH",
    "VLLM_USE_NCCL_SYMM_MEM",
    "VLLM_ENABLE_STARTUP_PLAN",
    "VLLM_KV_CACHE_LAYOUT",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
    "NCCL_NVLS_ENABLE",
)
"""Variables that change what the backend does, beside its own flags."""

NCCL_OPTIONAL = frozenset({"ncclCommQueryProperties", "ncclGetLastError"})
"""Functions that vLLM's wrapper can do without; it gives up on a library that lacks another."""

NO_GPU = "no NVIDIA GPU"


@dataclass
class Report:
    """What the doctor found.

    sections: title -> name -> value, in the order they are printed.
    problems: what would stop serving, or make it wrong; one sentence each with the remedy.
    notes: what is worth knowing.
    """

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The report as people read and paste it."""
        lines = []
        for title, values in self.sections.items():
            lines.append(title)
            width = max(map(len, values), default=0)
            for name, value in values.items():
                first, *rest = value.splitlines() or [""]
                lines.append(f"  {name.ljust(width)}  {first}".rstrip())
                lines += [f"    {line}".rstrip() for line in rest]
            lines.append("")
        lines += [f"NOTE: {note}" for note in self.notes]
        lines += [f"PROBLEM: {problem}" for problem in self.problems]
        count = len(self.problems)
        lines.append(
            f"verdict: {count} problem{'s' if count > 1 else ''}" if count else "verdict: ready"
        )
        return scrub("\n".join(lines))


def scrub(text: str) -> str:
    """``text`` without absolute paths and without the name of this host."""
    text = re.sub(r"(?<![\w.:/])(?:~|/[\w.+@-]+)(?:/[\w.+@-]+)+/?", "(path)", text)
    host = platform.node()
    return re.sub(rf"\b{re.escape(host)}\b", "(host)", text) if len(host) > 3 else text


def examine_registration(report: Report) -> None:
    """Load vLLM's general plugins as an engine does, and see whether the backend is there."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm.plugins import b12x_mla_sparse as registration
    from vllm.plugins import load_general_plugins

    values = report.sections["registration"] = {}
    for group in ("vllm.general_plugins", "vllm.platform_plugins"):
        there = any(point.name == "b12x_mla_sparse" for point in entry_points(group=group))
        values[group] = "installed" if there else "MISSING"
        if not there:
            report.problems.append(
                f"the entry point b12x_mla_sparse of {group} is missing: reinstall vllm-b12x-ckv"
            )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "b12x_mla_sparse" not in allowed.split(","):
        report.problems.append(
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading the backend: add b12x_mla_sparse"
        )
    if not registration.version_is_supported():
        report.problems.append(
            f"vLLM {version('vllm')} is not supported: install "
            f"{registration.SUPPORTED_VERSIONS}, for example pip install vllm==0.33.0"
        )
    try:
        load_general_plugins()
    except Exception as error:
        # A malformed flag, most likely, which the flags' own section reports.
        values["loading plugins"] = f"{type(error).__name__}: {error}"
    known = registration.BACKEND_NAME in AttentionBackendEnum.__members__
    values["backend"] = f"{registration.BACKEND_NAME} {'registered' if known else 'NOT registered'}"
    if not known and not report.problems:
        report.problems.append(
            "vLLM does not know the backend although the plugin is installed: run "
            "'python -c \"from vllm.plugins.b12x_mla_sparse import register; register()\"'"
        )


def examine_flags(report: Report) -> None:
    """Every flag with its value and where that comes from; then the variables around them."""
    from vllm.plugins.b12x_mla_sparse import FLAGS, OF_THE_GATHER, check_flags

    values = report.sections["flags"] = {}
    for flag in FLAGS:
        text = os.environ.get(flag.name)
        try:
            value = flag.read()
        except ValueError:
            values[flag.name] = f"{text!r} (environment), NOT accepted: {flag.accepted}"
            continue
        shown = "unset" if value is None else str(int(value) if isinstance(value, bool) else value)
        values[flag.name] = f"{shown} ({'default' if text is None else 'environment'})"
    try:
        check_flags()
    except ValueError as error:
        report.problems.append(str(error))
    switch, *options = (flag for flag in FLAGS if flag.name.startswith(OF_THE_GATHER))
    idle = [flag.name for flag in options if flag.name in os.environ]
    if idle and os.environ.get(switch.name, "0") == "0":
        report.notes.append(
            f"{' and '.join(idle)} without effect here: {switch.name} is "
            f"{os.environ.get(switch.name, 'unset')}; set it to 1 or auto"
        )
    for name in ENVIRONMENT:
        if name in os.environ:
            values[name] = f"{os.environ[name]} (environment)"


def examine_hardware(report: Report, platform_: Any) -> None:
    """GPUs, the links between them, and the kernel provider that would serve.

    platform_: vLLM's current platform.
    """
    from vllm.plugins.b12x_mla_sparse import hardware_remark

    values = report.sections["hardware"] = {}
    values["driver"] = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    values["driver"] = values["driver"].splitlines()[0] if values["driver"] else "none"
    if platform_.is_cuda():
        capability = platform_.get_device_capability()
        count = platform_.device_count()
        values["GPUs"] = f"{count} x {platform_.get_device_name()}"
        values["family"] = f"compute capability {capability.as_version_str()}"
        if count > 1:
            values["links"] = "\n" + links(_ask("nvidia-smi", "topo", "-m"))
        if count == 1:
            report.notes.append("one GPU: a gather needs decode context parallelism over two")
    else:
        values["GPUs"] = NO_GPU
    try:
        from vllm.v1.attention.backends.mla.sparse_mla_kernels import get_kernels

        values["kernels"] = type(get_kernels()).__name__
    except Exception as error:
        values["kernels"] = "none"
        report.problems.append(f"no kernel provider: {error}")
    remark = hardware_remark(platform_)
    if remark is not None:
        note_only = platform_.is_cuda() and "not installed" in remark
        (report.notes if note_only else report.problems).append(remark)


def links(topology: str) -> str:
    """The matrix of ``nvidia-smi topo -m``, without colours, CPU columns and legend."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = []
    for line in plain.splitlines():
        cells = [cell.strip() for cell in line.split("\t") if cell.strip()]
        if not cells:
            continue
        if cells[0].startswith("Legend"):
            break
        if cells[0].startswith("GPU"):
            rows.append(cells)
    if not rows:
        return "unknown"
    gpus = [cell for cell in rows[0] if re.fullmatch(r"GPU\d+", cell)]
    lines = ["      " + " ".join(gpu.rjust(6) for gpu in gpus)]
    for row in rows[1:]:
        lines.append(row[0].ljust(6) + " ".join(cell.rjust(6) for cell in row[1 : len(gpus) + 1]))
    return "\n".join(lines)


def _ask(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


@dataclass(frozen=True)
class NcclLibrary:
    """An NCCL library that vLLM would use. version: for example "2.28.9". missing: functions."""

    version: str
    missing: tuple[str, ...]


def inspect_nccl(library: str) -> NcclLibrary:
    """Open ``library`` and look for every function that vLLM's NCCL wrapper asks for.

    Raises:
        OSError: there is no such library, or it does not load.
    """
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary as Wrapper

    handle = ctypes.CDLL(library)
    missing = [
        function.name
        for function in Wrapper.exported_functions
        if function.name not in NCCL_OPTIONAL and not hasattr(handle, function.name)
    ]
    number = ctypes.c_int()
    if "ncclGetVersion" in missing or handle.ncclGetVersion(ctypes.byref(number)) != 0:
        return NcclLibrary("unknown", tuple(missing))
    return NcclLibrary(nccl_version(number.value), tuple(missing))


def nccl_version(code: int) -> str:
    """``22809`` -> ``2.28.9``; up to 2.8 the code has four digits."""
    if code < 10_000:
        return f"{code // 1000}.{code // 100 % 10}.{code % 100}"
    return f"{code // 10_000}.{code // 100 % 100}.{code % 100}"


def examine_nccl(report: Report) -> None:
    """The NCCL that vLLM would open, against what vLLM asks of it.

    vLLM turns its NCCL communicator off when a function is missing, without an error: collectives
    that it thinks it made then leave memory as it was.
    """
    from vllm.utils.nccl import find_nccl_library

    values = report.sections["NCCL"] = {}
    try:
        library = find_nccl_library()
    except ValueError as error:
        values["library"] = f"none ({error})"
        return
    try:
        found = inspect_nccl(library)
    except OSError as error:
        values["library"] = f"{os.path.basename(library)}, does not load"
        report.problems.append(
            f"vLLM's NCCL library does not load ({error}): install the nvidia-nccl package that "
            "torch asks for, or correct VLLM_NCCL_SO_PATH"
        )
        return
    values["library"] = f"{os.path.basename(library)}, version {found.version}"
    values["torch's"] = _torch_nccl()
    values["functions vLLM needs"] = (
        f"missing: {', '.join(found.missing)}" if found.missing else "all there"
    )
    if found.missing:
        report.problems.append(
            f"NCCL {found.version} lacks {', '.join(found.missing)}, which vLLM asks for: vLLM "
            "then runs without its NCCL communicator and collectives give wrong results; install "
            "the nvidia-nccl version that vLLM's torch requires, or set VLLM_NCCL_SO_PATH to it"
        )


def _torch_nccl() -> str:
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:
        return "none"


def examine_kernels(report: Report, use_gpu: bool) -> None:
    """Run the self-test on the torch reference, and on the GPU's provider if there is one."""
    from vllm.entrypoints.ckv.selftest import run_self_test

    values = report.sections["self-test"] = {}

    def check(name: str, make: Callable[[], Any], device: str) -> None:
        try:
            result = run_self_test(make(), device)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            values[name] = "FAILED"
            report.problems.append(f"self-test of {name}: {reason}")
            return
        values[name] = "; ".join(result.failures) or (
            f"right (attention within {result.output_error:.1e}, selection exact)"
        )
        report.problems += [f"self-test of {name}: {failure}" for failure in result.failures]

    from vllm.v1.attention.backends.mla.sparse_mla_kernels.torch_reference import (
        TorchReferenceKernels,
    )

    check("torch reference", TorchReferenceKernels, "cpu")
    if use_gpu:
        from vllm.v1.attention.backends.mla.sparse_mla_kernels import get_kernels

        check(report.sections["hardware"]["kernels"], get_kernels, "cuda")


def examine_server(report: Report, scraped: str) -> None:
    """What a server has gathered since it started.

    scraped: what its ``/metrics`` answered.
    """
    from vllm.v1.attention.backends.mla.ckv_gather import metrics
    from vllm.v1.attention.backends.mla.ckv_gather.counters import NOT_PREFILL

    values = report.sections["server"] = {}
    for engine, counters in sorted(metrics.read(scraped).items()):
        values[f"engine {engine}"] = counters.summary()
        if not counters.gathered_batches and counters.prefill_batches:
            reason = max(set(counters.ordinary) - NOT_PREFILL, key=counters.ordinary.__getitem__)
            report.notes.append(
                f"engine {engine} gathered none of {counters.prefill_batches:,} batches that held "
                f"a prompt, most often for {reason.value}: its log has the first one's numbers"
            )
    if not values:
        values["counters"] = "none"
        report.problems.append(
            "the server has no counters of ours: it runs without the gather, so start it with "
            "VLLM_B12X_MLA_CKV_GATHER=1, --attention-backend B12X_MLA_SPARSE and "
            "--decode-context-parallel-size above 1"
        )


def examine(*, self_test: bool = True) -> Report:
    """The whole examination of this process's environment."""
    from vllm.platforms.ckv_reference import declare_torchvision_ops

    declare_torchvision_ops()
    report = Report()
    report.sections["versions"] = versions()
    examine_registration(report)
    examine_flags(report)
    from vllm.platforms import current_platform

    examine_hardware(report, current_platform)
    examine_nccl(report)
    if self_test:
        examine_kernels(report, current_platform.is_cuda())
    return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "exit status: 0 if this machine is ready, 1 if there are problems. The report has no paths "
        "and no keys: paste it into a bug report."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report here")
    parser.add_argument(
        "--url", help="also show what this 'vllm serve' has gathered, http://HOST:PORT"
    )
    parser.add_argument("--no-self-test", action="store_true", help="leave the self-test out")


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0 ready, 1 with problems, 2 for misuse."""
    try:
        check_folders(json=arguments.json)
        scraped = None if arguments.url is None else Server(arguments.url).metrics()
    except UsageError as error:
        print(f"vllm-ckv doctor: {error}")
        return 2
    report = examine(self_test=not arguments.no_self_test)
    if scraped is not None:
        examine_server(report, scraped)
        report.notes.append("flags and hardware are those of this shell, not of the server")
    print(report.text())
    if arguments.json is not None:
        document: Mapping[str, Any] = {**asdict(report), "ready": not report.problems}
        arguments.json.write_text(scrub(json.dumps(document, indent=1)) + "\n")
    return 1 if report.problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m vllm.entrypoints.ckv.doctor``."""
    parser = argparse.ArgumentParser(prog="vllm-ckv doctor", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
