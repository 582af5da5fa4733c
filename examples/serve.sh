#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a GLM-5.3-Flash model with full-CKV prefill. Set MODEL; the rest has defaults.
#   MODEL=/models/glm-5.3-flash TP=4 bash examples/serve.sh --port 8000
set -euo pipefail

: "${MODEL:?set MODEL to the folder of the model}"
TP=${TP:-4}
DCP=${DCP:-$TP}
MAX_MODEL_LEN=${MAX_MODEL_LEN:-262144}
export VLLM_B12X_MLA_CKV_GATHER=${VLLM_B12X_MLA_CKV_GATHER:-1}
# On a busy server, whose prompts are computed beside decodes:
# export VLLM_B12X_MLA_CKV_GATHER_MIXED=1

# Stops here, with a sentence that says what to do, if this machine cannot gather.
vllm-ckv doctor --no-self-test
vllm-ckv plan "$MODEL" --tp "$TP" --dcp "$DCP" --max-model-len "$MAX_MODEL_LEN" --block-size 256

# Index pages hold 64 pools of four tokens, so blocks have to be a multiple of 256.
exec vllm serve "$MODEL" \
    --attention-backend B12X_MLA_SPARSE \
    --kv-cache-dtype fp8_ds_mla \
    --block-size 256 \
    --tensor-parallel-size "$TP" \
    --decode-context-parallel-size "$DCP" \
    --cp-kv-cache-interleave-size 4 \
    --max-model-len "$MAX_MODEL_LEN" \
    "$@"
