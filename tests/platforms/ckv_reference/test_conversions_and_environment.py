# SPDX-License-Identifier: Apache-2.0
"""The environment of the reference platform, and exact float conversions in the interpreter."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from vllm.platforms import ckv_reference


def run_child(code: str, **extra: str) -> str:
    environment = {**os.environ, **ckv_reference.environment(), **extra}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_platform_is_off_without_its_variable(monkeypatch):
    monkeypatch.delenv("VLLM_CKV_REFERENCE", raising=False)
    assert ckv_reference.resolve() is None
    monkeypatch.setenv("VLLM_CKV_REFERENCE", "0")
    assert ckv_reference.resolve() is None


def test_platform_is_on_with_its_environment(monkeypatch):
    for name, value in ckv_reference.environment().items():
        monkeypatch.setenv(name, value)
    assert ckv_reference.resolve() == ckv_reference.PLATFORM_PATH


@pytest.mark.parametrize("name", ["TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"])
def test_incomplete_environment_names_the_missing_variable(monkeypatch, name):
    for key, value in ckv_reference.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv(name)
    with pytest.raises(RuntimeError, match=name):
        ckv_reference.resolve()


def test_environment_is_a_copy():
    ckv_reference.environment()["TRITON_INTERPRET"] = "0"
    assert ckv_reference.environment()["TRITON_INTERPRET"] == "1"


def test_torchvision_imports_after_resolve():
    out = run_child(
        """
        from vllm.platforms import ckv_reference
        assert ckv_reference.resolve()
        import torchvision
        print("imported")
        """
    )
    assert "imported" in out


def convert(values: torch.Tensor, source: str, target: str) -> np.ndarray:
    import triton.language as tl

    from vllm.platforms.ckv_reference import interpreter

    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    bits = values.view(sizes[values.element_size()]).numpy()
    return interpreter.convert_float(bits, getattr(tl, source), getattr(tl, target), None)


def test_all_256_e4m3_codes_load_exactly():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = torch.from_numpy(convert(codes, "float8e4nv", "float32").view(np.float32))
    want = codes.float()
    assert torch.equal(got.isnan(), want.isnan())
    assert int(want.isnan().sum()) == 2
    assert torch.equal(got.nan_to_num(0), want.nan_to_num(0))


def test_all_256_e4m3_codes_survive_a_round_trip():
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    got = torch.from_numpy(convert(values, "float32", "float8e4nv").view(np.uint8))
    keep = ~values.isnan()
    assert torch.equal(got[keep], codes[keep])


def test_ties_between_e4m3_codes_round_to_even():
    codes = torch.arange(127, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    middle = (values[1:] + values[:-1]) / 2
    got = torch.from_numpy(convert(middle, "float32", "float8e4nv").view(np.uint8))
    low = codes[:-1]
    assert torch.equal(got, torch.where(low % 2 == 0, low, low + 1))


def test_every_bf16_pattern_widens_exactly():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    got = torch.from_numpy(convert(bits.view(torch.bfloat16), "bfloat16", "float32").view(np.int32))
    assert torch.equal(got, bits.to(torch.int32) << 16)


def test_bf16_dot_and_store_in_the_interpreter():
    out = run_child(
        """
        import sys, tempfile, importlib.util, pathlib
        source = '''
        import triton
        import triton.language as tl
        @triton.jit
        def product(a_ptr, b_ptr, c_ptr, q_ptr):
            i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
            c = tl.dot(tl.load(a_ptr + i), tl.load(b_ptr + i))
            tl.store(c_ptr + i, c)
            tl.store(q_ptr + i, c)
        '''
        import textwrap
        path = pathlib.Path(tempfile.mkdtemp()) / "kernels.py"
        path.write_text(textwrap.dedent(source))
        spec = importlib.util.spec_from_file_location("kernels", path)
        module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
        import torch
        from vllm.platforms.ckv_reference import interpreter
        interpreter.install(); interpreter.install()
        torch.manual_seed(0)
        a, b = (torch.randn(16, 16).to(torch.bfloat16) for _ in range(2))
        c = torch.empty(16, 16); q = torch.empty(16, 16, dtype=torch.float8_e4m3fn)
        module.product[(1,)](a, b, c, q)
        want = a.double() @ b.double()
        assert (c - want).abs().max() < 1e-5, (c - want).abs().max()
        assert torch.equal(q.view(torch.uint8), c.to(torch.float8_e4m3fn).view(torch.uint8))
        print("equal")
        """
    )
    assert "equal" in out
