"""The attention kernel for prompts against the definition, in float64, and against itself: in other company, on more
threads, in a ring, over codes of 8 and 4 bits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tiermoe import native
from tiermoe.kernels.attention import Piece, Slabs, prompt_attention, prompt_state, prompt_workspace, takes_prompts
from tiermoe.model.cache.memory import decode_kv, encode_kv
from tiermoe.native import _native

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
        self.sinks = random(case.heads, seed=4).float() if case.sinks else None

    def slabs(self, written: int = LENGTH, room: int = LENGTH + 20, ring: bool = False) -> Slabs:
        """Slab 1 of 2 with the first `written` positions; what is not written must not be looked at."""
        kept = []
        for rows in (self.keys, self.values):
            tensors = (rows,) if self.case.bits == 16 else encode_kv(rows, self.case.bits)
            for tensor in tensors:
                unwritten = torch.nan if tensor.dtype.is_floating_point else 99
                slab = torch.full((2, tensor.shape[1], room, tensor.shape[2]), unwritten, dtype=tensor.dtype)
                places = torch.arange(max(0, written - room), written)
                slab[1, :, places % room] = tensor[places].transpose(0, 1)
                kept.append(slab)
        if self.case.bits == 16:
            return Slabs(kept[0], kept[1], ring)
        return Slabs(kept[0], kept[2], ring, (kept[1], kept[3]))

    def run(self, slabs: Slabs, begin: int, end: int) -> Tensor:
        case = self.case
        return prompt_attention(
            self.query[begin:end], slabs, 1, begin, SCALE, case.window, self.sinks, chunked=case.chunked
        )

    def in_pieces(self, slabs: Slabs, *ends: int) -> Tensor:
        pieces = zip((0, *ends), (*ends, LENGTH), strict=True)
        return torch.cat([self.run(slabs, begin, end) for begin, end in pieces])

    def expected(self) -> Tensor:
        """The definition, in float64."""
        case = self.case
        keys, values = self.keys, self.values
        if case.bits != 16:
            keys, values = (decode_kv(*encode_kv(each, case.bits), torch.float64) for each in (keys, values))
        group = case.heads // case.kv_heads
        wide_keys, wide_values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
        scores = torch.einsum("thc,nhc->htn", self.query.double(), wide_keys) * SCALE
        own, other = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
        hidden = other > own
        if case.window is not None and case.chunked:
            hidden |= other // case.window != own // case.window
        elif case.window is not None:
            hidden |= other <= own - case.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, LENGTH, 1)), -1)
        weights = torch.softmax(scores, -1)[..., :LENGTH]
        return torch.einsum("htn,nhc->thc", weights, wide_values)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_definition(name: str) -> None:
    it = Sequence(CASES[name])
    got, want = it.run(it.slabs(), 0, LENGTH).double(), it.expected()
    error = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() < (0.02 if it.case.bits == 4 else 0.01)  # at 4 bits queries are rounded once more


@pytest.mark.parametrize("name", CASES)
def test_chunks_do_not_matter(name: str) -> None:
    """Each piece with no more written than it needs."""
    it = Sequence(CASES[name])
    whole = it.run(it.slabs(), 0, LENGTH)
    assert torch.equal(whole, it.in_pieces(it.slabs(), 64, 131, 132, 200))
    assert torch.equal(whole[:77], it.run(it.slabs(written=77), 0, 77))


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("name", ["groups", "one key head for all", "8 bits", "4 bits"])
def test_threads_do_not_matter(name: str, threads: int) -> None:
    it = Sequence(CASES[name])
    alone = it.run(it.slabs(), 0, LENGTH)
    torch.set_num_threads(threads)
    assert torch.equal(alone, it.run(it.slabs(), 0, LENGTH))


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
