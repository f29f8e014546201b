"""Answers in the harmony format. The oracle: what its description says of them (openai/harmony, docs/format.md)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from serving import calls_of, parts_of
from tiermoe.engine.detokenize import Detokenizer
from tiermoe.engine.request import Piece
from tiermoe.model.chat.reader import ToolCall
from tiermoe.serve.chats import PieceReader
from tiermoe.serve.grammar import Grammars, json_rule
from tiermoe.serve.harmony import ChannelReader, message_of, rules_of, speaks, thought_end, tool_of
from tiny import write_tokenizer

THOUGHT = 'User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.'
CALL = '{"location":"San Francisco"}'
BOTH = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = 4."
CALLED = (
    "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{CALL}"
)
PREAMBLE = (
    "<|channel|>analysis<|message|>long<|end|><|start|>assistant<|channel|>commentary<|message|>**Action plan**:\n1. a"
    '<|end|><|start|>assistant<|channel|>commentary to=functions.make<|constrain|>json<|message|>{"path": "a"}'
)
WEATHER = [("get_weather", {"location": "San Francisco"})]
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (BOTH, THOUGHT, "2 + 2 = 4.", []),
    (CALLED, "Need to use function get_weather.", "", WEATHER),
    (CALLED + "<|call|>", "Need to use function get_weather.", "", WEATHER),
    (f" to=functions.get_weather<|channel|>commentary<|message|>{CALL}", "", "", WEATHER),  # recipient in the role
    (f"<|channel|>analysis to=functions.get_weather<|message|>{CALL}", "", "", WEATHER),
    ("<|channel|>commentary to=functions.now<|message|>", "", "", [("now", {})]),
    (PREAMBLE, "long", "**Action plan**:\n1. a", [("make", {"path": "a"})]),
    ('<|channel|>analysis to=python<|message|>print(1)<|end|><|start|>assistant<|channel|>final<|message|>1',
     "print(1)", "1", []),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", "a\nb", "", []),
    ("<|channel|>final<|message|>a < b <| c", "", "a < b <| c", []),
    ("<|channel|>commentary to=functions.make<|message|> no JSON", "", "no JSON", []),
    ("<|channel|>anal", "", "", []),
    ("as it is\n", "", "as it is\n", []),
    ("to", "", "to", []),
]  # fmt: skip


def fed(text: str, pieces: int, cut: bool = False) -> tuple[str, str, list[ToolCall]]:
    """Thought, text and calls that a reader tells of an answer in random pieces. cut: it was cut off."""
    reader, parts = ChannelReader(), parts_of(text, pieces)
    told = [
        reader.add(part, last, last and cut) for part, last in zip(parts, [False] * (pieces - 1) + [True], strict=True)
    ]
    calls = calls_of([piece for chunk in told for piece in chunk.calls])
    assert reader.called is any(call.whole for call in calls)
    return "".join(chunk.thought for chunk in told), "".join(chunk.text for chunk in told), calls


@pytest.mark.parametrize("pieces", [1, 2, 5, 40])
@pytest.mark.parametrize(("text", "thought", "answer", "calls"), CASES)
def test_messages_are_read_however_their_text_comes(
    text: str, thought: str, answer: str, calls: list[Any], pieces: int
) -> None:
    *said, found = fed(text, pieces)
    assert said == [thought, answer]
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls


@pytest.mark.parametrize("pieces", [1, 5])
@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        (CALLED[:-9], "", [("get_weather", CALL[:-9])]),
        (CALLED.partition("{")[0], "", [("get_weather", "")]),
        (CALLED.partition(".get")[0], "", []),
        (CALLED + "<|call|>", "", [("get_weather", CALL)]),
        (BOTH[:-3], "2 + 2 =", []),
    ],
)
def test_a_call_that_is_cut_off_has_the_arguments_so_far(text: str, answer: str, calls: list[Any], pieces: int) -> None:
    _, said, found = fed(text, pieces, cut=True)
    assert (said, [(call.name, call.arguments) for call in found]) == (answer, calls)
    assert [call.whole for call in found] == [text.endswith("<|call|>")] * len(found)


def test_arguments_come_as_they_are_written() -> None:
    reader, at = ChannelReader(), CALLED.index("San")
    pieces = reader.add(CALLED[:at]).calls
    assert pieces[-1].call.arguments == '{"location":"'
    for letter in "San Fr":
        (piece,) = reader.add(letter).calls
        assert piece.arguments == letter
    pieces = reader.add("", last=True).calls  # the answer ends within them
    assert [(piece.kind, piece.call.whole) for piece in pieces] == [("end", False)]


@pytest.mark.parametrize(("text", "finish"), [(BOTH, "stop"), (CALLED, "tool_calls")])
def test_an_answer_ends_as_its_last_message_says(text: str, finish: str) -> None:
    reader = PieceReader(ChannelReader())
    pieces = [Piece(1, part, (1,)) for part in parts_of(text, 9)] + [Piece(1, "", (2,), finish="stop")]
    assert [reader.add(piece).finish for piece in pieces] == [None] * 9 + [finish]
    assert 0 < reader.thought_tokens < 9


def test_what_clients_send_back_is_as_templates_take_it() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    assert message_of({"role": "user", "content": "a"}) == {"role": "user", "content": "a"}
    thought = {"role": "assistant", "reasoning_content": "b", "content": "a"}
    assert message_of(thought) == thought
    called = message_of({**thought, "tool_calls": [call]})
    assert called == {"role": "assistant", "content": "", "reasoning_content": "b\na", "tool_calls": [call]}
    assert speaks("{{ '<|start|>assistant<|channel|>final<|message|>' }}")
    assert not speaks("<think>")
    bare = {"type": "function", "function": {"name": "f"}}
    assert tool_of(bare) == {"type": "function", "function": {"name": "f", "description": ""}}
    described = {"type": "function", "function": {"name": "f", "description": "d"}}
    assert tool_of(described) == described


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Letters, and the format's special tokens."""
    write_tokenizer(directory := tmp_path_factory.mktemp("letters"))
    found = PreTrainedTokenizerFast.from_pretrained(directory)
    names = ("channel", "message", "end", "start", "constrain", "call")
    found.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
    return found


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return found


def test_special_tokens_are_told(tokenizer: Any) -> None:
    tokens = ids(tokenizer, CALLED)
    every = frozenset(tokenizer.added_tokens_decoder)
    for special, expected in ((every, CALLED), (frozenset(), tokenizer.decode(tokens, skip_special_tokens=True))):
        text = Detokenizer(tokenizer, special=special)
        assert "".join(text.add(token) for token in tokens) + text.end() == expected


FUNCTION = {"name": "get_weather", "parameters": {"properties": {"location": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("text", "forced", "free"),
    [
        (CALLED, True, True),
        (CALLED.partition("assistant")[2], True, True),  # without a thought
        ('<|channel|>final<|message|>{"a": 1}', False, True),
        (CALLED.replace("get_weather", "other"), False, False),
        (CALLED.replace('"San Francisco"', "7"), False, False),
        ('{"a": 1}', False, False),
    ],
)
def test_a_grammar_has_the_headers(tokenizer: Any, text: str, forced: bool, free: bool) -> None:
    """forced: a call alone is let pass; free: a call, or JSON."""
    grammars = Grammars(tokenizer, len(tokenizer), {2})
    for term, expected in ((None, forced), (json_rule({"type": "object"}), free)):
        grammar, passed = grammars.compile(rules_of([FUNCTION], term))[0], True
        for token in ids(tokenizer, text):
            passed = passed and not grammar.restrict(torch.zeros(len(tokenizer)))[token]
            if passed:
                grammar.accept(token)
        assert (passed and grammar.ended) is expected


def test_a_grammar_has_the_forced_end_of_a_thought(tokenizer: Any) -> None:
    for calls, rules in ((True, rules_of([FUNCTION], None)), (False, rules_of([], json_rule({"type": "object"})))):
        grammar = Grammars(tokenizer, len(tokenizer), {2}).compile(rules)[0]
        for token in ids(tokenizer, f"<|channel|>analysis<|message|>so{thought_end(calls)}"):
            assert grammar.restrict(torch.zeros(len(tokenizer)))[token] == 0
            grammar.accept(token)
