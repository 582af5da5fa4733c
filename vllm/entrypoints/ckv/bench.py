# SPDX-License-Identifier: Apache-2.0
"""``vllm-ckv bench``: prefill with the gather on and off, against running servers or offline.

A sample is one prompt of random tokens that no cache has seen, alone on the engine, and the time to
its first output token. Prefill speed is prompt tokens over that time; reported are the median and
the spread, (slowest - fastest) / median, of several samples after a warm-up of each length.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm.entrypoints.ckv.engine import (
    EngineJob,
    EngineResult,
    add_event,
    gpu_count,
    run_engine,
)
from vllm.entrypoints.ckv.output import (
    UsageError,
    check_folders,
    format_table,
    json_object,
    new_figure,
    save_figure,
    versions,
)

EXAMPLES = """\
examples:
  vllm-ckv bench --on http://localhost:8000 --off http://localhost:8001    two servers
  vllm-ckv bench --url http://localhost:8000 --label on --json on.json     one after the other
  vllm-ckv bench --compare on.json off.json
  vllm-ckv bench --model MODEL --tp 4                                      offline
  vllm-ckv bench --model small                                             minutes, on a CPU

exit status: 0, 1 if an engine failed, 2 for input that cannot be used
"""

KIND = "vllm-ckv bench"
ON, OFF = "on", "off"
SMALL = "small"
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
SMALL_LENGTHS = (512, 1024, 2048)
POOL_SIZE = 4
"""Tokens of an index pool of glm5_next."""

FIRST_TOKEN = 3
"""Ids below are padding, start and end in many vocabularies."""


@dataclass
class Series:
    """The samples of one engine or server.

    label: what is compared. source: where the samples were taken, for readers.
    seconds: prompt length -> time to the first output token of each sample.
    gathered: prompt length -> batches that took the full-CKV path, all samples; offline only.
    """

    label: str
    source: str
    seconds: dict[int, list[float]] = field(default_factory=dict)
    gathered: dict[int, int] = field(default_factory=dict)

    def speed(self, length: int) -> float:
        """Prompt tokens per second, median."""
        return length / statistics.median(self.seconds[length])

    def spread(self, length: int) -> float:
        """(slowest - fastest) / median of the samples."""
        samples = self.seconds[length]
        return (max(samples) - min(samples)) / statistics.median(samples)


def make_prompt(length: int, vocabulary: int, rng: random.Random) -> list[int]:
    """``length`` random token ids; two prompts of one ``rng`` share no first block."""
    return [rng.randrange(FIRST_TOKEN, vocabulary) for _ in range(length)]


class Server:
    """One OpenAI endpoint of ``vllm serve``. url: with or without ``/v1``.

    Raises:
        UsageError: nobody answers, or not as vLLM does; the message says what to do.
    """

    def __init__(self, url: str, model: str | None = None, timeout: float = 600.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"{url} is not an address: give http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
                served = {entry["id"]: entry for entry in json.load(answer)["data"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"no vLLM server answers at {self.url} ({error}): start one with 'vllm serve', or "
                "correct the address"
            ) from error
        if model is not None and model not in served:
            raise UsageError(f"{self.url} serves {', '.join(served)}, not {model}")
        self.model = model or next(iter(served), "")
        self.max_model_len = served.get(self.model, {}).get("max_model_len")

    def metrics(self) -> str:
        """What ``/metrics`` answers.

        Raises:
            UsageError: it does not.
        """
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
                return answer.read().decode()
        except OSError as error:
            raise UsageError(f"{self.url}/metrics does not answer ({error})") from error

    def first_token_seconds(self, prompt: list[int]) -> float:
        """Send ``prompt`` and time the first token of the stream.

        Raises:
            UsageError: the server refuses the prompt, or ends the stream without a token.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        began = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as stream:
                for line in stream:
                    if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                        seconds = time.perf_counter() - began
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise UsageError(f"{self.url}: {event['error'].get('message')}")
                        return seconds
        except urllib.error.HTTPError as error:
            told = error.read(2000).decode(errors="replace")
            raise UsageError(
                f"{self.url} refuses a prompt of {len(prompt):,} tokens ({error.code}): {told}"
            ) from error
        except OSError as error:
            raise UsageError(f"{self.url} stopped answering ({error}): see its log") from error
        raise UsageError(f"{self.url} ended a stream without a token: see its log")


def _progress(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, bar_format="{desc:<34}{bar:30} {n}/{total} {elapsed}")


def bench_servers(
    servers: dict[str, Server], lengths: Sequence[int], samples: int, vocabulary: int, seed: int
) -> list[Series]:
    """Time all ``servers`` (label -> server), sample by sample in turn.

    Both sides of a comparison then see the same drift of clocks and temperature.
    """
    series = {label: Series(label, server.url) for label, server in servers.items()}
    rng = random.Random(seed)
    with _progress(len(servers) * len(lengths) * (samples + 1)) as progress:
        for length in lengths:
            for sample in range(samples + 1):
                for label, server in servers.items():
                    state = "warm-up" if sample == 0 else f"{sample} of {samples}"
                    progress.set_description(f"{label}: {length:,} tokens, {state}")
                    seconds = server.first_token_seconds(make_prompt(length, vocabulary, rng))
                    if sample:
                        series[label].seconds.setdefault(length, []).append(seconds)
                    progress.update()
    return list(series.values())


def make_jobs(
    model: Path,
    arguments: argparse.Namespace,
    lengths: Sequence[int],
    vocabulary: int,
    seed: int,
    extra: dict[str, Any],
) -> dict[str, EngineJob]:
    """The two engines of an offline run, label -> job; both see the same prompts."""
    rng = random.Random(seed)
    groups = [
        [make_prompt(length, vocabulary, rng)]
        for length in lengths
        for _ in range(arguments.samples + 1)
    ]
    engine: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "attention_backend": "B12X_MLA_SPARSE",
        "kv_cache_dtype": "fp8_ds_mla",
        "max_model_len": max(lengths) + 256,
        "max_num_batched_tokens": arguments.chunk,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "tensor_parallel_size": arguments.tp,
        "decode_context_parallel_size": arguments.dcp or arguments.tp,
        "cp_kv_cache_interleave_size": arguments.interleave,
        **extra,
        **arguments.engine,
    }
    if not any(model.glob("*.safetensors")):
        engine.setdefault("load_format", "dummy")
    return {
        label: EngineJob(label, engine, {"VLLM_B12X_MLA_CKV_GATHER": value}, groups, max_tokens=1)
        for label, value in ((OFF, "0"), (ON, "1"))
    }


def bench_offline(
    jobs: dict[str, EngineJob], lengths: Sequence[int], samples: int, logs: Path, *, use_gpu: bool
) -> list[Series]:
    """Run ``jobs`` one after the other in processes of their own.

    Raises:
        RuntimeError: an engine failed; the message has the end of its log.
    """
    found = []
    with _progress(sum(1 + len(job.groups) for job in jobs.values())) as progress:
        for label, job in jobs.items():
            progress.set_description(f"{label}: starting")
            result = EngineResult()
            for event in run_engine(job, logs / f"{label}.log", use_gpu=use_gpu):
                add_event(result, event)
                progress.update()
                done = len(result.groups)
                if done < len(job.groups):
                    length = lengths[done // (samples + 1)]
                    progress.set_description(f"{label}: {length:,} tokens")
            series = Series(label, "offline")
            for number, length in enumerate(lengths):
                first = number * (samples + 1) + 1
                groups = result.groups[first : first + samples]
                series.seconds[length] = [group.seconds for group in groups]
                series.gathered[length] = sum(
                    group.counters.get("gathered_batches", 0) for group in groups
                )
            found.append(series)
    return found


def describe(series: Sequence[Series]) -> str:
    """The table; with two series also the ratio, the one called "on" over the other."""
    series = _on_first(series)
    lengths = sorted({length for one in series for length in one.seconds})
    head = ["prompt"]
    for one in series:
        head += [f"{one.label} tok/s", "spread"]
    rows = [[*head, "ratio"] if len(series) == 2 else head]
    for length in lengths:
        row = [f"{length:,}"]
        for one in series:
            there = length in one.seconds
            row += (
                [f"{one.speed(length):,.0f}", f"{one.spread(length):.1%}"] if there else ["-"] * 2
            )
        if len(series) == 2:
            ratio = _ratio(series, length)
            row.append("-" if ratio is None else f"{ratio:.2f}x")
        rows.append(row)
    return format_table(rows)


def _on_first(series: Sequence[Series]) -> list[Series]:
    return sorted(series, key=lambda one: one.label != ON)


def _ratio(series: Sequence[Series], length: int) -> float | None:
    first, second = series
    if length not in first.seconds or length not in second.seconds:
        return None
    return first.speed(length) / second.speed(length)


def draw(series: Sequence[Series], path: Path) -> None:
    """Tokens per second over prompt length, and the ratio of two series, to an image at ``path``.

    Raises:
        UsageError: matplotlib is not installed, or ``path`` cannot be written.
    """
    series = _on_first(series)
    figure = new_figure()
    axes = figure.subplots()
    lengths = sorted({length for one in series for length in one.seconds})
    for one in series:
        mine = sorted(one.seconds)
        speeds = [one.speed(n) for n in mine]
        low = [one.speed(n) - n / max(one.seconds[n]) for n in mine]
        high = [n / min(one.seconds[n]) - one.speed(n) for n in mine]
        axes.errorbar(mine, speeds, yerr=[low, high], marker="o", capsize=3, label=one.label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n / 1024:g}k" if n >= 1024 else str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("prompt (tokens)")
    axes.set_ylabel("prefill (tokens/s)")
    axes.legend(loc="lower left")
    if len(series) == 2:
        ratios = {n: ratio for n in lengths if (ratio := _ratio(series, n)) is not None}
        other = axes.twinx()
        other.plot(list(ratios), list(ratios.values()), "k:", marker=".")
        other.set_ylim(0, 1.1 * max(1, *ratios.values()))
        other.set_ylabel(f"{series[0].label} / {series[1].label} (dotted)")
    save_figure(figure, path)


def to_document(series: Sequence[Series], settings: dict[str, Any]) -> dict[str, Any]:
    """What ``--json`` writes and ``--compare`` reads."""
    return {
        "kind": KIND,
        "versions": versions(),
        "settings": settings,
        "series": [
            {
                **asdict(one),
                "tokens_per_second": {n: round(one.speed(n), 1) for n in one.seconds},
                "spread": {n: round(one.spread(n), 4) for n in one.seconds},
            }
            for one in series
        ],
    }


def read_document(path: Path) -> list[Series]:
    """The series of a file that ``--json`` wrote.

    Raises:
        UsageError: it is no such file.
    """
    try:
        document = json.loads(path.read_text())
        if document["kind"] != KIND:
            raise ValueError(f"its kind is {document['kind']!r}")
        return [
            Series(
                one["label"],
                one["source"],
                {int(n): samples for n, samples in one["seconds"].items()},
                {int(n): count for n, count in one["gathered"].items()},
            )
            for one in document["series"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not a result of vllm-ckv bench ({error}): write one with --json"
        ) from error


def compare(paths: Sequence[Path]) -> list[Series]:
    """The series of several files together; labels that occur twice are told apart by file."""
    files = [(path, read_document(path)) for path in paths]
    labels = [one.label for _, series in files for one in series]
    together = []
    for path, series in files:
        for one in series:
            if labels.count(one.label) > 1:
                one.label = f"{path.stem} {one.label}"
            together.append(one)
    return together


def _usable(lengths: Sequence[int], limit: int | None) -> list[int]:
    """``lengths`` that leave room for one more token within ``limit``."""
    fitting = [n for n in lengths if limit is None or n < limit]
    if not fitting:
        raise UsageError(
            f"no prompt length is below the server's max_model_len {limit:,}: give smaller ones "
            "with --lengths"
        )
    return fitting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    where = parser.add_argument_group("what to measure, one of")
    where.add_argument("--on", metavar="URL", help="a server with the gather on; with --off")
    where.add_argument("--off", metavar="URL", help="a server with the gather off; with --on")
    where.add_argument("--url", metavar="URL", help="one server; name it with --label")
    where.add_argument(
        "--model", help=f"offline: a folder with a model, or {SMALL!r} for a random one"
    )
    where.add_argument(
        "--compare", nargs=2, type=Path, metavar="JSON", help="two results, nothing is run"
    )
    parser.add_argument("--label", default=ON, help=f"of --url (default: {ON})")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS", help="of the prompts")
    parser.add_argument("--samples", type=int, default=5, help="per length (default: 5)")
    parser.add_argument(
        "--vocabulary", type=int, default=512, help="token ids are drawn below this (default: 512)"
    )
    parser.add_argument("--served-model-name", help="default: the server's first")
    offline = parser.add_argument_group("offline")
    offline.add_argument("--tp", type=int, default=2, help="default: 2")
    offline.add_argument("--dcp", type=int, help="default: that of --tp")
    offline.add_argument("--interleave", type=int, default=4, help="default: 4")
    offline.add_argument("--chunk", type=int, default=8192, help="--max-num-batched-tokens")
    offline.add_argument(
        "--engine",
        type=json_object,
        default={},
        metavar="JSON",
        help="further arguments of vllm.LLM",
    )
    offline.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as .png or .svg")


def _check(arguments: argparse.Namespace) -> None:
    ways = [
        bool(arguments.on or arguments.off),
        bool(arguments.url),
        bool(arguments.model),
        bool(arguments.compare),
    ]
    if sum(ways) != 1:
        raise UsageError(
            "say what to measure, one way: --on URL --off URL, --url URL, --model MODEL, or "
            "--compare A.json B.json"
        )
    if bool(arguments.on) != bool(arguments.off):
        raise UsageError("--on and --off belong together: give both, or one server as --url")
    if arguments.samples < 1:
        raise UsageError(f"--samples {arguments.samples} measures nothing: give at least 1")
    if arguments.vocabulary <= FIRST_TOKEN:
        raise UsageError(f"--vocabulary {arguments.vocabulary} is too small: give at least 4")
    if arguments.lengths and min(arguments.lengths) < 1:
        raise UsageError(f"--lengths {min(arguments.lengths)} is no prompt: give at least 1")


def _serving(arguments: argparse.Namespace, seed: int) -> list[Series]:
    addresses = {arguments.label: arguments.url}
    if not arguments.url:
        addresses = {ON: arguments.on, OFF: arguments.off}
    servers = {label: Server(url, arguments.served_model_name) for label, url in addresses.items()}
    limits = [s.max_model_len for s in servers.values() if s.max_model_len is not None]
    lengths = _usable(arguments.lengths or LENGTHS, min(limits, default=None))
    return bench_servers(servers, lengths, arguments.samples, arguments.vocabulary, seed)


def _offline(arguments: argparse.Namespace, seed: int) -> list[Series]:
    ranks = arguments.tp
    dcp = arguments.dcp or ranks
    if ranks < 1 or dcp < 2 or ranks % dcp:
        raise UsageError(
            f"--tp {ranks} with --dcp {dcp} has nothing to compare: give a --dcp of 2 or more "
            "that divides --tp"
        )
    gpus = gpu_count()
    if arguments.device == "gpu" and gpus < ranks:
        raise UsageError(f"--tp {ranks} needs {ranks} GPUs, found {gpus}; pass --device cpu")
    use_gpu = gpus >= ranks and arguments.device != "cpu"
    small = arguments.model == SMALL
    if not use_gpu and not small:
        raise UsageError(
            f"--model {arguments.model} needs {ranks} GPUs, found {gpus}; without them only "
            f"--model {SMALL} runs, on the reference platform"
        )
    if arguments.interleave < 1 or arguments.interleave % POOL_SIZE:
        raise UsageError(
            f"--interleave {arguments.interleave} would split an index pool of {POOL_SIZE} tokens "
            f"over ranks: give {POOL_SIZE} or another multiple of it"
        )
    folder = Path(tempfile.mkdtemp(prefix="vllm-ckv-bench-"))
    extra: dict[str, Any] = {}
    vocabulary = arguments.vocabulary
    if small:
        from vllm.entrypoints.ckv.model import write_model

        model = folder / "model"
        vocabulary = min(vocabulary, write_model(model)["vocab_size"])
        extra = {
            "dtype": "bfloat16",
            "enforce_eager": True,
            "block_size": 256,
            "max_num_batched_tokens": min(arguments.chunk, 512),
            "kv_cache_memory_bytes": 1 << 28,
        }
    else:
        from vllm.entrypoints.ckv.plan import find_config

        model = find_config(arguments.model).parent
    lengths = arguments.lengths or list(SMALL_LENGTHS if small else LENGTHS)
    jobs = make_jobs(model, arguments, lengths, vocabulary, seed, extra)
    try:
        series = bench_offline(jobs, lengths, arguments.samples, folder, use_gpu=use_gpu)
    except RuntimeError as error:
        raise RuntimeError(f"{error}\nlogs are kept in {folder}") from error
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    if not use_gpu:
        print("on the reference platform: this shows that both ways run, not how fast they are")
    return series


def _not_gathered(series: Sequence[Series]) -> Iterator[str]:
    for one in series:
        for length, count in one.gathered.items():
            if one.label == ON and count == 0:
                yield f"{length:,} tokens: no batch gathered; the log has the reason"


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0, 1 if an engine failed, 2 for unusable input."""
    seed = time.time_ns()
    measure: Callable[[argparse.Namespace, int], list[Series]]
    measure = _offline if arguments.model else _serving
    try:
        _check(arguments)
        check_folders(json=arguments.json, plot=arguments.plot)
        if arguments.plot is not None:
            new_figure()  # a missing matplotlib shows before the work
        series = compare(arguments.compare) if arguments.compare else measure(arguments, seed)
        settings = {"samples": arguments.samples, "seed": seed}
        if arguments.model:
            settings |= {"tp": arguments.tp, "dcp": arguments.dcp or arguments.tp}
            settings |= {"chunk": arguments.chunk, "interleave": arguments.interleave}
        print(describe(series))
        for remark in _not_gathered(series):
            print(f"NOTE: {remark}")
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(to_document(series, settings), indent=1) + "\n")
        if arguments.plot is not None:
            draw(series, arguments.plot)
    except RuntimeError as error:
        print(f"vllm-ckv bench: {error}")
        return 1
    except (OSError, UsageError) as error:
        print(f"vllm-ckv bench: {error}")
        return 2
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m vllm.entrypoints.ckv.bench``."""
    parser = argparse.ArgumentParser(prog="vllm-ckv bench")
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
