"""Rotary position embeddings: angles of positions, and queries and keys rotated by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

UNSUPPORTED = ("dynamic",)
"""Kinds whose frequencies depend on how long the sequence has become."""
_BLOCK = 256  # positions by which the table grows


Temperature = Callable[[Tensor], Tensor]
"""int64 (T) positions → float32 (T) factors of the queries there, which keep attention over a long text sharp."""


class Rotary:
    """cos and sin of every position, in the model's dtype, as transformers' rotary embeddings compute them. Each angle
    stands twice, for both halves of a head.

    frequencies: float32 (columns / 2). factor: of cos and sin; beyond: positions from some one on, and their factor, if
    it is another. temperature: what queries are multiplied by; None: 1."""

    def __init__(
        self, frequencies: Tensor, factor: float, dtype: torch.dtype, beyond: tuple[int, float] | None = None
    ) -> None:
        self._frequencies = frequencies.float()
        self._factor, self._beyond = factor, beyond
        self.temperature: Temperature | None = None
        self._dtype = dtype
        self.columns = 2 * frequencies.numel()
        self._table = self._block(0, 0)

    def at(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """positions: int64 (T) below `end`, the length of the longest sequence with this step → cos and sin
        (T, columns) on their device. Angles are computed on the CPU."""
        cos, sin = self._table
        if len(cos) < end:  # what is there stays: a long prompt comes in many chunks
            pairs = zip(self._table, self._block(len(cos), end), strict=True)
            cos, sin = (torch.cat([each.to(positions.device) for each in pair]) for pair in pairs)
            self._table = cos, sin
        return cos[positions], sin[positions]

    def _block(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions from `begin` on, in whole blocks."""
        positions = torch.arange(begin, -(-end // _BLOCK) * _BLOCK, dtype=torch.float32)
        angles = positions[:, None] * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        factors = torch.full((len(positions), 1), self._factor)
        if self._beyond is not None:
            factors[positions >= self._beyond[0]] = self._beyond[1]
        return (angles.cos() * factors).to(self._dtype), (angles.sin() * factors).to(self._dtype)


def table_bytes(positions: int, columns: int, itemsize: int) -> int:
    """Bytes of a `Rotary`'s table of so many positions, and of the second table while it grows."""
    return 2 * 2 * -(-positions // _BLOCK) * _BLOCK * columns * itemsize


def is_rotated(config: Any) -> bool:
    """Whether queries and keys are rotated; else a token's position does not enter attention (Granite 4)."""
    named = getattr(config, "rope_parameters", None) is not None
    return named and getattr(config, "position_embedding_type", "rope") == "rope"


def layer_kinds(config: Any) -> list[str | None]:
    """The kinds of layers with a rotary embedding of their own, or what the config calls these (DeepSeek-V4); [None]
    where all layers share one."""
    if not is_rotated(config) or "rope_type" in config.rope_parameters:
        return [None]
    kinds = set(config.layer_types)
    return sorted(kinds if kinds <= set(config.rope_parameters) else config.rope_parameters)


def rotary_at(config: Any, index: int) -> int:
    """The position of layer `index`'s kind in `layer_kinds`."""
    kinds = layer_kinds(config)
    return 0 if kinds == [None] else kinds.index(config.layer_types[index])


def unrotated(columns: int, dtype: torch.dtype) -> Rotary:
    """A rotary embedding by angles of 0, for layers whose queries and keys have no position."""
    return Rotary(torch.zeros(columns // 2), 1.0, dtype)


def knows_rotary(config: Any) -> bool:
    """Whether `rotary_of` computes all rotary embeddings that a config names."""
    kinds = layer_kinds(config)
    return not is_rotated(config) or all(
        _is_default(config, layers) or (layers or "") in config.rope_frequencies for layers in kinds
    )


def _is_default(config: Any, layers: str | None) -> bool:
    """Whether a base alone makes the frequencies. A dynamic one with a fixed alpha is none that grows (Hunyuan)."""
    parameters = parameters_of(config, layers) or {}
    kind = parameters.get("rope_type")
    return kind == "default" or bool(kind == "dynamic" and parameters.get("alpha"))


def parameters_of(config: Any, layers: str | None) -> Any:
    """What a config says of the rotary embedding of one of `layer_kinds`."""
    return config.rope_parameters if layers is None else config.rope_parameters[layers]


def rotary_of(config: Any, columns: int, dtype: torch.dtype, layers: str | None = None) -> Rotary | None:
    """A config's rotary embedding of `columns` of each head, for one of `layer_kinds`; None if it is not
    computed."""
    if not is_rotated(config):
        return unrotated(columns, dtype)
    parameters = parameters_of(config, layers)
    if _is_default(config, layers):
        steps = torch.arange(0, columns, 2, dtype=torch.float) / columns
        stretch = (parameters.get("alpha") or 1.0) ** (columns / (columns - 2))
        return Rotary(1.0 / ((parameters["rope_theta"] * stretch) ** steps), 1.0, dtype)
    if (layers or "") not in config.rope_frequencies:
        return None
    frequencies, factor = config.rope_frequencies[layers or ""]
    short, long = parameters.get("short_mscale"), parameters.get("long_mscale")
    if short is None or long is None:
        return Rotary(torch.tensor(frequencies), factor, dtype)
    # Phi-MoE names two factors, for positions within the length that it was first trained for and for later ones
    beyond = parameters["original_max_position_embeddings"], long
    return Rotary(torch.tensor(frequencies), short, dtype, beyond)


def rope_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, heads, columns), whose first cos.shape[1] columns are rotated by cos and sin (T, rotary columns): column i
    with column i + half of them. Rounded after each product and sum."""
    cos, sin = cos[:, None], sin[:, None]
    rotary = cos.shape[-1]
    part = x[..., :rotary]
    half = rotary // 2
    swapped = torch.cat((-part[..., half:], part[..., :half]), dim=-1)
    result = part * cos + swapped * sin
    return result if rotary == x.shape[-1] else torch.cat((result, x[..., rotary:]), dim=-1)


def rope_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, heads, columns), whose columns 2 i and 2 i + 1 are rotated by angle i of cos and sin (T, columns); the
    results are columns i and i + half (DeepSeek-V3's order)."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def rope_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope_pairs` in float32 (DeepSeek-V2)."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :half].float(), sin[:, None, :half].float()
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1).to(x.dtype)


def rope_last(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, heads, columns), whose last columns are rotated in float32 by cos and sin (T, rotary columns): of these,
    columns 2 i and 2 i + 1 by angle i, and they stay where they are (DeepSeek-V4)."""
    rotary = cos.shape[-1]
    plain = x.shape[-1] - rotary
    cos, sin = (each[:, None, : rotary // 2].float() for each in (cos, sin))
    part = x[..., plain:].float()
    even, odd = part[..., 0::2], part[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :plain], turned.to(x.dtype)), dim=-1)


def yarn_scale(parameters: Any, scale: float) -> float:
    """DeepSeek's attention scale, which grows with the factor by which YaRN stretches positions."""
    all_dims = parameters.get("mscale_all_dim", 0)
    if parameters.get("rope_type", "default") == "default" or not all_dims:
        return scale
    factor = parameters["factor"]
    stretch = 1.0 if factor <= 1 else 0.1 * all_dims * math.log(factor) + 1.0
    return scale * stretch * stretch


ApplyRope = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x (T, heads, columns), cos and sin (T, rotary columns) → x, rotated."""
