"""Attention of a prompt's tokens, by blocks of queries: against the definition, in float64, and against itself: in
other company, on more threads, in a ring, over codes of 8 and 4 bits. And few tokens after many positions, which the
call of a whole layer computes by blocks of queries where they follow each other, else one by one: with equal bits."""

from __future__ import annotations

from collections.abc import Callable
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
    FusedAttention,
    GroupedAttention,
    PackedMatrix,
    Slabs,
    Step,
    fused_attention,
    prompt_attention,
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
    "wide heads": Case(keys=512, values=512),
    "wide heads, 8 bits": Case(keys=512, values=512, bits=8),
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


def test_what_it_takes_is_what_is_said() -> None:
    for keys, values in ((64, 64), (192, 128), (256, 32)):
        slabs = Slabs(torch.zeros(1, 1, 1, keys).bfloat16(), torch.zeros(1, 1, 1, values).bfloat16())
        assert _native.prompt_workspace(slabs.packed, 3) == prompt_workspace(3, keys, values)


def test_it_takes_bfloat16_heads_of_up_to_512_columns() -> None:
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
    with pytest.raises(ValueError, match="int8"):
        Slabs(it.slabs().keys, it.slabs().values, scales=(it.slabs().keys, it.slabs().keys))


# few tokens behind many positions

COLUMNS, NARROW = 64, 0.125
BEFORE, TOKENS = 1019, 35  # positions before the tokens
END = BEFORE + TOKENS
FEW_CASES = {
    "groups": Case(), "one key head for nine": Case(heads=9, kv_heads=1),
    "as many key heads": Case(heads=4, kv_heads=4), "three heads": Case(heads=3, kv_heads=1),
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
        self.keys, self.values = (random(END, case.kv_heads, COLUMNS, seed=seed) for seed in (4, 5))
        for kept, new in ((self.keys, self.key), (self.values, self.value)):
            kept[BEFORE:] = new.view(case.kv_heads, COLUMNS)
        self.stored = case.stored(self.keys, self.values)
        self.sinks = random(case.heads, seed=6).float() if case.sinks else None
        biases = (self.query, self.key, self.value)
        projections = [
            PackedMatrix(Plain(), {"weight": torch.zeros(len(bias), width).bfloat16()}, len(bias), width, bias)
            for bias in biases
        ]
        output = PackedMatrix(Plain(), {"weight": torch.eye(width).bfloat16()}, width, width)
        norm = Norm(torch.ones(width).bfloat16(), 1e-6)
        kernel = fused_attention(
            GroupedAttention(
                *projections, output, norm, norm, COLUMNS, COLUMNS, NARROW, window=case.window or 0,
                chunked=case.chunked, sinks=self.sinks,
            )
        )  # fmt: skip
        assert kernel is not None
        self.kernel: FusedAttention = kernel
        self.hidden = width

    def slabs(self, count: int = 1) -> Slabs:
        """With what lies before the tokens."""
        return self.case.slabs(self.stored, torch.arange(BEFORE), END + 9, count, slice(None), False)

    def run(self, slabs: Slabs, positions: list[int], where: list[int] | None = None) -> Tensor:
        """What the tokens at these positions attend to, (T, heads * columns)."""
        count = len(positions)
        still, turned = torch.ones(count, COLUMNS).bfloat16(), torch.zeros(count, COLUMNS).bfloat16()
        step = Step(torch.tensor(where or [0] * count), torch.tensor(positions), still, turned)
        return self.kernel(torch.zeros(count, self.hidden).bfloat16(), step, slabs)[0].clone()

    def in_steps(self, slabs: Slabs, together: int) -> Tensor:
        begins = range(BEFORE, END, together)
        return torch.cat([self.run(slabs, list(range(at, min(at + together, END)))) for at in begins])

    def by_blocks(self, slabs: Slabs) -> Tensor:
        """All tokens by the kernel of prompts."""
        case = self.case
        query = self.query.view(1, case.heads, COLUMNS).expand(TOKENS, -1, -1)
        found = prompt_attention(query, slabs, 0, BEFORE, NARROW, case.window, self.sinks, chunked=case.chunked)
        return found.flatten(1)

    def expected(self) -> Tensor:
        query = self.query.view(1, self.case.heads, COLUMNS).expand(TOKENS, -1, -1)
        return self.case.attended(query, self.keys, self.values, self.sinks, NARROW).flatten(1)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", FEW_CASES)
def test_few_tokens_are_the_definition_with_equal_bits_however_they_come(name: str, threads: int) -> None:
    """All at once, in chunks, one by one, and as a prompt's."""
    it = Layer(FEW_CASES[name])
    slabs = it.slabs()
    got, want = it.in_steps(slabs, 64), it.expected()
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() < (0.02 if it.case.bits == 4 else 0.01)
    torch.set_num_threads(threads)
    assert torch.equal(got, it.by_blocks(slabs))
    for together in (1, 2, 7, 64):
        assert torch.equal(got, it.in_steps(it.slabs(), together))


@pytest.mark.parametrize("name", FEW_CASES)
def test_every_instruction_set_gives_the_same_bits(name: str, on_every_set: Callable[..., list[Tensor]]) -> None:
    it = Layer(FEW_CASES[name])
    found = on_every_set(lambda: torch.cat((it.in_steps(it.slabs(), 1), it.in_steps(it.slabs(), 64))))
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("name", SOME)
def test_other_tokens_of_the_call_do_not_matter(name: str) -> None:
    """Of four sequences, at the same positions."""
    it = Layer(FEW_CASES[name])
    alone, places, slabs = it.in_steps(it.slabs(), 64), range(BEFORE + 3, BEFORE + 16), it.slabs(4)
    for slab in range(4):  # what lies between
        it.run(slabs, [BEFORE, BEFORE + 1, BEFORE + 2], [slab] * 3)
    got = it.run(slabs, [*places] * 4, [slab for slab in range(4) for _ in places])
    for each in got.split(len(places)):
        assert torch.equal(each, alone[3:16])


def test_a_turn_behind_many_tokens_has_its_bits_whatever_runs_beside_it(tmp_path: Path) -> None:
    """In one piece, in chunks, generated, and beside a generated and verified tokens."""
    directory = write(tmp_path, "qwen3_moe", torch.bfloat16, **NATIVE, max_position_embeddings=2048)
    engine = engine_of(directory, bits=4, dense_bits=4, context=BEFORE + 100, batch=4)
    ids, turn = some_tokens(BEFORE), some_tokens(20, 2)

    def steps(cache: Any, *rows: Row) -> Tensor:
        return torch.cat([engine.step(Batch((row,)), cache, every=True) for row in rows])

    cache = engine.new_cache(4)
    first = cache.open()
    engine.step(Batch((prompt(first, ids),)), cache)
    slab, others = int(cache.fork(first, BEFORE)), [int(cache.fork(first, BEFORE)) for _ in range(2)]
    whole = steps(cache, prompt(slab, turn, BEFORE))
    cache.crop(slab, BEFORE)
    pieces = [prompt(slab, turn[at : at + 7], BEFORE + at) for at in range(0, 20, 7)]
    assert torch.equal(steps(cache, *pieces), whole)
    cache.crop(slab, BEFORE)
    assert torch.equal(steps(cache, *(decode(slab, BEFORE + at, token) for at, token in enumerate(turn))), whole)
    cache.crop(slab, BEFORE)
    rows = (decode(slab, BEFORE, turn[0]), prompt(others[0], turn, BEFORE), verify(others[1], BEFORE, turn[:4]))
    found = engine.step(Batch(rows), cache, every=True)
    assert torch.equal(found, torch.cat((whole[:1], whole, whole[:4])))
    engine.close()
