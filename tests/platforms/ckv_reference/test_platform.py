# SPDX-License-Identifier: Apache-2.0
"""Backend selection of the reference platform."""

from types import SimpleNamespace

import pytest

from vllm.platforms.ckv_reference.platform import CkvReferencePlatform

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
