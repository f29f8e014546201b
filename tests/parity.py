"""What a loaded model and the plain one are compared by."""

from __future__ import annotations

from typing import Any

import torch

from tiermoe.offload.reader import ExtentReader, aligned_memory
from tiermoe.types import ExpertKey


def tokens(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (rows, columns), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, family: str, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    extra = {"decoder_input_ids": ids[:, :5]} if family == "switch_transformers" else {}
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=ids, attention_mask=mask, **extra).logits
    return result.to(model.dtype)  # Nemotron-H's code widens them


ROUNDED = {"jamba", "llama4", "llama4_text", "nemotron_h"}
"""Families whose own code multiplies in another order, or sums experts' outputs in float32."""


def close(mine: torch.Tensor, theirs: torch.Tensor, within: float = 0.05) -> bool:
    """Whether logits are the same but for rounding; `within`: the usual token's error, relative, in bfloat16."""
    if mine.dtype == torch.float32:
        return bool((mine - theirs).abs().max() <= 1e-5 * theirs.abs().max())
    error = (mine.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1).clamp(min=1e-9)
    return bool(error.median() < within)  # a router may decide a near tie otherwise: single tokens may differ more


def as_integers(x: torch.Tensor) -> torch.Tensor:
    """The tokens as products of whole numbers take them (native/isa/integers.h): of 32 columns codes of 8 bits times
    a scale."""
    parts = x.float().view(-1, 32)
    largest = parts.abs().amax(1, keepdim=True).clamp_min(1e-30)
    factor = torch.full_like(largest, 127) / largest  # torch has 127 / largest as 127 * (1 / largest)
    codes = (parts * factor).round()
    rounded = codes.double() * (largest / 127).double()
    assert codes.abs().max() <= 127
    assert (rounded - parts).abs().le(largest * 0.501 / 127).all()
    return rounded.view(x.shape)


def put_decoded_experts(engine: Any, plain: Any) -> None:
    """Overwrites the plain model's experts by what the store's precision stands for."""
    reader = ExtentReader()
    packed = engine.service.packed[engine.settings.bits]
    for index, layer in enumerate(engine.store.layers):
        form = packed.formats[index]
        for expert in range(layer.experts):
            stored, slot = (
                aligned_memory(form.stored.nbytes),
                torch.zeros(form.slot.nbytes, dtype=torch.uint8),
            )
            reader.read(packed.extents[index][expert], stored, ExpertKey(index, expert, 0))
            form.widen(torch.frombuffer(stored, dtype=torch.uint8), slot)
            views = form.slot.views(slot)
            for part in layer.parts:
                encoding = form.encodings.get(part.name)
                if encoding is None:
                    continue
                weight = encoding.decode(views[part.name], *part.out_in, torch.float32)
                target = plain.get_parameter(f"{layer.name}.{part.name}").data[expert]
                target.copy_(weight.t() if part.transposed else weight)
