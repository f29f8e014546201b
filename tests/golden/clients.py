"""What published clients send: `PYTHONPATH=src:tests .venv/bin/python tests/golden/clients.py`.

Each client asks a server that only writes down what comes: `tests/golden/clients/NAME.json` has its version, and for
each purpose the method, path, headers and body of the request. Tests send these again, so that what they ask for is not
what we think that clients say."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

import anthropic
import ollama
import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI

from serving import KEY

FOLDER = Path(__file__).parent / "clients"
KEPT = ("accept", "authorization", "content-type", "x-api-key", "anthropic-version", "anthropic-beta")
"""Headers that no machine has its own of."""

SYSTEM, PROMPT, QUESTION, THOUGHT, TEXT = "be brief", "once upon a time", "how is it in Bonn", "Bonn, then.", "I look."
CITY = {"city": "Bonn"}
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Any = {"name": "weather", "parameters": SCHEMA}
ANIMAL: Any = {
    "type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"],
    "additionalProperties": False,
}  # fmt: skip
Requests = Iterator[tuple[str, Callable[[], Any]]]
"""Purpose, and what makes the client send its request. `brief`: a system message and a prompt, greedily, 6 tokens;
`text`, `turn`, `raw`: the same of other endpoints; `tools`: a question and a tool; `results`: the same with two calls
and what they gave; `one`: no more than one call; `forced`: a call it must be; `schema`: JSON it must be."""


def of_openai(address: str) -> Requests:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
    chat: Any = client.chat.completions.create
    text: Any = client.completions.create
    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
    brief = {"model": "tiny", "messages": said, "temperature": 0, "max_completion_tokens": 6}
    begun = {"model": "tiny", "prompt": f"{SYSTEM}\n{PROMPT}", "temperature": 0, "max_tokens": 6}
    asks: Any = {"role": "user", "content": QUESTION}
    tools = {"model": "tiny", "messages": [asks], "tools": [{"type": "function", "function": FUNCTION}]}
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "weather", "arguments": json.dumps(CITY)}}
        for n in range(2)
    ]
    called = {"role": "assistant", "content": TEXT, "reasoning_content": THOUGHT, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sun"} for call in calls]
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": ANIMAL}}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    for stream, more in (("", {}), (" stream", streamed)):
        yield f"brief{stream}", lambda more=more: chat(**brief, **more)
        yield f"text{stream}", lambda more=more: text(**begun, **more)
        yield f"tools{stream}", lambda more=more: chat(**tools, **more)
        yield f"forced{stream}", lambda more=more: chat(**tools, tool_choice="required", **more)
    yield "one", lambda: chat(**tools, parallel_tool_calls=False)
    yield "results", lambda: chat(**{**tools, "messages": [asks, called, *results]}, tool_choice="none")
    yield "schema", lambda: chat(**{**brief, "max_completion_tokens": 40}, response_format=form)


def of_responses(address: str) -> Requests:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
    create: Any = client.responses.create
    brief = {"model": "tiny", "instructions": SYSTEM, "input": PROMPT, "temperature": 0, "max_output_tokens": 6}
    asks: Any = {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
    others = [{"type": "web_search"}, {"type": "local_shell"}]  # which cannot be called here
    tools = {"model": "tiny", "input": [asks], "tools": [{"type": "function", "strict": False, **FUNCTION}, *others]}
    called = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": THOUGHT}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": TEXT, "annotations": []}]},
    ]  # fmt: skip
    for n in range(2):
        call = {"type": "function_call", "id": f"fc_{n}", "call_id": f"call_{n}", "name": "weather"}
        called.append({**call, "arguments": json.dumps(CITY), "status": "completed"})
    results = [{"type": "function_call_output", "call_id": f"call_{n}", "output": "sun"} for n in range(2)]
    form = {"format": {"type": "json_schema", "name": "pet", "schema": ANIMAL}}
    for stream, more in (("", {}), (" stream", {"stream": True})):
        yield f"brief{stream}", lambda more=more: create(**brief, **more)
        yield f"tools{stream}", lambda more=more: create(**tools, **more)
        yield f"forced{stream}", lambda more=more: create(**tools, tool_choice="required", **more)
    yield "one", lambda: create(**tools, parallel_tool_calls=False)
    yield "results", lambda: create(**{**tools, "input": [asks, *called, *results]}, tool_choice="none")
    yield "schema", lambda: create(**{**brief, "max_output_tokens": 40}, text=form)


def of_anthropic(address: str) -> Requests:
    client = anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0)
    create: Any = client.messages.create

    def stream(**asked: Any) -> None:
        with client.messages.stream(**asked):
            pass

    system: Any = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    said: Any = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    beside = {"context_management": edits, "speed": "standard", "betas": ["a"]}  # as agents do
    brief = {"model": "tiny", "system": system, "messages": said, "max_tokens": 6, "metadata": {"user_id": "u"}}
    brief["extra_body"] = {"temperature": 0, **beside}
    asks: Any = {"role": "user", "content": QUESTION}
    tools = {"model": "tiny", "messages": [asks], "max_tokens": 2000}
    tools["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
    blocks: list[Any] = [{"type": "thinking", "thinking": THOUGHT, "signature": ""}, {"type": "text", "text": TEXT}]
    blocks += [{"type": "tool_use", "id": f"toolu_{n}", "name": "weather", "input": CITY} for n in range(2)]
    results = [
        {"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": [{"type": "text", "text": "sun"}]}
        for n in range(2)
    ]
    back = [asks, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    for name, ask in (("", create), (" stream", stream)):
        yield f"brief{name}", lambda ask=ask: ask(**brief)
        yield f"tools{name}", lambda ask=ask: ask(**tools, thinking=thinking)
        yield f"forced{name}", lambda ask=ask: ask(**tools, tool_choice={"type": "any"})
    yield "one", lambda: create(**tools, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    yield "results", lambda: create(**{**tools, "messages": back}, thinking={"type": "disabled"})
    form = {"output_format": {"type": "json_schema", "schema": ANIMAL}}
    yield "schema", lambda: create(**{**brief, "max_tokens": 40, "extra_body": {"temperature": 0, **form}})
    count: Any = client.messages.count_tokens
    yield "count", lambda: count(model="tiny", system=system, messages=said)


def of_ollama(address: str) -> Requests:
    client = ollama.Client(address, headers={"Authorization": f"Bearer {KEY}"})
    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
    asks = {"role": "user", "content": QUESTION}
    options = {"temperature": 0, "num_predict": 6}
    tools = [{"type": "function", "function": FUNCTION}]
    calls = [ollama.Message.ToolCall(function={"name": "weather", "arguments": CITY})] * 2
    called = ollama.Message(role="assistant", content=TEXT, thinking=THOUGHT, tool_calls=calls)
    results = [{"role": "tool", "content": "sun", "tool_name": "weather"}] * 2
    for name, stream in (("", False), (" stream", True)):

        def chat(messages: Any, stream: Any = stream, **more: Any) -> None:
            list(client.chat("tiny", messages, stream=stream, **more))

        def generate(prompt: str, stream: Any = stream, **more: Any) -> None:
            list(client.generate("tiny", prompt, stream=stream, **more))

        yield f"brief{name}", lambda chat=chat: chat(said, options=options)
        yield f"tools{name}", lambda chat=chat: chat([asks], tools=tools, think=True)
        yield f"turn{name}", lambda generate=generate: generate(PROMPT, system=SYSTEM, options=options)
        yield f"raw{name}", lambda generate=generate: generate(f"{SYSTEM}\n{PROMPT}", raw=True, options=options)
    yield "results", lambda: client.chat("tiny", [asks, called, *results], tools=tools, think=False)
    yield "schema", lambda: client.chat("tiny", said, format=ANIMAL, options={"temperature": 0, "num_predict": 40})


def of_langchain(address: str) -> Requests:
    def chat(**more: Any) -> Any:
        return ChatOpenAI(model="tiny", base_url=f"{address}/v1", api_key=KEY, max_retries=0, **more)

    brief = chat(temperature=0, max_completion_tokens=6)
    said = [SystemMessage(SYSTEM), HumanMessage(PROMPT)]
    asks, tools = HumanMessage(QUESTION), chat().bind_tools([{"type": "function", "function": FUNCTION}])
    calls: Any = [{"name": "weather", "args": CITY, "id": f"call_{n}", "type": "tool_call"} for n in range(2)]
    results = [ToolMessage("sun", tool_call_id=f"call_{n}") for n in range(2)]
    yield "brief", lambda: brief.invoke(said)
    yield "brief stream", lambda: list(brief.stream(said))
    yield "tools", lambda: tools.invoke([asks])
    yield "tools stream", lambda: list(tools.stream([asks]))
    yield "results", lambda: tools.invoke([asks, AIMessage(TEXT, tool_calls=calls), *results])
    pet = {"title": "pet", **ANIMAL}
    form = chat(temperature=0, max_completion_tokens=40).with_structured_output(pet, method="json_schema")
    yield "schema", lambda: form.invoke(said)


CLIENTS = {
    "openai": ("openai", of_openai),
    "responses": ("openai", of_responses),
    "anthropic": ("anthropic", of_anthropic),
    "ollama": ("ollama", of_ollama),
    "langchain": ("langchain-openai", of_langchain),
}
"""Name of the file → package, and its requests."""


def main() -> None:
    come = list[dict[str, Any]]()

    class Recorder(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items() if name.lower() in KEPT}
            come.append({"path": self.path, "headers": headers, "body": json.loads(body)})
            self.send_response(418)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Recorder)
    Thread(target=server.serve_forever, daemon=True).start()
    for name, (package, requests) in CLIENTS.items():
        found = {}
        for purpose, ask in requests(f"http://127.0.0.1:{server.server_port}"):
            with contextlib.suppress(Exception):  # no client takes the answer for one
                ask()
            found[purpose] = come.pop()
            assert not come, purpose
        text = json.dumps({"client": f"{package} {version(package)}", "requests": found}, indent=1)
        (FOLDER / f"{name}.json").write_text(text + "\n")
    server.shutdown()


if __name__ == "__main__":
    main()
