"""One token's attention and router in our own calls, beside transformers' forward on the same weights."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeModel, Qwen3MoeTopKRouter

from benchmarks.kernels.weights import Turns, copy, nbytes, packed, random
from benchmarks.rounds import rates, ratios, timed
from tiermoe.kernels import linear_for
from tiermoe.kernels.native.attention import PackedMatrix
from tiermoe.kernels.native.few_tokens_attention import FewTokensAttention, Slabs, Step
from tiermoe.model.attention import GroupedAttention
from tiermoe.model.few_tokens import few_tokens_form
from tiermoe.model.linear import PackedLinear
from tiermoe.model.norms import RootMeanSquare
from tiermoe.model.rotary import turn_halves
from tiermoe.model.routers import Router, RouterRule

OURS, THEIRS = "one token", "transformers"
_ROUTERS = 64
_LAYERS = 64  # at most


class Nothing(torch.nn.Module):
    """Stands for a layer's experts: zeros."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden)


def attention(hidden: int, heads: int, kv_heads: int, head: int, past: int, memory: int, rounds: int) -> dict[str, Any]:
    """Microseconds of one layer's attention half after `past` positions, and how many times as fast ours is. memory:
    bytes of the layers that are taken in turn, as far as 64 layers go."""
    query, key = heads * head, kv_heads * head
    sizes = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, query)}
    matrices = {name: packed(*size) for name, size in sizes.items()}
    each = sum(nbytes(fields) for _, fields in matrices.values())
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=hidden, num_hidden_layers=min(max(memory // each, 1), _LAYERS), num_experts=1,
        num_experts_per_tok=1, moe_intermediate_size=64, intermediate_size=64, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head, max_position_embeddings=past + 4096,
    )  # fmt: skip
    model = Qwen3MoeModel(config).bfloat16().eval().requires_grad_(False)
    for layer in model.layers:
        layer.mlp = Nothing()
        for name, (encoding, fields) in matrices.items():
            kernel = linear_for(encoding.name, "cpu", torch.bfloat16)
            matrix = PackedMatrix(encoding, copy(fields), *sizes[name])
            setattr(layer.self_attn, name, PackedLinear(kernel, matrix, torch.bfloat16))
    about = {
        "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head, "past": past,
        "packed_bytes": each, "layers": len(model.layers), "all_bytes": each * len(model.layers),
    }  # fmt: skip
    ours = [_kernel(layer) for layer in model.layers]
    if None in ours:
        return {**about, "skipped": "this machine or build lacks the kernel of one token's attention"}
    seconds = timed({OURS: _kernels(ours, config, past), THEIRS: _forwards(model, past)}, rounds)
    return {**about, **_microseconds(seconds, len(model.layers))}


def _kernel(layer: Any) -> FewTokensAttention | None:
    """A decoder layer's attention half in one native call."""
    attention = layer.self_attn
    before, after, query, key = (
        RootMeanSquare(norm.weight, norm.variance_epsilon)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm)
    )
    columns = attention.head_dim
    blocks = GroupedAttention(
        attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        attention.q_proj.out_features // columns, attention.k_proj.out_features // columns, columns,
        attention.scaling, turn_halves, query, key,
    )  # fmt: skip
    return few_tokens_form(before, blocks, after, columns, 1.0)


def _position(head: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(head // 2).repeat(2)[None].float()
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def _kernels(layers: list[Any], config: Any, past: int) -> Callable[[], None]:
    """One token through all layers' kernels."""
    head, kv_heads = config.head_dim, config.num_key_value_heads
    slabs = []
    for index in range(len(layers)):
        keys = random(kv_heads * (past + 1), head, index).view(1, kv_heads, past + 1, head)
        slabs.append(Slabs(keys, keys.clone()))
    step = Step(torch.zeros(1, dtype=torch.int64), torch.tensor([past]), *_position(head))
    x = random(1, config.hidden_size, 1)

    def run() -> None:
        for layer, held in zip(layers, slabs, strict=True):
            layer(x, step, held)

    return run


def _forwards(model: Any, past: int) -> Callable[[], None]:
    """One token through all layers' own forwards, whose cache is put back each time."""
    cache, head = DynamicCache(), model.config.head_dim
    for index in range(len(model.layers)):
        keys = random(model.config.num_key_value_heads * past, head, index).view(1, -1, past, head)
        cache.update(keys, keys.clone(), index)
    x = random(1, model.config.hidden_size, 1)[None]
    cos, sin = _position(head)

    @torch.no_grad()
    def run() -> None:
        for layer in model.layers:
            layer(x, position_embeddings=(cos[None], sin[None]), attention_mask=None, past_key_values=cache)
        cache.crop(-1)

    return run


def router(hidden: int, experts: int, top_k: int, rounds: int) -> dict[str, Any]:
    """Microseconds of a router for one token, and how many times as fast ours is."""
    config = Qwen3MoeConfig(hidden_size=hidden, num_experts=experts, num_experts_per_tok=top_k)
    routers = []
    for seed in range(_ROUTERS):
        made = Qwen3MoeTopKRouter(config).bfloat16().requires_grad_(False)
        made.weight.copy_(random(experts, hidden, seed) * hidden**-0.5)
        routers.append(made)
    about = {"hidden": hidden, "experts": experts, "top_k": top_k, "routers": _ROUTERS}
    rule = RouterRule(top_k, normalise=routers[0].norm_topk_prob)
    fast = [Router(each.weight, rule) for each in routers]
    if any(each.native is None for each in fast):
        return {**about, "skipped": "this machine or build lacks the kernel of one token's router"}
    x = random(1, hidden, 1)
    seconds = timed({OURS: _over(Turns(fast), x), THEIRS: _over(Turns(routers), x)}, rounds)
    return {**about, **_microseconds(seconds, _ROUTERS)}


def _over(turns: Turns, x: torch.Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        for each in turns.take(_ROUTERS):
            each(x)

    return run


def _microseconds(seconds: dict[str, list[float]], calls: int) -> dict[str, Any]:
    ways = {name: {"us": rates([1 / one for one in took], 1e6 / calls)} for name, took in seconds.items()}
    return {"ways": ways, "ratios": {OURS: ratios(seconds, OURS)}}
