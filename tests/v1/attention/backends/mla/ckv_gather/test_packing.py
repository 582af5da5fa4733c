# SPDX-License-Identifier: Apache-2.0
"""KDA, MLA and index pages of the real model in one block, as vLLM's own planner places them.

Specs as the layers of GLM-5.3-Flash give them, then vLLM's grouping, allocation and binding; the
bound caches have to pass the frozen geometry. Both record formats, TP 1, 2, 4 and 8.
"""

from dataclasses import replace
from math import lcm
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm.entrypoints.ckv import plan as p
from vllm.platforms.ckv_reference import declare_torchvision_ops
from vllm.v1.attention.backends.mla.ckv_gather import geometry as g

declare_torchvision_ops()

from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator  # noqa: E402
from vllm.v1.core import kv_cache_planning as planning  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    CircularBufferSpec,
    KVCacheLayout,
    MambaSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    get_kv_quant_mode,
)
from vllm.v1.worker import utils  # noqa: E402

from vllm.v1.attention.backends.mla import indexer as stock  # noqa: E402
from vllm.v1.attention.backends.mla.b12x_mla_sparse import B12xMLASparseBackend  # noqa: E402

MODEL = Path(__file__).parents[5] / "entrypoints/ckv/models/flash_slice"
PAGES = {1: 8704, 2: 4352, 4: 2304, 8: 1280}
FORMATS = [g.FP8_DS_MLA, g.NVFP4_DS_MLA]
STOCK_WIDTHS = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
NUM_BLOCKS = 3


@pytest.fixture(scope="module")
def sizes() -> p.ModelSizes:
    """All 45 layers of GLM-5.3-Flash, of which the checked-in slice has eight."""
    return replace(p.read_model(str(MODEL)), attention_layers=11, state_layers=34)


def make_specs(sizes: p.ModelSizes, tp: int, record: g.RecordFormat) -> dict:
    """One spec a cache, named after its kind, with the pages that vLLM aligned."""
    page = PAGES[tp]
    latent = B12xMLASparseBackend.customize_spec(
        MLAAttentionSpec(
            block_size=page,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=512,
            dtype=torch.uint8,
            cache_dtype_str=record.name,
            kv_quant_mode=get_kv_quant_mode(record.name),
            state_content_bytes=STOCK_WIDTHS[record.name],
            is_index_group_leader=True,
        )
    )
    index = utils.customize_attention_spec(
        stock.Glm5NextIndexerBackend,
        MLAAttentionSpec(
            block_size=page,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=g.INDEX_RECORD_BYTES,
            dtype=torch.uint8,
            cache_role=SparseCacheRole.INDEXER,
            tokens_per_state=sizes.pool_size,
        ),
    )
    state = MambaSpec(
        shapes=MambaStateShapeCalculator.kda_state_shape(
            tp, sizes.state_heads, sizes.state_dim, conv_kernel_size=sizes.state_kernel, num_spec=0
        ),
        dtypes=(torch.bfloat16, torch.float32),
        block_size=page,
        page_size_padded=page * p.STATE_BYTES_PER_TOKEN,
    )
    tail = CircularBufferSpec(
        block_size=4, num_kv_heads=2, head_size=128, head_size_v=0, dtype=torch.bfloat16
    )
    specs = {f"kda.{i}": state for i in range(sizes.state_layers)}
    for i in range(sizes.attention_layers):
        specs |= {f"mla.{i}": latent, f"index.{i}": index, f"tail.{i}": tail}
    return specs


def make_caches(specs: dict) -> tuple[dict[str, torch.Tensor], int]:
    """The caches that vLLM would bind, without memory behind them, and the bytes of a block."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
            num_gpu_blocks_override=NUM_BLOCKS,
            prefix_cache_retention_interval=None,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    groups = planning.get_kv_cache_groups(config, specs)
    plan = planning.get_kv_cache_config_from_groups(config, groups, 1 << 34)
    caches = utils.allocate_kv_cache(plan, torch.device("meta"), KVCacheLayout.BLHNC)
    size = utils.select_common_block_size(
        specs["index.0"].block_size, [stock.Glm5NextIndexerBackend], [specs["index.0"]]
    )
    for name in [name for name in caches if name.startswith("index")]:
        group = utils.AttentionGroup(
            stock.Glm5NextIndexerBackend, [name], specs[name], 0, kernel_block_size=size
        )
        caches[name] = group.map_kv_cache_to_kernel_blocks(caches[name])
    return caches, plan.kv_cache_tensors[0].size // NUM_BLOCKS


@pytest.mark.parametrize("record", FORMATS, ids=lambda record: record.name)
@pytest.mark.parametrize("tp", PAGES)
def test_pages_of_the_real_model_pack_into_one_block(sizes, tp, record, monkeypatch):
    # As on compute capability 12.x, where vLLM splits blocks into index pages of 64 pools alone.
    monkeypatch.setattr(stock, "get_paged_mqa_page_sizes", lambda: (64,))
    page = PAGES[tp]
    assert p.vllm_page_size(sizes, tp=tp, family=120) == page
    specs = make_specs(sizes, tp, record)
    caches, block = make_caches(specs)

    frozen = g.FrozenGeometry()
    frozen.freeze(g.PageGeometry(page, record, sizes.pool_size, 4, tp))
    frozen.get().check_index_page()
    used = []
    for i in range(sizes.attention_layers):
        latents, keys = caches[f"mla.{i}"].squeeze(1), caches[f"index.{i}"].squeeze(1)
        frozen.check_bound(latents)
        frozen.check_bound_index(keys)
        # Row and page numbers address them: blocks are whole records and whole index pages apart.
        assert latents.stride(0) == block
        assert block % keys.stride(0) == 0 and keys.stride(0) == g.INDEX_PAGE_BYTES
        used.append((latents.storage_offset(), page * record.record_bytes))
        used.append((keys.storage_offset(), page // sizes.pool_size * g.INDEX_RECORD_BYTES))

    # The pages of one token page lie side by side at the block's beginning, without a hole.
    end = 0
    for begin, length in sorted(used):
        assert begin == end
        end = begin + length
    # No smaller block would do: only this multiple of both lies at or above what it holds.
    step = lcm(record.record_bytes, g.INDEX_PAGE_BYTES)
    assert block - step < end <= block and block % step == 0
    assert block == p.block_bytes(sizes, page, record)
    # A block holds whole KDA states, the whole of each.
    state = page * p.STATE_BYTES_PER_TOKEN
    assert p.state_bytes(sizes, tp, 0) <= state <= block
    for i in range(sizes.state_layers):
        offset = caches[f"kda.{i}"].storage_offset() * caches[f"kda.{i}"].element_size()
        assert offset % state == 0 and offset + state <= block


def test_one_layer_leaves_room_for_a_state(sizes):
    """Records of a single layer are smaller than a state; the block is not."""
    one = replace(sizes, attention_layers=1)
    for record in FORMATS:
        _, block = make_caches(make_specs(one, 4, record))
        assert block == p.block_bytes(one, 2304, record) >= 2304 * p.STATE_BYTES_PER_TOKEN


def test_the_documented_blocks_are_the_planners(sizes):
    """docs/memory.md: page, block and padding of both formats at every TP."""
    table = (Path(__file__).parents[6] / "docs/memory.md").read_text()
    for tp, page in PAGES.items():
        cells = [f"{tp}", f"{page:,}"]
        for record in FORMATS:
            block = p.block_bytes(sizes, page, record)
            content = sizes.attention_layers * page * (record.record_bytes + 33)
            padding = block - content
            share = f"{padding:,} ({100 * padding / content:.2f} %)" if padding else "0"
            cells += [f"{block:,}", share]
        assert f"| {' | '.join(cells)} |" in table
    states = [p.block_bytes(sizes, 2304, record) // (2304 * 512) for record in FORMATS]
    assert "holds {} KDA states with FP8 records and {} with NVFP4".format(*states) in table
