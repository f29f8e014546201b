"""MoBiLE's decoding: each token with K/2 experts, and again with all K where the next token is unsure.

It wraps `model.forward`, so that sampling, batches and streamers of `generate()` see nothing of it. The key/value cache
is put back before the second pass, which writes the same position.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tiermoe.errors import ConfigError
from tiermoe.policy.routing import is_confident
from tiermoe.runtime.passes import CurrentPass


class ConfidentDecoding:
    """Runs a model's decode passes little first (MoBiLE, section III-A). `passes`: tokens decoded; `fallbacks`: those
    that ran again. gamma: a row whose likeliest next token has at most this probability falls back; 1 always does,
    and without one (None) every token keeps its K/2 pass."""

    def __init__(self, model: Any, current: CurrentPass, gamma: float | None) -> None:
        self.passes = 0
        self.fallbacks = 0
        self._model = model
        self._current = current
        self._gamma = gamma
        self._forward = model.forward
        model.forward = self._wrapped()

    @property
    def fallback_ratio(self) -> float:
        """Share of the decoded tokens that ran again."""
        return self.fallbacks / self.passes if self.passes else 0.0

    def close(self) -> None:
        """Gives the model its own forward back."""
        del self._model.forward

    def _wrapped(self) -> Any:
        @functools.wraps(self._forward)  # generate() reads the signature
        def forward(*arguments: Any, **named: Any) -> Any:
            return self._decode(*arguments, **named)

        return forward

    def _decode(self, *arguments: Any, **named: Any) -> Any:
        if self._current.phase != "decode":
            return self._forward(*arguments, **named)
        saved = SavedCache(named.get("past_key_values"))
        little = self._run([], arguments, named)
        rows = little.logits.shape[0]
        self.passes += rows
        unsure = self._unsure(little.logits)
        if not unsure:
            self._current.forecasts.little.clear()
            return little
        self.fallbacks += len(unsure)
        saved.restore()
        self._current.scheduler.discard_pass()
        self._current.scheduler.begin_pass(rows, self._current.forecasts, self._current.phase)
        again = self._run(unsure, arguments, named)
        self._current.forecasts.little.clear()
        sure = [row for row in range(rows) if row not in set(unsure)]
        again.logits[sure] = little.logits[sure]
        return again

    def _run(self, unsure: list[int], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._current.unsure = unsure
        try:
            return self._forward(*arguments, **named)
        finally:
            self._current.unsure = None

    def _unsure(self, logits: torch.Tensor) -> list[int]:
        if self._gamma is None:
            return []
        likeliest = logits[:, -1].float().softmax(-1).amax(-1).tolist()
        return [row for row, probability in enumerate(likeliest) if not is_confident(probability, self._gamma)]


class SavedCache:
    """The state of a key/value cache before a pass. Growing caches make new tensors, static ones write in place at a
    position that is written again: the references and counters are enough."""

    def __init__(self, cache: Any) -> None:
        if cache is None or not hasattr(cache, "layers"):
            raise ConfigError(
                f"routing=confident decodes a token twice and needs a key/value cache that can be put back, not "
                f"{type(cache).__name__}; use --set routing=all"
            )
        self._states = [
            (layer, {name: _kept(name, value) for name, value in vars(layer).items()}) for layer in cache.layers
        ]

    def restore(self) -> None:
        for layer, state in self._states:
            vars(layer).clear()
            vars(layer).update(state)


def _kept(name: str, value: Any) -> Any:
    """Counters that are tensors change in place; keys and values do not (or only where they are written again)."""
    counter = isinstance(value, torch.Tensor) and name not in ("keys", "values")
    return value.clone() if counter else value
