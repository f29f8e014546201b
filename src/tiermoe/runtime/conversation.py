"""A conversation whose earlier turns are not computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import DynamicCache

from tiermoe.errors import PromptError
from tiermoe.runtime.generate import Report, Sampling, encode_chat, encode_prompt, generate


class Conversation:
    """The messages of a chat with `model`, and the keys and values of their tokens.

    A reply runs only the tokens that follow the longest beginning that the key/value cache holds already. Where a reply
    was interrupted, the turn is dropped and the cache with it.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._messages: list[dict[str, str]] = []
        self._text = ""
        self._computed: list[int] = []
        self._cache: Any = None

    def clear(self) -> None:
        """Forgets everything said."""
        self._messages.clear()
        self._text = ""
        self._forget_cache()

    def reply(self, text: str, sampling: Sampling, on_text: Callable[[str], None]) -> Report:
        """Answers `text` after all that was said before. PromptError where the conversation outgrows the context."""
        chat = bool(getattr(self._tokenizer, "chat_template", None))
        messages = [*self._messages, {"role": "user", "content": text}]
        so_far = self._text + text
        ids = encode_chat(self._tokenizer, messages) if chat else encode_prompt(self._tokenizer, so_far, raw=True)
        self._check_room(ids.shape[1])
        cache = self._cache_for(ids[0].tolist())
        self._forget_cache()  # until the reply is whole
        report = generate(self._model, self._tokenizer, ids, sampling, on_text, cache=cache)
        self._messages = [*messages, {"role": "assistant", "content": report.text}]
        self._text = so_far + report.text
        # the last token was chosen but never run through the model
        self._computed = [*ids[0].tolist(), *report.token_ids][: cache.get_seq_length()]
        self._cache = cache
        return report

    def _check_room(self, tokens: int) -> None:
        engine = self._model.tiermoe
        room = min(engine.plan.context, engine.longest_context or engine.plan.context)
        if tokens >= room:
            raise PromptError(
                f"the conversation has {tokens:,} tokens, there is room for {room:,} with the answer; "
                f"/clear it, or start with a larger --context"
            )

    def _cache_for(self, ids: list[int]) -> Any:
        """A cache holding the beginning that `ids` shares with what was computed; at least one token is left to run."""
        if self._cache is None:
            return DynamicCache(config=self._model.config)
        shared = 0
        for old, new in zip(self._computed, ids[:-1], strict=False):
            if old != new:
                break
            shared += 1
        surplus = self._cache.get_seq_length() - shared
        if surplus:
            try:
                self._cache.crop(-surplus)
            except RuntimeError:  # a sliding window that has moved on cannot be wound back
                return DynamicCache(config=self._model.config)
        return self._cache

    def _forget_cache(self) -> None:
        self._computed, self._cache = [], None
