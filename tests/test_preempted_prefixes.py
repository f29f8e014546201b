"""Requests that lose their memory amid their answers, with a prefix cache on disk: they come back to the bits that they
had."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiermoe
from serving import Letters, WrappedEngine, ids, until
from tiermoe.batch import Batch, Kind
from tiermoe.engine.request import Piece, Request
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.sampling import Sampling
from tiermoe.model.cache.prefix import Part, SlabContents
from tiermoe.model.cache.prefix_disk import BLOCK, HEAD_BYTES, KEPT, PrefixFolder, write
from tiermoe.serve.served import prefix_disk
from tiny import write as write_model

NATIVE = {"hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 32}
CHUNK = 80
"""Of more tokens than are computed as few, and no multiple of a block: another chunk would have other bits."""
FIRST, TURN, ANSWER = ids(20, 2), ids(200), 90


class Sharing(WrappedEngine):
    """An engine whose requests share the memory for keys and values of one of the longest. read: tokens of prompts that
    it ran."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.plan = dataclasses.replace(engine.plan, kv_memory=1)
        self.read = 0

    def step(self, batch: Batch, cache: Any, every: bool = False) -> Tensor:
        self.read += sum(len(row.tokens) for row in batch.rows if row.kind is Kind.PROMPT)
        logits: Tensor = self._engine.step(batch, cache, every)
        return logits


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = write_model(
        tmp_path_factory.mktemp("preempted"), "qwen3_moe", torch.bfloat16, **NATIVE, max_position_embeddings=512
    )
    model, _ = tiermoe.load(
        directory, device="cpu", lanes=1, bits=4, dense_bits=4, chunk=CHUNK, batch=2, context=320, memory="4GiB"
    )  # fmt: skip
    yield model.tiermoe
    model.tiermoe.close()


def request(prompt: list[int]) -> Request:
    return Request(prompt, Sampling(max_tokens=ANSWER), logprobs=1)


def told(loop: RequestLoop, numbers: list[int], amid: Callable[[], None] = lambda: None) -> list[Any]:
    """Tokens and log probabilities of each answer. amid: called before each step."""
    pieces: list[Piece] = []
    while not loop.scheduler.idle:
        amid()
        pieces += loop.step()
    each = [[one for piece in pieces if piece.number == number for one in piece.logprobs] for number in numbers]
    return [[(one.token, one.logprob) for one in its] for its in each]


@dataclass
class Damage:
    """What happens to a file of the turn's blocks: `done` to it, before the request is preempted or after."""

    block: int
    done: Callable[[Path], object]
    after: bool


def torn(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def foreign(file: Path) -> None:
    """Whole, with other bits than the request's: who runs in other steps writes such a file."""
    content = memoryview(bytes(byte ^ 1 for byte in file.read_bytes()[HEAD_BYTES:]))
    write(file, bytes.fromhex(file.stem), [content], lambda: True)


@pytest.mark.parametrize(
    ("damage", "again", "hits"),
    [
        (None, 40, 1),
        (Damage(2, torn, False), 120, 1),
        (Damage(2, torn, True), 120, 1),
        (Damage(0, Path.unlink, True), 200, 0),
        (Damage(0, foreign, False), 200, 0),
        (Damage(1, foreign, True), 200, 1),
    ],
    ids=["whole", "torn", "torn later", "gone", "of others", "of others later"],
)
def test_who_is_put_back_reads_what_it_had_and_has_the_bits_it_had(
    damage: Damage | None, again: int, hits: int, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers in the memory of one of the longest. The second one's prompt ran in chunks of 80, 80 and 40; of its
    three whole blocks it can go on behind a chunk."""
    monkeypatch.setattr("tiermoe.engine.request.AHEAD", 16)
    shared, warned = Sharing(engine), list[str]()
    expected = []
    for each in (FIRST, TURN):
        alone = RequestLoop(shared, Letters(), 2, set())
        expected += told(alone, [alone.add(request(each))])
    shared.read = 0
    loop = RequestLoop(
        shared, Letters(), 2, set(), disk=prefix_disk(engine, PrefixFolder(tmp_path, 1 << 30), warned.append)
    )
    disk, files, left = loop.disk, list[Path](), [] if damage is None else [damage]
    assert disk is not None

    def amid() -> None:
        if loop.counts.prompt_tokens < len(FIRST) + len(TURN):
            return
        if not files:
            stored = until(lambda: found if (found := disk.find(TURN)) and found.length == len(TURN) - 1 else None)
            files.extend(disk.folder.path(name, KEPT) for name in stored.names)
        if left and left[0].after == (loop.counts.preemptions > 0):
            one = left.pop()
            one.done(files[one.block])

    assert told(loop, [loop.add(request(each)) for each in (FIRST, TURN)], amid) == expected
    assert (loop.counts.preemptions, disk.counts.hits) == (1, hits)
    assert shared.read == len(FIRST) + len(TURN) + again
    disk.close(60)


def test_what_is_read_of_a_prompt_is_on_disk_before_all_of_it_is(engine: Any, tmp_path: Path) -> None:
    loop = RequestLoop(engine, Letters(), 2, set(), disk=prefix_disk(engine, PrefixFolder(tmp_path, 1 << 30), print))
    disk = loop.disk
    assert disk is not None
    loop.add(request(TURN))
    loop.step(), loop.step()
    assert loop.counts.prompt_tokens == 0
    until(lambda: (found := disk.find(TURN)) is not None and found.length == 2 * BLOCK)
    disk.close(60)


@pytest.mark.parametrize(("length", "stays"), [(4, 0), (5, 5), (7, 5), (8, 8), (10, 10), (11, 10), (12, 12), (99, 12)])
def test_steps_run_behind_whole_steps_and_behind_any_generated_token(length: int, stays: int) -> None:
    parts = [Part(5, Kind.PROMPT), Part(3, Kind.PROMPT, (7,)), Part(2, Kind.DECODE), Part(2, Kind.PROMPT)]
    assert SlabContents(list(range(12)), parts).resumable(length) == stays
