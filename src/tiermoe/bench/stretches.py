"""The text that every engine is fed: as many different stretches of it as a batch has rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiermoe.bench.cases import Condition
from tiermoe.errors import ConfigError, PromptError

DEFAULT_TEXT = Path(__file__).parents[3] / "data" / "heldout.txt"
"""The held-out text of a source tree; an installed package has none."""

RANDOM = "random"
"""Named in place of a text: token ids drawn at random, where a model has no tokenizer or none of its own."""
_DRAWN = 1 << 18


def text_file(chosen: Path | None) -> Path:
    """The text to read. ConfigError where none was named and the source tree's is not there."""
    if chosen is None and not DEFAULT_TEXT.exists():
        raise ConfigError(
            f"no text to feed the engines; name a UTF-8 file of some ten thousand words with --text, or draw token ids "
            f"with --text {RANDOM}"
        )
    return chosen or DEFAULT_TEXT


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of the whole text, without added special ones."""
    tokenizer.model_max_length = 1 << 60  # the text is cut afterwards
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def random_ids(vocabulary: int) -> list[int]:
    """Token ids of the whole vocabulary, the same ones each time."""
    draw = random.Random(0)
    return [draw.randrange(vocabulary) for _ in range(_DRAWN)]


def check_lengths(conditions: Sequence[Condition], tokens: int, context: int | None) -> None:
    """PromptError for what the text, of so many tokens, or the model's context is too short for."""
    for condition in conditions:
        length = condition.prompt + condition.output
        if context is not None and length > context:
            raise PromptError(
                f"{condition.group} is {length} tokens, the model's context has {context}; ask for shorter groups"
            )
        if length * condition.batch > tokens:
            raise PromptError(
                f"{condition.group} in a batch of {condition.batch} takes {length * condition.batch} tokens of text, "
                f"this one has {tokens}; name a longer one with --text, or ask for shorter groups or smaller batches"
            )


def rows(ids: Sequence[int], condition: Condition) -> list[list[int]]:
    """(batch, prompt + output) token ids: stretches that begin at equal distances in the text."""
    length = condition.prompt + condition.output
    step = len(ids) // condition.batch
    return [list(ids[row * step : row * step + length]) for row in range(condition.batch)]
