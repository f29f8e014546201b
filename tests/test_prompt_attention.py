"""Attention of a prompt's tokens, by blocks of queries: against the definition, in float64, and against itself: in
other company, on more threads, in a ring, over codes of 8 and 4 bits. And a prompt's few tokens after many positions,
which go by blocks of queries in the call in which others are computed one by one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from small_engines import NATIVE, engine_of
from small_engines import tokens as some_tokens
from tiermoe import native
from tiermoe.batch import Batch, Row, decode, prompt, verify
from tiermoe.formats.plain import Plain
from tiermoe.kernels.attention import (
    DEEP,
    DecodeAttention,
    GroupedAttention,
    PackedMatrix,
    Piece,
    Slabs,
    Step,
    decode_attention,
    prompt_attention,
    prompt_state,
    prompt_workspace,
    takes_prompts,
)
from tiermoe.kernels.norm import Norm
from tiermoe.model.cache.memory import decode_kv, encode_kv
from tiermoe.native import _native
from tiny import write

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="needs the native kernels"),
    pytest.mark.usefixtures("instruction_set", "one_thread"),
]

LENGTH = 330  # positions; a tile has 128, a block of queries 64 rows


@dataclass(frozen=True)
class Case:
    heads: int = 8
    kv_heads: int = 2
    keys: int = 64
    values: int = 64
    window: int | None = None
    chunked: bool = False
    sinks: bool = False
    bits: int = 16

    def stored(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Keys and values (positions, kv heads, columns) as slabs have them: each with its scales if they are codes."""
        return [keys, values] if self.bits == 16 else [*encode_kv(keys, self.bits), *encode_kv(values, self.bits)]

    def slabs(self, stored: list[Tensor], places: Tensor, room: int, count: int, own: slice, ring: bool) -> Slabs:
        """`count` slabs, `own` of them with some places; what is not written must not be looked at."""
        kept = []
        for tensor in stored:
            unwritten = torch.nan if tensor.dtype.is_floating_point else 99
            slab = torch.full((count, tensor.shape[1], room, tensor.shape[2]), unwritten, dtype=tensor.dtype)
            slab[own, :, places % room] = tensor[places].transpose(0, 1)
            kept.append(slab)
        if self.bits == 16:
            return Slabs(kept[0], kept[1], ring)
        return Slabs(kept[0], kept[2], ring, (kept[1], kept[3]))

    def attended(self, query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
        """The definition, float64 (tokens, heads, columns), of the last tokens of a sequence: query (tokens, heads,
        columns)."""
        if self.bits != 16:
            keys, values = (decode_kv(*encode_kv(each, self.bits), torch.float64) for each in (keys, values))
        group, length = self.heads // self.kv_heads, len(keys)
        wide_keys, wide_values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
        scores = torch.einsum("thc,nhc->htn", query.double(), wide_keys) * scale
        own, other = torch.arange(length - len(query), length)[:, None], torch.arange(length)[None]
        hidden = other > own
        if self.window is not None and self.chunked:
            hidden |= other // self.window != own // self.window
        elif self.window is not None:
            hidden |= other <= own - self.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(query), 1)), -1)
        return torch.einsum("htn,nhc->thc", scores.softmax(-1)[..., :length], wide_values)


CASES = {
    "groups": Case(),
    "one key head for all": Case(heads=9, kv_heads=1, keys=32, values=32),
    "as many key heads, values of another width": Case(heads=4, kv_heads=4, keys=192, values=128),
    "window": Case(window=100),
    "chunks": Case(window=70, chunked=True),
    "window of an odd length, sinks": Case(window=37, sinks=True),
    "sinks": Case(sinks=True),
    "8 bits": Case(bits=8),
    "8 bits, window, sinks": Case(keys=96, values=160, window=130, sinks=True, bits=8),
    "4 bits": Case(bits=4),
    "4 bits, window, sinks": Case(keys=96, values=160, window=130, sinks=True, bits=4),
}
SCALE = 0.25


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Sequence:
    """Queries, keys and values of a sequence of LENGTH tokens."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.query = random(LENGTH, case.heads, case.keys, seed=1)
        self.keys = random(LENGTH, case.kv_heads, case.keys, seed=2)
        self.values = random(LENGTH, case.kv_heads, case.values, seed=3)
        self.stored = case.stored(self.keys, self.values)
        self.sinks = random(case.heads, seed=4).float() if case.sinks else None

    def slabs(self, written: int = LENGTH, room: int = LENGTH + 20, ring: bool = False) -> Slabs:
        """Two, the second one with the first `written` positions."""
        places = torch.arange(max(0, written - room), written)
        return self.case.slabs(self.stored, places, room, 2, slice(1, 2), ring)

    def run(self, slabs: Slabs, begin: int, end: int) -> Tensor:
        case = self.case
        return prompt_attention(
            self.query[begin:end], slabs, 1, begin, SCALE, case.window, self.sinks, chunked=case.chunked
        )

    def in_pieces(self, slabs: Slabs, *ends: int) -> Tensor:
        pieces = zip((0, *ends), (*ends, LENGTH), strict=True)
        return torch.cat([self.run(slabs, begin, end) for begin, end in pieces])


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_definition(name: str) -> None:
    it = Sequence(CASES[name])
    got, want = it.run(it.slabs(), 0, LENGTH).double(), it.case.attended(it.query, it.keys, it.values, it.sinks, SCALE)
    error = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() < (0.02 if it.case.bits == 4 else 0.01)  # at 4 bits queries are rounded once more


@pytest.mark.parametrize("name", CASES)
def test_chunks_and_threads_do_not_matter(name: str) -> None:
    """Each piece with no more written than it needs."""
    it = Sequence(CASES[name])
    whole = it.run(it.slabs(), 0, LENGTH)
    assert torch.equal(whole, it.in_pieces(it.slabs(), 64, 131, 132, 200))
    assert torch.equal(whole[:77], it.run(it.slabs(written=77), 0, 77))
    for threads in (2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(whole, it.run(it.slabs(), 0, LENGTH))


@pytest.mark.parametrize("step", [1, 7, 90])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.window is not None])
def test_a_ring_is_the_whole_cache(name: str, step: int) -> None:
    it = Sequence(CASES[name])
    assert it.case.window is not None
    whole = it.run(it.slabs(), 0, LENGTH)
    for begin in range(0, LENGTH, step):
        end = min(begin + step, LENGTH)
        ring = it.slabs(end, it.case.window + step - 1, ring=True)
        assert torch.equal(whole[begin:end], it.run(ring, begin, end))


@pytest.mark.parametrize("name", ["groups", "as many key heads, values of another width", "sinks", "8 bits"])
def test_positions_may_come_in_pieces(name: str) -> None:
    """Of the last 100 tokens; pieces of 256 and of 128 positions, each where the one before has lain."""
    it, begin = Sequence(CASES[name]), LENGTH - 100
    whole = it.run(it.slabs(), begin, LENGTH)
    for room in (256, 128):
        state = torch.full((1 << 20,), 77, dtype=torch.uint8)
        for at in range(0, LENGTH, room):
            end = min(at + room, LENGTH)
            piece = Piece(at, end, state)
            slabs = it.slabs(end, room, ring=True)
            got = prompt_attention(it.query[begin:], slabs, 1, begin, SCALE, sinks=it.sinks, piece=piece)
        assert torch.equal(got, whole)


def test_what_it_takes_is_what_is_said() -> None:
    for keys, values in ((64, 64), (192, 128), (256, 32)):
        slabs = Slabs(torch.zeros(1, 1, 1, keys).bfloat16(), torch.zeros(1, 1, 1, values).bfloat16())
        assert _native.prompt_workspace(slabs.packed, 3) == prompt_workspace(3, keys, values)
        assert _native.prompt_state(slabs.packed, 70, 9) == prompt_state(70, 9, 1, values)


def test_it_takes_bfloat16_heads_of_up_to_256_columns() -> None:
    assert takes_prompts(torch.bfloat16, 192, 128)
    assert not takes_prompts(torch.float32, 192, 128)
    assert not takes_prompts(torch.bfloat16, 576, 512)
    assert not takes_prompts(torch.bfloat16, 80, 80)


def test_what_does_not_fit_is_refused() -> None:
    it = Sequence(CASES["window"])
    with pytest.raises(ValueError, match="beyond the slab's room"):
        it.run(it.slabs(room=300), 250, 301)
    with pytest.raises(ValueError, match="less room than the window"):
        it.run(it.slabs(room=109, ring=True), 250, 261)
    with pytest.raises(ValueError, match="queries must be"):
        prompt_attention(it.query[..., :32], it.slabs(), 1, 0, SCALE, None, None)
    with pytest.raises(ValueError, match="sinks must be"):
        prompt_attention(it.query, it.slabs(), 1, 0, SCALE, None, torch.zeros(3))
    with pytest.raises(ValueError, match="a slab that is not there"):
        prompt_attention(it.query, it.slabs(), 2, 0, SCALE, None, None)
    small = Piece(0, 128, torch.empty(100, dtype=torch.uint8))
    with pytest.raises(ValueError, match="a state of 100 bytes"):
        prompt_attention(it.query, it.slabs(), 1, 0, SCALE, piece=small)
    wrong = Piece(100, 200, torch.empty(1 << 21, dtype=torch.uint8))
    with pytest.raises(ValueError, match="a piece that is larger"):
        prompt_attention(it.query, it.slabs(), 1, 0, SCALE, piece=wrong)
    with pytest.raises(ValueError, match="int8"):
        Slabs(it.slabs().keys, it.slabs().values, scales=(it.slabs().keys, it.slabs().keys))


# a prompt's few tokens behind many positions

COLUMNS, NARROW = 64, 0.125
BEFORE, AFTER = 5, 30  # tokens before and from position DEEP on
DEEP_END = DEEP + AFTER
DEEP_CASES = {
    "groups": Case(), "one key head for nine": Case(heads=9, kv_heads=1),
    "as many key heads": Case(heads=4, kv_heads=4),
    "window": Case(window=300), "chunks": Case(window=90, chunked=True), "sinks": Case(sinks=True),
    "8 bits": Case(bits=8), "4 bits, sinks": Case(sinks=True, bits=4),
}  # fmt: skip
SOME = ["groups", "one key head for nine", "window", "4 bits, sinks"]


class Layer:
    """Attention whose output is what it attends to: the hidden states are 0, so that queries, keys and values of a
    token are the biases, and the output projection changes nothing."""

    def __init__(self, case: Case) -> None:
        self.case, width = case, case.heads * COLUMNS
        sizes = (width, case.kv_heads * COLUMNS, case.kv_heads * COLUMNS)
        self.query, self.key, self.value = (random(size, seed=seed) for seed, size in enumerate(sizes, 1))
        self.keys, self.values = (random(DEEP_END, case.kv_heads, COLUMNS, seed=seed) for seed in (4, 5))
        for kept, new in ((self.keys, self.key), (self.values, self.value)):
            kept[DEEP - BEFORE :] = new.view(case.kv_heads, COLUMNS)
        self.stored = case.stored(self.keys, self.values)
        self.sinks = random(case.heads, seed=6).float() if case.sinks else None
        biases = (self.query, self.key, self.value)
        projections = [
            PackedMatrix(Plain(), {"weight": torch.zeros(len(bias), width).bfloat16()}, len(bias), width, bias)
            for bias in biases
        ]
        output = PackedMatrix(Plain(), {"weight": torch.eye(width).bfloat16()}, width, width)
        norm = Norm(torch.ones(width).bfloat16(), 1e-6)
        kernel = decode_attention(
            GroupedAttention(
                *projections, output, norm, norm, COLUMNS, COLUMNS, NARROW, window=case.window or 0,
                chunked=case.chunked, sinks=self.sinks,
            )
        )  # fmt: skip
        assert kernel is not None
        self.kernel: DecodeAttention = kernel
        self.hidden = width

    def slabs(self, count: int = 1) -> Slabs:
        """With what lies before the tokens."""
        before = torch.arange(DEEP - BEFORE)
        return self.case.slabs(self.stored, before, DEEP_END + 9, count, slice(None), False)

    def run(self, slabs: Slabs, positions: list[int], given: list[bool], where: list[int] | None = None) -> Tensor:
        """What the tokens at these positions attend to, (T, heads * columns)."""
        count = len(positions)
        still, turned = torch.ones(count, COLUMNS).bfloat16(), torch.zeros(count, COLUMNS).bfloat16()
        step = Step(
            torch.tensor(where or [0] * count), torch.tensor(positions), still, turned, given=torch.tensor(given)
        )
        return self.kernel(torch.zeros(count, self.hidden).bfloat16(), step, slabs)[0].clone()

    def in_steps(self, slabs: Slabs, together: int, given: bool, begin: int = DEEP - BEFORE) -> Tensor:
        found = []
        for at in range(begin, DEEP_END, together):
            positions = list(range(at, min(at + together, DEEP_END)))
            found.append(self.run(slabs, positions, [given] * len(positions)))
        return torch.cat(found)

    def by_blocks(self, slabs: Slabs) -> Tensor:
        """The tokens from DEEP on by the kernel of prompts."""
        case = self.case
        query = self.query.view(1, case.heads, COLUMNS).expand(AFTER, -1, -1)
        found = prompt_attention(query, slabs, 0, DEEP, NARROW, case.window, self.sinks, chunked=case.chunked)
        return found.flatten(1)

    def expected(self) -> Tensor:
        query = self.query.view(1, self.case.heads, COLUMNS).expand(BEFORE + AFTER, -1, -1)
        return self.case.attended(query, self.keys, self.values, self.sinks, NARROW).flatten(1)


@pytest.mark.parametrize("name", DEEP_CASES)
def test_it_is_the_definition_and_from_deep_on_what_the_kernel_of_prompts_gives(name: str) -> None:
    it = Layer(DEEP_CASES[name])
    slabs = it.slabs()
    got, want = it.in_steps(slabs, 64, given=True), it.expected()
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() < (0.02 if it.case.bits == 4 else 0.01)
    assert torch.equal(got[BEFORE:], it.by_blocks(slabs))


@pytest.mark.parametrize("name", SOME)
def test_before_deep_a_token_is_what_it_is_generated(name: str) -> None:
    it = Layer(DEEP_CASES[name])
    given, generated = it.in_steps(it.slabs(), 64, given=True), it.in_steps(it.slabs(), 1, given=False)
    assert torch.equal(given[:BEFORE], generated[:BEFORE])
    assert not torch.equal(given[BEFORE:], generated[BEFORE:])


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", SOME)
def test_few_tokens_in_chunks_and_on_threads(name: str, threads: int) -> None:
    it = Layer(DEEP_CASES[name])
    whole = it.in_steps(it.slabs(), 64, given=True)
    torch.set_num_threads(threads)
    for together in (1, 7, 64):
        assert torch.equal(whole, it.in_steps(it.slabs(), together, given=True))


@pytest.mark.parametrize("name", SOME)
def test_other_tokens_of_the_call_do_not_matter(name: str) -> None:
    """A prompt's tokens of two sequences between verified ones of two others, all at the same positions."""
    it = Layer(DEEP_CASES[name])
    given, generated = it.in_steps(it.slabs(), 64, given=True), it.in_steps(it.slabs(), 1, given=False)
    places, kinds = range(DEEP - 2, DEEP + 11), (False, True, True, False)
    slabs = it.slabs(4)
    for slab in range(4):  # what lies between
        ahead = list(range(DEEP - BEFORE, DEEP - 2))
        it.run(slabs, ahead, [False] * len(ahead), [slab] * len(ahead))
    where = [slab for slab in range(4) for _ in places]
    got = it.run(slabs, [*places] * 4, [kinds[slab] for slab in where], where)
    some = slice(BEFORE - 2, BEFORE + 11)
    for kind, each in zip(kinds, got.split(len(places)), strict=True):
        assert torch.equal(each, (given if kind else generated)[some])


def test_a_turn_behind_many_tokens_has_its_bits_whatever_runs_beside_it(tmp_path: Path) -> None:
    """And in chunks; a generated and verified tokens beside it have those that they have alone."""
    directory = write(tmp_path, "qwen3_moe", torch.bfloat16, **NATIVE, max_position_embeddings=2048)
    engine = engine_of(directory, bits=4, dense_bits=4, context=DEEP + 100, batch=4)
    ids, turn = some_tokens(DEEP + 3), some_tokens(20, 2)

    def steps(cache: Any, *rows: Row) -> list[Tensor]:
        return [engine.step(Batch((row,)), cache, every=True) for row in rows]

    def behind(cache: Any, slab: int) -> int:
        return int(cache.fork(slab, DEEP + 3))

    cache = engine.new_cache(4)
    first = cache.open()
    engine.step(Batch((prompt(first, ids),)), cache)
    slab = behind(cache, first)
    whole = steps(cache, prompt(slab, turn, DEEP + 3))[0]
    cache.crop(slab, DEEP + 3)
    pieces = [prompt(slab, turn[at : at + 7], DEEP + 3 + at) for at in range(0, 20, 7)]
    assert torch.equal(torch.cat(steps(cache, *pieces)), whole)
    cache.crop(slab, DEEP + 3)
    alone = torch.cat(steps(cache, *(decode(slab, DEEP + 3 + at, token) for at, token in enumerate(turn[:4]))))
    assert not torch.equal(alone, whole[:4])
    cache.crop(slab, DEEP + 3)
    slabs = [slab, behind(cache, first), behind(cache, first)]
    rows = (
        decode(slabs[0], DEEP + 3, turn[0]),
        prompt(slabs[1], turn, DEEP + 3),
        verify(slabs[2], DEEP + 3, turn[:4]),
    )
    found = engine.step(Batch(rows, ragged=True), cache, every=True)
    assert torch.equal(found, torch.cat((alone[:1], whole, alone)))
    engine.close()


def test_few_tokens_that_do_not_fit_are_refused() -> None:
    it = Layer(DEEP_CASES["groups"])
    at, still = torch.tensor([DEEP]), torch.ones(1, COLUMNS).bfloat16()
    with pytest.raises(ValueError, match="given must be bool"):
        Step(at * 0, at, still, still, given=torch.tensor([1]))
    padded = Step(at * 0, at, still, still, at * 0, given=torch.tensor([True]))
    with pytest.raises(ValueError, match="padding or chosen positions for a prompt"):
        it.kernel(torch.zeros(1, it.hidden).bfloat16(), padded, it.slabs())
