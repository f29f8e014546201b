"""What two sequences have alike, bit for bit: tokens that ran in the same steps."""

from __future__ import annotations

import pytest

from tiermoe.batch import Kind
from tiermoe.serve.held import Held, Part


def held(*parts: tuple[list[int], Kind]) -> Held:
    found = Held()
    for tokens, how in parts:
        found.add(tokens, how)
    return found


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (held(([1, 2, 3, 4], Kind.PROMPT), ([5], Kind.DECODE)), 5),
        (held(([1, 2, 3, 9], Kind.PROMPT)), 0),  # a step is alike whole or not at all
        (held(([1, 2, 3, 4, 5], Kind.PROMPT)), 0),  # in a longer step
        (held(([1, 2], Kind.PROMPT), ([3, 4], Kind.PROMPT)), 0),
        (held(([1, 2, 3, 4], Kind.PROMPT), ([5, 6, 8], Kind.DECODE)), 6),  # steps of one token each, cut anywhere
    ],
)
def test_tokens_are_alike_that_ran_in_the_same_steps(other: Held, alike: int) -> None:
    mine = held(([1, 2, 3, 4], Kind.PROMPT), ([5, 6], Kind.DECODE), ([7], Kind.DECODE))
    assert mine.parts == [Part(4, Kind.PROMPT), Part(3, Kind.DECODE)]
    assert mine.alike(other) == alike


def test_a_beginning_remembers_what_its_step_had_beyond() -> None:
    mine = held(([1, 2, 3, 4], Kind.PROMPT), ([5], Kind.DECODE))
    begun = mine.beginning(3)
    assert (begun.tokens, begun.parts, begun.reach) == ([1, 2, 3], [Part(3, Kind.PROMPT, (4,))], 4)
    assert begun.alike(mine) == 3
    assert begun.alike(held(([1, 2, 3, 9], Kind.PROMPT))) == 0
