"""Calls that a client sends back with every turn: whatever their arguments are, the session goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving import Stage

TEMPLATE = (
    '{# {"name": <function-name>, "arguments": <args-json-object>} #}'
    "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    "{% for key, value in call.function.arguments.items() %}[{{ key }}={{ value }}]{% endfor %}{% endfor %}"
    "{{ m.content }};{% endfor %}"
)
"""One that needs an object, as those of Qwen3-Coder and GLM do."""


def openais(arguments: Any) -> tuple[str, dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return "/v1/chat/completions", {"messages": [said, {"role": "tool", "tool_call_id": "a", "content": "sun"}]}


def responses(arguments: Any) -> tuple[str, dict[str, Any]]:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}
    return "/v1/responses", {"input": [call, {"type": "function_call_output", "call_id": "a", "output": "sun"}]}


def anthropics(arguments: Any) -> tuple[str, dict[str, Any]]:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "sun"}
    messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return "/v1/messages", {"messages": messages, "max_tokens": 9}


def ollamas(arguments: Any) -> tuple[str, dict[str, Any]]:
    said = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    return "/api/chat", {"messages": [said, {"role": "tool", "content": "sun"}], "stream": False}


@pytest.mark.parametrize("dialect", [openais, responses, anthropics, ollamas])
@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"city": "Bonn"}', "[city=Bonn]"),
        ({"city": "Bonn"}, "[city=Bonn]"),
        (json.dumps(json.dumps({"city": "Bonn"})), "[city=Bonn]"),
        ('{"city": "Bon', "[city=Bon]"),  # cut off
        ('{"city": "Bonn", "days": ', "[city=Bonn]"),
        ('{"city": "say "Bonn""}', "[city=say ]"),  # quotes that the model forgot to escape
        ('{"city": "Bonn\n"}', ""),
        ("Bonn", ""),
        ('["Bonn"]', ""),
        ('{"a":' * 20_000, ""),
        ("", ""),
        (None, ""),
    ],
)
def test_a_session_goes_on(stage: Stage, dialect: Any, arguments: Any, read: str) -> None:
    stage.says("So.", TEMPLATE)
    answer = stage.ask(*dialect(arguments))
    assert answer.status_code == 200, answer.text
    assert stage.prompt == f"{read};sun;"


@pytest.mark.parametrize("dialect", [openais, responses, anthropics, ollamas])
def test_arguments_that_no_model_wrote_are_refused(stage: Stage, dialect: Any) -> None:
    stage.says("So.", TEMPLATE)
    assert stage.ask(*dialect(["Bonn"])).status_code == 400
