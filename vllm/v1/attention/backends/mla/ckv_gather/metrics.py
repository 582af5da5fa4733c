# SPDX-License-Identifier: Apache-2.0
"""The gather's counters on vLLM's own ``/metrics``.

Counters live in workers, ``/metrics`` in the server process that started them. The first process
of a run names a private folder in an environment variable, which workers inherit; rank 0 of each
engine writes its totals there once a second if they changed, and the server reads them when it is
scraped. Nothing happens per batch, and no stat logger is installed, which would switch vLLM's
statistics on.

``vllm:ckv_gather_batches_total``, ``..._query_tokens_total``, ``..._visible_tokens_total``: batches
that gathered, and their tokens. ``..._ordinary_batches_total``: by ``reason``.
``..._received_bytes_total``: received by one rank, by ``path``, ``ckv`` or ``dcp``. All have the
label ``engine``, the data-parallel rank. With several API servers vLLM reads metrics from files of
prometheus_client instead, and these are not among them.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = "CKV_METRICS_FOLDER"
"""Set by the process that serves metrics, for its workers; not meant to be set by people."""

INTERVAL_SECONDS = 1.0
PREFIX = "vllm:ckv_gather"
_TOTALS = (
    ("batches", "gathered_batches", "Batches that took the full-CKV path."),
    ("query_tokens", "gathered_query_tokens", "Query tokens of these batches."),
    ("visible_tokens", "gathered_visible_tokens", "Visible tokens of these batches."),
)


class GatherCollector:
    """A prometheus collector over the totals in ``folder``; files that are not there count 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def collect(self) -> Iterator[Any]:
        """Called at every scrape."""
        from prometheus_client.core import CounterMetricFamily

        engines = {path.stem: json.loads(path.read_text()) for path in self.folder.glob("*.json")}
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
        for engine, totals in engines.items():
            for reason, count in totals["ordinary_batches"].items():
                refused.add_metric([engine, reason], count)
            for path in ("ckv", "dcp"):
                received.add_metric([engine, path], totals[f"{path}_bytes"])
        yield refused
        yield received


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


def publish(read: Callable[[], dict[str, Any]], engine: int) -> threading.Thread | None:
    """Write what ``read`` returns for ``engine``, now and once a second; None if nobody asked.

    read: totals as ``GatherCounters.as_dict`` gives them. Called in a thread of its own.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return None
    target = Path(folder) / f"{engine}.json"
    target.parent.mkdir(mode=0o700, exist_ok=True)

    def write() -> None:
        last = None
        wait = threading.Event()
        while True:
            totals = read()
            if totals != last:
                partial = target.with_suffix(".partial")
                try:
                    partial.write_text(json.dumps(totals))
                    partial.replace(target)
                except OSError:
                    return  # the server is gone, and its folder with it
                last = totals
            wait.wait(INTERVAL_SECONDS)

    thread = threading.Thread(target=write, name="ckv-metrics", daemon=True)
    thread.start()
    return thread
