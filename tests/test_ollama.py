"""Ollama's endpoints, as its Python client and front ends meet them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import ollama
import openai
import pytest

from serving import KEY, Scripted, running
from tiermoe.serve.answers import LineStream
from tiermoe.serve.app import create_app
from tiermoe.serve.dialects import StreamKind
from tiermoe.serve.page import StartupApp
from tiermoe.serve.served import Served
from tiermoe.serve.worker import Answers

PROMPT = "once upon a time"
SAID: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]
OPTIONS: Any = {"temperature": 0, "num_predict": 6}


@pytest.fixture(scope="module")
def llama(address: str) -> Iterator[ollama.Client]:
    with ollama.Client(address, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


def test_a_chat_answers_as_openai_s_does(llama: ollama.Client, client: openai.OpenAI) -> None:
    answer = llama.chat("tiny", SAID, options=OPTIONS)
    same = client.chat.completions.create(model="tiny", messages=SAID, temperature=0, max_tokens=6)
    assert answer.message.content == same.choices[0].message.content
    assert (answer.message.role, answer.done, answer.done_reason) == ("assistant", True, "length")
    assert (answer.prompt_eval_count, answer.eval_count) == (same.usage.prompt_tokens, 6)  # type: ignore[union-attr]
    assert answer.load_duration == 0
    spent = [answer.prompt_eval_duration, answer.eval_duration]
    assert all(isinstance(each, int) and each > 0 for each in spent)
    assert sum(map(int, filter(None, spent))) <= (answer.total_duration or 0)


def test_a_stream_is_lines_and_the_default(llama: ollama.Client, http: httpx.Client) -> None:
    whole = llama.chat("tiny", SAID, options=OPTIONS)
    asked = {"model": "tiny", "messages": SAID, "options": OPTIONS}
    answer = http.post("/api/chat", json=asked)
    assert answer.headers["content-type"] == "application/x-ndjson"
    *texts, end = map(json.loads, answer.text.splitlines())
    assert "".join(each["message"]["content"] for each in texts) == whole.message.content
    assert [each["done"] for each in texts] == [False] * len(texts)
    assert (end["message"]["content"], end["done"], end["done_reason"], end["eval_count"]) == ("", True, "length", 6)
    streamed = list(llama.chat("tiny", SAID, options=OPTIONS, stream=True))
    assert [each.message.content for each in streamed] == [each["message"]["content"] for each in [*texts, end]]


def test_a_prompt_is_a_turn_or_raw(llama: ollama.Client, client: openai.OpenAI) -> None:
    turn = llama.generate("tiny", PROMPT, system="be brief", options=OPTIONS)
    assert turn.response == llama.chat("tiny", SAID, options=OPTIONS).message.content
    raw = llama.generate("tiny:latest", PROMPT, raw=True, options=OPTIONS)
    plain = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=6)
    assert raw.response == plain.choices[0].text
    streamed = list(llama.generate("tiny", PROMPT, raw=True, options=OPTIONS, stream=True))
    assert "".join(each.response or "" for each in streamed) == raw.response
    assert raw.context is None


def test_options_are_those_of_the_sampling(llama: ollama.Client, client: openai.OpenAI) -> None:
    def answer(**options: Any) -> str:
        return llama.generate("tiny", PROMPT, raw=True, options={"num_predict": 12, **options}).response or ""

    def same(**more: Any) -> str:
        return client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, **more).choices[0].text

    greedy = answer(temperature=0)
    assert answer(temperature=1.5, seed=3, top_k=20, top_p=0.9, min_p=0.01) == same(
        temperature=1.5, seed=3, top_p=0.9, extra_body={"top_k": 20, "min_p": 0.01}
    )
    assert answer(temperature=1, top_k=1) == greedy
    assert answer(temperature=1.5, top_k=-1, seed=3) == same(temperature=1.5, seed=3)
    assert len({answer(temperature=9, seed=-1) for _ in range(3)}) > 1  # no seed
    assert answer(temperature=0, repeat_penalty=100, repeat_last_n=-1) == same(
        temperature=0, extra_body={"repetition_penalty": 100}
    )
    for window in ({}, {"repeat_last_n": 2}):
        asked = {"repeat_penalty": 100, **window}
        assert answer(temperature=0, **asked) == same(temperature=0, extra_body=asked)
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    assert answer(temperature=0, **penalties) == same(temperature=0, **penalties)
    stop = greedy[3:5]
    for stops in (stop, [stop, "never"]):
        assert answer(temperature=0, stop=stops) == greedy[: greedy.index(stop)]
    passed: Any = {"num_ctx": 32, "num_batch": 512, "num_gpu": 0, "mirostat": 0, "typical_p": 1.0, "num_keep": 4}
    assert answer(temperature=0, repeat_penalty=1.0, repeat_last_n=64, **passed) == greedy


def test_an_answer_without_a_length_fills_the_context(llama: ollama.Client) -> None:
    answers = [llama.chat("tiny", SAID, options={"num_predict": length}) for length in (-1, -2, 0)]
    assert {(each.prompt_eval_count or 0) + (each.eval_count or 0) for each in answers} == {64}


def test_formats(llama: ollama.Client) -> None:
    schema = {"enum": ["cat", "dog"]}
    assert json.loads(llama.chat("tiny", SAID, format=schema).message.content or "") in schema["enum"]
    assert json.loads(llama.generate("tiny", PROMPT, format=schema, raw=True).response or "") in schema["enum"]
    begun = llama.chat("tiny", SAID, format="json", options={"num_predict": 8}).message.content or ""
    assert begun.lstrip().startswith("{")


def test_log_probabilities(llama: ollama.Client, client: openai.OpenAI) -> None:
    found = llama.chat("tiny", SAID, options=OPTIONS, logprobs=True, top_logprobs=2).logprobs or []
    same = client.chat.completions.create(
        model="tiny", messages=SAID, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    theirs = same.choices[0].logprobs.content  # type: ignore[union-attr]
    assert [(each.token, each.logprob) for each in found] == [(each.token, each.logprob) for each in theirs or ()]
    assert [len(each.top_logprobs or ()) for each in found] == [2] * 6
    streamed = llama.chat("tiny", SAID, options=OPTIONS, logprobs=True, stream=True)
    assert [each.token for chunk in streamed for each in chunk.logprobs or ()] == [each.token for each in found]


TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}{% for m in messages %}{{ m.role }}"
    "{{ m.name or '' }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.arguments.city }}){% endfor %};{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
)
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'


def test_thoughts_and_calls(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", TEMPLATE)
    scripted: Any = Scripted(served, f"<think>Bonn, then.</think>Let me look.{CALL}{CALL}")
    first: Any = {"role": "user", "content": "how is it in Bonn"}
    with (
        running(create_app(replace(served, worker=scripted))) as address,
        ollama.Client(address) as llama,
    ):
        whole = llama.chat("tiny", [first], tools=[TOOL], think=True)
        chunks = list(llama.chat("tiny", [first], tools=[TOOL], stream=True))
        result = {"role": "tool", "content": "sun", "tool_name": "weather"}
        llama.chat("tiny", [first, whole.message, result], tools=[TOOL], think=False)
        thought = llama.generate("tiny", "how is it in Bonn")
        capabilities = llama.show("tiny").capabilities
    assert (whole.message.thinking, whole.message.content) == ("Bonn, then.", "Let me look.")
    calls = whole.message.tool_calls or ()
    assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", {"city": "Bonn"})] * 2
    assert whole.done_reason == "stop"
    assert "".join(chunk.message.thinking or "" for chunk in chunks) == "Bonn, then."
    assert "".join(chunk.message.content or "" for chunk in chunks) == "Let me look."
    assert [call for chunk in chunks for call in chunk.message.tool_calls or ()] == list(calls)
    assert thought.thinking == "Bonn, then."
    assert served.tokenizer.decode(scripted.asked[2].ids) == (
        "<tool_call>weatheruser:how is it in Bonn;assistant:<think>Bonn, then.</think>Let me look.(Bonn)(Bonn);"
        "toolweather:sun;quick"
    )
    assert capabilities == ["completion", "tools", "thinking"]


@pytest.mark.parametrize(
    ("path", "change", "status", "why"),
    [
        ("chat", {"model": "other"}, 404, "this server has 'tiny'"),
        ("chat", {"mcp": True}, 400, "mcp is not supported"),
        ("chat", {"options": {"mirostat": 2}}, 400, "mirostat is not supported"),
        ("chat", {"options": {"temperature": -1}}, 400, "options.temperature"),
        ("chat", {"options": {"num_ctx": 65}}, 400, "num_ctx is 65, and this server's context has 64 tokens"),
        ("chat", {"options": {"repeat_last_n": -2}}, 400, "options.repeat_last_n"),
        ("chat", {"think": True}, 400, "'tiny' does not support thinking"),
        ("chat", {"top_logprobs": 2}, 400, "needs logprobs"),
        ("chat", {"tools": [TOOL]}, 400, "no chat template with tools"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, 400, "text alone, no images"),
        ("chat", {"messages": [{"role": "user", "content": "a " * 99}]}, 400, "the prompt is too long"),
        ("chat", {"format": {"type": "nonsense"}}, 400, "nonsense"),
        ("generate", {"prompt": "a", "context": [1, 2]}, 400, "context is not supported"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
        ("generate", {"prompt": "a", "template": "b"}, 400, "template is not supported"),
        ("generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "no system message"),
        ("show", {"model": "other"}, 404, "this server has 'tiny'"),
        ("pull", {}, 404, "Not Found"),
        ("embed", {"input": "a"}, 400, "has no embeddings"),
        ("embeddings", {"prompt": "a"}, 400, "has no embeddings"),
    ],
)
def test_refusals(http: httpx.Client, path: str, change: dict[str, Any], status: int, why: str) -> None:
    asked = {"model": "tiny", "stream": False, **({"messages": SAID} if path == "chat" else {}), **change}
    answer = http.post(f"/api/{path}", json=asked)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert why in answer.json()["error"]


def test_the_guard_and_the_startup_speak_the_dialect(address: str) -> None:
    with ollama.Client(address) as stranger, pytest.raises(ollama.ResponseError) as refused:
        stranger.list()
    assert (refused.value.status_code, refused.value.error) == (401, "the API key is missing or wrong")
    with running(StartupApp()) as early, ollama.Client(early) as llama, pytest.raises(ollama.ResponseError) as loading:
        llama.list()
    assert loading.value.status_code == 503
    assert "being loaded" in loading.value.error


def test_an_error_amid_a_stream_is_a_line(served: Served) -> None:
    scripted: Any = Scripted(served, "ab")
    scripted.pieces[1:] = [replace(scripted.pieces[1], text="", finish="error", error=OSError("the drive has gone"))]
    with running(create_app(replace(served, worker=scripted))) as address, ollama.Client(address) as llama:
        chunks = llama.chat("tiny", SAID, stream=True)
        assert next(chunks).message.content == "a"
        with pytest.raises(ollama.ResponseError, match="the drive has gone"):
            next(chunks)


def test_what_front_ends_ask_about_the_model(llama: ollama.Client, http: httpx.Client, served: Served) -> None:
    (listed,) = llama.list().models
    assert (listed.model, len(listed.digest or "")) == ("tiny", 64)
    (loaded,) = llama.ps().models
    assert (loaded.model, loaded.digest, loaded.context_length) == ("tiny", listed.digest, 64)
    shown = llama.show("tiny:latest")
    info = shown.modelinfo or {}
    assert info[f"{info['general.architecture']}.context_length"] == 64
    assert "num_ctx 64" in (shown.parameters or "")
    assert shown.capabilities == ["completion"]
    assert shown.details == listed.details
    assert http.post("/api/show", json={"name": "tiny"}).json()["model_info"] == info
    numbers = [int(part) for part in http.get("/api/version").json()["version"].split(".")]
    assert numbers >= [0, 6, 4]  # VS Code asks for it


def test_a_request_without_a_prompt_finds_the_model_loaded(llama: ollama.Client) -> None:
    assert (llama.generate("tiny").done_reason, llama.chat("tiny").done_reason) == ("load", "load")
    assert llama.generate("tiny", keep_alive=0).done


def test_a_stream_without_news_says_nothing_now_and_then() -> None:
    sent = list[bytes]()

    async def respond() -> None:
        answers = Answers(1, lambda: None)

        async def lines() -> Any:
            while b"silent\n" not in sent:
                await asyncio.sleep(0.001)
            yield b"last\n"

        stream = LineStream(answers, lines(), StreamKind("", lambda _: b"silent\n", bytes))
        stream.ping_interval = 0.001

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        await stream({"type": "http", "method": "POST"}, asyncio.Event().wait, send)  # type: ignore[arg-type]

    asyncio.run(respond())
    assert sent[1] == b"silent\n"
    assert sent[-2:] == [b"last\n", b""]
