# SPDX-License-Identifier: Apache-2.0
"""Providers of the sparse MLA device operations.

Every provider implements :class:`~.base.SparseMLAKernels`: the same tensors, the same meaning. A
provider module is imported only when it is chosen, so that no GPU toolchain is needed here.
"""

from .base import SparseMLAKernels

__all__ = ["SparseMLAKernels"]
