"""What a server answers with, and what every dialect asks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tiermoe.generation.sampling import Sampling
from tiermoe.serve.errors import Refused
from tiermoe.serve.grammar import Grammars
from tiermoe.serve.metrics import Metrics
from tiermoe.serve.tools import CallReader, format_of, types_of
from tiermoe.serve.worker import Worker


@dataclass(slots=True)
class Served:
    """name: the model's, for clients. sampling: where a request says nothing. created: seconds since the epoch."""

    name: str
    tokenizer: Any
    worker: Worker
    metrics: Metrics
    engine: Any
    sampling: Sampling
    created: int
    grammars: Grammars

    @property
    def context(self) -> int:
        """Most tokens of a request, prompt and answer."""
        return self.worker.batcher.context

    def check_model(self, name: str) -> None:
        """Refused where a client names another model than this one."""
        if name and name != self.name:
            raise Refused(404, f"the model '{name}' does not exist; this server has '{self.name}'", "model")

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Refused where an id is no token's."""
        most = len(self.tokenizer)
        wrong = next((token for token in ids if not 0 <= token < most), None)
        if wrong is not None:
            raise Refused(400, f"there is no token {wrong}; the vocabulary has {most:,}", param)

    def text_ids(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text, with the tokens that every text begins with unless not `special`."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=special).input_ids
        return ids

    def call_readers(self, tools: Sequence[dict[str, Any]]) -> Callable[[], CallReader | None]:
        """Makes what reads the calls of one answer; None without tools. Refused where it is not known how the model
        writes them."""
        if not tools:
            return lambda: None
        form, types = format_of(getattr(self.tokenizer, "chat_template", None)), types_of(tools)
        if form is None:
            raise Refused(
                400, f"{self.name} has no chat template with tools in a format that this server reads", "tools"
            )
        return lambda: CallReader(form, types)

    def chat_ids(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Token ids of a conversation (role, content) in the model's chat template, ready for the answer. A model of
        texts, without a template, is given what was said, one after the other. Refused where the template does not take
        the messages."""
        if not getattr(self.tokenizer, "chat_template", None):
            return self.text_ids("\n".join(message["content"] for message in messages))
        try:
            encoded = self.tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, add_generation_prompt=True, return_dict=True
            )
        except Exception as error:  # a template refuses what it does not know with errors of its own
            raise Refused(
                400, f"the model's chat template does not take these messages: {error}", "messages"
            ) from error
        ids: list[int] = encoded["input_ids"]
        return ids
