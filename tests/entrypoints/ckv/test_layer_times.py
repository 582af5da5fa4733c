# SPDX-License-Identifier: Apache-2.0
"""The division of a DSA layer's time, on traces written by hand."""

import pytest

from vllm.entrypoints.ckv.layer_times import KINDS, split


def mark(kind, begin, end):
    return {"cat": "user_annotation", "name": f"ckv {kind}", "ts": begin, "dur": end - begin}


def kernel(name, number, launch, begin, duration, category="kernel"):
    """A launch and what ran for it."""
    arguments = {"correlation": number}
    return [
        {"cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": launch, "args": arguments},
        {"cat": category, "name": name, "ts": begin, "dur": duration, "args": arguments},
    ]


def test_a_kernel_counts_for_the_innermost_mark_of_its_launch():
    trace = [
        mark("rest", 0, 100),
        mark("selection", 10, 20),
        mark("attention", 30, 60),
        # The GPU is far behind the host: launched in the layer, run after its marks.
        *kernel("gemm", 1, launch=5, begin=200, duration=7),
        *kernel("sm90_fp8_mqa_logits", 2, launch=15, begin=207, duration=11),
        *kernel("_pack_kernel", 3, launch=35, begin=218, duration=3),
        *kernel("ncclDevKernel_AllGather_RING_LL(x)", 4, launch=36, begin=221, duration=5),
        *kernel("flash_fwd<1>", 5, launch=40, begin=230, duration=13),
        *kernel("Memcpy DtoD", 6, launch=50, begin=243, duration=2, category="gpu_memcpy"),
        *kernel("ncclDevKernel_AllReduce_Sum", 7, launch=90, begin=245, duration=17),
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 95, "args": {}},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 120, "args": {}},
        *kernel("of another layer", 8, launch=150, begin=270, duration=19),
    ]
    result = split(trace)
    assert result["runs"] == 1
    assert result["microseconds"] == {
        "pack": 3,
        "exchange": 5,
        "selection": 11,
        "attention": 15,
        "rest": 24,
        # Between 226 and 230; the gap after the layer is not its own.
        "idle": 4,
    }
    assert result["total"] == 62
    assert (result["host"], result["launches"], result["waits"]) == (100, 7, 1)
    assert result["elsewhere"] == {"kernels": 19, "idle": 8}
    assert list(result["kernels"]) == [
        "ncclDevKernel_AllReduce_Sum",
        "flash_fwd",
        "sm90_fp8_mqa_logits",
        "gemm",
        "ncclDevKernel_AllGather_RING_LL",
        "_pack_kernel",
        "Memcpy DtoD",
    ]


def test_times_are_means_over_runs_and_overlap_counts_once():
    trace = [
        mark("rest", 0, 10),
        mark("rest", 20, 30),
        *kernel("a", 1, launch=1, begin=100, duration=10),
        *kernel("b", 2, launch=2, begin=105, duration=10),
        *kernel("c", 3, launch=21, begin=200, duration=5),
    ]
    result = split(trace)
    assert result["runs"] == 2
    assert result["microseconds"] == dict.fromkeys(KINDS, 0.0) | {"rest": 10}
    assert result["elsewhere"] == {"idle": 42.5}


def test_a_trace_without_kernels_is_an_error():
    with pytest.raises(ValueError, match="1 layer runs were marked and none has a kernel"):
        split([mark("rest", 0, 10)])
