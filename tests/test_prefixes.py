"""Who gets memory for keys and values, and what is given up for it."""

from __future__ import annotations

import random

import pytest

from slabs import Slabs
from tiermoe.batch import Kind
from tiermoe.serve.held import Held
from tiermoe.serve.prefixes import Begun, Prefixes

CONTEXT = 40


def held(tokens: list[int]) -> Held:
    found = Held()
    found.add(tokens, Kind.PROMPT)
    return found


def length(begun: Begun | None) -> int:
    return -1 if begun is None else len(begun.held.tokens)


@pytest.mark.parametrize("seed", range(4))
def test_requests_never_take_more_than_the_memory(seed: int) -> None:
    chance = random.Random(seed)
    memory, rows = chance.choice([40, 55, 90]), 5
    cache = Slabs(rows, CONTEXT)
    prefixes = Prefixes(cache, rows, memory)
    running: dict[int, list[int]] = {}  # slab → what is still to be written
    waited = begun = reused = stuck = 0
    for _ in range(600):
        if len(running) < rows and chance.random() < 0.6:
            prompt = [chance.randrange(2) for _ in range(chance.randint(1, 20))]
            answer = [chance.randrange(2) for _ in range(chance.randint(1, 20))]
            at_work = [(slab, held(cache.values[slab])) for slab in running]
            found = prefixes.begin(prompt, len(prompt) + min(len(answer), 4), at_work)
            if found is None:
                assert running
                waited += 1
            else:
                assert found.slab not in running
                assert cache.values[found.slab] == found.held.tokens == prompt[: length(found)]
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
                    prefixes.leave(slab, held(cache.values[slab]))
        assert cache.nbytes_held <= prefixes.taken <= memory
    assert min(waited, begun, reused, stuck) > 20


def test_the_oldest_is_given_up_for_a_longer_request() -> None:
    cache = Slabs(4, CONTEXT)
    prefixes = Prefixes(cache, 4, 40)
    for first in (1, 2, 3):
        begun = prefixes.begin([first] * 9, 12, [])
        assert begun is not None
        cache.write(begun.slab, cache.values[begun.slab] + [first] * 12)
        prefixes.leave(begun.slab, held(cache.values[begun.slab]))
    assert prefixes.begin([9] * 10, 16, []) is not None
    assert length(prefixes.begin([3] * 9, 12, [])) == 8
    assert length(prefixes.begin([1] * 9, 12, [])) == 0


def test_a_beginning_is_taken_over_where_there_is_no_memory_for_both() -> None:
    cache = Slabs(4, CONTEXT)
    prefixes = Prefixes(cache, 4, 40)
    first = prefixes.begin([1] * 20, 30, [])
    assert first is not None
    cache.write(first.slab, [1] * 30)
    prefixes.leave(first.slab, held(cache.values[first.slab]))
    second = prefixes.begin([1] * 10 + [2] * 5, 20, [])
    assert second is not None
    assert (second.slab, length(second), prefixes.taken) == (first.slab, 10, 30)
    cache.write(second.slab, cache.values[second.slab] + [2] * 5)
    prefixes.leave(second.slab, held(cache.values[second.slab]))
    assert prefixes.taken == 30  # what was written behind it before has not come back
