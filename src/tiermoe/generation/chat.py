"""A conversation whose earlier turns are not computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiermoe.engine.engine import engine_of
from tiermoe.errors import PromptError
from tiermoe.generation.loop import Report, encode_chat, encode_prompt, generate
from tiermoe.generation.sampling import Sampling
from tiermoe.generation.sequence import OnRead, Sequence


class Conversation:
    """The messages of a chat with `model` (or an engine), and the keys and values of their tokens.

    A reply runs only the tokens that follow the longest beginning that the key/value cache holds already. Where a reply
    was interrupted or failed, the turn is dropped and the cache with it.

    `system`: what the model is told before all messages, "" for nothing; it may change between replies. Without a chat
    template the text begins with it.
    """

    def __init__(self, model: Any, tokenizer: Any, system: str = "") -> None:
        self._model, self._engine = model, engine_of(model)
        self._tokenizer = tokenizer
        self.system = system
        self._messages: list[dict[str, str]] = []
        self._text = ""
        self._sequence: Sequence | None = None

    def clear(self) -> None:
        """Forgets everything said, but not the system prompt."""
        self._messages.clear()
        self._text = ""
        self._sequence = None

    def reply(
        self,
        text: str,
        sampling: Sampling,
        on_text: Callable[[str], None],
        on_read: OnRead = lambda done, total: None,
    ) -> Report:
        """Answers `text` after all that was said before. on_read: called as what is new of it is read
        (`Sequence.read`). PromptError where the conversation outgrows the context."""
        chat = bool(getattr(self._tokenizer, "chat_template", None))
        messages = [*self._messages, {"role": "user", "content": text}]
        so_far = self._text + text
        if chat:
            told = [{"role": "system", "content": self.system}] if self.system else []
            ids = encode_chat(self._tokenizer, told + messages)
        else:
            ids = encode_prompt(self._tokenizer, self.system + so_far, raw=True)
        self._check_room(ids.shape[1])
        report = self._answer(ids, sampling, on_text, on_read)
        self._messages = [*messages, {"role": "assistant", "content": report.text}]
        self._text = so_far + report.text
        return report

    def _answer(self, ids: Any, sampling: Sampling, on_text: Callable[[str], None], on_read: OnRead) -> Report:
        sequence = self._sequence or Sequence(self._engine, self._engine.new_cache())
        self._sequence = None  # until the reply is whole
        report = generate(self._model, self._tokenizer, ids, sampling, on_text, sequence=sequence, on_read=on_read)
        self._sequence = sequence
        return report

    def _check_room(self, tokens: int) -> None:
        engine = self._engine
        room = min(engine.plan.context, engine.longest_context or engine.plan.context)
        if tokens >= room:
            raise PromptError(
                f"the conversation has {tokens:,} tokens, there is room for {room:,} with the answer; "
                f"/clear it, or start with a larger --context"
            )
