# SPDX-License-Identifier: Apache-2.0
"""Registration of the B12X_MLA_SPARSE backend, its flags and its indexer with stock vLLM.

The only module that touches stock vLLM's registries. ``register`` is the ``vllm.general_plugins``
entry point and ``register_platform`` the ``vllm.platform_plugins`` one. Both groups are needed:
``attention_config={"backend": ...}`` is parsed before general plugins load, and vLLM discards what
a platform plugin raises. Nothing here initialises CUDA or imports a model.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm.v1.attention.backends.mla.ckv_gather.geometry import MAX_VISIBLE_TOKENS

logger = init_logger("vllm.plugins.b12x_mla_sparse")

BACKEND_NAME = "B12X_MLA_SPARSE"
BACKEND_PATH = "vllm.v1.attention.backends.mla.b12x_mla_sparse.B12xMLASparseBackend"
INDEXER_MODULE = "vllm.models.glm5next.b12x.sparse_indexer"
MLA_MODULE = "vllm.models.glm5next.b12x.mla"
# The one stock module that builds indexers; the replacement has to be in place before it is used.
INDEXER_USER = "vllm.models.glm5next.common.attention"
WORKER_MODULE = "vllm.v1.worker.gpu_worker"
B12X_PROVIDER = "vllm.v1.attention.backends.mla.sparse_mla_kernels.b12x"
MIN_CAPABILITY = 80
SUPPORTED_VERSIONS = "0.33.x"


@dataclass(frozen=True)
class Flag:
    """One environment variable.

    Attributes:
        name: the variable.
        kind: ``"mode"`` (0 or 1, read as bool, or auto, read as text), ``"switch"`` (0 or 1, read
            as bool) or ``"tokens"`` (an integer count of tokens).
        default: what the flag reads as when the variable is unset.
        meaning: one sentence for people.
        low: smallest accepted count; ``"tokens"`` only.
        high: largest accepted count; ``"tokens"`` only.

    """

    name: str
    kind: str
    default: bool | int | str | None
    meaning: str
    low: int = 0
    high: int = MAX_VISIBLE_TOKENS

    @property
    def accepted(self) -> str:
        """The accepted values, in words."""
        if self.kind == "mode":
            return "0, 1 or auto"
        if self.kind == "switch":
            return "0 or 1"
        return f"an integer from {self.low} to {self.high}"

    def read(self) -> bool | int | str | None:
        """The flag's value in this process's environment.

        Raises:
            ValueError: the text is not an accepted value; names variable, text and what is.

        """
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        if self.kind == "mode" and text in ("0", "1", "auto"):
            return text if text == "auto" else text == "1"
        if self.kind == "switch" and text in ("0", "1"):
            return text == "1"
        # int() would also take "1_000", " 7" and digits of other scripts.
        if (
            self.kind == "tokens"
            and re.fullmatch(r"[0-9]{1,9}", text)
            and self.low <= int(text) <= self.high
        ):
            return int(text)
        raise ValueError(f"{self.name}={text!r} is not accepted: set it to {self.accepted}")


FLAGS: tuple[Flag, ...] = (
    Flag(
        "VLLM_B12X_MLA_CKV_GATHER",
        "mode",
        False,
        "Gather all compressed-KV records for eligible prefill batches under decode context "
        "parallelism; with auto only where that takes less time than the ordinary path, by a model "
        "with rates measured at start, or fewer bytes where nothing is measured.",
    ),
    Flag(
        "VLLM_B12X_MLA_CKV_GATHER_MIN_TOKENS",
        "tokens",
        16,
        "Batches gather only with more query tokens than this.",
    ),
    Flag(
        "VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS",
        "tokens",
        None,
        "Visible tokens, summed over a batch's requests, that exchange buffers are reserved for; "
        "batches that see more gather in several windows; unset follows max_model_len, at most "
        f"{MAX_VISIBLE_TOKENS}.",
        low=1,
    ),
    Flag(
        "VLLM_B12X_MLA_CKV_GATHER_MIXED",
        "switch",
        False,
        "In a batch that holds decodes as well let the prompts gather, while the decodes keep the "
        "ordinary path.",
    ),
    Flag(
        "VLLM_B12X_MLA_CKV_SHARD_SELECTION",
        "switch",
        False,
        "In a gathered batch let each rank select pools for a share of the rows and exchange their "
        "ids, where the same model expects that to save twice the exchange: for contexts of "
        "100,000 tokens and more.",
    ),
    Flag(
        "VLLM_B12X_MLA_CKV_EARLY_EXCHANGE",
        "switch",
        False,
        "In a gathered batch of one request, or of prompts without a context, exchange the context "
        "alone, from the beginning of the layer on: for long contexts on slow links. Takes memory "
        "of its own.",
    ),
    Flag(
        "VLLM_CKV_DEBUG",
        "switch",
        False,
        "Check every page, slot and row, poison buffers and compare decisions over the ranks; "
        "waits for the device in every layer.",
    ),
    Flag(
        "VLLM_CKV_REFERENCE",
        "switch",
        False,
        "Run the engine on the CPU with torch kernels, to see results, not speed; "
        "examples/serve_reference.sh sets what it needs beside.",
    ),
)

OF_THE_GATHER = "VLLM_B12X_MLA_CKV_"
"""How the flags begin that have no effect unless the first of them is on."""

_version_reported = False
_hardware_reported = False


def check_flags() -> None:
    """Read every flag once.

    Raises:
        ValueError: a value is malformed.

    """
    for flag in FLAGS:
        flag.read()


def version_is_supported() -> bool:
    """Whether the installed vLLM is one this overlay was written for; says so once if not."""
    global _version_reported
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        installed = "unknown"
    if re.match(r"0\.33(\.|$)", installed):
        return True
    if not _version_reported:
        _version_reported = True
        logger.error(
            "vllm-b12x-ckv works with vLLM %s, found %s: %s is not registered",
            SUPPORTED_VERSIONS,
            installed,
            BACKEND_NAME,
        )
    return False


def restore_backend() -> AttentionBackendEnum:
    """The enum member, registered first if need be. Unpickling calls this."""
    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, BACKEND_PATH)
    member = AttentionBackendEnum[BACKEND_NAME]
    # Members pickle by value, and a spawned worker unpickles its config before it loads plugins:
    # by value the lookup would fail there.
    member.__reduce_ex__ = _reduce_backend  # type: ignore[method-assign, assignment]
    return member


def _reduce_backend(protocol: Any) -> tuple[Callable[[], AttentionBackendEnum], tuple[()]]:
    return restore_backend, ()


class _ImportHook(MetaPathFinder):
    """Acts right after stock modules were imported.

    Importing them at registration would import model code, and the platform that is still being
    resolved, in every vLLM process whatever its model.

    actions: what to do after which module.
    """

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self.actions = actions

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        action = self.actions.get(fullname)
        if action is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            _run_after(spec.loader, action)
        return spec


def _run_after(loader: Loader, action: Callable[[], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        action()

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _register_indexer() -> None:
    # Only now: find_spec imports parent packages, and vllm.models.glm5next imports the model.
    package = INDEXER_MODULE.rpartition(".")[0]
    if find_spec(package) is not None and find_spec(INDEXER_MODULE) is not None:
        # Whatever the flags say: a later engine of the process may have others.
        for module in (INDEXER_MODULE, MLA_MODULE):
            importlib.import_module(module).register()


def _lock_after_warm_up() -> None:
    """Make the GPU worker lock its workspace after warm-up, if a layer of it gathers.

    vLLM locks after a graph capture only; in eager mode a later growth would go unnoticed.
    """
    worker = sys.modules[WORKER_MODULE].Worker
    warm_up = worker.compile_or_warm_up_model
    if getattr(warm_up, "locks_workspace", False):
        return

    @wraps(warm_up)
    def compile_or_warm_up_model(self: Any) -> Any:
        from vllm.v1.attention.backends.mla.ckv_gather.startup import lock_after_warm_up

        result = warm_up(self)
        lock_after_warm_up(self)
        return result

    compile_or_warm_up_model.locks_workspace = True  # type: ignore[attr-defined]
    worker.compile_or_warm_up_model = compile_or_warm_up_model


def _arrange_hooks() -> None:
    actions = {INDEXER_USER: _register_indexer, WORKER_MODULE: _lock_after_warm_up}
    for module, action in actions.items():
        # A module that is being imported right now gets its action when it is done.
        if getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", True):
            continue
        action()
    if not any(isinstance(finder, _ImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportHook(actions))


def hardware_remark(platform: Any) -> str | None:
    """What people who ask for the gather have to know about this machine; None if nothing.

    platform: vLLM's current platform. Asks the driver for the device's capability, which
        initialises no CUDA context.
    """
    if platform.is_cuda():
        if not platform.has_device_capability(MIN_CAPABILITY):
            return (
                f"{BACKEND_NAME} needs compute capability {MIN_CAPABILITY / 10:.1f} or newer, this "
                f"GPU has {platform.get_device_capability().as_version_str()}: choose another "
                "attention backend"
            )
        # The b12x kernels serve this family alone; every other GPU runs Triton ones.
        if (
            platform.is_device_capability_family(120)
            and find_spec(B12X_PROVIDER) is not None
            and find_spec("b12x") is None
        ):
            return (
                "b12x is not installed, so this GPU runs the Triton kernels: "
                "pip install 'vllm-b12x-ckv[b12x]'"
            )
        return None
    if os.environ.get("VLLM_CKV_REFERENCE") == "1":
        return None
    return (
        f"{BACKEND_NAME} needs an NVIDIA GPU, this machine has none that vLLM can use: choose "
        "another attention backend, or set VLLM_CKV_REFERENCE=1 to see results on the CPU"
    )


def _report_hardware() -> None:
    global _hardware_reported
    if _hardware_reported or not FLAGS[0].read():
        return
    _hardware_reported = True
    from vllm.platforms import current_platform

    remark = hardware_remark(current_platform)
    if remark is not None:
        logger.warning("%s", remark)


def _register() -> None:
    if not version_is_supported():
        return
    restore_backend()
    for flag in FLAGS:
        envs.environment_variables.setdefault(flag.name, partial(Flag.read, flag))
    check_flags()
    _arrange_hooks()


def register() -> None:
    """Entry point of ``vllm.general_plugins``. Idempotent.

    Another vLLM than 0.33.x gets one error line and nothing registered; vLLM starts without us.
    With the gather on, a GPU that cannot run it gets one line as well.

    Raises:
        ValueError: a flag of ``FLAGS`` is malformed. The backend stays known all the same, so
            that this error is the one people see.

    """
    _register()
    if version_is_supported():
        _report_hardware()
        if FLAGS[0].read():
            from vllm.v1.attention.backends.mla.ckv_gather import metrics

            metrics.offer()


def register_platform() -> None:
    """Entry point of ``vllm.platform_plugins``: registers, and returns None (no platform)."""
    try:
        _register()
    except ValueError:
        # vLLM would print a traceback and go on; the general group raises this for real.
        logger.debug("flags refused during platform detection", exc_info=True)
