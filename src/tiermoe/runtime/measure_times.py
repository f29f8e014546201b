"""What computing costs here, for replays: seconds of an expert and of everything else, in decode and in a prompt.

Time spent waiting for the link is taken off, so the experts need not all fit the cache. An expert's seconds include
what the engine spends on it (its share of the layer's decisions), as a replay charges them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from tiermoe.runtime.record import Recorder
from tiermoe.trace import Times

_ROUNDS = 5
_PROMPT_TOKENS = 32  # of one expert, for what each token after the first adds


@torch.inference_mode()
def measure_times(model: Any, ids: torch.Tensor, prompt: int, decoded: int = 32) -> Times:
    """Times of a loaded model on one sequence (n,): its prompt three times, then up to `decoded` tokens after it."""
    engine = model.tiermoe
    bits = engine.settings.bits
    prefills, decodes = [], []
    with Recorder(model, distances=(), little=False) as recorder:
        for _ in range(3):
            prefill = _Timed(engine)
            for passed in recorder.passes(ids[:prompt], prompt):
                prefills.append((prefill.lap(), passed))
        decode = _Timed(engine)
        for passed in recorder.passes(ids[: prompt + decoded], prompt):
            seconds = decode.lap()
            if passed.phase == "decode":
                decodes.append((seconds, passed))
    one = _expert_seconds(model, 1)
    further = max(_expert_seconds(model, _PROMPT_TOKENS) - one, 0.0) / (_PROMPT_TOKENS - 1)
    dense, prefill_token = [], []
    for seconds, passed in decodes:
        used = sum(len(row) for layer in passed.layers for row in layer.experts)
        dense.append(max(seconds - used * one, 0.0))
    for seconds, passed in prefills[1:]:
        used = sum(len(row) for layer in passed.layers for row in layer.experts)
        active = sum(len({expert for row in layer.experts for expert in row}) for layer in passed.layers)
        prefill_token.append(max(seconds - active * one - (used - active) * further, 0.0) / prompt)
    return Times(median(dense), {bits: one}, median(prefill_token), {bits: further})


def _expert_seconds(model: Any, tokens: int) -> float:
    """Seconds of one expert on `tokens` tokens: of calls of the layers' experts, each with as many tokens as that for
    each of K experts, which differ from call to call as far as the cache goes."""
    engine = model.tiermoe
    layers = engine.store.layers
    hidden = torch.randn(tokens, _hidden_size(layers[0]), dtype=model.dtype, device=model.device)
    calls: list[Callable[[], Any]] = []
    uses = 0
    shells = [module for module in model.modules() if hasattr(module, "run_experts")]
    each = max(layers[0].top_k, engine.plan.slots // len(layers))
    for layer, shell in list(zip(layers, shells, strict=True))[: max(1, engine.plan.slots // each)]:
        resident = min(each, layer.experts) // layer.top_k * layer.top_k
        for first in range(0, resident, layer.top_k):
            index = torch.arange(first, first + layer.top_k, device=model.device).expand(tokens, -1).contiguous()
            weights = torch.full(index.shape, 1 / layer.top_k, dtype=model.dtype, device=model.device)
            calls.append(functools.partial(shell.run_experts, hidden, index, weights))
            uses += layer.top_k
    rounds = []
    for _ in range(_ROUNDS):
        timed = _Timed(engine)
        for call in calls:
            call()
        rounds.append(timed.lap() / uses)
    return median(rounds[1:])


class _Timed:
    """Seconds less those spent waiting for the link, lap by lap."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._at = self._now()

    def lap(self) -> float:
        now = self._now()
        seconds, self._at = now - self._at, now
        return seconds

    def _now(self) -> float:
        return time.perf_counter() - float(self._engine.link.wait_s)


def _hidden_size(layer: Any) -> int:
    return int(next(part for part in layer.parts if part.is_matrix).out_in[1])
