"""Anthropic's endpoints, as its client meets them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import pytest

from patience import PATIENCE_S
from serving import KEY, Scripted, running
from tiermoe.serve.app import create_app
from tiermoe.serve.served import Served

PROMPT = "once upon a time"


@pytest.fixture(scope="module")
def claude(address: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0) as client:
        yield client


MESSAGES: dict[str, Any] = {
    "model": "tiny", "system": [{"type": "text", "text": "be brief"}], "max_tokens": 6,
    "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
}  # fmt: skip


def test_a_message(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    answer = claude.messages.create(**MESSAGES)
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}],
        temperature=0,
        max_tokens=6,
    )
    assert answer.content[0].text == chat.choices[0].message.content
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 6)
    counted = claude.messages.count_tokens(**{name: MESSAGES[name] for name in ("model", "system", "messages")})
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_what_agents_send_beside_changes_nothing(claude: anthropic.Anthropic) -> None:
    edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    more: Any = {"temperature": 0, "context_management": edits, "speed": "standard", "betas": ["a"]}
    answer = claude.messages.create(**{**MESSAGES, "metadata": {"user_id": "u"}, "extra_body": more})
    assert answer.content == claude.messages.create(**MESSAGES).content


def test_a_streamed_message(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**MESSAGES)
    with claude.messages.stream(**MESSAGES) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().stop_reason == "max_tokens"
    stop = whole.content[0].text[2:4]
    stopped = claude.messages.create(**MESSAGES, stop_sequences=["never", stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tools": [{"name": "a", "input_schema": {}}]}, "tools"),
        ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools"),
        ({"tool_choice": {"type": "tool"}}, "needs name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "greater than or equal to 1024"),
        ({"extra_body": {"mcp_servers": [{"url": "a"}]}}, "mcp_servers is not supported"),
        ({"model": "other"}, "this server has 'tiny'"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "user"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "text alone, no image"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "text alone, no document"),
        ({"extra_body": {"min_p": 0.1}}, "min_p is not supported"),
        ({"extra_body": {"stop": ["a"]}}, "use stop_sequences"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}]}]}, "text alone, no image"),
        ({"messages": [{"role": "user", "content": "a " * 99}]}, "the prompt is too long"),
        ({"extra_body": {"output_format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "nonsense"),
    ],
)  # fmt: skip
def test_messages_that_are_refused(claude: anthropic.Anthropic, change: dict[str, Any], why: str) -> None:
    with pytest.raises(anthropic.APIStatusError) as refused:
        claude.messages.create(**{**MESSAGES, **change})
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert why in body["error"]["message"]


TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.arguments.city }}){% endfor %};{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
)
TOOL: Any = {"name": "weather", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'


def test_thoughts_and_calls_are_blocks(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", TEMPLATE)
    scripted: Any = Scripted(served, f"<think>Bonn, then.</think>Let me look.{CALL}{CALL}")
    first: Any = {"role": "user", "content": "how is it in Bonn"}

    async def asked(address: str) -> tuple[Any, list[Any], Any]:
        async with anthropic.AsyncAnthropic(base_url=address, api_key="any") as client:
            options: Any = {"model": "tiny", "max_tokens": 99, "tools": [TOOL]}
            thinking: Any = {"type": "enabled", "budget_tokens": 1024}
            whole = await client.messages.create(messages=[first], thinking=thinking, **options)
            async with client.messages.stream(messages=[first], **options) as stream:
                events = [event async for event in stream]
                summed = await stream.get_final_message()
            results: Any = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sun"}]}
                for block in whole.content[2:]
            ]
            said: Any = {"role": "assistant", "content": whole.content}
            more: Any = {"role": "user", "content": [*results, {"type": "text", "text": "and then?"}]}
            await client.messages.create(messages=[first, said, more], thinking={"type": "disabled"}, **options)
        return whole, events, summed

    with running(create_app(replace(served, worker=scripted))) as address:
        whole, events, summed = asyncio.run(asked(address))
    thought, text, call, _ = whole.content
    assert (thought.thinking, text.text, whole.stop_reason) == ("Bonn, then.", "Let me look.", "tool_use")
    assert (call.name, call.input) == ("weather", {"city": "Bonn"})
    assert [block.type for block in summed.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in summed.content[2:]] == [{"city": "Bonn"}] * 2
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    pieces = [delta.partial_json for delta in deltas if delta.type == "input_json_delta"]
    assert pieces == list('{"city": "Bonn"}' * 2)  # as they are written
    assert [request.budget is not None for request in scripted.asked] == [True, False, False]
    prompt = served.tokenizer.decode(scripted.asked[-1].ids)
    assert prompt == (
        "<tool_call>weatheruser:how is it in Bonn;assistant:<think>Bonn, then.</think>Let me look.(Bonn)(Bonn);"
        "tool:sun;tool:sun;user:and then?;quick"
    )


def test_one_call_where_several_are_not_wanted(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each dialect the answer ends where the first call does."""
    monkeypatch.setattr(served.tokenizer, "chat_template", TEMPLATE)
    scripted: Any = Scripted(served, CALL + CALL)
    function = {"name": "weather", "parameters": {"type": "object"}}
    said: Any = [{"role": "user", "content": "a"}]
    app = create_app(replace(served, worker=scripted))
    with running(app) as address, httpx.Client(base_url=address, timeout=PATIENCE_S) as http:
        message = http.post(
            "/v1/messages",
            json={
                "messages": said,
                "max_tokens": 9,
                "tools": [TOOL],
                "stop_sequences": ["zz"],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
        ).json()
        chat = http.post(
            "/v1/chat/completions",
            json={
                "messages": said,
                "tools": [{"type": "function", "function": function}],
                "parallel_tool_calls": False,
            },
        ).json()
        response = http.post(
            "/v1/responses",
            json={"input": "a", "tools": [{"type": "function", **function}], "parallel_tool_calls": False},
        ).json()
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert len(chat["choices"][0]["message"]["tool_calls"]) == 1
    assert [item["type"] for item in response["output"]] == ["function_call"]
    assert [request.stops for request in scripted.asked] == [("zz", "</tool_call>"), *[("</tool_call>",)] * 2]


def test_a_forced_call_that_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each dialect: the call with the arguments so far, nothing as text, and that the answer was too long."""
    monkeypatch.setattr(served.tokenizer, "chat_template", TEMPLATE)
    scripted: Any = Scripted(served, CALL.partition("nn")[0], "length")
    function: Any = {"name": "weather", "parameters": {"type": "object"}}
    said: Any = [{"role": "user", "content": "a"}]
    with (
        running(create_app(replace(served, worker=scripted))) as address,
        anthropic.Anthropic(base_url=address, api_key="any") as claude,
        openai.OpenAI(base_url=f"{address}/v1", api_key="any") as client,
    ):
        options: Any = {"messages": said, "tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 9}
        whole = claude.messages.create(model="tiny", **options)
        with claude.messages.stream(model="tiny", **options) as stream:
            summed = stream.get_final_message()
        options = {"model": "tiny", "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        chat = client.chat.completions.create(messages=said, **options).choices[0]
        chunks = list(client.chat.completions.create(messages=said, stream=True, **options))
        options = {"tools": [{"type": "function", **function}], "tool_choice": "required"}
        response = client.responses.create(model="tiny", input="a", **options)
    for message in (whole, summed):
        (block,) = message.content
        assert (block.type, block.name, message.stop_reason) == ("tool_use", "weather", "max_tokens")
    assert whole.content[0].input == {"city": "Bo"}
    arguments = '{"city": "Bo'
    assert (chat.message.content, chat.finish_reason) == (None, "length")
    assert [call.function.arguments for call in chat.message.tool_calls or ()] == [arguments]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(call.function.arguments for call in calls) == arguments
    assert chunks[-1].choices[0].finish_reason == "length"
    (item,) = response.output
    assert (item.type, item.arguments, item.status, response.status) == (
        "function_call", arguments, "incomplete", "incomplete"
    )  # fmt: skip


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (TEMPLATE, "system:be brief;system:be kind;user:a;system:no jokes;"),
        (STRICT, "system:be brief\n\nbe kind;user:a;user:no jokes;"),
    ],
)
def test_system_messages_may_come_anywhere(
    http: httpx.Client, served: Served, template: str, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claude Code sends them among the others, Codex several at the beginning."""
    monkeypatch.setattr(served.tokenizer, "chat_template", template)
    said = [("system", "be brief"), ("system", "be kind"), ("user", "a"), ("system", "no jokes")]
    messages = [{"role": role, "content": text} for role, text in said]
    asked = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    count = http.post("/v1/messages/count_tokens", json={"messages": messages[1:], "system": "be brief"}).json()
    assert served.tokenizer.decode(asked) == prompt
    assert count == {"input_tokens": len(asked)}


def test_the_client_lists_models(claude: anthropic.Anthropic) -> None:
    (model,) = claude.models.list()
    assert (model.id, model.display_name, model.type) == ("tiny", "tiny", "model")


def test_an_answer_without_text_has_an_empty_block(served: Served) -> None:
    scripted: Any = Scripted(served, "")
    messages: Any = [{"role": "user", "content": "a"}]
    with (
        running(create_app(replace(served, worker=scripted))) as address,
        anthropic.Anthropic(base_url=address, api_key="any") as client,
        client.messages.stream(model="tiny", max_tokens=9, messages=messages) as stream,
    ):
        answer = stream.get_final_message()
    assert (answer.content[0].text, answer.stop_reason) == ("", "end_turn")
