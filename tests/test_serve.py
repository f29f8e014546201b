"""The server over HTTP, as clients meet it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from benchmarks.load import counters_broken, metrics, settled
from benchmarks.load_clients import Clients
from commands import Command
from patience import PATIENCE_S
from serving import KEY, Scripted, running
from tiermoe.batch import Batch
from tiermoe.batch import prompt as row
from tiermoe.engine.engine import Engine
from tiermoe.engine.request import Piece, TokenLogprob
from tiermoe.engine.sampling import Grammar
from tiermoe.model.tokenizer import load_tokenizer
from tiermoe.offload.scheduler import Scheduler
from tiermoe.serve.app import create_app
from tiermoe.serve.served import Served

PROMPT = "once upon a time"


def greedy(client: openai.OpenAI, **more: Any) -> Any:
    options = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    return client.completions.create(**{**options, **more})


def test_a_completion(client: openai.OpenAI, served: Served) -> None:
    answer = greedy(client)
    tokens = len(served.tokenizer(PROMPT).input_ids)
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == ("text_completion", "tiny", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (tokens, 8)
    assert greedy(client, prompt=served.tokenizer(PROMPT).input_ids).choices[0].text == answer.choices[0].text


def test_a_completion_without_a_length_is_short(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "temperature": 0}
    assert client.completions.create(prompt=PROMPT, **asked).usage.completion_tokens == 16  # type: ignore[union-attr]
    said = client.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], **asked)
    assert said.usage.total_tokens == 64  # the context


def test_a_stream_gives_what_the_whole_answer_is(client: openai.OpenAI) -> None:
    chunks = list(greedy(client, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    *texts, end, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == greedy(client).choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * len(texts)
    assert (end.choices[0].finish_reason, end.choices[0].text) == ("length", "")
    assert (usage.choices, usage.usage.completion_tokens) == ([], 8)


def test_a_chat_stream_begins_with_the_role(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_completion_tokens": 6,
    }
    whole = client.chat.completions.create(**asked)
    first, *texts, end = list(client.chat.completions.create(stream=True, **asked))
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content for chunk in texts) == whole.choices[0].message.content
    assert (end.choices[0].delta.content, end.choices[0].finish_reason) == (None, "length")


def test_the_events_end_with_done(http: httpx.Client) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 2, "stream": True}
    lines = [line for line in http.post("/v1/completions", json=asked).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-1])


def test_choices_and_prompts(client: openai.OpenAI) -> None:
    answer = greedy(client, prompt=[PROMPT, "the king"], n=2, seed=3, temperature=1.0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    again = greedy(client, prompt=[PROMPT, "the king"], n=2, seed=3, temperature=1.0)
    assert [choice.text for choice in answer.choices] == [choice.text for choice in again.choices]


def test_sampling_is_what_is_asked_for(client: openai.OpenAI, served: Served) -> None:
    text = greedy(client).choices[0].text
    token = served.tokenizer(text).input_ids[0]
    assert greedy(client, temperature=1.0, extra_body={"top_k": 1}).choices[0].text == text
    assert greedy(client, temperature=1.0, extra_body={"min_p": 1.0}).choices[0].text == text
    only = greedy(client, logit_bias={str(token): 100.0})
    assert len(set(served.tokenizer(only.choices[0].text).input_ids)) == 1
    varied = greedy(client, logit_bias={str(token): 100.0}, presence_penalty=2.0, frequency_penalty=2.0)
    assert varied.choices[0].text == only.choices[0].text  # 8 tokens cannot outweigh a hundred
    assert greedy(client, stop=[text[2:4]]).choices[0].text == text[: text.index(text[2:4])]


def test_fields_that_change_nothing_may_be_there(client: openai.OpenAI) -> None:
    """Those of clients and gateways, and samplers where they are switched off."""
    passed: dict[str, Any] = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "stream_options": None, "prompt_cache_key": "k",
        "cache_prompt": False, "repeat_penalty": 1.0, "repeat_last_n": 64, "typical_p": 1, "mirostat": 0,
        "mirostat_tau": 5.0, "dry_multiplier": 0, "dry_base": 1.75, "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0.0, "xtc_threshold": 0.1, "top_n_sigma": -1, "ignore_eos": False,
        "repetition_penalty": 1.0, "grammar": "", "json_schema": None,
    }  # fmt: skip
    assert greedy(client, extra_body=passed).choices[0].text == greedy(client).choices[0].text


def test_penalties_turn_to_other_tokens(client: openai.OpenAI, served: Served) -> None:
    logits = {str(token): 3.0 for token in (40, 41)}
    repeated = greedy(client, logit_bias=logits, logprobs=0, max_tokens=12).choices[0].logprobs.tokens
    penalised = greedy(client, logit_bias=logits, logprobs=0, max_tokens=12, frequency_penalty=2.0)
    assert len(set(penalised.choices[0].logprobs.tokens)) > len(set(repeated))


def test_log_probabilities(client: openai.OpenAI) -> None:
    told = greedy(client, logprobs=3).choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 8
    for value, top in zip(told.token_logprobs, told.top_logprobs, strict=True):
        assert value == max(top.values()) <= 0
        assert len(top) <= 3
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": PROMPT}], logprobs=True, top_logprobs=2, max_tokens=3
    )
    entries = chat.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in entries] == [2, 2, 2]


def test_what_a_grammar_forbids_has_a_log_probability_that_json_can_say(http: httpx.Client) -> None:
    """OpenAI's -9999.0: minus infinity is no JSON."""
    asked = {"response_format": {"type": "json_object"}, "max_tokens": 3, "temperature": 0}
    said = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 20}
    chat = http.post("/v1/chat/completions", json=asked | said)
    text = http.post("/v1/completions", json=asked | {"prompt": PROMPT, "logprobs": 20})
    assert "Infinity" not in chat.text + text.text
    first = chat.json()["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["top_logprobs"][-1]["logprob"]) == ("{", 0, -9999)
    assert sorted(set(text.json()["choices"][0]["logprobs"]["top_logprobs"][0].values())) == [-9999, 0]


def test_parts_of_characters_have_their_own_bytes(served: Served, shipped: Path) -> None:
    tokenizer = load_tokenizer(shipped)
    worker: Any = Scripted(served, "")
    tokens = tokenizer("a… é🚀").input_ids
    worker.pieces[:0] = [Piece(1, "", (token,), (TokenLogprob(token, -1.0, [(token, -1.0)]),)) for token in tokens]
    app = create_app(replace(served, worker=worker, tokenizer=tokenizer))

    async def asked() -> tuple[Any, Any]:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="any", http_client=http) as client:
            user: Any = [{"role": "user", "content": PROMPT}]
            chat = await client.chat.completions.create(model="tiny", messages=user, logprobs=True, top_logprobs=1)
            text = await client.completions.create(model="tiny", prompt=PROMPT, logprobs=1)
        return chat.choices[0].logprobs.content, text.choices[0].logprobs

    chat, text = asyncio.run(asked())
    assert b"".join(bytes(entry.bytes) for entry in chat) == "a… é🚀".encode()
    assert [entry.top_logprobs[0].bytes for entry in chat] == [entry.bytes for entry in chat]
    assert [entry.token for entry in chat] == text.tokens
    assert text.tokens[:4] == ["a", r"bytes:\xe2\x80", r"bytes:\xa6", " "]
    assert text.text_offset[:5] == [0, 1, 1, 2, 3]
    assert [*text.top_logprobs[1]] == [r"bytes:\xe2\x80"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_a_prompt_is_scored(client: openai.OpenAI, served: Served, tokens: int, stream: bool) -> None:
    """What lm-eval's `local-completions` asks for, by token ids. The oracle: a step of the engine by itself, over the
    tokens that its class for models in the process reads."""
    prompts = [[5, 6, 7, 8, 9, 30], [40, 41, 42]]
    asked: dict[str, Any] = {"prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": tokens, "seed": 1234}
    usage: Any = {"include_usage": True} if stream else None
    answer = greedy(client, stream=stream, stream_options=usage, **asked)
    chunks = list(answer) if stream else [answer]
    assert chunks[-1].usage.completion_tokens == 2 * tokens
    for index, prompt in enumerate(prompts):
        told = [c for chunk in chunks for c in chunk.choices if c.index == index and c.logprobs]
        scores, tops, names = (
            [each for c in told for each in getattr(c.logprobs, name)]
            for name in ("token_logprobs", "top_logprobs", "tokens")
        )
        cache = served.engine.new_cache(1)
        logits = served.engine.step(Batch((row(cache.open(), prompt[:-1]),)), cache, True)
        logs = torch.log_softmax(logits.double(), -1)
        assert (scores[0], tops[0], len(scores)) == (None, None, len(prompt) + tokens)
        assert scores[1 : len(prompt)] == [float(logs[at, token]) for at, token in enumerate(prompt[1:])]
        assert [max(top.values()) for top in tops[1 : len(prompt)]] == logs.max(-1).values.tolist()
        text = "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)
        assert text.startswith(served.tokenizer.decode(prompt))
        assert names[: len(prompt)] == [served.tokenizer.decode([token]) for token in prompt]


def test_echo_without_scores(client: openai.OpenAI) -> None:
    alone = greedy(client).choices[0].text
    assert greedy(client, echo=True).choices[0].text == PROMPT + alone


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_answer_follows_its_schema(client: openai.OpenAI, served: Served, temperature: float) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPT}],
        temperature=temperature,
        seed=1,
        n=3,
        logit_bias={str(served.tokenizer(" ").input_ids[0]): -100},
        response_format={"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}},
    )
    for choice in answer.choices:
        said = json.loads(choice.message.content or "")
        assert choice.finish_reason == "stop"
        assert said["kind"] in ("cat", "dog")
        assert 0 <= said["age"] <= 99


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "integer", "multipleOf": 99999999}, "more than 64 MiB"),
        ({"const": "x" * 131_072}, "characters as a grammar, 131,072 at most"),
        ({"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(600)}}, "max is 2000"),
        ({"type": "string", "pattern": "^(a?){5000}a{5000}$"}, "too many expressions"),
        ({"type": "string", "pattern": "(((a{100}){100}){100}){100}(?=b)"}, "look-ahead"),
        (nested(150), "recursion limit"),
    ],
)
def test_a_schema_beyond_the_limits_is_refused(client: openai.OpenAI, schema: Any, said: str) -> None:
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        greedy(client, extra_body=asked)
    assert refused.value.param == "response_format"
    assert "\n" not in refused.value.message


def test_a_step_of_a_grammar_beyond_the_limits_ends_its_answer(client: openai.OpenAI, served: Served) -> None:
    """It is found behind the first of two ways, which no trial need have taken."""
    schema = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^(a?){5000}a{5000}$"}]}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    bias = {str(served.tokenizer('"').input_ids[0]): 100}
    with pytest.raises(openai.InternalServerError, match="any further: lexer error: too many expressions"):
        greedy(client, logit_bias=bias, extra_body=asked)
    assert greedy(client).choices[0].finish_reason == "length"


def test_many_at_once_get_what_each_gets_alone(address: str) -> None:
    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
            asked = [
                client.completions.create(model="tiny", prompt=[3 + n, 5, 9 + n], temperature=0, max_tokens=6)
                for n in range(8)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    together = asyncio.run(all_of_them())
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY) as client:
        alone = [greedy(client, prompt=[3 + n, 5, 9 + n], max_tokens=6).choices[0].text for n in range(8)]
    assert together == alone


def test_counters_are_what_clients_see(served: Served) -> None:
    """By the clients of `benchmarks.load`, some of which leave; a counter that is off by one is found."""
    with running(create_app(served)) as address:
        before = metrics(address)
        clients = Clients(address, 6, 64)
        asyncio.run(clients.run(0.5))
        told = {name: value - before.get(name, 0) for name, value in settled(address).items()}
    assert clients.tally.finished
    assert (clients.tally.lost, clients.tally.told, clients.tally.refused) == (0, 0, 0)
    assert counters_broken(clients.tally, told, 64) == []
    told["requests_aborted_total"] += 1
    assert "requests sent" in counters_broken(clients.tally, told, 64)[0]


TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}{% for m in messages %}{{ m.role }}:"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
)
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'


def test_tools_are_called(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", TEMPLATE)
    scripted: Any = Scripted(served, "Let me look." + CALL)
    app = create_app(replace(served, worker=scripted))

    async def asked() -> tuple[Any, list[Any], Any]:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="any", http_client=http) as client:
            first: Any = [{"role": "user", "content": "how is it in Bonn"}]
            whole = await client.chat.completions.create(model="tiny", messages=first, tools=[TOOL])
            stream = await client.chat.completions.create(model="tiny", messages=first, tools=[TOOL], stream=True)
            chunks = [chunk async for chunk in stream]
            result = {"role": "tool", "tool_call_id": whole.choices[0].message.tool_calls[0].id, "content": "sun"}
            said = whole.choices[0].message.model_dump(exclude_none=True)
            again = await client.chat.completions.create(
                model="tiny", messages=[*first, said, result], tools=[TOOL], tool_choice="none"
            )
        return whole.choices[0], chunks, again.choices[0]

    whole, chunks, again = asyncio.run(asked())
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "Let me look.")
    assert whole.message.tool_calls[0].function.arguments == '{"city": "Bonn"}'
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me look."
    called, *more = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (called.index, called.type, called.function.name, called.function.arguments) == (
        0,
        "function",
        "weather",
        "",
    )
    assert {(each.index, each.id, each.function.name) for each in more} == {(0, None, None)}
    assert [each.function.arguments for each in more] == list('{"city": "Bonn"}')
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    prompts = [served.tokenizer.decode(request.ids) for request in scripted.asked]
    assert prompts[0].startswith("<tool_call>weather")
    assert prompts[2].endswith("Let me look.Bonntool:sun")
    assert (again.finish_reason, again.message.content) == ("stop", "Let me look." + CALL)  # none may be called


TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED: dict[str, Any] = {"role": "user", "content": "a"}
BEGUN = [ASKED, {"role": "assistant", "content": "Once; and "}]
GOES_ON, NEW_TURN = "[user]a;[assistant]Once; and ", "[user]a;[assistant]Once; and ;[assistant]"


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        ("chat/completions", {"messages": BEGUN}, GOES_ON),
        ("chat/completions", {"messages": BEGUN, "continue_final_message": True}, GOES_ON),
        ("chat/completions", {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False},
         GOES_ON),
        ("chat/completions", {"messages": BEGUN, "continue_final_message": False}, NEW_TURN),
        ("chat/completions", {"messages": BEGUN, "add_generation_prompt": True}, NEW_TURN),
        ("chat/completions", {"messages": [ASKED, {"role": "assistant"}]}, "[user]a;[assistant]"),
        ("messages", {"messages": BEGUN, "max_tokens": 9}, GOES_ON),
        ("responses", {"input": BEGUN}, GOES_ON),
    ],
)  # fmt: skip
def test_an_assistant_s_message_at_the_end_is_continued(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], prompt: str
) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", TURNS)
    scripted: Any = Scripted(served, "so on")
    with running(create_app(replace(served, worker=scripted))) as address:
        assert httpx.post(f"{address}/v1/{path}", json=body, timeout=PATIENCE_S).status_code == 200
    assert served.tokenizer.decode(scripted.asked[0].ids) == prompt


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"messages": [ASKED], "continue_final_message": True}, "continue_final_message", "needs an assistant's"),
        ({"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message",
         "excludes"),
        ({"messages": [ASKED], "add_generation_prompt": False}, "add_generation_prompt", "a message to continue"),
        ({"messages": BEGUN, "response_format": {"type": "json_object"}}, "messages", "cannot follow response_format"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages",
         "send their results"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued(
    http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], param: str, why: str
) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", TURNS)
    response = http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert why in response.json()["error"]["message"]


def test_a_continued_answer_is_the_rest_of_the_whole_one(
    client: openai.OpenAI, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", TURNS)

    def answer(tokens: int, *begun: Any) -> str:
        said: Any = [ASKED, *begun]
        told = client.chat.completions.create(model="tiny", messages=said, temperature=0, max_tokens=tokens)
        return told.choices[0].message.content or ""

    whole, begun = answer(9), answer(4)
    assert begun + answer(5, {"role": "assistant", "content": begun}) == whole


@pytest.mark.parametrize(
    ("template", "begun", "thought", "content"),
    [
        (TURNS + "<think>{% if 0 %}</think>{% endif %}", "<think>hm", "a", "b"),
        (TURNS + "<think>{% if 0 %}</think>{% endif %}", "<think>hm</think>so", "", "a</think>b"),
        (TURNS + "{% if 0 %}<|channel|>{% endif %}", "so", "", "a</think>b"),
    ],
)
def test_an_answer_goes_on_within_a_thought_or_behind_it(
    served: Served, monkeypatch: pytest.MonkeyPatch, template: str, begun: str, thought: str, content: str
) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", template)
    scripted: Any = Scripted(served, "a</think>b")
    body = {"messages": [ASKED, {"role": "assistant", "content": begun}]}
    with running(create_app(replace(served, worker=scripted))) as address:
        told = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
        told = told["choices"][0]["message"]
    assert (told.get("reasoning_content", ""), told["content"]) == (thought, content)


THINKING = (
    "{% for m in messages %}[{{ m.role }}]{% if m.thinking %}BEGIN{{ m.thinking }}END{% endif %}{{ m.content }}"
    "{% endfor %}"
)
TAGS = ("<think>", "</think>")
CHANNELS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")


@pytest.mark.parametrize(("begin", "end"), [TAGS, CHANNELS])
@pytest.mark.parametrize(
    ("path", "begun"),
    [
        ("chat/completions", {"reasoning_content": "hm"}),
        ("messages", {"content": [{"type": "thinking", "thinking": "hm", "signature": ""}]}),
    ],
)
def test_a_thought_without_an_answer_is_continued(
    served: Served, monkeypatch: pytest.MonkeyPatch, begin: str, end: str, path: str, begun: dict[str, Any]
) -> None:
    """Where it ended: a line break that comes next is part of it."""
    monkeypatch.setattr(served.tokenizer, "chat_template", THINKING.replace("BEGIN", begin).replace("END", end))
    scripted: Any = Scripted(served, f"\na{end}b")
    body = {"messages": [ASKED, {"role": "assistant", **begun}], "max_tokens": 9}
    with running(create_app(replace(served, worker=scripted))) as address:
        told = httpx.post(f"{address}/v1/{path}", json=body, timeout=PATIENCE_S).json()
    assert served.tokenizer.decode(scripted.asked[0].ids) == f"[user]a[assistant]{begin}hm"
    if path == "messages":
        assert [block.get("thinking") or block["text"] for block in told["content"]] == ["\na", "b"]
    else:
        message = told["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("\na", "b")


@pytest.mark.parametrize(
    ("template", "begun", "part"),
    [
        (TURNS, {"reasoning_content": "hm"}, "thought"),
        (THINKING.replace("m.thinking %}", "m.thinking and not loop.last %}"), {"reasoning_content": "hm"}, "thought"),
        (None, {"reasoning_content": "hm"}, "thought"),
        (TURNS.replace("m.content", "m.content.split('|')[0]"), {"content": "Once | upon"}, "text"),
    ],
)
def test_what_the_template_leaves_out_is_not_continued(
    served: Served,
    http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    template: str | None,
    begun: dict[str, str],
    part: str,
) -> None:
    """Else the model would continue another prompt."""
    monkeypatch.setattr(served.tokenizer, "chat_template", template)
    asked = [ASKED, {"role": "assistant", **begun}]
    for more in ({}, {"continue_final_message": True}):
        response = http.post("/v1/chat/completions", json={"messages": asked, "max_tokens": 1, **more})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "messages"
        assert f"leaves out the {part} that" in error["message"]
    assert http.post("/v1/chat/completions", json={"messages": [ASKED], "max_tokens": 1}).status_code == 200


def test_a_stream_tells_how_far_the_prompt_is_read(client: openai.OpenAI) -> None:
    """Where that is asked for: the second time, most of it did not have to be read."""
    messages: Any = [{"role": "user", "content": "how far is it read"}]

    def progress(**more: Any) -> list[dict[str, Any]]:
        stream = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=3, stream=True, temperature=0, extra_body=more,
            stream_options={"include_usage": True},
        )  # fmt: skip
        *chunks, last = stream
        told = [chunk.model_extra["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk.model_extra]
        texts = ["prompt_progress" in chunk.model_extra for chunk in chunks if chunk.choices[0].delta.content]
        assert not any(texts)
        assert {each["total"] for each in told} <= {last.usage.prompt_tokens}
        assert {each["cache"] for each in told} <= {last.usage.prompt_tokens_details.cached_tokens}
        return told

    assert progress() == progress(return_progress=False) == []
    (told,) = progress(return_progress=True)
    assert 0 < told["cache"] < told["processed"] == told["total"]
    assert told["time_ms"] >= 0


@pytest.mark.parametrize("field", ["reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"])
def test_a_thought_ends_with_its_budget(
    client: openai.OpenAI, served: Served, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Its text is the beginning of what the model thinks without one; then the answer begins."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>{% if 0 %}</think>{% endif %}"
    monkeypatch.setattr(served.tokenizer, "chat_template", template)

    def choice(budget: int) -> Any:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=20, temperature=0,
            logprobs=True, extra_body={field: budget},
        )  # fmt: skip
        return answer.choices[0]

    free = choice(-1)
    assert not free.message.content
    for budget in (0, 3):
        message = choice(budget).message
        thought = "".join(each.token for each in free.logprobs.content[:budget])
        assert (message.model_extra.get("reasoning_content", ""), message.content != "") == (thought, True)
    with pytest.raises(openai.BadRequestError, match="greater than or equal to -1") as refused:
        choice(-2)
    assert refused.value.param == field


def test_a_model_without_thoughts_passes_over_their_budget(http: httpx.Client) -> None:
    """Agents send one always."""
    said = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0}
    chats = [
        http.post("/v1/chat/completions", json=said | more).json()["choices"][0]["message"]["content"]
        for more in ({}, {"reasoning_budget_tokens": 1})
    ]
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    message = http.post("/v1/messages", json=said | thinking).json()["content"][0]["text"]
    assert chats == [message] * 2


def test_a_budget_of_nothing_asks_the_template_for_no_thought(
    http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", "a{% if enable_thinking is false %}quick{% endif %}</think>")
    for more, expected in (({"reasoning_budget_tokens": 0}, 2 + 5), ({"reasoning_budget_tokens": 1}, 2), ({}, 2)):
        body = {"messages": [ASKED], "max_tokens": 1, **more}
        usage = http.post("/v1/chat/completions", json=body).json()["usage"]
        assert usage["prompt_tokens"] - len("</think>") + 1 == expected


CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|channel|>{{ m.thinking }}<|message|>{{ m.content }}{% endfor %}"
)
THOUGHT = "<|channel|>analysis<|message|>hm, two<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "content", "finish"),
    [
        ("<|channel|>final<|message|>2", "2", "stop"),
        ('<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Bonn"}', None, "tool_calls"),
    ],
)
def test_channels_are_told_apart(
    served: Served, monkeypatch: pytest.MonkeyPatch, text: str, content: str | None, finish: str
) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", CHANNELS)
    scripted: Any = Scripted(served, THOUGHT + text)

    async def asked() -> Any:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(replace(served, worker=scripted))))
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="any", http_client=http) as client:
            said: Any = {"role": "assistant", "content": "4", "reasoning_content": "so"}
            messages: Any = [{"role": "user", "content": "one"}, said, {"role": "user", "content": "two"}]
            return await client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL])

    answer = asyncio.run(asked()).choices[0]
    assert (answer.message.reasoning_content, answer.message.content) == ("hm, two", content)
    assert answer.finish_reason == finish
    assert [call.function.arguments for call in answer.message.tool_calls or ()] == ['{"city":"Bonn"}'] * (not content)
    assert scripted.asked[0].special
    assert "so<|message|>4" in served.tokenizer.decode(scripted.asked[0].ids)


def followed(served: Served, grammar: Grammar, text: str) -> bool:
    """Whether a grammar lets a text pass, to its end."""
    for token in served.tokenizer(text, add_special_tokens=False).input_ids:
        if grammar.restrict(torch.zeros(128))[token] != 0:
            return False
        grammar.accept(token)
    return grammar.ended


NAMED: Any = {"type": "function", "function": {"name": "other"}}


@pytest.mark.parametrize(("choice", "names"), [("required", ("weather", "other")), (NAMED, ("other",))])
def test_a_call_is_forced(served: Served, monkeypatch: pytest.MonkeyPatch, choice: Any, names: tuple[str, ...]) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", TEMPLATE + "<think>{% if 0 %}</think>{% endif %}")
    scripted: Any = Scripted(served, "look</think>" + CALL)
    app = create_app(replace(served, worker=scripted))

    async def asked(choice: Any) -> Any:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="any", http_client=http) as client:
            messages: Any = [{"role": "user", "content": "how is it in Bonn"}]
            return await client.chat.completions.create(
                model="tiny", messages=messages, tools=[TOOL, NAMED], tool_choice=choice, n=4
            )

    answer = asyncio.run(asked(choice)).choices[0]
    assert (answer.message.reasoning_content, answer.finish_reason) == ("look", "tool_calls")
    *grammars, last = [each.grammar for each in scripted.asked]
    for grammar, name in zip(grammars, ("weather", "other", "third"), strict=True):
        text = 'well</think>\n<tool_call>{"name":"NAME","arguments":{}}</tool_call>'.replace("NAME", name)
        assert followed(served, grammar, text) is (name in names)
    assert not followed(served, last, "well</think>hello")
    with pytest.raises(openai.BadRequestError, match="not among the tools"):
        asyncio.run(asked({"type": "function", "function": {"name": "third"}}))


REFUSALS: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "model", "this server has 'tiny'"),
    ("/v1/completions", {"prompt": []}, 400, "prompt", "empty"),
    ("/v1/completions", {"prompt": [4] * 64}, 400, "prompt", "64 tokens, there is room for 64"),
    ("/v1/completions", {"prompt": [4, 99999]}, 400, "prompt", "no token 99999"),
    ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature", "greater than or equal to 0"),
    ("/v1/completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature", "number"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", "not supported"),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 5}, 400, "n", "10 answers are asked for, 8 at most"),
    ("/v1/completions", {"prompt": "a", "allowed_token_ids": [5]}, 400, "allowed_token_ids", "not supported"),
    ("/v1/completions", {"prompt": "a", "n_predict": 3}, 400, "n_predict", "not supported by this server; use max_tok"),
    ("/v1/completions", {"prompt": "a", "mirostat": 2}, 400, "mirostat", "not supported"),
    ("/v1/completions", {"prompt": "a", "a_sampler_of_tomorrow": 0}, 400, "a_sampler_of_tomorrow", "leave it out"),
    ("/v1/completions", {"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty", "greater"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "needs echo"),
    ("/v1/completions", {"prompt": "\ud800"}, 400, None, "no JSON"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias", "no token"),
    ("/v1/completions", {}, 400, "prompt", "required"),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "response_format", "needs"),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {
        "type": "nonsense"}}}}, 400, "response_format", "nonsense"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages", "at least 1"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}], "tools": [{}]}, 400, "tools", "required"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}], "tools": [
        {"type": "function", "function": {"name": "f"}}]}, 400, "tools", "no chat template with tools"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:,"}}]}]}, 400, "messages", "reads text alone, no image_url"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400,
     "top_logprobs", "logprobs=true"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}, 400,
     "tool_choice", "there are no tools"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens", "no token -1"),
    ("/tokenize", {}, 400, "prompt", "either"),
    ("/v1/embeddings", {"input": "a"}, 400, None, "has no embeddings"),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, 400, None, "no reranking"),
    ("/rerank", {}, 400, None, "no reranking"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param", "why"), REFUSALS)
def test_refusals_name_the_cause(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str | None, why: str
) -> None:
    response = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert why in error["message"]


def test_agents_know_causes_by_their_codes(http: httpx.Client, address: str) -> None:
    long = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a " * 99}]})
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert httpx.get(f"{address}/v1/models", timeout=PATIENCE_S).json()["error"]["code"] == "invalid_api_key"


def test_broken_bodies(http: httpx.Client) -> None:
    broken = http.post("/v1/completions", content=b'{"prompt": ', headers={"Content-Type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["param"]) == (400, None)
    assert broken.json()["error"]["message"].startswith("body: no JSON: EOF")
    page = {"Content-Type": "text/plain", "Origin": "http://elsewhere"}  # of a web page that was not allowed to ask
    form = http.post("/api/generate", content=b'{"prompt": "a"}', headers=page)
    assert (form.status_code, form.json()["error"].partition("; ")[2]) == (
        400,
        "send the header Content-Type: application/json",
    )
    assert http.get("/v1/nothing").json()["error"]["message"] == "Not Found"


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
def test_a_body_is_json_whatever_its_type(http: httpx.Client, path: str) -> None:
    """curl says that it is a form, litellm's client of Ollama nothing. A web page may not, or any could ask."""
    body = json.dumps({"model": "tiny", "prompt": "a", "stream": False})
    for kind in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):
        assert http.post(path, content=body, headers=kind).status_code == 200
        refused = http.post(path, content=body, headers={**kind, "Origin": "http://elsewhere"})
        assert refused.status_code == 400


def test_a_full_queue_asks_to_come_again(served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.worker, "most_waiting", 0)
    refused = served.worker.loop.counts.refused
    response = http.post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
    assert served.worker.loop.counts.refused == refused + 1


def test_what_fails_is_an_error_of_the_server(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("the drive is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", fails)
        response = http.post("/v1/completions", json={"prompt": PROMPT})
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        events = http.post("/v1/completions", json={"prompt": PROMPT, "stream": True})
        assert "the drive is gone" in events.text
    assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).status_code == 200


def test_what_nobody_foresaw_is_an_error_in_the_dialect_s_shape(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("torn")

    monkeypatch.setattr(Served, "check_model", fails)
    transport = httpx.ASGITransport(create_app(served), raise_app_exceptions=False)

    async def asked(path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            message = {"role": "user", "content": "a"}
            return await client.post(path, json={"messages": [message], "max_tokens": 1})

    found = [asyncio.run(asked(path)) for path in ("/v1/chat/completions", "/v1/messages")]
    assert [each.status_code for each in found] == [500, 500]
    assert found[0].json()["error"] == {
        "message": "RuntimeError: torn", "type": "server_error", "param": None, "code": None
    }  # fmt: skip
    assert found[1].json() == {"type": "error", "error": {"type": "api_error", "message": "RuntimeError: torn"}}


def test_models_tokens_and_metrics(http: httpx.Client, client: openai.OpenAI) -> None:
    greedy(client)
    (model,) = client.models.list()
    assert (model.id, http.get("/v1/models/tiny").json()["max_model_len"]) == ("tiny", 64)
    tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"].strip() == PROMPT
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": PROMPT}]}).json()
    assert chat["count"] >= len(tokens)
    lines = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line[0] != "#")
    assert float(lines["tiermoe:generation_tokens_total"]) >= 8
    assert float(lines['tiermoe:request_success_total{finished_reason="length"}']) >= 1
    stats = http.get("/stats").json()
    assert stats["expert_hits"] > 0
    assert stats["other_budgets"] == []  # all are in memory
    assert (stats["rows"], stats["running"], stats["generated_tokens"] >= 8) == (4, 0, True)
    layers = http.get("/experts").json()["layers"]
    assert [len(layer["bits"]) for layer in layers] == [8, 8, 8]
    assert {bits for layer in layers for bits in layer["bits"]} == {16}  # all are in memory
    assert all(len(layer["uses"]) == len(layer["arriving"]) == 8 for layer in layers)
    assert "/v1/completions" in http.get("/openapi.json").json()["paths"]


def test_policies_learn_in_the_thread_of_the_steps_alone(
    http: httpx.Client, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    record = Scheduler.record_hits

    def recorded(self: Scheduler) -> None:
        threads.add(threading.current_thread().name)
        record(self)

    monkeypatch.setattr(Scheduler, "record_hits", recorded)
    greedy(client)
    for path in ("/stats", "/experts", "/metrics"):
        assert http.get(path).status_code == 200
    assert threads == {"tiermoe-batch"}


def test_the_dashboard_asks_for_what_is_there(http: httpx.Client, client: openai.OpenAI) -> None:
    greedy(client)
    lines = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line[0] != "#")
    dashboard = Path(__file__).parents[1] / "docs" / "grafana.json"
    asked = {name for panel in json.loads(dashboard.read_text())["panels"] for name in _names(panel)}
    # no prefixes on disk here
    assert asked - {line.partition("{")[0] for line in lines} == {"tiermoe:prefix_disk_read_bytes_total"}
    assert 0 < float(lines["tiermoe:kv_cache_usage_perc"]) <= 1
    assert 0 < float(lines["tiermoe:resident_memory_bytes"]) <= float(lines["tiermoe:resident_memory_peak_bytes"])
    assert float(lines["tiermoe:expert_cache_evictions_total"]) == 0  # all are in memory


def _names(panel: dict[str, Any]) -> list[str]:
    return [name for target in panel["targets"] for name in re.findall(r"tiermoe:\w+", target["expr"])]


def test_bad_options(tiermoe_: Command) -> None:
    assert "the API key is empty" in tiermoe_("serve", "nowhere", "--api-key", " ").cause
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cause = tiermoe_("serve", "nowhere", "--port", port).cause
        assert f"cannot listen on 127.0.0.1:{port}" in cause
        assert "another --port" in cause
    assert "another --host" in tiermoe_("serve", "nowhere", "--host", "192.0.2.1").cause  # of nobody: RFC 5737
