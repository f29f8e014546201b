"""Requests that lose their memory to earlier ones: what has run of them runs again with the same bits."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor

from slabs import Slabs
from tiermoe.batch import Batch, Kind
from tiermoe.engine import request as requests
from tiermoe.engine.request import Piece, Request, RequestState
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.sampling import Sampling
from tiermoe.metrics import PhaseMetrics
from tiermoe.model.cache.prefix_disk import StoredPrefix

VOCABULARY, CHUNK, CONTEXT = 50, 8, 60


class Rounding:
    """An engine whose numbers depend on everything that they may: what came before, and all tokens of their step."""

    lossy, longest_context, generation_config = False, None, None
    settings, config = SimpleNamespace(chunk=CHUNK), SimpleNamespace(vocab_size=VOCABULARY)
    decoder = SimpleNamespace(rows_together=True, batch_invariant=True, can_verify_draft=True)

    def __init__(self, memory: int, missing: bool) -> None:
        self.plan = SimpleNamespace(context=CONTEXT, slots=1, all_slots=1 + missing, kv_memory=memory, prompt_chunks=1)
        self.memory = memory
        self.cache = Slabs(8, CONTEXT)

    def new_cache(self, rows: int, context: int) -> Slabs:
        return self.cache

    def snapshot(self) -> PhaseMetrics:
        return PhaseMetrics()

    def step(self, batch: Batch, cache: Slabs, every: bool = False) -> Tensor:
        logits = []
        for row in batch.rows:
            values = cache.values[row.slab][: row.first]
            assert len(values) == row.first
            for token in row.tokens:
                beside = row.tokens if row.kind is Kind.PROMPT else (token,)
                values.append(crc32(repr((values[-1:], token, beside)).encode()))
                logits.append(torch.eye(VOCABULARY)[values[-1] % VOCABULARY])
            cache.write(row.slab, values)
            if not every:
                logits[-len(row.tokens) :] = logits[-1:]
        assert cache.nbytes_held <= self.memory
        return torch.stack(logits)


@pytest.fixture(autouse=True)
def _a_few_tokens_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "AHEAD", 4)


def request(prompt: list[int], tokens: int, scored: bool = False) -> Request:
    return Request(prompt, Sampling(max_tokens=tokens), logprobs=1, prompt_logprobs=scored)


def rest_of(batch: RequestLoop) -> list[Piece]:
    """What is still said. An endless exchange of memory is no answer."""
    pieces: list[Piece] = []
    for _ in range(9999):
        if batch.scheduler.idle:
            return pieces
        pieces += batch.step()
    raise AssertionError("requests do not end")


class Text:
    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, tokens))


class Watched:
    """Remembers what lay in the slabs of requests that were put back amid their answers, and compares when they go on.
    shared: of them, those that had begun with what another one had left, amid a part of it."""

    def __init__(self, engine: Rounding, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: dict[int, list[int]] = {}
        self.shared = self.compared = 0
        preempt, choose = RequestState.preempt, RequestState.choose

        def remember(row: RequestState, saved: StoredPrefix | None) -> None:
            if row.replaying:
                values = engine.cache.values[row.slab][: row.length]
                self.before[row.number] = max(self.before.get(row.number, []), values, key=len)
                self.shared += any(part.cropped for part in row.contents.parts)
            preempt(row, saved)

        def compare(row: RequestState, *arguments: Any) -> Piece:
            if row.number in self.before:
                before = self.before[row.number]
                assert engine.cache.values[row.slab][: len(before)] == before
                self.compared += 1
            return choose(row, *arguments)

        monkeypatch.setattr(RequestState, "preempt", remember)
        monkeypatch.setattr(RequestState, "choose", compare)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_what_runs_again_has_the_bits_it_had(seed: int, missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of which many begin alike, in memory for two or three of them."""
    chance, engine = random.Random(seed), Rounding(110, missing)
    watched = Watched(engine, monkeypatch)
    batch, pieces = RequestLoop(engine, Text(), 8, set()), list[Piece]()
    beginnings = [chance.choices(range(VOCABULARY), k=20) for _ in range(2)]
    asked = {}
    for _ in range(60):
        own = chance.choices(range(VOCABULARY), k=chance.randint(1, 9))
        prompt = [*chance.choice(beginnings)[: chance.randint(1, 20)], *own]
        its = request(prompt, chance.randint(1, CONTEXT - len(prompt)), chance.random() < 0.1)
        asked[batch.add(its)] = its
        for _ in range(chance.randint(0, 12)):
            pieces += batch.step()
    pieces += rest_of(batch)
    said = {number: [token for piece in pieces if piece.number == number for token in piece.tokens] for number in asked}
    assert {number: len(its) for number, its in said.items()} == {
        number: its.sampling.max_tokens for number, its in asked.items()
    }
    assert not any(piece.error for piece in pieces)
    assert min(watched.shared, watched.compared) > 10
    assert batch.counts.prompt_tokens + batch.counts.cached_tokens == sum(len(its.ids) for its in asked.values())
    scored = [len(piece.prompt) for piece in pieces if piece.prompt]
    assert sorted(scored) == sorted(len(its.ids) for its in asked.values() if its.prompt_logprobs)


def test_later_prompts_under_way_are_put_back_for_an_answer_that_grows() -> None:
    batch = RequestLoop(Rounding(CONTEXT, False), Text(), 4, set())
    first = batch.add(request([1] * 5, 40))
    batch.step()
    second = batch.add(request([2] * 47, 1))
    ends: list[int] = []
    for _ in range(12):  # steps by turns: six tokens of the one, six chunks of the other, if it went on
        ends += [piece.number for piece in batch.step() if piece.finish]
    assert not ends
    assert (batch.counts.preemptions, batch.scheduler.running, len(batch.scheduler.waiting)) == (1, 1, 1)
    ends += [piece.number for piece in rest_of(batch) if piece.finish]
    assert ends == [first, second]
    assert batch.counts.prompt_tokens == 52


def test_an_answer_waits_for_earlier_ones_and_not_for_later_ones() -> None:
    batch = RequestLoop(Rounding(CONTEXT, False), Text(), 4, set())
    numbers = [batch.add(request([token] * 9, 30)) for token in (1, 2, 3)]
    assert [piece.number for piece in rest_of(batch) if piece.finish] == numbers


def test_memory_is_wanted_for_all_that_a_part_wrote() -> None:
    row = RequestState(1, request([1, 2, 3], 1), Text(), None)
    assert row.wanted(CONTEXT) == 4
    row.contents.add([1, 2, 3, 4, 5, 6, 7, 8], Kind.PROMPT)
    row.contents, row.slab, row.answer = row.contents.prefix(3), 0, [9]
    row.preempt(None)
    assert row.wanted(CONTEXT) == 8
    assert row.next_prompt(CHUNK, 4).tokens == (1, 2, 3, 4, 5, 6, 7, 8)
