"""Texts to measure on: cut into sequences that are recorded or windows that are scored, and fed to a model token by
token."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiermoe.batch import Batch, decode, prompt
from tiermoe.config import Settings
from tiermoe.engine.engine import engine_of, transformers_model
from tiermoe.engine.expert_inputs import beginning, spread
from tiermoe.errors import ConfigError
from tiermoe.lab.measure.pairs import Pair, require_pairs
from tiermoe.model.hf.configs import cache_name, cache_of


@dataclass(frozen=True, slots=True)
class SequenceShape:
    """How a text is cut to be recorded. ConfigError for sizes that cannot be."""

    tokens: int = 2048  # in all, in whole sequences
    prompt: int = 32  # tokens of each sequence that are read at once
    sequence: int = 256  # tokens of a sequence

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
        """How many forward passes the sequences take; the last token of a sequence is fed too."""
        return self.sequences * (1 + self.sequence - self.prompt)

    @property
    def chunk(self) -> int:
        """A chunk that takes a prompt at once. One more than the prompt: a prompt of exactly a chunk may go on."""
        return max(Settings().chunk, self.prompt + 1)


def cut_sequences(tokenizer: Any, text: str, shape: SequenceShape, longest: int | None = None) -> torch.Tensor:
    """Token ids (sequences, sequence) of sequences that do not overlap, spread evenly over the text, each after the
    `beginning`. longest: the model's context (None: unbounded). ConfigError, with the numbers, where the text is too
    short or a sequence too long."""
    if longest is not None and shape.sequence > longest:
        raise ConfigError(
            f"a sequence of {shape.sequence:,} tokens is longer than the model's context of {longest:,}; lower "
            f"--sequence"
        )
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    start = beginning(tokenizer)
    length, count = shape.sequence - len(start), shape.sequences
    if len(ids) < count * length:
        fitting = len(ids) // length * shape.sequence
        instead = f"or use --tokens {fitting}" if fitting else "or lower --sequence and --tokens"
        raise ConfigError(
            f"the text has {len(ids):,} tokens; recording {count * shape.sequence:,} in sequences of "
            f"{shape.sequence:,} takes {count * length:,}: give a longer text, {instead}"
        )
    return torch.tensor(spread(start, ids, length, count))


@dataclass(frozen=True, slots=True)
class WindowShape:
    """How a text is cut to be scored. ConfigError for sizes that cannot be."""

    prompt: int = 32  # tokens that begin a window and are read at once
    window: int = 256  # tokens after them, each of which is scored
    tokens: int = 2048  # scored in all at most, in whole windows

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
class Window:
    """Tokens `ids` (n,) int64, of which `prompt` are read at once and each of the others is scored."""

    ids: torch.Tensor
    prompt: int

    @property
    def targets(self) -> torch.Tensor:
        """The tokens that are scored, (n - prompt,)."""
        return self.ids[self.prompt :]


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of a text, or summaries behind their documents. No window is longer than `shape` says."""

    shape: WindowShape
    warming: Window  # run first and not scored
    scored: list[Window]

    @property
    def tokens(self) -> int:
        """Tokens that are scored."""
        return sum(len(window.targets) for window in self.scored)


def cut_windows(tokenizer: Any, text: str, shape: WindowShape) -> Windows:
    """Windows that do not overlap, spread evenly over the text, each after the `beginning`; the first one only warms
    the expert cache. ConfigError where the text is too short."""
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    start = beginning(tokenizer)
    if len(start) >= shape.prompt:
        raise ConfigError(f"prompt must be more than {len(start)} token, which the tokenizer itself begins a text with")
    length = shape.length - len(start)
    count = shape.windows + 1
    if len(ids) < count * length:
        fitting = len(ids) // length - 1
        instead = f"or use --tokens {fitting * shape.window}" if fitting > 0 else "or lower --window and --tokens"
        raise ConfigError(
            f"the text has {len(ids):,} tokens; scoring {shape.windows * shape.window:,} in windows of "
            f"{shape.prompt:,} + {shape.window:,}, and one more to warm the cache, takes {count * length:,}: give a "
            f"longer text, {instead}"
        )
    first, *others = (Window(torch.tensor(row), shape.prompt) for row in spread(start, ids, length, count))
    return Windows(shape, first, others)


def document_ids(tokenizer: Any, document: str, longest: int) -> list[int]:
    """A document's first tokens, `longest` at most, as the tokenizer begins and ends a text."""
    ids: list[int] = tokenizer.encode(document, truncation=True, max_length=longest)
    return ids


def cut_pairs(tokenizer: Any, pairs: Sequence[Pair], shape: WindowShape, ends: bool) -> Windows:
    """A window for each pair: a document, at most `shape.prompt` tokens of it, and its summary, of which at most
    `shape.window` tokens are scored. The first pair only warms the expert cache; of the others as many are scored as
    fit into `shape.tokens`. ends: the tokenizer ends a summary as it ends a text (an encoder–decoder model's).
    ConfigError for fewer than two pairs, and for a pair without tokens."""
    asked = require_pairs(pairs)[: shape.windows + 1]
    found = []
    for number, (document, summary) in enumerate(asked, 1):
        read = document_ids(tokenizer, document, shape.prompt)
        said = tokenizer.encode(summary, truncation=True, max_length=shape.window, add_special_tokens=ends)
        if not read or not said:
            raise ConfigError(f"pair {number} has an empty document or summary; leave it out")
        found.append(Window(torch.tensor([*read, *said]), len(read)))
    return Windows(shape, found[0], found[1:])


class Feed:
    """Feeds one sequence (n,) to a loaded model, whatever the model would have said: the first `first` tokens at once,
    the others one by one. An encoder–decoder model reads the first through its encoder, and its decoder is fed the
    others after its start token. more: tokens that `add` may run beyond the sequence."""

    def __init__(self, model: Any, ids: torch.Tensor, first: int, more: int = 0) -> None:
        self._engine = engine_of(model)
        self._ids: list[int] = ids.tolist()
        self._first = first
        self._encoded: _EncoderDecoderFeed | None = None
        if model.config.is_encoder_decoder:
            self._encoded = _EncoderDecoderFeed(transformers_model(model), ids, first)
            return
        self._cache = self._engine.new_cache(1, len(self._ids) + more)
        self._slab = self._cache.open()

    def prompt(self) -> torch.Tensor:
        """Runs the first tokens → logits (vocabulary)."""
        if self._encoded is not None:
            return self._encoded.prompt()
        return self._step(prompt(self._slab, self._ids[: self._first]))

    def token(self, position: int) -> torch.Tensor:
        """Runs the token at `position` → logits (vocabulary)."""
        if self._encoded is not None:
            return self._encoded.token(position)
        return self._step(decode(self._slab, position, self._ids[position]))

    def add(self, token: int) -> torch.Tensor:
        """Runs a generated token behind the sequence → logits (vocabulary)."""
        self._ids.append(token)
        return self.token(len(self._ids) - 1)

    def take_back(self, position: int) -> None:
        """Forgets the token at `position`, the last one."""
        self._cache.crop(self._slab, position)

    def _step(self, row: Any) -> torch.Tensor:
        logits: torch.Tensor = self._engine.step(Batch((row,)), self._cache)[0]
        return logits


class _EncoderDecoderFeed:
    """`Feed` for a transformers model whose prompt goes to an encoder."""

    def __init__(self, model: Any, ids: torch.Tensor, prompt: int) -> None:
        self._model = model
        self._ids = ids[None].to(model.device)
        self._prompt = prompt
        self._encoded: Any = None
        self._cache: Any = None

    def prompt(self) -> torch.Tensor:
        ids = self._ids[:, : self._prompt]
        start = torch.full_like(ids[:, :1], self._model.config.decoder_start_token_id)
        self._encoded = self._model.get_encoder()(input_ids=ids)  # by itself, as generate() does
        return self._decode(start)

    def token(self, position: int) -> torch.Tensor:
        return self._decode(self._ids[:, position : position + 1])

    def _decode(self, ids: torch.Tensor) -> torch.Tensor:
        named = {cache_name(inspect.signature(self._model.forward).parameters): self._cache}
        output = self._model(encoder_outputs=self._encoded, decoder_input_ids=ids, use_cache=True, **named)
        self._cache = cache_of(output)
        logits: torch.Tensor = output.logits[0, -1]
        return logits
