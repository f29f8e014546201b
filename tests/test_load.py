"""What `benchmarks.load` makes of what it saw."""

from __future__ import annotations

import pytest

from benchmarks.load import broken_rules, drift
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
