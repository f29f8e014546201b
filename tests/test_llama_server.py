"""What clients of llama.cpp's server read: properties, slots, and timings of answers."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from patience import PATIENCE_S
from serving import Letters, ids, running, use_template
from tiermoe.engine.request import Request
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.sampling import Sampling
from tiermoe.serve.app import create_app
from tiermoe.serve.served import Served

PROMPT = "the king had three sons"
CHAT: Any = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 6}
TEXT: Any = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6}


def test_properties(http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    use_template(monkeypatch, served, "{{ messages }}")
    props = http.get("/props").json()
    settings = props["default_generation_settings"]
    assert (props["total_slots"], settings["n_ctx"]) == (4, 64)
    assert settings["params"]["temperature"] == served.sampling.temperature
    assert (props["model_path"], props["chat_template"]) == ("tiny", "{{ messages }}")
    assert props["modalities"] == {"vision": False, "audio": False}
    assert props["build_info"].startswith("tiermoe-")


def test_slots_say_what_runs_and_no_text(served: Served) -> None:
    """One answer amid its tokens, one prompt amid its chunks' turns, two rows without work."""
    loop = RequestLoop(served.engine, Letters(), 4, set())
    first = loop.add(Request(ids(9), Sampling(max_tokens=20, temperature=0.5)))
    while len(loop.scheduler.at_work()) < 1 or not next(iter(loop.scheduler.at_work().values())).answer:
        loop.step()
    taken = 1 + sum(len(piece.tokens) for _ in range(2) for piece in loop.step())
    second = loop.add(Request(ids(30, 2), Sampling(max_tokens=4)))
    worker: Any = SimpleNamespace(loop=loop, most_waiting=1)
    with (
        running(create_app(replace(served, worker=worker))) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_S) as http,
    ):
        before = http.get("/slots").json()
        while loop.scheduler.running < 2:
            taken += sum(len(piece.tokens) for piece in loop.step() if piece.number == first)
        slots = {slot["id_task"]: slot for slot in http.get("/slots").json()}
        free = http.get("/slots", params={"fail_on_no_slot": 1})
        for number in (3, 4):
            loop.add(Request(ids(5, number), Sampling(max_tokens=9)))
        while loop.scheduler.running < 4:
            loop.step()
        full = http.get("/slots", params={"fail_on_no_slot": 1})
    assert [slot["is_processing"] for slot in before].count(True) == 1
    assert [slot["id"] for slot in before] == [0, 1, 2, 3]
    answering = slots[first]
    assert answering["next_token"] == [{"has_next_token": True, "n_remain": 20 - taken, "n_decoded": taken}]
    assert (answering["n_prompt_tokens"], answering["n_prompt_tokens_processed"]) == (9 + taken, 9)
    assert (answering["n_past"], answering["n_ctx"], answering["params"]["temperature"]) == (9 + taken - 1, 64, 0.5)
    assert slots[second]["n_prompt_tokens"] >= 30
    assert slots[second]["is_processing"]
    assert not [key for slot in slots.values() for key in slot if key in ("prompt", "generated")]
    assert free.status_code == 200
    assert full.status_code == 503


def chunks_of(http: httpx.Client, path: str, asked: Any) -> list[dict[str, Any]]:
    """Objects of a stream."""
    events = http.post(f"/v1/{path}", json={**asked, "stream": True}).text.split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]


@pytest.mark.parametrize(("path", "asked"), [("chat/completions", CHAT), ("completions", TEXT)])
def test_timings_are_in_answers(http: httpx.Client, path: str, asked: Any) -> None:
    whole = http.post(f"/v1/{path}", json=asked).json()
    usage, timings = whole["usage"], whole["timings"]
    assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"] == 6
    for name in ("prompt", "predicted"):
        count, spent = timings[f"{name}_n"], timings[f"{name}_ms"]
        assert spent > 0
        assert timings[f"{name}_per_second"] == pytest.approx(1000 * count / spent)
        assert timings[f"{name}_per_token_ms"] == pytest.approx(spent / count)
    again = http.post(f"/v1/{path}", json=asked).json()["timings"]
    assert again["cache_n"] > 0  # what the first one read
    for each in (False, True):
        more = {"timings_per_token": each, "stream_options": {"include_usage": True}}
        chunks = chunks_of(http, path, asked | more)
        timed = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
        assert timed[-2:] == [6, 6]  # the chunk with the reason, and that with the usage
        assert timed[:-2] == sorted(set(timed[:-2]))
        assert (len(timed) > 3) is each


def test_timings_of_several_answers_are_in_their_last_chunks(http: httpx.Client) -> None:
    assert "timings" not in http.post("/v1/completions", json={**TEXT, "n": 2}).json()
    timed = [chunk for chunk in chunks_of(http, "completions", {**TEXT, "n": 2}) if "timings" in chunk]
    found = {chunk["choices"][0]["index"]: chunk["timings"]["predicted_n"] for chunk in timed}
    assert found == {0: 6, 1: 6}
    echo = http.post("/v1/completions", json={**TEXT, "max_tokens": 0, "echo": True}).json()["timings"]
    assert (echo["predicted_n"], echo["predicted_ms"], echo["predicted_per_second"]) == (0, 0, 0)
