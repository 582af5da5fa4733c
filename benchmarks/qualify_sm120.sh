#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Qualify the b12x kernels on GPUs of compute capability 12.x (RTX PRO 6000, RTX 50, DGX Spark).
#
#     benchmarks/qualify_sm120.sh [--dry-run] MODEL [RANKS]
#
# MODEL: a GLM-5.3-Flash checkpoint, or a folder with its config.json (dummy weights then).
# RANKS: GPUs for tensor and decode context parallelism: 2 (if left out), 4 or 8.
# --dry-run: print the commands, one a line, and run none. Needs no GPU.
#
# Checks the kernels against the torch reference, the engine with the gather on against off, and
# measures the prefill of 32,320 tokens with it on and off. Writes a report to paste into an issue;
# logs stay beside it in $OUT (qualify-sm120). $BIN (.venv/bin) has python and vllm-ckv.
#
# Goes on after a step that fails, since nobody may come by such a machine twice, and ends with
# status 1 and the names of the steps. Numbers below a failure may mean nothing.
set -euo pipefail

DRY_RUN=
if [[ ${1-} == --dry-run ]]; then
    DRY_RUN=1
    shift
fi
if (($# < 1 || $# > 2)); then
    echo "usage: benchmarks/qualify_sm120.sh [--dry-run] MODEL [RANKS]" >&2
    exit 2
fi
MODEL=$1
RANKS=${2:-2}
[[ $RANKS =~ ^[248]$ ]] || { echo "RANKS is '$RANKS', need 2, 4 or 8" >&2; exit 2; }
if [[ -d $MODEL ]]; then
    MODEL=$(cd "$MODEL" && pwd) # a relative folder is the caller's
elif [[ $MODEL != */* || $MODEL == [./]* ]]; then
    echo "MODEL '$MODEL' is neither a folder nor a name like ORGANISATION/MODEL" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-qualify-sm120}
BIN=${BIN:-.venv/bin}
REPORT=$OUT/report.md

if [[ -z $DRY_RUN ]]; then
    [[ -x $BIN/python ]] || { echo "there is no $BIN/python: run 'make install' first" >&2; exit 2; }
    capability=$("$BIN/python" -c \
        'import torch; print(*torch.cuda.get_device_capability(), sep=".")' 2>/dev/null || echo none)
    if [[ $capability != 12.* ]]; then
        echo "needs GPUs of compute capability 12.x, found: $capability" >&2
        exit 2
    fi
    count=$("$BIN/python" -c 'import torch; print(torch.cuda.device_count())')
    ((count >= RANKS)) || { echo "needs $RANKS GPUs, found $count" >&2; exit 2; }
    mkdir -p "$OUT"
    : >"$REPORT"
fi

failed=()
say() { printf '%s\n' "$@" | tee -a "$REPORT"; }
block() { printf '```\n' >>"$REPORT"; tee -a "$REPORT"; printf '```\n' >>"$REPORT"; }

# step TITLE LOG PATTERN COMMAND...: run a command; the lines of its output that match PATTERN, or
# its last lines if it fails, become part of the report.
step() {
    local title=$1 log=$OUT/$2.log pattern=$3
    shift 3
    if [[ -n $DRY_RUN ]]; then
        printf '%q ' "$@"
        echo
        return
    fi
    say "" "## $title"
    if "$@" >"$log" 2>&1; then
        { grep -E -- "$pattern" "$log" || true; } | block
    else
        tail -n 60 "$log" | block
        fail "$title"
    fi
}
ran_on_b12x() { # ran_on_b12x LOG PATTERN WHAT: the log has to say so
    [[ -n $DRY_RUN ]] || grep -qE -- "$2" "$OUT/$1.log" || fail "$3 is not b12x"
}
fail() { # fail WHAT: remember it and go on
    failed+=("$1")
    say "" "**FAILED**: $1"
}

if [[ -z $DRY_RUN ]]; then
    say "# b12x kernels on compute capability $capability" "" \
        "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(date -u +%F)," \
        "$RANKS of $count GPUs"
    nvidia-smi --query-gpu=name,memory.total,power.limit,driver_version --format=csv | block
fi

KERNEL_TESTS=tests/v1/attention/backends/mla/sparse_mla_kernels
verify_ranks=$((RANKS > 4 ? 4 : RANKS))
bench=("$BIN/vllm-ckv" bench --model "$MODEL" --tp "$RANKS" --lengths 32320 --samples 5
    --device gpu --json "$OUT/bench.json")
if [[ -d $MODEL ]] && ! compgen -G "$MODEL/*.safetensors" >/dev/null; then
    bench+=(--engine '{"load_format": "dummy"}')
fi

step "Machine" doctor "." "$BIN/vllm-ckv" doctor
step "Kernels for this model" sizes "." "$BIN/python" benchmarks/b12x_sizes.py "$MODEL" "$RANKS"
ran_on_b12x sizes "^provider: B12xKernels" "the machine's choice"
step "The package's contract, without the GPU" contract "passed|failed" \
    "$BIN/python" -m pytest -q "$KERNEL_TESTS/test_b12x.py"
step "Kernels against the torch reference" kernels "cosine|differ|chosen|MiB|passed|failed" \
    "$BIN/python" -m pytest -q -rP "$KERNEL_TESTS/test_b12x_sm120.py"
step "Engine: no DCP, ordinary DCP, full CKV" verify "." \
    "$BIN/vllm-ckv" verify --dcp "$verify_ranks" --device gpu --sizes b12x --json "$OUT/verify.json"
ran_on_b12x verify "^kernels: B12xKernels" "the engine"
step "Prefill of 32,320 tokens, gather on and off" bench "." "${bench[@]}"

[[ -z $DRY_RUN ]] || exit 0
if ((${#failed[@]})); then
    say "" "Failed: $(printf '%s; ' "${failed[@]}")" \
        "Paste $REPORT into an issue, with the logs of these steps from $OUT."
    exit 1
fi
say "" "Nothing failed. Paste $REPORT into an issue, with $OUT/bench.json and $OUT/verify.json."
