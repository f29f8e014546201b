"""`/v1/responses`, as openai's client meets it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from serving import Scripted
from tiermoe.serve.app import create_app
from tiermoe.serve.served import Served

PROMPT = "once upon a time"
TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.arguments.city }}){% endfor %};{% endfor %}"
)
TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
ANSWER = f"<think>\nBonn, then.\n</think>\n\nLet me look.{CALL}"


def create(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": PROMPT, "max_output_tokens": 6, **more})


def test_a_response_is_what_a_chat_answers(client: openai.OpenAI, served: Served) -> None:
    answer = create(client, instructions="be brief", temperature=0)
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}],
        temperature=0,
        max_tokens=6,
    )
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 6)
    assert answer.store is False


def test_a_stream_sums_to_the_whole(client: openai.OpenAI) -> None:
    whole = create(client, temperature=0)
    events = list(create(client, temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = create(client, temperature=0, top_logprobs=2, include=["message.output_text.logprobs"])
    assert [len(each.top_logprobs) for each in answer.output[0].content[0].logprobs] == [2] * 6


def test_text_follows_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"kind": {"enum": ["cat"]}}, "required": ["kind"],
              "additionalProperties": False}  # fmt: skip
    form: Any = {"format": {"type": "json_schema", "name": "pet", "schema": schema}}
    said = "".join(create(client, text=form, max_output_tokens=40).output_text.split())  # blanks are up to the model
    assert said.startswith("{")
    assert '{"kind":"cat"}'.startswith(said)


def test_thoughts_and_calls_are_items(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", TEMPLATE)
    scripted: Any = Scripted(served, ANSWER)
    app = create_app(replace(served, worker=scripted))
    first: Any = [{"role": "user", "content": [{"type": "input_text", "text": "how is it in Bonn"}]}]

    async def asked() -> tuple[Any, list[Any]]:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="any", http_client=http) as client:
            tools: Any = [TOOL, {"type": "web_search"}, {"type": "local_shell"}]  # only the first can be called here
            whole = await client.responses.create(model="tiny", input=first, tools=tools)
            stream = await client.responses.create(model="tiny", input=first, tools=tools, stream=True)
            events = [event async for event in stream]
            result: Any = {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "sun"}
            said: Any = [item.model_dump(exclude_none=True) for item in whole.output]
            await client.responses.create(model="tiny", input=[*first, *said, result], tools=tools)
        return whole, events

    whole, events = asyncio.run(asked())
    thought, message, call = whole.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Bonn, then.")
    assert message.content[0].text == "Let me look."
    assert (call.name, call.arguments, call.status) == ("weather", '{"city": "Bonn"}', "completed")
    assert (whole.status, whole.usage.output_tokens_details.reasoning_tokens > 0) == ("completed", True)
    assert [tool.name for tool in whole.tools] == ["weather"]
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message", "function_call"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in events[-1].response.output]
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "Bonn, then."
    arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert arguments == list('{"city": "Bonn"}')  # as they are written
    (ended,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert (ended.name, ended.arguments, ended.item_id) == ("weather", "".join(arguments), done[-1].id)
    prompt = served.tokenizer.decode(scripted.asked[-1].ids)
    assert prompt == "<tool_call>weatheruser:how is it in Bonn;" \
        "assistant:<think>Bonn, then.</think>Let me look.(Bonn);tool:sun;"  # fmt: skip


@pytest.mark.parametrize(
    ("change", "param", "why"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "store: false"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input",
         "reads text alone, no input_image"),
        ({"input": []}, "input", "at least 1"),
        ({"tools": [{"type": "function"}]}, "tools", "required"),
        ({"tools": [TOOL]}, "tools", "no chat template with tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "schema"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"temperature": -1}, "temperature", "greater"),
    ],
)  # fmt: skip
def test_refusals(client: openai.OpenAI, change: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as refused:
        create(client, extra_body=change)
    assert refused.value.param == param
