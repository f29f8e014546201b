"""Requests that join and leave a running batch: each answer is the one it has alone."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import tiermoe
from serving import Letters, WrappedEngine, ids
from small_engines import NATIVE
from tiermoe.batch import Batch, Kind
from tiermoe.batch import prompt as read
from tiermoe.engine import request as requests
from tiermoe.engine.detokenize import Detokenizer
from tiermoe.engine.request import Piece, Request
from tiermoe.engine.request_loop import RequestLoop, use_of
from tiermoe.engine.sampling import Sampling
from tiermoe.errors import PromptError
from tiermoe.serve.served import Served
from tiermoe.serve.worker import ClosingError, QueueFullError, Worker
from tiny import write


@pytest.fixture(scope="module", params=["4GiB", "50%"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = write(tmp_path_factory.mktemp("batcher"), "qwen3_moe", torch.bfloat16, **NATIVE)
    size = {"cache" if request.param.endswith("%") else "memory": request.param}
    options = {"bits": 4, "dense_bits": 4, "chunk": 8, "batch": 4, "context": 96, **size}
    model, _ = tiermoe.load(directory, device="cpu", lanes=1, **options)
    yield model.tiermoe
    model.tiermoe.close()


def batcher(engine: Any, rows: int = 4, ends: set[int] | None = None) -> RequestLoop:
    return RequestLoop(engine, Letters(), rows, ends or set(), times_decoding=True)


def request(prompt: list[int], tokens: int = 8, **sampling: Any) -> Request:
    return Request(prompt, Sampling(max_tokens=tokens, **sampling))


def answers(batch: RequestLoop, pieces: list[Piece]) -> dict[int, list[int]]:
    while not batch.scheduler.idle:
        pieces += batch.step()
    found: dict[int, list[int]] = {}
    for piece in pieces:
        found.setdefault(piece.number, []).extend(piece.tokens)
    return found


def alone(engine: Any, asked: Request) -> list[int]:
    batch = batcher(engine, 1)
    number = batch.add(asked)
    return answers(batch, [])[number]


@pytest.mark.parametrize("loaded", ["4GiB", "50%", "25%"], indirect=True)
def test_each_answer_is_the_one_that_the_request_has_alone(loaded: Any) -> None:
    chance = random.Random(5)
    asked = [
        request(ids(chance.randint(1, 30), seed), chance.randint(1, 12), temperature=chance.choice([0, 0.9]), seed=seed)
        for seed in range(64)
    ]
    batch, waiting, pieces, numbers, left = batcher(loaded), list(asked), [], [], set()
    while waiting or not batch.scheduler.idle:
        if waiting and chance.random() < 0.5:
            numbers.append(batch.add(waiting.pop(0)))
        if numbers and chance.random() < 0.1:
            leaves = chance.choice(numbers[-4:])
            left.add(leaves)
            batch.cancel(leaves)
        pieces += batch.step()
    found = answers(batch, pieces)
    for number, each in zip(numbers, asked, strict=True):
        whole, told = alone(loaded, each), found.get(number, [])
        assert told == (whole[: len(told)] if number in left else whole)
    assert 3 <= batch.counts.aborted <= 32


class Recording(WrappedEngine):
    """An engine, the tokens of each row of its steps, and the steps with whether all their tokens were scored; those
    that ran by layers apart."""

    def __init__(self, engine: Any) -> None:
        self.rows: list[int] = []
        self.seen: list[tuple[Batch, bool]] = []
        self.layered: list[Batch] = []
        super().__init__(engine)

    def step(self, batch: Batch, cache: Any, every: bool = False) -> Any:
        self.rows += [len(row.tokens) for row in batch.rows]
        self.seen.append((batch, every))
        return self._engine.step(batch, cache, every)

    def step_by_layers(self, batch: Batch, cache: Any, layers: int) -> Any:
        self.rows += [len(row.tokens) for row in batch.rows]
        self.layered.append(batch)
        return self._engine.step_by_layers(batch, cache, layers)


def test_a_step_asks_no_more_than_memory_is_planned_for(loaded: Any) -> None:
    engine = Recording(loaded)
    batch = batcher(engine)
    for seed, length in enumerate((4, 20, 4, 20, 20, 5, 60)):
        scored = seed in (3, 4)
        batch.add(Request(ids(length, seed), Sampling(max_tokens=3 + seed), logprobs=1, prompt_logprobs=scored))
    answers(batch, [])
    use, missing = use_of(loaded.config.vocab_size, loaded.settings.chunk), loaded.plan.slots < loaded.plan.all_slots
    read = [[len(row.tokens) for row in step.rows if row.kind is Kind.PROMPT] for step, _ in engine.seen]
    assert use.prompts == 1
    assert max(map(sum, read)) == loaded.settings.chunk
    assert max(map(len, read)) == (2 if missing else 1)
    beside = [len(step.rows) - len(its) for its, (step, _) in zip(read, engine.seen, strict=True) if its]
    assert max(beside) == (1 if missing else 0)  # answers
    assert [len(each.rows) for each in engine.layered] == ([3, 3, 3, 2] if missing else [])
    assert loaded.plan.prompt_chunks == (3 if missing else 1)  # of so many layers
    assert max(len(step.tokens) for step, every in engine.seen if every) == use.scored == 8


def test_a_prompt_amid_the_layers_says_how_far_it_is(loaded: Any) -> None:
    batch, most = batcher(loaded), loaded.plan.prompt_chunks * loaded.settings.chunk
    number = batch.add(Request(ids(60), Sampling(max_tokens=2), progress=True))
    said: list[int | None] = [0]
    while not said[-1] or said[-1] < 60:
        said += [piece.read for piece in batch.step() if piece.number == number and piece.read is not None]
        (row,) = batch.scheduler.at_work().values()
        assert row.read == said[-1]
    assert said == sorted(said)
    groups, missing = -(-60 // most), loaded.plan.prompt_chunks > 1
    assert (len(set(said)) - 1 > groups) is missing
    assert row.length == 60


class Sharing(WrappedEngine):
    """An engine whose requests of up to 256 tokens share memory for keys and values: that of one of these."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.longest = engine.new_cache(1, 256).nbytes(256)
        self.plan = dataclasses.replace(engine.plan, context=256, kv_memory=self.longest)


def test_requests_that_share_memory_get_what_they_get_alone(loaded: Any) -> None:
    engine, chance = Sharing(loaded), random.Random(2)
    asked = [request(ids(chance.choice([5, 70]), seed), chance.randint(1, 6), seed=seed) for seed in range(9)]
    batch, waiting, pieces, numbers, most = batcher(engine, 8), list(asked), [], [], 0
    while waiting or not batch.scheduler.idle:
        if waiting:
            numbers.append(batch.add(waiting.pop(0)))
        pieces += batch.step()
        most = max(most, batch.scheduler.running)
        assert batch.scheduler.prefixes.reserved <= engine.longest
    found = answers(batch, pieces)
    assert [found[number] for number in numbers] == [alone(engine, each) for each in asked]
    assert 2 <= most < 8  # rows are left, memory is not


def test_who_waits_for_memory_is_not_overtaken(loaded: Any) -> None:
    batch = batcher(Sharing(loaded), 4)
    short, other = (batch.add(request(ids(5, seed), tokens)) for seed, tokens in ((1, 5), (2, 12)))
    long = batch.add(request(ids(230, 3), 4))
    behind = batch.add(request(ids(5, 4), 2))
    ends: list[int] = []
    while not batch.scheduler.idle:
        ends += [piece.number for piece in batch.step() if piece.finish]
        if long not in ends and other in ends:
            assert batch.scheduler.running <= 1
    assert ends == [short, other, long, behind]


def test_who_is_put_back_goes_on_with_the_tokens_that_it_has_alone(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of any length begin in the memory of one of the longest, which they cannot all end in. One prompt is
    scored."""
    monkeypatch.setattr(requests, "AHEAD", 16)
    engine = Sharing(loaded)
    asked = [request(ids(9 + seed, seed), 100 + seed, temperature=seed % 2, seed=seed) for seed in range(3)]
    asked += [dataclasses.replace(request(ids(12, 9), 90), logprobs=1, prompt_logprobs=True)]
    expected = [alone(engine, each) for each in asked]
    batch, pieces, ends = batcher(engine, 8), list[Piece](), list[int]()
    numbers = [batch.add(each) for each in asked]
    while not batch.scheduler.idle:
        new = batch.step()
        pieces += new
        ends += [piece.number for piece in new if piece.finish]
        assert batch.scheduler.prefixes.reserved <= engine.longest
    found = answers(batch, pieces)
    assert [found[number] for number in numbers] == expected
    assert batch.counts.preemptions > 0
    assert ends[0] == numbers[0]  # who came first keeps its memory
    assert batch.counts.prompt_tokens == sum(len(each.ids) for each in asked)
    assert batch.counts.generated_tokens == sum(map(len, expected))
    assert [len(piece.prompt) for piece in pieces if piece.prompt] == [12]


def test_a_client_that_leaves_while_its_request_is_put_back_is_forgotten(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "AHEAD", 16)
    batch = batcher(Sharing(loaded))
    first, second = (batch.add(request(ids(9, seed), 200)) for seed in (1, 2))
    while not batch.counts.preemptions:
        batch.step()
    assert (batch.scheduler.running, len(batch.scheduler.waiting)) == (1, 1)
    batch.cancel(second)
    assert set(answers(batch, [])) == {first}
    assert (batch.counts.aborted, batch.counts.preemptions) == (1, 1)


@pytest.mark.parametrize(("tokens", "steps"), [(1, [1]), (8, [7, 1]), (9, [8, 1]), (18, [8, 8, 1, 1])])
def test_a_prompt_is_scored_in_the_steps_of_who_only_scores(loaded: Any, tokens: int, steps: list[int]) -> None:
    """A library that scores n tokens reads the first n - 1, in chunks (of 8 here): the same shapes, the same bits."""
    engine = Recording(loaded)
    batch, prompt = batcher(engine), ids(tokens, 3)
    batch.add(Request(prompt, Sampling(max_tokens=1), logprobs=1, prompt_logprobs=True))
    (piece,) = [piece for _ in steps for piece in batch.step()]
    assert engine.rows == steps
    expected: list[float] = []
    if tokens > 1:
        cache = loaded.new_cache(1)
        logits = loaded.step(Batch((read(cache.open(), prompt[:-1]),)), cache, True)
        logs = torch.log_softmax(logits.double(), -1)
        expected = logs[range(tokens - 1), prompt[1:]].tolist()
    assert [each.logprob for each in piece.prompt] == [None, *expected]


def test_what_answers_take_says_what_more_memory_would_bring(loaded: Any) -> None:
    batch, missing = batcher(loaded), loaded.plan.slots < loaded.plan.all_slots
    for seed in range(2):
        batch.add(request(ids(3, seed), 20))
    answers(batch, [])
    assert batch.decoding.tokens == (38 if missing else 0)  # the first ones are of the prompts' steps
    none: Any = None
    worker: Any = SimpleNamespace(loop=batch)
    found = Served("a", Letters(), worker, none, loaded, Sampling(), 0, none, none).other_budgets
    assert bool(found) == missing
    if missing:
        own = [each.slots for each in found].index(loaded.plan.slots)
        more = [(each.hit_rate, each.decode_tok_s) for each in found[own:]]
        assert more == sorted(more)
        assert more[0] < more[-1]
        assert found[-1].slots == loaded.plan.all_slots


def test_a_request_that_leaves_frees_its_row(loaded: Any) -> None:
    batch = batcher(loaded, 1)
    first, second = batch.add(request(ids(9, 1), 50)), batch.add(request(ids(9, 2), 3))
    pieces = [*batch.step(), *batch.step(), *batch.step()]
    batch.cancel(first)
    found = answers(batch, pieces)
    batch.cancel(second)  # which has ended
    assert batch.counts.aborted == 1
    assert len(found[first]) == 2
    assert found[second] == alone(loaded, request(ids(9, 2), 3))


def test_a_prompt_waits_for_a_chunk_of_a_longer_one_at_the_most(loaded: Any) -> None:
    batch = batcher(loaded)
    batch.add(request(ids(80, 1), 2))
    batch.step()
    short = batch.add(request(ids(5, 2), 4))
    steps = 0
    while not any(piece.number == short for piece in batch.step()):
        steps += 1
    assert steps <= 2


def test_the_next_turn_reads_its_new_tokens_alone(loaded: Any) -> None:
    batch = batcher(loaded)
    turn = ids(20, 1)
    number = batch.add(request(turn, 6))
    first = answers(batch, [])[number]
    read = batch.counts.prompt_tokens
    number = batch.add(request([*turn, *first, *ids(4, 3)], 6))
    answers(batch, [])
    assert batch.counts.prompt_tokens - read == 5  # the last token of an answer has not run
    assert batch.counts.cached_tokens == 25


def begun_alike(engine: Any) -> tuple[RequestLoop, list[int], list[Any]]:
    """Two requests with a beginning in common, the second of which comes while the first is at work: each gets what it
    gets alone → what they ran in, the second one's prompt, its answer."""
    batch, common = batcher(engine), ids(24, 4)
    one = batch.add(request([*common, 5], 20))
    pieces = [piece for _ in range(6) for piece in batch.step()]
    two = batch.add(request([*common, 6], 5))
    found = answers(batch, pieces)
    assert found[one] == alone(engine, request([*common, 5], 20))
    assert found[two] == alone(engine, request([*common, 6], 5))
    return batch, [*common, 6], found[two]


def test_a_shared_beginning_is_forked_from_a_request_at_work(loaded: Any) -> None:
    batch, _, _ = begun_alike(loaded)
    assert batch.counts.cached_tokens == 24


def test_a_beginning_of_which_no_state_is_kept_is_read_again(tmp_path: Path) -> None:
    """A recurrent state goes on from where its sequence ended and from nowhere else."""
    directory = write(tmp_path, "qwen3_next", torch.bfloat16, **NATIVE)
    model, _ = tiermoe.load(directory, memory="4GiB", device="cpu", lanes=1, bits=4, dense_bits=4, chunk=8, context=96)
    engine = model.tiermoe
    batch, prompt, answer = begun_alike(engine)
    assert batch.counts.cached_tokens == 0
    turn = [*prompt, *answer, 7, 8]
    three = batch.add(request(turn, 4))
    assert answers(batch, [])[three] == alone(engine, request(turn, 4))
    assert batch.counts.cached_tokens == 29  # the last token of an answer has not run
    engine.close()


def test_more_conversations_than_rows_give_up_the_oldest(loaded: Any) -> None:
    batch = batcher(loaded, 2)
    for seed in range(5):
        batch.add(request(ids(10, seed), 2))
        answers(batch, [])
    batch.add(request([*ids(10, 4), 7, 8], 2))
    answers(batch, [])
    kept = batch.counts.cached_tokens
    assert kept >= 10
    batch.add(request([*ids(10, 0), 7, 8], 2))
    answers(batch, [])
    assert batch.counts.cached_tokens - kept < 10


class Broken(WrappedEngine):
    """An engine that fails at batches that `fails` chooses."""

    def __init__(self, engine: Any, fails: Callable[[Batch], bool]) -> None:
        super().__init__(engine)
        self._fails = fails

    def step(self, batch: Batch, cache: Any, every: bool = False) -> Any:
        if self._fails(batch):
            raise RuntimeError("the drive is gone")
        return self._engine.step(batch, cache, every)


def test_an_error_ends_the_requests_of_its_step_and_no_other(loaded: Any) -> None:
    second = ids(6, 2)
    batch = batcher(Broken(loaded, lambda batch: any(list(row.tokens) == second for row in batch.rows)))
    pieces = list[Piece]()
    answering = batch.add(request(ids(6, 1), 5))
    pieces += batch.step()
    reading = batch.add(request(second, 5))
    found = answers(batch, pieces)
    ends = {piece.number: piece for piece in pieces if piece.finish}
    assert str(ends[reading].error) == "the drive is gone"
    assert ends[reading].finish == "error"
    assert ends[answering].finish == "length"
    assert len(found[answering]) == 5


def test_rows_that_do_not_need_what_is_broken_go_on(loaded: Any) -> None:
    asked = [request(ids(6, seed), 5) for seed in range(3)]
    broken = Broken(loaded, lambda batch: batch.phase == "decode" and 1 in batch.slabs)
    batch = RequestLoop(broken, Letters(), 4, set())  # slabs are given in their order
    numbers, pieces = [batch.add(each) for each in asked], list[Piece]()
    found = answers(batch, pieces)
    ends = {piece.number: piece.finish for piece in pieces if piece.finish}
    assert sorted(ends.values()) == ["error", "length", "length"]
    for number, each in zip(numbers, asked, strict=True):
        assert ends[number] == "error" or found[number] == alone(loaded, each)
    assert batch.counts.failed == 1
    assert batch.scheduler.idle


class Tearing:
    """A grammar that fails at its second token."""

    ended = False

    def __init__(self) -> None:
        self._accepted = 0

    def restrict(self, logits: Any) -> Any:
        return logits

    def accept(self, token: int) -> None:
        self._accepted += 1
        if self._accepted == 2:
            raise RuntimeError("torn")


def test_what_fails_beside_the_engine_ends_one_request(loaded: Any) -> None:
    batch, pieces = batcher(loaded), list[Piece]()
    torn = batch.add(Request(ids(6, 1), Sampling(max_tokens=5), grammar=cast(Any, Tearing())))
    other = batch.add(request(ids(6, 2), 5))
    found = answers(batch, pieces)
    ends = {piece.number: piece for piece in pieces if piece.finish}
    assert (str(ends[torn].error), ends[torn].finish) == ("torn", "error")
    assert found[other] == alone(loaded, request(ids(6, 2), 5))


def test_the_end_of_a_server_is_told_to_who_still_waits(loaded: Any) -> None:
    async def asked(grace_s: float) -> tuple[list[Piece], str]:
        worker, pieces = Worker(batcher(loaded, 1), 8, lambda *_: None), list[Piece]()
        answers = worker.submit([request(ids(9, 1), 60)])
        pieces.append((await anext(answers))[1])
        closing = asyncio.get_running_loop().run_in_executor(None, worker.close, grace_s)
        pieces += [piece async for _, piece in answers]
        await closing
        try:
            worker.submit([request(ids(9, 1))])
        except ClosingError as error:
            return pieces, str(error)
        return pieces, ""

    pieces, refused = asyncio.run(asked(60))
    assert (pieces[-1].finish, sum(len(piece.tokens) for piece in pieces)) == ("length", 60)
    assert "about to end" in refused
    pieces, _ = asyncio.run(asked(0))
    assert isinstance(pieces[-1].error, ClosingError)


def test_of_requests_that_belong_together_all_are_taken_or_none(loaded: Any) -> None:
    async def asked() -> None:
        worker = Worker(batcher(loaded, 1), 2, lambda *_: None)
        with pytest.raises(QueueFullError, match="0 requests wait already"):
            worker.submit([request(ids(9, seed)) for seed in range(3)])
        pieces = [(index, piece) async for index, piece in worker.submit([request(ids(9, n), 2 + n) for n in range(2)])]
        worker.close(0)
        assert [sum(len(piece.tokens) for at, piece in pieces if at == index) for index in range(2)] == [2, 3]
        assert (worker.loop.counts.refused, worker.loop.counts.requests) == (3, 2)

    asyncio.run(asked())


def test_ends(loaded: Any) -> None:
    greedy = alone(loaded, request(ids(6, 1), 12))
    end = greedy[4]
    batch = batcher(loaded, ends={end})
    pieces: list[Piece] = []
    batch.add(request(ids(6, 1), 12))
    answers(batch, pieces)
    assert pieces[-1].finish == "stop"
    assert sum(len(piece.tokens) for piece in pieces) == greedy.index(end) + 1
    text = Letters().decode(greedy)
    batch = batcher(loaded)
    pieces = []
    batch.add(Request(ids(6, 1), Sampling(max_tokens=12), (text[3:5],)))
    answers(batch, pieces)
    assert pieces[-1].finish == "stop"
    assert "".join(piece.text for piece in pieces) == text[: text.index(text[3:5])]


def test_a_prompt_that_cannot_be_answered_is_refused(loaded: Any) -> None:
    with pytest.raises(PromptError, match="96 tokens, there is room for 96"):
        batcher(loaded).add(request(ids(96, 1)))
    with pytest.raises(PromptError, match="no tokens"):
        batcher(loaded).add(request([]))
    vocabulary = loaded.config.vocab_size
    with pytest.raises(PromptError, match=f"the prompt has token {vocabulary}"):
        batcher(loaded).add(request([1, vocabulary]))


def test_an_answer_ends_where_the_context_does(loaded: Any) -> None:
    batch = batcher(loaded)
    pieces: list[Piece] = []
    batch.add(request(ids(90, 1), 50))
    found = answers(batch, pieces)
    assert [len(found[1]), pieces[-1].finish] == [6, "length"]


@pytest.mark.parametrize(
    ("stops", "tokens", "told", "end"),
    [
        ((), (0, 100, 101, 1), ["a", "", "é", "b"], ""),  # no character is split
        ((), (0, 100), ["a", ""], "\ufffd"),
        (("bc",), (0, 1, 3, 1, 2), ["a", "", "bd", "", ""], None),  # nothing that may begin a stop string is told
        (("c", "bc"), (0, 1, 3, 1, 2), ["a", "", "bd", "", ""], None),
        (("bc", "zz"), (0, 1, 3, 1, 2), ["a", "", "bd", "", ""], None),
        (("bcd",), (0, 1, 2), ["a", "", ""], "bc"),
    ],
)
def test_text_is_told_as_soon_as_it_is_certain(
    stops: tuple[str, ...], tokens: tuple[int, ...], told: list[str], end: str | None
) -> None:
    """end: what is told in the end; None: a stop string has ended the text."""
    text = Detokenizer(Letters(), stops)
    assert [text.add(token) for token in tokens] == told
    assert text.end() == (end or "")
    assert bool(text.stopped_by) is (end is None)
