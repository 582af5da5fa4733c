# SPDX-License-Identifier: Apache-2.0
"""``vllm-ckv bench``: samples of servers and engines, tables, files, and what misuse is told."""

import json
import random
import statistics
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vllm.entrypoints.ckv import bench as b
from vllm.entrypoints.ckv import cli
from vllm.entrypoints.ckv.output import UsageError


class FakeVllm(ThreadingHTTPServer):
    """Answers like ``vllm serve``; its first token takes ``delay`` seconds."""

    def __init__(self, delay=0.0, answer="token", limit=4096):
        super().__init__(("127.0.0.1", 0), Handler)
        self.delay, self.answer, self.limit = delay, answer, limit
        self.prompts = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, body, status=200, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        served = [{"id": "flash", "max_model_len": self.server.limit}]
        self.reply(json.dumps({"object": "list", "data": served}).encode())

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["stream"] and request["max_tokens"] == 1
        self.server.prompts.append(request["prompt"])
        time.sleep(self.server.delay)
        if self.server.answer == "refusal":
            return self.reply(b'{"error": {"message": "too long"}}', status=400)
        lines = {
            "token": [b'data: {"choices": [{"text": "a"}]}', b"data: [DONE]"],
            "error": [b'data: {"error": {"message": "engine died"}}'],
            "nothing": [b": ping", b"data: [DONE]"],
        }
        return self.reply(b"\n\n".join(lines[self.server.answer]), kind="text/event-stream")


@pytest.fixture
def fake():
    servers = []

    def start(**arguments):
        servers.append(FakeVllm(**arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_two_servers_in_turn_with_prompts_no_cache_has_seen(fake, tmp_path, capsys):
    on, off = fake(delay=0.0), fake(delay=0.4)
    document, picture = tmp_path / "result.json", tmp_path / "result.png"
    command = ["bench", "--on", on.url, "--off", f"{off.url}/v1", "--lengths", "64", "128", "9999"]
    command += ["--samples", "3", "--json", str(document), "--plot", str(picture)]
    pytest.importorskip("matplotlib")
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert "on tok/s" in text and "ratio" in text
    # 9,999 tokens do not fit the server; one warm-up and three samples of the others.
    assert [len(prompt) for prompt in on.prompts] == [64] * 4 + [128] * 4
    blocks = [tuple(prompt[:16]) for prompt in on.prompts + off.prompts]
    assert len(set(blocks)) == len(blocks)
    result = json.loads(document.read_text())
    by_label = {one["label"]: one for one in result["series"]}
    assert set(by_label) == {"on", "off"}
    speed = by_label["on"]["tokens_per_second"]["128"]
    assert speed == pytest.approx(128 / statistics.median(by_label["on"]["seconds"]["128"]), 1e-3)
    assert speed > by_label["off"]["tokens_per_second"]["128"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_one_server_after_the_other_then_compared(fake, tmp_path, capsys):
    for label, delay in (("on", 0.0), ("off", 0.4)):
        command = ["bench", "--url", fake(delay=delay).url, "--label", label, "--lengths", "32"]
        assert (
            cli.main([*command, "--samples", "2", "--json", str(tmp_path / f"{label}.json")]) == 0
        )
    assert "ratio" not in capsys.readouterr().out
    files = [str(tmp_path / "off.json"), str(tmp_path / "on.json")]
    assert cli.main(["bench", "--compare", *files]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.split()[1:3] == ["on", "tok/s"] and head.split()[-1] == "ratio"
    assert float(row.split()[-1].rstrip("x")) > 1


def test_equal_labels_are_told_apart_by_file(fake, tmp_path, capsys):
    for name in ("monday", "tuesday"):
        command = ["bench", "--url", fake().url, "--lengths", "32", "--samples", "1"]
        assert cli.main([*command, "--json", str(tmp_path / f"{name}.json")]) == 0
    capsys.readouterr()
    files = [str(tmp_path / f"{name}.json") for name in ("monday", "tuesday")]
    assert cli.main(["bench", "--compare", *files]) == 0
    assert "monday on tok/s" in capsys.readouterr().out


def test_a_table_with_gaps():
    text = b.describe(
        [
            b.Series("off", "x", {10: [1.0, 2.0, 3.0]}),
            b.Series("on", "y", {10: [1.0], 20: [1.0]}),
        ]
    )
    head, _, first, second = (line.split() for line in text.splitlines())
    assert head == ["prompt", "on", "tok/s", "spread", "off", "tok/s", "spread", "ratio"]
    assert first == ["10", "10", "0.0%", "5", "100.0%", "2.00x"]
    assert second == ["20", "20", "0.0%", "-", "-", "-"]


def test_a_gather_that_never_happened_is_said():
    series = [b.Series("on", "", {10: [1.0]}, {10: 0}), b.Series("off", "", {10: [1.0]}, {10: 0})]
    assert list(b._not_gathered(series)) == ["10 tokens: no batch gathered; the log has the reason"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "say what to measure, one way"),
        (["--url", "http://a", "--model", "small"], "say what to measure, one way"),
        (["--on", "http://127.0.0.1:9"], "--on and --off belong together"),
        (["--url", "127.0.0.1:9"], "give http://HOST:PORT"),
        (["--url", "http://127.0.0.1:9"], "no vLLM server answers at http://127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9", "--samples", "0"], "--samples 0 measures nothing"),
        (["--url", "http://127.0.0.1:9", "--vocabulary", "3"], "--vocabulary 3 is too small"),
        (["--url", "http://127.0.0.1:9", "--lengths", "0"], "--lengths 0 is no prompt"),
        (["--model", "small", "--tp", "4", "--dcp", "3"], "that divides --tp"),
        (["--model", "small", "--tp", "1"], "give a --dcp of 2 or more"),
        (["--model", "some/folder", "--device", "cpu"], "on the reference platform"),
        (["--model", "small", "--tp", "512", "--device", "gpu"], "pass --device cpu"),
        (["--compare", "no.json", "no.json"], "write one with --json"),
    ],
)
def test_misuse_gets_a_sentence(arguments, words, capsys):
    assert cli.main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("refusal", "refuses a prompt of 32 tokens (400)"),
        ("error", "engine died"),
        ("nothing", "ended a stream without a token"),
    ],
)
def test_a_server_that_does_not_answer_rightly_gets_a_sentence(fake, capsys, answer, words):
    command = ["bench", "--url", fake(answer=answer).url, "--lengths", "32"]
    assert cli.main(command) == 2
    assert words in capsys.readouterr().out


def test_wrong_names_and_lengths_name_the_right_ones(fake):
    with pytest.raises(UsageError, match="serves flash, not other"):
        b.Server(fake().url, "other")
    with pytest.raises(UsageError, match="max_model_len 4,096"):
        b._usable([4096], 4096)


@pytest.mark.parametrize("content", ["{", "[]", '{"kind": "x"}', '{"kind": "vllm-ckv bench"}'])
def test_a_file_of_another_kind_gets_a_sentence(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UsageError, match="is not a result of vllm-ckv bench"):
        b.read_document(tmp_path / "a.json")


def test_prompts_stay_inside_the_vocabulary():
    prompt = b.make_prompt(1000, 8, random.Random(1))
    assert len(prompt) == 1000 and set(prompt) == set(range(3, 8))


def test_offline_runs_both_engines_on_the_same_prompts(monkeypatch, capsys, tmp_path):
    seen = []

    def fake_engine(job, log, *, use_gpu):
        seen.append(job)
        assert not use_gpu
        yield {"event": "start", "seconds": 1.0, "cache_blocks": 9, "block_size": 256}
        on = job.environment["VLLM_B12X_MLA_CKV_GATHER"] == "1"
        for group in job.groups:
            yield {
                "event": "group",
                "tokens": [[5]],
                "logprobs": [[0.0]],
                "cached_tokens": [0],
                "counters": {"gathered_batches": int(on)},
                "seconds": len(group[0]) / (2000 if on else 1000),
            }

    monkeypatch.setattr(b, "run_engine", fake_engine)
    document = tmp_path / "offline.json"
    command = ["bench", "--model", "small", "--device", "cpu", "--lengths", "100", "200"]
    assert cli.main([*command, "--samples", "2", "--json", str(document)]) == 0
    off, on = seen
    assert (
        off.groups == on.groups and [len(group[0]) for group in on.groups] == [100] * 3 + [200] * 3
    )
    assert len({tuple(group[0]) for group in on.groups}) == 6
    assert off.arguments == on.arguments
    assert on.arguments["decode_context_parallel_size"] == 2
    assert "2.00x" in capsys.readouterr().out
    result = {one["label"]: one for one in json.loads(document.read_text())["series"]}
    assert result["on"]["gathered"] == {"100": 2, "200": 2}


def test_an_engine_that_fails_is_status_1(monkeypatch, capsys):
    def fail(job, log, *, use_gpu):
        raise RuntimeError("the engine 'off' ended with status 1")
        yield

    monkeypatch.setattr(b, "run_engine", fail)
    assert cli.main(["bench", "--model", "small", "--device", "cpu"]) == 1
    assert "logs are kept in" in capsys.readouterr().out
