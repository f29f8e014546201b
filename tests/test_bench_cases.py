"""`tiermoe bench`: which cases there are, in which order they run, and how its lists are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiermoe.bench.cases import (
    Condition,
    alternating,
    budgets_asked,
    conditions,
    groups_asked,
    numbers_asked,
    peers_asked,
    starts_asked,
)
from tiermoe.bench.engines import files_to_drop, warm_tokens
from tiermoe.bench.stretches import check_lengths, random_ids, rows
from tiermoe.errors import ConfigError, PromptError

MIB = 1 << 20


def test_lists_are_read() -> None:
    assert budgets_asked("700MiB, none,700MiB") == [700 * MIB, None]
    assert budgets_asked(None) == [None]
    assert groups_asked("16x32,128X128") == [(16, 32), (128, 128)]
    assert groups_asked("none") == []
    assert numbers_asked("1,4,16", "batch") == [1, 4, 16]
    assert starts_asked("warm,cold") == ["warm", "cold"]
    assert peers_asked("all") == ["llama.cpp", "transformers", "accelerate"]
    assert peers_asked("none") == []


@pytest.mark.parametrize(
    ("read", "text", "reason"),
    [
        (groups_asked, "16", "group '16' is not PROMPTxOUTPUT"),
        (groups_asked, "0x4", "group '0x4' is not"),
        (groups_asked, "16x32x2", "is not PROMPTxOUTPUT"),
        (budgets_asked, "banana", "memory 'banana' is not a size"),
        (lambda text: numbers_asked(text, "batch"), "4,0", "batch '0' is not a whole number"),
        (lambda text: numbers_asked(text, "batch"), ",", "--batch names nothing"),
        (starts_asked, "warn", "did you mean warm"),
        (peers_asked, "lama.cpp", "did you mean llama.cpp"),
        (peers_asked, "vllm", "there are llama.cpp, transformers, accelerate"),
    ],
)
def test_what_is_no_list_is_said(read: object, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(text)  # type: ignore[operator]


def test_prompts_alone_run_in_a_batch_of_one() -> None:
    found = conditions([MIB, None], [(16, 32)], [512], [1, 4], ["warm", "cold"])
    assert len(found) == len(set(found)) == 2 * 2 * 3
    assert {condition.batch for condition in found if not condition.output} == {1}
    assert [condition.label for condition in found[:4]] == [
        "1 MiB, 16+32, warm", "1 MiB, 16+32, batch 4, warm", "1 MiB, prompt 512, warm", "1 MiB, 16+32, cold",
    ]  # fmt: skip


def test_engines_alternate_and_every_other_round_goes_back() -> None:
    assert [name for _, name in alternating("abc", 3)] == list("abccbaabc")
    assert [number for number, _ in alternating("ab", 2)] == [0, 0, 1, 1]


def test_rows_are_different_stretches_at_equal_distances() -> None:
    found = rows(range(100), Condition(None, 3, 2, batch=4))
    assert found == [[0, 1, 2, 3, 4], [25, 26, 27, 28, 29], [50, 51, 52, 53, 54], [75, 76, 77, 78, 79]]


def test_random_tokens_are_of_the_whole_vocabulary_and_always_the_same() -> None:
    found = random_ids(1000)
    assert (min(found), max(found)) == (0, 999)
    assert found == random_ids(1000)
    check_lengths([Condition(None, 4096, 128, batch=16)], len(found), None)


def test_lengths_beyond_text_or_context_are_refused() -> None:
    check_lengths([Condition(None, 16, 16), Condition(None, 32, 0)], 32, 32)
    with pytest.raises(PromptError, match="16\\+17 is 33 tokens, the model's context has 32"):
        check_lengths([Condition(None, 16, 17)], 1000, 32)
    with pytest.raises(PromptError, match="takes 64 tokens of text, this one has 63"):
        check_lengths([Condition(None, 8, 8, batch=4)], 63, None)


@pytest.mark.parametrize(
    ("condition", "warm", "dropped"),
    [
        (Condition(None, 16, 32), 48, False),
        (Condition(None, 16, 32, start="cold"), 0, True),
        (Condition(MIB, 16, 32), 16, True),
        (Condition(MIB, 16, 32, start="cold"), 0, True),
    ],
)
def test_what_runs_before_the_clock_and_what_the_page_cache_may_hold(
    condition: Condition, warm: int, dropped: bool
) -> None:
    assert warm_tokens(condition) == warm
    assert bool(files_to_drop(condition, (Path("x"),))) is dropped
