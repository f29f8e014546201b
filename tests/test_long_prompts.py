"""Prompts of several chunks: what is told while they are read, and what is left where reading is interrupted."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
from serving import Letters
from small_engines import NATIVE, OnRoute, engine_of, logits_of_steps, tokens
from tiermoe.batch import Batch, decode, prompt
from tiermoe.cli import output
from tiermoe.cli.output import prompt_progress
from tiermoe.engine.request import Piece, Request
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.request_scheduler import BESIDE
from tiermoe.engine.sampling import Sampling
from tiermoe.model.rotary import Rotary
from tiermoe.types import Routed
from tiny import write

IDS = torch.randint(3, 128, (20,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = write(tmp_path_factory.mktemp("long"), "qwen3_moe", torch.float32)
    loaded = tiermoe.load(directory, memory="4GiB", device="cpu", lanes=1, bits=16, dense_bits=16, chunk=8)[0].tiermoe
    yield loaded
    loaded.close()


def answered(loop: RequestLoop, ids: list[int]) -> tuple[list[Piece], list[tuple[int, int]]]:
    """The pieces of an answer of two tokens with their log probabilities, and what was reported while its prompt ran:
    tokens that have run, and those that did not have to be read."""
    loop.add(Request(ids, Sampling(2), logprobs=1, progress=True))
    pieces: list[Piece] = []
    while not loop.scheduler.idle:
        pieces += loop.step()
    reported = [(piece.read, piece.cached) for piece in pieces if piece.read is not None]
    return pieces[len(reported) :], reported


def test_each_chunk_is_reported(engine: Any) -> None:
    loop = RequestLoop(engine, Letters())
    assert answered(loop, IDS)[1] == [(8, 0), (16, 0), (20, 0)]
    assert answered(loop, [*IDS[:18], 5, 6])[1] == [(20, 18)]


def test_chunks_that_have_run_stay_where_reading_is_interrupted(engine: Any) -> None:
    (whole, *_), _ = answered(RequestLoop(engine, Letters()), IDS)
    loop = RequestLoop(engine, Letters())
    number = loop.add(Request(IDS, Sampling(2)))
    loop.step()
    loop.step()
    loop.cancel(number)
    (again, *_), _ = answered(loop, IDS)
    assert (again.cached, again.logprobs) == (16, whole.logprobs)


BY_LAYERS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("qwen3_moe", torch.bfloat16, NATIVE),
    ("gpt_oss", torch.bfloat16, {**NATIVE, "sliding_window": 12}),
    ("qwen3_next", torch.bfloat16, {**NATIVE, "head_dim": 128}),
    ("lfm2_moe", torch.float32, {}),
    ("nemotron_h", torch.float32, {"layers_block_type": ["moe", "linear_attention", "moe"]}),
    ("gemma4_text", torch.float32, {}),
    ("glm_moe_dsa", torch.float32, {}),
    ("hy_v4", torch.float32, {}),
]
"""Attention to all positions and to a window, recurrent states, convolutions, layers of one part, a dense block beside
the experts, chosen latents, residual streams."""


@pytest.fixture(scope="module", params=BY_LAYERS, ids=lambda each: f"{each[0]} {str(each[1])[6:]}")
def missing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine with slots for half of its experts."""
    family, dtype, sizes = request.param
    bits = 4 if dtype == torch.bfloat16 else 16
    directory = write(tmp_path_factory.mktemp("missing"), family, dtype, **sizes)
    loaded = engine_of(directory, bits=bits, dense_bits=bits, chunk=8, cache="50%", batch=2, context=96)
    yield loaded
    loaded.close()


ONE = pytest.mark.parametrize("missing", BY_LAYERS[:1], indirect=True, ids=["qwen3_moe bfloat16"])


def chunk_by_chunk(engine: Any, ids: list[int], read: int, chunk: int = 8) -> torch.Tensor:
    """Logits after the first `read` tokens and after each of the others alone."""
    cache = engine.new_cache()
    slab = cache.open()
    for at in range(0, read, chunk):
        found = [engine.step(Batch((prompt(slab, ids[at : min(at + chunk, read)], at),)), cache)]
    found += [engine.step(Batch((decode(slab, at, ids[at]),)), cache) for at in range(read, len(ids))]
    return torch.cat(found)


def test_chunks_that_go_through_the_layers_together_have_the_bits_of_each_alone(missing: Any) -> None:
    """Three chunks together, then three, then one of two tokens; a layer runs once for each group."""
    ids = tokens(55)
    want = chunk_by_chunk(missing, ids, 50)
    assert missing.plan.prompt_chunks == 3
    ran: list[tuple[int, int]] = []
    missing.observe(OnRoute(lambda routed, _: ran.append((routed.layer, len(routed.experts)))))
    found = logits_of_steps(missing, ids, 50)
    missing.observe(None)
    assert torch.equal(found, want)
    assert ran[: 3 * len(missing.layers)] == [(at, count) for count in (24, 24, 2) for at in range(len(missing.layers))]


def test_chunks_that_take_the_memory_of_slots_have_the_same_bits(tmp_path: Path) -> None:
    sizes = {**NATIVE, "hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 4}
    directory = write(tmp_path, "qwen3_moe", torch.bfloat16, **sizes)
    options: dict[str, Any] = {"chunk": 32, "context": 256, "bits": 16, "dense_bits": 16}
    whole, ids = engine_of(directory, **options), tokens(250)
    want = chunk_by_chunk(whole, ids, 250, 32)[:1]
    whole.close()
    plan = tiermoe.plan(directory, memory="4GiB", device="cpu", **options)
    tight = plan.total - plan.idle_activations - plan.experts // 2
    engine = tiermoe.load(directory, memory=tight, device="cpu", **options)[0].tiermoe
    cache = engine.new_cache()
    lent: list[int] = []
    engine.observe(OnRoute(lambda *_: lent.append(engine.loader.cache.lent)))
    found = engine.step(Batch((prompt(cache.open(), ids),)), cache)
    assert torch.equal(found, want)
    assert lent[0] == engine.plan.lent(engine.plan.prompt_chunks, large=True) > 0
    assert engine.loader.cache.lent == 0
    engine.close()


@pytest.mark.parametrize("room", [40, 12, 9], ids=["a pool a layer", "each pool's least", "one pool for all layers"])
def test_slots_have_the_memory_of_large_steps_until_one_comes(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt, and one whose tokens are scored, take it; short prompts and answers do not. The bits are equal.
    room: for so many of the 96 experts beside large steps."""
    monkeypatch.setattr("tiermoe.engine.budget.resident_bytes", lambda: 300 << 20)
    sizes = {**NATIVE, "hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 4}
    sizes["max_position_embeddings"] = 512
    directory = write(tmp_path, "qwen3_moe", torch.bfloat16, **sizes)
    options: dict[str, Any] = {"chunk": 512, "context": 512, "bits": 16, "dense_bits": 16}
    whole, ids = engine_of(directory, **options), tokens(400)
    plan = tiermoe.plan(directory, memory="4GiB", device="cpu", **options)
    tight = plan.fixed - plan.idle_activations + room * plan.slot_bytes
    engine = tiermoe.load(directory, memory=tight, device="cpu", **options)[0].tiermoe
    assert engine.plan.slots - engine.plan.step_slots == room < engine.plan.slots < engine.plan.all_slots
    assert engine.plan.total <= tight
    lent = set[int]()
    engine.observe(OnRoute(lambda *_: lent.add(engine.loader.cache.lent)))
    caches = [(each, each.new_cache(3)) for each in (engine, whole)]
    assert [[cache.open() for _ in range(3)] for _, cache in caches] == [[0, 1, 2]] * 2
    for rows, every, taken in (
        ((prompt(0, ids[:40], 0),), False, 0),
        ((decode(0, 40, 7),), False, 0),
        ((prompt(1, ids, 0),), False, engine.plan.step_slots),
        ((prompt(2, ids[:40], 0),), True, engine.plan.step_slots),
        ((decode(1, 400, 7),), False, 0),
    ):
        lent.clear()
        found = [each.step(Batch(rows), cache, every) for each, cache in caches]
        assert torch.equal(*found)
        assert lent == {taken}
        assert engine.loader.cache.lent == 0
    engine.close()
    whole.close()


def test_all_tokens_of_chunks_together_are_scored_as_those_of_each_alone(missing: Any) -> None:
    ids, found = tokens(20), []
    cache = missing.new_cache(2)
    slab = cache.open()
    for at in (0, 8, 16):
        found.append(missing.step(Batch((prompt(slab, ids[at : at + 8], at),)), cache, every=True))
    assert torch.equal(missing.step(Batch((prompt(cache.open(), ids),)), cache, every=True), torch.cat(found))


def test_other_sequences_run_between_the_layers_of_a_prompt(missing: Any) -> None:
    ids, others = tokens(24), tokens(11, 2)
    want, theirs = chunk_by_chunk(missing, ids, 23), chunk_by_chunk(missing, others, 5)
    cache = missing.new_cache(2)
    slab, other = cache.open(), cache.open()
    rows = tuple(prompt(slab, ids[at : min(at + 8, 23)], at) for at in (0, 8, 16))
    found, at = [], 5
    for logits in missing.step_by_layers(Batch(rows), cache, 1):
        row = prompt(other, others[:5]) if at == 5 else decode(other, at - 1, others[at - 1])
        found.append(missing.step(Batch((row,)), cache))
        assert torch.equal(found[-1][0], theirs[at - 5])
        at, last = at + 1, logits
    assert len(found) == len(missing.decoder.layers)
    assert torch.equal(last[0], want[0])
    assert torch.equal(missing.step(Batch((decode(slab, 23, ids[23]),)), cache)[0], want[1])


class Interruption(BaseException):
    """What Ctrl-C raises."""


@pytest.mark.parametrize("layer", [0, 1])
def test_a_prompt_is_read_again_where_its_layers_are_interrupted(missing: Any, layer: int) -> None:
    """Two chunks have run alone, three run together: windows and states of before are written over."""
    ids = tokens(60)

    def answer(interrupted: bool) -> list[int]:
        loop, found = RequestLoop(missing, Letters(), 2, set()), list[int]()
        first = loop.add(Request(ids[:16], Sampling(1)))
        while not loop.scheduler.idle:
            loop.step()
        loop.add(Request(ids, Sampling(5)))

        def interrupt(routed: Routed, _: Any) -> None:
            if routed.layer == layer:
                raise Interruption

        if interrupted:
            missing.observe(OnRoute(interrupt))
            with pytest.raises(Interruption):
                rest_of(loop)
            missing.observe(None)
        while not loop.scheduler.idle:
            found += [token for piece in loop.step() if piece.number != first for token in piece.tokens]
        return found

    assert answer(interrupted=True) == answer(interrupted=False) == answer(interrupted=True)


def test_a_request_that_leaves_amid_the_layers_leaves_what_was_read_before(missing: Any) -> None:
    ids = tokens(40)
    loop, clear = RequestLoop(missing, Letters(), 2, set()), RequestLoop(missing, Letters(), 2, set())
    clear.add(Request(ids, Sampling(5)))
    number = loop.add(Request(ids, Sampling(5)))
    for _ in range(4):  # three turns of the first three chunks, one of the others
        loop.step()
    loop.cancel(number)
    assert loop.scheduler.idle
    loop.add(Request(ids, Sampling(5)))
    found = [[token for piece in rest_of(each) for token in piece.tokens] for each in (loop, clear)]
    assert found[0] == found[1]


@ONE
def test_an_answer_waits_for_one_turn_of_a_long_prompt(missing: Any) -> None:
    """Also where a group of chunks ends and the next one begins."""
    short, long = Request(tokens(5, 2), Sampling(40)), Request(tokens(60), Sampling(2))
    loop = RequestLoop(missing, Letters(), 2, set())
    answer, prompt = loop.add(short), 0
    steps: list[set[int]] = []  # the requests that get a token, by step
    found: dict[int, list[int]] = {}
    while not loop.scheduler.idle:
        pieces = loop.step()
        steps.append({piece.number for piece in pieces})
        for piece in pieces:
            found.setdefault(piece.number, []).extend(piece.tokens)
        prompt = prompt or loop.add(long)
    turns = "".join(
        " " if answer in step else "L" for step in steps[: next(i for i, s in enumerate(steps) if prompt in s)]
    )
    assert turns.split() == ["L"] * 7  # three for each whole group, and the last with the prompt's first token
    for number, request in ((answer, short), (prompt, long)):
        alone = RequestLoop(missing, Letters(), 2, set())
        alone.add(request)
        assert found[number] == [token for piece in rest_of(alone) for token in piece.tokens]


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Any]:
    """An engine with slots for half of its experts, eight of whose chunks go through a layer together."""
    sizes = {**NATIVE, "num_hidden_layers": 8, "max_position_embeddings": 512}
    directory = write(tmp_path, "qwen3_moe", torch.bfloat16, **sizes)
    loaded = engine_of(directory, bits=4, dense_bits=4, chunk=8, cache="50%", batch=3, context=160)
    yield loaded
    loaded.close()


@pytest.mark.parametrize(("chunks", "beside"), [(1, True), (BESIDE, True), (BESIDE + 1, False)])
def test_a_short_prompt_does_not_wait_for_a_long_one(deep: Any, chunks: int, beside: bool) -> None:
    """It runs a chunk after each turn of the other's layers. A long one waits until the other's chunks are through."""
    assert deep.plan.prompt_chunks == 8
    asked = [Request(tokens(128), Sampling(3)), Request(tokens(8 * chunks, 2), Sampling(3))]
    loop = RequestLoop(deep, Letters(), 3, set())
    numbers, steps, found = [loop.add(asked[0])], 0, dict[int, list[int]]()
    loop.step()
    numbers.append(loop.add(asked[1]))
    while not loop.scheduler.idle:
        steps += numbers[1] not in found
        for piece in loop.step():
            found.setdefault(piece.number, []).extend(piece.tokens)
    assert (steps <= 2 * chunks) == beside
    assert beside or steps > 7
    for number, request in zip(numbers, asked, strict=True):
        alone = RequestLoop(deep, Letters(), 3, set())
        alone.add(request)
        assert found[number] == [token for piece in rest_of(alone) for token in piece.tokens]


def rest_of(loop: RequestLoop) -> list[Piece]:
    pieces: list[Piece] = []
    while not loop.scheduler.idle:
        pieces += loop.step()
    return pieces


@ONE
def test_turns_of_layers_are_reported(missing: Any) -> None:
    reported = answered(RequestLoop(missing, Letters()), tokens(40))[1]
    assert {cached for _, cached in reported} == {0}
    done = [count for count, _ in reported]
    assert done == sorted(done)
    assert len(done) == 6  # turns of a layer
    assert done[-1] == 40


def test_angles_that_come_chunk_by_chunk_are_those_of_the_whole() -> None:
    def rotary() -> Rotary:
        return Rotary(1.0 / 1e4 ** (torch.arange(0, 32, 2) / 32), 1.0, torch.bfloat16)

    positions = torch.arange(1500)
    whole, growing = rotary().at(positions, 1500), rotary()
    for begin in range(0, 1500, 100):
        some = positions[begin : begin + 100]
        for mine, its in zip(growing.at(some, begin + 100), whole, strict=True):
            assert torch.equal(mine, its[some])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_line_that_goes_when_all_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    report = prompt_progress()
    report(512, 32768)
    assert terminal.getvalue().endswith("reading the prompt: 512 of 32,768 tokens")
    report(1024, 32768)
    assert "1,024 of 32,768 tokens, " in terminal.getvalue()
    assert terminal.getvalue().endswith(" s left")
    report(32768, 32768)
    assert terminal.getvalue().endswith("\r\033[K")
    assert "\n" not in terminal.getvalue()


def test_elsewhere_a_line_is_said_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    prompt_progress()(512, 32768)
    assert not pipe.getvalue()
    monkeypatch.setattr(output, "SECONDS_BETWEEN", 0)
    report = prompt_progress()
    for done in (512, 1024, 32768):
        report(done, 32768)
    line = r"reading the prompt: {} of 32,768 tokens{}\n"
    assert re.fullmatch(line.format("512", "") + line.format("1,024", r", \d+ s left"), pipe.getvalue())
