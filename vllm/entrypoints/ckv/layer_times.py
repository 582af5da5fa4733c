# SPDX-License-Identifier: Apache-2.0
"""Where the time of a DSA layer goes, on any backend.

Forward hooks mark the layer, its indexer and its attention; PyTorch's profiler records launches and
kernels, and the trace ties each kernel to the mark that it was launched in. Exchange and packing
are told apart by the kernel's name. The functions run in the worker, through
``LLM.collective_rpc``. Eager mode only: a captured graph launches nothing.
"""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import Any

import torch

KINDS = ("pack", "exchange", "selection", "attention", "rest", "idle")
"""The parts of a layer's time.

pack: copies to and from the buffers of an exchange. exchange: NCCL, the TP all-reduce excepted.
selection: the indexer op. attention: the attention op, cache write and latent projections included.
rest: the layer's other kernels. idle: between its first and last kernel, none running.
"""

_BY_NAME = {
    "pack": r"_pack_kernel|_unpack_kernel|_a2a_pack|_a2a_unpack",
    "exchange": r"nccl\w*(AllGather|SendRecv|ReduceScatter|AllToAll)",
}
_MARK = "ckv "


def _mark(module: torch.nn.Module, kind: str) -> list[Any]:
    """Hooks that put ``module``'s forward between two marks."""
    marks: list[Any] = []

    def enter(*_: Any) -> None:
        marks.append(torch.profiler.record_function(_MARK + kind))
        marks[-1].__enter__()

    def leave(*_: Any) -> None:
        marks.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def start(worker: Any) -> None:
    """Mark the worker's DSA layers and start recording."""
    # A reader of traces needs none of vLLM.
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.models.glm5next.sparse_indexer import SparseAttnIndexerKpool

    model = worker.model_runner.model
    modules = dict(model.named_modules())
    hooks = []
    for name, module in modules.items():
        if isinstance(module, MLAAttention):
            hooks += _mark(module, "attention")
            layer = re.match(r".*\blayers\.\d+(?=\.)", name)
            hooks += _mark(modules[layer[0]], "rest") if layer else []
        elif isinstance(module, SparseAttnIndexerKpool):
            hooks += _mark(module, "selection")
    if not hooks:
        raise RuntimeError("the model has no layer with a latent cache; nothing to time")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=activities)
    torch.cuda.synchronize()
    profiler.start()
    worker.ckv_layer_times = (profiler, hooks)


def stop(worker: Any) -> dict[str, Any]:
    """Stop recording and return :func:`split` of what was recorded."""
    profiler, hooks = worker.ckv_layer_times
    del worker.ckv_layer_times
    torch.cuda.synchronize()
    profiler.stop()
    for hook in hooks:
        hook.remove()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return split(json.loads(trace.read_text())["traceEvents"])


def split(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Divide the GPU time of the marked layers into :data:`KINDS`.

    events: a chrome trace's ``traceEvents``.

    Returns:
        ``runs``: marked layer runs. ``microseconds``: kind -> mean per run. ``total``: their sum.
        ``host``: microseconds that the host spent on a run, under the profiler. ``launches``:
        kernels and copies of a run. ``waits``: calls of a run in which the host awaits the GPU.
        ``elsewhere``: microseconds per run outside the layers: "kernels" and "idle". ``kernels``:
        the layers' longest twelve, name -> microseconds per run.

    Raises:
        ValueError: no kernel belongs to a marked layer.
    """
    marks: dict[str, list[tuple[float, float]]] = {"selection": [], "attention": [], "rest": []}
    launched: dict[int, float] = {}
    waited: list[float] = []
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        if category == "user_annotation" and name.removeprefix(_MARK) in marks:
            marks[name.removeprefix(_MARK)].append((event["ts"], event["ts"] + event["dur"]))
        elif category in ("cuda_runtime", "cuda_driver"):
            launched[event["args"].get("correlation", -1)] = event["ts"]
            if "Synchronize" in name:
                waited.append(event["ts"])
    for spans in marks.values():
        spans.sort()

    def inside(kind: str, moment: float) -> int:
        """The number of the mark that holds ``moment``, -1 if there is none."""
        number = bisect_right(marks[kind], (moment, float("inf"))) - 1
        return number if number >= 0 and moment <= marks[kind][number][1] else -1

    kernels = sorted(
        (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
        key=lambda event: event["ts"],
    )
    times: Counter[str] = Counter()
    elsewhere: Counter[str] = Counter()
    names: Counter[str] = Counter()
    runs: Counter[int] = Counter()
    busy_until, last_run = kernels[0]["ts"] if kernels else 0.0, -1
    for event in kernels:
        begin, end, name = event["ts"], event["ts"] + event["dur"], event["name"]
        launch = launched.get(event["args"].get("correlation", -2), float("-inf"))
        run = inside("rest", launch)
        # Kernels of several streams may overlap; time counts once.
        own = max(0.0, end - max(begin, busy_until))
        if run < 0:
            elsewhere["kernels"] += own
        else:
            kind = next((kind for kind, text in _BY_NAME.items() if re.search(text, name)), None)
            times[kind or next(kind for kind in marks if inside(kind, launch) >= 0)] += own
            names[re.sub(r"^void |[<(].*", "", name)[-60:]] += own
            runs[run] += 1
        (times if run >= 0 and run == last_run else elsewhere)["idle"] += max(
            0.0, begin - busy_until
        )
        busy_until, last_run = max(busy_until, end), run
    if not runs:
        raise ValueError(
            f"{len(marks['rest'])} layer runs were marked and none has a kernel; run eagerly on a "
            "GPU"
        )

    def per_run(value: float) -> float:
        return round(value / len(runs), 1)

    return {
        "runs": len(runs),
        "microseconds": {kind: per_run(times[kind]) for kind in KINDS},
        "total": per_run(sum(times.values())),
        "host": per_run(sum(marks["rest"][run][1] - marks["rest"][run][0] for run in runs)),
        "launches": per_run(sum(runs.values())),
        "waits": per_run(sum(inside("rest", moment) in runs for moment in waited)),
        "elsewhere": {kind: per_run(value) for kind, value in elsewhere.items()},
        "kernels": {name: per_run(value) for name, value in names.most_common(12)},
    }
