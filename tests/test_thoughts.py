"""What a model thinks, told apart from what it answers."""

from __future__ import annotations

import pytest

from serving import parts_of
from tiermoe.engine.request import ThoughtBudget
from tiermoe.model.chat.format import ChatFormat
from tiermoe.model.chat.reader import AnswerReader
from tiermoe.serve.harmony import ChannelReader, thought_end

FORM = ChatFormat(thought=("<think>", "</think>"))
CASES = [
    (False, "<think>\nwell, 2 < 3\n\nso\n</think>\n\nyes <b>", "well, 2 < 3\n\nso", "yes <b>"),
    (False, "\n<think>a</think>b", "a", "b"),
    (False, "no thought\n", "", "no thought\n"),
    (False, "<thin", "", "<thin"),
    (False, "\n\nas it is", "", "\n\nas it is"),
    (False, "a <think>b</think>", "", "a <think>b</think>"),
    (True, "\nwell\n</think>\nyes", "well", "yes"),
    (True, "never ends </thi", "never ends </thi", ""),
    (False, "<think></think>\n\n", "", ""),
    (True, "<think>a</think>b", "a", "b"),  # tags that the template has written, or the model before
    (True, "\n<think>\na\n</think>\n\n</think>\n\nb", "a", "b"),
    (False, "<think>a</think>b</think>c", "a", "bc"),
    (False, "<think>a</think>b </thi", "a", "b </thi"),
    (False, "b</think>c", "", "b</think>c"),
    (True, "<thi</think>x", "<thi", "x"),
]


@pytest.mark.parametrize("pieces", [1, 2, 5, 40])
@pytest.mark.parametrize(("inside", "text", "thought", "answer"), CASES)
def test_a_thought_is_read_however_its_text_comes(
    inside: bool, text: str, thought: str, answer: str, pieces: int
) -> None:
    reader, parts = AnswerReader(FORM, inside=inside), parts_of(text, pieces)
    told = [reader.add(part, index == len(parts) - 1) for index, part in enumerate(parts)]
    assert ("".join(each.thought for each in told), "".join(each.text for each in told)) == (thought, answer)


def test_the_prompt_tells_where_an_answer_begins() -> None:
    assert FORM.opened("assistant\n<think>\n")
    assert not FORM.opened("assistant\n<think>\n\n</think>\n\n")
    assert not ChatFormat().opened("assistant\n<think>\n")
    assert FORM.unfinished("assistant\n<think>\nwell")
    assert not FORM.unfinished("assistant\n<think>\nwell\n</think>\nso")


def written(budget: ThoughtBudget, wanted: str, count: int) -> str:
    """What a model writes that wants to write `wanted` again and again, a letter a token."""
    text = ""
    for _ in range(count):
        letter = wanted[len(text) % len(wanted)] if budget.forced is None else chr(budget.forced)
        budget.add(letter)
        text += letter
    return text


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("most", [0, 1, 2, 7])
def test_the_end_of_a_thought_is_forced_behind_its_budget(inside: bool, most: int) -> None:
    begin, end = "" if inside else "\n<think>", "</think>"
    budget = ThoughtBudget(most, [*map(ord, end)], AnswerReader(FORM, inside=inside))
    begun = begin + "abc" * 9
    text = written(budget, begun, 60)
    assert text.startswith(begun[: len(begin) + most] + end)
    assert text.count(end) == 1
    assert budget.forced is None


@pytest.mark.parametrize("most", [4, 12, 50])  # the end has a token for each of its letters here
def test_a_thought_within_its_budget_ends_by_itself(most: int) -> None:
    wanted = "abcd</think>and more, without <think>another</think>."
    budget = ThoughtBudget(most, [*map(ord, "</think>")], AnswerReader(FORM, inside=True))
    assert written(budget, wanted, len(wanted)) == wanted


@pytest.mark.parametrize("calls", [False, True])
def test_thoughts_of_channels_share_a_budget(calls: bool) -> None:
    """The end leads into a channel that is none of thoughts; a thought that begins behind it ends at once."""
    end = thought_end(calls)
    budget = ThoughtBudget(5, [*map(ord, end)], ChannelReader())
    begin = "<|channel|>analysis<|message|>"
    text = written(budget, begin + "abcdefghij", len(begin + end) + 5)
    assert text == begin + "abcde" + end
    for letter in "<|message|>" * calls + "so<|end|><|start|>assistant" + begin:
        assert budget.forced is None
        budget.add(letter)
    assert budget.forced == ord(end[0])
