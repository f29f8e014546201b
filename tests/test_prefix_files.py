"""Prefixes of conversations on disk: what comes back is what was there, or nothing; also to requests that lose their
memory amid their answers."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiermoe
from benchmarks.serving import free_port
from commands import Command
from patience import until
from serving import Letters, WrappedEngine, ids
from small_engines import NATIVE
from tiermoe import native
from tiermoe.batch import Batch, Kind
from tiermoe.engine.engine import numerics
from tiermoe.engine.request import Request
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.sampling import Sampling
from tiermoe.errors import ConfigError
from tiermoe.model.cache.kv import KVCache, LayerShape
from tiermoe.model.cache.prefix_disk import (
    BLOCK,
    HEAD_BYTES,
    KEPT,
    PrefixDisk,
    PrefixFolder,
    check_size,
    first_name,
)
from tiermoe.model.cache.prefix_disk import write as write_file
from tiermoe.model.cache.recurrent import StateShape
from tiermoe.serve.served import PrometheusMetrics, prefix_disk
from tiny import write

GIB = 1 << 30
WHOLE, LATENT, SLIDING = LayerShape(2, 4, 6), LayerShape(1, 12, 0), LayerShape(2, 4, 4, window=20)
COMPRESSED = LayerShape(1, 8, 0, window=20, beside=(LayerShape(1, 16, 0, window=12), LayerShape(1, 8, 0, stride=6)))
INDEXED = LayerShape(1, 12, 0, index_columns=8)
DELTA = LayerShape(0, 0, 0, state=StateShape(3, 8, 2, 4, 6))
CONVOLUTION = LayerShape(0, 0, 0, state=StateShape(2, 8, 0, 0, 0))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Of one model, with all experts in memory and with half of them, and other chunks of a prompt."""
    directory = write(tmp_path_factory.mktemp("prefixes"), "qwen3_moe", torch.bfloat16, **NATIVE)
    made = [
        tiermoe.load(directory, device="cpu", lanes=1, bits=4, dense_bits=4, batch=2, context=256, **size)[0].tiermoe
        for size in ({"memory": "4GiB", "chunk": 32}, {"cache": "50%", "chunk": 48})
    ]
    yield made
    for engine in made:
        engine.close()


class Kept:
    """Servers, one after the other, on one folder. warned: what they said of it."""

    def __init__(self, root: Path, size: int = GIB) -> None:
        self.root, self.size, self.warned = root, size, list[str]()

    def start(self, engine: Any, rows: int = 2) -> RequestLoop:
        disk = prefix_disk(engine, PrefixFolder(self.root, self.size), self.warned.append)
        return RequestLoop(engine, Letters(), rows, set(), disk=disk)

    @property
    def files(self) -> list[Path]:
        return sorted(self.root.iterdir())

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


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


Told = list[tuple[int, float | None]]
"""Tokens of an answer and their log probabilities."""


def answers(
    loop: RequestLoop, prompts: list[list[int]], tokens: int, amid: Callable[[], None] = lambda: None
) -> list[Told]:
    """amid: called before each step."""
    numbers = [loop.add(Request(each, Sampling(max_tokens=tokens), logprobs=1)) for each in prompts]
    found: dict[int, Told] = {number: [] for number in numbers}
    while not loop.scheduler.idle:
        amid()
        for piece in loop.step():
            found[piece.number] += [(each.token, each.logprob) for each in piece.logprobs]
    return list(found.values())


def answer(loop: RequestLoop, prompt: list[int], tokens: int = 6) -> Told:
    (found,) = answers(loop, [prompt], tokens)
    return found


def ended(batch: RequestLoop) -> PrefixDisk:
    assert batch.disk is not None
    batch.disk.close(60)
    return batch.disk


@pytest.mark.skipif(not native.available(), reason="torch's products round by the number of tokens")
def test_a_conversation_goes_on_after_a_restart_with_the_bits_it_has_without(
    engines: list[Any], tmp_path: Path
) -> None:
    kept, turn = Kept(tmp_path / "kept"), ids(140)
    first = kept.start(engines[0])
    said = [token for token, _ in answer(first, turn)]
    disk = ended(first)
    assert (disk.counts.hits, disk.counts.written_bytes) == (0, kept.nbytes)
    again = kept.start(engines[0])
    assert [token for token, _ in answer(again, turn)] == said
    assert again.counts.cached_tokens == 139
    ended(again)
    turn += [*said, *ids(9, 2)]
    cold = answer(RequestLoop(engines[1], Letters(), 2, set()), turn)
    second = kept.start(engines[1])  # another budget changes no bit
    assert answer(second, turn) == cold
    assert second.counts.cached_tokens == 145  # the last token of an answer has not run
    assert b"tiermoe:prefix_disk_hits_total 1.0" in PrometheusMetrics(engines[1], second).text()
    assert answer(second, turn) == cold  # from memory, where it is now longer
    assert ended(second).counts.hits == 1
    assert not kept.warned
    assert b"prefix_disk" not in PrometheusMetrics(engines[1], RequestLoop(engines[1], Letters(), 2, set())).text()


def test_who_leaves_while_a_conversation_is_read_leaves_no_memory_taken(
    engines: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, turn = Kept(tmp_path / "kept"), ids(140)
    first = kept.start(engines[0])
    answer(first, turn)
    ended(first)
    monkeypatch.setattr("tiermoe.model.cache.prefix_disk.TURN_BYTES", 1)
    second = kept.start(engines[0])
    number = second.add(Request(turn, Sampling(max_tokens=1)))
    second.step()
    assert second._cache.keys[0].any()  # a block has come
    second.cancel(number)
    assert not second._cache.keys[0].any()  # its pages have gone
    assert second.scheduler.idle
    ended(second)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2_moe", "jamba"])
def test_recurrent_states_go_on_after_a_restart(family: str, tmp_path: Path) -> None:
    """From where a turn ended and from nowhere else, as in memory."""
    directory = write(tmp_path, family, torch.bfloat16, **NATIVE)
    model, _ = tiermoe.load(
        directory, memory="4GiB", device="cpu", lanes=1, bits=4, dense_bits=4, chunk=32, batch=2, context=256
    )
    engine = model.tiermoe
    kept, turn = Kept(tmp_path / "kept"), ids(140)
    first = kept.start(engine)
    turn += [*[token for token, _ in answer(first, turn)], *ids(9, 2)]
    ended(first)
    remembered = answer(first, turn)
    assert first.counts.cached_tokens == 145  # the last token of an answer has not run
    second = kept.start(engine)
    assert answer(second, turn) == remembered
    assert (second.counts.cached_tokens, ended(second).counts.hits) == (145, 1)
    other = kept.start(engine)
    answer(other, [*turn[:100], *ids(20, 3)])
    assert (other.counts.cached_tokens, ended(other).counts.hits) == (0, 0)
    for file in kept.root.glob("*.end"):
        torn(file)
    third = kept.start(engine)
    cold = answer(RequestLoop(engine, Letters(), 2, set()), turn)
    assert answer(third, turn) == cold
    assert (third.counts.cached_tokens, ended(third).counts.dropped) == (0, 1)
    assert "does not have its checksum" in kept.warned[0]
    engine.close()


def test_conversations_that_begin_alike_share_files_and_come_back_to_it(engines: list[Any], tmp_path: Path) -> None:
    kept, common = Kept(tmp_path / "kept"), ids(130)
    batch = kept.start(engines[0], rows=1)
    answer(batch, [*common, *ids(20, 2)])
    batch.disk.close(60)  # type: ignore[union-attr]
    before = len(kept.files)
    batch = kept.start(engines[0], rows=1)
    turn = [*common, *ids(20, 3)]
    assert answer(batch, turn) == answer(RequestLoop(engines[0], Letters(), 1, set()), turn)
    assert batch.counts.cached_tokens == 2 * BLOCK
    ended(batch)
    assert len(kept.files) == before + 2  # of the prompt, and of its answer


def torn(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "a bit": lambda file, other: torn(file),
    "cut short": lambda file, other: os.truncate(file, file.stat().st_size - 1),
    "longer": lambda file, other: file.write_bytes(file.read_bytes() + b"\0"),
    "empty": lambda file, other: file.write_bytes(b""),
    "of another name": lambda file, other: shutil.copy(other, file),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_file_that_is_torn_or_foreign_is_dropped_and_not_used(what: str, tmp_path: Path) -> None:
    cache, tokens = full(WHOLE), ids(150)
    disk = written(cache, tokens, tmp_path)
    names = disk.find(tokens).names  # type: ignore[union-attr]
    second, third = (tmp_path / f"{name.hex()}.kv" for name in names[1:])
    DAMAGES[what](second, tmp_path / f"{names[0].hex()}.kv")
    warned: list[str] = []
    fresh = empty(WHOLE)
    disk = on(fresh, tmp_path, warned)
    stored, slab = disk.find(tokens), fresh.open()
    assert stored is not None
    assert disk.fill(stored, slab)
    assert (stored.length, fresh.length(slab), disk.counts.dropped) == (BLOCK, BLOCK, 1)
    assert [str(second) in line for line in warned] == [True]
    assert not second.exists()
    assert third.exists()
    disk.close(60)


def empty(*shapes: LayerShape, bits: int = 16) -> KVCache:
    return KVCache(shapes, 2, 256, 24, torch.float32, bits)


def full(*shapes: LayerShape, bits: int = 16, length: int = 150) -> KVCache:
    """A cache whose slab 0 holds so many random positions."""
    cache = empty(*shapes, bits=bits)
    assert cache.open() == 0
    for tensors in (cache.keys, cache.values, cache.key_scales, cache.value_scales, cache.index_keys):
        for tensor in tensors:
            tensor.copy_(torch.randint(-99, 99, tensor.shape).to(tensor.dtype))
    if cache.recurrent is not None:
        cache.begin_write(0, length)
        cache.recurrent.begin(0, 0, length)
        for tensor in states(cache):
            tensor.copy_(torch.randint(-99, 99, tensor.shape).to(tensor.dtype))
    cache.end_write(0, length)
    return cache


def states(cache: KVCache) -> list[torch.Tensor]:
    """(slabs, 2, ...): what each layer with a state keeps."""
    return [] if cache.recurrent is None else [*cache.recurrent.inputs.values(), *cache.recurrent.states.values()]


def on(cache: KVCache, root: Path, warned: list[str] | None = None, size: int = GIB) -> PrefixDisk:
    return PrefixDisk(cache, PrefixFolder(root, size), first_name(b"facts"), ([] if warned is None else warned).append)


def written(cache: KVCache, tokens: list[int], root: Path, size: int = GIB) -> PrefixDisk:
    """A disk to which all tokens of slab 0 are written."""
    disk = on(cache, root, size=size)
    disk.offer(0, tokens)
    disk.close(60)
    return disk


@pytest.mark.parametrize(
    ("shapes", "bits"),
    [
        ((WHOLE,), 8),
        ((INDEXED, LATENT), 16),
        ((WHOLE, SLIDING), 16),
        ((SLIDING, WHOLE), 8),
        ((DELTA, WHOLE, CONVOLUTION), 16),
        ((COMPRESSED, WHOLE, COMPRESSED), 16),
    ],
)
@pytest.mark.parametrize("length", [10, BLOCK, 150])
def test_every_kind_of_cache_comes_back(shapes: tuple[LayerShape, ...], bits: int, length: int, tmp_path: Path) -> None:
    cache, tokens = full(*shapes, bits=bits, length=length), ids(length)
    disk = written(cache, tokens, tmp_path)
    fresh = empty(*shapes, bits=bits)
    disk, slab = on(fresh, tmp_path), fresh.open()
    stored = disk.find([*tokens, 1, 2])
    assert stored is not None
    assert disk.fill(stored, slab)
    disk.close(0)
    assert fresh.length(slab) == length
    for name in ("keys", "values", "key_scales", "value_scales", "index_keys"):
        for layer, tensor in enumerate(getattr(cache, name)):
            shape, room = cache.shapes[layer], tensor.shape[2]
            needed = torch.arange(max(0, length - (shape.window or length)), length) % room
            needed = needed if shape.stride == 1 else torch.arange(length // shape.stride)
            assert torch.equal(getattr(fresh, name)[layer][slab, :, needed], tensor[0, :, needed])
    for mine, its in zip(states(fresh), states(cache), strict=True):
        assert torch.equal(mine[slab, 0], its[0, 1])
    fresh.crop(slab, length)
    if SLIDING in shapes and length > 20:
        with pytest.raises(ValueError, match="wound back"):
            fresh.crop(slab, length - 1)


def test_what_a_window_no_longer_holds_is_not_found(tmp_path: Path) -> None:
    """Of 150 positions the window's layer holds the last 44."""
    cache, tokens = full(WHOLE, SLIDING), ids(150)
    disk = written(cache, tokens, tmp_path)
    assert disk.find(tokens).length == 150  # type: ignore[union-attr]
    assert disk.find(tokens[:149]).length == 128  # type: ignore[union-attr]
    assert disk.find(tokens[:127]) is None


def test_a_state_is_found_at_its_end_alone(tmp_path: Path) -> None:
    """Of two turns, and of a prompt that parts from them behind the second one's whole blocks."""
    cache, tokens = full(WHOLE, DELTA, length=70), ids(150)
    written(cache, tokens[:70], tmp_path)
    assert cache.recurrent is not None
    cache.begin_write(0, 150)
    cache.recurrent.begin(0, 70, 150)
    cache.end_write(0, 150)
    disk = written(cache, tokens, tmp_path)
    lengths = [found.length if (found := disk.find(tokens[:count])) else 0 for count in (150, 149, 71, 70, 69)]
    assert lengths == [150, 70, 70, 70, 0]


class Running(KVCache):
    """A cache whose sequence goes on while its state is read."""

    def end_memory(self, slab: int, end: int) -> Iterator[Any]:
        assert self.recurrent is not None
        for each in super().end_memory(slab, end):
            for first in range(end, end + 2):  # the second step writes over the state that the first one read
                self.begin_write(slab, first + 1)
                self.recurrent.begin(slab, first, first + 1)
                self.end_write(slab, first + 1)
            yield each


def test_a_state_that_is_written_over_is_not_kept(tmp_path: Path) -> None:
    cache, tokens = Running([WHOLE, CONVOLUTION], 2, 256, 24, torch.float32), ids(150)
    cache.open()
    assert cache.recurrent is not None
    cache.begin_write(0, 150)
    cache.recurrent.begin(0, 0, 150)
    cache.end_write(0, 150)
    disk = written(cache, tokens, tmp_path)
    assert disk.find(tokens) is None
    assert not list(tmp_path.glob("*.end"))


def test_nobody_finds_what_was_computed_with_other_numbers(engines: list[Any], tmp_path: Path) -> None:
    one, other = (numerics(engine) for engine in engines)
    assert (one == other) == native.available()  # what torch computes depends on chunks
    assert {"checkpoint", "kernels", "kv_bits", "experts", "dense", "dtype"} <= one.keys()
    cache, tokens = full(WHOLE), ids(150)
    disk = written(cache, tokens, tmp_path)
    others = PrefixDisk(cache, PrefixFolder(tmp_path, GIB), first_name(b"other facts"), print)
    assert others.find(tokens) is None
    assert disk.find([1, *tokens[1:]]) is None
    others.close(0)


class Overwritten(KVCache):
    """A cache whose slab is taken, and written, while its second block is read."""

    taken: Callable[[], None]

    def memory(self, slab: int, first: int, end: int) -> Iterator[Any]:
        for index, each in enumerate(super().memory(slab, first, end)):
            if first == BLOCK and index == 2:
                self.taken()
            yield each


def test_a_slab_that_is_needed_is_not_waited_for_and_nothing_false_is_kept(tmp_path: Path) -> None:
    cache = Overwritten([WHOLE], 2, 256, 24, torch.float32)
    tokens = ids(150)
    cache.end_write(cache.open(), 150)
    disk = on(cache, tmp_path)

    def taken() -> None:
        disk.withdraw(0, 100)
        cache.keys[0][0, :, 100:] = 7

    cache.taken = taken
    disk.offer(0, tokens)
    disk.close(60)
    assert disk.find(tokens).length == BLOCK  # type: ignore[union-attr]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_folder_keeps_its_size_and_what_was_used_last(tmp_path: Path) -> None:
    cache, block = full(WHOLE), 24 + BLOCK * WHOLE.row_bytes(4)
    mine = tmp_path / "notes.txt"
    mine.write_text("not of tiermoe")
    conversations = [ids(2 * BLOCK, seed) for seed in range(4)]
    for tokens in conversations:
        written(cache, tokens, tmp_path, 5 * block)
        assert sum(file.stat().st_size for file in tmp_path.glob("*.kv")) <= 5 * block
        disk = on(cache, tmp_path, size=5 * block)
        if (stored := disk.find(conversations[0])) is not None:
            disk.fill(stored, 1)
    lengths = [stored.length if (stored := disk.find(tokens)) else 0 for tokens in conversations]
    disk.close(0)
    assert lengths == [2 * BLOCK, 0, BLOCK, 2 * BLOCK]
    assert mine.exists()


def test_several_servers_on_a_folder_do_not_harm_each_other(tmp_path: Path) -> None:
    cache, tokens = full(WHOLE), ids(150)
    disks = [on(cache, tmp_path) for _ in range(3)]
    for disk in disks:
        disk.offer(0, tokens)
    for disk in disks:
        disk.close(60)
    assert len(list(tmp_path.iterdir())) == 3
    one, other = disks[:2]
    stored, again = one.find(tokens), other.find(tokens)
    assert stored is not None
    assert again is not None
    assert one.fill(stored, 1)
    assert torch.equal(cache.keys[0][1, :, :150], cache.keys[0][0, :, :150])
    shutil.rmtree(tmp_path)  # the other one has made room meanwhile
    assert other.fill(again, 1)
    assert (stored.length, again.length, other.counts.dropped) == (150, 0, 0)


def test_a_drive_that_takes_no_more_stops_the_writing_with_one_warning(engines: list[Any], tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept")
    batch = kept.start(engines[0])
    shutil.rmtree(kept.root)
    for seed in range(3):
        assert len(answer(batch, ids(20, seed))) == 6
    ended(batch)
    assert len(kept.warned) == 1
    assert "no longer kept on disk" in kept.warned[0]


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--prefix-disk", "KEPT", "--replicas", "2"], "belongs to one process"),
        (["--prefix-disk-size", "1GiB"], "does nothing without --prefix-disk"),
        (["--prefix-disk", "KEPT", "--prefix-disk-size", "much"], "is not a size"),
        (["--prefix-disk", "KEPT", "--prefix-disk-size", "10KiB"], "less than one conversation of 64 tokens takes"),
        (["--prefix-disk", "FILE"], "cannot be written to"),
        (["--prefix-disk", "KEPT", "--decoder", "generic"], "whose cache has no form on disk; leave --prefix-disk"),
    ],
)
def test_refusals(
    words: list[str], cause: str, tmp_path: Path, tiermoe_: Command, tiny_model: Callable[..., Path]
) -> None:
    (tmp_path / "file").write_text("a file")
    places = {"KEPT": str(tmp_path / "kept"), "FILE": str(tmp_path / "file")}
    model = tiny_model("qwen3_moe", torch.float32)
    words = [places.get(word, word) for word in words]
    assert cause in tiermoe_("serve", model, "--port", free_port(), "--context", "64", *words).cause


def test_a_size_must_hold_one_conversation() -> None:
    shapes = [WHOLE, SLIDING, CONVOLUTION]
    size = 4 * (24 + 24) + 256 * WHOLE.row_bytes(4) + 2 * 20 * SLIDING.row_bytes(4) + 2 * (2 * 8 * 4)
    check_size(size, shapes, 256, 24, 4, 16)
    with pytest.raises(ConfigError, match="256 tokens"):
        check_size(size - 1, shapes, 256, 24, 4, 16)


# answers that lose their memory

CHUNK = 80
"""Of more tokens than are computed as few, and no multiple of a block: another chunk would have other bits."""
FIRST, TURN, ANSWER = ids(20, 2), ids(200), 90


@pytest.fixture(scope="module")
def long_chunks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = write(
        tmp_path_factory.mktemp("preempted"), "qwen3_moe", torch.bfloat16, **NATIVE, max_position_embeddings=512
    )
    model, _ = tiermoe.load(
        directory, device="cpu", lanes=1, bits=4, dense_bits=4, chunk=CHUNK, batch=2, context=320, memory="4GiB"
    )  # fmt: skip
    yield model.tiermoe
    model.tiermoe.close()


@pytest.fixture(scope="module")
def apart(long_chunks: Any) -> list[Told]:
    """Both answers without the other."""
    return [answer(RequestLoop(long_chunks, Letters(), 2, set()), each, ANSWER) for each in (FIRST, TURN)]


@dataclass
class Damage:
    """What happens to a file of the turn's blocks: `done` to it, before the request is preempted or after."""

    block: int
    done: Callable[[Path], object]
    after: bool


def foreign(file: Path) -> None:
    """Whole, with other bits than the request's: who runs in other steps writes such a file."""
    content = memoryview(bytes(byte ^ 1 for byte in file.read_bytes()[HEAD_BYTES:]))
    write_file(file, bytes.fromhex(file.stem), [content], lambda: True)


@pytest.mark.parametrize(
    ("damage", "again", "hits"),
    [
        (None, 40, 1),
        (Damage(2, torn, True), 120, 1),
        (Damage(0, Path.unlink, True), 200, 0),
        (Damage(0, foreign, False), 200, 0),
        (Damage(1, foreign, True), 200, 1),
    ],
    ids=["whole", "torn", "gone", "of others", "of others later"],
)
def test_who_is_put_back_reads_what_it_had_and_has_the_bits_it_had(
    damage: Damage | None,
    again: int,
    hits: int,
    long_chunks: Any,
    apart: list[Told],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two answers in the memory of one of the longest. The second one's prompt ran in chunks of 80, 80 and 40; of its
    three whole blocks it can go on behind a chunk."""
    monkeypatch.setattr("tiermoe.engine.request.AHEAD", 16)
    shared = Sharing(long_chunks)
    loop = Kept(tmp_path).start(shared)
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

    assert answers(loop, [FIRST, TURN], ANSWER, amid) == apart
    assert (loop.counts.preemptions, ended(loop).counts.hits) == (1, hits)
    assert shared.read == len(FIRST) + len(TURN) + again


def test_who_is_put_back_reads_again_what_it_began_with_from_disk(
    long_chunks: Any, apart: list[Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies nowhere else: another server has left it."""
    monkeypatch.setattr("tiermoe.engine.request.AHEAD", 16)
    shared, kept = Sharing(long_chunks), Kept(tmp_path)
    before = kept.start(shared)
    answer(before, TURN)
    ended(before)
    loop = kept.start(shared)
    assert answers(loop, [FIRST, TURN], ANSWER) == apart
    assert (loop.counts.preemptions, loop.counts.cached_tokens) == (1, len(TURN) - 1)
    assert ended(loop).counts.hits == 2


def test_what_is_read_of_a_prompt_is_on_disk_before_all_of_it_is(long_chunks: Any, tmp_path: Path) -> None:
    loop = Kept(tmp_path).start(long_chunks)
    disk = loop.disk
    assert disk is not None
    loop.add(Request(TURN, Sampling(max_tokens=ANSWER)))
    loop.step(), loop.step()
    assert loop.counts.prompt_tokens == 0
    until(lambda: (found := disk.find(TURN)) is not None and found.length == 2 * BLOCK)
    ended(loop)
