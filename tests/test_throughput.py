"""`benchmarks.throughput` against a server that notes what it is asked: what it counts, in which order it runs. No time
is asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark_commands import benchmark_runner
from benchmarks import throughput
from benchmarks.throughput import LLAMA_SERVER, Contender, Measured, Requests, llama_server, measure, ours, turn
from patience import PATIENCE_S
from tiermoe.errors import PromptError
from tiermoe.lab.bench.child import CaseFailed
from tiermoe.platform.machine import processors

ASKED = Requests(prompt=3, tokens=5, answers=2, memory=None, timeout=PATIENCE_S)

FAKE = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Fake(BaseHTTPRequestHandler):
    def do_GET(self):
        self.told(200, dict())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open({notes!r}, "a") as file:
            file.write(json.dumps(dict(asked, argv=sys.argv[1:], path=self.path)) + "\\n")
        self.told({status}, dict(usage=dict(completion_tokens=min(asked["max_tokens"], {most}))))

    def told(self, status, body):
        body = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

if "--broken" in sys.argv:
    sys.exit("this model cannot be read")
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Fake).serve_forever()
"""


def fake(folder: Path, most: int = 64, status: int = 200) -> tuple[str, Path]:
    """A program that serves answers of `most` tokens at most, and the file of what it was asked."""
    program, notes = folder / "fake-server", folder / "notes"
    program.write_text(FAKE.format(python=sys.executable, notes=str(notes), most=most, status=status))
    program.chmod(0o755)
    return str(program), notes


def noted(notes: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in notes.read_text().splitlines()]


def contender(program: str, *options: str) -> Contender:
    return llama_server(program, Path("model.gguf"), 300, options)


def test_each_client_is_answered_once_before_the_clock_starts(tmp_path: Path) -> None:
    program, notes = fake(tmp_path)
    assert turn(contender(program, "--cache-ram", "0"), ASKED, range(100), 2, tmp_path / "log") > 0
    asked = noted(notes)
    prompts = [each["prompt"] for each in asked]
    assert sorted(prompts) == [[at, at + 1, at + 2] for at in range(0, 96, 16)]  # six stretches of the text
    assert sorted(prompts[:2]) == [[0, 1, 2], [16, 17, 18]]
    for client in (32, 48):  # one after the other
        assert prompts.index([client, client + 1, client + 2]) < prompts.index([client + 32, client + 33, client + 34])
    assert {(each["path"], each["max_tokens"], each["temperature"], each["ignore_eos"]) for each in asked} == {
        ("/v1/completions", 5, 0, True)
    }
    words = asked[0]["argv"]
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert int(options.pop("--port")) > 0
    assert options == {
        "-m": "model.gguf", "--host": "127.0.0.1", "-t": str(processors()), "--cache-ram": "0", "-np": "2",
        "-c": "1024",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("made", "options", "said"),
    [
        ({"most": 3}, [], "ended after 3 of 5 tokens"),
        ({"status": 503}, [], "status 503"),
        ({}, ["--broken"], "did not start: this model cannot be read"),
    ],
)
def test_answers_that_are_none_are_told_of(tmp_path: Path, made: dict[str, int], options: list[str], said: str) -> None:
    program, _ = fake(tmp_path, **made)
    with pytest.raises(CaseFailed, match=said):
        turn(contender(program, *options), ASKED, range(100), 1, tmp_path / "log")


def test_ours_has_no_options_but_the_memory_and_goes_on_where_a_text_ends() -> None:
    whole = ours(Path("MODEL"), None, [], {7, 2}, [])
    assert whole.words(8000, 16)[1:] == ["-m", "tiermoe", "serve", "MODEL", "--port", "8000"]
    assert whole.fields == {"logit_bias": {"2": -100, "7": -100}}
    bounded = ours(Path("MODEL"), 700 << 20, ["--max-batch", "32"], set(), [])
    assert bounded.words(1, 1)[5:-2] == ["--max-batch", "32", "--memory", str(700 << 20)]
    assert bounded.fields == {}
    assert "--no-repack" in llama_server("llama-server", Path("F.gguf"), 64, [], 700 << 20).words(1, 1)


def test_under_a_bound_one_token_is_enough_to_begin_with() -> None:
    assert (ASKED.warm_tokens, Requests(3, 5, 2, 1 << 30, 60).warm_tokens) == (5, 1)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(PromptError, match="takes 48 tokens of text"):
        ASKED.prompts(range(47), 2)


def test_servers_alternate_and_one_that_fails_does_not_stop_the_other() -> None:
    order: list[tuple[str, int]] = []

    def run(name: str, clients: int) -> float:
        order.append((name, clients))
        if (name, clients) == (LLAMA_SERVER, 4):
            raise CaseFailed("killed")
        return {"tiermoe": 2.0, LLAMA_SERVER: 6.0}[name] + len(order) // 3

    found = measure(["tiermoe", LLAMA_SERVER], 2, [1, 4], run, lambda _: None)
    mine, theirs = ("tiermoe", 1), (LLAMA_SERVER, 1)
    assert order == [mine, theirs, theirs, mine, ("tiermoe", 4), (LLAMA_SERVER, 4), ("tiermoe", 4)]
    assert found[1].seconds == {"tiermoe": [2.0, 3.0], LLAMA_SERVER: [6.0, 7.0]}
    said = found[1].summary(tokens=84)
    assert said["tok_s"]["tiermoe"] == {"median": 35.0, "low": 28.0, "high": 42.0}
    assert said["ratio"] == pytest.approx({"median": (3 + 7 / 3) / 2, "low": 7 / 3, "high": 3.0})
    assert found[4].summary(84)["errors"] == {LLAMA_SERVER: "killed"}
    assert found[4].summary(84)["ratio"] is None
    assert Measured({"tiermoe": [], LLAMA_SERVER: [1.0]}, {"tiermoe": "killed"}).summary(2)["ratio"] is None


def test_the_command_prints_what_it_found(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, notes = fake(tmp_path)
    (gguf := tmp_path / "F.gguf").touch()
    monkeypatch.setattr(throughput, "ours", lambda *_: contender(program))
    run = benchmark_runner(monkeypatch, capsys)
    words = [shipped, "--gguf", gguf, "--clients", "1,3", "--rounds", 1, "--answers", 1, "--prompt-tokens", 7]
    found, table = run("benchmarks.throughput", *words, "--llama-server", program, "--llama-options=-b 64")
    assert {len(each["prompt"]) for each in noted(notes)} == {7}
    assert " -b 64 --port 0 -np 1 -c 256" in found["servers"][LLAMA_SERVER]
    assert (found["prompt"], found["tokens"], found["clients"]["3"]["errors"]) == (7, 64, {})
    assert found["clients"]["1"]["ratio"]["median"] > 0
    assert found["command"].startswith("python ")
    assert "times as fast" in table
    for missing, words in (("no program", ["--llama-server", "nowhere"]), ("is not there", ["--gguf", "nowhere"])):
        with pytest.raises(SystemExit, match=missing):
            run("benchmarks.throughput", shipped, "--gguf", gguf, "--llama-server", program, *words)
