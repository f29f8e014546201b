"""Clients of a model that answers by itself: the words of models/chats-15m are wrong, and never break a client. Its
tokenizer has `<tool_call>` as a token that is not special, as Qwen3's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
import torch

import tiermoe
from benchmarks.load_dialects import (
    DIALECTS,
    Dialect,
    error_of,
    event_of,
    is_beginning,
    is_end,
    request_of,
    usage_of,
)
from patience import PATIENCE_S
from serving import running
from tiermoe.engine.sampling import Sampling
from tiermoe.serve.app import create_app
from tiermoe.serve.grammar import Grammars, json_rule
from tiermoe.serve.served import Served, served_of

CHATS = Path(__file__).parent.parent / "models" / "chats-15m"
ASKED = {"role": "user", "content": "How is the weather in Bonn?"}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather of a city", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": WEATHER}]


@pytest.fixture(scope="module")
def chats() -> Iterator[Served]:
    model, tokenizer = tiermoe.load(CHATS, device="cpu", memory="4GiB", batch=4, context=1024)
    served = served_of(model.tiermoe, tokenizer, "chats", Sampling(), 8)
    yield served
    served.worker.close(1)
    model.tiermoe.close()


@pytest.fixture(scope="module")
def where(chats: Served) -> Iterator[str]:
    with running(create_app(chats, [])) as address:
        yield address


@pytest.mark.parametrize(
    ("rules", "text", "tokens"),
    [
        ('start: "<tool_call>" /\\n?/ "a" "</tool_call>"', "<tool_call>\na</tool_call>", 4),
        ('start: thought "a"\nthought[suffix="</tool_call>"]: /(.|\\n)*/', "so</tool_call>a", 3),
        (f"start: {json_rule({'const': '<tool_call>'})}", '"<tool_call>"', 3),
        ("start: <|im_start|> /a/", "<|im_start|>a", 2),
    ],
)
def test_a_grammar_takes_added_tokens_for_their_text(chats: Served, rules: str, text: str, tokens: int) -> None:
    """All but special ones, whose text is no token."""
    grammars = Grammars(chats.tokenizer, 6144, {0, 2})
    ids, free = chats.text_ids(text, special=False), torch.zeros(6144)
    assert len(ids) == tokens
    (grammar,) = grammars.compile(rules)
    for token in ids:
        assert grammar.restrict(free)[token] == 0
        grammar.accept(token)
    assert grammar.ended
    (quoted,) = grammars.compile('start: "<|im_start|>"')
    allowed = (quoted.restrict(free) == 0).nonzero().flatten().tolist()
    assert allowed
    assert chats.tokenizer.convert_tokens_to_ids("<|im_start|>") not in allowed


def check(name: str, arguments: Any) -> None:
    """A call of the tool that follows its schema."""
    assert name == "weather"
    assert set(arguments) == {"city", "days"}
    assert len(arguments["city"]) <= 12
    assert arguments["days"] in range(1, 10)


def chat_completions(where: str, items: list[Any], turn: int, stream: bool) -> tuple[str, Any]:
    """The name and the arguments of the call that answers; `items` go on with it and with a result."""
    asked: Any = {
        "model": "", "messages": items, "seed": turn, "temperature": 1, "max_tokens": 400, "tools": TOOLS,
        "tool_choice": "required",
    }  # fmt: skip
    with openai.OpenAI(base_url=f"{where}/v1", api_key="any", max_retries=0) as client:
        if stream:
            with client.chat.completions.stream(**asked) as events:
                (choice,) = events.get_final_completion().choices
        else:
            (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    said = {"name": call.function.name, "arguments": call.function.arguments}
    items += [
        {"role": "assistant", "content": None, "tool_calls": [{"id": call.id, "type": "function", "function": said}]},
        {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"},
    ]
    return said["name"], json.loads(said["arguments"])


def messages(where: str, items: list[Any], turn: int, stream: bool) -> tuple[str, Any]:
    tool = {"name": "weather", "input_schema": SCHEMA}
    asked: Any = {
        "model": "chats", "messages": items, "max_tokens": 400, "tools": [tool], "tool_choice": {"type": "any"},
    }  # fmt: skip
    with anthropic.Anthropic(base_url=where, api_key="any", max_retries=0) as client:
        if stream:
            with client.messages.stream(**asked) as events:
                said = events.get_final_message()
        else:
            said = client.messages.create(**asked)
    assert said.stop_reason == "tool_use"
    (call,) = said.content
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    items += [{"role": "assistant", "content": [call.to_dict()]}, {"role": "user", "content": [result]}]
    return call.name, call.input


def responses(where: str, items: list[Any], turn: int, stream: bool) -> tuple[str, Any]:
    tool = {"type": "function", **WEATHER}
    asked: Any = {
        "model": "chats", "input": items, "temperature": 1, "max_output_tokens": 400, "tools": [tool],
        "tool_choice": "required",
    }  # fmt: skip
    with openai.OpenAI(base_url=f"{where}/v1", api_key="any", max_retries=0) as client:
        if stream:
            with client.responses.stream(**asked) as events:
                said: Any = events.get_final_response()
        else:
            said = client.responses.create(**asked)
    assert said.status == "completed"
    (call,) = said.output
    called = {"type": "function_call", "name": call.name, "arguments": call.arguments, "call_id": call.call_id}
    items += [called, {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}]
    return call.name, json.loads(call.arguments)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answered", [chat_completions, messages, responses])
def test_forced_calls_follow_their_schema_from_turn_to_turn(where: str, answered: Any, stream: bool) -> None:
    items: list[Any] = [ASKED]
    for turn in range(2):
        check(*answered(where, items, turn, stream))


def test_free_turns_of_ollamas_dialect(where: str) -> None:
    """Calls or texts, as the model likes: a stream has what the whole answer has."""
    client, messages = ollama.Client(where), list[Any]([ASKED])
    called = 0
    for turn in range(4):
        more: Any = {"tools": TOOLS, "options": {"num_predict": 100, "temperature": 1, "seed": turn}}
        whole = client.chat(model="chats", messages=messages, **more)
        parts = list(client.chat(model="chats", messages=messages, stream=True, **more))
        assert "".join(part.message.content or "" for part in parts) == whole.message.content
        calls = [call.function for part in parts for call in part.message.tool_calls or ()]
        assert calls == [call.function for call in whole.message.tool_calls or ()]
        assert parts[-1].eval_count == whole.eval_count
        said = whole.message.model_dump(exclude_none=True)
        results = [{"role": "tool", "tool_name": call.name, "content": "21 degrees"} for call in calls]
        messages += [said, *(results or [ASKED])]
        called += len(calls)
    assert called
    told = client.chat(model="chats", messages=[ASKED], format=SCHEMA, options={"num_predict": 400})
    check("weather", json.loads(told.message.content or ""))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_clients_under_load_understand_every_dialect(where: str, dialect: Dialect) -> None:
    """Streams and whole answers tell the tokens of the prompt, and no error; a stream its end. A refusal has one."""
    whole = httpx.post(
        where + dialect.path, json=request_of(dialect, "How is Bonn?", 20, stream=False), timeout=PATIENCE_S
    )
    prompt, answer = usage_of(whole.json()) or (0, 0)
    assert 0 < answer <= 20
    asked = request_of(dialect, "How is Bonn?", 20, stream=True)
    with httpx.stream("POST", where + dialect.path, json=asked, timeout=PATIENCE_S) as response:
        events = [event for line in response.iter_lines() if (event := event_of(line)) is not None]
    assert [is_end(event) for event in events] == [False] * (len(events) - 1) + [True]
    told = [usage for event in events if (usage := usage_of(event))]
    assert [usage[0] for usage in told] == [prompt]
    assert 0 < told[0][1] <= 20
    assert sum(is_beginning(event) for event in events) < len(events) - 1
    assert {error_of(event) for event in [whole.json(), *events]} == {None}
    assert error_of(httpx.post(where + dialect.path, json={"nothing": 1}, timeout=PATIENCE_S).json())
