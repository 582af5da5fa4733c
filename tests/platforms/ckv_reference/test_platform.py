# SPDX-License-Identifier: Apache-2.0
"""Backend selection of the reference platform, and what it hides of the processor."""

from types import SimpleNamespace

import pytest
import torch

from vllm.platforms.ckv_reference import declare_torchvision_ops

declare_torchvision_ops()

from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: E402

from vllm.platforms.ckv_reference.platform import CkvReferencePlatform  # noqa: E402

PATH = __name__ + ".Backend"


class Backend:
    """Stands for a registered backend; its answer is set by each test."""

    validate_configuration = None


def select(monkeypatch, reasons, selected=True, name="SPARSE", sparse=True):
    monkeypatch.setattr(Backend, "validate_configuration", lambda **_: reasons)
    monkeypatch.setattr(
        "vllm.platforms.ckv_reference.platform.resolve_obj_by_qualname", lambda _: Backend
    )
    backend = SimpleNamespace(name=name, get_path=lambda: PATH) if selected else None
    config = SimpleNamespace(use_sparse=sparse, _asdict=lambda: {"head_size": 512})
    return CkvReferencePlatform.get_attn_backend_cls(backend, config)


def test_sparse_backend_is_selected(monkeypatch):
    assert select(monkeypatch, []) == PATH


def test_every_reason_of_a_refusal_is_listed(monkeypatch):
    with pytest.raises(ValueError, match=r"SPARSE.*first.*second"):
        select(monkeypatch, ["first", "second"])


def test_sparse_attention_needs_a_named_backend(monkeypatch):
    with pytest.raises(ValueError, match="attention-backend"):
        select(monkeypatch, [], selected=False)


def test_a_model_without_sparse_attention_does_not_run_on_another_backend_than_asked(monkeypatch):
    with pytest.raises(ValueError, match=r"B12X_MLA_SPARSE is not valid.*model type"):
        select(monkeypatch, ["model type"], name="B12X_MLA_SPARSE", sparse=False)


def test_other_backends_without_sparse_attention_are_left_to_the_cpu_platform(monkeypatch):
    monkeypatch.setattr(
        "vllm.platforms.cpu.CpuPlatform.get_attn_backend_cls", lambda *_: "the base class's choice"
    )
    assert select(monkeypatch, ["unread"], sparse=False) == "the base class's choice"
    chosen = select(monkeypatch, ["unread"], selected=False, sparse=False)
    assert chosen == "the base class's choice"


@pytest.fixture
def newest_processor(monkeypatch):
    for feature in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, feature, lambda: True)


def test_a_processor_with_amx_asks_for_no_kernel_of_the_extension(newest_processor):
    linear = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    conv = torch.nn.Conv1d(32, 32, 4, groups=32, bias=False, dtype=torch.bfloat16)
    weight = conv.weight.clone()
    CkvReferencePlatform.import_kernels()
    for layer in (linear, conv):
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(linear.cpu_linear(x, linear.weight, None), linear(x))
    assert torch.equal(conv.weight, weight)


def test_with_the_extension_the_processor_is_what_it_is(newest_processor, monkeypatch):
    monkeypatch.setattr(torch.ops._C, "convert_weight_packed", object(), raising=False)
    CkvReferencePlatform.import_kernels()
    assert torch.cpu._is_amx_tile_supported() and torch.cpu._is_avx512_bf16_supported()
