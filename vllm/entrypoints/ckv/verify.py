# SPDX-License-Identifier: Apache-2.0
"""``vllm-ckv verify``: the real engine, three ways, on one text; then a table and a verdict.

The engines differ in one thing each: no context parallelism; ordinary DCP; full-CKV prefill under
DCP. All run with the same tensor parallelism, so that they round alike elsewhere, and see the same
batches. Transformers' implementation, in float32, is a judge that shares no code with any of them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm.entrypoints.ckv import output
from vllm.entrypoints.ckv.engine import (
    EngineJob,
    EngineResult,
    add_event,
    backend_arguments,
    gpu_count,
    run_engine,
)
from vllm.entrypoints.ckv.model import FOR_B12X, SMALL, Sizes, tokenise, write_model
from vllm.entrypoints.ckv.oracle import OracleStep, TransformersOracle

PAGE_TOKENS = 512
"""What vLLM aligns the page to at TP2: the state of two KDA heads has to fit into it."""

CHUNK_TOKENS = 512
MAX_TOKENS = 8
INTERLEAVE = 4
NO_DCP, ORDINARY, FULL_CKV = "no DCP", "ordinary DCP", "full-CKV"

LIMIT_VS_DCP = 0.02
"""Log-probabilities; bfloat16 partial outputs move them by about 0.005 here.

Set with the torch and Triton kernels; b12x's, which also quantise queries, were never measured.
"""

LIMIT_VS_NO_DCP = 2.0
"""Times ordinary DCP's own largest difference to no DCP."""

LIMIT_VS_ORACLE = 0.1
"""Log-probabilities; FP8 records alone move them by about 0.045."""

SIZES = {"small": SMALL, "b12x": FOR_B12X}


@dataclass(frozen=True)
class Case:
    """One prompt. ``group`` numbers what is submitted together; groups run one after another."""

    name: str
    group: int
    prompt: list[int]
    expects_cached: bool = False


@dataclass
class CaseReport:
    """One row of the table; differences are the largest over the generated tokens.

    tokens_equal: the greedy tokens of full-CKV and ordinary DCP.
    max_logprob_delta_vs_dcp, max_logprob_delta_vs_no_dcp: of full-CKV.
    dcp_logprob_delta_vs_no_dcp: of ordinary DCP, the yardstick.
    oracle_logprob_delta: of full-CKV to transformers. None: not asked.
    oracle_tokens_equal: every token is transformers' choice, or within the limit of it.
    gathered_batches: batches of the case's group that took the full-CKV path.
    bytes_per_token_ckv, bytes_per_token_dcp: received by one rank for the group's prompts.
    seconds, dcp_seconds: of the group.
    """

    name: str
    prompt_tokens: int
    cached_tokens: int
    tokens_equal: bool
    max_logprob_delta_vs_dcp: float
    max_logprob_delta_vs_no_dcp: float
    dcp_logprob_delta_vs_no_dcp: float
    oracle_logprob_delta: float | None
    oracle_tokens_equal: bool | None
    gathered_batches: int
    bytes_per_token_ckv: float
    bytes_per_token_dcp: float
    seconds: float
    dcp_seconds: float


def make_cases(text: bytes, dcp: int, index_topk: int = SMALL.index_topk) -> list[Case]:
    """Cut six prompts out of ``text``, which is repeated if it is short.

    Starts differ, or the prefix cache would answer a case with an earlier one. The last two are at
    least twice as long as ``index_topk``, so that there is something to select from.

    Raises:
        ValueError: the text is empty.
    """
    if not text:
        raise ValueError("the text is empty; pass a file with at least one byte to --text")
    # Blocks of the prefix cache hold page x N tokens; at least two of them and a rest are shared.
    block = PAGE_TOKENS * dcp
    shared = max(2, -(-2 * index_topk // block)) * block + 64

    def cut(start: int, length: int) -> list[int]:
        repeats = (start + length) // len(text) + 1
        return tokenise((text * repeats)[start : start + length])

    prefix = cut(5, shared)
    return [
        Case("256 tokens", 0, cut(0, 256)),
        Case("three chunks", 1, cut(1, 2 * CHUNK_TOKENS + 76)),
        Case("two at once, a", 2, cut(2, CHUNK_TOKENS + 188)),
        Case("two at once, b", 2, cut(3, CHUNK_TOKENS + 88)),
        Case("shared prefix, first", 3, [*prefix, *cut(400, 60)]),
        Case("shared prefix, second", 4, [*prefix, *cut(600, 60)], expects_cached=True),
    ]


def make_jobs(
    model: Path, cases: Sequence[Case], dcp: int, further: dict[str, Any] | None = None
) -> list[EngineJob]:
    """The three engines that run ``cases`` with ``dcp`` ranks each.

    further: arguments of ``vllm.LLM`` for all of them, over the ones chosen here.
    """
    groups: list[list[list[int]]] = [[] for _ in range(cases[-1].group + 1)]
    for case in cases:
        groups[case.group].append(case.prompt)
    longest = max(len(case.prompt) for case in cases) + MAX_TOKENS
    common = {
        "block_size": PAGE_TOKENS,
        "max_model_len": -(-longest // PAGE_TOKENS) * PAGE_TOKENS,
        "max_num_seqs": 4,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "kv_cache_memory_bytes": 1 << 28,
        "enable_prefix_caching": True,
        **(further or {}),
    }
    alone = backend_arguments(model, tp=dcp) | common
    context_parallel = backend_arguments(model, tp=dcp, dcp=dcp, interleave=INTERLEAVE) | common
    return [
        EngineJob(name, arguments, environment, groups, MAX_TOKENS)
        for name, arguments, environment in (
            (NO_DCP, alone, {}),
            (ORDINARY, context_parallel, {}),
            (FULL_CKV, context_parallel, {"VLLM_B12X_MLA_CKV_GATHER": "1"}),
        )
    ]


def _largest(values: Iterable[float]) -> float:
    """The largest of ``values``, 0 of none; NaN if one is NaN, which ``max`` would lose."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def _largest_delta(
    tokens: Sequence[int], logprobs: Sequence[float], others: Sequence[int], other: Sequence[float]
) -> float:
    """Largest difference up to and including the first token that differs."""
    deltas = []
    for token, other_token, mine, theirs in zip(tokens, others, logprobs, other, strict=True):
        deltas.append(abs(mine - theirs))
        if token != other_token:
            break
    return _largest(deltas)


def _place_in_group(cases: Sequence[Case], number: int) -> int:
    """Which prompt of its group ``cases[number]`` is."""
    return sum(other.group == cases[number].group for other in cases[:number])


def report_cases(
    cases: Sequence[Case],
    results: dict[str, EngineResult],
    oracle: Sequence[Sequence[OracleStep]] | None,
) -> list[CaseReport]:
    """Compare the three engines (and the oracle's scores of full-CKV's tokens) case by case."""
    reports = []
    for number, case in enumerate(cases):
        place = _place_in_group(cases, number)
        ckv, dcp, none = (results[n].groups[case.group] for n in (FULL_CKV, ORDINARY, NO_DCP))
        mine = ckv.tokens[place], ckv.logprobs[place]
        ordinary = dcp.tokens[place], dcp.logprobs[place]
        single = none.tokens[place], none.logprobs[place]
        prompts = [other.prompt for other in cases if other.group == case.group]
        # Cached tokens need no exchange on the ordinary path and no query row on either.
        fresh = sum(map(len, prompts)) - sum(ckv.cached_tokens)
        oracle_delta = oracle_equal = None
        if oracle is not None:
            steps = oracle[number]
            oracle_delta = _largest(
                abs(step.logprob - logprob) for step, logprob in zip(steps, mine[1], strict=True)
            )
            oracle_equal = all(step.lead <= LIMIT_VS_ORACLE for step in steps)
        reports.append(
            CaseReport(
                name=case.name,
                prompt_tokens=len(case.prompt),
                cached_tokens=ckv.cached_tokens[place],
                tokens_equal=mine[0] == ordinary[0],
                max_logprob_delta_vs_dcp=_largest_delta(*mine, *ordinary),
                max_logprob_delta_vs_no_dcp=_largest_delta(*mine, *single),
                dcp_logprob_delta_vs_no_dcp=_largest_delta(*ordinary, *single),
                oracle_logprob_delta=oracle_delta,
                oracle_tokens_equal=oracle_equal,
                gathered_batches=ckv.counters["gathered_batches"],
                bytes_per_token_ckv=ckv.counters["ckv_bytes"] / fresh,
                bytes_per_token_dcp=dcp.counters["dcp_bytes"] / fresh,
                seconds=ckv.seconds,
                dcp_seconds=dcp.seconds,
            )
        )
    return reports


def find_failures(cases: Sequence[Case], reports: Sequence[CaseReport]) -> list[str]:
    """Why the run does not count as right, in words; empty if it does.

    NaN differences fail: every comparison is written so that it must hold.
    """
    failures = []
    for case, report in zip(cases, reports, strict=True):
        if not report.tokens_equal:
            failures.append(f"{case.name}: tokens differ from ordinary DCP")
        if not report.max_logprob_delta_vs_dcp <= LIMIT_VS_DCP:
            failures.append(
                f"{case.name}: log-probabilities differ from ordinary DCP by "
                f"{report.max_logprob_delta_vs_dcp:.4f}, more than {LIMIT_VS_DCP}"
            )
        if report.gathered_batches == 0:
            failures.append(f"{case.name}: no batch gathered")
        if case.expects_cached and report.cached_tokens == 0:
            failures.append(f"{case.name}: nothing came from the prefix cache")
        if report.oracle_logprob_delta is None:
            continue
        if not report.oracle_logprob_delta <= LIMIT_VS_ORACLE:
            failures.append(
                f"{case.name}: log-probabilities differ from transformers by "
                f"{report.oracle_logprob_delta:.4f}, more than {LIMIT_VS_ORACLE}"
            )
        if not report.oracle_tokens_equal:
            failures.append(f"{case.name}: a token is not transformers' choice, nor near a tie")
    own = _largest(report.dcp_logprob_delta_vs_no_dcp for report in reports)
    mine = _largest(report.max_logprob_delta_vs_no_dcp for report in reports)
    if not mine <= LIMIT_VS_NO_DCP * own:
        failures.append(
            f"the difference to no DCP is {mine:.4f}, more than {LIMIT_VS_NO_DCP:g} x ordinary "
            f"DCP's own {own:.4f}"
        )
    return failures


def format_table(reports: Sequence[CaseReport]) -> str:
    """The table people read."""
    columns = (
        ("case", lambda r: r.name),
        ("tokens", lambda r: f"{r.prompt_tokens:,}"),
        ("cached", lambda r: f"{r.cached_tokens:,}"),
        ("equal", lambda r: "yes" if r.tokens_equal else "NO"),
        ("vs DCP", lambda r: f"{r.max_logprob_delta_vs_dcp:.4f}"),
        ("vs no DCP", lambda r: f"{r.max_logprob_delta_vs_no_dcp:.4f}"),
        ("(DCP's own)", lambda r: f"{r.dcp_logprob_delta_vs_no_dcp:.4f}"),
        (
            "vs HF",
            lambda r: "-" if r.oracle_logprob_delta is None else f"{r.oracle_logprob_delta:.4f}",
        ),
        ("gathered", lambda r: str(r.gathered_batches)),
        ("B/token", lambda r: f"{r.bytes_per_token_ckv:,.0f}"),
        ("(DCP)", lambda r: f"{r.bytes_per_token_dcp:,.0f}"),
        ("s", lambda r: f"{r.seconds:.1f}"),
        ("(DCP)", lambda r: f"{r.dcp_seconds:.1f}"),
    )
    rows = [[title for title, _ in columns]]
    rows += [[cell(report) for _, cell in columns] for report in reports]
    return output.format_table(rows)


def kernels_of(log: str) -> str:
    """The kernel provider that the log of an engine names, "unknown" if it names none."""
    named = re.search(r"(\w+) serves this model instead of b12x", log) or re.search(
        r"full-CKV gather: .*, kernels (\w+)", log
    )
    return "unknown" if named is None else named[1]


def choose_sizes(wanted: str, use_gpu: bool) -> Sizes:
    """The model's sizes. wanted: a key of ``SIZES``, or "auto" for those of this GPU's kernels."""
    if wanted != "auto":
        return SIZES[wanted]
    if not use_gpu:
        return SMALL
    from vllm.v1.attention.backends.mla.sparse_mla_kernels import get_kernels

    return FOR_B12X if type(get_kernels()).__name__ == "B12xKernels" else SMALL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "exit status: 0 if the outputs agree, 1 if they do not or an engine failed, 2 for input "
        "that cannot be used"
    )
    parser.add_argument(
        "--dcp", type=int, default=2, choices=(2, 4), help="ranks that share the KV cache"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="prompts are cut from it (default: the README)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument(
        "--device",
        choices=("auto", "gpu", "cpu"),
        default="auto",
        help="auto: GPUs if there is one for every rank, else the reference platform on the CPU",
    )
    parser.add_argument(
        "--sizes",
        choices=("auto", *SIZES),
        default="auto",
        help="of the model: b12x has no kernels for the small one; auto: b12x on its GPUs",
    )
    parser.add_argument(
        "--engine",
        type=output.json_object,
        default={},
        metavar="JSON",
        help="further arguments of vllm.LLM, such as '{\"enforce_eager\": false}' for CUDA graphs",
    )
    parser.add_argument(
        "--no-oracle", action="store_true", help="leave out the comparison with transformers"
    )


def _read_text(path: Path | None) -> bytes:
    if path is not None:
        return path.read_bytes()
    # The wheel carries the README behind its metadata's header; beside the sources of a build the
    # same text may be found first, under its other name.
    found = distribution("vllm-b12x-ckv")
    metadata = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    return metadata.partition("\n\n")[2].encode()


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0 right, 1 wrong or an engine failed, 2 misuse."""
    dcp, gpus = arguments.dcp, gpu_count()
    if arguments.device == "gpu" and gpus < dcp:
        print(f"vllm-ckv verify: --dcp {dcp} needs {dcp} GPUs, found {gpus}; pass --device cpu")
        return 2
    use_gpu = gpus >= dcp and arguments.device != "cpu"
    sizes = choose_sizes(arguments.sizes, use_gpu)
    try:
        output.check_folders(json=arguments.json)
        cases = make_cases(_read_text(arguments.text), dcp, sizes.index_topk)
    except (OSError, ValueError) as error:
        print(f"vllm-ckv verify: {error}")
        return 2
    where = f"{dcp} GPUs" if use_gpu else "the reference platform (CPU, torch kernels)"
    print(f"vllm-ckv verify: TP{dcp}, DCP{dcp}, {len(cases)} greedy cases, on {where}", flush=True)
    ask_oracle = not arguments.no_oracle
    if not has_hyper_connections(use_gpu):
        ask_oracle = False
        print(
            "tilelang is not installed: the model has no hyper-connections, without which "
            "transformers has no such model to compare with"
        )
    folder = Path(tempfile.mkdtemp(prefix="vllm-ckv-verify-"))
    try:
        results, oracle = _run_all(folder, cases, arguments, sizes, use_gpu, ask_oracle)
    except RuntimeError as error:
        print(f"vllm-ckv verify: {error}\nlogs are kept in {folder}")
        return 1
    kernels = kernels_of(_log_of(folder, FULL_CKV).read_text(errors="replace"))
    reports = report_cases(cases, results, oracle)
    failures = find_failures(cases, reports)
    print(format_table(reports))
    print(f"kernels: {kernels}; a query selects {sizes.index_topk:,} tokens")
    print(
        "vs: largest log-probability difference of full-CKV; B/token: bytes one rank receives per "
        "prompt token; s: of the case's group"
    )
    for failure in failures:
        print(f"WRONG: {failure}")
    if arguments.json is not None:
        document = {
            "cases": [asdict(report) for report in reports],
            "ok": not failures,
            "failures": failures,
            "dcp": dcp,
            "device": "gpu" if use_gpu else "cpu",
            "kernels": kernels,
            "sizes": asdict(sizes),
            "versions": output.versions(),
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if failures:
        print(f"logs are kept in {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    print("RIGHT: full-CKV prefill gives the tokens of ordinary DCP")
    return 0


def has_hyper_connections(use_gpu: bool) -> bool:
    """Whether the model can have mHC: vLLM's CUDA kernels for it are written in tilelang."""
    return not use_gpu or find_spec("tilelang") is not None


def _log_of(folder: Path, job: str) -> Path:
    return folder / f"{job.replace(' ', '_')}.log"


def _run_all(
    folder: Path,
    cases: Sequence[Case],
    arguments: argparse.Namespace,
    sizes: Sizes,
    use_gpu: bool,
    ask_oracle: bool,
) -> tuple[dict[str, EngineResult], list[list[OracleStep]] | None]:
    from tqdm import tqdm

    model = folder / "model"
    write_model(model, mhc=has_hyper_connections(use_gpu), sizes=sizes)
    jobs = make_jobs(model, cases, arguments.dcp, arguments.engine)
    results: dict[str, EngineResult] = {}
    steps = len(jobs) * (1 + len(jobs[0].groups)) + (len(cases) if ask_oracle else 0)
    with tqdm(total=steps, bar_format="{desc:<28}{bar:30} {n}/{total} {elapsed}") as progress:
        for job in jobs:
            progress.set_description(f"{job.name}: starting")
            result = results[job.name] = EngineResult()
            log = _log_of(folder, job.name)
            for event in run_engine(job, log, use_gpu=use_gpu):
                add_event(result, event)
                progress.update()
                done = len(result.groups)
                progress.set_description(f"{job.name}: {done} of {len(job.groups)} groups")
        if not ask_oracle:
            return results, None
        progress.set_description("transformers")
        judge = TransformersOracle(model)
        oracle = []
        for number, case in enumerate(cases):
            place = _place_in_group(cases, number)
            generated = results[FULL_CKV].groups[case.group].tokens[place]
            oracle.append(judge.score(case.prompt, generated))
            progress.update()
    return results, oracle


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m vllm.entrypoints.ckv.verify``."""
    parser = argparse.ArgumentParser(prog="vllm-ckv verify", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
