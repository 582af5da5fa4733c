# SPDX-License-Identifier: Apache-2.0
"""Backend selection of the reference platform."""

from types import SimpleNamespace

import pytest

from vllm.platforms.ckv_reference.platform import CkvReferencePlatform

PATH = __name__ + ".Backend"


class Backend:
    """Stands for a registered backend; its answer is set by each test."""

    validate_configuration = None


def select(monkeypatch, reasons, selected=True):
    monkeypatch.setattr(Backend, "validate_configuration", lambda **_: reasons)
    monkeypatch.setattr(
        "vllm.platforms.ckv_reference.platform.resolve_obj_by_qualname", lambda _: Backend
    )
    backend = SimpleNamespace(name="SPARSE", get_path=lambda: PATH) if selected else None
    config = SimpleNamespace(use_sparse=True, _asdict=lambda: {"head_size": 512})
    return CkvReferencePlatform.get_attn_backend_cls(backend, config)


def test_sparse_backend_is_selected(monkeypatch):
    assert select(monkeypatch, []) == PATH


def test_every_reason_of_a_refusal_is_listed(monkeypatch):
    with pytest.raises(ValueError, match=r"SPARSE.*first.*second"):
        select(monkeypatch, ["first", "second"])


def test_sparse_attention_needs_a_named_backend(monkeypatch):
    with pytest.raises(ValueError, match="attention-backend"):
        select(monkeypatch, [], selected=False)
