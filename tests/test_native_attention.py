"""The attention kernel against the definition, in float64, and against itself in other company: more
tokens, more threads, a ring. test_native_decoding.py compares whole models with transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from tiermoe import native
from tiermoe.formats.encoding import Encoding
from tiermoe.formats.int4 import Int4
from tiermoe.formats.int8 import Int8
from tiermoe.formats.plain import Plain
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.kernels.attention import (
    FusedAttention,
    GroupedAttention,
    LatentAttention,
    PackedMatrix,
    Slabs,
    Step,
    fused_attention,
)
from tiermoe.kernels.norm import Norm

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="needs the native kernels"),
    pytest.mark.usefixtures("instruction_set", "one_thread"),
]

HIDDEN, LENGTH, TOGETHER = 128, 300, 50  # tokens of a sequence, of which a step takes so many; a tile has 256 positions
AGREE = 0.02  # relative error of a token's outputs
EPSILON = 1e-6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@dataclass(frozen=True)
class Shape:
    """Of a layer; what else a field says: `GroupedAttention`."""

    heads: int = 4
    kv_heads: int = 2
    head: int = 32
    values: int = 32
    rotary: int = 32
    norm: Any = "rms"
    head_norms: str = ""  # 'one': as wide as a head, 'all': as all of them
    bias: bool = False
    sinks: bool = False
    temperature: bool = False
    mixed: bool = False  # encodings
    latent: int = 0  # columns of a latent; 0: grouped attention
    first: int = 0  # of latent attention: what queries come from; 0: the hidden states
    gates: int = 0  # of latent attention: columns of its gate
    residual: float = 1.0
    window: int = 0
    chunked: bool = False
    gated: bool = False
    interleaved: bool = False
    norms_rotated: bool = False


LATENT = Shape(kv_heads=1, values=64, rotary=64, latent=64, interleaved=True)
CASES = {  # after the family that has it
    "qwen3_moe": Shape(head_norms="one"), "qwen2_moe, biases": Shape(bias=True),
    "wide heads": Shape(head=64, values=64, rotary=64),
    "qwen3_next": Shape(head=64, values=64, rotary=16, gated=True, norm="rms_centred", head_norms="one"),
    "mixtral, window": Shape(window=100), "one key head for nine": Shape(heads=18),
    "llama4, chunks": Shape(window=70, chunked=True),
    "gpt_oss, window": Shape(window=90, sinks=True, bias=True, norm="rms_at_once"), "sinks": Shape(sinks=True),
    "phimoe": Shape(norm="layer", bias=True), "olmoe": Shape(head_norms="all"),
    "hunyuan": Shape(head_norms="one", norms_rotated=True), "granitemoe": Shape(residual=0.4),
    "minimax_m2": Shape(head=64, values=64, head_norms="all"), "glm4_moe": Shape(rotary=16),
    "other values, interleaved": Shape(values=96, rotary=20, interleaved=True),
    "deepseek_v2": LATENT, "deepseek_v3": replace(LATENT, first=64), "halves": replace(LATENT, interleaved=False),
    "mistral4": replace(LATENT, first=192, temperature=True, residual=0.7),
    "mixed bits": Shape(head_norms="one", mixed=True),
    "latent, mixed bits": replace(LATENT, head=64, first=64, mixed=True),
    "bailing_hybrid": replace(LATENT, heads=6, gates=6),
    "hy_v4": replace(LATENT, first=64, gates=256, sinks=True, residual=3.0),
}  # fmt: skip
FOUR: tuple[Encoding, ...] = (Int4(32),)
MIXED: tuple[Encoding, ...] = (Int8(), *FOUR, Plain(), Int4(64))


class Case:
    """A layer and a sequence."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self._seed = shape, 100
        self._encodings: Iterator[Encoding] = cycle(MIXED if shape.mixed else FOUR)
        self.x = random(LENGTH, HIDDEN)
        angles = torch.rand(LENGTH, shape.rotary // 2, generator=torch.Generator().manual_seed(1)) * 6
        self.cos, self.sin = (torch.cat((each, each), -1).bfloat16() for each in (angles.cos(), angles.sin()))
        self.weights = self._latent() if shape.latent else self._grouped()
        kernel = fused_attention(self.weights)
        assert kernel is not None
        self.kernel: FusedAttention = kernel

    def _random(self, *shape: int) -> Tensor:
        self._seed += 1
        return random(*shape, seed=self._seed)

    def _matrix(self, out: int, in_: int, bias: bool = False) -> PackedMatrix:
        encoding = next(self._encodings)
        fields = encoding.encode(self._random(out, in_) * 0.1, QUANTIZERS["linear"], torch.bfloat16)
        return PackedMatrix(encoding, fields, out, in_, self._random(out) if bias else None)

    def _gate(self, out: int) -> PackedMatrix:
        return (
            self._matrix(out, HIDDEN)
            if out % 64 == 0
            else PackedMatrix(Plain(), {"weight": self._random(out, HIDDEN) * 0.1}, out, HIDDEN)
        )

    def _norm(self, width: int) -> Norm:
        kind = self.shape.norm
        weight = self._random(width) * 0.3 + (kind != "rms_centred")
        return Norm(weight.bfloat16(), EPSILON, kind, self._random(width) if kind == "layer" else None)

    def _grouped(self) -> GroupedAttention:
        it = self.shape
        columns = it.head + (it.values if it.gated else 0)
        outs = (it.heads * columns, it.kv_heads * it.head, it.kv_heads * it.values)
        query, key, value = (self._matrix(out, HIDDEN, it.bias) for out in outs)
        own = {"": None, "one": (it.head, it.head), "all": (query.out, key.out)}[it.head_norms]
        return GroupedAttention(
            query, key, value, self._matrix(HIDDEN, it.heads * it.values), self._norm(HIDDEN), self._norm(HIDDEN),
            it.head, it.rotary, it.head**-0.5, *(self._norm(width) for width in own or ()), value_columns=it.values,
            interleaved=it.interleaved, window=it.window, chunked=it.chunked, gated=it.gated,
            sinks=self._random(it.heads).float() if it.sinks else None, residual_multiplier=it.residual,
            norms_rotated=it.norms_rotated,
        )  # fmt: skip

    def _latent(self) -> LatentAttention:
        it = self.shape
        return LatentAttention(
            self._matrix(it.heads * (it.head + it.rotary), it.first or HIDDEN),
            self._matrix(it.latent + it.rotary, HIDDEN), self._matrix(it.heads * it.latent, it.head),
            self._matrix(it.heads * it.values, it.latent), self._matrix(HIDDEN, it.heads * it.values),
            self._norm(HIDDEN), self._norm(HIDDEN), self._norm(it.latent), it.head, it.values, it.latent, it.rotary,
            (it.head + it.rotary) ** -0.5, self._matrix(it.first, HIDDEN) if it.first else None,
            self._norm(it.first) if it.first else None, it.interleaved, it.residual,
            sinks=self._random(it.heads).float() if it.sinks else None,
            gate=self._gate(it.gates) if it.gates else None,
        )  # fmt: skip

    def expected(self) -> tuple[Tensor, Tensor]:
        """The definition, float64: what attention adds to each token, and the norm of the sum."""
        it, weights = self.shape, self.weights
        normed = normed_by(weights.norm_before, self.x.double())
        if isinstance(weights, LatentAttention):
            query, keys, values = self._of_latents(weights, normed)
            gate = None
            if weights.gate is not None:
                each = times(weights.gate, normed).view(LENGTH, it.heads, -1)
                gate = each.expand(-1, -1, it.values).flatten(1)
        else:
            query, keys, values, gate = self._of_groups(weights, normed)
        if it.temperature:
            query = query * temperatures(torch.arange(LENGTH)).double()[:, None, None]
        scores = torch.einsum("ihc,jhc->hij", query, keys) * weights.scale
        own, other = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
        hidden = other > own
        if it.window:
            hidden |= other // it.window != own // it.window if it.chunked else own - other >= it.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if weights.sinks is not None:
            scores = torch.cat((scores, weights.sinks.double()[:, None, None].expand(-1, LENGTH, 1)), -1)
        found = torch.einsum("hij,jhc->ihc", scores.softmax(-1)[..., :LENGTH], values).flatten(1)
        added = times(weights.output, found if gate is None else found * gate.sigmoid()) * it.residual
        return added, normed_by(weights.norm_after, self.x.double() + added)

    def _of_groups(self, weights: GroupedAttention, normed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values of all heads (tokens, heads, columns), and what gates the heads."""
        it, gate = self.shape, None
        query, key, value = (times(each, normed) for each in (weights.query, weights.key, weights.value))
        if it.gated:
            both = query.view(LENGTH, it.heads, -1)
            query, gate = both[..., : it.head].flatten(1), both[..., it.head :].flatten(1)
        found = []
        for each, own, heads in ((query, weights.norm_query, it.heads), (key, weights.norm_key, it.kv_heads)):
            if it.head_norms == "all":
                each = normed_by(own, each)
            each = each.view(LENGTH, heads, it.head)
            if it.norms_rotated:
                each = self.turned(each)
            if it.head_norms == "one":
                each = normed_by(own, each)
            found.append((each if it.norms_rotated else self.turned(each)).repeat_interleave(it.heads // heads, 1))
        return *found, value.view(LENGTH, it.kv_heads, -1).repeat_interleave(it.heads // it.kv_heads, 1), gate

    def _of_latents(self, weights: LatentAttention, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        it = self.shape
        first = weights.query_first
        narrow = normed if first is None else normed_by(weights.norm_query, times(first, normed))
        query = times(weights.query, narrow).view(LENGTH, it.heads, -1)
        query = torch.cat((query[..., : it.head], self.turned(query[..., it.head :])), -1)
        both = times(weights.latent, normed)
        latent, shared = normed_by(weights.norm_latent, both[:, : it.latent]), self.turned(both[:, None, it.latent :])
        keys = torch.einsum("tl,hlc->thc", latent, values_of(weights.key_up).view(it.heads, it.latent, it.head))
        keys = torch.cat((keys, shared.expand(-1, it.heads, -1)), -1)
        return query, keys, times(weights.value_up, latent).view(LENGTH, it.heads, -1)

    def turned(self, each: Tensor) -> Tensor:
        """(tokens, heads, columns), the first columns rotated."""
        half = self.shape.rotary // 2
        cos, sin = (turn[:, None, :half].double() for turn in (self.cos, self.sin))
        pairs = each[..., : 2 * half]
        one, two = (pairs[..., ::2], pairs[..., 1::2]) if self.shape.interleaved else pairs.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin, each[..., 2 * half :]), -1)

    def slabs(self, count: int = 1, room: int = LENGTH, ring: bool = False) -> Slabs:
        """Empty ones: what is not written must not be looked at."""
        it = self.shape
        if it.latent:
            return Slabs(torch.full((count, 1, room, it.latent + it.rotary), torch.nan).bfloat16())
        keys, values = (torch.full((count, it.kv_heads, room, columns), torch.nan) for columns in (it.head, it.values))
        return Slabs(keys.bfloat16(), values.bfloat16(), ring)

    def step(self, positions: Tensor, slab: int | list[int] = 0, first: Tensor | None = None) -> Step:
        where = torch.full_like(positions, slab) if isinstance(slab, int) else torch.tensor(slab)
        warm = temperatures(positions) if self.shape.temperature else None
        return Step(where, positions, self.cos[positions], self.sin[positions], first, temperatures=warm)

    def run(self, slabs: Slabs, together: int, begin: int = 0, end: int = LENGTH, slab: int = 0) -> Tensor:
        """(tokens, 2, H): out and normed of positions begin .. end - 1 of a slab, so many in a step."""
        found = []
        for at in range(begin, end, together):
            positions = torch.arange(at, min(at + together, end))
            found.append(torch.stack(self.kernel(self.x[positions], self.step(positions, slab), slabs), 1))
        return torch.cat(found)


def values_of(matrix: PackedMatrix) -> Tensor:
    return matrix.encoding.decode(matrix.fields, matrix.out, matrix.in_, torch.float32).double()


def times(matrix: PackedMatrix, x: Tensor) -> Tensor:
    product = x @ values_of(matrix).t()
    return product if matrix.bias is None else product + matrix.bias.double()


def normed_by(norm: Norm | None, x: Tensor) -> Tensor:
    assert norm is not None
    if norm.kind == "layer":
        assert norm.bias is not None
        x = x - x.mean(-1, keepdim=True)
    scaled = x / (x.square().mean(-1, keepdim=True) + norm.epsilon).sqrt()
    scaled = scaled * (norm.weight.double() + (norm.kind == "rms_centred"))
    return scaled if norm.bias is None else scaled + norm.bias.double()


def temperatures(positions: Tensor) -> Tensor:
    return 1 + positions.float() / 1000


@pytest.fixture(scope="module")
def case() -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            made[name] = Case(CASES[name])
        return made[name]

    return get


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_definition(name: str, case: Callable[[str], Case]) -> None:
    it = case(name)
    got, (added, normed) = it.run(it.slabs(), TOGETHER).double(), it.expected()
    for ours, want in ((got[:, 0], it.x + added), (got[:, 1], normed)):
        assert ((ours - want).norm(dim=-1) / want.norm(dim=-1)).max() < AGREE
    ours = got[:, 0] - it.x.double()  # without the residual, in which an error would drown
    assert (ours - added).norm() / added.norm() < AGREE


SOME = [
    "qwen3_moe", "qwen3_next", "mixtral, window", "one key head for nine", "gpt_oss, window", "minimax_m2",
    "deepseek_v3", "mistral4", "bailing_hybrid", "hy_v4",
]  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_tokens_at_once_and_threads_do_not_matter(name: str, case: Callable[[str], Case]) -> None:
    it = case(name)
    one, five, many = it.slabs(), it.slabs(), it.slabs()
    alone = it.run(one, 1)
    assert torch.equal(alone, it.run(five, 5))
    assert torch.equal(alone, it.run(many, 141))
    assert torch.equal(one.keys, five.keys)
    assert torch.equal(one.keys, many.keys)
    torch.set_num_threads(3)
    assert torch.equal(alone, it.run(it.slabs(), TOGETHER))


@pytest.mark.parametrize("name", SOME)
def test_rows_of_different_positions_are_each_what_they_are_alone(name: str, case: Callable[[str], Case]) -> None:
    it = case(name)
    lengths, slabs = [3, 290, 1, 256, 255], it.slabs(5)
    for slab, length in enumerate(lengths):
        it.run(slabs, TOGETHER, 0, length, slab)
    alone = torch.cat([it.run(slabs, 1, length, length + 2, slab) for slab, length in enumerate(lengths)])
    # last slab first, each with two tokens, not beside each other
    order = [4, 3, 2, 1, 0] * 2
    positions = torch.tensor([lengths[slab] + place // 5 for place, slab in enumerate(order)])
    got = torch.stack(it.kernel(it.x[positions], it.step(positions, order), slabs), 1)
    assert torch.equal(got, alone[[2 * slab + place // 5 for place, slab in enumerate(order)]])


@pytest.mark.parametrize("name", ["mixtral, window", "gpt_oss, window"])
@pytest.mark.parametrize("together", [1, 7])
def test_a_ring_is_the_whole_cache(name: str, together: int, case: Callable[[str], Case]) -> None:
    it = case(name)
    ring = it.slabs(room=it.shape.window + together - 1, ring=True)
    assert torch.equal(it.run(it.slabs(), together), it.run(ring, together))


def test_a_token_reads_the_positions_that_are_chosen_for_it_alone(case: Callable[[str], Case]) -> None:
    """More than a tile has: bit for bit what it computes where nothing else is there."""
    it, own = case("deepseek_v3"), 290
    others = torch.randperm(own, generator=torch.Generator().manual_seed(2))[:269].sort().values
    kept, compact = it.slabs(), it.slabs()
    it.run(kept, TOGETHER, 0, own)
    compact.keys[0, 0, : len(others)] = kept.keys[0, 0, others]
    left_out = torch.ones(LENGTH, dtype=torch.bool)
    left_out[others] = False
    kept.keys[0, 0, left_out] = torch.nan
    at = torch.tensor([own])
    chosen = torch.cat((others, at)).int()[None]
    want = it.kernel(it.x[at], Step(at * 0, torch.tensor([len(others)]), it.cos[at], it.sin[at]), compact)
    got = it.kernel(it.x[at], it.step(at).choosing(chosen), kept)
    assert torch.equal(torch.stack(got), torch.stack(want))
    first = torch.tensor([3])  # it has fewer positions than could be chosen
    its = it.kernel(it.x[first], it.step(first).choosing(torch.arange(270).int()[None]), it_filled(it, 3))
    assert torch.equal(its[0], it.kernel(it.x[first], it.step(first), it_filled(it, 3))[0])
    with pytest.raises(ValueError, match="chosen position"):
        it.kernel(it.x[at], it.step(at).choosing(chosen + 1), kept)


def test_many_tokens_read_the_positions_that_each_has_alone(case: Callable[[str], Case]) -> None:
    """Of latents and of groups, the first ones with fewer positions than could be chosen."""
    most, generator = 150, torch.Generator().manual_seed(4)
    for name in ("hy_v4", "qwen3_moe"):
        it = case(name)
        kept, at = it_filled(it, LENGTH), torch.arange(100, LENGTH)
        chosen = torch.full((len(at), most), -1, dtype=torch.int32)
        for row, position in zip(chosen, at.tolist(), strict=True):
            others = torch.randperm(position, generator=generator)[: most - 1].sort().values
            row[: len(others) + 1] = torch.cat((others, torch.tensor([position])))
        together = torch.stack(it.kernel(it.x[at], it.step(at).choosing(chosen), kept), 1)
        for index in (0, 49, 50, 199):
            one = at[index : index + 1]
            alone = it.kernel(it.x[one], it.step(one).choosing(chosen[index : index + 1]), kept)
            assert torch.equal(together[index : index + 1], torch.stack(alone, 1)), (name, index)


def it_filled(it: Case, end: int) -> Slabs:
    slabs = it.slabs()
    it.run(slabs, TOGETHER, 0, end)
    return slabs


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss, window"])
def test_padding_on_the_left_is_not_looked_at(name: str, case: Callable[[str], Case]) -> None:
    """A sequence from position `pad` on, rotated as from 0 on, is the one without padding but for the order of sums."""
    it, pad = case(name), 37
    slabs, found = it.slabs(), []
    for at in range(60):
        positions, first = torch.tensor([at + pad]), torch.tensor([pad])
        step = Step(torch.zeros(1, dtype=torch.int64), positions, it.cos[at : at + 1], it.sin[at : at + 1], first)
        found.append(it.kernel(it.x[at : at + 1], step, slabs)[0])
    want = it.run(it.slabs(), 1, 0, 60)[:, 0]
    assert (torch.cat(found).float() - want.float()).norm() / want.float().norm() < 0.005


def test_what_does_not_fit_is_refused(case: Callable[[str], Case]) -> None:
    it, windowed = case("qwen3_moe"), case("mixtral, window")
    slabs, at = it.slabs(2), torch.tensor([5])

    def refused(message: str, call: Callable[[], object]) -> None:
        with pytest.raises(ValueError, match=message):
            call()

    refused("beyond the slab", lambda: it.kernel(it.x[:1], it.step(torch.tensor([-1])), slabs))
    refused("beyond the slab", lambda: it.kernel(it.x[:1], _moved(it, LENGTH), slabs))
    refused("not there", lambda: it.kernel(it.x[:1], it.step(at, 2), slabs))
    refused("first position", lambda: it.kernel(it.x[:1], it.step(at, first=torch.tensor([6])), slabs))
    refused("another number", lambda: it.kernel(it.x[:1], it.step(at), case("wide heads").slabs()))
    refused("another number", lambda: it.kernel(it.x[:1], it.step(at), Slabs(slabs.keys)))
    refused("another width", lambda: it.kernel(it.x[:1], case("wide heads").step(at), slabs))
    refused("without a window", lambda: it.kernel(it.x[:1], it.step(at), it.slabs(ring=True)))
    ring = windowed.slabs(room=104, ring=True)
    refused("less room", lambda: windowed.kernel(it.x[:6], windowed.step(torch.arange(6)), ring))
    refused("contiguous bfloat16", lambda: it.kernel(it.x[:1].float(), it.step(at), slabs))
    refused("contiguous bfloat16", lambda: it.kernel(it.x[:2], it.step(at), slabs))
    refused("contiguous bfloat16", lambda: Slabs(slabs.keys.float()))
    refused("contiguous bfloat16", lambda: Slabs(slabs.keys, slabs.keys[:1]))
    refused("int64", lambda: Step(at.int(), at, it.cos[:1], it.sin[:1]))
    refused("cos and sin", lambda: Step(at, at, it.cos[:2], it.sin[:2]))
    refused("at least one token", lambda: it.step(torch.arange(0)))


def _moved(it: Case, position: int) -> Step:
    at = torch.tensor([position])
    return Step(torch.zeros_like(at), at, it.cos[:1], it.sin[:1])


def test_a_layer_whose_shapes_do_not_suit_has_no_kernel(case: Callable[[str], Case]) -> None:
    weights = case("qwen3_moe").weights
    assert isinstance(weights, GroupedAttention)
    for change in ({"head_columns": 16}, {"head_columns": 64}, {"rotary_columns": 33}, {"value_columns": 64}):
        assert fused_attention(replace(weights, **change)) is None
    assert fused_attention(replace(weights, norm_query=Norm(torch.ones(16).bfloat16(), 1e-6))) is None
