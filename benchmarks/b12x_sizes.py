#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Say which kernels this machine chooses, and whether b12x has kernels for a model.

    python benchmarks/b12x_sizes.py MODEL RANKS

MODEL: a checkpoint, or a folder with its config.json. RANKS: of tensor and of decode context
parallelism. Status 1 if b12x has none: another provider would then run the whole model.
"""

import argparse
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("ranks", type=int)
    args = parser.parse_args()

    from vllm.platforms.ckv_reference import declare_torchvision_ops

    declare_torchvision_ops()
    from transformers import AutoConfig

    from vllm.v1.attention.backends.mla.ckv_gather.geometry import FP8_DS_MLA
    from vllm.v1.attention.backends.mla.sparse_mla_kernels import b12x, get_kernels

    config = AutoConfig.from_pretrained(args.model).get_text_config()
    print("provider:", type(get_kernels()).__name__)
    try:
        sizes = b12x.Sizes(
            # vLLM aligns pages later; b12x takes any.
            page_size=b12x.FLAT_PAGE,
            record_bytes=FP8_DS_MLA.record_bytes,
            head_counts=(config.num_attention_heads // args.ranks, config.num_attention_heads),
            index_heads=max(32, config.index_n_heads),
            topk=config.index_topk // config.index_kpool,
            width=config.index_topk + config.index_kpool - 1,
            scale=(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5,
        )
    except ValueError as error:
        print(f"b12x has no kernels for this model at {args.ranks} ranks: {error}")
        sys.exit(1)
    print(f"b12x has kernels for {sizes}")


if __name__ == "__main__":
    main()
