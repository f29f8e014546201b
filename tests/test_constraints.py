"""What an answer must be, by every field that says it; and the samplers of llama-server in requests."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from patience import PATIENCE_S
from tiermoe.engine.sampling import Sampling
from tiermoe.serve.grammar import MOST_TEXT
from tiermoe.serve.openai import CompletionRequest, sampling_of
from tiermoe.serve.served import Served

GBNF = 'root ::= animal " " [0-9]{2} "/"\nanimal ::= "cat" | "dog"\n'
LARK = 'start: ANIMAL " " /[0-9]{2}\\//\nANIMAL: "cat" | "dog"\n'
REGEX = r"(cat|dog) [0-9]{2}/"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x/y", 'q"']}},
    "required": ["a"],
    "additionalProperties": False,
}
CHOICES = ["yes", 'n"o', "a/b\n"]


def asked(http: httpx.Client, chat: bool, **fields: Any) -> httpx.Response:
    body = {"max_tokens": 40, "temperature": 1.5, "seed": 1, **fields}
    if chat:
        body["messages"] = [{"role": "user", "content": "say"}]
        return http.post("/v1/chat/completions", json=body, timeout=PATIENCE_S)
    return http.post("/v1/completions", json=body | {"prompt": "say"}, timeout=PATIENCE_S)


def said(http: httpx.Client, chat: bool, **fields: Any) -> str:
    answer = asked(http, chat, **fields).json()
    assert "choices" in answer, answer
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    text: str = choice["message"]["content"] if chat else choice["text"]
    return text


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": GBNF},
        {"ebnf": GBNF},
        {"guided_grammar": LARK},
        {"structured_outputs": {"grammar": GBNF}},
        {"regex": REGEX},
        {"guided_regex": REGEX.replace("/", r"\/"), "grammar": "", "json_schema": {}},
        {"structured_outputs": {"regex": REGEX, "choice": []}},
    ],
)
def test_an_answer_follows_a_grammar_or_an_expression(http: httpx.Client, fields: dict[str, Any], chat: bool) -> None:
    assert re.fullmatch(REGEX, said(http, chat, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": SCHEMA},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
    ],
)
def test_an_answer_follows_a_schema(http: httpx.Client, served: Served, fields: dict[str, Any]) -> None:
    no_blanks = {str(served.tokenizer(" ").input_ids[0]): -100}
    assert json.loads(said(http, True, logit_bias=no_blanks, **fields))["a"] in ("x/y", 'q"')


@pytest.mark.parametrize("fields", [{"guided_choice": CHOICES}, {"structured_outputs": {"choice": CHOICES}}])
def test_an_answer_is_one_of_the_choices(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert {said(http, False, seed=seed, **fields) for seed in range(3)} <= set(CHOICES)


def test_an_answer_is_any_json_object(http: httpx.Client) -> None:
    answer = asked(http, False, structured_outputs={"json_object": True}).json()
    assert answer["choices"][0]["text"].startswith("{")


@pytest.mark.parametrize(
    ("fields", "param", "cause"),
    [
        ({"grammar": GBNF, "regex": REGEX}, "grammar", "regex and grammar both say what the answer must be"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}},
            "structured_outputs.choice",
            "response_format and structured_outputs.choice both",
        ),
        ({"grammar": 'root = "a"'}, "grammar", "Expected ::= at line 1"),
        ({"grammar": "root ::= other"}, "grammar", "Rule 'other' not found"),
        ({"grammar": "root ::= " + "(" * 5000}, "grammar", "cannot be followed: compiling it fails"),
        ({"grammar": f'root ::= "{"x" * MOST_TEXT}"'}, "grammar", "characters as a grammar, 131,072 at most"),
        ({"guided_regex": "a\\"}, "guided_regex", "ends with a lone backslash"),
        ({"guided_regex": "(?=a)a"}, "guided_regex", "look-ahead"),
        ({"regex": "(((a{100}){100}){100}){100}"}, "regex", "cannot be followed"),
        ({"guided_json": "{"}, "guided_json", "is no JSON"),
        ({"guided_json": "[1]"}, "guided_json", "a schema is an object"),
    ],
)
def test_what_cannot_be_followed_is_refused(http: httpx.Client, fields: Any, param: str, cause: str) -> None:
    answer = asked(http, True, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert cause in answer.json()["error"]["message"]


def test_a_grammar_that_takes_too_long_to_convert_is_refused(http: httpx.Client) -> None:
    """Rules that are terminals one after the other: the converter goes through all of them for each."""
    rules = "\n".join(f"r{n} ::= r{n + 1}" for n in range(7000)) + '\nr7000 ::= "a"'
    answer = asked(http, True, grammar=f"root ::= r0\n{rules}")
    assert answer.status_code == 400
    assert re.search("more than (2 s|64 MiB)|Recursion", answer.json()["error"]["message"])


# samplers


def test_a_request_that_names_none_is_sampled_as_the_server_says() -> None:
    default = Sampling(temperature=0.3, top_k=9, repetition_penalty=1.5, min_p=0.1)
    plain = sampling_of(CompletionRequest(prompt="x"), default, 100)
    assert plain == replace(default, max_tokens=16)
    asked = CompletionRequest(prompt="x", max_tokens=7, top_k=-1, repeat_penalty=1.2, ignore_eos=True)
    named = replace(default, max_tokens=7, top_k=0, repetition_penalty=1.2, repeat_last_n=64, min_tokens=7)
    assert sampling_of(asked, default, 100) == named


def test_samplers_of_llama_server_change_the_answer(http: httpx.Client) -> None:
    def tokens(**fields: Any) -> list[str]:
        named = {"max_tokens": 16, "seed": 3, "logprobs": 0, "logit_bias": {"40": 63, "41": 60, "42": 60}}
        found: list[str] = asked(http, False, **{**named, **fields}).json()["choices"][0]["logprobs"]["tokens"]
        return found

    greedy = tokens(temperature=0)
    assert len(set(greedy)) == 1
    dry = {"dry_multiplier": 5.0, "dry_allowed_length": 1, "dry_sequence_breakers": "[]"}
    assert len(set(tokens(temperature=0, **dry))) > 1
    assert tokens(temperature=0, dry_multiplier=5.0, dry_sequence_breakers=[greedy[0]]) == greedy
    free: dict[str, Any] = {"temperature": 0, "logit_bias": {}}
    assert len(set(tokens(**free, repeat_penalty=100))) > len(set(tokens(**free)))
    assert tokens(**free, repeat_penalty=100, repeat_last_n=0) == tokens(**free)
    assert greedy[0] not in tokens(temperature=1, xtc_probability=1.0, xtc_threshold=0.01)
    assert set(tokens(temperature=2.0, top_n_sigma=0.001)) == set(greedy)


@pytest.mark.parametrize(
    ("fields", "param", "cause"),
    [
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty", "repetition_penalty 1.2; send one"),
        ({"min_tokens": 50}, "min_tokens", "min_tokens is 50, the answer ends at 40"),
        ({"dry_sequence_breakers": ["x" * 41]}, "dry_sequence_breakers", "40 characters"),
        ({"dry_sequence_breakers": "no list"}, "dry_sequence_breakers", ""),
        ({"xtc_threshold": 1.5}, "xtc_threshold", "less than or equal to 1"),
        ({"min_keep": 3}, "min_keep", "not supported"),
    ],
)
def test_samplers_that_contradict_or_exceed_are_refused(
    http: httpx.Client, fields: dict[str, Any], param: str, cause: str
) -> None:
    answer = asked(http, False, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert cause in answer.json()["error"]["message"]
