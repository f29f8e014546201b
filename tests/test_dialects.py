"""Every dialect's answers, whole and as streams, to the requests that its published clients send
(`golden/clients.py`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from serving import CALL, KEY, TEMPLATE, Stage, running
from tiermoe.serve.page import StartupApp
from tiermoe.serve.served import Served

Json = dict[str, Any]
GOLDEN = Path(__file__).parent / "golden" / "clients"
REQUESTS: dict[tuple[str, str], Json] = {
    (file.stem, purpose): request
    for file in sorted(GOLDEN.glob("*.json"))
    for purpose, request in json.loads(file.read_text())["requests"].items()
}
"""(client, purpose) → path, headers and body."""
PROMPT = "once upon a time"


def sent_for(*purposes: str) -> list[tuple[str, str]]:
    """The requests for a purpose, whole and streamed."""
    return [name for name in REQUESTS if name[1].removesuffix(" stream") in purposes]


# --- what answers say ---


@dataclass
class Said:
    """What an answer says, whatever its dialect."""

    text: str
    thought: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # function, arguments as JSON
    end: str = ""  # stop, length or call
    tokens: tuple[int, int] | None = None  # of the prompt and the answer, where the answer says it
    parts: list[str] = field(default_factory=list, compare=False)  # in which arguments came, of a stream


ENDS = {
    **dict.fromkeys(("stop", "end_turn", "completed"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "incomplete"), "length"),
    **dict.fromkeys(("tool_calls", "tool_use"), "call"),
}


def of_chat(told: Json) -> Said:
    """Of `/v1/chat/completions` and `/v1/completions`."""
    (choice,), usage = told["choices"], told.get("usage")
    message = choice.get("message") or {"content": choice["text"]}
    tokens = usage and (usage["prompt_tokens"], usage["completion_tokens"])
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls") or ()]
    end = ENDS[choice["finish_reason"]]
    return Said(message["content"] or "", message.get("reasoning_content", ""), calls, end, tokens)


def of_chat_stream(chunks: list[Json]) -> Said:
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    message: Json = {"content": "", "reasoning_content": "", "tool_calls": []}
    calls, parts, ends = message["tool_calls"], list[str](), list[str]()
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        for name in ("content", "reasoning_content"):
            message[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                calls.append({"function": dict(call["function"])})
            else:
                assert (call["index"], call.keys()) == (len(calls) - 1, {"index", "function"})
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
                parts.append(call["function"]["arguments"])
        ends += filter(None, [choice["finish_reason"]])
    (end,) = ends
    said = of_chat({"choices": [{"message": message, "finish_reason": end}], "usage": chunks[-1].get("usage")})
    return replace(said, parts=parts)


def of_text_stream(chunks: list[Json]) -> Said:
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    *texts, last = [choice for chunk in chunks for choice in chunk["choices"]]
    assert {choice["finish_reason"] for choice in texts} == {None}
    text = "".join(choice["text"] for choice in (*texts, last))
    return of_chat({"choices": [last | {"text": text}], "usage": chunks[-1].get("usage")})


def of_response(told: Json) -> Said:
    calls = [item for item in told["output"] if item["type"] == "function_call"]
    assert {call["status"] for call in calls} <= {told["status"]}
    texts = [
        "".join(part["text"] for item in told["output"] if item["type"] == kind for part in item["content"])
        for kind in ("message", "reasoning")
    ]
    usage, named = told["usage"], [(call["name"], call["arguments"]) for call in calls]
    end = "call" if calls and told["status"] == "completed" else ENDS[told["status"]]
    return Said(*texts, named, end, (usage["input_tokens"], usage["output_tokens"]))


def of_response_stream(events: list[Json]) -> Said:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    whole = events[-1]["response"]
    assert kinds[-1] == whole["status"]
    assert [event["item"] for event in events if event["type"].endswith("output_item.done")] == whole["output"]
    said = of_response(whole)

    def parts(kind: str) -> list[str]:
        return [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]

    assert ("".join(parts("output_text")), "".join(parts("reasoning_text"))) == (said.text, said.thought)
    ended = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [(event["name"], event["arguments"]) for event in ended] == said.calls
    return replace(said, parts=parts("function_call_arguments"))


def of_message(told: Json) -> Said:
    blocks, usage = told["content"], told["usage"]
    assert blocks  # clients take the first
    text, thought = ("".join(block[kind] for block in blocks if block["type"] == kind) for kind in ("text", "thinking"))
    calls = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return Said(text, thought, calls, ENDS[told["stop_reason"]], (prompt, usage["output_tokens"]))


def of_message_stream(events: list[Json]) -> Said:
    told, parts = events[0]["message"], list[str]()
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(told["content"])
                told["content"].append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                block, delta = told["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    block["json"] += delta["partial_json"]
                    parts.append(delta["partial_json"])
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                block = told["content"][event["index"]]
                if block["type"] == "tool_use":
                    block["input"] = values_of(block["json"])
            case "message_delta":
                told |= event["delta"] | {"usage": event["usage"]}
    assert events[-1] == {"type": "message_stop"}
    return replace(of_message(told), parts=parts)


def of_reply(told: Json) -> Said:
    """Of Ollama, whose stream is a reply a line."""
    return of_reply_stream([told])


def of_reply_stream(lines: list[Json]) -> Said:
    *more, end = lines
    assert [line["done"] for line in more] == [False] * len(more)
    assert (end["done"], end["load_duration"]) == (True, 0)
    assert 0 < end["eval_duration"] + end["prompt_eval_duration"] <= end["total_duration"] or not end["eval_count"]
    said = [line.get("message") or {"content": line["response"], "thinking": line.get("thinking")} for line in lines]
    calls = [call for each in said for call in each.get("tool_calls", ())]
    assert [call["function"]["index"] for call in calls] == list(range(len(calls)))
    named = [(call["function"]["name"], json.dumps(call["function"]["arguments"])) for call in calls]
    text, thought = ("".join(each.get(name) or "" for each in said) for name in ("content", "thinking"))
    reason = "call" if calls and end["done_reason"] == "stop" else end["done_reason"]
    return Said(text, thought, named, reason, (end["prompt_eval_count"], end["eval_count"]))


READERS = {
    "/v1/completions": (of_chat, of_text_stream),
    "/v1/chat/completions": (of_chat, of_chat_stream),
    "/v1/responses": (of_response, of_response_stream),
    "/v1/messages": (of_message, of_message_stream),
    "/api/chat": (of_reply, of_reply_stream),
    "/api/generate": (of_reply, of_reply_stream),
}


def values_of(arguments: str) -> Any:
    """Values of the JSON of arguments, which may be cut off within a text."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return json.loads(arguments + '"}')


def read(response: httpx.Response) -> Said:
    """What a response says. Its shape is checked by the way."""
    assert response.status_code == 200, response.text
    path, kind = response.request.url.path, response.headers["Content-Type"].partition(";")[0]
    whole, streamed = READERS[path]
    if kind == "application/json":
        return whole(response.json())
    if kind == "application/x-ndjson":
        return streamed([json.loads(line) for line in response.text.splitlines()])
    assert kind == "text/event-stream"
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    if path.endswith("/completions"):
        assert events.pop() == "[DONE]"
    return streamed([json.loads(event) for event in events])


def sent(stage: Stage, request: Json, **more: Any) -> Said:
    return read(stage.ask(request["path"], request["body"] | more, **request["headers"]))


# --- one model behind all ---


@pytest.mark.parametrize("name", sent_for("brief", "text", "turn", "raw"), ids="-".join)
def test_every_client_is_told_the_same(http: httpx.Client, name: tuple[str, str]) -> None:
    """What the prompt's text is continued by: the tiny model has no chat template."""
    asked = {"prompt": f"be brief\n{PROMPT}", "max_tokens": 6, "temperature": 0}
    plain = http.post("/v1/completions", json=asked).json()
    request = REQUESTS[name]
    said = read(http.post(request["path"], json=request["body"], headers=request["headers"]))
    tokens = plain["usage"]["prompt_tokens"], 6
    assert said == Said(plain["choices"][0]["text"], end="length", tokens=said.tokens and tokens)


def test_tokens_are_counted_as_they_are_read(http: httpx.Client) -> None:
    request = REQUESTS["anthropic", "count"]
    counted = http.post(request["path"], json=request["body"], headers=request["headers"]).json()
    assert counted == {
        "input_tokens": len(http.post("/tokenize", json={"prompt": f"be brief\n{PROMPT}"}).json()["tokens"])
    }


@pytest.mark.parametrize("name", sent_for("schema"), ids="-".join)
def test_an_answer_is_json_of_its_schema(http: httpx.Client, name: tuple[str, str]) -> None:
    request = REQUESTS[name]
    said = "".join(read(http.post(request["path"], json=request["body"], headers=request["headers"])).text.split())
    assert said  # blanks are up to the model
    assert any(whole.startswith(said) for whole in ('{"kind":"cat"}', '{"kind":"dog"}'))


# --- given answers ---


@pytest.mark.parametrize("name", sent_for("tools"), ids="-".join)
@pytest.mark.parametrize("channels", [False, True])
def test_thoughts_and_calls(stage: Stage, name: tuple[str, str], channels: bool) -> None:
    request = REQUESTS[name]
    if channels:
        call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}'
        thought = "<|channel|>analysis<|message|>Bonn, then.<|end|><|start|>assistant"
        worker = stage.says(thought + call, TEMPLATE + "{# <|channel|> #}")
    else:
        worker = stage.says(f"<think>Bonn, then.</think>I look.{CALL}{CALL}")
    said, count = sent(stage, request), 1 if channels else 2
    calls = [("weather", '{"city": "Bonn"}')] * count
    assert said == Said("" if channels else "I look.", "Bonn, then.", calls, "call", said.tokens)
    if said.parts:
        assert said.parts == list('{"city": "Bonn"}' * count)  # as they are written
    (asked,) = worker.asked
    assert bool(asked.special) is channels
    assert (asked.budget is not None) is ("budget_tokens" in request["body"].get("thinking", {}))
    assert stage.prompt == "<tool_call>weatheruser:how is it in Bonn;"


@pytest.mark.parametrize("name", sent_for("results"), ids="-".join)
def test_what_was_said_and_done_is_sent_back(stage: Stage, name: tuple[str, str]) -> None:
    stage.says(CALL)
    said = sent(stage, REQUESTS[name])
    none = name[0] in ("openai", "responses")  # none may be called
    tools = "" if none else "<tool_call>weather"
    thought = "" if name[0] == "langchain" else "<think>Bonn, then.</think>"
    quick = "quick" * (name[0] in ("anthropic", "ollama"))  # they ask for no thought
    result = f"tool{'weather' if name[0] == 'ollama' else ''}:sun;"
    assert stage.prompt == (f"{tools}user:how is it in Bonn;assistant:{thought}I look.(Bonn)(Bonn);{2 * result}{quick}")
    if none:
        assert (said.text, said.calls) == (CALL, [])


@pytest.mark.parametrize("name", sent_for("one"), ids="-".join)
def test_one_call_where_several_are_not_wanted(stage: Stage, name: tuple[str, str]) -> None:
    """The answer ends where the first call does."""
    worker = stage.says(CALL + CALL)
    more = {"stop_sequences": ["zz"]} if name[0] == "anthropic" else {}
    said = sent(stage, REQUESTS[name], **more)
    assert (said.calls, said.end) == ([("weather", '{"city": "Bonn"}')], "call")
    assert worker.asked[-1].stops == (*more.get("stop_sequences", ()), "</tool_call>")


@pytest.mark.parametrize("name", sent_for("forced"), ids="-".join)
def test_a_forced_call_that_is_cut_off(stage: Stage, name: tuple[str, str]) -> None:
    """The call with the arguments so far, nothing as text, and that the answer was too long."""
    stage.says(CALL.partition("nn")[0], finish="length")
    said = sent(stage, REQUESTS[name])
    ((function, arguments),) = said.calls
    assert (said.text, said.end, function, values_of(arguments)) == ("", "length", "weather", {"city": "Bo"})


@pytest.mark.parametrize("name", sent_for("brief", "turn"), ids="-".join)
@pytest.mark.parametrize(("thought", "text"), [("", ""), ("so", "I look.")])
def test_an_answer_may_be_empty_or_have_a_thought(stage: Stage, name: tuple[str, str], thought: str, text: str) -> None:
    stage.says(f"<think>{thought}</think>{text}" if thought else text)
    said = sent(stage, REQUESTS[name])
    assert said == Said(text, thought, end="stop", tokens=said.tokens)


@pytest.mark.parametrize(
    "name", [name for name in sent_for("brief", "text", "turn") if "stream" in name[1]], ids="-".join
)
def test_an_error_amid_a_stream_is_told(stage: Stage, name: tuple[str, str]) -> None:
    worker = stage.says("ab")
    worker.pieces[1:] = [replace(worker.pieces[1], text="", finish="error", error=OSError("the drive has gone"))]
    request = REQUESTS[name]
    told = stage.ask(request["path"], request["body"], **request["headers"]).text
    assert told.rstrip().splitlines()[-1].count("the drive has gone") == 1
    assert "[DONE]" not in told


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
def test_system_messages_may_come_anywhere(stage: Stage, template: str, prompt: str) -> None:
    """Claude Code sends them among the others, Codex several at the beginning."""
    said = [("system", "be brief"), ("system", "be kind"), ("user", "a"), ("system", "no jokes")]
    messages = [{"role": role, "content": text} for role, text in said]
    stage.says("so", template)
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/messages", {"messages": messages[1:], "system": "be brief", "max_tokens": 9}),
    ):
        assert stage.ask(path, body).status_code == 200
        assert stage.prompt == prompt


def test_a_stop_string_is_named(http: httpx.Client) -> None:
    body = REQUESTS["anthropic", "brief"]["body"]
    stop = http.post("/v1/messages", json=body).json()["content"][0]["text"][2:4]
    stopped = http.post("/v1/messages", json=body | {"stop_sequences": ["never", stop]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)


# --- clients, by themselves ---


def test_published_clients_read_what_they_are_told(address: str) -> None:
    """Whole, streamed and refused."""
    said: Any = [{"role": "user", "content": PROMPT}]
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client,
        anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0) as claude,
        ollama.Client(address, headers={"Authorization": f"Bearer {KEY}"}) as llama,
        ollama.Client(address) as stranger,
    ):
        chat: Any = client.chat.completions.create(model="tiny", messages=said, temperature=0, max_tokens=6)
        response = client.responses.create(model="tiny", input=PROMPT, temperature=0, max_output_tokens=6)
        asked: Any = {"model": "tiny", "messages": said, "max_tokens": 6, "extra_body": {"temperature": 0}}
        with claude.messages.stream(**asked) as stream:
            text, message = "".join(stream.text_stream), stream.get_final_message()
        options = {"temperature": 0, "num_predict": 6}
        reply = llama.chat("tiny", said, options=options)
        streamed = "".join(
            each.message.content or "" for each in llama.chat("tiny", said, options=options, stream=True)
        )
        found = [chat.choices[0].message.content, response.output_text, text, message.content[0].text]  # type: ignore[union-attr]
        assert {*found, reply.message.content, streamed} == {found[0]}
        assert message.stop_reason == "max_tokens"
        (model,), (listed,) = claude.models.list(), llama.list().models
        assert (model.id, model.display_name, model.type, listed.model) == ("tiny", "tiny", "model", "tiny")
        with pytest.raises(ollama.ResponseError) as refused:
            stranger.list()
        assert (refused.value.status_code, refused.value.error) == (401, "the API key is missing or wrong")
        with pytest.raises(anthropic.NotFoundError, match="this server has 'tiny'"):
            claude.messages.create(**{**asked, "model": "other"})
    with running(StartupApp()) as early, ollama.Client(early) as llama, pytest.raises(ollama.ResponseError) as loading:
        llama.list()
    assert loading.value.status_code == 503
    assert "being loaded" in loading.value.error


# --- Ollama's own ---


def ollamas(http: httpx.Client, path: str, **more: Any) -> Json:
    found: Json = http.post(f"/api/{path}", json={"model": "tiny", "stream": False, **more}).raise_for_status().json()
    return found


def test_ollamas_options_are_those_of_the_sampling(http: httpx.Client) -> None:
    def answer(**options: Any) -> str:
        told = ollamas(http, "generate", prompt=PROMPT, raw=True, options={"num_predict": 12, **options})
        return str(told["response"])

    def same(**more: Any) -> str:
        told = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 12, **more}).json()
        return str(told["choices"][0]["text"])

    greedy = answer(temperature=0)
    for theirs, ours in (
        ({"temperature": 1.5, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01}, None),
        ({"temperature": 1.5, "seed": 3, "top_k": -1}, {"temperature": 1.5, "seed": 3}),
        ({"temperature": 0, "repeat_penalty": 100, "repeat_last_n": -1}, {"temperature": 0, "repetition_penalty": 100}),
        ({"temperature": 0, "repeat_penalty": 100}, None),
        ({"temperature": 0, "repeat_penalty": 100, "repeat_last_n": 2}, None),
        ({"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 2.0}, None),
    ):
        assert answer(**theirs) == same(**(ours or theirs)), theirs
    assert answer(temperature=1, top_k=1) == greedy
    assert len({answer(temperature=9, seed=-1) for _ in range(3)}) > 1  # no seed
    stop = greedy[3:5]
    for stops in (stop, [stop, "never"]):
        assert answer(temperature=0, stop=stops) == greedy[: greedy.index(stop)]
    passed: Any = {"num_ctx": 32, "num_batch": 512, "num_gpu": 0, "mirostat": 0, "typical_p": 1.0, "num_keep": 4}
    assert answer(temperature=0, repeat_penalty=1.0, repeat_last_n=64, **passed) == greedy
    told = http.post("/api/generate", json={"model": "tiny", "stream": False, "prompt": PROMPT, "raw": True,
        "options": {"temperature": 0, "num_predict": 12}, "truncate": False, "shift": False})  # fmt: skip
    assert told.json()["response"] == greedy
    for length in (-1, -2, 0):  # the context
        told = ollamas(http, "generate", prompt=PROMPT, raw=True, options={"num_predict": length})
        assert told["prompt_eval_count"] + told["eval_count"] == 64


def test_log_probabilities_are_openais(http: httpx.Client) -> None:
    body = REQUESTS["openai", "brief"]["body"] | {"logprobs": True, "top_logprobs": 2}
    theirs = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    asked = {"messages": body["messages"], "options": {"temperature": 0, "num_predict": 6}, "logprobs": True}
    found = ollamas(http, "chat", top_logprobs=2, **asked)["logprobs"]
    assert [(each["token"], each["logprob"]) for each in found] == [(e["token"], e["logprob"]) for e in theirs]
    assert [len(each["top_logprobs"]) for each in found] == [2] * 6
    lines = http.post("/api/chat", json={"model": "tiny", **asked}).text.splitlines()  # a stream is the default
    assert [e["token"] for line in lines for e in json.loads(line).get("logprobs", ())] == [e["token"] for e in found]
    response = http.post("/v1/responses", json=REQUESTS["responses", "brief"]["body"] | {
        "top_logprobs": 2, "include": ["message.output_text.logprobs"]}).json()  # fmt: skip
    assert [e["token"] for e in response["output"][0]["content"][0]["logprobs"]] == [e["token"] for e in found]


def test_what_front_ends_ask_about_the_model(http: httpx.Client, stage: Stage) -> None:
    (listed,), (loaded,) = (http.get(f"/api/{path}").json()["models"] for path in ("tags", "ps"))
    assert (listed["model"], len(listed["digest"])) == ("tiny", 64)
    assert (loaded["digest"], loaded["context_length"]) == (listed["digest"], 64)
    shown = ollamas(http, "show", name="tiny:latest")
    info = shown["model_info"]
    assert info[f"{info['general.architecture']}.context_length"] == 64
    assert "num_ctx 64" in shown["parameters"]
    assert (shown["capabilities"], shown["details"]) == (["completion"], listed["details"])
    numbers = [int(part) for part in http.get("/api/version").json()["version"].split(".")]
    assert numbers >= [0, 6, 4]  # VS Code asks for it
    for path in ("generate", "chat"):
        assert ollamas(http, path, keep_alive=0)["done_reason"] == "load"
    stage.says("")
    assert stage.ask("/api/show", {"model": "tiny"}).json()["capabilities"] == ["completion", "tools", "thinking"]


@pytest.mark.parametrize("path", ["/", "/api/tags", "/api/version", "/health", "/v1/models", "/props"])
def test_what_can_be_got_has_a_head(http: httpx.Client, path: str) -> None:
    """Ollama's clients ask by HEAD whether a server is there, and by `/`, which browsers get a page from."""
    whole, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["Content-Type"] == whole.headers["Content-Type"]
    assert http.head("/api/chat").status_code == 405
    assert http.get("/").text == "Ollama is running"
    assert http.get("/", headers={"Accept": "text/html,*/*;q=0.8"}).headers["Content-Type"].startswith("text/html")


# --- what is refused ---


def messages(content: Any) -> Json:
    return {"messages": [{"role": "user", "content": content}]}


WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
REFUSALS: list[tuple[str, Json, str]] = [
    ("/v1/messages", {"tools": [{"name": "a", "input_schema": {}}]}, "tools"),
    ("/v1/messages", {"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools"),
    ("/v1/messages", {"tool_choice": {"type": "tool"}}, "needs name"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1023}}, "greater than or equal to 1024"),
    ("/v1/messages", {"mcp_servers": [{"url": "a"}]}, "mcp_servers is not supported"),
    ("/v1/messages", {"messages": [{"role": "tool", "content": "a"}]}, "user"),
    ("/v1/messages", messages([{"type": "image", "source": {}}]), "text alone, no image"),
    ("/v1/messages", messages([{"type": "document", "source": {}}]), "text alone, no document"),
    ("/v1/messages", {"min_p": 0.1}, "min_p is not supported"),
    ("/v1/messages", {"stop": ["a"]}, "use stop_sequences"),
    ("/v1/messages", messages([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}]),
     "text alone, no image"),
    ("/v1/messages", messages("a " * 99), "the prompt is too long"),
    ("/v1/messages", {"output_format": {"type": "json_schema", "schema": {"type": "nonsense"}}}, "nonsense"),
    ("/v1/responses", {"previous_response_id": "resp_1"}, "keeps no responses"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "a"}]}, "store: false"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
     "reads text alone, no input_image"),
    ("/v1/responses", {"input": []}, "at least 1"),
    ("/v1/responses", {"tools": [{"type": "function"}]}, "required"),
    ("/v1/responses", {"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "no format of tool calls"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema"}}}, "schema"),
    ("/v1/responses", {"logit_bias": {"5": 1}}, "not supported"),
    ("/v1/responses", {"max_tokens": 5}, "use max_output_tokens"),
    ("/v1/responses", {"temperature": -1}, "greater"),
    ("/api/chat", {"mcp": True}, "mcp is not supported"),
    ("/api/chat", {"options": {"mirostat": 2}}, "mirostat is not supported"),
    ("/api/chat", {"options": {"temperature": -1}}, "options.temperature"),
    ("/api/chat", {"options": {"num_ctx": 65}}, "num_ctx is 65, and this server's context has 64 tokens"),
    ("/api/chat", {"options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
    ("/api/chat", {"think": True}, "'tiny' does not support thinking"),
    ("/api/chat", {"top_logprobs": 2}, "needs logprobs"),
    ("/api/chat", {"tools": [WEATHER]}, "no format of tool calls"),
    ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, "text alone, no images"),
    ("/api/chat", messages("a " * 99), "the prompt is too long"),
    ("/api/chat", {"format": {"type": "nonsense"}}, "nonsense"),
    ("/api/generate", {"context": [1, 2]}, "context is not supported"),
    ("/api/generate", {"suffix": "b"}, "suffix is not supported"),
    ("/api/generate", {"template": "b"}, "template is not supported"),
    ("/api/generate", {"raw": True, "system": "b"}, "no system message"),
    ("/api/embed", {"input": "a"}, "has no embeddings"),
    ("/api/embeddings", {"prompt": "a"}, "has no embeddings"),
    ("/v1/embeddings", {"input": "a"}, "has no embeddings"),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, "no reranking"),
    ("/rerank", {}, "no reranking"),
]  # fmt: skip
ASKED: dict[str, Json] = {
    "/v1/messages": {**messages("a"), "max_tokens": 6},
    "/v1/responses": {"input": "a"},
    "/api/chat": messages("a"),
    "/api/generate": {"prompt": "a"},
}


@pytest.mark.parametrize(("path", "change", "why"), REFUSALS)
def test_refusals_have_the_dialects_shape(http: httpx.Client, path: str, change: Json, why: str) -> None:
    answer = http.post(path, json={**ASKED.get(path, {}), **change})
    told = answer.json()
    assert answer.status_code == 400
    if path.startswith("/api/"):
        assert list(told) == ["error"]
        told = {"error": {"message": told["error"]}}
    elif path == "/v1/messages":
        assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    elif path == "/v1/responses":
        assert told["error"]["param"] == next(iter(change))
    assert why in told["error"]["message"]


@pytest.mark.parametrize("path", [*ASKED, "/v1/chat/completions", "/api/show"])
def test_another_model_is_not_there(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={**ASKED.get(path, messages("a")), "model": "other"})
    assert answer.status_code == 404
    assert "this server has 'tiny'" in answer.text


@pytest.mark.parametrize(("path", "kind"), [("/v1/chat/completions", "server_error"), ("/v1/messages", "api_error")])
def test_what_nobody_foresaw_has_the_dialects_shape(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, path: str, kind: str
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("torn")

    stage.says("")
    monkeypatch.setattr(Served, "check_model", fails)
    response = stage.ask(path, {**messages("a"), "max_tokens": 1})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["message"]) == (500, kind, "RuntimeError: torn")
