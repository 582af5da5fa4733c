# SPDX-License-Identifier: Apache-2.0
"""The real engine on the b12x provider under TP2, DCP2: what it launches, on which plan, where.

No GPU that b12x runs on is needed: launches are written down by ``b12x_recorder.py`` in the workers
and computed by torch. Backend, builder, indexer, provider, the package's plans, scratch layouts and
checks are the real ones. A rank has the shapes that it has of GLM-5.3-Flash at TP4, DCP4: 16 heads
of its own, 512 pools, pages of 2,304 tokens. Every result is compared with the torch reference's
where it is made.

Two ranks, because each costs the CPU time of an engine. So two things of TP4, DCP4 are not shown
here: ordinary batches have the heads of two ranks, 32, and records come from two. The plans for 64
heads are made, prepared and looked up, and one of each kind is run at the end of the start;
``test_b12x.py`` runs them at more shapes, and ``ckv_ranks.py`` plays four ranks without an engine.
Nothing here says how the package's kernels behave: none is executed.
"""

import json
import os
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("b12x")
pytest.importorskip("cutlass")

from vllm.entrypoints.ckv import verify
from vllm.entrypoints.ckv.engine import EngineJob, backend_arguments, collect, run_engine
from vllm.entrypoints.ckv.model import Sizes, tokenise, write_model

HERE = Path(__file__).parent
KERNELS = HERE.parent / "attention" / "backends" / "mla" / "sparse_mla_kernels"
TP4_HEADS = 64
"""All heads of four ranks: plans for them are made beside those that two ranks need."""
RANKS, BUDGET, MAX_TOKENS = 2, 257, 2
TEXT = b"Sphinx of black quartz, judge my vow; how quickly daft jumping zebras vex! " * 40


def cut(start: int, length: int) -> list[int]:
    return tokenise(TEXT[start : start + length])


GROUPS = {
    # At most MIN_TOKENS: ordinary.
    "short": [cut(0, 10)],
    "pair": [cut(1, 20), cut(2, 14)],
    # 20 and 237 of the other; then one decode beside 256 more: ordinary. Both have one row more
    # than the plans that split columns take.
    "decode beside a chunk": [cut(3, 20), cut(4, 493)],
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The engine's result and log, and what each rank wrote down."""
    folder = tmp_path_factory.mktemp("recorded")
    write_model(folder / "model", sizes=Sizes(heads=32, index_topk=2048, linear_heads=32))
    path = [str(HERE), str(KERNELS), os.environ.get("PYTHONPATH", "")]
    job = EngineJob(
        "recorded",
        backend_arguments(folder / "model", tp=RANKS, dcp=RANKS)
        | {
            "max_model_len": 1024,
            "max_num_seqs": 4,
            "max_num_batched_tokens": BUDGET,
            "kv_cache_memory_bytes": 1 << 28,
            "enable_prefix_caching": False,
            "worker_extension_cls": "b12x_recorder.Extension",
        },
        {
            "VLLM_B12X_MLA_CKV_GATHER": "1",
            "CKV_TEST_RECORD": str(folder),
            "CKV_TEST_MORE_HEADS": str(TP4_HEADS),
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        },
        list(GROUPS.values()),
        MAX_TOKENS,
    )
    log = folder / "engine.log"
    result = collect(run_engine(job, log, use_gpu=False))
    ranks = [
        [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
        for rank in range(RANKS)
    ]
    return result, log.read_text(errors="replace"), ranks


HEADS, ALL_HEADS, INDEX_HEADS = 16, 32, 32
EXTEND_ROWS = {HEADS: 3840, ALL_HEADS: 1792, TP4_HEADS: 768}
DSA_LAYERS = 2

STEPS = {
    "short": [(10, False), (1, False)],
    "pair": [(34, True), (2, False)],
    "decode beside a chunk": [(257, True), (257, False), (1, False)],
}
"""Of each group: (query rows, whether they gather) of the batches that vLLM makes of it."""


def plan_of(rows: int, heads: int) -> tuple[str, int]:
    """The attention plan that ``rows`` should run on: its kind, and its row limit."""
    if rows > 256:
        return "extend", EXTEND_ROWS[heads]
    return "decode", 1 << (rows - 1).bit_length()


def launches_of(rows: int, gathered: bool) -> list[tuple[str, int, int, int]]:
    """(kind, rows, heads, row limit of the plan) of what one batch launches."""
    heads = HEADS if gathered else ALL_HEADS
    kind, limit = plan_of(rows, heads)
    select = next(limit for limit in (8, 64, 512) if rows <= limit)
    layer = [("select", rows, INDEX_HEADS, select), ("write", rows, 0, 0)]
    return [*layer, (kind, rows, heads, limit)] * DSA_LAYERS


def events(rank: list[dict], kind: str, phase: str | None = None) -> list[dict]:
    return [e for e in rank if e["event"] == kind and phase in (None, e["phase"])]


def region(place: list[int], held: dict[str, list[int]]) -> str:
    """Where ``place`` lies: the name of what is held, or "own" for a tensor of the call."""
    start, size = place
    for name, (first, length) in held.items():
        if first <= start and start + size <= first + length:
            return "cache" if name.startswith("cache of") else name
    return "own"


def overlap(a: list[int], b: list[int]) -> bool:
    return bool(a[1] and b[1]) and a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


def test_the_engine_runs_on_b12x_and_gathers_what_it_should(recorded):
    result, log, _ = recorded
    assert verify.kernels_of(log) == "B12xKernels"
    assert "full-CKV gather: on, page 2304 tokens" in log
    gathered = [group.counters["gathered_batches"] for group in result.groups]
    assert gathered == [sum(gathers for _, gathers in steps) for steps in STEPS.values()]


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_batch_launches_its_plans_and_nothing_else(recorded, rank):
    launched = [
        (e["kind"], e["rows"], e["heads"], e["limit"])
        for e in events(recorded[2][rank], "launch", "serve")
    ]
    steps = [step for group in STEPS.values() for step in group]
    assert launched == [launch for step in steps for launch in launches_of(*step)]
    widths = {e["width"] for e in events(recorded[2][rank], "launch") if e["width"]}
    assert widths == {2051}


@pytest.mark.parametrize("rank", range(RANKS))
def test_every_plan_is_made_and_prepared_once_before_the_first_batch(recorded, rank):
    record = recorded[2][rank]
    names = [e["name"] for e in events(record, "prepare")]
    attention = {
        f"attention/{heads}/{rows}/{mode}"
        for heads in EXTEND_ROWS
        for mode, limits in (
            ("decode", [1, 2, 4, 8, 16, 32, 64, 128, 256]),
            ("extend", [EXTEND_ROWS[heads]]),
        )
        for rows in limits
    }
    others = {"selection/8", "selection/64", "selection/512"}
    others |= {"writer/torch.int32", "writer/torch.int64"}
    assert len(names) == len(set(names)) and set(names) == attention | others
    # One declaration for each, though the package would make another one when asked.
    made = [e["what"] for e in events(record, "plan", "start")]
    assert len(made) == len(set(made)) == len(names)
    assert not events(record, "plan", "serve")
    kinds = [e["event"] for e in record]
    first = next(i for i, e in enumerate(record) if e["event"] == "launch")
    assert "prepare" in kinds[:first] and "prepare" not in kinds[first:]
    # Nothing later than the profiling run, which on a GPU a trial capture follows, then the caches.
    assert "prepare" not in kinds[kinds.index("caches") :]


@pytest.mark.parametrize("rank", range(RANKS))
def test_the_packages_session_is_left_open(recorded, rank):
    """Frozen, it would stop what stock vLLM compiles on first use."""
    (event,) = events(recorded[2][rank], "session")
    assert set(event["calls"]) == {"prepare"} and not event["frozen"]


@pytest.mark.parametrize("rank", range(RANKS))
def test_no_plan_is_missing_up_to_the_token_budget(recorded, rank):
    found = {e["heads"]: e for e in events(recorded[2][rank], "plans")}
    assert set(found) == set(EXTEND_ROWS)
    for heads, event in found.items():
        assert event["unprepared"] == 0
        assert sum(count for *_, count in event["runs"]) == BUDGET
        row = 0
        for kind, limit, count in event["runs"]:
            assert all(plan_of(row + i + 1, heads) == (kind, limit) for i in range(count))
            row += count


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_would_compile_raises_instead(recorded, rank):
    refused = {e["what"]: e["words"] for e in events(recorded[2][rank], "refused")}
    assert (
        "24 heads is not prepared, only of [16, 32, 64]" in refused["heads that were not declared"]
    )
    for what, words in (
        ("an attention plan", "attention of 3 rows and 16 heads"),
        ("a selection plan", "a selection for 1 rows"),
        ("a writer", "the record writer"),
    ):
        assert f"{words} is not prepared, and b12x would compile it now" in refused[what]


@pytest.mark.parametrize("rank", range(RANKS))
def test_tensors_of_a_launch_lie_apart_and_where_they_should(recorded, rank):
    record = recorded[2][rank]
    (event,) = events(record, "held")
    held = event["places"]
    assert {name for name in held if not name.startswith("cache of")} == {"capacity", "workspace"}
    # All caches are views of one allocation, pages interleaved.
    unique = {tuple(place) for place in held.values()}
    assert len(unique) == 3
    assert not any(overlap(a, b) for a, b in combinations(unique, 2))
    gathers = [gathers for group in STEPS.values() for _, gathers in group]
    of_batch = [gathered for gathered in gathers for _ in range(3 * DSA_LAYERS)]
    launches = events(record, "launch", "serve")
    for launch, gathered in zip(launches, of_batch, strict=True):
        places = launch["places"]
        for (name, a), (other, b) in combinations(places.items(), 2):
            assert not overlap(a, b), (launch["kind"], name, other)
        lies = {name: region(place, held) for name, place in places.items()}
        source = "workspace" if gathered else "cache"
        wanted = {
            "write": {"latents": "own", "cache": "cache", "slots": "own"},
            "select": {
                "q": "own", "cache": source, "table": "workspace", "lengths": "workspace",
                "capacity": "capacity", "ids": "own", "scores": "own", "scratch": "workspace",
            },
        }.get(
            launch["kind"],
            {
                "q": "own", "kv_cache": source, "ids": "workspace", "lengths": "own",
                "scratch": "workspace",
            },
        )  # fmt: skip
        assert lies == wanted


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_is_held_outlives_the_last_launch(recorded, rank):
    """What is freed earlier would leave a captured graph with an address of something else."""
    kinds = [e["event"] for e in recorded[2][rank]]
    last = len(kinds) - kinds[::-1].index("launch")
    assert "freed" not in kinds[:last]


@pytest.mark.parametrize("rank", range(RANKS))
def test_scratch_is_at_one_place_for_each_kind_of_batch(recorded, rank):
    """So a graph finds its own again: at the beginning, or behind what was gathered."""
    (event,) = events(recorded[2][rank], "held")
    begin, size = event["places"]["workspace"]
    gathers = [gathers for group in STEPS.values() for _, gathers in group]
    of_batch = [gathered for gathered in gathers for _ in range(3 * DSA_LAYERS)]
    launches = events(recorded[2][rank], "launch", "serve")
    places: dict[tuple[str, bool], set[int]] = {}
    ends = []
    for launch, gathered in zip(launches, of_batch, strict=True):
        if "scratch" in launch["places"]:
            kind = "select" if launch["kind"] == "select" else "attend"
            first, length = launch["places"]["scratch"]
            places.setdefault((kind, gathered), set()).add(first - begin)
            ends.append(first - begin + length)
    assert places["select", False] == places["attend", False] == {0}
    for kind in ("select", "attend"):
        (offset,) = places[kind, True]
        assert offset > 0
    assert max(ends) <= size


@pytest.mark.parametrize("rank", range(RANKS))
def test_the_heads_of_four_ranks_run_on_plans_of_both_kinds(recorded, rank):
    launched = [
        (e["kind"], e["rows"], e["limit"])
        for e in events(recorded[2][rank], "launch", "probe")
        if e["heads"] == TP4_HEADS
    ]
    assert launched == [("decode", 3, 4), ("extend", 257, 768)]


@pytest.mark.parametrize("rank", range(RANKS))
def test_results_are_the_references(recorded, rank):
    """The same bits: torch computes both, but only one knows plans, pieces and scratch."""
    compared = events(recorded[2][rank], "compared")
    batches = sum(map(len, STEPS.values()))
    whats = [e["what"] for e in compared]
    for what in ("attend 0", "attend 1", "select_pools 0", "select_pools 1"):
        assert whats.count(what) == batches * DSA_LAYERS
    for event in compared:
        # A log-sum-exp of base 2 is converted.
        assert event["apart"] <= (1e-5 if event["what"] == "attend 1" else 0.0), event
