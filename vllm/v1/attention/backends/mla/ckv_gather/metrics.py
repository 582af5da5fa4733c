# SPDX-License-Identifier: Apache-2.0
"""The gather's counters on vLLM's own ``/metrics``.

Counters live in workers, ``/metrics`` in the server process that started them. The first process
of a run names a private folder in an environment variable, which workers inherit; rank 0 of each
engine writes its totals there once a second if they changed, and the server reads them when it is
scraped. Nothing happens per batch, and no stat logger is installed, which would switch vLLM's
statistics on.

With several API servers any of them may be scraped, and vLLM serves what prometheus_client's
multi-process mode finds in the files of another folder. Rank 0 then writes its totals there.

``vllm:ckv_gather_batches_total``, ``..._windows_total``, ``..._mixed_batches_total``,
``..._query_tokens_total``, ``..._visible_tokens_total``: batches that gathered, their windows,
those that held decodes, and their tokens.
``..._ordinary_batches_total``: by ``reason``.
``..._received_bytes_total``: received by one rank, by ``path``, ``ckv`` or ``dcp``.
``..._exchange_seconds``: a histogram of exchanges of one layer a batch, by ``exchange``,
``index_keys`` or ``records``. All have the label ``engine``, the data-parallel rank. Engines on
other hosts than the server are not among them.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

from vllm.v1.attention.backends.mla.ckv_gather.counters import GatherCounters
from vllm.v1.attention.backends.mla.ckv_gather.eligibility import Reason

FOLDER = "CKV_METRICS_FOLDER"
"""Set by the process that serves metrics, for its workers; not meant to be set by people."""

Write: TypeAlias = Callable[[dict[str, Any]], None]

INTERVAL_SECONDS = 1.0
PREFIX = "vllm:ckv_gather"
_TOTALS = (
    ("batches", "gathered_batches", "Batches that took the full-CKV path."),
    ("windows", "gathered_windows", "Windows in which they did."),
    ("mixed_batches", "mixed_batches", "Those of these batches that held decodes as well."),
    ("query_tokens", "gathered_query_tokens", "Query tokens of these batches."),
    ("visible_tokens", "gathered_visible_tokens", "Visible tokens of these batches."),
)


def families(engines: Mapping[str, dict[str, Any]]) -> Iterator[Any]:
    """The totals as prometheus_client's metrics.

    engines: data-parallel rank -> totals as ``GatherCounters.as_dict`` gives them.
    """
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    for name, key, meaning in _TOTALS:
        family = CounterMetricFamily(f"{PREFIX}_{name}", meaning, labels=["engine"])
        for engine, totals in engines.items():
            family.add_metric([engine], totals[key])
        yield family
    refused = CounterMetricFamily(
        f"{PREFIX}_ordinary_batches",
        "Batches that took the ordinary path.",
        labels=["engine", "reason"],
    )
    received = CounterMetricFamily(
        f"{PREFIX}_received_bytes",
        "Bytes that one rank received.",
        labels=["engine", "path"],
    )
    seconds = HistogramMetricFamily(
        f"{PREFIX}_exchange_seconds",
        "Seconds of one layer's exchange, of every gathered batch.",
        labels=["engine", "exchange"],
    )
    for engine, totals in engines.items():
        for reason, count in totals["ordinary_batches"].items():
            refused.add_metric([engine, reason], count)
        for path in ("ckv", "dcp"):
            received.add_metric([engine, path], totals[f"{path}_bytes"])
        for kind, durations in totals["exchange_seconds"].items():
            counts = durations["counts"]
            below = zip(counts, accumulate(counts.values()), strict=True)
            seconds.add_metric([engine, kind], list(below), durations["total"])
    yield from (refused, received, seconds)


def read(scraped: str) -> dict[str, GatherCounters]:
    """The counters in what ``/metrics`` answered: data-parallel rank -> totals.

    Without ``exchange_seconds``, whose bounds a scrape may show otherwise. Empty if there are none.
    """
    from prometheus_client.parser import text_string_to_metric_families

    keys = {f"{PREFIX}_{name}_total": key for name, key, _ in _TOTALS}
    engines: dict[str, GatherCounters] = {}
    for family in text_string_to_metric_families(scraped):
        for sample in family.samples:
            if not sample.name.startswith(PREFIX):
                continue
            counters = engines.setdefault(sample.labels["engine"], GatherCounters())
            if sample.name in keys:
                setattr(counters, keys[sample.name], int(sample.value))
            elif sample.name == f"{PREFIX}_ordinary_batches_total":
                counters.ordinary[Reason(sample.labels["reason"])] = int(sample.value)
            elif sample.name == f"{PREFIX}_received_bytes_total":
                setattr(counters, f"{sample.labels['path']}_bytes", int(sample.value))
    return engines


class GatherCollector:
    """A prometheus collector over the totals in ``folder``; files that are not there count 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def collect(self) -> Iterator[Any]:
        """Called at every scrape."""
        return families(
            {path.stem: json.loads(path.read_text()) for path in self.folder.glob("*.json")}
        )


def offer() -> None:
    """Serve the totals of this process's workers, unless an ancestor does. Idempotent."""
    if FOLDER in os.environ:
        return
    from prometheus_client import REGISTRY

    # Made by the first worker that has something to say; nobody can guess the name before.
    folder = Path(tempfile.gettempdir()) / f"vllm-ckv-metrics-{secrets.token_hex(16)}"
    os.environ[FOLDER] = str(folder)
    owner = os.getpid()

    def remove() -> None:
        # A forked child inherits this, and must not take the folder from its parent.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    REGISTRY.register(GatherCollector(folder))  # type: ignore[arg-type]


def _private_file(folder: str, engine: int) -> Write:
    target = Path(folder) / f"{engine}.json"
    target.parent.mkdir(mode=0o700, exist_ok=True)

    def write(totals: dict[str, Any]) -> None:
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(totals))
        partial.replace(target)

    return write


def _multiprocess_files(engine: int) -> Write:
    from prometheus_client.values import MultiProcessValue

    # Files of our own: vLLM's metrics of this process, if any, are in those named by its number.
    value_of = MultiProcessValue(lambda: f"ckv_gather_{os.getpid()}")
    values: dict[tuple[str, tuple[str, ...]], Any] = {}

    def write(totals: dict[str, Any]) -> None:
        for family in families({str(engine): totals}):
            below = 0
            for sample in family.samples:
                value = sample.value
                if "le" in sample.labels:
                    # In these files buckets hold their own count, and the reader adds up.
                    value, below = value - below, value
                elif family.type == "histogram":
                    below = 0
                    if sample.name.endswith("_count"):
                        continue  # the reader's own
                key = (sample.name, tuple(sample.labels.values()))
                if key not in values:
                    values[key] = value_of(
                        family.type,
                        family.name,
                        sample.name,
                        tuple(sample.labels),
                        key[1],
                        family.documentation,
                    )
                values[key].set(value)

    return write


def publish(read: Callable[[], dict[str, Any]], engine: int) -> threading.Thread | None:
    """Write what ``read`` returns for ``engine``, now and once a second; None if nobody asked.

    read: totals as ``GatherCounters.as_dict`` gives them. Called in a thread of its own, which a
        later call for the same engine in this process takes over.
    """
    folder = os.environ.get(FOLDER)
    shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not shared and folder is None:
        return None
    # A fork has its parent's table, but not its threads.
    place = (os.getpid(), shared or folder, engine)
    known = _publishers.get(place)
    if known is not None and known.is_alive():
        known.read = read
        return known
    if shared:
        write = _multiprocess_files(engine)
    else:
        assert folder is not None
        write = _private_file(folder, engine)
    publisher = _publishers[place] = _Publisher(read, write)
    publisher.start()
    return publisher


class _Publisher(threading.Thread):
    def __init__(self, read: Callable[[], dict[str, Any]], write: Write) -> None:
        super().__init__(name="ckv-metrics", daemon=True)
        self.read = read
        self.write = write

    def run(self) -> None:
        last = None
        wait = threading.Event()
        while True:
            totals = self.read()
            if totals != last:
                try:
                    self.write(totals)
                except OSError:
                    return  # the server is gone, and its folder with it
                last = totals
            wait.wait(INTERVAL_SECONDS)


_publishers: dict[tuple[int, str | None, int], _Publisher] = {}
