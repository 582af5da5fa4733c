# SPDX-License-Identifier: Apache-2.0
"""Random servers and schedules on simulated ranks against one rank without DCP in float64.

CKV_FUZZ_CASES sets how many (2,000), CKV_FUZZ_SEED repeats a run; the seed is printed. After a
failure, which is shrunk first, ``python tests/helpers/ckv_fuzz.py keep NAME`` makes a regression.
"""

import os
import random
from collections import Counter

import ckv_fuzz
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from vllm.plugins.b12x_mla_sparse import register

CASES = int(os.environ.get("CKV_FUZZ_CASES", "2000"))
SEED = int(os.environ.get("CKV_FUZZ_SEED") or random.SystemRandom().randrange(10**9))


@pytest.fixture(autouse=True, scope="module")
def gather_on():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_B12X_MLA_CKV_GATHER", "1")
        register()
        with ckv_fuzz.quiet():
            yield


def test_random_cases_equal_one_rank(capsys):
    seen: Counter[str] = Counter()

    @seed(SEED)
    @settings(
        max_examples=CASES,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(ckv_fuzz.cases())
    def play(case):
        seen.update(ckv_fuzz.run_case(case), cases=1)

    try:
        play()
    finally:
        with capsys.disabled():
            print(f"\nfuzz: CKV_FUZZ_SEED={SEED} CKV_FUZZ_CASES={CASES}: {dict(seen)}")
    # Both paths were tried: a test of one of them would say nothing about the other.
    if CASES >= 200:
        assert min(seen["gathered"], seen["ordinary"]) > CASES // 5


@pytest.mark.parametrize("path", sorted(ckv_fuzz.KEPT.glob("*.json")), ids=lambda p: p.stem)
def test_kept_case(path):
    ckv_fuzz.run_case(ckv_fuzz.Case.parse(path.read_text()))
