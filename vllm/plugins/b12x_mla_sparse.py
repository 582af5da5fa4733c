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
from functools import partial
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
# The one stock module that builds indexers; the replacement has to be in place before it is used.
INDEXER_USER = "vllm.models.glm5next.common.attention"
SUPPORTED_VERSIONS = "0.33.x"


@dataclass(frozen=True)
class Flag:
    """One environment variable.

    Attributes:
        name: the variable.
        kind: ``"switch"`` (0 or 1, read as bool) or ``"tokens"`` (an integer count of tokens).
        default: what the flag reads as when the variable is unset.
        meaning: one sentence for people.
        low: smallest accepted count; ``"tokens"`` only.
        high: largest accepted count; ``"tokens"`` only.

    """

    name: str
    kind: str
    default: bool | int | None
    meaning: str
    low: int = 0
    high: int = MAX_VISIBLE_TOKENS

    @property
    def accepted(self) -> str:
        """The accepted values, in words."""
        return "0 or 1" if self.kind == "switch" else f"an integer from {self.low} to {self.high}"

    def read(self) -> bool | int | None:
        """The flag's value in this process's environment.

        Raises:
            ValueError: the text is not an accepted value; names variable, text and what is.

        """
        text = os.environ.get(self.name)
        if text is None:
            return self.default
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
        "switch",
        False,
        "Gather all compressed-KV records for eligible prefill batches under decode context "
        "parallelism.",
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
        f"unset follows max_model_len, at most {MAX_VISIBLE_TOKENS}.",
        low=1,
    ),
)

_version_reported = False


def check_flags() -> None:
    """Read every flag once.

    Raises:
        ValueError: a value is malformed, or the two token limits leave no batch to gather.

    """
    values = {flag.name: flag.read() for flag in FLAGS}
    low = values["VLLM_B12X_MLA_CKV_GATHER_MIN_TOKENS"]
    high = values["VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS"]
    if low is not None and high is not None and high <= low:
        raise ValueError(
            f"VLLM_B12X_MLA_CKV_GATHER_MAX_TOKENS={high} is not accepted with "
            f"VLLM_B12X_MLA_CKV_GATHER_MIN_TOKENS={low}: set it above {low}, or no batch gathers"
        )


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


class _IndexerHook(MetaPathFinder):
    """Registers our indexer right after stock's only user of it was imported.

    Importing the indexer at registration would import model code, and the platform that is still
    being resolved, in every vLLM process whatever its model.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != INDEXER_USER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            _run_after(spec.loader, _register_indexer)
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
        importlib.import_module(INDEXER_MODULE).register()


def _arrange_indexer() -> None:
    if INDEXER_USER in sys.modules:
        _register_indexer()
    elif not any(isinstance(finder, _IndexerHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _IndexerHook())


def register() -> None:
    """Entry point of ``vllm.general_plugins``. Idempotent.

    Another vLLM than 0.33.x gets one error line and nothing registered; vLLM starts without us.

    Raises:
        ValueError: a flag of ``FLAGS`` is malformed. The backend stays known all the same, so
            that this error is the one people see.

    """
    if not version_is_supported():
        return
    restore_backend()
    for flag in FLAGS:
        envs.environment_variables.setdefault(flag.name, partial(Flag.read, flag))
    check_flags()
    _arrange_indexer()


def register_platform() -> None:
    """Entry point of ``vllm.platform_plugins``: registers, and returns None (no platform)."""
    try:
        register()
    except ValueError:
        # vLLM would print a traceback and go on; the general group raises this for real.
        logger.debug("flags refused during platform detection", exc_info=True)
