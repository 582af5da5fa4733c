#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Qualify the b12x kernels on GPUs of compute capability 12.x (RTX PRO 6000, RTX 50, DGX Spark).
#
#     benchmarks/qualify_sm120.sh MODEL [RANKS]
#
# MODEL: a GLM-5.3-Flash checkpoint, or a folder with its config.json (dummy weights then).
# RANKS: GPUs for tensor and decode context parallelism, 2 if left out.
#
# Checks the kernels against the torch reference, the engine with the gather on against off, and
# measures the prefill of 32,320 tokens with it on and off. Prints a report to paste into an issue;
# logs stay in qualify-sm120/. Stops at the first thing that fails: later numbers would mean nothing.
set -euo pipefail

MODEL=${1:?usage: benchmarks/qualify_sm120.sh MODEL [RANKS]}
RANKS=${2:-2}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ $RANKS =~ ^[1-9][0-9]*$ ]] || { echo "RANKS is '$RANKS', need a number of GPUs"; exit 2; }
[[ -e $MODEL || $MODEL == */* ]] || { echo "MODEL '$MODEL' is neither a folder nor a name"; exit 2; }

OUT=qualify-sm120
mkdir -p "$OUT"
REPORT=$OUT/report.md
BIN=.venv/bin
[[ -x $BIN/python ]] || { echo "run 'make install' first"; exit 2; }

capability=$("$BIN/python" -c 'import torch; print(*torch.cuda.get_device_capability(), sep=".")' \
    2>/dev/null || echo none)
[[ $capability == 12.* ]] || { echo "needs compute capability 12.x, found: $capability"; exit 2; }
count=$("$BIN/python" -c 'import torch; print(torch.cuda.device_count())')
((count >= RANKS)) || { echo "needs $RANKS GPUs, found $count"; exit 2; }
((RANKS > 1)) || { echo "the gather needs at least 2 ranks"; exit 2; }

: >"$REPORT"
say() { printf '%s\n' "$@" | tee -a "$REPORT"; }
block() { printf '```\n' >>"$REPORT"; tee -a "$REPORT"; printf '```\n' >>"$REPORT"; }
step() { # step TITLE LOG COMMAND...: the last lines of its output become part of the report
    local title=$1 log=$OUT/$2.log
    shift 2
    say "" "## $title"
    if "$@" >"$log" 2>&1; then
        tail -n 40 "$log" | block
    else
        tail -n 60 "$log" | block
        say "" "**FAILED**: \`$*\`"
        exit 1
    fi
}

say "# b12x kernels on compute capability $capability" "" \
    "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(date -u +%F)," \
    "$RANKS of $count GPUs"
nvidia-smi --query-gpu=name,memory.total,power.limit,driver_version --format=csv | block

provider() {
    "$BIN/python" - "$MODEL" "$RANKS" <<'PYTHON'
import sys

from transformers import AutoConfig

import vllm  # noqa: F401
from vllm.v1.attention.backends.mla.sparse_mla_kernels import b12x, get_kernels

config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=False).get_text_config()
ranks, heads = int(sys.argv[2]), config.num_attention_heads
topk = config.index_topk // config.index_kpool
print("provider:", type(get_kernels()).__name__)
b12x.Sizes(
    page_size=64,
    record_bytes=528,
    head_counts=(heads // ranks, heads),
    index_heads=max(32, config.index_n_heads),
    topk=topk,
    width=config.index_topk + config.index_kpool - 1,
    scale=config.qk_head_dim**-0.5 if hasattr(config, "qk_head_dim") else 256**-0.5,
)
print("b12x has kernels for this model at this number of ranks")
PYTHON
}

TESTS=tests/v1/attention/backends/mla/sparse_mla_kernels
step "Machine" doctor "$BIN/vllm-ckv" doctor
step "Provider" provider provider
step "Kernels against the reference" kernels "$BIN/python" -m pytest -q -rP \
    "$TESTS/test_b12x_sm120.py" "$TESTS/test_b12x.py"
# Its model selects too few tokens for b12x, so this step runs the Triton kernels. The prefill below
# runs b12x's if MODEL has the sizes of GLM-5.3-Flash, which the next step finds out.
step "Engine: no DCP, ordinary DCP, full CKV" verify "$BIN/vllm-ckv" verify --dcp "$RANKS"
step "Prefill of 32,320 tokens, gather on and off" bench "$BIN/vllm-ckv" bench --model "$MODEL" \
    --tp "$RANKS" --lengths 32320 --samples 5 --json "$OUT/bench.json"

say "" "Done. Paste $REPORT into an issue, with $OUT/bench.json."
