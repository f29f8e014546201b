"""OpenAI's API over HTTP: sampling, scores, constraints, turns that go on, what is refused, and what the server says of
itself. Shapes of answers are in `test_dialects`."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.load import counters_broken, metrics, settled
from benchmarks.load_clients import Clients
from chat_templates import OWN
from commands import Command
from patience import PATIENCE_S
from serving import CALL, KEY, TEMPLATE, Scripted, Stage, call_app, running, use_template
from tiermoe.batch import Batch
from tiermoe.batch import prompt as row
from tiermoe.engine.engine import Engine
from tiermoe.engine.request import Piece, TokenLogprob
from tiermoe.engine.sampling import Grammar
from tiermoe.model.tokenizer import load_tokenizer
from tiermoe.offload.scheduler import Scheduler
from tiermoe.serve.app import create_app
from tiermoe.serve.served import Served

Json = dict[str, Any]
PROMPT = "once upon a time"
ASKED: Json = {"role": "user", "content": "a"}


@pytest.fixture
def complete(http: httpx.Client) -> Callable[..., Any]:
    """Fields of a completion → the answer, which is greedy and has 8 tokens where they say nothing else."""

    def answer(**fields: Any) -> Json:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}
        told: Json = http.post("/v1/completions", json=body).raise_for_status().json()
        return told

    return answer


@pytest.fixture
def text(complete: Callable[..., Any]) -> Callable[..., str]:
    """Fields of a completion → its text."""
    return lambda **fields: complete(**fields)["choices"][0]["text"]


@pytest.fixture
def chat(http: httpx.Client) -> Callable[..., Any]:
    """Messages and fields of a chat → the choices of the answer, which is greedy."""

    def choices(messages: Any = PROMPT, **fields: Any) -> Any:
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        body = {"messages": said, "temperature": 0, **fields}
        return http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"]

    return choices


def error_of(response: httpx.Response, status: int = 400) -> Json:
    assert response.status_code == status, response.text
    error: Json = response.json()["error"]
    return error


# --- sampling and scores ---


def test_prompts_and_choices(complete: Callable[..., Any], text: Callable[..., str], served: Served) -> None:
    assert text(prompt=served.tokenizer(PROMPT).input_ids) == text()
    assert text(echo=True) == PROMPT + text()
    asked: Any = {"prompt": [PROMPT, "the king"], "n": 2, "seed": 3, "temperature": 1.0}
    answer, again = complete(**asked), complete(**asked)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in again["choices"]]


def test_a_completion_without_a_length_is_short(http: httpx.Client, chat: Callable[..., Any]) -> None:
    asked = {"prompt": PROMPT, "temperature": 0}
    assert http.post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 16
    body = {"messages": [ASKED], "temperature": 0}
    assert http.post("/v1/chat/completions", json=body).json()["usage"]["total_tokens"] == 64  # the context


def test_sampling_is_what_is_asked_for(complete: Callable[..., Any], text: Callable[..., str], served: Served) -> None:
    whole = text()
    token = served.tokenizer(whole).input_ids[0]
    assert text(temperature=1.0, top_k=1) == text(temperature=1.0, min_p=1.0) == whole
    only = text(logit_bias={str(token): 100.0})
    assert len(set(served.tokenizer(only).input_ids)) == 1
    # 8 tokens cannot outweigh a hundred
    assert text(logit_bias={str(token): 100.0}, presence_penalty=2.0, frequency_penalty=2.0) == only
    assert text(stop=[whole[2:4]]) == whole[: whole.index(whole[2:4])]
    few: Any = {"logit_bias": {str(token): 3.0 for token in (40, 41)}, "logprobs": 0, "max_tokens": 12}
    repeated, penalised = (
        complete(**few, frequency_penalty=penalty)["choices"][0]["logprobs"]["tokens"] for penalty in (0, 2)
    )
    assert len(set(penalised)) > len(set(repeated))


def test_minus_one_is_no_limit_and_a_top_p_of_nothing_the_likeliest_token(
    complete: Callable[..., Any], text: Callable[..., str], chat: Callable[..., Any]
) -> None:
    assert text(temperature=1.5, top_p=0, seed=1) == text()
    told = complete(max_tokens=-1)
    assert (told["usage"]["total_tokens"], told["choices"][0]["finish_reason"]) == (64, "length")
    for name in ("max_tokens", "max_completion_tokens"):
        assert [choice["message"] for choice in chat(**{name: -1})] == [choice["message"] for choice in chat()]


def test_a_prompt_is_read_afresh_where_no_cache_is_wanted(complete: Callable[..., Any]) -> None:
    first, again = complete(max_tokens=1), complete(max_tokens=1)
    fresh = complete(max_tokens=1, cache_prompt=False)
    cached = [told["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0) for told in (again, fresh)]
    assert cached[0] > 0 == cached[1]
    assert first["choices"][0]["text"] == fresh["choices"][0]["text"]


def test_prefixes_are_shared_among_requests_of_one_salt(complete: Callable[..., Any]) -> None:
    def cached(**more: Any) -> int:
        told = complete(prompt="salt and pepper", max_tokens=1, **more)["usage"]
        found: int = told.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return found

    cached()
    assert cached() > 0
    assert cached(cache_salt="a") == cached(cache_salt="b") == 0
    assert cached(cache_salt="a") > 0
    assert cached() > 0


def test_fields_that_change_nothing_may_be_there(text: Callable[..., str]) -> None:
    """Those of clients and gateways, and samplers where they are switched off."""
    passed: Json = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "stream_options": None, "prompt_cache_key": "k",
        "cache_prompt": False, "repeat_penalty": 1.0, "repeat_last_n": 64, "typical_p": 1, "mirostat": 0,
        "mirostat_tau": 5.0, "dry_multiplier": 0, "dry_base": 1.75, "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0.0, "xtc_threshold": 0.1, "top_n_sigma": -1, "ignore_eos": False,
        "repetition_penalty": 1.0, "grammar": "", "json_schema": None,
    }  # fmt: skip
    assert text(**passed) == text()


def test_what_a_grammar_forbids_has_a_log_probability_that_json_can_say(http: httpx.Client) -> None:
    """OpenAI's -9999.0: minus infinity is no JSON."""
    asked = {"response_format": {"type": "json_object"}, "max_tokens": 3, "temperature": 0}
    said = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 20}
    chat = http.post("/v1/chat/completions", json=asked | said)
    text = http.post("/v1/completions", json=asked | {"prompt": PROMPT, "logprobs": 20})
    assert "Infinity" not in chat.text + text.text
    first, *_ = entries = chat.json()["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [20] * 3
    assert (first["token"], first["logprob"], first["top_logprobs"][-1]["logprob"]) == ("{", 0, -9999)
    assert sorted(set(text.json()["choices"][0]["logprobs"]["top_logprobs"][0].values())) == [-9999, 0]


def test_parts_of_characters_have_their_own_bytes(served: Served, shipped: Path) -> None:
    tokenizer = load_tokenizer(shipped)
    worker: Any = Scripted(served, "")
    tokens = tokenizer("a… é🚀").input_ids
    worker.pieces[:0] = [Piece(1, "", (token,), (TokenLogprob(token, -1.0, [(token, -1.0)]),)) for token in tokens]
    app = create_app(replace(served, worker=worker, tokenizer=tokenizer))
    asked = {"messages": [ASKED], "logprobs": True, "top_logprobs": 1}
    chat = call_app(app, "/v1/chat/completions", asked).json()["choices"][0]["logprobs"]["content"]
    text = call_app(app, "/v1/completions", {"prompt": PROMPT, "logprobs": 1}).json()["choices"][0]["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in chat) == "a… é🚀".encode()
    assert [entry["top_logprobs"][0]["bytes"] for entry in chat] == [entry["bytes"] for entry in chat]
    assert [entry["token"] for entry in chat] == text["tokens"]
    assert text["tokens"][:4] == ["a", r"bytes:\xe2\x80", r"bytes:\xa6", " "]
    assert text["text_offset"][:5] == [0, 1, 1, 2, 3]
    assert [*text["top_logprobs"][1]] == [r"bytes:\xe2\x80"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_a_prompt_is_scored(http: httpx.Client, served: Served, tokens: int, stream: bool) -> None:
    """What lm-eval's `local-completions` asks for, by token ids. The oracle: a step of the engine by itself, over the
    tokens that its class for models in the process reads."""
    prompts = [[5, 6, 7, 8, 9, 30], [40, 41, 42]]
    asked = {"prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": tokens, "seed": 1234, "temperature": 0}
    if stream:
        body = asked | {"stream": True, "stream_options": {"include_usage": True}}
        events = http.post("/v1/completions", json=body).text.split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    else:
        chunks = [http.post("/v1/completions", json=asked).json()]
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * tokens
    for index, prompt in enumerate(prompts):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        scores, tops, names = (
            [each for choice in choices if choice["logprobs"] for each in choice["logprobs"][name]]
            for name in ("token_logprobs", "top_logprobs", "tokens")
        )
        cache = served.engine.new_cache(1)
        logits = served.engine.step(Batch((row(cache.open(), prompt[:-1]),)), cache, True)
        logs = torch.log_softmax(logits.double(), -1)
        assert (scores[0], tops[0], len(scores)) == (None, None, len(prompt) + tokens)
        assert scores[1 : len(prompt)] == [float(logs[at, token]) for at, token in enumerate(prompt[1:])]
        assert [max(top.values()) for top in tops[1 : len(prompt)]] == logs.max(-1).values.tolist()
        assert "".join(choice["text"] for choice in choices).startswith(served.tokenizer.decode(prompt))
        assert names[: len(prompt)] == [served.tokenizer.decode([token]) for token in prompt]


# --- constraints ---


def schema_format(schema: Json) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}}


def nested(depth: int) -> Json:
    schema: Json = {"type": "integer"}
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
def test_a_schema_beyond_the_limits_is_refused(http: httpx.Client, schema: Any, said: str) -> None:
    asked = {"prompt": PROMPT, "response_format": schema_format(schema)}
    error = error_of(http.post("/v1/completions", json=asked))
    assert error["param"] == "response_format"
    assert said in error["message"]
    assert "\n" not in error["message"]


def test_a_step_of_a_grammar_beyond_the_limits_ends_its_answer(
    http: httpx.Client, served: Served, complete: Callable[..., Any]
) -> None:
    """It is found behind the first of two ways, which no trial need have taken."""
    schema = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^(a?){5000}a{5000}$"}]}
    bias = {str(served.tokenizer('"').input_ids[0]): 100}
    asked = {"prompt": PROMPT, "temperature": 0, "logit_bias": bias, "response_format": schema_format(schema)}
    error = error_of(http.post("/v1/completions", json=asked), 500)
    assert "any further: lexer error: too many expressions" in error["message"]
    assert complete()["choices"][0]["finish_reason"] == "length"


def followed(served: Served, grammar: Grammar, text: str) -> bool:
    """Whether a grammar lets a text pass, to its end."""
    for token in served.tokenizer(text, add_special_tokens=False).input_ids:
        if grammar.restrict(torch.zeros(128))[token] != 0:
            return False
        grammar.accept(token)
    return grammar.ended


WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OTHER: Any = {"type": "function", "function": {"name": "other"}}


@pytest.mark.parametrize(("choice", "names"), [("required", ("weather", "other")), (OTHER, ("other",))])
def test_a_call_is_forced(served: Served, stage: Stage, choice: Any, names: tuple[str, ...]) -> None:
    worker = stage.says("look</think>" + CALL, TEMPLATE + "<think>{% if 0 %}</think>{% endif %}")
    asked = {"messages": [ASKED], "tools": [WEATHER, OTHER], "n": 4}
    answer = stage.ask("/v1/chat/completions", asked | {"tool_choice": choice}).json()["choices"][0]
    assert (answer["message"]["reasoning_content"], answer["finish_reason"]) == ("look", "tool_calls")
    *grammars, last = [each.grammar for each in worker.asked]
    for grammar, name in zip(grammars, ("weather", "other", "third"), strict=True):
        text = 'well</think>\n<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'.replace("NAME", name)
        assert followed(served, grammar, text) is (name in names)
    assert not followed(served, last, "well</think>hello")
    third = {"tool_choice": {"type": "function", "function": {"name": "third"}}}
    assert "not among the tools" in error_of(stage.ask("/v1/chat/completions", asked | third))["message"]


# --- many at once ---


def test_many_at_once_get_what_each_gets_alone(address: str, text: Callable[..., str]) -> None:
    prompts = [[3 + n, 5, 9 + n] for n in range(8)]

    async def all_of_them() -> list[str]:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=address, headers=headers, timeout=PATIENCE_S) as client:
            bodies = [{"prompt": prompt, "temperature": 0, "max_tokens": 6} for prompt in prompts]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        return [answer.json()["choices"][0]["text"] for answer in answers]

    assert asyncio.run(all_of_them()) == [text(prompt=prompt, max_tokens=6) for prompt in prompts]


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


# --- an assistant's message at the end ---


TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
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
def test_an_assistant_s_message_at_the_end_is_continued(stage: Stage, path: str, body: Json, prompt: str) -> None:
    stage.says("so on", TURNS)
    assert stage.ask(f"/v1/{path}", body).status_code == 200
    assert stage.prompt == prompt


THINKING = (
    "{% for m in messages %}[{{ m.role }}]{% if m.thinking %}BEGIN{{ m.thinking }}END{% endif %}{{ m.content }}"
    "{% endfor %}"
)
CUTS_THOUGHTS = THINKING.replace("m.thinking %}", "m.thinking and not loop.last %}")
CUTS_TEXTS = TURNS.replace("m.content", "m.content.split('|')[0]")
THOUGHT = [ASKED, {"role": "assistant", "reasoning_content": "hm"}]
CALLED = [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]


@pytest.mark.parametrize(
    ("template", "body", "param", "why"),
    [
        (TURNS, {"messages": [ASKED], "continue_final_message": True}, "continue_final_message", "needs an assistant"),
        (TURNS, {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message", "excludes"),
        (TURNS, {"messages": [ASKED], "add_generation_prompt": False}, "add_generation_prompt",
         "a message to continue"),
        (TURNS, {"messages": BEGUN, "response_format": {"type": "json_object"}}, "messages",
         "cannot follow response_format"),
        (TURNS, {"messages": CALLED}, "messages", "send their results"),
        # else the model would continue another prompt
        (TURNS, {"messages": THOUGHT}, "messages", "leaves out the thought that"),
        (CUTS_THOUGHTS, {"messages": THOUGHT, "continue_final_message": True}, "messages", "leaves out the thought"),
        (None, {"messages": THOUGHT}, "messages", "leaves out the thought"),
        (CUTS_TEXTS, {"messages": [ASKED, {"role": "assistant", "content": "Once | upon"}]}, "messages",
         "leaves out the text that"),
    ],
)  # fmt: skip
def test_what_cannot_be_continued(stage: Stage, template: str | None, body: Json, param: str, why: str) -> None:
    stage.says("", template)
    error = error_of(stage.ask("/v1/chat/completions", body))
    assert error["param"] == param
    assert why in error["message"]
    assert stage.ask("/v1/chat/completions", {"messages": [ASKED]}).status_code == 200


def test_a_continued_answer_is_the_rest_of_the_whole_one(
    chat: Callable[..., Any], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(monkeypatch, served, TURNS)

    def answer(tokens: int, *begun: Any) -> str:
        text: str = chat([ASKED, *begun], max_tokens=tokens)[0]["message"]["content"]
        return text

    whole, begun = answer(9), answer(4)
    assert begun + answer(5, {"role": "assistant", "content": begun}) == whole


TAGS = ("<think>", "</think>")
CHANNELS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")


@pytest.mark.parametrize(
    ("template", "begun", "thought", "content"),
    [
        (TURNS + "<think>{% if 0 %}</think>{% endif %}", "<think>hm", "a", "b"),
        (TURNS + "<think>{% if 0 %}</think>{% endif %}", "<think>hm</think>so", "", "a</think>b"),
        (TURNS + "{% if 0 %}<|channel|>{% endif %}", "so", "", "a</think>b"),
    ],
)
def test_an_answer_goes_on_within_a_thought_or_behind_it(
    stage: Stage, template: str, begun: str, thought: str, content: str
) -> None:
    stage.says("a</think>b", template)
    body = {"messages": [ASKED, {"role": "assistant", "content": begun}]}
    told = stage.ask("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert (told.get("reasoning_content", ""), told["content"]) == (thought, content)


@pytest.mark.parametrize(("begin", "end"), [TAGS, CHANNELS])
def test_a_thought_without_an_answer_is_continued(stage: Stage, begin: str, end: str) -> None:
    """Where it ended: a line break that comes next is part of it."""
    stage.says(f"\na{end}b", THINKING.replace("BEGIN", begin).replace("END", end))
    message = stage.ask("/v1/chat/completions", {"messages": THOUGHT}).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("\na", "b")
    assert stage.prompt == f"[user]a[assistant]{begin}hm"
    begun = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]}
    told = stage.ask("/v1/messages", {"messages": [ASKED, begun], "max_tokens": 9}).json()
    assert [block.get("thinking") or block["text"] for block in told["content"]] == ["\na", "b"]
    assert stage.prompt == f"[user]a[assistant]{begin}hm"


# --- prompts and thoughts ---


def test_a_stream_tells_how_far_the_prompt_is_read(http: httpx.Client) -> None:
    """Where that is asked for: the second time, most of it did not have to be read."""

    def progress(**more: Any) -> list[Json]:
        body = {"messages": [{"role": "user", "content": "how far is it read"}], "max_tokens": 3, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **more}
        events = http.post("/v1/chat/completions", json=body).text.split("\n\n")
        *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
        told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert not any("prompt_progress" in chunk for chunk in chunks if chunk["choices"][0]["delta"].get("content"))
        assert {each["total"] for each in told} <= {last["usage"]["prompt_tokens"]}
        assert {each["cache"] for each in told} <= {last["usage"]["prompt_tokens_details"]["cached_tokens"]}
        return told

    assert progress() == progress(return_progress=False) == []
    (told,) = progress(return_progress=True)
    assert 0 < told["cache"] < told["processed"] == told["total"]
    assert told["time_ms"] >= 0


@pytest.mark.parametrize("field", ["reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"])
def test_a_thought_ends_with_its_budget(
    http: httpx.Client, chat: Callable[..., Any], served: Served, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Its text is the beginning of what the model thinks without one; then the answer begins."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>{% if 0 %}</think>{% endif %}"
    use_template(monkeypatch, served, template)
    (free,) = chat("a", max_tokens=20, logprobs=True, **{field: -1})
    assert not free["message"]["content"]
    for budget in (0, 3):
        message = chat("a", max_tokens=20, **{field: budget})[0]["message"]
        thought = "".join(each["token"] for each in free["logprobs"]["content"][:budget])
        assert (message.get("reasoning_content", ""), message["content"] != "") == (thought, True)
    error = error_of(http.post("/v1/chat/completions", json={"messages": [ASKED], field: -2}))
    assert error["param"] == field
    assert "greater than or equal to -1" in error["message"]


def test_a_model_without_thoughts_passes_over_their_budget(http: httpx.Client, chat: Callable[..., Any]) -> None:
    """Agents send one always."""
    plain, budgeted = (chat("a", max_tokens=4, **more) for more in ({}, {"reasoning_budget_tokens": 1}))
    body = {"messages": [ASKED], "max_tokens": 4, "temperature": 0}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    message = http.post("/v1/messages", json=body | thinking).json()["content"][0]["text"]
    assert [plain[0]["message"]["content"], budgeted[0]["message"]["content"]] == [message] * 2


@pytest.mark.parametrize(("more", "quick"), [({"reasoning_budget_tokens": 0}, "quick"), ({}, "")])
def test_a_budget_of_nothing_asks_the_template_for_no_thought(stage: Stage, more: Json, quick: str) -> None:
    stage.says("", "a{% if enable_thinking is false %}quick{% endif %}</think>")
    assert stage.ask("/v1/chat/completions", {"messages": [ASKED], **more}).status_code == 200
    assert stage.prompt == f"a{quick}</think>"


# --- what is refused, and what fails ---


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
        {"type": "function", "function": {"name": "f"}}]}, 400, "tools", "no format of tool calls that is known"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:,"}}]}]}, 400, "messages", "reads text alone, no image_url"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400,
     "top_logprobs", "logprobs=true"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}, 400,
     "tool_choice", "there are no tools"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens", "no token -1"),
    ("/tokenize", {}, 400, "prompt", "either"),
    ("/tokenize", {"prompt": "a", "content": "a"}, 400, "prompt", "either"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -2}, 400, "max_tokens", "greater"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}, 400, "max_tokens",
     "-1 is as many"),
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


# --- what the server says of itself ---


def numbers_of(http: httpx.Client) -> dict[str, float]:
    """What `/metrics` says."""
    lines = [line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line[0] != "#"]
    return {name: float(value) for name, value in lines}


def test_models_tokens_and_metrics(http: httpx.Client, complete: Callable[..., Any]) -> None:
    complete()
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], http.get("/v1/models/tiny").json()["max_model_len"]) == ("tiny", 64)
    tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"].strip() == PROMPT
    assert http.post("/tokenize", json={"messages": [ASKED | {"content": PROMPT}]}).json()["count"] >= len(tokens)
    numbers = numbers_of(http)
    theirs = {"content": PROMPT, "add_special": True}  # llama-server's
    assert http.post("/tokenize", json=theirs).json() == {"tokens": tokens}
    pieces = http.post("/tokenize", json=theirs | {"with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    assert "".join(piece["piece"] for piece in pieces).replace(" ", "").endswith(PROMPT.replace(" ", ""))
    assert http.post("/detokenize", json={"tokens": tokens}).json()["content"].strip() == PROMPT
    assert numbers["tiermoe:generation_tokens_total"] >= 8
    assert numbers['tiermoe:request_success_total{finished_reason="length"}'] >= 1
    assert 0 < numbers["tiermoe:kv_cache_usage_perc"] <= 1
    assert 0 < numbers["tiermoe:resident_memory_bytes"] <= numbers["tiermoe:resident_memory_peak_bytes"]
    assert numbers["tiermoe:expert_cache_evictions_total"] == 0  # all are in memory
    stats = http.get("/stats").json()
    assert stats["expert_hits"] > 0
    assert stats["other_budgets"] == []
    assert (stats["rows"], stats["running"], stats["generated_tokens"] >= 8) == (4, 0, True)
    layers = http.get("/experts").json()["layers"]
    assert [len(layer["bits"]) for layer in layers] == [8, 8, 8]
    assert {bits for layer in layers for bits in layer["bits"]} == {16}
    assert all(len(layer["uses"]) == len(layer["arriving"]) == 8 for layer in layers)
    assert "/v1/completions" in http.get("/openapi.json").json()["paths"]


def test_the_dashboard_asks_for_what_is_there(http: httpx.Client, complete: Callable[..., Any]) -> None:
    complete()
    panels = json.loads((Path(__file__).parents[1] / "docs" / "grafana.json").read_text())["panels"]
    terms = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for term in terms for name in re.findall(r"tiermoe:\w+", term)}
    known = {name.partition("{")[0] for name in numbers_of(http)}
    assert asked - known == {"tiermoe:prefix_disk_read_bytes_total"}  # no prefixes on disk here


def test_policies_learn_in_the_thread_of_the_steps_alone(
    http: httpx.Client, complete: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    record = Scheduler.record_hits

    def recorded(self: Scheduler) -> None:
        threads.add(threading.current_thread().name)
        record(self)

    monkeypatch.setattr(Scheduler, "record_hits", recorded)
    complete()
    for path in ("/stats", "/experts", "/metrics"):
        assert http.get(path).status_code == 200
    assert threads == {"tiermoe-batch"}


def test_bad_options(tiermoe_: Command) -> None:
    assert "the API key is empty" in tiermoe_("serve", "nowhere", "--api-key", " ").cause
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cause = tiermoe_("serve", "nowhere", "--port", port).cause
        assert f"cannot listen on 127.0.0.1:{port}" in cause
        assert "another --port" in cause
    assert "another --host" in tiermoe_("serve", "nowhere", "--host", "192.0.2.1").cause  # of nobody: RFC 5737


ODD = {
    "pattern": {"type": "string", "pattern": "^(?=x)a"}, "format": {"type": "string", "format": "unheard-of"},
    "unique": {"type": "array", "uniqueItems": True}, "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 3}}, "upper": {"type": "STRING"}, "any": {"type": "any"},
    "null": {"type": "object", "properties": None, "required": None}, "far": {"$ref": "https://elsewhere/"},
    "self": {"$ref": "#"},
}  # fmt: skip


@pytest.mark.parametrize("template", ["json", "parameters", "python", "own-quotes"])
def test_what_a_grammar_cannot_say_of_a_tool_is_left_free(stage: Stage, template: str, caplog: Any) -> None:
    """A forced call is one of JSON whatever the schema; the log names what is left out."""
    stage.says("x", OWN[template])
    for key, schema in ODD.items():
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {key: schema}}}}
        body = {"messages": [ASKED], "tools": [tool], "tool_choice": "required"}
        assert stage.ask("/v1/chat/completions", body).status_code == 200, (
            key,
            stage.ask("/v1/chat/completions", body).text,
        )
    for odd in (
        {"properties": None},
        {"required": None},
        {"type": "OBJECT"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}},
        {},
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": odd}}
        body = {"messages": [ASKED], "tools": [tool], "tool_choice": "required"}
        assert stage.ask("/v1/chat/completions", body).status_code == 200, odd
    assert "tool f: the grammar of its calls leaves out properties.pattern.pattern" in caplog.text


def test_a_schema_that_is_none_names_tool_and_parameter(stage: Stage) -> None:
    stage.says("x", OWN["json"])
    tools = [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"properties": {"good": {"type": "string"}, **more}}},
        }
        for name, more in (("fine", {}), ("wrong", {"bad": {"type": "string", "pattern": "("}}))
    ]
    body = {"messages": [ASKED], "tools": tools, "tool_choice": "required"}
    error = error_of(stage.ask("/v1/chat/completions", body))
    assert error["param"] == "tools"
    assert "parameter 'bad' of the tool 'wrong'" in error["message"]


def test_five_hundred_parameters_and_odd_names(stage: Stage) -> None:
    names = [f"p{number}" for number in range(500)]
    odd = ['a"b', "</function>", "<tool_call>", "ö x", "a\\b"]
    for template in ("json", "parameters", "invoke", "own-quotes"):
        stage.says("x", OWN[template])
        for keys in (names, odd):
            schema = {"type": "object", "properties": {key: {"type": "string"} for key in keys}}
            for name in ("f", 'g"<b>'):
                tool = {"type": "function", "function": {"name": name, "parameters": schema}}
                body = {"messages": [ASKED], "tools": [tool], "tool_choice": "required"}
                told = stage.ask("/v1/chat/completions", body)
                assert told.status_code in (200, 400)
                assert told.status_code == 200 or error_of(told)["message"]
