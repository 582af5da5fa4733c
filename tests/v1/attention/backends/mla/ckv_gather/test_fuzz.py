# SPDX-License-Identifier: Apache-2.0
"""Random servers and schedules on simulated ranks against one rank without DCP in float64.

CKV_FUZZ_CASES sets how many (2,000), CKV_FUZZ_SEED repeats a run; the seed is printed. After a
failure, which is shrunk first, ``python tests/helpers/ckv_fuzz.py keep NAME`` makes a regression.
"""

import json
import os
import random
import subprocess
import sys
from collections import Counter

import ckv_fuzz
import pytest

CASES = int(os.environ.get("CKV_FUZZ_CASES", "2000"))
SEED = int(os.environ.get("CKV_FUZZ_SEED") or random.SystemRandom().randrange(10**9))
PROCESSES = 2


def test_random_cases_equal_one_rank(capsys):
    searches = [
        subprocess.Popen(
            [sys.executable, ckv_fuzz.__file__, "search", str(CASES // PROCESSES), str(SEED + i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for i in range(PROCESSES)
    ]
    outputs = [search.communicate() for search in searches]
    run = f"CKV_FUZZ_SEED={SEED} CKV_FUZZ_CASES={CASES}"
    for search, (_, errors) in zip(searches, outputs, strict=True):
        assert search.returncode == 0, f"{run}\n{errors[-8000:]}"
    seen = sum((Counter(json.loads(out.splitlines()[-1])) for out, _ in outputs), Counter())
    with capsys.disabled():
        print(f"\nfuzz: {run}: {dict(seen)}")
    # Both paths were tried, with both record formats: each could be wrong alone.
    if CASES >= 200:
        assert min(seen["gathered"], seen["ordinary"]) > CASES // 5
        for record in ("fp8_ds_mla", "nvfp4_ds_mla"):
            assert min(seen[f"{path}, {record}"] for path in ("gathered", "ordinary")) > CASES // 20
        shared = seen["shared selection"]
        assert min(shared, seen["gathered"] - shared) > CASES // 20
        assert seen["shared selection, fewer rows than ranks"] > 0
        assert seen["early exchange of a context"] > CASES // 50
        assert seen["early exchange, several requests"] > 0
        assert min(seen["auto, gathered"], seen["auto, ordinary"]) > CASES // 50
        assert seen["beside verification"] > 0
        for what in (
            "early exchange",
            "several spans",
            "context in windows",
            "beside decodes",
        ):
            for record in ("fp8_ds_mla", "nvfp4_ds_mla"):
                assert seen[f"{what}, {record}"] > CASES // 100


@pytest.mark.parametrize("path", sorted(ckv_fuzz.KEPT.glob("*.json")), ids=lambda p: p.stem)
def test_kept_case(path, monkeypatch):
    monkeypatch.setenv("VLLM_B12X_MLA_CKV_GATHER", "1")
    ckv_fuzz.gather_on()
    with ckv_fuzz.quiet():
        ckv_fuzz.run_case(ckv_fuzz.Case.parse(path.read_text()))
