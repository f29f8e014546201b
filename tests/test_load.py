"""What `benchmarks.load` makes of what it saw."""

from __future__ import annotations

import pytest

from benchmarks.load import broken_rules, drift, hostile_broken
from benchmarks.load_clients import Tally

ENDED = {"exit": 0, "oom_kills": 0}


def test_drift_is_that_of_the_last_fifth_to_the_second() -> None:
    assert drift([50, 100, 100, 100, 103]) == pytest.approx(0.03)
    assert drift([1, 1, 1]) is None


@pytest.mark.parametrize(
    ("first", "last", "ended", "drifted", "rule"),
    [
        (Tally(), Tally(), {"exit": -9, "oom_kills": 1}, 0.0, "killed"),
        (Tally(), Tally(), ENDED, 0.03, "drift"),
        (Tally(longest_silence_s=11), Tally(), ENDED, 0.0, "standstill"),
        (Tally(longest_standstill_s=11), Tally(), ENDED, 0.0, "standstill"),
        (Tally(told=1), Tally(), ENDED, 0.0, "lost"),
        (Tally(), Tally(lost=1), ENDED, 0.0, "lost"),
    ],
)
def test_each_rule_is_told_of(first: Tally, last: Tally, ended: dict[str, int], drifted: float, rule: str) -> None:
    (line,) = broken_rules(first, last, ended, drifted)
    assert line.startswith(f"{rule}: ")


def test_answers_that_end_with_a_word_when_the_server_does_break_no_rule() -> None:
    assert broken_rules(Tally(longest_wait_s=30), Tally(told=3, refused=9), ENDED, -0.01) == []


@pytest.mark.parametrize(
    ("unexpected", "beside", "peak", "said"),
    [
        (["schema: 200", "schema: 200"], (1.0, 0.1), 100, "schema: 200"),
        ([], (1.7, 0.1), 100, "1.70 s to a first token after 1.00"),
        ([], (1.0, 0.8), 100, "0.80 s to a next token after 0.10"),
        ([], (1.0, 0.1), 101, "101 bytes resident"),
    ],
)
def test_what_hostile_clients_cost_others_is_told_of(
    unexpected: list[str], beside: tuple[float, float], peak: int, said: str
) -> None:
    names = ("first token", "next token")
    alone = dict(zip(names, (1.0, 0.1), strict=True))
    (line,) = hostile_broken(unexpected, alone, dict(zip(names, beside, strict=True)), 0.3, peak, 100)
    assert line.startswith("hostile: ")
    assert said in line


def test_hostile_clients_that_cost_two_steps_break_no_rule() -> None:
    assert hostile_broken([], {"first token": 1.0}, {"first token": 1.6}, 0.31, 100, 100) == []
