"""What a call asks for beside its result: hooks and collected outputs."""

from __future__ import annotations

import torch
from transformers.utils import output_capturing
from transformers.utils.output_capturing import _active_collector

_HARMLESS = (output_capturing.__name__, "tiermoe.runtime.forecasts")


def collected(name: str) -> bool:
    """Whether this call collects 'attentions' or 'router_logits' (output_attentions, output_router_logits)."""
    outputs = _active_collector.get()
    return outputs is not None and name in outputs


def hooked(module: torch.nn.Module) -> bool:
    """Whether a module has hooks other than ours, which only watch, and those that transformers leaves once outputs
    have been collected."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(getattr(hook, "__module__", None) not in _HARMLESS for hook in hooks)
