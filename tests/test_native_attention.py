"""The attention kernel for few tokens against transformers' eager decoder layers on the same weights, and against
itself in other company: more tokens, more threads, a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from tests import tiny
from tiermoe import native
from tiermoe.formats.encoding import Encoding
from tiermoe.formats.int4 import CPU_LAYOUT, Int4
from tiermoe.formats.int8 import Int8
from tiermoe.formats.plain import Plain
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.kernels.attention import (
    DecodeAttention,
    GroupedAttention,
    LatentAttention,
    PackedMatrix,
    Slabs,
    Step,
    decode_attention,
)
from tiermoe.kernels.norm import Norm
from tiermoe.model.families import FAMILIES as ALL_FAMILIES

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="needs the native kernels"),
    pytest.mark.usefixtures("instruction_set", "one_thread"),
]

HIDDEN, LENGTH, TOGETHER = 128, 300, 50  # tokens of a sequence, of which a step takes so many; a tile has 256 positions
AGREE = 0.02  # relative error of a token's outputs


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


FOUR: tuple[Encoding, ...] = (Int4(CPU_LAYOUT, 32),)
MIXED: tuple[Encoding, ...] = (Int8(), *FOUR, Plain(), Int4(CPU_LAYOUT, 64))
Encodings = Iterator[Encoding]  # of one matrix after the other


def pack(
    weight: torch.Tensor, encodings: Encodings, bias: torch.Tensor | None = None
) -> tuple[PackedMatrix, torch.Tensor]:
    """A packed matrix and its values."""
    out, in_ = weight.shape
    encoding = next(encodings)
    fields = encoding.encode(weight, QUANTIZERS["linear"], torch.bfloat16)
    values = encoding.decode(fields, out, in_, torch.bfloat16).contiguous()
    return PackedMatrix(encoding, fields, out, in_, bias), values


def packed_in_place(linear: torch.nn.Linear, encodings: Encodings) -> PackedMatrix:
    """A linear layer packed; the layer takes the packed values."""
    bias = None if linear.bias is None else linear.bias.data
    matrix, linear.weight.data = pack(linear.weight.data, encodings, bias)
    return matrix


def norm_of(module: Any) -> Norm | None:
    if module is None:
        return None
    if isinstance(module, torch.nn.LayerNorm):
        return Norm(module.weight.data, module.eps, "layer", module.bias.data)
    if "Qwen3Next" in type(module).__name__:
        return Norm(module.weight.data, module.eps, "rms_centred")
    kind: Any = "rms_at_once" if "GptOss" in type(module).__name__ else "rms"
    return Norm(module.weight.data, module.variance_epsilon, kind)


def grouped(layer: Any, rotary: int, encodings: Encodings) -> GroupedAttention:
    attention = layer.self_attn
    before, after = norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)
    assert before is not None
    assert after is not None
    sinks = getattr(attention, "sinks", None)
    rotated = hasattr(attention, "query_layernorm")
    windowed = attention if hasattr(attention, "sliding_window") else attention.config
    return GroupedAttention(
        *(packed_in_place(getattr(attention, name), encodings) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        before, after, attention.head_dim, rotary, attention.scaling,
        norm_of(getattr(attention, "query_layernorm" if rotated else "q_norm", None)),
        norm_of(getattr(attention, "key_layernorm" if rotated else "k_norm", None)),
        window=getattr(windowed, "sliding_window", None) or 0,
        sinks=None if sinks is None else sinks.data.float(), gated="Qwen3Next" in type(layer).__name__,
        interleaved="Ernie" in type(layer).__name__, norms_rotated=rotated,
        residual_multiplier=getattr(layer, "residual_multiplier", 1.0),
    )  # fmt: skip


def latent(layer: Any, rotary: int, encodings: Encodings) -> LatentAttention:
    attention = layer.self_attn
    heads, plain, width = attention.num_heads, attention.qk_nope_head_dim, attention.v_head_dim
    rank = attention.kv_lora_rank
    both = attention.kv_b_proj.weight.data.view(heads, plain + width, rank)
    key_up, keys = pack(both[:, :plain].transpose(1, 2).reshape(heads * rank, plain), encodings)
    value_up, values = pack(both[:, plain:].reshape(heads * width, rank), encodings)
    both[:, :plain], both[:, plain:] = keys.view(heads, rank, plain).transpose(1, 2), values.view(heads, width, rank)
    before, after, within = (
        norm_of(each) for each in (layer.input_layernorm, layer.post_attention_layernorm, attention.kv_a_layernorm)
    )
    assert before is not None
    assert after is not None
    assert within is not None
    twice = attention.q_lora_rank is not None
    return LatentAttention(
        packed_in_place(attention.q_b_proj if twice else attention.q_proj, encodings),
        packed_in_place(attention.kv_a_proj_with_mqa, encodings), key_up, value_up,
        packed_in_place(attention.o_proj, encodings), before, after, within, plain, width, rank, rotary,
        attention.scaling,
        packed_in_place(attention.q_a_proj, encodings) if twice else None,
        norm_of(attention.q_a_layernorm) if twice else None,
    )  # fmt: skip


MLA = {
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 64, "num_key_value_heads": 4,
    "first_k_dense_replace": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"head_dim": 32}),
    "qwen3_next": ("qwen3_next", {"head_dim": 64, "layer_types": ["full_attention"], "mlp_only_layers": None}),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral, window": ("mixtral", {"sliding_window": 100}),
    "mixtral, one key head for nine": (
        "mixtral",
        {"num_attention_heads": 18, "num_key_value_heads": 2, "head_dim": 32},
    ),
    "gpt_oss, window": ("gpt_oss", {"head_dim": 32, "layer_types": ["sliding_attention"], "sliding_window": 90}),
    "gpt_oss, all": ("gpt_oss", {"head_dim": 64, "layer_types": ["full_attention"]}),
    "phimoe": ("phimoe", {"attention_bias": True}),
    "olmoe": ("olmoe", {}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"head_dim": 32}),
    "granitemoe": ("granitemoe", {"attention_multiplier": 0.3, "residual_multiplier": 0.4}),
    "glm4_moe": ("glm4_moe", {"head_dim": 64, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe, few rotary columns": ("glm4_moe", {"head_dim": 32}),
    "minimax_m2": ("minimax_m2", {"head_dim": 64, "rotary_dim": 32}),
    "ernie4_5_moe": ("ernie4_5_moe", {"head_dim": 32, "moe_layer_start_index": 0}),
    "deepseek_v2": ("deepseek_v2", {**MLA, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {**MLA, "q_lora_rank": 64}),
    "qwen3_moe, mixed bits": ("qwen3_moe", {"head_dim": 32}),
    "deepseek_v3, mixed bits": ("deepseek_v3", {**MLA, "q_lora_rank": 64, "qk_nope_head_dim": 64}),
    "mistral4": (
        "mistral4",
        {**MLA, "q_lora_rank": 64, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.3}},
    ),
    "deepseek_v3, yarn": ("deepseek_v3", {**MLA, "q_lora_rank": 192, "rope_parameters": YARN}),
}


class Case:
    """A layer of a family, transformers' and ours on the same weights, and a sequence."""

    def __init__(self, name: str) -> None:
        family, changes = FAMILIES[name]
        sizes = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        torch.manual_seed(0)
        changes = {"max_position_embeddings": 1024, **sizes, **changes}
        config = tiny.config_of(family, **changes, attn_implementation="eager")
        model = tiny.auto_class(family).from_config(config, dtype=torch.bfloat16).eval()
        self.temperature = ALL_FAMILIES[family].temperature(config)
        self.layer: Any = model.model.layers[0]
        for parameter_name, parameter in self.layer.named_parameters():
            one = "norm.weight" in parameter_name and family != "qwen3_next"  # whose norms add it
            spread, middle = (0.1, 0.0) if parameter.dim() > 1 else (0.3, float(one))
            torch.nn.init.normal_(parameter, middle, spread)
        self.x = random(LENGTH, HIDDEN)
        self.position = model.model.rotary_emb(self.x[None], position_ids=torch.arange(LENGTH)[None])
        self.cos, self.sin = self.turns()
        rotary = self.cos.shape[1]
        encodings = cycle(MIXED if name.endswith("mixed bits") else FOUR)
        of = latent if "kv_lora_rank" in changes else grouped
        self.weights: GroupedAttention | LatentAttention = of(self.layer, rotary, encodings)
        kernel = decode_attention(self.weights)
        assert kernel is not None
        self.kernel: DecodeAttention = kernel

    def turns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin as the kernel takes them."""
        if isinstance(self.position, torch.Tensor):  # DeepSeek-V2's complex numbers
            found = self.position.real[0], self.position.imag[0]
        else:
            found = self.position[0][0], self.position[1][0]
        whole = isinstance(self.position, tuple) and "GptOss" not in type(self.layer).__name__
        cos, sin = (each if whole else torch.cat((each, each), -1) for each in found)
        return cos.bfloat16().contiguous(), sin.bfloat16().contiguous()

    def eager(self) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' residual stream after the attention of each token, and its norm."""
        at = torch.arange(LENGTH)
        hidden_ = at[None, :] > at[:, None]
        if window := getattr(self.weights, "window", 0):
            hidden_ |= at[:, None] - at[None, :] >= window
        mask = torch.zeros(LENGTH, LENGTH).masked_fill(hidden_, torch.finfo(torch.bfloat16).min).bfloat16()
        with torch.no_grad():
            got, _ = self.layer.self_attn(
                hidden_states=self.layer.input_layernorm(self.x[None]), position_embeddings=self.position,
                attention_mask=mask[None, None], position_ids=at[None],
            )  # fmt: skip
            out = self.x + got[0] * self.weights.residual_multiplier
            return out, self.layer.post_attention_layernorm(out)

    def slabs(self, count: int = 1, room: int = LENGTH, ring: bool = False) -> Slabs:
        """Empty ones: what is not written must not be looked at."""
        weights = self.weights
        if isinstance(weights, LatentAttention):
            return Slabs(
                torch.full((count, 1, room, weights.latent_columns + weights.rotary_columns), torch.nan).bfloat16()
            )
        shape = (count, weights.key.out // weights.head_columns, room, weights.head_columns)
        return Slabs(torch.full(shape, torch.nan).bfloat16(), torch.full(shape, torch.nan).bfloat16(), ring)

    def step(self, positions: torch.Tensor, slab: int | list[int] = 0, first: torch.Tensor | None = None) -> Step:
        where = torch.full_like(positions, slab) if isinstance(slab, int) else torch.tensor(slab)
        temperatures = None if self.temperature is None else self.temperature(positions)
        return Step(where, positions, self.cos[positions], self.sin[positions], first, temperatures=temperatures)

    def run(self, slabs: Slabs, together: int, begin: int = 0, end: int = LENGTH, slab: int = 0) -> torch.Tensor:
        """(tokens, 2, H): out and normed of positions begin .. end - 1 of a slab, so many in a step."""
        found = []
        for at in range(begin, end, together):
            positions = torch.arange(at, min(at + together, end))
            found.append(torch.stack(self.kernel(self.x[positions], self.step(positions, slab), slabs), 1))
        return torch.cat(found)


@pytest.fixture(scope="module")
def case() -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            made[name] = Case(name)
        return made[name]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_it_agrees_with_transformers_eager_layer(name: str, case: Callable[[str], Case]) -> None:
    it = case(name)
    got = it.run(it.slabs(), TOGETHER).float()
    for ours, eager in zip(got.unbind(1), it.eager(), strict=True):
        error = (ours - eager.float()).norm(dim=-1) / eager.float().norm(dim=-1)
        assert error.max() < AGREE
    added = got[:, 0] - it.x.float()  # without the residual, in which an error would drown
    want = it.eager()[0].float() - it.x.float()
    assert (added - want).norm() / want.norm() < AGREE


SOME = [
    "qwen3_moe",
    "qwen3_next",
    "mixtral, window",
    "mixtral, one key head for nine",
    "gpt_oss, window",
    "minimax_m2",
    "deepseek_v3",
    "mistral4",
]


@pytest.mark.parametrize("name", SOME)
def test_five_at_once_are_one_at_a_time_bit_for_bit(name: str, case: Callable[[str], Case]) -> None:
    it = case(name)
    one, five, many = it.slabs(), it.slabs(), it.slabs()
    alone = it.run(one, 1)
    assert torch.equal(alone, it.run(five, 5))
    assert torch.equal(alone, it.run(many, 64))
    assert torch.equal(one.keys, five.keys)
    assert torch.equal(one.keys, many.keys)


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("name", SOME)
def test_threads_do_not_matter(name: str, threads: int, case: Callable[[str], Case]) -> None:
    it = case(name)
    alone = it.run(it.slabs(), TOGETHER)
    torch.set_num_threads(threads)
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
    assert isinstance(it.weights, GroupedAttention)
    ring = it.slabs(room=it.weights.window + together - 1, ring=True)
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


def test_values_of_another_width_and_interleaved_pairs() -> None:
    """Against the definition, in float64."""
    heads, kv_heads, head, width, rotary, length = 4, 2, 32, 96, 20, 30
    shapes = [(heads * head, HIDDEN), (kv_heads * head, HIDDEN), (kv_heads * width, HIDDEN), (HIDDEN, heads * width)]
    both = [pack(random(*shape, seed=seed) * 0.1, cycle(FOUR)) for seed, shape in enumerate(shapes)]
    (query, wq), (key, wk), (value, wv), (output, wo) = both
    one = Norm(torch.ones(HIDDEN).bfloat16(), 1e-6)
    weights = GroupedAttention(
        query, key, value, output, one, one, head, rotary, 0.2, value_columns=width, interleaved=True
    )
    kernel = decode_attention(weights)
    assert kernel is not None
    x = random(length, HIDDEN, seed=9)
    angles = torch.rand(length, rotary // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos, sin = (torch.cat((each, each), -1).bfloat16() for each in (angles.cos(), angles.sin()))
    slabs = Slabs(random(1, kv_heads, length, head), random(1, kv_heads, length, width))
    at = torch.arange(length)
    got = kernel(x, Step(torch.zeros_like(at), at, cos, sin), slabs)[0].double() - x.double()

    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    q, k, v = (normed @ w.double().t() for w in (wq, wk, wv))
    q, k, v = q.view(length, heads, head), k.view(length, kv_heads, head), v.view(length, kv_heads, width)

    def turned(each: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(each[..., :rotary].reshape(length, -1, rotary // 2, 2).contiguous())
        found = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles).to(pairs)[:, None]).flatten(2)
        return torch.cat((found, each[..., rotary:]), -1)

    q, k = turned(q), turned(k)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("ihc,jhc->hij", q, k) * 0.2
    scores.masked_fill_(at[None, :] > at[:, None], -torch.inf)
    want = torch.einsum("hij,jhc->ihc", scores.softmax(-1), v).reshape(length, -1) @ wo.double().t()
    assert (got - want).norm() / want.norm() < AGREE


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
    refused("another number", lambda: it.kernel(it.x[:1], it.step(at), case("gpt_oss, all").slabs()))
    refused("another number", lambda: it.kernel(it.x[:1], it.step(at), Slabs(slabs.keys)))
    refused("another width", lambda: it.kernel(it.x[:1], case("gpt_oss, all").step(at), slabs))
    refused("without a window", lambda: it.kernel(it.x[:1], it.step(at), it.slabs(ring=True)))
    ring = windowed.slabs(room=104, ring=True)
    refused("less room", lambda: windowed.kernel(it.x[:6], windowed.step(torch.arange(6)), ring))
    refused("contiguous bfloat16", lambda: it.kernel(it.x[:1].float(), it.step(at), slabs))
    refused("contiguous bfloat16", lambda: it.kernel(it.x[:2], it.step(at), slabs))
    refused("contiguous bfloat16", lambda: Slabs(slabs.keys.float()))
    refused("contiguous bfloat16", lambda: Slabs(slabs.keys, slabs.keys[:1]))
    refused("int64", lambda: Step(at.int(), at, it.cos[:1], it.sin[:1]))
    refused("cos and sin", lambda: Step(at, at, it.cos[:2], it.sin[:2]))
    refused("1 to 64", lambda: it.step(torch.arange(65)))


def _moved(it: Case, position: int) -> Step:
    at = torch.tensor([position])
    return Step(torch.zeros_like(at), at, it.cos[:1], it.sin[:1])


def test_a_layer_whose_shapes_do_not_suit_has_no_kernel(case: Callable[[str], Case]) -> None:
    weights = case("qwen3_moe").weights
    assert isinstance(weights, GroupedAttention)
    for change in ({"head_columns": 16}, {"head_columns": 64}, {"rotary_columns": 33}, {"value_columns": 64}):
        assert decode_attention(replace(weights, **change)) is None
    assert decode_attention(replace(weights, norm_query=Norm(torch.ones(16).bfloat16(), 1e-6))) is None
