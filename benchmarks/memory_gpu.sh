#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Memory of the real engine on some GPUs: flat after warm-up, as reserved, and soon at start.
#
#     benchmarks/memory_gpu.sh [--dry-run] [MODEL]
#
# MODEL: a folder with a glm5_next config.json, dummy weights if it has none; benchmarks/models/slice_h64
# if left out. --dry-run: print the commands, one a line, and run none. Needs no GPU.
#
# Runs of mixed traffic, each with the gather on and then off, at 0.93 of the memory and with a first
# prompt of 54,639 tokens: eager and with CUDA graphs, then little traffic again, because the first
# start of each kind also compiles. memory_verdict.py judges them. Results and logs stay in $OUT
# (memory-gpu). $BIN (.venv/bin) has python. $TP (2) GPUs, of which $DCP (all) share a cache. Six engine
# starts; the first four took 286 s on two H200s.
set -euo pipefail

DRY_RUN=
if [[ ${1-} == --dry-run ]]; then
    DRY_RUN=1
    shift
fi
if (($# > 1)) || [[ ${1-} == -* ]]; then
    echo "usage: benchmarks/memory_gpu.sh [--dry-run] [MODEL]" >&2
    exit 2
fi
MODEL=${1-}
if [[ -n $MODEL ]]; then
    [[ -f $MODEL/config.json ]] || { echo "there is no $MODEL/config.json" >&2; exit 2; }
    MODEL=$(cd "$MODEL" && pwd) # a relative folder is the caller's
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
MODEL=${MODEL:-benchmarks/models/slice_h64}
OUT=${OUT:-memory-gpu}
BIN=${BIN:-.venv/bin}
TP=${TP:-2}
DCP=${DCP:-$TP}

if [[ -z $DRY_RUN ]]; then
    [[ -x $BIN/python ]] || { echo "there is no $BIN/python: run 'make install' first" >&2; exit 2; }
    count=$("$BIN/python" -c 'import torch; print(torch.cuda.device_count())')
    ((count >= TP)) || { echo "needs $TP GPUs, found $count" >&2; exit 2; }
    mkdir -p "$OUT"
fi

# run COMMAND...: run it, or print it; a failure is the verdict's to report.
run() {
    if [[ -n $DRY_RUN ]]; then
        echo "$*"
    else
        "$@" || echo "status $?: $*" >&2
    fi
}

# traffic NAME REQUESTS ENGINE: mixed traffic on both sides, with further arguments of vllm.LLM.
traffic() {
    run "$BIN/python" benchmarks/traffic.py --tp "$TP" --dcp "$DCP" --model "$MODEL" --requests "$2" \
        --gpu-memory-utilization 0.93 --first-prompt 54639 --prefix 20480 --no-sleep --engine "$3" \
        --logs "$OUT/$1" --out "$OUT/$1.json"
}

[[ -n $DRY_RUN ]] || rm -f "$OUT"/{eager,graphs,starts}.json
traffic eager 101 '{}'
traffic graphs 101 '{"enforce_eager":false}'
traffic starts 101 '{"enforce_eager":false}'
verdict=("$BIN/python" benchmarks/memory_verdict.py --model "$MODEL" --tp "$TP" --dcp "$DCP" "$OUT"/{eager,graphs,starts}.json)
if [[ -n $DRY_RUN ]]; then
    echo "${verdict[*]}"
else
    exec "${verdict[@]}"
fi
