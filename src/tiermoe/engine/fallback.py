"""MoBiLE's decoding: each token with few of its K experts, and again with all K where the next token is unsure.

Whoever runs passes gives it the pass as a function; the second one writes the same position again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from tiermoe.engine.forward_context import ForwardContext
from tiermoe.errors import ConfigError
from tiermoe.offload.policies.routing import is_confident

Output = TypeVar("Output")


class ConfidentDecoding:
    """Runs decode passes little first (MoBiLE, section III-A). `passes`: tokens decoded; `fallbacks`: those that ran
    again. gamma: a row whose likeliest next token has at most this probability falls back; 1 always does, and without
    one (None) every token keeps its little pass."""

    def __init__(self, context: ForwardContext, gamma: float | None) -> None:
        self.passes = 0
        self.fallbacks = 0
        self._context = context
        self._gamma = gamma

    @property
    def fallback_ratio(self) -> float:
        """Share of the decoded tokens that ran again."""
        return self.fallbacks / self.passes if self.passes else 0.0

    @contextmanager
    def at(self, gamma: float) -> Iterator[ConfidentDecoding]:
        """Decodes with another gamma, and counts that alone, until it is left."""
        before = self._gamma, self.passes, self.fallbacks
        self._gamma, self.passes, self.fallbacks = gamma, 0, 0
        try:
            yield self
        finally:
            self._gamma, self.passes, self.fallbacks = before

    def decode(
        self,
        run: Callable[[], Output],
        logits_of: Callable[[Output], torch.Tensor],
        undo: Callable[[], None] = lambda: None,
    ) -> Output:
        """The output of a decode pass that has begun. run: computes it; logits_of: (rows, ..., vocabulary) of what it
        returns, the last ones of each row; undo: puts back what the pass changed beside the positions it writes."""
        context = self._context
        little = self._run(run, [])
        logits = logits_of(little)
        rows = logits.shape[0]
        self.passes += rows
        unsure = self._unsure(logits)
        if not unsure:
            context.forecasts.little.clear()
            return little
        self.fallbacks += len(unsure)
        undo()
        context.scheduler.discard_pass()
        context.scheduler.begin_pass(rows, context.forecasts, context.phase)
        again = self._run(run, unsure)
        context.forecasts.little.clear()
        sure = [row for row in range(rows) if row not in set(unsure)]
        logits_of(again)[sure] = logits[sure]
        return again

    def _run(self, run: Callable[[], Output], unsure: list[int]) -> Output:
        with self._context.halved(unsure):
            return run()

    def _unsure(self, logits: torch.Tensor) -> list[int]:
        if self._gamma is None:
            return []
        last = logits if logits.ndim == 2 else logits[:, -1]
        likeliest = last.float().softmax(-1).amax(-1).tolist()
        return [row for row, probability in enumerate(likeliest) if not is_confident(probability, self._gamma)]


class SavedCache:
    """The state of a transformers cache before a pass. Growing caches make new tensors, static ones write in place at a
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
