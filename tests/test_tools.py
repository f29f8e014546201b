"""Calls of tools in the text of an answer."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tiermoe.serve.grammar import Grammars
from tiermoe.serve.tools import FORMATS, CallReader, Format, format_of, types_of
from tiny import write_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
TYPES = types_of(TOOLS)
WRITTEN = {
    "<minimax:tool_call>": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bonn</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "<arg_key>": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "<function=": "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "<tool_call>": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 3}}\n</tool_call>',
}


@pytest.fixture(params=FORMATS, ids=lambda form: form.mark)
def form(request: pytest.FixtureRequest) -> Format:
    return request.param


def read(form: Format, text: str, pieces: int) -> tuple[str, list[tuple[str, dict[str, object]]]]:
    """What a reader tells of a text that comes in random pieces."""
    cuts = sorted(random.Random(pieces).choices(range(len(text) + 1), k=pieces - 1))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reader, said, calls = CallReader(form, TYPES), "", []
    for index, part in enumerate(parts):
        more, new = reader.add(part, last=index == len(parts) - 1)
        said += more
        calls += [(call.name, json.loads(call.arguments)) for call in new]
    assert len({call.id for call in reader.calls}) == len(calls)
    return said, calls


@pytest.mark.parametrize("pieces", [1, 2, 5, 40])
def test_a_call_is_read_however_its_text_comes(form: Format, pieces: int) -> None:
    text = f"I shall look.{WRITTEN[form.mark]}{WRITTEN[form.mark]}"
    said, calls = read(form, text, pieces)
    assert said == "I shall look."
    assert calls == [("weather", {"city": "Bonn", "days": 3})] * 2


@pytest.mark.parametrize("pieces", [1, 7])
def test_what_is_no_call_is_text(form: Format, pieces: int) -> None:
    for text in ("2 < 3 and <tool", f"{form.begin}nothing{form.end} after", f"{form.begin} and no end"):
        said, calls = read(form, text, pieces)
        if form.mark != "<arg_key>" or "nothing" not in text:  # there a name alone is a call without arguments
            assert (said, calls) == (text, [])


@pytest.mark.parametrize("forced", [False, True])
def test_a_call_that_is_cut_off_has_the_arguments_so_far(form: Format, forced: bool) -> None:
    """At each letter: never is any of it text, and what is told only grows."""
    whole, told = WRITTEN[form.mark], ""
    for end in range(len(form.begin), len(whole)):
        reader = CallReader(form, TYPES, forced=forced)
        before, _ = reader.add("\n" if forced else "So:")
        said, calls = reader.add(whole[:end], last=True, cut=True)
        if calls:
            (call,) = calls
            assert (before + said, call.name, call.whole) == ("" if forced else "So:", "weather", False)
            assert call.arguments.startswith(told)
            assert reader.calls == []
            assert "Bonn".startswith(call.values.get("city", ""))
            told = call.arguments
        else:
            assert told == ""
            assert before + said == ("" if forced else "So:" + whole[:end])  # no function is named yet
    assert json.loads(told.removesuffix("}") + "}") == {"city": "Bonn", "days": 3}


def test_a_forced_call_s_beginning_is_no_text(form: Format) -> None:
    reader = CallReader(form, TYPES, forced=True)
    assert reader.add(f"\n{form.begin[:-2]}", last=True, cut=True) == ("", [])


def test_a_forced_call_that_cannot_be_read_is_text(form: Format) -> None:
    text = f"{form.begin}{{{form.end}"
    assert CallReader(form, TYPES, forced=True).add(text, last=True) == (text, [])


def test_a_string_stays_a_string() -> None:
    form = next(form for form in FORMATS if form.mark == "<function=")
    text = WRITTEN[form.mark].replace("Bonn", "53111")
    assert read(form, text, 1)[1] == [("weather", {"city": "53111", "days": 3})]


def test_the_format_is_found_in_the_template(form: Format) -> None:
    assert format_of(f"… {form.mark} … {form.begin}") is form
    assert format_of("no tools") is format_of(None) is None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("letters")
    write_tokenizer(directory)
    return PreTrainedTokenizerFast.from_pretrained(directory)


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bonn", "Ulm"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "where": {"$ref": "#/$defs/place"},
        "note": {"type": "string"},
    },
    "required": ["city", "days", "where", "note"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": [1, 2]}},
}


@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_can_be_read(form: Format, tokenizer: Any, seed: int) -> None:
    """Random tokens, of those that the rule lets pass, make a call that follows its schema."""
    functions = [{"name": "weather", "parameters": PARAMETERS}]
    rule = form.rule(functions)
    grammar = Grammars(tokenizer, 128, {2}).compile(f"start: call\n{rule}")[0]
    chance, written = torch.Generator().manual_seed(seed), list[int]()
    likely = tokenizer('"</parameter></arg_value>' + "\n", add_special_tokens=False).input_ids
    rare = tokenizer(" ", add_special_tokens=False).input_ids
    while not grammar.ended and len(written) < 1500:
        logits = torch.randn(128, generator=chance)
        logits[likely] += 4
        logits[rare] -= 20
        chosen = [int(grammar.restrict(logits).argmax())]
        if form.tags and len(written) % 40 == 39:  # chance alone would not find what ends a value between tags
            chosen = tokenizer(form.tags.value_end, add_special_tokens=False).input_ids
        for token in chosen:
            written.append(token)
            if grammar.restrict(torch.zeros(128))[token] < 0:
                written.pop()
                written.append(int(grammar.restrict(logits).argmax()))
            grammar.accept(written[-1])
            if grammar.ended:
                break
    _, calls = read(form, tokenizer.decode(written), 1)
    ((name, arguments),) = calls
    assert name == "weather"
    assert arguments["city"] in ("Bonn", "Ulm")
    assert arguments["days"] in range(1, 10)
    assert arguments["where"] in (1, 2)
    assert isinstance(arguments["note"], str)
