# SPDX-License-Identifier: Apache-2.0
"""Providers of the sparse MLA device operations.

Every provider implements :class:`~.base.SparseMLAKernels`: the same tensors, the same meaning. A
provider module is imported only when it is chosen, so that no GPU toolchain is needed here.
"""

from functools import cache

from vllm.logger import init_logger

from .base import SparseMLAKernels

__all__ = ["SparseMLAKernels", "get_kernels"]

logger = init_logger(__name__)


@cache
def get_kernels() -> SparseMLAKernels:
    """The provider of this process, chosen once.

    b12x on compute capability 12.x if it can be imported, Triton on every other CUDA device,
    elsewhere the torch reference.

    Raises:
        RuntimeError: the CUDA device is older than compute capability 8.0.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        if not current_platform.has_device_capability(80):
            raise RuntimeError(
                f"the sparse MLA kernels need compute capability 8.0 or newer, this device has "
                f"{current_platform.get_device_capability()}; use another attention backend"
            )
        if current_platform.is_device_capability_family(120):
            try:
                from .b12x import B12xKernels

                return B12xKernels()
            except ImportError as error:
                logger.warning(
                    "b12x cannot be used (%s), so this GPU runs the Triton kernels: "
                    "pip install 'vllm-b12x-ckv[b12x]'",
                    error,
                )
        from .triton import TritonKernels

        return TritonKernels()
    from .torch_reference import TorchReferenceKernels

    return TorchReferenceKernels()
