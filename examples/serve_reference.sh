#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve the small random model on the CPU, two ranks, with full-CKV prefill: the real engine with
# torch kernels. It shows that requests are served, not how fast. Prompts are token ids.
set -euo pipefail

MODEL=${MODEL:-$(mktemp -d)/small}
python -c 'import pathlib, sys
from vllm.entrypoints.ckv.model import write_model
write_model(pathlib.Path(sys.argv[1]))' "$MODEL"
settings=$(python -c 'from vllm.platforms.ckv_reference import environment
for name, value in environment().items():
    print(f"{name}={value}")')
while IFS= read -r setting; do export "${setting?}"; done <<<"$settings"
export VLLM_B12X_MLA_CKV_GATHER=${VLLM_B12X_MLA_CKV_GATHER:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec vllm serve "$MODEL" \
    --served-model-name small \
    --skip-tokenizer-init \
    --enforce-eager \
    --dtype bfloat16 \
    --attention-backend B12X_MLA_SPARSE \
    --kv-cache-dtype fp8_ds_mla \
    --kv-cache-memory-bytes 268435456 \
    --block-size 256 \
    --max-model-len 4096 \
    --max-num-seqs 4 \
    --max-num-batched-tokens 512 \
    --tensor-parallel-size 2 \
    --decode-context-parallel-size 2 \
    --cp-kv-cache-interleave-size 4 \
    "$@"
