# SPDX-License-Identifier: Apache-2.0
"""The indexer that replaces stock's in every glm5_next model: stock's, unless our backend follows.

What it computes on our backend is tested in the engine and with the kernels.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch

from vllm.platforms.ckv_reference import declare_torchvision_ops

declare_torchvision_ops()

from vllm.models.glm5next.b12x import sparse_indexer as module  # noqa: E402
from vllm.v1.attention.backends.mla.ckv_gather.workspace import NO_SCRATCH  # noqa: E402

Stock = module.SparseAttnIndexerKpool
Ours = module.B12xSparseAttnIndexer
STOCK_FORWARD = Stock.forward_cuda  # fixtures replace the attribute
FORWARDS = ["forward_native", "forward_cuda", "forward_cpu", "forward_oot"]


@pytest.fixture
def op(monkeypatch):
    """An indexer as a glm5_next layer builds it; stock's constructor wants a whole engine."""
    monkeypatch.setattr(Stock, "__init__", lambda self, *a, **k: torch.nn.Module.__init__(self))
    return Ours("any", arguments=True)


@pytest.fixture
def stock_calls(monkeypatch):
    calls = []

    def forward_cuda(self, *args, **kwargs):
        calls.append((self, args, kwargs))
        return "stock's result"

    monkeypatch.setattr(Stock, "forward_cuda", forward_cuda)
    return calls


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_layer_on_another_backend_gets_stock_and_the_same_arguments(op, stock_calls, forward):
    args = tuple(torch.empty(i) for i in range(4))
    kwargs = {
        "gate_score": torch.empty(5),
        "compress_ape": torch.empty(6),
        "index_kpool": 4,
        "positions": torch.empty(7),
    }
    assert getattr(op, forward)(*args, **kwargs) == "stock's result"
    ((called_on, got_args, got_kwargs),) = stock_calls
    assert called_on is op
    assert [id(arg) for arg in got_args] == [id(arg) for arg in args]
    assert got_kwargs.keys() == kwargs.keys()
    assert all(got_kwargs[name] is kwargs[name] for name in kwargs)


@pytest.mark.parametrize("forward", FORWARDS)
def test_defaults_are_stocks(op, stock_calls, forward):
    """A call that leaves arguments out reaches stock with the values stock would have filled in."""
    getattr(op, forward)(*range(4))
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(STOCK_FORWARD).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    (call,) = stock_calls
    assert call[2] == {name: defaults[name] for name in call[2]}
    assert call[2].keys() == defaults.keys()


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_layer_that_is_followed_never_reaches_stock(op, stock_calls, monkeypatch, forward):
    seen = []
    monkeypatch.setattr(module, "select_tokens", lambda *args: seen.append(args) or "ours")
    gather = object()
    op.follow("layer", gather)
    tensor = torch.empty(1)
    result = getattr(op, forward)(
        tensor,
        tensor,
        tensor,
        tensor,
        gate_score=tensor,
        compress_ape=tensor,
        index_kpool=4,
        positions=tensor,
    )
    assert result == "ours" and stock_calls == []
    assert seen[0][0] is op and op.gather is gather and op.layer_name == "layer"


def test_every_forward_that_stock_could_dispatch_to_is_defined():
    """A CUDA, a CPU and an out-of-tree platform take different methods."""
    for name in FORWARDS:
        assert name in vars(Ours)
    assert issubclass(Ours, Stock)


def test_registering_makes_stocks_name_build_ours_and_leaves_other_ops_alone(monkeypatch):
    from vllm.model_executor import custom_op

    registry = {"OtherOp": object}
    monkeypatch.setattr(custom_op, "op_registry_oot", registry)
    module.register()
    module.register()
    assert registry == {"OtherOp": object, "SparseAttnIndexerKpool": Ours}
    monkeypatch.setattr(Stock, "__init__", lambda self, *a, **k: torch.nn.Module.__init__(self))
    built = Stock()
    assert type(built) is Ours and built.gather is None


class Recorder:
    """A provider that notes the pool slots it is to write, and where selection reads."""

    def write_pools(self, k, gate, ape, index_cache, pool_slots, *others) -> None:
        self.pool_slots, self.places = pool_slots.tolist(), others[-1]

    def select_pools(self, q, weights, pages, table, req_id, visible_pools, topk, scratch):
        self.read = pages
        return torch.full((q.shape[0], topk), -1), torch.zeros(q.shape[0], topk)

    def expand_pools(self, pool_ids, positions, pool_size, width):
        return torch.full((pool_ids.shape[0], width), -1)


@pytest.mark.parametrize("is_draft", [False, True])
def test_a_draft_layer_ignores_the_plan_and_slots_of_rejected_tokens(monkeypatch, is_draft):
    """Verification of three tokens at 150: one accepted, the others' positions are of before."""
    kernels = Recorder()
    monkeypatch.setattr(module, "get_kernels", lambda: kernels)
    index = SimpleNamespace(
        slot_mapping=torch.tensor([-1, 6546, -1]), block_table=torch.zeros(1, 1)
    )
    attention = SimpleNamespace(
        num_actual_tokens=3,
        num_decodes=0,
        num_decode_tokens=0,
        req_id_per_token=torch.zeros(3, dtype=torch.int32),
        query_start_loc=torch.tensor([0, 3]),
        ckv_plan=SimpleNamespace(first_row=0),
    )
    metadata = {
        "index": index,
        "tail": SimpleNamespace(slot_mapping=torch.tensor([6, 7, 0])),
        "layer": attention,
    }
    monkeypatch.setattr(
        module, "get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata)
    )
    op = SimpleNamespace(
        topk_indices_buffer=torch.zeros(8, 35, dtype=torch.int32),
        k_cache=SimpleNamespace(prefix="index", kv_cache="the layer's own pages"),
        tail_cache=SimpleNamespace(prefix="tail", kv_cache=None),
        layer_name="layer",
        topk_tokens=32,
        dcp_world_size=1,
        is_draft=is_draft,
        gather=SimpleNamespace(
            debug=False,
            ordinary_scratch=NO_SCRATCH,
            own_pools=lambda plan: "the pages of own pools" if plan else None,
            select_pools=lambda plan, *others: torch.full((3, 8), -1) if plan else None,
        ),
    )
    positions = torch.tensor([150, 102, 103]) if is_draft else torch.tensor([150, 151, 152])
    tensors = [torch.zeros(3, 2) for _ in range(4)]
    module.select_tokens(op, *tensors, torch.zeros(4, 2), 4, positions)
    assert kernels.pool_slots == ([-1, -1, -1] if is_draft else [-1, 6546, -1])
    assert kernels.places == (None if is_draft else "the pages of own pools")
    # The model's own layers select on the gathered pages instead.
    assert getattr(kernels, "read", None) == ("the layer's own pages" if is_draft else None)
