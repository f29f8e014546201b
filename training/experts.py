"""Experts as two batched matrix products, which a CPU computes far faster than one small product per expert.

Tokens are sorted by expert into a (experts, capacity, hidden) buffer (the fixed expert capacity of Switch
Transformers, arXiv 2101.03961, section 2.2). While training, the capacity is a multiple of the mean load and
a token beyond it skips that expert; otherwise every token fits, and the result is that of transformers' own
experts.
"""

import math
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "batched_capacity"
FACTOR = "capacity_factor"


def capacity(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Rows of one expert's buffer: ``factor`` times the mean load."""
    return math.ceil(tokens * top_k / experts * factor)


def batched_experts(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What transformers asks of an experts function: hidden (T, H), index and weights (T, K) to (T, H)."""
    (tokens, width), top_k, experts = hidden.shape, index.shape[1], module.num_experts
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    expert = flat[order]
    load = torch.bincount(flat, minlength=experts)
    rows = int(load.max())
    if module.training:
        rows = min(rows, capacity(tokens, top_k, experts, getattr(module, FACTOR)))
    place = torch.arange(len(flat), device=flat.device) - (load.cumsum(0) - load)[expert]
    kept = place < rows
    source, slot = (order // top_k)[kept], (expert * rows + place)[kept]
    # float32 around the index operations: on a CPU their bfloat16 backward is many times slower
    full, scale = hidden.float(), weights.reshape(-1)[order][kept].float()
    buffer = full.new_zeros(experts * rows, width).index_copy(0, slot, full.index_select(0, source))
    gate_up = torch.bmm(buffer.view(experts, rows, width), module.gate_up_proj.transpose(1, 2))
    out = torch.bmm(module._apply_gate(gate_up), module.down_proj.transpose(1, 2)).view(experts * rows, width)
    chosen = out.float().index_select(0, slot) * scale[:, None]
    return torch.zeros_like(full).index_add(0, source, chosen).to(hidden.dtype)


def use_batched_experts(model: PreTrainedModel, capacity_factor: float) -> None:
    """Let ``model``, a transformers model, compute its experts with `batched_experts`."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, batched_experts)
    model.set_experts_implementation(NAME)
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            setattr(module, FACTOR, capacity_factor)
