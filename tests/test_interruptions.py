"""Steps that are interrupted anywhere: the next one gives the right tokens, and nothing of the last one is left."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiermoe
from fake_link import FakeLink, demands, each, lru_of
from patience import within
from tiermoe.offload.cache import ExpertCache
from tiermoe.offload.loader import ExpertLoader
from tiermoe.offload.policies.allotment import Share, by_use
from tiermoe.types import ExpertKey

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # generators that end
GREEDY = tiermoe.Sampling(max_tokens=8, temperature=0)


class Interruption(BaseException):
    """What Ctrl-C raises, as far as code is concerned."""


class Interrupted:
    """Python's profiler of a thread: raises where Python itself looks for signals, at the n-th such place. `places`:
    those that have been passed."""

    def __init__(self, at: int) -> None:
        self.places = 0
        self._at = at

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return"):
            self.places += 1
            if self.places == self._at:
                raise Interruption

    def run(self, work: Callable[[], Any]) -> bool:
        """Whether `work` came to its end."""
        sys.setprofile(self)
        try:
            work()
        except Interruption:
            return False
        finally:
            sys.setprofile(None)
        return True


def answered(model: Any, tokenizer: Any, at: int = 0) -> tuple[list[int], int]:
    """The tokens, none where the `at`-th place interrupted it, and the places passed."""
    watch, tokens = Interrupted(at), list[int]()
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids

    def answer() -> None:
        tokens.extend(tiermoe.generate(model, tokenizer, ids, GREEDY).token_ids)

    within(lambda: watch.run(answer))
    return tokens, watch.places


@pytest.fixture(params=["6%", "25%", "100%"])
def loaded(request: pytest.FixtureRequest, shipped: Path) -> Iterator[Any]:
    with tiermoe.load(shipped, memory="4GiB", device="cpu", bits=4, cache=request.param) as both:
        yield both


def nothing_is_left(engine: Any) -> bool:
    """Whether every slot is free or holds an expert."""
    engine.loader.drain()
    cache = engine.loader.cache
    pools = {cache.pool(ExpertKey(layer, 0, 4)) for layer in range(len(engine.layers))}
    return len(cache) + sum(map(cache.free, pools)) == cache.slots


def interrupt(model: Any, tokenizer: Any, times: int) -> None:
    expected, places = answered(model, tokenizer)
    draw = random.Random(5)
    for _ in range(times):
        at = draw.randrange(1, places)
        answered(model, tokenizer, at)
        assert answered(model, tokenizer)[0] == expected, f"after an interruption at place {at}"
        assert nothing_is_left(model.tiermoe), f"after an interruption at place {at}"


def test_a_step_after_an_interrupted_one_is_whole(loaded: Any) -> None:
    interrupt(*loaded, times=15)


@pytest.mark.long
def test_a_thousand_interruptions(loaded: Any) -> None:
    interrupt(*loaded, times=1000)


def test_wherever_deciding_is_interrupted_no_slot_is_lost_or_held_by_two() -> None:
    places, at = 0, 0
    while at <= places:
        link = FakeLink()
        controller = ExpertLoader(ExpertCache(by_use(Share(7, [99] * 3, minimum=2)), lru_of, (4,)), link)
        addresses: dict[ExpertKey, int] = {}  # slots, as kernels have them
        controller.cache.on_leave = lambda key, addresses=addresses: addresses.pop(key, None)
        watch = Interrupted(at)

        def work(
            controller: ExpertLoader = controller, link: FakeLink = link, addresses: dict[ExpertKey, int] = addresses
        ) -> None:
            for number in range(6):
                layer, first = number % 3, number * 5 % 8
                for group in controller.run_layer(layer, demands(first, (first + 1) % 8, (first + 3) % 8)):
                    addresses.update({ExpertKey(layer, expert, bits): slot for expert, slot, bits in group})
                    link.step()
                controller.prefetch(ExpertKey((layer + 1) % 3, expert, 4) for expert in range(number, 8))
                link.step()
                controller.cache.follow([[1, 1, 1, 1], [9, 9, 9, 9], [1, 1, 1, 1]] if number % 2 else [[1] * 4] * 3)

        ended = watch.run(work)
        places = watch.places if ended else places
        link.roll_back()
        controller.roll_back()
        cache = controller.cache
        keys = [ExpertKey(layer, expert, 4) for layer in range(3) for expert in range(8)]
        slots = {key: slot for key in keys if (slot := cache.slot(key)) is not None}
        assert len(set(slots.values())) == len(slots) == len(cache), at
        assert len(cache) + sum(map(cache.free, range(3))) == cache.slots == 7, at
        assert all(link.contents[slot] == key for key, slot in slots.items()), at
        assert all(slots.get(key) == slot for key, slot in addresses.items()), at
        for layer in range(3):
            assert len(list(each(controller.run_layer(layer, demands(*range(8)))))) == 8, at
        at += 1
