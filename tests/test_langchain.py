"""LangChain's client of OpenAI's API, in front of the server: whole, streamed, at once, in a schema, and with a tool
whose result is sent back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel, Field, SecretStr

from serving import KEY, Scripted, running
from tiermoe.serve.app import create_app
from tiermoe.serve.served import Served

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI  # three seconds of every process that collects tests

PROMPT = "once upon a time"
TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.arguments.city }}){% endfor %}{% endfor %}"
)
CALL = 'Let me look.<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=99)


def chat_at(address: str, **more: Any) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 12, "max_retries": 0, **more}
    return ChatOpenAI(model="tiny", base_url=f"{address}/v1", api_key=SecretStr(KEY), **options)


@pytest.fixture
def chat(address: str) -> ChatOpenAI:
    return chat_at(address)


def test_streams_and_batches_are_what_one_answer_is(chat: ChatOpenAI) -> None:
    whole = chat.invoke(PROMPT)
    assert whole.content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 12
    assert "".join(str(chunk.content) for chunk in chat.stream(PROMPT)) == whole.content
    at_once = asyncio.run(chat.abatch([PROMPT, PROMPT, "a dog"]))
    assert [each.content for each in at_once[:2]] == [whole.content] * 2


def test_an_answer_is_an_object_of_its_schema(address: str, served: Served) -> None:
    spaces = {str(served.tokenizer(" ").input_ids[0]): -100}
    chat = chat_at(address, max_completion_tokens=40, logit_bias=spaces)
    pet = chat.with_structured_output(Pet, method="json_schema").invoke(PROMPT)
    assert isinstance(pet, Pet)


def test_a_tool_is_called(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    def weather(city: str) -> str:
        """The weather of a city."""
        return city

    monkeypatch.setattr(served.tokenizer, "chat_template", TEMPLATE)
    scripted: Any = Scripted(served, CALL)
    with running(create_app(replace(served, worker=scripted), [KEY])) as address:
        chat, asked = chat_at(address).bind_tools([weather]), HumanMessage("how is it in Bonn")
        whole: Any = chat.invoke([asked])
        streamed: Any = reduce(add, chat.stream([asked]))
        for told in (whole, streamed):
            assert told.content == "Let me look."
            (call,) = told.tool_calls
            assert (call["name"], call["args"]) == ("weather", {"city": "Bonn"})
            chat.invoke([asked, told, ToolMessage("sun", tool_call_id=call["id"])])
            prompt = served.tokenizer.decode(scripted.asked[-1].ids)
            assert prompt == "<tool_call>user:how is it in Bonnassistant:Let me look.(Bonn)tool:sun"
