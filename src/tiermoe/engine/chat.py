"""Conversation: turns of a chat, of which the earlier ones are not computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiermoe.engine.engine import engine_of
from tiermoe.engine.generate import Report, encode_chat, encode_prompt, generate
from tiermoe.engine.request_loop import RequestLoop
from tiermoe.engine.sampling import Sampling
from tiermoe.engine.speculation import Speculation
from tiermoe.errors import PromptError
from tiermoe.model.tokenizer import Tokenizer


class Conversation:
    """Messages of a chat with `model` (or an engine), and the keys and values of their tokens.

    A reply runs only the tokens behind the longest prefix that the prefix cache holds. Where a reply is interrupted or
    fails, its turn is dropped and the cache with it.

    system: the system prompt, "" for none; it may change between replies. Without a chat template the text begins with
    it. speculation: as in `RequestLoop`."""

    def __init__(
        self, model: Any, tokenizer: Tokenizer, system: str = "", speculation: Speculation | None = None
    ) -> None:
        self.system = system
        self._speculation = speculation
        self._model = model
        self._tokenizer = tokenizer
        self._messages: list[dict[str, str]] = []
        self._loop: RequestLoop | None = None  # whose prefix cache holds the last turn

    def clear(self) -> None:
        """Forgets everything said, but not the system prompt."""
        self._messages.clear()
        self._loop = None

    def undo(self) -> None:
        """Takes the last message and its answer back."""
        del self._messages[-2:]

    def reply(
        self,
        text: str,
        sampling: Sampling,
        on_text: Callable[[str], None],
        on_read: Callable[[int, int], None] = lambda done, total: None,
    ) -> Report:
        """Answers `text` after everything said before. on_text, on_read: as in `generate`. PromptError where the
        conversation outgrows the context."""
        messages = [*self._messages, {"role": "user", "content": text}]
        if getattr(self._tokenizer, "chat_template", None):
            system = [{"role": "system", "content": self.system}] if self.system else []
            ids = encode_chat(self._tokenizer, system + messages)
        else:
            said = "".join(message["content"] for message in messages)
            ids = encode_prompt(self._tokenizer, self.system + said, raw=True)
        loop = self._loop or RequestLoop(engine_of(self._model), self._tokenizer, speculation=self._speculation)
        if ids.shape[1] >= loop.context:
            raise PromptError(
                f"the conversation has {ids.shape[1]:,} tokens, there is room for {loop.context:,} with the answer; "
                f"/clear it, or start with a larger --context"
            )
        self._loop = None  # until the reply is whole
        report = generate(self._model, self._tokenizer, ids, sampling, on_text, loop=loop, on_read=on_read)
        self._loop = loop
        self._messages = [*messages, {"role": "assistant", "content": report.text}]
        return report
