"""A prompt's few tokens behind many positions: they go by blocks of queries, in the call in which others are computed
one by one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from small_engines import NATIVE, engine_of, tokens
from tiermoe import native
from tiermoe.batch import Batch, Row, decode, prompt, verify
from tiermoe.formats.plain import Plain
from tiermoe.kernels.attention import (
    DEEP,
    DecodeAttention,
    GroupedAttention,
    PackedMatrix,
    Slabs,
    Step,
    decode_attention,
    prompt_attention,
)
from tiermoe.kernels.norm import Norm
from tiermoe.model.cache.memory import decode_kv, encode_kv
from tiny import write

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="needs the native kernels"),
    pytest.mark.usefixtures("instruction_set", "one_thread"),
]

COLUMNS, SCALE = 64, 0.125
BEFORE, AFTER = 5, 30  # tokens before and from position DEEP on
LENGTH = DEEP + AFTER


@dataclass(frozen=True)
class Case:
    heads: int = 8
    kv_heads: int = 2
    window: int = 0
    chunked: bool = False
    sinks: bool = False
    bits: int = 16


CASES = {
    "groups": Case(),
    "one key head for nine": Case(heads=9, kv_heads=1),
    "as many key heads": Case(heads=4, kv_heads=4),
    "window": Case(window=300),
    "chunks": Case(window=90, chunked=True),
    "sinks": Case(sinks=True),
    "8 bits": Case(bits=8),
    "4 bits, sinks": Case(sinks=True, bits=4),
}
SOME = ["groups", "one key head for nine", "window", "4 bits, sinks"]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Layer:
    """Attention whose output is what it attends to: the hidden states are 0, so that queries, keys and values of a
    token are the biases, and the output projection changes nothing."""

    def __init__(self, case: Case) -> None:
        self.case, width = case, case.heads * COLUMNS
        sizes = (width, case.kv_heads * COLUMNS, case.kv_heads * COLUMNS)
        self.query, self.key, self.value = (random(size, seed=seed) for seed, size in enumerate(sizes, 1))
        self.keys, self.values = (random(LENGTH, case.kv_heads, COLUMNS, seed=seed) for seed in (4, 5))
        for kept, new in ((self.keys, self.key), (self.values, self.value)):
            kept[DEEP - BEFORE :] = new.view(case.kv_heads, COLUMNS)
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
                *projections, output, norm, norm, COLUMNS, COLUMNS, SCALE, window=case.window, chunked=case.chunked,
                sinks=self.sinks,
            )
        )  # fmt: skip
        assert kernel is not None
        self.kernel: DecodeAttention = kernel
        self.hidden = width

    def slabs(self, count: int = 1) -> Slabs:
        """With what lies before the tokens; what is not written must not be looked at."""
        kept = []
        for rows in (self.keys, self.values):
            tensors = (rows,) if self.case.bits == 16 else encode_kv(rows, self.case.bits)
            for tensor in tensors:
                unwritten = torch.nan if tensor.dtype.is_floating_point else 99
                slab = torch.full((count, tensor.shape[1], LENGTH + 9, tensor.shape[2]), unwritten, dtype=tensor.dtype)
                slab[:, :, : DEEP - BEFORE] = tensor[: DEEP - BEFORE].transpose(0, 1)
                kept.append(slab)
        if self.case.bits == 16:
            return Slabs(kept[0], kept[1])
        return Slabs(kept[0], kept[2], scales=(kept[1], kept[3]))

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
        for at in range(begin, LENGTH, together):
            positions = list(range(at, min(at + together, LENGTH)))
            found.append(self.run(slabs, positions, [given] * len(positions)))
        return torch.cat(found)

    def by_blocks(self, slabs: Slabs) -> Tensor:
        """The tokens from DEEP on by the kernel of prompts."""
        case = self.case
        query = self.query.view(1, case.heads, COLUMNS).expand(AFTER, -1, -1)
        found = prompt_attention(query, slabs, 0, DEEP, SCALE, case.window or None, self.sinks, chunked=case.chunked)
        return found.flatten(1)

    def expected(self) -> Tensor:
        """The definition, in float64."""
        case, keys, values = self.case, self.keys, self.values
        if case.bits != 16:
            keys, values = (decode_kv(*encode_kv(each, case.bits), torch.float64) for each in (keys, values))
        group = case.heads // case.kv_heads
        wide_keys, wide_values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
        own, other = torch.arange(DEEP - BEFORE, LENGTH)[:, None], torch.arange(LENGTH)[None]
        hidden = other > own
        if case.window:
            outside = other // case.window != own // case.window if case.chunked else other <= own - case.window
            hidden |= outside
        scores = torch.einsum("hc,nhc->hn", self.query.double().view(case.heads, COLUMNS), wide_keys) * SCALE
        scores = scores[:, None].masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, len(own), 1)), -1)
        return torch.einsum("htn,nhc->thc", scores.softmax(-1)[..., :LENGTH], wide_values).flatten(1)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_definition_and_from_deep_on_what_the_kernel_of_prompts_gives(name: str) -> None:
    it = Layer(CASES[name])
    slabs = it.slabs()
    got, want = it.in_steps(slabs, 64, given=True), it.expected()
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() < (0.02 if it.case.bits == 4 else 0.01)
    assert torch.equal(got[BEFORE:], it.by_blocks(slabs))


@pytest.mark.parametrize("name", SOME)
def test_before_deep_a_token_is_what_it_is_generated(name: str) -> None:
    it = Layer(CASES[name])
    given, generated = it.in_steps(it.slabs(), 64, given=True), it.in_steps(it.slabs(), 1, given=False)
    assert torch.equal(given[:BEFORE], generated[:BEFORE])
    assert not torch.equal(given[BEFORE:], generated[BEFORE:])


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", SOME)
def test_chunks_and_threads_do_not_matter(name: str, threads: int) -> None:
    it = Layer(CASES[name])
    whole = it.in_steps(it.slabs(), 64, given=True)
    torch.set_num_threads(threads)
    for together in (1, 7, 64):
        assert torch.equal(whole, it.in_steps(it.slabs(), together, given=True))


@pytest.mark.parametrize("name", SOME)
def test_other_tokens_of_the_call_do_not_matter(name: str) -> None:
    """A prompt's tokens of two sequences between verified ones of two others, all at the same positions."""
    it = Layer(CASES[name])
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
    ids, turn = tokens(DEEP + 3), tokens(20, 2)

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


def test_what_does_not_fit_is_refused() -> None:
    it = Layer(CASES["groups"])
    at, still = torch.tensor([DEEP]), torch.ones(1, COLUMNS).bfloat16()
    with pytest.raises(ValueError, match="given must be bool"):
        Step(at * 0, at, still, still, given=torch.tensor([1]))
    padded = Step(at * 0, at, still, still, at * 0, given=torch.tensor([True]))
    with pytest.raises(ValueError, match="padding or chosen positions for a prompt"):
        it.kernel(torch.zeros(1, it.hidden).bfloat16(), padded, it.slabs())
