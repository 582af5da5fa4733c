# SPDX-License-Identifier: Apache-2.0
"""The beginning of a layer: whose it is, and when it runs in a piecewise CUDA graph."""

from types import SimpleNamespace

import pytest
import torch

from vllm.platforms.ckv_reference import declare_torchvision_ops

declare_torchvision_ops()

from vllm.compilation import breakable_cudagraph  # noqa: E402
from vllm.model_executor import custom_op  # noqa: E402
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper  # noqa: E402

from vllm.models.glm5next.b12x import mla  # noqa: E402
from vllm.plugins import b12x_mla_sparse as plugin  # noqa: E402


@pytest.fixture
def layers(monkeypatch):
    """Makes outer layers around an implementation; the list has what happened on them."""
    happened = []
    monkeypatch.setattr(
        MultiHeadLatentAttentionWrapper, "forward", lambda self, *a, **k: happened.append("layer")
    )

    def make(**options):
        layer = object.__new__(mla.B12xMLAWrapper)
        torch.nn.Module.__init__(layer)
        impl = SimpleNamespace(begin_layer=lambda attention: happened.append(attention), **options)
        layer.mla_attn = SimpleNamespace(impl=impl)
        return layer

    return make, happened


def test_our_layers_begin_before_anything_else(layers):
    make, happened = layers
    layer = make(begins_early=True)
    layer(torch.zeros(1), torch.zeros(1))
    assert happened == [layer.mla_attn, "layer"]


@pytest.mark.parametrize("options", [{"begins_early": False}, {}])
def test_other_layers_are_left_alone(layers, options):
    make, happened = layers
    make(**options)(torch.zeros(1), torch.zeros(1))
    assert happened == ["layer"]


def test_a_replay_of_a_piecewise_graph_begins_anew(layers, monkeypatch):
    """What CUDA would capture is a stand-in; what is inside a graph and what is not is vLLM's."""
    graph = SimpleNamespace(
        capture_begin=lambda **k: None, capture_end=lambda: None, replay=lambda: None
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    make, happened = layers
    layer = make(begins_early=True)
    with breakable_cudagraph.BreakableCUDAGraphCapture() as capture:
        layer(torch.zeros(1), torch.zeros(1))
    happened.clear()
    capture.replay()
    assert happened == [layer.mla_attn]
    assert capture.num_eager_breaks == 1


def test_stock_builds_our_layer(monkeypatch):
    monkeypatch.setattr(mla, "op_registry_oot", {})
    monkeypatch.setattr(custom_op, "op_registry_oot", mla.op_registry_oot)
    mla.register()
    mla.register()
    built = MultiHeadLatentAttentionWrapper.__new__(MultiHeadLatentAttentionWrapper)
    assert type(built) is mla.B12xMLAWrapper


def test_a_layer_that_somebody_else_replaced_is_an_error_where_it_is_needed(monkeypatch):
    name = MultiHeadLatentAttentionWrapper.__name__
    monkeypatch.setattr(mla, "op_registry_oot", {name: SimpleNamespace})
    plugin.register()
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_EARLY_EXCHANGE", "0")
    mla.register()
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_EARLY_EXCHANGE", "1")
    with pytest.raises(RuntimeError, match=r"plugin has replaced by types\.SimpleNamespace; set"):
        mla.register()
