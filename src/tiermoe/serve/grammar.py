"""Answers that must follow a grammar (JSON, a call): at each place only tokens that lead to one (llguidance)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor

from tiermoe.errors import ConfigError

_BETWEEN = r"\n? {0,16}"  # a model may not go on with blanks for ever


def json_rule(schema: Mapping[str, Any]) -> str:
    """What stands for JSON of a schema in the rules of a grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': _BETWEEN}})}"


class Grammars:
    """Grammars over a tokenizer whose model has logits for `vocabulary` tokens. ends: tokens that end an answer."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: set[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = sorted(ends)

    def of(self, rules: str) -> Callable[[], Grammar]:
        """Makes the grammar of one answer, by rules in llguidance's form of Lark. ConfigError where they, or a JSON
        schema in them, cannot be followed."""
        import llguidance

        wrong = llguidance.LLMatcher.validate_grammar(rules, self._tokens)
        if wrong:
            raise ConfigError(f"the JSON schema cannot be followed: {wrong}")
        return lambda: Grammar(llguidance.LLMatcher(self._tokens, rules))

    @cached_property
    def _tokens(self) -> Any:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._ends or None)


class Grammar:
    """Where one answer is. `ended`: it is whole and nothing may follow but its end."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def ended(self) -> bool:
        stopped: bool = self._matcher.is_stopped()
        return stopped

    def restrict(self, logits: Tensor) -> Tensor:
        """logits (vocabulary), minus infinity for what must not come next."""
        # by hand: llguidance.torch has torch compile a kernel while the server answers. That needs a compiler, and with
        # torch held to AVX2 the kernel let other tokens pass.
        bits = numpy.frombuffer(self._matcher.compute_bitmask(), dtype=numpy.uint8)
        allowed = numpy.unpackbits(bits, bitorder="little", count=len(logits))
        return logits.float().masked_fill(torch.from_numpy(allowed == 0), -torch.inf)

    def accept(self, token: int) -> None:
        """The token that was chosen."""
        self._matcher.consume_token(token)
