"""The windows of a text that are scored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tiermoe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """How a text is scored: each window's first `prompt` tokens are read at once, each of the next `window` tokens is
    scored; at most `tokens` tokens are scored, in whole windows."""

    prompt: int = 32
    window: int = 256
    tokens: int = 2048

    def __post_init__(self) -> None:
        for name in ("prompt", "window", "tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1 token, got {getattr(self, name)}")
        if self.tokens < self.window:
            raise ConfigError(
                f"tokens ({self.tokens:,}) is less than one window ({self.window:,}); raise --tokens or lower --window"
            )

    @property
    def length(self) -> int:
        """Tokens of a window, those of its prompt included."""
        return self.prompt + self.window

    @property
    def windows(self) -> int:
        """How many are scored."""
        return self.tokens // self.window

    def check_context(self, longest: int | None) -> None:
        """ConfigError where a window is longer than the model's context of `longest` tokens (None: unbounded)."""
        if longest is not None and self.length > longest:
            raise ConfigError(
                f"a window of {self.prompt:,} + {self.window:,} tokens is longer than the model's context of "
                f"{longest:,}; lower --window or --prompt"
            )


@dataclass(frozen=True, slots=True)
class Windows:
    """Token ids of a text: `warming` (length,) is run first and not scored, `scored` (windows, length) is."""

    shape: Shape
    warming: torch.Tensor
    scored: torch.Tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Each scored window, (1, length)."""
        return (window[None] for window in self.scored)

    def targets(self, window: torch.Tensor) -> torch.Tensor:
        """The tokens of a window (1, length) that are scored, (window,)."""
        return window[0, self.shape.prompt :]


def cut(tokenizer: Any, text: str, shape: Shape) -> Windows:
    """Windows that do not overlap, spread evenly over the text, after a first one that only warms the expert cache.

    Each begins with the tokenizer's beginning-of-sequence token where it sets one before a text: some models are lost
    without it. ConfigError where the text is too short.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    start = beginning(tokenizer)
    if len(start) >= shape.prompt:
        raise ConfigError(f"prompt must be more than {len(start)} token, which the tokenizer itself begins a text with")
    length = shape.length - len(start)
    count = shape.windows + 1
    if len(ids) < count * length:
        raise ConfigError(_too_short(len(ids), count, shape, length))
    begins = [index * (len(ids) - length) // (count - 1) for index in range(count)]
    rows = torch.tensor([[*start, *ids[begin : begin + length]] for begin in begins])
    return Windows(shape, rows[0], rows[1:])


def beginning(tokenizer: Any) -> list[int]:
    first = list(tokenizer("").input_ids[:1])
    return first if first and first[0] == tokenizer.bos_token_id else []


def _too_short(have: int, count: int, shape: Shape, length: int) -> str:
    fitting = have // length - 1
    instead = f"or use --tokens {fitting * shape.window}" if fitting > 0 else "or lower --window and --tokens"
    return (
        f"the text has {have:,} tokens; scoring {shape.windows * shape.window:,} in windows of {shape.prompt:,} + "
        f"{shape.window:,}, and one more to warm the cache, takes {count * length:,}: give a longer text, {instead}"
    )
