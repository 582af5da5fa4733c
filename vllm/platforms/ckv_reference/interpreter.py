# SPDX-License-Identifier: Apache-2.0
"""Repairs of Triton's interpreter (3.8) where its numbers or its interface are wrong.

Its float32 -> e4m3 conversion neither rounds to nearest even nor carries into the exponent, its
e4m3 NaN loads as 480, its dot of bf16 operands multiplies bit patterns, and interpreted functions
lack the ``constexprs`` attribute that vLLM reads. Torch's conversions are the replacement.
"""

import inspect

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

_TORCH_TYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_TORCH_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DOT_CONVERTED = ("bf16", "fp8e4nv", "fp8e5")

_stock_convert_float = interpreter._convert_float


def convert_float(data, source, target, rounding_mode):
    """Convert an array of ``source`` bit patterns to ``target`` bit patterns.

    data: numpy array of any shape whose item size is that of ``source``. Returns unsigned
    integers of the same shape with ``target``'s width. Rounds to nearest even; other rounding
    modes and unknown types go to the interpreter's own function.
    """
    nearest = rounding_mode is None or rounding_mode == interpreter._ir.ROUNDING_MODE.RTNE
    if not nearest or source.name not in _TORCH_TYPES or target.name not in _TORCH_TYPES:
        return _stock_convert_float(data, source, target, rounding_mode)
    flat = np.ascontiguousarray(data).reshape(-1)
    # A copy, since the interpreter may hand out read-only memory.
    bits = torch.from_numpy(flat.view(_SIGNED[flat.itemsize]).copy())
    converted = bits.view(_TORCH_TYPES[source.name]).to(_TORCH_TYPES[target.name])
    size = converted.element_size()
    return converted.view(_TORCH_SIGNED[size]).numpy().view(_UNSIGNED[size]).reshape(data.shape)


def _dot_operand(handle):
    scalar = handle.dtype.scalar
    if scalar.name in _DOT_CONVERTED:
        return convert_float(handle.data, scalar, tl.float32, None).view(np.float32)
    return handle.data


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    product = np.matmul(_dot_operand(a), _dot_operand(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _constexprs(self) -> list[int]:
    parameters = inspect.signature(self.fn).parameters.values()
    return [i for i, p in enumerate(parameters) if "constexpr" in str(p.annotation)]


def install() -> None:
    """Put the repairs in place; repeated calls change nothing."""
    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = _create_dot
    if not hasattr(interpreter.InterpretedFunction, "constexprs"):
        interpreter.InterpretedFunction.constexprs = property(_constexprs)
