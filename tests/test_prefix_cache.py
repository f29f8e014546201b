"""Prefix cache: who gets memory for keys and values, what is evicted for it, and which prefixes have the same bits."""

from __future__ import annotations

import random

import pytest

from slabs import Slabs
from tiermoe.batch import Kind
from tiermoe.model.cache.prefix import OpenedSlab, Part, PrefixCache, SlabContents

CONTEXT = 40


def held(*parts: tuple[list[int], Kind]) -> SlabContents:
    found = SlabContents()
    for tokens, source in parts:
        found.add(tokens, source)
    return found


def read(tokens: list[int]) -> SlabContents:
    return held((tokens, Kind.PROMPT))


def length(begun: OpenedSlab | None) -> int:
    return -1 if begun is None else len(begun.contents.tokens)


@pytest.mark.parametrize("seed", range(4))
def test_requests_never_take_more_than_the_memory(seed: int) -> None:
    chance = random.Random(seed)
    memory, rows = chance.choice([40, 55, 90]), 5
    cache = Slabs(rows, CONTEXT)
    prefixes = PrefixCache(cache, rows, memory)
    running: dict[int, list[int]] = {}  # slab → what is still to be written
    waited = begun = reused = stuck = 0
    for _ in range(600):
        if len(running) < rows and chance.random() < 0.6:
            prompt = [chance.randrange(2) for _ in range(chance.randint(1, 20))]
            answer = [chance.randrange(2) for _ in range(chance.randint(1, 20))]
            at_work = [(slab, read(cache.values[slab])) for slab in running]
            found = prefixes.open(prompt, len(prompt) + min(len(answer), 4), at_work)
            if found is None:
                assert running
                waited += 1
            else:
                assert found.slab not in running
                assert cache.values[found.slab] == found.contents.tokens == prompt[: length(found)]
                assert length(found) < len(prompt)
                running[found.slab] = [*prompt, *answer][length(found) :]
                begun, reused = begun + 1, reused + (length(found) > 0)
        for slab in list(running):
            count = min(chance.randint(0, 6), len(running[slab]))
            if not prefixes.grow(slab, len(cache.values[slab]) + count):
                stuck += 1
                assert len(running) > 1
                if chance.random() < 0.3:  # put back
                    prefixes.close(slab)
                    del running[slab]
                continue
            cache.write(slab, cache.values[slab] + running[slab][:count])
            running[slab] = running[slab][count:]
            if not running[slab] or chance.random() < 0.05:
                del running[slab]
                if chance.random() < 0.1:
                    prefixes.close(slab)
                else:
                    prefixes.leave(slab, read(cache.values[slab]))
        assert cache.nbytes_held <= prefixes.reserved <= memory
    assert min(waited, begun, reused, stuck) > 20


def test_the_oldest_is_given_up_for_a_longer_request() -> None:
    cache = Slabs(4, CONTEXT)
    prefixes = PrefixCache(cache, 4, 40)
    for first in (1, 2, 3):
        begun = prefixes.open([first] * 9, 12, [])
        assert begun is not None
        cache.write(begun.slab, cache.values[begun.slab] + [first] * 12)
        prefixes.leave(begun.slab, read(cache.values[begun.slab]))
    assert prefixes.open([9] * 10, 16, []) is not None
    assert length(prefixes.open([3] * 9, 12, [])) == 8
    assert length(prefixes.open([1] * 9, 12, [])) == 0


def test_a_beginning_is_taken_over_where_there_is_no_memory_for_both() -> None:
    cache = Slabs(4, CONTEXT)
    prefixes = PrefixCache(cache, 4, 40)
    first = prefixes.open([1] * 20, 30, [])
    assert first is not None
    cache.write(first.slab, [1] * 30)
    prefixes.leave(first.slab, read(cache.values[first.slab]))
    second = prefixes.open([1] * 10 + [2] * 5, 20, [])
    assert second is not None
    assert (second.slab, length(second), prefixes.reserved) == (first.slab, 10, 30)
    cache.write(second.slab, cache.values[second.slab] + [2] * 5)
    prefixes.leave(second.slab, read(cache.values[second.slab]))
    assert prefixes.reserved == 30  # what was written behind it before has not come back


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
def test_tokens_are_alike_that_ran_in_the_same_steps(other: SlabContents, alike: int) -> None:
    mine = held(([1, 2, 3, 4], Kind.PROMPT), ([5, 6], Kind.DECODE), ([7], Kind.DECODE))
    assert mine.parts == [Part(4, Kind.PROMPT), Part(3, Kind.DECODE)]
    assert mine.reusable(other) == alike


def test_a_beginning_remembers_what_its_step_had_beyond() -> None:
    mine = held(([1, 2, 3, 4], Kind.PROMPT), ([5], Kind.DECODE))
    begun = mine.prefix(3)
    assert (begun.tokens, begun.parts, begun.written) == ([1, 2, 3], [Part(3, Kind.PROMPT, (4,))], 4)
    assert begun.reusable(mine) == 3
    assert begun.reusable(held(([1, 2, 3, 9], Kind.PROMPT))) == 0


def test_tokens_that_lie_alike_came_in_the_same_parts() -> None:
    past = held(([1, 2, 3, 4], Kind.PROMPT), ([5, 6], Kind.PROMPT), ([7], Kind.DECODE), ([8], Kind.DECODE))
    assert [part.count for part in past.parts] == [4, 2, 2]
    for its, length in (
        (past, 8),
        (past.prefix(7), 7),
        (past.prefix(5), 4),  # the second part's step had another token
        (past.prefix(3), 0),
        (held(([1, 2, 3, 4], Kind.PROMPT), ([5], Kind.PROMPT), ([6], Kind.PROMPT)), 4),
        (held(([1, 2, 3, 4], Kind.PROMPT), ([5, 6, 7], Kind.PROMPT)), 4),
        (held(([1, 2], Kind.PROMPT), ([3, 4], Kind.PROMPT)), 0),
        (held(([1, 2, 3, 4], Kind.DECODE)), 0),
        (held(), 0),
    ):
        assert past.reusable(its) == length
    begun = past.prefix(3)  # as a request that shares three tokens holds them
    begun.add([9], Kind.PROMPT)
    assert begun.written == 4
    assert begun.reusable(past) == 3
    assert begun.step_tokens(*begun.part_at(1)) == (1, 2, 3, 4)


@pytest.mark.parametrize(("length", "stays"), [(4, 0), (5, 5), (7, 5), (8, 8), (10, 10), (11, 10), (12, 12), (99, 12)])
def test_steps_run_behind_whole_steps_and_behind_any_generated_token(length: int, stays: int) -> None:
    parts = [Part(5, Kind.PROMPT), Part(3, Kind.PROMPT, (7,)), Part(2, Kind.DECODE), Part(2, Kind.PROMPT)]
    assert SlabContents(list(range(12)), parts).resumable(length) == stays
