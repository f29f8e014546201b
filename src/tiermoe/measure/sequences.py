"""The sequences of a text that are recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tiermoe.config import Settings
from tiermoe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cut:
    """How a text is recorded: `tokens` tokens in whole sequences of `sequence`, the first `prompt` of each at once."""

    tokens: int = 2048
    prompt: int = 32
    sequence: int = 256

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.sequence <= self.prompt:
            raise ConfigError(
                f"a sequence ({self.sequence:,} tokens) must be longer than its prompt ({self.prompt:,}), and that at "
                f"least 1 token; raise --sequence or lower --prompt"
            )
        if self.tokens < self.sequence:
            raise ConfigError(
                f"tokens ({self.tokens:,}) is less than one sequence ({self.sequence:,}); raise --tokens or lower "
                f"--sequence"
            )

    @property
    def sequences(self) -> int:
        """How many there are."""
        return self.tokens // self.sequence

    @property
    def passes(self) -> int:
        """How many forward passes they take; the last token of a sequence is fed too."""
        return self.sequences * (1 + self.sequence - self.prompt)


def cut(tokenizer: Any, text: str, shape: Cut, longest: int | None = None) -> torch.Tensor:
    """Token ids (sequences, sequence) of sequences that do not overlap, spread evenly over the text, each after the
    tokenizer's beginning-of-sequence token where it sets one. longest: the model's context (None: unbounded).
    ConfigError, with the numbers, where the text is too short or a sequence too long."""
    if longest is not None and shape.sequence > longest:
        raise ConfigError(
            f"a sequence of {shape.sequence:,} tokens is longer than the model's context of {longest:,}; lower "
            f"--sequence"
        )
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    first = list(tokenizer("").input_ids[:1])
    start = first if first and first[0] == tokenizer.bos_token_id else []
    length, count = shape.sequence - len(start), shape.sequences
    if len(ids) < count * length:
        fitting = len(ids) // length * shape.sequence
        instead = f"or use --tokens {fitting}" if fitting else "or lower --sequence and --tokens"
        raise ConfigError(
            f"the text has {len(ids):,} tokens; recording {count * shape.sequence:,} in sequences of "
            f"{shape.sequence:,} takes {count * length:,}: give a longer text, {instead}"
        )
    begins = [index * (len(ids) - length) // max(count - 1, 1) for index in range(count)]
    return torch.tensor([[*start, *ids[begin : begin + length]] for begin in begins])


def needed_chunk(shape: Cut) -> int:
    """A chunk that takes a prompt at once. One more than the prompt: a prompt of exactly a chunk may go on."""
    return max(Settings().chunk, shape.prompt + 1)
