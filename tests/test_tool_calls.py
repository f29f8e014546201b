"""Calls of tools in the text of an answer, as models vary what their templates write."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from chat_templates import format_of
from serving import calls_of, parts_of
from tiermoe.model.chat.format import CallFormat
from tiermoe.model.chat.parameters import Parameters, kinds_of, parameters_of, value_of
from tiermoe.model.chat.reader import AnswerReader, CallPatterns, ToolCall
from tiermoe.serve.call_rules import call_rule, terms_with
from tiermoe.serve.fields import readable_object
from tiermoe.serve.grammar import Grammars
from tiny import write_tokenizer


@dataclass(frozen=True)
class Tags:
    """Of a call that is not JSON. {} is the function, or the parameter."""

    head: str
    key: str
    value_end: str
    tail: str


@dataclass(frozen=True)
class Way:
    """A way of writing calls, as `chat_templates` has it under this name."""

    name: str
    begin: str
    end: str
    tags: Tags | None = None

    @property
    def form(self) -> CallFormat:
        found = format_of(self.name).calls
        assert found is not None
        return found


WAYS = (
    Way("invoke", "<calls>", "</calls>", Tags(
        '\n<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>\n"
    )),
    Way("keys-and-values", "<tool_call>", "</tool_call>", Tags(
        "{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", ""
    )),
    Way("parameters", "<tool_call>", "</tool_call>", Tags(
        "\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n"
    )),
    Way("json", "<tool_call>", "</tool_call>"),
)  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
KINDS = parameters_of(TOOLS)
WRITTEN = {
    "invoke": '<calls>\n<invoke name="weather">\n<parameter name="city">Bonn</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</calls>',
    "keys-and-values": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "parameters": "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "json": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 3}}\n</tool_call>',
}


@pytest.fixture(params=WAYS, ids=lambda way: way.name)
def form(request: pytest.FixtureRequest) -> Way:
    return request.param


def reader_of(form: Way, parameters: Parameters = KINDS, **more: Any) -> AnswerReader:
    return AnswerReader(format_of(form.name), CallPatterns(form.form, parameters), **more)


def fed(reader: AnswerReader, parts: Sequence[str], cut: bool = False) -> tuple[str, list[ToolCall]]:
    """Text and calls that a reader tells of the parts of an answer."""
    told = [reader.add(part, index == len(parts) - 1, cut) for index, part in enumerate(parts)]
    calls = calls_of([piece for chunk in told for piece in chunk.calls])
    assert reader.called is any(call.whole for call in calls)
    assert not any(chunk.thought for chunk in told)
    return "".join(chunk.text for chunk in told), calls


def values_of(call: ToolCall) -> dict[str, Any]:
    """The arguments, without what was cut off."""
    return readable_object(call.arguments)


def read(form: Way, text: str, pieces: int) -> tuple[str, list[tuple[str, Any]]]:
    """What a reader tells of a text that comes in random pieces."""
    said, calls = fed(reader_of(form, KINDS), parts_of(text, pieces))
    return said, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("pieces", [1, 7])
def test_what_is_no_call_is_text(form: Way, pieces: int) -> None:
    for text in ("2 < 3 and <tool", f"{form.begin}nothing{form.end} after", f"{form.begin} and no end"):
        if form.name != "keys-and-values" or "nothing" not in text:  # there a name alone is a call without arguments
            assert read(form, text, pieces) == (text, [])


@pytest.mark.parametrize("forced", [False, True])
def test_a_call_that_is_cut_off_has_the_arguments_so_far(form: Way, forced: bool) -> None:
    """At each letter: never is any of it text, and what is told only grows."""
    whole, told = WRITTEN[form.name], ""
    for end in range(len(form.begin), len(whole)):
        said, calls = fed(reader_of(form, KINDS, forced=forced), ["\n" if forced else "So:", whole[:end]], cut=True)
        if calls:
            (call,) = calls
            assert (said, call.name) == ("" if forced else "So:", "weather")
            assert not call.whole or json.loads(call.arguments) == {"city": "Bonn", "days": 3}
            assert call.arguments.startswith(told)
            assert "Bonn".startswith(values_of(call).get("city", ""))
            told = call.arguments
        else:
            assert told == ""
            assert said == ("" if forced else "So:" + whole[:end])  # no function is named yet
    assert json.loads(told.removesuffix("}") + "}") == {"city": "Bonn", "days": 3}
    within = whole[: whole.index("Bonn") + 2]  # it ends there by itself
    said, (call,) = fed(reader_of(form, KINDS), [within])
    assert (said, call.whole, values_of(call)) == ("", False, {"city": "Bo"})


def test_a_forced_call_has_no_text_but_one_that_cannot_be_read(form: Way) -> None:
    assert fed(reader_of(form, KINDS, forced=True), [f"\n{form.begin[:-2]}"], cut=True) == ("", [])
    text = f"{form.begin}{{{form.end}"
    assert fed(reader_of(form, KINDS, forced=True), [text]) == (text, [])


LETTERS = '{}[]"\\\n\t <>/ae\u00e9\U0001f600'
SCHEMA = {"text": {"type": "string"}, "other": {"type": "string"}, "list": {"type": "array"}, "any": {}}
KINDS_OF_F = {"f": {key: kinds_of(schema, {}) for key, schema in SCHEMA.items()}}


def random_arguments(chance: random.Random) -> dict[str, Any]:
    """Of `SCHEMA`, with the letters of JSON and tags. Text between tags keeps no line break at its ends."""
    text = ["".join(chance.choices(LETTERS, k=chance.randrange(30))).strip("\n") for _ in range(4)]
    values = {"text": text[0], "list": [text[1], {"a": chance.random()}], "any": {text[2]: None}, "other": text[3]}
    return {key: values[key] for key in chance.sample(list(values), chance.randrange(5))}


def written(form: Way, arguments: dict[str, Any], chance: random.Random) -> str:
    """A call as its format has it, and as models vary it."""
    blank = chance.choice(["", "\n"])
    if form.tags is None:
        raw = json.dumps(arguments, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 2]))
        return (
            f'{form.begin}{blank}{{"name": "f", "{chance.choice(["arguments", "parameters"])}":{blank}{raw}}}{form.end}'
        )
    parts = [form.tags.head.format("f")]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        parts.append(form.tags.key.format(key) + text + form.tags.value_end)
    return f"{form.begin}{blank}{''.join(parts)}{form.tags.tail}{blank}{form.end}"


@pytest.mark.parametrize("seed", range(40))
def test_pieces_sum_to_the_arguments(form: Way, seed: int) -> None:
    """However the text is cut: those that were written. Oracle: what the text was made of; of JSON its own letters."""
    chance = random.Random(seed)
    arguments = random_arguments(chance)
    text = written(form, arguments, chance)
    expected = json.dumps(arguments, ensure_ascii=False)
    if form.tags is None:
        expected = text[text.index('":', text.index('"f"')) + 2 : text.rindex("}")].strip()
    for parts in (list(text), [text], parts_of(text, 1 + seed)):
        said, (call,) = fed(reader_of(form, KINDS_OF_F), parts)
        assert (said, call.name, call.arguments, call.whole) == ("", "f", expected, True)
        assert values_of(call) == arguments


WHOLE = {"$defs": {"text": {"type": "string"}, "self": {"anyOf": [{"$ref": "#/$defs/self"}, {"type": "null"}]}}}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (schema, {"123": "123", '{"a": 1}': '{"a": 1}', "true": "true", "x": "x"})
        for schema in (
            {"type": "string"},
            {"enum": ["123", "2"]},
            {"const": "123"},
            {"$ref": "#/$defs/text"},
            {"allOf": [{"$ref": "#/$defs/text"}, {"minLength": 1}]},
            {"type": ["string", "null"]},
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
            {"oneOf": [{"$ref": "#/$defs/text"}, {"enum": [None]}]},
        )
    ]
    + [
        ({"type": ["string", "null"]}, {"null": None, "None": None, "nul": "nul"}),
        ({"type": "string"}, {"null": "null", "None": "None"}),
        ({"type": ["string", "integer"]}, {"5": 5, "five": "five", "[1]": "[1]"}),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, {"5": "5", "[5]": [5]}),
        ({"type": "boolean"}, {"True": True, "false": False, "yes": "yes"}),
        ({"type": "number"}, {"1e999": "1e999", "5": 5, "NaN": "NaN"}),
        ({}, {"5": 5, "True": "True", "a": "a", "1e999": "1e999"}),
        ({"$ref": "#/$defs/self"}, {"5": 5, "null": None}),
        ({"$ref": "https://elsewhere/"}, {"5": 5}),
        ({"type": 7, "enum": 7, "anyOf": 7, "allOf": [7], "$ref": 7}, {"5": 5}),
    ],
)
def test_a_value_between_tags_is_what_its_schema_says(schema: Any, values: dict[str, Any]) -> None:
    """Oracle: the values as one would write them in JSON for such a schema."""
    kinds = kinds_of(schema, WHOLE)
    assert {text: value_of(text, kinds) for text in values} == values
    for form in WAYS:
        if (tags := form.tags) is None:
            continue
        for text, value in values.items():
            call = (
                f"{form.begin}{tags.head.format('f')}{tags.key.format('k')}{text}{tags.value_end}{tags.tail}{form.end}"
            )
            said, (made,) = fed(reader_of(form, {"f": {"k": kinds}}), [call])
            assert (said, json.loads(made.arguments, parse_constant=pytest.fail)) == ("", {"k": value})


def test_a_string_comes_as_it_is_written(form: Way) -> None:
    """Once its next letter is there: only what may end it is withheld."""
    text = written(form, {"text": "abc <b>\nend"}, random.Random(2))
    begin = text.index("abc")
    reader = reader_of(form, KINDS_OF_F)
    pieces = reader.add(text[: begin + 2]).calls
    assert [piece.kind for piece in pieces] == ["begin", "arguments"] + ["arguments"] * (form.tags is not None)
    assert values_of(pieces[-1].call) == {"text": "ab"}
    for count in (3, 4, 6, 7):  # of the letters; the fifth may begin a tag
        reader.add(text[begin + count - 1 - (count == 6) : begin + count])
        assert values_of(pieces[-1].call) == {"text": "abc <b>"[:count]}


@pytest.mark.parametrize("pieces", [1, 3, 60])
def test_a_call_without_its_last_tags_is_whole(form: Way, pieces: int) -> None:
    """Models forget them. Behind the last parameter everything is there."""
    text = WRITTEN[form.name]
    for tag in ("}", "\n</function>", "\n</invoke>"):
        text = text.removesuffix(f"\n{form.end}").removesuffix(tag) + f"\n{form.end}"
    assert read(form, text, pieces) == ("", [("weather", {"city": "Bonn", "days": 3})])
    stopped = WRITTEN[form.name].removesuffix(form.end)  # a stop string has ended the answer
    _, (call,) = fed(reader_of(form, KINDS), [stopped])
    assert (call.whole, values_of(call)) == (True, {"city": "Bonn", "days": 3})


def test_a_call_of_json_that_begins_otherwise_is_read_once_it_is_whole() -> None:
    form = WAYS[-1]
    for inside in (
        '{"arguments": {"city": "Bonn"}, "name": "weather"}',
        '{"name": "weather", "arguments": "{\\"city\\": \\"Bonn\\"}"}',
        '{"id": 1, "name": "weather", "parameters": {"city": "Bonn"}}',
        '{"name": "we\\u0061ther", "arguments": {"city": "Bonn"}}',
    ):
        assert read(form, f"<tool_call>{inside}</tool_call>", 9) == ("", [("weather", {"city": "Bonn"})])
    assert read(form, '<tool_call>{"name": "weather", "arguments": null}</tool_call>', 9) == ("", [("weather", {})])
    _, (call,) = fed(
        reader_of(form, KINDS), list('<tool_call>{"name": "weather", "arguments": {"city": Bonn}}</tool_call>')
    )
    assert call.arguments == '{"city": "Bonn"}'  # a bare word is a string


@pytest.mark.parametrize("pieces", [1, 3, 30])
def test_a_call_of_json_ends_where_json_does(pieces: int) -> None:
    """Tags within strings are text of them; raw line breaks and tabs are escaped."""
    form = WAYS[-1]
    for written, city in (
        ("a </tool_call> b", "a </tool_call> b"),
        ("<tool_call>", "<tool_call>"),
        ("\n\tif x:\n", "\n\tif x:\n"),
        ("a\\\nb", "a\nb"),
        ('\\"</tool_call>\\\\', '"</tool_call>\\'),
    ):
        for order in ('{"name": "weather", "arguments": %s}', '{"arguments": %s, "name": "weather"}'):
            call = order % f'{{"city": "{written}"}}'
            text = f"before <tool_call>\n{call}\n</tool_call> after"
            assert read(form, text, pieces) == ("before after", [("weather", {"city": city})])


@pytest.mark.parametrize("pieces", [1, 5, 40])
@pytest.mark.parametrize("form", [form for form in WAYS if form.tags and form.tags.head.lstrip().startswith("<")])
def test_a_call_may_lack_the_tags_around_it(form: Way, pieces: int) -> None:
    whole = WRITTEN[form.name]
    bare = whole.removeprefix(form.begin).removesuffix(form.end).strip()
    call = ("weather", {"city": "Bonn", "days": 3})
    for text, said, count in (
        (f"So: {bare}", "So:", 1),
        (f"So: {bare}\n{bare}\n", "So:", 2),
        (f"{bare}\n{form.end} and {whole}.", " and.", 2),
        (f"{bare} and {bare} end", " and end", 2),
    ):
        assert read(form, text, pieces) == (said, [call] * count)
    other = bare.replace("weather", "whether")  # no tool of that name
    assert read(form, other, pieces) == (other, [])
    _, (cut,) = fed(reader_of(form, KINDS), [bare[:-3]], cut=True)
    assert (cut.name, cut.whole, values_of(cut)) == ("weather", False, {"city": "Bonn", "days": 3})


@pytest.mark.parametrize("pieces", [1, 5])
def test_a_call_ends_where_the_next_begins(form: Way, pieces: int) -> None:
    text = WRITTEN[form.name]
    assert read(form, text.removesuffix(form.end) + text, pieces) == (
        "",
        [("weather", {"city": "Bonn", "days": 3})] * 2,
    )
    assert read(form, f"{form.begin} no! {text}", pieces)[1] == [("weather", {"city": "Bonn", "days": 3})]
    if form.tags is not None:  # a value may say how a call begins
        said = text.replace("Bonn", f"a{form.begin}b")
        assert read(form, said, pieces) == ("", [("weather", {"city": f"a{form.begin}b", "days": 3})])


def test_nothing_comes_after_the_first_of_several_calls(form: Way) -> None:
    text = WRITTEN[form.name]
    if form.name == "invoke":  # a block of several
        text = text.replace("</invoke>", "</invoke>" + text[text.index("<invoke") : text.index("</calls")])
    for parts in ([text + text], list(text + text)):
        _, calls = fed(reader_of(form, KINDS, one=True), parts)
        assert len(calls) == 1


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
def test_a_forced_call_can_be_read(form: Way, tokenizer: Any, seed: int) -> None:
    """Random tokens, of those that the rule lets pass, make a call that follows its schema."""
    functions = [{"name": "weather", "parameters": PARAMETERS}]
    rule = call_rule(form.form, functions, terms_with({}))
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


@pytest.mark.parametrize("parameters", [{}, {"parameters": {}}, {"parameters": None}])
def test_a_function_without_parameters_gets_none(form: Way, tokenizer: Any, parameters: dict[str, Any]) -> None:
    rule = call_rule(form.form, [{"name": "weather", **parameters}], terms_with({}))
    grammar, written = Grammars(tokenizer, 128, {2}).compile(f"start: call\n{rule}")[0], list[int]()
    chance = torch.Generator().manual_seed(1)
    while not grammar.ended and len(written) < 200:
        written.append(int(grammar.restrict(torch.randn(128, generator=chance)).argmax()))
        grammar.accept(written[-1])
    assert read(form, tokenizer.decode(written), 1) == ("", [("weather", {})])
