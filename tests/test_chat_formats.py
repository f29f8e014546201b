"""Chat formats that are learned from templates: calls, thoughts and texts read as the template writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chat_templates import NAMED, OWN, TEMPLATES, TOOLS, call_of, format_of, template_of
from serving import calls_of, parts_of
from tiermoe.model.chat.format import ChatFormat
from tiermoe.model.chat.jinja import render
from tiermoe.model.chat.learn import learned
from tiermoe.model.chat.parameters import parameters_of
from tiermoe.model.chat.reader import AnswerReader, CallPatterns, ToolCall
from tiermoe.serve.call_rules import call_rule, terms_with
from tiermoe.serve.grammar_trial import Bytes

USER = {"role": "user", "content": "What is the weather in Köln?"}
CITY = 'Köln "am Rhein"\n<b>'
FIRST = ("get_weather", {"city": CITY, "days": 3, "fast": True})
SECOND = ("stop", {})
LEFT_OUT = ("functionary-medium-v3.2",)
"""Of a folder's templates: it begins a text by a word."""
KNOWN = sorted(
    name
    for name in TEMPLATES
    if format_of(name).calls and not format_of(name).no_calls and not any(each in name for each in LEFT_OUT)
)
SEVERAL = [name for name in KNOWN if not (calls := format_of(name).calls) or not calls.single]
THINKING = sorted(name for name in TEMPLATES if format_of(name).thought is not None)


def given(*calls: tuple[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """An assistant's message with calls."""
    made = [call_of(*call, number) for number, call in enumerate(calls)]
    return {"role": "assistant", "content": "", **more, **({"tool_calls": made} if made else {})}


def begun_alike(text: str, prompt: str) -> str:
    """What a text begins with as a prompt does, whatever blanks they have; up to a whole tag where the prompt goes on,
    since others may begin alike."""
    at = to = 0
    while at < len(text) and to < len(prompt):
        if text[at] == prompt[to]:
            at, to = at + 1, to + 1
        elif text[at].isspace():
            at += 1
        elif prompt[to].isspace():
            to += 1
        else:
            break
    same = text[:at]
    return same[: max(same.rfind(letter) for letter in ">]\n") + 1] if prompt[to:].strip() else same


def written(name: str, message: dict[str, Any]) -> str:
    """What the model has written of a message, by its template: what follows the prompt, with the thought's beginning
    even if that is in the prompt."""
    template, form = template_of(name), format_of(name)
    given = template.given([USER, message])
    on = {form.switch: True} if form.switch else {}
    text = render(template.text, given, NAMED, False, TOOLS, **on).rpartition(USER["content"])[2]
    prompt = render(template.text, given[:1], NAMED, True, TOOLS, **on).rpartition(USER["content"])[2]
    if form.thought is not None and form.thought[0] in text:
        text = form.thought[0] + text.partition(form.thought[0])[2]
    else:
        same = begun_alike(text, prompt)
        text = text[len(same) :]
    for end in form.ends:
        text = text.partition(end)[0]
    return text.rstrip().removesuffix(form.turn_end)


def read(form: ChatFormat, parts: list[str], cut: bool = False, **more: Any) -> tuple[str, str, list[ToolCall]]:
    """Thought, text and calls of an answer that comes in parts."""
    calls = CallPatterns(form.calls, parameters_of(TOOLS)) if form.calls else None
    reader = AnswerReader(form, calls, **more)
    chunks = [reader.add(part, index == len(parts) - 1, cut) for index, part in enumerate(parts)]
    pieces = [piece for chunk in chunks for piece in chunk.calls]
    return "".join(c.thought for c in chunks), "".join(c.text for c in chunks), calls_of(pieces)


def values(calls: list[ToolCall]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def called(name: str) -> tuple[str, dict[str, Any]]:
    """The first call; of templates that put quotes around a string and leave the letters as they are, a plain one."""
    form = format_of(name).calls
    plain = form is not None and form.style == "literals" and not form.quote and name not in OWN
    return FIRST[0], {**FIRST[1], "city": "Köln" if plain else CITY}


def test_every_way_of_writing_calls_is_learned() -> None:
    assert set(OWN) <= set(KNOWN), {name: format_of(name).no_calls for name in OWN}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("pieces", [1, 4, 50])
def test_a_call_is_read_as_the_template_writes_it(name: str, pieces: int) -> None:
    form = format_of(name)
    call = called(name)
    text = written(name, given(call))
    thought, said, calls = read(form, parts_of(text, pieces))
    assert (thought, said.strip(), values(calls)) == ("", "", [call])
    assert all(each.whole for each in calls)


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("pieces", [1, 30])
def test_two_calls_after_a_text(name: str, pieces: int) -> None:
    form = format_of(name)
    assert form.calls is not None
    first = called(name)
    both = written(name, given(first, SECOND))
    for tag in form.thought or ():
        both = both.replace(tag, "")
    assert values(read(form, parts_of(both, pieces))[2]) == [first, SECOND]
    assert [call.name for call in read(form, [both], one=True)[2]] == ["get_weather"]
    if form.text[0].startswith("to="):
        both = f"{form.calls.between}{both}"  # each part of a turn has a header
    answer = f"{form.text[0]}I look.{form.text[1]}{both}"
    thought, said, calls = read(form, parts_of(answer, pieces))
    if CallPatterns(form.calls, {}).anywhere or CallPatterns(form.calls, parameters_of(TOOLS)).anywhere:
        assert (thought, said.strip(), values(calls)) == ("", "I look.", [first, SECOND])
    else:  # nothing tells a call without a mark from an example
        assert (thought, said.strip(), calls) == ("", answer.strip(), [])


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_cut_is_neither_lost_nor_invented(name: str) -> None:
    """At each letter: what has come only grows, a call has the arguments so far, and nothing that the whole answer
    lacks is said."""
    form, whole = format_of(name), written(name, given(called(name)))
    so_far = ""
    for end in range(len(whole)):
        thought, said, calls = read(form, [whole[:end]], cut=True)
        assert thought == ""
        assert len(calls) <= 1
        if calls:
            assert (calls[0].name, said.strip()) == ("get_weather", "")
            assert calls[0].arguments.startswith(so_far) or so_far.startswith(calls[0].arguments)
            so_far = max(so_far, calls[0].arguments, key=len)
        else:
            assert so_far == ""
            assert said.strip() in whole


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("pieces", [1, 30])
def test_a_thought_is_told_from_the_answer(name: str, pieces: int) -> None:
    form = format_of(name)
    assert form.thought is not None
    begin, end = form.thought
    for text in (f"{begin}\nHm <b>\n{end}\n\n", f"{begin}{begin}\nHm <b>{end}"):
        answer = f"{text}{form.text[0]}It rains.{form.text[1]}{form.turn_end}"
        assert read(form, parts_of(answer, pieces))[:2] == ("Hm <b>", "It rains.")
        assert read(form, parts_of(answer.removeprefix(begin), pieces), inside=True)[:2] == ("Hm <b>", "It rains.")


@pytest.mark.parametrize("name", KNOWN)
def test_the_grammar_of_a_forced_call_takes_what_the_template_writes(name: str) -> None:
    """Byte by byte, and what follows it ends there."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    form = format_of(name)
    assert form.calls is not None
    functions = [tool["function"] for tool in TOOLS]
    rules = f"start: call\n{call_rule(form.calls, functions, terms_with({}))}"
    tokens = LLTokenizer(TokenizerWrapper(Bytes([])))
    for call in (FIRST, SECOND):
        text = written(name, given((call[0], {**call[1], **({"city": "Bonn"} if call[1] else {})})))
        if form.thought is not None:
            text = text.replace(form.thought[0], "").replace(form.thought[1], "")
        text = text.replace("'Bonn'", '"Bonn"').replace("=Bonn,", '="Bonn",').strip()
        ends = []
        for each in (text, text.replace("\n\n", "\n")):  # some have a line more without parameters
            matcher = LLMatcher(tokens, rules, log_level=0)
            taken = matcher.try_consume_tokens(list(each.encode()))
            assert not matcher.is_error(), matcher.get_error()
            ends.append(each.encode()[taken:].decode())
        assert "" in ends, (ends, rules)
        assert read(form, [text])[2][0].name == call[0]


@pytest.mark.parametrize("name", KNOWN)
def test_calls_come_back_as_history(name: str) -> None:
    """With their results, be they in a form that another server has given them."""
    template = template_of(name)
    call = given(FIRST)
    call["tool_calls"][0]["id"] = "call_0123456789abcdef"
    result = {"role": "tool", "tool_call_id": "call_0123456789abcdef", "content": "17 degrees"}
    answer = {"role": "assistant", "content": "It is warm."}
    asked = [USER, call, result, answer, {"role": "user", "content": "And now?"}]
    text = template.prompt(asked, TOOLS).text
    for each in ("get_weather", "am Rhein", "17 degrees", "And now?"):
        assert each in text


ODD = {
    "letters are changed between tags": OWN["invoke"].replace(
        "v if v is string", "v | replace('<', '&lt;') if v is string"
    ),
    "no separator between keywords": OWN["python"].replace("{{ ', ' if not loop.last }}", ""),
    "arguments before the function": OWN["json"].replace(
        '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}',
        '{"arguments": {{ c.arguments | tojson }}, "name": "{{ c.name }}"}',
    ),
    "the function in other letters": OWN["json"].replace("c.name", "c.name | upper"),
    "the first argument alone": OWN["parameters"].replace("c.arguments.items()", "(c.arguments.items() | list)[:1]"),
    "calls are left out": OWN["json"].replace("m.tool_calls", "m.other"),
    "every call is refused": "{% if messages[-1].tool_calls %}{{ raise_exception('no tools') }}{% endif %}"
    + OWN["json"],
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_learned_is_said(name: str) -> None:
    """Never is a format believed that does not read what the template writes."""
    form = learned(lambda messages, **more: render(ODD[name], messages, NAMED, **more), ODD[name])
    assert form.no_calls
    assert form.calls is None
    assert form.thought == ("<think>", "</think>")
