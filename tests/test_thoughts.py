"""What a model thinks, told apart from what it answers."""

from __future__ import annotations

import pytest

from serving import parts_of
from tiermoe.serve.thoughts import ThoughtReader, opened, thinks

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
]


@pytest.mark.parametrize("pieces", [1, 2, 5, 40])
@pytest.mark.parametrize(("inside", "text", "thought", "answer"), CASES)
def test_a_thought_is_read_however_its_text_comes(
    inside: bool, text: str, thought: str, answer: str, pieces: int
) -> None:
    reader, parts = ThoughtReader(inside), parts_of(text, pieces)
    told = [reader.add(part, index == len(parts) - 1) for index, part in enumerate(parts)]
    assert ("".join(each[0] for each in told), "".join(each[1] for each in told)) == (thought, answer)


def test_the_prompt_tells_where_an_answer_begins() -> None:
    assert opened("assistant\n<think>\n")
    assert not opened("assistant\n<think>\n\n</think>\n\n")
    assert thinks("{{ '<think></think>' }}")
    assert not thinks(None)
