#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile every program that the b12x provider launches, natively for sm_120a, without a GPU.

    python benchmarks/compile_b12x.py                       # all geometries, writes the table
    python benchmarks/compile_b12x.py --only tp4dcp4 --out /tmp/table.csv
    python benchmarks/compile_b12x.py --provider triton     # that provider, for other GPUs as well

Compiled is not executed: the table shows that shapes, widths, heads and page sizes are ones that
the compiler takes, and what the programs need of a multiprocessor. Each set of geometries is
compiled in a process of its own, set up as b12x sets up its compiler workers (a private function of
b12x 1.5.1), with caches of its own and a time limit.

Columns of the table: program; geometry; registers a thread; shared_bytes of a block, static and
dynamic; spill_bytes, local memory of a thread; seconds of compilation on this machine.
"""

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_FOLDER = Path(__file__).with_name("results")
RESULTS = {"b12x": _FOLDER / "b12x_sm120a.csv", "triton": _FOLDER / "triton_families.csv"}
COLUMNS = ("program", "geometry", "registers", "shared_bytes", "spill_bytes", "seconds")
SHARED_LIMIT = 101_376
"""Bytes of shared memory that one block may have on compute capability 12.0 and 12.1."""
DEVICES = {
    "sm_80": ((8, 0), "NVIDIA A100", 108, 166_912),
    "sm_89": ((8, 9), "NVIDIA L40S", 142, SHARED_LIMIT),
    "sm_100": ((10, 0), "NVIDIA B200", 148, 232_448),
    "sm_120": ((12, 0), "NVIDIA RTX PRO 6000 Blackwell", 188, SHARED_LIMIT),
    "sm_121": ((12, 1), "NVIDIA GB10", 48, SHARED_LIMIT),
}
"""Capability, product, multiprocessors, bytes of shared memory that one block may have."""

# page sizes of the writer; heads: of one rank and of all ranks together; shared: also the
# kernels that come from the Triton provider.
SETS: dict[str, dict] = {
    "tp4dcp4": {"record": 528, "pages": [2304], "heads": [16, 64], "shared": True},
    "fp8": {
        "record": 528,
        "pages": [64, 1280, 2304, 4352, 8704],
        "heads": [8, 16, 32, 64],
        "shared": True,
    },
    "nvfp4": {
        "record": 304,
        "pages": [64, 1280, 2304, 4352, 8704],
        "heads": [8, 16, 32, 64],
        "shared": False,
    },
    "gb10": {
        "record": 528,
        "pages": [2304],
        "heads": [8, 16, 32, 64],
        "shared": False,
        "device": "sm_121",
    },
}
SETS |= {
    f"triton {name}": {"provider": "triton", "device": name, "heads": [8, 16, 32, 64]}
    for name in ("sm_80", "sm_89", "sm_100", "sm_120", "sm_121")
}


def compile_set(name: str, timeout: float) -> list[dict]:
    """Compile one set of ``SETS`` in a process of its own and return the table's rows.

    timeout: seconds.

    Raises:
        RuntimeError: a program does not compile; the message has the end of the compiler's output.
        subprocess.TimeoutExpired: the limit is over; the process is gone.
    """
    with tempfile.TemporaryDirectory(prefix="b12x-compile-") as folder:
        environment = os.environ | {
            "B12X_COMPILE_CACHE_DIR": f"{folder}/cute",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("TRITON_INTERPRET", None)
        report = Path(folder) / "rows.json"
        child = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--child", name, "--out", str(report)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if child.returncode or not report.exists():
            raise RuntimeError(f"set {name}:\n{(child.stdout + child.stderr)[-4000:]}")
        return json.loads(report.read_text())


# In the child


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """(registers, static shared bytes, local bytes) of the one kernel in a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    line = next(part for part in text.splitlines() if "REG:" in part)
    values = dict(field.split(":") for field in line.split() if "[" not in field)
    return int(values["REG"]), int(values["SHARED"]), int(values["STACK"]) + int(values["LOCAL"])


def _cute_program(key: str) -> tuple[str, int, int, int]:
    """(kernel name, registers, shared bytes, local bytes) of a program in b12x's cache."""
    path = Path(os.environ["B12X_COMPILE_CACHE_DIR"]) / key[:2] / key
    manifest = json.loads(path.with_suffix(".json").read_text())
    content = path.with_suffix(".o").read_bytes()
    # The cubin is an ELF file inside the host's object file.
    registers, static, local = _resources(content[content.index(b"\x7fELF", 4) :])
    dynamic = manifest["launch_metadata"]["launch_dynamic_smem_bytes"]
    return manifest["kernel_id"], registers, static + max(map(max, dynamic.values())), local


class Recorder:
    """Compiles b12x's jobs one by one and keeps one row per program."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self._seen: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._last = 0.0

    def install(self) -> None:
        """Time each compilation and learn its key."""
        from b12x._lib import compiler

        call, store = compiler._call_cute_compile, compiler._store_cute_compile_to_disk

        def timed(*args, **kwargs):
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._last = time.perf_counter() - begin

        def stored(cache_key, *args, **kwargs):
            self._seconds[cache_key] = self._last
            return store(cache_key, *args, **kwargs)

        compiler._call_cute_compile = timed
        compiler._store_cute_compile_to_disk = stored

    def run(self, plan, device, geometry: str) -> None:
        from b12x._lib.compile_plan import observe_programs
        from b12x._lib.compile_pool import _factory

        configuration = plan.contract.configure(
            plan.query, device=device.identity, override=plan.override
        )
        config = configuration.pinned or configuration.default
        with observe_programs() as programs:
            for job in plan._compile_jobs(config, device):
                _factory(job.factory)(*job.args, **dict(job.kwargs))
        for program in sorted(programs, key=lambda p: p.name):
            if program.key in self._seen or program.dialect != "cute":
                continue
            self._seen.add(program.key)
            name, registers, shared, local = _cute_program(program.key)
            self.add(name, geometry, registers, shared, local, self._seconds[program.key])

    def add(self, program, geometry, registers, shared, local, seconds) -> None:
        row = (program, geometry, registers, shared, local, round(seconds, 2))
        self.rows.append(dict(zip(COLUMNS, row, strict=True)))

    def triton(self, geometry: str) -> None:
        """The Triton programs compiled so far, from Triton's cache."""
        for path in sorted(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")):
            if str(path) in self._seen:
                continue
            self._seen.add(str(path))
            metadata = json.loads(path.with_suffix(".json").read_text())
            registers, static, local = _resources(path.read_bytes())
            shared = max(static, int(metadata["shared"]))
            self.add(
                f"triton.{path.stem}", geometry, registers, shared, local,
                TRITON_SECONDS.get(metadata["hash"], 0.0),
            )  # fmt: skip


TRITON_SECONDS: dict[str, float] = {}


def _time_triton() -> None:
    from triton import knobs

    def listener(*args, **kwargs):
        metadata, times = kwargs.get("metadata"), kwargs.get("times")
        if metadata and times:
            TRITON_SECONDS[metadata["hash"]] = times.total / 1e6

    knobs.compilation.listener = listener


def _compile_only_triton(capability: tuple[int, int]) -> None:
    """Make launches of Triton kernels compile for the target and run nothing."""
    import torch
    import triton
    import vllm._custom_ops
    from triton.runtime.jit import JITFunction, MockTensor

    from vllm.v1.attention.backends.mla.sparse_mla_kernels import triton as provider

    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        args = [MockTensor(a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    # Its threads ask for a GPU; and the top-k is vLLM's own, compiled long ago.
    provider._run_tasks = lambda tasks, device: [task() for task in tasks]
    vllm._custom_ops.top_k_per_row_prefill = lambda *args, **kwargs: None
    major, minor = capability
    assert triton.runtime.driver.active.get_current_target().arch == 10 * major + minor


def _compile_triton(head_counts: list[int], index_heads: int, world: int) -> None:
    """Launch what the Triton provider warms up; for no heads, what it shares with b12x's."""
    import torch

    from vllm.v1.attention.backends.mla.sparse_mla_kernels.triton import TritonKernels

    TritonKernels().warm_up(
        torch.device("cpu"),
        head_counts=head_counts,
        index_heads=index_heads,
        pool_size=4,
        topk=512,
        width=2051,
        dcp_world_size=world,
        interleave=4,
    )


def _child(name: str, out: Path) -> None:
    import multiprocessing

    from b12x._lib import compile_pool

    # Before b12x's own listener, which passes its calls on.
    _time_triton()
    what = SETS[name]
    target = what.get("device", "sm_120")
    capability, product, multiprocessors, shared = DEVICES[target]
    activity = multiprocessing.get_context("spawn").Array("q", (0, 0))
    compile_pool._initialize_worker(
        0, capability, "GPU-0", product, multiprocessors, shared, shared + 1024, activity
    )
    recorder = Recorder()
    if what.get("provider") == "triton":
        _compile_only_triton(capability)
        world = max(what["heads"]) // min(what["heads"])
        _compile_triton(what["heads"], 32, world)
        recorder.triton(f"{target}, dcp {world}")
        over = [row for row in recorder.rows if row["shared_bytes"] > shared]
        assert not over, over
        out.write_text(json.dumps(recorder.rows))
        return
    from dataclasses import replace

    import torch
    from b12x.attention import sparse_mla
    from b12x.preparation.device import detect_device
    from torch._subclasses.fake_tensor import FakeTensorMode

    from vllm.v1.attention.backends.mla.sparse_mla_kernels import b12x

    recorder.install()
    cuda = torch.device("cuda", 0)
    device = detect_device(cuda)
    suffix = f", {what['record']} bytes" + (", sm_121" if capability[1] else "")
    sizes = b12x.Sizes(
        page_size=2304,
        record_bytes=what["record"],
        head_counts=tuple(what["heads"]),
        index_heads=32,
        topk=512,
        width=2051,
        scale=256**-0.5,
    )
    for page_size in what["pages"]:
        for dtype in (torch.int32, torch.int64):
            with FakeTensorMode():
                plan = sparse_mla.plan_cache_writer(
                    torch.empty(1, 512, dtype=torch.bfloat16, device=cuda),
                    torch.empty(2, page_size, what["record"], dtype=torch.uint8, device=cuda),
                    torch.empty(1, dtype=dtype, device=cuda),
                )
            kind = str(dtype).removeprefix("torch.")
            recorder.run(plan, device, f"page {page_size}, {kind} slots{suffix}")
    for label, plan in b12x.declare(sizes, cuda).names():
        recorder.run(plan, device, label + suffix)
    # A page of 256 tokens is one index page, which selection addresses in another unit.
    for label, plan in b12x.declare(replace(sizes, page_size=256, head_counts=()), cuda).names():
        recorder.run(plan, device, f"{label}, page 256{suffix}")
    # b12x's own Triton program turns partial sums into the log-sum-exp.
    recorder.triton("decode" + suffix)
    _compile_only_triton(capability)
    b12x.compile_own(sizes, torch.device("cpu"))
    recorder.triton("this provider's own")
    if what["shared"]:
        world = max(what["heads"]) // min(what["heads"])
        _compile_triton([], 0, world)
        recorder.triton(f"shared with the Triton provider, dcp {world}")
    out.write_text(json.dumps(recorder.rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SETS, help="one set of geometries")
    parser.add_argument("--provider", choices=RESULTS, default="b12x")
    parser.add_argument("--out", type=Path, help="the table (default: that of the provider)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for each set")
    parser.add_argument("--child", choices=SETS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _child(args.child, args.out)
        return
    provider = SETS[args.only].get("provider", "b12x") if args.only else args.provider
    out = args.out or RESULTS[provider]
    # What CI compiles is a part of the other sets.
    every = [name for name in SETS if SETS[name].get("provider", "b12x") == provider]
    names = [args.only] if args.only else [name for name in every if name != "tp4dcp4"]
    rows = []
    for name in names:
        begin = time.perf_counter()
        compiled = compile_set(name, args.timeout)
        rows += compiled
        print(f"{name}: {len(compiled)} programs in {time.perf_counter() - begin:.0f} s")
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    # Of the Triton provider's, each child has checked its own GPU's limit.
    limit = SHARED_LIMIT + 1024 if provider == "b12x" else math.inf
    over = [row for row in rows if row["shared_bytes"] > limit]
    spilled = [row for row in rows if row["spill_bytes"]]
    print(f"{len(rows)} programs, {len(spilled)} with local memory, {len(over)} too large; {out}")
    sys.exit(bool(over))


if __name__ == "__main__":
    main()
