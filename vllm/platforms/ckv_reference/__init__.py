# SPDX-License-Identifier: Apache-2.0
"""Reference platform: the real engine on a machine without a GPU.

Off unless ``VLLM_CKV_REFERENCE=1``. Triton kernels run in Triton's interpreter, compiled
operations that a CUDA build of vLLM lacks on the host are replaced by torch functions. Slow on
purpose: it shows results, not speed. Apply :func:`environment` before vLLM is imported.
"""

import importlib.util
import os
import sys

ENABLE_VARIABLE = "VLLM_CKV_REFERENCE"
PLATFORM_PATH = "vllm.platforms.ckv_reference.platform.CkvReferencePlatform"

_ENVIRONMENT = {
    ENABLE_VARIABLE: "1",
    # Both are needed: without an active driver vLLM keeps Triton only for an *empty* device list.
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # Autotuning would time every configuration in the interpreter.
    "VLLM_TRITON_FORCE_FIRST_CONFIG": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

_torchvision_library = None


def environment() -> dict[str, str]:
    """The environment the reference platform needs, as a new dictionary.

    Callers put it into ``os.environ`` (or a child's environment) before anything of vLLM is
    imported, because Triton's interpreter is chosen when kernels are decorated.
    """
    return dict(_ENVIRONMENT)


def enabled() -> bool:
    """Whether ``VLLM_CKV_REFERENCE=1`` is set."""
    return os.environ.get(ENABLE_VARIABLE) == "1"


def missing_environment() -> list[str]:
    """``NAME='value'`` of each variable of :func:`environment` that is not set to its value."""
    return [f"{k}={v!r}" for k, v in _ENVIRONMENT.items() if os.environ.get(k) != v]


def declare_torchvision_ops() -> bool:
    """Declare the two operators without which torchvision cannot be imported beside CPU torch.

    PyPI's torchvision is a CUDA build whose library does not load beside a ``+cpu`` torch; its
    Python part then fails at import because it registers fake kernels for operators that do not
    exist. Must run before torchvision is imported. Returns whether anything was declared.
    """
    global _torchvision_library
    if _torchvision_library is not None or "torchvision" in sys.modules:
        return False
    if importlib.util.find_spec("torchvision") is None:
        return False
    import torch

    if not torch.__version__.endswith("+cpu") or hasattr(torch.ops.torchvision, "nms"):
        return False
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _torchvision_library = library
    return True


def resolve() -> str | None:
    """Entry point of ``vllm.platform_plugins``: the platform's class path, or None when off.

    Raises:
        RuntimeError: the platform is asked for but its environment is incomplete.
    """
    if not enabled():
        return None
    missing = missing_environment()
    if missing:
        raise RuntimeError(
            f"{ENABLE_VARIABLE}=1 also needs {', '.join(missing)} set before vLLM is imported; "
            "apply vllm.platforms.ckv_reference.environment()."
        )
    declare_torchvision_ops()
    return PLATFORM_PATH
