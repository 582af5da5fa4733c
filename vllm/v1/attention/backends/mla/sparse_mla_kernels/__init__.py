# SPDX-License-Identifier: Apache-2.0
"""Providers of the sparse MLA device operations.

Every provider implements :class:`~.base.SparseMLAKernels`: the same tensors, the same meaning. A
provider module is imported only when it is chosen, so that no GPU toolchain is needed here.
"""

from functools import cache

from .base import SparseMLAKernels

__all__ = ["SparseMLAKernels", "get_kernels"]


@cache
def get_kernels() -> SparseMLAKernels:
    """The provider of this process, chosen once. Only the torch reference exists so far."""
    from .torch_reference import TorchReferenceKernels

    return TorchReferenceKernels()
