#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# compute-sanitizer's memcheck and racecheck over the Triton kernels, at the small sizes of the suite.
#
#     benchmarks/sanitize.sh [REPORT]
#
# REPORT: written anew (sanitize.md). Logs stay beside it. $PYTHON (.venv/bin/python) has pytest and
# vLLM; everything ends within $LIMIT (230) seconds. Needs an NVIDIA GPU and compute-sanitizer on the
# PATH.
#
# Ends with status 1 if a tool reports anything, a test fails, a run is cut short, or memcheck misses
# the write behind an allocation that a control makes.
set -euo pipefail

(($# <= 1)) || { echo "usage: benchmarks/sanitize.sh [REPORT]" >&2; exit 2; }
REPORT=$(realpath -m "${1:-sanitize.md}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
LIMIT=${LIMIT:-230}
SUITE=tests/v1/attention/backends/mla/sparse_mla_kernels/test_kernels.py
# One test or two of every operation.
TESTS=(
    test_write_skips_negative_slots_and_touches_nothing_else
    test_packed_requests_do_not_mix
    test_pool_257_lands_in_page_4_place_1
    test_gathered_pools_equal_the_single_rank_cache
    test_selection_against_fp64_with_ties_and_short_rows
    test_rows_of_several_requests_in_one_tile
    test_merge_of_unordered_candidates_with_ties
    test_expand_order_is_history_tail_then_nothing
    test_remap_finds_every_token
    test_filter_local_splits_tokens_over_ranks_in_order
    test_attention_against_fp64
    test_attention_without_rows_or_records
)
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on the PATH" >&2; exit 2; }
mkdir -p "$(dirname "$REPORT")"
LOGS=${REPORT%.md}

# The parameter "gpu" stands for the Triton provider with tensors on the device.
selection="gpu and not gpu_scratch and ($(printf '%s or ' "${TESTS[@]}" | sed 's/ or $//'))"
pytest=("$PYTHON" -m pytest -p no:cacheprovider -v --tb=short "$SUITE" -k "$selection")
# Every tensor is an allocation of its own, or an overrun would land in the allocator's pool.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
failed=()

bounded() { # PERCENT LOG COMMAND...: the command's status; 124 after PERCENT of the time left
    local seconds=$(((LIMIT - SECONDS) * $1 / 100)) log=$2
    shift 2
    timeout -k 5 "$((seconds > 1 ? seconds : 1))" "$@" >"$log" 2>&1
}

row() { # NAME STATUS LOG PATTERN: a line of the table; the last match of PATTERN is the tool's word
    local said tests
    said=$(grep -oE "$4" "$3" | tail -1) || true
    tests=$(grep -oE '[0-9]+ (passed|failed)[^=]*in [0-9.]+s' "$3" | tail -1) || true
    # 124 and 137: cut short.
    [[ -n $tests ]] || tests=$([[ $2 == 124 || $2 == 137 ]] && echo "did not end" || echo none)
    echo "| $1 | $tests | ${said:-said nothing} | $2 |" | tee -a "$REPORT"
}

{
    echo "# compute-sanitizer over the Triton kernels"
    echo
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1
    compute-sanitizer --version | grep -i version
    "$PYTHON" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
    echo
    echo "\`-k \"$selection\"\`"
    echo
    echo "| run | tests | the tool | status |"
    echo "|---|---|---|---:|"
} | tee "$REPORT"

cat >"$LOGS.control.py" <<'CONTROL'
import torch
import triton
import triton.language as tl


@triton.jit
def write_behind(out, n):
    tl.store(out + n + tl.arange(0, 16), 1)


out = torch.zeros(64, dtype=torch.int32, device="cuda")
write_behind[(1,)](out, 64)
torch.cuda.synchronize()
CONTROL
status=0
bounded 20 "$LOGS.control.log" compute-sanitizer --tool memcheck --error-exitcode 9 \
    "$PYTHON" "$LOGS.control.py" || status=$?
row "memcheck, a write behind an allocation" "$status" "$LOGS.control.log" 'ERROR SUMMARY: [0-9]+ error.*'
grep -q 'Invalid __global__ write' "$LOGS.control.log" || failed+=("the control: nothing noticed")

# Compiles the kernels, so that the sanitizer's time is spent on running them.
status=0
bounded 45 "$LOGS.plain.log" "${pytest[@]}" || status=$?
row "without a tool" "$status" "$LOGS.plain.log" 'no such line'
((status == 0)) || failed+=("the tests without a tool")

for tool in memcheck racecheck; do
    log=$LOGS.$tool.log
    share=$([[ $tool == memcheck ]] && echo 50 || echo 100)
    status=0
    bounded "$share" "$log" compute-sanitizer --tool "$tool" --error-exitcode 9 "${pytest[@]}" || status=$?
    row "$tool" "$status" "$log" '(ERROR SUMMARY: [0-9]+ error|RACECHECK SUMMARY: [0-9]+ hazard).*'
    # The word of the tool itself: a run that it never watched has none.
    if ((status != 0)) || ! grep -qE '(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)' "$log"; then
        failed+=("$tool")
    fi
done

if ((${#failed[@]})); then
    printf '\nFAILED: %s\n' "$(IFS=';'; echo "${failed[*]}")" | tee -a "$REPORT"
    exit 1
fi
printf '\nNothing found; the control was.\n' | tee -a "$REPORT"
